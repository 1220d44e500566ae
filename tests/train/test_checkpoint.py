"""Checkpoints survive faults: damaged steps are skipped, a kill costs only the steps since the last save."""

import contextlib
import errno
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import generate
import main
import optimizer
import pipeline
import sharding
import train.steps
from bench import soak
from config import preset, replace
from tests import helpers
from tests.train.small_run import EVERY, ROOT, STEPS, flags, run, snapshot, trained_steps
from train import checkpoint, progress
from utils import UserError

# Steps and their manifests --------------------------------------------------------------------------------------------


def array(step):
    return np.full(1000, step, np.float32)


def save(directory, steps, losses=None, **keep):
    """Save a small array at each step."""
    with checkpoint.Saver(directory, **keep) as saver:
        for step in steps:
            checkpoint.save(saver, step, {"x": jax.numpy.asarray(array(step))}, {"by": "us"}, (losses or {}).get(step))


def read(directory, step=None):
    x = jax.device_put(array(0))
    target = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}
    return np.asarray(checkpoint.restore(directory, target, step)["x"])


def largest(directory):
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(file, place=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def empty(directory):
    shutil.rmtree(directory)
    directory.mkdir()


FAULTS = {
    "bit flip": (lambda step: flip(largest(step / "state")), r"state/\S+ is damaged: its sha256 differs "),
    "flip in about": (lambda step: flip(step / "about.json"), r"about\.json is damaged: "),
    "truncated": (lambda step: cut(largest(step / "state")), r"state/\S+ is truncated: \d+ bytes, but \d+ in"),
    "grown": (lambda step: (step / "about.json").write_text(" " * 99), r"about\.json is 99 bytes, but 12 in"),
    "missing file": (lambda step: largest(step / "state").unlink(), r"state/\S+ is missing"),
    "empty": (empty, "the directory is empty"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), r"it has no manifest\.json"),
    "cut manifest": (lambda step: cut(step / "manifest.json"), r"its manifest\.json cannot be read: "),
    "flipped manifest": (lambda step: flip(step / "manifest.json", 12), r"its manifest\.json cannot be read: "),
    "left over": (lambda step: step.rename(f"{step}.saving"), "left over from an interrupted save or deletion"),
    "left by Orbax": (lambda step: step.rename(f"{step}.orbax-checkpoint-tmp-7"), "left over from an interrupted "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_step_is_skipped(tmp_path, capsys, fault):
    """Catches training on a flipped bit, a step that counts as newest because of its name alone, a reason that does not
    name the file, and a good step that is deleted because another is damaged."""
    save(tmp_path, [1, 2, 30], keep=3)
    damage, reason = FAULTS[fault]
    damage(tmp_path / "30")
    before, said = snapshot(tmp_path), []
    assert checkpoint.latest_step(tmp_path, said.append) == 2
    assert len(said) == 1 and re.fullmatch(rf"skipped    {tmp_path}/30\S*: {reason}.*", said[0]), said
    np.testing.assert_array_equal(read(tmp_path), array(2))
    assert capsys.readouterr().err == f"{said[0]}\nreading    step 2 of {tmp_path}\n"
    assert checkpoint.read_about(tmp_path, 2) == {"by": "us"}
    with pytest.raises(ValueError, match=reason if "left" not in fault else "no checkpoint of step 30"):
        read(tmp_path, 30)
    assert snapshot(tmp_path) == before


def test_if_all_steps_are_damaged_each_is_reported(tmp_path):
    """Catches a run that restarts at step 0 and overwrites the old metrics because no step could be read."""
    save(tmp_path, [1, 2])
    flip(largest(tmp_path / "1" / "state"))
    empty(tmp_path / "2")
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* can be used: .*/2: the directory is empty; .*/1: state/"
    ):
        checkpoint.latest_step(tmp_path)
    assert checkpoint.latest_step(tmp_path / "nowhere") is None


def save_parts(directory, step=5):
    """Save two parameters, a moment and a step. Return this state, and a target for its parameters."""
    place = lambda x: jax.device_put(np.asarray(x))
    params = {"w_DF": place(array(3).reshape(10, 100)), "norm_D": place(np.float32([1.5, 2.5]))}
    state = {"params": params, "optimizer": {"mu": place(array(4))}, "step": place(np.int32(step))}
    with checkpoint.Saver(directory) as saver:
        checkpoint.save(saver, step, state, {})
    return state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


def test_restoring_parameters_reads_nothing_else(tmp_path, monkeypatch, capsys):
    """Catches reading the moments, three times as many bytes, before generating text; damaged moments that block good
    parameters; damaged parameters that are read; and a step number that is not printed."""
    state, target = save_parts(tmp_path)
    read, checksum = [], train.steps._checksum
    monkeypatch.setattr("train.steps._checksum", lambda *of: read.append(of[1]) or checksum(*of))
    for damaged in (False, True):
        if damaged:
            flip(largest(tmp_path / "5" / "state" / "rest"))
        jax.tree.map(np.testing.assert_array_equal, checkpoint.restore_params(tmp_path, target), state["params"])
        assert capsys.readouterr().err == f"reading    step 5 of {tmp_path}\n"
    assert any("/state/params/" in path for path in read) and not [path for path in read if "/state/rest/" in path]
    with pytest.raises(ValueError, match=r"5: state/rest/\S+ is damaged"):
        checkpoint.restore(tmp_path, state)
    flip(largest(tmp_path / "5" / "state" / "params"))
    with pytest.raises(ValueError, match=r"5: state/params/\S+ is damaged"):
        checkpoint.restore_params(tmp_path, target)


def test_parameters_of_another_model_are_refused_by_name(tmp_path):
    """Catches a parameter that the checkpoint lacks and that is skipped, or left as a placeholder for an array."""
    _, target = save_parts(tmp_path)
    wider = jax.ShapeDtypeStruct((10, 101), np.float32, sharding=target["w_DF"].sharding)
    cases = {
        r"w_DF has shape \(10, 100\) in checkpoint .*/5, \(10, 101\) in the model; ": target | {"w_DF": wider},
        "the model has bias_D, but checkpoint .*/5 does not; ": target | {"bias_D": target["norm_D"]},
        "checkpoint .*/5 has norm_D, but the model does not; ": {"w_DF": target["w_DF"]},
    }
    for message, other in cases.items():
        with pytest.raises(ValueError, match=message):
            checkpoint.restore_params(tmp_path, other)


def test_a_step_of_an_earlier_version_is_read(tmp_path):
    """It has one folder for all arrays. Catches an old run that cannot resume, or is read without verification."""
    state, target = save_parts(tmp_path / "new")
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "about.json").write_text("{}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "5" / "state", sharding.flatten_named(state))
    checkpoint.write_manifest(str(tmp_path / "5"), 5, None)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(tmp_path, state), state)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore_params(tmp_path, target), state["params"])
    flip(largest(tmp_path / "5" / "state"))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.restore_params(tmp_path, target)


