"""Write token shards: `python -m data.prepare --source stdlib --tokenizer bytes --out tokens/stdlib-bytes`."""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import tyro

import dataset
from config import first_difference
from config.fields import is_remote
from data import engine, files, shards, sources, tokenizers, units
from data.reading import manifests
from data.shards import Folder, UnitFile
from data.sources import Part, Unit
from data.units import Job
from progress import show_progress
from utils import UserError, exit_status, log

COUNTED_TOKENS = 2**24  # compute unigram_nats and bigram_nats from at most this many tokens, to limit memory
UNFINISHED = ".unfinished-"  # prefix of the folder for unfinished work


@dataclass(frozen=True)
class Arguments:
    """Turn text into token shards, for training (train) and for validation (val).

    A document is a text file, or a row of jsonl or parquet. A hash of its name decides whether it is held out.

    If this leaves train or val empty, as with a single file, the tail of every document is held out instead.

    Running the same command again changes nothing; if the first run was interrupted, it finishes the work.
    """

    out: str  # directory for the shards and manifest.json
    source: str = "stdlib"  # stdlib (Python's standard library); text:GLOB, jsonl:GLOB, parquet:GLOB; hf:NAME[:CONFIG]
    tokenizer: str = "bytes"  # bytes, gpt2, cl100k_base, o200k_base, or a file: bpe: (ranks), json: (Hugging Face), sp:
    text_field: str = "text"  # field or column with the text; jsonl and parquet only
    val_share: float = 0.05  # fraction of the documents (or of each document's bytes) held out for validation
    shard_tokens: int = 2**25  # maximum tokens per shard; two shards must fit in memory
    overwrite: bool = False  # replace the tokens in --out
    workers: int = 1  # processes that tokenize; 0: one per core; the tokens don't depend on this number
    engine: Literal["processes", "ray"] = "processes"  # ray: a Ray cluster whose hosts can access --source and --out
    ray_address: str = "auto"  # address of the cluster; auto: the cluster of this machine

    def __post_init__(self):
        if not 0 < self.val_share < 1:
            raise UserError(f"val_share={self.val_share}: must be between 0 and 1")
        if not 1 <= self.shard_tokens <= 2**32:  # positions in a shard are stored in 32 bits
            raise UserError(f"shard_tokens={self.shard_tokens}: must be at least 1 and at most 2**32")
        if self.workers < 0:
            raise UserError(f"workers={self.workers}: must be 0 (one per core) or more")

    @property
    def manifest_arguments(self) -> dict:
        """The arguments that determine the tokens, as recorded in the manifest."""
        execution = ("out", "overwrite", "workers", "engine", "ray_address")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in execution}


EXAMPLES = """\
e.g. python -m data.prepare --source stdlib --tokenizer bytes --out tokens/stdlib-bytes
     python -m data.prepare --source 'jsonl:mine/*.jsonl' --tokenizer gpt2 --out tokens/mine-gpt2"""


@exit_status
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if sum(word.partition("=")[0] == "--source" for word in words) > 1:
        raise UserError("--source is given more than once; use one pattern for several files: 'text:mine/*.txt'")
    description = f"{EXAMPLES}\n\n{inspect.getdoc(Arguments)}"
    prepare(tyro.cli(Arguments, args=argv, prog="python -m data.prepare", description=description,
                     config=(tyro.conf.FlagCreatePairsOff,)))  # fmt: skip


def prepare(args: Arguments) -> dict:
    """Write the token shards to args.out, unless they exist, and return their manifest."""
    out = Folder(args.out)
    if out.size(dataset.MANIFEST) is not None and not args.overwrite:
        manifest = _check_existing(args)
        _remove_work(out)  # left by a run that was killed right after publishing
        log(f"{_display_name(args.out)} is complete: {_summary(manifest)}; use --overwrite to regenerate it")
        return manifest
    encoding = tokenizers.load(args.tokenizer)
    with _work_folder(out) as work:
        job = Job(work, encoding, args.text_field, args.val_share, tails=False)
        cut = sources.make_units(args.source, functools.partial(_split_file_once, work))
        written = _write_shards(args, job, cut)
        manifest = _publish(args, out, work, job.fingerprint, encoding.n_vocab, encoding.eot_token, written)
    log(f"{_display_name(args.out)}: {_summary(manifest)}")
    return manifest


