"""All-gather and reduce-scatter along one mesh axis as rings of collective-permutes, which overlap with matmuls.

A collective-permute (`ppermute`) sends one array to another device. n is the number of devices along the axis.
"""

import functools

import jax
import jax.numpy as jnp

from sharding import axis_index, axis_size, layers_in_branch, shift, vary


@jax.named_scope("ring_all_gather")
def ring_all_gather(x, axis) -> list:
    """All-gather x in a ring: on device i, entry k of the result is the x of device (i + k) mod n.

    Half of the entries arrive from each side, one at a time, so the matmuls on one chunk overlap with the transfer of
    the next.
    Sends: x, n - 1 times, as all_gather does, half of it in each link direction. Backward: the ring reduce-scatter.
    """
    n = axis_size(axis)
    chunks = [vary(x, axis)] * n
    for k in range(1, n // 2 + 1):
        chunks[-k] = shift(chunks[1 - k], axis, in_branch=layers_in_branch())
    for k in range(1, (n - 1) // 2 + 1):
        chunks[k] = shift(chunks[k - 1], axis, by=-1, in_branch=layers_in_branch())
    return chunks


def ring_reduce_scatter(partials: list, axis):
    """Reduce-scatter in a ring: return this device's shard of the sum over the axis.

    partials  on device i, entry k is its term of the sum for device (i + k) mod n. That sum starts at the farthest
              device, and each device on the way adds its entry. Matmuls for the next entry overlap with transfers
    Sends: one entry, n - 1 times, as reduce_scatter does, half in each link direction. Backward: ring all-gather.
    """
    n = axis_size(axis)
    total = (
        jax.lax.optimization_barrier(partials[0]) if n > 1 else partials[0]
    )  # without the barrier, XLA fuses the matmul of this entry with the sum, and it waits for the transfer
    for far, by in ((n // 2, 1), ((n - 1) // 2, -1)):
        travelling = None
        for k in range(far, 0, -1):
            here = partials[k * by]
            travelling = shift(
                here if travelling is None else travelling + here, axis, by, in_branch=layers_in_branch()
            )
        total = total if travelling is None else total + travelling
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def concatenate_in_order(chunks: list, axis, dim):
    """Concatenate the chunks of a ring all-gather in device order, as `all_gather` does. No communication."""
    size, here = chunks[0].shape[dim], axis_index(axis)
    shape = [n * len(chunks) if i == dim else n for i, n in enumerate(chunks[0].shape)]
    x = vary(jnp.zeros(shape, chunks[0].dtype), tuple(jax.typeof(chunks[0]).mat.varying))
    for k, chunk in enumerate(chunks):
        place = (here + k) % len(chunks)
        x = jax.lax.dynamic_update_slice_in_dim(x, chunk, place * size, axis=dim)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def split_by_device(x, axis, dim) -> list:
    """Split an array into chunks: on device i, entry k is for device (i + k) mod n. No communication."""
    n, here = axis_size(axis), axis_index(axis)
    size = x.shape[dim] // n
    return [jax.lax.dynamic_slice_in_dim(x, (here + k) % n * size, size, axis=dim) for k in range(n)]


# Each is the other's backward pass. Autodiff would instead add up n arrays that are zero except for one slice.
concatenate_in_order.defvjp(
    lambda chunks, axis, dim: (concatenate_in_order(chunks, axis, dim), None),
    lambda axis, dim, _, d: (split_by_device(d, axis, dim),),
)
split_by_device.defvjp(
    lambda x, axis, dim: (split_by_device(x, axis, dim), None),
    lambda axis, dim, _, d: (concatenate_in_order(d, axis, dim),),
)
