"""Test the comparison of several topologies."""

import json
import random
import sys

import pytest

from plan.__main__ import main
from plan.answer import front

FLAGS = ("--data.batch_size", "32", "--data.seq_len", "128")


def test_the_front_has_what_no_other_layout_dominates():
    """Catches a layout on the front that another one dominates, also if two are equally fast."""
    rng = random.Random(5)
    layouts = [front.Layout(None, rng.randint(1, 9), rng.randint(1, 7), rng.randint(1, 5)) for _ in range(60)]

    def dominates(a, b):
        return a.scores != b.scores and all(x <= y for x, y in zip(a.scores, b.scores, strict=True))

    expected = {one.scores for one in layouts if not any(dominates(other, one) for other in layouts)}
    found = front.pareto(layouts)
    assert {one.scores for one in found} == expected
    assert len(found) == len(expected)
    assert found == sorted(found, key=lambda one: one.seconds)


def test_the_command_compares_topologies(tmp_path, capsys):
    path, picture = tmp_path / "front.json", tmp_path / "front.svg"
    assert main(["laptop", "--topology", "v4:2x2x1,h100:4", "--price", "v4=3.2,h100=2", *FLAGS, "--json", str(path),
                 "--plot", str(picture)]) == 0  # fmt: skip
    found, text = json.loads(path.read_text()), capsys.readouterr().out
    assert {one["topology"] for one in found["fastest"]} == {"v4:2x2x1", "h100:4"}
    for one in found["fastest"]:
        price = {"v4:2x2x1": 3.2, "h100:4": 2}[one["topology"]]
        assert one["dollars_per_million_tokens"] == pytest.approx(price * 4 * one["seconds"] / 3600 / (32 * 128 / 1e6))
        assert one["mesh"] in text
    fastest = min(found["fastest"], key=lambda one: one["seconds"])
    assert found["front"][0]["seconds"] == fastest["seconds"]
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("call, message", [
    (("--topology", "v4:2x2x1,v5e:2x2", "--explain"), "--explain describes one topology; drop it, or pass"),
    (("--topology", "v4:2x2x1,cpu:4"), "--topology cpu:4: the speed of this machine is unknown"),
    (("--topology", "v4:2x2x1,v5:2x2"), "unknown chip 'v5'"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--memory", "1e-4", "--price", "0"), "--price: '0' should be a number above 0"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--price", "v4=3"), "--price v4=3 has no price for v5e; add v5e=DOLLARS"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--memory", "0.0001"), "no layout fits on any topology; use more chips"),
])  # fmt: skip
def test_invalid_comparisons_are_refused(call, message, capsys):
    assert main(["laptop", *FLAGS, *call]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def run(capsys, *words) -> str:
    """Return what a command that succeeds prints to stderr."""
    assert main(["tiny", *words]) == 0
    return capsys.readouterr().err


@pytest.mark.parametrize("words, bars", [
    (("--topology", "h100:2", "--search", "2"), ("meshes of h100:2", "settings on h100:2")),
    (("--topology", "h100:2,a100:2"), ("meshes of h100:2", "meshes of a100:2")),
    (("--topology", "h100:2", "--search", "2", "--inference", "--token_ms", "9"), ("batches on h100:2",)),
])  # fmt: skip
def test_a_search_shows_its_progress_on_a_terminal_only(capsys, monkeypatch, words, bars):
    """Catches a search without a sign of life, and a bar in a log file or beside JSON."""
    assert run(capsys, *words) == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert run(capsys, *words, "--json", "-") == ""
    err = run(capsys, *words)
    assert all(bar in err for bar in bars), err
