"""Flash attention on GPUs: each Triton program owns one block of queries, or of keys, and loops over the other blocks.

Shape letters are those of `model.py`; x queries and X keys per block. Widths are padded to powers of two with zeros,
which does not change the matmuls' results. Each device's queries are in sequence order, so a query block attends to
consecutive key blocks, and consecutive query blocks attend to a key block.
Source: FlashAttention-2, arXiv:2307.08691.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels.blocks import HIDDEN, Reach, dot, pad_to_multiple, power_of_two, query_positions, visible_blocks

float32 = jnp.float32
TILE_BYTES = 32 * 2**10  # for one block of keys and values, out of at least 99 KiB of shared memory per SM


def gpu_block(s: int, S: int, K: int, U: int, width: int) -> int:
    """Return the number of queries, and of keys, per block: 64, or less (32, 16) if 64 keys and values need more than
    TILE_BYTES or are more than the sequence. Triton matmuls need at least 16."""
    fits = [n for n in (64, 32) if n * width * (power_of_two(K) + power_of_two(U)) <= TILE_BYTES and n <= max(s, S)]
    return max([*fits, 16])


def masked_scores(reach, q_xK, k_XK, queries_2x, documents_X, j):
    """Return the masked scores of a query block and key block j, [x, X]."""
    place_X = j * len(k_XK) + jax.lax.broadcasted_iota(jnp.int32, (len(k_XK),), 0)
    place_x, documents_x = queries_2x
    seen = reach.includes(place_x[:, None], place_X[None]) & (documents_x[:, None] == documents_X[None])
    return reach.hide(dot(q_xK, k_XK, 1, 1), seen)


def forward_program(reach, q, k, v, places, documents_s, documents_S, visits_2i, mixed, log_sum):
    """The forward pass for one block of queries."""
    q_xK, queries_2x = q[...], (places[...], documents_s[...])
    block, U = len(q_xK), v.shape[-1]

    def visit(j, carry):
        mixed_xU, top_x, sum_x = carry
        keys = pl.ds(j * block, block)
        v_XU = v[keys, :]
        scores_xX = masked_scores(reach, q_xK, k[keys, :], queries_2x, documents_S[keys], j)
        higher_x = jnp.maximum(top_x, jnp.max(scores_xX, axis=1))
        weight_xX, rescale_x = jnp.exp(scores_xX - higher_x[:, None]), jnp.exp(top_x - higher_x)
        mixed_xU = mixed_xU * rescale_x[:, None] + dot(weight_xX.astype(v_XU.dtype), v_XU, 1, 0)
        return mixed_xU, higher_x, sum_x * rescale_x + jnp.sum(weight_xX, axis=1)

    start = jnp.zeros((block, U), float32), jnp.full((block,), HIDDEN, float32), jnp.zeros((block,), float32)
    mixed_xU, top_x, sum_x = loop_over_blocks(visits_2i, visit, start)
    is_seen = top_x > HIDDEN
    mixed[...] = jnp.where(is_seen[:, None], mixed_xU / sum_x[:, None], 0).astype(mixed.dtype)
    log_sum[...] = jnp.where(is_seen, top_x + jnp.log(sum_x), HIDDEN)


def score_grads(reach, scores_xX, d_mixed_xU, v_XU, top_x, slope_x):
    """Return the softmax weights, and the gradient of the scores before the cap."""
    weight_xX = jnp.exp(scores_xX - top_x[:, None])
    return weight_xX, reach.before_cap(weight_xX * (dot(d_mixed_xU, v_XU, 1, 1) - slope_x[:, None]), scores_xX)


def query_grads_program(reach, q, k, v, places, documents_s, documents_S, visits_2i, d_mixed, top, slope, dq):
    """The backward pass for one block of queries: their gradient."""
    q_xK, queries_2x, stats = q[...], (places[...], documents_s[...]), (top[...], slope[...])
    block, d_mixed_xU = len(q_xK), d_mixed[...]

    def visit(j, dq_xK):
        keys = pl.ds(j * block, block)
        k_XK = k[keys, :]
        scores_xX = masked_scores(reach, q_xK, k_XK, queries_2x, documents_S[keys], j)
        _, d_scores_xX = score_grads(reach, scores_xX, d_mixed_xU, v[keys, :], *stats)
        return dq_xK + dot(d_scores_xX.astype(q_xK.dtype), k_XK, 1, 0)

    start = jnp.zeros(q_xK.shape, float32)
    dq[...] = loop_over_blocks(visits_2i, visit, start).astype(dq.dtype)


def key_grads_program(heads, reach, q, k, v, places, documents_s, documents_S, visits_2j, d_mixed, top, slope, dk, dv):
    """The backward pass for one block of keys and values: their gradients, from all query heads of the group."""
    j, k_XK, v_XU, documents_X = pl.program_id(2), k[...], v[...], documents_S[...]
    block = len(k_XK)

    def visit(number, carry):
        dk_XK, dv_XU = carry
        head, i = jax.lax.rem(number, heads), jax.lax.div(number, heads)
        queries = pl.ds(i * block, block)
        q_xK, d_mixed_xU = q[queries, head, :], d_mixed[queries, head, :]
        scores_xX = masked_scores(reach, q_xK, k_XK, (places[queries], documents_s[queries]), documents_X, j)
        stats = top[head, queries], slope[head, queries]
        weight_xX, d_scores_xX = score_grads(reach, scores_xX, d_mixed_xU, v_XU, *stats)
        dk_XK += dot(d_scores_xX.astype(q_xK.dtype), q_xK, 0, 0)
        return dk_XK, dv_XU + dot(weight_xX.astype(v_XU.dtype), d_mixed_xU, 0, 0)

    start = jnp.zeros(k_XK.shape, float32), jnp.zeros(v_XU.shape, float32)
    dk_XK, dv_XU = loop_over_blocks(visits_2j, visit, start, heads)
    dk[...], dv[...] = dk_XK.astype(dk.dtype), dv_XU.astype(dv.dtype)


def loop_over_blocks(visits_2i, visit, start, count: int = 1):
    """Call `visit` `count` times for each block that this program visits."""
    first, end = (visits_2i[row, pl.program_id(2)] for row in range(2))
    return jax.lax.fori_loop(count * first, count * end, visit, start)


def program_tables(reach: Reach, s: int, S: int, here, block: int):
    """Return the positions of the queries, and [first, end) of the key blocks that each query block attends to, and of
    the query blocks that attend to each key block."""
    meets_nij = visible_blocks(s, S, reach, block)
    ends = lambda meets: np.where(meets.any(-1), [meets.argmax(-1), meets.shape[-1] - meets[..., ::-1].argmax(-1)], 0)
    tables = (ends(meets).swapaxes(0, 1) for meets in (meets_nij, meets_nij.swapaxes(1, 2)))
    places = pad_to_multiple(jnp.asarray(query_positions(reach.starts, s))[here], block, 0)
    return places, *(jnp.asarray(table, jnp.int32)[here] for table in tables)


class InputSpecs(NamedTuple):
    """The BlockSpecs of a program's inputs: of each dim a program reads its own block, or everything."""

    query: Callable  # width -> BlockSpec; so is key
    key: Callable
    place: pl.BlockSpec
    documents_s: pl.BlockSpec
    documents_S: pl.BlockSpec
    row: pl.BlockSpec  # for arrays with one number per query and head, [b, h, s]

    def all(self, K: int, U: int, table: int) -> list:
        visits = pl.BlockSpec((2, table), lambda *_: (0, 0))
        return [self.query(K), self.key(K), self.key(U), self.place, self.documents_s, self.documents_S, visits]


