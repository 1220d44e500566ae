"""Convert weights to and from Hugging Face with the tables of `families.py`, which map tensor names and layouts.

Both directions keep one Hugging Face tensor in memory at a time, plus a few blocks (`BLOCK_BYTES`) of a checkpoint.
`slim` exports only the weights of a run. A checkpoint also has the optimizer state, which is twice as large.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding

import sharding
from architectures import architecture, declare
from config import Config, ModelConfig, replace
from config.fields import is_remote
from progress import print_to_stderr
from train import checkpoint
from utils import UserError, log, suggest
from weights import card
from weights.families import FAMILIES, PASSED_THROUGH, family_of
from weights.folders import FILES, NUMPY, Folder, Tensor, Tensors, fresh_folder, write_tensors
from weights.hf_config import config_from_hf, config_to_hf
from weights.layouts import Piece, from_hf_layout, pieces, to_hf_layout

BLOCK_BYTES = 2**29  # maximum bytes of a checkpoint's parameter to read at once

# Your own table -------------------------------------------------------------------------------------------------------

Step = Annotated[str, tyro.conf.arg(metavar="N", help="step of the checkpoint, or best; empty: the latest")]
Table = Annotated[
    str, tyro.conf.arg(metavar="FILE.py", help="Python file that adds a weights mapping; see weights.families.register")
]


def run_table(path: str) -> None:
    """Run a Python file that calls `families.register`. Raises: UserError if it fails or registers no mapping."""
    if not path:
        return
    before = set(FAMILIES)
    try:
        runpy.run_path(path)
    except UserError:
        raise
    except Exception as error:  # whatever the user's file raises
        raise UserError(f"--table {path}: {type(error).__name__}: {error}") from error
    if before == set(FAMILIES):
        raise UserError(f"--table {path}: the file registers no mapping; call weights.families.register(model_type, "
                        "family) in it")  # fmt: skip


KNOWN = f"its config.json has one of these values of model_type: {', '.join(FAMILIES)}"


# from-hf --------------------------------------------------------------------------------------------------------------


def from_hf(
    directory: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help=f"folder to read, local or in a bucket; {KNOWN}")
    ],
    out: Annotated[str, tyro.conf.arg(metavar="RUN", help="run directory to write, local or in a bucket")],
    table: Table = "",
) -> None:
    """Convert a Hugging Face folder (config.json, *.safetensors) into a run directory."""
    run_table(table)
    source = Folder(directory)
    if not source.has("config.json"):
        raise UserError(f"{directory}/config.json does not exist{how_to_convert(directory)}")
    hf = source.json("config.json")
    hf, of_queries = with_our_query_scale(hf)
    c, kind = config_from_hf(hf), hf["model_type"]
    tensors = Tensors(source)
    experts = c.n_blocks * c.n_experts if any("{expert}" in r.hf_name for r in FAMILIES[kind].layer) else 0
    if (fewest := c.encoder_layers + c.n_layers + experts) > len(tensors.arrays):
        raise UserError(f"{source} has {len(tensors.arrays)} tensors, but config.json describes a model of at least "
                        f"{fewest:,}; download the folder again")  # fmt: skip
    scaled = lambda piece: piece._replace(scale=of_queries) if "self_attn.q_proj" in piece.hf_name else piece
    all_pieces, parts = pieces(c, kind) if of_queries == 1 else [*map(scaled, pieces(c, kind))], {}
    declared = sharding.flatten_named(declare(c))
    drop_prediction_modules(tensors, c, hf)
    tensors.check({piece.hf_name: piece.shape for piece in all_pieces})
    c = dataclasses.replace(c, precision=stored_precision(tensors, all_pieces))
    for piece in all_pieces:
        for part in piece.parts:
            parts.setdefault(part.name, []).append((part.index, piece, part))
    leaves = [our_tensor(name, sorted(parts[name]), declared, tensors) for name in declared]
    with fresh_folder(out) as folder:
        write_tensors(folder, leaves, "from-hf")
        about = {"family": kind, "hf": {name: value for name, value in hf.items() if name in PASSED_THROUGH}}
        folder.write("config.json", json.dumps(_run_config(c, out) | about, indent=1) + "\n")
    log(f"wrote {out}: {sum(d.size for d in declared.values()):,} parameters of {kind} in {len(leaves)} arrays")
    rounds = c.param_dtype == "float32" and {tensors.dtype(piece.hf_name) for piece in all_pieces} == {"bfloat16"}
    origin = "bfloat16, as in the files, would round our form of them" if rounds else "as in the files"
    log(f"precision  parameters {c.param_dtype} ({origin}), compute {c.compute_dtype}")


def with_our_query_scale(hf: dict) -> tuple[dict, float]:
    """Return config.json of a Gemma 2 whose scores are divided by sqrt(head_dim), as ours are, and the factor of the
    queries' weights that makes it the same model. In other families the factor is 1."""
    width, scalar = hf.get("head_dim", 256), hf.get("query_pre_attn_scalar")
    if hf.get("model_type") != "gemma2" or not all(type(x) is int and x > 0 for x in (width, scalar)):
        return hf, 1.0
    return hf | {"query_pre_attn_scalar": width}, (width / scalar) ** 0.5


