"""Read token shards and make global batches. A batch is a pure function of the settings and the step.

A split (train or val) is one stream of tokens, stored in one or more shards. An end-of-text token precedes each
document. A batch has B rows of T positions; an array named x_BT has the shape [B, T]. A row is either window i, which
is tokens i*T .. i*T+T of the stream (the first T are inputs, the last T are targets), or whole documents, packed by
`data/reading/packing.py`. In both cases, every token except the stream's first is a target exactly once per epoch.

`data/reading/order.py` defines the order of rows. In a mixture, each token directory is shuffled separately.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shlex
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config import Config, DataConfig
from config.fields import PERIOD, Phase, is_remote, parse_mixture, parse_objectives, parse_packing
from data.reading import bucket, examples, features, manifests, objectives, order, packing
from utils import UserError

MANIFEST = "manifest.json"
AHEAD = 4  # batches prepared in the background
EVALUATION_SEED = 0  # a short evaluation uses the same windows in every run


@dataclass(frozen=True, eq=False)
class Split:
    """One stream of tokens in shards, memory-mapped or in a bucket."""

    shards: tuple[np.ndarray | bucket.Shard, ...]
    starts: np.ndarray  # stream position of each shard's first token, followed by the stream's length
    text_bytes: int | None  # UTF-8 bytes of the tokens' text; None: unknown, or some targets have weight 0
    weights: tuple[np.ndarray | bucket.Shard | None, ...]  # weight of each token as a target; None: all are 1
    begins: tuple[np.ndarray | bucket.Shard | None, ...]  # positions in each shard where documents begin; None: unknown
    eot: int  # the token at the start of each document
    vocabulary: int  # token ids are below this number

    @functools.cached_property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def in_bucket(self) -> bool:
        """Whether the shards are in a bucket."""
        return isinstance(self.shards[0], bucket.Shard)

    @property
    def has_document_starts(self) -> bool:
        """Whether every shard has a file that lists where its documents begin."""
        return all(one is not None for one in self.begins)

    @property
    def targets(self) -> int:
        return self.tokens - 1

    def windows(self, seq_len: int) -> int:
        """Count the windows of `seq_len` targets; the last may be shorter."""
        return -(-self.targets // seq_len)

    def piece(self, window: int, seq_len: int) -> "Piece":
        """Return the range of a window's inputs in the stream; the last window may be shorter."""
        start = window * seq_len
        return self, start, min(start + seq_len, self.targets)

    def document_edges(self) -> np.ndarray:
        """Return the stream position where each document begins, followed by the end of the last document's inputs.

        Raises: UserError if finding the positions would download all tokens from a bucket.
        """
        if self.in_bucket and not self.has_document_starts:
            raise UserError(
                f"{self.shards[0].bucket.path}: these tokens have no index of document starts, so data.packing="
                "'documents' would have to download all of them; regenerate them with data.prepare --overwrite, "
                "copy them to a local disk, or use --data.packing windows")  # fmt: skip
        scanned = lambda shard, known: (
            np.flatnonzero(shard == self.eot) if known is None else _read_begins(shard, known)
        )
        parts = (bucket.pool().map if self.in_bucket else map)(scanned, self.shards, self.begins)
        found = np.concatenate([start + part for start, part in zip(self.starts[:-1], parts, strict=True)])
        return np.concatenate([[0], found[(found > 0) & (found < self.targets)], [self.targets]])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copy tokens start .. stop-1 of the stream, or fewer at its end.

        Raises: UserError that names the shard if an id is outside of the vocabulary, which JAX would clip silently.
        """
        parts = [(shard, self.shards[shard][a:b]) for shard, a, b in self._shard_ranges(start, stop)]
        for shard, part in parts:
            if (largest := part.max()) >= self.vocabulary:
                raise _damaged_shard_error(_file_of(self.shards[shard]), f"has the token id {largest}, but the "
                                           f"vocabulary in {MANIFEST} has {self.vocabulary}")  # fmt: skip
        return np.concatenate([part for _, part in parts])

    def read_weights(self, start: int, stop: int) -> np.ndarray | int:
        """Return the weights of tokens start .. stop-1 as targets: 0 or 1."""
        if not any(one is not None for one in self.weights):
            return 1
        parts = ((self.weights[shard], a, b) for shard, a, b in self._shard_ranges(start, stop))
        return np.concatenate([np.ones(b - a, np.uint8) if one is None else one[a:b] for one, a, b in parts])

    def _shard_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, first token, end) for each shard that a range of the stream covers."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < min(stop, self.tokens):
            begin, end = int(self.starts[shard]), int(self.starts[shard + 1])
            yield shard, start - begin, min(stop, end) - begin
            start, shard = end, shard + 1


Piece = tuple[Split, int, int]  # a stream, and the range start .. stop-1 of inputs in it


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open directory of token shards, or a mixture of several, with their splits concatenated."""

    path: str
    manifest: dict
    splits: dict[str, Split]  # train, val
    sources: dict[str, "Corpus"] = field(default_factory=dict)  # the directories of a mixture, by name

    @property
    def eot(self) -> int:
        """The end-of-text token, which precedes each document."""
        return self.manifest["tokenizer"]["eot"]


