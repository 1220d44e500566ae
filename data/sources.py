"""Read documents from the standard library, files or your own rows, in order, and split files into units of work."""

import contextlib
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from data import files, hub
from data.files import File
from utils import UserError

# Directories to skip. pydoc_data is one generated file of prose, 6% of all bytes.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
SEPARATOR = b"<|endoftext|>"  # between the documents of a text file, with a line break on each side
SEPARATORS = {"text": SEPARATOR, "jsonl": b"\n"}  # a large file may be split after these
FOLDER_PATTERNS = {"text": "**", "jsonl": "**/*.jsonl*", "parquet": "**/*.parquet"}
KINDS = "stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB or hf:NAME[:CONFIG]"
LEAST_UNIT_BYTES, MOST_UNIT_BYTES, UNITS = 2**21, 2**26, 1024  # a unit is a 1024th of the source, between these sizes
WINDOW_BYTES = 2**16  # text read at once when looking for a SEPARATOR


class Document(NamedTuple):
    """One text of a source. Its name determines its split, and stays the same if the source moves or grows."""

    name: str  # name of the file; if it has several documents, followed by :ROW, counted from 1
    text: bytes  # bytes of the file, neither checked nor normalized; for a row, UTF-8


class Part(NamedTuple):
    """A file, or a range of a large file: bytes, or row groups of Parquet."""

    kind: str  # whole, text, jsonl, parquet or hf
    file: File
    start: int
    stop: int
    rows: int  # rows of the file before this part
    is_partial: bool  # True if the file has other parts


Rows = Iterable[str | Mapping] | Callable[[], Iterable[str | Mapping]]  # texts, or dicts with texts
Unit = tuple[Part, ...]  # parts tokenized together; depends only on the source


def read_documents(source: "str | Rows", text_field: str = "text") -> Iterator[Document]:
    """Read a source: files sorted by name, where each file or each row is a document; or your own rows.

    Raises: UserError immediately if the source is not found, and during iteration, with file and row, for a bad row.
    """
    if not isinstance(source, str):
        return (Document(name, _field_of(row, text_field, f"row {number} of the source"))
                for number, (name, row) in enumerate(read_rows(source), 1))  # fmt: skip
    found = list_files(source)
    return (document for kind, file in found for document in read_part(whole_file(kind, file), text_field))


def read_rows(source: Rows) -> Iterator[tuple[str, dict]]:
    """Yield the rows of an iterable, or of a function that returns one, each with a hash of its content as its name.

    Raises: UserError for a row that is neither a text nor a dict.
    """
    for number, row in enumerate(source if hasattr(source, "__iter__") else source(), 1):
        if not isinstance(row, str | Mapping):
            raise UserError(f"row {number} of the source is {type(row).__name__}; it must be text, or a dict of texts")
        fields = {"text": row} if isinstance(row, str) else dict(row)
        yield hashlib.sha256(repr(sorted(fields.items())).encode(errors="surrogateescape")).hexdigest()[:16], fields


def _field_of(row: dict, field: str, where: str) -> bytes:
    _require_field(field, row, where)
    return _encode_text(row[field], where, field)


def list_files(source: str) -> list[tuple[str, File]]:
    """List the files of a source, in order, each with its kind."""
    kind, _, pattern = source.partition(":")
    if source == "stdlib":
        return [("whole", file) for file in stdlib_files()]
    if kind == "hf" and pattern:
        return [(kind, hub.find_dataset(pattern))]
    if kind in FOLDER_PATTERNS and pattern:
        return [(kind, file) for file in files.find_files(pattern, FOLDER_PATTERNS[kind])]
    raise UserError(f"unknown source {source!r}; use {KINDS}")


