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
from data import engine, files, progress, shards, sources, tokenizers, units
from data.shards import Folder, UnitFile
from data.sources import Part, Unit
from data.units import Job
from devices import log
from errors import UserError, exit_status

COUNTED_TOKENS = 2**24  # most tokens behind unigram_nats and bigram_nats: bounds the memory of counting pairs
UNFINISHED = ".unfinished-"  # how the folder begins that holds the work until it is done


@dataclass(frozen=True)
class Arguments:
    """Turn text into token shards, for training (train) and for validation (val).

    A document is a file of text, or a row of jsonl or parquet; a hash of its name says which of the two it is for.

    If that leaves one of them without text, as with a single file, the tail of every document is held out instead.

    Run again with the same arguments, it finds the work done and does nothing; after a kill, what is left of it.
    """

    out: str  # directory for the shards and manifest.json
    source: str = "stdlib"  # stdlib (this Python's own library); text:, jsonl: or parquet: and a GLOB; hf:NAME[:CONFIG]
    tokenizer: str = "bytes"  # bytes, gpt2, cl100k_base, o200k_base, or a file: bpe: (ranks), json: (Hugging Face), sp:
    text_field: str = "text"  # field or column that holds the text; jsonl and parquet only
    val_share: float = 0.05  # share of the documents, or of each one's bytes, held out for validation; between 0 and 1
    shard_tokens: int = 2**25  # most tokens in one shard; twice a shard is held in memory
    overwrite: bool = False  # replace the tokens that --out holds
    workers: int = 1  # processes that tokenize; 0: one for each core; the tokens are the same
    engine: Literal["processes", "ray"] = "processes"  # ray: a Ray cluster, whose hosts all see --source and --out
    ray_address: str = "auto"  # of the cluster; auto: the one that this machine is part of

    def __post_init__(self):
        if not 0 < self.val_share < 1:
            raise UserError(f"val_share={self.val_share}: must lie between 0 and 1")
        if not 1 <= self.shard_tokens <= 2**32:  # places in a shard are kept in 32 bits
            raise UserError(f"shard_tokens={self.shard_tokens}: must be at least 1, and at most 2**32")
        if self.workers < 0:
            raise UserError(f"workers={self.workers}: must be 0, for every core, or more")

    @property
    def manifest_arguments(self) -> dict:
        """What decides the tokens, as the manifest keeps it."""
        how = ("out", "overwrite", "workers", "engine", "ray_address")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in how}


EXAMPLES = """\
e.g. python -m data.prepare --source stdlib --tokenizer bytes --out tokens/stdlib-bytes
     python -m data.prepare --source 'jsonl:mine/*.jsonl' --tokenizer gpt2 --out tokens/mine-gpt2"""


@exit_status
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if sum(word.partition("=")[0] == "--source" for word in words) > 1:
        raise UserError("--source is given more than once; one pattern names many files, as 'text:mine/*.txt'")
    description = f"{EXAMPLES}\n\n{inspect.getdoc(Arguments)}"
    prepare(tyro.cli(Arguments, args=argv, prog="python -m data.prepare", description=description,
                     config=(tyro.conf.FlagCreatePairsOff,)))  # fmt: skip


def prepare(args: Arguments) -> dict:
    """Make the token shards in args.out, unless they are there, and return their manifest."""
    out = Folder(args.out)
    if out.size(dataset.MANIFEST) is not None and not args.overwrite:
        manifest = _check_existing(args)
        _remove_work(out)  # of a run that was killed when all was in place
        log(f"{_display_name(args.out)} is complete: {_summary(manifest)}; --overwrite makes it again")
        return manifest
    encoding = tokenizers.load(args.tokenizer)
    with _work_folder(out) as work:
        job = Job(work, encoding, args.text_field, args.val_share, tails=False)
        cut = sources.make_units(args.source, functools.partial(_split_file_once, work))
        manifest = _publish(out, work, {
            "format": dataset.FORMAT,
            "arguments": args.manifest_arguments,
            "sources": [{"source": args.source, "weight": 1.0}],
            "tokenizer": {"name": args.tokenizer, "fingerprint": job.fingerprint,
                          "vocabulary": encoding.n_vocab, "eot": encoding.eot_token},
            "dtype": job.dtype.name,
            **_write_shards(args, job, cut),
        })  # fmt: skip
    log(f"{_display_name(args.out)}: {_summary(manifest)}")
    return manifest


