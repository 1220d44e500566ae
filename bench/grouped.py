"""Compare `kernels/grouped.py` with `jax.lax.ragged_dot`, forward and backward.

`python -m bench.grouped` prints the seconds of both on this machine, measured alternately, and the FLOPs of both as
compiled for TPU v4, which needs `make extra-tpu`, but no TPU. The default sizes are those of the preset
laptop."""

import os
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding, PartitionSpec as P

from config import MeshConfig
from kernels.grouped import grouped_matmul
from plan.trace import compiled
from utils import exit_status

HELP = """e.g. python -m bench.grouped --rows 16384 --experts 16

Compare the grouped matmul with ragged_dot: seconds on this machine, and FLOPs on a TPU v4. Needs no TPU."""
FUNCTIONS = {"grouped_matmul": grouped_matmul, "ragged_dot": jax.lax.ragged_dot}


@dataclass(frozen=True)
class Arguments:
    """The sizes of the grouped matmul and the number of rounds."""

    rows: int = 4096  # tokens times experts per token
    d_in: int = 128
    d_out: int = 320
    experts: int = 8
    rounds: int = 20
    dtype: str = "float32"


def with_gradients(function):
    """Return (the forward pass, the backward pass) of a grouped matmul."""
    backward = lambda x, w, sizes, d: jax.vjp(lambda x, w: function(x, w, sizes), x, w)[1](d)
    return function, backward


def seconds(args: Arguments) -> dict[str, list[float]]:
    """Return the shortest time of the forward and backward pass of each function."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.array(rng.normal(size=shape), args.dtype)
    sizes = jnp.array(np.bincount(rng.integers(0, args.experts, args.rows), minlength=args.experts))
    given = array(args.rows, args.d_in), array(args.experts, args.d_in, args.d_out), sizes
    calls = {}
    for name, function in FUNCTIONS.items():
        forward, backward = map(jax.jit, with_gradients(function))
        calls[name] = [(forward, given), (backward, (*given, array(args.rows, args.d_out)))]
    best = {name: [float("inf")] * 2 for name in calls}
    for _ in range(args.rounds + 1):  # the first one compiles
        for name, both in calls.items():
            for n, (call, arrays) in enumerate(both):
                began = time.perf_counter()
                jax.block_until_ready(call(*arrays))
                best[name][n] = min(best[name][n], time.perf_counter() - began)
    return best


def flops(args: Arguments) -> dict[str, list[float]]:
    """Return the FLOPs of the forward and backward pass of each function on one chip, from the compiled program."""
    mesh = compiled.topology_mesh(MeshConfig(data=4), "v4:2x2x1")
    shape = lambda *shape, dtype=args.dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
    given = [shape(args.rows, args.d_in), shape(args.experts, args.d_in, args.d_out),
             shape(args.experts, dtype=jnp.int32), shape(args.rows, args.d_out)]  # fmt: skip
    counted = {}
    for name, function in FUNCTIONS.items():
        both = with_gradients(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P()))
        costs = [jax.jit(f).lower(*given[:n]).compile().cost_analysis() for f, n in zip(both, (3, 4), strict=True)]
        counted[name] = [cost["flops"] for cost in costs]
    return counted


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, prog="python -m bench.grouped", description=HELP, args=argv)
    matmul = 2 * args.rows * args.d_in * args.d_out
    for name, (forward, backward) in seconds(args).items():
        print(f"{name}: forward {forward * 1e3:.1f} ms, backward {backward * 1e3:.1f} ms")
    for name, (forward, backward) in flops(args).items():
        print(f"{name} on a TPU v4: forward {forward / matmul:.2f}, backward {backward / matmul / 2:.2f} times the "
              "FLOPs of multiplying each row once")  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
