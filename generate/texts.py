"""The text interface of generation: encode prompts, decode tokens as they are generated, and end at stop strings."""

import codecs
import functools
import math
import re
from collections.abc import Callable

import jax
import tiktoken
from jax.sharding import Mesh

import sharding
from architectures import architecture
from config import Config, DataConfig, MeshConfig
from config.fields import parse_objectives
from data import tokenizers
from generate.beam import Beam, search
from generate.cache import unstack
from generate.engine import Engine, Job, Token
from generate.request import Request
from generate.runs import Form, open_run
from generate.speculative import Rounds, speculate
from utils import UserError

MAX_SLOTS = 16  # requests of one call that run at a time; others wait


def round_up_to_power_of_two(size: int, most: int) -> int:
    """Round up to a power of two, at most `most`, so that few shapes are compiled."""
    return min(1 << (size - 1).bit_length(), most)


class WithSentinels:
    """A tokenizer with the sentinels of span corruption, written <extra_id_0>, <extra_id_1>, ..: ids after its own.

    vocab_size   ids of the model's table; sentinel i is vocab_size - 1 - i
    """

    def __init__(self, encoding: tiktoken.Encoding, vocab_size: int):
        self.encoding, self.n_vocab = encoding, vocab_size

    def __getattr__(self, name: str):
        return getattr(self.encoding, name)

    def encode_ordinary(self, text: str) -> list[int]:
        ids = []
        for part in re.split(r"(<extra_id_\d{1,9}>)", text):
            sentinel = re.fullmatch(r"<extra_id_(\d{1,9})>", part)
            id = self.n_vocab - 1 - int(sentinel[1]) if sentinel else -1
            ids += [id] if id >= self.encoding.n_vocab else encode_text(self.encoding, part)
        return ids

    def decode_single_token_bytes(self, id: int) -> bytes:
        if id < self.encoding.n_vocab:
            return self.encoding.decode_single_token_bytes(id)
        return f"<extra_id_{self.n_vocab - 1 - id}>".encode()


def with_sentinels(encoding: tiktoken.Encoding, cfg: Config):
    """Return the tokenizer of a model, with sentinels if it was trained with span corruption."""
    spans = any(name.startswith("span") for name in parse_objectives(cfg.data.objective))
    return WithSentinels(encoding, cfg.model.vocab_size) if spans else encoding


def positions(d: DataConfig) -> int:
    """Return the most tokens of a prompt and its text; an encoder's prompt ends with the decoder's first token."""
    return d.input_len + 1 + d.seq_len if d.input_len else d.seq_len


def unused_ids(encoding) -> list[int]:
    """Return the ids that a model never generates. Sentinels are used."""
    return tokenizers.unused_ids(encoding.encoding if isinstance(encoding, WithSentinels) else encoding)


def encode_text(encoding, text: str) -> list[int]:
    """Encode a text. `encode_ordinary` of tiktoken would panic at a run of spaces that is too long for its regex."""
    if isinstance(encoding, WithSentinels):
        return encoding.encode_ordinary(text)
    return tokenizers.encode(encoding, text.encode()).tolist()


def prompt_ids(encoding: tiktoken.Encoding, prompt: str, seq_len: int, input_len: int = 0,
               start: int | None = None) -> list[int]:  # fmt: skip
    """Encode a prompt after the token `start`, or after the end-of-text token if it is None. For an encoder, end of
    text ends the inputs, and then starts the decoder (`features.encoder_decoder`).

    Raises: UserError if it leaves no room for a new token, or is longer than an encoder's inputs.
    """
    ids, end = encode_text(encoding, prompt), encoding.eot_token
    most, why = seq_len - 2, f"before it leave no room in data.seq_len={seq_len}"
    if input_len:
        most, why = input_len - 1, f"after it do not fit into data.input_len={input_len}"
    if len(ids) > most:
        raise UserError(f"a prompt of {len(ids)} tokens and the end-of-text token {why}; shorten the prompt to at most "
                        f"{most} tokens")  # fmt: skip
    return [*ids, end, end] if input_len else [end if start is None else start, *ids]


