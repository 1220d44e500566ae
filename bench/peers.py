"""Race a step of this project against the same step of another trainer, in one simulator; needs no TPU.

The other trainer's program is a compiled text in tests/compile/fixtures. libtpu compiles ours with the same shapes, or
`--hlo` names a file with its text. In both, matmuls take their time at the chip's peak, because not every text has the
compiler's estimates (`plan/replay.py`). A kernel takes the time of the FLOPs that it declares. The attention kernels of
MaxText declare none, so they take only the time of their bytes. So the table has a second total for MaxText, in which
its attention takes as long as ours, and a third with the compiler's estimates, if both texts have them.
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
from progress import print_to_stderr
from utils import UserError, exit_status, suggest

FIXTURES = Path(__file__).resolve().parent.parent / "tests/compile/fixtures"

ESTIMATED = "step by estimates"
ATTENTION, EXPERTS = "attention kernels", "expert kernels"
# Kernels -> part of the source lines of ours
KERNELS = {ATTENTION: "partial_attention", EXPERTS: "in grouped_matmul"}


@dataclass(frozen=True)
class Peer:
    """A compiled step of another trainer, and the preset and settings of our step with the same shapes."""

    trainer: str
    file: str
    topology: str
    mesh: str
    preset: str
    settings: dict
    kernels: dict[str, str]  # like KERNELS, of the other trainer


FULL = {"work.remat": "full", "work.gather": "layer"}
SPLASH = {ATTENTION: "wrap_flash_attention"}
PEERS = {
    "llama2_7b": Peer(
        "MaxText 0.2.5", "maxtext_llama2_7b.hlo.xz", "v5e:4x4", "fsdp=16", "llama3_8b",
        FULL | {"model.n_kv_heads": 32, "model.d_ff": 11_008, "model.vocab_size": 32_000, "data.seq_len": 2048,
                "data.batch_size": 64},
        SPLASH),
    "mixtral_8x7b": Peer(
        "MaxText 0.2.5", "maxtext_mixtral_8x7b.hlo.xz", "v5p:2x2x4", "fsdp=16", "mixtral_8x7b",
        FULL | {"model.balance_loss": 0.0, "data.seq_len": 4096, "data.batch_size": 64},
        SPLASH | {EXPERTS: "in gmm"}),
    "llama3_8b_32k": Peer(
        "MaxText 0.2.5", "maxtext_llama3_8b_32k.hlo.xz", "v5p:2x2x4", "fsdp=4,context=4", "llama3_8b",
        FULL | {"data.seq_len": 32_768, "data.batch_size": 16},
        SPLASH),
}  # fmt: skip

HELP = """e.g. python -m bench.peers mixtral_8x7b
     python -m bench.peers llama2_7b --hlo step.hlo   # the text of our step, compiled before

Race our step against MaxText's, both compiled for 16 TPU chips: seconds by cause, and bytes sent.

Simulated, not measured; matmuls run at the peak. In the last rows, MaxText's attention takes as long as ours.

The last row has the compiler's estimates for matmuls, if both programs have them.

Without --hlo, libtpu compiles our step in 1 to 4 minutes."""
PROGRAMS = "llama2_7b, mixtral_8x7b (experts), llama3_8b_32k (sequences of 32,768 tokens); without a name: all three"

HLO = "HLO text of our step, which python -m plan writes with --compile --hlo FILE; empty: compile it"


@dataclass(frozen=True)
class Arguments:
    programs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[PROGRAM ..]", help=PROGRAMS)
    ] = ()
    hlo: Annotated[str, tyro.conf.arg(metavar="FILE", help=HLO)] = ""
    json: Annotated[bool, tyro.conf.arg(help="print a line of JSON per program instead of a table")] = False


def check(args: Arguments) -> None:
    """Raises: UserError for an unknown program, and for a text that could be any of several programs."""
    for name in args.programs:
        if name not in PEERS:
            raise UserError(f"unknown program {name!r}; {suggest(name, PEERS)}")
    if args.hlo and len(args.programs) != 1:
        raise UserError(f"--hlo has one step; name its program ({', '.join(PEERS)}): bench.peers PROGRAM --hlo FILE")


def compile_ours(peer: Peer, plan: planner.Plan, path: str) -> None:
    """Compile our step for the peer's slice, and write its text to a file."""
    found, step = planner.compile_plan(plan, print_to_stderr)
    if step is None:
        raise UserError(found["error"])
    Path(path).write_text(step.step.as_text())


