"""Speculative decoding: with any draft, texts have the distribution of the model alone."""

import copy
import functools
import json

import jax
import numpy as np
import pytest
import tiktoken

from config import replace
from generate.engine import Engine, Job
from generate.request import Request
from generate.sampling import BatchSettings, drawable_ids, filter_logits
from generate.speculative import propose, speculate, verify
from generate.texts import Sampler
from sharding import make_mesh
from tests import helpers
from tests.generate.models import CONFIGS, EOT, one_device, placed, rule_text
from tests.generate.test_command import run
from utils import UserError

V, K, N = 5, 2, 20_000


@functools.cache
def tables():
    """Return the logits after each of V tokens, for a model and a draft that rarely agree."""
    return np.float32(np.random.default_rng(3).normal(0, 0.8, (2, V, V)))


def one_round(seed, settings):
    """Propose and verify K tokens after token 0, for a model in which a token only depends on the previous one."""
    model_VV, draft_VV = tables()
    common = dict(drawable_V=drawable_ids(V), mesh=one_device())
    asked = jax.tree.map(np.asarray, BatchSettings.from_rows([(settings, 0)], V))
    asked = [asked.replace(seed=seed[None], count=np.int32([n])) for n in range(K)]
    seen_1V = seen = np.arange(V)[None] == 0
    tokens, q = [jax.numpy.zeros((), int)], []
    for n in range(K):
        token_11, q_V, seen = propose(jax.numpy.asarray(draft_VV)[tokens[-1]][None], asked[n], seen, **common)
        tokens.append(token_11[0, 0]), q.append(q_V)
    logits_1mV = jax.numpy.asarray(model_VV)[jax.numpy.stack(tokens)][None]
    count, chosen, _ = verify(logits_1mV, jax.numpy.stack(tokens[1:]), jax.numpy.stack(q), asked[0], seen_1V, **common)
    return count, chosen.token_b


def np_drawn_from(settings, last, seen):
    """Return the model's probability of each token, using `filter_logits`, which test_sampling.py tests."""
    asked = BatchSettings.from_rows([(settings, 0)], V)
    logits_V = tables()[0][last]
    less_V = np.where(seen, np.where(logits_V > 0, logits_V / settings.repetition_penalty,
                                     logits_V * settings.repetition_penalty), logits_V)  # fmt: skip
    return helpers.np_softmax(np.float64(filter_logits(less_V[None], asked)[0]))


def chi_square(count_V, probability_V):
    """Return the chi-square statistic of counts against probabilities, and its degrees of freedom."""
    kept_V = probability_V > 0
    assert not np.any(count_V[~kept_V]), "an excluded token was drawn"
    want_V = np.sum(count_V) * probability_V[kept_V]
    return np.sum((count_V[kept_V] - want_V) ** 2 / want_V), np.sum(kept_V) - 1