def specs_per_query_block(block: int, heads: int, N: int) -> InputSpecs:
    """Program (b, h, i) reads query block i of one head, and all N keys."""
    return InputSpecs(
        lambda width: pl.BlockSpec((None, block, None, width), lambda b, h, i: (b, i, h, 0)),
        lambda width: pl.BlockSpec((None, N, None, width), lambda b, h, i: (b, 0, jax.lax.div(h, heads), 0)),
        pl.BlockSpec((block,), lambda b, h, i: (i,)),
        pl.BlockSpec((None, block), lambda b, h, i: (b, i)),
        pl.BlockSpec((None, N), lambda b, h, i: (b, 0)),
        pl.BlockSpec((None, None, block), lambda b, h, i: (b, h, i)),
    )


def specs_per_key_block(block: int, heads: int, n: int) -> InputSpecs:
    """Program (b, g, j) reads key block j, and all n queries of the group's heads."""
    return InputSpecs(
        lambda width: pl.BlockSpec((None, n, heads, width), lambda b, g, j: (b, 0, g, 0)),
        lambda width: pl.BlockSpec((None, block, None, width), lambda b, g, j: (b, j, g, 0)),
        pl.BlockSpec((n,), lambda b, g, j: (0,)),
        pl.BlockSpec((None, n), lambda b, g, j: (b, 0)),
        pl.BlockSpec((None, block), lambda b, g, j: (b, j)),
        pl.BlockSpec((None, heads, n), lambda b, g, j: (b, g, 0)),
    )


