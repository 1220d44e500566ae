"""Verify and summarize a directory of tokens: `python -m data.check tokens/stdlib-bytes`."""

import inspect
import sys
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

import dataset
from config import DataConfig
from data import tokenizers
from utils import UserError, check_picture, exit_status, log, new_picture

BAR_LETTERS = 40
FIRST_LETTERS = 70  # letters shown of each document
SHOWN_TOKENS = 512  # tokens decoded to get these letters
CHUNK_TOKENS = 2**22  # tokens per read


@dataclass(frozen=True)
class Arguments:
    """Read all shards of a directory or bucket, compare them with the manifest, and print a summary."""

    path: Annotated[str, tyro.conf.Positional]  # directory of tokens, written by python -m data.prepare
    documents: int = 3  # show the first line of this many documents per split
    seq_len: int = 0  # count the rows of this many tokens in an epoch, for each value of --data.packing; 0: don't
    plot: str = ""  # plot the document lengths to this PNG or SVG file; empty: no plot


EXAMPLES = """\
e.g. python -m data.check tokens/stdlib-bytes
     python -m data.check tokens/stdlib-bytes --plot lengths.png"""


@exit_status
def main(argv: list[str] | None = None) -> None:
    description = f"{EXAMPLES}\n\n{inspect.getdoc(Arguments)}"
    check(tyro.cli(Arguments, args=argv, prog="python -m data.check", description=description,
                   config=(tyro.conf.FlagCreatePairsOff,)))  # fmt: skip


def check(args: Arguments) -> dict[str, np.ndarray]:
    """Print the summary. Return, for each split, how many documents have 2**n .. 2**(n+1) - 1 tokens.

    Raises: UserError naming the first shard that differs from the manifest.
    """
    if args.plot:
        check_picture(args.plot)
    corpus = dataset.load(args.path)
    dataset.verify(args.path)
    manifest, vocabulary = corpus.manifest, corpus.manifest["tokenizer"]["vocabulary"]
    log(f"{args.path}: every shard matches the manifest")
    log(f"source {manifest['arguments']['source']!r}, tokenizer {manifest['tokenizer']['name']!r}, vocabulary "
        f"{vocabulary:,} ({manifest['dtype']})")  # fmt: skip
    histograms = {}
    for name, split in corpus.splits.items():
        counts = np.zeros(64, np.int64)
        seen = np.zeros(vocabulary, bool)
        for length, count in _count_lengths(split, f"{args.path}: split {name!r}", seen):
            counts[length] += count
        histograms[name] = counts
        recorded = manifest["splits"][name]
        if counts.sum() != recorded["documents"]:
            raise UserError(f"{args.path}: split {name!r} has {counts.sum()} documents, but the manifest has "
                            f"{recorded['documents']}; run data.prepare --overwrite")  # fmt: skip
        size = recorded["text_bytes"]
        text = "" if size is None else f", {size / split.tokens:.2f} bytes of text per token"
        log(f"\n{name}: {split.tokens:,} tokens in {counts.sum():,} documents and {len(split.shards)} shards, "
            f"{seen.sum():,} of {vocabulary:,} ids used{text}")  # fmt: skip
        _show_histogram(counts)
        for packing in ("windows", "documents") if args.seq_len else ():
            log(f"  {dataset.describe_epoch(split, DataConfig(seq_len=args.seq_len, packing=packing))}")
        _show_documents(split, corpus, args.documents)
    if args.plot:
        _plot(histograms, args.plot)
        log(f"\n{args.plot} written")
    return histograms


def _count_lengths(split: dataset.Split, where: str, seen: np.ndarray):
    """Yield (n, number of documents with 2**n .. 2**(n+1) - 1 tokens, including end of text); mark ids in `seen`.

    Raises: UserError if the documents do not begin at the positions that the begins.npy files list.
    """
    last = None  # start of the current document
    recorded = split.document_edges()[1:-1] if split.has_document_starts else None
    for start in range(0, split.tokens, CHUNK_TOKENS):
        tokens = split.read(start, min(start + CHUNK_TOKENS, split.tokens))
        seen[tokens] = True
        begins = start + np.flatnonzero(tokens == split.eot)
        inside = begins[(begins > 0) & (begins < split.targets)]
        if recorded is not None:
            expected = recorded[slice(*np.searchsorted(recorded, (start, start + len(tokens))))]
            if not np.array_equal(inside, expected):
                raise UserError(f"{where}: the chunk at token {start} has {len(inside)} document starts, but the "
                                f"begins.npy files list {len(expected)}; run data.prepare --overwrite")  # fmt: skip
        edges = begins if last is None else np.append(last, begins)
        yield from _bin_lengths(np.diff(edges))
        last = edges[-1] if len(edges) else None
    if last is not None:
        yield from _bin_lengths(np.array([split.tokens - last]))


def _bin_lengths(lengths: np.ndarray):
    if len(lengths):
        exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)  # length = x * 2**e, 1/2 <= x < 1
        yield from zip(exponents.tolist(), counts.tolist(), strict=True)


def _show_histogram(counts: np.ndarray) -> None:
    used = np.flatnonzero(counts)
    most = counts.max()
    for n in range(used[0], used[-1] + 1):
        bar = "#" * round(counts[n] / most * BAR_LETTERS) or ("." if counts[n] else "")
        log(f"  {2**n:>11,} tokens or more {counts[n]:>11,} {bar}".rstrip())


def _show_documents(split: dataset.Split, corpus: dataset.Corpus, count: int) -> None:
    """Print the first line of each of the first documents."""
    encoding = tokenizers.from_manifest(corpus.manifest)
    start = 0
    for _ in range(count):
        if encoding is None or start >= split.tokens:
            return
        tokens = split.read(start + 1, min(start + 1 + SHOWN_TOKENS, split.tokens))
        ends = np.flatnonzero(tokens == corpus.eot)
        ids = tokens[: ends[0]] if len(ends) else tokens
        line = encoding.decode(ids.tolist()).lstrip().partition("\n")[0][:FIRST_LETTERS]
        log(f"  | {line}")
        start = start + 1 + int(ends[0]) if len(ends) else _next_document(split, corpus.eot, start + 1)


def _next_document(split: dataset.Split, eot: int, start: int) -> int:
    """Return the position where the next document begins."""
    for place in range(start, split.tokens, CHUNK_TOKENS):
        ends = np.flatnonzero(split.read(place, min(place + CHUNK_TOKENS, split.tokens)) == eot)
        if len(ends):
            return place + int(ends[0])
    return split.tokens


def _plot(histograms: dict[str, np.ndarray], path: str) -> None:
    figure = new_picture(figsize=(6, 3))
    axes = figure.subplots()
    for name, counts in histograms.items():
        used = np.flatnonzero(counts)
        edges = np.arange(used[0], used[-1] + 2)
        axes.stairs(counts[edges[:-1]] / counts.sum(), 2.0**edges, label=f"{name}, {counts.sum():,}")
    axes.set(xlabel="tokens per document", ylabel="fraction of documents")
    axes.set_xscale("log", base=2)
    axes.legend(title="documents")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
