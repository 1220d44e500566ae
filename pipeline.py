"""The compiled functions: the one `shard_map` around the model, the stages inside it, and what differentiates it.

A pipeline schedule is a table; an executor follows it. GPipe's has forward passes only: the backward pass is what
autodiff makes of the loop over ticks, the same table from the end to the start.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import model
import sharding
from sharding import (
    BATCH,
    BATCH_SPEC,
    CONTEXT,
    STAGE,
    TENSOR,
    all_gather,
    in_order,
    own_chunks,
    own_slice,
    psum,
    reduce_scatter,
    shift,
    vary,
)
from utils import AXES, Config, ModelConfig

BATCH_NAMES = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "weights_BT")
IDLE = -1

# Schedules ------------------------------------------------------------------------------------------------------------


def gpipe(stages: int, microbatches: int) -> list[list[int]]:
    """Say which microbatch each stage works on at each tick, [ticks][stages]; IDLE is a bubble.

    Source: GPipe, arXiv:1811.06965. Bubble share = (S - 1) / (M + S - 1).
    """
    entered = [[tick - stage for stage in range(stages)] for tick in range(stages + microbatches - 1)]
    return [[m if 0 <= m < microbatches else IDLE for m in row] for row in entered]


# Executor -------------------------------------------------------------------------------------------------------------


def run_stages(w: model.Transformer, c: ModelConfig, batch, key, microbatches: int):
    """Pass microbatches through the stages as `gpipe` says.

    batch  this device's sequences, [b, s]
    Returns activations [b, t, D], which only the last stage's devices need hold, and this stage's router statistics.
    Sends over STAGE: every tick one microbatch's activations, to the next stage.
    """
    stage, stages = jax.lax.axis_index(STAGE), jax.lax.axis_size(STAGE)
    table = gpipe(stages, microbatches)
    cut = lambda x: x.reshape(microbatches, -1, *x.shape[1:])
    pieces = jax.tree.map(cut, batch)

    def enter():
        return cut(vary(model.enter(w, c, batch, key), AXES))

    x_mbtD = enter() if stages == 1 else jax.lax.cond(stage == 0, enter, lambda: nothing(enter))

    def work(m, x_btD):
        piece = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, keepdims=False), pieces)
        return vary(model.stage(w, c, x_btD, piece, key), AXES)

    def tick(carry, row):
        received_btD, statistics = carry
        m = row[stage]
        first_btD = jax.lax.dynamic_index_in_dim(x_mbtD, jnp.maximum(m, 0), keepdims=False)
        x_btD = jnp.where(stage == 0, first_btD, received_btD)
        idle = lambda: (x_btD, jax.tree.map(jnp.zeros_like, statistics))
        y_btD, more = jax.lax.cond(m == IDLE, idle, lambda: work(m, x_btD))
        return (shift(y_btD, STAGE), jax.tree.map(jnp.add, statistics, more)), y_btD

    if stages == microbatches == 1:
        return work(0, x_mbtD[0])
    start = nothing(lambda: work(0, x_mbtD[0]))
    (_, statistics), y_ibtD = jax.lax.scan(tick, start, jnp.array(table))
    left = np.array([tick for tick, row in enumerate(table) if row[-1] != IDLE])  # when the last stage was at work
    return y_ibtD[left].reshape(-1, *y_ibtD.shape[2:]), statistics


def nothing(function):
    """Zeros of the shapes and types that a function returns, which may differ on every device."""
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), AXES), jax.eval_shape(function))


def last_stages(x):
    """x as the last stage has it, and zeros on the others: what a sum over STAGE keeps."""
    return jnp.where(jax.lax.axis_index(STAGE) == jax.lax.axis_size(STAGE) - 1, x, 0)


def padded(x, *, dim):
    """Zeros added at the end of `dim`, so that it splits over STAGE."""
    widths = [(0, -x.shape[dim] % jax.lax.axis_size(STAGE) if i == dim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)


def spread_loss(w: model.Transformer, c: ModelConfig, x_btD, targets_bs, weights_bs):
    """Cross-entropy, a share of the tokens on each stage, so that logits are made once. Returns this device's sum.

    Sends over STAGE: (stages - 1)/stages of the activations.
    """
    b, t, tensor = *x_btD.shape[:2], jax.lax.axis_size(TENSOR)

    def rows(x_bs):  # of all TENSOR neighbours, in the order in which `leave` joins theirs
        rows_rn = x_bs.reshape(b, tensor, t).swapaxes(0, 1).reshape(tensor, b * t)
        return own_slice(padded(rows_rn, dim=1), STAGE, dim=1).reshape(-1)

    x_nD = reduce_scatter(last_stages(padded(x_btD.reshape(b * t, -1), dim=0)), STAGE, dim=0)
    return model.cross_entropy(w, c, x_nD, rows(targets_bs), rows(weights_bs))


def sums(w: model.Transformer, cfg: Config, batch, key):
    """All the loss is made of, as sums over this device's tokens, for one pass of microbatches."""
    x_btD, statistics = run_stages(w, cfg.model, batch, key, sharding.split_batch(cfg).microbatches)
    loss = spread_loss(w, cfg.model, x_btD, batch["targets_BT"], batch["weights_BT"])
    return {"loss": loss, "weight": jnp.sum(batch["weights_BT"]), "router": statistics}


