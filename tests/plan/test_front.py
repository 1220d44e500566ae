"""Test the comparison of several topologies."""

import json
import random
import sys
from types import SimpleNamespace

import pytest

from plan.__main__ import main, next_commands
from plan.answer import front

FLAGS = ("--data.batch_size", "32", "--data.seq_len", "128")


def test_the_front_has_what_no_other_layout_dominates():
    """Catches a layout on the front that another one dominates, also if two are equally fast."""
    rng = random.Random(5)
    plan = lambda: SimpleNamespace(step_s=rng.randint(1, 9), peak_bytes=rng.randint(1, 7), limit_bytes=7)
    layouts = [front.Layout(plan(), rng.randint(1, 5)) for _ in range(60)]

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
    assert [one["topology"] for one in found["answers"]] == ["v4:2x2x1", "h100:4"]
    for one in found["answers"]:
        price = {"v4:2x2x1": 3.2, "h100:4": 2}[one["topology"]]
        assert one["dollars_per_million_tokens"] == pytest.approx(price * 4 * one["seconds"] / 3600 / (32 * 128 / 1e6))
        assert f"{one['topology']}: mesh {one['mesh']}" in text and f"step {1e3 * one['seconds']:.3f} ms" in text
        assert f"how sure: {one['estimate']['source']}" in text
    fastest = min(one["seconds"] for one in found["answers"])
    assert found["front"][0]["seconds"] <= fastest <= 1.03 * found["front"][0]["seconds"]
    assert "<svg" in picture.read_text()


BIG = ("llama3_8b", "--data.batch_size", "64", "--data.seq_len", "4096", "--topology")


def test_one_command_tells_days_and_dollars_of_each_topology(capsys):
    """Catches a cost of another step, an interval that is missing, and a topology on which nothing fits that is left
    out or ends the command."""
    given = ("--tokens", "1.5T", "--price", "v4=3,h100=$2.5", "--mesh", "fsdp=16,tensor=4", "--work.remat", "full")
    words = [*BIG, "v4:4x4x4,h100:64", *given]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json", "-"]) == 0
    for one in json.loads(capsys.readouterr().out)["answers"]:
        cost, estimate = one["budget"], one["estimate"]
        days = 1.5e12 / (64 * 4096) * one["seconds"] / 86400
        assert one["mesh"] == "fsdp=16,tensor=4" and cost["days"] == pytest.approx(days, rel=1e-3)
        dollars = days * 24 * 64 * {"v4:4x4x4": 3, "h100:64": 2.5}[one["topology"]]
        assert cost["dollars"] == pytest.approx(dollars, rel=1e-3)
        low, high = (cost["days"] * estimate[end] / one["seconds"] for end in ("low", "high"))
        assert f"{cost['days']:,.1f} days ({low:,.1f} to {high:,.1f}); ${cost['dollars'] / 1e6:,.2f}M (" in text


def test_a_topology_on_which_nothing_fits_names_the_number_of_chips(capsys):
    """Catches a comparison that ends because one topology is too small."""
    assert main([*BIG, "v4:4x4x4,h100:1", "--mesh", "fsdp=64"]) == 2
    assert "mesh fsdp=64 has 64 devices" in capsys.readouterr().err
    words = [*BIG, "v5p:2x2x1,h100:2", "--tokens", "1T", "--work.remat", "full", "--work.gather", "layer"]
    assert main(words) == 0
    v5p, *_, h100, last, note = capsys.readouterr().out.split("Pareto")[0].splitlines()
    assert v5p.startswith("v5p:2x2x1: mesh ") and last.startswith("In parentheses")
    assert h100.startswith("h100:2: nothing fits; you need about ") and h100.endswith("of these chips")
    assert note == "note       days and dollars are those of a run that never stops; --goodput counts failures"


@pytest.mark.parametrize("call, message", [
    (("--topology", "v4:2x2x1,v5e:2x2", "--explain"),
     "--explain describes one topology; pass one of them, such as --topology v4:2x2x1, or drop --explain"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--trainer", "megatron"), "--trainer megatron has an effect only on GPUs"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--goodput", "0.9"), "--goodput has an effect only with --tokens; add"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--tokens", "15X"), "--tokens: '15X' should be a number above 0: tokens to"),
    (("--topology", "v4:2x2x1,cpu:4"), "--topology cpu:4: the speed of this machine is unknown"),
    (("--topology", "v4:2x2x1,v5:2x2"), "unknown chip 'v5'"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--memory", "1e-4", "--price", "0"), "--price: '0' should be a number above 0"),
    (("--topology", "v4:2x2x1,v5e:2x2", "--price", "v4=3"), "--price v4=3 has no price for v5e; add v5e=DOLLARS"),
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


def test_a_name_on_the_hub_is_that_of_a_preset(capsys):
    """Catches a refusal of a model that the planner knows under another name, and a command that names it so."""
    words = ["--topology", "v5p:4x4x4", "--mesh", "fsdp=64", "--data.batch_size", "64", "--json", "-"]
    found = []
    for name in ("mistralai/Mixtral-8x7B-v0.1", "mixtral_8x7b"):
        assert main([name, *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_verifying_ranks_by_the_compiled_schedule(capsys, monkeypatch):
    """Catches a layout that does not fit when it is compiled at the top, and a command for another layout than the
    first."""
    from plan import verify

    times = iter((None, 0.4, 0.3))

    def verified(plan):
        seconds = next(times)
        return verify.Verified(plan, seconds, seconds and 2**30, refusal="" if seconds else "out of memory")

    monkeypatch.setattr(verify, "verify", verified)
    assert main(["laptop", *FLAGS, "--topology", "v4:2x2x1", "--verify", "3", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["simulated_s"] for one in found["verified"]] == [0.3, 0.4, None]
    assert [one["mesh"] for one in found["verified"][:2]] == [one["mesh"] for one in found["layouts"][:2]]
    commands = next_commands(["laptop", *FLAGS, "--verify", "3"], found["layouts"][0])
    assert not [line for line in commands if "--verify" in line], "the commands plan and train the layout found"
    for words in (["--mesh", "fsdp=4"], ["--topology", "h100:4"]):
        assert main(["laptop", *FLAGS, "--topology", "v4:2x2x1", "--verify", "3", *words]) == 2
        assert "--verify 3 compiles the first layouts of a search for their TPU" in capsys.readouterr().err
