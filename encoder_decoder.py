"""T5 (arXiv:1910.10683, version 1.1): an encoder reads the inputs, and a decoder writes the targets.

It is made of the parts of `model.py`, and runs inside the same `shard_map`; see the legend there. Its own parts are the
relative position biases, which replace rotary embeddings, and cross-attention, in which a target token attends to the
encoder's output. Two letters are new: W is the buckets of relative positions, I the layers of the encoder.

The encoder's activations and the decoder's travel together, as a pair (x_btD, y_btD): t is a shard of the S input
positions in the first, and of the T target positions in the second. A pipeline stage holds an equal share of both
stacks, and every microbatch passes through the stages twice: first through the encoder layers, then through the
decoder layers. So the memory of all stages is equal, whatever the lengths of the two stacks.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

import model
from config import ModelConfig
from kernels.masked import masked_attention
from model import FeedForward, GroupedAttention, Layer, Tokens, Transformer, dropout, dropout_keys, norm
from overlap.layers import scan_layers, stack_size
from overlap.positions import apply_scatter, gather_apply
from overlap.remat import remat
from overlap.weights import at_use
from sharding import STAGE, TENSOR, all_gather, axis_index, declare as declare_block, param

BUCKETS, MAX_DISTANCE = 32, 128  # the same in all published T5 models
ENCODER_BATCH = ("encoder_tokens_BS", "encoder_positions_BS", "encoder_segments_BS")

# Parameters -----------------------------------------------------------------------------------------------------------


@struct.dataclass
class Encoder:
    """The encoder's layers, and what they share. They are those of `model.py`, with a feed-forward layer."""

    bias_WH: Any = param("WH", std=lambda c: c.d_model**-0.5, decay=False, H=TENSOR)
    layers: Layer | None = None
    norm_D: Any = param("D", mean=1.0, decay=False)


@struct.dataclass
class DecoderLayer(Layer):
    norm_cross_D: Any = param("D", mean=1.0, decay=False)
    cross: GroupedAttention | None = None


@struct.dataclass
class Decoder:
    """The decoder's layers and their position biases. Its final norm is the `norm_D` of the whole model."""

    bias_WH: Any = param("WH", std=lambda c: c.d_model**-0.5, decay=False, H=TENSOR)
    layers: DecoderLayer | None = None


@struct.dataclass
class EncoderDecoder(Transformer):
    """A Transformer with an encoder and a decoder in place of `prefix` and `blocks`."""

    encoder: Encoder | None = None
    decoder: Decoder | None = None


def declare(c: ModelConfig) -> EncoderDecoder:
    """Declare every parameter. Stacked layers have the leading dim [I] or [L]."""
    sizes = dict(V=c.vocab_size, D=c.d_model, H=c.n_heads, G=c.n_kv_heads, K=c.d_head, F=c.d_ff, W=BUCKETS,
                 I=c.encoder_layers, L=c.n_layers)  # fmt: skip

    def declared(block, stacked="", **parts):
        return declare_block(block, sizes, c, stacked=stacked, stacked_axes={"I": STAGE, "L": STAGE}, **parts)

    def layers(kind, stacked, *attentions):
        parts = {name: declared(GroupedAttention, stacked) for name in attentions}
        return declared(kind, stacked, feed_forward=declared(FeedForward, stacked), **parts)

    return declared(
        EncoderDecoder,
        encoder=declared(Encoder, layers=layers(Layer, "I", "attention")),
        decoder=declared(Decoder, layers=layers(DecoderLayer, "L", "attention", "cross")),
    )


# Position biases and masks --------------------------------------------------------------------------------------------


def bucket(distance, bidirectional: bool):
    """Return the bucket of each distance, query position minus key position, as in T5 (arXiv:1910.10683, 2.1).

    Half of the buckets are for one distance each, from 0; the others grow exponentially up to MAX_DISTANCE, and the
    last one has all larger distances. If bidirectional, the second half of all buckets is for keys after the query.
    """
    n, after = BUCKETS, 0
    if bidirectional:
        n, after = BUCKETS // 2, BUCKETS // 2 * (distance < 0)
        distance = jnp.abs(distance)
    exact, distance = n // 2, jnp.maximum(distance, 0)
    steps = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(MAX_DISTANCE / exact)
    far = jnp.minimum(exact + (steps * (n - exact)).astype(jnp.int32), n - 1)
    return after + jnp.where(distance < exact, distance, far)


