"""Preemption of a host is distinguished from a stop by the user, on every process of a run."""

import signal
import threading
import time
import types
from pathlib import Path

import pytest

import main
from tests.train.several import SHORT, run_in_threads, run_two_processes
from tests.train.small_run import flags, run, signal_at_step
from train.hosts import watchdog
from train.hosts.agreement import Agreement
from train.interruptions import Interruptions

FINISHED, PREEMPTED, STOPPED = "joined", "preempted", "joined"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """The folder of a launch, in which the supervisor watches the file `alive`."""
    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.setenv("AXIS_ALIVE", str(folder / "alive"))
    return folder


def last_state(folder):
    return (folder / "alive").read_text().rstrip("\n").split("\t")[1]


@pytest.mark.parametrize("stop, word", [(False, PREEMPTED), (True, STOPPED)])
def test_sigterm_is_preemption_unless_stop_was_requested(partway, launch, stop, word):
    """Catches a preempted run that looks finished, so that nothing restarts it, and a stopped run that restarts."""
    if stop:
        (launch / "stop").touch()
    with signal_at_step(52, signal.SIGTERM):
        status, _, err = run(partway[0])
    assert (status, last_state(launch)) == (0, word)
    said = "preempted: the system asked this host to stop (SIGTERM); stopping after this step and saving a checkpoint"
    assert (said in err) is (not stop)


def test_a_late_sigterm_changes_nothing(partway, launch, monkeypatch):
    """Catches a stopped or preempted run that fails: a signal that arrives after the run has saved, while it waits for
    the other processes, ended it with 143, and the others then missed its heartbeats."""
    late, leave = [], watchdog.Watchdog.leave

    def leave_late(self, *how):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        return leave(self, *how)

    monkeypatch.setattr(watchdog.Watchdog, "leave", leave_late)
    before = signal.signal(signal.SIGTERM, lambda *_: late.append(1))
    try:
        with signal_at_step(52, signal.SIGTERM):
            status, _, err = run(partway[0])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (status, late, last_state(launch)) == (0, [], PREEMPTED)
    assert "stopped at once" not in err


def test_ctrl_c_is_not_preemption(partway, launch):
    """Catches a run that restarts after its user has pressed Ctrl-C."""
    with signal_at_step(52, signal.SIGINT):
        status, _, err = run(partway[0])
    assert (status, last_state(launch)) == (0, STOPPED) and "preempted" not in err


def test_preemption_before_the_first_checkpoint(home, launch, tmp_path, monkeypatch):
    """Catches a run that is abandoned because its host was preempted while it compiled, and one that ends before the
    thread that watches for signals has printed why."""
    watch = Interruptions.watch

    def watch_late(self, reads):
        time.sleep(1)
        watch(self, reads)

    monkeypatch.setattr(Interruptions, "watch", watch_late)
    monkeypatch.setattr(main, "trace_step", lambda *_: signal.raise_signal(signal.SIGTERM))
    status, _, err = run(flags(home, tmp_path))
    assert (status, last_state(launch)) == (143, PREEMPTED)
    assert "preempted: the system asked this host to stop (SIGTERM); stopping; signal again" in err


def test_a_complete_run_ignores_preemption(partway, launch, monkeypatch):
    """Catches a run that restarts after its last row because its host was preempted at that moment."""
    show = main.log

    def log_and_signal(*words):
        show(*words)
        if str(words[0]).startswith("sample"):  # the first line after the last row
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(main, "log", log_and_signal)
    status, out, _ = run(partway[0])
    assert (status, last_state(launch)) == (0, FINISHED)
    assert "done       step 60" in out and "stopped    " not in out


@pytest.mark.parametrize("number, stop, by", [
    (signal.SIGTERM, False, "system"), (signal.SIGTERM, True, "user"), (signal.SIGINT, False, "user"),
    (Interruptions.OTHER_PROCESS, False, ""),
])  # fmt: skip
def test_who_sent_a_signal(crew, launch, number, stop, by):
    """Catches a process that follows another's stop and reports that it was asked itself."""
    (one,) = crew(1)
    if stop:
        (launch / "stop").touch()
    Interruptions([], launch, one).note_sender(number)
    assert one.board.message.by == by


