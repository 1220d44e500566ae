"""Claims about what runs on a host, without ssh: the agent and its supervisor in a folder of this machine."""

import ast
import dataclasses
import http.server
import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch import agent, hosts, launcher, machine, supervisor
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


@pytest.mark.parametrize("kept, count", [
    ({"vmstat": "oom_kill_other 5\noom_kill 3\nnr_dirty 7"}, 3),
    ({"vmstat": "oom_kill 3", "cgroup": "1:cpu:/x\n0::/box", "/sys/fs/cgroup/box/memory.events": "oom_kill 1"}, 1),
    ({"vmstat": "oom_kill 3", "cgroup": "7:memory:/b", "/sys/fs/cgroup/memory/b/memory.oom_control": "oom_kill 0"}, 0),
    ({"vmstat": "oom_kill 3", "cgroup": "0::/"}, 3),
])  # fmt: skip
def test_kills_for_want_of_memory_are_counted_by_the_kernel(monkeypatch, kept, count):
    """Catches a counter of another name: a kill for want of memory would look like a colleague's; and the kills of
    another container, taken for this one's."""
    assert "oom_kill" in dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    monkeypatch.setattr(supervisor, "read", lambda path: kept.get(path.name, kept.get(str(path), "")))
    assert supervisor.out_of_memory_kills() == count


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


@needs_root
def test_a_run_on_a_read_only_disk_is_seen_and_stopped(host, tmp_path, monkeypatch, request):
    """Catches a host whose disk turned read-only in a run, and that answers neither `status` nor `stop`."""
    here = supervised("trap 'kill %1; exit 0' TERM; sleep 30 & wait", restarts=3)
    code = "from launch.supervisor import Supervisor; Supervisor('2').run()"
    ours = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=ours, stdout=-3, stderr=-3) as watch:
        wait_until((here / "pid").exists)
        subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
        request.addfinalizer(lambda: subprocess.run(["umount", "--lazy", tmp_path], check=True))
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        agent.enter(str(tmp_path), "status")
        with pytest.raises(agent.Refused, match="cannot write to"):
            agent.enter(str(tmp_path), "start")
        assert agent.status()["state"] == "running"
        sent = []
        monkeypatch.setattr(agent, "kill", lambda *how: sent.append(how) or supervisor.kill(*how))
        assert agent.stop(20, "", yes=True)["text"].startswith("stopped after ")
        assert len(sent) == 1, "a second SIGTERM would end a run that saves"
        watch.wait(10)


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


def test_a_run_without_progress_is_in_trouble(host, capsys):
    """Catches a hung run that `status --short` calls well, with the tokens/s of an hour ago."""
    here = supervised("sleep 100")
    thread = threading.Thread(target=run, args=(here,))
    thread.start()
    wait_until((here / "pid").exists)
    report, problem = here / "progress", lambda: launcher.has_problem(hosts.Answer("host00", agent.status()))
    for text, age_s, shown in [
        ("5\t9\t2.5\t977\t1\t60", 50, "running"),
        ("5\t9\t2.5\t977\t1\t60", 198, "no progress for 198 s"),
        ("5\t9\t2.5\t977\t1\t900", 198, "running"),  # it evaluates
        ("5\t9\t2.5\t977\t1", 5000, "running"),  # a command that reports nothing of the kind
    ]:
        report.write_text(text + "\n")
        os.utime(report, (time.time() - age_s,) * 2)
        assert (agent.status()["state"], problem()) == (shown, shown != "running")
        answer = hosts.Answer("host00", {**agent.status(), "step_s_ago": age_s})
        assert launcher.show_status(hosts.Fleet(["host00"]), [answer], short=True) == int(shown != "running")
        said = capsys.readouterr().out
        if shown == "running":
            assert said == f"1 hosts are well; host00: running, step 5/9 ({age_s} s ago), loss 2.5, tokens/s 977\n"
        else:
            assert f"{age_s}" in said and "./launcher.sh stacks, with the same hosts, shows where" in said
    report.unlink()  # it compiles
    assert agent.status()["state"] == "running"
    agent.stop(5, "-", yes=True)
    thread.join()
    report.write_text("5\t9\t2.5\t977\t1\t60\n")
    os.utime(report, (0, 0))
    assert agent.status()["state"] == "stopped, exit 143"


STUCK = """import faulthandler, signal, subprocess, time
def waits_for_the_others():
    print("ready", flush=True)
    time.sleep(100)
faulthandler.register(signal.SIGUSR2, file=2)
child = subprocess.Popen(["sleep", "100"])
waits_for_the_others()
"""


