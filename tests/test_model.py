"""Tests of the model: blocks against NumPy, attention masks, declarations and parameter counts."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import model
import pipeline
import sharding
from compile import ledger
from config import PRESETS, preset
from parameters import init
from plan.count import costs
from tests import helpers
from tests.scores import attend as attend_at_once

B, T, D = 3, 18, 24  # of the blocks tested alone; the tiny preset is 24 wide

float32 = np.float32


@functools.cache
def config(**more):
    return preset("tiny", **{f"model.{name}": value for name, value in more.items()}).model


def activations(seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, D)).astype(float32)


def three_rows():
    """Return positions and segments of rows with one document, two documents, and three with padding."""
    rows = [helpers.documents(18), helpers.documents(7, 11), helpers.documents(4, 8, 1, padding=5)]
    return tuple(np.stack(x) for x in zip(*rows, strict=True))


# Norm, rotary, feed-forward, embedding --------------------------------------------------------------------------------


def test_rms_norm_equals_numpy():
    """Catches a subtracted mean, a missing square root, an epsilon outside the root, and a missing gain."""
    x_BTD, gain_D = activations() * 1e-2, 1 + np.arange(D, dtype=float32) / D
    want = helpers.np_rms_norm(x_BTD.astype(np.float64), gain_D, 1e-4)
    np.testing.assert_allclose(jax.jit(model.norm)(x_BTD, gain_D, 1e-4), want, rtol=1e-5)  # float32 sums of 24


def test_layer_norm_equals_numpy():
    """Catches a mean that is not subtracted, a bias that is scaled, and a variance that includes the mean."""
    x_BTD, gain_D = activations() + 3, 1 + np.arange(D, dtype=float32) / D
    want = helpers.np_norm(x_BTD.astype(np.float64), gain_D, 2 * gain_D, 1e-4)
    np.testing.assert_allclose(jax.jit(model.norm)(x_BTD, gain_D, 1e-4, 2 * gain_D), want, rtol=1e-5, atol=1e-5)


def test_rotate_rotates_pairs_by_position_times_frequency():
    """Catches pairs of adjacent coordinates instead of halves, a wrong sign or frequency, and indices for positions."""
    positions_BT, _ = three_rows()
    x_BTHR = np.random.default_rng(0).normal(size=(B, T, 4, 6)).astype(float32)
    freqs_r = model.rotary_frequencies(config(d_rope=6, rope_theta=50.0), 0)
    turn = jax.jit(lambda x, p, on: model.rotate(x, model.rotary_angles(p, freqs_r * on)))
    want = [helpers.np_rotate_all(x, p, 50.0) for x, p in zip(x_BTHR, positions_BT, strict=True)]
    np.testing.assert_allclose(turn(x_BTHR, positions_BT, 1.0), want, atol=1e-5)  # float32 angles up to 17 radians
    np.testing.assert_array_equal(turn(x_BTHR, positions_BT, 0.0), x_BTHR)
    wider = np.concatenate([x_BTHR, x_BTHR[..., :5]], axis=-1)  # coordinates past the pairs stay
    np.testing.assert_allclose(turn(wider, positions_BT, 1.0)[..., :6], want, atol=1e-5)
    np.testing.assert_array_equal(turn(wider, positions_BT, 1.0)[..., 6:], x_BTHR[..., :5])


@pytest.mark.parametrize("width", [10, 6])
def test_the_gradient_of_a_rotation_equals_that_of_autodiff(width):
    """Catches a gradient that is rotated forward, not scaled, or lost for the coordinates that are not rotated."""
    rng, scale = np.random.default_rng(0), 1.5
    x_BTHR, dy_BTHR = (jnp.asarray(rng.normal(size=(2, 5, 3, width)), jnp.float32) for _ in range(2))
    freqs_r = model.rotary_frequencies(config(d_rope=6, rope_theta=50.0), 0)
    angles_BTr = model.rotary_angles(jnp.asarray(rng.integers(0, 40, (2, 5))), freqs_r)

    def rotate(x_BTHR):
        cos, sin = scale * jnp.cos(angles_BTr)[:, :, None], scale * jnp.sin(angles_BTr)[:, :, None]
        first, second, rest = x_BTHR[..., :3], x_BTHR[..., 3:6], x_BTHR[..., 6:]
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos, rest], -1)

    want, got = (jax.vjp(f, x_BTHR) for f in (rotate, lambda x_BTHR: model.rotate(x_BTHR, angles_BTr, scale)))
    for one, other in ((got[0], want[0]), (*got[1](dy_BTHR), *want[1](dy_BTHR))):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)  # the same two products, added in float32


@pytest.mark.parametrize("tokens, matmuls, copies", [(6, 3, 0), (8, 1, 1)])
def test_only_many_tokens_concatenate_the_projections_to_latents(tokens, matmuls, copies):
    """Catches projections in another order, and a copy of the weights for every token that is generated."""
    rng = np.random.default_rng(0)
    x_bsD, *w = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, tokens // 2, 8), (8, 4), (8, 3), (8, 5))
    )
    for one, w_DX in zip(model.project_at_once(x_bsD, *w), w, strict=True):
        np.testing.assert_allclose(one, x_bsD @ w_DX, rtol=1e-5, atol=1e-5)  # float32 sums of 8 numbers
    found = [one.primitive.name for one in jax.make_jaxpr(model.project_at_once)(x_bsD, *w).eqns]
    assert (found.count("dot_general"), found.count("concatenate")) == (matmuls, copies)


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "swiglu_clamped"])
def test_feed_forward_equals_numpy(activation):
    """Catches swapped gate and up matrices, the wrong nonlinearity, a missing matrix, and operands without a clamp."""
    c = config(activation=activation)
    declarations = helpers.unstack(model.declare(c).prefix.feed_forward)
    w = helpers.draw(declarations)
    x = 5 * activations() if activation == "swiglu_clamped" else activations()
    got = helpers.run(lambda w, x: model.feed_forward(w, c, x), declarations, w, x)
    assert (w.w_gate_DF is None) == (activation == "gelu")
    want = helpers.np_feed_forward(c, x.astype(np.float64), w.w_gate_DF, w.w_up_DF, w.w_down_FD)
    largest = np.abs(want).max() if activation == "swiglu_clamped" else 1  # outputs are of size 1
    np.testing.assert_allclose(got, want, atol=1e-5 * largest)  # float32 sums of 40 products


# Attention ------------------------------------------------------------------------------------------------------------

KINDS = {
    "mla": {},
    "mla, no query latent": {"d_query_latent": 0},
    "gqa": helpers.GROUPED,
    "mla, yarn": {"rope_scaling": "yarn:4:1:32:4096:1:0.7"},
    "gqa, llama3": helpers.GROUPED | {"rope_scaling": "llama3:8:1:4:64", "qk_norm": True},
    "gqa, linear": helpers.GROUPED | {"rope_scaling": "linear:3"},
    "mla, window": {"window": "3"},
    "gqa, window and sinks": helpers.GROUPED | {"window": "3", "softmax": "sinks"},
    "gqa, caps": helpers.GROUPED | {"softmax": "cap:0.7:0"},
    "mla, caps": {"softmax": "cap:0.7:0"},
    "gqa, biases, exact yarn": helpers.GROUPED | {"bias": "attention", "rope_scaling": "yarn_exact:4:1:32:4096"},
}


@functools.cache
def attention_program(kind):
    """Return the compiled attention block: fn(w, x, positions, segments, rotary_on)."""
    c = config(**KINDS[kind])
    block = model.latent_attention if c.attention == "mla" else model.grouped_attention
    freqs_r = model.rotary_frequencies(c, 0)
    local = lambda w, x, positions, segments, on: block(w, c, x, positions, segments, on[0] * freqs_r)
    return helpers.compiled(local, helpers.attention_declarations(c), n_arrays=4)


def attend(kind, x_BTD, positions_BT, segments_BT, rotary_on=1.0):
    w = helpers.draw(helpers.attention_declarations(config(**KINDS[kind])))
    return np.asarray(attention_program(kind)(w, x_BTD, positions_BT, segments_BT, np.full(1, rotary_on, float32)))


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_a_loop_over_queries(kind, rotary):
    """Catches a wrong scale, wrong groups of heads, a latent without norm, a mask that admits the future or another
    document, and a rotary key that differs by head."""
    c, x_BTD = config(**KINDS[kind]), activations()
    w = jax.tree.map(np.float64, helpers.draw(helpers.attention_declarations(c)))
    reference = helpers.np_latent_attention if c.attention == "mla" else helpers.np_grouped_attention
    rows, window = zip(x_BTD.astype(np.float64), *three_rows(), strict=True), int(c.window or x_BTD.shape[1])
    want = [reference(w, c, *row, rotary, window) for row in rows]
    got = attend(kind, x_BTD, *three_rows(), float(rotary))
    np.testing.assert_allclose(got, want, atol=2e-5)  # float32; outputs are of size 1


@pytest.mark.parametrize("kind", KINDS)
def test_scores_depend_only_on_the_distance(kind):
    """Catches a rotary embedding that is added, and angles that differ between queries and keys."""
    positions_BT, segments_BT = three_rows()
    here, there, stretched = (
        attend(kind, activations(), p, segments_BT) for p in (positions_BT, positions_BT + 37, 2 * positions_BT)
    )
    np.testing.assert_allclose(there, here, atol=2e-5)  # angles of up to 54 radians are rounded at 4e-6
    assert np.abs(stretched - here).max() > 0.01, "positions do nothing at all"


@pytest.mark.parametrize("kind", KINDS)
def test_without_rotary_only_the_order_counts(kind):
    """Catches a no-RoPE layer that still rotates queries or keys."""
    positions_BT, segments_BT = three_rows()
    here, stretched = (
        attend(kind, activations(), p, segments_BT, rotary_on=0.0) for p in (positions_BT, 2 * positions_BT + 3)
    )
    np.testing.assert_array_equal(here, stretched)


def test_every_third_layer_has_no_rotary():
    """Catches layer numbers from 0 in the choice of layers without RoPE; the whole model is compared below."""
    c = config(n_experts=0, balance_loss=0.0)
    declarations = helpers.unstack(model.declare(c).prefix)
    positions_BT, segments_BT = three_rows()

    def local(w, x, positions, segments, number):
        tokens = model.Tokens(positions, segments, jnp.ones(segments.shape, jnp.float32), segments)
        return model.layer(w, c, x, tokens, number[0], None)[0]

    program, w = helpers.compiled(local, declarations, n_arrays=4), helpers.draw(declarations)
    ignores = []
    for number in range(7):
        here, stretched = (
            program(w, activations(), p, segments_BT, np.full(1, number)) for p in (positions_BT, 2 * positions_BT)
        )
        ignores.append(bool(np.all(here == stretched)))
    assert ignores == [False, False, True, False, False, True, False]  # the third and the sixth layer


def test_a_layer_number_may_be_a_python_int():
    """Catches a layer that fails when it is called outside a scan, with a Python int as its number."""
    c = config(no_rope_every=3)
    assert [bool(np.all(model.rotary_frequencies(c, number))) for number in range(4)] == [True, True, False, True]


def test_a_fully_masked_query_returns_zeros():
    """Catches the mean of all values, even later ones, instead of zeros, and queries that use the wrong key head."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape).astype(float32) for shape in ((2, 3, 4, 6), (2, 5, 2, 6), (2, 5, 2, 7)))
    mask = rng.random((2, 3, 5)) < 0.5
    mask[0, 1], mask[1, 2], mask[0, 0] = False, False, True
    each_k, each_v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.einsum("bshk,bzhk->bhsz", q, each_k) / np.sqrt(6)
    weight = np.where(mask[:, None], np.exp(scores), 0)
    want = np.einsum("bhsz,bzhu->bshu", weight / np.maximum(weight.sum(-1, keepdims=True), 1e-9), each_v)
    got = np.asarray(attend_at_once(q, k, v, mask))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.all(got[0, 1] == 0) and np.all(got[1, 2] == 0) and np.all(got[0, 0] != 0)


