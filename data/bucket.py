"""Token shards that lie elsewhere: what this host needs of them is fetched in blocks, into a bounded folder.

`gs://`, `s3://` and whatever else fsspec reads. A block is so many bytes of a file. A host fetches the blocks that its
own rows lie in, several at once, while the batches before them train; nothing else of a run's data comes by network.
"""

import functools
import hashlib
import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from devices import cache_directory, log
from errors import UserError

BLOCK_BYTES = 2**18  # an answer takes as long as that of one window, and in time its neighbours are asked for too
CACHE_BYTES = 20 * 2**30  # most that a host keeps of all buckets
MAX_REQUESTS = 32  # requests that are under way together
WAITS_S = (1, 2, 4, 8, 12)  # before each further try


class MissingFile(UserError):
    """What was asked for is not there."""


def file_system(address: str):
    """The file system that fsspec has for a path or an address, and the path in it.

    Of S3 and GCS, nothing is tried again by the client, which would for half a minute without a word: `retry` does.
    """
    import fsspec  # here, because it is slow to import

    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if address.startswith("s3") else {}
    files, path = fsspec.core.url_to_fs(address, **once)
    if address.startswith("s3"):
        files.retries = 1
    if address.startswith(("gs:", "gcs:")):
        files._request = type(files)._request.__wrapped__.__get__(files)
    return files, path


def retry(what: str, work, waits_s, at_once: tuple, heading: str = ""):
    """Return what a call returns, calling again with longer and longer waits; each reason to is printed.

    at_once  what no wait mends, and is raised as it is
    Raises: UserError with the last reason.
    """
    for wait_s in (*waits_s, None):
        try:
            return work()
        except at_once:
            raise
        except Exception as error:  # each protocol has errors of its own
            said = " ".join(str(error).split())[:300]  # a server may answer with a page
            reason = f"{what}: {type(error).__name__}: {said}"
            if wait_s is None:
                raise UserError(f"{reason}; tried {len(waits_s) + 1} times. Is the network there?") from error
        log(f"{heading}{reason}; again in {wait_s} s")
        time.sleep(wait_s)


def call_with_retries(what: str, work: Callable, heading: str = "data       "):
    """Call until it works, with longer and longer waits; each reason to try again is printed.

    Raises: UserError with the last reason; at once for what is not there or not allowed, or a protocol that is not.
    """
    at_once = (FileNotFoundError, PermissionError, ImportError, ValueError)

    def ask():
        try:
            return work()
        except OSError as error:
            if str(error).startswith("Forbidden"):  # as GCS's client says it, with a page
                raise PermissionError(" ".join(str(error).split())[:300]) from error
            raise

    try:
        return retry(what, ask, WAITS_S, at_once, heading)
    except UserError:
        raise
    except FileNotFoundError:
        raise MissingFile(f"{what}: not there") from None
    except at_once as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error


class Cache:
    """Files in a folder, at most so many bytes of them: those that were not used for longest go first."""

    def __init__(self, folder: Path, limit_bytes: float):
        self.folder, self.limit_bytes, self.lock = folder, limit_bytes, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        known = []
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # another process made room
                known.append((file.stat().st_mtime, file.name, file.stat().st_size))
        self.sizes = OrderedDict((name, size) for _, name, size in sorted(known))
        self.bytes = sum(self.sizes.values())

    def get(self, name: str, start: int, stop: int) -> bytes | None:
        """Bytes start .. stop-1 of a file; None if it is not here."""
        with self.lock:
            if name not in self.sizes:
                return None
            self.sizes.move_to_end(name)
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except FileNotFoundError:  # of another process
            with self.lock:
                self.bytes -= self.sizes.pop(name, 0)
            return None

    def put(self, name: str, contents: bytes) -> None:
        with self.lock:
            self._make_room(len(contents))
            if len(contents) > self.limit_bytes or name in self.sizes:
                return
            own = self.folder / f"{name}.{os.getpid()}"
            try:
                own.write_bytes(contents)
                own.replace(self.folder / name)
            except OSError as error:  # a full disk slows a run down, and does not end it
                own.unlink(missing_ok=True)
                return log(f"data       {self.folder} keeps nothing more: {error}")
            self.sizes[name] = len(contents)
            self.bytes += len(contents)

    def _make_room(self, more: int) -> None:
        while self.sizes and self.bytes + more > self.limit_bytes:
            name, size = self.sizes.popitem(last=False)
            (self.folder / name).unlink(missing_ok=True)
            self.bytes -= size


