"""Test the explanation of a plan: its losses, and the changes that recover them."""

import json

import pytest

from config import preset, replace
from plan import planner
from plan.__main__ import main
from plan.answer import explain
from plan.time import measured

CFG = preset(
    "llama3_8b", mesh="fsdp=16,tensor=2", **{"data.batch_size": 64, "data.seq_len": 4096, "work.remat": "full"}
)


def seconds(one):
    return one.estimate.seconds


def test_the_losses_are_those_of_the_real_step():
    """Catches a roofline, in which compute reaches the peak, and communication that is free or counted twice."""
    wide, narrow = (planner.plan(replace(CFG, mesh=mesh), "h100:32") for mesh in ("fsdp=32", "fsdp=8,tensor=4"))
    found, given = explain.losses(narrow), measured.table()["h100", ""].by_term
    sent = sum(x.wire_bytes / narrow.speed(x) for x in narrow.traffic if x.axes == ("tensor",))
    assert found["tensor"] == pytest.approx(given["tensor"] * sent) and sent > 0
    below = (given["matmuls"] - 1) * narrow.model_flops / narrow.topology.chip.peak_flops_per_s
    assert found[explain.NARROW] >= below and "tensor" not in explain.losses(wide)
    few = planner.plan(replace(CFG, mesh="fsdp=32", **{"data.batch_size": 32, "data.seq_len": 256}), "h100:32")
    sent, between = few.wire_by_axes["fsdp"] / 2**30, few.to_json()["between_nodes"]["fsdp"] / 2**30
    fsdp = next(loss for loss in explain.explain(few) if loss.cause == "fsdp")
    over = f"a device sends {sent:,.3f} GiB over fsdp, {between:,.3f} GiB of them to other nodes over InfiniBand"
    assert fsdp.sentence == over
    compute = sum(x.flops for x in few.work) / few.topology.chip.peak_flops_per_s
    narrow = next(loss for loss in explain.explain(few) if loss.cause == explain.NARROW)
    reached = compute / measured.causes(few, None)["matmuls"]
    assert narrow.sentence == f"matmuls and attention reach {reached:.0%} of the peak in measured steps"


@pytest.mark.parametrize("topology, mesh", [("v5p:2x4x4", "fsdp=16,tensor=2"), ("h100:32", "stage=2,fsdp=8,tensor=2")])
def test_losses_and_the_peak_add_up_to_the_step(topology, mesh):
    one = planner.plan(replace(CFG, mesh=mesh), topology)
    found = explain.losses(one)
    assert sum(found.values()) + one.model_flops / one.topology.chip.peak_flops_per_s == pytest.approx(seconds(one))
    assert min(found.values()) >= 0


@pytest.mark.parametrize("topology, mesh, settings, flag", [
    ("v5p:2x4x4", "fsdp=4,tensor=8", {}, "mesh"),
    ("h100:32", "fsdp=32", {"data.batch_size": 32, "data.seq_len": 256}, "data.batch_size"),
])  # fmt: skip
def test_a_suggested_change_saves_what_it_says(topology, mesh, settings, flag):
    """Catches a saving that is not per token, and a change that does not apply to the plan."""
    one = planner.plan(replace(CFG, mesh=mesh, **settings), topology)
    found = explain.explain(one)
    assert [loss.seconds for loss in found] == sorted((loss.seconds for loss in found), reverse=True)
    changes = [loss.change for loss in found if loss.change]
    assert any(flag in change.flags for change in changes)
    for change in changes:
        name, value = change.flags.removeprefix("--").split()
        flags = {name: int(value) if value.isdigit() else value}
        other = planner.plan(replace(one.cfg, **flags), one.topology)
        tokens = one.tokens_per_step / other.tokens_per_step
        assert seconds(one) - tokens * seconds(other) == pytest.approx(change.saves_s)
        assert other.peak_bytes - one.peak_bytes == pytest.approx(change.memory_bytes)


def test_explanations_need_the_time_of_a_step(capsys):
    assert main(["laptop", "--mesh", "fsdp=4", "--explain"]) == 2
    assert "--explain needs the time of a step: pass a --topology of TPUs or GPUs" in capsys.readouterr().err
    assert main(["laptop", "--topology", "v4:2x2x1", "--mesh", "fsdp=4", "--explain", "--max_batch"]) == 2
    assert "--explain has no effect with --max_batch; drop one of the two" in capsys.readouterr().err


def test_the_command_prints_and_writes_the_losses(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["moe1b", "--topology", "v4:2x4x4", "--explain", "--json", str(path)]) == 0
    losses, text = json.loads(path.read_text())["losses"], capsys.readouterr().out
    assert len(losses) == 3
    for number, loss in enumerate(losses, 1):
        assert f"  {number}. {loss['cause']}" in text
        assert loss["sentence"] in text
