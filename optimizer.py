"""AdamW, Adafactor and Muon as optax chains, learning-rate schedules, one training step, and diagnostics of a step.

The optax chain runs under `jit` outside the `shard_map` of the loss, on global sharded arrays. So on every mesh,
clipping uses the norm of the whole gradient. `muon.py` has the Newton-Schulz iteration, which needs whole matrices.
"""

import fnmatch
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import local_steps
import muon
import parameters
import pipeline
import sharding
from architectures import declare
from compile import options, ordered
from config import Config, OptimConfig, replace
from config.fields import parse_adamw, parse_muon, parse_schedule
from pipeline import fit
from utils import UserError, suggest


@struct.dataclass
class TrainState:
    """Everything that a training step changes. `step` is also the position in the data."""

    params: Any
    optimizer: Any  # optax state
    step: Any  # int32, number of steps so far, including skipped steps
    skipped_steps: Any  # int32, number of steps without an update, because the loss or a gradient was not finite
    skipped_in_a_row: Any  # int32, number of consecutive skipped steps up to now
    replicas: Any = None  # with optim.outer: the TrainState of each replica; see `local_steps.with_replicas`


def learning_rate(o: OptimConfig, steps: int) -> optax.Schedule:
    """Return the schedule: linear warm-up, then a cosine, a plateau and linear decay (wsd), or 1 / sqrt(step) (rsqrt).

    Steps count from 0. The rate is above 0 at step 0 and reaches its peak at step warmup_steps - 1. At the last step,
    cosine and wsd are at `final` times the peak. Points count steps from 1, and have no warm-up.
    Sources: wsd arXiv:2404.06395; rsqrt T5, arXiv:1910.10683, section 3.1.2.
    """
    schedule = parse_schedule(o.schedule)
    if schedule.kind == "points":
        points = np.array(schedule.points, np.float32)
        return lambda step: o.lr * jnp.interp(step + 1.0, points[:, 0], points[:, 1])
    warmup = min(o.warmup_steps, steps)
    rise = optax.linear_schedule(o.lr / max(warmup, 1), o.lr, max(warmup - 1, 1))
    # The decay starts, with the peak, at the last step of the previous phase, so that it ends exactly at the last step.
    if schedule.kind == "cosine":
        fall = optax.cosine_decay_schedule(o.lr, max(steps - warmup, 1), alpha=schedule.final)
        return optax.join_schedules([rise, fall], [warmup - 1])
    if schedule.kind == "rsqrt":
        peak = max(warmup, 1) - 1
        return optax.join_schedules([rise, lambda after: o.lr * jnp.sqrt((peak + 1.0) / (peak + 1 + after))], [peak])
    decay = min(round(schedule.decay * steps), steps - warmup)
    fall = optax.linear_schedule(o.lr, o.lr * schedule.final, decay) if decay else optax.constant_schedule(o.lr)
    return optax.join_schedules([rise, optax.constant_schedule(o.lr), fall], [warmup, steps - decay - 1])


def decay_mask(declarations):
    """Return a tree of booleans: True for parameters with weight decay (all but norms, biases and embeddings)."""
    return jax.tree.map(lambda d: d.decay, declarations)


def clip(largest_norm: float) -> optax.GradientTransformation:
    """Scale all gradients down if their global norm is above `largest_norm`; 0 disables clipping.

    The argument `norm` of `update` is the norm if the caller knows it.
    """

    def update(grads, state, params=None, *, norm=None, **_):
        # XLA would fuse a given norm's last sum into the update of each parameter, and use 2% more temporary memory.
        norm = optax.tree.norm(grads) if norm is None else jax.lax.optimization_barrier(norm)
        scaled = lambda g: jnp.where(norm < largest_norm, g, g / norm.astype(g.dtype) * largest_norm)
        return jax.tree.map(scaled, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update) if largest_norm else optax.identity()


