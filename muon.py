"""Muon on any mesh: the momentum of each matrix, orthogonalized by a Newton-Schulz iteration.

Newton-Schulz needs a whole matrix, and a mesh shards matrices. An iteration on each shard runs without an error and
gives another update (`chapters/03_fsdp.py` shows this bug). Here one `shard_map` unshards the matrices, in one of two
layouts (`work.muon_layout`); both give the update of one device:

    gather  all devices that share a matrix all-gather it, compute the same update, and keep their shards of it
    owner   matrices are dealt over these devices: an all-to-all sends each matrix to its owner, and another one sends
            the shards of the update back

The owners are the devices that shard a matrix. Matrices of equal shape and sharding, such as those of all feed-forward
layers, form one stack. Every device runs the same program, so a stack of N matrices is padded to a multiple of the n
owners: with N < n, some devices have no matrix.

The program is a `shard_map` rather than sharding constraints, because `compile.ordered` can order only collectives that
it sees, and because XLA sends more for them: 43,008 instead of 5,376 bytes for eight 24 x 32 float32 matrices over
eight devices, as it replaces an all-to-all over several axes by all-gathers of everything.
Sources: Muon, kellerjordan.github.io/posts/muon; Moonlight, arXiv:2502.16982, sections 2.2 (scale) and 2.3.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import sharding
from config.fields import Muon
from sharding import TENSOR, Declaration, all_gather, all_to_all, as_tuple, axis_size, own_slice, rows_and_columns

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, (x x^T) x and (x x^T)^2 x: those with which Muon was published
EPSILON = 1e-8  # added to the Frobenius norm, so that a matrix of zeros stays one


class MuonState(NamedTuple):
    count: Any  # int32, number of updates so far
    mu: Any  # the momentum of each parameter


def updates_by_muon(d: Declaration) -> bool:
    """Whether Muon updates a parameter: the matrices of layers, without the router's. AdamW updates the others."""
    return bool(d.fan_in and sharding.stacked_dims(d)) and not d.exact


def matrix_size(d: Declaration) -> tuple[int, int]:
    """Return the rows and columns of one matrix of a parameter, unsharded."""
    return tuple(math.prod(d.shape[dim] for dim in dims) for dims in rows_and_columns(d))


class Stack(NamedTuple):
    """What the matrices of several parameters have in common, so that they can be stacked: their shape and sharding,
    up to a transposition, of which Newton-Schulz gives the transposed result."""

    sides: tuple  # rows and columns, sorted: for each dim its unsharded size and the axes that shard it
    layers_over: tuple[str, ...]  # the axes that shard the dims that count layers and experts; equal too in a stack

    @property
    def dims(self) -> list[tuple[int, tuple[str, ...]]]:
        return [*self.sides[0], *self.sides[1]]

    @property
    def shape(self) -> tuple[int, int]:
        """Of one unsharded matrix."""
        return tuple(math.prod(size for size, _ in side) for side in self.sides)

    @property
    def owner_axes(self) -> tuple[str, ...]:
        """The axes whose devices share each matrix."""
        return tuple(axis for _, axes in self.dims for axis in axes)

    @property
    def gather_order(self) -> list[tuple[tuple[str, ...], int]]:
        """The (axes, dim) of each all-gather that unshards a matrix. The last one sends most bytes, so TENSOR, the
        fastest axis, is last."""
        return sorted(((axes, dim) for dim, (_, axes) in enumerate(self.dims) if axes), key=lambda x: TENSOR in x[0])


def sides_of(d: Declaration) -> list[tuple]:
    return [tuple((d.shape[dim], as_tuple(d.spec[dim])) for dim in dims) for dims in rows_and_columns(d)]


def stack_of(d: Declaration) -> Stack:
    counts = d.spec[: rows_and_columns(d)[0][0]]
    return Stack(tuple(sorted(sides_of(d))), tuple(sorted(axis for axes in counts for axis in as_tuple(axes))))


def to_matrices(d: Declaration, x):
    """Return the local shards of a parameter's matrices [N, ..], transposed if `stack_of` transposes them."""
    rows, columns = rows_and_columns(d)
    x = x.reshape(-1, *(x.shape[dim] for dim in rows + columns))
    return swap(x, len(rows)) if sides_of(d) != sorted(sides_of(d)) else x


def from_matrices(d: Declaration, matrices, shape: tuple[int, ...]):
    """Invert `to_matrices`; `shape` is that of the local shard."""
    _, columns = rows_and_columns(d)
    return (swap(matrices, len(columns)) if sides_of(d) != sorted(sides_of(d)) else matrices).reshape(shape)


def swap(x, first: int):
    """Transpose matrices [N, ..] of which the `first` dims after N are one side."""
    return x.transpose(0, *range(1 + first, x.ndim), *range(1, 1 + first))


