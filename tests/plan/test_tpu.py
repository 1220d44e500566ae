"""Test steps that libtpu compiles for TPU slices: which of them fit, and what they contain. No TPU is needed.

`make test-tpu` runs these except the repeats. `make test-rotation` runs a seventh of the repeats per day.
"""

import ctypes
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import optimizer
import sharding
from compile import ledger
from config import MeshConfig, preset
from kernels import attention, grouped
from kernels.blocks import Reach
from overlap import context
from plan import planner
from plan.simulate import replayed
from plan.time import offload
from plan.trace import compiled
from sharding import CONTEXT, FSDP
from tests.helpers import check_prediction, with_repeats
from utils import UserError

pytestmark = pytest.mark.tpu
GIB = 2**30
V4_BYTES = round(30.75 * GIB)  # of 32 GiB libtpu keeps 1.25 for itself
repeat = pytest.mark.repeat


@pytest.fixture(autouse=True)
def forget_programs():
    """Free compiled programs and the heap that libtpu released, which together would hold several GB."""
    yield
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # libtpu requires glibc


def for_slice(cfg, topology):
    return compiled.compile_step(cfg, compiled.topology_mesh(cfg.mesh, topology), print)


# What the machine is --------------------------------------------------------------------------------------------------


def test_weights_are_gathered_over_a_whole_torus():
    """Catches a torus compiled as a box, where gathers become all-reduces of 1.5 times the bytes."""
    small = {"model.n_layers": 2, "model.vocab_size": 512, "model.d_ff": 1024, "data.seq_len": 128,
             "data.batch_size": 64}  # fmt: skip
    found = for_slice(preset("dense_124m", **small, mesh="fsdp=64"), "v4:4x4x4")
    wire_bytes = lambda kind: sum(x.wire_bytes * x.count for x in found.ledger.collectives if x.kind == kind)
    assert wire_bytes("all-gather") > 0.9 * wire_bytes("all-reduce") > 0  # the latter are gradients


# Overlap --------------------------------------------------------------------------------------------------------------

ASYNC = {"xla_enable_async_all_gather": True}
FUSED = {"xla_tpu_enable_async_collective_fusion": True, "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True}
STEPS = "xla_tpu_enable_async_collective_fusion_multiple_steps"
LAYERS_AHEAD, ROWS, WIDTH = 6, 4096, 2048


def on_eight(local, *shapes, **options):
    """Return the ledger of a function of local shards on 8 chips; the bfloat16 arrays are sharded along dim 1."""
    mesh, spec = compiled.topology_mesh(MeshConfig(fsdp=8), "v4:2x2x2"), jax.sharding.PartitionSpec(None, FSDP)
    place = jax.sharding.NamedSharding(mesh, spec)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    return ledger.read(step.lower(*arrays).compile(compiler_options=options).as_text(), mesh)


@pytest.mark.parametrize(("options", "matmuls"), [
    ({}, 0), (ASYNC, 2), (ASYNC | FUSED | {STEPS: False}, 1), (ASYNC | FUSED | {STEPS: True}, 2),
], ids=["synchronous", "start and end", "one fusion", "several fusions"])  # fmt: skip
def test_a_gather_is_overlapped_if_matmuls_run_during_it(options, matmuls):
    """Catches an asynchronous form whose start or end is not found, and a gather that counts as overlapped only because
    it has both. The first gather is exposed; those of the next layer's weights overlap with this layer's matmuls."""

    def local(x_1RW, w_LdW):
        def layer(carry, w_dW):
            x_RW, w_WW = carry
            w_next_WW = sharding.all_gather(w_dW, FSDP, dim=0)
            return (jnp.tanh(jnp.tanh(x_RW @ w_WW) @ w_WW.T), w_next_WW), None

        first_WW = sharding.all_gather(w_LdW[0], FSDP, dim=0)
        return jax.lax.scan(layer, (x_1RW[0], first_WW), w_LdW)[0][0][None]

    found = on_eight(local, (1, 8 * ROWS, WIDTH), (LAYERS_AHEAD, WIDTH, WIDTH), **options)
    gathers = {one.count: one for one in found.collectives}
    assert set(gathers) == {1, LAYERS_AHEAD}
    assert not gathers[1].hidden
    assert gathers[LAYERS_AHEAD].hidden == bool(matmuls)
    assert gathers[LAYERS_AHEAD].overlapped_flops == matmuls * 2 * ROWS * WIDTH * WIDTH


def test_a_kernel_states_its_flops_or_is_unknown():
    """Catches a kernel that silently counts as 0, and one that loses its cost if its metadata is on other lines."""

    def local(x_1rR):
        def body(x, out):
            out[...] = x[...]

        call = lambda x, **more: pallas.pallas_call(body, out_shape=jax.typeof(x), **more)(x)
        cost = pallas.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0)
        x_1rR = call(x_1rR, name="stated", cost_estimate=cost, metadata={"blocks": "128", "why": "two\nlines"})
        return call(x_1rR, name="silent", metadata={"blocks": "128", "form": "plain"})

    found = on_eight(local, (1, 8 * 128, 128))
    assert found.flops == 77
    assert list(found.unknown.values()) == [1]
    assert next(iter(found.unknown)).startswith("silent (test_tpu.py:")


