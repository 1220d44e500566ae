"""What a model has answered, in a file: a killed evaluation goes on where it was.

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
    """Answers by the key of what was asked. Process 0 appends each to the file at once.

    path  empty: they are kept in memory alone
    of    what else decides an answer
    Raises: UserError if the file holds answers of another model.
    """

    def __init__(self, path: str, model: dict):
        super().__init__()
        self.path = Path(path) if path else None
        if not path:
            return
        rows = read_rows(self.path)
        if rows and (difference := first_difference(model, rows[0].get("of", {}))):
            raise UserError(f"--cache {path} holds answers of another model ({difference}); name another file, or "
                            "delete this one")  # fmt: skip
        self.update({row["key"]: row["answer"] for row in rows[1:]})
        check_same(path, list(self))
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
    """The rows of a file; what a kill left of a last one is cut off. Raises: UserError if it holds something else."""
    if not path.exists():
        return []
    whole, newline, rest = path.read_bytes().rpartition(b"\n")
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        assert all(set(row) == {"of"} for row in rows[:1]) and all({"key", "answer"} == set(row) for row in rows[1:])
    except (ValueError, AssertionError, TypeError):
        raise UserError(f"--cache {path} is no file of answers; name another") from None
    if rest and is_main_process():
        with open(path, "r+b") as file:
            file.truncate(len(whole + newline))
    return rows


def check_same(path: str, keys: list[str]) -> None:
    """Raises: UserError if processes know different answers: each has to ask the same, or they wait for ever."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256("".join(keys).encode()).digest(), np.uint8)
    if np.ptp(multihost_utils.process_allgather(digest), axis=0).any():
        raise UserError(f"--cache {path}: the hosts do not see the same file; put it on a disk they share")
