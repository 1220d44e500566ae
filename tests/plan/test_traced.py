"""Tests of tracing programs: the counted FLOPs and bytes are correct, and uncountable programs are refused.

The expected values are arithmetic on shapes, written out here, or a plan: the number of layer runs times the formulas
that were read from one layer at other sizes (`plan/count/traced_layer.py`).
"""

import ast
import json
import re
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import pipeline
from compile.ledger import IN_TURN
from config import PRESETS, MeshConfig, preset
from plan import traced
from plan.chips import hardware
from plan.count import costs
from plan.trace import program, rows
from plan.trace.program import abstract_mesh
from utils import UserError

ROOT = Path(__file__).resolve().parent.parent.parent


def mesh_of(text: str, platform: str = "cpu"):
    return abstract_mesh(hardware.NamedMesh.parse(text), platform)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# Our own steps --------------------------------------------------------------------------------------------------------

STEP, RINGS = {"work.gather": "step"}, {"work.context_attention": "ring", "work.tensor_exchange": "ring"}
FULL, MANY = {"work.remat": "full"}, {"data.batch_size": 64}
STEPS = {
    "laptop": ("laptop", "fsdp=2,expert=2,tensor=2", "cpu", {}),
    "tiny, gpipe": ("tiny", "stage=2,fsdp=2,tensor=2", "cpu", {"work.schedule": "gpipe"}),
    "deep, 1f1b": ("deep", "stage=4,fsdp=2", "cpu", {"work.schedule": "1f1b"}),
    "deep, zero bubble": ("deep", "stage=2,fsdp=2", "tpu", {"work.schedule": "zb"}),
    "dense_124m, both rings": ("dense_124m", "fsdp=4,context=2,tensor=2", "cpu", MANY | STEP | RINGS | FULL),
    "moe1b, gpipe": ("moe1b", "stage=2,fsdp=8,tensor=2", "tpu", {"work.schedule": "gpipe"}),
    "t5_tiny, gpipe": ("t5_tiny", "stage=2,fsdp=2,tensor=2", "cpu", {"work.schedule": "gpipe"}),
    "t5_laptop, accumulation": ("t5_laptop", "fsdp=2,tensor=2", "cpu", {"work.remat": "none", "work.device_batch": 2}),
    "t5_laptop, dots": ("t5_laptop", "fsdp=2,tensor=2", "tpu", {"work.remat": "dots", "work.device_batch": 2}),
    "t5_small": ("t5_small", "fsdp=8,tensor=2", "tpu", STEP | FULL),
    "t5_base, 1f1b": ("t5_base", "stage=4,fsdp=4,tensor=2", "tpu", {"work.schedule": "1f1b", "work.remat": "branches"}),
    "t5_xxl, ring": ("t5_xxl", "data=2,fsdp=8,tensor=2", "tpu", {"work.tensor_exchange": "ring"} | FULL),
    "prefix LM": ("dense_124m", "fsdp=4,context=2,tensor=2", "cpu", MANY | {"model.prefix_lm": True}),
    "gptj_6b": ("gptj_6b", "fsdp=8,tensor=2", "tpu", MANY | STEP),
    "llama3_8b, ring": ("llama3_8b", "data=2,fsdp=8,tensor=4", "tpu", MANY | {"work.tensor_exchange": "ring"} | FULL),
    "llama3_70b, 1f1b": ("llama3_70b", "fsdp=16,stage=4,tensor=4", "tpu", MANY | {"work.schedule": "1f1b"}),
    "mixtral_8x7b": ("mixtral_8x7b", "fsdp=4,expert=2,context=2,tensor=2", "tpu", MANY | {"work.remat": "branches"}),
    "mixtral_8x7b, capacity": ("mixtral_8x7b", "fsdp=2,expert=4,context=2,tensor=2", "cpu", MANY | {
        "work.remat": "dots", "model.capacity_factor": 1.25}),
    "deepseek_v3": ("deepseek_v3", "fsdp=8,expert=8,tensor=2", "tpu", MANY),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_a_traced_step_equals_the_plan(case):
    """Catches a loop, branch, kernel or collective that the trace counts too often, not at all, or with wrong bytes.
    FLOPs agree to 0.1%, bytes over each group of axes to 1%, or to 0.01% of all bytes, because counts, norms and
    metrics have no row in `costs.py`."""
    name, mesh, platform, settings = STEPS[case]
    cfg = preset(name, mesh=mesh, **settings)
    one, sched = program.training_step(cfg, platform), pipeline.schedule(cfg)
    one.check()
    assert one.flops == pytest.approx(sum(x.flops for x in costs.work(cfg, sched, platform)), rel=1e-3)
    wanted = {}
    for x in costs.traffic(cfg, sched):  # "cpu": no collective is changed by a compiler
        wanted["*".join(x.axes)] = wanted.get("*".join(x.axes), 0) + x.wire_bytes
    least = 1e-4 * sum(wanted.values())
    for axes in {*wanted, *one.wire_by_axes}:
        assert one.wire_by_axes.get(axes, 0) == pytest.approx(wanted.get(axes, 0), rel=0.01, abs=least), axes
    assert one.wire_bytes == pytest.approx(sum(wanted.values()), rel=0.01)


def test_every_preset_is_traced():
    """Catches a new preset without a case in STEPS."""
    assert {name for name, *_ in STEPS.values()} == set(PRESETS)


def test_a_row_names_its_line_of_the_model():
    """Catches rows that point to JAX, or to the collectives' wrappers in `sharding.py`."""
    one = program.training_step(preset("laptop", mesh="fsdp=2,tensor=2"))
    assert {row.source.split(":")[0] for row in one.rows} <= {
        "model.py", "weights.py", "attention.py", "grouped.py", "step.py", "ticks.py"}  # fmt: skip
    text = (ROOT / "model.py").read_text().splitlines()
    down = [row for row in one.rows if row.source.endswith(" in down")]
    assert down and all("w.w_down_FD" in text[int(re.search(r":(\d+)", row.source)[1]) - 1] for row in down)


# Programs that are not ours -------------------------------------------------------------------------------------------


def test_fully_sharded_layers():
    """Catches a missing all-gather or reduce-scatter in the backward pass. From JAX's `shard_map` tutorial,
    "fully-sharded data parallelism"."""
    layers, batch, width, n = 3, 64, 128, 8

    @jax.remat
    def layer(w, x):
        return jax.nn.relu(x @ jax.lax.all_gather(w, "batch", tiled=True))

    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return jax.lax.pmean(jnp.mean(x**2), "batch")

    step = jax.grad(jax.shard_map(loss, in_specs=(P("batch"), P("batch")), out_specs=P()))
    one = traced.read(step, [shape(width, width)] * layers, shape(batch, width), mesh=mesh_of(f"batch={n}"))
    matrix, product = 4 * width**2, 2 * (batch // n) * width**2
    # Gathered forward and again backward, and a gradient scattered. The unused loss needs no all-reduce.
    assert one.sent("axes", "kind") == {
        (("batch",), "all-gather"): 2 * layers * matrix * (n - 1) / n,
        (("batch",), "reduce-scatter"): layers * matrix * (n - 1) / n,
    }  # fmt: skip
    # Forward, recomputation, gradients of the weights, and gradients of the inputs of all layers but the first.
    assert one.flops == (4 * layers - 1) * product
    assert one.argument_bytes == (layers * matrix + 4 * batch * width) / n


def test_a_tensor_parallel_network():
    """Catches a psum counted as half of one, and swapped axes. From the tutorial, "tensor parallelism", combined with
    data parallelism."""
    batch, width, hidden, rows_, columns = 64, 32, 128, 4, 2

    def loss(weights, x):
        w_up, w_down = weights
        y = jax.lax.psum(jnp.tanh(x @ w_up) @ w_down, "feats")
        return jax.lax.psum(jnp.sum(y**2), "batch")

    splits = ((P(None, "feats"), P("feats")), P("batch"))
    step = jax.value_and_grad(jax.shard_map(loss, in_specs=splits, out_specs=P()))
    shapes = ((shape(width, hidden), shape(hidden, width)), shape(batch, width))
    one = traced.read(step, *shapes, mesh=mesh_of(f"batch={rows_},feats={columns}"))
    matrix, mine = 4 * width * hidden // columns, batch // rows_
    # Over batch: two gradients and the loss. Over feats: only the output, because its gradient is replicated.
    assert one.wire_by_axes == {"batch": 2 * 3 / 4 * (2 * matrix + 4), "feats": 2 * 1 / 2 * 4 * mine * width}
    # Two forward; backward two for gradients of weights, and one for the gradient of the hidden units.
    assert one.flops == 5 * 2 * mine * width * hidden // columns


def test_a_ring_of_permutes():
    """Catches a permute in a loop that is counted once, and one whose bytes are multiplied by (n - 1)/n. From the
    tutorial, "collective matmul"."""
    n, width = 8, 64

    def matmul(lhs, rhs):
        here = jax.lax.axis_index("i")
        block = lambda k: jax.lax.dynamic_slice_in_dim(lhs, k * (width // n), width // n, 1)

        def step(k, carry):
            total, rhs = carry
            rhs = jax.lax.ppermute(rhs, "i", [(j, (j + 1) % n) for j in range(n)])
            return total + block((here - k) % n) @ rhs, rhs

        return jax.lax.fori_loop(1, n, step, (block(here) @ rhs, rhs))[0]

    program_ = jax.shard_map(matmul, in_specs=(P("i"), P("i")), out_specs=P("i"))
    one = traced.read(program_, *[shape(width, width)] * 2, mesh=mesh_of(f"i={n}"))
    assert one.sent("kind") == {("collective-permute",): (n - 1) * 4 * width**2 // n}
    assert one.flops == 2 * width**3 // n
    assert {row.loop for row in one.rows if row.axes} == {"scan"}


# Programs of the guide ------------------------------------------------------------------------------------------------


@pytest.fixture
def as_a_reader_runs_it():
    """Allow rank promotion, JAX's default: the guide's programs use it, and the tests forbid it in our code."""
    with jax.numpy_rank_promotion("allow"):
        yield


def by_hand(chapter: str, *constants: str) -> dict:
    """Return the imports, functions and named constants of a chapter's "by-hand" cells, without running the rest."""
    [path] = (ROOT / "chapters").glob(f"{chapter}_*.py")
    cells = re.split(r"(?m)^# %%", path.read_text())
    text = "\n".join(cell.partition("\n")[2] for cell in cells if '"by-hand"' in cell.partition("\n")[0])
    namespace = {}
    for node in ast.parse(text).body:
        targets = {x.id for t in getattr(node, "targets", ()) for x in ast.walk(t) if isinstance(x, ast.Name)}
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) or targets & {*constants}:
            exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
    return namespace


def test_chapter_03_gathers_twice_and_scatters_once():
    """Catches a loop over layers that is counted as one iteration."""
    chapter = by_hand("03", "L")
    L, B, D = chapter["L"], chapter["B"], chapter["D"]
    slices, batch = P(None, "fsdp"), P("fsdp")
    specs = dict(in_specs=(slices,) * 3 + (batch,) * 2, out_specs=(slices,) * 3)
    step = jax.shard_map(chapter["fsdp_step"], **specs)
    one = traced.read(step, *[shape(L, D, D)] * 3, *[shape(B, D)] * 2, mesh=mesh_of("fsdp=8"))
    assert one.wire_by_axes == {"fsdp": 3 * L * 7 / 8 * 4 * D * D}
    assert one.flops == 4 * L * 2 * (B // 8) * D * D  # forward, recomputation, and two backward


def test_chapter_04_gathers_and_scatters(as_a_reader_runs_it):
    """Catches a backward pass whose collectives are not the transposes of those in the forward pass."""
    chapter = by_hand("04", "join", "add", "cuts", "sizes")
    sliced = P(None, "tensor")
    loss = jax.shard_map(chapter["loss_of_slices"], in_specs=(chapter["cuts"], sliced, sliced), out_specs=P())
    w = {name: shape(*sizes) for name, sizes in chapter["sizes"].items()}
    one = traced.read(jax.value_and_grad(loss), w, *[shape(2, 16, 32)] * 2, mesh=mesh_of("tensor=4"))
    whole = 4 * 2 * 16 * 32
    assert one.sent("kind") == {
        ("all-gather",): 4 * 3 / 4 * whole, ("reduce-scatter",): 4 * 3 / 4 * whole,
        ("all-reduce",): 2 * 3 / 4 * 4 * (2 * 32 + 1),  # the gradients of two gains, and the loss
    }  # fmt: skip


def test_chapter_05_sends_once_per_tick_and_back():
    """Catches ticks that are not counted, and a backward pass whose messages are."""
    chapter = by_hand("05", "n", "Z", "N", "D", "RING", "pass_on", "varying", "layer", "partial_loss")
    n, Z, N, D = (chapter[name] for name in "nZND")
    step = jax.value_and_grad(jax.shard_map(chapter["gpipe"], in_specs=(P("stage"), P(), P()), out_specs=P()))
    one = traced.read(step, shape(n, D, D), *[shape(Z, N, D)] * 2, mesh=mesh_of(f"stage={n}"))
    ticks = Z + n - 1
    assert one.wire_by_axes == {"stage": ticks * 2 * 4 * N * D + 2 * (n - 1) / n * 4}
    assert one.flops == ticks * 3 * 2 * N * D * D  # the layer, and two matmuls backward


def test_chapter_06_sends_keys_around_a_ring():
    """Catches keys, values or positions that are missing from the ring's bytes."""
    chapter = by_hand("06", "n")
    n, S, H, K = (chapter[name] for name in "nSHK")
    ring = jax.shard_map(chapter["ring"], in_specs=(P("context"),) * 4, out_specs=P("context"))
    arrays = [shape(S, H, K)] * 3
    one = traced.read(ring, *arrays, shape(S, dtype=jnp.int32), mesh=mesh_of(f"context={n}"))
    assert one.wire_by_axes == {"context": (n - 1) * 4 * (S // n) * (2 * H * K + 1)}
    assert one.flops == n * 2 * 2 * H * K * (S // n) ** 2


def test_chapter_07_sends_slots_to_experts_and_back():
    """Catches an all-to-all that counts its entire array as sent, and several experts' matmuls counted as one."""
    chapter = by_hand("07", "n")
    n, N, E, D, M, slots = *(chapter[name] for name in "nNEDM"), 8
    device = lambda w, x_tD: chapter["on_device"](w, x_tD, slots)
    cut, w = P("expert"), {"router_DE": shape(D, E), "up_EDM": shape(E, D, M), "down_EMD": shape(E, M, D)}
    layer = jax.shard_map(device, in_specs=({**dict.fromkeys(w, cut), "router_DE": P()}, cut), out_specs=cut)
    one = traced.read(layer, w, shape(N, D), mesh=mesh_of(f"expert={n}"))
    assert one.sent("axes", "kind") == {(("expert",), "all-to-all"): 2 * (n - 1) / n * 4 * E * slots * D}
    assert one.flops == 2 * (N // n) * D * E + 2 * 2 * (E // n) * n * slots * D * M


def test_chapter_14_decodes_over_two_axes(as_a_reader_runs_it):
    """Catches a collective over two axes that is priced as one over a single axis."""
    chapter = by_hand("14", "B", "ALL", "w_specs", "shapes", "slots")
    B, D, G, I, K, S, new = *(chapter[name] for name in "BDGIKS"), 5
    specs = dict(in_specs=(chapter["w_specs"], chapter["slots"], P(), P()), out_specs=(P(), chapter["slots"]))
    w = {name: shape(*sizes) for name, sizes in chapter["shapes"].items()}
    args = w, shape(2, B, S, G, K), shape(B, new, dtype=jnp.int32), shape(dtype=jnp.int32)
    one = traced.read(jax.shard_map(chapter["extend"], **specs), *args, mesh=mesh_of("tensor=4,context=2"))
    queries, stream = 4 * B * new * (G // 4) * I, 4 * B * new * D
    assert one.wire_by_axes == {
        "tensor": 2 * 3 / 4 * stream, "tensor*context": 2 * 7 / 8 * stream,
        "context": queries * (1 + 1 + K),  # 2 (n - 1)/n is 1: maximum score, sum and weighted values
    }  # fmt: skip


# Loops, branches, kernels ---------------------------------------------------------------------------------------------


def read_one(function, *shapes, **more):
    """Trace a function on one device."""
    return traced.read(function, *shapes, mesh=mesh_of("x=1"), **more)


def test_loops_within_loops_multiply():
    """Catches an inner loop that is counted once per program."""

    def twice(x):
        inner = lambda x, _: (x @ x, None)
        outer = lambda x, _: jax.lax.scan(inner, x, length=3)
        return jax.lax.scan(lambda x, _: (outer(x, _)[0], None), x, length=5)[0]

    one = read_one(twice, shape(4, 4))
    assert one.flops == 15 * 2 * 4**3 and [row.count for row in one.rows] == [15]


def test_a_loop_of_unknown_length_counts_once_with_a_note():
    """Catches an invented number of iterations, and a while loop that is skipped."""
    one = read_one(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x @ x, x), shape(4, 4), shape(dtype=jnp.int32))
    assert one.flops == 2 * 4**3 and one.rows[0].loop == rows.COUNTED_ONCE
    assert any("only at run time" in note for note in traced.notes(one))


def branched(x, which):
    with jax.named_scope("slot"):
        return jax.lax.cond(which, lambda x: x @ x @ x, lambda x: x @ x, x)


def test_branches_that_run_in_turn_count_equally():
    """Catches a pipeline stage that is counted as if it ran the more expensive of its two stacks each time."""
    one = read_one(branched, shape(4, 4), shape(dtype=jnp.bool), shares={"slot": IN_TURN})
    assert one.flops == (2 + 1) / 2 * 2 * 4**3


def test_a_conditional_counts_its_more_expensive_branch_with_a_note():
    """Catches the sum of both branches, the cheaper branch, and a row that does not record the choice."""
    one = read_one(branched, shape(4, 4), shape(dtype=bool))
    assert one.flops == 2 * 2 * 4**3 and {row.branch for row in one.rows} == {"larger of 2 sides"}
    assert any("more expensive branch" in note for note in traced.notes(one))


def test_a_share_scales_a_conditional_once():
    """Catches a share that is ignored, applied twice to nested branches, or called with the wrong number of runs."""

    def ticks(x, which):
        nested = lambda x: jax.lax.cond(which, lambda x: branched(x, which), lambda x: x, x)
        return jax.lax.scan(lambda x, _: (nested(x), None), x, length=10)[0]

    def scoped(x, which):
        with jax.named_scope("slot"):
            return ticks(x, which)

    args, share = (shape(4, 4), shape(dtype=bool)), {"slot": lambda runs: 3 / runs}
    assert read_one(scoped, *args, shares=share).flops == pytest.approx(3 * 2 * 2 * 4**3)
    assert read_one(scoped, *args, shares={"slot": 0.5}).flops == pytest.approx(5 * 2 * 2 * 4**3)
    assert {row.branch for row in read_one(branched, *args, shares={"slot": 0.25}).rows} == {"0.25 of runs (slot)"}


def test_a_kernel_counts_what_it_declares():
    """Catches a kernel counted by its body, and a kernel of unknown FLOPs without a note."""

    def call(estimate):
        def body(x, out):
            out[...] = x[...] @ x[...]

        return pl.pallas_call(body, shape(8, 8), cost_estimate=estimate)

    declared = read_one(call(pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=99)), shape(8, 8))
    assert (declared.flops, declared.hbm_bytes, traced.notes(declared)) == (77, 99, [])
    unknown = read_one(call(None), shape(8, 8))
    assert unknown.flops == 0 and "without a cost_estimate" in traced.notes(unknown)[0]


def test_an_unused_kernel_is_not_counted():
    """Catches counting the kernel of an unused gradient and the matmul before it: XLA removes both."""
    estimate = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=99)
    kernel = pl.pallas_call(lambda x, out: None, shape(8, 8), cost_estimate=estimate)
    assert read_one(lambda x: (kernel(x @ x), x + 1)[1], shape(8, 8)).flops == 0
    assert read_one(lambda x: kernel(x @ x), shape(8, 8)).flops == 77 + 2 * 8**3


def test_each_platform_counts_its_own_branch():
    """Catches the FLOPs of another platform's implementation."""
    choose = lambda x: jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x @ x)
    counted = [traced.read(choose, shape(4, 4), mesh=mesh_of("x=1", platform)).flops for platform in ("tpu", "cpu")]
    assert counted == [4 * 4**3, 2 * 4**3]


def test_grouped_matmuls_and_convolutions():
    """Catches a row multiplied by the weights of all groups, and a convolution that ignores its kernel size."""
    grouped = read_one(jax.lax.ragged_dot, shape(12, 4), shape(3, 4, 8), shape(3, dtype=jnp.int32))
    assert grouped.flops == 2 * 12 * 4 * 8
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID")
    assert read_one(convolve, shape(2, 3, 8, 8), shape(5, 3, 3, 3)).flops == 2 * (2 * 5 * 6 * 6) * 3 * 3 * 3


def test_bytes_of_memory_are_operands_and_results():
    """Catches a matmul whose result is missing from the bytes."""
    one = read_one(lambda x, w: x @ w, shape(4, 8, dtype=jnp.bfloat16), shape(8, 16, dtype=jnp.bfloat16))
    assert one.hbm_bytes == 2 * (4 * 8 + 8 * 16 + 4 * 16)


def test_seconds_are_work_over_speed():
    """Catches a roofline that uses the link of another axis, or the speed of another collective."""

    def local(x, w):
        y = jax.lax.all_gather(x @ w, "model", axis=1, tiled=True)
        return jax.lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)])

    named, topology = hardware.NamedMesh.parse("data=4,model=16"), hardware.Topology.parse("v5p:4x4x4")
    function = jax.shard_map(local, in_specs=(P("data"), P(None, "model")), out_specs=P(("data", "model")))
    one = traced.read(function, shape(512, 1024), shape(1024, 4096), mesh=abstract_mesh(named))
    links, chip = hardware.layout(named, topology), topology.chip
    flops, moved = 2 * 128 * 1024 * 256, 4 * (128 * 1024 + 1024 * 256 + 128 * 256)
    whole, data, model = 4 * 128 * 4096, links["data"], links["model"]
    assert len({data.bytes_per_s, data.neighbour_bytes_per_s, model.bytes_per_s}) == 3
    assert one.seconds(topology) == pytest.approx({
        "compute": max(flops / chip.peak_flops_per_s, moved / chip.hbm_bytes_per_s),
        "model": 15 / 16 * whole / model.bytes_per_s, "data": whole / data.neighbour_bytes_per_s,
    })  # fmt: skip
    assert one.seconds(None) is None


def test_axes_of_any_name_use_the_same_links():
    """Catches wrong links for axes that are not among the project's six."""
    topology = hardware.Topology.parse("v5p:4x4x4")
    ours, theirs = (mesh("fsdp=4,tensor=16") for mesh in (MeshConfig.parse, hardware.NamedMesh.parse))
    assert hardware.layout(ours, topology) == hardware.layout(theirs, topology)
    assert hardware.link(ours, topology, ("fsdp", "tensor")) == hardware.link(theirs, topology, ("fsdp", "tensor"))


# The command ----------------------------------------------------------------------------------------------------------

GOOD = """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    arguments = jax.ShapeDtypeStruct((24, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    step = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "rows"), in_specs=(P("rows"), P()), out_specs=P())
"""


def run(tmp_path, capsys, text: str, *words: str, mesh: str = "rows=4,columns=2", function: str = "step"):
    """Run the command on a file; return its exit status, stdout and stderr."""
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(text))
    status = traced.main([f"{file}:{function}", "--mesh", mesh, *words])
    return status, *capsys.readouterr()


def test_the_command_prints_its_counts(tmp_path, capsys):
    """Catches a table without a number, a source line or a link, and wrong numbers in JSON."""
    words = ("--topology", "v5e:2x4")
    status, out, err = run(tmp_path, capsys, GOOD, *words)
    assert (status, err) == (0, "")
    assert re.search(r"rows +│ all-reduce │ +0\.001 MiB", out)
    assert re.search(r"matmul +│ mine\.py:6 in <lambda> +│ +1 ", out)
    assert "rows=4 maps to" in out and "all communication exposed" in out
    status, out, _ = run(tmp_path, capsys, GOOD, *words, "--json")
    found = json.loads(out)
    assert found["flops"] == 2 * 6 * 16 * 16 and found["argument_bytes"] == 4 * (24 // 4 * 16 + 16 * 16)
    assert found["wire_by_axes"] == {"rows": 2 * 3 / 4 * 4 * 6 * 16}
    assert found["exposed_s"] == pytest.approx(sum(found["seconds"].values()))


def test_the_example_in_the_help_text_runs(tmp_path, capsys):
    """Catches an example that does not run from a file, or has other counts than docs/mlp.py."""
    example = traced.HELP.partition("A complete FILE:\n")[2].partition("\nFUNCTION is")[0]
    found = []
    for text in (example, (ROOT / "docs/mlp.py").read_text()):
        status, out, _ = run(tmp_path, capsys, text, "--json", mesh="data=4,model=8")
        assert status == 0
        found.append({name: json.loads(out)[name] for name in ("flops", "wire_by_axes", "argument_bytes")})
    assert found[0] == found[1]
    assert found[0]["flops"] == 5 * 2 * (16384 // 4) * 8192 * (32768 // 8)


def test_a_program_may_create_its_own_mesh(tmp_path, capsys):
    """Catches an error for a mesh of simulated devices, and no error for a mesh that differs from --mesh."""
    own = GOOD.replace("in_specs", "mesh=jax.make_mesh((4, 2), ('rows', 'columns'), "
                       "axis_types=(jax.sharding.AxisType.Auto,) * 2), in_specs")  # fmt: skip
    status, out, _ = run(tmp_path, capsys, own, "--json")
    assert status == 0 and json.loads(out)["flops"] == 2 * 6 * 16 * 16
    status, _, err = run(tmp_path, capsys, own, mesh="rows=2,columns=4")
    assert status == 2 and "runs on its own mesh rows=4,columns=2, not on rows=2,columns=4" in err


def test_a_file_imports_modules_from_its_own_directory(tmp_path, capsys):
    """Catches a user's model.py that is confused with ours or replaces it, and a dataclass in the file that does not
    find its module."""
    import model

    sizes = """
    from __future__ import annotations
    from dataclasses import dataclass
    from model import WIDTH
    @dataclass
    class Sizes:
        width: int = WIDTH
    """
    (tmp_path / "model.py").write_text("WIDTH = 16\n")
    status, out, err = run(tmp_path, capsys, sizes + GOOD.replace("(16, 16)", "(Sizes().width, 16)"), "--json")
    assert status == 0 and json.loads(out)["flops"] == 2 * 6 * 16 * 16, err
    assert sys.modules["model"] is model and hasattr(model, "Transformer")


JIT = """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    step = jax.jit(lambda x, w: x @ w)
    def arguments():
        mesh = jax.sharding.get_abstract_mesh()
        place = lambda *spec: jax.sharding.NamedSharding(mesh, P(*spec))
        return (jax.ShapeDtypeStruct((24, 16), jnp.float32, sharding=place(None, "columns")),
                jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=place("columns")))
"""


def test_jit_alone_is_refused_and_counted_when_compiled(tmp_path, capsys):
    """Catches a program that reports no communication although the compiler adds collectives."""
    status, out, err = run(tmp_path, capsys, JIT)
    assert (status, out) == (2, "")
    assert err.startswith("error: the program has no shard_map, so the compiler decides how to split it")
    assert "--compile counts them" in err
    status, out, _ = run(tmp_path, capsys, JIT, "--compile", "--json")
    found = json.loads(out)
    assert status == 0 and found["flops"] == 2 * 24 * 16 * 8
    assert found["sent"] == [{"axes": ["columns"], "kind": "all-reduce", "count": 1, "wire_bytes": 2 / 2 * 4 * 24 * 16}]


def test_arguments_on_a_mesh_of_make_mesh_are_compiled(tmp_path, capsys):
    """Catches a refusal of Explicit axes, which `jax.make_mesh` makes, and as which the arguments are typed."""
    explicit = JIT.replace("jax.sharding.get_abstract_mesh()", "jax.make_mesh((4, 2), ('rows', 'columns'))")
    explicit = explicit.replace('place(None, "columns")', 'place("rows")').replace('place("columns")', "place()")
    explicit = explicit.replace("lambda x, w: x @ w", "jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), 1)")
    auto = explicit.replace("'columns')", "'columns'), axis_types=(jax.sharding.AxisType.Auto,) * 2")
    (status, out, err), of_auto = (run(tmp_path, capsys, text, "--compile", "--json") for text in (explicit, auto))
    assert (status, err) == (0, "") and of_auto == (status, out, err)
    found, sent_bytes = json.loads(out), 2 * 3 / 4 * 4 * 16 * 16
    assert found["flops"] == 2 * 2 * 24 / 4 * 16 * 16
    assert found["sent"] == [{"axes": ["rows"], "kind": "all-reduce", "count": 1, "wire_bytes": sent_bytes}]


def test_a_matmul_outside_shard_map_is_refused(tmp_path, capsys):
    """Catches a program of which only a part is counted."""
    outside = GOOD + "    inside = step\n    step = lambda x, w: inside(x, w) @ w\n"
    status, _, err = run(tmp_path, capsys, outside)
    assert status == 2
    assert re.search(
        r"mine\.py:8 in <lambda>: this matmul is in no shard_map over the axes rows\*columns, so the compiler", err
    )


def test_the_compiled_counts_equal_the_traced_counts(tmp_path, capsys):
    """Catches bytes that are counted by a different convention than the ledger's."""
    found = [json.loads(run(tmp_path, capsys, GOOD, "--json", *more)[1]) for more in ((), ("--compile",))]
    for name in ("flops", "wire_bytes", "argument_bytes"):
        assert found[0][name] == found[1][name], name


BAD = {
    "a shape": (GOOD.replace("x @ w", "x @ x"), {}, "tracing failed: mine.py:6 in <lambda>: TypeError: dot_general"),
    "their own": (GOOD + "    def step(x, w):\n        raise RuntimeError('too\\nmuch')\n", {},
                  "tracing failed: mine.py:8 in step: RuntimeError: too much"),
    "an axis of a collective": (GOOD.replace('x @ w, "rows"', 'x @ w, "cols"'), {},
                                "mine.py:6 in <lambda>: the mesh rows=4,columns=2 has no axis 'cols'"),
    "an axis of a gather": (GOOD.replace('psum(x @ w, "rows"', 'all_gather(x @ w, "cols"'), {},
                            "mine.py:6 in <lambda>: the mesh rows=4,columns=2 has no axis 'cols'"),
    "an axis of a spec": (GOOD.replace('P("rows")', 'P("cols")'), {}, "the mesh rows=4,columns=2 has no axis 'cols'"),
    "a split": (GOOD, {"mesh": "rows=5,columns=2"}, "argument [0] of shape float32[24,16]: dim 0 has size 24, which is "
                "not a multiple of the 5 devices on rows; use 20 or 25, or a smaller axis"),
    "a split of two": (GOOD.replace('P("rows")', 'P(("rows", "columns"))'), {"mesh": "rows=4,columns=4"},
                       "argument [0] of shape float32[24,16]: dim 0 has size 24, which is not a multiple of the 16 "
                       "devices on rows*columns; use 16 or 32, or a smaller axis"),
    "an import": ("1 / 0", {}, "cannot import"),
    "no function": (GOOD, {"function": "stop"}, "has no function 'stop'; did you mean 'step'?"),
    "no shapes": (GOOD.replace("arguments", "shapes"), {}, "does not define 'arguments': define a tuple of jax.Shape"),
    "no shape": (GOOD + "    arguments = 3, 4\n", {}, "argument 3 has no shape"),
    "a mesh": (GOOD, {"mesh": "rows=4,columns"}, "mesh 'rows=4,columns': columns= should be AXIS=SIZE"),
    "a mesh twice": (GOOD, {"mesh": "rows=4,rows=2"}, "mesh 'rows=4,rows=2': axis 'rows' is given twice"),
    "a topology": (GOOD, {"words": ("--topology", "v5p:4x4x4")},
                   "mesh rows=4,columns=2 has 8 devices, and v5p:4x4x4 has 64 chips"),
    "no topology": (GOOD, {"words": ("--topology", "v99:4")}, "unknown chip 'v99'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_line(tmp_path, capsys, what):
    """Catches a JAX traceback instead of the user's source line, and an error that does not name the problem."""
    text, more, words = BAD[what]
    more = dict(more)
    status, out, err = run(tmp_path, capsys, text, *more.pop("words", ()), **more)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and words in err


@pytest.mark.parametrize("words, message", [
    (["nowhere.py:step"], "file nowhere.py does not exist"),
    (["step"], "'step' should be FILE:FUNCTION"),
])  # fmt: skip
def test_no_file_gets_one_line(capsys, words, message):
    """Catches a traceback from the import system."""
    assert traced.main([*words, "--mesh", "x=2"]) == 2
    assert message in capsys.readouterr().err


def test_the_call_raises_the_users_own_error():
    """Catches an error whose type changes on the way to a Python caller, and a JAX setting that is not restored."""
    jax.config.update("jax_traceback_filtering", "auto")  # JAX's default
    with pytest.raises(ZeroDivisionError):
        read_one(lambda x: 1 / 0, shape(4))
    with pytest.raises(UserError, match="has no axis 'y'"):
        read_one(jax.shard_map(lambda x: jax.lax.psum(x, "y"), in_specs=P("x"), out_specs=P("x")), shape(4))
    assert jax.config.jax_traceback_filtering == "auto"
