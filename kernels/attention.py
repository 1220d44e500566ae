"""Flash attention: compute scores one block at a time instead of storing the score matrix.

Shape letters are those of `model.py`. A visit computes the scores of one block of queries with one block of keys. Key
blocks later than all queries of a block, or before the windows of all, are skipped. The forward pass rescales the
softmax when its maximum grows. The backward pass recomputes the scores, and the softmax weights from the saved
logsumexp.
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
from kernels.blocks import CAUSAL, HIDDEN, Reach, dot, pad_to_multiple, query_positions, visits
from sharding import by_platform, vary

float32, Array = jnp.float32, jax.ShapeDtypeStruct


def partial_attention(q, k, v_bSgU, segments_bs, segments_bS, reach: Reach = CAUSAL, here=0, is_full=None):
    """Compute causal attention over the given keys, and the logsumexp of each query's scores. With the logsumexp, the
    result can be merged with attention to other keys.

    Keys are in sequence order. A query attends to keys up to its own position, within its own document and its window.
    A query with no such key gets zeros and the logsumexp HIDDEN. Each of g key/value heads serves h / g adjacent query
    heads.

    q, k    queries [b, s, h, K], which are scaled here, and keys [b, S, g, K]; or pairs of a content and a rotary part,
            whose scores are added: queries [b, s, h, K] and [b, s, h, R], which have been scaled, and keys [b, S, h, K]
            and [b, S, R], which all heads share
    reach   for each device, the key positions at which its equally long chunks of queries begin (S means after all
            keys), the window, and the cap of scores
    here    index of this device in `reach.starts`
    is_full  True: ignore the window. It may be traced, so that scanned layers may differ; None: False
    Shapes: q, k, [b, S, g, U] -> [b, s, h, U], float32 [b, s, h].
    """
    q = q if isinstance(q, tuple) else q * q.shape[-1] ** -0.5
    operands = q, k, v_bSgU, segments_bs, segments_bS, jnp.asarray(here)
    operands += () if is_full is None or not reach.window else (jnp.asarray(is_full),)
    everywhere = set().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(operands)))
    with jax.named_scope("attend"):
        return _attention(reach, *vary(operands, sorted(everywhere)))


def join_parts(q, k):
    """Concatenate the parts of pairs: -> [b, s, h, K + R], [b, S, h, K + R]. Arrays are returned unchanged."""
    if not isinstance(q, tuple):
        return q, k
    k_bShK, k_bSR = k
    k_bShR = jnp.broadcast_to(k_bSR[:, :, None, :], (*k_bShK.shape[:3], k_bSR.shape[-1]))
    return jnp.concatenate(q, axis=-1), jnp.concatenate([k_bShK, k_bShR], axis=-1)


def with_joined_parts(attend):
    """Return an implementation that also accepts pairs, from one that does not."""
    return lambda reach, q, k, *more: attend(reach, *join_parts(q, k), *more)


def grads_with_joined_parts(pull):
    """Return the same for an implementation of the backward pass."""

    def gradients(reach, q, k, *more):
        joined, split = jax.vjp(join_parts, q, k)
        dq, dk, dv = pull(reach, *joined, *more)
        return *split((dq, dk)), dv

    return gradients


def by_platform_and_reach(forms: dict, reach: Reach, is_full, *operands):
    """Call this platform's implementation: with the window, or without it if `is_full` is true."""
    run = lambda reach: by_platform(*operands, **{name: functools.partial(f, reach) for name, f in forms.items()})
    if not is_full:
        return run(reach)
    with jax.named_scope("full_or_window"):  # how often a step takes each branch: `plan/trace/compiled.py`
        return jax.lax.cond(is_full[0], lambda: run(reach._replace(window=0)), lambda: run(reach))


# The custom gradient wraps the choice of implementation, so all implementations save the same arrays.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(reach: Reach, q, k, v_bSgU, segments_bs, segments_bS, here, *is_full):
    forms = dict(tpu=tpu_attention, gpu=with_joined_parts(gpu_attention), default=with_joined_parts(mixed_in_blocks))
    return by_platform_and_reach(forms, reach, is_full, q, k, v_bSgU, segments_bs, segments_bS, here)


def _forward(reach, *operands):
    results = checkpoint_name(_attention(reach, *operands), "attention")
    return results, (operands, results)