def test_a_directory_is_renamed_to_its_step_last(tmp_path, monkeypatch):
    """Catches a directory that counts as a checkpoint while it or its manifest is still being written."""
    waits, goes_on = threading.Event(), threading.Event()
    write = checkpoint.write_manifest

    def write_late(*args):
        waits.set()
        assert goes_on.wait(60)
        write(*args)

    save(tmp_path, [1])
    monkeypatch.setattr(checkpoint, "write_manifest", write_late)
    with checkpoint.Saver(tmp_path, keep=1) as saver:
        checkpoint.save(saver, 2, {"x": jax.numpy.asarray(array(2))}, {})
        assert waits.wait(60)
        assert sorted(os.listdir(tmp_path)) == ["1", "2.saving"], "deleted the old step too early"
        assert checkpoint.latest_step(tmp_path) == 1
        goes_on.set()
    assert os.listdir(tmp_path) == ["2"]


def test_the_newest_steps_and_the_best_are_kept(tmp_path):
    """Catches a policy that deletes the newest step in favor of a better one, that keeps the highest loss as the best,
    or takes NaN for the lowest; and a policy that a new process forgets."""
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: float("nan"), 5: 3.5, 6: 7.0, 7: 9.0}
    for steps in ([1, 2, 3, 4], [5, 6, 7, 8]):
        save(tmp_path, steps, losses, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["2", "7", "8"]
    save(tmp_path, [9], {9: 100.0}, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["2", "9"]


def test_a_damaged_step_does_not_count_as_kept(tmp_path):
    """Catches a policy that counts a damaged step as one of the newest and so deletes the last good one, or that
    deletes a damaged step which somebody may still repair."""
    save(tmp_path, [1, 2, 50], keep=3)
    flip(largest(tmp_path / "2" / "state"))
    flip(largest(tmp_path / "50" / "state"))
    before = snapshot(tmp_path)
    save(tmp_path, [3], keep=2)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "50"]
    after = snapshot(tmp_path)
    assert all(after[path] == before[path] for path in after if path in before)
    assert checkpoint.latest_step(tmp_path) == 3


def test_a_damaged_step_is_replaced_when_it_is_saved_again(tmp_path):
    """Catches a resumed run that cannot save a step because a damaged one is in the way, and leftovers that remain."""
    save(tmp_path, [1, 2], keep=2)
    flip(largest(tmp_path / "2" / "state"))
    (tmp_path / "3.saving" / "state").mkdir(parents=True)
    (tmp_path / "1.deleting").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, [2], keep=2)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "notes.txt"]
    np.testing.assert_array_equal(read(tmp_path), array(2))


