"""Turn chapters into notebooks, and execute them for the site. `python -m docs.notebooks`."""

import dataclasses
import hashlib
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from chapters import folded
from chapters.__main__ import select_chapters
from docs import address
from utils import UserError, exit_status

HELP = """e.g. python -m docs.notebooks
     python -m docs.notebooks 04 05

Write notebooks/NN_name.ipynb from chapters/NN_name.py, without outputs. The notebooks work in any folder of the
checkout. Elsewhere they clone one, if docs/address.py has the address of the repository."""

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS, FOLDER = ROOT / "chapters", ROOT / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LONGEST_S = 600  # time limit of a cell
HIDDEN = "remove-cell"  # tag of cells that test the answers of the exercises; readers don't see them

TEST_CHECKERS = "lesson.check_all(dict(globals()))"
RUN_APART = "from chapters import lesson\n\nlesson.run_apart({code!r}, globals())"

LOAD = """\
from chapters import folded

# The code, with a right answer, is in chapters/{chapter}.py.
exec(folded.code({chapter!r}, {name!r}, {number}))"""

FIND_PROJECT = """\
# This notebook uses the project's modules: it finds the checkout that contains it, or clones one, for example on Colab.
import importlib
import os
import subprocess
import sys
from pathlib import Path

repository = {repository!r}  # docs/address.py sets it
places = [Path.cwd(), *Path.cwd().parents]
root = next((place for place in places if (place / "chapters" / "lesson.py").exists()), None)
if root is None:
    assert repository, (
        "no checkout of Axis by Axis here: move this notebook into one, and use its .venv as kernel. To let notebooks "
        "clone one by themselves, set REPOSITORY in docs/address.py, and write them again with `make notebooks`."
    )
    root = Path("axis-by-axis").resolve()
    if not root.exists():
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", repository, str(root)], check=True)
    installed = root / ".git" / "packages-are-installed"
    if not installed.exists():  # it exists if Colab restarts the kernel, which starts in the folder above
        install = [sys.executable, "-m", "pip", "install", "-qq", "--require-hashes", "--no-deps", "-r"]
        subprocess.run([*install, "requirements.txt"], cwd=root, check=True)
        installed.touch()
        importlib.invalidate_caches()
os.chdir(root)
sys.path.insert(0, str(root))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
"""


def first_cell() -> str:
    return FIND_PROJECT.format(repository=address.REPOSITORY)


def chapters(numbers=()) -> list[Path]:
    """Return the files of `select_chapters`. Raises: UserError for an unknown number."""
    return [CHAPTERS / f"{name}.py" for name in select_chapters(tuple(numbers))]


