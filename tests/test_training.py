"""A run writes correct records, resumes as if it had never stopped, and refuses to mix with another run."""

import base64
import contextlib
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dataset
import main
import optimizer
import pipeline
import sharding
from data import prepare
from plan.answer import parameter_list
from train import checkpoint, progress, report
from train.directory import OWN_FILES, SET_ASIDE, Metrics, result_settings
from weights import __main__ as weights_command

ROOT = Path(__file__).parent.parent
STEPS = 60  # with a checkpoint every 20 steps and an evaluation every 25
SMALL = shlex.split(
    "tiny --model.n_layers 3 --model.dense_prefix 0 --model.moe_every 1 --model.attention gqa --model.n_shared 0 "
    "--work.gather step "
    f"--optim.lr 0.01 --run.name small --run.steps {STEPS} --run.log_every 1 --run.eval_every 25 --run.eval_batches 1 "
    "--run.checkpoint_every 20"
)
TIMED = {"tokens_per_s", "mfu", "time", "import_s", "restore_s", "compile_s", "seconds", "peak_host_bytes",
         "peak_device_bytes"}  # fmt: skip


def run(argv):
    """Run the command in this process: exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main.main([str(word) for word in argv])
        except SystemExit as exit:  # from the parser
            status = exit.code
    return status, out.getvalue(), err.getvalue()


def flags(tokens, runs):
    """The flags of the small run on these tokens; it shares the compilation cache of all tests."""
    return [*SMALL, "--data.path", str(tokens), "--run.dir", str(runs)]


def rows(directory, kind=None):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if kind in (None, row["kind"])]


def untimed(rows):
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


def snapshot(directory):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}


def write_texts(folder, words):
    folder.mkdir()
    for n in range(12):
        (folder / f"{n}.txt").write_text(words * (30 + n))
    return f"text:{folder}/*.txt"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Token directories: `easy`, a repeated phrase; `other`, another one; `merged`, `easy` with another tokenizer."""
    home = tmp_path_factory.mktemp("training")
    easy = write_texts(home / "easy-texts", "abcd efgh. ")
    other = write_texts(home / "other-texts", "ijkl mnop? ")
    ranks = [bytes([byte]) for byte in range(256)] + [b"ab", b"cd"]
    (home / "ranks").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % n for n, token in enumerate(ranks)))
    for name, source, tokenizer in (("easy", easy, "bytes"), ("other", other, "bytes"),
                                    ("merged", easy, f"bpe:{home}/ranks")):  # fmt: skip
        prepare.prepare(prepare.Arguments(str(home / name), source, tokenizer, val_share=0.3))
    return home


@pytest.fixture(scope="module")
def finished(home):
    """One uninterrupted run: its flags, its directory, and what it printed."""
    argv = flags(home / "easy", home / "runs")
    status, out, err = run(argv)
    assert (status, err) == (0, "")
    return argv, home / "runs" / "small", out


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run that a test may change: flags and directory."""
    shutil.copytree(finished[1], tmp_path / "small")
    return [*finished[0], "--run.dir", str(tmp_path)], tmp_path / "small"


def restored(argv, directory, mesh="data=1"):
    """Read the newest checkpoint's arrays by name, sharded over a mesh."""
    cfg, mesh = main.parse(argv), sharding.make_mesh(mesh)
    target = checkpoint.make_target(optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    return checkpoint.restore(directory / "checkpoints", target)


def test_a_run_starts_from_another(home, tmp_path):
    """Catches an --init-from that keeps new random parameters, the preset's shapes, or the old step."""
    dense = (
        "--model.n_experts 0 --model.attention gqa --model.n_layers 2 --model.dense_prefix 0 --model.no_rope_every 0"
    )
    common = ["--data.path", home / "easy", "--run.dir", tmp_path, "--run.steps", 1, "--run.sample_prompt", ""]
    assert run(["tiny", *dense.split(), *common, "--run.name", "source"])[0] == 0
    source, folder, converted = tmp_path / "source", tmp_path / "hf", tmp_path / "converted"
    assert weights_command.main(["to-hf", str(source), "--out", str(folder)]) == 0
    assert weights_command.main(["from-hf", str(folder), "--out", str(converted)]) == 0
    want = restored(["tiny", *dense.split()], source)
    for name, start in (("tuned", source), ("retuned", converted)):
        # A learning rate of 0 leaves the initial parameters unchanged.
        status, out, err = run(["tiny", *common, "--init-from", start, "--run.name", name, "--optim.lr", 0,
                                "--run.eval_batches", 0])  # fmt: skip
        assert (status, err) == (0, "")
        which = "converted" if start == converted else "step 1"
        assert f"parameters and model settings are from {start} ({which})\n" in out
        before, after = rows(tmp_path / name, "eval")
        assert (before["step"], after["step"], before["full"]) == (0, 1, True)
        assert before["loss"] == after["loss"] == rows(source, "eval")[-1]["loss"]
        got = restored(["tiny", *dense.split()], tmp_path / name)
        for key, value in sharding.flatten_named(want.params).items():
            np.testing.assert_array_equal(sharding.flatten_named(got.params)[key], value, err_msg=f"{name}: {key}")
        assert int(got.step) == 1
    again = ["tiny", *common, "--init-from", start, "--run.name", name, "--optim.lr", 0, "--run.eval_batches", 0]
    assert run([*again, "--run.steps", 2])[0] == 0
    assert [row["step"] for row in rows(tmp_path / name, "eval")] == [0, 1, 2], "the evaluation at step 0 is repeated"


def assert_same_arrays(got, want):
    got, want = sharding.flatten_named(got), sharding.flatten_named(want)
    assert list(got) == list(want)
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(x), err_msg=name)


