"""Run the commands and the program of docs/serve.md against the server that the page starts."""

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


def test_the_commands_of_the_page_work(run_directory, tmp_path):
    """Catches a command that was renamed, a program that fails with OpenAI's client, and a template that differs from
    the one shown."""
    page = (commands.ROOT / commands.SERVED).read_text()
    assert "```text\n" + chat_text([("system", "Be brief."), ("user", "Hi")]) + "\n```" in page
    assert all(f"`{name}`" in page for name in SHARED if name != "model") and ROLES
    start, *asked = [one.text for one in commands.page_commands(commands.SERVED) if one.how == commands.RUN]
    assert start == "python -m serve runs/laptop" and len(asked) == 7
    shutil.copytree(run_directory, tmp_path / "laptop")
    bin = os.path.dirname(sys.executable)
    env = os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    with process(tmp_path / "laptop") as (server, _):

        def printed(command: str) -> str:
            words = ["bash", "-c", command.replace("http://127.0.0.1:8000", server.url)]
            return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout

        assert server.before[-1].endswith("serves laptop\n")
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        whole, stream, chat, models, health, metrics, program = map(printed, asked)
    assert len(json.loads(whole)["choices"][0]["text"]) == 8
    assert stream.endswith("data: [DONE]\n\n") and stream.count("data: ") == 17
    assert json.loads(chat)["choices"][0]["message"]["role"] == "assistant"
    assert json.loads(models)["data"][0]["id"] == "laptop" and json.loads(health)["status"] == "ok"
    assert 'axis_requests_total{path="/v1/completions",status="200"} 2.0' in metrics
    assert len(program.rstrip("\n")) == 8 + 3, program
