"""The grouped matmul of a mixture of experts, with one implementation per platform.

Shape letters are those of `model.py`: A rows (each is a token assigned to an expert), D and M widths, e experts on this
device. A visit is a pair of a tile (a block of rows) and an expert to which some of these rows are assigned.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.blocks import Visits, expert_visits
from kernels.grouped_gpu import gpu_grouped_matmul, gpu_grouped_matmul_grads
from sharding import by_platform, vary

float32 = jnp.float32


def grouped_matmul(rows_AD, w_eDM, sizes_e, filled: int | None = None):
    """Multiply consecutive groups of rows, group i by w[i]. Rows after the last group give 0. Shapes: [A, D] -> [A, M].

    sizes_e  number of rows in each group
    filled   number of rows in all groups, as a rule, for the cost that TPU kernels declare; None: all rows
    `jax.lax.ragged_dot` multiplies every row by every expert's weights on CPUs (2.5 times our time forward, 7 times
    backward, in the preset laptop) and backward on TPUs (3.7 times our FLOPs on a v4): `python -m bench.grouped`.
    """
    everywhere = set().union(*(jax.typeof(x).mat.varying for x in (rows_AD, w_eDM, sizes_e)))
    return _grouped_matmul(*vary((rows_AD, w_eDM, sizes_e), sorted(everywhere)), filled)


# The custom gradient wraps the choice of implementation. It saves only the operands for the backward pass, so a remat
# policy can gather the weights again instead of saving them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(rows_AD, w_eDM, sizes_e, filled):
    tpu = functools.partial(tpu_grouped_matmul, filled=filled)
    forms = dict(tpu=tpu, gpu=gpu_grouped_matmul, default=grouped_matmul_in_tiles)
    return by_platform(rows_AD, w_eDM, sizes_e, **forms)


def _forward(rows_AD, w_eDM, sizes_e, filled):
    return _grouped_matmul(rows_AD, w_eDM, sizes_e, filled), (rows_AD, w_eDM, sizes_e)


def _backward(filled, residuals, d_out_AM):
    tpu = functools.partial(tpu_grouped_matmul_grads, filled=filled)
    forms = dict(tpu=tpu, gpu=gpu_grouped_matmul_grads, default=pulled_in_tiles)
    return *by_platform(*residuals, d_out_AM, **forms), None


_grouped_matmul.defvjp(_forward, _backward)


TILE = 256  # maximum rows per tile of `grouped_matmul_in_tiles`


def padded_tiles(A: int, e: int, tile: int = TILE) -> tuple[int, int]:
    """Return the rows per tile, and the maximum number of tiles, if the last tile of every expert has only one row."""
    tile = min(tile, -(-A // e))
    return tile, (A - e) // tile + e


def grouped_matmul_in_tiles(rows_AD, w_eDM, sizes_e, tile: int = TILE):
    """Grouped matmul in plain JAX: pad each group to whole tiles, then multiply all tiles in one batched matmul."""
    (A, D), e = rows_AD.shape, len(w_eDM)
    tile, n_tiles = padded_tiles(A, e, tile)
    tiles_e = -(-sizes_e // tile)
    group_A = jnp.repeat(jnp.arange(e + 1), jnp.append(sizes_e, A - jnp.sum(sizes_e)), total_repeat_length=A)
    padding_e = (jnp.cumsum(tiles_e) - tiles_e) * tile - (jnp.cumsum(sizes_e) - sizes_e)
    # Rows after the last group get an index after the last tile, where writes are dropped and reads give 0.
    place_A = jnp.arange(A) + jnp.append(padding_e, n_tiles * tile)[group_A]
    source = jnp.full((n_tiles * tile,), A).at[place_A].set(jnp.arange(A), mode="drop", unique_indices=True)
    tiles = rows_AD.at[source].get(mode="fill", fill_value=0).reshape(n_tiles, tile, D)
    owner = jnp.repeat(jnp.arange(e), tiles_e, total_repeat_length=n_tiles)
    products = jnp.einsum("ixD,iDM->ixM", tiles, w_eDM[owner]).reshape(n_tiles * tile, -1)
    return products.at[place_A].get(mode="fill", fill_value=0)


def pulled_in_tiles(rows_AD, w_eDM, sizes_e, d_out_AM):
    """Return the gradients of the rows and of the weights in plain JAX."""
    _, pull = jax.vjp(lambda rows, w: grouped_matmul_in_tiles(rows, w, sizes_e), rows_AD, w_eDM)
    return pull(d_out_AM)


# TPU: kernels that read each expert's weights once, based on MegaBlocks, arXiv:2211.15841 -----------------------------


def tpu_grouped_matmul_grads(rows_AD, w_eDM, sizes_e, d_out_AM, interpret=False, filled=None):
    """Return the gradients of the rows and of the weights on a TPU."""
    d_rows_AD = tpu_grouped_matmul(d_out_AM, w_eDM, sizes_e, transposed=True, interpret=interpret, filled=filled)
    return d_rows_AD, tpu_weight_grads(rows_AD, d_out_AM, sizes_e, w_eDM.dtype, interpret=interpret, filled=filled)


VMEM_BYTES = 12 * 2**20  # for blocks, out of the 16 MiB of VMEM that a kernel may use; the compiler needs some
TILES = (1024, 512)  # rows per tile: many, to amortize reading a visit's weights
PART = 128  # rows per part of a tile, the height of the matrix unit; a visit computes only parts with its expert's rows


def rows_multiplied(A: int, e: int) -> int:
    """Return the maximum number of rows that are multiplied: a part with rows of two experts counts twice."""
    return (-(-A // PART) + e - 1) * PART


def expert_row_mask(at: Visits, i, tile: int, part, shape):
    """Return a mask that is True for the rows of this part of the tile that are assigned to the expert of visit i."""
    row = at.tile_i[i] * tile + part.start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= at.start_e[at.expert_i[i]]) & (row < at.end_e[at.expert_i[i]])


def for_each_expert_part(at: Visits, i, tile: int, multiply):
    """Call `multiply` on each part of the tile that has rows of the expert of visit i, or once on the whole tile if all
    parts have such rows."""
    begin, expert = at.tile_i[i] * tile, at.expert_i[i]
    first = jnp.maximum(at.start_e[expert] - begin, 0) // PART
    last = jnp.minimum(at.end_e[expert] - begin + PART - 1, tile) // PART  # exclusive
    is_whole = last - first == tile // PART

    @pl.when(is_whole)
    def _():
        multiply(pl.ds(0, tile))

    @pl.when(~is_whole & (at.end_e[expert] > at.start_e[expert]))
    def _():
        jax.lax.fori_loop(first, last, lambda n, _: multiply(pl.ds(n * PART, PART)), None)


class Blocks(NamedTuple):
    tile: int
    d: int  # columns of the input rows per block
    m: int  # columns of the result per block


def block_widths(width: int) -> list[int]:
    """List the possible block widths of a dim, widest first: the whole dim, and divisors that are multiples of 128."""
    return [width] + [n for n in range((width - 1) // 128 * 128, 0, -128) if width % n == 0]


def cheapest_blocks(A: int, D: int, M: int, vmem_bytes, hbm_bytes) -> Blocks:
    """Return the block sizes that fit in VMEM with the fewest bytes read and written by the busier core of a chip. A v4
    or v5p chip has two cores, and the blocks of M are divided between them."""
    tiles = [min(tile, -(-A // PART) * PART) for tile in TILES]
    every = [Blocks(*sizes) for sizes in itertools.product(tiles, block_widths(D), block_widths(M))]
    fit = [one for one in every if vmem_bytes(*one) <= VMEM_BYTES] or [min(every, key=lambda one: vmem_bytes(*one))]
    return min(fit, key=lambda one: hbm_bytes(*one) * one.m * -(-M // one.m // 2))


def matmul_hbm_bytes(A: int, D: int, M: int, e: int, width: int, tile: int, d: int, m: int) -> int:
    """Return the maximum bytes that the matmul kernel reads and writes. If D is split into blocks, each visit reads its
    rows and weights again."""
    n_tiles = -(-A // tile)
    n_visits = n_tiles + e - 1
    n_rows, n_weights = (n_tiles, e) if d == D else (n_visits, n_visits)
    return width * (n_rows * tile * D * (M // m) + n_weights * D * M + n_tiles * tile * M)


def weight_grads_hbm_bytes(A, D, M, e, width, out_width, tile, d, m) -> int:
    rows = -(-A // tile) * tile
    return width * rows * (D * (M // m) + M * (D // d)) + out_width * e * D * M


def tpu_grouped_matmul(rows_AD, w_eDM, sizes_e, transposed=False, interpret=False, filled=None):
    """Multiply each row by its expert's weights or, if `transposed`, their transpose. Shapes: [A, D] -> [A, M]."""
    (A, D), (e, M) = rows_AD.shape, (len(w_eDM), w_eDM.shape[1 if transposed else 2])
    width, filled = rows_AD.dtype.itemsize, filled or A
    hbm_bytes = functools.partial(matmul_hbm_bytes, filled, D, M, e, width)
    # Operands and result are double-buffered; the sum is float32.
    vmem_bytes = lambda tile, d, m: 2 * width * (tile * d + d * m + tile * m) + 4 * tile * m
    tile, d, m = blocks = cheapest_blocks(A, D, M, vmem_bytes, hbm_bytes)
    rows_AD = jnp.pad(rows_AD, ((0, -A % tile), (0, 0)))
    at, n_visits = expert_visits(len(rows_AD), sizes_e, tile)

    def kernel(start_e, end_e, expert_i, tile_i, rows, w, out, total):
        i, k, at = pl.program_id(1), pl.program_id(2), Visits(start_e, end_e, expert_i, tile_i)

        def multiply(part):
            contracted = (((1,), (1 if transposed else 0,)), ((), ()))
            product = jax.lax.dot_general(rows[part], w[...], contracted, preferred_element_type=float32)
            total[part] = product + jnp.where(k == 0, 0, total[part])

            @pl.when(k == D // d - 1)
            def _():
                mine = expert_row_mask(at, i, tile, part, (part.size, m))
                out[part] = jnp.where(mine, total[part], out[part].astype(float32)).astype(out.dtype)

        for_each_expert_part(at, i, tile, multiply)

    if transposed:
        w_block = pl.BlockSpec((None, m, d), lambda j, i, k, start_e, end_e, expert_i, tile_i: (expert_i[i], j, k))
    else:
        w_block = pl.BlockSpec((None, d, m), lambda j, i, k, start_e, end_e, expert_i, tile_i: (expert_i[i], k, j))
    out_AM = _call(
        kernel, (M // m, n_visits, D // d), at,
        [pl.BlockSpec((tile, d), lambda j, i, k, start_e, end_e, expert_i, tile_i: (tile_i[i], k)), w_block],
        pl.BlockSpec((tile, m), lambda j, i, k, start_e, end_e, expert_i, tile_i: (tile_i[i], j)),
        jax.ShapeDtypeStruct((len(rows_AD), M), rows_AD.dtype), (rows_AD, w_eDM), interpret,
        flops=2 * rows_multiplied(filled, e) * D * M, hbm_bytes=hbm_bytes(*blocks),
        scratch=pltpu.VMEM((tile, m), float32),
    )  # fmt: skip
    # The kernel does not write rows without an expert.
    return jnp.where((jnp.arange(A) < at.end_e[-1])[:, None], out_AM[:A], 0)


def tpu_weight_grads(rows_AD, d_out_AM, sizes_e, dtype, interpret=False, filled=None):
    """Return the gradient of each expert's weights, summed over its rows. Shapes: [A, D], [A, M] -> [e, D, M]."""
    (A, D), M, e = rows_AD.shape, d_out_AM.shape[1], len(sizes_e)
    width, out_width, filled = rows_AD.dtype.itemsize, jnp.dtype(dtype).itemsize, filled or A
    hbm_bytes = functools.partial(weight_grads_hbm_bytes, filled, D, M, e, width, out_width)
    # Besides double buffers and sum, the compiler spills the masked operand in float32.
    vmem_bytes = lambda tile, d, m: (2 * width * (d + m) + 4 * min(d, m)) * tile + (2 * out_width + 4) * d * m
    tile, d, m = blocks = cheapest_blocks(A, D, M, vmem_bytes, hbm_bytes)
    rows_AD, d_out_AM = (jnp.pad(x, ((0, -A % tile), (0, 0))) for x in (rows_AD, d_out_AM))
    at, n_visits = expert_visits(len(rows_AD), sizes_e, tile)

    def kernel(start_e, end_e, expert_i, tile_i, rows, d_out, out, total):
        i, at = pl.program_id(2), Visits(start_e, end_e, expert_i, tile_i)

        @pl.when((i == 0) | (expert_i[jnp.maximum(i - 1, 0)] != expert_i[i]))
        def _():
            total[...] = jnp.zeros_like(total)

        def multiply(part):
            def own(x):
                mine = expert_row_mask(at, i, tile, part, (part.size, x.shape[1]))
                return jnp.where(mine, x[part].astype(float32), 0).astype(x.dtype)

            operands = (own(rows), d_out[part]) if d < m else (rows[part], own(d_out))  # mask the narrower operand
            contracted = (((0,), (0,)), ((), ()))
            total[...] += jax.lax.dot_general(*operands, contracted, preferred_element_type=float32)

        for_each_expert_part(at, i, tile, multiply)
        is_last = i == pl.num_programs(2) - 1

        @pl.when(is_last | (expert_i[jnp.where(is_last, i, i + 1)] != expert_i[i]))
        def _():
            out[...] = total[...].astype(out.dtype)

    return _call(
        kernel, (M // m, D // d, n_visits), at,
        [pl.BlockSpec((tile, d), lambda j, k, i, start_e, end_e, expert_i, tile_i: (tile_i[i], k)),
         pl.BlockSpec((tile, m), lambda j, k, i, start_e, end_e, expert_i, tile_i: (tile_i[i], j))],
        pl.BlockSpec((None, d, m), lambda j, k, i, start_e, end_e, expert_i, tile_i: (expert_i[i], k, j)),
        jax.ShapeDtypeStruct((e, D, M), dtype), (rows_AD, d_out_AM), interpret,
        flops=2 * rows_multiplied(filled, e) * D * M, hbm_bytes=hbm_bytes(*blocks),
        scratch=pltpu.VMEM((d, m), float32),
    )  # fmt: skip


def _call(kernel, grid, at, in_specs, out_specs, out, operands, interpret, *, flops, hbm_bytes, scratch):
    return pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=jax.typeof(operands[0]).mat),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(at), grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=[scratch]
        ),
        # "parallel": the blocks of M are divided between the cores of a chip.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops, transcendentals=0, bytes_accessed=hbm_bytes),
        interpret=interpret,
    )(*at, *operands)
