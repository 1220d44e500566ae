"""Simulate a TPU program that somebody else wrote, from its compiled text: the command `python -m plan.replay`.

HELP explains how to get the text. `simulator.py` is the simulator, and `live.py` estimates memory.
"""

import collections
import gzip
import itertools
import json
import lzma
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from compile import ledger
from compile.hlo import Program
from plan.answer.show import make_console, make_table, sum_collectives
from plan.chips import hardware
from plan.chips.units import amount
from plan.simulate import live, replayed, simulator
from utils import UserError, check_picture, exit_status

HELP = """e.g. python -m plan.replay step.hlo --topology v5p:4x4x4 --mesh fsdp=16,tensor=4

Simulate any scheduled TPU program from its text: seconds by cause, exposed communication by source line, peak memory.

FILE is the text of a compiled program; gzip and xz are fine. libtpu can compile without a TPU. Three ways to get it:

    python -m plan moe1b --topology v4:4x4x2 --compile --hlo step.hlo  # a step of this project
    open("step.hlo", "w").write(jax.jit(step).lower(*arguments).compile().as_text())
    XLA_FLAGS=--xla_dump_to=dump python train.py  # then FILE is dump/*jit_step*.after_codegen.txt

--topology must be the slice that it was compiled for, and --mesh the axes of the program's mesh, outermost first.

Without --mesh, the axes a, b, .. are inferred from the device groups of the collectives.

A loop needs a trip count that the compiler knows. A conditional always runs its longest branch."""


CAUSES = {simulator.MATMULS: "matmuls", simulator.OTHERS: "other operations", simulator.COPIES: "waiting for copies"}


@dataclass(frozen=True)
class Arguments:
    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    topology: str  # the TPU slice that the program was compiled for: v4:4x4x2, v5p:4x4x4, v5e:4x4, v6e:8x8 ..
    mesh: str = ""  # axes of the program's mesh and their sizes, outermost first: data=4,model=8; empty: inferred
    at_peak: bool = False  # matmuls run at the chip's peak FLOP/s, instead of the compiler's estimate
    latency_us: float = 0.0  # latency per link, in microseconds; about 1 on a TPU
    rows: int = 10  # number of source lines to print, those that take the most time first
    plot: str = ""  # draw the two most expensive computations, such as a layer's passes, to this png, svg or pdf file
    json: bool = False  # print only JSON, with all rows


def read_text(path: str) -> str:
    """Read a file that may be compressed with gzip or xz."""
    data = Path(path).read_bytes()
    magic = {b"\x1f\x8b": gzip.decompress, b"\xfd7": lzma.decompress}
    try:
        return magic.get(data[:2], bytes)(data).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text; pass the text of a program, not its protocol buffer") from error


def count_devices(text: str) -> int:
    """Return the number of devices that a program was compiled for.

    Raises: UserError if the text is not a scheduled TPU program.
    """
    header = text.partition("\n")[0]
    if not header.startswith("HloModule"):
        raise UserError("not a compiled program, whose text begins with HloModule; pass compiled.as_text()")
    if "is_scheduled=true" not in header:
        raise UserError("the program is not scheduled; pass compiled.as_text() or a dump *.after_codegen.txt, not "
                        "lowered.as_text() or *.before_optimizations.txt")  # fmt: skip
    if ":T(" not in text:
        raise UserError("the program was compiled for CPUs or GPUs, because its arrays are not tiled; compile it for a "
                        "TPU topology")  # fmt: skip
    if "_xla_megascale_transfer_type" in text:
        raise UserError("the program sends data between slices, whose network is not simulated; compile it for one "
                        "slice")  # fmt: skip
    number = lambda name: int((re.search(rf"\b{name}=(\d+)", header) or ["", 1])[1])
    if number("replica_count") > 1:
        raise UserError(f"the program has {number('replica_count')} replicas, as pmap makes; use jax.jit")
    return number("num_partitions")


