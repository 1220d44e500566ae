"""Skip tests whose optional packages are missing: `@pytest.mark.extra("ray")`. Tests are skipped for no other reason.

A module that imports an optional package at the top first sets `pytestmark = extras.require("serve")`. Other tests name
their extras in the mark. `tests/conftest.py` skips a test if an extra is not installed.
"""

import importlib.util
from functools import cache

import pytest

# The packages of each extra that tests import. `make extra-NAME` installs them.
PACKAGES = {
    "serve": ("openai", "uvicorn"),
    "buckets": ("moto", "s3fs", "gcp_storage_emulator", "gcsfs"),
    "ray": ("ray",),
    "datasets": ("datasets",),
    "sentencepiece": ("sentencepiece",),
    "evaluate": ("lm_eval", "tenacity"),
    "metrics": ("rouge_score", "sacrebleu"),
    "parity": ("tokenizers", "transformers"),
    "torch": ("torch", "accelerate"),
    "tpu": ("libtpu",),
}
LIGHT = {"serve", "buckets", "metrics", "datasets"}  # `make test-more` installs them; the others' tests run by rotation


@cache
def installed(extra: str) -> bool:
    return all(map(importlib.util.find_spec, PACKAGES[extra]))


def reason(extras) -> str:
    """Return the reason to skip: the command that installs the missing extras; empty if none is missing."""
    missing = [f"extra-{name}" for name in extras if not installed(name)]
    return f"needs make {' '.join(missing)}" if missing else ""


def require(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a module that needs these extras, or skip the module if one is missing."""
    if why := reason(names):
        pytest.skip(why, allow_module_level=True)
    return pytest.mark.extra(*names)


def extras_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the extras that a test's marks name, each once, in alphabetical order. `tpu` implies the extra `tpu`."""
    names = {name for mark in item.iter_markers("extra") for name in mark.args}
    if unknown := names - {*PACKAGES}:
        raise pytest.UsageError(f"{item.nodeid}: tests/extras.py has no row for {unknown}")
    return tuple(sorted(names | ({"tpu"} if item.get_closest_marker("tpu") else set())))
