"""Compute the metrics of a task from its targets and the decoded predictions. Every function is pure.

Metrics are from 0 to 1, except BLEU, which is from 0 to 100. `data.tasks.METRICS` lists them, besides the loss. A task
can have its own metrics, which are functions of a target and a prediction.
"""

import collections
import functools
import importlib.util
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence

from utils import UserError

PACKAGES = {"bleu": "sacrebleu", "rouge1": "rouge_score", "rouge2": "rouge_score", "rougeL": "rouge_score"}
LIKELIHOOD = "accuracy"  # the only metric that scores given texts, instead of comparing a generated one


def check_packages(names: Sequence[str]) -> None:
    """Raises: UserError if the package of a metric is not installed."""
    for name in names:
        if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name]):
            raise UserError(
                f"the metric {name!r} needs the package {PACKAGES[name]}; install it with: make extra-metrics"
            )


# One example ----------------------------------------------------------------------------------------------------------


def exact_match(target: str, prediction: str) -> float:
    """Return whether the texts are equal, apart from white space around them."""
    return float(target.strip() == prediction.strip())


def squad_tokens(text: str) -> list[str]:
    """Split a text into lower-case words, without punctuation and articles. Source: the evaluation script of SQuAD."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def token_f1(target: str, prediction: str) -> float:
    """Return the harmonic mean of precision and recall of the prediction's words. Two texts without words match."""
    want, got = squad_tokens(target), squad_tokens(prediction)
    common = sum((collections.Counter(want) & collections.Counter(got)).values())
    return 2 * common / (len(want) + len(got)) if want or got else 1.0


@functools.cache
def rouge_scorer():
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"])


def rouge(name: str, target: str, prediction: str) -> float:
    return rouge_scorer().score(target, prediction)[name].fmeasure


SCORES = {"exact_match": exact_match, "token_f1": token_f1} | {
    name: functools.partial(rouge, name) for name in ("rouge1", "rouge2", "rougeL")
}


def own_scores(functions: Mapping[str, Callable], target: str, prediction: str) -> dict[str, float]:
    """Return the scores of a task's own metrics. Raises: UserError, with the texts, if one fails or gives no number."""
    scores = {}
    for name, function in functions.items():
        where = f"the metric {name!r}, for the target {target[:60]!r} and the prediction {prediction[:60]!r}"
        try:
            scores[name] = float(function(target, prediction))
        except Exception as error:  # show any error in the user's function as one line
            raise UserError(f"{where}: {type(error).__name__}: {error}") from error
        if not math.isfinite(scores[name]):
            raise UserError(f"{where}, returned {scores[name]}; it must return a finite number")
    return scores


def score_example(names: Sequence[str], target: str, prediction: str | None, choice: str | None) -> dict[str, float]:
    """Return the scores of one example. BLEU is not among them, because it has no meaning for a single example.

    prediction  the generated text
    choice      the most likely of the given texts
    """
    scores = {name: SCORES[name](target, prediction) for name in names if name in SCORES}
    return scores | ({LIKELIHOOD: float(choice == target)} if LIKELIHOOD in names else {})


# All examples ---------------------------------------------------------------------------------------------------------


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> float:
    """Return the BLEU score of a corpus, from 0 to 100, with the default settings of sacrebleu."""
    import sacrebleu

    return sacrebleu.corpus_bleu(list(predictions), [list(targets)]).score


def summarize(names: Sequence[str], rows: Sequence[dict]) -> dict[str, float]:
    """Return each metric of all examples. rows: the target, the prediction and the scores of each example."""
    return {
        name: bleu([row["target"] for row in rows], [row["prediction"] for row in rows])
        if name == "bleu"
        else math.fsum(row[name] for row in rows) / len(rows)
        for name in names
    }
