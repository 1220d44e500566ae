"""Tasks by name: a source, what is done to its documents, a tokenizer, and which targets count.

`python -m data.tasks` lists them; `python -m data.tasks NAME` prints a few examples of one, decoded. A document is a
dict of texts. A preprocessor is a function of one document that yields others: none, one or many. What comes out of the
last has either `text`, all of whose targets count, or `prompt` and `answer`, whose answer alone does.

Source: seqio, in the T5X paper, arXiv:2203.17189, section 3.
"""

import ast
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

from data import prepare, sources, tokenizers, units
from data.shards import SPLITS
from errors import UserError, exit_status, nearest

Document = dict[str, str]
Preprocessor = Callable[[Document], Iterator[Document]]
METRICS = ("loss", "bits_per_byte")  # columns of an evaluation's rows


@dataclass(frozen=True)
class Task:
    """A named way from a source to examples."""

    name: str
    about: str  # one sentence
    source: str  # as for `python -m data.prepare`
    preprocessors: tuple[Preprocessor, ...] = ()
    tokenizer: str = "bytes"
    val_share: float = 0.05  # documents held out; a hash of a document's name says which
    metrics: tuple[str, ...] = ("loss",)  # what to look at
    text_field: str = "text"
    where: str = field(default="", compare=False)  # file and line that registered it

    def __post_init__(self):
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise UserError(f"task {self.name!r}: no metric is called {unknown[0]!r}; {nearest(unknown[0], METRICS)}")
        if not 0 < self.val_share < 1:
            raise UserError(f"task {self.name!r}: val_share={self.val_share} must lie between 0 and 1")


class Example(NamedTuple):
    """The tokens of a document behind the end of the one before it, and how much each counts as a target."""

    tokens: np.ndarray  # int32; the first is the tokenizer's end of text
    weights: np.ndarray  # float32, as many; that of the first is 0


TASKS: dict[str, Task] = {}


def add(task: Task) -> Task:
    """Register a task. Raises: UserError if its name is taken, with where."""
    caller = inspect.stack()[1]
    if task.name in TASKS:
        raise UserError(f"a task is called {task.name!r} already (registered at {TASKS[task.name].where}); choose "
                        f"another name for that of {caller.filename}:{caller.lineno}")  # fmt: skip
    TASKS[task.name] = Task(**vars(task) | {"where": f"{caller.filename}:{caller.lineno}"})
    return TASKS[task.name]


def get(name: str) -> Task:
    """Raises: UserError for an unknown name, with the nearest known one."""
    if name not in TASKS:
        raise UserError(f"no task is called {name!r}; {nearest(name, TASKS)}")
    return TASKS[name]


def documents(task: Task, split: str) -> Iterator[Document]:
    """The documents of a split, through all preprocessors. Raises: UserError for text that is not UTF-8."""
    if split not in SPLITS:
        raise UserError(f"no split is called {split!r}; use {' or '.join(SPLITS)}")
    for one in sources.read_documents(task.source, task.text_field):
        if units.split_of(one.name, task.val_share) != split:
            continue
        try:
            found = iter([{"name": one.name, "text": one.text.decode()}])
        except UnicodeDecodeError as error:
            raise UserError(f"task {task.name!r}: {one.name}: not UTF-8: {error}") from error
        for step in task.preprocessors:
            found = itertools.chain.from_iterable(map(step, found))
        yield from found


def examples(task: Task, split: str) -> Iterator[Example]:
    """Encode the documents of a split. What looks like a special token in them is text."""
    encoding = tokenizers.load(task.tokenizer)
    for document in documents(task, split):
        parts = [(document.get("prompt", ""), 0.0), (document.get("answer", ""), 1.0)]
        if "text" in document:
            parts = [(document["text"], 1.0)]
        elif not {"prompt", "answer"} <= set(document):
            raise UserError(f"task {task.name!r}: a document has {', '.join(document)}; it needs text, or prompt and "
                            "answer (see `rekey`)")  # fmt: skip
        ids = [tokenizers.encode(encoding, text.encode()) for text, _ in parts]
        weights = [np.full(len(part), weight) for part, (_, weight) in zip(ids, parts, strict=True)]
        yield Example(np.concatenate([[encoding.eot_token], *ids]).astype(np.int32),
                      np.concatenate([[0.0], *weights]).astype(np.float32))  # fmt: skip