def stdlib_files() -> list[File]:
    """List the source files of this Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]  # os.walk visits only these
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise UserError(f"source 'stdlib': {root} has no .py files (a stripped interpreter?); use text:GLOB")
    return sorted(files.local_file(str(path), path.relative_to(root).as_posix()) for path in paths)


# Units of work --------------------------------------------------------------------------------------------------------


def make_units(source: str, split: Callable[[str, File, int], list[Part]] | None = None) -> list[Unit]:
    """Split a source into units: group small files, and split large files. The number of workers has no effect.

    split  replaces `split_file`, for example to cache its result
    """
    found = list_files(source)
    unit_bytes = min(max(sum(_text_bytes(file) for _, file in found) // UNITS, LEAST_UNIT_BYTES), MOST_UNIT_BYTES)
    made, held, held_bytes = [], [], 0
    for kind, file in found:
        large = kind != "whole" and file.size > unit_bytes and not files.compression(file.path)
        for part in (split or split_file)(kind, file, unit_bytes) if large else [whole_file(kind, file)]:
            held.append(part)
            held_bytes += part.stop - part.start if part.is_partial and kind != "parquet" else _text_bytes(file)
            if held_bytes >= unit_bytes or part.is_partial:
                made.append(tuple(held))
                held, held_bytes = [], 0
    return [*made, tuple(held)] if held else made


def _text_bytes(file: File) -> int:
    return file.size * (4 if files.compression(file.path) else 1)  # text compresses about 4 to 1


def whole_file(kind: str, file: File) -> Part:
    return Part(kind, file, 0, file.size, 0, False)


def split_file(kind: str, file: File, unit_bytes: int) -> list[Part]:
    """Split a large file at document boundaries, `unit_bytes` or more apart. Text without a SEPARATOR stays whole."""
    cut = {"parquet": _split_parquet, "hf": _split_evenly}.get(kind, _split_at_separators)
    starts = cut(kind, file, unit_bytes)
    if len(starts) == 2:
        return [whole_file(kind, file)]
    return [Part(kind, file, a, b, rows, True) for (a, rows), (b, _) in itertools.pairwise(starts)]


def _split_at_separators(kind: str, file: File, unit_bytes: int) -> list[tuple[int, int]]:
    """Return (start in bytes, number of rows before it) for each part, and for the end of the file."""
    separator, starts, rows, place, rest = SEPARATORS[kind], [(0, 0)], 0, 0, b""
    with files.open_stored(file.path) as stream:
        while chunk := stream.read(files.CHUNK_BYTES):
            chunk, counted = rest + chunk, 0
            while (least := starts[-1][0] + unit_bytes - place) <= len(chunk):
                found = chunk.find(separator, max(least - len(separator), counted))
                if found < 0:
                    break
                after = found + len(separator)
                rows += chunk.count(separator, counted, after)
                starts.append((place + after, rows))
                counted = after
            rows += chunk.count(separator, counted)
            rest = chunk[max(len(chunk) - len(separator) + 1, 0) :]  # a separator may continue in the next chunk
            place += len(chunk) - len(rest)
    if starts[-1][0] >= file.size:
        starts.pop()
    return [*starts, (file.size, rows)]


def _split_parquet(kind: str, file: File, unit_bytes: int) -> list[tuple[int, int]]:
    """Like `_split_at_separators`, but starts are numbers of row groups."""
    starts, rows, held = [(0, 0)], 0, 0
    with _open_parquet(file.path) as table:
        groups = table.metadata.num_row_groups
        for group in range(groups):
            if held >= unit_bytes:
                starts.append((group, rows))
                held = 0
            held += table.metadata.row_group(group).total_byte_size
            rows += table.metadata.row_group(group).num_rows
    return [*starts, (groups, rows)]


def _split_evenly(kind: str, file: File, unit_bytes: int) -> list[tuple[int, int]]:
    """Like `_split_at_separators`, for any range of a data set on the hub. Its rows are not counted."""
    return [(start, 0) for start in (*range(0, file.size, unit_bytes), file.size)]


# Reading a part -------------------------------------------------------------------------------------------------------


def read_part(part: Part, text_field: str) -> Iterator[Document]:
    """Read the documents of a part. Raises: UserError with file and row for a bad row."""
    kind, file = part.kind, part.file
    if kind == "parquet":
        return _read_parquet(part, text_field)
    if kind == "whole":
        return iter([Document(file.name, Path(file.path).read_bytes())])
    return {"jsonl": _read_json_lines, "text": _read_texts, "hf": _read_hub}[kind](part, text_field)


def _read_json_lines(part: Part, field: str) -> Iterator[Document]:
    """Yield a document for each line that is not blank."""
    path, number = part.file.path, part.rows
    for line in _read_lines(part):
        number += 1
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: a {type(row).__name__}, not an object with fields")
        _require_field(field, row, f"{path}:{number}")
        yield Document(f"{part.file.name}:{number}", _encode_text(row[field], f"{path}:{number}", field))


def _read_lines(part: Part) -> Iterator[bytes]:
    with files.open_decompressed(part.file.path) as stream:
        if not part.is_partial:
            yield from stream
            return
        stream.seek(part.start)
        left = part.stop - part.start
        while left > 0 and (line := stream.readline()):
            left -= len(line)
            yield line


def _read_texts(part: Part, _field: str) -> Iterator[Document]:
    """Yield the whole file, or the nonempty texts between its SEPARATORs."""
    name, number, held = part.file.name, part.rows, bytearray()
    several = part.is_partial
    with files.open_decompressed(part.file.path) as stream:
        if part.is_partial:
            stream.seek(part.start)
        left = part.stop - part.start if part.is_partial else float("inf")
        while left > 0 and (chunk := stream.read(int(min(WINDOW_BYTES, left)))):
            left -= len(chunk)
            seen = max(len(held) - len(SEPARATOR), 0)  # already searched up to here
            held += chunk
            while (found := held.find(SEPARATOR, seen)) >= 0:
                several, number, seen = True, number + 1, 0
                if text := _strip_line_breaks(held[:found], number > 1):
                    yield Document(f"{name}:{number}", text)
                del held[: found + len(SEPARATOR)]
    if not several:
        yield Document(name, bytes(held))
    elif text := _strip_line_breaks(held, number > 0, last=True):
        yield Document(f"{name}:{number + 1}", text)


def _strip_line_breaks(text: bytearray, after: bool, last: bool = False) -> bytes:
    """Remove the line break that follows the SEPARATOR before a text, and the one that precedes the next SEPARATOR."""
    start, stop = 0, len(text)
    if after:
        start = 2 if text.startswith(b"\r\n") else int(text.startswith(b"\n"))
    if not last:
        stop -= 2 if text.endswith(b"\r\n") else int(text.endswith(b"\n"))
    return bytes(text[start:stop])


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator:
    import pyarrow  # here, because only Parquet needs it
    import pyarrow.parquet

    with files.open_stored(path) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{path}: not a Parquet file: {error}") from error
        with table:
            yield table


def _read_parquet(part: Part, field: str) -> Iterator[Document]:
    """Yield a document for each row, reading a thousand rows at a time."""
    path, number = part.file.path, part.rows
    with _open_parquet(path) as table:
        _require_field(field, table.schema_arrow.names, path)
        groups = range(part.start, part.stop) if part.is_partial else range(table.metadata.num_row_groups)
        try:
            for rows in table.iter_batches(batch_size=1000, columns=[field], row_groups=[*groups]):
                for value in rows.column(0).to_pylist():
                    number += 1
                    yield Document(f"{part.file.name}:{number}", _encode_text(value, f"{path}:{number}", field))
        except UserError:
            raise
        except (OSError, ValueError) as error:  # base classes of pyarrow's errors
            raise UserError(f"{path}: damaged after row {number}: {error}") from error


def _read_hub(part: Part, field: str) -> Iterator[Document]:
    """Yield a document for each row, named by a hash of its text."""
    where = f"{part.file.path} from byte {part.start} on"
    for table in hub.read_tables(part.file, part.start, part.stop):
        _require_field(field, table.column_names, where)
        for value in table[field].to_pylist():
            text = _encode_text(value, where, field)
            yield Document(hashlib.sha256(text).hexdigest()[:16], text)


def _require_field(field: str, names, where: str) -> None:
    if field not in names:
        raise UserError(f"{where}: no field {field!r}; it has {', '.join(names)}; choose one with --text-field")


def _encode_text(value, where: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is {type(value).__name__}, not text")
    return value.encode("utf-8", errors="replace")  # JSON allows a lone surrogate, UTF-8 doesn't
