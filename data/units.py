"""Tokenize one unit of text, and assemble one shard from units; any process may do this, in any order."""

import base64
import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass

import numpy as np
import tiktoken

from config.fields import is_remote
from data import files, shards, sources, tokenizers
from data.shards import Folder, Shard, UnitFile, UnitHead
from data.sources import Document, Unit
from utils import UserError


@dataclass(frozen=True)
class Job:
    """Settings that all units share."""

    folder: Folder  # for finished units and shards
    encoding: tiktoken.Encoding
    text_field: str
    val_share: float
    tails: bool  # hold out the tail of each document instead of whole documents

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.encoding.n_vocab)

    @functools.cached_property
    def fingerprint(self) -> str:
        return tokenizers.fingerprint(self.encoding)

    def name(self, unit: Unit) -> str:
        """Return the file name of a unit's tokens, which changes with its text, the tokenizer and the split."""
        rule = [self.fingerprint, self.text_field, self.val_share, self.tails]
        return "unit-" + hashlib.sha256(json.dumps([rule, unit]).encode(errors="surrogateescape")).hexdigest()[:20]


def token_dtype(vocabulary: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that fits ids 0 .. vocabulary - 1."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def split_of(name: str, val_share: float) -> str:
    """Return a document's split. It depends only on the name, so adding documents never moves existing ones."""
    place = int.from_bytes(hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()[:8], "big")
    return "val" if place < val_share * 2**64 else "train"


def tokenize(job: Job, task: tuple[str, Unit]) -> UnitHead:
    """Write the tokens of a unit, with an end-of-text token before each document."""
    name, unit = task
    remote = not job.folder.is_local or any(is_remote(part.file.path) for part in unit)
    return files.retry_if_remote(unit[0].file.path, remote, lambda: _tokenize(job, name, unit))


def _tokenize(job: Job, name: str, unit: Unit) -> UnitHead:
    dtype, end = job.dtype, np.uint32(job.encoding.eot_token)
    tokens, text_bytes, odd = {split: [] for split in shards.SPLITS}, dict.fromkeys(shards.SPLITS, 0), []
    for part in unit:
        for document in sources.read_part(part, job.text_field):
            if not _is_utf8(document, job.encoding):
                odd.append(document.name)
            for split, text in _split_document(document, job).items():
                ids = np.append(end, tokenizers.encode(job.encoding, text))
                tokens[split].append(ids.astype(dtype))
                text_bytes[split] += len(text)
    documents = {split: len(held) for split, held in tokens.items()}
    head = UnitHead(documents, {split: sum(map(len, held)) for split, held in tokens.items()}, text_bytes,
                    len(odd), odd[0] if odd else "")  # fmt: skip
    shards.write_unit(job.folder, name, dtype, tokens, head)
    return head


def _is_utf8(document: Document, encoding: tiktoken.Encoding) -> bool:
    """Return whether a document is UTF-8. Raises: UserError if not and the tokenizer needs UTF-8."""
    try:
        document.text.decode()
    except UnicodeDecodeError as error:
        if encoding.name != "bytes":
            raise UserError(
                f"{document.name}: byte {error.start + 1}, {document.text[error.start]:#04x}, is not UTF-8; "
                "convert the file (iconv -f latin1 -t utf-8), or use --tokenizer bytes, which accepts any bytes"
            ) from error
        return False
    return True


def _split_document(document: Document, job: Job) -> dict[str, bytes]:
    if job.tails:
        return split_tail(document.text, job.val_share)
    return {split_of(document.name, job.val_share): document.text}


def split_tail(text: bytes, share: float) -> dict[str, bytes]:
    """Split a document into train and its tail, val: `share` of its bytes, extended to a whole UTF-8 character."""
    cut = len(text) - math.ceil(len(text) * share)
    for _ in range(3):  # a character has at most 3 continuation bytes, which begin with the bits 10
        if cut and text[cut] >> 6 == 0b10:
            cut -= 1
    return {split: part for split, part in (("train", text[:cut]), ("val", text[cut:])) if part}


# Units to shards ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedShard:
    """Record of a shard that has been written."""

    key: str  # hash that identifies the shard's contents, `Shard.key`
    row: dict  # the shard's manifest entry
    seen: str  # which ids occur in the shard: one bit per id, in base64

    def ids(self, vocabulary: int) -> np.ndarray:
        return np.unpackbits(np.frombuffer(base64.b64decode(self.seen), np.uint8), count=vocabulary).astype(bool)


def assemble(job: Job, shard: Shard) -> FinishedShard:
    """Write a shard, and its FinishedShard to a JSON file next to it."""
    return files.retry_if_remote(
        f"{job.folder.path}/{shard.file}", not job.folder.is_local, lambda: _assemble(job, shard)
    )


def _assemble(job: Job, shard: Shard) -> FinishedShard:
    place, tokens = 0, np.empty(shard.tokens, job.dtype)
    for unit, start, stop in shard.pieces:
        tokens[place : place + stop - start] = UnitFile(job.folder, unit, job.dtype).read(shard.split, start, stop)
        place += stop - start
    row = shards.write_shard(job.folder, shard, tokens, job.encoding.eot_token)
    used = np.zeros(job.encoding.n_vocab, bool)
    used[tokens] = True
    done = FinishedShard(shard.key, row, base64.b64encode(np.packbits(used)).decode())
    job.folder.write(f"{shard.file}.json", lambda file: file.write(json.dumps(asdict(done)).encode()))
    return done


def read_finished_shard(job: Job, shard: Shard) -> FinishedShard | None:
    """Return the record of a shard that an earlier run wrote, or None."""
    begins, record = shards.companion_name(shard.file, "begins"), f"{shard.file}.json"
    least = {shard.file: shard.tokens * job.dtype.itemsize, begins: shard.documents * 4, record: 0}  # plus a header
    if any((job.folder.size(name) or 0) <= size for name, size in least.items()):
        return None
    try:
        done = FinishedShard(**json.loads(job.folder.read(record)))
    except ValueError:  # truncated, as after a power failure
        return None
    return done if done.key == shard.key else None
