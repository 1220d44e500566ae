"""Claims about what CI runs: every test in exactly one part, and each repeat and each large extra once a week."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import extras, rotation

ROOT = Path(__file__).resolve().parent.parent
COLLECT = """
import json, sys, pytest
from tests import rotation

class Collected:
    def pytest_collection_finish(self, session):
        self.items = session.items

collected = Collected()
pytest.main(["-n", "0", "-q", "--collect-only", "-m", ""], plugins=[collected])
days = {day: {item.nodeid for item in rotation.tests_of_day(collected.items, day)} for day in rotation.NAMES}
tests = [{"id": item.nodeid, "marks": sorted({mark.name for mark in item.iter_markers()}),
          "days": [day for day in days if item.nodeid in days[day]]} for item in collected.items]
with open(sys.argv[1], "w") as file:
    json.dump(tests, file)
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> list[dict]:
    """Every test that can be collected here: its id, the names of its marks, and the days on which it rotates."""
    out = tmp_path_factory.mktemp("rotation") / "tests.json"
    subprocess.run([sys.executable, "-c", COLLECT, out], cwd=ROOT, check=True, capture_output=True)
    return json.loads(out.read_text())


def parts() -> dict[str, str]:
    """The targets that .ci/run calls, and which marks they select."""
    called = re.findall(r"(?m)^ *make ([\w-]+)$", text := (ROOT / ".ci/run").read_text())
    called += re.findall(r"([\w-]+):\d+", re.search(r"PARTS=\((.*)\)", text)[1])
    recipe = r"(?m)^{}:.*\n(?:\t.*\n)*?\t\S+ -m pytest -m (\"[^\"]+\"|\w+)"
    found = {name: re.search(recipe.format(name), (ROOT / "Makefile").read_text()) for name in called}
    return {name: match[1].strip('"') for name, match in found.items() if match}


def test_every_test_runs_in_one_part_of_ci(collected):
    """Catches a test that no part selects, and one that two parts run."""
    assert {*parts()} == {"test", "test-long", "test-more", "test-tpu", "rehearse", "test-site", "test-rotation"}
    for test in collected:
        marks = dict.fromkeys("tpu site launch slow extra repeat rotation long".split(), False)
        marks |= dict.fromkeys(test["marks"], True)
        assert sum(bool(eval(expression, {}, marks)) for expression in parts().values()) == 1, test


def test_the_seven_days_hold_every_repeat_once(collected):
    """Catches a repeat that no day runs or that two days run, and days of very different size."""
    assert {test["id"] for test in collected if test["days"]} >= {
        test["id"] for test in collected if "repeat" in test["marks"]
    }
    assert all(len(test["days"]) == ("rotation" in test["marks"]) for test in collected)
    for long in rotation.DAY_OF_LONG:
        assert sum(long in test["id"] for test in collected) == 1, long
    repeats = [day for test in collected if "repeat" in test["marks"] for day in test["days"]]
    sizes = [repeats.count(day) for day in rotation.NAMES]
    assert sum(sizes) > 100 and min(sizes) > sum(sizes) / 7 / 2 and max(sizes) < sum(sizes) / 7 * 2, sizes


def test_every_extra_of_a_test_has_a_day():
    """Catches a test whose extra is never installed in CI, a row that no test needs, and two large sets on one day."""
    marked = re.compile(r"(?:mark\.extra|extras\.require)\(((?:\"\w+\"(?:, )?)+)\)")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    found = {tuple(sorted(re.findall(r"\w+", names))) for path in tests for names in marked.findall(path.read_text())}
    assert found - {(name,) for name in extras.LIGHT} == {*rotation.DAY_OF_EXTRAS}
    assert len({*rotation.DAY_OF_EXTRAS.values()}) == len(rotation.DAY_OF_EXTRAS)
    listed = subprocess.run(
        ["make", "-n", *(f"extra-{name}" for name in extras.PACKAGES)], cwd=ROOT, capture_output=True
    )
    assert listed.returncode == 0, listed.stderr


def test_what_is_not_installed_is_skipped_with_what_installs_it(monkeypatch):
    """Catches a skip that does not say how to run the test, and one of a module whose packages are installed."""
    monkeypatch.setattr(extras, "installed", lambda name: name == "parity")
    with pytest.raises(pytest.skip.Exception, match=r"^needs make extra-evaluate extra-torch$"):
        extras.require("evaluate", "parity", "torch")
    assert extras.require("parity").args == ("parity",)


def test_a_day_names_the_targets_that_install_its_extras(capsys):
    """Catches a day that installs nothing, or everything, and a DAY that is none."""
    assert rotation.main(["4"]) == 0 and capsys.readouterr().out == "extra-evaluate extra-parity extra-torch\n"
    assert rotation.main(["7"]) == 0 and capsys.readouterr().out == "\n"
    assert rotation.main(["8"]) == 2
    assert capsys.readouterr().err == "error: DAY=8: use a weekday from 1, Monday, to 7, Sunday\n"


def parts_of_ci(tmp_path, test_s: int, day: int, every="") -> list[str]:
    """Run .ci/run with parts that take no time, but count as if `make test` took `test_s` seconds."""
    text = (ROOT / ".ci/run").read_text()
    begins, spends = 'echo "RAN ${part%:*}"', f"SECONDS=$((SECONDS + ${{part#*:}} * {test_s} / 5))"
    faked = {
        "  make test\n": f"  SECONDS=$((SECONDS + {test_s}))\n",
        '    make "${part%:*}" DAY="$DAY"\n': f"    {begins}; {spends}\n",
        "\nmake lint\n": "\n",
        ") install_host_tools ;;": ") : ;;",
    }
    for real, fake in faked.items():
        assert text.count(real) == 1, real
        text = text.replace(real, fake)
    (tmp_path / ".ci").mkdir(exist_ok=True)
    (tmp_path / ".ci/run").write_text(text)
    env = os.environ | {"DAY": str(day), "ALL": every, "ARGS": ""}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    left_out = re.findall(r"== left out: make ([\w-]+)", done.stdout)
    ran = re.findall(r"RAN ([\w-]+)", done.stdout)
    assert sorted(ran + left_out) == sorted({*parts()} - {"test"}), done.stdout
    return ran


def test_only_a_slow_machine_leaves_parts_out(tmp_path):
    """Catches a usual machine, or ALL=1, that leaves out the last part, and a slow one that runs too long."""
    usual = ["test-long", "test-more", "test-tpu", "rehearse", "test-site", "test-rotation"]
    assert parts_of_ci(tmp_path, 300, 3) == parts_of_ci(tmp_path, 340, 3) == usual
    assert parts_of_ci(tmp_path, 900, 3, every="1") == usual
    assert parts_of_ci(tmp_path, 650, 6) == ["test-long", "test-tpu"]
    assert parts_of_ci(tmp_path, 650, 2) == ["test-tpu", "rehearse", "test-rotation"]
