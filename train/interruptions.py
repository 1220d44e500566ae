"""Handle Ctrl-C and SIGTERM, and print the command that resumes the run."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from config.fields import is_remote
from train import checkpoint
from train.hosts.processes import Processes
from utils import log, log_to_file

MAIN = Path(__file__).resolve().parent.parent / "main.py"


class Stopped(KeyboardInterrupt):
    """The user or the system asked the run to stop, and everything that had to be saved is saved."""


class Interruptions:
    """Handler of Ctrl-C and SIGTERM. The first signal asks the training loop to save and stop. Outside the loop there
    is nothing to save, so it raises Stopped. A second signal ends the process at once, with the signal's exit status;
    but under launcher.sh a second SIGTERM changes nothing, because `stop --now` sends SIGKILL. The handlers remain
    after this context, until the process has told the others and exits, so that no late signal changes its status.

    checkpoints   the run's directory of checkpoints, which need not exist yet
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    OTHER_PROCESS = signal.SIGUSR1  # a thread of this process sends it when another process got one of these signals
    PATIENCE_S = 5.0  # wait this long for the main thread to respond, then end the process if there is nothing to save

    def __init__(self, argv: list[str], checkpoints: Path, together: Processes):
        self.argv, self.checkpoints, self.together = argv, checkpoints, together
        self.board, self.agreement, self.watchdog = together.board, together.agreement, together.watchdog
        self.asked, self.saving, self.before = 0, False, {}
        self.over = False  # whether Stopped was raised, or the context has ended: the main thread is on its way out

    def __enter__(self):
        if not self.board.rank:
            self.board.message.saved = newest_step(self.checkpoints)
        if threading.current_thread() is threading.main_thread():
            self.reads, self.writes = os.pipe()
            os.set_blocking(self.writes, False)
            self.before = {number: signal.signal(number, self.handle) for number in (*self.SIGNALS, self.OTHER_PROCESS)}
            self.watchdog.on_end = self.restore
            self.watchdog.on_stop = lambda: signal.pthread_kill(threading.main_thread().ident, self.OTHER_PROCESS)
            self.wakeup = signal.set_wakeup_fd(self.writes)
            self.watcher = threading.Thread(target=self.watch, args=(self.reads,), daemon=True)
            self.watcher.start()
            self.patience = threading.Timer(self.PATIENCE_S, self.end_if_unresponsive)
            self.patience.daemon = True
        return self

    def __exit__(self, *_):
        self.over = True
        if self.before:
            self.patience.cancel()
            self.watchdog.on_stop = lambda: None

    def restore(self) -> None:
        """Restore the handlers from before this context. Wait for the thread to print its message."""
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.close(self.writes)  # ends the thread once it has read every signal
        self.watcher.join(self.PATIENCE_S)

    def handle(self, number, frame) -> None:
        self.note_sender(number)
        self.asked = self.asked or (signal.SIGTERM if number == self.OTHER_PROCESS else number)
        if not (self.saving or self.agreement.complete or self.over):
            self.over, self.frame = True, frame  # keeps what a thread may still compile: freeing it can crash
            raise Stopped

    def note_sender(self, number: int) -> None:
        """Record who asked this process to stop. `launcher.sh stop` creates a file before it sends SIGTERM."""
        alive = os.environ.get("AXIS_ALIVE")
        if number == signal.SIGTERM and alive and not Path(alive).with_name("stop").exists():
            self.board.message.by = self.board.message.by or "system"
        elif number in self.SIGNALS:
            self.board.message.by = "user"

    def watch(self, reads: int) -> None:
        """React to signals at once, in a thread. `handle` may run up to a minute later, once XLA returns."""
        seen, told = 0, False
        while number := os.read(reads, 1):
            own = number[0] in self.SIGNALS
            seen += own and not (seen and number[0] == signal.SIGTERM and "AXIS_ALIVE" in os.environ)
            self.note_sender(number[0])
            if seen > 1:
                self.end_now(128 + number[0])
            elif (own or number[0] == self.OTHER_PROCESS) and not (told or self.agreement.complete):
                told = True
                end = "stopping after this step and saving a checkpoint" if self.saving else "stopping"
                self.agreement.ask_to_stop()
                with suppress(OSError):  # a full disk
                    print(f"\n{self.reason}{end}; signal again to stop at once", file=sys.stderr, flush=True)
                    log_to_file(f"{self.reason}{end}")
                if not self.saving and self.board.count > 1:  # the main thread may wait for another process
                    self.patience.start()
        os.close(reads)

    @property
    def reason(self) -> str:
        """Return a text that names the preempted host; empty if a user stops the run."""
        rank = self.agreement.preempted_rank
        if rank is None:
            return ""
        host = "this host" if rank == self.board.rank else self.board.process_name(rank)
        return f"preempted: the system asked {host} to stop (SIGTERM); "

    def end_now(self, status: int) -> None:
        cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # the progress bar hides it
        with suppress(OSError):  # a full disk
            print(f"{cursor}stopped at once; {self.resume_info[1]}", file=sys.stderr, flush=True)
        self.watchdog.end(status, "it was stopped at once", say=False)

    def end_if_unresponsive(self) -> None:
        if not self.saving:
            self.end_now(128 + signal.SIGTERM)

    def should_start_after(self, step: int) -> bool:
        """Return whether training starts after step `step`: the same answer on all processes."""
        self.watchdog.finish_step(step)
        if not (begins := self.agreement.wait_to_start(step)):
            self.asked = self.asked or signal.SIGTERM
        return begins

    def stops_after(self, step: int) -> bool:
        """Return whether training stops after this step. All processes stop together if one of them was asked to."""
        if self.asked:
            self.agreement.ask_to_stop()
        self.watchdog.finish_step(step)
        if stops := self.agreement.stops_after(step):
            self.asked = self.asked or signal.SIGTERM
        return stops

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Inside this context a signal only sets a flag, so the loop can save. On exit, raise Stopped if it is set."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False
        if self.asked:
            raise Stopped

    @property
    def resume_info(self) -> tuple[bool, str]:
        """Return whether there is a checkpoint to resume from, and a message with the command to resume or to start.

        Process 0 finds the checkpoint. The other processes may not share its disk, so they use the step that it sent.
        """
        first = self.board.messages.get(0) if self.board.rank else self.board.message
        step = first and first.saved
        what = "no checkpoint was saved; this starts at step 0"
        if step is None:
            what = "process 0 knows where this resumes"
        elif step:
            path = str(self.checkpoints / str(step))
            what = f"this resumes from {path if is_remote(path) else os.path.relpath(path)}"
            what += f" on {self.agreement.saving_host}" if self.agreement.saving_host else ""
        return bool(step), f"{what}:  {command(self.argv)}"

    def end(self) -> int:
        """Print how to resume. Return the exit status: 0, or the signal's status if there is no checkpoint."""
        self.board.message.stopped = True
        saved, goes_on = self.board.call_on_first("outlook", lambda: self.resume_info)
        if self.board.count > 1:
            goes_on += "  (on the same hosts, with launcher.sh)"
        if saved:
            run = str(self.checkpoints.parent)
            run = run if is_remote(run) else os.path.relpath(run)
            log(f"report     this plots the steps so far:  {python()} -m train.report {shlex.quote(run)}")
        log(f"stopped    {goes_on}")
        return 0 if saved else 128 + (self.asked or signal.SIGINT)


def newest_step(checkpoints: Path) -> int:
    """Return the latest step whose files all have the right size; 0: there is none."""
    return next((one.step for one in checkpoint.list_steps(checkpoints) if one.find_fault("none") is None), 0)


def python() -> str:
    """Return the path of this Python, such as .venv/bin/python: the shell's Python may lack the packages."""
    path = os.path.relpath(sys.executable)
    return sys.executable if path.startswith("..") else path


def command(argv: list[str], changed: dict[str, int] | None = None, restart: bool = False) -> str:
    """Return the user's command, quoted for a shell, with some settings changed or with --run.restart scratch."""
    changed, kept, words = changed or {}, [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.removeprefix("--").replace("-", "_") in {*changed, "run.restart"}:
            _ = equals or next(words)  # drop its value too
        else:
            kept.append(word)
    kept += [text for name, value in changed.items() for text in (f"--{name}", str(value))]
    kept += ["--run.restart", "scratch"] if restart else []
    return shlex.join([python(), os.path.relpath(MAIN), *kept])
