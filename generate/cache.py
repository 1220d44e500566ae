"""The model, a few tokens at a time: what attention needs of earlier tokens is kept.

Latent attention keeps its latents and rotary keys only; the projections from the latent to keys and values are absorbed
into query and output (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Prefill and decode are one function, `extend`: s
new tokens attend to the S slots of the cache. Mixtures of experts are dropless here, whatever capacity_factor they were
trained with.

It runs on any mesh, parameters where training left them: sequences are split over BATCH, heads and vocabulary over
TENSOR as in training, the cache's slots over CONTEXT, layers and their cache over STAGE, where one stage works after
the other. Between blocks the new tokens of all sequences, n = b * s, are split over CONTEXT and TENSOR.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import model
import sharding
from config import ModelConfig
from generate.quantised import Quantised, gathered, kept, specs, used
from kernels.blocks import HIDDEN
from pipeline.step import nothing
from sharding import (
    AXES,
    BATCH,
    CONTEXT,
    STAGE,
    TENSOR,
    all_gather,
    axis_index,
    axis_size,
    own_slice,
    psum,
    reduce_scatter,
    shift,
    vary,
)
from xla import ordered

NOWHERE = 2**30  # a position past the last slot of any cache
BETWEEN = (CONTEXT, TENSOR)  # neighbours hold different tokens between blocks, of the same sequences
ROWS_DIM = 1  # of every array of a cache: its sequences

# The cache ------------------------------------------------------------------------------------------------------------


@struct.dataclass
class LatentCache:
    """What latent attention keeps of each position: C + R numbers, whatever the number of heads."""

    latent_bSC: jax.Array
    rotary_bSR: jax.Array


@struct.dataclass
class GroupedCache:
    """What grouped-query attention keeps of each position: a key and a value for each of the G heads.

    Slots of a head lie side by side, as a product with one query wants them.
    """

    key_bgSK: jax.Array
    value_bgSK: jax.Array


def cache_spec(c: ModelConfig):
    """How each array of the cache lies on the mesh: slots split over CONTEXT, key and value heads over TENSOR, where
    latents are the same on neighbours. The first dim counts the stages: each has layers of its own."""
    return P(STAGE, BATCH, *((TENSOR,) if c.attention == "gqa" else ()), CONTEXT)


def cache_shapes(c: ModelConfig, mesh: Mesh, b: int, slots: int, form: str = "compute"):
    """The cache of b sequences, as ShapeDtypeStructs, a part for each layer, as `unstack` has them: {"prefix": [..],
    "blocks": [{"dense": [..], "moe": ..}, ..]}.

    slots  positions kept of a sequence, a multiple of the devices along CONTEXT
    form   of its numbers: "compute", the compute dtype; "bfloat16"; or "int8", see `quantised.py`
    Every stage has a prefix, of which only the first stage's is used.
    """
    stages, place = mesh.shape[STAGE], NamedSharding(mesh, cache_spec(c))

    def array(*shape):
        of = lambda dtype, *shape: jax.ShapeDtypeStruct((stages, b, *shape), dtype, sharding=place)
        if form == "int8":
            return Quantised(of("int8", *shape), of("float32", *shape[:-1], 1))
        return of(c.precision.compute if form == "compute" else form, *shape)

    def layer():
        if c.attention == "mla":
            return LatentCache(array(slots, c.d_kv_latent), array(slots, c.d_rope))
        return GroupedCache(*[array(c.n_kv_heads, slots, c.d_head)] * 2)

    is_moe = bool(c.n_experts)
    block = lambda: {"dense": [layer() for _ in range(c.layers_per_block - is_moe)], "moe": layer() if is_moe else None}
    blocks = [block() for _ in range(c.n_blocks // stages)]
    return {"prefix": [layer() for _ in range(c.dense_prefix)], "blocks": blocks}


def empty_cache(c: ModelConfig, mesh: Mesh, b: int, slots: int, form: str = "compute"):
    """Zeros of `cache_shapes`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), cache_shapes(c, mesh, b, slots, form))


def first_slot(S: int):
    """The position that this device's first slot holds: CONTEXT neighbours hold runs of S, in order."""
    return axis_index(CONTEXT) * S


