"""The plot shows what metrics.jsonl contains, and a run that cannot be plotted is refused with a one-line error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from train import report
from utils import UserError

ROOT = Path(__file__).parents[2]
STEPS, LAYERS, EXPERTS = 7, 2, 5


def rows(moe=True, scale=1.0):
    """A short run: 7 train rows, 3 steps apart."""
    yield {"kind": "start", "time": 0.0, "step": 0, "params_total": 3_071_232,
           "params_active": 1_400_000 if moe else 3_071_232, "tokens_per_step": 11,
           "unigram_nats": 3.25, "bigram_nats": 2.5}  # fmt: skip
    for step in range(3, 3 * STEPS + 1, 3):
        row = {"kind": "train", "step": step, "tokens": 11 * step, "loss": scale * 20 / step, "grad_norm": 1 / step,
               "lr": 1e-3 * step, "tokens_per_s": 1000.0 + step, "mfu": 0.1}  # fmt: skip
        if moe:
            row["balance_loss"] = 1 + 1 / step
            row["tokens_per_expert"] = [[10 * layer + step + e for e in range(EXPERTS)] for layer in range(LAYERS)]
        yield row
    yield {"kind": "eval", "step": 21, "loss": 1.125, "bits_per_byte": 1.625, "tokens": 99, "full": True}
    yield {"kind": "end", "step": 21, "seconds": 4.0}


def write(directory, lines):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    return directory


def panels(*directories):
    figure = report.make_figure([report.read_run(directory) for directory in directories])
    return {axes.get_title(loc="left").split(" (")[0]: axes for axes in figure.axes}


def lines_of(axes):
    return [tuple(map(list, line.get_data())) for line in axes.get_lines()]


@pytest.mark.parametrize("moe", [True, False])
def test_the_curves_match_the_rows(tmp_path, moe):
    """Catches a curve of the wrong field, a shifted step, and a smoothed or dropped value."""
    run = write(tmp_path / "a", rows(moe))
    train = [row for row in rows(moe) if row["kind"] == "train"]
    steps = [row["step"] for row in train]
    drawn = panels(run)
    fields = {"Loss": "loss", "Gradient norm": "grad_norm", "Learning rate": "lr", "Speed": "tokens_per_s"}
    for title, field in fields.items() | ({("Balance loss", "balance_loss")} if moe else set()):
        assert (steps, [row[field] for row in train]) == lines_of(drawn[title])[0], title
    assert ([21], [1.125]) in lines_of(drawn["Loss"]), "the validation loss is not drawn"


def test_an_evaluation_before_the_first_step_is_drawn(tmp_path):
    """Catches a plot of fine-tuning without the loss that it starts from."""
    start, *rest = rows()
    loss = panels(write(tmp_path / "a", [start, rest[-2] | {"step": 0, "loss": 9.5}, *rest]))["Loss"]
    assert ([0, 21], [9.5, 1.125]) in lines_of(loss)


def test_each_source_of_a_mixture_has_a_curve(tmp_path):
    """Catches a source that is not drawn, or drawn at steps where it has no value, and several runs that mix theirs."""
    start, *rest = rows()
    first = rest[-2] | {"step": 9, "loss/code": 2.5}
    last = rest[-2] | {"loss/code": 1.5, "loss/prose": 3.5}
    run = write(tmp_path / "a", [start, *rest[:-2], first, last])
    loss = panels(run)["Loss"]
    drawn = {line.get_label(): tuple(map(list, line.get_data())) for line in loss.get_lines()}
    assert drawn["validation, code"] == ([9, 21], [2.5, 1.5]) and drawn["validation, prose"] == ([21], [3.5])
    labels = [text.get_text() for text in panels(run, run)["Loss"].get_legend().get_texts()]
    assert labels == ["a", "a"]


def test_reference_lines_are_at_the_entropies(tmp_path):
    """Catches a line at another height than its label says, and one for a text whose entropy is unknown."""
    loss = panels(write(tmp_path / "a", rows()))["Loss"]
    levels = [values[0] for steps, values in lines_of(loss) if steps == [0, 1]]
    assert levels == [3.25, 2.5]
    said = [text.get_text() for text in loss.texts]
    assert said == ["unigram entropy of the text: 3.25 nats", "bigram entropy of the text: 2.50 nats"]
    unknown = [row | {"unigram_nats": None, "bigram_nats": None} if row["kind"] == "start" else row for row in rows()]
    assert not panels(write(tmp_path / "b", unknown))["Loss"].texts


@pytest.mark.parametrize("losses", [
    [3.6, 3.5, 3.4, 3.3], [2.7, 2.68, 2.6, 2.55], [3.0, 2.9, 2.8], [5.6, 5.5], [3.27], [2.3, 2.4, 2.45, 2.52, 2.6],
], ids=str)  # fmt: skip
def test_nothing_hides_the_curve_of_a_short_run(tmp_path, losses):
    """Catches labels and a legend that cover the curve, a curve of one row, which is invisible without a dot, and steps
    that are not whole numbers."""
    first, *_ = rows()
    train = [row for row in rows() if row["kind"] == "train"][: len(losses)]
    train = [row | {"step": step, "loss": loss} for step, (row, loss) in enumerate(zip(train, losses, strict=True), 1)]
    run = report.read_run(write(tmp_path / "a", [first, *train]))
    figure = report.make_figure([run])
    figure.canvas.draw()
    axes = figure.axes[0]
    curve = axes.get_lines()[0]
    assert curve.get_marker() == "."
    steps = np.linspace(1, max(len(losses), 1.001), 200)
    points = axes.transData.transform(np.stack([steps, np.interp(steps, range(1, len(losses) + 1), losses)], axis=1))
    for covering in (*axes.texts, axes.get_legend()):
        box = covering.get_window_extent()
        assert not any(box.contains(*point) for point in points), covering
    low, high = axes.get_xlim()
    ticks = [step for axes in figure.axes[2:6] for step in axes.get_xticks() if low <= step <= high]
    assert ticks and all(step == round(step) for step in ticks)


@pytest.mark.parametrize("norms", [[0.8], [0.7, 0.9, 1.1], [0.6, 1.9], [0.02, 3.0]], ids=str)
def test_gradient_norms_can_be_read(tmp_path, norms):
    """Catches a logarithmic axis with a single tick, from which no value can be read."""
    first, *_ = rows()
    train = [row for row in rows() if row["kind"] == "train"][: len(norms)]
    train = [row | {"grad_norm": norm} for row, norm in zip(train, norms, strict=True)]
    figure = report.make_figure([report.read_run(write(tmp_path / "a", [first, *train]))])
    figure.canvas.draw()
    axes = next(axes for axes in figure.axes if axes.get_title(loc="left") == "Gradient norm")
    low, high = axes.get_ylim()
    ticks = zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
    labels = {text.get_text() for text, y in ticks if low <= y <= high}
    assert len(labels) >= 3, labels


def test_the_heat_map_is_load_over_an_equal_share(tmp_path):
    """Catches swapped layers, experts and steps, and a share computed over all layers together."""
    axes = panels(write(tmp_path / "a", rows()))["Tokens per expert"]
    (mesh,) = axes.collections
    want = np.empty((LAYERS * EXPERTS, STEPS))
    for column, row in enumerate(row for row in rows() if row["kind"] == "train"):
        for layer, tokens in enumerate(row["tokens_per_expert"]):
            want[layer * EXPERTS : (layer + 1) * EXPERTS, column] = np.array(tokens) / (sum(tokens) / EXPERTS)
    np.testing.assert_allclose(mesh.get_array(), want, rtol=1e-12)  # the same float64 division, in another order
    assert mesh.norm(1.0) == 0.5, "the middle of the color scale is not the balanced load"


def test_every_axis_has_a_unit(tmp_path):
    """Catches a panel without the unit of its numbers."""
    drawn = panels(write(tmp_path / "a", rows()))
    units = {title: (axes.get_xlabel(), axes.get_ylabel()) for title, axes in drawn.items()}
    color_bar = units.pop("")
    assert color_bar[1] == "tokens / equal share (1 = balanced)"
    assert units == {
        "Loss": ("step", "nats / token"),
        "Tokens per expert": ("step", "MoE layer (a row for each of its 5 experts)"),
        "Balance loss": ("step", "1 = balanced"),
        "Gradient norm": ("step", "global L2 norm"),
        "Learning rate": ("step", "factor on each update"),
        "Speed": ("step", "tokens / s"),
    }


def test_a_dense_run_has_no_expert_panels(tmp_path):
    """Catches empty panels in the plot of a model without experts."""
    assert set(panels(write(tmp_path / "a", rows(moe=False)))) == {"Loss", "Gradient norm", "Learning rate", "Speed"}


def test_the_title_names_run_size_and_result(tmp_path):
    """Catches a plot without a title, and a dense run whose parameter count is printed twice."""
    said = [report.summary(report.read_run(write(tmp_path / name, rows(name == "moe")))) for name in ("moe", "dense")]
    end = "231 tokens   ·   validation 1.125 nats/token, 1.625 bits/byte"
    assert said == [
        f"moe   ·   3.07M parameters, 1.4M active   ·   {end}",
        f"dense   ·   3.07M parameters   ·   {end}",
    ]


def test_several_runs_are_overlaid_with_their_names(tmp_path):
    """Catches a run that is left out, and a heat map of one run in a plot of two."""
    drawn = panels(write(tmp_path / "slow", rows()), write(tmp_path / "fast", rows(moe=False, scale=0.5)))
    assert "Tokens per expert" not in drawn
    assert [text.get_text() for text in drawn["Loss"].get_legend().get_texts()] == ["slow", "fast"]
    losses = [values for _, values in lines_of(drawn["Loss"]) if len(values) == STEPS]
    assert losses[1] == [loss / 2 for loss in losses[0]]
    assert len(drawn["Speed"].get_lines()) == 2


def test_rows_continue_after_a_resume(tmp_path):
    """Catches a report that starts over at the second start row."""
    first, *rest = rows()
    again = first | {"step": 9, "bigram_nats": 2.0}
    resumed = report.read_run(write(tmp_path / "a", [first, *rest[:3], again, *rest[3:]]))
    assert resumed.series("loss") == report.read_run(write(tmp_path / "b", rows())).series("loss")
    assert resumed.start["bigram_nats"] == 2.0


def test_a_half_written_last_line_is_skipped_with_a_note(tmp_path, capsys):
    """Catches a report that fails, or prints nothing, while a run is still writing."""
    run = write(tmp_path / "a", rows())
    whole = report.read_run(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert report.read_run(run) == whole
    number = len(list(rows())) + 1
    note = f"note: {run / 'metrics.jsonl'}:{number}: skipped the last line, which is incomplete\n"
    assert capsys.readouterr().out == note


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken\n", "metrics.jsonl:2: not JSON: '{broken'; fix or delete the line"),
        ("[1]\n", "metrics.jsonl:2: not a row with a kind: '[1]'; fix or delete the line"),
        ("\n", "metrics.jsonl:2: not JSON: ''; fix or delete the line"),
        ("[" * 99_999 + "\n", f"metrics.jsonl:2: not JSON: {'[' * 60!r}; fix or delete the line"),
        (
            '{"kind": "end"}\n',
            "metrics.jsonl:2: 'end' row without a step: '{\"kind\": \"end\"}'; fix or delete the line",
        ),
        (
            '{"kind": "eval", "step": 1, "loss": "low"}\n',
            "metrics.jsonl:2: 'eval' row whose loss is not a number: 'low'; fix or delete the line",
        ),
        (
            '{"kind": "no", "step": 1}\n',
            "metrics.jsonl:2: a row has kind='no'; known kinds: start, train, eval, end, skip, norms, noise",
        ),
        ('{"kind": "eval", "step": 1}\n', "metrics.jsonl:2: this 'eval' row has no loss, bits_per_byte"),
    ],
)
def test_a_bad_line_is_reported(tmp_path, line, message):
    """Catches a damaged file that is plotted without some rows, or refused without naming the line."""
    run = write(tmp_path / "a", rows())
    path = run / "metrics.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first + line + "".join(rest))
    with pytest.raises(UserError) as error:
        report.read_run(run)
    assert str(error.value) == f"{run}/{message}"


def test_an_unknown_image_format_is_refused(tmp_path):
    """Catches matplotlib's traceback for a misspelled extension."""
    with pytest.raises(UserError, match=r"a\.pgn: cannot write a figure ending in 'pgn'; known: .*png"):
        report.draw([write(tmp_path / "a", rows())], tmp_path / "a.pgn")


