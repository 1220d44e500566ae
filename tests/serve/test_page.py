"""docs/serve.md: its commands and its program, beside a server that it says how to start."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import extras

pytestmark = extras.require("serve")

from serve.protocol import ROLES, SHARED, chat_text
from tests.docs import commands
from tests.serve.test_process import process


def test_what_the_page_shows_works(run_directory, tmp_path):
    """Catches a command of the page that was renamed, a program that OpenAI's client cannot run, and a template that is
    not the one shown."""
    page = (commands.ROOT / commands.SERVED).read_text()
    assert "```text\n" + chat_text([("system", "Be brief."), ("user", "Hi")]) + "\n```" in page
    assert all(f"`{name}`" in page for name in SHARED if name != "model") and ROLES
    start, *asked = [one.text for one in commands.of_page(commands.SERVED) if one.how == commands.RUN]
    assert start == "python -m serve runs/laptop" and len(asked) == 7
    shutil.copytree(run_directory, tmp_path / "laptop")
    bin = os.path.dirname(sys.executable)
    env = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    with process(tmp_path / "laptop") as (server, _):

        def printed(command: str) -> str:
            words = ["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)]
            return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout

        assert server.before[-1].endswith("has laptop\n")
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        whole, stream, chat, models, health, metrics, program = map(printed, asked)
    assert len(json.loads(whole)["choices"][0]["text"]) == 8
    assert stream.endswith("data: [DONE]\n\n") and stream.count("data: ") == 17
    assert json.loads(chat)["choices"][0]["message"]["role"] == "assistant"
    assert json.loads(models)["data"][0]["id"] == "laptop" and json.loads(health)["status"] == "ok"
    assert 'axis_requests_total{path="/v1/completions",status="200"} 2.0' in metrics
    assert len(program.rstrip("\n")) == 8 + 3, program
