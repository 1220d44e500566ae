"""Compare the simulated times that `plan/time/simulated.py` predicts with simulations of the compiled programs.

`python -m bench.plan` compiles steps with random presets, meshes and settings for four kinds of TPU, simulates each
program, and prints both times. With a preset and `--first 10`, it compiles the ten fastest layouts of a search. It
needs no TPU, and takes a minute or two per step.
"""

import json
import os
import random
import sys
from dataclasses import dataclass

from bench.step import say
from config import Config, preset
from config.flags import command_line
from plan import planner, verify
from plan.chips import hardware
from plan.count.step import is_tpu
from utils import UserError, exit_status

TOPOLOGIES = ("v4:2x2x4", "v4:4x4x2", "v5e:4x4", "v5p:2x2x4", "v6e:4x4")
PRESETS = ("dense_124m", "moe1b", "llama3_8b", "mixtral_8x7b")
CHOICES = {
    "work.gather": ("layer", "step"),
    "work.remat": ("dots", "full"),
    "work.tensor_exchange": ("ring", "gather"),
}


@dataclass(frozen=True)
class Arguments(Config):
    topology: str = ""  # with --first: the TPU slice whose meshes are searched
    first: int = 0  # compile this many layouts of a search, the fastest first; 0: random configurations
    drawn: int = 24  # without --first: number of random configurations
    seed: int = 0  # without --first: seed of the random configurations
    json: bool = False  # print one line of JSON per step, and one with the summary, instead of a table


HELP = """e.g. python -m bench.plan --drawn 4
     python -m bench.plan llama3_8b --topology v4:4x4x4 --data.batch_size 64 --data.seq_len 4096 --first 10

Compare predicted step times with simulations of the compiled programs. Needs no TPU; a minute or two per step."""


def random_plans(seed: int):
    """Yield (description, plan) of random configurations that fit in memory."""
    at = random.Random(seed)
    while True:
        topology, name = hardware.Topology.parse(at.choice(TOPOLOGIES)), at.choice(PRESETS)
        mesh = at.choice([*planner.meshes(topology.devices)])
        settings = {key: at.choice(values) for key, values in CHOICES.items()}
        settings |= {"mesh": mesh, "data.seq_len": 2048, "data.batch_size": mesh.batch_shards * at.choice((2, 4)) * 4}
        if name in ("llama3_8b", "mixtral_8x7b"):  # with all layers they do not fit on such small slices
            settings["model.n_layers"] = 8
        try:
            one = planner.plan(preset(name, **settings), topology)
        except UserError:
            continue
        if one.fits:
            how = " ".join(str(settings[key]) for key in CHOICES)
            yield f"{name} {mesh} {how}", one


def search_plans(cfg: Config, topology: str, most: int):
    """Yield (description, plan) of the `most` fastest layouts of a search."""
    fit, _, _ = planner.search(cfg, hardware.Topology.parse(topology), None)
    for one in fit[:most]:
        yield f"{one.cfg.mesh} {one.sched.name if one.cfg.mesh.stage > 1 else ''}".strip(), one


def measure(what: str, one: planner.Plan) -> dict | None:
    """Compile a planned step, and simulate it. Return None if it does not fit in memory."""
    found = verify.verify(one)
    if found.seconds is None:
        say(f"{what} on {one.topology}: {found.refusal}")
        return None
    return {"what": what, "topology": str(one.topology), "predicted_s": one.simulated_s,
            "simulated_s": found.seconds, "lower_bound_s": one.lower_bound_s, "peak_bytes": found.peak_bytes,
            "planned_peak_bytes": one.peak_bytes, "predicted": one.simulated, "simulated": found.causes}  # fmt: skip


def summary(rows: list[dict]) -> dict:
    """Return the relative differences between predicted and simulated seconds, and how well their rankings agree."""
    from scipy.stats import kendalltau

    off = sorted(abs(row["predicted_s"] / row["simulated_s"] - 1) for row in rows)
    pairs = [[row[name] for row in rows] for name in ("predicted_s", "simulated_s")]
    return {"steps": len(rows), "worst": off[-1], "median": off[len(off) // 2],
            "within_10_percent": sum(x <= 0.1 for x in off), "kendall_tau": float(kendalltau(*pairs)[0]),
            "first_over_best": rows[0]["simulated_s"] / min(pairs[1])}  # fmt: skip


def line(row: dict) -> str:
    apart = lambda a, b: f"{row[a] / row[b] - 1:+.0%}"
    return (f"{row['topology']:9} {row['what']:62} {row['predicted_s']:9.3f} {row['simulated_s']:9.3f} "
            f"{apart('predicted_s', 'simulated_s'):>5} {row['peak_bytes'] / 2**30:6.1f} "
            f"{apart('planned_peak_bytes', 'peak_bytes'):>5}")  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    cfg, args = command_line(sys.argv[1:] if argv is None else argv, "python -m bench.plan", HELP, "moe1b", Arguments)
    if args.first and not (args.topology and is_tpu(hardware.Topology.parse(args.topology).chip)):
        raise UserError("--first needs a TPU slice; pass one, like --topology v4:4x4x2")
    plans = search_plans(cfg, args.topology, args.first) if args.first else random_plans(args.seed)
    if not args.json:
        print(f"{'':9} {'':62} predicted simulated         GiB  planned", flush=True)
    rows = []
    for number, (what, one) in enumerate(plans):
        if number == (args.first or args.drawn):
            break
        if row := measure(what, one):
            rows.append(row)
            print(json.dumps(row) if args.json else line(row), flush=True)
    found = summary(rows) if rows else {"steps": 0}
    if args.json:
        print(json.dumps(found))
    elif rows:
        more = f"; the first takes {found['first_over_best'] - 1:.0%} more than the best" if args.first else ""
        print(f"{found['steps']} steps: {found['within_10_percent']} within 10%, median {found['median']:.0%} apart, "
              f"worst {found['worst']:.0%}; Kendall's tau {found['kendall_tau']:.2f}{more}")  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