def open_corpus(cfg: Config) -> Corpus:
    """Open the token directory of a run, or all directories of its mixture.

    Raises: UserError as `load` does, or if the data cannot be used with data.objective.
    """
    limits, d = (cfg.model.vocab_size, cfg.data.seq_len), cfg.data
    if d.mixture:
        shares = parse_mixture(d.mixture)[0].shares
        corpora = (load(f"{d.path.rstrip('/')}/{name}", *limits) for name in shares)
        corpus = _open_mixture(d.path, tuple(shares.items()), *corpora)
    else:
        corpus = load(d.path, *limits)
    examples.check(cfg, corpus.manifest["tokenizer"]["vocabulary"])
    return corpus


@functools.lru_cache(maxsize=8)
def _open_mixture(path: str, shares: tuple[tuple[str, int], ...], *corpora: Corpus) -> Corpus:
    """Combine several directories. Unigram and bigram entropies are averaged with the weights of the first phase."""
    first, *others = corpora
    for other in others:
        if other.manifest["tokenizer"] != first.manifest["tokenizer"]:
            both = f"{_describe_tokenizer(first)}, {_describe_tokenizer(other)}"
            raise UserError(f"data.mixture: {first.path} and {other.path} were prepared with different tokenizers "
                            f"({both}); prepare both with the same one")  # fmt: skip
    names, weights = zip(*shares, strict=True)
    entropies = {name: float(np.average([c.manifest[name] for c in corpora], weights=weights))
                 for name in ("unigram_nats", "bigram_nats")}  # fmt: skip
    splits = {name: _concatenate_splits([c.splits[name] for c in corpora], first.eot) for name in first.splits}
    return Corpus(path, {"tokenizer": first.manifest["tokenizer"]} | entropies, splits,
                  dict(zip(names, corpora, strict=True)))  # fmt: skip


def _describe_tokenizer(corpus: Corpus) -> str:
    tokenizer = corpus.manifest["tokenizer"]
    return f"{tokenizer['name']}, vocabulary {tokenizer['vocabulary']}, end of text {tokenizer['eot']}"


def _concatenate_splits(splits: list[Split], eot: int) -> Split:
    shards, weights, begins = (
        tuple(one for split in splits for one in getattr(split, what)) for what in ("shards", "weights", "begins")
    )
    known = all(split.text_bytes is not None for split in splits)
    text_bytes = sum(split.text_bytes for split in splits) if known else None
    starts = np.cumsum([0] + [len(shard) for shard in shards])
    return Split(shards, starts, text_bytes, weights, begins, eot, splits[0].vocabulary)


