"""Plan any JAX program: trace it and count what one device computes and sends, before you pay for accelerators.

Call `read(function, *shapes, mesh=mesh)`, or run `python -m plan.traced FILE:FUNCTION --mesh data=4,model=8`. HELP
explains how a file gives the shapes of its arguments.
"""

import collections
import contextlib
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from compile import ledger
from devices import use_devices
from plan.answer.show import link_lines, make_console, make_table, sum_collectives
from plan.chips import hardware
from plan.chips.units import amount
from plan.count.step import is_tpu
from plan.trace import compiled
from plan.trace.program import Program, abstract_mesh, argument_specs, read
from plan.trace.rows import COUNTED_ONCE
from plan.trace.user_file import load, shapes_of, user_errors
from utils import exit_status

__all__ = ["read"]

HELP = """e.g. python -m plan.traced docs/mlp.py:step --mesh data=4,model=8 --topology v5p:4x4x2

Trace a JAX program for a mesh that need not exist. Print what one device stores, computes and sends, and how long that
takes according to a roofline. In --mesh, use the program's names of the mesh axes, outermost first. A complete FILE:

    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def local_loss(weights, x):  # local shards
        w_up, w_down = weights
        y = jax.lax.psum(jax.nn.relu(x @ w_up) @ w_down, "model").astype(jnp.float32)
        return jax.lax.pmean(jnp.mean(y**2), "data")

    splits = ((P(None, "model"), P("model", None)), P("data", None))
    step = jax.value_and_grad(jax.shard_map(local_loss, in_specs=splits, out_specs=P()))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    arguments = ((shape(8192, 32768), shape(32768, 8192)), shape(16384, 8192))

FUNCTION is `step` here. `arguments` is a tuple of unsharded shapes, or a function that returns one; if it has another
name, pass --arguments NAME. An argument is sharded by its shape's `sharding`, or else by the in_specs of the first
shard_map it is passed to. A shard_map without mesh= uses --mesh, or the program makes its own mesh with the same axes.

The counts include matmuls, convolutions, Pallas kernels with a cost_estimate, and collectives inside shard_map. All
iterations of a loop are counted, but only the most expensive branch of a conditional. The roofline uses the bfloat16
peak. A trace lacks the collectives that the compiler adds for jit without shard_map. Use --compile to count them: it
compiles for simulated CPU devices, or for TPUs if --topology names TPUs. The exit status is 2 if the program cannot be
traced."""


@dataclass(frozen=True)
class Arguments:
    program: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE:FUNCTION")]
    mesh: str  # axes and their sizes, outermost first: data=4,model=8
    topology: str = ""  # the devices: v5p:4x4x2, v5e:4x4, h100:16 ...; empty: no times are printed
    arguments: str = "arguments"  # the variable in FILE that holds the shapes of FUNCTION's arguments
    compile: bool = False  # count in the compiled program instead of in the trace
    rows: int = 10  # number of operations to print, the most expensive first
    json: bool = False  # print only JSON, with all rows


# The compiled program -------------------------------------------------------------------------------------------------


def device_mesh(mesh: hardware.NamedMesh, topology: hardware.Topology | None, types: dict[str, AxisType]) -> Mesh:
    """Make the mesh from the devices of a TPU topology, which need not be attached, or from simulated CPU devices.

    types  of the axes that are not Auto
    """
    if topology and is_tpu(topology.chip):
        devices = compiled.topology_devices(topology)
    else:
        use_devices(mesh.devices)
        devices = jax.devices()[: mesh.devices]
    shape = tuple(mesh.sizes.values())
    arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(mesh.sizes), axis_types=tuple(types.get(axis, AxisType.Auto) for axis in mesh.sizes))


