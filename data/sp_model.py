"""Give a SentencePiece model the subset of tiktoken's Encoding interface that this project uses."""

import functools
import hashlib
from pathlib import Path

import numpy as np

from utils import UserError

SPACE = "▁"  # represents a space in a token
# A model changes this text if it normalizes, drops spaces, or has no byte fallback for unknown letters.
PROBE = "  two  spaces,\ta tab\r\n\n漢 🙂 Ω\u2126 ﬁ e\u0301 \x01 end "


class SentencePiece:
    """A tokenizer.model. Its end of text is `</s>` if it has one, else a new last id."""

    def __init__(self, name: str, model: bytes):
        import sentencepiece  # an extra

        self.name, self.model = name, model
        self.pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        size, end = self.pieces.vocab_size(), self.pieces.eos_id()
        self.eot_token, self.n_vocab = (end, size) if end >= 0 else (size, size + 1)

    def __reduce__(self):  # pickle, for worker processes
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
        """Number of text bytes per id."""
        return np.array([len(one) for one in self._bytes])

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        p, texts = self.pieces, []
        for i in range(self.n_vocab):
            if i >= p.vocab_size() or p.is_control(i) or p.is_unknown(i) or p.is_unused(i):
                texts.append(b"")
            else:
                piece = p.id_to_piece(i)
                texts.append(bytes([int(piece[3:5], 16)]) if p.is_byte(i) else piece.replace(SPACE, " ").encode())
        return texts


def load(path: str) -> SentencePiece:
    """Read a model. Raises: UserError if it is invalid, if PROBE does not round-trip, or without the extra."""
    name = f"sp:{path}"
    try:
        encoding = SentencePiece(name, Path(path).read_bytes())
    except ImportError as error:
        raise UserError(
            f"tokenizer {name!r} needs the package sentencepiece; install it with: make extra-sentencepiece"
        ) from error
    except OSError as error:
        raise UserError(f"tokenizer {name!r}: {error.strerror}") from error
    except RuntimeError as error:
        raise UserError(f"tokenizer {name!r}: not a SentencePiece model ({' '.join(str(error).split())})") from error
    if (decoded := encoding.decode(encoding.encode_ordinary(PROBE))) != PROBE:
        place = next((n for n, (a, b) in enumerate(zip(PROBE, decoded, strict=False)) if a != b), len(decoded))
        raise UserError(f"tokenizer {name!r}: tokens decode to different text: {PROBE[place:place + 9]!r} becomes "
                        f"{decoded[place:place + 9]!r}; train it with byte_fallback, normalization_rule_name=identity "
                        "and remove_extra_whitespaces=false, as for Llama 2")  # fmt: skip
    return encoding
