"""Measure the data pipeline: reading batches, packing documents, and tokenizing.

`python -m bench.data` writes random tokens and reads batches of 512 x 1,024, the size that `dense_124m` could use;
`--data.path` reads your own directory or bucket instead. The baseline copies the same number of scattered sequences
from a memory-mapped file into int32 inputs and targets, without a reproducible order, segments, positions or weights.

A thread prefetches batches, so a step waits less than the time that reading a batch takes. The benchmark measures this
wait in a loop whose steps sleep for the time that the planner predicts for a chip at its peak, a lower bound for a real
step.

With `--data.packing documents`, a run packs whole documents into sequences when it starts. The benchmark packs a
million documents whose lengths are distributed like those of the random tokens.

Tokenizing reads Python's standard library several times, with a vocabulary of its 4,000 most frequent words. The
baseline is tiktoken alone. The unit is CPU seconds of all processes, so other load on the machine does not count.
"""

import base64
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

import dataset
from config import Config, preset, replace
from config.flags import command_line
from data import prepare, sources, tokenizers
from data.reading import packing
from utils import UserError, exit_status

TOKENS = 20_000_000
DOCUMENTS = 1_000_000  # documents to pack
DOCUMENT_TOKENS = 500  # average length of a document
DEFAULT = preset("dense_124m", **{"data.path": "", "data.batch_size": 512})


@dataclass(frozen=True)
class Arguments(Config):
    topology: str = "h100:1"  # the chip whose step time is the reference
    batches: int = 20  # batches to time, after one warm-up batch
    text_mib: int = 160  # MiB of text to tokenize; 0: none
    json: bool = False  # print one line of JSON instead of a table


HELP = """e.g. python -m bench.data --data.batch_size 512
     python -m bench.data laptop --data.path tokens/stdlib-bytes

Time reading batches, compared with plain slices of a memory-mapped file, and tokenizing, compared with tiktoken."""


def parse(argv: list[str]) -> tuple[Config, Arguments]:
    """Parse `[PRESET | --config FILE] [--flags]`; the preset or the file sets the defaults of the flags."""
    cfg, args = command_line(argv, "python -m bench.data", HELP, DEFAULT, Arguments)
    if args.batches < 1:
        raise UserError(f"--batches {args.batches}: must be at least 1")
    if args.text_mib < 0:
        raise UserError(f"--text_mib {args.text_mib}: must be at least 0")
    return cfg, args


def random_tokens(cfg: Config, folder: str) -> Config:
    """Write random ids, in documents of DOCUMENT_TOKENS on average; returns settings that read them."""
    vocabulary = cfg.model.vocab_size - 1
    ids = np.random.default_rng(0).integers(vocabulary, size=TOKENS)
    ids = np.where(np.random.default_rng(1).random(TOKENS) < 1 / DOCUMENT_TOKENS, vocabulary - 1, ids)
    with contextlib.redirect_stdout(sys.stderr):
        prepare.from_ids(ids, folder, vocab_size=vocabulary, eot=vocabulary - 1, overwrite=True)
    return replace(cfg, **{"data.path": folder})


def time_tokenizing(folder: str, text_mib: int) -> dict:
    """Measure CPU seconds of tiktoken alone, and of `data.prepare` with one process per core, on the same text."""
    library = b"".join(document.text for document in sources.read_documents("stdlib"))
    words = [word for word, _ in Counter(library.split()).most_common(4000)]
    prefixes = {(b" " + word)[:length] for word in words for length in range(2, len(word) + 2)}
    ranks = [bytes([byte]) for byte in range(256)] + sorted(prefixes, key=lambda token: (len(token), token))
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    with open(os.path.join(folder, "ranks.bpe"), "wb") as file:
        file.writelines(lines)
    text = (library * (1 + text_mib * 2**20 // len(library)))[: text_mib * 2**20].decode(errors="ignore").encode()
    pieces = [text[start : start + 2**20].decode(errors="ignore").encode() for start in range(0, len(text), 2**20)]
    os.mkdir(os.path.join(folder, "text"))
    for number, piece in enumerate(pieces):
        with open(os.path.join(folder, "text", f"{number:05}.txt"), "wb") as file:
            file.write(piece)
    encoding = tokenizers.load(f"bpe:{folder}/ranks.bpe")
    begin = time.process_time()
    tokens = sum(len(encoding.encode_to_numpy(piece.decode(), disallowed_special=())) for piece in pieces)
    alone_s = time.process_time() - begin
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "data.prepare", "--source", f"text:{folder}/text", "--workers", "0",
               "--tokenizer", f"bpe:{folder}/ranks.bpe", "--out", f"{folder}/tokens"]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=os.path.dirname(os.path.dirname(__file__)))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    prepare_s = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return {"made": tokens, "alone_s": alone_s, "prepare_s": prepare_s, "prepare_wall_s": time.perf_counter() - wall}


