"""Tests of the encoder-decoder and of prefix LMs: who attends to whom, position biases, schedules and errors."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import encoder_decoder
import pipeline
import sharding
from architectures import declare
from config import preset, replace
from kernels.masked import masked_attention
from pipeline import check, schedules, step
from tests import helpers
from utils import UserError

T5 = preset("t5_tiny", **{"data.batch_size": 2})
PREFIX = preset("tiny", **{"model.n_experts": 0, "model.dense_prefix": 0, "model.n_layers": 2, "model.prefix_lm": True,
                           "model.no_rope_every": 0, "model.d_query_latent": 0, "data.batch_size": 2})  # fmt: skip


def batch_of(cfg, segments_BT, segments_BS=None, prefix_BT=None):
    """Return a batch with these segments; every token is a target."""
    batch = helpers.random_batch(cfg, 0)
    position = lambda x_BT: np.stack([[list(row[: i + 1]).count(one) - 1 for i, one in enumerate(row)] for row in x_BT])
    batch |= {"segments_BT": np.int32(segments_BT), "positions_BT": position(segments_BT).astype(np.int32)}
    batch["weights_BT"] = np.ones_like(batch["weights_BT"])
    if segments_BS is not None:
        batch["encoder_segments_BS"] = np.int32(segments_BS)
        batch["encoder_positions_BS"] = position(segments_BS).astype(np.int32)
    if prefix_BT is not None:
        batch["prefix_BT"] = np.int32(prefix_BT)
    return batch


@functools.cache
def compiled_logits(cfg):
    mesh = sharding.make_mesh(cfg.mesh)
    return mesh, helpers.draw(declare(cfg.model)), pipeline.logits(cfg, mesh)


def changed_by(cfg, batch, name: str, row: int, position: int) -> np.ndarray:
    """Return which logits [B, T] change if one token of the batch changes."""
    mesh, w, logits = compiled_logits(cfg)
    other = dict(batch)
    other[name] = batch[name].copy()
    other[name][row, position] = (batch[name][row, position] + 1) % cfg.model.vocab_size
    before, after = (np.asarray(logits(w, sharding.put(one, mesh))) for one in (batch, other))
    return (before != after).any(axis=-1)


def test_an_input_reaches_all_targets_of_its_example_and_no_others():
    """Catches a causal encoder, cross-attention to other examples or to padding, and attention to later targets."""
    T, S = T5.data.seq_len, T5.data.input_len
    segments_BT = [[1] * 5 + [2] * (T - 7) + [0] * 2] * 2
    segments_BS = [[1] * 9 + [2] * (S - 12) + [0] * 3] * 2
    batch = batch_of(T5, segments_BT, segments_BS)
    for position, segment in (
        (8, 1),
        (9, 2),
        (S - 4, 2),
    ):  # the last input of the first example, the first of the second
        found = changed_by(T5, batch, "encoder_tokens_BS", 1, position)
        assert not found[0].any() and list(found[1]) == [one == segment for one in segments_BT[1]]
    found = changed_by(T5, batch, "tokens_BT", 1, 6)
    assert not found[0].any() and list(found[1]) == [one == 2 and i >= 6 for i, one in enumerate(segments_BT[1])]


def test_an_example_without_inputs_sees_no_other_input():
    """Catches a softmax over no key, which would be the mean of all values of the row."""
    T, S = T5.data.seq_len, T5.data.input_len
    batch = batch_of(T5, [[1] * 5 + [2] * (T - 5)] * 2, [[1] * S] * 2)
    found = changed_by(T5, batch, "encoder_tokens_BS", 0, 3)
    assert list(found[0]) == [i < 5 for i in range(T)]


@pytest.mark.parametrize("mesh", ["data=1", "context=3"])
def test_a_prefix_is_bidirectional_and_its_targets_are_causal(mesh):
    """Catches a mask in which inputs do not see later inputs, or any token sees a later target or another document."""
    cfg = replace(PREFIX, mesh=mesh)
    T = cfg.data.seq_len
    segments_BT = [[1] * 7 + [2] * (T - 9) + [0] * 2] * 2
    inputs = [*range(3), *range(7, 12)]  # of both documents
    batch = batch_of(cfg, segments_BT, prefix_BT=[[int(i in inputs) for i in range(T)]] * 2)
    for position in (1, 4, 10, 13):
        found = changed_by(cfg, batch, "tokens_BT", 0, position)
        same = [one == segments_BT[0][position] for one in segments_BT[0]]
        assert list(found[0]) == [s and (position in inputs or i >= position) for i, s in enumerate(same)], position
        assert not found[1].any()


def test_a_targets_gradient_reaches_later_inputs_and_no_later_target():
    """Catches a mask that hides in the forward pass but not in the backward pass."""
    q, k, v = (jax.random.normal(key, (1, 6, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))
    prefix_S = np.array([1, 1, 1, 0, 0, 0])
    order = np.arange(6)
    seen = jnp.asarray((order[:, None] >= order[None, :]) | (prefix_S > 0)[None, :])[None]
    for query in range(6):
        gradient = jax.grad(lambda v, query=query: masked_attention(q, k, v, seen)[0, query].sum())(v)
        reached = np.abs(np.asarray(gradient)).max(axis=(0, 2, 3)) > 0
        assert list(reached) == [bool(prefix_S[i]) or i <= query for i in range(6)]


def published_bucket(distance: int, bidirectional: bool) -> int:
    """The rule of arXiv:1910.10683, section 2.1, with floats: half of the buckets are exact, the others logarithmic."""
    n, after = (16, 16 if distance < 0 else 0) if bidirectional else (32, 0)
    distance = abs(distance) if bidirectional else max(distance, 0)
    if distance < n // 2:
        return after + distance
    share = math.log(distance / (n // 2)) / math.log(128 / (n // 2))
    return after + min(n - 1, n // 2 + int(share * (n - n // 2) + 1e-6))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_position_buckets_are_those_of_t5(bidirectional):
    """Catches a sign that puts keys after the query into the buckets of keys before it, and other limits."""
    distances = [*range(-200, 201)]
    found = encoder_decoder.bucket(jnp.array(distances), bidirectional)
    assert list(map(int, found)) == [published_bucket(d, bidirectional) for d in distances]
    assert {int(x) for x in found} == set(range(32)) - ({16} if bidirectional else set())


@pytest.mark.parametrize(
    "name, count", [("t5_small", 76_961_152), ("t5_base", 247_577_856), ("t5_xxl", 11_135_332_352)]
)
def test_parameter_counts_equal_the_published_ones(name, count):
    """Catches a missing norm or bias table, or an embedding that is tied."""
    assert sum(d.size for d in sharding.flatten_named(declare(preset(name).model)).values()) == count


def test_every_parameter_has_a_gradient():
    """Catches a part of the model that is declared, but not used."""
    _, _, grads = pipeline.loss_and_grads(T5, sharding.make_mesh("data=1"))(
        helpers.draw(declare(T5.model)), helpers.random_batch(T5, 0), 0
    )
    assert [name for name, g in sharding.flatten_named(grads).items() if not np.any(np.asarray(g))] == []


@pytest.mark.parametrize("name, ticks", [("gpipe", 2 * (2 * 4 + 3)), ("1f1b", None)])
def test_a_microbatch_passes_through_the_stages_twice(name, ticks):
    """Catches a schedule in which the decoder starts before the encoder's last stage is done."""
    cfg = replace(T5, **{"mesh": "stage=4", "model.encoder_layers": 4, "work.schedule": name, "work.microbatches": 4,
                         "data.batch_size": 4})  # fmt: skip
    sched = step.schedule(cfg)
    check.check(sched)
    assert sched.chunks == 2 and sched.microbatches == 4
    assert ticks in (None, sched.ticks)