SETTINGS = {
    "all tokens": Request(temperature=0.8, top_k=0, top_p=1.0),
    "filters and penalty": Request(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.8),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_text_is_drawn_from_the_models_distribution(name):
    """Catches proposals that are accepted too often, replacements drawn from p instead of the positive part of p - q,
    noise that is used twice, distributions before the filters, and a penalty without the proposed tokens."""
    settings = SETTINGS[name]
    count_N, token_Nm = jax.device_get(jax.jit(jax.vmap(lambda seed: one_round(seed, settings)))(np.arange(N)))
    assert {*count_N} == {*range(1, K + 2)}, "the number of accepted tokens does not vary"
    limits = (0, 10.83, 13.82, 16.27, 18.47)  # by degrees of freedom: a fair draw exceeds it once in 1000
    seen = np.arange(V) == 0
    cases = [(token_Nm[:, 0], np_drawn_from(settings, 0, seen))]
    for first in range(V):  # tokens that follow it if it was accepted
        after = token_Nm[(token_Nm[:, 0] == first) & (count_N > 1), 1]
        if len(after) > 500:
            cases.append((after, np_drawn_from(settings, first, seen | (np.arange(V) == first))))
    assert len(cases) > 2
    for tokens, probability_V in cases:
        value, df = chi_square(np.bincount(tokens, minlength=V), probability_V)
        assert value <= limits[df]


# Whole models ---------------------------------------------------------------------------------------------------------

DENSE = replace(CONFIGS["mla without query latent, dense, tied"], **{"model.tie_embeddings": False})
SMALL = replace(DENSE, **{"model.n_layers": 1, "model.d_ff": 40})
MESH = "data=2,context=2"


@functools.cache
def engine(cfg=DENSE, mesh="data=1"):
    mesh = make_mesh(mesh)
    return Engine(cfg, placed(cfg, mesh), mesh, vocabulary=EOT + 1, end=EOT, slots=1, context=24, piece=4)


def job(prompt="abcde", room=12, **settings):
    return Job([EOT, *prompt.encode()], Request(**dict(temperature=0) | settings), room)


@functools.cache
def run_alone(prompt="abcde", room=12, cfg=DENSE, **settings):
    one = engine(cfg).submit(job(prompt, room, **settings))
    while not engine(cfg).idle:
        engine(cfg).step()
    return one


def assert_same(got, want):
    assert [token.id for token in got.tokens] == [token.id for token in want.tokens] and got.ended == want.ended
    for one, other in zip(got.tokens, want.tokens, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [id for id, _ in one.alternatives] == [id for id, _ in other.alternatives]


@pytest.mark.parametrize("window, mesh, room", [("", MESH, 12), ("5:2", "context=2", 18)])
def test_greedy_text_equals_that_of_the_model_alone(window, mesh, room):
    """Catches a wrong proposal that is accepted, a position off by one, attention to cache entries of rejected tokens,
    or of those that they replaced in a rolling cache, log-probabilities of other tokens, a text that is too long, and a
    program compiled for each round."""
    cfg, small = (replace(one, **{"model.window": window}) for one in (DENSE, SMALL))
    model, draft, k = engine(cfg, mesh), engine(small, mesh), 3
    programs = lambda: [len(one.decode_step.programs) for one in (model, draft)]
    counts = []
    for prompt in ("abcde", "x"):
        for settings in (dict(logprobs=3), dict(repetition_penalty=3.0)):
            one = job(prompt, room, **settings)
            rounds = speculate(model, draft, one, k)
            assert_same(one, run_alone(prompt, room, cfg, **settings))
            assert 1 <= rounds.tokens_per_step < k + 1 and rounds.tokens == room - 1
        counts.append(programs())
    assert counts[0] == counts[-1]


def test_a_draft_equal_to_the_model_is_always_accepted():
    """Catches a rejected proposal with equal probability, and a draft whose cache lacks accepted tokens."""
    model, k = engine(), 4
    draft = copy.copy(model)  # shares the compiled functions
    draft.cache, draft.seen_bV, draft.slots = jax.tree.map(jax.numpy.copy, model.cache), model.seen_bV.copy(), [None]
    draft.cached_prompts = [[]]
    for settings in (dict(), dict(temperature=0.7, seed=5), dict(temperature=1.3, top_p=0.8, repetition_penalty=1.5)):
        one = job("abc", 1 + 3 * (k + 1), **settings)
        rounds = speculate(model, draft, one, k)
        assert (rounds.steps, rounds.tokens, rounds.tokens_per_step) == (3, 3 * (k + 1), k + 1)
    one = job("abc", 16, repetition_penalty=50.0)
    speculate(model, draft, one, k)
    assert_same(one, run_alone("abc", 16, repetition_penalty=50.0))
    texts = [job("abc", 16, temperature=0.7, seed=seed) for seed in (5, 5, 6)]
    drawn = [[token.id for token in one.tokens] for one in texts if speculate(model, draft, one, k)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_speculation_stops_at_end_of_text():
    """Catches tokens after end of text, and an end-of-text token in the text."""
    want = run_alone()
    end = want.tokens[6].id
    model, ended = engine(DENSE, MESH), []
    first = next(n for n, token in enumerate(want.tokens) if token.id == end)
    one = job()
    try:
        model.end = end
        speculate(model, engine(SMALL, MESH), one, 3, on_token=lambda: ended.append(one.ended))
    finally:
        model.end = EOT
    assert [token.id for token in one.tokens] == [token.id for token in want.tokens[:first]]
    assert one.ended == "stop" and ended == [""] * first + ["stop"]


def test_the_command_speculates(run_directory, tmp_path):
    """Catches a draft that is not used, a count that is not printed, and flags that do not work together."""
    argv = [run_directory, "--prompt", "!", "--tokens", "13", "--temperature", "0", "--draft"]
    status, out, err = run(*argv, run_directory, "--draft_tokens", "3")
    assert (status, out) == (0, rule_text("!", 13) + "\n")
    assert err.splitlines()[-1] == "note: 4.00 tokens per step in 3 steps, 3 proposed per step"
    status, out, _ = run(*argv, run_directory, "--draft_tokens", "3", "--json")
    printed = json.loads(out)
    assert (printed["text"], printed["tokens_per_step"], printed["ended"]) == (rule_text("!", 13), 4, "length")
    assert run(*argv, run_directory, "--beams", "2")[2].startswith("error: --beams 2 and --draft ")


def test_a_draft_of_another_tokenizer_is_refused(rule):
    """Catches ids of one tokenizer that are read as those of another."""
    ranks = {bytes([255 - byte]): byte for byte in range(256)}
    other = tiktoken.Encoding("backwards", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|end|>": 256})
    with pytest.raises(UserError, match=r"tokenizer, 'bytes' \(257 tokens\), but has 'backwards'"):
        rule.speculate(Request("!"), Sampler(rule.cfg, rule.params, other), 3)
