"""Tests of the form of chapters: their parts, widths, lengths and names. Only the by-hand program of each is run."""

import ast
import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import config
from docs import reference
from tests.test_house import ROOT, rooms

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9][0-9]_*.py"))
CODE_COLUMNS, PROSE_COLUMNS, CODE_LINES = 88, 110, 20
WORDS = (1500, 2500)
VISIBLE = 300  # most lines of unfolded code on a page, without their output
BY_HAND = (20, 45)  # lines of the by-hand program in plain JAX
BY_HAND_WITHIN = 1 / 3  # of the page's visible lines, the by-hand program begins
BUG_LINES = 40  # least lines of the program with the bug
FORBIDDEN = ("as you can see", "simply", "obviously", "let's", "just")


@dataclass(frozen=True)
class Cell:
    """A cell of a py:percent program."""

    line: int  # of its marker
    marker: str  # the text after `# %%`
    text: str  # markdown without the leading `# `, or code

    @property
    def is_prose(self) -> bool:
        return "[markdown]" in self.marker

    @property
    def is_hidden(self) -> bool:
        return "remove-cell" in self.marker

    @property
    def is_visible(self) -> bool:
        return not self.is_prose and not self.is_hidden and "hide-input" not in self.marker

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]

    @property
    def alt(self) -> str:
        found = re.search(r'mystnb=\{"image": \{"alt": "([^"]+)"\}\}', self.marker)
        return found[1] if found else ""


def cells(text: str) -> list[Cell]:
    found, line = [], 1
    for part in re.split(r"(?m)^(?=# %%)", text):
        if part.startswith("# %%"):
            marker, _, body = part.partition("\n")
            prose = "[markdown]" in marker
            body = re.sub(r"(?m)^#(?: |$)", "", body) if prose else body
            found.append(Cell(line, marker.removeprefix("# %%").strip(), body.strip("\n")))
        line += part.count("\n")
    return found


def prose_of(found: list[Cell]) -> str:
    return "\n\n".join(cell.text for cell in found if cell.is_prose)


def without_code(text: str) -> str:
    """Remove text in backquotes and the addresses of links."""
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]+>", " ", text, flags=re.DOTALL)


# Checks: functions of all cells that return one line for each fault ---------------------------------------------------


def header(found: list[Cell]) -> list[str]:
    """Check the first screen: what the technique is, folded imports, a before/after figure, and a prediction."""
    first, second = found[0].text, found[1].text
    wanted = {
        "a title like `# 04 · Tensor parallelism`": r"\A# \d\d · \S.*\n",
        "*Prerequisites:* .. *Mesh:* .. *Runs in* N s on 2 cores.":
            r"\*Prerequisites:\* .*\*Mesh:\* .*\*Runs in\*\s+\d+\s+s\s+on\s+2\s+cores",
    }  # fmt: skip
    faults = [
        f"the first cell lacks {what}" for what, sought in wanted.items() if not re.search(sought, first, re.DOTALL)
    ]
    introduction = first.partition("*Prerequisites:*")[0].partition("\n")[2]
    if not 40 <= (count := len(introduction.split())) <= 150:
        faults.append(f"{count} words between the title and the prerequisites, not 40 to 150")
    if not re.match(r"from devices import simulate_devices\n+simulate_devices\(8\)\n", second):
        faults.append("the second cell does not begin with importing and calling `simulate_devices(8)`")
    if "hide-input" not in found[1].marker:
        faults.append('the imports are not folded (tags=["hide-input"])')
    imports = re.findall(r"(?m)^(?:import|from) ", second)
    faults += [f"{len(imports)} lines of imports, more than 14"] if len(imports) > 14 else []
    start = [cell for cell in found if not cell.is_hidden][:7]
    if not any("opening.before_after(" in cell.text and cell.alt for cell in start):
        faults.append("no opening.before_after(..) with alternative text among the first seven cells")
    if not any("> **Predict" in cell.text for cell in start):
        faults.append("no prediction among the first seven cells")
    return faults


