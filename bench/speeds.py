"""Fit the planner's constants to published steps, and test them on sources that the fit has not seen.

`bench/published.py` uses this to write `plan/time/speeds.json` and docs/published.md.
"""

import dataclasses
import functools
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from plan.time import fit, measured, terms
from plan.time.measured import Speeds
from plan.time.terms import GPU_TERMS, TPU_TERMS

# The trainer of a source on GPUs. A trainer of another year has other kernels, so it has another name. The sources of
# steps on TPUs use MaxText, but for two that are alone on their chip or not on it
TRAINERS = {
    "NVIDIA/dgxc": "megatron", "Megatron-Bridge": "megatron", "2407.21783": "llama3", "2412.19437": "deepseek",
    "torchtitan": "torchtitan", "llm-foundry": "llm-foundry", "nanotron": "nanotron", "Automodel": "automodel",
    "2104.04473": "megatron-2021", "2201.11990": "megatron-2021", "2205.05198": "megatron-2021",
    "bigscience": "megatron-2021", "2204.06745": "megatron-2021", "bench/measured": "this",
}  # fmt: skip
# Not in the mean of all trainers: nanotron is four times as slow as the others, deepseek computes with FP8, trainers of
# 2021 have no FlashAttention, and only small models were measured with this project's
UNUSUAL = "nanotron", "deepseek", "megatron-2021", "this"
# The spread that all costs of an unknown trainer have in common: with it, about 4 of 5 steps of trainers that are left
# out of the fit are in their interval
OF_TRAINERS = 0.1
DIGITS = 4  # of a constant in the file


def trainer_of(source: str) -> str:
    """Return the trainer of a source on GPUs; empty: not known."""
    return next((name for part, name in TRAINERS.items() if part in source), "")


def key_of(row) -> tuple[str, str]:
    """Return chip and trainer of a row; on TPUs, the trainer is empty."""
    return row.one.topology.chip.key, trainer_of(row.source) if row.one.platform == "gpu" else ""


def samples(rows: Iterable) -> list[fit.Measured]:
    """Return what to fit. Steps of one recipe on more chips together count as one."""
    recipe = lambda row: (row.name, row.seq_len, row.settings, row.source, row.one.topology.chip.key)
    many = Counter(recipe(row) for row in rows)
    return [fit.Measured(costs_of(row), row.one.bubble, row.measured_s, 1 / many[recipe(row)]) for row in rows]


def costs_of(row) -> list[terms.Cost]:
    return terms.costs(row.one, row.one.simulated, key_of(row)[1])


def seen(rows: Iterable) -> dict:
    """Return the longest sequence, and the narrowest experts, of measured steps (0: no experts)."""
    experts = [row.one.cfg.model.d_expert for row in rows if row.one.cfg.model.n_experts]
    return {"seq_len": max((row.one.cfg.data.seq_len for row in rows), default=0), "d_expert": min(experts, default=0)}


def speeds(rows: Iterable) -> list[Speeds]:
    """Return the constants of each chip, and on GPUs of each trainer and of any trainer."""
    groups = defaultdict(list)
    for row in rows:
        # A plan cannot have the outputs of experts (MaxText's mlpwo) on the host, so nothing is fitted to such a step
        if row.one and "mlpwo" not in row.lacks:
            groups[key_of(row)].append(row)
    found = []
    for (chip, trainer), ones in groups.items():
        names = terms.terms_of(ones[0].one.topology)
        one = fit.fit(measured.prior(names, chip, trainer), samples(ones))
        about = seen(ones if trainer else [row for key, some in groups.items() if not key[1] for row in some])
        if trainer or names == TPU_TERMS:  # all TPUs run the same programs, so what was seen on one was seen
            found.append(dataclasses.replace(one, seen=about))
    for chip in {one.chip for one in found if one.trainer}:
        usual = [one for one in found if one.chip == chip and one.trainer and one.trainer not in UNUSUAL]
        if usual:
            found.append(any_trainer(chip, usual))
    return sorted((rounded(one) for one in found), key=lambda one: (one.chip, one.trainer))


