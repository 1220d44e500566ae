"""Claims about how chapters are written: their parts, how wide and long they are, what they name. None is run."""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import config
from tests.test_house import ROOT, modules

CHAPTERS = sorted((ROOT / "chapters").glob("[0-9][0-9]_*.py"))
CODE_COLUMNS, PROSE_COLUMNS, CODE_LINES = 88, 110, 20
WORDS = (2000, 3500)
FORBIDDEN = ("as you can see", "simply", "obviously", "let's", "just")


@dataclass(frozen=True)
class Cell:
    """A cell of a py:percent program."""

    line: int  # of its marker
    marker: str  # what stands behind `# %%`
    text: str  # markdown without the leading `# `, or code

    @property
    def is_prose(self) -> bool:
        return "[markdown]" in self.marker

    @property
    def is_hidden(self) -> bool:
        return "remove-cell" in self.marker

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
    """Prose without what stands between backquotes, and without the addresses of links."""
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]+>", " ", text, flags=re.DOTALL)


# What is looked for: functions of all cells that give a line for each fault -------------------------------------------


def header(found: list[Cell]) -> list[str]:
    first, second = found[0].text, found[1].text
    wanted = {
        "a title like `# 04 · From copies to slices`": r"\A# \d\d · \S.*\n",
        "**Question.**": r"\*\*Question\.\*\* ",
        "**Why it hurts not to know.**": r"\*\*Why it hurts not to know\.\*\* ",
        "*Before this:* .. *Mesh:* .. *Runs in* N s on 2 cores.":
            r"\*Before this:\* .*\*Mesh:\* .*\*Runs in\*\s+\d+\s+s\s+on\s+2\s+cores",
    }  # fmt: skip
    faults = [
        f"the first cell lacks {what}" for what, sought in wanted.items() if not re.search(sought, first, re.DOTALL)
    ]
    if not re.match(r"import utils\n+utils\.simulate_devices\(8\)\n", second):
        faults.append("the second cell does not begin with `import utils` and `utils.simulate_devices(8)`")
    imports = re.findall(r"(?m)^(?:import|from) ", second)
    return faults + ([f"{len(imports)} lines of imports, more than 10"] if len(imports) > 10 else [])


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
    words = len(prose_of(found).split())
    return (
        [] if WORDS[0] <= words <= WORDS[1] else [f"{words:,} words of prose; wanted are {WORDS[0]:,} to {WORDS[1]:,}"]
    )


def predictions(found: list[Cell]) -> list[str]:
    asked = [n for n, cell in enumerate(found) if cell.is_prose and re.search(r"(?m)^> \*\*Predict", cell.text)]
    faults = [] if len(asked) >= 2 else [f"{len(asked)} predictions (`> **Predict.** ..`), fewer than 2"]
    for n, until in zip(asked, [*asked[1:], len(found)], strict=True):
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
        if re.search(r"plt\.(subplots|figure)\(|lesson\.slices\(", cell.text) and not cell.is_prose
    ]
    good = [cell for cell in found if len(cell.alt.split()) >= 5]
    faults = [] if len(good) >= 2 else [f"{len(good)} figures with alternative text of 5 words, fewer than 2"]
    faults += [f"line {cell.line}: a figure without alternative text" for cell in drawn if draws(cell) and not cell.alt]
    return faults + [f"line {cell.line}: plt.show()" for cell in found if "plt.show(" in cell.text]


def draws(cell: Cell) -> bool:
    """Whether a cell draws, and does not only define what another one calls."""
    body = re.sub(r"(?m)^(def|class) .*\n((    .*)?\n)*", "", cell.text + "\n")
    return bool(re.search(r"plt\.(subplots|figure)\(", body)) and not cell.is_hidden and not cell.is_prose