def infer_mesh(program: Program, devices: int) -> hardware.NamedMesh:
    """Return the coarsest mesh along whose axes a, b, .. the device groups of all collectives lie.

    If there is none, the mesh has a single axis.
    """
    cuts = {1, devices}
    for one in (one for computation in program.computations.values() for one in computation.values()):
        for group in one.groups(devices) if "permute" not in one.opcode else ():
            cuts |= axis_boundaries(sorted(group))
    cuts = sorted(cuts)
    sizes = [high // low for low, high in itertools.pairwise(cuts)][::-1]
    if devices == 1 or len(sizes) > 26 or any(high % low for low, high in itertools.pairwise(cuts)):
        sizes = [devices]
    return hardware.NamedMesh(tuple(zip("abcdefghijklmnopqrstuvwxyz", sizes, strict=False)))


def axis_boundaries(group: list[int]) -> set[int]:
    """Return the strides at which a sorted group of devices begins and ends to use an axis: {4, 16} for 0, 4, 8, 12."""
    found = set()
    while len(group) > 1:
        step = group[1] - group[0]
        run = next((n for n in range(1, len(group)) if group[n] - group[n - 1] != step), len(group))
        found |= {step, step * run}
        group = group[::run]
    return found


def device_places(mesh, topology: hardware.Topology) -> np.ndarray:
    """Return the torus coordinates of each device in the mesh's order, as JAX arranges them, [device, torus axis].

    mesh  a `MeshConfig` or a `NamedMesh`
    """
    if mesh.devices == 1:
        return np.zeros((1, len(topology.shape)), int)
    return hardware.coordinates(mesh, topology).reshape(mesh.devices, -1)[:, : len(topology.shape)]


def reported_peak_bytes(path: str) -> int | None:
    """Return the memory that the compiler allocates, from the report that XLA writes beside a dumped program."""
    stem = re.match(r"(.*)\.(after_codegen|after_optimizations\w*)\.txt(\.gz)?$", path)
    report = Path(f"{stem[1]}.after_optimizations-memory-usage-report.txt") if stem else None
    if not report or not report.exists():
        return None
    found = re.search(r"Memory Space: default.*\nTotal bytes: (\d+)", report.read_text())
    return found and int(found[1])


def measure(args: Arguments) -> tuple[dict, simulator.Replay]:
    """Simulate a file. Returns the numbers, and the simulation for a plot."""
    topology, text = hardware.Topology.parse(args.topology), read_text(args.file)
    if topology.chip.key not in replayed.FLOPS_PER_CYCLE:
        raise UserError(f"topology {args.topology!r}: only {', '.join(replayed.FLOPS_PER_CYCLE)} can be simulated")
    try:
        return _measure(args, topology, text)
    except ValueError as error:  # a UserError is one, too
        raise UserError(f"{args.file}: {error}") from error


def _measure(args: Arguments, topology: hardware.Topology, text: str) -> tuple[dict, simulator.Replay]:
    devices = count_devices(text)
    if devices not in (1, topology.devices):  # a program for one device runs on any slice
        raise UserError(f"the program was compiled for {devices} devices (num_partitions={devices}), but {topology} "
                        f"has {topology.devices}; pass the topology that it was compiled for")  # fmt: skip
    program = Program(text)
    mesh = hardware.NamedMesh.parse(args.mesh) if args.mesh else infer_mesh(program, devices)
    if mesh.devices != devices:
        raise UserError(f"mesh {mesh} has {mesh.devices} devices, and the program was compiled for {devices}")
    counted = ledger.read(text, mesh.sizes)
    machine = replayed.machine_at(topology, topology.torus, device_places(mesh, topology), args.latency_us / 1e6)
    found, slow = (simulator.replay(text, mesh.sizes, machine, None, args.at_peak, cycles) for cycles in (False, True))
    reported, sent = reported_peak_bytes(args.file), sum_collectives(counted.collectives, "axes", "kind")
    return replayed.to_json(found) | {
        "program": program.name,
        "devices": devices,
        "topology": str(topology),
        "mesh": str(mesh),
        "mesh_inferred": not args.mesh,
        "peak_bytes": reported or live.peak_bytes(program),
        "peak_estimated": reported is None,
        "flops": counted.flops,
        "mfu": counted.flops / found.seconds / topology.chip.peak_flops_per_s if found.seconds else 0.0,
        "unknown": counted.unknown,
        "estimated_cycles": '"estimated_cycles":' in text,
        "by_cycles": {"step_s": slow.seconds, "other_s": slow.causes.get(simulator.OTHERS, 0.0)},
        "sent": [{"axes": axes, "kind": kind, "wire_bytes": size} for (axes, kind), (_, size, _) in sent.items()],
        "lines": seconds_by_line(found, counted),
        "unordered": ledger.unordered_pairs(text),
    }, found  # fmt: skip


def seconds_by_line(found: simulator.Replay, counted: ledger.Ledger) -> list[dict]:
    """Sum the seconds of each source line by cause, with the bytes that it sends; most seconds first."""
    lines = collections.defaultdict(lambda: dict(matmuls_s=0.0, other_s=0.0, exposed_s=0.0, wire_bytes=0.0))
    for name, timeline in found.played.items():
        for event in timeline.events:
            if event.lane == "core":
                causes = dict.fromkeys(CAUSES, "other_s") | {simulator.MATMULS: "matmuls_s"}
                cause = causes.get(event.what, "exposed_s")
                lines[event.source or "?"][cause] += found.times.get(name, 0) * (event.end - event.start)
    for one in counted.collectives:
        lines[one.source]["wire_bytes"] += one.count * one.wire_bytes
    total = lambda row: row["matmuls_s"] + row["other_s"] + row["exposed_s"]
    return [{"source": source} | row for source, row in sorted(lines.items(), key=lambda line: -total(line[1]))]


def print_result(numbers: dict, most: int, console) -> None:
    topology = hardware.Topology.parse(numbers["topology"])
    note = lambda text: console.print(text, soft_wrap=True)
    how = ", inferred from the device groups; name the axes with --mesh" * numbers["mesh_inferred"]
    devices = "1 device" if numbers["devices"] == 1 else f"the {numbers['devices']} devices"
    console.print(f"program    {numbers['program']} on {devices} of {topology}")
    note(f"mesh       {numbers['mesh']}{how}")
    flops = amount(numbers["flops"], "FLOPs")
    note(f"simulated  {amount(numbers['step_s'], 's')}; {flops} on each device are {numbers['mfu']:.1%} of the peak")
    origin = "estimated from the schedule" if numbers["peak_estimated"] else "according to the compiler"
    has = amount(topology.chip.memory_bytes, "bytes")
    console.print(f"memory     {amount(numbers['peak_bytes'], 'bytes')} of {has} at the peak, {origin}")
    if not numbers["estimated_cycles"]:
        note("note       matmuls take their time at the peak, for lack of estimated cycles; compare with --at_peak")
    else:
        step, other = (amount(numbers["by_cycles"][name], "s") for name in ("step_s", "other_s"))
        note(f"cycles     {step} if other operations take the compiler's cycles ({other}), not the time of their bytes")
    if pairs := numbers["unordered"]:
        note(f"order      no data dependency orders {len(pairs)} pairs of collectives. TPUs follow the schedule, but "
             f"simulated CPU devices could deadlock. First pair: {pairs[0]}")  # fmt: skip
    else:
        note("order      data dependencies order all collectives")
    for kernel, times in numbers["unknown"].items():
        note(f"note       {kernel}: this kernel declares no FLOPs; it takes the time of its bytes, {times:,.0f} times")
    table = make_table("simulated, not measured", "seconds by cause", "time", "share")
    for cause, seconds in numbers["seconds"].items():
        what = CAUSES.get(cause, f"exposed communication over {cause}")
        table.add_row(what, amount(seconds, "s"), f"{seconds / numbers['step_s']:.1%}")
    console.print(table)
    if numbers["sent"]:
        table = make_table("", "sent over", "collective", "bytes by each device", words=2)
        for row in numbers["sent"]:
            table.add_row(row["axes"], row["kind"], amount(row["wire_bytes"], "bytes"))
        console.print(table)
    table = make_table("", "seconds by source line", "matmuls", "other ops", "exposed", "sent")
    for row in numbers["lines"][:most]:
        seconds = (amount(row[name] or None, "s") for name in ("matmuls_s", "other_s", "exposed_s"))
        table.add_row(row["source"], *seconds, amount(row["wire_bytes"] or None, "bytes"))
    console.print(table)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m plan.replay", description=HELP, use_underscores=True)
    if args.plot:
        check_picture(args.plot)
    if args.latency_us < 0:
        raise UserError(f"--latency_us {args.latency_us}: must be at least 0; about 1 on a TPU")
    numbers, found = measure(args)
    print_result(numbers, args.rows, make_console(args.json))
    if args.plot:
        title = f"{numbers['program']} on {numbers['topology']}: simulated, {found.seconds:.3g} s"
        replayed.plot(found, title, args.plot)
        print(f"drew {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps(numbers))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
