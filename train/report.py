"""Plot training runs: read metrics.jsonl, and write report.png.

    python -m train.report runs/laptop                         # one run
    python -m train.report runs/a runs/b --out both.png        # several overlaid

`main.py` writes one JSON object (a row) per line. The kinds of rows are start, train, eval and end, and three that are
not plotted: skip (a step whose loss or gradient was not finite), norms and noise (gradient statistics on request).
"""

import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from etils import epath

import utils
from config.fields import is_remote
from utils import UserError, exit_status, log

# kind of row -> the fields that the plot needs; a row may have more.
FIELDS = {
    "start": ("params_total", "params_active", "unigram_nats", "bigram_nats"),
    "train": ("step", "tokens", "loss", "grad_norm", "lr", "tokens_per_s"),
    "eval": ("step", "loss", "bits_per_byte"),
    **dict.fromkeys(("end", "skip", "norms", "noise"), ()),
}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "lines.linewidth": 1.4,
    "legend.frameon": False,
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito: colorblind-safe
VALIDATION = "#d55e00"


@dataclass(frozen=True)
class Run:
    """The rows of one metrics.jsonl, in the order in which they were written."""

    name: str
    start: dict
    train: list[dict]
    eval: list[dict]

    def series(self, field: str) -> tuple[list, list]:
        """Return the steps and the values of one field of the rows of kind "train"."""
        rows = [row for row in self.train if field in row]
        return [row["step"] for row in rows], [row[field] for row in rows]

    @property
    def is_moe(self) -> bool:
        return any("tokens_per_expert" in row for row in self.train)


