"""Command lines: the settings come from a preset or a file, and flags change them."""

import dataclasses
import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from config.fields import Count
from config.needs import refuse_unused
from config.presets import PRESETS, preset
from config.settings import Affects, Config, ModelConfig, affecting, derived_settings, differences, replace
from utils import UserError


@dataclasses.dataclass(frozen=True)
class Arguments(Config):
    batch_tokens: Count = 0  # tokens per step, instead of --data.batch_size; 0: not given


def command_line(
    argv: list[str], prog: str, description: str, default: str | Config | None = None, arguments: type = Config,
    change: Callable[[Config, list[str]], Config] = lambda start, flags: start, start: Config | None = None,
    mesh_known: Callable[[Any], bool] = lambda arguments: True,
) -> tuple[Config, Any]:  # fmt: skip
    """Parse `[PRESET | --config FILE] [--flags]`. --help shows the values after the other flags are applied.

    default    a preset's name, or settings, to use without PRESET and --config; None: one of these two is required
    arguments  a dataclass with the fields of Config and a command's own flags
    change     fn(settings, flags) -> the settings to apply the flags to
    start      the settings that the first word stands for, if it is not a preset
    mesh_known fn(`arguments` object) -> False if the command tries other meshes than the given one
    Returns the settings, and the `arguments` object.
    Raises: UserError if the preset or file cannot be read, if both are given, if one is required and missing, or if a
    flag changes a setting that has no effect.
    """
    start, name, flags = starting_point(argv, default, start)
    before, derived = change(start, flags), derived_flags(start.model, flags)
    settings = lambda one: {f.name: getattr(one, f.name) for f in dataclasses.fields(Config)}
    arguments = tyro.cli(
        arguments, prog=f"{prog} [PRESET | --config FILE]", args=flags + derived, use_underscores=True,
        description=f"{description.strip()}\n\nDefaults come from {name}.", default=arguments(**settings(before)),
    )  # fmt: skip
    cfg = dataclasses.replace(before, **settings(arguments))
    changed = (name for name, *_ in differences(cfg.to_dict(), before.to_dict()))
    given = (name for name in changed if not any(flag.startswith(f"--{name}=") for flag in derived))
    refuse_unused(cfg, given, mesh_known(arguments))
    return cfg, arguments


def batch_of_tokens(cfg: Config, tokens: int, on_mesh: bool = True) -> Config:
    """Set the batch size to a number of tokens; 0 keeps it. Raises: UserError with the nearest sizes if not whole.

    on_mesh  the sequences also split over the mesh; a search tries other meshes
    """
    if not tokens:
        return cfg
    T = cfg.data.seq_len + cfg.data.input_len
    shards = cfg.mesh.batch_shards if on_mesh else 1
    if tokens % (unit := T * shards) or tokens < 0:
        less = tokens - tokens % unit
        near = f"{less:,} or {less + unit:,}" if less > 0 else f"{unit:,}"
        over = f", and {cfg.mesh} splits them over {shards} batch shards" if shards > 1 else ""
        raise UserError(f"--batch_tokens {tokens:,}: sequences have {T:,} tokens{over}, so a batch has a multiple of "
                        f"{unit:,}; use {near}")  # fmt: skip
    return replace(cfg, **{"data.batch_size": tokens // T})


def model_file(argv: list[str]) -> str:
    """Return the first word of a command if it names a folder or file instead of a preset; else "".

    Raises: UserError if it does not exist, with the most similar preset.
    """
    word = argv[0] if argv else ""
    if word in PRESETS or word.startswith("-") or not ("/" in word or word.endswith(".json") or Path(word).exists()):
        return ""
    if not Path(word).exists():
        close = difflib.get_close_matches(Path(word).name.lower(), PRESETS, n=1, cutoff=0.5)
        instead = f"the preset {close[0]}" if close else "a preset"
        raise UserError(f"{word}: no such file or folder, and nothing is downloaded; pass {instead}, or a config.json "
                        "of Hugging Face that is on this disk, or its folder")  # fmt: skip
    return word


def derived_flags(before: ModelConfig, flags: list[str]) -> list[str]:
    """Return flags for the settings whose values follow from other flags; see `derived_settings`."""
    matches = re.findall(r"--model\.(n.heads|d.model|n.kv.heads|d.head)[= ](\d+)", " ".join(flags))
    given = {name.replace("-", "_"): int(n) for name, n in matches}
    return [f"--model.{name}={n}" for name, n in derived_settings(before, given).items()]


# Flags of other trainers: a part of the name, and what to use here.
ELSEWHERE = {"wandb": "use --run.tracker wandb; the environment variable WANDB_PROJECT sets the project"}
OR_CONFIG_FILE = ", or from a run with --config FILE"


def starting_point(
    argv: list[str], default: str | Config | None, start: Config | None = None
) -> tuple[Config, str, list[str]]:
    """Split a command line: return the settings of `PRESET` or `--config FILE`, where they come from, and the flags."""
    words, flags, files = iter(argv), [], []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") and (here := next((how for part, how in ELSEWHERE.items() if part in name), "")):
            raise UserError(f"{name} does not exist; {here}")
        if name == "--config":
            files.append(value if equals else next(words, ""))
        else:
            flags.append(word)
    named = [flags.pop(0)] if flags and not flags[0].startswith("-") else []
    if "" in files:
        raise UserError("--config needs the config.json of a run, such as --config runs/laptop/config.json")
    if len(files) > 1 or (files and named):
        given = " and ".join(
            [*(f"{'file' if start else 'preset'} {name!r}" for name in named), *(f"--config {file}" for file in files)]
        )
        raise UserError(f"{given}: pass only one preset or --config file")
    if named and start:
        return start, named[0], flags
    if files:
        return read_config(files[0]), files[0], flags
    if default is None and not named:
        if not {"-h", "--help"} & set(flags):
            raise UserError(f"no settings: pass a preset ({', '.join(PRESETS)}) or a run's settings: --config FILE")
        default = next(iter(PRESETS))
    if isinstance(default, Config) and not named:
        return default, f"this command{OR_CONFIG_FILE}", flags
    name = (named or [default])[0]
    return preset(name), f"the preset ({name!r} here){OR_CONFIG_FILE}", flags


def read_config(file: str) -> Config:
    """Read settings from a run's config.json, or from a file with only settings. A missing setting has its default.

    Settings that affect only one start of a run (`Affects.START`) are ignored.
    Raises: UserError if the file is missing or not JSON, or if a setting in it is unknown or has an invalid value.
    """
    hint = "pass a run's config.json, e.g. --config runs/laptop/config.json"
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {file}: {error.strerror}; {hint}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--config {file}: not JSON ({error}); {hint}") from None
    values = values.get("config", values) if isinstance(values, dict) else values
    try:
        cfg = Config.from_dict(values)
    except UserError as error:
        raise UserError(f"--config {file}: {error}") from None
    return replace(cfg, **affecting(Affects.START))
