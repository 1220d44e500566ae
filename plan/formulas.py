"""Arithmetic in letters: run the planner's own functions on letters instead of numbers, and the result is a formula.

Operators, `where`, `maximum`, `minimum` and `table` make a `Formula` when one of their arguments is one, and compute
plain numbers otherwise. A function that branches on a letter is decorated with `by_cases`: in letters it runs once for
each way through it, and the results are joined. So the browser (`docs/planner_formulas.py`) evaluates what Python
computes, and nobody writes a formula twice. Outside of `in_letters` a decorated function runs as it is.
"""

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import NamedTuple

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
             "%": operator.mod, "max": max, "min": min, ">": operator.gt, "=": operator.eq}  # fmt: skip
CONDITIONS = (">", "=", "is", "flag")  # these are true or false; the others are quantities
NODES: dict[tuple, "Formula"] = {}  # equal formulas are one object
TABLES: dict[str, Callable] = {}  # functions of few values, that the browser looks up
OPTIONS: dict[str, tuple] = {}  # of each choice
REPLACED: dict[tuple, tuple] = {}


class Formula:
    """A number that is not known yet. It has no hash, so that no cache takes it for a number."""

    __slots__ = ("args", "number", "op")
    __hash__ = None

    def __add__(self, x):
        return calculate("+", self, x)

    def __radd__(self, x):
        return calculate("+", x, self)

    def __sub__(self, x):
        return calculate("-", self, x)

    def __rsub__(self, x):
        return calculate("-", x, self)

    def __mul__(self, x):
        return calculate("*", self, x)

    def __rmul__(self, x):
        return calculate("*", x, self)

    def __truediv__(self, x):
        return calculate("/", self, x)

    def __rtruediv__(self, x):
        return calculate("/", x, self)

    def __floordiv__(self, x):
        return calculate("//", self, x)

    def __rfloordiv__(self, x):
        return calculate("//", x, self)

    def __mod__(self, x):
        return calculate("%", self, x)

    def __rmod__(self, x):
        return calculate("%", x, self)

    def __neg__(self):
        return calculate("-", 0, self)

    def __gt__(self, x):
        return calculate(">", self, x)

    def __lt__(self, x):
        return calculate(">", x, self)

    def __ge__(self, x):
        return negate(calculate(">", x, self))

    def __le__(self, x):
        return negate(calculate(">", self, x))

    def __eq__(self, x):
        return calculate("=", self, x)

    def __ne__(self, x):
        return negate(calculate("=", self, x))

    def __bool__(self):
        if self.op == "not":
            return not self.args[0]
        if self.op == "letter":  # at least 1
            return True
        if self.op == "letter":  # at least 1
            return True
        if self.op not in CONDITIONS:
            raise TypeError(f"a quantity in letters ({self.op}) is neither true nor false: compare it")
        return decide(self)


class Choice:
    """A setting that is not known yet: one of a few values."""

    __hash__ = None

    def __init__(self, name: str, options):
        self.name, OPTIONS[name] = name, tuple(options)

    def __eq__(self, value):
        return value in OPTIONS[self.name] and node("is", self.name, value)

    def __ne__(self, value):
        return negate(self == value)

    @property
    def settled(self):
        return next(value for value in OPTIONS[self.name] if self == value)


def node(op: str, *args) -> Formula:
    key = (op, *(("#", x.number) if isinstance(x, Formula) else x for x in args))
    if key not in NODES:
        NODES[key] = found = Formula()
        found.op, found.args, found.number = op, args, len(NODES)
    return NODES[key]


def letter(name: str) -> Formula:
    """A size, or a speed: at least 1."""
    return node("letter", name)


def flag(name: str) -> Formula:
    return node("flag", name)


def calculate(op: str, x, y):
    """x op y: a number where both are, or where it does not depend on the letters."""
    if not isinstance(x, Formula) and not isinstance(y, Formula):
        return OPERATORS[op](x, y)
    is_number = lambda one, value: not isinstance(one, Formula) and one == value
    if (op == "*" and (is_number(x, 0) or is_number(y, 0))) or (op in ("/", "//") and is_number(x, 0)):
        return 0
    if (op in "+-" and is_number(y, 0)) or (op in "*/" and is_number(y, 1)) or (op in ("max", "min") and x is y):
        return x
    if (op == "+" and is_number(x, 0)) or (op == "*" and is_number(x, 1)):
        return y
    if op == "=" and (x is y or (x.op == "letter" and is_number(y, 1))):
        return x is y or negate(calculate(">", x, 1))  # a letter is at least 1
    return node(op, x, y)


def negate(x):
    if not isinstance(x, Formula):
        return not x
    return x.args[0] if x.op == "not" else node("not", x)


def where(condition, x, y):
    """x if the condition holds, else y; both are computed."""
    if not isinstance(condition, Formula):
        return x if condition else y
    if condition.op == "not":
        return where(condition.args[0], y, x)
    if x is y or (not isinstance(x, Formula) and not isinstance(y, Formula) and x == y):
        return x
    if not isinstance(x, Formula) and not isinstance(y, Formula) and (x, y) in ((1, 0), (0, 1)):
        return condition if x else negate(condition)
    return node("where", condition, x, y)


def maximum(*values):
    return functools.reduce(functools.partial(calculate, "max"), values)


def minimum(*values):
    return functools.reduce(functools.partial(calculate, "min"), values)


def present(x) -> bool:
    """False for a number that is 0. What has letters may be more."""
    return isinstance(x, Formula) or bool(x)


