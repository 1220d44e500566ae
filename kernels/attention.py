"""Flash attention: compute scores one block at a time instead of storing the score matrix.

Shape letters are those of `model.py`. A visit computes the scores of one block of queries with one block of keys. Key
blocks later than all queries of a block are skipped. The forward pass rescales the softmax when its maximum grows. The
backward pass recomputes the scores, and the softmax weights from the saved logsumexp.
Source: FlashAttention-2, arXiv:2307.08691.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels import blocks
from kernels.attention_gpu import gpu_attention, gpu_attention_grads
from kernels.blocks import HIDDEN, Starts, dot, pad_to_multiple, query_positions, visits
from sharding import by_platform, vary

float32 = jnp.float32


def partial_attention(q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, starts: Starts = ((0,),), here=0):
    """Compute causal attention over the given keys, and the logsumexp of each query's scores. With the logsumexp, the
    result can be merged with attention to other keys.

    Keys are in sequence order. A query attends to keys up to its own position and within its own document. A query with
    no such key gets zeros and the logsumexp HIDDEN. Each of g key/value heads serves h / g adjacent query heads.

    starts  for each device, the key positions at which its equally long chunks of queries begin; S means after all keys
    here    index of this device in `starts`
    Shapes: [b, s, h, K], [b, S, g, K], [b, S, g, U] -> [b, s, h, U], float32 [b, s, h].
    """
    operands = q_bshK * q_bshK.shape[-1] ** -0.5, k_bSgK, v_bSgU, segments_bs, segments_bS, jnp.asarray(here)
    everywhere = set().union(*(jax.typeof(x).mat.varying for x in operands))
    with jax.named_scope("attend"):
        return _attention(starts, *vary(operands, sorted(everywhere)))


@jax.checkpoint
def masked_attention(q_bshK, k_bSgK, v_bSgU, seen_bsS, bias_hsS=None):
    """Compute attention with any mask, and store the scores of all pairs; the backward pass recomputes them.

    seen_bsS  whether a query attends to a key; a query that attends to none gets zeros
    bias_hsS  float32, added to the scores; None: nothing
    Shapes: [b, s, h, K], [b, S, g, K], [b, S, g, U] -> [b, s, h, U].
    """
    (b, s, h, K), (_, S, g, _) = q_bshK.shape, k_bSgK.shape
    with jax.named_scope("attend"):
        scores_bgrsS = einsum_f32("bsgrK,bSgK->bgrsS", (q_bshK * K**-0.5).reshape(b, s, g, h // g, K), k_bSgK)
        if bias_hsS is not None:
            scores_bgrsS += bias_hsS.reshape(1, g, h // g, s, S)
        seen_b11sS = seen_bsS[:, None, None]
        weight_bgrsS = jax.nn.softmax(jnp.where(seen_b11sS, scores_bgrsS, HIDDEN), axis=-1) * seen_b11sS
        return (
            einsum_f32("bgrsS,bSgU->bsgrU", weight_bgrsS.astype(v_bSgU.dtype), v_bSgU)
            .astype(v_bSgU.dtype)
            .reshape(b, s, h, -1)
        )


# The custom gradient wraps the choice of implementation, so all implementations save the same arrays.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(starts: Starts, *operands):
    forms = dict(tpu=tpu_attention, gpu=gpu_attention, default=mixed_in_blocks)
    return by_platform(*operands, **{name: functools.partial(form, starts) for name, form in forms.items()})


def _forward(starts, *operands):
    results = checkpoint_name(_attention(starts, *operands), "attention")
    return results, (operands, results)


def _backward(starts, residuals, d_results):
    operands, (mixed_bshU, log_sum_bsh) = residuals
    d_mixed_bshU, d_log_sum_bsh = d_results
    # A score's gradient is weight * (d_weight - slope). Raising all scores of a query equally does not change the
    # softmax, only the logsumexp.
    slope_bsh = jnp.sum(d_mixed_bshU.astype(float32) * mixed_bshU.astype(float32), axis=-1) - d_log_sum_bsh
    top_bsh = jnp.where(log_sum_bsh > HIDDEN / 2, log_sum_bsh, 0)  # if all scores are hidden, the weights are 0
    with jax.named_scope("attend"):
        forms = dict(tpu=tpu_attention_grads, gpu=gpu_attention_grads, default=pulled_in_blocks)
        forms = {name: functools.partial(form, starts) for name, form in forms.items()}
        gradients = by_platform(*operands, d_mixed_bshU, top_bsh, slope_bsh, **forms)
    return *gradients, None, None, None


_attention.defvjp(_forward, _backward)


class Counted(NamedTuple):
    """How one head of a sequence is split into blocks on a device."""

    ahead: int  # visits of the forward pass
    back: int  # visits of the backward pass
    block: int  # queries, and keys, per block
    spans: int  # spans of keys, see `blocks_per_span`


def count_visits(s: int, S: int, starts: Starts, K: int, U: int, width: int, platform: str) -> Counted:
    """Count the visits and blocks of one head. width: bytes per number"""
    block = tpu_block(s, S, starts) if platform == "tpu" else cpu_block_rows(s, starts)
    span = blocks_per_span(S, K, U, block, width) if platform == "tpu" else -(-S // block)
    ahead, back = (blocks.count_visits(s, S, starts, block, of) for of in (None, span))
    return Counted(ahead, back, block, -(-S // (span * block)))


def flops(counted: Counted, h: int, K: int, U: int) -> tuple[int, int]:
    """Count FLOPs for one sequence on a device, forward and backward, including masked entries of visited blocks.

    The backward pass recomputes the scores, then computes the gradients of softmax weights, queries, keys and values.
    """
    scores, again = counted.ahead * counted.block * counted.block, counted.back * counted.block * counted.block
    return 2 * h * scores * (K + U), 2 * h * again * (3 * K + 2 * U)


def hbm_bytes(counted: Counted, s: int, S: int, h: int, g: int, K: int, U: int, width: int):
    """Count the bytes of HBM traffic of attention for one sequence, forward and backward.

    Each visit reads its keys and values. In the forward pass a block of queries stays on chip for all its visits; in
    the backward pass, for its visits to one span of keys, whose gradients stay on chip too. In addition each query has
    one float32 number (the logsumexp) in the forward pass, and two in the backward pass.
    """
    ahead, back, block, spans = counted
    forward = h * (width * (ahead * block + s) * (K + U) + 4 * s)
    return forward, h * (width * (back * block * (K + U) + spans * s * (2 * K + U)) + 8 * spans * s) + g * width * S * (
        K + U
    )


# Plain JAX ------------------------------------------------------------------------------------------------------------
# In a block, the queries of all heads that share a key head are stacked as rows. Letters: n blocks, x queries and X
# keys per block, r query heads per key head, y = r * x rows.

BLOCK = 256  # maximum number of queries, and of keys, per block


def cpu_block_rows(s: int, starts: Starts) -> int:
    """Return the number of queries, and of keys, per block: a chunk is split into equal blocks of at most BLOCK."""
    chunk = s // len(starts[0])
    return -(-chunk // -(-chunk // BLOCK))


def split_into_blocks(x_bshK, g: int, block: int):
    """Split a sequence into n blocks and stack the heads of a group. Shapes: [b, s, h, K] -> [n, b, g, h/g * x, K]."""
    (b, s, h, K), n = x_bshK.shape, -(-x_bshK.shape[1] // block)
    x_bshK = jnp.pad(x_bshK, ((0, 0), (0, n * block - s), (0, 0), (0, 0)))
    x_nbgrxK = x_bshK.reshape(b, n, block, g, h // g, K).transpose(1, 0, 3, 4, 2, 5)
    return x_nbgrxK.reshape(n, b, g, h // g * block, K)


def merge_blocks(x_nbgyK, s: int, block: int):
    """The inverse of `split_into_blocks`."""
    n, b, g, _, K = x_nbgyK.shape
    x_nbgrxK = x_nbgyK.reshape(n, b, g, -1, block, K)
    return x_nbgrxK.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * block, -1, K)[:, :s]


def split_operands(starts, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here):
    """Split the operands into blocks. Returns q, k and v, the visits, fn(query block, key block) -> mask, the block."""
    (_, s, h, _), (_, S, g, _) = q_bshK.shape, k_bSgK.shape
    block = cpu_block_rows(s, starts)
    order_nbg = jnp.broadcast_to(jnp.asarray(query_positions(starts, s))[here][None, :, None, None], (1, s, h // g, 1))
    segments_bsr = jnp.broadcast_to(segments_bs[:, :, None, None], (*segments_bs.shape, h // g, 1))
    order_nzyo, segments_nbgyo = split_into_blocks(order_nbg, 1, block), split_into_blocks(segments_bsr, 1, block)
    # No query belongs to document -1, the padding's.
    segments_nbX = jnp.moveaxis(jnp.pad(segments_bS, ((0, 0), (0, -S % block)), constant_values=-1)
                                .reshape(len(segments_bS), -1, block), 1, 0)  # fmt: skip

    def seen(i, j):
        earlier = order_nzyo[i] >= (j * block + jnp.arange(block))[None, None, None, :]
        return earlier & (segments_nbgyo[i] == segments_nbX[j][:, None, None, :])

    cut_all = (split_into_blocks(x, g, block) for x in (q_bshK, k_bSgK, v_bSgU))
    return *cut_all, jnp.asarray(visits(s, S, starts, block))[here, 1:].T, seen, block


def einsum_f32(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=float32)


def mixed_in_blocks(starts, *operands):
    """Attention in plain JAX: a loop over visits that carries each query's weighted values, maximum score, and sum of
    exponentials."""
    q_nbgyK, k_nbgXK, v_nbgXU, visits_v2, seen, block = split_operands(starts, *operands)
    s = operands[0].shape[1]

    def visit(carry, ij):
        i, j = ij
        mixed_bgyU, top_bgy, sum_bgy = (x[i] for x in carry)
        scores_bgyX = jnp.where(seen(i, j), einsum_f32("bgyK,bgXK->bgyX", q_nbgyK[i], k_nbgXK[j]), HIDDEN)
        higher_bgy = jnp.maximum(top_bgy, jnp.max(scores_bgyX, axis=-1))
        weight_bgyX, rescale_bgy = jnp.exp(scores_bgyX - higher_bgy[..., None]), jnp.exp(top_bgy - higher_bgy)
        new_bgyU = einsum_f32("bgyX,bgXU->bgyU", weight_bgyX.astype(v_nbgXU.dtype), v_nbgXU[j])
        new = (mixed_bgyU * rescale_bgy[..., None] + new_bgyU, higher_bgy,
               sum_bgy * rescale_bgy + jnp.sum(weight_bgyX, axis=-1))  # fmt: skip
        return tuple(x.at[i].set(part) for x, part in zip(carry, new, strict=True)), None

    rows = q_nbgyK.shape[:-1]
    start = jnp.zeros((*rows, v_nbgXU.shape[-1])), jnp.full(rows, HIDDEN), jnp.zeros(rows)
    start = vary(start, tuple(jax.typeof(q_nbgyK).mat.varying))
    (mixed_nbgyU, top_nbgy, sum_nbgy), _ = jax.lax.scan(visit, start, visits_v2)
    is_seen = top_nbgy > HIDDEN
    mixed_nbgyU = jnp.where(is_seen[..., None], mixed_nbgyU / sum_nbgy[..., None], 0).astype(v_nbgXU.dtype)
    log_sum_nbgy = jnp.where(is_seen, top_nbgy + jnp.log(sum_nbgy), HIDDEN)
    return merge_blocks(mixed_nbgyU, s, block), merge_blocks(log_sum_nbgy[..., None], s, block)[..., 0]


def pulled_in_blocks(starts, *args):
    """Return the gradients of queries, keys and values in plain JAX: the same loop, with recomputed scores."""
    *operands, d_mixed_bshU, top_bsh, slope_bsh = args
    q_nbgyK, k_nbgXK, v_nbgXU, visits_v2, seen, block = split_operands(starts, *operands)
    g = k_nbgXK.shape[2]
    d_mixed_nbgyU = split_into_blocks(d_mixed_bshU, g, block)
    top_nbgy1, slope_nbgy1 = (split_into_blocks(x[..., None], g, block) for x in (top_bsh, slope_bsh))

    def visit(carry, ij):
        (i, j), (dq, dk, dv) = ij, carry
        scores_bgyX = jnp.where(seen(i, j), einsum_f32("bgyK,bgXK->bgyX", q_nbgyK[i], k_nbgXK[j]), HIDDEN)
        weight_bgyX = jnp.exp(scores_bgyX - top_nbgy1[i])
        d_weight_bgyX = einsum_f32("bgyU,bgXU->bgyX", d_mixed_nbgyU[i], v_nbgXU[j])
        d_scores_bgyX = (weight_bgyX * (d_weight_bgyX - slope_nbgy1[i])).astype(q_nbgyK.dtype)
        dq = dq.at[i].add(einsum_f32("bgyX,bgXK->bgyK", d_scores_bgyX, k_nbgXK[j]))
        dk = dk.at[j].add(einsum_f32("bgyX,bgyK->bgXK", d_scores_bgyX, q_nbgyK[i]))
        dv = dv.at[j].add(einsum_f32("bgyX,bgyU->bgXU", weight_bgyX.astype(v_nbgXU.dtype), d_mixed_nbgyU[i]))
        return (dq, dk, dv), None

    start = tuple(jnp.zeros(x.shape, float32) for x in (q_nbgyK, k_nbgXK, v_nbgXU))
    gradients, _ = jax.lax.scan(visit, vary(start, tuple(jax.typeof(q_nbgyK).mat.varying)), visits_v2)
    return tuple(
        merge_blocks(dx, x.shape[1], block).astype(x.dtype) for dx, x in zip(gradients, operands, strict=False)
    )


# TPU: kernels that keep blocks of scores in VMEM ----------------------------------------------------------------------
# Scores are transposed, [X, x], with queries along the lanes of a vector. So one number per query forms a row.

VMEM_BYTES = 8 * 2**20  # for the gradients of keys and values, out of the 16 MiB of VMEM that a kernel may use


def tpu_block(s: int, S: int, starts: Starts) -> int:
    """Return the number of queries, and of keys, per block. It is large, to amortize a visit's overhead, but at most a
    chunk and at most a quarter of the keys, because half of each block on the diagonal is masked."""
    most = min(s // len(starts[0]), S // 4)
    return next((block for block in (512, 256) if block <= most), 128)


def heads_first(x_bshK, block: int):
    """Move heads before positions, and pad to whole blocks. Shapes: [b, s, h, K] -> [b, h, s, K]."""
    return pad_to_multiple(x_bshK.swapaxes(1, 2), block, 2)


def query_rows(starts, segments_bs, here, block: int):
    """Return the position and the document of each query, [b, 2, s]."""
    order_bs = jnp.broadcast_to(
        jnp.asarray(query_positions(starts, segments_bs.shape[1]))[here][None, :], segments_bs.shape
    )
    return pad_to_multiple(jnp.stack([order_bs, segments_bs], axis=1), block, 2)


def scores(q_xK, k_XK, queries_2x, keys_1X, j):
    """Return the masked scores of a visit to key block j, [X, x]."""
    block = k_XK.shape[0]
    scores_Xx = dot(k_XK, q_xK, 1, 1)
    place_Xx = j * block + jax.lax.broadcasted_iota(jnp.int32, scores_Xx.shape, 0)
    documents_X1 = jnp.broadcast_to(keys_1X, (128, block)).T[:, :1]
    return jnp.where((queries_2x[:1] >= place_Xx) & (queries_2x[1:] == documents_X1), scores_Xx, HIDDEN)


def is_first_and_last(v, n: int, entry):
    """Return whether visit v is the first, and whether it is the last, of consecutive visits with the same entry(v)."""
    is_first = (v == 0) | (entry(jnp.maximum(v - 1, 0)) != entry(v))
    return is_first, (v == n - 1) | (entry(jnp.minimum(v + 1, n - 1)) != entry(v))


def forward_kernel(n, blocks, head_v, query_v, key_v, q, k, v, queries, keys, mixed, log_sum, total_Ux, top_1x, sum_1x):
    """The TPU kernel of the forward pass, for one of n visits."""
    visit = pl.program_id(2)
    is_first, is_last = is_first_and_last(visit, n, lambda v: head_v[v] * blocks + query_v[v])

    @pl.when(is_first)
    def _():
        total_Ux[...], sum_1x[...] = jnp.zeros_like(total_Ux), jnp.zeros_like(sum_1x)
        top_1x[...] = jnp.full_like(top_1x, HIDDEN)

    scores_Xx = scores(q[...], k[...], queries[...], keys[...], key_v[visit])
    higher_1x = jnp.maximum(top_1x[...], jnp.max(scores_Xx, axis=0, keepdims=True))
    weight_Xx, rescale_1x = jnp.exp(scores_Xx - higher_1x), jnp.exp(top_1x[...] - higher_1x)
    total_Ux[...] = total_Ux[...] * rescale_1x + dot(v[...], weight_Xx.astype(v.dtype), 0, 0)
    sum_1x[...] = sum_1x[...] * rescale_1x + jnp.sum(weight_Xx, axis=0, keepdims=True)
    top_1x[...] = higher_1x

    @pl.when(is_last)
    def _():
        is_seen = top_1x[...] > HIDDEN
        mixed[...] = jnp.where(is_seen, total_Ux[...] / sum_1x[...], 0).T.astype(mixed.dtype)
        log_sum[...] = jnp.where(is_seen, top_1x[...] + jnp.log(sum_1x[...]), HIDDEN)


def backward_kernel(n, blocks, span, head_v, query_v, key_v, q, k, v, queries, keys, d_mixed, stats, dq, dk, dv,
                    dq_xK, dk_wK, dv_wU):  # fmt: skip
    """The TPU kernel of the backward pass, for one of n visits."""
    visit, number = pl.program_id(2), lambda v: jax.lax.div(key_v[v], span)
    is_first, is_last = is_first_and_last(visit, n, lambda v: number(v) * n + head_v[v] * blocks + query_v[v])
    begins_span, ends_span = is_first_and_last(visit, n, number)

    @pl.when(begins_span)
    def _():
        dk_wK[...], dv_wU[...] = jnp.zeros_like(dk_wK), jnp.zeros_like(dv_wU)

    @pl.when(is_first)
    def _():
        dq_xK[...] = jnp.zeros_like(dq_xK)

    weight_Xx = jnp.exp(scores(q[...], k[...], queries[...], keys[...], key_v[visit]) - stats[:1])
    d_weight_Xx = dot(v[...], d_mixed[...], 1, 1)
    d_scores_Xx = (weight_Xx * (d_weight_Xx - stats[1:])).astype(q.dtype)
    block = len(weight_Xx)
    own = pl.ds(pl.multiple_of(jax.lax.rem(key_v[visit], span) * block, block), block)
    dk_wK[own] += dot(d_scores_Xx, q[...], 1, 0)
    dv_wU[own] += dot(weight_Xx.astype(v.dtype), d_mixed[...], 1, 0)
    dq_xK[...] += dot(d_scores_Xx, k[...], 0, 0)

    @pl.when(is_last)
    def _():
        dq[...] = dq_xK[...].astype(dq.dtype)

    @pl.when(ends_span)
    def _():
        dk[...], dv[...] = dk_wK[...].astype(dk.dtype), dv_wU[...].astype(dv.dtype)


def blocks_per_span(S: int, K: int, U: int, block: int, width: int) -> int:
    """Return the number of key blocks per span: keys are split into equal spans whose gradients fit in VMEM_BYTES.
    width: bytes per number of the output"""
    lanes = sum(-(-size // 128) * 128 for size in (K, U))
    spans = -(-S // max(VMEM_BYTES // ((4 + width) * lanes * block), 1) // block)
    return -(-S // (spans * block))


class BlockSpecs(NamedTuple):
    """Functions that return the BlockSpec of a visit's block, for arrays [b, h, s, width], [b, h, rows, s], .."""

    query: Callable
    row: Callable
    key: Callable