def test_stacks_of_a_run_that_hangs(host, monkeypatch):
    """Catches a hang whose place is known only after half an hour; and a signal that ends processes of the run."""
    (host / "stuck.py").write_text(STUCK)
    here = supervised(f"{sys.executable} {host}/stuck.py; exit 3")
    thread = threading.Thread(target=run, args=(here,))
    thread.start()
    wait_until(lambda: "ready" in supervisor.read(here / "log"))
    said = []
    monkeypatch.setattr(agent, "emit", lambda kind, value: said.append(value))
    agent.stacks()
    assert re.search(r'File ".*stuck.py", line 4 in waits_for_the_others', "\n".join(said)) and "ready" not in said
    (pid,) = agent.processes_that_handle(signal.SIGUSR2, int((here / "pid").read_text()))
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: agent.processes_that_handle(signal.SIGUSR2, int((here / "pid").read_text()))[pid])
    said.clear()
    agent.stacks()
    assert len(said) == 1 and f"process {pid} (" in said[0] and "is frozen by SIGSTOP" in said[0]
    assert agent.state() == "running"
    agent.stop(0, "-", yes=True)
    thread.join()
    with pytest.raises(agent.Refused, match="nothing runs: stopped, exit 137"):
        agent.stacks()


def test_a_host_that_does_not_come_back(host):
    """Catches 80 minutes of attempts without a word on how to go on with fewer hosts."""
    joins = 'printf "60\\tjoining\\n" > "$AXIS_ALIVE"; echo >> ../../tries; [ $(wc -l < ../../tries) = 3 ] || exit 75'
    here = supervised(joins, "A_KEY=secret", "a b", restarts=3)
    assert run(here) == "0"
    text = [line.removeprefix("supervisor: ") for line in notes(here)]
    (command,) = [line for line in text if line.startswith("  ./launcher.sh --hosts hosts.txt --replace -- ")]
    assert shlex.split(command)[-2:] == ["A_KEY=***", "a b"] and "  ./launcher.sh status --hosts hosts.txt" in text
    assert len([line for line in text if "not counted: not all processes joined" in line]) == 4


@pytest.fixture
def metadata_server(monkeypatch, tmp_path):
    """Google Cloud's metadata server, for 8 hosts in two slices; `told` changes what it answers."""
    told = {
        "agent-worker-number": "1",
        "worker-network-endpoints": "a:1:10.0.0.2,b:2:10.0.0.3,c:3:10.0.0.4,d:4:10.0.0.5",
    }
    told["tpu-env"] = "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers["Metadata-Flavor"] == "Google" and self.path.rpartition("/")[2] in told
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(told.get(self.path.rpartition("/")[2], "").encode())

        def log_message(self, *_):
            pass

    (tmp_path / "accel0").touch()
    monkeypatch.setattr(machine, "DEVICES", str(tmp_path))
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)  # JAX sets it on a machine without a TPU
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        yield told
        server.shutdown()


def test_a_host_knows_its_place_in_a_tpu(metadata_server, monkeypatch):
    """Catches a launch on 7 hosts of 8, which waits 300 s for the missing one, twelve times: JAX counts all workers."""
    assert machine.tpu_worker() == (5, 8)
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "0")  # JAX reads the environment first
    assert machine.tpu_worker() == (1, 8)
    monkeypatch.delenv("MEGASCALE_SLICE_ID")
    metadata_server["tpu-env"] = "ZONE: 'z'"
    assert machine.tpu_worker() == (1, 4)
    del metadata_server["agent-worker-number"]
    assert machine.tpu_worker() is None
    monkeypatch.setattr(machine, "DEVICES", "/nowhere")
    assert machine.tpu_worker() is None


def test_jax_counts_the_workers_of_a_tpu_in_the_same_way(metadata_server):
    """Catches a JAX that ranks the hosts of two slices in another order, or asks for another name."""
    cluster = importlib.import_module("train.hosts.processes").clusters.GceTpuCluster
    assert (cluster.get_process_id(), cluster.get_process_count()) == machine.tpu_worker() == (5, 8)
    assert cluster.get_coordinator_address(5, "8476") == "10.0.0.2:8476"


@pytest.mark.parametrize("workers, message", [
    ([(0, 3), (1, 3)], "2 hosts are listed, but h0 belongs to a TPU with 3 hosts"),
    ([(1, 2), (0, 2)], "h0 is worker 1 of the TPU, but number 0 in the list of hosts"),
])  # fmt: skip
def test_hosts_that_are_not_the_workers_of_the_tpu_are_refused(workers, message):
    """Catches a launch on part of a slice, and one with the hosts in another order, before anything starts."""
    ready = [hosts.Answer(f"h{n}", {"worker": worker}) for n, worker in enumerate(workers)]
    with pytest.raises(hosts.UserError, match=message):
        launcher.check_workers(ready, ["python", "main.py"])
    launcher.check_workers(ready, ["python", "-m", "data.prepare"])
    launcher.check_workers([hosts.Answer("h0", {"worker": None})], ["python", "main.py"])


