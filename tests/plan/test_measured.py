"""Test the seconds of a real step: what they add to a plan, and the interval of measured steps."""

import dataclasses
import json
import math
import re
from collections import Counter

import pytest

from config import preset
from plan import planner
from plan.__main__ import main
from plan.answer import show
from plan.chips import hardware
from plan.chips.units import amount
from plan.time import fit, measured, simulated, terms

WIDE = {"data.batch_size": 64, "data.seq_len": 4096, "work.remat": "full", "work.gather": "layer"}
NARROWER = 0.01  # of the variance that is left after one step that depends on a single constant


def llama(topology, mesh="fsdp=64", **more):
    return planner.plan(preset("llama3_8b", mesh=mesh, **WIDE | more), topology)


def test_a_real_step_multiplies_each_cost_by_its_constant():
    """Catches a constant of another chip or term, weight all-gathers that are free because they overlap, attention that
    takes as long as the compiled kernel, and gated units that other trainers' programs do not store."""
    one = llama("v4:4x4x4")
    chip, given = one.topology.chip, measured.table()["v4", ""].by_term
    hidden = sum((x.wire_bytes - x.exposed_bytes) / one.speed(x) for x in one.traffic if x.part == "weights")
    of = lambda kernel: sum(terms.matmul_seconds(x, one, chip) for x in one.work if x.kernel == kernel)
    attention, matmuls = of("attention"), of("")
    others = simulated.other_bytes(one, chip, of_gates=0) / chip.hbm_bytes_per_s
    parts = one.simulated
    exposed = sum(time for name, time in parts.items() if name not in ("matmuls", "other ops", "bubble"))
    assert hidden > 0 and 0 < attention < matmuls < parts["matmuls"] < attention + matmuls
    assert 0 < others < parts["other ops"]
    wanted = (given["matmuls"] * matmuls + given["attention"] * attention + given["memory"] * others
              + given["weights"] * hidden + given["exposed"] * exposed)  # fmt: skip
    assert one.estimate.seconds == pytest.approx(wanted)
    assert sum(measured.causes(one, one.simulated).values()) == pytest.approx(wanted)


def test_a_head_leaves_wider_matrix_units_idle():
    """Catches attention of 128 wide heads that is as fast as matmuls on units of 256 x 256, and slow on others."""
    costs = lambda one: terms.costs(one, one.simulated)
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


def test_the_interval_follows_from_the_spreads_of_the_constants():
    """Catches an interval that does not widen where a step depends on a constant that nobody measured."""
    width = lambda one: math.log(one.estimate.high / one.estimate.low)
    trainer = dataclasses.replace(hardware.Topology.parse("h100:64"), trainer="llm-foundry")
    known, unknown = llama(trainer), llama("h100:64")
    assert width(known) < 0.15 < width(unknown) < width(llama("h100:64", **{"data.seq_len": 65536}))
    assert 2 * 1.2816 * measured.table()["h100", "llm-foundry"].noise < width(known)
    assert known.estimate.source == "by 35 measured steps of llm-foundry on h100"
    assert unknown.to_json()["estimate"] == dataclasses.asdict(unknown.estimate)


@pytest.mark.parametrize("topology, change, why", [
    ("b200:64", {}, "no step on b200 was measured"),
    ("v5p:4x4x4", {"data.seq_len": 1048576}, "1,048,576 positions, but the measured steps have at most 131,072"),
    ("a100:64", {"model.n_experts": 8}, "no MoE step was measured there (by 25 measured steps of any trainer on a100)"),
    ("v5p:4x4x4", {"model.n_experts": 8, "model.d_expert": 128},
     "experts 128 wide, but the narrowest of the measured steps are 2,048 wide"),
])  # fmt: skip
def test_a_plan_unlike_any_measured_step_has_no_interval(topology, change, why):
    """Catches an interval of other steps promised for a chip, a length or experts that nobody measured."""
    one = llama(topology, **change)
    assert one.estimate.low is None and one.estimate.high is None
    assert str(one.estimate) == f"{one.step_s:,.3f} s, without an interval: {why}"


def test_devices_of_unknown_speed_have_no_time():
    """Catches a time for simulated devices."""
    assert planner.plan(preset("tiny", mesh="fsdp=4"), "cpu:4").step_s is None


def test_a_measured_step_moves_the_constants_that_its_time_depends_on():
    """Catches a fit that only scales all of a step, and one that ignores how sure a constant is."""
    before = measured.prior(terms.GPU_TERMS)
    alone = [terms.Cost("attention", "matmuls", 1.0)]
    after = fit.fit(before, [fit.Measured(alone, 0.0, 5.0)])
    assert after.steps == 1 and after.by_term["attention"] == pytest.approx(5.0, rel=0.01)
    assert {name: x for name, x in after.by_term.items() if name != "attention"} == pytest.approx(
        {name: x for name, x in before.by_term.items() if name != "attention"})  # fmt: skip
    assert after.covariance[1][1] < NARROWER * before.covariance[1][1] and after.covariance[0][0] == pytest.approx(
        before.covariance[0][0])  # fmt: skip
    both = [terms.Cost("matmuls", "matmuls", 1.0), terms.Cost("attention", "matmuls", 1.0)]
    mixed = fit.fit(before, [fit.Measured(both, 0.0, 1.5 * (1.35 + 2.5))]).by_term
    assert mixed["attention"] / 2.5 > mixed["matmuls"] / 1.35 > 1  # the less certain one moves further
    assert fit.fit(before, []) == before


