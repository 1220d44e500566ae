"""A step of a checkpoint directory keeps its name and, if it is marked, is never deleted."""

import os

import numpy as np

from tests.train.test_checkpoint import array, flip, largest, read, save
from train import checkpoint


def test_a_step_is_the_one_of_its_manifest(tmp_path):
    """Catches a renamed directory that is restored as another step, with other counters and other batches."""
    save(tmp_path, [1, 2, 38], keep=3)
    (tmp_path / "38").rename(tmp_path / "42")
    said = []
    why = "its manifest.json is the one of step 38: rename the directory to that step"
    for which in ("all", "none"):
        assert checkpoint.latest_step(tmp_path, said.append, which) == 2
        assert said.pop() == f"skipped    {tmp_path}/42: {why}"
    (tmp_path / "42").rename(tmp_path / "38")
    assert checkpoint.latest_step(tmp_path) == 38


def test_a_pinned_step_is_never_deleted(tmp_path, capsys):
    """Catches a step that was marked as kept and is deleted, by a later save or because the mark changes its checksums;
    a mark that is lost when a damaged step is saved again; and a step that cannot be released."""
    run = tmp_path / "checkpoints"
    save(run, [1, 2], keep=2)
    assert checkpoint.main(["keep", str(tmp_path), "2"]) == 0
    assert capsys.readouterr().out == f"step 2 of {run} is kept forever\n"
    save(run, [3, 4, 5], keep=1)
    assert sorted(os.listdir(run)) == ["2", "5"] and checkpoint.latest_step(run) == 5
    assert checkpoint.main(["verify", str(tmp_path)]) == 0
    rows = [line.rpartition("  ")[2].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == ["good", "good, kept forever"]
    flip(largest(run / "2" / "state"))
    save(run, [2], keep=1)  # as a run does that resumes from an earlier step
    save(run, [6], keep=1)
    assert "2" in os.listdir(run) and {row.step for row in checkpoint.step_rows(run, "all") if row.kept} == {2}
    np.testing.assert_array_equal(read(run, 2), array(2))
    assert checkpoint.main(["keep", str(tmp_path), "7"]) == 2
    assert capsys.readouterr().err == f"error: no checkpoint of step 7 in {run}; use one of 2, 6\n"
    assert checkpoint.main(["keep", str(tmp_path / "none"), "7"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none'} does not exist; pass the directory of a run")
    assert checkpoint.main(["keep", str(tmp_path), "2", "--undo"]) == 0
    save(run, [7], keep=1)
    assert sorted(os.listdir(run)) == ["7"]
