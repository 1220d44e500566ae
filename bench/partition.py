"""Partition one stack of layers in four ways, each written in three ways, and compare the compiled programs.

The four partitionings are those of section 2.2 of the T5X paper (arXiv:2203.17189). Parameters are sharded over
`model` (1D) or over `data` and `model` (2D). Between layers, activations are sharded over `data` (1D) or over both
(2D). Each is written with explicit sharding in types, with sharding constraints, and with `shard_map`.

With `--step` the programs are two training steps of one model: `bench/explicit.py`, and this trainer's.

Bytes and seconds are for one device and one step. GB = 1e9 bytes, GiB = 2^30.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import tyro
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import model
import optimizer
import parameters
import pipeline
import sharding
from bench import explicit
from compile import ledger
from config import Config, preset, replace
from devices import use_devices
from plan import planner
from plan.chips import hardware
from plan.simulate import replayed, simulator
from plan.trace import compiled
from utils import UserError, exit_status

HELP = """e.g. python -m bench.partition
     python -m bench.partition --topology v5e:4x4
     python -m bench.partition --step --topology v5e:4x4 --mesh fsdp=16

Partition one stack of dense layers in four ways, each written in three ways, and compare the compiled programs.

Without --topology, eight simulated devices run small programs, and the results are compared with one device.

With --topology, larger programs are compiled for a TPU slice and simulated: 7 minutes on 2 cores, needs no TPU.

With --step, compare two training steps of dense_124m: explicit sharding under jit, and this trainer's shard_map."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stack, which computes x + tanh(x @ w_in) @ w_out in each layer."""

    layers: int
    batch: int
    seq_len: int
    width: int
    hidden: int
    dtype: str

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        return {"in": (self.layers, self.width, self.hidden), "out": (self.layers, self.hidden, self.width)}

    @property
    def input(self) -> tuple[int, ...]:
        return self.batch, self.seq_len, self.width


SMALL = Sizes(layers=4, batch=8, seq_len=12, width=64, hidden=192, dtype="float32")
LARGE = Sizes(layers=8, batch=64, seq_len=2048, width=4096, hidden=16384, dtype="bfloat16")


# Logical axis names ---------------------------------------------------------------------------------------------------

WEIGHTS = {"in": ("layers", "w_width", "w_hidden"), "out": ("layers", "w_hidden", "w_width")}
ACTIVATIONS, HIDDEN = ("batch", "position", "width"), ("batch", "position", "hidden")


def rules(params: int, activations: int) -> dict[str, str | None]:
    """Map logical axis names to mesh axes; names that are missing are not sharded.

    params       1: weights are sharded over `model`; 2: also over `data`, as in FSDP
    activations  1: between layers, activations are sharded over `data`; 2: also over `model`
    """
    return {"batch": "data", "hidden": "model", "w_hidden": "model", "w_width": "data" if params == 2 else None,
            "width": "model" if activations == 2 else None}  # fmt: skip


def spec(table: dict, names: tuple[str, ...]) -> P:
    """Translate the logical names of an array's dims into a PartitionSpec."""
    return P(*(table.get(name) for name in names))


# The same loss, written in three ways ---------------------------------------------------------------------------------


def stack_loss(layer):
    """Return fn(w, x, y) -> the loss of a stack of layers, which the backward pass computes again."""

    def loss(w, x_BTD, y_BTD):
        out_BTD, _ = jax.lax.scan(jax.checkpoint(layer), x_BTD, w)
        return jnp.mean(jnp.float32(out_BTD - y_BTD) ** 2)

    return loss


def plain_layer(x_BTD, w):
    """A layer of the program for one device. All other versions compute the same."""
    return x_BTD + jnp.tanh(x_BTD @ w["in"]) @ w["out"], None


def constrained_loss(table: dict, mesh: Mesh):
    """Auto axes: the compiler chooses every sharding, and constraints pin some of them."""
    pin = lambda x, names: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(table, names)))

    def layer(x_BTD, w):
        hidden_BTF = pin(jnp.tanh(x_BTD @ w["in"]), HIDDEN)
        return pin(x_BTD + hidden_BTF @ w["out"], ACTIVATIONS), None

    return stack_loss(layer)


def explicit_loss(table: dict, mesh: Mesh):
    """Explicit axes: shardings are part of the types. An operation whose result is ambiguous needs `out_sharding`."""
    gathered = {"in": P(None, "model"), "out": P("model", None)}

    def layer(x_BTD, w):
        w = {name: jax.sharding.reshard(one, gathered[name]) for name, one in w.items()}
        whole_BTD = jax.sharding.reshard(x_BTD, P("data", None, None))
        hidden_BTF = jnp.tanh(jnp.einsum("btd,df->btf", whole_BTD, w["in"], out_sharding=spec(table, HIDDEN)))
        return x_BTD + jnp.einsum("btf,fd->btd", hidden_BTF, w["out"], out_sharding=spec(table, ACTIVATIONS)), None

    return stack_loss(layer)


