"""Token shards to global batches: a batch is a pure function of the settings and the step.

A split is one stream of tokens, however many shards it is kept in: document after document, an end-of-text token before
each. It is cut into windows, T tokens apart. Window i reads tokens i*T .. i*T+T: the first T are inputs, the last T are
targets, so every token but the stream's first is a target exactly once. Letters: B sequences, T positions.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import shlex
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from config import Config
from utils import UserError

FORMAT = 1  # version of manifest.json
MANIFEST = "manifest.json"
EVALUATION_SEED = 0  # which windows a short evaluation sees: the same in every run


@dataclass(frozen=True, eq=False)
class Split:
    """One stream of tokens, kept in memory-mapped shards."""

    shards: tuple[np.ndarray, ...]
    starts: np.ndarray  # position in the stream of each shard's first token, and the stream's length at the end
    text_bytes: int | None  # UTF-8 bytes of the text the tokens stand for; None: ids of no known tokenizer

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def targets(self) -> int:
        return self.tokens - 1

    def windows(self, seq_len: int) -> int:
        """Count the windows of `seq_len` targets; the last may be shorter."""
        return -(-self.targets // seq_len)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copy tokens start .. stop-1 of the stream, fewer where it ends."""
        pieces = []
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < min(stop, self.tokens):
            begin, end = self.starts[shard], self.starts[shard + 1]
            pieces.append(self.shards[shard][start - begin : stop - begin])
            start, shard = end, shard + 1
        return np.concatenate(pieces)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A directory of token shards, opened."""

    path: str
    manifest: dict
    splits: dict[str, Split]  # train, val

    @property
    def eot(self) -> int:
        """The token before each document."""
        return self.manifest["tokenizer"]["eot"]


def load(path: str, vocab_size: int | None = None, seq_len: int | None = None) -> Corpus:
    """Open a directory written by `python -m data.prepare`; opened again unchanged, it is the same object.

    Raises: UserError if it is missing or damaged, if its ids do not fit into `vocab_size` rows, or if a split holds no
    whole window of `seq_len`.
    """
    try:
        state = os.stat(os.path.join(path, MANIFEST))
    except OSError:
        raise UserError(f"no tokens at {path!r} (no {MANIFEST} there); make them with\n  {_command(path)}") from None
    corpus = _open(path, state.st_mtime_ns, state.st_size)
    vocabulary = corpus.manifest["tokenizer"]["vocabulary"]
    if vocab_size is not None and vocabulary > vocab_size:
        raise UserError(
            f"{path} holds token ids 0..{vocabulary - 1}, model.vocab_size={vocab_size} has 0..{vocab_size - 1}; "
            f"use --model.vocab_size {-(-vocabulary // 8) * 8} (the next multiple of 8), or another --data.path"
        )
    for name, split in corpus.splits.items():
        if seq_len is not None and split.tokens < seq_len + 1:
            raise UserError(
                f"{path}: split {name!r} holds {split.tokens} tokens, a window needs data.seq_len + 1 = {seq_len + 1}; "
                f"use --data.seq_len {max(split.targets, 1)} or less, or more text"
                + (", or prepare it with a larger --val-share" if name == "val" else "")
            )
    return corpus


def _command(path: str) -> str:
    """The command that makes the tokens at `path`: its name says which, as in tokens/stdlib-gpt2; else of its text."""
    name, ending = os.path.splitext(os.path.basename(os.path.normpath(path)))
    source, _, tokenizer = (name + ending).partition("-")
    if source == "stdlib":
        return f"python -m data.prepare --source stdlib --tokenizer {tokenizer or 'bytes'} --out {shlex.quote(path)}"
    kind, files, out = "text", "FOLDER/*.txt", path
    if os.path.isfile(path):
        kind, files, out = {".jsonl": "jsonl", ".parquet": "parquet"}.get(ending, kind), path, f"tokens/{name}"
    elif os.path.isdir(path) and os.listdir(path):
        files, out = os.path.join(path, "**"), f"tokens/{name}{ending}"
    return f"python -m data.prepare --source {shlex.quote(f'{kind}:{files}')} --out {shlex.quote(out)}"


@functools.lru_cache(maxsize=8)
def _open(path: str, *_state) -> Corpus:
    """Open manifest and shards; `_state` changes with the manifest, so that a rewritten one is read again."""
    try:
        with open(os.path.join(path, MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
    except ValueError as error:
        raise UserError(f"{path}/{MANIFEST} is not JSON ({error}); remake it with data.prepare --overwrite") from error
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}/{MANIFEST} has format {manifest.get('format')}, this version reads format {FORMAT}; "
                        f"remake it with data.prepare --overwrite")  # fmt: skip
    splits = {}
    for name, split in manifest["splits"].items():
        shards = tuple(_open_shard(path, shard, manifest["dtype"]) for shard in split["shards"])
        starts = np.cumsum([0] + [len(shard) for shard in shards])
        splits[name] = Split(shards, starts, split["text_bytes"])
    return Corpus(path, manifest, splits)


def _open_shard(path: str, shard: dict, dtype: str) -> np.ndarray:
    """Memory-map a shard whose header and size are what the manifest says; its contents are not read."""
    file = os.path.join(path, shard["file"])
    try:
        tokens = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(file, f"cannot be opened: {error}") from error
    if (tokens.dtype, tokens.shape) != (np.dtype(dtype), (shard["tokens"],)):
        raise _damaged(file, f"holds {tokens.dtype} {tokens.shape}, the manifest says {dtype} ({shard['tokens']},)")
    size, expected_bytes = os.path.getsize(file), tokens.offset + tokens.nbytes
    if size != expected_bytes:
        raise _damaged(file, f"has {size} bytes, header and tokens make {expected_bytes}")
    return tokens


def _damaged(file: str, what: str) -> UserError:
    return UserError(f"shard {file} {what}; restore it, or remake all with data.prepare --overwrite")


def verify(path: str) -> None:
    """Read every shard and compare its sha256 with the manifest. Raises: UserError naming the first that differs."""
    for split in load(path).manifest["splits"].values():
        for shard in split["shards"]:
            file = os.path.join(path, shard["file"])
            if (found := file_sha256(file)) != shard["sha256"]:
                raise _damaged(file, f"has sha256 {found}, the manifest says {shard['sha256']}")


def file_sha256(path: str) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def batch(cfg: Config, step: int, split: str = "train") -> dict[str, np.ndarray]:
    """Make the global batch of a step: windows step*B .. step*B+B-1 of an endless shuffle, a new order each epoch.

    A batch is a dict of arrays [B, T], B = data.batch_size sequences of T = data.seq_len positions. One that you make
    yourself trains as well: `sharding.put` places it on a mesh.

        tokens_BT     int32    what the model reads
        targets_BT    int32    what it should say at each position: the token that comes next
        positions_BT  int32    place in the document, from 0: scores depend on the distance of two
        segments_BT   int32    which document of the row, from 1: a token sees it up to itself; 0 is padding
        weights_BT    float32  how much a target counts in the loss, a mean over the global batch: 1; 0 without a target

    With data.mask_documents=False positions go on through the row, and a token sees the documents before its own.
    """
    corpus = load(cfg.data.path, cfg.model.vocab_size, cfg.data.seq_len)
    order = _shuffled(corpus.splits[split].windows(cfg.data.seq_len), cfg.data.seed)
    first = step * cfg.data.batch_size
    return _cut(corpus, split, [order[i] for i in range(first, first + cfg.data.batch_size)], cfg)


def evaluation_batches(cfg: Config, batches: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Yield the validation split in a fixed order, each target once; the last batch is filled up with padding.

    With `batches` > 0, at most that many, from a shuffle that is the same in every run.
    """
    corpus = load(cfg.data.path, cfg.model.vocab_size, cfg.data.seq_len)
    count = corpus.splits["val"].windows(cfg.data.seq_len)
    windows = range(count)
    if batches:
        order = _shuffled(count, EVALUATION_SEED)
        windows = [order[i] for i in range(min(count, batches * cfg.data.batch_size))]
    for first in range(0, len(windows), cfg.data.batch_size):
        yield _cut(corpus, "val", windows[first : first + cfg.data.batch_size], cfg)


