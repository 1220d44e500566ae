"""Chapter 17's kernel: the TPU compiler reserves the memory that the page shows, and it runs under check_vma."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from chapters import folded
from plan.chips.hardware import Topology
from plan.trace import compiled
from sharding import CONTEXT, make_mesh

CHAPTER = "17_kernel"
PAGE = (Path(folded.__file__).parent / f"{CHAPTER}.py").read_text(encoding="utf-8")
# | x | X | computed above | v5e | v4 | v6e |
ROWS = re.findall(r"(?m)^# \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE)
SLICES = {"v5e": "v5e:2x2", "v4": "v4:2x2x1", "v6e": "v6e:2x2"}
H, K, S, MiB = 32, 128, 8192, 2**20


@functools.cache
def chapter():
    """Return what the cells of the page define that its kernel and its ring need."""
    names = {"partial": functools.partial}
    for name in ("add_keys", "kernel", "ring_step", "no_keys", "ring", "vmem_bytes"):
        exec(folded.code(CHAPTER, name), names)
    return names


def arrays(place):
    """Return the shapes of a step's queries, keys, values, positions of both, and state."""
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype, sharding=place)
    bf16, positions = shape(H, S, K, dtype=jnp.bfloat16), shape(S, dtype=jnp.int32)
    return bf16, bf16, bf16, positions, positions, (shape(H, K, S), shape(H, 1, S), shape(H, 1, S))


def chip(name):
    return compiled.topology_devices(Topology.parse(SLICES[name]))


def vmem_of_kernels(program) -> list[int]:
    """Return the bytes of VMEM that the compiler reserved for each kernel of a program."""
    lines = [line for line in program.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return [int(re.search(r'"used_scoped_memory_configs":\[\{[^\]]*"size":"(\d+)"', line)[1]) for line in lines]


def test_the_page_has_its_rows():
    """Catches a table that the pattern no longer finds, and a number that differs from the page's formula."""
    sizes = [tuple(int(one.replace(",", "")) for one in row[:2]) for row in ROWS]
    assert sizes == [(512, 512), (1024, 1024), (2048, 1024), (2048, 2048)]
    assert [f"{chapter()['vmem_bytes'](*size, K) / MiB:.2f}" for size in sizes] == [row[2] for row in ROWS]
    assert [row[3:] for row in ROWS][3][:2] == ("refused", "refused")


def lower(name, x, X, **more):
    """Lower a step of the ring for one chip."""
    step = functools.partial(chapter()["ring_step"], x=x, X=X, **more)
    return jax.jit(step).lower(*arrays(SingleDeviceSharding(chip(name)[0])))


@pytest.mark.tpu
@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "x".join(row[:2]))
def test_the_tpu_compiler_reserves_what_the_page_shows(name, row):
    """Catches a kernel that Mosaic rejects, blocks that need other memory than the page shows, and temporary memory in
    HBM, such as scores."""
    x, X = (int(one.replace(",", "")) for one in row[:2])
    shown = row[3 + [*SLICES].index(name)]
    lowered = lower(name, x, X, cost_estimate=pl.CostEstimate(4 * K * H * S * S, H * S * S, 0))
    if shown == "refused":
        with compiled.captured_stderr(), pytest.raises(Exception, match="memory space vmem"):
            lowered.compile()
        print(f"\n{name}: x = {x}, X = {X}: refused, too much VMEM")
        return
    program = lowered.compile()
    [vmem], flops = vmem_of_kernels(program), program.cost_analysis()["flops"]
    print(f"\n{name}: x = {x}, X = {X}: Mosaic accepts it, {vmem / MiB:.2f} MiB of VMEM, {flops / 1e12:.2f} TFLOP")
    assert f"{flops / 1e12:.2f}" == "1.10", "the page says 1.10 TFLOP"
    assert vmem / MiB == pytest.approx(float(shown), abs=0.02)  # libtpu's rounding to tiles
    assert abs(chapter()["vmem_bytes"](x, X, K) / vmem - 1) < 0.08, "the page says 8%"
    assert program.memory_analysis().temp_size_in_bytes < MiB, "the scores would be 8.6 GB"


