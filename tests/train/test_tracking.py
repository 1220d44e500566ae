"""wandb gets each step once, in one wandb run, no matter how often training stops; and wandb never affects training.
These tests use a stand-in module named wandb, first on the import path, which records its calls."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import RunConfig, preset
from train import tracking
from train.directory import open_run
from train.hosts.processes import join

ROOT = Path(__file__).parents[2]
RECORDER = """
import json, os, time
def say(*words):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(words) + "\\n")
class Run:
    def log(self, values, step):
        say("log", step, values)
        BEHAVIOUR
    def finish(self):
        say("finish")
Settings = dict
def init(**settings):
    say("init", settings)
    return Run()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Install a stand-in for wandb with this behavior on each row; returns a function that reads the recorded calls."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "front"))
    monkeypatch.setattr(tracking, "POLL_S", 0.05)

    def install(behaviour="pass", module=None):
        (tmp_path / "front").mkdir(exist_ok=True)
        text = module or RECORDER.replace("BEHAVIOUR", behaviour)
        (tmp_path / "front" / "wandb.py").write_text(text)
        calls = tmp_path / "calls"
        return lambda: [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    return install


@pytest.fixture
def directory(tmp_path):
    """A run's directory as it is before the first row."""
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "config.json").write_text(json.dumps({"config": {"optim": {"lr": 0.5}}}))
    return tmp_path / "my run"


CFG = preset("tiny", **{"run.tracker": "wandb"})


def write(directory, kind, *steps, **values):
    with (directory / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"kind": kind, "step": step, **(values or {"loss": step / 4})}) + "\n")


def logged(calls):
    return [call[1] for call in calls if call[0] == "log"]


def wait_for(what):
    end = time.monotonic() + 80
    while not what():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_rows_are_sent_as_they_come(stand_in, directory, capfd):
    """Catches rows that wait for the end, rows of a step that are sent separately (wandb would drop the second), a
    number lost from a list or a table of norms, null and text sent as numbers, and offline mode that needs a key."""
    calls = stand_in()
    write(directory, "start", 0, params_total=5)
    with tracking.Tracker(CFG, directory):
        write(directory, "train", 1, loss=2.5, grad_norm=None, tokens_per_expert=[[1, 2], [3, 4]])
        write(directory, "eval", 1, loss=2.25, full=False)
        write(directory, "norms", 1, gradient={"a.b": 0.5, "c": [1.5]})
        write(directory, "train", 2)
        wait_for(lambda: logged(calls()) == [0, 1])
        write(directory, "end", 2, seconds=7.0)
    assert [call[0] for call in calls()] == ["init", "log", "log", "log", "finish"]
    settings = calls()[0][1]
    assert settings["mode"] == "offline" and settings["dir"] == str(directory) and settings["resume"] == "allow"
    assert (settings["name"], settings["config"]) == ("my run", {"optim": {"lr": 0.5}})
    assert calls()[2][2] == {
        "train/loss": 2.5, "train/tokens_per_expert/0/0": 1, "train/tokens_per_expert/0/1": 2,
        "train/tokens_per_expert/1/0": 3, "train/tokens_per_expert/1/1": 4, "eval/loss": 2.25, "eval/full": False,
        "norms/gradient/a.b": 0.5, "norms/gradient/c/0": 1.5,
    }  # fmt: skip
    assert calls()[3][1:] == [2, {"train/loss": 0.5, "end/seconds": 7.0}]
    assert "note" not in capfd.readouterr().out


