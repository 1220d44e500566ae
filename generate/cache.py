"""The KV cache, and the model's forward pass over a few new tokens with it.

Prefill and decode are one function, `cached_forward`: s new tokens of each sequence attend to the S slots of the cache.
The layers are the training layers in `model.py`. Only their argument `attend` differs: training passes attention over
the context, and this file passes `CachedAttention`. For latent attention the cache holds latents and rotary keys. The
projections from the latent to keys and values are absorbed into query and output (arXiv:2405.04434, section 2.1.2).
Mixtures of experts are dropless here, whatever capacity_factor they were trained with.

With sliding windows (`model.window`) a cache is rolling: position p is in slot p modulo the slots. A layer that never
attends to all positions needs only as many slots as its window, and some for the tokens of one call (`cached_slots`).

Any mesh works. Sequences are sharded over BATCH, heads and vocabulary over TENSOR, the cache's slots over CONTEXT, and
layers with their cache over STAGE, where the stages run one after another. The parameters are sharded as in training,
except that `unstack` gathers them over CONTEXT; shards over FSDP and EXPERT are gathered for every token.
The model sees the new tokens of a device's b sequences as one row of n = b * s positions. This row is sharded over
CONTEXT everywhere, and also over TENSOR between blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import encoder_decoder
import model
import sharding
from architectures import architecture, declare
from compile import ordered
from config import ModelAtWork, ModelConfig
from config.fields import parse_softmax, parse_window
from generate.quantised import Quantized, dequantize, gather_over_context, gather_weights, quantize_like, specs
from kernels.blocks import HIDDEN, soft_cap
from overlap.context import add_sinks
from overlap.layers import scan_layers
from overlap.positions import concatenate_features
from pipeline.step import zeros_like_result
from sharding import (
    AXES,
    BATCH,
    CONTEXT,
    STAGE,
    TENSOR,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    drop_axis,
    own_slice,
    psum,
    shift,
    vary,
)

NOWHERE = 2**30  # a position past the last slot of any cache
ROWS_DIM = 1  # the dim of every cache array that counts sequences

# The cache ------------------------------------------------------------------------------------------------------------


class LatentCache(NamedTuple):
    """One layer's cache for latent attention: C + R numbers per position, which all heads share."""

    latent_bSC: Any
    rotary_bSR: Any


class GroupedCache(NamedTuple):
    """One layer's cache for grouped-query attention: a key and a value for each of the G key-value heads.

    The slots of a head are contiguous, because the matmul with one query reads them in that order.
    """

    key_bgSK: Any
    value_bgSK: Any


class DecoderCache(NamedTuple):
    """The cache of one decoder layer of an encoder-decoder: of its own tokens, and of the encoder's output."""

    own: GroupedCache
    inputs: GroupedCache


def cache_spec(c: ModelConfig):
    """Return the PartitionSpec of a cache: slots over CONTEXT, heads over TENSOR. The first dim has an entry per stage,
    because stages have separate layers; for latents, it has an entry per stage and TENSOR device, which has a copy."""
    return P(STAGE, BATCH, TENSOR, CONTEXT) if c.attention == "gqa" else P((STAGE, TENSOR), BATCH, CONTEXT)


def cached_slots(c: ModelConfig, mesh: Mesh, slots: int, piece: int, numbers: Sequence[int]) -> int:
    """Return the slots per sequence of these layers, one per stage, whose caches have the same shape.

    If all have a window, window + piece - 1, rounded up to a multiple of the devices along CONTEXT, are enough: a call
    of `piece` tokens then overwrites no position to which its first token attends.
    """
    window, every, _ = parse_window(c.window)
    if not window or not piece or (every and any((number + 1) % every == 0 for number in numbers)):
        return slots
    needed = window + piece - 1
    return min(slots, needed + -needed % mesh.shape[CONTEXT])


