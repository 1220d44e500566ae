"""Claims about what runs on a host, without ssh: the agent and its supervisor in a folder of this machine."""

import ast
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch import agent, hosts, launcher, supervisor
from tests.launch.rehearsal import ROOT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="hosts are Linux machines")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk, which root may")
REPORT = 'printf "60\\t$1\\n" > "$AXIS_ALIVE"; '


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A folder with a commit, in which the test works as the agent does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "commits/c0").mkdir(parents=True)
    return tmp_path


def supervised(script, *words, **told):
    """A launch of a shell script, which may begin at once."""
    told = {"name": "2", "commit": "c0", "wait_s": 0, "starter": os.getpid()} | told
    launch = supervisor.Launch(command=["bash", "-c", script, "_", *words], **told)
    here = launch.folder
    here.mkdir(parents=True)
    launch.environment = {"AXIS_ALIVE": str(here.resolve() / "alive")}
    for name in ("exit", "pid"):
        (here / f"{name}.partial").write_text(" " * 99)
    (here / "launch.json").write_text(json.dumps(dataclasses.asdict(launch)))
    agent.link(launch.name, supervisor.LATEST)
    (here / "go").touch()
    return here


def run(here):
    """Run the supervisor in a process, as tmux does; returns the exit status that it wrote."""
    code = f"from launch.supervisor import Supervisor; Supervisor({here.name!r}).run()"
    ours = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=ours, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return (here / "exit").read_text().strip()


def notes(here):
    return [line for line in (here / "log").read_text().splitlines() if line.startswith("supervisor: ")]


def test_an_older_python_reads_the_agent():
    """Catches syntax that a host's own Python does not know: it would answer nothing but a traceback."""
    for path in sorted((ROOT / "launch").glob("*.py")):
        ast.parse(path.read_text(), feature_version=(3, 9))


def test_a_preempted_run_starts_again_and_the_restart_is_not_counted(host):
    """Catches a fleet that stands still after a host was taken away: the run saved, and exited with status 0."""
    script = f"[ -e ../../done ] && exit 0; [ -e ../../twice ] && touch ../../done; touch ../../twice; {REPORT}"
    here = supervised(script, "preempted", restarts=1)
    assert run(here) == "0"
    why = "0 of 1 used; not counted: a host was preempted"
    again = f"supervisor: the command exited with status 0; restarting in 0 s, {why}"
    assert notes(here) == [again, f"supervisor: restarted, {why}"] * 2
    assert agent.state() == "exit 0"


def test_a_preempted_run_without_restarts_is_in_trouble(host):
    """Catches a run that stopped early, shown as one that is complete."""
    here = supervised(REPORT, "preempted")
    assert run(here) == "0"
    assert agent.state() == "preempted, exit 0"


def test_a_stopped_run_does_not_start_again(host):
    """Catches a run that comes back after `stop`, because its last word was taken for a preemption."""
    here = supervised(REPORT + "touch ../../launches/2/stop", "preempted", restarts=3)
    assert run(here) == "0"
    assert notes(here) == []
    assert agent.state() == "stopped, exit 0"


def test_a_launch_that_nobody_tells_to_begin_runs_nothing(host):
    """Catches a host that runs alone, because the launcher was killed before all hosts were ready."""
    with subprocess.Popen(["sleep", "1"]) as starter:
        here = supervised("echo runs", starter=starter.pid)
        (here / "go").unlink()
        done = threading.Thread(target=lambda: starter.wait())
        done.start()
        assert run(here) == "not started"
        done.join()
    assert (here / "log").read_text() == ""
    assert agent.state() == "not started"