def _display_name(out: str) -> str:
    """What to call a directory in a line of output: as it was given, but of an absolute path the last part."""
    return os.path.basename(os.path.normpath(out)) if os.path.isabs(out) else out


# What is done, and what is not ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _work_folder(out: Folder) -> Iterator[Folder]:
    """Give a folder in the directory for what is not finished.

    What is done when a run fails or is killed stays there, and the next run of the same command goes on from it; if
    nothing is, the directory is as before.
    """
    path = Path(out.path)
    missing = [one for one in (path, *path.parents) if not one.exists()] if out.is_local else []  # the innermost first
    work = out.subfolder(UNFINISHED + "units")
    work.make()
    try:
        with shards.lock_folder(work):
            for name in work.file_names():
                if name.endswith(".part"):  # of a process that was killed
                    work.remove(name)
            yield work
        _remove_work(out)
    except BaseException:
        kept = sum(name.startswith("unit-") for name in work.file_names())
        if kept:
            log(f"{kept} units are kept in {work.path}: the same command goes on from there")
        else:
            _remove_work(out)
            for path in missing:
                with contextlib.suppress(OSError):
                    path.rmdir()
        raise


def _remove_work(out: Folder) -> None:
    out.subfolder(UNFINISHED + "units").clear()
    for path in glob.glob(os.path.join(glob.escape(out.path), UNFINISHED + "*")) if out.is_local else ():
        shutil.rmtree(path)


def _publish(out: Folder, work: Folder, manifest: dict) -> dict:
    """Put the shards in their place, and remove what an earlier run wrote there, no other files.

    The manifest, with what is measured on the shards, comes last: a directory that holds one is complete. Returns it.
    """
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
    """Return the manifest of a directory that is complete and was made from the same arguments."""
    manifest = dataset.load(args.out).manifest
    recorded = dict(manifest["arguments"], fingerprint=manifest["tokenizer"]["fingerprint"])
    asked = dict(args.manifest_arguments, fingerprint=recorded["fingerprint"])
    if tokenizers.is_file(args.tokenizer):  # the file behind the name may have changed
        asked["fingerprint"] = tokenizers.fingerprint(tokenizers.load(args.tokenizer))
    if difference := first_difference(asked, recorded):
        raise UserError(f"{args.out} holds other tokens: {difference}; choose another --out, or --overwrite them")
    return manifest


# Text to shards -------------------------------------------------------------------------------------------------------


def _split_file_once(work: Folder, kind: str, file: files.File, unit_bytes: int) -> list[Part]:
    """Cut a large file, which reads it once; remember where."""
    name = "parts-" + hashlib.sha256(json.dumps([kind, file, unit_bytes]).encode()).hexdigest()[:20]
    if work.size(name) is None:
        cut = lambda: sources.split_file(kind, file, unit_bytes)
        found = [part[2:] for part in files.call_patiently(file.path, is_remote(file.path), cut)]
        work.write(name, lambda out: out.write(json.dumps(found).encode()))
    return [Part(kind, file, *rest) for rest in json.loads(work.read(name))]


def _write_shards(args: Arguments, job: Job, cut: list[Unit]) -> dict:
    """Tokenize every document into the shards of its split, and return what the manifest says of them.

    Whole documents are held out; where that leaves a split without text, the tail of each document is.
    """
    tails = dataclasses.replace(job, tails=True)
    known = {one.name(unit) for one in (job, tails) for unit in cut}
    for name in job.folder.file_names():
        if name.startswith("unit-") and name not in known:  # of another source or tokenizer
            job.folder.remove(name)
    made, total = _tokenize(args, job, cut)
    text_bytes, documents = (sum(total[what].values()) for what in ("text_bytes", "documents"))
    if not text_bytes:
        job.folder.clear()
        raise UserError(f"{args.source!r} holds no text: 0 bytes in {documents} documents")
    if without := _split_without_text(total):
        log(f"note: by name, none of the text of {documents} documents falls into {without!r} at --val-share "
            f"{args.val_share}; the tail of each is held out instead")  # fmt: skip
        job = tails
        made, total = _tokenize(args, job, cut)
        if without := _split_without_text(total):
            job.folder.clear()
            raise UserError(f"{args.source!r} holds {text_bytes} bytes of text in {documents} documents: too few to "
                            f"leave one for {without!r} at --val-share {args.val_share}")  # fmt: skip
    if total["odd"]:
        log(f"note: {total['odd']} of {documents} documents are not UTF-8, first {total['first_odd']!r}; their bytes "
            "stay as they are")  # fmt: skip
    return _assemble(args, job, cut, made, total["text_bytes"])


