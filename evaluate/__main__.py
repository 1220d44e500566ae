"""Evaluate a run from the command line."""

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from config import Count, RunConfig, check
from config.fields import is_remote
from devices import use_devices
from generate.request import RunArguments
from utils import UserError, exit_status, is_main_process, parse_early


@dataclass(frozen=True)
class Arguments(RunArguments):
    """Evaluate a run on tasks, or compute its loss on the validation split of any tokens."""

    task: str = ""  # name of a task that python -m data.tasks lists
    tasks: str = ""  # comma-separated names of tasks of lm-evaluation-harness, or in include_path
    perplexity: str = ""  # directory of tokens, written by python -m data.prepare
    include_path: str = ""  # directory of additional task files (YAML)
    num_fewshot: int | None = None  # examples before each question; none: the default of the task
    limit: Count = 0  # maximum questions per task; 0: all
    batches: Count = 0  # for --perplexity: maximum number of batches; 0: the whole split
    batch: Count = 0  # texts per batch, over all devices; 0: 32, or for --perplexity the training batch size
    seq_len: Count = 0  # maximum tokens of a text; 0: as in training, or in the Hugging Face config.json
    bos: str = ""  # special token to put before each text, e.g. Llama's <|begin_of_text|>; empty: none
    # file that caches the model's responses, so that the same command resumes after an interruption; empty: for --task
    # RUN/predictions-TASK-STEP.jsonl, otherwise none
    cache: str = ""
    # evaluate every checkpoint of a run, also those that it saves later, until it is complete; results are also in
    # RUN/evaluations, so the same command continues after an interruption
    follow: bool = False
    json: bool = False  # print JSON instead of a table


HELP = """\
e.g. python -m evaluate runs/laptop --perplexity tokens/stdlib-bytes
     python -m evaluate runs/laptop --perplexity tokens/stdlib-bytes --follow   # as the run trains
     python -m evaluate runs/laptop --task stdlib_functions --limit 100
     python -m evaluate runs/laptop --tasks lambada_openai --limit 100   # needs extra-evaluate

Evaluate a run on tasks, or compute its loss on the validation split of any tokens."""


def parse(argv: list[str] | None) -> Arguments:
    args = tyro.cli(Arguments, args=argv, prog="python -m evaluate", description=HELP, use_underscores=True)
    check(args)
    return args


EARLY = parse_early(parse) if __name__ == "__main__" else None

from rich.console import Console
from rich.table import Table

import dataset
from evaluate import follow, task
from evaluate.answering import Answerer
from evaluate.perplexity import perplexity
from generate.runs import Run, open_run
from progress import print_to_stderr, show_progress
from train.directory import to_json
from train.hosts import processes
from train.hosts.processes import end_together, join


def evaluate_tasks(args: Arguments) -> dict:
    """Return the results of every task. Errors that need no device are raised first."""
    if not importlib.util.find_spec("lm_eval"):
        raise UserError("--tasks needs EleutherAI's lm-evaluation-harness; install it with: make extra-evaluate")
    from evaluate import harness

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    manager = harness.open_tasks(names, args.include_path)
    run = load_run(args)
    answerer = Answerer(run, args.batch or 32, args.bos, args.cache)
    with harness.hf_evaluate_module():
        results = harness.run_tasks(answerer, harness.load(manager, names), args.limit, args.num_fewshot)
    if not args.json and is_main_process():
        print_table(harness.result_rows(results), "task", "metric", "value", "stderr", "shots", "examples")
    return {"step": run.step} | results


def evaluate_task(args: Arguments) -> dict:
    """Return the metrics of a task of `data/tasks.py`, and the file with its predictions."""
    if is_remote(args.run) and not args.cache:
        raise UserError(f"--task on {args.run} writes the predictions to a file on this machine; set --cache FILE")
    asked = task.questions(which := task.open_task(args.task), args.limit)
    run = load_run(args)
    at = "" if run.step is None else f"-{run.step}"
    path = Path(args.cache or Path(args.run, f"predictions-{which.name}{at}.jsonl"))
    evaluator = task.Evaluator(run.cfg, run.mesh, run.encoding, args.batch or 32)
    with show_progress("examples", len(asked), say=print_to_stderr) as advance:
        found = evaluator.evaluate(which, asked, run.params, path, {"weights": run.digest}, advance)
    if not args.json and is_main_process():
        rows = [(which.name, *metric, len(asked)) for metric in found.items()]
        print_table(rows, "task", "metric", "value", "examples")
        print(f"predictions: {path}")
    return {"step": run.step, "task": which.name, "examples": len(asked), "predictions": str(path)} | found


def evaluate_perplexity(args: Arguments) -> dict:
    run = load_run(args)
    results = perplexity(run, args.perplexity, args.batches, args.batch)
    if not args.json and is_main_process():
        print_table([tuple(results.values())[:4]], *list(results)[:4])
    return {"step": run.step} | results


def print_table(rows: list[tuple], *columns: str) -> None:
    """Print rows under their column names. Numbers are right-aligned."""
    table = Table(box=None, header_style="")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if all(isinstance(row[number], str) for row in rows) else "right")
    for row in rows:
        table.add_row(*(f"{x:.4f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def load_run(args: Arguments) -> Run:
    """Open the run on the devices of all processes, each of which answers the same requests."""
    use_devices(args.devices, (processes.current or join(RunConfig())).board.count)
    return open_run(args.run, args.mesh, args.tokenizer, args.seq_len, args.step, texts=bool(args.tasks or args.task))


def follow_run(args: Arguments, evaluate: Callable[[Arguments], dict]) -> Iterator[dict]:
    """Yield the results of each checkpoint of a run that trains. Errors that need no checkpoint are raised first."""
    if args.step or args.cache or os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        raise UserError("--follow evaluates every checkpoint, in one process; omit --step, --cache and other hosts")
    if args.task:
        task.open_task(args.task)
    if args.perplexity:
        dataset.load(args.perplexity)
    only_speed = ("run", "step", "cache", "follow", "json", "mesh", "devices", "batch")
    of = {name: value for name, value in vars(args).items() if value and name not in only_speed}
    return follow.follow(args.run, of, lambda step: evaluate(dataclasses.replace(args, step=str(step))))


@end_together
@exit_status
def main(argv: list[str] | None = None) -> None:
    args = EARLY or parse(argv)
    kinds = {evaluate_task: args.task, evaluate_tasks: args.tasks, evaluate_perplexity: args.perplexity}
    chosen = [kind for kind, value in kinds.items() if value]
    if len(chosen) != 1:
        raise UserError("choose what to evaluate: one of --task NAME, --tasks NAMES and --perplexity TOKENS")
    for result in follow_run(args, chosen[0]) if args.follow else (chosen[0](args),):
        if args.json and is_main_process():
            print(json.dumps(to_json({"run": args.run} | result), indent=None if args.follow else 1), flush=True)


if __name__ == "__main__":
    sys.exit(main())
