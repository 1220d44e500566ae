"""Tests of examples in docstrings, and of single functions used outside the trainer."""

import doctest
import importlib

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
from overlap.weights import at_use
from sharding import CONTEXT, FSDP, STAGE, TENSOR, make_mesh, psum, vary
from tests import helpers
from tests.test_house import NOT_OURS, ROOT
from utils import UserError
from weights import families

C = preset("tiny").model
FEED_FORWARD = helpers.unstack(model.declare(C).prefix.feed_forward)
B, T, D = 4, 16, C.d_model


@pytest.fixture(scope="module")
def x_BTD():
    return np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)


OURS = ("optimizer", "weights.families", "data.prepare")


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
    assert found - {"tests.test_outside"} == set(OURS)


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
    with pytest.raises(
        UserError, match=rf"^{name} needs the mesh axis '{axis}', which exists only inside `jax.shard_map`"
    ):
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
