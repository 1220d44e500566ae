"""A run's directory: whose it is, what lies in it, and who may write there now.

runs/laptop/  config.json    every setting, and which tokens they met: what decides results must stay the same
              metrics.jsonl  a JSON object a line, in the order of the steps
              metrics.set_aside.jsonl  rows of steps that were taken again, since a kill came before their checkpoint
              checkpoints/   `checkpoint.py`
              saved          the newest step of which there is a checkpoint: where that is gone, a run does not go on
              samples.txt    report.png
              .lock          while a process trains there

Of a run at gs://BUCKET/DIR, `storage.py` says where these lie.
"""

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dataset
from config import Affects, Config, affecting, first_difference
from config.migrations import dropped, moved
from data import order
from devices import is_main_process, log, log_to_file, open_log
from errors import UserError
from train import checkpoint, storage, tracking
from train.processes import Processes
from train.storage import Far, replace_file

LOGS = "logs"  # of each process, where there are several
SAVED = "saved"
OWN_FILES = ("config.json", "metrics.jsonl", "checkpoints", SAVED, "samples.txt", "report.png")
SET_ASIDE = "metrics.set_aside.jsonl"
VISIBLE_S = 5.0  # until a file of one host is seen by all, on a disk they share


def describe(cfg: Config) -> dict:
    """What config.json holds: every setting, and which tokens they met."""
    config = cfg.to_dict()
    config["run"] |= affecting(Affects.START, group="run")
    return {"config": config, "data": dataset.fingerprint(cfg)}


def decisive(about: dict) -> dict:
    """The part of `describe` that decides results: a run goes on only where it is the same."""
    config = moved(json.loads(json.dumps(about["config"])))
    may_change = affecting(Affects.SPEED, Affects.RUN, Affects.START, Affects.ORDER)  # the last as `check_seen` says
    for name in may_change:
        group, _, setting = name.partition(".")
        config.get(group, {}).pop(setting, None)
    return {group: settings for group, settings in config.items() if settings} | {"tokens": about["data"]}


def look(cfg: Config, directory: Path | Far, read: checkpoint.Read = "all") -> int | None:
    """Steps taken, if the run there is complete; None: this one may begin, or go on.

    read   what of its newest checkpoint is compared with the manifest
    Raises: UserError if it has other settings, or lacks the checkpoint it had come to.
    """
    if cfg.run.restart == "scratch":
        return None
    check_same(cfg, directory, read)
    done = steps_done(cfg, directory, read)
    if done is None and cfg.run.restart == "no":
        check_saved(directory, read)
    return done


def check_same(cfg: Config, directory: Path | Far, read: checkpoint.Read = "all") -> None:
    """Raises: UserError if the directory holds a run with other settings, naming the first that decides results."""
    ours, file, checkpoints = decisive(describe(cfg)), directory / "config.json", directory / "checkpoints"
    try:
        written = json.loads(file.read_text()) if file.exists() else describe(cfg)
        theirs = decisive(written)
    except (ValueError, KeyError, TypeError) as error:
        step = checkpoint.latest_step(checkpoints, read=read)
        advice = "there is no checkpoint, so choose another --run.name"
        if step is not None:
            advice = "nothing is lost: move the file away and repeat the command, with the settings of the run, which "
            advice += f"{checkpoints / str(step) / 'about.json'} holds too"
        raise UserError(f"{file} cannot be read ({error!r}); {advice}") from None
    if difference := first_difference(ours, theirs):
        raise UserError(
            f"{directory} was started with other settings: {difference} (in its config.json); "
            "start another run with --run.name, or delete this one with --run.restart scratch")  # fmt: skip
    for line in dropped(written["config"]):
        log(line)
    if (step := checkpoint.latest_step(checkpoints, read=read)) is not None:
        checkpoint.check_about(checkpoints, step, ours, read)
    check_seen(cfg, written["config"]["data"], directory, step or 0)


