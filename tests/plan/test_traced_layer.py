"""Claims about a layer's rows in letters: they are what the trace says at any sizes, and nothing of it is lost."""

import math
from dataclasses import replace

import pytest

from config import preset
from generate.cache import decoding_config
from plan import costs, traced_layer
from plan.rows import Row
from plan.traced_layer import LETTER_OF, PRIMES, Term, term

FULL = {"work.remat": "full"}


def formulas(name: str, is_moe: bool, **settings) -> dict[str, str]:
    """Of each function of the model: what its matmuls, or its collectives, are in letters."""
    rows = traced_layer.layer_rows(preset(name, **FULL, **settings).at_work, is_moe)
    found = {}
    for row in rows:
        label = f"{row.kind} over {'*'.join(row.axes)}" if row.axes else row.function
        found.setdefault(label, []).append(row.formula)
    return found


def test_a_dense_layer_in_letters():
    """Catches a letter that stands for another one. The formulas are those of chapters 03 and 04, written by hand."""
    assert formulas("llama3_8b", False) == {
        "all-gather over tensor": ["2 b t tensor D", "2 b t tensor D"],
        "reduce-scatter over tensor": ["2 b t tensor D", "2 b t tensor D"],
        "all-gather over context": ["4 b t tensor context g K", "4 b t tensor context"],  # keys and values; documents
        "queries_keys_values": ["2 b t tensor D g r K", "2 b t tensor D g K", "2 b t tensor D g K"],
        "partial_attention": ["attention of [b, t tensor, g r, K] [b, t tensor context, g, K] "
                              "[b, t tensor context, g, K]"],
        "grouped_attention.out": ["2 b t tensor D g r K"],
        "hidden": ["2 b t tensor D f", "2 b t tensor D f"],
        "down": ["2 b t tensor D f"],
    }  # fmt: skip


def test_experts_and_latents_in_letters():
    """Catches rows of latents, routed and shared experts that are another part's."""
    found = formulas("deepseek_v3", True)
    assert found["all-gather over tensor"][0] == "2 b t tensor (Q + C + R)"  # latents, narrower than the stream
    assert found["all-gather over expert"][0] == found["reduce-scatter over expert"][0] == "2 b t tensor expert D"
    assert found["route"] == ["2 b t expert e D"]
    assert found["grouped_matmul"] == [
        "experts of [b t tensor expert k, D] [e, D, m]", "experts of [b t tensor expert k, m] [e, m, D]"]  # fmt: skip
    assert found["hidden"] == ["2 b t tensor D x m"] * 2
    assert found["latent_attention.keys_values"] == ["2 b t tensor context g K C", "2 b t tensor context g U C"]


def test_rings_run_once_for_each_device():
    """Catches a ring that is counted as one exchange, or as one for each device, its own positions too."""
    rings = {"work.tensor_exchange": "ring", "work.context_attention": "ring"}
    found = formulas("llama3_8b", False, **rings)
    assert found["collective-permute over tensor"] == ["2 b t D (tensor - 1)"] * 4
    assert set(found["collective-permute over context"]) == {
        "4 b t tensor g K (context - 1)", "4 b t tensor (context - 1)"}  # fmt: skip
    assert found["down"] == ["2 b t tensor D f"]  # of all positions, however many come at a time


def test_a_layer_that_decodes_in_letters():
    """Catches keys and values of every token in place of the slots of a cache, and absorbed projections as if keys were
    made of the latents of all slots."""
    c = decoding_config(preset("deepseek_v3").at_work)
    found = {}
    for row in traced_layer.cached_layer_rows(c, False):
        found.setdefault(f"{row.kind} over {'*'.join(row.axes)}" if row.axes else row.function, []).append(row.formula)
    assert found["attend_to_slots"] == ["2 b s S g (C + R)", "2 b s S g C"]
    assert found["latent_attention.absorb"] == ["2 b s g K C"] and "latent_attention.keys_values" not in found
    assert found["all-gather over context"] == ["2 n tensor context (g (K + R) + C + R)"]
    assert found["all-to-all over context"] == ["4 n tensor context g (U + 1)"]  # float32, and the log of the sum
    assert found["hidden"] == ["2 n tensor D f"] * 2