def _split_without_text(total: dict) -> str | None:
    return next((split for split, count in total["text_bytes"].items() if not count), None)


def _tokenize(args: Arguments, job: Job, cut: list[Unit]) -> tuple[list[UnitFile], dict]:
    """Tokenize the units that are not done. Return all, in order, and sums over them."""
    there, names = set(job.folder.file_names()), [job.name(unit) for unit in cut]
    found = {name: shards.open_complete_unit(job.folder, name, job.dtype) for name in names if name in there}
    todo = [(name, unit) for name, unit in zip(names, cut, strict=True) if not found.get(name)]
    results = _run_tasks(args, units.tokenize, job, todo, len(todo))
    with progress.show_progress("tokenizing", len(cut), len(cut) - len(todo)) as advance:
        for head in results:
            advance(head and sum(head.tokens.values()))
    sums = ("documents", "tokens", "text_bytes")
    total = {what: dict.fromkeys(shards.SPLITS, 0) for what in sums} | {"odd": 0, "first_odd": ""}
    made = [found.get(name) or UnitFile(job.folder, name, job.dtype) for name in names]
    for one in made:
        for what in sums:
            for split, count in getattr(one.head, what).items():
                total[what][split] += count
        total["odd"] += one.head.odd
        total["first_odd"] = total["first_odd"] or one.head.first_odd
    return made, total


def _run_tasks(args: Arguments, work: Callable, job: Job, todo: list, most_workers: int) -> Iterator:
    workers = min(args.workers or os.cpu_count() or 1, most_workers)
    return engine.run(work, job, todo, workers, args.engine, args.ray_address)