def _display_name(out: str) -> str:
    """Return a directory's name for output: the path as given, or the last part of an absolute path."""
    return os.path.basename(os.path.normpath(out)) if os.path.isabs(out) else out


# Finished and unfinished work -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _work_folder(out: Folder) -> Iterator[Folder]:
    """Yield a folder in `out` for unfinished work.

    If the run fails or is killed, finished units stay there and the same command resumes from them. If no unit is
    finished, the directory is left as it was before.
    """
    path = Path(out.path)
    missing = [one for one in (path, *path.parents) if not one.exists()] if out.is_local else []  # innermost first
    work = out.subfolder(UNFINISHED + "units")
    work.make()
    try:
        with shards.lock_folder(work):
            _remove_partial_files(work)
            yield work
        _remove_work(out)
    except BaseException:
        finished = sum(name.startswith("unit-") for name in work.file_names())
        if finished:
            _remove_partial_files(work)
            log(f"finished work is stored in {work.path} ({finished} units of text); run the same command to resume")
        else:
            _remove_work(out)
            for path in missing:
                with contextlib.suppress(OSError):
                    path.rmdir()
        raise


def _remove_partial_files(work: Folder) -> None:
    """Remove the files that killed processes were writing, such as the other workers when one fails."""
    for name in work.file_names():
        if name.endswith(".part"):
            work.remove(name)


def _remove_work(out: Folder) -> None:
    out.subfolder(UNFINISHED + "units").clear()
    for path in glob.glob(os.path.join(glob.escape(out.path), UNFINISHED + "*")) if out.is_local else ():
        shutil.rmtree(path)


def _publish(
    args: Arguments, out: Folder, work: Folder, fingerprint: str | None, vocabulary: int, eot: int, written: dict
) -> dict:
    """Move the shards to `out`, and delete only the shards of an earlier run. Return the manifest.

    The manifest is written last, so a directory with a manifest is complete.
    """
    manifest = {
        "format": manifests.FORMAT,
        "arguments": args.manifest_arguments,
        "sources": [{"source": args.source, "weight": 1.0}],
        "tokenizer": {"name": args.tokenizer, "fingerprint": fingerprint, "vocabulary": vocabulary, "eot": eot},
        "dtype": units.token_dtype(vocabulary).name,
        **written,
    }
    manifest |= entropies(_first_train_tokens(work, manifest), manifest["tokenizer"]["vocabulary"])
    out.remove(dataset.MANIFEST)
    for name in out.file_names():
        if re.fullmatch(r"(train|val)-\d+(\.(weights|begins))?\.npy", name):
            out.remove(name)
    for file in dataset.files_of(manifest):
        out.move_from(file["file"], work)
    out.write(dataset.MANIFEST, lambda file: file.write((json.dumps(manifest, indent=1) + "\n").encode()))
    return manifest


def _check_existing(args: Arguments) -> dict:
    """Return the manifest of a complete directory. Raises: UserError if it was made with other arguments."""
    manifest = dataset.load(args.out).manifest
    recorded = dict(manifest["arguments"], fingerprint=manifest["tokenizer"]["fingerprint"])
    wanted = dict(args.manifest_arguments, fingerprint=recorded["fingerprint"])
    if tokenizers.is_file(args.tokenizer):  # the file may have changed
        wanted["fingerprint"] = tokenizers.fingerprint(tokenizers.load(args.tokenizer))
    if difference := first_difference(wanted, recorded):
        raise UserError(f"{args.out} has tokens prepared with different settings: {difference}; choose another --out, "
                        "or pass --overwrite")  # fmt: skip
    return manifest


# Text to shards -------------------------------------------------------------------------------------------------------


def _split_file_once(work: Folder, kind: str, file: files.File, unit_bytes: int) -> list[Part]:
    """Split a large file into parts, and store the positions, because finding them reads the whole file."""
    name = "parts-" + hashlib.sha256(json.dumps([kind, file, unit_bytes]).encode()).hexdigest()[:20]
    if work.size(name) is None:
        split = lambda: sources.split_file(kind, file, unit_bytes)
        parts = [part[2:] for part in files.retry_if_remote(file.path, is_remote(file.path), split)]
        work.write(name, lambda out: out.write(json.dumps(parts).encode()))
    return [Part(kind, file, *rest) for rest in json.loads(work.read(name))]


