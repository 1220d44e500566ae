"""Open the folder of a run, or of weights alone: parameters on a mesh, and the tokenizer, if it is known."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
from jax.sharding import Mesh

import model
import sharding
from config import Config, MeshConfig, WorkConfig, replace
from data import tokenizers
from train import checkpoint
from utils import UserError, log
from weights import convert
from weights.folders import Folder


@dataclass(frozen=True)
class Run:
    """A model that lies ready on a mesh."""

    name: str  # its directory, as it was given
    cfg: Config  # its settings, with this mesh
    params: Any
    mesh: Mesh
    encoding: tiktoken.Encoding | None  # None: nobody has said whose ids its tokens are
    tokenizer: dict | None  # what the tokens it was trained on say of theirs
    step: int | None  # of a training run
    digest: str  # changes with the parameters


def open_run(directory: str, mesh: MeshConfig | str = "", tokenizer: str = "", seq_len: int = 0) -> Run:
    """Read a run's newest checkpoint, or weights as `from_hf` and `slim` write them.

    tokenizer  a name as for `tokenizers.load`, or a file, for a run that does not know its own
    seq_len    most positions of a text; 0: those it was trained with, or its config.json of Hugging Face names
    Raises: UserError if there is no run, no weights, no such mesh or tokenizer, or two tokenizers.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    about = Folder(directory).json("config.json")
    convert.read_config(directory)  # which refuses what is no run
    trained = about["data"]
    encoding = encoding_of(directory, trained, tokenizer)
    cfg = Config.from_dict(about["config"])
    known = cfg.data.seq_len if trained else about.get("hf", {}).get("max_position_embeddings", cfg.data.seq_len)
    cfg = replace(cfg, mesh=mesh, work=WorkConfig(), **{"data.seq_len": seq_len or known})
    if encoding and encoding.n_vocab > cfg.model.vocab_size:
        raise UserError(f"--tokenizer {tokenizer}: it has {encoding.n_vocab} ids, and {directory} a table of "
                        f"{cfg.model.vocab_size}; name the tokenizer this model was trained with")  # fmt: skip
    devices, declarations = sharding.make_mesh(mesh), model.declare(cfg.model)
    newest = convert.newest_step(directory, log)
    params = convert.load_params(directory, declarations, devices, newest)
    step = about.get("slim", {}).get("step") if newest is None else newest
    named = trained and trained["tokenizer"]
    return Run(directory, cfg, params, devices, encoding, named, step, digest(directory, newest))


def encoding_of(directory: str, trained: dict | None, asked: str) -> tiktoken.Encoding | None:
    """The tokenizer a run knows, or the one that is asked for. Raises: UserError if these are two."""
    if own := trained and tokenizers.of(trained):
        if asked:
            raise UserError(f"--tokenizer {asked}: {directory} was trained on tokens of {own.name!r}; leave it out")
        return own
    if not asked:
        return None
    if asked in ("bytes", *tokenizers.NAMED) or tokenizers.is_file(asked):
        return tokenizers.load(asked)
    if not Path(asked).is_file():
        raise UserError(f"--tokenizer {asked}: there is no such file; name a tokenizer.json or a file of ranks, "
                        f"bytes, {', '.join(tokenizers.NAMED)}")  # fmt: skip
    return tokenizers.load(f"json:{asked}" if asked.endswith(".json") else f"bpe:{asked}")


def digest(run: str, step: int | None) -> str:
    """What changes with a run's parameters: the manifest of a checkpoint, or sizes and times of weights alone.

    Of a bucket, its config.json has to do.
    """
    if step is not None:
        return hashlib.sha256(Folder(run).read(f"checkpoints/{step}/{checkpoint.MANIFEST}")).hexdigest()
    files = sorted([*Path(run).glob("weights/*"), *Path(run).glob("*.safetensors")])
    about = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([Folder(run).json("config.json"), about]).encode()).hexdigest()
