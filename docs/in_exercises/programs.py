"""Cut a chapter's exercises out of its file, for the pages on which a reader solves them without JAX.

An exercise needs its checker, and the checker needs names that earlier cells define. `exercises` follows these names,
and keeps only the statements that define them. The page runs them in Pyodide, with the JAX of `spmd/`.
"""

import ast
import dataclasses
import dis
import json
import re
import types
from dataclasses import dataclass
from pathlib import Path

from docs.notebooks import HIDDEN, ROOT

HERE = Path(__file__).resolve().parent
# The exercises whose checkers need neither the compiler nor the planner, nor arrays that are large for plain Python
CHAPTERS = {"01_sharding": (1, 2, 3), "02_gradients": (1, 2, 3), "03_fsdp": (1,), "04_tensor": (1, 2, 3),
            "07_experts": (1, 2, 3), "08_axes": (1,), "09_choose": (1,), "11_tokens": (2,), "12_survive": (1,),
            "13_hosts": (1,), "14_decode": (1,), "15_left_to_the_compiler": (1,), "16_profile": (1, 3),
            "17_kernel": (3,), "18_serve_at_scale": (1, 2, 3)}  # fmt: skip
GIVEN = {"jax", "jnp", "np", "P", "sharding", "lesson", "functools", "AxisType", "math"}  # `environment.py` has them
STANDARD = "collections", "functools", "itertools", "dataclasses"  # modules from which a chapter may import names
EMULATED = "jax", "jax.lax", "sharding"  # the same, of those that `environment.py` has
FROM_LESSON = ("diagnose", "checker", "answered", "verdict", "expect", "ratio", "on_each", "replaced", "same")
FROM_SHARDING = ("all_gather", "all_to_all", "own_slice", "psum", "reduce_scatter", "shift", "vary",
                 "DATA", "STAGE", "FSDP", "EXPERT", "CONTEXT", "TENSOR")  # fmt: skip


@dataclass(frozen=True)
class Exercise:
    """An exercise that a page can check."""

    chapter: str
    number: int
    title: str
    code: str  # what the checker needs
    place: str  # the cell of the page with an answer to fill in
    cell: str  # the reader's cell: the same, and the line that prints the checker's reply
    tests: str  # the hidden cell that asserts what the checker replies


@dataclass(frozen=True)
class Cell:
    tags: str
    text: str
    exercise: int  # its number; 0 before the first


def cells(chapter: str) -> tuple[list[Cell], dict[int, str]]:
    """Return the code cells of a chapter, and the titles of its exercises by number."""
    text, found, titles, number = (ROOT / f"chapters/{chapter}.py").read_text(encoding="utf-8"), [], {}, 0
    for head, body in re.findall(r"(?ms)^# %%(.*?)\n(.*?)(?=^# %%|\Z)", text):
        if "[markdown]" in head:
            for heading in re.findall(r"(?m)^# ## (.*)", body):
                if match := re.fullmatch(r"Exercise (\d+): (.*)", heading):
                    number, titles[int(match[1])] = int(match[1]), match[2]
                else:
                    number = 0 if not titles else -1  # after the exercises
        else:
            found.append(Cell(head, body.strip() + "\n", number))
    return found, titles


