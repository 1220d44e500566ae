"""Schedules have the published cost, their tables are valid, and every wrong entry is caught."""

import dataclasses
import itertools
import json
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from pipeline import schedules
from pipeline.__main__ import main
from pipeline.check import check
from pipeline.schedules import Op, Schedule, live_activations, lock_step, rows, schedule, simulate
from utils import UserError, new_picture

SIZES = [(S, M) for S in (1, 2, 3, 4, 8) for M in (S, 2 * S, 8 * S)]
NAMES = [("gpipe", 1), ("1f1b", 1), ("zb", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]


def bubble(name, S, M, v=1, F=1.0, B=1.0, W=0.0):
    return simulate(schedule(name, S, M, v), F, B, W).bubble


# Costs and order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("S, M", SIZES)
@pytest.mark.parametrize("B", [1, 2])
def test_bubbles_match_the_papers(S, M, B):
    """Catches a warm-up one pass too short, an extra wait, and an order that differs from the paper's."""
    plain = (S - 1) / (M + S - 1)
    assert bubble("gpipe", S, M, B=B) == pytest.approx(plain)  # arXiv:1811.06965
    assert bubble("1f1b", S, M, B=B) == pytest.approx(plain)  # arXiv:2006.09503
    for v in (1, 2, 3):  # arXiv:2104.04473, section 2.2
        assert bubble("interleaved", S, M, v, B=B) == pytest.approx((S - 1) / (v * M + S - 1))
    half = B / 2  # the backward pass in two halves: arXiv:2401.10241, table 1
    idle = (S - 1) * (1 + half - half)
    assert bubble("zb", S, M, B=half, W=half) == pytest.approx(idle / (M * (1 + B) + idle))


@pytest.mark.parametrize("S, M", [(2, 2), (2, 4), (4, 8), (8, 16)])
def test_the_zero_bubble_formula_holds_for_any_times(S, M):
    """Catches a formula that holds only if W is the shortest operation, as in the paper."""
    formula = re.search(r"I = \(S - 1\)\((.*?\))\)", schedules.zero_bubble.__doc__)[1]
    for F, B, W in itertools.product((0.5, 1, 3), (0.7, 1, 2), (0.6, 1, 1.5, 4)):
        idle = (S - 1) * eval(formula, {"F": F, "B": B, "W": W, "min": min})
        assert bubble("zb", S, M, F=F, B=B, W=W) == pytest.approx(idle / (M * (F + B + W) + idle)), (F, B, W)


@pytest.mark.parametrize("S, M", [(2, 4), (4, 8), (8, 32)])
def test_schedules_rank_as_published(S, M):
    """Catches a schedule without its published advantage: zero-bubble and interleaved beat 1F1B, which stores less than
    GPipe."""
    gpipe, one, two, zero = (bubble(*args, B=1, W=1) for args in
                             (("gpipe", S, M), ("1f1b", S, M), ("interleaved", S, M, 2), ("zb", S, M)))  # fmt: skip
    assert gpipe == pytest.approx(one) and zero < one and two < one
    assert live_activations(schedule("gpipe", S, M)) == [M] * S
    assert live_activations(schedule("1f1b", S, M)) == [min(S - s, M) for s in range(S)]
    assert live_activations(schedule("1f1b", S, M, lead=2)) == [min(2 * (S - s) - 1, M) for s in range(S)]
    assert live_activations(schedule("zb", S, M)) == [S] * S


@pytest.mark.parametrize("S, M", [(2, 6), (4, 8), (8, 16)])
def test_lock_step_needs_twice_the_lead(S, M):
    """Catches a table in which a stage waits for a message in flight: M + 2(S - 1) ticks are enough."""
    assert len(schedule("1f1b", S, M, lead=2).table) == M + 2 * (S - 1) < len(schedule("1f1b", S, M).table)
    assert lock_step(schedule("1f1b", S, M, lead=2), 1, 2) == (M + S - 1) * 3  # as fast as asynchronous 1F1B
    assert len(schedule("gpipe", S, M).table) == 2 * (M + S - 1)


def test_1f1b_matches_the_figure_of_the_paper():
    """Catches an order that differs from figure 4 of arXiv:2104.04473."""
    words = ["".join(map(str, order)) for order in schedule("1f1b", 4, 5).orders]
    assert words == ["F0F1F2F3B0F4B1B2B3B4", "F0F1F2B0F3B1F4B2B3B4", "F0F1B0F2B1F3B2F4B3B4", "F0B0F1B1F2B2F3B3F4B4"]
    assert "".join(map(str, schedule("zb", 3, 3).orders[1])) == "F0F1B0F2B1W0B2W1W2"
    first = "".join(map(str, schedule("interleaved", 2, 4, 2).orders[0]))
    assert first == "F0F1F0bF1bF2B0bF3B1bF2bB0F3bB1B2bB3bB2B3"


# Valid tables and wrong ones ------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    strategies.integers(1, 9), strategies.integers(1, 20), strategies.integers(1, 4), strategies.sampled_from(NAMES),
    strategies.sampled_from([1, 2]),
)  # fmt: skip
def test_every_size_gives_a_valid_table_or_an_error(S, M, v, name, lead):
    """Catches sizes that deadlock, buffers one slot too small, and messages that no stage stores."""
    name = name[0]
    try:
        sched = schedule(name, S, M, v, lead)
    except UserError:
        hypothesis.event("refused")
        refused = True
    else:
        refused = False
    assert refused == (v > 1 if name != "interleaved" else M % S > 0)
    if refused:
        return
    check(sched)
    check(schedules.forward_only(sched))
    assert sum(len(cell) for row in sched.table for cell in row) == S * M * v * (3 if name == "zb" else 2)
    for row in sched.table:
        for cell in row:
            assert [op.kind for op in cell] == sorted({op.kind for op in cell}, key="FBW".index)
    spans = simulate(sched, 1, 2, 3).spans
    for (op, s), (start, _) in spans.items():
        needed = schedules.required_op(op, s, S, v)
        assert needed is None or spans[needed][1] <= start


