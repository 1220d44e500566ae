"""What a setting may hold besides its type, and the check of it. Nothing here imports JAX."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

from errors import UserError


class Range(NamedTuple):
    holds: Callable[[float], bool]
    words: str


Size = Annotated[int, Range(lambda x: x >= 1, "must be at least 1")]
Count = Annotated[int, Range(lambda x: x >= 0, "must be at least 0")]
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "must be above 0, and finite")]
NotNegative = Annotated[float, Range(lambda x: 0 <= x < math.inf, "must be at least 0, and finite")]
Share = Annotated[float, Range(lambda x: 0 <= x <= 1, "must lie between 0 and 1")]
ShareBelow1 = Annotated[float, Range(lambda x: 0 <= x < 1, "must be at least 0 and below 1")]

AUTO = "auto"  # a setting that is chosen from mesh, chip and memory, see `plan/auto.py`
SizeOrAuto = Size | Literal["auto"]

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def check(config, prefix: str = "") -> None:
    """Hold each field of a dataclass to its type and its range, however it was made: by flags, a file or Python.

    Raises: UserError for the first that is not as it should be.
    """
    for name, hint in hints(type(config)).items():
        value = getattr(config, name)
        if hint == SizeOrAuto:
            if value == AUTO:
                continue
            hint = Size
        ranges = getattr(hint, "__metadata__", ())
        kind = get_args(hint)[0] if ranges else hint
        said = f"{prefix}{name}={value!r}"
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                choices = get_args(kind)
                raise UserError(f"{said}: should be one of {', '.join(map(repr, choices))}")
        elif kind in KINDS:
            numbers_are = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
            if not isinstance(value, numbers_are) or (isinstance(value, bool) and kind is not bool):
                raise UserError(f"{said}: should be {KINDS[kind]}")
        elif dataclasses.is_dataclass(kind) and not isinstance(value, kind):
            raise UserError(f"{said}: should hold settings, as {kind.__name__} does")
        for one in ranges:
            if isinstance(one, Range) and not one.holds(value):
                raise UserError(f"{said}: {one.words}")


def is_remote(path: str) -> bool:
    """Whether a path is an address: gs://, s3://, https://, .."""
    return "://" in path
