"""Read and write safetensors files, in parts, in folders on this machine or in a bucket.

A safetensors file is the length of the header in 8 bytes, the header as JSON {name: {dtype, shape, data_offsets}}, and
the arrays, one after the other. The safetensors library reads only local files, and writes only from memory; this
module reads a byte range per tensor, and writes tensors as they are produced.
"""

import contextlib
import errno
import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # names bfloat16 to NumPy
import numpy as np

from config.fields import is_remote
from data.files import file_system_of, retry_if_remote
from progress import show_progress
from utils import UserError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
NUMPY = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype("float16")}
STORED = NUMPY | {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.dtype("uint8")}
# Weights in fp8 are stored with a float32 scale for each block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437, 3.3.2).
FP8, SCALE, SCALED_BLOCK = "F8_E4M3", "_scale_inv", 128  # dtype and suffix of the name, in safetensors files
# gpt-oss stores matrices in MXFP4 (arXiv:2310.10537): a block of 32 numbers has 16 bytes and an exponent, which are in
# two tensors with these suffixes. A byte has two numbers of 4 bits, the first one in its lower half.
BLOCKS, EXPONENTS = "_blocks", "_scales"
FP4_VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MAX_HEADER_BYTES = 100_000_000  # as in the library
FILE_BYTES = 2**31  # largest file that we write, unless a single tensor is larger
ONE_FILE, INDEX = FILES = ("model.safetensors", "model.safetensors.index.json")
PARTIAL = ".partial"  # suffix of an unfinished folder
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Folder:
    """A folder, given by its path or URL: gs://, s3:// or any other protocol of fsspec."""

    def __init__(self, path: str | Path):
        self.path = str(path).rstrip("/")
        self.is_remote = is_remote(self.path)
        self.files, self.root = file_system_of(self.path)
        self.written_files = []

    def __str__(self) -> str:
        return self.path

    def _call(self, name: str, work: Callable):
        """Return work(), with retries. Raises: UserError if the file does not exist, or the network fails."""
        try:
            return retry_if_remote(f"{self}/{name}", self.is_remote, work)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self}/{name} does not exist") from None

    def has(self, name: str) -> bool:
        return self._call(name, lambda: self.files.exists(f"{self.root}/{name}"))

    def size(self, name: str) -> int:
        return self._call(name, lambda: self.files.size(f"{self.root}/{name}"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._call(name, lambda: self.files.cat_file(f"{self.root}/{name}", start=start, end=stop))

    def json(self, name: str) -> dict:
        text = self.read(name)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self}/{name} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f"{self}/{name} is not a JSON object; download or copy the file again")
        return value

    def open(self, name: str):
        """Open a new file for sequential writing."""
        self.written_files.append(name)
        return self.files.open(f"{self.root}/{name}", "wb")

    def write(self, name: str, text: str) -> None:
        with self.open(name) as file:
            file.write(text.encode())


@contextlib.contextmanager
def fresh_folder(path: str | Path) -> Iterator[Folder]:
    """Yield a folder to write to, which appears as `path` only when everything in it is written.

    A local folder is renamed at the end. A bucket cannot rename, so write config.json last: readers read it first.
    Raises: UserError if `path` exists or the disk is full. A partial folder is deleted.
    """
    whole = Folder(path)
    if retry_if_remote(str(whole), whole.is_remote, lambda: whole.files.exists(whole.root)):
        raise UserError(f"{whole} exists; choose another folder, or delete it")
    folder = whole if whole.is_remote else Folder(f"{whole}{PARTIAL}")
    if not whole.is_remote:
        _remove(folder)  # left by a killed conversion
        Path(folder.root).mkdir(parents=True)
    try:
        yield folder
        if not whole.is_remote:
            Path(folder.root).rename(whole.root)
    except BaseException as error:
        _remove(folder)
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            raise UserError(f"cannot write {whole}: {error.strerror}; the partial folder was deleted") from error
        raise


def _remove(folder: Folder) -> None:
    """Remove a local folder, or from a bucket the files that were written."""
    if not folder.is_remote:
        return shutil.rmtree(folder.root, ignore_errors=True)
    for name in folder.written_files:
        with contextlib.suppress(Exception):  # keep the original error
            folder.files.rm_file(f"{folder.root}/{name}")


# Reading --------------------------------------------------------------------------------------------------------------


class StoredArray:
    """An array in a file. Indexing it reads only the bytes that the leading indices select."""

    def __init__(self, folder: Folder, file: str, dtype: str, shape: tuple[int, ...], start: int):
        self.folder, self.file, self.start, self.shape = folder, file, start, shape
        self.dtype_name = dtype

    @property
    def dtype(self) -> np.dtype:
        return STORED[self.dtype_name]

    @functools.cached_property
    def memory_map(self) -> np.memmap:
        shape = self.shape or (1,)
        array = np.memmap(f"{self.folder.root}/{self.file}", self.dtype, "r", self.start, shape)
        return array.reshape(self.shape)

    def __getitem__(self, index) -> np.ndarray:
        if not self.folder.is_remote:
            return self.memory_map[index]
        index, shape, start = list(index if isinstance(index, tuple) else (index,)), self.shape, self.start
        row = lambda: math.prod(shape[1:]) * self.dtype.itemsize
        while index and not isinstance(index[0], slice):
            start, shape = start + index.pop(0) * row(), shape[1:]
        if index:
            first, stop, _ = index[0].indices(shape[0])
            start, shape, index[0] = start + first * row(), (stop - first, *shape[1:]), slice(None)
        contents = self.folder.read(self.file, start, start + math.prod(shape) * self.dtype.itemsize)
        return np.frombuffer(contents, self.dtype).reshape(shape)[tuple(index)]


