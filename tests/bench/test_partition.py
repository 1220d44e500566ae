"""Claims about twelve ways to write one partitioned program, and about what the compiler makes of them."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import model
import optimizer
import sharding
from bench import explicit, partition
from bench.partition import PARTITIONINGS, SMALL, WAYS
from config import preset
from plan.chips import hardware
from plan.trace import compiled
from tests.helpers import assert_gradients_close
from utils import UserError

DATA, MODEL = 2, 4


@pytest.fixture(scope="module")
def measured() -> dict[tuple, dict]:
    """The numbers of all programs on eight simulated devices, by (parameters, activations, way)."""
    devices = jax.devices()[:8]
    return {(*dims, name): partition.measure(way, *dims, SMALL, devices, None, DATA, MODEL)
            for dims in PARTITIONINGS for name, way in WAYS.items()}  # fmt: skip


def test_all_twelve_programs_equal_one_device(measured):
    """Catches a partitioning that changes the loss or a gradient, in whichever way it is written."""
    assert len(measured) == 12
    worst = max((row["worst_error"], row["worst"], key) for key, row in measured.items())
    assert worst[0] < 1e-5, worst


def hand_written_bytes(params: int, activations: int) -> int:
    """Compute what a device sends, from section 2.2's collectives: in float32, on rings."""
    layers, tokens = SMALL.layers, SMALL.batch * SMALL.seq_len // DATA
    activation = 4 * tokens * SMALL.width  # of one data group
    weights = 4 * 2 * SMALL.width * SMALL.hidden // MODEL  # of a layer, gathered over `data`
    share = lambda n: (n - 1) / n
    # Each layer runs forward twice (recomputation), and sums partial activations there and, backward, their gradients.
    # With 1D activations the recomputed sum is not needed, because only the next layer would read it.
    sums = 2 * 2 * activation * share(MODEL)  # two all-reduces
    gathers = 3 * activation * share(MODEL) + 2 * activation * share(
        MODEL
    )  # 2D: three all-gathers, two reduce-scatters
    over_model = layers * (sums if activations == 1 else gathers)
    over_data = layers * weights * share(DATA) * (2 if params == 1 else 3)  # all-reduce, or two gathers and a scatter
    return round(over_model + over_data)


@pytest.mark.parametrize("params, activations", PARTITIONINGS)
def test_the_hand_written_program_sends_what_the_formula_says(measured, params, activations):
    """Catches a collective too many in the hand-written program; the loss itself takes a few bytes more."""
    sent = measured[params, activations, "shard_map"]["wire_bytes"]
    assert 0 <= sent - hand_written_bytes(params, activations) <= 8


@pytest.mark.parametrize("params, activations", PARTITIONINGS)
def test_the_compiler_never_sends_less_on_simulated_devices(measured, params, activations):
    """Catches a page that says the CPU compiler equals hand-written collectives where it sends more, or the reverse."""
    hand = measured[params, activations, "shard_map"]["wire_bytes"]
    for way in ("explicit", "constraints"):
        sent = measured[params, activations, way]["wire_bytes"]
        assert sent == hand if (params, activations) == (1, 1) else 1.1 * hand < sent < 1.5 * hand, (way, sent, hand)


def test_a_slice_of_another_size_is_refused(capsys):
    """Catches a traceback from the mesh for a slice whose chips are not 16."""
    assert partition.main(["--topology", "v5e:4x8"]) == 2
    assert "the mesh is data=4,model=4, and needs 16 chips; this slice has 32" in capsys.readouterr().err


# The whole training step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mesh", [pytest.param("data=2,fsdp=2,tensor=2"), pytest.param("fsdp=2,tensor=2", marks=pytest.mark.repeat)]
)
def test_the_step_with_explicit_sharding_equals_one_device(mesh):
    """Catches a difference from `model.py`, or a sharding that changes the loss or any parameter's gradient."""
    worst = partition.step_error("explicit", partition.step_config(mesh, None))
    assert worst[0] < 1e-5, worst


def test_the_step_with_explicit_sharding_updates_like_ours():
    """Catches another optimizer, or moments that are sharded differently and so are replaced by zeros."""
    cfg = partition.step_config("fsdp=4", None)
    ours, theirs = (partition.step_mesh(way, cfg, None) for way in ("shard_map", "explicit"))
    state, batch = optimizer.init(cfg, ours), partition.draw_batch(cfg)
    place = lambda tree, shapes: jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s.sharding), tree, shapes)
    placed = tuple(map(place, (state, batch), explicit.shapes(cfg, theirs)))
    with jax.set_mesh(theirs):
        found, _ = explicit.train_step(cfg, theirs)(*placed)
    wanted, _ = optimizer.train_step(cfg, ours)(state, sharding.put(batch, ours))
    moments = lambda state: sharding.flatten_named(state.optimizer[1].mu)
    assert_gradients_close(*(jax.tree.map(np.asarray, moments(one)) for one in (found, wanted)), 1e-5, "first moment")
    step = lambda one: np.concatenate([np.ravel(x) for x in jax.tree.leaves(one.params)])
    np.testing.assert_allclose(step(found), step(wanted), atol=1e-6)


