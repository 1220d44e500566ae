"""The compiled functions: the one `shard_map` around the model, the stages inside it, and what differentiates it.

Two executors follow the schedules of `schedules.py`. `run_stages` passes microbatches forward, for evaluation and for
training in one piece. `follow` follows any schedule, and calls each stage's backward pass where its table says so.
(Autodiff of the loop in `run_stages` would be GPipe's backward pass too, with the right gradients. But a branch that a
stage may skip hands its weights to the backward pass in every tick: they would be kept as often as there are ticks.)
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec as P

import model
import sharding
from config import AXES, Config, ModelConfig
from overlap import apart, at, together
from pipeline import fit, schedules
from sharding import (
    BATCH,
    BATCH_SPEC,
    CONTEXT,
    STAGE,
    TENSOR,
    all_gather,
    axis_index,
    axis_size,
    in_order,
    own_chunks,
    own_slice,
    psum,
    reduce_scatter,
    shift,
    vary,
)
from utils import UserError
from xla import ordered

IDLE = schedules.IDLE
WITHOUT_TENSOR = tuple(axis for axis in AXES if axis != TENSOR)
BATCH_NAMES = ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "weights_BT")

# GPipe: forward passes, and autodiff ----------------------------------------------------------------------------------


def run_stages(w: model.Transformer, c: ModelConfig, batch, key, microbatches: int):
    """Pass microbatches through the stages one after the other.

    batch  this device's sequences, [b, s]
    Returns activations [b, t, D], which only the last stage's devices need hold, and this stage's router statistics.
    Sends over STAGE: every tick one microbatch's activations, to the next stage.
    """
    stage, stages = axis_index(STAGE), axis_size(STAGE)
    table = schedules.forward_only(schedules.gpipe(stages, microbatches)).table
    row_m = np.array([[cell[0].microbatch if cell else IDLE for cell in row] for row in table])
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
        with jax.named_scope("forward_slot"):
            y_btD, more = jax.lax.cond(m != IDLE, lambda: work(m, x_btD), idle)
        return (shift(y_btD, STAGE), jax.tree.map(jnp.add, statistics, more)), y_btD

    if stages == microbatches == 1:
        return work(0, x_mbtD[0])
    start = nothing(lambda: work(0, x_mbtD[0]))
    (_, statistics), y_ibtD = jax.lax.scan(tick, start, jnp.array(row_m))
    return y_ibtD[row_m[:, -1] != IDLE].reshape(-1, *y_ibtD.shape[2:]), statistics


def nothing(function, *args):
    """Zeros of the shapes and types that function(*args) returns, which may differ on every device."""
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), AXES), jax.eval_shape(function, *args))


def last_stages(x):
    """x as the last stage has it, and zeros on the others: what a sum over STAGE keeps."""
    return jnp.where(axis_index(STAGE) == axis_size(STAGE) - 1, x, 0)


def padded(x, *, dim):
    """Zeros added at the end of `dim`, so that it splits over STAGE."""
    widths = [(0, -x.shape[dim] % axis_size(STAGE) if i == dim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)


def spread_loss(w: model.Transformer, c: ModelConfig, x_btD, targets_bs, weights_bs):
    """`token_losses`, a share of the tokens on each stage, so that logits are made once. Returns this device's sums.

    Sends over STAGE: (stages - 1)/stages of the activations.
    """
    b, t, tensor = *x_btD.shape[:2], axis_size(TENSOR)

    def rows(x_bs):  # of all TENSOR neighbours, in the order in which `leave` joins theirs
        rows_rn = x_bs.reshape(b, tensor, t).swapaxes(0, 1).reshape(tensor, b * t)
        return own_slice(padded(rows_rn, dim=1), STAGE, dim=1).reshape(-1)

    x_nD = reduce_scatter(last_stages(padded(x_btD.reshape(b * t, -1), dim=0)), STAGE, dim=0)
    return model.token_losses(w, c, x_nD, rows(targets_bs), rows(weights_bs))


def sums(w: model.Transformer, cfg: Config, batch, key):
    """All the loss is made of, as sums over this device's tokens."""
    split = fit.split_batch(cfg)
    x_btD, statistics = run_stages(w, cfg.model, batch, key, split.microbatches * split.accumulation)
    cross_entropy, auxiliary = spread_loss(w, cfg.model, x_btD, batch["targets_BT"], batch["weights_BT"])
    return model.Sums(cross_entropy, jnp.sum(batch["weights_BT"]), auxiliary, statistics)