def drop_prediction_modules(tensors: Tensors, c: ModelConfig, hf: dict) -> None:
    """Leave out the modules for multi-token prediction, which are stored as layers after the last, and say so."""
    count = hf.get("num_nextn_predict_layers") or 0
    begins = tuple(f"model.layers.{c.n_layers + i}." for i in range(min(count, len(tensors.arrays))))
    extra = [name for name in tensors.arrays if name.startswith(begins)] if count else []
    for name in extra:
        del tensors.arrays[name]
    if extra:
        log(f"left out   {len(extra)} tensors for multi-token prediction ({', '.join(begins)}), which our model lacks")


def stored_precision(tensors: Tensors, all_pieces: list[Piece]) -> str:
    """Return the precision setting that rounds no stored tensor and computes in the dtype of the stored matrices.

    Parameters are bfloat16 if every tensor is, else float32, which also holds float16, and our form of Gemma's. The
    embedding decides the compute dtype, because a router's bias may be float32 in a model whose matrices are bfloat16.
    """
    [embedding] = [piece.hf_name for piece in all_pieces for part in piece.parts if part.name == "embedding_VD"]
    if {our_dtype(tensors, piece) for piece in all_pieces} == {"bfloat16"}:
        return "bfloat16"
    return "mixed" if tensors.dtype(embedding) == "bfloat16" else "float32"


def our_dtype(tensors: Tensors, piece: Piece) -> str:
    """Return the dtype in which our parameter has the numbers of a tensor."""
    return "float32" if piece.changes_numbers else tensors.dtype(piece.hf_name)


def _run_config(c: ModelConfig, out: str) -> dict:
    path, place = Path(str(out)), {} if is_remote(str(out)) else {"run.dir": str(Path(out).parent)}
    settings = {"model": c, "run.name": path.resolve().name, "data.input_len": architecture(c).input_len} | place
    return {"config": replace(Config(), **settings).to_dict(), "data": None}


def our_tensor(name: str, parts: list, declared, tensors: Tensors) -> Tensor:
    """Build one parameter from Hugging Face tensors, read one by one. The first dims stack layers and experts."""
    dtype = tensors.dtype(first := parts[0][1].hf_name)
    for _, piece, _ in parts:
        if tensors.dtype(piece.hf_name) != dtype:
            raise UserError(f"{piece.hf_name} is {tensors.dtype(piece.hf_name)} and {first} is {dtype}, but both are "
                            f"part of {name}, which has one dtype; convert them to the same dtype")  # fmt: skip
    dtype = our_dtype(tensors, parts[0][1])
    ours = lambda: (from_hf_layout(tensors.read(piece.hf_name), piece, part, declared) for _, piece, part in parts)
    return Tensor(name, declared[name].shape, dtype, ours)


def how_to_convert(name: str | Path) -> str:
    """Explain how to use a model of Hugging Face, if `name` is no folder but looks like ORG/NAME; otherwise ""."""
    if os.path.exists(name) or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        return ""
    return (f"; if {name} is a model of Hugging Face, download its folder yourself, because nothing here downloads "
            "weights, then run python -m weights from-hf FOLDER --out runs/NAME")  # fmt: skip


# Reading a run --------------------------------------------------------------------------------------------------------


