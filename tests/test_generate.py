"""A sample is drawn from what the model says: the cache changes how often a token is computed, not what comes out."""

import contextlib
import dataclasses
import functools
import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import generate
import model
import optimizer
import pipeline
import sharding
from config import Config, ModelConfig, preset, replace
from data import tokenizers
from generate import Request, Sampler
from tests import helpers, parity
from train import checkpoint
from utils import UserError

ROOT = Path(__file__).parent.parent
BYTES = tokenizers.load("bytes")
EOT, V = BYTES.eot_token, BYTES.n_vocab


def one_device():
    return sharding.make_mesh("", jax.local_devices()[:1])


# The cache ------------------------------------------------------------------------------------------------------------

# Latents of queries too, MoE with bias and shared experts, dense prefix; dense layers of its blocks have no rotary.
TINY = preset("tiny", **{"model.no_rope_every": 2})
CONFIGS = {
    "tiny": TINY,
    "mla without query latent, dense, tied": replace(
        TINY, **{"model.d_query_latent": 0, "model.n_experts": 0, "model.n_layers": 2, "model.dense_prefix": 0,
                 "model.no_rope_every": 0, "model.tie_embeddings": True}),
    "gqa, softmax router, no bias, none shared": replace(
        TINY, **{"model.attention": "gqa", "model.router": "softmax", "model.balance_rate": 0.0, "model.n_shared": 0,
                 "model.n_layers": 3, "model.moe_every": 1, "model.no_rope_every": 2, "model.activation": "gelu"}),
}  # fmt: skip


def full_forward(cfg: Config, params, tokens_BT):
    """Logits [B, T, V] of whole rows at once, as in training."""
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
    """Catches a wrong slot, position, mask, layer number or absorbed projection; padding of a prompt that is looked at;
    a token that depends on its neighbours in the batch."""
    cfg = CONFIGS[name]
    T, lengths_B = cfg.data.seq_len, np.array([1, 7, 12])
    params = helpers.draw(model.declare(cfg.model), seed=1)
    tokens_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (3, T), dtype=np.int32)
    want_BTV = full_forward(cfg, params, tokens_BT)

    extend = generate.extend(cfg.model, one_device())
    s = lengths_B.max()
    prompts_Bs = np.where(np.arange(s) < lengths_B[:, None], tokens_BT[:, :s], 3)
    positions_Bs = np.tile(np.arange(s, dtype=np.int32), (3, 1))
    cache = generate.empty_cache(cfg.model, one_device(), 3, T)
    got_BV, cache = extend(params, cache, prompts_Bs, positions_Bs, lengths_B - 1)
    rows = np.arange(3)
    for at_B in [lengths_B + n for n in range(T)]:
        known = at_B <= T  # a row that is full goes on, past its last slot, and is not looked at
        # Float32, other order of sums.
        np.testing.assert_allclose(got_BV[known], want_BTV[rows, np.minimum(at_B, T) - 1][known], rtol=1e-4, atol=1e-4)
        tokens_B1 = tokens_BT[rows, np.minimum(at_B, T - 1)][:, None]
        got_BV, cache = extend(params, cache, tokens_B1, at_B[:, None], np.zeros(3, np.int32))
    assert want_BTV.std() > 0.3, "logits this flat would agree whatever the cache holds"


@pytest.mark.parametrize("n_heads, compute, itemsize", [(4, "float32", 4), (8, "bfloat16", 2)])
def test_the_latent_cache_holds_latents_and_rotary_keys_only(n_heads, compute, itemsize):
    """Catches a cache of keys and values of heads, or of another number format than activations have."""
    c = preset("tiny", **{"model.n_heads": n_heads, "model.precision.compute": compute}).model
    size = lambda slots: sum(x.nbytes for x in jax.tree.leaves(generate.empty_cache(c, one_device(), 3, slots)))
    assert size(1) == 3 * c.n_layers * (c.d_kv_latent + c.d_rope) * itemsize
    assert size(7) == 7 * size(1)


