"""Ctrl-C and SIGTERM lose no work, a second signal ends the process, and the printed command resumes the run."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import weakref

import pytest

import main
from bench import soak
from tests.train.small_run import ROOT, STEPS, flags, run, signal_at_step, trained_steps
from train import checkpoint, interruptions


def test_ctrl_c_saves_and_the_printed_command_resumes(home, straight, stopped, partway):
    """Catches steps lost since the last checkpoint, an exit status that looks like a failure, and a command that starts
    something else."""
    (directory, (status, out, err)), (argv, copy) = stopped, partway
    assert status == 0 and "stopping after this step and saving a checkpoint; signal again to stop at once" in err
    assert "Traceback" not in err
    assert trained_steps(directory) == list(range(1, 50)), "it stopped too late or too early"
    assert checkpoint.latest_step(directory / "checkpoints") == 49 and not (directory / ".lock").exists()
    words = shlex.split(re.search(r"(?m)^stopped    this resumes from \S+/checkpoints/49:  (.*)$", out)[1])
    report = re.search(r"(?m)^report     this plots the steps so far:  (.*)$", out)[1]
    assert shlex.split(report)[1:] == ["-m", "train.report", os.path.relpath(directory)]
    assert words[2:] == flags(home, home / "stopped") and (ROOT / words[1]).resolve() == ROOT / "main.py"
    status, out, err = run(argv)
    assert (status, err) == (0, "") and f"resumed    at step 49 from {copy}/checkpoints" in out
    assert out.startswith(f"resuming   {copy.name} from step 49 of {STEPS}\n")
    assert soak.differences(argv, copy, straight) == []


def test_sigterm_saves(partway):
    """Catches a preempted machine that loses steps since the last checkpoint, and handlers that are not restored."""
    argv, directory = partway
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signal_at_step(52, signal.SIGTERM):  # when a checkpoint is due anyway
        status, out, _ = run(argv)
    assert status == 0 and re.search(r"stopped    this resumes from \S+/checkpoints/52:  ", out)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert trained_steps(directory)[-1] == checkpoint.latest_step(directory / "checkpoints") == 52


@pytest.mark.parametrize("place", ["trace_step", "restore_or_init", "finish"])
def test_a_signal_where_there_is_nothing_to_save(straight, partway, monkeypatch, place):
    """Catches a traceback, or a run that continues, if the signal comes before the first step or after the last one."""
    argv, directory = partway
    work = getattr(main, place)

    def work_and_signal(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return work(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(main, place, work_and_signal)
        status, out, err = run(argv)
    assert status == 0 and "Traceback" not in err
    assert re.match(r"stopped    this resumes from \S+/checkpoints/\d+:  ", out.rstrip().splitlines()[-1])
    assert checkpoint.latest_step(directory / "checkpoints") == (STEPS if place == "finish" else 49)
    if place == "finish":
        assert run(argv)[::2] == (0, "")
        assert soak.differences(argv, directory, straight) == []


HANGING = """
import sys, time
import main
from train import checkpoint
def hang(*_):
    print("HANGS", flush=True)
    time.sleep(600)
checkpoint.save = hang
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_second_ctrl_c_stops_at_once(home, straight, tmp_path):
    """Catches a run that cannot be ended from the keyboard because its last save hangs."""
    words = [sys.executable, "-c", HANGING, *flags(home, tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert any(line == "HANGS\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert any("stopping after this step" in line and "signal again to stop" in line for line in process.stderr)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(timeout=10) == 130
    assert (
        err.startswith("stopped at once; no checkpoint was saved; this starts at step 0:  ") and "Traceback" not in err
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stopped_before_its_first_checkpoint_says_so(home, tmp_path, monkeypatch, number):
    """Catches success and a promise to resume from a run that had nothing to save yet."""
    kept = []

    def compile_and_signal(*_):
        program = threading.Event()
        kept.append(weakref.ref(program))
        signal.raise_signal(number)

    monkeypatch.setattr(main, "trace_step", compile_and_signal)
    status, out, _ = run(flags(home, tmp_path))
    assert status == 128 + number
    assert kept[0](), "XLA may still compile it in a thread, which crashes if it is freed"
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("stopped    no checkpoint was saved; this starts at step 0:  ") and "main.py" in last
    assert "train.report" not in out, "there is nothing to plot yet"


@pytest.mark.parametrize("status, stopped", [(143, False), (0, True)])
def test_a_stopped_process_skips_the_shutdown(status, stopped):
    """Catches exit status 139 after a stop: the interpreter's shutdown crashed in threads that still compiled."""
    code = f"""import atexit, os, types
from train.hosts import processes
atexit.register(os.abort)
message = types.SimpleNamespace(stopped={stopped})
processes.current = types.SimpleNamespace(board=types.SimpleNamespace(message=message))
print("said")
processes.exit_process({status})"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "said\n")


def test_ctrl_c_during_the_imports_is_one_line(tmp_path):
    """Catches a page of traceback from the middle of an import during the first seconds of a run."""
    (tmp_path / "jax.py").write_text("import time\nprint('IMPORTS', flush=True)\ntime.sleep(600)\n")
    env, pipe = os.environ | {"PYTHONPATH": str(tmp_path)}, subprocess.PIPE
    words = [sys.executable, "main.py"]
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert any(line == "IMPORTS\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(timeout=10) == 130
    assert err == "\ninterrupted; nothing was changed\n"


def test_the_command_repeats_what_was_typed():
    """Catches a number of steps given twice, a restart repeated by accident, and words that a shell would split."""
    own = "tiny --run.dir 'my runs' --run.steps 5 --run.restart scratch --run.steps=7 --run.seed=1"
    own = shlex.split(own)
    words = lambda *changed, **how: shlex.split(interruptions.command(own, *changed, **how))[2:]
    assert words({"run.steps": 9}) == ["tiny", "--run.dir", "my runs", "--run.seed=1", "--run.steps", "9"]
    assert words({"run.seed": 2, "optim.lr": 0.5})[-4:] == ["--run.seed", "2", "--optim.lr", "0.5"]
    assert words(restart=True) == [*own[:5], "--run.steps=7", "--run.seed=1", "--run.restart", "scratch"]
    assert words() == [*own[:5], "--run.steps=7", "--run.seed=1"]
