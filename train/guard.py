"""Monitor the training step: report skipped steps, write gradient statistics on request, and replay one step.

A step whose loss or gradient is not finite changes only the counters; that rule is in `optimizer.train_step`.
"""

import math
from collections import deque

import numpy as np

import dataset
import optimizer
import sharding
from config import Config
from utils import UserError, log


def mean_loss(losses: list) -> float:
    """Return the mean of the finite losses, so that a skipped step does not hide the others; NaN if none is finite."""
    finite = [float(x) for x in losses if np.isfinite(x)]
    return float(np.mean(finite)) if finite else math.nan


class SkipWatch:
    """Reports skipped steps, and stops the run after LIMIT of them in a row.

    It checks a step only LAG steps later, or when a row of metrics is due. By then the result is ready, so devices do
    not wait for the check, and all processes stop at the same step.
    """

    LAG = 10
    LIMIT = 10

    def __init__(self, cfg: Config, write):
        """`write(kind, step, **values)` is called for each skipped step."""
        self.cfg, self.write, self.waiting = cfg, write, deque()
        self.lag = math.inf if cfg.optim.outer else self.LAG  # reading makes the replicas wait for each other

    def add_step(self, taken: int, values: dict) -> None:
        self.waiting.append((taken, values))
        self.check_pending(self.lag)

    def check_pending(self, lag: float = 0) -> None:
        """Check all but the latest `lag` steps. Raises: UserError after LIMIT skipped steps in a row."""
        while len(self.waiting) > lag:
            taken, values = self.waiting.popleft()
            if in_a_row := int(values["skipped_in_a_row"]):
                self._report(taken, values, in_a_row)

    def _report(self, taken: int, values: dict, in_a_row: int) -> None:
        bad = np.array(list(optimizer.layer_parameters(self.cfg)))[np.asarray(values["not_finite"])].tolist()
        loss, norm, total = float(values["loss"]), float(values["grad_norm"]), int(values["skipped_steps"])
        why = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        if bad:
            why += f"; first gradient that is not finite: {bad[0]}"
        if len(bad) > 1:  # the backward pass reached the last one first
            why += f"; {len(bad) - 1} more, the last: {bad[-1]}"
        first, last = (bad[0], bad[-1]) if bad else (None, None)
        self.write("skip", taken, loss=loss, grad_norm=norm, skipped_steps=total, bad=len(bad), first=first, last=last)
        log(f"step {taken:>5}/{self.cfg.run.steps}  skipped: {why} (skipped so far: {total})")
        if in_a_row >= self.LIMIT:
            first, o, run = taken - in_a_row + 1, self.cfg.optim, self.cfg.run
            raise UserError(
                f"steps {first} to {taken} were skipped, {in_a_row} in a row. At step {taken}, {why}. The parameters "
                f"have not changed since step {first - 1}. Inspect one with --replay {first}; if the batches are the "
                "cause, skip them with --data.skip. Otherwise start another run, with another --run.name and a lower "
                f"--optim.lr (now {o.lr}), more --optim.warmup_steps (now {o.warmup_steps}), a smaller "
                f"--optim.clip_norm (now {o.clip_norm}), or --model.precision float32. With --init-from "
                f"{run.dir}/{run.name} it starts from the parameters of the latest checkpoint"
            )


class GradientStats:
    """Writes gradient statistics for some steps, on request: norms per layer, and the gradient noise scale."""

    def __init__(self, cfg: Config, mesh, write):
        self.cfg, self.run, self.write = cfg, cfg.run, write
        self.norms = self.noise = None
        if self.run.gradient_stats_every:
            self.norms = optimizer.layer_norms(cfg, mesh)
            try:
                self.noise = optimizer.noise_scale(cfg, mesh)
            except UserError as error:
                log(f"noise      gradient noise scale not logged: {error}")

    def write_due(self, taken: int, state, batch, skips: SkipWatch) -> None:
        """Write the statistics due at step `taken`, the next step. `batch` is already sharded over the mesh."""
        every = self.run.gradient_stats_every
        if not every or taken % every:
            return
        skips.check_pending()  # rows are written in the order of their steps
        self.write("norms", taken, **self.norms(state, batch))
        if self.noise:
            whole = dataset.batch(self.cfg, taken - 1)  # unsharded: its chunks are sharded differently than in a step
            self.write("noise", taken, **self.noise(state.params, whole, state.step))


# Replay ---------------------------------------------------------------------------------------------------------------


def replay(cfg: Config, mesh, state: optimizer.TrainState, rows: list[dict]) -> None:
    """Train from `state` to step run.replay, print its norms and loss, and compare the loss with the metrics in `rows`.

    A row has the mean loss of the steps since the previous row, so this repeats all steps up to the step of that row.
    """
    start, wanted, size = int(state.step), cfg.run.replay, cfg.data.batch_size
    ends = [row["step"] for row in rows if row["kind"] == "train"]
    stop = min((end for end in ends if end >= wanted), default=wanted)
    begin = max((end for end in ends if end < wanted), default=0)
    step_function, losses = optimizer.train_step(cfg, mesh), {}
    for step in range(start, stop):
        batch = sharding.put(dataset.batch(cfg, step, rows=sharding.own_rows(mesh, size)), mesh, size)
        norms = optimizer.layer_norms(cfg, mesh)(state, batch) if step + 1 == wanted else None
        state, values = step_function(state, batch)
        losses[step + 1] = float(values["cross_entropy"])
        if norms:
            _print_norms(cfg, norms)
            log(f"step {wanted}: loss {losses[wanted]!r}, gradient norm {float(values['grad_norm'])!r}"
                + (", skipped" if int(values["skipped_in_a_row"]) else ""))  # fmt: skip
    logged = next((row.get("loss") for row in rows if row["kind"] == "train" and row["step"] == stop), "missing")
    if logged == "missing" or begin < start:
        return log("logged: metrics.jsonl has no row for this step, so there is nothing to compare with")
    again = mean_loss([losses[step] for step in range(begin + 1, stop + 1)])
    of = f"loss of step {wanted}" if stop == begin + 1 else f"mean loss of steps {begin + 1} to {stop}"
    logged = math.nan if logged is None else logged
    if again == logged or (math.isnan(again) and math.isnan(logged)):
        log(f"logged: the {of} is {logged!r}, bit-identical")
    else:
        log(f"logged: the {of} was {logged!r}, but is {again!r} now; did mesh, machine, version or --run.steps change?")


def _print_norms(cfg: Config, norms: dict) -> None:
    """Print one line for each parameter of each layer, in the order of the forward pass."""
    columns = {kind: np.concatenate([np.ravel(x) for x in of.values()]) for kind, of in norms.items()}
    places = optimizer.layer_parameters(cfg)
    width = max(map(len, places))
    log(f"{'norm of':{width}}" + "".join(f"{kind:>13}" for kind in columns))
    for name, place in places.items():
        log(f"{name:{width}}" + "".join(f"{column[place]:13.6g}" for column in columns.values()))