# Any mesh -------------------------------------------------------------------------------------------------------------

GQA = CONFIGS["gqa, softmax router, no bias, none shared"]
OVERLAPPED = {"work.gather": "step", "work.tensor_exchange": "ring"}
ON_MESHES = [
    *[(preset("tiny"), mesh) for mesh in ("data=3", "stage=2", "fsdp=2", "expert=2", "context=2", "tensor=2")],
    *[(preset("tiny"), mesh) for mesh in ("stage=2,fsdp=2", "fsdp=2,expert=2", "context=2,tensor=2")],
    *[(GQA, mesh) for mesh in ("stage=2,tensor=2", "context=2,tensor=2")],
    *[(replace(cfg, **OVERLAPPED), mesh) for cfg, mesh in ((preset("tiny"), "stage=2,tensor=2"), (GQA, "tensor=2"))],
]


@functools.cache
def continued(cfg: Config, mesh: str):
    """What three requests draw, token by token, and the logits they drew from, on a mesh."""
    mesh, declarations = sharding.make_mesh(mesh), model.declare(cfg.model)
    place = lambda x, shape: jax.device_put(x, shape.sharding)
    params = jax.tree.map(place, helpers.draw(declarations, seed=1), sharding.shapes(declarations, mesh))
    sampler, logits = Sampler(cfg, params, BYTES, mesh), []

    def extend(*args, run=sampler.extend):
        logits_bV, cache = run(*args)
        logits.append(np.asarray(logits_bV[:3]))
        return logits_bV, cache

    sampler.extend = extend
    asked = ("abcde", 5, 0.0), ("b", 4, 0.0), ("cdefghi", 6, 1.5)
    requests = [Request(text, tokens=n, temperature=temperature, seed=3) for text, n, temperature in asked]
    return list(sampler.ids(requests)), np.stack(logits)


@pytest.mark.parametrize("cfg, mesh", ON_MESHES, ids=[f"{cfg.model.attention} {mesh}" for cfg, mesh in ON_MESHES])
def test_the_mesh_changes_where_a_text_is_made_not_what(cfg, mesh):
    """Catches a stage that works before its turn, on another's cache or with its layer numbers; heads or words in the
    wrong place; a dummy token that is written to the cache; a partial sum; noise that depends on the devices; where the
    program was compiled before, collectives of branches that hang (stage=2,fsdp=2)."""
    (want, want_logits), (got, got_logits) = continued(replace(cfg, **parity.PLAIN), "data=1"), continued(cfg, mesh)
    assert got == want
    # Float32, other order of sums.
    np.testing.assert_allclose(got_logits, want_logits, rtol=0, atol=2e-5 * np.abs(want_logits).max())


# Whole samples from a real model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """A model of random weights that never ends a text: the logit of end of text is 0, that of the likeliest is not."""
    params = helpers.draw(model.declare(TINY.model), seed=1)
    params.unembedding_DV[:, EOT] = 0
    return Sampler(TINY, jax.device_put(params), BYTES)


def drawn(sampler, *requests):
    """What was drawn for each request, without the Nones after its end."""
    steps = list(sampler.ids(list(requests)))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


def test_greedy_is_the_argmax_of_the_full_forward(tiny):
    """Catches a draw from the logits of another position, and a temperature of 0 that is not the likeliest token."""
    prompt = [EOT, *b"ac"]
    (ids,) = drawn(tiny, Request("ac", tokens=15, temperature=0, seed=5))
    assert len(ids) == 15 and len(set(ids)) > 3
    row_T = np.array(prompt + ids, np.int32)
    # Three rows of NumPy weights, as above: no other program is compiled.
    logits_TV = full_forward(TINY, jax.device_get(tiny.params), np.stack([row_T] * 3))[0]
    assert ids == np.argmax(logits_TV[:, :V], axis=-1)[len(prompt) - 1 : -1].tolist()