REFUSED = [
    ({"mesh": "context=2"}, "context"),
    ({"model.attention": "mla"}, "model.attention=mla: a model with an encoder needs attention='gqa'"),
    ({"model.norm": "layer"}, "model.norm=layer: a model with an encoder needs norm='rms'"),
    ({"model.prefix_lm": True}, "model.prefix_lm=True: a model with an encoder needs prefix_lm=False"),
    ({"mesh": "stage=2", "work.schedule": "zb"}, "work.schedule='zb': an encoder-decoder runs gpipe or 1f1b"),
    ({"mesh": "stage=4"}, "cannot split 2 encoder layers of encoder.layers"),
    ({"mesh": "tensor=2", "data.input_len": 27}, "data.input_len=27"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_what_an_encoder_does_not_support_is_refused(settings, message):
    """Catches a wrong result, or a traceback, instead of one line."""
    make = lambda cfg: pipeline.loss_and_grads(cfg, sharding.make_mesh(cfg.mesh))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        make(preset("t5_tiny", **settings))
    assert "\n" not in str(error.value)


def test_gpipe_with_chunks_runs_every_operation_once():
    """Catches an order in which a chunk starts before its input exists."""
    for S, M, v, passes in ((2, 3, 2, 1), (4, 2, 3, 2), (1, 2, 2, 1)):
        sched = schedules.gpipe(S, M, v, passes=passes)
        check.check(sched)
        assert len(sched.orders[0]) == 2 * M * v * passes