def rows(task: Task, split: str, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """An example a row: arrays [T] by the names of `dataset.batch`. The end of a longer one is cut off.

    Stacked, they train as well: a target counts where it is one of the task's.
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
    """Take fields under other names: rekey(prompt="question", answer="reply")."""

    def apply(document: Document) -> Iterator[Document]:
        if missing := [old for old in new.values() if old not in document]:
            raise UserError(f"rekey: a document has no field {missing[0]!r}; it has {', '.join(document)}")
        yield {name: document[old] for name, old in new.items()}

    return apply


def normalise(form: str = "NFC") -> Preprocessor:
    """One way to write each character of Unicode, in every field."""
    return lambda document: iter([{name: unicodedata.normalize(form, text) for name, text in document.items()}])


def split_on(separator: str = tokenizers.END_OF_TEXT) -> Preprocessor:
    """Cut a text wherever a separator stands; empty pieces are none."""
    return lambda document: (document | {"text": text} for text in document["text"].split(separator) if text.strip())


def keep(condition: Callable[[Document], bool]) -> Preprocessor:
    return lambda document: iter([document] if condition(document) else [])


def functions(document: Document) -> Iterator[Document]:
    """Of a Python file, each function that says what it does: up to its docstring's end the prompt, then the answer."""
    try:
        found = ast.walk(ast.parse(document["text"]))
    except (SyntaxError, ValueError):  # a file of another version of Python
        return
    lines = document["text"].splitlines(keepends=True)
    for node in found:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            begin, middle, end = node.lineno - 1, node.body[0].end_lineno, node.end_lineno
            prompt, answer = "".join(lines[begin:middle]), "".join(lines[middle:end])
            margin = re.match(r"[ \t]*", prompt)[0]
            dedent = lambda text, margin=margin: re.sub(rf"(?m)^{margin}", "", text)
            yield {"prompt": dedent(prompt), "answer": dedent(answer)}


# Tasks that are here --------------------------------------------------------------------------------------------------

add(Task("stdlib", "this Python's own library, a file a document", "stdlib", (normalise(), split_on()),
         metrics=("loss", "bits_per_byte")))  # fmt: skip
add(Task("stdlib_functions", "bodies of the library's functions, from their first lines and docstrings", "stdlib",
         (functions, keep(lambda d: len(d["prompt"]) + len(d["answer"]) < 2000), normalise())))  # fmt: skip


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """List the tasks, or print a few examples of one, decoded; targets that do not count stand behind `| `.

    With --out, write the tokens of one: a run on them counts the task's targets alone.
    """

    name: tyro.conf.Positional[str] = ""  # of a task; none: list them all
    split: str = "train"  # train or val
    examples: int = 3  # how many are printed
    out: str = ""  # write all tokens, and the weights of targets, of both splits into this directory, for --data.path
    overwrite: bool = False  # replace the tokens that --out holds


def show(task: Task, split: str, count: int) -> str:
    """A few examples of a task, as text."""
    encoding, out = tokenizers.load(task.tokenizer), []
    for number, (tokens, weights) in zip(range(count), examples(task, split), strict=False):
        counted = int((weights > 0).sum())
        out.append(f"--- {task.name} {split} {number}: {len(tokens)} tokens, {counted} targets count")
        prompt, answer = (encoding.decode(tokens[1:][weights[1:] == w].tolist()) for w in (0, 1))
        out += [f"| {line}" for line in prompt.splitlines()] + answer.splitlines()
    return "\n".join(out)


def write(task: Task, out: str, overwrite: bool = False) -> dict:
    """Make a directory for --data.path from the examples of a task, and return its manifest."""
    found = {split: [*examples(task, split)] for split in SPLITS}
    ids, weights = ({split: [one[part][1:] for one in found[split] if len(one.tokens) > 1] for split in SPLITS}
                    for part in (0, 1))  # fmt: skip
    return prepare.from_ids(ids["train"], out, validation_ids=ids["val"], tokenizer=task.tokenizer, overwrite=overwrite,
                            train_weights=weights["train"], validation_weights=weights["val"])  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    about = f"e.g. python -m data.tasks stdlib_functions --examples 1\n\n{inspect.getdoc(Arguments)}"
    args = tyro.cli(Arguments, args=argv, prog="python -m data.tasks", description=about)
    if args.name and args.out:
        write(get(args.name), args.out, args.overwrite)
    elif args.name:
        print(show(get(args.name), args.split, args.examples))
    for task in () if args.name else TASKS.values():
        print(f"{task.name:18} {task.source}, tokenizer {task.tokenizer}, val {task.val_share:.0%}, "
              f"{' and '.join(task.metrics)}: {task.about}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
