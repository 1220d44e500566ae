"""Define the files on disk: a directory or bucket with atomic writes, the token files of units, and shards."""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from config.fields import is_remote
from data import files
from utils import UserError

SPLITS = ("train", "val")


class Folder:
    """A directory on this machine or in a bucket. Files appear in it only when they are complete."""

    def __init__(self, path: str):
        self.path = files.local_path(path)
        self.files, self.root = files.file_system_of(self.path)
        self.is_local = not is_remote(self.path)

    def __getstate__(self):
        return self.path

    def __setstate__(self, path):  # in another process
        self.__init__(path)

    def subfolder(self, name: str) -> "Folder":
        return Folder(f"{self.path.rstrip('/')}/{name}")

    def _call(self, work: Callable):
        return files.retry_if_remote(self.path, not self.is_local, work)

    def _path_of(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def make(self) -> None:
        if self.is_local:  # a bucket has no directories, and the S3 client would create the bucket
            self.files.makedirs(self.root, exist_ok=True)

    def file_names(self) -> list[str]:
        """List the names of the files in this folder, without subfolders."""
        self.files.invalidate_cache()
        try:
            found = self._call(lambda: self.files.ls(self.root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(os.path.basename(one["name"]) for one in found if one["type"] == "file")

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        try:
            return self._call(lambda: self.files.info(self._path_of(name)))["size"]
        except FileNotFoundError:
            return None

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        return self._call(lambda: self.files.cat_file(self._path_of(name), start=start, end=stop))

    def write(self, name: str, fill: Callable) -> None:
        """Write a file by calling fill(file). The file appears when it is complete.

        Raises: UserError if the bucket does not exist.
        """
        try:
            self._call(lambda: self._write(name, fill))
        except FileNotFoundError as error:
            if self.is_local:
                raise
            raise UserError(f"{self.path}: the bucket does not exist ({error}); create it first") from error

    def _write(self, name: str, fill: Callable) -> None:
        if not self.is_local:  # an object appears in a bucket when its upload is complete
            contents = io.BytesIO()
            fill(contents)
            return self.files.pipe_file(self._path_of(name), contents.getvalue())
        partial = self._path_of(f"{name}.{os.getpid()}.part")
        try:
            with self.files.open(partial, "wb") as file:
                fill(file)
            os.replace(partial, self._path_of(name))
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.files.rm_file(partial)
            if isinstance(error, OSError) and error.filename is None:  # for example when the disk is full
                error.filename = self._path_of(name)
            raise

    def move_from(self, name: str, other: "Folder") -> None:
        """Move a file here from another folder on the same disk or in the same bucket."""
        source, target = other._path_of(name), self._path_of(name)
        if self.is_local:
            return os.replace(source, target)
        other._call(lambda: self.files.cp_file(source, target))  # a bucket cannot rename
        other.remove(name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: self.files.rm_file(self._path_of(name)))

    def clear(self) -> None:
        """Delete the folder and everything in it."""
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: self.files.rm(self.root, recursive=True))

    def sha256(self, name: str) -> str:
        def digest() -> str:
            with self.files.open(self._path_of(name), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return self._call(digest)


# Units ----------------------------------------------------------------------------------------------------------------


class UnitHead(NamedTuple):
    """Header of a unit's token file. The lengths of its documents and their tokens follow."""

    documents: dict[str, int]  # by split
    tokens: dict[str, int]
    text_bytes: dict[str, int]
    odd: int  # documents that are not UTF-8
    first_odd: str  # name of the first such document


def write_unit(folder: Folder, name: str, dtype: np.dtype, tokens: dict[str, list[np.ndarray]], head: UnitHead) -> None:
    header = json.dumps(head._asdict()).encode()

    def fill(file):
        file.write(len(header).to_bytes(8, "little") + header)
        for split in SPLITS:
            file.write(np.array([len(one) for one in tokens[split]], "<i8").tobytes())
        for split in SPLITS:
            for one in tokens[split]:
                file.write(one.astype(dtype, copy=False).tobytes())

    folder.write(name, fill)


@dataclass
class UnitFile:
    """A token file written by a worker. Read it in slices."""

    folder: Folder
    name: str
    dtype: np.dtype

    def __post_init__(self):
        size = int.from_bytes(self.folder.read(self.name, 0, 8), "little")
        self.head = UnitHead(**json.loads(self.folder.read(self.name, 8, 8 + size)))
        self.header_end = 8 + size

    def _token_offset(self, split: str) -> int:
        """Return the offset in bytes of a split's first token."""
        before = self.head.tokens["train"] if split == "val" else 0
        return self.header_end + 8 * sum(self.head.documents.values()) + before * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Size in bytes that the file has when it is complete."""
        return self._token_offset("val") + self.head.tokens["val"] * self.dtype.itemsize

    def lengths(self, split: str) -> np.ndarray:
        start = self.header_end + (8 * self.head.documents["train"] if split == "val" else 0)
        if not (count := self.head.documents[split]):
            return np.zeros(0, np.int64)
        return np.frombuffer(self.folder.read(self.name, start, start + 8 * count), "<i8")

    def read(self, split: str, start: int, stop: int) -> np.ndarray:
        place = self._token_offset(split)
        size = self.dtype.itemsize
        return np.frombuffer(self.folder.read(self.name, place + start * size, place + stop * size), self.dtype)


def open_complete_unit(folder: Folder, name: str, dtype: np.dtype) -> UnitFile | None:
    """Open a unit that an earlier run wrote. Returns None if the file is truncated, as after a power failure."""
    try:
        file = UnitFile(folder, name, dtype)
    except (ValueError, TypeError):
        return None
    return file if file.size == folder.size(name) else None


# Shards ---------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Tokens start .. stop-1 of a unit."""

    unit: int | str
    start: int
    stop: int


class Shard(NamedTuple):
    """The contents of one shard, before it is written."""

    file: str
    split: str
    pieces: tuple[Piece, ...]
    tokens: int
    documents: int

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


@dataclass
class ShardPlanner:
    """Assigns the documents of one split to shards. A document that does not fit into the shard starts the next one.

    A document longer than a shard is split over several shards, and counts in the first of them.
    """

    split: str
    shard_tokens: int
    shards: list[Shard] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    _tokens: int = 0
    _documents: int = 0

    def add(self, unit: int | str, lengths: np.ndarray) -> None:
        """Add the documents of the next unit; `lengths` has the tokens of each."""
        ends = np.cumsum(lengths)
        place = first = 0
        while first < len(ends):
            fit = int(np.searchsorted(ends, place + self.shard_tokens - self._tokens, side="right"))
            if fit > first:
                self._documents += fit - first
                place, first = self._take(unit, place, int(ends[fit - 1])), fit
            elif self._tokens:
                self.close()
            else:
                self._documents += 1
                while place < ends[first]:
                    if self._tokens == self.shard_tokens:
                        self.close()
                    place = self._take(unit, place, min(place + self.shard_tokens, int(ends[first])))
                first += 1

    def _take(self, unit: int | str, start: int, stop: int) -> int:
        self._pieces.append(Piece(unit, start, stop))
        self._tokens += stop - start
        return stop

    def close(self) -> None:
        if self._pieces:
            name = f"{self.split}-{len(self.shards):05d}.npy"
            self.shards.append(Shard(name, self.split, tuple(self._pieces), self._tokens, self._documents))
            self._pieces, self._tokens, self._documents = [], 0, 0


def write_shard(folder: Folder, shard: Shard, tokens: np.ndarray, eot: int, **beside: np.ndarray) -> dict:
    """Write a shard, and the positions of its documents in a second file. Return the shard's manifest entry.

    beside   more arrays by name; each is written to its own file next to the shard
    """

    def write(name: str, array: np.ndarray) -> dict:
        folder.write(name, lambda file: np.save(file, array))
        return {"file": name, "sha256": folder.sha256(name)}

    row = {"file": shard.file, "tokens": shard.tokens, "documents": shard.documents} | write(shard.file, tokens)
    beside |= {"begins": np.flatnonzero(tokens == eot).astype(np.uint32)}
    return row | {what: write(companion_name(shard.file, what), array) for what, array in beside.items()}


def companion_name(file: str, what: str) -> str:
    return file.replace(".npy", f".{what}.npy")


def totals(rows: list[dict], text_bytes: int | None, unique_tokens: int) -> dict:
    """Return a split's manifest entry."""
    counts = {name: sum(row[name] for row in rows) for name in ("tokens", "documents")}
    return counts | {"text_bytes": text_bytes, "unique_tokens": unique_tokens, "shards": rows}


@contextlib.contextmanager
def lock_folder(folder: Folder) -> Iterator[None]:
    """Lock a folder against other processes of this machine. Raises: UserError if another process holds the lock."""
    if not folder.is_local:
        yield
        return
    import fcntl  # here, because not every system has it

    with open(os.path.join(folder.path, "lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder.path}: another process is using this folder; wait for it, or stop it") from error
        yield
