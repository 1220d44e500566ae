"""Requests by OpenAI's own client to a server on loopback."""

import json
from types import SimpleNamespace

import pytest

from tests import extras

pytestmark = extras.require("serve")

import tiktoken

from generate.engine import Token
from generate.request import Request
from generate.texts import token_text
from serve import template
from serve.protocol import Choice, RequestError, ServedModel, chat_text
from tests.generate.models import BYTES, EOT, follow, rule_text
from utils import UserError


def completion(server, **asked):
    return server.client.completions.create(**{"model": "rule", "prompt": "!", "temperature": 0} | asked)


def test_a_completion(server):
    """Catches a prompt in the answer, a wrong length, and wrong token counts."""
    got = completion(server, max_tokens=5)
    assert (got.object, got.model, got.id[:5]) == ("text_completion", "rule", "cmpl-")
    [choice] = got.choices
    assert (choice.text, choice.finish_reason, choice.index) == (rule_text("!", 5)[1:], "length", 0)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (2, 5, 7)
    assert len(completion(server).choices[0].text) == 16, "the protocol's default"


def test_choices_are_in_the_order_of_their_prompts(server):
    """Catches choices in the wrong order, identical samples, and a seed that does not reproduce its text."""
    got = completion(server, prompt=["!", "a", "Nx"], max_tokens=4)
    assert [choice.text for choice in got.choices] == [rule_text(prompt, 4)[-4:] for prompt in ("!", "a", "x")]
    ids = completion(server, prompt=[[EOT, *b"a"], [*b"!c"]], max_tokens=4)
    assert [choice.text for choice in ids.choices] == [rule_text(prompt, 4)[1:] for prompt in "ac"]
    assert completion(server, prompt=[EOT, *b"a"], max_tokens=4).choices[0].text == ids.choices[0].text
    drawn = lambda **more: [one.text for one in completion(server, prompt=["!", "b"], n=3, max_tokens=6, temperature=9,
                                                           **more).choices]  # fmt: skip
    first = drawn(seed=4)
    assert len({*first}) == 6 and drawn(seed=4) == first != drawn(seed=5)
    assert drawn() != drawn(), "without a seed"


def test_settings_reach_the_engine(rule, server):
    """Catches a setting that does not reach the engine, from the protocol or in addition to it."""
    asked = dict(temperature=3.0, seed=3, top_p=0.9)
    extras = dict(top_k=7, min_p=0.01, repetition_penalty=1.5)
    got = completion(server, prompt="ab", max_tokens=9, **asked, extra_body=extras).choices[0].text
    assert got == rule.run_requests([Request("ab", tokens=9, **asked, **extras)])[0].text
    for name in (*asked, *extras):
        neutral = {"temperature": 0, "seed": 4, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}[name]
        other = rule.run_requests([Request("ab", tokens=20, **asked | extras | {name: neutral})])[0].text
        mine = completion(server, prompt="ab", max_tokens=20, extra_body=asked | extras | {name: neutral})
        assert mine.choices[0].text == other, name


def test_streamed_pieces_add_up_to_the_text(server):
    """Catches pieces that are lost or sent twice, a missing finish_reason, and usage that was not requested."""
    chunks = [*completion(server, prompt=["!", "b"], max_tokens=7, stream=True)]
    for index, prompt in enumerate("!b"):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.text for choice in mine] == [*rule_text(prompt, 7)[1:]]
        assert [choice.finish_reason for choice in mine] == [None] * 6 + ["length"]
    assert {chunk.usage for chunk in chunks} == {None} and len({chunk.id for chunk in chunks}) == 1
    *chunks, last = completion(server, max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert {chunk.usage for chunk in chunks} == {None}
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 3)
    with server.client.completions.with_streaming_response.create(
        model="rule", prompt="!", max_tokens=2, stream=True
    ) as raw:  # fmt: skip
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert [*raw.iter_lines()][-2:] == ["data: [DONE]", ""]


