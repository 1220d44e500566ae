"""Define tasks: a source, preprocessors for its documents, a tokenizer, and the targets that count in the loss.

`python -m data.tasks` lists them, and `python -m data.tasks NAME` prints a few decoded examples. A document is a dict
of strings. A preprocessor takes one document and yields any number of documents. The last preprocessor yields either
`text`, where all targets count, or `prompt` and `answer`, where only the targets in the answer count. With `choices`, a
list of strings that contains the answer, the metric `accuracy` checks whether the model finds the answer most likely.

Source: seqio, in the T5X paper, arXiv:2203.17189, section 3.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import tyro

from config.fields import parse_objectives
from data import prepare, sources, tokenizers, units
from data.reading import objectives
from data.shards import SPLITS
from utils import UserError, exit_status, suggest

Document = dict[str, str]  # but `choices` is a list of strings, and with it `answer` may be an index
Preprocessor = Callable[[Document], Iterator[Document]]
Metric = Callable[[str, str], float]  # your own: the score of a target and a prediction; the mean is the result
# The first two are measured as in training; `evaluate.metrics` computes the others from decoded text.
METRICS = ("loss", "bits_per_byte", "exact_match", "token_f1", "bleu", "rouge1", "rouge2", "rougeL", "accuracy")
DIVIDED_TOKENS = 200  # tokens of a document that `show` divides into inputs and targets


@dataclass(frozen=True)
class Task:
    """A named recipe that turns a source into examples."""

    name: str
    about: str  # one sentence
    source: str | sources.Rows  # as for `python -m data.prepare`, or texts or dicts, or a function that returns them
    preprocessors: tuple[Preprocessor, ...] = ()
    tokenizer: str = "bytes"
    val_share: float = 0.05  # fraction of documents held out, chosen by a hash of their names
    metrics: tuple[str | Metric, ...] = ("loss",)  # metrics to compare models by: names, or your own functions
    text_field: str = "text"
    where: str = field(default="", compare=False)  # file and line where it was registered

    def __post_init__(self):
        if unknown := [one for one in self.metrics if not callable(one) and one not in METRICS]:
            raise UserError(f"task {self.name!r}: unknown metric {unknown[0]!r}; {suggest(unknown[0], METRICS)}")
        for name in self.own_metrics:
            if name in (*METRICS, "input", "target", "prediction", "choice") or not name.isidentifier():
                raise UserError(f"task {self.name!r}: the metric function {name!r} needs another name, because results "
                                "are stored under it; define it with `def`")  # fmt: skip
        if len({*self.metric_names}) < len(self.metrics):
            raise UserError(f"task {self.name!r}: two metrics have one name: {', '.join(self.metric_names)}")
        if hasattr(self.source, "__next__"):
            raise UserError(f"task {self.name!r}: its source is a {type(self.source).__name__}, which can be read only "
                            "once, and each split reads it; pass the function that returns it, or a list")  # fmt: skip
        if not 0 < self.val_share < 1:
            raise UserError(f"task {self.name!r}: val_share={self.val_share} must be between 0 and 1")

    @property
    def own_metrics(self) -> dict[str, Metric]:
        return {_name_of(one): one for one in self.metrics if callable(one)}

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(_name_of(one) for one in self.metrics)


def _name_of(one: object) -> str:
    return one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__)


class Example(NamedTuple):
    """The tokens of a document after an end-of-text token, and the weight of each as a target."""

    tokens: np.ndarray  # int32; the first is the tokenizer's end of text
    weights: np.ndarray  # float32, same length; the first is 0


TASKS: dict[str, Task] = {}


def add(task: Task) -> Task:
    """Register a task. Raises: UserError if the name is taken, with the file and line of the other task."""
    caller = inspect.stack()[1]
    if task.name in TASKS:
        raise UserError(f"task {task.name!r} exists (registered at {TASKS[task.name].where}); choose another name at "
                        f"{caller.filename}:{caller.lineno}")  # fmt: skip
    TASKS[task.name] = Task(**vars(task) | {"where": f"{caller.filename}:{caller.lineno}"})
    return TASKS[task.name]


def get(name: str) -> Task:
    """Return a task by name. Raises: UserError for an unknown name, with the nearest known one."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; {suggest(name, TASKS)}")
    return TASKS[name]


