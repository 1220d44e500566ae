"""Read the profile that a run recorded, and compare it with the plan: the command `python -m plan.profile`.

A trace has an event for each instruction that a device executed. At any moment a device's time belongs to one event: a
computing instruction if one runs, else a collective (then its communication is exposed), else the loop around them. If
several events of one kind run, it belongs to the one that began last. `recorder.py` writes the trace.

GPUs launch many kernels as one CUDA graph. Such an event has the name of its kernel: that of its fusion, or that of a
library's kernel, whose source line is unknown.
"""

import collections
import dataclasses
import functools
import gzip
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import tyro

from compile import ledger
from compile.hlo import Program
from config import Config
from plan import planner, replay
from plan.answer.show import make_console, make_table
from plan.chips import constants, hardware
from plan.chips.units import amount
from plan.simulate import replayed, simulator
from plan.time import measured as real_step
from utils import UserError, exit_status

HELP = """e.g. python -m plan.profile runs/laptop

Print where the time of recorded steps went: seconds by cause (planned, simulated and measured) and by source line.

Record them with python main.py .. --run.profile 20:23. Times are for one step, averaged over steps and devices.

Only TPU slices have a plan and a simulation. A plan with the constants of --calibrate takes as long as these steps."""
IDLE, BUBBLE = "idle", "bubble"
# What the kernels of libraries do, by a part of their names; "?": a collective over unknown mesh axes
KERNELS = (("nvjet|gemm|cutlass|cublas|xmma|cudnn", simulator.MATMULS), ("nccl", "?"))
CAUSES = replay.CAUSES | {IDLE: "idle: no instruction of the step runs", BUBBLE: "pipeline bubble"}


@dataclass(frozen=True)
class Arguments:
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    rows: int = 10  # number of source lines to print, those that take the most time first
    json: bool = False  # print only JSON, with all rows
    calibrate: str = ""  # write the constants that fit the recorded steps to this file


# The trace ------------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One execution of an instruction on one device."""

    device: str
    start_ns: float
    end_ns: float
    name: str  # of the instruction


def read_events(path: str, program: Program) -> Iterator[Event]:
    """Yield the events of the program's instructions in a trace (xplane.pb) of CPUs, GPUs or TPUs."""
    known = {name for computation in program.computations.values() for name in computation}
    fusions = {re.sub(r"\W", "_", name): name for name in known}  # as GPU kernels are named
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        tpu = plane.name.startswith("/device:TPU")
        for line in plane.lines:
            if tpu and line.name != "XLA Ops":
                continue
            for event in line.events:
                stats = {} if tpu else dict(event.stats)
                name = re.match(r"%?([^\s=]*)", event.name)[1] if tpu else stats.get("hlo_op", "")
                if stats.get("hlo_module", program.name) != program.name:
                    continue
                if name.startswith("command_buffer") and plane.name.startswith("/device:GPU"):
                    name = fusions.get(event.name, event.name)
                elif name not in known:
                    continue
                device = f"{plane.name} {stats.get('device_ordinal', '')}"
                yield Event(device, event.start_ns, event.start_ns + event.duration_ns, name)


def seconds_by_instruction(events, priority) -> collections.Counter:
    """Give every moment of each device to one of the events that run: the highest `priority(name)`, then the latest."""
    found, devices = collections.Counter(), collections.defaultdict(list)
    for event in events:
        devices[event.device].append(event)
    for own in devices.values():
        changes = sorted({time for event in own for time in (event.start_ns, event.end_ns)})
        own.sort(key=lambda event: event.start_ns)
        running, following = [], 0
        for begin, end in itertools.pairwise(changes):
            while following < len(own) and own[following].start_ns <= begin:
                running.append(own[following])
                following += 1
            running = [event for event in running if event.end_ns > begin]
            if running:
                chosen = max(running, key=lambda event: (priority(event.name), event.start_ns, -event.end_ns))
                found[chosen.name] += (end - begin) / 1e9
    return found


# Attribution ----------------------------------------------------------------------------------------------------------


