"""What a layer saves for its backward pass; the rest is recomputed."""

import functools

import jax

from config import ModelAtWork
from sharding import FSDP


def regather(primitive, *_, axis_name=(), **__):
    """Checkpoint policy that saves every value except gathered weights."""
    return not (primitive.name == "all_gather" and FSDP in axis_name)


BETWEEN = "between branches"  # names the activation that "branches" saves: the residual stream after attention
REMAT = {
    "none": functools.partial(jax.checkpoint, policy=regather),
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "branches": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(BETWEEN)),
    "full": jax.checkpoint,
}


def remat(c: ModelAtWork, function):
    """Make the function's backward pass recompute what `work.remat` does not save, and gather weights again."""
    return REMAT[c.work.remat](function)
