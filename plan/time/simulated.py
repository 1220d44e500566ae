"""Predict, with formulas, the step time that a simulation of the compiled program (`plan/simulate/`) would give.

`Plan.seconds` is a roofline: every matmul runs at the chip's peak, every link at its full speed, and overlapped
communication is free. The simulated time of compiled steps is 1.2 to 2 times as long. Four rules explain the
difference. Their numbers were fitted to simulated steps of four presets on TPU v4, v5e, v5p and v6e, and
`python -m bench.plan` compares both:

- A matmul takes SLOWDOWN times the time of its FLOPs at the peak, plus MOVED times the time to read its operands and
  write its result. So narrow matmuls are far from the peak. Attention and expert kernels take the longer of the two.
- Other operations read and write the residual stream, gated units, saved activations, the experts' inputs and weights
  several times. v4 keeps some of this in its on-chip memory (CMEM); on other chips it takes OTHERS times as long.
- In a ring over TENSOR, each send overlaps only with the matmul that runs at the same time.
- Communication that does not overlap is exposed; `hiding.py` lists it by chip. Two cases are partly exposed: weight
  all-gathers and gradient all-to-alls that take longer than the matmuls beside them, and a gradient reduction on a
  SparseCore (a core of the TPU that can run collectives), which exposes the fraction EXPOSED_FRACTION of its time.
"""

from plan.chips import hardware, hiding
from plan.count import costs
from plan.count.costs import Sizes
from plan.count.networks import Collective
from plan.count.step import Step
from plan.time import offload, roofline
from sharding import SLICED, TENSOR

# Fitted to the seconds by cause of simulated steps (`bench.plan --json`). Chips that were not simulated use v5p's.
SLOWDOWN = {"v4": 1.02, "v5e": 1.1, "v5p": 1.12, "v6e": 1.37}
MOVED = {"v4": 1.4, "v5e": 0.58, "v5p": 0.88, "v6e": 0.88}
OTHERS = {"v4": 1.0, "v5e": 1.5, "v5p": 2.2, "v6e": 2.7}
STREAM, GATES, SAVED, ROWS, STATE = 1.5, 2.5, 2.7, 1.4, 5  # how often these bytes are read or written
COPIES = 8  # the same of the copies of routed tokens, top_k each; from 4 layers of Qwen3 30B on v5p:4x4x4
ADDED = 6  # bytes read or written per entry of a float32 sum: 8 (sum twice) after a kernel, fewer in a matmul's fusion
EXPOSED_FRACTION = 0.25  # exposed fraction of the time of gradient reductions that overlap with matmuls


def seconds(step: Step) -> dict[str, float] | None:
    """Return a step's time in seconds by cause: matmuls, other ops, exposed communication by mesh axes, bubble.

    Returns None if the chip is not modeled.
    """
    chip = step.topology and step.topology.chip
    if not chip or not chip.torus_dims:
        return None
    layers, once = (matmul_seconds(step, chip, in_slot) for in_slot in (True, False))
    found = {"matmuls": layers + once, "other ops": other_bytes(step, chip) / chip.hbm_bytes_per_s}
    ring = hiding.rings_overlap(step.cfg.mesh.sizes, chip.key)
    scatters = hiding.overlaps(chip.key, hiding.SCATTERS)
    run, in_slots = costs.passes(step.cfg, step.sched), sum(found.values()) - once
    overlapped = {"weights": run.forward + run.again, "gradients": run.inputs + run.weights}  # with these passes
    for row in step.traffic:
        speed, name = step.speed(row), "*".join(row.axes)
        waits = row.exposed_bytes / speed
        if row.part == "gradients" and {*row.axes} <= {*SLICED} and scatters:
            waits = max(waits, EXPOSED_FRACTION * row.wire_bytes / speed)
        elif row.part in overlapped:
            hidden = (row.wire_bytes - row.exposed_bytes) / speed
            waits += max(hidden - layers * overlapped[row.part] / sum(overlapped.values()), 0)
        elif row.kind == "collective-permute" and row.axes == (TENSOR,) and ring:
            waits = ring_seconds(step, speed, chip)
        found[name] = found.get(name, 0.0) + waits
        in_slots += waits * row.in_a_slot
    if waits := offload.exposed_seconds(step, found["matmuls"]):
        found[offload.CAUSE], in_slots = waits, in_slots + waits
    found["bubble"] = in_slots * step.bubble / (1 - step.bubble)
    return found


def chip_value(numbers: dict[str, float], chip: hardware.Chip) -> float:
    return numbers.get(chip.key, numbers["v5p"])


