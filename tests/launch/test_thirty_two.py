"""Thirty-two hosts, a v4-256, on this machine: with a command so light that ssh is what takes the time."""

import re
import time

import pytest

from tests.launch import rehearsal

pytestmark = pytest.mark.launch
COMMAND = ["sh", "-c", "trap 'exit 0' TERM; while :; do echo tick; sleep 1; done"]


def test_thirty_two_hosts(capsys):
    """Catches a host that is forgotten, asked twice or given another's number. Says what time and memory it takes."""
    with rehearsal.rehearse(32) as fleet:
        spent = {}

        def timed(name, *words):
            begin = time.monotonic()
            done = fleet.run("launcher.sh", *words, timeout=300)
            spent[name] = time.monotonic() - begin
            assert done.returncode == 0, done.stderr
            return done.stdout

        out = timed("launch, the commit shipped", "--", *COMMAND)
        for host in fleet.hosts:
            assert out.count(f"{host.name}  ready\n") == out.count(f"{host.name}  started\n") == 1
        ids = [rehearsal.launched(host)["environment"]["JAX_PROCESS_ID"] for host in fleet.hosts]
        assert ids == [str(i) for i in range(32)]
        memory = fleet.memory_bytes()
        table = timed("status", "status")
        assert [line.split()[:2] for line in table.splitlines()[1:33]] == [
            [host.name, "running"] for host in fleet.hosts
        ]
        out = timed("launch that replaces it", "--replace", "--", *COMMAND)
        assert len(re.findall(r"host\d\d  stopped after \d+ s: exit 0; its log ends: ", out)) == 32
        out = timed("stop", "stop")
        assert len(re.findall(r"host\d\d  stopped after \d+ s: exit 0; its log ends: ", out)) == 32
    with capsys.disabled():
        print(f"\n32 hosts: {', '.join(f'{name} {seconds:.0f} s' for name, seconds in spent.items())}; "
              f"while they run, {memory / 2**20:.0f} MiB, {memory / 2**20 / 32:.0f} a host")  # fmt: skip
