"""List and read files on this machine, in a bucket or on a web server; compressed files are decompressed."""

import contextlib
import functools
import glob
import gzip
import io
import os
import re
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, NamedTuple

from config.fields import is_remote
from data.reading.bucket import file_system, retry
from utils import UserError

ANSWER_S = 25  # timeout for a bucket or server that does not respond at all
REQUEST_S = 10  # timeout of one request to a web server; it is sent at most twice
WAITS_S = (1, 4, 16)  # delay before each retry of a network request
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
CHUNK_BYTES = 2**20


class File(NamedTuple):
    """A file of a source. Its name decides the split of its documents, so moving the folder changes no split."""

    name: str  # POSIX path below the source's root
    path: str  # path or URL
    size: int  # bytes, as stored
    version: str  # changes when the contents do: modification time, or in a bucket the ETag or similar


def local_path(path: str) -> str:
    """Remove file:// from a path."""
    return path.removeprefix("file://") if path.startswith("file://") else path


def wait_at_most(seconds: float, work: Callable):
    """Return work(). Raises: TimeoutError if it takes longer; the thread that runs it then continues."""
    result = Future()

    def call():
        try:
            result.set_result(work())
        except BaseException as error:  # raised again below, in the caller's thread
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()  # a daemon does not block the exit
    return result.result(timeout=seconds)


def call_with_timeout(what: str, seconds: float, work: Callable):
    """Return work(), but wait at most this many seconds, because many clients retry for minutes.

    Raises: UserError if it takes longer, if a package or permission is missing, or if the network fails.
    """
    try:
        return wait_at_most(seconds, work)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what}: {error}; install the package into .venv") from error
    except TimeoutError as error:
        raise UserError(f"{what}: timed out after {seconds:g} s; check the network and the URL") from error
    except Exception as error:  # each protocol has its own errors
        raise UserError(f"{what}: {type(error).__name__}: {error}; check the network and your permissions") from error


def retry_if_remote(what: str, remote: bool, work: Callable):
    """Return work(). If it is remote, retry after increasing delays, and print each reason.

    Raises: UserError with the last reason. Errors of local files, and those that a retry would not fix, are unchanged.
    """
    at_once = (UserError, FileNotFoundError, PermissionError, MemoryError)
    return retry(what, work, WAITS_S, at_once) if remote else work()


def file_system_of(path: str):
    """Return the file system of a path or URL, and the path in it."""
    return call_with_timeout(path, ANSWER_S, lambda: file_system(local_path(path)))


# Which files ----------------------------------------------------------------------------------------------------------


def find_files(pattern: str, in_folder: str = "**") -> list[File]:
    """List the files that a glob matches, sorted by name: the path below the last directory before a wildcard.

    If the pattern is a folder, list the files in it that match `in_folder`. A file with several matching paths, because
    of links or `**/**`, is listed once, under the first name.
    """
    pattern = os.path.expanduser(local_path(pattern))
    if pattern.startswith(("http://", "https://")):
        return [_web_file(pattern)]
    found = _find_in_bucket(pattern, in_folder) if is_remote(pattern) else _find_local(pattern, in_folder)
    if not found:
        where = "" if is_remote(pattern) else f" (in {os.getcwd()})"
        raise UserError(f"no file matches {pattern!r}{where}; quote the pattern; ** matches subdirectories")
    return found


def _find_local(pattern: str, in_folder: str) -> list[File]:
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), in_folder)
    elif os.path.isfile(pattern):
        pattern = glob.escape(pattern)
    root = _before_wildcards(pattern)
    paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    names = sorted(((Path(os.path.relpath(path, root)).as_posix(), path) for path in paths), reverse=True)
    once = sorted({os.path.realpath(path): (name, path) for name, path in names}.values())
    return [local_file(path, name) for name, path in once]


def _before_wildcards(pattern: str) -> str:
    """Return the last directory before any wildcard. A wildcard that `glob.escape` put in brackets does not count."""
    plain = re.sub(r"\[([*?\[])\]", lambda match: {"*": "\1", "?": "\2", "[": "\3"}[match[1]], pattern)
    root = os.path.dirname(re.split(r"[*?\[]", plain)[0]) or "."
    return root.translate({1: "*", 2: "?", 3: "["})


def local_file(path: str, name: str) -> File:
    """Describe a file of this machine."""
    state = os.stat(path)
    return File(name, path, state.st_size, str(state.st_mtime_ns))