def ready(params, c: ModelConfig):
    """Parameters as autodiff wants them: able to differ on every device, and gathered if they are gathered once a step.

    Said here, outside of all loops, so that what goes backward here happens once a step: the sum over the axes along
    which a parameter is the same, and, gathered once a step, the reduce-scatter. In the parameters' dtype, so that the
    gradients of microbatches add up in it. The barrier keeps them there: XLA would rather sum first, and convert then.
    """
    params = jax.lax.optimization_barrier(vary(params, AXES))
    return (
        params
        if c.gather != "step"
        else jax.tree.map(lambda w, p: w.astype(p.dtype), model.gathered(params, c), params)
    )


# Any schedule, with its backward passes -------------------------------------------------------------------------------


def to_chunks(x_l, chunks: int):
    """Blocks in order, as parameters lie on the stages, to the chunks of an interleaved schedule.

    Shapes: [l, ..] -> [v, l/v, ..].
    Sends over STAGE: all of them but a share of 1/stages. Backward: `from_chunks`.
    """
    groups = x_l.reshape(chunks, -1, *x_l.shape[1:])
    return _exchange(groups, [[(s, i, r, c) for s, i, r, c in edges] for edges in _routes(chunks)])


def from_chunks(x_vl, chunks: int):
    """Chunks of an interleaved schedule to blocks in order: [v, l/v, ..] -> [l, ..]."""
    back = _exchange(x_vl, [[(r, c, s, i) for s, i, r, c in edges] for edges in _routes(chunks)])
    return back.reshape(-1, *x_vl.shape[2:])


def _routes(chunks: int):
    return schedules.routes(axis_size(STAGE), chunks)


def _exchange(groups, rounds):
    if len(groups) == 1:
        return groups
    stage, found = axis_index(STAGE), jnp.zeros_like(groups)
    for edges in rounds:
        sent, kept = (jnp.array([n for _, n in sorted(pairs)]) for pairs in
                      ([(s, i) for s, i, _, _ in edges], [(r, c) for _, _, r, c in edges]))  # fmt: skip
        arrived = jax.lax.ppermute(groups[sent[stage]], STAGE, [(s, r) for s, _, r, _ in edges])
        found = found.at[kept[stage]].set(arrived)
    return found


def put(tree, index, values):
    """Write values at an index of the leading dim; nowhere, if it lies outside."""
    return jax.tree.map(lambda x, value: x.at[index].set(value, mode="drop"), tree, values)


def add(totals, values):
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)


def add_at(totals, index, values):
    return jax.tree.map(lambda total, value: total.at[index].add(value.astype(total.dtype)), totals, values)


@struct.dataclass
class Carry:
    """What a stage hands from one tick to the next. How many slots a buffer has, `schedules.rows` says."""

    inbox: Any  # activations that have arrived, [slots, b, t, D]
    kept: Any  # what backward passes need of their forward passes, a list of [slots, ..]
    cotangents: Any  # gradients of activations that have left, [slots, b, t, D]
    sums: model.Sums  # what the loss is made of; router: [v, ..]
    grads: Any  # of the weights, as a Transformer, in float32


class Job(NamedTuple):
    """What stays the same in all ticks."""

    w: model.Transformer  # as a step holds them; blocks in chunks, [v, l, ..]
    c: ModelConfig
    pieces: dict  # the batch by microbatches, [m, b, s]
    key: Any  # of dropout; None: no dropout
    sched: schedules.Schedule
    d_loss: Any = None  # gradients by (cross_entropy, auxiliary), as of each microbatch; None: forward passes only
    d_router: Any = None  # and by the router's sums
    how: Any = None  # how what is kept becomes a backward pass again, see `apart`


def known(job: Job, m, chunk):
    """What a forward pass reads besides activations, and a backward pass need not keep: weights, tokens and key."""
    return (job.w.prefix, at(job.w.blocks, chunk)), (at(job.pieces, m), job.key)


def enter(job: Job, table_VD, m):
    """Microbatch m as the first stage receives it, [b, t, D]."""
    return vary(model.enter(job.w.replace(embedding_VD=table_VD), job.c, at(job.pieces, m), job.key), AXES)