def documents(task: Task, split: str) -> Iterator[Document]:
    """Yield the preprocessed documents of a split. Raises: UserError for text that is not UTF-8."""
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; use {' or '.join(SPLITS)}")
    for name, fields in read_fields(task):
        if units.split_of(name, task.val_share) != split:
            continue
        processed = iter([{"name": name} | fields])
        for step in task.preprocessors:
            processed = itertools.chain.from_iterable(map(step, processed))
        yield from processed


def read_fields(task: Task) -> Iterator[tuple[str, Document]]:
    """Yield the name and the fields of each document of a source: the text, and all fields of your own rows."""
    if not isinstance(task.source, str):
        for name, fields in sources.read_rows(task.source):
            yield name, fields | ({"text": fields[task.text_field]} if task.text_field in fields else {})
        return
    for one in sources.read_documents(task.source, task.text_field):
        try:
            yield one.name, {"text": one.text.decode()}
        except UnicodeDecodeError as error:
            raise UserError(f"task {task.name!r}: {one.name}: not UTF-8: {error}") from error


def answer_text(document: Document) -> str:
    answer = document.get("answer", "")
    return document["choices"][answer] if isinstance(answer, int) else answer


def examples(task: Task, split: str) -> Iterator[Example]:
    """Encode the documents of a split. Special tokens that appear in them are treated as text."""
    encoding = tokenizers.load(task.tokenizer)
    return (encode(encoding, *texts_of(task, document)) for document in documents(task, split))


def texts_of(task: Task, document: Document) -> tuple[str, str]:
    """Return the prompt, or "", and the targets of a document. Raises: UserError if it has none."""
    if "text" in document:
        texts = "", document["text"]
    elif {"prompt", "answer"} <= set(document):
        texts = document["prompt"], answer_text(document)
    else:
        raise UserError(f"task {task.name!r}: a document has {', '.join(document)}; it needs text, or prompt and "
                        "answer (see `rekey`)")  # fmt: skip
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"task {task.name!r}: a document has {type(text).__name__} where it needs text")
    return texts


def to_bytes(text: str) -> bytes:
    return text.encode(errors="replace")  # JSON allows a lone surrogate, UTF-8 doesn't


def encode(encoding, prompt: str, targets: str) -> Example:
    ids = [tokenizers.encode(encoding, to_bytes(text)) for text in (prompt, targets)]
    weights = np.repeat(np.float32([0, 0, 1]), [1, *map(len, ids)])
    return Example(np.concatenate([[encoding.eot_token], *ids]).astype(np.int32), weights)


def check(task: Task) -> tuple[list[str], list[str]]:
    """Read all documents of a task. Return a line about each split, and a line about each fault."""
    encoding, lines, faults, train = tokenizers.load(task.tokenizer), [], {}, set()
    for split in SPLITS:
        lengths = []
        for texts in (texts_of(task, document) for document in documents(task, split)):
            tokens, weights = encode(encoding, *texts)
            decoded = [encoding.decode_bytes(tokens[1:][weights[1:] == w].tolist()) for w in (0, 1)]
            found = {
                "have no targets": not weights.any(),
                "are in train too; drop them from one of the splits": split == "val" and texts in train,
                f"change when {task.tokenizer} encodes and decodes them": decoded != [*map(to_bytes, texts)],
            }
            for fault in (fault for fault, is_there in found.items() if is_there):
                faults.setdefault(f"examples of {split} {fault}", []).append("".join(texts)[:60])
            lengths.append(len(tokens) - 1)
            if split == "train":
                train.add(texts)
        if lengths:
            lines.append(f"{split}: {len(lengths):,} examples, {sum(lengths):,} tokens, from {min(lengths):,} to "
                         f"{max(lengths):,} in an example")  # fmt: skip
        else:
            faults[f"examples are in {split}: change val_share={task.val_share}, or the source"] = []
    such = lambda texts: f", such as {texts[0]!r}" if texts else ""
    return lines, [f"{len(texts):,} {fault}{such(texts)}" for fault, texts in faults.items()]


