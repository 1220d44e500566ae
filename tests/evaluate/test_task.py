"""The evaluator of tasks: the answers of a model whose answers are known, on any mesh, interrupted or not."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from data import tasks
from data.tasks import Task
from evaluate import metrics, task as evaluating
from generate.runs import open_run
from tests.evaluate.test_command import command, refused
from tests.generate.models import rule_text, save_run
from utils import UserError

PROMPTS = [chr(33 + (7 * n) % 90) * (n % 3 > 0) + chr(34 + (11 * n) % 88) for n in range(24)]


def to_fields(document):
    yield json.loads(document["text"])


def length_off(target, prediction):
    return abs(len(target) - len(prediction))


def write_source(path):
    """Write examples of the rule. Every third target has a wrong character, which is also a choice of all others."""
    rows = []
    for n, prompt in enumerate(PROMPTS):
        right = rule_text(prompt, 12)[len(prompt) :]
        choices = [right[:5] + "~" + right[6:], right]
        text = {"prompt": prompt, "answer": choices[n % 3 > 0], "choices": choices}
        rows.append(json.dumps({"text": json.dumps(text)}) + "\n")
    path.write_text("".join(rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run whose model continues any text by a rule, and a task with right and wrong targets."""
    home = tmp_path_factory.mktemp("task")
    write_source(home / "rule.jsonl")
    save_run(home / "rule")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tasks, "TASKS", dict(tasks.TASKS))
        tasks.add(Task("rule", "of a test", f"jsonl:{home}/rule.jsonl", (to_fields, tasks.normalise()), val_share=0.8,
                       metrics=("loss", "exact_match", "token_f1", "accuracy", length_off)))  # fmt: skip
        yield home


@pytest.fixture(scope="module")
def finished(home):
    """The results of the command, and the file of predictions."""
    status, out, _ = command(home / "rule", "--task", "rule", "--json", "--batch", "3")
    assert status == 0
    return json.loads(out), home / "rule" / "predictions-rule-200.jsonl"


def rows_of(file):
    return [json.loads(row) for row in file.read_text().splitlines()]


def test_known_answers_give_known_metrics(home, finished):
    """Catches answers of other examples, an answer that includes its prompt or ends late, the training split, and a
    choice of the less likely text."""
    results, file = finished
    of, *rows = rows_of(file)
    asked = [*tasks.documents(tasks.get("rule"), "val")]
    assert [(row["input"], row["target"]) for row in rows] == [(one["prompt"], one["answer"]) for one in asked]
    assert {len(row["input"]) for row in rows} == {1, 2} and 12 < len(rows) < len(PROMPTS)
    for row in rows:
        right = rule_text(row["input"], 12)[len(row["input"]) :]
        assert row["prediction"] == row["choice"] == right
        assert row["exact_match"] == row["accuracy"] == (row["target"] == right)
        assert row["length_off"] == abs(len(row["target"]) - len(right)) == 0
    share = np.mean(["~" not in row["target"] for row in rows])
    assert 0.5 < share < 1 and results["exact_match"] == results["accuracy"] == share
    assert share <= results["token_f1"] < 1 and "loss" not in results
    assert (results["step"], results["examples"], of["of"]["examples"]) == (200, len(rows), len(rows))
    status, out, _ = command(home / "rule", "--task", "rule", "--batch", "3")  # nothing is computed again
    assert status == 0 and out.splitlines()[1].split() == ["rule", "exact_match", f"{share:.4f}", str(len(rows))]
    assert out.splitlines()[-1] == f"predictions: {file}" and rows_of(file) == [of, *rows]


@pytest.mark.parametrize("mesh", ["data=2,context=2"])
def test_the_mesh_changes_no_digit(mesh, home, finished, tmp_path):
    """Catches answers that depend on the mesh or on the number of texts at a time, and rows in another order."""
    argv = "--task", "rule", "--json", "--mesh", mesh, "--batch", "5", "--cache", tmp_path / "predictions"
    _, out, _ = command(home / "rule", *argv)
    assert (tmp_path / "predictions").read_bytes() == finished[1].read_bytes()
    assert json.loads(out) == finished[0] | {"predictions": f"{tmp_path}/predictions"}


@pytest.fixture(scope="module")
def evaluator(home):
    run = open_run(str(home / "rule"))
    return evaluating.Evaluator(run.cfg, run.mesh, run.encoding, 3), run.params, {"weights": run.digest}


class Killed(Exception):
    pass


def test_an_interrupted_evaluation_resumes(evaluator, finished, tmp_path, monkeypatch):
    """Catches answers that are computed twice or lost, an incomplete row that spoils the rest, and requests of the
    interrupted evaluation that stay in the engine."""
    (one, params, of), (results, file) = evaluator, finished
    asked, left, path = evaluating.questions(task := tasks.get("rule")), iter(range(5)), tmp_path / "predictions"

    def advance():
        if next(left, None) is None:
            raise Killed

    with pytest.raises(Killed):
        one.evaluate(task, asked, params, path, of, advance)
    whole = file.read_text()
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[: 1 + 6])
    path.write_text(whole[: len(path.read_text()) + 9])
    seen = []
    monkeypatch.setattr(one, "generate", lambda *args, run=one.generate: seen.append(len(args[1])) or run(*args))
    found = one.evaluate(task, asked, params, path, of, lambda: None)
    assert path.read_text() == whole and seen == [len(asked) - 6]
    assert found == {name: results[name] for name in found} and list(found) == [
        "exact_match", "token_f1", "accuracy", "length_off"]  # fmt: skip