def test_the_command_lists_and_verifies_without_a_device(tmp_path):
    """Catches a table that needs a working accelerator, exit status 0 for a damaged step, and a best step that is not
    marked."""
    save(tmp_path / "checkpoints", [5, 7, 12], {5: 2.75, 12: 2.5}, keep=3)

    def command(*words):
        env = os.environ | {"JAX_PLATFORMS": "nonsense"}
        words = [sys.executable, "-m", "train.checkpoint", *map(str, words)]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.returncode, done.stdout

    status, out = command("verify", tmp_path)
    assert status == 0
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / "12").rglob("*") if path.is_file())
    assert re.search(rf"(?m)^ +12  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d +{size:,}   2\.5000  best  good$", out)
    assert re.search(r"(?m)^ +7  \d{4}-.*  good$", out) and re.search(r"(?m)^ +5  .*   2\.7500 +good$", out)
    flip(largest(tmp_path / "checkpoints" / "12" / "state"))
    (tmp_path / "checkpoints" / "9.saving").mkdir()
    status, out = command("verify", tmp_path / "checkpoints", "--json")
    rows = json.loads(out)
    assert status == 1 and [row["name"] for row in rows] == ["12", "9.saving", "7", "5"]
    assert "is damaged" in rows[0]["fault"] and rows[2]["fault"] is None
    assert [row["best"] for row in rows] == [False, False, False, True], "a damaged step is not the best"


def test_the_command_reports_each_directory(tmp_path, capsys):
    """Catches a list that reads every byte, a leftover reported as damage, and a traceback for an empty directory."""
    save(tmp_path, [7, 12], keep=3)
    flip(largest(tmp_path / "12" / "state"))
    (tmp_path / "13.saving").mkdir()
    assert checkpoint.main(["ls", str(tmp_path)]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "state",
        "deletion",
        "complete",
        "complete",
    ]
    shutil.rmtree(tmp_path / "12")
    assert checkpoint.main(["verify", str(tmp_path)]) == 0
    (tmp_path / "12").mkdir()
    assert checkpoint.main(["verify", str(tmp_path)]) == 1
    capsys.readouterr()
    assert checkpoint.main(["verify", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/nowhere does not exist; pass the directory of a run, such as runs/laptop\n"
    )


# Meshes ---------------------------------------------------------------------------------------------------------------

MESHES = ("data=2", "fsdp=2,tensor=2", "stage=2,expert=2", "fsdp=2,context=2", "data=2,stage=2,tensor=2",
          "expert=2,context=2,tensor=2")  # fmt: skip


@functools.cache
def target(cfg, mesh):
    """Return the shapes and shardings of the training state on a mesh."""
    return checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, sharding.make_mesh(mesh)))


