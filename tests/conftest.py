"""Configure all tests: 8 simulated CPU devices, a cache for the programs of child processes, and no network."""

import os
import signal
import socket

import hypothesis

from devices import simulate_devices
from tests import extras, quick, rotation, seconds
from utils import cache_directory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set in background jobs; child processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
simulate_devices(8)
quick.compile_quickly()
# Child processes inherit these settings. Caches are outside the checkout.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(cache_directory(), "hypothesis"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(cache_directory(), "tests"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

from compile import ordered

jax.config.update("jax_numpy_rank_promotion", "raise")
assert jax.device_count() == 8  # starts JAX: otherwise a command that the first test calls might choose another number

# Use the same examples in every run, so that results are reproducible. No deadline, because the first example compiles.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None)
hypothesis.settings.load_profile("house")

_connect = socket.socket.connect


def _connect_to_this_machine(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
        raise OSError(f"tests may not use the network, but something connects to {address[0]}:{address[1]}")
    return _connect(self, address)


socket.socket.connect = _connect_to_this_machine


def pytest_addoption(parser):
    parser.addoption("--day", type=int, choices=rotation.NAMES, help="run only the tests of this weekday's rotation")


def pytest_itemcollected(item):
    """Skip a test whose extras are not installed, and mark tests that CI runs once a week with `rotation`, and those
    that `make test` leaves out because they take long with `long`."""
    needed = extras.extras_of(item)
    if item.get_closest_marker("repeat") or {*needed} - extras.LIGHT - {"tpu"}:
        item.add_marker(pytest.mark.rotation(day=rotation.day_of(item.nodeid, needed)))
    if seconds.is_long(item.nodeid):
        item.add_marker(pytest.mark.long)
    if why := extras.reason(needed):
        item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_modifyitems(config, items):
    """Start the longest test first, and select the tests of --day. Their packages must be installed, because a rotation
    that skips a test would not check it."""
    items.sort(key=lambda item: "README" not in item.nodeid)  # 14 minutes: started last, it would run alone at the end
    if day := config.option.day:
        selected = rotation.tests_of_day(items, day)
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected
        if needs := {needs for item in items if (needs := extras.reason(extras.extras_of(item)))}:
            raise pytest.UsageError(f"--day {day} {'; '.join(sorted(needs))}")


def pytest_report_header(config):
    if day := config.option.day:
        names = " ".join(rotation.extras_of_day(day)) or "none"
        return f"rotation: day {day} of 7, {rotation.NAMES[day]}; extras of the day: {names}"


@pytest.fixture
def as_on_accelerators(monkeypatch):
    """Compile programs as for accelerators, without the ordering of collectives on simulated devices, which also keeps
    XLA from merging them. Do not run these programs."""
    monkeypatch.setattr(ordered, "is_simulated", lambda mesh: False)


def pytest_terminal_summary(terminalreporter):
    """Print how many tests of --day ran, and the worst gradient error of each comparison with one device."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    if day := terminalreporter.config.option.day:
        ran = len({report.nodeid for report in reports})
        terminalreporter.write_line(f"rotation: day {day} of 7, {rotation.NAMES[day]}: {ran} tests ran")
    worst = [value for report in reports for name, value in report.user_properties if name == "worst gradient"]
    if worst:
        terminalreporter.section("parity: the largest gradient error of each case, relative to the largest entry")
    for ratio, case, name in sorted(worst, reverse=True):
        terminalreporter.write_line(f"{ratio:.1e}  {case:68}  {name}")
