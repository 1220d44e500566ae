"""The command `python -m evaluate`: its loss equals that of training, and errors are one line."""

import contextlib
import importlib.util
import io
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from data import prepare, tokenizers
from evaluate import follow
from evaluate.__main__ import main
from generate.runs import open_run
from tests import test_training
from tests.test_training import SMALL
from weights import convert

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/weights/fixtures"


def command(*argv):
    """Run the command. Returns its exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in argv])
    return status, out.getvalue(), err.getvalue()


def refused(*argv):
    """Run a command that must fail, and return its error message."""
    status, out, err = command(*argv)
    *before, last = err.splitlines()
    assert (status, out) == (2, "") and all(line.startswith("reading    step ") for line in before), err
    return last.removeprefix("error: ")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with a run of two steps that evaluates a task after each, its tokens, random bytes, and tokens of
    another vocabulary."""
    home = tmp_path_factory.mktemp("evaluate")
    (home / "texts").mkdir()
    for n in range(9):
        (home / "texts" / f"{n}.txt").write_text("abcd efgh. " * (23 + n))
    prepare.prepare(prepare.Arguments(str(home / "tokens"), f"text:{home}/texts/*.txt", "bytes", val_share=0.4))
    random = np.random.default_rng(0).integers(0, 256, 900)
    prepare.from_ids(random, str(home / "random"), tokenizer="bytes", val_share=0.5)
    prepare.from_ids(random, str(home / "others"), vocab_size=256, val_share=0.5)
    flags = [*SMALL, "--data.path", home / "tokens", "--run.dir", home, "--run.steps", "2", "--run.eval_every", "1",
             "--run.eval_tasks", "stdlib_functions", "--run.checkpoint_every", "1"]  # fmt: skip
    # Experts drop tokens at this capacity, which changes the loss.
    status, _, err = test_training.run([*flags, "--model.capacity_factor", "1"])
    assert (status, err) == (0, "")
    return home


@pytest.fixture(scope="module")
def converted(home):
    convert.from_hf(FIXTURES / "llama", home / "llama")
    return home / "llama"


# Loss -----------------------------------------------------------------------------------------------------------------


def test_the_loss_equals_that_of_training(home):
    """Catches experts that drop no tokens, another split, targets counted twice, a batch that does not fit the mesh,
    and inconsistent numbers."""
    want = test_training.rows(home / "small", "eval")[-1]
    assert want["full"]
    # 16 sequences do not split over 3 devices, so 18 are used; the split is still read once.
    argv = home / "small", "--perplexity", home / "tokens", "--mesh", "data=3"
    status, out, err = command(*argv, "--json")
    got = json.loads(out)
    read = f"reading    step 2 of {home}/small/checkpoints\n"
    assert (status, err, got["step"], got["whole"]) == (0, read, 2, True)
    assert got["tokens"] == want["tokens"]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(want["bits_per_byte"], rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(want["loss"]), rel=1e-5)
    header, row = command(*argv)[1].splitlines()
    assert header.split() == ["tokens", "loss", "perplexity", "bits_per_byte"]
    assert row.split() == [f"{got['tokens']:,}", *(f"{got[name]:.4f}" for name in header.split()[1:])]


def test_other_tokens_need_the_same_tokenizer(home):
    """Catches the run's own tokens read instead of those named, and ids of another tokenizer."""
    status, out, _ = command(home / "small", "--perplexity", home / "random", "--json", "--batches", "1")
    assert status == 0 and json.loads(out)["loss"] > 5 and not json.loads(out)["whole"]
    assert refused(home / "small", "--perplexity", home / "others") == (
        f"{home}/others was tokenized with 'unknown', vocabulary 257, but {home}/small was trained with 'bytes', "
        "vocabulary 257; prepare the text again with the run's tokenizer")  # fmt: skip
    assert "no tokens at " in command(home / "small", "--perplexity", home / "none")[2]