def test_a_request_does_not_notice_its_batch(tiny):
    """Catches settings of one row applied to another, noise keyed by the place in the batch, padding that is attended
    to, and an end that is taken from the longest."""
    requests = [
        Request("abcde", tokens=12, temperature=1.5, top_k=0, top_p=1.0, seed=3),
        Request("bcdefg", tokens=10, temperature=0, seed=3),
        Request("tuvwxyz", tokens=9, temperature=2.0, top_k=4, top_p=0.9, seed=9),
    ]
    alone = [drawn(tiny, request)[0] for request in requests]
    assert [len(ids) for ids in alone] == [12, 10, 9]
    assert drawn(tiny, *requests) == alone
    assert drawn(tiny, *requests[::-1]) == alone[::-1]
    other_seed = dataclasses.replace(requests[0], seed=4)
    assert drawn(tiny, other_seed, requests[1], requests[2])[0] != alone[0]


# The rule: a model that is certain ------------------------------------------------------------------------------------

RULE = Config(
    model=ModelConfig(vocab_size=272, d_model=48, n_layers=1, n_heads=2, attention="gqa", n_kv_heads=1, d_head=12,
                      d_ff=64, precision=TINY.model.precision),
    data=dataclasses.replace(TINY.data, seq_len=24, batch_size=16),
    optim=dataclasses.replace(TINY.optim, lr=2e-2, warmup_steps=10),
    run=dataclasses.replace(TINY.run, steps=200),
)  # fmt: skip


def follow(byte):
    """The byte after a byte: three further, around in the 90 characters from ! to z."""
    return 33 + (byte - 33 + 3) % 90


def rule_text(prompt: str, tokens: int) -> str:
    for _ in range(tokens):
        prompt += chr(follow(ord(prompt[-1])))
    return prompt


@pytest.fixture(scope="module")
def certain():
    """The state of a one-layer model that was trained until it follows the rule."""
    mesh, rng = one_device(), np.random.default_rng(0)
    B, T = RULE.data.batch_size, RULE.data.seq_len
    step, state = optimizer.train_step(RULE, mesh), optimizer.init(RULE, mesh)
    batch = {"positions_BT": np.tile(np.arange(T, dtype=np.int32), (B, 1)), "segments_BT": np.ones((B, T), np.int32)}
    for _ in range(RULE.run.steps):
        rows_BT = [np.full(B, EOT), rng.integers(33, 123, B)]
        while len(rows_BT) <= T:
            rows_BT.append(follow(rows_BT[-1]))
        rows_BT = np.stack(rows_BT, axis=1).astype(np.int32)
        weights_BT = (rows_BT[:, :-1] != EOT).astype(np.float32)  # what follows end of text is no rule
        batch |= {"tokens_BT": rows_BT[:, :-1], "targets_BT": rows_BT[:, 1:], "weights_BT": weights_BT}
        state, metrics = step(state, sharding.put(batch, mesh))
    assert metrics["loss"] < 0.02
    return state


@pytest.fixture(scope="module")
def run_directory(certain, tmp_path_factory):
    """What a finished run leaves, as far as sampling reads it."""
    directory = tmp_path_factory.mktemp("runs") / "rule"
    with checkpoint.open_directory(directory / "checkpoints") as manager:
        checkpoint.save(manager, 200, certain, {})
    about = {"config": RULE.to_dict(), "data": {"tokenizer": {"name": "bytes"}}}
    (directory / "config.json").write_text(json.dumps(about))
    return directory


@pytest.fixture(scope="module")
def rule(run_directory):
    return generate.load(str(run_directory))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_certain_model_reproduces_its_rule(rule, temperature):
    """Catches tokens, positions or parameters that do not mean in sampling what they mean in training."""
    prompts = ["!", "Nx", "abcy"]  # a letter between that breaks the rule: only the last byte counts
    texts = rule.texts([Request(prompt, tokens=18, temperature=temperature) for prompt in prompts])
    assert texts == [rule_text(prompt, 18) for prompt in prompts]


