"""A run's directory: its files, the checks before a run resumes in it, and the lock that keeps other processes out.

runs/laptop/  config.json    all settings, and a fingerprint of the tokens; what affects results must not change
              metrics.jsonl  the metrics: one JSON object (a row) per line, in the order of the steps
              metrics.set_aside.jsonl  rows of steps that were rerun because the run died before it checkpointed them,
                             and damaged lines
              checkpoints/   see `checkpoint.py`
              saved          the latest step that has a checkpoint; if that checkpoint is gone, the run does not resume
              parameters.txt shape and sharding of every parameter, written at the latest start
              samples.txt    report.png
              profile/       the steps of --run.profile, one folder per process, see `recorder.py`
              predictions-TASK.jsonl  the answers to the tasks in run.eval_tasks, from the latest evaluation
              evaluations/   the results of `python -m evaluate --follow`
              .lock          exists while a process trains there

For a run at gs://BUCKET/DIR, `storage.py` explains where these files are stored.
"""

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import dataset
from config import Affects, Config, DataConfig, affecting, first_difference
from config.fields import check_value, hints
from data.reading import order
from train import checkpoint, storage, tracking
from train.hosts.processes import Processes
from train.report import parse_row
from train.storage import BucketDirectory
from utils import UserError, is_main_process, log, log_to_file, open_log, replace_file

PROFILE = "profile"
EVALUATIONS = "evaluations"
LOGS = "logs"  # one file per process, if there are several processes
SAVED = "saved"
OWN_FILES = ("config.json", "parameters.txt", "metrics.jsonl", "checkpoints", SAVED, "samples.txt", "report.png")
SET_ASIDE = "metrics.set_aside.jsonl"
VISIBLE_S = 5.0  # after at most this time, all hosts see a file that one host wrote to a shared disk


def describe(cfg: Config) -> dict:
    """Return the contents of config.json: all settings, and a fingerprint of the tokens."""
    config = cfg.to_dict()
    config["run"] |= affecting(Affects.START, group="run")
    return {"config": config, "data": dataset.fingerprint(cfg)}


def result_settings(about: dict) -> dict:
    """Return the part of `describe` that affects results. A run resumes only if this part is unchanged."""
    config = json.loads(json.dumps(about["config"]))
    replicas = {"mesh": {"data": config["mesh"]["data"]}} if config.get("optim", {}).get("outer") else {}
    may_change = affecting(Affects.SPEED, Affects.RUN, Affects.START, Affects.ORDER)  # ORDER is checked separately
    for name in may_change:
        group, _, setting = name.partition(".")
        config.get(group, {}).pop(setting, None)
    return {group: settings for group, settings in config.items() if settings} | {"tokens": about["data"]} | replicas


def check_resumable(cfg: Config, directory: Path | BucketDirectory, read: checkpoint.Read = "all") -> int | None:
    """Return the number of steps if the run in `directory` is complete; None if it may start or resume.

    read   which files of the latest checkpoint to verify against its manifest
    Raises: UserError if the run has different settings, or if its latest checkpoint is gone.
    """
    if cfg.run.restart == "scratch":
        return None
    check_same_settings(cfg, directory, read)
    done = steps_done(cfg, directory, read)
    if done is None and cfg.run.restart == "no":
        check_newest_checkpoint(directory, read)
    return done


def check_same_settings(cfg: Config, directory: Path | BucketDirectory, read: checkpoint.Read = "all") -> None:
    """Raises: UserError if the directory has a run with different settings; it names the first that affects results."""
    ours, file, checkpoints = result_settings(describe(cfg)), directory / "config.json", directory / "checkpoints"
    written, fault, difference = describe(cfg), "", None
    try:
        if file.exists():
            written = read_description(file)
        difference = first_difference(ours, result_settings(written))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        fault = f"cannot be read ({error!r:.200})"
    if (step := checkpoint.latest_step(checkpoints, read=read)) is not None:
        other = checkpoint.find_difference(checkpoints, step, ours, read)
        if difference and not other:
            fault = f"is damaged, because it differs from that checkpoint: {difference}"
        if other and not (difference or fault):
            raise UserError(f"checkpoint {checkpoints}/{step} belongs to another run: {other} (in the checkpoint)")
    if fault:
        advice = "there is no checkpoint, so choose another --run.name"
        if step is not None:
            advice = "nothing is lost: move the file away and repeat the command with the settings of the run, which "
            advice += f"are also in {checkpoints / str(step) / 'about.json'}"
        raise UserError(f"{file} {fault}; {advice}")
    if difference:
        raise UserError(
            f"{directory} was started with other settings: {difference} (in its config.json); "
            "start another run with --run.name, or delete this one with --run.restart scratch")  # fmt: skip
    check_batch_order(cfg, written["config"].get("data", {}), directory, step or 0)


