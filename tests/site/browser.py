"""Run the site's scripts in a headless Chromium, page by page. `make extra-browser` installs it."""

import json

from docs.headless import look


def evaluate(*asked: dict) -> list:
    """Run scripts in pages, and return their results: `look.mjs` says which fields a dict has. No page may fail."""
    answers = json.loads(look("evaluate", asked=json.dumps(asked)))
    assert not [answer["errors"] for answer in answers if answer["errors"]]
    return [answer["result"] for answer in answers]
