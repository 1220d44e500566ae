"""The TPU kernel of attention with any mask and with biases equals the plain implementation, which stores the scores.
It runs in Pallas's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels import masked
from plan.chips import hardware
from plan.trace.program import abstract_mesh, read

B, K, U = 2, 24, 16


def operands_of(s, S, h, g, has_bias, dtype="float32"):
    """Random operands of `masked_attention`: the mask hides 40% of the pairs, and all keys from query 3."""
    rng = np.random.default_rng(s)
    normal = lambda *size: jnp.asarray(rng.normal(size=size), dtype)
    seen_bsS = jnp.asarray(rng.random((B, s, S)) < 0.6).at[:, 3].set(False)
    bias = [jnp.asarray(rng.normal(size=(h, s, S)), jnp.float32)] if has_bias else []
    return normal(B, s, h, K), normal(B, S, g, K), normal(B, S, g, U), seen_bsS, *bias


@pytest.mark.parametrize("h, g, has_bias, dtype", [
    (4, 2, True, "float32"), (3, 3, True, "bfloat16"), (4, 2, False, "bfloat16"), (3, 1, False, "float32"),
])  # fmt: skip
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_kernel_equals_attention_that_stores_its_scores(h, g, has_bias, dtype, blocks, monkeypatch):
    """Catches a gradient of a key or value that misses a block of queries or a head of the group, a bias's gradient
    that misses a sequence, a sum that is not zeroed, padding that is seen, and a softmax over no key."""
    s, S = 140, 200
    monkeypatch.setattr(masked, "MOST_SCORES", 2**16 // blocks)
    assert masked.queries_per_block(s, S) == 256 // blocks
    q, k, v, seen, *bias = operands_of(s, S, h, g, has_bias, dtype)
    d_mixed = jnp.asarray(np.random.default_rng(0).normal(size=(B, s, h, U)), dtype)

    def with_gradients(attend):
        mixed, pull = jax.vjp(lambda q, k, v, *bias: attend(q, k, v, seen, *bias), q, k, v, *bias)
        return mixed, *pull(d_mixed)

    want = jax.jit(lambda: with_gradients(masked.store_scores))()
    got = jax.jit(lambda: with_gradients(lambda q, *more: masked.attend_to_all(True, q * K**-0.5, *more)))()
    # Of the largest entry: sums in another order, in bfloat16 with other roundings of the softmax weights.
    allowed = 1e-5 if dtype == "float32" else 2e-2
    for name, one, other in zip(("mixed", "dq", "dk", "dv", "d_bias"), got, want, strict=False):
        assert one.dtype == other.dtype, name
        one, other = np.float32(one), np.float32(other)
        np.testing.assert_allclose(one, other, rtol=0, atol=allowed * np.abs(other).max(), err_msg=name)
    assert not np.float32(got[0])[:, 3].any() and not np.float32(got[1])[:, 3].any()


@pytest.mark.parametrize("s, S, computed", [
    (512, 512, 512 * 512), (128, 512, 128 * 512), (200, 300, 256 * 384), (1024, 2048, 1024 * 2048),
    (1, 512, 0), (64, 512, 0), (65, 512, 128 * 512), (2048, 2049, 0),
])  # fmt: skip
def test_the_kernel_runs_where_it_fits(s, S, computed):
    """Catches a decoding step padded to 128 queries, 114 targets without the kernel, scores or keys that are too many
    for VMEM, and FLOPs that are not declared with padding."""
    shape = lambda *dims, dtype="bfloat16": jax.ShapeDtypeStruct((B, *dims), dtype)
    shapes = shape(s, 4, 128), shape(S, 2, 128), shape(S, 2, 128), shape(s, S, dtype="bool")
    assert masked.count_scores(s, S, 256) == computed
    assert masked.count_scores(s, S, 512) == computed * (S <= 1024)  # keys and values of 256 numbers each

    def forward_and_backward(q, k, v, seen):
        mixed, pull = jax.vjp(lambda q, k, v: masked.masked_attention(q, k, v, seen), q, k, v)
        return pull(mixed)

    on_mesh = jax.shard_map(forward_and_backward, in_specs=P(), out_specs=P())
    rows = read(on_mesh, *shapes, mesh=abstract_mesh(hardware.named_mesh({"data": 1}), "tpu")).rows
    kernels = [row.flops for row in rows if row.kind == "kernel"]
    assert kernels == ([2 * B * 4 * computed * 256, 2 * B * 4 * computed * 5 * 128] if computed else [])
