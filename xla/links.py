"""Which links of a torus a collective keeps busy, and how those that are under way at once share them.

`Torus(shape, wraps)` routes messages; `gather`, `permute` and `all_to_all` return the bytes that one execution puts on
each directed link, [torus axis, down or up, *place]; `shares` says what each of several collectives then gets.

A permute goes the shortest way, along x first, then y, then z. A gather or scatter whose groups are whole torus axes
goes along all of them at once, both ways where an axis is closed (the compiler's StrategyND); any other group passes
slices around a ring through its devices, half of them each way (its StrategyRing, of one colour). On a line that is
not closed the way back from the last device to the first crosses the same links. The order of devices in a ring is
ours: line by line, to and fro, along the axes in that order which loads the busiest link least.
Source: strategies as libtpu 0.0.42 names them in `collective_algorithm_config`;
https://jax-ml.github.io/scaling-book/sharding, "How long does this take?", for both ways of a closed axis.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Torus:
    """Chips in a grid; a wrapped axis has a link from its last chip to its first. One link joins two neighbours."""

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def steps(self, start, end) -> np.ndarray:
        """Signed links along each torus axis on the shortest way between chips, coordinates [.., torus axis]."""
        size = np.array(self.shape)
        delta = np.asarray(end) - np.asarray(start)
        around = (delta + (size - 1) // 2) % size - (size - 1) // 2  # of two equal ways the one that goes up
        return np.where(self.wraps, around, delta)

    def distance(self, start, end) -> np.ndarray:
        """Links between chips."""
        return np.abs(self.steps(start, end)).sum(-1)

    def loads(self, start, end, sizes, up: bool = True) -> np.ndarray:
        """Bytes on each directed link, if messages of these sizes go at once: [torus axis, down or up, *place].

        up  of two equal ways take the one that goes up
        """
        steps = self.steps(start, end) if up else -self.steps(end, start)
        at, left = (np.asarray(x).reshape(-1, len(self.shape)).copy() for x in (start, steps))
        sizes = np.broadcast_to(np.asarray(sizes, float), np.shape(start)[:-1]).reshape(-1)
        load = np.zeros((len(self.shape), 2, *self.shape))
        for d, length in enumerate(self.shape):
            while (moving := left[:, d] != 0).any():
                sign = np.sign(left[moving, d])
                np.add.at(load[d], ((sign > 0).astype(int), *at[moving].T), sizes[moving])
                at[moving, d] = (at[moving, d] + sign) % length
                left[moving, d] -= sign
        return load


def whole_axes(torus: Torus, groups: np.ndarray) -> list[int] | None:
    """The torus axes that groups of devices, coordinates [group, device, torus axis], fill; None if they fill none."""
    used = [d for d in range(groups.shape[-1]) if np.ptp(groups[:, :, d], axis=1).any()]
    chips = np.sort(np.ravel_multi_index(tuple(np.moveaxis(groups, 2, 0)), torus.shape), axis=1)
    places = 1 + (np.diff(chips, axis=1) > 0).sum(axis=1)
    whole = math.prod(torus.shape[d] for d in used)
    return used if used and (places == whole).all() and np.ptp(groups[:, :, used], axis=1).all() else None


def gather(torus: Torus, groups: np.ndarray, wire_bytes: float, ring: bool | None = None) -> np.ndarray:
    """The load of a collective in which each device sends wire_bytes to its group, coordinates [group, device, axis].

    All-gathers, reduce-scatters and all-reduces. ring: pass slices from device to device, whatever the groups fill;
    None: unless they fill torus axes.
    """
    axes = None if ring else whole_axes(torus, groups)
    if axes is None:
        used = [d for d in range(len(torus.shape)) if np.ptp(groups[:, :, d], axis=1).any()]
        rings = (_around(torus, groups, order, wire_bytes / 2) for order in itertools.permutations(used))
        return min(rings, key=np.max)
    load = np.zeros((len(torus.shape), 2, *torus.shape))
    ways = {d: 2 if torus.wraps[d] else 1 for d in axes}
    here = tuple(np.unique(groups.reshape(-1, groups.shape[-1]), axis=0).T)
    for d in axes:
        load[d][(slice(None), *here)] += wire_bytes / sum(ways.values())
    return load


def _around(torus: Torus, groups: np.ndarray, order: tuple[int, ...], size: float) -> np.ndarray:
    """The load of messages of a size to both neighbours on rings: to and fro along the last axis of the order first."""
    ring = np.take_along_axis(groups, _to_and_fro(groups[:, :, order])[:, :, None], axis=1)
    after = np.roll(ring, -1, axis=1)
    return torus.loads(ring, after, size) + torus.loads(after, ring, size, up=False)


def _to_and_fro(groups: np.ndarray) -> np.ndarray:
    """The order of each group's places, [group, device, axis], line by line, every other line backwards.

    Rings that lie between each other begin at different corners, a bit of their number for each axis: so they go across
    at different places.
    """
    number, ranks = np.arange(len(groups)), []
    for bit, column in enumerate(np.moveaxis(groups, 2, 0)[::-1]):
        there = np.zeros((len(groups), column.max() + 1), int)
        there[number[:, None], column] = 1
        rank = np.take_along_axis(there.cumsum(axis=1), column, axis=1) - 1
        ranks.append(np.where(number[:, None] >> bit & 1, rank.max(axis=1, keepdims=True) - rank, rank))
    before = np.zeros(groups.shape[:2], int)
    for place in reversed(range(len(ranks))):
        rank = ranks[place]
        ranks[place] = np.where(before % 2, rank.max(axis=1, keepdims=True) - rank, rank)
        before = before + ranks[place]
    return np.lexsort(ranks, axis=-1)


def permute(torus: Torus, start: np.ndarray, end: np.ndarray, payload_bytes: float) -> np.ndarray:
    """The load of messages from start to end, coordinates [message, axis], of payload_bytes each."""
    return torus.loads(start, end, payload_bytes)


def all_to_all(torus: Torus, groups: np.ndarray, payload_bytes: float) -> np.ndarray:
    """The load of an exchange in which each device of n sends 1/n of payload_bytes to each of its group."""
    n = groups.shape[1]
    start, end = np.broadcast_arrays(groups[:, :, None], groups[:, None])
    return torus.loads(start, end, payload_bytes / n)


def shares(loads: list[np.ndarray], bytes_per_s: float) -> list[float]:
    """How much of each collective is done in a second, if all are under way: links give each of theirs the same speed.

    What one leaves, as another link holds it up, the others have (max-min fairness). Infinite without any link.
    """
    left, busy = np.full(loads[0].size, bytes_per_s), [np.ravel(load) for load in loads]
    tops = [load.max() for load in busy]
    speed, active = [math.inf if not top else 0.0 for top in tops], [i for i, top in enumerate(tops) if top]
    while active:
        wanted = sum(busy[i] / tops[i] for i in active)
        used = wanted > 0
        more = float((left[used] / wanted[used]).min())
        left = left - more * wanted
        full = used & (left <= 1e-9 * bytes_per_s)
        for i in active:
            speed[i] += more / tops[i]
        active = [i for i in active if not (busy[i][full] > 0).any()]
    return speed
