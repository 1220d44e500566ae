"""Print, draw and compare schedules from the command line; no device is touched."""

import dataclasses
import itertools
import json
import math
import sys
from typing import Annotated, Literal

import tyro

from errors import UserError, exit_status
from pictures import check_picture
from pipeline.check import check
from pipeline.draw import draw, text
from pipeline.schedules import SCHEDULES, Schedule, Simulation, in_lock_step, schedule, simulate

HELP = """e.g. python -m pipeline show 1f1b --stages 4 --microbatches 8
     python -m pipeline draw zb --out zb.png
     python -m pipeline compare --stages 4 --microbatches 8

Pipeline schedules: who works on which microbatch when, and what it costs."""


@dataclasses.dataclass
class Shape:
    """A schedule, as published and as run here, and how long its operations take."""

    name: Annotated[Literal["gpipe", "1f1b", "interleaved", "zb"], tyro.conf.Positional]
    stages: int = 4  # stages of the mesh, S
    microbatches: int = 8  # parts that follow each other through the stages, M
    chunks: int = 0  # v, parts of the layers on each stage; 0: 2 where interleaved, else 1
    forward: float = 1.0  # time of a forward pass through one stage
    backward: float = 1.0  # of the gradient of its inputs
    weight: float = 1.0  # of the gradient of its weights; zb delays it, elsewhere it is part of the backward pass

    def __post_init__(self):
        if self.name == "interleaved" and self.chunks == 1:
            raise UserError("interleaved with --chunks 1 is 1f1b; use --chunks 2 or more, or name 1f1b")
        if min(self.forward, self.backward) <= 0 or self.weight < 0:
            raise UserError(f"--forward {self.forward:g} --backward {self.backward:g} --weight {self.weight:g}: times "
                            "must be above 0, that of --weight at least 0")  # fmt: skip

    @property
    def forms(self) -> dict[str, Schedule]:
        """What to call it -> the schedule: here stages are further ahead than published, where that helps."""
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
    """Draw what each stage does over time into a picture file: as published, and as run here, in lock-step."""

    out: str = "schedule.png"  # PNG, SVG, PDF, JPG or WEBP

    def __call__(self) -> None:
        check_picture(self.out)
        published, run = (list(self.forms.values())[i] for i in (0, -1))
        alone, together = simulate(published, *self.times), in_lock_step(run, *self.times)
        if same(alone, together):
            forms = {BOTH: (run, together)}
        else:
            forms = {f"{PUBLISHED}, each stage as soon as it can": (published, alone),
                     f"{RUN}, in lock-step": (run, together)}  # fmt: skip
        draw(forms, self.out)
        print(f"wrote {self.out}")


def same(one: Simulation, other: Simulation) -> bool:
    """Whether all happens at the same times, but for rounding."""
    pairs = (zip(one.spans[op], other.spans[op], strict=True) for op in one.spans)
    return all(math.isclose(a, b, abs_tol=1e-9) for a, b in itertools.chain.from_iterable(pairs))


@dataclasses.dataclass
class Show(Shape):
    """Print the table of ticks, and what the schedule costs: as published, and as run here."""

    def __call__(self) -> None:
        for number, (form, sched) in enumerate(self.forms.items()):
            check(sched)
            print("\n" * (number > 0) + f"{self.name} {form}")
            print(text(sched))
            print(Costs(form, sched, *self.times))


@dataclasses.dataclass
class Compare:
    """Print what each schedule costs for one number of stages and microbatches: as published, and as run here."""

    stages: int = 4  # stages of the mesh, S
    microbatches: int = 8  # parts that follow each other through the stages, M
    json: bool = False  # one JSON object a line instead

    def __call__(self) -> None:
        for name in SCHEDULES:
            shape = Shape(name, self.stages, self.microbatches)
            try:
                found = [Costs(form, sched, *shape.times) for form, sched in shape.forms.items()]
            except UserError as error:
                print(f"{name:11} {error}", file=sys.stderr)
                continue
            for costs in found:
                line = f"{name:11} {costs.form:{len(BOTH)}}  {costs}"
                print(json.dumps(dataclasses.asdict(costs)) if self.json else line)


@dataclasses.dataclass
class Costs:
    """What a schedule costs, in the unit of the times given: if each stage goes on as soon as it can, and in lock-step,
    where all wait for each other after every tick."""

    form: str
    schedule: str
    bubble: float  # share of the makespan
    makespan: float
    lock_step_bubble: float
    lock_step: float  # makespan in lock-step
    live: int  # most activations kept by a stage
    ticks: int

    def __init__(self, form: str, sched: Schedule, F: float, B: float, W: float):
        alone, together = simulate(sched, F, B, W), in_lock_step(sched, F, B, W)
        self.form, self.schedule, self.live, self.ticks = form, sched.name, max(alone.live), len(sched.table)
        self.bubble, self.makespan = alone.bubble, alone.makespan
        self.lock_step_bubble, self.lock_step = together.bubble, together.makespan

    def __str__(self) -> str:
        return (f"bubble {self.bubble:.1%}, makespan {self.makespan:g}; in lock-step {self.lock_step_bubble:.1%} "
                f"and {self.lock_step:g} ({self.ticks} ticks); keeps {self.live} activations")  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    commands = {"show": Show, "draw": Draw, "compare": Compare}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m pipeline", description=HELP, args=argv)()


if __name__ == "__main__":
    sys.exit(main())