def forward(job: Job, m, chunk, x_btD):
    """Run microbatch m through a chunk of this stage's layers.

    Returns ([b, t, D], router statistics), what its backward pass must be kept, and how that is put together again.
    """
    weights, context = known(job, m, chunk)

    def run(weights, x_btD, context):
        here = job.w.replace(prefix=weights[0], blocks=weights[1])
        return vary(model.stage(here, job.c, x_btD, *context, chunk), AXES)

    if job.d_loss is None:
        return run(weights, x_btD, context), [], None
    out, pull = jax.vjp(run, weights, x_btD, context)
    kept, how = apart(pull, (weights, context))
    return out, vary(kept, AXES), how


def backward(job: Job, carry: Carry, m, chunk, kept_at, cotangent_at):
    """Run microbatch m back through a chunk. Returns the gradients of (prefix, blocks) and of its input, [b, t, D]."""
    pull = together(job.how, at(carry.kept, kept_at), known(job, m, chunk))
    d_weights, dx_btD, _ = pull((at(carry.cotangents, cotangent_at), at(job.d_router, chunk)))
    return d_weights, dx_btD


def add_layers(grads: model.Transformer, chunk, d_weights):
    """Add the gradients that one backward pass found."""
    d_prefix, d_blocks = d_weights
    return grads.replace(prefix=add(grads.prefix, d_prefix), blocks=add_at(grads.blocks, chunk, d_blocks))


def forward_slot(job: Job, carry: Carry, own: schedules.Rows):
    """The forward pass of a tick, if there is one, and what the stage before sends meanwhile. Returns its output too.

    Sends over STAGE: one microbatch's activations, to the next stage.
    """

    def work():
        is_first = (axis_index(STAGE) == 0) & (own.forward_chunk == 0)
        read = lambda: at(carry.inbox, jnp.maximum(own.forward_from, 0))
        x_btD = jax.lax.cond(is_first, lambda: enter(job, job.w.embedding_VD, own.forward), read)
        return forward(job, own.forward, own.forward_chunk, x_btD)[:2]

    with jax.named_scope("forward_slot"):
        (y_btD, router), kept = jax.lax.cond(own.forward != IDLE, work, lambda: nothing(work))
    return y_btD, carry.replace(
        inbox=put(carry.inbox, own.arrive, shift(y_btD, STAGE)),
        kept=put(carry.kept, own.keep, kept),
        sums=carry.sums.replace(router=add_at(carry.sums.router, jnp.maximum(own.forward_chunk, 0), router)),
    )


def loss_slot(job: Job, carry: Carry, own: schedules.Rows, due, y_btD):
    """Loss and gradient of the microbatch that has just left the last stage, if one is `due`: all stages share it.

    Sends over STAGE: a share of its activations to each stage, and of their gradient back.
    """
    names = ("norm_D", "embedding_VD" if job.w.unembedding_DV is None else "unembedding_DV")

    def loss(weights, y_btD):
        piece, here = at(job.pieces, due), job.w.replace(**weights)
        return vary(spread_loss(here, job.c, y_btD, piece["targets_BT"], piece["weights_BT"]), WITHOUT_TENSOR)

    def take():
        losses, pull = jax.vjp(loss, {name: getattr(job.w, name) for name in names}, y_btD)
        d_weights, dy_btD = pull(job.d_loss)
        grads = {name: add(getattr(carry.grads, name), d) for name, d in d_weights.items()}
        return losses, dy_btD, carry.grads.replace(**grads)

    none = lambda: (no_losses(job.c), nothing(lambda: y_btD), carry.grads)
    with jax.named_scope("loss_slot"):
        losses, dy_btD, grads = jax.lax.cond(due != IDLE, take, none)
    cross_entropy, auxiliary = add((carry.sums.cross_entropy, carry.sums.auxiliary), losses)
    return carry.replace(
        cotangents=put(carry.cotangents, own.loss_to, dy_btD),
        sums=carry.sums.replace(cross_entropy=cross_entropy, auxiliary=auxiliary),
        grads=grads,
    )


