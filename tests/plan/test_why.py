"""Test `python -m plan --why`: the source lines of every row of a plan add up to it."""

import json
import re
from pathlib import Path

import pytest

from config import preset
from plan import planner
from plan.__main__ import main
from plan.answer import why

ROOT = Path(__file__).resolve().parent.parent.parent
PLANS = {
    "shared and routed experts": ("laptop", "", {"mesh": "fsdp=2,expert=2,tensor=2"}),
    "a parallel feed-forward": ("gptj_6b", "v5e:4x4", {"mesh": "fsdp=8,tensor=2", "data.batch_size": 64}),
    "two stacks": ("t5_tiny", "", {"mesh": "fsdp=2,tensor=2"}),
    "kernels in slots": ("deep", "v5e:2x4", {"mesh": "stage=4,fsdp=2", "work.schedule": "1f1b"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_lines_of_each_row_add_up_to_the_plan(name):
    """Catches matmuls assigned to another part, a missing row of the plan, and lines that do not add up to the row."""
    model, topology, settings = PLANS[name]
    one = planner.plan(preset(model, **settings), topology or None)
    found = why.compare(one)
    assert {group.name: group.planned for group in found["FLOPs"]} == {k: v for k, v in one.flops.items() if v}
    for group in found["FLOPs"]:
        assert group.ratio == pytest.approx(1, rel=1e-3), group.name
    sent = sum(group.planned for group in found["bytes"])
    for group in found["bytes"]:
        assert group.traced == pytest.approx(group.planned, rel=0.01, abs=1e-4 * sent), group.name
    for group in (*found["FLOPs"], *found["bytes"]):
        assert group.traced == pytest.approx(sum(line.size for line in group.lines))
        assert all(re.fullmatch(r"\w+\.py:\d+ in \S+", line.source) for line in group.lines)


def test_the_lines_are_lines_of_the_model():
    """Catches a wrong source line, such as a line number from before a change of the file."""
    found = why.compare(planner.plan(preset("laptop", mesh="fsdp=2")))["FLOPs"]
    text = (ROOT / "model.py").read_text().splitlines()
    at = lambda line: text[int(re.search(r"model\.py:(\d+)", line.source)[1]) - 1]
    [router] = next(group for group in found if group.name == "router").lines
    assert "w.w_router_DE" in at(router)
    shared = next(group for group in found if group.name == "shared experts").lines
    assert {name for line in shared for name in re.findall(r"w\.(w_\w+)", at(line))} == {
        "w_up_DF", "w_gate_DF", "w_down_FD"}  # fmt: skip


def test_the_command_prints_lines_next_to_the_plan(capsys):
    """Catches a flag that prints nothing, and JSON with other numbers."""
    words = ["laptop", "--mesh", "fsdp=2,tensor=2", "--why"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"│ router +│ +│ +│ +│ +0\.006 GFLOP │ 0\.006 GFLOP │ +1\.0000 │", out)
    assert re.search(r"│ +│ model\.py:\d+ in route +│ 2 b t expert e D +│ +6 │", out)
    assert "b=4 sequences of a microbatch, t=128 positions" in re.sub(r"\s+", " ", out)
    assert re.search(r"│ all-gather over \S+ +│ activations, routes +│", out)
    assert main([*words, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = found["why"]["FLOPs"]
    assert {group["name"] for group in groups} == {name for name, flops in found["flops"].items() if flops}
    assert sum(group["traced"] for group in groups) == pytest.approx(found["hardware_flops"], rel=1e-3)


def test_the_legend_has_the_positions_of_both_stacks():
    """Catches the decoder's positions as those of encoder layers."""
    text = why.legend(planner.plan(preset("t5_tiny", mesh="fsdp=2,tensor=2")))
    assert "t=6 positions in the residual stream, S=14 positions in the residual stream of the encoder" in text.replace(
        " D=24 model width,", "")  # fmt: skip
    assert "In encoder layers, t=14." in text


@pytest.mark.parametrize("words, message", [
    (["--inference", "--why"], "--why has no effect with --inference"),
    (["--search", "8", "--why"], "--search and --why are mutually exclusive"),
])  # fmt: skip
def test_modes_without_a_step_are_refused(capsys, words, message):
    """Catches a flag that is ignored."""
    assert main(["laptop", *words]) == 2
    assert message in capsys.readouterr().err
