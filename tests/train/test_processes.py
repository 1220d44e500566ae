"""Several processes decide as one: threads that share a message board, in many orders, and two real processes."""

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from config import RunConfig
from devices import why_not_writable
from tests.train.several import SHORT, Ended, free_port, run_in_threads, run_two_processes
from tests.train.small_run import ROOT, flags
from train.hosts import agreement, processes, watchdog
from train.hosts.board import Board
from train.hosts.watchdog import LOST
from train.interruptions import Interruptions
from utils import UserError, exit_status


@pytest.mark.parametrize("seed", range(6))
def test_all_stop_after_the_same_step(crew, seed):
    """Catches a process that starts one step more than the others, which then no longer take part in it; and more than
    one step that starts after the stop is known."""
    draw = random.Random(seed)
    ones = crew(3)
    barriers = [threading.Barrier(3, timeout=20) for _ in range(400)]  # a step waits for all, like a collective
    asked, when = draw.randrange(3), draw.uniform(0, 0.4)
    threading.Timer(when, ones[asked].agreement.ask_to_stop).start()
    pauses = [[draw.choice((0, 0, 0.004)) for _ in range(400)] for _ in ones]

    def work(one):
        step = 0
        if not one.agreement.wait_to_start(step):
            return step
        while True:
            time.sleep(pauses[one.board.rank][step])
            one.watchdog.begin_step(step + 1)
            barriers[step].wait()
            step += 1
            if one.agreement.stops_after(step):
                return step

    taken = run_in_threads(ones, work)
    assert len(set(taken)) == 1, taken
    granted = [one.board.message.last_step for one in ones]
    assert taken[0] == max(granted) <= min(granted) + 1


def test_no_process_starts_if_one_has_already_ended(crew):
    """Catches a process that waits, before the loop, for one that was asked to stop while it compiled."""
    ones = crew(3)

    def work(one):
        if one.board.rank == 1:
            one.agreement.ask_to_stop()
            return one.watchdog.leave(0)
        begins = one.agreement.wait_to_start(7)
        return begins or one.watchdog.leave(0)

    assert run_in_threads(ones, work) == [0, 0, 0]


@pytest.mark.parametrize(("status", "others"), [(2, 2), (143, 143), (1, LOST), (LOST, LOST)])
def test_the_end_of_one_ends_all_and_says_why(crew, capsys, status, others):
    """Catches a process that waits for one that has exited, and a status that would restart a run in vain."""
    ones = crew(3)
    run_in_threads(ones[1:2], lambda one: one.watchdog.end(status, "no tokens at 'x'"))
    for one in (ones[0], ones[2]):
        one.watchdog.thread.join(5)
    assert ones[0].watchdog.exits == {0: others, 1: status, 2: others}
    assert capsys.readouterr().err.count("process 1 on host01 has ended, so this one ends too: no tokens at 'x'") == 2


def test_a_silent_process_is_named(crew, capsys):
    """Catches survivors that wait forever, or report only that something is gone."""
    ones = crew(3, peer_timeout_s=1)
    for one in ones:
        one.watchdog.begin_step(4)
    time.sleep(0.1)
    ones[2].watchdog.closed.set()  # stops its heartbeats
    for one in ones[:2]:
        one.watchdog.thread.join(5)
    assert ones[0].watchdog.exits == {0: LOST, 1: LOST}
    assert "process 2 on host02 has been silent for 1 s; it had reached step 4" in capsys.readouterr().err


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_jumps_ends_nothing(crew, monkeypatch, jump_s):
    """Catches a process that is reported as lost or stuck because the clock of a host was changed."""
    ones = crew(2, hang_timeout_s=60)
    for one in ones:
        one.watchdog.begin_step(4)
    clock = time.time
    heard = lambda: [one.watchdog.heard[rank] for one in ones for rank in (0, 1)]
    for jumped in (False, True):
        if jumped:
            monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
        before, end = heard(), time.monotonic() + 80
        while min(now - then for now, then in zip(heard(), before, strict=True)) <= 0:  # wait for heartbeats of all
            assert time.monotonic() < end, "heartbeats stopped"
            time.sleep(0.02)
        time.sleep(5 * Board.POLL_S)  # and the watchdogs have checked them
    assert not ones[0].watchdog.exits and not any(one.board.message.stuck for one in ones)
    assert all(now - then < 60 for now, then in zip([time.monotonic()] * 4, heard(), strict=True))