def compile_program(function, shapes: tuple, named: hardware.NamedMesh, topology: hardware.Topology | None) -> dict:
    """Compile function(*shapes) and return the ledger's counts.

    Raises: UserError if the function cannot be compiled or counted.
    """
    leaves, tree = jax.tree.flatten(shapes)
    shardings = [getattr(x, "sharding", None) for x in leaves]
    theirs = [one.mesh for one in shardings if isinstance(one, NamedSharding)]  # `jax.make_mesh` makes Explicit axes
    types = {axis: kind for one in theirs for axis, kind in zip(one.axis_names, one.axis_types, strict=True)}
    mesh, given = device_mesh(named, topology, types), [getattr(one, "spec", None) for one in shardings]
    with user_errors("compilation failed"), jax.set_mesh(mesh):
        bare = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        specs = [own or spec for own, spec in zip(given, argument_specs(function, bare), strict=True)]
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))
            for x, spec in zip(leaves, specs, strict=True)
        ]
        program = function if hasattr(function, "lower") else jax.jit(function)
        step, _ = compiled.compile_lowered(program.lower(*jax.tree.unflatten(tree, placed)))
        counted = ledger.read(step.as_text(), mesh)
    memory = step.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "flops": counted.flops,
        "wire_bytes": counted.total.wire_bytes,
        "unknown": counted.unknown,
        "sent": [
            {"axes": axes.split("*"), "kind": kind, "count": count, "wire_bytes": sent}
            for (axes, kind), (count, sent, _) in sum_collectives(counted.collectives, "axes", "kind").items()
        ],
        "rows": [dataclasses.asdict(one) for one in counted.collectives],
    }


# Printing -------------------------------------------------------------------------------------------------------------


def numbers(one: Program, topology: hardware.Topology | None) -> dict:
    """Return the numbers for one device and one call of the program as a dict."""
    seconds = one.seconds(topology)
    return {
        "mesh": str(one.mesh),
        "topology": topology and str(topology),
        "argument_bytes": one.argument_bytes,
        "flops": one.flops,
        "hbm_bytes": one.hbm_bytes,
        "wire_bytes": one.wire_bytes,
        "wire_by_axes": one.wire_by_axes,
        "sent": [
            {"axes": list(axes), "kind": kind, "wire_bytes": size}
            for (axes, kind), size in one.sent("axes", "kind").items()
        ],
        "seconds": seconds,
        "overlapped_s": seconds and max(seconds.values()),
        "exposed_s": seconds and sum(seconds.values()),
        "notes": notes(one),
        "rows": [dataclasses.asdict(row) for row in one.rows],
    }


def notes(one: Program) -> list[str]:
    """List what the numbers omit or assume, one line each."""
    lines, places = [], lambda rows: ", ".join(sorted({row.source for row in rows}))
    if unknown := [row for row in one.rows if row.unknown]:
        lines.append(f"kernels without a cost_estimate count as 0 FLOPs: {places(unknown)}")
    if loops := [row for row in one.rows if row.loop == COUNTED_ONCE]:
        lines.append(f"loops with an iteration count known only at run time count as 1 iteration: {places(loops)}")
    if branches := [row for row in one.rows if "larger of" in row.branch]:
        lines.append(f"conditionals count their more expensive branch: {places(branches)}")
    if one.reductions and one.mesh.devices > 1:
        lines.append(
            f"the trace does not show whether {one.reductions} reductions outside shard_map communicate; use --compile"
        )
    return lines


def print_program(one: Program, topology: hardware.Topology | None, most: int, console) -> None:
    """Print the totals, the bytes sent by axes and kind, the seconds, and the most expensive operations."""
    seconds = one.seconds(topology)
    console.print(f"mesh       {one.mesh}" + f" on {topology}" * bool(topology))
    for line in link_lines(one.mesh, topology):
        console.print(line)
    has = topology and topology.chip.memory_bytes
    capacity = f", which has {amount(has, 'bytes')}" if has else ""
    console.print(f"arguments  {amount(one.argument_bytes, 'bytes')} on each device{capacity}")
    console.print(f"FLOPs      {amount(one.flops, 'FLOPs')} on each device in one call")
    console.print(f"sent       {amount(one.wire_bytes, 'bytes')} by each device in one call")
    for note in notes(one):
        console.print(f"note       {note}", soft_wrap=True)
    if one.wire_bytes:
        print_sent([(axes, kind, size) for (axes, kind), size in one.sent("axes", "kind").items()], console)
    if seconds:
        table = make_table("seconds at full speed", "what", "time")
        for name, time in seconds.items():
            table.add_row(name, amount(time, "s"))
        table.add_section()
        table.add_row("all communication overlapped", amount(max(seconds.values()), "s"))
        table.add_row("all communication exposed", amount(sum(seconds.values()), "s"))
        console.print(table)
    print_largest(one, topology if seconds else None, most, console)


