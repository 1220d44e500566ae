"""Compile loss and gradients, evaluation, and logits: the `shard_map` around the model, and the stages inside it.

Two executors run the schedules of `schedules.py`. `run_stages` runs them forward, for evaluation and logits. `ticks.py`
runs them forward and backward, for training. With one stage and one microbatch, training differentiates `model.forward`
instead. The optimizer is not here: `optimizer.py` compiles the whole training step.
(Why doesn't training differentiate `run_stages`? That would give GPipe's backward pass, with correct gradients. But a
stage skips ticks in a `cond`, and in every tick autodiff saves a copy of the weights that its branches use.)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import model
import sharding
from architectures import architecture, declare
from compile import ordered
from config import AUTO, AXES, Config, ModelConfig
from config.fields import parse_packing, parse_pipeline, parse_remat
from config.needs import unmet
from overlap.weights import ready_for_autodiff
from parameters import declare_stored, gather_replicas
from pipeline import fit, schedules
from pipeline.documents import document_order
from pipeline.ticks import (
    IDLE,
    keep_last_stage,
    loss_and_grads_by_schedule,
    loss_input,
    read_at,
    spread_loss,
    zeros_like_result,
)
from sharding import (
    BATCH,
    BATCH_SPEC,
    CONTEXT,
    STAGE,
    TENSOR,
    all_gather,
    axis_index,
    axis_size,
    own_chunks,
    psum,
    shift,
    to_sequence_order,
    vary,
)
from utils import UserError

INPUTS = ("tokens_BT", "positions_BT", "segments_BT")
BATCH_NAMES = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "weights_BT")


# Forward passes through the stages ------------------------------------------------------------------------------------


def run_stages(w: model.Transformer, c: ModelConfig, batch, key, microbatches: int):
    """Run the microbatches forward through the stages, one after the other; twice if there is an encoder.

    batch  this device's sequences, [b, s]
    Returns activations [b, t, D], which are valid only on the last stage, and this stage's router statistics.
    """
    split = lambda x: x.reshape(microbatches, -1, *x.shape[1:])

    def enter():
        return jax.tree.map(split, vary(architecture(c).module.embed_batch(w, c, batch, key), AXES))

    batch_mbs, first = jax.tree.map(split, batch), axis_index(STAGE) == 0
    x_mbtD = enter() if axis_size(STAGE) == 1 else jax.lax.cond(first, enter, lambda: zeros_like_result(enter))
    for chunk in range(architecture(c).passes):
        if chunk:
            x_mbtD = shift(x_mbtD, STAGE)  # from the last stage to the first
        x_mbtD, statistics = run_chunk(w, c, x_mbtD, batch_mbs, key, chunk)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x_mbtD), statistics


def run_chunk(w: model.Transformer, c: ModelConfig, x_mbtD, batch_mbs, key, chunk: int):
    """Run the microbatches through one chunk of each stage's layers. Returns the last stage's outputs [m, b, t, D].

    Sends over STAGE: the activations of one microbatch, [b, t, D], in every tick, even if idle. (A tick is a time slot
    of the schedule.)
    """
    stage, stages, microbatches = axis_index(STAGE), axis_size(STAGE), len(jax.tree.leaves(x_mbtD)[0])
    table = schedules.forward_only(schedules.gpipe(stages, microbatches)).table
    row_m = np.array([[cell[0].microbatch if cell else IDLE for cell in row] for row in table])

    def work(m, x_btD):
        return vary(architecture(c).module.stage(w, c, x_btD, read_at(batch_mbs, m), key, chunk), AXES)

    def tick(carry, row):
        received_btD, statistics = carry
        m = row[stage]
        first_btD = read_at(x_mbtD, jnp.maximum(m, 0))
        x_btD = jax.tree.map(lambda first, received: jnp.where(stage == 0, first, received), first_btD, received_btD)
        idle = lambda: (x_btD, jax.tree.map(jnp.zeros_like, statistics))
        with jax.named_scope("forward_slot"):
            y_btD, more = jax.lax.cond(m != IDLE, lambda: work(m, x_btD), idle)
        return (shift(y_btD, STAGE), jax.tree.map(jnp.add, statistics, more)), y_btD

    if stages == microbatches == 1:
        y_btD, statistics = work(0, read_at(x_mbtD, 0))
        return jax.tree.map(lambda y: y[None], y_btD), statistics
    start = zeros_like_result(lambda: work(0, read_at(x_mbtD, 0)))
    (_, statistics), y_ibtD = jax.lax.scan(tick, start, jnp.array(row_m))
    return jax.tree.map(lambda y: y[row_m[:, -1] != IDLE], y_ibtD), statistics


def forward_sums(w: model.Transformer, cfg: Config, batch, key):
    """Compute the sums over this device's tokens that `model.loss` reduces to the loss."""
    split = fit.split_batch(cfg)
    if schedule(cfg).in_one_piece and architecture(cfg.model).passes == 1:
        return model.forward(w, cfg.at_work, batch, key)
    x, statistics = run_stages(w, cfg.at_work, batch, key, split.microbatches * split.accumulation)
    cross_entropy, auxiliary = spread_loss(w, cfg.at_work, x, batch["targets_BT"], batch["weights_BT"])
    return model.Sums(cross_entropy, jnp.sum(batch["weights_BT"]), auxiliary, statistics)


