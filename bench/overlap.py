"""Measure how much of a step's communication the TPU compiler overlaps with compute, and which memory attention uses.

`python -m bench.overlap` compiles the training step of the preset moe1b, without TPUs. Another preset, `--topology`,
`--mesh` and any setting of main.py choose another step. `--json` prints one line instead of a table. `--seconds`
simulates the compiled program, and `--plot` draws one layer of it.

Numbers are for one device and one step: GB = 1e9 bytes, GiB = 2^30. `compile/ledger.py` defines hidden and exposed.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass

from bench.step import say
from config import Config
from config.flags import command_line
from plan import planner
from plan.answer import show
from plan.chips import hardware
from plan.count.step import is_tpu
from plan.simulate import replayed
from plan.trace import compiled
from utils import UserError, check_picture, exit_status

LINES = 12  # rows of a table, those with the most exposed bytes
MEMORIES = {"S(1)": "VMEM", "S(3)": "CMEM"}  # see `ledger.bytes_by_memory`


@dataclass(frozen=True)
class Arguments(Config):
    topology: str = "v4:4x4x2"  # the TPU slice to compile for: v4:4x4x4, v5e:4x4, v5p:4x4x4, v6e:8x8 ...
    json: bool = False  # print one line of JSON instead of a table
    seconds: bool = False  # simulate the compiled program: seconds by cause
    at_peak: bool = False  # with --seconds: assume that matmuls run at the chip's peak FLOP/s, not at XLA's estimate
    latency_us: float = 0.0  # with --seconds: latency per link, in microseconds; about 1 on a TPU
    plot: str = ""  # with --seconds: draw one layer's forward and backward pass to this file: png, svg or pdf


HELP = """e.g. python -m bench.overlap llama3_8b --topology v4:4x4x4 --mesh fsdp=32,tensor=2 --data.batch_size 64
     python -m bench.overlap llama3_8b --topology v4:4x4x4 --mesh fsdp=64 --data.batch_size 64 --seconds --plot a.png

Measure how much communication the TPU compiler overlaps with compute, and the bytes that attention reads and writes.

Needs no TPU. Communication stalls the step if it is not overlapped, or if it takes longer than the compute.

