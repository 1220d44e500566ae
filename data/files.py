"""Files wherever they lie: on this machine, in a bucket, behind http; a compressed one reads as what is in it."""

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
from data.bucket import file_system, retry
from errors import UserError

ANSWER_S = 25  # longest wait for a bucket or a server that has not answered at all
REQUEST_S = 10  # longest wait for one answer of a web server; it is asked twice
WAITS_S = (1, 4, 16)  # before each further try of what needs a network
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
CHUNK_BYTES = 2**20


class File(NamedTuple):
    """A file of a source. Its name decides the split of what is in it, so moving all files changes none."""

    name: str  # POSIX path below the source's root
    path: str  # or its address
    size: int  # bytes, as stored
    version: str  # changes when the contents do: time of the last change, or what a bucket says of it


def local_path(path: str) -> str:
    """The path behind file://; any other as it is."""
    return path.removeprefix("file://") if path.startswith("file://") else path


def call_with_timeout(what: str, seconds: float, work: Callable):
    """Return what a call returns, waiting so long at most: many a client retries for minutes.

    Raises: UserError if it takes longer, or fails for want of a package, a right, a network.
    """
    result = Future()

    def call():
        try:
            result.set_result(work())
        except BaseException as error:  # raised again below, in the caller's thread
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()  # a daemon does not keep a command that gave up alive
    try:
        return result.result(timeout=seconds)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{what}: {error}; install it into .venv") from error
    except TimeoutError as error:
        raise UserError(f"{what}: no answer within {seconds:g} s; is the network there, and the address right?") from (
            error
        )
    except Exception as error:  # each protocol has errors of its own
        raise UserError(
            f"{what}: {type(error).__name__}: {error}; is the network there, and are you allowed in?"
        ) from error


def call_patiently(what: str, remote: bool, work: Callable):
    """Call until it works, if it needs a network, with longer and longer waits; each reason is printed.

    Raises: UserError with the last reason; at once for what no wait mends, and for whatever happens on this machine.
    """
    at_once = (UserError, FileNotFoundError, PermissionError, MemoryError)
    return retry(what, work, WAITS_S, at_once) if remote else work()


def file_system_of(path: str):
    """The file system that a path or address belongs to, and the path in it."""
    return call_with_timeout(path, ANSWER_S, lambda: file_system(local_path(path)))


# Which files ----------------------------------------------------------------------------------------------------------


def find_files(pattern: str, in_folder: str = "**") -> list[File]:
    """List the files a glob matches, by name: the path below the last directory without a wildcard.

    Of a folder, those that match `in_folder` below it. A file that matches under several names, through links or as
    `**/**` does, counts once, under the first of them.
    """
    pattern = os.path.expanduser(local_path(pattern))
    if pattern.startswith(("http://", "https://")):
        return [_web_file(pattern)]
    found = _find_in_bucket(pattern, in_folder) if is_remote(pattern) else _find_local(pattern, in_folder)
    if not found:
        where = "" if is_remote(pattern) else f" (in {os.getcwd()})"
        raise UserError(f"no file matches {pattern!r}{where}; quote the pattern, ** crosses directories")
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
    """The last directory of a pattern that is spelt out; `glob.escape` wraps what it escapes in brackets."""
    plain = re.sub(r"\[([*?\[])\]", lambda match: {"*": "\1", "?": "\2", "[": "\3"}[match[1]], pattern)
    root = os.path.dirname(re.split(r"[*?\[]", plain)[0]) or "."
    return root.translate({1: "*", 2: "?", 3: "["})


def local_file(path: str, name: str) -> File:
    """A file of this machine."""
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
    said = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "updated", "created")
    return sorted(
        File(os.path.relpath(one, root), files.unstrip_protocol(one), info["size"],
             str(next((info[key] for key in said if info.get(key)), "")))
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
    """Open a file for reading from any place in it, as it is stored."""
    if path.startswith(("http://", "https://")):
        return io.BufferedReader(_WebStream(path), CHUNK_BYTES)
    if not is_remote(path):
        return open(path, "rb")
    files, name = file_system_of(path)
    return files.open(name, "rb")


@contextlib.contextmanager
def open_decompressed(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading what is in it, from the beginning. Raises: UserError where that is damaged."""
    with open_stored(path) as stored:
        try:
            kind = compression(path)
            if kind == "gzip":
                yield gzip.GzipFile(fileobj=stored)
            elif kind == "zstd":
                import pyarrow  # here, because every other kind works without it

                inside = pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd")
                yield io.BufferedReader(_ReaderStream(path, inside.read), CHUNK_BYTES)
            else:
                yield stored
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{path}: not whole, or not gzip: {error}") from error


class _ReaderStream(io.RawIOBase):
    """A stream made of a function that reads so many bytes."""

    def __init__(self, path: str, read: Callable[[int], bytes]):
        self.path, self.read_bytes = path, read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            found = self.read_bytes(len(buffer))
        except OSError as error:  # pyarrow's, of zstd
            raise UserError(f"{self.path}: not whole, or not zstd: {error}") from error
        buffer[: len(found)] = found
        return len(found)


# http -----------------------------------------------------------------------------------------------------------------


def open_url(address: str, method: str = "GET", **headers: str):
    """Open an answer of a web server. Raises: UserError, within half a minute, with its reason."""
    request = urllib.request.Request(address, headers=headers, method=method)
    if address.startswith(hub_url()) and (token := os.environ.get("HF_TOKEN")):
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # for the hub, not for where it points to
    for last in (False, True):
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_S)
        except urllib.error.HTTPError as error:
            error.close()
            if last or error.code < 500:
                why = {401: "; set HF_TOKEN if it is yours to read", 403: "; set HF_TOKEN if it is yours to read"}
                raise UserError(f"{address}: {error.code} {error.reason}{why.get(error.code, '')}") from error
        except (OSError, ValueError) as error:
            if last or isinstance(error, ValueError):
                reason = getattr(error, "reason", error)
                raise UserError(f"{address} cannot be reached ({reason}); is the network there, and the address "
                                "right? A copy on this machine is read with text:, jsonl: or parquet:"
                                ) from error  # fmt: skip


def hub_url() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + "/"


class _WebStream(io.RawIOBase):
    """A file behind http, read by ranges: one request goes on until another place is asked for."""

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
                    raise UserError(f"{self.address}: its server does not answer ranges; copy the file")
            try:
                found = self.response.read(min(len(buffer), self.size - self.position))
            except OSError as error:
                if last:
                    raise UserError(f"{self.address}: ends at byte {self.position} of {self.size}: {error}") from error
            if found:
                break
            self.response.close()
            self.response = None
        if not found:
            raise UserError(f"{self.address}: ends at byte {self.position} of {self.size}")
        buffer[: len(found)] = found
        self.position += len(found)
        return len(found)

    def close(self) -> None:
        if self.response:
            self.response.close()
        super().close()