def _find_in_bucket(pattern: str, in_folder: str) -> list[File]:
    files, path = file_system_of(pattern)

    def look():
        root = os.path.dirname(re.split(r"[*?\[]", path)[0])
        found = files.glob(path, detail=True)
        if not any(info["type"] == "file" for info in found.values()) and files.isdir(path):
            root = path.rstrip("/")
            found = files.glob(f"{root}/{in_folder}", detail=True)
        return root, found

    root, found = call_with_timeout(pattern, ANSWER_S, look)
    keys = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "updated", "created")
    return sorted(
        File(os.path.relpath(one, root), files.unstrip_protocol(one), info["size"],
             str(next((info[key] for key in keys if info.get(key)), "")))
        for one, info in found.items() if info["type"] == "file"
    )  # fmt: skip


def _web_file(address: str) -> File:
    with open_url(address, method="HEAD") as answer:
        size = int(answer.headers.get("Content-Length") or 0)
        version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    return File(os.path.basename(address), address, size, version)


# What is in them ------------------------------------------------------------------------------------------------------


def compression(path: str) -> str | None:
    return COMPRESSED.get(os.path.splitext(path)[1])


def open_stored(path: str) -> BinaryIO:
    """Open a file for reading its stored bytes, with seek."""
    if path.startswith(("http://", "https://")):
        return io.BufferedReader(_WebStream(path), CHUNK_BYTES)
    if not is_remote(path):
        return open(path, "rb")
    files, name = file_system_of(path)
    return files.open(name, "rb")


@contextlib.contextmanager
def open_decompressed(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading its decompressed contents. Raises: UserError where the file is damaged."""
    with open_stored(path) as stored:
        try:
            kind = compression(path)
            if kind == "gzip":
                yield gzip.GzipFile(fileobj=stored)
            elif kind == "zstd":
                import pyarrow  # here, because only zstd needs it

                inside = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd")
                yield io.BufferedReader(_ReaderStream(path, inside.read), CHUNK_BYTES)
            else:
                yield stored
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{path}: truncated, or not gzip: {error}") from error


class _ReaderStream(io.RawIOBase):
    """A stream on top of a function read(n) that returns at most n bytes."""

    def __init__(self, path: str, read: Callable[[int], bytes]):
        self.path, self.read_bytes = path, read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            contents = self.read_bytes(len(buffer))
        except OSError as error:  # pyarrow's, of zstd
            raise UserError(f"{self.path}: truncated, or not zstd: {error}") from error
        buffer[: len(contents)] = contents
        return len(contents)


# http -----------------------------------------------------------------------------------------------------------------


def open_url(address: str, method: str = "GET", **headers: str):
    """Send a request to a web server and return the open response. Raises: UserError within half a minute."""
    request = urllib.request.Request(address, headers=headers, method=method)
    for last in (False, True):
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_S)
        except urllib.error.HTTPError as error:
            error.close()
            if last or error.code < 500:
                raise UserError(f"{address}: {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            if last or isinstance(error, ValueError):
                reason = getattr(error, "reason", error)
                raise UserError(f"{address} cannot be reached ({reason}); check the network and the URL, or download "
                                "a copy and pass it as text:FILE, jsonl:FILE or parquet:FILE") from error  # fmt: skip


class _WebStream(io.RawIOBase):
    """A file on a web server, read by ranges. One request continues until `seek` moves the position."""

    def __init__(self, address: str):
        self.address, self.position, self.response = address, 0, None

    @functools.cached_property
    def size(self) -> int:
        return _web_file(self.address).size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        if place != self.position and self.response:
            self.response.close()
            self.response = None
        self.position = place
        return place

    def readinto(self, buffer) -> int:
        if self.position >= self.size:
            return 0
        found = b""
        for last in (False, True):
            if self.response is None:
                self.response = open_url(self.address, Range=f"bytes={self.position}-")
                if self.position and self.response.status != 206:
                    raise UserError(f"{self.address}: the server rejects range requests; download the file first")
            try:
                found = self.response.read(min(len(buffer), self.size - self.position))
            except OSError as error:
                if last:
                    raise UserError(
                        f"{self.address}: received only {self.position} of {self.size} bytes: {error}"
                    ) from error
            if found:
                break
            self.response.close()
            self.response = None
        if not found:
            raise UserError(f"{self.address}: received only {self.position} of {self.size} bytes; try again")
        buffer[: len(found)] = found
        self.position += len(found)
        return len(found)

    def close(self) -> None:
        if self.response:
            self.response.close()
        super().close()
