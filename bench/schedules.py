"""Compare the predicted cost of each pipeline schedule with a compiled step on simulated devices.

`python -m bench.schedules` uses the configuration of `python -m bench.step` with stage=4; `--json` prints one line per
schedule. The unit of time is one forward pass of a stage.

    predicted  bubble, makespan  idle fraction and duration, if each stage continues as soon as it can (asynchronously)
               lock-step         makespan if all stages wait for each other after every tick, as this program does
               work              time of a stage without its idle time
               live              largest number of activations that a stage stores at once
    measured   temp MiB          XLA's temporary memory per device
               step s            seconds of a step

Layers are recomputed, so a backward pass takes 3 units. `zb` splits it into two halves of 2 and 3 units, because both
recompute the forward pass, and both compute the gradients of inputs. There is no balance loss: with it, all schedules
except `gpipe` run their forward passes twice. Simulated devices share this machine's cores, so if a stage is idle,
another one uses its core. Measured step times therefore follow the total work of all stages, including recomputation,
not the makespan. Bubbles take time only on real devices.
"""

import dataclasses
import json
import os
import sys

import tyro

from bench import step
from config import Config, replace
from config.fields import parse_pipeline
from devices import simulate_devices
from pipeline import schedules
from utils import exit_status


@dataclasses.dataclass(frozen=True)
class Arguments:
    stages: int = 4  # number of pipeline stages
    microbatches: int = 8  # number of microbatches, of 2 sequences each
    names: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zb")  # schedules to compare
    steps: int = 3  # timed steps, after one warm-up step; the fastest counts
    json: bool = False  # print one JSON object per schedule


def settings(args: Arguments, name: str) -> Config:
    return replace(step.DEFAULT, **{
        "mesh": f"stage={args.stages}", "work.schedule": name, "work.microbatches": args.microbatches,
        "data.batch_size": 2 * args.microbatches,
        "model.n_layers": 16, "model.balance_loss": 0.0})  # fmt: skip


def predict(cfg: Config, args: Arguments) -> dict:
    """Return the simulator's prediction. A backward pass takes 2 forward passes, plus 1 to recompute activations."""
    name, chunks = parse_pipeline(cfg.work.schedule)
    sched = schedules.schedule(name, args.stages, args.microbatches, chunks, lead=2)
    # If weight gradients are delayed, both halves recompute activations, and both compute the gradients of inputs.
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
        row = predict(cfg, args)
        found = step.measure(cfg, args.steps)
        row |= {key: found[key] for key in ("temp_bytes", "step_s", "compile_s", "wire_bytes", "flops_ratio")}
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        print(f"{name:12} {row['bubble']:7.1%} {row['makespan']:9.1f} {row['lock_step']:9.1f} {row['work']:6.1f} "
              f"{row['live']:5} {row['temp_bytes'] / 2**20:9.1f} {row['step_s']:7.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
