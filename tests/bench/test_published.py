"""The planner against training steps that others measured and published, and the page about them."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import published
from docs import pictures
from plan.time import measured, terms

SLICE = "dense, one slice"
ROOT = Path(__file__).parent.parent.parent


def errors_of(kind, split="tested", without=()):
    rows = [row for row in published.plan_rows(kind) if row.split == split and (row.name, row.topology) not in without]
    return published.errors(rows)[1:], [(row.name, row.topology, f"{row.ratio - 1:+.1%}") for row in rows if row.one]


def test_at_least_half_of_the_steps_only_test():
    """Catches constants fitted to most of the steps, a row without a source, and a kind that the page does not list."""
    rows = published.read_rows()
    split, kinds = Counter(row["split"] for row in rows), {row["kind"] for row in rows}
    assert len(rows) >= 60 and split["tested"] >= len(rows) / 2 and {*split} == {"tested", "fitted"}
    assert kinds == {*published.KINDS} and all(row["source"].startswith("https://") for row in rows)
    assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_the_planner_predicts_published_steps():
    """Catches a change that makes plans of real runs worse. No constant was fitted to these steps."""
    # Left out: a row that contradicts itself, and a rounded number of the only v3; see docs/published.md
    known = {("1024b", "v5p:8x8x16"), ("gptj-6b", "v3:2x2")}
    (mean, worst), rows = errors_of(SLICE, without=known)
    assert len(rows) == 19 and mean <= 0.04 and worst <= 0.1, rows
    (mean, worst), rows = errors_of("MoE")
    assert len(rows) == 6 and mean <= 0.08 and worst <= 0.14, rows


def test_a_source_is_left_out_with_all_its_rows():
    """Catches a row that is planned with constants that were fitted to it, or to another row of its source."""
    rows = published.plan_rows(SLICE)
    (left,) = (one for one in speeds.leave_out(rows) if (one.row.name, one.row.topology) == ("22b", "v4:4x4x4"))
    others = [row for row in rows if row.one and "maxtext" not in row.source]
    assert not any(row.one.topology.chip.key == "v4" for row in others)
    alone = measured.prior(terms.TPU_TERMS, "v4")  # no other source has steps on a v4
    costs = terms.costs(left.row.one, left.row.one.expected)
    assert left.ratio == pytest.approx(measured.seconds(costs, alone, 0.0) / left.row.measured_s)
    half = measured.EIGHTY * measured.spread(costs, alone, 0.0)
    assert left.inside == (abs(math.log(left.ratio)) <= half)




def test_seconds_follow_from_published_flops():
    """Catches the model's FLOPs counted differently than the source does, and the TFLOP/s of one chip taken for all."""
    row = next(row for row in published.plan_rows(SLICE) if (row.name, row.topology) == ("22b", "v4:4x4x4"))
    assert row.measured_s == pytest.approx(26.796, abs=0.001)  # 4.18e15 FLOPs per chip at 156 TFLOP/s
    causal = published.seconds(row.values | {"flops": "causal"}, 64)
    assert causal == pytest.approx(26.796 - 6 * 48 * 2048 * 24 * 128 * 13 * 2048 / 156e12, abs=0.001)


def test_flops_with_the_recomputed_forward_pass_give_the_published_days():
    """arXiv:2104.04473, table 2, has TFLOP/s and the days for 300B tokens. Catches three matmuls in a feed-forward
    layer with GELU, and recomputed FLOPs that are left out."""
    days = {
        "a100:384": {144: 90, 153: 84}, "a100:768": {88: 74, 149: 43}, "a100:1536": {44: 74, 141: 23},
        "a100:560": {171: 156}, "a100:640": {138: 169}, "a100:1120": {98: 137, 167: 80},
        "a100:2240": {48: 140, 159: 42},
    }  # fmt: skip
    table = [row for row in published.read_rows() if row["source"].endswith("2104.04473")]
    found = [row for row in table if int(row["value"]) in days.get(row["topology"], ())]
    assert len(found) == 12
    for row in found:
        steps = 300e9 / (int(row["batch"]) * int(row["seq_len"]))
        seconds = published.seconds(row, int(row["topology"].removeprefix("a100:")))
        want = days[row["topology"]][int(row["value"])]
        assert seconds * steps / 86400 == pytest.approx(want, abs=0.5 + 0.5 / int(row["value"]) * want)  # both rounded


