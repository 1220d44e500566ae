"""main.py with a fault, for rehearsals: `AXIS_FAULT=KIND:PROCESS:PLACE:STEP python tests/launch/faulty.py tiny ..`.

KIND    term, kill: the process sends itself that signal; hang: it waits for ever
PLACE   compile, restore, data, step, eval, save: what it does instead of, or before, what stands there
STEP    at which step; -: the first time

AXIS_HANG_S is the number of seconds without a finished step after which a run counts as hung.
"""

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import config
import dataset
import main
from compile import ordered
from train import checkpoint, progress
from train.hosts.watchdog import Watchdog


def hang_on_a_line_of_its_own():
    while True:
        time.sleep(0.1)


def act(kind: str) -> None:
    if kind == "hang":
        hang_on_a_line_of_its_own()
    os.kill(os.getpid(), {"term": signal.SIGTERM, "kill": signal.SIGKILL}[kind])


def inject(kind: str, place: str, step: str) -> None:
    """Put a fault in front of a function; `step_of` says from its arguments at which step it is called."""
    taken = {"step": 0}
    module, name, step_of = {
        "compile": (ordered, "compile", lambda *_: taken["step"]),
        "restore": (checkpoint, "restore", lambda *_: taken["step"]),
        "data": (dataset, "batch", lambda cfg, n, *_: n),
        "step": (Watchdog, "begin_step", lambda _, n: n),
        "eval": (progress, "evaluate", lambda *_: taken["step"]),
        "save": (checkpoint, "save", lambda _, n, *__: n),
    }[place]
    function, at, left = getattr(module, name), Watchdog.begin_step, [1]

    def faulty(*args, **kwargs):
        if left and step in ("-", str(step_of(*args))):
            left.clear()
            if place == "data":
                time.sleep(3)  # the loop waits for this batch by now
            act(kind)
        return function(*args, **kwargs)

    def count(self, n):
        taken["step"] = n
        at(self, n)

    Watchdog.begin_step = count
    setattr(module, name, faulty)


if __name__ == "__main__":
    kind, process, place, step = os.environ.get("AXIS_FAULT", "::-:").split(":")
    once = Path(os.environ.get("AXIS_FAULT_ONCE", os.devnull))  # restarted, the process is well
    if process == os.environ.get("JAX_PROCESS_ID") and not once.is_file() and "only" not in sys.argv:
        if once != Path(os.devnull):
            once.touch()
        inject(kind, place, step)
    if "AXIS_HANG_S" in os.environ:
        config.RunConfig.hang_timeout_s = int(os.environ["AXIS_HANG_S"])
    sys.argv[0] = str(ROOT / "main.py")
    sys.exit(main.main())
