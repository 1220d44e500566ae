"""Describe the machine of a host: its TPU, and which process uses what.

This file is sent to a host in one program with `supervisor.py` and `agent.py`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import urllib.request
from pathlib import Path

from launch.supervisor import read

DEVICES = os.environ.get("AXIS_DEVICES", "/dev")  # the folder of the TPU's device files; tests use another one


def has_tpu() -> bool:
    return bool(glob.glob(f"{DEVICES}/accel[0-9]*") or glob.glob(f"{DEVICES}/vfio/[0-9]*"))


def holder_pids(target: str) -> list[int]:
    """Return the ids of the processes that have a file open. Only root also sees other users' processes."""
    pids = set()
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == target:
                pids.add(int(link.split("/")[2]))
    return sorted(pids)


def user_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe_process(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"process {pid} ({user_of(os.stat(f'/proc/{pid}').st_uid)} {' '.join(words.split())[:80]})"
    except OSError:
        return f"process {pid}"


def processes_that_handle(number: int, group: int) -> dict[int, bool]:
    """Return {process id: whether it is frozen} for the processes of a group that have a handler for a signal."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, KeyError):
            if os.getpgid(int(name)) == group:
                lines = read(Path(f"/proc/{name}/status")).splitlines()
                fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
                if int(fields["SigCgt"], 16) >> (number - 1) & 1:
                    found[int(name)] = fields["State"].startswith("T")
    return found


def tpu() -> str:
    """Describe who uses the TPU. libtpu locks a file; if a user left this file behind, no other can open the TPU."""
    file = os.environ.get("LIBTPU_LOCKFILE", "/tmp/libtpu_lockfile")
    if not os.path.exists(file):
        return "free" if has_tpu() else "none"
    at = os.stat(file)
    for fields in map(str.split, read(Path("/proc/locks")).splitlines()):
        if len(fields) > 5 and fields[5].endswith(f":{at.st_ino}"):
            return f"in use by {describe_process(int(fields[4]))}"
    return (
        "free"
        if at.st_uid == os.geteuid()
        else f"locked by an unused file that {user_of(at.st_uid)} left behind; remove it: sudo rm {file}"
    )


def tpu_worker() -> tuple[int, int] | None:
    """Return this host's process number and the number of processes, as JAX counts them on a TPU; None: unknown.

    Source: jax/_src/clusters/cloud_tpu_cluster.py, which asks the same server of Google Cloud.
    """
    if not has_tpu() or "TPU_SKIP_MDS_QUERY" in os.environ:
        return None
    try:
        pairs = [line.split(":", 1) for line in metadata("tpu-env").splitlines() if ":" in line]
        told = {name.strip(): value.strip().strip("'") for name, value in pairs}
        number = lambda name, usual: int(os.environ.get(name) or told.get(name) or usual)
        workers, slices = len(metadata("worker-network-endpoints").split(",")), number("MEGASCALE_NUM_SLICES", 1)
        return int(metadata("agent-worker-number")) + number("MEGASCALE_SLICE_ID", 0) * workers, workers * slices
    except (OSError, ValueError):  # a machine of another kind
        return None


def metadata(name: str) -> str:
    """Ask Google Cloud's metadata server for an attribute of this machine."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()
