"""Tests of command lines: mistakes get a one-line error at once and change nothing, and --help is complete."""

import contextlib
import fnmatch
import glob
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from subprocess import PIPE

import jax
import numpy as np
import pytest

import main
import optimizer
from bench import overlap, step as bench_step
from config import PRESETS, Config, preset, replace
from data import prepare
from devices import memory_bytes, skip_absent_tpu
from plan import __main__ as plan_command
from startup import preflight
from tests import parity

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command_line")
    for n in range(9):
        (folder / f"{n}.txt").write_text("so it goes, " * (20 + n))
    prepare.prepare(prepare.Arguments(str(folder / "tokens"), f"text:{folder}/*.txt", val_share=0.3))
    return str(folder / "tokens")


def run(*argv):
    """Run the command in this process. Returns the exit status, standard output and standard error."""
    # As a file or a pipe: UTF-8, not a terminal.
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main.main(list(argv))
        except SystemExit as exit:  # from the parser
            status = exit.code
    return status, *(file.buffer.getvalue().decode() for file in (out, err))


def plain(text):
    """Return the text on one line, without the frame around it."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


# What is typed wrong --------------------------------------------------------------------------------------------------

NAME = "use letters, digits, '.', '_' and '-'"
WRONG = {
    "lapto": f"unknown preset 'lapto'; did you mean 'laptop'? known: {', '.join(PRESETS)}",
    "tiny --run.step 5": "Unrecognized options: --run.step, 5 Perhaps you meant: --run.steps INT",
    "tiny --run.wandb_project mine": "--run.wandb_project does not exist; use --run.tracker wandb; the environment ",
    "tiny --run.init_from org/model-8b": "org/model-8b: no config.json; pass a run directory, such as runs/laptop; if "
    "org/model-8b is a model of Hugging Face, download its folder yourself, because nothing here downloads weights, "
    "then run python -m weights from-hf FOLDER --out runs/NAME",
    "tiny extra": "Unrecognized options: extra",
    "tiny --run.steps many": "Error parsing --run.steps: invalid literal for int() with base 10: 'many'",
    "tiny --optim.schedule cosin": "optim.schedule='cosin': 'cosin' should be cosine:FINAL, wsd:DECAY:FINAL, rsqrt",
    "tiny --mesh fdsp=2": "unknown axis 'fdsp'; did you mean 'fsdp'? known: data, stage, fsdp, expert, context,",
    "tiny --mesh fsdp=two": "mesh 'fsdp=two': 'fsdp=two' should be AXIS=SIZE",
    "tiny --mesh fsdp:2": "'fsdp:2'",
    "tiny --mesh fsdp=2,fsdp=4": "axis 'fsdp' is given twice",
    "tiny --model.n_layers 4": "n_layers - dense_prefix = 3 must be a positive multiple of 2, the length of the ",
    "tiny --model.n_layers 1": "must be a positive multiple of 2, the length of the layer pattern; use 3",
    "tiny --model.dropout 2": "model.dropout=2.0: must be at least 0 and below 1",
    "tiny --run.name a/b": f"run.name='a/b': {NAME}",
    "tiny --run.name=$(date)": f"run.name='$(date)': {NAME}",
    "tiny --run.name=": f"run.name='': {NAME}",
    "tiny --run.name ..": f"run.name='..': {NAME}",
    "tiny --run.steps 0": "run.steps=0: must be at least 1",
    "tiny --run.log_every 0": "run.log_every=0: must be at least 1",
    "tiny --run.checkpoint_every -1": "run.checkpoint_every=-1: must be at least 1",
    "tiny --run.keep_checkpoints 0": "run.keep_checkpoints=0: must be at least 1",
    "tiny --run.eval_every -1": "run.eval_every=-1: must be at least 0",
    "tiny --data.batch_size 0": "data.batch_size=0: must be at least 1",
    "tiny --data.batch_size 10 --mesh fsdp=4": "cannot split data.batch_size=10 sequences over data*fsdp*expert = 4 "
    "batch shards (10 % 4 = 2); use data.batch_size=8 or 12",
    "tiny --devices 8 --mesh fsdp=3": "over data*fsdp*expert = 3 batch shards, on 3 of 8 devices (16 % 3 = 1); use ",
    "tiny --mesh fsdp=4,tensor=4": "mesh fsdp=4,tensor=4 needs 4 * 4 = 16 devices, and there are 8; --devices 16 "
    "simulates them",
    "tiny --devices 4 --mesh data=4": "--devices 4: this process already uses 8 devices; start a new process",
    "tiny --devices 3": "--devices 3: without --mesh only one device would be used; set a mesh, e.g. --mesh fsdp=3",
    "tiny --devices -1": "run.devices=-1: must be at least 0",
    "tiny --mesh tensor=4": "cannot split data.seq_len=18 positions over context*tensor = 4 devices (18 % 4 = 2); "
    "use data.seq_len=16 or 20",
    "tiny --mesh tensor=8 --data.seq_len 16": "cannot split 4 query heads of ",
    "tiny --mesh stage=4": "cannot split 2 layer blocks of blocks.dense.norm_attention_D over mesh axes stage = 4",
    "tiny --run.sample_prompt=0123456789abcdefg": "a prompt of 17 tokens and the end-of-text token before it",
    "tiny --model.capacity_factor 0.01": "capacity is 0",
    "tiny --model.vocab_size 200": "has token ids 0..256, but model.vocab_size=200 allows 0..199; use --model.vocab",
    "tiny --data.seq_len 5000": "a window needs data.seq_len + 1 = 5001; use --data.seq_len ",
    "tiny --data.path nowhere/stdlib-gpt2": "no tokens at 'nowhere/stdlib-gpt2' (it has no manifest.json); prepare "
    "them with python -m data.prepare --source stdlib --tokenizer gpt2 --out nowhere/stdlib-gpt2",
    "tiny --run.dir /dev/null": "Not a directory: '/dev/null/tiny",
}  # fmt: skip


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_gets_a_clear_error_at_once(typed, tokens, tmp_path, monkeypatch):
    """Catches a traceback, a status that scripts read as success, a message that does not say what to change, minutes
    of compilation before the message, and a leftover run directory that would block the corrected command."""
    compiled = []
    monkeypatch.setattr(optimizer, "init", lambda *_: compiled.append("init"))
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: compiled.append("step"))
    preset, *words = typed.split(" ")
    status, out, err = run(preset, "--data.path", tokens, "--run.dir", str(tmp_path / "runs"), *words)
    assert status == 2, out
    assert WRONG[typed] in plain(err), err
    assert "Traceback" not in err and len(err.splitlines()) < 20
    assert not compiled
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_refused_with_the_plan(tokens, tmp_path, monkeypatch):
    """Catches a run that starts and is killed minutes later, and an error without numbers or a suggestion."""
    begun = []
    monkeypatch.setattr(preflight, "memory_bytes", lambda devices: 2**20)
    monkeypatch.setattr(main, "restore_or_init", lambda *_: begun.append(True) or sys.exit(7))
    words = ["tiny", "--data.path", tokens, "--run.dir", str(tmp_path), "--work.remat", "none"]
    status, _, err = run(*words)
    numbers = dict(re.findall(r"(\w+) ([\d.]+) MiB", err.split(": ", 2)[2]))
    asked = float(re.search(r"a device would need ([\d.]+) MiB, and has 1.000 MiB: ", err)[1])
    assert status == 2 and not begun
    assert sum(map(float, numbers.values())) == pytest.approx(asked, abs=0.005) and len(numbers) > 3
    assert "; try work.remat=full" in err and err.endswith("; --run.check no starts it anyway\n")
    assert run(*words, "--run.check", "no")[0] == 7 and begun


def test_simulated_devices_share_the_machines_memory(monkeypatch):
    """Catches eight devices that each count the memory of the whole machine."""
    whole, share = memory_bytes(jax.devices()[:1]), memory_bytes([jax.devices()[0]] * 8)
    assert share == whole // 8 and 2**30 < whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    chip = types.SimpleNamespace(platform="tpu", memory_stats=lambda: {"bytes_limit": 123})
    assert memory_bytes([chip, chip]) == 123


def test_a_mistake_deletes_nothing(tokens, tmp_path):
    """Catches a restart that deletes the old run before it checks whether the new one is possible."""
    directory = tmp_path / "tiny"
    for name in ("config.json", "metrics.jsonl", "checkpoints/5/state"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}\n")
    for wrong in ("--mesh=fsdp=3", "--mesh=tensor=8", "--model.capacity_factor=0.01"):
        status, _, _ = run("tiny", "--data.path", tokens, "--run.dir", str(tmp_path), "--run.restart", "scratch", wrong)
        assert status == 2
        assert len([path for path in directory.rglob("*") if path.is_file()]) == 3, wrong


def test_the_process_ends_with_status_2(tokens, tmp_path):
    """Catches a process that does not exit with the status, and an error on standard output."""
    words = [sys.executable, "main.py", "tiny", "--data.path", tokens, "--mesh", "fsdp=3", "--run.dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot split data.batch_size=16 sequences") and not done.stdout


def test_a_closed_pipe_prints_no_error():
    """Catches a traceback, or Python's own error at exit, after `python -m plan | head -1`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # written as Python ends
    words = [sys.executable, "-m", "plan"]
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE, text=True) as command:
        command.stdout.close()
        said = command.stderr.read()
    assert (command.returncode, said) == (1, "")


