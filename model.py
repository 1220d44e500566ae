"""The transformer, written as the program that one device runs.

Every function here runs inside one `shard_map`: its arrays are this device's shards, and every collective is
an explicit call. A collective over a mesh axis of size 1 is the identity, so the same code runs on a laptop
and on a pod.

A tensor's name ends with its shape, one letter per dim. A capital is the whole dim; a lower-case letter is
this device's shard of it. Weights (w_up_DF) and inputs (tokens_BT) are named after their unsharded shape.

    B  sequences                     K  head: query and key        E  routed experts
    T  positions; s: sharded over    R  head: rotary part          M  hidden width of an expert
       CONTEXT, t: over CONTEXT      U  head: value                V  vocabulary
       and TENSOR                    H  heads                      N  tokens: sequences and positions in one
    S  positions of the keys that    G  key/value heads            A  assignments to experts, N * top_k
       attention reads               C  key/value latent           X  slots an expert has per sequence; or
    D  model width                   Q  query latent                  any feature dim, as in y_bsX
    F  feed-forward hidden width     P  dense layers before blocks  L  blocks   J  dense layers in a block

A device's shard of the residual stream is x_btD: some sequences, some positions, the full width. Attention
and feed-forward layers gather the positions of the TENSOR group (t -> s) and work on a shard of the heads or
of the hidden width. Contracting a lower-case letter leaves a partial sum; a reduce-scatter back to t
completes it. Three functions do this. Their arguments f and g must treat every position independently:

    gather_apply(c, f, x_btD)             all-gather x over TENSOR, then f(x_bsD)
    apply_scatter(c, f, y_bsX)            f(y_bsX), a partial sum, then reduce-scatter it over TENSOR
    gather_apply_scatter(c, f, g, x_btD)  all-gather x, then g(f(x_bsD)), then reduce-scatter

They call f once for all positions, or once per chunk of p positions if the collective runs as a ring.
`overlap/` chooses between the two. It also chooses when to all-gather the shards of a weight over FSDP,
EXPERT and CONTEXT (`at_use`). Only `overlap/` reads `c.work`, the execution settings (`config.ModelAtWork`).

Dtypes: parameters and matmuls use `compute_dtype`; softmax, norms, router and loss use float32.
Sources: DeepSeek-V3 arXiv:2412.19437, DeepSeek-V2 2405.04434, Switch 2101.03961, GShard 2006.16668.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P

from config import ModelConfig
from config.fields import parse_bias, parse_softmax, parse_window
from kernels.blocks import soft_cap
from kernels.grouped import grouped_matmul
from overlap.context import over_context
from overlap.experts import apply_experts, bias_of_rows
from overlap.fusion import compute_once
from overlap.layers import scan_blocks, scan_layers, stack_size
from overlap.positions import apply_scatter, gather_apply, gather_apply_scatter
from overlap.remat import named, remat
from overlap.weights import at_use, cast, slice_by_slice, tokens_go_to_table
from rotary import is_full, query_scales, rotary_angles, rotary_frequencies, rotate, scaled
from sharding import (
    BATCH,
    CONTEXT,
    EXPERT,
    FSDP,
    SLICED,
    STAGE,
    TENSOR,
    TOKENS,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    declare as declare_block,
    own_chunks,
    own_slice,
    param,
    psum,
    reduce_scatter,
    to_sequence_order,
    vary,
)
from utils import UserError

float32 = jnp.float32
has_bias = lambda part, also=bool: lambda c: part in parse_bias(c.bias) and also(c)


# Norm -------------------------------------------------------------------------------------------------------


def broadcast_gain(x, gain):
    """Broadcast a gain or bias to x's shape. `vary` types it as varying over x's mesh axes, so the backward
    pass sums its gradient [D] over these axes with a psum."""
    return jnp.broadcast_to(vary(gain, tuple(jax.typeof(x).mat.varying)), x.shape)


def add_bias(x, bias, share=1.0):
    """Add share * bias to x, unless bias is None."""
    return x if bias is None else x + (share * broadcast_gain(x, bias)).astype(x.dtype)


def norm(x, gain, eps, bias=None):
    """RMSNorm (arXiv:1910.07467): scale each vector to root mean square 1, then multiply by a learned gain.
    With a bias it is LayerNorm (1607.06450): subtract the mean first, and add the bias last."""
    x32 = x.astype(float32)
    if bias is not None:
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return add_bias(x32 * scale * broadcast_gain(x, gain), bias).astype(x.dtype)


def norm_after(update_btD, gain, c: ModelConfig):
    """Norm what a branch adds to the residual stream, if the model does (`norm="sandwich"`)."""
    return update_btD if gain is None else norm(update_btD, gain, c.norm_eps)


# Attention --------------------------------------------------------------------------------------------------


@struct.dataclass
class LatentAttention:
    """MLA: keys and values are projections of a latent; all heads share a rotary key (2405.04434, 2.1)."""

    w_down_query_DQ: Any = param("DQ", fan_in="D", D=SLICED, needs=lambda c: c.d_query_latent)
    norm_query_Q: Any = param("Q", mean=1.0, decay=False, needs=lambda c: c.d_query_latent)
    w_query_QHK: Any = param("QHK", fan_in="Q", Q=SLICED, H=TENSOR)  # without a query latent, Q is D
    w_query_rotary_QHR: Any = param("QHR", fan_in="Q", Q=SLICED, H=TENSOR)
    w_down_kv_DC: Any = param("DC", fan_in="D", D=SLICED)
    norm_kv_C: Any = param("C", mean=1.0, decay=False)
    w_key_rotary_DR: Any = param("DR", fan_in="D", D=SLICED)
    w_key_CHK: Any = param("CHK", fan_in="C", C=SLICED, H=TENSOR)
    w_value_CHU: Any = param("CHU", fan_in="C", C=SLICED, H=TENSOR)
    w_out_HUD: Any = param("HUD", fan_in="HU", residual=True, H=TENSOR, D=SLICED)


@jax.named_scope("queries")
def latent_queries(w: LatentAttention, c: ModelConfig, latent_bsQ, positions_bs, freqs_r):
    """Project the latent to each head's scaled query: the content part and the rotary part, which is rotated.
    Shapes: [b, s, Q] -> [b, s, h, K], [b, s, h, R]."""
    content, rotary = (factor * (c.d_head + c.d_rope) ** -0.5 for factor in query_scales(c))
    q_bshK = jnp.einsum("bsQ,QhK->bshK", latent_bsQ, w.w_query_QHK)
    q_bshR = jnp.einsum("bsQ,QhR->bshR", latent_bsQ, w.w_query_rotary_QHR)
    return scaled(q_bshK, content), rotate(q_bshR, rotary_angles(positions_bs, freqs_r), rotary)


def project_at_once(x_bsD, *weights_DX):
    """Multiply x by each matrix. For many tokens this is one matmul, which reads x once, forward and back.
    For few, as in decoding, it would take longer to concatenate the matrices."""
    if x_bsD.shape[0] * x_bsD.shape[1] < x_bsD.shape[2]:
        return [x_bsD @ w_DX for w_DX in weights_DX]
    ends = np.cumsum([w_DX.shape[1] for w_DX in weights_DX])[:-1]
    return jnp.split(x_bsD @ jnp.concatenate(weights_DX, axis=1), ends, axis=-1)


@jax.named_scope("latents")
def latents(w: LatentAttention, c: ModelConfig, x_bsD, positions_bs, freqs_r):
    """Return the query latent (x itself if the model has none), the normed key/value latent and the rotated
    rotary key. A KV cache stores only the last two. Shapes: [b, s, D] -> [b, s, Q], [b, s, C], [b, s, R]."""
    down = [x for x in (w.w_down_query_DQ, w.w_down_kv_DC, w.w_key_rotary_DR) if x is not None]
    *query, latent_bsC, k_bsR = project_at_once(x_bsD, *down)
    latent_bsQ = norm(query[0], w.norm_query_Q, c.norm_eps) if query else x_bsD
    latent_bsC, k_bs1R = norm(latent_bsC, w.norm_kv_C, c.norm_eps), k_bsR[:, :, None, :]
    k_bs1R = rotate(k_bs1R, rotary_angles(positions_bs, freqs_r))
    return latent_bsQ, latent_bsC, k_bs1R[:, :, 0, :]


def sends_latents(c: ModelConfig) -> bool:
    """Return True if devices all-gather latents over TENSOR instead of x. They do so if the model has a query
    latent, and query latent, key/value latent and rotary key together are narrower than x: Q + C + R < D."""
    return 0 < c.d_query_latent < c.d_model - c.d_kv_latent - c.d_rope


def latent_attention(
    w: LatentAttention, c: ModelConfig, x_btD, positions_bs, segments_bs, freqs_r, attend=over_context
):
    """Apply latent attention over the whole context, or over a KV cache. Shapes: [b, t, D] -> [b, t, D].

    attend  as in `layer`
    Sends over TENSOR: Q + C + R numbers per position if `sends_latents`, else D; and D for the result.
    """
    project_down = lambda x_bpD, positions_bp: latents(w, c, x_bpD, positions_bp, freqs_r)

    def project_queries(query_bpQ, latent_bpC, key_bpR, positions_bp):
        return latent_queries(w, c, query_bpQ, positions_bp, freqs_r), latent_bpC, key_bpR

    if sends_latents(c):
        latents_bt = project_down(x_btD, own_slice(positions_bs, TENSOR, dim=1))
        q, *latent_and_key = gather_apply(c, project_queries, *latents_bt, local_arrays=(positions_bs,))
    else:
        project = lambda x_bpD, pos_bp: project_queries(*project_down(x_bpD, pos_bp), pos_bp)
        q, *latent_and_key = gather_apply(c, project, x_btD, local_arrays=(positions_bs,))

    @jax.named_scope("keys_values")
    def keys_values(latent_bSC, k_bSR):
        k_bShK = jnp.einsum("bSC,ChK->bShK", latent_bSC, w.w_key_CHK)
        return (k_bShK, k_bSR), jnp.einsum("bSC,ChU->bShU", latent_bSC, w.w_value_CHU)

    def absorb(q_bshK, q_bshR):  # q . (w_key latent) = (w_key^T q) . latent: latents serve as keys (2.1.2)
        return jnp.concatenate([jnp.einsum("bshK,ChK->bshC", q_bshK, w.w_key_CHK), q_bshR], -1)

    value_of = lambda o_bshC: jnp.einsum("bshC,ChU->bshU", o_bshC, w.w_value_CHU)  # o: mean of latents
    out = lambda o_bphU: jnp.einsum("bphU,hUD->bpD", o_bphU, w.w_out_HUD)

    o_bshU = attend(c, q, latent_and_key, keys_values, segments_bs, (absorb, value_of))
    return apply_scatter(c, jax.named_scope("attention_output")(out), o_bshU)


@struct.dataclass
class GroupedAttention:
    """Grouped-query attention: H/G query heads share each key and value head (arXiv:2305.13245)."""

    w_query_DHK: Any = param("DHK", fan_in="D", D=SLICED, H=TENSOR)
    bias_query_HK: Any = param("HK", decay=False, H=TENSOR, needs=has_bias("attention"))
    w_key_DGK: Any = param("DGK", fan_in="D", D=SLICED, G=TENSOR)
    bias_key_GK: Any = param("GK", decay=False, G=TENSOR, needs=has_bias("attention"))
    norm_query_K: Any = param("K", mean=1.0, decay=False, needs=lambda c: c.qk_norm)
    norm_key_K: Any = param("K", mean=1.0, decay=False, needs=lambda c: c.qk_norm)
    w_value_DGK: Any = param("DGK", fan_in="D", D=SLICED, G=TENSOR)
    bias_value_GK: Any = param("GK", decay=False, G=TENSOR, needs=has_bias("attention"))
    w_out_HKD: Any = param("HKD", fan_in="HK", residual=True, H=TENSOR, D=SLICED)
    bias_out_D: Any = param("D", decay=False, needs=has_bias("attention"))
    sink_H: Any = param("H", decay=False, exact=True, H=TENSOR, needs=lambda c: c.softmax == "sinks")


@jax.named_scope("queries_keys_values")
def queries_keys_values(w: GroupedAttention, c: ModelConfig, x_bsD, positions_bs, freqs_r):
    """Compute rotated queries and keys, and values. [b, s, D] -> [b, s, h, K], [b, s, g, K], [b, s, g, K]."""
    q_bshK = add_bias(jnp.einsum("bsD,DhK->bshK", x_bsD, w.w_query_DHK), w.bias_query_HK)
    k_bsgK = add_bias(jnp.einsum("bsD,DgK->bsgK", x_bsD, w.w_key_DGK), w.bias_key_GK)
    v_bsgK = add_bias(jnp.einsum("bsD,DgK->bsgK", x_bsD, w.w_value_DGK), w.bias_value_GK)
    if c.qk_norm:
        q_bshK, k_bsgK = norm(q_bshK, w.norm_query_K, c.norm_eps), norm(k_bsgK, w.norm_key_K, c.norm_eps)
    angles_bsr = rotary_angles(positions_bs, freqs_r)
    return rotate(q_bshK, angles_bsr, query_scales(c)[1]), rotate(k_bsgK, angles_bsr), v_bsgK


def grouped_attention(
    w: GroupedAttention, c: ModelConfig, x_btD, positions_bs, segments_bs, freqs_r, attend=over_context,
    parallel=None,
):  # fmt: skip
    """Apply grouped-query attention over the context, or over a KV cache. Shapes: [b, t, D] -> [b, t, D].

    attend    as in `layer`
    parallel  a FeedForward that reads the same x; its output shares attention's reduce-scatter over TENSOR
    """
    project = lambda x_bpD, positions_bp: (*queries_keys_values(w, c, x_bpD, positions_bp, freqs_r), x_bpD)
    q_bshK, *keys_and_values, x_bsD = gather_apply(c, project, x_btD, local_arrays=(positions_bs,))
    sinks = {} if w.sink_H is None else {"sinks_h": w.sink_H}
    o_bshK = attend(c, q_bshK, keys_and_values, lambda *same: same, segments_bs, **sinks)

    @jax.named_scope("attention_output")
    def out(o_bphK, x_bpD):
        partial_bpD = jnp.einsum("bphK,hKD->bpD", o_bphK, w.w_out_HKD)
        partial_bpD = add_bias(partial_bpD, w.bias_out_D, 1 / axis_size(TENSOR))  # as in `down`
        return partial_bpD if parallel is None else partial_bpD + feed_forward(parallel, c, x_bpD)

    return apply_scatter(c, out, o_bshK, x_bsD)


# Feed-forward -----------------------------------------------------------------------------------------------


CLAMP, SLOPE = 7.0, 1.702  # `swiglu_limit` and `alpha` of gpt-oss: github.com/openai/gpt-oss, torch/model.py


def clamped_swiglu(up, gate):
    """Apply gpt-oss's gate: SwiGLU with a steeper sigmoid, clamped operands, and 1 added to `up`."""
    gate = jnp.minimum(gate, CLAMP)
    return (jnp.clip(up, -CLAMP, CLAMP) + 1) * gate * jax.nn.sigmoid(SLOPE * gate)


