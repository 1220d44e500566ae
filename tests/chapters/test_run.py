"""`python -m chapters` runs each chapter, prints how long it took, and fails if one does."""

import importlib
import re

import pytest

from utils import UserError

runner = importlib.import_module("chapters.__main__")
BAD = "print('last words')\nassert 1 == 2\n"
SPIN = "import time\nwhile time.process_time() < 1:\n    pass\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three chapters: one that prints, one that fails, one that takes a second of CPU time."""
    for name, text in {
        "00_good": "print('here')\n",
        "01_bad": "print('last words')\nassert 1 == 2\n",
        "02_slow": SPIN,
    }.items():
        (tmp_path / "chapters").mkdir(exist_ok=True)
        (tmp_path / "chapters" / f"{name}.py").write_text(text)
    monkeypatch.setattr(runner, "FOLDER", tmp_path / "chapters")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "words, status, shown",
    [(["00"], 0, "00_good .* ran"), (["01"], 1, "01_bad .* failed, exit status 1"), (["02"], 0, "02_slow .* ran"),
     (["02", "--longest_s", "0.5"], 1, "02_slow .* took more than 0.5 s"), ([], 1, "00_good .* ran")],
)  # fmt: skip
def test_failed_and_slow_chapters_are_reported(words, status, shown, capfd):
    """Catches a runner that ignores a failure, and a guide that is published with a broken chapter."""
    assert runner.main(words) == status
    out, err = capfd.readouterr()
    assert any(re.match(shown, line) for line in out.splitlines()), out
    assert out.startswith("running ") and " takes about a minute on 2 cores\n" in out
    assert ("last words" in err and "AssertionError" in err) == (status == 1 and words[:1] in ([], ["01"]))


@pytest.mark.usefixtures("folder")
def test_the_name_of_a_chapter_is_printed_before_it_runs(monkeypatch, capsys):
    """Catches minutes of silence in which nobody can see which chapter runs."""
    before = []
    monkeypatch.setattr(runner, "run", lambda *_: before.append(capsys.readouterr().out) or ("ran", 1.0, 2.0, ""))
    assert runner.main(["00", "01"]) == 0
    assert [out.splitlines()[-1].split() for out in before] == [["00_good"], ["1.0", "2.0", "ran", "01_bad"][-1:]]


@pytest.mark.usefixtures("folder")
def test_a_number_without_a_chapter_is_refused():
    """Catches a typo that runs nothing and succeeds."""
    with pytest.raises(UserError, match="no file in chapters/ starts with '07'"):
        runner.select_chapters(("07",))


def test_a_slow_machine_has_a_longer_limit(monkeypatch):
    """Catches a guide that fails because the machine compiles three times slower than the one of its limit."""
    spent = iter([0.5, 6.0])
    monkeypatch.setattr(runner, "cpu_seconds", lambda before: next(spent))
    assert [runner.limit_s(0), runner.limit_s(0), runner.limit_s(7.5)] == [90.0, 228.0, 7.5]
