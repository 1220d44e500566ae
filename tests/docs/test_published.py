"""The planner against training steps that others measured and published."""

import csv

import pytest

from docs import pictures


def test_the_planner_predicts_published_steps():
    """Catches a change that makes plans of real runs worse. No constant was fitted to these steps."""
    steps = pictures.published_steps()
    mean, worst = pictures.published_errors()
    assert len(steps) == 7 and len({step.chip for step in steps}) == 3
    assert mean <= 0.065 and worst <= 0.15, [(step.name, f"{step.error:+.1%}") for step in steps]


def test_the_seconds_follow_from_the_published_flops():
    """Catches a row whose seconds and TFLOP/s disagree, and a row without a source."""
    for row in csv.DictReader(pictures.PUBLISHED.read_text().splitlines()):
        size = {name: int(row[name]) for name in row if row[name].isdecimal()}
        heads, D = size["n_heads"], size["d_model"]
        attention = D * size["d_head"] * (2 * heads + 2 * size["n_kv_heads"])
        matmuls = size["n_layers"] * (attention + 3 * D * size["d_ff"]) + D * size["vocab"]
        pairs = 12 * size["n_layers"] * size["seq_len"] * heads * size["d_head"]
        flops = (6 * matmuls + pairs) * size["sequences_per_chip"] * size["seq_len"]
        assert float(row["step_s"]) == pytest.approx(flops / (1e12 * float(row["tflops_per_chip"])), rel=0.01), row
        assert row["source"].startswith("configs/tpu/")


def test_the_figure_names_its_numbers():
    """Catches a title with other numbers than the dots, and a dot that is missing."""
    svg, (mean, worst) = pictures.planned_and_published(), pictures.published_errors()
    assert f"mean error {mean:.1%}, largest {worst:.1%}" in svg
    assert svg.count("published ") >= 7 and all(step.name in svg for step in pictures.published_steps())