@dataclass
class Line:
    """The total cost of one source line in one call, forward and backward together."""

    count: float = 0
    flops: float = 0
    wire_bytes: float = 0
    seconds: float = 0


def costs_by_line(one: Program, topology: hardware.Topology | None) -> dict[tuple[str, str], Line]:
    """Sum a program's rows by (operation, source line), in decreasing order of seconds, FLOPs and bytes."""
    lines = collections.defaultdict(Line)
    for row in one.rows:
        line = lines[row.kind + f" over {'*'.join(row.axes)}" * bool(row.axes), row.source]
        line.count += row.count
        line.flops += row.total("flops")
        line.wire_bytes += row.total("wire_bytes")
        line.seconds += one.row_seconds(row, topology) if topology else 0
    size = lambda item: (item[1].seconds, item[1].flops, item[1].wire_bytes)
    return dict(sorted(lines.items(), key=size, reverse=True))


def print_largest(one: Program, topology: hardware.Topology | None, most: int, console) -> None:
    """Print the cost of the largest source lines, with times if a topology is given."""
    table = make_table("the most expensive operations", "what", "where", "count", "FLOPs", "sent", "time", words=2)
    for (what, place), line in list(costs_by_line(one, topology).items())[:most]:
        flops, sent = amount(line.flops or None, "FLOPs"), amount(line.wire_bytes or None, "bytes")
        time = amount(line.seconds if topology else None, "s")
        table.add_row(what, place, f"{line.count:,.6g}", flops, sent, time)
    console.print(table)


def print_sent(sent: list[tuple], console) -> None:
    table = make_table("sent by a device", "axes", "collective", "bytes", words=2)
    for axes, kind, size in sent:
        table.add_row("*".join(axes), kind, amount(size, "bytes"))
    console.print(table)


def print_compiled(found: dict, console) -> None:
    """Print the counts of a compiled program."""
    console.print(f"arguments  {amount(found['argument_bytes'], 'bytes')} on each device, as compiled")
    console.print(f"temporary  {amount(found['temp_bytes'], 'bytes')}")
    console.print(f"FLOPs      {amount(found['flops'], 'FLOPs')} on each device in one call")
    console.print(f"sent       {amount(found['wire_bytes'], 'bytes')} by each device in one call")
    for kernel, times in found["unknown"].items():
        console.print(f"note       {kernel}: this kernel declares no FLOPs; it runs {times:,.0f} times", soft_wrap=True)
    if found["sent"]:
        print_sent([(one["axes"], one["kind"], one["wire_bytes"]) for one in found["sent"]], console)


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m plan.traced", description=HELP, use_underscores=True)
    console = make_console(args.json)
    named = hardware.NamedMesh.parse(args.mesh)
    topology = hardware.Topology.parse(args.topology) if args.topology else None
    if topology:
        hardware.require_one_slice(topology)
        hardware.layout(named, topology)  # raises before the program is imported
    with contextlib.suppress(RuntimeError):  # tests have initialized their devices already
        jax.config.update("jax_num_cpu_devices", named.devices)  # for a file that makes its own mesh
    mesh = abstract_mesh(named, "tpu" if topology and is_tpu(topology.chip) else "cpu")
    function, arguments = load(args.program, args.arguments)
    shapes = shapes_of(arguments, mesh)
    if args.compile:
        results = compile_program(function, shapes, named, topology)
        print_compiled(results, console)
    else:
        with user_errors("tracing failed"):
            one = read(function, *shapes, mesh=mesh)
        one.check()
        results = numbers(one, topology)
        print_program(one, topology, args.rows, console)
    if args.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
