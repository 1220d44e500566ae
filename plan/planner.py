"""What a configuration needs, sends and takes: `plan` adds up the rows of `costs.py` on the wires of `hardware.py`.

No device is touched, but by `compile_plan`, which has the trainer's own step compiled and counts what the compiler
made, and by `largest_batch`, which asks it what fits.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import pipeline
import sharding
from config import AUTO, AXES, Config, MeshConfig, replace
from errors import UserError
from pipeline import fit, schedules
from plan import auto, compiled, costs, expected, hardware, memory
from plan.costs import model_flops_per_token, parameters
from plan.formulas import maximum, minimum
from sharding import TENSOR
from xla import ledger

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
    work: list[costs.Work]  # products, with recomputation
    memory_bytes: dict[str, float]
    traffic: list[costs.Traffic]
    sched: schedules.Schedule
    limit_bytes: int | None  # memory of a device
    bubble: float  # share of the time of the layers that a stage waits for others
    why: str = ""  # what `auto` chose, and what else it could have been

    @property
    def flops(self) -> dict[str, float]:
        """With recomputation, by part of the model."""
        found: dict[str, float] = {}
        for one in self.work:
            found[one.part] = found.get(one.part, 0) + one.flops
        return found

    @property
    def hardware_flops(self) -> float:
        return sum(one.flops for one in self.work)

    @property
    def exposed_bytes(self) -> float:
        return sum(one.exposed_bytes for one in self.traffic)

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

    def refusal(self) -> str:
        """Why this does not fit, in numbers, and what would take less."""
        parts = ((name, size) for name, size in sorted(self.memory_bytes.items(), key=lambda part: -part[1]) if size)
        return (f"a device would need {amount(self.peak_bytes, 'bytes')}, and has {amount(self.limit_bytes, 'bytes')}: "
                + ", ".join(f"{name} {amount(size, 'bytes')}" for name, size in parts)
                + f"; try {compiled.advice(self.cfg)}")  # fmt: skip

    def settings(self) -> str:
        """The way of working, what `auto` chose first and with reasons."""
        said = {name.partition("=")[0] for name in self.why.split(", ")} | auto.without_effect(self.cfg.mesh)
        rest = " ".join(one for one in str(self.cfg.work).split() if one.partition("=")[0] not in said)
        return f"{self.why}; {rest}" if self.why else rest

    @property
    def device_batch(self) -> int:
        return fit.split_batch(self.cfg).device_batch

    @property
    def wire_by_axes(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in self.traffic:
            found["*".join(one.axes)] = found.get("*".join(one.axes), 0) + one.wire_bytes
        return found

    def seconds(self, flops: float | None = None, exchanges=None, alone=False) -> dict[str, float] | None:
        """Where the time of a step goes: products, wires by mesh axes, memory of the optimizer, bubble.

        flops, exchanges  those of a compiled step, in place of the predicted ones
        alone  as if nothing ran beside anything else: all bytes are waited for
        A roofline. A product runs at the chip's peak, or at its memory's full speed, whichever takes longer; a
        collective at its wires' full speed. What is exposed is waited for; what is hidden, only as far as the wires of
        an axis take longer than all products. Latency is left out. None: the chip's or the wires' speed is not known.
        """
        chip = self.topology and self.topology.chip
        if not chip or not chip.peak_flops_per_s:
            return None
        compute = sum(maximum(x.flops / chip.peak_flops_per_s, x.hbm_bytes / chip.hbm_bytes_per_s) for x in self.work)
        if flops is not None:
            compute += (flops - self.hardware_flops) / chip.peak_flops_per_s
        found, hidden, waits = {"compute": compute}, {}, compute  # `waits`: what a stage does in its slots
        for one in self.traffic if exchanges is None else exchanges:
            speed, name = self.speed(one), "*".join(one.axes)
            exposed_bytes = one.wire_bytes if alone else one.exposed_bytes
            found[name] = found.get(name, 0) + exposed_bytes / speed
            hidden[name] = hidden.get(name, 0) + (one.wire_bytes - exposed_bytes) / speed
            waits += exposed_bytes / speed * one.in_a_slot
        for name, time in hidden.items():
            longer = maximum(time - compute, 0)
            found[name], waits = found[name] + longer, waits + longer
        state = sum(self.memory_bytes[part] for part in ("parameters", "optimizer"))
        found["optimizer"] = (2 * state + self.memory_bytes["parameters"]) / chip.hbm_bytes_per_s
        found["bubble"] = waits * self.bubble / (1 - self.bubble)
        return found

    def speed(self, one: costs.Traffic) -> float:
        """Bytes per second of a collective along mesh axes. Positions go around TENSOR both ways at once."""
        link = self.link(one.axes)
        if one.kind == "all-to-all":
            return link.all_to_all_bytes_per_s
        if one.kind == "collective-permute":
            n = self.cfg.mesh.tensor
            both_ways = (n - 1) / (n // 2) if one.axes == (TENSOR,) else 1
            return minimum(link.bytes_per_s, both_ways * link.neighbour_bytes_per_s)
        return link.bytes_per_s

    def link(self, axes: tuple[str, ...]) -> hardware.Link:
        return hardware.link(self.cfg.mesh, self.topology, axes)

    @property
    def step_s(self) -> float | None:
        seconds = self.seconds()
        return seconds and sum(seconds.values())

    @functools.cached_property
    def expected(self) -> dict[str, float] | None:
        """Seconds by cause as a replay of the compiled step would have them; None where none is: see `expected`."""
        return expected.seconds(self)

    @property
    def likely_s(self) -> float | None:
        """Seconds of a step: as expected, or, where that is not known, the roofline's."""
        return sum(self.expected.values()) if self.expected else self.step_s

    def mfu(self, step_s: float | None) -> float | None:
        """Model FLOPs over what the chip could have done in the time."""
        return step_s and self.model_flops / step_s / self.topology.chip.peak_flops_per_s

    def to_json(self) -> dict:
        """The plan as a dict of numbers, of one device and step."""
        step_s, likely_s = self.step_s, self.likely_s
        names = ("params_total", "params_active", "tokens_per_step", "model_flops", "hardware_flops", "wire_bytes",
                 "exposed_bytes", "peak_bytes", "temp_bytes", "limit_bytes", "fits", "bubble", "step_s", "memory_bytes",
                 "wire_by_axes", "flops")  # fmt: skip
        return {
            "mesh": str(self.cfg.mesh), "topology": self.topology and str(self.topology), "compile_s": None,
            **{name: getattr(self, name) for name in names}, "mfu": self.mfu(step_s), "seconds": self.seconds(),
            "expected": self.expected, "likely_s": likely_s, "likely_mfu": self.mfu(likely_s),
            "traffic": [dataclasses.asdict(one) for one in self.traffic],
        }  # fmt: skip


