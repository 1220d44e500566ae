"""Tests of `on_mesh`, of examples in docstrings, and of single functions used outside the trainer."""

import doctest
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import model
import optimizer
import pipeline
import sharding
from config import OptimConfig, preset
from on_mesh import on_mesh, unstack
from overlap.weights import at_use
from sharding import CONTEXT, FSDP, STAGE, TENSOR, all_gather, make_mesh, psum, reduce_scatter, vary
from tests import helpers
from tests.test_house import NOT_OURS, ROOT
from utils import UserError
from weights import families

C = preset("tiny").model
FEED_FORWARD = unstack(model.declare(C).prefix.feed_forward)
B, T, D = 4, 16, C.d_model


@pytest.fixture(scope="module")
def w():
    return helpers.draw(FEED_FORWARD)


@pytest.fixture(scope="module")
def x_BTD():
    return np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


OURS = ("on_mesh", "optimizer", "weights.families", "data.prepare")


@pytest.mark.parametrize("name", OURS)
def test_examples_in_docstrings_run(name, monkeypatch, tmp_path):
    """Catches an example whose output has changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_file_with_an_example_is_run():
    """Catches an example in a file that the test above does not run."""
    ours = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in NOT_OURS]
    found = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in ours if ">>> " in path.read_text()
    }
    assert found - {"tests.test_on_mesh"} == set(OURS)


def test_one_function_on_a_mesh_takes_ten_lines():
    """Catches an example that no longer runs, or has more than ten lines."""
    [example] = doctest.DocTestFinder(recurse=False).find(on_mesh, "on_mesh", globs={})
    assert 0 < sum(part.source.count("\n") for part in example.examples) <= 10


def branch(w, x_btD):
    x_bsD = all_gather(x_btD, TENSOR, dim=1)
    return reduce_scatter(model.feed_forward(at_use(w, C), C, x_bsD), TENSOR, dim=1)


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=2,tensor=4", "context=2,tensor=2", "expert=2,context=4"])
def test_on_mesh_equals_one_device(mesh, w, x_BTD):
    """Catches shards that return in another order, and sums that are missing or doubled."""
    got = on_mesh(branch, make_mesh(mesh), FEED_FORWARD, "btD", out="btD")(w, x_BTD)
    want = np.stack([[helpers.np_feed_forward(x_D, w.w_gate_DF, w.w_up_DF, w.w_down_FD) for x_D in x_TD]
                     for x_TD in np.float64(x_BTD)])  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # float32, other order of sums


@pytest.mark.parametrize("kind", ["gather", "ring", "all_to_all"])
def test_positions_are_sharded_like_the_models(kind):
    """Catches chunks in another order than ring attention expects, which is right only on one device."""
    c = preset("tiny", **{"work.context_attention": kind}).at_work
    declared = unstack(model.declare(c).prefix.attention)
    w, (positions_T, segments_T) = helpers.draw(declared), helpers.documents(6, 7, padding=3)
    x_BTD = np.random.default_rng(2).normal(size=(2, T, D)).astype(np.float32)

    def attend(w, x_btD, positions_bs, segments_bs):
        return model.latent_attention(at_use(w, c), c, x_btD, positions_bs, segments_bs, 1.0)

    run = on_mesh(attend, make_mesh("context=2,tensor=2"), declared, "btD", "bs", "bs", out="btD")
    got = run(w, x_BTD, *(np.stack([x, x]) for x in (positions_T, segments_T)))
    want = [helpers.np_latent_attention(w, c, x_TD, positions_T, segments_T) for x_TD in np.float64(x_BTD)]
    real = segments_T > 0
    np.testing.assert_allclose(got[:, real], np.stack(want)[:, real], rtol=1e-4, atol=1e-5)


def test_a_scalar_and_a_tree_of_results(w, x_BTD):
    """Catches a result that is checked or reordered by the letters of another result."""

    def both(w, x_btD, scale):
        y_btD = branch(w, x_btD) * scale
        return {"y": y_btD, "sum": psum(jnp.sum(y_btD), sharding.TOKENS)}

    mesh = make_mesh("fsdp=2,context=2,tensor=2")
    got = on_mesh(both, mesh, FEED_FORWARD, "btD", "", out={"y": "btD", "sum": ""})(w, x_BTD, np.float32(2))
    once = on_mesh(branch, mesh, FEED_FORWARD, "btD", out="btD")(w, x_BTD)
    np.testing.assert_allclose(got["y"], 2 * np.asarray(once), rtol=1e-6)
    np.testing.assert_allclose(got["sum"], 2 * np.sum(np.float64(once)), rtol=1e-4)


def partial_sum(w, x_btD):
    return model.feed_forward(at_use(w, C), C, all_gather(x_btD, TENSOR, dim=1))


@pytest.mark.parametrize("function, letters, out, message", [
    (partial_sum, "btD", "bsD", "out='bsD': the result varies along tensor, which no letter declares"),
    (partial_sum, "btD", "btD", "shard of (4, 16, 24) is (2, 4, 24), but the result is (2, 16, 24)"),
    (lambda w, x_btD: branch(w, x_btD)[:, 0], "btD", "btD", "but the result is (2, 24)"),
    (branch, "btD", "BTD", "varies along data, fsdp, expert, context, tensor"),
    (branch, "bt", "btD", "letters 'bt': the array has 3 dims, shape (4, 16, 24)"),
    (branch, "bqD", "btD", "letters 'bqD': unknown sharded dim 'q'; use one of b, s, t, e, l, f, g, h, m, v"),
])  # fmt: skip
def test_a_result_that_differs_from_its_letters_is_refused(function, letters, out, message, w, x_BTD):
    """Catches a partial sum over TENSOR that is accepted as a whole array or as shards."""
    with pytest.raises(UserError, match=re.escape(message)):
        on_mesh(function, make_mesh("fsdp=2,tensor=4"), FEED_FORWARD, letters, out=out)(w, x_BTD)


def test_a_partial_sum_is_refused_on_one_device_too(w, x_BTD):
    """Catches a check that works only on a larger mesh: users write their functions on one device."""
    with pytest.raises(UserError, match="varies along tensor"):
        on_mesh(partial_sum, make_mesh("data=1"), FEED_FORWARD, "btD", out="bsD")(w, x_BTD)


@pytest.mark.parametrize("mesh, shape, message", [
    ("fsdp=4", (6, 16, D), "cannot split B=6 of letters 'btD' into 4 parts (6 % 4 = 2); use B=4 or 8"),
    ("context=2", (4, 6, D), "cannot split T=6 of letters 'btD' into 4 parts (6 % 4 = 2); use T=4 or 8"),
])  # fmt: skip
def test_a_size_that_does_not_split_is_refused(mesh, shape, message, w):
    """Catches shard_map's own error, which names neither the letter nor a size that fits."""
    with pytest.raises(UserError, match=re.escape(message)):
        on_mesh(branch, make_mesh(mesh), FEED_FORWARD, "btD", out="btD")(w, np.zeros(shape, np.float32))


