"""Tests of what README.md says about the chapters and about itself. test_pages.py runs its commands."""

import re

import pytest

from docs import notebooks, readme
from docs.notebooks import ROOT
from utils import UserError

TEXT = readme.PAGE.read_text(encoding="utf-8")


def section(title: str) -> str:
    return re.search(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", TEXT)[1]


def test_readme_has_the_titles_and_minutes_of_the_chapters():
    """Catches a chapter that was renamed or got longer. To fix README: python -m docs.readme"""
    assert readme.page(TEXT) == TEXT
    assert readme.BUILDS.keys() == {path.stem[:2] for path in notebooks.chapters()}
    assert len(re.findall(r"(?m)^\| \[\d\d\]\(chapters/\d\d_\w+\.py\) \|", section("The chapters"))) == len(
        readme.BUILDS
    )


@pytest.mark.parametrize(
    "words, minutes",
    [
        ("*Reading takes*\n# 25 minutes, 80 with the exercises.", "25"),
        ("*Reading takes* half an hour.", "30"),
        ("*Reading takes* about an\n# hour, with exercises.", "60, with exercises"),
    ],
)
def test_the_minutes_are_those_of_the_chapter(words, minutes, tmp_path):
    """Catches a time that is cut at the end of a line, or that silently includes the exercises."""
    chapter = tmp_path / "00_short.py"
    chapter.write_text(f"# %% [markdown]\n# # 00 · Short\n#\n# {words}\n\n# %%\n")
    assert readme.reading_minutes(chapter) == minutes
    chapter.write_text("# %% [markdown]\n# # 00 · Short\n\n# %%\n# *Reading takes* 5 minutes.\n")
    with pytest.raises(UserError, match=r"00_short\.py does not say in its first cell how long reading takes"):
        readme.reading_minutes(chapter)


def test_relatives_are_named_with_a_link():
    """Catches a README that does not say when another project is the better choice."""
    rows = re.findall(r"(?m)^\| \[([^]]+)\]\(https://[^)]+\) \| [^|]+ \| [^|]+ \|$", section("How this relates to"))
    assert len(rows) == 7


def test_each_claim_has_a_command_that_selects_something():
    """Catches a claim without a command, and tests that were moved or renamed, so that the command shows nothing."""
    rows = re.findall(r"(?m)^\| \*\*.*\| `([^`]+)` \|$", section("What only this has"))
    assert len(rows) == 5
    selections = [
        match for row in rows if (match := re.fullmatch(r'make (test|test-long) ARGS="(.*?)(?: -k (\w+))?"', row))
    ]
    assert len(selections) == 2
    for selection in selections:
        for file in selection[2].split():
            tests = re.findall(r"(?m)^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"))
            assert [name for name in tests if (selection[3] or "") in name], f"{file}: {selection[3]}"
