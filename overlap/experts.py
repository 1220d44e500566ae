"""How tokens reach their experts along EXPERT: `work.expert_exchange` is `gathered` or `routed`. No token is dropped.

`gathered` all-gathers all tokens, and every device sorts all of them. `routed` sends a token only to the devices that
have at least one of its experts, once to each, and sums what its experts return before it is sent back.

How many tokens go where is known only when the step runs, but all arrays have a fixed size. So `routed` works in
rounds. Each round sends buffers for the expected number of tokens and SPARE more; what does not fit waits for the next
round. If the router is balanced, there is one round. In the worst case, when all tokens choose the same device, there
are about as many rounds as devices along EXPERT. Memory is that of one round.

In shapes, N is this device's tokens, k is top_k, n the devices along EXPERT, j one of them, e the experts of a device,
C the tokens that a round sends to one device, and R the rows (a token and one of its local experts) of a round.
Source of sending a token once per device: DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
"""

import functools
import math

import jax
import jax.numpy as jnp

from compile.hlo import COUNTED_ONCE
from config import ModelAtWork
from sharding import (
    EXPERT,
    KERNELS_AS_CALLS,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    platform,
    reduce_scatter,
    vary,
)

float32 = jnp.float32
SPARE = 0.2  # a round takes this much more than a balanced router sends


def apply_experts(c: ModelAtWork, function, weights, x_ND, gates_Nk, experts_Nk):
    """Apply to each token its experts and sum their results, multiplied by its gates. Shapes: [N, D] -> [N, D].

    function    fn(weights, rows [A, D], gates [A], sizes [e]) -> [A, D]. The rows are sorted by expert, and sizes
                counts those of each local expert. Rows after the last group give 0
    weights     of the local experts
    experts_Nk  the experts of each token, all different
    """
    if is_routed(c, axis_size(EXPERT)):
        return routed(c, function, weights, x_ND, gates_Nk, experts_Nk)
    return gathered(c, function, weights, x_ND, gates_Nk, experts_Nk)


