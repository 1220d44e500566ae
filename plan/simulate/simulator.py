"""Simulate the compiled program of one device, to estimate what the time of a step is spent on.

`replay(compiled.as_text(), mesh, machine)` executes the instructions in their compiled order with a simulated clock.

- A matmul takes the compiler's own `estimated_cycles` or, with `at_peak`, its FLOPs at the chip's peak. The compiler
  has no estimate for a kernel, which takes the longer of its FLOPs at the peak and its bytes at full memory bandwidth.
- Any other instruction takes the time of its main-memory reads and writes at full bandwidth or, with `by_cycles`, the
  compiler's estimate. Asynchronous copies and slices run one after the other, and overlap with everything else. So do
  the gathers and scatters that a SparseCore runs.
- A collective uses links (`links.py`) from its start on, shared with all other collectives in flight. At its end the
  device waits for it. All devices are assumed to be at the same point of the program.
- A loop runs as often as its trip count. A conditional runs its longest branch, in all executions or in the fraction
  that `shares` gives (see `ledger.read`). Collectives in flight do not share links with those inside a loop or branch
  that runs between their start and their end.

Four things are unknown: how much memory bandwidth a matmul leaves for other instructions, how long a collective takes
to start (the option `latency_s`), how a ring of devices is ordered, and the speed of vector units. So an instruction
that reads and writes nothing in main memory takes no time. None of this has been measured on a chip.
"""

import collections
import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from compile import ledger
from compile.hlo import GROUPS, Instruction, Program, device_groups
from compile.ledger import Share
from plan.chips import links
from plan.simulate.moved import Memory

MATMULS, OTHERS, COPIES = "matmuls", "other ops", "copies"


@dataclass(frozen=True)
class Machine:
    """The devices that a program was compiled for. Link bandwidths count one direction."""

    torus: links.Torus
    places: np.ndarray  # coordinates of each device's chip, in the mesh's order, [device, torus axis]
    peak_flops_per_s: float
    cycles_per_s: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float = 0.0  # from a chip to its neighbor


class Event(NamedTuple):
    """An interval on the timeline of a computation, in seconds from its start."""

    start: float
    end: float
    lane: str  # core, or the mesh axes of a collective
    what: str  # matmuls, other ops, copies, waiting, or a collective's kind
    scope: str
    source: str = ""  # the source line, "model.py:123 in function"; "?" for instructions that the compiler added
    wire_bytes: int = 0  # bytes that this device sends in the collective (also for the wait at its end)


@dataclass
class Timeline:
    """One execution of a computation."""

    seconds: float = 0.0  # including called computations
    own: collections.Counter = field(default_factory=collections.Counter)  # seconds by cause, without calls
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Replay:
    """The simulated step of one device, in seconds."""

    seconds: float
    causes: dict[str, float]  # matmuls, other ops, copies, and waits by the collective's axes: "fsdp*tensor"
    played: dict[str, Timeline]  # computation -> one execution
    times: dict[str, float]  # how often a step runs each computation

    def longest(self, count: int = 2) -> list[str]:
        """Return the computations that take the most time in a step, not counting the computations that they call."""
        own = {name: self.times.get(name, 0) * one.own.total() for name, one in self.played.items()}
        return [name for name in sorted(own, key=own.get, reverse=True) if own[name]][:count]


def replay(text: str, mesh: Mesh | dict[str, int], machine: Machine, shares: dict[str, Share] | None = None,
           at_peak: bool = False, by_cycles: bool = False) -> Replay:  # fmt: skip
    """Simulate a scheduled program.

    mesh       the mesh that the program was compiled for, or the sizes of its axes, outermost first
    shares     named scope -> fraction of a conditional's executions in which devices wait for its longest branch
    at_peak    matmuls run at the chip's peak, instead of the compiler's estimate
    by_cycles  other operations take the compiler's estimate, instead of the time of their bytes
    Raises: ValueError if the program is not scheduled, or if mesh and machine have different numbers of devices; and
    the errors of `ledger.read`.
    """
    sizes = tuple(mesh.shape.items()) if isinstance(mesh, Mesh) else tuple(mesh.items())
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("the program is not scheduled; pass the text of a compiled program, compiled.as_text()")
    if (devices := math.prod(n for _, n in sizes)) != len(machine.places):
        raise ValueError(f"mesh {dict(sizes)} has {devices} devices, but the machine has {len(machine.places)} places")
    player = Simulator(Program(text), sizes, machine, at_peak, by_cycles)
    calls = {name: player.simulate(name) for name in player.program.computations}  # each comes before its callers
    times = ledger.execution_counts(calls, player.program.entry, shares or {})
    causes = collections.Counter()
    for name, played in player.played.items():
        for cause, seconds in played.own.items():
            causes[cause] += times[name] * seconds
    causes = +causes
    return Replay(sum(causes.values()), dict(causes.most_common()), player.played, dict(times))


