"""A task has a unique name, keeps its splits apart, and decides which targets count."""

import dataclasses
import json
import re
import unicodedata

import numpy as np
import pytest

import dataset
from config import preset
from data import prepare, tasks
from data.tasks import Task
from tests.data.test_prepare import write_ranks
from utils import UserError


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own(*preprocessors, **of_task): a task of 60 small texts, registered only for this test."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    texts = [f"text {n}<|endoftext|>e\u0301 {n}" for n in range(60)]  # a row of jsonl is always one document
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(*preprocessors, name="own", source=f"jsonl:{tmp_path}/own.jsonl", **more):
        return tasks.add(Task(name, "of a test", source, preprocessors, **more))

    return make


def test_a_task_name_is_unique(own):
    """Catches a task that silently replaces another: a resumed run would then read other text."""
    own()
    with pytest.raises(UserError, match=r"'own' exists \(registered at .*test_tasks\.py:\d+\); choose another"):
        own()
    with pytest.raises(UserError, match=r"unknown task 'stdlb'; .*stdlib"):
        tasks.get("stdlb")
    with pytest.raises(UserError, match="unknown metric 'los'"):
        Task("x", "", "stdlib", metrics=("los",))


def longer(target, prediction):
    return len(prediction) - len(target)


def test_a_metric_of_your_own_has_a_name():
    """Catches two metrics that overwrite each other's scores, or a score that overwrites the prediction."""
    assert Task("x", "", "stdlib", metrics=("loss", longer)).metric_names == ("loss", "longer")
    for metrics, message in (
        ((lambda a, b: 1.0,), "task 'x': the metric function '<lambda>' needs another name"),
        ((dataclasses.replace,), None),
        ((longer, longer), "task 'x': two metrics have one name: longer, longer"),
    ):
        if message is None:
            Task("x", "", "stdlib", metrics=metrics)
            continue
        with pytest.raises(UserError, match=message):
            Task("x", "", "stdlib", metrics=metrics)
    for name in ("prediction", "loss"):
        longer_too = lambda a, b: 0.0
        longer_too.__name__ = name
        with pytest.raises(UserError, match=f"the metric function '{name}' needs another name"):
            Task("x", "", "stdlib", metrics=(longer_too,))


@pytest.mark.parametrize("kind", ["list", "function"])
def test_a_source_of_your_own(own, kind):
    """Catches fields that are lost, a second split that is empty because the rows were read already, and a split that
    depends on the order of the rows."""
    rows = [{"question": f"{n}?", "reply": f"{n}!", "title": 3} for n in range(60)]
    source = {"list": rows, "function": lambda: (row for row in reversed(rows))}[kind]
    task = own(tasks.rekey(prompt="question", answer="reply"), source=source, val_share=0.3)
    of = {split: sorted(d["prompt"][:-1] for d in tasks.documents(task, split)) for split in tasks.SPLITS}
    assert sorted(of["train"] + of["val"]) == sorted(map(str, range(60))) and 9 < len(of["val"]) < 28
    assert of["val"] == sorted(d["prompt"][:-1] for d in tasks.documents(dataclasses.replace(task, source=rows), "val"))
    texts = Task("texts", "", ["one", "two"], text_field="body")
    assert sorted(d["text"] for split in tasks.SPLITS for d in tasks.documents(texts, split)) == ["one", "two"]
    body = Task("body", "", [{"body": "one"}], text_field="body")
    assert [d["text"] for split in tasks.SPLITS for d in tasks.documents(body, split)] == ["one"]
    with pytest.raises(UserError, match="its source is a list_iterator, which can be read only once, and each"):
        own(source=iter(rows), name="once")
    with pytest.raises(UserError, match="task 'typed': a document has int where it needs text"):
        [*tasks.examples(own(tasks.rekey(text="title"), source=rows, name="typed"), "train")]


