"""Errors about models that do not split over a mesh name settings that do split."""

import math
import re

import pytest

import model
import sharding
from config import PRESETS, MeshConfig, preset, replace
from pipeline import fit
from utils import UserError

CASES = [
    ("laptop", "stage=4", "2 layer blocks of blocks.moe.norm_attention_D", "--model.n_layers 6"),  # 2 dense before
    ("tiny", "stage=3", "2 layer blocks of blocks.dense.norm_attention_D", "--model.n_layers 7"),  # 3 blocks of 2
    ("laptop", "tensor=3", "272 vocabulary tokens of embedding_VD", "--model.vocab_size 270 or 273"),
    ("llama3_8b", "tensor=16", "8 key/value heads of blocks.dense.attention.w_key_DGK", "--model.n_kv_heads 16"),
    ("mixtral_8x7b", "expert=16", "8 experts of blocks.moe.feed_forward.w_gate_EDM", "--model.n_experts 16"),
    ("moe1b", "fsdp=80", "768 model dimensions of embedding_VD", "--model.d_model 720 or 800"),
    ("deepseek_v3", "fsdp=1024", "1536 query latent dimensions of prefix.attention.w_query_QHK",
     "--model.d_query_latent 1024 or 2048"),
]  # fmt: skip


@pytest.mark.parametrize("name, mesh, what, flag", CASES)
def test_an_error_names_the_setting_that_does_not_split(name, mesh, what, flag):
    """Catches an error with a dim letter instead of a flag, or with a value or preset that does not split either."""
    cfg, mesh = preset(name), MeshConfig.parse(mesh)
    with pytest.raises(UserError) as refusal:
        fit.check(cfg.model, mesh)
    text = str(refusal.value)
    assert text.startswith(f"cannot split {what} over mesh axes ")
    assert re.search(f"; use a smaller [a-z*]+, or {flag}; ", text)
    setting, *values = re.search(r"--(\S+) ([\d or]+)", text).group(0)[2:].replace(" or ", " ").split()
    for value in values:  # another parameter may still fail to split
        changed = replace(cfg, **{"model.d_head": cfg.model.d_head, setting: int(value)}).model
        d = sharding.flatten_named(model.declare(changed))[what.split(" of ")[1]]
        at = d.shape.index(int(value) if setting != "model.n_layers" else d.shape[0])
        size, axes = d.shape[at], sharding.as_tuple(d.spec[at])
        assert size % math.prod(mesh.sizes[axis] for axis in axes) == 0
    presets = text.split(f"presets that split over {mesh}: ")[1]
    for other in PRESETS:
        try:
            fit.check(preset(other).model, mesh)
        except UserError:
            assert other not in presets.split(", ")
        else:
            assert other in presets.split(", ")
