"""Store a run in a directory on a disk, or at gs://BUCKET/DIR. The rest of the program treats both the same way.

In a bucket, files cannot be appended to, renamed or locked. A run in a bucket therefore works like this:

- Every process writes its shards of a checkpoint directly to the bucket. The manifest of a step is written last, and a
  step without one is not a checkpoint (`checkpoint.py`).
- During training, all other files are in a local folder on process 0's machine. Process 0 downloads them at the start.
  It uploads those that changed before and after it writes the manifest of a step, and when the run ends for any reason.
- The file `owner` names the process that may write: the one that started last. An earlier process finds another name
  in this file, and exits before it writes a manifest.
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
from data.reading import bucket
from utils import DiskLost, UserError, cache_directory, is_main_process, log

CHECKPOINTS, OWNER = "checkpoints", "owner"


class BucketDirectory:
    """A run's directory in a bucket. It replaces the Path of a local run: `directory / name` is the path of a file.

    here   local folder for the run's files other than checkpoints; default: a folder in the user's cache
    """

    def __init__(self, address: str, here: Path | None = None):
        digest = hashlib.sha256(address.encode()).hexdigest()[:16]
        self.address, self.name = address, address.rpartition("/")[2]
        self.local = here or Path(cache_directory(), "runs", digest, self.name)
        self.owner, self.sent = "", {}

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str):
        return epath.Path(f"{self.address}/{name}") if name == CHECKPOINTS else self.local / name

    @functools.cached_property
    def files(self):
        """Return the bucket's file system. Raises: UserError if the bucket does not exist; a write would create it."""
        name = "/".join(self.address.split("/")[:3])
        files = bucket.call_with_retries(name, lambda: open_file_system(name)[0], HEADING)
        try:
            bucket.call_with_retries(name, lambda: files.info(name), HEADING)
        except bucket.MissingFile:
            raise UserError(f"{self}: no bucket {name}; create it, or choose another --run.dir") from None
        return files

    def check(self) -> None:
        """Raises: UserError if the bucket does not exist, or if this user has no permission to read it."""
        _ = self.files

    def call(self, name: str, work: Callable):
        """Return work(file system, URL of the file `name`), with retries. Raises: UserError with the reason."""
        address = f"{self.address}/{name}".rstrip("/")
        return bucket.call_with_retries(address, lambda: work(self.files, address), HEADING)

    def download(self) -> None:
        """Replace the local files with those in the bucket."""
        for file in self.local_files():
            file.unlink()
        with contextlib.suppress(bucket.MissingFile):  # the run has no files there yet
            for one in self.call("", lambda files, at: files.ls(at, detail=True)):
                name = one["name"].rpartition("/")[2]
                if name and one["type"] == "file":
                    (self.local / name).write_bytes(self.call(name, lambda files, at: files.cat_file(at)))

    def local_files(self) -> list[Path]:
        """List the local files to synchronize: all except half-written files and names that start with a dot."""
        self.local.mkdir(parents=True, exist_ok=True)
        files = [file for file in self.local.iterdir() if file.is_file()]
        return [file for file in files if file.name[0] != "." and not file.name.endswith(".partial")]

    def claim_ownership(self) -> None:
        """Make this process the owner of the run."""
        self.owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}, {uuid.uuid4().hex[:8]}\n"
        self.call(OWNER, lambda files, at: files.pipe_file(at, self.owner.encode()))

    def upload(self) -> None:
        """Upload the files that have changed. Raises: UserError if another process has become the owner of the run."""
        if (owner := self.call(OWNER, lambda files, at: files.cat_file(at)).decode()) != self.owner:
            raise UserError(f"{self} is now in use by {owner.strip()}; this process ({self.owner.strip()}) stops")
        for file in self.local_files():
            contents = file.read_bytes()
            if file.name != OWNER and self.sent.get(file.name) != (digest := hashlib.sha256(contents).digest()):
                self.call(file.name, lambda files, at, contents=contents: files.pipe_file(at, contents))
                self.sent[file.name] = digest


HEADING = "run        "


def run_directory(cfg: Config) -> Path | BucketDirectory:
    """Return the directory of a run."""
    return (
        BucketDirectory(f"{cfg.run.dir.rstrip('/')}/{cfg.run.name}")
        if is_remote(cfg.run.dir)
        else Path(cfg.run.dir, cfg.run.name)
    )


def local_folder(directory: Path | BucketDirectory) -> Path:
    """Return the local folder that holds a run's files other than checkpoints."""
    return directory.local if isinstance(directory, BucketDirectory) else directory


def check(directory: Path | BucketDirectory) -> None:
    """Raises: UserError if the bucket does not exist or cannot be read; DiskLost if the process lost the directory
    before its last restart, and it is still gone. It would otherwise start at step 0 in an empty mount point."""
    if isinstance(directory, BucketDirectory):
        directory.check()
    elif (mark := disk_lost_file()) and mark.exists() and not (directory / "config.json").exists():
        raise DiskLost(f"{directory} is still gone: is the shared disk mounted? If you removed it, launch again")