def write(cache, new_bsX, positions_bs):
    """Put what new tokens leave into the slots of their positions; what has no slot here is not written."""

    def put(cache_bgSX, new_bsgX):
        at_bs = positions_bs - first_slot(cache_bgSX.shape[-2])
        at_bs = jnp.where(at_bs < 0, NOWHERE, at_bs)  # below 0 it would count from the end
        heads = (slice(None),) * (cache_bgSX.ndim - 3)  # latents have none
        return cache_bgSX.at[jnp.arange(len(at_bs))[:, None], *heads, at_bs].set(new_bsgX, mode="drop")

    return jax.tree.map(put, cache, kept(new_bsX, cache))


def slot_weights(scores_bhsS, positions_bs):
    """Softmax over the slots of all CONTEXT neighbours, of those up to a token's own position; slot i holds position i.

    Each neighbour then mixes the values of its slots, and all that follows is linear: the partial sums are added where
    those over TENSOR are. Sends over CONTEXT: a maximum and a sum for each query and head.
    """
    S = scores_bhsS.shape[-1]
    seen_b1sS = (positions_bs[:, :, None] >= first_slot(S) + jnp.arange(S)[None, None, :])[:, None]
    scores_bhsS = jnp.where(seen_b1sS, scores_bhsS.astype(jnp.float32), HIDDEN)
    top_bhs1 = jax.lax.pmax(jnp.max(scores_bhsS, axis=-1, keepdims=True), CONTEXT)
    weight_bhsS = jnp.where(seen_b1sS, jnp.exp(scores_bhsS - top_bhs1), 0)
    return weight_bhsS / psum(jnp.sum(weight_bhsS, axis=-1, keepdims=True), CONTEXT)


def cached_latent_attention(w: model.LatentAttention, c: ModelConfig, x_bsD, positions_bs, cache, rotary_on):
    """Attend from new tokens to the cache. Returns a partial sum over BETWEEN, and the cache with the new tokens.

    A score is q_K . (w_key latent_C) = (w_key^T q_K) . latent_C: with the query moved to the latent's width, keys are
    never made. The same for values, after the mixing.
    """
    q_bshK, q_bshR = model.latent_queries(w, c, model.query_latent(w, c, x_bsD), positions_bs, rotary_on)
    latent_bsC, rotary_bsR = model.latents(w, c, x_bsD, positions_bs, rotary_on)
    cache = LatentCache(write(cache.latent_bSC, latent_bsC, positions_bs),
                        write(cache.rotary_bSR, rotary_bsR, positions_bs))  # fmt: skip
    q_bshC = jnp.einsum("bshK,ChK->bshC", q_bshK, w.w_key_CHK)
    scale = (c.d_head + c.d_rope) ** -0.5
    q_bshX = jnp.concatenate([q_bshC, q_bshR], axis=-1) * scale
    latent_bSC, rotary_bSR = (used(kept, x_bsD.dtype) for kept in (cache.latent_bSC, cache.rotary_bSR))
    k_bSX = jnp.concatenate([latent_bSC, rotary_bSR], axis=-1)
    weight_bhsS = slot_weights(jnp.einsum("bshX,bSX->bhsS", q_bshX, k_bSX), positions_bs).astype(k_bSX.dtype)
    o_bshC = jnp.einsum("bhsS,bSC->bshC", weight_bhsS, latent_bSC)
    o_bshU = jnp.einsum("bshC,ChU->bshU", o_bshC, w.w_value_CHU)
    return jnp.einsum("bshU,hUD->bsD", o_bshU, w.w_out_HUD), cache