def check_ours(peer: Peer, plan: planner.Plan, path: str, ours: dict) -> None:
    """Raises: UserError if the simulated file has another program than our step with the peer's shapes."""
    if not ours[ATTENTION] or abs(ours["flops"] / plan.flops - 1) > 0.02:
        flags = " ".join(f"--{name} {value}" for name, value in peer.settings.items())
        raise UserError(f"--hlo {path}: not our step with these shapes; this writes it: python -m plan {peer.preset} "
                        f"--topology {peer.topology} --mesh {peer.mesh} {flags} --compile --hlo FILE")  # fmt: skip


def simulate(path: str, peer: Peer, kernels: dict[str, str]) -> dict[str, float]:
    """Return the seconds of a program by cause, with those of its kernels, and the bytes that it sends.

    If its text has the compiler's estimates, ESTIMATED is the time of the step with matmuls that take as long.
    """
    found, _ = replay.measure(replay.Arguments(path, peer.topology, peer.mesh, at_peak=True))
    causes = {replay.CAUSES[name]: found["seconds"].get(name, 0.0) for name in replay.CAUSES}
    exposed = sum(found["seconds"].values()) - sum(causes.values())
    inside = {
        name: sum(row["matmuls_s"] for row in found["lines"] if part in row["source"]) for name, part in kernels.items()
    }
    causes["matmuls"] -= sum(inside.values())
    sent = sum(row["wire_bytes"] for row in found["sent"])
    result = {"step": found["step_s"]} | inside | causes | {"exposed communication": exposed, "sent_bytes": sent}
    result["flops"] = found["flops"]
    if found["estimated_cycles"]:
        result[ESTIMATED] = replay.measure(replay.Arguments(path, peer.topology, peer.mesh))[0]["step_s"]
    return result


def race(name: str, peer: Peer, hlo: str) -> dict:
    """Simulate both programs of a peer. Its totals with our attention are in rows of both: of ours they are the same.

    Kernels have no estimates by the compiler, so they take equally long in both totals.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plan = planner.plan(preset(peer.preset, **peer.settings, mesh=peer.mesh), peer.topology)
        path = hlo or f"{scratch}/step.hlo"
        if not hlo:
            compile_ours(peer, plan, path)
        ours = simulate(path, peer, {name: KERNELS[name] for name in peer.kernels})
    check_ours(peer, plan, path, ours)
    theirs = simulate(str(FIXTURES / peer.file), peer, peer.kernels)
    slower = ours[ATTENTION] - theirs[ATTENTION]
    totals = [("step", "step with our attention"), (ESTIMATED, "the same, by the compiler's estimates")]
    totals = {label: total for total, label in totals if total in ours and total in theirs}
    same = [
        {label: side[total] + more for label, total in totals.items()} for side, more in ((ours, 0), (theirs, slower))
    ]
    shown = lambda side: {label: value for label, value in side.items() if label not in (ESTIMATED, "flops")}
    return {"program": name, "ours": shown(ours) | same[0], peer.trainer: shown(theirs) | same[1]}


def print_race(found: dict, peer: Peer) -> None:
    ours, theirs = found["ours"], found[peer.trainer]
    title = f"{found['program']} on {peer.topology}, {peer.mesh}: simulated at the peak"
    table = make_table(title, "", "ours", peer.trainer)
    for name in theirs:
        unit = "bytes" if name.endswith("bytes") else "s"
        table.add_row(name.replace("_bytes", ""), amount(ours[name], unit), amount(theirs[name], unit))
    make_console(False).print(table)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, prog="python -m bench.peers", description=HELP, args=argv)
    check(args)
    for name in args.programs or PEERS:
        found = race(name, PEERS[name], args.hlo)
        print(json.dumps(found)) if args.json else print_race(found, PEERS[name])


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