def backward_slot(job: Job, carry: Carry, own: schedules.Rows):
    """The backward pass of a tick, if there is one; where weight gradients wait, only that of the inputs is kept.

    Returns the gradient of its input, which is still to be sent.
    """

    def work():
        d_weights, dx_btD = backward(job, carry, own.backward, own.backward_chunk, own.backward_kept, own.backward_from)
        grads = carry.grads if job.sched.splits_backward else add_layers(carry.grads, own.backward_chunk, d_weights)

        def entered():
            _, pull = jax.vjp(lambda table_VD: enter(job, table_VD, own.backward), job.w.embedding_VD)
            return grads.replace(embedding_VD=add(grads.embedding_VD, pull(dx_btD)[0]))

        is_first = (axis_index(STAGE) == 0) & (own.backward_chunk == 0)
        return dx_btD, jax.lax.cond(is_first, entered, lambda: grads)

    idle = lambda: (nothing(lambda: at(carry.inbox, 0)), carry.grads)
    with jax.named_scope("backward_slot"):
        dx_btD, grads = jax.lax.cond(own.backward != IDLE, work, idle)
    return dx_btD, carry.replace(grads=grads)


def weight_slot(job: Job, carry: Carry, own: schedules.Rows):
    """The gradients of weights that have waited, if it is their turn."""

    def work():
        d_weights, _ = backward(job, carry, own.weight, own.weight_chunk, own.weight_kept, own.weight_from)
        return add_layers(carry.grads, own.weight_chunk, d_weights)

    with jax.named_scope("weight_slot"):
        return carry.replace(grads=jax.lax.cond(own.weight != IDLE, work, lambda: carry.grads))


def run_ticks(job: Job, carry: Carry, rows: schedules.Rows, forwards=True, backwards=True) -> Carry:
    """Do what the rows say, tick by tick: one traced tick, scanned. Some stretches have no forward or backward passes.

    Sends over STAGE: every tick one microbatch's activations forward and their gradient back, and to the loss.
    """

    def tick(carry, row):
        own = schedules.Rows(*(x[axis_index(STAGE)] for x in row))
        if forwards:
            y_btD, carry = forward_slot(job, carry, own)
            if job.d_loss is not None:
                carry = loss_slot(job, carry, own, row.loss[0], y_btD)
        if backwards:
            dx_btD, carry = backward_slot(job, carry, own)
            if job.sched.splits_backward:
                carry = weight_slot(job, carry, own)
            arrived_btD = shift(dx_btD, STAGE, by=-1)
            carry = carry.replace(cotangents=put(carry.cotangents, own.arrive_back, arrived_btD))
        return carry, None

    return jax.lax.scan(tick, carry, rows)[0]


def no_losses(c: ModelConfig):
    """What `spread_loss` returns, before any token."""
    return vary((jnp.float32(0), {name: jnp.float32(0) for name in model.auxiliary_names(c)}), WITHOUT_TENSOR)


def sums_of(c: ModelConfig, weight, router=()) -> model.Sums:
    cross_entropy, auxiliary = no_losses(c)
    return model.Sums(cross_entropy, weight, auxiliary, router)


def begin(job: Job, weight, slots: schedules.Slots) -> tuple[Job, Carry]:
    """The carry before the first tick, all zeros; and the job, which now knows what is kept."""
    x_btD = nothing(lambda: enter(job, job.w.embedding_VD, 0))
    stage, hows = axis_index(STAGE), []

    def trace(x_btD):
        out, kept, how = forward(job, stage, stage, x_btD)
        hows.append(how)
        return out, kept

    (_, router), kept = nothing(trace, x_btD)
    buffer = lambda tree, n: jax.tree.map(lambda x: vary(jnp.zeros((n, *x.shape), x.dtype), AXES), tree)
    carry = Carry(
        inbox=buffer(x_btD, slots.inbox),
        kept=buffer(kept, slots.kept),
        cotangents=buffer(x_btD, slots.cotangents),
        sums=sums_of(job.c, weight, buffer(router, job.sched.chunks)),
        grads=jax.tree.map(lambda x: vary(jnp.zeros(x.shape, jnp.float32), AXES), job.w),
    )
    return job._replace(how=hows[-1]), carry


