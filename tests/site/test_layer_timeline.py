"""Tests of the layer timeline: bars match the file, and the file matches the simulated schedule of the compiler."""

import itertools
import json

import pytest

from docs import layer_timeline
from docs.build import MADE
from tests.site.test_explorers import in_browser


def cases() -> dict:
    return layer_timeline.read()["cases"]


def bars(way: str) -> dict:
    expression = f"Object.fromEntries(asked.map((name) => [name, it.bars(LAYER_DATA.cases[name].layers.{way})]))"
    return in_browser("layer.js", layer_timeline.write(MADE), expression, [*cases()])


@pytest.mark.site
@pytest.mark.parametrize("way", layer_timeline.WAYS)
def test_bars_match_the_file(way):
    """Catches time that is drawn twice, not at all, with the wrong cause, or in overlapping bars."""
    for name, found in bars(way).items():
        layer = cases()[name]["layers"][way]
        core = [bar for bar in found if bar["lane"] == "core"]
        drawn = {}
        for bar in core:
            cause = bar["what"].removeprefix("waiting for ")
            drawn[cause] = drawn.get(cause, 0) + bar["end"] - bar["start"]
        for cause, us in layer["own_us"].items():
            short = 0 if cause not in ("matmuls", "other ops", "copies") else layer["left_out_us"]
            assert drawn.get(cause, 0) == pytest.approx(us, abs=0.01 * len(core) + short), (name, cause)
        assert sum(layer["own_us"].values()) == pytest.approx(layer["us"], abs=0.1), name
        assert all(bar["kind"] == "waiting" for bar in core if bar["what"].startswith("waiting for ")), name
        assert all(0 <= bar["start"] <= bar["end"] <= layer["us"] + 0.1 for bar in core), name
        for one, other in ((a, b) for a in found for b in found if a is not b and a["lane"] == b["lane"]):
            if one["row"] == other["row"] and one["start"] <= other["start"]:
                assert one["end"] <= other["start"] + 0.03, (name, one, other)


@pytest.mark.site
def test_every_stall_ends_with_a_collective():
    """Catches a red bar without a busy link below it."""
    for way in layer_timeline.WAYS:
        for name, found in bars(way).items():
            for wait in (bar for bar in found if bar["kind"] == "waiting"):
                lane = wait["what"].removeprefix("waiting for ")
                ends = [bar["end"] for bar in found if bar["lane"] == lane and bar["start"] < wait["end"]]
                assert min(abs(end - wait["end"]) for end in ends) < 0.05, (name, way, wait)


@pytest.mark.site
@pytest.mark.parametrize("way", layer_timeline.WAYS)
def test_links_are_busy_while_a_collective_is_in_flight(way):
    """Catches time that is counted twice if two collectives share a link, and a core that waits for an idle link."""
    expression = f"Object.values(LAYER_DATA.cases).map((made) => it.busy(it.bars(made.layers.{way})))"
    busy = in_browser("layer.js", layer_timeline.write(MADE), expression, None)
    for (name, case), found in zip(cases().items(), busy, strict=True):
        layer, wanted = case["layers"][way], {}
        events = sorted((start, end, layer["words"][number][0]) for start, end, number, _ in layer["events"])
        for lane in {lane for *_, lane in events if lane != "core"}:
            edges = sorted({x for start, end, of in events if of == lane for x in (start, end)})
            spans = [(start, end) for start, end, of in events if of == lane]
            wanted[lane] = sum(b - a for a, b in itertools.pairwise(edges) if any(s <= a and b <= e for s, e in spans))
        assert {lane: one["busy"] for lane, one in found.items()} == pytest.approx(wanted, abs=0.1), name
        for axis, one in found.items():
            assert layer["own_us"].get(axis, 0) - 0.1 <= one["waited"] <= one["busy"] + 0.1, (name, axis)
        waited = sum(us for cause, us in layer["own_us"].items() if cause in found)
        assert all(one["waited"] <= waited + 0.1 for one in found.values()), name


def exposed(name: str, way: str) -> dict[str, float]:
    """Map each kind of collective to the fraction of its time during which the core waits, for whichever collective."""
    layer = cases()[name]["layers"][way]
    spans = {}
    for start, end, number, _ in layer["events"]:
        lane, what, *_ = layer["words"][number]
        kind = what if lane != "core" else "waiting" if what.startswith("waiting") else "busy"
        spans.setdefault(kind, []).append((start, end))
    waits = spans.pop("waiting")
    spans.pop("busy")
    edges = sorted({x for one in (waits, *spans.values()) for span in one for x in span})
    inside = lambda one: {a for a, b in itertools.pairwise(edges) if any(s <= a and b <= e for s, e in one)}
    after = dict(itertools.pairwise(edges))
    length = lambda starts: sum(after[a] - a for a in starts)
    return {kind: round(length(inside(one) & inside(waits)) / length(inside(one)), 2) for kind, one in spans.items()}


