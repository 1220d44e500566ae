"""Compare the planner with training steps that others measured and published.

`python -m bench.published` plans every row of `published.csv`, fits the planner's constants to them (`speeds.py`), and
writes docs/published.md, a page for each kind of step, and `plan/time/speeds.json`. With `--rows FILE` it plans another
file instead, and prints errors, coverage and regret by source. It uses no device.
"""

import csv
import dataclasses
import functools
import json
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bench import speeds
from bench.speeds import Trial
from config import Config, ModelConfig, preset, replace
from plan import planner
from plan.chips import hardware
from plan.time import measured
from utils import UserError, exit_status

ROWS, PAGE = Path(__file__).parent / "published.csv", Path(__file__).parents[1] / "docs" / "published.md"
KINDS = {  # the kinds of steps, and the page of each
    "dense, one slice": "published_dense", "several slices": "published_slices", "context": "published_context",
    "MoE": "published_moe", "GPUs": "published_gpus",
    "GPUs without FlashAttention": "published_without_flash_attention", "GPUs, this trainer": "published_this_trainer",
}  # fmt: skip
ON_TPUS = [kind for kind in KINDS if not kind.startswith("GPUs")]  # the fit for TPUs uses these alone
SIZES = {"vocab": "vocab_size", **{name: name for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head")}}
WINDOWS = {"gpt-oss": "128:2", "gemma3": "1024:6"}  # model.window, by name
# FLOPs as the source counts them: per token and weight of a layer, and of attention per query-key pair and head width.
# maxtext counts all pairs, causal half of them, and megatron counts the recomputed forward pass too (arXiv:2104.04473)
COUNTED = {"maxtext": (6, 12), "causal": (6, 6), "megatron": (8, 16)}


@dataclass(frozen=True, eq=False)
class Row:
    """A published step, and its plan if the planner can plan it."""

    values: dict[str, str]
    measured_s: float | None = None
    one: planner.Plan | None = None
    reason: str = ""  # why there is no plan

    def __getattr__(self, name: str) -> str:
        return self.values[name]

    @property
    def estimate(self) -> measured.Estimate:
        return self.one.estimate

    @property
    def link(self) -> str:
        """The row's name, with a link to its source; the source of our own steps is a file of this project."""
        return f"[`{self.name}`]({self.source})" if ":" in self.source else f"`{self.name}`"

    @property
    def address(self) -> str:
        """The row's source, as a link or a file of this project."""
        return f"[{speeds.name_of(self.source)}]({self.source})" if ":" in self.source else f"`{self.source}`"

    @property
    def ratio(self) -> float:
        return self.estimate.seconds / self.measured_s


# Plans ----------------------------------------------------------------------------------------------------------------


def parse_value(text: str):
    try:
        return {"True": True, "False": False}[text] if text in ("True", "False") else json.loads(text)
    except ValueError:
        return text


def config(row: dict[str, str]) -> Config:
    """Return the configuration of a row. `settings` changes it last, also to plan other sizes than those of the run."""
    model = {ours: int(row[theirs]) for theirs, ours in SIZES.items()} | {"attention": "gqa"}
    sparse = {"n_experts": int(row["n_experts"]), "top_k": int(row["top_k"]), "d_expert": int(row["d_ff"])}
    model |= sparse if sparse["n_experts"] else {"d_ff": int(row["d_ff"])}
    settings = {name: parse_value(value) for name, value in (one.split("=", 1) for one in row["settings"].split())}
    if chunks := settings.pop("work.chunks", 0):  # how files of before `interleaved:N` write it
        settings["work.schedule"] += f":{chunks}"
    model |= {name[6:]: value for name, value in settings.items() if name.startswith("model.")}
    others = {name: value for name, value in settings.items() if not name.startswith("model.")}
    data = {"data.seq_len": int(row["seq_len"]), "data.batch_size": int(row["batch"])}
    model["window"] = next((window for name, window in WINDOWS.items() if row["name"].startswith(name)), "")
    return replace(preset("llama3_8b"), model=ModelConfig(**model), mesh=row["mesh"], **(data | others))


def seconds(row: dict[str, str], devices: int) -> float:
    """Return the published seconds. From TFLOP/s they follow by the source's own count of FLOPs (column `flops`)."""
    value = float(row["value"])
    if row["unit"] == "s":
        return value
    size = {name: int(number) for name, number in row.items() if number.isdecimal()}
    D, width, (per_weight, per_pair) = size["d_model"], size["d_head"], COUNTED[row["flops"]]
    feed_forward = (2 if "model.activation=gelu" in row["settings"] else 3) * D * size["d_ff"]
    weights = D * width * 2 * (size["n_heads"] + size["n_kv_heads"]) + feed_forward
    pairs = size["seq_len"] * size["n_heads"] * width
    per_token = size["n_layers"] * (per_weight * weights + per_pair * pairs) + 6 * D * size["vocab"]
    return per_token * size["batch"] * size["seq_len"] / devices / (1e12 * value)


def plan_row(row: dict[str, str]) -> Row:
    try:
        topology, trainer = hardware.Topology.parse(row["topology"]), speeds.trainer_of(row["source"])
        if topology.chip.domain and trainer in measured.trainers(topology.chip.key):
            topology = dataclasses.replace(topology, trainer=trainer)
        return Row(row, seconds(row, topology.devices), planner.plan(config(row), topology))
    except UserError as error:
        return Row(row, reason=str(error).split(";")[0])


def read_rows(file: Path = ROWS) -> list[dict[str, str]]:
    return [*csv.DictReader(file.read_text(encoding="utf-8").splitlines())]


@functools.cache
def plan_rows(*kinds: str) -> tuple[Row, ...]:
    """Plan the rows of these kinds; all rows if no kind is given."""
    return tuple(plan_row(row) for row in read_rows() if not kinds or row["kind"] in kinds)


# Errors ---------------------------------------------------------------------------------------------------------------


def trials(rows: Iterable[Row]) -> list[Trial]:
    """Return the rows that were planned, by the constants that the planner uses for them."""
    return [speeds.trial(row, measured.speeds_of(row.one.topology)) for row in rows if row.one]


def errors(found: Iterable[Trial]) -> tuple[int, float, float, float, float]:
    """Return the number of steps, their mean error, mean bias and largest error, and the fraction inside."""
    ratios, inside = zip(*((one.ratio - 1, one.inside) for one in found), strict=True)
    n, sizes = len(ratios), [abs(x) for x in ratios]
    return n, sum(sizes) / n, sum(ratios) / n, max(sizes), sum(inside) / n


def grouped(found: Iterable, key) -> dict:
    groups = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return dict(groups)


def regrets(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return for each model on the same chips the number of meshes that were measured, if there are several, and how
    much longer than the best of them the slowest takes, and the one that the planner would choose."""
    same = lambda row: (row.name, row.topology, row.batch, row.seq_len, row.source)
    found = {}
    for (name, topology, *_), ones in grouped((row for row in rows if row.one), same).items():
        if len({row.mesh for row in ones}) > 1:
            choice, times = min(ones, key=lambda row: row.estimate.seconds), [row.measured_s for row in ones]
            longer = (time / min(times) - 1 for time in (max(times), choice.measured_s))
            found[name, topology] = len({row.mesh for row in ones}), *longer
    return found


# Pages ----------------------------------------------------------------------------------------------------------------

HEAD = """# Planned and published steps

How far can you trust the planner's seconds? `python -m bench.published` plans {rows} training steps that were measured,
and writes these pages from `bench/published.csv`, which has the sizes, the settings and the source of each step. Others
measured and published all of them but {ours}: we measured the steps of *this trainer*
[on one H200](gpus.md#measured-on-one-h200), with small models, and [nothing on a TPU](where_it_ran.md).

## Errors

Each cell has the mean error and in parentheses the mean bias (positive: the plan is too long). Each kind links to a
page with its steps.

| kind of step | steps | planned | largest | inside | left out | largest | inside |
|---|---|---|---|---|---|---|---|
{kinds}

- *Planned* is the line `step` of `python -m plan`, with the `--trainer` of the source on GPUs. It is not a test,
  because the constants were fitted to these steps.
- *Left out* is the test: the constants were fitted again without all steps of the source. Expect these errors for a
  trainer of your own. The form of the formulas and the first values of the constants were chosen with all steps in
  view, though.
- *Largest* is the error of the worst step.
- *Inside* is the fraction of the steps in the planner's interval, which should be 80%. For sources that the fit has not
  seen it is lower, above all on GPUs.

## Calibration

*Calibrated* shows what one measured step of your own is worth (`--measured`): the constants of *left out*, fitted to
one step of the source, have this mean error of the other steps, averaged over all choices of the one. Sources with
fewer than three steps on a chip are not listed.

| source | chip | steps | planned | left out | inside | calibrated |
|---|---|---|---|---|---|---|
{sources}

## Regret

Which mesh is the fastest? For these models, a source measured several meshes on the same chips. *Regret* is how much
longer than the best mesh the planner's choice takes, with the constants of *planned*. *Slowest* is how much longer the
slowest mesh takes.

| model | chips | meshes | slowest | regret |
|---|---|---|---|---|
{regrets}

## Constants

`plan/time/terms.py` computes how long each part of a step takes at the speeds of the data sheet, and these constants
multiply the parts. Each measured step of the chip, or of the trainer on this chip, narrows the spread with which a
constant begins (`PRIORS` in `plan/time/measured.py`). The spreads that are left give the interval of a plan. ± is one
standard deviation. `this` is the trainer of this project. A plan without `--trainer` uses *any trainer*:
the mean of the trainers, without {unusual},
with the spread that the constants begin with, and 10% in common.

{constants}

*Exposed* is communication that does not overlap with compute, *tokens* that of experts and of context parallelism,
*stages* that between pipeline stages, and *stragglers* lengthens a step for each doubling of the slices. On GPUs,
*layers* is in milliseconds for each layer of each microbatch, *memory* counts how often a layer's activations pass
through memory, and *weights* is the communication of sharded weights and gradients. On TPUs, the parts are those of the
[simulated step](seconds.md), and *weights* is the fraction of the time of overlapped weight all-gathers for which they
hold up the matmuls. Chips without measured steps use the constants of {similar}, and their plans have no interval.

## How to read the steps

On the pages of the steps, *error* is that of the planned step. What all rows of a table have in common is above it. The
interval ×1.20 is from the planned step divided by 1.20 to the planned step times 1.20. The notes say what the plan does
differently than the run. NVIDIA's recipes and MaxText have changed some of the tables since; the history of each file
has the numbers used here.

Not here are Llama 3.1 405B with sequences of 131,072 tokens (the paper does not say how it counts the FLOPs of
attention, which changes the step from 11 to 15 s), OLMo (its README has neither the number of GPUs nor the batch), and
BloombergGPT (its nodes have a quarter of the network bandwidth of the planner's A100s).

:::{{toctree}}
:hidden:

{pages}
:::
"""
ABOUT = {
    "dense, one slice": """\
- **`1024b` on 1,024 v5p.** Its source contradicts itself. The table used here has 254 TFLOP/s, and [another page of the
  same project](https://github.com/AI-Hypercomputer/maxtext/blob/9797b463d2893d1498056d23f0d4497c85147c0d/docs/advanced_docs/runtime_performance_results.md)
  has an MFU of 64.05%, which is 294 TFLOP/s.
- **`gptj-6b`** is the only known step of a v3.
""",
    "context": """\
- **`llama2-7b` with `context=16`.** The planner counts the all-gather of keys and values as exposed. The measured step
  takes no longer than with all-to-all.
""",
    "MoE": """\
- **`gpt-oss-120b`** stores the experts' outputs in the host's memory too, which no list of `work.remat` can express. So
  nothing is fitted to it.
""",
    "GPUs": """\
- **nanotron's logs** of 2024 have a microbatch of 32 sequences that takes four times as long as 8 sequences.
""",
    "GPUs without FlashAttention": """\
- **A separate kind.** These are runs of 2020 to 2022, and every plan has FlashAttention. Without it, each score of a
  query and a key passes through memory several times: 13 bytes in the forward pass, 13 when it is recomputed, and 19 in
  the backward pass. At 2.04 TB/s, that takes {small_scores:.2f} s of `gpt-1.7b`, {large_scores:.2f} s of `gpt-145.6b`,
  and without dropout and at 1.6 TB/s {neox_scores:.1f} s of `gpt-neox-20b`. The constants of `megatron-2021` are a mean
  over these models.
- **ZeRO-3 on 768 and 1,536 A100s.** The step takes {zero_s:.0f} s on both, so communication limits it. A GPU receives
  {zero_gb:.0f} GB of weights at least twice, and takes part in the reduction of as many bytes of gradients:
  {zero_gb_s:.0f} GB/s. The planner expects the 200 GB/s of a node's eight network cards.
""",
}
COLUMNS = ("model", "chips", "mesh", "batch", "sequence", "measured, s", "planned, s", "error", "interval", "notes")
SHARED = "chips", "mesh", "sequence"  # columns that become a line if all rows have the same value
RULE = "|---"  # below the name of a column
LEAST = 5  # rows of a source on a chip with its own table


def percent(x: float) -> str:
    return f"{100 * x:+.1f}%"


def both(mean: float, bias: float) -> str:
    return f"{mean:.1%} ({bias:+.1%})"


def line(cells: Iterable) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def kind_line(kind: str, ours: list[Trial], left: list[Trial]) -> str:
    (n, mean, bias, worst, inside), (_, out, out_bias, out_worst, out_inside) = errors(ours), errors(left)
    return line((f"[{kind}]({KINDS[kind]}.md)", n, both(mean, bias), f"{worst:.1%}", f"{inside:.0%}",
                 both(out, out_bias), f"{out_worst:.1%}", f"{out_inside:.0%}"))  # fmt: skip


def name_and_chip(row: Row) -> tuple[str, str]:
    return speeds.name_of(row.source), row.one.topology.chip.key


def source_lines(rows: Iterable[Row], left: list[Trial]) -> list[str]:
    """Return a line for each source on each chip with at least three steps."""
    out, lines = grouped(left, lambda one: name_and_chip(one.row)), []
    for (name, chip), ones in sorted(grouped((row for row in rows if row.one), name_and_chip).items()):
        if len(ones) < 3:
            continue
        (n, mean, bias, *_), (_, far, far_bias, _, inside) = errors(trials(ones)), errors(out[name, chip])
        once = speeds.calibrated(ones, speeds.constants_without(rows, name, ones[0]))
        lines.append(line((name, chip, n, both(mean, bias), both(far, far_bias), f"{inside:.0%}", f"{once:.1%}")))
    return lines


def constants_tables() -> str:
    """Return a table of the constants of TPUs, and one of GPUs."""
    parts = []
    for names in (measured.TPU_TERMS, measured.GPU_TERMS):
        columns = ("chip", "trainer", "steps", *names)
        lines = []
        for one in measured.table().values():
            if len(one.factors) == len(names):
                spreads = (row[n] ** 0.5 for n, row in enumerate(one.covariance))
                values = (f"{x:.3g} ±{y:.0%}" for x, y in zip(one.factors, spreads, strict=True))
                gpu = names == measured.GPU_TERMS
                lines.append((one.chip, one.trainer or ("any trainer" if gpu else "all"), str(one.steps), *values))
        parts.append("\n".join((line(columns), RULE * len(columns) + "|", *map(line, lines))))
    return "\n\n".join(parts)


def notes_of(row: Row) -> list[str]:
    """Return what the plan of a row does differently than the run, and whether it lacks an interval."""
    found = [part for part in row.lacks.split("; ") if part not in ("", "attention without FlashAttention")]  # a kind
    return found + ["no interval"] * (not row.estimate.low)


def interval(low: float, high: float) -> str:
    """Return the smallest and the largest interval, or one number if they are equal."""
    return " to ".join(dict.fromkeys(f"×{x:.2f}" for x in (low, high)))


def cells(row: Row, linked: bool, note: str) -> dict[str, str]:
    """Return the cells of a step by column."""
    found = row.estimate
    time = lambda s: f"{s:.2f}" if s >= 1 else f"{s:.4g}"
    width = found.high / found.seconds if found.low else 0
    values = (row.link if linked else f"`{row.name}`", f"`{row.topology}`", f"`{row.mesh}`", f"{int(row.batch):,}",
              f"{int(row.seq_len):,}", time(row.measured_s), time(found.seconds), percent(row.ratio - 1),
              interval(width, width) if width else "none", note)  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def table(rows: list[Row]) -> list[str]:
    """Return a table of steps, the line above it with what its rows have in common, and the notes below it."""
    parts, linked = [notes_of(row) for row in rows], len({row.source for row in rows}) > 1
    common = [part for part in parts[0] if all(part in others for others in parts)] if len(rows) > 1 else []
    left = ["; ".join(part for part in some if part not in common) for some in parts]
    notes = [note for note in dict.fromkeys(left) if note]
    numbers = [str(notes.index(note) + 1) if note else "" for note in left]
    lines = [cells(row, linked, number) for row, number in zip(rows, numbers, strict=True)]
    above, dropped = [], ["notes"] * (not notes)
    if not linked:
        above.append(f"Source: {rows[0].address}.")
    for column in SHARED:
        if len({one[column] for one in lines}) == 1:
            above.append(f"{column.capitalize()}: {lines[0][column]}.")
            dropped.append(column)
    if "mesh" not in dropped and all(row.mesh == f"fsdp={row.one.topology.devices}" for row in rows):
        above.append("Mesh: `fsdp` over all devices.")
        dropped.append("mesh")
    widths = [row.estimate.high / row.estimate.seconds for row in rows if row.estimate.low]
    if widths and max(widths) / min(widths) < 1.02:
        above.append(f"Interval: {interval(min(widths), max(widths))}.")
        dropped.append("interval")
    above += [f"Planned differently: {'; '.join(common)}."] * bool(common)
    columns = [column for column in COLUMNS if column not in dropped]
    found = [*textwrap.wrap(" ".join(above), 120, break_long_words=False, break_on_hyphens=False), ""] * bool(above)
    found += [line(columns), RULE * len(columns) + "|"]
    found += [line(one[column] for column in columns) for one in lines]
    return found + [""] * bool(notes) + [f"{n}. {note}" for n, note in enumerate(notes, 1)]


def tables(rows: list[Row]) -> list[str]:
    """Return the tables of the steps of a kind: one for each source, or trainer, with several steps on a chip, and one
    of all others."""
    many = Counter((row.source, name_and_chip(row)) for row in rows)
    by_source = lambda row: row.source if many[row.source, name_and_chip(row)] >= LEAST else ""
    groups = grouped(rows, lambda row: (*name_and_chip(row), by_source(row)))
    large = {key: ones for key, ones in groups.items() if len(ones) >= LEAST}
    others = [row for key, ones in groups.items() if key not in large for row in ones]
    same, lines = Counter(key[:2] for key in large), []
    for (name, chip, source), ones in large.items():
        file = f": {'/'.join(source.split('/')[-2:])}" if source and same[name, chip] > 1 else ""
        lines += ["", f"## {name} on {chip}{file}", "", *table(ones)]
    if others:
        lines += ["", "## Other sources"] * bool(large) + ["", *table(others)]
    return lines


def score_seconds(row: Row, score_bytes: int = 45, bytes_per_s: float = 2.039e12) -> float:
    """Return the seconds in which the scores of attention without FlashAttention pass through a GPU's memory.

    score_bytes  13 in the forward pass: the matmul, softmax and dropout write 2 each, dropout a mask of 1, and softmax,
                 dropout and the next matmul read 2 each. 13 when recomputed. 19 in the backward pass: three matmuls
                 and dropout read 2 each, softmax 4, dropout the mask, and one matmul, dropout and softmax write 2 each.
                 Without dropout: 8, 8 and 14
    """
    B, L, H, T = (int(row.values[name]) for name in ("batch", "n_layers", "n_heads", "seq_len"))
    return score_bytes * B * L * H * T**2 / row.one.topology.devices / bytes_per_s


def unplanned_line(row: Row) -> str:
    name = f"{row.link} on `{row.topology}`"
    return f"- {name}, `{row.mesh}`, {row.value} {row.unit}: {row.reason}"


def kind_page(kind: str, rows: tuple[Row, ...], numbers: dict[str, float]) -> str:
    """Return the page with the steps of a kind. numbers: of all rows, for the text about some of them"""
    ours = [row for row in rows if row.kind == kind]
    planned, without = [row for row in ours if row.one], [row for row in ours if not row.one]
    parts = [f"# Published steps: {kind}", "", f"{len(planned)} measured steps and their plans. [How to read the steps]"
             "(published.md#how-to-read-the-steps) explains the columns."]  # fmt: skip
    parts += ["", ABOUT[kind].format(**numbers).rstrip()] if kind in ABOUT else []
    parts += tables(planned)
    parts += ["", "## Not planned", "", *map(unplanned_line, without)] if without else []
    return "\n".join(parts) + "\n"


def pages(rows: tuple[Row, ...]) -> dict[Path, str]:
    """Return docs/published.md, and a page for each kind, by their files."""
    ours, left = trials(rows), speeds.leave_out(rows)
    out = {id(one.row): one for one in left}
    kinds = grouped(ours, lambda one: one.row.kind)
    by_name = {(row.name, row.topology): row for row in rows}
    zero = next(row for row in rows if row.mesh == "fsdp=1536")
    zero_gb = 2 * zero.one.params_total / 1e9  # of weights, in bfloat16
    head = HEAD.format(
        rows=len(rows), ours=len(kinds["GPUs, this trainer"]), constants=constants_tables(),
        unusual=" and ".join((", ".join(speeds.UNUSUAL[:-1]), f"`{speeds.UNUSUAL[-1]}`")),
        kinds="\n".join(kind_line(kind, kinds[kind], [out[id(one.row)] for one in kinds[kind]]) for kind in KINDS),
        sources="\n".join(source_lines(rows, left)), similar=measured.SIMILAR.upper(), pages="\n".join(KINDS.values()),
        regrets="\n".join(line((name, chips, n, f"{slowest:.0%}", f"{choice:.0%}"))
                          for (name, chips), (n, slowest, choice) in sorted(regrets(rows).items())),
    )  # fmt: skip
    numbers = dict(
        small_scores=score_seconds(by_name["gpt-1.7b", "a100:32"]),
        large_scores=score_seconds(by_name["gpt-145.6b", "a100:1536"]),
        neox_scores=score_seconds(by_name["gpt-neox-20b", "a100:96"], 30, 1.555e12),
        zero_s=zero.measured_s, zero_gb=zero_gb, zero_gb_s=3 * zero_gb / zero.measured_s,
    )  # fmt: skip
    return {PAGE: head} | {PAGE.parent / f"{name}.md": kind_page(kind, rows, numbers) for kind, name in KINDS.items()}


HELP = """e.g. python -m bench.published
     python -m bench.published --rows mine.csv   # plan steps of your own, with the columns of bench/published.csv

Plan the steps in bench/published.csv, fit the planner's constants to them, and write docs/published.md, a
page for each kind of step, and plan/time/speeds.json. Takes a minute."""


@dataclasses.dataclass
class Arguments:
    json: Annotated[str, tyro.conf.arg(help="also write the rows as JSON to this file; -: print them")] = ""
    rows: Annotated[str, tyro.conf.arg(help="plan the rows of this file, and print errors; nothing is written")] = ""


def to_json(row: Row) -> dict:
    times = ("measured_s", "simulated_s", "step_s", "low_s", "high_s")
    if not row.one:
        return row.values | dict.fromkeys(times) | {"reason": row.reason}
    one = row.estimate
    found = (row.measured_s, row.one.simulated_s, one.seconds, one.low, one.high)
    return row.values | dict(zip(times, found, strict=True))


def print_errors(rows: list[Row]) -> None:
    """Print error, bias, coverage and calibration of each source, and the regret of each group of meshes."""
    for (name, chip), ones in sorted(grouped((row for row in rows if row.one), name_and_chip).items()):
        n, mean, bias, worst, inside = errors(trials(ones))
        known = [*plan_rows(), *rows]
        once = speeds.calibrated(ones, speeds.constants_without(known, name, ones[0])) if n > 1 else None
        calibrated = f"  calibrated on one step {once:.1%}" if n > 1 else ""
        print(f"{name:32} {chip:6} {n:4} steps  error {mean:.1%}  bias {bias:+.1%}  largest {worst:.1%}  "
              f"inside {inside:.0%}{calibrated}")  # fmt: skip
    for (name, chips), (n, slowest, choice) in sorted(regrets(rows).items()):
        print(f"{name} on {chips}: regret {choice:.0%} of {n} meshes, the slowest {slowest:.0%}")
    for row in rows:
        if not row.one:
            print(f"not planned: {row.name} on {row.topology}: {row.reason}")


def read_file(path: str) -> list[dict[str, str]]:
    """Raises: UserError if the file cannot be read or lacks a column."""
    try:
        rows = read_rows(Path(path))
    except OSError as error:
        raise UserError(f"--rows {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--rows {path}: it is not a text file") from error
    missing = {*read_rows()[0]} - {*(rows[0] if rows else ())}
    if missing:
        raise UserError(f"--rows {path}: it lacks the columns {', '.join(sorted(missing))} of bench/{ROWS.name}")
    return rows


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.published", description=HELP, use_underscores=True)
    if args.rows:
        rows = [plan_row(row) for row in read_file(args.rows)]
        print_errors(rows)
    else:
        found = speeds.speeds(plan_rows())
        measured.SPEEDS.write_text(speeds.to_text(found), encoding="utf-8")
        measured.table.cache_clear()
        plan_rows.cache_clear()
        rows = plan_rows()
        found_pages = pages(rows)
        for path, text in found_pages.items():
            path.write_text(text, encoding="utf-8")
        print(f"wrote {len(found_pages)} pages and {measured.SPEEDS.name}: {len(rows)} steps")
    if args.json:
        listed = json.dumps([to_json(row) for row in rows], indent=1)
        print(listed) if args.json == "-" else Path(args.json).write_text(listed + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
