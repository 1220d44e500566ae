"""Evaluate a run as it trains: its loss on the validation split, and the metrics of the tasks in run.eval_tasks."""

from collections.abc import Callable

import tiktoken
from jax.sharding import Mesh

import dataset
import pipeline
from config import Config
from data import tokenizers
from data.tasks import Task
from evaluate import task
from evaluate.task import Question
from progress import show_progress
from train import progress
from train.directory import Metrics
from utils import UserError, log


def open_tasks(cfg: Config, limit: int = 1) -> list[tuple[Task, list[Question]]]:
    """Return the tasks in run.eval_tasks, and the first `limit` examples of each; 0: all.

    Raises: UserError if a task can't be evaluated, or if the run's tokenizer is unknown.
    """
    opened = [task.open_task(name.strip()) for name in cfg.run.eval_tasks.split(",") if name.strip()]
    if opened and not tokenizers.from_manifest(dataset.open_corpus(cfg).manifest):
        raise UserError(f"run.eval_tasks={cfg.run.eval_tasks}: the tokenizer of {cfg.data.path} is unknown, so answers "
                        "can't be decoded; prepare the tokens with a tokenizer")  # fmt: skip
    return [(one, task.questions(one, limit)) for one in opened]


class Validation:
    """Evaluates the parameters of a run as it trains.

    directory  of the run; a file there has the predictions of the latest evaluation
    moves      called after each batch and each example, to show that the evaluation has not hung
    """

    def __init__(self, cfg: Config, mesh: Mesh, encoding: tiktoken.Encoding | None, directory,
                 moves: Callable[[], None]):  # fmt: skip
        self.cfg, self.mesh, self.directory, self.moves = cfg, mesh, directory, moves
        self.compiled = pipeline.evaluate(cfg, mesh)
        self.asked = open_tasks(cfg, cfg.run.eval_batches * cfg.data.batch_size)
        self.evaluator = task.Evaluator(cfg, mesh, encoding)

    def loss(self, params, batches: int) -> dict:
        """Compute the loss on `batches` batches of the validation split; 0: on all of it."""
        if batches:
            return progress.evaluate(self.cfg, self.mesh, self.compiled, params, batches, self.moves)
        rows = dataset.rows_of(dataset.open_corpus(self.cfg).splits["val"], dataset.evaluation_data(self.cfg))
        count = -(-rows // self.cfg.data.batch_size)
        log(f"evaluating on the whole validation split: {count:,} batches")
        with show_progress("validation batches", count) as advance:
            moves = lambda: (self.moves(), advance())
            return progress.evaluate(self.cfg, self.mesh, self.compiled, params, 0, moves)

    def write(self, metrics: Metrics, params, step: int) -> dict:
        """Evaluate on run.eval_batches batches, write the result to metrics.jsonl, and print it."""
        found, run = self(params, step, self.cfg.run.eval_batches), self.cfg.run
        metrics.write("eval", step, **found)
        log(f"step {step:>5}/{run.steps}  validation {progress.format_result(found)}")
        return found

    def __call__(self, params, step: int, batches: int) -> dict:
        """Compute the loss, and the metrics of each task as TASK/METRIC."""
        found = self.loss(params, batches)
        for one, asked in self.asked:
            path = self.directory / f"predictions-{one.name}.jsonl"
            values = self.evaluator.evaluate(one, asked, params, path, {"step": step}, self.moves, resume=False)
            found |= {f"{one.name}/{name}": value for name, value in values.items()}
        return found
