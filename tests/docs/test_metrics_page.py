"""The page of metrics: it describes every field that a run writes, and every curve of the report."""

import ast
import re

import pytest

import model
import optimizer
from config import preset
from tests.docs.commands import ROOT
from train import progress, report

PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
DESCRIBED = set(re.findall(r"`([^`]+)`", PAGE))
WRITERS = "main.py", "train/guard.py"


def keywords_of_rows() -> dict[str, set[str]]:
    """Return the fields that are keywords in calls like metrics.write("start", step, time=..), by kind of row."""
    found = {}
    for name in WRITERS:
        for call in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "write" and len(call.args) == 2:
                fields = {word.arg for word in call.keywords if word.arg}
                found.setdefault(ast.literal_eval(call.args[0]), set()).update(fields)
    return found


def train_fields() -> set[str]:
    """Return the fields of a train row of a MoE model with every auxiliary loss, without those that `to_row` drops."""
    cfg = preset("tiny", **{"model.z_loss": 1e-4, "model.label_smoothing": 0.1})
    of_step = {"lr", "grad_norm", "skipped_steps", "not_finite", "skipped_in_a_row"}  # of optimizer.step_fn
    names = {*model.metric_specs(cfg.model), *of_step}
    values = dict.fromkeys(names, 1.0) | {"tokens_per_expert": [[1.0]], "balance_loss": [1.0]}
    return {*progress.to_row(values, [1.0])} | {"tokens_per_s", "mfu", "peak_device_bytes"}


def test_the_page_describes_every_field():
    """Catches a field that is new or renamed, which a reader of metrics.jsonl looks for in vain."""
    written = keywords_of_rows()
    assert {*written} == {"start", "train", "end", "skip", "norms", "noise", "eval"} == {*report.FIELDS}
    noise = optimizer.noise_scale_of([1.0, 2.0], [1.0, 1.0], 1.0)
    evaluated = {"loss", "bits_per_byte", "tokens", "full"}
    fields = {*train_fields(), *noise, *evaluated, "gradient", "update", "parameter", *written["start"]}
    fields |= written["skip"] | written["end"]
    assert len(fields) > 35 and not fields - DESCRIBED


@pytest.mark.parametrize("title", ["Loss", "Tokens per expert", *(title for title, _ in report.PANELS.values())])
def test_the_page_describes_every_curve(title):
    """Catches a panel of report.png that the page doesn't explain."""
    assert re.search(rf"(?m)^\| \*\*{title}\*\*", PAGE)
