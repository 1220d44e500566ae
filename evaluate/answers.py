"""Cache a model's responses in a file of JSON lines, so that a killed evaluation can resume. The file looks like this:

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
from devices import is_main_process
from errors import UserError


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
        if not path:
            return
        rows = read_rows(self.path)
        if rows and (difference := first_difference(model, rows[0].get("of", {}))):
            raise UserError(f"--cache {path} has responses of another model ({difference}); use another file, or "
                            "delete this one")  # fmt: skip
        self.update({row["key"]: row["answer"] for row in rows[1:]})
        check_same_on_all_hosts(path, list(self))
        if not rows:
            self.write({"of": model})

    def write(self, row: dict) -> None:
        if self.path and is_main_process():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def add(self, key: str, answer) -> None:
        self[key] = answer
        self.write({"key": key, "answer": answer})


def read_rows(path: Path) -> list[dict]:
    """Read the file's JSON lines, and truncate an incomplete last line. Raises: UserError for another kind of file."""
    if not path.exists():
        return []
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        assert all(set(row) == {"of"} for row in rows[:1]) and all({"key", "answer"} == set(row) for row in rows[1:])
    except (ValueError, AssertionError, TypeError):
        raise UserError(f"--cache {path} is not a cache of model responses; use another file") from None
    if rest and is_main_process():
        with open(path, "r+b") as file:
            file.truncate(len(whole + newline))
    return rows


def check_same_on_all_hosts(path: str, keys: list[str]) -> None:
    """Raises: UserError if processes have read different answers, because their batches would differ, and they hang."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256("".join(keys).encode()).digest(), np.uint8)
    if np.ptp(multihost_utils.process_allgather(digest), axis=0).any():
        raise UserError(f"--cache {path}: the hosts read different files; put it on a shared disk")
