"""Measure what an accelerator reaches, and compare each number with the planner's.

`python -m bench.report` measures matmuls and attention by shape, passes over memory, collectives if there are several
devices, and 30 training steps of each model of `bench/gpu.py`. It prints a table, and writes all numbers to a JSON file
without names of hosts or users.

Each part runs in a separate process, and the file is written after every row. So if a part fails or hangs, the other
parts' numbers are kept. `rates.py` has the operations that are timed alone.

Without an accelerator, `--device cpu` tests the report itself on small shapes.
"""

import contextlib
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from bench import gpu
from bench.step import random_batch, say
from config import Config, check
from config.fields import Range
from devices import simulate_devices
from utils import UserError, exit_status, suggest

ROOT = gpu.ROOT
STEPS = 30
TRACED_STEPS = 3  # with the profiler, after the timed steps
KERNELS = 12  # report this many kernels of a step, those that take longest


RATES = ("memory", "matmul", "attention", "collectives")  # keys of rates.PARTS
PARTS = ("memory", *gpu.MODELS, *RATES[1:])
Minutes = Annotated[float, Range(lambda x: 0 < x <= 60, "must be above 0 and at most 60")]


@dataclass(frozen=True)
class Arguments:
    parts: tuple[str, ...] = ()  # parts to measure, in this order; none: all of them
    minutes: Minutes = 8.0  # begin nothing after this time
    out: str = "report.json"  # file to write
    device: Literal["accelerator", "cpu"] = "accelerator"  # cpu: small shapes, to test the report
    rows: str = ""  # measure nothing, and print the training steps of this report as rows of bench/published.csv


HELP = """e.g. python -m bench.report
     python -m bench.report --parts matmul attention --minutes 2
     python -m bench.report --device cpu      # without an accelerator: test the report
     python -m bench.report --rows report.json >> bench/published.csv

Measure what an accelerator reaches, and compare each number with the planner's."""


def parse(argv: list[str]) -> Arguments:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.report", description=HELP, use_underscores=True)
    check(args)
    for name in args.parts:
        if name not in PARTS:
            raise UserError(f"--parts {name}: unknown part; {suggest(name, PARTS)}")
    return args


# Models ---------------------------------------------------------------------------------------------------------------


def train(name: str, spec: dict) -> Iterator[dict]:
    """Yield one row: 30 steps of a model of `bench/gpu.py` on one device, and the plan of its step."""
    import jax

    from bench import rates

    device, small = jax.devices()[0], spec["small"]
    start_s, kernels = time.time() - spec["began"], {}
    args = gpu.Arguments((name,), steps=STEPS - 1 - gpu.WARMUP, batch_size=2 if small else 16,
                         device="cpu" if small else "gpu")  # fmt: skip
    cfg = gpu.model_configs(args)[name]
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "batch.npz", **random_batch(cfg))
        of = dict(config=cfg.to_dict(), batch=f"{folder}/batch.npz", device=device.platform, warmup=gpu.WARMUP,
                  steps=args.steps)  # fmt: skip
        begin = time.perf_counter()
        found = gpu.measure(of, lambda *step: kernels.update(seconds_by_kernel(*step, folder)))
        measure_s = time.perf_counter() - begin
    step_s = cfg.data.tokens_per_step / found["tokens_per_s"]
    row = {"name": f"{name}, {cfg.data.batch_size} x {cfg.data.seq_len} tokens", "seconds": step_s, "plan_s": None,
           "rate": found["flops_per_token"] * found["tokens_per_s"] / 1e12, "unit": "TFLOP/s", "start_s": start_s,
           "compile_s": found["compile_s"], "other_s": measure_s - found["compile_s"] - args.steps * step_s,
           "kernels": kernels, "config": cfg.to_dict()}  # fmt: skip
    row |= {key: found[key] for key in ("tokens_per_s", "peak_bytes", "params", "flops_per_token", "losses")}
    say(f"  {found['tokens_per_s']:,.0f} tokens/s")
    try:
        row |= plan_step(cfg, device, step_s)
    except Exception as error:
        yield {"name": f"plan of {name}", "error": rates.describe(error)}
    yield row