def sizes(found: list[Cell]) -> list[str]:
    faults = []
    for cell in found:
        lines = cell.text.splitlines()
        most = PROSE_COLUMNS if cell.is_prose else CODE_COLUMNS
        wide = [line for line in lines if len(line) > most and not re.search(r"^\||\]\(\S{40,}", line)]
        faults += [f"line {cell.line}: {len(line)} columns: {line[:60]}" for line in wide]
        written = [line for line in lines if line.strip()]
        if not cell.is_prose and not cell.is_hidden and len(written) > CODE_LINES:
            faults.append(f"line {cell.line}: a code cell of {len(written)} lines, more than {CODE_LINES}")
    return faults


def length(found: list[Cell]) -> list[str]:
    """Check the number of words and of visible code lines; folded text, tables and sources do not count."""
    shown = re.sub(r"(?s)<details>.*?</details>|\*\*Sources.*|(?m:^\|[^\n]*$)", "", prose_of(found))
    words, visible = len(re.findall(r"\S*\w\S*", shown)), sum(len(cell.lines) for cell in found if cell.is_visible)
    faults = [] if WORDS[0] <= words <= WORDS[1] else [f"{words:,} words of prose, not {WORDS[0]:,} to {WORDS[1]:,}"]
    return faults if visible <= VISIBLE else [*faults, f"{visible} lines of visible code, more than {VISIBLE}"]


def program_by_hand(found: list[Cell]) -> str:
    return "\n\n".join(cell.text for cell in found if "by-hand" in cell.marker)


def place_by_hand(found: list[Cell]) -> list[str]:
    """Check that the by-hand program begins in the first third of what a reader sees."""
    lines = [len(cell.lines) if cell.is_prose or cell.is_visible else 0 for cell in found]
    first = next((n for n, cell in enumerate(found) if "by-hand" in cell.marker), 0)
    share = sum(lines[:first]) / sum(lines)
    return [f"the by-hand program begins after {share:.0%} of the page"] if share > BY_HAND_WITHIN else []


def bug_program(found: list[Cell]) -> list[str]:
    """Check that the bug is hidden in a program that needs reading."""
    section = sections(found).get("A bug to find", ())
    count = sum(len(cell.lines) for cell in section if cell.is_visible)
    return [f"the bug is in {count} visible lines, fewer than {BUG_LINES}"] if count < BUG_LINES else []


def by_hand(found: list[Cell]) -> list[str]:
    """Check the by-hand program: it imports nothing of the project, and compares its result with the expected one."""
    program = program_by_hand(found)
    if not program:
        return ['no cell with tags=["by-hand"], which should have the complete idea in plain JAX']
    count = sum(bool(line.strip()) for line in program.splitlines())
    faults = [] if BY_HAND[0] <= count <= BY_HAND[1] else [f"{count} lines by hand, not {BY_HAND[0]} to {BY_HAND[1]}"]
    nodes = [*ast.walk(ast.parse(program))]
    used = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    used |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    allowed = {*sys.stdlib_module_names, "jax", "numpy"}
    faults += [f"the by-hand program imports {name}" for name in sorted(used) if name.split(".")[0] not in allowed]
    if "jax" in used and "xla_force_host_platform_device_count" not in program.partition("import jax")[0]:
        faults.append("the by-hand program does not set the number of devices before it imports jax")
    compared = any(isinstance(node, ast.Assert) or "assert" in str(getattr(node, "attr", "")) for node in nodes)
    return faults if compared else [*faults, "the by-hand program checks nothing"]


def in_one_table(found: list[Cell]) -> list[str]:
    text = "\n".join(cell.text for cell in sections(found).get("In one table", ()))
    rows = re.findall(r"(?m)^\|.*\|$", text)
    return [] if len(rows) >= 4 else ["no section `## In one table` with a table of two rows or more"]


