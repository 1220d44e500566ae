"""Sampling: each setting against a loop over tokens, and draw counts against their probabilities."""

import functools

import jax
import numpy as np
import pytest

from generate import sampling
from generate.request import Request
from generate.sampling import BatchSettings
from tests import helpers

# Choosing a token -----------------------------------------------------------------------------------------------------


def np_probabilities(logits_V, temperature, top_k, top_p):
    """Return the probability of each token, by a loop from the most likely token; ties are in order of ids."""
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


@functools.cache
def compiled_filter():
    return jax.jit(sampling.filter_logits)


def filtered_by(logits_BV, temperature_B, top_k_B, top_p_B, min_p=0.0):
    """Apply `filter_logits` with settings per row, which need not be valid for a Request."""
    zeros, V = np.zeros(len(logits_BV), np.int32), logits_BV.shape[1]
    asked = BatchSettings(*(np.float32(temperature_B), np.int32(np.minimum(top_k_B, V)), np.float32(top_p_B)),
                  np.full(len(zeros), min_p, np.float32), *[zeros] * 4)  # fmt: skip
    return np.asarray(compiled_filter()(logits_BV, asked))


@pytest.mark.parametrize("ties", [False, True])
def test_filtered_logits_equal_a_reference(ties):
    """Catches top_p before top_k or temperature, a bound off by one, a lost tie, top_k beyond the vocabulary, top_p = 1
    that drops a token, and a token that is not restored to its place after the sort."""
    logits_BV = np.random.default_rng(1).normal(0, 2, (len(SETTINGS), 37)).astype(np.float32)
    if ties:  # at most 5 different values
        logits_BV = np.float32(0.7) * np.clip(np.round(logits_BV), -2, 2)
    temperature_B, top_k_B, top_p_B = (np.array(x) for x in zip(*SETTINGS, strict=True))
    got_BV = filtered_by(logits_BV, temperature_B, top_k_B, top_p_B)
    for row, settings in enumerate(SETTINGS):
        want_V = np_probabilities(logits_BV[row], *settings)
        got_V = helpers.np_softmax(np.float64(got_BV[row]))
        np.testing.assert_array_equal(got_BV[row] > -np.inf, want_V > 0, err_msg=f"{settings}")
        np.testing.assert_allclose(got_V, want_V, atol=1e-6, err_msg=f"{settings}")


def test_ties_keep_the_lowest_ids():
    """Catches more than top_k tokens in a tie, and one token too many if top_p is reached exactly."""
    equal_2V = np.zeros((2, 8), np.float32)
    got_2V = filtered_by(equal_2V, [1, 1], [3, 0], [1, 0.5])
    np.testing.assert_array_equal(np.sum(got_2V > -np.inf, axis=0), [2, 2, 2, 1, 0, 0, 0, 0])


def test_top_p_of_one_keeps_every_token():
    """Catches a running sum that rounds to 1, which would exclude most of a large vocabulary."""
    logits_1V = np.zeros((1, 100_000), np.float32)
    logits_1V[0, 7] = 16
    assert np.all(filtered_by(logits_1V, [1], [0], [1]) > -np.inf)


def choose(logits_BV, *, count=0, vocabulary=None, seen=(), **settings):
    """Draw tokens. Each setting is one value for all rows, or one per row."""
    B, vocabulary = len(logits_BV), vocabulary or logits_BV.shape[1]
    of_rows = {name: np.broadcast_to(value, B).tolist() for name, value in settings.items()}
    rows = [Request(**dict(temperature=1.0, top_k=0, top_p=1.0) | {k: v[row] for k, v in of_rows.items()})
            for row in range(B)]  # fmt: skip
    asked = BatchSettings.from_rows([*zip(rows, np.broadcast_to(count, B).tolist(), strict=True)], vocabulary)
    seen_BV = np.zeros((B, vocabulary), bool)
    seen_BV[:, [*seen]] = True
    return jax.device_get(sampling.choose(logits_BV, asked, seen_BV, sampling.drawable_ids(vocabulary)))


N = 5000


@pytest.mark.parametrize("varied", ["seed", "count"])
def test_tokens_are_drawn_as_often_as_they_are_likely(varied):
    """Catches noise that is not Gumbel noise, is added before the temperature, or repeats."""
    logits_V = np.array([0.5, -1.0, 1.2, 0.1, -0.4, 2.0, 9.0], np.float32)  # the last one is a padding row
    settings = {"temperature": 1.3, "top_k": 5, varied: np.arange(N)}
    drawn_N = choose(np.tile(logits_V, (N, 1)), vocabulary=6, **settings).token_b
    want_V = N * np_probabilities(logits_V[:6], 1.3, 5, 1.0)
    count_V = np.bincount(drawn_N, minlength=6)
    assert len(count_V) == 6 and count_V[1] == want_V[1] == 0
    kept = want_V > 0
    # 18.47: a fair draw from 5 tokens exceeds it once in 1000 (chi-square, 4 degrees of freedom); the seeds are fixed.
    assert np.sum((count_V - want_V)[kept] ** 2 / want_V[kept]) < 18.47


