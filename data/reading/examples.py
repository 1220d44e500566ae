"""Make the examples of a row from pieces of the token stream, and check that the tokens suit data.objective."""

import itertools
from collections.abc import Iterator

import numpy as np

from config import Config, DataConfig
from config.fields import PERIOD, parse_objectives, parse_packing, span_rate
from data.reading import features, objectives
from data.reading.objectives import Example, Key, Lengths
from utils import UserError

Read = tuple[np.ndarray, np.ndarray | int]  # the tokens of a piece, and the weight of each as a target; 1: all are 1


def make(objective: str, key: Key, pieces: list[Read], eot: int, cfg: Config) -> list[Example]:
    """Make the examples of a row. A text that does not fit into the rest of the row is truncated.

    key   of the row's random numbers
    """
    room, found = features.room(cfg.data), []
    is_task = objective == "task"  # `task_lengths` has checked that its documents fit
    least = 1 if is_task else objectives.LEAST
    separator = None if parse_packing(cfg.data.packing).unmasked else eot
    texts = (text for piece in pieces for text in _texts(*piece, separator))
    for number, (ids, weights) in enumerate(texts):
        if not is_task and not features.fits(objectives.lengths(objective, max(len(ids), least)), room):
            ids = ids[: features.longest_text(objective, room)]
        if len(ids) < least:
            continue
        one = objectives.split_text(objective, ids, (*key, number), cfg.model.vocab_size, weights)
        used = features.positions(Lengths(len(one.inputs), len(one.targets), sum(map(len, one))), room)
        room = tuple(free - taken for free, taken in zip(room, used, strict=True))
        found.append(one)
    return found


def _texts(ids: np.ndarray, weights: np.ndarray | int, eot: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the texts between end-of-text tokens, with their target weights. eot=None: do not divide the tokens."""
    edges = [-1, *([] if eot is None else np.flatnonzero(ids == eot).tolist()), len(ids)]
    weights = np.broadcast_to(weights, len(ids))
    return ((ids[a + 1 : b], weights[a + 1 : b]) for a, b in itertools.pairwise(edges))


def truncated(objective: str, edges: np.ndarray, tokens: int, room: tuple[int, ...]) -> float:
    """Return the fraction of windows whose documents do not all fit into a row, so that text at its end is dropped.

    edges   where each document begins, with its end-of-text token
    """
    size = features.longest_text(objective, room)
    bounds = np.union1d(edges[:-1], np.arange(0, tokens, size))
    lengths = np.diff(bounds, append=tokens) - np.isin(bounds, edges[:-1])
    needed = features.positions(objectives.lengths(objective, np.maximum(lengths, objectives.LEAST)), room)
    by_row = lambda positions: np.bincount(bounds // size, weights=positions * (lengths >= objectives.LEAST))
    return np.mean(np.any([by_row(part) > free for part, free in zip(needed, room, strict=True)], axis=0))


def describe(d: DataConfig) -> Iterator[str]:
    """Yield a line for each objective: its fraction of the rows, and the most text in a row."""
    for name, share in parse_objectives(d.objective).items():
        line = f"{name}, {share / PERIOD:.1%} of the rows"
        if name not in ("causal", "task"):
            tokens = features.longest_text(name, features.room(d))
            found = objectives.lengths(name, tokens)
            parts = "a random cut" if name == "prefix" else f"{found.inputs:,} inputs and {found.targets:,} targets"
            line += f": up to {tokens:,} tokens of text, {parts}"
        yield line


# Checks ---------------------------------------------------------------------------------------------------------------


def check(cfg: Config, vocabulary: int) -> None:
    """Raises: UserError if an objective has no inputs for an encoder, or if rows or the vocabulary are too small."""
    d = cfg.data
    for name in parse_objectives(d.objective):
        given = f"data.objective={d.objective!r}"
        if name == "causal" and d.input_len:
            raise UserError(f"{given}: causal has no inputs for the encoder; use span, prefix or task")
        if name in ("causal", "task"):
            continue
        most = features.longest_text(name, features.room(d))
        if most < objectives.LEAST:
            raise UserError(f"{given}: no text fits into data.seq_len={d.seq_len} and data.input_len={d.input_len}; "
                            "use larger values")  # fmt: skip
        sentinels = int(objectives.span_counts(most, *span_rate(name))[1]) if name.startswith("span") else 0
        if vocabulary + sentinels > cfg.model.vocab_size:
            raise UserError(
                f"{given}: texts of {most} tokens need {sentinels} sentinels besides the {vocabulary} ids of the "
                f"tokenizer, but model.vocab_size={cfg.model.vocab_size}; use --model.vocab_size "
                f"{-(-(vocabulary + sentinels) // 8) * 8} (a multiple of 8), or shorter rows")  # fmt: skip


def task_lengths(weights: np.ndarray | int, edges: np.ndarray, room: tuple[int, ...]) -> Lengths:
    """Count the inputs and the targets of each document of a task.

    weights   the weight of each token as a target; 1: all are 1
    edges     where each document begins, with its end-of-text token, and the number of tokens
    Raises: UserError if there are no inputs or no targets, or if a document does not fit into a row.
    """
    given = "data.objective='task'"
    if np.ndim(weights) == 0:
        raise UserError(f"{given}: these tokens have no target weights, so they have no prompts; write a task with "
                        "python -m data.tasks NAME --out DIR, or use another objective")  # fmt: skip
    counted = (weights > 0).astype(np.int64)
    targets, both = np.add.reduceat(counted, edges[:-1]) - counted[edges[:-1]], np.diff(edges) - 1  # without the eot
    if not targets.any():
        raise UserError(f"{given}: all target weights are 0, so no document has targets; write the task again")
    lengths = Lengths(both - targets, targets, both)
    names = ("data.input_len", "data.seq_len")[-len(room) :]
    for needed, free, name in zip(features.positions(lengths, room), room, names, strict=True):
        if count := np.count_nonzero(needed > free):
            raise UserError(f"{given}: {count:,} of {len(both):,} documents are too long for {name}={free}; use "
                            f"--{name} {needed.max()}, or leave them out of the task with `tasks.keep`")  # fmt: skip
    return lengths