def predictions(found: list[Cell]) -> list[str]:
    questions = [n for n, cell in enumerate(found) if cell.is_prose and re.search(r"(?m)^> \*\*Predict", cell.text)]
    faults = [] if len(questions) >= 2 else [f"{len(questions)} predictions (`> **Predict.** ..`), fewer than 2"]
    for n, until in zip(questions, [*questions[1:], len(found)], strict=True):
        answers = [cell for cell in found[n:until] if not cell.is_prose and "lesson.predicted(" in cell.text]
        if not answers:
            faults.append(f"line {found[n].line}: no cell with lesson.predicted(..) follows the prediction")
        elif not any("None" in cell.text for cell in answers):
            faults.append(f"line {answers[0].line}: no `None` for the reader's number")
    return faults


def figures(found: list[Cell]) -> list[str]:
    drawn = [
        cell
        for cell in found
        if re.search(r"plt\.(subplots|figure)\(|lesson\.(slices|panels)\(", cell.text) and not cell.is_prose
    ]
    good = [cell for cell in found if len(cell.alt.split()) >= 5]
    faults = [] if len(good) >= 3 else [f"{len(good)} figures with alternative text of 5 words, fewer than 3"]
    faults += [f"line {cell.line}: a figure without alternative text" for cell in drawn if draws(cell) and not cell.alt]
    return faults + [f"line {cell.line}: plt.show()" for cell in found if "plt.show(" in cell.text]


def draws(cell: Cell) -> bool:
    """Whether a cell draws a figure, and does not only define a function for it."""
    body = re.sub(r"(?m)^(def|class) .*\n((    .*)?\n)*", "", cell.text + "\n")
    found = re.search(r"(plt\.(subplots|figure)|lesson\.panels)\(", body)
    return bool(found) and not cell.is_hidden and not cell.is_prose


def sections(found: list[Cell]) -> dict[str, list[Cell]]:
    """Map each heading `## ..` to its cells."""
    parts: dict[str, list[Cell]] = {}
    title = ""
    for cell in found:
        pieces = re.split(r"(?m)^(?=## )", cell.text) if cell.is_prose else [cell.text]
        for piece in filter(None, pieces):
            if cell.is_prose and piece.startswith("## "):
                title = piece.splitlines()[0].removeprefix("## ").strip()
            parts.setdefault(title, []).append(Cell(cell.line, cell.marker, piece))
    return parts


def prints_check(cell: Cell) -> bool:
    """Whether a cell prints the result of a check function."""
    return bool(re.search(r"print\(\s*check_\w+\(", cell.text))


def exercises(found: list[Cell]) -> list[str]:
    faults, parts = [], sections(found)
    for start in ("Exercise 1: ", "Exercise 2: ", "Exercise 3: ", "A bug to find"):
        section = next((inside for title, inside in parts.items() if title.startswith(start.strip())), None)
        if section is None:
            faults.append(f"no section `## {start.strip()}`")
            continue
        text = "\n".join(cell.text for cell in section)
        order = [n for n, cell in enumerate(section) if "<summary>Solution</summary>" in cell.text]
        if not order or "<details>" not in text or "</details>" not in text:
            faults.append(f"{start}: no folded solution")
        elif not any(cell.is_hidden and re.search("assert|lesson.expect", cell.text) for cell in section[order[0] :]):
            faults.append(f"{start}: no remove-cell after the solution that tests the checker")
        if not any(prints_check(cell) for cell in section):
            faults.append(f"{start}: no `print(check_..(..))`")
        if start == "A bug to find" and not any(
            prints_check(cell) and "hide-output" in cell.marker for cell in section
        ):
            faults.append("the check's message about the bug is not folded, so readers see the hint before the bug")
        if start != "A bug to find" and not re.search(r"\breturn \.\.\.|= \.\.\.|\breturn \(?\.\.\.", text):
            faults.append(f"{start}: no `return ...` to fill in")
    return faults


