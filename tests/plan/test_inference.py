"""Tests of inference plans: they match what our program stores, computes and sends, and published numbers.

BOOK/inference and BOOK/applied-inference are https://jax-ml.github.io/scaling-book/inference and /applied-inference.
"""

import dataclasses
import inspect
import json
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import model
import sharding
import utils
from compile import ledger
from config import PRESETS, ModelConfig, preset, replace
from generate.cache import cache_shapes, cached_forward, unstack, unstacked_specs
from generate.engine import Engine
from plan import planner
from plan.__main__ import main
from plan.answer import inference
from plan.answer.at_scale import numbers_at_scale
from plan.chips import hardware
from utils import UserError

GROUPED = {"model.attention": "gqa", "model.n_kv_heads": 2, "model.n_experts": 0, "model.n_layers": 2,
           "model.dense_prefix": 0}  # fmt: skip
SHORT = {"model.n_layers": 3}  # one dense layer before one block of two


def request(prompt=12, answer=6, **dtypes):
    return inference.Request(prompt, answer, **dtypes)


def lying(mesh: str):
    return sharding.make_mesh(mesh, jax.devices()[: preset("tiny", mesh=mesh).mesh.devices])


# Compared with our program --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("model_of", [{}, GROUPED], ids=["latents", "heads"])
@pytest.mark.parametrize("mesh", ["data=1", "tensor=2", "stage=2", "data=2,fsdp=2,expert=2", "context=2,tensor=2"])
def test_the_planned_cache_has_the_size_of_the_real_one(mesh, model_of, precision):
    """Catches keys without values, layers of another stage, sharded latents, and slots of entire sequences on devices
    that have a shard of them."""
    cfg = preset("tiny", mesh=mesh, **model_of | {"model.precision": precision})
    cache = jax.tree.leaves(cache_shapes(cfg.model, lying(mesh), 8, 18))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in cache)
    assert inference.plan(cfg, None, request()).cache_bytes(8) == held


def loaded_shapes(c: ModelConfig, mesh):
    """Return the parameters of an engine as ShapeDtypeStructs."""
    separate = jax.eval_shape(lambda w: unstack(w, c, mesh), sharding.shapes(model.declare(c), mesh))
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    return jax.tree.map(place, separate, unstacked_specs(c, separate, mesh))


@pytest.mark.parametrize("mesh", ["tensor=2", "stage=2", "data=2,fsdp=2,expert=2", "expert=2,context=2,tensor=2"])
@pytest.mark.parametrize("model_of", [{}, GROUPED], ids=["experts", "dense"])
def test_the_planned_weights_have_the_size_of_the_engines(mesh, model_of):
    """Catches weights that an engine shards over context and gathers for every token, or a plan that believes so."""
    cfg = preset("tiny", mesh=mesh, **model_of)
    loaded = jax.tree.leaves(loaded_shapes(cfg.model, lying(mesh)))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in loaded)
    assert inference.plan(cfg, None, request()).weights_bytes() == held


@pytest.mark.parametrize("mesh, model_of, phase", [
    ("fsdp=2,stage=2", GROUPED, "decode"),
    ("expert=2,tensor=2", SHORT, "decode"),
    ("fsdp=2,context=2", GROUPED | {"model.n_layers": 1}, "decode"),
    ("context=2,tensor=2", GROUPED | {"model.n_layers": 1}, "prefill"),
    ("context=2,tensor=2", GROUPED | {"model.attention": "mla", "model.d_query_latent": 4}, "decode"),
    ("tensor=2", GROUPED | {"model.parallel_residual": True}, "decode"),
], ids=["heads", "latents, experts", "slots over context", "prompts, slots over context",
        "narrow latents, slots over context", "attention and feed-forward in parallel"])  # fmt: skip