def test_temperature_to_zero_is_greedy():
    """Catches a division by 0, and noise that still decides at a small temperature."""
    logits_BV = np.random.default_rng(2).normal(size=(60, 37)).astype(np.float32)
    for temperature in (0.0, 2e-38, 1e-30, 1e-5):  # at 2e-38 several logits would be infinite
        got_B = choose(10 * logits_BV, temperature=temperature, seed=np.arange(60)).token_b
        np.testing.assert_array_equal(got_B, np.argmax(logits_BV, axis=-1))
    equal_B = choose(0 * logits_BV, temperature=0.0, seed=np.arange(60)).token_b
    np.testing.assert_array_equal(equal_B, 0)  # the first
    assert np.any(choose(logits_BV, seed=np.arange(60)).token_b != np.argmax(logits_BV, axis=-1))


def test_min_p_is_relative_to_the_most_likely_token():
    """Catches a bound on the absolute probability, or on the probability before the temperature."""
    logits_1V = np.log(np.array([[0.4, 0.05, 0.3, 0.25]], np.float32))
    kept = lambda temperature, min_p: (filtered_by(logits_1V, [temperature], [0], [1], min_p)[0] > -np.inf).tolist()
    assert kept(1.0, 0.0) == [True] * 4
    assert kept(1.0, 0.7) == [True, False, True, False]  # 0.3 / 0.4 is above 0.7, 0.25 / 0.4 below
    assert kept(2.0, 0.7) == [True, False, True, True]  # the square root of 0.25 / 0.4 is 0.79
    assert kept(0.5, 0.7) == [True, False, False, False]


def test_a_penalty_makes_repeated_tokens_less_likely():
    """Catches a negative logit that is divided, which makes it more likely; a penalty for new tokens, after the
    temperature, or missing at temperature 0; and log-probabilities that include the penalty."""
    logits_1V = np.array([[2.0, 1.5, -0.5, -0.6]], np.float32)
    penalty = lambda p, seen: choose(logits_1V, temperature=0.0, repetition_penalty=p, seen=seen)
    assert penalty(1.0, [0]).token_b == [0] and penalty(1.5, [0]).token_b == [1] and penalty(1.5, [0, 1]).token_b == [0]
    assert penalty(1.3, [0]).token_b == [0]  # 1.54
    less = np.asarray(sampling.penalize(logits_1V, np.float32([2]), np.array([[True, False, True, False]])))
    np.testing.assert_array_equal(less, np.float32([[1.0, 1.5, -1.0, -0.6]]))
    want = np.log(helpers.np_softmax(np.float64(logits_1V)))
    assert penalty(1.5, [0]).logprob_b == pytest.approx(want[0, 1], abs=1e-6)


def test_log_probabilities_are_the_models():
    """Catches log-probabilities after temperature or filters, or of another row; alternatives that are not sorted; and
    values that differ from `python -m evaluate` if the table is longer than the vocabulary."""
    logits_BV = np.random.default_rng(5).normal(size=(3, 30)).astype(np.float32)
    want_BV = np.log(helpers.np_softmax(np.float64(logits_BV)))[:, :25]
    got = choose(logits_BV, vocabulary=25, temperature=[0.0, 3.0, 0.3], top_k=7, seed=4, logprobs=[0, 2, 20])
    given = sampling.score_tokens(logits_BV, np.int32([24, 3, 0]), sampling.drawable_ids(25))
    np.testing.assert_allclose(given.logprob_b, want_BV[[0, 1, 2], [24, 3, 0]], atol=1e-6)
    np.testing.assert_allclose(given.logprobs_bA, -np.sort(-want_BV)[:, :20], atol=1e-6)
    np.testing.assert_allclose(got.logprob_b, want_BV[np.arange(3), got.token_b], atol=1e-6)
    order_BV = np.argsort(-want_BV, axis=-1)[:, :20]
    np.testing.assert_array_equal(got.likeliest_bA, order_BV)
    np.testing.assert_allclose(got.logprobs_bA, np.take_along_axis(want_BV, order_BV, axis=-1), atol=1e-6)
    assert not np.any(choose(logits_BV).likeliest_bA), "sorted although no row requests alternatives"


def test_settings_of_other_rows_do_not_change_a_draw():
    """Catches a draw that depends on whether another row is filtered, sorted or sampled."""
    logits_BV = np.random.default_rng(6).normal(size=(2, 50)).astype(np.float32)
    alone = choose(logits_BV, temperature=[1.0, 0.0], top_k=0, seed=range(2))
    beside = choose(logits_BV, temperature=[1.0, 1.0], top_k=[0, 4], seed=range(2), logprobs=[0, 5])
    assert alone.token_b[0] == beside.token_b[0] and alone.logprob_b[0] == beside.logprob_b[0]
