"""Tests of initialization: the same values on every mesh, drawn by each device alone, in little memory."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P

import model
import optimizer
import parameters
import sharding
from config import ModelConfig, preset
from plan.trace import compiled
from sharding import FSDP, SLICED, TENSOR, declare, param


@struct.dataclass
class Some:
    """Parameters sharded along no dim, one, two, and one by two axes; one is drawn in several, overlapping chunks."""

    w_XY: object = param("XY", fan_in="X", X=SLICED, Y=TENSOR)
    w_YXZ: object = param("YXZ", std=lambda c: 0.3, mean=2.0, X=(FSDP, TENSOR))
    w_Z: object = param("Z", std=lambda c: 1.5)
    w_UZ: object = param("UZ", std=lambda c: 0.7, U=TENSOR, Z=FSDP)
    ones_Y: object = param("Y", mean=1.0, Y=TENSOR)


SIZES = dict(X=24, Y=20, Z=6, U=16 * 1031)


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=2,tensor=4", "fsdp=3,context=2", "data=2,tensor=2,fsdp=2"])
def test_each_device_draws_its_shard_of_jax_random_normal(mesh):
    """Catches an entry that depends on the mesh, is drawn twice, or has the index of another device's entry."""
    declared = declare(Some, SIZES, ModelConfig())
    if "context" in mesh:
        declared = declared.replace(w_YXZ=None, w_UZ=None)
    made = parameters.init(declared, sharding.make_mesh(mesh), seed=11)
    for name, d in sharding.flatten_named(declared).items():
        key = jax.random.fold_in(jax.random.key(11), zlib.crc32(name.encode()))
        want = d.mean + d.std * np.asarray(jax.random.normal(key, d.shape)) if d.std else np.ones(d.shape)
        np.testing.assert_array_equal(np.asarray(sharding.flatten_named(made)[name]), np.float32(want), err_msg=name)


@pytest.mark.parametrize("shape", [(7, 64, 60_000, 70_000), (1, 1, 400_000, 80_000)])
def test_indices_beyond_32_bits(shape):
    """Catches experts of a large model with equal initial values, because their indices wrap around at 2^32."""
    mesh, local = sharding.make_mesh("fsdp=4,tensor=2"), (*shape[:2], shape[2] // 4, shape[3] // 2)
    d = sharding.Declaration("LEDM", shape, P(None, None, FSDP, TENSOR), 1.0, 0.0, jnp.float32, True, True, False)
    most = min(math.prod(local), 2**32) - 1
    numbers = [0, 1, local[3] - 1, local[3], local[2] * local[3] - 1, most // 3, most]

    def ask(numbers_n):
        places_n = parameters.global_indices(d, local, numbers_n)
        return [sharding.all_gather(x[None, None], (FSDP, TENSOR), dim=0) for x in places_n]

    found = jax.jit(jax.shard_map(ask, mesh=mesh, in_specs=P(), out_specs=P((FSDP, TENSOR)), check_vma=True))
    high, low = (np.asarray(x).reshape(-1, 8, len(numbers))[0] for x in found(np.uint32(numbers)))
    for device in range(8):
        for place, number in enumerate(numbers):
            i, j, k, m = map(int, np.unravel_index(number, local))
            k, m = k + device // 2 * local[2], m + device % 2 * local[3]
            wanted = ((i * shape[1] + j) * shape[2] + k) * shape[3] + m
            assert (int(high[device, place]) << 32) + int(low[device, place]) == wanted


def largest_slice_bytes(declared, mesh) -> int:
    share = lambda d: math.prod(mesh.shape[a] for a in parameters.split_axes(d))
    return max(d.size // share(d) * d.dtype.itemsize for d in jax.tree.leaves(declared))


def test_initialization_needs_little_extra_memory():
    """Catches a parameter that is unsharded on every device, where it may not fit."""
    mesh = sharding.make_mesh("fsdp=8")
    declared = model.declare(preset("dense_124m", **{"model.n_layers": 2}).model)
    made = parameters.initializer(declared, mesh).lower(jax.random.key(0)).compile().memory_analysis()
    assert made.temp_size_in_bytes < 2 * largest_slice_bytes(declared, mesh)


@pytest.mark.tpu
def test_a_large_model_can_be_initialized_on_its_chips():
    """Catches one that works only for small models: 46.7 billion parameters on 64 chips, by the TPU compiler."""
    cfg = preset("mixtral_8x7b", mesh="fsdp=32,tensor=2")
    mesh, declared = compiled.topology_mesh(cfg.mesh, "v4:4x4x4"), model.declare(cfg.model)
    largest = largest_slice_bytes(declared, mesh)
    made = parameters.initializer(declared, mesh).lower(jax.eval_shape(lambda: jax.random.key(0))).compile()
    assert made.memory_analysis().temp_size_in_bytes < 2 * largest
    moments = optimizer.compile_moments(cfg, mesh).lower(sharding.shapes(declared, mesh)).compile()
    assert moments.memory_analysis().temp_size_in_bytes < largest
