"""A run's directory: whose it is, what lies in it, and who may write there now.

runs/laptop/  config.json    every setting, and which tokens they met: what decides results must stay the same
              metrics.jsonl  a JSON object a line, in the order of the steps
              checkpoints/   `checkpoint.py`
              samples.txt    report.png
              .lock          while a process trains there
"""

import fcntl
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dataset
import utils
from config import Config, first_difference, moved
from train import checkpoint, tracking
from train.processes import Processes
from utils import UserError, log

LOGS = "logs"  # of each process, where there are several
OWN_FILES = ("config.json", "metrics.jsonl", "checkpoints", "samples.txt", "report.png")
VISIBLE_S = 5.0  # until a file of one host is seen by all, on a disk they share
# Settings of a run that may change when it goes on: they decide where, how fast and how long, not what comes out.
FREE = ("run", "mesh", "work", "data.path", "data.prefetch", "optim.decay_steps")


def describe(cfg: Config) -> dict:
    """What config.json holds: every setting, and which tokens they met."""
    config = cfg.to_dict()
    config["run"] |= {"restart": False, "force": False}  # said once, not properties of the run
    return {"config": config, "data": dataset.fingerprint(cfg)}


def decisive(about: dict) -> dict:
    """The part of `describe` that decides results: a run goes on only where it is the same."""
    config = moved(json.loads(json.dumps(about["config"])))
    run = {name: config["run"][name] for name in ("seed", "init_from") if name in config["run"]}
    for name in FREE:
        part, _, setting = name.partition(".")
        (config[part] if setting else config).pop(setting or part, None)
    return config | {"run": run, "tokens": about["data"]}


def check_same(cfg: Config, directory: Path) -> None:
    """Raises: UserError if the directory holds a run with other settings, naming the first that decides results."""
    if cfg.run.restart:
        return
    ours, file, checkpoints = decisive(describe(cfg)), directory / "config.json", directory / "checkpoints"
    try:
        theirs = decisive(json.loads(file.read_text())) if file.exists() else ours
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error!r}); choose another --run.name, or --run.restart") from None
    if difference := first_difference(ours, theirs):
        raise UserError(
            f"{directory} was started with other settings: {difference} (in its config.json); "
            "start another run with --run.name, or delete this one with --run.restart")  # fmt: skip
    if (step := checkpoint.latest_step(checkpoints)) is not None:
        checkpoint.check_about(checkpoints, step, ours)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run's directory. The kernel lets go when this one dies, however it dies.

    Raises: UserError naming who is in there, or why nothing can be written.
    """
    if not utils.is_main_process():
        yield
        return
    made, path = [one for one in (directory, *directory.parents) if not one.exists()], directory / ".lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error}; choose another --run.dir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError  # the run that held it ended just now and removed it
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise UserError(
                f"{directory} is in use by {who}; wait until that ends, or start another run with --run.name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # something came into it
                for one in made:
                    one.rmdir()


def open_run(cfg: Config, directory: Path, together: Processes) -> None:
    """Make the run's directory and write its config.json; under run.restart delete what an earlier run wrote there.

    Process 0 does. Each of several then sees whether the hosts share this disk, and opens a log of its own there.
    """

    def write() -> str:
        for name in (*OWN_FILES, LOGS, *tracking.FILES) if cfg.run.restart else ():
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / "config.json", json.dumps(describe(cfg), indent=1) + "\n")
        return (directory / ".lock").read_text() if together.count > 1 else ""

    lock = together.first("lock", write)
    if together.count == 1:
        return
    together.share_disk = all(together.gather("disk", sees(directory / ".lock", lock)))
    directory.mkdir(parents=True, exist_ok=True)
    utils.open_log(directory / LOGS / f"{together.own_name}.log")
    utils.log_to_file(f"{together.name(together.rank)}, id {os.getpid()}, of {together.count}")
    if not together.share_disk:
        log(f"directory  {directory} is no disk that all hosts share: that of {together.name(0)} keeps the checkpoints")


def sees(path: Path, text: str) -> bool:
    """Whether a file holds a text, now or as soon as a file server shows it."""
    end = time.monotonic() + VISIBLE_S
    while time.monotonic() < end:
        with suppress(OSError):
            os.listdir(path.parent)  # so that nobody answers from memory
            if path.read_text() == text:
                return True
        time.sleep(0.2)
    return False


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def steps_done(cfg: Config, directory: Path) -> int | None:
    """Steps a finished run has taken; None if some of run.steps, or the report after the last, is still to do."""
    rows = [json.loads(row) for row in read_rows(directory)]
    ended = max((row["step"] for row in rows if row["kind"] == "end"), default=0)
    reached = checkpoint.latest_step(directory / "checkpoints") or 0
    return max(ended, reached) if ended >= cfg.run.steps or reached > cfg.run.steps else None


def read_rows(directory: Path) -> list[str]:
    """Lines of metrics.jsonl, without a last one that is half written."""
    path = directory / "metrics.jsonl"
    return [row for row in path.read_text().splitlines(keepends=True) if row.endswith("\n")] if path.exists() else []


class Metrics:
    """metrics.jsonl: one JSON object a line, appended by process 0 and flushed at once."""

    def __init__(self, directory: Path, step: int, last_step: int):
        """Keep the rows up to `step`; what is past it is done again, and so is an evaluation at the last step."""
        self.path = directory / "metrics.jsonl"
        if utils.is_main_process():

            def keep(row):
                return row["step"] <= step and (row["kind"], row["step"]) != ("eval", last_step)

            replace_file(self.path, "".join(row for row in read_rows(directory) if keep(json.loads(row))))

    def write(self, kind: str, step: int, **values) -> None:
        if utils.is_main_process():
            with self.path.open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **to_json(values)}) + "\n")


def to_json(value):
    """Arrays as lists, and null for what is not finite: JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: to_json(x) for name, x in value.items()}
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, list):
        return [to_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
