"""AdamW as an optax chain, its learning-rate schedule, one training step, and what can be asked about a step.

The chain runs outside the `shard_map`, under `jit`, on whole (sharded) arrays: so the global norm that clipping needs
is the norm of the whole gradient, on any mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import model
import parameters
import pipeline
import sharding
from config import Config, OptimConfig, replace
from errors import UserError
from pipeline import fit
from xla import options, ordered


@struct.dataclass
class TrainState:
    """All that a step changes. The data cursor is `step` itself."""

    params: Any
    optimizer: Any  # optax state
    step: Any  # int32, steps taken, skipped ones too
    skipped_steps: Any  # int32, steps without an update, because the loss or the gradient was not finite
    skipped_in_a_row: Any  # int32, how many of them were the last steps taken


def learning_rate(o: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of each step, counted from 0: linear warm-up, then cosine decay, or a plateau with a linear end.

    The first step is already above 0, step warmup_steps - 1 has the peak, the last step final_lr times the peak.
    Source of the plateau: WSD, arXiv:2404.06395.
    """
    warmup = min(o.warmup_steps, steps)
    rise = optax.linear_schedule(o.lr / max(warmup, 1), o.lr, max(warmup - 1, 1))
    # A fall starts from the peak at the last step of what precedes it, so that it ends at the last step of all.
    if o.schedule == "cosine":
        fall = optax.cosine_decay_schedule(o.lr, max(steps - warmup, 1), alpha=o.final_lr)
        return optax.join_schedules([rise, fall], [warmup - 1])
    decay = min(round(o.decay_fraction * steps), steps - warmup)
    fall = optax.linear_schedule(o.lr, o.lr * o.final_lr, decay) if decay else optax.constant_schedule(o.lr)
    return optax.join_schedules([rise, optax.constant_schedule(o.lr), fall], [warmup, steps - decay - 1])


def decay_mask(declarations):
    """True where weight decay applies: as declared, that is not on norms, biases and embeddings."""
    return jax.tree.map(lambda d: d.decay, declarations)


