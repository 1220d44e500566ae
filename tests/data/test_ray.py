"""`--engine ray` runs the same work on a cluster. Most of these tests need no cluster."""

import contextlib
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from data import engine, prepare
from utils import UserError


class StandIn(types.ModuleType):
    """A fake of the parts of Ray that are used, in this process. It records tasks and chooses the order of results."""

    class exceptions:
        class RayTaskError(Exception):
            def __init__(self, cause):
                self.cause = cause

    def __init__(self):
        self.begun, self.most = None, 0

    def is_initialized(self):
        return self.begun is not None

    def init(self, **how):
        self.begun = how

    def cluster_resources(self):
        return {"CPU": 3.0}

    def put(self, held):
        return held

    def remote(self, **how):
        return lambda work: types.SimpleNamespace(remote=lambda held, task: (work, held, task))

    def wait(self, waiting, timeout):
        self.most = max(self.most, len(waiting))
        return [waiting[-1]], waiting[:-1]

    def get(self, one):
        work, held, task = one
        try:
            return work(held, task)
        except Exception as error:
            raise self.exceptions.RayTaskError(error) from error


@pytest.fixture
def ray(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    return stand_in


def test_a_cluster_makes_the_same_tokens(tmp_path, ray, monkeypatch):
    """Catches results assembled in the order of arrival, and all tasks submitted at once."""
    monkeypatch.setattr(prepare.sources, "LEAST_UNIT_BYTES", 100)
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"{n} words " * 20)
    words = ["--source", f"text:{tmp_path}/*.txt", "--val-share", "0.3", "--shard-tokens", "400"]
    more = {"one": [], "ray": ["--engine", "ray", "--ray_address", "10.0.0.1:6379"]}
    for name, how in more.items():
        assert prepare.main([*words, *how, "--out", str(tmp_path / name)]) == 0
    contents = lambda name: {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert contents("ray") == contents("one") and len(contents("one")) > 10
    assert ray.begun["address"] == "10.0.0.1:6379" and 1 < ray.most <= engine.QUEUED_PER_WORKER * 3


def test_an_error_in_a_cluster_s_worker_is_reported(tmp_path, ray, capsys):
    """Catches Ray's traceback in place of the file and the row."""
    (tmp_path / "rows.jsonl").write_text("broken")
    words = ["--source", f"jsonl:{tmp_path}/rows.jsonl", "--engine", "ray", "--out", str(tmp_path / "out")]
    assert prepare.main(words) == 2
    assert "rows.jsonl:1: not JSON" in capsys.readouterr().err


def test_a_missing_cluster_is_reported(ray, monkeypatch):
    """Catches a traceback, and a command that continues without a cluster."""

    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(UserError, match=r"--ray_address auto: Could not find any running Ray instance\."):
        next(engine.run(len, None, [1], 1, "ray", "auto"))


def test_without_ray_the_error_names_the_install_command(monkeypatch):
    """Catches a traceback, and an import of Ray for those who do not use it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="--engine ray needs the package ray; install it with: make extra-ray"):
        next(engine.run(len, None, [1], 1, "ray", "auto"))


CLUSTER = """
import pathlib, sys, threading, time
import ray.cluster_utils
from data import prepare

out, *words = sys.argv[1:]
cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)

def lose():
    units = pathlib.Path(out, ".unfinished-units")
    while len(done := [*units.glob("unit-*")]) < 5:
        time.sleep(0.01)
    cluster.remove_node(other, allow_graceful=False)
    print("lost a node after", len(done), "units", flush=True)

threading.Thread(target=lose, daemon=True).start()
status = prepare.main([*words, "--out", out, "--engine", "ray", "--ray_address", cluster.address])
alive = lambda: sum(node["Alive"] for node in ray.nodes())
end = time.monotonic() + 60  # the cluster notices seconds later than its workers
while alive() > 1 and time.monotonic() < end:
    time.sleep(0.1)
print("nodes alive:", alive())
ray.shutdown()
cluster.shutdown()
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.extra("ray")
def test_a_real_cluster_that_loses_a_machine_makes_the_same_tokens(tmp_path):
    """Catches work that is lost with a node of a Ray cluster, or whose tokens appear twice."""
    (tmp_path / "texts").mkdir()
    for n in range(60):
        (tmp_path / f"texts/{n}.txt").write_text(f"{n} words, and others of text {n}. " * 20_000)
    words = ["--source", f"text:{tmp_path}/texts/*.txt", "--val-share", "0.3", "--shard-tokens", "3000000"]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path),
           "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # fmt: skip
    command = [sys.executable, "-c", CLUSTER, str(tmp_path / "ray"), *words]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=said, cwd=Path(__file__).parents[2],
                                   start_new_session=True)  # fmt: skip
        try:
            status = process.wait(timeout=180)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a cluster that is still running
                os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "said").read_text()
    assert status == 0, text[-2000:]
    assert "lost a node after" in text and "nodes alive: 1" in text
    assert prepare.main([*words, "--out", str(tmp_path / "one")]) == 0
    contents = lambda name: {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    assert contents("ray") == contents("one") and len(contents("one")) > 10
