"""Tests of the router, the experts, dropped assignments and statistics, each against a loop over tokens."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import model
from config import preset
from kernels import grouped
from overlap.weights import gather_weights
from tests import helpers
from utils import UserError

B, T, D, E = 4, 11, 24, 8  # of these tests; the tiny preset is 24 wide and has 8 experts

VARIANTS = {
    "sigmoid": {},  # with a selection bias, two shared experts and SwiGLU
    "switch": {"top_k": 1, "router": "softmax"},
    "not normalized": {"normalize_gates": False},
    "groups": {"expert_groups": (4, 2), "top_k": 3},
    "softmax": {"router": "softmax", "balance_rate": 0.0, "n_shared": 0, "activation": "gelu", "top_k": 3,
                "routed_scaling": 2.5},
    "gpt-oss": {"router": "softmax", "balance_rate": 0.0, "n_shared": 0, "activation": "swiglu_clamped",
                "bias": "experts", "top_k": 3},
}  # fmt: skip


@functools.cache
def config(variant="sigmoid", **more):
    return preset("tiny", **{f"model.{name}": value for name, value in (VARIANTS[variant] | more).items()}).model


def activations(seed=0, batch=B):
    return np.random.default_rng(seed).normal(size=(batch, T, D)).astype(np.float32)


def moe(c, x_BTD, real_BT=None, w=None, mesh="data=1"):
    """Return the output of the MoE block, and its statistics summed over devices."""
    declarations = helpers.moe_declarations(c)

    def local(w, x_btD, real_bt):
        out_btD, statistics = model.moe(gather_weights(w, c), c, x_btD, real_bt)
        return out_btD, jax.tree.map(lambda x: x[None], statistics)

    real_BT = np.ones(x_BTD.shape[:2], np.float32) if real_BT is None else real_BT
    w = helpers.draw(declarations) if w is None else w
    out_BTD, statistics = helpers.run(local, declarations, w, x_BTD, real_BT, mesh=mesh)
    return out_BTD, {name: x.sum(axis=0) for name, x in statistics.items()}


def loop(c, x_BTD, slots=None):
    """Return the output by a loop over sequences and tokens, and the dropped assignments of each sequence."""
    w = jax.tree.map(np.float64, helpers.draw(helpers.moe_declarations(c)))
    outs, dropped = zip(*(helpers.np_moe(w, c, x_TD, slots) for x_TD in x_BTD.astype(np.float64)), strict=True)
    return np.stack(outs), np.sum(dropped, axis=1)


dropless = functools.cache(lambda variant: moe(config(variant), activations()))


# Router ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_router_equals_a_loop(variant):
    """Catches gates that include the selection bias or are not normalized, a scale on something else, a softmax over
    the wrong dim, and probabilities that do not sum to 1."""
    c, x_BTD = config(variant), activations()
    declarations = helpers.moe_declarations(c)
    w = helpers.draw(declarations)
    gates, experts, probabilities = helpers.run(lambda w, x: model.route(w, c, x), declarations, w, x_BTD)
    want = [[helpers.np_route(w, c, x_D) for x_D in x_TD] for x_TD in x_BTD.astype(np.float64)]
    np.testing.assert_array_equal(experts, [[one[1] for one in row] for row in want])
    # float32 against float64: logits are sums of 24 products.
    np.testing.assert_allclose(gates, [[one[0] for one in row] for row in want], rtol=1e-5)
    np.testing.assert_allclose(probabilities, [[one[2] for one in row] for row in want], rtol=1e-5)
    if c.normalize_gates and c.top_k > 1:
        np.testing.assert_allclose(gates.sum(axis=-1), c.routed_scaling, rtol=1e-6)
    if w.bias_E is not None:  # else this test would not see a bias that is ignored
        unbiased = w.replace(bias_E=None)
        others = [[helpers.np_route(unbiased, c, x_D)[1] for x_D in x_TD] for x_TD in x_BTD]
        assert np.mean(experts == others) < 0.95


# Dropless -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropless_equals_a_loop_over_tokens(variant):
    """Catches a token with the wrong expert or another token's gate, a wrong inverse of the sort, and
    shared experts that are computed but not added."""
    want_BTD, _ = loop(config(variant), activations())
    got_BTD, statistics = dropless(variant)
    np.testing.assert_allclose(got_BTD, want_BTD, atol=2e-5)  # float32; outputs are of size 1
    assert statistics["dropped"] == 0


def by_loop(rows_AD, w_eDM, sizes_e):
    out, start = np.zeros((len(rows_AD), w_eDM.shape[-1])), 0
    for w_DM, size in zip(w_eDM, sizes_e, strict=True):
        out[start : start + size] = rows_AD[start : start + size] @ w_DM
        start += size
    return out


@functools.cache
def grouped_products(tile):
    """Compile the value, d rows and d weights of both grouped matmuls into one function."""

    def both(rows_AD, w_eDM, sizes_e, out_AM):
        tiles = functools.partial(grouped.grouped_matmul_in_tiles, tile=tile)
        results = []
        for matmul in (tiles, jax.lax.ragged_dot, model.grouped_matmul):
            out, pull = jax.vjp(lambda rows, w, matmul=matmul: matmul(rows, w, sizes_e), rows_AD, w_eDM)
            results.append((out, *pull(out_AM)))
        return results

    return jax.jit(both)


@pytest.mark.parametrize("rows, tile", [(23, 3), (23, 512), (2, 4)])
@settings(max_examples=25)
@given(data=st.data())
def test_grouped_matmul_equals_ragged_dot_and_a_loop(data, rows, tile):
    """Catches a tile of two groups, an empty group that shifts the groups after it, and rows after the last group that
    reach an expert, in the value or in the gradient."""
    groups = 4
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=groups, max_size=groups)))
    sizes_e = np.diff([0, *cuts]).astype(np.int32)  # some may be 0, and some rows may be past the last group
    rng = np.random.default_rng(rows)
    rows_AD, w_eDM, out_AM = (rng.normal(size=s).astype(np.float32) for s in ((rows, 5), (groups, 5, 7), (rows, 7)))
    used_A1 = (np.arange(rows) < sizes_e.sum())[:, None]
    group_A = np.repeat(np.arange(groups + 1), [*sizes_e, rows - sizes_e.sum()])
    want = (
        by_loop(rows_AD, w_eDM, sizes_e),
        by_loop(out_AM, w_eDM.transpose(0, 2, 1), sizes_e),
        np.stack([rows_AD[group_A == e].T @ out_AM[group_A == e] for e in range(groups)]),
    )
    for name, got in zip(
        ("tiles", "ragged_dot", "dispatch"), grouped_products(tile)(rows_AD, w_eDM, sizes_e, out_AM), strict=True
    ):
        for what, g, w in zip(("value", "d rows", "d weights"), got, want, strict=True):
            if name == "ragged_dot" and what == "d rows":
                g = np.where(used_A1, g, 0)
            np.testing.assert_allclose(g, w, atol=1e-5, err_msg=f"{name}: {what}")  # float32 sums of up to 23 products


# Capacity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant, factor", [("sigmoid", 1.0), ("softmax", 0.5), ("gpt-oss", 0.7)])
def test_capacity_drops_what_a_loop_drops(variant, factor):
    """Catches a capacity without top_k or with the batch size, late positions that displace early ones, a dropped
    assignment that still contributes, and a wrong drop fraction."""
    c, x_BTD = config(variant, capacity_factor=factor), activations()
    slots = int(factor * c.top_k * T / E)
    want_BTD, dropped_B = loop(c, x_BTD, slots)
    assert len(set(dropped_B)) > 1 and dropped_B.min() > 0, "choose inputs in which every sequence drops something"
    got_BTD, statistics = moe(c, x_BTD)
    np.testing.assert_allclose(got_BTD, want_BTD, atol=2e-5)  # float32; outputs are of size 1
    assert statistics["dropped"] == dropped_B.sum()
    assert statistics["tokens_per_expert"].sum() == B * T * c.top_k, "assignments are counted before any is dropped"


def test_capacity_does_not_depend_on_other_sequences():
    """Catches slots that the sequences of a batch share: drops would then depend on the batch and the mesh."""
    c, x_BTD = config(capacity_factor=1.0), activations()
    others_BTD = activations(seed=1)
    others_BTD[2] = x_BTD[2]
    first, _ = moe(c, x_BTD)
    second, _ = moe(c, others_BTD)
    np.testing.assert_array_equal(first[2], second[2])
    assert np.all(np.any(first != second, axis=(1, 2)) == [True, True, False, True])


@pytest.mark.parametrize("mesh", ["expert=2", "fsdp=2"])
@pytest.mark.parametrize("factor, variant", [(0.0, "sigmoid"), (1.0, "sigmoid"), (0.0, "gpt-oss"), (1.0, "gpt-oss")])
def test_experts_on_two_devices_work_as_on_one(mesh, factor, variant):
    """Catches an all-to-all that returns rows to the wrong sequence, an expert with a local instead of a global index,
    and a drop that depends on the device."""
    c, x_BTD = config(variant, capacity_factor=factor), activations()
    want_BTD, want = moe(c, x_BTD)
    got_BTD, got = moe(c, x_BTD, mesh=mesh)
    np.testing.assert_allclose(got_BTD, want_BTD, atol=2e-6)  # float32, sums in another order
    for name in want:  # counts are exact; the others are sums of 44 numbers
        np.testing.assert_allclose(got[name], want[name], rtol=0 if name in ("tokens_per_expert", "dropped") else 1e-5)


def test_ample_capacity_equals_dropless():
    """Catches a buffer that is one slot too short, and slots that mix up tokens although none is dropped."""
    got_BTD, statistics = moe(config(capacity_factor=E / 2), activations())  # top_k = 2: every expert could take all
    np.testing.assert_allclose(got_BTD, dropless("sigmoid")[0], atol=2e-6)  # float32, sums in another order
    assert statistics["dropped"] == 0


@pytest.mark.parametrize("variant", ["softmax", "gpt-oss"])
@pytest.mark.parametrize("factor, arrays", [(0.0, 1), (1.0, 2)])  # JAX keeps the zeros too that buffers begin as
def test_gradients_do_not_need_the_output_of_experts(factor, arrays, variant):
    """Catches gates that multiply the output of the last matmul, which would then be saved, or recomputed together with
    its exchange, and biases that are saved for each row. Of arrays [assignments, model width], only the input rows of
    the experts are saved."""
    c, kept = config(variant, capacity_factor=factor), []
    declarations = helpers.moe_declarations(c)

    def local(w, x_btD):
        out = lambda w, x_btD: model.moe(w, c, x_btD, jnp.ones(x_btD.shape[:2]))[0]
        _, pull = jax.vjp(out, gather_weights(w, c), x_btD)
        kept.extend({id(x): x for x in jax.tree.leaves(pull)}.values())
        return x_btD

    helpers.run(local, declarations, helpers.draw(declarations), activations())
    weights = [(E, D, c.d_expert), (E, c.d_expert, D)]
    assert len([x for x in kept if D in x.shape and x.size > B * T * D and x.shape not in weights]) == arrays


@pytest.mark.parametrize(
    "factor, top_k, positions, slots", [(1.0, 2, 18, 4), (1.25, 2, 18, 5), (4.0, 2, 18, 18), (1.0, 3, 8, 3)]
)
def test_slots_follow_the_formula(factor, top_k, positions, slots):
    """Catches a capacity without top_k, at which 25% are dropped even when experts are balanced."""
    assert model.slots_per_expert(config(capacity_factor=factor, top_k=top_k), positions) == slots


def test_a_capacity_of_zero_says_what_to_change():
    """Catches experts that silently drop every token, and a suggestion that does not work."""
    arithmetic = "capacity_factor=0.125 * top_k=2 * 18 positions / n_experts=8 < 1; raise capacity_factor to at least "
    with pytest.raises(UserError, match=re.escape("capacity is 0: " + arithmetic) + r"0\.22\d*$") as error:
        model.slots_per_expert(config(capacity_factor=0.125), 18)
    suggested = float(str(error.value).split()[-1])
    assert model.slots_per_expert(config(capacity_factor=suggested), 18) == 1


# What is counted ------------------------------------------------------------------------------------------------------


def test_statistics_equal_a_loop_over_real_tokens():
    """Catches padding that counts as tokens, and an entropy of other values than the probabilities."""
    c, x_BTD = config(), activations()
    real_BT = (np.arange(T) < np.array([[11], [7], [4], [0]])).astype(np.float32)
    w = helpers.draw(helpers.moe_declarations(c))
    tokens_E, probability_E, entropy = np.zeros(E), np.zeros(E), 0.0
    for x_D in x_BTD[real_BT > 0].astype(np.float64):
        _, experts, probabilities = helpers.np_route(w, c, x_D)
        tokens_E[experts] += 1
        probability_E += probabilities
        entropy -= np.sum(probabilities * np.log(probabilities))
    _, got = moe(c, x_BTD, real_BT)
    np.testing.assert_array_equal(got["tokens_per_expert"], tokens_E)
    np.testing.assert_allclose(got["probability"], probability_E, rtol=1e-5)  # float32 sums of 22 numbers
    np.testing.assert_allclose(got["entropy"], entropy, rtol=1e-5)
    assert got["tokens"] == 22 and got["dropped"] == 0


def balance(c, statistics):
    return float(
        model.balance_loss(c, statistics["tokens_per_expert"], statistics["probability"], statistics["tokens"])
    )


def test_balance_loss_of_known_loads():
    """Catches a missing factor n_experts or top_k (then it is not 1 if balanced), and the square of one factor."""
    c, tokens = config(), 100.0
    balanced = np.full(E, tokens * c.top_k / E), np.full(E, tokens / E)
    one_pair = np.array([tokens, tokens] + [0] * 6), np.array([tokens / 2, tokens / 2] + [0] * 6)
    skewed = np.array([tokens, tokens * 3 / 4, tokens / 4] + [0] * 5), np.array([40, 30, 20, 10, 0, 0, 0, 0])
    assert float(model.balance_loss(c, *balanced, tokens)) == pytest.approx(1.0, rel=1e-6)
    assert float(model.balance_loss(c, *one_pair, tokens)) == pytest.approx(E / c.top_k, rel=1e-6)
    by_hand = 8 * (1 / 2 * 0.4 + 3 / 8 * 0.3 + 1 / 8 * 0.2)
    assert float(model.balance_loss(c, *skewed, tokens)) == pytest.approx(by_hand, rel=1e-6)


def with_router(c, w_router_DE):
    """Return weights with a given router, random experts and no selection bias."""
    w = helpers.draw(helpers.moe_declarations(c))
    bias_E = None if w.bias_E is None else np.zeros(E, np.float32)
    return w.replace(w_router_DE=np.float32(w_router_DE), bias_E=bias_E)


def test_a_uniform_router_has_balance_loss_one():
    """Catches a balance loss whose value depends on how ties break, and one that is not 1 for equal probabilities."""
    c = config()
    _, statistics = moe(c, activations(), w=with_router(c, np.zeros((D, E))))
    assert statistics["tokens_per_expert"][2:].sum() == 0, "equal scores go to the first experts"
    assert balance(c, statistics) == pytest.approx(1.0, rel=1e-6)
    assert statistics["entropy"] / statistics["tokens"] == pytest.approx(np.log(E), rel=1e-6)


def test_a_router_that_prefers_two_experts_has_balance_loss_four():
    """Catches a balance loss that does not grow when all tokens go to the same experts: its value here is E / top_k."""
    c = config("softmax", top_k=2)
    x_BTD = activations()
    x_BTD[..., 0] = 1.0
    w_router_DE = np.zeros((D, E))
    w_router_DE[0, [3, 5]] = 50.0  # the others get a share of e^-50
    _, statistics = moe(c, x_BTD, w=with_router(c, w_router_DE))
    np.testing.assert_array_equal(np.nonzero(statistics["tokens_per_expert"])[0], [3, 5])
    assert balance(c, statistics) == pytest.approx(E / 2, rel=1e-6)


def test_balance_loss_does_not_depend_on_the_batch_size():
    """Catches a balance loss that grows with the number of sequences or devices instead of averaging over them."""
    c, x_BTD = config(), activations()
    want = balance(c, dropless("sigmoid")[1])
    twice = balance(c, moe(c, np.concatenate([x_BTD, x_BTD]))[1])
    assert want > 1.02, "random weights are not balanced"
    assert twice == pytest.approx(want, rel=1e-6)
