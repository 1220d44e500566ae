"""Start a run from the parameters of another run, trained or converted, and take over its model settings. Or start from
random parameters, with the model settings of a published config.json.

Functions import JAX and what needs it, so that a command can parse its flags before JAX is imported.
"""

import dataclasses
import itertools
import json
from pathlib import Path

from config import Affects, Config, ModelConfig, affecting, differences
from utils import UserError, log

FLAGS = ("--init-from", "--init_from", "--run.init_from", "--run.init-from")
# Model settings that don't change what the parameters mean. All others are taken from the other run.
KEPT_SETTINGS = affecting(Affects.TRAINING, Affects.NUMBERS, group="model")


def apply_init_from(start: Config, flags: list[str]) -> Config:
    """If the flags contain --init-from RUN, take the defaults of the model's shape from that run.

    If the run has an encoder and `start` does not, as many inputs as targets are the default of data.input_len.
    """
    words = [word for flag in flags for word in flag.split("=", 1)]
    source = next((value for name, value in itertools.pairwise(words) if name in FLAGS), "")
    if not source:
        return start
    from architectures import architecture
    from weights import convert

    shape = with_shape_of(convert.read_config(source), start.model)
    input_len = (start.data.input_len or start.data.seq_len) if architecture(shape).input_len else 0
    return dataclasses.replace(start, model=shape, data=dataclasses.replace(start.data, input_len=input_len))


def with_shape_of(source: ModelConfig, current: ModelConfig) -> ModelConfig:
    """Return the settings for the parameters of `source`: its shape, with the training settings of `current`."""
    steering = {name: getattr(current, name) for name in KEPT_SETTINGS}
    if bool(source.balance_rate) != bool(current.balance_rate):
        steering["balance_rate"] = source.balance_rate  # at 0 the model has no selection bias
    return dataclasses.replace(source, **steering)


def load_init_params(cfg: Config, mesh):
    """Load the parameters of the run in run.init_from, from its latest checkpoint or its weights; None if it is empty.

    Prints their origin, and the model settings that differ from that run's.
    Raises: UserError if they are missing or do not fit.
    """
    if not cfg.run.init_from:
        return None
    from parameters import declare_stored
    from weights import convert

    source, declarations = cfg.run.init_from, declare_stored(cfg)
    step = convert.resolve_step(source, report=log)
    other = differing_settings(cfg.model, convert.read_config(source))
    try:
        params = convert.load_params(source, declarations, mesh, step)
    except UserError as error:
        raise UserError(f"{error}. Settings that differ: {other}" if other else str(error)) from None
    which = "converted" if step is None else f"step {step}"
    log(f"parameters and model settings are from {source} ({which})")
    if other:
        log(f"           except {other}")
    return params


def differing_settings(ours: ModelConfig, theirs: ModelConfig) -> str:
    """List the model settings that differ, with both values: ours, and that of the other run."""
    changes = differences({"model": dataclasses.asdict(ours)}, {"model": dataclasses.asdict(theirs)})
    return ", ".join(f"{name.removeprefix('model.')}={x!r} (there {y!r})" for name, x, y in changes)


def read_architecture(path: str) -> Config:
    """Return the settings to train the model of a config.json, or of the one in a folder, from random parameters.

    Raises: UserError if it has a part that our model lacks. The planner plans such a model without this part.
    """
    from weights import families, hf_config, published

    found = published.read(path)
    lacks = ", ".join(what.partition(": the plan")[0] for what in found.left_out)
    if found.kind in families.FAMILIES:  # whose tables decide exactly which settings our model has
        lacks = ""
        try:
            hf_config.config_from_hf(json.loads(Path(found.file).read_text(encoding="utf-8")))
        except UserError as error:
            lacks = str(error).removeprefix("config.json: ")
    if lacks:
        raise UserError(f"{found.file} cannot be trained as published: {lacks}; plan it with python -m plan "
                        f"{path}, or change these settings in the file to train a similar model")  # fmt: skip
    # Not `log`, which asks JAX for the rank of the process: the run chooses its devices later.
    print(*found.lines(), "           trained from random parameters; to start from the published ones, convert them "
          "first: python -m weights from-hf FOLDER --out runs/NAME", sep="\n", flush=True)  # fmt: skip
    cfg = found.config
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, objective="span")) if cfg.data.input_len else cfg