def cache_shapes(c: ModelConfig, mesh: Mesh, b: int, slots: int, form: str = "compute", piece: int = 0):
    """Return the cache of b sequences as ShapeDtypeStructs, arranged as `unstack` arranges the layers' parameters:
    {"prefix": [layer, ..], "blocks": [Block(dense=[layer, ..], moe=layer), ..]}; for an encoder-decoder, {"decoder":
    [DecoderCache, ..], "inputs": the number of inputs of each sequence}.

    slots  positions per sequence in the cache, a multiple of the devices along CONTEXT
    form   number format: "compute", the compute dtype; "bfloat16"; or "int8", see `quantised.py`
    piece  the most tokens per sequence in a call of `cached_forward`, see `cached_slots`; 0: all layers have all slots
    Every stage has caches for the prefix layers, but only the first stage uses them.
    """
    stages, place = mesh.shape[STAGE], NamedSharding(mesh, cache_spec(c))
    copies = mesh.shape[TENSOR] if c.attention == "mla" else 1

    def array(*shape):
        of = lambda dtype, *shape: jax.ShapeDtypeStruct((stages * copies, b, *shape), dtype, sharding=place)
        if form == "int8":
            return Quantized(of("int8", *shape), of("float32", *shape[:-1], 1))
        return of(c.compute_dtype if form == "compute" else form, *shape)

    def layer(*numbers):
        own = cached_slots(c, mesh, slots, piece, numbers)
        if c.attention == "mla":
            return LatentCache(array(own, c.d_kv_latent), array(own, c.d_rope))
        return GroupedCache(*[array(c.n_kv_heads, own, c.d_head)] * 2)

    blocks, is_moe = c.n_blocks // stages, bool(c.n_experts)
    if architecture(c).module is encoder_decoder:
        inputs = jax.ShapeDtypeStruct((stages, b, mesh.shape[TENSOR], 1), "int32", sharding=place)
        return {"decoder": [DecoderCache(layer(), layer()) for _ in range(c.n_layers // stages)], "inputs": inputs}

    def block(i):
        firsts = [c.dense_prefix + c.layers_per_block * (stage * blocks + i) for stage in range(stages)]
        every = [layer(*(first + j for first in firsts)) for j in range(c.layers_per_block)]
        return model.Block(dense=every[:-1] if is_moe else every, moe=every[-1] if is_moe else None)

    return {"prefix": [*map(layer, range(c.dense_prefix))], "blocks": [*map(block, range(blocks))]}


def empty_cache(c: ModelConfig, mesh: Mesh, b: int, slots: int, form: str = "compute", piece: int = 0):
    """Return a cache of zeros with the shapes of `cache_shapes`."""
    zeros = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
    return jax.tree.map(zeros, cache_shapes(c, mesh, b, slots, form, piece))


def first_slot(S: int):
    """Return the number of this device's first slot. Each CONTEXT device holds S consecutive slots."""
    return axis_index(CONTEXT) * S


def seen_slots(positions_bs, S: int, window: int = 0, is_full=False):
    """Return which of this device's S slots each token attends to. Without a window, slot i holds position i.

    window   if not 0, slot i holds the row's newest position p for which p % slots == i
    is_full  True: ignore the window; it may be traced
    Shapes: [b, s] -> [b, s, S].
    """
    slot_11S = first_slot(S) + jnp.arange(S)[None, None, :]
    if not window:
        return positions_bs[:, :, None] >= slot_11S
    last_b11 = jnp.max(jnp.where(positions_bs == NOWHERE, -1, positions_bs), axis=1)[:, None, None]
    held_b1S = last_b11 - (last_b11 - slot_11S) % (S * axis_size(CONTEXT))  # below 0: nothing yet
    distance_bsS = positions_bs[:, :, None] - held_b1S
    return (held_b1S >= 0) & (distance_bsS >= 0) & (is_full | (distance_bsS < window))


def write_entries(cache_bgSX, new_bsgX, slots_bs):
    """Write new tokens into their slots. Slots of other devices are skipped."""

    def write(cache_bgSX, new_bsgX):
        at_bs = slots_bs - first_slot(cache_bgSX.shape[-2])
        at_bs = jnp.where(at_bs < 0, NOWHERE, at_bs)  # a negative index would count from the end
        heads = (slice(None),) * (cache_bgSX.ndim - 3)  # latents have none
        return cache_bgSX.at[jnp.arange(len(at_bs))[:, None], *heads, at_bs].set(new_bsgX, mode="drop")

    return jax.tree.map(write, cache_bgSX, quantize_like(new_bsgX, cache_bgSX))


@jax.named_scope("attend_to_cache")
def attend_to_slots(q_bshX, k_bgSX, v_bgSU, seen_bsS, bias_bhsS=None, cap=0.0):
    """Attend to this device's slots. Queries are already scaled.

    seen_bsS   which slots each token attends to
    bias_bhsS  added to the scores; None: nothing
    cap        of the scores, see `soft_cap`; 0: none
    Shapes: [b, s, h, X], [b, g, S, X], [b, g, S, U] -> [b, s, h, U] and the log-sum-exp of the scores [b, s, h, 1].
    Latents have no dim g. Each of the g key heads serves r = h / g consecutive query heads.
    """
    (b, s, h, X), g, S = q_bshX.shape, "g" * (k_bgSX.ndim - 3), k_bgSX.shape[-2]
    q_bsgrX = q_bshX.reshape(b, s, *k_bgSX.shape[1:-2], -1, X)
    scores_bgrsS = soft_cap(jnp.einsum(f"bs{g}rX,b{g}SX->b{g}rsS", q_bsgrX, k_bgSX).astype(jnp.float32), cap)
    if bias_bhsS is not None:
        scores_bgrsS += bias_bhsS.reshape(scores_bgrsS.shape)
    scores_bgrsS = jnp.where(seen_bsS.reshape(b, *[1] * len(g), 1, s, S), scores_bgrsS, HIDDEN)
    weight_bgrsS = jax.nn.softmax(scores_bgrsS, axis=-1).astype(v_bgSU.dtype)
    o_bshU = jnp.einsum(f"b{g}rsS,b{g}SU->bs{g}rU", weight_bgrsS, v_bgSU).reshape(b, s, h, -1)
    return o_bshU, jnp.moveaxis(jax.nn.logsumexp(scores_bgrsS, axis=-1), -1, 1).reshape(b, s, h, 1)


class CachedAttention:
    """One layer's attention to its KV cache: the `attend` argument of `model.layer`, in place of `over_context`.

    cache      a LatentCache or a GroupedCache. The call replaces it with the updated cache, which the caller then
               reads. Use each instance for one layer and one call
    reach_bs   the last position to which a token attends; None: its own
    bias_bhsS  position biases, as in `attend_to_slots`
    """

    def __init__(self, cache, positions_bs, reach_bs=None, bias_bhsS=None):
        self.cache, self.positions_bs, self.bias_bhsS = cache, positions_bs, bias_bhsS
        self.reach_bs = positions_bs if reach_bs is None else reach_bs

    @jax.named_scope("attend")
    def __call__(self, c: ModelAtWork, q, parts, keys_values, segments_1n, absorbed=None, sinks_h=None, is_full=False):
        """Write the new tokens into the cache, and attend to it. Arguments and result as for `over_context`.

        absorbed  for latents, two functions: one maps queries to latents, one maps attended latents to values; None:
                  the cache holds keys and values
        """
        *queries, k_new, v_new = gather_tokens((*jax.tree.leaves(q), *parts), *self.positions_bs.shape)
        S, window, slots_bs = jax.tree.leaves(self.cache)[0].shape[-2], parse_window(c.window).size, self.positions_bs
        if window:
            slots_bs = jnp.where(slots_bs == NOWHERE, NOWHERE, slots_bs % (S * axis_size(CONTEXT)))
        pairs = zip(self.cache, (k_new, v_new), strict=True)
        self.cache = type(self.cache)(*(write_entries(*pair, slots_bs) for pair in pairs))
        k, v = entries = [dequantize(x, queries[0].dtype) for x in self.cache]
        absorb, value_of = absorbed or (lambda q_bshK: q_bshK * q_bshK.shape[-1] ** -0.5, lambda o_bshU: o_bshU)
        if absorbed:
            k, v = jnp.concatenate(entries, axis=-1), entries[0]
        seen_bsS = seen_slots(self.reach_bs, S, window, is_full)
        cap = parse_softmax(c.softmax).scores_cap
        o_bshX, log_sum_bsh1 = attend_to_slots(absorb(*queries), k, v, seen_bsS, self.bias_bhsS, cap)
        return merge_softmaxes(value_of(o_bshX), log_sum_bsh1, sinks_h)


# Tokens of all sequences in one row -----------------------------------------------------------------------------------


def as_row(x_bsX):
    """Reshape all tokens to one row [1, n, ..], padded with zeros to a multiple of CONTEXT * TENSOR devices."""
    row = x_bsX.reshape(1, -1, *x_bsX.shape[2:])
    return jnp.pad(row, ((0, 0), (0, -row.shape[1] % axis_size((CONTEXT, TENSOR))), *[(0, 0)] * (row.ndim - 2)))


def gather_tokens(arrays_1n, b: int, s: int):
    """Gather the tokens of all CONTEXT devices by sequence and position. Shapes: [1, n, ..] -> [b, s, ..].

    Sends over CONTEXT, on c devices: (c - 1)/c of the gathered arrays, in one collective.
    """
    rows = arrays_1n
    if axis_size(CONTEXT) > 1:
        joined, apart = concatenate_features([x.reshape(*x.shape[:2], -1) for x in arrays_1n])
        rows = apart(all_gather(joined, CONTEXT, dim=1))
    return [row[:, : b * s].reshape(b, s, *x.shape[2:]) for row, x in zip(rows, arrays_1n, strict=True)]


def merge_softmaxes(o_bshU, log_sum_bsh1, sinks_h=None):
    """Combine the softmaxes of all CONTEXT devices, for this device's tokens, and then add the sinks, if any.
    Shapes: [b, s, ..] -> [1, n, h, U].

    Sends over CONTEXT, on c devices: (c - 1)/c of both arrays, in float32, in one collective.
    """
    if axis_size(CONTEXT) == 1:
        return as_row(add_sinks(o_bshU, log_sum_bsh1[..., 0], sinks_h))
    row = as_row(jnp.concatenate([o_bshU.astype(jnp.float32), log_sum_bsh1], axis=-1))
    each_cnhX = all_to_all(row, CONTEXT, split_dim=1, join_dim=0)  # c: the CONTEXT device of the slots
    share_cnh1 = jax.nn.softmax(each_cnhX[..., -1:], axis=0)
    o_1nhU = jnp.sum(share_cnh1 * each_cnhX[..., :-1], axis=0, keepdims=True)
    if sinks_h is not None:
        o_1nhU = add_sinks(o_1nhU, jax.nn.logsumexp(each_cnhX[..., -1], axis=0, keepdims=True), sinks_h)
    return o_1nhU.astype(o_bshU.dtype)


# The model ------------------------------------------------------------------------------------------------------------


def decoding_config(c: ModelConfig) -> ModelAtWork:
    """Return the model's settings for generation: dropless experts, and all weights gathered before use. This includes
    embedding tables, because an int8 table has to be gathered as int8."""
    return ModelAtWork(**vars(c) | {"capacity_factor": 0.0, "work": dataclasses.replace(c.work, gather="step")})


def forward_shards(w: model.Transformer, cache, tokens_bs, positions_bs, wanted_bm, *, c: ModelAtWork):
    """Run new tokens through the model. Returns logits [b, m, v] after the wanted tokens of each row, and the cache.

    w          this stage's parameters, with layers in lists, see `unstack_shards`
    wanted_bm  indices of the m wanted tokens in each row
    Sends over STAGE: the activations to the next stage at every tick, and the logits to all stages.
    """
    prefix, blocks, cache = (jax.tree.map(lambda x: x[0], tree) for tree in (w.prefix, w.blocks, cache))
    ours = lambda x_bs: own_slice(as_row(x_bs), CONTEXT, dim=1)
    batch = {"tokens_BT": ours(tokens_bs), "positions_BT": ours(positions_bs)}
    batch |= dict.fromkeys(("segments_BT", "index_BT"), jnp.ones_like(batch["tokens_BT"]))  # one document, no dropout
    tokens, reach_bs = model.tokens_of(batch), positions_bs
    if c.prefix_lm and tokens_bs.shape[1] > 1:  # a prompt, in one piece: every token attends to all of it
        last_b1 = jnp.max(jnp.where(positions_bs == NOWHERE, 0, positions_bs), axis=1, keepdims=True)
        reach_bs = jnp.broadcast_to(last_b1, positions_bs.shape)

    def layer(w_and_cache, x_1tD, number):
        w, attend = w_and_cache[0], CachedAttention(w_and_cache[1], positions_bs, reach_bs)
        x_1tD, _ = model.layer(gather_weights(w, c), c, x_1tD, tokens, number, None, attend)
        return x_1tD, attend.cache

    def with_caches(layers, caches):
        is_layer = lambda x: isinstance(x, model.Layer)
        return jax.tree.map(lambda w, cache: (w, cache), layers, caches, is_leaf=is_layer)

    apply_prefix = lambda x_1tD, caches: scan_layers(layer, with_caches(prefix, caches), x_1tD, lambda i: i)
    apply_blocks = lambda x_1tD, caches: model.blocks(with_caches(blocks, caches), c, x_1tD, layer)

    x_1tD = vary(model.embed_batch(w, c, batch, None, gather_weights), AXES)
    x_1tD, cache["prefix"] = apply_on_stage(0, apply_prefix, x_1tD, cache["prefix"])
    x_1tD, cache["blocks"] = through_stages(apply_blocks, x_1tD, cache["blocks"])
    logits_bmv = logits_after(w, c, x_1tD, tokens_bs.shape, wanted_bm)
    return logits_bmv, jax.tree.map(lambda x: x[None], cache)


def apply_on_stage(number, apply, x, state):
    """Return apply(x, state) on one stage, and (x, state) on the others."""
    if axis_size(STAGE) == 1:
        return apply(x, state)
    return jax.lax.cond(axis_index(STAGE) == number, apply, lambda *same: same, x, state)


def through_stages(apply, x, state):
    """Run (x, state) -> apply(x, state) on one stage after the other. Returns the last stage's x, shifted to the first,
    and every stage's own state."""

    def tick(carry, number):
        x, state = apply_on_stage(number, apply, *carry)
        return (shift(x, STAGE), state), None

    if axis_size(STAGE) == 1:
        return apply(x, state)
    return jax.lax.scan(tick, (x, state), jnp.arange(axis_size(STAGE)))[0]


def logits_after(w: model.Transformer, c: ModelAtWork, x_1tD, shape: tuple[int, int], wanted_bm):
    """Return the logits [b, m, v] after the wanted tokens of each row, on all stages. The last stage's output, x_1tD,
    has been shifted to the first.

    shape  rows and tokens of each row, (b, s)
    Sends over STAGE and CONTEXT: the logits.
    """

    def logits(x_1tD):
        x_nD = model.final_norm(w, c, x_1tD, dim=1)[0]
        # Only the CONTEXT device with the wanted token computes its logits.
        at_bm = jnp.arange(shape[0])[:, None] * shape[1] + wanted_bm - axis_index(CONTEXT) * len(x_nD)
        mine_bm = (at_bm >= 0) & (at_bm < len(x_nD))
        x_bmD = x_nD[jnp.clip(at_bm, 0, len(x_nD) - 1)]
        return vary(jnp.where(mine_bm[:, :, None], model.logits(w, c, x_bmD, gather_weights), 0), AXES)

    first = axis_index(STAGE) == 0
    partial_bmv = jax.lax.cond(first, logits, lambda x_1tD: zeros_like_result(logits, x_1tD), x_1tD)
    return psum(partial_bmv, (STAGE, CONTEXT))


def apply_to_row(cache, at_1, function):
    """Apply function(cache) -> (result, cache) to row at_1 of this device's cache."""
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at_1[0], 1, ROWS_DIM), cache)
    result, row = function(row)
    put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, at_1[0], ROWS_DIM)
    return result, jax.tree.map(put, cache, row)