def adamw(o: OptimConfig, steps: int, decay=None) -> optax.GradientTransformation:
    """Build AdamW with decoupled weight decay (arXiv:1711.05101) after clipping by global norm, for any parameter tree.

    steps  total number of steps, over which the learning rate decays
    decay  tree of booleans with the structure of the parameters: whether weight decay applies; None: to all of them

    >>> params = {"w_DF": jnp.ones((2, 3)), "bias_F": jnp.ones(3)}
    >>> chain = adamw(OptimConfig(lr=0.5, warmup_steps=1), steps=10, decay={"w_DF": True, "bias_F": False})
    >>> changes, state = chain.update(jax.tree.map(jnp.zeros_like, params), chain.init(params), params)
    >>> print(changes["w_DF"][0], float(jnp.abs(changes["bias_F"]).max()))  # -lr * weight_decay * 1, and nothing
    [-0.05 -0.05 -0.05] 0.0
    """
    *numbers, moments = parse_adamw(o.adamw)
    return optax.chain(
        clip(o.clip_norm),
        store_moments_as(moments, optax.scale_by_adam(*numbers)),
        optax.add_decayed_weights(o.weight_decay, mask=decay),
        optax.scale_by_learning_rate(learning_rate(o, steps)),
    )


def store_moments_as(dtype: str, scaling: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `scaling`, of AdamW or Muon, with stored moments of this dtype, which its update converts to float32 and
    back; "parameters" keeps the dtype of the parameters, also in the update."""
    if dtype == "parameters":
        return scaling

    def cast(state, dtype):
        as_dtype = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
        stored = [name for name in ("mu", "nu") if name in state._fields]
        return state._replace(**{name: as_dtype(getattr(state, name)) for name in stored})

    def update(grads, state, params=None):
        exact = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        changes, state = scaling.update(exact, cast(state, jnp.float32))
        return jax.tree.map(lambda x, g: x.astype(g.dtype), changes, grads), cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(scaling.init(params), dtype), update)


# Adafactor ------------------------------------------------------------------------------------------------------------

FACTORED_FROM = 128  # a matrix with fewer rows or columns has a full second moment, as in optax and T5X


class AdafactorState(NamedTuple):
    count: Any  # int32, number of updates so far
    second_moments: Any  # for each parameter: one array, or two if they are factored


def second_moment_shapes(d: sharding.Declaration) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of Adafactor's arrays for a parameter: the means of the squared gradient over columns and over
    rows, where a mean has size 1; or one full array. So each dim can be sharded as the parameter's."""
    dims = sharding.rows_and_columns(d)
    if min(math.prod(d.shape[i] for i in some) for some in dims) < FACTORED_FROM:
        return (d.shape,)
    return tuple(tuple(1 if i in some else n for i, n in enumerate(d.shape)) for some in reversed(dims))


def scale_by_adafactor(declarations) -> optax.GradientTransformation:
    """Scale gradients as T5 does: factored second moments, no momentum, updates clipped to a root mean square of 1, and
    relative to the root mean square of the parameter.

    It equals `optax.adafactor` on each matrix of each layer and expert. On stacked layers, optax would factor the two
    largest dims, which may include the layers, and clip all layers together.
    Source: arXiv:1804.04235, algorithms 4 and 8, section 8.
    """

    def init(params):
        moments = lambda d, p: tuple(jnp.zeros(shape, p.dtype) for shape in second_moment_shapes(d))
        return AdafactorState(jnp.int32(0), jax.tree.map(moments, declarations, params))

    def update(grads, state, params):
        decay = 1 - (state.count + 1.0) ** -0.8

        def moments(d, grad, old):
            square = jnp.square(grad.astype(jnp.float32)) + 1e-30
            reduced = lambda shape: [i for i, n in enumerate(shape) if n < grad.shape[i]]
            new = [decay * v + (1 - decay) * jnp.mean(square, reduced(v.shape), keepdims=True) for v in old]
            return tuple(x.astype(grad.dtype) for x in new)

        def change(d, grad, new, param):
            rows, columns = sharding.rows_and_columns(d)
            rms = lambda x: jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), rows + columns, keepdims=True))
            v = new[0] if len(new) == 1 else new[0] / jnp.mean(new[0], rows, keepdims=True) * new[1]
            scaled = grad * jax.lax.rsqrt(v)
            return (scaled / jnp.maximum(1, rms(scaled)) * jnp.maximum(1e-3, rms(param))).astype(grad.dtype)

        new = jax.tree.map(moments, declarations, grads, state.second_moments)
        return jax.tree.map(change, declarations, grads, new, params), AdafactorState(state.count + 1, new)

    return optax.GradientTransformation(init, update)


def adafactor(o: OptimConfig, steps: int, declarations) -> optax.GradientTransformation:
    """Build Adafactor, with the clipping by global norm, the weight decay and the schedule of `adamw`."""
    return optax.chain(
        clip(o.clip_norm),
        scale_by_adafactor(declarations),
        optax.add_decayed_weights(o.weight_decay, mask=decay_mask(declarations)),
        optax.scale_by_learning_rate(learning_rate(o, steps)),
    )


