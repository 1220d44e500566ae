"""Tests of the loss and its gradients: vocabulary slices, accumulation, remat, dropout, bfloat16 and meshes."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import pipeline
import sharding
from config import preset
from config.fields import ACTIVATIONS, REMAT
from overlap import weights as overlap_weights
from pipeline import fit
from tests import helpers
from utils import UserError

B, T, V = 16, 18, 280
SLICE = 35  # words whose logits exist at once: 8 slices make V

SETTINGS = {
    # A dense layer and a dropless MoE layer with latent attention, dropout and a balance loss that counts.
    "mla": {"n_layers": 2, "moe_every": 1, "no_rope_every": 2, "dropout": 0.25, "balance_loss": 0.5},
    # Two blocks of a dense layer and an MoE layer with grouped attention; what can be switched is.
    # Two blocks of two dense layers and an MoE layer: a scan in a scan.
    "blocks": {"n_layers": 6, "moe_every": 3, "dense_prefix": 0, "balance_loss": 0.5},
    "gqa": {**helpers.GROUPED, "n_layers": 4, "dense_prefix": 0, "router": "softmax", "activation": "gelu",
            "capacity_factor": 1.0, "tie_embeddings": True, "balance_loss": 0.5, "balance_rate": 0.0,
            "norm": "layer", "bias": "feed_forward,logits", "rope_dims": 6,
            "z_loss": 0.03, "label_smoothing": 0.1},
}  # fmt: skip


def config(name, **more):
    return preset("tiny", **{f"model.{key}": value for key, value in SETTINGS[name].items()}, **more)


def in_chunks(c, chunk):
    return dataclasses.replace(c, work=dataclasses.replace(c.work, loss_chunk=chunk))


@functools.cache
def parameters(name):
    return helpers.draw(model.declare(config(name).model))


@functools.cache
def batch():
    return helpers.random_batch(config("mla"), seed=0)


def program(name, **more):
    cfg = config(name, **more)
    return pipeline.loss_and_grads(cfg, sharding.make_mesh(cfg.mesh))


def host(results):
    return jax.tree.map(np.asarray, results)


@functools.cache
def base(name):
    """Return the compiled function for one device, one pass and no remat, and its result at step 3."""
    compiled = program(name).lower(parameters(name), batch(), 3).compile()
    return compiled, host(compiled(parameters(name), batch(), 3))


def trace(name, **more):
    return list(helpers.equations(jax.make_jaxpr(program(name, **more))(parameters(name), batch(), 3).jaxpr))


def assert_same(got, want, what):
    """Assert that loss, metrics and gradients equal those of one device and one pass, up to float32 rounding."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, err_msg=what)
    assert set(got[1]) == set(want[1])
    for name in got[1]:
        exact = name in ("tokens_per_expert", "drop_fraction")
        np.testing.assert_allclose(got[1][name], want[1][name], rtol=0 if exact else 1e-5, err_msg=f"{what}: {name}")
    helpers.assert_gradients_close(got[2], want[2], 1e-4, what)


# Value and gradient ---------------------------------------------------------------------------------------------------