# Several slices -------------------------------------------------------------------------------------------------------


def test_only_gradients_cross_between_slices_and_each_device_sends_its_part():
    """Catches devices arranged so that weights or activations cross the slow network between two slices, a flat
    all-reduce of gradients, and a plan of other bytes. Two devices of a slice have gradients of the same weights, so
    each sends half of them to the other slice."""
    small = {"model.n_layers": 2, "model.vocab_size": 512, "model.d_ff": 256, "data.seq_len": 128,
             "data.batch_size": 16, "work.gather": "layer", "work.remat": "full"}  # fmt: skip
    plan = planner.plan(preset("dense_124m", **small, mesh="data=4,fsdp=2"), "2*v4:2x2x1")
    found, step = planner.compile_plan(plan, print)
    assert found["unexpected"] == []
    sent = re.findall(r'_xla_megascale_transfer_type="(\w+)"', step.step.as_text())
    assert sent and set(sent) == {"ALL_REDUCE"}
    between, flat = found["wire_by_axes"]["data between slices"], 4 * plan.params_total / 2
    assert between == pytest.approx(flat / 2, rel=0.02)
    assert between == pytest.approx(plan.wire_by_axes["data between slices"], rel=0.02)
    assert found["wire_by_axes"]["data"] == pytest.approx(plan.wire_by_axes["data"], rel=0.02)


# Memory ---------------------------------------------------------------------------------------------------------------

# Stages of 8 layers. Each layer saves its input, [64, 256, 1024] in bfloat16: 32 MiB. In GPipe a stage saves those of
# 128 microbatches, 32 GiB; in 1F1B only those of the few microbatches in flight.
MICROBATCHES, STAGES, LAYERS = 128, 4, 32
WIDE = {"model.vocab_size": 512, "model.d_model": 1024, "model.n_layers": LAYERS, "model.n_heads": 8,
        "model.n_kv_heads": 8, "model.d_head": 128, "model.d_ff": 1024, "work.remat": "full", "data.seq_len": 256,
        "data.batch_size": 64 * MICROBATCHES, "mesh": f"stage={STAGES}",
        "work.microbatches": MICROBATCHES}  # fmt: skip
KEPT_BYTES = LAYERS // STAGES * 64 * 256 * 1024 * 2  # of one microbatch on one stage


def test_gpipe_does_not_fit_where_1f1b_does():
    """Catches a 1F1B that saves as much as GPipe, and an out-of-memory error that is a traceback or ignored."""
    with pytest.raises(compiled.OutOfMemory, match=r"work\.schedule=1f1b") as refusal:
        for_slice(preset("dense_124m", **WIDE), "v4:2x2x1")
    assert refusal.value.limit_bytes == V4_BYTES
    assert refusal.value.used_bytes > MICROBATCHES * KEPT_BYTES
    assert refusal.value.excess_bytes == refusal.value.used_bytes - V4_BYTES
    largest = refusal.value.buffers[0]
    assert largest.size_bytes >= MICROBATCHES * KEPT_BYTES
    assert f"bf16[{MICROBATCHES},{LAYERS // STAGES}," in largest.shape

    fits = for_slice(preset("dense_124m", **WIDE | {"work.schedule": "1f1b"}), "v4:2x2x1")
    assert fits.peak_bytes < 2 * STAGES * KEPT_BYTES + 3 * GIB < V4_BYTES
    assert fits.unexpected == []


