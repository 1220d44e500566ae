"""Wires behind products: a layer's weights on their way while another is computed, and positions while others are.

The positions of TENSOR neighbours arrive and leave in parts, those of CONTEXT neighbours pass by in a ring, and weights
are gathered a layer ahead, and their gradients added up a layer later (`scan_ahead`). The same bytes travel as if all
waited for them; a compiler finds products to run meanwhile.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from config import AXES, ModelConfig
from kernels.attention import partial_attention
from sharding import (
    CONTEXT,
    TENSOR,
    all_gather,
    around,
    as_tuple,
    axis_index,
    axis_size,
    back,
    branches,
    in_order,
    joined,
    parted,
    platform,
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


# Weights --------------------------------------------------------------------------------------------------------------


def reduce_scatter_in_parts(partial, axes, *, dim, turn=0):
    """`reduce_scatter` by permutes: products may run beside each, where a compiler makes the whole wait.

    turn  sums of different turns, 0 to TURNS - 1, use different links of a torus at the same time
    Along an axis, the last one first, devices are numbered in `digits`. Those that differ in one digit alone exchange
    what is the other's, and add; then those that differ in the next, on what is left: with n = 2^k, k permutes, of half
    the array, a quarter, and so on.
    Sends and backward: as reduce_scatter. Source: recursive halving, https://doi.org/10.1177/1094342005051521.
    """

    def in_parts(x):
        sizes = {axis: axis_size(axis) for axis in as_tuple(axes)}
        left = [(axis, digit) for axis, n in sizes.items() for digit in reversed(digits_of(n))]  # a dim of x each
        order = [(axis, digit) for axis, n in reversed(sizes.items()) for digit in digits(n, turn)]
        x = x.reshape(*x.shape[:dim], *(digit.factor for _, digit in left), -1, *x.shape[dim + 1 :])
        for axis, digit in order:
            here, place = axis_index(axis), dim + left.index((axis, digit))
            part = functools.partial(jax.lax.dynamic_index_in_dim, x, axis=place, keepdims=False)
            x = part(digit.other(here, 0))
            for by in range(1, digit.factor):
                pairs = [(i, digit.there(i, by)) for i in range(sizes[axis])]
                x += jax.lax.ppermute(part(digit.other(here, by)), axis, pairs)
            left.remove((axis, digit))
        return x

    whole = branches() and platform() == "cpu"  # see `shift`, why
    return reduce_scatter(partial, axes, dim=dim) if whole else in_parts(partial)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weights(x, axes, dim, turn=0):
    """`all_gather` whose gradient comes back by `reduce_scatter_in_parts`."""
    return all_gather(x, axes, dim=dim)


def _gradient_in_parts(axes, dim, turn, _, d):
    with jax.named_scope("gradients_in_parts"):  # by which the planner knows them
        return (reduce_scatter_in_parts(d, axes, dim=dim, turn=turn),)


gather_weights.defvjp(lambda x, axes, dim, turn: (gather_weights(x, axes, dim, turn), None), _gradient_in_parts)

TURNS = 3  # a torus has as many axes


class Digit(NamedTuple):
    """One of the digits that number the devices along an axis."""

    factor: int
    stride: int  # what a device's number is larger by, if this digit is larger by 1

    def other(self, i, by: int):
        """The digit of the device `by` places on."""
        return (i // self.stride + by) % self.factor

    def there(self, i, by: int):
        """The number of the device `by` places on from device i, around the end of this digit."""
        return i + (self.other(i, by) - self.other(i, 0)) * self.stride


def digits_of(n: int) -> list[Digit]:
    """The digits that number n devices, one for each prime factor of n; the last one, of stride 1, first."""
    factors = prime_factors(n)[::-1]
    return [Digit(factor, math.prod(factors[:k])) for k, factor in enumerate(factors)]


def digits(n: int, turn: int = 0) -> list[Digit]:
    """`digits_of` n devices, in the order in which they exchange.

    From the last digit on they are cut into three runs, each about an axis of a torus: the first of a run is the one
    along which devices are neighbours. Turn 0 takes the first of each run, then the second of each; turn 1 likewise,
    beginning with the second run. So three sums at a time use different links, and short ways for most of their bytes.
    """
    found = digits_of(n)
    length = max(-(-len(found) // TURNS), 1)
    runs = [found[i : i + length] for i in range(0, len(found), length)]
    first = turn % max(len(runs), 1)
    return [run[i] for i in range(length) for run in runs[first:] + runs[:first] if i < len(run)]


SMALL = 1 / 32  # share of the largest matrix


def deal(sizes: list[int], at_once=False) -> list[int | None]:
    """The turn of each matrix in which its gradient is scattered: the next one goes where least goes.

    at_once  small ones have none, None: a permute for each digit is more of a program than their bytes are worth
    """
    total, turns = [0] * TURNS, []
    for size in sizes:
        small = at_once and size < SMALL * max(sizes)
        turns.append(None if small else total.index(min(total)))
        if not small:
            total[turns[-1]] += size
    return turns


def prime_factors(n: int) -> list[int]:
    """The smallest last."""
    least = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [*prime_factors(n // least), least] if least else []


def at(tree, index):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def apart(pull, known):
    """Split what a backward pass needs (`pull`, from jax.vjp) into arrays to keep and those that are `known` anyway."""
    leaves, tree = jax.tree.flatten(pull)
    places = {id(x): number for number, x in enumerate(jax.tree.leaves(known))}
    place = [places.get(id(leaf)) for leaf in leaves]
    return [leaf for leaf, number in zip(leaves, place, strict=True) if number is None], (tree, place)


def together(how, kept, known):
    """The inverse of `apart`."""
    (tree, place), kept, known = how, iter(kept), jax.tree.leaves(known)
    return jax.tree.unflatten(tree, [next(kept) if number is None else known[number] for number in place])


def scan_ahead(layer, gather, w_stack, x, context, peel=False, hold=False, once=False):
    """Apply stacked layers in order: `jax.lax.scan` of layer(gather(w), x, one, shared), gathered one layer ahead.

    layer    fn(weights, x, one, shared) -> (x, y)
    gather   fn(slices of one layer) -> its weights, linear
    context  (stacked, shared): what a layer reads besides; the first has an entry for each, and neither a gradient
    peel     the last layer, and on the way back the first one too, stand outside of the loop: a program of a layer more
             forward, two more back, and nothing is sent in vain
    hold     with peel: keep the last layer's weights for the way back, which begins with them
    once     this is one of several passes of a step that gathers weights once. In the first one w_stack is `First`, and
             its weights are returned beside the y; then it is those; in the last one it is `Last`: on the way back a
             layer's gradient is added to those of the passes before, and the sum is scattered while the next one
             computes its own. What is kept is the same in all, in the same order: what a pass has kept as `First` goes
             back as `Last` too
    Autodiff of such a loop would keep every layer's weights. So the way back is written here: weights are gathered
    again, the layer before's while this one's gradients are computed, and a layer's gradients are scattered while the
    next one's are.
    Returns x and the y of all layers. It holds the weights of two layers at once, on the way back a gradient too.
    Sends: as gathered when used, and a layer more: of the last one's weights, and on the way back of the first one's,
    and of no gradient. With peel none of it; with hold a layer less: the last one's, on the way back. With once all
    goes once a step, and a layer more of weights.
    """
    everywhere = lambda *args: vary(layer(*args), AXES)  # as a loop's carry has to be, and its gradient
    if once:
        return _once(everywhere, gather, *vary((w_stack, x, context), AXES))
    # The context too: else its types on the way back could be others, and what a layer keeps in another order.
    return _scan(everywhere, gather, (peel, hold), *vary((w_stack, x, context), AXES))


def _run(layer, gather, peel, w_stack, x, context, keep):
    """Returns x, what the loop's layers made besides, what a peeled last one made, and the last one's weights."""
    stacked, shared = context
    last = len(jax.tree.leaves(w_stack)[0]) - 1

    def step(carry, number):
        x, w = carry
        w_next = gather(at(w_stack, jnp.minimum(number + 1, last)))
        x, out = keep(layer, w, x, (at(stacked, number), shared))
        return (x, w_next), vary(out, AXES)

    (x, w), outs = jax.lax.scan(step, (x, gather(at(w_stack, 0))), jnp.arange(last if peel else last + 1))
    if not peel:
        return x, outs, None, w
    x, out = keep(layer, w, x, (at(stacked, last), shared))
    return x, outs, vary(out, AXES), w


def _plain(layer, w, x, context):
    return layer(w, x, *context)


def _kept(layer, w, x, context):
    """Run a layer; returns also what its backward pass must be kept besides its weights and context."""
    (x_out, y), pull = jax.vjp(lambda w, x, context: layer(w, x, *context), w, x, context)
    kept, how = apart(pull, (w, context))
    return x_out, y, kept, how


def _stacked(outs, of_last):
    """What all layers made; the last one's came alone where it is peeled, else it is None."""
    if of_last is None:
        return outs
    return jax.tree.map(lambda xs, x: jnp.append(xs, x[None], axis=0), outs, of_last)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scan(layer, gather, ends, w_stack, x, context):
    x, *y, _ = _run(layer, gather, ends[0], w_stack, x, context, _plain)
    return x, _stacked(*y)