def pad_inputs(q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, block: int):
    """Pad the inputs to whole blocks and power-of-two widths. Padding has document -1 in queries, and -2 in keys."""
    wide = [
        pad_to_multiple(pad_to_multiple(x, power_of_two(x.shape[3]), 3), block, 1) for x in (q_bshK, k_bSgK, v_bSgU)
    ]
    return *wide, pad_to_multiple(segments_bs, block, 1, -1), pad_to_multiple(segments_bS, block, 1, -2)


def gpu_attention(reach, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, interpret=False):
    """Attention and its logsumexp on a GPU, with the arguments of `attention._attention`."""
    (b, s, h, K), (_, S, g, U) = q_bshK.shape, v_bSgU.shape
    block = gpu_block(s, S, K, U, k_bSgK.dtype.itemsize)
    places, visits_2i, _ = program_tables(reach, s, S, here, block)
    q, k, v, *documents = pad_inputs(q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, block)
    (n, N, K_wide, U_wide), blocks = (q.shape[1], k.shape[1], q.shape[3], v.shape[3]), visits_2i.shape[1]
    reads = specs_per_query_block(block, h // g, N)
    mixed_bnhU, log_sum_bhn = _run(
        functools.partial(forward_program, reach), (b, h, blocks), (q, k, v, places, *documents, visits_2i),
        reads.all(K_wide, U_wide, blocks), [((b, n, h, U_wide), v.dtype), ((b, h, n), float32)],
        [reads.query(U_wide), reads.row], interpret,
    )  # fmt: skip
    return mixed_bnhU[:, :s, :, :U], log_sum_bhn[:, :, :s].swapaxes(1, 2)


def gpu_attention_grads(reach, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, d_mixed_bshU, top_bsh,
                        slope_bsh, interpret=False):  # fmt: skip
    """Return the gradients of queries, keys and values on a GPU.

    One kernel computes those of queries, and another those of keys and values. Both recompute the scores, so no two
    programs write to the same output.
    """
    (b, s, h, K), (_, S, g, U) = q_bshK.shape, v_bSgU.shape
    block = gpu_block(s, S, K, U, k_bSgK.dtype.itemsize)
    places, visits_2i, visits_2j = program_tables(reach, s, S, here, block)
    q, k, v, *documents = pad_inputs(q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, block)
    K_wide, U_wide = q.shape[3], v.shape[3]
    d_mixed = pad_to_multiple(pad_to_multiple(d_mixed_bshU, U_wide, 3), block, 1)
    stats = [pad_to_multiple(x.swapaxes(1, 2), block, 2) for x in (top_bsh, slope_bsh)]

    def pull(kernel, heads: int, reads: InputSpecs, table, out, out_specs):
        inputs = q, k, v, places, *documents, table, d_mixed, *stats
        specs = [*reads.all(K_wide, U_wide, table.shape[1]), reads.query(U_wide), reads.row, reads.row]
        out = [(x.shape, x.dtype) for x in out]
        return _run(kernel, (b, heads, table.shape[1]), inputs, specs, out, out_specs, interpret)

    of_query, of_key = specs_per_query_block(block, h // g, k.shape[1]), specs_per_key_block(block, h // g, q.shape[1])
    queries = functools.partial(query_grads_program, reach)
    (dq,) = pull(queries, h, of_query, visits_2i, [q], [of_query.query(K_wide)])
    keys = functools.partial(key_grads_program, h // g, reach)
    dk, dv = pull(keys, g, of_key, visits_2j, [k, v], [of_key.key(K_wide), of_key.key(U_wide)])
    return dq[:, :s, :, :K], dk[:, :S, :, :K], dv[:, :S, :, :U]


def _run(kernel, grid, arrays, in_specs, out, out_specs, interpret):
    warps = 4 if max(arrays[0].shape[3], arrays[2].shape[3]) <= 64 else 8
    return pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct(*x, manual_axis_type=jax.typeof(arrays[0]).mat) for x in out],
        grid=grid, in_specs=in_specs, out_specs=out_specs, interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
    )(*arrays)  # fmt: skip
