"""AdamW as an optax chain, its learning-rate schedule, and one training step.

The chain runs outside the `shard_map`, under `jit`, on whole (sharded) arrays: so the global norm that clipping needs
is the norm of the whole gradient, on any mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import model
import pipeline
import sharding
from utils import Config


@sharding.weights
class TrainState:
    """All that a step changes. The data cursor is `step` itself."""

    params: Any
    optimizer: Any  # optax state
    step: Any  # int32, steps taken


def learning_rate(cfg: Config) -> optax.Schedule:
    """Learning rate of each step, counted from 0: linear warm-up, then cosine decay, or a plateau with a linear end.

    The first step is already above 0, step warmup_steps - 1 has the peak, the last step final_lr times the peak.
    Source of the plateau: WSD, arXiv:2404.06395.
    """
    o, steps = cfg.optim, cfg.run.steps
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


def adamw(cfg: Config) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with decoupled decay (arXiv:1711.05101)."""
    o = cfg.optim
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm) if o.clip_norm else optax.identity(),
        optax.scale_by_adam(o.beta1, o.beta2, o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=decay_mask(model.declare(cfg.model))),
        optax.scale_by_learning_rate(learning_rate(cfg)),
    )


def update_selection_bias(cfg: Config, params, tokens_per_expert_LE):
    """Raise the bias of experts that saw fewer tokens than the mean, lower that of the others, by a fixed step.

    Source: arXiv:2408.15664, algorithm 1; the load is that of the global batch.
    """
    if not cfg.model.balance_rate or not cfg.model.n_experts:
        return params
    mean_LE = jnp.mean(tokens_per_expert_LE, axis=-1, keepdims=True)
    step_LE = cfg.model.balance_rate * jnp.sign(mean_LE - tokens_per_expert_LE)
    return sharding.map_named(lambda name, p: p + step_LE if name.endswith("bias_E") else p, params)


def init(cfg: Config, mesh: Mesh) -> TrainState:
    """The state at step 0. Moments lie on the mesh as their parameters do."""
    params = sharding.init(model.declare(cfg.model), mesh, cfg.run.seed)
    moments = jax.jit(adamw(cfg).init, out_shardings=state_shardings(cfg, mesh).optimizer)(params)
    return TrainState(params, moments, jax.device_put(jnp.int32(0), NamedSharding(mesh, P())))


def state_shapes(cfg: Config) -> TrainState:
    """ShapeDtypeStruct of every array in the state; no device is touched."""
    params = sharding.shapes(model.declare(cfg.model))
    return TrainState(params, jax.eval_shape(adamw(cfg).init, params), jax.ShapeDtypeStruct((), jnp.int32))


def state_shardings(cfg: Config, mesh: Mesh) -> TrainState:
    """Where every array of the state lies: what optax keeps per parameter as the parameter, the rest everywhere."""
    params = jax.tree.map(lambda d: NamedSharding(mesh, d.spec), model.declare(cfg.model))
    everywhere = NamedSharding(mesh, P())
    shapes = state_shapes(cfg)
    moments = optax.tree_map_params(
        adamw(cfg), lambda _, sharding: sharding, shapes.optimizer, params, transform_non_params=lambda _: everywhere
    )
    return TrainState(params, moments, everywhere)


def train_step(cfg: Config, mesh: Mesh):
    """Compile fn(state, batch) -> (state, metrics). The old state's memory is reused: do not touch it again.

    Metrics add to those of `model.loss`: loss, grad_norm (before clipping), lr.
    """
    chain, rate, loss_and_grads = adamw(cfg), learning_rate(cfg), pipeline.loss_and_grads(cfg, mesh)

    def step(state: TrainState, batch):
        loss, metrics, grads = loss_and_grads(state.params, batch, state.step)
        updates, moments = chain.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        if "tokens_per_expert" in metrics:
            params = update_selection_bias(cfg, params, metrics["tokens_per_expert"])
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": rate(state.step)}
        return TrainState(params, moments, state.step + 1), metrics

    shardings = state_shardings(cfg, mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))
