"""Save and restore training state as arrays with logical names, independent of the mesh that they are sharded over.

    checkpoints/40/  state/params/  arrays {name: array}, names as in `sharding.flatten_named`, written by Orbax
                     state/rest/    the other arrays: optimizer state and counters
                     about.json     the settings of the run, which are compared before it resumes
                     manifest.json  bytes and sha256 of every other file
                     keep           empty, and only if the run must never delete this step
    checkpoints/60.saving/          an unfinished save; it is renamed last, so a directory named 60 is complete

A bucket cannot rename files. There a step has its final name from the start, and its manifest is written last. The
manifest has the md5 that the bucket itself stores for each file, so nothing is downloaded to write or verify it.

A step is read only if its files still match its manifest, because Orbax restores flipped bits without an error. If the
latest step does not match, the run prints why and uses the previous one. `python -m train.checkpoint ls DIR` lists the
steps of a run, `verify DIR` reads every byte of them, and `keep DIR STEP` keeps a step forever.
"""

import contextlib
import datetime
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import jax
import numpy as np
import orbax.checkpoint as ocp
import tyro
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from config import first_difference
from config.fields import is_remote
from progress import print_to_stderr
from sharding import flatten_named, map_named
from train import storage
from train.steps import DELETING, KEEP, MANIFEST, SAVING, Read, StepDirectory, latest_step, list_steps, write_manifest
from utils import DiskLost, UserError, exit_status, is_main_process, replace_file

CHUNK_BYTES = 2**26  # largest chunk of an array: reading any part of a chunk decompresses all of it
KEEPER = "keeper"  # if the hosts share no disk, a file with the name of the host that stores the checkpoints


def read_saving_host(directory: str | os.PathLike) -> str | None:
    """Return the host that stores the checkpoints of a run, from the file KEEPER, or None without that file."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, KEEPER), encoding="utf-8") as file:
        return file.read()


# Writing --------------------------------------------------------------------------------------------------------------


class Saver:
    """A directory of checkpoints, open for writing: `with Saver(..) as saver`. Entering removes leftovers of failed
    saves, and leaving waits for the last save.

    keep         keep the latest `keep` good steps, the one with the lowest loss, and those with a file KEEP; damaged
                 steps are never deleted
    keeper       None: each process writes its shards; the host of process 0 if the processes don't share this
                 directory: process 0 gathers the arrays and writes all of them
    send, saved  called on process 0 from another thread: send() before a step is completed, saved(step) afterwards
    """

    def __init__(
        self, directory: str | os.PathLike, keep: int = 2, keeper: str | None = None,
        send: Callable[[], None] = lambda: None, saved: Callable[[int], None] = lambda step: None,
    ):  # fmt: skip
        self.directory, self.keeper, self.shared = storage.absolute_path(directory), keeper, keeper is None
        self.send, self.saved, self.far = send, saved, is_remote(self.directory)
        best = policies.BestN(
            get_metric_fn=lambda metrics: -metrics["loss"], n=1, keep_checkpoints_without_metrics=False
        )
        self.policy = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        self.pending = None  # (step, future) of the save in the background
        self.failed = False

    def __enter__(self):
        if is_main_process():
            if not self.far:
                os.makedirs(self.directory, exist_ok=True)
            for entry in list_steps(self.directory):
                if not entry.is_complete:
                    storage.remove_path(entry.path)
        self.logger = logging.getLogger("absl")
        self.level = self.logger.level
        # Orbax logs a traceback for each of its threads and also raises the error, which `wait` reports once.
        self.logger.setLevel(logging.CRITICAL)
        self.hook, sys.unraisablehook = sys.unraisablehook, self.ignore_closed_loop
        self.checkpointer = None
        if self.shared or is_main_process():
            who = ocp.options.MultiprocessingOptions(active_processes=None if self.shared else {0})
            options = ocp.CompositeOptions(multiprocessing_options=who)
            handler = ocp.CompositeCheckpointHandler(composite_options=options)
            self.checkpointer = ocp.AsyncCheckpointer(handler, multiprocessing_options=who)
        self.background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self

    def __exit__(self, kind, error, traceback):
        try:
            with contextlib.suppress(*(() if error is None else (Exception,))):  # the first error is the one to show
                self.wait()
        finally:
            self.background.shutdown()
            if self.checkpointer:
                self.checkpointer.close()
            self.logger.setLevel(self.level)
            if not self.failed:
                sys.unraisablehook = self.hook

    def ignore_closed_loop(self, unraisable) -> None:
        """Ignore errors of tensorstore's remaining writes after a failed write has closed the event loop."""
        if not (isinstance(unraisable.exc_value, RuntimeError) and "loop is closed" in str(unraisable.exc_value)):
            self.hook(unraisable)

    def check(self) -> None:
        """Raises: UserError if the background save has failed. Does not wait for the save."""
        if self.pending and self.pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the background save is complete. Raises: UserError if it failed."""
        if self.pending:
            (step, future), self.pending = self.pending, None
            with self.explain_errors(step):
                future.result()

    @contextlib.contextmanager
    def explain_errors(self, step: int) -> Iterator[None]:
        """Turn storage errors into a one-line UserError; other errors, such as a lost process, become RuntimeError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # bucket clients raise their own types
            self.failed = True
            run = os.path.dirname(self.directory)
            writes = not self.far and (self.shared or is_main_process())
            if writes and (why := storage.explain_lost_disk(error, run)):
                raise DiskLost(why) from error
            if not (is_bucket_error if self.far else is_disk_error)(error):  # Orbax's TimeoutError is an OSError too
                raise RuntimeError(f"the checkpoint of step {step} was not written: {error}") from error
            if self.far:
                reason = " ".join(str(error).split())[:300]  # the server may answer with a whole HTML page
            else:
                if is_main_process():
                    _remove(self.unfinished_path(step))  # frees the disk
                reason = f"{error} ({shutil.disk_usage(run).free / 2**20:,.0f} MiB free there)"
            raise UserError(f"the checkpoint of step {step} cannot be written to {self.directory}: {reason}; "
                            f"{self.describe_last_good()}") from error  # fmt: skip

    def unfinished_path(self, step: int) -> str:
        """Return the directory that a step is written to until it is complete."""
        return os.path.join(self.directory, str(step) + ("" if self.far else SAVING))

    def describe_last_good(self) -> str:
        try:
            good = latest_step(self.directory)
        except UserError as error:
            return str(error)
        except Exception as error:  # from a bucket client
            return f"earlier checkpoints cannot be listed ({type(error).__name__})"
        return "there is no earlier checkpoint" if good is None else f"the one of step {good} is good and remains"