# Muon -----------------------------------------------------------------------------------------------------------------


def muon_names(cfg: Config) -> list[str]:
    """List the parameters that Muon updates in this run."""
    declared = sharding.flatten_named(declare(cfg.model))
    used = cfg.optim.name == "muon" and declared.keys() - frozen_names(cfg.optim, declared)
    return [name for name, d in declared.items() if used and name in used and muon.updates_by_muon(d)]


def muon_and_adamw(cfg: Config, declarations, mesh: Mesh | None) -> optax.GradientTransformation:
    """Build Muon for the matrices of layers and AdamW for all other parameters, with the clipping by global norm, the
    weight decay and the schedule of `adamw`.

    As in published runs, Newton-Schulz computes in the dtype of the model's matmuls: bfloat16, if not in float32.
    """
    o, layout = cfg.optim, cfg.work.resolved.muon_layout
    numbers, (*adam, moments) = parse_muon(o.muon), parse_adamw(o.adamw)
    label = jax.tree.map(lambda d: "muon" if muon.updates_by_muon(d) else "adamw", declarations)
    declared = jax.tree.map(lambda d, name: d if name == "muon" else optax.MaskedNode(), declarations, label)
    orthogonalize = muon.orthogonalize(declared, mesh, layout, cfg.model.compute_dtype, numbers.steps)
    parts = {"muon": muon.scale_by_muon(declared, numbers, orthogonalize), "adamw": optax.scale_by_adam(*adam)}
    return optax.chain(
        clip(o.clip_norm),
        optax.partition({name: store_moments_as(moments, part) for name, part in parts.items()}, label),
        optax.add_decayed_weights(o.weight_decay, mask=decay_mask(declarations)),
        optax.scale_by_learning_rate(learning_rate(o, cfg.run.steps)),
    )


# The optimizer of a run -----------------------------------------------------------------------------------------------


def frozen_names(o: OptimConfig, names) -> set[str]:
    """Return which of the parameters optim.frozen selects.

    Raises: UserError for a pattern that matches none, or if nothing is left to train.
    """
    found = set()
    for pattern in filter(None, o.frozen.split(",")):
        if not (some := fnmatch.filter(names, pattern)):
            groups = {".".join(parts[:n]) + ".*": 0 for parts in (name.split(".") for name in names)
                      for n in range(1, len(parts))}  # fmt: skip
            raise UserError(f"optim.frozen={o.frozen!r}: {pattern!r} matches no parameter; "
                            f"{suggest(pattern, [*groups, *names])}")  # fmt: skip
        found |= {*some}
    if found and len(found) == len(names):
        raise UserError(f"optim.frozen={o.frozen!r} matches every parameter, so nothing is left to train")
    return found


def frozen_mask(cfg: Config):
    """Return a tree of booleans: True for parameters that optim.frozen selects."""
    declared = declare(cfg.model)
    names = frozen_names(cfg.optim, sharding.flatten_named(declared))
    return sharding.map_named(lambda name, _: name in names, declared)


