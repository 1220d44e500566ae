"""Find out which TPU compiler option overlaps which collective with compute, on which chip; needs no TPU.

`python -m bench.options` compiles the forward pass, recomputation and backward pass of six layers with two matrices
each, on the mesh data=2,fsdp=8, with each set of options. It prints which fraction of each collective's bytes overlaps
with matmuls (`compile/ledger.py`). For all-gathers and reduce-scatters this is at most half, because a layer's first
all-gather and last reduce-scatter have no matmul in the same layer to overlap with. The last column is "yes" if libtpu
prints a warning about the options."""

import json
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding, PartitionSpec as P

import sharding
from compile import ledger, options
from config import MeshConfig
from plan.chips import hardware
from plan.trace import compiled
from sharding import BATCH, FSDP
from utils import exit_status

FUSION = "xla_tpu_enable_async_collective_fusion"
ASYNC = {"xla_enable_async_all_gather": True}
FUSED = {FUSION: True, f"{FUSION}_fuse_all_gather": True, f"{FUSION}_multiple_steps": True,
         "xla_tpu_overlap_compute_collective_tc": True}  # fmt: skip
SETS = {
    "none": {},
    "asynchronous gathers": ASYNC,
    "continuation fusion": ASYNC | FUSED,
    "SparseCore": dict.fromkeys(options.SPARSECORE, True),
}
SLICES = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x2")  # 16 devices each
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
MESH = MeshConfig(data=2, fsdp=8)
LAYERS, ROWS, WIDTH = 6, 2048, 1024
WARNING = "at your own risk"  # part of libtpu's warning that options may give wrong results on this chip


@dataclass(frozen=True)
class Arguments:
    topology: Annotated[tuple[str, ...], tyro.conf.arg(help="slices of 16 devices")] = SLICES
    json: Annotated[bool, tyro.conf.arg(help="print one line of JSON per row instead of a table")] = False


HELP = """e.g. python -m bench.options --topology v5p:2x2x4 v6e:4x4

Find out which TPU compiler option overlaps which collective with compute, on which chip. Needs no TPU; 2 minutes."""


def layers(mesh):
    """Lower the gradient of a stack of layers for a slice."""
    join = lambda w_dF: sharding.all_gather(w_dF, FSDP, dim=0)

    def loss(w_LdF, v_LdF, x_nD):
        def layer(x_nD, w):
            w_dF, v_dF = w
            return x_nD + jnp.tanh(x_nD @ join(w_dF)) @ join(v_dF).T, None

        x_nD, _ = jax.lax.scan(jax.checkpoint(layer), x_nD, (w_LdF, v_LdF))
        return jnp.sum(x_nD.astype(jnp.float32) ** 2)

    array = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    weights, rows = P(None, FSDP), P(BATCH)
    gradient = jax.shard_map(jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=(weights, weights, rows),
                             out_specs=(weights, weights))  # fmt: skip
    matrix = array(weights, LAYERS, WIDTH, 4 * WIDTH)
    return jax.jit(gradient).lower(matrix, matrix, array(rows, MESH.devices * ROWS, WIDTH))


def measure(topology: str, mesh):
    """Yield a table row per set of options: the overlapped fraction of each kind's bytes, and whether libtpu warns."""
    lowered = layers(mesh)
    for name, told in SETS.items():
        with compiled.captured_stderr() as heard:
            text = lowered.compile(compiler_options=told).as_text()
        found = ledger.read(text, mesh).totals_by("kind")
        share = {kind: found[kind].hidden_bytes / found[kind].wire_bytes if kind in found else None for kind in KINDS}
        yield {"topology": topology, "options": name, "hidden": share, "warns": WARNING in "".join(heard)}


def line(row: dict) -> str:
    shares = ["-" if share is None else f"{share:.0%}" for share in row["hidden"].values()]
    return f"| `{row['topology']}` | {row['options']} | {' | '.join(shares)} | {'yes' if row['warns'] else 'no'} |"


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, prog="python -m bench.options", description=HELP, args=argv)
    for topology in args.topology:
        hardware.require_devices(MESH, hardware.Topology.parse(topology))
    meshes = {topology: compiled.topology_mesh(MESH, topology) for topology in args.topology}  # validate all first
    if not args.json:
        print(f"| slice | options | {' | '.join(KINDS)} | libtpu warns |\n|{'---|' * (3 + len(KINDS))}")
    for topology, mesh in meshes.items():
        for row in measure(topology, mesh):
            print(json.dumps(row) if args.json else line(row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