def check_seen(cfg: Config, written: dict, directory: Path | Far, step: int) -> None:
    """Raises: UserError if a mixture or a skip was `written` otherwise for steps that are taken."""
    old = {name: written.get(name, usual) for name, usual in affecting(Affects.ORDER, group="data").items()}
    if order.settings_before(cfg.data.mixture, cfg.data.skip, step) != order.settings_before(
        old["mixture"], old["skip"], step
    ):
        for name, was in old.items():
            if (ours := getattr(cfg.data, name)) != was:
                raise UserError(
                    f"{directory} has taken {step} steps with data.{name}={was!r}, and data.{name}={ours!r} would have "
                    f"changed one of them; say again what was said, and add what begins after step {step}; to go back "
                    "before that, put later checkpoints aside and say --run.restart newest")  # fmt: skip


def check_saved(directory: Path | Far, read: checkpoint.Read = "all") -> None:
    """Raises: UserError if the newest checkpoint is gone, so that steps which were kept would be taken again.

    One that is there and damaged is no question: the one before is taken, and said.
    """
    path, checkpoints = directory / SAVED, directory / "checkpoints"
    rows = [json.loads(row) for row in read_rows(directory)]
    known = {row["step"] for row in rows if row["kind"] in ("start", "end")}  # there is a checkpoint of either
    with suppress(OSError, ValueError):
        known.add(int(path.read_text()))
    newest = max(known, default=0)
    if max((one.step for one in checkpoint.found(checkpoints) if one.whole), default=0) >= newest:
        return
    step, taken = checkpoint.latest_step(checkpoints, read=read), max((row["step"] for row in rows), default=newest)
    there = "there is none" if step is None else f"the newest is that of step {step}"
    raise UserError(
        f"{directory} has come to step {taken}, and its checkpoint of step {newest} is gone: in {checkpoints} {there}; "
        f"put it back, or say --run.restart newest: steps {(step or 0) + 1} to {taken} are taken again, their rows "
        f"kept in {SET_ASIDE}")  # fmt: skip


def check_place(directory: Path, keepers: list[str | None], ours: str | None) -> None:
    """Raises: UserError if a host says that another one keeps the checkpoints of a run, of which we have none."""
    if elsewhere := [host for host in keepers if host not in (None, ours)]:
        raise UserError(
            f"the checkpoints of {directory} are on {elsewhere[0]}, and the first host is {ours}: "
            f"name {elsewhere[0]} first, or copy {directory}/checkpoints from there, or take another --run.name"
        )


