"""Open the folder of a run, or of weights alone: parameters on a mesh, and the tokenizer, if it is known."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tiktoken
from jax.sharding import Mesh

import model
import sharding
from config import Config, MeshConfig, WorkConfig, replace
from data import tokenizers
from errors import UserError
from generate.cache import unstack
from generate.quantised import quantize
from overlap.weights import cast
from train import checkpoint
from weights import convert
from weights.folders import Folder

Form = Literal["stored", "compute", "int8"]


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


def open_run(directory: str, mesh: MeshConfig | str = "", tokenizer: str = "", seq_len: int = 0,
             step: str = "", texts: bool = False, form: Form = "stored") -> Run:  # fmt: skip
    """Read a run's checkpoint, or weights as `from_hf` and `slim` write them, which may lie in a bucket.

    tokenizer  a name as for `tokenizers.load`, or a file, for a run that does not know its own
    seq_len    most positions of a text; 0: those it was trained with, or its config.json of Hugging Face names
    step       of the checkpoint, see `convert.step_of`; empty: the newest
    texts      a tokenizer is needed
    form       of parameters: as stored, in stacks; or, layers on their own, in the compute dtype, or int8 with scales
    Raises: UserError if there is no run, no weights, no such mesh or tokenizer, or two tokenizers.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    about = convert.read_about(directory)
    trained = about["data"]
    encoding = resolve_encoding(directory, trained, tokenizer)
    if texts and encoding is None:
        raise UserError(f"{directory} names no tokenizer, and texts need one; name it with --tokenizer, a "
                        "tokenizer.json, a file of ranks, or bytes")  # fmt: skip
    cfg = Config.from_dict(about["config"])
    known = cfg.data.seq_len if trained else about.get("hf", {}).get("max_position_embeddings", cfg.data.seq_len)
    cfg = replace(cfg, mesh=mesh, work=WorkConfig(), **{"data.seq_len": seq_len or known})
    if encoding and encoding.n_vocab > cfg.model.vocab_size:
        raise UserError(f"--tokenizer {tokenizer}: it has {encoding.n_vocab} ids, and {directory} a table of "
                        f"{cfg.model.vocab_size}; name the tokenizer this model was trained with")  # fmt: skip
    devices, declarations = sharding.make_mesh(mesh), model.declare(cfg.model)
    sharding.check_divides(declarations, devices)
    if (taken := convert.resolve_step(directory, step)) is not None:
        checkpoint.say_aside(f"reading    step {taken} of {directory}/checkpoints")
    params = convert_params(convert.load_params(directory, declarations, devices, taken), cfg, devices, form)
    known_step = about.get("slim", {}).get("step") if taken is None else taken
    return Run(directory, cfg, params, devices, encoding, trained and trained["tokenizer"], known_step,
               digest(directory, about, taken))  # fmt: skip


def convert_params(params, cfg: Config, mesh: Mesh, form: Form):
    """Parameters as `open_run` says; what they were made of is let go on the way."""
    if form == "stored":
        return params
    if form == "int8":
        params = quantize(params, cfg.model, mesh)
    else:
        params = jax.jit(lambda w: cast(w, cfg.model), donate_argnums=0)(params)  # as each step would, once
    return unstack(params, cfg.model, mesh)


def resolve_encoding(directory: str, trained: dict | None, requested: str) -> tiktoken.Encoding | None:
    """The tokenizer a run knows, or the one that is asked for. Raises: UserError if these are two."""
    own = trained and tokenizers.from_manifest(trained)
    if not requested:
        return own
    if requested in ("bytes", *tokenizers.TIKTOKEN_NAMES) or tokenizers.is_file(requested):
        named = tokenizers.load(requested)
    elif Path(requested).is_file():
        named = tokenizers.load(f"json:{requested}" if requested.endswith(".json") else f"bpe:{requested}")
    else:
        raise UserError(f"--tokenizer {requested}: there is no such file; name a tokenizer.json or a file of ranks, "
                        f"bytes, {', '.join(tokenizers.TIKTOKEN_NAMES)}")  # fmt: skip
    if own and tokenizers.fingerprint(own) != tokenizers.fingerprint(named):
        raise UserError(f"--tokenizer {requested}: {directory} was trained on tokens of {own.name!r}; leave it out")
    return named


def digest(run: str, about: dict, step: int | None) -> str:
    """What changes with a run's parameters: the manifest of a checkpoint, or sizes and times of weights alone.

    Of a bucket, its config.json, `about`, has to do.
    """
    if step is not None:
        return hashlib.sha256(Folder(run).read(f"checkpoints/{step}/{checkpoint.MANIFEST}")).hexdigest()
    files = sorted([*Path(run).glob("weights/*"), *Path(run).glob("*.safetensors")])
    found = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([about, found]).encode()).hexdigest()
