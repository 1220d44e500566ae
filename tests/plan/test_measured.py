"""Test the seconds of a real step: what they add to a plan, and the interval of measured steps."""

import dataclasses

import pytest

from config import preset
from plan import planner
from plan.__main__ import main
from plan.answer import show
from plan.chips import hardware
from plan.time import fit, measured, terms

WIDE = {"data.batch_size": 64, "data.seq_len": 4096, "work.remat": "full", "work.gather": "layer"}


def llama(topology, mesh="fsdp=64", **more):
    return planner.plan(preset("llama3_8b", mesh=mesh, **WIDE | more), topology)


def test_a_real_step_adds_what_the_compiler_leaves_out():
    """Catches a constant of another chip, and weight all-gathers that are free because they overlap."""
    one = llama("v4:4x4x4")
    hidden = sum((x.wire_bytes - x.exposed_bytes) / one.speed(x) for x in one.traffic if x.part == "weights")
    added = measured.MATMULS["v4"] * one.expected["products"] + 0.25 * hidden
    assert hidden > 0 and one.real.seconds == pytest.approx(one.likely_s + added)
    assert llama("v6e:8x8").real.seconds / llama("v6e:8x8").likely_s < one.real.seconds / one.likely_s


def test_on_gpus_communication_overlaps_except_over_tensor():
    """Catches all communication exposed, which made plans with fsdp too long, and a peak that no GPU reaches."""
    real = lambda mesh, **more: llama("h100:64", mesh, **more).real.seconds
    compute = llama("h100:64").seconds()["compute"] / measured.GPU_MATMULS["h100"]
    assert real("fsdp=64") == pytest.approx(compute, rel=0.01)
    assert real("fsdp=8,tensor=8") > 1.1 * compute
    few = {"data.batch_size": 64, "data.seq_len": 128}  # so few tokens that the weights' gathers take longer
    assert real("fsdp=64", **few) > 2 * llama("h100:64", **few).seconds()["compute"] / measured.GPU_MATMULS["h100"]


@pytest.mark.parametrize("name, topology, mesh, kind", [
    ("llama3_8b", "v4:4x4x4", "fsdp=64", "dense, one slice"), ("llama3_8b", "v4:4x4x4", "fsdp=32,context=2", "context"),
    ("mixtral_8x7b", "v4:4x4x4", "fsdp=64", "MoE"), ("llama3_8b", "h100:64", "fsdp=64", "GPUs"),
])  # fmt: skip
def test_the_interval_is_that_of_the_kind_of_step(name, topology, mesh, kind):
    """Catches the errors of dense models promised for a mixture of experts or for GPUs."""
    one = planner.plan(preset(name, mesh=mesh, **WIDE), topology)
    found = measured.intervals()[kind]
    assert one.real.kind == kind and one.real.steps == found["steps"] > 0
    assert (one.real.low, one.real.high) == (found["low"] * one.real.seconds, found["high"] * one.real.seconds)
    assert one.to_json()["real"] == dataclasses.asdict(one.real)


def test_a_kind_that_nobody_measured_has_no_interval(monkeypatch):
    """Catches an interval without a measured step behind it, and a time for devices of unknown speed."""
    monkeypatch.setattr(measured, "intervals", dict)
    one = llama("v4:4x4x4")
    assert one.real.low is None and str(one.real).endswith("s; no step of this kind (dense, one slice) was measured")
    assert planner.plan(preset("tiny", mesh="fsdp=4"), "cpu:4").real is None


def test_a_plan_prints_its_interval(capsys):
    """Catches a time without an interval in the table of a mesh."""
    from rich.console import Console

    one = llama("v4:4x4x4")
    show.tables(one, None, None, Console(width=120, highlight=False))
    between = f"{one.real.low:.3g} to {one.real.high:.3g} s by {one.real.steps} measured steps (dense, one slice)"
    assert f"real step  {one.real.seconds:.3g} s, {between}" in capsys.readouterr().out


@pytest.mark.parametrize("topology, note", [
    ("h100:64", "note       JAX reserves 75% of a GPU's 79.6 GiB; if you set XLA_CLIENT_MEM_FRACTION, use --memory\n"),
    ("v4:4x4x4", ""),
])  # fmt: skip
def test_a_search_on_gpus_says_which_memory_limits_it(topology, note, capsys):
    """Catches a search that refuses layouts with a limit below the data sheet's, and does not say why."""
    from rich.console import Console

    show.search_table([llama(topology)], [], {}, None, Console(width=120, highlight=False))
    text = capsys.readouterr().out
    assert note in text and ("JAX reserves" in text) == bool(note)


def test_a_search_on_gpus_prints_the_real_step_of_each_layout(capsys):
    """Catches a roofline of GPUs that looks like the time of a step, and an MFU of the roofline."""
    from rich.console import Console

    fit = [llama("h100:64", mesh=mesh) for mesh in ("fsdp=64", "fsdp=32,tensor=2")]
    show.search_table(fit, [], {}, None, Console(width=120, highlight=False))
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines() if "┃" in line or "│" in line)
    assert " ".join(header).replace("┃", "").split()[-5:] == ["roofline", "real", "step", "real", "MFU"]
    for row, one in zip(rows, fit, strict=True):
        assert row[-2] == f"{one.mfu(one.real.seconds):.1%}" and one.real.seconds > 1.1 * one.likely_s
        assert f"{one.real.seconds:.3f}" in row
