"""Scores equal those computed from the full logits, on any mesh and in any batch."""

import functools

import jax
import numpy as np
import pytest

import model
import pipeline
import sharding
from config import MeshConfig, preset, replace
from evaluate.scoring import LEAST_POSITIONS, Scorer
from tests import helpers
from utils import UserError

CFG = preset("tiny", **{"model.capacity_factor": 1.0})  # in training, experts would drop tokens
T, V = CFG.data.seq_len, CFG.model.vocab_size
RNG = np.random.default_rng(3)
# Lengths of contexts and continuations: one token, the maximum, longer, and some between.
SIZES = [(1, 1), (1, T), (T, 1), (9, 4), (T + 12, 5), (T, T), (2, 11), (6, 1), (3, 3)]
PAIRS = [tuple(RNG.integers(0, V, n).tolist() for n in sizes) for sizes in SIZES]


@functools.cache
def weights():
    """Return parameters in which token n + V/2 has the same logit as token n, so that ties are on different devices."""
    params = helpers.draw(model.declare(CFG.model), seed=1)
    params.unembedding_DV[:, V // 2 :] = params.unembedding_DV[:, : V // 2]
    return params


def scorer(mesh="", rows=1):
    mesh_config, declarations = MeshConfig.parse(mesh), model.declare(CFG.model)
    mesh = sharding.make_mesh(mesh_config, None if mesh else jax.local_devices()[:1])
    params = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), weights(), sharding.shapes(declarations, mesh))
    return Scorer(replace(CFG, mesh=mesh_config), params, mesh, rows)


@functools.cache
def log_probabilities():
    """Return log-probabilities [T, V] in float64 for the last T inputs of each pair, and the rows of tokens."""
    cut = [(context + continuation)[-(T + 1) :] for context, continuation in PAIRS]
    tokens_BT = np.array([row[:-1] + [0] * (T + 1 - len(row)) for row in cut], np.int32)
    cfg = replace(CFG, **{"model.capacity_factor": 0.0})
    logits = pipeline.logits(cfg, sharding.make_mesh("", jax.local_devices()[:1]))
    logits_BTV = np.float64(logits(weights(), {"tokens_BT": tokens_BT}))
    return [logits_TV - np.log(np.sum(np.exp(logits_TV), axis=-1, keepdims=True)) for logits_TV in logits_BTV], cut


def expected_scores(pairs):
    """Yield the scores of pairs, by a loop over tokens."""
    tables, cut = log_probabilities()
    for (_, continuation), log_TV, row in zip(pairs, tables, cut, strict=True):
        last = len(row) - 1
        tokens = list(zip(range(last - len(continuation), last), continuation, strict=True))
        yield sum(log_TV[t, token] for t, token in tokens), all(np.argmax(log_TV[t]) == token for t, token in tokens)


def check(found, pairs):
    want = list(expected_scores(pairs))
    # Float32, another order of sums.
    np.testing.assert_allclose([found[n][0] for n in range(len(pairs))], [log for log, _ in want], rtol=1e-5, atol=2e-4)
    assert [found[n][1] for n in range(len(pairs))] == [best for _, best in want]
    return want


def with_likely_ends():
    """Return PAIRS, with three last tokens replaced by the most likely one, or by the later one in its tie."""
    tables, cut = log_probabilities()
    pairs = [(context, list(continuation)) for context, continuation in PAIRS]
    for n, shift in ((0, 0), (2, V // 2), (7, 0)):
        pairs[n][1][-1] = int(np.argmax(tables[n][len(cut[n]) - 2])) + shift
    return pairs


@pytest.mark.parametrize("mesh", ["stage=2,tensor=2", "expert=2,context=2"])
def test_scores_equal_those_of_the_full_logits(mesh):
    """Catches a sum over padding or the context, targets off by one, a cut on the right, tokens dropped by experts,
    and a wrong order of positions or rows. With a sharded vocabulary, it catches a partial sum or maximum, and the
    later token of a tie."""
    pairs = with_likely_ends()
    want = check(dict(scorer(mesh, len(PAIRS)).score(pairs)), pairs)
    assert [best for _, best in want].count(True) == 2


def test_few_shapes_are_compiled():
    """Catches a compilation for every length, a batch whose last rows are lost, and attention between rows."""
    one = scorer(rows=2)
    check(dict(one.score(PAIRS)), PAIRS)
    assert one.scores._cache_size() == len({LEAST_POSITIONS, T})


def test_too_long_continuations_are_refused():
    """Catches a score that only covers the end of the continuation."""
    pairs = [([1], list(range(T + 1)))]
    with pytest.raises(UserError, match=rf"^{T + 1} tokens .* data.seq_len={T}; use --seq_len {T + 1}$"):
        next(scorer().score(pairs))
