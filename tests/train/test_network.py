"""A network that is cut for less than `run.peer_timeout_s` does not end a run."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.train.several import free_port
from tests.train.small_run import ROOT

# A process that joins, and then keeps using the connection of the message board.
JOINED = """
import sys, time
from config import RunConfig
from train.hosts import processes
one = processes.join(RunConfig(peer_timeout_s=60))
one.board.gather("joined", one.board.rank)
{then}
one.board.gather("done", one.board.rank)
sys.exit(one.watchdog.leave(0))
"""
READ_TIMEOUTS = """
import json, os, socket, stat
found = []
for name in os.listdir("/proc/self/fd") if one.board.rank == 0 else ():
    if os.path.exists(path := f"/proc/self/fd/{name}") and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(fileno=os.dup(int(name))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.getsockname()[1] == int(PORT):
                found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
print(json.dumps(found), flush=True)
"""
COUNT = """
print("joined", flush=True)
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    time.sleep(0.5)
"""


def start(rank, address, then, namespace=()):
    told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
    command = [*namespace, sys.executable, "-c", JOINED.format(then=then)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | told, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="gRPC sets this timeout on Linux alone")
def test_connections_survive_as_long_as_heartbeats():
    """Catches gRPC's own 20 s limit, after which it closes a connection and thereby ends the run."""
    port = free_port()
    both = [start(rank, f"127.0.0.1:{port}", READ_TIMEOUTS.replace("PORT", str(port))) for rank in (0, 1)]
    said = [one.communicate(timeout=480) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    timeouts = json.loads(said[0][0])
    # the listening socket, and the connection of each process
    assert len(timeouts) >= 3 and set(timeouts) == {180_000}


def in_network(name, *command):
    subprocess.run(["ip", "netns", "exec", name, *command], check=True)


@pytest.fixture
def two_networks():
    """The names of two networks of this machine, connected by a virtual cable: 10.77.77.1 and 10.77.77.2."""
    names = [f"axis-{os.getpid()}-{rank}" for rank in (0, 1)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns",
                        names[1]], check=True)  # fmt: skip
        for rank, name in enumerate(names):
            in_network(name, "ip", "link", "set", "lo", "up")
            in_network(name, "ip", "addr", "add", f"10.77.77.{rank + 1}/24", "dev", "cable")
            in_network(name, "ip", "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


@pytest.mark.launch
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root may make networks and cut them")
@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("iptables")), reason="needs ip and iptables")
def test_a_network_outage_is_survived(two_networks):
    """The network is cut for 25 s, longer than gRPC's server waits. Catches a run that JAX aborts on every host (exit
    status 134) although all processes are alive."""
    address, seconds = "10.77.77.1:4711", 45
    inside = [("ip", "netns", "exec", name) for name in two_networks]
    both = [start(rank, address, COUNT.replace("SECONDS", str(seconds)), inside[rank]) for rank in (0, 1)]
    assert [one.stdout.readline() for one in both] == ["joined\n"] * 2
    # Cut one direction first: process 0 still receives a request, so its answer is not acknowledged.
    for name, seconds_until_next in ((two_networks[1], 2), (two_networks[0], 23)):
        in_network(name, "iptables", "-I", "INPUT", "-i", "cable", "-j", "DROP")
        time.sleep(seconds_until_next)
    for name in two_networks:
        in_network(name, "iptables", "-D", "INPUT", "1")
    said = [one.communicate(timeout=480) for one in both]
    assert [one.returncode for one in both] == [0, 0], said