def cached_grouped_attention(w: model.GroupedAttention, c: ModelConfig, x_bsD, positions_bs, cache, rotary_on):
    """Attend from new tokens to the cache. Returns a partial sum over BETWEEN, and the cache with the new tokens.

    Each of g key and value heads serves h / g neighbours.
    """
    q_bshK, k_bsgK, v_bsgK = model.queries_keys_values(w, c, x_bsD, positions_bs, rotary_on)
    cache = GroupedCache(write(cache.key_bgSK, k_bsgK, positions_bs), write(cache.value_bgSK, v_bsgK, positions_bs))
    (b, s, h, K), g = q_bshK.shape, k_bsgK.shape[2]
    q_bsgrK = (q_bshK * K**-0.5).reshape(b, s, g, h // g, K)
    scores_bgrsS = jnp.einsum("bsgrK,bgSK->bgrsS", q_bsgrK, used(cache.key_bgSK, x_bsD.dtype))
    weight_bhsS = slot_weights(scores_bgrsS.reshape(b, h, s, -1), positions_bs).astype(x_bsD.dtype)
    weight_bgrsS = weight_bhsS.reshape(scores_bgrsS.shape)
    v_bgSK = used(cache.value_bgSK, x_bsD.dtype)
    o_bshK = jnp.einsum("bgrsS,bgSK->bsgrK", weight_bgrsS, v_bgSK).reshape(b, s, h, K)
    return jnp.einsum("bshK,hKD->bsD", o_bshK, w.w_out_HKD), cache


# The model ------------------------------------------------------------------------------------------------------------


def padded(x_1nX):
    """Zeros behind, so that the tokens split over BETWEEN."""
    return jnp.pad(x_1nX, ((0, 0), (0, -x_1nX.shape[1] % axis_size(BETWEEN)), *[(0, 0)] * (x_1nX.ndim - 2)))


def cached_layer(w: model.Layer, c: ModelConfig, x_1tD, positions_bs, cache, number):
    """One layer, as `model.layer`, attending to the cache. Returns [1, t, D] and the cache with the new tokens."""
    w, (b, s) = gathered(w, c), positions_bs.shape
    h_1tD = model.norm(x_1tD, w.norm_attention_D, c.norm_eps, w.norm_attention_bias_D)
    h_1nD = all_gather(h_1tD, BETWEEN, dim=1, to="invarying")  # so that the cached latents are known to be the same
    h_bsD = h_1nD[:, : b * s].reshape(b, s, -1)
    attention = cached_latent_attention if c.attention == "mla" else cached_grouped_attention
    partial_bsD, cache = attention(w.attention, c, h_bsD, positions_bs, cache, model.has_rotary(c, number))
    x_1tD += reduce_scatter(padded(partial_bsD.reshape(1, b * s, -1)), BETWEEN, dim=1)
    if c.parallel_residual:
        h_1sD = all_gather(h_1tD, TENSOR, dim=1)
        return x_1tD + reduce_scatter(model.feed_forward(w.feed_forward, c, h_1sD), TENSOR, dim=1), cache
    update_1tD, _ = model.feed_forward_branch(w, c, x_1tD, jnp.ones(x_1tD.shape[:2]))
    return x_1tD + update_1tD, cache


def in_turn(layers, c: ModelConfig, x_1tD, positions_bs, caches, first_number):
    """Layers in order, each with its part of the cache; the first has the number that is given."""
    own = lambda tree: jax.tree.map(lambda x: x[0], tree)  # without the dim of stages
    updated = []
    for i, (w, cache) in enumerate(zip(layers, caches, strict=True)):
        x_1tD, cache = cached_layer(own(w), c, x_1tD, positions_bs, own(cache), first_number + i)
        updated.append(jax.tree.map(lambda x: x[None], cache))
    return x_1tD, updated


def cached_blocks(blocks: list[model.Block], c: ModelConfig, x_1tD, positions_bs, caches):
    """This stage's blocks in order, as `model.blocks`, each with its part of the cache."""
    first, updated = c.dense_prefix + axis_index(STAGE) * len(blocks) * c.layers_per_block, []
    for block, cache in zip(blocks, caches, strict=True):
        x_1tD, dense = in_turn(block.dense, c, x_1tD, positions_bs, cache["dense"], first)
        if block.moe is not None:
            number = first + len(block.dense)
            x_1tD, (moe,) = in_turn([block.moe], c, x_1tD, positions_bs, [cache["moe"]], number)
        updated.append({"dense": dense, "moe": None if block.moe is None else moe})
        first += c.layers_per_block
    return x_1tD, updated


def extend_shards(w: model.Transformer, cache, tokens_bs, positions_bs, wanted_bm, *, c: ModelConfig):
    """Run new tokens through the model. Returns logits [b, m, v] after the tokens wanted of each row, and the cache.

    Sends over STAGE: the activations, to the next stage at every tick; and the logits, to all.
    """
    stage, stages, b = axis_index(STAGE), axis_size(STAGE), len(tokens_bs)

    def when(mine, run, *args):
        return run(*args) if stages == 1 else jax.lax.cond(mine, run, lambda *same: same, *args)

    ours_1s = own_slice(padded(tokens_bs.reshape(1, -1)), CONTEXT, dim=1)
    x_1tD = vary(model.embed(*gathered(w, c, "embedding_VD"), ours_1s), AXES)
    prefix = lambda x_1tD, cache: in_turn(w.prefix, c, x_1tD, positions_bs, cache, 0)
    x_1tD, cache["prefix"] = when(stage == 0, prefix, x_1tD, cache["prefix"])

    def tick(carry, at_work):
        blocks = lambda x_1tD, cache: vary(cached_blocks(w.blocks, c, x_1tD, positions_bs, cache), STAGE)
        x_1tD, cache = when(stage == at_work, blocks, *carry)
        return (shift(x_1tD, STAGE), cache), None

    (x_1tD, cache["blocks"]), _ = jax.lax.scan(tick, (x_1tD, cache["blocks"]), jnp.arange(stages))

    def logits(x_1tD):
        x_nD = model.leave(w, c, x_1tD, dim=1)[0]  # a CONTEXT neighbour's tokens: who has the one wanted, works
        at_bm = jnp.arange(b)[:, None] * tokens_bs.shape[1] + wanted_bm - axis_index(CONTEXT) * len(x_nD)
        mine_bm = (at_bm >= 0) & (at_bm < len(x_nD))
        x_bmD = x_nD[jnp.clip(at_bm, 0, len(x_nD) - 1)]
        return vary(jnp.where(mine_bm[:, :, None], model.logits(w, c, x_bmD, gathered), 0), AXES)

    # The last stage's output was shifted to the first.
    partial_bmv = jax.lax.cond(stage == 0, logits, lambda x_1tD: nothing(logits, x_1tD), x_1tD)
    return psum(partial_bmv, (STAGE, CONTEXT)), cache


def row_of(cache, at_1, then):
    """Let `then`, which takes and returns a cache, work on one row of this device's: the row of number at_1."""
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at_1[0], 1, ROWS_DIM), cache)
    result, row = then(row)
    put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, at_1[0], ROWS_DIM)
    return result, jax.tree.map(put, cache, row)


