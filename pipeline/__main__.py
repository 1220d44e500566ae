"""Print, draw and compare schedules from the command line; no device is touched."""

import dataclasses
import json
import sys
from typing import Annotated, Literal

import tyro

from pipeline.check import check
from pipeline.draw import draw, text
from pipeline.schedules import SCHEDULES, Schedule, lock_step, schedule, simulate
from utils import UserError, exit_status

HELP = """e.g. python -m pipeline show 1f1b --stages 4 --microbatches 8
     python -m pipeline draw zb --out zb.png
     python -m pipeline compare --stages 4 --microbatches 8

Pipeline schedules: who works on which microbatch when, and what it costs."""


@dataclasses.dataclass
class Shape:
    """A schedule, and how long its operations take."""

    name: Annotated[Literal["gpipe", "1f1b", "interleaved", "zb"], tyro.conf.Positional]
    stages: int = 4  # stages of the mesh, S
    microbatches: int = 8  # parts that follow each other through the stages, M
    chunks: int = 1  # v, parts of the layers on each stage; interleaved only
    lead: Literal[1, 2] = 1  # 1: as published; 2: further ahead, as the lock-step executor runs it
    forward: float = 1.0  # time of a forward pass through one stage
    backward: float = 1.0  # of the gradient of its inputs
    weight: float = 1.0  # of the gradient of its weights; zb delays it, elsewhere it is part of the backward pass

    @property
    def schedule(self) -> Schedule:
        return schedule(self.name, self.stages, self.microbatches, self.chunks, self.lead)

    @property
    def times(self) -> tuple[float, float, float]:
        if self.schedule.splits_backward:
            return self.forward, self.backward, self.weight
        return self.forward, self.backward + self.weight, 0.0


@dataclasses.dataclass
class Draw(Shape):
    """Draw what each stage does over time into a picture file."""

    out: str = "schedule.png"  # PNG, SVG or PDF

    def __call__(self) -> None:
        draw(self.schedule, self.out, *self.times)
        print(f"wrote {self.out}")


@dataclasses.dataclass
class Show(Shape):
    """Print the table of ticks, and what the schedule costs."""

    def __call__(self) -> None:
        check(self.schedule)
        print(text(self.schedule))
        print(Costs(self.schedule, *self.times))


@dataclasses.dataclass
class Compare:
    """Print what each schedule costs for one number of stages and microbatches."""

    stages: int = 4  # stages of the mesh, S
    microbatches: int = 8  # parts that follow each other through the stages, M
    json: bool = False  # one JSON object a line instead

    def __call__(self) -> None:
        for name in SCHEDULES:
            try:
                shape = Shape(name, self.stages, self.microbatches, 2 if name == "interleaved" else 1, lead=2)
                costs = Costs(shape.schedule, *shape.times)
            except UserError as error:
                print(f"{name:12} {error}", file=sys.stderr)
                continue
            print(json.dumps(dataclasses.asdict(costs)) if self.json else f"{name:12} {costs}")


@dataclasses.dataclass
class Costs:
    """What a schedule costs, in the unit of the times given."""

    schedule: str
    bubble: float  # share of the makespan, asynchronous
    makespan: float
    lock_step: float  # makespan in lock-step
    live: int  # most activations kept by a stage
    ticks: int

    def __init__(self, sched: Schedule, F: float, B: float, W: float):
        found = simulate(sched, F, B, W)
        self.schedule, self.bubble, self.makespan, self.live = sched.name, found.bubble, found.makespan, max(found.live)
        self.lock_step, self.ticks = lock_step(sched, F, B, W), len(sched.table)

    def __str__(self) -> str:
        return (f"bubble {self.bubble:.1%}, makespan {self.makespan:g}, in lock-step {self.lock_step:g} "
                f"({self.ticks} ticks), at most {self.live} activations kept by a stage")  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    commands = {"show": Show, "draw": Draw, "compare": Compare}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m pipeline", description=HELP, args=argv)()


if __name__ == "__main__":
    sys.exit(main())