def hand_written_loss(table: dict, mesh: Mesh):
    """shard_map: the program of one device, with every collective written out."""
    two_params, two_acts = table["w_width"] == "data", table["width"] == "model"
    w_specs, x_spec = {name: spec(table, names) for name, names in WEIGHTS.items()}, spec(table, ACTIVATIONS)

    def layer(x_bTd, w):
        w_in, w_out = w["in"], w["out"]
        if two_params:
            w_in = jax.lax.all_gather(w_in, "data", axis=0, tiled=True)
            w_out = jax.lax.all_gather(w_out, "data", axis=1, tiled=True)
        x_bTD = jax.lax.all_gather(x_bTd, "model", axis=2, tiled=True) if two_acts else x_bTd
        partial_bTD = jnp.tanh(x_bTD @ w_in) @ w_out
        if two_acts:
            return x_bTd + jax.lax.psum_scatter(partial_bTD, "model", scatter_dimension=2, tiled=True), None
        return x_bTd + jax.lax.psum(partial_bTD, "model"), None

    def loss(w, x_bTd, y_bTd):
        out_bTd, _ = jax.lax.scan(jax.checkpoint(layer), x_bTd, w)
        entries = mesh.size // (1 if two_acts else mesh.shape["model"]) * out_bTd.size
        partial = jnp.sum(jnp.float32(out_bTd - y_bTd) ** 2) / entries
        return jax.lax.psum(partial, ("data", "model") if two_acts else "data")

    return jax.shard_map(loss, mesh=mesh, in_specs=(w_specs, x_spec, x_spec), out_specs=P())


@dataclass(frozen=True)
class Way:
    """One way to write the program."""

    loss: Callable[[dict, Mesh], Callable]  # rules and mesh -> the loss function
    axis_type: AxisType


WAYS = {
    "explicit": Way(explicit_loss, AxisType.Explicit),
    "constraints": Way(constrained_loss, AxisType.Auto),
    "shard_map": Way(hand_written_loss, AxisType.Auto),
}
PARTITIONINGS = [(params, activations) for params in (1, 2) for activations in (1, 2)]


# Compiling and comparing ----------------------------------------------------------------------------------------------


def gradient(way: Way, table: dict, mesh: Mesh):
    """Return the jitted loss and gradient. The gradients are sharded like the weights."""
    places = {name: NamedSharding(mesh, spec(table, names)) for name, names in WEIGHTS.items()}
    given = None if way.axis_type == AxisType.Explicit else (NamedSharding(mesh, P()), places)
    return jax.jit(jax.value_and_grad(way.loss(table, mesh)), out_shardings=given)


def shapes(sizes: Sizes, table: dict, mesh: Mesh):
    """Return the weights, input and targets as sharded ShapeDtypeStructs."""
    place = lambda names: NamedSharding(mesh, spec(table, names))
    describe = lambda shape, names: jax.ShapeDtypeStruct(shape, sizes.dtype, sharding=place(names))
    weights = {name: describe(shape, WEIGHTS[name]) for name, shape in sizes.weights.items()}
    return weights, *(describe(sizes.input, ACTIVATIONS),) * 2


def arrays(sizes: Sizes):
    """Draw weights, input and targets."""
    rng = np.random.default_rng(0)
    draw = lambda shape, scale: np.float32(rng.normal(size=shape) * scale)
    weights = {name: draw(shape, shape[1] ** -0.5) for name, shape in sizes.weights.items()}
    return weights, draw(sizes.input, 1), draw(sizes.input, 1)


def worst_error(found, wanted, prefix: str = "w_") -> tuple[float, str]:
    """Return the largest error of the loss or a gradient, relative to its largest entry, and its name."""
    named = lambda result: {"loss": result[0]} | {f"gradient of {prefix}{name}": one for name, one in result[1].items()}
    error = lambda a, b: float(np.abs(np.float32(a) - np.float32(b)).max() / np.abs(np.float32(b)).max())
    return max((error(named(found)[name], one), name) for name, one in named(wanted).items())


def make_mesh(devices, data: int, model: int, axis_type: AxisType) -> Mesh:
    arranged = mesh_utils.create_device_mesh((data, model), devices)
    return Mesh(arranged, ("data", "model"), axis_types=(axis_type, axis_type))


def sizes_of(program, found: ledger.Ledger, topology: hardware.Topology | None) -> dict[str, float]:
    """Return the bytes that a device sends and exposes, and its peak memory; the CPU compiler reports no peak."""
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return {"wire_bytes": found.total.wire_bytes, "exposed_bytes": found.total.exposed_bytes,
            "peak_bytes": memory.peak_memory_in_bytes if topology else held}  # fmt: skip