def make_optimizer(cfg: Config, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """Build the optimizer of a run, with the weight decay that the parameters declare. Frozen parameters have no
    moments, and an update of 0.

    mesh  of the arrays that it updates; None: one device
    """
    frozen, steps = frozen_mask(cfg), cfg.run.steps
    declared = jax.tree.map(lambda d, skip: optax.MaskedNode() if skip else d, parameters.declare_stored(cfg), frozen)
    if cfg.optim.name == "adafactor":
        chain = adafactor(cfg.optim, steps, declared)
    elif cfg.optim.name == "muon":
        chain = muon_and_adamw(cfg, declared, mesh)
    else:
        chain = adamw(cfg.optim, steps, decay_mask(declared))
    return optax.selective_transform(chain, freeze_mask=frozen) if cfg.optim.frozen else chain


def update_selection_bias(cfg: Config, params, tokens_per_expert_LE):
    """Raise the router bias of experts with fewer tokens than the mean, and lower it for the others, by a fixed step.

    tokens_per_expert_LE  counts over the global batch; L blocks, E experts
    Source: arXiv:2408.15664, algorithm 1.
    """
    if not cfg.model.balance_rate or not cfg.model.n_experts:
        return params
    mean_LE = jnp.mean(tokens_per_expert_LE, axis=-1, keepdims=True)
    step_LE = cfg.model.balance_rate * jnp.sign(mean_LE - tokens_per_expert_LE)
    return sharding.map_named(lambda name, p: p + step_LE if name.endswith("bias_E") else p, params)


def init(cfg: Config, mesh: Mesh, params=None) -> TrainState:
    """Build the state at step 0, with new or given parameters. Moments are sharded like their parameters."""
    if cfg.optim.outer:
        add_replicas = functools.partial(local_steps.with_replicas, count=cfg.mesh.data)
        add_replicas = ordered.jit(add_replicas, mesh, out_shardings=state_shardings(cfg, mesh))
        return add_replicas(init(local_steps.replica_config(cfg), mesh, params))
    params = parameters.init(parameters.declare_stored(cfg), mesh, cfg.run.seed) if params is None else params
    # Three separate arrays, because the training step donates each.
    return TrainState(
        params,
        compile_moments(cfg, mesh)(params),
        *(jax.device_put(jnp.int32(0), NamedSharding(mesh, P())) for _ in range(3)),
    )


def compile_moments(cfg: Config, mesh: Mesh):
    """Compile fn(params) -> the initial optax state."""
    return ordered.jit(make_optimizer(cfg).init, mesh, out_shardings=state_shardings(cfg, mesh).optimizer)


def state_shapes(cfg: Config) -> TrainState:
    """Return the ShapeDtypeStruct of every array in the state, without touching a device."""
    if cfg.optim.outer:
        add_replicas = functools.partial(local_steps.with_replicas, count=cfg.mesh.data)
        return jax.eval_shape(add_replicas, state_shapes(local_steps.replica_config(cfg)))
    params = sharding.shapes(declare(cfg.model))
    return TrainState(
        params, jax.eval_shape(make_optimizer(cfg).init, params), *[jax.ShapeDtypeStruct((), jnp.int32)] * 3
    )


def state_shardings(cfg: Config, mesh: Mesh) -> TrainState:
    """Return the sharding of every array in the state: moments like their parameters, the rest replicated."""
    if cfg.optim.outer:
        return local_steps.with_replica_shardings(state_shardings(local_steps.replica_config(cfg), mesh))
    declared, everywhere = parameters.declare_stored(cfg), NamedSharding(mesh, P())
    is_params = lambda tree: isinstance(tree, type(declared))

    def like(d, moments):  # those of one parameter; a dim of size 1 is a mean over the parameter's
        spec_of = lambda x: P(*(axes if n > 1 else None for n, axes in zip(x.shape, d.spec, strict=True)))
        return jax.tree.map(lambda x: NamedSharding(mesh, spec_of(x)), moments)

    moments = jax.tree.map(
        lambda tree: jax.tree.map(like, declared, tree) if is_params(tree) else everywhere,
        state_shapes(cfg).optimizer,
        is_leaf=is_params,
    )
    params = jax.tree.map(lambda d: NamedSharding(mesh, d.spec), declared)
    return TrainState(params, moments, everywhere, everywhere, everywhere)


def gathered_params(cfg: Config, mesh: Mesh, state: TrainState):
    """Return the parameters sharded as declared, which evaluation and sampling need; see `parameters.as_stored`."""
    return gather_params_fn(cfg, mesh)(state.params) if cfg.optim.shard_over_data else state.params


@functools.cache
def gather_params_fn(cfg: Config, mesh: Mesh):
    places = jax.tree.map(lambda d: NamedSharding(mesh, d.spec), declare(cfg.model))
    return ordered.jit(lambda params: params, mesh, out_shardings=places)


def loss_and_grads_fn(cfg: Config, mesh: Mesh):
    """Return `pipeline.loss_and_grads`, but with gradients of 0 for frozen parameters, so no norm counts them."""
    loss_and_grads = pipeline.loss_and_grads(cfg, mesh)
    if not cfg.optim.frozen:
        return loss_and_grads
    mask = frozen_mask(cfg)

    def of_trained(*args):
        loss, metrics, grads = loss_and_grads(*args)
        return loss, metrics, jax.tree.map(lambda frozen, g: jnp.zeros_like(g) if frozen else g, mask, grads)

    return of_trained


def compute_updates_fn(cfg: Config, mesh: Mesh):
    """Return fn(state, batch) -> (metrics, grads, updates, moments): a step that does not apply the updates."""
    chain, rate = make_optimizer(cfg, mesh), learning_rate(cfg.optim, cfg.run.steps)
    loss_and_grads = loss_and_grads_fn(cfg, mesh)
    # Each replica sums the squares of its part of a gradient, so the norm has the same bits with `shard_over_data`.
    by_replica = parameters.declare_stored(replace(cfg, **{"optim.shard_over_data": True}))
    parts, by_muon = jax.tree.map(lambda d: NamedSharding(mesh, d.spec), by_replica), muon_names(cfg)

    def compute_updates(state: TrainState, batch):
        loss, metrics, grads = loss_and_grads(state.params, batch, state.step)
        norm = optax.tree.norm(jax.lax.with_sharding_constraint(grads, parts) if cfg.mesh.data > 1 else grads)
        # The schedule counts updates, so a skipped step does not advance it.
        metrics |= {"loss": loss, "grad_norm": norm, "lr": rate(state.step - state.skipped_steps)}
        # Gather the metrics here, so that this communication runs before that of Muon and of a step's `cond`.
        metrics = jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, P()))
        before = ordered.after(grads, mesh, metrics) if by_muon else grads
        changes, moments = chain.update(before, state.optimizer, state.params, norm=norm)
        if by_muon:
            grads, changes = ordered.after((grads, changes), mesh, sharding.flatten_named(changes)[by_muon[0]])
        if "tokens_per_expert" in metrics:
            changes = update_selection_bias(cfg, changes, metrics["tokens_per_expert"])
        return metrics, grads, changes, moments

    return compute_updates