def read_about(run: str | Path) -> dict:
    """Read the config.json of a run directory that training, `from_hf` or `slim` wrote.

    Raises: UserError if there is none, or if it is not the config.json of a run.
    """
    if not (folder := Folder(run)).has("config.json"):
        raise UserError(f"{run}: no config.json; pass a run directory, such as runs/laptop{how_to_convert(run)}")
    about = {name: value for name, value in folder.json("config.json").items() if value is not None}
    if not isinstance(about.get("config"), dict):
        raise UserError(f"{run}/config.json is not the config of a run; if it is a model of Hugging Face, convert it: "
                        f"python -m weights from-hf {run} --out runs/NAME")  # fmt: skip
    for name, kind in (("data", dict), ("family", str), ("hf", dict), ("slim", dict)):
        if name in about and not isinstance(about[name], kind):
            raise UserError(f"{run}/config.json is damaged: {name} is {about[name]!r:.60}; restore the file")
    return about | {"data": about.get("data")}


def read_config(run: str | Path) -> ModelConfig:
    return Config.from_dict(read_about(run)["config"]).model


def has_weights_only(run: str | Path) -> bool:
    """Return whether a directory has weights, as written by `from_hf` or `slim`, and no checkpoints."""
    folder = Folder(run)
    return not folder.has("checkpoints") and any(map(folder.has, FILES))


def open_weights(run: str | Path) -> dict:
    """Open the weights that `from_hf` or `slim` wrote: arrays by name, which are read when indexed."""
    tensors = Tensors(Folder(run))
    return {name: stored for name, stored in tensors.arrays.items() if tensors.dtype(name)}


def load_weights(run: str | Path, declarations, mesh: Mesh):
    """Load weights onto a mesh in the declared sharding and dtype; each device reads only its shards.

    Raises: UserError naming the first parameter that is missing, unexpected, or of another shape.
    """
    sharding.check_divides(declarations, mesh)
    stored = open_weights(run)
    check_fit(stored, sharding.flatten_named(declarations), run)

    def place(name: str, d: sharding.Declaration) -> jax.Array:
        array = stored[name][()] if is_remote(str(run)) else stored[name]  # read a bucket once, not per device
        part = lambda index: np.asarray(array[index]).astype(d.dtype)
        return jax.make_array_from_callback(d.shape, NamedSharding(mesh, d.spec), part)

    return sharding.map_named(place, declarations)


def resolve_step(run: str | Path, requested: str = "", report: Callable = print_to_stderr) -> int | None:
    """Return the step of a requested checkpoint: a number, "best" (as in `train.checkpoint ls`) or "" for the latest.

    Returns None if the run has only weights. Raises: UserError if it has neither, or has other steps, which it lists.
    """
    if has_weights_only(run):
        if requested:
            raise UserError(f"--step {requested}: {run} has exported weights but no checkpoints; omit --step")
        return None
    if is_remote(str(run)) and not str(run).startswith("gs://"):
        raise UserError(f"{run} has no exported weights (python -m weights slim); checkpoints can only be read from a "
                        "local folder or gs://")  # fmt: skip
    directory = f"{run}/checkpoints"
    if not requested and (newest := checkpoint.latest_step(directory, report, "params")) is not None:
        return newest
    existing = [row for row in reversed(checkpoint.step_rows(directory, "none")) if row.name.isdecimal()]
    if not existing:
        raise UserError(f"no checkpoint in {directory}")
    steps = {name: row.step for row in existing for name in (row.name, "best") if name != "best" or row.best}
    if requested not in steps:
        raise UserError(f"{run} has no checkpoint of step {requested}; use one of {', '.join(steps)}")
    return steps[requested]


def load_params(run: str | Path, declarations, mesh: Mesh, step: int | None = None):
    """Load a run's parameters onto a mesh, from its weights or from a checkpoint.

    step  step of the checkpoint; None: the latest, whose step is printed
    Raises: UserError if they are missing or do not fit.
    """
    if has_weights_only(run):
        return load_weights(run, declarations, mesh)
    return checkpoint.restore_params(f"{run}/checkpoints", sharding.shapes(declarations, mesh), step)


