"""Run a pipeline schedule on the devices, tick by tick, forward and backward.

A tick is a time slot of the schedule's table (`schedules.py`). The table gives the tick of every forward and backward
pass, so backward passes are called explicitly, with `jax.vjp`, instead of by autodiff of the whole loop.
In shapes, lower-case letters are this device's shards, as in `model.py`, and b is the sequences of one microbatch. v is
the number of chunks of layers per stage. The activations [b, t, D] of an encoder-decoder are a pair of such arrays; its
chunk 0 is the encoder's layers, and chunk 1 the decoder's.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

import model
from architectures import architecture
from config import AXES, Config, ModelConfig
from overlap.layers import Row, Summed, rebuild_pull, split_residuals
from overlap.weights import at_use, held_by_step
from parameters import gather_replicas
from pipeline import schedules
from sharding import STAGE, TENSOR, axis_index, axis_size, own_slice, reduce_scatter, shift, vary

IDLE = schedules.IDLE
WITHOUT_TENSOR = tuple(axis for axis in AXES if axis != TENSOR)


def zeros_like_result(function, *args):
    """Return zeros with the shapes and dtypes of function(*args), marked as varying over all mesh axes (`vary`)."""
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, x.dtype), AXES), jax.eval_shape(function, *args))


def keep_last_stage(x):
    """Return x on the last stage and zeros on the others, so that a sum over STAGE is the last stage's x."""
    return jnp.where(axis_index(STAGE) == axis_size(STAGE) - 1, x, 0)


def pad_for_stages(x, *, dim):
    """Pad `dim` with zeros at its end, so that it splits over STAGE."""
    widths = [(0, -x.shape[dim] % axis_size(STAGE) if i == dim else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)


def loss_input(x):
    """Return the activations that the loss reads: of an encoder-decoder's pair, those of the decoder."""
    return jax.tree.leaves(x)[-1]


def spread_loss(w: model.Transformer, c: ModelConfig, x, targets_bs, weights_bs):
    """Compute the loss of the last stage's output on all stages: each stage gets 1/stages of the tokens.

    Returns the sums of loss and auxiliary losses over this device's tokens, as `model.token_losses`.
    Sends over STAGE: (stages - 1)/stages of the activations.
    """
    x_btD = loss_input(x)
    b, t, tensor = *x_btD.shape[:2], axis_size(TENSOR)

    def local_tokens(x_bs):  # those of the TENSOR group, in the order in which `model.final_norm` gathers them
        x_rn = x_bs.reshape(b, tensor, t).swapaxes(0, 1).reshape(tensor, b * t)
        return own_slice(pad_for_stages(x_rn, dim=1), STAGE, dim=1).reshape(-1)

    x_nD = reduce_scatter(keep_last_stage(pad_for_stages(x_btD.reshape(b * t, -1), dim=0)), STAGE, dim=0)
    return model.token_losses(w, c, x_nD, local_tokens(targets_bs), local_tokens(weights_bs))


# State between ticks, and the passes through a stage ------------------------------------------------------------------


def to_chunks(x_l, chunks: int):
    """Reshard blocks over STAGE: from contiguous blocks per stage (as parameters are stored) to v chunks per stage.

    Chunk c of stage s is number c * stages + s in the order of layers. Shapes: [l, ..] -> [v, l/v, ..].
    Sends over STAGE: all but 1/stages of the blocks. Backward: `from_chunks`.
    """
    groups = x_l.reshape(chunks, -1, *x_l.shape[1:])
    return _exchange(groups, [[(s, i, r, c) for s, i, r, c in edges] for edges in _routes(chunks)])


def from_chunks(x_vl, chunks: int):
    """Reshard the chunks of an interleaved schedule back to contiguous blocks per stage: [v, l/v, ..] -> [l, ..]."""
    groups = _exchange(x_vl, [[(r, c, s, i) for s, i, r, c in edges] for edges in _routes(chunks)])
    return groups.reshape(-1, *x_vl.shape[2:])


def _routes(chunks: int):
    return schedules.routes(axis_size(STAGE), chunks)


def _exchange(groups, rounds):
    if len(groups) == 1:
        return groups
    stage, result = axis_index(STAGE), jnp.zeros_like(groups)
    for edges in rounds:
        sent, slot = (jnp.array([n for _, n in sorted(pairs)]) for pairs in
                      ([(s, i) for s, i, _, _ in edges], [(r, c) for _, _, r, c in edges]))  # fmt: skip
        arrived = jax.lax.ppermute(groups[sent[stage]], STAGE, [(s, r) for s, _, r, _ in edges])
        result = result.at[slot[stage]].set(arrived)
    return result


def write_at(tree, index, values):
    """Write values at an index of the leading dim. If the index is out of bounds, write nothing."""
    return jax.tree.map(lambda x, value: x.at[index].set(value, mode="drop"), tree, values)


def read_at(tree, index):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def add(totals, values):
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)


