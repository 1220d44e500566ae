"""Runs shared by the tests of faults: one uninterrupted, one stopped at step 49, and a copy of that to damage."""

import shutil
import signal
import threading
import types

import pytest

from data import prepare
from tests.train.several import Ended
from tests.train.small_run import flags, run, signal_at_step
from train.hosts import processes, watchdog
from train.hosts.agreement import Agreement
from train.hosts.board import Board, LocalStore
from train.hosts.processes import Processes
from train.hosts.watchdog import Watchdog


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("checkpoint")
    (home / "texts").mkdir()
    for n in range(12):
        (home / "texts" / f"{n}.txt").write_text("abcd efgh. " * (30 + n))
    prepare.prepare(prepare.Arguments(str(home / "tokens"), f"text:{home}/texts/*.txt", "bytes", val_share=0.3))
    return home


@pytest.fixture(scope="session")
def straight(home):
    """The directory of an uninterrupted run."""
    status, _, err = run(flags(home, home / "straight"))
    assert (status, err) == (0, "")
    return home / "straight" / "small"


@pytest.fixture(scope="session")
def stopped(home, straight):
    """A run stopped at step 49 by Ctrl-C: its directory, and what `run` returned."""
    with signal_at_step(49, signal.SIGINT):
        said = run(flags(home, home / "stopped"))
    return home / "stopped" / "small", said


@pytest.fixture
def partway(home, stopped, tmp_path):
    """A copy of the stopped run, with checkpoints 48 and 49, that a test may change: flags and directory."""
    shutil.copytree(stopped[0], tmp_path / "small")
    return flags(home, tmp_path), tmp_path / "small"


@pytest.fixture
def crew(monkeypatch):
    """crew(count): this many `Processes` that share a store. `watchdog.exits` of each is {rank: exit status}."""
    monkeypatch.setattr(Board, "POLL_S", 0.02)
    for module in (processes, watchdog):
        monkeypatch.setattr(module, "GRACE_S", 0.3)
    made = []

    def make(count, **settings):
        store, exits = LocalStore(), {}
        run = types.SimpleNamespace(**{"peer_timeout_s": 60, "hang_timeout_s": 1800, **settings})

        def exit_of(rank):
            def end(status):
                exits.setdefault(rank, status)
                raise Ended

            return end

        for rank in range(count):
            monkeypatch.setenv("AXIS_HOST", f"host{rank:02}")
            agreement = Agreement(Board(rank, count, store))
            one = Processes(agreement.board, agreement, Watchdog(agreement, run, exit=exit_of(rank)))
            one.watchdog.exits = exits
            made.append(one)
        return made

    threading.excepthook, before = lambda args: None, threading.excepthook
    yield make
    threading.excepthook = before
    for one in made:
        one.watchdog.closed.set()
        one.watchdog.thread.join(5)
