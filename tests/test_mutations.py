"""Break the model in one place, as people do: the comparison with one device goes red, and names the right culprit."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import encoder_decoder
import model
import optimizer
import pipeline
import sharding
from architectures import declare
from config import preset
from overlap import context, layers, positions
from pipeline import step, ticks
from sharding import BATCH, CONTEXT, EXPERT, STAGE, TENSOR, TOKENS
from tests import helpers, parity

# Two blocks of a dense and an MoE layer: latent attention, a layer without rotary, dropout, a balance loss that counts.
SETTINGS = {"model.n_layers": 4, "model.dense_prefix": 0, "model.moe_every": 2, "model.no_rope_every": 3,
            "model.dropout": 0.25, "model.balance_loss": 0.5, "data.seq_len": 16}  # fmt: skip

SEQ2SEQ = {"model.encoder_layers": 2, "model.n_experts": 0, "model.attention": "gqa", "data.input_len": 12}
RING = {"work.tensor_exchange": "ring"}
ATTENTION = r"^gradient of blocks\.\w+\.attention\."


@dataclass(frozen=True)
class Mutation:
    """A way to break the model: `module` calls `target`, and gets break_it(target) in its place."""

    named: str  # a pattern that matches what the comparison must blame
    target: Callable
    module: ModuleType
    break_it: Callable
    settings: dict  # the mesh, and other settings

    def apply(self, patch: pytest.MonkeyPatch):
        replace_in(self.module, self.target, self.break_it(self.target), patch)


MUTATIONS = {}


def mutation(named: str, target: Callable, in_module: ModuleType, **settings):
    """Register a function that takes the true function and returns a broken one.

    The target is a function object, not a name: if somebody renames it, this file can no longer be collected.
    """

    def register(break_it):
        MUTATIONS[break_it.__name__] = Mutation(named, target, in_module, break_it, settings)
        return break_it

    return register


def replace_in(module: ModuleType, target: Callable, by: Callable, patch: pytest.MonkeyPatch):
    """Replace a function in the one module that calls it, under the name that the module has for it.

    Raises: LookupError if the module does not hold the function under exactly one name.
    """
    names = [name for name, value in vars(module).items() if value is target]
    if len(names) != 1:
        raise LookupError(f"{module.__name__} holds {target.__name__} under {len(names)} names: {names}")
    patch.setattr(module, names[0], by)


# Losses ---------------------------------------------------------------------------------------------------------------


@mutation("^loss", model.psum, in_module=model, mesh="data=2")
def pmean_for_psum(true):
    return lambda x, axes: jax.lax.pmean(x, axes) if axes == (*BATCH, CONTEXT) else true(x, axes)


@mutation("^loss", model.loss, in_module=model, mesh="fsdp=2")
def a_mean_of_the_devices_means(true):
    def loss(c, sums):
        mean = sums.cross_entropy / sums.weight
        return true(c, sums.replace(cross_entropy=mean, weight=jnp.ones_like(sums.weight)))

    return loss


@mutation("^loss", ticks.keep_last_stage, in_module=ticks, mesh="stage=2")
def every_stage_adds_its_activations(true):
    return lambda x: x


@mutation(r"^gradient of blocks\.moe\.feed_forward\.w_router_DE", model.loss, in_module=model, mesh="data=2,expert=2")
def a_balance_loss_of_local_counts(true):
    def loss(c, sums):
        value, metrics = true(c, sums)
        r = sums.router
        local_L = model.balance_loss(c, r["tokens_per_expert"], r["probability"], r["tokens"][:, None])
        local = jax.lax.pmean(jnp.sum(jax.lax.psum(local_L, STAGE)), TOKENS) / c.n_blocks
        return metrics["cross_entropy"] + c.balance_loss * (
            local - jax.lax.stop_gradient(local)
        ) + jax.lax.stop_gradient(value - metrics["cross_entropy"]), metrics

    return loss


@mutation(r"^gradient of blocks\.moe\.feed_forward\.(bias_down_ED|w_router_DE)", model.axis_size, in_module=model,
          mesh="tensor=2", **{"model.bias": "experts"})  # fmt: skip
def biases_that_every_device_adds(true):
    return lambda axes: 1 if axes == TENSOR else true(axes)


# Attention ------------------------------------------------------------------------------------------------------------


@mutation(ATTENTION, model.rotary_angles, in_module=model, mesh="context=2")
def positions_that_begin_anew_on_each_device(true):
    anew = lambda positions_bs: positions_bs - positions_bs[:, :1]
    return lambda positions_bs, *rest: true(anew(positions_bs), *rest)


@mutation(ATTENTION, context.to_sequence_order, in_module=context, mesh="context=2")
def keys_in_the_order_of_devices(true):
    return lambda x, *, dim: x


@mutation(ATTENTION, context.merge_softmaxes, in_module=context, mesh="context=2", **{"work.context_attention": "ring"})
def a_ring_that_forgets_to_rescale(true):
    return lambda so_far, new: true((so_far[0], jnp.zeros_like(so_far[1])), new)


@mutation(ATTENTION, context.Reach, in_module=context, mesh="context=2",
          **{"work.context_attention": "ring", "model.softmax": "cap:0.5:0"})  # fmt: skip
def a_ring_without_the_cap_of_scores(true):
    return lambda *args, cap=0.0: true(*args)


@mutation(ATTENTION, model.at_use, in_module=model, mesh="tensor=2")
def heads_that_are_split_wrongly(true):
    def at_use(w, c, *names):
        w = true(w, c, *names)
        if isinstance(w, model.Layer):
            attention = w.attention.__class__(**vars(w.attention) | {"w_out_HUD": w.attention.w_out_HUD[::-1]})
            return model.Layer(**vars(w) | {"attention": attention})
        return w

    return at_use


@mutation(ATTENTION, context.chunks_before, in_module=context, mesh="context=4",
          **{"model.window": "5", "work.context_attention": "ring"})  # fmt: skip
def windows_that_end_at_a_chunk(true):
    return lambda *args: jax.tree.map(jnp.zeros_like, true(*args))


@mutation(ATTENTION, model.with_window, in_module=model, mesh="stage=2", **{"model.window": "3:3"})
def windows_of_other_layers_on_every_stage(true):
    per_stage = 2
    return lambda c, number, attend: true(c, number % per_stage, attend)


@mutation(ATTENTION, model.rotary_frequencies, in_module=model, mesh="stage=2")
def layers_that_are_numbered_from_0_on_every_stage(true):
    per_stage = 2
    return lambda c, number: true(c, number % per_stage)


@mutation(ATTENTION, model.is_full, in_module=model, mesh="stage=2", **{"model.window": "3:3:50"})
def another_rope_base_in_other_layers_on_every_stage(true):
    per_stage = 2
    return lambda window, number: true(window, number % per_stage)


# Feed-forward and experts ---------------------------------------------------------------------------------------------


@mutation(r"^gradient of blocks\.moe\.feed_forward\.w_(gate|up|down)", model.grouped_matmul, in_module=model,
          mesh="expert=2")  # fmt: skip
def a_forgotten_gradient_of_one_expert(true):
    def grouped_matmul(rows, w_eDM, sizes_e, filled):
        first = (jnp.arange(len(w_eDM)) == 0)[:, None, None] & (jax.lax.axis_index(EXPERT) == 1)
        return true(rows, jnp.where(first, jax.lax.stop_gradient(w_eDM), w_eDM), sizes_e, filled)

    return grouped_matmul


@mutation(r"^no gradient of blocks\.moe\.feed_forward\.shared\.", model.moe, in_module=model, mesh="tensor=2")
def shared_experts_that_are_thrown_away(true):
    return lambda w, *rest: true(model.MoE(**vars(w) | {"shared": None}), *rest)


@mutation(r"^gradient of blocks\.", positions.reduce_scatter, in_module=positions, mesh="tensor=2")
def a_partial_sum_that_is_never_added(true):
    return sharding.own_slice


@mutation(r"^gradient of blocks\.", positions.ring_all_gather, in_module=positions, mesh="tensor=2", **RING)
def neighbours_in_the_other_order(true):
    return lambda x, axis: true(x, axis)[::-1]


@mutation(r"^gradient of blocks\.", positions.ring_reduce_scatter, in_module=positions, mesh="tensor=2", **RING)
def a_sum_that_misses_a_device(true):
    return lambda partials, axis: true([0 * partials[0], *partials[1:]], axis)


@mutation(r"^(drop_fraction|tokens_per_expert)", model.ranks, in_module=model, mesh="context=2",
          **{"model.capacity_factor": 1.0})  # fmt: skip
def ranks_of_one_device_alone(true):
    def ranks(c, experts_bSk):
        halves = jnp.split(experts_bSk, 2, axis=1)
        return jnp.concatenate([true(c, half) for half in halves], axis=1)

    return ranks


# Vocabulary, dropout --------------------------------------------------------------------------------------------------


@mutation("^loss", model.local_vocabulary, in_module=model, mesh="tensor=2")
def words_without_their_offset(true):
    def local_vocabulary(ids, v):
        mine = (ids % v >= 0) & (ids // v == jax.lax.axis_index(TENSOR))
        return jnp.minimum(ids % v + jax.lax.axis_index(TENSOR), v - 1), mine

    return local_vocabulary


@mutation(r"^gradient of ", model.dropout, in_module=model, mesh="fsdp=2")
def dropout_by_the_place_on_the_device(true):
    def dropout(c, x_btD, tokens, key):
        index_bt = tokens.index_bt * 0 + jnp.arange(tokens.index_bt.size).reshape(tokens.index_bt.shape)
        return true(c, x_btD, tokens._replace(index_bt=index_bt), key)

    return dropout


# Gradients ------------------------------------------------------------------------------------------------------------


@mutation(r"^gradient of norm_D", step.ready_for_autodiff, in_module=step, mesh="fsdp=2")
def a_replicated_gradient_that_is_added_twice(true):
    def ready_for_autodiff(params, c):
        w = true(params, c)
        return type(w)(**vars(w) | {"norm_D": 2 * w.norm_D - jax.lax.stop_gradient(w.norm_D)})

    return ready_for_autodiff


@mutation(r"^gradient of blocks\.", layers.add_to_row, in_module=layers, mesh="stage=2")
def only_the_last_microbatch_counts(true):
    def add_to_row(row, total, gradient):
        return true(row, total, gradient - row.replace(stack=total).read())

    return add_to_row


@mutation(r"^no gradient of embedding_VD", model.embed_batch, in_module=model, mesh="stage=2")
def an_embedding_that_learns_nothing(true):
    return lambda *args: jax.lax.stop_gradient(true(*args))


@mutation(r"^no gradient of encoder\.", encoder_decoder.memory, in_module=encoder_decoder, mesh="stage=2", **SEQ2SEQ)
def an_encoder_that_learns_nothing(true):
    return lambda *args: jax.lax.stop_gradient(true(*args))


@mutation(
    r"^gradient of encoder\.", encoder_decoder.position_bias, in_module=encoder_decoder, mesh="tensor=2", **SEQ2SEQ
)
def position_biases_of_other_heads(true):
    return lambda bias_Wh, *args: true(sharding.shift(bias_Wh, TENSOR), *args)


# The comparison -------------------------------------------------------------------------------------------------------


@functools.cache
def result(**settings):
    cfg = preset("tiny", **SETTINGS | settings)
    w, batch = helpers.draw(declare(cfg.model)), helpers.random_batch(cfg, 0)
    program = pipeline.loss_and_grads(cfg, sharding.make_mesh(cfg.mesh))
    return jax.tree.map(np.asarray, program(w, batch, 3))


def blame(got, want) -> list[str]:
    """What differs: parameters without a gradient, the loss, counts, and gradients, the worst first."""
    (loss, metrics, grads), (want_loss, want_metrics, want_grads) = got, want
    grads, want_grads = sharding.flatten_named(grads), sharding.flatten_named(want_grads)
    found = [f"no gradient of {name}" for name in grads if not np.any(grads[name]) and np.any(want_grads[name])]
    found += [] if abs(loss - want_loss) <= 1e-5 * abs(want_loss) else ["loss"]
    counts = [name for name in parity.COUNTS if name in want_metrics]
    found += [name for name in counts if parity.differing_share(metrics[name], want_metrics[name])]
    shares = {name: parity.relative_error(grads[name], want_grads[name]) for name in want_grads}
    worst = sorted((name for name in shares if shares[name] > 1e-4), key=lambda name: -shares[name])
    return found + [f"gradient of {name}" for name in worst]


# `make test` runs one of each kind: a sum over devices, an exchange, positions, experts, microbatches.
QUICK = ("pmean_for_psum", "a_partial_sum_that_is_never_added", "keys_in_the_order_of_devices",
         "a_balance_loss_of_local_counts", "only_the_last_microbatch_counts")  # fmt: skip


@pytest.mark.parametrize("name", helpers.with_repeats(MUTATIONS, QUICK))
def test_a_broken_model_is_seen(name, monkeypatch):
    """Catches a comparison that cannot fail: it must be silent about the model as it is, and blame what was broken."""
    mutation = MUTATIONS[name]
    plain = {key: value for key, value in mutation.settings.items() if key.startswith(("model.", "data."))}
    want = result(**plain)
    mutation.apply(monkeypatch)
    found = blame(result.__wrapped__(**mutation.settings), want)  # what is broken must not be remembered
    print(name, found[:4])
    assert any(re.search(mutation.named, one) for one in found[:3]), found[:5]


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_replaces_a_function_that_its_module_has(mutation, monkeypatch):
    """Catches a mutation whose target was moved or renamed, and one that changes nothing: the comparison above, which
    is mostly left to the rotation, would then fail days later, or prove nothing."""
    before = dict(vars(mutation.module))
    mutation.apply(monkeypatch)
    changed = [value for name, value in before.items() if getattr(mutation.module, name) is not value]
    assert changed == [mutation.target]
    with pytest.raises(LookupError, match=f"holds {mutation.target.__name__} under 0 names"):
        mutation.apply(monkeypatch)


def test_a_dropped_psum_is_seen_before_it_runs(monkeypatch):
    """Catches check_vma switched off: a sum that each device has its own part of would pass for the whole."""
    cfg = preset("tiny", **SETTINGS, mesh="fsdp=2")
    w, batch = helpers.draw(declare(cfg.model)), helpers.random_batch(cfg, 0)
    replace_in(step, step.psum, lambda x, axes: x, monkeypatch)
    with pytest.raises(ValueError, match=r"possibly varying over \{data,stage,fsdp"):
        pipeline.evaluate(cfg, sharding.make_mesh(cfg.mesh)).lower(w, batch)


def test_clipping_by_part_of_the_norm_is_seen(monkeypatch):
    """Catches a comparison of gradients alone: clipping each parameter by its own norm leaves them as they are."""
    settings = {"mesh": "fsdp=2", "model.dropout": 0.0, **{k: v for k, v in SETTINGS.items() if k != "model.dropout"}}
    cfg = preset("tiny", **settings)
    want = parity.run_on_one_device(preset("tiny", **settings | parity.ONE_DEVICE))

    def clip_each(limit):
        shrink = lambda g: g * jnp.minimum(1, limit / jnp.sqrt(jnp.sum(g * g)))
        return optax.stateless(lambda updates, params: jax.tree.map(shrink, updates))

    replace_in(optimizer, optimizer.clip, clip_each, monkeypatch)
    comparison = parity.differences(parity.run(cfg), want)
    parity.compiled.cache_clear()  # what is broken must not be remembered
    assert comparison.worst().kind == "update", comparison.worst()
    assert comparison.worst("gradient").ok
