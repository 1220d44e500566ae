"""`all_gather` and `reduce_scatter` along one mesh axis as rings of permutes, so that matmuls run meanwhile."""

import functools

import jax
import jax.numpy as jnp

from sharding import axis_index, axis_size, branches, shift, vary


def around(x, axis) -> list:
    """What `all_gather` brings, as it comes: entry k is the x of the device k places on along an axis, entry 0 our own.

    Half of them come from either side, by permutes. What is done with an entry waits for no later one, so products of
    one run while the next is on its way.
    Sends: the array, n - 1 times, as all_gather; half of it over each direction of a link. Backward: `back`.
    """
    n = axis_size(axis)
    found = [vary(x, axis)] * n
    for k in range(1, n // 2 + 1):
        found[-k] = shift(found[1 - k], axis, in_branch=branches())
    for k in range(1, (n - 1) // 2 + 1):
        found[k] = shift(found[k - 1], axis, by=-1, in_branch=branches())
    return found


def back(partials: list, axis):
    """What `reduce_scatter` leaves here: the sum over an axis of what each device made for this one.

    partials  entry k is for the device k places on. A sum sets out from the farthest device, and each on its way adds
              its own: products for the next one run while it travels
    Sends: an entry, n - 1 times, as reduce_scatter; half of it over each direction of a link. Backward: `around`.
    """
    n = axis_size(axis)
    total = (
        jax.lax.optimization_barrier(partials[0]) if n > 1 else partials[0]
    )  # fused with the sum, it would wait for it
    for far, by in ((n // 2, 1), ((n - 1) // 2, -1)):
        travelling = None
        for k in range(far, 0, -1):
            here = partials[k * by]
            travelling = shift(here if travelling is None else travelling + here, axis, by, in_branch=branches())
        total = total if travelling is None else total + travelling
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def joined(parts: list, axis, dim):
    """Put what `around` brought into the order of the devices: `all_gather`'s result. Sends nothing."""
    size, here = parts[0].shape[dim], axis_index(axis)
    shape = [n * len(parts) if i == dim else n for i, n in enumerate(parts[0].shape)]
    whole = vary(jnp.zeros(shape, parts[0].dtype), tuple(jax.typeof(parts[0]).mat.varying))
    for k, part in enumerate(parts):
        place = (here + k) % len(parts)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, place * size, axis=dim)
    return whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def parted(whole, axis, dim) -> list:
    """The inverse of `joined`: entry k is the slice of the device k places on. Sends nothing."""
    n, here = axis_size(axis), axis_index(axis)
    size = whole.shape[dim] // n
    return [jax.lax.dynamic_slice_in_dim(whole, (here + k) % n * size, size, axis=dim) for k in range(n)]


# Each is the other's way back. Autodiff would add n arrays that are zero but for one slice.
joined.defvjp(
    lambda parts, axis, dim: (joined(parts, axis, dim), None), lambda axis, dim, _, d: (parted(d, axis, dim),)
)
parted.defvjp(
    lambda whole, axis, dim: (parted(whole, axis, dim), None), lambda axis, dim, _, d: (joined(d, axis, dim),)
)