def read_run(directory: str | Path) -> Run:
    """Read a run's metrics. If the last line is still being written, skip it and log a note.

    Raises: UserError that names the directory, or the file and line, that cannot be plotted.
    """
    directory = epath.Path(directory)
    path = directory / "metrics.jsonl"
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; pass a run's directory, e.g. runs/laptop")
    if not path.exists():
        raise UserError(f"{directory} has no metrics.jsonl; pass a run's directory, e.g. runs/laptop")
    rows = {kind: [] for kind in FIELDS}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = parse_row(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                raise UserError(f"{path}:{number}: {error}; fix or delete the line") from None
            log(f"note: {path}:{number}: skipped the last line, which is incomplete")
            continue
        rows[check_row(row, f"{path}:{number}")].append(row)
    if not rows["start"] or not rows["train"]:
        raise UserError(
            f"{path}: nothing to plot yet: {len(rows['start'])} rows of kind 'start' and {len(rows['train'])} of kind "
            "'train', but at least one of each is needed"
        )
    name = (directory if is_remote(str(directory)) else directory.resolve()).name
    return Run(name, rows["start"][-1], rows["train"], rows["eval"])


def parse_row(line: bytes) -> dict:
    """Parse a line of metrics.jsonl. Raises: ValueError that says why it is not a row."""
    shown = repr(line[:60].decode(errors="replace").strip())
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError too
        raise ValueError(f"not JSON: {shown}") from None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise ValueError(f"not a row with a kind: {shown}")
    if type(row.get("step")) is not int:
        raise ValueError(f"{row['kind']!r} row without a step: {shown}")
    for field in FIELDS.get(row["kind"], ()):
        if not isinstance(row.get(field), int | float | None):
            raise ValueError(f"{row['kind']!r} row whose {field} is not a number: {row[field]!r:.60}")
    return row


def check_row(row: dict, place: str) -> str:
    """Return the kind of a row. Raises: UserError if it is unknown, or if the row lacks a field of the plot."""
    kind = row["kind"]
    if kind not in FIELDS:
        raise UserError(f"{place}: a row has kind={kind!r}; known kinds: {', '.join(FIELDS)}")
    missing = [field for field in FIELDS[kind] if field not in row]
    if missing:
        raise UserError(f"{place}: this {kind!r} row has no {', '.join(missing)}")
    return kind


def draw(run_directories: list[str | Path], out: str | Path) -> Path:
    """Plot one run, or several overlaid, and write the image.

    Raises: UserError for a run that cannot be read, or an image format that cannot be written.
    """
    runs = [read_run(directory) for directory in run_directories]
    utils.check_picture(out)
    make_figure(runs).savefig(out)
    return Path(out)


def make_figure(runs: list[Run]):
    """Lay out the panels for which these runs have data; dense models have no panels about experts."""
    figure = utils.new_picture(figsize=(12, 7), dpi=130)
    import matplotlib

    one_moe = len(runs) == 1 and runs[0].is_moe
    small = ["balance_loss"] * any(run.is_moe for run in runs) + ["grad_norm", "lr", "tokens_per_s"]
    top = ["loss"] * 6 + ["load"] * 6 if one_moe else ["loss"] * 12
    with matplotlib.rc_context(STYLE):
        panels = figure.subplot_mosaic(
            [top, [name for name in small for _ in range(12 // len(small))]], height_ratios=[1.7, 1]
        )
        draw_loss(panels["loss"], runs)
        if one_moe:
            draw_load(panels["load"], runs[0])
        for name in small:
            draw_series(panels[name], runs, name)
        figure.suptitle(summary(runs[0]) if len(runs) == 1 else "   ·   ".join(run.name for run in runs), fontsize=12)
    return figure


def summary(run: Run) -> str:
    """Describe a run in one line: model size, tokens trained on, and validation loss."""
    total, active = format_count(run.start["params_total"]), format_count(run.start["params_active"])
    size = f"{total} parameters" + (f", {active} active" if total != active else "")
    end = run.eval[-1] if run.eval else None
    result = f"   ·   validation {end['loss']:.3f} nats/token" if end else ""
    if end and end["bits_per_byte"] is not None:
        result += f", {end['bits_per_byte']:.3f} bits/byte"
    return f"{run.name}   ·   {size}   ·   {format_count(run.train[-1]['tokens'])} tokens{result}"


def format_count(number: float) -> str:
    """Format a count with three digits: 3.07M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def draw_loss(axes, runs: list[Run]) -> None:
    """Plot training and validation loss, with two baselines: the entropies of single tokens and of token pairs."""
    alone = len(runs) == 1
    for run, color in zip(runs, itertools.cycle(COLORS), strict=False):
        axes.plot(
            *run.series("loss"),
            color=color,
            alpha=1 if alone else 0.5,
            marker=choose_marker(run.train),
            label="training" if alone else run.name,
        )
        axes.plot(
            [row["step"] for row in run.eval],
            [row["loss"] for row in run.eval],
            color=VALIDATION if alone else color,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            label="validation" if alone else None,
        )
    sources = {name: None for row in run.eval for name in row if name.startswith("loss/")} if alone else {}
    for name, color in zip(sources, itertools.cycle(COLORS[2:]), strict=False):
        points = [(row["step"], row[name]) for row in run.eval if name in row]
        label = f"validation, {name.removeprefix('loss/')}"
        axes.plot(*zip(*points, strict=True), color=color, marker=".", linewidth=1, label=label)
    known = lambda name: {run.start[f"{name}_nats"] for run in runs} - {None}
    levels = [(name, nats) for name in ("unigram", "bigram") for nats in known(name)]
    for _, nats in levels:
        axes.axhline(nats, color="0.35", linestyle="--", linewidth=1)
    for name, nats in levels:
        side, above = label_position(axes, nats)
        axes.annotate(
            f"{name} entropy of the text: {nats:.2f} nats",
            (side, nats),
            xytext=((4, -4)[side], 3 * above),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha=("left", "right")[side],
            va="bottom" if above == 1 else "top",
            color="0.35",
            zorder=1.9,  # below the curves
        )
    title = "Loss" if alone else "Loss (dots: validation)"
    axes.set(title=title, xlabel="step", ylabel="nats / token")
    fit_steps(axes)
    axes.legend(loc="best")


def label_position(axes, level: float) -> tuple[int, int]:
    """Place a baseline's label where it hides no curve: at the right (1) or left (0), above (1) or below (-1) it."""
    import numpy as np

    (left, right), height = axes.get_xlim(), np.ptp(axes.get_ylim())
    lines = [line.get_data() for line in axes.get_lines() if line.get_linestyle() != "--"]
    curves = [(at := np.union1d(x, np.linspace(x[0], x[-1], 200)), np.interp(at, x, y)) for x, y in lines if len(x)]
    for side, above in ((1, 1), (0, 1), (1, -1), (0, -1)):
        end, reach = (left, right)[side], 0.55 * (right - left)
        higher = [above * (y[np.abs(x - end) < reach] - level) / height for x, y in curves]
        if not any(np.any((h > 0) & (h < 0.08)) for h in higher):
            return side, above
    return 1, 1


def fit_steps(axes) -> None:
    """Use integer step ticks, and let the curves span the full width of the panel."""
    from matplotlib.ticker import MaxNLocator

    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))


def choose_marker(rows: list) -> str | None:
    """Mark the points of a short curve: without a marker, a curve with one point would be invisible."""
    return "." if len(rows) <= 20 else None


def draw_load(axes, run: Run) -> None:
    """Plot a heat map of expert load: tokens relative to a balanced load. Each row is an expert, each column a step."""
    import numpy as np

    rows = [row for row in run.train if "tokens_per_expert" in row]
    steps = np.array([row["step"] for row in rows])
    tokens_SLE = np.array([row["tokens_per_expert"] for row in rows], dtype=float)  # S rows, L MoE layers, E experts
    load_SLE = tokens_SLE / tokens_SLE.mean(axis=2, keepdims=True)
    layers, experts = load_SLE.shape[1:]
    # A column extends halfway to its neighbors.
    edges = np.concatenate([[steps[0] - 0.5], (steps[1:] + steps[:-1]) / 2, [steps[-1] + 0.5]])
    mesh = axes.pcolormesh(
        edges,
        np.arange(layers * experts + 1),
        load_SLE.reshape(len(rows), -1).T,
        cmap="RdBu_r",
        vmin=0,
        vmax=2,
        rasterized=True,
    )
    for layer in range(1, layers):
        axes.axhline(layer * experts, color="black", linewidth=0.8)
    axes.set_yticks([(layer + 0.5) * experts for layer in range(layers)], [f"{layer + 1}" for layer in range(layers)])
    axes.tick_params(left=False)
    axes.grid(False)
    axes.invert_yaxis()
    fit_steps(axes)
    axes.set(title="Tokens per expert", xlabel="step", ylabel=f"MoE layer (a row for each of its {experts} experts)")
    axes.figure.colorbar(
        mesh,
        ax=axes,
        label="tokens / equal share (1 = balanced)",
        ticks=[0, 0.5, 1, 1.5, 2],
        extend="max",
        pad=0.01,
        aspect=30,
    )


# field -> title, unit
PANELS = {
    "balance_loss": ("Balance loss", "1 = balanced"),
    "grad_norm": ("Gradient norm", "global L2 norm"),
    "lr": ("Learning rate", "factor on each update"),
    "tokens_per_s": ("Speed", "tokens / s"),
}


def draw_series(axes, runs: list[Run], field: str) -> None:
    """Plot one field of the rows of kind "train" against the step."""
    from matplotlib.ticker import LogLocator, NullLocator

    title, unit = PANELS[field]
    for run, color in zip(runs, itertools.cycle(COLORS), strict=False):
        axes.plot(*run.series(field), color=color, linewidth=1.1, marker=choose_marker(run.train), label=run.name)
    if field == "balance_loss":
        axes.axhline(1, color="0.35", linestyle="--", linewidth=1)
    if field == "tokens_per_s":
        axes.set_ylim(0, 1.05 * max(value for run in runs for value in run.series(field)[1]))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    norms = [norm for run in runs for norm in run.series("grad_norm")[1] if norm > 0] if field == "grad_norm" else []
    if norms and max(norms) > 10 * min(norms):  # a smaller range could lie between two ticks of a logarithmic axis
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # prints 0.5; the default prints 5 x 10^-1
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set(title=title, xlabel="step", ylabel=unit)
    fit_steps(axes)


@dataclass(frozen=True)
class Arguments:
    """Plot the metrics of a training run, or of several overlaid."""

    # run directories, e.g. runs/laptop
    runs: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")]
    ]
    # image to write; default: report.png, in the run's directory for a single local run, else in this directory
    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ""


EXAMPLES = """\
e.g. python -m train.report runs/laptop
     python -m train.report runs/a runs/b --out both.png"""


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m train.report", description=f"{EXAMPLES}\n\n{Arguments.__doc__}")
    if not args.runs:
        raise UserError("no run given; pass a run's directory, e.g. runs/laptop")
    alone = len(args.runs) == 1 and not is_remote(args.runs[0])
    default = os.path.join(args.runs[0] if alone else "", "report.png")
    log(f"wrote {draw(args.runs, args.out or default)}")


if __name__ == "__main__":
    sys.exit(main())
