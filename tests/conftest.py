"""What every test stands on: 8 simulated CPU devices, runs on one of them whose programs are kept, no network."""

import os
import signal
import socket

import hypothesis

from devices import cache_directory, simulate_devices
from tests import extras, quick, rotation

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background; processes that tests start would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
simulate_devices(8)
quick.compile_quickly()
# Settings that processes started by a test inherit; what is kept between runs is kept outside the checkout.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(cache_directory(), "hypothesis"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(cache_directory(), "tests"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

from xla import ordered

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a commit passes or does not. No deadline: the first example compiles.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None)
hypothesis.settings.load_profile("house")

_connect = socket.socket.connect


def _connect_to_this_machine(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
        raise OSError(f"tests have no network; something connects to {address[0]}:{address[1]}")
    return _connect(self, address)


socket.socket.connect = _connect_to_this_machine


def pytest_addoption(parser):
    parser.addoption("--day", type=int, choices=rotation.NAMES, help="run only the tests of this weekday's rotation")


def pytest_itemcollected(item):
    """Skip a test whose extras are not installed; mark `rotation` on what CI runs once a week."""
    needed = extras.of(item)
    if item.get_closest_marker("repeat") or {*needed} - extras.LIGHT - {"tpu"}:
        item.add_marker(pytest.mark.rotation(day=rotation.day_of(item.nodeid, needed)))
    if why := extras.reason(needed):
        item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_modifyitems(config, items):
    """Start the longest test first. Keep the tests of a day, whose packages must be installed: a rotation that skips a
    test would not check it."""
    items.sort(key=lambda item: "README" not in item.nodeid)  # 14 minutes: started last, it would run alone at the end
    if day := config.option.day:
        kept = rotation.of_day(items, day)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        if needs := {needs for item in items if (needs := extras.reason(extras.of(item)))}:
            raise pytest.UsageError(f"--day {day} {'; '.join(sorted(needs))}")


def pytest_report_header(config):
    if day := config.option.day:
        names = " ".join(rotation.extras_of_day(day)) or "none"
        return f"rotation: day {day} of 7, {rotation.NAMES[day]}; extras of the day: {names}"


@pytest.fixture
def as_on_accelerators(monkeypatch):
    """Programs in the form that accelerators compile, which are not to be run: without what orders collectives on
    simulated devices, and keeps XLA from merging them."""
    monkeypatch.setattr(ordered, "simulated", lambda mesh: False)


def pytest_terminal_summary(terminalreporter):
    """Print how many tests of the day ran, and the worst gradient of each test that compares with one device."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    if day := terminalreporter.config.option.day:
        ran = len({report.nodeid for report in reports})
        terminalreporter.write_line(f"rotation: day {day} of 7, {rotation.NAMES[day]}: {ran} tests ran")
    found = [value for report in reports for name, value in report.user_properties if name == "worst gradient"]
    if found:
        terminalreporter.section("parity: the worst gradient of each case, as a share of its largest entry")
    for ratio, case, name in sorted(found, reverse=True):
        terminalreporter.write_line(f"{ratio:.1e}  {case:68}  {name}")
