"""All-gather and reduce-scatter positions over TENSOR: three functions, each with two forms that send the same bytes.

`gather` runs one collective, and its communication is exposed. `ring` splits it into chunks, one per device, and
overlaps the transfer of one chunk with the matmuls on another. In shapes, p is the positions of one chunk, and n is
the number of devices along TENSOR.
The functions passed in must treat every position independently. Source: arXiv:2211.05102, section 3.5.
"""

import itertools

import jax
import jax.numpy as jnp

from config import ModelAtWork
from overlap.rings import concatenate_in_order, ring_all_gather, ring_reduce_scatter, split_by_device
from sharding import TENSOR, all_gather, reduce_scatter


@jax.named_scope("tensor_exchange")
def gather_apply(c: ModelAtWork, function, *arrays_bt, local_arrays=()):
    """All-gather the arrays over TENSOR and apply the function to all positions, in order.

    local_arrays  more arguments of the function, which are not sent, because every device already has all positions
    Shapes: arrays [b, t, ..] and local_arrays [b, s, ..] -> the function's results, each [b, s, ..].
    Sends: (n - 1)/n of the gathered arrays, in one collective. A ring computes on the local chunk while others arrive.
    """
    sent_btX, split = concatenate_features(arrays_bt)
    if c.work.tensor_exchange == "gather":
        return function(*split(all_gather(sent_btX, TENSOR, dim=1)), *local_arrays)
    chunks = zip(ring_all_gather(sent_btX, TENSOR), *(split_by_device(x, TENSOR, 1) for x in local_arrays), strict=True)
    results = [function(*split(sent_bpX), *beside_bp) for sent_bpX, *beside_bp in chunks]
    return jax.tree.map(lambda *chunks: concatenate_in_order([*chunks], TENSOR, 1), *results)


@jax.named_scope("tensor_exchange")
def apply_scatter(c: ModelAtWork, function, *arrays_bs):
    """Apply the function, whose result is a partial sum, and reduce-scatter the result over TENSOR along positions.

    Shapes: [b, s, ..] -> [b, t, ..]. Sends: (n - 1)/n of the sum. A ring first computes the chunk for the farthest
    device, and computes the other chunks while that one is in flight.
    """
    if c.work.tensor_exchange == "gather":
        return reduce_scatter(function(*arrays_bs), TENSOR, dim=1)
    chunks = zip(*(split_by_device(x, TENSOR, 1) for x in arrays_bs), strict=True)
    return ring_reduce_scatter([function(*chunk) for chunk in chunks], TENSOR)


@jax.named_scope("tensor_exchange")
def gather_apply_scatter(c: ModelAtWork, into, out_of, x_btD):
    """All-gather x over TENSOR, compute the partial sum out_of(into(x)), and reduce-scatter it along positions.

    Shapes: [b, t, D] -> [b, t, D]. Sends: (n - 1)/n of the gathered positions, and of the sum. Rings keep the chunks in
    order of arrival from the all-gather to the reduce-scatter.
    """
    if c.work.tensor_exchange == "gather":
        return reduce_scatter(out_of(into(all_gather(x_btD, TENSOR, dim=1))), TENSOR, dim=1)
    return ring_reduce_scatter([out_of(x) for x in apply_nearest_first(into, ring_all_gather(x_btD, TENSOR))], TENSOR)


def concatenate_features(arrays):
    """Concatenate arrays along their features. Returns the result and a function that splits it again."""
    if len(arrays) == 1:
        return arrays[0], lambda x: (x,)
    ends = [*itertools.accumulate(x.shape[-1] for x in arrays[:-1])]
    return jnp.concatenate(arrays, -1), lambda x: jnp.split(x, ends, axis=-1)


def apply_nearest_first(function, chunks: list) -> list:
    """Apply the function to each chunk of a ring all-gather, the local one first; the backward pass runs in reverse.

    The barriers fix this order. The forward pass computes on the local chunk while the remote chunks arrive, and the
    backward pass computes on it while their gradients are sent. Without barriers the compiler may compute too early or
    too late, and the step stalls.
    """
    if len(chunks) == 1:
        return [function(*chunks)]
    order = sorted(range(len(chunks)), key=lambda k: min(k, len(chunks) - k))
    results = {0: function(*barrier(chunks[0]))}
    for before, k in itertools.pairwise(order):
        chunk, results[before] = barrier(chunks[k], results[before])
        results[k] = function(chunk)
    return [results[k] for k in range(len(chunks))]


@jax.custom_vjp
def barrier(*values):
    """Make the values available only when all of them are, and prevent fusion across. Backward: the same."""
    return jax.lax.optimization_barrier(values)


barrier.defvjp(lambda *values: (barrier(*values), None), lambda _, d_values: barrier(*d_values))