def measure(way: Way, params: int, activations: int, sizes: Sizes, devices, topology: hardware.Topology | None,
            data: int = 2, model: int = 4) -> dict:  # fmt: skip
    """Compile one program and return its numbers. On simulated devices, also run it and compare it with one device."""
    table, mesh = rules(params, activations), make_mesh(devices, data, model, way.axis_type)
    described = shapes(sizes, table, mesh)
    with jax.set_mesh(mesh):
        function, begin = gradient(way, table, mesh), time.perf_counter()
        program, _ = compiled.compile_lowered(function.lower(*described))
        compile_s = time.perf_counter() - begin
    text = program.as_text()
    found = ledger.read(text, mesh)
    row = {
        "params": params, "activations": activations, "compile_s": compile_s, **sizes_of(program, found, topology),
        "collectives": {kind: int(total.count) for kind, total in found.totals_by("kind").items()},
    }  # fmt: skip
    if topology:
        played = simulator.replay(text, mesh, replayed.machine(topology, mesh))
        return row | {"step_s": played.seconds, "seconds": dict(played.causes)}
    placed = [jax.device_put(x, s.sharding) for x, s in
              zip(jax.tree.leaves(arrays(sizes)), jax.tree.leaves(described), strict=True)]  # fmt: skip
    result = program(*jax.tree.unflatten(jax.tree.structure(described), placed))
    error, name = worst_error(result, jax.jit(jax.value_and_grad(stack_loss(plain_layer)))(*arrays(sizes)))
    return row | {"worst_error": error, "worst": name}


# The whole training step ----------------------------------------------------------------------------------------------

STEPS = ("explicit", "shard_map")
SMALL_MODEL = {
    "model.vocab_size": 96, "model.d_model": 24, "model.n_layers": 3, "model.n_heads": 4, "model.n_kv_heads": 2,
    "model.d_head": 8, "model.d_ff": 40, "model.precision": "float32", "data.seq_len": 16, "data.batch_size": 8,
}  # fmt: skip


def step_config(mesh: str, topology: hardware.Topology | None) -> Config:
    """Return the settings of both steps: dense_124m, or a small model of its kind for simulated devices."""
    cfg = preset("dense_124m", mesh=mesh, **{"work.remat": "full"} | ({} if topology else SMALL_MODEL))
    explicit.check(cfg)
    device_tokens = cfg.data.tokens_per_step // (cfg.mesh.data * cfg.mesh.fsdp)
    cfg = replace(cfg, **{"work.loss_chunk": device_tokens // explicit.CHUNKS})  # both store as many logits at a time
    return planner.plan(cfg, topology).cfg


def draw_batch(cfg: Config) -> dict[str, np.ndarray]:
    """Draw a batch with two documents in each sequence, and random target weights."""
    rng, (B, T) = np.random.default_rng(0), (cfg.data.batch_size, cfg.data.seq_len)
    cut_B1, place_BT = rng.integers(1, T, (B, 1)), np.tile(np.arange(T), (B, 1))
    second_BT = place_BT >= cut_B1
    draw = lambda: rng.integers(0, cfg.model.vocab_size, (B, T), dtype=np.int32)
    return {"tokens_BT": draw(), "targets_BT": draw(), "positions_BT": np.int32(place_BT - second_BT * cut_B1),
            "segments_BT": np.int32(1 + second_BT), "weights_BT": np.float32(rng.uniform(0.5, 2, (B, T)))}  # fmt: skip


def step_mesh(way: str, cfg: Config, topology: hardware.Topology | None) -> Mesh:
    mesh = compiled.topology_mesh(cfg.mesh, str(topology)) if topology else sharding.make_mesh(cfg.mesh)
    return explicit.explicit_mesh(mesh) if way == "explicit" else mesh


def step_error(way: str, cfg: Config) -> tuple[float, str]:
    """Compute loss and gradients on simulated devices; return the worst error against this trainer on one device."""
    alone = replace(cfg, mesh="data=1")
    one, mesh, batch = sharding.make_mesh(alone.mesh), step_mesh(way, cfg, None), draw_batch(cfg)
    w = jax.tree.map(np.asarray, parameters.init(model.declare(cfg.model), one, 0))
    value, _, grads = pipeline.loss_and_grads(alone, one)(w, batch, 0)
    if way == "explicit":
        state, described = explicit.shapes(cfg, mesh)
        placed = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), (w, batch), (state.params, described))
        with jax.set_mesh(mesh):
            found = jax.jit(explicit.loss_and_grads(cfg))(*placed)
    else:
        ours, _, our_grads = pipeline.loss_and_grads(cfg, mesh)(w, batch, 0)
        found = ours, our_grads
    named = lambda result: (result[0], sharding.flatten_named(result[1]))
    return worst_error(named(found), named((value, grads)), prefix="")


