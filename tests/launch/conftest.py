"""Three hosts that the tests of a file share. A rehearsal says what this machine lacks; nothing here installs it."""

import os
from contextlib import suppress

import pytest

from tests.launch import rehearsal


def pytest_collection_modifyitems(items):
    """Of two workers one begins with the longest file, which would else be the last."""
    items.sort(key=lambda item: item.path.parts[-2:] != ("launch", "test_training.py"))


@pytest.fixture(scope="session", autouse=True)
def _can_rehearse():
    if lacking := rehearsal.missing():
        pytest.fail(lacking, pytrace=False)


@pytest.fixture(scope="module")
def three():
    with rehearsal.rehearse(3) as fleet:
        yield fleet


@pytest.fixture
def fleet(three):
    """Three hosts on which nothing runs, before and after."""
    yield three
    for host in three.hosts:
        latest = host.axis / "launches/latest"
        if latest.exists() and not (latest / "exit").exists():
            (latest / "stop").touch()
            with suppress(FileNotFoundError, ProcessLookupError):
                os.killpg(int((latest / "pid").read_text()), 9)
            rehearsal.wait_until((latest / "exit").exists)