class PackedArray:
    """Matrices in MXFP4, [E, columns, rows / 32, 16] in a file, as an array [E, rows, columns] of bfloat16."""

    def __init__(self, blocks: StoredArray, exponents: StoredArray):
        self.blocks, self.exponents, self.dtype_name = blocks, exponents, "bfloat16"
        self.shape = blocks.shape[0], 32 * blocks.shape[2], blocks.shape[1]

    def __getitem__(self, index) -> np.ndarray:
        every = zip(self.blocks[()], self.exponents[()], strict=True)
        return np.stack([unpack_fp4(*one).T for one in every])[index]


def unpack_fp4(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Convert one matrix from MXFP4 to bfloat16. Shapes: [M, n, 16], [M, n] -> [M, 32 n]."""
    values = FP4_VALUES[np.stack([blocks & 15, blocks >> 4], axis=-1)]
    scaled = values * np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)[..., None, None]
    return scaled.astype(ml_dtypes.bfloat16).reshape(len(blocks), -1)


class Tensors:
    """The tensors of a safetensors folder, by name. The constructor reads only headers."""

    def __init__(self, folder: Folder):
        self.folder, self.arrays = folder, {}
        file_of = folder.json(INDEX).get("weight_map") if folder.has(INDEX) else {"": ONE_FILE}
        for file in sorted(set(check_weight_map(file_of, f"{folder}/{INDEX}").values())):
            arrays = self._header(file)
            self.arrays |= {name: array for name, array in arrays.items() if file_of.get(name, file) == file}
        for name in [name.removesuffix(BLOCKS) for name in self.arrays if name.endswith(BLOCKS)]:
            blocks, exponents = (self.arrays.get(f"{name}{suffix}") for suffix in (BLOCKS, EXPONENTS))
            fits = exponents and blocks.shape == (*exponents.shape, 16) and len(exponents.shape) == 3
            if fits and blocks.dtype_name == exponents.dtype_name == "U8":
                self.arrays[name] = PackedArray(blocks, exponents)
                del self.arrays[f"{name}{BLOCKS}"], self.arrays[f"{name}{EXPONENTS}"]

    def _header(self, file: str) -> dict[str, StoredArray]:
        damaged = lambda why: UserError(f"{self.folder}/{file} is damaged or not a safetensors file: {why}")
        size = self.folder.size(file)
        begin = 8 + int.from_bytes(self.folder.read(file, 0, 8), "little")
        if begin > min(size, 8 + MAX_HEADER_BYTES):
            raise damaged(f"the header would end at byte {begin} of {size}")
        text = self.folder.read(file, 8, begin)
        try:
            tensors = parse_header(text, size - begin)
        except ValueError as error:
            raise damaged(error) from error
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(f"the header cannot be read ({error!r})") from error
        return {name: StoredArray(self.folder, file, dtype, shape, begin + start)
                for name, (dtype, shape, start) in tensors.items()}  # fmt: skip

    def is_scaled(self, name: str) -> bool:
        """Return whether a tensor is stored in fp8 with scales of blocks."""
        array, scales = self.arrays[name], self.arrays.get(f"{name}{SCALE}")
        return array.dtype_name == FP8 and len(array.shape) == 2 and scales is not None and scales.dtype_name in NUMPY

    def dtype(self, name: str) -> str:
        """Return the dtype of what `read` returns."""
        dtype = "bfloat16" if self.is_scaled(name) else self.arrays[name].dtype_name
        if dtype not in NUMPY:
            raise UserError(f"{self.folder}: {name} has dtype {dtype}; supported are {', '.join(DTYPES)}")
        return dtype

    def read(self, name: str) -> np.ndarray:
        array = self.arrays[name][()]
        return scale_blocks(array, self.arrays[f"{name}{SCALE}"][()], name) if self.is_scaled(name) else array

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises: UserError naming tensors that are missing, unexpected, or of another shape."""
        scales = {f"{name}{SCALE}" for name in self.arrays if self.is_scaled(name)}
        missing = [name for name in shapes if name not in self.arrays]
        extra = [name for name in self.arrays if name not in shapes and name not in scales]
        for names, why in ((missing, "lacks"), (extra, "has tensors that config.json does not describe:")):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise UserError(f"{self.folder} {why} {', '.join(names[:3])}{more}")
        for name, want in shapes.items():
            if self.arrays[name].shape != want:
                raise UserError(f"{self.folder}: {name} has shape {self.arrays[name].shape}, but config.json needs "
                                f"{want}")  # fmt: skip


def check_weight_map(file_of, name: str) -> dict[str, str]:
    """Return the map from tensors to files in an index. Raises: UserError if it names anything but files next to it."""
    files = file_of.values() if isinstance(file_of, dict) else [file_of]
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise UserError(f"{name}: weight_map should map tensors to *.safetensors files of the same folder, but has "
                            f"{file!r:.60}; download the file again")  # fmt: skip
    return file_of


def parse_header(text: bytes, data_bytes: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return {name: (dtype, shape, first byte in the data)}, with the checks of the library.

    Raises: ValueError, TypeError, KeyError, AttributeError or RecursionError if the header is damaged.
    """
    tensors, end = json.loads(text), 0
    tensors.pop("__metadata__", None)
    spans = {name: about["data_offsets"] for name, about in tensors.items()}
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        dtype, shape = DTYPES.get(tensors[name]["dtype"], tensors[name]["dtype"]), tensors[name]["shape"]
        sizes = (*shape, start, stop) if isinstance(shape, list) else (shape,)
        if wrong := [x for x in sizes if type(x) is not int or x < 0]:
            raise ValueError(f"{name} has {wrong[0]!r:.60} in its shape or its data_offsets")
        if not isinstance(dtype, str):
            raise ValueError(f"{name} has dtype {dtype!r:.60}")
        if start != end:
            raise ValueError(f"{name} begins at byte {start} of the data, but the tensor before it ends at byte {end}")
        if stop - start != math.prod(shape) * STORED[dtype].itemsize if dtype in STORED else stop < start:
            raise ValueError(f"{name} has {stop - start} bytes, but shape {tuple(shape)} of {dtype}")
        tensors[name], end = (dtype, tuple(shape), start), stop
    if end != data_bytes:
        raise ValueError(f"the file has {data_bytes} bytes of data, but its header describes {end}")
    return tensors


def scale_blocks(array: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """Multiply each block of a matrix in fp8 by its scale. Returns bfloat16.

    Raises: UserError if there is not one scale per block.
    """
    want = tuple(-(-size // SCALED_BLOCK) for size in array.shape)
    if scales.shape != want:
        raise UserError(f"{name}{SCALE} has shape {scales.shape}, but a matrix of shape {array.shape} has {want} "
                        f"blocks of {SCALED_BLOCK} x {SCALED_BLOCK}")  # fmt: skip
    of_rows = np.repeat(scales, SCALED_BLOCK, axis=0)[: len(array)]
    of_entries = np.repeat(of_rows, SCALED_BLOCK, axis=1)[:, : array.shape[1]]
    return (array.astype(np.float32) * of_entries).astype(ml_dtypes.bfloat16)


# Writing --------------------------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: Callable[[], Iterable[np.ndarray]]  # consecutive arrays that make up the tensor

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * NUMPY[self.dtype].itemsize


def write_tensors(folder: Folder, tensors: list[Tensor], what: str) -> int:
    """Write model.safetensors, or numbered files and an index. Return the bytes of the tensor files."""
    files, room = [[]], FILE_BYTES
    for tensor in tensors:
        if files[-1] and tensor.bytes > room:
            files, room = [*files, []], FILE_BYTES
        files[-1].append(tensor)
        room -= tensor.bytes

    size = lambda some: sum(tensor.bytes for tensor in some)
    if not folder.is_remote and (free := shutil.disk_usage(folder.root).free) < size(tensors):
        raise UserError(f"{str(folder).removesuffix(PARTIAL)}: {size(tensors) / 1e6:,.1f} MB to write, but only "
                        f"{free / 1e6:,.1f} MB are free; free space or choose another folder")  # fmt: skip
    one, n = len(files) == 1, len(files)
    names = [ONE_FILE] if one else [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    written = 0
    with show_progress(f"{what}: files", n) as advance:
        for name, some in zip(names, files, strict=True):
            written += write_file(folder, name, some)
            advance()
    if not one:
        weight_map = {tensor.name: name for name, some in zip(names, files, strict=True) for tensor in some}
        index = {"metadata": {"total_size": size(tensors)}, "weight_map": weight_map}
        folder.write(INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return written


def write_file(folder: Folder, name: str, tensors: list[Tensor]) -> int:
    """Write one file, with one part in memory at a time. Return its size in bytes."""
    codes, header, end = {dtype: code for code, dtype in DTYPES.items()}, {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        span = [end, end + tensor.bytes]
        header[tensor.name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at a multiple of 8 bytes
    with folder.open(name) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            written = 0
            for part in tensor.parts():
                assert part.dtype == NUMPY[tensor.dtype], (tensor.name, part.dtype)
                file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
                written += part.nbytes
            assert written == tensor.bytes, f"{tensor.name}: {written} of {tensor.bytes} bytes"
    whole = 8 + len(text) + end
    size = folder.size(name)
    assert size == whole, f"{folder}/{name} has {size} bytes; 8 + {len(text)} of header + {end} of numbers = {whole}"
    return whole