def _backward(reach, residuals, d_results):
    every, (mixed_bshU, log_sum_bsh) = residuals
    operands, is_full = every[:6], every[6:]
    d_mixed_bshU, d_log_sum_bsh = d_results
    # A score's gradient is weight * (d_weight - slope). Raising all scores of a query equally does not change the
    # softmax, only the logsumexp.
    slope_bsh = jnp.sum(d_mixed_bshU.astype(float32) * mixed_bshU.astype(float32), axis=-1) - d_log_sum_bsh
    top_bsh = jnp.where(log_sum_bsh > HIDDEN / 2, log_sum_bsh, 0)  # if all scores are hidden, the weights are 0
    with jax.named_scope("attend"):
        gpu, default = map(grads_with_joined_parts, (gpu_attention_grads, pulled_in_blocks))
        forms = dict(tpu=tpu_attention_grads, gpu=gpu, default=default)
        gradients = by_platform_and_reach(forms, reach, is_full, *operands, d_mixed_bshU, top_bsh, slope_bsh)
    return *gradients, *(None for _ in every[3:])


_attention.defvjp(_forward, _backward)


class Counted(NamedTuple):
    """How one head of a sequence is split into blocks on a device."""

    ahead: int  # visits of the forward pass
    back: int  # visits of the backward pass
    block: int  # queries, and keys, per block
    spans: int  # spans of keys, see `blocks_per_span`


