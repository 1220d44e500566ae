"""Gradients that all-to-alls reduce-scatter: the same sums and bytes, on the chips and meshes that need it."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import sharding
from compile import options
from overlap import gradients
from plan.chips import hardware, hiding
from sharding import AXES, SLICED
from tests import parity, test_parity
from tests.test_rings import X, Y, on_each, sent, whole_numbers

WHOLE = {"fsdp": 4, "expert": 2, "context": 2}  # a slice of 16 chips


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,expert=2,context=2", "data=2,fsdp=3"])
def test_an_all_to_all_reduce_scatters(mesh):
    """Catches chunks of another device or along another dim, a sum that misses a device, and a collective that sends
    more than (n - 1)/n of the array."""
    size = sharding.make_mesh(mesh).size
    n = size // sharding.make_mesh(mesh).shape["data"]
    for dim, shape in enumerate(((n * X, Y), (X, n * Y))):
        ours = lambda x, dim=dim: gradients.reduce_scatter_by_all_to_all(x, SLICED, dim=dim)
        theirs = lambda x, dim=dim: sharding.reduce_scatter(x, SLICED, dim=dim)
        partial = whole_numbers(size, *shape)
        np.testing.assert_array_equal(*(on_each(function, mesh)(partial) for function in (ours, theirs)))
        assert sent(ours, mesh, shape)[0] == [("all-to-all", 4 * X * Y * (n - 1))]


def test_sums_are_float32():
    """Catches chunks that are added in bfloat16, in which 256 + 1 is 256."""
    partial = np.ones((8, 8, 1), np.float32)
    partial[0] = 256
    total = on_each(lambda x: gradients.reduce_scatter_by_all_to_all(x.astype("bfloat16"), SLICED, dim=0), "fsdp=8")
    assert np.asarray(total(partial), np.float32).ravel().tolist() == [264.0] * 8  # 263, rounded to 8 bits


def test_gradients_by_all_to_all_equal_those_of_one_device(monkeypatch):
    """Catches gradients of another shard, in a step that TPU v4 and v5e run, but simulated devices do not."""
    used = []
    monkeypatch.setattr(gradients, "by_all_to_all", lambda axes: used.append(axes) or True)
    parity.compiled.cache_clear()
    cfg = test_parity.config("fsdp=2,expert=2,context=2 moe gather=layer")
    comparison = parity.compare(cfg)
    parity.compiled.cache_clear()
    assert used and comparison.worst().ok, comparison.worst()


@pytest.mark.parametrize("kind, axes, chosen", [
    ("TPU v4", SLICED, False), ("TPU v5 lite", SLICED, True), ("TPU v5", SLICED, False), ("TPU v6 lite", SLICED, False),
    ("TPU v5 lite", ("fsdp", "expert"), False),
])  # fmt: skip
def test_which_chips_use_all_to_alls(kind, axes, chosen):
    """Catches all-to-alls where SparseCores reduce-scatter or over a part of the slice, a compiler that is not told to
    overlap them, and a planner that disagrees."""
    chip = next(chip.key for chip in hardware.CHIPS.values() if chip.device_kind == kind)
    device = AbstractDevice(kind, None, "tpu")
    for data in (1, 2):
        sizes = dict.fromkeys(AXES, 1) | WHOLE | {"data": data}
        mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Manual,) * len(AXES),
                            abstract_device=device)  # fmt: skip
        with jax.sharding.use_abstract_mesh(mesh):
            found = gradients.by_all_to_all(axes)
        assert found == (chosen and data == 1)
        assert found == (hiding.compiled_kind("reduce-scatter", axes, sizes, "tpu", chip) == "all-to-all")
        assert not found or options.BY_KIND[kind]["xla_tpu_enable_async_all_to_all"] == "true"