@jax.named_scope("position_bias")
def position_bias(bias_Wh, queries_s, keys_S, bidirectional: bool):
    """Return what is added to the score of a query and a key, from their positions. Shapes: [s], [S] -> [h, s, S].

    The lookup is a matmul with one-hot rows, because its backward pass is a matmul, too, instead of a scatter.
    """
    bucket_sS = bucket(queries_s[:, None] - keys_S[None, :], bidirectional)
    return jnp.einsum("sSW,Wh->hsS", jax.nn.one_hot(bucket_sS, BUCKETS, dtype=bias_Wh.dtype), bias_Wh)


def same_segment(queries_bs, keys_bS):
    """Return which keys are in the same example as each query. Shapes: [b, s], [b, S] -> [b, s, S]."""
    return queries_bs[:, :, None] == keys_bS[:, None, :]


def attend_with(seen_bsS, bias_hsS):
    """Return an `attend` for `model.layer`, with a mask and position biases."""

    def attend(c, q_bshK, parts, keys_values, segments_bs, absorbed=None):
        return masked_attention(q_bshK, *keys_values(*parts), seen_bsS, bias_hsS)

    return attend


def within_rows(bias_WH, segments_bs, bidirectional: bool):
    """Return `attend` for self-attention within the examples of each row.

    Two tokens of an example are as far apart in the row as in the example, so all rows share one bias."""
    positions_s = jnp.arange(segments_bs.shape[1])
    seen_bsS = same_segment(segments_bs, segments_bs)
    if not bidirectional:
        seen_bsS &= (positions_s[:, None] >= positions_s[None, :])[None]
    return attend_with(seen_bsS, position_bias(bias_WH, positions_s, positions_s, bidirectional))


# Layers ---------------------------------------------------------------------------------------------------------------


@jax.named_scope("cross_attention/keys_values")
def cross_keys_values(w: DecoderLayer, memory_bSD):
    """Project the encoder's output to keys and values. Shapes: [b, S, D] -> [b, S, g, K] each."""
    return tuple(jnp.einsum("bSD,DgK->bSgK", memory_bSD, w_DGK) for w_DGK in (w.cross.w_key_DGK, w.cross.w_value_DGK))


@jax.named_scope("cross_attention")
def cross_branch(w: DecoderLayer, c: ModelConfig, y_btD, keys_values, attend):
    """Return what cross-attention adds to the decoder's residual stream. Shapes: [b, t, D] -> [b, t, D].

    keys_values  of the encoder's output, [b, S, g, K] each
    attend       as `attend_with` returns it
    """
    h_btD = norm(y_btD, w.norm_cross_D, c.norm_eps)

    @jax.named_scope("queries")
    def queries(h_bpD):
        return jnp.einsum("bpD,DhK->bphK", h_bpD, w.cross.w_query_DHK)

    @jax.named_scope("attention_output")
    def out(o_bphK):
        return jnp.einsum("bphK,hKD->bpD", o_bphK, w.cross.w_out_HKD)

    o_bshK = attend(c, gather_apply(c, queries, h_btD), keys_values, lambda *same: same, None)
    return apply_scatter(c, out, o_bshK)


def decoder_layer(
    w: DecoderLayer, c: ModelConfig, y_btD, tokens: Tokens, number, key, attend, keys_values, attend_cross
):
    """Add self-attention, cross-attention and feed-forward to the residual stream. Shapes: [b, t, D] -> [b, t, D]."""
    keys = [None] * 3 if key is None else jax.random.split(jax.random.fold_in(key, number), 3)
    y_btD += dropout(c, model.attention_branch(w, c, y_btD, tokens, number, attend), tokens, keys[0])
    y_btD += dropout(c, cross_branch(w, c, y_btD, keys_values, attend_cross), tokens, keys[1])
    update_btD, _ = model.feed_forward_branch(w, c, y_btD, tokens.real_bt)
    return y_btD + dropout(c, update_btD, tokens, keys[2])


