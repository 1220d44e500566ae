"""GPT-J as one device sees it: a second model from the layers of `model.py`.

What differs from `model.py`: attention and feed-forward read the same normed activations and are added together (a
parallel block), norms subtract the mean and have a bias, only a part of each head is rotary, and the feed-forward and
the unembedding have biases. Letters and conventions are those of `model.py`; here K is the part of a head without
rotary, and U = R + K its whole width. It is used to compare with published weights; it is not trained, so it has no
dropout, no remat and no stages: the devices along STAGE do the same work.
Source: github.com/kingoflolz/mesh-transformer-jax.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec as P

import sharding
from config import Count, NotNegative, Precision, Size, check
from kernels.scores import allowed, attend
from model import embed, rotary_angles, rotate
from overlap.weights import gathered
from sharding import BATCH, BATCH_SPEC, CONTEXT, SLICED, TENSOR, all_gather, param, reduce_scatter
from utils import UserError
from xla import ordered

ROPE_THETA = 10_000.0  # fixed in GPT-J
NAMES = ("tokens_BT", "positions_BT", "segments_BT")  # what it reads of a batch


@dataclass(frozen=True)
class GPTJConfig:
    """The 6B model: 6,050,882,784 parameters."""

    vocab_size: Size = 50_400  # rows of the embedding table
    d_model: Size = 4096  # width of the residual stream
    n_layers: Size = 28  # parallel blocks
    n_heads: Size = 16  # heads, d_model / n_heads wide
    d_rope: Count = 64  # rotary part of a head's query and key
    d_ff: Size = 16_384  # hidden width of the feed-forward
    norm_eps: NotNegative = 1e-5  # added to the variance in LayerNorm
    precision: Precision = dataclasses.field(default_factory=Precision)  # number formats
    gather = "layer"  # as in ModelConfig: weights are joined for each use of a layer

    def __post_init__(self):
        check(self, "gptj.")
        if self.d_model % self.n_heads:
            raise UserError(f"gptj.d_model={self.d_model}: must be a multiple of n_heads={self.n_heads}")
        if self.d_rope % 2 or not 0 < self.d_rope < self.d_head:
            raise UserError(f"gptj.d_rope={self.d_rope}: must be even, above 0 and below the head's {self.d_head}")

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads


@struct.dataclass
class Layer:
    norm_gain_D: Any = param("D", mean=1.0, decay=False)
    norm_bias_D: Any = param("D", decay=False)
    w_query_rotary_DHR: Any = param("DHR", fan_in="D", D=SLICED, H=TENSOR)
    w_query_DHK: Any = param("DHK", fan_in="D", D=SLICED, H=TENSOR)
    w_key_rotary_DHR: Any = param("DHR", fan_in="D", D=SLICED, H=TENSOR)
    w_key_DHK: Any = param("DHK", fan_in="D", D=SLICED, H=TENSOR)
    w_value_DHU: Any = param("DHU", fan_in="D", D=SLICED, H=TENSOR)
    w_out_HUD: Any = param("HUD", fan_in="HU", residual=True, H=TENSOR, D=SLICED)
    w_up_DF: Any = param("DF", fan_in="D", D=SLICED, F=TENSOR)
    bias_up_F: Any = param("F", decay=False, F=TENSOR)
    w_down_FD: Any = param("FD", fan_in="F", residual=True, F=TENSOR, D=SLICED)
    bias_down_D: Any = param("D", decay=False)


@struct.dataclass
class GPTJ:
    embedding_VD: Any = param("VD", std=lambda c: 0.02, decay=False, V=TENSOR, D=SLICED)
    layers: Layer | None = None
    norm_gain_D: Any = param("D", mean=1.0, decay=False)
    norm_bias_D: Any = param("D", decay=False)
    unembedding_DV: Any = param("DV", fan_in="D", D=SLICED, V=TENSOR)
    bias_V: Any = param("V", decay=False, V=TENSOR)


def declare(c: GPTJConfig) -> GPTJ:
    """Declare every parameter: a GPTJ holding `sharding.Declaration`s."""
    sizes = dict(V=c.vocab_size, D=c.d_model, L=c.n_layers, H=c.n_heads, R=c.d_rope, K=c.d_head - c.d_rope, U=c.d_head,
                 F=c.d_ff)  # fmt: skip
    return sharding.declare(GPTJ, sizes, c, layers=sharding.declare(Layer, sizes, c, stacked="L"))


def layer_norm(x_btD, gain_D, bias_D, eps):
    """Shift each vector to mean 0, scale it to variance 1; then a learned gain and bias. Source: arXiv:1607.06450."""
    x32 = x_btD.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * scale * gain_D[None, None, :] + bias_D[None, None, :]).astype(x_btD.dtype)


def attention(w: Layer, c: GPTJConfig, x_bsD, positions_bs, segments_bs):
    """Attend over the whole context. Returns a partial sum over TENSOR. Shapes: [b, s, D] -> [b, s, D]."""
    into = lambda w_DHX: jnp.einsum("bsD,DhX->bshX", x_bsD, w_DHX)
    angles_bsr = rotary_angles(positions_bs, c.d_rope, ROPE_THETA, on=1.0)
    q_bshU = jnp.concatenate([rotate(into(w.w_query_rotary_DHR), angles_bsr), into(w.w_query_DHK)], axis=-1)
    k_bshU = jnp.concatenate([rotate(into(w.w_key_rotary_DHR), angles_bsr), into(w.w_key_DHK)], axis=-1)
    k_bShU, v_bShU = all_gather(k_bshU, CONTEXT, dim=1), all_gather(into(w.w_value_DHU), CONTEXT, dim=1)
    positions_bS, segments_bS = all_gather(positions_bs, CONTEXT, dim=1), all_gather(segments_bs, CONTEXT, dim=1)
    o_bshU = attend(q_bshU, k_bShU, v_bShU, allowed(positions_bs, positions_bS, segments_bs, segments_bS))
    return jnp.einsum("bshU,hUD->bsD", o_bshU, w.w_out_HUD)


def feed_forward(w: Layer, c: GPTJConfig, x_bsD):
    """Returns a partial sum over TENSOR, without its output bias. Shapes: [b, s, D] -> [b, s, D]."""
    up_bsf = x_bsD @ w.w_up_DF + w.bias_up_F[None, None, :].astype(x_bsD.dtype)
    return jax.nn.gelu(up_bsf) @ w.w_down_FD


def layer(w: Layer, c: GPTJConfig, x_btD, positions_bs, segments_bs):
    """Attention and feed-forward side by side: one gather and one reduce-scatter pay for both."""
    w = gathered(w, c)
    h_bsD = all_gather(layer_norm(x_btD, w.norm_gain_D, w.norm_bias_D, c.norm_eps), TENSOR, dim=1)
    partial_bsD = attention(w, c, h_bsD, positions_bs, segments_bs) + feed_forward(w, c, h_bsD)
    # The bias is whole on every device: added to the partial sums it would count once per device.
    return x_btD + reduce_scatter(partial_bsD, TENSOR, dim=1) + w.bias_down_D[None, None, :].astype(x_btD.dtype)


def logits(w: GPTJ, c: GPTJConfig, batch):
    """Float32 logits of every position. Shapes: [b, s] -> [b, s, v]."""
    step = lambda x_btD, w_layer: (layer(w_layer, c, x_btD, batch["positions_BT"], batch["segments_BT"]), None)
    x_btD, _ = jax.lax.scan(step, embed(*gathered(w, c, "embedding_VD"), batch["tokens_BT"]), w.layers)
    x_bsD = all_gather(layer_norm(x_btD, w.norm_gain_D, w.norm_bias_D, c.norm_eps), TENSOR, dim=1)
    (unembedding_Dv,) = gathered(w, c, "unembedding_DV")
    return (x_bsD @ unembedding_Dv).astype(jnp.float32) + w.bias_V[None, None, :]


def compiled_logits(c: GPTJConfig, mesh: Mesh):
    """Compile fn(params, batch) -> float32 logits [B, T, V]: the one `shard_map`, over all axes, `check_vma` on."""
    in_specs = (sharding.specs(declare(c)), dict.fromkeys(NAMES, BATCH_SPEC))
    local = jax.shard_map(lambda w, batch: logits(w, c, batch), mesh=mesh, in_specs=in_specs,
                          out_specs=P(BATCH, CONTEXT, TENSOR))  # fmt: skip
    return ordered.jit(lambda params, batch: local(params, {name: batch[name] for name in NAMES}), mesh)
