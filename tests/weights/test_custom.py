"""Claims about the folders that bring code of their own: transformers loads them, and they compute what ours do.

Some of them need `make extra-parity extra-torch`. Without torch, the fixture `axis` is the witness in test_convert.py.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import pipeline
import sharding
from config import ModelConfig, preset, replace
from errors import UserError
from tests.helpers import draw
from weights import axis, convert, families
from weights.__main__ import main
from weights.families import config_from_hf, config_to_hf

needs_torch = pytest.mark.extra("parity", "torch")
B, T = 2, 18
GROUPED = {"model.attention": "gqa", "model.router": "softmax", "model.activation": "gelu", "model.top_k": 1,
           "model.n_shared": 0, "model.balance_rate": 0.0, "model.tie_embeddings": True,
           "model.no_rope_every": 2}  # fmt: skip
# The tiny preset has latents, a layer without rotary, shared experts and a dense prefix; the second has the other half.
SHAPES = {"tiny": {}, "grouped": GROUPED}

# What transformers says: logits, the same of a row that begins with padding, and the likeliest next tokens.
LOADED = """
import sys
import numpy as np, torch, transformers
folder, tokens, out = sys.argv[1:]
tokens_BT = torch.from_numpy(np.load(tokens)).long()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
padded = torch.nn.functional.pad(tokens_BT, (3, 0))
mask = (torch.arange(padded.shape[1]) >= 3).long().expand_as(padded)
with torch.no_grad():
    logits_BTV = model(tokens_BT).logits
    shifted_BTV = model(padded, attention_mask=mask).logits[:, 3:]
    grown = model.generate(tokens_BT, max_new_tokens=2, do_sample=False, pad_token_id=0)
np.savez(out, logits_BTV=logits_BTV, shifted_BTV=shifted_BTV, grown=grown)
"""


def our_logits(cfg, params, tokens_BT):
    ones_BT = np.ones_like(tokens_BT)
    batch = dict(tokens_BT=tokens_BT, targets_BT=tokens_BT, segments_BT=ones_BT, weights_BT=ones_BT.astype(np.float32),
                 positions_BT=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)))  # fmt: skip
    mesh = sharding.make_mesh("data=1")
    return np.asarray(pipeline.logits(cfg, mesh)(params, sharding.put(batch, mesh)))


@needs_torch
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_loads_it_and_says_what_ours_says(shape, tmp_path):
    """Another program, written apart from ours. Catches a part of it that is left out, in either half of the settings,
    padding that is seen, and code that does not lie in the folder.

    float32 on both sides, sums in another order: about 1e-5 at logits of size 5.
    """
    cfg = replace(preset("tiny", **{"data.seq_len": T, "data.batch_size": B}), **SHAPES[shape])
    params = draw(convert.declare(cfg.model))
    run = tmp_path / "run"
    (run / "weights").mkdir(parents=True)
    weights = sharding.named(params)
    for name, x in weights.items():
        np.save(run / "weights" / f"{name}.npy", x)
    index = {name: {"shape": x.shape, "dtype": "float32"} for name, x in weights.items()}
    (run / "weights" / "index.json").write_text(json.dumps(index))
    (run / "config.json").write_text(json.dumps({"config": cfg.to_dict(), "data": None}))
    assert main(["to-hf", str(run), "--out", str(tmp_path / "hf")]) == 0

    tokens_BT = np.random.default_rng(1).integers(0, cfg.model.vocab_size, (B, T), dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens_BT)
    words = [sys.executable, "-c", LOADED, tmp_path / "hf", tmp_path / "tokens.npy", tmp_path / "theirs.npz"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "newly initialized" not in done.stderr and "not used" not in done.stderr
    theirs, want_BTV = np.load(tmp_path / "theirs.npz"), our_logits(cfg, params, tokens_BT)
    for name in ("logits_BTV", "shifted_BTV"):
        np.testing.assert_allclose(theirs[name], want_BTV, atol=1e-4, rtol=0, err_msg=name)
    assert theirs["grown"].shape == (B, T + 2)
    assert np.array_equal(theirs["grown"][:, T], want_BTV[:, -1].argmax(-1))


FITS = {"laptop": "deepseek_v3", "deep": "axis", "tiny": "axis", "dense_124m": "arcee", "moe1b": "axis",
        "llama3_8b": "llama", "mixtral_8x7b": "mixtral", "deepseek_v3": "deepseek_v3"}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_every_preset_is_written_as_some_class(name, capsys):
    """Catches code of our own where the library has a class, and a preset that cannot be written at all."""
    c = preset(name).model
    kind = convert.fitting_family(c)
    assert kind == FITS[name] and families.pieces(c, kind)
    assert ("load it with trust_remote_code=True" in capsys.readouterr().out) == (kind == "axis")


@pytest.mark.parametrize("name", ["tiny", "moe1b", "dense_124m"])
def test_the_settings_of_our_code_go_there_and_back(name):
    """Catches a setting that decides the function, and is not in config.json."""
    c = preset(name).model
    back = config_from_hf(json.loads(json.dumps(config_to_hf(c, kind="axis"))))
    differ = {f.name for f in dataclasses.fields(c) if getattr(back, f.name) != getattr(c, f.name)}
    assert differ <= set(axis.TRAINING)


def test_the_code_knows_the_settings_that_are_written():
    """Catches a name that is spelt otherwise in custom/: transformers would keep it, and the model not read it."""
    code = (axis.CODE / "configuration_axis.py").read_text()
    known = set(re.findall(r"(?m)^        (\w+)=", code))
    written = {setting.theirs for setting in families.FAMILIES["axis"].settings}
    assert known == written
    used = set(re.findall(r"\b(?:c|config)\.(\w+)", (axis.CODE / "modeling_axis.py").read_text()))
    assert used | {"tie_word_embeddings"} == written


def test_a_setting_that_the_code_does_not_know_is_refused():
    """Catches a younger setting of the model that is on, and that the folder's code passes over."""
    later = dataclasses.make_dataclass("Later", [("later", int, 0)], bases=(ModelConfig,), frozen=True)
    family = dataclasses.replace(families.FAMILIES["axis"], ours_fixed=axis.younger(later))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, "axis", family)
        families.check_fits(later(), "axis")
        with pytest.raises(UserError, match=r"model\.later=3 cannot be written as axis, which has only 0"):
            families.check_fits(later(later=3), "axis")