def test_the_loss_and_its_metrics_by_hand():
    """Catches a mean of means, an ignored weight, an auxiliary loss that is summed over layers, weighted twice, or part
    of the cross-entropy, and a drop fraction or load that counts padding."""
    cfg, (loss, metrics, _) = config("gqa"), base("gqa")[1]
    slots = model.slots_per_expert(cfg.model, T)
    sums, dropped_BLT = helpers.np_cross_entropy(parameters("gqa"), cfg.model, batch(), slots)
    real_B1T = (batch()["segments_BT"] > 0)[:, None, :]
    assignments = real_B1T.sum() * cfg.model.top_k
    np.testing.assert_allclose(metrics["tokens"], sums["weight"], rtol=1e-6)
    for name, of in {"cross_entropy": "nats", "z_loss": "z_loss", "label_smoothing": "label_smoothing"}.items():
        np.testing.assert_allclose(metrics[name], sums[of] / sums["weight"], rtol=1e-5)  # float32 logits of 4 layers
    np.testing.assert_allclose(
        metrics["drop_fraction"], np.sum(dropped_BLT * real_B1T, axis=(0, 2)) / assignments, rtol=1e-6
    )
    np.testing.assert_array_equal(metrics["tokens_per_expert"].sum(axis=1), [assignments] * 2)
    assert metrics["drop_fraction"].min() > 0.01, "choose a capacity that drops something"
    assert abs(np.diff(metrics["balance_loss"])[0]) > 0.01, "choose weights by which the layers differ"
    auxiliary = 0.5 * metrics["balance_loss"].mean() + 0.03 * metrics["z_loss"] + 0.1 * metrics["label_smoothing"]
    np.testing.assert_allclose(loss, metrics["cross_entropy"] + auxiliary, rtol=1e-6)
    assert np.all((metrics["router_entropy"] > 0) & (metrics["router_entropy"] < math.log(cfg.model.n_experts)))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_receives_gradient(name):
    """Catches a block whose result is not used, a head, expert or layer without input, a misplaced stop_gradient, and a
    selection bias that is trained."""
    grads = sharding.flatten_named(base(name)[1][2])
    without = []
    for path, d in sharding.flatten_named(model.declare(config(name).model)).items():
        # One number for each layer, head and expert: the largest entry of its gradient.
        dims = tuple(i for i, letter in enumerate(d.dims) if letter not in "PLJHGE" or len(d.dims) == 1)
        largest = np.abs(grads[path]).max(axis=dims)
        assert np.all(np.isfinite(grads[path])), path
        if d.trainable:
            without += [path] * bool(np.any(largest < 1e-6))
        else:
            assert path.endswith("bias_E") and np.all(grads[path] == 0), f"{path} receives gradient"
    assert not without, f"no gradient for some slice of {without}"
    unused_V = np.setdiff1d(np.arange(V), batch()["tokens_BT"])
    if name == "mla":  # untied: a row whose token does not occur receives exactly none
        assert len(unused_V) and np.all(grads["embedding_VD"][unused_V] == 0)


# Slices of the vocabulary ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [280, 283])
def test_the_loss_by_slices_equals_the_plain_one(words):
    """Catches a slice that is skipped or counts its padding, a target in the wrong slice, and a gradient of only one
    slice."""
    chunks = (1, 5, 7, 21, 40)  # of 21 tokens: one by one, not a divisor, a divisor, all, more than all
    slices = {
        280: [(28, 10), (5, 56), (4, 70), (1, 280), (1, 280)],
        283: [(21, 14), (5, 57), (3, 95), (1, 283), (1, 283)],
    }
    D, c = 24, config("mla", **{"model.vocab_size": words}).at_work
    rng = np.random.default_rng(0)
    x_BTD, w_DV = rng.normal(size=(3, 7, D)).astype(np.float32), rng.normal(size=(D, words)).astype(np.float32)
    targets_BT = rng.integers(0, words, (3, 7))
    weights_BT = (rng.uniform(0.5, 2, (3, 7)) * (rng.random((3, 7)) < 0.7)).astype(np.float32)
    assert 0 < np.sum(weights_BT == 0) < 21
    sized = [in_chunks(c, chunk) for chunk in chunks]
    assert [overlap_weights.vocabulary_slices(chunk, 21, words) for chunk in chunks] == slices[words]

    def local(w_DV, x_btD, targets_bt, weights_bt):
        def plain(w_DV, x_btD):
            logits_btV = x_btD @ sharding.all_gather(w_DV, sharding.SLICED, dim=0)
            nats_btV = -jax.nn.log_softmax(logits_btV)
            return jnp.sum(weights_bt * jnp.take_along_axis(nats_btV, targets_bt[..., None], axis=-1)[..., 0])

        def by_slices(w_DV, x_btD, c):
            return model.loss_sums(c, w_DV, x_btD.reshape(-1, D), targets_bt.reshape(-1), weights_bt.reshape(-1))[0]

        results = [jax.value_and_grad(plain, argnums=(0, 1))(w_DV, x_btD)]
        results += [jax.value_and_grad(by_slices, argnums=(0, 1))(w_DV, x_btD, one) for one in sized]
        return [
            (value[None], d_x, sharding.all_gather(d_w, ("fsdp", "expert", "context"), dim=0))
            for value, (d_w, d_x) in results
        ]

    plain, *by_slices = helpers.run(local, model.declare(c).unembedding_DV, w_DV, x_BTD, targets_BT, weights_BT)
    for chunk, results in zip(chunks, by_slices, strict=True):
        for what, got, expected in zip(("value", "d x", "d w"), results, plain, strict=True):
            np.testing.assert_allclose(
                got, expected, atol=1e-5 * np.abs(expected).max(), err_msg=f"{what}, chunk {chunk}"
            )