def test_a_run_is_followed_as_it_grows(home, tmp_path, monkeypatch):
    """Catches a checkpoint that is evaluated twice, not at all or before it is complete; a command that waits for a run
    that is complete; and one that stops at a damaged checkpoint."""
    run, whole = tmp_path / "small", home / "small"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("2"))
    (run / "saved").write_text("1\n")
    waited, argv = [], (run, "--perplexity", home / "tokens", "--batches", "1", "--json")

    def grow(seconds):
        waited.append(seconds)
        if len(waited) == 1:
            (run / "checkpoints/2").mkdir()  # left empty by an unmounted disk, and later than `saved`
        elif len(waited) == 2:
            (run / "checkpoints/2").rmdir()
            shutil.copytree(whole / "checkpoints/2", run / "checkpoints/2.saving")
        else:
            (run / "checkpoints/2.saving").rename(run / "checkpoints/2")
            (run / "saved").write_text("2\n")

    monkeypatch.setattr(follow.time, "sleep", grow)
    status, out, err = command(*argv, "--follow")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (status, waited, [row["step"] for row in rows]) == (0, 3 * [follow.POLL_S], [1, 2])
    assert rows == [json.loads(command(*argv, "--step", step)[1]) for step in (1, 2)]
    assert err.count(f"waiting    for a checkpoint of {run} after step 1 of 2\n") == 1 == err.count("waiting")

    assert command(*argv, "--follow") == (0, "", "") and len(waited) == 3
    largest = max((run / "checkpoints/1/state").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    argv = [*argv[:3], *argv[5:], "--follow"]  # other arguments: without --batches
    status, out, err = command(*argv)
    assert (status, [json.loads(line)["step"] for line in out.splitlines()]) == (0, [2])
    assert "skipped    step 1: state/" in err
    results = sorted(json.loads(path.read_text())["step"] for path in (run / "evaluations").iterdir())
    assert results == [1, 2, 2]


def test_what_cannot_be_followed_is_refused(home, converted, tmp_path):
    """Catches a command that waits forever for a checkpoint, or for a task that it cannot evaluate."""
    loss = ("--perplexity", home / "tokens", "--follow")
    assert refused(home / "small", *loss, "--step", "2").startswith("--follow evaluates every checkpoint, in one proc")
    assert refused(tmp_path, *loss).startswith(f"{tmp_path}: no config.json")
    assert refused(converted, *loss) == f"{converted} has exported weights but no checkpoints to follow; omit --follow"
    assert refused(home / "small", "--task", "none", "--follow").startswith("unknown task 'none'")
    assert "error: no tokens at " in command(home / "small", "--perplexity", tmp_path, "--follow")[2]


# Errors ---------------------------------------------------------------------------------------------------------------


def test_tasks_and_perplexity_exclude_each_other(home):
    """Catches a flag that is ignored because of another."""
    want = "choose what to evaluate: one of --task NAME, --tasks NAMES and --perplexity TOKENS"
    for more in ((), ("--tasks", "a", "--perplexity", "b"), ("--task", "a", "--tasks", "b")):
        assert refused(home / "small", *more) == want


def test_a_folder_without_weights_is_refused(home, tmp_path):
    """Catches a traceback if there is no run, or no checkpoint in it."""
    assert refused(tmp_path, "--perplexity", "x").startswith(f"{tmp_path}: no config.json")
    shutil.copy(home / "small" / "config.json", tmp_path)
    assert refused(tmp_path, "--perplexity", "x") == f"no checkpoint in {tmp_path}/checkpoints"


def test_a_missing_harness_is_named_with_its_extra(home, monkeypatch):
    """Catches a traceback if it is not installed."""
    find_spec = importlib.util.find_spec
    absent = lambda name, *more: None if name == "lm_eval" else find_spec(name, *more)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    want = "--tasks needs EleutherAI's lm-evaluation-harness; install it with: make extra-evaluate"
    assert refused(home / "small", "--tasks", "hellaswag") == want


def test_converted_weights_are_opened_with_a_tokenizer(converted, home, tmp_path):
    """Catches texts cut to our default length although the model's are longer, a tokenizer that is guessed, has more
    ids than the model, or differs from the run's own; and an equal tokenizer that is refused."""
    run = open_run(str(converted))
    assert (run.cfg.data.seq_len, run.encoding, run.step) == (64, None, None)
    assert open_run(str(converted), seq_len=40).cfg.data.seq_len == 40
    error = lambda tokenizer, run=converted: refused(run, "--perplexity", "x", "--tokenizer", tokenizer)
    assert error(tmp_path / "none.json").startswith(f"--tokenizer {tmp_path}/none.json: no such file; use a ")
    assert error("bytes") == (f"--tokenizer bytes has 257 ids, but the vocabulary of {converted} has 98; use the "
                              "tokenizer this model was trained with")  # fmt: skip
    with (tmp_path / "other").open("wb") as ranks:
        tokenizers.write_ranks(ranks, {bytes([255 - byte]): byte for byte in range(256)})
    other = tmp_path / "other"
    assert error(other, home / "small").endswith("small was trained with 'bytes'; leave the flag out")
    assert open_run(str(home / "small"), tokenizer="bytes").step == 2
    (tmp_path / "broken.json").write_text("{}")
    assert error(tmp_path / "broken.json").startswith(f"tokenizer 'json:{tmp_path}/broken.json': not a tokenizer.json")


def test_slim_weights_open_like_a_run(home):
    """Catches a folder of `slim` that is opened like converted weights, without tokenizer and step."""
    convert.slim(str(home / "small"), str(home / "alone"))
    want, got = (open_run(str(home / name)) for name in ("small", "alone"))
    assert (got.step, got.encoding.name, got.cfg.data.seq_len) == (2, "bytes", want.cfg.data.seq_len)
    assert got.digest != want.digest
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


LIMIT = 16  # examples per evaluation during training: one batch


def answers(file):
    """The rows of a file of predictions, without the first."""
    return [json.loads(row) for row in file.read_text().splitlines()][1:]


def test_the_metrics_of_a_task_equal_those_of_training(home):
    """Catches parameters of an earlier evaluation, a prompt that stays in the cache when they change, other examples,
    and metrics that are not in metrics.jsonl."""
    first, last = test_training.rows(home / "small", "eval")
    names = [f"stdlib_functions/{name}" for name in ("exact_match", "token_f1")]
    assert {*names} < {*first} and {*names} < {*last} and (first["step"], last["step"]) == (1, 2)
    got = json.loads(command(home / "small", "--task", "stdlib_functions", "--limit", LIMIT, "--json")[1])
    assert {name: got[name.split("/")[1]] for name in names} == {name: last[name] for name in names}
    rows = answers(home / "small" / "predictions-stdlib_functions-2.jsonl")
    assert len(rows) == LIMIT and len({row["prediction"] for row in rows}) > 1
    assert answers(home / "small" / "predictions-stdlib_functions.jsonl") == rows


@pytest.mark.parametrize(
    "tokens, names, error",
    [
        ("tokens", "stdlib_function", "unknown task 'stdlib_function'; did you mean 'stdlib_functions'? "),
        ("tokens", "stdlib_functions, stdlib", "task 'stdlib' has only loss and bits_per_byte, which --perplexity "),
        ("others", "stdlib_functions", "run.eval_tasks=stdlib_functions: the tokenizer of "),
        ("none", "stdlib_functions", "no tokens at "),
    ],
)
def test_a_run_checks_its_tasks_before_it_starts(tokens, names, error, home, tmp_path):
    """Catches an error at the first evaluation, after the run has written files and trained for hours."""
    argv = [*SMALL, "--data.path", home / tokens, "--run.dir", tmp_path, "--run.eval_tasks", names]
    status, out, err = test_training.run(argv)
    assert (status, out) == (2, "") and err.startswith(f"error: {error}") and not [*tmp_path.iterdir()]


def two_processes(*argv):
    """Run the command in two processes, one device each. Returns what the first prints; the other prints nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    words = [sys.executable, "-m", "evaluate", *map(str, argv), "--json", "--devices", "2", "--mesh", "fsdp=2"]
    both = [subprocess.Popen(words, cwd=ROOT, env=os.environ | env | {"JAX_PROCESS_ID": str(rank)}, text=True,
                             stdout=subprocess.PIPE) for rank in range(2)]  # fmt: skip
    first, second = (process.communicate(timeout=900)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0] and second == ""
    return json.loads(first)


def test_two_processes_print_one_result(home):
    """Catches a process that reads rows of another, and results that every process prints."""
    got = two_processes(home / "small", "--perplexity", home / "tokens")
    want = test_training.rows(home / "small", "eval")[-1]
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_same_predictions(home, tmp_path):
    """Catches a process that generates other texts, and rows that both write."""
    argv = home / "small", "--task", "stdlib_functions", "--limit", LIMIT, "--cache", tmp_path / "predictions"
    got, want = two_processes(*argv), test_training.rows(home / "small", "eval")[-1]
    assert got["token_f1"] == want["stdlib_functions/token_f1"]
    assert answers(tmp_path / "predictions") == answers(home / "small" / "predictions-stdlib_functions.jsonl")