@functools.cache
def copier(c: ModelConfig, mesh: Mesh) -> Callable:
    """Compile fn(cache, from_b, to_b) -> the cache in which each device along BATCH has copied a row of its own onto
    another, or onto itself. The old cache's memory is reused. Sends nothing."""

    def shards(cache, from_1, to_1):
        row = lambda x: jax.lax.dynamic_slice_in_dim(x, from_1[0], 1, ROWS_DIM)
        put = lambda x: jax.lax.dynamic_update_slice_in_dim(x, row(x), to_1[0], ROWS_DIM)
        return jax.tree.map(put, cache)

    spec = cache_spec(c)
    local = jax.shard_map(shards, mesh=mesh, in_specs=(spec, P(BATCH), P(BATCH)), out_specs=spec)
    return ordered.jit(local, mesh, donate_argnums=0, out_shardings=NamedSharding(mesh, spec))


# Layers on their own --------------------------------------------------------------------------------------------------


def of_each_layer(w: model.Transformer, c: ModelConfig, blocks: int, pick):
    """A Transformer whose prefix and blocks are lists of what pick(stack, *place) makes of each stacked layer."""
    prefix = [pick(w.prefix, j) for j in range(c.dense_prefix)]
    dense = lambda i: [pick(w.blocks.dense, i, j) for j in range(c.layers_per_block - bool(c.n_experts))]
    moe = lambda i: pick(w.blocks.moe, i) if c.n_experts else None
    return w.replace(prefix=prefix, blocks=[model.Block(dense=dense(i), moe=moe(i)) for i in range(blocks)])


