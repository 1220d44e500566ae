"""Claims about launcher.sh --restarts, and about what status shows of a run, over real ssh and tmux."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.launch.rehearsal import COUNT, column, launch, log, rows, wait_until

pytestmark = pytest.mark.launch

# On host01 the first process leaves another one behind, and is killed.
DIE_ONCE = f"""if [ $HOST_NAME = host01 ] && [ ! -e "$1" ]; then
  touch "$1"
  trap '' TERM HUP
  sleep 1000 &
  echo "$!" > "$1"
  kill -KILL $$
fi
{COUNT}"""


def status(fleet):
    return fleet.run("launcher.sh", "status")


def file_of(host, name):
    return host.axis / "launches/latest" / name


def test_a_command_that_fails_is_started_again(fleet, tmp_path):
    """Catches a run that ends with the first process that dies, and two processes of it at once on a host."""
    first = tmp_path / "first"
    options = ["--restarts", "3"]
    done = launch(fleet, "bash", "-c", DIE_ONCE, "_", str(first), options=options, RESTART_WAIT="6")
    one = fleet.hosts[1]
    assert done.returncode == 1
    assert column("state", done.stdout) == ["running", "restarting, 1 of 3", "running"]
    said = "supervisor: the command exited with status 137; restarting in 6 s, 1 of 3"
    assert rows(done.stdout)["host01"]["last line"] == said
    left = int(first.read_text())
    wait_until(lambda: left not in fleet.processes())  # what the first process left behind, before the second starts
    assert not file_of(one, "pid").exists()

    wait_until(file_of(one, "pid").exists)
    wait_until(lambda: "step 1\n" in log(one))
    now = status(fleet)
    assert now.returncode == 0
    assert column("state", now.stdout) == ["running", "running, restarted 1 of 3", "running"]
    lines = log(one).splitlines()
    assert lines[0].startswith("supervisor: SIGKILL ended the command, but the kernel's OOM killer did not send it")
    assert lines[1] == said
    assert lines[2] == "supervisor: restarted, 1 of 3"
    assert lines[3].startswith("1 of 3 at ")
    wait_until(lambda: "step 2" in fleet.ssh(one, "tmux capture-pane -p -t axis"))
    stop = fleet.run("launcher.sh", "stop")
    assert len(re.findall(r"host0\d  stopped after \d+ s: exit 0; its log ends: ", stop.stdout)) == 3
    assert all("restarting" not in log(host) for host in fleet.hosts if host is not one)


def test_a_command_that_goes_on_failing_is_given_up(fleet):
    """Catches a command that is started for ever, one start too many or too few, a closed pane that ends the tries."""
    launch(fleet, "bash", "-c", "echo try; exit 1", options=["--restarts", "2"], RESTART_WAIT="2")
    fleet.ssh(fleet.hosts[2], "tmux kill-server")
    wait_until(lambda: all(file_of(host, "exit").exists() for host in fleet.hosts))
    again = "try\nsupervisor: the command exited with status 1; restarting in 2 s, {0} of 2\n"
    again += "supervisor: restarted, {0} of 2\n"
    assert [log(host) for host in fleet.hosts] == [again.format(1) + again.format(2) + "try\n"] * 3
    assert column("state", status(fleet).stdout) == ["exit 1"] * 3


@pytest.mark.parametrize("codes", [(0, 2, 126), (127, 130, 143)])
def test_what_would_end_so_again_is_not_started_again(fleet, codes):
    """Catches a wrong flag that is tried three times, and a run that comes back after Ctrl-C or a stop."""
    words = ["bash", "-c", "shift $JAX_PROCESS_ID; exit $1", "_", *(str(code) for code in codes)]
    done = launch(fleet, *words, options=["--restarts", "3"], RESTART_WAIT="0")
    assert column("state", done.stdout) == [f"exit {code}" for code in codes]
    assert [log(host) for host in fleet.hosts] == [""] * 3


def test_what_was_stopped_is_not_started_again(fleet):
    """Catches a run that comes back: stopped while it waits, when it fails on SIGTERM, when it had to be killed."""
    ends = """case $HOST_NAME in
      host00) exit 1 ;;
      host01) trap 'exit 1' TERM ;;
      host02) trap '' TERM ;;
    esac
    while :; do sleep 0.1; done"""
    done = launch(fleet, "bash", "-c", ends, options=["--restarts", "9"], RESTART_WAIT="1000")
    assert column("state", done.stdout) == ["restarting, 1 of 9", "running", "running"]
    begin = time.monotonic()
    stop = fleet.run("launcher.sh", "stop", GRACE="2")
    assert time.monotonic() - begin < 20
    assert re.search(r"host00  stopped after [01] s: exit 1; ", stop.stdout)
    assert re.search(r"host01  stopped after [01] s: exit 1; ", stop.stdout)
    assert re.search(r"host02  killed after \d s, SIGTERM did not end it: exit 137; ", stop.stdout)
    assert all("restarting" not in log(host) for host in fleet.hosts[1:])


def test_status_shows_what_the_command_reports(fleet):
    """Catches a loss under another heading, what a process that died had reported, and a report that a shell runs."""
    report = r"""report() { printf "$@" > "$AXIS_PROGRESS.new"; mv "$AXIS_PROGRESS.new" "$AXIS_PROGRESS"; }
    case $HOST_NAME in
      host00) report '120\t320\t2.345\t98765\t%s\n' "$(($(date +%s) - 50)).25" ;;
      host01) report -- '-\t320\t-\t-\t%s\n' 'a[$(touch ~/ran)]' ;;
      host02) if [ ! -e ~/reported ]; then touch ~/reported; report '7\t320\t9.0\t1\t1\n'; exit 1; fi ;;
    esac
    while :; do sleep 0.1; done"""
    done = launch(fleet, "bash", "-c", report, options=["--restarts", "1"], RESTART_WAIT="3")
    names = ["step", "loss", "tokens/s", "step s ago"]
    seen = [[row[name] for name in names] for row in rows(done.stdout).values()]
    assert seen[0][:3] == ["120/320", "2.345", "98765"]
    assert 50 <= int(seen[0][3]) < 60
    assert seen[1] == ["-/320", "-", "-", "-"]
    assert seen[2][:3] == ["7/320", "9.0", "1"]
    assert not (fleet.hosts[1].home / "ran").exists()
    last = wait_until(lambda: (now := rows(status(fleet).stdout)["host02"])["state"].startswith("running, ") and now)
    assert [last[name] for name in names] == ["-"] * 4


def test_a_command_that_is_frozen_is_waited_for_without_work(fleet):
    """Catches a supervisor that takes a core for itself while its command does nothing, and one that gives it up."""
    launch(fleet, "bash", "-c", COUNT)
    one = fleet.hosts[1]
    pid = file_of(one, "pid").read_text().strip()
    supervisor = Path(f"/proc/{pid}/stat").read_text().split()[3]
    worked = lambda: (
        sum(map(int, Path(f"/proc/{supervisor}/stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")
    )
    fleet.ssh(one, f"kill -STOP -- -{pid}")
    before = worked()
    time.sleep(4)
    assert worked() - before < 1  # s of processor, in 4
    fleet.ssh(one, f"kill -CONT -- -{pid}")
    steps = log(one).count("step")
    wait_until(lambda: log(one).count("step") > steps)
    stop = fleet.run("launcher.sh", "stop")
    assert re.search(r"host01  stopped after \d+ s: exit 0", stop.stdout)


@pytest.mark.parametrize(
    "said, named",
    [("The tasks are unhealthy (stopped sending heartbeats):\n2", ", because process 2 sent no heartbeats"),
     ("Failed to reach the coordination service", ": the connection to host00 was cut, or its process is gone")],
    ids=["silent", "coordinator"],
)  # fmt: skip
def test_an_abort_names_whom_jax_has_missed(fleet, said, named):
    """Catches a log that blames host00, which is well, where JAX has told which process is silent."""
    launch(fleet, "bash", "-c", 'echo "$1"; kill -ABRT $$', "_", said)
    one = fleet.hosts[1]
    wait_until(file_of(one, "exit").exists)
    assert log(one).splitlines()[-1].startswith(f"supervisor: the command was aborted by JAX{named}; see the log of ")
