"""Where a run is kept: a directory of a disk, or gs://BUCKET/DIR. Nothing else knows that there are two kinds.

A bucket neither appends, nor renames, nor locks. So of a run there

- the checkpoints are written straight to it, by each process its part; the manifest of a step comes last, and a step
  without one is no checkpoint (`checkpoint.py`);
- all other files lie in a folder of process 0's machine while it trains. They come from the bucket when it begins, and
  go there whole: before each step gets its manifest, after it, and at the end, whatever that is;
- `owner` names who writes there. Who starts last does: an earlier one finds another name, and ends before it has
  written a manifest.
"""

import base64
import contextlib
import errno
import functools
import hashlib
import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from config import Config
from config.fields import is_remote
from data import bucket
from devices import cache_directory, is_main_process, log
from errors import DiskLost, UserError

CHECKPOINTS, OWNER = "checkpoints", "owner"


class Far:
    """A run's directory in a bucket. It stands where the Path of one on a disk would: `/` gives what lies in it.

    here   the folder of this machine that its small files lie in; left out: one in the user's cache folder
    """

    def __init__(self, address: str, here: Path | None = None):
        digest = hashlib.sha256(address.encode()).hexdigest()[:16]
        self.address, self.name = address, address.rpartition("/")[2]
        self.here = here or Path(cache_directory(), "runs", digest, self.name)
        self.owner, self.sent = "", {}

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str):
        return epath.Path(f"{self.address}/{name}") if name == CHECKPOINTS else self.here / name

    @functools.cached_property
    def files(self):
        """Raises: UserError if the bucket cannot be asked, or is not there: to write would make it."""
        name = "/".join(self.address.split("/")[:3])
        files = bucket.call_with_retries(name, lambda: in_bucket(name)[0], HEADING)
        try:
            bucket.call_with_retries(name, lambda: files.info(name), HEADING)
        except bucket.MissingFile:
            raise UserError(f"{self}: there is no bucket {name}; make it, or choose another --run.dir") from None
        return files

    def check(self) -> None:
        """Raises: UserError if the bucket is not there, or nothing may be seen in it."""
        _ = self.files

    def ask(self, name: str, work: Callable):
        """work(file system, address of a file). Raises: UserError with the reason."""
        address = f"{self.address}/{name}".rstrip("/")
        return bucket.call_with_retries(address, lambda: work(self.files, address), HEADING)

    def fetch(self) -> None:
        """Have the small files here as they are there, and no others."""
        for file in self.small():
            file.unlink()
        with contextlib.suppress(bucket.MissingFile):  # nothing lies there yet
            for one in self.ask("", lambda files, at: files.ls(at, detail=True)):
                name = one["name"].rpartition("/")[2]
                if name and one["type"] == "file":
                    (self.here / name).write_bytes(self.ask(name, lambda files, at: files.cat_file(at)))

    def small(self) -> list[Path]:
        """What is fetched and sent: files, and not those that begin with a dot or are half written."""
        self.here.mkdir(parents=True, exist_ok=True)
        found = [file for file in self.here.iterdir() if file.is_file()]
        return [file for file in found if file.name[0] != "." and not file.name.endswith(".partial")]

    def take(self) -> None:
        """From now on the run is this process's."""
        self.owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}, {uuid.uuid4().hex[:8]}\n"
        self.ask(OWNER, lambda files, at: files.pipe_file(at, self.owner.encode()))

    def send(self) -> None:
        """Copy to the bucket what has changed here. Raises: UserError if the run is another process's by now."""
        if (owner := self.ask(OWNER, lambda files, at: files.cat_file(at)).decode()) != self.owner:
            raise UserError(f"{self} is now that of {owner.strip()}; this process was {self.owner.strip()}")
        for file in self.small():
            contents = file.read_bytes()
            if file.name != OWNER and self.sent.get(file.name) != (digest := hashlib.sha256(contents).digest()):
                self.ask(file.name, lambda files, at, contents=contents: files.pipe_file(at, contents))
                self.sent[file.name] = digest


HEADING = "run        "


def of(cfg: Config) -> Path | Far:
    """A run's directory."""
    return (
        Far(f"{cfg.run.dir.rstrip('/')}/{cfg.run.name}") if is_remote(cfg.run.dir) else Path(cfg.run.dir, cfg.run.name)
    )


def here(directory: Path | Far) -> Path:
    """The folder of this machine that a run's small files lie in."""
    return directory.here if isinstance(directory, Far) else directory


def check(directory: Path | Far) -> None:
    """Raises: UserError if it names a bucket that is not there, or may not be seen; DiskLost if an earlier attempt of
    this launch lost the directory, and it is still gone: this attempt would begin at step 0 below its mount point."""
    if isinstance(directory, Far):
        directory.check()
    elif (mark := lost_mark()) and mark.exists() and not (directory / "config.json").exists():
        raise DiskLost(f"{directory} is still gone: is the shared disk mounted? If you removed it, launch again")


def take(directory: Path | Far) -> None:
    """From now on it is written by this process, as far as a lock does not say so."""
    if isinstance(directory, Far):
        directory.take()


