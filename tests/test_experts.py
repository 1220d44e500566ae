"""Routed experts equal gathered ones and a loop over tokens: values, gradients, rounds, and what is sent."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sharding
from compile import ledger, ordered
from config import preset
from kernels.grouped import grouped_matmul
from overlap import experts
from sharding import EXPERT, FSDP

N, D, M = 24, 6, 10  # tokens of a device, widths
DEVICES, MESH = 4, "fsdp=2,expert=4"


def config(way: str = "routed", n_experts: int = 12, top_k: int = 3):
    sizes = {"model.n_experts": n_experts, "model.top_k": top_k, "model.d_model": D, "model.d_expert": M}
    return preset("tiny", **sizes, **{"work.expert_exchange": way, "mesh": MESH}).at_work


def rows_function(w, rows_AD, gates_A, sizes_e):
    return grouped_matmul(jnp.tanh(grouped_matmul(rows_AD, w[0], sizes_e)) * gates_A[:, None], w[1], sizes_e)


def inputs(c, seed: int = 0):
    """Return weights, tokens and gates of all 8 devices, [N * 8, ..]."""
    rng, many = np.random.default_rng(seed), 2 * DEVICES * N
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    weights = array(c.n_experts, D, M), array(c.n_experts, M, D)
    return weights, array(many, D), jnp.asarray(rng.uniform(size=(many, c.top_k)), jnp.float32)


def choices(c, how: str):
    """Return the experts of each token: spread evenly, random, or all on the last device."""
    rng, many, e = np.random.default_rng(1), 2 * DEVICES * N, c.n_experts // DEVICES
    if how == "one device":
        return np.stack([rng.permutation(e)[: c.top_k] for _ in range(many)]) + c.n_experts - e
    if how == "balanced":
        return (np.arange(many * c.top_k) % c.n_experts).reshape(many, c.top_k)
    return np.stack([rng.permutation(c.n_experts)[: c.top_k] for _ in range(many)])


@functools.cache
def compiled(c):
    """Compile fn(inputs, experts, d_out) -> (value, gradients) on 8 simulated devices."""
    mesh = sharding.make_mesh(MESH)

    def local(weights, x_ND, gates_Nk, experts_Nk, d_out_ND):
        apply = functools.partial(experts.apply_experts, c, rows_function, experts_Nk=experts_Nk)
        out, pull = jax.vjp(lambda w, x, gates: apply(w, x, gates), sharding.vary(weights, FSDP), x_ND, gates_Nk)
        d_weights, *others = pull(d_out_ND)
        return out, (sharding.psum(d_weights, FSDP), *others)

    tokens = P((FSDP, EXPERT))
    specs = P(EXPERT), tokens, tokens
    on_mesh = jax.shard_map(local, mesh=mesh, in_specs=(*specs, tokens, tokens), out_specs=(tokens, specs))
    return ordered.jit(on_mesh, mesh)


def on_one_device(weights, x_ND, gates_Nk, experts_Nk):
    """Apply to each token its experts, one after the other."""
    hidden_NkM = jnp.tanh(jnp.einsum("ND,NkDM->NkM", x_ND, weights[0][experts_Nk]))
    return jnp.einsum("NkM,Nk,NkMD->ND", hidden_NkM, gates_Nk, weights[1][experts_Nk])


@pytest.mark.parametrize("how", ["balanced", "random", "one device"])
@pytest.mark.parametrize("way", ["gathered", "routed"])
def test_every_token_meets_its_experts(way, how):
    """Catches a token that is dropped, sent twice or returned to another, a round that is missing, a gate of another
    row, and a gradient that lacks what a later round adds."""
    c = config(way)
    given, chosen = inputs(c), choices(c, how)
    d_out_ND = jnp.asarray(np.random.default_rng(2).normal(size=given[1].shape), jnp.float32)
    want, pull = jax.vjp(lambda *given: on_one_device(*given, chosen), *given)
    got, gradients = compiled(c)(*given, jnp.asarray(chosen, jnp.int32), d_out_ND)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(pull(d_out_ND)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


def rounds_of(c, chosen):
    """Return the rounds of each device's tokens, and the buffer sizes."""
    place = dict(mesh=sharding.make_mesh("expert=4"), in_specs=P(EXPERT), out_specs=P(None, EXPERT))
    rounds = jax.shard_map(functools.partial(experts.assign_rounds, c), **place)(jnp.asarray(chosen[: DEVICES * N]))
    return np.asarray(rounds).reshape(DEVICES, DEVICES, N), experts.round_sizes(c, N, DEVICES)