def follow(w: model.Transformer, c: ModelConfig, batch, key, sched: schedules.Schedule, d_loss=None, d_router=None):
    """Run a schedule: in each tick a forward, a loss, a backward and a weight slot, as its rows say.

    w       weights as a step holds them; blocks in chunks, [v, l, ..]
    d_loss, d_router  see Job; d_router may be a function of the sums of all forward passes, where the schedule turns
    Returns sums and, in float32, the gradients of w.
    Which branch is taken depends on STAGE alone, so the devices of a collective in it, along other axes, all take it.
    """
    table, slots = schedules.rows(sched)
    rows = lambda *ends: schedules.Rows(*(jnp.asarray(x[slice(*ends)]) for x in table))
    pieces = jax.tree.map(lambda x: x.reshape(sched.microbatches, -1, *x.shape[1:]), batch)
    job, carry = begin(Job(w, c, pieces, key, sched, d_loss), jnp.sum(batch["weights_BT"]), slots)
    if d_loss is None:
        carry = run_ticks(job, carry, rows(None), backwards=False)
    elif callable(d_router):
        carry = run_ticks(job, carry, rows(sched.turn), backwards=False)
        job = job._replace(d_router=d_router(carry.sums))
        carry = run_ticks(job, carry, rows(sched.turn, None), forwards=False)
    else:
        carry = run_ticks(job._replace(d_router=d_router), carry, rows(None))
    return carry.sums, carry.grads


def scheduled(params, cfg: Config, batch, key, sched: schedules.Schedule):
    """Loss, metrics and gradients by any schedule. The gradients are added up over microbatches in float32.

    The balance loss's gradient needs the loads of the whole batch, which are known when all forward passes are done.
    Where a schedule does not wait for them, they are done once more beforehand.
    """
    c, v = cfg.model, sched.chunks
    chunked = lambda tree: jax.tree.map(lambda x: to_chunks(x, v), tree)
    in_order = lambda sums: sums.replace(router=jax.tree.map(lambda x: from_chunks(x, v), sums.router))
    gradient = jax.grad(lambda sums: model.loss(c, sums)[0])

    def hold(params, c):
        w = model.held(vary(params, AXES), c)
        return w.replace(blocks=chunked(w.blocks))

    def d_router(sums):
        """Gradient of the loss by the router's sums; those of the loads are not needed, and may be anything."""
        return chunked(gradient(in_order(sums)).router)

    w, d_sums = hold(params, c), gradient(sums_of(c, jnp.sum(batch["weights_BT"])))
    d_loss = d_sums.cross_entropy, d_sums.auxiliary
    if not sched.turns:
        ahead = schedules.forward_only(sched)
        if c.n_experts and c.balance_loss:
            d_router = d_router(follow(w, c, batch, key, ahead)[0])
        else:
            d_router = nothing(lambda: follow(w, c, batch, key, ahead)[0].router)
    sums, d_w = follow(w, c, batch, key, sched, d_loss, d_router)
    loss, metrics = model.loss(c, in_order(sums))
    # The way back from what a step holds to slices, in float32: the forward result is not used.
    exact = dataclasses.replace(c, precision=dataclasses.replace(c.precision, compute="float32"))
    held, pull = jax.vjp(lambda params: hold(params, exact), params)
    return loss, metrics, pull(jax.tree.map(lambda d, x: d.astype(x.dtype), d_w, held))[0]


# Compiled functions ---------------------------------------------------------------------------------------------------


def schedule(cfg: Config) -> schedules.Schedule:
    """The schedule of a step, all its accumulation passes in one. With one stage, a pass ends before the next begins.

    Raises: UserError if there is no such schedule for the mesh, or the layers do not split into its chunks.
    """
    split, S, v, n = fit.split_batch(cfg), cfg.mesh.stage, cfg.pipeline.chunks, cfg.model.n_blocks
    if n % (S * v):
        raise UserError(
            f"cannot split {n} blocks of layers over stage={S} * pipeline.chunks={v} = {S * v} parts "
            f"({n} % {S * v} = {n % (S * v)}); use a multiple of {S * v} blocks, or fewer chunks")  # fmt: skip
    if cfg.pipeline.schedule == "gpipe" and S > 1:
        return schedules.gpipe(S, split.microbatches, passes=split.accumulation)
    name = cfg.pipeline.schedule if S > 1 else "1f1b"
    return schedules.schedule(name, S, split.microbatches * split.accumulation, v if S > 1 else 1, lead=2)


