"""What a layer keeps for its backward pass, and what that makes again."""

import functools

import jax

from config import ModelAtWork
from sharding import FSDP


def regather(primitive, *_, axis_name=(), **__):
    """Keep every value for the backward pass but gathered weights."""
    return not (primitive.name == "all_gather" and FSDP in axis_name)


BETWEEN = "between branches"  # the name of what "branches" keeps: the stream after attention
REMAT = {
    "none": functools.partial(jax.checkpoint, policy=regather),
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "branches": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(BETWEEN)),
    "full": jax.checkpoint,
}


def remat(c: ModelAtWork, function):
    """The same function, whose backward pass makes again what is not kept: slices of weights are joined again, too."""
    return REMAT[c.work.remat](function)
