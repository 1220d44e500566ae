"""Training on several hosts: main.py over real ssh, tmux, jax.distributed and gloo, as on a slice.

Where a test does not say so the hosts share no disk: process 0 keeps the checkpoints.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.launch import rehearsal
from tests.launch.rehearsal import ROOT, column, launch, log, rows, wait_until
from train import checkpoint

pytestmark = pytest.mark.launch

STEPS, EVERY = 40, 10
TOKENS = ["--source", "text:train/*.py", "--tokenizer", "bytes", "--out", "tokens/train"]
FLAGS = shlex.split(
    "tiny --model.n_layers 4 --model.dense_prefix 0 --model.moe_every 1 --model.attention gqa --model.n_shared 0 "
    "--devices 8 --mesh fsdp=2,stage=2,tensor=2 --work.microbatches 2 --data.path tokens/train --run.name r "
    f"--run.steps {STEPS} --run.checkpoint_every {EVERY} --run.log_every 1 --run.eval_every 14 --run.eval_batches 1 "
    "--run.keep_checkpoints 3 --run.peer_timeout_s 10"
)


def words(*more, fault="", **environment):
    """The training command, with a fault if there is one."""
    settings = environment | ({"AXIS_FAULT": fault} if fault else {})
    script = "tests/launch/faulty.py" if fault else "main.py"
    return ["env", *(f"{name}={value}" for name, value in settings.items()), "python", script, *FLAGS, *more]


@pytest.fixture(scope="module")
def four():
    """Four hosts with the project, and tokens."""
    with rehearsal.rehearse(4, whole=True) as fleet:
        done = launch(fleet, "python", "-m", "data.prepare", *TOKENS)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for_end(fleet, fleet.hosts)
        yield fleet


@pytest.fixture(scope="module")
def alone(four, tmp_path_factory):
    """Losses of the same run in one process, {step: loss}."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "tokens").symlink_to(four.hosts[0].axis / "tokens")
    command = [sys.executable, ROOT / "main.py", *FLAGS]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"XLA_FLAGS": rehearsal.FAST, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=400 * rehearsal.PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return losses(folder / "runs/r")


def run_of(host):
    return host.axis / "runs/r"


def losses(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]
    assert [step for step, _ in found] == [*range(1, len(found) + 1)], "steps are missing, or taken twice"
    return dict(found)


def check_losses(host, alone, last):
    found = losses(run_of(host))
    assert len(found) == last
    assert found == pytest.approx({step: alone[step] for step in found}, rel=1e-5)


def names(hosts):
    return "".join(f"{host.name}\n" for host in hosts)


def wait_for_end(fleet, hosts, seconds=240):
    """Wait until all hosts' commands have ended; returns their exit statuses."""
    path = "launches/latest/exit"
    try:
        wait_until(lambda: all((host.axis / path).exists() for host in hosts), seconds)
    except AssertionError:
        raise AssertionError("\n\n".join(log(host)[-3000:] for host in hosts)) from None
    return [int((host.axis / path).read_text()) for host in hosts]


def wait_for_step(host, step, seconds=180):
    wait_until(lambda: f"step {step:>5}/{STEPS}" in log(host), seconds)


def checkpoints(host):
    """Steps that are saved; every one is good, and nothing is left over."""
    found = checkpoint.list_steps(run_of(host) / "checkpoints")
    assert [(one.step, one.find_fault()) for one in found] == [(one.step, None) for one in found]
    return [one.step for one in found]


