"""A run that resumes reports how its learning-rate schedule changed."""

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
