"""What all processes of a run decide together: whether to begin, after which step to stop, and who saves."""

import functools
import hashlib
import os
import platform
from pathlib import Path

import jax

from config import differences
from errors import UserError
from train.board import Board

ROOT = Path(__file__).resolve().parent.parent


class Agreement:
    """The decisions of all processes, seen from one of them."""

    def __init__(self, board: Board):
        self.board = board
        self.complete = False  # the run: nothing is left that a signal could stop
        self.share_disk = True  # all processes see what process 0 writes to the run's directory

    @property
    def keeper(self) -> str | None:
        """The host that saves the checkpoints for all; None: each process writes its shards to a shared disk."""
        return None if self.share_disk else self.board.messages[0].host

    def same(self, config: dict, data: dict) -> None:
        """Compare settings, tokens and program of all. Raises: UserError naming the host and the first difference."""
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
                    f"the processes are not about to do the same: {name} is {y!r} for {board.name(rank)}, and {x!r} "
                    f"for {board.name(0)}; they need the same command, commit, packages and tokens")  # fmt: skip

    def begin(self, step: int) -> bool:
        """Before the loop, which has taken `step` steps: wait until all processes are ready. False: they stop there.

        From here on all end after the same step. One that was asked to stop before is never ready, so none begins.
        """
        board = self.board
        with board.lock:
            board.message.last_step, board.message.ready = step, True
            board.send()
        never = lambda messages: any(message.ended and message.stop and not message.ready for message in messages)
        messages = board.wait(lambda messages: all(message.ready for message in messages) or never(messages))
        return not never(messages) and not self.stops_after(step)

    def stops_after(self, step: int) -> bool:
        """Whether all processes stop after this step; if not, this one continues with the next.

        Nobody waits here until a process is asked to stop. From then on the last step that each may begin is fixed, and
        all take the largest of them.
        """
        with self.board.lock:
            if not self.board.message.stop:
                self.board.message.last_step = step + 1
                return False
        messages = self.board.wait(lambda messages: all(message.stop for message in messages))
        return step >= max(message.last_step for message in messages)

    def ask_to_stop(self) -> None:
        """This process was asked to stop: tell the others."""
        with self.board.lock:
            if not self.board.message.stop:
                self.board.message.stop = True
                self.board.send()

    @property
    def preempted(self) -> int | None:
        """The process whose host the system takes away; None: there is none, or a user has asked for this stop too."""
        messages = {**self.board.messages, self.board.rank: self.board.message}
        by = {messages[rank].by: rank for rank in sorted(messages, reverse=True)}  # of several, all name the lowest
        return None if "user" in by else by.get("system")


@functools.cache
def program_sha256() -> str:
    """A digest of the files that Python reads here: hosts that name one commit may still differ by an edit."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("*.py", "[a-z]*/*.py") for path in ROOT.glob(pattern)):
        if path.relative_to(ROOT).parts[0] not in ("tests", "chapters", "docs", "bench", "runs", "tokens"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