def any_trainer(chip: str, usual: list[Speeds]) -> Speeds:
    """Return constants for a trainer that was not measured: the mean of those that were, with the spread of PRIORS, and
    with OF_TRAINERS for how much faster or slower all of its program is."""
    means = [math.exp(statistics.mean(math.log(x) for x in values))
             for values in zip(*(one.factors for one in usual), strict=True)]  # fmt: skip
    experts = [one.seen["d_expert"] for one in usual if one.seen["d_expert"]]
    about = {"seq_len": max(one.seen["seq_len"] for one in usual), "d_expert": min(experts, default=0)}
    start = measured.prior(GPU_TERMS, chip)
    wider = tuple(tuple(x + OF_TRAINERS**2 for x in row) for row in start.covariance)
    return dataclasses.replace(start, factors=tuple(means), covariance=wider, steps=sum(one.steps for one in usual),
                               seen=about)  # fmt: skip


def rounded(one: Speeds) -> Speeds:
    short = lambda x: float(f"{x:.{DIGITS}g}")
    return dataclasses.replace(one, factors=tuple(map(short, one.factors)), noise=short(one.noise),
                               covariance=tuple(tuple(map(short, row)) for row in one.covariance))  # fmt: skip


def to_text(found: list[Speeds]) -> str:
    """Return the constants as JSON, a line for each list."""
    text = json.dumps([dataclasses.asdict(one) for one in found], indent=1)
    return re.sub(r"\[\s+([-\d.e,\s]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


# Sources that the fit has not seen ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measured step, and its plan by constants that were not fitted to its source."""

    row: object
    ratio: float  # planned / measured
    inside: bool  # the interval holds the measured step


def trial(row, found: Speeds) -> Trial:
    of = costs_of(row)
    ratio = measured.seconds(of, found, row.one.bubble) / row.measured_s
    width = measured.EIGHTY * measured.spread(of, found, row.one.bubble)
    return Trial(row, ratio, abs(math.log(ratio)) <= width)


def leave_out(rows: Iterable) -> list[Trial]:
    """Plan the rows of each source with constants fitted to the other sources."""
    rows, found = [row for row in rows if row.one], []
    by_source = defaultdict(list)
    for row in rows:
        by_source[name_of(row.source)].append(row)
    for name, ones in by_source.items():
        found += [trial(row, constants_without(tuple(rows), name, row)) for row in ones]
    return found


def name_of(address: str) -> str:
    """Return the trainer of a source, or else its project or paper."""
    return trainer_of(address) or "/".join(address.split("/")[3:5])


def constants_without(rows: tuple, name: str, row) -> Speeds:
    """Return the constants for a row by all sources but one."""
    known, names = _fitted_without(tuple(row for row in rows if row.one), name), terms.terms_of(row.one.topology)
    chip = row.one.topology.chip.key
    fallback = known.get((measured.SIMILAR, "")) if names == GPU_TERMS else None
    return known.get((chip, "")) or fallback or measured.prior(names, chip)


@functools.cache
def _fitted_without(rows: tuple, name: str) -> dict[tuple[str, str], Speeds]:
    others = [row for row in rows if name_of(row.source) != name]
    return {(one.chip, one.trainer): one for one in speeds(others)}


def calibrated(rows: list, before: Speeds) -> float:
    """Return the mean error of the other rows of a source after a fit to one of them, over all choices of the one."""
    of, errors = samples(rows), []
    for number, one in enumerate(of):
        found = fit.fit(before, [dataclasses.replace(one, weight=1.0)])
        errors += [abs(measured.seconds(x.costs, found, x.bubble) / x.seconds - 1)
                   for other, x in enumerate(of) if other != number]  # fmt: skip
    return float(np.mean(errors))