def average_seconds(work, count: int) -> float:
    """Return the average seconds of `count` calls, after one warm-up call."""
    work(0)
    begin = time.perf_counter()
    for number in range(1, count + 1):
        work(number)
    return (time.perf_counter() - begin) / count


def plain_slices_reader(cfg: Config):
    """Return fn(step) -> inputs and targets of a batch from plain slices; None if no shard is memory-mapped."""
    split, T, B = dataset.open_corpus(cfg).splits["train"], cfg.data.seq_len, cfg.data.batch_size
    flat = max(split.shards, key=len)
    if not isinstance(flat, np.ndarray):
        return None
    windows = np.random.default_rng(0).permutation((len(flat) - 1) // T)

    def read(step: int):
        chosen = windows[np.arange(step * B, step * B + B) % len(windows)]
        rows = np.stack([flat[w * T : w * T + T + 1] for w in chosen.tolist()])
        return rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)

    return read


def exposed_seconds(cfg: Config, step_s: float, count: int) -> float:
    """Return the average seconds that a step of `step_s` seconds waits for its batch."""
    ahead, total = dataset.prefetch(cfg, 0), 0.0
    for number in range(count + 1):
        begin = time.perf_counter()
        next(ahead)
        total += (time.perf_counter() - begin) * (number > 0)
        time.sleep(step_s)
    ahead.close()
    return total / count


def measure(cfg: Config, args: Arguments) -> dict:
    from plan import planner

    step_s = planner.plan(cfg, args.topology).step_s
    batch_s = average_seconds(lambda step: dataset.batch(cfg, step), args.batches)
    plain = plain_slices_reader(cfg)
    edges = np.append(0, np.cumsum(np.random.default_rng(2).geometric(1 / DOCUMENT_TOKENS, DOCUMENTS)))
    return {
        "tokens": cfg.data.tokens_per_step,
        "batch_s": batch_s,
        "slices_s": average_seconds(plain, args.batches) if plain else None,
        "step_s": step_s,
        "packed_s": average_seconds(lambda _: packing.pack(edges, cfg.data.seq_len), 3),
        "waited_s": exposed_seconds(cfg, step_s, min(args.batches, 10)),
    }


def tokenizing_table(found: dict) -> str:
    rate = lambda s: f"{s:8.2f} s   {found['made'] / s / 1e6:8.2f} M tokens/s of a core"
    share, cores = found["alone_s"] / found["prepare_s"], found["prepare_s"] / found["prepare_wall_s"]
    return (
        f"{found['made']:,} tokens from text, in CPU seconds\n{'tiktoken alone':34} {rate(found['alone_s'])}\n"
        f"{'data.prepare, complete':34} {rate(found['prepare_s'])}, {share:.2f} x tiktoken; {cores:.1f} cores busy"
    )


def table(found: dict, args: Arguments) -> str:
    row = lambda what, s: f"{what:34} {1e3 * s:8.2f} ms  {found['tokens'] / s / 1e6:8.1f} M tokens/s"
    lines = [f"batches of {found['tokens']:,} tokens, in one thread", row("dataset.batch", found["batch_s"])]
    if found["slices_s"]:
        lines += [row("plain slices of a mapped file", found["slices_s"])]
    return "\n".join([
        *lines, row(f"a step on {args.topology}, at its peak", found["step_s"]),
        f"a batch takes {found['batch_s'] / found['step_s']:.1%} of a step; with prefetching, a step waits "
        f"{1e3 * found['waited_s']:.2f} ms, {found['waited_s'] / found['step_s']:.2%}",
        f"{DOCUMENTS:,} documents packed in {found['packed_s']:.2f} s, once, when a run starts"])  # fmt: skip


@exit_status
def main(argv: list[str] | None = None) -> None:
    cfg, args = parse(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(cfg if cfg.data.path else random_tokens(cfg, os.path.join(folder, "random")), args)
        found |= time_tokenizing(folder, args.text_mib) if args.text_mib else {}
    if args.json:
        print(json.dumps(found))
    else:
        print(table(found, args), *([tokenizing_table(found)] if args.text_mib else []), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
