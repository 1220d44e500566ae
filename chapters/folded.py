"""Find the code of the checkers for the notebooks, which don't contain it, because it has the right answers."""

import linecache
import re
from pathlib import Path
from types import CodeType

CHAPTERS = Path(__file__).parent


def defined(code: str) -> list[str]:
    """Return the functions, classes and variables that a cell defines or extends, in order."""
    return [a or b for a, b in re.findall(r"(?m)^(?:(?:def|class) (\w+)|(\w+) [+|]?= )", code)]


def sources(chapter: str, name: str) -> list[str]:
    """Return the cells of a chapter that define a name."""
    text = (CHAPTERS / f"{chapter}.py").read_text(encoding="utf-8")
    return [cell.strip() for cell in re.split(r"(?m)^# %%.*\n", text) if name in defined(cell)]


def code(chapter: str, name: str, number: int = 0) -> CodeType:
    """Compile the cell of a chapter that defines a name; if several do, the one with this number.

    Raises: LookupError if there is no such cell.
    """
    found = sources(chapter, name)
    if number >= len(found):
        raise LookupError(f"chapters/{chapter}.py defines {name} in {len(found)} cells: this notebook is of another "
                          "version; write it again with `make notebooks`, or download it again")  # fmt: skip
    file, text = f"<chapters/{chapter}.py, {name} {number}>", found[number]
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # for tracebacks
    return compile(text, file, "exec")
