"""What chapters tell a reader about a prediction and an answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from chapters import folded, lesson
from utils import UserError

CASES, SQUARES = [(2, 3), (4, 5)], lambda x, n: x * x + n
MISTAKES = [(lambda x, n: 2 * x + n, "doubled"), (lambda x, n: x * x, "the rest is lost")]
check = lambda answer: lesson.diagnose(answer, CASES, SQUARES, MISTAKES, "right")


def fails(x, n):
    raise StopIteration


@pytest.mark.parametrize("answer, message", [
    (SQUARES, "right"),
    (lambda x, n: np.float32(x * x + n), "right"),
    (..., lesson.NOTHING), (None, lesson.NOTHING), (lambda x, n: ..., lesson.NOTHING),
    (lambda x, n: lesson.answered(lambda x: ...)(x) + n, lesson.NOTHING),
    (lambda x, n: lesson.answered(...)(x), lesson.NOTHING),
    (lambda x, n: lesson.answered(lambda x: (1, None))(x), lesson.NOTHING),
    (lambda x, n: 2 * x + n, "doubled"),  # right at x=2
    (lambda x, n: x * x, "the rest is lost"),
    (lambda x, n: 7 if x == 2 else 0,
     "Not yet: it is wrong at x=4, n=5, though not in every case. Your answer there is 0, 0 times the right value."),
    (lambda x, n: 1 / 3, "Not yet: it is wrong at x=2, n=3, as in every case. Your answer there is 0.333333, "
                         "0.0476 times the right value."),
    (lambda x, n: jnp.ones((2, 3)), "Not yet at x=2, n=3: your result has shape (2, 3), and should have ()."),
    (lambda *_: [][1], "It stops at 2, 3: IndexError: list index out of range"),
    (fails, "It stops at x=2, n=3: StopIteration"),
    (lambda x, n: lesson.answered(7)(x), "It stops at x=2, n=3: TypeError: expected a function, but this is 7"),
])  # fmt: skip
def test_an_answer_gets_one_line(answer, message):
    """Catches a traceback, a wrong answer that passes, a mistake without its hint, and an unreadable case."""
    assert check(answer) == message


def test_a_listed_mistake_must_be_wrong():
    """Catches a hint for a right answer, because its sizes make wrong and right agree."""
    with pytest.raises(AssertionError, match="no mistake: hint"):
        lesson.diagnose(lambda x, n: 0, [(2, 3)], SQUARES, [(lambda x, n: 2 * x + n, "hint")], "")


def test_messages_without_arguments_name_no_case():
    """Catches an empty " at "."""
    assert lesson.diagnose(lambda: 3, [()], lambda: 4, [], "") == (
        "Not yet: it is wrong. Your answer there is 3, 0.75 times the right value."
    )
    assert lesson.diagnose(fails, [()], lambda: 4, [], "").startswith("It stops: TypeError: ")


@pytest.mark.parametrize("got, want, words", [
    ((np.ones(3), 2.0), (np.ones(3), 4.0), "an entry is off by as much as 50.0% of the largest right entry"),
    (3 * np.arange(4), np.arange(4), "every entry is 3 times the right one"),
    ((np.ones(3), np.ones((2, 5)), 4), (np.ones(3), 4), "shape ((3,), (2, 5), ()), and should have ((3,), ())"),
])  # fmt: skip
def test_an_answer_of_several_arrays_gets_a_line(got, want, words):
    """Catches a traceback about a tuple of an array and a number, and a line that says only that it is wrong."""
    assert words in lesson.diagnose(lambda n: got, [(1,)], lambda n: want, [], "right")


def test_an_answer_may_be_run_before_it_is_checked():
    """Catches a `run` that mistakes or the answer don't pass through, and an answer of None that is not NOTHING."""
    halved = lesson.checker(CASES, lambda x, n: SQUARES(x, n) / 2, MISTAKES, "right",
                            run=lambda function: lambda x, n: function(x, n) / 2)  # fmt: skip
    lesson.expect(
        halved, *MISTAKES, (SQUARES, "right"), (lambda x, n: None, lesson.NOTHING), (7, "expected a function")
    )


def test_a_reply_without_the_words_fails_the_test_of_a_checker():
    """Catches an `expect` that accepts any reply, or keeps the results of a mistake for readers."""
    computed = []
    mistakes = [(lambda x, n: computed.append(x) or 2 * x + n, "doubled"), MISTAKES[1]]
    counting = lesson.checker(CASES, SQUARES, mistakes, "right")
    lesson.expect(counting, *MISTAKES)
    assert computed == [2, 4], "each case once"
    with pytest.raises(AssertionError, match="'doubled' is not in 'the rest is lost'"):
        lesson.expect(counting, (MISTAKES[1][0], "doubled"))
    assert counting(MISTAKES[0][0]) == "doubled" and len(computed) == 6


@pytest.mark.parametrize("answer, message", [
    (lambda: 3, "3"), (4, "4"), (..., lesson.NOTHING), (lambda: None, lesson.NOTHING),
    (lambda: 1 / 0, "It stops: ZeroDivisionError: division by zero"), ("?", "The planner rejects this: no mesh"),
])  # fmt: skip
def test_a_verdict_on_a_value_is_one_line(answer, message):
    """Catches a traceback, and an error of the reader's function that is taken for the planner's."""

    @lesson.verdict
    def check_value(value):
        if value == "?":
            raise UserError("no mesh\nin two lines")
        return str(value)

    assert check_value(answer) == message