def on_mesh(cfg: Config, mesh: Mesh, function, out_specs, reads=BATCH_NAMES):
    """Run function(params, batch, step) on local shards: the one `shard_map`, manual over all axes, `check_vma` on.

    reads  names of what it needs of a batch, a dict like that of `dataset.batch`; there may be more. One array is made
           here: index_BT, int32, the number of each token in the global batch, which dropout draws by
    Raises: UserError naming what a batch lacks.
    """
    batch_specs = dict.fromkeys((*reads, "index_BT"), BATCH_SPEC)
    in_specs = (sharding.specs(model.declare(cfg.model)), batch_specs, P())

    def local(params, batch, step):
        batch = {name: own_chunks(all_gather(x, CONTEXT, dim=1)) for name, x in batch.items()}
        return function(params, batch, step)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    def numbered(params, batch, step=0):
        if missing := set(reads) - set(batch):
            raise UserError(f"the batch has no {', '.join(sorted(missing))}; it has {', '.join(batch) or 'nothing'}")
        batch = {name: batch[name] for name in reads}
        # Each token's number in the global batch, made outside, so that it does not depend on who holds it.
        index_BT = jnp.arange(batch["tokens_BT"].size).reshape(batch["tokens_BT"].shape)
        segments_BT = batch["segments_BT"]
        if not cfg.data.mask_documents:
            segments_BT = jnp.minimum(segments_BT, 1)
        return mapped(params, batch | {"index_BT": index_BT, "segments_BT": segments_BT}, jnp.asarray(step))

    return numbered


def loss_and_grads(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch, step) -> (loss, metrics, grads). Gradients lie on the mesh as their parameters do.

    batch  a dict of arrays [B, T], as `dataset.batch` describes it
    step   a number, which dropout draws by
    Raises: UserError if the batch or a parameter does not split over the mesh.
    """
    fit.check(cfg.model, cfg.mesh)
    sched, key = schedule(cfg), lambda step: jax.random.fold_in(jax.random.key(cfg.run.seed), step)
    specs = (P(), model.metric_specs(cfg.model))

    def in_one_piece(params, batch, step):
        return model.loss(cfg.model, sums(ready(params, cfg.model), cfg, batch, key(step)))

    def in_microbatches(params, batch, step):
        return scheduled(params, cfg, batch, key(step), sched)

    if sched.stages * sched.microbatches > 1:
        specs = (*specs, sharding.specs(model.declare(cfg.model)))
        return ordered.jit(on_mesh(cfg, mesh, in_microbatches, specs), mesh)
    loss = on_mesh(cfg, mesh, in_one_piece, specs)

    def differentiated(params, batch, step):
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, step)
        return value, metrics, grads

    return ordered.jit(differentiated, mesh)


def evaluate(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> (sum of nats, number of targets), without dropout; batches add up."""

    def local_sums(params, batch, step):
        w = ready(params, cfg.model)
        totals = sums(w, cfg, batch, None)
        return psum(totals.cross_entropy, (*BATCH, CONTEXT, STAGE)), psum(totals.weight, (*BATCH, CONTEXT))

    return ordered.jit(on_mesh(cfg, mesh, local_sums, (P(), P())), mesh)


def logits(cfg: Config, mesh: Mesh):
    """Compile fn(params, batch) -> float32 logits [B, T, V], of a batch's tokens_BT.

    Without positions_BT and segments_BT each row is one document.
    """

    def local_logits(params, batch, step):
        w = ready(params, cfg.model)
        x_btD, _ = run_stages(w, cfg.model, batch, None, 1)
        x_bsD = model.leave(w, cfg.model, x_btD, dim=1)
        return psum(last_stages((x_bsD @ model.unembedding(w, cfg.model)).astype(jnp.float32)), STAGE)

    reads = ("tokens_BT", "positions_BT", "segments_BT")
    as_held = on_mesh(cfg, mesh, local_logits, P(BATCH, CONTEXT, TENSOR), reads)

    def of_tokens(params, batch):
        B, T = batch["tokens_BT"].shape
        one = {"positions_BT": jnp.tile(jnp.arange(T), (B, 1)), "segments_BT": jnp.ones((B, T), jnp.int32)}
        return in_order(as_held(params, one | batch), dim=1, n=mesh.shape[CONTEXT])

    return ordered.jit(of_tokens, mesh)