def zero_sums(weights):
    """Return float32 zeros for the sums of the weights' gradients."""
    return jax.tree.map(lambda x: vary(jnp.zeros(x.shape, jnp.float32), AXES), weights)


def add_at(totals, index, values):
    return jax.tree.map(lambda total, value: total.at[index].add(value.astype(total.dtype)), totals, values)


@struct.dataclass
class Carry:
    """What a stage carries from one tick to the next. `schedules.rows` computes the number of slots in each buffer."""

    inbox: Any  # activations received, [slots, b, t, D]
    kept: Any  # arrays that forward passes save for backward passes, a list of [slots, ..]
    cotangents: Any  # gradients of the activations sent, [slots, b, t, D]
    sums: model.Sums  # sums for the loss so far; router statistics: [v, ..]
    grads: Any  # gradients of the weights, as a Transformer, in float32


class Job(NamedTuple):
    """The inputs of a step, which are the same in all ticks."""

    w: model.Transformer  # from `held_by_step`; blocks in chunks, [v, l, ..]
    c: ModelConfig
    microbatches: dict  # the batch, split into microbatches, [m, b, s]
    key: Any  # random key for dropout; None: no dropout
    sched: schedules.Schedule
    d_loss: Any = None  # d loss / d (cross_entropy, auxiliary) of a microbatch; None: run only forward passes
    d_router: Any = None  # d loss / d (sums of the router's statistics)
    how: Any = None  # structure from which `rebuild_pull` rebuilds a pullback


def unchunked_layers(w: model.Transformer) -> dict:
    """Return the layers that are not stored in chunks: the prefix, or an encoder and a decoder."""
    return {f.name: getattr(w, f.name) for f in dataclasses.fields(w) if not f.metadata and f.name != "blocks"}


def unsaved_inputs(job: Job, m, chunk):
    """Return the inputs of a forward pass that its backward pass can read again: weights, tokens and random key."""
    return unchunked_layers(job.w), job.w.blocks, chunk, (read_at(job.microbatches, m), job.key)


def rows_of(blocks, chunk):
    """Return the blocks of a chunk as `Row`s of the stacks of all chunks."""
    leaves, tree = jax.tree.flatten(blocks)
    return jax.tree.unflatten(tree, [Row(leaf, (chunk,), number) for number, leaf in enumerate(leaves)])


def run_layers(job: Job, weights, blocks, totals, x_btD, context, chunk):
    """Run a chunk of layers. Returns [b, t, D], router statistics, and the totals, to which only pullbacks add."""
    w, module = job.w.replace(**weights, blocks=blocks), architecture(job.c).module
    if not totals:
        return *vary(module.stage(w, job.c, x_btD, *context, chunk), AXES), totals
    out, router = module.stage(w, job.c, Summed(x_btD, totals), *context, chunk)
    return vary((out.x, router, out.totals), AXES)


def enter(job: Job, table_VD, m, form=at_use):
    """Embed the tokens of microbatch m. Returns the input of the first stage, [b, t, D]. form: as in `unembedding`"""
    w, batch = job.w.replace(embedding_VD=table_VD), read_at(job.microbatches, m)
    return vary(architecture(job.c).module.embed_batch(w, job.c, batch, job.key, form), AXES)


def forward(job: Job, m, chunk, x_btD):
    """Run microbatch m through a chunk of this stage's layers.

    Returns ([b, t, D], router statistics), the arrays to save for its backward pass, and the structure `how`.
    """
    known = weights, blocks, chunk, context = unsaved_inputs(job, m, chunk)
    if job.d_loss is None:
        return run_layers(job, weights, read_at(blocks, chunk), [], x_btD, context, chunk)[:2], [], None
    run = lambda weights, *inputs: run_layers(job, weights, rows_of(blocks, chunk), *inputs, context, chunk)
    out, pull = jax.vjp(run, weights, zero_sums(jax.tree.leaves(blocks)), x_btD)
    residuals, how = split_residuals(pull, known)
    return out[:2], vary(residuals, AXES), how