def is_disk_error(error: Exception) -> bool:
    """Return whether an error comes from the file system: it has an errno, or it is tensorstore's ValueError with one.

    If another process is lost, a save fails without an errno: with Gloo's ValueError, or with a TimeoutError.
    """
    return getattr(error, "errno", None) is not None or "os_error_code=" in str(error)


def is_bucket_error(error: Exception) -> bool:
    """Return whether an error comes from a bucket or from the bucket clients, gcsfs and tensorstore."""
    by_client = type(error).__module__.startswith(("gcsfs", "aiohttp", "requests", "google"))
    return by_client or "gs://" in str(error) or "/storage/v1/" in str(error)


def save(saver: Saver, step: int, state, about: dict, loss: float | None = None) -> None:
    """Start to save the arrays of `state`. Return once they are copied; a background thread writes the copies.

    loss   validation loss at this step, if it was measured
    Raises: UserError if this save cannot start, or the previous one failed.
    """
    saver.wait()
    path = saver.unfinished_path(step)
    with saver.explain_errors(step):
        if is_main_process():
            is_kept = StepDirectory(os.path.join(saver.directory, str(step)), step, is_complete=True).is_kept
            if saver.far:
                _discard(path)  # a damaged checkpoint of the same step
                storage.remove_path(path)
            else:
                os.mkdir(path)  # without parents: if the disk is unmounted, nothing may be written to its mount point
            epath.Path(path, "about.json").write_text(json.dumps(about))
            if is_kept:
                epath.Path(path, KEEP).write_text("")
        arrays = flatten_named(state) if saver.shared else {name: gather(x) for name, x in flatten_named(state).items()}
        params = {name: x for name, x in arrays.items() if name.startswith("params.")}
        parts = {"params": params, "rest": {name: x for name, x in arrays.items() if name not in params}}
        chunked = lambda some: dict.fromkeys(some, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        parts = {part: ocp.args.StandardSave(some, chunked(some)) for part, some in parts.items() if some}
        if not saver.shared:
            with contextlib.suppress(OSError):  # the disk of a host that stores only this file may be full
                os.makedirs(saver.directory, exist_ok=True)
                replace_file(os.path.join(saver.directory, KEEPER), saver.keeper)
        if saver.checkpointer:
            saver.checkpointer.save(os.path.join(path, "state"), ocp.args.Composite(**parts))
    saver.pending = step, saver.background.submit(_complete, saver, step, loss)


def gather(x: jax.Array) -> np.ndarray | None:
    """Gather an array from all hosts and return it on process 0. The others must call this too; they get None."""
    whole = multihost_utils.process_allgather(x, tiled=True)
    return whole if is_main_process() else None


def scatter(x: np.ndarray | None, target: jax.ShapeDtypeStruct) -> jax.Array:
    """Send an array from process 0 to all processes and shard it like `target`."""
    whole = multihost_utils.broadcast_one_to_all(np.zeros(target.shape, target.dtype) if x is None else x)
    return jax.make_array_from_callback(target.shape, target.sharding, lambda part: whole[part])


def _remove(path: str, quiet_s: float = 0.5, longest_s: float = 10.0) -> None:
    """Remove the folder of a failed save, repeatedly for a while, because threads of the save may still write to it."""
    end = time.monotonic() + longest_s
    gone_since = time.monotonic()
    while time.monotonic() < min(gone_since + quiet_s, end):
        if os.path.exists(path):
            shutil.rmtree(path, ignore_errors=True)
            gone_since = time.monotonic()
        time.sleep(0.05)


def _complete(saver: Saver, step: int, loss: float | None) -> None:
    """Wait until Orbax has written the arrays. Then write the manifest, rename the directory and delete old steps."""
    if saver.checkpointer:
        saver.checkpointer.wait_until_finished()
    if not is_main_process():
        return
    saver.send()
    path = os.path.join(saver.directory, str(step))
    write_manifest(saver.unfinished_path(step), step, loss)
    if not saver.far:
        _discard(path)  # a damaged checkpoint of the same step
        os.rename(path + SAVING, path)
    saver.saved(step)
    # Consider only good steps. Any later steps were found damaged when this run started.
    good = [
        entry for entry in reversed(list_steps(saver.directory)) if entry.step <= step and entry.find_fault() is None
    ]
    manifests = [_PolicyStep(entry.step, entry.manifest()) for entry in good]
    preserve = saver.policy.should_preserve(manifests, context=policies.PreservationContext())
    for entry, stays in zip(good, preserve, strict=True):
        if not (stays or entry.is_kept):
            _discard(entry.path)
    for entry in list_steps(saver.directory):
        if not entry.is_complete:
            storage.remove_path(entry.path)


def _discard(path: str) -> None:
    """Mark a step, if it exists, as deleted in one atomic operation. Its files are removed later."""
    if is_remote(path):
        epath.Path(path, MANIFEST).unlink(missing_ok=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, path + DELETING)


class _PolicyStep:
    """A step in the form that Orbax's preservation policies expect."""

    def __init__(self, step: int, manifest: dict):
        self.step, self.time = step, datetime.datetime.fromisoformat(manifest["saved"])
        self.metrics = None if manifest["loss"] is None else {"loss": manifest["loss"]}


# Reading --------------------------------------------------------------------------------------------------------------


def _select_step(directory: str | os.PathLike, step: int | None, read: Read = "all") -> tuple[int, str]:
    """Return a good step and its directory; step None: the latest good step, whose number is printed.

    Raises: UserError if the requested step, or every step, is missing or damaged.
    """
    if step is None:
        if (step := latest_step(directory, print_to_stderr, read)) is None:
            raise UserError(f"no checkpoint in {directory}")
        print_to_stderr(f"reading    step {step} of {directory}")
    path = os.path.join(storage.absolute_path(directory), str(step))
    if not epath.Path(path).is_dir():
        steps = ", ".join(str(one.step) for one in reversed(list_steps(directory)))
        raise UserError(f"no checkpoint of step {step} in {directory}" + (f"; use one of {steps}" if steps else ""))
    if fault := StepDirectory(path, step, is_complete=True).find_fault(read):
        raise UserError(f"{path}: {fault}")
    return step, path


def read_about(directory: str | os.PathLike, step: int, read: Read = "all") -> dict:
    """Return the `about` that `save` stored with a checkpoint: the settings of the run that wrote it."""
    path = epath.Path(_select_step(directory, step, read)[1], "about.json")
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # possible unless `read` is "all"
        raise UserError(f"{path} is not JSON ({error}); move the directory of this step elsewhere") from None


def find_difference(directory: str | os.PathLike, step: int, ours: dict, read: Read = "all") -> str | None:
    """Compare a checkpoint's settings with `ours`. Describe the first difference, or return None."""
    return first_difference(ours, read_about(directory, step, read))


def restore(directory: str | os.PathLike, target, step: int | None = None, shared: bool = True):
    """Read a checkpoint with the shapes, dtypes and shardings of `target`, a tree of ShapeDtypeStruct.

    step     step to read; None: the latest good step
    shared   True: all processes see this directory; False: process 0 reads the arrays and sends them to the others
    Raises: UserError that names the missing or damaged checkpoint.
    """
    if shared:
        arrays = _read(_select_step(directory, step)[1], flatten_named(target))
    else:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        some = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in flatten_named(target).items()
        }
        read = _read(_select_step(directory, step)[1], some) if is_main_process() else {}
        arrays = {name: scatter(read.pop(name, None), x) for name, x in flatten_named(target).items()}
    return map_named(lambda name, _: arrays[name], target)


