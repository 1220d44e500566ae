"""What a layer saves for its backward pass; the rest is recomputed."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name as named

from config import ModelAtWork
from config.fields import parse_remat
from overlap.layers import Saving, Summed, apply_to_rows, is_row, save_in_buffers
from sharding import FSDP


def regather(primitive, *_, axis_name=(), **__):
    """Checkpoint policy that saves every value except gathered weights, and arrays concatenated from others."""
    return primitive.name != "concatenate" and not (primitive.name == "all_gather" and FSDP in axis_name)


policies = jax.checkpoint_policies
POLICIES = {
    "none": regather,
    "dots": policies.dots_with_no_batch_dims_saveable,
    "branches": policies.save_only_these_names("branch"),
    "full": None,  # only the layer's input
}


@functools.cache
def policy(remat: str):
    """Return the checkpoint policy for a value of `work.remat`.

    The names in a list are those that `named` gives to activations. What is offloaded is copied to the host after it is
    computed, and back before the backward pass uses it. A CPU has one memory, so it copies nothing.
    """
    listed = parse_remat(remat)
    if listed is None:
        return POLICIES[remat]
    device, host = ([name for name, on_host in listed.items() if on_host == where] for where in (False, True))
    if not host:
        return policies.save_only_these_names(*device)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=device, names_which_can_be_offloaded=host,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def remat(c: ModelAtWork, function):
    """Make the backward pass of a layer recompute what `work.remat` does not save, and gather weights again.

    function  fn(weights, x, ..) of a layer, whose input is x
    """
    one = lambda w, x, *rest: function(w, named(x, "input"), *rest)
    saving = jax.checkpoint(one, policy=policy(c.work.remat))

    def apply(w, x, *rest):
        if isinstance(x, Saving):
            return save_in_buffers(saving, w, x, *rest)
        if not isinstance(x, Summed):
            return saving(w, x, *rest)
        if is_row(jax.tree.leaves(w, is_leaf=is_row)[0]):
            return apply_to_rows(saving, w, x, *rest)
        y, more = saving(w, x.x, *rest)
        return Summed(y, x.totals), more

    return apply
