"""Store results in files of JSON lines, so that a killed evaluation can resume. A cache of responses looks like this:

{"of": {"weights": "5e1f..", "tokenizer": "9c0a..", "seq_len": 256, "bos": ""}}
{"key": "77ab..", "answer": [-4.25, false]}
"""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from config import first_difference
from utils import UserError, is_main_process


def request_key(kind: str, *asked) -> str:
    return hashlib.sha256(json.dumps([kind, *asked], sort_keys=True).encode()).hexdigest()


class Answers(dict):
    """A dict from request keys to answers. Process 0 appends each new answer to the file immediately.

    path   the file; empty: keep answers only in memory
    model  whatever else determines an answer, such as weights and tokenizer
    Raises: UserError if the file has responses of another model.
    """

    def __init__(self, path: str, model: dict):
        super().__init__()
        self.path = Path(path) if path else None
        if path:
            rows = resume_rows(self.path, model, {"key", "answer"}, f"--cache {path}")
            self.update({row["key"]: row["answer"] for row in rows})

    def add(self, key: str, answer) -> None:
        self[key] = answer
        if self.path:
            append_row(self.path, {"key": key, "answer": answer})


# Files that begin with the row {"of": ..} -----------------------------------------------------------------------------


def append_row(path: Path, row: dict) -> None:
    if is_main_process():
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def begin_rows(path: Path, of: dict, name: str) -> list[dict]:
    """Start a new file, and return its rows below the first: none."""
    check_same_on_all_hosts(name, [of])
    if is_main_process():
        path.write_text(json.dumps({"of": of}) + "\n", encoding="utf-8")
    return []


def resume_rows(path: Path, of: dict, fields: set[str], name: str) -> list[dict]:
    """Return the rows of an interrupted evaluation, below the first, or start a new file.

    of      what the rows depend on, such as the weights
    fields  the fields that each row must have
    name    the file, as errors name it
    Raises: UserError if the file has results of another evaluation, or if it is another kind of file.
    """
    rows = read_rows(path, fields, name)
    if rows and (difference := first_difference(of, rows[0].get("of", {}))):
        raise UserError(f"{name} has results of another evaluation ({difference}); use another file, or delete this "
                        "one")  # fmt: skip
    check_same_on_all_hosts(name, rows)
    return rows[1:] if rows else begin_rows(path, of, name)


def read_rows(path: Path, fields: set[str], name: str) -> list[dict]:
    """Read the file's JSON lines, and truncate an incomplete last line. Raises: UserError for another kind of file."""
    if not path.exists():
        return []
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        assert all(set(row) == {"of"} for row in rows[:1]) and all(fields <= set(row) for row in rows[1:])
    except (ValueError, AssertionError, TypeError):
        raise UserError(f"{name} has no results of this kind; use another file") from None
    if rest and is_main_process():
        with open(path, "r+b") as file:
            file.truncate(len(whole + newline))
    return rows


def check_same_on_all_hosts(name: str, rows: list[dict]) -> None:
    """Raises: UserError if processes have different rows, because their batches would differ, and they hang."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(json.dumps(rows).encode()).digest(), np.uint8)
    if np.ptp(multihost_utils.process_allgather(digest), axis=0).any():
        raise UserError(f"{name}: the hosts read different files; put it, and the text of a task, on a shared disk")