@functools.cache
def copy_rows(c: ModelConfig, mesh: Mesh) -> Callable:
    """Compile fn(cache, from_b, to_b) -> cache, which copies one row on each device along BATCH to another row, or to
    itself. The old cache is donated. No communication."""

    def shards(cache, from_1, to_1):
        row = lambda x: jax.lax.dynamic_slice_in_dim(x, from_1[0], 1, ROWS_DIM)
        put = lambda x: jax.lax.dynamic_update_slice_in_dim(x, row(x), to_1[0], ROWS_DIM)
        return jax.tree.map(put, cache)

    spec = cache_spec(c)
    local = jax.shard_map(shards, mesh=mesh, in_specs=(spec, P(BATCH), P(BATCH)), out_specs=spec)
    return ordered.jit(local, mesh, donate_argnums=0, out_shardings=NamedSharding(mesh, spec))


# An encoder-decoder ---------------------------------------------------------------------------------------------------
# A prompt is the inputs, then the token that starts the decoder. Prefill runs the encoder once, and stores the keys and
# values of its output for each decoder layer. Then the decoder reads its first token. CONTEXT has one device.


class InputAttention:
    """A decoder layer's cross-attention to the stored inputs: the `attend` of `encoder_decoder.cross_branch`."""

    def __init__(self, cache: GroupedCache, inputs_b, s: int):
        self.cache, self.inputs_bs = cache, jnp.broadcast_to(inputs_b[:, None], (len(inputs_b), s))

    def __call__(self, c: ModelAtWork, q_1nhK, *_):
        (q_bshK,) = gather_tokens((q_1nhK,), *self.inputs_bs.shape)
        k, v = (dequantize(x, q_bshK.dtype) for x in self.cache)
        seen_bsS = seen_slots(self.inputs_bs - 1, k.shape[-2])
        o_bshK, _ = attend_to_slots(q_bshK * q_bshK.shape[-1] ** -0.5, k, v, seen_bsS)
        return as_row(jnp.where(self.inputs_bs[:, :, None, None] > 0, o_bshK, 0))


