"""Int8 weights and caches: their size, their error, and equality on every mesh."""

import collections
import functools
import importlib
import math
import re

import jax
import numpy as np
import pytest

import model
from config import replace
from generate.cache import cached_forward, empty_cache
from generate.quantised import Quantized, quantize
from sharding import flatten_named, make_mesh
from tests.generate.models import CONFIGS, placed, rule_text
from tests.generate.test_command import run

MOE, MLA, GQA = [*CONFIGS.values()][:3]
WINDOWS = replace(CONFIGS["gqa, windows and sinks"], **{"model.window": "2:3"})  # 5 slots
B, T, S = 6, 7, 12


@functools.cache
def parameters(cfg, mesh="data=1", weights="compute"):
    params = placed(cfg, make_mesh(mesh))
    return quantize(params, cfg.model, make_mesh(mesh)) if weights == "int8" else params


def run_forward(cfg, mesh, weights, cache):
    """Return the compiled function, its arguments for the first 4 tokens, and a function for those of 4 more."""
    tokens_BT = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (B, T), dtype=np.int32)
    positions_B4, every_B4 = (np.tile(np.arange(n, n + 4, dtype=np.int32), (B, 1)) for n in (3, 0))
    params, mesh = parameters(cfg, mesh, weights), make_mesh(mesh)
    first = params, empty_cache(cfg.model, mesh, B, S, cache, piece=4), tokens_BT[:, :4], every_B4, every_B4
    then = lambda kept: (params, kept, tokens_BT[:, 3:], positions_B4, every_B4)
    return cached_forward(cfg.model, mesh), first, then


@functools.cache
def logits(cfg, mesh="data=1", weights="compute", cache="compute"):
    read, first, then = run_forward(cfg, mesh, weights, cache)
    some, kept = read(*first)
    more, kept = read(*then(kept))
    return np.concatenate([some, more], axis=1), jax.device_get(kept)


def relative_error(got, want):
    """Return the root-mean-square error / the standard deviation of the logits."""
    return np.sqrt(np.mean((got[0] - want[0]) ** 2)) / want[0].std()


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [MOE, GQA], ids=["mla", "gqa"])
def test_a_weight_is_off_by_at_most_half_its_channels_scale(cfg):
    """Catches one scale for a whole matrix, or for inputs instead of outputs; rounding toward 0; a matrix that is not
    quantized, or a norm or router that is; and memory that is not saved."""
    before, after = (jax.device_get(flatten_named(parameters(cfg, weights=weights))) for weights in ("compute", "int8"))
    total = 0
    for name, d in flatten_named(model.declare(cfg.model)).items():
        if "norm" in name or "bias" in name or "router" in name:
            np.testing.assert_array_equal(after[name], before[name])
            total += 4 * d.size
            continue
        values, scale = after[f"{name}.values"], after[f"{name}.scale"]
        summed = "D" if name == "embedding_VD" else d.fan_in
        dims = tuple(i for i, letter in enumerate(d.dims) if letter in summed)
        np.testing.assert_array_equal(np.max(np.abs(values), axis=dims), 127, err_msg=name)  # in every channel
        assert np.max(np.abs(values * scale - before[name]) / scale) <= 0.5 + 1e-4, name  # float32
        total += d.size + 4 * d.size // math.prod(d.shape[i] for i in dims)
    assert sum(x.nbytes for x in after.values()) == total


def test_logits_of_int8_weights_are_close():
    """Catches a scale that is not applied, is applied twice, or belongs to another layer or expert."""
    assert relative_error(logits(MOE, weights="int8"), logits(MOE)) < 0.03  # half a scale per weight, 3 layers


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "fsdp=2,context=2", "stage=2,expert=2"])
def test_int8_weights_are_the_same_on_every_mesh(mesh):
    """Catches scales computed from the local shard only, and scales of another shard."""
    want, got = (jax.device_get(flatten_named(parameters(MOE, where, "int8"))) for where in ("data=1", mesh))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    if mesh != "stage=2,expert=2":
        got, want = logits(MOE, mesh, weights="int8"), logits(MOE, weights="int8")
        np.testing.assert_allclose(got[0], want[0], rtol=0, atol=2e-4)  # float32, other order of sums


