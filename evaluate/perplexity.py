"""The loss of a run on the validation split of a folder of tokens, as training measures it."""

import math

import dataset
import pipeline
from config import replace
from errors import UserError
from evaluate import show
from generate.runs import Run
from train import progress


def perplexity(run: Run, folder: str, batches: int = 0, batch_size: int = 0) -> dict:
    """Nats a token and what follows from them, over a whole validation split, or `batches` batches of it.

    Capacities of experts are those of training, whose numbers these are; `bits_per_byte` is NaN where nobody knows how
    many bytes a token stands for. A mixture is read where the run itself has read it.
    Raises: UserError if there are no such tokens, they are another tokenizer's, or a batch does not split.
    """
    shards = run.cfg.mesh.batch_shards
    size = batch_size or -(-run.cfg.data.batch_size // shards) * shards
    mixture = run.cfg.data.mixture if folder.rstrip("/") == run.cfg.data.path.rstrip("/") else ""
    cfg = replace(run.cfg, **{"data.path": folder, "data.mixture": mixture, "data.batch_size": size})
    corpus = dataset.opened(cfg)
    check_tokenizer(run, folder, corpus.manifest["tokenizer"])
    compiled = pipeline.evaluate(cfg, run.mesh)
    total = -(-corpus.splits["val"].windows(cfg.data.seq_len) // size)
    with show.progress("batches", min(batches or total, total)) as advance:
        found = progress.evaluate(cfg, run.mesh, compiled, run.params, batches, moves=advance)
    return {"tokens": found["tokens"], "loss": found["loss"], "perplexity": math.exp(found["loss"]),
            "bits_per_byte": found["bits_per_byte"], "whole": found["full"]}  # fmt: skip


def check_tokenizer(run: Run, folder: str, tokenizer: dict) -> None:
    """Raises: UserError if a run was trained on ids that mean something else."""
    same = ("name", "vocabulary", "eot") if not tokenizer["fingerprint"] else ("fingerprint", "vocabulary", "eot")
    if run.tokenizer and [run.tokenizer[name] for name in same] != [tokenizer[name] for name in same]:
        raise UserError(f"{folder} holds ids of {tokenizer['name']!r}, vocabulary {tokenizer['vocabulary']}, and "
                        f"{run.name} was trained on those of {run.tokenizer['name']!r}, vocabulary "
                        f"{run.tokenizer['vocabulary']}; prepare the text with the latter")  # fmt: skip
