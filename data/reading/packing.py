"""Pack whole documents into rows with best-fit decreasing.

Documents are placed from longest to shortest. Each goes into the row with the least room that still fits it, or into a
new row. On real text this needs about as many rows as cutting the stream every T tokens, and it cuts few documents.

Source: Ding et al., arXiv:2404.10830, section 3.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Packed:
    """For each row of an epoch, its pieces of the token stream. A document that fits into a row is one piece."""

    edges: np.ndarray  # stream position of each piece's start, and of the last piece's end
    by_row: np.ndarray  # indices of pieces, in the order of rows
    row_starts: np.ndarray  # index in by_row of each row's first piece, and finally the number of pieces

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return (start, stop) in the stream for each piece of a row, in the order of the stream."""
        own = self.by_row[self.row_starts[row] : self.row_starts[row + 1]]
        return [*zip(self.edges[own].tolist(), self.edges[own + 1].tolist(), strict=True)]


def pack(edges: np.ndarray, seq_len: int) -> Packed:
    """Pack documents into rows of `seq_len` tokens. A longer document is first cut into full rows and a remainder.

    edges   stream position of each document's start, and of the last document's end
    """
    pieces = cut(edges, seq_len)
    return pack_pieces(pieces, np.diff(pieces), seq_len)


def cut(edges: np.ndarray, longest: int) -> np.ndarray:
    """Cut documents into pieces of `longest` tokens and a remainder; return the edges of the pieces."""
    parts = -(-np.diff(edges) // longest)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    return np.append(np.repeat(edges[:-1], parts) + number * longest, edges[-1])


def pack_pieces(edges: np.ndarray, lengths: np.ndarray, seq_len: int) -> Packed:
    """Pack pieces of the stream into rows of `seq_len` positions; `lengths` has the positions that each needs."""
    rows = best_fit(lengths, seq_len)
    first = np.append(0, np.cumsum(np.bincount(rows)))
    return Packed(edges, np.argsort(rows, kind="stable"), first)


def best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the row number of each piece; pieces have 1 .. seq_len tokens.

    Pieces of the same length are placed together, into groups of rows with the same room. Placing as many as fit leaves
    less than half of the room, so a group is used at most log2(seq_len) times, and the time is linear in the pieces.
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
                room = length + (larger & -larger).bit_length() - 1  # least room that fits a piece
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
