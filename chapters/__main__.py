"""Run chapters, each in a process of its own, and say how long each takes."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from errors import UserError, exit_status, nearest

HELP = """e.g. python -m chapters
     python -m chapters 03 04
     python -m chapters 04 --show    # and what it prints

Run the chapters of the guide, and print the seconds each takes.

Each is a program, `python -m chapters.03_fsdp`, and runs in a process of its own.
Exit status 1: one failed, and its last lines are printed; or it took too long."""

FOLDER = Path(__file__).resolve().parent
LONGEST_S = 90  # that a chapter may take, of processor time: this machine may be busy with other things
HANGS_S = 1200


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # how the chapters begin, such as 04; none: all
    show: bool = False  # print what the chapters print
    longest_s: float = LONGEST_S  # seconds of processor time that a chapter may take


def chosen(numbers: tuple[str, ...]) -> list[str]:
    """The chapters whose names begin with one of the numbers, in order; all, if there are none.

    Raises: UserError for a number that no chapter has.
    """
    names = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
    for number in numbers:
        if not any(name.startswith(number) for name in names):
            raise UserError(f"no chapter begins with {number!r}; {nearest(number, names)}")
    return [name for name in names if not numbers or name.startswith(numbers)]


def run(name: str, show: bool, longest_s: float) -> tuple[str, float, float, str]:
    """Run a chapter: what became of it, its seconds, its processor seconds, and what it printed last if it failed."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"chapters.{name}"]
    start, before = time.monotonic(), os.times()
    streams = {} if show else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, cwd=FOLDER.parent, env=env, text=True, check=False, timeout=HANGS_S, **streams)
    except subprocess.TimeoutExpired:
        return f"did not end in {HANGS_S} s", time.monotonic() - start, 0.0, ""
    seconds, after = time.monotonic() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    state = f"failed, exit status {done.returncode}" if done.returncode else "ran"
    if state == "ran" and used > longest_s:
        state = f"took more than {longest_s:g} s of processor time"
    last = "\n".join((done.stdout or "").splitlines()[-20:]) if done.returncode else ""
    return state, seconds, used, last


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m chapters", description=HELP, use_underscores=True)
    bad, total = 0, 0.0
    print(f"{'chapter':24} {'seconds':>8} {'of processor':>13}")
    for name in chosen(args.numbers):
        state, seconds, used, last = run(name, args.show, args.longest_s)
        print(f"{name:24} {seconds:8.1f} {used:13.1f}  {state}", flush=True)
        if last:
            print(last, file=sys.stderr, flush=True)
        bad, total = bad + (state != "ran"), total + seconds
    print(f"{'all':24} {total:8.1f}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
