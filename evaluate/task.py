"""Evaluate a model on a task of `data/tasks.py`: answer the prompts of its validation split, and compute its metrics.

Each answer is a row of a file of JSON lines, in the order of the examples, so an interrupted evaluation can resume. The
metrics are computed from these rows only: they don't depend on the mesh, unless rounding changes a predicted token.

{"of": {"task": "stdlib_functions", "examples": 128, "targets": "5e1f..", "weights": "9c0a..", ..}}
{"input": "def f(x):", "target": " return x", "prediction": " return y", "exact_match": 0.0}
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import tiktoken
from jax.sharding import Mesh

from config import Config, WorkConfig, replace
from data import tasks, tokenizers
from data.tasks import Task
from evaluate import metrics
from evaluate.answers import append_row, begin_rows, resume_rows
from evaluate.scoring import Scorer
from generate.engine import Engine, Job
from generate.request import Settings
from generate.texts import positions
from utils import UserError

GREEDY = Settings(temperature=0)
LOSSES = ("loss", "bits_per_byte")  # metrics that `--perplexity` computes


def open_task(name: str) -> Task:
    """Return a task. Raises: UserError if it doesn't exist, or if none or one of its metrics can't be computed."""
    task = tasks.get(name)
    if not text_metrics(task):
        raise UserError(f"task {name!r} has only {' and '.join(task.metric_names)}, which --perplexity computes; use a "
                        "task with a metric of answers, such as exact_match")  # fmt: skip
    metrics.check_packages(task.metric_names)
    return task


def text_metrics(task: Task) -> list[str]:
    return [name for name in task.metric_names if name not in LOSSES]


@dataclasses.dataclass(frozen=True)
class Question:
    """An example of a task, as texts."""

    input: str
    target: str
    choices: tuple[str, ...] = ()  # with the metric accuracy: the texts to choose from


def questions(task: Task, limit: int = 0) -> list[Question]:
    """Return the first `limit` examples of a task's validation split; 0: all.

    Raises: UserError if there is none, or if one has no prompt and answer, or no choices to compute the accuracy.
    """
    found = []
    for document in itertools.islice(tasks.documents(task, "val"), limit or None):
        if not {"prompt", "answer"} <= set(document):
            raise UserError(f"task {task.name!r} has no targets: a document has {', '.join(document)}, but metrics of "
                            "answers need prompt and answer (see `rekey`)")  # fmt: skip
        one = Question(document["prompt"], tasks.answer_text(document), tuple(document.get("choices", ())))
        if metrics.LIKELIHOOD in task.metrics and (one.target not in one.choices or not all(one.choices)):
            raise UserError(f"task {task.name!r}: the metric accuracy needs choices with at least one character, and "
                            f"the answer among them; got {list(one.choices)} and {one.target!r}")  # fmt: skip
        found.append(one)
    if not found:
        raise UserError(f"task {task.name!r} has no example in its validation split; raise its val_share")
    return found


class Evaluator:
    """Evaluates a model on tasks, on any mesh. Its functions are compiled once, also if the parameters change.

    rows   texts at a time, over all devices
    """

    def __init__(self, cfg: Config, mesh: Mesh, encoding: tiktoken.Encoding, rows: int = 32):
        self.cfg, self.mesh = replace(cfg, work=WorkConfig()), mesh
        self.encoding, self.rows, self.max_tokens = encoding, rows, cfg.data.seq_len

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.cfg, None, self.mesh, vocabulary=self.encoding.n_vocab, end=self.encoding.eot_token,
                      slots=self.rows, context=positions(self.cfg.data), piece=min(64, self.max_tokens),
                      unused_ids=tokenizers.unused_ids(self.encoding))  # fmt: skip

    @functools.cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.cfg, None, self.mesh, self.rows)

    def evaluate(self, task: Task, asked: list[Question], params, path: Path, of: dict,
                 advance: Callable[[], None] = lambda: None, resume: bool = True) -> dict[str, float]:  # fmt: skip
        """Return the metrics of a task.

        of       what determines the answers besides the questions, such as a hash of the parameters
        advance  called after each example
        resume   keep the rows that are in the file already, instead of replacing the file
        Raises: UserError if the file has answers to other questions or of another model.
        """
        names = text_metrics(task)
        texts = json.dumps([dataclasses.astuple(question) for question in asked])
        of = {"task": task.name, "examples": len(asked), "targets": hashlib.sha256(texts.encode()).hexdigest(),
              "tokenizer": tokenizers.fingerprint(self.encoding), "seq_len": self.max_tokens} | of  # fmt: skip
        fields = {"input", "target", *names} - {"bleu"}
        rows = resume_rows(path, of, fields, str(path)) if resume else begin_rows(path, of, str(path))
        if [(row["input"], row["target"]) for row in rows] != [(q.input, q.target) for q in asked[: len(rows)]]:
            raise UserError(f"{path} was changed: it has other inputs or targets than the task; delete it")
        own = task.own_metrics
        rows = [row | metrics.own_scores(own, row["target"], row["prediction"]) for row in rows] if own else rows
        left = asked[len(rows) :]
        predictions = choices = itertools.repeat(None)
        if {*names} != {metrics.LIKELIHOOD}:
            predictions = self.generate(params, left, self.room(asked))
        if metrics.LIKELIHOOD in names:
            choices = self.rank(params, left)
        for question, prediction, choice in zip(left, predictions, choices, strict=False):
            row = {"input": question.input, "target": question.target, "prediction": prediction, "choice": choice}
            row |= metrics.score_example(names, question.target, prediction, choice)
            row |= metrics.own_scores(own, question.target, prediction)
            append_row(path, row := {name: value for name, value in row.items() if value is not None})
            rows.append(row)
            advance()
        return metrics.summarize(names, rows)

    def encode(self, text: str) -> list[int]:
        return tokenizers.encode(self.encoding, text.encode()).tolist()

    def room(self, asked: list[Question]) -> int:
        """Return the maximum number of new tokens: the longest target and its end, but at most half of the context."""
        longest = max(len(self.encode(question.target)) for question in asked)
        return max(1, min(longest + 1, self.max_tokens if self.cfg.data.input_len else self.max_tokens // 2))

    def prompt_ids(self, text: str, room: int) -> list[int]:
        """Encode a text after the end-of-text token, and cut it from the left so that `room` more tokens fit."""
        ids, end, most = self.encode(text), self.encoding.eot_token, self.cfg.data.input_len
        if most:  # the inputs end with end of text, which also starts the decoder
            return [*ids[max(0, len(ids) - (most - 1)) :], end, end]
        return [end, *ids[max(0, len(ids) - (self.max_tokens - 1 - room)) :]]

    def generate(self, params, asked: list[Question], room: int) -> Iterator[str]:
        """Yield the answer to each input, in order. Each of its tokens is the most likely one."""
        self.engine.load(params)
        try:
            jobs = [self.engine.submit(Job(self.prompt_ids(one.input, room), GREEDY, room)) for one in asked]
            for job in jobs:
                while not job.ended:
                    self.engine.step()
                yield self.encoding.decode_bytes([token.id for token in job.tokens]).decode(errors="replace")
        finally:
            self.engine.load(None)

    def rank(self, params, asked: list[Question]) -> Iterator[str]:
        """Yield the choice with the highest probability after each input."""
        self.scorer.params = params
        for begin in range(0, len(asked), self.rows):
            some, pairs = asked[begin : begin + self.rows], []
            for question in some:
                choices = [self.encode(choice) for choice in question.choices]
                prompt = self.prompt_ids(question.input, max(map(len, choices)))
                pairs += [(prompt, choice) for choice in choices]
            scores, place = dict(self.scorer.score(pairs)), itertools.count()
            for question in some:
                logprobs = [scores[next(place)][0] for _ in question.choices]
                yield question.choices[logprobs.index(max(logprobs))]