# Files of a run -------------------------------------------------------------------------------------------------------


def test_a_run_writes_its_files(finished):
    """Catches a result that is not written, an invalid image, and a config.json that is not the run's."""
    argv, directory, _ = finished
    assert {p.name for p in directory.iterdir()} == {*OWN_FILES}
    assert (directory / "parameters.txt").read_text().splitlines() == parameter_list.lines(main.parse(argv))
    assert json.loads((directory / "config.json").read_text())["config"] == main.parse(argv).to_dict()
    assert (directory / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert checkpoint.latest_step(directory / "checkpoints") == STEPS
    text = (directory / "samples.txt").read_text(encoding="utf-8")
    assert text.startswith(f"--- step {STEPS}\ndef ") and len(text) > len(f"--- step {STEPS}\ndef \n")


def test_the_run_plots_its_report(finished):
    """Catches a metrics.jsonl that report.py cannot read."""
    assert report.read_run(finished[1]).series("loss")[0] == list(range(1, STEPS + 1))


def test_metrics_are_complete_and_in_order(finished):
    """Catches a step without a row or with two, rows out of order, a missing field, and values that are not numbers."""
    _, directory, _ = finished
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    no_nan = lambda word: pytest.fail(f"{word} is not JSON")
    all_rows = [json.loads(line, parse_constant=no_nan) for line in lines]
    steps = [row["step"] for row in all_rows]
    assert steps == sorted(steps)
    kinds = [row["kind"] for row in all_rows]
    assert (kinds[0], kinds[-2:]) == ("start", ["eval", "end"]) and set(kinds[1:-2]) == {"train", "eval"}
    assert [row["step"] for row in rows(directory, "train")] == list(range(1, STEPS + 1))
    assert [(row["step"], row["full"]) for row in rows(directory, "eval")] == [(25, False), (50, False), (STEPS, True)]
    for kind, fields in {
        "start": "time params_total params_active tokens_per_step unigram_nats bigram_nats import_s restore_s "
        "compile_s",
        "train": "loss grad_norm lr tokens tokens_per_s balance_loss tokens_per_expert drop_fraction "
        "router_entropy skipped_steps",
        "eval": "loss bits_per_byte tokens full",
        "end": "seconds peak_host_bytes",
    }.items():
        for row in rows(directory, kind):
            assert set(row) == {"kind", "step", *fields.split()}, kind
    for row in rows(directory, "train"):
        assert row["tokens"] == row["step"] * 16 * 18
        assert row["tokens_per_s"] > 0
        assert np.shape(row["tokens_per_expert"]) == (3, 8)
        assert np.shape(row["drop_fraction"]) == np.shape(row["router_entropy"]) == (3,)
        assert sum(row["tokens_per_expert"][0]) <= 2 * 16 * 18


def test_a_row_averages_the_loss_since_the_previous_row():
    """Catches a row that shows the loss of a single step, or that counts the balance loss as cross-entropy."""
    row = progress.to_row({"loss": np.float32(9), "cross_entropy": np.float32(4)}, [np.float32(1), np.float32(4)])
    assert row == {"loss": 2.5}


def test_rows_in_between_are_averaged_not_lost(finished, home, tmp_path):
    """Catches a loss averaged over steps that another row already counted, or that a resumed run would count
    differently: an evaluation and a checkpoint end a row, regardless of log_every."""
    status, _, err = run([*flags(home / "easy", tmp_path), "--run.log_every", "7"])
    assert (status, err) == (0, "")
    losses = [row["loss"] for row in rows(finished[1], "train")]
    got = rows(tmp_path / "small", "train")
    ends = sorted({*range(7, STEPS, 7), 20, 40, 25, 50, STEPS})
    assert [row["step"] for row in got] == ends
    for row, start in zip(got, [0, *ends], strict=False):
        assert row["loss"] == pytest.approx(np.mean(losses[start : row["step"]]), rel=1e-12), row["step"]
    assert untimed(rows(tmp_path / "small", "eval")) == untimed(rows(finished[1], "eval"))


def test_output_is_readable_without_a_terminal(finished):
    """Catches a start that does not print what will run, escape codes in a log file, and steps that are not printed."""
    _, directory, out = finished
    assert "\x1b" not in out and "\r" not in out
    start = rows(directory, "start")[0]
    assert f"{start['params_total']:,} parameters, {start['params_active']:,} active per token" in out
    assert "16 sequences a step = 1 batch shards x 16 sequences x 1 accumulation passes; 288 tokens per step" in out
    assert re.search(r"memory +about [\d,]+ MiB per device", out)
    assert re.search(r"start-up +import [\d.]+ s, initialize [\d.]+ s, compile [\d.]+ s\n", out)
    for step in range(1, STEPS + 1):
        assert re.search(rf"step +{step}/{STEPS}  loss [\d.]+  [\d,]+ tokens/s\n", out), step
    assert re.search(rf"step +25/{STEPS}  validation [\d.]+ nats/token, [\d.]+ bits/byte over [\d,]+ tokens\n", out)
    assert re.search(r"validation [\d.]+ nats/token, .*; entropy of the text: unigram 2\.\d+, bigram 0\.\d+ nats", out)
    assert re.search(rf"done +step {STEPS} in \d+ s, peak memory [\d.]+ GiB; see {directory}/report.png\n$", out)


def test_the_model_learns(finished):
    """Catches a model that learns only frequencies of tokens or token pairs. Without attention no model of this text
    can get below the bigram entropy, because a space is followed by two letters equally often."""
    _, directory, _ = finished
    start, last = rows(directory, "start")[0], rows(directory, "eval")[-1]
    assert rows(directory, "train")[0]["loss"] > np.log(257) * 0.9, "the model was not random before the first step"
    assert last["loss"] < start["bigram_nats"] / 2 < start["unigram_nats"] / 2


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_evaluation_is_a_plain_sum_over_the_split(finished, home):
    """Catches a mean of batch means, padding counted as targets, a window left out, and bytes counted as tokens."""
    argv, directory, _ = finished
    stream = np.load(home / "easy" / "val-00000.npy").astype(np.int64)
    windows = -(-(len(stream) - 1) // 18)
    assert windows % 16 and (len(stream) - 1) % 18, "the test needs a last batch and a last window that are padded"
    cfg = main.parse([*argv, "--data.batch_size", str(windows)])  # all in one batch
    mesh = sharding.make_mesh("data=1")
    (batch,) = dataset.evaluation_batches(cfg, 0)
    params = restored(argv, directory).params
    logits_BTV = np.asarray(pipeline.logits(cfg, mesh)(params, sharding.put(batch, mesh)), np.float64)
    logits_NV = logits_BTV.reshape(-1, 280)[: len(stream) - 1]
    top_N = logits_NV.max(axis=1)
    nats_N = np.log(np.exp(logits_NV - top_N[:, None]).sum(axis=1)) + top_N - np.take_along_axis(
        logits_NV, stream[1:, None], axis=1)[:, 0]  # fmt: skip

    last = rows(directory, "eval")[-1]
    assert last["tokens"] == len(nats_N) == len(stream) - 1
    # float32 logits and sums of a few hundred nats
    assert last["loss"] == pytest.approx(nats_N.mean(), rel=2e-6)
    manifest = json.loads((home / "easy" / "manifest.json").read_text())
    text_bytes = manifest["splits"]["val"]["text_bytes"]
    assert last["bits_per_byte"] == pytest.approx(nats_N.sum() / np.log(2) / text_bytes, rel=2e-6)


def test_batches_are_weighted_by_their_tokens(home):
    """Catches a mean of means: three batches, of 288, 288 and fewer targets, at 1, 2 and 5 nats a token."""
    cfg = main.parse(flags(home / "easy", "unused"))
    nats = iter([1.0, 2.0, 5.0])

    def compiled(params, batch):
        tokens = float(np.asarray(batch["weights_BT"]).sum())
        seen.append(tokens)
        return next(nats) * tokens, tokens

    seen = []
    got = progress.evaluate(cfg, sharding.make_mesh("data=1"), compiled, None, 0)
    assert seen[:2] == [288, 288] and seen[2] < 288
    assert got["loss"] == pytest.approx((288 * 1 + 288 * 2 + seen[2] * 5) / sum(seen))
    assert (got["tokens"], got["full"]) == (sum(seen), True)
    nats, seen = iter([1.0]), []
    assert progress.evaluate(cfg, sharding.make_mesh("data=1"), compiled, None, 1)["full"] is False


# Complete, continue, start again --------------------------------------------------------------------------------------


def test_a_second_call_does_nothing(finished):
    """Catches a finished run that is trained again, or whose files are rewritten."""
    argv, directory, _ = finished
    before = snapshot(directory)
    status, out, err = run(argv)
    assert (status, err) == (0, "")
    assert out.startswith(f"{directory} is complete: {STEPS} of {STEPS} steps taken.\n  continue it:  ")
    assert snapshot(directory) == before


def printed(argv, what):
    """Return the words of the command that a second call prints."""
    _, out, _ = run(argv)
    line = next(line for line in out.splitlines() if line.strip().startswith(what))
    return shlex.split(line.split(":", 1)[1], comments=True)


def on_a_terminal(words):
    """Run a command in a pseudo-terminal 120 columns wide; return its exit status and what it printed."""
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(words, cwd=ROOT, stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    sent = b""
    with contextlib.suppress(OSError):  # Linux reports a closed terminal this way
        while piece := os.read(ours, 65536):
            sent += piece
    os.close(ours)
    return process.wait(), sent.decode()


@pytest.fixture
def continued(copied):
    """The finished run, continued in a terminal by the command that the second call printed."""
    argv, directory = copied
    return *on_a_terminal(printed(argv, "continue it")), directory


def test_the_printed_command_continues(continued, finished):
    """Catches a command that uses another run, drops a flag, starts at step 0, or does not parse; on a terminal, a bar
    without loss, speed or remaining time."""
    status, sent, directory = continued
    assert status == 0, sent
    assert f"resumed    at step {STEPS}" in sent
    assert [row["step"] for row in rows(directory, "train")] == list(range(1, 2 * STEPS + 1))
    assert untimed(rows(directory, "train"))[:STEPS] == untimed(rows(finished[1], "train"))
    assert [row["step"] for row in rows(directory, "end")] == [STEPS, 2 * STEPS]
    assert rows(directory, "train")[STEPS]["loss"] < 0.2, "the run started over with a random model"
    last, first = (f"{row['lr']:.2e}" for row in rows(directory, "train")[STEPS - 1 : STEPS + 1])
    assert (last, first) == ("1.00e-03", "5.50e-03")
    said = f"lr         {last} at step {STEPS}, {first} after it: the schedule now ends at step {2 * STEPS}"
    assert said in sent
    assert "\x1b[" in sent and "━" in sent
    assert re.search(r"loss \d\.\d+ +[\d,]+ tokens/s", sent) and "MFU" not in sent
    assert re.search(r"ETA.*\d:\d\d:\d\d", sent)
    assert re.search(rf"{2 * STEPS}/{2 * STEPS}", sent)


def test_the_printed_command_starts_again(copied, finished):
    """Catches old rows, samples, predictions or checkpoints that survive a restart, and other files deleted."""
    argv, directory = copied
    (directory / "notes.txt").write_text("mine")
    (directory / "predictions-stdlib_functions-20.jsonl").touch()
    words = printed(argv, "start again")
    assert words[0] == sys.executable or Path(words[0]).exists()
    assert (ROOT / words[1]).resolve() == ROOT / "main.py" or Path(words[1]).resolve() == ROOT / "main.py"
    status, out, err = run(words[2:])
    assert (status, err) == (0, "") and "resumed" not in out
    assert untimed(rows(directory)) == untimed(rows(finished[1]))
    assert (directory / "samples.txt").read_text() == (finished[1] / "samples.txt").read_text()
    assert (directory / "notes.txt").read_text() == "mine" and not [*directory.glob("predictions-*")]
    assert json.loads((directory / "config.json").read_text())["config"]["run"]["restart"] == "no"


# Interruptions --------------------------------------------------------------------------------------------------------


class PowerCut(Exception):
    """An exception that no code expects."""


def cut_at(monkeypatch, kind, step):
    write = Metrics.write

    def write_or_fail(self, row_kind, row_step, **values):
        if (row_kind, row_step) == (kind, step):
            raise PowerCut
        write(self, row_kind, row_step, **values)

    monkeypatch.setattr(Metrics, "write", write_or_fail)


def assert_same_run(argv, directory, finished):
    """Check that metrics and final state equal those of the uninterrupted run."""
    for kind in ("train", "eval"):
        assert untimed(rows(directory, kind)) == untimed(rows(finished[1], kind))
    # Bit-identical, because the program and its inputs are the same and nothing is rounded in between.
    assert_same_arrays(restored(argv, directory), restored(*finished[:2]))


def test_an_interrupted_run_resumes(finished, home, tmp_path, monkeypatch):
    """Catches a resume that repeats or skips data, keeps rows of repeated steps, restarts the schedule, or reads a
    checkpoint that later steps have changed."""
    argv, directory = flags(home / "easy", tmp_path), tmp_path / "small"
    with monkeypatch.context() as patched:
        cut_at(patched, "train", 47)
        with pytest.raises(PowerCut):
            run(argv)
    assert [row["step"] for row in rows(directory, "train")] == list(range(1, 47))
    assert checkpoint.latest_step(directory / "checkpoints") == 40
    status, out, err = run(argv)
    assert (status, err) == (0, "")
    assert f"resumed    at step 40 from {directory}/checkpoints" in out and "restore " in out
    assert [row["step"] for row in rows(directory, "start")] == [0, 40]
    assert_same_run(argv, directory, finished)


KILLED = """
import sys, time
import main
from train import checkpoint
from train.directory import Metrics
write = Metrics.write
def write_then_hang(self, kind, step, **values):
    write(self, kind, step, **values)
    if (kind, step) == ("train", 33):
        while checkpoint.latest_step(self.path.parent / "checkpoints") != 20:
            time.sleep(0.01)
        print("READY", flush=True)
        time.sleep(600)
Metrics.write = write_then_hang
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_killed_run_resumes(finished, home, tmp_path):
    """Catches what only SIGKILL reveals: results in a buffer, cleanup that never ran, a half-written last line."""
    argv, directory = flags(home / "easy", tmp_path), tmp_path / "small"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line == "READY\n":
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "".join(seen)
    assert [row["step"] for row in rows(directory, "train")] == list(range(1, 34))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    status, out, err = run(argv)
    assert (status, err) == (0, "") and "resumed    at step 20" in out
    assert_same_run(argv, directory, finished)


def test_a_run_killed_after_its_last_step_is_finished(finished, copied, monkeypatch):
    """Catches a run that counts as complete without an evaluation, a sample or a report; and a second evaluation."""
    argv, directory = copied
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]))  # as if cut just before the end row
    for name in ("samples.txt", "report.png"):
        (directory / name).unlink()
    monkeypatch.setattr(checkpoint, "save", lambda *_: pytest.fail("the run took a step, or saved one again"))
    status, out, err = run(argv)
    assert (status, err) == (0, "") and "is complete" not in out
    assert untimed(rows(directory, "train")) == untimed(rows(finished[1], "train"))
    assert untimed(rows(directory, "eval")) == untimed(rows(finished[1], "eval"))
    assert rows(directory)[-1]["kind"] == "end"
    assert {p.name for p in directory.iterdir()} == {*OWN_FILES, SET_ASIDE}
    assert run(argv)[1].startswith(f"{directory} is complete")


# Another run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, named",
    [
        ("--run.seed 3", "run.seed is 3 here and 0 there"),
        ("--model.d_expert 48 --optim.lr 0.5", "model.d_expert is 48 here and 28 there"),
        ("--optim.lr 0.5", "optim.lr is 0.5 here and 0.01 there"),
        ("--data.batch_size 8", "data.batch_size is 8 here and 16 there"),
        (
            "--data.path HOME/other",
            "tokens.source is 'text:HOME/other-texts/*.txt' here and 'text:HOME/easy-texts/*.txt'",
        ),
        ("--data.path HOME/merged", "tokens.tokenizer.name is 'bpe:HOME/ranks' here and 'bytes' there"),
    ],
)
def test_another_run_is_refused(finished, home, change, named):
    """Catches a run that resumes with another seed, model, optimizer or text as if nothing had changed."""
    argv, directory, _ = finished
    before = snapshot(directory)
    more = change.replace("HOME", str(home)).split()
    # One that would resume, and one that is already complete.
    for steps in (2 * STEPS, STEPS):
        status, out, err = run([*argv, *more, "--run.steps", steps])
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {directory} was started with other settings: ")
        assert "start another run with --run.name, or delete this one with --run.restart scratch" in err
        assert named.replace("HOME", str(home)) in err
    assert snapshot(directory) == before


def test_other_settings_are_refused_before_the_first_checkpoint(copied):
    """Catches a check of checkpoints only: a run killed before its first checkpoint is still another run."""
    argv, directory = copied
    shutil.rmtree(directory / "checkpoints")
    before = snapshot(directory)
    status, _, err = run([*argv, "--run.seed", "3"])
    assert status == 2 and snapshot(directory) == before
    assert f"{directory} was started with other settings: run.seed is 3 here and 0 there (in its config.json)" in err
    assert "--run.name" in err and "--run.restart" in err


def test_a_checkpoint_of_another_run_is_refused(copied):
    """Catches a checkpoint that was moved into a run's directory, which config.json alone does not reveal."""
    argv, directory = copied
    about = json.loads((directory / "config.json").read_text())
    about["config"]["optim"]["lr"] = 0.5
    (directory / "config.json").write_text(json.dumps(about))
    before = snapshot(directory)
    status, _, err = run([*argv, "--optim.lr", "0.5", "--run.steps", 2 * STEPS])
    assert status == 2 and snapshot(directory) == before
    assert (
        f"checkpoint {directory}/checkpoints/{STEPS} belongs to another run: optim.lr is 0.5 here and 0.01 there" in err
    )


def test_a_run_without_a_newer_setting_resumes(copied):
    """Catches a new setting, off by default, that makes older config.json files or checkpoints unusable."""
    argv, directory = copied
    newest, file = directory / "checkpoints" / str(STEPS), directory / "config.json"
    about, younger = json.loads(file.read_text()), {"model": "z_loss", "data": "packing", "run": "init_from"}
    for group, setting in younger.items():
        del about["config"][group][setting]
    file.write_text(json.dumps(about))
    (newest / "about.json").write_text(json.dumps(result_settings(about)))
    (newest / "manifest.json").unlink()
    checkpoint.write_manifest(str(newest), STEPS, None)
    assert run(argv)[1].startswith(f"{directory} is complete")
    assert f"resumed    at step {STEPS}" in run([*argv, "--run.steps", STEPS + 1])[1]
    file.write_text(json.dumps(about))
    refused = run([*argv, "--run.steps", STEPS + 2, "--model.z_loss", "0.1"])[2]
    assert "model.z_loss is 0.1 here and 0.0 there" in refused


def test_a_damaged_config_is_refused(copied):
    """Catches a traceback for a truncated file, and a run that resumes without knowing its settings."""
    argv, directory = copied
    (directory / "config.json").write_text('{"config": {"mod')
    status, _, err = run(argv)
    assert status == 2 and f"{directory}/config.json cannot be read" in err


def test_settings_that_do_not_decide_results_may_change(finished, home, tmp_path):
    """Catches a run that cannot resume because it logs more often, its tokens moved, or the machine is another."""
    argv, directory, _ = finished
    shutil.copytree(home / "easy", tmp_path / "moved")
    more = f"--data.path {tmp_path}/moved --mesh fsdp=2 --work.device_batch 4 --work.remat full"
    more += " --work.loss_chunk 20 --run.log_every 7 --run.eval_every 0 --run.keep_checkpoints 5 --run.sample_prompt x"
    status, out, err = run([*argv, *more.split()])
    assert (status, err) == (0, "") and out.startswith(f"{directory} is complete")


# Checkpoints and meshes -----------------------------------------------------------------------------------------------


def test_a_state_moves_to_another_mesh_and_back(finished, tmp_path):
    """Catches a checkpoint of shards instead of arrays, and arrays that return in another place or order."""
    argv, directory, _ = finished
    one = restored(argv, directory)
    assert_same_arrays(four := restored(argv, directory, "fsdp=2,tensor=2"), one)
    assert four.params.embedding_VD.addressable_shards[0].data.shape == (280 // 2, 24 // 2)
    with checkpoint.Saver(tmp_path / "checkpoints") as manager:
        checkpoint.save(manager, 3, four, {})
    assert_same_arrays(restored(argv, tmp_path), one)
