"""Test `auto`: which execution settings a plan chooses, the reasons it prints, and that nothing else changes."""

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import pytest

from config import ModelConfig, WorkConfig, preset, replace
from plan import planner
from plan.answer import auto
from plan.chips import hardware

GIB = 2**30
WIDE = {"data.batch_size": 64, "data.seq_len": 4096}
CASES = {
    "one axis": ("llama3_8b", "v4:4x4x4", WIDE | {"mesh": "fsdp=64"}),
    "stages": ("moe1b", "v4:4x4x2", {"mesh": "stage=2,fsdp=8,tensor=2"}),
    "context": ("dense_124m", "v5e:4x4", {"mesh": "fsdp=4,context=2,tensor=2", "data.batch_size": 64}),
    "accumulation": ("dense_124m", "h100:1", {"data.batch_size": 96}),
}
VALUES = {
    "remat": ("none", "dots", "branches", "full", auto.SAVED), "gather": ("layer", "step"),
    "tensor_exchange": ("gather", "ring"),
    "context_attention": ("gather", "ring"), "schedule": ("gpipe", "1f1b", "interleaved", "zb"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_fits_is_faster(case):
    """Catches settings that are not considered, the time of other settings, and a choice that leaves no memory free.
    Only the list has to be 3% faster than other settings, and to leave a quarter of the memory free."""
    name, topology, settings = CASES[case]
    cfg = preset(name, **settings)
    chosen = planner.plan(cfg, topology)
    assert chosen.peak_bytes <= 0.9 * chosen.limit_bytes
    for values in itertools.product(*VALUES.values()):
        one = planner.plan(replace(cfg, work=WorkConfig(**dict(zip(VALUES, values, strict=True)))), topology)
        fits = one.peak_bytes <= (0.75 if one.cfg.work.remat == auto.SAVED else 0.9) * one.limit_bytes
        close = 1.03 * 1.01 if one.cfg.work.remat == auto.SAVED else 1.01
        assert not fits or one.step_s >= chosen.step_s / close, (values, one.step_s, chosen.step_s)
    again = planner.plan(chosen.cfg, topology)
    assert (again.step_s, again.peak_bytes) == (chosen.step_s, chosen.peak_bytes)
    assert dataclasses.replace(chosen.cfg, work=cfg.work) == cfg, "a setting outside of `work` changed"


def test_ties_are_broken_by_memory():
    """Catches ties broken by the order of the list, or by less than the errors: `branches` is as fast here, and needs
    a quarter more memory. (In 6 GiB, the list and `dots` do not fit.)"""
    planned = lambda remat: planner.plan(preset("moe1b", **{"work.remat": remat}), "v4:4x4x2", 6 * GIB)
    chosen, other = planned("auto"), planned("branches")
    assert (chosen.cfg.work.remat, chosen.cfg.work.gather) == ("full", "layer")
    assert 0.99 * chosen.step_s < other.step_s < chosen.step_s and other.peak_bytes > 1.25 * chosen.peak_bytes


def test_a_list_of_activations_is_tried_on_tpus():
    """Catches `auto` that recomputes whole layers although most of the memory is free, that chooses the list where it
    does not fit, has not been compared (GPUs, CPUs) or is refused (encoders), or that does not say what the others
    cost."""
    one = planner.plan(preset("moe1b"), "v4:4x4x2")
    other = planner.plan(preset("moe1b", **{"work.remat": "full"}), "v4:4x4x2")
    assert one.cfg.work.remat == "attention,branch,hidden" and one.step_s < 0.95 * other.step_s
    assert one.why.startswith("remat=attention,branch,hidden (none +") and ", full +7%), gather=layer (" in one.why
    assert planner.plan(preset("moe1b"), "v4:4x4x2", 6 * GIB).cfg.work.remat == "full"
    for topology in ("h100:32", None):
        one = planner.plan(preset("moe1b"), topology, 30 * GIB)
        assert "," not in one.cfg.work.remat and auto.SAVED not in one.why
        tried = []
        make = lambda cfg, at=one.topology, tried=tried: tried.append(cfg.work.remat) or planner.plan(cfg, at, 30 * GIB)
        auto.choose(preset("moe1b"), make)
        assert "dots" in tried and auto.SAVED not in tried
    assert auto.SAVED not in planner.plan(preset("t5_base", mesh="fsdp=4"), "v4:2x2x1").why


def test_a_list_by_hand_has_a_place_without_a_known_speed():
    """Catches a crash: without times, plans were sorted by the place of `work.remat` among the values that are not
    lists."""
    assert planner.plan(preset("laptop", **{"work.remat": "attention,keys"}), None, GIB).fits


def test_without_a_known_speed_it_chooses_the_simplest_settings_that_fit():
    """Catches rings on simulated devices, and a laptop that runs out of memory."""
    cfg = preset("laptop", mesh="fsdp=2,tensor=2")
    plain = dict(remat="none", gather="layer", tensor_exchange="gather", schedule="gpipe", loss_chunk=512)
    free, roomy = planner.plan(cfg), planner.plan(cfg, None, GIB)
    for one in (free, roomy):
        assert {name: getattr(one.cfg.work, name) for name in plain} == plain
        assert one.device_batch == 4
    tight = planner.plan(cfg, None, round(free.peak_bytes))
    assert tight.peak_bytes <= 0.9 * tight.limit_bytes
    assert (tight.cfg.work.remat, tight.device_batch) != ("none", 4)
    assert "device_batch=1 (4 leaves 0% of the memory free)" in tight.why
    assert tight.why.endswith(", the simplest that fits")


def test_it_splits_the_batch_only_if_that_helps():
    """Catches a batch that is split although it fits, and one whose layers are recomputed instead."""
    whole = planner.plan(preset("dense_124m", **{"data.batch_size": 24}), "h100:1")
    cut = planner.plan(preset("dense_124m", **{"data.batch_size": 480}), "h100:1")
    assert whole.device_batch == 24 and whole.cfg.work.device_batch == "auto"
    assert cut.device_batch < 480 and cut.cfg.work.remat == "none"
    assert f"device_batch={cut.device_batch} (480 does not fit)" in cut.why


def test_pinned_settings_stay():
    """Catches a flag that is ignored because another setting is faster."""
    pinned = {"work.remat": "branches", "work.gather": "step", "work.device_batch": 2, "work.loss_chunk": 96}
    one = planner.plan(preset("llama3_8b", **WIDE, mesh="fsdp=8,tensor=8", **pinned), "v4:4x4x4")
    assert {
        f"work.{name}": getattr(one.cfg.work, name) for name in ("remat", "gather", "device_batch", "loss_chunk")
    } == pinned
    assert {name.partition("=")[0] for name in one.why.split(", ")} == {"tensor_exchange"}


def test_the_reasons_match_the_other_plans():
    """Catches a percentage, or a "does not fit", of other settings."""
    cfg = preset("llama3_8b", **WIDE, mesh="fsdp=64")
    one = planner.plan(cfg, "v4:4x4x4")
    of = lambda remat: planner.plan(replace(cfg, work=dataclasses.replace(one.cfg.work, remat=remat)), "v4:4x4x4")
    percent = lambda remat: f"{remat} {of(remat).step_s / one.step_s - 1:+.0%}"
    assert not of("none").fits
    others = ", ".join(map(percent, ("branches", "full", auto.SAVED)))
    assert one.why.startswith(f"remat=dots (none does not fit, {others}), gather=layer (")
    assert auto.settings_text(one) == f"{one.why}; loss_chunk=512"


BY_HAND = {  # the first is MaxText's step of a 22B model on v4, which ran with 13 sequences per device
    "22b": ("llama3_8b", "v4:4x4x4", {"model": ModelConfig(
        vocab_size=32_000, d_model=6144, n_layers=48, n_heads=24, attention="gqa", n_kv_heads=24, d_head=128,
        d_ff=24_576), "mesh": "fsdp=64", "data.batch_size": 832, "data.seq_len": 2048, "work.remat": "full"}),
    "stages": ("dense_124m", "v5e:2x4", {"mesh": "stage=2,fsdp=2,tensor=2", "data.batch_size": 128}),
    "gpus": ("llama3_8b", "h100:16", WIDE | {"mesh": "fsdp=8,tensor=2"}),
    "cpu": ("laptop", None, {"mesh": "fsdp=2,tensor=2"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_what_auto_says_of_a_setting_is_true_of_the_setting_by_hand(case):
    """Catches a setting that `auto` calls too large and a plan by hand calls fitting, as its memory only exceeds 90%.
    The limits are the chip's memory, two at which remat=none, with the least memory, exceeds all or 90% of it, and two
    at which the settings that are chosen on the chip do."""
    name, topology, settings = BY_HAND[case]
    cfg, seen = preset(name, **settings), set()
    free = planner.plan(cfg, topology)
    peak = planner.plan(replace(cfg, **{"work.remat": "none"}), topology).peak_bytes
    near = (0.97 * peak, 1.03 * peak, 1.03 * free.peak_bytes, 1.06 * free.peak_bytes)
    for limit in (free.limit_bytes or GIB, *map(round, near)):
        one = planner.plan(cfg, topology, limit)
        pinned = {name: getattr(one.cfg.work, name) for name in (*VALUES, "device_batch")}
        for setting, others in re.findall(r"(\w+)=[\w,]+ \(([^)]*)\)", one.why):
            for value, told in (text.split(" ", 1) for text in others.split(", ")):
                by_hand = pinned | {setting: int(value) if value.isdecimal() else value}
                other = planner.plan(replace(cfg, work=dataclasses.replace(cfg.work, **by_hand)), topology, limit)
                if other.peak_bytes > 0.9 * limit and setting != "device_batch":
                    by_hand["device_batch"] = "auto"
                    other = planner.plan(replace(cfg, work=dataclasses.replace(cfg.work, **by_hand)), topology, limit)
                want = [f"{other.step_s / one.step_s - 1:+.0%}"] if one.step_s else []
                want += [f"with device_batch={other.device_batch}"] * (
                    setting != "device_batch" and other.device_batch != one.device_batch)  # fmt: skip
                if (left := 1 - other.peak_bytes / limit) < 0.1:
                    want += ["but"] * bool(want) + [f"leaves {math.floor(100 * left)}% of the memory free"]
                assert told == (" ".join(want) if other.fits else "does not fit"), (limit, setting, value)
                seen |= {*re.findall("does not fit|leaves|with", told)}
    assert seen >= {"leaves"}, "the limits are far from what the settings need"
    if case == "22b":
        assert planner.plan(cfg, topology).why.endswith("device_batch=1 (13 -24% but leaves 7% of the memory free)")


def test_if_nothing_fits_it_returns_the_smallest_plan():
    """Catches an error in the choice itself, instead of a plan that shows by how much it is too large."""
    one = planner.plan(preset("deepseek_v3", mesh="fsdp=16", **{"data.batch_size": 16}), "v5e:4x4")
    assert one.fits is False and one.cfg.work.remat == "full" and one.cfg.work.gather == "layer"
    assert one.why == "with all auto, nothing leaves 10% of the memory free; these settings need the least"
    pinned = planner.plan(replace(one.cfg, work=WorkConfig(remat="dots")), "v5e:4x4")
    assert pinned.why == "with remat=dots, nothing leaves 10% of the memory free; these settings need the least"


def test_a_schedule_that_the_layers_forbid_is_not_chosen():
    """Catches a choice that fails because one schedule's chunks do not split the layers."""
    one = planner.plan(preset("moe1b", mesh="stage=8,fsdp=4"), "v4:4x4x2")  # 8 blocks: one per stage
    assert one.sched.name != "interleaved" and "interleaved" not in one.why


@pytest.mark.parametrize("kind, coords, name", [
    ("TPU v4", list(itertools.product(range(2), range(2), range(4))), "v4:2x2x4"),
    ("TPU v4", [(x + 4, y, z) for x in range(2) for y in range(2) for z in range(4)], "v4:2x2x4"),
    ("TPU v4", [(0, 0, z) for z in range(4)], None),
    ("TPU v5 lite", [(x, y, 0) for x in range(4) for y in range(2)], "v5e:4x2"),
    ("NVIDIA H100 80GB HBM3", [None] * 8, "h100:8"),
    ("cpu", [None] * 8, None),
    ("TPU v99", [(0, 0, 0)], None),
])  # fmt: skip
def test_present_devices_have_the_topology_of_their_slice(kind, coords, name):
    """Catches a slice with the speed of another, and an error for devices that are in no table."""
    devices = [SimpleNamespace(device_kind=kind, coords=place) for place in coords]
    found = hardware.topology_of_devices(devices)
    assert (found and found.cloud) == (name and hardware.Topology.parse(name).cloud)


def test_settings_without_effect_are_not_listed():
    """Catches settings without effect on this mesh in the line that start-up prints."""
    assert auto.without_effect(preset("tiny", mesh="data=2")) == {
        "gather", "tensor_exchange", "context_attention", "context_layout", "expert_exchange", "muon_layout",
        "schedule"}  # fmt: skip
    cfg = preset("tiny", mesh="stage=2,expert=2,context=2,tensor=2")
    assert auto.without_effect(cfg) == {"muon_layout"}
    assert auto.without_effect(replace(cfg, **{"optim.name": "muon"})) == set()
    replicas = preset("tiny", mesh="data=2", **{"optim.name": "muon"})
    assert "muon_layout" in auto.without_effect(replicas)
    assert "muon_layout" not in auto.without_effect(replace(replicas, **{"optim.shard_over_data": True}))


ONE_LAYER = {"model.n_layers": 1, "data.batch_size": 64, "optim.muon": "steps=1"}


@pytest.mark.parametrize("name, topology, mesh, settings, layout", [
    ("llama3_8b", "v5p:2x2x2", "fsdp=8", {}, "owner"),
    ("dense_124m", "v5e:8x8", "fsdp=64", ONE_LAYER, "gather"),
])  # fmt: skip
def test_the_layout_of_muon_is_chosen_by_seconds(name, topology, mesh, settings, layout):
    """Catches all-gathers of 32 layers, which every device then orthogonalizes, and an all-to-all over 64 devices of
    matrices that are computed in less time."""
    plan = planner.plan(preset(name, mesh=mesh, **settings, **{"optim.name": "muon"}), topology)
    other = {"owner": "gather", "gather": "owner"}[layout]
    assert plan.cfg.work.muon_layout == layout
    slower = planner.plan(replace(plan.cfg, **{"work.muon_layout": other}), topology).step_s / plan.step_s - 1
    assert slower > 0.01
    assert f"muon_layout={layout} ({other} {slower:+.0%}" in plan.why
