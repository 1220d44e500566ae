"""Settings, presets and command lines. Nothing here imports JAX.

Open `settings.py` first: each setting is one field with a type, a default and a description. `presets.py` has the
presets, `mesh.py` has the mesh, `fields.py` has the types of settings and their checks, `needs.py` tells which settings
have an effect, and `flags.py` parses the command line.

From outside: use `config.preset(..)`, the classes and functions below, `flags.command_line`, and the types in
`fields.py` for other dataclasses.
"""

from config.fields import AUTO, Affects, Count, NotNegative, Positive, Size, SizeOrAuto, check
from config.mesh import AXES, SHORT_AXES, MeshConfig, MeshFlag
from config.presets import HUB_NAMES, PRESETS, preset
from config.settings import (
    Config,
    DataConfig,
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
    "HUB_NAMES",
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