def backward(job: Job, carry: Carry, m, chunk, kept_at, cotangent_at):
    """Run microbatch m backward through a chunk. Returns the sums of gradients, and the gradient of its input."""
    pull, grads = rebuild_pull(job.how, read_at(carry.kept, kept_at), unsaved_inputs(job, m, chunk)), carry.grads
    sums, blocks = jax.tree.flatten(grads.blocks)
    d_weights, sums, dx_btD = pull((read_at(carry.cotangents, cotangent_at), read_at(job.d_router, chunk), sums))
    others = {name: add(total, d_weights[name]) for name, total in unchunked_layers(grads).items()}
    return grads.replace(blocks=jax.tree.unflatten(blocks, sums), **others), dx_btD


def forward_input(job: Job, carry: Carry, own: schedules.Rows):
    """Return a forward pass's input [b, t, D]: embedded tokens on the first stage, else received activations."""
    is_first = (axis_index(STAGE) == 0) & (own.forward_chunk == 0)
    read = lambda: read_at(carry.inbox, jnp.maximum(own.forward_from, 0))
    with jax.named_scope("embed"):
        return jax.lax.cond(is_first, lambda: enter(job, job.w.embedding_VD, own.forward), read)


def store_forward(carry: Carry, own: schedules.Rows, y_btD, router, kept) -> Carry:
    """Send the output of a forward pass, receive the previous stage's, and update the carry."""
    return carry.replace(
        inbox=write_at(carry.inbox, own.arrive, shift(y_btD, STAGE)),
        kept=write_at(carry.kept, own.keep, kept),
        sums=carry.sums.replace(router=add_at(carry.sums.router, jnp.maximum(own.forward_chunk, 0), router)),
    )


def add_embedding_gradient(job: Job, own: schedules.Rows, grads: model.Transformer, dx_btD):
    """On the first stage, add the gradient of the embedding."""

    form = at_use if job.c.work.gather == "layer" else lambda w, c, name: (getattr(w, name),)

    def add_table():
        # In float32, like the sum: then the compiler adds only the rows of these tokens to it, not a whole table.
        table_VD = job.w.embedding_VD.astype(jnp.float32)
        _, pull = jax.vjp(lambda table_VD: enter(job, table_VD, own.backward, form), table_VD)
        return grads.replace(embedding_VD=add(grads.embedding_VD, pull(dx_btD)[0]))

    is_first = (axis_index(STAGE) == 0) & (own.backward_chunk == 0)
    with jax.named_scope("embed"):
        return jax.lax.cond(is_first, add_table, lambda: grads)


# The slots of a tick --------------------------------------------------------------------------------------------------


def forward_slot(job: Job, carry: Carry, own: schedules.Rows):
    """Run the forward pass of a tick, if any, and send its output to the next stage. Returns the output and the carry.

    Sends over STAGE: one microbatch's activations, to the next stage.
    """

    def work():
        return forward(job, own.forward, own.forward_chunk, forward_input(job, carry, own))[:2]

    with jax.named_scope("forward_slot"):
        (y_btD, router), kept = jax.lax.cond(own.forward != IDLE, work, lambda: zeros_like_result(work))
    return y_btD, store_forward(carry, own, y_btD, router, kept)


