"""The roofline of a step: a lower bound of its seconds, by cause."""

from plan.count.costs import Work
from plan.count.matrices import NEWTON_SCHULZ
from plan.count.step import Step
from plan.time import offload

IN_BF16 = "router", "attend", "position_bias", NEWTON_SCHULZ  # matmuls that FP8 trainers leave in BF16; also the logits


def peak(step: Step, work: Work) -> float:
    """Return the FLOP/s of the chip for a matmul. With FP8, they double for the layers' matmuls with weights."""
    in_fp8 = step.topology.fp8 and work.part != "logits" and work.name not in IN_BF16
    return step.topology.chip.peak_flops_per_s * (2 if in_fp8 else 1)


def mean_peak(step: Step) -> float:
    """Return the FLOP/s of the chip over all matmuls of a step."""
    return step.hardware_flops / sum(one.flops / peak(step, one) for one in step.work)


def seconds(step: Step, flops: float | None = None, exchanges=None, alone=False) -> dict[str, float] | None:
    """Return the roofline of a step, seconds by cause: compute, communication by mesh axes, optimizer, bubble.

    flops, exchanges  counts of a compiled step, to use instead of the predicted ones
    alone  assume that nothing overlaps: all communication is exposed
    A matmul takes the longer of two times: its FLOPs at the chip's peak, and its bytes at the full memory
    bandwidth. Exposed communication adds its bytes at the full speed of its links. Overlapped communication of an
    axis adds only the time by which it takes longer than all matmuls. Latency is ignored. Returns None if the speed
    of the chip or of its links is unknown.
    """
    chip = step.topology and step.topology.chip
    if not chip or not chip.peak_flops_per_s:
        return None
    longest = lambda x: max(x.flops / peak(step, x), x.hbm_bytes / chip.hbm_bytes_per_s)
    compute, once = (sum(longest(x) for x in step.work if x.in_slot == in_slot) for in_slot in (True, False))
    if flops is not None:
        compute += (flops - step.hardware_flops) / chip.peak_flops_per_s
    found, hidden, waits = {"compute": compute + once}, {}, compute  # `waits`: a stage's seconds inside pipeline slots
    for row in step.traffic if exchanges is None else exchanges:
        speed, name = step.speed(row), "*".join(row.axes)
        exposed_bytes = row.wire_bytes if alone else row.exposed_bytes
        found[name] = found.get(name, 0) + exposed_bytes / speed
        hidden[name] = hidden.get(name, 0) + (row.wire_bytes - exposed_bytes) / speed
        waits += exposed_bytes / speed * row.in_a_slot
    for name, time in hidden.items():
        longer = max(time - compute, 0)
        found[name], waits = found[name] + longer, waits + longer
    if copies := offload.exposed_seconds(step, compute):
        found[offload.CAUSE], waits = copies, waits + copies
    state = sum(step.memory_bytes[part] for part in ("parameters", "optimizer"))
    found["optimizer"] = (2 * state + step.memory_bytes["parameters"]) / chip.hbm_bytes_per_s
    found["bubble"] = waits * step.bubble / (1 - step.bubble)
    return found
