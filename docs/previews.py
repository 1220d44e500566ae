"""Write what docs/*.md show outside of the site in place of figures and pages that the site generates."""

import dataclasses
import re
import sys
import tempfile
import textwrap
from pathlib import Path

import tyro

from docs import address, pictures, reference
from docs.build import DOCS, GENERATED, put
from docs.notebooks import ROOT, chapters
from utils import UserError, exit_status

HELP = """e.g. python -m docs.previews
     python -m docs.previews --screenshots   # also the pictures of interactive pages; see --screenshots below

The site generates parts of its pages. In docs/*.md, where GitHub shows the files, such a part is

     <!-- generated: NAME -->
     a picture and a line about the site, or the generated text
     <!-- end -->

This command writes what is between the two comments, and the pictures in docs/images, and names the files that have
changed. The build of the site replaces the whole part by the result of the function NAME."""

IMAGES = DOCS / "images"
MAX_BYTES = 60_000  # of a picture


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of docs/pictures.py. Its drawings are stored as one SVG file, in `columns`."""

    alt: str
    site: str  # what the site has that the picture lacks
    columns: int = 1


@dataclasses.dataclass(frozen=True)
class Screenshot:
    """An interactive form of the site. A picture is taken of the first `height` pixels of an element of an address."""

    alt: str
    address: str
    element: str
    height: int
    site: str = "On the site, this page is interactive."


PICTURES = {
    "hero": Figure(
        "Three losses over 100 steps. The loss that the run without the all-reduce prints is the lowest. Its loss on "
        "all rows, a dashed line, is the highest, and the loss of the correct run is between them",
        "On the site, this figure is interactive: eight devices train, and a switch leaves out the sum of their "
        "gradients.",
    ),
    "planned_and_published": Figure(
        "Planned against published seconds per step of dense models on TPU slices, one mark per step. Most marks are "
        "close to the diagonal",
        "On the site, each mark names its run if you point at it, and a caption has the mean and the largest error.",
    ),
    "axes": Figure(
        "Six drawings of the tokens and weights on the first of four devices, one for each axis: data, fsdp, tensor, "
        "context, expert and stage",
        "On the site, a caption says for each axis what its devices hold and communicate.",
        columns=3,
    ),
    "ring_steps": Figure(
        "Two grids of four devices and four chunks. In the all-gather, each cell has the step in which the chunk "
        "arrives at the device. In the reduce-scatter, it has the number of terms that the device has summed",
        "On the site, this figure is animated.",
        columns=2,
    ),
    "planner_widget": Screenshot(
        "A form with a model, its chips and a mesh, and below it the planned time of a step and its parts",
        "planner_widget.html", "#planner", 965,
    ),
    "mesh_explorer": Screenshot(
        "Eight devices of a mesh of fsdp=2 and tensor=4. For the selected device, the shard of each weight that it "
        "stores",
        "mesh_explorer.html?mesh=fsdp=2,tensor=4", "#mesh-explorer", 840,
    ),
    "schedule_explorer": Screenshot(
        "Two pipeline schedules on one time axis. Each row is a stage, and each block is its work on one microbatch",
        "schedule_explorer.html", "#schedule-explorer", 578,
    ),
    "layer_timeline": Screenshot(
        "The forward and the backward pass of one layer in time. Below the row of matmuls are rows of collectives, and "
        "hatched bars show when the chip waits",
        "layer_timeline.html", "#layer-timeline", 645,
    ),
}  # fmt: skip


def chapter_list() -> str:
    """Return the chapters as a list of links to their programs."""
    heads = {path: reference.head(path) for path in chapters()}
    return "\n".join(f"- [{one['number']}](../chapters/{path.name}): {one['title']}" for path, one in heads.items())


def feed_forward_text() -> str:
    """Return the source of the feed-forward part of model.py, in a block that the tests of pages don't run."""
    return reference.feed_forward_source().replace("```python", "```text", 1)


TEXTS = {
    "letters_table": reference.letters_table,
    "chapter_cards": chapter_list,
    "feed_forward_source": feed_forward_text,
}

# Pages ----------------------------------------------------------------------------------------------------------------


def image(name: str) -> Path:
    return IMAGES / f"{name}.{'svg' if isinstance(PICTURES[name], Figure) else 'png'}"


def site_line(name: str, page: str) -> str:
    """Return what the site has, and the link to its page; if the project is not published, how to build the site."""
    site = address.site()
    where = f"[Open the page]({site}{page}.html)." if site else "To see it, run `make site` and then `make read`."
    return f"{PICTURES[name].site} {where}"


