"""Test days, chip hours and dollars of a run."""

import json
import math

import numpy as np
import pytest

from config import preset
from plan import planner
from plan.__main__ import main
from plan.answer import budget

PLAN = planner.plan(preset("llama3_8b", mesh="fsdp=16,tensor=2", **{"data.batch_size": 64, "data.seq_len": 4096,
                                                                    "work.remat": "full"}), "v5p:2x4x4")  # fmt: skip


def test_a_budget_is_steps_times_their_time():
    found = budget.budget(PLAN, budget.Asked(1e9, "v5p=$4.2,h100=2", "0.5"))
    assert found.steps == math.ceil(1e9 / (64 * 4096))
    assert found.days == pytest.approx(found.steps * PLAN.estimate.seconds / 86400 / 0.5)
    assert found.days_low / found.days == pytest.approx(PLAN.estimate.low / PLAN.estimate.seconds)
    assert found.days_low < found.days_high
    assert found.chip_hours == pytest.approx(24 * 32 * found.days)
    assert found.dollars == pytest.approx(4.2 * found.chip_hours)


@pytest.mark.parametrize("text, tokens", [("", 0), ("15T", 15e12), ("15t", 15e12), ("1.5e12", 1.5e12), ("300B", 3e11)])
def test_tokens_have_units(text, tokens):
    assert budget.parse_tokens(text) == tokens


def test_short_runs_are_told_in_hours():
    """Catches "0.0 days"."""
    found = budget.budget(PLAN, budget.Asked(1e9))
    low, high = 24 * found.days_low, 24 * found.days_high
    assert found.days < 2 and found.time == f"{24 * found.days:,.1f} hours ({low:,.1f} to {high:,.1f})"


def test_a_checkpoint_has_parameters_and_moments_once():
    """Catches a size per device, and replicas that are counted twice."""
    assert budget.checkpoint_bytes(PLAN) == 3 * 4 * PLAN.params_total


def simulated_goodput(work_s: float, save_s: float, restart_s: float, failure_s: float) -> float:
    """Simulate a run with random failures, and return the fraction of the time in which it makes progress."""
    rng, wall, finished, segments = np.random.default_rng(3), 0.0, 0, 4000
    while finished < segments:
        fails_after = rng.exponential(failure_s)
        if fails_after >= work_s + save_s:
            wall, finished = wall + work_s + save_s, finished + 1
            continue
        wall += fails_after
        while (again := rng.exponential(failure_s)) < restart_s:  # it fails while it restarts
            wall += again
        wall += restart_s
    return segments * work_s / wall


def test_goodput_is_that_of_a_simulated_run():
    """Catches a formula without failures during saves and restarts."""
    given, size = budget.Failures(mtbf=40, disk=2, restart=300), budget.checkpoint_bytes(PLAN)
    found = budget.goodput(given, size, PLAN.estimate.seconds, PLAN.topology)
    assert found.failure_s == 3600 * 40 / 32
    assert found.save_s == size / (2e9 * 8)
    work_s = found.interval_steps * PLAN.estimate.seconds
    assert found.fraction == pytest.approx(simulated_goodput(work_s, found.save_s, 300 + found.save_s, 4500), rel=0.02)


def test_no_other_interval_is_better():
    given, size = budget.Failures(mtbf=40, disk=0.1, restart=300), budget.checkpoint_bytes(PLAN)
    best = budget.goodput(given, size, PLAN.estimate.seconds, PLAN.topology)

    def fraction(factor: float) -> float:
        work_s = factor * best.interval_steps * PLAN.estimate.seconds
        wall_s = best.failure_s * math.exp((300 + best.save_s) / best.failure_s)
        return work_s / wall_s / math.expm1((work_s + best.save_s) / best.failure_s)

    assert fraction(1) == pytest.approx(best.fraction)
    assert max(map(fraction, (0.5, 0.8, 1.25, 2))) < best.fraction


