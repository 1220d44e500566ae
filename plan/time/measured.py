"""Estimate the seconds of a training step, with an 80% interval, from steps that others measured.

`terms.py` splits a step into costs at the speeds of the data sheet. A constant multiplies each cost: matmuls take 1.3
times as long on an H100, attention 2 times with one trainer's kernel and 5 times with another's. So constants belong to
a chip, and on GPUs to a trainer. `python -m bench.published` fits them to published steps, and writes SPEEDS.

The fit is Bayesian: it begins with a value and a spread for each constant (PRIORS), and each measured step narrows the
spread of the constants that its time depends on. The interval of a plan follows from the spreads that are left. So it
is wide where a step depends on what was never measured, such as the attention of an unknown trainer at 64k positions,
and one measured step of your own (`fit.py`, `--measured`) narrows it.
"""

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from plan.chips.hardware import Topology
from plan.chips.units import amount
from plan.count.step import Step
from plan.simulate import simulator
from plan.time import terms
from plan.time.terms import FIXED, GPU_TERMS, MATMULS, OTHERS, TPU_TERMS, Cost
from utils import UserError

SPEEDS = Path(__file__).parent / "speeds.json"
# Before any step was measured: the value of each constant, and its spread, a standard deviation of its logarithm
PRIORS = {
    GPU_TERMS: ((1.35, 2.5, 1.6, 20, 1.0, 1.1, 0.85, 0.7, 0.2), (0.15, 0.5, 0.3, 0.3, 0.6, 0.3, 0.4, 0.5, 1.0)),
    TPU_TERMS: ((1.1, 1.1, 1.1, 1.3, 0.25, 1.0, 1.0, 0.01), (0.1, 0.25, 0.25, 0.6, 0.5, 0.3, 0.5, 0.7)),
}
NOISE = 0.035  # spread of measured steps that no constant explains, if there are too few to tell: see `fit.noise`
EIGHTY = 1.2816  # standard deviations to each side that hold 80% of a normal distribution
LONGER = 4  # a plan for sequences that are more than this many times as long as measured has no interval
SIMILAR = "h100"  # whose constants are used for GPUs without measured steps


@dataclass(frozen=True)
class Speeds:
    """The constants of a chip, or of a trainer on a chip, and the steps that they were fitted to."""

    chip: str
    trainer: str
    factors: tuple[float, ...]  # for each term
    covariance: tuple[tuple[float, ...], ...]  # of the factors' logarithms
    steps: int = 0  # number of measured steps; 0: none of this chip
    seen: dict = field(default_factory=dict, hash=False)  # what the measured steps have: see `unlike`
    own: int = 0  # of the steps, those of the user
    noise: float = NOISE  # spread of the measured steps that the constants do not explain

    @property
    def terms(self) -> tuple[str, ...]:
        return GPU_TERMS if len(self.factors) == len(GPU_TERMS) else TPU_TERMS

    @property
    def by_term(self) -> dict[str, float]:
        """The constant of each term."""
        return dict(zip(self.terms, self.factors, strict=True)) | {FIXED: 1.0}


@dataclass(frozen=True)
class Estimate:
    """The seconds of a step, and the interval that holds 4 of 5 such steps."""

    seconds: float
    kind: str  # of step: `kind_of`
    low: float | None = None  # None: no interval
    high: float | None = None
    steps: int = 0  # number of measured steps behind the constants
    source: str = ""  # what the constants come from, or why there is no interval

    def __str__(self) -> str:
        if self.low is None:
            return f"{amount(self.seconds, 's')}, {self.source}"
        return f"{amount(self.seconds, 's')}, {interval(self.low, self.high)} in 4 of 5 cases ({self.source})"


def interval(low: float, high: float) -> str:
    """Format an interval of seconds, both in the unit of its upper end."""
    unit = amount(high, "s").split()[1]
    return f"{low if unit == 's' else 1e3 * low:,.3f} to {amount(high, 's')}"