@pytest.mark.parametrize("name, v", NAMES)
def test_every_wrong_entry_is_caught(name, v):
    """Catches a check that skips an entry: each entry of each array is changed by itself and must raise."""
    sched = schedule(name, 2, 4, v, lead=2)
    found, slots = rows(sched)
    check(sched, (found, slots))
    missed = []
    for field in found._fields:
        array = getattr(found, field)
        for place in np.ndindex(array.shape):
            for value in {array[place] - 1, array[place] + 1, array.max()} - {array[place]}:
                wrong = array.copy()
                wrong[place] = value
                try:
                    check(sched, (found._replace(**{field: wrong}), slots))
                except ValueError:
                    continue
                missed.append((field, place, int(array[place]), int(value)))
    # The executor does not read these entries on an idle stage either.
    idle = {"forward_chunk": "forward", "forward_from": "forward", "backward_chunk": "backward",
            "backward_kept": "backward", "backward_from": "backward", "weight_chunk": "weight",
            "weight_kept": "weight", "weight_from": "weight"}  # fmt: skip
    harmless = lambda field, place: field in idle and getattr(found, idle[field])[place] == schedules.IDLE
    assert [one for one in missed if not harmless(*one[:2])] == []


def test_a_wrong_entry_is_named_in_plain_numbers():
    """Catches an error message with NumPy reprs such as np.int64(3)."""
    sched = schedule("zb", 2, 4, lead=2)
    found, slots = rows(sched)
    for field in found._fields:
        wrong = found._replace(**{field: np.full_like(getattr(found, field), 3)})
        with pytest.raises(ValueError, match="tick") as caught:
            check(sched, (wrong, slots))
        assert "np." not in str(caught.value), field


