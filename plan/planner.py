"""Know before you rent: does a configuration fit, what moves, what waits, how fast could it be.

    python planner.py moe1b --topology v4:4x4x2               # by arithmetic, at once
    python planner.py moe1b --topology v4:4x4x2 --compile     # and by the TPU compiler, beside it; no TPU needed
    python planner.py moe1b --topology v4:4x4x2 --search 32   # every mesh of 32 chips, the fastest that fits first
    python planner.py moe1b --topology v4:4x4x2 --max_batch   # the most sequences that fit, by compiling
    python planner.py laptop --mesh fsdp=4 --compile          # without a topology: simulated CPU devices

--json FILE (or -, to print it) and --plot FILE keep what was found; --memory GiB stands for another chip's. Exit status
1: it does not fit. `plan` adds up the rows of `costs.py` on the wires of `hardware.py`; `--compile` has the trainer's
own step compiled and puts the compiler's counts beside them. Without it no device is touched.
"""

import dataclasses
import itertools
import json
import math
import os
import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace

import tyro

import compiled
import costs
import hardware
import model
import pipeline
import schedules
import sharding
import utils
from costs import model_flops_per_token, parameters
from sharding import STAGE
from utils import PRESETS, Config, MeshConfig, UserError, preset

STATE = ("parameters", "optimizer", "batch")  # parts of memory that are there before a step and after it