def load(path: str, vocab_size: int | None = None, seq_len: int | None = None) -> Corpus:
    """Open a directory written by `python -m data.prepare`. The result is cached until its manifest changes.

    Raises: UserError if it is missing or damaged, if it has ids of `vocab_size` or more, or if a split is shorter than
    one window of `seq_len`.
    """
    try:  # a bucket is opened only once
        state = () if is_remote(path) else os.stat(os.path.join(path, MANIFEST))
        corpus = _open(path, state.st_mtime_ns, state.st_size) if state else _open(path)
    except (FileNotFoundError, NotADirectoryError, bucket.MissingFile):
        raise UserError(
            f"no tokens at {path!r} (it has no {MANIFEST}); {_tokens_beside(path)}prepare them with\n"
            f"  {_prepare_command(path)}"
        ) from None
    vocabulary = corpus.manifest["tokenizer"]["vocabulary"]
    if vocab_size is not None and vocabulary > vocab_size:
        raise UserError(
            f"{path} has token ids 0..{vocabulary - 1}, but model.vocab_size={vocab_size} allows 0..{vocab_size - 1}; "
            f"use --model.vocab_size {-(-vocabulary // 8) * 8} (the next multiple of 8), or another --data.path"
        )
    for name, split in corpus.splits.items():
        if seq_len is not None and split.tokens < seq_len + 1:
            raise UserError(
                f"{path}: split {name!r} has {split.tokens} tokens, but a window needs data.seq_len + 1 = {seq_len + 1}"
                f"; use --data.seq_len {max(split.targets, 1)} or less, or more text"
                + (", or prepare it with a larger --val-share" if name == "val" else "")
            )
    return corpus


def _tokens_beside(path: str) -> str:
    """List the tokens in the parent folder of a path, for an error message; "" if there are none."""
    parent = os.path.dirname(os.path.normpath(path)) or "."
    names = [] if is_remote(path) or not os.path.isdir(parent) else sorted(os.listdir(parent))
    beside = [os.path.join(parent, name) for name in names if os.path.isfile(os.path.join(parent, name, MANIFEST))]
    return f"there are {', '.join(beside[:9])}; or " if beside else ""


def _prepare_command(path: str) -> str:
    """Return a data.prepare command that writes tokens to `path`, guessed from its name or the text files there."""
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


@functools.lru_cache(maxsize=64)  # enough for all directories of a mixture
def _open(path: str, *_state) -> Corpus:
    """Open manifest and shards. `_state` changes with the manifest, so that a rewritten manifest is not a cache hit."""
    remote = bucket.Bucket(path) if is_remote(path) else None
    contents = remote.read_file(MANIFEST) if remote else Path(path, MANIFEST).read_bytes()
    try:
        manifest = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}/{MANIFEST} is not JSON ({error}); run data.prepare --overwrite") from error
    manifests.check(manifest, f"{path}/{MANIFEST}")
    splits, tokenizer = {}, manifest["tokenizer"]
    for name, split in manifest["splits"].items():
        one = lambda row, count, dtype: row and (
            bucket.Shard(remote, row["file"], count, dtype, _damaged_shard_error) if remote
            else _open_shard(path, row["file"], count, dtype))  # fmt: skip
        rows = split["shards"]
        shards = tuple(one(row, row["tokens"], manifest["dtype"]) for row in rows)
        weights = tuple(one(row.get("weights"), row["tokens"], "uint8") for row in rows)
        begins = tuple(one(row.get("begins"), row["documents"], "uint32") for row in rows)
        starts = np.cumsum([0] + [len(shard) for shard in shards])
        splits[name] = Split(
            shards, starts, split["text_bytes"], weights, begins, tokenizer["eot"], tokenizer["vocabulary"]
        )
    return Corpus(path, manifest, splits)


def files_of(manifest: dict, beside: Sequence[str] = ("weights", "begins")) -> list[dict]:
    """List the files in a manifest, each with name and sha256: shards, target weights and document starts."""
    rows = [row for split in manifest["splits"].values() for row in split["shards"]]
    return [file for row in rows for file in (row, *map(row.get, beside)) if file]


def _open_shard(path: str, name: str, count: int, dtype: str) -> np.ndarray:
    """Memory-map a file after comparing its header and size with the manifest, without reading its contents."""
    file = os.path.join(path, name)
    try:
        tokens = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged_shard_error(file, f"cannot be opened: {error}") from error
    if (tokens.dtype, tokens.shape) != (np.dtype(dtype), (count,)):
        raise _damaged_shard_error(file, f"has {tokens.dtype} {tokens.shape}, but the manifest has {dtype} ({count},)")
    size, expected_bytes = os.path.getsize(file), tokens.offset + tokens.nbytes
    if size != expected_bytes:
        raise _damaged_shard_error(file, f"has {size} bytes, but header and tokens need {expected_bytes}")
    return tokens


