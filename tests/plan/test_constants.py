"""Test the file of constants that `python -m plan --constants` reads."""

import json

import pytest

from plan.__main__ import main

WORDS = ("tiny", "--mesh", "fsdp=4")
GIVEN = {"chip": "v4", "run": "runs/x", "date": "2026-11-28", "first_step": 20, "last_step": 23, "step_s": 1.5,
         "topology": "v4:2x2x1", "mesh": "fsdp=4", "waits": 0.1, "matmuls": 0.2, "others": 1}  # fmt: skip


@pytest.mark.parametrize("change, topology, why", [
    ({}, "v5p:2x2x1", "its constants are of v4, and v5p:2x2x1 has v5p; use a --topology of v4, or record a run on v5p"),
    ({"speed": 1}, "v4:2x2x1", "unknown key 'speed'; known: chip, run, date,"),
    ({"peak": 0.5}, "v4:2x2x1", "unknown key 'peak'"),
    ({"matmuls": "fast"}, "v4:2x2x1", 'matmuls should be a number, and is "fast"; write it with python -m plan.prof'),
    ({"matmuls": None}, "v4:2x2x1", "matmuls should be a number, and is null"),
    ({"waits": 1}, "v4:2x2x1", "nothing takes less than no time"),
    ({"others": -1.5}, "v4:2x2x1", "other operations take -150.0%"),
    ({"chip": 7}, "v4:2x2x1", "its constants are of 7"),
])  # fmt: skip
def test_invalid_constants_are_refused_in_one_line(tmp_path, capsys, change, topology, why):
    """Catches constants of another chip, and a misspelled key that is ignored."""
    file = tmp_path / "constants.json"
    file.write_text(json.dumps({name: value for name, value in (GIVEN | change).items() if value is not None}))
    assert main([*WORDS, "--topology", topology, "--constants", str(file)]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith(f"error: --constants {file}: ") and found.err.count("\n") == 1
    assert why in found.err


@pytest.mark.parametrize("text, why", [("{", "not JSON"), ("[1]", "it names no chip"), (None, "No such file")])
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, capsys, text, why):
    """Catches a traceback."""
    file = tmp_path / "constants.json"
    if text:
        file.write_text(text)
    assert main([*WORDS, "--topology", "v4:2x2x1", "--constants", str(file)]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1 and "python -m plan.profile RUN --calibrate FILE" in error


@pytest.mark.parametrize("words, why", [
    ((), "--constants needs a chip: pass a --topology of TPUs or GPUs"),
    (("--topology", "cpu:4"), "--constants needs a chip: pass a --topology of TPUs or GPUs"),
    (("--topology", "v4:2x2x1,v5e:2x2"), "--constants describes one topology"),
    (("--topology", "v4:2x2x1", "--inference"), "--constants has no effect with --inference"),
])  # fmt: skip
def test_constants_need_a_training_plan_of_one_chip(tmp_path, capsys, words, why):
    """Catches constants that are silently ignored."""
    assert main([*WORDS, *words, "--constants", str(tmp_path / "x")]) == 2
    assert why in capsys.readouterr().err