def test_a_planned_pass_equals_the_compiled_one(mesh, model_of, phase):
    """Catches a matmul or a collective that the plan lacks or counts too often: weights gathered once per text, only
    one stage's layers, all tokens in each expert. `cached_forward` itself does not gather logits."""
    cfg = preset("tiny", mesh=mesh, **model_of)
    c, devices, n = cfg.model, lying(mesh), math.prod(cfg.mesh.sizes[axis] for axis in sharding.BATCH)
    rows, b, s = phase == "prefill", *((n, 6) if phase == "prefill" else (8, 1))
    shapes = loaded_shapes(c, devices), cache_shapes(c, devices, 8, 18)
    ids, each = np.zeros((b, s), np.int32), np.zeros(b, np.int32)
    compiled = cached_forward(c, devices, rows=rows).lower(*shapes, ids, ids, each, *[each] * rows).compile()
    counted = ledger.read(compiled.as_text(), devices)
    planned = inference.plan(cfg, None, request(piece=6)).rows(8, phase)
    times = 8 // n * 2 if rows else 1  # two chunks per prompt
    assert sum(row.flops for row in planned) == pytest.approx(times * counted.flops, rel=0.02)
    exchanges = [one for row in planned if row.part != "drawing" for one in row.exchanges]
    for axes, total in counted.totals_by("axes").items():
        these = [one for one in exchanges if "*".join(one.axes) == axes]
        sent = inference.sent_bytes(inference.Row("", exchanges=these), cfg)
        assert sent == pytest.approx(times * total.wire_bytes, rel=0.05), axes
    assert {"*".join(one.axes) for one in exchanges} == counted.totals_by("axes").keys()


def test_the_default_chunk_size_is_the_engines():
    """Catches a default prefill chunk that differs from the engine's."""
    assert inspect.signature(Engine).parameters["piece"].default == request().piece


# Compared with published numbers --------------------------------------------------------------------------------------

LLAMA2_13B = ModelConfig(vocab_size=32_000, d_model=5120, n_layers=40, n_heads=40, attention="gqa", n_kv_heads=40,
                         d_head=128, d_ff=13_824)  # fmt: skip
BATCHES = (1, 8, 16, 32, 64, 240)
STEPS_MS = {40: (4.98, 12.13, 20.30, 36.65, 69.33, 249.09), 8: (4.17, 5.60, 7.23, 10.50, 17.04, 52.99)}


@pytest.mark.parametrize("n_kv_heads", STEPS_MS)
def test_steps_of_llama_2_13b(n_kv_heads):
    """BOOK/inference, "Modeling throughput and latency for LLaMA 2-13B": 8 v5e, 8,192 tokens, also with fewer key heads
    but as many parameters. Catches a cache or weights that are read twice, on one device, or not at all. The book reads
    memory at 820 GB/s, the plan at 810, and the plan does not read the embedding table, 1% of the weights."""
    d_ff = 13_824 + {40: 0, 8: 2728}[n_kv_heads]
    c = dataclasses.replace(LLAMA2_13B, n_kv_heads=n_kv_heads, d_ff=d_ff)
    one = inference.plan(replace(preset("llama3_8b"), model=c, mesh="tensor=8"), "v5e:2x4", request(8000, 192))
    for batch, step_ms in zip(BATCHES, STEPS_MS[n_kv_heads], strict=True):
        found = one.seconds(batch, "decode")
        assert 1e3 * (found["weights"] + found["cache"] + found["FLOPs"]) == pytest.approx(step_ms, rel=0.02)
    assert n_kv_heads == 8 or 8 < one.largest_batch <= 16, "without free memory, up to 16 sequences fit"


def llama3_70b(weights: str, cache: str, mesh="tensor=8", topology="v5e:2x4", limit_bytes=None):
    cfg = preset("llama3_70b", mesh=mesh)
    return inference.plan(cfg, topology, request(7680, 512, weights_dtype=weights, cache_dtype=cache), limit_bytes)


