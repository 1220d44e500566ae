"""Claims about predicted seconds beside simulated ones: what is drawn, how far apart they are, and the output."""

import itertools
import json

import pytest

from bench import plan as bench_plan
from config import preset
from plan import planner


def row(predicted_s, simulated_s, **more):
    return {"what": "a mesh", "topology": "v4:2x2x4", "predicted_s": predicted_s, "simulated_s": simulated_s,
            "peak_bytes": 2**31, "planned_peak_bytes": 3 * 2**30} | more  # fmt: skip


def test_what_is_drawn_fits_and_is_the_same_again():
    """Catches draws that a compiler refuses, that are of one chip alone, or that nobody can draw a second time."""
    draw = lambda seed: [(what, str(one.topology)) for what, one in itertools.islice(bench_plan.random_plans(seed), 12)]
    assert draw(3) == draw(3) != draw(4)
    assert len({topology.split(":")[0] for _, topology in draw(3)}) >= 3
    assert all(one.fits and one.simulated for _, one in itertools.islice(bench_plan.random_plans(3), 12))


def test_the_summary_says_how_far_apart_they_are():
    """Catches a share of the wrong whole, a worst that is the median, and ranks that agree whatever they are."""
    rows = [row(1.0, 1.25), row(2.0, 2.1), row(3.3, 3.0)]
    found = bench_plan.summary(rows)
    assert (found["steps"], found["within_10_percent"]) == (3, 2)
    assert found["worst"] == pytest.approx(0.2) and found["median"] == pytest.approx(0.1)
    assert found["kendall_tau"] == 1 and found["first_over_best"] == 1
    assert bench_plan.summary([row(1.0, 1.5), row(2.0, 1.0)])["kendall_tau"] == -1
    assert bench_plan.summary([row(1.0, 1.5), row(2.0, 1.0)])["first_over_best"] == 1.5


def test_the_command_prints_a_row_each_and_what_follows(monkeypatch, capsys):
    """Catches a step that did not fit and counts, JSON that a program cannot read, and a search that is none."""
    steps = iter([row(1.0, 1.25), None, row(2.0, 2.1)])
    monkeypatch.setattr(bench_plan, "measure", lambda what, one: next(steps))
    assert bench_plan.main(["--drawn", "3"]) == 0
    *_, first, second, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["v4:2x2x4", "a", "mesh", "1.000", "1.250", "-20%", "2.0", "+50%"]
    assert second.split()[3:6] == ["2.000", "2.100", "-5%"]
    assert last.startswith("2 steps: 1 within 10%, ") and "the first" not in last
    steps = iter([row(1.0, 1.5), row(2.0, 1.0)])
    one = planner.plan(preset("tiny", mesh="fsdp=4"), "v4:2x2x1")
    monkeypatch.setattr(planner, "search", lambda *args: ([one, one, one], [], {}))
    assert bench_plan.main("tiny --topology v4:2x2x1 --first 2 --json".split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("simulated_s") for line in lines] == [1.5, 1.0, None] and lines[-1]["first_over_best"] == 1.5


def test_a_search_of_no_slice_is_refused(capsys):
    """Catches a traceback where the slice is missing, or is none of TPUs."""
    for words in ("moe1b --first 3", "moe1b --topology h100:32 --first 3"):
        assert bench_plan.main(words.split()) == 2
        assert capsys.readouterr().err == "error: --first needs a TPU slice; pass one, like --topology v4:4x4x2\n"
