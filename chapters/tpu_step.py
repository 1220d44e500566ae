"""The training step of chapter 16, compiled for eight TPU chips and simulated. Readers don't need the TPU compiler.

`python -m chapters.tpu_step` compiles the chapter's own cell with libtpu and writes FILE, in half a minute on 2 cores.
It needs `make extra-tpu`, but no TPU.
"""

import functools
import lzma
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from chapters import folded
from compile import ledger, options
from config import MeshConfig
from plan import replay
from plan.chips import hardware
from plan.simulate import replayed, simulator
from utils import UserError, exit_status

Event = simulator.Event
CHAPTER, CELL = "16_profile", "loss"  # the cell that defines this function
FILE = Path(__file__).with_suffix(".hlo.xz")
TOPOLOGY, MESH = "v5e:2x4", "fsdp=8"
L, B, T, D, F = 3, 8, 4096, 4096, 16_384  # layers, sequences, tokens of a sequence, width, hidden width


def compiled_text() -> str:
    """Compile the chapter's step for the TPU. Raises: UserError without libtpu."""
    from plan.trace import compiled

    mesh = compiled.topology_mesh(MeshConfig.parse(MESH), TOPOLOGY)
    return lowered(mesh).compile(compiler_options=options.compiler_options(mesh)).as_text()


def lowered(mesh: Mesh):
    """Trace the chapter's step at this file's sizes: float32 weights, bfloat16 activations."""
    names = {"jax": jax, "jnp": jnp, "partial": partial, "P": P, "mesh": mesh}
    exec(compile(cell(), "step.py", "exec"), names)
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P("fsdp"))
    )
    w = [(array(D, F), array(F, D)) for _ in range(L)]
    return jax.jit(names["step"], donate_argnums=0).lower(w, array(B, T, D, dtype=jnp.bfloat16))


def cell() -> str:
    [source] = folded.sources(CHAPTER, CELL)
    return source


def text() -> str:
    return lzma.decompress(FILE.read_bytes()).decode()


def simulate(program: str) -> simulator.Replay:
    topology, mesh = hardware.Topology.parse(TOPOLOGY), hardware.NamedMesh.parse(MESH)
    places = replay.device_places(mesh, topology)
    return simulator.replay(program, mesh.sizes, replayed.machine_at(topology, topology.torus, places))


@functools.cache
def simulated() -> simulator.Replay:
    """Simulate the stored program."""
    return simulate(text())


def events() -> list[simulator.Event]:
    """Return the simulated events of the step, with the text of the source line in place of its number."""
    [step] = simulated().longest(1)
    return [event._replace(source=line(event.source)) for event in simulated().played[step].events]


def line(source: str) -> str:
    """Return the text of a line of the chapter's cell: `step.py:5 in loss` is its fifth."""
    place = source.partition(" in ")[0].partition(":")
    return cell().splitlines()[int(place[2]) - 1].strip() if place[0] == "step.py" else ""


@dataclass(frozen=True)
class Timeline:
    """Events of a simulated program, with a name for messages."""

    name: str
    events: tuple[simulator.Event, ...]


def counted() -> ledger.Ledger:
    """Return the collectives and FLOPs of the stored program."""
    return ledger.read(text(), hardware.NamedMesh.parse(MESH).sizes)


@exit_status
def main() -> None:
    if sys.argv[1:]:
        raise UserError(f"python -m chapters.tpu_step takes no arguments; it writes {FILE.name}, and needs extra-tpu")
    FILE.write_bytes(lzma.compress(compiled_text().encode(), preset=9))
    print(f"wrote {FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