def _read_begins(shard: np.ndarray | bucket.Shard, begins: np.ndarray | bucket.Shard) -> np.ndarray:
    """Read the positions in a shard where documents begin. Raises: UserError if they are not in ascending order."""
    found = begins[:]
    if len(found) and (np.any(found[1:] <= found[:-1]) or found[-1] >= len(shard)):
        raise _damaged_shard_error(_file_of(begins), f"has positions that are not ascending, or not below {len(shard)}")
    return found


def _file_of(shard: np.ndarray | bucket.Shard) -> str:
    return str(shard.filename) if isinstance(shard, np.memmap) else f"{shard.bucket.path}/{shard.name}"


def _damaged_shard_error(file: str, what: str) -> UserError:
    return UserError(f"shard {file} {what}; restore it, or regenerate all shards with data.prepare --overwrite")


def verify(path: str) -> None:
    """Read every shard and compare its sha256 with the manifest. Raises: UserError naming the first that differs."""
    manifest, remote = load(path).manifest, bucket.Bucket(path) if is_remote(path) else None
    for shard in files_of(manifest):
        file = os.path.join(path, shard["file"])
        with remote.open(shard["file"]) if remote else open(file, "rb") as opened_file:
            found = hashlib.file_digest(opened_file, "sha256").hexdigest()
        if found != shard["sha256"]:
            raise _damaged_shard_error(file, f"has sha256 {found}, but the manifest has {shard['sha256']}")


def batch(cfg: Config, step: int, split: str = "train", rows: Sequence[int] | None = None) -> dict[str, np.ndarray]:
    """Make the global batch of a step: rows step*B .. step*B+B-1 of an infinite sequence, reshuffled each epoch.

    A batch is a dict of arrays [B, T], B = data.batch_size rows of T = data.seq_len positions. You can also train on a
    batch that you make yourself: `sharding.put` places it on a mesh. With an objective that has inputs and targets, see
    `data/reading/features.py` for the arrays.

        tokens_BT     int32    inputs of the model
        targets_BT    int32    the next token at each position
        positions_BT  int32    position in the document, from 0, for rotary embeddings
        segments_BT   int32    document in the row, from 1; a token attends only within it; 0 is padding
        weights_BT    float32  1 if the target counts in the loss, which is a mean over the global batch; 0 for padding
                               and for targets that the shards exclude, such as those in a prompt

    If data.packing is `unmasked`, positions count from the start of the row, and a token also attends to earlier
    documents in it. `rows` selects some of the B rows, and only these are read: a host reads its `sharding.own_rows`.
    """
    corpus, d = open_corpus(cfg), cfg.data
    sequence, first = functools.partial(_row, corpus.splits[split], d, cfg.run.seed), step * d.batch_size
    if split == "train":
        first = order.batch_number(d.skip, step) * d.batch_size
        sequence = functools.partial(_mixture_row, corpus, d, cfg.run.seed) if d.mixture else sequence
    return _make_batch([sequence(first + row) for row in _rows(cfg, rows)], corpus.eot, cfg)


class Row(NamedTuple):
    """What one row of a batch is made from."""

    pieces: list[Piece]
    objective: str
    key: objectives.Key  # of the row's random numbers


def _row(split: Split, d: DataConfig, seed: int, number: int) -> Row:
    """Return row `number` in the infinite sequence of rows. Each objective of a mixture has a separate shuffle."""
    objective, own = _objective_and_index(d, number)
    seed = seed if objective == d.objective else order.seed_of(objective, seed)
    count = _rows_of_objective(split, d, objective)
    row = own % count if parse_packing(d.packing).ordered else _shuffled(count, seed)[own]
    return Row(_pieces(split, d, objective, row), objective, (seed, own))


def _objective_and_index(d: DataConfig, number: int) -> tuple[str, int]:
    """Return the objective of row `number`, and how many rows before it have the same objective."""
    return order.source_and_index((Phase(0, parse_objectives(d.objective)),), (0,), number)


