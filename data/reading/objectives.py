"""Objectives: which tokens of a text a model reads, and which ones it predicts.

`split_text` divides the token ids of one text into inputs and targets. It is a pure function of the ids and a key, so a
batch does not depend on the number of hosts. `restore` is its inverse. `features.py` makes batches of the
result.

    causal           nothing is input; every token is a target
    prefix           the text is cut at a random position: the first part is input, the rest are targets
    span             spans of tokens are masked: 15% of the tokens, 3 tokens per span on average. In the inputs, a
                     sentinel replaces each span. The targets are the spans, each after its sentinel. Sentinel i has
                     the id vocab_size - 1 - i
    span:0.5:32      the same with 50% of the tokens, and 32 tokens per span
    task             target weights decide: tokens with weight 0, such as a prompt, are inputs

Sources: T5, arXiv:1910.10683, section 3.1.4, and its `random_spans_noise_mask`; UL2, arXiv:2205.05131, section 3.1.
"""

from typing import NamedTuple

import numpy as np

from config.fields import span_rate

LEAST = 2  # tokens of a text; a shorter one cannot have both inputs and targets


class Example(NamedTuple):
    """The token ids that a model reads and predicts."""

    inputs: np.ndarray
    targets: np.ndarray


class Lengths(NamedTuple):
    """Upper bounds for the numbers of tokens in an example. They are exact, except for the inputs of `prefix`."""

    inputs: np.ndarray
    targets: np.ndarray
    both: np.ndarray


Key = tuple[int, ...]  # selects the random numbers of an example, such as (seed, row, text in the row)


def split_text(objective: str, ids: np.ndarray, key: Key, vocab_size: int, weights=None) -> Example:
    """Divide a text of LEAST tokens or more into inputs and targets.

    weights   for `task`: the weight of each token as a target
    """
    if objective == "causal":
        return Example(ids[:0], ids)
    if objective == "task":
        return Example(ids[weights == 0], ids[weights > 0])
    assert len(ids) >= LEAST, "a text of one token has no inputs or no targets"
    if objective == "prefix":
        cut = 1 + _random(key).random_raw() % (len(ids) - 1)
        return Example(ids[:cut], ids[cut:])
    return mask_spans(ids, key, *span_rate(objective), vocab_size)


def mask_spans(ids: np.ndarray, key: Key, rate: float, mean_length: float, vocab_size: int) -> Example:
    """Mask spans of a text at random. Unmasked and masked spans alternate; the first is unmasked, the last masked."""
    masked, spans = map(int, span_counts(len(ids), rate, mean_length))
    bits = _random(key)
    masked_spans = _random_lengths(masked, spans, bits)
    unmasked_spans = _random_lengths(len(ids) - masked, spans, bits)
    both = np.stack([unmasked_spans, masked_spans], axis=1).ravel()
    is_masked = np.repeat(np.arange(len(both)) % 2 == 1, both)
    sentinels = vocab_size - 1 - np.arange(spans)
    return Example(np.insert(ids[~is_masked], np.cumsum(unmasked_spans), sentinels),
                   np.insert(ids[is_masked], np.cumsum(masked_spans) - masked_spans, sentinels))  # fmt: skip


def restore(example: Example, vocabulary: int) -> np.ndarray:
    """Return the ids of the text from which `split_text` made an example; for `task`, if the prompt comes first.

    vocabulary   size of the tokenizer's vocabulary; larger ids are sentinels
    """
    read, predicted = (np.split(ids, np.flatnonzero(ids >= vocabulary)) for ids in example)
    if len(read) == 1:
        return np.concatenate(example)
    pairs = zip(predicted[1:], read[1:], strict=True)  # each begins with its sentinel
    return np.concatenate([read[0], *(part[1:] for pair in pairs for part in pair)])


# Lengths --------------------------------------------------------------------------------------------------------------


def span_counts(tokens: np.ndarray | int, rate: float, mean_length: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of masked tokens, and the number of masked spans, in a text."""
    masked = np.clip(np.rint(np.multiply(tokens, rate)), 1, np.subtract(tokens, 1)).astype(np.int64)
    spans = np.clip(np.rint(masked / mean_length), 1, np.minimum(masked, tokens - masked)).astype(np.int64)
    return masked, spans


def lengths(objective: str, tokens: np.ndarray | int) -> Lengths:
    """Return the lengths of the example of a text of LEAST tokens or more, without end-of-text tokens. Not for `task`,
    where weights decide."""
    if objective == "causal":
        return Lengths(tokens * 0, tokens, tokens)
    if objective == "prefix":
        return Lengths(tokens - 1, tokens - 1, tokens)
    masked, spans = span_counts(tokens, *span_rate(objective))
    return Lengths(tokens - masked + spans, masked + spans, tokens + 2 * spans)


# Random numbers -------------------------------------------------------------------------------------------------------


def _random(key: Key) -> np.random.PCG64:
    """Return a generator of 64-bit numbers. NumPy keeps its raw numbers the same in every version."""
    return np.random.PCG64(list(key))


def _random_lengths(total: int, parts: int, bits: np.random.PCG64) -> np.ndarray:
    """Divide `total` tokens into parts of one token or more; every division is equally likely."""
    cuts = np.argsort(bits.random_raw(total - 1), kind="stable")[: parts - 1] + 1
    return np.diff(np.sort(cuts), prepend=0, append=total)
