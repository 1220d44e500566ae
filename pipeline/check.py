"""Verify a schedule's rows, the instructions of the executor, by running them with labels in place of arrays.

`check` raises at the first operation that reads anything but its own input. It shares no code with `schedules.rows`,
because a mistake in shared code would go unnoticed.
"""

from pipeline.schedules import IDLE, Op, Rows, Schedule, Slots, rows


class Stage:
    """One stage's buffers: slot -> (label of the value that it holds, number of remaining reads)."""

    def __init__(self, name: str, slots: Slots):
        self.name, self.slots = name, slots
        self.buffers = {buffer: {} for buffer in Slots._fields}
        self.tick, self.done = 0, {}  # operation -> its tick

    def fail(self, what: str):
        raise ValueError(f"{self.name.format(tick=self.tick)}: {what}")

    def write(self, buffer: str, slot: int, label: tuple, reads: int) -> None:
        size = getattr(self.slots, buffer)
        if slot == size and reads:
            self.fail(f"{label} is not stored, but is needed later")
        there, unread = self.buffers[buffer].get(slot, (None, 0))
        if slot < size and unread:
            self.fail(f"{label} overwrites {there}, which is still needed")
        if slot < size:
            self.buffers[buffer][slot] = (label, reads)

    def read(self, buffer: str, slot: int, label: tuple) -> None:
        there, reads = self.buffers[buffer].get(slot, ("nothing", 0))
        if there != label or not reads:
            found = there if reads or there == "nothing" else f"{there} again"
            self.fail(f"reads {found} from slot {slot} instead of {label}")
        self.buffers[buffer][slot] = (there, reads - 1)

    def expect_no_write(self, buffer: str, slot: int, why: str) -> None:
        """Raises: ValueError if a value is written into the buffer."""
        if slot != getattr(self.slots, buffer):
            self.fail(f"writes to slot {slot} for {why}")

    def record_run(self, sched: Schedule, op: Op) -> None:
        if not (0 <= op.microbatch < sched.microbatches and 0 <= op.chunk < sched.chunks):
            self.fail(f"{op} is not one of {sched.microbatches} microbatches and {sched.chunks} chunks")
        if op in self.done:
            self.fail(f"{op} already ran in tick {self.done[op]}")
        self.done[op] = self.tick


def check(sched: Schedule, found: tuple[Rows, Slots] | None = None) -> None:
    """Verify the rows of a schedule, or the given rows, by running them with labels in place of arrays.

    Raises: ValueError at the first operation that reads anything but its own input, overwrites a value that is still
    needed, or runs twice or never, and at the first value that is sent but not stored.
    """
    r, slots = found or rows(sched)
    stages = [Stage(f"{sched.name}, tick {{tick}}, stage {s}", slots) for s in range(sched.stages)]
    for tick in range(len(r.forward)):
        for stage in stages:
            stage.tick = tick
        own = [Rows(*(int(x[tick, s]) for x in r)) for s in range(sched.stages)]
        sent = [forward(sched, s, stage, own[s]) for s, stage in enumerate(stages)]
        for s, stage in enumerate(stages):
            loss(sched, s, stage, own[s], sent[-1])
        sent_back = [backward(sched, stage, own[s]) for s, stage in enumerate(stages)]
        for stage, row in zip(stages, own, strict=True):
            weight(sched, stage, row)
        for s, stage in enumerate(stages):
            arrive(sched, s, stage, own[s].arrive, sent)
            arrive_back(sched, s, stage, own[s].arrive_back, sent_back)
    kinds = {op.kind for op in sched.orders[0]}
    wanted = {(Op(kind, m, c), s) for kind in kinds for m in range(sched.microbatches) for c in range(sched.chunks)
              for s in range(sched.stages)}  # fmt: skip
    if missing := {(op, s) for op, s in wanted if op not in stages[s].done}:
        op, s = min(missing)
        raise ValueError(f"{sched.name}: {op} of stage {s} never runs")


def backward_reads(sched: Schedule) -> int:
    """Return how often the arrays saved for the backward pass are read: by B, and by W if the schedule has it."""
    return len({op.kind for op in sched.orders[0]} - {"F"})


def forward(sched: Schedule, s: int, stage: Stage, own: Rows) -> tuple | None:
    """Check the forward pass of this tick, if any. Return the (microbatch, chunk) whose output stage s sends."""
    m, c = own.forward, own.forward_chunk
    if m == IDLE:
        return stage.expect_no_write("kept", own.keep, "a forward pass that does not run")
    stage.record_run(sched, Op("F", m, c))
    if c * sched.stages + s:
        stage.read("inbox", own.forward_from, ("input of", m, c))
    elif own.forward_from != IDLE:
        stage.fail("reads its inbox, but tokens enter at this stage")
    stage.write("kept", own.keep, ("residuals of", m, c), backward_reads(sched))
    return m, c


def loss(sched: Schedule, s: int, stage: Stage, own: Rows, sent: tuple | None) -> None:
    """Check the loss. All stages compute it together when a microbatch leaves the last stage, which then stores its
    gradient."""
    due = sent[0] if sent and sent[1] == sched.chunks - 1 else IDLE
    if own.loss != due:
        stage.fail(f"computes the loss of microbatch {own.loss}, but {due} has left the last stage")
    if s < sched.stages - 1 or due == IDLE:
        return stage.expect_no_write("cotangents", own.loss_to, "a loss of another stage")
    stage.write("cotangents", own.loss_to, ("gradient of", due, sched.chunks - 1), backward_reads(sched))


def backward(sched: Schedule, stage: Stage, own: Rows) -> tuple | None:
    """Check the backward pass of this tick, if any. Return the (microbatch, chunk) whose gradient the stage sends."""
    m, c = own.backward, own.backward_chunk
    if m == IDLE:
        return None
    stage.record_run(sched, Op("B", m, c))
    stage.read("kept", own.backward_kept, ("residuals of", m, c))
    stage.read("cotangents", own.backward_from, ("gradient of", m, c))
    return m, c


def weight(sched: Schedule, stage: Stage, own: Rows) -> None:
    m, c = own.weight, own.weight_chunk
    if m == IDLE:
        return
    stage.record_run(sched, Op("W", m, c))
    if Op("B", m, c) not in stage.done:
        stage.fail(f"W{m} runs before its B")
    stage.read("kept", own.weight_kept, ("residuals of", m, c))
    stage.read("cotangents", own.weight_from, ("gradient of", m, c))


def arrive(sched: Schedule, s: int, stage: Stage, slot: int, sent: list) -> None:
    """Store the output that the previous stage sent as an input. Stage 0 receives the last stage's output as the input
    of its next chunk; the output of the last chunk is not stored."""
    S, came = sched.stages, sent[s - 1]
    if not came or came[1] * S + (s - 1) % S == sched.chunks * S - 1:
        return stage.expect_no_write("inbox", slot, "a message that does not arrive")
    stage.write("inbox", slot, ("input of", came[0], came[1] + (s == 0)), 1)


def arrive_back(sched: Schedule, s: int, stage: Stage, slot: int, sent_back: list) -> None:
    """Store the gradient that the next stage sent as the gradient of this stage's output. That of stage 0's first chunk
    is not stored."""
    S, came = sched.stages, sent_back[(s + 1) % sched.stages]
    if not came or came[1] * S + (s + 1) % S == 0:
        return stage.expect_no_write("cotangents", slot, "a message that does not arrive")
    stage.write("cotangents", slot, ("gradient of", came[0], came[1] - (s == S - 1)), backward_reads(sched))