# Compiled functions ---------------------------------------------------------------------------------------------------


def schedule(cfg: Config) -> schedules.Schedule:
    """Build the schedule of a step, including all gradient accumulation passes. With one stage, they run one by one.

    Raises: UserError if the schedule does not allow this mesh, if the layers do not split into its chunks, or if it
    cannot offload activations to the host.
    """
    found, remat = build_schedule(cfg), cfg.work.remat
    if not found.in_one_piece and any((parse_remat(remat) or {}).values()):
        reasons = {"stage=1": cfg.mesh.stage > 1, "work.microbatches=1": cfg.work.microbatches not in (AUTO, 1),
                   "a larger work.device_batch": fit.split_batch(cfg).accumulation > 1}  # fmt: skip
        ways = " and ".join(way for way, applies in reasons.items() if applies)
        raise UserError(
            f"work.remat={remat!r}: only a step with one microbatch and one stage can offload activations to the host, "
            f"and this step has {found.microbatches} and {found.stages}; use {ways}, or leave out @host"
        )
    return found


def build_schedule(cfg: Config) -> schedules.Schedule:
    """Build the schedule of a step, as `schedule` does, for any work.remat.

    In an encoder-decoder, chunk 0 of a stage is its encoder layers, and chunk 1 its decoder layers. So its 1F1B is the
    interleaved schedule with 2 chunks.
    """
    split, work, S, n = fit.split_batch(cfg), cfg.work.resolved, cfg.mesh.stage, cfg.model.n_blocks
    (name, v), kind = parse_pipeline(work.schedule), architecture(cfg.model)
    if kind.schedules and name not in kind.schedules:
        raise UserError(f"work.schedule={name!r}: {kind.name} runs {' or '.join(kind.schedules)}; use one of them")
    name, v = (name, v) if S > 1 else ("1f1b", 1)
    if n % (S * v):
        raise UserError(
            f"cannot split {n} layer blocks over stage={S} * {v} chunks = {S * v} parts "
            f"({n} % {S * v} = {n % (S * v)}); use a multiple of {S * v} blocks, or fewer chunks")  # fmt: skip
    if name == "gpipe":
        return schedules.gpipe(S, split.microbatches, kind.passes, passes=split.accumulation)
    M = split.microbatches * split.accumulation
    if kind.passes > 1:
        return dataclasses.replace(schedules.interleaved(S, M, kind.passes, lead=2), name=name)
    return schedules.schedule(name, S, M, v, lead=2)


