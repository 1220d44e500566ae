"""Claims about which option hides what: docs/compiler_options.md has the numbers, `make test-rotation` runs them."""

from pathlib import Path

import pytest

from bench import options


@pytest.mark.parametrize("slices, said", [
    ("v5p:2x2x4 v4:4x4x4", "mesh data=2,fsdp=8 has 16 devices, and v4:4x4x4 has 64 chips"),
    ("h100:16", "topology 'h100:16': compiling for devices that are not attached"),
])  # fmt: skip
def test_a_slice_that_does_not_do_is_refused_before_any_is_compiled(slices, said, monkeypatch, capsys):
    """Catches a minute of compiling, and half a table, before a word about the last slice."""
    monkeypatch.setattr(options, "measure", lambda *args: pytest.fail("compiled"))
    assert options.main(["--topology", *slices.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {said}")


@pytest.mark.tpu
def test_the_rows_of_v4_are_those_of_the_page(capsys):
    """Catches an option that hides another collective than it did. Rows of the other chips are compared with the page's
    by `make test-rotation`; what their SparseCores hide, by tests/compile/test_sparsecore.py."""
    assert not options.main(["--topology", "v4:2x2x4"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    page = (Path(__file__).parents[2] / "docs/compiler_options.md").read_text(encoding="utf-8").splitlines()
    assert rows == [line for line in page if line.startswith("| `v4:2x2x4` |") and line.count("|") == 7]
    assert len(rows) == len(options.SETS)
