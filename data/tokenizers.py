"""Tokenizers by name: the 256 bytes, tiktoken's published encodings, or a file of one of three kinds."""

import base64
import hashlib
import io
import json
import re
import threading
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import tiktoken

from data import hf_json, sp_model
from errors import UserError

Encoding = tiktoken.Encoding | sp_model.SentencePiece
END_OF_TEXT = "<|endoftext|>"  # the token before each document
UNKNOWN = "unknown"  # what a manifest says of ids that came without a tokenizer: `prepare.from_ids`
TIKTOKEN_NAMES = ("gpt2", "cl100k_base", "o200k_base")  # tiktoken fetches their rank files once
LONG_SPACE = re.compile(r"\s{65536}")
FETCH_SECONDS = 15  # longest wait for such a file
# How text is cut before merging. Source: GPT-2, encoder.py, `self.pat`. Plain +, which every BPE trainer understands.
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def load(name: str) -> Encoding:
    """Return the encoding called bytes, gpt2, cl100k_base, o200k_base, bpe:FILE, json:FILE or sp:FILE.

    Raises: UserError for an unknown name, a file that is no tokenizer, or a download that fails or takes too long.
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
        raise UserError(f"no tokenizer is called {name!r}; a SentencePiece model is sp:{name}")
    if name in TIKTOKEN_NAMES:
        return _fetch(name)
    if name == UNKNOWN:
        raise UserError("these tokens were given as ids of no known tokenizer (data.prepare.from_ids without "
                        "tokenizer=...): no text can be turned into them, or made of them")  # fmt: skip
    raise UserError(
        f"no tokenizer is called {name!r}; use bytes, {', '.join(TIKTOKEN_NAMES)}, bpe:FILE, json:FILE or sp:FILE"
    )


def is_file(name: str) -> bool:
    """True for a tokenizer that is a file, which may be changed."""
    return name.startswith(("bpe:", "json:", "sp:"))


def from_manifest(manifest: dict) -> Encoding | None:
    """Return the encoding of a directory of tokens; None if it names none.

    Raises: as `load`, and UserError for a rank file that is another one since then.
    """
    name = manifest["tokenizer"]["name"]
    if name == UNKNOWN:
        return None
    encoding = load(name)
    if is_file(name) and fingerprint(encoding) != manifest["tokenizer"]["fingerprint"]:
        raise UserError(f"tokenizer {name!r} has changed since the tokens were made: its ids mean something else; "
                        "restore the file, or make the tokens again")  # fmt: skip
    return encoding


def text_lengths(encoding: Encoding) -> np.ndarray:
    """Count the bytes of text that each id stands for; the end of text, and other special tokens, stand for none."""
    if isinstance(encoding, sp_model.SentencePiece):
        return encoding.lengths
    lengths = np.zeros(encoding.n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def unused_ids(encoding: Encoding) -> list[int]:
    """Ids below n_vocab that are no token's, as 100256 and fifteen others of cl100k_base: nothing decodes them."""
    if isinstance(encoding, sp_model.SentencePiece):
        return []  # it decodes what it does not use to nothing
    there = {*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()}
    return [id for id in range(encoding.n_vocab) if id not in there]


def encode(encoding: Encoding, text: bytes) -> np.ndarray:
    """Turn UTF-8 into token ids; END_OF_TEXT inside the text is text like any other.

    Bytes map to themselves, valid UTF-8 or not. Raises: UnicodeDecodeError, with any other encoding, if not. Longer
    spaces than tiktoken takes are cut before.
    """
    if encoding.name == "bytes":
        return np.frombuffer(text, np.uint8)  # equals encode_ordinary wherever that is defined, and needs no regex
    words = text.decode()
    try:
        return encoding.encode_to_numpy(words, disallowed_special=())
    except ValueError:  # the stack of tiktoken's regular expressions is too small for a long run of spaces
        ends = [0, *(match.end() for match in LONG_SPACE.finditer(words)), len(words)]
        return np.concatenate([encoding.encode_to_numpy(words[a:b], disallowed_special=()) for a, b in pairwise(ends)])


def fingerprint(encoding: Encoding) -> str:
    """Return the sha256 of all that decides the ids: ranks, pattern, special tokens. The name does not count."""
    if isinstance(encoding, sp_model.SentencePiece):
        return encoding.fingerprint
    digest = hashlib.sha256()
    ranks = io.BytesIO()
    write_ranks(ranks, encoding._mergeable_ranks)
    digest.update(ranks.getvalue())
    digest.update(json.dumps([encoding._pat_str, sorted(encoding._special_tokens.items())]).encode())
    return digest.hexdigest()


def _encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    """Make an encoding whose end of text is the token of that name if `ranks` lists one, else the id after the last."""
    end = ranks.pop(END_OF_TEXT.encode(), len(ranks))
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end})


def _read_ranks(path: str) -> dict[bytes, int]:
    """Read a rank file: base64 token, space, rank on each line; ranks 0..n-1, all 256 single bytes among the tokens."""
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
        raise UserError(f"{path}: {len(missing)} of the 256 single bytes have no rank, first {missing[0]}; add them")
    if sorted(ranks.values()) != list(range(len(lines))):
        raise UserError(f"{path}: the ranks of its {len(lines)} lines must be 0..{len(lines) - 1}, each once")
    return ranks


def write_ranks(file, ranks: dict[bytes, int]) -> None:
    """Write what `_read_ranks` reads."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        file.write(base64.b64encode(token) + b" %d\n" % rank)


def _fetch(name: str) -> tiktoken.Encoding:
    """Let tiktoken load or download an encoding, waiting FETCH_SECONDS at most: it sets no time limit itself."""
    encoding = Future()

    def work():
        try:
            encoding.set_result(tiktoken.get_encoding(name))
        except Exception as error:  # raised again below, in the caller's thread
            encoding.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a daemon does not keep a command that gave up alive
    try:
        return encoding.result(timeout=FETCH_SECONDS)
    except (OSError, ValueError) as error:  # no network, no answer, or another file than tiktoken expects
        if isinstance(error, TimeoutError):
            reason = f"no answer within {FETCH_SECONDS} s"
        else:  # what these say of themselves is long, and about urllib
            reason = type(error).__name__ if isinstance(error, OSError) else "what came is another file"
        raise UserError(
            f"tokenizer {name!r} could not be fetched ({reason}); use --tokenizer bytes or bpe:FILE, or set "
            f"TIKTOKEN_CACHE_DIR to a folder filled by the same command where there is a network"
        ) from error
