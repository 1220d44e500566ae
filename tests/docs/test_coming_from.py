"""The page for users of other systems names only what exists here."""

import re
from pathlib import Path

import pytest

import config
import sharding
from tests.chapters.test_form import exists
from tests.test_house import ROOT

PAGE = ROOT / "docs/coming_from.md"
OTHERS = {"jax.shard_map", "bytes", "sp:", "metrics.jsonl", "accuracy", "keep", "0:0,1000:1,5000:0.1"}


def rows(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(?m)^\| (.*?) \| (.*) \|$", text)


def file_of(module: str) -> Path:
    """Return the file that `python -m MODULE` runs."""
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def wrong_names(here: str) -> list[str]:
    """Return the names between backquotes that are no setting, flag of a command of this row, file or symbol."""
    settings = {f"--{name}" for name in config.affecting(*config.Affects)}
    commands = re.findall(r"`python -m ([\w.]+)`", here)
    files = [*map(file_of, commands), *(ROOT / "config").glob("*.py")]
    code = "".join(file.read_text(encoding="utf-8") for file in files)
    is_flag = lambda name: re.search(rf"(?m)^    {name}: |\"--{name}\"", code)
    known = {*OTHERS, *sharding.AXES, *config.PRESETS, *(f"python -m {module}" for module in commands)}
    return [
        name for name in re.findall(r"`([^`]+)`", here)
        if name not in known | settings
        and not (name.startswith("--") and is_flag(name[2:].partition(" ")[0]))
        and not ((ROOT / name).exists() or exists(name))
    ]  # fmt: skip


def test_every_name_on_the_page_exists():
    """Catches a renamed flag, setting, command, file or function in the column of what is here."""
    found = rows(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 50
    assert not [(there, names) for there, here in found if (names := wrong_names(here))]


@pytest.mark.parametrize("name", ["--run.epochs", "--serch", "data/task.py", "data.tasks.Task.sources", "gptj_7b"])
def test_a_wrong_name_is_found(name):
    """Catches a check that accepts a setting, a flag, a file, a field or a preset that doesn't exist."""
    assert wrong_names(f"`python -m plan`, `--search`, `--mesh fsdp=4`, `data.tasks.Task.source`, `{name}`") == [name]
