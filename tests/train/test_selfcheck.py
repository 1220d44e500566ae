"""What the self-check of hosts reports, and what counts as a problem."""

import dataclasses
import json

import jax
import pytest

from train import selfcheck
from train.selfcheck import Row

GOOD = [Row(f"host0{i}", "3.11.7", "0.10.2", 4, "TPU v4", 90, 0.1 * i) for i in range(3)]


def test_ready_hosts_have_no_problem():
    """Catches a check that no host passes."""
    assert selfcheck.find_problems(GOOD) == []


@pytest.mark.parametrize(("change", "said"), [
    ({"python": "3.12.1"}, "host02 has python 3.12.1, but host00 has 3.11.7"),
    ({"jax": "0.10.1"}, "host02 has jax 0.10.1, but host00 has 0.10.2"),
    ({"devices": 3}, "host02 has devices 3, but host00 has 4"),
    ({"free_gib": 9}, "host02 has 9 GiB of free disk space, less than 10"),
    ({"clock_s": -2.5}, "the clock of host02 differs by -2.5 s from the clock of host00"),
])  # fmt: skip
def test_a_faulty_host_is_named(change, said):
    """Catches a missing chip, a wrong clock or a full disk that is not found, and a problem of the wrong host."""
    assert selfcheck.find_problems([*GOOD[:2], dataclasses.replace(GOOD[2], **change)]) == [said]


def test_every_device_takes_part(capsys, monkeypatch):
    """Catches a sum that misses a device, and a report that a program cannot read."""
    assert selfcheck.sum_over_devices()[0] == jax.device_count() == 8
    assert selfcheck.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in found["hosts"]] == [8] and found["problems"] == []
    monkeypatch.setattr(selfcheck, "sum_over_devices", lambda: (7.0, 0.1))
    assert selfcheck.main([]) == 1
    assert "PROBLEM: the sum over 8 devices is 7\n" in capsys.readouterr().out