def restore_params(directory: str | os.PathLike, shapes, step: int | None = None):
    """Read only the parameters of a checkpoint, with the shapes, dtypes and shardings of `shapes`.

    Raises: UserError like `open_params`.
    """
    arrays = open_params(directory, flatten_named(shapes), step)(*flatten_named(shapes))
    return map_named(lambda name, _: arrays[name], shapes)


def open_params(directory: str | os.PathLike, shapes: dict[str, jax.ShapeDtypeStruct], step: int | None = None):
    """Return a function that reads parameters of a checkpoint: read(*names) -> {name: array}.

    shapes   {name: the shape, dtype and sharding to read the parameter with}, for every parameter
    Raises: UserError if there is no good checkpoint, or if its parameters differ in name or shape.
    """
    path = _path_of_params(directory, step, {name: x.shape for name, x in shapes.items()})

    def read(*names: str) -> dict[str, jax.Array]:
        arrays = _read(path, {f"params.{name}": shapes[name] for name in names}, partial=True)
        return {name: arrays[f"params.{name}"] for name in names}

    return read


def _path_of_params(directory: str | os.PathLike, step: int | None, model: dict[str, tuple]) -> str:
    """Return the directory of a good step that has the model's parameters."""
    _, path = _select_step(directory, step, "params")
    stored = ocp.PyTreeCheckpointHandler().metadata(_folder(path, "params")).tree
    stored = {name.removeprefix("params."): x.shape for name, x in stored.items() if name.startswith("params.")}
    check_shapes(stored, model, f"checkpoint {path}")
    return path


