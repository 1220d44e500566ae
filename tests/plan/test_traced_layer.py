"""Tests of a layer's symbolic rows: they match the trace at any sizes, and cover all of its operations."""

import inspect
import math
from dataclasses import replace

import jax
import pytest

import encoder_decoder
import model
from config import preset
from generate.cache import decoding_config
from kernels import attention, grouped
from overlap import context, positions, rings
from plan.count import costs, traced_layer
from plan.count.traced_layer import LETTER_OF, PRIMES, Term, term
from plan.trace.rows import Row

FULL = {"work.remat": "full"}


def formulas(name: str, kind: str, **settings) -> dict[str, str]:
    """Group the formulas of matmuls by name, and those of collectives by kind and axes."""
    rows = traced_layer.layer_rows(preset(name, **FULL, **settings).at_work, kind)
    by_label = {}
    for row in rows:
        label = f"{row.kind} over {'*'.join(row.axes)}" if row.axes else row.name
        by_label.setdefault(label, []).append(row.formula)
    return by_label


def test_the_formulas_of_a_dense_layer():
    """Catches one letter in place of another. The formulas were derived by hand in chapters 03 and 04."""
    assert formulas("llama3_8b", "dense") == {
        "all-gather over tensor": ["2 b t tensor D", "2 b t tensor D"],
        "reduce-scatter over tensor": ["2 b t tensor D", "2 b t tensor D"],
        "all-gather over context": ["4 b t tensor context g K", "4 b t tensor context"],  # keys and values; documents
        "queries_keys_values": ["2 b t tensor D g r K", "2 b t tensor D g K", "2 b t tensor D g K"],
        "attend": ["attention of [b, t tensor, g r, K] [b, t tensor context, g, K] "
                   "[b, t tensor context, g, K]"],
        "attention_output": ["2 b t tensor D g r K"],
        "up": ["2 b t tensor D f"],
        "gate": ["2 b t tensor D f"],
        "down": ["2 b t tensor D f"],
    }  # fmt: skip


def test_the_formulas_of_experts_and_latents():
    """Catches rows of latents, routed experts and shared experts that are assigned to another part."""
    found = formulas("deepseek_v3", "moe")
    assert found["all-gather over tensor"][0] == "2 b t tensor (Q + C + R)"  # latents, narrower than the stream
    assert found["all-gather over expert"][0] == found["reduce-scatter over expert"][0] == "2 b t tensor expert D"
    assert found["router"] == ["2 b t expert e D"]
    assert found["experts"] == [
        "experts of [b t tensor expert k, D] [e, D, m]", "experts of [b t tensor expert k, m] [e, m, D]"]  # fmt: skip
    assert found["up"] == found["gate"] == ["2 b t tensor D x m"]
    assert found["keys_values"] == ["2 b t tensor context g K C", "2 b t tensor context g U C"]
    assert found["attend"] == ["attention of [b, t tensor, g, K] [b, t tensor, g, R] [b, t tensor context, g, K] "
                               "[b, t tensor context, R] [b, t tensor context, g, U]"]  # fmt: skip


def test_the_formulas_of_an_encoder_decoder():
    """Catches cross-attention over the decoder's positions, and position biases or the gathered output of the encoder
    that are counted once per layer instead of once per stack."""
    encoder, found = formulas("t5_small", "encoder"), formulas("t5_small", "decoder")
    attention, cross = ["2 b t t tensor tensor g r K"] * 2, ["2 b t S tensor tensor g r K"] * 2  # scores and values
    assert encoder["attend"] == attention and found["attend"] == attention + cross
    assert found["queries"] == ["2 b t tensor D g r K"] and found["attention_output"] == ["2 b t tensor D g r K"] * 2
    assert found["keys_values"] == ["4 b S tensor D g K"]
    c = preset("t5_small", **FULL).at_work
    shared = {kind: [row.formula for row in traced_layer.layer_rows(c, kind) if row.once_per_stack]
              for kind in traced_layer.STACKS}  # fmt: skip
    bias = "64 t t tensor tensor g r"  # of 32 buckets
    assert shared == {"encoder": [bias], "decoder": ["2 b S tensor D", bias]}