@pytest.mark.parametrize("call, message", [
    (("--tokens", "100"), "--tokens 100: a step has 2,048 tokens (8 sequences of 256); pass at least that many"),
    (("--tokens", "1e9", "--price", "0"), "--price: '0' should be a number above 0: dollars for one chip and hour"),
    (("--tokens", "1e9", "--price", "h100=2"), "--price h100=2 has no price for v4; add v4=DOLLARS"),
    (("--tokens", "1e9", "--price", "h10=2"), "unknown chip 'h10'; did you mean 'h100'?"),
    (("--price", "2"), "--price has an effect only with --tokens or several topologies; add --tokens 15T or drop"),
    (("--tokens", "1e9", "--goodput", "95"), "--goodput 95: should be at most 1; for 95% use 0.95"),
    (("--tokens", "1e9", "--goodput", "disk=2"), "mtbf is missing, the hours between two failures of one chip"),
    (("--tokens", "1e9", "--goodput", "mtb=2"), "'mtb' is unknown; did you mean 'mtbf'?"),
    (("--tokens", "1e9", "--goodput", "mtbf=0.1"), "one of 4 chips fails every 90 s, but a restart takes 600 s"),
    (("--tokens", "1e9", "--max_batch"), "--tokens has no effect with --max_batch; drop one of the two"),
    (("--tokens", "15Q"), "--tokens: '15Q' should be a number above 0: tokens to train on, such as 15e12 or 15T"),
    (("--batch_tokens", "5000"), "--batch_tokens 5,000: sequences have 256 tokens, and fsdp=4 splits them over 4 batch "
                                 "shards, so a batch has a multiple of 1,024; use 4,096 or 5,120"),
    (("--batch_tokens", "512"), "so a batch has a multiple of 1,024; use 1,024"),
    (("--batch_tokens=-1024",), "so a batch has a multiple of 1,024; use 1,024"),
    (("--batch_tokens", "5000", "--search", "4"), "sequences have 256 tokens, so a batch has a multiple of 256; use 4"),
    (("--tokens=-3",), "--tokens: '-3' should be a number above 0: tokens to train on, such as 15e12 or 15T"),
    (("--memory=-3",), "--memory -3: should be above 0, in GiB; 0 is the memory of the chip"),
    (("--memory", "nan"), "--memory nan: should be above 0, in GiB"),
    (("--mesh", "fsdp=2,tensor=1"), "and v4:2x2x1 has 4 chips; use axes whose product is 4, for example with fsdp=4"),
    (("--mesh", "data=1", "--compile"), "mesh data=1 has one; pass a --mesh of 4 devices"),
    (("--mesh", "data=1", "--topology", "8*h100", "--why"), "mesh data=1 has one; pass a --mesh of 64 devices"),
    (("--search", "8"), "but --topology v4:2x2x1 has 4; pass --search 4 or a --topology with 8 devices"),
    (("--search=-4",), "but --topology v4:2x2x1 has 4; pass --search 4"),
])  # fmt: skip
def test_invalid_input_is_refused(call, message, capsys):
    assert main(["laptop", "--topology", "v4:2x2x1", "--mesh", "fsdp=4", *call]) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.count("\n") == 1 and found.out == "", "the plan is printed before the error"


def test_tokens_need_the_time_of_a_step(capsys):
    assert main(["laptop", "--mesh", "fsdp=4", "--tokens", "1e9"]) == 2
    assert "--tokens needs the time of a step: pass a --topology of TPUs or GPUs" in capsys.readouterr().err


def test_the_command_prints_and_writes_the_budget(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["moe1b", "--topology", "v4:2x4x4", "--tokens", "1e11", "--price", "3.22", "--goodput",
                 "mtbf=50000", "--json", str(path)]) == 0  # fmt: skip
    found, text = json.loads(path.read_text()), capsys.readouterr().out
    dollars, days, low, high = (found["budget"][name] for name in ("dollars", "days", "days_low", "days_high"))
    between = f"({dollars * low / days:,.0f} to {dollars * high / days:,.0f})"
    assert f"{dollars:,.0f} dollars {between} at 3.22 per chip hour" in text
    assert f"goodput    {found['budget']['goodput']['fraction']:.1%}" in text