def block_specs(block: int, heads: int) -> BlockSpecs:
    head_at = lambda b, g, v, head, query, key: (b, g * heads + head[v])
    return BlockSpecs(
        lambda width: pl.BlockSpec((None, None, block, width), lambda *at: (*head_at(*at), at[4][at[2]], 0)),
        lambda rows: pl.BlockSpec((None, None, rows, block), lambda *at: (*head_at(*at), 0, at[4][at[2]])),
        lambda width: pl.BlockSpec((None, None, block, width), lambda b, g, v, head, query, key: (b, g, key[v], 0)),
    )


def kernel_inputs(starts, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, block: int, span: int):
    """Return the inputs of both kernels, padded to whole blocks and spans of keys, and their BlockSpecs."""
    heads, (K, U) = q_bshK.shape[2] // k_bSgK.shape[2], (k_bSgK.shape[3], v_bSgU.shape[3])
    at = block_specs(block, heads)
    arrays = (heads_first(q_bshK, block), heads_first(k_bSgK, span * block), heads_first(v_bSgU, span * block),
              query_rows(starts, segments_bs, here, block),
              pad_to_multiple(segments_bS, span * block, 1, -1)[:, None])  # fmt: skip
    queries = pl.BlockSpec((None, 2, block), lambda b, g, v, head, query, key: (b, 0, query[v]))
    keys = pl.BlockSpec((None, 1, block), lambda b, g, v, head, query, key: (b, 0, key[v]))
    return arrays, [at.query(K), at.key(K), at.key(U), queries, keys]


