"""Tests of local steps: the outer step, fragments, what replicas exchange, and resuming in the middle of a round."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import local_steps
import optimizer
import sharding
from compile import ledger
from config import first_difference, preset
from config.fields import parse_outer
from sharding import Declaration
from tests import helpers
from train import checkpoint, directory, guard
from utils import UserError

# A linear model of two layers' weights, small enough to compile in no time. Letters: B sequences, T inputs, L layers
MESH, B, T, L, RATE = "data=2,fsdp=2", 12, 6, 5, 0.1
DECLARED = {
    "bias_T": Declaration("T", (T,), P(), 1.0, 0.0, jnp.float32, True, True, True),
    "w_LT": Declaration("LT", (L, T), P(None, "fsdp"), 1.0, 0.0, jnp.float32, True, True, True),
}


def config(outer: str = "every=1,lr=1,momentum=0"):
    return preset("tiny", **{"mesh": MESH, "data.batch_size": B, "run.steps": 100, "optim.outer": outer})


def loss(params, batch):
    weight_T = jnp.tanh(params["w_LT"]).sum(axis=0) + params["bias_T"]
    return jnp.mean((batch["x_BT"] @ weight_T - batch["y_BT"][:, 0]) ** 2)


def inner_step(chain, cfg=None, mesh=None):
    """Return a training step of the linear model with an optimizer."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        changes, moments = chain.update(grads, state.optimizer)
        params = optax.apply_updates(state.params, changes)
        return state.replace(params=params, optimizer=moments, step=state.step + 1), {"loss": value, "n": state.step}

    return step


def batch_of(number: int):
    rng = np.random.default_rng(number)
    return {name: rng.normal(size=(B, T)).astype(np.float32) for name in ("x_BT", "y_BT")}


def start(chain, cfg):
    """Return the state at step 0 and the compiled step of the linear model."""
    mesh = sharding.make_mesh(cfg.mesh)
    params = helpers.draw(DECLARED)
    one = optimizer.TrainState(params, chain.init(params), jnp.int32(0), jnp.int32(0), jnp.int32(0))
    everywhere = jax.tree.map(lambda x: NamedSharding(mesh, P()), one)
    places = {name: NamedSharding(mesh, d.spec) for name, d in DECLARED.items()}
    places = jax.tree.map(lambda tree: places if isinstance(tree, dict) else tree, everywhere,
                          is_leaf=lambda tree: isinstance(tree, dict))  # fmt: skip
    places = local_steps.with_replica_shardings(places)
    state = jax.device_put(local_steps.with_replicas(one, cfg.mesh.data), places)
    return state, local_steps.LocalSteps(
        cfg, mesh, functools.partial(inner_step, chain), DECLARED, places.replicas, None
    )