def test_a_hanging_process_is_named_with_its_line(crew, capfd):
    """Catches a watchdog that blames the waiting processes, or cannot say where the hanging one is."""
    ones = crew(2, hang_timeout_s=1)
    for one, step in zip(ones, (9, 8), strict=True):
        one.watchdog.moved = time.monotonic()
        one.watchdog.begin_step(step)
    for one in ones:
        one.watchdog.thread.join(8)
    err = capfd.readouterr().err
    assert ones[0].watchdog.exits == {0: LOST, 1: LOST}
    assert "no step was finished for 1 s: process 1 on host01 did not reach step 9; it is at threading.py:" in err
    assert "called from test_processes.py:" in err and "test_a_hanging_process_is_named_with_its_line" in err
    assert "did not reach step 8" not in err


def test_slow_progress_is_not_a_hang(crew):
    """Catches an evaluation of many batches that is reported as a hang, and a hang check before the first step."""
    one, other = crew(2, hang_timeout_s=1)
    one.watchdog.moved = time.monotonic()
    for _ in range(8):
        time.sleep(0.2)
        one.watchdog.record_progress()
    assert not one.watchdog.exits and other.watchdog.moved is None


@pytest.mark.parametrize("what", ["optim.lr", "tokens.x", "program", "devices of each"])
def test_processes_that_differ_are_named(crew, monkeypatch, what):
    """Catches hosts that train different things together."""
    ones, differs = crew(3), threading.local()
    monkeypatch.setattr(agreement, "program_sha256", lambda: "p" * (1 + (what == "program") * differs.now))
    monkeypatch.setattr(agreement.jax, "local_device_count", lambda: 2 + (what == "devices of each") * differs.now)

    def work(one):
        differs.now = one.board.rank == 2
        lr = 0.02 if what == "optim.lr" and differs.now else 0.01
        tokens = "abd" if what == "tokens.x" and differs.now else "abc"
        with pytest.raises(UserError) as caught:
            one.agreement.check_same({"optim": {"lr": lr}}, {"x": tokens})
        return str(caught.value)

    said = run_in_threads(ones, work)
    assert len(set(said)) == 1
    assert f": {what} is " in said[0] and "for process 2 on host02" in said[0] and "for process 0 on host00" in said[0]


def test_processes_that_agree_continue(crew):
    """Catches a comparison that refuses everything."""
    same = {"optim": {"lr": 0.01}}, {"x": "abc"}
    results = run_in_threads(crew(3), lambda one: one.agreement.check_same(*same))
    assert results == [None] * 3


def test_only_process_0_decides(crew):
    """Catches a directory that all processes read while process 0 changes it."""
    ones, calls = crew(3), []

    def decide():
        calls.append(1)
        return {"step": 40}

    assert run_in_threads(ones, lambda one: one.board.call_on_first("step", decide)) == [{"step": 40}] * 3
    assert calls == [1]


def test_progress_is_written_atomically(crew, tmp_path, monkeypatch):
    """Catches a status with half a line, or of another step."""
    monkeypatch.setenv("AXIS_PROGRESS", str(tmp_path / "progress"))
    (one,) = crew(1)
    one.watchdog.show(300, {"loss": 2.5, "tokens_per_s": 1234.6})
    one.watchdog.finish_step(12)
    end = time.monotonic() + 30
    while not (tmp_path / "progress").exists() and time.monotonic() < end:
        time.sleep(0.02)
    step, steps, loss, speed, at, late_s = (tmp_path / "progress").read_text().rstrip("\n").split("\t")
    assert (step, steps, loss, speed, late_s) == ("12", "300", "2.5000", "1235", "900")
    assert abs(int(at) - time.time()) < 10