def one_matmul_seconds(step: Step, row: costs.Work | costs.Matmul, chip: hardware.Chip) -> float:
    computing, moving = row.flops / roofline.peak(step, row), row.hbm_bytes / chip.hbm_bytes_per_s
    if row.kernel or row.part == "experts":
        return max(computing, moving)
    return chip_value(SLOWDOWN, chip) * computing + chip_value(MOVED, chip) * moving


def matmul_seconds(step: Step, chip: hardware.Chip, in_slot: bool = True) -> float:
    """Return the time, in seconds, of all matmuls and kernels in pipeline slots, or outside of them."""
    return sum(one_matmul_seconds(step, row, chip) for row in step.work if row.in_slot == in_slot)


def other_bytes(step: Step, chip: hardware.Chip, of_gates: float = GATES) -> float:
    """Return the bytes that operations other than matmuls read and write. of_gates: 0 if matmuls compute gated units"""
    cfg, c, sched = step.cfg, step.cfg.at_work, step.sched
    z, run, gathers_once = Sizes.from_config(cfg, "tpu"), costs.passes(cfg, sched), c.work.gather == "step"
    positions = (c.n_layers * z.s + c.encoder_layers * z.S) / cfg.mesh.stage  # of all layers
    stream = z.b * c.d_model * z.width * positions
    passes = run.forward + run.again * (c.work.remat != "dots") + run.inputs + run.weights
    kept = step.memory_bytes["saved"] * (sched.microbatches if cfg.mesh.stage == 1 else 2) + offload.step_bytes(step)
    rows = sum(row.hbm_bytes for row in step.work if row.part == "experts")
    moved = of_gates * sum(row.flops for row in step.work if row.name == "gate") / (2 * c.d_model) * z.width
    if c.n_experts:  # rows without an expert on this chip are sorted, activated and summed too
        held, filled = costs.expert_rows(c, z)
        bytes_per_flop = z.width / 2 * (1 / c.d_model + cfg.mesh.tensor / c.d_expert)
        flops = sum(row.flops for row in step.work if row.part == "experts")
        copied = costs.received_tokens(c, z) * c.top_k * c.d_model * z.width
        copied *= costs.layer_counts(c, z)["moe"] * sched.microbatches
        moved += ROWS * (held / filled - 1) * flops * bytes_per_flop + COPIES * copied
    activations = STREAM * stream * passes + SAVED * kept + ROWS * rows
    # Gradient sums in float32, one microbatch after the other.
    sums = sum(w.gathered_size if gathers_once else w.local_size for w in costs.weights(cfg))
    added = ADDED * sums * (2 * gathers_once if sched.in_one_piece else sched.microbatches)
    state = step.memory_bytes["parameters"] + step.memory_bytes["optimizer"]
    return chip_value(OTHERS, chip) * activations + moved + added + STATE * state


def ring_seconds(step: Step, speed: float, chip: hardware.Chip) -> float:
    """Return the exposed seconds of rings over TENSOR: each send overlaps with the matmul on another chunk."""
    cfg, c = step.cfg, step.cfg.at_work
    z, run, n = Sizes.from_config(cfg, "tpu"), costs.passes(cfg, step.sched), cfg.mesh.tensor
    waits = 0.0
    for many, rows in costs.layers(c, z):
        exchanges = [row for row in rows if isinstance(row, Collective) and row.axes == (TENSOR,)
                     and row.kind == "collective-permute"]  # fmt: skip
        for exchange in exchanges:
            part = sum(one_matmul_seconds(step, row, chip) for row in overlapped(exchange, rows)) * (n - 1) / n
            wait = lambda times, row=exchange, part=part: max(0.0, row.count * row.size / speed - times * part)
            ahead = run.forward + run.again * exchange.again
            waits += many * (ahead * wait(1) + run.inputs * wait(2))
    return waits


# The matmuls that the rings of a branch overlap with: an all-gather with those after it, a reduce-scatter with those
# before it
OF_ATTENTION = ("queries", "queries_keys_values"), ("attention_output",)
OVERLAPPED = {"attention": OF_ATTENTION, "cross_attention": OF_ATTENTION, "feed_forward": (("up", "gate"), ("down",))}


def overlapped(ring: Collective, rows: list) -> list[costs.Matmul]:
    """Return the matmuls of a layer, given by its rows, that a ring overlaps with."""
    after, before = OVERLAPPED[ring.branch]
    names = after if ring.arrives else before
    return [x for x in rows if isinstance(x, costs.Matmul) and x.branch == ring.branch and x.name in names]