def defined(node: ast.stmt) -> set[str]:
    """Return the names that a definition or an assignment defines; of NAME[..] = .., NAME."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom) and node.module in STANDARD + EMULATED:
        return {one.asname or one.name for one in node.names}
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {base.id for base in (one.value if isinstance(one, ast.Subscript) else one for one in flat)
            if isinstance(base, ast.Name)}  # fmt: skip


def used(node: ast.stmt) -> set[str]:
    """Return the global names that a statement, or a function that it defines, reads."""
    todo, found = [compile(ast.Module([node], []), "", "exec")], set()
    while todo:
        code = todo.pop()
        found |= {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
        todo += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found


def needed(statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """Return the statements that define the names, those that these need, and so on, in their order."""
    chosen, todo = set(), [(name, len(statements)) for name in names]
    while todo:
        name, place = todo.pop()
        places = [i for i, node in enumerate(statements) if name in defined(node)] if name not in GIVEN else []
        places = [i for i in places if i < place] or places
        whole = [i for i in places if not is_change(statements[i])]
        for i in [i for i in places if not whole or i >= whole[-1]]:
            if i not in chosen:
                chosen.add(i)
                todo += [(other, i) for other in used(statements[i]) - defined(statements[i])]
    return [statements[i] for i in sorted(chosen)]


def is_change(node: ast.stmt) -> bool:
    """Return whether a statement sets entries of what another one defines: NAME[..] = .., or NAME = f(NAME)."""
    return isinstance(node, ast.Assign) and (
        isinstance(node.targets[0], ast.Subscript) or bool(used(node) & defined(node))
    )


def source(node: ast.stmt) -> str:
    """Return the source of a statement. An import from an emulated module becomes assignments."""
    if isinstance(node, ast.ImportFrom) and node.module in EMULATED:
        return "\n".join(f"{one.asname or one.name} = {node.module}.{one.name}" for one in node.names)
    return ast.unparse(node)


def exercises(chapter: str) -> list[Exercise]:
    """Return the exercises of a chapter."""
    every, titles = cells(chapter)
    found = []
    for number in CHAPTERS[chapter]:
        own = [cell for cell in every if cell.exercise == number]
        before = [cell for cell in every if cell.exercise in range(number + 1)]
        tests = [one.text for one in own if HIDDEN in one.tags]
        dots = re.compile(r"(?m)(return|=) \.\.\.( *#.*)?$")  # a reader's answer takes their place
        place = next(one.text for one in own if HIDDEN not in one.tags and dots.search(one.text))
        (line,) = {line for one in own for line in re.findall(r"(?m)^print\(check_.*\n", one.text)}
        cell = place if line in place else f"{place}\n\n{line}"
        shown = [one.text.replace(line, "") for one in before if HIDDEN not in one.tags and one.text != cell]
        statements = [node for text in shown for node in ast.parse(text).body]
        wanted = {name for node in ast.parse(cell + "\n".join(tests)).body for name in used(node)}
        code = "\n".join(map(source, needed(statements, wanted)))
        found.append(Exercise(chapter, number, titles[number], code, place, cell, "\n".join(tests)))
    return found


def functions(path: Path, names: tuple[str, ...]) -> str:
    """Return the source of functions of a module, and of what they need there."""
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    return "\n".join(map(ast.unparse, needed(statements, {*names})))


def write(folder: Path) -> Path:
    """Write what the pages load: the emulation of JAX, the checkers, and the exercises without their tests."""
    from docs import in_browser

    in_browser.write_pyodide(folder / "pyodide")
    found = contents()
    for one in found["exercises"]:
        del one["tests"]  # they have right answers
    (folder / "exercises.json").write_text(json.dumps(found), encoding="utf-8")
    return folder / "exercises.json"


def contents() -> dict:
    own = [path for path in sorted(HERE.rglob("*.py")) if path != Path(__file__).resolve()]
    python = {path.relative_to(HERE).as_posix(): path for path in own} | {"numpy.py": HERE.parent / "in_page/numpy.py"}
    return {
        "python": {name: path.read_text(encoding="utf-8") for name, path in python.items()},
        "lesson": functions(ROOT / "chapters/lesson.py", FROM_LESSON),
        "sharding": functions(ROOT / "sharding.py", FROM_SHARDING),
        "exercises": [dataclasses.asdict(one) for chapter in CHAPTERS for one in exercises(chapter)],
    }


def script(chapter: str) -> str:
    """Return the HTML with which a chapter's page offers its exercises, or ""."""
    if chapter not in CHAPTERS:
        return ""
    given = {f"{chapter} {one.number}": {"place": one.place, "cell": one.cell} for one in exercises(chapter)}
    text = json.dumps(given).replace("</", "<\\/")  # nothing in it may end the script
    data = f'<script type="application/json" id="exercises">{text}</script>'
    return f'{data}\n<script src="../_static/exercise.js"></script>'
