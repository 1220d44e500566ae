"""Run tasks of EleutherAI's lm-evaluation-harness: https://github.com/EleutherAI/lm-evaluation-harness.

The harness turns the examples of a task into requests, and the answers into metrics. `Answerer` answers the requests.
"""

import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"TQDM_DISABLE": "1",  # no progress bars, because we print our own
               "DISABLE_MULTIPROC": "1"}  # do not fork a process with JAX's threads  # fmt: skip

import lm_eval
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evaluate.answering import Answerer
from utils import UserError, suggest

ROOT = Path(__file__).resolve().parents[1]
REPORTED = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")  # keys of results to report
DEFAULT_MAX_TOKENS = 256  # new tokens, if a task has no limit


class Adaptor(LM):
    """The harness's interface to a run. With several processes, each answers all requests, using one sharded model."""

    def __init__(self, answerer: Answerer):
        super().__init__()
        self.answerer = answerer

    def loglikelihood(self, requests):
        return self.answerer.loglikelihood([request.args for request in requests])

    def loglikelihood_rolling(self, requests):
        """Score whole texts in disjoint windows. Each window except the first has one token of context."""
        answerer, windows = self.answerer, []
        for (text,) in (request.args for request in requests):
            cut = get_rolling_token_windows(answerer.encode(text), answerer.prefix, answerer.max_tokens, context_len=1)
            windows.append([make_disjoint_window(one) for one in cut])
        pairs = [pair for of_text in windows for pair in of_text]
        scores = iter(answerer.score_pairs("whole texts", pairs))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests):
        return self.answerer.generate_texts(
            [(context, generation_settings(asked)) for context, asked in (r.args for r in requests)]
        )


def generation_settings(asked: dict) -> dict:
    """Convert a task's generation settings, whose names vary, to the settings of `generate.Request`."""
    how = normalize_gen_kwargs(asked, DEFAULT_MAX_TOKENS)
    temperature = float(how.get("temperature", 1.0)) if how["do_sample"] else 0.0
    stop = tuple(filter(None, handle_stop_sequences(how["until"], eos=None)))
    return {"tokens": how["max_gen_toks"], "temperature": temperature, "top_k": int(how.get("top_k", 0)),
            "top_p": float(how.get("top_p", 1.0)), "stop": stop}  # fmt: skip


@contextlib.contextmanager
def hf_evaluate_module() -> Iterator[None]:
    """Make `import evaluate` in tasks find Hugging Face's package of that name instead of this one."""
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != ROOT]
    spec, ours = importlib.machinery.PathFinder.find_spec("evaluate", elsewhere), sys.modules["evaluate"]
    sys.modules["evaluate"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield
    finally:
        sys.modules["evaluate"] = ours


def open_tasks(names: list[str], include_path: str) -> TaskManager:
    """Index the tasks of a directory and of the harness. Raises: UserError if a name or the directory is missing."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path}: no such directory")
    if include_path:
        tasks = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(tasks.all_subtasks):
            return tasks  # reading the harness's 14,000 names takes 10 s
    tasks = TaskManager(include_path=include_path or None)
    for name in names:
        if name not in tasks.all_tasks and not (name.endswith(".yaml") and Path(name).is_file()):
            raise UserError(f"--tasks {name}: no such task; {suggest(name, tasks.all_tasks)}")
    return tasks


def load(tasks: TaskManager, names: list[str]) -> list:
    """Load tasks and their data sets. Raises: UserError if a task cannot be loaded or runs unsafe code."""
    found = []
    for name in names:
        try:
            opened = tasks.load([name])
        except Exception as error:  # raised by the task's code, its file, or the download of its data set
            why = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
            remedy = ""
            if isinstance(error, ConnectionError):
                remedy = ("; run it once on a machine with a network and copy its HF_HOME here, or use a task with "
                          "local files")  # fmt: skip
            raise UserError(f"--tasks {name}: cannot load its data set or code ({why}){remedy}") from error
        if any(getattr(task, "UNSAFE_CODE", False) for task in opened["tasks"].values()):
            raise UserError(f"--tasks {name}: the task executes model-generated code, which is not supported")
        found += [*opened["groups"].values()] or [*opened["tasks"].values()]
    return found


def run_tasks(answerer: Answerer, tasks: list, limit: int = 0, num_fewshot: int | None = None) -> dict:
    """Answer every request of loaded tasks. Returns the REPORTED part of the harness's results, and its version."""
    with contextlib.redirect_stdout(sys.stderr):  # keep its prints out of the results on stdout
        found = simple_evaluate(
            Adaptor(answerer), tasks=tasks, limit=limit or None, num_fewshot=num_fewshot, log_samples=False,
            torch_random_seed=None, bootstrap_iters=1000)  # fmt: skip
    return {"lm_eval": lm_eval.__version__} | {name: found[name] for name in REPORTED if name in found}


def result_rows(found: dict) -> list[tuple]:
    """Return a row per metric of each task: task, metric, value, standard error, shots, examples."""
    table = []
    for task, values in found["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{kind}", "N/A")
            which = metric if kind == "none" else f"{metric} ({kind})"
            examples = found["n-samples"].get(task, {}).get("effective", "")
            table.append(
                (task, which, value, error if isinstance(error, float) else "", found["n-shot"].get(task, ""), examples)
            )
    return table