@pytest.mark.site
def test_the_text_of_the_page_matches_the_bars():
    """Catches a sentence in docs/layer_timeline.md that is only true for an older compiler."""
    expression = """Object.fromEntries(Object.entries(LAYER_DATA.cases).map(([name, made]) => [name, Object.fromEntries(
      Object.entries(made.layers).map(([way, layer]) => [way, it.busy(it.bars(layer))]))]))"""
    busy = in_browser("layer.js", layer_timeline.write(MADE), expression, None)
    waited = lambda name, way, axis: round(busy[name][way][axis]["waited"] / busy[name][way][axis]["busy"], 2)
    step = lambda name: cases()[name]["step_us"]
    assert (waited("v5p_gather", "forward", "tensor"), waited("v5p_ring", "forward", "tensor")) == (0.95, 0.21)
    assert waited("v5e_gather", "forward", "tensor") == waited("v5e_ring", "forward", "tensor") == 1
    assert waited("v5e_ring", "back", "tensor") == 1
    assert 1 - step("v5p_ring") / step("v5p_gather") == pytest.approx(0.02, abs=0.005)
    assert step("v5e_ring") / step("v5e_gather") - 1 == pytest.approx(0.043, abs=0.001)
    assert (waited("v5p_gather", "back", "tensor"), waited("v5p_ring", "back", "tensor")) == (0.28, 0.47)
    assert (waited("v5e_fsdp", "forward", "fsdp"), waited("v5p_fsdp", "forward", "fsdp")) == (0.15, 1)
    assert waited("v5e_gather", "back", "tensor") == 0.61
    assert exposed("v5e_fsdp", "back") == {"all-gather": 0.18, "all-reduce": 1}
    assert exposed("v5p_fsdp", "back") == {"all-gather": 1, "all-reduce": 0.28}
    waiting = lambda name: sum(us for cause, us in cases()[name]["causes_us"].items() if cause[:4] in ("fsdp", "tens"))
    assert [round(waiting(name) / 1e6, 3) for name in ("v5e_gather", "v5e_fsdp")] == [0.871, 0.386]
    assert step("dense_step") / step("dense_layer") - 1 == pytest.approx(0.04, abs=0.003)
    assert busy["dense_step"] == {"forward": {}, "back": {}}
    waits = [round(cases()[name]["causes_us"]["fsdp"] / 1e6, 3) for name in ("dense_layer", "dense_step")]
    assert waits == [0.004, 0.013]


@pytest.mark.site
def test_a_step_is_the_sum_of_its_causes():
    """Catches a stalled share that omits an axis."""
    expression = "asked.map((name) => it.parts(LAYER_DATA.cases[name].causes_us))"
    for (name, case), parts in zip(cases().items(), in_browser("layer.js", layer_timeline.write(MADE), expression,
                                                               [*cases()]), strict=True):  # fmt: skip
        assert parts["waiting"] + parts["matmuls"] + parts["other"] == pytest.approx(case["step_us"], rel=1e-6), name
        axes = {axis for cause, _ in parts["waits"] for axis in cause.split("*")}
        assert axes <= {one.split("=")[0] for one in case["switches"]["mesh"].split(",")}, name


@pytest.mark.site
def test_the_switches_reach_every_case():
    """Catches a switch that does nothing, or selects another model or a missing case."""
    data = layer_timeline.write(MADE)
    expression = """Object.entries(LAYER_DATA.cases).map(([name, made]) => [name, it.choose(LAYER_DATA, made.switches),
      LAYER_DATA.switches.flatMap((which) => it.options(LAYER_DATA, name, which).map((value) =>
        [which, value, it.choose(LAYER_DATA, {...made.switches, [which]: value}, which)]))])"""
    for name, same, moved in in_browser("layer.js", data, expression, None):
        assert name == same
        for which, value, to in moved:
            assert cases()[to]["switches"][which] == value, (name, which, value, to)


@pytest.mark.site
def test_the_file_is_small_and_has_every_case():
    """Catches a file that is too large to load quickly, and a case that was never compiled."""
    assert layer_timeline.FILE.stat().st_size < 150_000
    assert {name: case["switches"] for name, case in cases().items()} == {
        name: case.switches for name, case in layer_timeline.CASES.items()}  # fmt: skip
    assert all({"jax", "libtpu", "date"} == {*case["made"]} for case in cases().values())


def numbers(case: dict) -> dict:
    """Return a case without source lines and dates."""
    return {key: value for key, value in case.items() if key not in ("made", "layers")} | {
        way: layer | {"words": [words[:3] for words in layer["words"]]} for way, layer in case["layers"].items()
    }


@pytest.mark.tpu
def test_a_case_equals_the_current_compiler_output():
    """Catches a page that shows the schedule of an older model."""
    name, made = "dense_layer", cases()["dense_layer"]["made"]
    if layer_timeline.versions() != {one: made[one] for one in ("jax", "libtpu")}:
        pytest.skip(f"the file was created with {made}, but {layer_timeline.versions()} is installed")
    case = layer_timeline.CASES[name]
    found = json.loads(json.dumps(layer_timeline.export(case, layer_timeline.compiled_text(case))))
    wanted, found = numbers(cases()[name]), numbers(found)
    assert found["step_us"] == pytest.approx(wanted["step_us"], rel=1e-3), "python -m docs.layer_timeline --write"
    assert found == wanted, "python -m docs.layer_timeline --write"
