"""The planner counts sliding windows as the trainer runs them, also where only some layers have a window."""

from collections import Counter

import pytest

import pipeline
from architectures import busiest_stage
from config import preset
from plan import planner
from plan.count import costs
from plan.trace import program

SMALL = {"model.n_experts": 0, "model.moe_every": 1, "model.dense_prefix": 0, "model.n_layers": 4, "model.d_model": 64,
         "model.no_rope_every": 0, "data.seq_len": 2048, "data.batch_size": 8, "work.remat": "full",
         "work.gather": "layer"}  # fmt: skip
GROUPED, RING = {"model.attention": "gqa"}, {"work.context_attention": "ring"}


def config(mesh: str, window: str, *settings: dict):
    merged = {name: value for one in (SMALL, *settings) for name, value in one.items()}
    return preset("tiny", mesh=mesh, **{"model.window": window} | merged)


COMPILED = {
    "gathered": ("fsdp=2,context=2", "300", GROUPED),
    "a ring, the next chunk": ("context=4,fsdp=2", "200", GROUPED, RING),
    "a ring, several chunks": ("context=4", "700", GROUPED, RING, {"work.remat": "none"}),
    "a ring, every second layer": ("context=4,fsdp=2", "300:2", GROUPED, RING),
    "windows too long for a ring": ("context=2", "900:2", GROUPED, RING),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if "second" in c else pytest.mark.repeat) for c in COMPILED])
def test_windows_are_planned_as_they_are_compiled(case):
    """Catches layers without a window that count as layers with one, and bytes of a ring that no device sends."""
    plan = planner.plan(config(*COMPILED[case]))
    found, _ = planner.compile_plan(plan, print)
    assert plan.hardware_flops == pytest.approx(found["hardware_flops"], rel=0.01)
    # XLA sends the documents' numbers, which are the same in all layers, only once.
    assert plan.wire_by_axes == pytest.approx(found["wire_by_axes"], rel=0.015)
    every = planner.plan(config(COMPILED[case][0], "", *COMPILED[case][2:]))
    assert plan.hardware_flops < 0.95 * every.hardware_flops


TRACED = {
    "gathered": ("context=2", "300:3", "cpu", GROUPED),
    "latent attention": ("context=4,tensor=2", "200", "cpu", RING, {"model.d_kv_latent": 64}),
    "latent attention on a TPU": ("context=4", "700:2", "tpu", RING, {"data.seq_len": 8192}),
    "a ring on a TPU": ("context=4,fsdp=2", "1500", "tpu", GROUPED, RING, {"data.seq_len": 8192}),
    "all-to-alls": ("context=2", "300:2", "cpu", GROUPED, {"work.context_attention": "all_to_all"}),
    "experts": ("expert=2,context=2", "300:2", "cpu", RING, {"model.n_experts": 8, "model.moe_every": 2}),
    "a pipeline": ("stage=2,context=2", "300:4", "cpu", GROUPED, {"work.microbatches": 2, "work.schedule": "1f1b"}),
    "chunks": ("stage=2", "300:2", "cpu", GROUPED, {"work.microbatches": 2, "work.schedule": "interleaved:2"}),
}  # fmt: skip


@pytest.mark.parametrize("case", TRACED)
def test_windows_are_planned_as_they_are_traced(case):
    """Catches a kind of attention whose windows the planner ignores, and a branch that runs in every layer."""
    mesh, window, platform, *settings = TRACED[case]
    cfg = config(mesh, window, *settings)
    one, sched = program.training_step(cfg, platform), pipeline.schedule(cfg)
    assert one.flops == pytest.approx(sum(x.flops for x in costs.work(cfg, sched, platform)), rel=1e-3)
    wanted = {}
    for x in costs.traffic(cfg, sched):
        wanted["*".join(x.axes)] = wanted.get("*".join(x.axes), 0) + x.wire_bytes
    least = 1e-3 * sum(wanted.values())
    for axes in {*wanted, *one.wire_by_axes}:
        assert one.wire_by_axes.get(axes, 0) == pytest.approx(wanted.get(axes, 0), rel=0.01, abs=least), axes


STAGES = [  # window, layers, stages, chunks -> dense layers without a window, and with one, of the busiest stage
    ("", 8, 2, 1, 4, 0), ("128", 8, 2, 1, 0, 4), ("128:2", 8, 2, 1, 2, 2), ("128:6", 8, 4, 1, 1, 1),
    ("128:2", 4, 2, 2, 2, 0), ("128:3", 8, 1, 1, 2, 6),
]  # fmt: skip


@pytest.mark.parametrize("window, layers, stages, chunks, full, others", STAGES)
def test_the_busiest_stage_has_the_most_layers_without_a_window(window, layers, stages, chunks, full, others):
    """By hand. Catches the pattern of the first stage where a later one takes longer, and chunks of an interleaved
    schedule that are counted on the stage that stores them."""
    c = config("fsdp=1", window, GROUPED, {"model.n_layers": layers}).model
    assert busiest_stage(c, stages, chunks) == +Counter({("dense", True): full, ("dense", False): others})


def test_a_prefix_is_on_the_first_stage():
    """Catches a prefix that is spread over the stages."""
    c = config("fsdp=1", "128:2", GROUPED, {"model.n_layers": 5, "model.dense_prefix": 1}).model
    assert busiest_stage(c, 2, 1) == {("dense", False): 2, ("dense", True): 1}  # layers 0, 1 and 2
