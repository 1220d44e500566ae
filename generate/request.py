"""A request for a text: a prompt and its sampling settings. This file imports no JAX, so flags are parsed quickly."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from config import MeshConfig, MeshFlag
from config.fields import Count, NotNegative, Positive, Range, ShareBelow1, Size, check
from utils import UserError

MOST_ALTERNATIVES = 20
Alternatives = Annotated[int, Range(lambda x: 0 <= x <= MOST_ALTERNATIVES, f"must be from 0 to {MOST_ALTERNATIVES}")]


@dataclass(frozen=True)
class RunArguments:
    """The flags of every command that loads a model: which run, and on which devices."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]  # run directory, or output of from-hf
    step: str = ""  # checkpoint to load: its step, or best (lowest validation loss); empty: the latest
    tokenizer: str = ""  # for a run without a tokenizer: a tokenizer.json or .model, a tiktoken file, or the word bytes
    # devices along each of data, stage, fsdp, expert, context, tensor
    mesh: MeshFlag = field(default_factory=MeshConfig)
    devices: Count = 0  # simulate this many CPU devices; 0: use the real devices


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The sampling settings of a request."""

    tokens: Size = 200  # maximum number of new tokens; fewer if the text ends or reaches data.seq_len
    temperature: NotNegative = 0.8  # divides the logits; 0: always the most likely token
    top_k: Count = 50  # keep the k most likely tokens; 0: all
    top_p: float = 0.95  # keep the most likely tokens whose probabilities add up to this; 1: all
    min_p: ShareBelow1 = 0.0  # least probability to keep, relative to the most likely token (arXiv:2407.01082); 0: all
    repetition_penalty: Positive = 1.0  # above 1: tokens of the prompt and the text so far become less likely
    stop: tuple[str, ...] = ()  # strings that end the text; they are not included
    seed: int = 0  # the same seed gives the same text; sample n, counting from 0 across prompts, uses seed + n
    logprobs: Alternatives = 0  # with --json: natural-log probabilities of each token and this many alternatives


@dataclass(frozen=True)
class Request(Settings):
    """A prompt and its sampling settings."""

    prompt: str = ""  # text to continue

    def __post_init__(self):
        check(self)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1; 1 keeps every token")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop={self.stop!r}: must be strings, and none may be empty")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt {self.prompt!r}: not UTF-8 ({error.reason} at character {error.start})") from error
