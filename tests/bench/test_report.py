"""Claims about `python -m bench.report`: it times what it says, keeps the other rows if one fails, and names nobody."""

import csv
import functools
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench import gpu, published, rates, report
from compile import ledger
from config import Config, replace
from plan import planner
from plan.chips import hardware

CPU = rates.Chip(True, jnp.float32, None, None)


def row(**fields) -> dict:
    return dict(name="8 x 8 x 8", seconds=2e-3, min_s=1e-3, max_s=3e-3, calls=4, amount=4e11, rate=200.0,
                unit="TFLOP/s", plan_s=1e-3, compile_s=1.0) | fields  # fmt: skip


def trained(**fields) -> dict:
    return row(name="moe, 16 x 1024 tokens", tokens_per_s=123456.7, mfu=0.25, start_s=3.0, compile_s=40.0,
               peak_bytes=3 * 2**30, plan_peak_bytes=2 * 2**30) | fields  # fmt: skip


ABOUT = {"device": "NVIDIA H200", "platform": "gpu", "devices": 1, "versions": {"jax": "0"}, "start_s": 2.5}


@pytest.fixture
def stubbed(monkeypatch):
    """Parts by a stub: a process that prints the lines given for its part. Returns them, and the list of parts."""
    parts, started = {"device": [ABOUT]}, []

    def command(spec):
        started.append(spec["part"])
        given = parts.get(spec["part"], [row()])
        program = given if isinstance(given, str) else "\n".join(f"print({json.dumps(one)!r})" for one in given)
        return [sys.executable, "-c", program]

    monkeypatch.setattr(report, "command", command)
    return parts, started


def run(tmp_path, capsys, *argv):
    status = report.main(["--out", str(tmp_path / "r.json"), *argv])
    return status, *capsys.readouterr()


# What is measured -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", rates.PARTS)
def test_each_row_is_a_time_and_a_rate(part):
    """Catches a rate of other work than was timed, and a part that cannot run on its arrays."""
    rows = list(rates.measure(part, small=True, seconds=60))
    assert rows and len({one["name"] for one in rows}) == len(rows)
    for one in rows:
        assert "error" not in one, one
        assert 0 < one["min_s"] <= one["seconds"] <= one["max_s"] and one["plan_s"] is None
        scale = {"TFLOP/s": 1e12, "GB/s": 1e9}[one["unit"]]
        assert one["rate"] * scale * one["seconds"] == pytest.approx(one["amount"])


@pytest.mark.parametrize("part", ["matmul", "attention"])
def test_the_compiler_removes_no_repetition(part):
    """Catches an operation that is computed once, or not at all, because nothing needs its result."""
    for case in rates.PARTS[part](CPU):
        calls = 4 * case.unroll
        shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape, _ in case.arrays]
        text = jax.jit(functools.partial(rates.repeat, case, calls)).lower(*shapes).compile().as_text()
        most = {"matmul": 1, "attention": 2}[part]  # in a single block, the masked half is computed too
        assert 1 <= ledger.read(text, {}).flops / (calls * case.amount) <= 1.001 * most, case.name


def test_the_plan_beside_a_rate_is_that_of_the_chip():
    """Catches a plan of one matmul for a pair, the peak of another chip, and the time of memory left out."""
    h200 = hardware.CHIPS["h200"]
    chip = rates.Chip(False, jnp.bfloat16, h200.peak_flops_per_s, h200.hbm_bytes_per_s)
    for part in ("matmul", "attention", "memory"):
        for case in rates.PARTS[part](chip):
            peak = h200.peak_flops_per_s if case.unit == "TFLOP/s" else h200.hbm_bytes_per_s
            assert case.amount / peak <= 1.001 * case.plan_s <= 2 * case.amount / peak, case.name
    small = rates.Chip(True, jnp.bfloat16, h200.peak_flops_per_s, h200.hbm_bytes_per_s)
    square = next(rates.matmuls(small))
    assert square.plan_s == 3 * 2 * 128 * 128 / h200.hbm_bytes_per_s  # two matrices read, one written


def test_a_model_is_trained_and_planned(monkeypatch):
    """Catches numbers of another run than 30 steps, a trace without kernels, and what a CPU process does not know
    filled in."""
    configs = gpu.model_configs
    shorter = lambda args: {name: replace(cfg, **{"model.n_layers": 1}) for name, cfg in configs(args).items()}
    monkeypatch.setattr(gpu, "model_configs", shorter)
    (found,) = report.train("moe", {"small": True, "began": time.time() - 5})
    assert len(found["losses"]) == 30 and found["losses"][-1] < found["losses"][0]
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(2 * 64)
    assert 5 < found["start_s"] < 60 and found["compile_s"] > 0 and found["other_s"] > 0
    assert found["kernels"] and "error" not in found["kernels"] and sum(found["kernels"].values()) > 0
    assert found["peak_bytes"] is found["mfu"] is found["plan_s"] is None and found["plan_peak_bytes"] > 0


