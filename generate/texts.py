"""Texts in, texts out: prompts to tokens, tokens to text as it grows, up to a stop."""

import codecs
import functools
import math
from collections.abc import Callable

import jax
import tiktoken
from jax.sharding import Mesh

import sharding
from config import Config, MeshConfig
from data import tokenizers
from errors import UserError
from generate.beam import Beam, search
from generate.cache import unstack
from generate.engine import Engine, Job, Token
from generate.runs import Form, open_run
from generate.sampling import Request
from generate.speculative import Rounds, speculate

MAX_SLOTS = 16  # requests of one call that share a batch; others wait


def round_up_to_power_of_two(size: int, most: int) -> int:
    """The next power of two, at most `most`: few shapes, so few compilations."""
    return min(1 << (size - 1).bit_length(), most)


def prompt_ids(encoding: tiktoken.Encoding, prompt: str, seq_len: int) -> list[int]:
    """End of text, then the prompt. Raises: UserError if no token fits behind it."""
    ids = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    if len(ids) >= seq_len:
        raise UserError(
            f"a prompt of {len(ids) - 1} tokens and the end of text before it leave no room in data.seq_len={seq_len} "
            f"positions; shorten it to at most {seq_len - 2} tokens"
        )
    return ids


class TextJob(Job):
    """A request whose tokens become text.

    text   what is written, without the prompt: up to a stop, and so far as it cannot become one
    piece  what the last token added to it
    """

    def __init__(self, encoding: tiktoken.Encoding, request: Request, prompt: list[int], context: int):
        super().__init__(prompt, request, min(request.tokens, context - len(prompt)))
        self.encoding, self.decoder = encoding, codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.piece, self.held = "", "", ""

    def add_token(self, token: Token, end: int) -> None:
        super().add_token(token, end)
        is_text = self.ended != "stop"
        new = self.encoding.decode_single_token_bytes(token.id) if is_text else b""
        held = self.held + self.decoder.decode(new, final=bool(self.ended))
        places = [place for stop in self.settings.stop if (place := held.find(stop)) >= 0]
        if places:
            self.ended, held = "stop", held[: min(places)]
        kept = 0 if self.ended else max((_partial_stop_length(held, stop) for stop in self.settings.stop), default=0)
        self.piece, self.held = held[: len(held) - kept], held[len(held) - kept :]
        self.text += self.piece


