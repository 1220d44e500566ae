"""A slow host is named, a busy one is not, and measuring costs almost nothing."""

import time

import pytest

from train.hosts import pace


@pytest.mark.parametrize("times_ms, found", [
    ({0: [10, 11], 1: [21, 20], 2: [10, 12]}, (1, 20, 10)),
    ({0: [21, 20], 1: [10, 11]}, (0, 20, 10)),  # with two hosts, the median is the faster one
    ({0: [10, 11], 1: [31, 14], 2: [10, 12]}, None),  # busy only for a while
    ({0: [10, 11], 1: [31], 2: [10, 12]}, None),  # one measurement is not enough
    ({0: [10, 11], 1: [], 2: [10, 12]}, None),
    ({0: [30, 31], 1: [30, 32], 2: [10, 10]}, None),  # one fast host does not make the others slow
    ({0: [10, 99]}, None),
])  # fmt: skip
def test_which_host_is_slow(times_ms, found):
    """Catches a host that is named because it was busy once, and a slow one of two that the mean hides."""
    assert pace.slowest(times_ms) == found


def test_the_measurement_is_short_and_rare():
    """Catches matmuls that never run, a program that is compiled each time, and a measurement at every step."""
    ours = pace.Pace()
    first = ours.measure()
    assert 0.05 < first < 100
    begin = time.monotonic()
    assert ours.measure() is None
    assert ours.due - begin > 0.9 * pace.SHARE * pace.ATTEMPTS * first / 1000
    assert pace.compile_matmuls() is pace.compile_matmuls()