def plan(cfg: Config, topology: hardware.Topology | str | None = None, limit_bytes: int | None = None) -> Plan:
    """Predict what a step costs; no device is touched. What is `auto` is chosen here, see `auto.py`.

    topology     the devices; None: times, and whether it fits, are not known
    limit_bytes  memory of a device, if not what the chip has
    Raises: UserError for settings that do not fit the mesh, and a mesh that does not fit the topology.
    """
    topology = hardware.Topology.parse(topology) if isinstance(topology, str) else topology
    if topology:
        hardware.layout(cfg.mesh, topology)
        limit_bytes = limit_bytes or topology.chip.memory_bytes
    fit.split_batch(cfg)  # refused before a width: it is the easier one to change
    fit.check(cfg.model, cfg.mesh, cfg.work)
    one, why = auto.choose(cfg, lambda settled: of_settled(settled, topology, limit_bytes))
    return dataclasses.replace(one, why=why)


def of_settled(cfg: Config, topology: hardware.Topology | None, limit_bytes: int | None) -> Plan:
    """The plan of a step in which nothing is to be chosen."""
    sched, platform = pipeline.schedule(cfg), "tpu" if is_tpu(topology and topology.chip) else "cpu"
    chip = topology.chip.key if topology else ""
    total, active = parameters(cfg.model)
    tokens = cfg.data.tokens_per_step
    return Plan(
        cfg, topology, total, active, tokens, tokens * model_flops_per_token(cfg) / cfg.mesh.devices,
        costs.work(cfg, sched, platform), memory.memory(cfg, sched, platform),
        costs.traffic(cfg, sched, platform, chip), sched, limit_bytes, costs.bubble(cfg, sched),
    )  # fmt: skip


def is_tpu(chip: hardware.Chip | None) -> bool:
    return bool(chip and chip.torus_dims)


WORTH = 0.03  # of the time, to be worth a word


def faster(one: Plan) -> tuple[dict[str, str], Plan] | None:
    """The settings that `auto` would choose in place of those that were pinned, and their plan.

    None: they would not take 3% less than the plan does, if that fits at all, or the time is not known.
    """
    if one.likely_s is None or one.limit_bytes is None:
        return None
    work = one.cfg.work
    free = dataclasses.replace(work, **dict.fromkeys(work.ways("least"), AUTO))
    other = plan(dataclasses.replace(one.cfg, work=free), one.topology, one.limit_bytes)
    if not other.fits or (one.fits and other.likely_s > (1 - WORTH) * one.likely_s):
        return None
    pairs = ((f.name, getattr(other.cfg.work, f.name), getattr(work, f.name)) for f in dataclasses.fields(work))
    return {f"work.{name}": now for name, now, before in pairs if now != before}, other


