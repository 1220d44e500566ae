"""The schedule explorer of the site: tables of ticks, as `python -m pipeline` prints them, that the page plays.

Nothing of a schedule is computed in the browser: docs/_static/schedule.js reads at which tick each operation is done.
"""

from pathlib import Path

from docs import planner_widget
from errors import UserError
from pipeline.__main__ import BOTH, PUBLISHED, RUN, Costs, Shape
from pipeline.schedules import SCHEDULES, Op, Schedule

STAGES, MICROBATCHES = 8, 16  # the most that the page shows
FIRST = "#"  # stands for tick 0, the next character for tick 1, and so on
SAYS = {
    "gpipe": "All forward passes, then all backward passes: a stage keeps the activations of every microbatch.",
    "1f1b": "Backward passes begin as soon as they can, and then take turns with forward passes: a stage keeps fewer "
            "activations than in gpipe, and idles as long.",
    "interleaved": "Each stage has two parts of the layers, and microbatches go around twice: the last stage begins "
                   "after half as long, and twice as many messages are sent.",
    "zb": "Nobody waits for the gradient of the weights, W: it is done where a stage would be idle.",
}  # fmt: skip
FORMS = {"published": "as published", "run": "as run here"}


def moments(sched: Schedule) -> list[str]:
    """Of each stage, the ticks of its operations, a character each: F of every microbatch and chunk, then B, then W."""
    when = [{} for _ in range(sched.stages)]
    for tick, row in enumerate(sched.table):
        for stage, cell in enumerate(row):
            when[stage] |= dict.fromkeys(cell, tick)
    kinds = "FBW" if sched.splits_backward else "FB"
    order = [Op(kind, m, c) for kind in kinds for m in range(sched.microbatches) for c in range(sched.chunks)]
    return ["".join(chr(ord(FIRST) + own[op]) for op in order) for own in when]


def form(name: str, sched: Schedule, times: tuple[float, float, float]) -> dict:
    costs = Costs(name, sched, *times)
    shares = [round(share, 6) for share in (costs.bubble, costs.lock_step_bubble)]
    return {"chunks": sched.chunks, "ticks": costs.ticks, "idle": shares, "live": costs.live, "moments": moments(sched)}


def tables() -> dict:
    """Everything that schedule.js reads: schedule -> "S,M" -> its forms, that as published first."""
    found = {name: {} for name in SCHEDULES}
    for name, there in found.items():
        for S in range(1, STAGES + 1):
            for M in range(1, MICROBATCHES + 1):
                shape = Shape(name, S, M)
                try:
                    forms = shape.forms
                except UserError:  # interleaved, and S does not divide M
                    continue
                assert [*forms] in ([BOTH], [PUBLISHED, RUN])
                there[f"{S},{M}"] = [form(one, sched, shape.times) for one, sched in forms.items()]
    return {"schedules": found, "first": FIRST, "says": SAYS, "forms": [*FORMS]}


def write(folder: Path) -> Path:
    return planner_widget.write_tables(
        folder / "schedule_data.js", "SCHEDULE_DATA", "docs/schedule_explorer.py", tables
    )


# The page -------------------------------------------------------------------------------------------------------------


def schedule_explorer() -> str:
    select = planner_widget.select
    numbers = lambda most: [(str(n), str(n)) for n in range(1, most + 1)]
    return f"""<form id="schedule-explorer" class="explorer" autocomplete="off">
<div class="selects">
{select("schedule", "schedule", [(name, name) for name in SCHEDULES])}
{select("stages", "stages", numbers(STAGES))}
{select("microbatches", "microbatches", numbers(MICROBATCHES))}
{select("form", "form", list(FORMS.items()))}
</div>
<p class="about"></p>
<p class="facts"></p>
<div class="player">
<button type="button" name="back" aria-label="one tick back">&#9664;&#xFE0E;</button>
<button type="button" name="play">play</button>
<button type="button" name="on" aria-label="one tick on">&#9654;&#xFE0E;</button>
<input type="range" name="tick" min="0" value="0" step="1" aria-label="tick">
<b class="at"></b>
</div>
<div class="ticks" tabindex="0" role="region" aria-label="the table of ticks"></div>
<p class="key"></p>
<p class="said" role="status"></p>
<h3>Activations that a stage keeps</h3>
<div class="kept"></div>
<h3>The four schedules</h3>
<div class="compared"></div>
<p class="note">Idle is a share of the time, where a forward pass, the gradient of the inputs and that of the weights
take as long as each other. Alone: each stage goes on as soon as it can, and a message takes no time. In lock-step: all
wait for each other after every tick, as in one program for all devices.</p>
</form>
<script src="_static/schedule_data.js"></script>
<script src="_static/schedule.js"></script>
<script src="_static/schedule_page.js"></script>"""