def test_status_knows_when_a_step_is_late(crew, tmp_path, monkeypatch):
    """Catches a hang that `status` calls well for half an hour; and a run that starts, evaluates or saves, or whose
    device is ten steps behind, called hung."""
    monkeypatch.setenv("AXIS_PROGRESS", str(tmp_path / "progress"))
    watch, clock = crew(1)[0].watchdog, [1000.0]
    watch.closed.set()
    watch.thread.join(5)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    row = {"loss": 2.5, "tokens_per_s": 100}

    def steps(first, *seconds, wait_s=0, **how):
        """Take steps of these seconds each; then the loop waits `wait_s` for the device, and shows a row."""
        for step, one_s in enumerate(seconds, first):
            watch.begin_step(step)
            clock[0] += one_s
            watch.finish_step(step)
        clock[0] += wait_s
        watch.show(300, row, **how)
        return watch.late_s

    watch.finish_step(0)
    watch.begin_step(1)
    assert watch.late_s == 900, "the first steps compile"
    assert steps(1, 400, 1, 1) == 1340, "a step that compiled counts in its row"
    assert steps(4, 1, 1, 1) == 60
    assert steps(7, 20, 20) == 200
    assert steps(9, 0, 0, 0, 0, wait_s=200) == 500, "10 times 50 s"
    assert steps(13, *[0] * 100, wait_s=1000) == 2000, "the device was 1000 s behind"
    assert steps(113, 1, 1, 1, pauses=True) == 900, "it evaluates or saves"
    clock[0] += 500
    watch.record_progress()
    assert watch.late_s == 900
    watch.begin_step(116)
    assert watch.late_s == 60
    watch.write_progress()
    before = (tmp_path / "progress").stat().st_mtime_ns
    watch.write_progress()
    assert (tmp_path / "progress").stat().st_mtime_ns == before, "the file looks as if there was progress"
    clock[0] += 1
    watch.finish_step(116)
    watch.write_progress()
    assert (tmp_path / "progress").stat().st_mtime_ns > before


@pytest.fixture
def alive(tmp_path, monkeypatch):
    """alive(): the text of the file that the supervisor watches, once it is younger than this call."""
    path = tmp_path / "alive"
    monkeypatch.setenv("AXIS_ALIVE", str(path))
    monkeypatch.setattr(watchdog, "ALIVE_S", 0.1)

    def fresh():
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (0, 0))
        end = time.monotonic() + 30
        while not (path.exists() and path.stat().st_mtime > 1) and time.monotonic() < end:
            time.sleep(0.02)
        assert path.stat().st_mtime > 1, "no heartbeat"
        return path.read_text()

    return fresh


def test_a_live_process_sends_heartbeats(crew, alive, monkeypatch):
    """Catches a frozen process that is never ended, since its file is written only once, or by another process; and a
    healthy one that is ended because process 0 does not answer, or because its disk is full."""
    one, other = crew(2, peer_timeout_s=50)
    other.watchdog.closed.set()
    assert alive() == alive() == "50\tjoined\n"

    with monkeypatch.context() as full:
        full.setattr(watchdog, "replace_file", lambda *_: raise_(OSError(errno.ENOSPC, "No space left on device")))
        assert alive() == alive() == "50\tjoined\n"

    stuck = threading.Event()
    monkeypatch.setattr(one.board.store, "key_value_dir_get", lambda folder: stuck.wait(20) and {})
    time.sleep(0.3)
    assert alive() == alive() == "50\tjoined\n"
    stuck.set()
    one.watchdog.closed.set()
    one.watchdog.thread.join(5)
    with pytest.raises(AssertionError, match="no heartbeat"):
        alive()