gate_by = lambda f: lambda up, gate: f(gate) * up  # arXiv:2002.05202
GATES = {"swiglu": gate_by(jax.nn.silu), "geglu": gate_by(jax.nn.gelu), "swiglu_clamped": clamped_swiglu}
gated = lambda c: c.activation in GATES


def activate(c: ModelConfig, up, gate):
    """Apply the nonlinearity: to the gate, which multiplies `up`, if there is one."""
    up, gate = named((up, gate), "hidden")
    return jax.nn.gelu(up) if gate is None else GATES[c.activation](up, gate)


@struct.dataclass
class FeedForward:
    w_gate_DF: Any = param("DF", fan_in="D", D=SLICED, F=TENSOR, needs=gated)
    w_up_DF: Any = param("DF", fan_in="D", D=SLICED, F=TENSOR)
    bias_up_F: Any = param("F", decay=False, F=TENSOR, needs=has_bias("feed_forward"))
    w_down_FD: Any = param("FD", fan_in="F", residual=True, F=TENSOR, D=SLICED)
    bias_down_D: Any = param("D", decay=False, needs=has_bias("feed_forward"))


def hidden(w: FeedForward, c: ModelConfig, x_bsD):
    """Compute the hidden activations of a feed-forward layer. Shapes: [.., D] -> [.., f]."""
    with jax.named_scope("up"):
        up_bsf = add_bias(x_bsD @ w.w_up_DF, w.bias_up_F)
    with jax.named_scope("gate"):
        gate_bsf = None if w.w_gate_DF is None else x_bsD @ w.w_gate_DF
    return activate(c, up_bsf, None) if gate_bsf is None else compute_once(activate, c, up_bsf, gate_bsf)


