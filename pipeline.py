"""The compiled functions: the one `shard_map` around the model, and what differentiates it.

Schedules come here. So far there is one stage, and the schedule is: every pass in turn.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

import model
from sharding import BATCH, BATCH_SPEC, CONTEXT, STAGE, TENSOR, specs, split_batch
from utils import Config, UserError

BATCH_NAMES = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "weights_BT")


def on_mesh(cfg: Config, mesh: Mesh, function, out_specs):
    """Run function(params, batch, step) on local shards: the one `shard_map`, manual over all axes, `check_vma` on."""
    if mesh.shape[STAGE] > 1:
        raise UserError(f"mesh {cfg.mesh}: stage must be 1, there is no pipeline schedule yet; use fsdp or tensor")
    batch_specs = dict.fromkeys((*BATCH_NAMES, "index_BT"), BATCH_SPEC)
    in_specs = (specs(model.declare(cfg.model)), batch_specs, P())
    local = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def numbered(params, batch, step=0):
        # Each token's number in the global batch, made outside, so that it does not depend on who holds it.
        index_BT = jnp.arange(batch["tokens_BT"].size).reshape(batch["tokens_BT"].shape)
        segments_BT = batch["segments_BT"]
        if not cfg.data.mask_documents:
            segments_BT = jnp.minimum(segments_BT, 1)
        return local(params, batch | {"index_BT": index_BT, "segments_BT": segments_BT}, jnp.asarray(step))

    return numbered


def loss_and_grads(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch, step) -> (loss, metrics, grads). Gradients lie on the mesh as their parameters do.

    Raises: UserError if the batch or a parameter does not split over the mesh.
    """
    split = split_batch(cfg)

    def local_loss(params, batch, step):
        key = jax.random.fold_in(jax.random.key(cfg.run.seed), step)
        return model.loss(params, cfg.model, batch, key, split.accumulation)

    loss = on_mesh(cfg, mesh, local_loss, (P(), model.metric_specs(cfg.model)))

    @jax.jit
    def differentiated(params, batch, step):
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, step)
        return value, metrics, grads

    return differentiated


def evaluate(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> (sum of nats, number of targets), without dropout; batches of any size add up."""

    def local_sums(params, batch, step):
        totals = model.sums(params, cfg.model, batch, None)
        return jax.lax.psum(totals["loss"], (*BATCH, CONTEXT, STAGE)), jax.lax.psum(totals["weight"], (*BATCH, CONTEXT))

    return jax.jit(on_mesh(cfg, mesh, local_sums, (P(), P())))


def logits(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> float32 logits [B, T, V]."""

    def local_logits(params, batch, step):
        return model.logits(params, cfg.model, batch)

    return jax.jit(on_mesh(cfg, mesh, local_logits, P(BATCH, CONTEXT, TENSOR)))
