"""Print, draw and compare schedules from the command line, without using a device."""

import dataclasses
import itertools
import json
import math
import sys
from typing import Annotated, Literal

import tyro

from pipeline.check import check
from pipeline.draw import draw, format_table
from pipeline.schedules import SCHEDULES, Schedule, Simulation, in_lock_step, schedule, simulate
from utils import UserError, check_picture, exit_status

HELP = """e.g. python -m pipeline show 1f1b --stages 4 --microbatches 8
     python -m pipeline draw zb --out zb.png
     python -m pipeline compare --stages 4 --microbatches 8

Pipeline schedules: which stage works on which microbatch when, and what that costs."""


@dataclasses.dataclass
class Shape:
    """A schedule in two forms, as published and as run here, with the times of its operations."""

    name: Annotated[Literal["gpipe", "1f1b", "interleaved", "zb"], tyro.conf.Positional]
    stages: int = 4  # number of pipeline stages, S
    microbatches: int = 8  # number of microbatches, M
    chunks: int = 0  # chunks of layers on each stage, v; 0: 2 for interleaved, else 1
    forward: float = 1.0  # time of a forward pass through one stage
    backward: float = 1.0  # time to compute the gradient of a stage's inputs
    weight: float = 1.0  # time to compute its weight gradients; delayed in zb, else part of the backward pass

    def __post_init__(self):
        if self.name == "interleaved" and self.chunks == 1:
            raise UserError("interleaved with --chunks 1 is 1f1b; use --chunks 2 or more, or name 1f1b")
        if min(self.forward, self.backward) <= 0 or self.weight < 0:
            raise UserError(f"--forward {self.forward:g} --backward {self.backward:g} --weight {self.weight:g}: times "
                            "must be above 0, and --weight at least 0")  # fmt: skip

    @property
    def forms(self) -> dict[str, Schedule]:
        """Name of each form -> the schedule. As run here, stages run further ahead of the next where it helps."""
        chunks = self.chunks or (2 if self.name == "interleaved" else 1)
        published, run = (schedule(self.name, self.stages, self.microbatches, chunks, lead) for lead in (1, 2))
        if published == run:
            return {BOTH: run}
        return {PUBLISHED: published, RUN: run}

    @property
    def times(self) -> tuple[float, float, float]:
        return self.forward, self.backward, self.weight


PUBLISHED, RUN, BOTH = "as published", "as run here", "as published and run"


@dataclasses.dataclass
class Draw(Shape):
    """Draw what each stage does over time to an image file: as published, and as run here, in lock-step."""

    out: str = "schedule.png"  # PNG, SVG, PDF, JPG or WEBP

    def __call__(self) -> None:
        check_picture(self.out)
        published, run = (list(self.forms.values())[i] for i in (0, -1))
        alone, together = simulate(published, *self.times), in_lock_step(run, *self.times)
        if same_times(alone, together):
            forms = {BOTH: (run, together)}
        else:
            forms = {f"{PUBLISHED}, each stage as soon as it can": (published, alone),
                     f"{RUN}, in lock-step": (run, together)}  # fmt: skip
        draw(forms, self.out)
        print(f"wrote {self.out}")


def same_times(one: Simulation, other: Simulation) -> bool:
    """Return whether all operations run at the same times, up to rounding."""
    pairs = (zip(one.spans[op], other.spans[op], strict=True) for op in one.spans)
    return all(math.isclose(a, b, abs_tol=1e-9) for a, b in itertools.chain.from_iterable(pairs))


@dataclasses.dataclass
class Show(Shape):
    """Print the table of ticks and the cost of a schedule, as published and as run here."""

    def __call__(self) -> None:
        for number, (form, sched) in enumerate(self.forms.items()):
            check(sched)
            print("\n" * (number > 0) + f"{self.name} {form}")
            print(format_table(sched))
            print(Costs(form, sched, *self.times))


@dataclasses.dataclass
class Compare:
    """Print the cost of every schedule, as published and as run here."""

    stages: int = 4  # number of pipeline stages, S
    microbatches: int = 8  # number of microbatches, M
    json: bool = False  # print one JSON object per line instead

    def __call__(self) -> None:
        for name in SCHEDULES:
            shape = Shape(name, self.stages, self.microbatches)
            try:
                forms = [Costs(form, sched, *shape.times) for form, sched in shape.forms.items()]
            except UserError as error:
                print(f"{name:11} {error}", file=sys.stderr)
                continue
            for costs in forms:
                line = f"{name:11} {costs.form:{len(BOTH)}}  {costs}"
                print(json.dumps(dataclasses.asdict(costs)) if self.json else line)


@dataclasses.dataclass
class Costs:
    """The cost of a schedule, in the unit of the given times.

    It is given twice: if each stage continues as soon as it can, and in lock-step, where all stages wait for each other
    after every tick (the time slots of the schedule's table).
    """

    form: str
    schedule: str
    bubble: float  # idle fraction of the makespan
    makespan: float  # time from the first operation to the end of the last
    lock_step_bubble: float
    lock_step: float  # makespan in lock-step
    live: int  # largest number of activations that a stage stores at once
    ticks: int

    def __init__(self, form: str, sched: Schedule, F: float, B: float, W: float):
        alone, together = simulate(sched, F, B, W), in_lock_step(sched, F, B, W)
        self.form, self.schedule, self.live, self.ticks = form, sched.name, max(alone.live), len(sched.table)
        self.bubble, self.makespan = alone.bubble, alone.makespan
        self.lock_step_bubble, self.lock_step = together.bubble, together.makespan

    def __str__(self) -> str:
        return (f"bubble {self.bubble:.1%}, makespan {self.makespan:g}; in lock-step {self.lock_step_bubble:.1%} "
                f"and {self.lock_step:g} ({self.ticks} ticks); stores {self.live} activations")  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    commands = {"show": Show, "draw": Draw, "compare": Compare}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m pipeline", description=HELP, args=argv)()


if __name__ == "__main__":
    sys.exit(main())
