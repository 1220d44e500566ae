"""Attention over CONTEXT in three forms: all-gather keys and values, pass them around a ring, or use all-to-alls.

All-gather and ring send the same bytes, but in a ring a device holds the chunks of at most two devices at a time.
The all-to-alls reshard from positions to heads (Ulysses): each device then has all positions of some heads.
With `ring`, a layer with a short sliding window receives only the keys in its windows (`halo_attention`).
"""

import functools

import jax
import jax.numpy as jnp

from config import ModelAtWork
from config.fields import parse_softmax, parse_window
from kernels.attention import partial_attention
from kernels.blocks import Reach, query_positions
from kernels.masked import masked_attention
from overlap.remat import named
from sharding import (
    CONTEXT,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    layers_in_branch,
    own_slice,
    permute,
    shift,
    to_sequence_order,
    to_zigzag_order,
    vary,
)


def merge_softmaxes(softmax, other):
    """Combine attention over two disjoint sets of keys; each is (output, log-sum-exp of its scores)."""
    (mixed_bshU, log_sum_bsh), (others_bshU, other_bsh) = softmax, other
    both_bsh = jnp.logaddexp(log_sum_bsh, other_bsh)
    share = lambda log_sum_bsh: jnp.exp(log_sum_bsh - both_bsh)[..., None]
    return mixed_bshU * share(log_sum_bsh) + others_bshU * share(other_bsh), both_bsh


def add_sinks(mixed_bshU, log_sum_bsh, sinks_h):
    """Return attention with sinks: one more key per head, whose value vector is 0 and whose score is in sinks_h.

    sinks_h  None: there are no sinks. Source: gpt-oss, arXiv:2508.10925, section 2.2
    """
    if sinks_h is None:
        return mixed_bshU
    sinks_h = vary(sinks_h, tuple(jax.typeof(log_sum_bsh).mat.varying))
    share_bsh = jax.nn.sigmoid(log_sum_bsh - sinks_h[None, None])  # of the other keys in the softmax
    return (mixed_bshU * share_bsh[..., None]).astype(mixed_bshU.dtype)


