"""Sphinx builds a page with a public address and without one, with the project's own settings."""

import re
import subprocess
import sys

import pytest

from docs import build, notebooks
from docs.notebooks import ROOT

pytestmark = pytest.mark.site

BUILD = """\
import sys
from docs import address
address.REPOSITORY = sys.argv[1]
from sphinx.cmd.build import main
sys.exit(main(["-b", "html", "-q", "-c", "docs", *sys.argv[2:]]))
"""


@pytest.mark.parametrize(
    "repository", ["", "https://github.com/Somebody/axis-by-axis"], ids=["not published", "published"]
)
def test_a_page_has_the_address_of_the_site(repository, tmp_path):
    """Catches previews without a picture on the published site, and addresses of a site that does not exist."""
    source, out = tmp_path / "source", tmp_path / "html"
    source.mkdir()
    (source / "index.md").write_text(
        "# Axis by Axis\n\nEight devices train one model, and each of them holds a shard.\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", BUILD, repository, source, out], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = (out / "index.html").read_text(encoding="utf-8")
    [image] = re.findall('<meta property="og:image" content="([^"]*)">', page)
    site = "https://somebody.github.io/axis-by-axis/" if repository else ""
    assert image == f"{site or './'}_static/cards/index.png"
    assert (out / "_static/cards/index.png").exists()
    assert re.findall('<link rel="canonical" href="([^"]*)"', page) == ([f"{site}index.html"] if repository else [])
    assert ("somebody.github.io" in page) == bool(repository)


def test_the_site_replaces_a_picture_by_what_it_stands_for(tmp_path):
    """Catches a page of the site with the picture that GitHub shows, without the interactive figure."""
    source, out = tmp_path / "source", tmp_path / "html"
    source.mkdir()
    (source / "index.md").write_text(build.pages()["index.md"].partition("**Predictions")[0])
    done = subprocess.run([sys.executable, "-c", BUILD, "", source, out], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    article = (out / "index.html").read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
    assert '<div id="hero"' in article and article.count('<figure class="falling">') == 2
    assert "images/" not in article and "<img" not in article and "make read" not in article


def test_a_notebook_with_outputs_has_the_cells_of_a_readers_notebook(tmp_path):
    """Catches outputs below other cells, and a published notebook that shows the tests of the answers."""
    chapter = tmp_path / "03_short.py"
    chapter.write_text("# %% [markdown]\n# # 03 · Short\n\n# %%\n1 + 1\n\n# %% tags=[\"remove-cell\"]\n"
                       "hidden = 3\n\n# %%\nprint('seen')\ncheck_answer = lambda answer: 'Not yet.'\n")  # fmt: skip
    found = notebooks.with_outputs(chapter, tmp_path / "kept")
    assert [cell.source for cell in found.cells] == [cell.source for cell in notebooks.read(chapter).cells]
    texts = [str(cell.outputs) for cell in found.cells if cell.cell_type == "code"]
    assert texts[0] == "[]" and "'2'" in texts[1] and "seen" in texts[2] and len(texts) == 3
