"""Model which links of a torus each collective uses, and how concurrent collectives share them.

`Torus(shape, wraps)` routes messages. One function per kind of collective returns the bytes that one execution sends
over each directed link, an array [torus axis, direction (0: down, 1: up), *coordinates]. `share_bandwidth` divides the
links between concurrent collectives.

A permute takes the shortest route, along x first, then y, then z. An all-gather or reduce-scatter whose groups span
whole torus axes uses all these axes at once, in both directions if an axis wraps around (the compiler's StrategyND).
Any other group passes chunks around a ring of its devices, half in each direction (StrategyRing, one color). On an axis
without wraparound, the hop from the last device to the first crosses the same links. The order of devices in a ring is
our assumption: a snake through the lines, with the order of axes for which the busiest link has the fewest bytes.
Source: strategies as libtpu 0.0.42 names them in `collective_algorithm_config`;
https://jax-ml.github.io/scaling-book/sharding, "How long does this take?", for both directions of a wrapped axis.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Torus:
    """Chips in a grid. A link connects two neighbors; a wrapped axis also has one from its last chip to its first."""

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    def steps(self, start, end) -> np.ndarray:
        """Return the signed hop count per torus axis on the shortest route from start to end, [.., torus axis]."""
        size = np.array(self.shape)
        delta = np.asarray(end) - np.asarray(start)
        around = (delta + (size - 1) // 2) % size - (size - 1) // 2  # break ties upwards
        return np.where(self.wraps, around, delta)

    def distance(self, start, end) -> np.ndarray:
        """Return the number of hops from start to end."""
        return np.abs(self.steps(start, end)).sum(-1)

    def loads(self, start, end, sizes, up: bool = True) -> np.ndarray:
        """Return the bytes on each directed link if every start sends `sizes` bytes to its end, all at once.

        up  if two routes are equally short, take the one towards higher coordinates
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
    """Return the torus axes that each group spans completely, or None.

    groups  coordinates [group, device, torus axis]
    """
    used = [d for d in range(groups.shape[-1]) if np.ptp(groups[:, :, d], axis=1).any()]
    chips = np.sort(np.ravel_multi_index(tuple(np.moveaxis(groups, 2, 0)), torus.shape), axis=1)
    places = 1 + (np.diff(chips, axis=1) > 0).sum(axis=1)
    whole = math.prod(torus.shape[d] for d in used)
    return used if used and (places == whole).all() and np.ptp(groups[:, :, used], axis=1).all() else None


def gather_load(torus: Torus, groups: np.ndarray, wire_bytes: float, ring: bool | None = None) -> np.ndarray:
    """Return the bytes on each directed link in an all-gather, reduce-scatter or all-reduce.

    groups      coordinates [group, device, torus axis]
    wire_bytes  total bytes that each device sends
    ring        True: use a ring. False or None: use a ring only if the groups do not span whole torus axes
    """
    axes = None if ring else whole_axes(torus, groups)
    if axes is None:
        used = [d for d in range(len(torus.shape)) if np.ptp(groups[:, :, d], axis=1).any()]
        rings = (_ring_load(torus, groups, order, wire_bytes / 2) for order in itertools.permutations(used))
        return min(rings, key=np.max)
    load = np.zeros((len(torus.shape), 2, *torus.shape))
    ways = {d: 2 if torus.wraps[d] else 1 for d in axes}
    here = tuple(np.unique(groups.reshape(-1, groups.shape[-1]), axis=0).T)
    for d in axes:
        load[d][(slice(None), *here)] += wire_bytes / sum(ways.values())
    return load


def _ring_load(torus: Torus, groups: np.ndarray, order: tuple[int, ...], size: float) -> np.ndarray:
    """Return the bytes on each link if each device sends `size` bytes to both neighbors in a ring.

    Rings are in snake order; order[-1] is the torus axis along which neighbors in the ring are adjacent.
    """
    ring = np.take_along_axis(groups, _snake_order(groups[:, :, order])[:, :, None], axis=1)
    after = np.roll(ring, -1, axis=1)
    return torus.loads(ring, after, size) + torus.loads(after, ring, size, up=False)


def _snake_order(groups: np.ndarray) -> np.ndarray:
    """Order the devices of each group line by line, with every other line reversed (snake order).

    groups  coordinates [group, device, torus axis]
    Groups may interleave. So that their rings change lines over different links, ring i is mirrored along the k-th axis
    from the end if bit k of i is set.
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


def permute_load(torus: Torus, start: np.ndarray, end: np.ndarray, payload_bytes: float) -> np.ndarray:
    """Return the bytes on each link if every start sends payload_bytes to its end; both [message, torus axis]."""
    return torus.loads(start, end, payload_bytes)


def all_to_all_load(torus: Torus, groups: np.ndarray, payload_bytes: float) -> np.ndarray:
    """Return the bytes on each link in an all-to-all: each of n devices sends 1/n of payload_bytes to each device of
    its group. groups: coordinates [group, device, torus axis]"""
    n = groups.shape[1]
    start, end = np.broadcast_arrays(groups[:, :, None], groups[:, None])
    return torus.loads(start, end, payload_bytes / n)


def share_bandwidth(loads: list[np.ndarray], bytes_per_s: float) -> list[float]:
    """Return the rate of each concurrent collective, as the fraction that is completed per second.

    loads  bytes on each directed link, for each collective
    The collectives on a link share its bandwidth equally. If another link limits a collective, the bandwidth that it
    cannot use goes to the others (max-min fairness). The rate is infinite if a collective uses no link.
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
