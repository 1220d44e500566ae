"""Compare the planner with training steps that others measured and published.

`python -m bench.published` plans every row of `published.csv`, and writes docs/published.md and `plan/intervals.json`,
which holds the interval of a plan's seconds by kind of step. It uses no device.
"""

import csv
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from config import Config, ModelConfig, preset, replace
from plan import planner
from plan.chips import hardware
from plan.time import measured
from utils import UserError, exit_status

ROWS, PAGE = Path(__file__).parent / "published.csv", Path(__file__).parents[1] / "docs" / "published.md"
KINDS = ("dense, one slice", "several slices", "context", "MoE", "GPUs", "GPUs without FlashAttention")
SIZES = {"vocab": "vocab_size", **{name: name for name in ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_head")}}
# FLOPs as the source counts them: per token and weight of a layer, and of attention per query-key pair and head width.
# maxtext counts all pairs, causal half of them, and megatron counts the recomputed forward pass too (arXiv:2104.04473)
COUNTED = {"maxtext": (6, 12), "causal": (6, 6), "megatron": (8, 16)}


@dataclass(frozen=True)
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
        return self.one.real

    @property
    def ratio(self) -> float:
        return self.estimate.seconds / self.measured_s

    @property
    def simulated_ratio(self) -> float:
        """The planner's seconds before the constants in `plan/measured.py`, divided by the measured seconds."""
        return self.one.likely_s / self.measured_s


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
        topology = hardware.Topology.parse(row["topology"])
        return Row(row, seconds(row, topology.devices), planner.plan(config(row), topology))
    except UserError as error:
        return Row(row, reason=str(error).split(";")[0])


def read_rows() -> list[dict[str, str]]:
    return [*csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines())]


@functools.cache
def plan_rows(*kinds: str) -> tuple[Row, ...]:
    """Plan the rows of these kinds; all rows if no kind is given."""
    return tuple(plan_row(row) for row in read_rows() if not kinds or row["kind"] in kinds)


# Errors ---------------------------------------------------------------------------------------------------------------


def errors(rows: Iterable[Row], ratio: str = "ratio") -> tuple[int, float, float]:
    """Return the number of planned rows, and the mean and the largest absolute error."""
    found = [abs(getattr(row, ratio) - 1) for row in rows if row.one]
    return (len(found), statistics.mean(found), max(found)) if found else (0, 0.0, 0.0)


def interval(rows: Iterable[Row]) -> dict[str, float]:
    """Return the interval of measured / estimated seconds: all rows, or with at least ten rows the middle 80%."""
    found = sorted(1 / row.ratio for row in rows if row.one)
    low, high = np.quantile(found, (0.1, 0.9)) if len(found) >= 10 else (found[0], found[-1])
    return {"low": round(float(low), 3), "high": round(float(high), 3), "steps": len(found)}


def intervals(rows: Iterable[Row]) -> dict[str, dict]:
    """Return the interval of each kind, from the rows that no constant was fitted to."""
    by_kind = {kind: [row for row in rows if (row.kind, row.split) == (kind, "tested")] for kind in KINDS}
    return {kind: interval(found) for kind, found in by_kind.items() if any(row.one for row in found)}


def rank_correlation(rows: Iterable[Row]) -> dict[str, float]:
    """Return Spearman's rank correlation of measured and estimated seconds for each chip with at least four rows."""
    from scipy.stats import spearmanr

    by_chip: dict[str, list[Row]] = {}
    for row in rows:
        if row.one:
            by_chip.setdefault(row.one.topology.chip.key, []).append(row)
    pairs = lambda found: ([row.measured_s for row in found], [row.estimate.seconds for row in found])
    return {chip: float(spearmanr(*pairs(found))[0]) for chip, found in by_chip.items() if len(found) >= 4}


def fit(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Fit the constants of `plan/measured.py` by least squares of the relative errors of the `fitted` rows."""
    found: dict[str, dict[str, float]] = {"MATMULS": {}, "OTHERS": {}, "GPU_MATMULS": {}}
    by_chip: dict[str, list[Row]] = {}
    for row in rows:
        if row.one and row.split == "fitted":
            by_chip.setdefault(row.one.topology.chip.key, []).append(row)
    for chip, ones in by_chip.items():
        total = np.array([row.measured_s for row in ones])
        if ones[0].kind == "GPUs":  # measured = compute / x + waits
            compute, waits = np.array([measured.gpu_parts(row.one)[:2] for row in ones]).T
            found["GPU_MATMULS"][chip] = 1 / solve([compute], total - waits, total)[0]
            continue
        names = ("products", "other ops")[: 1 + (chip in measured.OTHERS)]
        parts = [np.array([row.one.expected[name] for row in ones]) for name in names]
        rest = np.array([row.measured_s - row.one.likely_s - measured.held_up_seconds(row.one) for row in ones])
        for constants, value in zip(("MATMULS", "OTHERS"), solve(parts, rest, total), strict=False):
            found[constants][chip] = float(value)
    return found


def solve(parts, rest, total):
    """Find x that minimizes the squares of (x @ parts - rest) / total."""
    return np.linalg.lstsq(np.stack([part / total for part in parts], axis=1), rest / total, rcond=None)[0]


# Page -----------------------------------------------------------------------------------------------------------------

HEAD = """# Planned and published steps

How far can you trust the planner's seconds? This page plans {rows} training steps that others measured and published,
and compares the two. `python -m bench.published` writes it from `bench/published.csv`, which has the sizes, the mesh,
the settings and the source of each step. We measured none of them.

`python -m plan` prints two times, and both are columns here. The **compiled step** is the time that it expects of the
compiled program, without having seen a measurement; for GPUs it is the roofline ([How the planner estimates step
time](seconds.md)). The **real step** is the line `real step`. Most measured steps take longer than the compiler's
estimates, so `plan/measured.py` adds what those leave out:

- **TPU matmuls** take longer than the compiler estimates, but not on v5p: {matmuls}.
- **Other operations on v5p** take {others:.1f} times as long: norms, activation functions, and moving tokens to
  experts. They decide the time of steps that recompute little, and of mixtures of experts.
- **Overlapped weight all-gathers** delay the matmuls by {held:.0%} of the time that the all-gathers take.
- **GPUs** reach {gpus} of their peak in compute. Communication over `tensor` and `expert` is exposed, and the
  rest overlaps with compute. The roofline overlaps less, so it can be longer than the real step. H200, B200 and GB200
  use the numbers of the H100, because we know of no measured steps.

The {constants} numbers for TPU matmuls, other operations and GPUs are fitted to the rows marked *fitted*; the
{held:.0%} comes from simulated steps (`plan/expected.py`). No constant is fitted to the rows marked *tested*. The form
of the rules was chosen with all rows in view, though.

## Errors

Each cell of *fitted* and *tested* has the number of steps, and the mean and the largest error of the real step.
*Compiled* has the mean and the largest error of the compiled step for the tested steps. The planner prints the
*interval* with each time: +9% means that steps took up to 9% longer than planned. It has the middle 80% of the tested
steps, or all of them if there are fewer than 10. The errors in the tables below have the opposite sign: they are
positive if the plan is too long.

Every plan for GPUs is of the kind *GPUs*. Other plans are *several slices*, *MoE*, *context* or *dense, one slice*: the
first of these that fits.

| kind of step | fitted | tested | compiled | interval |
|---|---|---|---|---|
{summary}

Spearman's rank correlation of the measured and the real step on each chip is {ranks}.

## Rows that fit badly

- **`1024b` on 1,024 v5p.** Its source contradicts itself. The table used here has 254 TFLOP/s, and [another page of the
  same project](https://github.com/AI-Hypercomputer/maxtext/blob/9797b463d2893d1498056d23f0d4497c85147c0d/docs/advanced_docs/runtime_performance_results.md)
  has an MFU of 64.05%, which is 294 TFLOP/s. With that number the error is -1%. On 2,048 chips it is 0%.
- **The all-gather of `llama2-7b` with `context=16`.** The planner counts the all-gather of keys and values as exposed.
  The measured step takes no longer than with all-to-all.
- **Many slices.** The error grows with the number of slices, because the planner leaves out the latency of the network
  between slices: `16b` on v5e takes {one_slice:.0%} longer than planned on one slice, and {many_slices:.0%} on 32.
- **torchtitan's H100s** were limited to 500 W, and have slower memory.
- **GPT models without FlashAttention** (`gpt-1.7b` to `gpt-1008b`, `gpt-22b`, `gpt-neox-20b`). Runs of 2020 to 2022 are
  a separate kind, because every plan has FlashAttention. The plan for a GPU has no separate time for operations that
  memory limits. Without FlashAttention, each score of a query and a key passes through memory several times: 13 bytes
  in the forward pass (scores, softmax, dropout and its mask), 13 when it is recomputed, and 19 in the backward pass. At
  2.04 TB/s, that takes {small_scores:.2f} s of `gpt-1.7b`, which takes {small_gpt:.2f} s longer than planned. For
  `gpt-145.6b` it is {large_scores:.2f} of {large_gpt:.2f} s, and for `gpt-neox-20b`, without dropout and at 1.6 TB/s,
  {neox_scores:.1f} of {neox:.1f} s. The rest is not explained.
- **`mt-nlg-530b`.** The three steps fit {shrinks:.0f} s divided by the size of `data`, and {stays:.0f} s that do not
  shrink with it. The plan has {bubble:.0f} s that do not shrink, the bubble for microbatches of one sequence. With two
  it would be {twice:.0f} s.
- **Gradients that do not overlap.** The planner overlaps gradient reductions over `data` with compute, so `gpt-530b`
  takes the same time on 280 and on 2,240 A100s. The paper says that its reductions did not overlap, and measured 37.83
  and 39.15 s.
- **The widest GPT models** (`gpt-530b` and `gpt-1t` on 280 and 512 GPUs) reach more than the {a100:.0%} of the peak to
  which the rows of Llama 2 70B fit. The bubble of `gpt-1t` is 63 of 575 slots, and the paper has an MFU of 56.3%, so
  the other slots reach at least 63%.
- **ZeRO-3 on 768 and 1,536 A100s.** The step takes {zero_s:.0f} s on both, so communication limits it. A GPU receives
  {zero_gb:.0f} GB of weights at least twice, and takes part in the reduction of as many bytes of gradients:
  {zero_gb_s:.0f} GB/s. The planner
  expects the 200 GB/s of a node's eight network cards, and overlaps all of it with compute.
- **`deepseek-v3` on 2,048 H100s.** The planner exposes {all_to_all:.1f} s of all-to-all, which DualPipe overlaps with
  compute, and plans matmuls in bfloat16, which are FP8 in the run.
- **`gptj-6b` on v3.** The source says "~5000 tokens/second", and no other step of a v3 is known.

What is not here:

- Llama 3.1 405B with sequences of 131,072 tokens, `context=16` and 380 TFLOP/s. The paper does not say how it counts
  the FLOPs of attention. Counting all pairs instead of the causal half changes the step from 11 to 15 s.
- OLMo. The README of OLMo-core has tokens/s per H100, but neither the number of GPUs nor the batch.
- BloombergGPT. Its nodes have 400 Gbit/s for eight A100s, a quarter of what the planner's A100s have, and its weights
  are sharded over 128 GPUs.

NVIDIA's recipes and MaxText have changed some of the tables since; the history of each file has the numbers used here.
"""
COLUMNS = ("step", "mesh", "batch", "sequence", "measured", "compiled step", "real step", "error", "interval", "split",
           "planned differently")  # fmt: skip
TABLE = "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS)))


def percent(x: float) -> str:
    return f"{100 * x:+.1f}%"


def describe_errors(rows: Iterable[Row], ratio: str = "ratio") -> str:
    number, mean, worst = errors(rows, ratio)
    return f"{number}, {mean:.1%}, {worst:.1%}" if number else "-"


def summary_line(kind: str, rows: list[Row], found: dict) -> str:
    fitted, tested = ([row for row in rows if row.split == split] for split in ("fitted", "tested"))
    before = "{1:.1%}, {2:.1%}".format(*errors(tested, "simulated_ratio")) if errors(tested)[0] else "-"
    span = found.get(kind)
    between = f"{span['low'] - 1:+.0%} to {span['high'] - 1:+.0%}" if span else "none yet"
    return f"| {kind} | {describe_errors(fitted)} | {describe_errors(tested)} | {before} | {between} |"


def table_line(row: Row, found: dict) -> str:
    one, error, span = row.estimate, percent(row.ratio - 1), found.get(row.kind)
    times = (f"{time:.2f} s" for time in (row.measured_s, row.one.likely_s, one.seconds))
    between = f"{span['low'] * one.seconds:.1f} to {span['high'] * one.seconds:.1f} s" if span else ""
    name = f"[`{row.name}`]({row.source}) on `{row.topology}`"
    sizes = (f"{int(size):,}" for size in (row.batch, row.seq_len))
    return f"| {' | '.join((name, f'`{row.mesh}`', *sizes, *times, error, between, row.split, row.lacks))} |"


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
    name = f"[`{row.name}`]({row.source}) on `{row.topology}`"
    return f"- {name}, `{row.mesh}`, {row.value} {row.unit}: {row.reason}"


def page(rows: tuple[Row, ...]) -> str:
    """Return docs/published.md."""
    found, listed = intervals(rows), {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    slower = [f"{share:+.0%} on {chip}" for chip, share in measured.MATMULS.items()]
    longer = {row.topology: 1 / row.ratio - 1 for row in rows if row.one and row.name == "16b"}
    by_name = {(row.name, row.topology): row for row in rows}
    small, large = by_name["gpt-1.7b", "a100:32"], by_name["gpt-145.6b", "a100:1536"]
    neox, sparse = by_name["gpt-neox-20b", "a100:96"], by_name["deepseek-v3", "h100:2048"]
    late = lambda row: row.measured_s - row.estimate.seconds
    nlg = [row for row in rows if row.name == "mt-nlg-530b"]
    fit_over_data = lambda times: np.polyfit([1 / config(row.values).mesh.data for row in nlg], times, 1)
    shrinks, stays = fit_over_data([row.measured_s for row in nlg])
    bubble = fit_over_data([row.estimate.seconds for row in nlg])[1]
    zero = next(row for row in rows if row.mesh == "fsdp=1536")
    zero_gb = 2 * zero.one.params_total / 1e9  # of weights, in bfloat16
    head = HEAD.format(
        small_gpt=late(small), large_gpt=late(large), neox=late(neox), small_scores=score_seconds(small),
        large_scores=score_seconds(large), neox_scores=score_seconds(neox, 30, 1.555e12),
        shrinks=shrinks, stays=stays, bubble=bubble, twice=2 * bubble,
        zero_s=zero.measured_s, zero_gb=zero_gb, zero_gb_s=3 * zero_gb / zero.measured_s,
        a100=measured.GPU_MATMULS["a100"], all_to_all=measured.gpu_causes(sparse.one)["expert"],
        rows=len(rows), one_slice=longer["v5e:16x16"], many_slices=longer["32*v5e:16x16"],
        matmuls=", ".join(slower), others=1 + measured.OTHERS["v5p"], held=expected.HELD_UP,
        gpus=" and ".join(f"{share:.0%} ({chip})" for chip, share in measured.GPU_MATMULS.items()),
        constants=len(measured.MATMULS) + len(measured.OTHERS) + len(measured.GPU_MATMULS),
        summary="\n".join(summary_line(kind, ones, found) for kind, ones in listed.items()),
        ranks=", ".join(f"{chip} {rank:.2f}" for chip, rank in rank_correlation(rows).items()),
    )  # fmt: skip
    parts = [head]
    for kind, ones in listed.items():
        planned = [table_line(row, found) for row in ones if row.one]
        parts += ["", f"## {kind[0].upper()}{kind[1:]}", ""]
        if planned:
            parts += [TABLE, *planned]
        without = [row for row in ones if not row.one]
        if without:
            parts += [""] * bool(planned) + ["Not planned:", ""]
        parts += map(unplanned_line, without)
    return "\n".join(parts) + "\n"


HELP = """e.g. python -m bench.published

Plan the steps in bench/published.csv, and write docs/published.md and plan/intervals.json. Takes less than a minute."""


@dataclasses.dataclass
class Arguments:
    json: Annotated[str, tyro.conf.arg(help="also write the rows as JSON to this file; -: print them")] = ""


def to_json(row: Row) -> dict:
    times = ("measured_s", "simulated_s", "expected_s", "low_s", "high_s")
    if not row.one:
        return row.values | dict.fromkeys(times) | {"reason": row.reason}
    one = row.estimate
    found = (row.measured_s, row.one.likely_s, one.seconds, one.low, one.high)
    return row.values | dict(zip(times, found, strict=True))


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.published", description=HELP, use_underscores=True)
    rows = plan_rows()
    measured.INTERVALS.write_text(json.dumps(intervals(rows), indent=1) + "\n", encoding="utf-8")
    measured.intervals.cache_clear()
    PAGE.write_text(page(rows), encoding="utf-8")
    listed = json.dumps([to_json(row) for row in rows], indent=1)
    if args.json and args.json != "-":
        Path(args.json).write_text(listed + "\n", encoding="utf-8")
    print(listed if args.json == "-" else f"wrote {PAGE.name} and {measured.INTERVALS.name}: {len(rows)} steps")


if __name__ == "__main__":
    sys.exit(main())
