"""Requests and answers: texts are tokenized as the harness does it, and a kill loses no answer."""

import dataclasses
import json

import jax
import pytest

import model
import sharding
from config import preset, replace
from data import tokenizers
from evaluate.answering import Answerer
from evaluate.answers import Answers
from generate import Request
from generate.runs import Run
from tests import helpers
from utils import UserError

CFG = preset("tiny", **{"data.seq_len": 30})
MERGES = [b"ca", b"cat", b" cat", b"at"]
CAT, SPACE_CAT = 257, 258


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights that never ends a text, and a tokenizer with bytes and a few merges."""
    ranks = tmp_path_factory.mktemp("answers") / "few.bpe"
    with ranks.open("wb") as file:
        tokens = [bytes([byte]) for byte in range(256)] + MERGES
        tokenizers.write_ranks(file, {token: rank for rank, token in enumerate(tokens)})
    encoding = tokenizers.load(f"bpe:{ranks}")
    params = helpers.draw(model.declare(CFG.model), seed=1)
    params.unembedding_DV[:, encoding.eot_token] = 0
    mesh = sharding.make_mesh("", jax.local_devices()[:1])
    return Run("few", CFG, jax.device_put(params), mesh, encoding, None, None, "digest")


@pytest.fixture(scope="module")
def answerer(run):
    answerer = Answerer(run, rows=2)
    answerer.rows = 4  # texts generated at a time
    return answerer


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "context, continuation, want",
    [
        ("a", " cat", ([97], [SPACE_CAT])),
        ("a ", "cat", ([97], [SPACE_CAT])),  # the space goes to the continuation
        ("a\n", "\ncat", ([97], [10, 10, CAT])),  # and so does a newline
        ("a", "cat", ([97], [CAT])),
        ("ca", "t at", ([256], [32, 259])),  # "cat" is one token, and only as many are cut off as "ca" has alone
        ("", "cat", ("end", [CAT])),
        (" ", "cat", ("end", [SPACE_CAT])),
        ("a<|endoftext|>", "b", ([97, *b"<|endoftext|>"], [98])),
    ],
)
def test_a_pair_is_cut_as_the_harness_cuts_it(context, continuation, want, answerer):
    """Catches a continuation that is tokenized separately, spaces left in the context, and a pair without context.

    For "ca" + "t at" the harness removes as many tokens as the context has alone.
    """
    end = answerer.encoding.eot_token
    assert answerer.encode_pair(context, continuation) == ([end] if want[0] == "end" else want[0], want[1])


def test_a_token_before_each_text(run):
    """Catches a BOS token that is also put before continuations, or is missing without a context."""
    with_bos = Answerer(run, bos=tokenizers.END_OF_TEXT)
    end = run.encoding.eot_token
    assert with_bos.encode_pair("a ", "cat") == ([end, 97], [SPACE_CAT])
    assert with_bos.encode_pair("", "cat") == ([end], [CAT])
    with pytest.raises(UserError, match=r"--bos <s>: not a special token of 'bpe:\S+'; it has <\|endoftext\|>"):
        Answerer(run, bos="<s>")


def test_a_continuation_without_a_token_is_refused(answerer):
    """Catches a probability of 1 for a continuation without tokens."""
    with pytest.raises(UserError, match="cannot score 't' after 'ca': one token spans both"):
        answerer.encode_pair("ca", "t")


# Answers --------------------------------------------------------------------------------------------------------------

ASKED = [("a cat", " cat"), ("", "at"), ("a cat", " cat"), ("abc ", "cat cat"), ("b", "c\n\n"), ("a cat, a cat", " b")]


class Killed(Exception):
    pass


def kill_after(answerer, batches):
    """Make the answerer raise Killed after this many batches."""
    left = iter(range(batches))

    def of_batch(*rows, run=answerer.scorer.score_batch):
        if next(left, None) is None:
            raise Killed
        return run(*rows)

    answerer.scorer.score_batch = of_batch


def test_a_kill_loses_no_answer(run, answerer, tmp_path):
    """Catches an answer that is computed twice or mixed up, and an incomplete row that spoils the rest."""
    want = answerer.loglikelihood(ASKED)
    file = tmp_path / "answers.jsonl"
    first = Answerer(run, rows=2, cache=str(file))
    first.scorer.scores = answerer.scorer.scores
    kill_after(first, 1)
    with pytest.raises(Killed):
        first.loglikelihood(ASKED)
    assert len(file.read_text().splitlines()) == 1 + 2
    file.write_text(file.read_text() + '{"key": "ab')

    again = Answerer(run, rows=2, cache=str(file))
    again.scorer.scores = answerer.scorer.scores
    kill_after(again, 2)  # 3 of 5 distinct requests are left
    assert again.loglikelihood(ASKED) == want
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    assert len(rows) == 1 + 5 == 1 + len({row.get("key") for row in rows[1:]})
    kill_after(again, 0)
    assert again.loglikelihood(ASKED[::-1]) == want[::-1]


@pytest.mark.parametrize(
    "changed, why",
    [(dict(digest="other"), "weights"), (dict(cfg=replace(CFG, **{"data.seq_len": 18})), "seq_len")],
)
def test_answers_of_another_model_are_refused(changed, why, run, tmp_path):
    """Catches results of another checkpoint in the table."""
    file = tmp_path / "answers.jsonl"
    Answerer(run, cache=str(file))
    with pytest.raises(UserError, match=rf"--cache {file} has results of another evaluation \({why}"):
        Answerer(dataclasses.replace(run, **changed), cache=str(file))
    file.write_text('{"a": 1}\n')
    with pytest.raises(UserError, match=rf"--cache {file} has no results of this kind; use another file"):
        Answerer(run, cache=str(file))


# Texts ----------------------------------------------------------------------------------------------------------------


CONTEXTS = ["a cat", "b", "at" * 40]  # always three at a time: one shape


def test_texts_end_at_stops_and_at_their_length(answerer):
    """Catches a text that includes its prompt, or continues past a stop; answers in the order of the batches; and a
    context that leaves no room."""
    how = dict(tokens=7, temperature=0.0)
    fitted = ["a cat", "b", "at" * (30 - 7 - 1)]
    whole = [one.text for one in answerer.sampler.run_requests([Request(prompt=prompt, **how) for prompt in fitted])]
    asked = lambda **more: [(context, how | more) for context in CONTEXTS]
    assert answerer.generate_texts(asked()) == whole and len(set(whole)) == 3
    first = whole[0][2]
    assert answerer.generate_texts(asked(stop=(whole[0][4:], first)))[0] == whole[0].partition(first)[0] != whole[0]
    with pytest.raises(UserError, match=r"up to 29 new tokens, which do not fit in data.seq_len=30; raise --seq_len"):
        answerer.generate_texts([("a", how | {"tokens": 29})])


def test_repeated_requests_are_sampled_separately(answerer, monkeypatch):
    """Catches one sample that is counted several times, and samples that depend on the order of requests."""
    how = {"tokens": 7, "temperature": 2.0, "top_k": 0, "top_p": 1.0}
    _, b, long = [(context, how) for context in CONTEXTS]
    found = answer_again(answerer, monkeypatch, [long, b, long])
    assert len(set(found)) == 3
    assert answer_again(answerer, monkeypatch, [b, long, long]) == [found[1], found[0], found[2]]


def answer_again(answerer, monkeypatch, requests):
    monkeypatch.setattr(answerer, "answers", Answers("", {}))
    return answerer.generate_texts(requests)