def is_unstacked(params) -> bool:
    return not isinstance(getattr(params, "blocks", None), model.Block)


def unstacked(w: model.Transformer, c: ModelConfig):
    """On local shards: the layers of this stage each on its own, with a first dim that counts stages."""
    if is_unstacked(w):
        return w
    pick = lambda stack, *at: jax.tree.map(lambda x: x[at][None], stack)
    return of_each_layer(w, c, len(jax.tree.leaves(w.blocks)[0]), pick)


def unstacked_specs(c: ModelConfig, params, mesh: Mesh):
    """How parameters lie on the mesh, stacked or not, some of them perhaps `quantised`."""
    if not is_unstacked(params):
        return specs(c, params)
    first = params.blocks[0]
    block = model.Block(dense=first.dense[0] if first.dense else None, moe=first.moe)
    one_of_each = params.replace(prefix=params.prefix[0] if params.prefix else None, blocks=block)
    is_spec = lambda x: isinstance(x, P)
    stage_and_own = lambda spec, n: P(*spec[:1], *spec[n:])  # of n letters of layers
    pick = lambda stack, *at: jax.tree.map(lambda spec: stage_and_own(spec, len(at)), stack, is_leaf=is_spec)
    return of_each_layer(specs(c, one_of_each), c, len(params.blocks), pick)


def unstack(params, c: ModelConfig, mesh: Mesh):
    """Parameters as `extend` is quickest with: each layer's arrays on their own, not parts of stacks, which would be
    copied out, layer after layer, for every token. Sends nothing; the stacks stay."""
    if is_unstacked(params):
        return params
    shape = jax.eval_shape(lambda w: unstacked(w, c), params)
    blocks = shape.replace(blocks=shape.blocks[: c.n_blocks // mesh.shape[STAGE]])
    out = unstacked_specs(c, blocks, mesh)
    local = jax.shard_map(lambda w: unstacked(w, c), mesh=mesh, in_specs=(specs(c, params),), out_specs=out)
    return jax.jit(local)(params)


# Compiled -------------------------------------------------------------------------------------------------------------


def extend(c: ModelConfig, mesh: Mesh, *, rows: bool = False) -> Callable:
    """Compile fn(params, cache, tokens_bs, positions_bs, last_b) -> (logits [b, V], cache), once per shape.

    params  as trained, or better, for the speed, as `unstack` or `quantised` returns them
    last_b  the token of each row after which logits are wanted; [b, m], several: then logits are [b, m, V]
    rows    fn takes at_b too: of the rows of the cache that a device along BATCH holds, the one that its tokens extend.
            There is one row of tokens for each such device
    The old cache's memory is reused: do not touch it again. Raises: UserError if a parameter does not split over the
    mesh.
    """
    sharding.check_divides(model.declare(c), mesh)

    def shards(w, cache, tokens_bs, positions_bs, wanted_bm, *at_1):
        run = lambda cache: extend_shards(unstacked(w, c), cache, tokens_bs, positions_bs, wanted_bm, c=c)
        return row_of(cache, *at_1, run) if rows else run(cache)

    def extended(params, cache, tokens_bs, positions_bs, last_b, *at_b):
        local = jax.shard_map(
            shards, mesh=mesh, out_specs=(P(BATCH, None, TENSOR), cache_spec(c)),
            in_specs=(unstacked_specs(c, params, mesh), cache_spec(c), *[P(BATCH)] * (4 if rows else 3)))  # fmt: skip
        wanted_bm = last_b[:, None] if last_b.ndim == 1 else last_b
        logits_bmV, cache = local(params, cache, tokens_bs, positions_bs, wanted_bm, *at_b)
        return (logits_bmV[:, 0] if last_b.ndim == 1 else logits_bmV), cache

    # As `empty_cache` says it lies: in other words for the same, the next call would be compiled again.
    return ordered.jit(extended, mesh, donate_argnums=1, out_shardings=(None, NamedSharding(mesh, cache_spec(c))))
