"""Train a tokenizer: `python -m data.train_tokenizer --source stdlib --vocabulary 4096 --out tokens/stdlib.bpe`."""

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tyro

from data import hf_json, shards, sources, tokenizers
from utils import UserError, exit_status, log

CHECKED_BYTES = 2**20  # encode this much text with both libraries and compare the ids


@dataclass(frozen=True)
class Arguments:
    """Train a byte-level BPE with Hugging Face's tokenizers, and write a tiktoken file.

    Use it with `python -m data.prepare --tokenizer bpe:FILE`. The same text gives the same file.
    """

    out: str  # the tiktoken file: each line is a base64 token and its rank
    source: str = "stdlib"  # as for python -m data.prepare
    vocabulary: int = 4096  # number of ids, including the 256 bytes and the end of text
    text_field: str = "text"  # field or column with the text; jsonl and parquet only
    sample_bytes: int = 2**28  # train on about this many bytes of text, spread evenly over the source

    def __post_init__(self):
        if not 257 <= self.vocabulary <= 2**22:
            raise UserError(f"vocabulary={self.vocabulary}: must be at least 257 (256 bytes and the end of text)")
        if self.sample_bytes < 1:
            raise UserError(f"sample_bytes={self.sample_bytes}: must be at least 1")


EXAMPLES = "e.g. python -m data.train_tokenizer --source stdlib --vocabulary 4096 --out tokens/stdlib.bpe"


@exit_status
def main(argv: list[str] | None = None) -> None:
    description = f"{EXAMPLES}\n\n{inspect.getdoc(Arguments)}"
    train(tyro.cli(Arguments, args=argv, prog="python -m data.train_tokenizer", description=description,
                   config=(tyro.conf.FlagCreatePairsOff,)))  # fmt: skip


def train(args: Arguments) -> None:
    """Write the file. Raises: UserError without the library, or if the text is too short for the vocabulary."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers  # an extra
    except ImportError as error:
        raise UserError(
            "training a tokenizer needs the package tokenizers; install it with: make extra-parity"
        ) from error
    library = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(tokenizers.GPT2_PATTERN), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    # The end of text gets the last id, which no text encodes to.
    trainer = trainers.BpeTrainer(vocab_size=args.vocabulary - 1, special_tokens=[], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    library.train_from_iterator(_sample(args), trainer)
    ranks = hf_json.ranks_of(json.loads(library.to_str())["model"], {})
    if len(ranks) < args.vocabulary - 1:
        raise UserError(f"{args.source!r} has too little text for {args.vocabulary} ids; use --vocabulary "
                        f"{len(ranks) + 1}, or more text")  # fmt: skip
    folder, _, name = args.out.rpartition("/")
    place = shards.Folder(folder or ".")
    place.make()
    place.write(name, lambda file: tokenizers.write_ranks(file, ranks))
    encoding, tokens, text_bytes = tokenizers.load(f"bpe:{args.out}"), 0, 0
    for text in _sample(args):
        ids = tokenizers.encode(encoding, text.encode())
        tokens, text_bytes = tokens + len(ids), text_bytes + len(text.encode())
        if not np.array_equal(ids, library.encode(text).ids):
            place.remove(name)
            raise AssertionError(f"tiktoken and the library differ on {text[:200]!r}: please report it")
        if text_bytes > CHECKED_BYTES:
            break
    log(f"{args.out}: {encoding.n_vocab} ids, {text_bytes / max(tokens, 1):.2f} bytes per token; {tokens:,} tokens "
        "match those of Hugging Face's tokenizers")  # fmt: skip


def _sample(args: Arguments) -> Iterator[str]:
    """Yield the texts of every n-th unit of the source. Invalid UTF-8 becomes U+FFFD."""
    units = sources.make_units(args.source)
    files = {part.file for unit in units for part in unit}
    every = -(-sum(file.size for file in files) // args.sample_bytes)
    for unit in units[::every]:
        for part in unit:
            for document in sources.read_part(part, args.text_field):
                yield document.text.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
