"""The public address of the project is one setting, and everything works with it and without it."""

import re

import pytest
import yaml

from docs import address, build, notebooks, readme
from docs.notebooks import ROOT
from utils import UserError

PUBLISHED = "https://github.com/Somebody/axis-by-axis"
SITE = "https://somebody.github.io/axis-by-axis/"


@pytest.fixture(params=["", PUBLISHED], ids=["not published", "published"])
def repository(request, monkeypatch):
    monkeypatch.setattr(address, "REPOSITORY", request.param)
    return request.param


@pytest.mark.parametrize(
    "repository, site",
    [
        ("", ""),
        (PUBLISHED, SITE),
        (f"{PUBLISHED}.git", SITE),
        (f"{PUBLISHED}/", SITE),
        ("https://github.com/Somebody/Somebody.github.io", "https://somebody.github.io/"),
        ("https://git.example.org/group/team/guide", ""),
    ],
)
def test_the_site_follows_from_the_repository(repository, site, monkeypatch):
    """Catches links to a site that does not exist, and an address whose ending breaks the links."""
    monkeypatch.setattr(address, "REPOSITORY", repository)
    assert address.site() == site
    assert bool(address.colab("00_machine")) == bool(address.outputs("00_machine")) == bool(site)
    assert ".git/" not in address.colab("00_machine") and "//blob" not in address.colab("00_machine")


@pytest.mark.parametrize(
    "wrong", ["github.com/a/b", "https://github.com/a", "git@github.com:a/b.git", "https://github.com/a/b c"]
)
def test_a_wrong_address_is_refused(wrong, monkeypatch):
    """Catches an address that leads nowhere and is found only after publishing."""
    monkeypatch.setattr(address, "REPOSITORY", wrong)
    with pytest.raises(UserError, match="is not the address of a repository; use one such as"):
        address.site()


def test_pages_and_notebooks_link_to_colab_only_if_published(repository):
    """Catches a page with a dead link, and a published chapter that a reader cannot open in Colab."""
    box, first = build.run_box("03_fsdp"), notebooks.first_cell()
    link = "https://colab.research.google.com/github/Somebody/axis-by-axis/blob/gh-pages/notebooks/03_fsdp.ipynb"
    assert (f'href="{link}"' in box) == ("Open in Colab" in box) == bool(repository)
    assert f"repository = {repository!r}" in first
    compile(first, "first cell", "exec")


def test_readme_links_to_the_site_only_if_published(repository):
    """Catches a README that must be edited by hand, or that exceeds its 150 lines when the project is published."""
    text = readme.page(readme.PAGE.read_text(encoding="utf-8"))
    assert readme.page(text) == text and len(text.splitlines()) <= 150
    rows = re.findall(r"(?m)^\| \[\d\d\]\(chapters/.*$", text)
    assert len(rows) == len(notebooks.chapters()) and {row.count(" | ") for row in rows} == {4 if repository else 3}
    assert all((f"[page]({SITE}chapters/" in row) == bool(repository) for row in rows)
    assert (f"[the planner]({SITE}planner_widget.html)" in text) == bool(repository)
    assert ("somebody.github.io" in text) == bool(repository)


def test_the_citation_has_the_addresses_only_if_published(repository):
    """Catches a citation that leads nowhere."""
    text = readme.citation(readme.CITATION.read_text(encoding="utf-8"))
    assert readme.citation(text) == text
    found = yaml.safe_load(text)
    assert (found.get("repository-code"), found.get("url")) == ((repository, SITE) if repository else (None, None))


def test_the_address_is_written_once():
    """Catches a second setting, which would have to be changed too."""
    conf = (ROOT / "docs/conf.py").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^html_baseurl = (.*)$", conf) == ["address.site()"]
    places = [path.name for path in (ROOT / "docs").glob("*.py") if "github.io" in path.read_text(encoding="utf-8")]
    assert places == ["address.py"]
