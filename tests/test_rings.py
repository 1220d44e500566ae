"""Exchanges in parts are the whole ones: what TENSOR neighbours send around, and what comes back.

Numbers are small whole ones, so sums are exact in any order, and results are equal or wrong.
"""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sharding
from compile import ledger, ordered
from overlap import positions, rings
from sharding import AXES, TENSOR

X, Y, Z = 2, 3, 5  # dims of a device's slice
AROUND = [1, 2, 3, 4, 8]  # devices on a ring
# In a branch, as layers are where there are stages, simulated devices exchange in another form.
RINGS = [*(f"tensor={n}" for n in AROUND), "data=2,tensor=3", "stage=2,tensor=3", "stage=2,tensor=4"]


def whole_numbers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def on_each(function, mesh: str):
    """Compile `function` of each device's arrays, with arrays and results stacked along a leading dim of devices."""
    mesh = sharding.make_mesh(mesh)
    local = lambda *xs: jax.tree.map(lambda y: y[None], function(*(x[0] for x in xs)))
    split = P(AXES)
    return ordered.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split), mesh)


def with_gradient(function):
    """Return fn(x, d) -> function(x), and the gradient of x for the gradient d of the result."""

    def both(x, d):
        out, pull = jax.vjp(function, x)
        return out, pull(d)[0]

    return both


def neighbours(mesh: str) -> np.ndarray:
    """Return the device ids in rows along TENSOR, the last axis."""
    sizes = sharding.make_mesh(mesh).shape
    return np.arange(math.prod(sizes.values())).reshape(-1, sizes[TENSOR])


