"""Parameters between steps: how they are stored, and their initial values, which are the same on every mesh."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sharding
from architectures import declare
from compile import ordered
from config import Config
from model import Transformer
from sharding import Declaration, as_tuple, axis_index, axis_size, check_divides, map_named, specs, vary


def as_stored(d: Declaration, cfg: Config) -> Declaration:
    """Declare a parameter as it is stored between steps: with `optim.shard_over_data`, sharded over its replicas too.

    Its moments and its update are sharded in the same way (ZeRO stage 1, arXiv:1910.02054). Norms and biases, which
    start at a constant (std 0), stay replicated: they are too small to be worth two collectives each.
    """
    wanted = cfg.optim.shard_over_data and cfg.mesh.data > 1 and d.std
    return sharding.shard_over_replicas(d, cfg.mesh.sizes) if wanted else d


def declare_stored(cfg: Config) -> Transformer:
    """Declare every parameter `as_stored`."""
    return jax.tree.map(lambda d: as_stored(d, cfg), declare(cfg.model))


def gather_replicas(params, cfg: Config):
    """All-gather the parameters that `declare_stored` shards over their replicas, once per step; no other changes.

    Sends over the replicas' axes: (n - 1)/n of each. Backward: a reduce-scatter of its gradient, the same bytes. The
    all-reduce that it replaces sends both.
    """

    def gather(d, stored, x):
        dims = [dim for dim, (here, there) in enumerate(zip(d.spec, stored.spec, strict=True)) if here != there]
        return sharding.all_gather(x, sharding.replicas(d), dim=dims[0]) if dims else x

    return jax.tree.map(gather, declare(cfg.model), declare_stored(cfg), params)


def init(declarations, mesh: Mesh, seed: int):
    """Initialize the parameters, sharded as declared, with the same values on every mesh.

    The random key of a parameter depends on its name, so adding a parameter does not change the others. A device
    generates its shards in chunks. In addition to the shards, this takes less memory than twice the largest shard.
    Raises: UserError if a parameter's dim is not divisible by its mesh axes.
    """
    return initializer(declarations, mesh)(jax.random.key(seed))


def initializer(declarations, mesh: Mesh):
    """Compile fn(key) -> parameters."""
    check_divides(declarations, mesh)

    def make(key):  # key is an argument because XLA would constant-fold small parameters, slowly
        folded = lambda name: jax.random.fold_in(key, zlib.crc32(name.encode()))
        return map_named(lambda name, d: draw_local_shard(folded(name), d), declarations)

    mapped = jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=specs(declarations))
    # Set the shardings explicitly: `shard_map` returns equivalent but different specs, and a step would recompile.
    return ordered.jit(mapped, mesh, out_shardings=jax.tree.map(lambda d: NamedSharding(mesh, d.spec), declarations))


def draw_local_shard(key, d: Declaration):
    """Generate this device's shard of mean + std * jax.random.normal(key, d.shape), bitwise identical."""
    shape = [size // axis_size(as_tuple(axes)) for size, axes in zip(d.shape, d.spec, strict=True)]
    if not d.std:
        return jnp.full(shape, d.mean, d.dtype)
    n = math.prod(shape)
    size = min(n, max(2**14, n // 64))  # entries per chunk

    def chunk(start):
        normal = normal_at(key, *global_indices(d, shape, start + jnp.arange(size, dtype=jnp.uint32)))
        normal = jax.lax.optimization_barrier(normal)  # with fusion, the last bit would depend on the mesh
        return (d.mean + d.std * normal).astype(d.dtype)

    def add(number, row_n):
        start = jnp.minimum(number * size, n - size)  # the last chunk may overlap the previous one, with equal values
        return jax.lax.dynamic_update_slice(row_n, chunk(start.astype(jnp.uint32)), (start,))

    if size == n:
        return chunk(jnp.uint32(0)).reshape(shape)
    row_n = vary(jnp.zeros(n, d.dtype), split_axes(d))
    return jax.lax.fori_loop(0, -(-n // size), add, row_n).reshape(shape)


def split_axes(d: Declaration) -> tuple[str, ...]:
    return tuple(axis for axes in d.spec for axis in as_tuple(axes))


def global_indices(d: Declaration, shape, local_n):
    """Convert flat uint32 indices into this device's shard to flat indices into the global array.

    Returns the upper and the lower 32 bits, because the stacked expert weights can have more than 2^32 entries.
    """
    high_n, low_n = (vary(jnp.zeros(local_n.shape, jnp.uint32), split_axes(d)) for _ in range(2))

    def plus(high_n, low_n, x_n, stride: int):  # (high, low) + x * stride, with 16-bit halves so products fit 32 bits
        (x1, x0), (s1, s0) = (x_n >> 16, x_n & 0xFFFF), (np.uint32(stride >> 16 & 0xFFFF), np.uint32(stride & 0xFFFF))
        middle = x1 * s0 + (x0 * s0 >> 16)
        upper = x1 * s1 + (middle >> 16) + (x0 * s1 + (middle & 0xFFFF) >> 16) + x_n * np.uint32(stride >> 32)
        total = low_n + x_n * np.uint32(stride & 0xFFFFFFFF)
        return (high_n + upper + (total < low_n) if d.size > 2**32 else high_n), total

    stride = inner = outer = 1
    for mine, whole, axes in reversed([*zip(shape, d.shape, d.spec, strict=True)]):
        inner, outer = inner * mine, outer * whole  # sizes of this dim and the unsharded dims after it
        if axes:
            here = axis_index(axes).astype(jnp.uint32) * np.uint32(inner)
            high_n, low_n = plus(high_n, low_n, here + local_n % np.uint32(inner), stride)
            local_n, stride, inner, outer = local_n // np.uint32(inner), stride * outer, 1, 1
    return plus(high_n, low_n, local_n, stride)


def normal_at(key, high_n, low_n):
    """Return the float32 entries of jax.random.normal(key, ..) at flat indices, given as upper and lower 32 bits.

    The random bits depend only on the key and the index (`jax_threefry_partitionable`)."""
    first, second = threefry2x32_p.bind(
        *vary(jax.random.key_data(key), tuple(jax.typeof(low_n).mat.varying)), high_n, low_n
    )
    below_1 = jax.lax.bitcast_convert_type((first ^ second) >> 9 | np.uint32(0x3F800000), jnp.float32) - 1
    least = np.nextafter(np.float32(-1), np.float32(0))
    uniform = jnp.maximum(least, below_1 * (1 - least) + least)
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)
