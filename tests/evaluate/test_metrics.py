"""Metrics of decoded texts: values computed by hand, and the values of the libraries."""

import importlib.util

import pytest

from data import tasks
from evaluate import metrics
from utils import UserError


@pytest.mark.parametrize(
    "target, prediction, exact, f1",
    [
        ("return x\n", "  return x", 1, 1),  # white space around a text does not count
        ("The cat sat.", "a cat SAT", 0, 1),  # nor do articles, punctuation and case, for F1
        ("red blue green", "blue, yellow", 0, 0.4),  # precision 1/2, recall 1/3
        ("go go go stop", "go go", 0, 2 / 3),  # a word counts as often as it occurs in both
        ("theater", "ater", 0, 0),  # an article is a whole word
        ("the", "!", 0, 1),  # neither has a word
        ("one", "", 0, 0),
    ],
)
def test_exact_match_and_f1_by_hand(target, prediction, exact, f1):
    """Catches words that are counted as a set, precision or recall instead of both, and articles inside words."""
    found = metrics.score_example(("exact_match", "token_f1"), target, prediction, None)
    assert found == {"exact_match": exact, "token_f1": pytest.approx(f1, rel=1e-15)}


def test_accuracy_compares_the_choice_with_the_target():
    """Catches an accuracy of the generated text, and scores that are not averaged over all examples."""
    names = ("accuracy", "exact_match")
    rows = [metrics.score_example(names, "b", prediction, choice) for prediction, choice in ("ab", "ab", "ba")]
    assert metrics.summarize(names, rows) == {"accuracy": 2 / 3, "exact_match": 1 / 3}


@pytest.mark.extra("metrics")
def test_rouge_by_hand():
    """Catches recall or precision instead of their harmonic mean, and pairs of words that are not adjacent."""
    # Three of four words and no pair are common; the longest common sequence has two words.
    names = ("rouge1", "rouge2", "rougeL")
    found = metrics.score_example(names, "one two three four", "two one three five", None)
    assert list(found) == list(names) and list(found.values()) == pytest.approx([3 / 4, 0, 2 / 4])
    found = metrics.score_example(names, "one two three four", "two three", None)
    assert list(found.values()) == pytest.approx([2 / 3, 1 / 2, 2 / 3])  # precisions are 1; recalls 1/2, 1/3 and 1/2


@pytest.mark.extra("metrics")
def test_bleu_is_of_the_corpus():
    """Catches a mean of sentence scores, a score from 0 to 1, and targets swapped with predictions."""
    targets = ["the cat sat on the mat today", "two birds sing in the old tree"]
    predictions = ["the cat sat on the mat", "two birds sing in an old tree"]
    rows = [{"target": t, "prediction": p} for t, p in zip(targets, predictions, strict=True)]
    # Of n = 1 to 4 words in a row, 12 of 13, 9 of 11, 6 of 9 and 4 of 7 are in the targets; 13 words instead of 14.
    by_hand = 100 * (12 / 13 * 9 / 11 * 6 / 9 * 4 / 7) ** 0.25 * 2.718281828459045 ** (1 - 14 / 13)
    assert metrics.summarize(("bleu",), rows)["bleu"] == pytest.approx(by_hand, rel=1e-12)

    import sacrebleu

    assert metrics.bleu(targets, predictions) == sacrebleu.corpus_bleu(predictions, [targets]).score


def test_a_task_lists_only_known_metrics():
    """Catches a metric that a task may name but nothing computes, and an error that does not help."""
    assert {*tasks.METRICS[2:]} == {*metrics.SCORES, metrics.LIKELIHOOD, "bleu"}
    with pytest.raises(UserError, match=r"task 'x': unknown metric 'rouge'; did you mean 'rougeL'\?"):
        tasks.Task("x", "", "stdlib", metrics=("rouge",))


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    """Catches a traceback in the middle of an evaluation."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    metrics.check_packages(("loss", "exact_match", "token_f1", "accuracy"))
    for name, package in {"bleu": "sacrebleu", "rouge1": "rouge_score", "rougeL": "rouge_score"}.items():
        want = f"the metric '{name}' needs the package {package}; install it with: make extra-metrics"
        with pytest.raises(UserError, match=want):
            metrics.check_packages(("exact_match", name))
