"""Rotary embeddings: the angles by which pairs of coordinates of queries and keys are rotated (RoPE, arXiv:2104.09864).

Published models scale the frequencies to read longer texts than they were trained on (`model.rope_scaling`). A pair
that turns often in `original` positions keeps its frequency. A pair that turns rarely is slowed down by a factor, so
that it meets no angles that it has not seen in training. In between, the frequency is a mean of both.
"""

import math

import jax.numpy as jnp
import numpy as np

from config import ModelConfig
from config.fields import RopeScaling, parse_rope_scaling

float32 = jnp.float32


def rotary_angles(positions_bS, width: int, theta: float, on, scaling: str = ""):
    """Return the rotation angle of each coordinate pair at each position, in radians.

    on       1.0, or 0.0 in a layer without rotary embeddings, which makes all angles 0
    scaling  `model.rope_scaling`
    Shapes: [b, S] -> [b, S, width / 2]. Source: RoFormer, arXiv:2104.09864, equation 15.
    """
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=float32) / width)
    if scaling:
        frequency *= frequency_factors(width, theta, parse_rope_scaling(scaling)).astype(float32)
    return positions_bS[..., None].astype(float32) * frequency[None, None, :] * on


def rotate(x_bSHR, angles_bSr, scale=1.0):
    """Rotate each coordinate pair (i, i + r) by angle i, so that scores depend on relative positions, and multiply the
    pairs by `scale`. Coordinates from 2r on are unchanged."""
    cos, sin, r = jnp.cos(angles_bSr)[:, :, None, :], jnp.sin(angles_bSr)[:, :, None, :], angles_bSr.shape[-1]
    cos, sin = scaled(cos, scale), scaled(sin, scale)
    first, second, rest = jnp.split(x_bSHR.astype(float32), (r, 2 * r), axis=-1)
    rotated = first * cos - second * sin, first * sin + second * cos, rest
    return jnp.concatenate(rotated, axis=-1).astype(x_bSHR.dtype)


def frequency_factors(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return the factor of each pair's frequency: between 1 (unchanged) and 1 / scaling.factor.

    Source: `llama3` is the rule of Llama 3.1's published code; `yarn` is arXiv:2309.00071, equations 19 to 23.
    """
    pair_r = np.arange(0, width, 2) / width
    turns_r = scaling.original * theta**-pair_r / (2 * math.pi)  # of each pair, in `original` positions
    if scaling.kind == "llama3":
        kept_r = np.clip((turns_r - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:  # linear in the number of the pair, between the pairs that turn `high` and `low` times
        pair_of = lambda turns: width * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        first, last = max(math.floor(pair_of(scaling.high)), 0), min(math.ceil(pair_of(scaling.low)), width - 1)
        kept_r = 1 - np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    return kept_r + (1 - kept_r) / scaling.factor


def query_scales(c: ModelConfig) -> tuple[float, float]:
    """Return the factors of a query's content part and rotary part. YaRN increases scores, which makes attention over
    more positions as sharp as before; both factors are 1 without it. In latent attention `mscale_all` applies to all
    of a score, as in DeepSeek-V3; otherwise only the rotary part is scaled.

    Source: arXiv:2309.00071, equation 22, whose factor multiplies queries and keys; here the queries have both.
    """
    scaling = parse_rope_scaling(c.rope_scaling)
    if not scaling or scaling.kind != "yarn":
        return 1.0, 1.0
    growth = lambda share: 0.1 * share * math.log(scaling.factor) + 1
    shares = scaling.mscale, scaling.mscale_all
    rotary = growth(shares[0]) / growth(shares[1]) if all(shares) else growth(1)
    content = growth(scaling.mscale_all) ** 2 if c.attention == "mla" else 1.0
    return content, content * rotary**2


def scaled(x, factor: float):
    """Multiply x by a factor. With 1.0, the program has no multiplication."""
    return x if factor == 1 else factor * x