def read(path: Path, for_readers: bool = True):
    """Convert a chapter to a notebook.

    for_readers  leave out the cells that test the answers, and add a cell that finds or clones the project
    """
    import jupytext
    from nbformat.v4 import new_code_cell

    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    if for_readers:
        first = next(number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        notebook.cells = [cell for cell in notebook.cells if HIDDEN not in cell.metadata.get("tags", ())]
        fold(notebook.cells, path.stem)
        notebook.cells.insert(first, new_code_cell(first_cell()))
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # jupytext's ids are random
    return notebook


def fold(cells: list, chapter: str) -> None:
    """Fold the cells that the site folds, in Jupyter and on Colab. VS Code shows all code, so load that of checkers."""
    heading = ""
    for cell in cells:
        tags = cell.metadata.get("tags", ())
        if cell.cell_type == "markdown":
            heading = ["", heading, *re.findall(r"(?m)^## (.*)", cell.source)][-1]
        elif "hide-input" in tags:
            title = folded_name(cell)
            names = folded.defined(cell.source)
            if names and heading.startswith(("Exercise", "A bug")) and "mystnb" not in cell.metadata:
                number = folded.sources(chapter, names[0]).index(cell.source)
                cell.source = LOAD.format(chapter=chapter, name=names[0], number=number)
            cell.source = f"# @title {title[0].upper()}{title[1:]}\n{cell.source}"
            cell.metadata |= {"jupyter": {"source_hidden": True}, "cellView": "form"}
        if "hide-output" in tags:
            cell.metadata["jupyter"] = cell.metadata.get("jupyter", {}) | {"outputs_hidden": True}


def folded_name(cell) -> str:
    """Name what a folded cell has, so that a reader knows which ones to skip."""
    if cell.source.startswith("from devices import"):
        return "the imports"
    if "mystnb" in cell.metadata:
        return "the code of the figure"
    is_checker = re.search(r"(?m)^(def )?check_|HINTS|MISTAKES|BAD_|WRONG", cell.source)
    return "the checker of the answer" if is_checker else "more code"


def execute(notebook, folder: Path):
    """Run the cells of a notebook in a folder, and store their outputs in it.

    Raises: nbclient's CellExecutionError with the cell and its traceback.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook, timeout=LONGEST_S, resources={"metadata": {"path": str(folder)}}, extra_arguments=["--log-level=40"]
    )  # hide the message that the kernel listens on this machine
    return client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu", "PYDEVD_DISABLE_FILE_VALIDATION": "1"})


def state(path: Path) -> str:
    """Return a hash of everything that affects a chapter's output: its file, the project's modules and scripts."""
    rooms = [place for place in ROOT.glob("*/*.py") if place.parent.name not in ("chapters", "docs", "tests", "bench")]
    files = [
        path,
        *sorted((ROOT / "chapters").glob("[a-z]*.*")),
        ROOT / "bench" / "partition.py",
        ROOT / "requirements.txt",
        *sorted(ROOT.glob("*.py")),
        *sorted(ROOT.glob("*.sh")),
        *sorted(rooms),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def executed(path: Path, kept: Path, say=print, longest_s: float = math.inf):
    """Execute a chapter, or return the stored outputs if neither the chapter nor the project has changed.

    Raises: UserError if it takes, or took, more CPU time than `longest_s`, and the errors of `execute`.
    """
    import nbformat
    from nbformat.v4 import new_code_cell

    file, wanted = kept / f"{path.stem}.ipynb", state(path)
    found = nbformat.read(file, as_version=4) if file.exists() else None
    if not found or found.metadata.get("state") != wanted:
        start, before = time.monotonic(), os.times()
        notebook = read(path, for_readers=False)
        notebook.cells.append(new_code_cell(TEST_CHECKERS, metadata={"tags": [HIDDEN]}))
        for cell in notebook.cells:
            if HIDDEN in cell.metadata.get("tags", ()):
                cell.source = RUN_APART.format(code=cell.source)
        found = execute(notebook, ROOT)
        seconds, after = time.monotonic() - start, os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found.metadata |= {"state": wanted, "processor_s": used}
        kept.mkdir(parents=True, exist_ok=True)
        nbformat.write(found, file)
        say(f"ran {path.stem} in {seconds:.0f} s, {used:.0f} s of CPU time")
    if found.metadata.get("processor_s", 0) > longest_s:
        raise UserError(f"{path.stem} took {found.metadata['processor_s']:.0f} s of CPU time, "
                        f"more than the limit of {longest_s:g} s")  # fmt: skip
    return found


def with_outputs(path: Path, kept: Path):
    """Return a reader's notebook with the outputs of the executed chapter. Raises: the errors of `executed`."""
    notebook, done = read(path), executed(path, kept)
    shown = [cell for cell in done.cells if HIDDEN not in cell.metadata.get("tags", ())]
    for cell, ran in zip([cell for cell in notebook.cells if cell.source != first_cell()], shown, strict=True):
        assert cell.cell_type == ran.cell_type, f"{path.stem}: the executed chapter has other cells"
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
    return notebook


def execute_one(path: Path, kept: Path, longest_s: float) -> list[str]:
    """Execute a chapter in a worker process, so that the CPU time counted is this chapter's; return log lines.

    Raises: what `executed` raises.
    """
    lines: list[str] = []
    executed(path, kept, lines.append, longest_s)
    return lines


def write(numbers=()) -> list[Path]:
    """Write the notebooks of chapters, without outputs."""
    import nbformat

    FOLDER.mkdir(exist_ok=True)
    for path in chapters(numbers):
        nbformat.write(read(path), FOLDER / f"{path.stem}.ipynb")
    return [FOLDER / f"{path.stem}.ipynb" for path in chapters(numbers)]


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # first digits of chapters, such as 04; default: all


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.notebooks", description=HELP)
    print(*(f"wrote {file.relative_to(ROOT)}" for file in write(args.numbers)), sep="\n")
    print("To open one, choose .venv/bin/python as its kernel in VS Code. For JupyterLab, first run .venv/bin/python "
          "-m ipykernel install --user --name axis-by-axis")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
