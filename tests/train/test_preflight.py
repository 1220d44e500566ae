"""`--run.check only` reports before the start what would end a run at start-up, without using a device or writing."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from data import prepare
from tests.test_training import ROOT, run, snapshot, write_texts
from train import checkpoint
from weights import __main__ as weights_command


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with tokens."""
    home = tmp_path_factory.mktemp("ready")
    source = write_texts(home / "texts", "abcd efgh. ")
    prepare.prepare(prepare.Arguments(str(home / "tokens"), source, "bytes", val_share=0.3))
    return home


@pytest.fixture
def asked(home, tmp_path):
    """The flags of a run that would start, in the test's own directory."""
    return ["tiny", "--data.path", home / "tokens", "--run.dir", tmp_path / "runs", "--run.check", "only"]


def test_it_needs_no_device_no_peer_and_no_lock(asked, tmp_path, tmp_path_factory):
    """Catches a check that waits for other hosts or for a device in use by another run, one that writes files, and one
    that takes a minute."""
    told = {"JAX_PLATFORMS": "nonsense", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "4"}
    words = [sys.executable, "main.py", *map(str, asked), "--devices", "8", "--mesh", "fsdp=4,tensor=2"]
    for rank, where in (("0", "starts at step 0"), ("3", "only process 0 knows where it resumes")):
        env = os.environ | told | {"JAX_PROCESS_ID": rank, "AXIS_RESTART_WAIT": "75"}
        env |= {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}  # empty, so each plan traces its layers
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
        said = (
            f"checked    tiny: 86,648 parameters on mesh fsdp=4,tensor=2, 4 processes; an epoch is 14 steps; {where}\n"
        )
        assert (done.stdout, done.stderr, done.returncode) == (said, "", 0)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "no tokens": ("--data.path nowhere", {}, "no tokens at 'nowhere'"),
    "too few rows": ("--model.vocab_size 100", {}, "has token ids 0..256, but model.vocab_size=100 allows"),
    "no room for the prompt": ("--data.seq_len 2 --run.sample_prompt abcd", {}, "leave no room in data.seq_len=2"),
    "mesh": ("--devices 6 --mesh fsdp=2,tensor=3", {}, "cannot split .*tensor"),
    "batch": ("--devices 8 --mesh data=8 --data.batch_size 12", {}, r"12 % 8 = 4\); use data.batch_size=8 or 16"),
    "more mesh than devices": ("--devices 4 --mesh fsdp=8", {}, "mesh fsdp=8 needs 8 devices, and there are 4; "),
    "hosts": ("--devices 8 --mesh fsdp=8", {"JAX_NUM_PROCESSES": "3"}, r"8 % 3 = 2\); start 1, 2, 4, 8"),
    "hosts of a TPU": ("--devices 8 --mesh fsdp=8", {"AXIS_PROCESSES": "5"}, r"8 % 5 = 3\); start"),
    "memory": ("--devices 4 --mesh fsdp=4 --model.d_ff 80000000", {}, "would need .*; --run.check no starts it anyway"),
    "options": ("--run.compiler_options nonsense", {}, "'nonsense' must be NAME=VALUE"),
    "no way back": ("--run.init_from nowhere", {}, "nowhere"),
    "too early": ("", {"AXIS_RESTART_WAIT": "60"}, r"RESTART_WAIT=60: .*peer_timeout_s=60 s .*\(60 \+ 15 = 75\); set "
                  "RESTART_WAIT=75, or --run.peer_timeout_s 45"),
    "much too early": ("--run.peer_timeout_s 4", {"AXIS_RESTART_WAIT": "9"}, r"\(4 \+ 15 = 19\); set RESTART_WAIT=19$"),
    "again from the start": ("--run.restart scratch", {"AXIS_RESTART_WAIT": "80"}, "each restart after a failure"),
    "place": ("--run.dir /dev/null", {},
              "cannot write to /dev/null/tiny: /dev/null is not a directory; choose another --run.dir"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_errors_of_a_start_are_reported(asked, monkeypatch, what):
    """Catches eight hosts that are started only to report a wrong flag, one after the other or after minutes; and a
    message that differs from the run's."""
    more, told, message = REFUSED[what]
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    status, out, err = run([*asked, *more.split()])
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and re.search(message, err.rstrip()), err


def test_only_process_0_checks_the_directory(asked, home, tmp_path, monkeypatch):
    """Catches different settings, and missing checkpoints or those of another host, that are found only after all
    processes have joined; a check of a directory that does not matter; and one that refuses a folder of weights."""
    begun = [*asked[:-2], "--run.steps", "4", "--run.checkpoint_every", "2"]
    assert run(begun)[0] == 0
    directory, before = tmp_path / "runs/tiny", snapshot(tmp_path)
    check = lambda *more: run([*begun, "--run.check", "only", *more])[1:]
    assert check()[0].endswith("; already complete with 4 steps\n")
    assert check("--run.steps", "9")[0].endswith("; resumes from step 4 of 9\n")
    assert check("--run.restart", "scratch")[0].endswith("; starts at step 0\n")
    assert "optim.lr is 0.5 here and" in check("--optim.lr", "0.5")[1]
    assert snapshot(tmp_path) == before
    # Weights without a checkpoint, as `slim` and `from-hf` write them
    assert weights_command.main(["slim", str(directory), str(tmp_path / "slim")]) == 0
    assert check("--run.name", "new", "--init-from", tmp_path / "slim")[0].endswith("; starts at step 0\n")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert check("--optim.lr", "0.5")[0].endswith("; only process 0 knows where it resumes\n")
    monkeypatch.delenv("JAX_PROCESS_ID")

    shutil.rmtree(directory / "checkpoints")
    assert "the latest checkpoint, step 4, is missing" in check("--run.steps", "9")[1]
    shutil.rmtree(directory)
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "checkpoints" / checkpoint.KEEPER).write_text("host07")
    assert check()[0].endswith("; starts at step 0\n"), "the launcher's name for this host is unknown"
    monkeypatch.setenv("AXIS_HOST", "host02")
    assert "are on host07, but process 0 runs on host02: put host07 first" in check()[1]