@pytest.mark.parametrize("how, n_experts, top_k, rounds", [
    ("balanced", 12, 3, 1), ("random", 12, 3, 1), ("random", 4, 1, 2),
    ("one device", 12, 3, 3), ("one device", 4, 1, 3), ("one device", 12, 2, 3),
])  # fmt: skip
def test_a_round_holds_what_its_buffers_hold(how, n_experts, top_k, rounds):
    """Catches buffers that overflow, which would drop tokens, and more rounds than the worst case needs."""
    c = config(n_experts=n_experts, top_k=top_k)
    chosen = choices(c, how)
    round_jiN, (tokens, rows) = rounds_of(c, chosen)
    device_Nk = (chosen[: DEVICES * N] // (n_experts // DEVICES)).reshape(DEVICES, N, top_k)
    assert tokens == math.ceil(1.2 * N * experts.reached(c, DEVICES) / 8) * 8
    for i, j in np.ndindex(DEVICES, DEVICES):
        rows_N, round_N = (device_Nk[i] == j).sum(axis=1), round_jiN[j, i]
        assert ((round_N >= 0) == (rows_N > 0)).all()
        for number in range(round_N.max() + 1):
            assert (round_N == number).sum() <= tokens
            assert rows_N[round_N == number].sum() <= rows + min(top_k, n_experts // DEVICES) - 1
    assert round_jiN.max() + 1 == rounds


@pytest.mark.parametrize("n_experts, top_k, groups, n, want", [
    (128, 8, (1, 1), 8, 1 - math.comb(112, 8) / math.comb(128, 8)),  # Qwen3: 5.3 of 8 devices
    (8, 2, (1, 1), 8, 2 / 8),  # Mixtral: an expert a device
    (256, 8, (8, 4), 8, 4 / 8 * (1 - math.comb(96, 8) / math.comb(128, 8))),  # DeepSeek-V3: a group a device
])  # fmt: skip
def test_the_expected_tokens_are_those_of_random_choices(n_experts, top_k, groups, n, want):
    """Catches a count of assignments instead of tokens, and routing that ignores the groups of experts."""
    c = preset("tiny", **{"model.n_experts": n_experts, "model.top_k": top_k, "model.expert_groups": groups}).at_work
    assert experts.reached(c, n) == pytest.approx(want)
    rng = np.random.default_rng(0)
    size, hits = n_experts // groups[0], 0
    for _ in range(4000):
        allowed = (rng.permutation(groups[0])[: groups[1], None] * size + np.arange(size)).reshape(-1)
        hits += (rng.permutation(allowed)[:top_k] < n_experts // n).any()
    assert hits / 4000 == pytest.approx(want, abs=0.03)


def test_routing_sends_fewer_bytes_than_gathering():
    """Catches a token that is sent once per expert, and a loop over rounds that is counted more than once."""
    sent = {}
    for way in ("gathered", "routed"):
        c = config(way, n_experts=4, top_k=1)
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs(c))
        more = jax.ShapeDtypeStruct((2 * DEVICES * N, 1), jnp.int32), arrays[1]
        text = compiled(c).lower(*arrays, *more).compile().as_text()
        rows = ledger.read(text, sharding.make_mesh(MESH)).collectives
        sent[way] = sum(row.wire_bytes * row.count for row in rows if row.axes == (EXPERT,))
    tokens = math.ceil(1.2 * N / DEVICES / 8) * 8
    assert tokens == 8
    of_tokens = (DEVICES - 1) * tokens * D * 4
    assert 5 * of_tokens <= sent["routed"] < 5.9 * of_tokens  # forward there and back; backward both again, and tokens
    assert sent["routed"] < 0.6 * sent["gathered"]