def _pieces(split: Split, d: DataConfig, objective: str, row: int) -> list[Piece]:
    """Return the documents, or the window, of a row of the epoch."""
    if parse_packing(d.packing).documents or objective == "task":
        return [(split, *piece) for piece in packed_rows(split, objective, features.room(d)).pieces(row)]
    if objective == "causal":
        return [split.piece(row, d.seq_len)]
    size = features.longest_text(objective, features.room(d))
    return [(split, row * size, min((row + 1) * size, split.tokens))]


def _rows_of_objective(split: Split, d: DataConfig, objective: str) -> int:
    """Count the rows in an epoch if all rows have this objective."""
    if parse_packing(d.packing).documents or objective == "task":
        return len(packed_rows(split, objective, features.room(d)))
    if objective == "causal":
        return split.windows(d.seq_len)
    return -(-split.tokens // features.longest_text(objective, features.room(d)))


def rows_of(split: Split, d: DataConfig) -> int:
    """Count the rows in an epoch. In a mixture of objectives, the rows that have as many tokens as the split."""
    shares = parse_objectives(d.objective)
    counts = {name: _rows_of_objective(split, d, name) for name in shares}
    return max(1, round(PERIOD / sum(share / counts[name] for name, share in shares.items())))


def epoch_steps(cfg: Config) -> dict[str, int]:
    """Count the steps per epoch. In a mixture, count them for each source by name, with the weights of phase 1."""
    d, corpus = cfg.data, open_corpus(cfg)
    shares = parse_mixture(d.mixture)[0].shares if d.mixture else {"": PERIOD}
    rows = {name: rows_of(one.splits["train"], d) for name, one in (corpus.sources or {"": corpus}).items()}
    read = {name: rows[name] * order.PERIOD / share for name, share in shares.items() if share}
    return {name: math.ceil(count / d.batch_size) for name, count in read.items()}


@functools.lru_cache(maxsize=64)  # enough for all directories of a mixture
def packed_rows(split: Split, objective: str, room: tuple[int, ...]) -> packing.Packed:
    """Pack the documents of a split into rows, the same on each host.

    Raises: as `Split.document_edges`; for `task`, UserError if there are no prompts or targets, or if one is too long
    """
    edges = split.document_edges()
    if objective == "causal":
        return packing.pack(edges, room[-1])
    edges[-1] = split.tokens
    if objective == "task":
        lengths = examples.task_lengths(split.read_weights(0, split.tokens), edges, room)
    else:
        edges = packing.cut(edges, features.longest_text(objective, room))
        lengths = objectives.lengths(objective, np.maximum(np.diff(edges), objectives.LEAST))
    return packing.pack_pieces(edges, features.row_share(lengths, room), max(room))


def describe_epoch(split: Split, d: DataConfig) -> str:
    """Describe an epoch: rows, padding and the fraction of documents in several rows (unless it is slow to compute)."""
    T, count, windows = d.seq_len, rows_of(split, d), not parse_packing(d.packing).documents
    if d.objective != "causal":
        return f"{count:,} rows{_describe_truncation(split, d)}"
    noun = "windows" if windows else "rows"
    rows = f"in {count:,} {noun} of {T:,} tokens"
    if windows and (split.in_bucket or not split.has_document_starts):
        return f"documents {rows}"
    edges = split.document_edges()
    first, last = edges[:-1], edges[1:] - 1
    cut = first // T != last // T if windows else last - first >= T
    padding = "" if windows else f", {1 - split.targets / (count * T):.2%} padding"
    return f"{len(cut):,} documents {rows}; {cut.mean():.1%} of documents span several {noun}{padding}"


def _describe_truncation(split: Split, d: DataConfig) -> str:
    """Describe how many rows drop text at their end (unless none does, or it is slow to compute)."""
    packs = parse_packing(d.packing)
    whole = packs.documents or packs.unmasked or split.in_bucket or not split.has_document_starts
    shares = {} if whole else parse_objectives(d.objective)
    cut = sum(share * examples.truncated(name, split.document_edges(), split.tokens, features.room(d))
              for name, share in shares.items() if name not in ("causal", "task"))  # fmt: skip
    return f", {cut / PERIOD:.1%} of them truncated" if cut else ""


def _mixture_row(corpus: Corpus, d: DataConfig, seed: int, number: int) -> Row:
    phases = parse_mixture(d.mixture)
    starts = tuple(order.batch_number(d.skip, phase.first) * d.batch_size if phase.first else 0 for phase in phases)
    name, own = order.source_and_index(phases, starts, number)
    return _row(corpus.sources[name].splits["train"], d, order.seed_of(name, seed), own)


def _rows(cfg: Config, rows: Sequence[int] | None) -> list[int]:
    return [*range(cfg.data.batch_size)] if rows is None else [int(row) for row in rows]


def evaluation_batches(
    cfg: Config, batches: int = 0, rows: Sequence[int] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the validation split in a fixed order, each target once. The last batch is padded.

    With `batches` > 0, yield the rows of that many, from a shuffle that is the same in every run. `rows`: see `batch`.
    Every run divides a text of the split into the same inputs and targets. A mixture of objectives is always shuffled.
    """
    return (batch for _, batch in evaluation_batches_by_source(cfg, batches, rows))


def evaluation_batches_by_source(
    cfg: Config, batches: int = 0, rows: Sequence[int] | None = None
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield (source, batch) for the batches of `evaluation_batches`. The last batch of each source is padded.

    A row belongs to the source of its first token. The source is "" without a mixture, and for `task`, which packs
    examples of several sources into a row.
    """
    corpus, d = open_corpus(cfg), evaluation_data(cfg)
    split = corpus.splits["val"]
    count = rows_of(split, d)
    if batches:
        count = min(count, batches * d.batch_size)

    def row_of(number: int) -> Row:
        objective, row = _objective_and_index(d, number)
        if batches or objective != d.objective:
            row = _shuffled(_rows_of_objective(split, d, objective), EVALUATION_SEED)[row]
        pieces = _pieces(split, d, objective, row) if number < count else []
        return Row(pieces, objective, (EVALUATION_SEED, row))

    numbers_of = {"": range(count)}
    if corpus.sources and "task" not in parse_objectives(d.objective):
        numbers_of, names = {name: [] for name in corpus.sources}, [*corpus.sources]
        ends = np.cumsum([source.splits["val"].tokens for source in corpus.sources.values()])
        for number in range(count):
            [(_, start, _)] = row_of(number).pieces
            numbers_of[names[np.searchsorted(ends, start, side="right")]].append(number)
    for name, numbers in numbers_of.items():
        for first in range(0, len(numbers), d.batch_size):
            chosen = (first + row for row in _rows(cfg, rows))
            made = [row_of(numbers[one] if one < len(numbers) else max(one, count)) for one in chosen]
            yield name, _make_batch(made, corpus.eot, cfg)


def evaluation_data(cfg: Config) -> DataConfig:
    """Return the settings that evaluation reads the validation split with."""
    return dataclasses.replace(cfg.data, packing=cfg.data.packing.replace("documents", "windows"))


@functools.lru_cache(maxsize=64)  # enough for all sources and objectives of a mixture
def _shuffled(count: int, seed: int):
    """Return an infinite lazy sequence of row numbers; each epoch is a different permutation of 0..count-1."""
    import grain  # lazily, because it imports JAX and is not installed on some machines

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat()


def _make_batch(rows: list[Row], eot: int, cfg: Config) -> dict[str, np.ndarray]:
    """Make a batch from the pieces of each row."""
    is_causal = np.array([row.objective == "causal" for row in rows], bool)
    only_causal, made, causal = cfg.data.objective == "causal", {}, {}
    if only_causal or is_causal.any():
        causal = _make_causal_batch([row.pieces if row.objective == "causal" else [] for row in rows], eot, cfg)
        made = causal | ({"prefix_BT": np.zeros_like(causal["tokens_BT"])} if cfg.model.prefix_lm else {})
    if not only_causal:
        read = _read([piece for row in rows if row.objective != "causal" for piece in row.pieces], 0)
        pieces = [[] if row.objective == "causal" else [next(read) for _ in row.pieces] for row in rows]
        made = features.convert([examples.make(row.objective, row.key, of_row, eot, cfg)
                                 for row, of_row in zip(rows, pieces, strict=True)], eot, cfg)  # fmt: skip
    for name, array in causal.items():
        made[name][is_causal] = array[is_causal]
    return made


def _make_causal_batch(sequences: list[list[Piece]], eot: int, cfg: Config) -> dict[str, np.ndarray]:
    """Make a batch in which every token is a target, from the pieces of each row, and pad the rows."""
    B, T, unmasked = len(sequences), cfg.data.seq_len, parse_packing(cfg.data.packing).unmasked
    tokens_BT, targets_BT = np.full((2, B, T), eot, np.int32)
    lengths_B, weights_BT, starts_BT = np.zeros(B, np.int32), np.zeros((B, T), np.float32), np.zeros((B, T), bool)
    all_read = _read([piece for pieces in sequences for piece in pieces], 1)
    for row, pieces in enumerate(sequences):
        end = 0
        for _, start, stop in pieces:
            (read, weights), begin, end = next(all_read), end, end + stop - start
            tokens_BT[row, begin:end], targets_BT[row, begin:end] = read[:-1], read[1:]
            weights_BT[row, begin:end], starts_BT[row, begin] = weights, True
        lengths_B[row] = end
    index_T = np.arange(T, dtype=np.int32)
    real_BT = index_T < lengths_B[:, None]
    starts_BT |= tokens_BT == eot  # a document starts here, or continues from another row
    begins_BT = np.zeros((B, T), np.int32) if unmasked else index_T * starts_BT
    np.maximum.accumulate(begins_BT, axis=1, out=begins_BT)  # index where the position's document begins
    segments_BT = np.cumsum(starts_BT, axis=1, dtype=np.int32)
    segments_BT *= real_BT
    return {
        "tokens_BT": tokens_BT,
        "targets_BT": targets_BT,
        "positions_BT": np.subtract(index_T, begins_BT, out=begins_BT),
        "segments_BT": segments_BT,
        "weights_BT": weights_BT,
    }


def _read(pieces: list[Piece], more: int) -> Iterator[tuple[np.ndarray, np.ndarray | int]]:
    """Read the tokens of each piece and `more` (1 for the last target), and the weights of the last stop - start as
    targets. Reads from a bucket run in parallel."""
    read = lambda piece: (
        piece[0].read(piece[1], piece[2] + more), piece[0].read_weights(piece[1] + more, piece[2] + more)
    )  # fmt: skip
    return (bucket.pool().map if any(split.in_bucket for split, _, _ in pieces) else map)(read, pieces)


def prefetch(cfg: Config, start: int, rows: Sequence[int] | None = None) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield (step, batch) from step `start` on, while a background thread makes the next AHEAD batches.

    The thread ends with the iterator. `rows` as for `batch`.
    """
    make = functools.partial(batch, cfg, rows=rows)
    background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        ahead = deque(background.submit(make, start + n) for n in range(AHEAD))
        for step in itertools.count(start):
            ahead.append(background.submit(make, step + AHEAD))
            yield step, ahead.popleft().result()
    finally:
        background.shutdown(cancel_futures=True)


def bytes_per_token(corpus: Corpus, split: str = "val", objective: str = "causal") -> float:
    """Return the text bytes per target (NaN: unknown). Bits per byte = nats per token / ln 2 / bytes per token."""
    text_bytes = corpus.splits[split].text_bytes
    return text_bytes / corpus.splits[split].targets if text_bytes and objective == "causal" else math.nan


def fingerprint(cfg: Config) -> dict:
    """Return the source, tokenizer and hashes of the tokens, for config.json and checkpoints."""
    if not cfg.data.mixture:
        return _fingerprint(load(cfg.data.path))
    of = {name: _fingerprint(source) for name, source in open_corpus(cfg).sources.items()}
    parts = {part: {name: one[part] for name, one in of.items()} for part in ("source", "shards_sha256")}
    return parts | {"tokenizer": next(iter(of.values()))["tokenizer"]}


def _fingerprint(corpus: Corpus) -> dict:
    manifest = corpus.manifest
    decide = lambda split: "".join(one["sha256"] for one in files_of({"splits": {"": split}}, ("weights",)))
    shards = {name: hashlib.sha256(decide(split).encode()).hexdigest() for name, split in manifest["splits"].items()}
    return {"source": manifest["arguments"]["source"], "tokenizer": manifest["tokenizer"], "shards_sha256": shards}
