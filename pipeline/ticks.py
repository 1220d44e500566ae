"""The executor of schedules: tick by tick, what the table says, forward and backward.

`follow` follows any schedule of `schedules.py`, and calls each stage's backward pass where its table says so.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

import model
from config import AXES, Config, ModelConfig
from overlap.weights import held_by_step
from pipeline import schedules
from sharding import STAGE, TENSOR, axis_index, axis_size, own_slice, reduce_scatter, shift, vary

IDLE = schedules.IDLE
WITHOUT_TENSOR = tuple(axis for axis in AXES if axis != TENSOR)


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


# What goes from tick to tick, and passes through a stage --------------------------------------------------------------


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


def at(tree, index):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def apart(pull, known):
    """Split what a backward pass needs (`pull`, from jax.vjp) into arrays to keep and those that are `known` anyway."""
    leaves, tree = jax.tree.flatten(pull)
    places = {id(x): number for number, x in enumerate(jax.tree.leaves(known))}
    place = [places.get(id(leaf)) for leaf in leaves]
    return [leaf for leaf, number in zip(leaves, place, strict=True) if number is None], (tree, place)


def together(how, kept, known):
    """The inverse of `apart`."""
    (tree, place), kept, known = how, iter(kept), jax.tree.leaves(known)
    return jax.tree.unflatten(tree, [next(kept) if number is None else known[number] for number in place])


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


def received(job: Job, carry: Carry, own: schedules.Rows):
    """What a forward pass begins with: tokens, where they enter, or what the stage before has sent: [b, t, D]."""
    is_first = (axis_index(STAGE) == 0) & (own.forward_chunk == 0)
    read = lambda: at(carry.inbox, jnp.maximum(own.forward_from, 0))
    return jax.lax.cond(is_first, lambda: enter(job, job.w.embedding_VD, own.forward), read)


def passed(carry: Carry, own: schedules.Rows, y_btD, router, kept) -> Carry:
    """The carry after a forward pass, and with what the stage before sends."""
    return carry.replace(
        inbox=put(carry.inbox, own.arrive, shift(y_btD, STAGE)),
        kept=put(carry.kept, own.keep, kept),
        sums=carry.sums.replace(router=add_at(carry.sums.router, jnp.maximum(own.forward_chunk, 0), router)),
    )


def entered(job: Job, own: schedules.Rows, grads: model.Transformer, dx_btD):
    """Add the gradient of the embedding, where tokens enter."""

    def of_table():
        _, pull = jax.vjp(lambda table_VD: enter(job, table_VD, own.backward), job.w.embedding_VD)
        return grads.replace(embedding_VD=add(grads.embedding_VD, pull(dx_btD)[0]))

    is_first = (axis_index(STAGE) == 0) & (own.backward_chunk == 0)
    return jax.lax.cond(is_first, of_table, lambda: grads)


def add_layers(grads: model.Transformer, chunk, d_weights):
    """Add the gradients that one backward pass found."""
    d_prefix, d_blocks = d_weights
    return grads.replace(prefix=add(grads.prefix, d_prefix), blocks=add_at(grads.blocks, chunk, d_blocks))


# The slots of a tick --------------------------------------------------------------------------------------------------


def forward_slot(job: Job, carry: Carry, own: schedules.Rows):
    """The forward pass of a tick, if there is one, and what the stage before sends meanwhile. Returns its output too.

    Sends over STAGE: one microbatch's activations, to the next stage.
    """

    def work():
        return forward(job, own.forward, own.forward_chunk, received(job, carry, own))[:2]

    with jax.named_scope("forward_slot"):
        (y_btD, router), kept = jax.lax.cond(own.forward != IDLE, work, lambda: nothing(work))
    return y_btD, passed(carry, own, y_btD, router, kept)


def loss_slot(job: Job, carry: Carry, own: schedules.Rows, due, y_btD):
    """Loss and gradient of the microbatch that has just left the last stage, if one is `due`: all stages share it.

    Sends over STAGE: a share of its activations to each stage, and of their gradient back.
    """
    table = "embedding_VD" if job.w.unembedding_DV is None else "unembedding_DV"
    names = ("norm_D", "norm_bias_D", table, "bias_V")

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
        return dx_btD, entered(job, own, grads, dx_btD)

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


# From tick to tick ----------------------------------------------------------------------------------------------------


def busy(rows: schedules.Rows) -> set[str]:
    """The slots in which some stage does something, in some of these ticks."""
    return {slot for slot in ("forward", "loss", "backward", "weight") if (getattr(rows, slot) != IDLE).any()}


def run_ticks(job: Job, carry: Carry, rows: schedules.Rows) -> Carry:
    """Do what the rows say, tick by tick, in those slots in which there is something to do: one traced tick, scanned.

    Sends over STAGE: one microbatch's activations forward and their gradient back, and to the loss.
    """
    slots = busy(rows)

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
            carry = carry.replace(cotangents=put(carry.cotangents, own.arrive_back, arrived_btD))
        return carry, None

    return jax.lax.scan(tick, carry, jax.tree.map(jnp.asarray, rows))[0]


def no_losses(c: ModelConfig):
    """What `spread_loss` returns, before any token."""
    return vary((jnp.float32(0), {name: jnp.float32(0) for name in model.auxiliary_names(c)}), WITHOUT_TENSOR)


def sums_of(c: ModelConfig, weight, router=()) -> model.Sums:
    cross_entropy, auxiliary = no_losses(c)
    return model.Sums(cross_entropy, weight, auxiliary, router)


def trace(job: Job, x_btD):
    """What a pass of [b, t, D] returns, in zeros; what it keeps, likewise; and how that is put together again."""
    stage, hows = axis_index(STAGE), []

    def run(x_btD):
        out, kept, how = forward(job, stage, stage, x_btD)
        hows.append(how)
        return out, kept

    return *nothing(run, x_btD), hows[-1]


def begin(job: Job, weight, slots: schedules.Slots) -> tuple[Job, Carry]:
    """The carry before the first tick, all zeros; and the job, which now knows what is kept."""
    x_btD = nothing(lambda: enter(job, job.w.embedding_VD, 0))
    (_, router), kept, how = trace(job, x_btD)
    buffer = lambda tree, n: jax.tree.map(lambda x: vary(jnp.zeros((n, *x.shape), x.dtype), AXES), tree)
    carry = Carry(
        inbox=buffer(x_btD, slots.inbox),
        kept=buffer(kept, slots.kept),
        cotangents=buffer(x_btD, slots.cotangents),
        sums=sums_of(job.c, weight, buffer(router, job.sched.chunks)),
        grads=jax.tree.map(lambda x: vary(jnp.zeros(x.shape, jnp.float32), AXES), job.w),
    )
    return job._replace(how=how), carry


def follow(w, c: ModelConfig, batch, key, sched: schedules.Schedule, d_loss=None, d_router=None):
    """Run a schedule: in each tick a forward, a loss, a backward and a weight slot, as its rows say.

    w       weights as a step holds them; blocks in chunks, [v, l, ..]
    d_loss, d_router  see Job; d_router may be a function of the sums of all forward passes, where the schedule turns
    Returns sums, and the gradients of w in float32.
    Which branch is taken depends on STAGE alone, so the devices of a collective in it, along other axes, all take it.
    """
    table, slots = schedules.rows(sched)
    start, rows = 0, lambda start, stop: schedules.Rows(*(x[start:stop] for x in table))
    pieces = jax.tree.map(lambda x: x.reshape(sched.microbatches, -1, *x.shape[1:]), batch)
    job, carry = begin(Job(w, c, pieces, key, sched, d_loss), jnp.sum(batch["weights_BT"]), slots)
    if callable(d_router):
        carry, start = run_ticks(job, carry, rows(0, sched.turn)), sched.turn
        d_router = d_router(carry.sums)
    carry = run_ticks(job._replace(d_router=d_router), carry, rows(start, len(table.forward)))
    return carry.sums, carry.grads


def scheduled(params, cfg: Config, batch, key, sched: schedules.Schedule):
    """Loss, metrics and gradients by any schedule. The gradients are added up over microbatches in float32.

    The balance loss's gradient needs the loads of the whole batch, which are known when all forward passes are done.
    Where a schedule does not wait for them, they are done once more beforehand.
    """
    c, v = cfg.at_work, sched.chunks
    chunked = lambda tree: jax.tree.map(lambda x: to_chunks(x, v), tree)
    in_order = lambda sums: sums.replace(router=jax.tree.map(lambda x: from_chunks(x, v), sums.router))
    gradient = jax.grad(lambda sums: model.loss(c, sums)[0])

    def hold(params, c):
        w = held_by_step(vary(params, AXES), c)
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
    exact = dataclasses.replace(c, precision="float32")
    held, pull = jax.vjp(lambda params: hold(params, exact), params)
    return loss, metrics, pull(jax.tree.map(lambda d, x: d.astype(x.dtype), d_w, held))[0]