@pytest.mark.parametrize(
    "rise, says", [(0, "the kernel's OOM killer did not send it"), (2, "this host is out of memory")]
)
def test_a_killed_command_is_explained(host, monkeypatch, rise, says):
    """Catches `ended with status 137`, which does not tell a host without memory from a colleague's kill."""
    counts = iter([5, 5 + rise])
    monkeypatch.setattr(supervisor, "out_of_memory_kills", lambda: next(counts))
    here = supervised("kill -KILL $$")
    watch = supervisor.Supervisor("2")
    assert watch.run_once() == 137
    os.close(watch.lock)
    (note,) = notes(here)
    assert says in note


def test_kills_for_want_of_memory_are_counted_by_the_kernel(monkeypatch):
    """Catches a counter of another name: a kill for want of memory would look like a colleague's."""
    assert "oom_kill" in dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    monkeypatch.setattr(
        supervisor, "read", lambda path: "oom_kill_other 5\noom_kill 3\nnr_dirty 7" * (path.name == "vmstat")
    )
    assert supervisor.out_of_memory_kills() == 3


@pytest.fixture
def small_disk(host):
    os.mkdir("launches")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", "launches"], check=True)
    yield
    subprocess.run(["umount", "--lazy", "launches"], check=True)


@needs_root
def test_a_log_that_fills_the_disk_leaves_room_for_the_exit_status(small_disk):
    """Catches `vanished` where a disk is full: nobody would know how the command ended."""
    here = supervised("yes; exit 3")  # `yes` ends when the disk is full
    assert run(here) == "3"
    assert agent.state() == "exit 3"