def read_inputs(w: encoder_decoder.EncoderDecoder, cache, tokens_1s, inputs_1, c: ModelAtWork):
    """Run the encoder on one row of tokens, of which the first `inputs_1` are inputs, and store the result."""
    segments_1s = (jnp.arange(tokens_1s.shape[1])[None] < inputs_1[:, None]).astype(jnp.int32)
    names = encoder_decoder.ENCODER_BATCH
    row = dict(zip(names, map(as_row, (tokens_1s, jnp.zeros_like(tokens_1s), segments_1s)), strict=True))
    row["encoder_index_BS"] = jnp.zeros_like(row[names[0]])
    x_1tD = model.embed_batch(w, c, encoder_decoder.encoder_side(row), None, gather_weights)
    apply = lambda x_1tD, none: (vary(encoder_decoder.encode(w, c, x_1tD, row, None, gather_weights), AXES), none)
    x_1tD, _ = through_stages(apply, vary(x_1tD, AXES), ())
    x_1tD = psum(jnp.where(axis_index(STAGE) == 0, x_1tD, 0), STAGE)
    memory_1SD = encoder_decoder.memory(w, c, x_1tD)
    positions_1S = jnp.arange(memory_1SD.shape[1])[None]

    def store(number, entry: DecoderCache):
        layer = gather_weights(nth_layer(w.decoder.layers, number), c)
        pairs = zip(entry.inputs, encoder_decoder.cross_keys_values(layer, memory_1SD), strict=True)
        return entry._replace(inputs=GroupedCache(*(write_entries(old, new, positions_1S) for old, new in pairs)))

    inputs = jnp.broadcast_to(inputs_1[:, None, None], cache["inputs"].shape)
    return {"decoder": [*map(store, range(len(cache["decoder"])), cache["decoder"])], "inputs": inputs}