def test_a_gain_gradient_is_summed_before_its_psum():
    """Catches a psum of a gradient [b, t, D] in a user's function, where a psum of [D] is enough."""
    mesh = sharding.make_mesh("tensor=2")
    x_BTD, gain_D = activations(), np.ones(D, float32)

    def gradient(x_btD, gain_D):
        return jax.grad(lambda gain_D: jnp.sum(model.norm(x_btD, gain_D, 1e-6) * x_btD))(gain_D)

    program = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(None, "tensor"), P()), out_specs=P()))
    [sent] = ledger.read(program.lower(x_BTD, gain_D).compile().as_text(), mesh).collectives
    assert (sent.kind, sent.payload_bytes) == ("all-reduce", D * 4)
    scale_BT1 = np.sqrt(np.mean(np.float64(x_BTD) ** 2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(program(x_BTD, gain_D), np.sum(x_BTD**2 / scale_BT1, axis=(0, 1)), rtol=1e-5)


# The whole model ------------------------------------------------------------------------------------------------------

ROWS = T + 1  # one row as it is, and one for each position at which a token is changed

# The features of GPT-J's block that the DeepSeek-V3 family does not have.
GPTJ = {"model.norm": "layer", "model.parallel_residual": True, "model.bias": "feed_forward,logits",
        "model.rope_dims": 6}  # fmt: skip
MODELS = {
    # tiny: latent attention; a dense prefix layer, two blocks of a dense layer and a dropless MoE; no RoPE in layer 3
    "mla dropless": {},
    "mla capacity": {"model.capacity_factor": 1.0, "model.d_query_latent": 0, "model.dense_prefix": 0,
                     "model.n_layers": 4},
    "gqa dense": {"model.attention": "gqa", "model.n_experts": 0, "model.n_layers": 3, "model.no_rope_every": 2,
                  "model.activation": "gelu", "model.tie_embeddings": True, **GPTJ},
    "gqa softmax across documents": {"model.attention": "gqa", "model.router": "softmax", "model.balance_rate": 0.0,
                                     "model.n_shared": 0, "model.routed_scaling": 2.5, "model.moe_every": 1,
                                     "model.n_layers": 2, "data.packing": "windows,unmasked"},
    "gqa windows and sinks": {"model.attention": "gqa", "model.n_experts": 0, "model.n_layers": 3,
                              "model.window": "5:2", "model.softmax": "sinks", "data.packing": "windows,unmasked"},
    # as in Gemma 2 and 3: caps of scores and logits, norms after each branch, and windows with their own RoPE base
    "gqa sandwich": {"model.attention": "gqa", "model.n_experts": 0, "model.n_layers": 3, "model.norm": "sandwich",
                     "model.window": "5:2:30", "model.rope_scaling": "linear:3", "model.qk_norm": True,
                     "model.softmax": "cap:0.7:0.8"},
}  # fmt: skip


def whole(name, **more):
    return preset("tiny", **{"data.batch_size": ROWS}, **MODELS[name], **more)


@functools.cache
def parameters(name):
    return helpers.draw(model.declare(whole(name).model))


@functools.cache
def logits_program(name):
    cfg = whole(name)
    return pipeline.logits(cfg, sharding.make_mesh(cfg.mesh))


def batch_with_changes(name):
    """Row 0 has three documents and padding; row 1 + j differs from it only in the token at position j."""
    positions_T, segments_T = helpers.documents(6, 8, 1, padding=3)
    if "unmasked" in whole(name).data.packing:
        positions_T = np.arange(T, dtype=np.int32)  # as `dataset.batch` counts them then
    batch = helpers.random_batch(whole(name), seed=0)
    for key, row_T in ("tokens_BT", batch["tokens_BT"][0]), ("positions_BT", positions_T), ("segments_BT", segments_T):
        batch[key] = np.tile(row_T, (ROWS, 1))
    changed = np.arange(T)
    batch["tokens_BT"][1 + changed, changed] = (batch["tokens_BT"][0] + 101) % 280
    return batch


@functools.cache
def logits_with_changes(name):
    return np.asarray(logits_program(name)(parameters(name), batch_with_changes(name)))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_equals_the_numpy_reference(name):
    """Catches a missing or misplaced residual, norm or layer, a wrong layer without RoPE, and rows that mix."""
    cfg = whole(name)
    batch = helpers.random_batch(cfg, seed=1)
    if "unmasked" in cfg.data.packing:
        batch["positions_BT"] = np.tile(np.arange(T, dtype=np.int32), (ROWS, 1))
    got = logits_program(name)(parameters(name), batch)
    slots = model.slots_per_expert(cfg.model, T) if cfg.model.capacity_factor else None
    for row in (0, 7, ROWS - 1):
        segments_T = batch["segments_BT"][row]
        if "unmasked" in cfg.data.packing:
            segments_T = np.minimum(segments_T, 1)
        want, dropped = helpers.np_model(
            parameters(name), cfg.model, batch["tokens_BT"][row], batch["positions_BT"][row], segments_T, slots
        )
        assert not slots or np.min(np.sum(dropped, axis=1)) > 0, "choose a batch in which this row drops something"
        # float32 against float64 through up to 5 layers; logits are of size 1
        np.testing.assert_allclose(got[row], want, atol=1e-4, err_msg=f"row {row}")


@pytest.mark.parametrize("name", MODELS)
def test_no_token_sees_the_future(name):
    """Catches a mask off by one, and expert slots that go to later tokens before earlier ones."""
    logits = logits_with_changes(name)
    difference = np.abs(logits[1:] - logits[0]).max(axis=-1)  # [changed position, position]
    for j in range(T):
        # Nothing may change; groups of rows that move within a matrix product may round differently.
        assert difference[j, :j].max(initial=0) <= 1e-6, f"token {j} changes the logits before it"
        assert difference[j, j] > 1e-3, f"token {j} does not change its own logits"


@pytest.mark.parametrize("name", MODELS)
def test_documents_see_each_other_only_if_allowed(name):
    """Catches a mask that ignores segments, a mask that hides the same document, and a setting without effect."""
    logits, segments_T = logits_with_changes(name), batch_with_changes(name)["segments_BT"][0]
    changed = np.abs(logits[1:] - logits[0]).max(axis=-1) > 1e-6
    capacity = whole(name).model.capacity_factor
    for j, t in itertools.combinations(range(T), 2):
        seen = segments_T[j] == segments_T[t] or ("unmasked" in whole(name).data.packing and segments_T[t] > 0)
        if seen:
            assert changed[j, t], f"position {t} does not see token {j}"
        elif not capacity:  # the slots of an expert are shared by the documents of a sequence
            assert not changed[j, t], f"position {t} sees token {j} of another document"


# Declarations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_ends_with_its_letters(name):
    """Catches a field whose suffix and declared letters differ, a letter with two sizes, and a wrong rank."""
    sizes = {}
    for path, d in sharding.flatten_named(model.declare(preset(name).model)).items():
        suffix = path.rsplit("_", 1)[1]
        stacked = {"prefix": "P", "blocks.dense": "LJ", "blocks.moe": "L"}
        stacked = next((letters for part, letters in stacked.items() if path.startswith(part)), "")
        assert d.dims == stacked + suffix, path
        assert len(d.shape) == len(d.dims) == len(d.spec), path
        for letter, size in zip(d.dims, d.shape, strict=True):
            if ".shared." not in path:  # there F is as wide as all shared experts together
                assert sizes.setdefault(letter, size) == size, f"{letter} of {path}"


@pytest.fixture(scope="module")
def initial():
    cfg = preset("tiny")
    params = init(model.declare(cfg.model), sharding.make_mesh("data=1"), seed=0)
    return sharding.flatten_named(jax.tree.map(np.asarray, params))


def test_parameters_start_as_declared(initial):
    """Catches a standard deviation that is not the declared one, random gains, and two parameters or layers with equal
    initial values."""
    for name, d in sharding.flatten_named(model.declare(preset("tiny").model)).items():
        x = initial[name]
        assert x.shape == d.shape and x.dtype == float32, name
        if not d.std:
            np.testing.assert_array_equal(x, np.full(d.shape, d.mean), err_msg=name)
            continue
        # 5 standard errors: one false alarm in 30,000 tests.
        assert abs(x.mean() - d.mean) < 5 * d.std / math.sqrt(x.size), name
        assert abs(x.std() - d.std) < 5 * d.std / math.sqrt(2 * x.size), name
        assert len(np.unique(x)) > 0.99 * x.size, f"{name} repeats its values"
    random = [x.ravel()[:64] for name, x in initial.items() if x.std() > 0 and x.size >= 64]
    for a, b in itertools.combinations(random, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.75, "two parameters start alike"  # 6 standard errors of 1/8


def test_declared_deviations_by_hand():
    """Catches a changed declaration: the expected 1/sqrt(fan-in), and GPT-2's factor for depth, are written by hand."""
    d = sharding.flatten_named(model.declare(preset("tiny").model))
    depth = math.sqrt(2 * 5)  # residual branches of 5 layers
    by_hand = {
        "embedding_VD": 1.0,
        "unembedding_DV": 24**-0.5,
        "blocks.dense.attention.w_down_query_DQ": 24**-0.5,
        "blocks.dense.attention.w_query_QHK": 20**-0.5,
        "blocks.dense.attention.w_query_rotary_QHR": 20**-0.5,
        "blocks.dense.attention.w_key_CHK": 12**-0.5,
        "blocks.dense.attention.w_value_CHU": 12**-0.5,
        "blocks.dense.attention.w_out_HUD": (4 * 14) ** -0.5 / depth,
        "prefix.feed_forward.w_gate_DF": 24**-0.5,
        "prefix.feed_forward.w_down_FD": 40**-0.5 / depth,
        "blocks.moe.feed_forward.w_router_DE": 24**-0.5,
        "blocks.moe.feed_forward.w_up_EDM": 24**-0.5,
        "blocks.moe.feed_forward.w_down_EMD": 28**-0.5 / depth,
        "blocks.moe.feed_forward.shared.w_down_FD": 56**-0.5 / depth,
        "blocks.moe.feed_forward.bias_E": 0.0,
        "norm_D": 0.0,
    }
    assert {name: d[name].std for name in by_hand} == pytest.approx(by_hand)
    tied = sharding.flatten_named(model.declare(config(tie_embeddings=True)))
    assert tied["embedding_VD"].std == pytest.approx(24**-0.5) and "unembedding_DV" not in tied
    assert {name: x.mean for name, x in d.items() if x.mean} == {
        name: 1.0 for name in d if "norm" in name.rsplit(".")[-1]
    }
    assert {name for name, x in d.items() if not x.trainable} == {"blocks.moe.feed_forward.bias_E"}
    constant = {name for name in d if "norm" in name.rsplit(".")[-1] or name.endswith("bias_E")}
    assert {name for name, x in d.items() if not x.decay} == constant | {"embedding_VD"}


def test_the_mesh_does_not_change_initial_values(initial):
    """Catches random numbers that depend on the device: all bits must be equal on every mesh."""
    mesh = sharding.make_mesh("fsdp=2,tensor=2,expert=2")
    split = init(model.declare(preset("tiny").model), mesh, seed=0)
    assert len(split.embedding_VD.sharding.device_set) == 8
    for name, x in sharding.flatten_named(split).items():
        np.testing.assert_array_equal(np.asarray(x), initial[name], err_msg=name)


# Counts ---------------------------------------------------------------------------------------------------------------


def test_parameters_of_laptop_by_hand():
    """Catches a weight declared twice, not at all, or with another size, and a wrong count of active experts."""
    attention = 128 * 4 * 32 + 128 * 4 * 16 + 128 * 64 + 64 + 128 * 16 + 64 * 4 * 32 + 64 * 4 * 32 + 4 * 32 * 128
    layer = attention + 2 * 128  # two norms
    dense = 3 * 128 * 384
    expert = 3 * 128 * 320
    moe = layer + 128 * 8 + expert  # one shared expert
    outside_experts = 272 * 128 + 128 + 128 * 272 + 2 * (layer + dense) + 2 * moe
    total, active = outside_experts + 2 * 8 * expert, outside_experts + 2 * 2 * expert
    assert costs.parameters(preset("laptop").model) == (total, active)


@pytest.mark.parametrize("name, total", [("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496),
                                         ("mixtral_8x7b", 46_702_792_704)])  # fmt: skip
def test_published_parameter_counts(name, total):
    """Catches a planner preset, or a model, whose shape is not the published one."""
    assert costs.parameters(preset(name).model)[0] == total


def test_deepseek_v3_parameter_counts():
    """Catches a shape that is not the published one: 671B in total, 37B of them active (arXiv:2412.19437, abstract)."""
    total, active = costs.parameters(preset("deepseek_v3").model)
    assert f"{total / 1e9:.1f}" == "671.0"
    assert 37e9 <= active < 38e9


def test_model_flops_of_an_encoder_decoder_by_hand():
    """Catches targets that pass through the encoder, keys and values of cross-attention that are computed for targets,
    and tokens that are only inputs or only targets."""
    cfg = preset("t5_tiny")
    # Widths: D=24, H=4 heads of K=10, F=40, V=304; 2 encoder layers over S=28 inputs, 4 decoder layers over T=12.
    square, forward, D, S, T = 24 * 4 * 10, 3 * 24 * 40, 24, 28, 12
    encoder = 2 * (4 * square + forward + 2 * D) + D + 32 * 4  # with the final norm and the position biases
    decoder = 4 * (6 * square + forward + 3 * D) + D + 32 * 4 + 24 * 304  # and the keys and values of S inputs:
    inputs = S * (encoder + 4 * 2 * square)
    pairs = 2 * S * S + 4 * (T * (T + 1) / 2 + T * S)
    multiplied = inputs + T * decoder + pairs * 4 * (10 + 10)
    assert costs.model_flops_per_token(cfg) == 6 * multiplied // (S + T)
    assert cfg.data.tokens_per_step == 16 * (S + T)


def test_model_flops_of_a_dense_model_by_hand():
    """Catches a backward pass counted once, key/value heads counted as query heads, and full attention."""
    cfg = preset(
        "tiny", **{"model.attention": "gqa", "model.n_experts": 0, "model.n_layers": 3, "model.activation": "gelu"}
    )
    # Widths: D=24, H=4 query heads, G=2 key/value heads of K=10, F=40, V=280; T=18.
    matrices = 3 * (24 * 4 * 10 + 2 * 24 * 2 * 10 + 4 * 10 * 24 + 2 * 24 * 40) + 24 * 280
    gains = 3 * 2 * 24 + 24  # counted with the matrices
    pairs = (18 + 1) / 2  # positions a token looks at, itself included, on average
    attention = 3 * 4 * (10 + 10) * pairs  # multiply-adds of scores and of values
    assert costs.model_flops_per_token(cfg) == 3 * 2 * (matrices + gains + attention)
