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
    steps = ocp.utils.checkpoint_steps(os.path.abspath(directory)) if os.path.isdir(directory) else ()
    return max(steps, default=None)


def save(manager: ocp.CheckpointManager, step: int, state, about: dict) -> None:
    """Start saving the arrays of `state`; returns once they are copied, the writing goes on in the background."""
    arrays = ocp.args.StandardSave(named(state))
    manager.save(step, args=ocp.args.Composite(state=arrays, about=ocp.args.JsonSave(about)))


def about(directory: str | os.PathLike, step: int) -> dict:
    """What the run that wrote a checkpoint was, as given to `save`."""
    with ocp.CheckpointManager(os.path.abspath(directory)) as manager:
        return manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about


def check_about(directory: str | os.PathLike, step: int, ours: dict) -> None:
    """Raises: UserError naming the first difference between what is running and what wrote the checkpoint."""
    if difference := first_difference(ours, about(directory, step)):
        raise UserError(f"checkpoint {directory}/{step} belongs to another run: {difference} (in the checkpoint)")


def restore(directory: str | os.PathLike, target, step: int | None = None, ours: dict | None = None):
    """Read a checkpoint into the shapes, dtypes and places of `target`, a tree of ShapeDtypeStruct with shardings.

    step   which one; None: the newest
    ours   what the caller is running; refused if the checkpoint was made by something else
    Raises: UserError naming the first difference from `ours`, or the missing checkpoint.
    """
    step = latest_step(directory) if step is None else step
    if step is None:
        raise UserError(f"no checkpoint in {directory}")
    if ours is not None:
        check_about(directory, step, ours)
    with ocp.CheckpointManager(os.path.abspath(directory)) as manager:
        arrays = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(named(target)))).state
    return map_named(lambda name, _: arrays[name], target)


def restore_params(directory: str | os.PathLike, shapes, step: int | None = None):
    """Read a checkpoint's parameters alone, into the shapes and places of `shapes`.

    Raises: UserError if there is no checkpoint.
    """
    step = latest_step(directory) if step is None else step
    if step is None:
        raise UserError(f"no checkpoint in {directory}")
    item = {f"params.{name}": shape for name, shape in named(shapes).items()}
    arguments = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    with ocp.CheckpointManager(os.path.abspath(directory)) as manager:
        arrays = manager.restore(step, args=ocp.args.Composite(state=arguments)).state
    return map_named(lambda name, _: arrays[f"params.{name}"], shapes)


def target(shapes, shardings):
    """Join shapes and shardings into what `restore` reads into."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