def test_llama_3_70b_as_the_book_serves_it():
    """BOOK/applied-inference: 160 KiB per token in int8, 324 kB in bfloat16; 8 v5e for weights of 70 GB; FLOPs limit
    decode from 240 sequences, with int8 weights from 120; 43 sequences of 8,192 tokens in 16 GB per chip; 26e12
    feed-forward FLOPs for 240 tokens; 19 ms for a step with full memory. Catches a plan that is off by a dtype, a layer
    or the number of devices."""
    narrow, wide = llama3_70b("int8", "int8"), llama3_70b("bfloat16", "bfloat16")
    assert (narrow.token_bytes, wide.token_bytes) == (160 * 1024, 2 * 160 * 1024)
    assert 8 * narrow.weights_bytes() == pytest.approx(70e9, rel=0.02)
    assert (narrow.bounds["matmuls"], wide.bounds["matmuls"]) == (pytest.approx(120, 0.02), pytest.approx(240, 0.02))
    assert wide.largest_batch == 0 and 0 < narrow.largest_batch < 43
    whole = llama3_70b("int8", "int8", limit_bytes=round(16e9 / 0.9))
    assert whole.largest_batch in (42, 43)
    read = {
        cause: time
        for cause, time in whole.seconds(whole.largest_batch, "decode").items()
        if cause not in ("links", "hops")
    }
    assert 1e3 * sum(read.values()) == pytest.approx(19, rel=0.03)
    [fed] = (row for row in wide.rows(240, "decode") if row.part == "feed-forward")
    assert 8 * fed.flops == pytest.approx(26e12, rel=0.05)


def test_caches_of_a_token():
    """Insights into DeepSeek-V3, arXiv:2505.09343, table 1: 70.272 KB, and 516.096 KB for Llama 3 405B. Catches values
    stored in addition to latents, and rotary keys stored for every head."""
    bytes_of = lambda name, **shape: inference.plan(preset(name, **shape), None, request()).token_bytes
    assert bytes_of("deepseek_v3") == 70_272
    assert bytes_of("llama3_70b", **{"model.n_layers": 126}) == 516_096  # 405B has the same key heads


# Arithmetic by hand ---------------------------------------------------------------------------------------------------


def test_a_step_by_hand():
    """Catches a term that is missing, doubled, or of another link: Llama 3 8B, 16 sequences of 2,304 on 8 v5e."""
    one = inference.plan(preset("llama3_8b", mesh="tensor=8"), "v5e:2x4", request(2048, 256))
    L, D, V, b, found = 32, 4096, 128_256, 16, one.seconds(16, "decode")
    gains = 2 * 4 * D * (2 * L + 1) * 7 / 8 - 4 * D * (2 * L + 1) * 6 / 8  # replicated, 4 bytes each
    assert found["weights"] == pytest.approx((2 * (8_030_261_248 - V * D) / 8 + gains) / 8.1e11, rel=1e-3)
    assert found["cache"] == pytest.approx(b * (2304 + 1) * 2 * 8 * 128 * 2 * L / 8 / 8.1e11)
    assert found["FLOPs"] == 0
    # [16, 4096]: all-gather and reduce-scatter around attention and feed-forward, a pair around all layers. And logits.
    sent = 7 / 8 * (2 * b * D * (4 * L + 2) + 4 * b * V)
    assert found["links"] == pytest.approx(sent / 9e10)
    assert found["hops"] == pytest.approx((4 * L + 3) * 4e-6)  # from a corner of 2x4 to the other: 1 + 3
    assert one.batch_summary(16)["tokens_per_s"] == pytest.approx(16 / sum(found.values()))
    assert one.batch_summary(16)["first_token_s"] == pytest.approx(sum(one.seconds(16, "prefill").values()))


