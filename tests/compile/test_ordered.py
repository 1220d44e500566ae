"""Collectives on simulated devices run in one order, and a program that does not order them is refused."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec as P

import model
import optimizer
import parameters
import pipeline
import sharding
from compile import ledger, ordered
from config import preset, replace
from devices import compile_cache
from generate import cache
from plan.trace import compiled
from sharding import FSDP, STAGE, TENSOR
from tests import fuzz, helpers, parity
from utils import UserError

MESH = "stage=2,fsdp=2,tensor=2"
SPEC = P((STAGE, FSDP, TENSOR))


# The check ------------------------------------------------------------------------------------------------------------

# Two devices. The branch contains an all-reduce, and so does the computation around it.
TEXT = """HloModule toy, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%taken (x.1: f32[4]) -> f32[4] {{
  %x.1 = f32[4]{{0}} parameter(0)
  ROOT %inner = f32[4]{{0}} all-reduce(%x.1), channel_id=1, replica_groups={inner}, to_apply=%add
}}

%skipped (x.2: f32[4]) -> f32[4] {{
  ROOT %x.2 = f32[4]{{0}} parameter(0)
}}

ENTRY %main (p: pred[], x: f32[4]) -> (f32[4], f32[4]) {{
  %p = pred[] parameter(0)
  %x = f32[4]{{0}} parameter(1)
  %outer = f32[4]{{0}} all-reduce(%x), channel_id=2, replica_groups={{{{0,1}}}}, to_apply=%add
  %made = f32[4]{{0}} negate(%outer)
  %branch = f32[4]{{0}} conditional(%p, {operand}, {operand}), true_computation=%taken, false_computation=%skipped{more}
  ROOT %both = (f32[4]{{0}}, f32[4]{{0}}) tuple(%outer, %branch)
}}
"""


@pytest.mark.parametrize("operand, more, inner, pairs", [
    ("%x", "", "{{0,1}}", 1),
    ("%made", "", "{{0,1}}", 0),  # depends on the other's result
    ("%x", ", control-predecessors={%made}", "{{0,1}}", 0),  # waits for it
    ("%x", "", "{{0},{1}}", 0),  # each device with itself
], ids=["no order", "by data", "by control", "alone"])  # fmt: skip
def test_an_unordered_pair_is_found(operand, more, inner, pairs):
    """Catches a check that knows only one kind of order, or does not look into branches."""
    found = ledger.unordered_pairs(TEXT.format(operand=operand, more=more, inner=inner))
    assert found == ["all-reduce (?) and all-reduce in %branch (?)"][:pairs]


def toy(x, i, scale):
    """Run unordered collectives in a branch, in a loop and outside of both; the weights come from outside."""
    total = lambda x, axis: sharding.vary(sharding.psum(x, axis), (axis,))
    branch = jax.lax.cond(i > 0, lambda x: total(jnp.tanh(x), TENSOR), lambda x: x * 2, x)
    loop, _ = jax.lax.scan(lambda x, w: (total(x * w, FSDP) + 1, None), x, scale)
    gathered = sharding.all_gather(jnp.sin(x), FSDP, dim=0)
    most = jax.lax.pmax(x, STAGE)
    return branch + loop + jnp.sum(gathered, axis=0, keepdims=True) + sharding.vary(most, (STAGE,))


def toy_program(jit):
    mesh = sharding.make_mesh(MESH)
    local = lambda x, i, scale: toy(x, i, sharding.vary(scale, (STAGE, FSDP, TENSOR)))
    return jit(jax.shard_map(local, mesh=mesh, in_specs=(SPEC, P(), P()), out_specs=SPEC), mesh)


TOY_ARRAYS = np.linspace(-1, 1, 80, dtype=np.float32).reshape(8, 10), 1, np.float32([0.5, 2, -1])


def test_ordering_changes_no_value():
    """Catches an unordered collective in a loop, in a branch or outside of both, and a value that ordering changes."""
    plain = toy_program(lambda function, mesh: jax.jit(function)).lower(*TOY_ARRAYS)
    assert len(ledger.unordered_pairs(plain.compile().as_text())) >= 3
    in_order = toy_program(ordered.jit)
    assert ledger.unordered_pairs(in_order.lower(*TOY_ARRAYS).compile().as_text()) == []
    # The same sums on numbers for which float32 is exact.
    exact = np.arange(80, dtype=np.float32).reshape(8, 10), 0, np.float32([1, 2, 4])
    got, x, mesh = in_order(*exact), exact[0], sharding.make_mesh(MESH)
    grid = x.reshape(2, 2, 2, 10)  # stage, fsdp, tensor
    loop = grid
    for scale in (1, 2, 4):
        loop = (scale * loop).sum(axis=1, keepdims=True) + 1 + 0 * grid
    sines = np.sin(grid).sum(axis=1, keepdims=True)
    want = 2 * grid + loop + sines + grid.max(axis=0, keepdims=True)
    np.testing.assert_allclose(np.asarray(got).reshape(grid.shape), want, rtol=1e-6)  # float32 sines
    assert got.sharding == NamedSharding(mesh, SPEC)


def test_a_value_that_is_not_finite_stays_where_it_is():
    """Catches ordering by arithmetic: adding 0 * NaN would spread it everywhere."""
    mesh = sharding.make_mesh("tensor=2")

    def local(x, y):
        return sharding.psum(x, TENSOR), sharding.psum(y, TENSOR)

    function = ordered.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(TENSOR), P(TENSOR)), out_specs=P()), mesh)
    first, second = function(np.float32([np.nan, 1, np.inf, 2]), np.float32([1, 2, 3, 4]))
    assert np.isinf(first[0]) is np.False_ and np.isnan(first[0]) and first[1] == 3
    assert second.tolist() == [4, 6]


# The programs of this project -----------------------------------------------------------------------------------------


def programs(cfg):
    """Yield name, function and arguments of every multi-device program that the commands compile."""
    mesh = sharding.make_mesh(cfg.mesh)
    state, batch = compiled.shapes(cfg, mesh)
    c, rows = cfg.model, 2 * mesh.size
    yield "step", optimizer.train_step(cfg, mesh), (state, batch)
    yield "evaluation", pipeline.evaluate(cfg, mesh), (state.params, batch)
    yield "logits", pipeline.logits(cfg, mesh), (state.params, batch)
    yield "loss and gradients", pipeline.loss_and_grads(cfg, mesh), (state.params, batch, 0)
    if c.n_blocks % mesh.shape[STAGE] == 0:
        kept = cache.cache_shapes(c, mesh, rows, 8)
        tokens = np.zeros((rows, 3), np.int32)
        yield "sampling", cache.cached_forward(c, mesh), (state.params, kept, tokens, tokens, tokens[:, 0])


@pytest.mark.parametrize("number", helpers.with_repeats((22, 24, 27, 35, 38, 41), (27,)))
def test_nothing_is_left_unordered(number):
    """Catches a program that could hang or compute wrong results on another machine, even if it works here."""
    cfg = preset("tiny", **fuzz.draw(number))
    for name, program, arrays in programs(cfg):
        assert ledger.unordered_pairs(program.lower(*arrays).compile().as_text()) == [], name


def test_programs_before_the_first_step_are_ordered():
    """Catches unordered collectives in the programs that create parameters and moments, or compute norms."""
    cfg = preset("tiny", **fuzz.draw(27))
    mesh = sharding.make_mesh(cfg.mesh)
    state = optimizer.init(cfg, mesh)  # both programs are checked when they are compiled
    batch = sharding.put(helpers.random_batch(cfg, 0), mesh)
    norms = optimizer.layer_norms(cfg, mesh)(state, batch)
    assert set(norms) == {"gradient", "update", "parameter"}


STAGES = {"gpipe": "stage=2,tensor=2", "1f1b": "stage=2", "interleaved": "stage=2", "zb": "stage=2,fsdp=2"}


@pytest.mark.parametrize("schedule", helpers.with_repeats(STAGES, ("1f1b",)))
def test_gradient_statistics_on_stages_equal_those_of_one_device(schedule):
    """Catches norms that are refused at their first step, or that count only the layers of one stage."""
    small = {"model.n_layers": 4 if schedule == "interleaved" else 2, "model.dense_prefix": 0, "model.n_experts": 0,
             "model.attention": "gqa", "data.seq_len": 6, "data.batch_size": 4}  # fmt: skip
    alone = preset("tiny", **small)
    found = []
    for cfg in (replace(alone, **{"mesh": STAGES[schedule], "work.schedule": schedule}), alone):
        mesh = sharding.make_mesh(cfg.mesh)
        batch = sharding.put(helpers.random_batch(cfg, 0), mesh)
        found.append(optimizer.layer_norms(cfg, mesh)(optimizer.init(cfg, mesh), batch))
    for kind, norms in found[1].items():
        for name, x in norms.items():
            np.testing.assert_allclose(found[0][kind][name], x, rtol=1e-4, err_msg=f"{kind} {name}")  # float32


def test_ordering_adds_no_communication_or_compute(monkeypatch):
    """Catches ordering that adds communication or compute. It only keeps XLA from merging duplicate collectives."""
    cfg = preset("tiny", **{"mesh": "expert=2,context=2,tensor=2", "data.seq_len": 24})
    found = {}
    for form in (True, False):
        monkeypatch.setattr(ordered, "is_simulated", lambda mesh, form=form: form)
        mesh = sharding.make_mesh(cfg.mesh)
        text = optimizer.train_step(cfg, mesh).lower(*compiled.shapes(cfg, mesh)).compile().as_text()
        found[form] = ledger.read(text, mesh, compiled.shares(cfg, text))
    in_order, plain = found[True], found[False]
    assert in_order.flops == pytest.approx(plain.flops, rel=1e-2)
    assert in_order.total.wire_bytes == pytest.approx(plain.total.wire_bytes, rel=2e-2)
    assert plain.total.count <= in_order.total.count <= 1.15 * plain.total.count


def test_an_unordered_program_is_refused(monkeypatch):
    """Catches a run that hangs or continues with wrong results instead of stopping before its first step."""
    monkeypatch.setattr(ordered, "order_collectives", lambda function, mesh: function)
    cfg = preset("tiny", **{"mesh": "stage=2,expert=2", "model.n_layers": 5, "data.batch_size": 8})
    mesh = sharding.make_mesh(cfg.mesh)
    traced = optimizer.train_step(cfg, mesh).lower(*compiled.shapes(cfg, mesh))
    with pytest.raises(UserError, match=r"4 simulated devices could deadlock .* and \d+ more pairs") as refusal:
        ordered.compile(traced, mesh)
    assert "model.py:" in str(refusal.value), refusal.value


CASE = """--mesh stage=2,expert=2,data=2 --model.vocab_size 72 --model.d_model 56 --model.n_heads 8
--model.d_head 10 --model.d_rope 2 --model.d_value 3 --model.d_kv_latent 8 --model.d_query_latent 16 --model.d_ff 24
--model.tie_embeddings --model.dropout 0.3 --model.no_rope_every 0 --work.remat full --data.batch_size 48
--data.seq_len 80 --model.n_experts 8 --model.top_k 3 --model.n_shared 1 --model.d_expert 8 --model.balance_loss 0.7
--model.balance_rate 0 --model.moe_every 2 --model.dense_prefix 0 --work.microbatches 4 --model.n_layers 4"""


def test_a_step_that_once_deadlocked_is_correct():
    """Catches a regression: in this case all 8 devices deadlocked every time, or the loss was NaN."""
    cfg, _ = parity.parse(["tiny", *CASE.split()])
    assert parity.compare(cfg).worst().ok


# Cached programs ------------------------------------------------------------------------------------------------------


def test_only_ordered_programs_are_cached(tmp_path):
    """Catches a cache that stores unordered programs, and one that is never written or never read."""
    heard = []
    jax.monitoring.register_event_listener(lambda name, **_: heard.append(name))
    hits = lambda: heard.count("/jax/compilation_cache/cache_hits")
    with compile_cache(str(tmp_path), enabled=False):
        plain = toy_program(lambda function, mesh: jax.jit(function))
        plain.lower(*TOY_ARRAYS).compile()
        assert os.listdir(tmp_path) == []
        first = np.asarray(toy_program(ordered.jit)(*TOY_ARRAYS))
        assert os.listdir(tmp_path) != []
        before = hits()
        again = np.asarray(toy_program(ordered.jit)(*TOY_ARRAYS))
        assert hits() == before + 1
    np.testing.assert_array_equal(again, first)


def test_a_nested_trace_is_ordered_once():
    """Catches a gradient through an ordered function that fails at a primitive without a derivative."""
    cfg = preset("tiny", **{"mesh": "fsdp=2", "model.n_layers": 1, "model.n_experts": 0, "model.dense_prefix": 0})
    mesh = sharding.make_mesh(cfg.mesh)
    params = parameters.init(model.declare(cfg.model), mesh, 0)
    batch = sharding.put(helpers.random_batch(cfg, 0), mesh)
    of_logits = lambda params: jnp.mean(pipeline.logits(cfg, mesh)(params, batch) ** 2)
    program = ordered.jit(jax.grad(of_logits), mesh)
    assert float(jnp.abs(program(params).norm_D).max()) > 0


def test_unused_equations_are_removed():
    """Catches a JAX without `dce_jaxpr`: the ledger would count work that the compiler removes, and tokens would keep
    unused collectives alive."""

    def wasteful(x):
        unused = lambda carry, _: ((carry[0] + 1, carry[1] @ x), None)
        return jax.lax.scan(unused, (x, x), length=3)[0][0] + jnp.sum(0 * (x @ x @ x).shape[0])

    jaxpr = jax.make_jaxpr(wasteful)(jax.ShapeDtypeStruct((4, 4), jnp.float32)).jaxpr
    assert hasattr(partial_eval, "dce_jaxpr"), "JAX has renamed dce_jaxpr: see ordered.without_dead_code"
    kept = ordered.without_dead_code(jaxpr)
    assert "dot_general" in str(jaxpr) and "dot_general" not in str(kept)
    assert (len(kept.invars), len(kept.outvars)) == (1, 1)
