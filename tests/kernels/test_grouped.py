"""The TPU and GPU kernels of `kernels/grouped.py`, in Pallas's interpreter, equal `ragged_dot` at the stated cost."""

import itertools
import types
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec as P

from config import MeshConfig
from kernels import grouped, grouped_gpu
from overlap import experts
from plan.chips import hardware
from sharding import FSDP, make_mesh
from tests.helpers import every_form


def by_visits(rows_AD, w_eDM, sizes_e, d_out_AM):
    """The grouped matmul and its gradients with the TPU kernels."""
    pulled = grouped.tpu_grouped_matmul_grads(rows_AD, w_eDM, sizes_e, d_out_AM, interpret=True)
    return grouped.tpu_grouped_matmul(rows_AD, w_eDM, sizes_e, interpret=True), *pulled


def by_programs(rows_AD, w_eDM, sizes_e, d_out_AM):
    """The same with the GPU kernels."""
    pulled = grouped_gpu.gpu_grouped_matmul_grads(rows_AD, w_eDM, sizes_e, d_out_AM, interpret=True)
    return grouped_gpu.gpu_grouped_matmul(rows_AD, w_eDM, sizes_e, interpret=True), *pulled


def by_ragged_dot(rows_AD, w_eDM, sizes_e, d_out_AM):
    out, pull = jax.vjp(lambda rows, w: jax.lax.ragged_dot(rows, w, sizes_e), rows_AD, w_eDM)
    return out, *pull(d_out_AM)


def operands(rows, groups, D=5, M=7):
    rng = np.random.default_rng(rows)
    return (rng.normal(size=s).astype(np.float32) for s in ((rows, D), (groups, D, M), (rows, M)))


@pytest.mark.parametrize("way", [by_visits, by_programs])
@pytest.mark.parametrize("rows, sizes_e", [
    (512, (100, 0, 300, 112)),  # experts that share a tile and its parts; an expert without rows
    (512, (128, 128, 0, 256)),  # experts that begin and end at the bounds of parts
    (1300, (1, 1100, 0, 150, 40)),  # one row; an expert with a whole tile and parts of the adjacent tiles
    (1024, (0, 0, 1024)),  # one expert has all rows
    (300, (0, 0, 130, 7)),  # rows past the last group, and past the last tile; parts without an expert
    (256, (0, 0, 0)),
    (256, (256,)),
])  # fmt: skip
def test_grouped_matmul_equals_ragged_dot(way, rows, sizes_e):
    """Catches rows that the next expert multiplies or overwrites, an uninitialized gradient of an expert without rows,
    and uninitialized parts of the result (the interpreter fills them with NaN)."""
    rows_AD, w_eDM, d_out_AM = operands(rows, len(sizes_e))
    results = [one(rows_AD, w_eDM, jnp.array(sizes_e), d_out_AM) for one in (way, by_ragged_dot)]
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-4)  # float32; sums of up to 1100 numbers of size 1


@pytest.mark.parametrize("way", [by_visits, by_programs])
def test_wide_weights_are_split_into_blocks(way, monkeypatch):
    """Catches blocks of weights paired with the wrong columns, and sums over blocks that restart in each part."""
    monkeypatch.setattr(grouped, "cheapest_blocks", lambda *_: grouped.Blocks(256, 128, 128))
    rows_AD, w_eDM, d_out_AM = operands(768, 3, D=256, M=384)
    sizes_e = jnp.array([56, 500, 212])
    results = [one(rows_AD, w_eDM, sizes_e, d_out_AM) for one in (way, by_ragged_dot)]
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3)  # float32; sums of 500 numbers of size 1


# Cost estimates of the kernels ----------------------------------------------------------------------------------------

A, E, TILE = 1536, 4, 512


def rows_done(sizes_e):
    """The number of rows that the visits of experts of these sizes multiply, counted in a kernel."""
    at, n_visits = grouped.expert_visits(A, sizes_e, TILE)

    def kernel(start_e, end_e, expert_i, tile_i, done):
        @pl.when(pl.program_id(0) == 0)
        def _():
            done[0] = 0

        def count(part):
            done[0] += part.size

        at = grouped.Visits(start_e, end_e, expert_i, tile_i)
        grouped.for_each_expert_part(at, pl.program_id(0), TILE, count)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(at), grid=(n_visits,), in_specs=[], out_specs=pl.BlockSpec(memory_space=pltpu.SMEM)
    )
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct((1,), jnp.int32), grid_spec=spec, interpret=True)(*at)[0]