def test_memory_is_read_once_where_it_can_be():
    """Catches the stream read three times for queries, keys and values, and weights read again for each part of a
    ring: the constants of `plan/expected.py` were fitted to one reading."""
    rows = traced_layer.layer_rows(preset("llama3_8b", **FULL, **{"work.tensor_exchange": "ring"}).at_work, False)
    read = {}
    for row in rows:
        if row.kind == "matmul":
            read.setdefault(row.function, []).append([str(x) for x in row.moved])
    assert read["hidden"] == [["2 b t D", "2 D f", "2 b t f"], ["2 D f", "2 b t f"]]
    assert [len(moved) for moved in read["queries_keys_values"]] == [3, 2, 2]
    [up, _] = [row for row in rows if row.function == "hidden"]
    sizes = {"b": 2, "t": 3, "D": 5, "f": 7, "tensor": 4}
    assert up.hbm_bytes(sizes) == 4 * 2 * 2 * 3 * (5 + 7) + 2 * 5 * 7


def test_every_number_has_one_factorization():
    """Catches two letters, or a letter and a sum, that share a prime: a row would have the wrong letters."""
    assert len(LETTER_OF) == len(PRIMES) + 1
    assert all(math.gcd(x, y) in (1, 2, 4) for x in PRIMES.values() for y in PRIMES.values() if x != y)
    for letter, value in PRIMES.items():
        assert term(8 * value * value) == Term(8, (letter, letter))
    with pytest.raises(ValueError, match="has the factor 218, which no letter"):
        term(2 * 109 * PRIMES["D"])


@pytest.mark.parametrize("remat, again", [("none", 0), ("dots", 0), ("branches", 1), ("full", 1)])
def test_what_is_repeated_is_the_policys(remat, again):
    """Catches a policy that is passed over. Attention's scores and collectives repeat under every policy but none."""
    rows = traced_layer.layer_rows(preset("llama3_8b", **{"work.remat": remat}).at_work, False)
    of = {row.function: row.again for row in rows if not row.axes}
    assert of["hidden"] == of["queries_keys_values"] == again and of["down"] == 0
    assert of["partial_attention"] == (remat != "none")
    assert of["grouped_attention.out"] == (remat == "full")


def test_nothing_of_a_backward_pass_is_lost(monkeypatch):
    """Catches a backward operation that belongs to no forward row, and would not be planned."""
    stray = Row("matmul", "model.py:1 in nowhere", scope="transpose(jvp())", flops=2.0)
    every = traced_layer.rows
    monkeypatch.setattr(traced_layer, "rows", lambda *args: [*every(*args), stray])
    c = traced_layer.in_letters(preset("llama3_8b").at_work, False)
    with pytest.raises(ValueError, match="no operation of a layer's forward pass explains these"):
        traced_layer.from_trace(c, False)


def test_rows_are_kept_on_disk_as_long_as_the_code_is_the_same(monkeypatch, tmp_path):
    """Catches rows of yesterday's model, and a damaged file that ends the command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = traced_layer.kept_on_disk.__wrapped__
    traced = []
    monkeypatch.setattr(traced_layer, "from_trace", lambda c, *which: traced.append(c) or [Term(len(traced))])
    c = traced_layer.in_letters(preset("llama3_8b").at_work, False)
    assert kept(c, False) == kept(c, False) == [Term(1)]
    kept(replace(c, work=replace(c.work, remat="dots")), False)
    assert len(traced) == 2  # another policy is another file
    monkeypatch.setattr(traced_layer, "state", lambda: "model.py has changed")
    assert kept(c, False) == [Term(3)]
    for file in (tmp_path / "axis-by-axis" / "layers").iterdir():
        file.write_bytes(b"half a pick")
    assert kept(c, False) == [Term(4)]


def test_a_plan_asks_for_the_letters_of_its_mesh():
    """Catches sizes of all devices in place of this one's: they are those of the model's shards."""
    cfg = preset("mixtral_8x7b", mesh="fsdp=2,expert=2,context=2,tensor=4", **FULL, **{"data.batch_size": 32})
    z = costs.Sizes.of(cfg)
    sizes = costs.letters(cfg.at_work, z)
    assert (sizes["b"], sizes["t"], sizes["g"], sizes["r"], sizes["e"], sizes["m"]) == (8, 512, 2, 4, 4, 3584)
    [out] = [x for x in costs.layer(cfg.at_work, z, True) if getattr(x, "function", "") == "grouped_attention.out"]
    assert out.flops == 2 * 8 * 2048 * 8 * 128 * 4096
