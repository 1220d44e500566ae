"""Define the order of training rows, with skipped batches and mixtures of sources.

Every function here depends only on settings and a step or sequence number, so a run can resume at any step. Steps in
settings count from 1, as in the log; steps in the code count from 0. The `shares` of a mixture are its weights, in
sequences per PERIOD sequences.
"""

import functools
import math
import zlib

from config.fields import PERIOD, Phase, parse_mixture, parse_skips

# Skipped batches ------------------------------------------------------------------------------------------------------


def batch_number(skip: str, step: int) -> int:
    """Return the index of a step's batch in the infinite sequence of batches."""
    return step + sum(count for first, count in parse_skips(skip) if first <= step)


# Mixtures -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _interleave(shares: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Spread the sources evenly over PERIOD sequences. Return, for each sequence, its source, and how many sequences
    each source has before it."""
    credit, had, turns = [0] * len(shares), [0] * len(shares), []
    for _ in range(PERIOD):
        credit = [c + share for c, share in zip(credit, shares, strict=True)]
        whose = max(range(len(shares)), key=credit.__getitem__)
        credit[whose] -= PERIOD
        turns.append((whose, tuple(had)))
        had[whose] += 1
    return turns


def source_and_index(phases: tuple[Phase, ...], starts: tuple[int, ...], number: int) -> tuple[str, int]:
    """Return the source of sequence `number` of the infinite sequence, and its index within that source.

    starts  number of the first sequence in each phase
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
    """Return the seed of a source's shuffle. It does not depend on the other sources."""
    return zlib.crc32(f"{seed} {name}".encode())


# Settings that resuming must not change -------------------------------------------------------------------------------


def settings_before(mixture_text: str, skip: str, steps: int) -> tuple:
    """Return what data.mixture and data.skip set for the first `steps` steps. Resuming may change the rest."""
    phases = tuple((phase.first, tuple(phase.shares.items())) for phase in parse_mixture(mixture_text))
    skips = tuple(one for one in parse_skips(skip) if one[0] < steps)
    return tuple(one for one in phases if one[0] < steps or not one[0]), skips