@functools.lru_cache(maxsize=8)
def _shuffled(count: int, seed: int):
    """An endless sequence of window numbers, each epoch a different permutation of 0..count-1; nothing is stored."""
    import grain  # here, because it imports JAX and is absent on some machines

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat()


def _cut(corpus: Corpus, split: str, windows, cfg: Config) -> dict[str, np.ndarray]:
    """Read windows of a split into one batch; rows beyond them are padding."""
    B, T = cfg.data.batch_size, cfg.data.seq_len
    read = np.full((B, T + 1), corpus.eot, np.int32)  # inputs, and one more for the last target
    lengths_B = np.zeros(B, np.int32)  # targets in each row
    for row, window in enumerate(windows):
        tokens = corpus.splits[split].read(window * T, window * T + T + 1)
        read[row, : len(tokens)] = tokens
        lengths_B[row] = len(tokens) - 1
    index_T = np.arange(T, dtype=np.int32)
    real_BT = index_T < lengths_B[:, None]
    tokens_BT = np.where(real_BT, read[:, :-1], corpus.eot)
    starts_BT = tokens_BT == corpus.eot  # a document starts here, or goes on from the window before
    starts_BT[:, 0] = True
    positions_BT = np.broadcast_to(index_T, (B, T)).copy()
    if cfg.data.mask_documents:
        positions_BT -= np.maximum.accumulate(index_T * starts_BT, axis=1)
    return {
        "tokens_BT": tokens_BT,
        "targets_BT": read[:, 1:].copy(),
        "positions_BT": positions_BT,
        "segments_BT": np.cumsum(starts_BT, axis=1, dtype=np.int32) * real_BT,
        "weights_BT": real_BT.astype(np.float32),
    }


def prefetch(cfg: Config, start: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield (step, batch) from `start` on, made data.prefetch steps ahead by a thread that ends with the iterator."""
    background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        ahead = deque(background.submit(batch, cfg, start + n) for n in range(cfg.data.prefetch))
        for step in itertools.count(start):
            ahead.append(background.submit(batch, cfg, step + cfg.data.prefetch))
            yield step, ahead.popleft().result()
    finally:
        background.shutdown(cancel_futures=True)


def bytes_per_token(corpus: Corpus, split: str = "val") -> float:
    """Text bytes for each target of a split: bits per byte = nats per token / ln 2 / bytes per token. NaN: unknown."""
    text_bytes = corpus.splits[split].text_bytes
    return math.nan if text_bytes is None else text_bytes / corpus.splits[split].targets


def fingerprint(cfg: Config) -> dict:
    """Say which tokens these are, for config.json and checkpoints."""
    manifest = load(cfg.data.path).manifest
    shards = {
        name: hashlib.sha256("".join(shard["sha256"] for shard in split["shards"]).encode()).hexdigest()
        for name, split in manifest["splits"].items()
    }
    return {"source": manifest["arguments"]["source"], "tokenizer": manifest["tokenizer"], "shards_sha256": shards}
