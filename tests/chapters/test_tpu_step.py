"""The program that chapter 16 simulates is its own training step, compiled for a TPU."""

import collections
import re

import pytest

import sharding
from chapters import tpu_step

LINES = {"all-gather": "gather(", "reduce-scatter": "gather(", "all-reduce": "pmean("}


def test_the_stored_program_has_the_lines_of_the_chapter():
    """Catches a step in the chapter that was edited after the program was compiled, so that its lines are wrong."""
    for one in tpu_step.counted().collectives:
        assert LINES[one.kind] in tpu_step.line(one.source), one
    assert {event.source for event in tpu_step.events() if event.lane == "fsdp"} == {
        line.strip() for line in tpu_step.cell().splitlines() if re.search(r"\bgather\(|pmean\(", line)
    }


def test_the_stored_program_has_the_collectives_of_the_chapters_step():
    """Catches a chapter whose step has other collectives than the program that its page simulates."""
    text = tpu_step.lowered(sharding.make_mesh("fsdp=8")).as_text()
    traced = collections.Counter(name.replace("_", "-") for name in re.findall(r"stablehlo\.(\w+)", text))
    stored = collections.Counter()
    for one in tpu_step.counted().collectives:
        stored[one.kind] += one.count
    assert stored == {"all-gather": 6, "reduce-scatter": 6, "all-reduce": 1}
    assert {kind: traced[kind] for kind in stored} == stored


@pytest.mark.tpu
def test_the_tpu_compiler_makes_the_stored_program():
    """Catches a stored program that another version of the compiler, or of the chapter, would schedule differently."""
    found, stored = tpu_step.simulate(tpu_step.compiled_text()), tpu_step.simulated()
    assert found.seconds == pytest.approx(stored.seconds, rel=0.01)
    assert found.causes == pytest.approx(stored.causes, rel=0.01)