def claim_ownership(directory: Path | BucketDirectory) -> None:
    """Make this process the owner of a run in a bucket. A run on a disk is not changed: it has a lock file."""
    if isinstance(directory, BucketDirectory):
        directory.claim_ownership()


def upload(directory: Path | BucketDirectory) -> None:
    """Upload the changed files of a run in a bucket."""
    if isinstance(directory, BucketDirectory):
        directory.upload()


@contextlib.contextmanager
def synced(directory: Path | BucketDirectory) -> Iterator[None]:
    """Download a run's files to process 0. On exit, upload them again if `claim_ownership` was called inside."""
    if not isinstance(directory, BucketDirectory) or not is_main_process():
        yield
        return
    directory.download()
    try:
        yield
    except BaseException:
        try:
            if directory.owner:
                directory.upload()
        except Exception as error:  # the first error is the one to show
            log(f"note: files written since the last checkpoint were not uploaded from {directory.local}: {error}")
        raise
    if directory.owner:
        directory.upload()


@contextlib.contextmanager
def temporary_copy(directory: Path | BucketDirectory) -> Iterator[Path | BucketDirectory]:
    """Yield a read-only copy of a run in a bucket, so that a live run on this machine is not disturbed."""
    if not isinstance(directory, BucketDirectory):
        yield directory
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = BucketDirectory(directory.address, Path(folder, directory.name))
        copy.download()
        yield copy


def remove(directory: Path | BucketDirectory, name: str) -> None:
    """Remove a file or folder of a run, if it exists."""
    path = directory / name
    remove_path(path)
    if isinstance(directory, BucketDirectory) and directory.call(name, lambda files, at: files.exists(at)):
        directory.call(name, lambda files, at: files.rm(at, recursive=True))


# A disk that disappears during a run ----------------------------------------------------------------------------------

# Errors that the system reports for a file server or device that is gone. The program's own network connections fail
# with other errors, such as ECONNRESET.
LOST_DISK = {getattr(errno, name, None) for name in (
    "ESTALE", "EIO", "ENOTCONN", "ENODEV", "ENXIO", "EREMOTEIO", "ESHUTDOWN", "ETIMEDOUT", "EHOSTDOWN")}  # fmt: skip


def disk_lost_file() -> Path | None:
    """Return the path of a file that tells this process after a restart that the run's directory was lost."""
    alive = os.environ.get("AXIS_ALIVE")
    return Path(alive).with_name("disk_lost") if alive else None


def explain_lost_disk(error: Exception, directory: str | os.PathLike) -> str | None:
    """Return an explanation if the disk that holds the run directory was lost, or None if the error has another cause.

    A full disk or a read-only disk does not count as lost, since a restart would not help.
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
def raise_disk_lost(directory: Path | BucketDirectory, writes: Callable[[], bool]) -> Iterator[None]:
    """Inside this context, raise DiskLost instead of an OSError if the disk that holds the run directory was lost.

    writes   () -> whether this process writes to that disk
    """
    try:
        yield
    except (OSError, DiskLost) as error:
        why = str(error) if isinstance(error, DiskLost) else explain_lost_disk(error, local_folder(directory))
        if why is None or isinstance(directory, BucketDirectory) or not writes():
            raise
        with contextlib.suppress(OSError):
            if mark := disk_lost_file():
                mark.touch()
        raise DiskLost(why) from error


# Files by path or URL -------------------------------------------------------------------------------------------------


def open_file_system(address: str):
    """Return the fsspec file system of a URL and the path in it. Listings are not cached: other processes write too."""
    import fsspec  # here, because only a run in a bucket needs it

    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False  # also for the file systems Orbax opens
    return bucket.file_system(address)


def absolute_path(path: str | os.PathLike) -> str:
    path = os.fspath(path)
    if is_remote(path):
        open_file_system(path)
        return path.rstrip("/")
    return os.path.abspath(path)


def remove_path(path: str | os.PathLike) -> None:
    """Remove a file or folder, if it exists."""
    path = epath.Path(path)
    path.rmtree() if path.is_dir() else path.unlink(missing_ok=True)


def file_sizes(folder: str) -> dict[str, tuple[int, str]]:
    """Map each file below a folder to its size and a mark of its contents: mtime in ns, or the bucket's md5 in hex."""
    result = {}
    if is_remote(folder):
        files, root = open_file_system(folder)
        for path, one in files.find(root, detail=True).items():
            md5 = base64.b64decode(one.get("md5Hash") or "").hex()
            result[os.path.relpath(path, root)] = one["size"], md5
        return result
    for inside, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            status = os.stat(path := os.path.join(inside, name))
            result[os.path.relpath(path, folder)] = status.st_size, str(status.st_mtime_ns)
    return result
