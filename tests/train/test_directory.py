"""One process at a time owns a run's directory. Errors name that process, or say why the directory can't be used."""

import fcntl
import json
import os
import re
import shutil
import signal

import pytest

import main
from bench import soak
from config import Affects, Config, affecting, replace
from tests.train.small_run import ROOT, STEPS, flags, run, signal_at_step, snapshot, trained_steps
from train.directory import SET_ASIDE, Metrics, check_resumable, lock_directory, missing_rows


def test_two_runs_in_one_directory_are_refused(straight, home):
    """Catches two processes writing the same metrics.jsonl, and a refused one that removes the lock of the other."""
    argv = [*flags(home, home / "straight"), "--run.steps", str(2 * STEPS)]
    before = snapshot(straight)
    with lock_directory(straight):
        with_lock = snapshot(straight)
        for more in ([], ["--run.restart", "scratch"]):
            status, out, err = run([*argv, *more])
            assert (status, out) == (2, "")
            assert re.fullmatch(
                rf"error: {straight} is in use by process {os.getpid()} on \S+, since .*; wait until it ends, or "
                r"start another run with --run\.name\n", err)  # fmt: skip
        assert snapshot(straight) == with_lock
    assert snapshot(straight) == before


def test_a_lock_that_was_just_removed_is_not_taken(tmp_path, monkeypatch):
    """Catches two runs that lock two files with the same name: one opened the file before the other removed it."""
    flock = fcntl.flock

    def lock_late(file, how):
        (tmp_path / ".lock").unlink()  # its holder ends
        (tmp_path / ".lock").touch()  # somebody else begins
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with pytest.raises(ValueError, match="is in use by another process"), lock_directory(tmp_path):
        pass


def test_an_unwritable_directory_is_an_error(home, tmp_path):
    """Catches a traceback if the run's directory cannot be created, and a run that trains before it notices."""
    (tmp_path / "file").write_text("mine")
    status, out, err = run(flags(home, tmp_path / "file"))
    assert (status, out) == (2, "")
    assert err.startswith(f"error: cannot write to {tmp_path}/file/small: [Errno 20] Not a directory")
    assert err.endswith("; choose another --run.dir\n")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_page_lists_what_may_change():
    """Catches a setting that the page on checkpoints allows you to change and a run refuses, or the reverse."""
    lines = (ROOT / "docs/checkpoints.md").read_text().partition("### What may change when you resume")[2].splitlines()
    table = [line.split("|")[1:3] for line in lines[4 : lines.index("", 4)]]
    row_of = {name: said for names, said in table for name in re.findall(r"`([\w.*]+)`", names)}
    row_for = lambda name: row_of.get(name, row_of.get(f"{name.partition('.')[0]}.*", "")).strip()
    later = {*affecting(Affects.ORDER)}
    may = {*affecting(Affects.SPEED, Affects.RUN, Affects.START)} | later
    for name in affecting(*Affects):
        said = row_for(name)
        assert said.startswith("may change" if name in may else "must stay the same"), name
        assert said.startswith("may change for steps after") == (name in later), name
    assert {*row_of} <= {*affecting(*Affects)} | {f"{name}.*" for name in Config.__dataclass_fields__}


# Missing checkpoints and rows -----------------------------------------------------------------------------------------


def rows_of(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def test_missing_checkpoints_stop_the_run(partway, straight):
    """Catches 49 steps that are repeated without a message, with their metrics cut off, because a disk was missing."""
    argv, directory = partway
    shutil.rmtree(directory / "checkpoints")
    before, record = snapshot(directory), rows_of(directory)
    status, out, err = run(argv)
    assert (status, out) == (2, "")
    assert err == (f"error: {directory}: the latest checkpoint, step 49, is missing: {directory}/checkpoints has no "
                   "checkpoint; restore it, or add --run.restart newest to rerun steps 1 to 49, whose metrics move to "
                   f"{SET_ASIDE}\n")  # fmt: skip
    assert snapshot(directory) == before

    status, out, err = run([*argv, "--run.restart", "newest"])
    assert (status, err) == (0, "") and "resumed" not in out
    assert f"set aside  {len(record) - 1} rows of rerun steps (after step 0): {directory}/{SET_ASIDE}\n" in out
    assert rows_of(directory, SET_ASIDE) == record[1:]
    assert soak.differences(argv, directory, straight) == []
    assert json.loads((directory / "config.json").read_text())["config"]["run"]["restart"] == "no"


def test_only_the_newest_checkpoint_must_exist(partway):
    """Catches a run that resumes from an older checkpoint because the newest was moved away; a refusal if the newest is
    damaged or never existed; and a complete run that is refused because it has no checkpoint."""
    argv, directory = partway
    cfg = main.parse(argv)
    assert check_resumable(cfg, directory) is None
    (directory / "checkpoints/49/manifest.json").unlink()
    assert check_resumable(cfg, directory) is None
    shutil.rmtree(directory / "checkpoints/49")
    with pytest.raises(ValueError, match=r"step 49, is missing: .* has only step 48 and earlier; .* 49 to 49"):
        check_resumable(cfg, directory)
    assert check_resumable(replace(cfg, **{"run.restart": "newest"}), directory) is None
    Metrics(directory, 48, 60)  # as a run that resumes from step 48 does
    assert check_resumable(cfg, directory) is None

    (directory / "saved").unlink()  # older versions had no such file
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "start", "step": 48}\n{"kind": "end", "step": 60}\n')
    shutil.rmtree(directory / "checkpoints")
    assert check_resumable(cfg, directory) == 60
    with pytest.raises(ValueError, match="the latest checkpoint, step 60, is missing"):
        check_resumable(replace(cfg, **{"run.steps": 99}), directory)


