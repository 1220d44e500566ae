"""A schedule's rows, followed as the executor does, with labels in place of arrays."""

from pipeline.schedules import IDLE, Op, Rows, Schedule, Slots, rows


def check(sched: Schedule, found: tuple[Rows, Slots] | None = None) -> None:
    """Follow the rows as the executor does, with labels in place of arrays.

    Raises: ValueError at the first operation that reads anything but its own input, writes over what is still needed,
    happens twice or never, and at the first message that nobody kept.
    """
    r, slots = found or rows(sched)
    S, v, M = sched.stages, sched.chunks, sched.microbatches
    inbox, kept, cotangents = ([{} for _ in range(S)] for _ in range(3))
    uses = 2 if sched.splits_backward else 1
    seen = {}

    def fail(tick, s, what):
        raise ValueError(f"{sched.name}, tick {tick}, stage {s}: {what}")

    def write(tick, s, buffer, size, slot, label, reads):
        if slot == size and reads:
            fail(tick, s, f"{label} is not kept, and is needed later")
        if slot < size and buffer[s].get(slot, (None, 0))[1]:
            fail(tick, s, f"{label} is written over {buffer[s][slot][0]}, which is still needed")
        if slot < size:
            buffer[s][slot] = (label, reads)

    def read(tick, s, buffer, slot, label):
        there, reads = buffer[s].get(slot, ("nothing", 0))
        if there != label or not reads:
            fail(tick, s, f"reads {there if reads or there == 'nothing' else f'{there} again'} from slot {slot} "
                          f"instead of {label}")  # fmt: skip
        buffer[s][slot] = (there, reads - 1)

    def once(tick, s, op):
        if not (0 <= op.microbatch < M and 0 <= op.chunk < v):
            fail(tick, s, f"{op} is not one of {M} microbatches and {v} chunks")
        if (op, s) in seen:
            fail(tick, s, f"{op} was done in tick {seen[op, s]}")
        seen[op, s] = tick

    backwards = any(op.kind == "B" for op in sched.orders[0])
    for t in range(len(r.forward)):
        sent, sent_back = [None] * S, [None] * S
        for s in range(S):
            m, c = r.forward[t, s], r.forward_chunk[t, s]
            if m != IDLE:
                once(t, s, Op("F", m, c))
                if c * S + s:
                    read(t, s, inbox, r.forward_from[t, s], ("input of", m, c))
                elif r.forward_from[t, s] != IDLE:
                    fail(t, s, "tokens enter here, yet it reads its inbox")
                write(t, s, kept, slots.kept, r.keep[t, s], ("kept of", m, c), uses * backwards)
                sent[s] = (m, c)
            elif r.keep[t, s] != slots.kept:
                fail(t, s, f"slot {r.keep[t, s]} is kept for what is not done")
        for s in range(S):
            due = sent[S - 1][0] if sent[S - 1] and sent[S - 1][1] == v - 1 else IDLE
            if r.loss[t, s] != due:
                fail(t, s, f"the loss of microbatch {r.loss[t, s]} is taken, and {due} has left the last stage")
            if s == S - 1 and due != IDLE:
                label = ("gradient of", due, v - 1)
                write(t, s, cotangents, slots.cotangents, r.loss_to[t, s], label, uses * backwards)
            elif r.loss_to[t, s] != slots.cotangents:
                fail(t, s, f"slot {r.loss_to[t, s]} is kept for a loss that is not its own")
        for kind, name in (("B", "backward"), ("W", "weight")):
            for s in range(S):
                m, c = getattr(r, name)[t, s], getattr(r, f"{name}_chunk")[t, s]
                if m != IDLE:
                    once(t, s, Op(kind, m, c))
                    if kind == "W" and (Op("B", m, c), s) not in seen:
                        fail(t, s, f"W{m} before its B")
                    read(t, s, kept, getattr(r, f"{name}_kept")[t, s], ("kept of", m, c))
                    read(t, s, cotangents, getattr(r, f"{name}_from")[t, s], ("gradient of", m, c))
                    if kind == "B":
                        sent_back[s] = (m, c)
        for s in range(S):
            for buffer, size, slot, came, ends, what in (
                (inbox, slots.inbox, r.arrive[t, s], sent[s - 1], v * S - 1, "input of"),
                (cotangents, slots.cotangents, r.arrive_back[t, s], sent_back[(s + 1) % S], 0, "gradient of"),
            ):
                step = 1 if what == "input of" else -1
                number = came[1] * S + (s - step) % S if came else None
                if came and number != ends:  # the last forward pass and the first stage's backward pass send to nobody
                    reads = 1 if what == "input of" else uses
                    write(t, s, buffer, size, slot, (what, came[0], (number + step) // S), reads)
                elif slot != size:
                    fail(t, s, f"slot {slot} is kept for what does not arrive")
    wanted = {(Op(kind, m, c), s) for kind in {op.kind for op in sched.orders[0]} for m in range(M) for c in range(v)
              for s in range(S)}  # fmt: skip
    if missing := wanted - set(seen):
        op, s = min(missing)
        raise ValueError(f"{sched.name}: {op} of stage {s} never happens")
