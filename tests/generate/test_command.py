"""The command `python -m generate`: sources of prompts, output, and errors."""

import contextlib
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from generate.request import Request
from tests.generate.models import rule_text

ROOT = Path(__file__).parent.parent.parent
COMPILING = "compiling  for inference (seconds to minutes) ..."
command = importlib.import_module("generate.__main__")


def run(*argv, stdin=b""):
    """Run the command in this process. Returns its exit status, stdout and stderr."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command.main([str(word) for word in argv])
        except SystemExit as exit:  # from the parser
            status = exit.code
        finally:
            sys.stdin = before
    return status, out.getvalue(), err.getvalue()


def requests_of(*argv, stdin=b"", monkeypatch):
    """Return the requests that a command line makes."""
    made = []
    monkeypatch.setattr(command.generate, "load", lambda directory, **how: directory)
    monkeypatch.setattr(command, "print_texts", lambda sampler, requests, as_json: made.extend(requests))
    assert run("runs/none", *argv, stdin=stdin) == (0, "", "")
    return made


def test_prompts_come_from_flags_files_and_standard_input(tmp_path, monkeypatch):
    """Catches a source that is ignored, a line that is cut at a form feed or keeps its line end, flags that do not
    reach every text, and settings of a line that do not override the flags."""
    ask = lambda *argv, **more: requests_of(*argv, **more, monkeypatch=monkeypatch)
    assert ask() == [Request("")]
    assert ask("--prompt", "") == [Request("")]
    flags = "--tokens 5 --temperature 0.5 --top-k 7 --top_p 0.9 --seed 3".split()
    want = dict(tokens=5, temperature=0.5, top_k=7, top_p=0.9)
    assert ask("--prompt", "a", "b c", *flags) == [Request("a", **want, seed=3), Request("b c", **want, seed=4)]

    text = 'd\x0ce\u2028 f\r\n\n{"prompt": "g\\nh", "top_k": 2, "temperature": 1}\n{"seed": 9}\n'
    (tmp_path / "prompts").write_text(text, encoding="utf-8", newline="")
    listed = [
        Request("d\x0ce\u2028 f", **want, seed=4),
        Request("g\nh", **want | {"top_k": 2, "temperature": 1}, seed=5),
        Request("", **want, seed=9),
    ]
    flags = ["--prompt", "a", *flags, "--prompts"]
    assert ask(*flags, tmp_path / "prompts") == [Request("a", **want, seed=3), *listed]
    assert ask(*flags, "-", stdin=text.encode()) == [Request("a", **want, seed=3), *listed]


def test_the_command_continues_a_text(run_directory):
    """Catches a command that fails as a separate process, with UTF-8 through a pipe, or while it streams the text."""
    process = subprocess.run(
        [sys.executable, "-m", "generate", run_directory, "--prompts", "-", "--tokens", "9", "--temperature", "0"],
        input="→!".encode(), cwd=ROOT, capture_output=True, timeout=120,
    )  # fmt: skip
    said = f"reading    step 200 of {run_directory}/checkpoints\n{COMPILING}\n"
    assert process.stderr.decode() == said
    assert process.stdout.decode() == rule_text("→!", 9) + "\n"
    assert process.returncode == 0


def test_the_command_prints_texts_or_json(run_directory):
    """Catches continuations in the wrong order, JSON that cannot be parsed, and a text that is shortened without a
    note."""
    argv = [run_directory, "--prompt", "!", "b", "--temperature", "0", "--seed", "4"]
    status, out, err = run(*argv, "--tokens", "20")
    assert (status, err.splitlines()[1:]) == (0, [COMPILING]), "before it only the step it reads"
    assert out == f"--- 0\n{rule_text('!', 20)}\n--- 1\n{rule_text('b', 20)}\n"
    status, out, err = run(*argv, "--json")
    assert status == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"prompt": prompt, "tokens": 200, "temperature": 0, "top_k": 50, "top_p": 0.95, "min_p": 0, "stop": [],
         "repetition_penalty": 1, "seed": seed, "logprobs": 0, "text": rule_text(prompt, 22), "ended": "length"}
        for prompt, seed in (("!", 4), ("b", 5))]  # fmt: skip
    assert err.splitlines()[-2] == (
        "note: text 1 gets at most 22 new tokens: its prompt leaves no room for 200 in data.seq_len=24"
    )


def test_samples_and_log_probabilities(run_directory):
    """Catches identical samples, and log-probabilities of other tokens."""
    argv = [run_directory, "--prompt", "!", "--tokens", "3", "--temperature", "5", "--top-k", "0", "--samples", "2"]
    status, out, _ = run(*argv, "--logprobs", "2", "--json", "--stop", "~~")
    first, second = map(json.loads, out.splitlines())
    assert status == 0 and first["text"] != second["text"]
    assert (first["seed"], second["seed"], first["stop"]) == (0, 1, ["~~"])
    for one in (first, second):
        drawn = (token["token"] for token in one["drawn"])
        raw = [bytes.fromhex(x[6:].replace("\\x", "")) if x.startswith("bytes:") else x.encode() for x in drawn]
        assert one["text"] == "!" + b"".join(raw).decode(errors="replace")
        for token in one["drawn"]:
            (likeliest, most), (_, less) = token["likeliest"]
            assert 0 >= most >= less and most >= token["logprob"]
            assert token["token"] != likeliest or token["logprob"] == most
    assert first["drawn"][0]["likeliest"][0][0] == "$" and first["drawn"][0]["likeliest"][0][1] > -0.1


def test_the_command_runs_on_a_mesh(run_directory):
    """Catches a mesh that is ignored, a single prompt that cannot be split over it, and a traceback if a parameter
    cannot."""
    argv = [run_directory, "--prompt", "!", "--tokens", "9", "--temperature", "0", "--devices", "8", "--mesh"]
    assert run(*argv, "fsdp=2,context=2")[:2] == (0, rule_text("!", 9) + "\n")
    assert run(*argv, "tensor=2")[2].startswith("error: cannot split 1 key/value head of ")
    assert run(*argv, "data=16")[2] == (
        "error: mesh data=16 needs 16 devices, and there are 8; --devices 16 simulates them\n"
    )
    status, _, err = run(run_directory, "--devices", "-1")
    assert status == 2 and "devices=-1: must be at least 0" in err


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--top-p 0", "top_p=0.0: must be above 0 and at most 1; 1 keeps every token"),
        ("--top-p 1.5", "top_p=1.5: must be above 0 and at most 1; 1 keeps every token"),
        ("--top-p nan", "top_p=nan: must be above 0 and at most 1; 1 keeps every token"),
        ("--top-k -1", "top_k=-1: must be at least 0"),
        ("--temperature -0.1", "temperature=-0.1: must be at least 0, and finite"),
        ("--temperature nan", "temperature=nan: must be at least 0, and finite"),
        ("--min-p 1", "min_p=1.0: must be at least 0 and below 1"),
        ("--logprobs 21", "logprobs=21: must be from 0 to 20"),
        ("--logprobs 2", "--logprobs needs --json, because log-probabilities are only printed as JSON"),
        ("--tokens 0", "tokens=0: must be at least 1"),
        ("--prompts HERE/none.txt", "[Errno 2] No such file or directory: 'HERE/none.txt'"),
        ("--prompt \udcff", r"prompt '\udcff': not UTF-8 (surrogates not allowed at character 0)"),
        ("", "HERE/run: no config.json; pass a run directory, such as runs/laptop"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, argv, message):
    """Catches a traceback, an exit status of 0, and a message without the value."""
    here = lambda text: text.replace("HERE", str(tmp_path))
    assert run(tmp_path / "run", *here(argv).split()) == (2, "", f"error: {here(message)}\n")


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"prompt": "b"', "invalid JSON (Expecting ',' delimiter: line 1 column 15 (char 14)): "
         """'{"prompt": "b"'; if the prompt itself starts with {, write it as JSON: {"prompt": "..."}"""),
        (b'{"topk": 3}', "unknown setting 'topk'; did you mean 'top_k'? "
         "known: tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed, logprobs, prompt"),
        (b'{"top_k": "3"}', "top_k='3': should be a whole number"),
        (b'{"stop": ["", "a"]}', "stop=('', 'a'): must be strings, and none may be empty"),
        (b'{"prompt": 3}', "prompt=3: should be text"),
        (b'{"seed": true}', "seed=True: should be a whole number"),
        (b'{"top_p": 0}', "top_p=0: must be above 0 and at most 1; 1 keeps every token"),
        (b"caf\xe9", r"not UTF-8 (unexpected end of data at byte 3): b'caf\xe9'"),
        (b'{"prompt": "\xe9"}', "not UTF-8 (invalid continuation byte at byte 12): b'{\"prompt\": \"\\xe9\"}'"),
    ],
)  # fmt: skip
def test_errors_name_the_line_of_a_prompt_file(tmp_path, line, message):
    """Catches a message without the line, and a line of JSON that is continued as if it were a text."""
    file = tmp_path / "prompts"
    file.write_bytes(b"a\n\n" + line + b"\n")
    assert run("none", "--prompts", file) == (2, "", f"error: {file}:3: {message}\n")
    place = "standard input"
    assert run("none", "--prompts", "-", stdin=file.read_bytes()) == (2, "", f"error: {place}:3: {message}\n")


def test_a_file_without_prompts_is_refused(tmp_path):
    """Catches an empty file that becomes one empty prompt."""
    (tmp_path / "prompts").write_text("\n\n")
    status, out, err = run("none", "--prompts", tmp_path / "prompts")
    assert (status, out) == (2, "")
    message = 'no prompts; each line should be a prompt, or JSON {"prompt": "...", "top_k": 5}'
    assert err == f"error: {tmp_path}/prompts: {message}\n"


def test_a_run_without_weights_or_tokenizer_is_refused(tmp_path, run_directory):
    """Catches a traceback if a run was not started, was cut short, or has not saved yet; and a --tokenizer for
    converted weights that is ignored."""
    config = (run_directory / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    assert run(tmp_path) == (2, "", f"error: no checkpoint in {tmp_path}/checkpoints\n")
    (tmp_path / "config.json").write_text(config[:80])
    status, out, err = run(tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {tmp_path}/config.json is not JSON: ")
    (tmp_path / "config.json").write_text(json.dumps({"config": json.loads(config)["config"], "data": None}))
    assert f"{tmp_path} has no tokenizer, which text input" in run(tmp_path)[2]
    (tmp_path / "checkpoints").symlink_to(run_directory / "checkpoints")
    argv = ["--tokenizer", "bytes", "--prompt", "!", "--tokens", "9", "--temperature", "0"]
    assert run(tmp_path, *argv)[:2] == (0, rule_text("!", 9) + "\n")


@pytest.mark.parametrize("start, text", [(ord("!"), rule_text("!", 9)[1:]), (999, None), (None, None)])
def test_texts_of_a_converted_model_begin_with_its_token(start, text, tmp_path, run_directory):
    """Catches a prompt after the end-of-text token, for a model that has only seen texts after another token."""
    about = {"config": json.loads((run_directory / "config.json").read_text())["config"], "data": None}
    (tmp_path / "config.json").write_text(json.dumps(about | {"hf": {"bos_token_id": start}}))
    (tmp_path / "checkpoints").symlink_to(run_directory / "checkpoints")
    flags = ["--tokens", "9", "--temperature", "0"]
    text = run(run_directory, *flags)[1] if text is None else text + "\n"  # an id that the model lacks is ignored
    assert run(tmp_path, "--tokenizer", "bytes", *flags)[:2] == (0, text)


def test_a_prompt_longer_than_the_sequence_is_refused(run_directory):
    """Catches a prompt that is cut silently, or printed before the command gives up."""
    status, out, err = run(run_directory, "--prompt", "x" * 23)
    assert (status, out) == (2, "")
    assert err.splitlines(keepends=True)[-1] == (
        "error: a prompt of 23 tokens and the end-of-text token before it leave no room in data.seq_len=24; "
        "shorten the prompt to at most 22 tokens\n"
    )
