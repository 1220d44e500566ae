"""Wires behind products: positions of neighbours on their way while those of others are computed with.

Those of TENSOR neighbours arrive and leave in parts, those of CONTEXT neighbours pass by in a ring. The same bytes
travel as if all waited for them; a compiler finds products to run meanwhile.
"""

import itertools

import jax
import jax.numpy as jnp

from config import ModelConfig
from kernels.attention import partial_attention
from sharding import (
    CONTEXT,
    TENSOR,
    all_gather,
    around,
    axis_index,
    axis_size,
    back,
    branches,
    in_order,
    joined,
    parted,
    reduce_scatter,
    shift,
    vary,
)

# Positions of TENSOR neighbours ---------------------------------------------------------------------------------------


def arriving(c: ModelConfig, *arrays_bt) -> list:
    """Arrays of our positions, as those of all TENSOR neighbours: one part after the other, ours first; or in one part.

    Shapes: [b, t, ..] -> a list of tuples of [b, p, ..], p = t or s. Sends: (n - 1)/n of the joined arrays.
    """
    if c.tensor_exchange == "gather":
        return [tuple(all_gather(x, TENSOR, dim=1) for x in arrays_bt)]
    return [*zip(*(around(x, TENSOR) for x in arrays_bt), strict=True)]


def as_they_come(function, parts: list) -> list:
    """function of each part that `arriving` brings, one after the other, ours first; their gradients in reverse.

    Nothing else tells a compiler that what is to be made of ours is for the time in which the others are on their way,
    and on the way back for that in which their gradients leave. Left alone it does that too early or too late, and
    waits.
    """
    if len(parts) == 1:
        return [function(*parts)]
    nearest_first = sorted(range(len(parts)), key=lambda k: min(k, len(parts) - k))
    made = {0: function(*there(parts[0]))}
    for before, k in itertools.pairwise(nearest_first):
        part, made[before] = there(parts[k], made[before])
        made[k] = function(part)
    return [made[k] for k in range(len(parts))]


@jax.custom_vjp
def there(*values):
    """All as they are, and none before the others; none is fused with what is made of it. Backward: their gradients."""
    return jax.lax.optimization_barrier(values)


there.defvjp(lambda *values: (there(*values), None), lambda _, d_values: there(*d_values))


def leaving(c: ModelConfig, partials: list):
    """Add up what each TENSOR neighbour made for our positions, of parts as `arriving` has them. Returns [b, t, ..]."""
    return reduce_scatter(partials[0], TENSOR, dim=1) if c.tensor_exchange == "gather" else back(partials, TENSOR)


def in_place(c: ModelConfig, parts: list):
    """What was made of parts, in the order of the sequence. Shapes: a list of [b, p, ..] -> [b, s, ..]."""
    return parts[0] if c.tensor_exchange == "gather" else joined([*parts], TENSOR, 1)


def in_parts(c: ModelConfig, x_bs) -> list:
    """The inverse of `in_place`."""
    return [x_bs] if c.tensor_exchange == "gather" else parted(x_bs, TENSOR, 1)


# Positions of CONTEXT neighbours --------------------------------------------------------------------------------------


def merged(softmax, other):
    """One softmax of two over different keys, each with the values it mixed and the log of its sum."""
    (mixed_bshU, log_sum_bsh), (others_bshU, other_bsh) = softmax, other
    both_bsh = jnp.logaddexp(log_sum_bsh, other_bsh)
    share = lambda log_sum_bsh: jnp.exp(log_sum_bsh - both_bsh)[..., None]
    return mixed_bshU * share(log_sum_bsh) + others_bshU * share(other_bsh), both_bsh


def ring(q_bshK, parts, keys_values, segments_bs):
    """Attend to the whole context while each device's `parts` go once around CONTEXT.

    A device holds one chunk of positions from each half of the sequence. Of another device's two chunks, its queries
    may see either the earlier one (all queries), or both (its later queries): half of the products, on every device.
    Sends: `parts`, n - 1 times. Source: Ring Attention, arXiv:2310.01889; the balance: Llama 3, 2407.21783, 3.3.2.
    """
    n, here, s = axis_size(CONTEXT), axis_index(CONTEXT), q_bshK.shape[1]
    first, second, both = slice(0, s // 2), slice(s // 2, None), slice(None)

    def meet(travelling, queries, keys, start):
        *there, segments_bS = (x[:, keys] for x in travelling)
        asked = q_bshK[:, queries], *keys_values(*there), segments_bs[:, queries], segments_bS
        mixed_bshU, log_sum_bsh = partial_attention(*asked, starts=((start,),))
        return mixed_bshU.astype(jnp.float32), log_sum_bsh

    @jax.checkpoint
    def meet_other(so_far, travelling, is_earlier):
        def later():
            new = merged([x[:, second] for x in so_far], meet(travelling, second, both, s))
            return tuple(x.at[:, second].set(part) for x, part in zip(so_far, new, strict=True))

        return jax.lax.cond(is_earlier, lambda: merged(so_far, meet(travelling, both, first, s // 2)), later)

    def step(carry, round):
        so_far, travelling = carry
        travelling = shift(travelling, CONTEXT, in_branch=branches())
        return (meet_other(so_far, travelling, (here - round) % n < here), travelling), None

    travelling = (*parts, segments_bs)
    so_far = meet(travelling, both, both, 0)  # the two chunks in their order, as if they were neighbours
    carry = so_far, vary(travelling, tuple(jax.typeof(so_far[0]).mat.varying))
    ((mixed_bshU, _), _), _ = jax.lax.scan(step, carry, jnp.arange(1, n))
    return mixed_bshU.astype(q_bshK.dtype)


def chunk_starts(s: int, n: int):
    """Where the chunks begin that each of n devices along CONTEXT holds, of s positions together; see `own_chunks`."""
    return tuple((i * s // 2, (2 * n - 1 - i) * s // 2) for i in range(n)) if n > 1 else ((0,),)


def over_context(c: ModelConfig, q_bshK, parts, keys_values, segments_bs):
    """Attend to the whole context, gathered from the devices along CONTEXT or passed around them.

    parts  what a device knows of its own positions, each [b, s, ..]; keys_values makes [b, S, g, K], [b, S, g, U] of it
    Sends over CONTEXT: (n - 1) times this device's `parts`, either way; a ring never holds more than two of them.
    """
    n, s = axis_size(CONTEXT), q_bshK.shape[1]
    if c.context_attention == "ring" and n > 1:
        return ring(q_bshK, parts, keys_values, segments_bs)
    *parts, segments_bS = (in_order(all_gather(x, CONTEXT, dim=1), dim=1) for x in (*parts, segments_bs))
    asked = q_bshK, *keys_values(*parts), segments_bs, segments_bS
    return partial_attention(*asked, chunk_starts(s, n), axis_index(CONTEXT))[0]