def loss_slot(job: Job, carry: Carry, own: schedules.Rows, due, y_btD):
    """If microbatch `due` has just left the last stage, compute its loss and gradient, with all stages together.

    Sends over STAGE: 1/stages of its activations to each stage, and the gradients back.
    """
    table = "embedding_VD" if job.w.unembedding_DV is None else "unembedding_DV"
    names = ("norm_D", "norm_bias_D", table, "bias_V")

    def loss(weights, y_btD):
        batch_bs, w = read_at(job.microbatches, due), job.w.replace(**weights)
        return vary(spread_loss(w, job.c, y_btD, batch_bs["targets_BT"], batch_bs["weights_BT"]), WITHOUT_TENSOR)

    def work():
        losses, pull = jax.vjp(loss, {name: getattr(job.w, name) for name in names}, y_btD)
        d_weights, dy_btD = pull(job.d_loss)
        grads = {name: add(getattr(carry.grads, name), d) for name, d in d_weights.items()}
        return losses, dy_btD, carry.grads.replace(**grads)

    idle = lambda: (zero_losses(job.c), zeros_like_result(lambda: y_btD), carry.grads)
    with jax.named_scope("loss_slot"):
        losses, dy_btD, grads = jax.lax.cond(due != IDLE, work, idle)
    cross_entropy, auxiliary = add((carry.sums.cross_entropy, carry.sums.auxiliary), losses)
    return carry.replace(
        cotangents=write_at(carry.cotangents, own.loss_to, dy_btD),
        sums=carry.sums.replace(cross_entropy=cross_entropy, auxiliary=auxiliary),
        grads=grads,
    )


def backward_slot(job: Job, carry: Carry, own: schedules.Rows):
    """Run the backward pass of a tick, if any. If weight gradients are delayed, discard those computed here.

    Returns the gradient of the input, which the caller sends, and the carry.
    """

    def work():
        grads, dx_btD = backward(job, carry, own.backward, own.backward_chunk, own.backward_kept, own.backward_from)
        grads = carry.grads if job.sched.splits_backward else grads
        return dx_btD, add_embedding_gradient(job, own, grads, dx_btD)

    idle = lambda: (zeros_like_result(lambda: read_at(carry.inbox, 0)), carry.grads)
    with jax.named_scope("backward_slot"):
        dx_btD, grads = jax.lax.cond(own.backward != IDLE, work, idle)
    return dx_btD, carry.replace(grads=grads)


def weight_slot(job: Job, carry: Carry, own: schedules.Rows):
    """Compute the delayed weight gradients of a tick, if there are any."""

    def work():
        return backward(job, carry, own.weight, own.weight_chunk, own.weight_kept, own.weight_from)[0]

    with jax.named_scope("weight_slot"):
        return carry.replace(grads=jax.lax.cond(own.weight != IDLE, work, lambda: carry.grads))


# The loop over ticks --------------------------------------------------------------------------------------------------


def used_slots(rows: schedules.Rows) -> set[str]:
    """Return the slots that at least one stage uses in at least one of these ticks."""
    return {slot for slot in ("forward", "loss", "backward", "weight") if (getattr(rows, slot) != IDLE).any()}


def run_ticks(job: Job, carry: Carry, rows: schedules.Rows) -> Carry:
    """Run the rows tick by tick. One tick is traced, with only the slots that these rows use, and scanned.

    Sends over STAGE, per tick: one microbatch's activations to the next stage, a gradient to the previous one, and what
    `loss_slot` sends.
    """
    slots = used_slots(rows)

    def tick(carry, row):
        own = schedules.Rows(*(x[axis_index(STAGE)] for x in row))
        if "forward" in slots:
            y_btD, carry = forward_slot(job, carry, own)
        if "loss" in slots and job.d_loss is not None:
            carry = loss_slot(job, carry, own, row.loss[0], y_btD)
        if "backward" in slots:
            dx_btD, carry = backward_slot(job, carry, own)
        if "weight" in slots:
            carry = weight_slot(job, carry, own)
        if "backward" in slots:
            arrived_btD = shift(dx_btD, STAGE, by=-1)
            carry = carry.replace(cotangents=write_at(carry.cotangents, own.arrive_back, arrived_btD))
        return carry, None

    return jax.lax.scan(tick, carry, jax.tree.map(jnp.asarray, rows))[0]


def zero_losses(c: ModelConfig):
    """Return zeros with the structure of `spread_loss`'s result."""
    return vary((jnp.float32(0), {name: jnp.float32(0) for name in model.auxiliary_names(c)}), WITHOUT_TENSOR)


def initial_sums(c: ModelConfig, weight, router=()) -> model.Sums:
    cross_entropy, auxiliary = zero_losses(c)
    return model.Sums(cross_entropy, weight, auxiliary, router)


def trace(job: Job, x_btD):
    """Trace a forward pass. Returns its outputs and saved arrays as zeros, and the structure `how`."""
    stage, hows = axis_index(STAGE), []

    def run(x_btD):
        out, residuals, how = forward(job, stage, stage, x_btD)
        hows.append(how)
        return out, residuals

    return *zeros_like_result(run, x_btD), hows[-1]