def test_a_plan_with_other_sizes_keeps_the_measured_step():
    """Catches seconds from the layers, the vocabulary or the positions that only the plan has."""
    rows = {(row["name"], row["topology"]): row for row in published.read_rows()}
    row = rows["llama3.1-405b", "h100:16384"]
    assert (row["n_layers"], published.config(row).model.n_layers) == ("126", 128)
    tokens, flops = 2048 * 8192, 6 * 403.7e9 + 6 * 126 * 8192 * 16384  # 405.85e9 parameters without the embedding
    assert published.seconds(row, 16384) == pytest.approx(tokens * flops / 16384 / 400e12, rel=1e-3)
    palm = published.config(rows["palm-540b", "2*v4:12x16x16"])
    assert (palm.data.seq_len, palm.model.vocab_size, palm.model.n_kv_heads) == (2052, 256_008, 12)


def test_scores_pass_through_memory_once_per_head_and_layer():
    """Catches scores of all GPUs counted on each."""
    (values,) = (row for row in published.read_rows() if row["name"] == "gpt-1.7b")
    row = published.plan_row(values)
    per_gpu = 16 * 24 * 24 * 2048**2  # sequences, layers, heads, pairs
    assert published.score_seconds(row, 45, 1e12) == pytest.approx(45 * per_gpu / 1e12)


def test_a_row_that_cannot_be_planned_has_the_reason():
    """Catches a number for a run that was not planned, and a page that stops at it."""
    row = published.plan_row(published.read_rows()[0] | {"topology": "abacus:8"})
    assert row.one is None and row.reason == "topology 'abacus:8': unknown chip 'abacus'"
    assert published.unplanned_line(row).endswith("`fsdp=64`, 156 TFLOP/s: topology 'abacus:8': unknown chip 'abacus'")
    assert published.to_json(row)["expected_s"] is None and published.errors([row]) == (0, 0.0, 0.0)


def test_the_page_states_the_batch_of_each_step():
    """Catches seconds of a step whose number of tokens the page does not say, and cells under the wrong heading."""
    row = next(row for row in published.plan_rows(SLICE) if (row.name, row.topology) == ("22b", "v4:4x4x4"))
    cells = dict(zip(published.COLUMNS, published.table_line(row, measured.intervals()).split(" | "), strict=True))
    assert (cells["batch"], cells["sequence"], cells["measured"]) == ("832", "2,048", "26.80 s")
    assert cells["mesh"] == "`fsdp=64`" and cells["split"] == "tested"


def test_intervals_are_those_of_the_tested_steps():
    """Catches intervals of another version of the rows, and an interval that no measured step has."""
    rows = published.plan_rows(SLICE)
    assert published.intervals(rows)[SLICE] == measured.intervals()[SLICE]
    few = [row for row in rows if row.split == "tested"][:3]
    ratios = [row.measured_s / row.estimate.seconds for row in few]
    found = published.interval(few)
    assert (found["low"], found["high"]) == pytest.approx((min(ratios), max(ratios)), abs=1e-3) and found["steps"] == 3


@pytest.mark.slow
def test_the_page_and_the_intervals_are_those_of_the_rows():
    """Catches a page that was not written again. Plans all rows, which takes half a minute."""
    rows = published.plan_rows()
    assert published.PAGE.read_text() == published.page(rows), "run `python -m bench.published`"
    assert json.loads(measured.INTERVALS.read_text()) == published.intervals(rows)
    assert {chip: round(value, 2) for chip, value in published.fit(rows)["GPU_MATMULS"].items()} == measured.GPU_MATMULS
    assert min(published.rank_correlation(rows).values()) > 0.9
    dense = [row for row in rows if (row.kind, row.split) == (SLICE, "tested")]
    number, mean, _ = published.errors(dense)
    for words in (
        f"{len(rows)} steps that others",
        f"{number} steps of dense models",
        f"differ by {mean:.1%} on average",
    ):
        assert words in " ".join((ROOT / "README.md").read_text().split()), words


def test_the_figure_names_its_numbers():
    """Catches a title with other numbers than the dots, and a dot that is missing."""
    svg, rows = pictures.planned_and_published(), published.plan_rows(SLICE)
    number, mean, worst = published.errors(row for row in rows if row.split == "tested")
    assert f"{number} published steps: mean error {mean:.1%}, largest {worst:.1%}" in svg
    assert svg.count("published ") >= len(rows) and all(f"{row.name} on {row.topology}" in svg for row in rows)
