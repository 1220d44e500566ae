"""What a setting may hold besides its type, and the check of it. Nothing here imports JAX."""

import dataclasses
import enum
import functools
import math
import numbers
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

from errors import UserError


class Range(NamedTuple):
    holds: Callable[[float], bool]
    words: str


Size = Annotated[int, Range(lambda x: x >= 1, "must be at least 1")]
Count = Annotated[int, Range(lambda x: x >= 0, "must be at least 0")]
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "must be above 0, and finite")]
NotNegative = Annotated[float, Range(lambda x: 0 <= x < math.inf, "must be at least 0, and finite")]
Share = Annotated[float, Range(lambda x: 0 <= x <= 1, "must be between 0 and 1")]
ShareBelow1 = Annotated[float, Range(lambda x: 0 <= x < 1, "must be at least 0 and below 1")]
Betas = tuple[ShareBelow1, ShareBelow1]

AUTO = "auto"  # a setting that is chosen from mesh, chip and memory, see `plan/auto.py`
SizeOrAuto = Size | Literal["auto"]


class Affects(enum.Enum):
    """What a setting affects: declared with its type, or for all settings of a group in `Config`."""

    FUNCTION = enum.auto()  # what the parameters compute: it comes with them where a run starts from another's
    OWN = enum.auto()  # the same, by a part that no family of published weights has: off at its default
    NUMBERS = enum.auto()  # number formats, of training and of what comes after it
    TRAINING = enum.auto()  # how parameters are trained, and on what
    ORDER = enum.auto()  # which tokens come when; it may change for steps that are still to come
    SPEED = enum.auto()  # time and memory, and results by rounding alone
    RUN = enum.auto()  # how long a run is, where its files are, and what it reports
    START = enum.auto()  # one start of a run; not written to its config.json


class Way(NamedTuple):
    """Two values of a setting of `work`: the plainest, which all others are compared with, and the one that takes least
    memory, or about as little as any."""

    plain: str | int
    least: str | None = None


def declared(hint, kind: type):
    """What the annotation of a setting holds of a kind; None: nothing."""
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, kind)), None)


KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def check(config, prefix: str = "") -> None:
    """Hold each field of a dataclass to its type and its range, however it was made: by flags, a file or Python.

    Raises: UserError for the first that is not as it should be.
    """
    for name, hint in hints(type(config)).items():
        check_value(f"{prefix}{name}", getattr(config, name), hint)


def check_value(name: str, value, hint) -> None:
    """Raises: UserError if the value of a setting is not what its type asks for."""
    ranges = getattr(hint, "__metadata__", ())
    kind = get_args(hint)[0] if ranges else hint
    if kind == SizeOrAuto:
        return None if value == AUTO else check_value(name, value, Size)
    said = f"{name}={value!r}"
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = get_args(kind)
            raise UserError(f"{said}: should be one of {', '.join(map(repr, choices))}")
    elif get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        if not isinstance(value, tuple) or len(value) != len(get_args(kind)):
            raise UserError(f"{said}: should be {len(get_args(kind))} values")
        for one, of in zip(value, get_args(kind), strict=True):
            check_value(name, one, of)
    elif kind in KINDS:
        numbers_are = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
        if not isinstance(value, numbers_are) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{said}: should be {KINDS[kind]}")
    elif dataclasses.is_dataclass(kind) and not isinstance(value, kind):
        raise UserError(f"{said}: should be a {kind.__name__}")
    for one in ranges:
        if isinstance(one, Range) and not one.holds(value):
            raise UserError(f"{said}: {one.words}")


def is_remote(path: str) -> bool:
    """Whether a path is an address: gs://, s3://, https://, .."""
    return "://" in path


# Text that stands for several values: data.skip and data.mixture ------------------------------------------------------

PERIOD = 1000  # sequences of which a mixture's shares hold exactly, wherever one begins to count


@functools.lru_cache(maxsize=64)
def parse_skips(text: str) -> tuple[tuple[int, int], ...]:
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


class Phase(NamedTuple):
    """What a mixture is made of from a step on."""

    first: int  # step, from 0
    shares: dict[str, int]  # name -> sequences of PERIOD


@functools.lru_cache(maxsize=64)
def parse_mixture(text: str) -> tuple[Phase, ...]:
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