def is_routed(c: ModelAtWork, n: int) -> bool:
    return c.work.expert_exchange == "routed" and n > 1 and c.n_experts > 0 and not c.capacity_factor


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def permute_rows(x_ND, order_A, inverse_A, copies=1):
    """Copy each row `copies` times and reorder the copies. The backward pass gathers with the inverse order,
    because scatters are slow. Shapes: [N, D] -> [N * copies, D]."""
    return x_ND[order_A // copies]


def _permute_backward(copies, inverse_A, dx_AD):
    return jnp.sum(dx_AD[inverse_A].reshape(-1, copies, dx_AD.shape[-1]), axis=1), None, None


_permute_forward = lambda x, order, inverse, copies: (permute_rows(x, order, inverse, copies), inverse)
permute_rows.defvjp(_permute_forward, _permute_backward)


def bias_of_rows(sizes_e, bias_eX, gates_A):
    """Return for each row the bias of its expert, multiplied by its gate, and 0 for rows after the last group.

    A matmul with one-hot rows, because the gradient of a gather is a scatter, which is slow, and of a product with the
    gates would need all biases again. It costs e/D of a matmul with the weights. Shapes: [e], [e, X], [A] -> [A, X].
    """
    ends_e, row_A1 = jnp.cumsum(sizes_e), jnp.arange(len(gates_A))[:, None]
    is_in_Ae = (row_A1 >= (ends_e - sizes_e)[None]) & (row_A1 < ends_e[None])
    return (is_in_Ae * gates_A[:, None]) @ bias_eX


def local_groups(c: ModelAtWork, experts_A):
    """Return the index of each expert on this device, or e if it is on another one; and the counts of the first e."""
    e = c.n_experts // axis_size(EXPERT)
    local_A = experts_A - axis_index(EXPERT) * e
    group_A = jnp.where((local_A >= 0) & (local_A < e), local_A, e)
    return group_A, jnp.sum(jax.nn.one_hot(group_A, e, dtype=jnp.int32), axis=0)


def gathered(c: ModelAtWork, function, weights, x_ND, gates_Nk, experts_Nk):
    """All-gather, sort by expert, apply the experts, reduce-scatter.

    Sends over EXPERT (n devices): the activations of n - 1 devices in each of the two collectives.
    """
    x_ND, *gates_and_experts = (all_gather(x, EXPERT, dim=0) for x in (x_ND, gates_Nk, experts_Nk))
    gates_A, experts_A = (x.reshape(-1) for x in gates_and_experts)
    group_A, sizes_e = local_groups(c, experts_A)  # assignments to remote experts form the last group
    order_A = jnp.argsort(group_A, stable=True)
    inverse_A = jnp.argsort(order_A)
    rows_AD = permute_rows(x_ND, order_A, inverse_A, c.top_k)
    gates_A = permute_rows(gates_A[:, None], order_A, inverse_A)[:, 0]
    out_AD = function(weights, rows_AD, gates_A, sizes_e)
    partial_ND = jnp.sum(permute_rows(out_AD, inverse_A, order_A).reshape(*x_ND.shape[:1], c.top_k, -1), axis=1)
    return reduce_scatter(partial_ND, EXPERT, dim=0)


# Routed tokens only ---------------------------------------------------------------------------------------------------


def reached(c: ModelAtWork, n: int) -> float:
    """Return the fraction of the tokens that have an expert on a given one of n devices, if all are equally likely."""
    n_groups, per_token = c.expert_groups
    e, size = c.n_experts // n, c.n_experts // n_groups
    here = max(e // size, 1)  # groups of which the device has experts
    total = 0.0
    for chosen in range(min(here, per_token) + 1):  # by the token, of these groups
        likely = math.comb(here, chosen) * math.comb(n_groups - here, per_token - chosen)
        missed = math.comb(per_token * size - chosen * min(e, size), c.top_k)
        total += likely / math.comb(n_groups, per_token) * (1 - missed / math.comb(per_token * size, c.top_k))
    return total


def round_sizes(c: ModelAtWork, N: int, n: int) -> tuple[int, int]:
    """Return how many tokens, and how many of their rows, a round sends at most from one device to another."""
    with_spare = lambda expected: -(-math.ceil((1 + SPARE) * expected) // 8) * 8
    tokens = min(with_spare(N * reached(c, n)), N)
    return tokens, min(with_spare(N * c.top_k / n), tokens * min(c.top_k, c.n_experts // n))


def round_arrays(c: ModelAtWork, N: int, n: int) -> tuple[int, int]:
    """Return C and R: the tokens that a round sends from one device to another, and the rows that a device gets."""
    (tokens, rows), most = round_sizes(c, N, n), min(c.top_k, c.n_experts // n)
    return tokens, n * min(rows + most - 1, tokens * most)  # the last token may have more rows than are left


def traced_arrays(c: ModelAtWork, N: int) -> tuple[int, int]:
    """Return C and R of this device. A plan traces arrays whose sizes are products of letters, and then scales them."""
    return (N, N * c.top_k) if platform() == KERNELS_AS_CALLS else round_arrays(c, N, axis_size(EXPERT))


def assign_rounds(c: ModelAtWork, experts_Nk):
    """Return in which round each token is sent to each device, [n, N]; -1: it has no expert there.

    Tokens are sent in order. A round begins at every multiple of the tokens that fit in one, and of their rows.
    """
    (N, _), n = experts_Nk.shape, axis_size(EXPERT)
    tokens, rows = round_sizes(c, N, n)
    rows_Nn = jnp.sum(jax.nn.one_hot(experts_Nk // (c.n_experts // n), n, dtype=jnp.int32), axis=1)
    sent_Nn = (rows_Nn > 0).astype(jnp.int32)
    multiples = lambda count_Nn, size: (jnp.cumsum(count_Nn, axis=0) - count_Nn) // size
    begins = lambda multiple_Nn: jnp.diff(multiple_Nn, axis=0, prepend=0) > 0
    begins_Nn = begins(multiples(sent_Nn, tokens)) | begins(multiples(rows_Nn, rows))
    return jnp.where(sent_Nn > 0, jnp.cumsum(begins_Nn, axis=0), -1).T


def send(x_jCX):
    """Send row j to device j, which gets one row from each device. Backward: the same. Shapes: [n, C, X] -> same."""
    return all_to_all(x_jCX, EXPERT, split_dim=0, join_dim=0)


@jax.custom_vjp
def take(x_ND, index_A, place_NX):
    """Copy rows of x, with 0 for an index out of bounds. The backward pass gathers too (`collect`), because scatters of
    rows are slow and take minutes to compile for TPUs. Shapes: [N, D] -> [A, D].

    place_NX  where the copies of each row are in the result; an index out of bounds means nowhere
    """
    return x_ND.at[index_A].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(y_AD, index_A, place_NX):
    """Sum the copies of each row, in float32: the transpose of `take`. Shapes: [A, D] -> [N, D]."""
    copies_NXD = y_AD.at[place_NX].get(mode="fill", fill_value=0)
    return jnp.sum(copies_NXD, axis=1, dtype=float32).astype(y_AD.dtype)


take.defvjp(lambda x, *where: (take(x, *where), where), lambda where, d_x: (collect(d_x, *where), None, None))
collect.defvjp(lambda y, *where: (collect(y, *where), where), lambda where, d_y: (take(d_y, *where), None, None))


def indices_of(place, size: int):
    """Invert a placement: return, for each of `size` places, the index of the entry that is there, or if there is none,
    an index out of bounds. Entries with a place out of bounds are nowhere."""
    flat = place.reshape(-1)
    empty = jnp.full(size, flat.size, jnp.int32)
    return empty.at[flat].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop", unique_indices=True)


def choose_tokens(c: ModelAtWork, number, experts_Nk, round_jN):
    """Choose the tokens of a round. Returns which token is at each place of the buffer [n, C] and the places of each
    token (see `take`), and the experts [n, C, k] on the devices that get the tokens. An empty place has experts -1."""
    (N, k), n = experts_Nk.shape, axis_size(EXPERT)
    C, _ = traced_arrays(c, N)
    is_sent_jN = round_jN == number
    place_jN = jnp.cumsum(is_sent_jN, axis=1) - 1 + C * jnp.arange(n)[:, None]
    place_jN = jnp.where(is_sent_jN, place_jN, n * C)
    index_A = indices_of(place_jN, n * C)
    index_A = jnp.where(index_A == n * N, N, index_A % N)
    experts_jCk = experts_Nk.at[index_A].get(mode="fill", fill_value=-1).reshape(n, C, k)
    return (index_A, place_jN.T), send(experts_jCk)


def sums_of_round(c: ModelAtWork, function, where, experts_jCk, weights, x_ND, gates_Nk):
    """Send the tokens of a round, and return the sums of what the experts of this device make of those that it gets.
    Shapes: [N, D] -> [n, C, D]. Sends over EXPERT (n devices): (n - 1)/n of the buffer [n, C, D], and of its gates."""
    k, (n, C, _) = c.top_k, experts_jCk.shape
    x_jCD, gates_jCk = (send(take(x, *where).reshape(n, C, -1)) for x in (x_ND, gates_Nk))
    _, R = traced_arrays(c, len(x_ND))
    # Sort by expert: the place of a row is the number of rows of earlier experts, and of earlier rows of its own.
    group_A, sizes_e = local_groups(c, experts_jCk.reshape(-1))
    is_in_Ae = jax.nn.one_hot(group_A, len(sizes_e), dtype=jnp.int32)
    place_Ae = jnp.cumsum(is_in_Ae, axis=0) - 1 + (jnp.cumsum(sizes_e) - sizes_e)[None]
    place_A = jnp.where(group_A < len(sizes_e), jnp.sum(place_Ae * is_in_Ae, axis=1), R)
    order_R = indices_of(place_A, R)
    of_tokens, of_gates = (order_R // k, place_A.reshape(-1, k)), (order_R, place_A[:, None])
    rows_RD, gates_R1 = take(x_jCD.reshape(n * C, -1), *of_tokens), take(gates_jCk.reshape(-1, 1), *of_gates)
    return collect(function(weights, rows_RD, gates_R1[:, 0], sizes_e), *of_tokens).reshape(n, C, -1)


def routed(c: ModelAtWork, function, weights, x_ND, gates_Nk, experts_Nk):
    """Send tokens to the devices of their experts, in rounds. It saves only its inputs, whatever `work.remat` says.

    Sends over EXPERT, in each round: the tokens, and the sums of their results. Backward: the tokens again, and the
    gradients of both.
    """
    inputs = weights, x_ND, gates_Nk
    everywhere = set().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves((inputs, experts_Nk))))
    everywhere = sorted(everywhere | {EXPERT})
    weights, x_ND, gates_Nk, experts_Nk = vary((*inputs, experts_Nk), everywhere)
    return _routed(c, function, weights, x_ND, gates_Nk, experts_Nk)


def sum_over_rounds(c: ModelAtWork, experts_Nk, zeros, of_round):
    """Sum of_round(where, experts_jCk) over as many rounds as the device with the most tokens to send needs."""
    round_jN = assign_rounds(c, experts_Nk)
    rounds = jax.lax.pmax(jnp.max(round_jN) + 1, EXPERT)

    def add_round(number, total):
        return jax.tree.map(jnp.add, total, of_round(*choose_tokens(c, number, experts_Nk, round_jN)))

    with jax.named_scope(COUNTED_ONCE):
        return jax.lax.fori_loop(0, rounds, add_round, vary(zeros, sorted(jax.typeof(experts_Nk).mat.varying)))


# A loop whose number of iterations is unknown while tracing has no gradient of its own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _routed(c: ModelAtWork, function, weights, x_ND, gates_Nk, experts_Nk):
    def of_round(where, experts_jCk):
        sum_jCD = send(sums_of_round(c, function, where, experts_jCk, weights, x_ND, gates_Nk))
        return collect(sum_jCD.astype(float32).reshape(-1, x_ND.shape[1]), *where)

    return sum_over_rounds(c, experts_Nk, jnp.zeros(x_ND.shape, float32), of_round).astype(x_ND.dtype)


def _forward(c, function, *inputs):
    return _routed(c, function, *inputs), inputs


def _backward(c, function, inputs, d_out_ND):
    *inputs, experts_Nk = inputs

    def of_round(where, experts_jCk):
        sum_jCD, pull = jax.vjp(functools.partial(sums_of_round, c, function, where, experts_jCk), *inputs)
        gradients = pull(send(take(d_out_ND, *where).reshape(sum_jCD.shape)))
        return jax.tree.map(lambda x: x.astype(float32), gradients)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, float32), tuple(inputs))
    total = sum_over_rounds(c, experts_Nk, zeros, of_round)
    return *jax.tree.map(lambda x, y: x.astype(y.dtype), total, tuple(inputs)), None


_routed.defvjp(_forward, _backward)
