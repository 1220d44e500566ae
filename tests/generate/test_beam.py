"""Beam search compared with an exhaustive search of all texts."""

import functools
import itertools
import json

import numpy as np
import pytest

from config import replace
from generate.beam import Beam, search
from generate.engine import Engine, Job
from generate.request import Request
from sharding import make_mesh
from tests.generate.models import CONFIGS, placed, rule_text
from tests.generate.test_cache import full_forward
from tests.generate.test_command import run

# 4 tokens, the last of which ends a text. The unembedding is scaled up so that texts differ.
CFG = replace(CONFIGS["mla without query latent, dense, tied"], **{"model.tie_embeddings": False})
WINDOWS = replace(CFG, **{"model.window": "3"})  # 6 slots
WORDS, END, PROMPT = 4, 3, [5, 1, 6, 2, 7]


@functools.cache
def parameters(mesh):
    params = placed(CFG, mesh)
    return params.replace(unembedding_DV=6 * params.unembedding_DV)


@functools.cache
def engine(mesh="data=1", slots=40, cfg=CFG):
    mesh = make_mesh(mesh)
    return Engine(cfg, parameters(mesh), mesh, vocabulary=WORDS, end=END, slots=slots, context=13, piece=3)


@functools.cache
def every_text(room, cfg=CFG):
    """Return all continuations of at most `room` tokens, with log-probabilities from a full forward pass."""
    texts = [text for n in range(1, room + 1) for text in itertools.product(range(WORDS), repeat=n)
             if END not in text[:-1] and (n == room or text[-1] == END)]  # fmt: skip
    rows_BT = np.zeros((len(texts), len(PROMPT) + room), np.int32)
    for row_T, text in zip(rows_BT, texts, strict=True):
        row_T[: len(PROMPT) + len(text)] = [*PROMPT, *text]
    logits_BTV = np.float64(full_forward(cfg, parameters(make_mesh("data=1")), rows_BT))
    logprobs_BTV = logits_BTV - np.log(np.sum(np.exp(logits_BTV), axis=-1, keepdims=True))  # the rows past WORDS count
    ahead = len(PROMPT) - 1
    return [Beam(text, sum(logprobs_TV[ahead + n, token] for n, token in enumerate(text)), text[-1] == END)
            for text, logprobs_TV in zip(texts, logprobs_BTV, strict=True)]  # fmt: skip


@pytest.mark.parametrize("penalty, cfg", [(0.0, CFG), (1.0, CFG), (2.5, CFG), (1.0, WINDOWS)])
def test_a_search_wide_enough_finds_the_best_of_all_texts(penalty, cfg):
    """Catches a row that continues from the wrong cache row, an ended text that continues or is lost, a score without
    the end token, a length penalty that multiplies, and tokens past the vocabulary."""
    want = sorted(every_text(3, cfg), key=lambda beam: -(beam.logprob / len(beam.tokens) ** penalty))
    got = search(engine(cfg=cfg), PROMPT, width=40, room=3, penalty=penalty)
    assert len(want) == (1 + 3 + 9) + 27  # texts that end, and texts that do not
    assert [beam.tokens for beam in got] == [beam.tokens for beam in want]
    assert [beam.ended for beam in got] == [beam.ended for beam in want]
    np.testing.assert_allclose([b.logprob for b in got], [b.logprob for b in want], rtol=1e-4)  # float32
    np.testing.assert_allclose(got[7].score(penalty), got[7].logprob / len(got[7].tokens) ** penalty)


def test_one_beam_is_greedy_decoding():
    """Catches a search that continues past the end of its only text, or does not keep the most likely one."""
    ends = set()
    for first in range(8):
        prompt = [first, *PROMPT]
        alone = engine().submit(Job(prompt, Request(temperature=0), 7))
        while not engine().idle:
            engine().step()
        [found] = search(engine(), prompt, width=1, room=9)  # 13 positions have room for 7 tokens
        greedy = tuple(token.id for token in alone.tokens)
        assert found.tokens == greedy + (END,) * found.ended and found.ended == (alone.ended == "stop")
        ends.add(found.ended)
    assert ends == {True, False}, "all texts ended, or none did: one case is not tested"


@pytest.mark.parametrize("mesh", ["data=2,context=2", "stage=2,tensor=2"])
def test_beam_search_is_the_same_on_every_mesh(mesh):
    """Catches a parent on another device that is looked up locally, slots or heads of another row, and a program that
    is compiled for each step."""
    there = engine(mesh, slots=5)
    for first in range(8):
        got, want = (search(one, [first, *PROMPT], width=5, room=6) for one in (there, engine()))
        assert [beam.tokens for beam in got] == [beam.tokens for beam in want] and len(got) == 5
        np.testing.assert_allclose([b.logprob for b in got], [b.logprob for b in want], rtol=1e-4)  # float32
    assert len(there.decode_step.programs) == 1


def test_the_command_runs_beam_search(run_directory):
    """Catches flags that do not reach the search, JSON without the other beams, and flags that beams ignore."""
    argv = [run_directory, "--prompt", "!", "--tokens", "6", "--beams", "3"]
    assert run(*argv)[:2] == (0, rule_text("!", 6) + "\n")
    status, out, _ = run(*argv, "--length_penalty", "2", "--json")
    printed = json.loads(out)
    assert (status, printed["prompt"], printed["length_penalty"], len(printed["beams"])) == (0, "!", 2, 3)
    best, second, _ = printed["beams"]
    assert best["text"] == rule_text("!", 6) != second["text"] and best["score"] > second["score"]
    assert best["score"] == pytest.approx(best["logprob"] / 36) and best["ended"] == "length"
    error = "error: repetition_penalty=2.0 does not work with --beams 3; leave it out\n"
    assert run(*argv, "--repetition_penalty", "2") == (2, "", error)
    assert run(*argv, "--samples", "2")[2].startswith("error: --samples 2: beam search does not sample")
