"""The command as a process on loopback: start, errors, signals, and many clients at once."""

import contextlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import extras

pytestmark = extras.require("serve")

import openai

from generate.request import Request
from serve.__main__ import main
from tests.generate.models import rule_text

ROOT = Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def process(run_directory, *flags):
    """Start the command, and yield the process and a client when the server is ready."""
    words = [sys.executable, "-m", "serve", str(run_directory), "--port", "0", "--piece", "8", *flags]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as one:
        try:
            one.before = []
            for line in one.stdout:
                one.before.append(line)
                if line.startswith("ready"):
                    break
            one.url = one.before[-1].split()[1]
            with openai.OpenAI(base_url=f"{one.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
                yield one, client
        finally:
            one.kill()


def test_a_signal_lets_running_texts_finish(run_directory):
    """Catches texts that are cut off, new requests that are accepted while draining, and a nonzero exit status."""
    with process(run_directory, "--slots", "2", "--queue", "900") as (server, client):
        assert [line.split()[0] for line in server.before][-2:] == ["compiled", "ready"], server.before
        assert server.before[-1].endswith(" serves rule\n")
        ask = lambda **more: client.completions.create(model="rule", prompt="!", temperature=0, **more)
        long = ask(max_tokens=22, n=120, stream=True)
        next(long)
        server.send_signal(signal.SIGTERM)
        assert server.stdout.readline().startswith("draining   2 texts are running and 1")
        with pytest.raises(openai.InternalServerError, match="shutting down") as error:
            ask()
        assert error.value.status_code == 503
        chunks = [*long]
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices[0].index == 119)
        assert text == rule_text("!", 22)[1:] and chunks[-1].choices[0].finish_reason == "length"
        assert (server.wait(30), server.stdout.read()) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(run_directory, number):
    """Catches texts that are still completed, a traceback, and an exit status of 0."""
    with process(run_directory, "--slots", "2", "--queue", "900") as (server, client):
        long = client.completions.create(model="rule", prompt="!", max_tokens=22, n=120, stream=True)
        next(long)
        server.send_signal(signal.SIGTERM)
        assert server.stdout.readline().startswith("draining   2 texts are running and 1")
        server.send_signal(number)
        assert server.wait(10) == 128 + number
        assert server.stdout.read() == "ended      by a second signal: 2 texts were running\n"
        long.close()


def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in argv])
    return status, err.getvalue()


def test_invalid_flags_and_runs_are_refused(run_directory, tmp_path):
    """Catches a traceback, compiling before the port is known to be free, and a public host without a key."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(run_directory, "--port", port) == (
            2, f"error: cannot listen on 127.0.0.1:{port}: Address already in use; --port 0 uses any free "
            "port\n")  # fmt: skip
    free = (run_directory, "--port", 0)
    assert run(tmp_path, "--port", 0) == (
        2, f"error: {tmp_path}: no config.json; pass a run directory, such as runs/laptop\n")  # fmt: skip
    (tmp_path / "config.json").write_bytes((run_directory / "config.json").read_bytes())
    assert run(tmp_path, "--port", 0) == (2, f"error: no checkpoint in {tmp_path}/checkpoints\n")
    (tmp_path / "key").write_text("\n")
    for flags, message in [
        (("--host", "0.0.0.0"), "--host 0.0.0.0: other machines can connect, so a key is "
     "required; add --api_key_file FILE, or use --host 127.0.0.1"),
        (("--host", ""), "--host : other machines can connect, so a key is required; add --api_key_file FILE, "
     "or use --host 127.0.0.1"),
        (("--api_key_file", tmp_path / "key"), f"{tmp_path}/key: empty; write a key to it, e.g. with `openssl rand "
         "-hex 32`"),
        (("--api_key_file", tmp_path / "config.json"), f"{tmp_path}/config.json: a key is one line of ASCII characters "
         "without spaces; write one to it, e.g. with `openssl rand -hex 32`"),
        (("--api_key_file", tmp_path / "none"), f"[Errno 2] No such file or directory: '{tmp_path}/none'"),
        *[(("--cors", page), f"--cors {page}: should be an origin: http:// or https://, a host in lower case, and the "
           "port unless it is the default, without a path, e.g. https://example.com")
          for page in ("*", "null", "localhost:5173", "http://localhost:5173/", "https://Example.com")],
        (("--context", 25), "context=25: must be at most data.seq_len=24, as in training"),
        (("--timeout_s", "nan"), "timeout_s=nan: must be above 0, and finite"),
        (("--mesh", "data=16"), "mesh data=16 needs 16 devices, and there are 8; --devices 16 simulates them"),
    ]:  # fmt: skip
        status, err = run(*free, *flags)
        assert (status, err.splitlines()[-1]) == (2, f"error: {message}")


@pytest.mark.slow
def test_many_clients_at_once(run_directory, rule):
    """Catches an answer that is lost, cut or sent to another client, or that depends on other requests; and memory
    that grows with each request."""
    draw = random.Random(0)
    asked = [dict(prompt="".join(draw.choices("abcdefgh!NQ", k=draw.randint(0, 12))), max_tokens=draw.randint(1, 11),
                  temperature=draw.choice([0.0, 5.0]), seed=n) for n in range(20)]  # fmt: skip
    fit = lambda one: Request(one["prompt"], tokens=one["max_tokens"], temperature=one["temperature"], seed=one["seed"],
                              top_k=0, top_p=1.0)  # fmt: skip
    want = [rule.run_requests([fit(one)])[0].text for one in asked]
    with process(run_directory, "--queue", "40") as (server, client):

        def ask(n):
            one, stream = asked[n % 20], n % 3 == 0
            got = client.completions.create(model="rule", **one, stream=stream)
            return "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text

        with ThreadPoolExecutor(32) as clients:
            assert [*clients.map(ask, range(200))] == want * 10
            before = resident_bytes(server.pid)
            assert [*clients.map(ask, range(200))] == want * 10
        assert resident_bytes(server.pid) - before < 8 * 2**20


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
