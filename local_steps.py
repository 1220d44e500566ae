"""Local steps (DiLoCo): each replica trains alone for some steps, then all replicas take an outer step together.

A replica is one index of the mesh axis `data`. It has its own parameters and moments, and runs the training step of a
mesh with data=1, so its program cannot communicate with other replicas. After a number of steps (`optim.outer`),
the replicas exchange the outer gradient: how much their steps changed the parameters, averaged over replicas. SGD with
Nesterov momentum then updates the outer parameters, and every replica continues from them. The outer parameters are
those that a checkpoint stores as `params`, so evaluation, generation and export read them. With several fragments, the
replicas exchange one part of the layers at a time.
Sources: DiLoCo, arXiv:2311.08105, algorithm 1; Streaming DiLoCo, arXiv:2501.18512, section 2.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sharding
from compile import ordered
from config import Config, MeshConfig, replace
from config.fields import parse_outer
from sharding import DATA, as_tuple, psum, vary
from utils import UserError

LAYERS = "PLI"  # letters of leading dims along which layers, or blocks of layers, are stacked; see `model.py`


def check(cfg: Config) -> None:
    """Raises: UserError for settings that do not work with local steps."""
    asked = f"optim.outer={cfg.optim.outer!r}"
    refused = {
        f"{asked} needs several replicas; use a mesh with data=2 or more, not {cfg.mesh}": cfg.mesh.data == 1,
        f"{asked}: the replicas' parameters differ, so they cannot share the shards of optim.shard_over_data; "
        "remove one of the two settings": cfg.optim.shard_over_data,
        f"{asked} has no gradient statistics; remove --run.gradient_stats_every": cfg.run.gradient_stats_every,
        f"{asked}: --replay repeats only steps of a run without local steps": cfg.run.replay,
    }
    for why, applies in refused.items():
        if cfg.optim.outer and applies:
            raise UserError(why)


def replica_config(cfg: Config, number: int = 0) -> Config:
    """Return the settings of one replica. Its seed, of which a step uses only the dropout keys, differs by replica."""
    one = {"mesh": MeshConfig(**cfg.mesh.sizes | {DATA: 1}), "optim.outer": "", "run.seed": cfg.run.seed + number}
    return replace(cfg, **one, **{"data.batch_size": cfg.data.batch_size // cfg.mesh.data})


# The state ------------------------------------------------------------------------------------------------------------


def with_replicas(state, count: int):
    """Add the states of `count` replicas, all equal to `state`, which keeps the outer parameters and their momentum.

    Shapes: each array of a replica [..] -> [R, ..], R = count, sharded over DATA. All replicas share the step number.
    """
    stack = lambda x: jnp.broadcast_to(x, (count, *x.shape))
    momentum = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), state.params)
    return state.replace(optimizer=momentum, replicas=jax.tree.map(stack, state.replace(step=None)))


def with_replica_shardings(state):
    """Return the shardings of `with_replicas` for the shardings of a state."""
    stack = lambda place: NamedSharding(place.mesh, P(DATA, *place.spec))
    return state.replace(optimizer=state.params, replicas=jax.tree.map(stack, state.replace(step=None)))


def is_split(spec: P) -> bool:
    return bool(spec) and DATA in as_tuple(spec[0])


def local_part(x, mesh: Mesh):
    """Return the part of an array, or of a ShapeDtypeStruct, that the devices of one replica's mesh hold. No copy."""
    spec, count = x.sharding.spec, x.sharding.mesh.shape[DATA]
    shape, place = (x.shape[0] // count, *x.shape[1:]) if is_split(spec) else x.shape, NamedSharding(mesh, spec)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)
    held = [one.data for one in x.addressable_shards if one.device in place.device_set]
    return jax.make_array_from_single_device_arrays(shape, place, held)


def joined(mesh: Mesh, *parts):
    """Return the array on the whole mesh whose `local_part`s are `parts`, those of this process's replicas. No copy."""
    x, spec = parts[0], parts[0].sharding.spec
    shape = (x.shape[0] * mesh.shape[DATA], *x.shape[1:]) if is_split(spec) else x.shape
    held = [one.data for part in parts for one in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), held)


# The programs ---------------------------------------------------------------------------------------------------------


def replica_step(step: Callable, mesh: Mesh, places, options: dict | None):
    """Compile fn(state, step number, batch) -> (state, step number, metrics) of one replica, with R = 1.

    step  fn(state, batch) -> (state, metrics), without the leading dim
    """

    def of_replica(state, number, batch):
        state, metrics = step(jax.tree.map(lambda x: x[0], state).replace(step=number), batch)
        state, number = state.replace(step=None), state.step
        state, metrics = jax.tree.map(lambda x: x[None], (state, metrics))
        return state, number, metrics

    here = jax.tree.map(lambda place: NamedSharding(mesh, place.spec), places)
    out = here, NamedSharding(mesh, P()), NamedSharding(mesh, P(DATA))
    return ordered.jit(of_replica, mesh, donate_argnums=0, out_shardings=out, compiler_options=options)


