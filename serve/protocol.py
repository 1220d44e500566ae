"""OpenAI's protocol: parse a request's JSON into texts to generate, and write the results as its JSON.

Optional parameters have the protocol's defaults, not those of `python -m generate`: temperature 1, no top_k or top_p,
and at most 16 new tokens for a completion, or for a chat as many as fit in the context.
"""

import codecs
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2
import tiktoken

from generate.engine import Token
from generate.request import MOST_ALTERNATIVES, Request
from generate.texts import encode_text, token_text
from serve.template import Template
from serve.worker import ServedText, TextUpdate
from utils import UserError, suggest

MAX_TEXTS = 128  # per request
MAX_STOPS = 4  # OpenAI's limit; each costs time for every token, in the thread of the engine
MAX_COMPLETION_LOGPROBS = 5  # OpenAI's limit

# Errors ---------------------------------------------------------------------------------------------------------------


class RequestError(Exception):
    """An error response: its HTTP status, its headers, and a body in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
        kind = "server_error" if status >= 500 else kind
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(param: str, message: str, code: str | None = None) -> RequestError:
    return RequestError(400, message, param, code)


# Requests -------------------------------------------------------------------------------------------------------------

# Parameters of the protocol that have no effect here.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Unsupported parameters: the values that have no effect and are accepted, and what to use instead.
UNSUPPORTED = {
    "presence_penalty": ((0,), "repetition_penalty above 1 makes repeated tokens less likely"),
    "frequency_penalty": ((0,), "repetition_penalty above 1 makes repeated tokens less likely"),
    "logit_bias": (({},), "use top_k, top_p or min_p to restrict tokens"),
    "echo": ((False,), "use /v1/completions with the chat's text as the prompt"),
    "suffix": (("",), "text can only be generated after the prompt"),
    "best_of": ((1,), "request n texts with logprobs, and choose the best"),
    "tools": (([],), "describe them in the prompt, and read the text"),
    "tool_choice": (("none", "auto"), "describe them in the prompt, and read the text"),
    "functions": (([],), "describe them in the prompt, and read the text"),
    "function_call": (("none", "auto"), "describe them in the prompt, and read the text"),
    "parallel_tool_calls": ((True, False), "describe them in the prompt, and read the text"),
    "response_format": (({"type": "text"},), 'leave it out, or use {"type": "text"}'),
    "modalities": ((["text"],), "leave it out: only text is supported"),
    "reasoning_effort": (("none",), "leave it out"),
}  # fmt: skip
SHARED = ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed", "n", "max_tokens",
          "stream", "stream_options", "logprobs")  # fmt: skip
COMPLETION = (*SHARED, "prompt", "echo")
CHAT = (*SHARED, "messages", "max_completion_tokens", "top_logprobs")


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request.

    texts  the texts to generate: n for each prompt, in order
    echo   for each text, true if the server added its prompt's end-of-text token, which is not echoed; empty: no echo
    """

    model: str
    texts: list[ServedText]
    n: int
    chat: bool
    stream: bool
    usage: bool  # send token counts at the end of a stream
    logprobs: bool
    echo: list[bool]


