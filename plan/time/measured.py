"""Estimate the time of a real training step, with an interval, from steps that others measured.

`Plan.expected` predicts the simulated time of the compiled program, in which every matmul takes as long as the compiler
estimates. Measured steps take longer. `python -m bench.published` plans steps with published times, fits the constants
of this file to those marked `fitted`, and writes the errors of the others to INTERVALS. Its page is docs/published.md.

- On a TPU, matmuls take MATMULS of their time longer, and on v5p other operations take OTHERS of theirs longer. Weight
  all-gathers that overlap with matmuls hold them up, as gradient reductions do (`expected.HELD_UP`).
- On a GPU, compute reaches the fraction GPU_MATMULS of the peak. Communication over `tensor` and `expert` is exposed.
  All other communication overlaps with compute, and is exposed only if it takes longer.

`fit` finds these constants for the recorded steps of one run; see `constants.py`.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from plan.chips.hardware import Topology
from plan.count.step import Step
from plan.simulate import simulator
from sharding import EXPERT, TENSOR
from utils import UserError

# Fitted to the steps that bench/published.csv marks as `fitted`; tests/bench/test_published.py fits them again
MATMULS, OTHERS = {"v4": 0.23, "v5e": 0.04, "v5p": -0.04, "v6e": 0.12, "tpu7x": 0.21}, {"v5p": 2.31}
GPU_MATMULS = {"a100": 0.56, "h100": 0.59}  # other GPUs use h100's number
INTERVALS = Path(__file__).parent / "intervals.json"


@dataclass(frozen=True)
class Estimate:
    """The seconds of a real step, and the interval of the measured steps of its kind."""

    seconds: float
    kind: str  # of step; a key of INTERVALS if any step of this kind was measured
    low: float | None = None
    high: float | None = None
    steps: int = 0  # number of measured steps that the interval comes from
    calibrated: str = ""  # the recorded steps that the constants were fitted to: see `constants.py`

    def __str__(self) -> str:
        if self.calibrated:
            return f"{self.seconds:.3g} s, with constants from {self.calibrated}; one run gives no interval"
        if not self.steps:
            return f"{self.seconds:.3g} s; no step of this kind ({self.kind}) was measured"
        between = f"{self.low:.3g} to {self.high:.3g} s"
        return f"{self.seconds:.3g} s, {between} by {self.steps} measured steps ({self.kind})"


def estimate(one) -> Estimate | None:
    """Return the estimate for a `planner.Plan`; None if the speed of its devices is unknown."""
    if not one.topology or not one.topology.chip.peak_flops_per_s:
        return None
    known, kind, of_tpu = one.topology.constants, kind_of(one), bool(one.expected)
    if known:
        seconds = tpu_seconds(one, known.matmuls, known.others) if of_tpu else gpu_seconds(one, known.peak)
        return Estimate(seconds / (1 - known.waits), kind, calibrated=str(known))
    seconds = (tpu_seconds if of_tpu else gpu_seconds)(one)
    found = intervals().get(kind)
    if not found:
        return Estimate(seconds, kind)
    return Estimate(seconds, kind, found["low"] * seconds, found["high"] * seconds, found["steps"])


def kind_of(one) -> str:
    """Return the kind of step whose errors apply to a plan."""
    if not one.topology.chip.torus_dims:
        return "GPUs"
    if one.topology.slices > 1:
        return "several slices"
    if one.cfg.model.n_experts:
        return "MoE"
    return "context" if one.cfg.mesh.context > 1 else "dense, one slice"


@functools.cache
def intervals() -> dict[str, dict]:
    """Return for each kind of step the interval of measured / estimated seconds, and the number of steps."""
    return json.loads(INTERVALS.read_text(encoding="utf-8"))


def held_up_seconds(one) -> float:
    """Return the time for which weight all-gathers hold up the matmuls that they overlap with."""
    hidden = sum((x.wire_bytes - x.exposed_bytes) / one.speed(x) for x in one.traffic if x.part == "weights")
    return expected.HELD_UP * hidden


def tpu_seconds(one, matmuls: float | None = None, others: float | None = None) -> float:
    """Return the seconds of a step on a TPU. None: the constants of its chip."""
    parts, key = one.expected, one.topology.chip.key
    matmuls = MATMULS.get(key, 0) if matmuls is None else matmuls
    others = OTHERS.get(key, 0) if others is None else others
    slower = matmuls * parts["products"] + others * parts["other ops"]
    return one.likely_s + (slower + held_up_seconds(one)) / (1 - one.bubble)


def gpu_parts(one) -> tuple[float, float, float]:
    """Return the roofline's seconds of compute, of exposed communication with the optimizer, and of the rest."""
    parts = dict(one.seconds())
    compute, optimizer = parts.pop("compute"), parts.pop("optimizer")
    parts.pop("bubble")
    waits = sum(time for axes, time in parts.items() if {TENSOR, EXPERT} & {*axes.split("*")})
    return compute, waits + optimizer, sum(parts.values()) - waits