def test_every_wrong_order_is_caught():
    """Catches a check that accepts an order with a deadlock, a repeated pass or a missing one."""
    good = schedule("1f1b", 3, 4)
    change = lambda *order: dataclasses.replace(good, orders=(good.orders[0], tuple(order), good.orders[2]))
    order = list(good.orders[1])
    with pytest.raises(ValueError, match="stage 0 waits forever: B0 needs B0 of stage 1, which never runs"):
        check(change(order[2], *order[:2], *order[3:]))
    with pytest.raises(ValueError, match="stage 0 runs F1 twice"):
        check(
            Schedule(
                "own", 1, 2, 1, (tuple(Op(kind, m) for kind, m in (("F", 0), ("B", 0), ("F", 1), ("F", 1), ("B", 1))),)
            )
        )
    with pytest.raises(ValueError, match=r"B3 of stage 1 never runs|stage 0 waits forever: B3"):
        check(change(*order[:-1]))
    with pytest.raises(ValueError, match="F7 is not one of 4 microbatches"):
        check(Schedule("own", 1, 4, 1, ((Op("F", 7), Op("B", 7)),)))


@pytest.mark.parametrize("call, message", [
    (lambda: schedule("1f1bb", 2, 4), "unknown schedule '1f1bb'; did you mean '1f1b'? known: gpipe, 1f1b"),
    (lambda: schedule("1f1b", 2, 4, 2), "chunks=2: schedule '1f1b' has 1 chunk per stage; use chunks=1 or"),
    (lambda: schedule("zb", 2, 0), "stages=2, microbatches=0, chunks=1: each must be at least 1"),
    (lambda: schedule("interleaved", 4, 6, 2),
     "groups of stage=4, and microbatches=6 is not a multiple of 4 (6 % 4 = 2); use 4 or 8 microbatches"),
])  # fmt: skip
def test_impossible_schedules_are_refused(call, message):
    """Catches a wrong name or size that fails only later, in a loop over ticks."""
    with pytest.raises(UserError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("S, v", [(2, 2), (2, 3), (3, 2), (4, 2), (8, 2), (4, 4), (3, 5)])
def test_routes_move_layers_to_their_chunks(S, v):
    """Catches a round in which a stage sends twice, and a group of layers that arrives at the wrong stage."""
    rounds = schedules.routes(S, v)
    assert len(rounds) == v
    for edges in rounds:
        assert sorted(e[0] for e in edges) == sorted(e[2] for e in edges) == list(range(S))
    arrived = {
        (sender * v + group): chunk * S + receiver for edges in rounds for sender, group, receiver, chunk in edges
    }
    assert arrived == {h: h for h in range(S * v)}


# The command ----------------------------------------------------------------------------------------------------------


def test_the_tables_are_printed_as_text(capsys):
    """Catches a table whose columns are not ticks, the cost of another schedule than the one shown, and one form
    printed for both."""
    assert main(["show", "1f1b", "--stages", "3", "--microbatches", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b as published",
        "stage 0  F0 F1 F2   .    B0   F3B1 .    B2   .  B3",
        "stage 1  .  F0 F1   B0   F2B1 .    F3B2 .    B3 .",
        "stage 2  .  .  F0B0 F1B1 .    F2B2 .    F3B3 .  .",
        "bubble 33.3%, makespan 18; in lock-step 50.0% and 24 (10 ticks); stores 3 activations",
        "",
        "1f1b as run here",
        "stage 0  F0 F1 F2   F3   B0   B1   B2 B3",
        "stage 1  .  F0 F1   F2B0 F3B1 B2   B3 .",
        "stage 2  .  .  F0B0 F1B1 F2B2 F3B3 .  .",
        "bubble 33.3%, makespan 18; in lock-step 33.3% and 18 (8 ticks); stores 4 activations",
    ]


def test_show_interleaved_defaults_to_two_chunks(capsys):
    """Catches `show interleaved` with a default of one chunk, which is 1F1B."""
    assert main(["show", "interleaved"]) == 0
    shown = capsys.readouterr().out
    assert "F0b" in shown and shown.startswith("interleaved as published and run\n")
    with pytest.raises(SystemExit, match="2"):
        main(["show", "interleaved", "--chunks", "1"])
    assert "interleaved with --chunks 1 is 1f1b" in capsys.readouterr().err


def test_compare_prints_text_and_json(capsys):
    """Catches a split backward pass that is less work than an unsplit one, a line that is not JSON, and costs of the
    published form printed for the form that runs."""
    assert main(["compare", "--stages", "4", "--microbatches", "8", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(row["schedule"], row["form"]): row for row in rows}
    both, published, run = "as published and run", "as published", "as run here"
    first = {("gpipe", both): 8, ("1f1b", published): 4, ("1f1b", run): 7, ("interleaved", both): 11,
             ("zb", published): 4, ("zb", run): 7}  # fmt: skip
    assert {form: row["live"] for form, row in found.items()}.items() >= first.items()
    for row in rows:  # 8 microbatches of F + B + W = 3
        assert row["makespan"] * (1 - row["bubble"]) == pytest.approx(24)
        assert row["lock_step"] * (1 - row["lock_step_bubble"]) == pytest.approx(24)
    assert found["zb", published]["makespan"] == 27 and found["zb", run]["lock_step"] == 30
    assert main(["compare", "--stages", "4", "--microbatches", "6"]) == 0
    printed = capsys.readouterr()
    assert "use 4 or 8 microbatches" in printed.err
    assert [line.split()[0] for line in printed.out.splitlines()][:5] == ["gpipe", "1f1b", "1f1b", "zb", "zb"]


def test_draw_shows_the_schedule_that_runs(tmp_path, monkeypatch):
    """Catches a picture without the form that runs, if that differs from the published one. In lock-step a stage runs
    one operation at a time, and none before its input arrives."""
    drawn = []
    monkeypatch.setattr("pipeline.__main__.draw", lambda forms, path: drawn.append(forms))
    for name in schedules.SCHEDULES:
        assert main(["draw", name, "--out", str(tmp_path / "a.png")]) == 0
        for (op, s), (start, _) in (spans := list(drawn[-1].values())[-1][1].spans).items():
            needed = schedules.required_op(op, s, 4, 2 if name == "interleaved" else 1)
            assert needed is None or spans[needed][1] <= start
            assert not any(t == s and a < start < b for (_, t), (a, b) in spans.items())
    makespans = [[found.makespan for _, found in forms.values()] for forms in drawn]
    known = {"gpipe": [33], "1f1b": [33, 33], "interleaved": [28.5, 28.5], "zb": [27, 30]}
    assert dict(zip(schedules.SCHEDULES, makespans, strict=True)).items() >= known.items()
    assert all("as run here, in lock-step" in forms for forms in drawn if len(forms) > 1)


def test_a_schedule_is_drawn(tmp_path, capsys):
    """Catches an empty picture, and a traceback for a path that cannot be written."""
    from matplotlib import image

    out = tmp_path / "zb.png"
    assert main(["draw", "zb", "--out", str(out)]) == 0
    pixels = image.imread(out)[..., :3].reshape(-1, 3)
    for colour in ((0xF6, 0xD6, 0xA6), (0xE0, 0x8A, 0x1E), (0x94, 0x54, 0x0D)):  # forward, backward, weights
        assert np.mean(np.all(np.abs(pixels - np.array(colour) / 255) < 0.02, axis=1)) > 0.02
    for wrong, why in (("none/zb.png", "there is no directory"), ("zb.xyz", "known: png, svg, pdf, jpg, webp")):
        assert main(["draw", "zb", "--out", str(tmp_path / wrong)]) == 2
        assert f"error: {tmp_path / wrong}: " in (message := capsys.readouterr().err) and why in message


def test_every_schedule_has_its_own_legend(tmp_path):
    """Catches a legend "backward, inputs" for schedules whose backward pass computes weight gradients too."""
    from pipeline.draw import paint

    figure = new_picture()
    for axes, name in zip(figure.subplots(len(schedules.SCHEDULES)), schedules.SCHEDULES, strict=True):
        paint(axes, schedule(name, 2, 4, 2 if name == "interleaved" else 1), 1, 1, 1, 6)
        wait = ["weight gradients, if delayed"] if name == "zb" else []
        assert axes.get_legend_handles_labels()[1] == ["forward", "backward", *wait], name
