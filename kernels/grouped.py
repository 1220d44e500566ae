"""Products that need another form on another platform, each behind one function.

Letters as in `model.py`: A rows (tokens assigned to experts), D and M widths, e this device's experts. A visit is a
tile of rows meeting an expert that has some of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sharding import vary

float32 = jnp.float32


def grouped_matmul(rows_AD, w_eDM, sizes_e):
    """Multiply consecutive groups of rows, group i by w[i]; rows past the last give 0. Shapes: [A, D] -> [A, M].

    `jax.lax.ragged_dot` is this too, but multiplies every row by every expert on CPUs, and on TPUs on the way back.
    """
    everywhere = set().union(*(jax.typeof(x).mat.varying for x in (rows_AD, w_eDM, sizes_e)))
    return _grouped_matmul(*vary((rows_AD, w_eDM, sizes_e), sorted(everywhere)))


# The gradient is written around the choice of a form: the backward pass keeps the operands and nothing that one form
# makes of them, so that a remat policy sees the weights, and may gather them again.
@jax.custom_vjp
def _grouped_matmul(rows_AD, w_eDM, sizes_e):
    return jax.lax.platform_dependent(rows_AD, w_eDM, sizes_e, tpu=products, default=grouped_matmul_in_tiles)


def _forward(rows_AD, w_eDM, sizes_e):
    return _grouped_matmul(rows_AD, w_eDM, sizes_e), (rows_AD, w_eDM, sizes_e)


def _backward(kept, d_out_AM):
    pulled = jax.lax.platform_dependent(*kept, d_out_AM, tpu=pulled_by_visits, default=pulled_in_tiles)
    return *pulled, None


_grouped_matmul.defvjp(_forward, _backward)


TILE = 256  # most rows of a tile of `grouped_matmul_in_tiles`


def grouped_matmul_in_tiles(rows_AD, w_eDM, sizes_e, tile: int = TILE):
    """Pad each group to whole tiles, so that a tile has one expert and all tiles go through one batched product."""
    (A, D), e = rows_AD.shape, len(w_eDM)
    tile = min(tile, -(-A // e))
    n_tiles = -(-A // tile) + e
    tiles_e = -(-sizes_e // tile)
    group_A = jnp.repeat(jnp.arange(e + 1), jnp.append(sizes_e, A - jnp.sum(sizes_e)), total_repeat_length=A)
    padding_e = (jnp.cumsum(tiles_e) - tiles_e) * tile - (jnp.cumsum(sizes_e) - sizes_e)
    # Rows past the last group are sent past the last tile, where writes are dropped and reads give 0.
    place_A = jnp.arange(A) + jnp.append(padding_e, n_tiles * tile)[group_A]
    source = jnp.full((n_tiles * tile,), A).at[place_A].set(jnp.arange(A), mode="drop", unique_indices=True)
    tiles = rows_AD.at[source].get(mode="fill", fill_value=0).reshape(n_tiles, tile, D)
    owner = jnp.repeat(jnp.arange(e), tiles_e, total_repeat_length=n_tiles)
    products = jnp.einsum("ixD,iDM->ixM", tiles, w_eDM[owner]).reshape(n_tiles * tile, -1)
    return products.at[place_A].get(mode="fill", fill_value=0)


def pulled_in_tiles(rows_AD, w_eDM, sizes_e, d_out_AM):
    """Gradients by the rows and by the weights."""
    _, pull = jax.vjp(lambda rows, w: grouped_matmul_in_tiles(rows, w, sizes_e), rows_AD, w_eDM)
    return pull(d_out_AM)


# On TPUs: a kernel that reads each expert's weights once, after megablocks, arXiv:2211.15841 --------------------------


def pulled_by_visits(rows_AD, w_eDM, sizes_e, d_out_AM, interpret=False):
    """Gradients by the rows and by the weights."""
    d_rows_AD = products(d_out_AM, w_eDM, sizes_e, transposed=True, interpret=interpret)
    return d_rows_AD, outer_products(rows_AD, d_out_AM, sizes_e, w_eDM.dtype, interpret=interpret)


class Visits(NamedTuple):
    """Which expert meets which tile, in order: an expert's visits follow each other, and so do a tile's."""

    start_e: jax.Array  # first row of each expert
    end_e: jax.Array  # row after its last
    expert_i: jax.Array
    tile_i: jax.Array


VMEM_BYTES = 12 * 2**20  # of the 16 MiB a kernel may use, for blocks; the compiler takes some for itself


def tile_rows(A: int, e: int) -> int:
    """Rows of a tile: many, so that a visit is worth its weights; few, as experts share tiles and each visits alone."""
    return next((tile for tile in (512, 256) if 4 * e * tile <= A), 128)


def visits(A: int, sizes_e, tile: int) -> tuple[Visits, jax.Array]:
    """List the visits, and count them: at most A/tile + e - 1. An expert without rows visits one tile in vain."""
    end_e = jnp.cumsum(sizes_e)
    start_e = end_e - sizes_e
    visits_e = jnp.maximum(-(-end_e // tile) - start_e // tile, 1)
    done_e = jnp.cumsum(visits_e)
    number_i = jnp.arange(A // tile + len(sizes_e) - 1)
    expert_i = jnp.minimum(jnp.sum(done_e[None, :] <= number_i[:, None], axis=1), len(sizes_e) - 1)
    tile_i = start_e[expert_i] // tile + number_i - (done_e - visits_e)[expert_i]
    return Visits(start_e, end_e, expert_i, jnp.minimum(tile_i, A // tile - 1)), done_e[-1]


def own_rows(at: Visits, i, shape):
    """True where a row of the tile belongs to the expert of visit i."""
    row = at.tile_i[i] * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= at.start_e[at.expert_i[i]]) & (row < at.end_e[at.expert_i[i]])


def block_width(width: int, height: int, most: int) -> int:
    """The widest part of `width` that is at most `most` if each of it costs `height`: whole lanes, or all of it."""
    fits = [n for n in range(128, width + 1, 128) if width % n == 0 and n * height <= most]
    return width if width * height <= most else max(fits, default=width)


def products(rows_AD, w_eDM, sizes_e, transposed=False, interpret=False):
    """Each row by its expert's weights, or by their transpose. Shapes: [A, D] -> [A, M].

    Blocks have d of the D numbers of a row and m of the M of a result. A visit whose expert is the last one's does not
    read its weights again, unless D is cut.
    """
    (A, D), (e, M) = rows_AD.shape, (len(w_eDM), w_eDM.shape[1 if transposed else 2])
    tile, width = tile_rows(A, e), rows_AD.dtype.itemsize
    d = block_width(D, tile, 2**21 // width)
    # Operands and result twice, as the next one is on its way, and the sum in float32.
    m = block_width(M, 2 * width * (d + tile) + 4 * tile, VMEM_BYTES - 2 * width * tile * d)
    rows_AD = jnp.pad(rows_AD, ((0, -A % tile), (0, 0)))
    at, n_visits = visits(len(rows_AD), sizes_e, tile)

    def kernel(start_e, end_e, expert_i, tile_i, rows, w, out, total):
        i, k, at = pl.program_id(1), pl.program_id(2), Visits(start_e, end_e, expert_i, tile_i)

        @pl.when(k == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        contracted = (((1,), (1 if transposed else 0,)), ((), ()))
        total[...] += jax.lax.dot_general(rows[...], w[...], contracted, preferred_element_type=float32)

        @pl.when(k == D // d - 1)
        def _():
            is_first = (i == 0) | (tile_i[jnp.maximum(i - 1, 0)] != tile_i[i])
            others = jnp.where(is_first, 0, out[...].astype(float32))
            out[...] = jnp.where(own_rows(at, i, total.shape), total[...], others).astype(out.dtype)

    if transposed:
        w_block = pl.BlockSpec((None, m, d), lambda j, i, k, start_e, end_e, expert_i, tile_i: (expert_i[i], j, k))
    else:
        w_block = pl.BlockSpec((None, d, m), lambda j, i, k, start_e, end_e, expert_i, tile_i: (expert_i[i], k, j))
    out_AM = _call(
        kernel, (M // m, n_visits, D // d), at,
        [pl.BlockSpec((tile, d), lambda j, i, k, start_e, end_e, expert_i, tile_i: (tile_i[i], k)), w_block],
        pl.BlockSpec((tile, m), lambda j, i, k, start_e, end_e, expert_i, tile_i: (tile_i[i], j)),
        jax.ShapeDtypeStruct((len(rows_AD), M), rows_AD.dtype), (rows_AD, w_eDM), interpret,
        flops=2 * len(at.tile_i) * tile * D * M, scratch=[pltpu.VMEM((tile, m), float32)],
    )  # fmt: skip
    # Tiles that no expert visits were not written.
    return jnp.where((jnp.arange(A) < at.end_e[-1])[:, None], out_AM[:A], 0)


def outer_products(rows_AD, d_out_AM, sizes_e, dtype, interpret=False):
    """The gradient of each expert's weights: the sum over its rows. Shapes: [A, D], [A, M] -> [e, D, M]."""
    (A, D), M, e = rows_AD.shape, d_out_AM.shape[1], len(sizes_e)
    tile, width = tile_rows(A, e), rows_AD.dtype.itemsize
    m = block_width(M, min(D, 1024), 2**21 // width)
    d = block_width(D, 2 * width * (tile + m) + 4 * m, VMEM_BYTES - 2 * width * tile * m)
    rows_AD, d_out_AM = (jnp.pad(x, ((0, -A % tile), (0, 0))) for x in (rows_AD, d_out_AM))
    at, n_visits = visits(len(rows_AD), sizes_e, tile)

    def kernel(start_e, end_e, expert_i, tile_i, rows, d_out, out, total):
        i, at = pl.program_id(2), Visits(start_e, end_e, expert_i, tile_i)

        @pl.when((i == 0) | (expert_i[jnp.maximum(i - 1, 0)] != expert_i[i]))
        def _():
            total[...] = jnp.zeros_like(total)

        own = jnp.where(own_rows(at, i, rows.shape), rows[...].astype(float32), 0).astype(rows.dtype)
        total[...] += jax.lax.dot_general(own, d_out[...], (((0,), (0,)), ((), ())), preferred_element_type=float32)
        is_last = i == pl.num_programs(2) - 1

        @pl.when(is_last | (expert_i[jnp.where(is_last, i, i + 1)] != expert_i[i]))
        def _():
            out[...] = total[...].astype(out.dtype)

    return _call(
        kernel, (D // d, M // m, n_visits), at,
        [pl.BlockSpec((tile, d), lambda k, j, i, start_e, end_e, expert_i, tile_i: (tile_i[i], k)),
         pl.BlockSpec((tile, m), lambda k, j, i, start_e, end_e, expert_i, tile_i: (tile_i[i], j))],
        pl.BlockSpec((None, d, m), lambda k, j, i, start_e, end_e, expert_i, tile_i: (expert_i[i], k, j)),
        jax.ShapeDtypeStruct((e, D, M), dtype), (rows_AD, d_out_AM), interpret,
        flops=2 * len(at.tile_i) * tile * D * M, scratch=[pltpu.VMEM((d, m), float32)],
    )  # fmt: skip


def _call(kernel, grid, at, in_specs, out_specs, out, operands, interpret, *, flops, scratch=()):
    size = lambda x: x.size * x.dtype.itemsize
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=jax.typeof(operands[0]).mat),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(at), grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        cost_estimate=pl.CostEstimate(flops, transcendentals=0, bytes_accessed=sum(map(size, (*operands, out)))),
        interpret=interpret,
    )(*at, *operands)