@pytest.mark.parametrize("mesh, topology, seconds", [
    ("tensor=8", "v5e:2x4", 4e-6), ("tensor=16", "v5e:4x4", 6e-6), ("tensor=64", "v4:4x4x4", 6e-6),
    ("tensor=8", "h100:8", 6.6e-6 + 7 * 0.6e-6), ("tensor=16", "h100:16", 6.6e-6 + 14 * 0.6e-6 + 2.7e-6),
])  # fmt: skip
def test_hops_of_a_collective(mesh, topology, seconds):
    """Catches a line priced as a ring or vice versa, devices instead of hops, and free hops between nodes."""
    cfg = preset("llama3_8b", mesh=mesh)
    link = hardware.link(cfg.mesh, hardware.Topology.parse(topology), ("tensor",))
    assert hardware.latency_seconds("all-gather", link) == pytest.approx(seconds)
    assert hardware.latency_seconds("all-reduce", link) == pytest.approx(2 * seconds)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_expected_number_of_experts_read(tokens):
    """Catches k experts per token although tokens share experts, and all experts although some are unused."""
    cfg = preset("mixtral_8x7b", **{"model.n_experts": 32, "model.top_k": 3})
    at = inference.Pass(cfg, request(), tokens, 1)
    rng = np.random.default_rng(0)
    draws = [len({e for _ in range(tokens) for e in rng.permutation(32)[:3]}) for _ in range(800)]
    [w] = (w for w in inference.costs.weights(cfg) if w.name.endswith("w_up_EDM"))
    assert 32 * inference.share_read(w, at) == pytest.approx(np.mean(draws), rel=0.03)


def test_weights_sharded_over_fsdp_are_gathered_for_every_token():
    """Catches fsdp shards that reduce what a step reads, and devices that store unsharded weights."""
    split, sliced = (inference.plan(preset("llama3_8b", mesh=mesh), "v5e:2x4", request(2048, 256))
                     for mesh in ("tensor=8", "fsdp=8"))  # fmt: skip
    assert sliced.weights_bytes() == pytest.approx(split.weights_bytes())
    sent = sum(inference.sent_bytes(row, sliced.cfg) for row in sliced.rows(8, "decode"))
    assert sent == pytest.approx(2 * 8_030_261_248 * 7 / 8, rel=1e-3)
    written, read = 8_030_261_248, 8_030_261_248 - 128_256 * 4096  # without the embedding
    moved = sum(row.weight_bytes for row in sliced.rows(8, "decode"))
    assert moved == pytest.approx(2 * (written + read), rel=1e-3)
    assert sliced.batch_summary(8)["bound_by"] == "links" and split.batch_summary(8)["bound_by"] == "weights"
    assert any("gathered for every token" in note for note in sliced.notes())
    assert [note.split(" tokens")[0] for note in split.notes()] == ["prefill in chunks of 64"]


ROOMS = {"llama3_8b": "tensor=8", "mixtral_8x7b": "expert=2,tensor=4", "moe1b": "stage=2,data=2,tensor=2",
         "dense_124m": "data=8", "laptop": "fsdp=4,context=2", "llama3_70b": "tensor=8"}  # fmt: skip