def _write_shards(args: Arguments, job: Job, cut: list[Unit]) -> dict:
    """Tokenize every document into the shards of its split, and return the manifest entries of the shards.

    Whole documents are held out. If this leaves a split without text, the tail of each document is held out instead.
    """
    tails = dataclasses.replace(job, tails=True)
    known = {one.name(unit) for one in (job, tails) for unit in cut}
    for name in job.folder.file_names():
        if name.startswith("unit-") and name not in known:  # made from another source or tokenizer
            job.folder.remove(name)
    unit_files, total = _tokenize(args, job, cut)
    text_bytes, documents = (sum(total[what].values()) for what in ("text_bytes", "documents"))
    if not text_bytes:
        job.folder.clear()
        raise UserError(f"{args.source!r} contains no text: 0 bytes in {documents} documents")
    if without := _split_without_text(total):
        log(f"note: splitting {documents} documents by the hash of their names leaves {without!r} empty at --val-share "
            f"{args.val_share}; the tail of each document is held out instead")  # fmt: skip
        job = tails
        unit_files, total = _tokenize(args, job, cut)
        if without := _split_without_text(total):
            job.folder.clear()
            raise UserError(f"{args.source!r} contains {text_bytes} bytes of text in {documents} documents, so "
                            f"{without!r} is empty at --val-share {args.val_share}; use more text")  # fmt: skip
    if total["odd"]:
        log(f"note: {total['odd']} of {documents} documents (first: {total['first_odd']!r}) are not UTF-8; their bytes "
            "are used unchanged")  # fmt: skip
    return _assemble(args, job, cut, unit_files, total["text_bytes"])


def _split_without_text(total: dict) -> str | None:
    return next((split for split, count in total["text_bytes"].items() if not count), None)


def _tokenize(args: Arguments, job: Job, cut: list[Unit]) -> tuple[list[UnitFile], dict]:
    """Tokenize the unfinished units. Return the files of all units, in order, and totals over them."""
    existing, names = set(job.folder.file_names()), [job.name(unit) for unit in cut]
    found = {name: shards.open_complete_unit(job.folder, name, job.dtype) for name in names if name in existing}
    todo = [(name, unit) for name, unit in zip(names, cut, strict=True) if not found.get(name)]
    results = _run_tasks(args, units.tokenize, job, todo, len(todo))
    with show_progress("tokenizing", len(cut), len(cut) - len(todo)) as advance:
        for head in results:
            advance(head and sum(head.tokens.values()))
    sums = ("documents", "tokens", "text_bytes")
    total = {what: dict.fromkeys(shards.SPLITS, 0) for what in sums} | {"odd": 0, "first_odd": ""}
    unit_files = [found.get(name) or UnitFile(job.folder, name, job.dtype) for name in names]
    for one in unit_files:
        for what in sums:
            for split, count in getattr(one.head, what).items():
                total[what][split] += count
        total["odd"] += one.head.odd
        total["first_odd"] = total["first_odd"] or one.head.first_odd
    return unit_files, total


def _run_tasks(args: Arguments, work: Callable, job: Job, todo: list, most_workers: int) -> Iterator:
    workers = min(args.workers or os.cpu_count() or 1, most_workers)
    return engine.run(work, job, todo, workers, args.engine, args.ray_address)