@pytest.fixture(scope="module")
def random_state():
    """A training state as NumPy arrays, in which no two numbers are equal."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(x.dtype) if x.ndim else rng.integers(2, 99, dtype=x.dtype)
    return jax.tree.map(draw, target(preset("tiny"), "data=1"))


@pytest.fixture(scope="module")
def saved_on_each_mesh(random_state, tmp_path_factory):
    """Checkpoints of the same state: step n was saved on the n-th mesh."""
    directory = tmp_path_factory.mktemp("meshes")
    with checkpoint.Saver(directory, keep=len(MESHES)) as saver:
        for step, mesh in enumerate(MESHES):
            place = lambda x, shape: jax.device_put(x, shape.sharding)
            checkpoint.save(saver, step, jax.tree.map(place, random_state, target(preset("tiny"), mesh)), {})
    return directory


PAIRS = [
    pytest.param(here, there, marks=() if there == MESHES[number - 1] else pytest.mark.repeat)
    for number, here in enumerate(MESHES)
    for there in MESHES
]


@pytest.mark.parametrize("here, there", PAIRS)
def test_a_state_moves_from_any_mesh_to_any_other(saved_on_each_mesh, random_state, here, there):
    """Catches a shard that is written twice, not at all, or read into another's position; and an array whose sharding
    is not the one that the training step needs."""
    wanted = target(preset("tiny"), there)
    got = sharding.flatten_named(checkpoint.restore(saved_on_each_mesh, wanted, MESHES.index(here)))
    wanted, want = sharding.flatten_named(wanted), sharding.flatten_named(random_state)
    assert list(got) == list(want)
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]), x, err_msg=name)
        assert got[name].sharding == wanted[name].sharding, name


MOVING = preset("tiny", **{"model.n_layers": 2, "model.dense_prefix": 0, "model.moe_every": 1, "data.seq_len": 24,
                           "work.gather": "step", "work.tensor_exchange": "ring"})  # fmt: skip
MOVES = ("data=2", "fsdp=2,tensor=2", "stage=2,expert=2", "fsdp=2,context=2")
AFTER = 5  # number of steps to compare


@functools.cache
def step_on(mesh, cfg):
    return optimizer.train_step(replace(cfg, mesh=mesh), sharding.make_mesh(mesh))


def train_on(mesh, state, steps, cfg=MOVING):
    """Train for these steps, each with its own batch; return the state and every loss."""
    losses = []
    for step in steps:
        batch = sharding.put(helpers.random_batch(cfg, seed=step), sharding.make_mesh(mesh))
        state, metrics = step_on(mesh, cfg)(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory):
    """A run that stays on the first mesh: the loss of every step, and the directory of its checkpoint of step 2."""
    directory = tmp_path_factory.mktemp("unmoved")
    state, losses = train_on(MOVES[0], optimizer.init(MOVING, sharding.make_mesh(MOVES[0])), range(2))
    with checkpoint.Saver(directory) as saver:
        checkpoint.save(saver, 2, state, {})
    return losses + train_on(MOVES[0], state, range(2, 2 + 2 * AFTER))[1], directory


@pytest.mark.parametrize("mesh", helpers.with_repeats(MOVES[1:], ("stage=2,expert=2",)))
def test_a_run_moves_to_another_mesh_and_back(unmoved, mesh, tmp_path):
    """Catches moments, counters or a selection bias that are reset, a mesh on which a step computes something else, and
    a mesh whose checkpoints no other mesh can read."""
    want, directory = unmoved
    state, there = train_on(mesh, checkpoint.restore(directory, target(MOVING, mesh)), range(2, 2 + AFTER))
    with checkpoint.Saver(tmp_path) as saver:
        checkpoint.save(saver, 2 + AFTER, state, {})
    state = checkpoint.restore(tmp_path, target(MOVING, MOVES[0]))
    _, back = train_on(MOVES[0], state, range(2 + AFTER, 2 + 2 * AFTER))
    # Float32 sums in another order.
    np.testing.assert_allclose(there + back, want[2:], rtol=1e-5)
    assert len({round(loss, 3) for loss in want}) == len(want)


def test_evaluation_is_the_same_on_every_mesh(unmoved):
    """Catches an evaluation that counts a token twice or not at all, or sums only one device's share."""

    def score(mesh):
        place = sharding.make_mesh(mesh)
        params = checkpoint.restore(unmoved[1], target(MOVING, mesh)).params
        batch = sharding.put(helpers.random_batch(MOVING, seed=99), place)
        return [float(x) for x in pipeline.evaluate(replace(MOVING, mesh=mesh), place)(params, batch)]

    want = score("data=1")
    for mesh in MOVES:
        np.testing.assert_allclose(score(mesh), want, rtol=1e-5, err_msg=mesh)  # float32 sums in another order