# Plan -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a step costs: numbers of one device and one step, in bytes, FLOPs and seconds."""

    cfg: Config
    topology: hardware.Topology | None
    params_total: int
    params_active: int
    tokens_per_step: int  # of all devices
    model_flops: float
    flops: dict[str, float]  # with recomputation, by part of the model
    memory_bytes: dict[str, float]
    traffic: list[costs.Traffic]
    sched: schedules.Schedule
    limit_bytes: int | None  # memory of a device
    bubble: float  # share of the time of the layers that a stage waits for others

    @property
    def hardware_flops(self) -> float:
        return sum(self.flops.values())

    @property
    def wire_bytes(self) -> float:
        return sum(one.wire_bytes for one in self.traffic)

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())

    @property
    def temp_bytes(self) -> float:
        return sum(size for part, size in self.memory_bytes.items() if part not in STATE)

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    @property
    def wire_by_axes(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in self.traffic:
            found["*".join(one.axes)] = found.get("*".join(one.axes), 0) + one.wire_bytes
        return found

    def seconds(self, flops: float | None = None, exchanges=None) -> dict[str, float] | None:
        """Where the time of a step goes: products, wires by mesh axes, memory of the optimizer, bubble.

        flops, exchanges  those of a compiled step, in place of the predicted ones
        A roofline. Products run at the chip's peak; a collective at its wires' full speed, and nothing else runs
        meanwhile, as in what the compiler makes of it (see its asynchronous share). Latency is left out.
        None: the chip's or the wires' speed is not known.
        """
        chip = self.topology and self.topology.chip
        if not chip or not chip.peak_flops_per_s:
            return None
        found = {"compute": (self.hardware_flops if flops is None else flops) / chip.peak_flops_per_s}
        once = {"batch", "replicas"} | ({"weights", "gradients"} if self.cfg.model.gather == "step" else set())
        waits = found["compute"]  # what a stage does in its slots, and others wait for
        links = hardware.layout(self.cfg.mesh, self.topology)
        for one in self.traffic if exchanges is None else exchanges:
            sent = one.wire_bytes if exchanges is None else one.wire_bytes * one.count
            speed = min(self.speed(one.kind, links[axis]) for axis in one.axes)
            name = "*".join(one.axes)
            found[name] = found.get(name, 0) + sent / speed
            in_a_slot = one.part not in once and STAGE not in one.axes if exchanges is None else "_slot" in one.scope
            if in_a_slot:
                waits += sent / speed
        state = sum(self.memory_bytes[part] for part in ("parameters", "optimizer"))
        found["optimizer"] = (2 * state + self.memory_bytes["parameters"]) / chip.hbm_bytes_per_s
        found["bubble"] = waits * self.bubble / (1 - self.bubble)
        return found

    @staticmethod
    def speed(kind: str, link: hardware.Link) -> float:
        if kind == "all-to-all":
            return link.all_to_all_bytes_per_s
        return link.neighbour_bytes_per_s if kind == "collective-permute" else link.bytes_per_s

    @property
    def step_s(self) -> float | None:
        seconds = self.seconds()
        return seconds and sum(seconds.values())

    @property
    def overlapped_s(self) -> float | None:
        """Seconds of a step that hides the shorter of products and wires behind the longer."""
        seconds = self.seconds()
        if not seconds:
            return None
        fixed = seconds["optimizer"] + seconds["bubble"]
        return max(seconds["compute"], sum(seconds.values()) - fixed - seconds["compute"]) + fixed

    def mfu(self, step_s: float | None) -> float | None:
        """Model FLOPs over what the chip could have done in the time."""
        return step_s and self.model_flops / step_s / self.topology.chip.peak_flops_per_s

    def to_json(self) -> dict:
        """The plan as a dict of numbers, of one device and step."""
        step_s = self.step_s
        names = ("params_total", "params_active", "tokens_per_step", "model_flops", "hardware_flops", "wire_bytes",
                 "peak_bytes", "temp_bytes", "limit_bytes", "fits", "bubble", "step_s", "overlapped_s", "memory_bytes",
                 "wire_by_axes", "flops")  # fmt: skip
        return {
            "mesh": str(self.cfg.mesh), "topology": self.topology and str(self.topology), "compile_s": None,
            **{name: getattr(self, name) for name in names}, "mfu": self.mfu(step_s), "seconds": self.seconds(),
            "traffic": [dataclasses.asdict(one) for one in self.traffic],
        }  # fmt: skip


def plan(cfg: Config, topology: hardware.Topology | str | None = None, limit_bytes: int | None = None) -> Plan:
    """Predict what a step costs; no device is touched.

    topology     the devices; None: times, and whether it fits, are not known
    limit_bytes  memory of a device, if not what the chip has
    Raises: UserError for settings that do not fit the mesh, and a mesh that does not fit the topology.
    """
    topology = hardware.Topology.parse(topology) if isinstance(topology, str) else topology
    if topology:
        hardware.layout(cfg.mesh, topology)
        limit_bytes = limit_bytes or topology.chip.memory_bytes
    sharding.split_batch(cfg)  # the batch is refused before a width: it is the easier one to change
    sharding.check_divides(model.declare(cfg.model), SimpleNamespace(shape=cfg.mesh.sizes))
    sched, platform = pipeline.schedule(cfg), "tpu" if is_tpu(topology and topology.chip) else "cpu"
    total, active = parameters(cfg.model)
    tokens = cfg.data.tokens_per_step
    return Plan(
        cfg, topology, total, active, tokens, tokens * model_flops_per_token(cfg) / cfg.mesh.devices,
        costs.flops(cfg, sched, platform), costs.memory(cfg, sched, platform), costs.traffic(cfg, sched), sched,
        limit_bytes, costs.bubble(cfg, sched),
    )  # fmt: skip


def is_tpu(chip: hardware.Chip | None) -> bool:
    return bool(chip and chip.torus_dims)


# Compiled -------------------------------------------------------------------------------------------------------------


def compile_plan(one: Plan, say) -> tuple[dict, compiled.Compiled | None]:
    """Compile what a plan is about; returns what the compiler counted, under the plan's names, and the step.

    For the plan's TPU topology, or simulated CPU devices. A step that does not fit is told, not raised.
    """
    cfg, chip = one.cfg, one.topology and one.topology.chip
    mesh = compiled.topology_mesh(cfg.mesh, str(one.topology)) if is_tpu(chip) else sharding.make_mesh(cfg.mesh)
    # For its own memory libtpu knows best: what it compiles, fits.
    on_tpu = is_tpu(chip) and one.limit_bytes == chip.memory_bytes
    same = {name: getattr(one, name) for name in ("params_total", "params_active", "tokens_per_step", "model_flops")}
    try:
        step = compiled.compile_step(cfg, mesh, say)
    except compiled.OutOfMemory as error:
        lacks = {"fits": False, "peak_bytes": error.used_bytes, "limit_bytes": error.limit_bytes,
                 "excess_bytes": error.excess_bytes, "error": str(error)}  # fmt: skip
        return same | lacks, None
    counted = step.ledger
    by_axes = {axes: total.wire_bytes for axes, total in counted.by("axes").items()}
    in_background = sum(x.count * x.wire_bytes for x in counted.collectives if x.asynchronous)
    seconds = one.seconds(counted.flops, [x for x in counted.collectives if "?" not in x.axes])
    step_s = seconds and sum(seconds.values())
    return same | {
        "hardware_flops": counted.flops,
        "wire_bytes": counted.total.wire_bytes,
        "wire_by_axes": by_axes,
        "collectives": counted.total.count,
        "asynchronous": in_background / (counted.total.wire_bytes or 1),
        "argument_bytes": step.argument_bytes,
        "peak_bytes": step.peak_bytes,
        "temp_bytes": step.temp_bytes,
        "donated_bytes": step.alias_bytes,
        "fits": on_tpu or one.limit_bytes is None or step.peak_bytes <= one.limit_bytes,
        "lower_s": step.lower_s,
        "compile_s": step.compile_s,
        "bubble": one.bubble,
        "step_s": step_s,
        "mfu": one.mfu(step_s),
        "unexpected": step.unexpected,
        "ledger": [dataclasses.asdict(x) for x in counted.collectives],
    }, step


# Search ---------------------------------------------------------------------------------------------------------------


def meshes(devices: int):
    """All ways to spread devices over the six axes."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(utils.AXES) - 1):
        if devices % math.prod(sizes) == 0:
            yield MeshConfig(*sizes, devices // math.prod(sizes))


def pipelines(cfg: Config, mesh: MeshConfig):
    """The schedules to try on a mesh: without stages there is nothing to choose."""
    if mesh.stage == 1:
        return [{"pipeline.schedule": "gpipe", "pipeline.chunks": 1}]
    return [{"pipeline.schedule": name, "pipeline.chunks": 2 if name == "interleaved" else 1}
            for name in schedules.SCHEDULES]  # fmt: skip


def search(cfg: Config, topology: hardware.Topology, limit_bytes: int | None, say=lambda text: None):
    """Plan every mesh, and every schedule where there are stages.

    Returns the plans that fit, fastest first; those that do not, smallest first; and {reason: how many are refused}.
    """
    fit, large, refused = [], [], {}
    tried = list(meshes(topology.chips))
    for number, mesh in enumerate(tried):
        if number % 50 == 0:
            say(f"{number} of {len(tried)} meshes planned ..")
        for settings in pipelines(cfg, mesh):
            try:
                one = plan(utils.replace(cfg, mesh=mesh, **settings), topology, limit_bytes)
            except UserError as error:
                reason = str(error).split(" of ")[0].split(";")[0].split(" (")[0]
                refused[reason] = refused.get(reason, 0) + 1
                continue
            (large if one.fits is False else fit).append(one)
    fit.sort(key=lambda one: one.step_s or one.wire_bytes)
    large.sort(key=lambda one: one.peak_bytes)
    return fit, large, refused


def largest_batch(cfg: Config, topology: hardware.Topology | None, limit_bytes: int | None, say) -> tuple[int, int]:
    """The most sequences that fit, by compiling, and the fewest that do not, a sixteenth apart.

    Starts at what arithmetic says fits, goes on from there in growing steps, and halves what is left between.
    Raises: UserError if not even the smallest batch fits, or memory stays the same however large the batch is.
    """
    unit = cfg.mesh.batch_shards * max(cfg.pipeline.microbatches, 1)
    sized = lambda units: plan(utils.replace(cfg, **{"data.batch_size": units * unit}), topology, limit_bytes)

    def fits(units: int) -> bool:
        found, _ = compile_plan(sized(units), lambda text: None)
        fits = "fits" if found["fits"] else "does not fit"
        say(f"{units * unit} sequences: {amount(found['peak_bytes'], 'bytes')}, {fits}")
        return found["fits"]

    low, high = 0, 1
    if sized(high).limit_bytes is None:
        raise UserError("--max_batch needs a memory to fit: name a --topology, or a --memory in GiB")
    while sized(high).fits:
        low, high = high, 2 * high
        if high * unit > 2**16 * cfg.data.batch_size:
            raise UserError(f"{low * unit} sequences still fit: memory does not grow with the batch")
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if sized(middle).fits else (low, middle)

    at = max(low, 1)
    low, high, step = 0, None, max(at // 16, 1)
    while not high or high - low > max(low // 16, 1):  # within a sixteenth
        low, high = (at, high) if fits(at) else (low, at)
        at = (low + high) // 2 if low and high else low + step if low else max(high - step, 1)
        step *= 2
        if high == 1:
            raise UserError(f"not even {unit} sequences fit; try a larger fsdp axis, or model.remat=full")
    return low * unit, high * unit


# What is printed ------------------------------------------------------------------------------------------------------

SCALES = {"bytes": (2**30, "GiB", 2**20, "MiB"), "FLOPs": (1e12, "TFLOP", 1e9, "GFLOP"), "s": (1, "s", 1e-3, "ms")}


def amount(x: float | None, unit: str) -> str:
    """A number with its unit, large or small as it is: amount(3e9, "bytes") is "2.794 GiB"."""
    if x is None:
        return "-"
    large, name, small, small_name = SCALES[unit]
    return f"{x / large:,.3f} {name}" if x >= large / 10 else f"{x / small:,.3f} {small_name}"


def compared(one: Plan, found: dict) -> list[tuple[str, str, float, float | None]]:
    """(what, unit, predicted, compiled) of what both know; the compiler stops early if a step does not fit."""
    state = sum(one.memory_bytes[part] for part in STATE)
    rows = [
        ("parameters, optimizer, batch", "bytes", state, found.get("argument_bytes")),
        ("temporary", "bytes", one.temp_bytes, found.get("temp_bytes")),
        ("peak memory", "bytes", one.peak_bytes, found.get("peak_bytes")),
        ("FLOPs", "FLOPs", one.hardware_flops, found.get("hardware_flops")),
        ("on the wire", "bytes", one.wire_bytes, found.get("wire_bytes")),
    ]
    wires, there = one.wire_by_axes, found.get("wire_by_axes", {})
    names = sorted(wires.keys() | there.keys(), key=lambda name: -max(wires.get(name, 0), there.get(name, 0)))
    rows += [(f"  over {name}", "bytes", wires.get(name, 0), there.get(name, 0) if there else None) for name in names]
    return [*rows, ("step, at best", "s", one.step_s, found.get("step_s"))]


def titled(title: str, *columns: str, words: int = 1, **more):
    """A table, of which the first columns hold words and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", **more)
    return table


def show(one: Plan, found: dict | None, console) -> None:
    """Print a plan, and what the compiler counted beside it, as tables."""
    cfg, seconds = one.cfg, one.seconds()
    console.print(f"model      {one.params_total:,} parameters, {one.params_active:,} active per token")
    devices = str(one.topology) if one.topology else f"{cfg.mesh.devices} devices of no known kind"
    console.print(f"mesh       {cfg.mesh} on {devices}")
    console.print(f"batch      {sharding.split_batch(cfg)}; {one.tokens_per_step:,} tokens a step")
    if cfg.mesh.stage > 1:
        console.print(f"pipeline   {one.sched.name}: stages wait {one.bubble:.1%} of the time")
    if one.topology:
        for number, link in enumerate(hardware.layout(cfg.mesh, one.topology).values()):
            console.print(f"{'' if number else 'wires':10} {link.note}")
        for line in hardware.check(cfg.mesh, one.topology):
            console.print(f"note       {line}")
    ratio = one.hardware_flops / one.model_flops
    console.print(f"work       {amount(one.model_flops, 'FLOPs')} a device and step, "
                  f"{ratio:.2f} times that with recomputation and padding")  # fmt: skip

    table = titled("memory of a device", "part", "predicted")
    for part, size in one.memory_bytes.items():
        table.add_row(part, amount(size, "bytes"))
    table.add_section()
    fits = "fits" if one.fits else "does not fit"
    limit = f" of {amount(one.limit_bytes, 'bytes')}: {fits}" if one.limit_bytes else ""
    table.add_row("at its fullest", amount(one.peak_bytes, "bytes") + limit)
    console.print(table)

    if seconds:
        table = titled("time of a step, nothing overlapping", "spent on", "predicted", "share")
        for part, time in seconds.items():
            table.add_row(part, amount(time, "s"), f"{time / one.step_s:.1%}")
        table.add_section()
        table.add_row("step", amount(one.step_s, "s"), f"MFU {one.mfu(one.step_s):.1%}")
        overlapped = one.overlapped_s
        table.add_row("wires hidden behind products", amount(overlapped, "s"), f"MFU {one.mfu(overlapped):.1%}")
        console.print(table)

    beside = ("compiled", "difference") if found else ()
    table = titled(" and ".join(["predicted", *beside[:1]]), "a device and step", "predicted", *beside)
    for what, unit, predicted, counted in compared(one, found or {}):
        row = [what, amount(predicted, unit)]
        if found:
            difference = f"{predicted / counted - 1:+.1%}" if counted and predicted is not None else "-"
            row += [amount(counted, unit), difference]
        table.add_row(*row)
    console.print(table)


def show_compiled(found: dict, step: compiled.Compiled, console) -> None:
    """Print the ledger, and what should not be there."""
    table = titled("the ledger: collectives of the compiled step", "kind", "mesh axes", "comes from", "executed",
                   "on the wire", "in the background", words=3)  # fmt: skip
    groups: dict[tuple, list] = {}
    for one in step.ledger.collectives:
        groups.setdefault((one.kind, "*".join(one.axes), one.source), []).append(one)
    sent = lambda ones: sum(x.count * x.wire_bytes for x in ones)
    ranked = sorted(groups.items(), key=lambda item: -sent(item[1]))
    for names, ones in ranked[:20]:
        hidden = sent([x for x in ones if x.asynchronous]) / (sent(ones) or 1)
        table.add_row(*names, f"{sum(x.count for x in ones):,.0f}", amount(sent(ones), "bytes"), f"{hidden:.0%}")
    if rest := [x for _, ones in ranked[20:] for x in ones]:
        table.add_row("others", "", "", f"{sum(x.count for x in rest):,.0f}", amount(sent(rest), "bytes"), "")
    console.print(table)
    console.print(f"compiled   in {found['compile_s']:.1f} s (lowered in {found['lower_s']:.1f} s); "
                  f"{found['collectives']:,.0f} collectives, {found['asynchronous']:.1%} of their bytes in the "
                  f"background; {amount(found['donated_bytes'], 'bytes')} of the state are donated")  # fmt: skip


def show_search(fit: list[Plan], large: list[Plan], refused: dict[str, int], console, most: int = 20) -> None:
    table = titled(f"{len(fit)} layouts fit, the fastest first", "mesh", "schedule", "memory", "on the wire", "bubble",
                   "step", "MFU", words=2, no_wrap=True)  # fmt: skip
    for one in fit[:most]:
        name = f"{one.sched.name} M={one.sched.microbatches}" if one.cfg.mesh.stage > 1 else ""
        mfu = f"{one.mfu(one.step_s):.1%}" if one.step_s else "-"
        table.add_row(str(one.cfg.mesh), name, amount(one.peak_bytes, "bytes"), amount(one.wire_bytes, "bytes"),
                      f"{one.bubble:.1%}", amount(one.step_s, "s"), mfu)  # fmt: skip
    console.print(table)
    if large:
        console.print(f"{len(large)} layouts are too large; the smallest of them, {large[0].cfg.mesh}, would take "
                      f"{amount(large[0].peak_bytes, 'bytes')} of {amount(large[0].limit_bytes, 'bytes')}")  # fmt: skip
    for reason, many in sorted(refused.items(), key=lambda item: -item[1])[:5]:
        console.print(f"{many} refused: {reason}")


def plot(one: Plan, found: dict | None, path: str) -> None:
    """Draw memory by part, bytes on the wire by mesh axes, and the schedule into a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    staged = one.cfg.mesh.stage > 1
    figure = plt.figure(figsize=(11, 7 if staged else 4), layout="constrained")
    grid = figure.add_gridspec(2 if staged else 1, 2)
    memory, wires = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])

    colours, base = plt.get_cmap("tab20").colors, 0.0
    for (part, size), colour in zip(one.memory_bytes.items(), colours, strict=False):
        memory.bar("predicted", size / 2**30, bottom=base, color=colour, label=part, width=0.6)
        base += size / 2**30
    if found and "argument_bytes" in found:
        memory.bar("compiled", found["argument_bytes"] / 2**30, color="#999999", label="arguments", width=0.6)
        memory.bar("compiled", (found["peak_bytes"] - found["argument_bytes"]) / 2**30, color="#cccccc", width=0.6,
                   bottom=found["argument_bytes"] / 2**30, label="temporary")  # fmt: skip
    if one.limit_bytes and one.limit_bytes < 2 * one.peak_bytes:
        memory.axhline(one.limit_bytes / 2**30, color="black", linewidth=1, linestyle="--", label="device")
    memory.set(ylabel="GiB", xlim=(-0.5, 2.4 if found else 1.4))
    has = f", which has {amount(one.limit_bytes, 'bytes')}" if one.limit_bytes else ""
    memory.set_title(f"memory of a device{has}", loc="left", size=10)
    handles, labels = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="center right")

    rows = [row for row in compared(one, found or {}) if row[0].startswith("  over ")]
    rows = [row for row in rows if row[2] >= 0.002 * one.wire_bytes]
    names = [what.removeprefix("  over ") for what, *_ in rows]
    for shift, label, values in (
        (-0.2, "predicted", [row[2] for row in rows]),
        (0.2, "compiled", [row[3] for row in rows]),
    ):
        if label == "predicted" or (found and "wire_by_axes" in found):
            wires.barh([i + shift for i in range(len(names))], [(x or 0) / 2**30 for x in values], 0.38, label=label)
    wires.set(yticks=range(len(names)), yticklabels=names, xlabel="GiB a step")
    wires.invert_yaxis()
    wires.legend(frameon=False, fontsize=8)
    wires.set_title("sent by a device, by mesh axes", loc="left", size=10)
    if staged:
        stages = figure.add_subplot(grid[1, :])
        schedules.paint(stages, one.sched, *costs.slots(one.cfg, one.sched), inches=11)
        stages.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    for axes in (memory, wires):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# Command line ---------------------------------------------------------------------------------------------------------

flag = lambda name: tyro.conf.arg(aliases=[f"--{name}"], name=name)


@dataclass(frozen=True)
class Arguments(Config):
    topology: str = ""  # the devices: v4:4x4x2, v5p:4x4x4, v5e:4x4, h100:16 ..; empty: of no known speed or memory
    compile: bool = False  # compile the step, for the topology's TPUs or for simulated CPU devices
    search: int = 0  # plan every mesh of this many devices, and rank those that fit
    max_batch: bool = False  # find the largest batch that fits, by compiling
    memory: float = 0.0  # GiB a device has; 0: what its kind has
    json: str = ""  # write the numbers to this file as JSON; -: print them, and nothing else
    plot: str = ""  # draw memory, wires and schedule into this file


def parse(argv: list[str]) -> tuple[Config, Arguments]:
    """Read `PRESET [--flags]`; the preset says what the flags' defaults are."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        raise UserError(f"name a preset first: {', '.join(PRESETS)}")
    start, rest = (Config(), argv) if argv[0].startswith("-") else (preset(argv[0]), argv[1:])
    args = tyro.cli(
        Arguments, prog="python planner.py PRESET", description=__doc__, args=rest, default=Arguments(**vars(start)),
        use_underscores=True, compact_help=True,
    )  # fmt: skip
    return Config(**{f.name: getattr(args, f.name) for f in fields(Config)}), args


def presets() -> None:
    """Print every preset's size as a Markdown table."""
    for name, (what, _) in PRESETS.items():
        total, active = parameters(preset(name).model)
        print(f"| `{name}` | {what.removeprefix('planner only: ')} | {total:,} | {active:,} |")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(cfg: Config, args: Arguments) -> tuple[dict, int]:
    """Do what the flags ask, and print it; returns the numbers, and the exit status: 1 if it does not fit."""
    from rich.console import Console

    console = Console(quiet=args.json == "-", highlight=False, width=None if sys.stdout.isatty() else 120)
    topology = hardware.Topology.parse(args.topology) if args.topology else None
    limit = round(args.memory * 2**30) or None
    if (args.compile or args.max_batch) and not is_tpu(topology and topology.chip):
        utils.use_devices(cfg.mesh.devices)
    if args.search:
        if not topology or args.search != topology.chips:
            there = f"{topology} has {topology.chips}" if topology else "there is no --topology"
            raise UserError(f"--search {args.search}: {there}; name one with {args.search} devices")
        fit, large, refused = search(cfg, topology, limit, say)
        show_search(fit, large, refused, console)
        names = ("mesh", "step_s", "mfu", "bubble", "peak_bytes", "wire_bytes", "fits")
        short = lambda one: {name: one.to_json()[name] for name in names} | {
            "schedule": one.sched.name, "microbatches": one.sched.microbatches}  # fmt: skip
        return {"layouts": [short(one) for one in fit], "too_large": len(large), "refused": refused}, 0 if fit else 1
    if args.max_batch:
        most, too_many = largest_batch(cfg, topology, limit, say)
        console.print(f"{most} sequences fit ({most * cfg.data.seq_len:,} tokens), {too_many} do not")
        return {"max_batch": most, "too_large": too_many}, 0

    one = plan(cfg, topology, limit)
    found, step = compile_plan(one, say) if args.compile else (None, None)
    show(one, found, console)
    if step:
        show_compiled(found, step, console)
    if args.plot:
        plot(one, found, args.plot)
        say(f"drew {args.plot}")
    for problem in (found or {}).get("unexpected", []):
        say(f"error: {problem}")
    if found and "error" in found:
        say(f"error: {found['error']}")
    fits = one.fits if found is None else found["fits"] and not found.get("unexpected")
    return one.to_json() | ({"compiled": found} if found else {}), 1 if fits is False else 0


@utils.exit_status
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        presets()
        return 0
    cfg, args = parse(argv)
    numbers, status = run(cfg, args)
    if args.json == "-":
        print(json.dumps(numbers))
    elif args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(numbers, file, indent=1)
        say(f"wrote {args.json}")
    return status


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
