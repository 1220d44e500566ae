"""Export only the weights of a run. A checkpoint also has the optimizer state, which is twice as large."""

import json
from typing import Annotated

import numpy as np
import tyro

import sharding
from config import Config
from devices import log
from errors import UserError, suggest
from weights import card
from weights.convert import Step, open_run, read_about, read_in_parts
from weights.families import declare
from weights.folders import NUMPY, Tensor, fresh_folder, write_tensors

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
    tensors = [_tensor(name, weights[name], dtype) for name in declared]
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


def _tensor(name: str, array, dtype: str) -> Tensor:
    dtype = dtype or str(array.dtype)
    parts = lambda: (np.asarray(part).astype(NUMPY[dtype], copy=False) for part in read_in_parts(array))
    return Tensor(name, tuple(array.shape), dtype, parts)
