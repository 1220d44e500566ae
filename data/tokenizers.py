"""Load a tokenizer by name: `bytes`, a published tiktoken encoding, or a file in one of three formats."""

import base64
import hashlib
import io
import json
import re
from itertools import pairwise

import numpy as np
import tiktoken

from data import files, hf_json, sp_model
from utils import UserError

Encoding = tiktoken.Encoding | sp_model.SentencePiece
END_OF_TEXT = "<|endoftext|>"  # the token before each document
UNKNOWN = "unknown"  # name in the manifest if `prepare.from_ids` got no tokenizer
TIKTOKEN_NAMES = ("gpt2", "cl100k_base", "o200k_base")  # tiktoken downloads their files once
LONG_SPACE = re.compile(r"\s{65536}")
FETCH_SECONDS = 15  # timeout for downloading a tiktoken file
# Splits text before merging. Source: GPT-2, encoder.py, `self.pat`. Plain +, which every BPE trainer supports.
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def load(name: str) -> Encoding:
    """Return the encoding called bytes, gpt2, cl100k_base, o200k_base, bpe:FILE, json:FILE or sp:FILE.

    Raises: UserError for an unknown name, a file that is not a tokenizer, or a download that fails or takes too long.
    """
    if name == "bytes":
        return _encoding(name, {bytes([byte]): byte for byte in range(256)}, pattern=r"(?s:.+)")
    if name.startswith("bpe:"):
        return _encoding(name, _read_ranks(name.removeprefix("bpe:")), GPT2_PATTERN)
    if name.startswith("json:"):
        return hf_json.load(name.removeprefix("json:"), END_OF_TEXT, GPT2_PATTERN)
    if name.startswith("sp:"):
        return sp_model.load(name.removeprefix("sp:"))
    if name.endswith(".model"):
        raise UserError(f"unknown tokenizer {name!r}; for a SentencePiece model, use sp:{name}")
    if name in TIKTOKEN_NAMES:
        return _fetch(name)
    if name == UNKNOWN:
        raise UserError("these tokens have no known tokenizer (data.prepare.from_ids was called without "
                        "tokenizer=...), so text cannot be encoded or decoded")  # fmt: skip
    raise UserError(
        f"unknown tokenizer {name!r}; use bytes, {', '.join(TIKTOKEN_NAMES)}, bpe:FILE, json:FILE or sp:FILE"
    )


def is_file(name: str) -> bool:
    """Return whether a tokenizer is read from a file, which may change."""
    return name.startswith(("bpe:", "json:", "sp:"))


def from_manifest(manifest: dict) -> Encoding | None:
    """Return the encoding of a directory of tokens, or None if its tokenizer is unknown.

    Raises: as `load`, and UserError if the tokenizer's file has changed since.
    """
    name = manifest["tokenizer"]["name"]
    if name == UNKNOWN:
        return None
    encoding = load(name)
    if is_file(name) and fingerprint(encoding) != manifest["tokenizer"]["fingerprint"]:
        raise UserError(f"tokenizer {name!r} has changed since the tokens were prepared, so their ids no longer match "
                        "it; restore the file, or regenerate the tokens")  # fmt: skip
    return encoding


def text_lengths(encoding: Encoding) -> np.ndarray:
    """Return the number of text bytes per id; 0 for the end of text and other special tokens."""
    if isinstance(encoding, sp_model.SentencePiece):
        return encoding.lengths
    lengths = np.zeros(encoding.n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def unused_ids(encoding: Encoding) -> list[int]:
    """Return the ids below n_vocab without a token, which cannot be decoded: 16 in cl100k_base, such as 100256."""
    if isinstance(encoding, sp_model.SentencePiece):
        return []  # SentencePiece decodes unused ids to nothing
    used = {*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()}
    return [id for id in range(encoding.n_vocab) if id not in used]


def encode(encoding: Encoding, text: bytes) -> np.ndarray:
    """Encode UTF-8 into token ids; END_OF_TEXT inside the text is treated as text.

    With `bytes`, any bytes map to themselves. Other encodings split runs of spaces too long for tiktoken first.
    Raises: UnicodeDecodeError for text that is not UTF-8, except with `bytes`.
    """
    if encoding.name == "bytes":
        return np.frombuffer(text, np.uint8)  # the same as encode_ordinary for valid UTF-8, without its regex
    string = text.decode()
    try:
        return encoding.encode_to_numpy(string, disallowed_special=())
    except ValueError:  # a long run of spaces overflows the stack of tiktoken's regex
        ends = [0, *(match.end() for match in LONG_SPACE.finditer(string)), len(string)]
        return np.concatenate([encoding.encode_to_numpy(string[a:b], disallowed_special=()) for a, b in pairwise(ends)])


def fingerprint(encoding: Encoding) -> str:
    """Return the sha256 of everything that affects the ids: ranks, pattern and special tokens, but not the name."""
    if isinstance(encoding, sp_model.SentencePiece):
        return encoding.fingerprint
    digest = hashlib.sha256()
    ranks = io.BytesIO()
    write_ranks(ranks, encoding._mergeable_ranks)
    digest.update(ranks.getvalue())
    digest.update(json.dumps([encoding._pat_str, sorted(encoding._special_tokens.items())]).encode())
    return digest.hexdigest()


def _encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    """Make an encoding. Its end of text is END_OF_TEXT if `ranks` lists it, else a new last id."""
    end = ranks.pop(END_OF_TEXT.encode(), len(ranks))
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end})


def _read_ranks(path: str) -> dict[bytes, int]:
    """Read a tiktoken file. Each line is base64 token, space, rank; ranks are 0..n-1, and every single byte has one."""
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"tokenizer 'bpe:{path}': {error.strerror}; `python -m data.train_tokenizer --out FILE` writes "
                        "such a file") from error  # fmt: skip
    ranks = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a base64 token, a space and a rank: {line[:60]!r}") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"{path}: {len(missing)} of the 256 single bytes have no rank (first: {missing[0]}); add them")
    if sorted(ranks.values()) != list(range(len(lines))):
        raise UserError(f"{path}: the ranks of its {len(lines)} lines must be 0..{len(lines) - 1}, each once")
    return ranks


def write_ranks(file, ranks: dict[bytes, int]) -> None:
    """Write a tiktoken file for `_read_ranks`."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        file.write(base64.b64encode(token) + b" %d\n" % rank)


def _fetch(name: str) -> tiktoken.Encoding:
    """Let tiktoken load or download an encoding within FETCH_SECONDS; it has no time limit itself."""
    try:
        return files.wait_at_most(FETCH_SECONDS, lambda: tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # no network, no answer, or a file with the wrong hash
        if isinstance(error, TimeoutError):
            reason = f"timed out after {FETCH_SECONDS} s"
        else:  # the text of an OSError is long, and about urllib
            reason = type(error).__name__ if isinstance(error, OSError) else "the file has the wrong hash"
        raise UserError(
            f"tokenizer {name!r} could not be downloaded ({reason}); use --tokenizer bytes or bpe:FILE, or run the "
            f"same command on a machine with a network and set TIKTOKEN_CACHE_DIR to a copy of its cache folder"
        ) from error