def sections(found: list[Cell]) -> dict[str, list[Cell]]:
    """Heading of each `## ..` -> the cells from it to the next."""
    parts: dict[str, list[Cell]] = {}
    title = ""
    for cell in found:
        pieces = re.split(r"(?m)^(?=## )", cell.text) if cell.is_prose else [cell.text]
        for piece in filter(None, pieces):
            if cell.is_prose and piece.startswith("## "):
                title = piece.splitlines()[0].removeprefix("## ").strip()
            parts.setdefault(title, []).append(Cell(cell.line, cell.marker, piece))
    return parts


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
        elif not any(cell.is_hidden and "assert" in cell.text for cell in section[order[0] :]):
            faults.append(f"{start}: no remove-cell with asserts after the solution")
        if not re.search(r"print\(\s*check_\w+\(", text):
            faults.append(f"{start}: no `print(check_..(..))`")
        if start != "A bug to find" and not re.search(r"\breturn \.\.\.|= \.\.\.|\breturn \(?\.\.\.", text):
            faults.append(f"{start}: nothing to fill in: no `return ...`")
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
    """What is named like `model.feed_forward` has to be there: a symbol, a setting, or a file."""
    ours, settings, faults = {*modules()} | {"lesson"}, {*config._flatten(config.Config().to_dict())}, []
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


FORM = (header, sizes, length, predictions, figures, exercises, end, words, names)

# The tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_the_form_of_all(path):
    """Catches a chapter without a part that readers rely on, one too long to read, and a name that is gone."""
    found = cells(path.read_text(encoding="utf-8"))
    faults = [f"{check.__name__}: {fault}" for check in FORM for fault in check(found)]
    assert not faults, "\n".join(faults)


def test_chapters_are_numbered_without_a_gap():
    """Catches a chapter that two share a number with, and one that is missing from the order."""
    assert [int(path.stem[:2]) for path in CHAPTERS] == [*range(len(CHAPTERS))]


EXERCISE = """\
# %% [markdown]
# ## {title}
# Do it.

# %%
def answer(n):
    return ...


print(check_answer(answer))

# %% [markdown]
# <details><summary>Solution</summary>
# It is n.
# </details>

# %% tags=["remove-cell"]
assert "Right" in check_answer(lambda n: n)

"""
GOOD = f"""\
# %% [markdown]
# # 04 · A title
#
# **Question.** What?
#
# **Why it hurts not to know.** It does.
#
# *Before this:* 03. *Mesh:* `fsdp=8`. *Runs in* 9 s on 2 cores.

# %%
import utils

utils.simulate_devices(8)

import sharding

# %% mystnb={{"image": {{"alt": "Two curves, of which one falls"}}}}
figure, axes = plt.subplots()

# %% mystnb={{"image": {{"alt": "Four boxes, of which one is red"}}}}
figure, axes = plt.subplots()

# %% [markdown]
# {"Words of `sharding.psum` and [more](https://a.b). " * 500}
#
# > **Predict.** How many?

# %%
mine = None
lesson.predicted("it", mine, 3)

# %% [markdown]
# > **Predict.** And now?

# %%
lesson.predicted("it", None, 3)

{"".join(EXERCISE.format(title=f"Exercise {n}: one") for n in (1, 2, 3))}{EXERCISE.format(title="A bug to find")}\
# %% [markdown]
# ## Three lines to keep
# 1. One.
# 2. Two.
# 3. Three.
#
# **Sources.** [A](https://a.b), [B](https://c.d).
""".replace("Words of `sharding.psum` and [more](https://a.b). " * 500,
            "\n# ".join(["Words of `sharding.psum` and [more](https://a.b)."] * 500))  # fmt: skip


@pytest.mark.parametrize(
    "check, old, new",
    [
        (header, "# # 04 · A title", "# # A title"),
        (header, "**Question.**", "Question."),
        (header, "*Runs in* 9 s", "*Runs in* a moment"),
        (header, "utils.simulate_devices(8)\n", ""),
        (header, "import sharding\n", "import sharding\n" * 10),
        (sizes, "mine = None", "mine = None  # " + "-" * 80),
        (sizes, "mine = None", "mine = None\n" * 21),
        (sizes, "# Do it.", "# Do it" + " again" * 20),
        (length, "# Do it.", "# Do it. " + "Again. " * 900),
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
def test_the_form_is_looked_at(check, old, new):
    """Catches a check that finds nothing wrong with a chapter from which it was taken."""
    assert not check(cells(GOOD)), "the chapter that should be good is not"
    assert old in GOOD
    assert check(cells(GOOD.replace(old, new)))
