"""The mesh changes where, not what: every axis alone, every pair, and larger meshes agree with one device.

A covering design, not a product: a case is a mesh, a model, and how the work is done. `python -m tests.parity` makes
the same comparison of any other.
"""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sharding
from architectures import declare
from config import AXES, MeshConfig, preset
from pipeline import fit
from tests import fuzz, helpers, parity

ROOT = Path(__file__).parent.parent

# Every dim has a different size, and each can be split as the cases ask: in 8 along every axis, over all cases.
SHARED = {"data.batch_size": 24, "data.seq_len": 48, "model.vocab_size": 88, "model.d_model": 40, "model.d_ff": 64,
          "model.d_expert": 56, "model.d_head": 6, "model.d_rope": 12, "model.d_value": 10, "model.d_kv_latent": 72,
          "model.d_query_latent": 32, "model.dense_prefix": 0, "model.moe_every": 1}  # fmt: skip
# A small one each: what takes time is compiling, and a layer of another kind is as much again.
MODELS = {
    # Eight blocks of one layer, on latent attention without a query latent; logits from a table of their own; caps.
    "dense": {"model.n_layers": 8, "model.n_experts": 0, "model.n_heads": 16, "model.d_query_latent": 0,
              "model.activation": "gelu", "model.dropout": 0.1,
              "model.softmax": "cap:0.7:0.8"},
    # Dropless experts with biases and a selection bias, on latent attention; tied; all auxiliary losses.
    "moe": {"model.n_layers": 4, "model.n_heads": 16, "model.balance_rate": 0.01, "model.balance_loss": 0.5,
            "model.bias": "experts", "model.activation": "swiglu_clamped",
            "model.tie_embeddings": True, "model.z_loss": 0.03, "model.label_smoothing": 0.1},
    # Experts that drop, with biases, chosen by a softmax, on grouped attention that crosses documents.
    "capacity": {"model.n_layers": 4, "model.n_experts": 32, "model.attention": "gqa", "model.n_heads": 16,
                 "model.n_kv_heads": 8, "model.router": "softmax", "model.capacity_factor": 1.0, "model.n_shared": 0,
                 "model.balance_loss": 0.5, "model.balance_rate": 0.0, "model.dropout": 0.1, "model.bias": "experts",
                 "model.no_rope_every": 0, "data.packing": "windows,unmasked"},
    # A dense layer, then blocks of a dense and an MoE layer: all the kinds of layers there are; tied.
    "mixed": {"model.n_layers": 9, "model.dense_prefix": 1, "model.moe_every": 2, "model.attention": "gqa",
              "model.n_heads": 32, "model.n_kv_heads": 16, "model.activation": "gelu", "model.tie_embeddings": True,
              "model.dropout": 0.1},
    # GPT-J's block, with swiglu: attention and feed-forward in parallel, LayerNorm, biases, a part of a head rotary;
    # caps of scores and logits.
    "parallel": {"model.n_layers": 4, "model.n_experts": 0, "model.attention": "gqa", "model.n_heads": 16,
                 "model.n_kv_heads": 8, "model.norm": "layer", "model.parallel_residual": True,
                 "model.bias": "feed_forward,logits,attention", "model.rope_dims": 4, "model.dropout": 0.1,
                 "model.softmax": "cap:0.7:0.8"},
    # Sliding windows in every second layer, which reach beyond a chunk and have their own RoPE base; attention sinks;
    # biases; norms after each branch.
    "windows": {"model.n_layers": 4, "model.n_experts": 0, "model.attention": "gqa", "model.n_heads": 16,
                "model.n_kv_heads": 8, "model.window": "9:2:500", "model.norm": "sandwich", "model.softmax": "sinks",
                "model.bias": "attention", "data.packing": "windows,unmasked"},
    # Inputs to which all tokens of a document attend, on latent attention.
    "prefix": {"model.n_layers": 4, "model.n_experts": 0, "model.n_heads": 16, "model.prefix_lm": True},
    # An encoder and a decoder, on grouped attention.
    "seq2seq": {"model.n_layers": 4, "model.encoder_layers": 2, "model.n_experts": 0, "model.attention": "gqa",
           "model.n_heads": 16, "model.n_kv_heads": 8, "model.no_rope_every": 0, "model.activation": "geglu",
           "model.dropout": 0.1, "model.top_k": 3, "data.input_len": 56},
}  # fmt: skip

