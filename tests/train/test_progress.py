"""The progress of training steps, and of what takes long before them, on a terminal and in a file."""

import io
import sys
import time
import types

import pytest
from rich.console import Console

from config import preset
from plan.chips import hardware
from progress import show_busy, show_progress, track
from train import progress


def test_mfu_is_printed_if_the_peak_is_known(capsys):
    """Catches an MFU based on a peak measured on a busy CPU, which trebles with the load; and none on a TPU."""
    with progress.progress_bar(preset("tiny"), 0) as show:
        show.add_row(1, {"loss": 4.0, "tokens_per_s": 1234.5})
        show.add_row(2, {"loss": 3.0, "tokens_per_s": 1234.5, "mfu": 0.423})
    one, two = capsys.readouterr().out.splitlines()
    assert one.endswith("loss 4.000  1,234 tokens/s") and two.endswith("loss 3.000  1,234 tokens/s  MFU 42.3%")
    assert "cpu" not in hardware.PEAK_FLOPS_PER_S and hardware.PEAK_FLOPS_PER_S["TPU v4"] == 275e12


class Loss:
    """A loss that is available once `ready` is set."""

    def __init__(self):
        self.ready = False

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        assert self.ready, "the host waits for a step that the device has not finished"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test advances."""
    now = types.SimpleNamespace(s=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


def test_the_bar_moves_with_each_step_and_has_an_eta_from_the_second(clock):
    """Catches a bar that moves only with a row, an ETA that needs many steps or steps of less than 30 s, and a bar that
    waits for the device."""
    console, losses = Console(file=io.StringIO(), force_terminal=True), [Loss() for _ in range(5)]
    bar = progress.StepBar(12, 2, console)
    bar.get_time = lambda: clock.s
    shown, eta = [], []
    for step, loss in enumerate(losses, 3):
        bar.add_step(step, loss)
    for loss in losses:
        bar.get_renderables()
        shown.append(bar.tasks[0].completed)
        eta.append(bar.tasks[0].time_remaining)
        clock.s, loss.ready = clock.s + 40, True
    assert shown == [2, 3, 4, 5, 6]
    assert eta == [None, None, 8 * 40, 7 * 40, 6 * 40]
    bar.add_row(7, {"loss": 4.0, "tokens_per_s": 10.0})
    assert bar.tasks[0].description == "loss 4.000  10 tokens/s"


@pytest.mark.parametrize("step_s, said", [(40.0, ["step     4/12  40 s per step, about 5 minutes left"]), (1.0, [])])
def test_lines_show_the_time_to_go_after_two_steps(clock, capsys, step_s, said):
    """Catches minutes without a sign of life if the output is a file, and a host that waits for the step that has just
    started, so that the device is idle."""
    lines, losses = progress.StepLines(12, 2), [Loss() for _ in range(6)]
    for step, loss in enumerate(losses, 3):
        lines.add_step(step, loss)  # fails if it waits for `loss`
        clock.s, loss.ready = clock.s + step_s, True
    assert capsys.readouterr().out.splitlines() == said


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_task_is_named_while_it_runs(monkeypatch, capsys):
    """Catches a command that is silent while it compiles, and escape codes or changing lines in a file."""
    with show_busy("compiling"):
        assert capsys.readouterr().out == "compiling ...\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with show_busy("compiling"):
        time.sleep(0.2)  # rich draws in a thread
    assert "compiling" in sys.stderr.getvalue() and "0:00:00" in sys.stderr.getvalue()
    assert capsys.readouterr().out == ""


def test_a_long_evaluation_shows_the_time_left(clock, capsys):
    """Catches an evaluation of minutes without a line, in a file; and `1 minutes`."""
    with show_progress("validation batches", 100) as advance:
        for seconds in (30, 31, 1, 240):
            clock.s += seconds
            advance()
    assert capsys.readouterr().out.splitlines() == [
        "validation batches 2 of 100, about 50 minutes left",
        "validation batches 4 of 100, about 121 minutes left",
    ]


def test_the_items_of_a_search_are_counted(clock, capsys):
    """Catches items that are lost or not counted, and a search of minutes without a line in a log."""
    found = []
    for item in track(["a", "b", "c"], "meshes"):
        clock.s += 61
        found.append(item)
    assert found == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "meshes 1 of 3, about 2 minutes left\nmeshes 2 of 3, about 61 s left\n")