def largest_logits(shapes):
    """Return the size of the largest array with a dim of all tokens and a dim of vocabulary entries (slice or all)."""
    return max(math.prod(shape) for shape in shapes if B * T in shape and {SLICE, V} & {*shape})


def test_the_full_logits_never_exist():
    """Catches logits over the whole vocabulary that are computed, saved for backward, or stacked over slices."""
    assert overlap_weights.vocabulary_slices(config("mla").at_work.work.loss_chunk, B * T, V) == (8, SLICE)
    shapes_of = lambda equations: (v.aval.shape for e in equations for v in e.outvars if hasattr(v.aval, "shape"))
    assert largest_logits(shapes_of(trace("mla"))) == B * T * SLICE
    assert largest_logits(shapes_of(trace("mla", **{"work.loss_chunk": B * T}))) == B * T * V  # it would be seen
    compiled = re.findall(r"\[([\d,]+)\]", base("mla")[0].as_text())
    assert largest_logits(tuple(map(int, shape.split(","))) for shape in compiled) == B * T * SLICE


# Passes, recomputation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [2, 4])
def test_accumulation_changes_nothing(passes):
    """Catches a mean of the passes' means, a balance loss per pass instead of per batch, and dropout that depends on
    the pass."""
    more = {"work.device_batch": B // passes}
    assert fit.split_batch(config("mla", **more)).accumulation == passes
    got = host(program("mla", **more)(parameters("mla"), batch(), 3))
    assert_same(got, base("mla")[1], f"{passes} passes")


LISTS = "attention@host,keys", "input@host,branch,queries,hidden"


@pytest.mark.parametrize("remat", ["dots", "branches", "full", *LISTS])
def test_remat_does_not_change_results(remat):
    """Catches dropout that differs when a layer is recomputed, and statistics that count twice."""
    got = host(program("mla", **{"work.remat": remat})(parameters("mla"), batch(), 3))
    assert_same(got, base("mla")[1], f"remat {remat}")


def test_remat_recomputes_matmuls_as_documented():
    """Catches a remat setting without effect on the number of matmuls in the backward pass."""
    products = {r: sum(e.primitive.name == "dot_general" for e in trace("mla", **{"work.remat": r})) for r in REMAT}
    assert products["none"] < products["dots"] < products["branches"] < products["full"], products


def test_listed_activations_are_not_recomputed():
    """Catches a name in `work.remat` that no activation has, and one whose matmuls run again all the same."""
    count = lambda r: sum(e.primitive.name == "dot_general" for e in trace("gqa", **{"work.remat": r}))
    saved = {name: count("full") - count(name) for name in ACTIVATIONS}
    # Of a dense and an MoE layer: q; k and v; scores and their mix with values; the output projection; the first
    # matmul of the dense layer, the shared expert and the routed experts. `input` is saved in any case.
    assert saved == {"input": 0, "queries": 2, "keys": 4, "attention": 4, "branch": 2, "hidden": 3}


def test_layers_save_where_the_scan_of_blocks_carries_it():
    """Catches layers of a block that stack what they save, which a TPU then copies into the stack of all blocks, and
    back: 6 passes over each saved array instead of 2."""
    scans = [e for e in trace("blocks", **{"work.remat": "attention,hidden"}) if e.primitive.name == "scan"]
    stacked = [v.aval.shape for e in scans for v in e.outvars[e.params["num_carry"] :]]
    carried = {v.aval.shape for e in scans for v in e.outvars[: e.params["num_carry"]]}
    assert not [shape for shape in stacked if (B, T) in itertools.pairwise(shape)]
    assert {(4, B, T, 24), (2, B, T, 24), (4, B, T, 40), (2, B, T, 2 * 28)} <= carried  # inputs; hidden layers


@pytest.mark.parametrize("remat", ["none", LISTS[1]])
def test_layers_read_the_activations_that_they_saved(remat, monkeypatch):
    """Catches layers that read another layer's activations, or write over them."""
    results = lambda: host(program("blocks", **{"work.remat": remat})(parameters("blocks"), batch(), 3))
    in_buffers = results()
    monkeypatch.setattr(model, "scan_blocks", lambda one, *args: model.scan_layers(*args))
    assert_same(in_buffers, results(), f"remat {remat}")


# Dropout --------------------------------------------------------------------------------------------------------------


def tokens_numbered(index_BT):
    return model.Tokens(*[jnp.zeros(index_BT.shape, int)] * 2, jnp.ones(index_BT.shape), index_BT)


def test_dropout_zeroes_a_share_and_keeps_the_mean():
    """Catches activations that are not scaled up, a swapped fraction, and bits that depend on the index in the array
    instead of the token's number."""
    c, index_BT = config("mla").model, np.random.default_rng(0).permutation(40 * T).reshape(40, T)
    x_BTD, key = jnp.ones((40, T, 24)), jax.random.key(7)
    drop = jax.jit(lambda index, key: model.dropout(c, x_BTD, tokens_numbered(index), key))
    out_BTD = np.asarray(drop(index_BT, key))
    assert set(np.unique(out_BTD)) == {0, np.float32(1 / 0.75)}
    deviations = 5 * math.sqrt(0.25 * 0.75 / out_BTD.size)  # 5 standard errors
    assert abs(np.mean(out_BTD == 0) - 0.25) < deviations
    assert abs(out_BTD.mean() - 1) < deviations / 0.75
    for dim in range(24):  # coordinates are dropped apart
        assert abs(np.mean(out_BTD[..., dim] == 0) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / (40 * T))
    np.testing.assert_array_equal(drop(index_BT[::-1], key), out_BTD[::-1])
    assert np.mean(np.asarray(drop(index_BT, jax.random.key(8))) != out_BTD) > 0.3


def test_dropout_differs_by_layer_and_branch(monkeypatch):
    """Catches one key for all layers, or for both branches of a layer, which would always drop the same coordinates."""
    c = config("mla").model
    declarations = helpers.unstack(model.declare(c).prefix)
    monkeypatch.setattr(model, "latent_attention", lambda w, c, x, *_: sharding.vary(jnp.ones_like(x), x_axes))
    ten = lambda w, c, x, *_: (sharding.vary(jnp.full_like(x, 10.0), x_axes), {})
    monkeypatch.setattr(model, "feed_forward_branch", ten)
    x_axes = sharding.TOKENS

    def local(w, x_btD, index_bt, number):
        tokens = model.Tokens(index_bt, index_bt, jnp.ones(index_bt.shape), index_bt)
        return model.layer(w, c, x_btD, tokens, number[0], jax.random.key(0))[0]

    program = helpers.compiled(local, declarations, n_arrays=3)
    w, index_BT = helpers.draw(declarations), np.arange(B * T).reshape(B, T)
    kept = []  # which coordinates stay, layer by layer: attention's and feed-forward's
    for number in (0, 1):
        out_BTD = np.round(
            np.asarray(program(w, np.zeros((B, T, 24), np.float32), index_BT, np.full(1, number))) * 0.75
        )
        kept += [out_BTD % 10 == 1, out_BTD >= 10]
    agree = np.array([[np.mean(a == b) for a in kept] for b in kept])
    # Independent bits agree with 0.75^2 + 0.25^2 = 0.625; 0.03 is 5 standard errors.
    np.testing.assert_allclose(agree, np.where(np.eye(4), 1, 0.625), atol=0.03)


def test_dropout_differs_by_step_and_repeats():
    """Catches a key that ignores the step, and one that depends on anything but seed and step."""
    compiled, (loss, *_) = base("mla")
    again, other = (float(compiled(parameters("mla"), batch(), step)[0]) for step in (3, 4))
    assert again == float(loss) and abs(other - again) > 1e-4


# Precision and evaluation ---------------------------------------------------------------------------------------------


@functools.cache
def evaluated(precision, name="mla"):
    cfg = config(name, **{"model.precision": precision})
    nats, weight = pipeline.evaluate(cfg, sharding.make_mesh(cfg.mesh))(parameters(name), batch())
    return float(nats), float(weight)


@pytest.mark.parametrize("name", SETTINGS)
def test_evaluation_is_only_cross_entropy(name):
    """Catches dropout or an auxiliary loss in an evaluation, and a mean instead of a sum over batches."""
    c = config(name).model
    slots = model.slots_per_expert(c, T) if c.capacity_factor else None
    sums, _ = helpers.np_cross_entropy(parameters(name), c, batch(), slots)
    assert evaluated("float32", name) == pytest.approx((sums["nats"], sums["weight"]), rel=1e-5)  # float32 logits


@pytest.mark.parametrize("of", [0, 1], ids=["table", "activations"])
def test_gradients_of_slices_are_added_up_in_float32(of):
    """Catches a sum over slices or tokens in bfloat16, which loses terms smaller than a 256th of it."""
    D, N = 24, 1024
    rng = np.random.default_rng(0)
    # Many words of one sign and about one probability: their gradients add up to 1, and the target's is near -1.
    x_BTD, w_DV = np.float32(0.1 * rng.normal(size=(2, N // 2, D))), np.float32(rng.uniform(0.5, 1.5, (D, V)))
    targets_BT, weights_BT = rng.integers(0, 3, (2, N // 2)), np.ones((2, N // 2), np.float32)
    c = config("mla").at_work

    def gradient(dtype, chunk):
        def local(w_DV, x_btD, targets_bt, weights_bt):
            def loss(w_DV, x_nD):
                w_DV, x_nD = w_DV.astype(dtype), x_nD.astype(dtype)
                return model.loss_sums(chunked, w_DV, x_nD, targets_bt.reshape(-1), weights_bt.reshape(-1))[0]

            d = jax.grad(loss, argnums=of)(w_DV, x_btD.reshape(-1, D))
            return d if of else sharding.all_gather(d, sharding.SLICED, dim=0)

        chunked, declaration = in_chunks(c, chunk), model.declare(c).unembedding_DV
        return helpers.run(local, declaration, w_DV, x_BTD, targets_BT, weights_BT)

    exact = gradient(jnp.float32, N)
    error = lambda chunk: np.abs(gradient(jnp.bfloat16, chunk) - exact).max() / np.abs(exact).max()
    assert error(1) < 1.5 * error(N)


def test_bfloat16_is_close_to_float32():
    """Catches a sum in bfloat16: 288 losses of about 6 would be off by more than a hundredth."""
    assert evaluated("mixed")[0] == pytest.approx(evaluated("float32")[0], rel=0.02)  # bf16 keeps 8 bits: 0.4% each
    assert evaluated("mixed")[0] != evaluated("float32")[0], "the setting does nothing"


def test_dtypes_of_matmuls_and_float32_parts():
    """Catches a softmax, norm, router or loss in bfloat16, and a float32 matmul, forward or backward."""
    equations = trace("mla", **{"model.precision": "mixed"})
    types = lambda e: {v.aval.dtype.name for v in e.invars}
    sensitive = [e for e in equations if e.primitive.name in ("exp", "log", "rsqrt", "sqrt", "log1p", "exp2")]
    assert len(sensitive) > 10 and all(types(e) == {"float32"} for e in sensitive)
    products = [e for e in equations if e.primitive.name == "dot_general"]
    in_float32 = [e for e in products if "float32" in types(e)]
    assert len(products) > 60
    # The router alone: [B, T, D] with [D, E] forward, and two products backward; no other array has E = 8 and few dims.
    router = {(B, T, 24), (24, 8), (B, T, 8)}
    for e in in_float32:
        assert {v.aval.shape for v in e.invars} <= router, f"a float32 product of {[v.aval for v in e.invars]}"
    assert len(in_float32) == 3
    scores = [e for e in equations if e.primitive.name == "logistic" and e.outvars[0].aval.shape == (B, T, 8)]
    assert scores and all(types(e) == {"float32"} for e in scores)


# Several devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2", "data=2", "expert=2", "fsdp=2,expert=2,tensor=2"])
def test_the_mesh_changes_where_not_what(mesh):
    """Catches a missing or doubled psum, a balance loss or dropout that depends on the device of a token, and experts
    or vocabulary entries with local instead of global indices."""
    got = host(program("mla", mesh=mesh)(parameters("mla"), batch(), 3))
    assert_same(got, base("mla")[1], mesh)


@pytest.mark.parametrize("settings, message", [
    ({"mesh": "stage=3"},
     "cannot split 2 layer blocks of blocks.dense.norm_attention_D over mesh axes stage = 3 devices"),
    ({"mesh": "context=2"}, "cannot split data.seq_len=18 positions into 2 chunks for each of context=2 devices "
                            "(18 % 4 = 2); use data.seq_len=16 or 20"),
    ({"mesh": "stage=2,fsdp=2", "work.microbatches": 3},
     "cannot split data.batch_size=16 sequences over 2 batch shards * 3 microbatches (16 % 6 = 4); use "
     "data.batch_size=12 or 18"),
])  # fmt: skip
def test_what_does_not_split_is_refused_before_it_is_compiled(settings, message):
    """Catches layers, chunks or microbatches that are split unevenly, and a crash deep in JAX instead of numbers."""
    cfg = preset("tiny", **settings)
    with pytest.raises(UserError, match=re.escape(message)):
        pipeline.loss_and_grads(cfg, sharding.make_mesh(cfg.mesh))