def plan_step(cfg: Config, device, step_s: float) -> dict:
    """Return what the planner predicts for a step on one device, and the MFU of the measured step."""
    from plan import planner
    from plan.chips import hardware

    one = planner.plan(cfg, hardware.topology_of_devices([device]))
    return {"plan_s": one.step_s, "estimate": one.estimate and asdict(one.estimate),
            "lower_bound_s": one.lower_bound_s, "plan_peak_bytes": one.peak_bytes,
            "plan_memory_bytes": one.memory_bytes, "mfu": one.topology and one.mfu(step_s)}  # fmt: skip


def seconds_by_kernel(step, state, batch, folder: str) -> dict:
    """Run a few steps with the profiler. Returns the seconds per step of the kernels that take longest, or the error.

    Numbers at the end of their names are dropped, so the kernels of all layers count together.
    """
    import jax

    from bench import rates

    lines, found = {"/device:GPU": "Stream", "/device:TPU": "XLA Ops"}, Counter()
    try:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_STEPS):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            wanted = lines.get(plane.name[:11], "")
            for event in (event for line in plane.lines if line.name.startswith(wanted) for event in line.events):
                if wanted or "hlo_op" in dict(event.stats):
                    found[event.name.rstrip("0123456789._")] += event.duration_ns / 1e9 / TRACED_STEPS
    except Exception as error:
        return {"error": rates.describe(error)}
    return dict(found.most_common(KERNELS))


# The parts, each in a separate process --------------------------------------------------------------------------------


def about_device(spec: dict) -> Iterator[dict]:
    """Yield what the file says of the machine, and the seconds from the process's start until a device has answered."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    jnp.zeros(8).block_until_ready()
    start_s, version = time.time() - spec["began"], importlib.metadata.version
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    yield {"device": device.device_kind, "platform": device.platform, "devices": jax.device_count(),
           "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"), "cores": os.cpu_count(),
           "versions": versions | {"runtime": ", ".join(device.client.platform_version.splitlines())[:200]},
           "start_s": start_s}  # fmt: skip


def one_part(spec: dict) -> Iterator[dict]:
    """Yield the rows of one part; if it fails outside of its rows, a row with the error."""
    if spec["small"] and spec["part"] == "collectives":
        simulate_devices(2)
    from bench import rates

    try:
        if spec["part"] in RATES:
            yield from rates.measure(spec["part"], spec["small"], spec["seconds"])
        else:
            yield from train(spec["part"], spec) if spec["part"] in gpu.MODELS else about_device(spec)
    except Exception as error:
        yield {"name": spec["part"], "error": rates.describe(error)}


def command(spec: dict) -> list[str]:
    """Return the command of one part. It prints its rows, each as a line of JSON."""
    return [sys.executable, "-m", "bench.report", "--one", json.dumps(spec)]


def run(part: str, small: bool, seconds: float, most: float) -> Iterator[dict]:
    """Yield the rows of a part from a separate process, which begins no row after `seconds` and is ended after `most`.

    Yields an error for a process that ends any other way, or that is ended.
    """
    spec = {"part": part, "small": small, "seconds": seconds, "began": time.time()}
    env = os.environ | ({"JAX_PLATFORMS": "cpu"} if small else {})
    with subprocess.Popen(command(spec), cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(most, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # a line that a library prints
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
            status, late = process.wait(), not timer.is_alive()
        finally:
            timer.cancel()
            process.kill()
    if status:
        yield {"name": part, "error": f"ended after {most:.0f} s" if late else f"exit status {status}"}


def measure(args: Arguments) -> dict:
    """Measure all parts, and write the file after every row. Raises: UserError if there is no accelerator."""
    end, small = time.monotonic() + 60 * args.minutes, args.device == "cpu"
    (about, *_) = run("device", small, 0, 60 * args.minutes)
    if "error" in about:
        raise UserError(f"JAX cannot use this machine's devices: {about['error']}")
    if about["platform"] == "cpu" and not small:
        raise UserError("JAX finds no accelerator, only 'cpu'; install its plugin with make extra-gpu or make "
                        "extra-tpu, or pass --device cpu, which measures small shapes")  # fmt: skip
    found = about | {"date": datetime.date.today().isoformat(), "parts": {}}
    save = lambda: Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save()
    parts = [part for part in args.parts or PARTS if part != "collectives" or about["devices"] > 1 or small]
    for number, part in enumerate(parts):
        rows, begin = found["parts"].setdefault(part, []), time.monotonic()
        say(f"{part} ...")
        left = end - begin
        if left < 5 and not small:
            rows.append({"name": part, "left_out": "out of time"})
            continue
        for row in run(part, small, left / (len(parts) - number), max(left, 1)):
            rows.append(row)
            save()
        say(f"  {part}: {time.monotonic() - begin:.0f} s")
    save()
    return found


# The table ------------------------------------------------------------------------------------------------------------


def line(row: dict) -> str:
    """Return a row of the table: what was measured, its time and rate, the plan's time, and measured / plan."""
    if why := row.get("error") or row.get("left_out"):
        return f"  {row['name'][:56]:56} {'failed' if 'error' in row else 'left out'}: {why.splitlines()[0][:90]}"
    plan_s = row["plan_s"]
    plan = f"{1e3 * plan_s:>10.3f} {row['seconds'] / plan_s:>7.2f}" if plan_s else f"{'-':>10} {'-':>7}"
    text = f"  {row['name'][:56]:56} {1e3 * row['seconds']:>10.3f} {row['rate']:>9,.1f} {row['unit']:7} {plan}"
    if "tokens_per_s" not in row:
        return text
    gib = lambda size: f"{size / 2**30:.2f} GiB" if size else "-"
    mfu = f"MFU {row['mfu']:.1%}, " if row.get("mfu") else ""
    return (f"{text}\n    {row['tokens_per_s']:,.0f} tokens/s, {mfu}start {row['start_s']:.1f} s, compile "
            f"{row['compile_s']:.1f} s, peak memory {gib(row['peak_bytes'])} (plan {gib(row.get('plan_peak_bytes'))})"
            )  # fmt: skip