def ring_attention(q, parts, keys_values, segments_bs, cap=0.0):
    """Attend to the whole context while each device's `parts` (see `over_context`) travel once around CONTEXT.

    A device holds one chunk of positions from each half of the sequence. When another device's two chunks arrive, the
    causal mask leaves half of the matmul work, on every device: either all local queries attend to the earlier chunk,
    or only the later half of the queries attends to both chunks.
    Sends: `parts`, n - 1 times (n = CONTEXT). Source: Ring Attention, arXiv:2310.01889; load balance: Llama 3,
    2407.21783, 3.3.2.
    """
    n, here, s = axis_size(CONTEXT), axis_index(CONTEXT), segments_bs.shape[1]
    first, second, whole = slice(0, s // 2), slice(s // 2, None), slice(None)

    def meet(travelling, queries, keys, start):
        *key_parts, segments_bS = (x[:, keys] for x in travelling)
        own, own_bs = jax.tree.map(lambda x: x[:, queries], (q, segments_bs))
        k, v, reach = *keys_values(*key_parts), Reach(((start,),), cap=cap)
        mixed_bshU, log_sum_bsh = partial_attention(own, k, v, own_bs, segments_bS, reach)
        return mixed_bshU.astype(jnp.float32), log_sum_bsh

    @jax.checkpoint
    def meet_other(so_far, travelling, is_earlier):
        def later():
            new = merge_softmaxes([x[:, second] for x in so_far], meet(travelling, second, whole, s))
            return tuple(x.at[:, second].set(part) for x, part in zip(so_far, new, strict=True))

        return jax.lax.cond(is_earlier, lambda: merge_softmaxes(so_far, meet(travelling, whole, first, s // 2)), later)

    def step(carry, round):
        so_far, travelling = carry
        travelling = shift(travelling, CONTEXT, in_branch=layers_in_branch())
        return (meet_other(so_far, travelling, (here - round) % n < here), travelling), None

    travelling = (*parts, segments_bs)
    so_far = meet(travelling, whole, whole, 0)  # the mask needs only the order of the two chunks, not their distance
    carry = so_far, vary(travelling, tuple(jax.typeof(so_far[0]).mat.varying))
    ((mixed_bshU, log_sum_bsh), _), _ = jax.lax.scan(step, carry, jnp.arange(1, n))
    return mixed_bshU.astype(jax.tree.leaves(q)[0].dtype), log_sum_bsh


def chunks_before(first, second, k: int):
    """Return the chunks that are k places before this device's two chunks, with zeros before the first chunk of all.

    Of n devices along CONTEXT, device i has chunks i and 2n - 1 - i. Shapes: two trees of arrays -> the same.
    Sends: at most both arrays.
    """
    n, here = axis_size(CONTEXT), axis_index(CONTEXT)
    device = lambda chunk: min(chunk, 2 * n - 1 - chunk)

    def move(x, chunks):
        """For each of these chunks, send x from the device with the chunk k places before to the chunk's device."""
        pairs = [(device(chunk - k), device(chunk)) for chunk in chunks]
        sent = [(source, to) for source, to in pairs if source != to]
        received = permute(x, CONTEXT, sent, in_branch=layers_in_branch()) if sent else jax.tree.map(jnp.zeros_like, x)
        for own in [to for source, to in pairs if source == to]:
            received = jax.tree.map(lambda x, new, own=own: jnp.where(here == own, x, new), x, received)
        return received

    across = move(first, range(max(n, k), min(n + k, 2 * n)))  # from a device's first chunk to a second chunk
    return move(first, range(k, n)), jax.tree.map(jnp.add, across, move(second, range(n + k, 2 * n)))


def halo_attention(q, parts, keys_values, segments_bs, window: int, cap=0.0):
    """Attend to the last `window` positions; a device receives the `window` positions before each of its two chunks.

    The two chunks of queries attend in one call, like two sequences.
    Sends: at most 2 * window positions of `parts`; a ring sends (n - 1) * s (n = CONTEXT).
    """
    b, chunk = len(segments_bs), segments_bs.shape[1] // 2
    halves = lambda x: (x[:, :chunk], x[:, chunk:])
    own = list(zip(*map(halves, (*parts, segments_bs + 1)), strict=True))  # + 1: 0 marks positions before the first
    pieces = [own]
    for k in range(1, -(-window // chunk) + 1):
        size = min(window - chunk * (k - 1), chunk)
        pieces.insert(0, chunks_before(*jax.tree.map(lambda x, size=size: x[:, chunk - size :], own), k))
    joined = (jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *of) for of in zip(*pieces, strict=True))
    *parts, segments_xS = jax.tree.map(lambda *x: jnp.concatenate(x), *joined)  # x = 2b: first chunks, then second ones
    q, segments_xs = jax.tree.map(lambda x: jnp.concatenate(halves(x)), (q, segments_bs))
    reach = Reach(((window,),), window, cap)
    softmaxes = partial_attention(q, *keys_values(*parts), segments_xs, segments_xS - 1, reach)
    return tuple(jnp.concatenate([x[:b], x[b:]], axis=1) for x in softmaxes)


def over_heads(q, parts, keys_values, segments_bs, sinks_h, *reach):
    """Attend to the whole context with 1/n of the query heads and key/value heads; n = CONTEXT must divide both counts.

    Each device computes keys and values of its own positions, and all-to-alls reshard them by head. Every device gets
    contiguous heads, so a query head stays with its key head. A rotary key, which all heads share, is all-gathered.
    reach: further arguments of `partial_attention`.
    Sends: (n - 1)/n of queries, keys, values and outputs. Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    n = axis_size(CONTEXT)
    reshard = lambda x: all_to_all(x, CONTEXT, split_dim=2, join_dim=1) if x.ndim > 3 else all_gather(x, CONTEXT, dim=1)
    arrays = jax.tree.map(reshard, (q, *keys_values(*parts), segments_bs))
    # From here on h is the heads of this device (1/n of those before), and S is all positions.
    *qkv_bSh, segments_bS = jax.tree.map(lambda x: to_sequence_order(x, dim=1), arrays)
    sinks_h = None if sinks_h is None else own_slice(sinks_h, CONTEXT, dim=0)
    mixed_bShU = add_sinks(*partial_attention(*qkv_bSh, segments_bS, segments_bS, *reach), sinks_h)
    return all_to_all(to_zigzag_order(mixed_bShU, dim=1, n=n), CONTEXT, split_dim=1, join_dim=2)


def chunk_starts(s: int, n: int):
    """Return where the two chunks of each of n devices along CONTEXT start, with s positions per device."""
    return tuple((i * s // 2, (2 * n - 1 - i) * s // 2) for i in range(n)) if n > 1 else ((0,),)


def ring_sends_halo(window: int, s: int, n: int) -> bool:
    """Return whether `halo_attention` sends less than a ring of n devices with s positions each. If not, a layer with a
    window all-gathers the keys, which sends as much as a ring."""
    return 2 * window < (n - 1) * s


def over_context(c: ModelAtWork, q, parts, keys_values, segments_bs, absorbed=None, sinks_h=None, prefix_bs=None,
                 is_full=None):  # fmt: skip
    """Attend to the whole context in the form that `work.context_attention` selects: gather, ring or all_to_all.

    parts     arrays [b, s, ..] of the local positions, such as keys and values, or MLA's latents
    keys_values  fn(*parts) -> keys and values for `partial_attention`; it also accepts parts of several devices
    absorbed  functions that attend to `parts` directly, without keys and values. A KV cache uses them
              (`generate/cache.py`), training does not
    sinks_h   as in `add_sinks`
    prefix_bs  for a prefix LM: 1 for tokens to which all tokens of the document attend; then always `gather`
    is_full  whether this layer ignores `model.window`; None: all layers have the window, if there is one
    Sends over CONTEXT (n devices): the local `parts` and segments, n - 1 times; for all_to_all, see `over_heads`; for a
    ring in a layer with a window, see `ring_sends_halo`.
    """
    q, parts = named(q, "queries"), named(tuple(parts), "keys")
    n, s = axis_size(CONTEXT), segments_bs.shape[1]
    in_order = lambda x: to_sequence_order(all_gather(x, CONTEXT, dim=1), dim=1)
    if prefix_bs is not None:
        order_s = jnp.asarray(query_positions(chunk_starts(s, n), s))[axis_index(CONTEXT)]
        early_1sS = (order_s[:, None] >= jnp.arange(n * s)[None, :])[None]
        same_bsS = segments_bs[:, :, None] == in_order(segments_bs)[:, None, :]
        seen_bsS = same_bsS & (early_1sS | (in_order(prefix_bs) > 0)[:, None, :])
        return masked_attention(q, *keys_values(*map(in_order, parts)), seen_bsS)
    operands = q, parts, keys_values, segments_bs
    window, cap = parse_window(c.window).size, parse_softmax(c.softmax).scores_cap
    if c.work.context_attention == "all_to_all" and n > 1:
        return over_heads(*operands, sinks_h, Reach(window=window, cap=cap), 0, is_full)

    def gathered(is_full=None):
        *every, segments_bS = map(in_order, (*parts, segments_bs))
        reach = Reach(chunk_starts(s, n), window, cap), axis_index(CONTEXT), is_full
        return partial_attention(q, *keys_values(*every), segments_bs, segments_bS, *reach)

    if c.work.context_attention != "ring" or n == 1:
        return add_sinks(*gathered(is_full), sinks_h)
    ring = functools.partial(ring_attention, *operands, cap)
    near = functools.partial(halo_attention, *operands, window, cap) if ring_sends_halo(window, s, n) else gathered
    if not window or is_full is None:
        return add_sinks(*(near if window else ring)(), sinks_h)
    with jax.named_scope("full_or_window"):
        return add_sinks(*jax.lax.cond(is_full, ring, near), sinks_h)
