"""The loss of a run on the validation split of a directory of tokens, computed as in training."""

import functools
import math

import dataset
import pipeline
from config import replace
from generate.runs import Run
from progress import print_to_stderr, show_progress
from train import progress
from utils import UserError

compile_once = functools.lru_cache(pipeline.evaluate)  # for all checkpoints of a run


def perplexity(run: Run, folder: str, batches: int = 0, batch_size: int = 0) -> dict:
    """Return loss (nats per token), perplexity and bits per byte over a validation split, or `batches` batches of it.

    Expert capacity is as in training, so the loss is comparable. `bits_per_byte` is NaN if the bytes per token are
    unknown. If the folder is the run's own data, the run's mixture is used.
    Raises: UserError if the tokens are missing or from another tokenizer, or if a batch does not split over the mesh.
    """
    shards = run.cfg.mesh.batch_shards
    size = batch_size or -(-run.cfg.data.batch_size // shards) * shards
    mixture = run.cfg.data.mixture if folder.rstrip("/") == run.cfg.data.path.rstrip("/") else ""
    cfg = replace(run.cfg, **{"data.path": folder, "data.mixture": mixture, "data.batch_size": size})
    corpus = dataset.open_corpus(cfg)
    check_tokenizer(run, folder, corpus.manifest["tokenizer"])
    compiled = compile_once(cfg, run.mesh)
    total = -(-dataset.rows_of(corpus.splits["val"], dataset.evaluation_data(cfg)) // size)
    with show_progress("batches", min(batches or total, total), say=print_to_stderr) as advance:
        found = progress.evaluate(cfg, run.mesh, compiled, run.params, batches, moves=advance)
    by_source = {name: value for name, value in found.items() if "/" in name}
    return {"tokens": found["tokens"], "loss": found["loss"], "perplexity": math.exp(found["loss"]),
            "bits_per_byte": found["bits_per_byte"], "whole": found["full"]} | by_source  # fmt: skip


def check_tokenizer(run: Run, folder: str, tokenizer: dict) -> None:
    """Raises: UserError if the run was trained with another tokenizer."""
    same = ("name", "vocabulary", "eot") if not tokenizer["fingerprint"] else ("fingerprint", "vocabulary", "eot")
    if run.tokenizer and [run.tokenizer[name] for name in same] != [tokenizer[name] for name in same]:
        raise UserError(f"{folder} was tokenized with {tokenizer['name']!r}, vocabulary {tokenizer['vocabulary']}, but "
                        f"{run.name} was trained with {run.tokenizer['name']!r}, vocabulary "
                        f"{run.tokenizer['vocabulary']}; prepare the text again with the run's tokenizer")  # fmt: skip
