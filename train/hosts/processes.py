"""Join the processes of a run, one on each host, and end them together, since every step waits for all of them.

Each process has a message board (`board.py`), an agreement with the others (`agreement.py`) and a watchdog
(`watchdog.py`).
"""

import contextlib
import faulthandler
import functools
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
from jax._src import clusters, compiler
from jax._src.distributed import global_state  # it holds the key-value store, which has no public name

from config import RunConfig
from devices import has_tpu_files
from train.hosts.agreement import Agreement
from train.hosts.board import Board, LocalStore
from train.hosts.watchdog import GRACE_S, LOST, SHUTDOWN_S, Watchdog, say_alive
from utils import UserError, log_to_file, open_lossy

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


class Processes(NamedTuple):
    board: Board
    agreement: Agreement
    watchdog: Watchdog


current: Processes | None = None  # set once this process has joined the others


def join(run: RunConfig) -> Processes:
    """Connect to the other processes of this run, if there are any. Call this before the first use of a device.

    launcher.sh sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; Slurm's srun sets variables of its
    own. On a TPU slice, JAX finds the hosts without these variables; then launcher.sh sets AXIS_PROCESSES and
    AXIS_PROCESS_ID to the number of processes that it started, and to this one's place in its list of hosts.
    Raises: UserError if the settings are incomplete or disagree. Ends this process with LOST if not all processes join.
    """
    faulthandler.register(signal.SIGUSR2, file=2)  # for `launcher.sh stacks`; needs no Python, so it works in any hang
    rank, count = rank_and_count()
    if count > 1:
        redirect_output()
        initialize(run, num_processes=count, process_id=rank)
    elif "tpu" in os.environ.get("JAX_PLATFORMS", "tpu") and has_tpu_files() and initialize(run):
        rank, count = jax.process_index(), jax.process_count()
        if (started := int(os.environ.get("AXIS_PROCESSES", count))) != count:
            raise UserError(f"{started} processes were started, but the TPU has {count} hosts; list each host once")
        redirect_output()
    global current
    board = Board(rank, count, global_state.client or LocalStore())
    board.send()  # with the name of this host: if this process dies at once, the others can report which host it was
    agreement = Agreement(board)
    current = Processes(board, agreement, Watchdog(agreement, run))
    if (listed := int(os.environ.get("AXIS_PROCESS_ID", rank))) != rank:  # now that `end_together` can tell the others
        raise UserError(f"this host is process {rank} of the TPU, but number {listed} in the list of hosts; list the "
                        "hosts in the order of the TPU's workers, slice by slice")  # fmt: skip
    return current