def nth_layer(stack, number: int):
    return jax.tree.map(lambda x: x[number], stack)


def decoder_shards(w: encoder_decoder.EncoderDecoder, cache, tokens_bs, positions_bs, wanted_bm, *, c, prefill: bool):
    """Run new tokens through an encoder-decoder; arguments and result as for `forward_shards`.

    prefill  True: tokens_bs is one prompt, whose last token, wanted_bm, is the decoder's first
    Positions count from the first input.
    """
    cache, c = jax.tree.map(lambda x: x[0], cache), dataclasses.replace(c, no_rope_every=1)
    if prefill:
        cache = vary(read_inputs(w, cache, tokens_bs, wanted_bm[:, 0], c), AXES)
        tokens_bs, positions_bs = (jnp.take_along_axis(x, wanted_bm, axis=1) for x in (tokens_bs, positions_bs))
        wanted_bm = jnp.zeros_like(wanted_bm)
    inputs_b = cache["inputs"][:, 0, 0]
    positions_bs = positions_bs - inputs_b[:, None]
    batch = {"tokens_BT": as_row(tokens_bs), "positions_BT": as_row(positions_bs)}
    batch |= dict.fromkeys(("segments_BT", "index_BT"), jnp.ones_like(batch["tokens_BT"]))
    tokens, slots = model.tokens_of(batch), jnp.arange(jax.tree.leaves(cache["decoder"][0].own)[0].shape[-2])
    bias = lambda positions_s: encoder_decoder.position_bias(w.decoder.bias_WH, positions_s, slots, False)
    bias_bhsS = jax.vmap(bias)(positions_bs)

    def apply(x_1tD, entries):
        found = []
        for number, entry in enumerate(entries):
            layer = gather_weights(nth_layer(w.decoder.layers, number), c)
            own = CachedAttention(entry.own, positions_bs, bias_bhsS=bias_bhsS)
            inputs = InputAttention(entry.inputs, inputs_b, tokens_bs.shape[1])
            x_1tD = encoder_decoder.decoder_layer(layer, c, x_1tD, tokens, 0, None, own, (), inputs)
            found.append(entry._replace(own=own.cache))
        return vary((x_1tD, found), AXES)

    x_1tD = vary(model.embed_batch(w, c, batch, None, gather_weights), AXES)
    x_1tD, entries = through_stages(apply, x_1tD, cache["decoder"])
    logits_bmv = logits_after(w, c, x_1tD, tokens_bs.shape, wanted_bm)
    return logits_bmv, jax.tree.map(lambda x: x[None], cache | {"decoder": entries})


