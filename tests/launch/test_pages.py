"""The commands of docs/ that need hosts: run as they stand there, on hosts of this machine."""

import re
import subprocess

import pytest

from tests.docs import commands
from tests.launch import rehearsal
from tests.launch.rehearsal import log, wait_until

pytestmark = pytest.mark.launch
PAGES = ("docs/hosts.md",)


def wiped(text):
    """Without what is different each time: numbers, names of commits and launches, and the width of columns."""
    return re.sub(r" +", " ", re.sub(r"\b(?=\w*\d)[\w.:-]+", "0", re.sub(r"(?m) +$", "", text)))


@pytest.fixture(scope="module")
def fleet():
    with rehearsal.rehearse(4, whole=True) as four:
        (four.checkout / "hosts.txt").symlink_to(four.folder / "hosts.txt")
        yield four
        subprocess.run(["tmux", "-L", "axis-debug", "kill-server"], env=environment(four), capture_output=True)


def environment(fleet):
    """With CPU devices, compiled fast: what the hosts are started with is theirs too."""
    return fleet.environment | {"TMUX_TMPDIR": str(fleet.folder), "TMUX": ""}


def ended(host):
    return (host.axis / "launches/latest/exit").exists()


def test_every_command_for_hosts_does_what_is_shown(fleet):
    """Catches a walk-through that stops at a flag that has another name, and a table that has other columns."""
    found = [one for page in PAGES for one in commands.to_run(page, hosts=True)]
    assert len(found) >= 12
    for one in found:
        done = subprocess.run(["bash", "-c", one.text], cwd=fleet.checkout, env=environment(fleet), text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=120)  # fmt: skip
        assert done.returncode == one.status, f"{one}\n{done.stdout}{done.stderr}"
        for block in one.shown:
            shown = [line if line.strip() == "..." else wiped(line) for line in block]
            assert commands.first_difference(shown, wiped(done.stdout)) is None, f"{one}\n{done.stdout}"
        if "-- python main.py" in one.text:  # what comes next is asked of a run that has taken steps
            wait_until(lambda: "step    10/" in log(fleet.hosts[0]) or ended(fleet.hosts[0]), 300)
        elif " -- " in one.text and " exec " not in one.text:
            wait_until(lambda: all(ended(host) for host in fleet.hosts), 120)
            exits = [(host.axis / "launches/latest/exit").read_text().strip() for host in fleet.hosts]
            assert exits == ["0"] * 4, f"{one}\n{log(fleet.hosts[0])}"
        if "selfcheck" in one.text:
            assert "all is well on 4 hosts; a sum over 8 devices took" in log(fleet.hosts[0])
            assert "host03 " in log(fleet.hosts[0])


def test_every_page_with_such_commands_is_run():
    """Catches a page whose commands for hosts nobody runs."""
    assert {page for page in commands.pages() if commands.to_run(page, hosts=True)} == set(PAGES)