def initial_carry(job: Job, weight, slots: schedules.Slots) -> tuple[Job, Carry]:
    """Return the job with its structure `how` set, and the carry before the first tick, all zeros."""
    x_btD = zeros_like_result(lambda: enter(job, job.w.embedding_VD, 0))
    (_, router), residuals, how = trace(job, x_btD)
    buffer = lambda tree, n: jax.tree.map(lambda x: vary(jnp.zeros((n, *x.shape), x.dtype), AXES), tree)
    carry = Carry(
        inbox=buffer(x_btD, slots.inbox),
        kept=buffer(residuals, slots.kept),
        cotangents=buffer(x_btD, slots.cotangents),
        sums=initial_sums(job.c, weight, buffer(router, job.sched.chunks)),
        grads=zero_sums(job.w),
    )
    return job._replace(how=how), carry


def run_schedule(w, c: ModelConfig, batch, key, sched: schedules.Schedule, d_loss=None, d_router=None):
    """Run a schedule: in each tick a forward, a loss, a backward and a weight slot, as its rows prescribe.

    w       weights from `held_by_step`; blocks in chunks, [v, l, ..]
    d_loss, d_router  see Job; in GPipe d_router may be a function of the sums of all forward passes
    Returns the sums, and the gradients of w in float32.
    Which branch a device takes depends only on its index along STAGE. So a collective over other axes is safe inside a
    branch: all its devices take the same branch.
    """
    table, slots = schedules.rows(sched)
    start, rows = 0, lambda start, stop: schedules.Rows(*(x[start:stop] for x in table))
    batch_mbs = jax.tree.map(lambda x: x.reshape(sched.microbatches, -1, *x.shape[1:]), batch)
    job, carry = initial_carry(Job(w, c, batch_mbs, key, sched, d_loss), jnp.sum(batch["weights_BT"]), slots)
    if callable(d_router):
        carry, start = run_ticks(job, carry, rows(0, sched.turn)), sched.turn
        d_router = d_router(carry.sums)
    carry = run_ticks(job._replace(d_router=d_router), carry, rows(start, len(table.forward)))
    return carry.sums, carry.grads


def loss_and_grads_by_schedule(params, cfg: Config, batch, key, sched: schedules.Schedule):
    """Compute loss, metrics and gradients with any schedule. Gradients are summed over microbatches in float32.

    The gradient of the balance loss needs the expert loads of the whole batch, which are known only after all forward
    passes. If the schedule starts backward passes earlier, all forward passes run once more, first.
    """
    c, v = cfg.at_work, sched.chunks
    chunked = lambda tree: jax.tree.map(lambda x: to_chunks(x, v), tree)
    in_order = lambda sums: sums.replace(router=jax.tree.map(lambda x: from_chunks(x, v), sums.router))
    gradient = jax.grad(lambda sums: model.loss(c, sums)[0])

    def hold(params, c):
        w = held_by_step(vary(gather_replicas(params, cfg), AXES), c)
        return w.replace(blocks=chunked(w.blocks))

    def d_router(sums):
        """Return d loss / d (the router's sums). The entry for the expert loads is not used."""
        return chunked(gradient(in_order(sums)).router)

    w, d_sums = hold(params, c), gradient(initial_sums(c, jnp.sum(batch["weights_BT"])))
    d_loss = d_sums.cross_entropy, d_sums.auxiliary
    if not sched.turns:
        ahead = lambda: run_schedule(w, c, batch, key, schedules.forward_only(sched))[0]
        has_balance = c.n_experts and c.balance_loss
        d_router = d_router(ahead()) if has_balance else zeros_like_result(lambda: ahead().router)
    sums, d_w = run_schedule(w, c, batch, key, sched, d_loss, d_router)
    loss, metrics = model.loss(c, in_order(sums))
    # The backward pass of `hold`, in float32, reduce-scatters the gradients. The forward result is not used.
    exact = dataclasses.replace(c, precision="float32")
    held, pull = jax.vjp(lambda params: hold(params, exact), params)
    return loss, metrics, pull(jax.tree.map(lambda d, x: d.astype(x.dtype), d_w, held))[0]
