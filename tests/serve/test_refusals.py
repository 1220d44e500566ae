"""Invalid requests get one sentence with the protocol's status and body, and the next request is answered."""

import json
import socket
import threading
import time

import pytest

from tests import extras

pytestmark = extras.require("serve")

import openai
import tiktoken

from data.tokenizers import GPT2_PATTERN
from generate.texts import WithSentinels
from serve import app
from serve.protocol import CHAT, COMPLETION, IGNORED, UNSUPPORTED, RequestError, ServedModel
from serve.template import Template
from tests.generate.models import BYTES, rule_text
from tests.serve.test_answers import completion, read_metrics

ASKED = {"completions": {"model": "rule", "prompt": "!"},
         "chat/completions": {"model": "rule", "messages": [{"role": "user", "content": "x"}]}}  # fmt: skip
COMPLETIONS = [  # parameters to change (None: to remove), the status, the parameter in the error, the message
    ({"model": None}, 400, "model", "model is missing; this server serves 'rule'"),
    ({"model": "gpt"}, 404, "model", "model 'gpt' does not exist; this server serves 'rule'"),
    ({"model": "\ud800"}, 404, "model", r"model '\ud800' does not exist; this server serves 'rule'"),
    ({"prompt": None}, 400, "prompt", "prompt is missing; set it to a string, token ids, or a list of either"),
    ({"prompt": []}, 400, "prompt", "prompt=[] has no text to continue; for an empty prompt use ''"),
    ({"prompt": 3}, 400, "prompt", "prompt=3: should be of type str or list"),
    ({"prompt": ["a", 3]}, 400, "prompt", "prompt: should be a string, token ids, or a list of either, none of them "),
    ({"prompt": [[True]]}, 400, "prompt", "prompt: should be a string, token ids, or a list of either, none of them "),
    ({"prompt": [3, 999]}, 400, "prompt", "prompt: token 999 is not one of 0..256"),
    ({"prompt": "\ud800"}, 400, "prompt", "prompt: not UTF-8 (surrogates not allowed at character 0)"),
    ({"prompt": "x" * 30}, 400, "prompt", "a prompt of 31 tokens, including the end-of-text token before it, leaves "
     "no room in a context of 24 tokens; shorten it by at least 8"),
    ({"prompt": [1] * 24}, 400, "prompt", "a prompt of 24 tokens leaves no room in a context of 24 tokens; shorten it "
     "by at least 1"),
    ({"temperature": float("nan")}, 400, "temperature", "temperature=nan: must be at least 0, and finite"),
    ({"temperature": 10**400}, 400, "temperature", "temperature=inf: must be at least 0, and finite"),
    ({"temperature": "hot"}, 400, "temperature", "temperature='hot': should be a number"),
    ({"top_p": 0}, 400, "top_p", "top_p=0.0: must be above 0 and at most 1; 1 keeps every token"),
    ({"top_k": -1}, 400, "top_k", "top_k=-1: must be at least 0"),
    ({"max_tokens": -1}, 400, "max_tokens", "max_tokens=-1: must be at least 1"),
    ({"max_tokens": True}, 400, "max_tokens", "max_tokens=True: should be of type int"),
    ({"seed": 1.5}, 400, "seed", "seed=1.5: should be a whole number"),
    ({"stop": [""]}, 400, "stop", "stop=('',): must be strings, and none may be empty"),
    ({"stop": 3}, 400, "stop", "stop=3: should be a string, or a list of strings"),
    ({"stop": ["x"] * 5}, 400, "stop", "stop has 5 strings: a request can have at most 4"),
    ({"n": 0}, 400, "n", "n=0 for 1 prompts: a request can have 1 to 128 texts in total"),
    ({"n": 100}, 400, "n", "the request has 100 texts, but this server runs and queues at most 67"),
    ({"logprobs": 6}, 400, "logprobs", "logprobs=6: must be from 0 to 5"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options",
     "stream_options needs stream=true; set it, or leave stream_options out"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty",
     "presence_penalty is not supported; repetition_penalty above 1 makes repeated tokens less likely"),
    ({"best_of": True}, 400, "best_of", "best_of is not supported; request n texts with logprobs, and choose the best"),
    ({"presence_penalty": False}, 400, "presence_penalty", "presence_penalty is not supported; repetition_penalty "),
    ({"\ud800": 1}, 400, "\ud800", r"unknown parameter '\ud800'; known: "),
    ({"prompt": [{}] * 200}, 400, "n", "n=1 for 200 prompts: a request can have 1 to 128 texts in total"),
    ({"echo": True, "stream": True}, 400, "echo", "echo does not work with stream=true; set one of them to false"),
    ({"top-k": 3}, 400, "top-k", "unknown parameter 'top-k'; did you mean 'top_k'? known: model, temperature, "),
    (b"[]", 400, None, 'the request body should be a JSON object, e.g. {"model": ..., "prompt": ...}'),
    (b'{"model"', 400, None, "the request body is not JSON: JSONDecodeError: Expecting ':' delimiter: line 1 column 9"),
    (b"[" * 100_000, 400, None, "the request body is not JSON: RecursionError: "),
    (b"\xff\xff", 400, None, "the request body is not JSON: UnicodeDecodeError: "),
    (b"x" * (app.MAX_REQUEST_BYTES + 1), 413, None, "the request body is larger than 1,048,576 bytes"),
]  # fmt: skip
CHATS = [
    ({"messages": None}, 400, "messages", 'messages is missing; use e.g. [{"role": "user", "content": "Hello"}]'),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages",
     'messages[0]: should be {"role": ..., "content": ...}, with a role of system, developer, user, assistant'),
    *[({"messages": [{"role": role, "content": "a"}]}, 400, "messages", 'messages[0]: should be {"role": ..., ')
      for role in (["user"], {"user": 1}, True, 1, None)],
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages",
     'messages[0]: content should be a string, or a list of {"type": "text", "text": ...}'),
    ({"tools": [{}]}, 400, "tools", "tools is not supported; describe them in the prompt, and read the text"),
    ({"echo": True}, 400, "echo", "echo is not supported; use /v1/completions with the chat's text as the prompt"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "top_logprobs needs logprobs=true"),
]  # fmt: skip