def test_the_peak_decides_what_fits():
    """Catches a decision by XLA's temporary bytes, which do not all exist at the same time."""
    dense = DENSE | {"model.n_layers": 4, "work.remat": "none", "mesh": "fsdp=4"}
    found = for_slice(preset("dense_124m", **dense | {"data.batch_size": 296}), "v4:2x2x1")
    assert found.peak_bytes < V4_BYTES < found.temp_bytes


def test_arguments_that_do_not_fit_are_refused():
    """Catches an out-of-memory that is recognized only if activations are too large."""
    mesh = compiled.topology_mesh(MeshConfig(fsdp=4), "v4:2x2x1")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for size, fits in ((5, True), (9, False)):
        x = jax.ShapeDtypeStruct((size, 1024, 1024, 1024), np.float32, sharding=everywhere)
        lowered = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x)
        if fits:
            compiled.compile_lowered(lowered)
            continue
        with pytest.raises(compiled.OutOfMemory, match=rf"36\.00 GiB .*f32\[{size},1024,1024,1024\]") as refusal:
            compiled.compile_lowered(lowered)
        assert (refusal.value.used_bytes, refusal.value.limit_bytes) == (36 * GIB, V4_BYTES)


# Programs -------------------------------------------------------------------------------------------------------------


def tiny(mesh, **settings):
    """A prefix and four blocks of a dense and an MoE layer, which split over 2 stages of 2 chunks."""
    return preset("tiny", **{"mesh": mesh, "model.n_layers": 9, "data.seq_len": 16, "data.batch_size": 32} | settings)


def donated(found):
    """Return (result, argument) numbers of donated memory. The state comes first in both."""
    header = found.step.as_text().splitlines()[0]
    return [(int(result), int(argument)) for result, argument in re.findall(r"\{(\d+)\}: \((\d+), \{\}", header)]


# gpipe and 1f1b are also compiled above and below.
@pytest.mark.parametrize("schedule", with_repeats(("gpipe", "1f1b", "interleaved", "zb"), ("interleaved", "zb")))
def test_every_schedule_compiles(schedule, capfd):
    """Catches programs that only the TPU compiler refuses, collectives that the partitioner adds, a state that is not
    donated, and libtpu's internal messages on stderr."""
    cfg = tiny("stage=2,tensor=2,fsdp=2", **{"work.schedule": schedule, "work.microbatches": 4})
    found = for_slice(cfg, "v4:2x2x2")
    assert found.unexpected == []
    arrays = len(jax.tree.leaves(optimizer.state_shapes(cfg)))
    assert donated(found) == [(number, number) for number in range(arrays)]
    assert 0.95 * found.argument_bytes < found.alias_bytes < found.argument_bytes  # all but the batch
    assert {"forward_slot", "backward_slot", "loss_slot"} <= set(found.shares)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=repeat)])
@pytest.mark.parametrize(
    "D, M, experts", [(768, 1536, 16), (1536, 768, 16), (4096, 14_336, 8), (7168, 2048, 8), (96, 136, 4)]
)
def test_the_grouped_matmul_fits_wide_models(D, M, experts, dtype):
    """Catches blocks sized only for the headline's widths: those of another model exceed a core's 16 MiB."""
    mesh = compiled.topology_mesh(MeshConfig(fsdp=4), "v4:2x2x1")

    def local(rows_AD, w_eDM, sizes_e, d_out_AM):
        out, pull = jax.vjp(lambda rows, w: grouped.grouped_matmul(rows, w, sizes_e), rows_AD, w_eDM)
        return out, *pull(d_out_AM)

    shapes = [((4 * 8192, D), dtype), ((4 * experts, D, M), dtype), ((4 * experts,), "int32"), ((4 * 8192, M), dtype)]
    sliced = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(FSDP))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=sliced.spec, out_specs=sliced.spec))
    found, _ = compiled.compile_lowered(step.lower(*(jax.ShapeDtypeStruct(*x, sharding=sliced) for x in shapes)))
    # The matmul and its two gradients.
    assert len(re.findall("= .* custom-call.*tpu_custom_call", found.as_text())) == 3