class Causes:
    """Tells on what each instruction of a program spends its time."""

    def __init__(self, program: Program, sizes: dict[str, int]):
        self.program, self.sizes = program, tuple(sizes.items())
        self.where = {name: (computation, one) for computation, instructions in program.computations.items()
                      for name, one in instructions.items()}  # fmt: skip
        self.cause = functools.cache(self._cause)
        self.flops = functools.cache(self._flops)

    def _flops(self, computation: str) -> bool:
        instructions = self.program.computations[computation]
        return any(work.flops or work.unknown or any(map(self.flops, one.contents))
                   for one in instructions.values() for work in [ledger.matmul_work(instructions, one)])  # fmt: skip

    def _cause(self, name: str) -> str:
        """Return the simulator's name of a cause; a collective's is its mesh axes, as in fsdp*tensor."""
        if name not in self.where:
            return next((cause for words, cause in KERNELS if re.search(words, name)), simulator.OTHERS)
        computation, one = self.where[name]
        while one.opcode.endswith(("-done", "-update")):
            computation, one = self.where[one.operands[0]]
        work = ledger.matmul_work(self.program.computations[computation], one)
        if work.flops or work.unknown or any(map(self.flops, one.contents)):
            return simulator.MATMULS
        for place, inner in ledger.collectives_in(self.program, computation, one):
            if found := ledger.collective(self.program, place, inner, self.sizes):
                return "*".join(found.axes)
        return simulator.COPIES if one.opcode in simulator.COPYING else simulator.OTHERS

    def priority(self, name: str) -> int:
        if name in self.where and self.where[name][1].opcode in ledger.CALLERS:
            return 0
        return 2 if self.cause(name) in (simulator.MATMULS, simulator.OTHERS, simulator.COPIES) else 1

    def source(self, name: str) -> str:
        if name not in self.where:
            return f"kernel {name[:40]}"
        _, one = self.where[name]
        while one.opcode.endswith(("-done", "-update")):
            one = self.where[one.operands[0]][1]
        return self.program.source(one)


def measured(seconds: collections.Counter, causes: Causes, per_step: float, total_s: float) -> tuple[dict, dict]:
    """Return the measured seconds of one step by cause, and by source line.

    per_step  number of steps times number of devices
    total_s   seconds of one step
    """
    by_cause, by_line = collections.Counter(), collections.defaultdict(collections.Counter)
    for name, time in seconds.items():
        cause = causes.cause(name)
        by_cause[cause] += time / per_step
        kind = {simulator.MATMULS: "matmuls_s", simulator.OTHERS: "other_s", simulator.COPIES: "other_s"}
        by_line[causes.source(name)][kind.get(cause, "exposed_s")] += time / per_step
    return dict(by_cause) | {IDLE: max(0.0, total_s - by_cause.total())}, by_line


# The command ----------------------------------------------------------------------------------------------------------


def read_run(run: Path) -> tuple[Config, list[dict]]:
    """Return a run's settings, and the steps.json of each process that recorded, with its files.

    Raises: UserError if the run recorded nothing.
    """
    if not (run / "config.json").exists():
        raise UserError(f"{run} has no run: it has no config.json")
    found = []
    for file in sorted(run.glob("profile/process-*/steps.json")):
        traces = sorted(file.parent.glob("plugins/profile/*/*.xplane.pb"))
        if traces:
            found.append(
                json.loads(file.read_text()) | {"trace": str(traces[-1]), "program": file.parent / "step.hlo.gz"}
            )
    if not found:
        raise UserError(f"{run} has no profile; record steps 20 to 23 with: python main.py .. --run.profile 20:23")
    return Config.from_dict(json.loads((run / "config.json").read_text())["config"]), found


