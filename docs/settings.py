"""Write docs/settings.md, with every setting and what each preset changes: `python -m docs.settings`.

The description of a setting is the comment after its field, or the comment lines before it. `--help` prints the same
description.
"""

import ast
import dataclasses
import inspect
import sys
import typing
from pathlib import Path

import config
from utils import exit_status

PAGE = Path(__file__).parent / "settings.md"
HEAD = """\
# Settings

Every command that accepts a preset accepts these flags. After a preset, `--help` prints the same descriptions,
with the preset's values as defaults. A flag that changes nothing, because the model, the mesh or the objective does not
use its setting, is refused with the flag that would use it (`config/needs.py`). There are {settings} settings, and
adding one means removing one (`tests/test_settings.py`). This command writes the page from `config/settings.py` and
`config/presets.py`:

```
python -m docs.settings
```
"""
PRESETS_HEAD = """\
## What each preset changes

All other settings have the defaults above. A run has the name of its preset, unless `--run.name` sets another.
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


def kind(hint) -> str:
    """Return the values of a flag: its choices, or the name of its type."""
    hint = plain(hint)
    if hint == config.SizeOrAuto:
        return "`auto`, `int`"
    if typing.get_origin(hint) is tuple:
        return " ".join(f"`{plain(one).__name__}`" for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    return f"`{hint.__name__}`"


def value(x) -> str:
    x = " ".join(map(str, x)) if isinstance(x, tuple | list) else x
    return f"`{x}`" if x != "" else "empty"


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def flags(name: str, hint) -> str:
    """Return the flag of a setting, and its short forms."""
    metadata = getattr(hint, "__metadata__", ())
    short = [alias for one in metadata for alias in getattr(one, "aliases", None) or ()]
    return ", ".join(f"`{flag}`" for flag in [f"--{name}", *short])


def group(cls, name: str) -> list[str]:
    """Return the table of a dataclass, and the tables of the dataclasses in it."""
    hints, said, inner = typing.get_type_hints(cls, include_extras=True), comments(cls), []
    lines = [f"## {name}", "", *(inspect.getdoc(cls) or "").splitlines(), ""]
    lines += [row("flag", "value", "default", "description"), row("---", "---", "---", "---")]
    for field in dataclasses.fields(cls):
        hint = plain(hints[field.name])
        if dataclasses.is_dataclass(hint):
            inner += ["", *group(hint, f"{name}.{field.name}")]
        else:
            lines.append(row(flags(f"{name}.{field.name}", hints[field.name]), kind(hint), value(field.default),
                             said[field.name]))  # fmt: skip
    return lines + inner


def mesh() -> list[str]:
    """Describe `--mesh`, which is one flag for a whole dataclass."""
    short = ", ".join(f"`{short}` is `{axis}`" for short, axis in config.SHORT_AXES.items())
    axes = ", ".join(f"`{axis}`" for axis in config.AXES)
    return ["## mesh", "", *inspect.getdoc(config.MeshConfig).splitlines(), "",
            f"One flag, `--mesh AXIS=N,..`, default `{config.MeshConfig()}`. Axes that you leave out have size 1.",
            f"The axes, from the slowest link to the fastest: {axes}. Short forms: {short}."]  # fmt: skip


def presets() -> list[str]:
    """Return a row for each preset, with its purpose and the settings that it changes."""
    default = typed(config.Config().to_dict())
    lines = [row("preset", "purpose", "what it changes"), row("---", "---", "---")]
    for name, (what, _) in config.PRESETS.items():
        mine = typed(config.preset(name).to_dict())
        changed = [one for one, usual in default.items() if mine[one] != usual and one != "run.name"]
        lines.append(row(f"`{name}`", what, ", ".join(f"`{one}={as_flag(mine[one])}`" for one in changed)))
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