def test_every_command_may_be_interrupted(monkeypatch, capsys):
    """Catches a page of traceback after Ctrl-C in a search that takes minutes."""

    def run(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "run", run)
    assert plan_command.main(["tiny"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_an_interrupt_prints_how_to_resume(monkeypatch, tmp_path):
    """Catches a traceback after Ctrl-C, and advice that would restart a run instead of resuming it."""

    def train(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "train", train)
    words = ["tiny", "--devices", "8", "--mesh", "data=8", "--run.dir", str(tmp_path)]
    status, out, err = run(*words, "--run.restart", "scratch", "--run.steps", "7")
    assert (status, err) == (130, "") and "no checkpoint was saved; this starts at step 0" in out
    assert out.rstrip().endswith(f"main.py {' '.join(words)} --run.steps 7")


WITHOUT_JAX = """\
import runpy, sys

class Refuse:
    def find_spec(self, name, *_):
        assert name.partition(".")[0] not in ("jax", "flax", "orbax", "optax"), f"{name} is imported"

sys.meta_path.insert(0, Refuse())
module, *sys.argv = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
EARLY = {
    "main lapotp": "did you mean 'laptop'?",
    "main laptop --run.stps 3": "--run.steps INT",
    "main laptop --run.steps many": "invalid literal for int()",
    "plan lapotp": "did you mean 'laptop'?",
    "plan laptop --topolgy v4:4x4x2": "--topology STR",
    "generate runs/laptop --promt x": "--prompt [STR",
    "generate runs/laptop --top_p 2": "top_p=2.0: must be above 0 and at most 1",
    "evaluate runs/laptop --perplxity tokens": "--perplexity STR",
    "serve runs/laptop --prt 3": "--port INT",
    "bench.step lapotp": "did you mean 'laptop'?",
    "tests.parity tny": "did you mean 'tiny'?",
    "tests.fuzz --cont 3": "--count INT",
}


@pytest.mark.parametrize("typed", EARLY)
def test_a_mistake_is_reported_before_jax_is_imported(typed):
    """Catches an unknown preset or flag that is reported only after seconds of imports, and a traceback for it."""
    module, *words = typed.split()
    command = [sys.executable, "-c", WITHOUT_JAX, module, module, *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True)
    assert done.returncode == 2 and EARLY[typed] in plain(done.stderr), done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


# A run's settings given back ------------------------------------------------------------------------------------------

COMMANDS = {"main": main, "plan": plan_command, "bench.step": bench_step, "bench.overlap": overlap,
            "tests.parity": parity}  # fmt: skip


def settings_of(command, *argv):
    """Carries the settings that a command read."""
    read = COMMANDS[command].parse(list(argv))
    return read if isinstance(read, Config) else read[0]


@pytest.mark.parametrize("whole", [True, False], ids=["config.json", "settings alone"])
@pytest.mark.parametrize("command", COMMANDS)
def test_settings_are_read_from_a_file(tmp_path, command, whole):
    """Catches a value that is lost or replaced by a preset's, a flag that does not override the file, a `restart` or
    `replay` that is read from the file, and a command that cannot read the file."""
    wanted = preset("tiny", **{"model.d_ff": 48, "optim.lr": 1, "mesh": "fsdp=2", "run.name": "mine", "data.path": "t",
                               "run.sample_prompt": "", "model.tie_embeddings": True})  # fmt: skip
    once = {"run.restart": "scratch", "run.check": "only", "run.replay": 3, "run.profile": "1:2"}
    said_once = replace(wanted, **once).to_dict()
    (tmp_path / "c.json").write_text(json.dumps({"config": said_once, "data": {"source": "x"}} if whole else said_once))
    file = str(tmp_path / "c.json")
    assert settings_of(command, "--config", file) == settings_of(command, f"--config={file}") == wanted
    changed = replace(wanted, **{"model.d_ff": 56, "mesh": "tensor=2"})
    assert settings_of(command, "--model.d_ff", "56", "--config", file, "--mesh", "tensor=2") == changed


def test_settings_missing_in_a_file_have_their_defaults(tmp_path):
    """Catches a file of an older version that is refused, or completed from a preset that the user did not name."""
    (tmp_path / "c.json").write_text('{"model": {"n_layers": 3}, "optim": {}}')
    assert main.parse(["--config", str(tmp_path / "c.json")]) == replace(Config(), **{"model.n_layers": 3})


FILES = {  # what a file holds, None: there is none -> what is said of it
    None: "No such file or directory; pass a run's config.json, e.g. --config runs/laptop/config.json",
    "{'config'": "not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); pass a run's",
    "[1]": "the top level must be a JSON object, but is [1]",
    '{"config": {"model": {"n_layer": 3}}}': "unknown setting model.n_layer; did you mean 'n_layers'? closest of ",
    '{"modell": {}}': "unknown setting modell; did you mean 'model'? known: model, mesh, work, data, ",
    '{"model": 3}': "model must be a JSON object, but is 3",
    '{"run": {"steps": "many"}}': "run.steps='many': should be a whole number",
    '{"run": {"steps": 2.5}}': "run.steps=2.5: should be a whole number",
    '{"run": {"steps": true}}': "run.steps=True: should be a whole number",
    '{"optim": {"lr": null}}': "optim.lr=None: should be a number",
    '{"model": {"tie_embeddings": 1}}': "model.tie_embeddings=1: should be true or false",
    '{"run": {"name": 5}}': "run.name=5: should be text",
    '{"optim": {"schedule": "cosin"}}': "optim.schedule='cosin': 'cosin' should be cosine:FINAL, ",
    '{"run": {"steps": 0}}': "run.steps=0: must be at least 1",
    '{"mesh": {"fsdp": 0}}': "mesh.fsdp=0: must be at least 1",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", FILES, ids=lambda text: re.sub(r"\W+", " ", str(text)))
def test_an_invalid_file_is_refused_by_name(tmp_path, capsys, command, text):
    """Catches a traceback, a setting that is silently ignored, and a value that fails minutes later."""
    file = tmp_path / "c.json"
    if text is not None:
        file.write_text(text)
    assert COMMANDS[command].main(["--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --config {file}: ") and FILES[text] in err and err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_start_from_one_preset_or_file(tmp_path, capsys, command):
    """Catches a file that silently overrides a preset or another file, and a flag that is read as a file name."""
    (tmp_path / "a").write_text("{}")
    a = str(tmp_path / "a")
    for argv, what in (
        (["tiny", "--config", a], f"preset 'tiny' and --config {a}: pass only one preset or --config file"),
        (["--config", a, "tiny"], f"preset 'tiny' and --config {a}: pass only one preset or --config file"),
        (["--config", a, "--config=b"], f"--config {a} and --config b: pass only one preset or --config file"),
        (["--config"], "--config needs the config.json of a run, such as --config runs/laptop/config.json\n"),
        (["--config="], "--config needs the config.json of a run, such as --config runs/laptop/config.json\n"),
    ):
        assert COMMANDS[command].main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {what}") and err.count("\n") == 1


def test_a_run_is_repeated_or_resumed_from_its_settings(tokens, tmp_path):
    """Catches settings that config.json loses, a repeated run that resumes the first one, and a run that is refused or
    trained again because its settings came from its own file."""
    small = "--model.n_layers 3 --model.dense_prefix 0 --model.moe_every 1 --model.attention gqa --model.n_shared 0"
    more = f"--optim.lr 0.013 --data.path {tokens} --run.name one --run.dir {tmp_path} --run.steps 3"
    losses = lambda name: [(row["step"], row["loss"]) for row in map(json.loads, (tmp_path / name / "metrics.jsonl")
                           .read_text().splitlines()) if row["kind"] in ("train", "eval")]  # fmt: skip
    assert run("tiny", *small.split(), *more.split())[::2] == (0, "")
    given = ("--config", str(tmp_path / "one" / "config.json"))
    status, out, err = run(*given, "--run.name", "two")
    assert (status, err) == (0, "") and "resumed" not in out
    assert losses("two") == losses("one") and len(losses("one")) == 4
    status, out, _ = run(*given)
    assert status == 0 and out.startswith(f"{tmp_path}/one is complete: 3 of 3 steps taken.\n  continue it:  ")
    assert f"main.py --config {tmp_path}/one/config.json --run.steps 6\n" in out
    status, out, err = run(*given, "--run.steps", "4")
    assert (status, err) == (0, "") and f"resumed    at step 3 from {tmp_path}/one/checkpoints\n" in out


# Devices --------------------------------------------------------------------------------------------------------------


def test_devices_are_not_simulated_beside_an_accelerator(monkeypatch):
    """Catches a run for eight accelerators that trains on eight simulated CPU devices, and a run for the CPU that
    blocks the accelerator."""
    device = types.SimpleNamespace(platform="gpu", device_kind="H100")
    monkeypatch.setattr(jax, "devices", lambda: [device] * 2)
    status, out, err = run("tiny", "--devices", "8", "--mesh", "data=8")
    assert (status, out) == (2, "")
    assert err == (
        "error: --devices 8 simulates CPU devices, but this machine has 2 x H100; drop --devices, or set "
        "JAX_PLATFORMS=cpu\n"
    )


@pytest.mark.parametrize("libtpu, env, files, wanted", [
    (True, {}, [], "cpu"),
    (True, {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "x"}, ["/dev/vfio/vfio"], "cpu"),
    (False, {}, [], None),
    (True, {}, ["/dev/accel0"], None),
    (True, {}, ["/dev/vfio/0"], None),
    (True, {"TPU_WORKER_ID": "0"}, [], None),
    (True, {"JAX_PLATFORMS": "tpu"}, [], "tpu"),
])  # fmt: skip
def test_libtpu_is_not_loaded_without_a_tpu(monkeypatch, libtpu, env, files, wanted):
    """Catches libtpu's page of errors before every command on a machine without a TPU; and a TPU that is not used."""
    monkeypatch.setattr(os, "environ", dict(env))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: libtpu if name == "libtpu" else None)
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(files, pattern))
    set_to = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append((name, value)))
    skip_absent_tpu()
    assert os.environ.get("JAX_PLATFORMS") == wanted
    assert set_to == ([("jax_platforms", "cpu")] if wanted == "cpu" else []), "JAX has read its environment before"


