"""A schedule as text, and as a picture of what each stage does over time."""

from pipeline.schedules import KINDS, Schedule, simulate


def text(sched: Schedule) -> str:
    """The table, a line a stage, a column a tick."""
    cells = [["".join(map(str, cell)) or "." for cell in column] for column in zip(*sched.table, strict=True)]
    width = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = lambda s, row: f"stage {s}  " + " ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True))
    return "\n".join(line(s, row).rstrip() for s, row in enumerate(cells))


def draw(sched: Schedule, path: str, F: float = 1, B: float = 1, W: float = 1) -> None:
    """Draw what each stage does over time, as `simulate` says, into a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    inches = min(max(simulate(sched, F, B, W).makespan * 0.36, 6), 22)
    figure, axes = plt.subplots(figsize=(inches, 0.55 * sched.stages + 1.3), layout="constrained")
    paint(axes, sched, F, B, W, inches)
    figure.legend(ncols=3, loc="outside lower right", frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def paint(axes, sched: Schedule, F: float, B: float, W: float, inches: float) -> None:
    """Draw a schedule on matplotlib axes that are so many inches wide."""
    found = simulate(sched, F, B, W)
    colours = {"F": "#4c78a8", "B": "#f2a33a", "W": "#59a14f"}
    names = {"F": "forward", "B": "backward" if not sched.splits_backward else "backward, inputs", "W": "weights"}
    for (op, s), (start, end) in found.spans.items():
        alpha = 1 - 0.6 * op.chunk / max(sched.chunks - 1, 1)  # later chunks are lighter
        axes.barh(s, end - start, left=start, height=0.92, color=colours[op.kind], alpha=alpha, edgecolor="white")
        points = 72 * inches / found.makespan * (end - start)  # of width there are
        if points > 6:
            size = min(9, points / len(str(op.microbatch)))
            axes.text((start + end) / 2, s, op.microbatch, ha="center", va="center", size=size,
                      color="white" if alpha > 0.6 else "black")  # fmt: skip
    for kind in sorted({op.kind for op in sched.orders[0]}, key=KINDS.index):
        axes.bar(0, 0, color=colours[kind], label=names[kind])
    axes.set(yticks=range(sched.stages), yticklabels=[f"stage {s}" for s in range(sched.stages)],
             xlim=(0, found.makespan), xlabel="time, in forward passes of a stage")  # fmt: skip
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    title = f"{sched.name}, {sched.stages} stages, {sched.microbatches} microbatches"
    title += f", {sched.chunks} chunks a stage" * (sched.chunks > 1)
    axes.set_title(f"{title}: {found.bubble:.1%} idle, at most {max(found.live)} activations kept", loc="left", size=10)
