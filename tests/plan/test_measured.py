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


def test_a_head_leaves_wider_matrix_units_idle():
    """Catches attention of 128 wide heads that is as fast as matmuls on units of 256 x 256, and slow on others."""
    costs = lambda one: terms.costs(one, one.expected)
    at = lambda topology: next(x for x in costs(llama(topology)) if x.term == "attention").seconds
    flops = next(x for x in llama("v6e:8x8").work if x.kernel == "attention")
    moved = 0.88 * flops.hbm_bytes / hardware.CHIPS["v6e"].hbm_bytes_per_s
    assert at("v6e:8x8") == pytest.approx(2 * flops.flops / hardware.CHIPS["v6e"].peak_flops_per_s + moved)
    flops = next(x for x in llama("v5e:8x8").work if x.kernel == "attention")
    moved = 0.88 * flops.hbm_bytes / hardware.CHIPS["v5e"].hbm_bytes_per_s
    assert at("v5e:8x8") == pytest.approx(1.02 * flops.flops / hardware.CHIPS["v5e"].peak_flops_per_s + moved)


def test_the_costs_of_a_step_on_gpus():
    """Catches bytes counted under another constant, logits of other trainers that the stages share, and a cost per
    microbatch that does not grow with them."""
    one = llama("h100:64", "stage=4,fsdp=8,tensor=2", **{"work.microbatches": 8})
    found = Counter()
    for cost in terms.costs(one, None):
        found[cost.term] += cost.seconds
    sent = Counter()
    for row in one.traffic:
        own = row.part not in terms.OF_WEIGHTS and {"stage", "tensor"} & {*row.axes}
        sent[min(own) if own else "weights"] += row.wire_bytes / one.speed(row)
    assert [found[name] for name in ("weights", "stages", "tensor")] == pytest.approx(
        [sent[name] for name in ("weights", "stage", "tensor")])  # fmt: skip
    assert found["layers"] == pytest.approx(8 * 32 / 4 * 1e-3)
    logits = sum(x.flops for x in one.work if x.part == "logits") / one.topology.chip.peak_flops_per_s
    total = lambda trainer: sum(x.seconds for x in terms.costs(one, None, trainer))
    apart = total("megatron") - total("")
    assert total("this") == total("")
    assert logits > 0 and apart == pytest.approx(3 * logits)
    bytes_of_layers = 8 * 8 * one.cfg.data.batch_size / 8 / 8 * 4096 / 2 * (4 * 4096 + 2 * 14336) * 2
    assert found["memory"] == pytest.approx(bytes_of_layers / one.topology.chip.hbm_bytes_per_s)


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