def test_a_text_ends_before_a_stop(server):
    """Catches a stop, or its beginning, in the text, in its stream, or among its tokens."""
    for stop, n in (("-", 3), (["xyz", "*-0"], 2), (["-0!"], 12)):
        whole = completion(server, max_tokens=12, stop=stop, logprobs=0).choices[0]
        chunks = [chunk.choices[0] for chunk in completion(server, max_tokens=12, stop=stop, stream=True, logprobs=0)]
        assert whole.text == rule_text("!", n)[1:] == "".join(chunk.text for chunk in chunks)
        assert whole.finish_reason == chunks[-1].finish_reason == ("length" if n == 12 else "stop")
        tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
        assert "".join(whole.logprobs.tokens) == "".join(tokens) == whole.text


def test_log_probabilities(rule, server):
    """Catches log-probabilities of other tokens, and offsets that do not point into the text."""
    want = rule.run_requests([Request("→a", tokens=6, temperature=4, top_k=0, top_p=1, seed=2, logprobs=3)])[0]
    got = completion(server, prompt="→a", max_tokens=6, temperature=4, seed=2, logprobs=3).choices[0].logprobs
    assert got.token_logprobs == pytest.approx([token.logprob for token in want.tokens], abs=1e-5)
    assert [len(likeliest) for likeliest in got.top_logprobs] == [3] * 6
    assert max(got.top_logprobs[0], key=got.top_logprobs[0].get) == chr(follow(ord("a")))
    plain = completion(server, prompt="c", max_tokens=6, logprobs=0).choices[0]
    assert plain.logprobs.text_offset == [*range(6)] and plain.logprobs.top_logprobs is None
    assert completion(server, max_tokens=2).choices[0].logprobs is None

    chat = dict(model="rule", messages=[{"role": "user", "content": "x"}], max_tokens=3, temperature=0)
    [choice] = server.client.chat.completions.create(**chat, logprobs=True, top_logprobs=2).choices
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content and len(tokens) == 3
    for token in tokens:
        assert token.bytes == [*token.token.encode()]
        assert token.top_logprobs[0].token == token.token and token.top_logprobs[0].logprob == token.logprob
        assert len(token.top_logprobs) == 2
    [choice] = server.client.chat.completions.create(**chat, logprobs=True).choices
    assert [token.top_logprobs for token in choice.logprobs.content] == [[], [], []]


