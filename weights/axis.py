"""Models that no class of transformers has: written beside the code that loads them, `custom/`.

    transformers.AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

Every model of `model.py` can be written so. The code is PyTorch's, and what it computes is compared with ours.
"""

import dataclasses
from pathlib import Path

from config import ModelConfig
from weights.families import (
    DEEPSEEK_MOE,
    GROUPED_ATTENTION,
    LATENT_ATTENTION,
    NORMS,
    OUTSIDE,
    SWIGLU,
    Family,
    Setting,
    register,
)

# What decides the function; config.json has these names too.
SETTINGS = (
    "vocab_size d_model n_layers n_heads attention n_kv_heads d_head d_rope d_value d_query_latent d_kv_latent "
    "rope_theta no_rope_every d_ff activation n_experts n_shared d_expert moe_every dense_prefix router "
    "normalize_gates routed_scaling balance_rate norm_eps"
).split()
RENAMED = {"experts_per_token": "top_k", "tie_word_embeddings": "tie_embeddings"}  # these two mean more over there
# Settings that the function does not depend on, once it is trained. Experts drop no token here, as in `generate/`.
TRAINING = ("balance_loss", "z_loss", "label_smoothing", "dropout", "capacity_factor", "precision")


def younger(config: type) -> dict:
    """Settings that custom/ does not know, each with its default, which it has to have: there the part is off."""
    known = (*SETTINGS, *RENAMED.values(), *TRAINING)
    return {f.name: f.default for f in dataclasses.fields(config) if f.name not in known}


# Ours has the halves of a rotary pair apart, and so has custom/.
HALVES_APART = tuple(r._replace(layout=r.layout.replace("R'", "R")) for r in LATENT_ATTENTION)

AXIS, CODE = "axis", Path(__file__).parent / "custom"
register(AXIS, Family(
    "AxisForCausalLM",
    (*(Setting(name, name) for name in SETTINGS), *(Setting(theirs, ours) for theirs, ours in RENAMED.items())),
    younger(ModelConfig), (), {}, {}, {},
    OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *HALVES_APART, *SWIGLU, *DEEPSEEK_MOE),
    lone_gate=True, code=CODE))  # fmt: skip