def reference(chain, cfg, steps: int):
    """Algorithm 1 of DiLoCo in NumPy float64, with the fragments of Streaming DiLoCo: outer parameters after each step,
    and the replicas' parameters at the end."""
    o, R = parse_outer(cfg.optim.outer), cfg.mesh.data
    outer = {name: np.float64(x) for name, x in helpers.draw(DECLARED).items()}
    speed = jax.tree.map(np.zeros_like, outer)
    step = jax.jit(inner_step(chain))
    params = jax.tree.map(jnp.float32, outer)
    states = [optimizer.TrainState(params, chain.init(params), jnp.int32(0), 0, 0) for _ in range(R)]
    history = []
    for number in range(steps):
        parts = [{k: x.reshape(R, -1, T)[r] for k, x in batch_of(number).items()} for r in range(R)]
        states = [step(state, part)[0] for state, part in zip(states, parts, strict=True)]
        replicas = [jax.tree.map(lambda x: np.array(x, np.float64), state.params) for state in states]
        for f in range(o.fragments):
            if (number + 1 - (f + 1) * (o.every // o.fragments)) % o.every:
                continue
            for name, layer in [("w_LT", i) for i in range(f, L, o.fragments)] + [("bias_T", ...)] * (f == 0):
                gradient = np.mean([outer[name][layer] - one[name][layer] for one in replicas], axis=0)
                speed[name][layer] = o.momentum * speed[name][layer] + gradient
                outer[name][layer] -= o.lr * (gradient + o.momentum * speed[name][layer])
                for one in replicas:
                    one[name][layer] = outer[name][layer]
        states = [s.replace(params=jax.tree.map(jnp.float32, one)) for s, one in zip(states, replicas, strict=True)]
        history.append(jax.tree.map(np.copy, outer))
    return history, replicas


close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)  # float32 against float64


@pytest.mark.parametrize("every, fragments", [(3, 1), (4, 2)])
def test_an_outer_step_is_the_papers(every, fragments):
    """Catches a sum instead of a mean, a wrong sign, momentum without Nesterov, a replica that keeps its own
    parameters, an outer step at the wrong step, and a fragment with wrong layers."""
    cfg = config(f"every={every},fragments={fragments}")
    chain = optax.adam(RATE)
    history, replicas = reference(chain, cfg, 9)
    state, step = start(chain, cfg)
    for number, want in enumerate(history):
        state, _ = step(state, sharding.put(batch_of(number), step.mesh))
        jax.tree.map(close, state.params, want)
        assert int(state.step) == number + 1
    for place, want in enumerate(replicas):
        jax.tree.map(lambda got, want, place=place: close(got[place], want), state.replicas.params, want)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_one_local_step(name):
    """With SGD inside, one local step and a plain outer step of rate 1 are the step on the mean gradient. With Adam
    they are the mean of the replicas' parameters, which is another update. Catches a wrong split of the batch."""
    chain, cfg = getattr(optax, name)(RATE), config()
    state, step = start(chain, cfg)
    params, plain = helpers.draw(DECLARED), jax.jit(inner_step(chain))
    whole = optimizer.TrainState(params, chain.init(params), jnp.int32(0), 0, 0)
    for number in range(3):
        state, _ = step(state, sharding.put(batch_of(number), step.mesh))
        whole, _ = plain(whole, batch_of(number))
    same = jax.tree.map(lambda got, want: np.allclose(got, want, rtol=1e-5, atol=1e-6), state.params, whole.params)
    assert all(jax.tree.leaves(same)) == (name == "sgd")
    mean = reference(chain, cfg, 3)[0][-1]
    jax.tree.map(close, state.params, mean)


def test_the_last_step_ends_a_round():
    """Catches a run whose last steps are in no outer step, so that the evaluation misses them."""
    cfg = dataclasses.replace(config("every=4,lr=1,momentum=0"), run=dataclasses.replace(config().run, steps=2))
    state, step = start(optax.sgd(RATE), cfg)
    for number in range(2):
        assert number == 0 or not np.allclose(state.params["w_LT"], state.replicas.params["w_LT"][0])
        state, _ = step(state, sharding.put(batch_of(number), step.mesh))
    jax.tree.map(
        lambda x, own: np.testing.assert_array_equal(own, np.stack([x, x])), state.params, state.replicas.params
    )


def test_metrics_are_means_over_replicas():
    """Catches a metric of one replica only, and a counter that is averaged."""
    cfg = config("every=2,lr=1,momentum=0")
    state, step = start(optax.sgd(RATE), cfg)
    params = state.params
    batch = batch_of(0)
    halves = [float(loss(params, {name: x[half] for name, x in batch.items()})) for half in (slice(6), slice(6, 12))]
    state, metrics = step(state, sharding.put(batch, step.mesh))
    assert float(metrics["loss"]) == pytest.approx(np.mean(halves)) and abs(halves[0] - halves[1]) > 0.1
    assert np.isfinite(metrics["loss"]) and np.asarray(metrics["loss"]).tolist() == float(metrics["loss"])
    several = local_steps.ReplicaMetric(jnp.int32([1, 3]), step.merge)
    assert int(several) == 3


def test_replicas_wait_for_each_other_only_for_a_row():
    """Catches a training loop that reads the metrics of every step, for which all replicas would have to finish it."""
    asked = []
    merge = lambda x_R: asked.append(x_R) or np.max(x_R)
    watch = guard.SkipWatch(config("every=50"), None)
    for number in range(30):
        watch.add_step(number, {"skipped_in_a_row": local_steps.ReplicaMetric(np.int32([0, 0]), merge)})
    assert not asked
    watch.check_pending()
    assert len(asked) == 30


@pytest.mark.parametrize("fragments", [1, 2])
def test_bytes_between_replicas(fragments):
    """The outer steps are the only programs of several replicas, and send each parameter once. Catches an exchange of
    all layers by each fragment, and of moments."""
    cfg = config(f"every=4,fragments={fragments}")
    state, step = start(optax.adam(RATE), cfg)
    step.lower(state, sharding.put(batch_of(0), step.mesh)).compile()
    assert "num_partitions=2" in step.as_text()
    sent = [ledger.read(one.as_text(), step.mesh).totals_by("axes") for one in step.outer]
    layers = [[0, 2, 4], [1, 3]] if fragments == 2 else [range(L)]
    for found, own in zip(sent, layers, strict=True):
        entries = len(own) * T // 2 + T * (0 in own)  # 2: fsdp
        assert {axes: total.wire_bytes for axes, total in found.items()} == {"data": 2 * (2 - 1) / 2 * 4 * entries}


# The transformer ------------------------------------------------------------------------------------------------------

DENSE = {"model.n_layers": 2, "model.dense_prefix": 0, "model.n_experts": 0, "model.moe_every": 1, "data.seq_len": 24,
         "model.attention": "gqa", "mesh": "data=2", "optim.outer": "every=2", "run.steps": 4}  # fmt: skip


def test_a_run_resumes_in_the_middle_of_a_round(tmp_path):
    """Catches a state that is not saved, such as momentum or a replica's moments; a replica that trains on another's
    batch; and parameters in the checkpoint that are not the outer ones."""
    cfg = preset("tiny", **DENSE)
    mesh = sharding.make_mesh(cfg.mesh)
    step, state = optimizer.train_step(cfg, mesh), optimizer.init(cfg, mesh)
    first = {name: np.asarray(x) for name, x in sharding.flatten_named(state.params).items()}
    shapes, places = optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh)
    for number in range(4):
        if number in (1, 3):
            with checkpoint.Saver(tmp_path / "saved") as saver:
                checkpoint.save(saver, number, state, {})
        state, _ = step(state, sharding.put(helpers.random_batch(cfg, number), mesh))
    read = checkpoint.restore_params(tmp_path / "saved", sharding.shapes(optimizer.declare(cfg.model), mesh), 1)
    jax.tree.map(np.testing.assert_array_equal, sharding.flatten_named(read), first)
    again = checkpoint.restore(tmp_path / "saved", checkpoint.make_target(shapes, places), 1)
    for number in range(1, 4):
        again, _ = step(again, sharding.put(helpers.random_batch(cfg, number), mesh))
    jax.tree.map(np.testing.assert_array_equal, again, state)
    drawn = [x for name, x in sharding.flatten_named(state.params).items() if not np.array_equal(x, first[name])]
    assert len(drawn) == len(first), "a parameter has not changed"


