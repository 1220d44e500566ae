"""Decisions that all processes of a run make together: whether to start, when to stop, and which host saves."""

import functools
import hashlib
import os
import platform
from pathlib import Path

import jax

from config import differences
from train.hosts.board import Board
from utils import UserError

ROOT = Path(__file__).resolve().parents[2]


class Agreement:
    """One process's view of the decisions that all processes share."""

    def __init__(self, board: Board):
        self.board = board
        self.complete = False  # whether the run is complete; then there is nothing left for a signal to stop
        self.share_disk = True  # whether all processes see the files that process 0 writes to the run's directory

    @property
    def saving_host(self) -> str | None:
        """Return the host that saves the checkpoints; None: every process writes its shards to a shared disk."""
        return None if self.share_disk else self.board.messages[0].host

    def check_same(self, config: dict, data: dict) -> None:
        """Compare the processes' settings, tokens and programs. Raises: UserError that names the first difference."""
        board = self.board
        if board.count == 1:
            return
        ours = {"commit": os.environ.get("AXIS_COMMIT", "")[:7], "program": program_sha256(), "jax": jax.__version__,
                "python": platform.python_version(), "devices of each": jax.local_device_count()}  # fmt: skip
        board.send()
        settings = board.gather("about", ours | config | {"tokens": data})
        board.messages = board.read()
        for rank, theirs in enumerate(settings):
            for name, x, y in differences(settings[0], theirs):
                raise UserError(
                    f"the processes were started differently: {name} is {y!r} for {board.process_name(rank)}, but "
                    f"{x!r} for {board.process_name(0)}; start all of them with the same command, commit, packages and "
                    "tokens")  # fmt: skip

    def wait_to_start(self, step: int) -> bool:
        """Wait, before the training loop, until all processes are ready; return False if the run must stop at `step`.

        From now on, all processes stop after the same step. If a process was asked to stop before, no process starts.
        """
        board = self.board
        with board.lock:
            board.message.last_step, board.message.ready = step, True
            board.send()
        never = lambda messages: any(message.ended and message.stop and not message.ready for message in messages)
        messages = board.wait(lambda messages: all(message.ready for message in messages) or never(messages))
        return not never(messages) and not self.stops_after(step)

    def stops_after(self, step: int) -> bool:
        """Return whether all processes stop after this step; if not, this process may start the next step.

        This waits for the others only once a process was asked to stop. Then each process publishes the last step that
        it may start, and all of them stop after the largest of these steps.
        """
        with self.board.lock:
            if not self.board.message.stop:
                self.board.message.last_step = step + 1
                return False
        messages = self.board.wait(lambda messages: all(message.stop for message in messages))
        return step >= max(message.last_step for message in messages)

    def ask_to_stop(self) -> None:
        """Tell the other processes that this one was asked to stop."""
        with self.board.lock:
            if not self.board.message.stop:
                self.board.message.stop = True
                self.board.send()

    @property
    def preempted_rank(self) -> int | None:
        """Return the rank of the process whose host is being preempted, or None, also if a user stops the run."""
        messages = {**self.board.messages, self.board.rank: self.board.message}
        by = {messages[rank].by: rank for rank in sorted(messages, reverse=True)}  # the lowest rank wins
        return None if "user" in by else by.get("system")


@functools.cache
def program_sha256() -> str:
    """Return a digest of the program's Python files, since hosts on the same commit may still have local edits."""
    digest = hashlib.sha256()
    for path in sorted(path for depth in ("*.py", "[a-z]*/*.py", "[a-z]*/*/*.py") for path in ROOT.glob(depth)):
        if path.relative_to(ROOT).parts[0] not in ("tests", "chapters", "docs", "bench", "runs", "tokens"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
