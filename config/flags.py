"""Command lines: settings that start from a preset or a file, and flags that change them."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from config.migrations import CHOICES, dropped, instead_of
from config.presets import PRESETS, preset
from config.settings import Affects, Config, ModelConfig, affecting, following, replace
from devices import log
from errors import UserError


def command_line(
    argv: list[str], prog: str, description: str, default: str | Config | None = None, arguments: type = Config,
    change: Callable[[Config, list[str]], Config] = lambda start, flags: start,
) -> tuple[Config, Any]:  # fmt: skip
    """Read `[PRESET | --config FILE] [--flags]`: settings, and what flags change of them; --help shows them changed.

    default    where neither is given: the name of a preset, or settings; None: one of them has to be
    arguments  a dataclass with Config's fields, and a command's own flags
    change     fn(start, flags) -> what the flags then change
    Returns the settings, and all that `arguments` holds.
    Raises: UserError for a preset or file that cannot be read, none where one is needed, or both.
    """
    start, name, flags = starting_point(argv, default)
    defaults = f"Defaults are {name}; --help-verbose explains them."
    arguments = tyro.cli(
        arguments, prog=f"{prog} [PRESET | --config FILE]", description=f"{description.strip()}\n\n{defaults}",
        default=arguments(**vars(change(start, flags))), args=flags + follow(start.model, flags), use_underscores=True,
        compact_help=True,
    )  # fmt: skip
    return Config(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Config)}), arguments


def follow(before: ModelConfig, flags: list[str]) -> list[str]:
    """Flags for what follows other flags, see `following`."""
    said = re.findall(r"--model\.(n.heads|d.model|n.kv.heads|d.head)[= ](\d+)", " ".join(flags))
    given = {name.replace("-", "_"): int(n) for name, n in said}
    return [f"--model.{name}={n}" for name, n in following(before, given).items()]


OR_FILE = ", or with --config FILE a run's settings"


def starting_point(argv: list[str], default: str | Config | None) -> tuple[Config, str, list[str]]:
    """Take `PRESET` or `--config FILE` out of a command line: the settings, what to call them, and the flags."""
    for word, after in itertools.pairwise([*argv, "--"]):
        setting = word[2:].replace("-", "_")
        if setting in CHOICES and after.startswith("-"):
            raise UserError(f"{word} takes a value now: {word} {CHOICES[setting]}")
    words, flags, files = iter(argv), [], []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and (instead := instead_of(name[2:].replace("-", "_"))):
            raise UserError(f"{name} {instead}")
        if name == "--config":
            files.append(value if equals else next(words, ""))
        else:
            flags.append(word)
    named = [flags.pop(0)] if flags and not flags[0].startswith("-") else []
    if "" in files:
        raise UserError("--config: name a run's config.json after it, e.g. --config runs/laptop/config.json")
    if len(files) > 1 or (files and named):
        given = " and ".join([*(f"preset {name!r}" for name in named), *(f"--config {file}" for file in files)])
        raise UserError(f"{given}: settings start from one of them; leave the others out")
    if files:
        return read_config(files[0]), f"those in {files[0]}", flags
    if default is None and not named:
        if not {"-h", "--help", "-H", "--help-verbose"} & set(flags):
            raise UserError(f"name a preset first: {', '.join(PRESETS)}; or a run's settings: --config FILE")
        default = next(iter(PRESETS))
    if isinstance(default, Config) and not named:
        return default, f"this command's own{OR_FILE}", flags
    name = (named or [default])[0]
    return preset(name), f"the preset's, here {name!r}{OR_FILE}", flags


def read_config(file: str) -> Config:
    """Read settings from a run's config.json, or from a file of settings alone; those not in it have their defaults.

    Settings of one start are not taken from there.
    Raises: UserError if there is no such file, it is no JSON, or a setting in it is unknown or has no such value.
    """
    hint = "name a run's config.json, e.g. --config runs/laptop/config.json"
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}; {hint}") from None
    except ValueError as error:
        raise UserError(f"--config {file}: not JSON ({error}); {hint}") from None
    values = values.get("config", values) if isinstance(values, dict) else values
    try:
        cfg = Config.from_dict(values)
    except UserError as error:
        raise UserError(f"--config {file}: {error}") from None
    for line in dropped(values):
        log(line)
    return replace(cfg, **affecting(Affects.START))