ATTENTIONS = [
    (1024, 0, 6, 6, 256, 0, 128, "bfloat16"),
    (4096, 0, 16, 4, 128, 0, 128, "bfloat16"),
    (4096, 0, 16, 16, 192, 0, 128, "float32"),
    (4096, 0, 16, 16, 128, 64, 128, "float32"),
    (32_768, 0, 4, 1, 128, 0, 128, "bfloat16"),
    (32_768, 4096, 4, 1, 128, 0, 128, "bfloat16"),
    (32_768, 0, 20, 20, 64, 128, 64, "bfloat16"),
    (36, 0, 4, 2, 10, 0, 7, "float32"),
    (36, 0, 4, 4, 10, 6, 7, "float32"),
]


@pytest.mark.parametrize("topology, T, window, h, g, K, R, U, dtype", [
    # Every shape on v4; on other chips the shortest and the longest, which has the largest blocks.
    pytest.param(topology, *one, marks=() if topology == "v4:2x2x1" or one[0] in (36, 32_768) else repeat)
    for topology in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2") for one in ATTENTIONS
])  # fmt: skip
def test_attention_fits_long_sequences_and_wide_heads(topology, T, window, h, g, K, R, U, dtype):
    """Catches blocks that do not fit a core's memory, kernels that compile only on one generation, and FLOPs that the
    ledger misses or that differ from the prediction."""
    mesh = compiled.topology_mesh(MeshConfig(fsdp=2, context=2), topology)
    reach = Reach(context.chunk_starts(T // 2, 2), window)
    counted = attention.count_visits(T // 2, T, reach, K + R, U, jax.numpy.dtype(dtype).itemsize, "tpu")
    ahead, back = attention.flops(counted, h, K + R, U)

    def local(q, k, v, d_mixed, segments_bs, segments_bS):
        more = segments_bs, segments_bS, reach, sharding.axis_index(CONTEXT)
        (mixed, log_sum), pull = jax.vjp(lambda *qkv: attention.partial_attention(*qkv, *more), q, k, v)
        return mixed, *pull((d_mixed, log_sum))

    sliced = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec((FSDP, CONTEXT)))
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=sliced.spec, out_specs=sliced.spec))
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sliced)
    q, k = array(4, T // 2, h, K), array(4, T, g, K)
    if R:  # a content part and a rotary part
        q, k = (q, array(4, T // 2, h, R)), (k, array(4, T, R))
    others = array(4, T, g, U), array(4, T // 2, h, U), array(4, T // 2, dtype="int32"), array(4, T, dtype="int32")
    found, _ = compiled.compile_lowered(step.lower(q, k, *others))
    assert len(re.findall("= .* custom-call.*tpu_custom_call", found.as_text())) == 2
    assert ledger.read(found.as_text(), mesh).flops == ahead + back


@pytest.mark.parametrize("mesh, kind", [("fsdp=8", "all-reduce"), ("fsdp=4,data=2", "reduce-scatter")])
def test_a_reduce_scatter_over_all_chips_is_an_all_reduce(mesh, kind):
    """Catches a note in `hardware.check` that is no longer true for the compiler."""
    mesh = compiled.topology_mesh(MeshConfig.parse(mesh), "v4:2x2x2")
    local = lambda x: jax.lax.psum_scatter(x, FSDP, scatter_dimension=0, tiled=True)
    spec, whole = jax.sharding.PartitionSpec(FSDP), jax.sharding.PartitionSpec(None, FSDP)
    x = jax.ShapeDtypeStruct((2048, 8 * 2048), "bfloat16", sharding=jax.sharding.NamedSharding(mesh, whole))
    scatter = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=spec))
    step, _ = compiled.compile_lowered(scatter.lower(x))
    kinds = {one.kind for one in ledger.read(step.as_text(), mesh).collectives}
    assert kinds & {"all-reduce", "reduce-scatter"} == {kind}


def test_a_larger_slice_has_no_larger_program():
    """Catches a program unrolled over devices: 64 chips would take eight times as long to compile as 8."""
    sizes = []
    for mesh, topology in (("fsdp=4,tensor=2", "v4:2x2x2"), ("fsdp=32,tensor=2", "v4:4x4x4")):
        wide = {"model.d_model": 96, "model.d_query_latent": 64, "model.d_kv_latent": 32, "model.n_layers": 3}
        found = for_slice(tiny(mesh, **wide), topology)
        sizes.append((len(found.ledger.collectives), sum(" = " in line for line in found.step.as_text().splitlines())))
    (few, short), (many, long) = sizes
    assert many <= few
    assert long <= 1.05 * short


# Predicted and compiled -----------------------------------------------------------------------------------------------

# Small vocabularies: for narrow shards of a table the compiler uses an all-reduce, with twice the bytes.
DENSE = {"model.vocab_size": 2048, "model.d_model": 1024, "model.n_heads": 8, "model.n_kv_heads": 8,
         "model.d_head": 128, "work.remat": "full", "data.batch_size": 64}  # fmt: skip
PINNED = {"work.gather": "layer", "work.remat": "full", "work.tensor_exchange": "ring", "work.schedule": "gpipe"}
STATE = 0.02  # shards of width 96, and the headline's of 24, are padded to tiles of 128
PREDICTED = {
    "fsdp, tensor": ("v4:4x4x2", "dense_124m", DENSE | {"mesh": "fsdp=16,tensor=2", "data.batch_size": 256}),
    "data, gathered once": ("v4:2x2x2", "dense_124m", {
        "mesh": "data=2,tensor=4", "work.gather": "step", "data.seq_len": 256} | DENSE | {
        "work.remat": "input@host,branch@host,attention@host"}),
    "1f1b": ("v4:2x2x2", "dense_124m", {"mesh": "stage=4,tensor=2", "work.schedule": "1f1b"} | DENSE),
    "experts on three axes, gathered once": ("v4:4x4x2", "moe1b", {
        "mesh": "stage=2,fsdp=8,tensor=2", "work.gather": "step", "work.remat": "branches", "data.seq_len": 512}),
    "attention with masks and biases": ("v5e:4x4", "t5_base", {
        "mesh": "fsdp=16", "model.vocab_size": 2048, "model.n_layers": 4, "model.encoder_layers": 4,
        "data.batch_size": 256, "work.remat": "none"}),
}  # fmt: skip


# `docs/check_a_plan.md` compiles a plan over fsdp and tensor.
@pytest.mark.parametrize(
    "case", with_repeats(PREDICTED, {*PREDICTED} - {"fsdp, tensor", "attention with masks and biases"})
)
def test_the_plan_matches_the_compiled_step(case):
    """Catches a plan that is right only on simulated devices."""
    topology, name, settings = PREDICTED[case]
    plan = planner.plan(preset(name, **PINNED | settings), topology)
    found, compiled = planner.compile_plan(plan, print)
    assert compiled.step.memory_analysis().host_temp_size_in_bytes == offload.step_bytes(plan)
    with_experts = {"state": STATE, "flops": 0.05, "sent": 0.05}
    check_prediction(plan, found, **with_experts if name == "moe1b" else {})
    assert found["unexpected"] == []
    if name == "t5_base":
        assert not re.search(r"(f32|bf16)\[16,12,(12,)?512,512\]", compiled.step.as_text()), "scores are stored"


# dense_124m on as many chips, with short sequences, which compile faster and follow the same rules.
SIXTEEN = {"work.remat": "full", "data.batch_size": 64, "data.seq_len": 256}
LARGE = {"mesh": "fsdp=32,tensor=2", "data.batch_size": 64, "data.seq_len": 4096}
WAITS = {
    "all chips": ("v4:4x2x2", "dense_124m", SIXTEEN | {"mesh": "fsdp=16"}),
    "ring": ("v4:4x2x2", "dense_124m", SIXTEEN | {"mesh": "fsdp=4,tensor=4"}),
    "gather": ("v4:4x2x2", "dense_124m", SIXTEEN | {"mesh": "fsdp=4,tensor=4", "work.tensor_exchange": "gather"}),
    "gather, dots saved": (
        "v4:4x2x2",
        "dense_124m",
        SIXTEEN | {"mesh": "fsdp=4,tensor=4", "work.tensor_exchange": "gather", "work.remat": "dots"},
    ),
    "no recomputation": (
        "v4:4x2x2",
        "dense_124m",
        SIXTEEN | {"mesh": "fsdp=8,tensor=2", "work.remat": "none", "data.seq_len": 1024},
    ),
    "large": ("v4:4x4x4", "llama3_8b", LARGE),
    "large experts": ("v4:4x4x4", "mixtral_8x7b", LARGE),
}  # fmt: skip


# `docs/check_a_plan.md` shows the exposed bytes of the case that is not a repeat.
@pytest.mark.parametrize("case", with_repeats(WAITS, {*WAITS} - {"ring"}))
def test_exposed_bytes_match_the_schedule(case):
    """Catches rules of `plan/chips/hiding.py` that the compiler no longer follows. Exposed bytes must be within 10% of
    all bytes, and all bytes within 1%."""
    topology, name, settings = WAITS[case]
    plan = planner.plan(preset(name, **PINNED | settings), topology)
    found, _ = planner.compile_plan(plan, print)
    wire_bytes, exposed_bytes = found["wire_bytes"], found["exposed_bytes"]
    assert abs(plan.wire_bytes - wire_bytes) <= 0.01 * wire_bytes
    assert abs(plan.exposed_bytes - exposed_bytes) <= 0.10 * wire_bytes


def test_the_headline_step_meets_its_limits_and_its_plan():
    """Catches a change that makes the headline step send, compute or save more, or compute experts densely, and a plan
    of an MoE that is right only on simulated devices. One test, because compiling takes more than a minute.

    With remat=full, which needs the least memory; what `auto` chooses is a row of test_simulated.py."""
    plan = planner.plan(preset("moe1b", **{"work.remat": "full"}), "v4:4x4x2")
    found, step = planner.compile_plan(plan, print)
    check_prediction(plan, found, state=2 * STATE)
    assert found["fits"]
    assert found["peak_bytes"] < 2.1 * GIB
    assert found["wire_bytes"] < 7.8e9 and found["exposed_bytes"] < 4.3e9
    assert found["hardware_flops"] < 1.34 * plan.model_flops
    played = replayed.simulate(
        plan.cfg, plan.topology, compiled.topology_mesh(plan.cfg.mesh, "v4:4x4x2"), step.step.as_text()
    )
    assert played.seconds < 0.25 and plan.simulated_s == pytest.approx(played.seconds, rel=0.1)
    assert found["unknown"] == {}
    assert found["hidden_bytes"] + found["exposed_bytes"] == pytest.approx(found["wire_bytes"])
    assert found["donated_bytes"] > 0.99 * (found["argument_bytes"] - plan.memory_bytes["batch"])
    assert "custom-call" in step.step.as_text()  # the grouped matmul
    assert found["unexpected"] == []


# Slices ---------------------------------------------------------------------------------------------------------------


def test_a_mesh_of_another_number_of_chips_is_refused():
    """Catches a crash while arranging devices instead of an error with both numbers."""
    message = r"^mesh fsdp=4 has 4 devices, and v4:2x2x2 has 8 chips; use axes whose product is 8, .* with fsdp=8$"
    with pytest.raises(UserError, match=message):
        compiled.topology_mesh(MeshConfig(fsdp=4), "v4:2x2x2")


@pytest.mark.parametrize(("topology", "known"), [
    ("v9:2x2x2", "write v4:4x4x2"), ("v4", "like v4:4x4x4"), ("v4:0x2x2", "like v4:4x4x4"),
])  # fmt: skip
def test_a_slice_that_does_not_exist_is_refused(topology, known):
    """Catches libtpu's own error, a page long, and an error that does not suggest a slice."""
    with pytest.raises(UserError, match=rf"^topology '{topology}': .*{known}"):
        compiled.topology_mesh(MeshConfig(fsdp=8), topology)


def test_the_simulated_devices_stay():
    """Catches a TPU compiler that replaces the simulated devices of the tests."""
    compiled.topology_mesh(MeshConfig(fsdp=8), "v4:2x2x2")
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