def test_without_a_supervisor_sigterm_is_from_the_user(crew, monkeypatch):
    """Catches a message about preemption when a user types `kill`."""
    monkeypatch.delenv("AXIS_ALIVE", raising=False)
    (one,) = crew(1)
    Interruptions([], Path(), one).note_sender(signal.SIGTERM)
    assert one.board.message.by == "user"


@pytest.mark.parametrize("status", [0, 143])
@pytest.mark.parametrize("by, word", [
    (("", "system", ""), PREEMPTED), (("system", "system", "system"), PREEMPTED), (("", "user", ""), STOPPED),
    (("user", "system", ""), STOPPED), (("system", "", "user"), STOPPED), (("", "", ""), STOPPED),
])  # fmt: skip
def test_all_processes_report_the_same_state(crew, monkeypatch, status, by, word):
    """Catches half of the hosts restarting, and a `stop --only HOST` that the other hosts take for preemption."""
    last, saying, say_alive = {}, threading.local(), watchdog.Watchdog.say_alive

    def say(one, more_s=0.0):
        saying.one = one
        say_alive(one, more_s)

    monkeypatch.setattr(watchdog.Watchdog, "say_alive", say)
    monkeypatch.setattr(watchdog, "say_alive", lambda _, what: last.update({saying.one: what}))
    monkeypatch.setattr(watchdog, "ALIVE_S", 1000)
    ones = crew(3)
    for one in ones:
        one.board.wait(lambda lines: True)

    def work(one):
        one.board.message.by = by[one.board.rank]
        one.agreement.ask_to_stop()
        one.board.wait(lambda lines: all(line.stop for line in lines))
        one.watchdog.check_messages(one.board.read(), 0)
        one.board.message.stopped = not status  # else `end` says it
        return one.watchdog.leave(status)

    run_in_threads(ones, work)
    assert [last[one.watchdog] for one in ones] == [word] * 3


@pytest.mark.parametrize("fault, stop, statuses, word", [
    ("term:1:step:3", None, [0, 0], PREEMPTED),
    ("term:1:compile:-", None, [143, 143], PREEMPTED),
    ("term:1:step:3", 1, [0, 0], STOPPED),
])  # fmt: skip
def test_two_processes_agree_on_the_reason(home, tmp_path, fault, stop, statuses, word):
    """The system, or `stop`, signals only process 1. Catches a reason that is not sent along with the request."""
    launches = [tmp_path / "launch0", tmp_path / "launch1"]
    settings = [{"AXIS_ALIVE": str(folder / "alive"), "AXIS_FAULT": fault} for folder in launches]
    for folder in launches:
        folder.mkdir()
    if stop is not None:
        (launches[stop] / "stop").touch()
    words = [*flags(home, tmp_path), *SHORT]
    found, _, errors = run_two_processes(words, words, script="tests/launch/faulty.py", settings=settings)
    assert found == statuses, errors
    assert [last_state(folder) for folder in launches] == [word] * 2
    assert ("preempted: the system asked process 1 on host01 to stop (SIGTERM)" in errors[0]) is (word == PREEMPTED)
    assert ("preempted: the system asked this host to stop (SIGTERM)" in errors[1]) is (word == PREEMPTED)


def test_of_several_preempted_hosts_all_name_the_lowest():
    """Catches hosts that each name themselves, so that their operators look for several causes."""
    asked = types.SimpleNamespace(by="system")
    names = lambda rank: Agreement.preempted_rank.fget(types.SimpleNamespace(board=types.SimpleNamespace(
        rank=rank, message=asked, messages={other: asked for other in range(3) if other != rank})))  # fmt: skip
    assert [names(rank) for rank in range(3)] == [0, 0, 0]