def _forward(layer, gather, ends, w_stack, x, context):
    def keep(layer, w, x, context):
        x, y, kept, _ = _kept(layer, w, x, context)
        return x, (y, kept)

    peel, hold = ends
    x, outs, of_last, w = _run(layer, gather, peel, w_stack, x, context, keep)
    (y, kept), (y_last, kept_last) = outs, of_last or (None, None)
    return (x, _stacked(y, y_last)), (w_stack, w if peel and hold else None, kept, kept_last, context)


def _backward(layer, gather, ends, saved, d_out):
    w_stack, w, kept, kept_last, context = saved
    weights = lambda number: gather(at(w_stack, number))
    scatter = lambda number, d_w: _scattered(gather, w_stack, d_w)
    w = weights(len(jax.tree.leaves(w_stack)[0]) - 1) if w is None else w
    d_stack, dx, _ = _run_back(layer, weights, scatter, ends[:1] * 2, w, w_stack, (kept, kept_last), context, d_out)
    return d_stack, dx, None


_scan.defvjp(_forward, _backward)


def _scattered(gather, w_stack, d_w):
    """A layer's gradient, added up where its slices lie: what `gather` is the other way."""
    return jax.vjp(gather, at(w_stack, 0))[1](d_w)[0]


def _run_back(layer, weights, scatter, peel, w, w_stack, kept, context, d_out, beside=None):
    """The way back of layers, and behind each the scattering of the next one's gradient.

    weights  fn(number) -> a layer's weights, asked for a layer ahead, if w are the last one's; else when they are used
    scatter  fn(number, gradient of a layer's weights) -> that of its part of w_stack
    peel     whether the last layer stands before the loop, and the first one behind it
    kept     of the layers in a stack, and of the last one alone if it came alone
    beside   arrays that have to be there before the loop
    Returns the gradients of w_stack and of x, and what was beside.
    """
    (stacked, shared), (dx, dy), (kept, kept_last) = context, d_out, kept
    last = len(jax.tree.leaves(w_stack)[0]) - 1
    like = jax.eval_shape(lambda: weights(0)) if w is None else w
    how = _how(layer, like, dx, (at(stacked, 0), shared))
    nothing = lambda tree: vary(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), AXES)

    def step(carry, number, kept_here=None):
        dx, w, d_later, d_stack = carry
        here = weights(number) if w is None else w
        # Outside of the loop none is gathered, if nobody uses it.
        w_next = None if w is None else weights(jnp.maximum(number - 1, 0))
        d_stack = d_stack if d_later is None else put(d_stack, number + 1, d_later)
        kept_here = at(kept, number) if kept_here is None else kept_here
        pull = together(how, kept_here, (here, (at(stacked, number), shared)))
        d_w, dx, _ = pull((dx, at(dy, number)))
        return (dx, w_next, d_w, d_stack), None

    def put(d_stack, number, d_w):
        """Write a layer's gradient, once it is scattered; nowhere, if there is no such layer."""
        return jax.tree.map(lambda d, x: d.at[number].set(x, mode="drop"), d_stack, scatter(number, d_w))

    before, behind = peel
    carry = dx, w, None if before else nothing(like), nothing(w_stack)
    if before:
        carry, _ = step(carry, last, kept_last)
    if beside is not None:
        carry, beside = jax.lax.optimization_barrier((carry, beside))
    if last + 1 > before:
        carry, _ = jax.lax.scan(step, carry, jnp.arange(last - before, behind - 1, -1))
        carry = step(carry, 0)[0] if behind else carry
    dx, _, d_first, d_stack = carry
    return put(d_stack, 0, d_first), dx, beside


