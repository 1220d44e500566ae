"""Tests of generation with an encoder-decoder and a prefix LM: cached decoding equals the model without a cache."""

import functools

import numpy as np
import pytest

import pipeline
import sharding
from architectures import declare
from config import preset, replace
from data import tokenizers
from generate import beam
from generate.engine import Engine, Job
from generate.request import Request, Settings
from generate.texts import Sampler, WithSentinels, prompt_ids
from tests import helpers
from utils import UserError

START, END = 256, 303
T5 = preset("t5_tiny")
PREFIX = preset("tiny", **{"model.n_experts": 0, "model.prefix_lm": True, "model.dense_prefix": 0, "model.n_layers": 2})
PROMPTS = [[int(x) for x in np.random.default_rng(n).integers(0, 250, n)] for n in (9, 17, 1)]


@functools.cache
def weights(cfg):
    return helpers.draw(declare(cfg.model))


@functools.cache
def reference(cfg):
    mesh = sharding.make_mesh("data=1")
    logits = pipeline.logits(replace(cfg, mesh="data=1"), mesh)
    return lambda batch: np.asarray(logits(weights(replace(cfg, mesh="data=1")), sharding.put(batch, mesh)))


def expected_logprobs(cfg, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities [n, V] of the tokens after a prompt, by the model without a cache."""
    T, S, arrays = cfg.data.seq_len, cfg.data.input_len, {}
    read = [START, *tokens] if S else [*prompt, *tokens]
    arrays["tokens_BT"] = np.zeros((1, T), np.int32)
    arrays["tokens_BT"][0, : len(read)] = read
    if S:
        row = np.arange(S)[None]
        arrays["encoder_tokens_BS"] = np.zeros((1, S), np.int32)
        arrays["encoder_tokens_BS"][0, : len(prompt)] = prompt
        arrays |= {"encoder_positions_BS": np.int32(row), "encoder_segments_BS": np.int32(row < len(prompt))}
    else:
        arrays["prefix_BT"] = np.int32(np.arange(T)[None] < len(prompt))
    logits_TV = reference(cfg)(arrays)[0][len(read) - len(tokens) - 1 :][: len(tokens)]
    top_T1 = logits_TV.max(-1, keepdims=True)
    return logits_TV - top_T1 - np.log(np.exp(logits_TV - top_T1).sum(-1, keepdims=True))


def engine(cfg, slots: int = 2, cache: str = "compute") -> Engine:
    context = cfg.data.input_len + 1 + cfg.data.seq_len if cfg.data.input_len else cfg.data.seq_len
    vocabulary = min(304, cfg.model.vocab_size)
    return Engine(cfg, weights(cfg), sharding.make_mesh(cfg.mesh), vocabulary=vocabulary, end=vocabulary - 1,
                  slots=slots, context=context, piece=4, cache=cache)  # fmt: skip


@pytest.mark.parametrize("cfg, mesh", [
    (T5, "data=1"), pytest.param(T5, "stage=2,tensor=2", marks=pytest.mark.repeat), (T5, "data=2"), (PREFIX, "data=1"),
])  # fmt: skip
def test_cached_decoding_equals_the_model_without_a_cache(cfg, mesh):
    """Catches inputs read in chunks or causally, another row's inputs, positions counted from the prompt, and a bias
    that is missing in the cache."""
    cfg = replace(cfg, mesh=mesh)
    prompts = PROMPTS if cfg.data.input_len else [[START, *p[:8]] for p in PROMPTS]
    machine = engine(cfg)
    start = [START] if cfg.data.input_len else []
    jobs = [machine.submit(Job([*prompt, *start], Settings(temperature=0), 6)) for prompt in prompts]
    while not machine.idle:
        machine.step()
    for prompt, job in zip(prompts, jobs, strict=True):
        tokens = [token.id for token in job.tokens]
        logprobs_TV = expected_logprobs(cfg, prompt, tokens)
        assert tokens == [int(x) for x in logprobs_TV[:, : machine.vocabulary].argmax(-1)]
        got = [token.logprob for token in job.tokens]
        np.testing.assert_allclose(got, logprobs_TV[np.arange(len(tokens)), tokens], atol=1e-4)


def test_beam_search_finds_the_most_likely_text():
    """Catches beams that lose their inputs when rows are reordered."""
    prompt = PROMPTS[0]
    found = beam.search(engine(T5, slots=3), [*prompt, START], width=3, room=4)
    for one in found:
        logprobs_TV = expected_logprobs(T5, prompt, [*one.tokens])
        assert one.logprob == pytest.approx(logprobs_TV[np.arange(len(one.tokens)), one.tokens].sum(), abs=1e-3)
    greedy = beam.search(engine(T5, slots=1), [*prompt, START], width=1, room=4)[0]
    assert found[0].logprob >= greedy.logprob and len({one.tokens for one in found}) == 3


def test_sentinels_are_text():
    """Catches sentinels that a prompt cannot name, or that stop the decoder of texts."""
    encoding = WithSentinels(tokenizers.load("bytes"), 304)
    ids = encoding.encode_ordinary("a<extra_id_0>b<extra_id_12>")
    assert ids == [97, 303, 98, 291]
    assert b"".join(map(encoding.decode_single_token_bytes, ids)) == b"a<extra_id_0>b<extra_id_12>"
    assert encoding.encode_ordinary("<extra_id_90>") == list(b"<extra_id_90>")  # the table has no such id
    drawable_V = np.asarray(Sampler(T5, weights(T5), tokenizers.load("bytes")).engine(1, 41, 41).drawable_V)
    assert len(drawable_V) == 304 and drawable_V[257:].all()  # the model can generate them


def test_masked_spans_are_filled_in():
    """Catches answers after the wrong sentinel."""
    sampler = Sampler(T5, None, tokenizers.load("bytes"))
    answer = "<extra_id_0>, b<extra_id_1>a + b"
    assert sampler.whole_text("f(a<extra_id_0>): <extra_id_1>.", answer) == "f(a, b): a + b."
    assert sampler.whole_text("Translate this.", "Done.") == "Done."
    assert Sampler(PREFIX, None, tokenizers.load("bytes")).whole_text("a", "b") == "ab"


def test_a_prompt_that_does_not_fit_is_refused():
    """Catches inputs that are cut without a word."""
    encoding = tokenizers.load("bytes")
    assert prompt_ids(encoding, "ab", 12, 3) == [97, 98, 256, 256]
    with pytest.raises(UserError, match=r"data\.input_len=3; shorten the prompt to at most 2 tokens"):
        prompt_ids(encoding, "abc", 12, 3)
    with pytest.raises(UserError, match="a draft needs a causal decoder"):
        Sampler(T5, None, encoding).speculate(Request("a"), Sampler(T5, None, encoding), 2)
