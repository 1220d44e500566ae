"""Measure and show progress: evaluate on the validation split, build metrics rows, and draw the progress bar."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import dataset
import sharding
from config import Config
from train import guard
from train.interruptions import command
from utils import duration, is_main_process, log


def evaluate(cfg: Config, mesh, compiled, params, batches: int, moves: Callable[[], None] = lambda: None) -> dict:
    """Compute nats per token and bits per byte on `batches` batches of the validation split; 0: on all of it.

    Every token has the same weight. Bits per byte are NaN if the number of text bytes per token is unknown, or if some
    tokens are not targets. `moves` is called after each batch, to show that the evaluation has not hung.
    """
    nats = tokens = 0.0
    size = cfg.data.batch_size
    for batch in dataset.evaluation_batches(cfg, batches, sharding.own_rows(mesh, size)):
        sums = compiled(params, sharding.put(batch, mesh, size))
        nats, tokens = nats + float(sums[0]), tokens + float(sums[1])
        moves()
    bytes_per_token = dataset.bytes_per_token(dataset.open_corpus(cfg), objective=cfg.data.objective)
    return {
        "loss": nats / tokens,
        "bits_per_byte": nats / tokens / math.log(2) / bytes_per_token,
        "tokens": int(tokens),
        "full": batches == 0,
    }


def to_row(metrics: dict, losses: list) -> dict:
    """Convert the metrics of the last step to JSON. Only the loss is a mean, over the steps since the previous row."""
    not_here = ("cross_entropy", "skipped_in_a_row", "not_finite")
    row = {name: np.asarray(value).tolist() for name, value in metrics.items() if name not in not_here}
    row["loss"] = guard.mean_loss(losses)  # cross-entropy alone, in nats per token
    if "balance_loss" in row:
        row["balance_loss"] = float(np.mean(row["balance_loss"]))
        row["tokens_per_expert"] = [[round(n) for n in layer] for layer in row["tokens_per_expert"]]
    return row


@contextmanager
def progress_bar(cfg: Config, start: int) -> Iterator:
    """Yield show(step, row), which updates a progress bar on a terminal and prints one line per row elsewhere."""
    console = Console()
    mfu = lambda row: f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
    words = lambda row: f"loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tokens/s{mfu(row)}"
    if not (console.is_terminal and is_main_process()):
        yield lambda step, row: log(f"step {step:>5}/{cfg.run.steps}  {words(row)}")
        return
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
               TextColumn("ETA"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("taking the first steps", total=cfg.run.steps, completed=start)
        yield lambda step, row: bar.update(task, completed=step, description=words(row))


def format_result(result: dict) -> str:
    bits = "" if math.isnan(result["bits_per_byte"]) else f", {result['bits_per_byte']:.3f} bits/byte"
    of_tasks = "".join(f", {name} {value:.3f}" for name, value in result.items() if "/" in name)
    return f"{result['loss']:.3f} nats/token{bits} over {result['tokens']:,} tokens{of_tasks}"


def print_complete(cfg: Config, directory: Path, done: int, argv: list[str]) -> None:
    """Print that a run has finished all its steps, and the commands to continue or restart it."""
    log(f"{directory} is complete: {done} of {cfg.run.steps} steps taken.")
    log(f"  continue it:  {command(argv, {'run.steps': 2 * done})}")
    log(f"  start again:  {command(argv, restart=True)}    # deletes its results")
