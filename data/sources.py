"""Documents in an order that never changes, from the standard library or from files, cut into units of work."""

import contextlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from data import files, hub
from data.files import File
from errors import UserError

# Directories that are not the library's own code. pydoc_data is one generated file of prose, 6% of all bytes.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
SEPARATOR = b"<|endoftext|>"  # between the documents of a text file, with the line break on each side of it
SEPARATORS = {"text": SEPARATOR, "jsonl": b"\n"}  # after which a large file may be cut
FOLDER_PATTERNS = {"text": "**", "jsonl": "**/*.jsonl*", "parquet": "**/*.parquet"}
KINDS = "stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB or hf:NAME[:CONFIG]"
LEAST_UNIT_BYTES, MOST_UNIT_BYTES, UNITS = 2**21, 2**26, 1024  # a unit is a 1024th of the source, between these sizes
WINDOW_BYTES = 2**16  # how much text is looked at together for a SEPARATOR


class Document(NamedTuple):
    """One text of a source. Its name decides its split, so moving the source or adding to it changes no name."""

    name: str  # that of the file; of one among several in a file, with :ROW, the first being 1
    text: bytes  # as found, neither checked nor normalised; of a row, UTF-8


class Part(NamedTuple):
    """A file, or of a large one some bytes (of Parquet, row groups) that follow each other."""

    kind: str  # whole, text, jsonl or parquet
    file: File
    start: int
    stop: int
    rows: int  # that come before it in the file
    is_partial: bool  # other parts have the rest of the file


Unit = tuple[Part, ...]  # what is tokenized together; depends on the source alone


def read_documents(source: str, text_field: str = "text") -> Iterator[Document]:
    """Read a source: files by sorted name, a whole file or each row a document.

    Raises: UserError at once for a source that cannot be found, and while reading for a bad row, by file and row.
    """
    found = list_files(source)
    return (document for kind, file in found for document in read_part(whole_file(kind, file), text_field))


def list_files(source: str) -> list[tuple[str, File]]:
    """The files of a source, in order, each with how it is read."""
    kind, _, pattern = source.partition(":")
    if source == "stdlib":
        return [("whole", file) for file in stdlib_files()]
    if kind == "hf" and pattern:
        return [(hub.file_kind(file), file) for file in hub.dataset_files(pattern)]
    if kind in FOLDER_PATTERNS and pattern:
        return [(kind, file) for file in files.find_files(pattern, FOLDER_PATTERNS[kind])]
    raise UserError(f"no source is called {source!r}; use {KINDS}")


def stdlib_files() -> list[File]:
    """List the running interpreter's library sources, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]  # os.walk descends into what is left
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise UserError(f"source 'stdlib': {root} holds no .py files (a stripped interpreter?); use text:GLOB")
    return sorted(files.local_file(str(path), path.relative_to(root).as_posix()) for path in paths)


# Units of work --------------------------------------------------------------------------------------------------------


def make_units(source: str, split: Callable[[str, File, int], list[Part]] | None = None) -> list[Unit]:
    """Cut a source into units, whoever does the work: small files together, a large one in parts.

    cuts  in place of `parts`, for one that remembers
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
    return file.size * (4 if files.compression(file.path) else 1)  # text shrinks about so much


def whole_file(kind: str, file: File) -> Part:
    return Part(kind, file, 0, file.size, 0, False)


def split_file(kind: str, file: File, unit_bytes: int) -> list[Part]:
    """Cut a large file where documents end, at least `unit_bytes` apart. Text without a SEPARATOR stays whole."""
    cut = _split_parquet if kind == "parquet" else _split_at_separators
    starts = cut(kind, file, unit_bytes)
    if len(starts) == 2:
        return [whole_file(kind, file)]
    return [Part(kind, file, a, b, rows, True) for (a, rows), (b, _) in itertools.pairwise(starts)]


def _split_at_separators(kind: str, file: File, unit_bytes: int) -> list[tuple[int, int]]:
    """Where parts begin, in bytes, and how many rows come before; at the end, where the file ends."""
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
            rest = chunk[max(len(chunk) - len(separator) + 1, 0) :]  # the next chunk may complete a separator
            place += len(chunk) - len(rest)
    if starts[-1][0] >= file.size:
        starts.pop()
    return [*starts, (file.size, rows)]


def _split_parquet(kind: str, file: File, unit_bytes: int) -> list[tuple[int, int]]:
    """The same, in row groups."""
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


# What is in a part ----------------------------------------------------------------------------------------------------


def read_part(part: Part, text_field: str) -> Iterator[Document]:
    """Read the documents of a part. Raises: UserError for a bad row, by file and row."""
    kind, file = part.kind, part.file
    if kind == "parquet":
        return _read_parquet(part, text_field)
    if kind == "whole":
        return iter([Document(file.name, Path(file.path).read_bytes())])
    return (_read_json_lines if kind == "jsonl" else _read_texts)(part, text_field)


def _read_json_lines(part: Part, field: str) -> Iterator[Document]:
    """A document for each line that is not blank."""
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
    """The whole file; or what stands between its SEPARATORs, empty documents left out."""
    name, number, held = part.file.name, part.rows, bytearray()
    several = part.is_partial
    with files.open_decompressed(part.file.path) as stream:
        if part.is_partial:
            stream.seek(part.start)
        left = part.stop - part.start if part.is_partial else float("inf")
        while left > 0 and (chunk := stream.read(int(min(WINDOW_BYTES, left)))):
            left -= len(chunk)
            seen = max(len(held) - len(SEPARATOR), 0)  # up to there, it was looked for before
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
    """Text without the line breaks that belong to the SEPARATORs around it."""
    start, stop = 0, len(text)
    if after:
        start = 2 if text.startswith(b"\r\n") else int(text.startswith(b"\n"))
    if not last:
        stop -= 2 if text.endswith(b"\r\n") else int(text.endswith(b"\n"))
    return bytes(text[start:stop])


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator:
    import pyarrow  # here, because every other source works without it
    import pyarrow.parquet

    with files.open_stored(path) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{path}: not a Parquet file: {error}") from error
        with table:
            yield table


def _read_parquet(part: Part, field: str) -> Iterator[Document]:
    """A document for each row, a thousand rows at a time being held."""
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
        except (OSError, ValueError) as error:  # pyarrow's are among them
            raise UserError(f"{path}: damaged after row {number}: {error}") from error


def _require_field(field: str, names, where: str) -> None:
    if field not in names:
        raise UserError(f"{where}: no field {field!r} among {', '.join(names)}; choose one with --text-field")


def _encode_text(value, where: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} holds {type(value).__name__}, not text")
    return value.encode("utf-8", errors="replace")  # a lone surrogate, which JSON allows, has no UTF-8