def command(*words, cwd):
    words, env = [sys.executable, "-m", "train.report", *words], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_command_writes_the_image_next_to_the_metrics(tmp_path):
    """Catches an image in the wrong place or not a PNG; several runs must not overwrite the first one's."""
    write(tmp_path / "a", rows())
    write(tmp_path / "b", rows(moe=False))
    for words, out in (("a", "a/report.png"), ("a b", "report.png"), ("a b --out both.png", "both.png")):
        done = command(*words.split(), cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {out}\n", "")
        assert (tmp_path / out).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, message",
    [
        (["absent"], "error: absent: no such directory; pass a run's directory, e.g. runs/laptop\n"),
        (["empty"], "error: empty has no metrics.jsonl; pass a run's directory, e.g. runs/laptop\n"),
        ([], "error: no run given; pass a run's directory, e.g. runs/laptop\n"),
        (["young"], "error: young/metrics.jsonl: nothing to plot yet: 1 rows of kind 'start' and 0 of kind 'train', "
                    "but at least one of each is needed\n"),
        (["good", "--out", "absent/a.png"], "error: absent/a.png: there is no directory absent\n"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_status_2(tmp_path, words, message):
    """Catches a traceback instead of a one-line error."""
    (tmp_path / "empty").mkdir()
    write(tmp_path / "young", list(rows())[:1])
    write(tmp_path / "good", rows())
    done = command(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, message)