def on_mesh(cfg: Config, mesh: Mesh, function, out_specs, reads=BATCH_NAMES, stored=False, sums=True):
    """Return a function of whole arrays that runs function(params, batch, step) on local shards.

    This is the one `shard_map` around the model: manual over all axes, `check_vma` on.

    reads  names of the arrays that the function needs from the batch, a dict as `dataset.batch` returns it, besides
           those of its architecture; others are ignored. Another array is added: index_BT, int32, the index of each
           token in the global batch, for dropout keys, and encoder_index_BS
    stored  the parameters are sharded as training stores them: `parameters.declare_stored`
    sums    the results are sums over positions, which may be dealt over CONTEXT by `documents.document_order`
    Raises: UserError that lists the arrays missing from the batch.
    """
    reads += architecture(cfg.model).batch
    index_of = {name.replace("tokens", "index"): name for name in reads if "tokens" in name}
    batch_specs = dict.fromkeys((*reads, *index_of), BATCH_SPEC)
    declared = declare_stored(cfg) if stored else declare(cfg.model)
    in_specs = (sharding.specs(declared), batch_specs, P())

    def local(params, batch, step):
        # From contiguous shards of positions to the zig-zag chunks of `own_chunks`
        batch = {name: all_gather(x, CONTEXT, dim=1) for name, x in batch.items()}
        if sums and cfg.work.context_layout == "documents" and unmet(cfg, "work.context_layout") is None:
            order_bT = document_order(batch["segments_BT"], axis_size(CONTEXT))
            batch = {name: jnp.take_along_axis(x, order_bT, axis=1) for name, x in batch.items()}
        return function(params, {name: own_chunks(x) for name, x in batch.items()}, step)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def numbered(params, batch, step=0):
        if missing := set(reads) - set(batch):
            raise UserError(f"the batch has no {', '.join(sorted(missing))}; it has {', '.join(batch) or 'nothing'}")
        batch = {name: batch[name] for name in reads}
        if parse_packing(cfg.data.packing).unmasked:
            batch |= {name: jnp.minimum(x, 1) for name, x in batch.items() if "segments" in name}
        # Computed outside the shard_map, so that a token's index does not depend on the device that holds it.
        index = {name: jnp.arange(batch[of].size).reshape(batch[of].shape) for name, of in index_of.items()}
        return mapped(params, batch | index, jnp.asarray(step))

    return numbered


def loss_and_grads(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch, step) -> (loss, metrics, grads). Gradients are sharded like their parameters.

    batch  a dict of arrays [B, T], see `dataset.batch`
    step   the step number, which seeds dropout
    Raises: UserError if the batch or a parameter does not split over the mesh.
    """
    fit.check(cfg.model, cfg.mesh, cfg.work)
    sched, key = schedule(cfg), lambda step: jax.random.fold_in(jax.random.key(cfg.run.seed), step)
    specs = (P(), model.metric_specs(cfg.model))

    def in_one_piece(params, batch, step):
        w = ready_for_autodiff(gather_replicas(params, cfg), cfg.at_work)
        return model.loss(cfg.at_work, forward_sums(w, cfg, batch, key(step)))

    def in_microbatches(params, batch, step):
        return loss_and_grads_by_schedule(params, cfg, batch, key(step), sched)

    if not sched.in_one_piece:
        specs = (*specs, sharding.specs(declare_stored(cfg)))
        return ordered.jit(on_mesh(cfg, mesh, in_microbatches, specs, stored=True), mesh)
    loss = on_mesh(cfg, mesh, in_one_piece, specs, stored=True)

    def differentiated(params, batch, step):
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, step)
        return value, metrics, grads

    return ordered.jit(differentiated, mesh)


def evaluate(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> (cross-entropy in nats, summed over targets; number of targets), without dropout.

    Add both over batches, then divide, to get the mean loss."""

    def local_sums(params, batch, step):
        w = ready_for_autodiff(params, cfg.at_work)
        totals = forward_sums(w, cfg, batch, None)
        return psum(totals.cross_entropy, (*BATCH, CONTEXT, STAGE)), psum(totals.weight, (*BATCH, CONTEXT))

    return ordered.jit(on_mesh(cfg, mesh, local_sums, (P(), P())), mesh)


def logits(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> float32 logits [B, T, V] of the batch's tokens_BT.

    If the batch has no positions_BT and segments_BT, each sequence is one document.
    """

    def local_logits(params, batch, step):
        w = ready_for_autodiff(params, cfg.at_work)
        x, _ = run_stages(w, cfg.at_work, batch, None, 1)
        x_bsD = model.final_norm(w, cfg.at_work, loss_input(x), dim=1)
        return psum(keep_last_stage(model.logits(w, cfg.at_work, x_bsD)), STAGE)

    by_device = on_mesh(cfg, mesh, local_logits, P(BATCH, CONTEXT, TENSOR), INPUTS, sums=False)

    def of_tokens(params, batch):
        B, T = batch["tokens_BT"].shape
        defaults = {"positions_BT": jnp.tile(jnp.arange(T), (B, 1)), "segments_BT": jnp.ones((B, T), jnp.int32)}
        return to_sequence_order(by_device(params, defaults | batch), dim=1, n=mesh.shape[CONTEXT])

    return ordered.jit(of_tokens, mesh)