def test_a_misspelled_flag_is_found_before_any_host_is_asked():
    """Catches 20 s of copying before `--run.stepz` is refused."""
    fleet, python = hosts.Fleet(["h"]), ["env", "A=1", "python", "main.py"]
    with pytest.raises(hosts.UserError, match=r"Unrecognized options: --run\.stepz, 10 .*--run\.steps"):
        launcher.check_flags(fleet, [*python, "laptop", "--run.stepz", "10"])
    with pytest.raises(hosts.UserError, match="unknown preset 'tinny'"):
        launcher.check_flags(fleet, [*python, "tinny"])
    for words in ("main.py laptop --run.steps 10", "main.py --config runs/of/hosts.json --run.stepz 1", "other.py --x"):
        launcher.check_flags(fleet, ["python", *words.split()])


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
    skew_s = hosts.clock_skew_s(1000.4 + seconds, sent_at=1000.0, answered_at=1001.1)
    assert abs(skew_s - shown) <= 1
    assert (skew_s == 0) == (seconds == 0)


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
     "Connection refused; no ssh server runs there: install and start openssh-server"),
    ("Connection timed out\n", "unreachable: Connection timed out"),
])  # fmt: skip
def test_ssh_says_why_a_host_is_not_reached(errors, says):
    """Catches advice that cannot work, as `ssh-keygen -R` of an alias whose key is kept under another name."""
    question = hosts.PendingRequest(hosts.Fleet(["h"]), "h", ["true"], "mark", 5)
    question.child.communicate()
    question.errors.close()
    question.errors = io.BytesIO(errors.encode())
    assert question.cause(255) == says


def test_a_startup_file_that_reads_its_input_is_named():
    """Catches `ValueError: invalid literal for int()`, the answer of a host whose .bashrc reads a line."""
    command = ["sh", "-c", f"read line; {hosts.BOOT}"]
    done = subprocess.run(command, input=b"9\nimport sys\n{}\n", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (68, b"", b"")
    question = hosts.PendingRequest(hosts.Fleet(["h"]), "h", ["true"], "mark", 5)
    question.child.communicate()
    assert "startup files on h (.bashrc) read from standard input" in question.cause(68)
    question.errors.close()


def test_ctrl_c_signals_the_launcher_alone():
    """Catches hosts that are blamed, one by one, because Ctrl-C ended ssh before the launcher knew of it."""
    question = hosts.PendingRequest(hosts.Fleet(["h"]), "h", ["true"], "mark", 5)
    assert os.getpgid(question.child.pid) == question.child.pid != os.getpgid(0)
    question.child.communicate()
    question.errors.close()


def test_a_host_that_waits_for_its_run_needs_no_slot(host, monkeypatch):
    """Catches a `stop` that reaches the 17th host only once one of the first 16 has saved and ended."""
    monkeypatch.setenv("PARALLEL", "1")
    fleet, answers = hosts.Fleet(["a", "b"]), []
    said = ["echo 'm {\"waiting\": true}'", "until [ -e ended ]; do sleep 0.1; done", "echo 'm {\"answer\": {}}'"]

    def ask(host):
        with fleet.slots:
            question = hosts.PendingRequest(fleet, host, ["sh", "-c", "; ".join(said)], "m", 30)
            answers.append(question.answer(b"", None, None, lambda: True))

    questions = [threading.Thread(target=ask, args=(host,)) for host in fleet.hosts]
    for one in questions:
        one.start()
    try:
        wait_until(lambda: len(fleet.children) == 2)
    finally:
        Path("ended").touch()
        for one in questions:
            one.join(10)
    assert [answer.failed for answer in answers] == [False, False]


def test_an_error_without_a_path_says_where(host, monkeypatch, capsys):
    """Catches `No space left on device` that does not say on which disk."""

    def full():
        raise OSError(28, "No space left on device")

    text = json.dumps({"mark": "m", "folder": str(host), "keys": False, "do": "usage"})
    monkeypatch.setattr(agent, "stdin", io.BytesIO(text.encode()))
    monkeypatch.setitem(agent.VERBS, "usage", full)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(agent, "mark", "")
    agent.answer()
    assert f"No space left on device: {host}" in capsys.readouterr().out


def test_a_misspelled_command_is_guessed(monkeypatch):
    """Catches `'statsu' is not a command`, without the one that was meant."""
    with pytest.raises(hosts.UserError, match=r"'statsu' is not a command of \./launcher\.sh; did you mean status\?"):
        hosts.parse(["statsu", "--hosts", "x"], launcher.VERBS, "./launcher.sh")
    monkeypatch.setattr(hosts, "hosts_of_tpu", lambda name, zone: [f"{name}-{n}.{zone}" for n in (0, 1)])
    found = hosts.parse(["status", "--tpu", "b,a", "--zone", "z"], launcher.VERBS, "./launcher.sh")[-1]
    assert found == ["b-0.z", "b-1.z", "a-0.z", "a-1.z"], "slices in another order than they were named in"


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