rows_done_compiled = jax.jit(rows_done)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, A), min_size=E, max_size=E))
@example(cuts=[100, 612, 912, A])
def test_a_visit_multiplies_only_parts_with_its_rows(cuts):
    """Catches a visit that multiplies its whole tile, an expert without rows that multiplies any, and an upper bound
    that is exceeded or never reached."""
    bounds = [0, *sorted(cuts)]
    parts = [{row // 128 for row in range(start, end)} for start, end in pairwise(bounds)]
    done = int(rows_done_compiled(jnp.diff(jnp.array(bounds))))
    assert done == 128 * sum(map(len, parts)) <= grouped.rows_multiplied(A, E)
    if cuts == [100, 612, 912, A]:  # every bound within a part
        assert done == grouped.rows_multiplied(A, E)


def blocks_moved(grid, index):
    """How often a block is moved: whenever its index differs from the previous step's."""
    steps = [index(*step) for step in itertools.product(*map(range, grid))]
    return 1 + sum(one != last for last, one in pairwise(steps))


@pytest.mark.parametrize("d, m", [(256, 640), (768, 320), (768, 640)])
def test_estimated_bytes_equal_the_blocks_moved(d, m):
    """Catches an estimate that counts an operand once if its blocks are read again, or twice if they stay in VMEM."""
    D, M = 768, 640
    at, n_visits = grouped.expert_visits(A, jnp.array([100, 512, 300, 624]), TILE)
    expert_i, tile_i, k, j = at.expert_i.tolist(), at.tile_i.tolist(), D // d, M // m
    there = (j, int(n_visits), k)
    assert grouped.matmul_hbm_bytes(A, D, M, E, 2, TILE, d, m) == 2 * (
        TILE * d * blocks_moved(there, lambda j, i, k: (tile_i[i], k))
        + d * m * blocks_moved(there, lambda j, i, k: (expert_i[i], j, k))
        + TILE * m * blocks_moved(there, lambda j, i, k: (tile_i[i], j)))  # fmt: skip
    back = (j, k, int(n_visits))
    assert grouped.weight_grads_hbm_bytes(A, D, M, E, 2, 4, TILE, d, m) == (
        2 * TILE * d * blocks_moved(back, lambda j, k, i: (tile_i[i], k))
        + 2 * TILE * m * blocks_moved(back, lambda j, k, i: (tile_i[i], j))
        + 4 * d * m * blocks_moved(back, lambda j, k, i: (expert_i[i], k, j)))  # fmt: skip


@pytest.mark.parametrize("D, M, most, want", [
    (900, 1536, 2**40, (1024, 900, 768)),  # 900 is not a multiple of 128, so d is all of D; each core has half of M
    (900, 900, 2**40, (1024, 900, 900)),
    (768, 896, 2**40, (1024, 768, 128)),  # M = 7 x 128: four sevenths of M for one core are less than all of M
    (768, 1536, 768 * 384, (1024, 768, 384)),
    (900, 900, 1, (512, 900, 900)),  # nothing fits: the blocks that need least memory
])  # fmt: skip
def test_blocks_are_multiples_of_lanes_and_shared_by_cores(D, M, most, want):
    """Catches a block that does not divide the weights, is narrower than it could be, or leaves a core idle."""
    vmem_bytes = lambda tile, d, m: grouped.VMEM_BYTES // most * d * m + tile * (most == 1)
    assert grouped.cheapest_blocks(2048, D, M, vmem_bytes, lambda tile, d, m: D * M) == want


@pytest.mark.parametrize("D, M", [(4096, 7168), (7168, 4096)])
def test_matmuls_of_a_wide_model_are_not_memory_bound(D, M, monkeypatch):
    """Catches blocks so small that a v4 chip is memory-bound. Shapes: mixtral_8x7b's experts with tensor=2."""
    costs, v4 = [], hardware.CHIPS["v4"]

    def call(kernel, grid, at, in_specs, out_specs, out, *_, flops, hbm_bytes, **__):
        costs.append((flops, hbm_bytes))
        return jnp.zeros(out.shape, out.dtype)

    monkeypatch.setattr(grouped, "_call", call)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16_384, D), (8, D, M), (16_384, M))]
    jax.eval_shape(lambda rows, w, d_out: grouped.tpu_grouped_matmul(rows, w, jnp.zeros(8, int)), *shapes)
    jax.eval_shape(lambda rows, w, d_out: grouped.tpu_weight_grads(rows, d_out, jnp.zeros(8, int), w.dtype), *shapes)
    assert len(costs) == 2
    for flops, hbm_bytes in costs:
        assert flops / v4.peak_flops_per_s > hbm_bytes / v4.hbm_bytes_per_s


