"""Measure and show progress: evaluate on the validation split, build metrics rows, and draw the progress bar."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import dataset
import sharding
from config import Config
from devices import peak_device_bytes
from train import guard
from train.interruptions import command
from utils import duration, is_main_process, log


def evaluate(cfg: Config, mesh, compiled, params, batches: int, moves: Callable[[], None] = lambda: None) -> dict:
    """Compute nats per token and bits per byte on `batches` batches of the validation split; 0: on all of it.

    In a mixture, also compute nats per token for each source, as loss/SOURCE. Every token has the same weight. Bits per
    byte are NaN if the number of text bytes per token is unknown, or if some tokens are not targets. `moves` is called
    after each batch, to show that the evaluation has not hung.
    """
    nats, tokens, size = Counter(), Counter(), cfg.data.batch_size
    for source, batch in dataset.evaluation_batches_by_source(cfg, batches, sharding.own_rows(mesh, size)):
        sums = compiled(params, sharding.put(batch, mesh, size))
        nats[source] += float(sums[0])
        tokens[source] += float(sums[1])
        moves()
    by_source = {f"loss/{source}": nats[source] / tokens[source] for source in tokens if source and tokens[source]}
    nats, tokens = nats.total(), tokens.total()
    bytes_per_token = dataset.bytes_per_token(dataset.open_corpus(cfg), objective=cfg.data.objective)
    return {
        "loss": nats / tokens,
        "bits_per_byte": nats / tokens / math.log(2) / bytes_per_token,
        "tokens": int(tokens),
        "full": batches == 0,
    } | by_source


def to_row(metrics: dict, losses: list) -> dict:
    """Convert the metrics of the last step to JSON. Only the loss is a mean, over the steps since the previous row."""
    not_here = ("cross_entropy", "skipped_in_a_row", "not_finite")
    row = {name: np.asarray(value).tolist() for name, value in metrics.items() if name not in not_here}
    if (peak := peak_device_bytes()) is not None:
        row["peak_device_bytes"] = peak
    row["loss"] = guard.mean_loss(losses)  # cross-entropy alone, in nats per token
    if "balance_loss" in row:
        row["balance_loss"] = float(np.mean(row["balance_loss"]))
        row["tokens_per_expert"] = [[round(n) for n in layer] for layer in row["tokens_per_expert"]]
    return row


def format_row(row: dict) -> str:
    mfu = f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
    return f"loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s{mfu}"


class StepLines:
    """Prints a line per metrics row, and after two steps the time to go, if that is more than `LONG_S`."""

    LONG_S = 60.0

    def __init__(self, steps: int, start: int):
        self.steps, self.start, self.last, self.first_s = steps, start, None, 0.0

    def add_step(self, step: int, loss) -> None:
        """Note that a step was started, and that `loss` is available once it is finished."""
        if step - self.start in (2, 3):  # the device is already busy with this step, so it does not wait for the host
            jax.block_until_ready(self.last)
            now = time.monotonic()
            left_s = (now - self.first_s) * (self.steps - self.start - 2)
            if step - self.start == 3 and left_s > self.LONG_S:
                each = f"{now - self.first_s:.2g} s per step"
                log(f"step {self.start + 2:>5}/{self.steps}  {each}, about {duration(left_s)} left")
            self.first_s = now
        self.last = loss

    def add_row(self, step: int, row: dict) -> None:
        log(f"step {step:>5}/{self.steps}  {format_row(row)}")


class StepBar(Progress):
    """A progress bar of training steps. It asks JAX which steps are finished, so that training never waits for it."""

    def __init__(self, steps: int, start: int, console: Console):
        self.started = deque()
        super().__init__(
            MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            TextColumn("ETA"), TimeRemainingColumn(), console=console, speed_estimate_period=math.inf,
        )  # fmt: skip
        self.task = self.add_task("taking the first steps", total=steps, completed=start)

    def add_step(self, step: int, loss) -> None:
        self.started.append((step, loss))

    def add_row(self, step: int, row: dict) -> None:
        self.update(self.task, description=format_row(row))

    def get_renderables(self):
        """Move the bar to the last finished step. Rich calls this ten times per second, in a thread."""
        with self._lock:
            while self.started and self.started[0][1].is_ready():
                self.update(self.task, completed=self.started.popleft()[0])
        return super().get_renderables()


@contextmanager
def progress_bar(cfg: Config, start: int) -> Iterator[StepLines | StepBar]:
    """Yield the object to report steps and rows to: a progress bar on a terminal, otherwise lines."""
    console = Console()
    if not (console.is_terminal and is_main_process()):
        yield StepLines(cfg.run.steps, start)
        return
    with StepBar(cfg.run.steps, start, console) as bar:
        yield bar


def format_result(result: dict) -> str:
    bits = "" if math.isnan(result["bits_per_byte"]) else f", {result['bits_per_byte']:.3f} bits/byte"
    of_tasks = "".join(f", {name} {value:.3f}" for name, value in result.items() if "/" in name)
    return f"{result['loss']:.3f} nats/token{bits} over {result['tokens']:,} tokens{of_tasks}"


def print_complete(cfg: Config, directory: Path, done: int, argv: list[str]) -> None:
    """Print that a run has finished all its steps, and the commands to continue or restart it."""
    log(f"{directory} is complete: {done} of {cfg.run.steps} steps taken.")
    log(f"  continue it:  {command(argv, {'run.steps': 2 * done})}")
    log(f"  start again:  {command(argv, restart=True)}    # deletes its results")
