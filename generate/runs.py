"""Open the directory of a run or of converted weights: load its parameters onto a mesh, and its tokenizer if known."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tiktoken
from jax.sharding import Mesh

import sharding
from architectures import declare
from config import Config, MeshConfig, WorkConfig, replace
from data import tokenizers
from generate.cache import unstack
from generate.quantised import quantize
from overlap.weights import cast
from pipeline import fit
from progress import print_to_stderr
from train import checkpoint
from utils import UserError
from weights import convert
from weights.folders import Folder

Form = Literal["stored", "compute", "int8"]


@dataclass(frozen=True)
class Run:
    """A model loaded onto a mesh."""

    name: str  # its directory, as given
    cfg: Config  # its settings, with this mesh
    params: Any
    mesh: Mesh
    encoding: tiktoken.Encoding | None  # None: unknown
    tokenizer: dict | None  # the tokenizer entry of the manifest of its training tokens
    step: int | None  # step of its checkpoint; None: unknown
    digest: str  # a hash that changes with the parameters
    start: int | None = None  # token before each prompt; None: the end-of-text token, as in training


def open_run(directory: str, mesh: MeshConfig | str = "", tokenizer: str = "", seq_len: int = 0,
             step: str = "", texts: bool = False, form: Form = "stored") -> Run:  # fmt: skip
    """Load a run's checkpoint, or weights written by `from_hf` or `slim`. The directory may be in a bucket.

    tokenizer  a name as for `tokenizers.load`, or a file, for a run without a tokenizer
    seq_len    maximum tokens of a text; 0: as in training, or max_position_embeddings in Hugging Face's config.json
    step       step of the checkpoint, see `convert.resolve_step`; empty: the latest
    texts      whether a tokenizer is required
    form       "stored": stacked layers as stored; "compute" or "int8" (with scales): separate layers in that format
    Raises: UserError if the run, its weights, the mesh or the tokenizer is missing, or if two tokenizers disagree.
    """
    mesh = MeshConfig.parse(mesh) if isinstance(mesh, str) else mesh
    about = convert.read_about(directory)
    trained = about["data"]
    encoding = resolve_encoding(directory, trained, tokenizer)
    if texts and encoding is None:
        raise UserError(f"{directory} has no tokenizer, which text input and output need; set --tokenizer to a "
                        "tokenizer.json, a tokenizer.model, a tiktoken file, or the word bytes")  # fmt: skip
    cfg = Config.from_dict(about["config"])
    known = cfg.data.seq_len if trained else about.get("hf", {}).get("max_position_embeddings", cfg.data.seq_len)
    cfg = replace(cfg, mesh=mesh, work=WorkConfig(), **{"data.seq_len": seq_len or known})
    if encoding and encoding.n_vocab > cfg.model.vocab_size:
        raise UserError(f"--tokenizer {tokenizer} has {encoding.n_vocab} ids, but the vocabulary of {directory} has "
                        f"{cfg.model.vocab_size}; use the tokenizer this model was trained with")  # fmt: skip
    devices, declarations = sharding.make_mesh(mesh), declare(cfg.model)
    try:
        sharding.check_divides(declarations, devices)
    except sharding.DoesNotSplit as error:
        raise UserError(f"{fit.in_words(cfg.model, error)}; use a smaller {'*'.join(error.axes)}") from None
    if (loaded_step := convert.resolve_step(directory, step)) is not None:
        print_to_stderr(f"reading    step {loaded_step} of {directory}/checkpoints")
    params = convert_params(convert.load_params(directory, declarations, devices, loaded_step), cfg, devices, form)
    known_step = about.get("slim", {}).get("step") if loaded_step is None else loaded_step
    start = None if trained else start_token(about, cfg.model.vocab_size)
    return Run(directory, cfg, params, devices, encoding, trained and trained["tokenizer"], known_step,
               digest(directory, about, loaded_step), start)  # fmt: skip


def start_token(about: dict, vocab_size: int) -> int | None:
    """Return the token with which texts of a converted model begin, bos_token_id of Hugging Face's config.json."""
    found = about.get("hf", {}).get("bos_token_id")
    return found if isinstance(found, int) and 0 <= found < vocab_size else None


def convert_params(params, cfg: Config, mesh: Mesh, form: Form):
    """Convert parameters to a `form` of `open_run`, and free the originals."""
    if form == "stored":
        return params
    if form == "int8":
        params = quantize(params, cfg.model, mesh)
    else:
        params = jax.jit(lambda w: cast(w, cfg.model), donate_argnums=0)(params)  # once, instead of in each step
    return unstack(params, cfg.model, mesh)


def resolve_encoding(directory: str, trained: dict | None, requested: str) -> tiktoken.Encoding | None:
    """Return the run's own tokenizer or the requested one. Raises: UserError if both exist and differ."""
    own = trained and tokenizers.from_manifest(trained)
    if not requested:
        return own
    if requested in ("bytes", *tokenizers.TIKTOKEN_NAMES) or tokenizers.is_file(requested):
        named = tokenizers.load(requested)
    elif Path(requested).is_file():
        kind = {".json": "json", ".model": "sp"}.get(Path(requested).suffix, "bpe")
        named = tokenizers.load(f"{kind}:{requested}")
    else:
        raise UserError(f"--tokenizer {requested}: no such file; use a tokenizer.json, a tokenizer.model, a "
                        f"tiktoken file, or a name: bytes, {', '.join(tokenizers.TIKTOKEN_NAMES)}")  # fmt: skip
    if own and tokenizers.fingerprint(own) != tokenizers.fingerprint(named):
        raise UserError(f"--tokenizer {requested}: {directory} was trained with {own.name!r}; leave the flag out")
    return named


def digest(run: str, about: dict, step: int | None) -> str:
    """Return a hash of a checkpoint's manifest, or of the names, sizes and times of weight files.

    For weights in a bucket it only covers their config.json, `about`.
    """
    if step is not None:
        return hashlib.sha256(Folder(run).read(f"checkpoints/{step}/{checkpoint.MANIFEST}")).hexdigest()
    stats = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns)
             for file in sorted(Path(run).glob("*.safetensors"))]  # fmt: skip
    return hashlib.sha256(json.dumps([about, stats]).encode()).hexdigest()
