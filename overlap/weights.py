"""Gather weight shards for each use or once per step; gather the vocabulary table slice by slice, one slice ahead.

Gathered for each use, one layer's matrices are unsharded at a time, and each use sends them again. Gathered once per
step, all matrices of the stage are, and are sent once. The backward pass of either reduce-scatters the gradients.
"""

import jax
import jax.numpy as jnp

from config import ModelAtWork
from sharding import AXES, SLICED, all_gather, map_fsdp_sharded, vary


def cast(w, c: ModelAtWork, *names):
    """Cast matrices to the compute dtype, still sharded; norms and biases keep theirs.

    names  return only these parameters, as a tuple; without names, the whole class and the classes in it
    """
    return map_fsdp_sharded(lambda x, dim, axes, exact: x if exact else x.astype(c.compute_dtype), w, *names)


def gather_weights(w, c: ModelAtWork, *names):
    """Cast and gather. Sends: (n - 1)/n of every matrix. Backward: reduce-scatter, the same bytes."""

    def join(x, dim, axes, exact):
        return all_gather(x if exact else x.astype(c.compute_dtype), axes, dim=dim)

    return map_fsdp_sharded(join, w, *names)


# work.gather -> what is done to the weights once per step, and at each use
WHEN = {"layer": (cast, gather_weights), "step": (gather_weights, cast)}


def held_by_step(w, c: ModelAtWork):
    """Prepare weights once per step, in the compute dtype: unsharded if `work.gather` is "step", else sharded."""
    return WHEN[c.work.gather][0](w, c)


def at_use(w, c: ModelAtWork, *names):
    """Return the unsharded weights for one use, of a layer or of the vocabulary table."""
    return WHEN[c.work.gather][1](w, c, *names)


def ready_for_autodiff(params, c: ModelAtWork):
    """Prepare parameters for a step that autodiff differentiates; autodiff treats them as different on every device.

    This is called outside all loops, so its backward pass runs once per step: the sum over the axes along which a
    parameter is replicated and, if gathered once per step, the reduce-scatter. The result has the parameters' dtype, in
    which microbatch gradients then accumulate. Without the barrier XLA would sum first and convert afterwards.
    """
    params = jax.lax.optimization_barrier(vary(params, AXES))
    if c.work.gather == "layer":
        return params  # at_use casts them
    return jax.tree.map(lambda w, p: w.astype(p.dtype), held_by_step(params, c), params)


def tokens_go_to_table(c: ModelAtWork, tokens: int, words: int) -> bool:
    """Whether tokens are sent to the shards of an embedding table with this many words, instead of gathering it."""
    return c.work.gather == "layer" and tokens < words  # then the tokens are fewer bytes


def vocabulary_slices(loss_chunk: int, n: int, v: int) -> tuple[int, int]:
    """Return the number of slices of a v-word vocabulary and the words per slice; `loss_chunk` limits n tokens' logits.

    Takes the fewest slices within the limit, or up to twice as many if that divides v; else the last slice is shorter.
    """
    least = -(-n // loss_chunk)
    words = -(-v // next((slices for slices in range(least, 2 * least + 1) if v % slices == 0), least))
    return -(-v // words), words


def slice_by_slice(c: ModelAtWork, function, w_Dv, words_v, n: int):
    """Apply function(w_Du, *words_u) to slices of a table whose rows are sharded; return the stacked results.

    n        tokens for which the function computes logits; `loss_chunk` tokens may have logits of all words at once
    words_v  arrays with an entry per word, such as ids and biases; padded with -1 in the last slice
    The next slice is gathered while this one is used, and gradients are reduced likewise. The backward pass recomputes
    everything except the last slice.
    Shapes: [D/n, v], [v] each -> [slices, ..]. Sends: (n - 1)/n of the table. Backward: the same for its gradient.
    """
    v = w_Dv.shape[-1]
    slices, u = vocabulary_slices(c.work.loss_chunk, n, v)
    w_kDu = jnp.moveaxis(jnp.pad(w_Dv, ((0, 0), (0, slices * u - v))).reshape(-1, slices, u), 1, 0)
    cut = lambda x_v: jnp.pad(x_v, (0, slices * u - v), constant_values=-1).reshape(slices, u)
    words_ku = jax.tree.map(cut, words_v)
    gather = lambda w_Du: w_Du if c.work.gather == "step" else all_gather(w_Du, SLICED, dim=0)

    def step(w_Du, ahead_and_words):
        ahead_Du, words_u = ahead_and_words
        return gather(ahead_Du), jax.checkpoint(function)(w_Du, *words_u)

    but_last, last_u = (jax.tree.map(lambda x_ku, k=k: x_ku[k], words_ku) for k in (slice(-1), -1))
    last_Du, results_k = jax.lax.scan(step, gather(w_kDu[0]), (w_kDu[1:], but_last))
    last = function(last_Du, *last_u)
    return jax.tree.map(lambda x_k, x: jnp.concatenate((x_k, x[None])), results_k, last)