def test_experts_drop_no_token_of_a_sample():
    """Catches a capacity that one decoded token cannot fill, and texts that depend on the length of the prompt."""
    assert Sampler(replace(TINY, **{"model.capacity_factor": 1.0}), {}, BYTES).c == TINY.model


def test_shapes_are_bucketed(rule):
    """Catches a compilation for every length of prompt: seconds each."""
    sampler = Sampler(replace(RULE, **{"data.seq_len": 256}), rule.params, BYTES)
    sizes = []
    for length in (5, 6, 7, 200, 190):
        sampler.texts([Request("x" * length, tokens=3, seed=length)])
        sizes.append(sampler.extend._cache_size())
    assert sizes == [2, 2, 2, 4, 4]  # prefill and decode of 16 slots, of 256


# Choosing a token -----------------------------------------------------------------------------------------------------


def np_probabilities(logits_V, temperature, top_k, top_p):
    """Of each token, by a loop over tokens from the likeliest; of equals, the first."""
    likely = helpers.np_softmax(np.float64(logits_V) / temperature)
    order = sorted(range(len(likely)), key=lambda token: (-likely[token], token))
    order = order[: top_k or None]
    mass, kept = likely[order].sum(), []
    for token in order:
        if kept and top_p < 1 and likely[kept].sum() / mass >= top_p:
            break
        kept.append(token)
    probabilities_V = np.zeros(len(likely))
    probabilities_V[kept] = likely[kept] / likely[kept].sum()
    return probabilities_V


SETTINGS = [(t, k, p) for t in (0.3, 1.0, 2.5) for k in (0, 1, 5, 37, 90) for p in (1e-50, 0.23, 0.71, 0.94, 1.0)]


@pytest.mark.parametrize("ties", [False, True])
def test_filtered_logits_equal_a_reference(ties):
    """Catches top_p before top_k or temperature, a bound off by one, a lost tie, top_k beyond the vocabulary, top_p = 1
    that drops a token, and a token put back in another's place."""
    logits_BV = np.random.default_rng(1).normal(0, 2, (len(SETTINGS), 37)).astype(np.float32)
    if ties:  # at most 5 different values
        logits_BV = np.float32(0.7) * np.clip(np.round(logits_BV), -2, 2)
    temperature_B, top_k_B, top_p_B = (np.array(x) for x in zip(*SETTINGS, strict=True))
    got_BV = np.asarray(jax.jit(generate.filtered)(logits_BV, np.float32(temperature_B), top_k_B, np.float32(top_p_B)))
    for row, settings in enumerate(SETTINGS):
        want_V = np_probabilities(logits_BV[row], *settings)
        got_V = helpers.np_softmax(np.float64(got_BV[row]))
        np.testing.assert_array_equal(got_BV[row] > -np.inf, want_V > 0, err_msg=f"{settings}")
        np.testing.assert_allclose(got_V, want_V, atol=1e-6, err_msg=f"{settings}")


def test_of_equal_tokens_the_first_are_kept():
    """Catches more than top_k tokens where some tie, and one more than top_p needs where its bound is met exactly."""
    equal_2V = np.zeros((2, 8), np.float32)
    got_2V = generate.filtered(equal_2V, np.ones(2, np.float32), np.array([3, 0]), np.array([1, 0.5], np.float32))
    np.testing.assert_array_equal(np.sum(np.asarray(got_2V) > -np.inf, axis=0), [2, 2, 2, 1, 0, 0, 0, 0])


def test_top_p_of_one_keeps_every_token():
    """Catches a running sum that reaches 1 by rounding: most of a large vocabulary would be out of reach."""
    logits_1V = np.zeros((1, 100_000), np.float32)
    logits_1V[0, 7] = 16
    one = np.ones(1, np.float32)
    assert np.all(np.asarray(generate.filtered(logits_1V, one, np.zeros(1, np.int32), one)) > -np.inf)