def open_stored(directory: str | os.PathLike, shapes: dict[str, tuple], step: int | None = None) -> dict:
    """Open a checkpoint's parameters as {name: tensorstore array}. Indexing reads part of an array in its stored dtype.

    shapes   {name: shape} of every parameter
    Raises: UserError like `open_params`.
    """
    import tensorstore  # here, because only partial reads need it

    folder = _folder(_path_of_params(directory, step, shapes), "params")
    layout = json.loads((folder / "_METADATA").read_text())
    # Decompress one chunk at a time. By default every core decompresses a chunk, and a chunk may have 2 GB.
    one_at_a_time = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
    base = str(folder) if is_remote(str(folder)) else f"file://{folder}"

    def opened(name: str):
        store = f"{base}/params.{name}/"
        if layout.get("use_ocdbt", True):
            store = {"driver": "ocdbt", "base": f"{base}/", "path": f"params.{name}/"}
        what = {"driver": "zarr3" if layout.get("use_zarr3") else "zarr", "kvstore": store}
        what["recheck_cached_data"] = False  # the files no longer change
        return tensorstore.open(what, context=tensorstore.Context(one_at_a_time), read=True).result()

    return {name: opened(name) for name in shapes}


def check_shapes(stored: dict[str, tuple], model: dict[str, tuple], where: str) -> None:
    """Raises: UserError that names the first parameter that only one of the two has, or whose shapes differ."""
    advice = "use the model settings that these parameters were trained with, from the config.json next to them"
    for name in model | stored:
        if name not in stored:
            raise UserError(f"the model has {name}, but {where} does not; {advice}")
        if name not in model:
            raise UserError(f"{where} has {name}, but the model does not; {advice}")
        if tuple(stored[name]) != model[name]:
            raise UserError(f"{name} has shape {tuple(stored[name])} in {where}, {model[name]} in the model; {advice}")


def _folder(path: str, part: str) -> epath.Path:
    """Return the folder of one part of the state. Earlier versions stored both parts in one folder."""
    state = epath.Path(path, "state")
    return state / part if (state / part).is_dir() else state


def _read(path: str, targets: dict, partial: bool = False) -> dict[str, jax.Array]:
    """Read arrays of a step with the shapes, dtypes and shardings of `targets`; `partial`: not of all arrays."""
    arrays, by_folder = {}, {}
    for name, target in targets.items():
        part = "params" if name.startswith("params.") else "rest"
        by_folder.setdefault(_folder(path, part), {})[name] = target
    for folder, some in by_folder.items():
        places = ocp.checkpoint_utils.construct_restore_args(some)
        wanted = ocp.args.PyTreeRestore(item=some, restore_args=places, partial_restore=partial)
        arrays |= ocp.PyTreeCheckpointHandler().restore(folder, args=wanted)
    return arrays


