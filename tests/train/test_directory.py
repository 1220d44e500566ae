"""A run's directory belongs to one process at a time, and says who holds it, or why it cannot be written."""

import fcntl
import os
import re

import pytest

from tests.train.small_run import STEPS, flags, run, snapshot
from train.directory import locked


def test_two_runs_in_one_directory_are_refused(straight, home):
    """Catches two processes that write one record; and a refused one that removes the lock of the other."""
    argv = [*flags(home, home / "straight"), "--run.steps", str(2 * STEPS)]
    before = snapshot(straight)
    with locked(straight):
        with_lock = snapshot(straight)
        for more in ([], ["--run.restart"]):
            status, out, err = run([*argv, *more])
            assert (status, out) == (2, "")
            assert re.fullmatch(
                rf"error: {straight} is in use by process {os.getpid()} on \S+, since .*; wait until that ends, or "
                r"start another run with --run\.name\n", err)  # fmt: skip
        assert snapshot(straight) == with_lock
    assert snapshot(straight) == before


def test_a_lock_that_was_just_removed_is_not_taken(tmp_path, monkeypatch):
    """Catches two runs that hold two files of one name: one opened it before the other removed it."""
    flock = fcntl.flock

    def lock_late(file, how):
        (tmp_path / ".lock").unlink()  # its holder ends
        (tmp_path / ".lock").touch()  # somebody else begins
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with pytest.raises(ValueError, match="is in use by another process"), locked(tmp_path):
        pass


def test_an_unwritable_place_is_named(home, tmp_path):
    """Catches a traceback where the run's directory cannot be made, and a run that trains before it notices."""
    (tmp_path / "file").write_text("mine")
    status, out, err = run(flags(home, tmp_path / "file"))
    assert (status, out) == (2, "")
    assert err.startswith(f"error: cannot write to {tmp_path}/file/small: [Errno 20] Not a directory")
    assert err.endswith("; choose another --run.dir\n")
    assert (tmp_path / "file").read_text() == "mine"