def test_a_prompt_is_echoed_with_its_log_probabilities(rule, server):
    """lm-evaluation-harness sends such requests. Catches scores that are off by one token or belong to another
    chunk of the prompt, a score for the first token, and a generated token although max_tokens is 0."""
    [want] = rule.run_requests([Request("ab", tokens=15, temperature=9, top_k=0, top_p=1, seed=2, logprobs=2)])
    ids = [EOT, *b"ab", *(token.id for token in want.tokens)]
    assert len(want.tokens) == 15 and len({*ids}) > 12
    asked = dict(prompt=[ids, "!$'"], echo=True, logprobs=2)
    scored, text = (choice.logprobs for choice in completion(server, **asked, max_tokens=0).choices)
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None and len(scored.tokens) == len(ids)
    # Float32: a whole piece at once, another order of sums.
    assert scored.token_logprobs[3:] == pytest.approx([token.logprob for token in want.tokens], abs=1e-3)
    for got, token in zip(scored.top_logprobs[3:], want.tokens, strict=True):
        assert [*got.values()] == pytest.approx([logprob for _, logprob in token.alternatives], abs=1e-3)
    assert text.tokens == ["!", "$", "'"] and text.text_offset == [0, 1, 2] and None not in text.token_logprobs
    assert text.token_logprobs[1:] == [max(likeliest.values()) for likeliest in text.top_logprobs[1:]], "it is the rule"
    got = completion(server, prompt="!$'", echo=True, logprobs=1, max_tokens=2)
    assert got.choices[0].text == rule_text("!", 4) == "".join(got.choices[0].logprobs.tokens)
    assert completion(server, prompt="!$", echo=True, max_tokens=2).choices[0].text == rule_text("!", 3)
    nothing = completion(server, max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == ("", "length")
    assert nothing.usage.completion_tokens == 0


def test_an_echo_includes_a_generated_end_of_text_token(server):
    """Catches a list of log-probabilities that is one shorter if a text ends at once: lm-evaluation-harness drops
    the last one as the generated token, and would score an answer without its last token."""
    # At this temperature noise decides, and with seed 24, the fifth text's, it selects end of text.
    asked = dict(prompt=["ab"] * 8, echo=True, logprobs=1, temperature=1000, seed=20)
    choices = completion(server, **asked, max_tokens=1).choices
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    for choice in choices:
        found, ended = choice.logprobs, choice.finish_reason == "stop"
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 3
        assert found.text_offset == [0, 1, 2] and found.tokens[:2] == ["a", "b"]
        assert (found.tokens[2] == token_text(BYTES, EOT)) == ended and (choice.text == "ab") == ended


def test_tokens_that_are_parts_of_characters_have_distinct_names(rule):
    """Catches two tokens with the same name: top_logprobs, keyed by name, would lose one."""
    names = [token_text(BYTES, byte) for byte in range(256)]
    assert len({*names}) == 256 and (names[0xE2], names[0x7F]) == (r"bytes:\xe2", "\x7f")
    likely = [(0xE2, -0.5), (0x97, -1.0), (ord("a"), -2.0)]
    text = SimpleNamespace(settings=Request(logprobs=3), end=None)
    asked = SimpleNamespace(texts=[text], chat=False, logprobs=True)
    choice = Choice(asked, 0, BYTES)
    choice.pending = [Token(0xE2, -0.5, likely), Token(ord("a"), -2.0, likely)]
    got = choice.to_json("\ufffda", "length", delta=False)["logprobs"]
    assert got["tokens"] == [r"bytes:\xe2", "a"] and got["text_offset"] == [0, 0]
    assert got["top_logprobs"] == [{r"bytes:\xe2": -0.5, r"bytes:\x97": -1.0, "a": -2.0}] * 2
    [content] = choice.chat_logprobs([(Token(0xE2, -0.5, likely), 0)])["content"]
    assert [one["bytes"] for one in content["top_logprobs"]] == [
        [0xE2], [0x97], [97]]  # fmt: skip


def test_a_chat(server):
    """Catches a template that differs from the page, roles that are lost, and a stream that differs from the answer."""
    assert chat_text([("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")]) == (
        "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Why?\n\nAssistant:"
    )
    body = json.dumps({"model": "rule", "messages": [{"role": "user", "content": "x"}], "stop": "y"})
    assert server.server.served.parse_request(body, chat=True).texts[0].settings.stop == ("y", "\nUser:")
    prompt = "User: x\n\nAssistant:"
    asked = dict(model="rule", temperature=0, max_completion_tokens=3)
    parts = [{"type": "text", "text": "x"}]
    for content in ("x", parts):
        got = server.client.chat.completions.create(**asked, messages=[{"role": "user", "content": content}])
        [choice] = got.choices
        assert (got.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
        assert choice.message.content == rule_text(":", 3)[1:]
        assert got.usage.prompt_tokens == 1 + len(prompt)
    asked["messages"] = [{"role": "user", "content": "x"}]
    chunks = [chunk.choices[0] for chunk in server.client.chat.completions.create(**asked, stream=True)]
    assert [chunk.delta.role for chunk in chunks] == ["assistant", None, None]
    assert "".join(chunk.delta.content for chunk in chunks) == rule_text(":", 3)[1:]
    assert chunks[-1].finish_reason == "length"
    del asked["max_completion_tokens"]
    rest = server.client.chat.completions.create(**asked)
    assert rest.usage.total_tokens == 24, "to the end of the context"


QWEN = """{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_chat_uses_the_template_of_the_model(tmp_path):
    """Catches a template that is ignored, special tokens encoded as plain text, an answer that continues past its
    end token, and a template that accesses this process."""
    assert template.find_template(str(tmp_path)) is None
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": [{"name": "default", "template": QWEN}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    start, end = 257, 258
    encoding = tiktoken.Encoding("q", pat_str="(?s:.+)", mergeable_ranks={bytes([byte]): byte for byte in range(256)},
                                 special_tokens={"<|endoftext|>": EOT, "<|im_start|>": start, "<|im_end|>": end}
                                 )  # fmt: skip
    served = ServedModel("q", encoding, 99, template.find_template(str(tmp_path / "none"), str(tmp_path)))
    ask = lambda *messages: served.parse_request(
        json.dumps({"model": "q", "messages": messages}).encode(), chat=True
    ).texts[0]
    one = ask({"role": "developer", "content": "Be brief. "}, {"role": "user", "content": "Hi <b>"})
    turn = lambda role, text: [start, *f"{role}\n{text}".encode(), end, *b"\n"]
    assert one.prompt == [*turn("system", "Be brief."), *turn("user", "Hi <b>"), start, *b"assistant\n"]
    assert one.settings.stop == ("<|im_end|>",)
    for source, why in (("{{ raise_exception('no') }}", "no$"), ("{{ ''.__class__.mro() }}", "is unsafe|is undefined")):
        (tmp_path / "chat_template.jinja").write_text(source)
        served = ServedModel("q", encoding, 99, template.find_template(str(tmp_path)))
        with pytest.raises(RequestError, match=f"messages: the model's chat template rejects them: .*{why}"):
            ask({"role": "user", "content": "x"})
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="cannot read the chat template: TemplateSyntaxError"):
        template.find_template(str(tmp_path))


def test_texts_begin_with_the_token_of_the_model():
    """Catches a converted model that reads texts after the end-of-text token, after which it has never seen one."""
    for start, first in ((None, EOT), (7, 7)):
        served = ServedModel("q", BYTES, 99, start=start)
        assert served.ids("ab") == [first, *b"ab"] and served.ids([97, 98]) == [97, 98]


def test_models_health_and_the_page(server):
    """Catches a page that needs a network, and a missing path that clients or probes request first."""
    assert [model.id for model in server.client.models.list()] == ["rule"]
    assert server.client.models.retrieve("rule").owned_by == "axis-by-axis"
    get = lambda path: server.client._client.get(server.url + path)
    assert get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    page = get("/")
    assert page.headers["content-type"].startswith("text/html") and "<h1>rule</h1>" in page.text
    assert "://" not in page.text and "src=" not in page.text


def test_metrics_count_requests_and_tokens(rule, engine, serve):
    """Catches a metric that never changes, one that counts twice, and labels that a client can create."""
    with serve() as server:
        values = lambda: read_metrics(server)
        assert values()["axis_drawn_tokens_total"] == 0
        completion(server, prompt=["!", "abc"], max_tokens=5)
        [*completion(server, max_tokens=3, stream=True)]
        for path in ("/made-up", "/v1/" + "x" * 40):
            assert server.client._client.get(server.url + path).status_code == 404
        got = values()
    assert got["axis_prompt_tokens_total"] == 2 + 4 + 2 and got["axis_drawn_tokens_total"] == 5 + 5 + 3
    assert got['axis_requests_total{path="/v1/completions",status="200"}'] == 2
    assert got['axis_requests_total{path="other",status="404"}'] == 2
    assert got["axis_first_token_seconds_count"] == 3 and got["axis_token_seconds_count"] == 4 + 4 + 2
    assert got["axis_running_texts"] == got["axis_waiting_texts"] == 0
    assert 0 < got["axis_first_token_seconds_sum"] < 60


def read_metrics(server) -> dict[str, float]:
    lines = server.client._client.get(server.url + "/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_json_has_no_infinity():
    """Catches an answer that is not valid JSON because the model's weights are broken."""
    from serve.protocol import _finite

    values = [_finite(x) for x in (-float("inf"), float("nan"), -1.5)]
    assert json.loads(json.dumps(values, allow_nan=False)) == [-9999.0, -9999.0, -1.5]
