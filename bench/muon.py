"""Plan what Muon costs on eight meshes, in each of its layouts, beside AdamW. The table of docs/muon.md.

It uses no device. A step's seconds are the planner's best estimate, with execution settings that it chooses for each.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import tyro

from config import preset, replace
from plan import planner
from plan.chips.units import amount
from utils import exit_status


class Case(NamedTuple):
    preset: str
    topology: str
    mesh: str
    sequences: int  # per step
    sharded: bool = False  # optim.shard_over_data


CASES = (
    Case("dense_124m", "h100:8", "data=8", 64),
    Case("dense_124m", "h100:8", "data=8", 64, sharded=True),
    Case("moe1b", "v4:2x4x4", "fsdp=8,stage=2,tensor=2", 256),
    Case("llama3_8b", "v5e:4x8", "fsdp=32", 32),
    Case("llama3_8b", "v5p:2x2x2", "fsdp=8", 8),
    Case("llama3_70b", "v5p:8x8x8", "fsdp=128,tensor=4", 512),
    Case("mixtral_8x7b", "v5p:4x4x4", "fsdp=8,expert=8", 256),
    Case("deepseek_v3", "h100:2048", "stage=2,fsdp=8,expert=64,tensor=2", 15360),
)


def row(case: Case) -> str:
    """Return the row of one configuration."""
    cfg = preset(case.preset, mesh=case.mesh, **{"data.batch_size": case.sequences,
                                                 "optim.shard_over_data": case.sharded})  # fmt: skip
    adamw = planner.plan(cfg, case.topology)
    found = {layout: planner.plan(replace(cfg, **{"optim.name": "muon", "work.muon_layout": layout}), case.topology)
             for layout in ("gather", "owner")}  # fmt: skip
    costs = {layout: f"{one.step_s / adamw.step_s - 1:+.1%}" for layout, one in found.items()}
    owner = found["owner"]
    sent = sum(x.wire_bytes for x in owner.traffic if x.part == "muon")
    saved = adamw.memory_bytes["optimizer"] - owner.memory_bytes["optimizer"]
    mesh = case.mesh + ", sharded over data" * case.sharded
    cells = (case.preset, f"{mesh} on {case.topology}", f"{adamw.tokens_per_step:,}", amount(adamw.step_s, "s"),
             costs["gather"], costs["owner"], amount(owner.flops["muon"], "FLOPs"), amount(sent, "bytes"),
             amount(saved, "bytes"))  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HELP = """e.g. python -m bench.muon

Plan what Muon costs on eight meshes, in each of its layouts, beside AdamW, and print a table."""

COLUMNS = ("model", "mesh", "tokens per step", "AdamW", "Muon, `gather`", "Muon, `owner`", "FLOPs of `owner`",
           "sent by `owner`", "memory saved")  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    first: Annotated[int, tyro.conf.arg(help="print only this many rows")] = len(CASES)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, prog="python -m bench.muon", description=HELP, args=argv)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for case in CASES[: args.first]:
        print(row(case), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
