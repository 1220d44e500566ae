"""The experts' grouped matmul on GPUs: Triton programs that read the experts' weights without copying them.

Letters as in `kernels/grouped.py`: A rows, D and M widths, e experts; a block has x rows, d and m columns. Block sizes
are powers of two, and dims are padded with zeros to whole blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels.blocks import dot, expert_visits, pad_to_multiple, power_of_two

float32 = jnp.float32


def block_sizes(D: int, M: int, width: int) -> tuple[int, int, int]:
    """Return the rows, columns of D, and columns of M per block. With 2 bytes per number, (128 + 128) * 64 numbers are
    32 KiB. Double-buffered, they fit in the shared memory of an SM (99 KiB or more)."""
    x, d, m = (128, 64, 128) if width <= 2 else (64, 32, 64)
    return x, min(d, power_of_two(D)), min(m, power_of_two(M))


def expert_row_mask(start_e, end_e, expert, tile, x: int):
    """Return a mask of the rows of a tile that are assigned to the expert."""
    row_x = tile * x + jax.lax.broadcasted_iota(jnp.int32, (x,), 0)
    return (row_x >= start_e[expert]) & (row_x < end_e[expert])


def matmul_program(x: int, d: int, transposed: bool, start_e, end_e, expert_i, tile_i, visits_1, rows, w, out):
    """The matmul for one visit and one block of the result's columns."""
    visit = pl.program_id(0)
    expert, tile = expert_i[visit], tile_i[visit]

    @pl.when(visit < visits_1[0])
    def _():
        own = pl.ds(tile * x, x)

        def part(k, total_xm):
            of_d = pl.ds(k * d, d)
            block = w[expert, :, of_d] if transposed else w[expert, of_d, :]
            return total_xm + dot(rows[own, of_d], block, 1, 1 if transposed else 0)

        zeros = jnp.zeros((x, out.shape[1]), float32)
        total_xm = jax.lax.fori_loop(0, rows.shape[1] // d, part, zeros).astype(out.dtype)
        mine_x1 = expert_row_mask(start_e, end_e, expert, tile, x)[:, None]
        triton.store(out.at[own, :], total_xm, mask=jnp.broadcast_to(mine_x1, total_xm.shape))


def gpu_grouped_matmul(rows_AD, w_eDM, sizes_e, transposed=False, interpret=False):
    """Multiply each row by its expert's weights or, if `transposed`, their transpose. Shapes: [A, D] -> [A, M]."""
    (A, D), M = rows_AD.shape, w_eDM.shape[1 if transposed else 2]
    x, d, m = block_sizes(D, M, rows_AD.dtype.itemsize)
    rows = pad_to_multiple(pad_to_multiple(rows_AD, x, 0), d, 1)
    w = pad_to_multiple(
        pad_to_multiple(w_eDM, *((m, 1) if transposed else (d, 1))), *((d, 2) if transposed else (m, 2))
    )
    (at, visits), wide = expert_visits(len(rows), sizes_e, x), w.shape[1 if transposed else 2]
    tables = *at, visits[None]
    of_m = pl.BlockSpec((len(w), m, w.shape[2]), lambda i, j: (0, j, 0))
    if not transposed:
        of_m = pl.BlockSpec((len(w), w.shape[1], m), lambda i, j: (0, 0, j))
    out_AM = _run(
        functools.partial(matmul_program, x, d, transposed), (len(at.tile_i), wide // m), (*tables, rows, w),
        [*map(whole_array_spec, tables), whole_array_spec(rows), of_m],
        pl.BlockSpec((len(rows), m), lambda i, j: (0, j)), (len(rows), wide), rows.dtype, interpret,
    )  # fmt: skip
    # The programs do not write rows without an expert.
    return jnp.where((jnp.arange(A) < at.end_e[-1])[:, None], out_AM[:A, :M], 0)


def weight_grads_program(x: int, start_e, end_e, rows, d_out, out):
    """The gradient of one block of one expert's weights."""
    expert = pl.program_id(0)
    start, end = start_e[expert], end_e[expert]

    def part(tile, total_dm):
        own = pl.ds(tile * x, x)
        mine_x1 = expert_row_mask(start_e, end_e, expert, tile, x)[:, None]
        d_out_xm = jnp.where(mine_x1, d_out[own, :].astype(float32), 0).astype(d_out.dtype)
        return total_dm + dot(rows[own, :], d_out_xm, 0, 0)

    last = jnp.where(end > start, jax.lax.div(end + x - 1, x), 0)  # exclusive
    total_dm = jax.lax.fori_loop(jax.lax.div(start, x), last, part, jnp.zeros(out.shape, float32))
    out[...] = total_dm.astype(out.dtype)


def gpu_weight_grads(rows_AD, d_out_AM, sizes_e, dtype, interpret=False):
    """Return the gradient of each expert's weights, summed over its rows. Shapes: [A, D], [A, M] -> [e, D, M]."""
    D, M, e = rows_AD.shape[1], d_out_AM.shape[1], len(sizes_e)
    m, x, d = block_sizes(len(rows_AD), D, rows_AD.dtype.itemsize)  # the sum runs over rows
    m = min(m, power_of_two(M))
    rows, d_out = (
        pad_to_multiple(pad_to_multiple(rows_AD, x, 0), d, 1),
        pad_to_multiple(pad_to_multiple(d_out_AM, x, 0), m, 1),
    )
    end_e = jnp.cumsum(sizes_e)
    tables = end_e - sizes_e, end_e
    shape = e, rows.shape[1], d_out.shape[1]
    d_w_eDM = _run(
        functools.partial(weight_grads_program, x), (e, shape[1] // d, shape[2] // m), (*tables, rows, d_out),
        [*map(whole_array_spec, tables), pl.BlockSpec((len(rows), d), lambda e, i, j: (0, i)),
         pl.BlockSpec((len(rows), m), lambda e, i, j: (0, j))],
        pl.BlockSpec((None, d, m), lambda e, i, j: (e, i, j)), shape, dtype, interpret,
    )  # fmt: skip
    return d_w_eDM[:, :D, :M]


def gpu_grouped_matmul_grads(rows_AD, w_eDM, sizes_e, d_out_AM, interpret=False):
    """Return the gradients of the rows and of the weights on a GPU."""
    d_rows_AD = gpu_grouped_matmul(d_out_AM, w_eDM, sizes_e, transposed=True, interpret=interpret)
    return d_rows_AD, gpu_weight_grads(rows_AD, d_out_AM, sizes_e, w_eDM.dtype, interpret=interpret)


def whole_array_spec(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _run(kernel, grid, arrays, in_specs, out_specs, shape, dtype, interpret):
    out = jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(arrays[-1]).mat)
    warps = 8 if arrays[-1].dtype.itemsize <= 2 else 4
    return pl.pallas_call(
        kernel, out, grid=grid, in_specs=in_specs, out_specs=out_specs, interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
    )(*arrays)  # fmt: skip
