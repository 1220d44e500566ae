"""Attention with any mask and with position biases, for encoders, encoder-decoders and prefix LMs.

On a TPU, a kernel computes the scores of a block of queries with all keys, and stores none of them. On other platforms,
and if the kernel does not fit (see `count_scores`), all scores are stored. The backward pass recomputes them.

Shape letters are those of `model.py`, and x queries per block. In the kernels, scores are transposed, [S, x], with
queries along the lanes of a vector.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import Array, einsum_f32, join_parts
from kernels.blocks import HIDDEN, LANES, dot, float32, in_lanes, pad_to_multiple
from sharding import vary

# The largest number of float32 scores of a block (1 MiB), and of numbers in the keys and values of a head. The backward
# pass has several arrays of each size in the 16 MiB of VMEM that a kernel may use; libtpu compiles it for all chips.
MOST_SCORES, MOST_NUMBERS = 2**18, 2**19


def masked_attention(q, k, v_bSgU, seen_bsS, bias_hsS=None):
    """Compute attention with any mask.

    seen_bsS  whether a query attends to a key; a query that attends to none gets zeros
    bias_hsS  float32, added to the scores; None: nothing
    Shapes: q and k as in `kernels.attention.partial_attention`, [b, S, g, U] -> [b, s, h, U].
    """
    width = sum(x.shape[-1] for x in (*jax.tree.leaves(k), v_bSgU))
    device = jax.sharding.get_abstract_mesh().abstract_device  # None outside `shard_map`
    with jax.named_scope("attend"):
        if device is None or device.platform != "tpu" or not count_scores(*seen_bsS.shape[1:], width):
            return store_scores(q, k, v_bSgU, seen_bsS, bias_hsS)
        operands = *scale_and_join(q, k), v_bSgU, seen_bsS, *(() if bias_hsS is None else (bias_hsS,))
        everywhere = set().union(*(jax.typeof(x).mat.varying for x in operands))
        return attend_to_all(False, *vary(operands, sorted(everywhere)))


def scale_and_join(q, k):
    """Scale the queries, or concatenate pairs, whose queries have been scaled."""
    return join_parts(q if isinstance(q, tuple) else q * q.shape[-1] ** -0.5, k)


@jax.checkpoint
def store_scores(q, k, v_bSgU, seen_bsS, bias_hsS=None):
    """Compute `masked_attention` in plain JAX."""
    q_bshK, k_bSgK = scale_and_join(q, k)
    (b, s, h, K), (_, S, g, _) = q_bshK.shape, k_bSgK.shape
    scores_bgrsS = einsum_f32("bsgrK,bSgK->bgrsS", q_bshK.reshape(b, s, g, h // g, K), k_bSgK)
    if bias_hsS is not None:
        scores_bgrsS += bias_hsS.reshape(1, g, h // g, s, S)
    seen_b11sS = seen_bsS[:, None, None]
    weight_bgrsS = jax.nn.softmax(jnp.where(seen_b11sS, scores_bgrsS, HIDDEN), axis=-1) * seen_b11sS
    mixed_bsgrU = einsum_f32("bgrsS,bSgU->bsgrU", weight_bgrsS.astype(v_bSgU.dtype), v_bSgU)
    return mixed_bsgrU.astype(v_bSgU.dtype).reshape(b, s, h, -1)


# TPU ------------------------------------------------------------------------------------------------------------------


def queries_per_block(s: int, S: int) -> int:
    """Return how many queries a block of the kernel has; 0 if the scores of the smallest block are too many."""
    return next((x for x in (512, 256, 128) if in_lanes(s) % x == 0 and x * in_lanes(S) <= MOST_SCORES), 0)


def count_scores(s: int, S: int, width: int) -> int:
    """Return how many scores of a head the kernel computes, with padding. 0 means that `masked_attention` does not use
    the kernel: more than half of the queries would be padding, as in decoding, or there are too many keys.

    width  of a key and a value together
    """
    fits = 2 * s > in_lanes(s) and queries_per_block(s, S) and in_lanes(S) * width <= MOST_NUMBERS
    return in_lanes(s) * in_lanes(S) if fits else 0


def softmax_of_block(q, k, seen, bias):
    """Return exponentials of the scores of a block, [S, x], and the factor that makes them a softmax, [1, x]."""
    scores_Sx = dot(k[...], q[...], 0, 0) + (bias[0][...] if bias else 0.0)
    scores_Sx = jnp.where(seen[...].astype(float32) > 0, scores_Sx, HIDDEN)
    top_1x = jnp.max(scores_Sx, axis=0, keepdims=True)
    weight_Sx = jnp.exp(scores_Sx - top_1x)
    return weight_Sx, jnp.where(top_1x > HIDDEN, 1 / jnp.sum(weight_Sx, axis=0, keepdims=True), 0)


def forward_kernel(q, k, v, seen, *bias_and_mixed):
    *bias, mixed = bias_and_mixed
    weight_Sx, scale_1x = softmax_of_block(q, k, seen, bias)
    mixed[...] = (dot(v[...], weight_Sx.astype(v.dtype), 1, 0) * scale_1x).astype(mixed.dtype)


def backward_kernel(grid, group, has_bias, q, k, v, seen, *more):
    bias, (d_mixed, dq, dk, dv, *d_bias) = more[:has_bias], more[has_bias:]
    head, block, sequence = (pl.program_id(grid.index(name)) for name in "hnb")
    # With biases, every visit has its own place for the gradients of keys and values.
    start_sums((dk, dv), has_bias or (block == 0) & (jax.lax.rem(head, group) == 0))
    start_sums(d_bias, sequence == 0)
    weight_Sx, scale_1x = softmax_of_block(q, k, seen, bias)
    weight_Sx *= scale_1x
    d_weight_Sx = weight_Sx * dot(v[...], d_mixed[...], 0, 0)
    d_scores_Sx = d_weight_Sx - weight_Sx * jnp.sum(d_weight_Sx, axis=0, keepdims=True)
    narrow_Sx = d_scores_Sx.astype(q.dtype)
    dq[...] = dot(k[...], narrow_Sx, 1, 0).astype(dq.dtype)
    dk[...] += dot(q[...], narrow_Sx, 1, 1).astype(dk.dtype)
    dv[...] += dot(d_mixed[...], weight_Sx.astype(v.dtype), 1, 1).astype(dv.dtype)
    for total in d_bias:
        total[...] += d_scores_Sx


def start_sums(sums, is_first):
    @pl.when(is_first)
    def _():
        for total in sums:
            total[...] = jnp.zeros_like(total)


def widths_first(x_bshK, count: int):
    """Reorder the dims, and pad the positions to a multiple. Narrow heads as the last dim would be padded to 128 lanes.
    Shapes: [b, s, h, K] -> [b, h, K, s]."""
    return pad_to_multiple(x_bshK.transpose(0, 2, 3, 1), count, 3)


def positions_first(x_bhKs, s: int):
    """The inverse of `widths_first`."""
    return x_bhKs[..., :s].transpose(0, 3, 1, 2)


class Grid(NamedTuple):
    """The grid of a kernel, and the BlockSpecs of its arrays.

    names  the dims of the grid, the fastest last: h heads, n blocks of queries, b sequences. A result stays in VMEM,
           where the kernel adds to it, only as long as its place is the same. With biases b is last, for the sum of a
           bias's gradient over the sequences. Without, h and n are last, for the sums of the gradients of a key head
           over its group of heads and their queries
    """

    names: str
    x: int  # queries per block
    S: int  # keys, with padding
    group: int  # heads that share a key head

    def spec(self, shape: tuple, at: Callable):
        """Return the BlockSpec of a block with the last two dims `shape`, at the leading indices at(h, n, b)."""
        place = lambda *grid: at(*(grid[self.names.index(name)] for name in "hnb"))
        return pl.BlockSpec((*[None] * (len(place(0, 0, 0)) - 2), *shape), place)

    def queries(self, width: int):
        return self.spec((width, self.x), lambda h, n, b: (b, h, 0, n))

    def keys(self, width: int):
        return self.spec((width, self.S), lambda h, n, b: (b, h // self.group, 0, 0))

    def inputs(self, q_bshK, k_bSgK, v_bSgU, seen_bsS, *bias_hsS):
        """Return the inputs of both kernels, padded, and their BlockSpecs."""
        keys_last = lambda x_nsS: pad_to_multiple(pad_to_multiple(x_nsS.swapaxes(1, 2), LANES, 1), self.x, 2)
        arrays = (widths_first(q_bshK, self.x), widths_first(k_bSgK, LANES), widths_first(v_bSgU, LANES),
                  keys_last(seen_bsS.astype(jnp.int8)), *map(keys_last, bias_hsS))  # fmt: skip
        specs = [self.queries(q_bshK.shape[-1]), self.keys(k_bSgK.shape[-1]), self.keys(v_bSgU.shape[-1]),
                 self.spec((self.S, self.x), lambda h, n, b: (b, 0, n)),
                 *(self.spec((self.S, self.x), lambda h, n, b: (h, 0, n)) for _ in bias_hsS)]  # fmt: skip
        return arrays, specs

    def call(self, kernel, arrays, specs, out, out_specs, widths: int, interpret: bool):
        """Call a kernel. widths: multiplications and additions for each score"""
        out = [x.update(manual_axis_type=jax.typeof(arrays[0]).mat) for x in out]
        b, h, _, s = arrays[0].shape
        sizes = {"h": h, "n": s // self.x, "b": b}
        moved = sum(x.size * x.dtype.itemsize for x in (*arrays, *out))
        return pl.pallas_call(
            kernel,
            out,
            grid=tuple(sizes[name] for name in self.names),
            in_specs=specs,
            out_specs=out_specs,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=pl.CostEstimate(2 * b * h * s * self.S * widths, b * h * s * self.S, moved),
            interpret=interpret,
        )(*arrays)


def make_grid(q_bshK, k_bSgK, v_bSgU, seen_bsS, *bias_hsS) -> Grid:
    (_, s, S), group = seen_bsS.shape, q_bshK.shape[2] // k_bSgK.shape[2]
    return Grid("hnb" if bias_hsS else "bhn", queries_per_block(s, S), in_lanes(S), group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_to_all(interpret: bool, *operands):
    """Compute `masked_attention` on a TPU, for scaled queries."""
    grid, (b, s, h, K), U = make_grid(*operands), operands[0].shape, operands[2].shape[-1]
    arrays, specs = grid.inputs(*operands)
    mixed = Array((b, h, U, arrays[0].shape[-1]), operands[2].dtype)
    (mixed_bhUs,) = grid.call(forward_kernel, arrays, specs, [mixed], [grid.queries(U)], K + U, interpret)
    return positions_first(mixed_bhUs, s)


def _forward(interpret, *operands):
    return attend_to_all(interpret, *operands), operands


def _backward(interpret, operands, d_mixed_bshU):
    """With biases b is the last dim of the grid, so the kernel cannot sum the gradients of keys and values over blocks
    of queries and heads. It writes them for each block and head, and XLA sums them."""
    (_, s, _, K), (_, S, g, U), dtype = operands[0].shape, operands[2].shape, operands[2].dtype
    grid, has_bias = make_grid(*operands), len(operands) > 4
    arrays, specs = grid.inputs(*operands)
    b, h, _, padded = arrays[0].shape
    n, heads = (padded // grid.x, h) if has_bias else (1, g)
    summed = dtype if has_bias and n == h // g == 1 else float32  # if there is something to sum
    keys = [Array((n, b, heads, width, grid.S), summed) for width in (K, U)]
    of_block = (lambda h, n, b: (n, b, h, 0, 0)) if has_bias else (lambda h, n, b: (0, b, h // grid.group, 0, 0))
    dq, dk, dv, *d_bias = grid.call(
        functools.partial(backward_kernel, grid.names, grid.group, has_bias),
        (*arrays, widths_first(d_mixed_bshU, grid.x)), [*specs, grid.queries(U)],
        [Array(arrays[0].shape, dtype), *keys, *(Array(x.shape, float32) for x in arrays[4:])],
        [specs[0], *(grid.spec((width, grid.S), of_block) for width in (K, U)), *specs[4:]], 3 * K + 2 * U, interpret,
    )  # fmt: skip
    of_group = lambda d: jnp.sum(d.reshape(n, b, g, -1, *d.shape[3:]), axis=(0, 3)).astype(dtype)
    d_bias = (d_hSs[:, :S, :s].swapaxes(1, 2) for d_hSs in d_bias)
    return positions_first(dq, s), *(positions_first(of_group(d), S) for d in (dk, dv)), None, *d_bias


attend_to_all.defvjp(_forward, _backward)