def train_step(cfg: Config, mesh: Mesh):
    """Compile fn(state, batch) -> (state, metrics), see `step_fn`. The old state is donated: do not use it again."""
    shardings, everywhere = state_shardings(cfg, mesh), NamedSharding(mesh, P())
    xla_options = options.compiler_options(mesh, cfg.run.compiler_options)
    if cfg.optim.outer:
        declared, places = declare(cfg.model), shardings.replicas
        return local_steps.LocalSteps(cfg, mesh, step_fn, declared, places, xla_options)
    return ordered.jit(
        step_fn(cfg, mesh), mesh, donate_argnums=0, out_shardings=(shardings, everywhere), compiler_options=xla_options
    )


def step_fn(cfg: Config, mesh: Mesh):
    """Return fn(state, batch) -> (state, metrics), one training step.

    If the loss, the gradient or another metric is not finite, the step is skipped: only the counters change.
    The metrics are those of `model.loss`, and loss, grad_norm (before clipping), lr, skipped_steps, skipped_in_a_row
    and not_finite: for each entry of `layer_parameters`, whether its gradient caused the skip.
    """
    updates_of = compute_updates_fn(cfg, mesh)

    def step(state: TrainState, batch):
        metrics, grads, changes, moments = updates_of(state, batch)
        finite = jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(metrics)]).all()
        taken = (optax.apply_updates(state.params, changes), moments)
        params, moments = jax.tree.map(lambda x, old: jnp.where(finite, x, old), taken, (state.params, state.optimizer))
        skipped = {
            "skipped_steps": state.skipped_steps + jnp.where(finite, 0, 1),
            "skipped_in_a_row": jnp.where(finite, 0, state.skipped_in_a_row + 1),
        }
        none = lambda grads: jnp.zeros(len(layer_parameters(cfg)), bool)
        with jax.named_scope("not_finite"):
            blame = jax.lax.cond(finite, none, lambda grads: not_finite(cfg, grads), grads)
        metrics |= skipped | {"not_finite": blame}
        return TrainState(params, moments, state.step + 1, **skipped), metrics

    return step


# Diagnostics of a step ------------------------------------------------------------------------------------------------


def layer_squares(cfg: Config, tree):
    """Return the sum of squares of each parameter, per layer if stacked: float32 arrays [], [P], [L] or [L, J].
    For the letters see the legend of `model.py`."""
    own = lambda d, x: tuple(range(sharding.stacked_dims(d), x.ndim))
    square = lambda d, x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=own(d, x))
    return jax.tree.map(square, declare(cfg.model), tree)


def layer_parameters(cfg: Config) -> dict[str, int]:
    """List every parameter of every layer in forward order, with names like 'blocks.moe.attention.w_out_HUD, block 1'.

    The value is its index in the concatenated arrays of `layer_squares`.
    """
    declared = sharding.flatten_named(declare(cfg.model))
    parts = {".".join(name.split(".")[:n]): None for name in declared for n in (1, 2)}
    rank = {part: number for number, part in enumerate(parts)}
    found = []
    for name, d in declared.items():
        first, second = (rank[".".join(name.split(".")[:n])] for n in (1, 2))
        for index in np.ndindex(d.shape[: sharding.stacked_dims(d)]):
            where = "".join(f", {sharding.STACKED[letter]} {i}" for letter, i in zip(d.dims, index, strict=False))
            # Sort by block before parameter, because the forward pass finishes a block before the next one.
            found.append((first, index[:1], second, index[1:], len(found), name + where))
    return {name: number for *_, number, name in sorted(found)}