def test_four_hosts_train_as_one_and_two_go_on(four, alone):
    """Catches hosts that compute something else than one process, a stop that parts them, a checkpoint that only as
    many hosts can read as wrote it."""
    started = launch(four, *words())
    assert started.returncode == 0, started.stdout + started.stderr
    first = four.hosts[0]
    wait_for_step(first, 12)
    status = four.run("launcher.sh", "status")
    assert status.returncode == 0
    assert set(column("state", status.stdout)) == {"running"}
    for row in rows(status.stdout).values():
        step, steps = map(int, row["step"].split("/"))
        assert 12 <= step <= steps == STEPS
        assert float(row["loss"]) == pytest.approx(alone[step], rel=1e-3)
        assert float(row["tokens/s"]) > 0
    logs = four.run("launcher.sh", "logs", "-n", "200").stdout
    assert all(f"{host.name} | step    12/40  loss" in logs for host in four.hosts)
    assert "Gloo" not in logs
    for i, host in enumerate(four.hosts):
        own = (run_of(host) / f"logs/process-0{i}.log").read_text()
        assert f"process {i} on host0{i}, id " in own
        assert f"step    12/{STEPS}  loss" in own

    stop = four.run("launcher.sh", "stop")
    assert stop.returncode == 0, stop.stdout + stop.stderr
    assert re.findall(r"stopped after \d+ s: exit (\d+)", stop.stdout) == ["0"] * 4
    saved = checkpoints(first)[0]
    assert f"this resumes from runs/r/checkpoints/{saved}" in stop.stdout
    assert set(column("state", four.run("launcher.sh", "status").stdout)) == {"stopped, exit 0"}
    check_losses(first, alone, saved)
    kept = [path.name for path in (run_of(four.hosts[1]) / "checkpoints").iterdir()]
    assert kept == [checkpoint.KEEPER], "the hosts share no disk"

    unasked = words(fault="kill:no process:step:1")  # not main.py, which launcher.sh asks before it starts anything
    others = four.run("launcher.sh", "--", *unasked, input=names(four.hosts[2:]))
    assert set(wait_for_end(four, four.hosts[2:])) == {2}, others.stdout
    for host in four.hosts[2:]:
        assert "the checkpoints of runs/r are on host00, but process 0 runs on host02: put host00 first" in log(host)

    two = four.hosts[:2]
    again = four.run("launcher.sh", "--", *words(), input=names(two))
    assert again.returncode == 0, again.stdout + again.stderr
    assert wait_for_end(four, two) == [0, 0]
    assert f"resumed    at step {saved} from runs/r/checkpoints" in log(first)
    check_losses(first, alone, STEPS)
    assert set(column("state", four.run("launcher.sh", "status", input=names(two)).stdout)) == {"exit 0"}


@pytest.mark.parametrize(("victim", "moment"), [pytest.param(1, "save:20", marks=pytest.mark.repeat), (0, "step:17")])
def test_a_run_goes_on_after_a_process_was_killed(four, alone, victim, moment):
    """Catches survivors that wait for ever, say only that something is wrong, or blame the disk; and a run that has to
    be started again by hand, or goes on with other losses."""
    two, once = four.hosts[:2], four.folder / f"killed-{victim}"
    command = words("--run.name", f"k{victim}", fault=f"kill:{victim}:{moment}", AXIS_FAULT_ONCE=once)
    done = four.run("launcher.sh", "--restarts", "2", "--", *command, input=names(two), RESTART_WAIT="25")
    assert done.returncode == 0, done.stdout + done.stderr
    assert wait_for_end(four, two) == [0, 0]
    killed, survivor = log(two[victim]), log(two[1 - victim])
    assert "supervisor: the command exited with status 137; restarting in 25 s, 1 of 2" in killed
    if victim:
        assert re.search("error: process 1 on host01 has been silent for 10 s; it had reached step [0-9]+", survivor)
        assert "silent" in (two[0].axis / "runs/k1/logs/process-00.log").read_text()
        assert "Traceback" not in survivor
        assert "supervisor: the command exited with status 75; restarting in 25 s, 1 of 2" in survivor
    else:  # it names process 0, unless JAX has aborted it before
        assert re.search(
            "supervisor: the command exited with status 134; restarting in 25 s|error: process 0 on host00", survivor
        )
    assert f"resumed    at step {EVERY} from runs/k{victim}/checkpoints" in log(two[0])
    found = losses(two[0].axis / f"runs/k{victim}")
    assert found == pytest.approx(alone, rel=1e-5)
    assert column("state", four.run("launcher.sh", "status", input=names(two)).stdout) == ["exit 0"] * 2