def send(directory: Path | Far) -> None:
    """Have what was written to a run's files so far where the run is kept."""
    if isinstance(directory, Far):
        directory.send()


@contextlib.contextmanager
def fetched(directory: Path | Far) -> Iterator[None]:
    """Within, process 0 has a run's files here, and at the end they are where the run is kept, if this one took it."""
    if not isinstance(directory, Far) or not is_main_process():
        yield
        return
    directory.fetch()
    try:
        yield
    except BaseException:
        try:
            if directory.owner:
                directory.send()
        except Exception as error:  # the first one is the one to show
            log(f"note: what was written since the last checkpoint stays in {directory.here}: {error}")
        raise
    if directory.owner:
        directory.send()


@contextlib.contextmanager
def copied(directory: Path | Far) -> Iterator[Path | Far]:
    """The same, to be looked at: a run that is alive on this machine keeps its files."""
    if not isinstance(directory, Far):
        yield directory
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Far(directory.address, Path(folder, directory.name))
        copy.fetch()
        yield copy


def remove(directory: Path | Far, name: str) -> None:
    """Remove a file or folder of a run, if it is there."""
    path = directory / name
    clear(path)
    if isinstance(directory, Far) and directory.ask(name, lambda files, at: files.exists(at)):
        directory.ask(name, lambda files, at: files.rm(at, recursive=True))


# A disk that goes away under a run ------------------------------------------------------------------------------------

# What the system reports of a file server, or a device, that is no longer there. A connection of the program itself
# that is reset or refused has other numbers.
LOST_DISK = {getattr(errno, name, None) for name in (
    "ESTALE", "EIO", "ENOTCONN", "ENODEV", "ENXIO", "EREMOTEIO", "ESHUTDOWN", "ETIMEDOUT", "EHOSTDOWN")}  # fmt: skip


def lost_mark() -> Path | None:
    """The file that notes for the next attempt of this launch that the run's directory is lost."""
    alive = os.environ.get("AXIS_ALIVE")
    return Path(alive).with_name("disk_lost") if alive else None


def why_lost(error: Exception, directory: str | os.PathLike) -> str | None:
    """Say that an error means that the disk of a run's directory went away; None: it means something else.

    A full disk, and one that may only be read, stay where they are, so a restart would not help.
    """
    if not os.path.exists(directory):
        return f"{directory} is gone: is the shared disk mounted?"
    in_text = re.search(r"os_error_code='?(\d+)", str(error))  # tensorstore repeats the number in a ValueError
    number = int(in_text[1]) if in_text else getattr(error, "errno", None)
    named = getattr(error, "filename", None)
    elsewhere = isinstance(named, (str, os.PathLike)) and not Path(named).absolute().is_relative_to(
        Path(directory).absolute()
    )
    if number not in LOST_DISK - {None} or elsewhere:
        return None
    return f"{directory} does not answer ({os.strerror(number)}): is the shared disk mounted?"


@contextlib.contextmanager
def watched(directory: Path | Far, writes: Callable[[], bool]) -> Iterator[None]:
    """Within, an OSError because the disk of a run's directory went away is raised as DiskLost.

    writes   whether this process writes to that disk
    """
    try:
        yield
    except (OSError, DiskLost) as error:
        why = str(error) if isinstance(error, DiskLost) else why_lost(error, here(directory))
        if why is None or isinstance(directory, Far) or not writes():
            raise
        with contextlib.suppress(OSError):
            if mark := lost_mark():
                mark.touch()
        raise DiskLost(why) from error


# Files by path or address ---------------------------------------------------------------------------------------------


def in_bucket(address: str):
    """fsspec's file system of an address, and the path in it. What it lists is never remembered: others write there."""
    import fsspec  # here, because only a run in a bucket needs it

    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False  # of Orbax's own too
    return bucket.file_system(address)


def absolute(path: str | os.PathLike) -> str:
    path = os.fspath(path)
    if is_remote(path):
        in_bucket(path)
        return path.rstrip("/")
    return os.path.abspath(path)


def replace_file(path: str | os.PathLike, text: str) -> None:
    """Write a file whole or not at all."""
    partial = f"{path}.partial"
    Path(partial).write_text(text, encoding="utf-8")
    os.replace(partial, path)


def clear(path: str | os.PathLike) -> None:
    """Remove a file or folder, if it is there."""
    path = epath.Path(path)
    path.rmtree() if path.is_dir() else path.unlink(missing_ok=True)


def sizes(folder: str) -> dict[str, tuple[int, str]]:
    """The files below a folder: bytes, and what changes with the contents: the time, or of a bucket the md5, in hex."""
    found = {}
    if is_remote(folder):
        files, root = in_bucket(folder)
        for path, one in files.find(root, detail=True).items():
            md5 = base64.b64decode(one.get("md5Hash") or "").hex()
            found[os.path.relpath(path, root)] = one["size"], md5
        return found
    for inside, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            status = os.stat(path := os.path.join(inside, name))
            found[os.path.relpath(path, folder)] = status.st_size, str(status.st_mtime_ns)
    return found