def test_an_ending_process_gets_time_to_say_why(crew, alive):
    """Catches a process that is killed and restarted while it waits until the others have read why it ends."""
    ones = crew(2, peer_timeout_s=50)
    ones[1].watchdog.closed.set()
    run_in_threads(ones[:1], lambda one: one.watchdog.end(2, "a full disk"))
    assert Path(os.environ["AXIS_ALIVE"]).read_text() == "50\tjoined\n"  # and 0.3 s of GRACE_S


def raise_(error):
    raise error


@pytest.mark.parametrize("error", [
    ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:4242"),
    RuntimeError("the checkpoint of step 20 was not written: Timed out after 5 seconds."),
])  # fmt: skip
def test_an_error_from_a_lost_process_names_it(crew, capfd, error):
    """Catches a traceback instead of the name of the lost host, or the exit status of a user's error, after which
    nothing restarts."""
    ones = crew(2, peer_timeout_s=1)
    time.sleep(0.1)
    ones[1].watchdog.closed.set()

    @processes.end_together
    @exit_status
    def command():
        processes.current = ones[0]
        raise error

    with pytest.raises(Ended):
        command()
    assert ones[0].watchdog.exits == {0: LOST}
    err = capfd.readouterr().err
    assert "error: process 1 on host01 has been silent for 1 s" in err.partition("Traceback")[0]


def test_process_0_tells_where_a_run_resumes(crew, tmp_path):
    """Catches a host without the checkpoints that reports that the run starts at step 0."""
    ones, place = crew(2), tmp_path / "checkpoints"
    ones[1].agreement.share_disk = False
    outlook = lambda one: Interruptions([], place, one).resume_info[1]
    assert outlook(ones[1]).startswith("process 0 knows where this resumes:  ")
    for step, said in ((40, f"this resumes from {os.path.relpath(place)}/40 on host00:  "),
                       (0, "no checkpoint was saved; this starts at step 0:  ")):  # fmt: skip
        ones[0].board.message.saved = step
        time.sleep(0.3)
        assert outlook(ones[1]).startswith(said)


def test_a_slow_host_is_named_once(crew, capfd):
    """Catches a slow host that is not named although all wait for it, or that is named at every step."""
    ones = crew(3)
    for one, ms in zip((ones[0], ones[2], ones[1]), (10.0, 12.0, 24.5), strict=True):
        one.board.message.matmuls_ms = [ms, ms + 1]
        time.sleep(0.3)  # until all have read it: the slow host reports last
    said = "slow       process 1 on host01 took 24.5 ms for a matmul test, twice in a row, but the median host took"
    assert capfd.readouterr().out.count(said) == 1


