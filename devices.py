"""Simulated devices, the memory of devices, and the cache of compiled programs. JAX is imported only if needed."""

import contextlib
import functools
import glob
import importlib.util
import os
import resource
import sys
import tempfile
import threading
from pathlib import Path

from utils import UserError, log


def simulate_devices(count: int) -> None:
    """Simulate `count` CPU devices in this process and its children. They are threads that share the machine's cores.

    Call this in your own program before it imports JAX; commands have --devices. On a machine with an accelerator, also
    set JAX_PLATFORMS=cpu, or JAX uses the accelerator.
    """
    assert "jax" not in sys.modules, "simulate_devices must be called before JAX is imported"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    prepare_collectives(count)


def prepare_collectives(devices: int) -> None:
    """Keep collectives between several CPU devices of one process from deadlocking. Call it before using a device.

    - Start more threads: a thread sleeps in a collective until the other devices of its group join. XLA's default is
      one thread per device, so devices that start a second program can take the threads that the first still needs
      (`python bench/deadlock.py`).
    - Use no compilation cache, except for programs that `compile/ordered.py` compiled: a program that is read from a
      file has lost part of the order of its collectives (seen with JAX 0.10.2).
    """
    if devices > 1:
        os.environ.setdefault("NPROC", str(min(8 * devices, 256)))  # XLA reads the size of its thread pools from NPROC
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # for a later import of JAX, and for child processes
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_enable_compilation_cache", False)


def has_tpu_files() -> bool:
    """Whether there are device files of a TPU. Some GPUs have the second kind (/dev/vfio) too."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def only_cpu() -> bool:
    """Whether JAX will find only this machine's CPU."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not (has_tpu_files() or importlib.util.find_spec("jax_plugins"))


def skip_absent_tpu() -> None:
    """Set JAX to CPU if libtpu is installed (by `make plan`) but there is no TPU, because libtpu then prints errors.

    Do nothing if the environment sets platforms or a TPU, or if there are TPU device files or JAX plugins.
    """
    set_by_jax = {"TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH"}  # set whenever libtpu is installed
    named = {name for name in os.environ if name.startswith("TPU_")} - set_by_jax
    if named or {"JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"} & set(os.environ) or not importlib.util.find_spec("libtpu"):
        return
    if has_tpu_files() or importlib.util.find_spec("jax_plugins"):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has already read the environment
        sys.modules["jax"].config.update("jax_platforms", "cpu")


skip_absent_tpu()  # when imported, because not every program that uses JAX calls a function of this file


def devices_per_process(count: int, processes: int) -> int:
    """Return count / processes. Raises: UserError if `count` is not divisible by `processes`."""
    if count % processes:
        fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(f"--devices {count} (total of all processes) is not divisible by the {processes} processes "
                        f"({count} % {processes} = {count % processes}); start {fit} processes")  # fmt: skip
    return count // processes


def use_devices(count: int, processes: int = 1) -> None:
    """Simulate `count` CPU devices over all processes after JAX is imported; 0: use the devices of this machine.

    Raises: UserError if there is an accelerator, if `count` is not divisible by the number of processes, or if this
    process already uses another number of devices.
    """
    import jax

    if not count:
        return
    of_each = devices_per_process(count, processes)
    prepare_collectives(count)
    with contextlib.suppress(RuntimeError):  # JAX is already initialized; the number of devices is checked below
        jax.config.update("jax_num_cpu_devices", of_each)
    devices = jax.devices()
    if devices[0].platform != "cpu":
        raise UserError(f"--devices {count} simulates CPU devices, but this machine has {len(devices)} x "
                        f"{devices[0].device_kind}; drop --devices, or set JAX_PLATFORMS=cpu")  # fmt: skip
    if len(devices) != count:
        raise UserError(f"--devices {count}: this process already uses {len(devices)} devices; start a new process")


def memory_bytes(devices) -> int | None:
    """Return the memory of one device in bytes, or None if unknown. CPU devices divide the process's memory equally."""
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    return share_of_memory(sum(device.process_index == devices[0].process_index for device in devices))


def peak_host_bytes() -> int:
    """Return the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_device_bytes() -> int | None:
    """Return the largest memory of any device of this process so far; None if unknown, as for a CPU."""
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


def share_of_memory(devices: int) -> int:
    """Return the bytes that each of this process's CPU devices may use, if there are `devices` of them."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # a container may have a lower limit; "max" is not a number
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits) // devices


@contextlib.contextmanager
def compile_cache(directory: str, enabled: bool = True):
    """Context in which JAX caches compiled programs in a directory; an empty name disables the cache.

    enabled  False: cache only the programs of `ordered.compile`
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if directory and (why := why_not_writable(directory)):
        log(f"note: compiled programs are not cached: {directory} {why}; set another JAX_COMPILATION_CACHE_DIR")
        directory = ""
    settings = {"jax_enable_compilation_cache": enabled and bool(directory),
                "jax_compilation_cache_dir": directory or None}  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX reads the settings only once, so make it read them again
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@functools.cache  # called for every program that is compiled
def why_not_writable(directory: str, longest_s: float = 10.0) -> str:
    """Return why a directory is not writable, or "". A disk that does not answer for `longest_s` is not writable."""
    found = []

    def write() -> None:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                found.append("")
        except OSError as error:
            found.append(f"cannot be written: {error.strerror}")

    thread = threading.Thread(target=write, daemon=True)  # a hung disk blocks it forever
    thread.start()
    thread.join(longest_s)
    return found[0] if found else f"does not answer within {longest_s:g} s"