def choose(logits_BV, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, count=0, vocabulary=None):
    full = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), len(logits_BV))
    vocabulary = vocabulary or logits_BV.shape[1]
    return np.asarray(generate.choose(
        logits_BV, full(temperature, np.float32), full(top_k, np.int32), full(top_p, np.float32),
        full(seed, np.uint32), full(count, np.int32), vocabulary=vocabulary))  # fmt: skip


N = 5000


@pytest.mark.parametrize("varied", ["seed", "count"])
def test_tokens_are_drawn_as_often_as_they_are_likely(varied):
    """Catches noise that is not Gumbel's, that is added before the temperature, or that repeats."""
    logits_V = np.array([0.5, -1.0, 1.2, 0.1, -0.4, 2.0, 9.0], np.float32)  # the last one is a padding row
    drawn_N = choose(np.tile(logits_V, (N, 1)), temperature=1.3, top_k=5, vocabulary=6, **{varied: np.arange(N)})
    want_V = N * np_probabilities(logits_V[:6], 1.3, 5, 1.0)
    count_V = np.bincount(drawn_N, minlength=6)
    assert len(count_V) == 6 and count_V[1] == want_V[1] == 0
    kept = want_V > 0
    # 18.47: a fair draw from 5 tokens exceeds it once in 1000 (chi-square, 4 degrees of freedom); the seeds are fixed.
    assert np.sum((count_V - want_V)[kept] ** 2 / want_V[kept]) < 18.47


def test_temperature_to_zero_is_greedy():
    """Catches a division by 0, and noise that a small temperature does not drown."""
    logits_BV = np.random.default_rng(2).normal(size=(60, 37)).astype(np.float32)
    for temperature in (0.0, 2e-38, 1e-30, 1e-5):  # at 2e-38 several logits would be infinite
        got_B = choose(10 * logits_BV, temperature=temperature, seed=np.arange(60))
        np.testing.assert_array_equal(got_B, np.argmax(logits_BV, axis=-1))
    np.testing.assert_array_equal(choose(0 * logits_BV, temperature=0.0, seed=np.arange(60)), 0)  # of equals, the first
    assert np.any(choose(logits_BV, seed=np.arange(60)) != np.argmax(logits_BV, axis=-1))


# The loop around a model that says what we like -----------------------------------------------------------------------


class Scripted(Sampler):
    """A sampler whose model is a function of the last token; padding rows of its table always have the largest logits.

    `calls` holds the positions of every call.
    """

    def __init__(self, next_token, cfg=TINY, encoding=BYTES):
        super().__init__(cfg, {}, encoding)
        self.calls = []

        def extend(params, cache, tokens_bs, positions_bs, last_b):
            self.calls.append(positions_bs)
            logits_bV = np.zeros((len(tokens_bs), cfg.model.vocab_size), np.float32)
            logits_bV[:, encoding.n_vocab :] = 1e9
            for row, last in enumerate(last_b):
                logits_bV[row, next_token(int(tokens_bs[row, last]))] = 1e6
            return logits_bV, cache

        self.extend = extend