def test_a_run_moves_from_an_interleaved_schedule_to_a_mesh_without_stages(tmp_path):
    """Stage 0 computes blocks 0 and 2, stage 1 computes 1 and 3, but each stores two adjacent blocks. Catches blocks
    that are stored or saved in the order of computation, which only the loss on another mesh would reveal."""
    plain = replace(MOVING, **{"model.n_layers": 4})
    chunked = replace(plain, **{"work.schedule": "interleaved:2", "work.microbatches": 4})
    start = lambda mesh: optimizer.init(plain, sharding.make_mesh(mesh))
    _, want = train_on("fsdp=2", start("fsdp=2"), range(5), plain)

    state, before = train_on("stage=2", start("stage=2"), range(2), chunked)
    with checkpoint.Saver(tmp_path) as saver:
        checkpoint.save(saver, 2, state, {})
    moved = checkpoint.restore(tmp_path, target(plain, "fsdp=2"))
    got, trained = sharding.flatten_named(moved), sharding.flatten_named(state)
    assert list(got) == list(trained)
    for name, x in trained.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(x), err_msg=name)
    _, after = train_on("fsdp=2", moved, range(2, 5), plain)
    # Float32 sums in another order.
    np.testing.assert_allclose(before + after, want, rtol=1e-5)


# Kills ----------------------------------------------------------------------------------------------------------------


def test_a_kill_and_a_resume_change_no_bit(home, straight, tmp_path):
    """60 steps without interruption equal 25 steps, `kill -9` and the rest. Catches a moment that is not saved, data
    used twice, rounding in a file, and a lock that outlives the process that held it."""
    argv, directory = flags(home, tmp_path), tmp_path / "small"
    words = [sys.executable, "main.py", *argv]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert any(re.match(rf"step +25/{STEPS}  loss", line) for line in process.stdout)
        process.kill()
    assert process.returncode == -signal.SIGKILL and (directory / ".lock").exists()
    status, out, err = run(argv)
    assert (status, err) == (0, "") and re.search(r"resumed    at step (20|24|28) from ", out)
    assert soak.differences(argv, directory, straight) == []
    assert trained_steps(directory) == list(range(1, STEPS + 1))