def _assemble(args: Arguments, job: Job, cut: list[Unit], made: list[UnitFile], text_bytes: dict[str, int]) -> dict:
    """Write the shards that are not done, and return what the manifest says of all."""
    cuts, rows = {split: shards.ShardPlanner(split, args.shard_tokens) for split in shards.SPLITS}, []
    for unit, file in zip(cut, made, strict=True):
        for split in shards.SPLITS:
            cuts[split].add(file.name, file.lengths(split))
        rows.append({"first": unit[0].file.name, "start": unit[0].start, "parts": len(unit)} | file.head.tokens)
    for one in cuts.values():
        one.close()
    every = [shard for one in cuts.values() for shard in one.shards]
    done = {shard.file: found for shard in every if (found := units.read_finished_shard(job, shard))}
    todo = [shard for shard in every if shard.file not in done]
    # Starting a process takes as long as writing a few shards.
    results = _run_tasks(args, units.assemble, job, todo, len(todo) // 4)
    with progress.show_progress("shards", len(every), len(done)) as advance:
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
    """Read as many tokens of the train split as `entropies` counts."""
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
    """Measure H(x) and H(x_t | x_t-1) of a stream, in nats per token, from counts: what a model must beat.

    Source: H(x_t | x_t-1) = H(x_t-1, x_t) - H(x_t-1), the chain rule.
    """
    number = np.uint32 if vocabulary**2 <= 2**32 else np.int64  # sorting the shorter takes half the time
    pairs = tokens[:-1].astype(number) * number(vocabulary) + tokens[1:]
    return {
        "counted_tokens": len(tokens),
        "unigram_nats": _entropy_nats(tokens),
        "bigram_nats": _entropy_nats(pairs) - _entropy_nats(tokens[:-1]),
    }


def _entropy_nats(values: np.ndarray) -> float:
    few = values.max() < len(values)  # then a table of all costs less than to sort them
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
    """Make a directory for --data.path from token ids that are already there, and return its manifest.

    >>> import numpy as np
    >>> from data.prepare import from_ids
    >>> ids = np.random.default_rng(0).integers(0, 50, 10_000)  # or a list of arrays, one a document
    >>> manifest = from_ids(ids, "tokens/mine", vocab_size=50)
    tokens/mine: train 9,501 tokens in 1 documents, val 501 tokens in 1 documents, vocabulary 51 (uint16)

    Then `python main.py laptop --data.path tokens/mine --run.name mine`.

    train_ids       integers: one array of all, or a list of arrays, one a document
    vocab_size      ids are 0 .. vocab_size - 1; either this, or
    tokenizer       whose ids they are, a name as for `tokenizers.load`; without one, bits per byte are not known, and
                    a run draws no sample of text
    validation_ids  like train_ids; None: the last `val_share` of the tokens, a document being cut where they begin
    eot             the id between documents, wherever it stands; None: the tokenizer's, or a new one, vocab_size
    train_weights   of documents, a list of arrays like train_ids: 1 where an id counts as a target in the loss, else 0,
                    as on a prompt; the id between documents counts 0. None: all count. validation_weights alike
    Raises: UserError for anything else than such ids, or if `out` is there and not to be overwritten.
    """
    encoding, vocabulary, limit, end = _vocabulary(tokenizer, vocab_size, eot)
    args = Arguments(out, "ids", tokenizer or tokenizers.UNKNOWN, "", val_share, shard_tokens)  # it checks the last two
    splits = {"train": _split_documents("train_ids", train_ids, end, limit)}
    if validation_ids is not None:
        splits["val"] = _split_documents("validation_ids", validation_ids, end, limit)
    else:
        splits["train"], splits["val"] = _hold_out(splits["train"], val_share)
    weights = _check_weights(splits, {"train": train_weights, "val": validation_weights})
    if os.path.lexists(out) and not (os.path.isdir(out) and (overwrite or not os.listdir(out))):
        raise UserError(f"{out} is there already; choose another directory, or overwrite=True to replace its tokens")
    place = Folder(out)
    with _work_folder(place) as work:
        manifest = _publish(place, work, {
            "format": dataset.FORMAT,
            "arguments": args.manifest_arguments,
            "sources": [{"source": args.source, "weight": 1.0}],
            "tokenizer": {"name": args.tokenizer, "fingerprint": encoding and tokenizers.fingerprint(encoding),
                          "vocabulary": vocabulary, "eot": end},
            "dtype": units.token_dtype(vocabulary).name,
            "splits": {name: _write_ids(args, work, name, documents, end, vocabulary, encoding, weights[name])
                       for name, documents in splits.items()},
        })  # fmt: skip
    log(f"{_display_name(out)}: {_summary(manifest)}")
    return manifest


def _vocabulary(tokenizer: str, vocab_size: int, eot: int | None) -> tuple[tiktoken.Encoding | None, int, int, int]:
    """Return the encoding, how many ids a model needs, how many of them may be given, the one between documents."""
    if bool(tokenizer) == bool(vocab_size):
        raise UserError(f"from_ids: tokenizer={tokenizer!r} and vocab_size={vocab_size}; give one of them: a tokenizer "
                        "says how many ids it has")  # fmt: skip
    if tokenizer:
        encoding = tokenizers.load(tokenizer)
        if eot is not None:
            raise UserError(f"from_ids: eot={eot} and tokenizer={tokenizer!r}, whose own is {encoding.eot_token}; "
                            "leave eot out")  # fmt: skip
        return encoding, encoding.n_vocab, encoding.n_vocab, encoding.eot_token
    if eot is None:
        return None, vocab_size + 1, vocab_size, vocab_size
    if not 0 <= eot < vocab_size:
        raise UserError(f"from_ids: eot={eot}: not one of the ids 0..{vocab_size - 1}; leave it out for a new one")
    return None, vocab_size, vocab_size, eot


def _split_documents(what: str, ids, eot: int, limit: int) -> list[np.ndarray]:
    """Cut ids into documents, without the ids between them. Raises: UserError for what is no token id, and where."""
    stream = hasattr(ids, "__array__") or not len(ids) or isinstance(ids[0], int | np.integer)
    documents = []
    for number, array in enumerate([ids] if stream else ids):
        name, array = what if stream else f"{what}[{number}]", np.asarray(array)
        if array.ndim != 1:
            raise UserError(f"{name} has the shape {list(array.shape)}: one array is a stream of ids, x.reshape(-1); a "
                            "list of arrays is a list of documents, list(x)")  # fmt: skip
        if not len(array):
            continue
        if array.dtype.kind not in "iu":
            raise UserError(f"{name} holds {array.dtype}, token ids are integers")
        outside = (array < 0) | (array >= limit)
        if outside.any():
            place = int(np.argmax(outside))
            raise UserError(f"{name}[{place}] is {array[place]}: not one of the ids 0..{limit - 1} "
                            f"({int(outside.sum())} of {len(array)} are not)")  # fmt: skip
        ends = [-1, *np.flatnonzero(array == eot).tolist(), len(array)]
        documents += [array[a + 1 : b] for a, b in itertools.pairwise(ends) if b > a + 1]
    if not documents:
        raise UserError(f"{what} holds no token")
    return documents


def _check_weights(splits: dict[str, list[np.ndarray]], given: dict) -> dict[str, list[np.ndarray] | None]:
    """Weights of the targets of each split. Raises: UserError unless each is a 0 or 1 of an id, in both splits."""
    if any(weights is None for weights in given.values()):
        if not all(weights is None for weights in given.values()):
            raise UserError("from_ids: train_weights and validation_weights go together, with validation_ids")
        return given
    found = {split: [np.asarray(one) for one in weights] for split, weights in given.items()}
    for split, documents in splits.items():
        lengths, others = [*map(len, documents)], [*map(len, found[split])]
        if lengths != others:
            differ = [n for n, (a, b) in enumerate(zip(lengths, others, strict=False)) if a != b]
            place = min([*differ, len(lengths), len(others)])
            raise UserError(f"from_ids: {len(lengths)} documents of {split}, {len(others)} arrays of weights: they "
                            f"differ in length from document {place} on; give each id one")  # fmt: skip
        if any(not np.isin(one, (0, 1)).all() for one in found[split]):
            raise UserError(f"from_ids: a weight of {split} is neither 0 nor 1")
    return found


def _hold_out(documents: list[np.ndarray], share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split documents into the first tokens, and the last `share` of them, at least one."""
    total = sum(map(len, documents))
    left = total - max(1, round(total * share))
    if left < 1:
        raise UserError(f"train_ids holds {total} tokens, and val_share={share} leaves {left} of them to train on; "
                        "give more, or validation_ids")  # fmt: skip
    train = []
    for number, document in enumerate(documents):
        if left <= len(document):
            rest = [document[left:]] if left < len(document) else []
            return [*train, document[:left]], [*rest, *documents[number + 1 :]]
        train.append(document)
        left -= len(document)
    raise AssertionError("more tokens were to be kept than there are")


def _write_ids(
    args: Arguments, work: Folder, split: str, documents: list[np.ndarray], eot: int, vocabulary: int, encoding,
    weights: list[np.ndarray] | None,
) -> dict:  # fmt: skip
    """Write the shards of a split, and return its part of the manifest."""
    cut, dtype, seen = (
        shards.ShardPlanner(split, args.shard_tokens),
        units.token_dtype(vocabulary),
        np.zeros(vocabulary, bool),
    )
    seen[eot] = True
    for number, document in enumerate(documents):
        cut.add(number, np.array([1 + len(document)]))
        seen[document] = True
    cut.close()
    behind = lambda first, array: np.append(np.uint32(first), array.astype(np.uint32))
    joined = lambda first, arrays: np.concatenate([behind(first, arrays[n])[a:b] for n, a, b in shard.pieces])
    rows = []
    for shard in cut.shards:
        beside = {} if weights is None else {"weights": joined(0, weights).astype(np.uint8)}
        rows.append(shards.write_shard(work, shard, joined(eot, documents).astype(dtype), eot, **beside))
    text_bytes = None
    if encoding and weights is None:  # else of the targets that count nobody knows
        lengths = tokenizers.text_lengths(encoding)
        text_bytes = sum(int(lengths[document].sum()) for document in documents)
    return shards.totals(rows, text_bytes, int(seen.sum()))


if __name__ == "__main__":
    sys.exit(main())
