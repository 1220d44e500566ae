"""Apply layers in order: in a scan, so that compile time does not grow with depth, or unrolled, as in decoding.

A scan copies each layer's arrays out of the stack. For a single token that takes longer than the matmuls. With `Row`s
instead of arrays, each layer reads its weights from the whole stack, and the backward pass adds its gradients to sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Row:
    """A layer's array in a stack, by its indices; with fewer indices, the stack of several layers."""

    stack: Any  # with leading dims, such as chunks, blocks and layers
    index: tuple  # of the first leading dims
    number: int = struct.field(pytree_node=False)  # of the stack's sum of gradients in `Summed.totals`

    def at(self, array):
        """Return the dynamic slice of an array at this index, with all dims, and its start."""
        dims = array.shape[len(self.index) :]
        start = *self.index, *(0 for _ in dims)
        return jax.lax.dynamic_slice(array, start, (*(1 for _ in self.index), *dims)), start

    def read(self):
        return self.at(self.stack)[0].reshape(self.stack.shape[len(self.index) :])


@struct.dataclass
class Summed:
    """Activations, and sums of the gradients of the stacks that layers read as `Row`s."""

    x: Any
    totals: Any  # a list of arrays with the shapes of the stacks


def is_row(leaf) -> bool:
    return isinstance(leaf, Row)


def add_to_row(row: Row, total, gradient):
    """Add a gradient to its row of a stack's sum. The compiler writes the result of the matmul there, in place."""
    so_far, start = row.at(total)
    return jax.lax.dynamic_update_slice(total, so_far + gradient.astype(total.dtype).reshape(so_far.shape), start)


def split_residuals(pull, known):
    """Split the saved arrays (residuals) in a pullback `pull`, from jax.vjp, into those to save and those in `known`.

    Returns the arrays to save, and the structure from which `rebuild_pull` rebuilds the pullback.
    """
    leaves, tree = jax.tree.flatten(pull)
    places = {id(x): number for number, x in enumerate(jax.tree.leaves(known))}
    place = [places.get(id(leaf)) for leaf in leaves]
    return [leaf for leaf, number in zip(leaves, place, strict=True) if number is None], (tree, place)


def rebuild_pull(how, kept, known):
    """Rebuild the pullback from its structure `how` (see `split_residuals`), the saved arrays `kept`, and `known`."""
    (tree, place), kept, known = how, iter(kept), jax.tree.leaves(known)
    return jax.tree.unflatten(tree, [next(kept) if number is None else known[number] for number in place])


def apply_to_rows(function, w, x: Summed, *rest):
    """Apply function(weights, x, ..) -> (x, more) of a layer whose weights are `Row`s. Returns (`Summed`, more).

    Backward: the cotangent of a total is the sum of the gradients so far; the layer's gradient is added to its row, in
    place. Only x and the totals are differentiated, not the stacks, `rest`, or what the function closes over.
    """
    rows, tree = jax.tree.flatten(w, is_leaf=is_row)
    weights, hows = lambda rows: jax.tree.unflatten(tree, [row.read() for row in rows]), []
    # A custom_vjp may not close over arrays of an outer scan, so they become arguments.
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(weights(rows), x.x, *rest)

    def call(w, x, others):
        consts, rest = others
        return jax.tree.unflatten(
            jax.tree.structure(shapes), jax.core.eval_jaxpr(traced.jaxpr, consts, *jax.tree.leaves((w, x, rest)))
        )

    @jax.custom_vjp
    def apply(rows, x, totals, others):
        return call(weights(rows), x, others), totals

    def forward(rows, x, totals, others):
        w = weights(rows)
        out, pull = jax.vjp(lambda w, x: call(w, x, others), w, x)
        kept, how = split_residuals(pull, (w, others))
        hows.append(how)
        return (out, totals), (rows, kept, others)

    def backward(saved, cotangents):
        (rows, kept, others), (d_out, totals) = saved, cotangents
        dw, dx = rebuild_pull(hows[-1], kept, (weights(rows), others))(d_out)
        totals = list(totals)
        for row, gradient in zip(rows, jax.tree.leaves(dw), strict=True):
            totals[row.number] = add_to_row(row, totals[row.number], gradient)
        return None, dx, totals, None

    apply.defvjp(forward, backward)
    (y, more), totals = apply(rows, x.x, x.totals, (traced.consts, rest))
    return Summed(y, totals), more


def scan_layers(one, stack, x, number_of):
    """Apply one(w, x, number) -> (x, more) to each layer or block. Return x, and all `more`, stacked or as a list.

    stack      weights: stacked arrays, which are scanned, or a list, which is unrolled: `one` is traced for each entry
    number_of  fn(i) -> the number of the i-th layer or block
    """
    if not isinstance(stack, list):
        i_l = jnp.arange(stack_size(stack))
        if is_row(jax.tree.leaves(stack, is_leaf=is_row)[0]):
            row = lambda i: jax.tree.map(lambda w: w.replace(index=(*w.index, i)), stack, is_leaf=is_row)
            return jax.lax.scan(lambda x, i: one(row(i), x, number_of(i)), x, i_l)
        step = lambda x, w_and_number: one(w_and_number[0], x, w_and_number[1])
        return jax.lax.scan(step, x, (stack, number_of(i_l)))
    returned = []
    for i, w in enumerate(stack):
        x, more = one(w, x, number_of(i))
        returned.append(more)
    return x, returned


def stack_size(stack) -> int:
    if isinstance(stack, list):
        return len(stack)
    first = jax.tree.leaves(stack, is_leaf=is_row)[0]
    return first.stack.shape[len(first.index)] if is_row(first) else len(first)
