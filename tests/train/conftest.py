"""The runs that tests of faults share: one nothing happens to, one stopped at step 49, and a copy of that to damage."""

import shutil
import signal

import pytest

from data import prepare
from tests.train.small_run import flags, run, stopped_at


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
    """The run that nothing happens to: its directory."""
    status, _, err = run(flags(home, home / "straight"))
    assert (status, err) == (0, "")
    return home / "straight" / "small"


@pytest.fixture(scope="session")
def stopped(home, straight):
    """The run stopped at step 49 by Ctrl-C: its directory, and what `run` said."""
    with stopped_at(49, signal.SIGINT):
        said = run(flags(home, home / "stopped"))
    return home / "stopped" / "small", said


@pytest.fixture
def partway(home, stopped, tmp_path):
    """The stopped run again, with checkpoints 48 and 49, in a directory that a test may change: flags and directory."""
    shutil.copytree(stopped[0], tmp_path / "small")
    return flags(home, tmp_path), tmp_path / "small"