def estimate(step: Step, simulated: dict[str, float] | None) -> Estimate | None:
    """Return the estimate of a step's seconds; None if the speed of its devices is unknown. simulated: see `terms`."""
    if not step.topology or not step.topology.chip.peak_flops_per_s:
        return None
    found, kind, known = speeds_of(step.topology), kind_of(step), step.topology.constants
    if known:
        total = sum(causes(step, simulated).values()) / (1 - known.waits)
        return Estimate(total, kind, source=f"with constants from {known}; one run gives no interval")
    of = terms.costs(step, simulated, found.trainer)
    total = seconds(of, found, step.bubble)
    if why := unlike(step, found):
        return Estimate(total, kind, steps=found.steps, source=f"without an interval: {why}")
    width = math.exp(EIGHTY * spread(of, found, step.bubble))
    return Estimate(total, kind, total / width, total * width, found.steps, describe(found))


def kind_of(step: Step) -> str:
    """Return the kind of step, by which docs/published.md lists errors."""
    if not step.topology.chip.torus_dims:
        return "GPUs"
    if step.topology.slices > 1:
        return "several slices"
    if step.cfg.model.n_experts:
        return "MoE"
    return "context" if step.cfg.mesh.context > 1 else "dense, one slice"


# Constants ------------------------------------------------------------------------------------------------------------


@functools.cache
def table() -> dict[tuple[str, str], Speeds]:
    """Return the fitted constants by chip and trainer; on GPUs, trainer "" is any trainer."""
    given = json.loads(SPEEDS.read_text(encoding="utf-8")) if SPEEDS.exists() else []
    as_tuple = lambda x: tuple(map(as_tuple, x)) if isinstance(x, list) else x
    return {(one["chip"], one["trainer"]): Speeds(**{name: as_tuple(x) for name, x in one.items()}) for one in given}


def trainers(chip: str) -> list[str]:
    """Return the trainers whose steps on this chip were measured."""
    return sorted(trainer for key, trainer in table() if key == chip and trainer)


def check_trainer(topology: Topology) -> None:
    """Raises: UserError if no step of the topology's trainer was measured on its chip."""
    have = trainers(topology.chip.key)
    if topology.trainer not in have:
        names = ", ".join(have) or f"none; those of {SIMILAR}: {', '.join(trainers(SIMILAR))}"
        raise UserError(f"--trainer {topology.trainer}: no step of it on {topology.chip.key} was measured; trainers "
                        f"with measured steps there: {names}")  # fmt: skip


def prior(names: tuple[str, ...], chip: str = "", trainer: str = "") -> Speeds:
    factors, spreads = PRIORS[names]
    n = range(len(names))
    return Speeds(chip, trainer, factors, tuple(tuple(spreads[i] ** 2 * (i == j) for j in n) for i in n))


def speeds_of(topology: Topology) -> Speeds:
    """Return the constants of the chip and of `topology.trainer`."""
    key, known = topology.chip.key, table()
    if topology.speeds:
        return topology.speeds
    if found := known.get((key, topology.trainer)):
        return found
    names = terms.terms_of(topology)
    if names == GPU_TERMS and (found := known.get((SIMILAR, ""))):
        return Speeds(key, "", found.factors, found.covariance)
    return prior(names, key)


def describe(found: Speeds) -> str:
    whose = f"of {found.trainer or 'any trainer'} on {found.chip}" if found.terms == GPU_TERMS else f"of {found.chip}"
    yours = f", {found.own} of them yours" if found.own else ""
    if found.own == found.steps > 0:
        whose, yours = f"of yours on {found.chip}", ""
    return f"by {found.steps} measured step{'s' * (found.steps != 1)} {whose}{yours}"


def unlike(step: Step, found: Speeds) -> str:
    """Return how a step differs from all measured steps; empty if it does not."""
    c, seen = step.cfg.model, found.seen
    if found.own:
        return ""
    if not found.steps:
        return f"no step on {step.topology.chip.key} was measured"
    if step.topology.fp8:
        return "no step in FP8 was measured, and MFU refers to the peak in BF16"
    if c.n_experts and not seen["d_expert"]:
        return f"no MoE step was measured there ({describe(found)})"
    if c.n_experts and c.d_expert < seen["d_expert"]:
        return f"experts {c.d_expert:,} wide, but the narrowest of the measured steps are {seen['d_expert']:,} wide"
    if step.cfg.data.seq_len > LONGER * seen["seq_len"]:
        return f"{step.cfg.data.seq_len:,} positions, but the measured steps have at most {seen['seq_len']:,}"
    if step.cfg.model.encoder_layers:
        return "no step of a model with an encoder was measured"
    return ""


