"""The watchdog: a thread in each process. It sends heartbeats, and ends the process if any process is lost or hangs."""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from config import RunConfig
from train.hosts import pace
from train.hosts.agreement import ROOT, Agreement
from train.hosts.board import Message
from utils import log, log_files, log_to_file, replace_file

LOST = 75  # exit status which means that another attempt may succeed; EX_TEMPFAIL in sysexits.h
LATE_S = 60  # `launcher.sh status` reports no problem before this many seconds without progress
ALIVE_S = 2.0  # seconds between two heartbeats for the supervisor
SHUTDOWN_S = 60  # how long jax.distributed waits at the end for all processes
GRACE_S = 10.0  # how long process 0, before it exits, waits until the others have read why and have reported their exit


def say_alive(silent_s: float, state: str) -> None:
    """Tell the supervisor, if there is one, that this process is alive, with its state: joining, joined or preempted.

    The supervisor checks the age of the file AXIS_ALIVE. The file contains `silent_s`, the age in seconds at which the
    supervisor treats the process as dead, and the state.
    """
    if path := os.environ.get("AXIS_ALIVE"):
        with contextlib.suppress(OSError):
            os.utime(path)  # works even if a full disk prevents a new file
        with contextlib.suppress(OSError):
            replace_file(path, f"{silent_s:.0f}\t{state}\n")