def redirect_output() -> None:
    """Keep Python's output, even on a full disk, and discard what Gloo's C++ code prints for each group of devices."""
    with contextlib.suppress(OSError, ValueError):  # something else replaces standard output
        sys.stdout.flush()
        kept = os.dup(sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout, sys.stderr = open_lossy(kept), open_lossy(os.dup(sys.stderr.fileno()))


def rank_and_count() -> tuple[int, int]:
    """Read the rank of this process and the number of processes from the environment; (0, 1) if neither is set."""
    adopt_slurm()
    values = {name: os.environ.get(name) for name in VARIABLES}
    if not any(values.values()):
        return 0, 1
    if missing := [name for name, value in values.items() if not value]:
        raise UserError(f"{', '.join(missing)} not set, but several processes need all three; launcher.sh sets them")
    _, count, rank = values.values()
    if not (count.isdecimal() and rank.isdecimal() and int(rank) < int(count)):
        raise UserError(f"JAX_PROCESS_ID={rank} of JAX_NUM_PROCESSES={count}: use numbers, and an ID below the count")
    return int(rank), int(count)


def adopt_slurm() -> None:
    """Set JAX's three variables from Slurm's, if srun started several tasks and nothing else has set the three.

    SLURM_STEP_NUM_TASKS is the number of tasks that one srun started. A batch script and an interactive shell have
    SLURM_NTASKS too, the number of the whole allocation, although they are a single process.
    """
    count, rank = os.environ.get("SLURM_STEP_NUM_TASKS", "1"), os.environ.get("SLURM_PROCID")
    if int(count) == 1 or rank is None or any(os.environ.get(name) for name in VARIABLES):
        return
    address = clusters.SlurmCluster.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
    os.environ.update(zip(VARIABLES, (address, count, rank), strict=True))


def initialize(run: RunConfig, **how) -> bool:
    """Call jax.distributed.initialize; return False on a lone TPU host. Ends the process with LOST if not all join."""

    def give_up() -> None:
        who = f"process {how['process_id']} of {how['num_processes']}" if how else "this host of a TPU slice"
        with contextlib.suppress(OSError):  # a full disk
            print(f"error: {who} waited {run.join_timeout_s} s for the others: {describe_missing()}", file=sys.stderr)
            sys.stderr.flush()
        os._exit(LOST)

    say_alive(run.join_timeout_s + 60, "joining")
    # JAX aborts without naming the missing process, here and when a process dies later. So our timeouts are shorter.
    late = threading.Timer(run.join_timeout_s, give_up)
    late.daemon = True
    late.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM itself
    if how and os.environ.get("SLURM_STEP_NUM_TASKS") == os.environ.get("SLURM_STEP_NUM_NODES", ""):
        how["cluster_detection_method"] = "deactivate"  # it would give each task one GPU; these have a node each
    try:
        jax.distributed.initialize(initialization_timeout=run.join_timeout_s + 60, shutdown_timeout_seconds=SHUTDOWN_S,
                                   heartbeat_timeout_seconds=3 * run.peer_timeout_s, **how)  # fmt: skip
    except ValueError:
        if how:
            raise
        return False
    finally:
        late.cancel()
    tolerate_outages(3 * run.peer_timeout_s)
    return True


def tolerate_outages(seconds: int) -> None:
    """Make process 0 keep its connections to other processes during network outages of up to this many seconds.

    gRPC's server closes a connection if no data is acknowledged for 20 s (TCP_USER_TIMEOUT), and JAX has no setting for
    this time. Once the network is back, the other process sees a connection reset, and JAX aborts that process.
    """
    if not (global_state.service and hasattr(socket, "TCP_USER_TIMEOUT") and os.path.isdir("/proc/self/fd")):
        return
    port = int(global_state.coordinator_address.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:  # the listening one too: new ones inherit it
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def describe_missing() -> str:
    """Describe which process did not join, as far as this process can tell."""
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS") or global_state.coordinator_address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            return (
                f"process 0 does not answer at {address} ({error.strerror or error}); see the log of its host, and "
                f"check that no firewall blocks port {port}"
            )
    return "not all processes joined; ./launcher.sh status shows which host has no process or is late"


def end_together(main: Callable) -> Callable:
    """Decorate a command that calls `join`: if it fails, tell the other processes, and exit without waiting."""

    @functools.wraps(main)
    def wrapped(*args) -> int:
        global current
        current = None
        try:
            status = main(*args) or 0
            return current.watchdog.leave(status, getattr(main, "error", "")) if current else status
        except Exception as error:
            if current is None or current.board.count == 1:
                raise
            if isinstance(error, (RuntimeError, ValueError)):  # another process may be lost: the watchdog names it
                log_to_file(f"a device or another process failed: {error}")
                time.sleep(current.watchdog.peer_timeout_s + 4 * current.board.POLL_S)
            if current.board.message.status:  # the watchdog is already ending this process for the same reason
                time.sleep(4 * GRACE_S)
            traceback.print_exc()
            current.watchdog.end(LOST, f"{type(error).__name__}: {error}", say=False)
        finally:
            if current:
                current.watchdog.closed.set()
                current.watchdog.on_end()

    return wrapped


def exit_process(status: int) -> None:
    """Exit with a status that a late SIGTERM does not change.

    After a stop, skip the interpreter's shutdown: threads that still compile could crash in it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if status > 128 or (current and current.board.message.stopped):
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def write_cache_on_every_process(wanted: bool):
    """Inside this context every process writes to the compilation cache. JAX's default is that only process 0 does."""
    write = compiler._cache_write

    def write_as_first(*args) -> None:
        with mock.patch.object(global_state, "process_id", 0):
            write(*args)

    return mock.patch.object(compiler, "_cache_write", write_as_first if wanted else write)
