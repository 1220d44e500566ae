"""Numbers in int8, with a float32 scale for those that share one: weights by output channel, a cache by position.

Decoding reads every weight and every cached number for each token, so bytes are time. A number is its int8 times its
scale, the largest of those that share it over 127: no number is off by more than half a scale. Slices of weights are
joined as int8; what comes of them, a layer's weights for one use, is in the compute dtype.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import model
from config import ModelConfig
from parameters import split_axes
from sharding import FSDP, Declaration, all_gather, as_tuple, axis_size, map_sliced
from xla import ordered


@struct.dataclass
class Quantised:
    """An array of int8, and the scales of its numbers: as many dims, of size 1 where numbers share one."""

    values: jax.Array
    scale: jax.Array

    @property
    def ndim(self) -> int:
        return self.values.ndim


def scale_of(x, dims, axes=()):
    """The scale that numbers along some dims share, also those of other devices along mesh axes."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=dims, keepdims=True)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    return jnp.where(largest == 0, 1.0, largest / 127)


def round_to_int8(x, scale):
    return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)


# Weights --------------------------------------------------------------------------------------------------------------


def is_matrix(d: Declaration) -> bool:
    """True of what becomes int8: all that is used in the compute dtype. Norms, biases and routers stay."""
    return FSDP in split_axes(d) and not d.exact


def shared_dims(d: Declaration) -> list[int]:
    """The dims whose numbers share a scale: those that a product sums over; of a table of words, a word's."""
    return [i for i, letter in enumerate(d.dims) if letter in (d.fan_in or d.dims[-1])]


def specs(c: ModelConfig, params):
    """How parameters lie on the mesh, some of them `quantize`d: int8 as declared, scales not in slices."""

    def one(d, w):
        if not isinstance(w, Quantised):
            return d.spec
        whole = lambda dim, axes: dim in shared_dims(d) or FSDP in as_tuple(axes)
        return Quantised(d.spec, P(*(None if whole(dim, axes) else axes for dim, axes in enumerate(d.spec))))

    return jax.tree.map(one, model.declare(c), params)


def quantize(params, c: ModelConfig, mesh: Mesh):
    """Parameters with matrices in int8, which `cached_forward` takes like any others.

    Sends over FSDP, EXPERT, CONTEXT and TENSOR: scales.
    """

    def one(d: Declaration, w):
        if not is_matrix(d):
            return w
        dims = shared_dims(d)
        scale = scale_of(w, tuple(dims), tuple(axis for dim in dims for axis in as_tuple(d.spec[dim])))
        values = round_to_int8(w, scale)
        for dim, axes in enumerate(d.spec):
            if dim not in dims and FSDP in as_tuple(axes):
                scale = all_gather(scale, axes, dim=dim, to="invarying")
        return Quantised(values, scale)

    declarations = model.declare(c)
    shapes = jax.tree.map(lambda d: Quantised(d, d) if is_matrix(d) else d, declarations)
    out = specs(c, shapes)
    local = jax.shard_map(lambda w: jax.tree.map(one, declarations, w), mesh=mesh,
                          in_specs=(specs(c, params),), out_specs=out)  # fmt: skip
    return ordered.jit(local, mesh, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out))(params)


def gather_weights(w, c: ModelConfig, *names):
    """`overlap.weights.gathered` for weights of which some are int8. Sends: (n - 1)/n of every matrix, one byte
    a parameter where it is int8."""

    def join(x, dim, axes, exact):
        # With one shard there is nothing to gather, but XLA's CPU backend would copy every weight for each token.
        whole = lambda x: x if axis_size(axes) == 1 else all_gather(x, axes, dim=dim)
        if isinstance(x, Quantised):
            return (whole(x.values) * x.scale).astype(c.compute_dtype)
        return whole(x if exact else x.astype(c.compute_dtype))

    return map_sliced(join, w, *names)


# A cache --------------------------------------------------------------------------------------------------------------


def quantize_like(x, like):
    """Numbers in the format of a cache array; in int8, the numbers of the last dim share a scale."""
    if not isinstance(like, Quantised):
        return x.astype(like.dtype)
    scale = scale_of(x, -1)
    return Quantised(round_to_int8(x, scale), scale)


def dequantize(x, dtype):
    """The inverse of `quantize_like`, up to rounding."""
    return (x.values * x.scale if isinstance(x, Quantised) else x).astype(dtype)