def _assemble(args: Arguments, job: Job, cut: list[Unit], unit_files: list[UnitFile], text_bytes: dict) -> dict:
    """Write the unfinished shards, and return the manifest entries of all shards."""
    cuts, rows = {split: shards.ShardPlanner(split, args.shard_tokens) for split in shards.SPLITS}, []
    for unit, file in zip(cut, unit_files, strict=True):
        for split in shards.SPLITS:
            cuts[split].add(file.name, file.lengths(split))
        rows.append({"first": unit[0].file.name, "start": unit[0].start, "parts": len(unit)} | file.head.tokens)
    for one in cuts.values():
        one.close()
    every = [shard for one in cuts.values() for shard in one.shards]
    done = {shard.file: finished for shard in every if (finished := units.read_finished_shard(job, shard))}
    todo = [shard for shard in every if shard.file not in done]
    # Starting a process takes as long as writing a few shards, so start one per 4 shards.
    results = _run_tasks(args, units.assemble, job, todo, len(todo) // 4)
    with show_progress("shards", len(every), len(done)) as advance:
        for one in results:
            if one:
                done[one.row["file"]] = one
            advance(one and one.row["tokens"])
    splits = {}
    for split in shards.SPLITS:
        own = [done[shard.file] for shard in cuts[split].shards]
        seen = np.any([one.ids(job.encoding.n_vocab) for one in own], axis=0)
        splits[split] = shards.totals([one.row for one in own], text_bytes[split], int(seen.sum()))
    return {"splits": splits, "units": rows}


def _first_train_tokens(folder: Folder, manifest: dict) -> np.ndarray:
    """Read the first COUNTED_TOKENS tokens of the train split, for `entropies`."""
    tokens, left, dtype = [], COUNTED_TOKENS, np.dtype(manifest["dtype"])
    for shard in manifest["splits"]["train"]["shards"]:
        end = folder.size(shard["file"])
        start = end - shard["tokens"] * dtype.itemsize  # after the header
        stop = min(end, start + left * dtype.itemsize)
        if stop > start:
            tokens.append(np.frombuffer(folder.read(shard["file"], start, stop), dtype))
            left -= len(tokens[-1])
    return np.concatenate(tokens)


def entropies(tokens: np.ndarray, vocabulary: int) -> dict:
    """Estimate a stream's entropies H(x) and H(x_t | x_t-1) from counts, in nats per token: two baseline losses.

    Source: H(x_t | x_t-1) = H(x_t-1, x_t) - H(x_t-1), the chain rule.
    """
    number = np.uint32 if vocabulary**2 <= 2**32 else np.int64  # sorting 32 bits takes half the time
    pairs = tokens[:-1].astype(number) * number(vocabulary) + tokens[1:]
    return {
        "counted_tokens": len(tokens),
        "unigram_nats": _entropy_nats(tokens),
        "bigram_nats": _entropy_nats(pairs) - _entropy_nats(tokens[:-1]),
    }


def _entropy_nats(values: np.ndarray) -> float:
    few = values.max() < len(values)  # if so, counting with bincount is faster than sorting
    counts = np.bincount(values) if few else np.unique(values, return_counts=True)[1]
    shares = counts[counts > 0] / len(values)
    return float(-np.sum(shares * np.log(shares)))


def _summary(manifest: dict) -> str:
    splits = manifest["splits"].items()
    parts = [f"{name} {split['tokens']:,} tokens in {split['documents']:,} documents" for name, split in splits]
    return f"{', '.join(parts)}, vocabulary {manifest['tokenizer']['vocabulary']:,} ({manifest['dtype']})"


# Ids instead of text --------------------------------------------------------------------------------------------------


def from_ids(
    train_ids, out: str, *, vocab_size: int = 0, tokenizer: str = "", validation_ids=None, eot: int | None = None,
    val_share: float = 0.05, shard_tokens: int = 2**25, overwrite: bool = False, train_weights=None,
    validation_weights=None,
) -> dict:  # fmt: skip
    """Write token ids that you already have to a directory for --data.path, and return its manifest.

    >>> import numpy as np
    >>> from data.prepare import from_ids
    >>> ids = np.random.default_rng(0).integers(0, 50, 10_000)  # or a list of arrays, one per document
    >>> manifest = from_ids(ids, "tokens/mine", vocab_size=50)
    tokens/mine: train 9,501 tokens in 1 documents, val 501 tokens in 1 documents, vocabulary 51 (uint16)

    Then `python main.py laptop --data.path tokens/mine --run.name mine`.

    train_ids       integers: one array with all ids, or a list of arrays, one per document
    vocab_size      ids are 0 .. vocab_size - 1; pass either this or `tokenizer`
    tokenizer       name of the tokenizer that made the ids, as for `tokenizers.load`; without it, bits per byte are
                    unknown, and a run samples no text
    validation_ids  like train_ids; None: hold out the last `val_share` of the tokens, which may split a document
    eot             the id that separates documents; None: the tokenizer's id, or without one a new id, vocab_size
    train_weights   a list of arrays like train_ids: 1 where an id counts as a target in the loss, 0 where it doesn't,
                    as in a prompt; the end-of-text id never counts. None: all ids count
    validation_weights  the same for validation_ids
    Raises: UserError if the ids are not of this form, or if `out` exists and `overwrite` is False.
    """
    encoding, vocabulary, limit, end = _resolve_vocabulary(tokenizer, vocab_size, eot)
    args = Arguments(out, "ids", tokenizer or tokenizers.UNKNOWN, "", val_share, shard_tokens)  # checks the last two
    splits = {"train": _split_documents("train_ids", train_ids, end, limit)}
    if validation_ids is not None:
        splits["val"] = _split_documents("validation_ids", validation_ids, end, limit)
    else:
        splits["train"], splits["val"] = _hold_out(splits["train"], val_share)
    weights = _check_weights(splits, {"train": train_weights, "val": validation_weights})
    if os.path.lexists(out) and not (os.path.isdir(out) and (overwrite or not os.listdir(out))):
        raise UserError(f"{out} exists; choose another directory, or pass overwrite=True to replace its tokens")
    place = Folder(out)
    with _work_folder(place) as work:
        splits = {name: _write_ids(args, work, name, documents, end, vocabulary, encoding, weights[name])
                  for name, documents in splits.items()}  # fmt: skip
        fingerprint = encoding and tokenizers.fingerprint(encoding)
        manifest = _publish(args, place, work, fingerprint, vocabulary, end, {"splits": splits})
    log(f"{_display_name(out)}: {_summary(manifest)}")
    return manifest


def from_texts(
    texts: sources.Rows, out: str, *, tokenizer: str = "bytes", text_field: str = "text", val_share: float = 0.05,
    shard_tokens: int = 2**25, overwrite: bool = False,
) -> dict:  # fmt: skip
    """Tokenize your own texts, which fit in memory, write them to a directory for --data.path, and return its manifest.

    >>> from data.prepare import from_texts
    >>> manifest = from_texts((f"text {n} " * 50 for n in range(100)), "tokens/texts")
    tokens/texts: train 38,397 tokens in 97 documents, val 1,203 tokens in 3 documents, vocabulary 257 (uint16)

    texts       texts, or dicts with texts, such as a data set of the library datasets; or a function that returns them
    text_field  field of a dict with its text
    val_share   fraction of the texts held out, by a hash of their content; if this leaves train or val empty, the
                last tokens are held out
    Raises: UserError for a row that is not text, or if `out` exists and `overwrite` is False.
    """
    encoding = tokenizers.load(tokenizer)
    ids: dict[str, list[np.ndarray]] = {split: [] for split in shards.SPLITS}
    for document in sources.read_documents(texts, text_field):
        ids[units.split_of(document.name, val_share)].append(tokenizers.encode(encoding, document.text))
    train, val = (ids["train"], ids["val"]) if all(ids.values()) else (ids["train"] + ids["val"], None)
    return from_ids(train, out, validation_ids=val, tokenizer=tokenizer, val_share=val_share, shard_tokens=shard_tokens,
                    overwrite=overwrite)  # fmt: skip


def _resolve_vocabulary(
    tokenizer: str, vocab_size: int, eot: int | None
) -> tuple[tiktoken.Encoding | None, int, int, int]:
    """Return the encoding, the vocabulary size of a model, the limit that given ids are below, and the eot id."""
    if bool(tokenizer) == bool(vocab_size):
        raise UserError(f"from_ids: tokenizer={tokenizer!r} and vocab_size={vocab_size}; pass exactly one of them: a "
                        "tokenizer has its own vocab_size")  # fmt: skip
    if tokenizer:
        encoding = tokenizers.load(tokenizer)
        if eot is not None:
            raise UserError(f"from_ids: eot={eot} and tokenizer={tokenizer!r}, whose end-of-text id is "
                            f"{encoding.eot_token}; leave eot out")  # fmt: skip
        return encoding, encoding.n_vocab, encoding.n_vocab, encoding.eot_token
    if eot is None:
        return None, vocab_size + 1, vocab_size, vocab_size
    if not 0 <= eot < vocab_size:
        raise UserError(f"from_ids: eot={eot}: not one of the ids 0..{vocab_size - 1}; leave eot out to add a new id")
    return None, vocab_size, vocab_size, eot


def _split_documents(what: str, ids, eot: int, limit: int) -> list[np.ndarray]:
    """Split ids into documents at `eot`, which is dropped. Raises: UserError naming the first invalid id."""
    stream = hasattr(ids, "__array__") or not len(ids) or isinstance(ids[0], int | np.integer)
    documents = []
    for number, array in enumerate([ids] if stream else ids):
        name, array = what if stream else f"{what}[{number}]", np.asarray(array)
        if array.ndim != 1:
            raise UserError(f"{name} has the shape {list(array.shape)}, not one dimension; pass x.reshape(-1) for one "
                            "stream of ids, or list(x) for one document per row")  # fmt: skip
        if not len(array):
            continue
        if array.dtype.kind not in "iu":
            raise UserError(f"{name} has dtype {array.dtype}; token ids must be integers")
        outside = (array < 0) | (array >= limit)
        if outside.any():
            place = int(np.argmax(outside))
            raise UserError(f"{name}[{place}] is {array[place]}: not one of the ids 0..{limit - 1} "
                            f"({int(outside.sum())} of {len(array)} are not)")  # fmt: skip
        ends = [-1, *np.flatnonzero(array == eot).tolist(), len(array)]
        documents += [array[a + 1 : b] for a, b in itertools.pairwise(ends) if b > a + 1]
    if not documents:
        raise UserError(f"{what} contains no tokens")
    return documents


def _check_weights(splits: dict[str, list[np.ndarray]], given: dict) -> dict[str, list[np.ndarray] | None]:
    """Return the target weights of each split. Raises: UserError unless every id has a weight, which is 0 or 1."""
    if any(weights is None for weights in given.values()):
        if not all(weights is None for weights in given.values()):
            raise UserError("from_ids: pass train_weights and validation_weights together, and validation_ids")
        return given
    found = {split: [np.asarray(one) for one in weights] for split, weights in given.items()}
    for split, documents in splits.items():
        lengths, others = [*map(len, documents)], [*map(len, found[split])]
        if lengths != others:
            differ = [n for n, (a, b) in enumerate(zip(lengths, others, strict=False)) if a != b]
            place = min([*differ, len(lengths), len(others)])
            raise UserError(f"from_ids: {split} has {len(lengths)} documents and {len(others)} arrays of weights, and "
                            f"their lengths differ from document {place} on; pass one weight per id")  # fmt: skip
        if any(not np.isin(one, (0, 1)).all() for one in found[split]):
            raise UserError(f"from_ids: {split} has a weight that is neither 0 nor 1")
    return found


def _hold_out(documents: list[np.ndarray], share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split documents into training and validation tokens. Validation gets the last `share` of all tokens."""
    total = sum(map(len, documents))
    left = total - max(1, round(total * share))
    if left < 1:
        raise UserError(f"train_ids has {total} tokens, and val_share={share} leaves {left} of these for training; "
                        "pass more tokens, or validation_ids")  # fmt: skip
    train = []
    for number, document in enumerate(documents):
        if left <= len(document):
            rest = [document[left:]] if left < len(document) else []
            return [*train, document[:left]], [*rest, *documents[number + 1 :]]
        train.append(document)
        left -= len(document)
    raise AssertionError("there are fewer tokens than the training split needs")


def _write_ids(
    args: Arguments, work: Folder, split: str, documents: list[np.ndarray], eot: int, vocabulary: int, encoding,
    weights: list[np.ndarray] | None,
) -> dict:  # fmt: skip
    """Write the shards of a split, and return its manifest entry."""
    cut, dtype = shards.ShardPlanner(split, args.shard_tokens), units.token_dtype(vocabulary)
    seen = np.zeros(vocabulary, bool)
    seen[eot] = True
    for number, document in enumerate(documents):
        cut.add(number, np.array([1 + len(document)]))
        seen[document] = True
    cut.close()
    prepend = lambda first, array: np.append(np.uint32(first), array.astype(np.uint32))
    concat = lambda first, arrays: np.concatenate([prepend(first, arrays[n])[a:b] for n, a, b in shard.pieces])
    rows = []
    for shard in cut.shards:
        extra = {} if weights is None else {"weights": concat(0, weights).astype(np.uint8)}
        rows.append(shards.write_shard(work, shard, concat(eot, documents).astype(dtype), eot, **extra))
    text_bytes = None
    if encoding and weights is None:  # with weights, the bytes of the targets that count are not known
        lengths = tokenizers.text_lengths(encoding)
        text_bytes = sum(int(lengths[document].sum()) for document in documents)
    return shards.totals(rows, text_bytes, int(seen.sum()))


if __name__ == "__main__":
    sys.exit(main())
