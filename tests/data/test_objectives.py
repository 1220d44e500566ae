"""An objective divides a text into inputs and targets, from its ids and a key alone, and loses nothing."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from data.reading import objectives

VOCABULARY, VOCAB_SIZE = 300, 700  # ids of the text are below VOCABULARY; the first sentinel is VOCAB_SIZE - 1
NAMES = ("causal", "prefix", "span", "span:0.5:32", "span:0.9:1", "span:0.02:1.5")


def split(name, ids, key=(3, 1), **more):
    return objectives.split_text(name, np.asarray(ids), key, VOCAB_SIZE, **more)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 400), st.integers(0, 2**32), st.integers(0, 2**40))
def test_the_text_can_be_restored_exactly(name, length, seed, row):
    """Catches a token that is lost, doubled or moved, and lengths that differ from the example's."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, length)
    example, expected = split(name, ids, (seed, row)), objectives.lengths(name, length)
    assert np.array_equal(objectives.restore(example, VOCABULARY), ids)
    got = objectives.Lengths(len(example.inputs), len(example.targets), sum(map(len, example)))
    if name == "prefix":
        assert got.both == expected.both and 1 <= got.inputs <= expected.inputs and got.targets >= 1
    else:
        assert got == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 400), st.sampled_from([(0.15, 3), (0.5, 32), (0.9, 1), (0.3, 2.5)]), st.integers(0, 2**32))
def test_spans_are_those_of_t5(length, rate, seed):
    """Catches a rate or a mean length that is off, two sentinels in a row, and sentinels in another order.

    Source: `random_spans_noise_mask` of T5: the numbers of masked tokens and of spans are fixed by the length.
    """
    ids = np.arange(length) % VOCABULARY
    inputs, targets = split(f"span:{rate[0]}:{rate[1]}", ids, (seed,))
    masked = min(max(round(length * rate[0]), 1), length - 1)
    spans = min(max(round(masked / rate[1]), 1), masked, length - masked)
    sentinels = [VOCAB_SIZE - 1 - n for n in range(spans)]
    for side, count in ((inputs, length - masked), (targets, masked)):
        assert side[side >= VOCABULARY].tolist() == sentinels
        assert np.count_nonzero(side < VOCABULARY) == count
        assert not np.any((side[1:] >= VOCABULARY) & (side[:-1] >= VOCABULARY))
    assert inputs[0] == ids[0] and inputs[-1] == sentinels[-1] and targets[0] == VOCAB_SIZE - 1


def test_every_division_into_spans_is_equally_likely():
    """Catches spans that are never long, or that prefer the end of a text."""
    keys, total = range(6000), 6
    drawn = Counter(tuple(objectives._random_lengths(total, 3, objectives._random((5, key)))) for key in keys)
    assert len(drawn) == 10 and {sum(lengths) for lengths in drawn} == {total}  # 5 choose 2
    assert all(500 < count < 700 for count in drawn.values()), drawn  # 600 on average, with a deviation of 23
    masked = np.zeros(60)
    for key in range(3000):
        targets = split("span", np.arange(60), (key,)).targets
        masked[targets[targets < 60]] += 1
    assert masked[9:51].min() > 0.1 * 3000 and masked[9:51].max() < 0.2 * 3000  # 15%, and less at the edges


def test_every_cut_of_a_prefix_is_equally_likely():
    """Catches a prefix without inputs, and one without targets."""
    cuts = Counter(len(split("prefix", np.arange(5), (2, key)).inputs) for key in range(4000))
    assert sorted(cuts) == [1, 2, 3, 4] and all(900 < count < 1100 for count in cuts.values()), cuts


@pytest.mark.parametrize("name", ["span", "prefix"])
def test_an_example_is_a_function_of_ids_and_key(name):
    """Catches random numbers with a state, and a part of the key that is ignored."""
    ids = np.arange(3000)
    first = split(name, ids, (1, 2, 3))
    as_text = lambda example: str([side.tolist() for side in example])
    assert as_text(split(name, ids, (1, 2, 3))) == as_text(first)
    others = {as_text(split(name, ids, key)) for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1))}
    assert len(others) == 4 and as_text(first) not in others


def test_an_example_is_the_same_in_every_version():
    """Catches an example that depends on the version of NumPy or on the machine, so that a resumed run changes."""
    inputs, targets = split("span:0.4:2", np.arange(12), (7, 0))
    assert inputs.tolist() == [0, 1, 2, 699, 7, 8, 9, 10, 698] and targets.tolist() == [699, 3, 4, 5, 6, 698, 11]
    assert len(split("prefix", np.arange(1000), (7, 0)).inputs) == 97


def test_target_weights_decide_in_a_task():
    """Catches a prompt that is predicted, and an answer that is read."""
    inputs, targets = split("task", [5, 6, 7, 8, 9], weights=np.array([0, 0, 1, 1, 0]))
    assert inputs.tolist() == [5, 6, 9] and targets.tolist() == [7, 8]
    assert np.array_equal(objectives.restore(split("task", [5, 6, 7], weights=np.array([0, 0, 1])), 300), [5, 6, 7])