def test_a_resumed_run_continues_where_it_stopped(stand_in, directory):
    """Catches a second wandb run for one training, a step sent twice because it was repeated, a step that is missing
    because the first process had half of its rows, and half a line that is read."""
    calls = stand_in()
    with tracking.Tracker(CFG, directory):
        write(directory, "train", 1, 2, 3, 4, 5)
        with (directory / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "tra')
    assert logged(calls()) == [1, 2, 3, 4], "step 5 may get more rows"
    (directory / "metrics.jsonl").unlink()  # what Metrics does to rows past the checkpoint at step 2
    write(directory, "train", 1, 2)
    with tracking.Tracker(CFG, directory):
        write(directory, "start", 2, time=1.0)
        write(directory, "train", 3, 4, 5)
        write(directory, "eval", 5)
        write(directory, "train", 6)
        write(directory, "end", 6)
    assert logged(calls()) == [1, 2, 3, 4, 5, 6]
    assert "eval/loss" in next(call[2] for call in calls() if call[:2] == ["log", 5])
    first, second = (call[1]["id"] for call in calls() if call[0] == "init")
    assert first == second == json.loads((directory / "wandb.json").read_text())["id"]


def test_it_ends_when_training_is_killed(stand_in, directory):
    """Catches a process that keeps running, and rows of a killed run that are never sent."""
    calls = stand_in()
    code = (f"import time, os, pathlib\nfrom train import tracking\nfrom tests.train.test_tracking import CFG, write\n"
            f"d = pathlib.Path({str(directory)!r})\nwrite(d, 'train', 1, 2, 3)\n"
            f"t = tracking.Tracker(CFG, d)\nprint(t.process.pid, flush=True)\nos.kill(os.getpid(), 9)")  # fmt: skip
    env = os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    wait_for(lambda: calls() and calls()[-1] == ["finish"])
    assert logged(calls()) == [1, 2]


@pytest.mark.parametrize("kept", ["environment", "netrc"])
def test_with_a_key_it_is_online(stand_in, directory, tmp_path, monkeypatch, kept):
    """Catches offline mode for a user who is logged in."""
    calls = stand_in()
    if kept == "netrc":
        (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
        (tmp_path / ".netrc").chmod(0o600)
    else:
        monkeypatch.setenv("WANDB_API_KEY", "secret")
    write(directory, "train", 1)
    with tracking.Tracker(CFG, directory):
        pass
    assert calls()[0][1]["mode"] == "online"


@pytest.mark.parametrize("behaviour, module, note", [
    ("raise ConnectionError('no route')", None, "wandb stopped: ConnectionError: no route"),
    ("os._exit(9)", None, "wandb stopped: "),
    ("time.sleep(600)", None, "wandb did not finish within 0.5 s"),
    (None, "import time; time.sleep(600)", "wandb did not finish within 0.5 s"),
    (None, "import nothing_of_this_name as wandb",
     "wandb stopped: No module named 'nothing_of_this_name'; `make extra-wandb` installs it"),
    (None, "raise SystemExit(4)", "wandb stopped: "),
])  # fmt: skip
def test_wandb_never_stops_or_slows_training(stand_in, directory, monkeypatch, capfd, behaviour, module, note):
    """Catches a wandb that raises, dies, hangs or is missing and thereby stops or delays training; two notes, or
    none."""
    stand_in(behaviour, module)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.5 if "sleep" in f"{behaviour}{module}" else 20)
    start = time.monotonic()
    with tracking.Tracker(CFG, directory) as tracker:
        write(directory, "train", 1, 2, 3)
        begun = time.monotonic() - start
        if tracking.PATIENCE_S == 20:
            tracker.process.wait(20)  # it fails while training goes on
        write(directory, "train", 4)
    assert begun < 0.5, "starting it kept training waiting"
    assert tracker.process.returncode is not None, "the process is still running"
    out = capfd.readouterr().out
    assert f"note: {note}" in out and out.count("note:") == 1
    assert f"because metrics.jsonl has them all; see {directory}/wandb.log" in out
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 4


def test_tracking_is_off_by_default(directory):
    """Catches a run that contacts a service nobody asked for."""
    with tracking.Tracker(preset("tiny"), directory) as tracker:
        assert tracker.process is None
    assert not (directory / "wandb.log").exists()


def test_a_restart_starts_a_new_wandb_run(directory, tmp_path, monkeypatch):
    """Catches a restart that adds its steps to the run that it deleted."""
    for name in ("wandb.json", "wandb.log"):
        (directory / name).write_text("{}")
    (directory / "wandb").mkdir()
    monkeypatch.setattr("train.directory.describe", lambda cfg: {})
    alone = join(RunConfig())
    open_run(preset("tiny", **{"run.restart": "scratch"}), directory, alone)
    alone.watchdog.closed.set()
    assert {path.name for path in directory.iterdir()} == {"config.json", "parameters.txt"}