def newton_schulz(x_RC, steps: int):
    """Move the singular values of a matrix close to 1, and keep its singular vectors.

    The iteration runs on the smaller side: m = min(R, C), n = max(R, C) cost `steps` * (4 m^2 n + 2 m^3) FLOPs.
    """
    R, C = x_RC.shape
    norm = jnp.linalg.norm(x_RC.astype(jnp.float32))
    x = (x_RC / (norm + EPSILON)).astype(x_RC.dtype)
    x = x.T if R > C else x
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if R > C else x


# Layouts: fn(stack, the local shards of its matrices [N, ..], update of a matrix) -> shards of the updates ------------


def gather(stack: Stack, x, update: Callable):
    """All-gather one matrix after the other. Sends (n - 1)/n of each matrix, n = owners."""

    def of_matrix(shard):
        for axes, dim in stack.gather_order:
            shard = all_gather(shard, axes, dim=dim)
        shard = update(shard)
        for axes, dim in stack.gather_order:
            shard = own_slice(shard, axes, dim=dim)
        return shard

    return jax.lax.map(of_matrix, x)


def owner(stack: Stack, x, update: Callable):
    """Send every matrix to its owner, and the update back. Sends 2 (n - 1)/n of the padded shards, n = owners."""
    local, (count, *_) = x.shape[1:], x.shape
    sizes = [axis_size(axes) if axes else 1 for _, axes in stack.dims]  # shards of each dim
    n = math.prod(sizes)
    each = -(-count // n)
    # Without the barrier, XLA on CPU refuses an all-to-all whose chunks are parameters with different layouts.
    x = jax.lax.optimization_barrier(jnp.pad(x, [(0, each * n - count)] + [(0, 0)] * len(local)))
    send = lambda x: all_to_all(x, stack.owner_axes, split_dim=0, join_dim=0) if stack.owner_axes else x
    # Shards by owner [n, each, ..] become matrices [each, ..]: the shards of a dim go before this dim, and back.
    places = [len(local), *(at for dim in range(len(local)) for at in (dim, len(local) + 1 + dim))]
    shards = send(x).reshape(*sizes, each, *local).transpose(places)
    whole = shards.reshape(each, *(size for size, _ in stack.dims))
    whole = jax.lax.map(update, whole).reshape(shards.shape)
    back = [places.index(place) for place in range(len(places))]
    return send(whole.transpose(back).reshape(x.shape))[:count]


LAYOUTS = {"gather": gather, "owner": owner}


def orthogonalize(declared, mesh: Mesh | None, layout: str, dtype: str, steps: int) -> Callable:
    """Return fn(tree of momentum) -> the orthogonalized matrices of each layer and expert, sharded as declared.

    declared  a declaration for each parameter of the tree, as it is stored
    mesh      None: the arrays are those of one device
    dtype     of the matmuls and of the bytes sent
    """

    def of_stack(stack, x):
        update = lambda matrix: newton_schulz(matrix.reshape(stack.shape), steps).reshape(matrix.shape)
        return LAYOUTS[layout](stack, x, update) if mesh else jax.lax.map(update, x)

    @jax.named_scope("muon")
    def of_all(tree):
        leaves, structure = jax.tree.flatten(tree)
        found, stacks = [None] * len(leaves), {}
        for number, (d, x) in enumerate(zip(jax.tree.leaves(declared), leaves, strict=True)):
            stacks.setdefault(stack_of(d), []).append((number, d, x))
        for stack, some in stacks.items():
            shards = [to_matrices(d, x).astype(dtype) for _, d, x in some]
            updates = of_stack(stack, jnp.concatenate(shards))
            ends = np.cumsum([len(one) for one in shards])[:-1]
            for (number, d, x), own in zip(some, jnp.split(updates, ends), strict=True):
                found[number] = from_matrices(d, own, x.shape).astype(x.dtype)
        return jax.tree.unflatten(structure, found)

    specs = sharding.specs(declared)
    return jax.shard_map(of_all, mesh=mesh, in_specs=(specs,), out_specs=specs) if mesh else of_all


def scale_by_muon(declared, numbers: Muon, orthogonalized: Callable) -> optax.GradientTransformation:
    """Replace the gradient of each matrix by its orthogonalized Nesterov momentum, with a root mean square of `rms`.

    AdamW's updates have about the same root mean square, so its learning rate and weight decay suit both. The momentum
    is that of `optax.contrib.muon`: a mean with bias correction.
    orthogonalized  as `orthogonalize` returns it
    """

    def init(params):
        return MuonState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        count, momentum = state.count + 1, numbers.momentum
        mu = optax.tree.update_moment(grads, state.mu, momentum, 1)
        ahead = optax.tree.bias_correction(mu, momentum, count + 1), optax.tree.bias_correction(grads, momentum, count)
        changes = orthogonalized(jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, *ahead))
        scale = lambda d, x: numbers.rms * math.sqrt(max(matrix_size(d))) * x
        return jax.tree.map(scale, declared, changes), MuonState(count, mu)

    return optax.GradientTransformation(init, update)
