"""Run one function of the model on unsharded arrays: shard the inputs, run it on each device, unshard the results."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from config import AXES
from errors import UserError, require_multiple
from sharding import BATCH, CONTEXT, EXPERT, STAGE, TENSOR, Declaration, as_tuple, to_sequence_order, to_zigzag_order
from xla import ordered

# Lower-case letter in model.py's legend -> the capital letter of the unsharded dim, and the mesh axes that shard it.
SLICES = {"b": ("B", BATCH), "s": ("T", (CONTEXT,)), "t": ("T", (CONTEXT, TENSOR)), "e": ("E", (EXPERT,)),
          "l": ("L", (STAGE,))} | {letter: (letter.upper(), (TENSOR,)) for letter in "fghmv"}  # fmt: skip


def unstack(declarations):
    """Return the declarations of a single layer, without the leading dims P, L, J of stacked layers."""

    def one(d: Declaration):
        n = len(d.dims) - len(d.dims.lstrip("PLJ"))
        return dataclasses.replace(d, dims=d.dims[n:], shape=d.shape[n:], spec=P(*d.spec[n:]))

    return jax.tree.map(one, declarations)


def on_mesh(function, mesh: Mesh, *inputs, out):
    """Compile a function that works on one device's shards, such as those in `model.py`, to run on unsharded arrays.

    inputs  for each argument, a tree of declarations, or of letters as in `model.py`, one per dim: "btD"; "": a scalar
    out     letters of the result, or a tree of them
    The function runs in one `shard_map`, manual over all axes, with `check_vma` on. Positions (s, t) are sharded as in
    the model (zig-zag over CONTEXT), and returned in sequence order.
    Raises: UserError if a size is not divisible by its mesh axes, or if the result does not match its letters: its
    shape differs, or it varies along a mesh axis that the letters do not declare, as a partial sum does.

    Example, the feed-forward of one layer:

    >>> import config, model, parameters
    >>> from overlap.weights import at_use
    >>> from sharding import all_gather, make_mesh, reduce_scatter
    >>> c, mesh = config.preset("tiny").model, make_mesh("fsdp=2,tensor=4")
    >>> declared = unstack(model.declare(c).prefix.feed_forward)
    >>> def branch(w, x_btD):
    ...     x_bsD = all_gather(x_btD, TENSOR, dim=1)
    ...     return reduce_scatter(model.feed_forward(at_use(w, c), c, x_bsD), TENSOR, dim=1)
    >>> w, x_BTD = parameters.init(declared, mesh, seed=0), jnp.ones((4, 12, c.d_model))
    >>> on_mesh(branch, mesh, declared, "btD", out="btD")(w, x_BTD).shape
    (4, 12, 24)
    """
    specs_in, specs_out = (jax.tree.map(_spec_of, tree) for tree in (inputs, out))

    def whole(*args):
        sizes = {}
        prepare = lambda given, x: x if isinstance(given, Declaration) else _check_and_reorder(given, x, sizes, mesh)
        args = jax.tree.map(prepare, inputs, args)

        def local(*args):
            result = function(*args)
            jax.tree.map(lambda letters, x: _check_slice(letters, x, sizes, mesh), out, result)
            return result

        result = jax.shard_map(local, mesh=mesh, in_specs=specs_in, out_specs=specs_out)(*args)
        return jax.tree.map(lambda letters, x: _reorder_positions(to_sequence_order, letters, x, mesh), out, result)

    return ordered.jit(whole, mesh)


def _spec_of(letters: "str | Declaration") -> P:
    if isinstance(letters, Declaration):
        return letters.spec
    if unknown := [letter for letter in letters if letter.islower() and letter not in SLICES]:
        raise UserError(f"letters {letters!r}: unknown sharded dim {unknown[0]!r}; use one of {', '.join(SLICES)}")
    return P(*(SLICES[letter][1] if letter in SLICES else None for letter in letters))


def _shard_count(letter: str, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in SLICES[letter][1]) if letter in SLICES else 1


def _check_and_reorder(letters: str, x, sizes: dict[str, int], mesh: Mesh):
    """Check an unsharded array against its letters, and reorder its positions for `shard_map`. Updates `sizes`."""
    if jnp.ndim(x) != len(letters):
        raise UserError(f"letters {letters!r}: the array has {jnp.ndim(x)} dims, shape {jnp.shape(x)}; use one per dim")
    for letter, size in zip(letters, jnp.shape(x), strict=True):
        name = SLICES.get(letter, (letter,))[0]
        if sizes.setdefault(name, size) != size:
            raise UserError(f"letters {letters!r}: {name}={size} here, but {name}={sizes[name]} in another array")
        chunks = 2 * mesh.shape[CONTEXT] if letter in "st" and mesh.shape[CONTEXT] > 1 else 1
        parts = math.lcm(_shard_count(letter, mesh), chunks)
        require_multiple(name, size, parts, f"of letters {letters!r} into {parts} parts")
    return _reorder_positions(to_zigzag_order, letters, x, mesh)


def _reorder_positions(how, letters: str, x, mesh: Mesh):
    """Reorder the positions of x, if they are sharded over CONTEXT. how: `to_zigzag_order` or `to_sequence_order`"""
    n = mesh.shape[CONTEXT]
    dims = [dim for dim, letter in enumerate(letters) if letter in "st"] if n > 1 else []
    return functools.reduce(lambda x, dim: how(x, dim=dim, n=n), dims, x)


def _check_slice(letters: str, x, sizes: dict[str, int], mesh: Mesh) -> None:
    """Raises: UserError if a device's result does not have the shape and sharding that its letters declare."""
    named = {axis for axes in _spec_of(letters) for axis in as_tuple(axes)}
    if extra := [axis for axis in AXES if axis in jax.typeof(x).mat.varying - named]:
        raise UserError(
            f"out={letters!r}: the result varies along {', '.join(extra)}, which no letter declares; if it is a "
            "partial sum, psum or reduce_scatter it; if it is a shard, give its dim the lower-case letter")  # fmt: skip
    whole = tuple(sizes.get(SLICES.get(letter, (letter,))[0]) for letter in letters)
    want = tuple(size and size // _shard_count(letter, mesh) for letter, size in zip(letters, whole, strict=False))
    if jnp.ndim(x) != len(letters) or any(size not in (None, there) for size, there in zip(want, x.shape, strict=True)):
        raise UserError(
            f"out={letters!r}: a device's shard of {whole} is {want}, but the result is {x.shape}; if it is a partial "
            "sum over all positions, reduce_scatter it") from None  # fmt: skip
