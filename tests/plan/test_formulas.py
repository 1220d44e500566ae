"""Tests of symbolic arithmetic: a formula evaluates to what the same code computes on numbers."""

import functools
import itertools
from dataclasses import dataclass

import pytest

from docs.planner_formulas import value
from plan import formulas
from plan.formulas import Choice, letter, maximum, where


@dataclass(frozen=True)
class Row:
    axis: str
    size: float


@formulas.by_cases
def rows(n, b):
    """Yield rows with branches, integer division, and a row that only one branch has."""
    if n > 1 and b % 2 == 0:
        yield Row("tensor", b * (n - 1) / n)
    yield Row("data", where(n <= 2, 5, maximum(-(-b // n), 3)) if n != 4 else 7)


def test_formulas_evaluate_to_the_results_on_numbers():
    """Catches an operator, a branch or a row that is missing or swapped."""
    with formulas.in_letters():
        in_letters = rows(letter("n"), letter("b"))
    assert {row.axis for row in in_letters} == {"tensor", "data"}
    for n, b in itertools.product((1, 2, 3, 4, 8), (1, 6, 7, 12)):
        sizes = {row.axis: float(value(row.size, {"n": n, "b": b}, {})) for row in in_letters}
        assert {axis: size for axis, size in sizes.items() if size} == {row.axis: row.size for row in rows(n, b)}


def test_a_formula_cannot_be_used_as_a_number():
    """Catches code that takes the same branch for all values, and a cache that returns the result of another case."""
    n = letter("n")
    with formulas.in_letters():
        with pytest.raises(TypeError, match="outside `by_cases`"):
            bool(n > 4)
        with pytest.raises(TypeError, match="neither true nor false"):
            bool(2 * n)
        for unknown in (n, Choice("gather", ("layer", "step"))):
            with pytest.raises(TypeError, match="unhashable"):
                functools.cache(lambda x: x)(unknown)


def test_equal_formulas_are_one_object():
    """Catches a page that grows with every use of a formula."""
    n = letter("n")
    assert (n + 1) * 2 is (n + 1) * 2
    assert where(n > 1, n + 0, n) is n and n * 0 == 0