def rows(task: Task, split: str, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield one row of T = seq_len positions per example: arrays [T], named as in `dataset.batch`.

    Longer examples are truncated. You can stack rows into a batch for training; only the targets of the task count.
    """
    eot = tokenizers.load(task.tokenizer).eot_token
    for tokens, weights in examples(task, split):
        tokens, weights = tokens[: seq_len + 1], weights[: seq_len + 1]
        length, padding = len(tokens) - 1, (0, seq_len + 1 - len(tokens))
        tokens, weights = np.pad(tokens, padding, constant_values=eot), np.pad(weights, padding)
        positions_T = np.arange(seq_len, dtype=np.int32)
        yield {"tokens_BT": tokens[:-1], "targets_BT": tokens[1:], "positions_BT": positions_T,
               "segments_BT": (positions_T < length).astype(np.int32), "weights_BT": weights[1:]}  # fmt: skip


# Preprocessors --------------------------------------------------------------------------------------------------------


def rekey(**new: str) -> Preprocessor:
    """Rename fields, and drop all others: rekey(prompt="question", answer="reply")."""

    def apply(document: Document) -> Iterator[Document]:
        if missing := [old for old in new.values() if old not in document]:
            raise UserError(f"rekey: a document has no field {missing[0]!r}; it has {', '.join(document)}")
        yield {name: document[old] for name, old in new.items()}

    return apply


def normalise(form: str = "NFC") -> Preprocessor:
    """Apply Unicode normalization to every field."""

    def apply(value):
        if isinstance(value, list):
            return [apply(one) for one in value]
        return unicodedata.normalize(form, value) if isinstance(value, str) else value

    return lambda document: iter([{name: apply(value) for name, value in document.items()}])


def split_on(separator: str = tokenizers.END_OF_TEXT) -> Preprocessor:
    """Split a text at a separator, and drop empty pieces."""
    return lambda document: (document | {"text": text} for text in document["text"].split(separator) if text.strip())


def keep(condition: Callable[[Document], bool]) -> Preprocessor:
    return lambda document: iter([document] if condition(document) else [])


def functions(document: Document) -> Iterator[Document]:
    """Yield each documented function of a Python file: the prompt ends after the docstring, the body is the answer."""
    try:
        found = ast.walk(ast.parse(document["text"]))
    except (SyntaxError, ValueError):  # written for another version of Python
        return
    lines = document["text"].splitlines(keepends=True)
    for node in found:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            begin, middle, end = node.lineno - 1, node.body[0].end_lineno, node.end_lineno
            prompt, answer = "".join(lines[begin:middle]), "".join(lines[middle:end])
            margin = re.match(r"[ \t]*", prompt)[0]
            dedent = lambda text, margin=margin: re.sub(rf"(?m)^{margin}", "", text)
            yield {"prompt": dedent(prompt), "answer": dedent(answer)}


# Built-in tasks -------------------------------------------------------------------------------------------------------

add(Task("stdlib", "Python's standard library, one document per file", "stdlib", (normalise(), split_on()),
         metrics=("loss", "bits_per_byte")))  # fmt: skip
add(Task("stdlib_functions", "bodies of its functions, given their signatures and docstrings", "stdlib",
         (functions, keep(lambda d: len(d["prompt"]) + len(d["answer"]) < 2000), normalise()),
         metrics=("loss", "exact_match", "token_f1")))  # fmt: skip


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """List the tasks, or print a few decoded examples of one task; `| ` marks targets that do not count in the loss.

    With --out, write the tokens of a task. A run that trains on them counts only the task's targets in the loss.

    With --check, read all examples, and exit with status 1 if one is in both splits, lacks targets or decodes wrongly.
    """

    name: tyro.conf.Positional[str] = ""  # name of a task; empty: list all
    split: str = "train"  # train or val
    examples: int = 3  # number of examples to print
    objective: str = ""  # print inputs and targets of the first 200 tokens with this data.objective; <0> is a sentinel
    out: str = ""  # write all tokens and target weights of both splits to this directory, for --data.path
    overwrite: bool = False  # replace the tokens in --out
    tokenizer: str = ""  # use this tokenizer instead of the task's; as for `python -m data.prepare`
    check: bool = False  # check all examples of both splits


def show(task: Task, split: str, count: int, objective: str = "") -> str:
    """Return a few decoded examples of a task, as printed."""
    encoding, out = tokenizers.load(task.tokenizer), []
    for number, (tokens, weights) in zip(range(count), examples(task, split), strict=False):
        counted = int((weights > 0).sum())
        out.append(f"--- {task.name} {split} {number}: {len(tokens)} tokens, {counted} targets count")
        if objective and len(tokens) > objectives.LEAST:
            out += show_divided(encoding, objective, tokens[1:], weights[1:], number)
            continue
        prompt, answer = (encoding.decode(tokens[1:][weights[1:] == w].tolist()) for w in (0, 1))
        out += [f"| {line}" for line in prompt.splitlines()] + answer.splitlines()
    return "\n".join(out)


def show_divided(encoding, objective: str, ids: np.ndarray, weights: np.ndarray, number: int) -> Iterator[str]:
    """Yield the decoded inputs and targets of a document, for each objective of a mixture."""
    vocabulary = encoding.n_vocab
    decode = lambda ids: encoding.decode(ids.tolist())

    def decode_all(ids: np.ndarray) -> str:
        text, *marked = np.split(ids, np.flatnonzero(ids >= vocabulary))
        return decode(text) + "".join(f"<{2 * vocabulary - 1 - part[0]}>{decode(part[1:])}" for part in marked)

    ids, weights = ids[:DIVIDED_TOKENS], weights[:DIVIDED_TOKENS]
    for name in parse_objectives(objective):
        example = objectives.split_text(name, ids, (number,), 2 * vocabulary, weights)
        for side, found in example._asdict().items():
            yield f"{side} of {name}: {decode_all(found)!r}"


def write(task: Task, out: str, overwrite: bool = False) -> dict:
    """Write the examples of a task to a directory for --data.path, and return its manifest."""
    found = {split: [*examples(task, split)] for split in SPLITS}
    ids, weights = ({split: [one[part][1:] for one in found[split] if len(one.tokens) > 1] for split in SPLITS}
                    for part in (0, 1))  # fmt: skip
    return prepare.from_ids(ids["train"], out, validation_ids=ids["val"], tokenizer=task.tokenizer, overwrite=overwrite,
                            train_weights=weights["train"], validation_weights=weights["val"])  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> int:
    about = f"e.g. python -m data.tasks stdlib_functions --examples 1\n\n{inspect.getdoc(Arguments)}"
    args = tyro.cli(Arguments, args=argv, prog="python -m data.tasks", description=about)
    if not args.name:
        for task in TASKS.values():
            print(f"{task.name:18} {_name_of(task.source)}, tokenizer {task.tokenizer}, val {task.val_share:.0%}, "
                  f"{' and '.join(task.metric_names)}: {task.about}")  # fmt: skip
        return 0
    task = get(args.name)
    task = dataclasses.replace(task, tokenizer=args.tokenizer or task.tokenizer)
    if args.check:
        lines, faults = check(task)
        print(*lines, *(f"wrong: {fault}" for fault in faults), sep="\n")
        if faults:
            return 1
    if args.out:
        write(task, args.out, args.overwrite)
    elif not args.check:
        print(show(task, args.split, args.examples, args.objective))
    return 0


if __name__ == "__main__":
    sys.exit(main())
