"""The schedule explorer of the site: it draws two pipeline schedules in time, one above the other.

Python computes the schedules as tables of ticks, like `python -m pipeline`. docs/_static/schedule.js computes when each
operation starts and ends.
"""

from pathlib import Path

from docs import planner_widget
from pipeline.__main__ import BOTH, PUBLISHED, RUN, Shape
from pipeline.schedules import SCHEDULES, Op, Schedule
from utils import UserError

STAGES, MICROBATCHES = 8, 16  # the largest sizes on the page
FIRST = "#"  # means tick 0; the next character means tick 1, and so on
SAYS = {
    "gpipe": "All forward passes run before all backward passes: a stage stores the activations of every microbatch.",
    "1f1b": "Backward passes start as soon as they can, and then alternate with forward passes. A stage stores fewer "
            "activations than with gpipe, and is idle as long.",
    "interleaved": "Each stage has two chunks of layers, and each microbatch passes through the stages twice. The last "
                   "stage starts in half the time, and the stages send twice as many messages.",
    "zb": "No other stage needs the weight gradients, W, so a stage computes them when it would otherwise be idle.",
}  # fmt: skip


def moments(sched: Schedule) -> list[str]:
    """Return for each stage the ticks of its operations, one character each: all F, then all B, then all W."""
    when = [{} for _ in range(sched.stages)]
    for tick, row in enumerate(sched.table):
        for stage, cell in enumerate(row):
            when[stage] |= dict.fromkeys(cell, tick)
    kinds = "FBW" if sched.splits_backward else "FB"
    order = [Op(kind, m, c) for kind in kinds for m in range(sched.microbatches) for c in range(sched.chunks)]
    return ["".join(chr(ord(FIRST) + own[op]) for op in order) for own in when]


def form(sched: Schedule) -> dict:
    return {"chunks": sched.chunks, "moments": moments(sched)}


def tables() -> dict:
    """Return everything that schedule.js reads: schedule -> "S,M" -> its forms, the published form first."""
    found = {name: {} for name in SCHEDULES}
    for name, there in found.items():
        for S in range(1, STAGES + 1):
            for M in range(1, MICROBATCHES + 1):
                shape = Shape(name, S, M)
                try:
                    forms = shape.forms
                except UserError:  # interleaved needs M to be a multiple of S
                    continue
                assert [*forms] in ([BOTH], [PUBLISHED, RUN])
                there[f"{S},{M}"] = [form(sched) for sched in forms.values()]
    return {"schedules": found, "first": FIRST, "says": SAYS}


def write(folder: Path) -> Path:
    return planner_widget.write_tables(
        folder / "schedule_data.js", "SCHEDULE_DATA", "docs/schedule_explorer.py", tables
    )


# The page -------------------------------------------------------------------------------------------------------------


def schedule_explorer() -> str:
    select = planner_widget.select
    numbers = lambda most: [(str(n), str(n)) for n in range(1, most + 1)]
    drawing = lambda name, words: (
        f"""<section class="drawing"><p class="head">
<label><span class="visually-hidden">{words}</span>
<select name="{name}">{"".join(f"<option>{one}</option>" for one in SCHEDULES)}</select></label>
<b class="idle"></b><span class="about"></span></p><div class="time"></div></section>"""
    )
    return f"""<form id="schedule-explorer" class="explorer" autocomplete="off">
{planner_widget.NO_SCRIPT}
<div class="selects">
{select("stages", "stages", numbers(STAGES))}
{select("microbatches", "microbatches", numbers(MICROBATCHES))}
<label class="check"><input type="checkbox" name="lock_step"> in lock-step, as run here</label>
</div>
<div class="player">
<button type="button" name="back" aria-label="one unit back">&#9664;&#xFE0E;</button>
<button type="button" name="play">play</button>
<button type="button" name="on" aria-label="one unit forward">&#9654;&#xFE0E;</button>
<input type="range" name="time" min="0" value="0" step="any" aria-label="time">
<b class="at"></b>
</div>
<div class="times">{drawing("schedule", "first schedule")}{drawing("other", "second schedule")}</div>
<p class="key"></p>
<p class="said" role="status"></p>
<h3>All schedules</h3>
<div class="compared"></div>
<p class="note">A forward pass through a stage takes one unit of time, and so do its input gradient and its weight
gradient. Idle is the fraction of the time in which a stage waits. Sending takes no time.</p>
</form>
<script src="_static/schedule_data.js"></script>
<script src="_static/schedule.js"></script>
<script src="_static/schedule_page.js"></script>"""