def check_writable(directory: Path | Far) -> None:
    """Raises: UserError if a run cannot be kept there, as far as one sees who writes nothing."""
    if isinstance(directory, Far):
        return directory.check()
    there = next(one for one in (directory.absolute(), *directory.absolute().parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "may not be written" if there.is_dir() else "is no directory"
        raise UserError(f"cannot write to {directory}: {there} {what}; choose another --run.dir")


@contextmanager
def locked(run: Path | Far) -> Iterator[None]:
    """Keep other processes of this machine out of a run's directory, or that of all where they share the disk.

    The kernel lets go when this one dies, however it dies.
    Raises: UserError naming who is in there, or why nothing can be written.
    """
    if not is_main_process():
        yield
        return
    directory = storage.here(run)
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
                f"{run} is in use by {who}; wait until that ends, or start another run with --run.name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # something came into it, or its disk went away
                path.unlink(missing_ok=True)
                for one in made:
                    one.rmdir()


def open_run(cfg: Config, directory: Path | Far, together: Processes) -> None:
    """Make the run's directory and write its config.json; with --run.restart scratch, delete an earlier run's.

    Process 0 does. Each of several then sees whether the hosts share this disk, and opens a log of its own there.
    """
    board = together.board

    def write() -> str:
        storage.here(directory).mkdir(parents=True, exist_ok=True)
        storage.take(directory)
        for name in (*OWN_FILES, SET_ASIDE, LOGS, *tracking.FILES) if cfg.run.restart == "scratch" else ():
            storage.remove(directory, name)
        replace_file(directory / "config.json", json.dumps(describe(cfg), indent=1) + "\n")
        storage.send(directory)
        return (directory / ".lock").read_text() if board.count > 1 else ""

    lock = board.first("lock", write)
    if board.count == 1:
        return
    far = isinstance(directory, Far)
    together.agreement.share_disk = all(board.gather("disk", far or sees(directory / ".lock", lock)))
    open_log(directory / LOGS / f"process-{board.rank:02}.log")
    log_to_file(f"{board.name(board.rank)}, id {os.getpid()}, of {board.count}")
    if not together.agreement.share_disk:
        log(f"directory  {directory} is no disk that all hosts share: that of {board.name(0)} keeps the checkpoints")


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


def steps_done(cfg: Config, directory: Path | Far, read: checkpoint.Read = "all") -> int | None:
    """Steps a finished run has taken; None if some of run.steps, or the report after the last, is still to do."""
    rows = [json.loads(row) for row in read_rows(directory)]
    ended = max((row["step"] for row in rows if row["kind"] == "end"), default=0)
    reached = checkpoint.latest_step(directory / "checkpoints", read=read) or 0
    return max(ended, reached) if ended >= cfg.run.steps or reached > cfg.run.steps else None


def note_saved(directory: Path | Far, step: int) -> None:
    """Remember the newest step of which there is a checkpoint; 0: there is none."""
    replace_file(directory / SAVED, f"{step}\n")


def read_rows(directory: Path | Far, name: str = "metrics.jsonl") -> list[str]:
    """Lines of metrics.jsonl, or of the rows that were set aside, without a last one that is half written."""
    path = directory / name
    return [row for row in path.read_text().splitlines(keepends=True) if row.endswith("\n")] if path.exists() else []


def missing_rows(directory: Path | Far, step: int) -> str | None:
    """Say which steps before a checkpoint have no rows in metrics.jsonl; None: the record reaches it.

    A checkpoint always ends a row. Its row is missing if the run resumed from an earlier one meanwhile.
    """
    trained = lambda texts: {row["step"] for row in map(json.loads, texts) if row["kind"] == "train"}
    last = max((one for one in trained(read_rows(directory)) if one <= step), default=0)
    if last == step:
        return None
    aside = [one for one in trained(read_rows(directory, SET_ASIDE)) if last < one <= step]
    steps = f"step {step}" if last + 1 == step else f"steps {last + 1} to {step}"
    why = "the file was cut or replaced, or the checkpoint was copied here"
    if aside:
        why = "its checkpoint could not be read for a while, so the run resumed from an earlier one; "
        why += f"{len(aside)} rows of these steps are in {directory / SET_ASIDE}"
    return f"{directory / 'metrics.jsonl'} has no rows for {steps}: {why}"


class Metrics:
    """metrics.jsonl: one JSON object a line, appended by process 0 and flushed at once."""

    def __init__(self, directory: Path | Far, step: int, last_step: int):
        """Keep the rows up to `step`; what is past it is done again, and so is an evaluation at the last step.

        Rows of what is done again are set aside.
        """
        self.path = directory / "metrics.jsonl"
        if not is_main_process():
            return

        def again(row: dict) -> bool:
            return row["step"] > step or (row["kind"], row["step"]) == ("eval", last_step)

        rows = {True: [], False: []}
        for row in read_rows(directory):
            rows[again(json.loads(row))].append(row)
        if rows[True]:
            with (directory / SET_ASIDE).open("a") as file:
                file.write("".join(rows[True]))
            log(f"set aside  {len(rows[True])} rows, which come again after step {step}, in {directory / SET_ASIDE}")
        replace_file(self.path, "".join(rows[False]))
        note_saved(directory, step)

    def write(self, kind: str, step: int, **values) -> None:
        if is_main_process():
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