@functools.cache
def cache() -> Cache:
    """The folder of this host, for all buckets."""
    return Cache(Path(cache_directory()) / "shards", CACHE_BYTES)


@functools.cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="bucket")


class Bucket:
    """A directory that lies elsewhere."""

    def __init__(self, path: str):
        self.path = path.rstrip("/")
        self.files, self.root = call_with_retries(path, lambda: file_system(self.path))
        self.version, self.locks = "", [threading.Lock() for _ in range(4 * MAX_REQUESTS)]

    def read_file(self, name: str) -> bytes:
        """A small file, never kept; what is fetched afterwards belongs to this one's contents."""
        contents = call_with_retries(f"{self.path}/{name}", lambda: self.files.cat_file(f"{self.root}/{name}"))
        self.version = hashlib.sha256(self.path.encode() + contents).hexdigest()[:16]
        return contents

    def open(self, name: str):
        return call_with_retries(f"{self.path}/{name}", lambda: self.files.open(f"{self.root}/{name}", "rb"))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start .. stop-1 of a file, fewer where it ends."""
        blocks = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return b"".join(self._block(name, n, max(start - n * BLOCK_BYTES, 0), stop - n * BLOCK_BYTES) for n in blocks)

    def _block(self, name: str, number: int, start: int, stop: int) -> bytes:
        key = f"{self.version}-{name.replace('/', '-')}-{number}"
        stop = min(stop, BLOCK_BYTES)
        with self.locks[hash(key) % len(self.locks)]:  # two rows of one block ask once
            if (found := cache().get(key, start, stop)) is not None:
                return found
            first = number * BLOCK_BYTES
            ask = lambda: self.files.cat_file(f"{self.root}/{name}", start=first, end=first + BLOCK_BYTES)
            contents = call_with_retries(f"{self.path}/{name}, bytes from {first}", ask)
            cache().put(key, contents)
            return contents[start:stop]


class Shard:
    """A shard in a bucket: read by slices as an array in memory is, and fetched no further than that."""

    def __init__(self, bucket: Bucket, name: str, tokens: int, dtype: str, damaged: Callable[[str, str], UserError]):
        self.bucket, self.name, self.tokens, self.dtype, self.damaged = bucket, name, tokens, np.dtype(dtype), damaged

    def __len__(self) -> int:
        return self.tokens

    @functools.cached_property
    def data_start(self) -> int:
        """Where its tokens begin, behind a header that says what the manifest does."""
        file = io.BytesIO(self.bucket.read(self.name, 0, 4096))
        where = f"{self.bucket.path}/{self.name}"
        try:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
        except ValueError as error:
            raise self.damaged(where, f"cannot be opened: {error}") from error
        if (shape, dtype) != ((self.tokens,), self.dtype):
            raise self.damaged(where, f"holds {dtype} {shape}, the manifest says {self.dtype} ({self.tokens},)")
        return file.tell()

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.tokens)
        size = self.dtype.itemsize
        found = self.bucket.read(self.name, self.data_start + start * size, self.data_start + stop * size)
        if len(found) != (stop - start) * size:
            raise self.damaged(f"{self.bucket.path}/{self.name}", f"ends before its token {stop - 1}")
        return np.frombuffer(found, self.dtype)