@jax.named_scope("down")
def down(w: FeedForward, up_bsf):
    """Project to the model width: [.., f] -> [.., D], a partial sum over TENSOR. Each device adds the bias
    divided by the size of TENSOR, so that the sum contains it once."""
    return add_bias(up_bsf @ w.w_down_FD, w.bias_down_D, 1 / axis_size(TENSOR))


@jax.named_scope("feed_forward")
def feed_forward(w: FeedForward, c: ModelConfig, x_bsD):
    """Apply a dense feed-forward layer. Shapes: [.., D] -> [.., D], a partial sum over TENSOR."""
    return down(w, hidden(w, c, x_bsD))


# Mixture of experts -----------------------------------------------------------------------------------------


@struct.dataclass
class MoE:
    w_router_DE: Any = param("DE", fan_in="D", D=SLICED, exact=True)
    bias_router_E: Any = param("E", decay=False, exact=True, needs=has_bias("experts"))
    # Added to the scores that select experts, not to the gates. `optimizer.update_selection_bias` updates it
    # from the load of the experts; it has no gradient.
    bias_E: Any = param("E", decay=False, trainable=False, needs=lambda c: c.balance_rate)
    w_gate_EDM: Any = param("EDM", fan_in="D", E=EXPERT, D=(FSDP, CONTEXT), M=TENSOR, needs=gated)
    w_up_EDM: Any = param("EDM", fan_in="D", E=EXPERT, D=(FSDP, CONTEXT), M=TENSOR)
    w_down_EMD: Any = param("EMD", fan_in="M", residual=True, E=EXPERT, M=TENSOR, D=(FSDP, CONTEXT))
    bias_gate_EM: Any = param("EM", decay=False, E=EXPERT, M=TENSOR, needs=has_bias("experts", gated))
    bias_up_EM: Any = param("EM", decay=False, E=EXPERT, M=TENSOR, needs=has_bias("experts"))
    bias_down_ED: Any = param("ED", decay=False, E=EXPERT, needs=has_bias("experts"))
    shared: FeedForward | None = None


