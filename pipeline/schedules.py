"""Pipeline schedules as data: which stage works on which microbatch when. Plain Python; no device is used.

A schedule is an order of operations for each stage. `F` is the forward pass of one microbatch through one chunk of
layers, and `B` is its backward pass. If weight gradients are delayed, `B` computes only the gradient of the inputs, and
`W` computes the gradient of the weights. `Schedule.table` assigns operations to ticks, the time slots of the schedule:
in one tick a stage does at most one F, then one B, then one W, and what it sends arrives at the end of the tick.
`rows` adds the buffer slots that each operation reads and writes, as arrays for the executor in `ticks.py`. `check.py`
runs these rows with labels in place of arrays.

Letters: S stages, M microbatches, v chunks of layers per stage (virtual stages). Chunk c of stage s is number c*S + s
in the order of layers.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from utils import UserError, suggest

KINDS = "FBW"
IDLE = -1


class Op(NamedTuple):
    """One operation of one stage."""

    kind: str  # F, B or W
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (chr(ord("a") + self.chunk) if self.chunk else "")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The operations of each stage, in order. In code, s is the index of a stage, m of a microbatch, c of a chunk."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    orders: tuple[tuple[Op, ...], ...]  # of each stage
    turns: bool = False  # True: all forward passes of all stages end before the first backward pass starts

    @property
    def in_one_piece(self) -> bool:
        """True if there is nothing to schedule: a step is `model.forward` and its autodiff."""
        return self.stages * self.microbatches == 1

    @functools.cached_property
    def table(self) -> list[list[tuple[Op, ...]]]:
        """Operations of each stage in each tick, [ticks][stages]; an empty entry means idle."""
        return assign_ticks(self)

    @functools.cached_property
    def op_counts(self) -> np.ndarray:
        """Number of operations of each kind in KINDS, [ticks, stages, kinds]."""
        count = lambda cell: [sum(op.kind == kind for op in cell) for kind in KINDS]
        return np.array([[count(cell) for cell in row] for row in self.table])

    @property
    def turn(self) -> int | None:
        """The tick of the first backward pass if all forward passes end before it, else None."""
        return sum(any(op.kind == "F" for cell in row for op in cell) for row in self.table) if self.turns else None

    @property
    def splits_backward(self) -> bool:
        return any(op.kind == "W" for op in self.orders[0])

    @property
    def ticks(self) -> int:
        return len(self.table)

    @property
    def slots(self) -> "Slots":
        """Number of slots in each buffer. If there is nothing to schedule, autodiff saves one set of activations."""
        return Slots(0, 1, 0) if self.in_one_piece else rows(self)[1]

    @property
    def rounds(self) -> int:
        """Number of rounds in which layers are sent to the stages that interleaving assigns them to; see `routes`."""
        return sum(any(a != b for a, _, b, _ in one) for one in routes(self.stages, self.chunks))


# The schedules --------------------------------------------------------------------------------------------------------
# As published, a backward pass runs as soon as it can. In lock-step what a stage sends arrives one tick later, and a
# tick holds an F and a B. So a stage must be twice as far ahead of the next one to be never idle: `lead=2`.


@functools.cache
def gpipe(S: int, M: int, v: int = 1, lead: int = 1, passes: int = 1) -> Schedule:
    """Order all forward passes, then all backward passes, last microbatch first; repeat for each accumulation pass.

    With v chunks, all microbatches pass through the stages v times.
    Source: GPipe, arXiv:1811.06965. Bubble (idle fraction): (S - 1) / (vM + S - 1). Stored activations: vM.
    """
    order = []
    for first in range(0, M * passes, M):
        forward = [Op("F", m, chunk) for chunk in range(v) for m in range(first, first + M)]
        order += [*forward, *(op._replace(kind="B") for op in reversed(forward))]
    return Schedule("gpipe", S, M * passes, v, (tuple(order),) * S, turns=passes == 1)


def alternate_passes(forward: list[Op], backward: list[Op], ahead: int) -> tuple[Op, ...]:
    """Order `ahead` forward passes, then alternate forward and backward, then add the remaining backward passes."""
    ahead = min(ahead, len(forward))
    pairs = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(op for pair in pairs for op in pair), *backward[len(forward) - ahead :])


def one_f_one_b(S: int, M: int, v: int = 1, lead: int = 1) -> Schedule:
    """Order S - 1 - s forward passes first on stage s, then alternate one forward and one backward pass.

    Source: PipeDream-Flush, arXiv:2006.09503. Bubble: (S - 1) / (M + S - 1). Stored activations: min(S - s, M).
    """
    forward, backward = ([Op(kind, m) for m in range(M)] for kind in "FB")
    return Schedule("1f1b", S, M, 1, tuple(alternate_passes(forward, backward, lead * (S - 1 - s)) for s in range(S)))


def interleaved(S: int, M: int, v: int = 2, lead: int = 1) -> Schedule:
    """Order 1F1B with v chunks of layers per stage: groups of S microbatches pass through the stages v times.

    Raises: UserError if S does not divide M.
    Source: Megatron-LM, arXiv:2104.04473, section 2.2. Bubble: (S - 1) / (vM + S - 1).
    """
    if M % S:
        near = sorted({max(M // S, 1) * S, (M // S + 1) * S})
        raise UserError(
            f"interleaved runs microbatches in groups of stage={S}, and microbatches={M} is not a multiple of {S} "
            f"({M} % {S} = {M % S}); use {' or '.join(map(str, near))} microbatches"
        )
    forward = [Op("F", k // (S * v) * S + k % S, k % (S * v) // S) for k in range(M * v)]
    backward = [Op("B", op.microbatch, v - 1 - op.chunk) for op in forward]
    ahead = [2 * (S - 1 - s) + (v - 1) * S for s in range(S)]
    return Schedule("interleaved", S, M, v, tuple(alternate_passes(forward, backward, n) for n in ahead))


def zero_bubble(S: int, M: int, v: int = 1, lead: int = 1) -> Schedule:
    """Order 1F1B with delayed weight gradients: stage s delays them by s microbatches, into ticks that would be idle.

    Source: ZB-H1 in arXiv:2401.10241. With F, B, W the times of the operations, a stage idles for
    I = (S - 1)(F + B - min(F, B, W)) if M >= S, and the bubble is I / (M(F + B + W) + I). The paper has W instead of
    the minimum, because its W is the shortest of the three. Stored activations: S.
    """
    forward, backward = ([Op(kind, m) for m in range(M)] for kind in "FB")

    def order(s):
        ops, delayed = [], []
        for op in alternate_passes(forward, backward, lead * (S - 1 - s)):
            ops.append(op)
            if op.kind == "B":
                delayed.append(Op("W", op.microbatch))
                ops += [delayed.pop(0)] if len(delayed) > s else []
        return (*ops, *delayed)

    return Schedule("zb", S, M, 1, tuple(order(s) for s in range(S)))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zero_bubble}


@functools.cache
def schedule(name: str, S: int, M: int, v: int = 1, lead: int = 1) -> Schedule:
    """Build a schedule by name. Raises: UserError for an unknown name, or if the schedule does not allow the sizes."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}; {suggest(name, SCHEDULES)}")
    if min(S, M, v) < 1:
        raise UserError(f"schedule with stages={S}, microbatches={M}, chunks={v}: each must be at least 1")
    if v > 1 and name != "interleaved":
        raise UserError(f"chunks={v}: schedule {name!r} has 1 chunk per stage; use chunks=1 or 'interleaved'")
    return SCHEDULES[name](S, M, v, lead)


