"""Start a run from the parameters of another, converted or trained: what comes from there, and what stays."""

import dataclasses
import itertools
from pathlib import Path

from jax.sharding import Mesh

import model
import sharding
from config import Config, ModelConfig, differences
from train import checkpoint
from utils import UserError, log
from weights import convert

FLAGS = ("--init-from", "--init_from", "--run.init_from", "--run.init-from")
# Settings of the model that steer training: parameters mean the same under any of them. All others decide
# what the parameters are, and come with them.
STEERING = ("balance_loss", "balance_rate", "z_loss", "label_smoothing", "capacity_factor", "dropout",
            "precision")  # fmt: skip


def start_from(start: Config, flags: list[str]) -> Config:
    """With --init-from among the flags, their defaults are those of the run named there where parameters ask for it."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    source = next((value for name, value in itertools.pairwise(words) if name in FLAGS), "")
    return dataclasses.replace(start, model=with_shape_of(model_of(source), start.model)) if source else start


def model_of(source: str) -> ModelConfig:
    """The model's settings of a run. Raises: UserError if there is no run, or its model is not one of model.py."""
    theirs = convert.read_config(Path(source))
    if not isinstance(theirs, ModelConfig):
        raise UserError(f"{source} holds another model ({type(theirs).__name__}); main.py trains model.py's")
    return theirs


def with_shape_of(theirs: ModelConfig, ours: ModelConfig) -> ModelConfig:
    """Our settings for the parameters of another model: what they are is as there, what steers training as here."""
    steering = {name: getattr(ours, name) for name in STEERING}
    if bool(theirs.balance_rate) != bool(ours.balance_rate):
        steering["balance_rate"] = theirs.balance_rate  # at 0 the selection bias, a parameter, does not exist
    return dataclasses.replace(theirs, **steering)


def given_params(cfg: Config, mesh: Mesh):
    """Parameters of the run that run.init_from names, at its newest step if it was trained; None if it names none.

    Says what they are, and which settings of the model are not those they had.
    Raises: UserError if they are missing, or do not fit.
    """
    if not cfg.run.init_from:
        return None
    source, declarations = Path(cfg.run.init_from), model.declare(cfg.model)
    if (source / "weights").is_dir():
        params, which = convert.load_weights(source, declarations, mesh), "converted"
    else:
        step = checkpoint.latest_step(source / "checkpoints", log, "params")
        params = checkpoint.restore_params(source / "checkpoints", sharding.shapes(declarations, mesh), step)
        which = f"step {step}"
    log(f"parameters from {source}, {which}, and its model's settings")
    if other := other_settings(cfg.model, model_of(cfg.run.init_from)):
        log(f"           but for {other}")
    return params


def other_settings(ours: ModelConfig, theirs: ModelConfig) -> str:
    """The settings of our model that are not those of another, with both values."""
    found = differences({"model": dataclasses.asdict(ours)}, {"model": dataclasses.asdict(theirs)})
    return ", ".join(f"{name.removeprefix('model.')}={x!r} (there {y!r})" for name, x, y in found)
