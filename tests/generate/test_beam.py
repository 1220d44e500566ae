"""Beam search: the likeliest texts, against a search of all texts."""

import functools
import itertools
import json

import numpy as np
import pytest

from config import replace
from generate.beam import Beam, search
from generate.engine import Engine, Job
from generate.sampling import Request
from sharding import make_mesh
from tests.generate.models import CONFIGS, placed, rule_text
from tests.generate.test_cache import full_forward
from tests.generate.test_command import run

# 4 tokens, of which the last ends a text; its weights are larger than random ones, so that texts differ.
CFG = replace(CONFIGS["mla without query latent, dense, tied"], **{"model.tie_embeddings": False})
WORDS, END, PROMPT = 4, 3, [5, 1, 6, 2, 7]


@functools.cache
def parameters(mesh):
    params = placed(CFG, mesh)
    return params.replace(unembedding_DV=6 * params.unembedding_DV)


@functools.cache
def engine(mesh="data=1", slots=40):
    mesh = make_mesh(mesh)
    return Engine(CFG, parameters(mesh), mesh, vocabulary=WORDS, end=END, slots=slots, context=13, piece=3)


@functools.cache
def every_text(room):
    """All continuations of at most so many tokens with their log-probabilities, from whole rows read at once."""
    texts = [text for n in range(1, room + 1) for text in itertools.product(range(WORDS), repeat=n)
             if END not in text[:-1] and (n == room or text[-1] == END)]  # fmt: skip
    rows_BT = np.zeros((len(texts), len(PROMPT) + room), np.int32)
    for row_T, text in zip(rows_BT, texts, strict=True):
        row_T[: len(PROMPT) + len(text)] = [*PROMPT, *text]
    logits_BTV = np.float64(full_forward(CFG, parameters(make_mesh("data=1")), rows_BT))
    logprobs_BTV = logits_BTV - np.log(np.sum(np.exp(logits_BTV), axis=-1, keepdims=True))  # the rows past WORDS count
    ahead = len(PROMPT) - 1
    return [Beam(text, sum(logprobs_TV[ahead + n, token] for n, token in enumerate(text)), text[-1] == END)
            for text, logprobs_TV in zip(texts, logprobs_BTV, strict=True)]  # fmt: skip


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_a_search_wide_enough_finds_the_best_of_all_texts(penalty):
    """Catches a row that goes on from another's cache, a text that ended and goes on, or is forgotten, one whose score
    forgets its end, a length penalty that is multiplied, and tokens past the vocabulary."""
    want = sorted(every_text(3), key=lambda beam: -(beam.logprob / len(beam.tokens) ** penalty))
    got = search(engine(), PROMPT, width=40, room=3, penalty=penalty)
    assert len(want) == (1 + 3 + 9) + 27  # that end, and that do not
    assert [beam.tokens for beam in got] == [beam.tokens for beam in want]
    assert [beam.ended for beam in got] == [beam.ended for beam in want]
    np.testing.assert_allclose([b.logprob for b in got], [b.logprob for b in want], rtol=1e-4)  # float32
    np.testing.assert_allclose(got[7].score(penalty), got[7].logprob / len(got[7].tokens) ** penalty)


def test_one_beam_takes_the_likeliest_token_each_time():
    """Catches a search that goes on past the end of its only text, or keeps another than its likeliest."""
    ends = set()
    for first in range(8):
        prompt = [first, *PROMPT]
        alone = engine().submit(Job(prompt, Request(temperature=0), 7))
        while not engine().idle:
            engine().step()
        [found] = search(engine(), prompt, width=1, room=9)  # no more than 7 have room in 13 positions
        greedy = tuple(token.id for token in alone.tokens)
        assert found.tokens == greedy + (END,) * found.ended and found.ended == (alone.ended == "stop")
        ends.add(found.ended)
    assert ends == {True, False}, "all ended, or none: one of the two is not tested"


@pytest.mark.parametrize("mesh", ["data=2,context=2", "stage=2,tensor=2"])
def test_the_mesh_changes_where_beams_lie_not_what_they_find(mesh):
    """Catches a parent of another device that is sought here, slots or heads of another's row, and a program that is
    compiled for each step."""
    there = engine(mesh, slots=5)
    for first in range(8):
        got, want = (search(one, [first, *PROMPT], width=5, room=6) for one in (there, engine()))
        assert [beam.tokens for beam in got] == [beam.tokens for beam in want] and len(got) == 5
        np.testing.assert_allclose([b.logprob for b in got], [b.logprob for b in want], rtol=1e-4)  # float32
    assert len(there.decode_step.programs) == 1


def test_the_command_searches(run_directory):
    """Catches flags that do not reach the search, JSON without the other beams, and what is asked of beams in vain."""
    argv = [run_directory, "--prompt", "!", "--tokens", "6", "--beams", "3"]
    assert run(*argv)[:2] == (0, rule_text("!", 6) + "\n")
    status, out, _ = run(*argv, "--length_penalty", "2", "--json")
    said = json.loads(out)
    assert (status, said["prompt"], said["length_penalty"], len(said["beams"])) == (0, "!", 2, 3)
    best, second, _ = said["beams"]
    assert best["text"] == rule_text("!", 6) != second["text"] and best["score"] > second["score"]
    assert best["score"] == pytest.approx(best["logprob"] / 36) and best["ended"] == "length"
    said = "error: repetition_penalty=2.0: not with --beams 3, which rank whole texts\n"
    assert run(*argv, "--repetition_penalty", "2") == (2, "", said)
    assert run(*argv, "--samples", "2")[2].startswith("error: --samples 2: beams draw nothing")