def in_best_groups(c: ModelConfig, scores_btE):
    """Set the scores of experts outside a token's best groups to -inf. A group's score is the sum of
    its two highest scores. Source: arXiv:2412.19437, section 2.1.2, "node-limited routing"."""
    n_groups, per_token = c.expert_groups
    if n_groups == 1:
        return scores_btE
    scores_btgX = scores_btE.reshape(*scores_btE.shape[:2], n_groups, -1)
    _, best_btk = jax.lax.top_k(jnp.sum(jax.lax.top_k(scores_btgX, 2)[0], axis=-1), per_token)
    is_best_btg = jnp.any(jax.nn.one_hot(best_btk, n_groups, dtype=bool), axis=2)
    return jnp.where(is_best_btg[..., None], scores_btgX, -jnp.inf).reshape(scores_btE.shape)


@jax.named_scope("router")
def route(w: MoE, c: ModelConfig, x_btD):
    """Choose the top_k experts of each token and compute their gates.

    Shapes: [b, t, D] -> gates [b, t, top_k], experts [b, t, top_k], probabilities [b, t, E].
    Source: arXiv:2412.19437, equations 12 to 16; arXiv:2101.03961 for softmax, and for top_k = 1.
    """
    # HIGHEST, because by default a TPU multiplies float32 matrices in bfloat16 passes.
    logits_btE = jnp.matmul(x_btD.astype(float32), w.w_router_DE, precision=jax.lax.Precision.HIGHEST)
    logits_btE = add_bias(logits_btE, w.bias_router_E)
    scores_btE = jax.nn.sigmoid(logits_btE) if c.router == "sigmoid" else jax.nn.softmax(logits_btE, axis=-1)
    bias_E = 0.0 if w.bias_E is None else jax.lax.stop_gradient(w.bias_E)[None, None, :]
    _, experts_btk = jax.lax.top_k(in_best_groups(c, scores_btE + bias_E), c.top_k)
    chosen_btk = jnp.take_along_axis(scores_btE, experts_btk, axis=-1)
    if c.normalize_gates and c.top_k > 1:  # with top_k=1 the gate would be 1: no gradient for the router
        chosen_btk /= jnp.sum(chosen_btk, axis=-1, keepdims=True) + 1e-20
    probabilities_btE = scores_btE / jnp.sum(scores_btE, axis=-1, keepdims=True)
    return c.routed_scaling * chosen_btk, experts_btk, probabilities_btE


def router_statistics(c: ModelConfig, probabilities_btE, experts_btk, kept_btk, real_bt):
    """Sum the router's statistics over this device's non-padding tokens. `loss` sums them over devices."""
    count_btE = jnp.sum(jax.nn.one_hot(experts_btk, c.n_experts, dtype=float32), axis=2)
    entropy_bt = -jnp.sum(jax.scipy.special.xlogy(probabilities_btE, probabilities_btE), axis=-1)
    return {
        "tokens_per_expert": jnp.sum(count_btE * real_bt[:, :, None], axis=(0, 1)),
        "probability": jnp.sum(probabilities_btE * real_bt[:, :, None], axis=(0, 1)),
        "entropy": jnp.sum(entropy_bt * real_bt),
        "dropped": jnp.sum((1 - kept_btk) * real_bt[:, :, None]),
        "tokens": jnp.sum(real_bt),
    }


def balance_loss(c: ModelConfig, tokens_per_expert_E, probability_E, tokens):
    """Compute n_experts * sum over experts of (fraction of assignments) * (mean probability). It is 1 if the
    load is balanced. The arguments are sums over the global batch.

    Source: Switch Transformer, arXiv:2101.03961, equation 4, with top_k assignments per token.
    """
    share_E = tokens_per_expert_E / (tokens * c.top_k)
    return c.n_experts * jnp.sum(share_E * probability_E / tokens, axis=-1)


@jax.named_scope("experts")
def experts_feed_forward(w: MoE, c: ModelConfig, matmul, bias_of, rows, gates):
    """Apply its expert to each row, one token per row, and multiply by its gate. Returns a partial sum over
    TENSOR. matmul(rows, weights) multiplies each row by the weights of its expert, and bias_of(biases, gates)
    returns for each row the bias of its expert, multiplied by a gate."""

    def add(x, bias_EX, gates):
        return x if bias_EX is None else x + bias_of(bias_EX.astype(x.dtype), gates.astype(x.dtype))

    ones = jnp.ones_like(gates)
    up = add(matmul(rows, w.w_up_EDM), w.bias_up_EM, ones)
    gate = None if w.w_gate_EDM is None else add(matmul(rows, w.w_gate_EDM), w.bias_gate_EM, ones)
    # Multiply by the gates before the last matmul, so that the backward pass does not need its output.
    out = matmul(activate(c, up, gate) * gates[..., None].astype(up.dtype), w.w_down_EMD)
    return add(out, w.bias_down_ED, gates / axis_size(TENSOR))  # as in `down`


def dropless(w: MoE, c: ModelConfig, x_bsD, gates_bsk, experts_bsk):
    """Apply the experts and drop no token. `overlap/experts.py` chooses how tokens reach their experts.

    Shapes: [b, s, D] -> [b, s, D], a partial sum over TENSOR. Sends over EXPERT: see `gathered` and `routed`.
    """

    def sorted_rows(w, rows_AD, gates_A, sizes_e):
        matmul = lambda x, w: grouped_matmul(x, w, sizes_e, filled=gates_bsk.size)  # at an equal load
        bias_of = functools.partial(bias_of_rows, sizes_e)
        return experts_feed_forward(w, c, matmul, bias_of, rows_AD, gates_A)

    inputs_N = (x.reshape(-1, x.shape[-1]) for x in (x_bsD, gates_bsk, experts_bsk))
    experts = w.replace(w_router_DE=None, bias_router_E=None, bias_E=None, shared=None)
    return apply_experts(c, sorted_rows, experts, *inputs_N).reshape(x_bsD.shape)