# Seconds --------------------------------------------------------------------------------------------------------------


def seconds(costs: list[Cost], found: Speeds, bubble: float) -> float:
    """Return the seconds of a step."""
    return sum(by_term(costs, found, bubble).values())


def by_term(costs: list[Cost], found: Speeds, bubble: float) -> Counter:
    """Return the seconds of a step by term, with those of the bubble."""
    factors, total = found.by_term, Counter()
    for one in costs:
        total[one.term] += factors[one.term] * one.seconds / (1 - bubble * one.in_slot)
    return total


def spread(costs: list[Cost], found: Speeds, bubble: float) -> float:
    """Return the standard deviation of the logarithm of a step's seconds."""
    parts = by_term(costs, found, bubble)
    total = sum(parts.values())
    return math.sqrt(found.noise**2 + variance([parts[name] / total for name in found.terms], found))


def as_fast(found: Speeds, step: Counter, other: Counter) -> bool:
    """Return whether a step may be as fast as another one: whether the interval of the ratio of their times goes down
    to 1. Both are given by their seconds by term. The interval is narrow, because the two share their constants."""
    times = sum(step.values()), sum(other.values())
    difference = [step[name] / times[0] - other[name] / times[1] for name in found.terms]
    return math.log(times[0] / times[1]) <= EIGHTY * math.sqrt(2 * found.noise**2 + variance(difference, found))


def variance(shares: list[float], found: Speeds) -> float:
    """Return the variance of the logarithm of a time that is due to the constants. shares: its share of each term."""
    rows = (sum(c * x for c, x in zip(row, shares, strict=True)) for row in found.covariance)
    return sum(x * y for x, y in zip(shares, rows, strict=True))


def causes(step: Step, simulated: dict[str, float] | None) -> dict[str, float]:
    """Return the seconds of a step by cause: matmuls, other ops, communication by mesh axes, .., bubble."""
    found, known, total = speeds_of(step.topology), step.topology.constants, Counter()
    factors = found.by_term
    longer = {MATMULS: 1 + known.matmuls, OTHERS: 1 + known.others} if known else {}
    in_slots = 0.0
    for one in terms.costs(step, simulated, found.trainer):
        time = factors[one.term] * one.seconds * longer.get(one.cause, 1.0)
        total[one.cause] += time
        in_slots += time * one.in_slot
    return dict(total) | {"bubble": in_slots * step.bubble / (1 - step.bubble)}


def fit_run(step: Step, simulated: dict | None, measured: dict[str, float], step_s: float) -> dict[str, float]:
    """Return the constants with which a plan takes as long as a recorded step; see `plan.chips.constants`.

    measured  seconds by cause, with the names of `plan/simulate/simulator.py`
    The time of matmuls and of other operations is that of the trace. `waits` is the rest: the fraction of the step in
    which devices wait, for communication or the host, in addition to the plan.
    Raises: UserError if the trace has no matmuls.
    """
    matmuls = measured.get(simulator.MATMULS, 0.0)
    others = measured.get(simulator.OTHERS, 0.0) + measured.get(simulator.COPIES, 0.0)
    if not matmuls:
        raise UserError("the trace has no matmuls, so nothing can be fitted; record steps 20 to 23 with: "
                        "python main.py .. --run.profile 20:23")  # fmt: skip
    planned = causes(step, simulated)
    planned_s = sum(planned.values()) - planned["bubble"] + matmuls - planned[MATMULS] + others - planned[OTHERS]
    planned_s += planned["bubble"] * planned_s / max(sum(planned.values()) - planned["bubble"], 1e-12)
    return {"matmuls": matmuls / planned[MATMULS] - 1, "others": others / planned[OTHERS] - 1,
            "waits": 1 - planned_s / step_s}  # fmt: skip