@pytest.mark.parametrize("settings, said", [
    ({"mesh": "context=2"}, "mesh context=2: the program with explicit sharding has the axes data, fsdp and tensor"),
    ({"model.tie_embeddings": False}, "is a dense model like dense_124m"),
])  # fmt: skip
def test_another_step_is_refused(settings, said):
    """Catches a comparison of two different models, and a mesh axis that the program would ignore."""
    with pytest.raises(UserError, match=said):
        explicit.check(preset("dense_124m", **settings))


def test_a_mesh_without_step_is_refused(capsys):
    """Catches a mesh that the twelve programs ignore."""
    assert partition.main(["--mesh", "fsdp=16"]) == 2
    assert "--mesh fsdp=16 applies only to the training step; add --step" in capsys.readouterr().err


# The table of chapter 15 ----------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "chapters/15_left_to_the_compiler.py"
ROW = re.compile(r"# \| (\d)D \| (\d)D \| (\w+) \| ([\d.]+) GB \| ([\d.]+) GB \| ([\d.]+) GiB \| (\d+) ms \|")
ROWS = [(int(p), int(a), way, *map(float, numbers)) for p, a, way, *numbers in ROW.findall(PAGE.read_text("utf-8"))]
QUICK = (1, 2, "explicit")


def test_the_page_has_twelve_rows():
    """Catches a row that the pattern no longer finds, so that the next test checks fewer."""
    assert [row[:3] for row in ROWS] == [(*dims, way) for dims in PARTITIONINGS for way in WAYS]


@pytest.mark.tpu
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=" ".join(map(str, row[:3])), marks=() if row[:3] == QUICK else pytest.mark.repeat)
            for row in ROWS])  # fmt: skip
def test_the_tpu_compiler_makes_what_the_page_shows(row):
    """Catches bytes, memory or simulated seconds that another version of the compiler, or of our programs, changes."""
    params, activations, way, *shown = row
    topology = hardware.Topology.parse("v5e:4x4")
    devices = compiled.topology_devices(topology)
    found = partition.measure(WAYS[way], params, activations, partition.LARGE, devices, topology, 4, 4)
    sent, exposed = found["wire_bytes"] / 1e9, found["exposed_bytes"] / 1e9
    assert [sent, exposed, found["peak_bytes"] / 2**30, 1e3 * found["step_s"]] == pytest.approx(shown, rel=0.01)


# | written with | all-reduce | all-gather | all-to-all | exposed | peak memory | simulated step |
STEP_ROW = re.compile(r"# \| (\w+) " + 4 * r"\| ([\d.]+) GB " + r"\| ([\d.]+) GiB \| (\d+) ms \|")
STEP_ROWS = {way: [*map(float, numbers)] for way, *numbers in STEP_ROW.findall(PAGE.read_text("utf-8"))}


def test_the_page_has_both_steps():
    """Catches a row that the pattern no longer finds."""
    assert tuple(STEP_ROWS) == partition.STEPS


@pytest.mark.tpu
@pytest.mark.repeat
@pytest.mark.parametrize("way", partition.STEPS)
def test_the_tpu_compiler_makes_of_the_step_what_the_page_shows(way):
    """Catches bytes, memory or simulated seconds of a training step that another version changes."""
    topology = hardware.Topology.parse("v5e:4x4")
    found = partition.measure_step(way, partition.step_config("fsdp=16", topology), topology)
    assert set(found["sent"]) <= {"all-reduce", "all-gather", "all-to-all"}
    sizes = *(found["sent"].get(kind, 0) for kind in ("all-reduce", "all-gather", "all-to-all")), found["exposed_bytes"]
    shown = [*(size / 1e9 for size in sizes), found["peak_bytes"] / 2**30, 1e3 * found["step_s"]]
    assert shown == pytest.approx(STEP_ROWS[way], rel=0.01, abs=0.005)


@pytest.mark.tpu
@pytest.mark.repeat
def test_a_gain_with_an_unsharded_type_costs_what_the_page_says(monkeypatch):
    """Catches another size of the page's mistake: a norm whose gain is broadcast to the shape of the activations."""
    monkeypatch.setattr(explicit, "norm", lambda x, gain, c: model.norm(x, gain, c.norm_eps))
    topology = hardware.Topology.parse("v5e:4x4")
    found = partition.measure_step("explicit", partition.step_config("fsdp=16", topology), topology)
    sent, step = re.search(r"explicit program sent ([\d.]+) GB and took\n# (\d+) ms", PAGE.read_text("utf-8")).groups()
    shown = [found["wire_bytes"] / 1e9, 1e3 * found["step_s"]]
    assert shown == pytest.approx([float(sent), float(step)], rel=0.01)
