"""The pages for operators: their flags and subcommands exist."""

import re
import subprocess

from config import Config, fields
from tests.docs.commands import ROOT

PAGE = re.sub(r"(?s)```.*?```", "", (ROOT / "docs/what_to_do_when.md").read_text())  # without what is printed
ELSEWHERE = {"topology", "search", "source", "out", "overwrite"}  # of python -m plan, python -m data.prepare
OF_MAIN = {"replay", "mesh", "init-from"}


def launcher_help() -> str:
    return subprocess.run([ROOT / "launcher.sh", "--help"], capture_output=True, text=True, check=True).stdout


def test_every_flag_on_the_page_exists():
    """Catches advice to use a flag that was renamed; in an incident nobody has time to look for its new name."""
    flags = {flag for code in re.findall(r"`([^`]+)`", PAGE) for flag in re.findall(r"--(\w[\w.-]*)", code)}
    settings, launcher = {*fields.flatten(Config().to_dict())}, launcher_help()
    for flag in flags - ELSEWHERE - OF_MAIN:
        assert flag in settings if "." in flag else f"--{flag}" in launcher, flag
    assert len(flags) > 10 and flags >= ELSEWHERE | OF_MAIN


def test_every_launcher_command_on_the_page_exists():
    """Catches a subcommand of launcher.sh that was renamed."""
    commands = set(re.findall(r"`(?:\w+=\d+ )?\./launcher\.sh (\w+) ", PAGE))
    assert commands >= {"status", "logs", "usage", "clean", "doctor", "exec", "fetch", "stop", "stacks"}
    for command in commands:
        assert re.search(rf"^  {command}\b", launcher_help(), re.MULTILINE), command


def test_the_page_has_eleven_events():
    """Catches an event that loses its section, or a section without one of its three parts."""
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))
    assert len(sections) == 13 and [*sections][-2:] == ["Replace a host", "Know early"]
    for event in [*sections][:11]:
        assert all(part in sections[event] for part in ("- **You see", "- **The trainer:**", "\n1. ")), event


def test_the_commands_from_a_plan_to_a_run_exist():
    """Catches a renamed flag or subcommand of launcher.sh or main.py in the blocks that no test runs, which are for
    chips that we don't have."""
    blocks = re.findall(r"(?s)```text\n(.*?)```", (ROOT / "docs/plan_to_run.md").read_text())
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines() if line.startswith("./")]
    settings, launcher = {*fields.flatten(Config().to_dict())}, launcher_help()
    for line in lines:
        script, *words = line.split()
        assert (ROOT / script).exists(), line
        if script == "./launcher.sh" and not words[0].startswith("-"):
            assert re.search(rf"^  {words[0]}\b", launcher, re.MULTILINE), line
        for flag in re.findall(r" --(\w[\w.-]*)", line):
            known = flag in settings if "." in flag else f"--{flag}" in launcher or flag in ELSEWHERE | OF_MAIN
            assert known or flag in ("tokenizer", "batch_tokens"), f"--{flag}: {line}"
    assert len(lines) >= 10
