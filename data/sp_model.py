"""A SentencePiece model as a tokenizer: with as much of the manner of tiktoken's encodings as is used of them."""

import functools
import hashlib
from pathlib import Path

import numpy as np

from errors import UserError

SPACE = "▁"  # what pieces write for a space
# What a model changes that normalises text, or drops spaces, or has no bytes for letters it has not seen.
PROBE = "  two  spaces,\ta tab\r\n\n漢 🙂 Ω\u2126 ﬁ e\u0301 \x01 end "


class SentencePiece:
    """A tokenizer.model; its end of text is its own `</s>`, else a new id after the last."""

    def __init__(self, name: str, model: bytes):
        import sentencepiece  # an extra

        self.name, self.model = name, model
        self.pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        size, end = self.pieces.vocab_size(), self.pieces.eos_id()
        self.eot_token, self.n_vocab = (end, size) if end >= 0 else (size, size + 1)

    def __reduce__(self):  # for other processes
        return SentencePiece, (self.name, self.model)

    def encode_ordinary(self, text: str) -> list[int]:
        return self.pieces.encode(text)

    def encode_to_numpy(self, text: str, **_) -> np.ndarray:
        return np.array(self.pieces.encode(text), np.uint32)

    def decode(self, ids: list[int]) -> str:
        return self.pieces.decode([i for i in ids if i != self.eot_token])

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    @property
    def lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for."""
        return np.array([len(one) for one in self._bytes])

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        p, found = self.pieces, []
        for i in range(self.n_vocab):
            if i >= p.vocab_size() or p.is_control(i) or p.is_unknown(i) or p.is_unused(i):
                found.append(b"")
            else:
                piece = p.id_to_piece(i)
                found.append(bytes([int(piece[3:5], 16)]) if p.is_byte(i) else piece.replace(SPACE, " ").encode())
        return found


def load(path: str) -> SentencePiece:
    """Read a file. Raises: UserError if it is none, if its tokens do not give text back, or without the extra."""
    name = f"sp:{path}"
    try:
        encoding = SentencePiece(name, Path(path).read_bytes())
    except ImportError as error:
        raise UserError(f"tokenizer {name!r} needs the package sentencepiece: make extra-sentencepiece") from error
    except OSError as error:
        raise UserError(f"tokenizer {name!r}: {error.strerror}") from error
    except RuntimeError as error:
        raise UserError(f"tokenizer {name!r}: not a SentencePiece model ({' '.join(str(error).split())})") from error
    if (found := encoding.decode(encoding.encode_ordinary(PROBE))) != PROBE:
        place = next((n for n, (a, b) in enumerate(zip(PROBE, found, strict=False)) if a != b), len(found))
        raise UserError(f"tokenizer {name!r}: its tokens do not give text back: {PROBE[place:place + 9]!r} becomes "
                        f"{found[place:place + 9]!r}; it wants byte_fallback, normalization_rule_name=identity and "
                        "remove_extra_whitespaces=false, as Llama 2 has them")  # fmt: skip
    return encoding