# Order and time -------------------------------------------------------------------------------------------------------


def required_op(op: Op, stage: int, S: int, v: int) -> tuple[Op, int] | None:
    """Return the last operation that this one depends on, and its stage; None if a microbatch enters here."""
    place = op.chunk * S + stage
    if op.kind == "F":
        return (op._replace(chunk=(place - 1) // S), (place - 1) % S) if place else None
    if op.kind == "B" and place < S * v - 1:
        return op._replace(chunk=(place + 1) // S), (place + 1) % S
    return op._replace(kind="F" if op.kind == "B" else "B"), stage


def deadlock_error(stage: int, op: Op, needed) -> ValueError:
    return ValueError(f"stage {stage} waits forever: {op} needs {needed[0]} of stage {needed[1]}, which never runs")


def assign_ticks(sched: Schedule) -> list[list[tuple[Op, ...]]]:
    """Assign the operations to ticks, each as early as its inputs allow.

    Raises: ValueError if the orders deadlock or repeat an operation.
    """
    S, todo, done, table = sched.stages, [list(order) for order in sched.orders], {}, []
    for s, order in enumerate(sched.orders):
        if len(set(order)) < len(order):
            raise ValueError(f"stage {s} runs {max(order, key=order.count)} twice")
    while any(todo):
        row, forward_left = [], any(op.kind == "F" for order in todo for op in order)
        for s in range(S):
            cell = []
            while todo[s] and (not cell or KINDS.index(todo[s][0].kind) > KINDS.index(cell[-1].kind)):
                needed = required_op(todo[s][0], s, S, sched.chunks)
                if sched.turns and forward_left and todo[s][0].kind != "F":
                    break
                # A message from another stage arrives at the end of the tick.
                if needed and done.get(needed, len(table)) >= len(table) + (needed in done and needed[1] == s):
                    break
                done[todo[s][0], s] = len(table)
                cell.append(todo[s].pop(0))
            row.append(tuple(cell))
        if not any(row):
            s = next(s for s in range(S) if todo[s])
            raise deadlock_error(s, todo[s][0], required_op(todo[s][0], s, S, sched.chunks))
        table.append(row)
    return table


class Simulation(NamedTuple):
    """Start and end of every operation; sending takes no time."""

    makespan: float  # end of the last operation
    bubble: float  # fraction of the makespan in which a stage is idle
    live: list[int]  # per stage, largest number of (microbatch, chunk) activations stored at once
    spans: dict  # (op, stage) -> (start, end)


def op_times(sched: Schedule, F: float, B: float, W: float) -> dict[str, float]:
    """Return the time of each kind of operation. F, B, W are times of a whole stage; one of its v chunks takes 1/v.

    In a schedule without W operations a backward pass takes B + W.
    """
    v = sched.chunks
    return {"F": F / v, "B": (B if sched.splits_backward else B + W) / v, "W": W / v}


def simulate(sched: Schedule, F: float = 1, B: float = 1, W: float = 0) -> Simulation:
    """Time each operation if each stage continues as soon as its inputs arrive; F, B, W are times of a whole stage."""
    S, v, cost = sched.stages, sched.chunks, op_times(sched, F, B, W)
    todo, free, spans = [list(order) for order in sched.orders], [0.0] * S, {}
    while any(todo):
        before = len(spans)
        for s in range(S):
            while todo[s]:
                needed = required_op(todo[s][0], s, S, v)
                if needed and needed not in spans:
                    break
                op = todo[s].pop(0)
                start = max(free[s], spans[needed][1] if needed else 0)
                spans[op, s] = (start, start + cost[op.kind])
                free[s] = start + cost[op.kind]
        if len(spans) == before:
            s = next(s for s in range(S) if todo[s])
            raise deadlock_error(s, todo[s][0], required_op(todo[s][0], s, S, v))
    makespan = max(free)
    return Simulation(
        makespan, 1 - sum(cost[op.kind] for op in sched.orders[0]) / makespan, live_activations(sched), spans
    )


def live_activations(sched: Schedule) -> list[int]:
    """Return, per stage, how many activations are stored at most at once, in units of one microbatch in one chunk."""
    last = "W" if sched.splits_backward else "B"
    steps = lambda order: np.cumsum([(op.kind == "F") - (op.kind == last) for op in order])
    return [int(steps(order).max()) for order in sched.orders]


def in_lock_step(sched: Schedule, F: float = 1, B: float = 1, W: float = 0) -> Simulation:
    """Time each operation if all stages wait for each other after every tick, as in one SPMD program."""
    cost, spans, begin = op_times(sched, F, B, W), {}, 0.0
    for row in sched.table:
        ends = [begin]
        for s, cell in enumerate(row):
            at = begin
            for op in cell:
                spans[op, s] = at, at + cost[op.kind]
                at += cost[op.kind]
            ends.append(at)
        begin = max(ends)
    return Simulation(begin, 1 - sum(cost[op.kind] for op in sched.orders[0]) / begin, live_activations(sched), spans)


def lock_step(sched: Schedule, F: float = 1, B: float = 1, W: float = 0) -> float:
    """Return the makespan in lock-step."""
    cost = op_times(sched, F, B, W)
    return float((sched.op_counts @ [cost[kind] for kind in KINDS]).max(1).sum())


# Buffers --------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The instructions for the executor, one row per tick: arrays [ticks, stages]; IDLE: no operation.

    The slots are those of the buffers in `Slots`. A buffer of n slots drops a write to slot n: it is not needed.
    """

    forward: np.ndarray  # microbatch
    forward_chunk: np.ndarray
    forward_from: np.ndarray  # slot of `inbox` that holds its input; IDLE: tokens enter here
    keep: np.ndarray  # slot of `kept` for the arrays saved for its backward pass
    loss: np.ndarray  # microbatch whose loss is computed, the same on all stages
    loss_to: np.ndarray  # slot of `cotangents` for the loss's gradient, on the last stage
    backward: np.ndarray  # microbatch
    backward_chunk: np.ndarray
    backward_kept: np.ndarray  # slot of `kept`
    backward_from: np.ndarray  # slot of `cotangents`
    weight: np.ndarray  # microbatch
    weight_chunk: np.ndarray
    weight_kept: np.ndarray  # slot of `kept`
    weight_from: np.ndarray  # slot of `cotangents`
    arrive: np.ndarray  # slot of `inbox` for activations that the previous stage sends in this tick
    arrive_back: np.ndarray  # slot of `cotangents` for gradients that the next stage sends in this tick


class Slots(NamedTuple):
    """The number of slots in each buffer, the same on every stage."""

    inbox: int  # activations received
    kept: int  # arrays saved for backward passes (residuals)
    cotangents: int  # gradients of outputs


PHASES = {"F": 0, "loss": 1, "B": 2, "W": 3, "arrive": 4}  # the order within a tick


def first_fit(lives: dict) -> dict:
    """Assign each value a slot: the first one that is free when it is written. lives: value -> (written, last read)"""
    slot, busy_until = {}, []
    for value, (begin, end) in sorted(lives.items(), key=lambda item: item[1]):
        free = next((i for i, until in enumerate(busy_until) if until < begin), len(busy_until))
        busy_until[free : free + 1] = [end]
        slot[value] = free
    return slot


@functools.cache
def rows(sched: Schedule) -> tuple[Rows, Slots]:
    """Convert the table to the executor's arrays, and compute how many slots its buffers need."""
    S, v, table = sched.stages, sched.chunks, sched.table
    when = {(op, s): tick for tick, row in enumerate(table) for s, cell in enumerate(row) for op in cell}
    moment = lambda tick, phase: len(PHASES) * tick + PHASES[phase]
    out = {name: np.full((len(table), S), IDLE) for name in Rows._fields}
    sizes = dict.fromkeys(Slots._fields, 1)

    def allot(buffer, s, lives):
        slots = first_fit(lives)
        sizes[buffer] = max([sizes[buffer], *(i + 1 for i in slots.values())])
        return slots

    for s in range(S):
        own = {op: tick for (op, stage), tick in when.items() if stage == s}
        inbox, kept, cotangents = {}, {}, {}
        for op, tick in own.items():
            m, c = op.microbatch, op.chunk
            needed = required_op(op, s, S, v)
            if op.kind == "F":
                if needed:
                    inbox[m, c] = (moment(when[needed], "arrive"), moment(tick, "F"))
                kept[m, c] = (moment(tick, "F"), last_use(own, m, c, moment))
            elif op.kind == "B":
                at_loss = needed[1] == s and needed[0].kind == "F"
                begin = moment(own[needed[0]], "loss") if at_loss else moment(when[needed], "arrive")
                cotangents[m, c] = (begin, last_use(own, m, c, moment))
        inbox_at, kept_at, cotangent_at = (
            allot(name, s, lives) for name, lives in zip(Slots._fields, (inbox, kept, cotangents), strict=True)
        )
        for op, tick in own.items():
            m, c = op.microbatch, op.chunk
            needed, is_last = required_op(op, s, S, v), s == S - 1 and c == v - 1
            if op.kind == "F":
                out["forward"][tick, s], out["forward_chunk"][tick, s] = m, c
                out["keep"][tick, s] = kept_at[m, c]
                if needed:
                    out["forward_from"][tick, s] = inbox_at[m, c]
                    out["arrive"][when[needed], s] = inbox_at[m, c]
                if is_last:
                    out["loss"][tick, :] = m
                    out["loss_to"][tick, s] = cotangent_at.get((m, c), IDLE)
            else:
                name = "backward" if op.kind == "B" else "weight"
                out[name][tick, s], out[f"{name}_chunk"][tick, s] = m, c
                out[f"{name}_kept"][tick, s], out[f"{name}_from"][tick, s] = kept_at[m, c], cotangent_at[m, c]
                if op.kind == "B" and not is_last:
                    out["arrive_back"][when[needed], s] = cotangent_at[m, c]
    for name, buffer in (
        ("keep", "kept"),
        ("loss_to", "cotangents"),
        ("arrive", "inbox"),
        ("arrive_back", "cotangents"),
    ):
        out[name][out[name] == IDLE] = sizes[buffer]
    return Rows(**out), Slots(**sizes)


def last_use(own: dict, m: int, c: int, moment) -> int:
    """Return when the arrays that a forward pass saved are last read. own: operation of this stage -> its tick"""
    op = next(op for op in (Op(kind, m, c) for kind in reversed(KINDS)) if op in own)
    return moment(own[op], op.kind)


def forward_only(sched: Schedule) -> Schedule:
    """Return a schedule of only the forward passes, to run them in advance or without a backward pass."""
    keep = lambda order: tuple(op for op in order if op.kind == "F")
    return dataclasses.replace(sched, orders=tuple(map(keep, sched.orders)), turns=False)


@functools.cache
def routes(S: int, v: int) -> list[list[tuple[int, int, int, int]]]:
    """Plan how groups of layers, stored in order, v per stage, reach the stages that interleaving assigns them to.

    Returns rounds, each a list of (sender, its group, receiver, its chunk). In a round every stage sends one group and
    receives one.
    """
    left = [(h // v, h % v, h % S, h // S) for h in range(S * v)]
    rounds = []
    while left:
        # Every stage has as many groups left to send as to receive, so a perfect matching exists (König's theorem).
        # A stage's own groups first: a round in which every stage keeps its group sends nothing.
        receivers = [sorted((edge[2] for edge in left if edge[0] == s), key=lambda to, s=s: to != s) for s in range(S)]
        match = perfect_matching(receivers)
        chosen = [next(edge for edge in left if edge[0] == s and edge[2] == match[s]) for s in range(S)]
        rounds.append(chosen)
        left = [edge for edge in left if edge not in chosen]
    return rounds


def perfect_matching(receivers: list[list[int]]) -> list[int]:
    """Assign each sender one of its possible receivers, so that no two have the same (augmenting paths)."""
    sender_of: dict[int, int] = {}

    def assign(sender: int, tried: set[int]) -> bool:
        for receiver in receivers[sender]:
            if receiver not in tried:
                tried.add(receiver)
                if receiver not in sender_of or assign(sender_of[receiver], tried):
                    sender_of[receiver] = sender
                    return True
        return False

    for sender in range(len(receivers)):
        assign(sender, set())
    return sorted(sender_of, key=sender_of.get)