@pytest.fixture
def tpu(monkeypatch):
    """A machine that looks like one of 4 hosts of a TPU slice; the dict receives the arguments of `initialize`."""
    told = {}
    monkeypatch.setattr(processes, "has_tpu_files", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(processes.jax.distributed, "initialize", lambda **how: told.update(how))
    monkeypatch.setattr(processes.jax, "process_count", lambda: 4)
    monkeypatch.setattr(processes.jax, "process_index", lambda: 3)
    monkeypatch.setattr(processes, "redirect_output", lambda: None)
    return told


def test_a_tpu_slice_finds_its_hosts(tpu, monkeypatch):
    """Catches hosts of a slice that train alone, and a launch on only some hosts, which would wait forever."""
    monkeypatch.setenv("AXIS_PROCESSES", "4")
    found = processes.join(RunConfig(peer_timeout_s=20))
    found.watchdog.closed.set()
    assert (found.board.rank, found.board.count) == (3, 4)
    assert tpu == {"initialization_timeout": 160, "shutdown_timeout_seconds": 60, "heartbeat_timeout_seconds": 60}
    monkeypatch.setenv("AXIS_PROCESSES", "2")
    with pytest.raises(UserError, match="2 processes were started, but the TPU has 4 hosts; list each host once"):
        processes.join(RunConfig())


def test_hosts_in_another_order_than_the_workers_are_refused(tpu, monkeypatch):
    """Catches a launcher that looks for checkpoints, and for the cause of a failure, on the wrong first host."""
    monkeypatch.setenv("AXIS_PROCESS_ID", "1")
    with pytest.raises(UserError, match="this host is process 3 of the TPU, but number 1 in the list of hosts"):
        processes.join(RunConfig())
    processes.current.watchdog.closed.set()


@pytest.mark.parametrize(("told", "found", "address", "more"), [
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, (3, 8), "gpu007:61563", {}),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "4", "JAX_COORDINATOR_PORT": "8476"}, (3, 4), "gpu007:8476",
     {"cluster_detection_method": "deactivate"}),
    ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, (0, 1), None, None),
    ({"SLURM_NTASKS": "8"}, (0, 1), None, None),
])  # fmt: skip
def test_tasks_of_slurm_join(tpu, monkeypatch, told, found, address, more):
    """Catches `srun python main.py` that starts N runs; an interactive shell in an allocation of 8 tasks that waits
    for 7 others; and a task with a node of its own that uses one GPU."""
    monkeypatch.setattr(processes, "has_tpu_files", lambda: False)
    task = {"SLURM_JOB_ID": "123", "SLURM_STEP_NODELIST": "gpu[007-010,12]", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    monkeypatch.setattr(processes.os, "environ", {**os.environ, **task, **told})
    one = processes.join(RunConfig(peer_timeout_s=20))
    one.watchdog.closed.set()
    assert (one.board.rank, one.board.count) == found
    assert os.environ.get("JAX_COORDINATOR_ADDRESS") == address
    timeouts = {"initialization_timeout": 160, "shutdown_timeout_seconds": 60, "heartbeat_timeout_seconds": 60}
    assert tpu == ({} if more is None else {**timeouts, "process_id": found[0], "num_processes": found[1], **more})


def test_a_single_tpu_host_trains_alone(tpu, monkeypatch):
    """Catches a single TPU machine outside a cluster that cannot train."""

    def no_cluster(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(processes.jax.distributed, "initialize", no_cluster)
    monkeypatch.setattr(processes.jax, "process_count", lambda: pytest.fail("a device is used: too early"))
    found = processes.join(RunConfig())
    found.watchdog.closed.set()
    assert (found.board.rank, found.board.count) == (0, 1)


def test_the_slurm_script_starts_one_process_per_node(tmp_path):
    """Catches a script whose arguments do not reach main.py as they were typed."""
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["bash", "launch/slurm.sbatch", "moe1b", "--run.name", "two words"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [".venv/bin/python", "main.py", *words[2:]]


HERE = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9"}


@pytest.mark.parametrize(("told", "message"), [
    ({"JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES not set"),
    (HERE | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "=2 of JAX_NUM_PROCESSES=2: use"),
    (HERE | {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "=0 of JAX_NUM_PROCESSES=two: use"),
])  # fmt: skip
def test_incomplete_environments_are_refused(monkeypatch, told, message):
    """Catches a process that trains alone although its environment names others."""
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        processes.join(RunConfig())


def test_an_unresponsive_cache_disk_is_skipped(tmp_path, monkeypatch):
    """Catches a start that waits for a dead file server, and a run refused because its programs cannot be cached."""
    assert why_not_writable(str(tmp_path / "new" / "cache")) == ""
    (tmp_path / "file").touch()
    assert "cannot be written: " in why_not_writable(str(tmp_path / "file" / "cache"))
    stuck = threading.Event()
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: stuck.wait(20))
    begin = time.monotonic()
    assert why_not_writable(str(tmp_path), longest_s=0.3) == "does not answer within 0.3 s"
    assert time.monotonic() - begin < 5
    stuck.set()


# Two real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_join_timeout_says_which_process_is_missing(home, tmp_path, rank):
    """Catches C++ stacks instead of a message, and a status after which the supervisor does not restart."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank),
            "AXIS_ALIVE": str(tmp_path / "alive")}  # fmt: skip
    command = [sys.executable, "main.py", *flags(home, tmp_path), "--run.peer_timeout_s", "1"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | told, capture_output=True, text=True, timeout=480)
    assert done.returncode == LOST
    what = "not all processes joined; ./launcher.sh status shows", f"process 0 does not answer at 127.0.0.1:{port}"
    assert f"error: process {rank} of 2 waited 5 s for the others: {what[rank]}" in done.stderr
    assert (tmp_path / "alive").read_text() == "65\tjoining\n"
    assert "stack trace" not in done.stderr


def test_output_of_native_code_is_discarded():
    """Catches Gloo's lines in our output, our own lines lost with them, and a full disk that ends the process."""
    code = ("import os, sys; from train.hosts import processes; print('before'); processes.redirect_output(); "
            "os.write(1, b'Gloo\\n'); print('after'); print('error', file=sys.stderr)")  # fmt: skip
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr, done.returncode) == ("before\nafter\n", "error\n", 0)
    with open("/dev/full", "w") as full:  # every write to it fails, as on a full disk
        code = code.replace("print('before'); ", "")
        assert subprocess.run([*command[:2], code], cwd=ROOT, stdout=full, stderr=full, timeout=60).returncode == 0


def test_two_processes_refuse_different_settings_at_once(home, tmp_path):
    """Catches two hosts that hang or train on with different learning rates. They join by the variables of Slurm."""
    words = [*flags(home, tmp_path), "--run.name", "two", "--optim.lr"]
    none = dict.fromkeys(processes.VARIABLES, "")
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    both = {**none, **step, "SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": str(free_port())}
    settings = [{**both, "SLURM_PROCID": str(rank)} for rank in (0, 1)]
    status, _, errors = run_two_processes([*words, "0.01"], [*words, "0.02"], settings=settings)
    assert status == [2, 2], errors
    for err in errors:
        assert "optim.lr is 0.02 for process 1 on host01, but 0.01 for process 0 on host00" in err
        assert "Traceback" not in err
    assert not (tmp_path / "two").exists()


def test_a_process_that_dies_in_a_save_is_named(home, tmp_path):
    """On a shared disk, where saves wait in Orbax's barriers. Catches a disk that is blamed for a lost host, with a
    status after which the supervisor does not restart, and a wait of ten minutes."""
    words = [*flags(home, tmp_path), *SHORT]
    status, _, errors = run_two_processes(words, words, script="tests/launch/faulty.py")
    assert status == [LOST, -signal.SIGKILL], errors
    assert "error: process 1 on host01 has been silent for 8 s; it had reached step 4" in errors[0]
    assert "Traceback" not in errors[0] and "cannot be written" not in errors[0]


def test_a_full_disk_without_checkpoints_ends_nothing(home, tmp_path):
    """Process 1 can write no byte to a file or as output. Catches a run of many hosts that ends because one host, which
    stores no checkpoints, has no room for its log."""
    words, places = [*flags(home, "runs"), *SHORT], [tmp_path / "host0", tmp_path / "host1"]
    for place in places:
        place.mkdir()

    def fill(rank, process):
        if rank == 1:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))

    with open("/dev/full", "w") as full:
        output = subprocess.PIPE, full
        status, _, errors = run_two_processes(words, words, begin=fill, cwd=places, stdout=output, stderr=output)
    assert status == [0, 0], errors
    assert (places[0] / "runs/small/report.png").exists() and "Traceback" not in errors[0]
    assert not [path for path in places[1].rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("file", ["main.py", "train/checkpoint.py", "data/reading/order.py"])
def test_a_local_edit_changes_the_digest_of_the_program(file, monkeypatch, tmp_path):
    """Catches hosts that run different code, because the digest leaves out a package or a package within one."""
    monkeypatch.setattr(agreement, "ROOT", tmp_path)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    digests = set()
    for text in ("before", "after"):
        (tmp_path / file).write_text(text)
        digests.add(agreement.program_sha256.__wrapped__())
    assert len(digests) == 2
