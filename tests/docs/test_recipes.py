"""Tests of docs/recipes.md: its steps work on a copy of the checkout, and the named tests fail without each step."""

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs import commands

ROOT = commands.ROOT
PAGE = "docs/recipes.md"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "tokens", "notebooks", "_build", "__pycache__")
# The relevant cases of tests with many cases.
CASES = {
    "test_attention_equals_a_loop_over_queries": "[gqa-True]",
    "test_every_parameter_receives_gradient": "[gqa]",
    "test_cached_logits_equal_the_full_forward": "[gqa, softmax router, no bias, none shared]",
    "test_the_plan_matches_the_compiled_step": "[ring over context, grouped queries]",
    "test_every_schedule_computes_the_same_gradients": "[prefix stage=2 schedule=sequential microbatches=2]",
    "test_what_our_model_cannot_do_is_refused_by_name": "[ministral-sliding_window-4096]",
    "test_converted_weights_say_what_the_library_says": "[ministral]",
    "test_there_and_back_is_bit_equal": "[ministral]",
}
# Tests that compile a model.
SLOW = {"test_cached_logits_equal_the_full_forward", "test_the_plan_matches_the_compiled_step",
        "test_every_parameter_receives_gradient", "test_the_loss_and_its_metrics_by_hand",
        "test_every_schedule_computes_the_same_gradients"}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A block of a recipe, and the tests that fail without it."""

    number: int  # within its recipe, from 1
    kind: str  # "change", or "block" of commands
    lines: tuple[str, ...]
    tests: tuple[str, ...]


def named_tests(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(tests/\S+::\w+)`", text))


@functools.cache
def recipes() -> dict[str, list[Step]]:
    """Return the steps of each section of the page, in order."""
    found = {}
    for title, text in re.findall(r"(?ms)^## (.*?)$(.*?)(?=^## |\Z)", (ROOT / PAGE).read_text(encoding="utf-8")):
        steps = found[title] = []
        for _, kind, lines in commands.page_parts(text):
            if kind in ("change", "block"):
                steps.append(Step(len(steps) + 1, kind, tuple(lines), ()))
            elif lines[0].startswith("Without this step, "):
                steps[-1] = dataclasses.replace(steps[-1], tests=named_tests(" ".join(lines)))
    return found


def change(root: Path, lines) -> None:
    """Apply a block: a line `@@ FILE @@`, then lines to add (+), to remove (-), and context, which must occur once.

    The search is for the joined text, so that the last line may be only the beginning of a line.
    """
    for name, text in re.findall(r"(?ms)^@@ (\S+) @@\n(.*?)(?=^@@ |\Z)", "\n".join(lines) + "\n"):
        pairs = [(line[:1], line[1:]) for line in text.rstrip("\n").split("\n")]
        old, new = ("\n".join(line for sign, line in pairs if sign != other) for other in "+-")
        before = (root / name).read_text(encoding="utf-8")
        assert before.count(old) == 1, f"{PAGE}: {name} has {before.count(old)} times\n{old}"
        (root / name).write_text(before.replace(old, new), encoding="utf-8")


def copy_with(steps: list[Step], root: Path) -> Path:
    """Copy the checkout and apply these steps."""
    shutil.copytree(ROOT, root, ignore=NOT_COPIED)
    for step in steps:
        if step.kind == "change":
            change(root, step.lines)
        else:
            for words in step.lines:
                subprocess.run([sys.executable, *words.split()[1:]], cwd=root, check=True, stdout=subprocess.DEVNULL)
    if "ministral" in (root / "tests/weights/test_convert.py").read_text(encoding="utf-8"):
        make_witness(root / "tests/weights/fixtures")
    return root


def make_witness(fixtures: Path) -> None:
    """Write the reference that `make_reference.py` would, without its library. Without a sliding window Ministral
    equals Llama, so Llama's reference with Ministral's settings is valid."""
    shutil.copytree(fixtures / "llama", fixtures / "ministral")
    path = fixtures / "ministral" / "config.json"
    hf = {name: x for name, x in json.loads(path.read_text()).items()
          if name not in ("attention_bias", "mlp_bias", "pretraining_tp")}  # fmt: skip
    hf |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": None}
    path.write_text(json.dumps(hf))


def verdicts(root: Path, tests) -> dict[str, bool]:
    """Run tests in a copy and return whether each passes. A test that cannot be collected fails."""
    ids = [test + CASES.get(test.split("::")[1], "") for test in tests]
    words = ["-q", "-n", "0", "-rA", "--tb=short", "--durations=0", *ids]
    env = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=root, env=env, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-2000:])
    passed = {}
    for test in tests:
        results = re.findall(rf"(?m)^(PASSED|FAILED|ERROR) {re.escape(test)}\b", done.stdout)
        passed[test] = bool(results) and set(results) == {"PASSED"}
    return passed


def marks(tests):
    return pytest.mark.slow if SLOW & {test.split("::")[1] for test in tests} else ()


@pytest.mark.slow
@pytest.mark.parametrize("title", recipes())
def test_a_recipe_works(title, tmp_path):
    """Catches a line that has moved or changed, and a file that a recipe forgets to change."""
    steps, text = recipes()[title], (ROOT / PAGE).read_text(encoding="utf-8")
    tests = list(dict.fromkeys(named_tests(text.split(f"## {title}\n")[1].split("\n## ")[0])))  # also those of no step
    assert {test for step in steps for test in step.tests} <= {*tests}
    found = verdicts(copy_with(steps, tmp_path / "copy"), tests)
    assert all(found.values()), found


LEFT_OUT = [pytest.param(title, step, marks=marks(step.tests), id=f"{title}, step {step.number}")
            for title, steps in recipes().items() for step in steps if step.tests]  # fmt: skip


@pytest.mark.parametrize("title, step", LEFT_OUT)
def test_the_named_tests_fail_without_a_step(title, step, tmp_path):
    """Catches a test that no longer detects the missing step, and a step that is not needed."""
    steps = [one for one in recipes()[title] if one is not step]
    found = verdicts(copy_with(steps, tmp_path / "copy"), step.tests)
    assert not any(found.values()), found


def test_every_recipe_names_tests():
    """Catches a page whose steps or tests are no longer found."""
    assert list(recipes()) == ["Add a parameter", "Add a loss", "Add a setting", "Add a schedule", "Add a model family"]
    assert all(sum(bool(step.tests) for step in steps) >= 2 for steps in recipes().values())
    assert len(LEFT_OUT) >= 13


@pytest.mark.parametrize("title", recipes())
def test_every_change_applies_and_passes_lint(title, tmp_path):
    """Catches a context line that is no longer in the file, and a line that `make lint` would refuse."""
    copy = copy_with([step for step in recipes()[title] if step.kind == "change"], tmp_path / "copy")
    changed = {path for step in recipes()[title] for path in re.findall(r"(?m)^@@ (\S+) @@$", "\n".join(step.lines))}
    narrow = ("format", "--diff", "--quiet", "--line-length", "110")
    for words, paths in (
        (("check", "--quiet"), changed),
        (narrow[:3], changed - {"model.py"}),
        (narrow, changed & {"model.py"}),
    ):
        if not paths:
            continue
        done = subprocess.run(
            [Path(sys.prefix) / "bin" / "ruff", *words, *paths], cwd=copy, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
