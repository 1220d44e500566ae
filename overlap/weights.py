"""Gather weight shards for each use or once per step; gather the vocabulary table slice by slice.

`work.gather` chooses. With "layer", the weights of one layer are gathered at a time, and again for each use (forward,
backward, each microbatch). With "step", all weights of the pipeline stage are gathered once and stay in memory. In both
cases the backward pass reduce-scatters the gradients. "Gather" means an all-gather over FSDP, EXPERT and CONTEXT; n is
the number of devices along these axes.
"""

import jax
import jax.numpy as jnp

from config import ModelAtWork
from overlap.gradients import gather_for_layer
from sharding import AXES, SLICED, all_gather, map_fsdp_sharded, vary


def cast(w, c: ModelAtWork, *names):
    """Cast matrices to the compute dtype, still sharded; norms and biases keep their dtype.

    names  return only these parameters, as a tuple; without names, return all of w, including nested structs
    """
    return map_fsdp_sharded(lambda x, dim, axes, exact: x if exact else x.astype(c.compute_dtype), w, *names)


def gather_weights(w, c: ModelAtWork, *names):
    """Cast matrices and all-gather them. Sends: (n - 1)/n of each. Backward: reduce-scatter, the same bytes."""
    gather = gather_for_layer if c.work.gather == "layer" else all_gather

    def join(x, dim, axes, exact):
        return gather(x if exact else x.astype(c.compute_dtype), axes, dim=dim)

    return map_fsdp_sharded(join, w, *names)


# work.gather -> what to do with the weights once per step, and at each use
WHEN = {"layer": (cast, gather_weights), "step": (gather_weights, cast)}


def held_by_step(w, c: ModelAtWork):
    """Prepare weights once per step, in the compute dtype: unsharded if `work.gather` is "step", else sharded."""
    return WHEN[c.work.gather][0](w, c)


def at_use(w, c: ModelAtWork, *names):
    """Return the gathered weights of a layer or of the vocabulary table, for one use."""
    return WHEN[c.work.gather][1](w, c, *names)


def ready_for_autodiff(params, c: ModelAtWork):
    """Prepare parameters for a step that autodiff differentiates: mark them as varying over all mesh axes (`vary`).

    The call is outside all loops, so its backward pass runs once per step. That pass sums the gradient over the axes
    along which a parameter is replicated and, with `work.gather=step`, reduce-scatters it. The result has the
    parameters' dtype, and microbatch gradients accumulate in it. Without the barrier XLA would sum the gradients first
    and convert them to this dtype afterwards.
    """
    params = jax.lax.optimization_barrier(vary(params, AXES))
    if c.work.gather == "layer":
        return params  # at_use casts them
    return jax.tree.map(lambda w, p: w.astype(p.dtype), held_by_step(params, c), params)


def tokens_go_to_table(c: ModelAtWork, tokens: int, words: int) -> bool:
    """Return True if tokens should be sent to the shards of an embedding table, instead of gathering the table.

    words  number of rows (vocabulary ids) of the table on this device
    """
    return c.work.gather == "layer" and tokens < words  # then the tokens are fewer bytes than the table


def vocabulary_slices(loss_chunk: int, n: int, v: int) -> tuple[int, int]:
    """Return the number of slices of a vocabulary of v ids, and the ids per slice, for a loss over n tokens.

    loss_chunk  a slice of n tokens may have at most as many logits as loss_chunk tokens have over all v ids
    Uses the fewest slices within this limit, or up to twice as many if that makes all slices equally long.
    """
    least = -(-n // loss_chunk)
    words = -(-v // next((slices for slices in range(least, 2 * least + 1) if v % slices == 0), least))
    return -(-v // words), words


def slice_by_slice(c: ModelAtWork, function, w_Dv, words_v, n: int):
    """Apply function(w_Du, *words_u) to slices of u vocabulary ids. Returns the results, stacked.

    n        number of tokens for which the function computes logits; see `vocabulary_slices`
    words_v  arrays with one entry per vocabulary id, such as ids and biases; the last slice is padded with -1
    Gathers the next slice while the function runs on the current one; gradients are reduce-scattered the same way. The
    backward pass recomputes every slice except the last.
    Shapes: [D/shards, v], [v] each -> [slices, ..]. Sends: (shards - 1)/shards of the table. Backward: the same for
    its gradient.
    """
    v = w_Dv.shape[-1]
    slices, u = vocabulary_slices(c.work.loss_chunk, n, v)
    w_kDu = jnp.moveaxis(jnp.pad(w_Dv, ((0, 0), (0, slices * u - v))).reshape(-1, slices, u), 1, 0)
    cut = lambda x_v: jnp.pad(x_v, (0, slices * u - v), constant_values=-1).reshape(slices, u)
    words_ku = jax.tree.map(cut, words_v)
    gather = lambda w_Du: w_Du if c.work.gather == "step" else gather_for_layer(w_Du, SLICED, dim=0)

    def step(w_Du, ahead_and_words):
        ahead_Du, words_u = ahead_and_words
        return gather(ahead_Du), jax.checkpoint(function)(w_Du, *words_u)

    but_last, last_u = (jax.tree.map(lambda x_ku, k=k: x_ku[k], words_ku) for k in (slice(-1), -1))
    last_Du, results_k = jax.lax.scan(step, gather(w_kDu[0]), (w_kDu[1:], but_last))
    last = function(last_Du, *last_u)
    return jax.tree.map(lambda x_k, x: jnp.concatenate((x_k, x[None])), results_k, last)