def clip(largest_norm: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm, that of all of them as one vector, if theirs is larger; 0: never."""
    return optax.clip_by_global_norm(largest_norm) if largest_norm else optax.identity()


def adamw(o: OptimConfig, steps: int, decay=None) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with decoupled decay (arXiv:1711.05101), for any tree of parameters.

    steps  how many there will be: the learning rate falls towards the last
    decay  where weight decay applies, a tree of booleans like the parameters; None: everywhere

    >>> params = {"w_DF": jnp.ones((2, 3)), "bias_F": jnp.ones(3)}
    >>> chain = adamw(OptimConfig(lr=0.5, warmup_steps=1), steps=10, decay={"w_DF": True, "bias_F": False})
    >>> changes, state = chain.update(jax.tree.map(jnp.zeros_like, params), chain.init(params), params)
    >>> print(changes["w_DF"][0], float(jnp.abs(changes["bias_F"]).max()))  # -lr * weight_decay * 1, and nothing
    [-0.05 -0.05 -0.05] 0.0
    """
    return optax.chain(
        clip(o.clip_norm),
        optax.scale_by_adam(*o.betas, o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=decay),
        optax.scale_by_learning_rate(learning_rate(o, steps)),
    )


def chain_of(cfg: Config) -> optax.GradientTransformation:
    """The optimizer of a run: `adamw`, with the decay that the model's parameters declare."""
    return adamw(cfg.optim, cfg.run.steps, decay_mask(model.declare(cfg.model)))


def update_selection_bias(cfg: Config, params, tokens_per_expert_LE):
    """Raise the bias of experts that saw fewer tokens than the mean, lower that of the others, by a fixed step.

    Source: arXiv:2408.15664, algorithm 1; the load is that of the global batch.
    """
    if not cfg.model.balance_rate or not cfg.model.n_experts:
        return params
    mean_LE = jnp.mean(tokens_per_expert_LE, axis=-1, keepdims=True)
    step_LE = cfg.model.balance_rate * jnp.sign(mean_LE - tokens_per_expert_LE)
    return sharding.map_named(lambda name, p: p + step_LE if name.endswith("bias_E") else p, params)


def init(cfg: Config, mesh: Mesh, params=None) -> TrainState:
    """The state at step 0, of new parameters or of given ones. Moments lie on the mesh as their parameters do."""
    params = parameters.init(model.declare(cfg.model), mesh, cfg.run.seed) if params is None else params
    # Three arrays, not one thrice: each is donated.
    return TrainState(
        params, moments(cfg, mesh)(params), *(jax.device_put(jnp.int32(0), NamedSharding(mesh, P())) for _ in range(3))
    )


def moments(cfg: Config, mesh: Mesh):
    """Compile fn(params) -> the optax state before the first step."""
    return ordered.jit(chain_of(cfg).init, mesh, out_shardings=state_shardings(cfg, mesh).optimizer)


def state_shapes(cfg: Config) -> TrainState:
    """ShapeDtypeStruct of every array in the state; no device is touched."""
    params = sharding.shapes(model.declare(cfg.model))
    return TrainState(params, jax.eval_shape(chain_of(cfg).init, params), *[jax.ShapeDtypeStruct((), jnp.int32)] * 3)


def state_shardings(cfg: Config, mesh: Mesh) -> TrainState:
    """Where every array of the state lies: what optax keeps per parameter as the parameter, the rest everywhere."""
    params = jax.tree.map(lambda d: NamedSharding(mesh, d.spec), model.declare(cfg.model))
    everywhere = NamedSharding(mesh, P())
    shapes = state_shapes(cfg)
    moments = optax.tree_map_params(
        chain_of(cfg), lambda _, sharding: sharding, shapes.optimizer, params, transform_non_params=lambda _: everywhere
    )
    return TrainState(params, moments, everywhere, everywhere, everywhere)


def updates(cfg: Config, mesh: Mesh):
    """Trace fn(state, batch) -> (metrics, grads, updates, moments): all of a step but its being taken."""
    chain, rate = chain_of(cfg), learning_rate(cfg.optim, cfg.run.steps)
    loss_and_grads = pipeline.loss_and_grads(cfg, mesh)

    def of(state: TrainState, batch):
        loss, metrics, grads = loss_and_grads(state.params, batch, state.step)
        changes, moments = chain.update(grads, state.optimizer, state.params)
        if "tokens_per_expert" in metrics:
            changes = update_selection_bias(cfg, changes, metrics["tokens_per_expert"])
        # The schedule counts updates: a skipped step leaves it, like the rest of the optimizer, where it was.
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": rate(state.step - state.skipped_steps)}
        return metrics, grads, changes, moments

    return of


def train_step(cfg: Config, mesh: Mesh):
    """Compile fn(state, batch) -> (state, metrics). The old state's memory is reused: do not touch it again.

    A step whose loss, gradient or another metric is not finite is skipped: all but the counters stays as it is.
    Metrics add to those of `model.loss`: loss, grad_norm (before clipping), lr, skipped_steps, skipped_in_a_row, and
    not_finite: for each of `places`, whether its gradient is to blame for this step being skipped.
    """
    updates_of = updates(cfg, mesh)

    def step(state: TrainState, batch):
        metrics, grads, changes, moments = updates_of(state, batch)
        # Joined here, and looked at: so the branch below, which sums over devices, comes after this exchange.
        metrics = jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, P()))
        finite = jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(metrics)]).all()
        taken = (optax.apply_updates(state.params, changes), moments)
        params, moments = jax.tree.map(lambda x, old: jnp.where(finite, x, old), taken, (state.params, state.optimizer))
        skipped = {
            "skipped_steps": state.skipped_steps + jnp.where(finite, 0, 1),
            "skipped_in_a_row": jnp.where(finite, 0, state.skipped_in_a_row + 1),
        }
        none = lambda grads: jnp.zeros(len(places(cfg)), bool)
        with jax.named_scope("not_finite"):
            blame = jax.lax.cond(finite, none, lambda grads: not_finite(cfg, grads), grads)
        metrics |= skipped | {"not_finite": blame}
        return TrainState(params, moments, state.step + 1, **skipped), metrics

    shardings = state_shardings(cfg, mesh), NamedSharding(mesh, P())
    told = options.of(mesh, cfg.run.compiler_options)
    return ordered.jit(step, mesh, donate_argnums=0, out_shardings=shardings, compiler_options=told)


# What can be asked about a step ---------------------------------------------------------------------------------------

STACKED = {"P": "layer", "L": "block", "J": "layer"}  # letters of leading dims, along which a parameter is repeated