class Simulator:
    """Simulates the computations of a program, each once."""

    def __init__(self, program: Program, sizes: tuple, machine: Machine, at_peak: bool, by_cycles: bool):
        self.program, self.sizes, self.machine = program, sizes, machine
        self.at_peak, self.by_cycles = at_peak, by_cycles
        self.memory, self.played, self.loads, self.rates = Memory(program), {}, {}, {}
        self.seconds = {}  # of each computation, including calls
        self.parts = {part for c in program.computations.values() for one in c.values() for part in one.contents}
        self.work = functools.cache(self._work)

    def simulate(self, name: str) -> list[ledger.Call]:
        """Simulate one computation, and return its calls. The time of a fused computation counts in the fusion."""
        computation, calls = self.program.computations[name], []
        if name in self.parts:
            self.played[name], self.seconds[name] = Timeline(), 0.0
            return calls
        begins, ends = collections.defaultdict(list), collections.defaultdict(list)
        for where, inner, _, places in ledger.spans(self.program, name):
            if flight := self.flight(where, inner):
                begins[places[0]].append(flight)
                ends[places[-1]].append(flight)
        clock = Clock(self)
        for place, one in enumerate(computation.values()):
            for flight in begins[place]:
                clock.begin(flight)
            within = [*ledger.calls_of(self.program, computation, one, self.seconds)]
            calls += within
            nested = [call for call in within if call.times and call.computation not in self.parts]
            if nested:
                clock.skip(sum(call.times * self.seconds[call.computation] for call in nested))
            elif moved := self.bytes_beside_the_core(computation, one):
                queue, size = moved
                clock.copy(one.name, size / self.machine.hbm_bytes_per_s, queue)
            elif one.opcode.endswith("-done") and one.operands[0] in clock.copies:
                clock.wait_copy(one.operands[0])
            elif not begins[place] or one.opcode == "fusion":
                cause, seconds = self.instruction_time(computation, one)
                clock.run(cause, seconds, one)
            for flight in ends[place]:
                clock.wait(flight)
        self.played[name] = clock.result()
        self.seconds[name] = self.played[name].seconds
        return calls

    def instruction_time(self, computation: dict, one: Instruction) -> tuple[str, float]:
        """Return the cause and the seconds of one execution of an instruction on the core."""
        machine = self.machine
        if one.is_collective or one.opcode.endswith(("-start", "-done", "-update")):
            return OTHERS, 0.0
        moving = self.memory.bytes_moved(computation, one) / machine.hbm_bytes_per_s
        own = ledger.matmul_work(computation, one)
        work = ledger.add_work([own, *map(self.work, one.contents)])
        cycles = one.attribute('"estimated_cycles":', r'"(\d+)"')
        estimate = int(cycles) / machine.cycles_per_s if cycles else None
        if not work.flops and not work.unknown:
            seconds = estimate if self.by_cycles and cycles else moving
            return OTHERS, 0.0 if self.is_fused_collective(one) else seconds
        computing = work.flops / machine.peak_flops_per_s
        if self.at_peak and not own.unknown:
            return MATMULS, computing
        return MATMULS, max(computing, moving) if estimate is None else estimate

    def bytes_beside_the_core(self, computation: dict, one: Instruction) -> tuple[str, int] | None:
        """Return the queue and the bytes of a copy or of a SparseCore's gather or scatter, if this instruction begins
        it. An instruction that starts a SparseCore without operands only prepares it: the next update begins."""
        if one.opcode in COPYING:
            return "copies", self.memory.bytes_moved(computation, one)
        begun = one
        if one.opcode.endswith("-update") and not computation[one.operands[0]].operands:
            begun = computation[one.operands[0]]
        if "-start" not in begun.opcode or SPARSECORE not in begun.attributes or (begun is one and not one.operands):
            return None
        return None if self.is_fused_collective(begun) else (SPARSECORE, self.offloaded_bytes(begun))

    def offloaded_bytes(self, one: Instruction) -> int:
        """Count the bytes that a SparseCore reads and writes in main memory."""
        total = 0
        for part in one.contents:
            computation = self.program.computations[part]
            for inner in computation.values():
                nested = SPARSECORE in inner.attributes
                total += self.offloaded_bytes(inner) if nested else self.memory.bytes_moved(computation, inner)
        return total

    def is_fused_collective(self, one: Instruction) -> bool:
        """Return True if a fusion or an async start contains a collective: then its time is the time on the links."""
        return any(ledger.collectives_in(self.program, "", one))

    def _work(self, name: str) -> ledger.Work:
        computation = self.program.computations[name]
        return ledger.add_work(
            work for one in computation.values()
            for work in (ledger.matmul_work(computation, one), *map(self.work, one.contents))
        )  # fmt: skip

    # Collectives

    def flight(self, where: str, one: Instruction) -> "Flight | None":
        """Compute one collective's load on the links; None for groups of one device, which send nothing."""
        found = ledger.collective(self.program, where, one, self.sizes)
        if not found:
            return None
        text = one.attribute(
            "source_target_pairs=" if found.kind == "collective-permute" else "replica_groups=", GROUPS
        )
        named = one.attribute('"strategy":', r'"(\w+)"')
        ring = {"StrategyRing": True}.get(named)
        key = (found.kind, text, ring, found.wire_bytes, found.payload_bytes)
        if key not in self.loads:
            self.loads[key] = self.load(*key)
        load, hops = self.loads[key]
        return Flight("*".join(found.axes), found, key, load, hops * self.machine.latency_s)

    def load(self, kind: str, text: str, ring: bool | None, wire_bytes: int, payload_bytes: int):
        """Return the bytes on each link, and the number of consecutive hops."""
        torus, places = self.machine.torus, self.machine.places
        groups = np.array(device_groups(text, len(places)))
        if kind == "collective-permute":
            groups = groups[groups[:, 0] != groups[:, 1]]
            start, end = places[groups[:, 0]], places[groups[:, 1]]
            return links.permute_load(torus, start, end, payload_bytes), int(torus.distance(start, end).max(initial=0))
        at = places[groups]
        if kind == "all-to-all":
            load = links.all_to_all_load(torus, at, payload_bytes)
            return load, int(torus.distance(at[:, :1], at).max())
        axes = None if ring else links.whole_axes(torus, at)
        hops = groups.shape[1] // 2 if axes is None else sum(torus.shape[d] // (1 + torus.wraps[d]) for d in axes)
        return links.gather_load(torus, at, wire_bytes, ring), hops * (2 if kind == "all-reduce" else 1)

    def speeds(self, flights: list["Flight"]) -> list[float]:
        """Return the rate of each collective in flight, as the fraction that is completed per second."""
        key = tuple(flight.key for flight in flights)
        if key not in self.rates:
            self.rates[key] = links.share_bandwidth([flight.load for flight in flights], self.machine.link_bytes_per_s)
        return self.rates[key]


