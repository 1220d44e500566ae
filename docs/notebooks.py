"""Turn chapters into notebooks, and run them: the site reads the executed ones. `python -m docs.notebooks`."""

import dataclasses
import hashlib
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from errors import UserError, exit_status

HELP = """e.g. python -m docs.notebooks
     python -m docs.notebooks 04 05

Write notebooks/NN_name.ipynb from chapters/NN_name.py, not executed.

They find the project's modules from wherever they lie in the checkout."""

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS, FOLDER = ROOT / "chapters", ROOT / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LONGEST_S = 600  # that a cell may take
HIDDEN = "remove-cell"  # tag of a cell that tests the answers of the exercises: not for readers

FIND_PROJECT = """\
# This notebook uses the project's own modules: it looks for the checkout that it lies in.
import os
import sys
from pathlib import Path

places = [Path.cwd(), *Path.cwd().parents]
root = next((place for place in places if (place / "chapters" / "lesson.py").exists()), None)
assert root, "no checkout of Axis by Axis here: put this notebook into one, with its .venv as kernel"
os.chdir(root)
sys.path.insert(0, str(root))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
"""


def chapters(numbers=()) -> list[Path]:
    """The programs of chapters, in order; with numbers, such as "04", those that begin so.

    Raises: UserError for a number that no chapter has.
    """
    found = sorted(CHAPTERS.glob("[0-9][0-9]_*.py"))
    for number in numbers:
        if not any(path.stem.startswith(number) for path in found):
            raise UserError(
                f"no chapter begins with {number!r}; there are {', '.join(p.stem for p in found) or 'none'}"
            )
    return [path for path in found if not numbers or path.stem.startswith(tuple(numbers))]


def read(path: Path, for_readers: bool = True):
    """A chapter as a notebook.

    for_readers  without the cells that test the exercises' answers, and with one that finds the project
    """
    import jupytext
    from nbformat.v4 import new_code_cell

    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    if for_readers:
        first = next(number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        notebook.cells = [cell for cell in notebook.cells if HIDDEN not in cell.metadata.get("tags", ())]
        notebook.cells.insert(first, new_code_cell(FIND_PROJECT))
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # jupytext draws them at random
    return notebook


def execute(notebook, folder: Path):
    """Run a notebook's cells in order, in a folder; its outputs are then in it.

    Raises: nbclient's CellExecutionError, which shows the cell and its traceback.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook, timeout=LONGEST_S, resources={"metadata": {"path": str(folder)}}, extra_arguments=["--log-level=40"]
    )  # not that it listens on this machine
    return client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu", "PYDEVD_DISABLE_FILE_VALIDATION": "1"})


def state(path: Path) -> str:
    """A hash of all that decides what a chapter prints: the chapter, every module of the project, its shell scripts."""
    rooms = [place for place in ROOT.glob("*/*.py") if place.parent.name not in ("chapters", "docs", "tests", "bench")]
    files = [
        path,
        ROOT / "chapters" / "lesson.py",
        ROOT / "requirements.txt",
        *sorted(ROOT.glob("*.py")),
        *sorted(ROOT.glob("*.sh")),
        *sorted(rooms),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def executed(path: Path, kept: Path, say=print, longest_s: float = math.inf):
    """A chapter with its outputs: those of the last time, if neither it nor the project has changed.

    Raises: UserError if it takes, or took, more processor time than `longest_s`; and what `execute` raises.
    """
    import nbformat

    file, wanted = kept / f"{path.stem}.ipynb", state(path)
    found = nbformat.read(file, as_version=4) if file.exists() else None
    if not found or found.metadata.get("state") != wanted:
        start, before = time.monotonic(), os.times()
        found = execute(read(path, for_readers=False), ROOT)
        seconds, after = time.monotonic() - start, os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found.metadata |= {"state": wanted, "processor_s": used}
        kept.mkdir(parents=True, exist_ok=True)
        nbformat.write(found, file)
        say(f"ran {path.stem} in {seconds:.0f} s, {used:.0f} s of processor time")
    if found.metadata.get("processor_s", 0) > longest_s:
        raise UserError(f"{path.stem} took {found.metadata['processor_s']:.0f} s of processor time, "
                        f"and may take {longest_s:g}")  # fmt: skip
    return found


def write(numbers=()) -> list[Path]:
    """Write the notebooks of chapters, not executed."""
    import nbformat

    FOLDER.mkdir(exist_ok=True)
    for path in chapters(numbers):
        nbformat.write(read(path), FOLDER / f"{path.stem}.ipynb")
    return [FOLDER / f"{path.stem}.ipynb" for path in chapters(numbers)]


@dataclasses.dataclass
class Arguments:
    numbers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # how the chapters begin, such as 04; none: all


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.notebooks", description=HELP)
    print(*(f"wrote {file.relative_to(ROOT)}" for file in write(args.numbers)), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
