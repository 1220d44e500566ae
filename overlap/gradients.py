"""Reduce-scatter gradients of weights so that the communication overlaps with compute on v5e too.

libtpu runs a reduce-scatter asynchronously only on SparseCores (v5p, v6e and TPU7x). On other chips it replaces one
over a slice of more than 4 chips by an all-reduce. On v5e an all-to-all is faster: it sends half the bytes, and with an
option of `compile/options.py` it overlaps with the next matmuls. On v4:4x4x2 it saved only 1% of a step of moe1b.
"""

import functools
import math

import jax
import jax.numpy as jnp

from sharding import all_gather, all_to_all, as_tuple, axis_size

CHIPS = ("TPU v5 lite", "TPU v5e")  # the names that JAX has for it


def by_all_to_all(axes) -> bool:
    """Return True if libtpu would replace a reduce-scatter over these mesh axes by an all-reduce that stalls."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is None or mesh.abstract_device.device_kind not in CHIPS:
        return False
    return math.prod(mesh.shape[axis] for axis in as_tuple(axes)) == mesh.size > 4


def gather_for_layer(x, axes, *, dim):
    """All-gather a weight of one layer. The backward pass reduce-scatters its gradient.

    Sends: (n - 1)/n of the gathered array, in both passes; n = devices on the axes.
    """
    return gather_and_add_chunks(x, axes, dim) if by_all_to_all(axes) else all_gather(x, axes, dim=dim)


def reduce_scatter_by_all_to_all(partial, axes, *, dim):
    """Reduce-scatter: every device sends its chunks to their owners, which add up the n chunks they receive in float32.

    Shapes: [.., D, ..] -> [.., D/n, ..]. Sends: (n - 1)/n of the array, as `reduce_scatter` does.
    """
    n, shape = axis_size(axes), partial.shape
    received = all_to_all(partial, axes, split_dim=dim, join_dim=dim)
    chunks = received.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
    return jnp.sum(chunks, axis=dim, dtype=jnp.float32).astype(partial.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_and_add_chunks(x, axes, dim):
    """All-gather whose backward pass is `reduce_scatter_by_all_to_all`."""
    return all_gather(x, axes, dim=dim)


gather_and_add_chunks.defvjp(
    lambda x, axes, dim: (all_gather(x, axes, dim=dim), None),
    lambda axes, dim, _, d: (reduce_scatter_by_all_to_all(d, axes, dim=dim),),
)
