"""Save and restore training state: arrays by logical name, whatever mesh they lie on.

A checkpoint holds `{name: array}` (names as in `sharding.named`) and a JSON `about`: what the run was, to be compared
before it is continued. Orbax writes in the background; a save is complete only once its directory has its final name.
"""

import os

import jax
import orbax.checkpoint as ocp

from sharding import map_named, named
from utils import UserError, first_difference


def open_directory(directory: str | os.PathLike, keep: int = 2) -> ocp.CheckpointManager:
    """Open a directory of checkpoints for writing; the newest `keep` stay. Close it to wait for the last save."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
    return ocp.CheckpointManager(os.path.abspath(directory), options=options)


def latest_step(directory: str | os.PathLike) -> int | None:
    """The newest complete checkpoint's step; None if there is none."""
    return max(ocp.utils.checkpoint_steps(os.path.abspath(directory)), default=None) if os.path.isdir(directory) else None


def save(manager: ocp.CheckpointManager, step: int, state, about: dict) -> None:
    """Start saving the arrays of `state`; returns once they are copied, the writing goes on in the background."""
    manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(named(state)), about=ocp.args.JsonSave(about)))


def restore(directory: str | os.PathLike, target, step: int | None = None, about: dict | None = None):
    """Read a checkpoint into the shapes, dtypes and places of `target`, a tree of ShapeDtypeStruct with shardings.

    step   which one; None: the newest
    about  what the caller is running; refused if the checkpoint was made by something else
    Raises: UserError naming the first difference in `about`, or the missing checkpoint.
    """
    step = latest_step(directory) if step is None else step
    if step is None:
        raise UserError(f"no checkpoint in {directory}")
    with ocp.CheckpointManager(os.path.abspath(directory)) as manager:
        if about is not None:
            saved = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
            if difference := first_difference(about, saved):
                raise UserError(f"checkpoint {directory}/{step} belongs to another run: {difference} (in the checkpoint)")
        arrays = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(named(target)))).state
    return map_named(lambda name, _: arrays[name], target)


def target(shapes, shardings):
    """Join shapes and shardings into what `restore` reads into."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
