"""Start a run from the parameters of another, converted or trained: what comes from there, and what stays."""

import dataclasses
import itertools

from jax.sharding import Mesh

import model
from config import Affects, Config, ModelConfig, affecting, differences
from devices import log
from weights import convert

FLAGS = ("--init-from", "--init_from", "--run.init_from", "--run.init-from")
# Settings of the model under any of which parameters mean the same. All others come with the parameters.
KEPT_SETTINGS = affecting(Affects.TRAINING, Affects.NUMBERS, group="model")


def apply_init_from(start: Config, flags: list[str]) -> Config:
    """With --init-from among the flags, their defaults are those of the run named there where parameters ask for it."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    source = next((value for name, value in itertools.pairwise(words) if name in FLAGS), "")
    if not source:
        return start
    return dataclasses.replace(start, model=with_shape_of(convert.read_config(source), start.model))


def with_shape_of(source: ModelConfig, current: ModelConfig) -> ModelConfig:
    """Our settings for the parameters of another model: what they are is as there, what steers training as here."""
    steering = {name: getattr(current, name) for name in KEPT_SETTINGS}
    if bool(source.balance_rate) != bool(current.balance_rate):
        steering["balance_rate"] = source.balance_rate  # at 0 the selection bias, a parameter, does not exist
    return dataclasses.replace(source, **steering)


def load_init_params(cfg: Config, mesh: Mesh):
    """Parameters of the run that run.init_from names, at its newest step if it was trained; None if it names none.

    Says what they are, and which settings of the model are not those they had.
    Raises: UserError if they are missing, or do not fit.
    """
    if not cfg.run.init_from:
        return None
    source, declarations = cfg.run.init_from, model.declare(cfg.model)
    step = convert.resolve_step(source, report=log)
    params, which = (
        convert.load_params(source, declarations, mesh, step),
        "converted" if step is None else f"step {step}",
    )
    log(f"parameters from {source}, {which}, and its model's settings")
    if other := differing_settings(cfg.model, convert.read_config(source)):
        log(f"           but for {other}")
    return params


def differing_settings(ours: ModelConfig, theirs: ModelConfig) -> str:
    """The settings of our model that are not those of another, with both values."""
    found = differences({"model": dataclasses.asdict(ours)}, {"model": dataclasses.asdict(theirs)})
    return ", ".join(f"{name.removeprefix('model.')}={x!r} (there {y!r})" for name, x, y in found)