# A word of a case -> the setting it changes. None of them may change a result.
WORK = {"remat": "work.remat", "gather": "work.gather", "attention": "work.context_attention",
        "loss_chunk": "work.loss_chunk", "microbatches": "work.microbatches", "schedule": "work.schedule",
        "exchange": "work.tensor_exchange", "experts": "work.expert_exchange",
        "layout": "work.context_layout"}  # fmt: skip

CASES = """
data=2                      dense     accumulation=3
data=4                      moe       remat=full
data=8                      capacity  accumulation=3 loss_chunk=40
stage=2                     moe       microbatches=4 schedule=1f1b remat=dots
stage=4                     capacity  microbatches=2
stage=8                     dense     microbatches=4 schedule=zb
fsdp=2                      capacity  gather=step
fsdp=4                      dense     accumulation=3
fsdp=8                      moe       remat=dots
expert=2                    moe       accumulation=3
expert=4                    capacity  remat=full
expert=8                    moe       gather=step experts=routed
context=2                   moe       attention=ring
context=4                   dense     attention=ring remat=input@host,keys,attention@host
context=8                   capacity  attention=gather loss_chunk=40
context=2                   capacity  attention=all_to_all remat=dots
context=8                   moe       attention=all_to_all layout=documents
tensor=2                    mixed     remat=full loss_chunk=40 exchange=ring gather=step
tensor=4                    moe       accumulation=3 exchange=ring
tensor=8                    dense     loss_chunk=40 remat=branches exchange=ring

tensor=2                    parallel  exchange=ring remat=branches
stage=2                     parallel  microbatches=2 schedule=1f1b
expert=2,context=2          parallel  attention=ring loss_chunk=40
data=2,fsdp=2,tensor=2      parallel  gather=step

context=4                   windows   attention=ring gather=step
context=2,tensor=4          windows   attention=all_to_all exchange=ring
stage=2,context=4           windows   attention=ring microbatches=2 schedule=1f1b
data=2,fsdp=2,expert=2      windows   attention=gather remat=dots
fsdp=2,context=2,tensor=2   windows   attention=gather remat=dots

context=2                   prefix    attention=ring layout=documents
data=2,stage=2              prefix    microbatches=2 schedule=1f1b gather=step
fsdp=2,expert=2,tensor=2    prefix    exchange=ring remat=full

expert=2                    seq2seq   accumulation=3 loss_chunk=40
fsdp=4,tensor=2             seq2seq   exchange=ring gather=step
stage=2                     seq2seq   microbatches=4 remat=dots
data=2,stage=2,tensor=2     seq2seq   microbatches=2 schedule=1f1b accumulation=3 remat=full

data=2,stage=2              moe       microbatches=2 gather=step
data=4,fsdp=2               dense     remat=dots
data=2,expert=2             moe       accumulation=3 gather=step
data=2,context=2            mixed     attention=ring
data=2,tensor=4             capacity  remat=dots gather=step
stage=4,fsdp=2              dense     microbatches=4 schedule=1f1b
stage=2,expert=4            capacity  microbatches=2 schedule=interleaved:2 remat=full
stage=2,context=2           mixed     microbatches=4 gather=step
stage=4,tensor=2            moe       microbatches=2 schedule=1f1b accumulation=3 exchange=ring gather=step
fsdp=2,expert=2             capacity  accumulation=3 gather=step
fsdp=2,context=4            moe       attention=ring gather=step layout=documents
fsdp=4,tensor=2             moe       accumulation=3 loss_chunk=40 gather=step
expert=2,context=2          dense     attention=gather remat=full gather=step
expert=4,tensor=2           capacity  accumulation=3 exchange=ring
context=2,tensor=4          dense     attention=ring exchange=ring
context=4,tensor=2          capacity  attention=all_to_all remat=full

data=2,stage=2,fsdp=2       moe       microbatches=2 schedule=zb accumulation=3
data=2,stage=2,tensor=2     dense     microbatches=4 remat=full
data=2,fsdp=2,context=2     dense     attention=ring accumulation=3 gather=step
data=2,expert=2,tensor=2    capacity  remat=dots gather=step exchange=ring
stage=2,fsdp=2,expert=2     moe       microbatches=2 schedule=1f1b gather=step
stage=2,fsdp=2,context=2    capacity  microbatches=4 remat=dots
stage=2,fsdp=2,tensor=2     mixed     microbatches=2 schedule=interleaved:2 remat=dots exchange=ring
stage=2,expert=2,context=2  moe       microbatches=4 schedule=interleaved:2 accumulation=3 gather=step experts=routed
stage=2,expert=2,tensor=2   moe       microbatches=4 schedule=zb remat=full exchange=ring gather=step
stage=2,context=2,tensor=2  dense     microbatches=2 attention=gather loss_chunk=40 gather=step layout=documents
fsdp=2,expert=2,context=2   mixed     attention=ring remat=full experts=routed
fsdp=2,expert=2,tensor=2    moe       accumulation=3 exchange=ring experts=routed
fsdp=2,context=2,tensor=2   capacity  attention=ring accumulation=3 exchange=ring
expert=2,context=2,tensor=2 moe       attention=ring
stage=2,context=2,tensor=2  mixed     microbatches=2 attention=ring schedule=1f1b exchange=ring layout=documents
stage=2,context=2,tensor=2  dense     microbatches=2 attention=all_to_all remat=full
"""