@dataclass(frozen=True)
class ServedModel:
    """The model that the server offers: its name, tokenizer, context length in tokens and chat template."""

    model: str
    encoding: tiktoken.Encoding
    context: int
    template: Template | None = None  # None: use the transcript of `chat_text`
    input_len: int = 0  # with an encoder: its positions
    start: int | None = None  # the token before each text; None: the end-of-text token

    def parse_request(self, body: bytes, chat: bool) -> ParsedRequest:
        """Parse and check the body of a completion or chat request. Raises: RequestError."""
        values = read_json(body)
        known = CHAT if chat else COMPLETION
        for name in [*values]:
            if values[name] is None or name in IGNORED:
                del values[name]
            elif name in UNSUPPORTED and name not in known:
                nothing, instead = UNSUPPORTED[name]
                value = values.pop(name)
                if not any(value == x and isinstance(value, bool) == isinstance(x, bool) for x in nothing):
                    raise bad_request(name, f"{name} is not supported; {instead}")
            elif name not in known:
                raise bad_request(name[:60], f"unknown parameter {name!r:.60}; {suggest(name[:60], known)}")
        self.check_model(_typed_value(values, "model", str, None))
        stream, n = _typed_value(values, "stream", bool, False), _typed_value(values, "n", int, 1)
        options = _typed_value(values, "stream_options", dict, {})
        if options and not stream:
            raise bad_request("stream_options", "stream_options needs stream=true; set it, or leave stream_options out")
        given = [None] if chat else given_prompts(values)
        if n < 1 or n * len(given) > MAX_TEXTS:
            raise bad_request(
                "n", f"n={n} for {len(given)} prompts: a request can have 1 to {MAX_TEXTS} texts in total"
            )
        prompts = [self.chat_prompt(values)] if chat else [self.ids(one) for one in given]
        echo, logprobs = _typed_value(values, "echo", bool, False), _wants_logprobs(values)
        if echo and self.input_len:
            raise bad_request("echo", "echo does not work with an encoder-decoder, which does not predict its prompt")
        if echo and stream:
            raise bad_request("echo", "echo does not work with stream=true; set one of them to false")
        nothing = not chat and _typed_value(values, "max_tokens", int, 1) == 0  # only score the prompt
        settings = self.settings(values | {"max_tokens": 1} if nothing else values, chat)
        seed = settings.seed
        texts = [ServedText(self.encoding, dataclasses.replace(settings, seed=seed + at), prompt, self.context)
                 for at, prompt in enumerate(prompt for prompt in prompts for _ in range(n))]  # fmt: skip
        for text in texts:
            text.max_new_tokens = 0 if nothing else text.max_new_tokens
            text.prompt_tokens = [] if echo and logprobs else None
        ours = [isinstance(one, str) for one in given for _ in range(n)] if echo else []
        return ParsedRequest(self.model, texts, n, chat, stream, bool(options.get("include_usage")), logprobs, ours)

    def check_model(self, name: str | None) -> None:
        if name is None:
            raise bad_request("model", f"model is missing; this server serves {self.model!r}")
        if name != self.model:
            why = f"model {name!r} does not exist; this server serves {self.model!r}"
            raise RequestError(404, why, "model", "model_not_found")

    def settings(self, values: dict, chat: bool) -> Request:
        rest = self.context if chat else 16
        tokens = _typed_value(values, "max_completion_tokens", int, _typed_value(values, "max_tokens", int, rest))
        stop = values.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list):
            raise bad_request("stop", f"stop={stop!r:.60}: should be a string, or a list of strings")
        if len(stop) > MAX_STOPS:
            raise bad_request("stop", f"stop has {len(stop)} strings: a request can have at most {MAX_STOPS}")
        given = {name: _number(name, values[name]) for name in ("temperature", "top_p", "min_p", "repetition_penalty")
                 if name in values}  # fmt: skip
        try:
            return Request(**{
                "tokens": tokens, "temperature": 1.0, "top_p": 1.0, "top_k": values.get("top_k", 0),
                "stop": (*stop, *(self.chat_stop() if chat else [])), "seed": values.get("seed", secrets.randbits(32)),
                "logprobs": _alternatives(values, chat)} | given)  # fmt: skip
        except UserError as error:
            name = str(error).partition("=")[0]
            param = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
            message = str(error).replace("tokens=", f"{param}=", 1)
            raise bad_request(param if name == "tokens" else name, message) from error

    def ids(self, prompt) -> list[int]:
        """Return the tokens of a text, after `start`; token ids are returned unchanged. With an encoder, end of text
        ends both, and then starts the decoder."""
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise bad_request("prompt", f"prompt: not UTF-8 ({error.reason} at character {error.start})") from error
            before = [] if self.input_len else [self.encoding.eot_token if self.start is None else self.start]
            found = [*before, *encode_text(self.encoding, prompt)]
        else:
            found = prompt
            whole = isinstance(found, list) and all(isinstance(id, int) and not isinstance(id, bool) for id in found)
            if not whole or not found:
                raise bad_request(
                    "prompt", "prompt: should be a string, token ids, or a list of either, none of them empty"
                )
            seen = found[: max(self.context, self.input_len)]  # a longer prompt is refused below
            if wrong := [id for id in seen if not 0 <= id < self.encoding.n_vocab or not self.is_token(id)]:
                raise bad_request("prompt", f"prompt: token {wrong[0]} is not one of 0..{self.encoding.n_vocab - 1}")
        if self.input_len:
            if (excess := len(found) + 1 - self.input_len) > 0:
                raise bad_request("prompt", f"a prompt of {len(found)} tokens and the end-of-text token after it do "
                                  f"not fit into the encoder's {self.input_len} positions; shorten it by at least "
                                  f"{excess}", "context_length_exceeded")  # fmt: skip
            return [*found, *[self.encoding.eot_token] * 2]
        if (excess := len(found) + 1 - self.context) > 0:
            more = ", including the end-of-text token before it," if isinstance(prompt, str) else ""
            raise bad_request("prompt", f"a prompt of {len(found)} tokens{more} leaves no room in a context of "
                      f"{self.context} tokens; shorten it by at least {excess}", "context_length_exceeded")  # fmt: skip
        return found

    def is_token(self, id: int) -> bool:
        with contextlib.suppress(KeyError):
            return self.encoding.decode_single_token_bytes(id) is not None
        return False

    def chat_stop(self) -> list[str]:
        return [CHAT_STOP] if not self.template else [self.template.end_text] if self.template.end_text else []

    def chat_prompt(self, values: dict) -> list[int]:
        messages = _typed_value(values, "messages", list, None)
        if not messages:
            raise bad_request("messages", 'messages is missing; use e.g. [{"role": "user", "content": "Hello"}]')
        turns = [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]
        if not self.template:
            return self.ids(chat_text(turns))
        try:
            return self.ids(self.encoding.encode(self.template.render(turns), allowed_special="all"))
        except jinja2.TemplateError as error:
            raise bad_request("messages", f"messages: the model's chat template rejects them: {error}") from error
        except ValueError as error:  # a run of spaces too long for tiktoken
            raise bad_request("messages", f"messages: the tokenizer cannot encode them: {error}") from error


