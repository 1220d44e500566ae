"""Processes that train as one, a process a host: each holds a part of every array, so a step of one waits for all.

They meet (`join`), see that they are about to do the same (`same`), and watch each other from a thread. A signal to one
stops all after the same step. Where one is gone, or hangs, the others say which, and end instead of waiting for it.

What they tell each other stands on a board, the key-value store of `jax.distributed`, which process 0 keeps:

    axis/line/3        what process 3 does: a `Line`, as JSON, written anew each POLL_S
    axis/said/NAME/3   what it has said once, as JSON

One process alone has a board of its own, and the same thread looks after it.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import json
import math
import os
import platform
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from config import RunConfig, differences
from devices import has_tpu_files, log, log_files, log_to_file, patient
from errors import UserError
from train import pace
from train.storage import replace_file

LOST = 75  # exit status where another try may go well: sysexits.h calls it EX_TEMPFAIL
POLL_S = 0.5
ALIVE_S = 2.0  # between two heartbeats for the supervisor
SHUTDOWN_S = 60  # how long jax.distributed waits at the end until all have come to it
LAST_WORDS_S = 10.0  # how long the others have to read why process 0 ends, and say that they do
ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Line:
    """What a process says of itself."""

    host: str
    beat: int = 0  # grows each time: it lives
    begun: int = 0  # the step it has come to
    ready: bool = False  # to begin the loop, as soon as all are
    stop: bool = False  # it was asked to stop, or has seen that another was
    by: str = ""  # who asked this process: the "user", or the "system", which takes the host away; "": nobody
    stopped: bool = False  # it ends before the run is complete, because one of them was asked
    granted: int = -1  # the last step it may begin; fixed once `stop` is true
    saved: int | None = None  # of process 0: the step of the newest checkpoint, 0: there is none; None: not known yet
    products_ms: list[float] = dataclasses.field(default_factory=list)  # how fast its device is: measured twice
    stuck: bool = False  # no step was finished for hang_timeout_s
    where: str = ""  # what its main thread does, if a process is stuck
    ended: bool = False
    status: int = 0  # of its exit
    why: str = ""


class OwnBoard:
    """The board of a process that is alone."""

    def __init__(self):
        self.texts = {}

    def write(self, key: str, text: str) -> None:
        self.texts[key] = text

    def read(self, folder: str) -> dict[int, str]:
        """{process: text} of the keys `folder`/process."""
        return {int(key.rpartition("/")[2]): text for key, text in [*self.texts.items()]
                if key.rpartition("/")[0] == folder}  # fmt: skip


class SharedBoard:
    """The board of all: a client of jax.distributed. JAX shows it to nobody else, but has no other way for this."""

    def __init__(self):
        from jax._src.distributed import global_state

        self.client = global_state.client

    def write(self, key: str, text: str) -> None:
        self.client.key_value_set(key, text, allow_overwrite=True)

    def read(self, folder: str) -> dict[int, str]:
        return {int(key.rpartition("/")[2]): text for key, text in self.client.key_value_dir_get(folder)}


# Joining --------------------------------------------------------------------------------------------------------------


def join(run: RunConfig) -> "Processes":
    """Meet the other processes of this run, if there are any. Must come before the first use of a device.

    It is told by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as launcher.sh sets them. A TPU knows
    its hosts without; then AXIS_PROCESSES may say how many were started.
    Raises: UserError if what it is told is not enough, or does not agree. Ends the process with LOST if not all come.
    """
    rank, count = told()
    if count > 1:
        own_output()
        initialize(run, num_processes=count, process_id=rank)
    elif "tpu" in os.environ.get("JAX_PLATFORMS", "tpu") and has_tpu_files() and initialize(run):
        rank, count = jax.process_index(), jax.process_count()
        if (started := int(os.environ.get("AXIS_PROCESSES", count))) != count:
            raise UserError(f"{started} processes were started, and the TPU has {count} hosts; name each of them once")
        own_output()
    global here
    here = Processes(rank, count, SharedBoard() if count > 1 else OwnBoard(), run)
    here.tell()  # its name: should it die at once, the others know whom they miss
    return here


def own_output() -> None:
    """What Python prints still comes out, as far as the disk behind it has room; what Gloo's C++ does, lines for each
    group of processes, goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # not where something else stands for standard output
        sys.stdout.flush()
        kept = os.dup(sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout, sys.stderr = patient(kept), patient(os.dup(sys.stderr.fileno()))


def say_alive(silent_s: float, what: str) -> None:
    """Tell the supervisor, if one started this process, that it lives, and is `joining`, `joined` or `preempted`.

    The age of the file AXIS_ALIVE counts. Its line gives the age in seconds at which the process is dead, and the word.
    """
    if path := os.environ.get("AXIS_ALIVE"):
        with contextlib.suppress(OSError):
            os.utime(path)  # where a full disk does not take another
        with contextlib.suppress(OSError):
            replace_file(path, f"{silent_s:.0f}\t{what}\n")


def told() -> tuple[int, int]:
    """The number of this process, and how many there are, as the environment says; (0, 1) if it does not."""
    found = {name: os.environ.get(name) for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
    if not any(found.values()):
        return 0, 1
    if missing := [name for name, value in found.items() if not value]:
        raise UserError(f"several processes: {', '.join(missing)} is not set; launcher.sh sets all")
    _, count, rank = found.values()
    if not (count.isdecimal() and rank.isdecimal() and int(rank) < int(count)):
        raise UserError(f"JAX_PROCESS_ID={rank} of JAX_NUM_PROCESSES={count}: use numbers, the first below the second")
    return int(rank), int(count)


def initialize(run: RunConfig, **how) -> bool:
    """jax.distributed.initialize; False on a TPU of no slice. Ends the process with LOST if the others do not come."""

    def give_up() -> None:
        who = f"process {how['process_id']} of {how['num_processes']}" if how else "this host of a TPU slice"
        with contextlib.suppress(OSError):  # a full disk
            print(f"error: {who} has waited {run.join_timeout_s} s for the others: {missing()}", file=sys.stderr)
            sys.stderr.flush()
        os._exit(LOST)

    say_alive(run.join_timeout_s + 60, "joining")

    # JAX would abort, and say nothing of who is missing; so it would where one dies later. We look first.
    late = threading.Timer(run.join_timeout_s, give_up)
    late.daemon = True
    late.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    try:
        jax.distributed.initialize(initialization_timeout=run.join_timeout_s + 60, shutdown_timeout_seconds=SHUTDOWN_S,
                                   heartbeat_timeout_seconds=3 * run.peer_timeout_s, **how)  # fmt: skip
    except ValueError:
        if how:
            raise
        return False
    finally:
        late.cancel()
    outlive_cuts(3 * run.peer_timeout_s)
    return True


def outlive_cuts(seconds: int) -> None:
    """Process 0 keeps a connection to another process although nothing is acknowledged on it for so long.

    gRPC's server gives such a connection up after 20 s (TCP_USER_TIMEOUT), which JAX offers no setting for. Once the
    network is back, the other process would be told that its connection was reset, and JAX would abort it.
    """
    from jax._src.distributed import global_state

    if not (global_state.service and hasattr(socket, "TCP_USER_TIMEOUT") and os.path.isdir("/proc/self/fd")):
        return
    port = int(global_state.coordinator_address.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:  # the listening one too: new ones take after it
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def missing() -> str:
    """Say who does not come, as far as one sees from here."""
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            return f"process 0 does not answer at {address} ({error.strerror or error}); see the log of its host"
    return "not all have come; ./launcher.sh status shows the host that runs none, or is late"


here: "Processes | None" = None  # this process among the others, once it has joined them


def end_together(main: Callable) -> Callable:
    """Decorator of a command that joins: if it fails, it tells the others, and does not wait for them."""

    @functools.wraps(main)
    def wrapped(*args) -> int:
        global here
        here = None
        try:
            status = main(*args) or 0
            return here.leave(status, getattr(main, "error", "")) if here else status
        except Exception as error:
            if here is None or here.count == 1:
                raise
            if isinstance(error, (RuntimeError, ValueError)):  # what one meets whose peer is gone; who, the thread says
                log_to_file(f"a device, or another process, fails: {error}")
                time.sleep(here.peer_timeout_s + 4 * POLL_S)
            if here.line.status:  # the thread is ending this process, because of what led to this error
                time.sleep(4 * LAST_WORDS_S)
            traceback.print_exc()
            here.end(LOST, f"{type(error).__name__}: {error}", say=False)
        finally:
            if here:
                here.closed.set()

    return wrapped


# Together -------------------------------------------------------------------------------------------------------------


class Processes:
    """This process, number `rank` of `count`, and what it knows of the others.

    on_stop   called once, from the thread, when another process was asked to stop
    exit      how the process ends; a test has another
    """

    def __init__(self, rank: int, count: int, board, run: RunConfig, exit: Callable = os._exit):
        self.rank, self.count, self.board, self.exit = rank, count, board, exit
        self.peer_timeout_s, self.hang_timeout_s = run.peer_timeout_s, run.hang_timeout_s
        self.line = Line(os.environ.get("AXIS_HOST") or socket.gethostname())
        self.lock, self.closed = threading.RLock(), threading.Event()
        self.lines: dict[int, Line] = {}  # of all, as last read
        self.heard = dict.fromkeys(range(count), time.monotonic())  # when the beat of each was last seen to grow
        self.moved = None  # when a step, or a part of something longer, was last finished; None: nobody waits for one
        self.gone = None  # the process that was silent too long
        self.found_stuck = None  # when a process was first seen stuck
        self.taken, self.report, self.shown = None, ("-", "-", "-"), None
        self.pace, self.slow, self.told_alive = pace.Pace(), set(), -math.inf
        self.complete = False  # the run: nothing is left that a signal could stop
        self.share_disk = True  # all see what process 0 writes to the run's directory
        self.on_stop = lambda: None
        self.thread = threading.Thread(target=self.watch, name="processes", daemon=True)
        self.thread.start()

    @property
    def keeper(self) -> str | None:
        """The host that keeps the checkpoints of all; None: each writes its part to a disk that all share."""
        return None if self.share_disk else self.lines[0].host

    @property
    def on_keeper(self) -> str:
        """What to add to the name of a file of the run that other hosts do not see."""
        return "" if self.share_disk or 0 not in self.lines else f" on {self.lines[0].host}"

    @property
    def own_name(self) -> str:
        return f"process-{self.rank:02}" if self.count > 1 else ""

    @contextlib.contextmanager
    def keep_programs(self, directory: str):
        """Meanwhile each process writes what it compiles, if the directory is its own; JAX lets the first."""
        from jax._src import compiler
        from jax._src.distributed import global_state

        write = compiler._cache_write

        def write_as_first(*args) -> None:
            rank, global_state.process_id = global_state.process_id, 0
            try:
                write(*args)
            finally:
                global_state.process_id = rank

        if directory == "auto" and self.count > 1:
            compiler._cache_write = write_as_first
        try:
            yield
        finally:
            compiler._cache_write = write

    def name(self, rank: int) -> str:
        host = self.lines[rank].host if rank in self.lines else "a host that has said nothing"
        return f"process {rank} on {host}"

    # What is said

    def gather(self, name: str, value) -> list:
        """What each process says under a name, in their order. Waits for all."""
        self.board.write(f"axis/said/{name}/{self.rank}", json.dumps(value))
        while len(said := self.board.read(f"axis/said/{name}")) < self.count:
            time.sleep(POLL_S / 5)
        return [json.loads(text) for _, text in sorted(said.items())]

    def first(self, name: str, function: Callable):
        """function() of process 0, which alone calls it: a value that JSON can hold. The others wait for it."""
        value = function() if self.rank == 0 else None
        if self.count == 1:
            return value
        if self.rank == 0:
            self.board.write(f"axis/said/{name}/0", json.dumps(value))
            return value
        while not (said := self.board.read(f"axis/said/{name}")):
            time.sleep(POLL_S / 5)
        return json.loads(said[0])

    def same(self, config: dict, data: dict) -> None:
        """Compare settings, tokens and program of all. Raises: UserError naming the host and the first difference."""
        if self.count == 1:
            return
        ours = {"commit": os.environ.get("AXIS_COMMIT", "")[:7], "program": program_sha256(), "jax": jax.__version__,
                "python": platform.python_version(), "devices of each": jax.local_device_count()}  # fmt: skip
        self.tell()
        all_of_them = self.gather("about", ours | config | {"tokens": data})
        self.lines = self.read()
        for rank, theirs in enumerate(all_of_them):
            for name, x, y in differences(all_of_them[0], theirs):
                raise UserError(
                    f"the processes are not about to do the same: {name} is {y!r} for {self.name(rank)}, and {x!r} for "
                    f"{self.name(0)}; they need the same command, commit, packages and tokens")  # fmt: skip

    # How far it is

    def at(self, step: int) -> None:
        """It has come to a step, which may wait for the other processes."""
        self.line.begun, self.moved = step, time.monotonic()

    def moves(self) -> None:
        """Something was finished that does not take long by itself, as a batch of an evaluation."""
        if self.moved is not None:
            self.moved = time.monotonic()

    def show(self, steps: int, row: dict) -> None:
        """What `launcher.sh status` shows, beside the step that was taken last."""
        self.report = steps, f"{row['loss']:.4f}", f"{row['tokens_per_s']:.0f}"
        if self.count > 1 and (ms := self.pace.measure()) is not None:  # the row's step is done, and no other begun
            self.line.products_ms = [*self.line.products_ms[-1:], round(ms, 3)]

    def saved(self, step: int) -> None:
        """Process 0 has a checkpoint of a step; 0: it has none."""
        self.line.saved = step

    # Stopping: all after the same step

    def begin(self, step: int) -> bool:
        """In front of the loop, which has taken `step` steps: wait until all processes are. False: they stop there.

        From here on nobody ends because it is asked to, but all do after the same step. One that was asked before ends
        at once, and never says that it is ready; so none begins.
        """
        with self.lock:
            self.line.granted, self.line.ready, self.moved = step, True, time.monotonic()
            self.tell()
        never = lambda lines: any(line.ended and line.stop and not line.ready for line in lines)
        lines = self.wait(lambda lines: all(line.ready for line in lines) or never(lines))
        return not never(lines) and not self.stops_after(step)

    def stops_after(self, step: int) -> bool:
        """Whether all processes stop after this step; if not, this one goes on to the next.

        Nobody waits here until somebody is asked to stop. Then the step that each may begin stands fixed, whatever its
        main thread does, and the last of them is the one that all still take.
        """
        self.taken = step, int(time.time())
        with self.lock:
            self.moves()
            if not self.line.stop:
                self.line.granted = step + 1
                return False
        lines = self.wait(lambda lines: all(line.stop for line in lines))
        return step >= max(line.granted for line in lines)

    def ask(self) -> None:
        """This process was asked to stop: tell the others."""
        with self.lock:
            if not self.line.stop:
                self.line.stop = True
                self.tell()

    @property
    def preempted(self) -> int | None:
        """The process whose host the system takes away; None: there is none, or a user has asked for this stop too."""
        by = {rank: line.by for rank, line in (self.lines | {self.rank: self.line}).items()}
        return None if "user" in by.values() else next((rank for rank in by if by[rank] == "system"), None)

    def say_alive(self, more_s: float = 0.0) -> None:
        """Tell the supervisor that this process lives. Its last word tells a preempted run."""
        stopped = self.line.stopped or any(line.stopped for line in self.lines.values())
        what = "preempted" if stopped and self.preempted is not None else "joined"
        say_alive(self.peer_timeout_s + more_s, what)

    # Ending

    def leave(self, status: int, error: str = "") -> int:
        """The end of the command: wait for the others, if all is well. Else they are told, and the process ends."""
        if status and self.count > 1:
            self.end(status, error or ("it was asked to stop" if status > 128 else f"exit status {status}"), say=False)
        self.moved = None
        with self.lock:
            self.line.ended = True
            self.tell()
        self.wait(lambda lines: all(line.ended for line in lines))
        self.closed.set()
        self.thread.join()
        self.lines = self.read()
        self.say_alive(SHUTDOWN_S)
        if self.count > 1:
            with contextlib.suppress(RuntimeError):  # all is done, whoever else is gone by now
                jax.distributed.shutdown()
        return status

    def end(self, status: int, why: str, say: bool = True) -> None:
        """End this process now, from any thread; the others see why on the board."""
        self.line.stopped |= status > 128  # of a signal
        self.say_alive(LAST_WORDS_S)
        if say:
            with contextlib.suppress(OSError):  # a full disk
                print(f"\nerror: {why}", file=sys.stderr)
                log_to_file(f"error: {why}")
        self.line.status, self.line.why, self.line.ended = status, why, True
        if self.gone != 0:  # process 0 keeps the board
            with contextlib.suppress(RuntimeError):
                self.tell()
                end = time.monotonic() + LAST_WORDS_S
                while self.rank == 0 and time.monotonic() < end and self.some_still_read():
                    time.sleep(POLL_S / 5)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self.exit(status)

    def some_still_read(self) -> bool:
        ended = {rank for rank, line in self.read().items() if line.ended} | {self.gone}
        return not ended >= {*range(self.count)}

    # The thread

    def tell(self) -> None:
        with self.lock:
            self.line.beat += 1
            self.board.write(f"axis/line/{self.rank}", json.dumps(dataclasses.asdict(self.line)))

    def read(self) -> dict[int, Line]:
        return {rank: Line(**json.loads(text)) for rank, text in self.board.read("axis/line").items()}

    def wait(self, what: Callable[[list[Line]], bool]) -> list[Line]:
        """Wait until it is true of the lines of all processes."""
        while len(lines := self.read()) < self.count or not what([*lines.values()]):
            time.sleep(POLL_S / 10)
        return [*lines.values()]

    def watch(self) -> None:
        """Until `closed`: say that this process lives, see how the others do, and how long a step takes."""
        exchange = ThreadPoolExecutor(1, thread_name_prefix="board")  # what is asked of a host that hangs may hang too
        asked, answered = None, time.monotonic()
        while not self.closed.wait(POLL_S):
            if time.monotonic() - self.told_alive >= ALIVE_S:
                self.say_alive()
                self.told_alive = time.monotonic()
            asked = asked or exchange.submit(lambda: self.tell() or self.read())
            try:
                lines, asked = asked.result(POLL_S), None
            except (RuntimeError, TimeoutError) as error:
                asked = asked if isinstance(error, TimeoutError) else None
                if time.monotonic() - answered > self.peer_timeout_s:
                    self.gone = 0
                    return self.end(LOST, f"{self.name(0)}, to whom all others are connected, does not answer any more")
                continue
            answered = time.monotonic()
            self.judge(lines, answered)
            self.write_progress()
        exchange.shutdown()

    def judge(self, lines: dict[int, Line], now: float) -> None:
        """Act on what the lines say: the end of another process, a stop, a silent one, one that is stuck."""
        for rank, line in lines.items():
            if rank not in self.lines or line.beat > self.lines[rank].beat:
                self.heard[rank] = now
        self.lines = lines
        if self.line.status:
            return  # it is ending
        for rank, line in lines.items():
            if line.ended and line.status:
                status = line.status if line.status in (2, 130, 143) else LOST
                return self.end(status, f"{self.name(rank)} has ended, and so does this one: {line.why}")
        for rank, since in self.heard.items():
            if now - since > self.peer_timeout_s and not (rank in lines and lines[rank].ended):
                self.gone = rank
                step = f"; it had come to step {lines[rank].begun}" if rank in lines else ""
                return self.end(LOST, f"{self.name(rank)} has been silent for {self.peer_timeout_s} s{step}")
        if any(line.stop for line in lines.values()) and not self.line.stop:
            self.ask()
            self.on_stop()
        self.name_slow(lines)
        if self.hang_timeout_s and self.moved is not None and now - self.moved > self.hang_timeout_s:
            self.line.stuck = True
        if any(line.stuck for line in [*lines.values(), self.line]):
            self.found_stuck = self.found_stuck or self.show_stacks(now)
            if now - self.found_stuck > LAST_WORDS_S / 2:
                self.end(LOST, self.verdict([lines[rank] for rank in sorted(lines)]))

    def name_slow(self, lines: dict[int, Line]) -> None:
        """Process 0 says which host is slow, once."""
        slow = pace.slowest({rank: line.products_ms for rank, line in lines.items()}) if self.rank == 0 else None
        if slow and slow[0] not in self.slow:
            self.slow.add(slow[0])
            log(f"slow       {self.name(slow[0])} takes {slow[1]:.1f} ms for products that take the median host "
                f"{slow[2]:.1f} ms, twice in a row: all wait for it at every step")  # fmt: skip

    def show_stacks(self, now: float) -> float:
        """Write what every thread of this process does, and put on its line what the main one does. Returns `now`."""
        for file in log_files():
            with contextlib.suppress(OSError):  # a full disk
                print(f"no step was finished for {self.hang_timeout_s} s; {self.name(self.rank)} does this:", file=file)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename]
        frames = dict.fromkeys(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in (stack[-1], *ours[-1:]))
        self.line.where = ", called from ".join(frames)
        return now

    def verdict(self, lines: list[Line]) -> str:
        """Who did not come to the step that the others wait at, and what it does instead."""
        step = max(line.begun for line in lines)
        late = [rank for rank, line in enumerate(lines) if line.begun < step]
        what = f"no step was finished for {self.hang_timeout_s} s: "
        if late:
            does = "; ".join(f"{self.name(n)} did not come to step {step}, it is at {lines[n].where}" for n in late)
        else:
            does = f"all have come to step {step}, process {self.rank} is at {lines[self.rank].where}"
        return f"{what}{does}; the stacks of each are in its log"

    def write_progress(self) -> None:
        """Tell the supervisor, if one started this process: step, steps, loss, tokens/s, time of the step."""
        path, now = os.environ.get("AXIS_PROGRESS"), (self.taken, self.report)
        if path and self.taken and now != self.shown:
            step, at = self.taken
            with contextlib.suppress(OSError):  # a full disk
                replace_file(path, "\t".join(map(str, (step, *self.report, at))) + "\n")
                self.shown = now


@functools.cache
def program_sha256() -> str:
    """Of the files that Python reads here: hosts that name one commit may still differ by an edit."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("*.py", "[a-z]*/*.py") for path in ROOT.glob(pattern)):
        if path.relative_to(ROOT).parts[0] not in ("tests", "chapters", "docs", "bench", "runs", "tokens"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
