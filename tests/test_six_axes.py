"""The guide quotes one run on all six mesh axes at once. This test repeats it and compares the output."""

import re
from pathlib import Path

import pytest

from tests.chapters import test_form as form
from tests.docs import commands

ROOT = Path(__file__).parent.parent
PAGE = "chapters/08_axes.py"
AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")


def quoted() -> commands.Command:
    """Return the command on the page whose mesh has six axes, with the output shown. A line may end with `\\`."""
    prose = form.prose_of(form.cells((ROOT / PAGE).read_text(encoding="utf-8")))
    blocks = re.findall(r"(?ms)^```\n\$ python -m tests\.parity .*?^```$", prose.replace("\\\n", ""))
    assert len(blocks) == 1, f"{len(blocks)} blocks with `python -m tests.parity` in {PAGE}"
    [one] = commands.commands(PAGE, blocks[0])
    return one


def test_the_quoted_mesh_has_all_six_axes():
    """Catches a page that says six axes and quotes fewer."""
    assert all(re.search(rf"\b{axis}=2\b", quoted().text) for axis in AXES), quoted().text
    assert quoted().shown[0][-1] == "The mesh matches a single-device run."


@pytest.mark.slow
def test_six_axes_at_once_equal_one_device(tmp_path):
    """Catches a bug that only six axes show, and numbers on the page that are no longer printed."""
    wrong = commands.run(quoted(), commands.make_site(tmp_path))
    assert wrong is None, wrong
