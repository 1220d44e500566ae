"""Convert a step time into days, chip hours and dollars.

`goodput` is the fraction of the time in which a run makes progress. It follows from failures, from the time to save and
load a checkpoint, and from the best interval between checkpoints. The model is J. T. Daly's: "A higher order estimate
of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006). Failures are
independent of each other, a save stops the run, and a failure repeats the work since the last checkpoint.
"""

import math
from dataclasses import dataclass, replace

from config import MeshConfig
from plan.chips.hardware import CHIPS, Topology
from plan.chips.units import amount
from plan.count import memory
from plan.count.weights import weights
from plan.time.plan import Plan
from utils import UserError, suggest

EXAMPLE = "--goodput 0.95, or --goodput mtbf=50000,disk=1,restart=600"


@dataclass(frozen=True)
class Failures:
    """What a run loses time to."""

    mtbf: float  # mean time between failures of one chip, in hours
    disk: float = 1.0  # GB/s at which one host writes and reads checkpoints
    restart: float = 600.0  # seconds from a failure to the start of loading the checkpoint


@dataclass(frozen=True)
class Goodput:
    """The fraction of the time in which a run makes progress, and its causes."""

    fraction: float
    failure_s: float | None = None  # mean time between failures of the whole run; None: the fraction was given
    save_s: float | None = None  # to write one checkpoint
    checkpoint_bytes: float | None = None
    interval_steps: int | None = None  # steps between checkpoints
    saving: float | None = None  # fraction of the time spent saving


@dataclass(frozen=True)
class Asked:
    """What is asked about a run."""

    tokens: float = 0.0  # to train on; 0: not asked
    price: str = ""  # dollars, see `parse_price`
    goodput: str = ""  # see `parse_goodput`; empty: the run never stops


@dataclass(frozen=True)
class Budget:
    """What a number of tokens costs."""

    tokens: float
    steps: int
    days: float
    days_low: float | None  # from the interval of `Plan.estimate`; None: it has none
    days_high: float | None
    chip_hours: float
    price: float | None  # dollars per chip hour
    dollars: float | None
    goodput: Goodput

    @property
    def time(self) -> str:
        """The days with their interval, or the hours if they are fewer than 48."""
        scale, unit = (1, "days") if self.days >= 2 else (24, "hours")
        between = f" ({scale * self.days_low:,.1f} to {scale * self.days_high:,.1f})" if self.days_low else ""
        return f"{scale * self.days:,.1f} {unit}{between}"

    @property
    def dollars_interval(self) -> tuple[float | None, float | None]:
        if self.dollars is None or self.days_low is None:
            return None, None
        per_day = self.dollars / self.days
        return self.days_low * per_day, self.days_high * per_day