def test_routed_experts_repeat_their_exchange_in_the_backward_pass():
    """Catches a backward pass without the tokens that it sends again, and experts that get the rows of a whole group.

    The bytes are those of all tokens; `costs.collective_cost` takes the fraction that a round sends."""
    for remat in ("none", "full"):
        c = preset("deepseek_v3", **{"work.remat": remat, "work.expert_exchange": "routed"}).at_work
        rows = traced_layer.layer_rows(c, "moe")
        sent = {str(row.payload): row for row in rows if row.axes == ("expert",)}
        tokens = sent["2 b t tensor expert D"]
        assert (tokens.kind, str(tokens.count), tokens.backward, tokens.recomputed) == ("all-to-all", "2", 1.5, 0)
        gates_and_experts = sent["4 b t tensor expert k"]
        assert (gates_and_experts.backward, str(gates_and_experts.count)) == (1.5, "2")
        kernels = {row.formula: row.backward for row in rows if row.kind == "kernel" and row.name == "experts"}
        assert kernels == {"experts of [b t tensor k, D] [e, D, m]": 2, "experts of [b t tensor k, m] [e, m, D]": 1}


def test_a_ring_of_n_devices_sends_n_minus_1_times():
    """Catches a ring that is counted as 1 transfer, or as n instead of n - 1."""
    rings = {"work.tensor_exchange": "ring", "work.context_attention": "ring"}
    found = formulas("llama3_8b", "dense", **rings)
    assert found["collective-permute over tensor"] == ["2 b t D (tensor - 1)"] * 4
    assert set(found["collective-permute over context"]) == {
        "4 b t tensor g K (context - 1)", "4 b t tensor (context - 1)"}  # fmt: skip
    assert found["down"] == ["2 b t tensor D f"]  # of all positions, not of one chunk


def test_the_formulas_of_a_layer_in_decode():
    """Catches attention over new tokens instead of cache slots, and keys that are computed from the latents of all
    slots although the projections are absorbed."""
    c = decoding_config(preset("deepseek_v3").at_work)
    found = {}
    for row in traced_layer.cached_layer_rows(c, "dense"):
        found.setdefault(f"{row.kind} over {'*'.join(row.axes)}" if row.axes else row.name, []).append(row.formula)
    assert found["attend_to_cache"] == ["2 b s S g (C + R)", "2 b s S g C"]
    assert found["attend"] == ["2 b s g K C", "2 b s g U C"] and "keys_values" not in found
    assert found["all-gather over context"] == ["2 n tensor context (g (K + R) + C + R)"]
    assert found["all-to-all over context"] == ["4 n tensor context g (U + 1)"]  # float32, and the log of the sum
    assert found["up"] == found["gate"] == ["2 n tensor D f"]


def test_operands_are_read_once_if_possible():
    """Catches activations read three times for queries, keys and values, and weights read in every step of a ring. The
    constants in `plan/time/simulated.py` were fitted to one read."""
    rows = traced_layer.layer_rows(preset("llama3_8b", **FULL, **{"work.tensor_exchange": "ring"}).at_work, "dense")
    read = {}
    for row in rows:
        if row.kind == "matmul":
            read.setdefault(row.name, []).append([str(x) for x in row.moved_bytes])
    assert read["up"] + read["gate"] == [["2 b t D", "2 D f", "2 b t f"], ["2 D f", "2 b t f"]]
    assert [len(moved) for moved in read["queries_keys_values"]] == [3, 2, 2]
    [up] = [row for row in rows if row.name == "up"]
    sizes = {"b": 2, "t": 3, "D": 5, "f": 7, "tensor": 4}
    assert up.hbm_bytes(sizes) == 4 * 2 * 2 * 3 * (5 + 7) + 2 * 5 * 7


def test_every_number_has_one_factorization():
    """Catches two letters, or a letter and a sum, with a common prime, which would give wrong formulas."""
    assert len(LETTER_OF) == len(PRIMES) + 1
    assert all(math.gcd(x, y) in (1, 2, 4) for x in PRIMES.values() for y in PRIMES.values() if x != y)
    for letter, value in PRIMES.items():
        assert term(8 * value * value) == Term(8, (letter, letter))
    with pytest.raises(ValueError, match="has the factor 218, which matches no letter"):
        term(2 * 109 * PRIMES["D"])


@pytest.mark.parametrize("remat, again", [("none", 0), ("dots", 0), ("branches", 1), ("full", 1)])
def test_the_remat_policy_decides_what_is_recomputed(remat, again):
    """Catches a policy that is ignored. Every policy but none recomputes attention scores and collectives."""
    rows = traced_layer.layer_rows(preset("llama3_8b", **{"work.remat": remat}).at_work, "dense")
    runs = {row.name: row.recomputed for row in rows if not row.axes}
    assert runs["up"] == runs["gate"] == runs["queries_keys_values"] == again and runs["down"] == 0
    assert runs["attend"] == (remat != "none")
    assert runs["attention_output"] == (remat == "full")