def test_a_repaired_checkpoint_says_which_rows_are_missing(partway):
    """Catches a metrics.jsonl without steps 51 to 58, and no message, after a damaged checkpoint was repaired."""
    argv, directory = partway
    argv = [*argv, "--run.keep_checkpoints", "9"]
    with signal_at_step(58, signal.SIGINT):
        assert run(argv)[0] == 0
    hidden = [(directory / f"checkpoints/{step}/manifest.json") for step in (49, 52, 56, 58)]
    texts = [path.read_text() for path in hidden]
    for path in hidden:
        path.write_text("damaged")
    with signal_at_step(50, signal.SIGINT):
        status, out, _ = run(argv)
    assert status == 0 and "resumed    at step 48 " in out and "has no rows" not in out
    for path, text in zip(hidden, texts, strict=True):
        path.write_text(text)
    status, out, err = run(argv)
    assert (status, err) == (0, "") and "resumed    at step 58 " in out
    said = "its checkpoint could not be read for a while, so the run resumed from an earlier one; 8 rows of these steps"
    assert f"\nrecord     {directory}/metrics.jsonl has no rows for steps 51 to 58: {said} are in {directory}/" in out
    assert trained_steps(directory) == [*range(1, 51), 59, 60]


@pytest.mark.parametrize(("rows", "aside", "said"), [
    ([10, 20], [], None), ([10, 20, 25], [], None),
    ([10], [], "no rows for steps 11 to 20: the file was cut or replaced"), ([], [], "no rows for steps 1 to 20"),
    ([10, 19], [20, 30], "no rows for step 20: its checkpoint .* 1 rows of"),
])  # fmt: skip
def test_missing_rows(tmp_path, rows, aside, said):
    """Catches a warning about complete metrics, for example with one row every 10 steps."""
    for name, steps in (("metrics.jsonl", rows), (SET_ASIDE, aside)):
        texts = [json.dumps({"kind": kind, "step": step}) for step in steps for kind in ("train", "eval")]
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))
    found = missing_rows(tmp_path, 20)
    assert found is None if said is None else re.search(said, found)


def test_a_damaged_config_json_loses_nothing(partway, straight):
    """Catches advice to delete a run with good checkpoints, a run that does not resume without config.json, and one
    that then resumes with other settings."""
    argv, directory = partway
    file, about = directory / "config.json", directory / "checkpoints/49/about.json"
    file.write_text("not json")
    before = snapshot(directory)
    status, out, err = run(argv)
    assert (status, out) == (2, "") and snapshot(directory) == before
    assert err.startswith(f"error: {file} cannot be read (JSONDecodeError(") and err.endswith(
        "; nothing is lost: move the file away and repeat the command with the settings of the run, which "
        f"are also in {about}\n"
    )

    file.unlink()
    status, out, err = run([*argv, "--optim.lr", "0.02"])
    assert status == 2 and f"checkpoint {directory}/checkpoints/49 belongs to another run: optim.lr is 0.02 here" in err
    status, out, err = run(argv)
    assert (status, err) == (0, "") and "resumed    at step 49 " in out
    assert json.loads(file.read_text())["config"] == main.parse(argv).to_dict()
    assert soak.differences(argv, directory, straight) == []


def test_a_damaged_config_json_without_checkpoints(tmp_path, home):
    """Catches advice to repeat the command if that would start at step 0 and overwrite the rows of the old run."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.json").write_text("not json")
    status, _, err = run(flags(home, tmp_path))
    assert status == 2 and err.endswith("; there is no checkpoint, so choose another --run.name\n")


def test_rows_of_repeated_steps_are_set_aside(tmp_path, capsys):
    """Catches rows after the newest checkpoint that are lost, at the first or second resume, and an empty message."""
    lines = [f'{{"kind": "train", "step": {step}}}\n' for step in range(1, 8)]
    for step in (7, 5, 3):
        (tmp_path / "metrics.jsonl").write_text("".join(lines[: step + 1]) + '{"kind": "tr')
        Metrics(tmp_path, step, 20)
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:step])
    assert (tmp_path / SET_ASIDE).read_text() == lines[5] + lines[3]
    assert capsys.readouterr().out.count("set aside  1 rows of rerun steps (after step ") == 2


@pytest.mark.parametrize("step, kept", [(0, [("start", 0)]), (1, [("start", 0), ("eval", 0), ("train", 1)])])
def test_an_evaluation_before_the_first_step_is_written_once(tmp_path, step, kept):
    """Catches a second row after a kill before the first checkpoint, and one that is lost in a later resume."""
    rows = [("start", 0), ("eval", 0), ("train", 1), ("eval", 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"kind": k, "step": s}) + "\n" for k, s in rows))
    Metrics(tmp_path, step, 3)
    assert [(row["kind"], row["step"]) for row in rows_of(tmp_path)] == kept
