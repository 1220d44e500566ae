"""Rotary embeddings (RoPE): rotate pairs of coordinates of queries and keys by angles.

Published models scale the frequencies to read longer texts than they were trained on (`model.rope_scaling`). A pair
that turns often in `original` positions keeps its frequency. A pair that turns rarely is slowed down by a factor, so
that it meets no angles that it has not seen in training. In between, the frequency is a mean of both.
Letters are those of `model.py`; r is a pair of coordinates.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from config import ModelConfig
from config.fields import RopeScaling, Window, parse_rope_scaling, parse_window

float32 = jnp.float32


def has_rotary(c: ModelConfig, number):
    """Return 1.0 if layer `number`, counted from 0, has rotary embeddings, else 0.0."""
    return jnp.float32((number + 1) % c.no_rope_every != 0) if c.no_rope_every else 1.0


def is_full(window: Window, number):
    """Return True if layer `number` attends to all positions, although other layers have a window."""
    return (number + 1) % window.full_every == 0


def rotary_frequencies(c: ModelConfig, number):
    """Return the angle per position of each coordinate pair in layer `number`, in radians: [r].

    A layer without rotary embeddings has the angles 0. Layers with a window may have another base (`model.window`).
    Source: RoFormer, arXiv:2104.09864, equation 15.
    """
    width = c.d_rope if c.attention == "mla" else c.rope_dims or c.d_head
    powers_r = -jnp.arange(0, width, 2, dtype=float32) / width
    freqs_r, window = c.rope_theta**powers_r, parse_window(c.window)
    if c.rope_scaling:
        factors_r = frequency_factors(width, c.rope_theta, parse_rope_scaling(c.rope_scaling))
        freqs_r *= factors_r.astype(float32)
    if window.theta:
        freqs_r = jnp.where(is_full(window, number), freqs_r, window.theta**powers_r)
    return freqs_r * has_rotary(c, number)


def rotary_angles(positions_bS, freqs_r):
    """Return the rotation angle of each coordinate pair at each position, in radians: [b, S] -> [b, S, r]."""
    return positions_bS[..., None].astype(float32) * freqs_r[None, None, :]


def rotate(x_bSHR, angles_bSr, scale=1.0):
    """Rotate each coordinate pair (i, i + r) by angle i, so that scores depend on relative positions, and
    multiply the pairs by `scale`. Coordinates from 2r on are unchanged."""
    turned_bSHR, rest = jnp.split(x_bSHR, (2 * angles_bSr.shape[-1],), axis=-1)
    cos_bS11r, sin_bS11r = (scaled(f(angles_bSr), scale)[:, :, None, None, :] for f in (jnp.cos, jnp.sin))
    turned_bSHR = turn(turned_bSHR, cos_bS11r, sin_bS11r)
    return jnp.concatenate([turned_bSHR, rest], axis=-1) if rest.size else turned_bSHR


def turned(x_bSHR, cos_bS11r, sin_bS11r):
    """Rotate all coordinates of x by angles, in float32. The sines and cosines may be scaled. The halves are
    swapped with `flip`: a TPU takes more passes to split and concatenate them."""
    pairs_bSH2r = x_bSHR.reshape(*x_bSHR.shape[:3], 2, -1)
    sin_bS12r = jnp.concatenate([-sin_bS11r, sin_bS11r], axis=3)
    swapped_bSH2r = jnp.flip(pairs_bSH2r, axis=3).astype(float32)
    return (pairs_bSH2r.astype(float32) * cos_bS11r + swapped_bSH2r * sin_bS12r).reshape(x_bSHR.shape)


# Autodiff would swap halves after it has multiplied them. On a TPU that takes one more pass over the array.
turn = jax.custom_vjp(lambda x, cos, sin: turned(x.astype(float32), cos, sin).astype(x.dtype))
turn.defvjp(
    lambda x, cos, sin: (turn(x, cos, sin), (cos, -sin)),
    lambda angles, dy: (turned(dy, *angles).astype(dy.dtype), None, None),
)


def frequency_factors(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return the factor of each pair's frequency: between 1 (unchanged) and 1 / scaling.factor.

    Source: `llama3` is the rule of Llama 3.1's published code; `yarn` is arXiv:2309.00071, equations 19-23.
    Its code rounds the numbers of the first and the last pair in between; gpt-oss (`yarn_exact`) does not.
    `linear` is arXiv:2306.15595.
    """
    if scaling.kind == "linear":
        return np.full(width // 2, 1 / scaling.factor)
    pair_r = np.arange(0, width, 2) / width
    turns_r = scaling.original * theta**-pair_r / (2 * math.pi)  # of each pair, in `original` positions
    if scaling.kind == "llama3":
        kept_r = np.clip((turns_r - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:  # linear in the number of the pair, between the pairs that turn `high` and `low` times
        log_of = lambda turns: math.log(scaling.original / (turns * 2 * math.pi))
        pair_of = lambda turns: width * log_of(turns) / (2 * math.log(theta))
        first, last = pair_of(scaling.high), pair_of(scaling.low)
        first, last = (math.floor(first), math.ceil(last)) if scaling.kind == "yarn" else (first, last)
        first, last = max(first, 0), min(last, width - 1)
        kept_r = 1 - np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    return kept_r + (1 - kept_r) / scaling.factor


def query_scales(c: ModelConfig) -> tuple[float, float]:
    """Return the factors of a query's content part and rotary part. YaRN increases scores, which makes
    attention over more positions as sharp as before; both factors are 1 without it. In latent attention
    `mscale_all` applies to all of a score, as in DeepSeek-V3; otherwise only the rotary part is scaled.

    Source: arXiv:2309.00071, equation 22, whose factor multiplies queries and keys; here queries have both.
    """
    scaling = parse_rope_scaling(c.rope_scaling)
    if not scaling or not scaling.kind.startswith("yarn"):
        return 1.0, 1.0
    growth = lambda share: 0.1 * share * math.log(scaling.factor) + 1
    shares = scaling.mscale, scaling.mscale_all
    rotary = growth(shares[0]) / growth(shares[1]) if all(shares) else growth(1)
    content = growth(scaling.mscale_all) ** 2 if c.attention == "mla" else 1.0
    return content, content * rotary**2


def scaled(x, factor: float):
    """Multiply x by a factor. With 1.0, the program has no multiplication."""
    return x if factor == 1 else factor * x