@pytest.mark.parametrize("name", ["llama3_8b", "deepseek_v3", "t5_small", "gptj_6b"])
def test_a_function_of_the_model_can_be_renamed(name, monkeypatch):
    """Catches a plan that finds a matmul by the name of a function, which would then change the time of a step."""
    c = preset(name, **FULL, **{"work.tensor_exchange": "ring"}).at_work
    kind = "decoder" if c.encoder_layers else "moe" if c.n_experts else "dense"
    c = traced_layer.prime_sized_model(c, kind)
    before = traced_layer.from_trace(c, kind)
    renamed = lambda code: code.replace(co_name="renamed", co_qualname="renamed")
    for module in (model, encoder_decoder, positions, rings, context, attention, grouped):
        for function in filter(inspect.isfunction, vars(module).values()):
            function = inspect.unwrap(function)
            nested = tuple(renamed(x) if inspect.iscode(x) else x for x in function.__code__.co_consts)
            monkeypatch.setattr(function, "__code__", renamed(function.__code__.replace(co_consts=nested)))
    jax.clear_caches()
    after = traced_layer.from_trace(c, kind)
    assert all(row.source.endswith(" in renamed") for row in after if not row.axes)
    without_source = lambda rows: [replace(row, source="") for row in rows]
    assert without_source(after) == without_source(before)


def test_a_matmul_without_a_known_scope_is_named(monkeypatch):
    """Catches a new matmul of a layer that is silently left out of the parts of a plan."""
    output = "attention_output"
    monkeypatch.setattr(traced_layer, "MATMULS", tuple(name for name in traced_layer.MATMULS if name != output))
    monkeypatch.setattr(traced_layer, "SCOPES", traced_layer.SCOPES - {output})
    c = traced_layer.prime_sized_model(preset("llama3_8b").at_work, "dense")
    message = (
        r"model\.py:\d+ in grouped_attention\.out: this matmul is in the named scopes 'jvp\(attention\).*/" + output
    )
    with pytest.raises(ValueError, match=message):
        traced_layer.from_trace(c, "dense")


def test_an_unmatched_backward_operation_raises(monkeypatch):
    """Catches a plan that omits a backward operation because it matches no forward row."""
    stray = Row("matmul", "model.py:1 in nowhere", scope="transpose(jvp())", flops=2.0)
    every = traced_layer.rows
    monkeypatch.setattr(traced_layer, "rows", lambda *args: [*every(*args), stray])
    c = traced_layer.prime_sized_model(preset("llama3_8b").at_work, "dense")
    with pytest.raises(ValueError, match="these backward operations match no operation of the layer's forward pass"):
        traced_layer.from_trace(c, "dense")


def test_rows_are_cached_on_disk_until_the_code_changes(monkeypatch, tmp_path):
    """Catches stale rows of an older model, and a damaged cache file that stops the command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = traced_layer.cached_on_disk.__wrapped__
    traced = []
    monkeypatch.setattr(traced_layer, "from_trace", lambda c, *which: traced.append(c) or [Term(len(traced))])
    c = traced_layer.prime_sized_model(preset("llama3_8b").at_work, "dense")
    assert load(c, "dense") == load(c, "dense") == [Term(1)]
    load(replace(c, work=replace(c.work, remat="dots")), "dense")
    assert len(traced) == 2  # each policy has its own file
    monkeypatch.setattr(traced_layer, "code_hash", lambda: "model.py has changed")
    assert load(c, "dense") == [Term(3)]
    for file in (tmp_path / "axis-by-axis" / "layers").iterdir():
        file.write_bytes(b"half a pick")
    assert load(c, "dense") == [Term(4)]


def test_a_plan_evaluates_letters_for_local_shards():
    """Catches global sizes instead of the sizes of local shards."""
    cfg = preset("mixtral_8x7b", mesh="fsdp=2,expert=2,context=2,tensor=4", **FULL, **{"data.batch_size": 32})
    z = costs.Sizes.from_config(cfg)
    sizes = costs.letters(cfg.at_work, z)
    assert (sizes["b"], sizes["t"], sizes["g"], sizes["r"], sizes["e"], sizes["m"]) == (8, 512, 2, 4, 4, 3584)
    [out] = [x for x in costs.layer_costs(cfg.at_work, z, "moe") if getattr(x, "name", "") == "attention_output"]
    assert out.flops == 2 * 8 * 2048 * 8 * 128 * 4096