# Run by the command, each in a process of its own, which simulates as many devices.
COMMAND_CASES = """
stage=2,fsdp=2,expert=2,context=2          moe    microbatches=2 attention=ring gather=step
data=2,stage=2,fsdp=2,tensor=2             dense  microbatches=2 schedule=1f1b accumulation=3 exchange=ring
stage=2,fsdp=2,expert=2,context=2,tensor=2 mixed  microbatches=2 remat=full
"""


def lines(table: str) -> list[str]:
    """Return the cases, one per line, with single spaces, so that the text is the test id."""
    return [" ".join(line.split()) for line in table.split("\n") if line]


def meetings(case: str) -> set:
    """Return the pairs of axis and feature that a case tests; numbers of passes and microbatches do not matter."""
    mesh, name, *words = case.split()
    return helpers.tested_pairs(mesh, name, *(word.rstrip("=0123456789") for word in words))


def settings(case: str) -> dict:
    """Return the dotted settings of a case, on top of the preset `tiny`."""
    mesh, name, *words = case.split()
    work = {word: int(value) if value.isdecimal() else value for word, value in (w.split("=") for w in words)}
    parts = MeshConfig.parse(mesh).batch_shards * work.get("microbatches", 1) * (passes := work.pop("accumulation", 1))
    limit = {"work.device_batch": SHARED["data.batch_size"] // parts} if passes > 1 else {}
    return {**SHARED, **MODELS[name], "mesh": mesh, **limit, **{WORK[word]: value for word, value in work.items()}}


def config(case: str):
    return preset("tiny", **settings(case))


def command(*arguments: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "tests.parity", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def forget_programs():
    """Run without the cache, because each case runs once and all results together need several GB."""
    yield
    jax.clear_caches()


# The mesh changes where, not what -------------------------------------------------------------------------------------


def few_cases() -> list[str]:
    """Return the few cases that `make test` runs: of the cases without repeats, those that cover each pair of axes."""
    cases = {case: meetings(case) for case in lines(CASES)}
    of_axes = lambda pairs: {pair for pair in pairs if pair <= {*AXES}}
    return helpers.covering_cases({case: of_axes(cases[case]) for case in helpers.covering_cases(cases)})


@pytest.mark.parametrize("case", helpers.with_repeats({case: meetings(case) for case in lines(CASES)}, few=few_cases()))
def test_a_mesh_equals_one_device(case, record_property):
    """Catches a psum missing or doubled, a mean of means, a statistic or a clipping norm of one device only, dropout
    or numbering that depends on who holds a token, parameters that start or drift apart, a gradient that is lost
    between stages, passes or microbatches, and a weight gathered along the wrong dim."""
    comparison = parity.compare(config(case))
    gradient = comparison.worst("gradient")
    record_property("worst gradient", (gradient.error, case, gradient.name))
    assert comparison.worst().ok, f"{case}: {comparison.worst()}"


@pytest.mark.slow
@pytest.mark.parametrize("case", helpers.with_repeats(lines(COMMAND_CASES), lines(COMMAND_CASES)[-1:]))
def test_the_command_reports_that_a_mesh_equals_one_device(case, record_property):
    """Catches what needs four axes, or five, to go wrong, a ring and a pipeline that wait for each other, and a command
    whose verdict or keys changed."""
    done = command("tiny", *fuzz.flags(settings(case)), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    record_property("worst gradient", (found["grad_rel"], case, found["worst_param"]))
    assert found["loss_rel"] <= 1e-5 and found["grad_rel"] <= 1e-4 and found["update_rel"] <= 1e-3, line
    verdicts = ("ok", "params_equal", "metrics_equal", "initial_equal", "replicas_equal")
    assert all(found[verdict] is True for verdict in verdicts), line


@pytest.mark.parametrize("number", helpers.with_repeats(range(8), (0,)))
def test_any_mesh_equals_one_device(number):
    """Catches bugs in combinations of settings that no case above has: `python -m tests.fuzz`."""
    settings = fuzz.draw(number)
    comparison = parity.compare(preset("tiny", **settings))
    assert comparison.worst().ok, f"{shlex.join(fuzz.flags(settings))}: {comparison.worst()}"


def fuzzed(*arguments: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


# Two that are equal are on a page, `docs/check_a_mesh.md`.
@pytest.mark.parametrize("limit, verdict", [("0.2", "hangs"), pytest.param("600", "equal", marks=pytest.mark.repeat)])
def test_drawn_cases_run_in_processes_of_their_own(limit, verdict):
    """Catches a command that draws the same case twice, or prints an unclear verdict."""
    done = fuzzed("--seed", "5", "--count", "2", "--timeout", limit, "--json")
    assert done.returncode == (verdict != "equal"), done.stdout + done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["verdict"] == second["verdict"] == verdict and first["command"] != second["command"]
    assert [first["case"], second["case"]] == [0, 1]


def test_a_hanging_case_is_reported_in_one_line():
    """Catches a hanging case that stops the others, counts as equal, or cannot be repeated."""
    done = fuzzed("--count", "1", "--timeout", "0.2")
    assert done.returncode == 1
    assert "hangs" in done.stdout and "0 of 1 cases match the single-device result" in done.stdout
    assert f"python -m tests.parity tiny {shlex.join(fuzz.flags(fuzz.draw(0)))}" in done.stderr


# The design -----------------------------------------------------------------------------------------------------------


def test_the_cases_cover():
    """Catches the removal of a case that was the only one of its kind."""
    meshes = [MeshConfig.parse(case.split()[0]).sizes for case in lines(CASES)]
    split = [{axis: size for axis, size in mesh.items() if size > 1} for mesh in meshes]
    for axis, size in itertools.product(AXES, (2, 4, 8)):
        assert {axis: size} in split, f"{axis}={size} alone"
    for pair in itertools.combinations(AXES, 2):
        assert any(tuple(mesh) == pair for mesh in split), f"no mesh of {pair} alone"
    assert sum(len(mesh) >= 3 for mesh in split) >= 12
    cases = lines(CASES) + lines(COMMAND_CASES)
    for word in [*MODELS, "accumulation=3", "microbatches=2", "microbatches=4", "remat=dots", "remat=full",
                 "gather=step", "attention=ring", "exchange=ring", "1f1b", "interleaved", "zb"]:  # fmt: skip
        axes = {axis for case in cases if word in case for axis in case.split()[0].replace("=", ",").split(",")}
        wanted = {"context"} if word == "attention=ring" else set(AXES) - ({"context"} if word == "seq2seq" else set())
        if "microbatches" in word or word in ("1f1b", "interleaved", "zb"):
            wanted = {"stage"}
        assert wanted <= axes, f"{word} never meets {wanted - axes}"
    for word in ("gather=step", "exchange=ring"):
        others = {*MODELS, "accumulation", "schedule=1f1b", "schedule=interleaved", "schedule=zb", "attention=ring"}
        met = {other.rstrip(":=0123456789") for case in cases if word in case for other in case.split()}
        assert others <= met, f"{word} never meets {others - met}"


def test_the_quick_cases_cover_every_pair():
    """Catches a CI that leaves out a feature on an axis, a `make test` that leaves out a pair of axes, and numbers of
    cases that differ from those on the page of the tests."""
    cases = {case: meetings(case) for case in lines(CASES)}
    quick = helpers.covering_cases(cases)
    assert set().union(*(cases[case] for case in quick)) == set().union(*cases.values())
    text = " ".join((ROOT / "docs/tests.md").read_text().split())
    few = few_cases()
    pairs = {frozenset(pair) for pair in itertools.combinations(AXES, 2)}
    assert pairs <= set().union(*(cases[case] for case in few)) and {*few} <= {*quick}
    assert f"it runs {len(few)} of the {len(cases)} meshes and models" in text
    assert f"`make test-long` runs {len(quick) - len(few)} more" in text


@pytest.mark.parametrize("case", lines(CASES) + lines(COMMAND_CASES))
def test_a_case_has_its_passes_and_microbatches(case):
    """Catches a batch so small that a case has fewer passes or microbatches than its name states."""
    said = {word: int(n) for word, n in re.findall(r"(accumulation|microbatches)=(\d+)", case)}
    split = fit.split_batch(config(case))
    assert said == {word: getattr(split, word) for word in said}
    assert said.get("accumulation", 1) == split.accumulation


@pytest.mark.parametrize("name", MODELS)
def test_every_dim_has_a_different_size(name):
    """Catches a model in which a test would not notice two swapped dims."""
    cfg = config(f"data=1 {name}")
    sizes = {("B", cfg.data.batch_size), ("T", cfg.data.seq_len), ("k", cfg.model.top_k), ("S", cfg.data.input_len)}
    for d in sharding.flatten_named(declare(cfg.model)).values():
        sizes |= set(zip(d.dims, d.shape, strict=True)) - {("P", 1), ("J", 1)}  # one layer deep
    if not cfg.model.d_query_latent:
        sizes -= {("Q", cfg.model.d_model)}  # queries come from the stream
    by_size = sorted((size, letter) for letter, size in sizes)
    same = [pair for pair in itertools.pairwise(by_size) if pair[0][0] == pair[1][0]]
    assert not same, same


# The harness ----------------------------------------------------------------------------------------------------------

RIGHT = config("data=1 moe")
OUT, BIAS = "blocks.moe.attention.w_out_HUD", "blocks.moe.feed_forward.bias_E"
WRONG = {  # kind, name, what is done to the values -> how far they are then off
    "a gradient twice as large": ("gradient", OUT, lambda x: 2 * x, 1.0),
    "a gradient with one wrong entry": ("gradient", OUT, lambda x: x + 1e-3 * np.abs(x).max() * (x == x.max()), 1e-3),
    "a gradient where there is none": ("gradient", BIAS, lambda x: x + 1, np.inf),
    "a gradient that is not a number": ("gradient", OUT, lambda x: x * np.nan, np.inf),
    "one parameter that starts elsewhere": ("initial", OUT, lambda x: x + 1e-6 * (x == x.max()), None),
    "an update of half the size": ("update", OUT, lambda x: x / 2, 0.5),
    "a bias pushed the other way": ("update", BIAS, lambda x: -x, 2.0),
    "a loss that is off in the last step": ("loss", "step 2", lambda x: x * np.float32(1.0001), 1e-4),
    "one token more": ("count", "tokens_per_expert", lambda x: x + (x == x.max()), None),
    "a statistic of half the layers": ("metric", "router_entropy", lambda x: x * (np.arange(len(x)) < 2), 1.0),
    "a replica that drifted": ("replica", f"final.params.{OUT}", lambda x: 0.25, 0.25),
}


def right_results():
    return parity.run_on_one_device(parity.replace(RIGHT, **parity.ONE_DEVICE))


@pytest.mark.parametrize("mistake", WRONG)
def test_the_comparison_sees_and_names(mistake):
    """Catches a comparison that averages, is too tolerant, compares other values, or accepts NaN."""
    kind, name, spoil, how_far = WRONG[mistake]
    right = right_results()
    wrong = right | {kind: right[kind] | {name: spoil(right[kind][name])}}
    comparison = parity.differences(wrong, right)
    (found,) = [d for d in comparison.differences if not d.ok]
    assert (found.kind, found.name) == (kind, name) and found == comparison.worst()
    if how_far is not None and np.isfinite(how_far):
        assert found.error == pytest.approx(how_far, rel=0.01)  # float32
    said = comparison.to_dict()
    assert said["ok"] is False
    assert said["params_equal"] is (kind not in ("initial", "update", "replica"))
    assert said["metrics_equal"] is (kind not in ("metric", "count"))
    assert (said["worst_param"] == name) or kind != "gradient"
    (line,) = [line for line in parity.table(RIGHT, comparison).splitlines() if "<- differs" in line]
    assert name in line and "DIFFERS" in parity.table(RIGHT, comparison)


@pytest.mark.parametrize("wrong_until, tries, ok", [(0, 1, True), (1, 2, True), (9, 3, False)])
def test_experts_are_compared_on_other_batches_after_a_difference(monkeypatch, wrong_until, tries, ok):
    """Catches a comparison that reports a tie of two scores as a bug, and one that misses a bug in every batch."""
    right = right_results()
    monkeypatch.setattr(parity, "run_on_one_device", lambda cfg, first_batch: right)

    def run(cfg, first_batch):
        spoil = first_batch < wrong_until * parity.STEPS
        return right | {"update": right["update"] | {OUT: right["update"][OUT] * (1 + spoil)}}

    monkeypatch.setattr(parity, "run", run)
    comparison = parity.compare(RIGHT)
    assert (comparison.tries, comparison.worst().ok) == (tries, ok)
    assert comparison.to_dict()["tries"] == tries
    assert ("attempts with other batches" in parity.table(RIGHT, comparison)) is (tries > 1)
    dense = parity.compare(parity.replace(RIGHT, **{"model.n_experts": 0, "model.moe_every": 1}))
    assert dense.tries == 1


def test_equal_results_are_equal():
    """Catches a comparison that always fails."""
    comparison = parity.differences(right_results(), right_results())
    assert comparison.worst().ok and comparison.worst().error == 0
    assert "matches a single-device run" in parity.table(RIGHT, comparison)


def test_replicas_are_compared_device_by_device():
    """Catches a check of only one device's copy, or one that compares different shards as copies."""
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    held = [np.full(6, value, np.float32) for value in (1, 1, 2, 2)]  # devices 0 and 1 hold one slice, 2 and 3 another

    def array():
        shards = [jax.device_put(x, device) for x, device in zip(held, mesh.devices.flat, strict=True)]
        return jax.make_array_from_single_device_arrays((12,), NamedSharding(mesh, P("fsdp")), shards)

    assert parity.differing_replicas(array()) == 0
    held[3][4:] += 1e-7 * 2
    assert parity.differing_replicas(array()) == pytest.approx(2 / 6)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, message", [
    ("--mesh tensor=3 --model.vocab_size 279", "cannot split 4 query heads of prefix.attention.w_query_QHK over mesh "
     "axes tensor = 3 devices (4 % 3 = 1); use a smaller tensor, or --model.n_heads 3 or 6; "
     "presets that split over tensor=3: "),
    ("--mesh data=5", "cannot split data.batch_size=16 sequences over data*fsdp*expert = 5 batch shards "
     "(16 % 5 = 1); use data.batch_size=15 or 20"),
])  # fmt: skip
def test_an_impossible_mesh_is_refused_with_the_arithmetic(words, message):
    """Catches a traceback, the status for a difference, and an invalid JSON line."""
    done = command("tiny", *words.split(), "--json")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr


def test_a_difference_is_status_1():
    """Catches a command that always succeeds: bfloat16 rounds partial sums, so meshes differ in the third digit."""
    words = "--mesh tensor=2 --model.n_experts 0 --model.dense_prefix 0 --model.n_layers 1 --model.attention gqa"
    done = command("tiny", *words.split(), "--model.precision", "mixed")
    assert done.returncode == 1, done.stderr
    assert "comparing tensor=2 with one device: about a minute for a small model ..." in done.stderr
    assert "mesh tensor=2 (2 devices) against one device, bfloat16" in done.stdout
    assert "<- differs" in done.stdout and "DIFFERS" in done.stdout


def test_help_shows_the_flags():
    """Catches settings without a flag."""
    done = command("--help")
    assert done.returncode == 0
    assert all(f"--{name} " in done.stdout for name in ("mesh", "json,", "model.n_heads", "work.device_batch"))
