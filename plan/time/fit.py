"""Fit the constants of `measured.py` to measured steps."""

from dataclasses import dataclass, replace

import numpy as np

from plan.time.measured import EIGHTY, NOISE, Speeds, by_term, seconds
from plan.time.terms import Cost

ENOUGH, LEAST = 8, 0.025  # steps that tell the noise, and the least noise


@dataclass(frozen=True)
class Measured:
    """The costs of a planned step, and its measured seconds."""

    costs: list[Cost]
    bubble: float
    seconds: float
    weight: float = 1.0  # below 1 for one of several steps of the same recipe


def fit(before: Speeds, steps: list[Measured], rounds: int = 12) -> Speeds:
    """Return the constants that are most probable, given those `before` and the measured steps.

    Each logarithm of a constant is normally distributed, with the covariance of `before`. So is the logarithm of
    measured / planned seconds, with NOISE; far outliers count less. Gauss-Newton iterations in `rounds`.
    """
    start, inverse = np.log(before.factors), np.linalg.inv(before.covariance)
    found, logs = before, np.array(start)
    for _ in range(rounds if steps else 0):
        curvature, pull = inverse.copy(), inverse @ (start - logs)
        for one in steps:
            parts = by_term(one.costs, found, one.bubble)
            total = sum(parts.values())
            shares = np.array([parts[name] / total for name in before.terms])
            error = np.log(one.seconds / total)
            weight = one.weight / NOISE**2 / np.sqrt(1 + (error / (2 * NOISE)) ** 2)
            curvature += weight * np.outer(shares, shares)
            pull += weight * error * shares
        logs = logs + np.linalg.solve(curvature, pull)
        found = replace(before, factors=tuple(np.exp(logs)), covariance=tuple(map(tuple, np.linalg.inv(curvature))))
    return replace(found, steps=before.steps + len(steps), noise=noise(found, steps))


def noise(found: Speeds, steps: list[Measured]) -> float:
    """Return the spread that puts 4 of 5 of the measured steps into their interval; with few steps, that of `found`."""
    errors = [abs(np.log(one.seconds / seconds(one.costs, found, one.bubble))) for one in steps]
    return max(float(np.quantile(errors, 0.8)) / EIGHTY, LEAST) if len(errors) >= ENOUGH else found.noise