def slots_per_expert(c: ModelConfig, positions: int) -> int:
    """Return X, the number of slots that an expert has for one sequence. Further assignments are dropped.

    Raises: UserError if X would be 0.
    Source: GShard, arXiv:2006.16668, section 2.2, per sequence instead of per device group.
    """
    slots = int(round(c.capacity_factor * c.top_k * positions / c.n_experts, 6))  # round 114.999.. to 115
    if slots == 0:
        enough = math.ceil(1000 * c.n_experts / c.top_k / positions) / 1000
        raise UserError(
            f"capacity is 0: capacity_factor={c.capacity_factor} * top_k={c.top_k} * {positions} positions "
            f"/ n_experts={c.n_experts} < 1; raise capacity_factor to at least {enough}")  # fmt: skip
    return slots


def ranks(c: ModelConfig, experts_bSk):
    """Return the rank of each assignment among those of the same sequence to the same expert: 0, 1, 2, ..

    Ranks follow the positions, so a later token never causes an earlier one to be dropped.
    Shapes: [b, S, k] -> [b, S, k].
    """
    b, S, k = experts_bSk.shape
    chosen_bAE = jax.nn.one_hot(experts_bSk.reshape(b, S * k), c.n_experts, dtype=jnp.int32)
    rank_bAE = jnp.cumsum(chosen_bAE, axis=1) - 1
    return jnp.sum(rank_bAE * chosen_bAE, axis=-1).reshape(b, S, k)


def with_capacity(w: MoE, c: ModelConfig, x_bsD, gates_bsk, experts_bsk, rank_bsk, slots: int):
    """Apply the experts to fixed-size buffers, sent by all-to-all; drop assignments of rank >= slots.

    Shapes: [b, s, D] -> [b, s, D], a partial sum over TENSOR.
    Sends over EXPERT (n devices): (n - 1)/n of the buffer [E, b, X, D], there and back, and of its gates.
    """
    (b, s, D), n = x_bsD.shape, axis_size(EXPERT)
    # A rank >= slots is an index out of bounds: mode="drop" does not write there, and mode="fill" reads 0.
    place = experts_bsk, jnp.arange(b)[:, None, None], rank_bsk
    x_bskD = jnp.broadcast_to(x_bsD[:, :, None, :], (b, s, c.top_k, D))
    place_in = lambda zeros, values: zeros.at[place].set(values, mode="drop", unique_indices=True)
    buffer_EbXD = place_in(jnp.zeros((c.n_experts, b, slots, D), x_bsD.dtype), x_bskD)
    gates_EbX = place_in(jnp.zeros((c.n_experts, b, slots), gates_bsk.dtype), gates_bsk)

    rows_eAD = all_to_all(buffer_EbXD, EXPERT, split_dim=0, join_dim=1).reshape(-1, n * b * slots, D)
    gates_eA = all_to_all(gates_EbX, EXPERT, split_dim=0, join_dim=1).reshape(-1, n * b * slots)
    matmul = lambda x, w: jnp.einsum("eAD,eDm->eAm", x, w)
    bias_of = lambda bias_eX, gates_eA: jnp.einsum("eX,eA->eAX", bias_eX, gates_eA)
    out_eAD = experts_feed_forward(w, c, matmul, bias_of, rows_eAD, gates_eA)
    out_EbXD = all_to_all(out_eAD.reshape(-1, n * b, slots, D), EXPERT, split_dim=1, join_dim=0)

    out_bskD = out_EbXD.at[place].get(mode="fill", fill_value=0)
    return jnp.sum(out_bskD, axis=2)


def moe(w: MoE, c: ModelConfig, x_btD, real_bt):
    """Apply top_k routed experts and the shared experts to each token.
    Shapes: [b, t, D] -> [b, t, D] and the router's statistics. Padding tokens (real_bt = 0) are routed
    and take slots like others; only the statistics exclude them."""
    gates_btk, experts_btk, probabilities_btE = route(w, c, x_btD)
    x_bsD = gather_apply(c, lambda x_bpD: x_bpD, x_btD)
    gates_bsk, experts_bsk = (all_gather(x, TENSOR, dim=1) for x in (gates_btk, experts_btk))
    kept_btk = jnp.ones_like(gates_btk)
    if c.capacity_factor:
        experts_bSk = to_sequence_order(all_gather(experts_btk, (CONTEXT, TENSOR), dim=1), dim=1)
        slots = slots_per_expert(c, experts_bSk.shape[1])
        rank_btk = own_slice(own_chunks(ranks(c, experts_bSk)), TENSOR, dim=1)
        kept_btk = (rank_btk < slots).astype(float32)
        rank_bsk = all_gather(rank_btk, TENSOR, dim=1)
        partial_bsD = with_capacity(w, c, x_bsD, gates_bsk, experts_bsk, rank_bsk, slots)
    else:
        partial_bsD = dropless(w, c, x_bsD, gates_bsk, experts_bsk)

    def with_shared(partial_bpD, x_bpD):
        return partial_bpD if w.shared is None else partial_bpD + feed_forward(w.shared, c, x_bpD)

    update_btD = apply_scatter(c, jax.named_scope("shared_experts")(with_shared), partial_bsD, x_bsD)
    return update_btD, router_statistics(c, probabilities_btE, experts_btk, kept_btk, real_bt)


# Layers -----------------------------------------------------------------------------------------------------


@struct.dataclass
class Layer:
    norm_attention_D: Any = param("D", mean=1.0, decay=False)
    norm_attention_bias_D: Any = param("D", decay=False, needs=lambda c: c.norm == "layer")
    attention: LatentAttention | GroupedAttention | None = None
    norm_feed_forward_D: Any = param("D", mean=1.0, decay=False, needs=lambda c: not c.parallel_residual)
    norm_feed_forward_bias_D: Any = param(
        "D", decay=False, needs=lambda c: c.norm == "layer" and not c.parallel_residual
    )
    feed_forward: FeedForward | MoE | None = None
    norm_after_attention_D: Any = param("D", mean=1.0, decay=False, needs=lambda c: c.norm == "sandwich")
    norm_after_feed_forward_D: Any = param("D", mean=1.0, decay=False, needs=lambda c: c.norm == "sandwich")


@struct.dataclass
class Block:
    """The layers that repeat: J dense layers, then one MoE layer; in a dense model, one dense layer."""

    dense: Layer | None = None
    moe: Layer | None = None