def outer_step(cfg: Config, mesh: Mesh, declared, fragment: int = 0):
    """Compile fn(params, momentum, replicas' params) -> the same after the outer step of a fragment. All are donated.

    Fragment f of n has the layers f, f + n, f + 2n, .. of every stage, and the first also has all other parameters.
    Sends over DATA: 2 (n - 1)/n of the fragment's parameters in float32, n = replicas.
    """
    o, count = parse_outer(cfg.optim.outer), cfg.mesh.data

    def update(d, param, momentum, own):
        stacked = d.dims[0] in LAYERS
        some = slice(fragment, None, o.fragments if stacked else None)
        if fragment >= (len(param) if stacked else 1):
            return param, momentum, own
        before = param[some].astype(jnp.float32)
        gradient = psum(before - own[0, some].astype(jnp.float32), DATA) / count
        speed = o.momentum * momentum[some] + gradient
        after = (before - o.lr * (gradient + o.momentum * speed)).astype(param.dtype)
        own = own.at[0, some].set(vary(after, DATA))
        return param.at[some].set(after), momentum.at[some].set(speed), own

    def local(*trees):
        new = [update(*leaves) for leaves in zip(*map(jax.tree.leaves, (declared, *trees)), strict=True)]
        return tuple(jax.tree.unflatten(jax.tree.structure(trees[0]), some) for some in zip(*new, strict=True))

    specs = sharding.specs(declared)
    specs = specs, specs, jax.tree.map(lambda spec: P(DATA, *spec), specs)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return ordered.jit(mapped, mesh, donate_argnums=(0, 1, 2), out_shardings=places)


class ReplicaMetric:
    """A metric of each replica, [R, ..]. It converts to the mean over replicas, or to the maximum of integers and
    booleans. Only this conversion communicates, and makes the replicas wait for each other."""

    def __init__(self, x_R: jax.Array, merge: Callable):
        self.x_R, self.merge = x_R, merge

    @functools.cached_property
    def value(self) -> np.ndarray:
        return np.asarray(self.merge(self.x_R))

    def __array__(self, dtype=None, copy=None):
        return self.value.astype(dtype or self.value.dtype)

    def __float__(self):
        return float(self.value)

    def __int__(self):
        return int(self.value)


class LocalSteps:
    """The training step of a run with local steps: lower, compile and call it like that of `optimizer.train_step`."""

    def __init__(self, cfg: Config, mesh: Mesh, step_of: Callable, declared, places, options: dict | None):
        """step_of: fn(settings of a replica, its mesh) -> its step. places: shardings of the replicas' states."""
        check(cfg)
        mine = [number for number, devices in enumerate(mesh.devices)
                if any(device.process_index == jax.process_index() for device in devices.flat)]  # fmt: skip
        self.cfg, self.mesh, n = cfg, mesh, parse_outer(cfg.optim.outer).fragments
        self.meshes = [Mesh(mesh.devices[n : n + 1], mesh.axis_names, axis_types=mesh.axis_types) for n in mine]
        self.steps = [replica_step(step_of(replica_config(cfg, number), one), one, places, options)
                      for number, one in zip(mine, self.meshes, strict=True)]  # fmt: skip
        self.outer = [outer_step(cfg, mesh, declared, fragment) for fragment in range(n)]
        combine = lambda x_R: jnp.mean(x_R, 0) if jnp.issubdtype(x_R.dtype, jnp.floating) else jnp.max(x_R, 0)
        self.merge = ordered.jit(combine, mesh, out_shardings=NamedSharding(mesh, P()))
        self.taken: tuple[Any, int] = (None, 0)  # the last step number, on the devices and on the host

    def arguments(self, state, batch) -> list:
        """Return the arguments of each replica's step. Get all before a step runs, because a step donates its state."""
        part = lambda mesh: jax.tree.map(lambda x: local_part(x, mesh), (state.replicas, state.step, batch))
        return [part(mesh) for mesh in self.meshes]

    def lower(self, state, batch):
        self.steps = [step.lower(*some) for step, some in zip(self.steps, self.arguments(state, batch), strict=True)]
        self.outer = [step.lower(state.params, state.optimizer, state.replicas.params) for step in self.outer]
        return self

    def compile(self):
        self.steps = [ordered.compile(*both) for both in zip(self.steps, self.meshes, strict=True)]
        self.outer = [ordered.compile(step, self.mesh) for step in self.outer]
        return self

    def as_text(self) -> str:
        """Return the text of the program of a replica."""
        return self.steps[0].as_text()

    def __call__(self, state, batch):
        number = self.taken[1] if state.step is self.taken[0] else int(state.step)  # int() waits for the devices
        parts = [step(*some) for step, some in zip(self.steps, self.arguments(state, batch), strict=True)]
        replicas, step, metrics = jax.tree.map(functools.partial(joined, self.mesh), *parts)
        state, self.taken = state.replace(replicas=replicas, step=step), (step, number + 1)
        for outer in self.due(number + 1):
            params, momentum, own = outer(state.params, state.optimizer, state.replicas.params)
            state = state.replace(params=params, optimizer=momentum, replicas=state.replicas.replace(params=own))
        return state, {name: ReplicaMetric(x_R, self.merge) for name, x_R in metrics.items()}

    def due(self, taken: int) -> list[Callable]:
        """Return the outer steps after step `taken`: those of one fragment, or after the last step of all."""
        every, _, _, n = parse_outer(self.cfg.optim.outer)
        return [outer for fragment, outer in enumerate(self.outer, 1)
                if taken == self.cfg.run.steps or taken % every == fragment * every // n % every]  # fmt: skip
