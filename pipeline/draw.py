"""Print a schedule as text, and draw what each stage does over time."""

import utils
from pipeline.schedules import KINDS, Schedule, Simulation, simulate


def format_table(sched: Schedule) -> str:
    """Format the table with one line per stage and one column per tick."""
    cells = [["".join(map(str, cell)) or "." for cell in column] for column in zip(*sched.table, strict=True)]
    width = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = lambda s, row: f"stage {s}  " + " ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True))
    return "\n".join(line(s, row).rstrip() for s, row in enumerate(cells))


def draw(forms: dict[str, tuple[Schedule, Simulation]], path: str) -> None:
    """Draw what each stage does over time to an image file, with one panel per form of the schedule.

    forms  name of each form, such as "as published" -> the schedule and its simulation
    """
    stages, longest = next(iter(forms.values()))[0].stages, max(found.makespan for _, found in forms.values())
    inches = min(max(longest * 0.36, 8), 22)
    figure = utils.new_picture(figsize=(inches, (0.42 * stages + 0.9) * len(forms) + 0.4), dpi=160)
    panels = figure.subplots(len(forms), sharex=True, squeeze=False)[:, 0]
    for axes, (form, (sched, found)) in zip(panels, forms.items(), strict=True):
        paint_spans(axes, sched, found, inches * found.makespan / longest, form)
        axes.label_outer()
    panels[-1].set(xlim=(0, longest))
    figure.legend(*panels[-1].get_legend_handles_labels(), ncols=3, loc="outside lower right", frameon=False)
    figure.savefig(path)


def paint(axes, sched: Schedule, F: float, B: float, W: float, inches: float) -> None:
    """Draw a schedule with the times of `simulate` on matplotlib axes of the given width in inches."""
    paint_spans(axes, sched, simulate(sched, F, B, W), inches, "as published")


def paint_spans(axes, sched: Schedule, found: Simulation, inches: float, form: str) -> None:
    """Draw what each stage does over time on matplotlib axes; the makespan is the given number of inches wide."""
    colours = {"F": "#f6d6a6", "B": "#e08a1e", "W": "#94540d"}  # shades of the axis `stage`
    names = {"F": "forward", "B": "backward", "W": "weight gradients, if delayed"}
    for (op, s), (start, end) in found.spans.items():
        alpha = 1 - 0.6 * op.chunk / max(sched.chunks - 1, 1)  # later chunks are lighter
        axes.barh(s, end - start, left=start, height=0.92, color=colours[op.kind], alpha=alpha, edgecolor="white")
        points = 72 * inches / found.makespan * (end - start)  # available for the label
        if points > 6:
            size = min(9, points / len(str(op.microbatch)))
            axes.text((start + end) / 2, s, op.microbatch, ha="center", va="center", size=size,
                      color="white" if op.kind == "W" else "black")  # fmt: skip
    for kind in sorted({op.kind for op in sched.orders[0]}, key=KINDS.index):
        axes.bar(0, 0, color=colours[kind], label=names[kind])
    axes.set(yticks=range(sched.stages), yticklabels=[f"stage {s}" for s in range(sched.stages)],
             xlim=(0, found.makespan), xlabel="time, in forward passes of a stage")  # fmt: skip
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    title = f"{sched.name}, {sched.stages} stages, {sched.microbatches} microbatches"
    title += f", {sched.chunks} chunks per stage" * (sched.chunks > 1)
    axes.set_title(f"{title}, {form}:\n{found.bubble:.1%} idle, at most {max(found.live)} activations stored",
                   loc="left", size=10)  # fmt: skip