@struct.dataclass
class Transformer:
    # Initially, the residual stream has variance 1, or the logits have if weights are tied.
    embedding_VD: Any = param(
        "VD", std=lambda c: c.d_model ** (-c.tie_embeddings / 2), decay=False, V=TENSOR, D=SLICED
    )
    prefix: Layer | None = None
    blocks: Block | None = None
    norm_D: Any = param("D", mean=1.0, decay=False)
    norm_bias_D: Any = param("D", decay=False, needs=lambda c: c.norm == "layer")
    unembedding_DV: Any = param("DV", fan_in="D", D=SLICED, V=TENSOR, needs=lambda c: not c.tie_embeddings)
    bias_V: Any = param("V", decay=False, V=TENSOR, needs=has_bias("logits"))


def declare(c: ModelConfig) -> Transformer:
    """Declare every parameter: return a Transformer whose leaves are `sharding.Declaration`s.
    Stacked layers have the leading dims [P], [L] or [L, J]."""
    sizes = dict(V=c.vocab_size, D=c.d_model, H=c.n_heads, G=c.n_kv_heads, K=c.d_head, R=c.d_rope,
                 U=c.d_value, Q=c.d_query_latent or c.d_model, C=c.d_kv_latent, F=c.d_ff, E=c.n_experts,
                 M=c.d_expert, P=c.dense_prefix, L=c.n_blocks,
                 J=c.layers_per_block - bool(c.n_experts))  # fmt: skip

    def declared(block, stacked="", resized=None, **parts):
        resized, axes = sizes | (resized or {}), {"L": STAGE}
        return declare_block(block, resized, c, stacked=stacked, stacked_axes=axes, **parts)

    def layer(stacked, is_moe):
        attention = declared(LatentAttention if c.attention == "mla" else GroupedAttention, stacked)
        shared = declared(FeedForward, stacked, {"F": c.n_shared * c.d_expert}) if c.n_shared else None
        feed_forward = declared(MoE, stacked, shared=shared) if is_moe else declared(FeedForward, stacked)
        return declared(Layer, stacked, attention=attention, feed_forward=feed_forward)

    dense = layer("LJ", False) if sizes["J"] else None
    block = Block(dense=dense, moe=layer("L", True) if c.n_experts else None)
    return declared(Transformer, prefix=layer("P", False) if c.dense_prefix else None, blocks=block)


class Tokens(NamedTuple):
    """What a layer reads about its tokens besides their activations."""

    positions_bs: jax.Array  # in the document, or in the sequence if attention crosses document boundaries
    segments_bs: jax.Array  # number of the document within its sequence, from 1; 0 is padding
    real_bt: jax.Array  # 1.0 for a token, 0.0 for padding
    index_bt: jax.Array  # index of the token in the global batch
    prefix_bs: Any = None  # prefix LM: 1 for tokens to which earlier tokens of the document attend, too


def dropout(c: ModelConfig, x_btD, tokens: Tokens, key):
    """Apply dropout. The random bits depend on step, layer, sequence and position, but not on the mesh."""
    if not c.dropout or key is None:
        return x_btD
    shape, keys_of = x_btD.shape[-1:], lambda index: jax.random.fold_in(key, index)
    keep_D = lambda index: jax.random.bernoulli(keys_of(index), 1 - c.dropout, shape)
    keep_btD = jax.vmap(jax.vmap(keep_D))(tokens.index_bt)
    return jnp.where(keep_btD, x_btD / (1 - c.dropout), 0).astype(x_btD.dtype)


def with_window(c: ModelConfig, number, attend):
    """Return `attend` for layer `number`, if every n-th layer attends to all positions (`model.window`)."""
    window = parse_window(c.window)
    return functools.partial(attend, is_full=is_full(window, number)) if window.full_every else attend


@jax.named_scope("attention")
def attention_branch(w: Layer, c: ModelConfig, x_btD, tokens: Tokens, number, attend):
    """Return what attention (and a parallel feed-forward layer, if any) adds to the residual stream.
    Shapes: [b, t, D] -> [b, t, D]."""
    h_btD = norm(x_btD, w.norm_attention_D, c.norm_eps, w.norm_attention_bias_D)
    attend = with_window(c, number, attend)
    freqs_r = rotary_frequencies(c, number)
    args = w.attention, c, h_btD, tokens.positions_bs, tokens.segments_bs, freqs_r, attend
    if c.attention == "mla":
        update_btD = latent_attention(*args)
    else:
        update_btD = grouped_attention(*args, parallel=w.feed_forward if c.parallel_residual else None)
    return norm_after(update_btD, w.norm_after_attention_D, c)


@jax.named_scope("feed_forward")
def feed_forward_branch(w: Layer, c: ModelConfig, x_btD, real_bt):
    """Return what the feed-forward layer or MoE adds to the residual stream, and router statistics.
    Shapes: [b, t, D] -> [b, t, D]."""
    h_btD = norm(x_btD, w.norm_feed_forward_D, c.norm_eps, w.norm_feed_forward_bias_D)
    if isinstance(w.feed_forward, MoE):
        update_btD, statistics = moe(w.feed_forward, c, h_btD, real_bt)
        return norm_after(update_btD, w.norm_after_feed_forward_D, c), statistics
    into = lambda h_bpD: hidden(w.feed_forward, c, h_bpD)
    update_btD = gather_apply_scatter(c, into, lambda up_bpf: down(w.feed_forward, up_bpf), h_btD)
    return norm_after(update_btD, w.norm_after_feed_forward_D, c), {}


def layer(w: Layer, c: ModelConfig, x_btD, tokens: Tokens, number, key, attend=over_context):
    """Add attention, then feed-forward, to the residual stream; with parallel_residual, both at once.

    w       the weights of one layer, gathered over FSDP, EXPERT and CONTEXT, but not over TENSOR
    attend  attention over all positions: `over_context` in training (see its arguments), or
            `generate.cache.Attend`, with a KV cache, in prefill and decode
    Returns [b, t, D] and router statistics, if any.
    """
    key_attention, key_feed_forward = dropout_keys(key if key is None else jax.random.fold_in(key, number))
    x_btD += dropout(c, attention_branch(w, c, x_btD, tokens, number, attend), tokens, key_attention)
    if c.parallel_residual:
        return x_btD, {}
    x_btD = named(x_btD, "branch")
    update_btD, statistics = feed_forward_branch(w, c, x_btD, tokens.real_bt)
    return x_btD + dropout(c, update_btD, tokens, key_feed_forward), statistics


