"""Keys and values of CONTEXT neighbours: gathered, passed around while their attention is computed, or heads for them.

Gathered or in a ring the same bytes travel; in a ring no device ever holds more than two neighbours' at a time. For
heads, a device has all positions of a share of the heads instead of its own positions of all.
"""

import jax
import jax.numpy as jnp

from config import ModelAtWork
from kernels.attention import partial_attention
from sharding import (
    CONTEXT,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    branches,
    in_chunks,
    in_order,
    shift,
    vary,
)


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


def over_heads(q_bshK, parts, keys_values, segments_bs):
    """Attend to the whole context with a share of the heads, and of the key and value heads: both divide by CONTEXT.

    Keys and values are made where their positions are. Contiguous shares keep a query head with its key head.
    Sends: (n - 1)/n of queries, keys, values and of what is mixed. Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    n = axis_size(CONTEXT)
    asked_bsh = q_bshK, *keys_values(*parts)
    # h is now the share of the heads, and all S positions ask.
    asked_bSh = [in_order(all_to_all(x, CONTEXT, split_dim=2, join_dim=1), dim=1) for x in asked_bsh]
    segments_bS = in_order(all_gather(segments_bs, CONTEXT, dim=1), dim=1)
    mixed_bShU, _ = partial_attention(*asked_bSh, segments_bS, segments_bS)
    return all_to_all(in_chunks(mixed_bShU, dim=1, n=n), CONTEXT, split_dim=1, join_dim=2)


def chunk_starts(s: int, n: int):
    """Where the chunks begin that each of n devices along CONTEXT holds, of s positions together; see `own_chunks`."""
    return tuple((i * s // 2, (2 * n - 1 - i) * s // 2) for i in range(n)) if n > 1 else ((0,),)


def over_context(c: ModelAtWork, q_bshK, parts, keys_values, segments_bs, absorbed=None):
    """Attend to the whole context: gathered from the devices along CONTEXT, passed around them, or exchanged for heads.

    parts     what a device knows of its own positions, each [b, s, ..]; keys_values makes [b, S, g, K], [b, S, g, U]
              of it
    absorbed  functions that attend to `parts` themselves, without keys and values: a KV cache uses them
              (`generate/cache.py`), training does not
    Sends over CONTEXT: (n - 1) times this device's `parts`; a ring never holds more than two of them. For heads, see
    `over_heads`.
    """
    n, s = axis_size(CONTEXT), q_bshK.shape[1]
    if c.work.context_attention == "ring" and n > 1:
        return ring(q_bshK, parts, keys_values, segments_bs)
    if c.work.context_attention == "all_to_all" and n > 1:
        return over_heads(q_bshK, parts, keys_values, segments_bs)
    *parts, segments_bS = (in_order(all_gather(x, CONTEXT, dim=1), dim=1) for x in (*parts, segments_bs))
    asked = q_bshK, *keys_values(*parts), segments_bs, segments_bS
    return partial_attention(*asked, chunk_starts(s, n), axis_index(CONTEXT))[0]