def test_a_text_ends_at_end_of_text_at_tokens_and_at_the_last_position():
    """Catches a text that runs into the next document, shows the token between, or ends early; a step too many; a row
    that ends with another; padding rows that are drawn."""
    sampler = Scripted(lambda token: EOT if token == ord("d") else token + 1)
    assert sampler.texts([Request("a", tokens=50)]) == ["abcd"]
    assert len(sampler.calls) == 4  # a, b, c, d
    sampler.calls.clear()
    assert sampler.texts([Request("A", tokens=5), Request("a", tokens=7), Request("xyz", tokens=1)]) == [
        "ABCDEF", "abcd", "xyz{"]  # fmt: skip
    assert len(sampler.calls) == 5
    # End of text, prompt and what is drawn fill 18 positions: 1 + 1 + 16, and 1 + 16 + 1.
    sampler.calls.clear()
    assert sampler.texts([Request("A", tokens=99), Request("0" * 16, tokens=99)]) == [
        "ABCDEFGHIJKLMNOPQ", "0" * 16 + "1"]  # fmt: skip
    assert len(sampler.calls) == 16 and sampler.calls[-1][0] == 16  # the last token drawn is not looked up
    with pytest.raises(UserError) as error:
        sampler.texts([Request("0" * 17)])
    assert str(error.value) == (
        "a prompt of 17 tokens and the end of text before it leave no room in data.seq_len=18 positions; "
        "shorten it to at most 16 tokens"
    )


def test_positions_follow_the_prompt():
    """Catches a decoded token that is put where the padded prompt ends, or where another row is."""
    sampler = Scripted(lambda token: token + 1)
    sampler.texts([Request("a", tokens=3), Request("abcde", tokens=3)])
    assert [positions_bs[:2].tolist() for positions_bs in sampler.calls[1:]] == [[[2], [6]], [[3], [7]]]


def test_an_empty_prompt_is_continued():
    """Catches a prompt without end of text before it: there would be nothing to continue."""
    assert Scripted(lambda token: ord("d") if token == EOT else token + 1).texts([Request("", tokens=3)]) == ["def"]


def test_what_is_streamed_is_the_text():
    """Catches a character that is cut in two because its bytes are separate tokens, a text that is printed twice, rows
    that are mixed up, and bytes at the end that are lost."""
    text = "né→😀"
    after = dict(zip(text.encode(), text.encode()[1:], strict=False))
    sampler, streamed = Scripted(lambda token: after.get(token, 0xE2)), []
    requests = [Request("n", tokens=9), Request("n", tokens=3)]
    texts = sampler.texts(requests, stream=lambda row, piece: streamed.append((row, piece)))
    assert len(set(text.encode())) == len(text.encode()) == 10
    assert texts == ["né→😀", "né\ufffd"]  # the second ends within a character
    for row, want in enumerate(("é→😀", "é\ufffd")):
        assert [piece for at, piece in streamed if at == row] == list(want)


def test_a_seed_of_any_size_is_a_seed():
    """Catches an overflow, and two seeds that are one."""
    logits_BV = np.zeros((50, 60), np.float32)
    negative, large = (choose(logits_BV, seed=seed % 2**32, count=np.arange(50)) for seed in (-1, 2**31))
    assert np.any(negative != large)
    assert Scripted(lambda token: token + 1).texts([Request("a", tokens=1, seed=-(2**70))]) == ["ab"]


# The command ----------------------------------------------------------------------------------------------------------


