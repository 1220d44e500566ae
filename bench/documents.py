"""Plan attention over packed documents, with both ways to deal them over `context`; needs no accelerator.

A TPU kernel computes attention in blocks of queries and keys. It skips a pair of blocks that have no document in
common, and those that are later in the sequence. So its time depends on the documents, which a plan does not know. This
command reads rows of a token directory, counts the pairs of blocks that each device computes in each step of a ring,
and scales the planned time of attention with them: a step of the ring takes as long as on its busiest device.
"""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

import dataset
from config import Config, preset
from kernels.attention import tpu_block
from kernels.blocks import CAUSAL
from pipeline import documents
from plan import planner
from plan.answer.show import make_console, make_table
from plan.chips.hardware import Topology
from plan.chips.units import amount
from plan.time import simulated
from utils import exit_status

HELP = """e.g. python -m bench.documents --path tokens/stdlib-bytes
     python -m bench.documents --path tokens/stdlib-gpt2 --seq_len 32768 --context 4 --topology v4:4x4x4

Plan a step with packed documents for each work.context_layout: how uneven attention is, and how long a step takes."""


@dataclass(frozen=True)
class Arguments:
    path: Annotated[str, tyro.conf.arg(help="directory of tokens, from python -m data.prepare")] = "tokens/stdlib-bytes"
    model: Annotated[str, tyro.conf.arg(help="preset of the model that is planned")] = "llama3_8b"
    topology: Annotated[str, tyro.conf.arg(help="TPU slice")] = "v5p:4x4x4"
    context: Annotated[int, tyro.conf.arg(help="devices along context; the others are along fsdp")] = 8
    seq_len: Annotated[int, tyro.conf.arg(help="positions of a row")] = 65_536
    rows: Annotated[int, tyro.conf.arg(help="rows of the first batch whose documents are counted")] = 8
    json: Annotated[bool, tyro.conf.arg(help="print one line of JSON instead of a table")] = False


def blocks_computed(segments_T, order_T, n: int) -> np.ndarray:
    """Count the pairs of blocks that each device computes in each step of a ring over n devices, [n, n].

    The kernel compares the smallest and the largest document of two blocks.
    """
    chunk = len(order_T) // (2 * n)
    block = tpu_block(2 * chunk, chunk, CAUSAL)
    blocks = np.asarray(segments_T)[order_T].reshape(-1, block)
    first, last, place = blocks.min(axis=1), blocks.max(axis=1), np.arange(len(blocks))
    computed = (first[:, None] <= last) & (first <= last[:, None]) & (place[:, None] >= place)
    device = documents.device_of_each(len(blocks), n)
    found, (queries, keys) = np.zeros((n, n), np.int64), np.nonzero(computed)
    np.add.at(found, (device[queries], (device[queries] - device[keys]) % n), 1)
    return found


def step_plan(args: Arguments) -> planner.Plan:
    devices = Topology.parse(args.topology).devices
    cfg = preset(args.model, **{"mesh": f"fsdp={devices // args.context},context={args.context}",
                                "data.seq_len": args.seq_len, "data.batch_size": devices // args.context,
                                "work.context_attention": "ring"})  # fmt: skip
    return planner.plan(cfg, args.topology)


def measure(args: Arguments) -> dict:
    """Return the planned seconds of a step and of its attention, without documents and with each layout."""
    plan, n = step_plan(args), args.context
    attention = [row for row in plan.work if row.kernel == "attention"]
    attention_s = sum(simulated.one_matmul_seconds(plan, row, plan.topology.chip) for row in attention)
    data = {"data.path": args.path, "data.seq_len": args.seq_len, "data.batch_size": args.rows}
    rows_BT = dataset.batch(Config(data=preset(args.model, **data).data), 0)["segments_BT"]
    ring_s = lambda work: sum(one.max(axis=0).sum() for one in work)
    plain = [np.arange(args.seq_len)] * len(rows_BT)
    orders = {"positions": plain, "documents": np.asarray(documents.document_order(rows_BT, n))}
    dense = ring_s([blocks_computed(np.ones(args.seq_len), order, n) for order in plain])
    found = {"rows": len(rows_BT), "row_documents": sum(len(np.unique(row[row > 0])) for row in rows_BT),
             "one document": {"busiest": 1.0, "attention_s": attention_s, "step_s": plan.simulated_s}}  # fmt: skip
    for name, order in orders.items():
        share = float(ring_s([blocks_computed(*one, n) for one in zip(rows_BT, order, strict=True)]) / dense)
        found[name] = {"busiest": documents.imbalance(rows_BT, n, name == "documents"),
                       "attention_s": share * attention_s,
                       "step_s": plan.simulated_s - (1 - share) * attention_s}  # fmt: skip
    return found | {"mesh": str(plan.cfg.mesh)}


def print_table(args: Arguments, found: dict) -> None:
    rows = f"{found['rows']} rows of {args.seq_len:,} positions with {found['row_documents']} documents"
    title = f"{args.model} on {args.topology}, {found['mesh']}: planned; {rows}"
    table = make_table(title, "context_layout", "busiest device", "attention", "step")
    for name in ("one document", "positions", "documents"):
        one = found[name]
        table.add_row(name, f"{one['busiest']:.2f}x", amount(one["attention_s"], "s"), amount(one["step_s"], "s"))
    make_console(False).print(table)


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, prog="python -m bench.documents", description=HELP, args=argv, use_underscores=True)
    found = measure(args)
    print(json.dumps(found)) if args.json else print_table(args, found)


if __name__ == "__main__":
    sys.exit(main())