def stacked_dims(declaration) -> int:
    return len(declaration.dims) - len(declaration.dims.lstrip("".join(STACKED)))


def layer_squares(cfg: Config, tree):
    """Sum of squares of each parameter, in each layer where it is stacked: arrays [], [P], [L] or [L, J], float32."""
    square = lambda d, x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(stacked_dims(d), x.ndim)))
    return jax.tree.map(square, model.declare(cfg.model), tree)


def places(cfg: Config) -> dict[str, int]:
    """Each parameter of each layer, like 'blocks.moe.attention.w_out_HUD, block 1', in the order of the forward pass.

    The value is its place when the arrays of `layer_squares` are laid end to end.
    """
    declared = sharding.named(model.declare(cfg.model))
    parts = {".".join(name.split(".")[:n]): None for name in declared for n in (1, 2)}
    rank = {part: number for number, part in enumerate(parts)}
    found = []
    for name, d in declared.items():
        first, second = (rank[".".join(name.split(".")[:n])] for n in (1, 2))
        for index in np.ndindex(d.shape[: stacked_dims(d)]):
            where = "".join(f", {STACKED[letter]} {i}" for letter, i in zip(d.dims, index, strict=False))
            # A block is passed from end to end before the next one: its number counts more than the parameter's.
            found.append((first, index[:1], second, index[1:], len(found), name + where))
    return {name: number for *_, number, name in sorted(found)}


def not_finite(cfg: Config, grads):
    """Whether the gradient of each of `places` holds a NaN or an infinity, or is so large that its norm does."""
    squares = [x.reshape(-1) for x in jax.tree.leaves(layer_squares(cfg, grads))]
    return ~jnp.isfinite(jnp.concatenate(squares)[np.array(list(places(cfg).values()))])


def layer_norms(cfg: Config, mesh: Mesh):
    """Compile fn(state, batch) -> norms of gradient, update and parameter, each {name: one, or one a layer}.

    The step that trains is another program: asking changes no result, and costs a forward and a backward pass.
    """
    updates_of = updates(cfg, mesh)

    def norms(state: TrainState, batch):
        _, grads, changes, _ = updates_of(state, batch)
        of = lambda tree: jax.tree.map(jnp.sqrt, layer_squares(cfg, tree))
        return {"gradient": of(grads), "update": of(changes), "parameter": of(state.params)}

    compiled = ordered.jit(norms, mesh, out_shardings=NamedSharding(mesh, P()))

    def named(state: TrainState, batch) -> dict[str, dict]:
        trees = compiled(state, batch)  # a dict that leaves `jit` is in the order of the alphabet
        return {kind: sharding.named(trees[kind]) for kind in ("gradient", "update", "parameter")}

    return named


def noise_scale(cfg: Config, mesh: Mesh):
    """Compile fn(params, host_batch, step) -> the simple noise scale of this batch, in tokens, and what it is made of.

    The gradient of each accumulation pass (of each half, where there is one pass) stands for the smaller batch, their
    mean for the larger. One batch says little: average gradient_square and noise_square over many, then divide.
    Raises: UserError if the batch cannot be cut in two.
    Source: McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    split = fit.split_batch(cfg)
    pieces = max(split.accumulation, 2)
    B = cfg.data.batch_size
    if B // split.shards % pieces:
        raise UserError(
            f"the {B // split.shards} sequences of a batch shard "
            f"(data.batch_size={B} / {split.shards} shards) cannot be cut in {pieces}; "
            f"use a multiple of {pieces * split.shards} sequences"
        )
    loss_and_grads = pipeline.loss_and_grads(replace(cfg, **{"data.batch_size": B // pieces}), mesh)
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
    """Noise scale from |gradient|^2 of the pieces of a batch, and of the whole. Source: arXiv:1812.06162, A.1."""
    small, big = float(np.mean(small_tokens)), float(np.sum(small_tokens))
    small_square = float(np.average(small_squares, weights=small_tokens))
    gradient_square = (big * big_square - small * small_square) / (big - small)  # equation A.2, first half
    noise_square = (small_square - big_square) / (1 / small - 1 / big)  # trace of one token's covariance
    scale = noise_square / gradient_square if gradient_square > 0 else float("inf")  # all noise, as far as is seen
    return {"gradient_square": gradient_square, "noise_square": noise_square, "noise_scale_tokens": scale}
