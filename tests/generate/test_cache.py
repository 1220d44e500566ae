"""The cached forward pass gives the logits of the full forward pass, on any mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import model
import pipeline
import sharding
from config import Config, preset, replace
from generate.cache import cache_shapes, cached_forward, empty_cache
from generate.engine import Engine, Job
from generate.request import Request
from tests import helpers, parity
from tests.generate.models import CONFIGS, EOT, V, one_device, placed


def full_forward(cfg: Config, params, tokens_BT):
    """Return logits [B, T, V] of whole rows at once, as in training."""
    B, T = tokens_BT.shape
    batch = {
        "tokens_BT": tokens_BT,
        "targets_BT": tokens_BT,
        "positions_BT": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "segments_BT": np.ones((B, T), np.int32),
        "weights_BT": np.ones((B, T), np.float32),
    }
    return np.asarray(pipeline.logits(cfg, one_device())(params, batch))


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_the_full_forward(name):
    """Catches a wrong slot, position, mask, layer number or absorbed projection; attention to the padding of a prompt;
    a token that depends on other rows of the batch; a window or a sink that is left out."""
    cfg = CONFIGS[name]
    T, lengths_B = cfg.data.seq_len, np.array([1, 7, 12])
    params = helpers.draw(model.declare(cfg.model), seed=1)
    tokens_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (3, T), dtype=np.int32)
    want_BTV = full_forward(cfg, params, tokens_BT)

    run = cached_forward(cfg.model, one_device())
    s = lengths_B.max()
    prompts_Bs = np.where(np.arange(s) < lengths_B[:, None], tokens_BT[:, :s], 3)
    positions_Bs = np.tile(np.arange(s, dtype=np.int32), (3, 1))
    cache = empty_cache(cfg.model, one_device(), 3, T, piece=s)
    got_BV, cache = run(params, cache, prompts_Bs, positions_Bs, lengths_B - 1)
    rows = np.arange(3)
    for at_B in [lengths_B + n for n in range(T)]:
        known = at_B <= T  # a full row continues past its last slot and is not compared
        # Float32, other order of sums.
        np.testing.assert_allclose(got_BV[known], want_BTV[rows, np.minimum(at_B, T) - 1][known], rtol=1e-4, atol=1e-4)
        tokens_B1 = tokens_BT[rows, np.minimum(at_B, T - 1)][:, None]
        got_BV, cache = run(params, cache, tokens_B1, at_B[:, None], np.zeros(3, np.int32))
    assert want_BTV.std() > 0.3, "logits this flat would agree with any cache"


@pytest.mark.parametrize("n_heads, precision, itemsize", [(4, "float32", 4), (8, "mixed", 2)])
def test_the_latent_cache_holds_latents_and_rotary_keys_only(n_heads, precision, itemsize):
    """Catches a cache of keys and values per head, or in another number format than the activations."""
    c = preset("tiny", **{"model.n_heads": n_heads, "model.precision": precision}).model
    size = lambda slots: sum(x.nbytes for x in jax.tree.leaves(empty_cache(c, one_device(), 3, slots)))
    assert size(1) == 3 * c.n_layers * (c.d_kv_latent + c.d_rope) * itemsize
    assert size(7) == 7 * size(1)


@pytest.mark.parametrize("name", ["tiny", "gqa, softmax router, no bias, none shared"])
def test_extending_one_row_equals_extending_all(name):
    """Catches a prompt that is written to the wrong row, chunks at wrong positions, and logits after the wrong
    tokens."""
    cfg, mesh = CONFIGS[name], sharding.make_mesh("fsdp=2,context=2")
    params, B, T, S = placed(cfg, mesh), 6, 7, 10
    tokens_BT = np.random.default_rng(2).integers(0, cfg.model.vocab_size, (B, T), dtype=np.int32)
    positions_BT = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    every_BT = np.tile(np.arange(T), (B, 1))
    whole, one = cached_forward(cfg.model, mesh), cached_forward(cfg.model, mesh, rows=True)
    want_BTV, want = whole(params, empty_cache(cfg.model, mesh, B, S), tokens_BT, positions_BT, every_BT)
    got, got_BTV = empty_cache(cfg.model, mesh, B, S), np.zeros(want_BTV.shape, np.float32)
    for at in (2, 0, 1):  # index among the three rows of each of two devices
        rows = np.array([at, 3 + at])
        for piece in (slice(0, 4), slice(4, T)):
            logits, got = one(params, got, tokens_BT[rows, piece], positions_BT[rows, piece],
                              every_BT[:2, : piece.stop - piece.start], np.full(2, at, np.int32))  # fmt: skip
            got_BTV[rows, piece] = logits
    np.testing.assert_allclose(got_BTV, want_BTV, rtol=0, atol=1e-5)  # float32, other order of sums
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), got, want)


def test_the_cache_is_sharded_over_its_axes():
    """Catches slots, sequences, heads or layers that are replicated."""
    cfg = CONFIGS["gqa, softmax router, no bias, none shared"]
    for mesh, parts in (("context=2,tensor=2", 4), ("fsdp=2,expert=2", 4), ("data=2,context=4", 8), ("stage=2", 2)):
        cache = empty_cache(cfg.model, sharding.make_mesh(mesh), 4, 12)
        for x in jax.tree.leaves(cache):
            assert x.nbytes == parts * x.addressable_shards[0].data.nbytes, mesh


def test_layers_with_windows_have_short_caches():
    """Catches a short cache for a layer that attends to all positions on one of the stages, a long one for a layer that
    does on none, slots that CONTEXT does not divide, and more slots than positions."""
    c, mla = (CONFIGS[name].model for name in ("gqa, windows and sinks", "mla, windows, caps"))

    def slots(c, mesh, piece):
        cache = cache_shapes(c, sharding.make_mesh(mesh), 4, 32, piece=piece)
        return [x.shape[-2] for part in ("prefix", "blocks") for x in jax.tree.leaves(cache[part])[::2]]

    assert slots(c, "data=1", 4) == [8, 8, 32, 8, 8]  # 5 + 4 - 1
    assert slots(c, "stage=2", 4) == [8, 8, 32]  # layer 0; 1 and 3; 2 and 4
    assert slots(c, "stage=2,context=4", 6) == [12, 12, 32]
    assert slots(c, "data=1", 64) == slots(c, "data=1", 0) == [32] * 5
    assert slots(mla, "context=2", 1) == [6] * 5
    assert slots(dataclasses.replace(c, window="5:4"), "stage=2", 4) == [8, 32, 8]  # layer 3 is on the second stage
    every_second = dataclasses.replace(mla, window="5:2")  # the dense layers of blocks, not their MoE layers
    assert slots(every_second, "stage=2", 4) == [8, 32, 8]


# Any mesh -------------------------------------------------------------------------------------------------------------

GQA = CONFIGS["gqa, softmax router, no bias, none shared"]
WINDOWS, LATENT_WINDOWS = CONFIGS["gqa, windows and sinks"], CONFIGS["mla, windows, caps"]
OVERLAPPED = {"work.gather": "step", "work.tensor_exchange": "ring"}
ON_MESHES = [
    *[(preset("tiny"), mesh) for mesh in ("data=3", "stage=2", "fsdp=2", "expert=2", "context=2", "tensor=2")],
    *[
        (preset("tiny"), mesh)
        for mesh in ("stage=2,fsdp=2", "fsdp=2,expert=2", "expert=2,context=2", "context=2,tensor=2")
    ],
    *[(GQA, mesh) for mesh in ("stage=2,tensor=2", "context=2,tensor=2")],
    (CONFIGS["gqa in parallel, LayerNorm, biases, half rotary"], "context=2,tensor=2"),
    *[(replace(cfg, **OVERLAPPED), mesh) for cfg, mesh in ((preset("tiny"), "stage=2,tensor=2"), (GQA, "tensor=2"))],
    *[(WINDOWS, mesh) for mesh in ("data=3", "stage=2,tensor=2", "context=2,tensor=2")],
    (LATENT_WINDOWS, "context=2"),
    (CONFIGS["gqa, biases of experts, clamped"], "expert=2,tensor=2"),
]
REQUESTS = {"abcde": (5, 0.0), "b": (4, 0.0), "cdefghi": (6, 1.5)}  # prompt: new tokens and temperature


@functools.cache
def continued(cfg: Config, mesh: str):
    """Return the tokens of three requests on a mesh, and the logits they were drawn from."""
    mesh = sharding.make_mesh(mesh)
    engine = Engine(cfg, placed(cfg, mesh), mesh, vocabulary=V, end=EOT, slots=3, context=16, piece=4)
    jobs = {name: Job([EOT, *name.encode()], Request(temperature=t, seed=3), room)
            for name, (room, t) in REQUESTS.items()}  # fmt: skip
    logits = {name: [] for name in jobs}

    def kept(logits_nV, given, rows, give=engine.draw_tokens):
        for name, job in jobs.items():
            if job in given:
                logits[name].append(np.asarray(logits_nV[given.index(job)]))
        return give(logits_nV, given, rows)

    engine.draw_tokens = kept
    for job in jobs.values():
        engine.submit(job)
    while not engine.idle:
        engine.step()
    return [[token.id for token in job.tokens] for job in jobs.values()], np.concatenate([*logits.values()])


@pytest.mark.parametrize(
    "cfg, mesh",
    ON_MESHES,
    ids=[f"{cfg.model.attention} {cfg.model.window or cfg.model.norm} {mesh}" for cfg, mesh in ON_MESHES],
)
def test_generated_texts_are_the_same_on_every_mesh(cfg, mesh):
    """Catches a stage that runs too early, or with the cache or layer numbers of another; heads or vocabulary rows in
    the wrong place; a padding token in the cache; a partial sum; noise that depends on the devices; and, if the program
    was compiled before, collectives in branches that hang (stage=2,fsdp=2)."""
    want, want_logits = continued(replace(cfg, **parity.ONE_DEVICE), "data=1")
    got, got_logits = continued(cfg, mesh)
    assert got == want
    # Float32, other order of sums.
    np.testing.assert_allclose(got_logits, want_logits, rtol=0, atol=2e-5 * np.abs(want_logits).max())


@pytest.mark.parametrize("cfg", [WINDOWS, LATENT_WINDOWS], ids=["gqa", "mla"])
def test_a_rolling_cache_gives_the_logits_of_the_full_forward(cfg):
    """Catches a slot that is overwritten before its window ends or read after it, in prefill and in decode, and chunks
    whose padding is written."""
    texts, got = continued(replace(cfg, **parity.ONE_DEVICE), "data=1")
    rows_BT, want = np.zeros((3, 16), np.int32), []
    for row_T, name, text in zip(rows_BT, REQUESTS, texts, strict=True):
        row_T[: 1 + len(name) + len(text)] = [EOT, *name.encode(), *text]
    want_BTV = full_forward(cfg, helpers.draw(model.declare(cfg.model), seed=1), rows_BT)
    for want_TV, name, text in zip(want_BTV, REQUESTS, texts, strict=True):
        want.append(want_TV[len(name) : len(name) + len(text)])
    np.testing.assert_allclose(got, np.concatenate(want), rtol=0, atol=1e-5)  # float32, other order of sums
