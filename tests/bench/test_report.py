"""Claims about `python -m bench.report`: it times what it says, keeps the other rows if one fails, and names nobody."""

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

from bench import gpu, rates, report
from compile import ledger
from config import replace
from plan.chips import hardware

CPU = rates.Chip(True, jnp.float32, None, None)


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