--seconds estimates for how long. To choose a mesh, use python -m plan."""


def parse(argv: list[str]) -> tuple[Config, Arguments]:
    """Parse `[PRESET | --config FILE] [--flags]`; the default preset is moe1b.

    Raises: UserError if the topology is not a TPU slice.
    """
    cfg, args = command_line(argv, "python -m bench.overlap", HELP, "moe1b", Arguments)
    if not is_tpu(hardware.Topology.parse(args.topology).chip):
        raise UserError(f"topology {args.topology!r}: compiling for devices that are not attached works only for TPUs; "
                        "use a slice like v4:4x4x2, v5p:4x4x4, v5e:4x4 or v6e:8x8")  # fmt: skip
    asked = [name for name in ("at_peak", "latency_us", "plot") if getattr(args, name)]
    if asked and not args.seconds:
        raise UserError(f"--{asked[0]} applies only to a simulated step; add --seconds")
    if args.latency_us < 0:
        raise UserError(f"--latency_us {args.latency_us}: must be at least 0; about 1 on a TPU")
    if args.plot:
        check_picture(args.plot)
    return cfg, args


def measure(cfg: Config, args: Arguments) -> dict:
    """Compile the training step for a TPU slice and analyze it. CPU seconds include all threads, and tracing."""
    mesh = compiled.topology_mesh(cfg.mesh, args.topology)
    begin = time.process_time()
    step = compiled.compile_step(cfg, mesh, say)
    compile_cpu_s = time.process_time() - begin
    found = ledger_numbers(step.ledger) | {"peak_bytes": step.peak_bytes, "compile_cpu_s": compile_cpu_s}
    return found | ({"replay": simulate(cfg, args, mesh, step.step.as_text())} if args.seconds else {})


def simulate(cfg: Config, args: Arguments, mesh, text: str) -> dict:
    """Simulate the compiled step, and draw it if --plot is given."""
    topology = hardware.Topology.parse(args.topology)
    found = replayed.simulate(cfg, topology, mesh, text, args.at_peak, args.latency_us / 1e6)
    if args.plot:
        replayed.plot(found, f"simulated step, {found.seconds:.3f} s: {describe(cfg, args.topology)[:-1]}", args.plot)
        say(f"drew {args.plot}")
    return replayed.to_json(found)


def ledger_numbers(found) -> dict:
    """Return the totals of a ledger, and its bytes by mesh axes, kind and source line."""
    rows = lambda field: {name: dataclasses.asdict(total) for name, total in found.totals_by(field).items()}
    return {
        "wire_bytes": found.total.wire_bytes,
        "exposed_bytes": found.total.exposed_bytes,
        "hidden_bytes": found.total.hidden_bytes,
        "synchronous_bytes": sum(x.count * x.wire_bytes for x in found.collectives if not x.asynchronous),
        "collectives": found.total.count,
        "attention_by_memory": found.memories("attend"),
        "flops": found.flops,
        "unknown": found.unknown,
        **{f"by_{field}": rows(field) for field in ("axes", "kind", "source")},
    }


def describe(cfg: Config, topology: str) -> str:
    """Describe the compiled step in one line."""
    c = cfg.at_work
    return (f"{cfg.mesh} on {topology}, {cfg.data.batch_size} x {cfg.data.seq_len:,} tokens, remat={c.work.remat}, "
            f"gather={c.work.gather}, tensor_exchange={c.work.tensor_exchange}; for one chip and step:")  # fmt: skip


def table(found: dict) -> str:
    """Format the numbers as tables, with the rows that have the most exposed bytes."""
    gb = lambda size: f"{size / 1e9:,.3f} GB"
    share = lambda part, whole: f"{part / whole:.1%}" if whole else "-"
    line = lambda what, number, note="": f"{what:42} {number:>12}  {note}".rstrip()
    wire, of_wire = found["wire_bytes"], lambda name: share(found[name], found["wire_bytes"]) + " of it"
    lines = [
        line("sent", gb(wire), f"in {found['collectives']:,.0f} collectives"),
        line("  exposed: no overlap with matmuls", gb(found["exposed_bytes"]), of_wire("exposed_bytes")),
        line("    synchronous, without start and done", gb(found["synchronous_bytes"]), of_wire("synchronous_bytes")),
        line("  hidden: overlapped with matmuls", gb(found["hidden_bytes"]), of_wire("hidden_bytes")),
        line("peak", f"{found['peak_bytes'] / 2**30:.2f} GiB"),
        *(line(f"attention operands and results in {MEMORIES.get(memory, memory)}", gb(size))
          for memory, size in found["attention_by_memory"].items()),
        line("executed", f"{found['flops'] / 1e12:,.1f} TFLOP",
             f"unknown: {show.unknown_kernels(found['unknown'])}" if found["unknown"] else ""),
        line("compile time", f"{found['compile_cpu_s']:,.0f} CPU s"),
    ]  # fmt: skip
    if played := found.get("replay"):
        lines += ["", *replayed.HEAD.splitlines(), line("simulated step", f"{played['step_s']:.3f} s")]
        lines += [line(f"  {cause if cause in replayed.COLOURS else 'waiting for ' + cause}", f"{seconds:.3f} s",
                       share(seconds, played["step_s"])) for cause, seconds in played["seconds"].items()]  # fmt: skip
    for field in ("axes", "kind", "source"):
        lines += [
            "",
            f"{'by ' + field:42} {'times':>9} {'sent':>12} {'share':>7} {'exposed':>12} {'share':>7}",
        ]
        ranked = sorted(found[f"by_{field}"].items(), key=lambda row: -row[1]["exposed_bytes"])
        rest = [total for _, total in ranked[LINES:]]
        others = {name: sum(total[name] for total in rest) for name in ("count", "wire_bytes", "exposed_bytes")}
        for name, total in ranked[:LINES] + [(f"{len(rest)} others", others)] * bool(rest):
            lines.append(
                f"  {name:40} {total['count']:>9,.0f} {gb(total['wire_bytes']):>12} "
                f"{share(total['wire_bytes'], wire):>7} {gb(total['exposed_bytes']):>12} "
                f"{share(total['exposed_bytes'], found['exposed_bytes']):>7}"
            )
    return "\n".join(lines)


@exit_status
def main(argv: list[str] | None = None) -> None:
    cfg, args = parse(sys.argv[1:] if argv is None else argv)
    cfg = planner.plan(cfg, args.topology).cfg
    found = measure(cfg, args)
    print(json.dumps(found) if args.json else f"{describe(cfg, args.topology)}\n{table(found)}")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