def not_finite(cfg: Config, grads):
    """Return, for each parameter of each layer, whether its gradient or the gradient's squared norm is not finite."""
    squares = [x.reshape(-1) for x in jax.tree.leaves(layer_squares(cfg, grads))]
    return ~jnp.isfinite(jnp.concatenate(squares)[np.array(list(layer_parameters(cfg).values()))])


def layer_norms(cfg: Config, mesh: Mesh):
    """Compile fn(state, batch) -> norms[kind][name], one or one per layer, of kinds gradient, update and parameter.

    These are separate programs. They don't change the training step, and cost a forward and a backward pass. Norms of
    parameters are a program of their own, because no data orders their sums after the collectives of the stages.
    """
    updates_of, norms_of = compute_updates_fn(cfg, mesh), lambda tree: jax.tree.map(jnp.sqrt, layer_squares(cfg, tree))

    def step_norms(state: TrainState, batch):
        _, grads, changes, _ = updates_of(state, batch)
        return norms_of(grads), norms_of(changes)

    of_step, of_params = (ordered.jit(f, mesh, out_shardings=NamedSharding(mesh, P())) for f in (step_norms, norms_of))

    def named(state: TrainState, batch) -> dict[str, dict]:
        gradient, update = map(sharding.flatten_named, of_step(state, batch))
        return {"gradient": gradient, "update": update, "parameter": sharding.flatten_named(of_params(state.params))}

    return named


def noise_scale(cfg: Config, mesh: Mesh):
    """Compile fn(params, host_batch, step) -> gradient_square, noise_square, and their ratio, the noise scale.

    It compares the squared gradient norms of small batches and of the full batch. The small batches are those of
    gradient accumulation, or two halves without it. `host_batch` is the batch as NumPy arrays. The estimate from one
    batch is noisy: average gradient_square and noise_square over many batches, then divide.
    Raises: UserError if the batch cannot be split.
    Source: McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    split = fit.split_batch(cfg)
    pieces = max(split.accumulation, 2)
    B = cfg.data.batch_size
    if B // split.shards % pieces:
        raise UserError(
            f"the {B // split.shards} sequences per batch shard "
            f"(data.batch_size={B} / {split.shards} shards) cannot be split into {pieces} small batches; "
            f"use a multiple of {pieces * split.shards} sequences"
        )
    loss_and_grads = loss_and_grads_fn(replace(cfg, **{"data.batch_size": B // pieces}), mesh)
    square = jax.jit(lambda tree: optax.tree.norm(tree, squared=True))
    add = jax.jit(lambda total, grads, weight: jax.tree.map(lambda t, g: t + weight * g, total, grads))

    def scale(params, batch, step) -> dict[str, float]:
        total, squares, tokens = None, [], []
        for piece in range(pieces):
            part = {name: x.reshape(pieces, -1, x.shape[1])[piece] for name, x in batch.items()}
            _, metrics, grads = loss_and_grads(params, sharding.put(part, mesh), step)
            tokens.append(float(metrics["tokens"]))
            squares.append(float(square(grads)))
            zeros = jax.tree.map(jnp.zeros_like, grads) if total is None else total
            total = add(zeros, grads, tokens[-1])
        return noise_scale_of(squares, tokens, float(square(total)) / sum(tokens) ** 2)

    return scale


def noise_scale_of(small_squares: list[float], small_tokens: list[float], big_square: float) -> dict[str, float]:
    """Estimate the noise scale from |gradient|^2 of small batches and of the full batch (arXiv:1812.06162, A.1)."""
    small, big = float(np.mean(small_tokens)), float(np.sum(small_tokens))
    small_square = float(np.average(small_squares, weights=small_tokens))
    gradient_square = (big * big_square - small * small_square) / (big - small)  # equation A.2, first half
    noise_square = (small_square - big_square) / (1 / small - 1 / big)  # trace of one token's covariance
    scale = noise_square / gradient_square if gradient_square > 0 else float("inf")  # no signal measured
    return {"gradient_square": gradient_square, "noise_square": noise_square, "noise_scale_tokens": scale}