def test_kernels_declare_the_cost_of_the_rows_that_they_compute(monkeypatch):
    """Catches a declared cost of all gathered rows, 8 times too high with expert=8, by which the compiler schedules."""
    costs = []

    def call(kernel, grid, at, in_specs, out_specs, out, *_, flops, hbm_bytes, **__):
        costs.append((flops, hbm_bytes))
        return jnp.zeros(out.shape, out.dtype)

    monkeypatch.setattr(grouped, "_call", call)
    monkeypatch.setattr(grouped, "by_platform", lambda *args, tpu, **_: tpu(*args))
    A, D, M, E = 8192, 256, 128, 4
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((A, D), (E, D, M))]
    for filled in (A // 8, None):
        total = lambda *given, filled=filled: jnp.sum(grouped.grouped_matmul(*given, jnp.zeros(E, int), filled))
        jax.eval_shape(jax.grad(total, argnums=(0, 1)), *shapes)
    expected, whole = costs[:3], costs[3:]
    assert [flops for flops, _ in expected] == [2 * grouped.rows_multiplied(A // 8, E) * D * M] * 3
    assert [flops for flops, _ in whole] == [2 * grouped.rows_multiplied(A, E) * D * M] * 3
    assert all(few < many / 3 for (_, few), (_, many) in zip(expected, whole, strict=True))


def test_kernel_types_name_the_axes_along_which_results_vary(monkeypatch):
    """Catches a kernel that check_vma rejects, and a missing sum in the gradient of replicated weights. Checks only
    types, because the interpreter does not run under check_vma."""
    monkeypatch.setattr(grouped, "by_platform", every_form)
    rows_AD, w_eDM, _ = operands(4 * 128, 3)
    sizes_ne = jnp.array([[100, 0, 28], [128, 0, 0], [1, 100, 20], [0, 64, 64]])

    def total(w_eDM, rows_AD):
        local = lambda rows, w, sizes: jax.lax.psum(jnp.sum(grouped.grouped_matmul(rows, w, sizes[0])), FSDP)
        mesh, specs = make_mesh(MeshConfig(fsdp=4)), (P(FSDP), P(), P(FSDP))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(rows_AD, w_eDM, sizes_ne)

    assert jax.eval_shape(jax.grad(total), w_eDM, rows_AD).shape == w_eDM.shape


@pytest.mark.parametrize("platform, capability, tpu, gpu", [
    ("cpu", None, 0, 0), ("tpu", None, 3, 0), ("gpu", None, 0, 3),  # None: compiled without a GPU
    ("gpu", "7.5", 0, 0), ("gpu", "8.0", 0, 3), ("gpu", "12.0", 0, 3), ("gpu", "gfx942", 0, 0),
])  # fmt: skip
def test_a_mesh_traces_only_the_implementation_of_its_platform(platform, capability, tpu, gpu, monkeypatch):
    """Catches a kernel of the wrong platform, a platform without its kernel, and Triton on a GPU that is too old."""
    if capability:
        monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    mesh = AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("a chip", 1, platform))
    local = lambda rows, w, sizes: jnp.sum(grouped.grouped_matmul(rows, w, sizes) ** 2)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 5), (3, 5, 7))]
    traced = str(jax.make_jaxpr(jax.grad(mapped, argnums=(0, 1)))(*shapes, jax.ShapeDtypeStruct((3,), "int32")))
    options = "pallas_call[", "dimension_semantics=", "num_warps="  # in: all kernels, TPU kernels, Triton programs
    assert [traced.count(option) for option in options] == [tpu + gpu, tpu, gpu]


@pytest.mark.parametrize("platform, kernels", [("cpu", 0), ("cuda", 3)])
def test_without_a_mesh_the_compiler_chooses(platform, kernels):
    """Catches a kernel of the wrong platform or none, and a kernel that Triton cannot lower."""
    rows_AD, w_eDM, _ = operands(512, 3)
    gradients = jax.grad(lambda rows, w, sizes: jnp.sum(grouped.grouped_matmul(rows, w, sizes) ** 2), argnums=(0, 1))
    traced = jax.jit(gradients).trace(rows_AD, w_eDM, jnp.array([100, 0, 412]))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == kernels


def test_only_rows_of_local_experts_are_visited():
    """Catches visits to rows of other devices' experts, which are past the last local row."""
    sizes_e = jnp.array([200, 0, 100])
    at, n_visits = grouped.expert_visits(128 * 100, sizes_e, tile=128)
    assert int(n_visits) == 2 + 1 + 2
    assert at.expert_i[:5].tolist() == [0, 0, 1, 2, 2]
    assert at.tile_i[:5].tolist() == [0, 1, 1, 1, 2]


def test_residuals_are_only_the_operands():
    """Catches padded tiles, or weights gathered per tile, among the residuals."""
    rows_AD, w_eDM, _ = operands(256, 3)
    _, pull = jax.vjp(grouped.grouped_matmul, jnp.array(rows_AD), jnp.array(w_eDM), jnp.array([100, 0, 156]))
    assert sorted(x.shape for x in jax.tree.leaves(pull)) == [(3,), (3, 5, 7), (256, 5)]


@pytest.mark.parametrize("copies", [1, 2])
def test_the_backward_pass_of_a_permutation(copies):
    """Catches a gradient permuted in the forward direction, and one that loses all copies of a row but one."""
    order, x = jnp.array([2, 0, 3, 1]), jnp.arange(8.0 / copies).reshape(-1, 2)
    permute = lambda x: experts.permute_rows(x, order, jnp.argsort(order), copies)
    out, pull = jax.vjp(permute, x)
    want, want_pull = jax.vjp(lambda x: x[order // copies], x)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(pull(out)[0], want_pull(out)[0])
