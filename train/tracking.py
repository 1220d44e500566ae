"""Send the rows of a run's metrics.jsonl to wandb from a separate process, so that training never waits for wandb.

`main.py` starts `python -m train.tracking runs/NAME`. This process reads new rows from metrics.jsonl until its standard
input is closed, which happens when the training process ends for any reason. runs/NAME/wandb.json stores the ID of the
wandb run and the last step sent, so a resumed run continues without missing or repeated steps.
"""

import fcntl
import json
import netrc
import os
import select
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from config import Config
from utils import is_main_process, log

FILES = ("wandb.json", "wandb.log", "wandb")  # files and a folder that it writes to the run's directory
PATIENCE_S = 30.0  # once training is done, how long to wait until the last rows are sent
POLL_S = 1.0


# In the training process ----------------------------------------------------------------------------------------------


class Tracker:
    """Starts the tracking process if run.tracker asks for it, and logs one note if it fails."""

    def __init__(self, cfg: Config, directory: Path):
        self.directory, self.process, self.given_up = directory, None, False
        if cfg.run.tracker == "wandb" and is_main_process():
            with (directory / "wandb.log").open("a") as output:
                words = [sys.executable, "-m", "train.tracking", str(directory.resolve())]
                # A separate session, so that Ctrl-C reaches only the training process, which then ends this one.
                self.process = subprocess.Popen(words, cwd=Path(__file__).resolve().parents[1],
                                                stdin=subprocess.PIPE, stdout=output, stderr=output,
                                                start_new_session=True)  # fmt: skip
            self.waiting = threading.Thread(target=self._wait, daemon=True)
            self.waiting.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        """Let the tracking process send the last rows; wait at most PATIENCE_S."""
        if not self.process:
            return
        self.process.stdin.close()
        self.waiting.join(PATIENCE_S)
        if self.waiting.is_alive():
            self.given_up = True
            self.process.kill()
            self.waiting.join()
            self._note(f"wandb did not finish within {PATIENCE_S:g} s")

    def _wait(self) -> None:
        """Wait in a thread for the tracking process, and log at once if it fails."""
        if self.process.wait() and not self.given_up:
            self._note(f"wandb stopped: {((self.directory / 'wandb.log').read_text().splitlines() or ['?'])[-1]}")

    def _note(self, what: str) -> None:
        log(f"note: {what}; no metrics are lost, because metrics.jsonl has them all; see {self.directory}/wandb.log")


# In the tracking process ----------------------------------------------------------------------------------------------


def completed_steps(path: Path) -> Iterator[list[tuple[int, dict]]]:
    """Read metrics.jsonl as it grows: each `next` returns the steps that became complete, as (step, its numbers).

    A step is complete once the file has a row of a later step, or the row that ends the run. Until then this run or a
    resumed run may still write more rows for the step.
    """
    steps: dict[int, dict] = {}
    with path.open("rb") as file:
        newest, half_line = None, b""
        while True:
            *lines, half_line = (half_line + file.read()).split(b"\n")
            for row in map(json.loads, lines):
                kind, step = row.pop("kind"), row.pop("step")
                steps.setdefault(step, {}).update(flatten_numbers(row, kind))
                newest = step if kind != "end" else None
            yield [(step, steps.pop(step)) for step in [*steps] if step != newest]


def flatten_numbers(value, name: str) -> dict:
    """Flatten numbers to {"train/loss": 2.5, "train/tokens_per_expert/0/3": 17}, without null and text."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: x for key, inner in items for path, x in flatten_numbers(inner, f"{name}/{key}").items()}
    return {name: value} if isinstance(value, (int, float)) else {}


def has_key() -> bool:
    """Return whether wandb can log in, with a key in the environment, or in ~/.netrc for wandb's host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def send_steps(directory: Path) -> None:
    """Send steps as they are completed, until standard input is closed."""
    with (directory / "wandb.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the tracking process of a killed run may still be sending
        file.seek(0)
        state = {"id": uuid.uuid4().hex[:8], "sent": -1} | json.loads(file.read() or "{}")

        import wandb  # here, because it is an optional package and slow to import

        mode = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "axis-by-axis"), name=directory.resolve().name, id=state["id"],
            resume="allow", dir=str(directory), mode=mode,
            config=json.loads((directory / "config.json").read_text())["config"],
            settings=wandb.Settings(disable_git=True, disable_code=True, console="off", silent=True),
        )  # fmt: skip
        save_state = lambda: Path(file.name).write_text(json.dumps(state) + "\n")  # the same file, so still locked
        save_state()
        steps, ended = completed_steps(directory / "metrics.jsonl"), False
        while True:
            for step, numbers in next(steps):
                if step > state["sent"]:
                    run.log(numbers, step=step)
                    state["sent"] = step
                    save_state()
            if ended:
                return run.finish()
            ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])


def main() -> int:
    try:
        send_steps(Path(sys.argv[1]))
    except ModuleNotFoundError as error:
        print(f"{error}; `make extra-wandb` installs it")
        return 3
    except Exception as error:  # whatever wandb raises goes to the log and does not affect training
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