@pytest.mark.repeat  # repeats the kill above, and the two in `docs/checkpoints.md`
def test_twenty_kills_change_no_bit(capsys):
    """Catches what a single kill does not hit: saves, steps and starts interrupted anywhere, one after the other."""
    status = soak.command(soak.Arguments(kills=20))
    out = capsys.readouterr().out
    print(out)
    assert status == 0 and out.rstrip().endswith("bitwise identical")
    *_, last_kill, summary = out.rstrip().splitlines()
    assert last_kill.split()[:1] == ["20"] and int(re.search(r"(\d+) of them in a save", summary)[1]) >= 5
    assert last_kill.split()[3] != str(soak.Arguments.steps), "it ended before the last kill"


def test_the_comparison_finds_differences(home, straight, tmp_path):
    """Catches a comparison that compares nothing."""
    other = tmp_path / "small"
    shutil.copytree(straight, other)
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[5])
    row["loss"] = float(np.nextafter(row["loss"], 9))
    (other / "metrics.jsonl").write_text("".join([*lines[:5], json.dumps(row) + "\n", *lines[6:]]))
    assert soak.differences(flags(home, tmp_path), other, straight) == ["row 4"]
    shutil.rmtree(other / "checkpoints" / str(STEPS))
    found = soak.differences(flags(home, tmp_path), other, straight)
    assert "step" in found and any(name.startswith("params.") for name in found)
    assert any(".mu." in name for name in found) and any(".nu." in name for name in found)


# Runs with damaged steps ----------------------------------------------------------------------------------------------