def faster_layout(one: Plan) -> tuple[dict[str, str], Plan] | None:
    """The same of a plan that `search` found, its mesh and schedule among the settings."""
    chosen = {"mesh": str(one.cfg.mesh)}
    if one.cfg.mesh.stage > 1:
        chosen |= {"work.schedule": one.cfg.work.schedule, "work.chunks": one.cfg.work.chunks}
    better = faster(one)
    return better and (chosen | better[0], better[1])


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
    seconds = one.seconds(counted.flops, [sent(x) for x in counted.collectives if "?" not in x.axes])
    step_s = seconds and sum(seconds.values())
    return same | {
        "hardware_flops": counted.flops,
        "wire_bytes": counted.total.wire_bytes,
        "wire_by_axes": by_axes,
        "collectives": counted.total.count,
        "hidden_bytes": counted.total.hidden_bytes,
        "exposed_bytes": counted.total.exposed_bytes,
        "unknown": counted.unknown,
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


def sent(one: ledger.Collective) -> costs.Traffic:
    """A compiled collective as the plan's own are."""
    wire_bytes = one.count * one.wire_bytes
    return costs.Traffic(one.scope, one.kind, one.axes, one.count, wire_bytes, wire_bytes * (not one.hidden),
                         "_slot" in one.scope)  # fmt: skip


# Search ---------------------------------------------------------------------------------------------------------------


def meshes(devices: int):
    """All ways to spread devices over the six axes."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(AXES) - 1):
        if devices % math.prod(sizes) == 0:
            yield MeshConfig(*sizes, devices // math.prod(sizes))


REFINED = 20  # of the layouts that a search finds, the first, for which all is chosen that is `auto`


def search(cfg: Config, topology: hardware.Topology, limit_bytes: int | None, say=lambda text: None):
    """Plan every mesh, and every schedule where there are stages.

    What is `auto` takes least memory at first; then it is chosen for the first twenty layouts.
    Returns the plans that fit, fastest first; those that do not, smallest first; and {reason: how many are refused}.
    """
    fit, large, refused = [], [], {}
    autos, dense = cfg.work.autos, not cfg.model.n_experts  # dense: then an expert axis is another fsdp axis
    least = {name: value for name, value in cfg.work.ways("least").items() if name in autos}
    tried = [mesh for mesh in meshes(topology.devices) if mesh.expert == 1 or not dense]
    for number, mesh in enumerate(tried):
        if number % 50 == 0:
            say(f"{number} of {len(tried)} meshes planned ..")
        for schedule in [*schedules.SCHEDULES] if mesh.stage > 1 and "schedule" in autos else [cfg.work.schedule]:
            work = dataclasses.replace(cfg.work, **least, schedule=schedule).settled
            try:
                one = plan(dataclasses.replace(cfg, mesh=mesh, work=work), topology, limit_bytes)
            except UserError as error:
                reason = str(error).split(" of ")[0].split(";")[0].split(" (")[0]
                refused[reason] = refused.get(reason, 0) + 1
                continue
            (large if one.fits is False else fit).append(one)
    order = lambda one: one.likely_s or one.wire_bytes
    fit.sort(key=order)
    large.sort(key=lambda one: one.peak_bytes)
    for place, one in enumerate(fit[:REFINED]):
        work = one.cfg.work
        free = dataclasses.replace(cfg.work, schedule=work.schedule, chunks=work.chunks)
        fit[place] = plan(dataclasses.replace(one.cfg, work=free), topology, limit_bytes)
    return sorted(fit, key=order), large, refused


def largest_batch(cfg: Config, topology: hardware.Topology | None, limit_bytes: int | None, say) -> tuple[int, int]:
    """The most sequences that fit, by compiling, and the fewest that do not, a sixteenth apart.

    Starts at what arithmetic says fits, goes on from there in growing steps, and halves what is left between.
    Raises: UserError if not even the smallest batch fits, or memory hardly grows with the batch.
    """
    if (at_once := cfg.work.device_batch) != AUTO:
        raise UserError(f"--max_batch: with work.device_batch={at_once} a device works on {at_once} sequences at "
                        "once, however many there are; leave it at auto to learn how many it could")  # fmt: skip
    unit = cfg.mesh.batch_shards * (1 if cfg.work.microbatches == AUTO else cfg.work.microbatches)

    def sized(units: int) -> Plan:  # all of them at once
        one = replace(cfg, **{"data.batch_size": units * unit, "work.device_batch": units * unit})
        return plan(one, topology, limit_bytes)

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
            raise UserError(f"not even {unit} sequences fit; try a larger fsdp axis, or work.remat=full")
    return low * unit, high * unit


SCALES = {"bytes": (2**30, "GiB", 2**20, "MiB"), "FLOPs": (1e12, "TFLOP", 1e9, "GFLOP"), "s": (1, "s", 1e-3, "ms")}


def amount(x: float | None, unit: str) -> str:
    """A number with its unit, large or small as it is: amount(3e9, "bytes") is "2.794 GiB"."""
    if x is None:
        return "-"
    large, name, small, small_name = SCALES[unit]
    return f"{x / large:,.3f} {name}" if x >= large / 10 else f"{x / small:,.3f} {small_name}"
