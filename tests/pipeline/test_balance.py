"""The balance loss over a microbatch: on any mesh and schedule it equals the mean over microbatches on one device."""

import functools

import jax
import numpy as np
import pytest

import model
import pipeline
import sharding
from config import Config, preset, replace
from plan import costs
from sharding import flatten_named
from tests import helpers

WEIGHT = 0.5  # large, so that a wrong gradient is visible
MODEL = {"model.balance_loss": WEIGHT, "model.balance_over": "microbatch", "model.dense_prefix": 0,
         "data.batch_size": 16, "data.seq_len": 16}  # fmt: skip
CASES = {
    "accumulation": ("fsdp=2,tensor=2", {"work.device_batch": 2, "model.n_layers": 4}),
    "1f1b": ("stage=2,fsdp=2", {"work.schedule": "1f1b", "work.microbatches": 4, "model.n_layers": 4}),
    "gpipe": ("stage=2,context=2", {"work.schedule": "gpipe", "work.microbatches": 4, "model.n_layers": 4}),
    "interleaved": ("stage=2,expert=2", {"work.schedule": "interleaved", "work.microbatches": 4, "work.chunks": 2,
                                         "model.n_layers": 8}),
    "zb": ("stage=2,data=2", {"work.schedule": "zb", "work.microbatches": 4, "model.n_layers": 4}),
}  # fmt: skip
QUICK = ("accumulation", "1f1b")


def config(case: str) -> Config:
    mesh, settings = CASES[case]
    return preset("tiny", mesh=mesh, **MODEL | settings)


def run(cfg: Config, batch, params):
    """Return loss, metrics and gradients on the mesh of cfg, as NumPy arrays."""
    mesh = sharding.make_mesh(cfg.mesh)
    place = lambda x, shape: jax.device_put(x, shape.sharding)
    placed = jax.tree.map(place, params, sharding.shapes(model.declare(cfg.model), mesh))
    loss, metrics, grads = step(cfg, mesh)(placed, sharding.put(batch, mesh), 0)
    return jax.device_get((loss, metrics, flatten_named(grads)))


step = functools.cache(pipeline.loss_and_grads)


def microbatch_rows(cfg: Config) -> list[np.ndarray]:
    """Return the rows of the batch that are in each microbatch: a part of the rows of every device."""
    B, M, devices = cfg.data.batch_size, pipeline.schedule(cfg).microbatches, cfg.mesh.batch_shards
    return [*np.arange(B).reshape(devices, M, -1).swapaxes(0, 1).reshape(M, -1)]


def on_one_device(cfg: Config, batch, params):
    """Compute loss, mean balance loss and gradients microbatch by microbatch, each in one piece on one device.

    Cross-entropy is a mean over all tokens of the batch, and the balance loss is a mean over microbatches.
    """
    rows = microbatch_rows(cfg)
    alone = replace(cfg, mesh="data=1", work=type(cfg.work)(), **{"data.batch_size": len(rows[0])})
    tokens, loss, balance, grads = batch["weights_BT"].sum(), 0.0, 0.0, None
    for some in rows:
        part = {name: x[some] for name, x in batch.items()}
        whole, without = (run(replace(alone, **{"model.balance_loss": w}), part, params) for w in (WEIGHT, 0.0))
        share = part["weights_BT"].sum() / tokens
        mix = lambda x, y, share=share: share * y + (x - y) / len(rows)
        loss += mix(whole[0], without[0])
        balance += whole[1]["balance_loss"] / len(rows)
        these = {name: mix(whole[2][name], without[2][name]) for name in whole[2]}
        grads = these if grads is None else {name: grads[name] + these[name] for name in grads}
    return loss, balance, grads


@pytest.mark.parametrize("case", helpers.with_repeats(CASES, QUICK))
def test_balance_over_a_microbatch_equals_one_device(case):
    """Catches loads of the whole batch or of one device, a share that counts devices or microbatches twice, and a
    gradient that misses the loads of other devices."""
    cfg = config(case)
    params, batch = helpers.draw(model.declare(cfg.model), 1), helpers.random_batch(cfg, 0)
    loss, metrics, grads = run(cfg, batch, params)
    want_loss, want_balance, want_grads = on_one_device(cfg, batch, params)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    np.testing.assert_allclose(metrics["balance_loss"], want_balance, rtol=1e-5)
    for name, want in want_grads.items():
        worst = np.abs(grads[name] - want).max() / max(np.abs(want).max(), 1e-20)
        assert worst < 2e-4, (name, worst)  # float32, other order of sums


def test_balance_over_microbatches_differs_from_balance_over_the_batch():
    """Catches a setting that is ignored: then the test above would compare equal microbatches."""
    cfg = config("accumulation")
    params, batch = helpers.draw(model.declare(cfg.model), 1), helpers.random_batch(cfg, 0)
    over = {name: run(replace(cfg, **{"model.balance_over": name}), batch, params)[1]["balance_loss"]
            for name in ("batch", "microbatch")}  # fmt: skip
    assert np.all(over["microbatch"] > 1.001 * over["batch"]), over  # few tokens are less balanced than many


@pytest.mark.parametrize("case", CASES)
def test_balance_over_a_microbatch_costs_no_forward_pass(case):
    """Catches a plan that charges a second forward pass, or a schedule that runs one."""
    cfg = config(case)
    sched = pipeline.schedule(cfg)
    assert costs.passes(cfg, sched).forward == sched.microbatches
    over_batch = replace(cfg, **{"model.balance_over": "batch"})
    assert costs.passes(over_batch, sched).forward == sched.microbatches * (1 if sched.turns else 2)
