"""The small run that the tests of faults share: start it, stop it at a step, and compare it."""

import contextlib
import json
import shlex
import signal
from pathlib import Path

import pytest

from tests.test_training import run, snapshot
from train.directory import Metrics

__all__ = ["EVERY", "FLAGS", "ROOT", "STEPS", "flags", "run", "signal_at_step", "snapshot", "trained_steps"]
ROOT = Path(__file__).parents[2]
STEPS, EVERY = 60, 4  # optimizer steps of the run, steps between its checkpoints
FLAGS = shlex.split(  # the model of test_training.py, to reuse its compiled programs
    "tiny --model.n_layers 3 --model.dense_prefix 0 --model.moe_every 1 --model.attention gqa --model.n_shared 0 "
    "--work.gather step "
    f"--optim.lr 0.01 --run.name small --run.steps {STEPS} --run.log_every 1 --run.eval_every 10 --run.eval_batches 1 "
    f"--run.checkpoint_every {EVERY}"
)


def flags(home, runs):
    return [*FLAGS, "--data.path", str(home / "tokens"), "--run.dir", str(runs)]


def trained_steps(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["kind"] == "train"]


@contextlib.contextmanager
def signal_at_step(step, number):
    """Send a signal as soon as the row of a step is written."""
    write = Metrics.write

    def write_and_signal(self, kind, row_step, **values):
        write(self, kind, row_step, **values)
        if (kind, row_step) == ("train", step - 1):
            signal.raise_signal(number)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Metrics, "write", write_and_signal)
        yield
