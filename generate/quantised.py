"""Quantization to int8 with float32 scales: one per output channel for weights, one per position for a cache.

Each decode step reads all weights and the whole cache, so fewer bytes take less time. A value is an int8 number times a
scale. The scale is the largest magnitude in the group / 127, so no value is off by more than half a scale. Shards
of weights are gathered as int8, and a layer converts them to the compute dtype for each use.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from architectures import declare
from compile import ordered
from config import ModelConfig
from parameters import split_axes
from sharding import CONTEXT, FSDP, Declaration, all_gather, as_tuple, axis_size, map_fsdp_sharded, vary


@struct.dataclass
class Quantized:
    """An int8 array and its scales, which have the same dims, of size 1 where values share a scale."""

    values: jax.Array
    scale: jax.Array

    @property
    def ndim(self) -> int:
        return self.values.ndim


def scale_of(x, dims, axes=()):
    """Return the scale shared by the values along some dims, and by the devices along some mesh axes."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=dims, keepdims=True)
    largest = jax.lax.pmax(largest, axes) if axes else largest
    return jnp.where(largest == 0, 1.0, largest / 127)


def round_to_int8(x, scale):
    return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8)


# Weights --------------------------------------------------------------------------------------------------------------


def is_matrix(d: Declaration) -> bool:
    """Return whether a parameter is quantized: those used in the compute dtype, not norms, biases or routers."""
    return FSDP in split_axes(d) and not d.exact


def shared_dims(d: Declaration) -> list[int]:
    """Return the dims that share a scale: those a matmul contracts; for the embedding table, the width of a token."""
    return [i for i, letter in enumerate(d.dims) if letter in (d.fan_in or d.dims[-1])]


def specs(c: ModelConfig, params):
    """Return the PartitionSpecs of parameters with or without `quantize`. Scales are not sharded over FSDP."""

    def one(d, w):
        if not isinstance(w, Quantized):
            return d.spec
        whole = lambda dim, axes: dim in shared_dims(d) or FSDP in as_tuple(axes)
        return Quantized(d.spec, P(*(None if whole(dim, axes) else axes for dim, axes in enumerate(d.spec))))

    return jax.tree.map(one, declare(c), params)


def quantize(params, c: ModelConfig, mesh: Mesh):
    """Quantize the matrices of parameters to int8; `cached_forward` accepts the result.

    Sends over FSDP, EXPERT, CONTEXT and TENSOR: only scales.
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
        return Quantized(values, scale)

    declarations = declare(c)
    shapes = jax.tree.map(lambda d: Quantized(d, d) if is_matrix(d) else d, declarations)
    out = specs(c, shapes)
    local = jax.shard_map(lambda w: jax.tree.map(one, declarations, w), mesh=mesh,
                          in_specs=(specs(c, params),), out_specs=out)  # fmt: skip
    return ordered.jit(local, mesh, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out))(params)


def gather_over_context(w):
    """All-gather the weights over CONTEXT, in the format they have.

    Generation does this once, when it loads the weights: decoding uses each weight once per token, so an all-gather at
    each use would take many times longer than the token. Sends over CONTEXT: (n - 1)/n of each matrix.
    """

    def join(x, dim, axes, exact):
        whole = lambda x: all_gather(x, CONTEXT, dim=dim, to="invarying")
        return x.replace(values=whole(x.values)) if isinstance(x, Quantized) else whole(x)

    return w if axis_size(CONTEXT) == 1 else map_fsdp_sharded(join, w)


def gather_weights(w, c: ModelConfig, *names):
    """Gather weights, some of which may be int8, for use in the compute dtype; they are unsharded over CONTEXT already.
    Sends over FSDP and EXPERT: (n - 1)/n of each matrix that is sharded over n devices, at one byte per parameter for
    int8."""

    def join(x, dim, axes, exact):
        axes = tuple(axis for axis in axes if axis != CONTEXT)
        # With one shard there is nothing to gather, but XLA's CPU backend would copy every weight for each token.
        whole = lambda x: vary(x if axis_size(axes) == 1 else all_gather(x, axes, dim=dim), CONTEXT)
        if isinstance(x, Quantized):
            return (whole(x.values) * x.scale).astype(c.compute_dtype)
        return whole(x if exact else x.astype(c.compute_dtype))

    return map_fsdp_sharded(join, w, *names)


# Cache ----------------------------------------------------------------------------------------------------------------


def quantize_like(x, like):
    """Convert values to the format of a cache array. For int8, the values along the last dim share a scale."""
    if not isinstance(like, Quantized):
        return x.astype(like.dtype)
    scale = scale_of(x, -1)
    return Quantized(round_to_int8(x, scale), scale)


def dequantize(x, dtype):
    """Convert back from `quantize_like`, up to rounding."""
    return (x.values * x.scale if isinstance(x, Quantized) else x).astype(dtype)
