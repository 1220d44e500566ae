"""Which window comes when: steps that are passed over, and mixtures of sources.

Everything is arithmetic of settings and a number: nothing is remembered, so a run goes on anywhere. Steps in settings
are those of the log, from 1; a step in the code counts from 0.
"""

import functools
import math
import zlib

from config.fields import PERIOD, Phase, parse_mixture, parse_skips

# Steps that are passed over -------------------------------------------------------------------------------------------


def batch_number(skip: str, step: int) -> int:
    """The number of a step's batch in the endless order of batches."""
    return step + sum(count for first, count in parse_skips(skip) if first <= step)


# Mixtures -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _interleave(shares: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Of PERIOD sequences: whose turn it is, spread evenly, and how many turns each source has had before."""
    credit, had, turns = [0] * len(shares), [0] * len(shares), []
    for _ in range(PERIOD):
        credit = [c + share for c, share in zip(credit, shares, strict=True)]
        whose = max(range(len(shares)), key=credit.__getitem__)
        credit[whose] -= PERIOD
        turns.append((whose, tuple(had)))
        had[whose] += 1
    return turns


def source_and_index(phases: tuple[Phase, ...], starts: tuple[int, ...], number: int) -> tuple[str, int]:
    """Whose sequence has this number in the endless order, and its number among those of that source.

    starts  number of the first sequence of each phase
    """
    names = tuple(phases[0].shares)
    had = [0] * len(names)
    for phase, start, end in zip(phases, starts, (*starts[1:], math.inf), strict=True):
        shares = tuple(phase.shares[name] for name in names)
        rounds, rest = divmod(min(end, number) - start, PERIOD)
        whose, before = _interleave(shares)[rest]
        had = [h + rounds * share + b for h, share, b in zip(had, shares, before, strict=True)]
        if number < end:
            return names[whose], had[whose]
    raise AssertionError("the last phase has no end")


def seed_of(name: str, seed: int) -> int:
    """The seed of a source's own shuffle: another source beside it changes nothing."""
    return zlib.crc32(f"{seed} {name}".encode())


# What a run has seen --------------------------------------------------------------------------------------------------


def settings_before(mixture_text: str, skip: str, steps: int) -> tuple:
    """Of both settings, what has decided the first `steps` steps: a run may change the rest when it goes on."""
    phases = tuple((phase.first, tuple(phase.shares.items())) for phase in parse_mixture(mixture_text))
    skips = tuple(one for one in parse_skips(skip) if one[0] < steps)
    return tuple(one for one in phases if one[0] < steps or not one[0]), skips
