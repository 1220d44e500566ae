"""Which window comes when: steps that are passed over, mixtures of sources, windows cut elsewhere each epoch.

Everything is arithmetic of settings and a number: nothing is remembered, so a run goes on anywhere. Steps in settings
are those of the log, from 1; a step in the code counts from 0.
"""

import functools
import hashlib
import math
import re
import zlib
from fractions import Fraction
from typing import NamedTuple

from errors import UserError

PERIOD = 1000  # sequences of which a mixture's shares hold exactly, wherever one begins to count


# Steps that are passed over -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def skips(text: str) -> tuple[tuple[int, int], ...]:
    """Read `1200:1210,5000:5001`: (the step, from 0, that is the first to see another batch, batches passed over).

    Raises: UserError naming the part that cannot be read.
    """
    found = []
    for part in filter(None, text.split(",")):
        first, last = map(int, match.groups()) if (match := re.fullmatch(r"(\d+):(\d+)", part)) else (0, 0)
        if not 1 <= first < last:
            raise UserError(f"data.skip={text!r}: {part!r} should be FIRST:AFTER, steps of the log, as 1200:1210: step "
                            "1200 takes the batch that step 1210 would have taken, so 10 are passed over")  # fmt: skip
        found.append((first - 1, last - first))
    return tuple(sorted(found))


def place(skip: str, step: int) -> int:
    """The number of a step's batch in the endless order of batches."""
    return step + sum(count for first, count in skips(skip) if first <= step)


# Mixtures -------------------------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """What a mixture is made of from a step on."""

    first: int  # step, from 0
    shares: dict[str, int]  # name -> sequences of PERIOD


@functools.lru_cache(maxsize=64)
def mixture(text: str) -> tuple[Phase, ...]:
    """Read `code=0.7,prose=0.3@5000:code=0.5,prose=0.5`: shares, and others from step 5000 of the log on.

    Raises: UserError naming the part that cannot be read, or shares that are no whole, with the arithmetic.
    """
    phases = []
    for part in text.split("@") if text else ():
        begins, colon, words = part.rpartition(":")
        if bool(colon) != bool(phases) or (colon and not (begins.isdecimal() and int(begins) > phases[-1].first + 1)):
            form = "STEP:NAME=SHARE,.. with a later step of the log" if phases else "NAME=SHARE,.."
            raise UserError(f"data.mixture={text!r}: {part!r} should be {form}")
        phases.append(Phase(int(begins) - 1 if colon else 0, _shares(text, words)))
    if len({frozenset(phase.shares) for phase in phases}) > 1:
        raise UserError(f"data.mixture={text!r}: name the same sources from each step on; a share may be 0")
    return tuple(phases)


def _shares(text: str, words: str) -> dict[str, int]:
    shares, sum_is = {}, []
    for part in words.split(","):
        match = re.fullmatch(r"([A-Za-z0-9_.-][A-Za-z0-9_./-]*)=(\d*\.?\d+)", part)
        if not match:
            raise UserError(f"data.mixture={text!r}: {part!r} should be NAME=SHARE, NAME a directory of tokens in "
                            "data.path, as code=0.7")  # fmt: skip
        name, share = match[1], Fraction(match[2]) * PERIOD
        if name in shares:
            raise UserError(f"data.mixture={text!r}: {name!r} is given twice")
        if share.denominator > 1:
            raise UserError(f"data.mixture={text!r}: {part!r}: shares hold exactly over any {PERIOD:,} sequences, so "
                            f"give at most 3 decimals: {name}={round(share) / PERIOD}")  # fmt: skip
        shares[name] = int(share)
        sum_is.append(match[2])
    if (total := sum(shares.values())) != PERIOD:
        raise UserError(f"data.mixture={text!r}: the shares {' + '.join(sum_is)} = {total / PERIOD} should be 1 in all")
    return shares


@functools.lru_cache(maxsize=16)
def _turns(shares: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Of PERIOD sequences: whose turn it is, spread evenly, and how many turns each source has had before."""
    credit, had, turns = [0] * len(shares), [0] * len(shares), []
    for _ in range(PERIOD):
        credit = [c + share for c, share in zip(credit, shares, strict=True)]
        whose = max(range(len(shares)), key=credit.__getitem__)
        credit[whose] -= PERIOD
        turns.append((whose, tuple(had)))
        had[whose] += 1
    return turns


def turn(phases: tuple[Phase, ...], starts: tuple[int, ...], number: int) -> tuple[str, int]:
    """Whose sequence has this number in the endless order, and its number among those of that source.

    starts  number of the first sequence of each phase
    """
    names = tuple(phases[0].shares)
    had = [0] * len(names)
    for phase, start, end in zip(phases, starts, (*starts[1:], math.inf), strict=True):
        shares = tuple(phase.shares[name] for name in names)
        rounds, rest = divmod(min(end, number) - start, PERIOD)
        whose, before = _turns(shares)[rest]
        had = [h + rounds * share + b for h, share, b in zip(had, shares, before, strict=True)]
        if number < end:
            return names[whose], had[whose]
    raise AssertionError("the last phase has no end")


def seed_of(name: str, seed: int) -> int:
    """The seed of a source's own shuffle: another source beside it changes nothing."""
    return zlib.crc32(f"{seed} {name}".encode())


# Windows --------------------------------------------------------------------------------------------------------------


def offset(seed: int, epoch: int, seq_len: int) -> int:
    """By how many tokens the windows of an epoch are shifted; 0 in the first."""
    drawn = hashlib.sha256(f"offset {seed} {epoch}".encode()).digest()
    return int.from_bytes(drawn[:8], "little") % seq_len if epoch else 0


# What a run has seen --------------------------------------------------------------------------------------------------


def seen(mixture_text: str, skip: str, steps: int) -> tuple:
    """Of both settings, what has decided the first `steps` steps: a run may change the rest when it goes on."""
    phases = tuple((phase.first, tuple(phase.shares.items())) for phase in mixture(mixture_text))
    return tuple(one for one in phases if one[0] < steps or not one[0]), tuple(s for s in skips(skip) if s[0] < steps)
