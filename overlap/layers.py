"""Apply layers in order: in a scan, so that compile time does not grow with depth, or unrolled, as in decoding.

A scan copies each layer's arrays out of the stack. For a single token that takes longer than the matmuls. With `Row`s
instead of arrays, each layer reads its weights from the whole stack, and the backward pass adds its gradients to sums.
`scan_blocks` also keeps nested scans from copying what the layers of a block save.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sharding import vary


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


def close_over_nothing(function, w, x, *rest):
    """Return `call` and `others`, so that call(w, x, others) is function(w, x, *rest).

    A custom_vjp may not close over arrays of an outer scan, so these are in `others`.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(w, x, *rest)

    def call(w, x, others):
        consts, rest = others
        return jax.tree.unflatten(
            jax.tree.structure(shapes), jax.core.eval_jaxpr(traced.jaxpr, consts, *jax.tree.leaves((w, x, rest)))
        )

    return call, (traced.consts, rest)


def apply_to_rows(function, w, x: Summed, *rest):
    """Apply function(weights, x, ..) -> (x, more) of a layer whose weights are `Row`s. Returns (`Summed`, more).

    Backward: the cotangent of a total is the sum of the gradients so far; the layer's gradient is added to its row, in
    place. Only x and the totals are differentiated, not the stacks, `rest`, or what the function closes over.
    """
    rows, tree = jax.tree.flatten(w, is_leaf=is_row)
    weights, hows = lambda rows: jax.tree.unflatten(tree, [row.read() for row in rows]), []
    call, others = close_over_nothing(function, weights(rows), x.x, *rest)

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
    (y, more), totals = apply(rows, x.x, x.totals, others)
    return Summed(y, totals), more


@struct.dataclass
class Saving:
    """Activations, and buffers for what layers save for the backward pass, which scans carry (see `scan_blocks`)."""

    x: Any
    buffers: list  # for each kind of layer, a list of arrays [layers of this kind, ..]
    counts: list  # for each kind, how many layers have run
    kinds: tuple = struct.field(pytree_node=False)  # the structures of their weights


def is_buffered(x) -> bool:
    """Return True for an array that can be in a buffer: of floats, like its cotangent, and in the device's memory."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jax.typeof(x).memory_space == jax.memory.Space.Device


def save_in_buffers(function, w, x: Saving, *rest):
    """Apply function(weights, x, ..) -> (x, more) of a layer, which saves into the buffers. Returns (`Saving`, more).

    Backward: the cotangents of the buffers are the buffers themselves (see `read_buffers`). Each layer reads from them
    what it saved, and passes them on.
    """
    kind, hows = x.kinds.index(jax.tree.structure(w)), []
    call, others = close_over_nothing(function, w, x.x, *rest)

    @jax.custom_vjp
    def apply(w, x, buffers, place, others):
        return call(w, x, others), buffers

    def forward(w, x, buffers, place, others):
        out, pull = jax.vjp(lambda w, x: call(w, x, others), w, x)
        kept, how = split_residuals(pull, (w, others))
        hows.append((how, [is_buffered(value) for value in kept]))
        write = lambda buffer, value: jax.lax.dynamic_update_index_in_dim(buffer, value, place, 0)
        written = [write(*two) for two in zip(buffers, filter(is_buffered, kept), strict=True)]
        return (out, written), (w, [value for value in kept if not is_buffered(value)], place, others)

    def backward(saved, cotangents):
        (w, unbuffered, place, others), (d_out, buffers), (how, buffered) = saved, cotangents, hows[-1]
        read = (jax.lax.dynamic_index_in_dim(buffer, place, keepdims=False) for buffer in buffers)
        unbuffered = iter(unbuffered)
        kept = [next(read if in_buffer else unbuffered) for in_buffer in buffered]
        return *rebuild_pull(how, kept, (w, others))(d_out), buffers, None, None

    apply.defvjp(forward, backward)
    (y, more), written = apply(w, x.x, x.buffers[kind], x.counts[kind], others)
    replaced = lambda values, value: [*values[:kind], value, *values[kind + 1 :]]
    return x.replace(x=y, buffers=replaced(x.buffers, written), counts=replaced(x.counts, x.counts[kind] + 1)), more


@jax.custom_vjp
def read_buffers(x, buffers):
    """Return x. Backward: passes the buffers on as their own cotangents."""
    return x


read_buffers.defvjp(lambda x, buffers: (x, buffers), lambda buffers, dx: (dx, buffers))


def make_buffers(one, stacks, x, number) -> Saving:
    """Return x with empty buffers for all layers.

    stacks  (weights of all layers of a kind, number of their leading dims), for each kind
    """

    def saved(w, x):
        call, others = close_over_nothing(one, w, x, number)
        _, pull = jax.vjp(lambda w, x: call(w, x, others), w, x)
        return [*filter(is_buffered, split_residuals(pull, (w, others))[0])]

    def buffers_of(stack, dims):
        layers = math.prod(jax.tree.leaves(stack)[0].shape[:dims])
        types = jax.make_jaxpr(saved)(jax.tree.map(lambda w: w[(0,) * dims], stack), x).out_avals
        return [vary(jax.lax.empty((layers, *one.shape), one.dtype), tuple(one.mat.varying)) for one in types]

    buffers, kinds = [buffers_of(*two) for two in stacks], (jax.tree.structure(stack) for stack, _ in stacks)
    return Saving(x, buffers, [jnp.int32(0) for _ in stacks], tuple(kinds))


def scan_blocks(one, block, stack, x, number_of):
    """Apply block(w, x, number) -> (x, more) to each block, as `scan_layers` does; one(w, x, number) applies a layer.

    A block scans its dense layers, and a scan stacks what its iterations save. So the compiler would copy what the
    layers of a block save from the inner to the outer stack, and back in the backward pass. Instead, layers save into
    buffers that both scans carry and update in place.
    """
    is_stacked = not isinstance(stack, list) and not isinstance(x, Summed) and stack.dense is not None
    if not is_stacked or 1 in jax.tree.leaves(stack.dense)[0].shape[:2]:  # the compiler removes a scan of one layer
        return scan_layers(block, stack, x, number_of)
    stacks = [two for two in ((stack.dense, 2), (stack.moe, 1)) if two[0] is not None]
    x, more = scan_layers(block, stack, make_buffers(one, stacks, x, number_of(jnp.int32(0))), number_of)
    return read_buffers(x.x, x.buffers), more


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