def test_a_process_that_hangs_is_named_with_its_line(four):
    """Catches hosts that wait for one another without a word, and a stack of someone who only waits."""
    two = four.hosts[:2]
    command = words("--run.name", "h", fault="hang:1:step:7", AXIS_HANG_S="8")
    done = four.run("launcher.sh", "--", *command, input=names(two))
    assert done.returncode == 0, done.stdout + done.stderr
    assert wait_for_end(four, two) == [75, 75]
    line = next(n for n, text in enumerate((ROOT / "tests/launch/faulty.py").read_text().splitlines(), start=1)
                if "time.sleep(0.1)" in text)  # fmt: skip
    where = f"faulty.py:{line} in hang_on_a_line_of_its_own"
    for host in two:
        assert f"process 1 on host01 did not reach step 7; it is at {where}" in log(host)
    hung = (two[1].axis / "runs/h/logs/process-01.log").read_text()
    assert f'faulty.py", line {line} in hang_on_a_line_of_its_own' in hung
    assert "most recent call first" in (two[0].axis / "runs/h/logs/process-00.log").read_text()
    status = four.run("launcher.sh", "status", input=names(two))
    assert status.returncode == 1
    assert column("state", status.stdout) == ["exit 75"] * 2


def test_a_misspelled_setting_is_reported_once_with_the_nearest(four):
    """Catches the commonest mistake of all, answered by the last line of a box: `FAILED: ╰────╯`."""
    done = launch(four, "python", "main.py", *FLAGS, "--run.stepz", "10")
    assert done.returncode == 1
    says, nothing = done.stderr.splitlines()
    assert re.match(r"host00 and 3 more  FAILED: error: Unrecognized options: --run.stepz.* --run.steps INT", says)
    assert nothing == "error: nothing was started, because main.py would not run on these hosts"


def test_a_preempted_host_does_not_end_the_run(four, alone):
    """Catches a fleet that stands still after a preemption: the run saved, and its exit status was 0."""
    two = four.hosts[:2]
    command = words("--run.name", "t", fault="term:1:step:17", AXIS_FAULT_ONCE=four.folder / "preempted")
    done = four.run("launcher.sh", "--restarts", "1", "--", *command, input=names(two), RESTART_WAIT="25")
    assert done.returncode == 0, done.stdout + done.stderr
    assert wait_for_end(four, two) == [0, 0]
    for host in two:
        assert "exited with status 0; restarting in 25 s, 0 of 1 used; not counted: a host was preempted" in log(host)
    for host, named in zip(two, ("process 1 on host01", "this host"), strict=True):
        assert f"preempted: the system asked {named} to stop (SIGTERM)" in log(host)
    assert losses(two[0].axis / "runs/t") == pytest.approx(alone, rel=1e-5)
    assert column("state", four.run("launcher.sh", "status", input=names(two)).stdout) == ["exit 0"] * 2


MOMENTS = [("compile", "-"), ("step", "5"), ("restore", "-"), ("eval", "-"), ("save", "20"), ("data", "27")]


@pytest.mark.repeat
def test_a_run_preempted_at_six_moments_ends_the_same(four, alone):
    """Catches a process that is left behind when another is taken away, a half checkpoint, and steps that are lost; and
    parts of a checkpoint that hosts which share a disk write into each other's."""
    two, reached, directory = four.hosts[:2], 0, four.folder / "shared/p"
    more = ["--run.name", "p", "--run.dir", directory.parent]
    for place, step in MOMENTS:
        done = four.run("launcher.sh", "--", *words(*more, fault=f"term:1:{place}:{step}"), input=names(two))
        assert done.returncode in (0, 1), done.stdout + done.stderr
        ended = wait_for_end(four, two, 120)
        assert ended in ([0, 0], [143, 143]), (place, ended, log(two[0])[-2000:], log(two[1])[-2000:])
        saved = checkpoint.list_steps(directory / "checkpoints")
        assert [one.find_fault() for one in saved] == [None] * len(saved), place
        steps = max((one.step for one in saved), default=0)
        if place in ("compile", "restore"):
            assert steps == reached, "nothing was to be saved"
        else:
            assert steps == max(losses(directory)) > reached, f"{place}: steps are lost"
        reached = steps
    assert reached >= 27
    assert four.run("launcher.sh", "--", *words(*more), input=names(two)).returncode == 0
    assert wait_for_end(four, two) == [0, 0]
    assert losses(directory) == pytest.approx(alone, rel=1e-5)
    assert "is not on a disk that all hosts share" not in log(two[0])
    manifest = json.loads((directory / f"checkpoints/{STEPS}/manifest.json").read_text())
    wrote = {part for name in manifest["files"] for part in name.split("/") if part.startswith("ocdbt.process_")}
    assert wrote == {"ocdbt.process_0", "ocdbt.process_1"}