def measure_step(way: str, cfg: Config, topology: hardware.Topology | None) -> dict:
    """Compile a training step and return its numbers. On simulated devices, also compare it with one device."""
    mesh, begin = step_mesh(way, cfg, topology), time.perf_counter()
    if way == "explicit":
        described = explicit.shapes(cfg, mesh)
        with jax.set_mesh(mesh):
            program, _ = compiled.compile_lowered(explicit.train_step(cfg, mesh).lower(*described))
    else:
        program, _ = compiled.compile_lowered(optimizer.train_step(cfg, mesh).lower(*compiled.shapes(cfg, mesh)))
    compile_s, text = time.perf_counter() - begin, program.as_text()
    found = ledger.read(text, mesh, compiled.shares(cfg, text))
    row = {
        "way": way, "compile_s": compile_s, **sizes_of(program, found, topology),
        "sent": {kind: total.wire_bytes for kind, total in found.totals_by("kind").items()},
    }  # fmt: skip
    if topology:
        played = replayed.simulate(cfg, topology, mesh, text)
        return row | {"step_s": played.seconds, "seconds": dict(played.causes)}
    error, name = step_error(way, cfg)
    return row | {"worst_error": error, "worst": name}


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    topology: str = ""  # a TPU slice of 16 chips to compile for, such as v5e:4x4 or v4:4x2x2; "": simulated devices
    json: bool = False  # print one line of JSON per program instead of a table
    step: bool = False  # compare two training steps of dense_124m, or of a small model without --topology
    mesh: str = ""  # with --step: the axes data, fsdp and tensor; "": fsdp=16 with --topology, else fsdp=4,tensor=2


def show(rows: list[dict], topology: hardware.Topology | None) -> None:
    """Print the programs as a table: one row each."""
    whole = "sent" in rows[0]  # training steps
    heads = [] if whole else ["parameters", "activations"]
    heads += ["written with", "sent by kind" if whole else "collectives", "sent", "exposed", "peak", "compile"]
    heads += ["simulated step"] if topology else ["worst error"]
    table = rich.table.Table(*heads, box=None, pad_edge=False)
    size = (lambda n: f"{n / 1e9:.2f} GB") if topology else (lambda n: f"{n:,.0f} B")
    for row in rows:
        counts = {kind: size(n) for kind, n in row["sent"].items()} if whole else row["collectives"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        last = f"{1e3 * row['step_s']:.0f} ms" if topology else f"{row['worst_error']:.1e} {row['worst']}"
        sizes = [size(row[name]) for name in ("wire_bytes", "exposed_bytes", "peak_bytes")]
        dims = () if whole else (f"{row['params']}D", f"{row['activations']}D")
        table.add_row(*dims, row["way"], kinds, *sizes, f"{row['compile_s']:.1f} s", last)
    rich.console.Console(width=170).print(table)


def report(row: dict, what: str, args: Arguments) -> None:
    """Print a program's JSON, or on stderr that it is done."""
    if args.json:
        print(json.dumps(row), flush=True)
    else:
        print(f"compiled {what}", file=sys.stderr, flush=True)


def compare_steps(args: Arguments, topology: hardware.Topology | None) -> None:
    if not topology:
        use_devices(8)
    cfg, rows = step_config(args.mesh or ("fsdp=16" if topology else "fsdp=4,tensor=2"), topology), []
    for way in STEPS:
        rows.append(measure_step(way, cfg, topology))
        report(rows[-1], f"the training step, {way}", args)
    if not args.json:
        show(rows, topology)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.partition", description=HELP, use_underscores=True)
    topology = hardware.Topology.parse(args.topology) if args.topology else None
    if args.mesh and not args.step:
        raise UserError(f"--mesh {args.mesh} applies only to the training step; add --step")
    if args.step:
        return compare_steps(args, topology)
    if topology and topology.devices != 16:
        raise UserError(f"topology {args.topology}: the mesh is data=4,model=4, and needs 16 chips; "
                        f"this slice has {topology.devices}; use v5e:4x4, v6e:4x4 or v5p:4x2x2")  # fmt: skip
    if topology:
        devices, sizes, data = compiled.topology_devices(topology), LARGE, 4
    else:
        use_devices(8)
        devices, sizes, data = jax.devices()[:8], SMALL, 2
    rows = []
    for params, activations in PARTITIONINGS:
        for name, way in WAYS.items():
            row = {"way": name} | measure(way, params, activations, sizes, devices, topology, data)
            rows.append(row)
            report(row, f"{params}D parameters, {activations}D activations, {name}", args)
    if not args.json:
        show(rows, topology)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
