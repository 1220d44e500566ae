"""Test the search for the cheapest layout of inference that generates a token in a given time."""

import dataclasses
import json

import pytest

from config import preset
from plan.__main__ import main
from plan.answer import inference, serving
from plan.chips import hardware

WORDS = ("llama3_8b", "--inference", "--prompt", "700", "--answer", "90")
SEARCH = (*WORDS, "--topology", "v5e:2x4", "--search", "8")
REQUEST = inference.Request(700, 90)


def test_every_mesh_has_its_largest_batch_that_is_fast_enough(capsys):
    """Catches a smaller batch than possible, one that is too slow or too large, a layout that is skipped, and a cost
    of another number of chips, tokens or hours."""
    assert main([*SEARCH, "--token_ms", "12", "--price", "1.7", "--json", "-"]) == 0
    found, topology = json.loads(capsys.readouterr().out), hardware.Topology.parse("v5e:2x4")
    fit, large, _ = inference.search(preset("llama3_8b"), topology, REQUEST, None, 1)
    plans = {str(one.cfg.mesh): one for one, _ in fit}
    assert found["token_ms"] == 12 and found["nearest"] is None and found["too_large"] == len(large)
    assert len(found["layouts"]) + found["too_slow"] == len(fit) and found["too_slow"] > 0
    for row in found["layouts"]:
        one, batch = plans[row["mesh"]], row["batch"]
        step_s = sum(one.seconds(batch, "decode").values())
        assert step_s == pytest.approx(row["step_s"]) and step_s <= 12e-3 and row["fits"] and batch % one.unit == 0
        full = batch + one.unit > one.largest_batch
        assert full or sum(one.seconds(batch + one.unit, "decode").values()) > 12e-3
        tokens, spent = batch * 90, row["first_token_s"] + 89 * step_s
        assert row["chip_seconds_per_million_tokens"] == pytest.approx(8 * spent / tokens * 1e6)
        assert row["dollars_per_million_tokens"] == pytest.approx(1.7 * 8 * spent / 3600 / tokens * 1e6)
    costs = [row["dollars_per_million_tokens"] for row in found["layouts"]]
    assert costs == sorted(costs)


def test_memory_limits_a_batch_that_would_be_fast_enough():
    one = inference.plan(preset("llama3_8b", mesh="tensor=8"), "v5e:2x4", REQUEST, 4 * 2**30)
    assert serving.largest_batch(one, 1.0) == one.largest_batch > 1
    assert serving.largest_batch(dataclasses.replace(one, limit_bytes=2**30), 1.0) == 0


def test_a_time_that_no_layout_meets_names_the_nearest(capsys):
    """Catches exit status 0, an empty table, and a nearest layout that is not the fastest."""
    assert main([*SEARCH, "--token_ms", "2"]) == 1
    out = capsys.readouterr().out
    fit, *_ = inference.search(preset("llama3_8b"), hardware.Topology.parse("v5e:2x4"), REQUEST, None, 1)
    fastest = f"{1e3 * fit[0][1]['step_s']:.3f} ms"
    assert "no layout generates a token in at most 2.000 ms" in out and "┃" not in out
    assert f"nearest    {fit[0][0].cfg.mesh} on v5e:2x4: {fastest} per token with its smallest batch, " in out


def test_several_topologies_are_compared_by_dollars(capsys):
    """Catches one price for all chips, a topology that is left out, and a share of the prefill that is of no layout."""
    words = [*WORDS, "--token_ms", "15", "--price", "v5e=1.5,h100=2.5", "--topology", "v5e:2x4,h100:2"]
    assert main([*words, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    for row in rows:
        price = {"v5e:2x4": 1.5, "h100:2": 2.5}[row["topology"]]
        expected = price * row["chip_seconds_per_million_tokens"] / 3600
        assert row["dollars_per_million_tokens"] == pytest.approx(expected)
    assert {row["topology"] for row in rows} == {"v5e:2x4", "h100:2"}
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    share = 1 - rows[0]["with_prefill_tokens_per_s"] / rows[0]["tokens_per_s"]
    assert "dollars per M tokens" in text and f"prefill {share:.0%} of the time" in text


@pytest.mark.parametrize("words, why", [
    ((*SEARCH, "--token_ms", "0"), "--token_ms: '0' should be a number above 0: milliseconds per generated token"),
    ((*SEARCH, "--token_ms=-3"), "--token_ms: '-3' should be a number above 0"),
    ((*SEARCH, "--token_ms", "20ms"), "--token_ms: '20ms' should be a number above 0"),
    ((*SEARCH, "--token_ms", "20", "--price", "0"), "--price: '0' should be a number above 0"),
    ((*SEARCH, "--token_ms", "20", "--price", "h100=2"), "--price h100=2 has no price for v5e; add v5e=DOLLARS"),
    ((*SEARCH, "--token_ms", "20", "--batch", "4"), "pass --search N or several topologies, and no --batch or --plot"),
    ((*WORDS, "--topology", "v5e:2x4", "--token_ms", "20"), "mesh data=1 has one; pass a --mesh of 8 devices"),
    ((*WORDS, "--topology", "v5e:2x4", "--mesh", "fsdp=8", "--token_ms", "20"), "pass --search N or several"),
    ((*SEARCH, "--price", "2"), "--price has an effect only with --token_ms; add --token_ms 20 or drop --price"),
    ((*WORDS, "--topology", "v5e:2x4,h100:2", "--token_ms", "20"), "add --price, such as v5e=DOLLARS,h100=DOLLARS"),
    ((*WORDS, "--topology", "v5e:2x4,h100:2"), "--inference describes one topology"),
    ((*WORDS, "--topology", "cpu:8", "--search", "8", "--token_ms", "9"), "the speed of this machine is unknown"),
    ((*WORDS, "--topology", "2*v5e:2x4", "--search", "16", "--token_ms", "9"), "can span several slices; use v5e:2x4"),
    (("llama3_8b", "--token_ms", "9"), "--token_ms has an effect only with --inference"),
])  # fmt: skip
def test_invalid_input_is_refused_in_one_line(words, why, capsys):
    """Catches a flag that is silently ignored, and a traceback."""
    assert main([*words]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and why in found.err
