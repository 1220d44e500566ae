"""What stops a run from outside, Ctrl-C and SIGTERM, and the command that goes on with it."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from config.fields import is_remote
from devices import log, log_to_file
from train import checkpoint
from train.processes import Processes

MAIN = Path(__file__).resolve().parent.parent / "main.py"


class Stopped(KeyboardInterrupt):
    """The user or the system asked the run to stop, and all there was to save is saved."""


class Interruptions:
    """Ctrl-C and SIGTERM. The first asks the loop to save and stop; outside the loop there is nothing to save, and it
    raises Stopped. A second one ends the process at once, with the exit status a shell gives it.

    checkpoints   where the run's are, if there are any
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    ELSEWHERE = signal.SIGUSR1  # by which a thread of this process says that another process got one of these
    PATIENCE_S = 5.0  # until the process is ended where nothing can be lost, and its main thread does not hear

    def __init__(self, argv: list[str], checkpoints: Path, together: Processes):
        self.argv, self.checkpoints, self.together = argv, checkpoints, together
        self.board, self.agreement, self.watchdog = together.board, together.agreement, together.watchdog
        self.asked, self.saving, self.before = 0, False, {}

    def __enter__(self):
        if not self.board.rank:
            self.board.message.saved = newest(self.checkpoints)
        if threading.current_thread() is threading.main_thread():
            self.reads, self.writes = os.pipe()
            os.set_blocking(self.writes, False)
            self.before = {number: signal.signal(number, self.handle) for number in (*self.SIGNALS, self.ELSEWHERE)}
            self.watchdog.on_stop = lambda: signal.pthread_kill(threading.main_thread().ident, self.ELSEWHERE)
            self.wakeup = signal.set_wakeup_fd(self.writes)
            threading.Thread(target=self.watch, args=(self.reads,), daemon=True).start()
            self.patience = threading.Timer(self.PATIENCE_S, self.lose_patience)
            self.patience.daemon = True
        return self

    def __exit__(self, *_):
        if self.before:
            self.patience.cancel()
            self.watchdog.on_stop = lambda: None
            signal.set_wakeup_fd(self.wakeup)
            for number, handler in self.before.items():
                signal.signal(number, handler)
            os.close(self.writes)  # ends the thread

    def handle(self, number, frame) -> None:
        self.note_sender(number)
        self.asked = self.asked or (signal.SIGTERM if number == self.ELSEWHERE else number)
        if not (self.saving or self.agreement.complete):
            raise Stopped

    def note_sender(self, number: int) -> None:
        """Remember who asked this process to stop. `launcher.sh stop` leaves a file before it sends SIGTERM."""
        alive = os.environ.get("AXIS_ALIVE")
        if number == signal.SIGTERM and alive and not Path(alive).with_name("stop").exists():
            self.board.message.by = self.board.message.by or "system"
        elif number in self.SIGNALS:
            self.board.message.by = "user"

    def watch(self, reads: int) -> None:
        """Sees a signal at once, in a thread: the main one may be inside XLA for a minute, where `handle` waits."""
        seen, told = 0, False
        while number := os.read(reads, 1):
            own = number[0] in self.SIGNALS
            seen += own
            self.note_sender(number[0])
            if seen > 1:
                self.end_now(128 + number[0])
            elif (own or number[0] == self.ELSEWHERE) and not (told or self.agreement.complete):
                told = True
                end = "stopping after this step, and saving it" if self.saving else "stopping"
                self.agreement.ask_to_stop()
                with suppress(OSError):  # a full disk
                    print(f"\n{self.reason}{end}; once more stops at once", file=sys.stderr, flush=True)
                    log_to_file(f"{self.reason}{end}")
                if not self.saving and self.board.count > 1:  # the main thread may wait for another process
                    self.patience.start()
        os.close(reads)

    @property
    def reason(self) -> str:
        """Say whose host the system takes away; empty if somebody stops the run."""
        rank = self.agreement.preempted
        if rank is None:
            return ""
        host = "this host" if rank == self.board.rank else self.board.name(rank)
        return f"preempted: the system asked {host} to stop (SIGTERM); "

    def end_now(self, status: int) -> None:
        cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # the progress bar hides it
        with suppress(OSError):  # a full disk
            print(f"{cursor}stopped at once; {self.outlook[1]}", file=sys.stderr, flush=True)
        self.watchdog.end(status, "it was stopped at once", say=False)

    def lose_patience(self) -> None:
        if not self.saving:
            self.end_now(128 + signal.SIGTERM)

    def begins_after(self, step: int) -> bool:
        """Whether the loop begins, which has taken `step` steps: on all processes, or on none."""
        self.watchdog.finish_step(step)
        if not (begins := self.agreement.begin(step)):
            self.asked = self.asked or signal.SIGTERM
        return begins

    def stops_after(self, step: int) -> bool:
        """Whether the loop stops after this step: on all processes, where one was asked to."""
        if self.asked:
            self.agreement.ask_to_stop()
        self.watchdog.finish_step(step)
        if stops := self.agreement.stops_after(step):
            self.asked = self.asked or signal.SIGTERM
        return stops

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Within, a signal only sets `asked`; what is within saves. Raises: Stopped at the end if there was one."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False
        if self.asked:
            raise Stopped

    @property
    def outlook(self) -> tuple[bool, str]:
        """Whether a checkpoint is there to go on from, and the command that does, or starts.

        Process 0 knows; the others, who may share no disk with it, what it has told them.
        """
        first = self.board.messages.get(0) if self.board.rank else self.board.message
        step = first and first.saved
        what = "no checkpoint was saved; this starts at step 0"
        if step is None:
            what = "process 0 knows where this goes on from"
        elif step:
            path = str(self.checkpoints / str(step))
            what = f"this goes on from {path if is_remote(path) else os.path.relpath(path)}"
            what += f" on {self.agreement.keeper}" if self.agreement.keeper else ""
        return bool(step), f"{what}:  {command(self.argv)}"

    def end(self) -> int:
        """Say how to go on; returns the exit status: that of the signal, if there is nothing to go on from."""
        self.board.message.stopped = True
        saved, goes_on = self.board.first("outlook", lambda: self.outlook)
        if self.board.count > 1:
            goes_on += "  (on the same hosts, by launcher.sh)"
        log(f"stopped    {goes_on}")
        return 0 if saved else 128 + (self.asked or signal.SIGINT)


def newest(checkpoints: Path) -> int:
    """The newest step that seems good, by the sizes of its files; 0: there is none."""
    return next((one.step for one in checkpoint.found(checkpoints) if one.fault("none") is None), 0)


def command(argv: list[str], changed: dict[str, int] | None = None, restart: bool = False) -> str:
    """The user's own command, ready for a shell, with some settings changed, or starting again."""
    changed, kept, words = changed or {}, [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.removeprefix("--").replace("-", "_") in {*changed, "run.restart"}:
            _ = equals or next(words)  # its value goes with it
        else:
            kept.append(word)
    kept += [text for name, value in changed.items() for text in (f"--{name}", str(value))]
    kept += ["--run.restart", "scratch"] if restart else []
    python = os.path.relpath(sys.executable)  # .venv/bin/python: it holds the packages, the shell's may not
    return shlex.join([sys.executable if python.startswith("..") else python, os.path.relpath(MAIN), *kept])
