"""The planner's `--precision fp8`: which matmuls are faster, on which chips, and what the output says."""

import dataclasses

import pytest

from config import preset
from plan import planner
from plan.__main__ import main
from plan.answer import explain
from plan.chips.hardware import CHIPS, Topology
from plan.time import roofline

SMALL = {"data.batch_size": 64, "work.remat": "full", "work.gather": "layer", "work.device_batch": 1, "mesh": "fsdp=64"}


def plans(name, topology, **settings):
    """Return the plans of a step in BF16 and in FP8."""
    cfg, chips = preset(name, **SMALL | settings), Topology.parse(topology)
    return [planner.plan(cfg, one) for one in (chips, dataclasses.replace(chips, fp8=True))]


def test_the_peaks_are_those_of_the_data_sheets():
    """Catches a peak for sparse matmuls, which is twice as high, and one of a chip in place of a device's."""
    # NVIDIA's data sheets: H100 SXM 1,979, HGX B200 4,500 and GB200 NVL72 5,000 TFLOP/s, dense; TPU7x: 4,614 per chip
    sheets = {"h100": 1979e12, "h200": 1979e12, "b200": 4500e12, "gb200": 5000e12, "tpu7x": 4614e12 / 2}
    assert {key for key, chip in CHIPS.items() if chip.fp8} == {*sheets}
    for key, peak in sheets.items():
        assert 2 * CHIPS[key].peak_flops_per_s == pytest.approx(peak, rel=1e-3)


@pytest.mark.parametrize("name, topology", [("llama3_8b", "8*h100"), ("mixtral_8x7b", "tpu7x:4x4x2")])
def test_only_matmuls_with_weights_of_layers_are_faster(name, topology):
    """Catches attention, routers and logits in FP8, and FLOPs or bytes that change with the precision."""
    bf16, fp8 = plans(name, topology)
    assert (fp8.flops, fp8.peak_bytes, fp8.wire_by_axes) == (bf16.flops, bf16.peak_bytes, bf16.wire_by_axes)
    faster = {(x.part, x.kernel, x.name) for x in fp8.work if roofline.peak(fp8, x) == 2 * roofline.peak(bf16, x)}
    same = {(x.part, x.kernel, x.name) for x in fp8.work} - faster
    experts = {("experts", "experts", "experts")} if bf16.cfg.model.n_experts else set()
    assert experts <= faster and not any(part == "logits" or kernel == "attention" for part, kernel, _ in faster)
    assert {part for part, *_ in same} == {"attention", "logits"} | ({"router"} if experts else set())
    assert 0.5 * bf16.step_s < fp8.step_s < bf16.step_s
    peak = bf16.topology.chip.peak_flops_per_s
    assert roofline.mean_peak(bf16) == pytest.approx(peak) and peak < roofline.mean_peak(fp8) < 2 * peak


def test_losses_of_a_step_in_fp8_are_positive():
    """Catches a step that is compared with the peak in BF16, which it may exceed."""
    _, fp8 = plans("llama3_8b", "8*h100")
    lost = explain.losses(fp8)
    assert min(lost.values()) >= 0
    ideal = fp8.model_flops / roofline.mean_peak(fp8)
    assert ideal + sum(lost.values()) == pytest.approx(fp8.step_s)


def test_a_plan_in_fp8_has_no_interval(capsys):
    """Catches an interval of measured steps in BF16."""
    words = ["llama3_8b", "--mesh", "fsdp=8", "--data.batch_size", "8", "--precision", "fp8"]
    assert main([*words, "--topology", "h100:8", "--memory", "200"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "without an interval: no step in FP8 was measured, and MFU refers to the peak in BF16; MFU" in first


@pytest.mark.parametrize("words, why", [
    (["--topology", "v6e:2x4", "--mesh", "fsdp=8"],
     "--precision fp8: TPU v6e has no FP8 matmuls; drop it, or use one of tpu7x, h100, h200, b200, gb200"),
    (["--topology", "h100:8,a100:8"], "NVIDIA A100 has no FP8 matmuls"),
    (["--mesh", "fsdp=8"], "--precision fp8 needs a chip: pass a --topology of TPUs or GPUs"),
    (["--topology", "h100:8", "--mesh", "tensor=8", "--inference"], "--precision has no effect with --inference"),
])  # fmt: skip
def test_what_has_no_fp8_is_refused_in_one_line(words, why, capsys):
    """Catches a plan in BF16 that looks like one in FP8."""
    assert main(["llama3_8b", "--precision", "fp8", *words]) == 2
    out, said = capsys.readouterr()
    assert not out and said.startswith(f"error: {why}" if why.startswith("--") else "error: ") and why in said