def check_fit(stored: dict, declared: dict[str, sharding.Declaration], run: str | Path) -> None:
    """Raises: UserError naming the first weight that is unexpected, missing, or of another shape."""
    shapes = lambda named: {name: tuple(x.shape) for name, x in named.items()}
    checkpoint.check_shapes(shapes(stored), shapes(declared), f"{run}/weights")


def read_in_parts(array, index: tuple[int, ...] = ()) -> Iterator[np.ndarray]:
    """Yield an array, or array[index], in consecutive parts of at most BLOCK_BYTES."""
    shape = array.shape[len(index) :]
    if math.prod(shape) * array.dtype.itemsize <= BLOCK_BYTES:
        yield np.asarray(array[index])
    elif rows := BLOCK_BYTES // (math.prod(shape[1:]) * array.dtype.itemsize):
        for first in range(0, shape[0], rows):
            yield np.asarray(array[(*index, slice(first, min(first + rows, shape[0])))])
    else:
        for i in range(shape[0]):
            yield from read_in_parts(array, (*index, i))


class Blocks:
    """A parameter in a checkpoint. Indexing one layer reads a block of neighboring layers, because a chunk on disk may
    contain a part of every layer, and each read decompresses it again.
    """

    def __init__(self, stored, cached_rows: Callable):
        self.stored, self.cached_rows = stored, cached_rows
        self.shape, self.dtype = tuple(stored.shape), stored.dtype.numpy_dtype

    def __getitem__(self, index: tuple) -> np.ndarray:
        for depth, i in enumerate(index):
            rows = BLOCK_BYTES // (math.prod(self.shape[depth + 1 :]) * self.dtype.itemsize)
            if rows and not isinstance(i, slice):
                first = i // rows * rows
                block = self.cached_rows(self, index[:depth], first, min(first + rows, self.shape[depth]))
                return block[(i - first, *index[depth + 1 :])]
        return self.read(index)

    def rows(self, index: tuple[int, ...], first: int, stop: int) -> np.ndarray:
        return self.read((*index, slice(first, stop)))

    def read(self, index: tuple) -> np.ndarray:
        """Read chunk by chunk, because a single read would keep all compressed chunks in memory next to the result.

        index   integers, then at most one slice
        """
        spans = [(i.start, i.stop) if isinstance(i, slice) else (i, i + 1) for i in index]
        spans += [(0, size) for size in self.shape[len(index) :]]
        out = np.empty([stop - start for start, stop in spans], self.dtype)
        chunk = self.stored.chunk_layout.read_chunk.shape or self.shape
        edges = [[a, *range(a - a % n + n, b, n), b] for (a, b), n in zip(spans, chunk, strict=True)]
        for region in itertools.product(*map(itertools.pairwise, edges)):
            here = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(region, spans, strict=True))
            out[here] = self.stored[tuple(slice(a, b) for a, b in region)].read().result()
        return out[tuple(0 for i in index if not isinstance(i, slice))]


def open_run(run: str | Path, declared: dict[str, sharding.Declaration], asked: str = ""):
    """Open a run's parameters by name; return them with the checkpoint's step, or with None if it has only weights.

    Raises: UserError if there are none, or if a parameter, which it names, is missing, unexpected, or of another shape.
    """
    if (step := resolve_step(run, asked, log)) is None:
        weights = open_weights(run)
        check_fit(weights, declared, run)
        return weights, None
    shapes = {name: d.shape for name, d in declared.items()}
    stored = checkpoint.open_stored(f"{run}/checkpoints", shapes, step)
    log(f"parameters of step {step} of {run}")
    # A Hugging Face tensor contains at most two of our parameters.
    cached_rows = functools.lru_cache(maxsize=2)(Blocks.rows)
    return {name: Blocks(array, cached_rows) for name, array in stored.items()}, step


# to-hf ----------------------------------------------------------------------------------------------------------------