def block(w: Block, c: ModelConfig, x_btD, one, first_number):
    """Apply one block, whose first layer has number first_number. `one` applies one layer."""
    dense = moe = None
    if w.dense is not None:
        x_btD, dense = scan_layers(one, w.dense, x_btD, lambda i: first_number + i)
    if w.moe is not None:
        x_btD, moe = one(w.moe, x_btD, first_number + c.layers_per_block - 1)
    return x_btD, Block(dense, moe)


def blocks(stack, c: ModelConfig, x_btD, one, chunk=0):
    """Apply this stage's blocks; `one` applies one layer. Returns [b, t, D] and a Block of router statistics.

    chunk  index of the chunk of this stage's layers, in an interleaved schedule
    """
    before = (chunk * axis_size(STAGE) + axis_index(STAGE)) * stack_size(stack)
    first = lambda i: c.dense_prefix + c.layers_per_block * (before + i)
    return scan_blocks(one, lambda w, x, first: block(w, c, x, one, first), stack, x_btD, first)


# Vocabulary -------------------------------------------------------------------------------------------------


def local_vocabulary(ids, v: int):
    """Return each id's index in this device's vocabulary shard, and whether it is in that shard."""
    local = ids - axis_index(TENSOR) * v
    return jnp.clip(local, 0, v - 1), (local >= 0) & (local < v)


def embed(table_vD, tokens_bs, dtype=None):
    """Look up tokens in this device's vocabulary shard, and reduce-scatter the results over TENSOR.
    Shapes: [b, s] -> [b, t, D]."""
    local_bs, mine_bs = local_vocabulary(tokens_bs, len(table_vD))
    partial_bsD = (table_vD[local_bs] * mine_bs[..., None]).astype(dtype or table_vD.dtype)
    return reduce_scatter(partial_bsD, TENSOR, dim=1)


def embed_in_slices(table_vD, c: ModelConfig, tokens_bs):
    """Look up tokens in a table sharded along D without gathering it: send token ids, receive activations.

    Shapes: [v, D/n], [b, s] -> [b, t, D]. The gradient sums the tokens of n devices in the table's dtype.
    Sends over SLICED (n devices): the ids of n - 1 devices, and (n - 1)/n of x_btD. Backward: (n - 1)/n of
    its gradient.
    """
    x_NtD = embed(table_vD, all_gather(tokens_bs, SLICED, dim=0), c.compute_dtype)
    return all_to_all(x_NtD, SLICED, split_dim=0, join_dim=2)


def unembedding(w: Transformer, c: ModelConfig, form=at_use):
    """Return the unembedding matrix [D, v], or the transposed embedding if they are tied.

    form  function that prepares the weight: `at_use` gathers it, `cast` does not; generation passes its own
    """
    if w.unembedding_DV is None:
        return form(w, c, "embedding_VD")[0].T
    return form(w, c, "unembedding_DV")[0]


def auxiliary_names(c: ModelConfig) -> list[str]:
    """List the enabled per-token auxiliary losses. Each is named like its weight in ModelConfig."""
    return [name for name in ("z_loss", "label_smoothing") if getattr(c, name)]


def logits(w: Transformer, c: ModelConfig, x_bsD, form=at_use):
    """Compute float32 logits over this device's vocabulary shard. Shapes: [.., D] -> [.., v].
    form: as in `unembedding`"""
    logits_bsv = add_bias((x_bsD @ unembedding(w, c, form)).astype(float32), w.bias_V)
    return soft_cap(logits_bsv, parse_softmax(c.softmax).logits_cap)


@jax.named_scope("logits")
def logit_sums(w_Du, x_nD, targets_n, words_u, bias_u, cap=0.0):
    """Return, over u vocabulary ids, log(sum(exp(logits))), the target's logit and the sum of the logits. The
    target's logit is 0 if the target is not among these ids.

    cap  of the logits, see `soft_cap`
    Shapes: [D, u], [n, D], [n], [u], [u] -> three arrays [n]. A negative id in words_u is padding.
    """
    logits_nu, words_1u = add_bias((x_nD.astype(w_Du.dtype) @ w_Du).astype(float32), bias_u), words_u[None]
    logits_nu = jnp.where(words_1u < 0, -jnp.inf, soft_cap(logits_nu, cap))
    top_n = jax.lax.stop_gradient(jnp.max(logits_nu, axis=-1))
    log_sum_n = top_n + jnp.log(jnp.sum(jnp.exp(logits_nu - top_n[:, None]), axis=-1))
    over = lambda which: jnp.sum(jnp.where(which, logits_nu, 0), axis=-1)
    return log_sum_n, over(words_1u == targets_n[:, None]), over(words_1u >= 0)


def loss_sums(c: ModelConfig, w_Dv, x_nD, targets_n, weights_n, bias_v=None):
    """Return weighted sums over tokens: -log softmax(logits)[target], in nats, and auxiliary losses by name.

    The logits are sharded over the vocabulary. z_loss is log(sum(exp(logits)))^2 (arXiv:2204.02311, 5);
    label_smoothing is the target's logit minus the mean logit, a difference in nats (arXiv:1512.00567, 7).
    """
    # float32, because the backward pass adds up the gradients of x from all slices of the vocabulary
    x_nD, v, cap = x_nD.astype(float32), w_Dv.shape[-1], parse_softmax(c.softmax).logits_cap
    sums_of = lambda w_Du, *words_u: logit_sums(w_Du, x_nD, targets_n, *words_u, cap)
    words_v = axis_index(TENSOR) * v + jnp.arange(v), bias_v
    log_sums_kn, targets_kn, totals_kn = slice_by_slice(c, sums_of, w_Dv, words_v, len(x_nD))
    top_n = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(log_sums_kn, axis=0)), TENSOR)
    above_n = jnp.log(psum(jnp.sum(jnp.exp(log_sums_kn - top_n[None]), axis=0), TENSOR))
    log_sum_n, target_n = top_n + above_n, psum(jnp.sum(targets_kn, axis=0), TENSOR)
    auxiliary = {
        "z_loss": lambda: log_sum_n**2,
        "label_smoothing": lambda: target_n - psum(jnp.sum(totals_kn, axis=0), TENSOR) / c.vocab_size,
    }
    total = lambda x_n: jnp.sum(weights_n * x_n)
    return total(top_n - target_n + above_n), {name: total(auxiliary[name]()) for name in auxiliary_names(c)}


