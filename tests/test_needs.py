"""Tests of settings without effect: every flag changes the program, the plan, the data or a file, or is refused."""

import functools
import re
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import config
import dataset
import local_steps
import main
import model
import optimizer
import sharding
from architectures import declare
from config import Config, needs, preset, replace
from config.fields import hints
from data import prepare
from pipeline import step
from plan import __main__ as plan_command, planner
from tests import helpers
from utils import UserError

ROOT = Path(__file__).parent.parent

REFUSED = [  # flags -> the end of the error
    ("laptop --model.n_kv_heads 2", "model.n_kv_heads=2 has no effect: only attention='gqa' uses it, and "
     "model.attention is 'mla' here; add --model.attention gqa or drop it"),
    ("laptop --model.rope-dims=8", "model.rope_dims=8 has no effect: only attention='gqa' uses it, and "),
    ("dense_124m --model.d_kv_latent 32", "model.d_kv_latent=32 has no effect: only attention='mla' uses it, and "),
    ("laptop --model.n_experts 0 --model.top_k 4", "model.top_k=4 has no effect: only a model with experts uses it, "
     "and model.n_experts is 0 here; add --model.n_experts 8 or drop it"),
    ("laptop --mesh fsdp=2 --work.schedule 1f1b", "work.schedule='1f1b' has no effect: only a mesh with several "
     "devices along stage uses it, and the mesh is fsdp=2; add stage=2 to --mesh or drop it"),
]  # fmt: skip


@pytest.mark.parametrize("typed, why", REFUSED)
def test_a_flag_without_effect_names_the_flag_that_uses_it(typed, why):
    """Catches an ablation of nothing, which differs from the other run only by its name."""
    with pytest.raises(UserError, match=re.escape(why)):
        main.parse(typed.split())
    with pytest.raises(UserError, match=re.escape(why)):
        plan_command.parse(typed.split())


@pytest.mark.parametrize("typed", [
    "laptop --model.n_kv_heads 4",  # the value that the preset has
    "laptop --model.n_heads 8",  # n_kv_heads follows
    "tiny --model.n_experts 0",  # the preset's top_k has no effect now
    "laptop --model.attention gqa --model.n_kv_heads 2",
])  # fmt: skip
def test_a_value_that_no_flag_changes_may_be_without_effect(typed):
    """Catches a preset, or a run's own settings, that no flag can change without a refusal."""
    main.parse(typed.split())


def test_a_search_of_meshes_accepts_settings_of_other_meshes():
    """Catches `python -m plan --search` that refuses a schedule because the command line has no mesh."""
    plan_command.parse("moe1b --topology v4:4x4x2 --search 32 --mesh fsdp=32 --work.schedule 1f1b".split())
    with pytest.raises(UserError, match=r"model\.n_kv_heads=2 has no effect"):
        plan_command.parse("moe1b --topology v4:4x4x2 --search 32 --model.n_kv_heads 2".split())
