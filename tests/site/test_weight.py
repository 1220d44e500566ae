"""Tests of what the built site weighs, what a shared link shows, and how the search ranks pages."""

import gzip
import html
import re
import struct

import pytest

from docs import build, cards, notebooks, reference
from tests.site.browser import evaluate

pytestmark = pytest.mark.site

LOADED = """await new Promise((done) => setTimeout(done, 500));
const loaded = performance.getEntriesByType("resource").map((one) => new URL(one.name));
return loaded.filter((one) => one.origin === location.origin).map((one) => one.pathname);"""


def test_the_first_page_is_light():
    """Catches a library, a font or a search index that the first page loads."""
    [loaded] = evaluate({"page": "index.html", "script": LOADED})
    assert not [name for name in loaded if re.search("fontawesome|searchindex", name)]
    files = {"index.html", *(name.lstrip("/") for name in loaded)}
    size = {name: len(gzip.compress((build.HTML / name).read_bytes())) for name in files}
    assert len(size) > 6
    assert sum(size.values()) < 400_000, size


def test_every_icon_is_drawn():
    """Catches a button without its icon: Font Awesome is removed, and site.css must have each icon that is used."""
    css = (build.ROOT / "docs/_static/site.css").read_text(encoding="utf-8")
    for page in build.HTML.rglob("*.html"):
        for names in re.findall(r'class="([^"]*fa-solid[^"]*)"', page.read_text(encoding="utf-8")):
            assert [name for name in names.split() if f".{name} {{ --icon" in css], (page.name, names)


def pages() -> dict[str, str]:
    found = {path.relative_to(build.HTML).as_posix(): path for path in build.HTML.rglob("*.html")}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()
            if not name.startswith(("_static", "search", "genindex")) and name not in build.forwards()}  # fmt: skip


def test_a_shared_link_shows_a_card():
    """Catches a page without a description, or whose link shows an empty card."""
    for name, text in pages().items():
        tags = dict(re.findall(r'<meta property="og:([\w:]+)" content="([^"]*)"', text))
        assert 40 < len(html.unescape(tags["description"])) <= 200, (name, tags)
        assert f'<meta name="description" content="{tags["description"]}"' in text, name
        assert tags["title"] and "<" not in html.unescape(tags["title"]), name
        picture = (build.HTML / name).parent / tags["image"]
        head = picture.read_bytes()[:24]
        assert head.startswith(b"\x89PNG") and struct.unpack(">II", head[16:24]) == cards.PIXELS, name
    assert "<title>Axis by Axis: a runnable guide" in pages()["index.html"]


def test_every_chapter_has_a_card():
    """Catches a card whose title runs into the text, or that does not say what the chapter is about."""
    for path in notebooks.chapters():
        one = reference.head(path)
        assert path.read_text(encoding="utf-8").splitlines()[1] == f"# # {one['number']} · {one['title']}"
        assert one["says"].endswith((".", "?")), one
        assert 30 < len(one["says"]) < 250 and "**Question" not in one["says"], one


FOUND = """const finished = () => /finished/i.test(document.querySelector("#search-results")?.innerText ?? "");
for (let i = 0; i < 100 && !finished(); i++) {
  await new Promise((done) => setTimeout(done, 100));
}
return [...document.querySelectorAll("#search-results li a")].map((one) => one.getAttribute("href"));"""


@pytest.mark.parametrize("term", ["MFU", "all-gather", "pipeline"])
def test_search_ranks_the_guide_above_the_api(term):
    """Catches a search whose first results are docstrings."""
    [found] = evaluate({"page": f"search.html?q={term}", "script": FOUND})
    api = [number for number, name in enumerate(found) if name.startswith("api")]
    guide = [number for number, name in enumerate(found) if name.startswith(("chapters/", "glossary"))]
    assert api and guide
    assert max(guide) < min(api), found
