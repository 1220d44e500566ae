"""Build the site: run the chapters, make what is made from code, and have Sphinx write docs/_build/html."""

import dataclasses
import functools
import http.server
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from docs import layer_timeline, mesh_explorer, notebooks, planner_widget, reference, schedule_explorer
from docs.notebooks import ROOT
from errors import UserError, exit_status

HELP = """e.g. python -m docs.build
     python -m docs.build 00 04    # of the chapters only these: a quick look at a page while writing it
     python -m docs.build --read   # serve what is built, on this machine alone
     python -m docs.build --longest_s 90    # a chapter that takes more is an error, as for python -m chapters

Build the guide into docs/_build/html, from executed chapters.

A chapter is run again if it, or a module of the project, has changed since. Nothing is read from other hosts, neither
now nor when pages are read. Needs `make extra-site`."""

DOCS = ROOT / "docs"
BUILD = DOCS / "_build"
SOURCE, HTML, EXECUTED = BUILD / "source", BUILD / "html", BUILD / "executed"
EXTRA, MADE = BUILD / "extra", BUILD / "made"  # copied as they are: to the site's root, to _static


def put(path: Path, text: str) -> None:
    """Write a file if its text has changed: Sphinx reads again what is newer."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# Pages ----------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Every page that is not a chapter, by its path in the source folder."""
    found = {f"{path.stem}.md": path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found["trainer.md"] = re.sub(r"\A# .*", "# Overview", re.sub(r"<!--.*?-->\n?", "", readme)).replace("](docs/", "](")
    found = {name: re.sub(r"\]\(\.\./([^)#]+)", to_page, text) for name, text in found.items()}
    return found | {f"api/{name}.md": reference.api_page(name) for name in reference.API}


def to_page(link: re.Match) -> str:
    """Where a link out of docs/ leads on the site: to the page made of that file."""
    path = Path(link[1])
    if path.name == "README.md":
        return "](trainer.md"
    if path.parts[0] == "chapters" and path.stem[:1].isdigit():
        return f"](chapters/{path.stem}.ipynb"
    return f"](api/{path.parts[0].removesuffix('.py')}.md"


RUN_BOX = """\
:::{{admonition}} Run this page
:class: run

The page is a program of the project, and what it prints was printed when the site was built. In a checkout
(`make train` makes its `.venv`):

```
.venv/bin/python -m chapters.{name}
```

Or as a notebook: <a href="../notebooks/{name}.ipynb" download>{name}.ipynb</a>, which `make notebooks` writes too.
:::
"""


def chapter_page(path: Path, say, longest_s: float) -> str:
    """An executed chapter as the site shows it: with how to run it, without the tests of its answers."""
    import nbformat
    from nbformat.v4 import new_markdown_cell

    notebook = notebooks.executed(path, EXECUTED, say, longest_s)
    notebook.cells = [cell for cell in notebook.cells if notebooks.HIDDEN not in cell.metadata.get("tags", ())]
    for cell in notebook.cells:
        if any("image/svg+xml" in one.get("data", ()) for one in cell.get("outputs", ())):  # not its last value too
            cell.outputs = [one for one in cell.outputs if one.output_type != "execute_result"]
    notebook.cells.insert(1, new_markdown_cell(RUN_BOX.format(name=path.stem), id="run-box"))
    return nbformat.writes(notebook)


# Chapters that had other names: name -> name now. Who has the address of the old page is led to the new one.
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
<body><p>This chapter has another number now: <a href="{page}">{page}</a></p></body>
</html>
"""


def forwards() -> dict[str, str]:
    """The pages that lead on from old addresses, by their path in the site."""
    return {f"chapters/{old}.html": FORWARD.format(page=f"{new}.html") for old, new in MOVED.items()}


def stage(numbers, say, longest_s: float) -> None:
    """Write everything that Sphinx reads, and remove what is no page any more."""
    wanted = pages()
    wanted |= {
        f"chapters/{path.stem}.ipynb": chapter_page(path, say, longest_s) for path in notebooks.chapters(numbers)
    }
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
    for page in (planner_widget, mesh_explorer, schedule_explorer, layer_timeline):
        page.write(MADE)


def build(numbers=(), say=print, longest_s: float = math.inf) -> None:
    """Build the site. Raises: UserError if Sphinx warns, with its words above."""
    start = time.monotonic()
    stage(numbers, say, longest_s)
    # Every page is read again: one may link to another that came, went or was renamed. It takes 15 s.
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "--fresh-env",
               "-d", str(BUILD / "doctrees"), "-c", str(DOCS), str(SOURCE), str(HTML)]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise UserError("the site is not as it should be: see Sphinx's words above")
    say(f"built docs/_build/html in {time.monotonic() - start:.0f} s; `make read` shows it")


# Reading --------------------------------------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def server(port: int = 0) -> http.server.ThreadingHTTPServer:
    """Serve the site on this machine alone; port 0: any that is free. Raises: UserError if there is no site."""
    if not (HTML / "index.html").exists():
        raise UserError("there is no site yet: make site")
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Quiet, directory=str(HTML)))


def serve(port: int) -> None:
    try:
        serving = server(port)
    except OSError:  # someone has this port
        serving = server()
    print(f"http://127.0.0.1:{serving.server_address[1]}/ shows the guide; Ctrl-C ends", flush=True)
    with serving:
        serving.serve_forever()


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # how the chapters begin, such as 04; none: all
    read: bool = False  # build nothing: serve what is built, on this machine alone
    port: int = 8000  # where; another if this one is taken
    longest_s: float = math.inf  # seconds of processor time that a chapter may take


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.build", description=HELP)
    if args.read:
        serve(args.port)
    else:
        build(args.numbers, longest_s=args.longest_s)


if __name__ == "__main__":
    sys.exit(main())
