"""Check that this host, or every host of a launch, is ready to train; print one row per host, and sum over all devices.

`launcher.sh --hosts hosts.txt -- python -m train.selfcheck` checks all hosts before a long run: versions, devices, free
disk space and clocks. Then it sums one number per device, which tests communication between all devices.
"""

import dataclasses
import json
import platform
import shutil
import time
from typing import Annotated

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from config import RunConfig
from devices import use_devices
from train.hosts.board import Board
from train.hosts.processes import end_together, join
from utils import exit_status, log

HELP = """\
e.g. python -m train.selfcheck --devices 8

Report the versions, devices, free disk space and clock of this host, or of all hosts if launcher.sh starts it.

Then sum one number over all devices. The exit status is 1 if a host differs from the first one or is not ready."""
FREE_GIB, CLOCK_S = 10, 2  # less free disk space, or a larger clock difference, is a problem


@dataclasses.dataclass(frozen=True)
class Check:
    devices: int = 0  # simulate this many CPU devices, in total over all hosts; 0: use the real devices
    json: bool = False  # print JSON instead


@dataclasses.dataclass(frozen=True)
class Row:
    """One host: versions, devices, free disk space in GiB, and the difference of its clock from the first host's."""

    host: str
    python: str
    jax: str
    devices: int
    kind: str
    free_gib: int
    clock_s: float


def gather_rows(board: Board) -> list[Row]:
    """Return one row per process, in rank order."""
    board.gather("all are here", None)
    device, now = jax.local_devices()[0], time.time()
    mine = Row(board.message.host, platform.python_version(), jax.__version__, jax.local_device_count(),
               device.device_kind, shutil.disk_usage(".").free // 2**30, now)  # fmt: skip
    table = [Row(**row) for row in board.gather("rows", dataclasses.asdict(mine))]
    return [dataclasses.replace(row, clock_s=round(row.clock_s - table[0].clock_s, 1)) for row in table]


def find_problems(hosts: list[Row]) -> list[str]:
    """Return one line for each problem."""
    lines = []
    for row in hosts:
        for name in ("python", "jax", "devices", "kind"):
            if getattr(row, name) != getattr(hosts[0], name):
                lines.append(
                    f"{row.host} has {name} {getattr(row, name)}, but {hosts[0].host} has {getattr(hosts[0], name)}"
                )
        if row.free_gib < FREE_GIB:
            lines.append(f"{row.host} has {row.free_gib} GiB of free disk space, less than {FREE_GIB}")
        if abs(row.clock_s) > CLOCK_S:
            lines.append(f"the clock of {row.host} differs by {row.clock_s:+} s from the clock of {hosts[0].host}")
    return lines


def sum_over_devices() -> tuple[float, float]:
    """Sum 1 over all devices; return the sum and the seconds of the second call, since the first call compiles."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    ones = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, P("all")), lambda i: np.ones(mesh.size)[i])
    add = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
    add(ones).block_until_ready()
    begin = time.perf_counter()
    return float(add(ones)), time.perf_counter() - begin


@end_together
@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Annotated[Check, tyro.conf.arg(name="")], args=argv, prog="python -m train.selfcheck",
                    description=HELP)  # fmt: skip
    board = join(RunConfig(peer_timeout_s=24)).board  # join timeout: 2 minutes
    use_devices(args.devices, board.count)
    table = gather_rows(board)
    total, seconds = sum_over_devices()
    faults = find_problems(table)
    if total != jax.device_count():
        faults.append(f"the sum over {jax.device_count()} devices is {total:g}")
    if args.json:
        log(json.dumps({"hosts": [dataclasses.asdict(row) for row in table], "sum_s": seconds, "problems": faults}))
    elif board.rank == 0:
        log(f"{'host':16} {'python':8} {'jax':8} {'devices':20} {'free GiB':>8} {'clock skew s':>12}")
        for row in table:
            devices = f"{row.devices} x {row.kind}"
            log(f"{row.host:16} {row.python:8} {row.jax:8} {devices:20} {row.free_gib:>8} {row.clock_s:>+12.1f}")
        well = f"all is well on {len(table)} hosts; a sum over {jax.device_count()} devices took {seconds * 1e3:.1f} ms"
        log("\n".join(f"PROBLEM: {one}" for one in faults) or well)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
