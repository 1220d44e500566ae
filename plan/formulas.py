"""Symbolic arithmetic: call the planner's functions with letters instead of numbers, and they return formulas.

Operators, `where`, `maximum`, `minimum` and `table` return a `Formula` if an argument is a Formula, else numbers.
Decorate a function that branches on a letter with `by_cases`. Inside `in_letters`, the function then runs once for each
combination of branches, and `where` merges the results. Outside `in_letters` it runs unchanged. The planner's web page
evaluates the formulas (`docs/planner_formulas.py`), so it gives the same results as Python from the same code.
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
CONDITIONS = (">", "=", "is", "flag")  # operators with a boolean result
NODES: dict[tuple, "Formula"] = {}  # equal formulas are one object
TABLES: dict[str, Callable] = {}  # functions with few possible arguments: the browser looks up their values
OPTIONS: dict[str, tuple] = {}  # the possible values of each Choice
REPLACED: dict[tuple, tuple] = {}


class Formula:
    """A symbolic number. It is unhashable, so that caches reject it."""

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
        if self.op not in CONDITIONS:
            raise TypeError(f"a symbolic quantity ({self.op}) is neither true nor false; compare it with a number")
        return decide(self)


class Choice:
    """A symbolic setting with a few possible values."""

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
        NODES[key] = formula = Formula()
        formula.op, formula.args, formula.number = op, args, len(NODES)
    return NODES[key]


def letter(name: str) -> Formula:
    """Create the symbol of a size or a speed, which is at least 1."""
    return node("letter", name)


def flag(name: str) -> Formula:
    return node("flag", name)


def calculate(op: str, x, y):
    """Return x op y, as a number if both are numbers or if the result does not depend on the letters."""
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
    """Return x if the condition holds, else y. Both are evaluated."""
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
    """Return False only for the number 0, because a formula may be nonzero."""
    return isinstance(x, Formula) or bool(x)


def table(outputs: int) -> Callable:
    """Decorate a function that returns `outputs` numbers and cannot be a formula: the browser looks up its values."""

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
known: dict[int, bool] | None = None  # decided conditions, while `run_branches` runs a function


class Undecided(BaseException):
    """Raised when code branches on a condition that is not yet in `known`."""


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
        raise TypeError(f"code branches on letters ({condition.op} {condition.args}) outside `by_cases`")
    if condition.number in known:
        return known[condition.number]
    if condition.op == "is":  # exactly one of the values holds
        name, value = condition.args
        others = [known.get(node("is", name, other).number) for other in OPTIONS[name] if other != value]
        if True in others or None not in others:
            return True not in others
    raise Undecided(condition)


def run_branches(function: Callable, decided: dict[int, bool]):
    """Run a function for each combination of branches and return its results as a tree of forks."""
    global known
    before, known = known, decided
    try:
        return function()
    except Undecided as undecided:
        (condition,) = undecided.args
    finally:
        known = before
    return Fork(condition, *(run_branches(function, decided | {condition.number: answer}) for answer in (True, False)))


def by_cases(function: Callable) -> Callable:
    """Decorate a pure function that branches on letters: `where` merges the results of its branches."""
    run = (lambda *args: list(function(*args))) if inspect.isgeneratorfunction(function) else function

    @functools.wraps(function)
    def joined(*args, **more):
        if not tracing or known is not None:  # plain numbers, or the calling function is already split into branches
            return run(*args, **more)
        return join(run_branches(lambda: run(*args, **more), {}))

    return joined


def cases(function: Callable) -> list[tuple]:
    """List (condition, result under that condition) of a function whose results are not numbers."""
    tree = run_branches(function, {}) if tracing and known is None else function()
    leaves = lambda x: [*leaves(x.yes), *leaves(x.no)] if isinstance(x, Fork) else [x]
    holds = lambda x, leaf: (where(x.condition, holds(x.yes, leaf), holds(x.no, leaf)) if isinstance(x, Fork)
                             else int(x == leaf))  # fmt: skip
    return [(holds(tree, leaf), leaf) for leaf in dict.fromkeys(leaves(tree))]


def join(tree):
    return merge(tree.condition, join(tree.yes), join(tree.no)) if isinstance(tree, Fork) else tree


def is_number(x) -> bool:
    return isinstance(x, Formula | int | float)


def merge(condition: Formula, x, y):
    """Apply `where` to numbers, or to dataclasses, tuples and lists of numbers."""
    if is_number(x) and is_number(y):
        return where(condition, x, y)
    if isinstance(x, list):
        return merge_rows(condition, x, y)
    if isinstance(x, tuple):
        return tuple(merge(condition, *pair) for pair in zip(x, y, strict=True))
    if dataclasses.is_dataclass(x):
        return type(x)(*(merge(condition, *pair) for pair in zip(fields(x), fields(y), strict=True)))
    assert x == y, f"cannot merge {x} and {y}"
    return x


def fields(x) -> list:
    return [getattr(x, field.name) for field in dataclasses.fields(x)]


def shape(x):
    """Return a row without its numbers."""
    if is_number(x):
        return ...
    return (type(x), *map(shape, fields(x) if dataclasses.is_dataclass(x) else x)) if not isinstance(
        x, str | None) else x  # fmt: skip


def blank(x):
    """Return a row with all numbers set to 0."""
    if is_number(x):
        return 0
    if dataclasses.is_dataclass(x):
        return type(x)(*map(blank, fields(x)))
    return tuple(map(blank, x)) if isinstance(x, tuple) else [] if isinstance(x, list) else x


def merge_rows(condition: Formula, x: list, y: list) -> list:
    """Merge two lists, pairing rows of the same shape in order. A row that is missing in one list counts as 0 there."""
    if x and isinstance(x[0], tuple):  # pairs of a count and rows
        return [merge(condition, *pair) for pair in zip(x, y, strict=True)]
    left, merged = list(y), []
    for row in x:
        other = next((i for i, one in enumerate(left) if shape(one) == shape(row)), None)
        merged.append(merge(condition, row, blank(row) if other is None else left.pop(other)))
    return merged + [merge(condition, blank(row), row) for row in left]


def with_decided_choices(x, names: tuple[str, ...]):
    """Return x with `Choice`s replaced: the named ones by their decided value, the others by their first option."""
    if not tracing:
        return x
    value = lambda choice: choice.settled if choice.name in names else OPTIONS[choice.name][0]
    fields = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    changes = {name: value(x) for name, x in fields.items() if isinstance(x, Choice)}
    changes |= {name: with_decided_choices(x, names) for name, x in fields.items() if dataclasses.is_dataclass(x)}
    return cached_replace(x, **changes) if changes else x


def cached_replace(x, **changes):
    """Call `dataclasses.replace` with a cache: it is slow, and called for each combination of branches."""
    key = id(x), tuple((name, value if isinstance(value, str) else id(value)) for name, value in changes.items())
    if key not in REPLACED:
        REPLACED[key] = x, changes, dataclasses.replace(x, **changes)  # references keep the ids valid
    return REPLACED[key][-1]