# Unstacked layers -----------------------------------------------------------------------------------------------------


def map_layers(w: model.Transformer, c: ModelConfig, blocks: int, pick):
    """Return a Transformer whose prefix and blocks are lists of pick(stack, *place) for each stacked layer."""
    prefix = [pick(w.prefix, j) for j in range(c.dense_prefix)]
    dense = lambda i: [pick(w.blocks.dense, i, j) for j in range(c.layers_per_block - bool(c.n_experts))]
    moe = lambda i: pick(w.blocks.moe, i) if c.n_experts else None
    return w.replace(prefix=prefix, blocks=[model.Block(dense=dense(i), moe=moe(i)) for i in range(blocks)])


def is_unstacked(params) -> bool:
    return not isinstance(getattr(params, "blocks", None), model.Block)


def split_layers(w: model.Transformer, c: ModelConfig):
    """Split stacked parameters into separate layers, each with a first dim that counts stages."""
    pick = lambda stack, *at: jax.tree.map(lambda x: x[at][None], stack)
    return map_layers(w, c, len(jax.tree.leaves(w.blocks)[0]), pick)


def unstack_shards(w: model.Transformer, c: ModelConfig):
    """Split the local shards into separate layers, and gather them over CONTEXT."""
    if is_unstacked(w):
        return w
    w = split_layers(w, c)
    is_layer = lambda x: isinstance(x, model.Layer)
    layers = jax.tree.map(gather_over_context, (w.prefix, w.blocks), is_leaf=is_layer)
    tables = gather_over_context(w.replace(prefix=None, blocks=None))
    return tables.replace(prefix=layers[0], blocks=layers[1])


