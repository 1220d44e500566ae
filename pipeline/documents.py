"""Which positions of packed documents each device along CONTEXT gets: zig-zag in each document.

With n devices along CONTEXT, a row of T positions has 2n chunks, and device i gets chunks i and 2n - 1 - i
(`sharding.own_chunks`). That balances causal attention in a row with one document. But a query attends only to its own
document, so in a row with several documents, its work depends on its place in its document.

`document_order` reorders a row: first come the first 1/(2n) of each document, then the second 1/(2n) of each, and so
on. So chunk c has part c of every document, and all devices have nearly the same work in every step of a ring. Of two
positions of a document, the earlier one stays the earlier one. So the causal mask by the order in the row, together
with the mask by document, is still the mask of attention. All arrays of the batch are reordered alike.
"""

import jax
import jax.numpy as jnp
import numpy as np


def document_order(segments_bT, n: int):
    """Return the order in which the positions of a row are dealt to n devices. Shapes: [b, T] -> int32 [b, T].

    segments_bT  the number of the document of each position; the positions of a document are adjacent
    n            devices along CONTEXT; 2n must divide T

    A document of L positions has parts of L // 2n positions. The L % 2n left over go to parts in turn, and the turn
    continues from document to document, so that all chunks have T / 2n positions.
    """
    parts, T = 2 * n, segments_bT.shape[1]
    index_1T = jnp.arange(T)[None]
    begins_bT = segments_bT != jnp.pad(segments_bT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    ends_bT = jnp.pad(begins_bT, ((0, 0), (0, 1)), constant_values=True)[:, 1:]
    first_bT = jax.lax.cummax(jnp.where(begins_bT, index_1T, 0), axis=1)
    last_bT = jax.lax.cummin(jnp.where(ends_bT, index_1T, T), axis=1, reverse=True)
    length_bT, place_bT = last_bT - first_bT + 1, index_1T - first_bT
    left_bT = length_bT % parts
    turn_bT = (jnp.cumsum(jnp.where(begins_bT, left_bT, 0), axis=1) - left_bT) % parts  # gets the first of them

    def begin(part):  # the place in the document at which a part begins
        extra_bT = jnp.maximum(jnp.minimum(turn_bT + left_bT, part) - turn_bT, 0)  # left over, in earlier parts
        wrapped_bT = jnp.clip(turn_bT + left_bT - parts, 0, part)  # the same of those that began again at part 0
        return part * (length_bT // parts) + extra_bT + wrapped_bT

    part_bT = sum((place_bT >= begin(part)).astype(jnp.int32) for part in range(1, parts))
    return jnp.argsort(part_bT, axis=1, stable=True)


def device_of_each(places: int, n: int) -> np.ndarray:
    """Return the device that gets each place of a row, as `sharding.own_chunks` deals them: [places]."""
    chunk_T = np.arange(places) * 2 * n // places
    return np.minimum(chunk_T, 2 * n - 1 - chunk_T)


def ring_work(segments_T, order_T, n: int) -> np.ndarray:
    """Count the pairs of a query and a key that each device computes in each step of a ring over n devices, [n, n].

    segments_T  as above; padding, 0, is not counted
    order_T     the order of the row, such as that of `document_order`
    """
    device_T, segments_T = device_of_each(len(order_T), n), np.asarray(segments_T)[order_T]
    pairs_nn = np.zeros((n, n), np.int64)
    for document in np.unique(segments_T[segments_T > 0]):
        own_L = device_T[segments_T == document]
        earlier_Ln = np.cumsum(own_L[:, None] == np.arange(n), axis=0)  # keys on each device, with the query itself
        np.add.at(pairs_nn, own_L, earlier_Ln)
    steps_nn = (np.arange(n)[:, None] - np.arange(n)) % n  # in each step, the device whose keys it meets
    return np.take_along_axis(pairs_nn, steps_nn, axis=1)


def imbalance(segments_BT, n: int, by_document: bool) -> float:
    """Return how many times as long as with even work the steps of a ring take: the sum over rows and steps of the most
    work of a device, over that of the mean work. 1 is balanced, n is one busy device at a time."""
    rows = np.asarray(segments_BT)
    orders = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    if by_document:
        orders = np.asarray(jax.jit(document_order, static_argnums=1)(rows, n))
    work = [ring_work(*row, n) for row in zip(rows, orders, strict=True)]
    return float(sum(w.max(axis=0).sum() for w in work) / sum(w.mean(axis=0).sum() for w in work))


def describe(segments_BT, n: int) -> str:
    """Return how even the work of attention is with each value of work.context_layout, in rows of a batch."""
    positions, by_document = (imbalance(segments_BT, n, which) for which in (False, True))
    return (
        f"a ring of {n} devices waits for its busiest one, which has {positions:.2f} times the mean work with "
        f"context_layout=positions, {by_document:.2f} times with documents, in {len(segments_BT)} rows of step 1"
    )
