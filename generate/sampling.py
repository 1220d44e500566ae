"""How a token is chosen from logits, and what may be asked of a request."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from config.fields import Count, NotNegative, Positive, Range, ShareBelow1, Size, check
from errors import UserError

MOST_ALTERNATIVES = 20
Alternatives = Annotated[int, Range(lambda x: 0 <= x <= MOST_ALTERNATIVES, f"must lie from 0 to {MOST_ALTERNATIVES}")]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are continued."""

    tokens: Size = 200  # most tokens to add; fewer if the text ends, or reaches data.seq_len
    temperature: NotNegative = 0.8  # logits are divided by it; 0 takes the likeliest token
    top_k: Count = 50  # only the k likeliest tokens; 0: all
    top_p: float = 0.95  # only the likeliest tokens that together reach this probability; 1: all
    min_p: ShareBelow1 = 0.0  # only tokens at least this share as likely as the likeliest (arXiv:2407.01082); 0: all
    repetition_penalty: Positive = 1.0  # above 1, tokens of the prompt and of the text so far become less likely
    stop: tuple[str, ...] = ()  # texts before which a continuation ends
    seed: int = 0  # same seed, same text; of several prompts, the n-th (from 0) uses seed + n
    logprobs: Alternatives = 0  # with JSON, natural logarithms of probabilities: each token's, and of so many likeliest


@dataclass(frozen=True)
class Request(Settings):
    """One text to continue, and how."""

    prompt: str = ""  # text to continue

    def __post_init__(self):
        check(self)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1; 1 keeps every token")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop={self.stop!r}: should be texts, none of them empty")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt {self.prompt!r}: not UTF-8 ({error.reason} at character {error.start})") from error


@struct.dataclass
class BatchSettings:
    """What rows of logits are to be drawn by, an array [b] each."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array
    count: jax.Array  # how many tokens the row has drawn
    alternatives: jax.Array

    @classmethod
    def from_rows(cls, rows: list, vocabulary: int):
        """Arrays of (settings, count) of each row; None, where nothing is asked: the likeliest is drawn."""
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
    """A token of each row, its log-probability by the model, and the likeliest tokens with theirs.

    Probabilities are those before temperature, penalty and cuts. The likeliest are there if any row asks for some.
    """

    token_b: jax.Array
    logprob_b: jax.Array
    likeliest_bA: jax.Array
    logprobs_bA: jax.Array


def penalize(logits_bV, penalty_b, seen_bV):
    """Make tokens that were there before less likely: logits above 0 are divided, others multiplied.

    Source: CTRL, arXiv:1909.05858, section 4.1, as transformers does it for logits below 0.
    """
    penalty_bV = jnp.where(seen_bV, penalty_b[:, None], 1.0)
    return jnp.where(logits_bV > 0, logits_bV / penalty_bV, logits_bV * penalty_bV)


def keep_top_k_top_p(scaled_bV, top_k_b, top_p_b):
    """-inf for tokens that top_k or top_p leave out; the likeliest always stays.

    top_p keeps the likeliest tokens until their probability, after top_k, reaches it (arXiv:1904.09751, section 3.1).
    Of tokens that tie, those with the lower ids count as likelier.
    """
    order_bV = jnp.argsort(-scaled_bV, axis=-1)
    sorted_bV = jnp.take_along_axis(scaled_bV, order_bV, axis=-1)
    rank_1V = jnp.arange(scaled_bV.shape[-1])[None, :]
    sorted_bV = jnp.where((top_k_b[:, None] == 0) | (rank_1V < top_k_b[:, None]), sorted_bV, -jnp.inf)
    probability_bV = jax.nn.softmax(sorted_bV, axis=-1)
    before_bV = jnp.cumsum(probability_bV, axis=-1) - probability_bV
    # Rounding may bring the sum to 1 before the last token, and a tiny top_p to 0: neither may decide.
    kept_bV = (before_bV < top_p_b[:, None]) | (top_p_b[:, None] == 1) | (rank_1V == 0)
    place_bV = jnp.argsort(order_bV, axis=-1)
    return jnp.take_along_axis(jnp.where(kept_bV, sorted_bV, -jnp.inf), place_bV, axis=-1)


def filter_logits(logits_bV, asked: BatchSettings):
    """Logits over temperature, -inf for tokens that are left out. Nothing is sorted if no row asks for it."""
    scaled_bV = logits_bV / jnp.maximum(asked.temperature, 1e-6)[:, None]
    cuts_b = (asked.temperature > 0) & ((asked.top_k > 0) | (asked.top_p < 1))
    cut = lambda scaled_bV: keep_top_k_top_p(scaled_bV, asked.top_k, asked.top_p)
    scaled_bV = jax.lax.cond(jnp.any(cuts_b), cut, lambda scaled_bV: scaled_bV, scaled_bV)
    least_b1 = jnp.max(scaled_bV, axis=-1, keepdims=True) + jnp.log(asked.min_p)[:, None]
    return jnp.where(scaled_bV >= least_b1, scaled_bV, -jnp.inf)


def alternatives(logprobs_bV, asked: BatchSettings):
    """The likeliest tokens of each row, and their log-probabilities; zeros if no row asks for any."""
    A = min(MOST_ALTERNATIVES, logprobs_bV.shape[-1])
    zeros = lambda x: (jnp.zeros((len(x), A), jnp.float32), jnp.zeros((len(x), A), jnp.int32))
    return jax.lax.cond(jnp.any(asked.alternatives > 0), lambda x: tuple(jax.lax.top_k(x, A)), zeros, logprobs_bV)


def gumbel_noise(seed_b, count_b, vocabulary: int):
    """Gumbel noise keyed by a row's seed and how many tokens it has drawn: by nothing of its neighbours."""
    one = lambda seed, count: jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), (vocabulary,))
    return jax.vmap(one)(seed_b, count_b)


def drawable_ids(vocabulary: int, absent=()):
    """Which of the tokenizer's ids are a token's. absent: those that are none"""
    return np.isin(np.arange(vocabulary), absent, invert=True)


def mask_unused(logits_bV, drawable_V):
    """Logits without the rows of the table past the tokenizer's vocabulary, and -inf for ids of no token."""
    return jnp.where(drawable_V, logits_bV[..., : len(drawable_V)], -jnp.inf)


def log_probabilities(logits_bV, drawable_V):
    """The model's, as training and `python -m evaluate` have them: all rows of the table share the 1, those of no token
    too, which get -inf here."""
    return mask_unused(jax.nn.log_softmax(logits_bV), drawable_V)


@jax.jit
def score_tokens(logits_nV, token_n, drawable_V) -> DrawnTokens:
    """What `choose` says of tokens, for tokens that were there before."""
    logprobs_nV = log_probabilities(logits_nV, drawable_V)
    logprob_n = jnp.take_along_axis(logprobs_nV, token_n[:, None], axis=-1)[:, 0]
    logprobs_nA, likeliest_nA = jax.lax.top_k(logprobs_nV, min(MOST_ALTERNATIVES, len(drawable_V)))
    return DrawnTokens(token_n, logprob_n, likeliest_nA, logprobs_nA)


@jax.jit
def choose(logits_bV, asked: BatchSettings, seen_bV, drawable_V) -> DrawnTokens:
    """Draw one token a row.

    seen_bV     the tokens that repetition_penalty counts
    drawable_V  ids that are a token's: no other is drawn, and the table may be longer
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