class TextJob(Job):
    """A request whose tokens are decoded to text.

    text   the generated text up to a stop string, without a suffix that may become one
    piece  the text that the last token added
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
    r"""Return the text of a token, or its bytes as OpenAI writes them, bytes:\xe2\x82, if it is part of a character."""
    raw = encoding.decode_single_token_bytes(id)
    try:
        return raw.decode() or f"token_id:{id}"  # SentencePiece's control tokens are all empty texts
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _partial_stop_length(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Sampler:
    """A model that continues texts. It keeps its engines and their compiled functions between calls.

    mesh   the mesh of params; None: one device
    start  the token before each prompt; None: the end-of-text token
    """

    def __init__(self, cfg: Config, params, encoding: tiktoken.Encoding, mesh: Mesh | None = None,
                 cache: str = "compute", start: int | None = None):  # fmt: skip
        self.cfg, self.params, self.cache, self.start = cfg, params, cache, start
        self.encoding = with_sentinels(encoding, cfg)
        self.mesh = sharding.make_mesh("", jax.local_devices()[:1]) if mesh is None else mesh
        self.engines: dict[tuple, Engine] = {}

    @functools.cached_property
    def unstacked_params(self):
        """The parameters with separate layers, shared by all engines."""
        return unstack(self.params, self.cfg.model, self.mesh)

    def engine(self, slots: int, context: int, piece: int) -> Engine:
        """Return the engine for these sizes. It is created once, with a cache of zeros.

        Raises: UserError if a parameter does not split over the mesh.
        """
        if (key := (slots, context, piece)) not in self.engines:
            self.engines[key] = Engine(
                self.cfg, self.unstacked_params, self.mesh, vocabulary=self.encoding.n_vocab,
                end=self.encoding.eot_token,
                slots=slots, context=context, piece=piece, cache=self.cache,
                unused_ids=unused_ids(self.encoding))  # fmt: skip
        return self.engines[key]

    def engine_for(self, writings: list[TextJob], slots: int, call: int = 1) -> Engine:
        """Return an engine with room for the longest of these texts, and for calls of that many tokens."""
        T, longest = positions(self.cfg.data), max(len(one.prompt) for one in writings)
        context = round_up_to_power_of_two(max(len(one.prompt) + one.max_new_tokens for one in writings), T)
        return self.engine(slots, context, round_up_to_power_of_two(max(longest, call), min(max(64, call), T)))

    def make_job(self, request: Request) -> TextJob:
        """Return the job of a request. Raises: UserError if its prompt is too long."""
        d = self.cfg.data
        prompt = prompt_ids(self.encoding, request.prompt, d.seq_len, d.input_len, self.start)
        most = len(prompt) + d.seq_len if d.input_len else d.seq_len
        return TextJob(self.encoding, request, prompt, most)

    def run_requests(self, requests: list[Request], stream: Callable[[int, str], None] | None = None) -> list[TextJob]:
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
        """Run beam search with `width` beams. Returns texts and beams, best first; stop strings only truncate texts."""
        job, results = self.make_job(request), []
        engine = self.engine_for([job], width)
        for beam in search(engine, job.prompt, width=width, room=job.max_new_tokens, penalty=penalty):
            results.append((self.make_job(request), beam))
            for id in beam.tokens:
                if not results[-1][0].ended:
                    results[-1][0].add_token(Token(id, math.nan, []), engine.end)
        return results

    def speculate(self, request: Request, draft: "Sampler", k: int,
                  stream: Callable[[str], None] | None = None) -> tuple[TextJob, Rounds]:  # fmt: skip
        """Continue one prompt with a draft that proposes k tokens per step. `stream(text)` is called as text appears.

        Raises: UserError if the draft has another tokenizer.
        """
        if architecture(self.cfg.model).whole_prompt:
            raise UserError("a draft needs a causal decoder, but this model has an encoder or a bidirectional prefix; "
                            "leave the draft out")  # fmt: skip
        if tokenizers.fingerprint(self.encoding) != tokenizers.fingerprint(draft.encoding):
            raise UserError(
                f"the draft must have the model's tokenizer, {self.encoding.name!r} ({self.encoding.n_vocab} tokens), "
                f"but has {draft.encoding.name!r} ({draft.encoding.n_vocab} tokens); use another draft"
            )
        one = self.make_job(request)
        engine = self.engine_for([one], 1, k + 1)
        send_piece = lambda: stream(one.piece) if stream and one.piece else None
        return one, speculate(engine, draft.engine(1, engine.context, engine.piece), one, k, send_piece)

    def generate_texts(self, requests: list[Request], stream: Callable[[int, str], None] | None = None) -> list[str]:
        """Continue each prompt. Returns prompts with their continuations."""
        written = self.run_requests(requests, stream)
        return [self.whole_text(request.prompt, one.text) for request, one in zip(requests, written, strict=True)]

    def whole_text(self, prompt: str, text: str) -> str:
        """Return a prompt with its continuation; of an encoder-decoder, the prompt with its masked spans filled in, or
        only the text if the prompt has none."""
        if architecture(self.cfg.model).continues_prompt:
            return prompt + text
        spans = dict(re.findall(r"(<extra_id_\d+>)(.*?)(?=<extra_id_\d+>|$)", text, re.DOTALL))
        filled = re.sub(r"<extra_id_\d+>", lambda found: spans.get(found[0], ""), prompt)
        return filled if "<extra_id_" in prompt else text


def sample(cfg: Config, params, encoding: tiktoken.Encoding, mesh: Mesh, prompt: str, tokens: int, **settings) -> str:
    """Continue one prompt."""
    return Sampler(cfg, params, encoding, mesh).generate_texts([Request(prompt=prompt, tokens=tokens, **settings)])[0]


def load(directory: str, mesh: MeshConfig | str = "", cache: str = "compute", form: Form = "compute", **how) -> Sampler:
    """Open a run as a Sampler. It needs a tokenizer, its own or a named one: see `open_run`.

    cache  number format: "compute", the compute dtype; "bfloat16"; or "int8"
    """
    run = open_run(directory, mesh, texts=True, form=form, **how)
    return Sampler(run.cfg, run.params, run.encoding, run.mesh, cache, run.start)
