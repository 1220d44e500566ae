"""Settings, presets and command lines. Nothing here imports JAX.

Open `settings.py` first: each setting is one field with a type, a default and a description. `presets.py` has the
presets, `fields.py` has the types of settings and their checks, `flags.py` parses the command line, and `migrations.py`
converts settings that earlier versions wrote.

From outside: use `config.preset(..)`, the classes and functions below, `flags.command_line`, the types in `fields.py`
for other dataclasses, and `migrations.migrate` for files from a run.
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