def token_text(encoding: tiktoken.Encoding, id: int) -> str:
    r"""The text of a token; bytes:\xe2\x82 where it is a part of a character, as OpenAI writes it."""
    raw = encoding.decode_single_token_bytes(id)
    try:
        return raw.decode() or f"token_id:{id}"  # of SentencePiece's control tokens: two of them would be one
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _partial_stop_length(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Sampler:
    """A model ready to continue texts; keeps its engines, and their compiled functions, between calls.

    mesh   where params lie; None: one device
    """

    def __init__(self, cfg: Config, params, encoding: tiktoken.Encoding, mesh: Mesh | None = None,
                 cache: str = "compute"):  # fmt: skip
        self.cfg, self.params, self.encoding, self.cache = cfg, params, encoding, cache
        self.mesh = sharding.make_mesh("", jax.local_devices()[:1]) if mesh is None else mesh
        self.engines: dict[tuple, Engine] = {}

    @functools.cached_property
    def unstacked_params(self):
        """Parameters as all engines share them."""
        return unstack(self.params, self.cfg.model, self.mesh)

    def engine(self, slots: int, context: int, piece: int) -> Engine:
        """One for so many requests at a time of so many tokens: made once, its cache all zeros.

        Raises: UserError if a parameter does not split over the mesh.
        """
        if (key := (slots, context, piece)) not in self.engines:
            self.engines[key] = Engine(
                self.cfg, self.unstacked_params, self.mesh, vocabulary=self.encoding.n_vocab,
                end=self.encoding.eot_token,
                slots=slots, context=context, piece=piece, cache=self.cache,
                unused_ids=tokenizers.unused_ids(self.encoding))  # fmt: skip
        return self.engines[key]

    def engine_for(self, writings: list[TextJob], slots: int) -> Engine:
        """One that has room for the longest of these."""
        T, longest = self.cfg.data.seq_len, max(len(one.prompt) for one in writings)
        context = round_up_to_power_of_two(max(len(one.prompt) + one.max_new_tokens for one in writings), T)
        return self.engine(slots, context, round_up_to_power_of_two(longest, min(64, T)))

    def make_job(self, request: Request) -> TextJob:
        """Raises: UserError if its prompt is too long."""
        context = self.cfg.data.seq_len
        return TextJob(self.encoding, request, prompt_ids(self.encoding, request.prompt, context), context)

    def write(self, requests: list[Request], stream: Callable[[int, str], None] | None = None) -> list[TextJob]:
        """Continue each prompt. `stream(row, text)` is called as text appears."""
        writings = [self.make_job(request) for request in requests]
        engine = self.engine_for(writings, round_up_to_power_of_two(len(requests), MAX_SLOTS))
        rows = {id(engine.submit(one)): row for row, one in enumerate(writings)}
        while not engine.idle:
            for one in engine.step():
                if stream and one.piece:
                    stream(rows[id(one)], one.piece)
        return writings

    def search(self, request: Request, width: int, penalty: float = 1.0) -> list[tuple[TextJob, Beam]]:
        """The best continuations that a search of so many beams finds, best first. A stop only cuts what was found."""
        asked, found = self.make_job(request), []
        engine = self.engine_for([asked], width)
        for best in search(engine, asked.prompt, width=width, room=asked.max_new_tokens, penalty=penalty):
            found.append((self.make_job(request), best))
            for id in best.tokens:
                if not found[-1][0].ended:
                    found[-1][0].add_token(Token(id, math.nan, []), engine.end)
        return found

    def speculate(self, request: Request, draft: "Sampler", k: int,
                  stream: Callable[[str], None] | None = None) -> tuple[TextJob, Rounds]:  # fmt: skip
        """Continue one prompt, for which a draft proposes k tokens at a time. `stream(text)` is called as text appears.

        Raises: UserError if the draft has another tokenizer.
        """
        if tokenizers.fingerprint(self.encoding) != tokenizers.fingerprint(draft.encoding):
            raise UserError(
                f"the draft's tokenizer {draft.encoding.name!r} of {draft.encoding.n_vocab} tokens is not the model's, "
                f"{self.encoding.name!r} of {self.encoding.n_vocab}: a draft has to be trained on the same tokens"
            )
        one = self.make_job(request)
        engine = self.engine_for([one], 1)
        said = lambda: stream(one.piece) if stream and one.piece else None
        return one, speculate(engine, draft.engine(1, engine.context, engine.piece), one, k, said)

    def texts(self, requests: list[Request], stream: Callable[[int, str], None] | None = None) -> list[str]:
        """Prompts and their continuations."""
        written = self.write(requests, stream)
        return [request.prompt + one.text for request, one in zip(requests, written, strict=True)]


def sample(cfg: Config, params, encoding: tiktoken.Encoding, mesh: Mesh, prompt: str, tokens: int, **settings) -> str:
    """Continue one prompt."""
    return Sampler(cfg, params, encoding, mesh).texts([Request(prompt=prompt, tokens=tokens, **settings)])[0]


def load(directory: str, mesh: MeshConfig | str = "", cache: str = "compute", form: Form = "compute", **how) -> Sampler:
    """Open a run that knows its tokenizer, or is told: see `open_run`.

    cache  the form of its numbers: "compute", the compute dtype; "bfloat16"; "int8"
    """
    run = open_run(directory, mesh, texts=True, form=form, **how)
    return Sampler(run.cfg, run.params, run.encoding, run.mesh, cache)
