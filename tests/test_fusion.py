"""Test what the compiler computes once instead of inside each matmul that reads it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import sharding
from config import MeshConfig, ModelConfig
from model import FeedForward, feed_forward
from plan.trace import compiled

N, D, F = 1024, 512, 1536


def pull_layer(activation):
    """Return a function that recomputes a feed-forward layer and returns the gradients of its weights and input."""
    c = ModelConfig(activation=activation, d_model=D, d_ff=F)

    def layer(x_ND, w_up_DF, w_gate_DF, w_down_FD):
        w = FeedForward(w_gate_DF if activation == "swiglu" else None, w_up_DF, None, w_down_FD, None)
        return feed_forward(w, c, x_ND)

    return lambda d_ND, *operands: jax.vjp(jax.checkpoint(layer), *operands)[1](d_ND)


SHAPES = ((N, D), (N, D), (D, F), (D, F), (F, D))


# Two in the forward pass, two when it is repeated, and two around the gradients
@pytest.mark.parametrize("activation, barriers", [("swiglu", 6), ("gelu", 0)])
def test_only_gated_units_are_kept_out_of_matmuls(activation, barriers):
    """Catches a barrier that the backward pass lacks, and one around GELU, which would cost as much as it saves."""
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in SHAPES]
    function = jax.shard_map(pull_layer(activation), mesh=sharding.make_mesh("data=1"), in_specs=P(), out_specs=P())
    assert str(jax.make_jaxpr(function)(*arrays)).count("optimization_barrier") == barriers


@pytest.mark.tpu
def test_a_gated_unit_is_computed_once():
    """Catches a gated unit that the compiler computes in each of the five matmuls that read it or its derivative."""
    mesh = compiled.topology_mesh(MeshConfig(data=4), "v5e:2x2")
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for s in SHAPES]
    function = jax.shard_map(pull_layer("swiglu"), mesh=mesh, in_specs=P(), out_specs=P())
    text = jax.jit(function).lower(*arrays).compile().as_text()
    assert text.count(" exponential(") == 1