ROLES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
CHAT_STOP = "\nUser:"


def chat_text(messages: list[tuple[str, str]]) -> str:
    """Format messages as a transcript to continue: `Role: content` paragraphs, and `Assistant:` at the end.

    Models trained on plain text have seen such transcripts. The answer ends before the next `User:`.
    """
    return "\n\n".join([f"{ROLES[role]}: {content}" for role, content in messages] + ["Assistant:"])


def _message(message, name: str) -> tuple[str, str]:
    if not isinstance(message, dict) or message.get("role") not in [*ROLES]:  # a role may be a list
        raise bad_request(
            "messages", f'{name}: should be {{"role": ..., "content": ...}}, with a role of {", ".join(ROLES)}'
        )
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise bad_request(
            "messages", f'{name}: content should be a string, or a list of {{"type": "text", "text": ...}}'
        )
    return message["role"], content


def read_json(body: bytes) -> dict:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request body is not JSON: {type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(400, 'the request body should be a JSON object, e.g. {"model": ..., "prompt": ...}')
    return values


def given_prompts(values: dict) -> list:
    """Return each prompt of a completion. The parameter is a string, token ids, or a list of either."""
    prompt = _typed_value(values, "prompt", (str, list), None)
    if prompt is None:
        raise bad_request("prompt", "prompt is missing; set it to a string, token ids, or a list of either")
    if not prompt and isinstance(prompt, list):
        raise bad_request("prompt", "prompt=[] has no text to continue; for an empty prompt use ''")
    return [prompt] if isinstance(prompt, str) or all(isinstance(x, int) for x in prompt) else prompt


def _typed_value(values: dict, name: str, kind: type | tuple, default):
    value = values.get(name, default)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if value is not default and (not isinstance(value, kind) or wrong_bool):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise bad_request(name, f"{name}={value!r:.60}: should be of type {kinds}")
    return value


def _number(name: str, value) -> float:
    """Convert a JSON number to float; an integer too large for a float becomes infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(name, f"{name}={value!r:.60}: should be a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _wants_logprobs(values: dict) -> bool:
    return values.get("logprobs", False) is not False


def _alternatives(values: dict, chat: bool) -> int:
    """Return how many of the most likely tokens the request wants for each generated token."""
    if not chat:
        most, found = MAX_COMPLETION_LOGPROBS, _typed_value(values, "logprobs", int, 0) if "logprobs" in values else 0
        name = "logprobs"
    else:
        wanted = _typed_value(values, "logprobs", bool, False)
        most, found, name = MOST_ALTERNATIVES, _typed_value(values, "top_logprobs", int, 0), "top_logprobs"
        if found and not wanted:
            raise bad_request(name, "top_logprobs needs logprobs=true; set it, or leave top_logprobs out")
    if not 0 <= found <= most:
        raise bad_request(name, f"{name}={found}: must be from 0 to {most}")
    return found


# Responses ------------------------------------------------------------------------------------------------------------


class Choice:
    """One generated text of a response.

    pending  tokens that were generated and have not been sent yet
    """

    def __init__(self, asked: ParsedRequest, index: int, encoding: tiktoken.Encoding):
        self.parsed_request, self.index, self.text, self.encoding = asked, index, asked.texts[index], encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending: list[Token] = []
        self.sent, self.offset = 0, 0  # characters sent, and characters before the first pending token
        self.role_sent, self.echoed_prompt = False, ""

    def begin_with_prompt(self) -> None:
        """Put the prompt and its tokens before the text, without an end-of-text token that the server added. Append
        the end-of-text token if the model generated it, because clients that echo count tokens from the end."""
        ours, ids = self.parsed_request.echo[self.index], self.text.prompt
        self.echoed_prompt = b"".join(map(self.encoding.decode_single_token_bytes, ids[ours:])).decode(errors="replace")
        self.pending = [Token(ids[0], None, []), *(self.text.prompt_tokens or [])][ours:] + self.pending
        self.pending += [self.text.end_token] if self.text.end_token else []

    def to_json(self, piece: str, ended: str, delta: bool) -> dict:
        """Return a piece of the text as JSON, with the tokens that begin in it. delta: in the format of a stream"""
        self.sent += len(piece)
        logprobs = self.logprobs(ended) if self.parsed_request.logprobs else None
        finish = {"logprobs": logprobs, "finish_reason": ended or None}
        if not self.parsed_request.chat:
            return {"index": self.index, "text": piece} | finish
        role = {} if delta and self.role_sent else {"role": "assistant"}
        content = {} if delta and self.role_sent and not piece else {"content": piece}
        self.role_sent = True
        return {"index": self.index, "delta" if delta else "message": role | content} | finish

    def logprobs(self, ended: str) -> dict:
        """Return the log-probabilities of the tokens sent now. Tokens after a stop string are never sent; those of an
        incomplete character are sent last."""
        shown = []
        while self.pending and (self.offset < self.sent or ended == "length" or self.pending[0] is self.text.end_token):
            shown.append((self.pending.pop(0), self.offset))
            self.offset += len(self.decoder.decode(self.encoding.decode_single_token_bytes(shown[-1][0].id)))
        return self.chat_logprobs(shown) if self.parsed_request.chat else self.completion_logprobs(shown)

    def completion_logprobs(self, shown: list[tuple[Token, int]]) -> dict:
        asks = bool(self.text.settings.logprobs)
        named = lambda token: {token_text(self.encoding, id): _finite(logprob) for id, logprob in token.alternatives}
        likeliest = lambda token: None if token.logprob is None else named(token)
        return {
            "tokens": [token_text(self.encoding, token.id) for token, _ in shown],
            "token_logprobs": [_finite(token.logprob) for token, _ in shown],
            "top_logprobs": [likeliest(token) for token, _ in shown] if asks else None,
            "text_offset": [offset for _, offset in shown],
        }

    def chat_logprobs(self, shown: list[tuple[Token, int]]) -> dict:
        raw = lambda id: [*self.encoding.decode_single_token_bytes(id)]
        one = lambda id, logprob: {
            "token": token_text(self.encoding, id),
            "logprob": _finite(logprob),
            "bytes": raw(id),
        }
        more = lambda token: {"top_logprobs": [one(*pair) for pair in token.alternatives]}
        return {"content": [one(token.id, token.logprob) | more(token) for token, _ in shown], "refusal": None}


def _finite(logprob: float | None) -> float | None:
    """Replace -inf and NaN with -9999, because JSON has neither. The first token of a text has None."""
    return None if logprob is None else max(-9999.0, logprob)


class ResponseBuilder:
    """Build the JSON of one response, as a single object or as the events of a stream."""

    def __init__(self, asked: ParsedRequest, encoding: tiktoken.Encoding):
        self.parsed_request = asked
        self.choices = [Choice(asked, index, encoding) for index in range(len(asked.texts))]
        kind = "chat.completion" if asked.chat else "text_completion"
        self.kind = kind + (".chunk" if asked.stream and asked.chat else "")
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self.header = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": self.kind, "created": int(time.time()),
                      "model": asked.model}  # fmt: skip

    def usage(self) -> dict:
        """Count tokens. A prompt counts once, whatever n is, including its end-of-text token."""
        prompt = sum(len(text.prompt) for text in self.parsed_request.texts[:: self.parsed_request.n])
        drawn = sum(len(text.tokens) for text in self.parsed_request.texts)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def full_response(self) -> dict:
        for choice in self.choices if self.parsed_request.echo else ():
            choice.begin_with_prompt()
        choices = [
            choice.to_json(choice.echoed_prompt + choice.text.text, choice.text.ended, False) for choice in self.choices
        ]
        return self.header | {"choices": choices, "usage": self.usage()}

    def add(self, news: TextUpdate) -> bytes:
        """Return the event to send now. Returns b"" without a stream, and while a character or stop is incomplete."""
        choice = self.choices[news.index]
        choice.pending += news.tokens
        if not self.parsed_request.stream or not (news.piece or news.ended):
            return b""
        part = choice.to_json(news.piece, news.ended, delta=True)
        return event(self.header | {"choices": [part]} | ({"usage": None} if self.parsed_request.usage else {}))

    def final_events(self) -> Iterator[bytes]:
        if self.parsed_request.usage:
            yield event(self.header | {"choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"


def event(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