def _how(layer, w, x, context):
    """How what a layer keeps becomes its backward pass, see `apart`; nothing of it is computed."""
    found = []
    jax.eval_shape(lambda *args: found.append(_kept(layer, *args)[-1]), w, x, context)
    return found[0]


# Weights, once a step -------------------------------------------------------------------------------------------------


@struct.dataclass
class First:
    """Stacked weights in the first pass of a step that gathers them once: they are still in slices."""

    slices: Any


@struct.dataclass
class Last:
    """Stacked weights in the last pass of such a step, whose gradients are added to all before, and scattered."""

    slices: Any  # zeros, float32: the sums' slices are their gradient
    whole: Any
    sums: Any  # of the gradients of the passes before, float32
    counts: Any  # whether this pass does: of an idle stage nothing is added
    beside: Any  # arrays that are to arrive while the last layer's gradients are computed; they are its gradient
    gather: Callable = struct.field(pytree_node=False)  # of slices in float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _once(layer, gather, w, x, context):
    return _once_forward(layer, gather, w, x, context)[0]


def _once_forward(layer, gather, w, x, context):
    def keep(layer, w, x, context):
        x, y, kept, _ = _kept(layer, w, x, context)
        return x, vary((y, kept), AXES)

    def keep_weights(layer, w, x, context):
        x, (y, kept) = keep(layer, w, x, context)
        return x, ((y, w), kept)

    stacked, shared = context
    if isinstance(w, First):
        x, (y, kept), _, _ = _run(layer, gather, False, w.slices, x, context, keep_weights)
    else:
        step = lambda x, one: keep(layer, one[0], x, (one[1], shared))
        x, (y, kept) = jax.lax.scan(step, x, (w.whole if isinstance(w, Last) else w, stacked))
    return (x, y), (w, kept, context)


def _once_backward(layer, gather, saved, d_out):
    w, kept, context = saved
    if isinstance(w, Last):
        whole = lambda number: at(w.whole, number)
        add = lambda total, d: total + jnp.where(w.counts, d, 0).astype(total.dtype)
        scatter = lambda number, d_w: _scattered(w.gather, w.slices, jax.tree.map(add, at(w.sums, number), d_w))
        way = layer, whole, scatter, (True, False), None, w.slices, (kept, None), context, d_out
        d_slices, dx, beside = _run_back(*way, w.beside)
        return Last(d_slices, None, None, None, beside, w.gather), dx, None

    (dx, dy), (stacked, shared) = d_out, context
    how = _how(layer, at(w, 0), dx, (at(stacked, 0), shared))

    def step(dx, one):
        w, here, kept, dy = one
        d_w, dx, _ = together(how, kept, (w, (here, shared)))((dx, dy))
        return dx, d_w

    dx, d_w = jax.lax.scan(step, dx, (w, stacked, kept, dy), reverse=True)
    return d_w, dx, None


_once.defvjp(_once_forward, _once_backward)