def test_a_step_of_your_own_calibrates_a_plan(capsys):
    """Catches a measured step that is ignored, and one that is planned with the settings of the plan."""
    words = ["llama3_8b", "--topology", "b200:64", "--mesh", "fsdp=64", "--json", "-",
             *(f"--{name}={value}" for name, value in WIDE.items())]  # fmt: skip
    real = lambda *more: main([*words, *more]) or json.loads(capsys.readouterr().out)["estimate"]
    base = real()
    assert base["low"] is None and base["seconds"] > 0
    ours = real("--measured", f"step={1.5 * base['seconds']}")
    assert ours["seconds"] == pytest.approx(1.5 * base["seconds"], rel=0.05)
    assert ours["low"] < ours["seconds"] < ours["high"]
    assert ours["source"] == "by 1 measured step of yours on b200"
    steps = f"batch=128 step={3 * base['seconds']}; mesh=fsdp=32,data=2 step={1.6 * base['seconds']}"
    twice = real("--measured", steps)
    assert twice["seconds"] == pytest.approx(1.5 * base["seconds"], rel=0.1) and twice["steps"] == 2


@pytest.mark.parametrize("words, why", [
    (["--measured", "mesh=fsdp=64"], "--measured 'mesh=fsdp=64': it has no step=SECONDS above 0; write 'mesh="),
    (["--measured", "step=-1"], "--measured 'step=-1': it has no step=SECONDS above 0"),
    (["--measured", "speed=4 step=1"], "--measured 'speed=4 step=1': unknown name 'speed'; write 'mesh="),
    (["--measured", "batch=63 step=1"], "cannot split data.batch_size=63 sequences"),
    (["--trainer", "nobody"], "--trainer nobody: no step of it on h100 was measured; trainers with measured steps"),
    (["--trainer", "megatron", "--topology", "v5p:4x4x4"], "--trainer megatron has an effect only on GPUs; drop it"),
    (["--trainer", "megatron", "--topology", "cpu:64"], "--trainer needs a chip: pass a --topology of TPUs or GPUs"),
    (["--measured", "step=1", "--constants", "x"], "--constants and --measured both fit the plan to measured steps"),
    (["--measured", "step=1", "--topology", "v4:4x4x4,h100:64"], "--measured describes one topology"),
    (["--trainer", "megatron", "--inference"], "--trainer has no effect with --inference"),
    (["--measured", "step=1", "--max_batch"], "--measured has no effect with --max_batch or --parameters; drop one"),
    (["--trainer", "megatron", "--parameters"], "--trainer has no effect with --max_batch or --parameters; drop one"),
])  # fmt: skip
def test_what_a_plan_cannot_use_is_refused_in_one_line(capsys, words, why):
    """Catches a flag that is ignored, and a traceback for a misspelled step."""
    wide = [f"--{name}={value}" for name, value in WIDE.items() if "--inference" not in words]
    assert main(["llama3_8b", "--topology", "h100:64", "--mesh", "fsdp=64", *wide, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error and error.count("\n") == 1


def test_a_plan_prints_its_interval(capsys):
    """Catches a time without an interval in the first lines of a plan."""
    one = llama("v4:4x4x4")
    between = f"{one.estimate.low:.3f} to {one.estimate.high:.3f} s in 4 of 5 cases (by 7 measured steps of v4)"
    assert show.answer(one) == [f"step       {one.step_s:.3f} s, {between}; MFU {one.mfu(one.step_s):.1%}",
                                f"memory     {one.peak_bytes / 2**30:.3f} GiB of 30.750 GiB: fits"]  # fmt: skip


@pytest.mark.parametrize("topology, columns", [("v4:4x4x4", ["lower bound", "simulated", "step"]),
                                               ("h100:64", ["lower bound", "step"])])  # fmt: skip
def test_only_why_shows_the_other_two_times(topology, columns, capsys):
    """Catches three answers to "how long", and a sum that is not the step."""
    from rich.console import Console

    one, console = llama(topology), Console(width=120, highlight=False)
    show.tables(one, None, None, False, console)
    plain = capsys.readouterr().out
    assert "lower bound" not in plain and "simulated" not in plain and "roofline" not in plain
    show.tables(one, None, None, True, console)
    text = capsys.readouterr().out.partition("time of a step")[2]
    assert re.split(r" *┃ *", text.splitlines()[2])[2:-2] == columns
    sums = {"lower bound": one.lower_bound_s, "simulated": one.simulated_s, "step": one.step_s}
    rows = [re.split(r" *│ *", line)[1:-2] for line in text.splitlines() if line.startswith("│")]
    everything = next(row for row in rows if row[0] == "all")
    assert everything[1:] == [amount(sums[name], "s") for name in columns]


def test_rows_as_fast_as_the_first_are_marked():
    """Catches an interval of one time instead of the ratio of two, whose constants are the same."""
    dots = {"work.remat": "dots"}
    fast, same, slow = (llama("v4:4x4x4", mesh, **dots) for mesh in ("fsdp=64", "fsdp=32,tensor=2", "data=2,fsdp=32"))
    assert fast.as_fast_as(same) and fast.as_fast_as(fast) and not slow.as_fast_as(fast)
    assert slow.estimate.low < fast.estimate.high, "their intervals overlap"


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


def test_a_search_on_gpus_prints_the_step_of_each_layout(capsys):
    """Catches a lower bound that looks like the time of a step, and its MFU."""
    from rich.console import Console

    fit = [llama("h100:64", mesh=mesh) for mesh in ("fsdp=64", "fsdp=32,tensor=2")]
    show.search_table(fit, [], {}, None, Console(width=120, highlight=False))
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines() if "┃" in line or "│" in line)
    assert " ".join(header).replace("┃", "").split()[-2:] == ["step", "MFU"]
    for row, one in zip(rows, fit, strict=True):
        assert row[-2] == f"{one.mfu(one.step_s):.1%}" and one.step_s > 1.1 * one.lower_bound_s
        assert f"{one.step_s:.3f}" in row