def table(outputs: int) -> Callable:
    """Decorate a function that returns so many numbers and is no formula: in letters, a table is looked up."""

    def decorate(function: Callable) -> Callable:
        TABLES[function.__name__] = function

        @functools.wraps(function)
        def look_up(*args):
            if not any(isinstance(x, Formula | Choice) for x in args):
                return function(*args)
            settled = [x.settled if isinstance(x, Choice) else x for x in args]
            return tuple(node("look", function.__name__, i, *settled) for i in range(outputs))

        return look_up

    return decorate


# Branches -------------------------------------------------------------------------------------------------------------

tracing = False
known: dict[int, bool] | None = None  # on the way through a function: conditions that are decided


class Undecided(BaseException):
    """A condition that code branches on, and that this way has not decided yet."""


class Fork(NamedTuple):
    condition: Formula
    yes: object
    no: object


@contextlib.contextmanager
def in_letters():
    global tracing
    tracing = True
    try:
        yield
    finally:
        tracing = False


def decide(condition: Formula) -> bool:
    if known is None:
        raise TypeError(f"code branches on letters ({condition.op} {condition.args}) outside of `by_cases`")
    if condition.number in known:
        return known[condition.number]
    if condition.op == "is":  # one value, and no other
        name, value = condition.args
        others = [known.get(node("is", name, other).number) for other in OPTIONS[name] if other != value]
        if True in others or None not in others:
            return True not in others
    raise Undecided(condition)


def ways(function: Callable, decided: dict[int, bool]):
    """What a function returns on each way through it: a tree of forks."""
    global known
    before, known = known, decided
    try:
        return function()
    except Undecided as asked:
        (condition,) = asked.args
    finally:
        known = before
    return Fork(condition, *(ways(function, decided | {condition.number: answer}) for answer in (True, False)))


def by_cases(function: Callable) -> Callable:
    """Decorate a function without effects that branches on letters: what it returns is joined by `where`."""
    run = (lambda *args: list(function(*args))) if inspect.isgeneratorfunction(function) else function

    @functools.wraps(function)
    def joined(*args, **more):
        if not tracing or known is not None:  # plain numbers, or the function around it already decides
            return run(*args, **more)
        return join(ways(lambda: run(*args, **more), {}))

    return joined


def cases(function: Callable) -> list[tuple]:
    """(condition, what the function returns where it holds), for results that are no numbers."""
    tree = ways(function, {}) if tracing and known is None else function()
    leaves = lambda of: [*leaves(of.yes), *leaves(of.no)] if isinstance(of, Fork) else [of]
    holds = lambda of, leaf: (where(of.condition, holds(of.yes, leaf), holds(of.no, leaf)) if isinstance(of, Fork)
                              else int(of == leaf))  # fmt: skip
    return [(holds(tree, leaf), leaf) for leaf in dict.fromkeys(leaves(tree))]


def join(tree):
    return merge(tree.condition, join(tree.yes), join(tree.no)) if isinstance(tree, Fork) else tree


def is_number(x) -> bool:
    return isinstance(x, Formula | int | float)


def merge(condition: Formula, x, y):
    """`where`, for numbers and for dataclasses, tuples and lists of them."""
    if is_number(x) and is_number(y):
        return where(condition, x, y)
    if isinstance(x, list):
        return merge_rows(condition, x, y)
    if isinstance(x, tuple):
        return tuple(merge(condition, *both) for both in zip(x, y, strict=True))
    if dataclasses.is_dataclass(x):
        return type(x)(*(merge(condition, *both) for both in zip(fields(x), fields(y), strict=True)))
    assert x == y, f"{x} and {y} cannot be joined"
    return x


def fields(x) -> list:
    return [getattr(x, field.name) for field in dataclasses.fields(x)]


def shape(x):
    """All of a row but its numbers."""
    if is_number(x):
        return ...
    return (type(x), *map(shape, fields(x) if dataclasses.is_dataclass(x) else x)) if not isinstance(
        x, str | None) else x  # fmt: skip


def blank(x):
    """The row with all its numbers 0."""
    if is_number(x):
        return 0
    if dataclasses.is_dataclass(x):
        return type(x)(*map(blank, fields(x)))
    return tuple(map(blank, x)) if isinstance(x, tuple) else [] if isinstance(x, list) else x


def merge_rows(condition: Formula, x: list, y: list) -> list:
    """Rows of both lists: those of the same shape, in order, are one row; what the other list lacks is 0 there."""
    if x and isinstance(x[0], tuple):  # pairs of how many and rows
        return [merge(condition, *both) for both in zip(x, y, strict=True)]
    left, found = list(y), []
    for row in x:
        other = next((i for i, one in enumerate(left) if shape(one) == shape(row)), None)
        found.append(merge(condition, row, blank(row) if other is None else left.pop(other)))
    return found + [merge(condition, blank(row), row) for row in left]


def settled(x, names: tuple[str, ...]):
    """A dataclass in which these choices are made, as caches can take it; any other choice has its first value."""
    if not tracing:
        return x
    value = lambda choice: choice.settled if choice.name in names else OPTIONS[choice.name][0]
    fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    made = {name: value(of) for name, of in fields.items() if isinstance(of, Choice)}
    made |= {name: settled(of, names) for name, of in fields.items() if dataclasses.is_dataclass(of)}
    return replaced(x, **made) if made else x


def replaced(x, **made):
    """`dataclasses.replace`, which checks every field again, once for each result: ways through a function are many."""
    key = id(x), tuple((name, value if isinstance(value, str) else id(value)) for name, value in made.items())
    if key not in REPLACED:
        REPLACED[key] = x, made, dataclasses.replace(x, **made)  # kept, so that an id stays its own
    return REPLACED[key][-1]
