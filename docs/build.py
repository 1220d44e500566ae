"""Build the site: run the chapters, generate pages from code, and run Sphinx to write docs/_build/html."""

import dataclasses
import http.server
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from chapters.__main__ import limit_s
from docs import address, layer_timeline, mesh_explorer, notebooks, planner_widget, reference, schedule_explorer
from docs.in_exercises import programs
from docs.notebooks import ROOT
from utils import UserError, exit_status

HELP = """e.g. python -m docs.build
     python -m docs.build 00 04    # build only these chapters, to preview a page
     python -m docs.build --read   # serve the built site, on this machine only
     python -m docs.build --longest_s 0     # fail if a chapter takes longer than python -m chapters allows

Build the guide into docs/_build/html, from executed chapters.

A chapter runs again only if it, or a module of the project, has changed. The first build downloads Pyodide from npm
into the user's cache folder. The pages access no other host. Needs `make extra-site`."""

DOCS = ROOT / "docs"
BUILD = DOCS / "_build"
SOURCE, HTML, EXECUTED = BUILD / "source", BUILD / "html", BUILD / "executed"
EXTRA, MADE = BUILD / "extra", BUILD / "made"  # copied unchanged to the root of the site, and to _static


def put(path: Path, text: str) -> None:
    """Write a file only if its text has changed, because Sphinx reads newer files again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# Pages ----------------------------------------------------------------------------------------------------------------

# A part of a page that the site generates. docs/previews.py writes what a viewer of the file shows in its place.
GENERATED = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> dict[str, str]:
    """Return every page that is not a chapter, by its path in the source folder."""
    found = {f"{path.stem}.md": path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    overview = re.sub(r"\A# .*", "# Overview", re.sub(r"<!--.*?-->\n?", "", readme))
    found["trainer.md"] = overview.replace("](docs/", "](").replace("](chapters/", "](../chapters/")
    found = {name: GENERATED.sub(r":::{generated} \1\n:::", text) for name, text in found.items()}
    found = {name: re.sub(r"\]\(\.\./([^)#]+)", to_page, text) for name, text in found.items()}
    return found | {f"api/{name.replace('/', '_')}.md": reference.api_page(name) for name in reference.API}


def to_page(link: re.Match) -> str:
    """Return the site's page for a link to a file outside of docs/."""
    path = Path(link[1])
    if path.name == "README.md":
        return "](trainer.md"
    if path.parts[0] == "chapters" and path.stem[:1].isdigit():
        return f"](chapters/{path.stem}.ipynb"
    return f"](api/{path.parts[0].removesuffix('.py')}.md"


RUN_BOX = """\
:::{{admonition}} Run this page
:class: run

This page is a program, and its output was printed when the site was built. To run it in a checkout (`make train` makes
the `.venv`):

```
.venv/bin/python -m chapters.{name}
```

Or download it as a notebook: <a href="../notebooks/{name}.ipynb" download>{name}.ipynb</a>. {colab}`make notebooks`
writes it too.
:::
"""


def run_box(name: str) -> str:
    colab = address.colab(name)
    link = f'<a class="colab" href="{colab}">Open in Colab</a> (the first cell installs the project). ' * bool(colab)
    return RUN_BOX.format(name=name, colab=link)


def chapter_page(path: Path) -> str:
    """Return an executed chapter for the site: with a box that says how to run it, without the tests of its answers."""
    import nbformat
    from nbformat.v4 import new_markdown_cell

    notebook = notebooks.executed(path, EXECUTED)
    notebook.cells = [cell for cell in notebook.cells if notebooks.HIDDEN not in cell.metadata.get("tags", ())]
    for cell in notebook.cells:
        if any("image/svg+xml" in one.get("data", ()) for one in cell.get("outputs", ())):  # not the last value
            cell.outputs = [one for one in cell.outputs if one.output_type != "execute_result"]
        if cell.cell_type == "code" and "hide-input" in cell.metadata.get("tags", ()):
            cell.metadata.setdefault("mystnb", {})["code_prompt_show"] = f"Show {notebooks.folded_name(cell)}"
    notebook.cells.insert(1, new_markdown_cell(run_box(path.stem), id="run-box"))
    if script := programs.script(path.stem):
        notebook.cells.append(new_markdown_cell(script, id="exercises"))
    return nbformat.writes(notebook)


