"""The planner against training steps that others measured and published, and the page about them."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import published, speeds
from docs import pictures
from plan.time import measured, terms

SLICE = "dense, one slice"
ROOT = Path(__file__).parent.parent.parent


def test_every_row_has_a_source_and_a_kind():
    """Catches a row that nobody can check, a kind that the page does not list, and a row that is there twice."""
    rows = published.read_rows()
    assert len(rows) >= 200 and {row["kind"] for row in rows} == {*published.KINDS}
    assert all(row["source"].startswith("https://") or (ROOT / row["source"]).is_file() for row in rows)
    assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_the_planner_predicts_published_steps():
    """Catches a change that makes plans of real runs worse, and an interval that is too narrow or too wide."""
    # Not here: a row that contradicts itself, a rounded number of the only v3, long sequences with windows, and arrays
    # on the host that the plan does not know; see docs/published_*.md
    known = ("1024b", "v5p:8x8x16"), ("gptj-6b", "v3:2x2"), ("gemma3-12b", "v6e:16x16"), ("gpt-oss-120b", "tpu7x:4x4x4")
    rows = published.plan_rows(SLICE, "MoE")
    for kind, steps, most, largest, unseen in ((SLICE, 31, 0.04, 0.1, 0.06), ("MoE", 7, 0.08, 0.14, 0.09)):
        ours, left = (
            [one for one in trials if one.row.kind == kind and (one.row.name, one.row.topology) not in known]
            for trials in (published.trials(rows), speeds.leave_out(rows))
        )
        number, mean, _, worst, inside = published.errors(ours)
        assert number == steps and mean <= most and worst <= largest and inside >= 0.72
        assert published.errors(left)[1] <= unseen, "its source is left out"


def test_a_source_is_left_out_with_all_its_rows():
    """Catches a row that is planned with constants that were fitted to it, or to another row of its source."""
    rows = published.plan_rows(SLICE)
    (left,) = (one for one in speeds.leave_out(rows) if (one.row.name, one.row.topology) == ("22b", "v4:4x4x4"))
    others = [row for row in rows if row.one and "maxtext" not in row.source]
    assert not any(row.one.topology.chip.key == "v4" for row in others)
    alone = measured.prior(terms.TPU_TERMS, "v4")  # no other source has steps on a v4
    costs = terms.costs(left.row.one, left.row.one.simulated)
    assert left.ratio == pytest.approx(measured.seconds(costs, alone, 0.0) / left.row.measured_s)
    half = measured.EIGHTY * measured.spread(costs, alone, 0.0)
    assert left.inside == (abs(math.log(left.ratio)) <= half)


def test_intervals_hold_for_trainers_that_the_fit_never_saw():
    """Catches an interval of an unknown trainer that is as narrow as that of a known one, and one that is too wide."""
    left = [one for one in speeds.leave_out(published.plan_rows()) if one.row.one.platform == "gpu"]
    usual = [one.inside for one in left if speeds.trainer_of(one.row.source) not in speeds.UNUSUAL]
    assert len(usual) == 100 and 0.72 <= sum(usual) / len(usual) <= 0.88


def test_regret_compares_the_choice_with_the_best_mesh():
    """Catches a regret of another batch or chip, and one that compares planned seconds."""
    made = lambda mesh, planned, took, **more: SimpleNamespace(
        one=True, mesh=mesh, measured_s=took, estimate=SimpleNamespace(seconds=planned),
        **dict(name="m", topology="h100:8", batch="8", seq_len="64", source="s") | more)  # fmt: skip
    rows = [made("fsdp=8", 1.0, 3.0), made("tensor=8", 2.0, 2.0), made("stage=8", 0.1, 9.0, batch="16")]
    assert published.regrets(rows) == {("m", "h100:8"): (2, 0.5, 0.5)}
    rows[0] = made("fsdp=8", 3.0, 3.0)
    assert published.regrets(rows) == {("m", "h100:8"): (2, 0.5, 0.0)}


def test_steps_of_a_file_of_ones_own_are_planned(tmp_path, capsys):
    """Catches a file without a column that is planned anyway, and errors that are not those of the file."""
    text = published.ROWS.read_text().splitlines()
    row = next(line for line in text if line.startswith('22b,"dense'))
    (tmp_path / "own.csv").write_text(f"{text[0]}\n{row}\n")
    assert not published.main(["--rows", str(tmp_path / "own.csv")])
    assert re.search(r"AI-Hypercomputer/maxtext +v4 +1 steps  error [\d.]+%  bias", capsys.readouterr().out)
    (tmp_path / "own.csv").write_text("name,mesh\na,fsdp=8\n")
    assert published.main(["--rows", str(tmp_path / "own.csv")]) == 2
    assert f"error: --rows {tmp_path}/own.csv: it lacks the columns batch, d_ff," in capsys.readouterr().err
    assert published.main(["--rows", str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err == f"error: --rows {tmp_path}/none.csv: No such file or directory\n"


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
    assert published.to_json(row)["step_s"] is None and published.trials([row]) == []


def test_the_page_states_the_batch_of_each_step():
    """Catches seconds of a step whose number of tokens the page does not say, and cells under the wrong heading."""
    row = next(row for row in published.plan_rows(SLICE) if (row.name, row.topology) == ("22b", "v4:4x4x4"))
    cells = published.cells(row, True, "3")
    assert (cells["batch"], cells["sequence"], cells["measured, s"]) == ("832", "2,048", "26.80")
    assert cells["mesh"] == "`fsdp=64`" and cells["planned, s"] == f"{row.estimate.seconds:.2f}"
    assert cells["model"] == row.link and cells["notes"] == "3"


def test_the_line_above_a_table_has_what_its_rows_share():
    """Catches a value above the table that some row does not have, and a note that is lost or on the wrong row."""
    (row,) = (row for row in published.plan_rows(SLICE) if (row.name, row.topology) == ("22b", "v4:4x4x4"))
    rows = [dataclasses.replace(row, values=row.values | {"lacks": lacks, "mesh": mesh}) for lacks, mesh in (
        ("a; attention without FlashAttention; b", "fsdp=64"), ("b", "fsdp=64"), ("b; a", "fsdp=32,tensor=2"),
    )]  # fmt: skip
    above, below = "\n".join(published.table(rows)).split("\n\n", 1)
    columns, _, *lines = below.split("\n")
    above = " ".join(above.split())
    assert above.startswith(f"Source: {row.address}. Chips: `v4:4x4x4`. Sequence: 2,048. Interval: ×1.0")
    assert above.endswith(". Planned differently: b.")
    assert columns == "| model | mesh | batch | measured, s | planned, s | error | notes |"
    assert [line.split(" | ")[1] for line in lines[:3]] == ["`fsdp=64`", "`fsdp=64`", "`fsdp=32,tensor=2`"]
    assert [line.split(" | ")[-1] for line in lines[:3]] == ["1 |", " |", "1 |"] and lines[3:] == ["", "1. a"]
    other = dataclasses.replace(row, values=row.values | {"source": "https://a.org/b"})
    assert "Source: " not in (text := "\n".join(published.table([row, other]))) and other.link in text


def test_a_table_names_fsdp_over_all_devices_once():
    """Catches a table without meshes that has a row with another mesh."""
    v5p = [row for row in published.plan_rows(SLICE) if row.one.topology.chip.key == "v5p"]
    rows = [row for row in v5p if row.mesh == f"fsdp={row.one.topology.devices}"]
    rows.append(dataclasses.replace(rows[0], values=rows[0].values | {"mesh": "fsdp=64"}))
    assert len(rows) > 2 and "| mesh |" in "\n".join(published.table(rows)), "fsdp=64 is not over all devices"
    others = [row for row in published.plan_rows(SLICE) if row.mesh == f"fsdp={row.one.topology.devices}"]
    text = "\n".join(published.table(others))
    assert "Mesh: `fsdp` over all devices." in text and "| mesh |" not in text


def test_every_step_is_on_the_page_of_its_kind():
    """Catches a row that the tables of its kind leave out, and one that is there twice."""
    rows = published.plan_rows(SLICE, "MoE")
    for kind in (SLICE, "MoE"):
        ours = [row for row in rows if row.kind == kind]
        lines = [line for line in published.tables(ours) if re.match(r"\| (`|\[`)", line)]
        assert sorted(re.search(r"`(.+?)`", line)[1] for line in lines) == sorted(row.name for row in ours)


@pytest.mark.slow
def test_the_page_and_the_constants_are_those_of_the_rows():
    """Catches a page that was not written again. Plans all rows."""
    rows = published.plan_rows()
    assert measured.SPEEDS.read_text() == speeds.to_text(speeds.speeds(rows)), "run `python -m bench.published`"
    pages = published.pages(rows)
    assert len(pages) == 1 + len(published.KINDS)
    assert not [path.name for path, text in pages.items() if path.read_text() != text], (
        "run `python -m bench.published`"
    )
    ours = published.trials(row for row in rows if speeds.trainer_of(row.source) not in speeds.UNUSUAL)
    number, mean, _, _, inside = published.errors(ours)
    assert number == 180 and mean < 0.045 and 0.72 <= inside <= 0.92
    assert max(choice for _, _, choice in published.regrets(rows).values()) <= 0.1


def test_the_readme_has_the_errors_of_the_page():
    """Catches an error in the README that is out of date, or that is only that of a good kind of step."""
    page, readme = published.PAGE.read_text(), " ".join((ROOT / "README.md").read_text().split())
    cells = re.findall(
        r"(?m)^\| \[([\w ,]+)\]\(\w+\.md\) \| (\d+) \| ([\d.]+)% [^|]+ \| [^|]+ \| \d+% \| ([\d.]+)% ", page
    )
    kinds = {kind: (number, planned, left) for kind, number, planned, left in cells}
    worst = max(kinds, key=lambda kind: float(kinds[kind][2]))
    total = re.search(r"plans (\d+) training steps", page)[1]
    assert len(kinds) == 7
    for kind in (SLICE, "GPUs", worst):
        number, planned, left = kinds[kind]
        assert f"{planned}% and {left}% ({number} steps)" in readme, kind
    assert f"{total} measured steps" in readme


def test_the_figure_names_its_numbers():
    """Catches a title with other numbers than the dots, and a dot that is missing."""
    svg, rows = pictures.planned_and_published(), published.plan_rows(SLICE)
    number, mean, _, worst, _ = published.errors(published.trials(rows))
    assert f"{number} published steps: mean error {mean:.1%}, largest {worst:.1%}" in svg
    assert svg.count("published ") >= len(rows) and all(f"{row.name} on {row.topology}" in svg for row in rows)