@pytest.mark.tpu
def test_a_kernel_without_an_estimate_has_no_flops():
    """Catches a compiler that counts the FLOPs in a kernel, so that the page's advice is out of date."""
    assert "flops" not in lower("v5e", 512, 512).compile().cost_analysis()


@pytest.mark.tpu
def test_without_a_kernel_the_scores_are_in_hbm():
    """Catches another size of the temporary memory and of the traffic that the page names."""
    attend = {}
    exec(folded.code("06_context", "attend_block"), attend)
    attend["K"] = K
    q, k, v, at, *_ = arrays(SingleDeviceSharding(chip("v5e")[0]))
    heads_last = lambda x: jax.ShapeDtypeStruct((S, H, K), x.dtype, sharding=x.sharding)

    def step(q_SHK, at_s, k_SHK, v_SHK, at_S):
        # The page's inputs are bfloat16, and its scores float32.
        einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attend["jnp"], "einsum", einsum)
            return attend["attend_block"](q_SHK, at_s, k_SHK, v_SHK, at_S)[:2]

    program = jax.jit(step).lower(heads_last(q), at, heads_last(k), heads_last(v), at).compile()
    temporary, traffic = program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["bytes accessed"]
    print(f"\nattend_block on v5e: {temporary / 1e9:.2f} GB temporary memory, {traffic / 1e9:.1f} GB accessed")
    shown = re.search(r"needs ([\d.]+) GB of temporary memory.*? counts ([\d.]+) GB", PAGE.replace("\n# ", " "))
    assert (f"{temporary / 1e9:.2f}", f"{traffic / 1e9:.1f}") == shown.groups()


@pytest.mark.tpu
def test_the_ring_compiles_for_four_chips_with_the_check():
    """Catches a kernel whose types do not name the axes along which its results vary, and a step without its kernel."""
    mesh = jax.sharding.Mesh(np.array(chip("v5e")), (CONTEXT,))
    specs = dict(mesh=mesh, in_specs=(P(None, CONTEXT),) * 3 + (P(CONTEXT),), out_specs=P(None, CONTEXT))
    ring = jax.shard_map(functools.partial(chapter()["ring"], x=512, X=512), **specs)
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(
        dims, dtype, sharding=NamedSharding(mesh, specs["in_specs"][0 if len(dims) > 1 else 3])
    )
    program = jax.jit(ring).lower(*[shape(jnp.bfloat16, H, 4 * S, K)] * 3, shape(jnp.int32, 4 * S)).compile()
    print(f"\nring on 4 chips of v5e: {len(vmem_of_kernels(program))} kernels, check_vma on")
    assert len(vmem_of_kernels(program)) == 4


def test_the_ring_runs_under_check_vma():
    """Catches a kernel that needs the check to be off: the interpreter that simulates a TPU's memories runs with it."""
    small, mesh = (1, 32, 16), make_mesh(f"{CONTEXT}=2")
    q, k, v = jax.random.normal(jax.random.key(0), (3, *small))
    specs = dict(mesh=mesh, in_specs=(P(None, CONTEXT),) * 3 + (P(CONTEXT),), out_specs=P(None, CONTEXT))
    ring = functools.partial(chapter()["ring"], x=16, X=16, interpret=pltpu.InterpretParams())
    at_S = jnp.arange(small[1])
    got, _ = jax.jit(jax.shard_map(ring, **specs))(q, k, v, at_S)
    seen_SS = at_S[:, None] >= at_S[None, :]
    want = jax.nn.softmax(jnp.where(seen_SS[None], q @ k.swapaxes(1, 2), -1e30)) @ v
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)  # float32 sums of 32 numbers of size 1
