"""Claims about `kernels/grouped.py`: its TPU kernels, run by Pallas's interpreter, are the products they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import model
from config import MeshConfig
from kernels import grouped
from sharding import FSDP, make_mesh


def by_visits(rows_AD, w_eDM, sizes_e, d_out_AM):
    """The product and its gradients, as on TPU."""
    pulled = grouped.pulled_by_visits(rows_AD, w_eDM, sizes_e, d_out_AM, interpret=True)
    return grouped.products(rows_AD, w_eDM, sizes_e, interpret=True), *pulled


def by_ragged_dot(rows_AD, w_eDM, sizes_e, d_out_AM):
    out, pull = jax.vjp(lambda rows, w: jax.lax.ragged_dot(rows, w, sizes_e), rows_AD, w_eDM)
    return out, *pull(d_out_AM)


def operands(rows, groups, D=5, M=7):
    rng = np.random.default_rng(rows)
    return (rng.normal(size=s).astype(np.float32) for s in ((rows, D), (groups, D, M), (rows, M)))


# Tiles have 128 rows here.
@pytest.mark.parametrize("rows, sizes_e", [
    (512, (100, 0, 300, 112)),  # two experts in a tile, three tiles of an expert, none
    (512, (128, 128, 0, 256)),  # bounds of tiles
    (300, (0, 0, 130, 7)),  # rows past the last group, and past the last tile; tiles no expert visits
    (256, (0, 0, 0)),
    (256, (256,)),
])  # fmt: skip
def test_products_by_visits_equal_ragged_dot(rows, sizes_e):
    """Catches a tile's rows given to a neighbour's expert or written over by it, an expert without rows whose gradient
    is what memory held before, and tiles left as memory held them (the interpreter fills it with NaN)."""
    rows_AD, w_eDM, d_out_AM = operands(rows, len(sizes_e))
    results = [way(rows_AD, w_eDM, jnp.array(sizes_e), d_out_AM) for way in (by_visits, by_ragged_dot)]
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)  # float32; sums of up to 300 numbers of size 1


def test_wide_weights_are_cut_into_blocks(monkeypatch):
    """Catches blocks of weights that meet the wrong columns."""
    monkeypatch.setattr(grouped, "block_width", lambda width, height, most: 128)
    rows_AD, w_eDM, d_out_AM = operands(256, 2, D=256, M=384)
    sizes_e = jnp.array([56, 200])
    results = [way(rows_AD, w_eDM, sizes_e, d_out_AM) for way in (by_visits, by_ragged_dot)]
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-3)  # float32; sums of 384 numbers of size 1


@pytest.mark.parametrize(
    "width, height, most, want", [(1536, 768, 2**21, 1536), (1536, 768, 2**20, 768), (900, 9, 10, 900)]
)
def test_a_block_of_weights_is_whole_lanes(width, height, most, want):
    """Catches a block that does not divide the weights, or does not fit where it could."""
    assert grouped.block_width(width, height, most) == want


def test_types_say_along_which_axes_the_kernels_vary():
    """Catches a kernel that check_vma refuses, and a gradient of replicated weights that is not summed. Types only:
    the interpreter does not run under check_vma."""
    rows_AD, w_eDM, _ = operands(4 * 128, 3)
    sizes_ne = jnp.array([[100, 0, 28], [128, 0, 0], [1, 100, 20], [0, 64, 64]])

    def total(w_eDM, rows_AD):
        local = lambda rows, w, sizes: jax.lax.psum(jnp.sum(grouped.grouped_matmul(rows, w, sizes[0])), FSDP)
        mesh, specs = make_mesh(MeshConfig(fsdp=4)), (P(FSDP), P(), P(FSDP))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(rows_AD, w_eDM, sizes_ne)

    assert jax.eval_shape(jax.grad(total), w_eDM, rows_AD).shape == w_eDM.shape


def test_only_own_rows_are_visited():
    """Catches work on rows of other devices' experts: visits are as many as own rows need, not as there are rows."""
    sizes_e = jnp.array([200, 0, 100])
    at, n_visits = grouped.visits(128 * 100, sizes_e, tile=128)
    assert int(n_visits) == 2 + 1 + 2
    assert at.expert_i[:5].tolist() == [0, 0, 1, 2, 2]
    assert at.tile_i[:5].tolist() == [0, 1, 1, 1, 2]


def test_a_backward_pass_keeps_the_operands_alone():
    """Catches tiles, or weights an expert's tile uses, that are kept between forward and backward pass."""
    rows_AD, w_eDM, _ = operands(256, 3)
    _, pull = jax.vjp(grouped.grouped_matmul, jnp.array(rows_AD), jnp.array(w_eDM), jnp.array([100, 0, 156]))
    assert sorted(x.shape for x in jax.tree.leaves(pull)) == [(3,), (3, 5, 7), (256, 5)]


@pytest.mark.parametrize("copies", [1, 2])
def test_the_way_back_of_a_permutation(copies):
    """Catches a permutation whose gradient takes the way there, or loses all copies of a row but one."""
    order, x = jnp.array([2, 0, 3, 1]), jnp.arange(8.0 / copies).reshape(-1, 2)
    there = lambda x: model.permuted(x, order, jnp.argsort(order), copies)
    out, pull = jax.vjp(there, x)
    want, want_pull = jax.vjp(lambda x: x[order // copies], x)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(pull(out)[0], want_pull(out)[0])