def encoder_side(batch) -> dict:
    """Return the encoder's arrays of a batch, with the names that `model.py` uses."""
    return {"tokens_BT": batch["encoder_tokens_BS"], "positions_BT": batch["encoder_positions_BS"],
            "segments_BT": batch["encoder_segments_BS"], "index_BT": batch["encoder_index_BS"]}  # fmt: skip


def encode(w: EncoderDecoder, c: ModelConfig, x_btD, batch, key, form=at_use):
    """Apply the encoder layers of this stage. Shapes: [b, t, D] -> [b, t, D]. form: as in `model.unembedding`"""
    tokens = model.tokens_of(encoder_side(batch))
    attend = within_rows(w.encoder.bias_WH, tokens.segments_bs, bidirectional=True)
    one = remat(c, lambda w, x_btD, number: model.layer(form(w, c), c, x_btD, tokens, number, key, attend))
    first = axis_index(STAGE) * stack_size(w.encoder.layers)
    return scan_layers(one, w.encoder.layers, x_btD, lambda i: first + i)[0]


@jax.named_scope("encoder_output")
def memory(w: EncoderDecoder, c: ModelConfig, x_btD):
    """Norm the encoder's output, and gather its positions, once for all decoder layers. [b, t, D] -> [b, S, D]."""
    return all_gather(norm(x_btD, w.encoder.norm_D, c.norm_eps), TENSOR, dim=1)


def decode(w: EncoderDecoder, c: ModelConfig, x_btD, y_btD, batch, key):
    """Apply the decoder layers of this stage to y, which attend to x. Shapes: [b, t, D] -> [b, t, D]."""
    tokens, memory_bSD = model.tokens_of(batch), memory(w, c, x_btD)
    attend = within_rows(w.decoder.bias_WH, tokens.segments_bs, bidirectional=False)
    cross = attend_with(same_segment(tokens.segments_bs, batch["encoder_segments_BS"]), None)

    def one(w, y_btD, number):
        w = at_use(w, c)
        keys_values = cross_keys_values(w, memory_bSD)
        return decoder_layer(w, c, y_btD, tokens, number, key, attend, keys_values, cross), None

    first = c.encoder_layers + axis_index(STAGE) * stack_size(w.decoder.layers)
    return scan_layers(remat(c, one), w.decoder.layers, y_btD, lambda i: first + i)[0]


# What `pipeline/` calls -----------------------------------------------------------------------------------------------


def embed_batch(w: EncoderDecoder, c: ModelConfig, batch, key, form=at_use):
    """Embed the inputs and the decoder's tokens with the same table: a pair of arrays [b, t, D]."""
    keys = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, c.encoder_layers + c.n_layers))
    return model.embed_batch(w, c, encoder_side(batch), keys[0], form), model.embed_batch(w, c, batch, keys[1], form)


def stage(w: EncoderDecoder, c: ModelConfig, pair, batch, key, chunk=0):
    """Apply the encoder layers (chunk 0) or the decoder layers (chunk 1) of this stage to the pair.

    If `chunk` differs between stages, it is an array, and the backward pass recomputes the layers: otherwise it would
    save the intermediate results of both stacks. Returns the pair, and no router statistics.
    """
    key, c = dropout_keys(key)[1], dataclasses.replace(c, no_rope_every=1)  # position biases replace rotary embeddings

    def encoder(w, x_btD, y_btD, batch):
        return encode(w, c, x_btD, batch, key), y_btD

    def decoder(w, x_btD, y_btD, batch):
        return x_btD, decode(w, c, x_btD, y_btD, batch, key)

    if isinstance(chunk, int):
        return (decoder if chunk else encoder)(w, *pair, batch), {}
    either = lambda *args: jax.lax.cond(chunk == 0, encoder, decoder, *args)
    with jax.named_scope("stacks"):
        return jax.checkpoint(either)(w, *pair, batch), {}
