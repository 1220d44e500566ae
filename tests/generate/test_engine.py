"""Continuous batching: requests do not affect each other, and nothing is compiled again."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import sharding
from generate.engine import Engine, Job
from generate.request import Request
from tests.generate.models import CONFIGS, EOT, V, one_device, placed
from utils import UserError

MOE, WINDOWS = CONFIGS["tiny"], CONFIGS["gqa, windows and sinks"]


@functools.cache
def engine(mesh="", cfg=MOE):
    """An engine with three slots of 24 tokens (four on two devices) and prefill chunks of 5 tokens."""
    mesh = sharding.make_mesh(mesh) if mesh else one_device()
    return Engine(cfg, placed(cfg, mesh), mesh, vocabulary=V, end=EOT, slots=3, context=24, piece=5, prefill_tokens=5)


def job(prompt: str, room: int, **settings) -> Job:
    return Job([EOT, *prompt.encode()], Request(**settings), room)


def run_all(*jobs: Job, of=None) -> list[Job]:
    of = of or engine()
    for one in jobs:
        of.submit(one)
    while not of.idle:
        of.step()
    return [*jobs]


def drawn_tokens(one: Job):
    return [(token.id, token.logprob, token.alternatives) for token in one.tokens]


ASKED = [
    ("abcde", 12, dict(temperature=1.5, top_k=0, top_p=1.0, seed=3)),
    ("bcdefghijklmn", 8, dict(temperature=0, seed=3, logprobs=3)),
    ("tuv", 9, dict(temperature=2.0, top_k=4, top_p=0.9, seed=9)),
    ("x", 3, dict(temperature=0, repetition_penalty=5.0)),
    ("qrstuvwxy", 14, dict(temperature=1.0, min_p=0.01, seed=-1)),
]


def test_a_request_is_independent_of_its_batch():
    """Catches settings applied to another row, noise keyed by the row number, attention to padding or to an earlier
    request of the slot, prompt chunks whose size depends on other requests, and experts whose sums depend on them.
    Tokens and log-probabilities are bitwise equal."""
    asked = lambda: [job(prompt, room, **settings) for prompt, room, settings in ASKED]
    alone = [drawn_tokens(run_all(one)[0]) for one in asked()]
    assert [len(tokens) for tokens in alone] == [12, 8, 9, 3, 14]
    assert [drawn_tokens(one) for one in run_all(*asked())] == alone
    assert [drawn_tokens(one) for one in run_all(*asked()[::-1])] == alone[::-1]
    other_seed = dataclasses.replace(Request(**ASKED[0][2]), seed=4)
    assert drawn_tokens(run_all(Job([EOT, *b"abcde"], other_seed, 12))[0]) != alone[0]


# In a rolling cache, the fourth sample finds only rows that are 2 or 3 tokens past the prompt, and is the new source.
@pytest.mark.parametrize("mesh, cfg, pieces", [("", MOE, 3 + 4 * 1), ("data=2", MOE, 3 + 1 + 1),
                                               ("", WINDOWS, 3 + 2 * 1 + 3 + 1)])  # fmt: skip
def test_samples_of_a_prompt_share_its_prefill(mesh, cfg, pieces, monkeypatch):
    """Catches a prompt of 15 tokens that is prefilled for each of 5 samples, in 15 chunks; a row copied from another
    device, or before it is complete; a copy of the last token, which leaves no logits to draw from; and entries of
    another prompt or of generated tokens, which may have replaced the end of a prefix. Results are bitwise equal."""
    one, calls = engine(mesh, cfg), []
    samples = lambda: [job("abcdefghijklmn", 4, temperature=2.0, top_k=0, seed=seed) for seed in range(5)]
    others = lambda: [job("abcdefghijk", 6), job("abcdexghijklmn", 5, temperature=0), job("abcd", 3)]
    alone = []
    for asked in (*samples(), *others()):
        one.cached_prompts = [[]] * len(one.slots)
        alone.append(drawn_tokens(run_all(asked, of=one)[0]))
    one.cached_prompts = [[]] * len(one.slots)
    prefill = one.prefill
    monkeypatch.setattr(one, "prefill", lambda *of: calls.append(1) or prefill(*of))
    assert [drawn_tokens(asked) for asked in run_all(*samples(), of=one)] == alone[:5]
    assert len(calls) == pieces, "one chunk on each device at a time"
    assert len({tuple(id for id, *_ in tokens) for tokens in alone[:5]}) == 5
    assert [drawn_tokens(asked) for asked in run_all(*others(), of=one)] == alone[5:]
    assert [drawn_tokens(asked) for asked in run_all(*others()[::-1], *samples(), of=one)] == alone[:4:-1] + alone[:5]


def test_nothing_is_compiled_again():
    """Catches a shape that depends on a prompt's length, on the number of requests, or on settings."""
    run_all(job("a", 2))
    sizes = lambda: [f._cache_size() for f in (engine().prefill, engine().decode_step, engine().draw)]
    before = sizes()
    assert before[:2] == [1, 1]
    run_all(*[job("x" * n, 1 + n % 5, temperature=n % 2, top_k=n, logprobs=n % 3) for n in range(1, 20)])
    assert sizes() == before[:2] + [2]  # after prefill, and after decode