def test_a_task_is_checked(own, capsys):
    """Catches an example in both splits, an empty answer, a tokenizer that loses text, an empty split, and a check that
    reports faults with status 0, or none with status 1."""
    rows = [{"prompt": f"{n}", "answer": "\u2581 yes"} for n in range(40)]
    own(source=rows)
    assert tasks.main(["own", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and re.fullmatch(r"train: 3\d examples, [\d,]+ tokens, from 8 to 9 in an example", lines[0])
    own(lambda d: iter([d | {"answer": d["answer"] * (d["prompt"] != "7"), "prompt": d["prompt"][-1]}]),
        source=rows, name="bad", val_share=0.3)  # fmt: skip
    assert tasks.main(["bad", "--check"]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    none, both = sorted(wrong, key=len)
    assert re.fullmatch(r"wrong: 1 examples of (train|val) have no targets, such as '7'", none)
    assert re.match(r"wrong: \d+ examples of val are in train too; drop them from one of the splits, such as '", both)
    own(source=rows[:1], name="few")
    assert tasks.main(["few", "--check"]) == 1
    assert "wrong: 0 examples are in val: change val_share=0.05, or the source" in capsys.readouterr().out


def test_a_task_with_another_tokenizer(own, tmp_path, capsys, monkeypatch):
    """Catches a tokenizer that is ignored, and one that loses text and passes the check."""
    own(source=["unsi"] * 3, val_share=0.9)
    ranks = write_ranks(tmp_path / "ranks", [b"un", b"si"])
    assert tasks.main(["own", "--tokenizer", ranks, "--split", "val", "--examples", "1"]) == 0
    assert capsys.readouterr().out.startswith("--- own val 0: 3 tokens, 2 targets count\nunsi")
    assert tasks.main(["own", "--tokenizer", ranks, "--out", str(tmp_path / "own"), "--check"]) == 1  # no train
    assert not (tmp_path / "own").exists() and tasks.get("own").tokenizer == "bytes"
    assert tasks.main(["own", "--tokenizer", "byte"]) == 2
    monkeypatch.setattr(tasks.tokenizers, "encode", lambda encoding, text: np.array([*text.upper()]))
    capsys.readouterr()
    assert tasks.main(["own", "--check"]) == 1
    want = "wrong: 3 examples of val change when bytes encodes and decodes them, such as 'unsi'"
    assert want in capsys.readouterr().out


def test_splits_share_no_document_and_preprocessors_run_in_turn(own):
    """Catches pieces of one document in both splits, text that is not normalized, and a separator that stays."""
    task = own(tasks.split_on(), tasks.normalise(), tasks.keep(lambda d: not d["text"].endswith(" 7")), val_share=0.3)
    of = {split: [d["text"] for d in tasks.documents(task, split)] for split in tasks.SPLITS}
    numbers = {split: {text.split()[1] for text in texts} for split, texts in of.items()}
    assert not numbers["train"] & numbers["val"] and min(map(len, numbers.values())) > 5
    assert len(of["train"]) + len(of["val"]) == 2 * 59
    assert all(unicodedata.is_normalized("NFC", text) for texts in of.values() for text in texts)
    with pytest.raises(UserError, match="unknown split 'test'; use train or val"):
        next(tasks.documents(task, "test"))


def test_a_prompt_is_input_but_not_a_target(own):
    """Catches weights off by one position, a prompt that counts, and an answer that is truncated too soon."""
    both = lambda d: iter([{"question": "ab", "reply": "xyz"}])
    task = own(both, tasks.rekey(prompt="question", answer="reply"))
    tokens, weights = next(tasks.examples(task, "train"))
    assert tokens.tolist() == [256, *b"abxyz"] and weights.tolist() == [0, 0, 0, 1, 1, 1]
    row = next(tasks.rows(task, "train", 8))
    counted = row["targets_BT"][row["weights_BT"] > 0]
    assert bytes(counted.tolist()) == b"xyz" and row["segments_BT"].tolist() == [1] * 5 + [0] * 3
    short = next(tasks.rows(task, "train", 4))
    assert bytes(short["targets_BT"][short["weights_BT"] > 0].tolist()) == b"xy"
    with pytest.raises(UserError, match="no field 'query'; it has question, reply"):
        next(tasks.rekey(prompt="query")({"question": "", "reply": ""}))


@pytest.mark.parametrize("kind", ["disk", "bucket", "mixture"])
def test_only_answers_count_in_a_run(own, tmp_path, kind):
    """Catches weights off by one, or of another shard or window, a prompt that counts, an answer that does not, and
    weights lost in a bucket or in a mixture with a source without weights."""
    question = lambda d: iter([{"prompt": d["text"].upper() + "?", "answer": d["text"].split("<")[0]}])
    task = own(question, val_share=0.2)
    manifest = tasks.write(task, str(tmp_path / "home/own"))
    prepare.from_ids(np.full(900, 65), str(tmp_path / "home/plain"), tokenizer="bytes", shard_tokens=100)
    assert all(row["weights"]["file"].endswith(".weights.npy") for row in manifest["splits"]["val"]["shards"])
    where = {"disk": f"{tmp_path}/home/own", "bucket": f"file://{tmp_path}/home/own", "mixture": f"{tmp_path}/home"}
    cfg = preset("tiny", **{"data.path": where[kind], "data.seq_len": 37, "data.batch_size": 5,
                            "data.packing": "windows,ordered",
                            "data.mixture": "own=0.5,plain=0.5" if kind == "mixture" else ""})  # fmt: skip
    found, windows = (
        b"",
        dataset.open_corpus(cfg).sources.get("own", dataset.open_corpus(cfg)).splits["train"].windows(37),
    )
    made = [dataset.batch(cfg, step) for step in range(-(-2 * windows // 5))]
    for tokens_T, targets_T, weights_T in (row for b in made for row in zip(
        *(b[f"{name}_BT"] for name in ("tokens", "targets", "weights")), strict=True)):  # fmt: skip
        if tokens_T[1] == 65 == tokens_T[2]:  # plain text: all targets count
            assert set(weights_T[targets_T == 65]) == {1}
        else:
            found += bytes(targets_T[weights_T > 0].astype(np.uint8).tolist())
    answers = "".join(d["answer"] for d in tasks.documents(task, "train")).encode()
    assert len(answers) > 250 and found[: len(answers)] == answers
    values = [dataset.batch(cfg, 0)["weights_BT"], next(dataset.evaluation_batches(cfg))["weights_BT"]]
    assert all(set(np.unique(one)) == {0, 1} and one.dtype == np.float32 for one in values)


def test_weights_are_part_of_the_tokens(own, tmp_path):
    """Catches a run that resumes with other targets, a check that ignores weights, and old weights that stay."""
    task, out = own(lambda d: iter([{"prompt": d["text"], "answer": "yes"}]), val_share=0.2), tmp_path / "own"
    tasks.write(task, str(out))
    cfg = preset("tiny", **{"data.path": str(out)})
    before = dataset.fingerprint(cfg)["shards_sha256"]
    file = out / "train-00000.weights.npy"
    weights = np.load(file)
    np.save(file, 1 - weights)
    with pytest.raises(UserError, match=r"train-00000\.weights\.npy has sha256 "):
        dataset.verify(str(out))
    both = {split: [one.tokens[1:] for one in tasks.examples(task, split)] for split in tasks.SPLITS}
    same = {"validation_ids": both["val"], "tokenizer": "bytes", "overwrite": True}
    prepare.from_ids(both["train"], str(out), **same)
    assert not list(out.glob("*.weights.npy")) and dataset.fingerprint(cfg)["shards_sha256"] != before
    with pytest.raises(UserError, match=r"train has 43 documents and 1 arrays of weights, .* from document 1 on"):
        prepare.from_ids(both["train"], str(out), **same, train_weights=[np.ones_like(both["train"][0])],
                         validation_weights=[np.ones_like(ids) for ids in both["val"]])  # fmt: skip


def test_special_tokens_in_a_document_are_text(own):
    """Catches `<|endoftext|>` in a document that ends it."""
    tokens, weights = next(tasks.examples(own(), "train"))
    assert np.count_nonzero(tokens == 256) == 1 and weights.sum() == len(tokens) - 1


def test_a_task_without_text_is_refused(own):
    """Catches empty examples from a preprocessor that loses its field."""
    with pytest.raises(UserError, match="a document has title; it needs text, or prompt and answer"):
        next(tasks.examples(own(lambda d: iter([{"title": "x"}])), "train"))


def test_the_command_lists_tasks_and_prints_examples(capsys):
    """Catches an example that does not separate prompt and answer, and a task that is not listed."""
    tasks.main([])
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["stdlib", "stdlib_functions"]
    tasks.main(["stdlib_functions", "--examples", "4"])
    out = capsys.readouterr().out.splitlines()
    heads = [line for line in out if line.startswith("--- ")]
    assert len(heads) == 4 and out[1].startswith("| def ") and not out[-1].startswith("| ")
    tasks.main(["stdlib", "--split", "val", "--examples", "1"])
    assert capsys.readouterr().out.startswith("--- stdlib val 0: ")
    assert tasks.main(["nobody"]) == 2


def test_the_command_shows_an_objective(own, capsys):
    """Catches an example that is not divided, and sentinels that are not shown."""
    own(lambda d: iter([{"text": "a short text about nothing in particular"}]))
    tasks.main(["own", "--objective", "span:0.3:3=0.5,prefix=0.5", "--examples", "1"])
    head, *lines = capsys.readouterr().out.splitlines()
    sides = dict(line.split(": ", 1) for line in lines)
    assert head.startswith("--- own train 0") and list(sides) == [
        f"{side} of {name}" for name in ("span:0.3:3", "prefix") for side in ("inputs", "targets")]  # fmt: skip
    assert (
        sides["inputs of prefix"][1:-1] + sides["targets of prefix"][1:-1] == "a short text about nothing in particular"
    )
    read, predicted = (re.split(r"<\d>", sides[f"{side} of span:0.3:3"][1:-1]) for side in ("inputs", "targets"))
    assert "".join(a + b for a, b in zip(read, [*predicted[1:], ""], strict=True)) == (
        "a short text about nothing in particular")  # fmt: skip
    assert tasks.main(["own", "--objective", "spam"]) == 2