def make_target(shapes, shardings):
    """Combine shapes and shardings into the target tree that `restore` takes."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


# The command, which uses no device ------------------------------------------------------------------------------------

Directory = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True)
class List:
    """List the checkpoints of a run with date and size; check the names and sizes of files without reading them."""

    directory: Directory  # a run's directory, e.g. runs/laptop, or its checkpoints
    json: bool = False  # print JSON instead


@dataclass(frozen=True)
class Verify(List):
    """Read all checkpoints of a run and verify the checksums; the exit status is 1 if one is damaged."""


@dataclass(frozen=True)
class Keep:
    """Keep a checkpoint forever: the run will not delete it when it saves later ones."""

    directory: Directory  # a run's directory, e.g. runs/laptop, or its checkpoints
    step: tyro.conf.Positional[int]  # step of the checkpoint
    undo: bool = False  # let the run delete it again


@dataclass(frozen=True)
class Row:
    """What `ls` and `verify` print for one step."""

    name: str
    step: int
    saved: str | None  # date and time, UTC; None if the manifest cannot be read
    bytes: int
    loss: float | None  # validation loss, if it was measured
    best: bool  # whether it has the lowest loss of all steps without a fault
    kept: bool  # whether `keep` keeps it forever
    fault: str | None  # why it is not a good checkpoint


def step_rows(directory: str | os.PathLike, read: Read) -> list[Row]:
    """Return a row for every step in a directory and for every leftover of a save or deletion, latest first."""
    table = []
    for entry in list_steps(directory):
        fault, manifest = entry.find_fault(read), {}
        with contextlib.suppress(OSError, ValueError):
            manifest = entry.manifest()
        name, size = os.path.basename(entry.path), sum(size for size, _ in storage.file_sizes(entry.path).values())
        table.append(
            Row(name, entry.step, manifest.get("saved"), size, manifest.get("loss"), False, entry.is_kept, fault)
        )
    measured = [row for row in table if row.loss is not None and not row.fault]
    best = min(measured, key=lambda row: row.loss, default=None)
    return [replace(row, best=row is best) for row in table]


def keep(directory: str | os.PathLike, step: int, undo: bool = False) -> None:
    """Write the file KEEP of a step, or remove it. Raises: UserError if there is no good checkpoint of this step."""
    file = epath.Path(_select_step(directory, step, "none")[1], KEEP)
    if undo:
        file.unlink(missing_ok=True)
    else:
        file.write_text("")


HELP = """\
e.g. python -m train.checkpoint ls runs/laptop
     python -m train.checkpoint verify runs/laptop
     python -m train.checkpoint keep runs/laptop 300

List the checkpoints of a run, verify that their files are unchanged, or keep a step forever, without a GPU or TPU."""


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.extras.subcommand_cli_from_dict(
        {"ls": List, "verify": Verify, "keep": Keep}, args=argv, prog="python -m train.checkpoint", description=HELP
    )
    if not epath.Path(args.directory).is_dir():
        raise UserError(f"{args.directory} does not exist; pass the directory of a run, such as runs/laptop")
    inside = os.path.join(args.directory, "checkpoints")
    directory, read = inside if epath.Path(inside).is_dir() else args.directory, isinstance(args, Verify)
    if isinstance(args, Keep):
        keep(directory, args.step, args.undo)
        print(f"step {args.step} of {directory} " + ("may be deleted" if args.undo else "is kept forever"))
        return 0
    table = step_rows(directory, "all" if read else "none")
    if not table:
        raise UserError(f"no checkpoint in {directory}")
    if args.json:
        print(json.dumps([asdict(row) for row in table], indent=1))
    else:
        good = "good" if read else "complete"
        print(f"{'step':>12}  {'saved (UTC)':19}  {'bytes':>15}  {'loss':>7}        state")
        for row in table:
            saved = (row.saved or "unknown").replace("T", " ").removesuffix("+00:00")
            loss = "" if row.loss is None else f"{row.loss:.4f}"
            best = "best" if row.best else ""
            state = (row.fault or good) + ", kept forever" * row.kept
            print(f"{row.name:>12}  {saved:19}  {row.bytes:>15,}  {loss:>7}  {best:4}  {state}")
    damaged = [row for row in table if row.fault and row.name.isdecimal()]
    return 1 if read and damaged else 0


if __name__ == "__main__":
    sys.exit(main())