@needs_root
def test_a_run_is_stopped_where_the_disk_is_full(small_disk):
    """Catches a run that cannot be stopped, because the disk has no room for who asks, or for its process id."""
    here = supervised("sleep 100")
    with open("launches/fill", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        file.writelines(b"x" * 4096 for _ in range(100))
    thread = threading.Thread(target=run, args=(here,))
    thread.start()
    wait_until((here / "pid").exists)
    assert re.match("stopped after [01] s: exit 143", agent.stop(20, "anna@here", yes=True)["text"])
    thread.join()
    assert agent.state() == "stopped, exit 143"


def test_a_colleagues_run_is_not_stopped_by_mistake(host):
    """Catches a stop that ends somebody else's run without a question."""
    here = supervised("sleep 100", by="anna@here")
    thread = threading.Thread(target=run, args=(here,))
    thread.start()
    wait_until((here / "pid").exists)
    assert agent.stop(5, "ben@here", yes=False) == {"owner": "anna@here"}
    assert agent.stop(0, "ben@here", yes=True, launch="another") == {"text": "was not started"}
    assert agent.stop(5, "ben@here", yes=True)["text"].startswith("stopped after ")
    thread.join()


TYRO = """\
╭─ Unrecognized options ─────────────────────────╮
│ Unrecognized options: --run.stepz, 10          │
│ ────────────────────────────────────────────── │
│ Perhaps you meant:                             │
│     --run.steps INT                            │
│ ────────────────────────────────────────────── │
│ For full helptext, run python main.py --help   │
╰────────────────────────────────────────────────╯
"""


@pytest.mark.parametrize(
    "text, says",
    [(TYRO, "error: Unrecognized options: --run.stepz, 10 Perhaps you meant: --run.steps INT"),
     ("noise\nerror: no tokens\nmore\n", "error: no tokens"), ("a\nTypeError: b\n\n", "TypeError: b"), ("", "")],
)  # fmt: skip
def test_the_reason_of_a_refusal_is_one_line(text, says):
    """Catches `FAILED: ╰────╯`, the last line of a box whose first lines say what is wrong."""
    assert agent.refusal_reason(text) == says


def test_a_log_is_read_without_colors_and_bars(host):
    """Catches a last line of escape codes, and of a progress bar that was overwritten."""
    (host / "log").write_bytes(b"one\n\x1b[31mtwo\x1b[0m \t\xff\n 10%\r 20% done\r\n---\n")
    assert supervisor.last_line(host / "log") == " 20% done"


@pytest.mark.parametrize("seconds, shown", [(0, 0), (-3600, -3600), (70, 70)])
def test_how_far_a_clock_is_off(seconds, shown):
    """Catches a clock that is an hour off, shown as none; and the time that asking takes, shown as skew."""
    answer = hosts.Answer("host00", {"clock": 1000.4 + seconds}, sent_at=1000.0, answered_at=1001.1)
    assert abs(answer.clock_s() - shown) <= 1
    assert (answer.clock_s() == 0) == (seconds == 0)


def test_answers_are_told_from_what_a_login_prints(monkeypatch, capsys):
    """Catches a command whose output ends the answer, or is taken for another one: each question has its own mark."""
    fleet = hosts.Fleet(["host00"])
    mark = "0123abcd"
    printed = (
        b'Welcome {"answer": {"text": "wrong"}}\nno newline'
        + mark.encode()
        + b' {"line": "-- axis-by-axis has answered --"}\nnoise\n'
    )
    child = ["printf", "%b", (printed + mark.encode() + b' {"answer": {"text": "well"}}\n').decode()]
    shown = []
    answer = hosts.PendingRequest(fleet, "host00", child, mark, 5).answer(b"", None, shown.append, None)
    assert shown == ["-- axis-by-axis has answered --"]
    assert answer.values == {"text": "well"}
    fleet.say("done")
    assert capsys.readouterr().out == "done\n"


CHANGED = "@@@\nremove with:\n  ssh-keygen -f '/k' -R '[h]:2'\nHost key verification failed.\n"


@pytest.mark.parametrize("errors, says", [
    (CHANGED,
     "the host key has changed; if you expected that: ssh-keygen -f '/k' -R '[h]:2'"),
    ("ssh: connect to host h port 22: Connection refused\n", "cannot be reached: ssh: connect to host h port 22: "
     "Connection refused; try ssh h"),
    ("Connection timed out\n", "unreachable: Connection timed out"),
])  # fmt: skip
def test_ssh_says_why_a_host_is_not_reached(errors, says):
    """Catches advice that cannot work, as `ssh-keygen -R` of an alias whose key is kept under another name."""
    question = hosts.PendingRequest(hosts.Fleet(["h"]), "h", ["true"], "mark", 5)
    question.child.communicate()
    question.errors.close()
    question.errors = io.BytesIO(errors.encode())
    assert question.cause(255) == says


@pytest.mark.parametrize("line, message", [("a b", "'a b': write one host per line"), ("-x", "'-x' is not a host"),
                                           ("h:22", "'h:22': write the port as ssh://h:22")])  # fmt: skip
def test_lines_that_name_no_host_are_refused(line, message):
    """Catches options and ports that ssh would read in another way."""
    with pytest.raises(hosts.UserError, match=message):
        hosts.read_hosts([line])
    assert hosts.read_hosts(["\ufeffa # one\r\n", "", "[::1]", "ssh://u@h:22"]) == ["a", "::1", "ssh://u@h:22"]


@pytest.mark.parametrize(
    "names, words, restarts",
    [("a b", "python main.py laptop", 3), ("a", "python main.py laptop", 0), ("a b", "python -m data.prepare", 0),
     ("a b", "python main.py laptop --run.restart scratch", 0)],
)  # fmt: skip
def test_a_fleet_that_trains_starts_again_by_itself(names, words, restarts):
    """Catches a cut of the network that ends a run for good, and a restart that deletes what was done before it."""
    assert launcher.default_restarts(hosts.Fleet(names.split()), words.split()) == restarts


def test_a_host_is_not_asked_where_the_user_said_so():
    """Catches a run that --run.check no would start, refused by a host because it does not fit in memory."""
    for said in (["--run.check", "no"], ["--run.check=no"]):
        assert agent.check("no such commit", ["python", "main.py", *said], {}) == {}
    with pytest.raises(FileNotFoundError):
        agent.check("no such commit", ["python", "main.py", "--run.name", "no"], {})