def test_a_metric_of_your_own_may_change_or_fail(evaluator, finished, tmp_path):
    """Catches scores of an earlier version of the function, which the file still has, and a traceback."""
    (one, params, of), (results, file) = evaluator, finished
    asked, path, task = evaluating.questions(tasks.get("rule")), tmp_path / "predictions", tasks.get("rule")
    path.write_text(file.read_text())
    changed = lambda target, prediction: 1 + (target == prediction)
    changed.__name__ = "length_off"
    task = dataclasses.replace(task, metrics=(*task.metrics[:-1], changed))
    assert one.evaluate(task, asked, params, path, of)["length_off"] == 1 + results["exact_match"]
    for bad, message in (
        (lambda target, prediction: 1 / 0, "the metric 'bad', for the target 'a' and the prediction 'b': ZeroDiv"),
        (lambda target, prediction: "much", r".*: ValueError: could not convert"),
        (lambda target, prediction: float("nan"), r".* and the prediction 'b', returned nan; it must return a finite"),
    ):
        with pytest.raises(UserError, match=message):
            metrics.own_scores({"bad": bad}, "a", "b")


def test_other_targets_and_weights_are_refused(evaluator, home, finished, tmp_path):
    """Catches metrics of some rows of another text, of another checkpoint, or with targets changed by hand."""
    (one, params, of), (_, file) = evaluator, finished
    asked, path = evaluating.questions(task := tasks.get("rule")), tmp_path / "predictions"
    path.write_text(file.read_text())
    other = [*asked[:-1], dataclasses.replace(asked[-1], target="other")]
    with pytest.raises(UserError, match=rf"{path} has results of another evaluation \(targets is '\w+' here and '"):
        one.evaluate(task, other, params, path, of)
    with pytest.raises(UserError, match=r"\(weights is 'new' here and '\w+' there\); use another file, or delete this"):
        one.evaluate(task, asked, params, path, {"weights": "new"})
    path.write_text(file.read_text().replace(json.dumps(asked[2].target), '"changed"'))
    with pytest.raises(UserError, match=f"{path} was changed: it has other inputs or targets than the task; delete it"):
        one.evaluate(task, asked, params, path, of)
    want = f"{home}/rule.jsonl has no results of this kind; use another file"
    assert refused(home / "rule", "--task", "rule", "--cache", home / "rule.jsonl") == want


def test_long_prompts_are_cut_from_the_left(evaluator):
    """Catches a prompt that loses its end, its end-of-text token or the room for the answer."""
    one, end = evaluator[0], 256
    assert one.max_tokens == 24
    assert one.prompt_ids("ab", 12) == [end, *b"ab"]
    assert one.prompt_ids("abcdefghijklmnop", 12) == [end, *b"fghijklmnop"]
    assert one.prompt_ids("ab", 24) == [end]
    room = lambda *targets: one.room([evaluating.Question("", target) for target in targets])
    assert (room("abc", "a"), room(""), room("a" * 30)) == (4, 1, 12)


def test_a_rank_is_by_the_whole_choice(evaluator):
    """Catches choices that are mixed up between examples with different numbers of them."""
    one, params, _ = evaluator
    answers = [("!", ("$x", "$'", "$y")), ("A", ("DG",)), ("a", ("x", "d", "x", "d")), ("b", ("ehk", "ehz"))]
    asked = [evaluating.Question(prompt, "", choices) for prompt, choices in answers]
    assert [*one.rank(params, asked)] == ["$'", "DG", "d", "ehk"]


def test_mistakes_are_one_line_and_write_nothing(home, monkeypatch):
    """Catches a task that has nothing to compare with, an error after the model was loaded, and a traceback."""
    before = sorted((home / "rule").iterdir())
    error = lambda name, *more: refused(home / "rule", "--task", name, *more)
    assert error("rul").startswith("unknown task 'rul'; did you mean 'rule'?")
    assert error("stdlib").startswith("task 'stdlib' has only loss and bits_per_byte, which --perplexity computes; use")
    source, metric = f"jsonl:{home}/rule.jsonl", {"metrics": ("exact_match",), "val_share": 0.8}
    tasks.add(Task("texts", "", source, **metric))
    want = "task 'texts' has no targets: a document has name, text, but metrics of answers need prompt and answer"
    assert error("texts").startswith(want)
    tasks.add(Task("none", "", source, (to_fields, tasks.keep(lambda d: False)), **metric))
    assert error("none") == "task 'none' has no example in its validation split; raise its val_share"
    for name, choices in {"other": ["c", "d"], "empty": ["b", ""], "nothing": []}.items():
        fields = lambda d, choices=choices: iter([{"prompt": "a", "answer": "b", "choices": choices}])
        tasks.add(Task(name, "", source, (fields,), metrics=("accuracy",), val_share=0.8))
        assert error(name) == (f"task '{name}': the metric accuracy needs choices with at least one character, and the "
                               f"answer among them; got {choices} and 'b'")  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tasks.add(Task("translate", "", source, (to_fields,), metrics=("bleu",)))
    want = "the metric 'bleu' needs the package sacrebleu; install it with: make extra-metrics"
    assert error("translate") == want
    remote = "--task on gs://b/rule writes the predictions to a file on this machine; set --cache FILE"
    assert refused("gs://b/rule", "--task", "rule") == remote
    assert sorted((home / "rule").iterdir()) == before


def test_an_answer_may_be_an_index():
    """Catches an index that is encoded as text, and choices that are not normalized like the answer."""
    index = lambda d: iter([{"prompt": "e\u0301", "answer": 1, "choices": ["no", "e\u0301"]}])
    task = Task("index", "", "stdlib", (index, tasks.normalise()), metrics=("accuracy",))
    assert evaluating.questions(task, 1) == [evaluating.Question("\u00e9", "\u00e9", ("no", "\u00e9"))]
    tokens, weights = next(tasks.examples(task, "val"))
    assert bytes(tokens[1:][weights[1:] == 1].tolist()).decode() == "\u00e9"