def compare(cfg: Config, processes: list[dict]) -> dict:
    """Return the seconds of one step by cause and by line, planned, simulated and measured."""
    about = processes[0]
    text = gzip.decompress(about["program"].read_bytes()).decode()
    program, steps = Program(text), about["last"] - about["first"] + 1
    causes, spent = Causes(program, cfg.mesh.sizes), collections.Counter()
    for process in processes:
        spent += seconds_by_instruction(read_events(process["trace"], program), causes.priority)
    step_s = about["seconds"] / steps
    devices = sum(process["devices"] for process in processes)
    by_cause, by_line = measured(spent, causes, steps * min(devices, cfg.mesh.devices), step_s)
    topology = hardware.Topology.parse(about["topology"]) if about["topology"] else None
    plan = planner.plan(cfg, topology) if topology else None
    known = plan and topology.chip.key in replayed.FLOPS_PER_CYCLE and topology.slices == 1
    simulated = simulate(plan.cfg, topology, text) if known else None
    rows = replay.seconds_by_line(simulated, ledger.read(text, cfg.mesh.sizes)) if simulated else []
    seconds_of = lambda row: sum(row.get(name, 0.0) for name in ("matmuls_s", "other_s", "exposed_s"))
    lines = {row["source"]: seconds_of(row) for row in rows}
    return {
        "steps": [about["first"], about["last"]],
        "step_s": step_s,
        "planned": plan and plan.simulated,
        "simulated": simulated and simulated.causes,
        "measured": by_cause,
        "lines": [
            {"source": source, "measured_s": seconds_of(row), "simulated_s": lines.get(source)} | row
            for source, row in sorted(by_line.items(), key=lambda item: -seconds_of(item[1]))
        ],
        "traces": [process["trace"] for process in processes],
    }  # fmt: skip


def simulate(cfg: Config, topology: hardware.Topology, text: str) -> simulator.Replay:
    machine = replayed.machine_at(topology, topology.torus, replay.device_places(cfg.mesh, topology))
    return simulator.replay(text, cfg.mesh.sizes, machine, replayed.critical_shares(cfg, text))


def fit_constants(run: Path, cfg: Config, processes: list[dict], found: dict) -> constants.Constants:
    """Return the constants with which a plan takes as long as the recorded steps. found: the result of `compare`

    Raises: UserError if the speed of the devices is unknown, or if the trace has no matmuls.
    """
    about = processes[0]
    if not about["topology"]:
        raise UserError(f"--calibrate: {run} ran on devices whose speed is unknown, so it has no plan; record a run on "
                        "TPUs or GPUs")  # fmt: skip
    plan = planner.plan(cfg, about["topology"])
    fitted = {name: float(f"{value:.5g}") for name, value in
              real_step.fit_run(plan, plan.simulated, found["measured"], found["step_s"]).items()}  # fmt: skip
    date = Path(about["trace"]).parent.name[:10].replace("_", "-")  # JAX names the folder 2026_11_28_03_20_11
    return constants.Constants(plan.topology.chip.key, str(run), date, *found["steps"], found["step_s"],
                               about["topology"], str(cfg.mesh), **fitted)  # fmt: skip


def print_result(found: dict, most: int, console) -> None:
    first, last = found["steps"]
    console.print(f"steps      {first} to {last}, {amount(found['step_s'], 's')} each on average")
    for trace in found["traces"]:
        console.print(f"trace      {trace.removesuffix('.xplane.pb')}.trace.json.gz", soft_wrap=True)
    console.print(
        "           open it at https://ui.perfetto.dev, or install xprof and run: xprof --logdir RUN/profile/process-00"
    )
    table = make_table("", "seconds of a step by cause", "planned", "simulated", "measured")
    columns = [found[name] or {} for name in ("planned", "simulated", "measured")]
    for cause in sorted({*columns[0], *columns[1], *columns[2]}, key=lambda cause: -columns[2].get(cause, 0.0)):
        what = CAUSES.get(cause, f"exposed communication over {cause}")
        table.add_row(what, *(amount(column.get(cause), "s") for column in columns))
    table.add_section()
    table.add_row("total", *(amount(sum(column.values()) if column else None, "s") for column in columns))
    console.print(table)
    table = make_table("", "seconds of a step by source line", "simulated", "measured", "matmuls", "exposed")
    for row in found["lines"][:most]:
        seconds = (row.get(name) for name in ("simulated_s", "measured_s", "matmuls_s", "exposed_s"))
        table.add_row(row["source"], *(amount(s, "s") for s in seconds))
    console.print(table)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m plan.profile", description=HELP, use_underscores=True)
    console = make_console(args.json)
    run = Path(args.run)
    cfg, processes = read_run(run)
    found = compare(cfg, processes)
    print_result(found, args.rows, console)
    if args.calibrate:
        fitted = fit_constants(run, cfg, processes, found)
        constants.write(fitted, args.calibrate)
        console.print(f"constants  {fitted.values()}", soft_wrap=True)
        console.print(f"           python -m plan .. --topology {fitted.topology} --constants {args.calibrate}",
                      soft_wrap=True)  # fmt: skip
        found["constants"] = dataclasses.asdict(fitted)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