def test_a_waiting_request_takes_the_slot_of_a_finished_one():
    """Catches a batch that waits for its longest text, and a queue out of order."""
    jobs = [job("abc", room) for room in (2, 9, 12, 4, 1)]
    for one in jobs:
        engine().submit(one)
    ended = []
    while not engine().idle:
        assert engine().running <= 3
        engine().step()
        ended += [jobs.index(one) for one in jobs if one.ended and jobs.index(one) not in ended]
    # One prompt is prefilled per step. 0 ends at step 2; 3 takes its slot and draws at step 4, after 2 drew once.
    assert ended == [0, 3, 4, 1, 2]


def test_long_prompts_do_not_stop_the_other_texts():
    """Catches a prompt whose prefill stops all other texts."""
    first, long = job("a", 12), job("b" * 19, 2)
    engine().submit(first)
    engine().step()
    engine().submit(long)
    seen = []
    while not long.tokens:
        engine().step()
        seen.append((long.tokens_read, len(first.tokens)))
    assert seen == [(5, 2), (10, 3), (15, 4), (20, 5)]
    engine().cancel(first), engine().cancel(long)
    engine().step()
    assert engine().idle


def test_a_cancelled_request_frees_its_slot_within_a_step():
    """Catches a cancelled request that keeps its slot, and a cancelled waiting request that gets a slot."""
    jobs = [job("abc", 15) for _ in range(5)]
    for one in jobs:
        engine().submit(one)
    for _ in range(4):
        engine().step()
    before = len(jobs[0].tokens)
    engine().cancel(jobs[0]), engine().cancel(jobs[3])
    engine().step()
    assert engine().slots[0] is jobs[4] and jobs[0].ended == jobs[3].ended == "cancelled"
    assert len(jobs[0].tokens) == before and jobs[3].tokens == []
    run_all()
    assert [len(one.tokens) for one in jobs] == [before, 15, 15, 0, 15]


def test_long_prompts_are_refused_and_long_texts_are_cut():
    """Catches a prompt that overwrites its own beginning, and a text that runs past the last position."""
    with pytest.raises(UserError, match="a prompt of 24 tokens leaves no room in 24 positions"):
        engine().submit(job("x" * 23, 1))
    last = run_all(job("x" * 22, 5, temperature=0))[0]
    assert (len(last.tokens), last.ended) == (1, "length")


def test_the_penalty_does_not_carry_over_to_the_next_request():
    """Catches a penalty for tokens of an earlier request in the slot, and none for the tokens of the request's own
    prompt or text."""
    settings = dict(temperature=0, repetition_penalty=50.0)
    alone = drawn_tokens(run_all(job("abc", 6, **settings))[0])
    ids = [id for id, *_ in alone]
    assert len({*ids, EOT, *b"abc"}) == len(ids) + 4, "a token is repeated in spite of the penalty"
    run_all(*[job("defg", 8, **settings) for _ in range(3)])
    assert drawn_tokens(run_all(job("abc", 6, **settings))[0]) == alone
    assert np.all(np.diff(ids) != 0)


def test_other_parameters_can_be_loaded():
    """Catches keys and values of the old parameters, requests that stay, and memory that is not freed."""
    one, prompts = engine(), ["abcdefghijklm", "abcdefghijkno", "b"]
    asked = lambda: [job(prompt, 4, temperature=0) for prompt in prompts]
    before, first = one.params, [drawn_tokens(done) for done in run_all(*asked())]
    other = jax.tree.map(lambda x: x[..., ::-1], before)
    one.load(other)
    second = [drawn_tokens(done) for done in run_all(*asked())]
    for left in (*asked(), *asked()):  # more than there are slots
        one.submit(left)
    one.step()
    one.load(None)
    assert one.idle and one.params is one.cache is None
    one.load(before)
    assert [drawn_tokens(done) for done in run_all(*asked())] == first and second != first
