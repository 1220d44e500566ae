"""Simulated devices, memory, compiled programs on disk, process-0 logging. Nothing here imports JAX before it must."""

import contextlib
import functools
import glob
import importlib.util
import io
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import errors
from errors import UserError


def simulate_devices(count: int) -> None:
    """Make this process, and those it starts, see `count` CPU devices, threads that share the machine's cores.

    For a program of one's own: its first lines, as it must run before JAX is imported; commands have --devices. With an
    accelerator, set JAX_PLATFORMS=cpu too, or JAX works there.
    """
    assert "jax" not in sys.modules, "simulate_devices must be called before JAX is imported"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    prepare_collectives(count)


def prepare_collectives(devices: int) -> None:
    """Keep collectives of several CPU devices of one process from deadlock. Must run before the first use of a device.

    - Threads: one that meets a collective sleeps until the other devices of its group come. With XLA's default, one
      thread a device, devices that begin with a second program leave none for those that are late with the first
      (`python bench/deadlock.py`).
    - No compilation cache, but for what `xla/ordered.py` has compiled: a program that is read from a file has lost more
      of the order of its collectives (seen with JAX 0.10.2).
    """
    if devices > 1:
        os.environ.setdefault("NPROC", str(min(8 * devices, 256)))  # XLA's name for the size of its thread pools
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # if JAX is imported later, and in processes started here
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_enable_compilation_cache", False)


def has_tpu_files() -> bool:
    """Whether there are device files as a TPU has them; some GPUs have the second."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def only_cpu() -> bool:
    """Whether JAX will find nothing but this machine's CPU."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not (has_tpu_files() or importlib.util.find_spec("jax_plugins"))


def skip_absent_tpu() -> None:
    """Keep JAX from looking for a TPU with libtpu, which `make plan` installs, where there is none: it prints errors.

    Nothing changes where platforms or a TPU are named, where there are a TPU's device files, or plugins of other chips.
    """
    set_by_jax = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # wherever libtpu is installed
    named = {name for name in os.environ if name.startswith("TPU_")} - set_by_jax
    if named or {"JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"} & set(os.environ) or not importlib.util.find_spec("libtpu"):
        return
    if has_tpu_files() or importlib.util.find_spec("jax_plugins"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # which has read it
        sys.modules["jax"].config.update("jax_platforms", "cpu")


skip_absent_tpu()


def devices_of_each(count: int, processes: int) -> int:
    """How many of `count` devices each process has. Raises: UserError if they cannot have equally many."""
    if count % processes:
        fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(f"--devices {count} are those of all processes, and {count} / {processes} is no whole number; "
                        f"start {fit} processes")  # fmt: skip
    return count // processes


def use_devices(count: int, processes: int = 1) -> None:
    """Make all processes together see `count` CPU devices, now that JAX is imported; 0: those there are.

    Raises: UserError if there is an accelerator, the processes cannot have equally many devices, or this one has worked
    with another number.
    """
    import jax

    if not count:
        return
    of_each = devices_of_each(count, processes)
    prepare_collectives(count)
    with contextlib.suppress(RuntimeError):  # too late; it does not matter if the number is the same
        jax.config.update("jax_num_cpu_devices", of_each)
    devices = jax.devices()
    if devices[0].platform != "cpu":
        raise UserError(f"--devices {count} simulates CPU devices, and here are {len(devices)} x "
                        f"{devices[0].device_kind}; drop --devices, or set JAX_PLATFORMS=cpu")  # fmt: skip
    if len(devices) != count:
        raise UserError(f"--devices {count}: this process has begun to work with {len(devices)}; start another")


def memory_bytes(devices) -> int | None:
    """Memory of one of these devices; of CPU devices, an equal share of what this process may use; None: unknown."""
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    return share_of_memory(sum(device.process_index == devices[0].process_index for device in devices))


def share_of_memory(devices: int) -> int:
    """Bytes that each of so many CPU devices of this process may use."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # a container may be allowed less; "max" is no number
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits) // devices


@contextlib.contextmanager
def compile_cache(directory: str, enabled: bool = True):
    """Meanwhile keep compiled programs in a directory, and find them there; empty: compile anew, and keep none.

    enabled  False: only those of `ordered.compile`
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if directory and (why := unreachable(directory)):
        log(f"note: compiled programs are not kept: {directory} {why}; JAX_COMPILATION_CACHE_DIR names another one")
        directory = ""
    settings = {"jax_enable_compilation_cache": enabled and bool(directory),
                "jax_compilation_cache_dir": directory or None}  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX asks for the settings once, at its first program, and now again
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@functools.cache  # every program that is compiled asks
def unreachable(directory: str, longest_s: float = 10.0) -> str:
    """Say why nothing can be written to a directory; empty: it can. A disk that does not answer is given up soon."""
    found = []

    def write() -> None:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                found.append("")
        except OSError as error:
            found.append(f"cannot be written: {error.strerror}")

    thread = threading.Thread(target=write, daemon=True)  # where the disk does not answer, it waits on
    thread.start()
    thread.join(longest_s)
    return found[0] if found else f"does not answer within {longest_s:g} s"


def cache_directory() -> str:
    """The user's cache folder for this project: $XDG_CACHE_HOME/axis-by-axis, or ~/.cache/axis-by-axis."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "axis-by-axis")


# Logging --------------------------------------------------------------------------------------------------------------


def is_main_process() -> bool:
    """True in process 0, the one that prints and writes; always true before JAX is imported."""
    return "jax" not in sys.modules or sys.modules["jax"].process_index() == 0


def log(*words) -> None:
    """Print on process 0, or on every process that a supervisor keeps a log of; write to the log file, if any."""
    if is_main_process() or "AXIS_PROGRESS" in os.environ:
        print(*words, flush=True)
    log_to_file(*words)


_log_file = None


def log_to_file(*words) -> None:
    if _log_file:
        print(time.strftime("%F %T "), *words, file=_log_file, flush=True)


class Patient(io.FileIO):
    """A file of words: those that a full disk does not take are lost, and nothing ends for it."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # its reader has left
            raise
        except OSError:
            return len(data)


def patient(file: Path | int, mode: str = "w") -> io.TextIOWrapper:
    """Open a path, or a descriptor, for words that are written line by line. Raises: OSError if that cannot be."""
    return io.TextIOWrapper(io.BufferedWriter(Patient(file, mode)), "utf-8", "backslashreplace", line_buffering=True)


def open_log(path: Path) -> None:
    """From now on what is logged is appended to this file too, as far as there is room for it."""
    global _log_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _log_file, errors.log_error = patient(path, "a"), log_to_file
    except OSError as error:
        log(f"note: there will be no {path}: {error.strerror}")


def log_files() -> list:
    """Where a process writes what only it knows: its standard error, and its log file."""
    return [sys.stderr, *([_log_file] if _log_file else [])]