def sent(function, mesh: str, *shapes):
    """Return (kind, bytes) of each collective of a compiled program, and the device pairs of each permute."""
    on = sharding.make_mesh(mesh)
    arrays = [np.zeros((on.size, *shape), np.float32) for shape in shapes]
    text = on_each(function, mesh).lower(*arrays).compile().as_text()
    found = ledger.read(text, on).collectives
    assert all(one.count == 1 for one in found)
    pairs = re.findall(r" collective-permute\(.*source_target_pairs=\{(.*?)\}\}", text)
    pairs = [[tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", one)] for one in pairs]
    return [(one.kind, one.wire_bytes) for one in found], pairs


# Around and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", RINGS)
def test_entry_k_is_from_the_device_k_places_further(mesh):
    """Catches entries in the order of arrival, in the other direction, or from another group of devices; and a gradient
    that goes to the wrong device, or is summed on the wrong device."""
    along = neighbours(mesh)
    n = along.shape[1]
    x, d = whole_numbers(along.size, X, Y), whole_numbers(along.size, n, X, Y, seed=1)
    both = with_gradient(lambda x: jnp.stack(rings.ring_all_gather(x, TENSOR)))
    entries, dx = map(np.asarray, on_each(both, mesh)(x, d))
    for group in along:
        for place, device in enumerate(group):
            on = np.roll(group, -place)  # from this device on
            np.testing.assert_array_equal(entries[device], x[on])
            np.testing.assert_array_equal(dx[on[0]], sum(d[other, -k % n] for k, other in enumerate(on)))


@pytest.mark.parametrize("mesh", RINGS)
def test_ring_all_gather_equals_all_gather(mesh):
    """Catches chunks that are concatenated in the order of arrival or along another dim, and wrong gradients."""
    n = neighbours(mesh).shape[1]

    def compared(x, d):
        joined = lambda x: rings.concatenate_in_order(rings.ring_all_gather(x, TENSOR), TENSOR, 1)
        whole = lambda x: sharding.all_gather(x, TENSOR, dim=1)
        return [with_gradient(f)(x, d) for f in (joined, whole)]

    size = sharding.make_mesh(mesh).size
    got, want = on_each(compared, mesh)(whole_numbers(size, X, Y, Z), whole_numbers(size, X, n * Y, Z, seed=1))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got[0].shape == (size, X, n * Y, Z)


@pytest.mark.parametrize("mesh", RINGS)
def test_ring_reduce_scatter_equals_reduce_scatter(mesh):
    """Catches a sum that misses a device, counts one twice, or belongs to another device, and wrong gradients."""
    n = neighbours(mesh).shape[1]

    def compared(partial, d):
        parts = lambda partial: rings.ring_reduce_scatter(rings.split_by_device(partial, TENSOR, 1), TENSOR)
        whole = lambda partial: sharding.reduce_scatter(partial, TENSOR, dim=1)
        return [with_gradient(f)(partial, d) for f in (parts, whole)]

    size = sharding.make_mesh(mesh).size
    got, want = on_each(compared, mesh)(whole_numbers(size, X, n * Y, Z), whole_numbers(size, X, Y, Z, seed=1))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("n", AROUND[1:])
@pytest.mark.parametrize("way", ["ring_all_gather", "ring_reduce_scatter"])
def test_a_ring_sends_slices_both_ways(way, n):
    """Catches a whole array sent instead of a slice, one extra transfer, and a link that is used in only one direction,
    also in the backward pass."""
    function, arrived = {
        "ring_all_gather": (lambda x: jnp.stack(rings.ring_all_gather(x, TENSOR)), (X, Y)),
        "ring_reduce_scatter": (lambda parts: rings.ring_reduce_scatter([*parts], TENSOR), (n, X, Y)),
    }[way]
    left = (n, X, Y) if way == "ring_all_gather" else (X, Y)
    backward = lambda x, d: jax.vjp(function, x)[1](d)[0]
    for found, pairs in (sent(function, f"tensor={n}", arrived), sent(backward, f"tensor={n}", arrived, left)):
        assert found == [("collective-permute", 4 * X * Y)] * (n - 1)
        by = [{(target - source) % n for source, target in one} for one in pairs]
        assert sorted(by.count({one_way}) for one_way in {1, n - 1}) == ([1] if n == 2 else [(n - 1) // 2, n // 2])


def test_no_chunk_waits_for_all_others():
    """Catches a ring in only one direction, in which the last chunk takes n - 1 hops instead of half as many."""
    mesh = sharding.make_mesh("tensor=8")
    local = lambda x: jnp.stack(rings.ring_all_gather(x, TENSOR))
    traced = jax.make_jaxpr(jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(None, AXES)))(
        np.zeros((8, 3))
    )
    (body,) = (equation.params["jaxpr"] for equation in traced.eqns)
    hops = collections.Counter()  # of each value, how many permutes it has come by
    for equation in body.eqns:
        before = max((hops[x] for x in equation.invars if not hasattr(x, "val")), default=0)
        hops.update(dict.fromkeys(equation.outvars, before + (equation.primitive.name == "ppermute")))
    assert max(hops.values()) == 4


def products_before(traced) -> dict[int, set[int]]:
    """Return, for each matmul by the rows of its result, the rows of the matmuls that it waits for."""
    found, waits = {}, collections.defaultdict(set)
    for equation in traced.eqns:
        before = set().union(*(waits[x] for x in equation.invars if not hasattr(x, "val")))
        if equation.primitive.name == "dot_general":
            rows = equation.outvars[0].aval.shape[0]
            found[rows] = before
            before = before | {rows}
        waits.update(dict.fromkeys(equation.outvars, before))
    return found


def test_the_local_chunk_is_computed_while_others_are_in_flight():
    """Catches matmuls whose order is left to the compiler, chunks that are not computed nearest first, and gradients
    not in reverse order, so that the local one would precede those that must be sent."""
    order, rows = [1, 2, 4, 3], (1, 2, 3, 4)  # part k has k + 1 rows, and part 3 is as near as part 1
    w_XY, parts, gradients = np.ones((X, Y)), [np.ones((n, X)) for n in rows], [np.ones((n, Y)) for n in rows]
    run = lambda parts: positions.apply_nearest_first(lambda part: part @ w_XY, parts)
    back = lambda parts, d: jax.vjp(run, parts)[1](d)[0]
    for way, traced in ((order, jax.make_jaxpr(run)(parts)), (order[::-1], jax.make_jaxpr(back)(parts, gradients))):
        # Of one number of rows the last product counts: that of the way back.
        assert products_before(traced) == {n: set(way[:number]) for number, n in enumerate(way)}
    # No gradient is fused with the sum that it goes into: the loop's last program is that of the way back.
    last = lambda one: last(one.params["call_jaxpr"].eqns[-1]) if "call_jaxpr" in one.params else one.primitive.name
    made_by = {result: last(equation) for equation in traced.eqns for result in equation.outvars}
    assert {made_by[result] for result in traced.jaxpr.outvars} == {"optimization_barrier"}