def test_a_run_keeps_the_newest_steps_and_the_best(straight):
    """Catches settings that do not reach the policy, and a validation loss that does not reach the manifest."""
    kept = sorted(int(name) for name in os.listdir(straight / "checkpoints"))
    rows = [json.loads(row) for row in (straight / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "eval" and row["step"] in (20, 40)}
    saved = {row.step: row for row in checkpoint.step_rows(straight / "checkpoints", "none")}
    losses[STEPS] = saved[STEPS].loss
    best = min(losses, key=losses.get)
    assert kept == sorted({best, 56, 60})
    assert {row.step: row.loss for row in saved.values() if row.best} == {best: losses[best]}


def test_the_loss_of_the_last_step_is_over_the_same_batches(straight, home):
    """Catches a last step without a loss, or with a loss over the whole split, which is not comparable with others."""
    cfg, mesh = main.parse(flags(home, straight.parent)), sharding.make_mesh("data=1")
    params = checkpoint.restore(straight / "checkpoints", target(cfg, "data=1"), STEPS).params
    want = progress.evaluate(cfg, mesh, pipeline.evaluate(cfg, mesh), params, cfg.run.eval_batches)
    [last] = [row for row in checkpoint.step_rows(straight / "checkpoints", "none") if row.step == STEPS]
    assert last.loss == want["loss"] and want["full"] is False


def test_a_run_resumes_from_the_newest_good_step(partway, straight):
    """Catches a run that trains on flipped bits, does not print what it skipped, or ends with another result."""
    argv, directory = partway
    flip(largest(directory / "checkpoints" / "49" / "state"))
    (directory / "checkpoints" / "52").mkdir()
    status, out, err = run(argv)
    assert (status, err) == (0, "")
    assert f"skipped    {directory}/checkpoints/52: the directory is empty\n" in out
    assert re.search(rf"skipped    {directory}/checkpoints/49: state/\S+ is damaged: its sha256", out)
    assert f"resumed    at step 48 from {directory}/checkpoints\n" in out
    assert soak.differences(argv, directory, straight) == []


def test_a_run_without_a_good_step_is_refused(partway):
    """Catches a traceback, and a run that starts over and overwrites what might still be repaired."""
    argv, directory = partway
    for step in (directory / "checkpoints").iterdir():
        flip(largest(step / "state" / "params"))
    before = snapshot(directory)
    status, out, err = run(argv)
    assert (status, out) == (2, "") and err.startswith(f"error: no checkpoint in {directory}/checkpoints can be used: ")
    assert f"{directory}/checkpoints/48: state/" in err and err.endswith("; to start at step 0, move them to "
                                                   "another directory or use --run.restart scratch\n")  # fmt: skip
    assert snapshot(directory) == before
    with pytest.raises(ValueError, match=r"can be used: .*/49: state/"):
        generate.load(str(directory))


def test_a_full_disk_stops_the_run(partway, home, straight):
    """Catches a run that trains for hours after its saves began to fail, a traceback, a good step lost to a failed
    save, and a run that cannot resume once there is room again."""
    argv, directory = partway
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # bytes a file may have
    try:
        status, _, err = run(argv)  # every compiled program it needs is already cached
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 2 and "Traceback" not in err and err.count("\n") == 1
    assert err.startswith(f"error: the checkpoint of step 52 cannot be written to {directory}/checkpoints: ")
    assert "File too large" in err and err.endswith("MiB free there); the one of step 49 is good and remains\n")
    assert 52 <= trained_steps(directory)[-1] <= 52 + EVERY
    assert checkpoint.latest_step(directory / "checkpoints") == 49
    assert not list((directory / "checkpoints").glob("52*")), "a failed save still takes up disk space"
    assert run(argv)[::2] == (0, "")
    assert soak.differences(argv, directory, straight) == []


@pytest.mark.parametrize("error, kind", [
    (OSError(errno.ENOSPC, "No space left on device"), UserError),
    (ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']"), UserError),  # tensorstore
    (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:4242"), RuntimeError),
    (TimeoutError("Timed out after 600 seconds."), RuntimeError),  # Orbax
    (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out"), RuntimeError),
])  # fmt: skip
def test_only_storage_errors_are_reported_as_a_full_disk(tmp_path, error, kind):
    """Catches a lost host reported as a full disk: with that exit status the supervisor would not restart."""
    with checkpoint.Saver(tmp_path) as saver, pytest.raises(kind) as caught, saver.explain_errors(5):
        raise error
    assert type(caught.value) is kind and str(error) in str(caught.value)


def test_a_failed_save_is_removed_while_threads_still_write(tmp_path):
    """Catches a folder that reappears: threads write a state in parallel, and the first failure ends the save."""
    folder, begun = tmp_path / "52.saving" / "state", threading.Event()

    def late():
        for number in range(6):
            with contextlib.suppress(FileNotFoundError):  # removed between these lines
                folder.mkdir(parents=True, exist_ok=True)
                (folder / str(number)).write_text("x")
            begun.set()
            time.sleep(0.05)

    writer = threading.Thread(target=late)
    writer.start()
    begun.wait()
    checkpoint._remove(str(tmp_path / "52.saving"))
    writer.join()
    assert not list(tmp_path.iterdir())


def test_only_the_expected_error_is_ignored(tmp_path, monkeypatch):
    """Catches 40 tracebacks after the one-line error of a full disk, and other errors hidden with them."""
    seen = []
    hook = seen.append
    monkeypatch.setattr(sys, "unraisablehook", hook)
    with checkpoint.Saver(tmp_path):
        for error in (RuntimeError("Event loop is closed"), RuntimeError("another")):
            sys.unraisablehook(types.SimpleNamespace(exc_value=error))
    assert [str(unraisable.exc_value) for unraisable in seen] == ["another"] and sys.unraisablehook is hook


def test_later_steps_do_not_change_a_save(tmp_path):
    """Catches a background save that reads memory which has been given to the next step."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(np.zeros(2_000_000, np.float32))
    with checkpoint.Saver(tmp_path) as manager:
        checkpoint.save(manager, 1, {"x": x}, {})
        for _ in range(20):
            x = add(x)
    target = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}
    np.testing.assert_array_equal(checkpoint.restore(tmp_path, target)["x"], 1)


def test_a_missing_checkpoint_is_an_error(tmp_path):
    """Catches a state at step 0 that is returned as a restored one."""
    with pytest.raises(ValueError, match=f"no checkpoint in {tmp_path}/nowhere"):
        checkpoint.restore(tmp_path / "nowhere", {})