def end(found: list[Cell]) -> list[str]:
    last = sections(found).get("Three lines to keep")
    if last is None:
        return ["no section `## Three lines to keep`"]
    text = "\n".join(cell.text for cell in last if cell.is_prose)
    kept, _, sources = text.partition("**Sources")
    kept = kept.split("\n", 1)[1].strip() if "\n" in kept else ""
    items = re.findall(r"(?m)^(?:\d\.|-|\*) ", kept)
    sentences = re.findall(r"[.?](?=\s|$)", without_code(re.sub(r"(?m)^\d\. ", "", kept)))
    faults = [] if 3 in (len(items), len(sentences)) else [f"{len(items) or len(sentences)} lines to keep, not three"]
    return (
        faults
        if len(re.findall(r"\]\(https?://", sources)) >= 2
        else [*faults, "**Sources** with fewer than two links"]
    )


def words(found: list[Cell]) -> list[str]:
    text = " ".join(without_code(prose_of(found)).split())
    faults = [f"{word!r}: .. {text[max(at.start() - 30, 0) : at.end() + 20]} .." for word in FORBIDDEN
              for at in re.finditer(rf"\b{word}\b", text, re.IGNORECASE)]  # fmt: skip
    marks = re.finditer(r"(?<=\w)!(?=\s|$)", text)
    return faults + [f"an exclamation mark: .. {text[max(at.start() - 30, 0) : at.end()]}" for at in marks]


def names(found: list[Cell]) -> list[str]:
    """Check that a name like `model.feed_forward` exists, as a symbol, a setting or a file."""
    ours, settings, faults = {*rooms()} | {"lesson"}, {*config.affecting(*config.Affects)}, []
    for name in sorted(set(re.findall(r"`([A-Za-z_]+(?:\.\w+)+)(?:\([^`]*\))?`", prose_of(found)))):
        first = name.split(".")[0]
        if first in ours and name not in settings and not exists(name):
            faults.append(f"`{name}` does not exist")
    return faults


def exists(name: str) -> bool:
    if Path(name).suffix in (".py", ".md"):
        return bool([*ROOT.glob(name), *ROOT.glob(f"*/{name}")])
    parts = ["chapters", *name.split(".")] if name.startswith("lesson.") else name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            there = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            there = getattr(there, part, None) or getattr(there, "__dataclass_fields__", {}).get(part)
            if there is None:
                return False
        return True
    return False


FORM = (
    header,
    sizes,
    length,
    by_hand,
    place_by_hand,
    bug_program,
    predictions,
    figures,
    exercises,
    in_one_table,
    end,
    words,
    names,
)

