"""Split a training step into costs: seconds at the speeds of the data sheet, and what slows each of them down.

A cost is the time of one part of the step at the chip's peak, its memory bandwidth, or the full speed of its links, as
if nothing overlapped. Its `term` names the constant of `measured.py` that multiplies it. On a TPU the costs are those
of the simulated step (`simulated.py`), which already leaves out what the compiler overlaps.
"""

import math
from dataclasses import dataclass

from config.fields import parse_outer
from plan.chips import hardware
from plan.count.costs import Sizes
from plan.count.matrices import MUON
from plan.count.step import Step
from plan.time import offload, roofline, simulated as simulation
from sharding import CONTEXT, EXPERT, STAGE, TENSOR

# What a step's costs depend on, in the order of the constants. matmuls, attention, experts: their FLOPs; memory: other
# operations; weights, tensor, tokens, stages, slices: communication of weights and gradients, over TENSOR, over EXPERT
# and CONTEXT, between stages, between slices; layers: each layer of each microbatch; stragglers: doublings of slices
GPU_TERMS = "matmuls", "attention", "experts", "memory", "weights", "tensor", "tokens", "stages", "layers"
TPU_TERMS = "matmuls", "attention", "experts", "memory", "weights", "exposed", "slices", "stragglers"
MATMULS, OTHERS, FIXED = "matmuls", "other ops", ""
# As in `simulated.py`, but the constants of `measured.py` were fitted to matmuls with these numbers
SLOWDOWN, MOVED = {"v4": 1.1, "v5e": 1.02, "v5p": 1.16, "v6e": 1.37}, 0.88
WIDE_UNITS = {"v6e": 256, "tpu7x": 256}  # rows and columns of the matrix units; a narrower head leaves some of it idle
OVERLAPPED = 1.35  # compute on GPUs takes so much longer than the roofline's, and copies to the host overlap with it
LAYER_S = 1e-3  # of one layer and microbatch, for the constant `layers`
OF_WEIGHTS = "weights", "gradients", "replicas", "outer step", MUON


@dataclass(frozen=True)
class Cost:
    """Seconds of one part of a step."""

    term: str  # of GPU_TERMS or TPU_TERMS; FIXED: no constant multiplies it
    cause: str  # as in the tables: MATMULS, OTHERS, mesh axes joined by *, optimizer, host
    seconds: float
    in_slot: bool = True  # repeated for each microbatch, so that a pipeline's bubble lengthens it


def costs(step: Step, simulated: dict[str, float] | None, trainer: str = "") -> list[Cost]:
    """Return the costs of a step.

    simulated  on TPUs the seconds by cause, of `simulated.seconds`; None: on GPUs
    trainer    on GPUs whose program runs: in this trainer ("" or `this`) the pipeline stages share the logits, and in
               others the last stage computes them all
    """
    return tpu_costs(step, simulated) if simulated else gpu_costs(step, trainer in ("", "this"))


def terms_of(topology: hardware.Topology) -> tuple[str, ...]:
    return TPU_TERMS if topology.chip.torus_dims else GPU_TERMS


def term_of(work) -> str:
    """Return the term of a matmul: attention, experts or matmuls."""
    return work.kernel if work.kernel == "attention" else "experts" if work.part == "experts" else MATMULS


def gpu_costs(step: Step, spreads_logits: bool) -> list[Cost]:
    chip, mesh, z = step.topology.chip, step.cfg.mesh, Sizes.from_config(step.cfg, step.platform)
    found = [Cost(term_of(one), MATMULS, one.flops / roofline.peak(step, one), one.in_slot) for one in step.work]
    if not spreads_logits:
        logits_s = sum(one.flops for one in step.work if one.part == "logits") / chip.peak_flops_per_s
        found.append(Cost(MATMULS, MATMULS, (mesh.stage - 1) * logits_s))
    layers = step.sched.microbatches * step.cfg.model.n_layers / mesh.stage
    found += [Cost("memory", OTHERS, layers * layer_bytes(step, z) / chip.hbm_bytes_per_s),
              Cost("layers", OTHERS, layers * LAYER_S)]  # fmt: skip
    for row in step.traffic:
        term = "weights" if row.part in OF_WEIGHTS else next(
            (term for axis, term in ((STAGE, "stages"), (TENSOR, "tensor"), (EXPERT, "tokens"), (CONTEXT, "tokens"))
             if axis in row.axes), "weights")  # fmt: skip
        found.append(Cost(term, "*".join(row.axes), row.wire_bytes / step.speed(row), term != "weights"))
    lower = roofline.seconds(step)
    found.append(Cost(FIXED, "optimizer", lower["optimizer"], in_slot=False))
    found.append(Cost(FIXED, offload.CAUSE, offload.exposed_seconds(step, OVERLAPPED * lower["compute"])))
    return [one for one in found if one.seconds]


def layer_bytes(step: Step, z: Sizes) -> float:
    """Return the bytes of a layer's activations for one microbatch: four times the residual stream, and the hidden
    layer of the feed-forward layer or of a token's experts."""
    c = step.cfg.model
    hidden = (c.top_k * c.d_expert if c.n_experts else c.d_ff) * (1 if c.activation == "gelu" else 2)
    return z.b * z.t * (4 * c.d_model + hidden) * z.width


def tpu_costs(step: Step, parts: dict[str, float]) -> list[Cost]:
    chip = step.topology.chip
    found = [Cost(term_of(one), MATMULS, matmul_seconds(one, step, chip), one.in_slot) for one in step.work]
    matmuls = sum(one.seconds for one in found)
    others = simulation.other_bytes(step, chip, of_gates=0)  # other trainers have no `overlap.fusion.compute_once`
    found.append(Cost("memory", OTHERS, others / chip.hbm_bytes_per_s))
    hidden = {"*".join(x.axes): 0.0 for x in step.traffic if x.part == "weights"}
    for row in (x for x in step.traffic if x.part == "weights"):
        hidden["*".join(row.axes)] += (row.wire_bytes - row.exposed_bytes) / step.speed(row)
    found += [Cost("weights", name, seconds) for name, seconds in hidden.items()]
    between = step.cfg.mesh.between_slices if step.topology.slices > 1 else None
    for name, seconds in parts.items():
        if name == offload.CAUSE:
            found.append(Cost(FIXED, name, offload.exposed_seconds(step, matmuls)))
        elif name not in (MATMULS, OTHERS, "bubble"):
            found.append(Cost("slices" if name == between else "exposed", name, seconds))
    if step.topology.slices > 1:
        waits = 1 / max(parse_outer(step.cfg.optim.outer).every, 1)  # with local steps, slices wait only in outer steps
        found.append(Cost("stragglers", between, waits * math.log2(step.topology.slices) * parts[MATMULS]))
    return found


def matmul_seconds(work, step: Step, chip: hardware.Chip) -> float:
    """Return the seconds of a matmul. A head narrower than the matrix units leaves some of them idle."""
    computing, moving = work.flops / roofline.peak(step, work), work.hbm_bytes / chip.hbm_bytes_per_s
    if work.part == "experts":
        return max(computing, moving)
    slower = simulation.chip_value(SLOWDOWN, chip)
    if work.kernel == "attention" and chip.key in WIDE_UNITS:
        slower = max(WIDE_UNITS[chip.key] / step.cfg.model.d_head, 1)
    return slower * computing + MOVED * moving