def gpu_peak(one) -> float:
    """Return the fraction of the peak that compute reaches on a GPU."""
    known, key = one.topology.constants, one.topology.chip.key
    return known.peak if known else GPU_MATMULS.get(key, GPU_MATMULS["h100"])


def gpu_causes(one, peak: float | None = None) -> dict[str, float]:
    """Return the seconds of a step on GPUs by cause, with the names of `Plan.seconds`. peak: None: that of the chip

    Communication that overlaps with compute is exposed for the time by which all of it takes longer than compute.
    """
    found = dict(one.seconds())
    found["compute"] /= peak or gpu_peak(one)
    optimizer, _ = found.pop("optimizer"), found.pop("bubble")
    if offload.CAUSE in found:
        found[offload.CAUSE] = offload.exposed_seconds(one, found["compute"])
    own = "compute", offload.CAUSE
    overlapped = {axes for axes in found if axes not in own and not {TENSOR, EXPERT} & {*axes.split("*")}}
    sent = sum(found[axes] for axes in overlapped)
    exposed = max(sent - found["compute"], 0) / sent if sent else 0.0
    in_slots = optimizer + sum(time for name, time in found.items() if name not in overlapped)
    found |= {axes: exposed * found[axes] for axes in overlapped}
    return found | {"optimizer": optimizer, "bubble": in_slots * one.bubble / (1 - one.bubble)}


def gpu_seconds(one, peak: float | None = None) -> float:
    return sum(gpu_causes(one, peak).values())


def fit(one, seconds: dict[str, float], step_s: float) -> dict[str, float]:
    """Return the constants with which a plan takes as long as a recorded step.

    seconds  measured seconds by cause, with the names of `xla/simulator.py`
    The time of matmuls and of other operations is that of the trace. `waits` is the rest: the fraction of the step in
    which devices wait, for communication or the host, in addition to the plan.
    Raises: UserError if the trace has no matmuls.
    """
    matmuls = seconds.get(simulator.PRODUCTS, 0.0)
    others = seconds.get(simulator.OTHERS, 0.0) + seconds.get(simulator.COPIES, 0.0)
    if not matmuls:
        raise UserError("the trace has no matmuls, so nothing can be fitted; record steps 20 to 23 with: "
                        "python main.py .. --run.profile 20:23")  # fmt: skip
    if one.expected:
        own = max(matmuls - held_up_seconds(one), 0.0)
        found = {"matmuls": own / one.expected["products"] - 1, "others": others / one.expected["other ops"] - 1}
        planned = tpu_seconds(one, **found)
    else:
        found = {"peak": gpu_parts(one)[0] / (matmuls + others)}
        planned = gpu_seconds(one, **found)
    return found | {"waits": 1 - planned / step_s}