def test_a_run_on_simulated_devices_resumes_on_another_mesh(tokens, tmp_path):
    """Catches a flag that is read after JAX has started, a run that fails with sharded parameters (in evaluation,
    checkpoint or sample), and a checkpoint that only its own mesh can read."""
    small = "--model.n_layers 2 --model.dense_prefix 0 --model.moe_every 1 --model.attention gqa --model.n_shared 0"
    every = "--run.steps 5 --run.eval_every 3 --run.checkpoint_every 2"
    argv = ["tiny", *small.split(), "--data.path", tokens, "--run.dir", str(tmp_path), *every.split(), "--devices", "8",
            "--mesh"]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    words = [sys.executable, "main.py", *argv, "fsdp=2,stage=2,tensor=2"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mesh       stage=2,fsdp=2,tensor=2 on 8 x cpu\n" in done.stdout
    assert "step     3/5  validation " in done.stdout and "done       step 5 in " in done.stdout

    status, out, err = run(*argv, "data=2,expert=2", "--run.steps", "6")
    assert (status, err) == (0, "")
    assert f"resumed    at step 5 from {tmp_path}/tiny/checkpoints\n" in out and "step     6/6  loss " in out
    samples = re.split(r"(?m)^--- step \d\n", (tmp_path / "tiny" / "samples.txt").read_text())
    assert [text.startswith("def ") for text in samples] == [False, True, True]


# Help -----------------------------------------------------------------------------------------------------------------


def settings(values, prefix="--"):
    for name, value in values.items():
        if isinstance(value, dict) and name != "mesh":
            yield from settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_help_shows_every_setting_with_the_defaults_of_the_preset():
    """Catches help that wraps too often, hides a group of settings, or shows another preset's values as defaults."""
    status, out, err = run("tiny", "--help")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 275 and max(map(len, lines)) <= 120
    for group in ("model", "work", "data", "optim", "run"):
        assert f" {group} options " in out
    for name in PRESETS:
        assert re.search(rf"\b{name}\b", out), name
    for name, value in settings(preset("tiny").to_dict()):
        assert re.search(rf"{re.escape(name)}\b", out), name
        if isinstance(value, int | float) and not isinstance(value, bool):
            kind = "INT|{auto}" if "work." in name else "INT" if isinstance(value, int) else "FLOAT"
            _, found, after = plain(out).partition(f" {name} {kind} ")
            assert found and after.partition("(default: ")[2].startswith(f"{value})"), name
    assert "the residual stream (default: 128)" in plain(run("--help")[1]), "without a preset it is laptop"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_both_starting_points(capsys, command):
    """Catches an undocumented --config, and help that shows the values of another file, or asks for a preset."""
    for argv, said in (
        (["--help"], "or from a run with --config FILE"),
        (["tiny", "--help"], "the preset ('tiny' here), or "),
    ):
        with pytest.raises(SystemExit, match="0"):
            COMMANDS[command].main(argv)
        out = plain(capsys.readouterr().out)
        assert said in out and " [PRESET | --config FILE] [-h] [OPTIONS]" in out


HELP = {  # command -> its examples, in the order of its help
    "-m pipeline": ["show 1f1b --stages 4 --microbatches 8", "draw zb --out zb.png",
                    "compare --stages 4 --microbatches 8"],
    "-m plan": ["llama3_8b --topology v4:4x4x4   # which mesh of these chips is the fastest that fits?",
                "llama3_70b --topology v5p:8x8x8,64*h100 --tokens 15T --price v5p=4.2,h100=2.5   # and what it costs",
                "Qwen3-8B/config.json --topology v5p:4x4x4   # the same for a model of Hugging Face",
                "moe1b --topology v4:4x4x2 --search 32 --verify 5   # compile the first 5 meshes, and compare",
                "moe1b --topology v4:4x4x2              # plan one mesh, that of the preset or of --mesh",
                "moe1b --topology v4:4x4x2 --compile    # compare with the TPU compiler; needs no TPU",
                "moe1b --topology v4:4x4x2 --why        # compare with the traced step, line by line",
                "moe1b --topology v4:4x4x2 --max_batch  # the largest batch that fits, found by compiling",
                "laptop --mesh fsdp=4 --parameters      # every parameter, its shape and its shard on a device",
                "laptop --mesh fsdp=4 --compile         # without a topology: simulated CPU devices",
                "llama3_8b --inference --topology v5e:2x4 --mesh tensor=8 --prompt 2048 --answer 256",
                "llama3_70b --inference --topology v5e:8x8 --search 64 --token_ms 60"],
    "-m plan.replay": ["step.hlo --topology v5p:4x4x4 --mesh fsdp=16,tensor=4"],
    "-m bench.step": ["--mesh stage=2,fsdp=4"],
    "-m bench.data": ["--data.batch_size 512", "laptop --data.path tokens/stdlib-bytes"],
    "-m bench.gpu": ["--rounds 5                                # dense_124m and a small MoE",
                     "--device cpu --rounds 1                   # without a GPU: test the benchmark",
                     "--models moe --set work.remat=none       # settings of main.py, for both trainers"],
    "-m bench.report": ["", "--parts matmul attention --minutes 2",
                        "--device cpu      # without an accelerator: test the report",
                        "--rows report.json >> bench/published.csv"],
    "-m bench.serve": ["--batches 1 8 --rounds 3"],
    "-m bench.overlap": ["llama3_8b --topology v4:4x4x4 --mesh fsdp=32,tensor=2 --data.batch_size 64",
                         "llama3_8b --topology v4:4x4x4 --mesh fsdp=64 --data.batch_size 64 --seconds --plot a.png"],
    "-m bench.grouped": ["--rows 16384 --experts 16"],
    "-m bench.muon": [""],
    "-m bench.options": ["--topology v5p:2x2x4 v6e:4x4"],
    "-m bench.partition": ["", "--topology v5e:4x4", "--step --topology v5e:4x4 --mesh fsdp=16"],
    "-m bench.documents": ["--path tokens/stdlib-bytes",
                           "--path tokens/stdlib-gpt2 --seq_len 32768 --context 4 --topology v4:4x4x4"],
    "-m bench.peers": ["mixtral_8x7b", "llama2_7b --hlo step.hlo   # the text of our step, compiled before"],
    "-m bench.plan": ["--drawn 4", "llama3_8b --topology v4:4x4x4 --data.batch_size 64 --data.seq_len 4096 --first 10"],
    "-m weights": ["from-hf DIR --out runs/x", "to-hf runs/x --out DIR", "slim runs/x DIR --dtype bfloat16"],
    "-m evaluate": ["runs/laptop --perplexity tokens/stdlib-bytes",
                    "runs/laptop --perplexity tokens/stdlib-bytes --follow   # as the run trains",
                    "runs/laptop --task stdlib_functions --limit 100",
                    "runs/laptop --tasks lambada_openai --limit 100   # needs extra-evaluate"],
    "main.py": ["laptop --run.steps 100",
                "Qwen3-0.6B/config.json   # a model of Hugging Face, or its folder, from random parameters"],
    "-m generate": ["runs/laptop --prompt 'def '", "runs/laptop --prompts FILE --json",
                    "runs/laptop --prompt 'def ' --beams 4",
                    "runs/laptop --prompt 'def ' --draft runs/tiny --draft_tokens 4"],
    "-m serve": ["runs/laptop", "runs/laptop --mesh tensor=4 --slots 32"],
    "-m data.tasks": ["stdlib_functions --examples 1"],
    "-m train.report": ["runs/laptop", "runs/a runs/b --out both.png"],
    "-m plan.profile": ["runs/laptop"],
    "-m train.selfcheck": ["--devices 8"],
    "-m train.checkpoint": ["ls runs/laptop", "verify runs/laptop", "keep runs/laptop 300"],
    "-m data.prepare": ["--source stdlib --tokenizer bytes --out tokens/stdlib-bytes",
                        "--source 'jsonl:mine/*.jsonl' --tokenizer gpt2 --out tokens/mine-gpt2"],
    "-m data.check": ["tokens/stdlib-bytes", "tokens/stdlib-bytes --plot lengths.png"],
    "-m data.train_tokenizer": ["--source stdlib --vocabulary 4096 --out tokens/stdlib.bpe"],
}  # fmt: skip


@pytest.mark.parametrize("command", HELP)
def test_help_begins_with_an_example(command):
    """Catches help without a first command to copy."""
    words = [sys.executable, *command.split(), "--help"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    usage, blank, *lines = done.stdout.splitlines()
    assert usage.startswith(f"usage: python {command} ") and not blank
    assert [line[5:] for line in lines[: len(HELP[command])]] == [
        f"python {command} {more}".rstrip() for more in HELP[command]
    ]
    assert lines[0].startswith("e.g. ") and not lines[len(HELP[command])], "a sentence follows on its own"
    assert max(map(len, lines)) <= 120


def test_help_explains_each_setting():
    """Catches a setting without a description, and a description that --help does not print."""
    status, out, _ = run("tiny", "--help")
    assert status == 0
    said = plain(out)
    for name, _ in settings(preset("tiny").to_dict()):
        start = re.search(rf"{re.escape(name)}(?![\w.])", said)
        text = said[start.end() : said.index("(default:", start.end())]
        words = re.findall(r"\b[a-z]{2,}\b", re.sub(r"--\S+|{\S+}", "", text))
        assert len(words) >= 2, f"{name}: {text}"
    assert "steps of linear warm-up from 0 to lr (default: 2)" in said


def test_help_is_quick_in_a_process():
    """Catches help that needs tokens, devices or a terminal."""
    env = os.environ | {"COLUMNS": "120"}
    done = subprocess.run([sys.executable, "main.py", "--help"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 275 and "\x1b" not in done.stdout


# Compiled programs ----------------------------------------------------------------------------------------------------


def compile_something(n, asked, *argv):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAX_COMPILATION_CACHE_DIR", asked)
        if asked == "auto":
            patched.delenv("JAX_COMPILATION_CACHE_DIR")
        with main.compile_cache(main.parse(["tiny", *argv])):
            jax.jit(lambda x: x * n + 1)(np.ones(n, np.float32)).block_until_ready()


def test_compiled_programs_are_cached_in_the_given_directory(tmp_path, monkeypatch):
    """Catches a directory that is ignored because another one was used before, a default outside the user's cache
    folder, an empty name that still caches, and settings that outlive the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    count = lambda: len([path for path in tmp_path.rglob("*") if path.is_file()])
    settings = lambda: (jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir)
    before = settings()

    compile_something(11, str(tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) and not (tmp_path / "xdg").exists()
    compile_something(13, "auto")
    assert list((tmp_path / "xdg" / "axis-by-axis").rglob("*"))
    kept = count()
    compile_something(17, "")
    assert count() == kept
    monkeypatch.delenv("XDG_CACHE_HOME")
    compile_something(19, "auto")
    assert list((tmp_path / "home" / ".cache" / "axis-by-axis").rglob("*"))
    assert settings() == before


def test_programs_of_several_simulated_devices_are_not_cached(tmp_path):
    """Catches a run that reads such a program from a file, where its collectives have lost their order. Programs of
    `compile/ordered.py` are cached; see tests/compile."""
    cache = str(tmp_path / "cache")
    compile_something(23, cache, "--devices", "8", "--mesh", "fsdp=2")
    assert not [*Path(cache).iterdir()]
    compile_something(23, cache)
    assert list(Path(cache).iterdir())

    asked = "jax.config.jax_enable_compilation_cache, jax.device_count()"
    code = "import devices; devices.{}(2); import jax; print(" + asked + ")"
    here = {"JAX_NUM_CPU_DEVICES", "JAX_ENABLE_COMPILATION_CACHE", "NPROC", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in here} | {"JAX_COMPILATION_CACHE_DIR": cache}
    for function in ("simulate_devices", "use_devices"):
        words = [sys.executable, "-c", code.format(function)]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("False 2\n", ""), function
