"""Tests of `python -m plan` without JAX: the same answers, and JAX when it is needed."""

import json
import os
import subprocess
import sys

import pytest

from docs.notebooks import ROOT
from tests.plan.test_in_page import different

JAX = "ml_dtypes"  # a package that JAX itself imports, and that has no stand-in
ONE = "laptop --topology v4:2x2x2 --mesh fsdp=4,tensor=2"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def plan(cache):
    """Return a function that runs the command, and returns what it printed and the packages that it imported."""

    def run(words: str, **more: str) -> tuple[str, set[str]]:
        command = [sys.executable, "-X", "importtime", "-m", "plan", *words.split()]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache} | more
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
        assert done.returncode == 0, "\n".join(lines)
        return done.stdout, {line.split()[-1].partition(".")[0] for line in done.stderr.splitlines()}

    return run


@pytest.mark.parametrize("words", [
    f"{ONE} --explain --tokens 1e9 --price 2", f"{ONE} --json -", f"{ONE} --parameters",
    "laptop --inference --topology v4:2x2x1 --mesh tensor=4",
])  # fmt: skip
def test_a_warm_plan_does_not_import_jax(plan, words):
    """Catches a second of imports before an answer, and a stand-in with which the answer is another one."""
    with_jax, imported = plan(words, PLAN_WITH_JAX="1")  # the first one also traces the layers, which are then cached
    assert JAX in imported
    without, imported = plan(words)
    assert JAX not in imported
    if words.endswith("-"):
        assert not different(json.loads(with_jax), json.loads(without))
    else:
        assert without == with_jax


def test_a_layer_of_a_new_kind_is_traced_with_jax(plan, tmp_path):
    """Catches an error, or half of the output twice, if what the planner needs is not in the cache."""
    cold, imported = plan(ONE, XDG_CACHE_HOME=str(tmp_path))
    assert JAX in imported
    warm, imported = plan(ONE, XDG_CACHE_HOME=str(tmp_path))
    assert JAX not in imported
    assert warm == cold