def table(found: dict) -> str:
    lines = [f"{found['devices']} x {found['device']}, {found['date']}, jax {found['versions']['jax']}, ready after "
             f"{found['start_s']:.1f} s"]  # fmt: skip
    for part, rows in found["parts"].items():
        head = f"{'ms':>10} {'rate':>9} {'':7} {'plan ms':>10} {'/ plan':>7}"
        lines += ["", f"{part:58} {head}", *map(line, rows)]
    return "\n".join(lines)


def published_rows(path: str) -> list[dict]:
    """Return the training steps of a report as rows of `published.csv`.

    Raises: UserError if it is no report, or one of an unknown chip or of other settings than this version has.
    """
    from bench import published
    from plan.chips.hardware import CHIPS

    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        chip = next((chip for chip in CHIPS.values() if chip.device_kind == report["device"]), None)
        steps = {name: row for name, ones in report["parts"].items() for row in ones if "config" in row}
    except OSError as error:
        raise UserError(f"--rows {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"--rows {path}: it is not a file of python -m bench.report") from error
    if not chip:
        raise UserError(f"--rows {path}: the planner does not know {report['device']!r}; known: {', '.join(CHIPS)}")
    found, kind = [], "GPUs, this trainer" if chip.domain else "dense, one slice"
    for name, row in steps.items():
        cfg = Config.from_dict(row["config"])
        values = {"name": name, "kind": "MoE" if cfg.model.n_experts and not chip.domain else kind,
                  "topology": f"{chip.key}:{'x'.join('1' * max(chip.torus_dims, 1))}",
                  **{column: getattr(cfg.model, ours) for column, ours in published.SIZES.items()},
                  "d_ff": cfg.model.d_expert if cfg.model.n_experts else cfg.model.d_ff,
                  "n_experts": cfg.model.n_experts, "top_k": cfg.model.top_k if cfg.model.n_experts else 0,
                  "mesh": "fsdp=1", "batch": cfg.data.batch_size, "seq_len": cfg.data.seq_len, "settings": "",
                  "value": f"{row['seconds']:.4g}", "unit": "s", "flops": "", "source": path, "lacks": ""}  # fmt: skip
        usual = published.config({column: str(value) for column, value in values.items()}).to_dict()
        given = cfg.to_dict()
        values["settings"] = " ".join(f"{part}.{key}={value}" for part in ("model", "work")
                                      for key, value in given[part].items() if value != usual[part][key])  # fmt: skip
        found.append({column: values[column] for column in published.read_rows()[0]})
    return found


@exit_status
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--one"]:  # a part started by `run`
        for row in one_part(json.loads(argv[1])):
            print(json.dumps(row), flush=True)
        return 0
    args = parse(argv)
    if args.rows:
        rows = published_rows(args.rows)
        csv.DictWriter(sys.stdout, rows[0] if rows else (), lineterminator="\n").writerows(rows)
        return 0
    found = measure(args)
    print(table(found))
    return int(any("error" in row for rows in found["parts"].values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
