"""The generated parts of pages: what docs/*.md show on GitHub, and what the site shows in their place."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from docs import address, build, previews, readme
from docs.build import DOCS, GENERATED
from utils import UserError

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
PARTS = [(page, found[1], found[0]) for page, text in PAGES.items() for found in GENERATED.finditer(text)]
IDS = [f"{page}-{name}" for page, name, _ in PARTS]
PUBLISHED, SITE = "https://github.com/Somebody/axis-by-axis", "https://somebody.github.io/axis-by-axis/"


def test_every_part_is_on_a_page():
    """Catches a part without its comments or in the old form, of which GitHub shows only the name."""
    assert {name for _, name, _ in PARTS} == {*previews.PICTURES, *previews.TEXTS}
    for page, text in PAGES.items():
        assert text.count("<!-- generated:") == len(GENERATED.findall(text)) == text.count("<!-- end -->"), page
        assert "{generated}" not in text, page


@pytest.mark.parametrize("page, name, text", PARTS, ids=IDS)
def test_every_part_shows_a_picture_or_its_text(page, name, text):
    """Catches a part that is empty on GitHub, and a picture that is missing, too large or without an alt text."""
    if name in previews.TEXTS:
        assert len(text.splitlines()) > 8
        return
    [(alt, file)] = re.findall(r"!\[([^\]]*)\]\((.*?)\)", text)
    assert len(alt.split()) >= 10 and file == f"images/{previews.image(name).name}"
    assert 1000 < (DOCS / file).stat().st_size <= 60_000


@pytest.mark.parametrize("page, name, text", PARTS, ids=IDS)
def test_every_part_is_what_the_code_says(page, name, text):
    """Catches a table, source or list that has changed only in the code. To fix the pages: python -m docs.previews"""
    assert text == f"<!-- generated: {name} -->\n{previews.part(name, page)}\n\n<!-- end -->"


@pytest.mark.parametrize("name", [name for name, one in previews.PICTURES.items() if isinstance(one, previews.Figure)])
def test_every_figure_is_what_the_code_draws(name):
    """Catches a figure that has changed only on the site, an invalid SVG file, and black boxes or lines without a color
    where the site has a style. To fix the pictures: python -m docs.previews"""
    text = previews.image(name).read_text(encoding="utf-8")
    assert text == previews.svg(name)
    root = ElementTree.fromstring(text)
    assert len(root.findall("{*}svg")) == {"axes": 6, "ring_steps": 2}.get(name, 1)
    assert root.get("color") and 'class="ground"' not in text and root.find("{*}rect").get("fill") == "#fff"


def test_no_picture_is_unused():
    """Catches a picture that stays behind when a part is removed."""
    assert {*previews.IMAGES.iterdir()} == {*map(previews.image, previews.PICTURES)}


@pytest.mark.parametrize("repository", ["", PUBLISHED], ids=["not published", "published"])
def test_the_line_about_the_site_follows_from_the_address(repository, monkeypatch):
    """Catches a link to a site that does not exist, and a published page that tells readers to build the site."""
    monkeypatch.setattr(address, "REPOSITORY", repository)
    for stem, text in PAGES.items():
        written = previews.page(text, stem)
        assert previews.page(written, stem) == written
        pictures = sum(page == stem and name in previews.PICTURES for page, name, _ in PARTS)
        built, linked = "`make site` and then `make read`", f"[Open the page]({SITE}{stem}.html)"
        parts = " ".join(" ".join(found[0] for found in GENERATED.finditer(written)).split())
        assert (parts.count(built), parts.count(linked)) == ((0, pictures) if repository else (pictures, 0))


def test_an_address_is_written_by_one_command(monkeypatch, tmp_path, capsys):
    """Catches pages that still say that the project has no site after `python -m docs.readme`."""
    monkeypatch.setattr(address, "REPOSITORY", PUBLISHED)
    monkeypatch.setattr(previews, "DOCS", tmp_path)
    monkeypatch.setattr(previews, "ROOT", tmp_path)
    monkeypatch.setattr(previews, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    for name in ("PAGE", "CITATION"):
        (tmp_path / name).write_text("", encoding="utf-8")
        monkeypatch.setattr(readme, name, tmp_path / name)
    (tmp_path / "mesh_explorer.md").write_text(PAGES["mesh_explorer"], encoding="utf-8")
    assert readme.main() == 0
    assert capsys.readouterr().out == "wrote README.md, CITATION.cff, mesh_explorer.md\n"
    assert f"{SITE}mesh_explorer.html" in (tmp_path / "mesh_explorer.md").read_text(encoding="utf-8")


def test_the_site_has_the_generated_part_and_not_the_picture():
    """Catches a page of the site that shows the picture of a page instead of the page, or both."""
    pages = build.pages()
    for page, name, _ in PARTS:
        assert f"\n:::{{generated}} {name}\n:::\n" in pages[f"{page}.md"]
        assert "](images/" not in pages[f"{page}.md"] and "<!-- generated" not in pages[f"{page}.md"]


def test_an_unknown_part_is_refused():
    """Catches a misspelled name that leaves a page empty on GitHub."""
    with pytest.raises(
        UserError, match=r"docs/index\.md: no generated part is called 'heroo'; docs/previews\.py has hero,"
    ):
        previews.page("<!-- generated: heroo -->\n<!-- end -->", "index")