def in_passes(function, batch, passes: int):
    """Add up function(part of the batch) over `passes` parts; each is computed again in the backward pass."""
    if passes == 1:
        return function(batch)
    parts = jax.tree.map(lambda x: x.reshape(passes, -1, *x.shape[1:]), batch)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(jax.checkpoint(function), parts))


# Compiled functions ---------------------------------------------------------------------------------------------------


def on_mesh(cfg: Config, mesh: Mesh, function, out_specs):
    """Run function(params, batch, step) on local shards: the one `shard_map`, manual over all axes, `check_vma` on."""
    batch_specs = dict.fromkeys((*BATCH_NAMES, "index_BT"), BATCH_SPEC)
    in_specs = (sharding.specs(model.declare(cfg.model)), batch_specs, P())

    def local(params, batch, step):
        # Said here, outside of all loops: its backward pass, the sum over the axes along which a parameter is the same,
        # then happens once a step, of slices, in the parameter's dtype.
        params = model.held(vary(params, AXES), cfg.model)
        batch = {name: own_chunks(all_gather(x, CONTEXT, dim=1)) for name, x in batch.items()}
        return function(params, batch, step)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def numbered(params, batch, step=0):
        # Each token's number in the global batch, made outside, so that it does not depend on who holds it.
        index_BT = jnp.arange(batch["tokens_BT"].size).reshape(batch["tokens_BT"].shape)
        segments_BT = batch["segments_BT"]
        if not cfg.data.mask_documents:
            segments_BT = jnp.minimum(segments_BT, 1)
        return mapped(params, batch | {"index_BT": index_BT, "segments_BT": segments_BT}, jnp.asarray(step))

    return numbered


def loss_and_grads(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch, step) -> (loss, metrics, grads). Gradients lie on the mesh as their parameters do.

    Raises: UserError if the batch or a parameter does not split over the mesh.
    """
    sharding.check_divides(model.declare(cfg.model), mesh)
    passes = sharding.split_batch(cfg).accumulation

    def local_loss(params, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.run.seed), step)
        return model.loss(cfg.model, in_passes(lambda part: sums(params, cfg, part, key), batch, passes))

    loss = on_mesh(cfg, mesh, local_loss, (P(), model.metric_specs(cfg.model)))

    @jax.jit
    def differentiated(params, batch, step):
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, step)
        return value, metrics, grads

    return differentiated


def evaluate(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> (sum of nats, number of targets), without dropout; batches add up."""
    passes = sharding.split_batch(cfg).accumulation

    def local_sums(params, batch, step):
        totals = in_passes(lambda part: sums(params, cfg, part, None), batch, passes)
        return psum(totals["loss"], (*BATCH, CONTEXT, STAGE)), psum(totals["weight"], (*BATCH, CONTEXT))

    return jax.jit(on_mesh(cfg, mesh, local_sums, (P(), P())))


def logits(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> float32 logits [B, T, V]."""
    def local_logits(params, batch, step):
        x_btD, _ = run_stages(params, cfg.model, batch, None, 1)
        x_bsD = model.leave(params, cfg.model, x_btD, dim=1)
        return psum(last_stages((x_bsD @ model.unembedding(params, cfg.model)).astype(jnp.float32)), STAGE)

    as_held = on_mesh(cfg, mesh, local_logits, P(BATCH, CONTEXT, TENSOR))
    return jax.jit(lambda params, batch: in_order(as_held(params, batch), dim=1, n=mesh.shape[CONTEXT]))