class Watchdog:
    """Watches the other processes, and the steps of this process. `exit` ends the process; tests replace it."""

    def __init__(self, agreement: Agreement, run: RunConfig, exit: Callable = os._exit):
        self.agreement, self.board, self.exit = agreement, agreement.board, exit
        self.peer_timeout_s, self.hang_timeout_s = run.peer_timeout_s, run.hang_timeout_s
        self.heard = dict.fromkeys(range(self.board.count), time.monotonic())  # time of each process's latest heartbeat
        self.moved = None  # time of the last progress, a step or part of a longer task; None: no progress is expected
        self.found_stuck = None  # time when a process was first found stuck
        self.taken, self.report, self.written = None, ("-", "-", "-"), None
        self.row, self.gap_s = None, 0.0  # when a row of metrics began and at which step; its longest gap
        self.usual_s, self.pauses = None, True  # see `late_s`
        self.pace, self.slow, self.said_alive = pace.Pace(), set(), -math.inf
        self.on_stop = lambda: None  # called once, from this thread, when another process was asked to stop
        self.on_end = lambda: None  # called by the main thread after `leave`
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        self.thread.start()

    def begin_step(self, step: int) -> None:
        """Record that this process starts a step. The step may wait for the other processes."""
        self.record_progress()
        self.board.message.step, self.pauses = step, False
        if self.row is None:
            self.row, self.gap_s = (self.moved, step), 0.0

    def finish_step(self, step: int) -> None:
        self.record_progress()
        self.taken = step, int(time.time())

    def record_progress(self) -> None:
        """Record progress: a step starts or ends, or a part of a longer task, such as one batch of an evaluation."""
        before, self.moved = self.moved, time.monotonic()
        self.gap_s = max(self.gap_s, self.moved - (before or self.moved))

    def show(self, steps: int, row: dict, pauses: bool = False) -> None:
        """Set what `launcher.sh status` shows next to the last step. Call this when the device has finished a row.

        pauses   whether a longer task follows before the next step: an evaluation, a checkpoint, the end of the run
        """
        self.record_progress()
        if self.row:
            begin, first = self.row
            step_s = (self.moved - begin) / (self.board.message.step + 1 - first)
            self.usual_s, self.row = max(10 * step_s, 2 * self.gap_s), None
        self.pauses = pauses
        self.report = steps, f"{row['loss']:.4f}", f"{row['tokens_per_s']:.0f}"
        if self.board.count > 1 and (ms := self.pace.measure()) is not None:  # the device is idle between two steps
            self.board.message.matmuls_ms = [*self.board.message.matmuls_ms[-1:], round(ms, 3)]

    @property
    def late_s(self) -> int:
        """Return after how many seconds without progress `launcher.sh status` reports a problem.

        That is 10 times the usual step, and at least 60 s. Devices run behind the loop, so it is also twice the longest
        time without progress in the last row. A task between two steps, and everything before the first row, may take
        half of the time after which the watchdog ends the run: programs are compiled, or a checkpoint is written.
        """
        known = self.usual_s is not None and not self.pauses
        return round(max(LATE_S, self.usual_s if known else self.hang_timeout_s / 2))

    def write_progress(self) -> None:
        """Tell the supervisor, if there is one: step, steps, loss, tokens/s, time of the step, and `late_s`.

        The file is replaced only after progress, so its age is the time without progress.
        """
        path, now = os.environ.get("AXIS_PROGRESS"), (self.moved, self.report, self.late_s)
        if path and self.taken and now != self.written:
            with contextlib.suppress(OSError):
                os.utime(path)  # works even if a full disk prevents a new file
            with contextlib.suppress(OSError):
                fields = self.taken[0], *self.report, self.taken[1], self.late_s
                replace_file(path, "\t".join(map(str, fields)) + "\n")
                self.written = now

    def say_alive(self, more_s: float = 0.0) -> None:
        """Tell the supervisor that this process is alive. The last call also tells whether the run was preempted."""
        stopped = any(message.stopped for message in (self.board.message, *self.board.messages.values()))
        preempted = stopped and self.agreement.preempted_rank is not None
        say_alive(self.peer_timeout_s + more_s, "preempted" if preempted else "joined")

    def leave(self, status: int, error: str = "") -> int:
        """End the command: on success, wait for the other processes; on failure, tell them why and end this process."""
        board = self.board
        if status and board.count > 1:
            self.end(status, error or ("it was asked to stop" if status > 128 else f"exit status {status}"), say=False)
        self.moved = None
        with board.lock:
            board.message.ended = True
            board.send()
        board.wait(lambda messages: all(message.ended for message in messages))
        self.closed.set()
        self.thread.join()
        board.messages = board.read()
        self.say_alive(SHUTDOWN_S)
        if board.count > 1:
            with contextlib.suppress(RuntimeError):  # all work is done, so a lost process no longer matters
                jax.distributed.shutdown()
        return status

    def end(self, status: int, why: str, say: bool = True, lost: int | None = None) -> None:
        """End this process now, from any thread. The others read `why` on the board. `lost`: rank of a silent one."""
        board, message = self.board, self.board.message
        message.stopped |= status > 128  # ended by a signal
        self.say_alive(GRACE_S)
        if say:
            with contextlib.suppress(OSError):  # a full disk
                print(f"\nerror: {why}", file=sys.stderr)
                log_to_file(f"error: {why}")
        message.status, message.why, message.ended = status, why, True
        if lost != 0:  # process 0 hosts the board
            with contextlib.suppress(RuntimeError):
                board.send()
                end, left = time.monotonic() + GRACE_S, {*range(board.count)} - {lost}
                while board.rank == 0 and time.monotonic() < end and left:
                    time.sleep(board.POLL_S / 5)
                    left -= {rank for rank, message in board.read().items() if message.ended}
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self.exit(status)

    def watch(self) -> None:
        """Until `closed` is set: send heartbeats, check those of the others, and check how long a step takes."""
        exchange = ThreadPoolExecutor(1, thread_name_prefix="board")  # a request to a hanging host may hang too
        request, answered, poll_s = None, time.monotonic(), self.board.POLL_S
        while not self.closed.wait(poll_s):
            if time.monotonic() - self.said_alive >= ALIVE_S:
                self.say_alive()
                self.said_alive = time.monotonic()
            request = request or exchange.submit(lambda: self.board.send() or self.board.read())
            try:
                messages, request = request.result(poll_s), None
            except (RuntimeError, TimeoutError) as error:
                request = request if isinstance(error, TimeoutError) else None
                if time.monotonic() - answered > self.peer_timeout_s:
                    why = f"{self.board.process_name(0)}, to which all others connect, no longer answers"
                    return self.end(LOST, why, lost=0)
                continue
            answered = time.monotonic()
            self.check_messages(messages, answered)
            self.write_progress()
        exchange.shutdown()

    def check_messages(self, messages: dict[int, Message], now: float) -> None:
        """Act on the messages: another process has ended, was asked to stop, is silent, or is stuck."""
        own, name = self.board.message, self.board.process_name
        for rank, message in messages.items():
            if rank not in self.board.messages or message.heartbeat > self.board.messages[rank].heartbeat:
                self.heard[rank] = now
        self.board.messages = messages
        if own.status:
            return  # it is ending
        for rank, message in messages.items():
            if message.ended and message.status:
                status = message.status if message.status in (2, 130, 143) else LOST
                return self.end(status, f"{name(rank)} has ended, so this one ends too: {message.why}")
        for rank, since in self.heard.items():
            if now - since > self.peer_timeout_s and not (rank in messages and messages[rank].ended):
                step = f"; it had reached step {messages[rank].step}" if rank in messages else ""
                return self.end(LOST, f"{name(rank)} has been silent for {self.peer_timeout_s} s{step}", lost=rank)
        if any(message.stop for message in messages.values()) and not own.stop:
            self.agreement.ask_to_stop()
            self.on_stop()
        self.log_slow_host(messages)
        if self.hang_timeout_s and self.moved is not None and now - self.moved > self.hang_timeout_s:
            own.stuck = True
        if any(message.stuck for message in [*messages.values(), own]):
            self.found_stuck = self.found_stuck or self.show_stacks(now)
            if now - self.found_stuck > GRACE_S / 2:
                self.end(LOST, self.describe_hang(messages))

    def log_slow_host(self, messages: dict[int, Message]) -> None:
        """Log the name of a slow host, once, in process 0."""
        slow = pace.slowest({rank: message.matmuls_ms for rank, message in messages.items()})
        if self.board.rank == 0 and slow and slow[0] not in self.slow:
            self.slow.add(slow[0])
            log(f"slow       {self.board.process_name(slow[0])} took {slow[1]:.1f} ms for a matmul test, twice "
                f"in a row, but the median host took {slow[2]:.1f} ms; this host slows down every step")  # fmt: skip

    def show_stacks(self, now: float) -> float:
        """Print the stack of every thread, and report on the board where the main thread is. Return `now`."""
        for file in log_files():
            with contextlib.suppress(OSError):  # a full disk
                name = self.board.process_name(self.board.rank)
                print(f"no step was finished for {self.hang_timeout_s} s; stacks of {name}:", file=file)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename]
        frames = dict.fromkeys(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in (stack[-1], *ours[-1:]))
        self.board.message.where = ", called from ".join(frames)
        return now

    def describe_hang(self, messages: dict[int, Message]) -> str:
        """Describe which process did not reach the step in which the others wait, and where it is instead."""
        step, name, own = max(message.step for message in messages.values()), self.board.process_name, self.board.rank
        late = "; ".join(f"{name(rank)} did not reach step {step}; it is at {messages[rank].where}"
                         for rank in sorted(messages) if messages[rank].step < step)  # fmt: skip
        does = late or f"all have reached step {step}; process {own} is at {messages[own].where}"
        return f"no step was finished for {self.hang_timeout_s} s: {does}; see each process's log for its stacks"
