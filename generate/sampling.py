"""Sampling: functions that sample a token from logits with the settings of a request."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from generate.request import MOST_ALTERNATIVES, Settings


@struct.dataclass
class BatchSettings:
    """The settings of each row of a batch, as arrays [b]."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array
    count: jax.Array  # tokens generated so far in the row
    alternatives: jax.Array

    @classmethod
    def from_rows(cls, rows: list, vocabulary: int):
        """Build the arrays from each row's (settings, count). A row of None is greedy, and its result is unused."""
        rows = [(Settings(temperature=0), 0) if row is None else row for row in rows]
        array = lambda dtype, read: np.array([read(settings) for settings, _ in rows], dtype)
        return cls(
            temperature=array(np.float32, lambda s: s.temperature),
            top_k=array(np.int32, lambda s: min(s.top_k, vocabulary)),
            top_p=array(np.float32, lambda s: s.top_p),
            min_p=array(np.float32, lambda s: s.min_p),
            repetition_penalty=array(np.float32, lambda s: s.repetition_penalty),
            seed=array(np.uint32, lambda s: s.seed % 2**32),
            count=np.array([count for _, count in rows], np.int32),
            alternatives=array(np.int32, lambda s: s.logprobs),
        )


@struct.dataclass
class DrawnTokens:
    """The token of each row and its log-probability in the model, and the A most likely tokens with theirs.

    Log-probabilities do not include temperature, penalty or top-k. Alternatives are zeros unless a row requests some.
    """

    token_b: jax.Array
    logprob_b: jax.Array
    likeliest_bA: jax.Array
    logprobs_bA: jax.Array


def penalize(logits_bV, penalty_b, seen_bV):
    """Make tokens seen before less likely: divide positive logits by the penalty, and multiply negative ones.

    Source: CTRL, arXiv:1909.05858, section 4.1; for negative logits, transformers.
    """
    penalty_bV = jnp.where(seen_bV, penalty_b[:, None], 1.0)
    return jnp.where(logits_bV > 0, logits_bV / penalty_bV, logits_bV * penalty_bV)


def keep_top_k_top_p(scaled_bV, top_k_b, top_p_b):
    """Set the logits of tokens outside top_k or top_p to -inf. The most likely token is always kept.

    top_p keeps the most likely tokens until their probabilities, after top_k, reach it (arXiv:1904.09751, section 3.1).
    If tokens tie, the lower id counts as more likely.
    """
    order_bV = jnp.argsort(-scaled_bV, axis=-1)
    sorted_bV = jnp.take_along_axis(scaled_bV, order_bV, axis=-1)
    rank_1V = jnp.arange(scaled_bV.shape[-1])[None, :]
    sorted_bV = jnp.where((top_k_b[:, None] == 0) | (rank_1V < top_k_b[:, None]), sorted_bV, -jnp.inf)
    probability_bV = jax.nn.softmax(sorted_bV, axis=-1)
    before_bV = jnp.cumsum(probability_bV, axis=-1) - probability_bV
    # Guard against rounding: the sum can reach 1 before the last token, and a tiny top_p can become 0.
    kept_bV = (before_bV < top_p_b[:, None]) | (top_p_b[:, None] == 1) | (rank_1V == 0)
    place_bV = jnp.argsort(order_bV, axis=-1)
    return jnp.take_along_axis(jnp.where(kept_bV, sorted_bV, -jnp.inf), place_bV, axis=-1)


def filter_logits(logits_bV, asked: BatchSettings):
    """Divide logits by temperature, and set those of excluded tokens to -inf. Sorts only if a row needs it."""
    scaled_bV = logits_bV / jnp.maximum(asked.temperature, 1e-6)[:, None]
    cuts_b = (asked.temperature > 0) & ((asked.top_k > 0) | (asked.top_p < 1))
    cut = lambda scaled_bV: keep_top_k_top_p(scaled_bV, asked.top_k, asked.top_p)
    scaled_bV = jax.lax.cond(jnp.any(cuts_b), cut, lambda scaled_bV: scaled_bV, scaled_bV)
    least_b1 = jnp.max(scaled_bV, axis=-1, keepdims=True) + jnp.log(asked.min_p)[:, None]
    return jnp.where(scaled_bV >= least_b1, scaled_bV, -jnp.inf)


def alternatives(logprobs_bV, asked: BatchSettings):
    """Return the highest log-probabilities of each row and their tokens; zeros if no row requests any."""
    A = min(MOST_ALTERNATIVES, logprobs_bV.shape[-1])
    zeros = lambda x: (jnp.zeros((len(x), A), jnp.float32), jnp.zeros((len(x), A), jnp.int32))
    return jax.lax.cond(jnp.any(asked.alternatives > 0), lambda x: tuple(jax.lax.top_k(x, A)), zeros, logprobs_bV)


def gumbel_noise(seed_b, count_b, vocabulary: int):
    """Return Gumbel noise keyed by each row's seed and token count, independent of the other rows."""
    one = lambda seed, count: jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), (vocabulary,))
    return jax.vmap(one)(seed_b, count_b)


def drawable_ids(vocabulary: int, absent=()):
    """Return a mask [V] that is true for ids that are tokens, and false for those in `absent`."""
    return np.isin(np.arange(vocabulary), absent, invert=True)


def mask_unused(logits_bV, drawable_V):
    """Drop the logits past the tokenizer's vocabulary, and set those of unused ids to -inf."""
    return jnp.where(drawable_V, logits_bV[..., : len(drawable_V)], -jnp.inf)


def log_probabilities(logits_bV, drawable_V):
    """Return the model's log-probabilities, as in training and `python -m evaluate`: the softmax includes the model's
    whole vocabulary. Unused ids are then set to -inf."""
    return mask_unused(jax.nn.log_softmax(logits_bV), drawable_V)


@jax.jit
def score_tokens(logits_nV, token_n, drawable_V) -> DrawnTokens:
    """Score given tokens; the result has the form of `choose`."""
    logprobs_nV = log_probabilities(logits_nV, drawable_V)
    logprob_n = jnp.take_along_axis(logprobs_nV, token_n[:, None], axis=-1)[:, 0]
    logprobs_nA, likeliest_nA = jax.lax.top_k(logprobs_nV, min(MOST_ALTERNATIVES, len(drawable_V)))
    return DrawnTokens(token_n, logprob_n, likeliest_nA, logprobs_nA)


@jax.jit
def choose(logits_bV, asked: BatchSettings, seen_bV, drawable_V) -> DrawnTokens:
    """Sample one token per row.

    seen_bV     mask of the tokens that repetition_penalty applies to
    drawable_V  mask of the ids that may be sampled; the model's vocabulary may be larger
    """
    logprobs_bV = log_probabilities(logits_bV, drawable_V)
    vocabulary, logits_bV = len(drawable_V), mask_unused(logits_bV, drawable_V)
    less_bV = penalize(logits_bV, asked.repetition_penalty, seen_bV)
    draws = lambda: filter_logits(less_bV, asked) + gumbel_noise(asked.seed, asked.count, vocabulary)
    noisy_bV = jax.lax.cond(jnp.any(asked.temperature > 0), draws, lambda: less_bV)
    token_b = jnp.argmax(jnp.where(asked.temperature[:, None] > 0, noisy_bV, less_bV), axis=-1)
    logprob_b = jnp.take_along_axis(logprobs_bV, token_b[:, None], axis=-1)[:, 0]
    logprobs_bA, likeliest_bA = alternatives(logprobs_bV, asked)
    return DrawnTokens(token_b, logprob_b, likeliest_bA, logprobs_bA)
