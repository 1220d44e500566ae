"""Evaluate a run from the command line."""

import dataclasses
import importlib.util
import json
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from config import Count, MeshConfig, MeshFlag, RunConfig, check
from devices import is_main_process, use_devices
from errors import UserError, exit_status
from evaluate import show
from evaluate.answering import Answerer
from evaluate.perplexity import perplexity
from generate.runs import Run, open_run
from train.directory import to_json
from train.processes import end_together, join


@dataclass(frozen=True)
class Arguments:
    """What a run is worth: in tasks of lm-evaluation-harness, or in nats on the validation split of any tokens."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]  # training's, or made by weights from-hf
    step: str = ""  # checkpoint to read: its number, or best, of the lowest validation loss; empty: the newest
    tasks: str = ""  # names with commas between, of the harness's own or of files in include_path
    perplexity: str = ""  # directory of tokens, written by python -m data.prepare
    include_path: str = ""  # folder of task files, YAML, beside the harness's own
    num_fewshot: int | None = None  # examples before each question; none: as many as the task says
    limit: Count = 0  # most questions of each task; 0: all
    batches: Count = 0  # of --perplexity: most batches; 0: the whole split
    batch: Count = 0  # texts at once, over all devices; 0: 32, and of --perplexity what the run was trained with
    seq_len: Count = 0  # most tokens of a text; 0: what the run was trained with, or its Hugging Face config.json says
    tokenizer: str = ""  # for a run that knows none: a tokenizer.json, a file of ranks, or bytes
    bos: str = ""  # special token to put before each text, as Llama's <|begin_of_text|>; empty: none
    cache: str = ""  # file that keeps the answers, so that the same command goes on after a kill
    json: bool = False  # print JSON instead of a table
    # devices along each of data, stage, fsdp, expert, context, tensor
    mesh: MeshFlag = dataclasses.field(default_factory=MeshConfig)
    devices: Count = 0  # simulate this many CPU devices; 0: work on those there are


HELP = """\
e.g. python -m evaluate runs/laptop --perplexity tokens/stdlib-bytes
     python -m evaluate runs/laptop --tasks lambada_openai --limit 100   # needs extra-evaluate

Say what a run is worth: in tasks of lm-evaluation-harness, or in nats on the validation split of any tokens."""


def evaluate_tasks(args: Arguments) -> dict:
    """Every task's numbers. What needs no device is refused first."""
    if not importlib.util.find_spec("lm_eval"):
        raise UserError("--tasks needs EleutherAI's lm-evaluation-harness: make extra-evaluate")
    from evaluate import harness

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    manager = harness.open_tasks(names, args.include_path)
    run = load_run(args)
    answerer = Answerer(run, args.batch or 32, args.bos, args.cache)
    with harness.hf_evaluate_module():
        found = harness.run_tasks(answerer, harness.load(manager, names), args.limit, args.num_fewshot)
    if not args.json and is_main_process():
        show.table(harness.result_rows(found), "task", "metric", "value", "stderr", "shots", "examples")
    return {"step": run.step} | found


def evaluate_perplexity(args: Arguments) -> dict:
    run = load_run(args)
    found = perplexity(run, args.perplexity, args.batches, args.batch)
    if not args.json and is_main_process():
        show.table([tuple(found.values())[:4]], *list(found)[:4])
    return {"step": run.step} | found


def load_run(args: Arguments) -> Run:
    """The run, on the devices of all processes: each answers the same requests."""
    use_devices(args.devices, join(RunConfig()).board.count)
    return open_run(args.run, args.mesh, args.tokenizer, args.seq_len, args.step, texts=bool(args.tasks))


@end_together
@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m evaluate", description=HELP, use_underscores=True)
    check(args)
    if bool(args.tasks) == bool(args.perplexity):
        raise UserError("say what to measure: either --tasks NAMES or --perplexity TOKENS")
    found = {"run": args.run} | (evaluate_tasks(args) if args.tasks else evaluate_perplexity(args))
    if args.json and is_main_process():
        print(json.dumps(to_json(found), indent=1))


if __name__ == "__main__":
    sys.exit(main())