def test_it_runs_from_end_to_end(tmp_path):
    """Catches processes that do not understand what they are told, and names of this machine in the file."""
    words = [sys.executable, "-m", "bench.report", "--device", "cpu", "--parts", "memory", "collectives", "--out",
             str(tmp_path / "r.json")]  # fmt: skip
    done = subprocess.run(words, cwd=report.ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "r.json").read_text()
    found = json.loads(text)
    assert found["platform"] == "cpu" and [*found["parts"]] == ["memory", "collectives"]
    for part, rows in found["parts"].items():
        for one in rows:
            assert one["name"] in done.stdout and math.isfinite(one["rate"]), part
    assert socket.gethostname() not in text and str(Path.home()) + "/" not in text and str(report.ROOT) not in text


# What fails, and what takes too long ----------------------------------------------------------------------------------


def test_a_row_that_fails_leaves_the_others(monkeypatch):
    """Catches a part that ends with its first row that does not fit in memory, and an error that names a folder."""
    good = next(rates.memory(CPU))

    def fails(*arrays):
        raise MemoryError(f"no space in {report.ROOT}/x, says {socket.gethostname()}")

    monkeypatch.setitem(rates.PARTS, "memory", lambda chip: iter([good._replace(step=fails, name="bad"), good]))
    bad, fine = rates.measure("memory", small=True, seconds=60)
    assert bad == {"name": "bad", "error": "MemoryError: no space in .../x, says ..."} and fine["rate"] > 0


def test_a_part_that_fails_leaves_the_others(stubbed, tmp_path, capsys):
    """Catches one crash that takes the numbers of minutes with it, and an exit status of 0 after it."""
    parts, started = stubbed
    parts["memory"] = f"print('a line of a library')\nprint({json.dumps(row())!r})\nraise SystemExit(3)"
    parts["moe"] = [trained()]
    status, out, _ = run(tmp_path, capsys, "--parts", "memory", "moe", "collectives")
    assert status == 1 and started == ["device", "memory", "moe"], "collectives need several devices"
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["parts"] == {"memory": [row(), {"name": "memory", "error": "exit status 3"}], "moe": [trained()]}
    assert "\n  memory                                                   failed: exit status 3\n" in out


def test_a_part_that_hangs_is_ended(stubbed):
    """Catches a device that is held for as long as a compiler hangs, and rows that were printed before, lost."""
    parts, _ = stubbed
    parts["moe"] = f"import time\nprint({json.dumps(row())!r}, flush=True)\ntime.sleep(60)"
    assert [*report.run("moe", False, 1, 3)] == [row(), {"name": "moe", "error": "ended after 3 s"}]


def test_what_there_is_no_time_for_is_named(stubbed, tmp_path, capsys):
    """Catches a report that takes longer than it may, and rows that are missing without a word; they are no failure."""
    _, started = stubbed
    status, out, _ = run(tmp_path, capsys, "--parts", "memory", "moe", "--minutes", "0.01")
    assert status == 0 and started == ["device"] and out.count("left out: out of time") == 2
    rows = list(rates.measure("matmul", small=True, seconds=-1))
    assert len(rows) == 3 and all(set(one) == {"name", "left_out"} for one in rows)


# What is printed, and refused -----------------------------------------------------------------------------------------


def test_the_table_says_what_was_measured(stubbed, tmp_path, capsys):
    """Catches a column under another's title, and measured / plan upside down."""
    parts, _ = stubbed
    parts |= {"matmul": [row(), row(plan_s=None, unit="GB/s")], "moe": [trained(), trained(mfu=None, peak_bytes=None)]}
    status, out, _ = run(tmp_path, capsys, "--parts", "matmul", "moe")
    head, _, titles, first, second, _, _, moe, detail, _, unknown = out.splitlines()
    assert status == 0 and head.startswith("1 x NVIDIA H200, 20") and head.endswith(", jax 0, ready after 2.5 s")
    assert titles.split() == "matmul ms rate plan ms / plan".split()
    assert first.split()[-5:] == ["2.000", "200.0", "TFLOP/s", "1.000", "2.00"]
    assert second.split()[-3:] == ["GB/s", "-", "-"] and moe.split()[:2] == ["moe,", "16"]
    assert detail.strip() == ("123,457 tokens/s, MFU 25.0%, start 3.0 s, compile 40.0 s, peak memory 3.00 GiB "
                              "(plan 2.00 GiB)")  # fmt: skip
    assert unknown.strip() == "123,457 tokens/s, start 3.0 s, compile 40.0 s, peak memory - (plan 2.00 GiB)"


REFUSED = {
    "--parts matmuls": "--parts matmuls: unknown part; did you mean 'matmul'? known: memory, dense_124m, moe, matmul, ",
    "--minutes 0": "minutes=0.0: must be above 0 and at most 60",
}


@pytest.mark.parametrize("argv", REFUSED)
def test_a_mistake_is_named(argv, stubbed, tmp_path, capsys):
    """Catches a mistake that is reported after minutes, or in a traceback."""
    status, out, err = run(tmp_path, capsys, *argv.split())
    assert (status, out) == (2, "") and err.startswith(f"error: {REFUSED[argv]}") and err.count("\n") == 1
    assert not stubbed[1]


