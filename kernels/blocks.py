"""Blocks, and which of them meet: what the kernels share.

Letters as in `model.py`. A visit is a block of queries meeting a block of keys, or a tile of rows meeting an expert
that has some of them. Blocks of keys that lie later than all the queries are not visited.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

float32 = jnp.float32
HIDDEN = -1e30  # score of a key that may not be looked at: its weight is 0 beside any other
Starts = tuple[tuple[int, ...], ...]  # places among the keys at which each device's chunks of queries begin


def order(starts: Starts, s: int):
    """The place among the keys of each query on each device, [devices, s]."""
    starts_nc = np.array(starts, np.int32)
    return (starts_nc[:, :, None] + np.arange(s // starts_nc.shape[1], dtype=np.int32)).reshape(len(starts), s)


@functools.cache
def meetings(s: int, S: int, starts: Starts, block: int):
    """Which blocks of queries must meet which blocks of keys on each device. Shape: [devices, s, S], in blocks."""
    last_ni = np.maximum.reduceat(order(starts, s), np.arange(0, s, block), axis=1)
    return last_ni[:, :, None] >= np.arange(0, S, block)


def visits_of(meets):
    """The places where each device's blocks meet, as many of each: to some are added in which a mask hides everything.

    Shapes: [devices, ..] -> [devices, dims, visits], in order.
    """
    most, meets = max(map(np.count_nonzero, meets)), meets.copy()
    for meets_of_one in meets:
        meets_of_one.flat[np.flatnonzero(~meets_of_one)[: most - np.count_nonzero(meets_of_one)]] = True
    return np.stack([np.argwhere(meets_of_one).T for meets_of_one in meets]).astype(np.int32)


@functools.cache
def visits(s: int, S: int, starts: Starts, block: int, span: int | None = None, heads: int = 1):
    """Head of a group, block of queries and block of keys of each visit. Shape: [devices, 3, v].

    span  blocks of keys that are visited by all queries of all heads before the next ones are, and by each of them once
          at least; None: all
    """
    meets_nij = meetings(s, S, starts, block)
    n, nq, nk = meets_nij.shape
    span = span or nk
    meets = np.pad(meets_nij, ((0, 0), (0, 0), (0, -nk % span))).reshape(n, nq, -1, span)
    meets[..., 0] |= ~meets.any(axis=-1)
    meets = np.repeat(meets.transpose(0, 2, 1, 3)[:, :, None], heads, axis=2)  # device, span, head, queries, keys
    number, head, query, key = visits_of(meets).swapaxes(0, 1)
    return np.stack([head, query, number * span + key], axis=1)


class Visits(NamedTuple):
    """Which expert meets which tile, in order: an expert's visits follow each other, and so do a tile's."""

    start_e: jax.Array  # first row of each expert
    end_e: jax.Array  # row after its last
    expert_i: jax.Array
    tile_i: jax.Array


def expert_visits(A: int, sizes_e, tile: int) -> tuple[Visits, jax.Array]:
    """List the visits, and count them: at most A/tile + e - 1. An expert without rows visits one tile in vain."""
    end_e = jnp.cumsum(sizes_e)
    start_e = end_e - sizes_e
    visits_e = jnp.maximum(-(-end_e // tile) - start_e // tile, 1)
    done_e = jnp.cumsum(visits_e)
    number_i = jnp.arange(A // tile + len(sizes_e) - 1)
    expert_i = jnp.minimum(jnp.sum(done_e[None, :] <= number_i[:, None], axis=1), len(sizes_e) - 1)
    tile_i = start_e[expert_i] // tile + number_i - (done_e - visits_e)[expert_i]
    return Visits(start_e, end_e, expert_i, jnp.minimum(tile_i, A // tile - 1)), done_e[-1]


def padded(x, size: int, dim: int, value=0):
    """Fill a dim up to a multiple of `size`."""
    return jnp.pad(x, [(0, -n % size if d == dim else 0) for d, n in enumerate(x.shape)], constant_values=value)


def power_of_two(width: int) -> int:
    """The least block of a Triton program that holds a dim: no less than 16, as a product there has."""
    return max(16, 1 << (width - 1).bit_length())


def dot(x, y, x_dim, y_dim):
    """A block's product over one dim of each, added up in float32."""
    return jax.lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())), preferred_element_type=float32)