def test_a_run_resumes_only_with_as_many_replicas():
    """Catches a checkpoint that is read with another number of replicas, and a refusal of any other change of mesh."""

    def result_settings(mesh: str, outer: str) -> dict:
        cfg = preset("tiny", **{"mesh": mesh, "optim.outer": outer})
        return directory.result_settings({"config": cfg.to_dict(), "data": {}})

    differs = lambda here, there, outer: first_difference(result_settings(here, outer), result_settings(there, outer))
    assert differs("data=4", "data=2", "every=3") == "mesh.data is 4 here and 2 there"
    assert differs("data=4", "data=4,fsdp=2", "every=3") is None
    assert differs("data=4", "data=2", "") is None
    start = result_settings("data=2", "every=4")
    assert first_difference(result_settings("data=2", ""), start) == "optim.outer is '' here and 'every=4' there"


@pytest.mark.parametrize("settings, message", [
    ({"mesh": "fsdp=2"}, "optim.outer='every=6' needs several replicas; use a mesh with data=2 or more, not fsdp=2"),
    ({"optim.shard_over_data": True}, "cannot share the shards of optim.shard_over_data; remove one"),
    ({"run.gradient_stats_every": 5}, "has no gradient statistics; remove --run.gradient_stats_every"),
    ({"run.replay": 5}, "--replay repeats only steps of a run without local steps"),
])  # fmt: skip
def test_what_does_not_work_with_local_steps_is_refused(settings, message):
    """Catches a setting that would be ignored, or would fail with a traceback."""
    with pytest.raises(UserError, match=message):
        local_steps.check(preset("tiny", **DENSE | {"optim.outer": "every=6"} | settings))