def test_weights_are_gathered_as_int8():
    """Catches weights that are dequantized before the all-gather, which would send 4 bytes per parameter."""
    gathers = {}
    for weights in ("compute", "int8"):
        read, first, _ = run_forward(MLA, "fsdp=2", weights, "compute")
        found = re.findall(r"all_gather.*-> tensor<[\dx]+x(\w+)>", read.lower(*first).as_text())
        gathers[weights] = collections.Counter(found)
    matrices = sum(isinstance(w, Quantized) for w in jax.tree.leaves(
        parameters(MLA, "fsdp=2", "int8"), is_leaf=lambda w: isinstance(w, Quantized)))  # fmt: skip
    joined = MLA.model.n_layers * (matrices - 1) + 2  # the embedding is used twice
    assert gathers["int8"]["i8"] == joined
    assert gathers["int8"]["f32"] == gathers["compute"]["f32"] - joined


# The cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg, form, most", [(MLA, "bfloat16", 0.003), (MLA, "int8", 0.02), (GQA, "int8", 0.02),
                                             (WINDOWS, "int8", 0.02)])  # fmt: skip
def test_logits_of_a_quantized_cache_are_close(cfg, form, most):
    """Catches scales of other positions or heads, and values that are rounded twice or not at all."""
    error = relative_error(logits(cfg, cache=form), logits(cfg))
    assert 0 < error < most  # bfloat16 has 8 significant bits, int8 has 7 at the largest value of a position


@pytest.mark.parametrize("cfg", [MLA, GQA], ids=["mla", "gqa"])
def test_a_quantized_cache_is_small(cfg):
    """Catches one scale per value, and an extra copy in a larger format."""
    c, one = cfg.model, make_mesh("data=1")
    parts = [c.d_kv_latent, c.d_rope] if c.attention == "mla" else 2 * c.n_kv_heads * [c.d_head]
    layers = 6 * 5 * c.n_layers
    for form, size in (("compute", 4), ("bfloat16", 2), ("int8", 1)):
        got = sum(x.nbytes for x in jax.tree.leaves(empty_cache(c, one, 6, 5, form)))
        assert got == layers * (size * sum(parts) + (4 * len(parts) if form == "int8" else 0))


def test_a_quantized_cache_is_the_same_on_every_mesh():
    """Catches one scale for all heads, and scales that are written to other slots."""
    got, want = (logits(GQA, mesh, cache="int8") for mesh in ("context=2,tensor=2", "data=1"))
    apart = jax.tree.map(lambda x, y: np.max(np.abs(np.float32(x) - np.float32(y))), got[1], want[1])
    assert max(jax.tree.leaves(apart)) <= 1  # float32, another order of sums: a tie may round either way
    assert relative_error(got, want) < 0.002


def test_the_command_runs_with_int8(run_directory, monkeypatch):
    """Catches flags that are ignored."""
    command, samplers = importlib.import_module("generate.__main__"), []
    load = command.generate.load
    monkeypatch.setattr(command.generate, "load", lambda *of, **how: samplers.append(load(*of, **how)) or samplers[-1])
    argv = [run_directory, "--prompt", "!", "--tokens", "9", "--temperature", "0", "--weights", "int8"]
    assert run(*argv, "--cache", "int8")[:2] == (0, rule_text("!", 9) + "\n")
    [sampler] = samplers
    [engine] = sampler.engines.values()
    assert sampler.params.embedding_VD.values.dtype == "int8"
    assert engine.cache["blocks"][0].dense[0].key_bgSK.values.dtype == "int8"
