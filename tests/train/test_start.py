"""A run that resumes reports how its schedule changed, and each row of metrics has the memory of the devices."""

import types

import jax
import numpy as np
import pytest

import optimizer
from config import preset
from startup.start import describe_rate_jump
from train import progress


@pytest.mark.parametrize("skipped, in_a_row, silent", [(0, 0, True), (2, 0, True), (2, 1, True), (3, 0, False)])
def test_a_skipped_step_does_not_change_the_schedule(skipped, in_a_row, silent):
    """The schedule counts updates. Catches a run that reports its own schedule as changed, or the reverse."""
    cfg = preset("tiny", **{"optim.warmup_steps": 40, "run.steps": 60})
    before = float(optimizer.learning_rate(cfg.optim, cfg.run.steps)(20 - 1 - min(skipped, 2) + in_a_row))
    state = optimizer.TrainState(None, None, 20, skipped, in_a_row)
    assert (describe_rate_jump(cfg, state, before) is None) == silent


def test_a_row_has_the_largest_memory_of_a_device(monkeypatch):
    """Catches the memory of one device of several, or of now instead of the peak, and a device that knows none."""
    known = [{"peak_bytes_in_use": 5, "bytes_in_use": 9}, {"peak_bytes_in_use": 7}, {}, None]
    fakes = [types.SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in known]
    for devices, want in ((fakes, {"peak_device_bytes": 7}), (fakes[2:], {}), (jax.local_devices(), {})):
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        assert progress.to_row({}, [np.float32(1)]) == {"loss": 1.0} | want