@pytest.mark.parametrize(
    "path, asked, status, param, message",
    [("completions", *row) for row in COMPLETIONS] + [("chat/completions", *row) for row in CHATS],
)
def test_invalid_requests_are_refused(server, path, asked, status, param, message):
    """Catches a traceback as an answer, a setting that is ignored, and a request that ends the engine."""
    values = asked if isinstance(asked, bytes) else {k: v for k, v in (ASKED[path] | asked).items() if v is not None}
    body = values if isinstance(values, bytes) else json.dumps(values)
    got = server.client._client.post(f"{server.url}/v1/{path}", content=body)
    error = got.json()["error"]
    assert error["message"].startswith(message), error
    assert (got.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert completion(server, max_tokens=2).choices[0].text == rule_text("!", 2)[1:]


def test_unsupported_parameters_may_have_neutral_values(server):
    """Catches a client that is refused because it sends default values."""
    neutral = dict(
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, echo=False, best_of=1, user="me", suffix=None
    )
    assert completion(server, max_tokens=2, **neutral).choices[0].text == rule_text("!", 2)[1:]


def test_errors_become_the_exceptions_of_the_client(server):
    """Catches an error body that OpenAI's client cannot read, and a too long prompt without its error code."""
    with pytest.raises(openai.NotFoundError) as error:
        completion(server, model="none")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as error:
        completion(server, prompt="x" * 23)
    assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"


def test_a_wrong_key_is_refused(serve):
    """Catches a path that does not check the key, half a key that is accepted, and a health probe that needs a key."""
    with serve(api_key="sesame") as server:
        assert completion(server, max_tokens=1).choices[0].text == "$"
        for key in ("sesam", "sesamee", "", "é"):
            for path in ("/v1/models", "/v1/completions", "/metrics", "/v1/none"):
                headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
                got = server.client._client.get(server.url + path, headers=headers)
                assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key"), (key, path)
        assert [server.client._client.get(server.url + path).status_code for path in ("/health", "/")] == [200, 200]


# Limits, timeouts and disconnects -------------------------------------------------------------------------------------


def wait_until(holds, longest_s=120.0):
    end_s = time.monotonic() + longest_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def start_request(server, results: list, **asked) -> threading.Thread:
    """Send a request in a thread, which appends its text or its error to a list."""

    def ask():
        try:
            results.append(completion(server, **asked).choices[0].text)
        except openai.APIError as error:
            results.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_full_queue_returns_429(serve, gate):
    """Catches a queue without a limit, one that is too short, and places that are not released."""
    with serve(waiting=2) as server:
        texts: list = []
        threads = [start_request(server, texts, max_tokens=3) for _ in range(5)]  # 3 slots, 2 wait
        wait_until(lambda: len(server.worker.streams) == 5)
        with pytest.raises(openai.RateLimitError, match="; the limit is 5") as error:
            completion(server)
        assert error.value.response.headers["retry-after"] == "1"
        gate.set()
        for thread in threads:
            thread.join()
        assert texts == [rule_text("!", 3)[1:]] * 5
        assert completion(server, n=5, max_tokens=3).usage.completion_tokens == 15
        got = read_metrics(server)
        assert got['axis_requests_total{path="/v1/completions",status="429"}'] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_slots(serve, gate, engine, stream):
    """Catches a text that is still generated after its client disconnected. Its slot is free at the engine's next
    step, and waiting texts of the same request are removed."""
    with serve() as server:
        body = json.dumps(ASKED["completions"] | {"max_tokens": 22, "n": 4, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.sendall(head + body)
            wait_until(lambda: len(server.worker.streams) == 4)
        wait_until(lambda: not server.worker.streams)
        before = engine.running
        gate.set()
        assert completion(server, n=3, max_tokens=2).usage.completion_tokens == 6
        drawn = read_metrics(server)["axis_drawn_tokens_total"]
        assert drawn <= 6 + 3, f"a step of the {before} that ran"
    assert not any(engine.slots) and not engine.waiting


def test_a_request_ends_at_its_timeout(serve, gate):
    """Catches a client that waits forever, a stream that ends as if it were complete, and slots that are not freed."""
    with serve(timeout_s=0.3) as server:
        with pytest.raises(openai.APIStatusError, match=r"timeout after 0\.3 s") as error:
            completion(server)
        assert error.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"timeout after 0\.3 s"):
            [*completion(server, stream=True)]
        assert not server.worker.streams
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert slow.recv(99).startswith(b"HTTP/1.1 408 ")
        gate.set()
        assert completion(server, max_tokens=2).choices[0].text == rule_text("!", 2)[1:]


def test_clients_are_told_when_the_engine_fails(serve, engine, monkeypatch):
    """Catches clients that wait for a thread that has ended, and a server that continues without its engine."""

    def step():
        raise RuntimeError("out of memory")

    with serve() as server:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", step)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="error: RuntimeError: out of memory"):
                    completion(server)
        assert server.worker.failure
    while not engine.idle:  # finish the texts that were left in it
        engine.step()


# Prompts --------------------------------------------------------------------------------------------------------------


RANKS = {bytes([byte]): byte for byte in range(256)}
SPLITS_SPACES = tiktoken.Encoding(
    "bpe", pat_str=GPT2_PATTERN, mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": 256}
)


@pytest.mark.parametrize("encoding, text", [
    (SPLITS_SPACES, " " * 1_000_000), (WithSentinels(SPLITS_SPACES, 300), " " * 1_000_000),
    (WithSentinels(SPLITS_SPACES, 300), f"<extra_id_{'9' * 5000}>")])  # fmt: skip
def test_a_prompt_that_overflows_the_tokenizer_is_refused(encoding, text):
    """Catches tiktoken's panic, which is no Exception, and a number that Python does not convert."""
    for template in (None, Template("{{ messages[0].content }}", {})):
        model = ServedModel("rule", encoding, 24, template)
        for path, asked in (("completions", {"prompt": text}),
                            ("chat/completions", {"messages": [{"role": "user", "content": text}]})):  # fmt: skip
            with pytest.raises(RequestError) as error:
                model.parse_request(json.dumps(ASKED[path] | asked).encode(), path != "completions")
            assert error.value.status == 400


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 // 0 }}", "{% for x in 5 %}{% endfor %}"])
def test_a_template_that_fails_is_refused(source):
    """Catches a template whose own mistakes are an internal error."""
    model = ServedModel("rule", BYTES, 24, Template(source, {}))
    with pytest.raises(RequestError, match="messages: the model's chat template rejects them: ") as error:
        model.parse_request(json.dumps(ASKED["chat/completions"]).encode(), chat=True)
    assert error.value.status == 400


ODD = (None, "", "x", "\ud800", True, -1, 0, 1.5, float("inf"), 10**4000, [], {}, ["a"] * 5, [[]], [None], {"a": []},
       [{"role": [], "content": ""}], [{"role": "user", "content": [{"type": [], "text": 5}]}])  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
def test_any_value_of_any_parameter_is_parsed_or_refused(path):
    """Catches an internal error for a value of another type, in any parameter."""
    model, statuses = ServedModel("rule", BYTES, 24), set()
    for name in {*COMPLETION, *CHAT, *UNSUPPORTED, *IGNORED, "\ud800"}:
        for value in ODD:
            try:
                model.parse_request(json.dumps(ASKED[path] | {name: value}).encode(), path != "completions")
            except RequestError as error:
                statuses.add(error.status)
    assert statuses == {400, 404}