def run(*argv, stdin=b""):
    """Run the command in this process: exit status, what it printed, what it complained about."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = generate.main([str(word) for word in argv])
        except SystemExit as exit:  # from the parser
            status = exit.code
        finally:
            sys.stdin = before
    return status, out.getvalue(), err.getvalue()


def requests_of(*argv, stdin=b"", monkeypatch):
    """The requests a command line makes."""
    made = []
    monkeypatch.setattr(generate, "load", lambda directory, mesh: directory)
    monkeypatch.setattr(generate, "show", lambda sampler, requests, as_json: made.extend(requests))
    assert run("runs/none", *argv, stdin=stdin) == (0, "", "")
    return made


def test_prompts_come_from_flags_files_and_standard_input(tmp_path, monkeypatch):
    """Catches a source that is ignored, a line that is cut at a form feed or keeps its line end, settings of flags that
    do not reach every text, and settings of a line that do not win."""
    ask = lambda *argv, **more: requests_of(*argv, **more, monkeypatch=monkeypatch)
    assert ask() == [Request("")]
    assert ask("--prompt", "") == [Request("")]
    flags = "--tokens 5 --temperature 0.5 --top-k 7 --top_p 0.9 --seed 3".split()
    want = dict(tokens=5, temperature=0.5, top_k=7, top_p=0.9)
    assert ask("--prompt", "a", "b c", *flags) == [Request("a", **want, seed=3), Request("b c", **want, seed=4)]

    text = 'd\x0ce\u2028 f\r\n\n{"prompt": "g\\nh", "top_k": 2, "temperature": 1}\n{"seed": 9}\n'
    (tmp_path / "prompts").write_text(text, encoding="utf-8", newline="")
    listed = [
        Request("d\x0ce\u2028 f", **want, seed=4),
        Request("g\nh", **want | {"top_k": 2, "temperature": 1}, seed=5),
        Request("", **want, seed=9),
    ]
    flags = ["--prompt", "a", *flags, "--prompts"]
    assert ask(*flags, tmp_path / "prompts") == [Request("a", **want, seed=3), *listed]
    assert ask(*flags, "-", stdin=text.encode()) == [Request("a", **want, seed=3), *listed]


def test_the_command_continues_a_text(run_directory):
    """Catches a command that works in tests only: a process of its own, UTF-8 through a pipe, the text as it grows."""
    process = subprocess.run(
        [sys.executable, "generate.py", run_directory, "--prompts", "-", "--tokens", "9", "--temperature", "0"],
        input="→!".encode(), cwd=ROOT, capture_output=True, timeout=120,
    )  # fmt: skip
    assert process.stderr.decode() == f"reading    step 200 of {run_directory}/checkpoints\n"
    assert process.stdout.decode() == rule_text("→!", 9) + "\n"
    assert process.returncode == 0


def test_the_command_prints_what_it_is_asked_for(run_directory):
    """Catches continuations in the wrong order, JSON that cannot be read back, and a cut text that is passed off as
    whole."""
    argv = [run_directory, "--prompt", "!", "b", "--temperature", "0", "--seed", "4"]
    status, out, err = run(*argv, "--tokens", "20")
    assert (status, err.count("\n")) == (0, 1), "which step it reads, and nothing else"
    assert out == f"--- 0\n{rule_text('!', 20)}\n--- 1\n{rule_text('b', 20)}\n"
    status, out, err = run(*argv, "--json")
    assert status == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"prompt": prompt, "tokens": 200, "temperature": 0, "top_k": 50, "top_p": 0.95, "seed": seed,
         "text": rule_text(prompt, 22)} for prompt, seed in (("!", 4), ("b", 5))]  # fmt: skip
    assert err.splitlines()[-1] == (
        "note: text 1 ends after 22 tokens at most: no more of 200 tokens fit behind its prompt in data.seq_len=24"
    )


def test_the_command_works_on_a_mesh(run_directory):
    """Catches a mesh that is read and not used, one prompt that cannot be split over it, and a traceback where a
    parameter cannot."""
    argv = [run_directory, "--prompt", "!", "--tokens", "9", "--temperature", "0", "--devices", "8", "--mesh"]
    assert run(*argv, "fsdp=2,context=2")[:2] == (0, rule_text("!", 9) + "\n")
    assert run(*argv, "tensor=2")[2].startswith("error: cannot split G=1 of ")
    assert run(*argv, "data=16")[2] == (
        "error: mesh data=16 needs 16 devices, and there are 8; --devices 16 simulates them\n"
    )
    status, _, err = run(run_directory, "--devices", "-1")
    assert status == 2 and "devices=-1: must be at least 0" in err


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--top-p 0", "top_p=0.0: must be above 0 and at most 1; 1 keeps every token"),
        ("--top-p 1.5", "top_p=1.5: must be above 0 and at most 1; 1 keeps every token"),
        ("--top-p nan", "top_p=nan: must be above 0 and at most 1; 1 keeps every token"),
        ("--top-k -1", "top_k=-1: must be at least 0"),
        ("--temperature -0.1", "temperature=-0.1: must be at least 0, and finite"),
        ("--temperature nan", "temperature=nan: must be at least 0, and finite"),
        ("--tokens 0", "tokens=0: must be at least 1"),
        ("--prompts HERE/none.txt", "[Errno 2] No such file or directory: 'HERE/none.txt'"),
        ("--prompt \udcff", r"prompt '\udcff': not UTF-8 (surrogates not allowed at character 0)"),
        ("", "HERE/run: no config.json there; give a run's directory, e.g. runs/laptop"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(tmp_path, argv, message):
    """Catches a traceback, an exit status of 0, a message that does not say what was asked."""
    here = lambda text: text.replace("HERE", str(tmp_path))
    assert run(tmp_path / "run", *here(argv).split()) == (2, "", f"error: {here(message)}\n")


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"prompt": "b"', "begins like JSON and is not (Expecting ',' delimiter: line 1 column 15 (char 14)): "
         """'{"prompt": "b"'; a text goes in {"prompt": ".."}"""),
        (b'{"topk": 3}', "'topk' is not a setting; did you mean 'top_k'? "
         "known: tokens, temperature, top_k, top_p, seed, prompt"),
        (b'{"top_k": "3"}', "top_k='3': should be a whole number"),
        (b'{"prompt": 3}', "prompt=3: should be text"),
        (b'{"seed": true}', "seed=True: should be a whole number"),
        (b'{"top_p": 0}', "top_p=0: must be above 0 and at most 1; 1 keeps every token"),
        (b"caf\xe9", r"not UTF-8 (unexpected end of data at byte 3): b'caf\xe9'"),
        (b'{"prompt": "\xe9"}', "not UTF-8 (invalid continuation byte at byte 12): b'{\"prompt\": \"\\xe9\"}'"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong_is_named(tmp_path, line, message):
    """Catches a message that does not say where, and a line of JSON that is continued as if it were a text."""
    file = tmp_path / "prompts"
    file.write_bytes(b"a\n\n" + line + b"\n")
    assert run("none", "--prompts", file) == (2, "", f"error: {file}:3: {message}\n")
    place = "standard input"
    assert run("none", "--prompts", "-", stdin=file.read_bytes()) == (2, "", f"error: {place}:3: {message}\n")


def test_no_prompt_at_all_is_refused(tmp_path):
    """Catches a file that was never filled, continued as one empty prompt."""
    (tmp_path / "prompts").write_text("\n\n")
    status, out, err = run("none", "--prompts", tmp_path / "prompts")
    assert (status, out) == (2, "")
    assert (
        err == f'error: {tmp_path}/prompts: no prompt in it; a line is a text, or JSON {{"prompt": "..", "top_k": 5}}\n'
    )


def test_a_run_that_cannot_be_read_is_refused(tmp_path, run_directory):
    """Catches a traceback where a run was not started, cut short, or has saved nothing yet."""
    config = (run_directory / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert run(tmp_path) == (2, "", f"error: no checkpoint in {tmp_path}/checkpoints\n")
    (tmp_path / "config.json").write_text(config[:80])
    status, out, err = run(tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {tmp_path}/config.json is not the config.json of a training run (JSONDecodeError(")
    (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(config)["config"], "data": None}))
    assert f"{tmp_path} holds converted weights, which name no tokenizer" in run(tmp_path)[2]


def test_a_prompt_longer_than_the_sequence_is_refused(run_directory):
    """Catches a prompt that is cut silently, or printed before the command gives up."""
    status, out, err = run(run_directory, "--prompt", "x" * 23)
    assert (status, out) == (2, "")
    assert err.splitlines(keepends=True)[-1] == (
        "error: a prompt of 23 tokens and the end of text before it leave no room in data.seq_len=24 positions; "
        "shorten it to at most 22 tokens\n"
    )