RATE = 2


def faster(x):
    return RATE * x


class Step:
    def go(self, x):
        return faster(x)


def train(x):
    return Step().go(x)


def test_the_code_of_a_reader_may_be_changed():
    """Catches a change that has no effect or remains, and a piece of text that the code no longer has."""
    assert lesson.replaced(faster, RATE=5)(3) == 15 and train(3) == 6
    changed = lesson.rewritten(faster, Step, train)
    assert changed(("RATE * x", "RATE * x + 1"))(3) == 7 and train(3) == 6
    with pytest.raises(AssertionError, match="gone"):
        changed(("gone", "here"))


def test_results_of_devices_are_stacked():
    """Catches an answer that runs once, or whose results are added up."""
    mesh = sharding.make_mesh("fsdp=2")
    program = lesson.on_each(lambda x: (2 * x, x.sum()), mesh, jax.P("fsdp"))
    doubled, total = program(np.arange(4.0))
    assert doubled.tolist() == [[0, 2], [4, 6]] and total.tolist() == [1, 5]


def test_odd_answers_reach_every_checker():
    """Catches a checker that raises an exception or prints two lines, and a chapter whose checkers are not found."""
    lesson.check_all({"check_squares": check})
    for bad in (lambda answer: float(answer), lambda answer: "two\nlines", lambda answer: None):
        with pytest.raises((AssertionError, TypeError, ValueError)):
            lesson.check_all({"check_bad": bad})
    with pytest.raises(AssertionError, match="no checker"):
        lesson.check_all({"squares": check})
    assert len(lesson.odd_answers()) == 20


def test_a_removed_cell_gives_readers_no_name(monkeypatch):
    """Catches a checker that passes the tests of the chapter, but stops with a NameError in a reader's notebook."""
    monkeypatch.setattr(lesson, "APART", {})
    shown: dict = {}
    exec("def check_answer(n):\n    return n == right", shown)
    lesson.run_apart("right = 3\nstep = lambda n: n + later", shown)
    shown["later"] = 4
    lesson.run_apart("assert step(right) == 7, 'names stay for later removed cells'", shown)
    assert not {"right", "step"} & {*shown}
    with pytest.raises(NameError, match="'right' is not defined") as error:
        lesson.run_apart("check_answer(3)", shown)
    assert "check_answer(3)" in str(error.traceback[-2].statement)
    with lesson.edited(shown["check_answer"], later=5):
        assert shown["later"] == 5
    assert shown["later"] == 4


def test_a_notebook_loads_the_code_of_a_checker(tmp_path, monkeypatch):
    """Catches a cell that ends early, the wrong one of two cells, and an error without its line or its remedy."""
    monkeypatch.setattr(folded, "CHAPTERS", tmp_path)
    cells = ["HINTS = [1]", "HINTS += [2]\n\n\ndef check_it(answer):\n    return HINTS[answer]", "print(HINTS = 3)"]
    (tmp_path / "07_x.py").write_text("".join(f'# %% tags=["hide-input"]\n{cell}\n\n' for cell in cells))
    names: dict = {}
    for number in range(2):
        exec(folded.code("07_x", "HINTS", number), names)
    assert names["HINTS"] == [1, 2] and names["check_it"](1) == 2
    with pytest.raises(IndexError) as error:
        names["check_it"](5)
    assert "return HINTS[answer]" in str(error.traceback[-1].statement)
    with pytest.raises(LookupError, match=r"07_x\.py defines check_that in 0 cells: .* `make notebooks`"):
        folded.code("07_x", "check_that")


@pytest.mark.parametrize("value, words", [
    (1 / 3, "0.333333"), ((4, 0.5), "(4, 0.5)"), ((1,), "(1,)"), ("fsdp=2", "'fsdp=2'"),
    (np.ones((2, 5)), "an array (2, 5)"), (fails, "fails"), (np.float32(2), "2.0"),
])  # fmt: skip
def test_values_are_formatted_briefly(value, words):
    """Catches memory addresses, and numbers of 17 digits."""
    assert lesson.brief(value) == words
    assert lesson.brief(sharding.make_mesh("fsdp=2,tensor=3")) == "fsdp=2,tensor=3"


@pytest.mark.parametrize("prediction, message", [
    (None, "bytes: 1,344 B."),
    ("12", "bytes: 1,344 B. (A prediction must be a number; yours is '12'.)"),
    (1344, "bytes: 1,344 B, as you predicted."), (1345, "bytes: 1,344 B, as you predicted."),
    (672, "bytes: 1,344 B. You predicted 672, 0.5 times as much."),
])  # fmt: skip
def test_a_prediction_is_compared(prediction, message, capsys):
    """Catches a missing prediction that counts as right, and one far off that passes."""
    lesson.predicted("bytes", prediction, 1344, "B")
    assert capsys.readouterr().out == message + "\n"


@pytest.mark.parametrize("times, message", [
    (1, "equal"), (8, "8 times too big"), (0.25, "1/4 of it"), (-1, "-1 times the right one"),
    (1.5, "1.5 times the right one"),
])  # fmt: skip
def test_a_gradient_is_compared(times, message):
    """Catches a wrong factor in the message."""
    right = {"a": np.arange(1.0, 4), "b": np.ones(2)}
    assert lesson.ratio({"a": times * right["a"], "b": times * right["b"]}, right) == message
    assert lesson.ratio({"a": right["a"], "b": -right["b"]}, right) == "another direction"
