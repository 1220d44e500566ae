"""Reference attention that stores all scores; `kernels/attention.py`, which never does, is compared with it."""

import jax
import jax.numpy as jnp

from kernels.blocks import HIDDEN

float32 = jnp.float32


def attend(q_bshK, k_bSgK, v_bSgU, mask_bsS, cap=0.0):
    """Average values by the softmax of scaled scores. The output of a query that sees no key is 0.

    cap  of the scores: they become cap * tanh(score / cap); 0: no cap

    Each of the g key and value heads serves h / g consecutive query heads.
    Shapes: [b, s, h, K], [b, S, g, K], [b, S, g, U] -> [b, s, h, U].
    """
    (b, s, h, K), g = q_bshK.shape, k_bSgK.shape[2]
    q_bsgrK, mask_b11sS = (q_bshK * K**-0.5).reshape(b, s, g, h // g, K), mask_bsS[:, None, None]
    scores_bgrsS = jnp.einsum("bsgrK,bSgK->bgrsS", q_bsgrK, k_bSgK).astype(float32)
    scores_bgrsS = cap * jnp.tanh(scores_bgrsS / cap) if cap else scores_bgrsS
    weight_bgrsS = jnp.where(mask_b11sS, jax.nn.softmax(jnp.where(mask_b11sS, scores_bgrsS, HIDDEN)), 0)
    return jnp.einsum("bgrsS,bSgU->bsgrU", weight_bgrsS.astype(v_bSgU.dtype), v_bSgU).reshape(b, s, h, -1)
