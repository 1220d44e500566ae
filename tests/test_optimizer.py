"""Tests of the optimizer: updates against NumPy, schedules, the training step, and the sharding of its state."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dataset
import model
import optimizer
import pipeline
import sharding
from config import preset, replace
from data import prepare
from plan import planner
from tests import helpers
from train import checkpoint
from utils import UserError

# Only three MoE layers, which compile in seconds; these tests do not depend on the depth.
SMALL = {"model.n_layers": 3, "model.dense_prefix": 0, "model.moe_every": 1, "model.attention": "gqa",
         "model.n_shared": 0}  # fmt: skip
BIAS = "blocks.moe.feed_forward.bias_E"


def is_decayed(name):
    """Whether a parameter decays, from its name instead of its declaration: only matrices do."""
    last = name.rsplit(".", 1)[-1]
    return not last.startswith(("norm", "bias", "embedding"))


def random_tree(seed, shapes, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (scale * rng.standard_normal(x.shape)).astype(np.float32), shapes)


def updated(cfg, params, gradients):
    """Return the parameters after each of these gradients, by `optimizer.adamw`."""
    chain = optimizer.make_optimizer(cfg)

    @jax.jit
    def step(params, moments, gradient):
        updates, moments = chain.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments

    moments = chain.init(params)
    for gradient in gradients:
        params, moments = step(params, moments, gradient)
        yield {name: np.asarray(x) for name, x in sharding.flatten_named(params).items()}


# Updates --------------------------------------------------------------------------------------------------------------


def test_three_steps_equal_numpy():
    """Catches decay that enters the moments, a bias correction that starts at 0, eps inside the root, clipping per
    parameter or below the limit, and a learning rate that is one step off."""
    cfg = preset("tiny", **{"optim.warmup_steps": 2, "optim.weight_decay": 0.3, "optim.clip_norm": 2.0,
                            "optim.lr": 0.01, "optim.adamw": "b1=0.8,b2=0.9,eps=1e-3"})  # fmt: skip
    shapes = sharding.shapes(model.declare(cfg.model))
    params = random_tree(0, shapes)
    gradients = [
        random_tree(1, shapes),
        random_tree(2, shapes, 1e-3),
        random_tree(3, shapes),
    ]  # the second is not clipped

    w = {name: x.astype(np.float64) for name, x in sharding.flatten_named(params).items()}
    m, v = ({name: np.zeros_like(x) for name, x in w.items()} for _ in range(2))
    for t, (gradient, got) in enumerate(zip(gradients, updated(cfg, params, gradients), strict=True), start=1):
        g = {name: x.astype(np.float64) for name, x in sharding.flatten_named(gradient).items()}
        norm = np.sqrt(sum(np.sum(x**2) for x in g.values()))
        assert (norm > 2.0) == (t != 2), "the test needs clipped and unclipped steps"
        rate = [0.005, 0.01, 0.01 * (0.1 + 0.9 * (1 + np.cos(np.pi / 8)) / 2)][t - 1]  # 10 steps, 2 of them warm-up
        for name in w:
            x = g[name] * min(1, 2.0 / norm)
            m[name] = 0.8 * m[name] + 0.2 * x
            v[name] = 0.9 * v[name] + 0.1 * x**2
            update = m[name] / (1 - 0.8**t) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-3)
            w[name] -= rate * (update + 0.3 * w[name] * is_decayed(name))
        for name in w:
            # float32 keeps parameters of size 1 to 6e-8; a handful of roundings a step
            np.testing.assert_allclose(got[name], w[name], rtol=1e-6, atol=1e-6, err_msg=f"{name}, step {t}")


def test_norms_biases_and_embeddings_do_not_decay():
    """Catches decay chosen by rank or size, which would reach stacked norms, and a declaration that is ignored."""
    cfg = preset("tiny", **{"optim.warmup_steps": 1, "optim.weight_decay": 0.5, "optim.lr": 0.1})
    declared = sharding.flatten_named(model.declare(cfg.model))
    kept = {name for name in declared if not is_decayed(name)}
    assert {name for name, d in declared.items() if not d.decay} == kept
    assert {"embedding_VD", "norm_D", BIAS, "prefix.norm_attention_D", "prefix.attention.norm_kv_C"} <= kept

    params = random_tree(0, sharding.shapes(model.declare(cfg.model)))
    (after,) = updated(cfg, params, [jax.tree.map(np.zeros_like, params)])
    for name, before in sharding.flatten_named(params).items():
        if name in kept:
            np.testing.assert_array_equal(after[name], before, err_msg=name)
        else:  # the only thing that acts without a gradient: 1 - 0.1 * 0.5; one rounding
            np.testing.assert_allclose(after[name], 0.95 * before, rtol=3e-7, err_msg=name)


# Moments in bfloat16 --------------------------------------------------------------------------------------------------

BFLOAT16 = {"optim.adamw": "moments=bfloat16"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments, size", [("float32", 4), ("bfloat16", 2), ("parameters", None)])
def test_the_plan_counts_the_bytes_of_stored_moments(moments, size, precision):
    """Catches a flag that stores moments in another dtype, or does not reach the plan."""
    cfg = preset("tiny", **{"optim.adamw": f"moments={moments}", "model.precision": precision})
    shapes = sharding.flatten_named(optimizer.state_shapes(cfg).optimizer)
    stored = [x for name, x in shapes.items() if ".mu." in name or ".nu." in name]
    entries = sum(x.size for x in jax.tree.leaves(sharding.shapes(model.declare(cfg.model))))
    size = size or {"float32": 4, "bfloat16": 2}[precision]
    assert sum(x.size * x.dtype.itemsize for x in stored) == 2 * entries * size
    assert planner.plan(cfg).memory_bytes["optimizer"] == 2 * entries * size


def test_a_step_with_moments_in_bfloat16_is_close_to_one_in_float32():
    """Catches an update that also computes in bfloat16, or drops a moment when it is stored."""
    params = {"w": np.ones((5, 7), np.float32)}
    changes = {}
    for moments in ("float32", "bfloat16"):
        o = preset("tiny", **{"optim.adamw": f"moments={moments}", "optim.clip_norm": 0.0}).optim
        chain = optimizer.adamw(o, steps=40)
        state, rng = chain.init(params), np.random.default_rng(0)
        for _ in range(20):
            grads = {"w": np.float32(rng.normal(0.5, 1, (5, 7)))}
            changes[moments], state = chain.update(grads, state, params)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.shape == (5, 7)} == {"bfloat16"}
    np.testing.assert_allclose(changes["bfloat16"]["w"], changes["float32"]["w"], rtol=0.03, atol=1e-4)  # 8 bits
    assert np.any(changes["bfloat16"]["w"] != changes["float32"]["w"])


def test_moments_in_bfloat16_are_restored_bit_by_bit(tmp_path):
    """Catches a checkpoint that converts them, or reads them as float32."""
    cfg, mesh = preset("tiny", **SMALL | BFLOAT16), sharding.make_mesh("data=1")
    state = optimizer.init(cfg, mesh)
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.dtype == jnp.bfloat16 else x
    state = state.replace(optimizer=jax.tree.map(draw, state.optimizer))
    with checkpoint.Saver(tmp_path) as saver:
        checkpoint.save(saver, 1, state, {})
    target = checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(tmp_path, target, 1), state)


def test_moments_that_bfloat16_rounds_away_are_refused():
    """Catches a second moment that stays at its largest value, which makes each step too small."""
    with pytest.raises(UserError, match=r"optim.adamw='b2=0.999,moments=bfloat16': with b1=0.9 and b2=0.999 a moment"):
        preset("tiny", **{"optim.adamw": "b2=0.999,moments=bfloat16"})


# Schedules ------------------------------------------------------------------------------------------------------------


def rates(schedule, steps, warmup):
    cfg = preset("tiny", **{"optim.schedule": schedule, "optim.warmup_steps": warmup, "run.steps": steps,
                            "optim.lr": 2.0})  # fmt: skip
    return np.asarray(jax.jit(jax.vmap(optimizer.learning_rate(cfg.optim, cfg.run.steps)))(np.arange(steps)))


def test_cosine_at_named_steps():
    """Catches a first step of rate 0, a peak that lasts two steps or is missed, and an end that is not `final`."""
    rate = rates("cosine", steps=24, warmup=4)
    named = {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 13: 2.0 * (0.1 + 1) / 2, 23: 0.2}
    assert {step: rate[step] for step in named} == pytest.approx(named, rel=1e-6)  # float32
    assert np.all(np.diff(rate[3:]) < 0), "after the peak it falls at every step"


def test_wsd_at_named_steps():
    """Catches a plateau that is not flat, a decay that starts a step late, and an end that is not `final`."""
    rate = rates("wsd:0.25:0.1", steps=24, warmup=4)
    np.testing.assert_allclose(rate[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(rate[3:18], 2.0)
    np.testing.assert_allclose(rate[18:], 2.0 - 0.3 * np.arange(1, 7), rtol=1e-6)  # six steps down to 0.2


def test_rsqrt_at_named_steps():
    """Catches a decay from step 0 instead of the end of the warm-up, a second peak, and a division by 0."""
    rate = rates("rsqrt", steps=64, warmup=4)
    np.testing.assert_allclose(rate[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    named = {4: 2 * (4 / 5) ** 0.5, 15: 1.0, 63: 0.5}  # the 16th and the 64th step: sqrt(4/16) and sqrt(4/64)
    assert {step: rate[step] for step in named} == pytest.approx(named, rel=1e-6)
    np.testing.assert_allclose(rates("rsqrt", steps=4, warmup=0), [2.0, 2 / 2**0.5, 2 / 3**0.5, 1.0], rtol=1e-6)


def test_piecewise_at_named_steps():
    """Catches steps that count from 0, a warm-up that also applies, and no rate after the last point."""
    rate = rates("0:0,4:1,6:1,10:0.5", steps=12, warmup=5)
    np.testing.assert_allclose(rate, [0.5, 1.0, 1.5, 2, 2, 2, 1.75, 1.5, 1.25, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedules_of_short_runs(schedule):
    """Catches a warm-up longer than the run, a division by 0, and a decay of negative length."""
    np.testing.assert_allclose(rates(schedule, steps=3, warmup=10), [2 / 3, 4 / 3, 2.0], rtol=1e-6)
    np.testing.assert_allclose(rates(schedule, steps=1, warmup=0)[0], 2.0 if schedule == "wsd" else 0.2, rtol=1e-6)
    without = rates(schedule, steps=10, warmup=0)
    assert without[0] > 1.9 and without[-1] == pytest.approx(0.2)


# Adafactor ------------------------------------------------------------------------------------------------------------

# Two blocks of a dense and an MoE layer, so weights have layers, blocks and experts as leading dims.
TWO = {"model.n_layers": 4, "model.dense_prefix": 0, "model.moe_every": 2, "model.n_experts": 4, "model.top_k": 2,
       "optim.name": "adafactor", "optim.schedule": "0:1"}  # fmt: skip


def matrices(d, x):
    """Return the matrices of a parameter, for each layer and expert. With fan_in HU, rows are (head, value) pairs."""
    letters = d.dims.lstrip("LJP")
    letters = letters[1:] if letters in ("EDM", "EMD") else letters
    stack, own = x.shape[: len(d.dims) - len(letters)], x.shape[len(d.dims) - len(letters) :]
    if len(own) == 3:
        own = (-1, own[2]) if letters[:2] in ("HU", "HK") else (own[0], -1)
    return {index: x[index].reshape(own) for index in np.ndindex(stack)}


def test_adafactor_on_stacked_layers_equals_optax_on_each_matrix(monkeypatch):
    """Catches means over layers or experts, factors of single heads, clipping or a scale that layers share, momentum,
    and a decay rate that is one step off."""
    monkeypatch.setattr(optimizer, "FACTORED_FROM", 16)
    cfg = preset("tiny", **TWO, **{"optim.lr": 0.1, "optim.clip_norm": 0, "optim.weight_decay": 0})
    declared = sharding.flatten_named(model.declare(cfg.model))
    shapes = sharding.shapes(model.declare(cfg.model))
    params, gradients = random_tree(0, shapes), [random_tree(n, shapes, 10.0**-n) for n in (1, 2, 3)]
    split = lambda flat: {name: matrices(declared[name], np.asarray(x)) for name, x in flat.items()}

    want = split(sharding.flatten_named(params))
    chain = optax.adafactor(0.1, min_dim_size_to_factor=16)
    state, update = chain.init(want), jax.jit(chain.update)
    for gradient, got in zip(gradients, updated(cfg, params, gradients), strict=True):
        changes, state = update(split(sharding.flatten_named(gradient)), state, want)
        want = optax.apply_updates(want, changes)
        for name, layers in split(got).items():
            for index, x in layers.items():
                np.testing.assert_allclose(x, want[name][index], rtol=1e-5, atol=1e-6, err_msg=f"{name} {index}")

    kinds = {len(optimizer.second_moment_shapes(d)) for d in declared.values()}
    assert kinds == {1, 2}, "the test needs factored and full second moments"


OTHER_MESH = pytest.param("stage=2,context=2,tensor=2", marks=pytest.mark.repeat)


@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2,tensor=2", OTHER_MESH])
def test_adafactor_on_a_mesh_equals_one_device(monkeypatch, mesh):
    """Catches means over a shard only, a state that is replicated or gathered, and a plan with other bytes."""
    monkeypatch.setattr(optimizer, "FACTORED_FROM", 16)
    cfg = preset("tiny", **TWO, **{"mesh": mesh, "data.seq_len": 24, "optim.clip_norm": 0.5})
    shapes = sharding.shapes(model.declare(cfg.model))
    params, gradients = random_tree(0, shapes), [random_tree(n, shapes) for n in (1, 2)]
    place, chain = optimizer.state_shardings(cfg, sharding.make_mesh(mesh)), optimizer.make_optimizer(cfg)
    state = jax.device_put(chain.init(params), place.optimizer)
    step = jax.jit(chain.update, out_shardings=(place.params, place.optimizer))
    here = jax.device_put(params, place.params)
    step = step.lower(here, state, here).compile()
    for gradient, want in zip(gradients, updated(cfg, params, gradients), strict=True):
        changes, state = step(jax.device_put(gradient, place.params), state, here)
        here = jax.device_put(optax.apply_updates(here, changes), place.params)
        for name, x in sharding.flatten_named(here).items():
            np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-6, err_msg=name)

    assert "all-reduce" in (text := step.as_text())
    assert not re.search("all-gather|all-to-all|collective-permute", text)
    counts = 2 * 4  # of updates and of the schedule
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held - counts == planner.plan(cfg).memory_bytes["optimizer"]
    out = next(x for n, x in sharding.flatten_named(state).items() if n.endswith("moe.attention.w_out_HUD.1"))
    D, shards = cfg.model.d_model, 4 if "fsdp" in mesh else 2
    assert out.shape == (2, 1, 1, D)
    assert out.addressable_shards[0].data.shape == (2 if shards == 4 else 1, 1, 1, D // shards)


@pytest.mark.parametrize("name, moments", [("adafactor", "second_moments"), ("muon", "muon.inner_state.mu")])
def test_the_state_moves_to_another_mesh(tmp_path, monkeypatch, name, moments):
    """Catches a factored second moment that is saved or read as if it had the shape of its parameter, and a momentum
    that only some parameters have, which is saved for another one."""
    monkeypatch.setattr(optimizer, "FACTORED_FROM", 16)
    cfg, rng = preset("tiny", **{"optim.name": name, "optim.frozen": "prefix.*"}), np.random.default_rng(0)
    state = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), optimizer.state_shapes(cfg))
    on = lambda mesh: checkpoint.make_target(state, optimizer.state_shardings(cfg, sharding.make_mesh(mesh)))
    here, there = on("fsdp=2,tensor=2"), on("stage=2,expert=2")
    with checkpoint.Saver(tmp_path) as saver:
        checkpoint.save(saver, 1, jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), state, here), {})
    got, want = (sharding.flatten_named(tree) for tree in (checkpoint.restore(tmp_path, there), state))
    assert list(got) == list(want) and any(f".{moments}." in name for name in got)
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]), x, err_msg=name)


# Frozen parameters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_frozen_parameters_do_not_change(monkeypatch, name):
    """Catches weight decay of a frozen parameter, moments that it stores, a norm that counts its gradient, and a
    selection bias that it stops."""
    cfg = preset("tiny", **TWO | {"optim.name": name}, **{"optim.frozen": "blocks.moe.*,embedding_VD"})
    frozen = {name for name in sharding.flatten_named(model.declare(cfg.model))
              if name.startswith("blocks.moe.") or name == "embedding_VD"}  # fmt: skip
    shapes, load_LE = sharding.shapes(model.declare(cfg.model)), jnp.array([[1.0, 3, 5, 7]] * 2)
    grads = sharding.map_named(lambda name, x: x * (1e6 if name in frozen else 1.0), random_tree(1, shapes))
    metrics = {"tokens_per_expert": load_LE}
    monkeypatch.setattr(pipeline, "loss_and_grads", lambda cfg, mesh: lambda *_: (jnp.float32(1), metrics, grads))
    mesh = sharding.make_mesh("data=1")
    before = random_tree(0, shapes)
    state, step = optimizer.init(cfg, mesh, jax.tree.map(jnp.array, before)), optimizer.train_step(cfg, mesh)
    moments = sharding.flatten_named(state.optimizer)
    assert {n for n in frozen for moment in moments if n in moment} == set()
    counts = 4 * sum(x.size == 1 for x in moments.values())
    assert sum(x.nbytes for x in moments.values()) - counts == planner.plan(cfg).memory_bytes["optimizer"]
    for _ in range(3):
        state, metrics = step(state, {})

    trained = [x for n, x in sharding.flatten_named(grads).items() if n not in frozen]
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(sum(np.sum(x**2) for x in trained)), rel=1e-5)
    before, after = sharding.flatten_named(before), sharding.flatten_named(state.params)
    for n, x in before.items():
        if n == BIAS:
            np.testing.assert_allclose(after[n], x + 3 * 0.001 * np.array([1, 1, -1, -1]), rtol=1e-5, atol=1e-7)
        else:
            assert np.array_equal(x, after[n]) == (n in frozen), n
    alone = preset("tiny", **TWO | {"optim.name": name})
    zero = sharding.map_named(lambda n, x: 0 * x if n in frozen else x, grads)
    *_, want = updated(alone, sharding.map_named(lambda _, x: jnp.array(x), random_tree(0, shapes)), [zero] * 3)
    for n in before.keys() - frozen:  # clipped as if there were no other gradients
        np.testing.assert_allclose(after[n], want[n], rtol=1e-5, atol=1e-6, err_msg=n)


@pytest.mark.parametrize("pattern, message", [
    ("block.*", "optim.frozen='block.*': 'block.*' matches no parameter; did you mean 'blocks.*'? "),
    ("norm_D,embeding_VD", "optim.frozen='norm_D,embeding_VD': 'embeding_VD' matches no parameter; did you mean "
                           "'embedding_VD'? "),
    ("norm_D,*", "optim.frozen='norm_D,*' matches every parameter, so nothing is left to train"),
])  # fmt: skip
def test_a_pattern_that_freezes_nothing_is_an_error(pattern, message):
    """Catches a misspelled pattern, with which every parameter would train."""
    with pytest.raises(UserError, match="^" + re.escape(message)):
        planner.plan(preset("tiny", **{"optim.frozen": pattern}))


# One step on a device -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizer")
    for n in range(9):
        (folder / f"{n}.txt").write_text("the quick brown fox " * (20 + n))
    prepare.prepare(prepare.Arguments(str(folder / "tokens"), f"text:{folder}/*.txt", val_share=0.3))
    return str(folder / "tokens")


@pytest.fixture(scope="module")
def steps(tokens):
    """Return the states and metrics of three real steps with a huge decay and tiny clipping."""
    cfg = preset("tiny", **SMALL, **{"data.path": tokens, "optim.weight_decay": 3.0, "optim.clip_norm": 1e-3})
    mesh = sharding.make_mesh("data=1")
    first = state = optimizer.init(cfg, mesh)
    batch = sharding.put(dataset.batch(cfg, 0), mesh)
    step = optimizer.train_step(cfg, mesh).lower(state, batch).compile()
    biases, loads, lr = [np.asarray(sharding.flatten_named(state.params)[BIAS]).copy()], [], []
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    for n in range(3):
        state, metrics = step(state, sharding.put(dataset.batch(cfg, n), mesh))
        biases.append(np.asarray(sharding.flatten_named(state.params)[BIAS]).copy())
        loads.append(np.asarray(metrics["tokens_per_expert"]))
        lr.append(float(metrics["lr"]))
    return dict(cfg=cfg, first=first, last=state, biases=biases, loads=loads, lr=lr, step=step, state_bytes=state_bytes)


def test_the_selection_bias_changes_only_by_the_rate(steps):
    """Catches a bias that decays, is clipped, is scaled by the learning rate, or changes away from balance."""
    rate = np.float32(0.001)
    assert np.all(steps["biases"][0] == 0)
    for before, after, load_LE in zip(steps["biases"], steps["biases"][1:], steps["loads"], strict=False):
        assert np.ptp(load_LE) > 0, "the test needs experts that are not balanced"
        mean_LE = load_LE.mean(axis=-1, keepdims=True)
        np.testing.assert_array_equal(after, before + rate * np.sign(mean_LE - load_LE).astype(np.float32))


def test_an_expert_exactly_at_the_mean_keeps_its_bias():
    """Catches a change at the mean, and a mean over layers instead of experts."""
    cfg = preset("tiny", **{"model.balance_rate": 0.25})
    params = random_tree(0, sharding.shapes(model.declare(cfg.model)))
    load_LE = np.array([[5, 0, 10, 5, 7, 3, 4, 6], [30, 30, 30, 30, 30, 30, 30, 30]], np.float32)
    moved = sharding.flatten_named(optimizer.update_selection_bias(cfg, params, load_LE))
    for name, before in sharding.flatten_named(params).items():
        step = [[0, 0.25, -0.25, 0, -0.25, 0.25, 0.25, -0.25], [0] * 8] if name == BIAS else 0
        np.testing.assert_array_equal(moved[name], before + np.asarray(step, np.float32), err_msg=name)


def test_without_a_rate_there_is_no_bias():
    """Catches a bias that is stored although it never changes, and an update that fails without the bias."""
    cfg = preset("tiny", **SMALL, **{"model.balance_rate": 0.0})
    assert not [name for name in sharding.flatten_named(optimizer.state_shapes(cfg)) if "bias" in name]
    params = random_tree(0, sharding.shapes(model.declare(cfg.model)))
    assert optimizer.update_selection_bias(cfg, params, np.ones((3, 8), np.float32)) is params


def test_a_step_increments_its_counter(steps):
    """Catches a step that is not counted: the data, the schedule and dropout of the next step depend on the count."""
    assert int(steps["last"].step) == 3
    schedule = optimizer.learning_rate(steps["cfg"].optim, steps["cfg"].run.steps)
    assert steps["lr"] == pytest.approx([float(schedule(n)) for n in range(3)])


def test_the_old_state_is_donated(steps):
    """Catches a step that holds the state twice: with Adam that wastes three times the size of the parameters."""
    assert all(x.is_deleted() for x in jax.tree.leaves(steps["first"]))
    assert steps["step"].memory_analysis().alias_size_in_bytes >= steps["state_bytes"]


# Sharded over data ----------------------------------------------------------------------------------------------------

TWO_DENSE = {"model.n_layers": 2, "model.dense_prefix": 0, "model.n_experts": 0, "model.moe_every": 1,
             "data.seq_len": 24, "optim.warmup_steps": 1, "optim.clip_norm": 0.1}  # fmt: skip
SPREAD = {
    "data=2,fsdp=2,tensor=2": {"model.attention": "gqa"},  # in one piece
    "data=2,stage=2": {"model.n_experts": 8, "work.schedule": "1f1b", "work.microbatches": 2, "work.gather": "step"},
    "data=4,context=2": {"work.gather": "step"},  # in one piece; four replicas, so the order of a sum matters
}


@pytest.mark.parametrize("mesh", helpers.with_repeats(SPREAD, ("data=2,fsdp=2,tensor=2",)))
def test_sharding_over_data_changes_no_bit(mesh, tmp_path):
    """Catches a gradient that is summed twice or not at all, an update of the wrong shard, clipping by the norm of a
    shard, moments that stay replicated, and a checkpoint that only one of the two settings can read."""
    cfg = preset("tiny", **TWO_DENSE | SPREAD[mesh] | {"mesh": mesh})
    both = [replace(cfg, **{"optim.shard_over_data": on}) for on in (False, True)]
    devices, batches = sharding.make_mesh(mesh), [helpers.random_batch(cfg, seed) for seed in range(3)]
    steps, states = [optimizer.train_step(one, devices) for one in both], [optimizer.init(one, devices) for one in both]
    for number, batch in enumerate(batches):
        if number == 2:  # the run with the setting goes on without it, and the other way round
            for name, state in zip("ab", states, strict=True):
                with checkpoint.Saver(tmp_path / name) as saver:
                    checkpoint.save(saver, 2, state, {})
            targets = [checkpoint.make_target(optimizer.state_shapes(one), optimizer.state_shardings(one, devices))
                       for one in both]  # fmt: skip
            states = [checkpoint.restore(tmp_path / name, one, 2) for name, one in zip("ba", targets, strict=True)]
        placed = sharding.put(batch, devices)
        states, metrics = zip(*(step(state, placed) for step, state in zip(steps, states, strict=True)), strict=True)
        assert metrics[0]["grad_norm"] > cfg.optim.clip_norm, "the test needs clipping"
        want, got = ({"metrics": m} | sharding.flatten_named(s) for s, m in zip(states, metrics, strict=True))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    gathered = optimizer.gathered_params(both[1], devices, states[1])
    jax.tree.map(np.testing.assert_array_equal, gathered, states[0].params)
    assert jax.tree.map(lambda x: x.sharding, gathered) == optimizer.state_shardings(cfg, devices).params
    declared = sharding.flatten_named(model.declare(cfg.model))
    for name, x in sharding.flatten_named(states[1].params).items():
        copies = 1 if declared[name].std else devices.size // math.prod(devices.shape[a] for a in used(declared[name]))
        assert x.addressable_shards[0].data.size * devices.size == x.size * copies, name


def used(d):
    """Return the mesh axes that shard a parameter without `optim.shard_over_data`."""
    return [axis for axes in d.spec for axis in sharding.as_tuple(axes)]


def test_moments_are_sharded_like_their_parameters(tokens):
    """Catches replicated moments, which would undo what fsdp saves, and counters that are sharded."""
    cfg = preset("tiny", **SMALL, **{"data.path": tokens, "mesh": "fsdp=2,tensor=2"})
    state = optimizer.init(cfg, sharding.make_mesh(cfg.mesh))
    params, moments = sharding.flatten_named(state.params), sharding.flatten_named(state.optimizer)
    of_a_parameter = {}
    for name, p in params.items():
        same = [x for moment, x in moments.items() if moment.endswith("." + name)]
        assert [x.shape for x in same] == [p.shape] * 2, f"{name}: mu and nu"
        assert all(x.sharding.is_equivalent_to(p.sharding, p.ndim) for x in same), name
        of_a_parameter |= {id(x): x for x in same}
    assert params["embedding_VD"].addressable_shards[0].data.shape == (280 // 2, 24 // 2)
    rest = [x for x in moments.values() if id(x) not in of_a_parameter]
    assert rest and all(x.sharding.is_fully_replicated for x in [*rest, state.step])
