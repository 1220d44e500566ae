"""Split work into blocks and list the pairs of blocks that a kernel computes; shared by all kernels.

Shape letters are those of `model.py`. A visit is a pair that has to be computed: a block of queries and a block of
keys, or a tile of rows and an expert to which some of these rows are assigned. Key blocks that are later than all
queries of a block, or before the windows of all, are skipped.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

float32 = jnp.float32
LANES = 128  # numbers in a vector of a TPU, along the last dim of an array
HIDDEN = -1e30  # score of a masked key, so that its softmax weight is 0
Starts = tuple[tuple[int, ...], ...]  # for each device, the key positions at which its chunks of queries begin


class Reach(NamedTuple):
    """Which keys a query attends to, by their positions in the key sequence, and a cap of the scores. Each value
    compiles its own kernel."""

    starts: Starts = ((0,),)
    window: int = 0  # a query attends to this many positions, its own and the ones before it; 0: no limit
    cap: float = 0.0  # of the scores, see `soft_cap`

    def includes(self, query, key):
        """Return whether queries at some positions attend to keys at others. Both are arrays, which broadcast."""
        return (query >= key) & (query - key < self.window) if self.window else query >= key

    def hide(self, scores, is_seen):
        """Cap the scores, and set those of keys that are not seen to HIDDEN."""
        return jnp.where(is_seen, soft_cap(scores, self.cap), HIDDEN)

    def before_cap(self, d_scores, scores):
        """Return the gradient of scores before the cap, from that of `hide`'s result and from this result."""
        if not self.cap:
            return d_scores
        return d_scores * (1 - (jnp.maximum(scores, -self.cap) / self.cap) ** 2)  # HIDDEN squared would overflow


def soft_cap(x, cap: float):
    """Return cap * tanh(x / cap), which is close to x near 0 and never above the cap; a cap of 0 changes nothing.

    Source: Gemma 2, arXiv:2408.00118, section 2
    """
    return cap * jnp.tanh(x / cap) if cap else x


CAUSAL = Reach()


def query_positions(starts: Starts, s: int):
    """Return the position of each query in the key sequence, [devices, s]."""
    starts_nc = np.array(starts, np.int32)
    return (starts_nc[:, :, None] + np.arange(s // starts_nc.shape[1], dtype=np.int32)).reshape(len(starts), s)


@functools.cache
def visible_blocks(s: int, S: int, reach: Reach, block: int):
    """Return which key blocks each query block must visit: boolean [devices, query blocks, key blocks]."""
    begins, first_j = np.arange(0, s, block), np.arange(0, S, block)
    last_ni = np.maximum.reduceat(query_positions(reach.starts, s), begins, axis=1)
    meets_nij = last_ni[:, :, None] >= first_j
    if reach.window:
        first_ni = np.minimum.reduceat(query_positions(reach.starts, s), begins, axis=1)
        meets_nij &= first_ni[:, :, None] - reach.window < first_j + block - 1
    return meets_nij


def list_visits(meets):
    """Return the sorted indices of the True entries, which are the visits. Devices with fewer visits than others get
    additional ones, which are fully masked.

    Shapes: boolean [devices, ..] -> [devices, dims, visits].
    """
    most, meets = max(map(np.count_nonzero, meets)), meets.copy()
    for meets_of_one in meets:
        meets_of_one.flat[np.flatnonzero(~meets_of_one)[: most - np.count_nonzero(meets_of_one)]] = True
    return np.stack([np.argwhere(meets_of_one).T for meets_of_one in meets]).astype(np.int32)


@functools.cache
def visits(s: int, S: int, reach: Reach, block: int, span: int | None = None, heads: int = 1):
    """List (head of the group, query block, key block) of each visit. Shape: [devices, 3, v].

    span  number of consecutive key blocks in a span; None: all. All queries of all heads visit one span before the next
          span begins, and each query block visits every span at least once
    """
    meets_nij = visible_blocks(s, S, reach, block)
    n, nq, nk = meets_nij.shape
    span = span or nk
    meets = np.pad(meets_nij, ((0, 0), (0, 0), (0, -nk % span))).reshape(n, nq, -1, span)
    meets[..., 0] |= ~meets.any(axis=-1)
    meets = np.repeat(meets.transpose(0, 2, 1, 3)[:, :, None], heads, axis=2)  # device, span, head, queries, keys
    number, head, query, key = list_visits(meets).swapaxes(0, 1)
    return np.stack([head, query, number * span + key], axis=1)


def count_visits(s: int, S: int, reach: Reach, block: int, span: int | None = None) -> int:
    """Count what `visits` lists for one head, without listing it. A planner calls this often."""
    nk, chunk = -(-S // block), s // len(reach.starts[0])
    span = span or nk

    def of_device(chunks: tuple[int, ...]) -> int:
        count = 0
        for first in range(0, s, block):
            places = range(first, min(first + block, s))
            ends = {places[-1], *range(places[0] // chunk * chunk + chunk - 1, places[-1], chunk)}
            at = lambda place: chunks[place // chunk] + place % chunk
            end, begin = min(max(map(at, ends)) // block + 1, nk), 0
            if reach.window:
                starts = {places[0], *(place + 1 for place in ends if place < places[-1])}
                begin = max(min(map(at, starts)) - reach.window + 1, 0) // block
            count += sum(max(min(end, old + span) - max(begin, old), 1) for old in range(0, nk, span))
        return count

    return max(map(of_device, reach.starts))


class Visits(NamedTuple):
    """The expert and the tile of each visit, sorted by both."""

    start_e: jax.Array  # first row of each expert
    end_e: jax.Array  # index after the last row of each expert
    expert_i: jax.Array
    tile_i: jax.Array


def expert_visits(A: int, sizes_e, tile: int) -> tuple[Visits, jax.Array]:
    """List and count the visits of e experts, at most A/tile + e - 1. An expert without rows has one visit, which has
    no effect."""
    end_e = jnp.cumsum(sizes_e)
    start_e = end_e - sizes_e
    visits_e = jnp.maximum(-(-end_e // tile) - start_e // tile, 1)
    done_e = jnp.cumsum(visits_e)
    number_i = jnp.arange(A // tile + len(sizes_e) - 1)
    expert_i = jnp.minimum(jnp.sum(done_e[None, :] <= number_i[:, None], axis=1), len(sizes_e) - 1)
    tile_i = start_e[expert_i] // tile + number_i - (done_e - visits_e)[expert_i]
    return Visits(start_e, end_e, expert_i, jnp.minimum(tile_i, A // tile - 1)), done_e[-1]


def pad_to_multiple(x, size: int, dim: int, value=0):
    """Pad a dim to a multiple of `size`."""
    return jnp.pad(x, [(0, -n % size if d == dim else 0) for d, n in enumerate(x.shape)], constant_values=value)


def in_lanes(size: int) -> int:
    """Round up to whole vectors of a TPU."""
    return -(-size // LANES) * LANES


def power_of_two(width: int) -> int:
    """Return the smallest power of two >= `width` that is at least 16, the minimum size in a Triton matmul."""
    return max(16, 1 << (width - 1).bit_length())


def dot(x, y, x_dim, y_dim):
    """Multiply two blocks, contracting one dim of each, with float32 accumulation."""
    return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())), preferred_element_type=float32)
