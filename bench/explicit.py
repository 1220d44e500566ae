"""The dense model of `model.py` as a program of whole arrays with explicit sharding: the compiler adds the collectives.

The weights, batch, loss and dtypes are those of `model.py` with `work.remat=full`. Layers gather their weights over
FSDP. Between layers, positions are sharded over TENSOR. Shape letters are those of `model.py`, all unsharded.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, reshard

import model
import optimizer
from compile import options
from config import Config, ModelConfig
from kernels.attention import partial_attention
from plan.trace import compiled
from sharding import BATCH, STAGE, TENSOR, drop_axis, map_fsdp_sharded
from utils import UserError

CHUNKS = 8  # of positions: the loss computes the logits of one chunk at a time
GATHERED, RESIDUAL = P(BATCH, None, None), P(BATCH, TENSOR, None)  # activations [B, T, D] in a layer, between layers
HEADS, WIDE = P(BATCH, None, TENSOR, None), P(BATCH, None, TENSOR)


def check(cfg: Config) -> None:
    """Raises: UserError for a model or mesh that this program does not have."""
    c, sizes = cfg.model, cfg.mesh.sizes
    other = c.attention != "gqa" or c.n_experts or c.norm != "rms" or c.z_loss or c.label_smoothing
    if other or c.parallel_residual or c.bias or c.dropout or not c.tie_embeddings:
        raise UserError("the program with explicit sharding is a dense model like dense_124m: grouped-query attention, "
                        "RMSNorm, tied embeddings, no experts, biases, dropout or auxiliary losses")  # fmt: skip
    if sizes["stage"] * sizes["context"] * sizes["expert"] > 1:
        raise UserError(f"mesh {cfg.mesh}: the program with explicit sharding has the axes data, fsdp and tensor only")


def gather(w, c: ModelConfig):
    """Cast matrices to the compute dtype, and gather them over FSDP."""

    def one(x, dim, axes, exact):
        spec = [*jax.typeof(x).sharding.spec]
        spec[dim] = None
        return reshard(x.astype(c.compute_dtype), P(*spec))

    return map_fsdp_sharded(one, w)


def norm(x_BTD, gain_D, c: ModelConfig):
    """Apply RMSNorm. `model.norm` broadcasts the gain to x's shape, which here has an unsharded type. So would its
    gradient, and the backward pass would all-gather the activations of the whole batch."""
    x32_BTD = x_BTD.astype(jnp.float32)
    scale_BT1 = jax.lax.rsqrt(jnp.mean(x32_BTD * x32_BTD, axis=-1, keepdims=True) + c.norm_eps)
    return (x32_BTD * scale_BT1 * gain_D[None, None]).astype(x_BTD.dtype)


def attend(q_BTHK, k_BTGK, v_BTGK, segments_BT):
    """Call the trainer's kernel on local sequences and heads. It has no collectives, and jit cannot partition it."""
    local = lambda q, k, v, segments: partial_attention(q, k, v, segments, segments)[0]
    return jax.shard_map(local, in_specs=(HEADS, HEADS, HEADS, P(BATCH)), out_specs=HEADS)(
        q_BTHK, k_BTGK, v_BTGK, segments_BT
    )


def layer(w: model.Layer, c: ModelConfig, x_BTD, batch, number):
    w = gather(w, c)
    h_BTD = reshard(norm(x_BTD, w.norm_attention_D, c), GATHERED)
    parts = model.queries_keys_values(w.attention, c, h_BTD, batch["positions_BT"], model.rotary_frequencies(c, number))
    o_BTHK = attend(*parts, batch["segments_BT"])
    x_BTD += jnp.einsum("bthk,hkd->btd", o_BTHK, w.attention.w_out_HKD, out_sharding=RESIDUAL)
    h_BTD = reshard(norm(x_BTD, w.norm_feed_forward_D, c), GATHERED)
    hidden_BTF = model.hidden(w.feed_forward, c, h_BTD)
    return x_BTD + jnp.einsum("btf,fd->btd", hidden_BTF, w.feed_forward.w_down_FD, out_sharding=RESIDUAL)


def cross_entropy(table_VD, x_BTD, targets_BT, weights_BT):
    """Return the weighted sum of -log softmax(logits)[target] over the tokens."""
    logits_BTV = jnp.einsum("btd,vd->btv", x_BTD, table_VD.astype(x_BTD.dtype), out_sharding=WIDE).astype(jnp.float32)
    is_target = jnp.arange(len(table_VD))[None, None] == targets_BT[..., None]
    target_BT = jnp.sum(jnp.where(is_target, logits_BTV, 0), axis=-1)
    return jnp.sum(weights_BT * (jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT))


def loss(w: model.Transformer, c: ModelConfig, batch):
    """Return nats per target token, like `model.loss`."""
    batch = {name: reshard(x, P(BATCH, None)) for name, x in batch.items()}
    table_VD = reshard(w.embedding_VD.astype(c.compute_dtype), P(TENSOR, None))
    x_BTD = reshard(table_VD, P(None, None)).at[batch["tokens_BT"]].get(out_sharding=RESIDUAL)
    stack, numbers = jax.tree.map(lambda x: x[:, 0], w.blocks.dense), jnp.arange(c.n_layers)
    one = jax.checkpoint(lambda x_BTD, w_and_number: (layer(w_and_number[0], c, x_BTD, batch, w_and_number[1]), None))
    x_BTD, _ = jax.lax.scan(one, x_BTD, (stack, numbers))
    x_BTD = reshard(norm(x_BTD, w.norm_D, c), GATHERED)
    # In float32 outside the loop, so that the gradients of the chunks add up in float32.
    table32_VD = table_VD.astype(jnp.float32)
    part = jax.checkpoint(lambda total, chunk: (total + cross_entropy(table32_VD, *chunk), None))
    cut = lambda x: jnp.moveaxis(x.reshape(len(x), CHUNKS, -1, *x.shape[2:]), 1, 0)
    chunks = tuple(map(cut, (x_BTD, batch["targets_BT"], batch["weights_BT"])))
    return jax.lax.scan(part, jnp.float32(0), chunks)[0] / jnp.sum(batch["weights_BT"])


# The training step ----------------------------------------------------------------------------------------------------


def explicit_mesh(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)


def shapes(cfg: Config, mesh: Mesh):
    """Return the shapes of `compiled.shapes` on a mesh with explicit axes.

    Without STAGE, which has size 1, because JAX refuses a loop over a dim whose type is sharded."""
    place = lambda x: NamedSharding(mesh, drop_axis(x.sharding.spec, STAGE))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), compiled.shapes(cfg, mesh))


def loss_and_grads(cfg: Config):
    """Return fn(params, batch) -> (loss, grads), to run under `jax.set_mesh(explicit_mesh(..))`."""
    return jax.value_and_grad(lambda w, batch: loss(w, cfg.model, batch))


def train_step(cfg: Config, mesh: Mesh):
    """Return fn(state, batch) -> (state, loss) under jit: the optimizer is that of `optimizer.train_step`."""
    chain = optimizer.make_optimizer(cfg)

    def step(state: optimizer.TrainState, batch):
        value, grads = loss_and_grads(cfg)(state.params, batch)
        changes, moments = chain.update(grads, state.optimizer, state.params)
        return state.replace(params=optax.apply_updates(state.params, changes), optimizer=moments), value

    return jax.jit(step, donate_argnums=0, compiler_options=options.compiler_options(mesh))
