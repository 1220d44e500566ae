"""Read token shards from a bucket: download the blocks that this host needs into a cache folder of limited size.

Buckets are `gs://`, `s3://` or any other protocol of fsspec. A block is BLOCK_BYTES of a file. A host downloads only
the blocks that contain its own rows, several at a time, while earlier batches train.
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

from utils import UserError, cache_directory, log

BLOCK_BYTES = 2**18  # downloads in about the same time as a single window, and later windows use it too
CACHE_BYTES = 20 * 2**30  # limit of the cache, for all buckets together
MAX_REQUESTS = 32  # requests in flight at the same time
WAITS_S = (1, 2, 4, 8, 12)  # delay before each retry


class MissingFile(UserError):
    """The requested file does not exist."""


def file_system(address: str):
    """Return the fsspec file system of a path or URL, and the path in it.

    Turns off the retries of the S3 and GCS clients, which print nothing for half a minute. Use `retry` instead.
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
    """Return work(). If it fails, print the reason and retry after each delay in `waits_s`.

    at_once  exceptions that a retry would not fix: they are raised immediately
    Raises: UserError with the last reason.
    """
    for wait_s in (*waits_s, None):
        try:
            return work()
        except at_once:
            raise
        except Exception as error:  # each protocol has its own errors
            message = " ".join(str(error).split())[:300]  # a server may answer with an HTML page
            reason = f"{what}: {type(error).__name__}: {message}"
            if wait_s is None:
                raise UserError(f"{reason}; gave up after {len(waits_s) + 1} attempts. Check the network.") from error
        log(f"{heading}{reason}; retrying in {wait_s} s")
        time.sleep(wait_s)


def call_with_retries(what: str, work: Callable, heading: str = "data       "):
    """Return work(), with retries as in `retry` over WAITS_S.

    Raises: UserError with the last reason; immediately if the file or protocol does not exist or access is denied.
    """
    at_once = (FileNotFoundError, PermissionError, ImportError, ValueError)

    def attempt():
        try:
            return work()
        except OSError as error:
            if str(error).startswith("Forbidden"):  # the GCS client's error, followed by an HTML page
                raise PermissionError(" ".join(str(error).split())[:300]) from error
            raise

    try:
        return retry(what, attempt, WAITS_S, at_once, heading)
    except UserError:
        raise
    except FileNotFoundError:
        raise MissingFile(f"{what}: no such file") from None
    except at_once as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error


class Cache:
    """Files in a folder, up to `limit_bytes` in total. The least recently used files are deleted first."""

    def __init__(self, folder: Path, limit_bytes: float):
        self.folder, self.limit_bytes, self.lock = folder, limit_bytes, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        known = []
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # another process deleted it
                known.append((file.stat().st_mtime, file.name, file.stat().st_size))
        self.sizes = OrderedDict((name, size) for _, name, size in sorted(known))
        self.bytes = sum(self.sizes.values())

    def get(self, name: str, start: int, stop: int) -> bytes | None:
        """Return bytes start .. stop-1 of a file, or None if it is not cached."""
        with self.lock:
            if name not in self.sizes:
                return None
            self.sizes.move_to_end(name)
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except FileNotFoundError:  # another process deleted it
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
            except OSError as error:  # a full disk slows the run down but does not stop it
                own.unlink(missing_ok=True)
                return log(f"data       {self.folder}: cannot cache more data: {error}")
            self.sizes[name] = len(contents)
            self.bytes += len(contents)

    def _make_room(self, more: int) -> None:
        while self.sizes and self.bytes + more > self.limit_bytes:
            name, size = self.sizes.popitem(last=False)
            (self.folder / name).unlink(missing_ok=True)
            self.bytes -= size


@functools.cache
def cache() -> Cache:
    """Return this host's cache, which all buckets share."""
    return Cache(Path(cache_directory()) / "shards", CACHE_BYTES)


@functools.cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="bucket")


class Bucket:
    """A directory in a bucket."""

    def __init__(self, path: str):
        self.path = path.rstrip("/")
        self.files, self.root = call_with_retries(path, lambda: file_system(self.path))
        self.version, self.locks = "", [threading.Lock() for _ in range(4 * MAX_REQUESTS)]

    def read_file(self, name: str) -> bytes:
        """Read the manifest, without caching it. Its hash becomes part of the keys of all later cache entries."""
        contents = call_with_retries(f"{self.path}/{name}", lambda: self.files.cat_file(f"{self.root}/{name}"))
        self.version = hashlib.sha256(self.path.encode() + contents).hexdigest()[:16]
        return contents

    def open(self, name: str):
        return call_with_retries(f"{self.path}/{name}", lambda: self.files.open(f"{self.root}/{name}", "rb"))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start .. stop-1 of a file, or fewer if it ends before."""
        blocks = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        return b"".join(self._block(name, n, max(start - n * BLOCK_BYTES, 0), stop - n * BLOCK_BYTES) for n in blocks)

    def _block(self, name: str, number: int, start: int, stop: int) -> bytes:
        key = f"{self.version}-{name.replace('/', '-')}-{number}"
        stop = min(stop, BLOCK_BYTES)
        with self.locks[hash(key) % len(self.locks)]:  # download a block once, even if two rows need it
            if (cached := cache().get(key, start, stop)) is not None:
                return cached
            first = number * BLOCK_BYTES
            download = lambda: self.files.cat_file(f"{self.root}/{name}", start=first, end=first + BLOCK_BYTES)
            contents = call_with_retries(f"{self.path}/{name}, bytes from {first}", download)
            cache().put(key, contents)
            return contents[start:stop]


class Shard:
    """A shard in a bucket. Slice it like an array: only the blocks that the slice needs are downloaded."""

    def __init__(self, bucket: Bucket, name: str, tokens: int, dtype: str, damaged: Callable[[str, str], UserError]):
        self.bucket, self.name, self.tokens = bucket, name, tokens
        self.dtype, self.damage_error = np.dtype(dtype), damaged

    def __len__(self) -> int:
        return self.tokens

    @functools.cached_property
    def data_start(self) -> int:
        """Offset of the first token, in bytes, after a header that must match the manifest."""
        file = io.BytesIO(self.bucket.read(self.name, 0, 4096))
        where = f"{self.bucket.path}/{self.name}"
        try:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
        except ValueError as error:
            raise self.damage_error(where, f"cannot be opened: {error}") from error
        if (shape, dtype) != ((self.tokens,), self.dtype):
            raise self.damage_error(where, f"has {dtype} {shape}, but the manifest has {self.dtype} ({self.tokens},)")
        return file.tell()

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.tokens)
        size = self.dtype.itemsize
        contents = self.bucket.read(self.name, self.data_start + start * size, self.data_start + stop * size)
        if len(contents) != (stop - start) * size:
            raise self.damage_error(f"{self.bucket.path}/{self.name}", f"ends before token {stop - 1}")
        return np.frombuffer(contents, self.dtype)
