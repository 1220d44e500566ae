"""Whole documents into rows, as full as they get: best-fit decreasing.

The longest is placed first, each into the row with the least room that still holds it, a new one if none does. Beside a
stream that is cut every T tokens, the rows of real text are about as many, and hardly a document is cut.

Source: Ding et al., arXiv:2404.10830, section 3.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of an epoch: which pieces of a stream lie in each. A document that fits into a row is one piece."""

    edges: np.ndarray  # where each piece of the stream begins, and where the last ends
    by_row: np.ndarray  # pieces, those of the first row first
    first: np.ndarray  # place in by_row of each row's first piece, and the number of pieces

    def __len__(self) -> int:
        return len(self.first) - 1

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """From which token up to which other each piece of a row goes, in the order of the stream."""
        own = self.by_row[self.first[row] : self.first[row + 1]]
        return [*zip(self.edges[own].tolist(), self.edges[own + 1].tolist(), strict=True)]


def pack(edges: np.ndarray, seq_len: int) -> Packed:
    """Pack documents into rows of `seq_len` tokens; a longer one is first cut into pieces of a row, and the rest.

    edges   where each document of the stream begins, and where the last ends
    """
    parts = -(-np.diff(edges) // seq_len)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    pieces = np.append(np.repeat(edges[:-1], parts) + number * seq_len, edges[-1])
    rows = best_fit(np.diff(pieces), seq_len)
    first = np.append(0, np.cumsum(np.bincount(rows)))
    return Packed(pieces, np.argsort(rows, kind="stable"), first)


def best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Say in which row each piece of 1 .. seq_len tokens lies.

    Pieces of one length are placed together, into groups of rows with the same room. A row that takes some is left with
    less than half its room, so a group is met log2(seq_len) times at most: time grows with the number of pieces.
    """
    row_of, rows, groups, rooms = np.empty(len(lengths), np.int64), 0, {}, 0  # bit r of rooms: a group has room for r
    order = np.argsort((seq_len - lengths).astype(np.min_scalar_type(seq_len)), kind="stable")  # 16 bits: radix sort
    counts = np.bincount(lengths)

    def keep(room: int, group: np.ndarray) -> None:
        nonlocal rooms
        if room and len(group):
            groups.setdefault(room, []).append(group)
            rooms |= 1 << room

    for length in np.flatnonzero(counts)[::-1].tolist():
        pieces, order = order[: counts[length]], order[counts[length] :]
        while len(pieces):
            if larger := rooms >> length:
                room = length + (larger & -larger).bit_length() - 1  # the least that holds one
                group = groups[room].pop()
                if not groups[room]:
                    rooms ^= 1 << room
            else:
                room, group = seq_len, np.arange(rows, rows + -(-len(pieces) // (seq_len // length)))
                rows += len(group)
            each = room // length
            placed = min(len(pieces), each * len(group))
            full, rest = divmod(placed, each)
            used = full + (rest > 0)
            row_of[pieces[:placed]] = np.repeat(group[:used], each)[:placed]
            keep(room - each * length, group[:full])
            keep(room - rest * length, group[full:used])
            keep(room, group[used:])
            pieces = pieces[placed:]
    return row_of
