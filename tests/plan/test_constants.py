"""Test the file of constants that `python -m plan --constants` reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from config import Config
from plan import planner
from plan.__main__ import main
from plan.answer import own_steps
from plan.chips import hardware
from plan.time import measured

REPORT = Path(__file__).parents[2] / "bench/measured/h200_report.json"

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


def test_a_report_moves_the_constants_of_what_it_measured():
    """Catches a report that is ignored, and rates of matmuls that count as steps."""
    report = json.loads(REPORT.read_text())
    before = hardware.Topology.parse("h200:8")
    learned = own_steps.learn_report(before, report, "report.json").speeds
    start = measured.speeds_of(before)
    assert (learned.steps, learned.own, learned.noise) == (2, 2, start.noise)
    rates = {row["name"]: row["seconds"] / row["plan_s"] for part in ("matmul", "attention") for row in
             report["parts"][part] if row["plan_s"]}  # fmt: skip
    assert 1.3 < rates["8192 x 8192 x 8192"] < 1.4 and 1.38 < learned.by_term["matmuls"] < 1.5
    slow = [rate for name, rate in rates.items() if name.endswith("backward")]
    assert min(slow) < learned.by_term["attention"] < max(slow) and start.by_term["attention"] < min(slow)
    ratio = {name: learned.by_term[name] / start.by_term[name] for name in ("tensor", "tokens", "stages")}
    assert max(ratio.values()) < 1.2 and max(ratio.values()) - min(ratio.values()) < 1e-9, (
        "one device communicates nothing, so only the factor that all costs of a trainer share moves them"
    )
    cfg = Config.from_dict(report["parts"]["dense_124m"][0]["config"])
    one = planner.plan(cfg, replace(hardware.Topology.parse("h200:1"), speeds=learned))
    assert one.step_s == pytest.approx(report["parts"]["dense_124m"][0]["seconds"], rel=0.05)
    assert one.estimate.source == "by 2 measured steps of yours on h200"


@pytest.mark.parametrize("change, topology, why", [
    ({}, "h100:8", "it was measured on 'NVIDIA H200', and h100:8 has 'NVIDIA H100 80GB HBM3'; use a --topology of h2"),
    ({"parts": {"moe": [{"plan_s": 1.0, "config": {"model": {"width": 3}}}]}}, "h200:8", "unknown setting model.width"),
    ({"parts": {"matmul": [{"plan_s": 1.0}]}}, "h200:8", "it is not a file of python -m bench.report"),
    ({"parts": 3}, "h200:8", "it is not a file of python -m bench.report"),
])  # fmt: skip
def test_an_invalid_report_is_refused_in_one_line(tmp_path, capsys, change, topology, why):
    """Catches a report of another chip, and a traceback."""
    file = tmp_path / "report.json"
    file.write_text(json.dumps(json.loads(REPORT.read_text()) | change))
    assert main(["tiny", "--mesh", "fsdp=8", "--topology", topology, "--constants", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --constants {file}: ") and why in error and error.count("\n") == 1


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