# The whole model --------------------------------------------------------------------------------------------


def dropout_keys(key):
    """Split a dropout key into one for the embedding and one for the layers."""
    return (None, None) if key is None else jax.random.split(key)


def tokens_of(batch) -> Tokens:
    return Tokens(
        positions_bs=batch["positions_BT"],
        segments_bs=batch["segments_BT"],
        real_bt=own_slice(batch["segments_BT"] > 0, TENSOR, dim=1).astype(float32),
        index_bt=own_slice(batch["index_BT"], TENSOR, dim=1),
        prefix_bs=batch.get("prefix_BT"),
    )


def embed_batch(w: Transformer, c: ModelConfig, batch, key, form=at_use):
    """Embed the tokens of a batch. Shapes: [b, s] -> [b, t, D]. form: as in `unembedding`"""
    tokens_bs = batch["tokens_BT"]
    if tokens_go_to_table(c, tokens_bs.size, c.vocab_size // axis_size(TENSOR)):
        x_btD = embed_in_slices(w.embedding_VD, c, tokens_bs)
    else:
        x_btD = embed(*form(w, c, "embedding_VD"), tokens_bs, c.compute_dtype)
    return dropout(c, x_btD, tokens_of(batch), dropout_keys(key)[0])


def stage(w: Transformer, c: ModelConfig, x_btD, batch, key, chunk=0):
    """Apply the layers of this pipeline stage, or one chunk of them.
    Returns [b, t, D] and router statistics with a leading dim for the blocks."""
    tokens, key = tokens_of(batch), dropout_keys(key)[1]
    attend = functools.partial(over_context, prefix_bs=tokens.prefix_bs)
    one = remat(c, lambda w, x_btD, i: layer(at_use(w, c), c, x_btD, tokens, i, key, attend))
    if w.prefix is not None:
        prefix = lambda x_btD: block(Block(dense=w.prefix), c, x_btD, one, 0)[0]
        is_first = (axis_index(STAGE) == 0) & (chunk == 0)
        x_btD = jax.lax.cond(is_first, prefix, lambda x_btD: x_btD, x_btD)
    x_btD, statistics = blocks(w.blocks, c, x_btD, one, chunk)
    return x_btD, statistics.moe or {}


def final_norm(w: Transformer, c: ModelConfig, x, *, dim):
    """Apply the final norm, then all-gather over TENSOR: each vocabulary shard needs all positions."""
    return all_gather(norm(x, w.norm_D, c.norm_eps, w.norm_bias_D), TENSOR, dim=dim)


@struct.dataclass
class Sums:
    """Terms of the loss, summed over this device's tokens. Evaluation reads only cross_entropy and weight."""

    cross_entropy: Any  # nats
    weight: Any  # sum of the tokens' loss weights
    auxiliary: Any  # name -> sum, for each of `auxiliary_names`
    router: Any  # `router_statistics` of each MoE layer, or empty


def token_losses(w: Transformer, c: ModelConfig, x_nD, targets_N, weights_N):
    """Return `loss_sums` for N tokens, of which every device in the TENSOR group holds n."""
    x_ND = final_norm(w, c, x_nD, dim=0)
    return loss_sums(c, unembedding(w, c, cast), x_ND, targets_N, weights_N, w.bias_V)


def forward(w: Transformer, c: ModelConfig, batch, key) -> Sums:
    """Run the whole model on this device's tokens, without microbatches or pipeline stages."""
    x_btD = embed_batch(w, c, batch, key)
    x_btD, router = stage(w, c, x_btD, batch, key)
    x_bsD = final_norm(w, c, x_btD, dim=1)
    flat = lambda x_bsX: x_bsX.reshape(-1, *x_bsX.shape[2:])
    of_tokens = map(flat, (x_bsD, batch["targets_BT"], batch["weights_BT"]))
    losses = loss_sums(c, unembedding(w, c, cast), *of_tokens, w.bias_V)
    return Sums(losses[0], jnp.sum(batch["weights_BT"]), losses[1], router)


def loss(c: ModelConfig, sums: Sums):
    """Compute the loss, the same on all devices: nats per target token of the batch, plus auxiliary losses.

    Returns the loss and metrics: cross_entropy, tokens, each auxiliary loss by name and, per MoE layer,
    tokens_per_expert, drop_fraction, router_entropy (nats), balance_loss.
    """
    tokens = psum(sums.weight, (*BATCH, CONTEXT))  # not over STAGE: every stage has the same weights
    mean = lambda x: psum(x, (*BATCH, CONTEXT, STAGE)) / tokens
    cross_entropy, auxiliary = mean(sums.cross_entropy), jax.tree.map(mean, sums.auxiliary)
    metrics = {"cross_entropy": cross_entropy, "tokens": tokens} | auxiliary
    if sums.router:
        router = jax.tree.map(lambda x: psum(x, TOKENS), sums.router)
        load = router["tokens_per_expert"], router["probability"], router["tokens"][:, None]
        balance_L = balance_loss(c, *load)
        auxiliary["balance_loss"] = psum(jnp.sum(balance_L), STAGE) / c.n_blocks
        metrics |= {
            "tokens_per_expert": router["tokens_per_expert"],
            "drop_fraction": router["dropped"] / (router["tokens"] * c.top_k),
            "router_entropy": router["entropy"] / router["tokens"],
            "balance_loss": balance_L,
        }
    return cross_entropy + sum(getattr(c, name) * value for name, value in auxiliary.items()), metrics


def metric_specs(c: ModelConfig):
    """Return the PartitionSpec of each metric: router statistics are sharded by layer, others replicated."""
    everywhere = dict.fromkeys(("cross_entropy", "tokens", *auxiliary_names(c)), P())
    router = ("tokens_per_expert", "drop_fraction", "router_entropy", "balance_loss")
    return everywhere | ({name: P(STAGE) for name in router} if c.n_experts else {})
