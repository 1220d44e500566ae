"""A two-layer network on a mesh of two axes: the program of docs/plan_own_program.md."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def local_loss(weights, x):
    """Compute the loss on one device. Weights are sharded over model, and the batch over data."""
    w_up, w_down = weights
    hidden = jax.nn.relu(x @ w_up)
    partial = hidden @ w_down  # partial: summed over this device's hidden units only
    y = jax.lax.psum(partial, "model").astype(jnp.float32)
    return jax.lax.pmean(jnp.mean(y**2), "data")


splits = ((P(None, "model"), P("model", None)), P("data", None))
step = jax.value_and_grad(jax.shard_map(local_loss, in_specs=splits, out_specs=P()))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


arguments = ((shape(8192, 32768), shape(32768, 8192)), shape(16384, 8192))
