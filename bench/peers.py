"""Race a step of this project against the same step of another trainer, in one simulator; needs no TPU.

The other trainer's program is a compiled text in tests/compile/fixtures. libtpu compiles ours with the same shapes, or
`--hlo` names a file with its text. In both, matmuls take their time at the chip's peak, because not every text has the
compiler's estimates (`plan/replay.py`). Kernels of the other trainer that declare no FLOPs take only the time of their
bytes. So the table has a second total for it, in which its attention takes as long as ours.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from config import preset
from plan import planner, replay
from plan.answer.show import make_console, make_table
from plan.chips.units import amount
from plan.simulate import simulator
from progress import print_to_stderr
from utils import UserError, exit_status

FIXTURES = Path(__file__).resolve().parent.parent / "tests/compile/fixtures"


@dataclass(frozen=True)
class Peer:
    """A compiled step of another trainer, and the settings of our step with the same shapes."""

    trainer: str
    file: str
    topology: str
    mesh: str
    settings: dict
    attention: str  # part of the source lines of its attention kernels


LLAMA_2_7B = {"model.n_kv_heads": 32, "model.d_ff": 11_008, "model.vocab_size": 32_000, "data.seq_len": 2048,
              "data.batch_size": 64, "work.remat": "full", "work.gather": "layer"}  # fmt: skip
PEERS = {
    "llama2_7b": Peer("MaxText 0.2.5", "maxtext_llama2_7b.hlo.xz", "v5e:4x4", "fsdp=16", LLAMA_2_7B,
                      "wrap_flash_attention"),
}  # fmt: skip
OURS = "partial_attention"  # part of the source line of our attention kernel

HELP = """e.g. python -m bench.peers
     python -m bench.peers --hlo step.hlo   # the text of our step, compiled before

Race our step of Llama 2 7B against MaxText's, compiled for 16 v5e chips: seconds by cause, and bytes sent.

Simulated, not measured; matmuls run at the peak in both. Without --hlo, libtpu compiles our step in about 4 minutes."""


@dataclass(frozen=True)
class Arguments:
    hlo: Annotated[str, tyro.conf.arg(help="text of our compiled step; empty: compile it")] = ""
    json: Annotated[bool, tyro.conf.arg(help="print one line of JSON instead of a table")] = False


def compile_ours(peer: Peer, path: str) -> None:
    """Compile our step for the peer's slice, and write its text to a file."""
    plan = planner.plan(preset("llama3_8b", **peer.settings, mesh=peer.mesh), peer.topology)
    found, step = planner.compile_plan(plan, print_to_stderr)
    if step is None:
        raise UserError(found["error"])
    Path(path).write_text(step.step.as_text())


def simulate(path: str, peer: Peer, attention: str) -> dict[str, float]:
    """Return the seconds of a program by cause, with those of its attention kernels, and the bytes it sends."""
    found, _ = replay.measure(replay.Arguments(path, peer.topology, peer.mesh, at_peak=True))
    causes = {name: found["seconds"].get(name, 0.0) for name in replay.CAUSES}
    exposed = sum(found["seconds"].values()) - sum(causes.values())
    attend = sum(row["matmuls_s"] for row in found["lines"] if attention in row["source"])
    return {"step": found["step_s"], "attention kernels": attend} | {
        replay.CAUSES[name]: seconds - attend * (name == simulator.MATMULS) for name, seconds in causes.items()
    } | {"exposed communication": exposed, "sent_bytes": sum(row["wire_bytes"] for row in found["sent"])}  # fmt: skip


def race(name: str, peer: Peer, hlo: str) -> dict:
    """Simulate both programs of a peer."""
    with tempfile.TemporaryDirectory() as scratch:
        if not hlo:
            compile_ours(peer, hlo := f"{scratch}/step.hlo")
        ours = simulate(hlo, peer, OURS)
    theirs = simulate(str(FIXTURES / peer.file), peer, peer.attention)
    same = theirs["step"] - theirs["attention kernels"] + ours["attention kernels"]
    return {"program": name, "ours": ours, peer.trainer: theirs | {"step with our attention": same}}


def print_race(found: dict, peer: Peer) -> None:
    ours, theirs = found["ours"], found[peer.trainer]
    title = f"{found['program']} on {peer.topology}, {peer.mesh}: simulated, matmuls at the peak"
    table = make_table(title, "", "ours", peer.trainer)
    for name in theirs:
        unit = "bytes" if name.endswith("bytes") else "s"
        value = ours.get(name, ours["step"])
        table.add_row(name.replace("_bytes", ""), amount(value, unit), amount(theirs[name], unit))
    make_console(False).print(table)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, prog="python -m bench.peers", description=HELP, args=argv)
    for name, peer in PEERS.items():
        found = race(name, peer, args.hlo)
        print(json.dumps(found)) if args.json else print_race(found, peer)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