def test_sizes_of_one_letter_agree(w, x_BTD):
    """Catches two arrays with different batch sizes, whose shards would not belong together."""
    run = on_mesh(lambda x, y: x + y, make_mesh("fsdp=2"), "btD", "btD", out="btD")
    with pytest.raises(UserError, match="letters 'btD': B=2 here, but B=4 in another array"):
        run(x_BTD, x_BTD[:2])


@pytest.mark.parametrize("call, name, axis", [
    (lambda w, x: model.feed_forward_branch(w, C, x, None), "all_gather", TENSOR),
    (lambda w, x: at_use(w.feed_forward, C), "all_gather", FSDP),
    (lambda w, x: model.embed(x[0], jnp.zeros((2, 3), int)), "axis_index", TENSOR),
    (lambda w, x: model.blocks(model.Block(dense=w), C, x, None), "axis_size", STAGE),
    (lambda w, x: psum(x, (CONTEXT, TENSOR)), "psum", CONTEXT),
    (lambda w, x: vary(x, FSDP), "vary", FSDP),
])  # fmt: skip
def test_outside_of_shard_map_the_error_says_so(call, name, axis, x_BTD):
    """Catches JAX's "unbound axis name", which says neither what is missing nor what to do."""
    layer = model.Layer(norm_feed_forward_D=np.ones(D, np.float32), feed_forward=helpers.draw(FEED_FORWARD))
    with pytest.raises(UserError, match=rf"^{name} needs the mesh axis '{axis}', which exists only inside `shard_map`"):
        jax.jit(call)(layer, x_BTD)


