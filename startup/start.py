"""Prepare the start of a run: trace the training step, and restore or initialize the training state."""

import math
from collections.abc import Callable
from pathlib import Path

import dataset
import optimizer
import sharding
from config import Config
from pipeline import fit
from train import checkpoint
from train.directory import check_saving_host, missing_rows, read_rows
from train.hosts.processes import Processes
from train.storage import BucketDirectory
from utils import is_main_process, log


def trace_step(cfg: Config, mesh):
    """Trace the training step without arrays. This reports invalid settings before any file changes."""
    fit.check(cfg.model, cfg.mesh, cfg.work)
    state = checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    size = cfg.data.batch_size
    batch = dataset.batch(cfg, 0, rows=sharding.own_rows(mesh, size))
    return optimizer.train_step(cfg, mesh).lower(state, sharding.put(batch, mesh, size))


def restore_or_init(cfg: Config, mesh, directory: Path | BucketDirectory, given_params: Callable, together: Processes):
    """Return the TrainState of a run's latest checkpoint, sharded over this mesh, or a new TrainState at step 0."""
    checkpoints = directory / "checkpoints"
    board, agreement = together.board, together.agreement
    step = board.call_on_first("step", lambda: checkpoint.latest_step(checkpoints, log))
    board.message.saved = step or 0
    keepers = board.gather("keeper", None if agreement.share_disk or step else checkpoint.read_saving_host(checkpoints))
    check_saving_host(directory, keepers, agreement.saving_host)
    state = load_state(step, cfg, mesh, checkpoints, given_params, agreement.share_disk)
    if step is not None:
        log(f"resumed    at step {int(state.step)} from {checkpoints}")
        if is_main_process() and (missing := missing_rows(directory, step)):
            log(f"record     {missing}")
        rows = [row for row in read_rows(directory) if (row["kind"], row["step"]) == ("train", step)]
        before = rows[-1].get("lr") if rows else None
        if isinstance(before, int | float) and (change := describe_rate_jump(cfg, state, before)):
            log(f"lr         {change}")
    return state


def describe_rate_jump(cfg: Config, state: optimizer.TrainState, before: float) -> str | None:
    """Describe how the learning rate jumps if the run resumes with a different schedule, or return None.

    before   the learning rate of the last step before the checkpoint
    """
    rate = lambda o, update: float(optimizer.learning_rate(o, cfg.run.steps)(update))
    step, updates = int(state.step), int(state.step) - int(state.skipped_steps)
    last = updates if int(state.skipped_in_a_row) else updates - 1
    if math.isclose(rate(cfg.optim, last), before, rel_tol=1e-3):  # float32, possibly on another machine
        return None
    after = rate(cfg.optim, updates)
    return f"{before:.2e} at step {step}, {after:.2e} after it: the schedule now ends at step {cfg.run.steps}"


def load_state_before(step: int, cfg: Config, mesh, checkpoints: Path, given_params: Callable) -> optimizer.TrainState:
    """Return the TrainState of the latest good checkpoint before a step, or a new TrainState at step 0."""
    earlier = [one.step for one in checkpoint.list_steps(checkpoints) if one.step < step and not one.find_fault()]
    return load_state(max(earlier, default=None), cfg, mesh, checkpoints, given_params)


def load_state(step: int | None, cfg: Config, mesh, checkpoints: Path, given_params: Callable, shared: bool = True):
    """Return the TrainState of a checkpoint, sharded over this mesh; step None: a new TrainState at step 0.

    given_params   (cfg, mesh) -> initial parameters, or None for random ones; an argument because `train` may not
                   import `weights`
    """
    if step is None:
        return optimizer.init(cfg, mesh, given_params(cfg, mesh))
    target = checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    return checkpoint.restore(checkpoints, target, step, shared)
