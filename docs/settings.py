"""Write docs/settings.md, with every setting and what each preset changes: `python -m docs.settings`.

The description of a setting is the comment after its field, or the comment lines before it. The page has the first
sentence, and `--help` prints all of it.
"""

import ast
import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path

import config
from utils import exit_status

PAGE = Path(__file__).parent / "settings.md"
HEAD = """\
# Settings

Every command that accepts a preset accepts these flags. `python main.py laptop --help` prints the full description of
each, its values, and its value in the preset. A flag that changes nothing, because the model, the mesh or the objective
does not use its setting, is refused with the flag that would use it (`config/needs.py`). There are {settings} settings,
and adding one means removing one (`tests/test_settings.py`). `python -m docs.settings` writes this page.
"""
PRESETS_HEAD = """\
## What each preset changes

All other settings have their defaults, or those of the preset that the row names. A run has the name of its preset,
unless `--run.name` sets another.
"""


def comments(cls) -> dict[str, str]:
    """Return the comment of each field of a dataclass, after it or on the lines before it."""
    lines = inspect.getsource(cls).splitlines()
    found = {}
    for node in ast.parse(inspect.getsource(cls)).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        before, row = [], node.lineno - 2
        while lines[row].strip().startswith("#"):
            before.insert(0, lines[row].strip(" #"))
            row -= 1
        behind = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
        found[node.target.id] = behind or " ".join(before)
    return found


def plain(hint):
    """Return a type without its `Annotated` metadata."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def choices(hint) -> str:
    """Return the values of a flag if it has a list of them, as `--help` prints them."""
    hint = plain(hint)
    return f" {{{','.join(typing.get_args(hint))}}}" if typing.get_origin(hint) is typing.Literal else ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, without what the value that turns it off does."""
    return re.sub(r"; (0|empty): .*", "", re.split(r"\. (?=\S)", text)[0].rstrip("."))


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def flags(name: str, hint) -> str:
    """Return the flag of a setting with its values, and its short forms."""
    metadata = getattr(hint, "__metadata__", ())
    short = [alias for one in metadata for alias in getattr(one, "aliases", None) or ()]
    return ", ".join(f"`{flag}`" for flag in [f"--{name}{choices(hint)}", *short])


def group(cls, name: str) -> list[str]:
    """Return a line for each setting of a dataclass, and the lines of the dataclasses in it."""
    hints, said, inner = typing.get_type_hints(cls, include_extras=True), comments(cls), []
    lines = [f"## {name}", "", *(inspect.getdoc(cls) or "").splitlines(), ""]
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(plain(hint)):
            inner += ["", *group(plain(hint), f"{name}.{field.name}")]
        else:
            lines.append(f"- {flags(f'{name}.{field.name}', hint)}: {first_sentence(said[field.name])}")
    return lines + inner


def mesh() -> list[str]:
    """Describe `--mesh`, which is one flag for a whole dataclass."""
    short = ", ".join(f"`{short}` is `{axis}`" for short, axis in config.SHORT_AXES.items())
    axes = ", ".join(f"`{axis}`" for axis in config.AXES)
    return ["## mesh", "", *inspect.getdoc(config.MeshConfig).splitlines(), "",
            f"One flag, `--mesh AXIS=N,..`, default `{config.MeshConfig()}`. Axes that you leave out have size 1.",
            f"The axes, from the slowest link to the fastest: {axes}. Short forms: {short}."]  # fmt: skip


def presets() -> list[str]:
    """Return a row for each preset, with its purpose and what it changes in the defaults or in a similar preset."""
    above = {"": typed(config.Config().to_dict())}
    lines = [row("preset", "purpose", "what it changes"), "|---|---|---|"]
    for name, (what, _) in config.PRESETS.items():
        mine = typed(config.preset(name).to_dict())
        changes = {
            base: [f"`{one}={as_flag(mine[one])}`" for one, x in values.items() if mine[one] != x and one != "run.name"]
            for base, values in above.items()
        }
        base = min(changes, key=lambda base: len(changes[base]) * (1 if base else 2 / 3))
        start = f"`{base}` with " if base else ""
        if what.startswith("for tests"):
            lines.append(row(f"`{name}`", what, "see `config/presets.py`"))
        else:
            lines.append(row(f"`{name}`", what, start + ", ".join(changes[base])))
            above[name] = mine
    return lines


def as_flag(x) -> str:
    """Return a value as in a flag, on one line."""
    text = " ".join(map(str, x)) if isinstance(x, tuple | list) else str(x)
    return text.replace("\n", "\\n")


def typed(values: dict, prefix: str = "") -> dict:
    """Return settings by dotted name, with a mesh as one value."""
    flat = {}
    for name, x in values.items():
        if name == "mesh":
            x = str(config.MeshConfig(**x))
        flat |= typed(x, f"{prefix}{name}.") if isinstance(x, dict) else {prefix + name: x}
    return flat


def page() -> str:
    """Return the text of the page."""
    count = len(config.fields.flatten(config.Config().to_dict()))
    hints, lines = typing.get_type_hints(config.Config), [HEAD.format(settings=count)]
    for field in dataclasses.fields(config.Config):
        lines += [*(mesh() if field.name == "mesh" else group(hints[field.name], field.name)), ""]
    return "\n".join([*lines, PRESETS_HEAD, *presets()]) + "\n"


@exit_status
def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.parent.name}/{PAGE.name}: {len(page().splitlines())} lines")


if __name__ == "__main__":
    sys.exit(main())
