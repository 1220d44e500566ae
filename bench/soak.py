"""Kill one run repeatedly, resume it each time, and compare its final state with a run that was never killed.

`python -m bench.soak --kills 20` prints one line per kill. The exit status is 1 if a parameter, an optimizer moment or
a logged loss is not bitwise identical. It uses `kill -9` at random times: after a step, while a checkpoint is being
written, or at any time after the process starts. `--seed` determines these times.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

import main
import optimizer
import sharding
from data import prepare
from train import checkpoint
from utils import exit_status

ROOT = Path(__file__).resolve().parent.parent
TIMED = {"tokens_per_s", "mfu", "time", "import_s", "restore_s", "compile_s", "seconds", "peak_host_bytes",
         "peak_device_bytes"}  # fmt: skip
Moment = Literal["step", "save", "start"]


@dataclass(frozen=True)
class Kill:
    """What the run did before one kill, and the checkpoints that remained."""

    kill: int
    drawn: Moment
    resumed_at: int | None  # step of the checkpoint it resumed from; None: killed before that, or began at step 0
    last_step: int | None  # last step that it logged
    saving: str  # steps whose save was interrupted
    good: int | None  # step of the latest complete checkpoint


def progress(lines: list[str]) -> tuple[int | None, int | None]:
    """Parse from a run's output the step at which it resumed, and its last step."""
    resumed = [int(n) for line in lines for n in re.findall(r"^resumed +at step (\d+)", line)]
    taken = [int(n) for line in lines for n in re.findall(r"^step +(\d+)/\d+  loss", line)]
    return (resumed or [None])[-1], (taken or [None])[-1]


def unfinished(checkpoints: Path) -> dict[Path, int]:
    """Return the interrupted saves, with the time of their last change."""
    return {path: path.stat().st_ctime_ns for path in checkpoints.glob("*" + checkpoint.SAVING)}


def kill_once(argv: list[str], directory: Path, number: int, moment: Moment, draw: random.Random, every: int) -> Kill:
    """Start the run and kill it at the given moment. Raises: AssertionError if it fails before that."""
    checkpoints, after_s = directory / "checkpoints", draw.uniform(0, 0.06)
    words, before = [sys.executable, "main.py", *argv], unfinished(checkpoints)
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said, steps_to_take = [], draw.randint(1, 4 * every)
    with process:
        if moment == "start":
            time.sleep(draw.uniform(0, 4))
        else:
            for line in process.stdout:
                said.append(line)
                resumed, last = progress(said)
                if last is not None and last >= (resumed or 0) + steps_to_take:
                    break
            while moment == "save" and process.poll() is None and not any(checkpoints.glob("*" + checkpoint.SAVING)):
                time.sleep(0.001)
            time.sleep(after_s)
        process.kill()
        said += process.stdout
    assert process.returncode in (0, -9), "".join(said)
    resumed, last = progress(said)
    cut = [path.name.removesuffix(checkpoint.SAVING) for path, _ in unfinished(checkpoints).items() - before.items()]
    return Kill(number, moment, resumed, last, ",".join(cut), checkpoint.latest_step(checkpoints))


def soak(argv: list[str], directory: Path, kills: int, seed: int, every: int) -> list[Kill]:
    """Kill a run `kills` times, half of them during a save. The caller then runs it to its end."""
    draw = random.Random(seed)
    moments = [("save", "step", "save", "start")[n % 4] for n in range(kills)]
    draw.shuffle(moments)
    return [kill_once(argv, directory, n, moment, draw, every) for n, moment in enumerate(moments, start=1)]


def untimed_rows(directory: Path) -> list[dict]:
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [
        {name: x for name, x in row.items() if name not in TIMED} for row in rows if row["kind"] in ("train", "eval")
    ]


def final_arrays(argv: list[str], directory: Path) -> dict[str, np.ndarray]:
    """Return all arrays of the latest checkpoint: parameters, optimizer moments, step."""
    cfg = main.parse(argv)
    mesh = sharding.make_mesh(cfg.mesh)
    target = checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    return {
        name: np.asarray(x)
        for name, x in sharding.flatten_named(checkpoint.restore(directory / "checkpoints", target)).items()
    }


def differences(argv: list[str], ours: Path, theirs: Path) -> list[str]:
    """List the arrays and metrics rows that are not bitwise identical in two runs with the same settings."""
    a, b = final_arrays(argv, ours), final_arrays(argv, theirs)
    assert a and list(a) == list(b)
    found = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    a, b = untimed_rows(ours), untimed_rows(theirs)
    found += [f"row {n}" for n, (x, y) in enumerate(zip(a, b, strict=False)) if json.dumps(x) != json.dumps(y)]
    return found + ([f"{len(a)} rows and {len(b)}"] if len(a) != len(b) else [])


def table(kills: list[Kill]) -> str:
    rows = [
        [field.name for field in fields(Kill)],
        *([str(x) if x is not None else "-" for x in astuple(k)] for k in kills),
    ]
    return "\n".join("  ".join(f"{cell:>10}" for cell in row) for row in rows)


@dataclass(frozen=True)
class Arguments:
    """Kill one run repeatedly, and compare its final state with a run that was never killed."""

    kills: int = 20  # number of kills
    seed: int = 0  # determines the times of the kills
    steps: int = 90  # optimizer steps of the run
    every: int = 3  # steps between checkpoints


def run_to_end(argv: list[str]) -> None:
    subprocess.run([sys.executable, "main.py", *argv], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@exit_status
def command(args: Arguments) -> int:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for n in range(12):
            (home / f"{n}.txt").write_text("abcd efgh. " * (30 + n))
        prepare.prepare(prepare.Arguments(str(home / "tokens"), f"text:{home}/*.txt", "bytes", val_share=0.3))
        flags = (f"tiny --model.n_layers 3 --model.dense_prefix 0 --model.moe_every 1 --data.path {home}/tokens "
                 f"--run.name run --run.steps {args.steps} --run.log_every 1 --run.eval_every 7 --run.eval_batches 1 "
                 f"--run.checkpoint_every {args.every}").split()  # fmt: skip
        killed, straight = ([*flags, "--run.dir", str(home / name)] for name in ("killed", "straight"))
        run_to_end(straight)
        begin = time.perf_counter()
        kills = soak(killed, home / "killed" / "run", args.kills, args.seed, args.every)
        run_to_end(killed)
        print(table(kills))
        found = differences(killed, home / "killed" / "run", home / "straight" / "run")
        arrays = len(final_arrays(straight, home / "straight" / "run"))
        print(f"{len(kills)} kills in {time.perf_counter() - begin:.0f} s, {sum(bool(k.saving) for k in kills)} "
              f"of them in a save; {arrays} arrays, {len(untimed_rows(home / 'straight' / 'run'))} rows compared: "
              + ("bitwise identical" if not found else "DIFFERENT: " + ", ".join(found)))  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(command(tyro.cli(Arguments, prog="python -m bench.soak", use_underscores=True)))
