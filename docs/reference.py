"""Make parts of the site from the code: the API from docstrings, the letters, the list of chapters.

All of it is read from the text of files. No module is imported, and no device is used.
"""

import ast
import html
import re
from pathlib import Path

from docs.notebooks import ROOT, chapters

# Pages of the API in reading order: files at the root, and packages.
API = ("model", "encoder_decoder", "sharding", "parameters", "overlap", "kernels", "optimizer", "pipeline",
       "compile", "plan", "plan/chips", "plan/trace", "plan/count", "plan/simulate", "plan/time", "plan/answer",
       "config", "dataset", "data/reading", "data", "train/hosts", "train", "startup", "generate", "weights",
       "evaluate", "main", "utils", "progress", "devices", "chapters")  # fmt: skip


# Letters --------------------------------------------------------------------------------------------------------------


def letters() -> dict[str, str]:
    """Return letter -> meaning, from the legend of three columns at the head of model.py."""
    text = ast.get_docstring(ast.parse((ROOT / "model.py").read_text(encoding="utf-8")))
    block = next(part for part in text.split("\n\n") if part.startswith("    B  "))
    lines = block.splitlines()
    starts = [match.start() for match in re.finditer(r"(?<!\S)[A-Z]  ", lines[0])]
    found = {}
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        column = " ".join(line[start:end].strip() for line in lines)
        parts = re.split(r"(?<!\S)([A-Z])  +(?=\S)", column)
        found |= dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
    return found


def letters_table() -> str:
    rows = [f"| `{letter}` | {meaning} |" for letter, meaning in sorted(letters().items())]
    return "\n".join(["| letter | dim |", "|---|---|", *rows])


# Chapters -------------------------------------------------------------------------------------------------------------


def head(path: Path) -> dict[str, str]:
    """Return the number, the title and the first sentences of a chapter, at most 200 characters of them if possible."""
    first = re.split(r"(?m)^# %%.*$", path.read_text(encoding="utf-8"))[1]
    title, summary, *_ = [" ".join(part.split()) for part in re.sub(r"(?m)^# ?", "", first).strip().split("\n\n")]
    sentences = re.split(r"(?<=[.?!]) (?=[A-Z*`])", summary.removeprefix("**Question.** "))
    says = sentences[0]
    for sentence in sentences[1:]:
        if len(says) + len(sentence) >= 200:
            break
        says += f" {sentence}"
    return {"number": path.stem[:2], "title": re.sub(r"^# \d\d · ", "", title), "says": says}


def inline(text: str) -> str:
    """Convert a line of markdown to HTML: code, bold and italic."""
    text = html.escape(text, quote=False)
    for pattern, tag in ((r"`([^`]+)`", "code"), (r"\*\*([^*]+)\*\*", "strong"), (r"\*([^*]+)\*", "em")):
        text = re.sub(pattern, rf"<{tag}>\1</{tag}>", text)
    return text


def chapter_cards() -> str:
    """Return the chapters as a list of links, each with its first sentences."""
    cards = []
    for path in chapters():
        one = head(path)
        cards.append(
            f'<li><a href="chapters/{path.stem}.html"><span class="number">{one["number"]}</span>'
            f"<strong>{inline(one['title'])}</strong><span>{inline(one['says'])}</span></a></li>"
        )
    return f'<ol class="chapter-cards">{"".join(cards)}</ol>'


def feed_forward_source() -> str:
    """Return the source of two functions of model.py, without docstrings."""
    text = (ROOT / "model.py").read_text(encoding="utf-8")
    lines, out = text.splitlines(), []
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in ("hidden", "feed_forward_branch"):
            own = lines[node.lineno - 1 : node.end_lineno]
            if ast.get_docstring(node):
                said = node.body[0]
                del own[said.lineno - node.lineno : said.end_lineno - node.lineno + 1]
            out += [*own, "", ""]
    return "\n".join(["```python", *out[:-2], "```"])


# API ------------------------------------------------------------------------------------------------------------------


def public(body: list) -> list:
    """Return the public functions and classes."""
    named = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node for node in named if not node.name.startswith("_")]


def signature(node) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def fields(node: ast.ClassDef, lines: list[str]) -> str:
    """Return the fields of a class with their comments."""
    rows = [lines[item.lineno - 1 : item.end_lineno] for item in node.body if isinstance(item, ast.AnnAssign)]
    return "\n".join(line[4:] for row in rows for line in row)


def entry(node, lines: list[str], within: str = "") -> list[str]:
    """Return a function or class as markdown: its name, signature and docstring."""
    text, name = ast.get_docstring(node) or "", f"{within}{node.name}"
    out = [f"### `{name}`", "", "```python", signature(node), "```", ""]
    first, _, rest = text.partition("\n")
    if first:
        out += [inline_safe(first), ""]
    if rest.strip():
        out += [f'<pre class="doc">{html.escape(rest.strip(chr(10)), quote=False)}</pre>', ""]
    if isinstance(node, ast.ClassDef):
        if kept := fields(node, lines):
            out += ["```python", kept, "```", ""]
        for inner in public(node.body):
            if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner):
                out += entry(inner, lines, f"{node.name}.")
    return out


def inline_safe(text: str) -> str:
    """Escape markup in a docstring's line, except in code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_\[\]<>$])", r"\\\1", part) for part in parts)


def api_page(name: str) -> str:
    """Return the page of a file or package: the docstring of each module, and of its functions and classes."""
    dotted, single = name.replace("/", "."), (ROOT / f"{name}.py").exists()
    files = [ROOT / f"{name}.py"] if single else sorted((ROOT / name).glob("*.py"))
    files = [path for path in files if path.stem != "__init__" and not path.stem[0].isdigit()]
    out = [f"# `{name}`" if single else f"# `{name}/`", ""]
    if not single:
        text = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8"))) or ""
        out += [f'<pre class="doc">{html.escape(text, quote=False)}</pre>', ""]
    for path in files:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        text = ast.get_docstring(tree) or ""
        if not single:
            out += [f"## `{dotted}.{path.stem}`" if path.stem != "__main__" else f"## `python -m {dotted}`", ""]
        out += [f'<pre class="doc">{html.escape(text, quote=False)}</pre>', ""]
        if single:
            out += ["## Functions and classes", ""]
        for node in public(tree.body):
            out += entry(node, source.splitlines())
    return "\n".join(out) + "\n"