def test_without_an_accelerator_it_says_so(stubbed, tmp_path, capsys):
    """Catches numbers of a CPU that pass for an accelerator's, and a folder that is missing, found out at the end."""
    parts, started = stubbed
    parts["device"] = [ABOUT | {"platform": "cpu"}]
    status, out, err = run(tmp_path, capsys)
    assert (status, out) == (2, "") and err.startswith("error: JAX finds no accelerator, only 'cpu'; ")
    parts["device"] = [ABOUT]
    status, out, err = run(tmp_path / "missing", capsys)
    assert (status, out) == (2, "") and "missing/r.json" in err and started == ["device"] * 2


def test_a_report_becomes_published_rows(capsys):
    """Catches a row that plans another model than the report measured, and columns in another order."""
    file = "bench/measured/h200_report.json"
    report_rows = json.loads((gpu.ROOT / file).read_text())["parts"]
    assert report.main(["--rows", str(gpu.ROOT / file)]) == 0
    names = [*published.read_rows()[0]]
    for line in csv.DictReader(capsys.readouterr().out.splitlines(), names):
        assert line["source"].endswith(file)
        assert line | {"source": file} in published.read_rows(), "docs/gpus.md says that these rows are there"
        (of,) = report_rows[line["name"]]
        wanted, found = (one.to_dict() for one in (Config.from_dict(of["config"]), published.config(line)))
        for part in ("model", "mesh", "work"):  # settings that are newer than the report are not in it
            names_then = of["config"][part]
            assert {name: found[part][name] for name in names_then} == {name: wanted[part][name] for name in names_then}
        assert float(line["value"]) == pytest.approx(of["seconds"], rel=1e-3)


@pytest.mark.parametrize("text, why", [
    (None, "No such file or directory"), ("{", "it is not a file of python -m bench.report"),
    ('{"device": "NVIDIA X", "parts": {}}', "the planner does not know 'NVIDIA X'; known: v3, v4"),
    ('{"device": "NVIDIA H200", "parts": {"dense_124m": [{"config": {"model": {"width": 3}}}]}}', "unknown setting"),
])  # fmt: skip
def test_no_rows_come_from_something_else(text, why, tmp_path, capsys):
    """Catches a traceback for a file that is no report."""
    file = tmp_path / "x.json"
    if text:
        file.write_text(text)
    assert report.main(["--rows", str(file)]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_the_page_shows_the_numbers_of_the_h200():
    """Catches a number on the page that differs from the file, and a ratio that nobody computed."""
    measured = gpu.ROOT / "bench" / "measured"
    parts = json.loads((measured / "h200_report.json").read_text())["parts"]
    rows = {row["name"]: row for part in parts.values() for row in part}
    text = " ".join((gpu.ROOT / "docs" / "gpus.md").read_text().split())
    name = "4 x 4096 tokens, 16 heads of 128, forward and backward"
    cudnn = next(row for found, row in rows.items() if found.startswith(f"{name},"))
    assert round(rows["sum of 1024 MiB"]["rate"], -2) == 4500 and "| 4,500 GB/s |" in text
    assert f"| {rows['8192 x 8192 x 8192']['rate']:.0f} TFLOP/s |" in text
    assert f"| {rows[name]['rate']:.0f} TFLOP/s | {cudnn['rate']:.0f} TFLOP/s (cuDNN, measured) |" in text
    for name in ("dense_124m", "moe"):
        row = rows[f"{name}, 16 x 1024 tokens"]
        planned_ms = 1e3 * planner.plan(Config.from_dict(row["config"]), "h200:1").step_s
        measured_ms = f"{1e3 * row['seconds']:.1f} ms, MFU {row['mfu']:.1%}"
        assert f"| {measured_ms} | {planned_ms:.1f} ms (planned, for any trainer) |" in text
    kernels = rows["dense_124m, 16 x 1024 tokens"]["kernels"]
    ours = sum(kernels[name] for name in ("forward_program", "key_grads_program", "query_grads_program"))
    assert f"attention kernels take {1e3 * ours:.1f} of the 58.0 ms" in text
    assert f"(`cutlass_80`) takes {1e3 * next(iter(kernels.values())):.1f} ms" in text and "cutlass_80" in next(
        iter(kernels)
    )
    assert sum(kernels.values()) / 58.0e-3 == pytest.approx(2 / 3, abs=0.01)
    dense, moe = (
        one for race in json.loads((measured / "h200_race.json").read_text()) for one in race["models"].values()
    )
    speeds = [dense[side]["tokens_per_s"]["median"] for side in ("torch", "ours")]
    assert "{:,.0f} tokens/s of `dense_124m`, and ours {:,.0f}: 0.70 of it".format(*speeds) in text
    assert {f"{one['ratio']:.2f}" for one in (dense, moe)} == {"0.70"}
    memory = (f"{one['ours']['peak_bytes'] / one['torch']['peak_bytes']:.0%}" for one in (dense, moe))
    assert "Ours used {} and {} of torch's memory".format(*memory) in text