def unstacked_specs(c: ModelConfig, params, mesh: Mesh):
    """Return the PartitionSpecs of parameters, stacked or not, with or without `quantize`. Separate layers are not
    sharded over CONTEXT."""
    if not isinstance(params.blocks, list):
        return specs(c, params)
    first = params.blocks[0]
    block = model.Block(dense=first.dense[0] if first.dense else None, moe=first.moe)
    one_of_each = params.replace(prefix=params.prefix[0] if params.prefix else None, blocks=block)
    is_spec = lambda x: isinstance(x, P)
    stage_and_own = lambda spec, n: P(*spec[:1], *spec[n:])  # drop the n dims that count layers
    pick = lambda stack, *at: jax.tree.map(lambda spec: stage_and_own(spec, len(at)), stack, is_leaf=is_spec)
    layers = map_layers(specs(c, one_of_each), c, len(params.blocks), pick)
    if mesh.shape[CONTEXT] == 1:
        return layers
    return jax.tree.map(lambda spec: drop_axis(spec, CONTEXT), layers, is_leaf=is_spec)


def unstack(params, c: ModelConfig, mesh: Mesh):
    """Split stacked parameters into separate arrays per layer, and gather them over CONTEXT.

    This makes `cached_forward` faster, because otherwise it does both for every token. The stacks are not freed.
    The parameters of an encoder-decoder stay as they are.

    Sends over CONTEXT, on c devices: (c - 1)/c of the weights.
    """
    if is_unstacked(params):
        return params
    shape = jax.eval_shape(lambda w: split_layers(w, c), params)
    blocks = shape.replace(blocks=shape.blocks[: c.n_blocks // mesh.shape[STAGE]])
    out = unstacked_specs(c, blocks, mesh)
    local = jax.shard_map(lambda w: unstack_shards(w, c), mesh=mesh, in_specs=(specs(c, params),), out_specs=out)
    return ordered.jit(local, mesh)(params)


# Compiled -------------------------------------------------------------------------------------------------------------


def cached_forward(c: ModelConfig, mesh: Mesh, *, rows: bool = False) -> Callable:
    """Compile fn(params, cache, tokens_bs, positions_bs, last_b) -> (logits [b, V], cache), once per shape.

    With a prompt's tokens it is a prefill; with one token per sequence it is a decode step.

    params  stacked, as in training; or, which is faster, as returned by `unstack` or `quantize`
    last_b  index of the token in each row after which logits are wanted; with [b, m] the logits are [b, m, V]
    rows    fn also takes at_b, the cache row on each device along BATCH that its tokens belong to; each device then
            has one row of tokens
    The old cache is donated, so do not use it again. Raises: UserError if a parameter does not split over the mesh.
    """
    sharding.check_divides(declare(c), mesh)
    work = decoding_config(c)
    has_encoder = architecture(c).module is encoder_decoder
    forward_of = functools.partial(decoder_shards, prefill=rows) if has_encoder else forward_shards

    def shards(w, cache, tokens_bs, positions_bs, wanted_bm, *at_1):
        run = lambda cache: forward_of(unstack_shards(w, c), cache, tokens_bs, positions_bs, wanted_bm, c=work)
        return apply_to_row(cache, *at_1, run) if rows else run(cache)

    def forward(params, cache, tokens_bs, positions_bs, last_b, *at_b):
        local = jax.shard_map(
            shards, mesh=mesh, out_specs=(P(BATCH, None, TENSOR), cache_spec(c)),
            in_specs=(unstacked_specs(c, params, mesh), cache_spec(c), *[P(BATCH)] * (4 if rows else 3)))  # fmt: skip
        wanted_bm = last_b[:, None] if last_b.ndim == 1 else last_b
        logits_bmV, cache = local(params, cache, tokens_bs, positions_bs, wanted_bm, *at_b)
        return (logits_bmV[:, 0] if last_b.ndim == 1 else logits_bmV), cache

    # Write the sharding exactly as in `empty_cache`: an equivalent sharding would recompile the next call.
    return ordered.jit(forward, mesh, donate_argnums=1, out_shardings=(None, NamedSharding(mesh, cache_spec(c))))
