"""Run chapters, each in a separate process, and print how long each takes."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from utils import UserError, exit_status, suggest

HELP = """e.g. python -m chapters
     python -m chapters 03 04
     python -m chapters 04 --show    # with its output

Run the chapters of the guide, and print the seconds each takes.

Each chapter is a program, `python -m chapters.03_fsdp`, and runs in a separate process.
The exit status is 1 if a chapter failed, in which case its last lines are printed, or took too long."""

FOLDER = Path(__file__).resolve().parent
LONGEST_S = 90.0  # limit in CPU seconds, because other work may share the machine
# On a slow machine the limit is this many times the CPU seconds of a small program that only starts and compiles.
REFERENCES = 38
REFERENCE = """import jax
def loss(x):
    return sum((jax.numpy.sin(x @ x * i) @ x).sum() for i in range(40))
jax.jit(jax.grad(loss)).lower(jax.numpy.ones((8, 8))).compile()"""
HANGS_S = 1200  # limit in wall-clock seconds


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # beginnings of chapter names, e.g. 04; none: all
    show: bool = False  # print the output of the chapters
    longest_s: float = 0.0  # limit per chapter, in CPU seconds; 0: 90, or more on a slow machine


def limit_s(longest_s: float) -> float:
    """Return a limit of CPU seconds: `longest_s`, or if that is 0, 90 s and more on a machine that compiles slowly."""
    if longest_s:
        return longest_s
    before = os.times()
    subprocess.run([sys.executable, "-c", REFERENCE], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    return max(LONGEST_S, REFERENCES * cpu_seconds(before))


def cpu_seconds(before: os.times_result) -> float:
    """Return the CPU seconds of child processes that ended after `before = os.times()`."""
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def select_chapters(numbers: tuple[str, ...]) -> list[str]:
    """Return the sorted chapters whose names begin with one of the numbers; without numbers, all.

    Raises: UserError if no chapter begins with a number.
    """
    names = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
    for number in numbers:
        if not any(name.startswith(number) for name in names):
            raise UserError(f"no file in chapters/ starts with {number!r}; {suggest(number, names)}")
    return [name for name in names if not numbers or name.startswith(numbers)]


def run(name: str, show: bool, longest_s: float) -> tuple[str, float, float, str]:
    """Run a chapter. Returns its result in words, wall and CPU seconds, and its last lines if it failed."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"chapters.{name}"]
    start, before = time.monotonic(), os.times()
    streams = {} if show else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        result = subprocess.run(command, cwd=FOLDER.parent, env=env, text=True, check=False, timeout=HANGS_S, **streams)
    except subprocess.TimeoutExpired:
        return f"did not end within {HANGS_S} s", time.monotonic() - start, 0.0, ""
    seconds, used = time.monotonic() - start, cpu_seconds(before)
    state = f"failed, exit status {result.returncode}" if result.returncode else "ran"
    if state == "ran" and used > longest_s:
        state = f"took more than {longest_s:g} s of CPU time"
    last = "\n".join((result.stdout or "").splitlines()[-20:]) if result.returncode else ""
    return state, seconds, used, last


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m chapters", description=HELP, use_underscores=True)
    bad, total = 0, 0.0
    names, longest_s = select_chapters(args.numbers), limit_s(args.longest_s)
    print(f"running {len(names)} of the chapters; each takes about a minute on 2 cores")
    print(f"{'chapter':24} {'seconds':>8} {'CPU seconds':>13}")
    for name in names:
        print(f"{name:24}", end="\n" if args.show else "", flush=True)  # shows which chapter runs
        state, seconds, used, last = run(name, args.show, longest_s)
        again = f"{name:24}" if args.show else ""
        print(f"{again} {seconds:8.1f} {used:13.1f}  {state}", flush=True)
        if last:
            print(last, file=sys.stderr, flush=True)
        bad, total = bad + (state != "ran"), total + seconds
    print(f"{'all':24} {total:8.1f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
