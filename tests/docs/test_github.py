"""The files that GitHub reads: workflows and issue forms. Nothing here is run by GitHub, so these tests read them."""

import re
import tomllib

import pytest
import yaml

from docs import address
from docs.notebooks import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))


def load(path):
    """Return a YAML file. YAML reads the key `on` of a workflow as true."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path) -> list[dict]:
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_exist(path):
    """Catches a workflow that fails, or silently checks nothing, because a target was renamed."""
    commands = "\n".join(step.get("run", "") for step in steps(path))
    called = re.findall(r"\bmake ([\w-]+)", commands)
    assert called and {*called} <= TARGETS, {*called} - TARGETS
    assert all(job.get("timeout-minutes") for job in load(path)["jobs"].values())
    [version] = [step["with"]["python-version"] for step in steps(path) if "python-version" in step.get("with", {})]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == f">={version}"


def test_pull_requests_are_tested_and_cannot_write():
    """Catches tests that run only after a merge, and a pull request of a stranger with a token that can push."""
    workflow = load(ROOT / ".github/workflows/test.yml")
    assert "pull_request" in workflow[True] and workflow["permissions"] == {"contents": "read"}
    assert [step["run"] for step in steps(ROOT / ".github/workflows/test.yml") if "run" in step] == [
        "make lint",
        "make test",
    ]


def test_the_site_is_pushed_to_its_branch_without_force():
    """Catches a workflow that pushes another branch than `make pages` writes, or replaces the published history."""
    path = ROOT / ".github/workflows/pages.yml"
    commands = [step["run"] for step in steps(path) if "run" in step]
    assert commands[-2:] == ["make pages", f"git push origin {address.BRANCH}"]
    assert "pull_request" not in load(path)[True]
    [checkout] = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["fetch-depth"] == 0, "`make pages` needs the published branch, to continue its history"