# The tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_the_common_form(path):
    """Catches a chapter without a required part, a chapter that is too long, and a name that no longer exists."""
    found = cells(path.read_text(encoding="utf-8"))
    faults = [f"{check.__name__}: {fault}" for check in FORM for fault in check(found)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_by_hand_program_runs_alone(path):
    """Catches a by-hand program that needs a name from elsewhere on the page, or fails its own check."""
    program = compile(program_by_hand(cells(path.read_text(encoding="utf-8"))), path.name, "exec")
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which readers have
        exec(program, {"__name__": "pasted"})


def undefined_names(found: list[Cell]) -> list[str]:
    """Return the names that cells use and none of the cells that readers get defines."""
    code = "\n\n".join(cell.text for cell in found if not cell.is_prose and not cell.is_hidden)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    return sorted({fault["message"] for fault in json.loads(done.stdout)})


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_readers_get_every_name(path):
    """Catches a checker in a notebook that needs a name from a cell that readers don't get."""
    assert undefined_names(cells(path.read_text(encoding="utf-8"))) == []


def test_names_that_readers_lack_are_found():
    """Catches a check that misses a name in a function, or counts one that a removed cell or a later cell defines."""
    text = """\
# %%
import math

early = late
# %% tags=["remove-cell"]
right = lambda n: n
# %% tags=["hide-input"]
def check_answer(answer):
    return answer(math.pi) == right(late)
# %%
late = 3
"""
    assert undefined_names(cells(text)) == ["Undefined name `late`", "Undefined name `right`"]


def letters_without_meaning(found: list[Cell], known: set[str]) -> set[str]:
    """Return the unknown letters among single capitals in prose and capitals in array names."""
    text = re.sub(r"\]\([^)]*\)|C\+\+|[A-Z]\. (?=[A-Z])", " ", prose_of(found))  # not addresses, C++ or initials
    alone = re.findall(r"(?<![\w.'-])[A-Z](?![\w'-])", text)
    code = "\n".join(cell.text for cell in found)
    arrays = re.findall(r"\b[a-z]\w*?_((?:[A-Za-z]\d?)*[A-Z][A-Za-z\d]*)\b", code)
    return {*alone, *(letter for name in arrays for letter in name if letter.isupper())} - known


def known_letters() -> set[str]:
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    return {*reference.letters(), *re.findall(r"(?m)^\| `([A-Z])` \|", glossary)}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_capital_letter_is_in_the_glossary(path):
    """Catches a quantity or a dim in a chapter whose letter the glossary does not explain."""
    unknown = letters_without_meaning(cells(path.read_text(encoding="utf-8")), known_letters())
    assert not unknown, f"letters that docs/glossary.md lacks: {sorted(unknown)}"


def test_unknown_letters_are_found():
    """Catches a check that misses letters in prose, in formulas or in array names."""
    found = cells("# %% [markdown]\n# Y rows, $2 O$ and `Q + 1`; C++, F. Y. I, GPU.\n\n# %%\nx_bJtD = y_D2F")
    assert letters_without_meaning(found, {"Q", "D", "F", "I"}) == {"Y", "O", "J"}
    letters = known_letters()
    assert {"B", "M", "Z"} <= letters and not {"O", "Y"} & letters, letters


def test_every_chapter_has_its_own_number():
    """Catches two chapters with one number, a title with another number than its file, and a guide without chapter 00.
    Gaps are allowed, for future chapters."""
    numbers = [path.stem[:2] for path in CHAPTERS]
    assert numbers[0] == "00" and len({*numbers}) == len(numbers), numbers
    assert [path.read_text(encoding="utf-8").split("\n")[1][4:6] for path in CHAPTERS] == numbers


EXERCISE = """\
# %% [markdown]
# ## {title}
# Do it.

# %%
def answer(n):
    return ...


# %% tags=["hide-output"]
print(check_answer(answer))

# %% [markdown]
# <details><summary>Solution</summary>
# It is n.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_answer, (lambda n: n, "Right"))

"""
BUG = EXERCISE.format(title="A bug to find").replace("    return ...", "\n\n# %%\n".join(["x = 1\n" * 19] * 2))
GOOD = f"""\
# %% [markdown]
# # 04 · A title
#
# {("A title is a thing." + chr(10) + "# ") * 10}
#
# *Prerequisites:* 03. *Mesh:* `fsdp=8`. *Runs in* 9 s on 2 cores.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import sharding

# %% tags=["hide-input"] mystnb={{"image": {{"alt": "Memory and time of one layer, before and after"}}}}
opening.before_after(before, after, "Less", "fsdp")

# %% [markdown]
# > **Predict.** How many?

# %%
mine = None
lesson.predicted("it", mine, 3)

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax

a = 2
{("a += 1" + chr(10)) * 15}
assert a == 17

# %% mystnb={{"image": {{"alt": "Two curves, of which one falls"}}}}
figure, axes = plt.subplots()

# %% mystnb={{"image": {{"alt": "Four boxes, of which one is red"}}}}
figure, axes = plt.subplots()

# %% [markdown]
# {"Words of `sharding.psum` and [more](https://a.b). " * 400}

# %% [markdown]
# > **Predict.** And now?

# %%
lesson.predicted("it", None, 3)

{"".join(EXERCISE.format(title=f"Exercise {n}: one") for n in (1, 2, 3))}{BUG}\
# %% [markdown]
# ## In one table
#
# | what | bytes |
# |---|---|
# | a | 1 |
# | b | 2 |
#
# ## Three lines to keep
# 1. One.
# 2. Two.
# 3. Three.
#
# **Sources.** [A](https://a.b), [B](https://c.d).
""".replace("Words of `sharding.psum` and [more](https://a.b). " * 400,
            "\n# ".join(["Words of `sharding.psum` and [more](https://a.b)."] * 400))  # fmt: skip


@pytest.mark.parametrize(
    "check, old, new",
    [
        (header, "# # 04 · A title", "# # A title"),
        (header, "A title is a thing.\n# " * 10, "It is a thing.\n"),
        (header, ' tags=["hide-input"]\nfrom', "\nfrom"),
        (header, "opening.before_after(", "draw("),
        (header, "> **Predict.** How many?", "How many?"),
        (header, "*Runs in* 9 s", "*Runs in* a moment"),
        (header, "simulate_devices(8)\n", ""),
        (header, "import sharding\n", "import sharding\n" * 14),
        (sizes, "mine = None", "mine = None  # " + "-" * 80),
        (sizes, "mine = None", "mine = None\n" * 21),
        (sizes, "# Do it.", "# Do it" + " again" * 20),
        (length, "# Do it.", "# Do it. " + "Again. " * 900),
        (length, "mine = None", "mine = None\n" * 300),
        (place_by_hand, "import sharding\n\n", "import sharding\n\n# %% [markdown]\n" + "# Words.\n" * 400),
        (bug_program, "x = 1\n" * 10, "x = 1\n" * 5),
        (by_hand, ' tags=["by-hand"]', ""),
        (by_hand, "a += 1\n" * 15, ""),
        (by_hand, "a += 1\n" * 15, "a += 1\n" * 60),
        (by_hand, "import jax\n", "import jax\nimport sharding\n"),
        (by_hand, "device_count=8", "count=8"),
        (by_hand, "assert a == 17", "print(a)"),
        (in_one_table, "# | a | 1 |\n# | b | 2 |\n", ""),
        (in_one_table, "## In one table", "## Much"),
        (predictions, "> **Predict.** And now?", "And now?"),
        (predictions, 'lesson.predicted("it", None, 3)', "pass"),
        (predictions, "mine = None", "mine = 3"),
        (figures, "Four boxes, of which one is red", "red"),
        (figures, "mine = None", "mine = None\nplt.subplots()"),
        (figures, "mine = None", "mine = None\nplt.show()"),
        (exercises, "## Exercise 2: one", "## Another: one"),
        (exercises, "## A bug to find", "## Bug"),
        (exercises, "<details>", ""),
        (exercises, ' tags=["remove-cell"]', ""),
        (exercises, "print(check_answer(answer))", ""),
        (exercises, "return ...", "return n"),
        (exercises, ' tags=["hide-output"]', ""),
        (end, "# 3. Three.\n", ""),
        (end, "## Three lines to keep", "## The end"),
        (end, ", [B](https://c.d)", ""),
        (words, "Do it.", "Simply do it."),
        (words, "Do it.", "Do it!"),
        (names, "# Do it.", "# Do `sharding.psun`."),
        (names, "# Do it.", "# Do `plan.planner.plam(cfg)`."),
    ],
    ids=lambda x: getattr(x, "__name__", None) or str(x)[:24],
)
def test_every_check_finds_its_fault(check, old, new):
    """Catches a check that accepts a chapter without the part that it requires."""
    assert not check(cells(GOOD)), "the good example fails its check"
    assert old in GOOD
    assert check(cells(GOOD.replace(old, new)))
