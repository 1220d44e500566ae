"""Products that need another form on another platform, each behind one function.

Letters as in `model.py`: A rows (tokens assigned to experts), D and M widths, e this device's experts.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(rows_AD, w_eDM, sizes_e):
    """Multiply consecutive groups of rows, group i by w[i]; rows past the last give 0. Shapes: [A, D] -> [A, M]."""
    return jax.lax.platform_dependent(
        rows_AD, w_eDM, sizes_e, cpu=grouped_matmul_in_tiles, default=lambda x, w, n: jax.lax.ragged_dot(x, w, n)
    )


def grouped_matmul_in_tiles(rows_AD, w_eDM, sizes_e, tile: int = 256):
    """`jax.lax.ragged_dot` for CPUs, where it multiplies every row by every expert.

    Each group is padded to whole tiles, so that a tile has one expert and all tiles go through one batched product.
    """
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