def read_description(file: Path) -> dict:
    """Read a config.json, see `describe`. Raises: ValueError if it does not have the form of one."""
    written = json.loads(file.read_bytes())
    groups = written.get("config") if isinstance(written, dict) else None
    if not isinstance(groups, dict):
        raise ValueError("it has no settings under the name config")
    for name in Config.__dataclass_fields__:
        if not isinstance(group := groups.get(name, {}), dict):
            raise ValueError(f"{name} should be an object with settings, but is {group!r:.60}")
    for name in affecting(Affects.ORDER, group="data"):
        check_value(f"data.{name}", groups.get("data", {}).get(name, ""), hints(DataConfig)[name])
    return written


def check_batch_order(cfg: Config, written: dict, directory: Path | BucketDirectory, step: int) -> None:
    """Raises: UserError if data.mixture or data.skip would change batches that were already used; see `written`."""
    old = {name: written.get(name, usual) for name, usual in affecting(Affects.ORDER, group="data").items()}
    if order.settings_before(cfg.data.mixture, cfg.data.skip, step) != order.settings_before(
        old["mixture"], old["skip"], step
    ):
        for name, was in old.items():
            if (ours := getattr(cfg.data, name)) != was:
                raise UserError(
                    f"{directory}: data.{name} was {was!r} and is now {ours!r}, which changes batches of the {step} "
                    f"finished steps; restore the old value, and add only changes that start after step {step}. To "
                    "change earlier steps, move later checkpoints elsewhere and add --run.restart newest")  # fmt: skip


def check_newest_checkpoint(directory: Path | BucketDirectory, read: checkpoint.Read = "all") -> None:
    """Raises: UserError if the latest checkpoint is gone, because the run would repeat steps that were saved.

    A damaged checkpoint is not an error here: the run prints a warning and resumes from the previous one.
    """
    path, checkpoints = directory / SAVED, directory / "checkpoints"
    rows = read_rows(directory)
    known = {row["step"] for row in rows if row["kind"] in ("start", "end")}  # there was a checkpoint at these steps
    with suppress(OSError, ValueError):
        known.add(int(path.read_text()))
    newest = max(known, default=0)
    if max((one.step for one in checkpoint.list_steps(checkpoints) if one.is_complete), default=0) >= newest:
        return
    step, taken = checkpoint.latest_step(checkpoints, read=read), max((row["step"] for row in rows), default=newest)
    there = "has no checkpoint" if step is None else f"has only step {step} and earlier"
    raise UserError(
        f"{directory}: the latest checkpoint, step {newest}, is missing: {checkpoints} {there}; restore it, or add "
        f"--run.restart newest to rerun steps {(step or 0) + 1} to {taken}, whose metrics move to {SET_ASIDE}"
    )


def check_saving_host(directory: Path, keepers: list[str | None], ours: str | None) -> None:
    """Raises: UserError if this host has no checkpoints, and some host reports that another host stores them."""
    if elsewhere := [host for host in keepers if host not in (None, ours)]:
        raise UserError(
            f"the checkpoints of {directory} are on {elsewhere[0]}, but process 0 runs on {ours}: put {elsewhere[0]} "
            f"first in the list of hosts, or copy {directory}/checkpoints from there, or use another --run.name"
        )