def count_visits(s: int, S: int, reach: Reach, K: int, U: int, width: int, platform: str) -> Counted:
    """Count the visits and blocks of one head. K: width of all parts of a key. width: bytes per number"""
    block = tpu_block(s, S, reach) if platform == "tpu" else cpu_block_rows(s, reach)
    span = blocks_per_span(S, K, U, block, width) if platform == "tpu" else -(-S // block)
    ahead, back = (blocks.count_visits(s, S, reach, block, of) for of in (None, span))
    return Counted(ahead, back, block, -(-S // (span * block)))


def flops(counted: Counted, h: int, K: int, U: int) -> tuple[int, int]:
    """Count FLOPs for one sequence on a device, forward and backward, including masked entries of visited blocks.

    The backward pass recomputes the scores, then computes the gradients of softmax weights, queries, keys and values.
    """
    scores, again = counted.ahead * counted.block * counted.block, counted.back * counted.block * counted.block
    return 2 * h * scores * (K + U), 2 * h * again * (3 * K + 2 * U)


def hbm_bytes(counted: Counted, s: int, S: int, h: int, g: int, K: int, U: int, width: int, R: int = 0):
    """Count the bytes of HBM traffic of attention for one sequence, forward and backward.

    Each visit reads its keys and values. In the forward pass a block of queries stays on chip for all its visits; in
    the backward pass, for its visits to one span of keys, whose gradients stay on chip too. In addition each query has
    one float32 number (the logsumexp) in the forward pass, and two in the backward pass.

    R  width of the part of a key that all heads share, out of K
    """
    ahead, back, block, spans = counted
    forward = h * (width * (ahead * block + s) * (K + U) + 4 * s)
    queries = h * (width * (back * block * (K + U) + spans * s * (2 * K + U)) + 8 * spans * s)
    return forward, queries + width * S * (g * (K - R + U) + R)


# Plain JAX ------------------------------------------------------------------------------------------------------------
# In a block, the queries of all heads that share a key head are stacked as rows. Letters: n blocks, x queries and X
# keys per block, r query heads per key head, y = r * x rows.

BLOCK = 256  # maximum number of queries, and of keys, per block


def cpu_block_rows(s: int, reach: Reach) -> int:
    """Return the number of queries, and of keys, per block: a chunk is split into equal blocks of at most BLOCK."""
    chunk = s // len(reach.starts[0])
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


def split_operands(reach, q_bshK, k_bSgK, v_bSgU, segments_bs, segments_bS, here):
    """Split the operands into blocks. Returns q, k and v, the visits, fn(query block, key block) -> mask, the block."""
    (_, s, h, _), (_, S, g, _) = q_bshK.shape, k_bSgK.shape
    block = cpu_block_rows(s, reach)
    order_1s11 = jnp.asarray(query_positions(reach.starts, s))[here][None, :, None, None]
    order_nbg = jnp.broadcast_to(order_1s11, (1, s, h // g, 1))
    segments_bsr = jnp.broadcast_to(segments_bs[:, :, None, None], (*segments_bs.shape, h // g, 1))
    order_nzyo, segments_nbgyo = split_into_blocks(order_nbg, 1, block), split_into_blocks(segments_bsr, 1, block)
    # No query belongs to document -1, the padding's.
    segments_nbX = jnp.moveaxis(jnp.pad(segments_bS, ((0, 0), (0, -S % block)), constant_values=-1)
                                .reshape(len(segments_bS), -1, block), 1, 0)  # fmt: skip

    def seen(i, j):
        in_reach = reach.includes(order_nzyo[i], (j * block + jnp.arange(block))[None, None, None, :])
        return in_reach & (segments_nbgyo[i] == segments_nbX[j][:, None, None, :])

    cut_all = (split_into_blocks(x, g, block) for x in (q_bshK, k_bSgK, v_bSgU))
    return *cut_all, jnp.asarray(visits(s, S, reach, block))[here, 1:].T, seen, block


def einsum_f32(equation, x, y):
    return jnp.einsum(equation, x, y, preferred_element_type=float32)


def mixed_in_blocks(reach, *operands):
    """Attention in plain JAX: a loop over visits that carries each query's weighted values, maximum score, and sum of
    exponentials."""
    q_nbgyK, k_nbgXK, v_nbgXU, visits_v2, seen, block = split_operands(reach, *operands)
    s = operands[0].shape[1]

    def visit(carry, ij):
        i, j = ij
        mixed_bgyU, top_bgy, sum_bgy = (x[i] for x in carry)
        scores_bgyX = reach.hide(einsum_f32("bgyK,bgXK->bgyX", q_nbgyK[i], k_nbgXK[j]), seen(i, j))
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


def pulled_in_blocks(reach, *args):
    """Return the gradients of queries, keys and values in plain JAX: the same loop, with recomputed scores."""
    *operands, d_mixed_bshU, top_bsh, slope_bsh = args
    q_nbgyK, k_nbgXK, v_nbgXU, visits_v2, seen, block = split_operands(reach, *operands)
    g = k_nbgXK.shape[2]
    d_mixed_nbgyU = split_into_blocks(d_mixed_bshU, g, block)
    top_nbgy1, slope_nbgy1 = (split_into_blocks(x[..., None], g, block) for x in (top_bsh, slope_bsh))

    def visit(carry, ij):
        (i, j), (dq, dk, dv) = ij, carry
        scores_bgyX = reach.hide(einsum_f32("bgyK,bgXK->bgyX", q_nbgyK[i], k_nbgXK[j]), seen(i, j))
        weight_bgyX = jnp.exp(scores_bgyX - top_nbgy1[i])
        d_weight_bgyX = einsum_f32("bgyU,bgXU->bgyX", d_mixed_nbgyU[i], v_nbgXU[j])
        d_scores_bgyX = reach.before_cap(weight_bgyX * (d_weight_bgyX - slope_nbgy1[i]), scores_bgyX)
        d_scores_bgyX = d_scores_bgyX.astype(q_nbgyK.dtype)
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
MOST_VISITS = 2**14  # in a list that several heads share: 192 KiB of a core's scalar memory


def tpu_block(s: int, S: int, reach: Reach) -> int:
    """Return the number of queries, and of keys, per block. It is large, to amortize a visit's overhead, but at most a
    chunk and at most a quarter of the keys, because half of each block on the diagonal is masked."""
    most = min(s // len(reach.starts[0]), S // 4)
    return next((block for block in (512, 256) if block <= most), 128)


def query_rows(reach, segments_bs, here, block: int):
    """Return the position and the document of each query, [b, 2, s]."""
    order_bs = jnp.broadcast_to(
        jnp.asarray(query_positions(reach.starts, segments_bs.shape[1]))[here][None, :], segments_bs.shape
    )
    return pad_to_multiple(jnp.stack([order_bs, segments_bs], axis=1), block, 2)


class Layout(NamedTuple):
    """The dims of the kernels' arrays, and their blocks. Arrays are [b, h, s, width], or [b, h, width, s] for pairs: as
    the last dim, the narrow heads of latent attention would be padded to 128 lanes in every matmul."""

    block: int  # queries, and keys, per block
    heads: int  # of a group, which share a key head or, with pairs, a sum of the rotary key's gradient
    dim: int  # of positions in a block: 0 or, with pairs, 1
    reach: Reach

    def sizes(self, width: int, positions: int) -> tuple[int, int]:
        """Return the last two dims of an array, in order."""
        return (width, positions) if self.dim else (positions, width)

    def arrange(self, x_bshK, count: int = 1):
        """Reorder the dims, and pad to a multiple of `count` blocks."""
        dims = (0, 2, 3, 1) if self.dim else (0, 2, 1, 3)
        return pad_to_multiple(x_bshK.transpose(dims), count * self.block, 2 + self.dim)

    def restore(self, x, s: int):
        """The inverse of `arrange`: return [b, s, h, K]."""
        return x[..., :s].transpose(0, 3, 1, 2) if self.dim else x[:, :, :s].swapaxes(1, 2)

    def spec(self, width: int, place: Callable, count: int = 1, leading: int = 2, **options):
        """Return the BlockSpec of `count` blocks. place: returns the indices of the leading dims and of the block"""
        at = lambda *grid: (*place(*grid)[:-1], *self.sizes(0, place(*grid)[-1]))
        return pl.BlockSpec((*[None] * leading, *self.sizes(width, count * self.block)), at, **options)

    def query_head(self, b, g, v, head, query, key):
        return b, g * self.heads + head[v]

    def key_head(self, b, g, *visit):
        return self.query_head(b, g, *visit) if self.dim else (b, g)

    def query(self, width: int):
        return self.spec(width, lambda *at: (*self.query_head(*at), at[4][at[2]]))

    def row(self, rows: int):
        """Return the BlockSpec of numbers per query, [b, h, rows, s]."""
        return pl.BlockSpec((None, None, rows, self.block), lambda *at: (*self.query_head(*at), 0, at[4][at[2]]))

    def keys(self, content: int, *rotary: int):
        """Return the BlockSpecs of the parts of a key, by their widths."""
        return [self.spec(content, lambda *at: (*self.key_head(*at), at[5][at[2]])),
                *(self.spec(width, lambda *at: (at[0], 0, at[5][at[2]])) for width in rotary)]  # fmt: skip

    def contract_widths(self, x, y):
        return dot(x[...], y[...], 1 - self.dim, 1 - self.dim)

    def contract_positions(self, scores_Xx, y, dim: int):
        """Contract a dim of scores with the positions of y, a block of queries or keys. The result is such a block."""
        return dot(y[...], scores_Xx, 1, dim) if self.dim else dot(scores_Xx, y[...], dim, 0)


def scores(at: Layout, q, k, queries_2x, keys_1X, j):
    """Return the masked scores of a visit to key block j, [X, x]. q, k: lists of parts"""
    scores_Xx = sum(map(at.contract_widths, k[1:], q[1:]), at.contract_widths(k[0], q[0]))
    place_Xx = j * at.block + jax.lax.broadcasted_iota(jnp.int32, scores_Xx.shape, 0)
    documents_X1 = jnp.broadcast_to(keys_1X, (128, at.block)).T[:, :1]
    in_reach_Xx = at.reach.includes(queries_2x[:1], place_Xx)
    return at.reach.hide(scores_Xx, in_reach_Xx & (queries_2x[1:] == documents_X1))


def share_a_document(queries_2x, keys_1X):
    """Return whether a block of queries and one of keys may have a document in common, by their first and last one."""
    ours_1x, theirs_1X = queries_2x[1:], keys_1X[...]
    return (jnp.min(ours_1x) <= jnp.max(theirs_1X)) & (jnp.min(theirs_1X) <= jnp.max(ours_1x))


def is_first_and_last(v, n: int, entry):
    """Return whether visit v is the first, and whether it is the last, of consecutive visits with the same entry(v)."""
    is_first = (v == 0) | (entry(jnp.maximum(v - 1, 0)) != entry(v))
    return is_first, (v == n - 1) | (entry(jnp.minimum(v + 1, n - 1)) != entry(v))


def forward_kernel(n, blocks, at, head_v, query_v, key_v, q, k, v, queries, keys, mixed, log_sum, total_Ux, top_1x,
                   sum_1x):  # fmt: skip
    """The TPU kernel of the forward pass, for one of n visits."""
    visit = pl.program_id(2)
    is_first, is_last = is_first_and_last(visit, n, lambda v: head_v[v] * blocks + query_v[v])

    @pl.when(is_first)
    def _():
        total_Ux[...], sum_1x[...] = jnp.zeros_like(total_Ux), jnp.zeros_like(sum_1x)
        top_1x[...] = jnp.full_like(top_1x, HIDDEN)

    @pl.when(share_a_document(queries, keys))
    def _():
        scores_Xx = scores(at, q, k, queries[...], keys[...], key_v[visit])
        higher_1x = jnp.maximum(top_1x[...], jnp.max(scores_Xx, axis=0, keepdims=True))
        weight_Xx, rescale_1x = jnp.exp(scores_Xx - higher_1x), jnp.exp(top_1x[...] - higher_1x)
        total_Ux[...] = total_Ux[...] * rescale_1x + dot(v[...], weight_Xx.astype(v.dtype), at.dim, 0)
        sum_1x[...] = sum_1x[...] * rescale_1x + jnp.sum(weight_Xx, axis=0, keepdims=True)
        top_1x[...] = higher_1x

    @pl.when(is_last)
    def _():
        is_seen = top_1x[...] > HIDDEN
        mixed_Ux = jnp.where(is_seen, total_Ux[...] / sum_1x[...], 0)
        mixed[...] = (mixed_Ux if at.dim else mixed_Ux.T).astype(mixed.dtype)
        log_sum[...] = jnp.where(is_seen, top_1x[...] + jnp.log(sum_1x[...]), HIDDEN)


def start_sums(visit, n: int, entry, outs, sums):
    """Zero the sums before consecutive visits with the same entry(v). Return a function that ends these visits: after
    the last it writes the sums to `outs`."""
    is_first, is_last = is_first_and_last(visit, n, entry)

    @pl.when(is_first)
    def _():
        for total in sums:
            total[...] = jnp.zeros_like(total)

    def write():
        for out, total in zip(outs, sums, strict=True):
            out[...] = total[...].astype(out.dtype)

    return lambda: pl.when(is_last)(write)


def backward_kernel(n, blocks, span, at, head_v, query_v, key_v, q, k, v, queries, keys, d_mixed, stats, dq, dk, dv,
                    dq_sums, dk_sums, dv_sum):  # fmt: skip
    """The TPU kernel of the backward pass, for one of n visits."""
    visit, number = pl.program_id(2), lambda v: jax.lax.div(key_v[v], span)
    of_head, of_query = lambda v: number(v) * n + head_v[v], lambda v: number(v) * n + head_v[v] * blocks + query_v[v]
    write_sums = [start_sums(visit, n, of_query, dq, dq_sums),
                  start_sums(visit, n, of_head if at.dim else number, (dk[0], dv), (dk_sums[0], dv_sum))]  # fmt: skip
    if at.dim:
        write_sums.append(start_sums(visit, n, number, dk[1:], dk_sums[1:]))

    @pl.when(share_a_document(queries, keys))
    def _():
        scores_Xx = scores(at, q, k, queries[...], keys[...], key_v[visit])
        weight_Xx, d_weight_Xx = jnp.exp(scores_Xx - stats[:1]), at.contract_widths(v, d_mixed)
        d_scores_Xx = at.reach.before_cap(weight_Xx * (d_weight_Xx - stats[1:]), scores_Xx).astype(v.dtype)
        block = pl.ds(pl.multiple_of(jax.lax.rem(key_v[visit], span) * at.block, at.block), at.block)
        block = (slice(None), block) if at.dim else block
        for total, part in zip(dk_sums, q, strict=True):
            total[block] += at.contract_positions(d_scores_Xx, part, 1)
        dv_sum[block] += at.contract_positions(weight_Xx.astype(v.dtype), d_mixed, 1)
        for total, part in zip(dq_sums, k, strict=True):
            total[...] += at.contract_positions(d_scores_Xx, part, 0)

    for write in write_sums:
        write()


def blocks_per_span(S: int, K: int, U: int, block: int, width: int) -> int:
    """Return the number of key blocks per span: keys are split into equal spans whose gradients fit in VMEM_BYTES.
    width: bytes per number of the output"""
    lanes = sum(-(-size // 128) * 128 for size in (K, U))
    spans = -(-S // max(VMEM_BYTES // ((4 + width) * lanes * block), 1) // block)
    return -(-S // (spans * block))


def heads_per_group(b: int, h: int, visits: int) -> int:
    """Return how many heads share a sum of the rotary key's gradient, if a head has some visits: all, unless their list
    of visits is too long, or b is odd. Then the two cores of a chip need an even number of groups."""
    fits = lambda n: n * visits <= MOST_VISITS and (b * h // n % 2 == 0 or b * h % 2)
    return max((n for n in range(1, h + 1) if h % n == 0 and fits(n)), default=1)


def kernel_inputs(q, k, v_bSgU, segments_bs, segments_bS, here, at: Layout, span: int):
    """Return the inputs of both kernels, padded to whole blocks and spans of keys, and their BlockSpecs."""
    k = [x[:, :, None] if x.ndim == 3 else x for x in k]  # the rotary key as that of a single head
    arrays = ([at.arrange(x) for x in q], [at.arrange(x, span) for x in k], at.arrange(v_bSgU, span),
              query_rows(at.reach, segments_bs, here, at.block),
              pad_to_multiple(segments_bS, span * at.block, 1, -1)[:, None])  # fmt: skip
    queries = pl.BlockSpec((None, 2, at.block), lambda b, g, v, head, query, key: (b, 0, query[v]))
    keys = pl.BlockSpec((None, 1, at.block), lambda b, g, v, head, query, key: (b, 0, key[v]))
    widths = [x.shape[-1] for x in k]
    return arrays, [[*map(at.query, widths)], at.keys(*widths), *at.keys(v_bSgU.shape[-1]), queries, keys]


def tpu_attention(reach, q, k, v_bSgU, segments_bs, segments_bS, here, interpret=False):
    """Attention and its logsumexp on a TPU, with the arguments of `_attention`."""
    q, k = jax.tree.leaves(q), jax.tree.leaves(k)
    (b, s, h, _), (_, S, g, U), K = q[0].shape, v_bSgU.shape, sum(x.shape[-1] for x in q)
    at, dtype = Layout(tpu_block(s, S, reach), h // g, len(q) - 1, reach), v_bSgU.dtype
    counted = count_visits(s, S, reach, K, U, dtype.itemsize, "tpu")
    tables = jnp.asarray(visits(s, S, reach, at.block, heads=at.heads))[here]
    n, blocks = tables.shape[1], -(-s // at.block)
    arrays, specs = kernel_inputs(q, k, v_bSgU, segments_bs, segments_bS, here, at, 1)
    mixed, log_sum_bh1s = _call(
        functools.partial(forward_kernel, n, blocks, at), (b, g, n), tables, arrays, specs,
        [Array((b, h, *at.sizes(U, blocks * at.block)), dtype), Array((b, h, 1, blocks * at.block), float32)],
        [at.query(U), at.row(1)], [pltpu.VMEM((rows, at.block), float32) for rows in (U, 1, 1)], interpret,
        flops=b * flops(counted, h, K, U)[0], exponentials=b * g * n * at.block**2,
    )  # fmt: skip
    return at.restore(mixed, s), log_sum_bh1s[:, :, 0, :s].swapaxes(1, 2)


def count_calls(b: int, g: int, spans: int) -> int:
    """Return in how many calls of the kernel the backward pass computes g key heads.

    A call stores a float32 gradient of its queries for each span: with enough calls, at most twice as much as for all
    queries with one span. The two cores of a chip need an even number of heads.
    """
    fitting = [calls for calls in range(1, g + 1) if g % calls == 0 and (b * g // calls % 2 == 0 or b * g % 2)]
    return next((calls for calls in fitting if spans <= 2 * calls), fitting[-1]) if fitting else 1


def tpu_attention_grads(reach, q, k, v_bSgU, segments_bs, segments_bS, here, d_mixed_bshU, top_bsh, slope_bsh,
                        interpret=False):  # fmt: skip
    """Return the gradients of queries, keys and values on a TPU: for long sequences, in a loop over some of the heads
    (see `count_calls`)."""
    (b, S, g, U), K = v_bSgU.shape, sum(x.shape[-1] for x in jax.tree.leaves(q))
    block, width = tpu_block(d_mixed_bshU.shape[1], S, reach), v_bSgU.dtype.itemsize
    calls = count_calls(b, g, -(-S // (blocks_per_span(S, K, U, block, width) * block)))
    rest = segments_bs, segments_bS, here
    if calls == 1:
        return grads_of_heads(reach, interpret, q, k, v_bSgU, *rest, d_mixed_bshU, top_bsh, slope_bsh)
    k, rotary = (k[0], k[1:]) if isinstance(k, tuple) else (k, ())
    split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], calls, -1, *x.shape[3:]), 2, 0)
    join = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])

    def of_heads(operands):
        q, k, v, *more = operands
        dq, dk, dv = grads_of_heads(reach, interpret, q, (k, *rotary) if rotary else k, v, *rest, *more)
        return dq, *(dk if rotary else (dk,)), dv

    dq, dk, *d_rotary, dv = jax.lax.map(of_heads, jax.tree.map(split, (q, k, v_bSgU, d_mixed_bshU, top_bsh, slope_bsh)))
    d_rotary = [jnp.sum(x, axis=0, dtype=float32).astype(x.dtype) for x in d_rotary]
    return jax.tree.map(join, dq), (join(dk), *d_rotary) if rotary else join(dk), join(dv)


def grads_of_heads(reach, interpret, q, k, v_bSgU, segments_bs, segments_bS, here, d_mixed_bshU, top_bsh, slope_bsh):
    """Return the gradients of `tpu_attention_grads` with one call of the kernel.

    The gradients of a span of keys stay in VMEM until all queries of all heads that share them have visited it. The
    gradients of a query are summed over spans, and those of a rotary key over groups.
    """
    in_parts, q, k = isinstance(q, tuple), jax.tree.leaves(q), jax.tree.leaves(k)
    (b, s, h, _), (_, S, g, U), widths = q[0].shape, v_bSgU.shape, [x.shape[-1] for x in q]
    block, dtype, K = tpu_block(s, S, reach), v_bSgU.dtype, sum(widths)
    span = blocks_per_span(S, K, U, block, dtype.itemsize)
    counted = count_visits(s, S, reach, K, U, dtype.itemsize, "tpu")
    at = Layout(block, heads_per_group(b, h, counted.back) if in_parts else h // g, int(in_parts), reach)
    tables = jnp.asarray(visits(s, S, reach, block, span, at.heads))[here]
    n, blocks, groups, spans = tables.shape[1], -(-s // block), h // at.heads, -(-S // (span * block))
    arrays, specs = kernel_inputs(q, k, v_bSgU, segments_bs, segments_bS, here, at, span)
    stats_bh2s = pad_to_multiple(jnp.stack([top_bsh, slope_bsh]).transpose(1, 3, 0, 2), block, 3)
    number = lambda of: jax.lax.div(of[5][of[2]], span)
    by_span = lambda width: at.spec(width, lambda *of: (number(of), *at.query_head(*of), of[4][of[2]]), leading=3)
    whole = lambda width, head: at.spec(width, lambda *of: (*head(*of), number(of)), span, pipeline_mode=pl.Buffered(1))
    sums = lambda width, count=1: pltpu.VMEM(at.sizes(width, count * block), float32)
    summed = lambda count: dtype if count == 1 else float32  # by XLA
    dq, (dk, *dk_rotary), dv = _call(
        functools.partial(backward_kernel, n, blocks, span, at), (b, groups, n), tables,
        (*arrays, at.arrange(d_mixed_bshU), stats_bh2s), [*specs, at.query(U), at.row(2)],
        [[Array((spans, *x.shape), summed(spans)) for x in arrays[0]],
         [Array(arrays[1][0].shape, dtype), *(Array((b, groups, *x.shape[2:]), summed(groups)) for x in arrays[1][1:])],
         Array(arrays[2].shape, dtype)],
        [[*map(by_span, widths)],
         [whole(widths[0], at.key_head), *(whole(R, lambda b, g, *_: (b, g)) for R in widths[1:])],
         whole(U, at.key_head)],
        [[*map(sums, widths)], [sums(width, span) for width in widths], sums(U, span)], interpret,
        flops=b * flops(counted, h, K, U)[1], exponentials=b * groups * n * block**2,
    )  # fmt: skip
    dq = [at.restore(jnp.sum(x, axis=0).astype(dtype), s) for x in dq]
    dk_rotary = [jnp.sum(at.restore(x, S), axis=2).astype(dtype) for x in dk_rotary]
    dk, dv = at.restore(dk, S), at.restore(dv, S)
    return (tuple(dq), (dk, *dk_rotary), dv) if in_parts else (*dq, dk, dv)


def _call(kernel, grid, tables, arrays, in_specs, out, out_specs, scratch, interpret, *, flops, exponentials):
    out = jax.tree.map(lambda x: x.update(manual_axis_type=jax.typeof(arrays[2]).mat), out)
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, out)))
    return pl.pallas_call(
        kernel,
        out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables), grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops, exponentials, moved),
        interpret=interpret,
    )(*tables, *arrays)