def parse_tokens(text: str) -> float:
    """Parse a number of tokens: `15e12`, `15T`, `300B` or `1.5M`; "" is 0. Raises: UserError."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    unit = units.get(text[-1:].lower(), 1)
    means = "tokens to train on, such as 15e12 or 15T"
    try:
        return unit * number(text[:-1] if unit > 1 else text, "--tokens", means) if text else 0.0
    except UserError:
        raise UserError(f"--tokens: {text!r} should be a number above 0: {means}") from None


def number(text: str, flag: str, what: str) -> float:
    """Parse a number above 0; `$4.2` is 4.2. Raises: UserError that says what the number means."""
    try:
        value = float(text.removeprefix("$"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{flag}: {text!r} should be a number above 0: {what}")
    return value


def parse_goodput(text: str) -> float | Failures:
    """Parse `0.95` or `mtbf=50000,disk=1,restart=600`. Raises: UserError."""
    if "=" not in text:
        share = number(text, "--goodput", f"the fraction of the time in which the run makes progress ({EXAMPLE})")
        if share > 1:
            raise UserError(f"--goodput {text}: should be at most 1; for {text}% use {share / 100:g}")
        return share
    means = {"mtbf": "hours between two failures of one chip", "disk": "GB/s of one host",
             "restart": "seconds to restart"}  # fmt: skip
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in means:
            raise UserError(f"--goodput {text}: {name!r} is unknown; {suggest(name, means)}; use {EXAMPLE}")
        found[name] = number(value, f"--goodput {name}", means[name])
    if "mtbf" not in found:
        raise UserError(f"--goodput {text}: mtbf is missing, the {means['mtbf']}; use {EXAMPLE}")
    return Failures(**found)


def parse_price(text: str, chip: str) -> float | None:
    """Parse `2.1`, or one price for each chip: `v5p=4.2,h100=2.1`. Returns None for an empty text.

    Raises: UserError, also if `chip` has no price.
    """
    means = "dollars for one chip and hour, such as --price 2.1 or --price v5p=4.2,h100=2.1"
    if not text:
        return None
    if "=" not in text:
        return number(text, "--price", means)
    prices = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in CHIPS:
            raise UserError(f"--price {text}: unknown chip {name!r}; {suggest(name, CHIPS)}")
        prices[name] = number(value, f"--price {name}", means)
    if chip not in prices:
        raise UserError(f"--price {text} has no price for {chip}; add {chip}=DOLLARS")
    return prices[chip]


def checkpoint_bytes(plan: Plan) -> float:
    """Return the size of a checkpoint: parameters and optimizer state, each once."""
    cfg = replace(plan.cfg, mesh=MeshConfig())
    whole = weights(cfg)
    return sum(x.d.size * x.d.dtype.itemsize for x in whole) + memory.moments_bytes(cfg, whole)


def daly_interval(save_s: float, failure_s: float) -> float:
    """Return the seconds of work between two checkpoints that lose the least time (Daly, equation 37)."""
    if save_s >= 2 * failure_s:
        return failure_s
    ratio = save_s / (2 * failure_s)
    return math.sqrt(2 * save_s * failure_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(given: float | Failures, state_bytes: float, step_s: float, topology: Topology) -> Goodput:
    """Return the goodput of a run that saves a checkpoint at the best interval (Daly, equation 20).

    Raises: UserError if failures leave no time for progress.
    """
    if not isinstance(given, Failures):
        return Goodput(given)
    failure_s = 3600 * given.mtbf / topology.chips
    save_s = state_bytes / (given.disk * 1e9 * topology.hosts)
    restart_s = given.restart + save_s  # loading takes as long as saving
    steps = max(round(daly_interval(save_s, failure_s) / step_s), 1)
    work_s = steps * step_s
    exponent = (restart_s + work_s + save_s) / failure_s
    if exponent > 5:
        raise UserError(
            f"--goodput mtbf={given.mtbf:g}: one of {topology.chips:,} chips fails every {failure_s:,.0f} s, but a "
            f"restart takes {restart_s:,.0f} s and saving a checkpoint {save_s:,.0f} s, so the run would hardly make "
            "progress; use a faster disk, fewer chips or a faster restart"
        )
    wall_s = failure_s * math.exp(restart_s / failure_s) * math.expm1((work_s + save_s) / failure_s)
    return Goodput(work_s / wall_s, failure_s, save_s, state_bytes, steps, save_s / wall_s)


def budget(plan: Plan, asked: Asked) -> Budget | None:
    """Return what the tokens that are asked for cost; None if none are.

    Raises: UserError for invalid text, for an unknown step time, and for less than one step.
    """
    if not (tokens := asked.tokens):
        return None
    if plan.estimate is None:
        raise UserError("--tokens needs the time of a step: pass a --topology of TPUs or GPUs")
    if not plan.tokens_per_step <= tokens < math.inf:
        raise UserError(f"--tokens {tokens:g}: a step has {plan.tokens_per_step:,} tokens "
                        f"({plan.cfg.data.batch_size:,} sequences of {plan.cfg.data.seq_len:,}); pass at "
                        "least that many")  # fmt: skip
    steps, step_s = math.ceil(tokens / plan.tokens_per_step), plan.estimate.seconds
    dollars_per_hour = parse_price(asked.price, plan.topology.chip.key)
    given = parse_goodput(asked.goodput) if asked.goodput else 1.0
    progress = goodput(given, checkpoint_bytes(plan), step_s, plan.topology)
    days = lambda step_s: step_s and steps * step_s / progress.fraction / 86400
    low, high = plan.estimate.low, plan.estimate.high
    chip_hours = 24 * days(step_s) * plan.topology.chips
    dollars = dollars_per_hour and dollars_per_hour * chip_hours
    return Budget(tokens, steps, days(step_s), days(low), days(high), chip_hours, dollars_per_hour, dollars, progress)


def lines(found: Budget, plan: Plan) -> list[str]:
    """Return the lines that describe a budget."""
    progress, cost = found.goodput, ""
    if found.dollars is not None:
        low, high = found.dollars_interval
        between = f" ({low:,.0f} to {high:,.0f})" if low else ""
        cost = f", {found.dollars:,.0f} dollars{between} at {found.price:,.2f} per chip hour"
    text = [f"budget     {found.tokens:,.0f} tokens are {found.steps:,} steps of {plan.tokens_per_step:,}: "
            f"{found.time}, {found.chip_hours:,.0f} chip hours{cost}"]  # fmt: skip
    if progress.failure_s is None:
        share = f"{progress.fraction:.1%}" if progress.fraction < 1 else "100%, a run that never stops"
        return [*text, f"goodput    {share}"]
    every = progress.interval_steps * plan.estimate.seconds
    return [*text,
            f"goodput    {progress.fraction:.1%}: {progress.saving:.1%} of the time is spent saving, and "
            f"{1 - progress.fraction - progress.saving:.1%} on repeated steps and restarts",
            f"           a failure every {duration(progress.failure_s)}; best interval between checkpoints "
            f"{duration(every)} ({progress.interval_steps:,} steps); each has "
            f"{amount(progress.checkpoint_bytes, 'bytes')} and takes {duration(progress.save_s)}"]  # fmt: skip


def duration(seconds: float) -> str:
    """Format a time with a suitable unit: `duration(5400)` is "1.5 h"."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