def to_hf(
    run: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN", help="run directory with checkpoints, or with weights from from-hf or slim"),
    ],
    out: Annotated[str, tyro.conf.arg(metavar="DIR", help="folder to write, local or in a bucket")],
    family: Annotated[str, tyro.conf.arg(help="weights mapping to use; empty: as in from-hf, or one that fits")] = "",
    step: Step = "",
    table: Table = "",
    scores: card.Scores = "",
) -> None:
    """Convert a run directory into a Hugging Face folder: config.json, safetensors, README.md."""
    run_table(table)
    score_values = card.read_scores(scores)
    about = read_about(run)
    c = Config.from_dict(about["config"]).model
    kind = family or about.get("family") or family_of(c)
    if kind not in FAMILIES:
        origin = "--family" if family else f"{run}/config.json"
        raise UserError(f"{origin}: unknown model family {kind!r}; {suggest(kind, FAMILIES)}; --table FILE.py adds it")
    try:
        config_to_hf(c, kind=kind)  # fail before reading a checkpoint
    except UserError as error:
        raise UserError(f"{error}; train with other settings, or export weights in this project's format: python -m "
                        "weights slim") from None  # fmt: skip
    declared = sharding.flatten_named(declare(c))
    weights, at_step = open_run(run, declared, step)
    hf = config_to_hf(c, str(weights["embedding_VD"].dtype), kind) | passed_through(about)
    with fresh_folder(out) as folder:
        write_tensors(folder, [hf_tensor(piece, weights, declared) for piece in pieces(c, kind)], "to-hf")
        folder.write("README.md", card.render_card(run, about, declared, at_step, score_values, hf))
        folder.write("config.json", json.dumps(hf, indent=2, sort_keys=True) + "\n")
    log(f"wrote {out}: {hf['model_type']}, {sum(d.size for d in declared.values()):,} parameters")


def passed_through(about: dict) -> dict:
    """Return settings of config.json that our model does not use, such as bos_token_id: those that from-hf stored in
    this run, or in the run from which it took its first weights."""
    source = about["config"].get("run", {}).get("init_from", "")
    if "hf" in about or not source or not Folder(source).has("config.json"):
        return about.get("hf", {})
    return passed_through(read_about(source))


def hf_tensor(piece: Piece, weights: dict, declared) -> Tensor:
    dtype = str(weights[piece.parts[0].name].dtype)
    return Tensor(piece.hf_name, piece.shape, dtype, lambda: [to_hf_layout(weights.__getitem__, piece, declared)])


# slim -----------------------------------------------------------------------------------------------------------------

EXPORT_DTYPES = ("float32", "bfloat16")


def slim(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="run directory, e.g. runs/x")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT", help="folder to write, or a bucket")],
    dtype: Annotated[str, tyro.conf.arg(help=f"{' or '.join(EXPORT_DTYPES)}; empty: as stored")] = "",
    step: Step = "",
    scores: card.Scores = "",
) -> None:
    """Write only the weights of a run: sharded safetensors, and the config.json that other commands read."""
    if dtype and dtype not in EXPORT_DTYPES:
        raise UserError(f"--dtype {dtype} is not supported; {suggest(dtype, EXPORT_DTYPES)}")
    score_values, about = card.read_scores(scores), read_about(run)
    declared = sharding.flatten_named(declare(Config.from_dict(about["config"]).model))
    weights, at_step = open_run(run, declared, step)
    tensors = [run_tensor(name, weights[name], dtype) for name in declared]
    parameters, numbers = sum(d.size for d in declared.values()), sum(tensor.bytes for tensor in tensors)
    with fresh_folder(out) as folder:
        written = write_tensors(folder, tensors, "slim")
        folder.write("README.md", card.render_card(run, about, declared, at_step, score_values))
        if at_step is not None:
            about["slim"] = {"step": at_step, "rows": card.last_rows(run, about, at_step)}
        folder.write("config.json", json.dumps(about, indent=1) + "\n")
    dtypes = sorted({tensor.dtype for tensor in tensors})
    log(f"wrote {out}: {parameters:,} parameters in {' and '.join(dtypes)}")
    sizes = {NUMPY[tensor.dtype].itemsize for tensor in tensors}
    each = f"{parameters:,} x {sizes.pop()}" if len(sizes) == 1 else f"{numbers:,}"
    log(f"bytes      {written:,} = {each} of tensor data + {written - numbers:,} of headers")


def run_tensor(name: str, array, dtype: str) -> Tensor:
    dtype = dtype or str(array.dtype)
    parts = lambda: (np.asarray(part).astype(NUMPY[dtype], copy=False) for part in read_in_parts(array))
    return Tensor(name, tuple(array.shape), dtype, parts)
