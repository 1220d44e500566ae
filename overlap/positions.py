"""Positions of TENSOR neighbours: three verbs, by which the model says what is exchanged and with what it is computed.

Each has two forms, of the same bytes. `gather`: one collective, waited for. `ring`: neighbours' positions come, or go,
one after the other, and products of one run while the next is on its way; p is the positions of such a part.
The functions that they are given take each position by itself. Source: arXiv:2211.05102, section 3.5.
"""

import itertools

import jax
import jax.numpy as jnp

from config import ModelAtWork
from overlap.rings import around, back, joined, parted
from sharding import TENSOR, all_gather, reduce_scatter


def gather_apply(c: ModelAtWork, function, *arrays_bt, beside=()):
    """function(*arrays) of the positions of all TENSOR neighbours, in order.

    beside  arrays of all positions which every device has: further arguments of the function
    Shapes: [b, t, ..] and, beside, [b, s, ..] -> what the function makes of them, each [b, s, ..].
    Sends: (n - 1)/n of the joined arrays, side by side. In a ring ours are computed with while others are on their way.
    """
    sent_btX, apart = side_by_side(arrays_bt)
    if c.work.tensor_exchange == "gather":
        return function(*apart(all_gather(sent_btX, TENSOR, dim=1)), *beside)
    parts = zip(around(sent_btX, TENSOR), *(parted(x, TENSOR, 1) for x in beside), strict=True)
    made = [function(*apart(arrived), *here) for arrived, *here in parts]
    return jax.tree.map(lambda *parts: joined([*parts], TENSOR, 1), *made)


def apply_scatter(c: ModelAtWork, function, *arrays_bs):
    """function(*arrays), a partial sum, added up over TENSOR: each position where it belongs.

    Shapes: [b, s, ..] -> [b, t, ..]. Sends: (n - 1)/n of the sum. In a ring the part for the farthest neighbour is made
    first, and the rest while it travels.
    """
    if c.work.tensor_exchange == "gather":
        return reduce_scatter(function(*arrays_bs), TENSOR, dim=1)
    parts = zip(*(parted(x, TENSOR, 1) for x in arrays_bs), strict=True)
    return back([function(*part) for part in parts], TENSOR)


def gather_apply_scatter(c: ModelAtWork, into, out_of, x_btD):
    """out_of(into(x)) of the positions of all TENSOR neighbours, a partial sum, added up: each where it belongs.

    Shapes: [b, t, D] -> [b, t, D]. Sends: (n - 1)/n of the joined positions, and of the sum. In a ring nothing is put
    in order between the two.
    """
    if c.work.tensor_exchange == "gather":
        return reduce_scatter(out_of(into(all_gather(x_btD, TENSOR, dim=1))), TENSOR, dim=1)
    return back([out_of(x) for x in nearest_first(into, around(x_btD, TENSOR))], TENSOR)


def side_by_side(arrays):
    """Arrays of the same positions as one, and a function by which it becomes them again."""
    if len(arrays) == 1:
        return arrays[0], lambda x: (x,)
    ends = [*itertools.accumulate(x.shape[-1] for x in arrays[:-1])]
    return jnp.concatenate(arrays, -1), lambda x: jnp.split(x, ends, axis=-1)


def nearest_first(function, parts: list) -> list:
    """function of each part that `around` brings, one after the other, ours first; their gradients in reverse.

    Nothing else tells a compiler that what is to be made of ours is for the time in which the others are on their way,
    and on the way back for that in which their gradients leave. Left alone it does that too early or too late, and
    waits.
    """
    if len(parts) == 1:
        return [function(*parts)]
    order = sorted(range(len(parts)), key=lambda k: min(k, len(parts) - k))
    made = {0: function(*not_before(parts[0]))}
    for before, k in itertools.pairwise(order):
        part, made[before] = not_before(parts[k], made[before])
        made[k] = function(part)
    return [made[k] for k in range(len(parts))]


@jax.custom_vjp
def not_before(*values):
    """All as they are, and none before the others; none is fused with what is made of it. Backward: their gradients."""
    return jax.lax.optimization_barrier(values)


not_before.defvjp(lambda *values: (not_before(*values), None), lambda _, d_values: not_before(*d_values))