def tpu_attention(starts, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, interpret=False):
    """Attention and its logsumexp on a TPU, with the arguments of `_attention`."""
    (b, s, h, K), (_, S, g, U) = q_bshK.shape, v_bSgU.shape
    block, heads = tpu_block(s, S, starts), h // g
    counted = count_visits(s, S, starts, K, U, k_bSgK.dtype.itemsize, "tpu")
    tables = jnp.asarray(visits(s, S, starts, block, heads=heads))[here]
    n, blocks, at = tables.shape[1], -(-s // block), block_specs(block, heads)
    arrays, specs = kernel_inputs(starts, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, block, 1)
    mixed_bhsU, log_sum_bh1s = _call(
        functools.partial(forward_kernel, n, blocks), (b, g, n), tables, arrays, specs,
        [((b, h, blocks * block, U), v_bSgU.dtype), ((b, h, 1, blocks * block), float32)], [at.query(U), at.row(1)],
        [(U, block), (1, block), (1, block)], interpret,
        flops=b * flops(counted, h, K, U)[0], exponentials=b * g * n * block**2,
    )  # fmt: skip
    return mixed_bhsU[:, :, :s].swapaxes(1, 2), log_sum_bh1s[:, :, 0, :s].swapaxes(1, 2)


def tpu_attention_grads(starts, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, d_mixed_bshU, top_bsh,
                        slope_bsh, interpret=False):  # fmt: skip
    """Return the gradients of queries, keys and values on a TPU.

    The gradients of a span of keys stay in VMEM until all queries of all heads have visited it. The gradients of a
    query are summed over spans.
    """
    (b, s, h, K), (_, S, g, U) = q_bshK.shape, v_bSgU.shape
    block, heads = tpu_block(s, S, starts), h // g
    span = blocks_per_span(S, K, U, block, k_bSgK.dtype.itemsize)
    counted = count_visits(s, S, starts, K, U, k_bSgK.dtype.itemsize, "tpu")
    tables = jnp.asarray(visits(s, S, starts, block, span, heads))[here]
    n, blocks, at = tables.shape[1], -(-s // block), block_specs(block, heads)
    arrays, specs = kernel_inputs(starts, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here, block, span)
    stats_bh2s = pad_to_multiple(jnp.stack([top_bsh, slope_bsh]).transpose(1, 3, 0, 2), block, 3)
    spans = -(-S // (span * block))
    of_span = lambda b, g, v, head, query, key: (b, g, jax.lax.div(key[v], span), 0)
    whole = lambda width: pl.BlockSpec((None, None, span * block, width), of_span, pipeline_mode=pl.Buffered(1))
    by_span = lambda *of: (jax.lax.div(of[5][of[2]], span), *at.query(K).index_map(*of))
    dq_nbhsK, dk_bgSK, dv_bgSU = _call(
        functools.partial(backward_kernel, n, blocks, span), (b, g, n), tables,
        (*arrays, heads_first(d_mixed_bshU, block), stats_bh2s), [*specs, at.query(U), at.row(2)],
        [((spans, *arrays[0].shape), q_bshK.dtype if spans == 1 else float32), (arrays[1].shape, k_bSgK.dtype),
         (arrays[2].shape, v_bSgU.dtype)],
        [pl.BlockSpec((None, None, None, block, K), by_span), whole(K), whole(U)],
        [(block, K), (span * block, K), (span * block, U)], interpret,
        flops=b * flops(counted, h, K, U)[1], exponentials=b * g * n * block**2,
    )  # fmt: skip
    dq_bhsK = jnp.sum(dq_nbhsK, axis=0).astype(q_bshK.dtype)
    return dq_bhsK[:, :, :s].swapaxes(1, 2), dk_bgSK[:, :, :S].swapaxes(1, 2), dv_bgSU[:, :, :S].swapaxes(1, 2)


def _call(kernel, grid, tables, arrays, in_specs, out, out_specs, scratch, interpret, *, flops, exponentials):
    size = lambda x: x.size * x.dtype.itemsize
    out = [jax.ShapeDtypeStruct(*x, manual_axis_type=jax.typeof(arrays[0]).mat) for x in out]
    return pl.pallas_call(
        kernel,
        out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables), grid=grid, in_specs=in_specs, out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops, exponentials, sum(map(size, (*arrays, *out)))),
        interpret=interpret,
    )(*tables, *arrays)  # fmt: skip