@pytest.mark.parametrize("name", ROOMS)
def test_the_largest_batch_uses_at_most_90_percent_of_memory(name):
    """Catches a batch that uses the reserved tenth, or one that could be larger."""
    cfg = preset(name, mesh=ROOMS[name])
    one = inference.plan(cfg, "v5p:2x2x2", request(1000, 24))
    held = lambda batch: sum(one.memory_bytes(batch).values())
    assert held(one.largest_batch) <= 0.9 * one.limit_bytes < held(one.largest_batch + one.unit)
    batches = one.batches()
    assert batches[0] == one.unit and batches[-1] == one.largest_batch and batches == sorted(set(batches))
    assert [one.batch_summary(batch)["fits"] for batch in (one.largest_batch, one.largest_batch + one.unit)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("answer, bound", [(1, True), (8000, False)], ids=["short", "long"])
def test_the_batch_size_from_which_flops_limit_decode(answer, bound):
    """Catches a FLOPs bound for a step with a long cache, and a bound that is off by one batch."""
    one = inference.plan(preset("llama3_8b", mesh="data=8"), "v5e:2x4", request(1, answer))
    first = one.bounds["step"]
    assert (first is not None) == bound
    assert one.bounds["matmuls"] % 8 == 0 and (not first or first >= one.bounds["matmuls"])
    for batch, binds in ((first, True), (first - 8, False)) if first else ():
        rows = one.rows(batch, "decode")
        reading = sum(row.weight_bytes + row.cache_bytes for row in rows) / 8.1e11
        assert (sum(row.flops for row in rows) / 197e12 >= reading) == binds


# Serving at scale -----------------------------------------------------------------------------------------------------


def at_scale(name, mesh, topology, asked, batch=1):
    return numbers_at_scale(inference.plan(preset(name, mesh=mesh), topology, asked), batch)


def test_data_parallel_attention_by_hand():
    """DeepSeek-V3 on tensor=16. Catches latents that are still replicated, down-projections counted as sharded, an
    exchange of the feed-forward layers, and a break-even that ignores the replicas' share."""
    found = at_scale("deepseek_v3", "tensor=16", None, request(2048, 256))["attention"]
    by_head = 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168  # queries, keys and values, output
    assert found["token_bytes"] == 61 * (512 + 64) * 2 / 16
    assert found["weight_bytes"] == 2 * 61 * by_head * 15 / 16
    # A device gathers the latents of queries and of keys and values, and reduce-scatters the output.
    assert found["unsent_bytes"] == pytest.approx(2 * 61 * (1536 + 512 + 64 + 7168) * 15 / 16)
    assert found["tokens"] == pytest.approx(2 * by_head / (2 * (512 + 64)))
    sharded = at_scale("deepseek_v3", "fsdp=2,tensor=8", None, request(2048, 256))["attention"]
    assert sharded["unsent_bytes"] == pytest.approx(found["unsent_bytes"] * (7 / 8) / (15 / 16)), "gathered weights"
    assert sharded["token_bytes"] == pytest.approx(found["token_bytes"] * 2)
    assert "attention" not in at_scale("llama3_8b", "tensor=8", None, request())
    assert "attention" not in at_scale("deepseek_v3", "data=8", None, request())
    assert "attention" not in at_scale("deepseek_v3", "stage=2,tensor=8", None, request()), "a stage has other layers"


def test_a_prefix_cache_by_hand():
    """Llama 3 8B, 1,536 of 2,048 prompt tokens shared. Catches a prefix that is stored per sequence or not at all,
    prefill that computes it, and decode that no longer reads it."""
    one, all_new = (inference.plan(preset("llama3_8b", mesh="data=2,tensor=4"), "v5e:2x4",
                                   request(2048, 256, shared=shared)) for shared in (1536, 0))  # fmt: skip
    found, each = numbers_at_scale(one, 8)["shared"], 2 * 8 * 128 * 2 * 32
    assert found["cache_bytes"] == 1536 * each / 4 and "shared" not in numbers_at_scale(all_new, 8)
    assert one.cache_bytes(8) == (2304 + 3 * (2304 - 1536)) * each / 4  # 4 sequences per device
    layers, scores = 2 * 32 * 218_103_808, 4 * 2304 * 32 * 128 * 32  # FLOPs per token
    assert found["flops"] == pytest.approx(1536 * (layers + scores) + 1536 / 64 * 2 * 4096 * 128_256, rel=1e-3)
    few = at_scale("llama3_8b", "tensor=8", None, request(2048, 256, shared=2032))["shared"]  # one chunk, of 16 tokens
    assert few["flops"] == pytest.approx(2032 * (layers + scores) + 2032 / 16 * 2 * 4096 * 128_256, rel=1e-3)
    assert one.seconds(8, "prefill")["weights"] == pytest.approx(all_new.seconds(8, "prefill")["weights"] / 4)
    assert one.seconds(8, "decode") == all_new.seconds(8, "decode")
    held = lambda batch: sum(one.memory_bytes(batch).values())
    assert held(one.largest_batch) <= one.usable_bytes < held(one.largest_batch + 2)


def test_a_handoff_by_hand():
    """Llama 3 8B on 8 v5e. Catches a cache that one device sends, a prefix that is sent again, and a chunk that is all
    of the prompt."""
    found = at_scale("llama3_8b", "data=2,tensor=4", "v5e:2x4", request(2048, 257, shared=1024, piece=100), 64)
    moved, alone = found["handoff"], inference.plan(preset("llama3_8b", mesh="data=2,tensor=4"), "v5e:2x4",
                                                    request(2048, 257, shared=1024, piece=100))  # fmt: skip
    assert moved["bytes"] == 1024 * 131_072 and moved["layer_bytes"] == 4096
    assert moved["near_ms"] == pytest.approx(1024 * 131_072 / 4 / 45e9 * 1e3)
    assert moved["far_ms"] == pytest.approx(1024 * 131_072 / 4 / 3.125e9 * 1e3)
    prefill_s, step_s = (sum(alone.seconds(64, phase).values()) for phase in ("prefill", "decode"))
    assert moved["prefill_ms"] == pytest.approx(1e3 * prefill_s / 32), "both replicas read prompts"
    assert found["slices"]["chunk_ms"] == pytest.approx(moved["prefill_ms"] / 11)
    assert found["slices"]["prefill"] == pytest.approx(prefill_s / (256 * step_s))
    assert at_scale("llama3_8b", "tensor=8", "v3:2x2", request()) == {}, "the speed between slices of v3 is unknown"


# The command ----------------------------------------------------------------------------------------------------------

EIGHT = ["--inference", "--topology", "v5e:2x4", "--mesh", "tensor=8"]


def run(capsys, *words):
    status = main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table_the_plot_and_the_json_agree(capsys, tmp_path, monkeypatch):
    """Catches a column of another batch or phase, an empty plot, and full memory that is not reported."""
    figures, new = [], utils.new_picture
    monkeypatch.setattr(utils, "new_picture", lambda **how: figures.append(new(**how)) or figures[-1])
    path, picture = tmp_path / "a.json", tmp_path / "a.png"
    words = ["--prompt", "7680", "--answer", "512", "--weights_dtype", "int8", "--cache_dtype", "int8"]
    status, out, _ = run(capsys, "llama3_70b", *EIGHT, *words, "--json", str(path), "--plot", str(picture))
    found = json.loads(path.read_text())
    assert status == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert f"{found['most']} sequences, plus {found['weights_bytes'] / 2**30:.3f} GiB of weights" in out
    assert "at 121 sequences or more; longer than reading weights and cache: never" in out
    assert "; memory is already full at 37" in out
    last = found["batches"][-1]
    assert last["batch"] == found["most"] and last["fits"]
    shown = re.search(rf"│ +{last['batch']} │(.*)│", out)[1].split("│")
    assert [float(cell.split()[0].replace(",", "")) for cell in shown[2:5]] == pytest.approx(
        [1e3 * last["step_s"], last["tokens_per_s"], last["sequence_tokens_per_s"]], rel=1e-2)  # fmt: skip
    for phase, whole in (("decode", last["step_s"]), ("prefill", last["first_token_s"])):
        assert sum(sum(row["seconds"].values()) for row in found[phase]) == pytest.approx(whole)
    rate, step, first = figures[0].axes
    assert list(rate.lines[0].get_ydata()) == [row["tokens_per_s"] for row in found["batches"]]
    assert max(bar.get_y() + bar.get_height() for bar in step.patches) == pytest.approx(1e3 * last["step_s"])
    assert list(first.lines[0].get_ydata()) == [row["first_token_s"] for row in found["batches"]]


@pytest.mark.parametrize("name", [name for name in PRESETS if not preset(name).model.encoder_layers])
def test_every_preset_is_planned(capsys, name):
    """Catches a model without a row (no experts, no query latents, tied embeddings), and batches other than the
    requested ones."""
    words = ["--inference", "--topology", "h200:8", "--prompt", "9", "--answer", "5", "--batch", "4", "2"]
    status, out, _ = run(capsys, name, *words, "--mesh", "data=8", "--json", "-")
    found = json.loads(out)
    assert [row["batch"] for row in found["batches"]] == [2, 4]
    assert status == (found["most"] == 0) == (name in ("llama3_70b", "deepseek_v3"))
    whole = sum(row["flops"] for row in found["decode"])
    active = inference.costs.parameters(preset(name).model)[1]
    assert whole > active, "a token uses all active parameters except a table"


@pytest.mark.parametrize("flags", [(), ("--search", "8")])
def test_an_encoder_is_refused(capsys, flags):
    """Catches numbers of a decoder without an encoder."""
    status, out, err = run(capsys, "t5_small", "--inference", "--topology", "h200:8", "--mesh", "data=8", *flags)
    assert (status, out) == (2, "")
    assert err == "error: --inference plans decoders, and this model has an encoder; drop --inference\n"


def test_without_a_topology_there_are_no_seconds(capsys):
    """Catches an assumed speed, and a cache that is not printed without a topology."""
    status, out, _ = run(capsys, "tiny", "--inference", "--mesh", "stage=2,tensor=2", "--prompt", "9", "--answer", "5")
    assert status == 0 and "360 bytes per token" in out and "tokens/s" in out and " ms " not in out
    assert "note       stages run one after another, so 1 of 2 are idle" in out
    assert "each of the tensor=2 devices stores the latents of all heads" in out


@pytest.mark.parametrize("name, batch", [("llama3_70b", 24), ("mixtral_8x7b", 1)])
def test_a_search_puts_the_mesh_with_the_shortest_decode_step_first(capsys, name, batch):
    """Catches a search that ranks by something else, skips a mesh that fits, or plans for another request or batch."""
    words = [name, "--inference", "--topology", "v5e:4x4", "--search", "16", "--prompt", "700", "--answer", "90"]
    words += ["--batch", str(batch)] if batch > 1 else []  # 1 is the default
    status, out, _ = run(capsys, *words, "--weights_dtype", "int8", "--json", "-")
    found, alone, refused = json.loads(out), {}, 0
    asked, on = request(700, 90, weights_dtype="int8"), hardware.Topology.parse("v5e:4x4")
    for mesh in planner.meshes(16):
        try:
            one = inference.plan(dataclasses.replace(preset(name), mesh=mesh), on, asked)
        except UserError:
            refused += 1
            continue
        alone[str(mesh)] = one.batch_summary(batch)
    fit = {mesh: one for mesh, one in alone.items() if one["fits"]}
    layouts = {row.pop("mesh"): row for row in found["layouts"]}
    sparse = name == "mixtral_8x7b"  # in a dense model, expert is one more fsdp axis, so the search leaves it out
    assert status == 0 and layouts == {mesh: one for mesh, one in fit.items() if sparse or "expert" not in mesh}
    steps = [row["step_s"] for row in layouts.values()]
    assert steps == sorted(steps) and steps[0] == min(one["step_s"] for one in fit.values())
    if sparse:
        assert (found["too_large"], sum(found["refused"].values())) == (len(alone) - len(fit), refused)
    best = next(iter(layouts))
    assert not {"fsdp", "expert"} & {part.split("=")[0] for part in best.split(",")}, "gathered for every token"


def test_a_search_prints_why_no_mesh_fits(capsys):
    """Catches exit status 0 if the batch fits nowhere, and a crash of the empty table."""
    words = ["--inference", "--topology", "v5e:2x2", "--search", "4"]
    status, out, _ = run(capsys, "llama3_70b", *words)
    assert status == 1 and "0 layouts fit a batch of 1;" in out
    assert re.search(r"\d+ layouts are too large; the smallest of them, \S+, needs [\d.]+ GiB of 14.175 GiB", out)


@pytest.mark.parametrize("name, words, why", [
    ("tiny", ["--inference", "--search", "8"], "--search 8 plans meshes of 8 devices, but there is no --topology"),
    ("tiny", ["--inference", "--search", "8", "--topology", "cpu:8"], "--topology of TPUs or GPUs"),
    ("tiny", ["--inference", "--search", "8", "--topology", "v5e:2x4", "--batch", "1", "2"], "pass one --batch"),
    ("tiny", ["--inference", "--search", "8", "--topology", "v5e:2x4", "--batch", "0"], "--batch 0: must be at"),
    ("tiny", ["--inference", "--search", "8", "--topology", "v5e:2x4", "--prompt=-3"], "must be at least 1 token"),
    ("tiny", ["--inference", "--work.remat=full"], "--work.remat has no effect with --inference"),
    ("tiny", ["--inference", "--max-batch"], "--max_batch has no effect with --inference"),
    ("tiny", ["--prompt", "9"], "--prompt has an effect only with --inference"),
    ("tiny", ["--shared", "9"], "--shared has an effect only with --inference"),
    ("tiny", ["--inference", "--prompt", "9", "--shared", "9"], "--shared 9: must be below --prompt 9; raise --prompt"),
    ("tiny", ["--inference", "--batch", "0"], "--batch 0: must be at least 1 sequence"),
    ("tiny", ["--inference", "--plot", "a.png"], "the speed of these devices is unknown"),
    ("llama3_8b", ["--inference", "--mesh", "tensor=16"], "cannot split 8 key/value heads of"),
    ("llama3_8b", [*EIGHT, "--topology", "v5e:4x4"], "mesh tensor=8 has 8 devices"),
])  # fmt: skip
def test_bad_input_gets_one_line(capsys, name, words, why):
    """Catches a flag that is silently ignored, and a traceback."""
    status, out, err = run(capsys, name, *words)
    assert (status, out) == (2, "") and why in err


def test_an_unknown_dtype_is_refused(capsys):
    """Catches an unknown dtype that is treated as another one."""
    with pytest.raises(SystemExit, match="2"):
        main(["tiny", "--inference", "--cache_dtype", "int9"])
    assert "'int8'" in capsys.readouterr().err


def test_the_error_for_full_memory_gives_remedies_that_work(capsys):
    """Catches exit status 0, and advice that does not help."""
    _, _, err = run(capsys, "llama3_70b", "--inference", "--topology", "v5e:2x2", "--mesh", "tensor=4")
    assert "; use a mesh that shards everything over at least 16 devices" in err, "int8 weights do not fit either"
    words = [*EIGHT, "--prompt", "8000", "--answer", "500"]
    status, out, err = run(capsys, "llama3_70b", *words)
    assert status == 1 and "error: 1 x 8,500 tokens do not fit on tensor=8: each device needs weights 16.4" in err
    assert "8,500 tokens, but generation stops at data.seq_len=8,192" in out
    dtype, devices = re.search(r"use --weights_dtype (\w+) or .* at least (\d+) devices", err).groups()
    assert run(capsys, "llama3_70b", *words, "--weights_dtype", dtype)[0] == 0
    more = [*words[:2], "v5e:4x4", "--mesh", f"stage={int(devices) // 8},tensor=8", *words[5:]]
    assert devices == "16" and run(capsys, "llama3_70b", *more)[0] == 0


def test_a_request_for_0_tokens_is_refused():
    """Catches a division by an answer length of 0."""
    with pytest.raises(UserError, match="--answer 0: must be at least 1 token"):
        inference.plan(preset("tiny"), None, request(3, 0))