def check_writable(directory: Path | BucketDirectory) -> None:
    """Raises: UserError if a run cannot be stored there, as far as this check can tell without writing."""
    if isinstance(directory, BucketDirectory):
        return directory.check()
    there = next(one for one in (directory.absolute(), *directory.absolute().parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "is not writable" if there.is_dir() else "is not a directory"
        raise UserError(f"cannot write to {directory}: {there} {what}; choose another --run.dir")


@contextmanager
def lock_directory(run: Path | BucketDirectory) -> Iterator[None]:
    """Keep other processes, on this machine or on any machine that shares the disk, out of a run's directory.

    The kernel releases the lock when this process dies, for whatever reason.
    Raises: UserError with the process that holds the lock, or with the reason why the directory is not writable.
    """
    if not is_main_process():
        yield
        return
    directory = storage.local_folder(run)
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
                raise BlockingIOError  # the run that held the lock has just ended and removed the file
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise UserError(
                f"{run} is in use by {who}; wait until it ends, or start another run with --run.name"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}\n")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):  # the directory is not empty, or its disk is gone
                path.unlink(missing_ok=True)
                for one in made:
                    one.rmdir()


def open_run(
    cfg: Config, directory: Path | BucketDirectory, together: Processes, parameters: Iterable[str] = ()
) -> None:
    """Create the run's directory and write its config.json; with --run.restart scratch, delete an earlier run's files.

    Only process 0 does this. With several processes, each then checks whether the hosts share a disk, and opens a log.

    parameters  the lines of parameters.txt
    """
    board = together.board

    def write() -> str:
        storage.local_folder(directory).mkdir(parents=True, exist_ok=True)
        storage.claim_ownership(directory)
        predictions = (file.name for file in storage.local_folder(directory).glob("predictions-*.jsonl"))
        old = (*OWN_FILES, SET_ASIDE, LOGS, PROFILE, EVALUATIONS, *tracking.FILES, *predictions)
        for name in old if cfg.run.restart == "scratch" else ():
            storage.remove(directory, name)
        replace_file(directory / "config.json", json.dumps(describe(cfg), indent=1) + "\n")
        replace_file(directory / "parameters.txt", "".join(f"{line}\n" for line in parameters))
        storage.upload(directory)
        return (directory / ".lock").read_text() if board.count > 1 else ""

    lock = board.call_on_first("lock", write)
    if board.count == 1:
        return
    far = isinstance(directory, BucketDirectory)
    together.agreement.share_disk = all(board.gather("disk", far or wait_until_visible(directory / ".lock", lock)))
    open_log(directory / LOGS / f"process-{board.rank:02}.log")
    log_to_file(f"{board.process_name(board.rank)}, id {os.getpid()}, of {board.count}")
    if not together.agreement.share_disk:
        log(
            f"directory  {directory} is not on a disk that all hosts share; "
            f"{board.process_name(0)} stores the checkpoints"
        )


def profile_directory(directory: Path | BucketDirectory, together: Processes) -> Path:
    """Return where this process records steps, on its own disk."""
    return storage.local_folder(directory) / PROFILE / f"process-{together.board.rank:02}"


def wait_until_visible(path: Path, text: str) -> bool:
    """Return whether a file contains this text, waiting up to VISIBLE_S for a file server to show it."""
    end = time.monotonic() + VISIBLE_S
    while time.monotonic() < end:
        with suppress(OSError):
            os.listdir(path.parent)  # refreshes the client's cached attributes
            if path.read_text() == text:
                return True
        time.sleep(0.2)
    return False


def steps_done(cfg: Config, directory: Path | BucketDirectory, read: checkpoint.Read = "all") -> int | None:
    """Return the number of steps of a finished run; None if it still has to train, or to write its report."""
    rows = read_rows(directory)
    ended = max((row["step"] for row in rows if row["kind"] == "end"), default=0)
    reached = checkpoint.latest_step(directory / "checkpoints", read=read) or 0
    return max(ended, reached) if ended >= cfg.run.steps or reached > cfg.run.steps else None


def record_saved_step(directory: Path | BucketDirectory, step: int) -> None:
    """Record the latest step that has a checkpoint; 0: there is none."""
    replace_file(directory / SAVED, f"{step}\n")


def read_lines(directory: Path | BucketDirectory, name: str = "metrics.jsonl") -> Iterator[tuple[bytes, dict | str]]:
    """Yield each line of metrics.jsonl, or of the file `name`, with its row, or with the reason why it is damaged.

    A half-written last line is left out.
    """
    path = directory / name
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            try:
                yield line, parse_row(line)
            except ValueError as error:
                yield line, str(error)


def read_rows(directory: Path | BucketDirectory, name: str = "metrics.jsonl") -> list[dict]:
    """Return the rows of metrics.jsonl, or of the file `name`, without damaged lines."""
    return [row for _, row in read_lines(directory, name) if isinstance(row, dict)]


def missing_rows(directory: Path | BucketDirectory, step: int) -> str | None:
    """Describe which steps before a checkpoint have no rows in metrics.jsonl. Return None if none is missing.

    Every checkpoint has a row at its step. That row is missing if the run later resumed from an earlier checkpoint.
    """
    trained = lambda rows: {row["step"] for row in rows if row["kind"] == "train"}
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
    """Writer of metrics.jsonl: process 0 appends one JSON object per line and flushes it at once."""

    def __init__(self, directory: Path | BucketDirectory, step: int, last_step: int):
        """Keep the rows up to `step`. Set aside damaged lines and what is rerun: later rows, an evaluation at the last
        step, and an evaluation before the first step if the run starts again at step 0."""
        self.path = directory / "metrics.jsonl"
        if not is_main_process():
            return

        def again(row: dict) -> bool:
            return row["step"] > step or (row["kind"] == "eval" and (row["step"] == last_step or step == 0))

        kept, rerun, damaged = [], [], []
        for number, (line, row) in enumerate(read_lines(directory), start=1):
            if isinstance(row, str):
                log(f"set aside  {self.path}:{number} is {row}")
            (damaged if isinstance(row, str) else rerun if again(row) else kept).append(line)
        if damaged or rerun:
            with (directory / SET_ASIDE).open("ab") as file:
                file.write(b"".join((*damaged, *rerun)))
        if damaged:
            log(f"set aside  {len(damaged)} damaged lines of {self.path}: {directory / SET_ASIDE}")
        if rerun:
            log(f"set aside  {len(rerun)} rows of rerun steps (after step {step}): {directory / SET_ASIDE}")
        replace_file(self.path, b"".join(kept))
        record_saved_step(directory, step)

    def write(self, kind: str, step: int, **values) -> None:
        if is_main_process():
            with self.path.open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **to_json(values)}) + "\n")


def to_json(value):
    """Convert arrays to lists, and NaN and infinity, which JSON lacks, to null."""
    if isinstance(value, dict):
        return {name: to_json(x) for name, x in value.items()}
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, list):
        return [to_json(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