# Old name of a chapter -> its name now. Old addresses redirect to the new page.
MOVED = {
    "01_tokens": "11_tokens",
    "02_base_model": "10_base_model",
    "03_collectives": "01_sharding",
    "04_fsdp": "03_fsdp",
    "05_tensor": "04_tensor",
    "06_pipeline": "05_pipeline",
}
FORWARD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="0; url={page}">
<title>This chapter has moved</title>
</head>
<body><p>This chapter has a new number: <a href="{page}">{page}</a></p></body>
</html>
"""


def forwards() -> dict[str, str]:
    """Return the pages that redirect from old addresses, by their path in the site."""
    return {f"chapters/{old}.html": FORWARD.format(page=f"{new}.html") for old, new in MOVED.items()}


def stage(numbers, say, longest_s: float) -> None:
    """Write everything that Sphinx reads, and remove old pages."""
    write_generated(notebooks.chapters(numbers), say, longest_s)
    programs.write(MADE)
    wanted = pages()
    wanted |= {f"chapters/{path.stem}.ipynb": chapter_page(path) for path in notebooks.chapters(numbers)}
    for name, text in wanted.items():
        put(SOURCE / name, text)
    for picture in [*DOCS.glob("*.png"), *DOCS.glob("*.svg")]:
        shutil.copyfile(picture, SOURCE / picture.name)
        wanted[picture.name] = ""
    found = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    for old in found - set(wanted):
        (SOURCE / old).unlink()
    shutil.rmtree(EXTRA, ignore_errors=True)
    (EXTRA / "notebooks").mkdir(parents=True)
    for file in notebooks.write(numbers):
        shutil.copyfile(file, EXTRA / "notebooks" / file.name)
    for name, text in forwards().items():
        put(EXTRA / name, text)


def write_generated(chapters: list[Path], say, longest_s: float) -> None:
    """Write what takes minutes of compute, one task per core: the interactive pages' data and the executed chapters."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        data = [
            pool.submit(page.write, MADE) for page in (planner_widget, mesh_explorer, schedule_explorer, layer_timeline)
        ]
        for lines in pool.map(partial(notebooks.execute_one, kept=EXECUTED, longest_s=longest_s), chapters):
            for line in lines:
                say(line)
        for task in data:
            task.result()


def build(numbers=(), say=print, longest_s: float = math.inf) -> None:
    """Build the site. Raises: UserError if Sphinx prints a warning."""
    start = time.monotonic()
    stage(numbers, say, longest_s)
    # Read every page again, because links between pages may have changed. This takes 15 s.
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "--fresh-env",
               "-d", str(BUILD / "doctrees"), "-c", str(DOCS), str(SOURCE), str(HTML)]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise UserError("Sphinx printed warnings, see above; fix the pages that they name, and build again")
    say(f"built docs/_build/html in {time.monotonic() - start:.0f} s; `make read` shows it")


# Reading --------------------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def server(port: int = 0) -> http.server.ThreadingHTTPServer:
    """Serve the site on this machine only; port 0 means any free port. Raises: UserError if there is no site."""
    if not (HTML / "index.html").exists():
        raise UserError("there is no site yet: build it with `make site`")
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(Quiet, directory=str(HTML)))


def serve(port: int) -> None:
    try:
        serving = server(port)
    except OSError:  # the port is in use
        serving = server()
    print(f"http://127.0.0.1:{serving.server_address[1]}/ shows the guide; stop with Ctrl-C", flush=True)
    with serving:
        serving.serve_forever()


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # first digits of chapters, such as 04; default: all
    read: bool = False  # serve the built site on this machine, without building it
    port: int = 8000  # another free port if this one is in use
    longest_s: float = math.inf  # limit of a chapter's CPU time, in seconds; 0: 90, or more on a slow machine


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.build", description=HELP)
    if args.read:
        serve(args.port)
    else:
        build(args.numbers, longest_s=limit_s(args.longest_s))


if __name__ == "__main__":
    sys.exit(main())