@pytest.mark.parametrize("axes", [FSDP, (FSDP,), (FSDP, TENSOR)])
def test_vary_takes_one_axis_or_several(axes):
    """Catches a string that is read as a sequence of letters: JAX has no axis 'f'."""
    seen = []

    def local(x):
        seen.append(jax.typeof(vary(x, axes)).mat.varying)
        return x

    jax.shard_map(local, mesh=make_mesh("fsdp=2,tensor=2"), in_specs=P(), out_specs=P())(jnp.zeros(3))
    assert seen == [set(sharding.as_tuple(axes))]


# Compiled functions ---------------------------------------------------------------------------------------------------


def test_logits_need_only_tokens():
    """Catches logits that need targets, and rows that are not one document each by default."""
    cfg = preset("tiny", **{"data.batch_size": 4, "data.seq_len": 16, "mesh": "fsdp=2,context=2"})
    mesh, params = make_mesh(cfg.mesh), helpers.draw(model.declare(cfg.model))
    run, tokens_BT = pipeline.logits(cfg, mesh), np.random.default_rng(3).integers(0, 280, (4, 16), dtype=np.int32)
    positions_T, segments_T = helpers.documents(16)
    got_BTV = run(params, {"tokens_BT": tokens_BT})
    assert got_BTV.shape == (4, 16, 280) and got_BTV.dtype == np.float32
    want_TV, _ = helpers.np_model(params, cfg.model, tokens_BT[2], positions_T, segments_T)
    np.testing.assert_allclose(got_BTV[2], want_TV, rtol=1e-3, atol=1e-4)  # float32 against float64
    with pytest.raises(UserError, match="the batch has no positions_BT, segments_BT, targets_BT, weights_BT; it has"):
        pipeline.loss_and_grads(cfg, mesh)(params, {"tokens_BT": tokens_BT}, 0)


# The optimizer --------------------------------------------------------------------------------------------------------


def test_adamw_works_on_any_tree():
    """Catches an optimizer that works only with the model's tree, and weight decay that ignores the mask."""
    o = OptimConfig(lr=0.01, warmup_steps=1, weight_decay=0.5, clip_norm=0.0)
    params, grads = ([jnp.full(3, x), {"b": jnp.full((2, 1), x + 1)}] for x in (2.0, -1.0))
    chain = optimizer.adamw(o, steps=4, decay=[True, {"b": False}])
    changes, _ = chain.update(grads, chain.init(params), params)
    # The first step of Adam is the sign of the gradient, whatever its size; that of 0 is 0.
    np.testing.assert_allclose(changes[0], -0.01 * (-1 + 0.5 * 2), atol=1e-7)
    np.testing.assert_allclose(changes[1]["b"], 0, atol=1e-7)
    everywhere = optimizer.adamw(o, steps=4)
    changes, _ = everywhere.update(grads, everywhere.init(params), params)
    np.testing.assert_allclose(changes[1]["b"], -0.01 * 0.5 * 3, rtol=1e-5)


def test_clip_uses_the_global_norm():
    """Catches a norm per array: clipping uses the norm of all gradients as one vector."""
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}  # norm 5
    for largest, scale in ((2.5, 0.5), (10.0, 1.0), (0.0, 1.0)):
        clipped, _ = optimizer.clip(largest).update(grads, optax.EmptyState())
        np.testing.assert_allclose(clipped["a"], [3 * scale, 0], rtol=1e-6)
        np.testing.assert_allclose(clipped["b"], [[4 * scale]], rtol=1e-6)
