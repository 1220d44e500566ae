"""The files that GitHub reads: workflows and issue forms. Nothing here is run by GitHub, so these tests read them."""

import csv
import json
import re
import tomllib

import pytest
import yaml

from bench import published
from docs import address, readme
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


# Issue forms ----------------------------------------------------------------------------------------------------------

FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def fields(path) -> dict[str, dict]:
    return {field["id"]: field for field in load(path)["body"] if field["type"] != "markdown"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_github_accepts_an_issue_form(path):
    """Catches a form that GitHub hides without a message: it wants these keys, and ids and labels that occur once."""
    form, inputs = load(path), fields(path)
    assert {"name", "description", "body"} <= form.keys()
    assert {field["type"] for field in form["body"]} <= {"markdown", "input", "textarea", "dropdown", "checkboxes"}
    labels = [field["attributes"]["label"] for field in inputs.values()]
    assert len({*labels}) == len(labels) == len([one for one in form["body"] if one["type"] != "markdown"])
    assert all(re.fullmatch(r"[\w-]+", name) for name in inputs)
    for field in (one for one in form["body"] if one["type"] == "dropdown"):
        options = field["attributes"]["options"]
        assert all(isinstance(option, str) and option != "None" for option in options) and len({*options}) == len(
            options
        )


def test_the_form_of_a_measured_step_is_a_row_of_the_table():
    """Catches a column that the form does not ask for, so that its steps cannot be planned."""
    rows, inputs = published.read_rows(), fields(ROOT / ".github/ISSUE_TEMPLATE/measured_step.yml")
    assert [*inputs] == [*rows[0]]
    options = {name: field["attributes"]["options"] for name, field in inputs.items() if field["type"] == "dropdown"}
    assert options["kind"] == [*published.KINDS]
    assert {*options["unit"]} == {row["unit"] for row in rows}
    assert {*options["flops"]} == {*published.COUNTED}
    required = {name for name, field in inputs.items() if field.get("validations", {}).get("required")}
    assert {*inputs} - required == {"settings", "flops", "lacks"}


def test_a_filled_form_can_be_planned(tmp_path):
    """Catches examples in the form that the planner does not understand."""
    inputs = fields(ROOT / ".github/ISSUE_TEMPLATE/measured_step.yml")
    row = {
        name: field["attributes"].get("placeholder", field["attributes"].get("value", ""))
        for name, field in inputs.items()
    }
    row |= {"kind": "dense, one slice", "unit": "s"}
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.DictWriter(out, [*row]).writeheader()
        csv.DictWriter(out, [*row]).writerow(row)
    [planned] = map(published.plan_row, published.read_file(str(file)))
    assert planned.one, planned.reason
    assert planned.measured_s == 7.52


# Files at the root that GitHub shows ----------------------------------------------------------------------------------

SHOWN = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


@pytest.mark.parametrize("name", SHOWN)
def test_a_page_of_the_repository_names_what_exists(name):
    """Catches a page for contributors with a command or a file that is gone."""
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert {*re.findall(r"`make ([\w-]+)", text)} <= TARGETS
    for module in re.findall(r"`python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for file in re.findall(r"`((?:[.\w]+/)+[\w.]+|[\w]+\.(?:py|md|toml))`", text):
        assert (ROOT / file).exists(), file
    assert (ROOT / name).read_text(encoding="utf-8").count("\n") <= 60


def test_the_citation_has_the_version_of_the_project():
    """Catches a citation of another version, and one with an address while the project has none."""
    citation = yaml.safe_load(readme.CITATION.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_a_container_for_a_browser_makes_the_notebooks():
    """Catches a container whose first command fails."""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert re.fullmatch(r"make ([\w-]+)", container["postCreateCommand"])[1] in TARGETS
