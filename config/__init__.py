"""Settings, and everything that sets them. Nothing here imports JAX.

Open `settings.py` first: a setting is one field, with its type, default and sentence. `presets.py` holds sets of
values; `fields.py` says what a setting may hold and what it affects, and checks it; `flags.py` makes a command line of
the fields; `migrations.py` reads what earlier versions wrote.

From outside: `config.preset(..)`, the classes and functions below, `flags.command_line`, types of `fields.py` for other
dataclasses, and `migrations.moved` for files of a run.
"""

from config.fields import AUTO, Affects, Count, NotNegative, Positive, Size, SizeOrAuto, check
from config.presets import PRESETS, preset
from config.settings import (
    AXES,
    SHORT_AXES,
    Config,
    DataConfig,
    MeshConfig,
    MeshFlag,
    ModelAtWork,
    ModelConfig,
    OptimConfig,
    RunConfig,
    WorkConfig,
    affecting,
    differences,
    first_difference,
    replace,
)

__all__ = [
    "AUTO",
    "AXES",
    "PRESETS",
    "SHORT_AXES",
    "Affects",
    "Config",
    "Count",
    "DataConfig",
    "MeshConfig",
    "MeshFlag",
    "ModelAtWork",
    "ModelConfig",
    "NotNegative",
    "OptimConfig",
    "Positive",
    "RunConfig",
    "Size",
    "SizeOrAuto",
    "WorkConfig",
    "affecting",
    "check",
    "differences",
    "first_difference",
    "preset",
    "replace",
]
