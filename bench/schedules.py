"""What each pipeline schedule costs: the simulator's prediction beside a compiled step on simulated devices.

`python -m bench.schedules` takes the configuration of `python -m bench.step` on stage=4; `--json` prints a line a
schedule. Columns: the bubble and the makespan if each stage goes on as soon as it can (asynchronous), the makespan in
lock-step, as this program runs, both in forward passes of a stage; the work of a stage without its idle time; the most
activations it keeps; then what was measured: XLA's temporary memory of a device, and the seconds of a step.

Layers are recomputed, so a backward pass takes 3. That of `zb` is in two halves, which both recompute and both go
through the layers: 2 and 3. There is no balance loss: with one, all but `gpipe` do their forward passes twice.

Simulated devices share this machine's cores: while a stage is idle, another uses its core. So a step's seconds follow
the work of all stages together, recomputation and all, not the makespan; only on real devices do bubbles take time.
"""

import dataclasses
import json
import os
import sys

import tyro

from bench import step
from config import Config, replace
from devices import simulate_devices
from errors import exit_status
from pipeline import schedules


@dataclasses.dataclass(frozen=True)
class Arguments:
    stages: int = 4  # S
    microbatches: int = 8  # M, of 2 sequences each
    names: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zb")  # schedules to compare
    steps: int = 3  # steps that are timed, after one that is not; the best counts
    json: bool = False  # print one JSON object a schedule


def settings(args: Arguments, name: str) -> Config:
    return replace(step.DEFAULT, **{
        "mesh": f"stage={args.stages}", "work.schedule": name, "work.microbatches": args.microbatches,
        "work.chunks": 2 if name == "interleaved" else 1, "data.batch_size": 2 * args.microbatches,
        "model.n_layers": 16, "model.balance_loss": 0.0})  # fmt: skip


def predicted(cfg: Config, args: Arguments) -> dict:
    """By the simulator: a backward pass takes twice a forward one, and as much again as one to recompute it."""
    sched = schedules.schedule(cfg.work.schedule, args.stages, args.microbatches, cfg.work.chunks, lead=2)
    # Where weight gradients wait, both halves recompute, and both go through the layers.
    F, B, W = (1, 2, 3) if sched.splits_backward else (1, 3, 0)
    found = schedules.simulate(sched, F, B, W)
    return {
        "schedule": cfg.work.schedule,
        "bubble": found.bubble,
        "makespan": found.makespan,
        "lock_step": schedules.lock_step(sched, F, B, W),
        "work": found.makespan * (1 - found.bubble),
        "live": max(found.live),
        "ticks": len(sched.table),
    }


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.schedules", description=__doc__, use_underscores=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    simulate_devices(args.stages)
    if not args.json:
        print(
            f"{'':12} {'bubble':>7} {'makespan':>9} {'lock-step':>9} {'work':>6} {'live':>5}",
            f"{'temp MiB':>9} {'step s':>7}",
        )
    for name in args.names:
        cfg = settings(args, name)
        row = predicted(cfg, args)
        found = step.measure(cfg, args.steps)
        row |= {key: found[key] for key in ("temp_bytes", "step_s", "compile_s", "wire_bytes", "flops_ratio")}
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print(f"{name:12} {row['bubble']:7.1%} {row['makespan']:9.1f} {row['lock_step']:9.1f} {row['work']:6.1f} "
              f"{row['live']:5} {row['temp_bytes'] / 2**20:9.1f} {row['step_s']:7.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
