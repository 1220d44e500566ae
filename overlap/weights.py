"""When slices of weights are joined: for each use, or once a step; the vocabulary's table slice by slice, one ahead.

Joined for each use, a device holds one layer's whole matrices at a time, and sends each of them as often as it is used;
joined once a step, it holds all of its stage's, and sends them once. Backward each is a reduce-scatter of gradients.
"""

import jax
import jax.numpy as jnp

from config import ModelAtWork
from sharding import AXES, SLICED, all_gather, map_sliced, vary


def cast(w, c: ModelAtWork, *names):
    """Matrices in the compute dtype, sliced as they are; norms and biases stay as they are.

    names  only these parameters, as a tuple; none: the whole class, and the classes in it
    """
    return map_sliced(lambda x, dim, axes, exact: x if exact else x.astype(c.compute_dtype), w, *names)


def gathered(w, c: ModelAtWork, *names):
    """The same with their slices joined. Sends: (n - 1)/n of every matrix. Backward: reduce-scatter, the same bytes."""

    def join(x, dim, axes, exact):
        return all_gather(x if exact else x.astype(c.compute_dtype), axes, dim=dim)

    return map_sliced(join, w, *names)


# gather: as a step holds weights, and as one use of them takes what the step holds
WHEN = {"layer": (cast, gathered), "step": (gathered, cast)}


def held_by_step(w, c: ModelAtWork):
    """Weights as a step holds them, in the compute dtype."""
    return WHEN[c.work.gather][0](w, c)


def at_use(w, c: ModelAtWork, *names):
    """Weights whole, for one use of them: of a layer, or of the vocabulary's table."""
    return WHEN[c.work.gather][1](w, c, *names)


def ready_for_autodiff(params, c: ModelAtWork):
    """Parameters as a step holds them that autodiff goes back through; they may differ on every device.

    Said here, outside of all loops, so that what goes backward here happens once a step: the sum over the axes along
    which a parameter is the same, and, gathered once a step, the reduce-scatter. In the parameters' dtype, so that the
    gradients of microbatches add up in it. The barrier keeps them there: XLA would rather sum first, and convert then.
    """
    params = jax.lax.optimization_barrier(vary(params, AXES))
    if c.work.gather == "layer":
        return params  # at_use casts them
    return jax.tree.map(lambda w, p: w.astype(p.dtype), held_by_step(params, c), params)


def tokens_go_to_table(c: ModelAtWork, tokens: int, words: int) -> bool:
    """Whether tokens are sent to the slices of an embedding table of so many words, not its slices to the tokens."""
    return c.work.gather == "layer" and tokens < words  # then they are less to send


def vocabulary_slices(loss_chunk: int, n: int, v: int) -> tuple[int, int]:
    """How many slices of v words there are, and the words of one: n tokens' logits of it are no more than allowed.

    As few as that takes, or up to twice as many, if a number of them divides v; else the last one is shorter.
    """
    least = -(-n // loss_chunk)
    words = -(-v // next((slices for slices in range(least, 2 * least + 1) if v % slices == 0), least))
    return -(-v // words), words


def slice_by_slice(c: ModelAtWork, function, w_Dv, words_v, n: int):
    """function(w_Du, *words_u) of slices of a table whose rows still lie in slices; what it returns is stacked.

    n        tokens that the function makes logits of: `loss_chunk` of them may have those of all words at once
    words_v  arrays of the words: their ids, biases; -1, where the last slice has none
    The next slice is gathered while this one is used; a gradient goes back likewise. The backward pass makes all of it
    again, but for the last slice.
    Shapes: [D/n, v], [v] each -> [slices, ..]. Sends: (n - 1)/n of the table. Backward: the same, of its gradient.
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
    last_Du, made_k = jax.lax.scan(step, gather(w_kDu[0]), (w_kDu[1:], but_last))
    last = function(last_Du, *last_u)
    return jax.tree.map(lambda x_k, x: jnp.concatenate((x_k, x[None])), made_k, last)
