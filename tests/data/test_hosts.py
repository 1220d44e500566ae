"""Several hosts read one global order: each reads its own rows, and any number of hosts gives the same global batch."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dataset
import sharding
from config import preset
from data import prepare

ROOT = Path(__file__).parents[2]
B, T, WINDOWS = 16, 6, 100
GOLDEN = json.loads((Path(__file__).parent / "golden_batches.json").read_text())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A stream of consecutive numbers in 7 shards, so that a batch shows which tokens were read."""
    out = str(tmp_path_factory.mktemp("tokens") / "serial")
    ids = np.arange(WINDOWS * T)
    prepare.from_ids(ids, out, vocab_size=1000, validation_ids=ids[:50], shard_tokens=90)
    return out


def config(path, **more):
    return preset("tiny", **{"data.path": path, "data.seq_len": T, "data.batch_size": B, "model.vocab_size": 1001,
                             **more})  # fmt: skip


def hosts_of(mesh, count):
    """Divide the devices of a mesh over this many hosts, in order."""
    return np.split(mesh.devices.flatten(), count)


def parts(cfg, step, hosts, mesh="data=8"):
    """Assemble a global batch from the rows of each host: row -> values."""
    whole = {}
    for devices in hosts_of(sharding.make_mesh(mesh), hosts):
        rows = sharding.own_rows(sharding.make_mesh(mesh), B, devices)
        made = dataset.batch(cfg, step, rows=rows)
        for place, row in enumerate(rows.tolist()):
            whole[row] = {name: x[place].tolist() for name, x in made.items()}
    return whole


def as_lists(batch):
    return {row: {name: x[row].tolist() for name, x in batch.items()} for row in range(B)}


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_any_number_of_hosts_makes_the_same_global_batches(path, hosts):
    """Catches an order that depends on the number of hosts, and a row that no host makes."""
    cfg = config(path)
    for step in (0, 1, 5, 1000):
        assert parts(cfg, step, hosts) == as_lists(dataset.batch(cfg, step))


def test_a_run_resumes_on_another_number_of_hosts(path):
    """Catches a position stored per host: windows lost and doubled when 8 hosts become 4 within an epoch."""
    cfg = config(path)
    never_stopped = [as_lists(dataset.batch(cfg, step)) for step in range(15)]
    for stop, before, after in zip(np.random.default_rng(0).integers(1, 14, 3), (8, 2, 1), (4, 8, 2), strict=True):
        went_on = [parts(cfg, step, before if step < stop else after) for step in range(15)]
        assert went_on == never_stopped, f"stopped at step {stop}"


def test_a_host_reads_only_its_own_rows(path, monkeypatch):
    """Catches a host that reads the whole batch and discards most of it."""
    read = []
    honest = dataset.Split.read
    monkeypatch.setattr(dataset.Split, "read", lambda split, a, b: read.append((a, b)) or honest(split, a, b))
    for hosts in (1, 2, 4, 8):
        read.clear()
        mesh = sharding.make_mesh("data=4,tensor=2")
        (first, *_) = hosts_of(mesh, hosts)
        rows = sharding.own_rows(mesh, B, first)
        dataset.batch(config(path), 3, rows=rows)
        assert len(read) == len(rows) == B // min(hosts, 4)
        read.clear()
        list(dataset.evaluation_batches(config(path), 0, rows))
        assert sum(b - a - 1 for a, b in read) < 50 / min(hosts, 4) + T * len(rows)


@pytest.mark.parametrize("mesh, count, wanted", [
    ("data=2,stage=2,fsdp=2", 4, [range(8), range(8), range(8, 16), range(8, 16)]),  # stages have the same rows
    ("data=2,fsdp=4", 4, [range(4 * n, 4 * n + 4) for n in range(4)]),
    ("stage=2,fsdp=4", 2, [range(16), range(16)]),
    ("fsdp=2,context=2,tensor=2", 8, [range(8)] * 4 + [range(8, 16)] * 4),
])  # fmt: skip
def test_the_rows_of_a_host_are_those_of_its_devices(mesh, count, wanted):
    """Catches rows divided by the number of hosts where the mesh requires another division."""
    mesh = sharding.make_mesh(mesh)
    assert [sharding.own_rows(mesh, B, on).tolist() for on in hosts_of(mesh, count)] == [list(w) for w in wanted]
    scattered = mesh.devices.flatten()[[0, -1]]  # on a torus, the devices of a host need not be neighbors
    both = {*wanted[0][: B // mesh.shape["data"] // mesh.shape["fsdp"]], B - 1}
    assert both <= set(sharding.own_rows(mesh, B, scattered).tolist())


def test_the_order_equals_the_stored_order(path):
    """Any machine and version gives the same order. Catches one that depends on a library or on Python's hash seed."""
    cfg = config(path)
    for step, (first_tokens, sha256) in GOLDEN["steps"].items():
        batch = dataset.batch(cfg, int(step))
        assert batch["tokens_BT"][:, 0].tolist() == first_tokens, step
        assert digest(batch) == sha256, step


def digest(batch):
    """sha256 of all arrays of a batch, in the order of their names, little-endian."""
    return hashlib.sha256(b"".join(batch[name].astype(batch[name].dtype.newbyteorder("<")).tobytes()
                                   for name in sorted(batch))).hexdigest()  # fmt: skip


# Four processes -------------------------------------------------------------------------------------------------------

PROCESS = """
import json, os, sys
from devices import simulate_devices
simulate_devices(2)
import jax
jax.distributed.initialize(sys.argv[1], 4, int(sys.argv[2]))
import numpy as np
import dataset, sharding
from tests.data import test_hosts
count = [0]
honest = dataset.Split.read
def read(split, start, stop):
    count[0] += 1
    return honest(split, start, stop)
dataset.Split.read = read
cfg, found = test_hosts.config(sys.argv[3]), []
for mesh in sys.argv[4:]:
    mesh, count[0] = sharding.make_mesh(mesh), 0
    for step, batch in dataset.prefetch(cfg, 7, sharding.own_rows(mesh, test_hosts.B)):
        there = sharding.put(batch, mesh, test_hosts.B)
        break
    cut = [(piece.index, np.asarray(piece.data).tolist()) for piece in there["targets_BT"].addressable_shards]
    found.append([count[0], len(batch["targets_BT"]), there["targets_BT"].shape,
                  [[i.indices(n)[:2] for i, n in zip(index, (16, 6))] + [data] for index, data in cut]])
print(json.dumps(found))
"""
MESHES = {"data=4,tensor=2": 4, "data=2,stage=2,fsdp=2": 8, "fsdp=2,context=2,tensor=2": 8}  # rows per process


def test_four_processes_read_their_rows_of_the_global_batch(path):
    """Catches a process that reads other rows, and rows on the wrong devices, which JAX does not report."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROCESS, f"127.0.0.1:{port}"]
    begun = [subprocess.Popen([*command, str(rank), path, *MESHES], cwd=ROOT, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(4)]  # fmt: skip
    said = [one.communicate(timeout=480) for one in begun]
    assert not any(one.returncode for one in begun), said
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    wanted = dataset.batch(config(path), 7)["targets_BT"]
    made = 1 + dataset.AHEAD  # batches started when the first one is ready
    for number, rows in enumerate(MESHES.values()):
        whole = np.full((B, T), -1)
        for reads, own, shape, pieces in (one[number] for one in found):
            assert own == rows and reads <= rows * made and tuple(shape) == (B, T)
            for (a, b), (c, d), data in pieces:
                whole[a:b, c:d] = data
        assert np.array_equal(whole, wanted)