SPARSECORE = 'async_execution_thread="sparsecore"'
COPYING = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


@dataclass(eq=False)
class Flight:
    """A collective in flight."""

    lane: str  # mesh axes
    collective: ledger.Collective
    key: tuple  # identifies its load
    load: np.ndarray
    latency_s: float
    start: float = 0.0
    remaining: float = 1.0
    done_at: float | None = None


class Clock:
    """The time within one computation, and the transfers in flight."""

    def __init__(self, player: Simulator):
        self.player, self.now, self.skipped = player, 0.0, 0.0
        self.flying: list[Flight] = []
        self.copies, self.copied_at = {}, collections.Counter()
        self.own, self.events = collections.Counter(), []

    def advance(self, until: float, stop: Flight | None = None) -> None:
        """Advance the transfers in flight to a time or, with `stop`, until that collective has arrived."""
        while self.flying and (self.now < until if stop is None else stop.remaining > 0):
            speeds = self.player.speeds(self.flying)
            ends = [
                flight.remaining / speed if speed else math.inf
                for flight, speed in zip(self.flying, speeds, strict=True)
            ]
            step = min(ends) if stop is not None else min(min(ends), until - self.now)
            for flight, speed, end in zip(self.flying, speeds, ends, strict=True):
                flight.remaining = 0.0 if end <= step * (1 + 1e-9) else flight.remaining - speed * step
            self.now += step
            for flight in [flight for flight in self.flying if not flight.remaining]:
                self.flying.remove(flight)
                self.record_arrival(flight)
        if stop is None:
            self.now = max(self.now, until)

    def record_arrival(self, flight: Flight) -> None:
        flight.done_at = self.now + flight.latency_s
        one = flight.collective
        self.events.append(Event(float(flight.start), float(flight.done_at), flight.lane, one.kind,
                                 one.scope, one.source, one.wire_bytes))  # fmt: skip

    def begin(self, flight: Flight) -> None:
        flight.start = self.now
        self.flying.append(flight)

    def wait(self, flight: Flight) -> None:
        begin = self.now
        self.advance(math.inf, flight)
        self.advance(max(self.now, flight.done_at))
        one = flight.collective
        self.record(flight.lane, begin, "waiting for " + flight.lane, one.scope, one.source, one.wire_bytes)

    def run(self, cause: str, seconds: float, one: Instruction) -> None:
        begin = self.now
        self.advance(begin + seconds)
        if self.now > begin:
            self.record(cause, begin, cause, one.scope, self.player.program.source(one))

    def record(self, cause: str, begin: float, what: str, *which) -> None:
        if self.now > begin:
            self.own[cause] += float(self.now - begin)
            self.events.append(Event(float(begin), float(self.now), "core", what, *which))

    def skip(self, seconds: float) -> None:
        """Advance the clock by the time of a called computation, which is not part of `own`."""
        self.advance(self.now + seconds)
        self.skipped += seconds

    def copy(self, name: str, seconds: float, queue: str) -> None:
        self.copies[name] = self.copied_at[queue] = max(self.now, self.copied_at[queue]) + seconds

    def wait_copy(self, name: str) -> None:
        begin = self.now
        self.advance(max(self.now, self.copies.pop(name)))
        self.record(COPIES, begin, COPIES, "")

    def result(self) -> Timeline:
        return Timeline(float(self.now), self.own, self.events)