def part(name: str, page: str) -> str:
    """Return what a page shows in place of a generated part. Raises: UserError if there is no such part."""
    if name in TEXTS:
        return TEXTS[name]().strip()
    if name not in PICTURES:
        raise UserError(f"docs/{page}.md: no generated part is called {name!r}; docs/previews.py has "
                        f"{', '.join([*PICTURES, *TEXTS])}")  # fmt: skip
    picture = f"![{PICTURES[name].alt}]({image(name).relative_to(DOCS).as_posix()})"
    return "\n\n".join(
        textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
        for text in (picture, site_line(name, page))
    )


def page(text: str, stem: str) -> str:
    """Return a page of docs/ with its generated parts as docs/previews.py has them now."""
    return GENERATED.sub(lambda found: f"<!-- generated: {found[1]} -->\n{part(found[1], stem)}\n\n<!-- end -->", text)


def write_pages() -> list[Path]:
    """Write the generated parts of all pages, and return the pages that have changed."""
    old = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    new = {path: page(text, path.stem) for path, text in old.items()}
    for path, text in new.items():
        put(path, text)
    return [path for path in new if new[path] != old[path]]


# Pictures -------------------------------------------------------------------------------------------------------------

DRAWING = re.compile(r'<svg viewBox="0 0 (\d+) (\d+)"(.*?</svg>)<figcaption>(?:<code[^>]*>(\w[\w-]*)</code>)?', re.S)
GAP, HEAD = 14, 20  # between drawings, and above each for its name; in units of the drawings


def svg(name: str) -> str:
    """Return a figure as an SVG file: its drawings on white, each with the name that its caption begins with."""
    drawings, columns = DRAWING.findall(getattr(pictures, name)()), PICTURES[name].columns
    head = HEAD * any(title for *_, title in drawings)
    wide, high = (max(int(one[n]) for one in drawings) for n in (0, 1))
    body = []
    for n, (width, height, rest, title) in enumerate(drawings):
        x, y = GAP + n % columns * (wide + GAP), GAP + n // columns * (high + head + GAP)
        if title:
            body.append(f'<text x="{x}" y="{y + 13}" font-size="14" font-weight="700" fill="currentColor">'
                        f'{title}</text>')  # fmt: skip
        inside = rest.replace('class="ground"', 'fill="#fff"')  # site.css colors it like the page
        body.append(f'<svg x="{x}" y="{y + head}" width="{width}" height="{height}" '
                    f'viewBox="0 0 {width} {height}" overflow="visible"{inside}')  # fmt: skip
    total = GAP + columns * (wide + GAP), GAP + -(-len(drawings) // columns) * (high + head + GAP)
    shown = 560 if columns == 1 else 800  # pixels
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" width="{shown}" '
            f'height="{shown * total[1] / total[0]:.0f}" color="#1f2328" font-family="Arial, Helvetica, sans-serif">\n'
            '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(body) + "\n</svg>\n")  # fmt: skip


def write_figures() -> list[Path]:
    """Write the figures, and return the files that have changed."""
    new = {image(name): svg(name) for name, one in PICTURES.items() if isinstance(one, Figure)}
    changed = [path for path, text in new.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        put(path, new[path])
    return changed


def take_screenshots() -> list[Path]:
    """Write the pictures of interactive pages, from the built site, and return their files.

    Raises: UserError if there is no site or no browser, or a picture is too large.
    """
    from PIL import Image, ImageOps

    from docs.headless import look

    shots = {name: one for name, one in PICTURES.items() if isinstance(one, Screenshot)}
    with tempfile.TemporaryDirectory() as folder:
        for name, one in shots.items():
            file = f"{folder}/{name}.png"
            look("picture", one.address, file, "1280", one.element)
            whole = Image.open(file).convert("RGB")
            cut = whole.crop((0, 0, whole.width, min(one.height, whole.height)))
            framed = ImageOps.expand(cut, border=GAP, fill="white")
            # MAXCOVERAGE keeps rare colors, such as that of an axis.
            few = framed.quantize(64, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(image(name), optimize=True)
            if image(name).stat().st_size > MAX_BYTES:
                raise UserError(f"docs/images/{name}.png has {image(name).stat().st_size:,} bytes, and a picture may "
                                f"have {MAX_BYTES:,}; lower its height in docs/previews.py")  # fmt: skip
    return [image(name) for name in shots]


@dataclasses.dataclass
class Arguments:
    screenshots: bool = False  # also take the pictures of interactive pages; needs `make site` and `make extra-browser`


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.previews", description=HELP)
    changed = write_figures() + write_pages() + (take_screenshots() if args.screenshots else [])
    for path in changed:
        print(f"wrote {path.relative_to(ROOT)}")
    if not changed:
        print("nothing has changed")


if __name__ == "__main__":
    sys.exit(main())
