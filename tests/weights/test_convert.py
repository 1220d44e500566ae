"""Converted weights compute what Hugging Face computes, and the conversion loses nothing.

The references are tiny random models from `fixtures/make_reference.py`; nothing here imports torch or transformers.
"""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import model
import pipeline
import sharding
from architectures import declare
from config import Config, MeshConfig, preset, replace
from tests.helpers import assert_gradients_close, draw
from train import checkpoint
from utils import UserError
from weights import convert, families, folders, layouts
from weights.__main__ import main
from weights.families import FAMILIES
from weights.hf_config import config_from_hf, config_to_hf, with_old_names

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/weights/fixtures"
# Each divides its family's odd sizes. Llama's two key heads stay on one device, or their order would not matter.
MESHES = {"llama": "fsdp=2,context=2", "mistral": "context=2,tensor=2", "qwen3": "fsdp=2,tensor=2",
          "qwen3_moe": "expert=2,tensor=2", "mixtral": "expert=2,tensor=2", "deepseek_v3": "context=2,tensor=2",
          "arcee": "fsdp=2,tensor=2", "gemma2": "context=2,tensor=2", "gemma3_text": "context=2,tensor=2",
          "t5": "fsdp=2,tensor=2",
          "gpt_oss": "expert=2,context=2,tensor=2",
          "gptj": "fsdp=2,context=2,tensor=2"}  # fmt: skip
every_family = pytest.mark.parametrize("family", FAMILIES)


def tiny(name="tiny", **settings):
    """The tiny preset in a shape of a Hugging Face model: every layer or none is MoE, and all are rotary."""
    return preset(name, **{"model.moe_every": 1, "model.no_rope_every": 0} | settings)


DENSE = {"model.n_experts": 0, "model.attention": "gqa", "model.dense_prefix": 0, "model.balance_rate": 0.0}
# Shapes without a fixture. MLA without a query latent uses another row of the table; tied embeddings omit one.
OTHERS = {
    "tiny": tiny(),
    "no query latent": tiny(**{"model.d_query_latent": 0}),
    "tied": tiny(**DENSE, **{"model.tie_embeddings": True}),
}
PUBLISHED = {name: preset(name).model for name in ("gptj_6b", "llama3_8b", "mixtral_8x7b", "deepseek_v3")}


def command(*argv, capsys=None):
    """Run the command line in this process; return the exit status, and its output if `capsys` is given."""
    status = main([str(word) for word in argv])
    return (status, *capsys.readouterr()) if capsys else status


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run directory converted from each fixture, by family."""
    home = tmp_path_factory.mktemp("runs")
    for family in FAMILIES:
        assert command("from-hf", FIXTURES / family, "--out", home / family) == 0
    return {family: home / family for family in FAMILIES}


def of_reference(family, c, mesh):
    """The reference's tokens as a batch of next tokens to predict, and a run's settings for them."""
    found = np.load(FIXTURES / family / "reference.npz")
    B, T = (tokens_BT := found["tokens_BT"]).shape
    places = lambda x: np.broadcast_to(np.arange(x.shape[1], dtype=np.int32), x.shape)
    batch = dict(tokens_BT=tokens_BT, targets_BT=np.roll(tokens_BT, -1, axis=1), positions_BT=places(tokens_BT),
                 segments_BT=np.ones((B, T), np.int32))  # fmt: skip
    batch["weights_BT"] = np.float32(batch["positions_BT"] < T - 1)  # the last position has no target
    settings = {"mesh": MeshConfig.parse(MESHES[family]), "data.seq_len": T, "data.batch_size": B}
    if c.encoder_layers:
        x_BS = found["encoder_tokens_BS"]
        batch |= {"encoder_tokens_BS": x_BS, "encoder_positions_BS": places(x_BS),
                  "encoder_segments_BS": np.ones_like(x_BS)}  # fmt: skip
        settings["data.input_len"] = x_BS.shape[1]
    return sharding.put(batch, mesh), replace(Config(), model=c, **settings)


@functools.cache
def compiled(family, c):
    """Logits of tokens [B, T] under converted weights, on the family's mesh: compiled once per family."""
    mesh = sharding.make_mesh(MESHES[family])
    batch, cfg = of_reference(family, c, mesh)
    function = pipeline.logits(cfg, mesh)
    return mesh, lambda params: np.asarray(function(params, batch))


def difference(family, run):
    """Return the largest difference between our logits and the library's."""
    c = dataclasses.replace(convert.read_config(run), precision="float32")
    mesh, logits = compiled(family, c)
    want_BTV = np.load(FIXTURES / family / "reference.npz")["logits_BTV"]
    return np.abs(logits(convert.load_weights(run, declare(c), mesh)) - want_BTV).max()


def tensors_of(folder):
    return {
        name: x for file in Path(folder).glob("*.safetensors") for name, x in safetensors.numpy.load_file(file).items()
    }


def copy(family, to):
    shutil.copytree(FIXTURES / family, to)
    return to


def change_tensors(folder, change):
    tensors = tensors_of(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_run(cfg, run, dtype="float32"):
    """A run directory as `from-hf` writes it, with random weights. Returns them by name."""
    weights = {name: x.astype(dtype) for name, x in sharding.flatten_named(draw(declare(cfg.model))).items()}
    run.mkdir(parents=True)
    tensors = [folders.Tensor(name, x.shape, dtype, lambda x=x: [x]) for name, x in weights.items()]
    folders.write_tensors(folders.Folder(run), tensors, "")
    (run / "config.json").write_text(json.dumps({"config": cfg.to_dict(), "data": None}))
    return weights


# What the model computes ----------------------------------------------------------------------------------------------


@every_family
def test_converted_weights_say_what_the_library_says(family, runs):
    """Compares with another library's logits. Catches errors that our own reference and our model share.

    float32 on both sides, sums in another order: about 1e-5 at logits of size 7.
    """
    assert difference(family, runs[family]) < 1e-4


@pytest.mark.parametrize("family", sorted(file.parent.name for file in FIXTURES.glob("*/gradients.npz")))
def test_gradients_equal_the_library_s(family, runs, tmp_path):
    """Logits test half of a trainer. Catches a bias counted once per device, a norm whose mean has no gradient, and a
    sum over the wrong axes. The table of its tensors also converts the library's gradients."""
    mesh, c = sharding.make_mesh(MESHES[family]), convert.read_config(runs[family])
    c = dataclasses.replace(c, balance_loss=0.0)  # which the library adds only on request
    batch, cfg = of_reference(family, c, mesh)
    _, _, got = pipeline.loss_and_grads(cfg, mesh)(convert.load_weights(runs[family], declare(c), mesh), batch, 0)
    # Our weight is theirs times a scale, so our gradient is theirs divided by it; from_hf multiplies once more. It also
    # adds a number.
    found = {piece.hf_name: piece for piece in layouts.pieces(c, family)}
    given = np.load(FIXTURES / family / "gradients.npz")
    theirs = {name: x / found[name].scale ** 2 - np.float32(found[name].plus) for name, x in given.items()}
    change_tensors(copy(family, tmp_path / "hf"), lambda tensors: tensors.update(theirs))
    convert.from_hf(tmp_path / "hf", tmp_path / "gradients")
    want = convert.load_weights(tmp_path / "gradients", declare(c), mesh)
    assert_gradients_close(*(jax.tree.map(np.asarray, x) for x in (got, want)), share=1e-4, what=family)


# Copies of a row with a mistake that keeps all shapes: (family, tensor, wrong layout, wrong parameters).
WRONG_ROWS = [
    ("llama", "self_attn.q_proj.weight", "KH D", None),  # heads and their entries swapped
    ("llama", "self_attn.o_proj.weight", "D KH", None),
    ("llama", "self_attn.q_proj.weight", "HK' D", None),  # interleaved rotary pairs where they are half-split
    ("llama", "self_attn.k_proj.weight", "GK D", ["attention.w_value_DGK"]),
    ("llama", "mlp.gate_proj.weight", "F D", ["feed_forward.w_up_DF"]),
    ("llama", "input_layernorm.weight", "D", ["norm_feed_forward_D"]),
    ("qwen3", "self_attn.q_norm.weight", "K", ["attention.norm_key_K"]),
    ("qwen3", "self_attn.k_proj.weight", "GK' D", None),
    ("qwen3_moe", "mlp.experts.{expert}.gate_proj.weight", "M D", ["feed_forward.w_up_EDM"]),
    ("mixtral", "block_sparse_moe.experts.{expert}.w1.weight", "M D", ["feed_forward.w_up_EDM"]),
    ("mixtral", "self_attn.v_proj.weight", "KG D", None),
    ("gpt_oss", "mlp.experts.gate_up_proj", "E D *M", None),  # gates before all others where they alternate
    ("gpt_oss", "mlp.experts.gate_up_proj", "E D M*", ["feed_forward.w_up_EDM", "feed_forward.w_gate_EDM"]),
    ("gpt_oss", "mlp.experts.gate_up_proj_bias", "E *M", None),
    ("gpt_oss", "self_attn.q_proj.bias", "KH", None),
    ("gpt_oss", "self_attn.k_proj.bias", "GK", ["attention.bias_value_GK"]),
    ("gpt_oss", "post_attention_layernorm.weight", "D", ["attention.bias_out_D"]),
    ("deepseek_v3", "self_attn.q_b_proj.weight", "H[K|R] Q", None),  # half-split where they are interleaved
    ("deepseek_v3", "self_attn.q_b_proj.weight", "H[R'|K] Q", None),
    ("deepseek_v3", "self_attn.q_b_proj.weight", "[K|R']H Q", None),
    ("deepseek_v3", "self_attn.kv_a_proj_with_mqa.weight", "[C|R] D", None),
    ("deepseek_v3", "self_attn.kv_a_proj_with_mqa.weight", "[R'|C] D", None),
    ("deepseek_v3", "self_attn.kv_b_proj.weight", "H[U|K] C", None),
    ("deepseek_v3", "self_attn.o_proj.weight", "D UH", None),
    ("deepseek_v3", "mlp.shared_experts.gate_proj.weight", "F D", ["feed_forward.shared.w_up_DF"]),
    ("gptj", "attn.q_proj.weight", "HK D", None),
    ("gptj", "attn.q_proj.weight", "HK' D", None),  # pairs beyond rope_dims
    ("gptj", "attn.k_proj.weight", "K{rope_dims}'G D", None),
    ("gptj", "attn.out_proj.weight", "HK D", None),  # square: a transpose keeps the shape
    ("gptj", "attn.v_proj.weight", "D GK", None),
    ("gptj", "ln_1.bias", "D", ["feed_forward.bias_down_D"]),
    ("gptj", "ln_1.weight", "D", ["norm_attention_bias_D"]),
    ("arcee", "mlp.down_proj.weight", "D F", ["feed_forward.w_up_DF"]),
    ("t5", "layer.1.EncDecAttention.q.weight", "KH D", None),
    ("t5", "layer.1.EncDecAttention.k.weight", "GK D", ["cross.w_value_DGK"]),
    ("t5", "layer.0.layer_norm.weight", "D", ["norm_feed_forward_D"]),
]  # fmt: skip


def with_wrong_row(family, theirs, layout, ours):
    """Return the family with one row changed; if it takes another row's parameters, the rows swap them."""
    (old,) = [r for r in FAMILIES[family].layer if r.hf_name == theirs]
    new = old._replace(layout=layout, parameters=tuple(ours or old.parameters))
    swap = {ours[0]: old.parameters[0]} if ours else {}
    rows = [
        new if r is old else r._replace(parameters=tuple(swap.get(name, name) for name in r.parameters))
        for r in FAMILIES[family].layer
    ]
    return dataclasses.replace(FAMILIES[family], layer=tuple(rows))


@pytest.mark.parametrize("family, theirs, layout, ours", WRONG_ROWS)
def test_a_wrong_row_changes_the_logits(family, theirs, layout, ours, monkeypatch, tmp_path):
    """Catches fixtures too regular to reveal a wrong table: no mistake here changes a shape."""
    monkeypatch.setitem(families.FAMILIES, family, with_wrong_row(family, theirs, layout, ours))
    convert.from_hf(FIXTURES / family, tmp_path / "run")
    assert difference(family, tmp_path / "run") > 1e-2


# Round trips ----------------------------------------------------------------------------------------------------------


@every_family
def test_there_and_back_is_bit_equal(family, runs, tmp_path):
    """Catches a tensor or a setting that one direction reads and the other forgets to write."""
    assert command("to-hf", runs[family], "--out", tmp_path / "back") == 0
    want, got = tensors_of(FIXTURES / family), tensors_of(tmp_path / "back")
    assert set(got) == set(want)
    assert not [
        name for name in want if got[name].tobytes() != want[name].tobytes() or got[name].dtype != want[name].dtype
    ]
    theirs, ours = (
        json.loads((folder / "config.json").read_text()) for folder in (FIXTURES / family, tmp_path / "back")
    )
    assert config_from_hf(ours) == config_from_hf(theirs)
    theirs = with_old_names(theirs)
    theirs |= {"torch_dtype": theirs.pop("dtype")}
    del theirs["transformers_version"]
    if scaling := theirs.pop("rope_scaling", {}):
        assert scaling.items() <= ours["rope_scaling"].items()
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OTHERS)
def test_export_and_import_is_bit_equal(name, dtype, monkeypatch, tmp_path):
    """Shapes without a fixture, in several indexed files, in both dtypes. Catches a cast and overlapping files."""
    monkeypatch.setattr(folders, "FILE_BYTES", 0)
    want = write_run(OTHERS[name], tmp_path / "run", dtype)
    assert command("to-hf", tmp_path / "run", "--out", tmp_path / "hf") == 0
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    assert command("from-hf", tmp_path / "hf", "--out", tmp_path / "back") == 0
    got = {name: stored[()] for name, stored in convert.open_weights(tmp_path / "back").items()}
    assert set(got) == set(want)
    assert not [
        name for name in want if got[name].dtype != want[name].dtype or got[name].tobytes() != want[name].tobytes()
    ]


def test_a_training_run_is_converted_from_its_newest_checkpoint(tmp_path, capsys):
    """Catches moments read as parameters, an older step, and stale converted weights used in place of checkpoints."""
    cfg = OTHERS["tiny"]
    write_run(cfg, tmp_path / "run")
    old, new = draw(model.declare(cfg.model), seed=1), draw(model.declare(cfg.model), seed=2)
    place = lambda tree: jax.tree.map(jax.numpy.asarray, tree)
    with checkpoint.Saver(tmp_path / "run" / "checkpoints") as manager:
        for step, params in ((3, old), (12, new)):
            checkpoint.save(manager, step, {"params": place(params), "step": jax.numpy.int32(step)}, about={})
    status, said, _ = command("to-hf", tmp_path / "run", "--out", tmp_path / "hf", capsys=capsys)
    assert status == 0 and f"parameters of step 12 of {tmp_path}/run\n" in said
    convert.from_hf(tmp_path / "hf", tmp_path / "back")
    got, want = convert.open_weights(tmp_path / "back"), sharding.flatten_named(new)
    assert not [name for name in want if not np.array_equal(got[name][()], want[name])]

    wider = replace(cfg, **{"model.d_ff": 44}).to_dict()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": wider, "data": None}))
    status, _, said = command("to-hf", tmp_path / "run", "--out", tmp_path / "hf2", capsys=capsys)
    assert status == 2 and "prefix.feed_forward.w_gate_DF has shape (1, 24, 40) in checkpoint " in said
    assert "/checkpoints/12, (1, 24, 44) in the model; " in said


# The tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [*PUBLISHED.values(), *(cfg.model for cfg in OTHERS.values())],
                         ids=[*PUBLISHED, *OTHERS])  # fmt: skip
def test_every_parameter_appears_exactly_once(c):
    """Catches a parameter without a row, two rows for one, a missing layer or expert, a tensor named twice."""
    want = {(name, index)
            for name, d in sharding.flatten_named(declare(c)).items()
            for index in np.ndindex(d.shape[: d.dims.index(name.rsplit("_", 1)[1])])}  # fmt: skip
    found = layouts.pieces(c)
    parts = [(p.name, p.index) for piece in found for p in piece.parts]
    # Experts are one index deeper: separate tensors on disk, and a dim of our parameters.
    whole = {(name, index[: len(index) - ("E" in name.rsplit("_", 1)[1] and len(name.rsplit("_", 1)[1]) == 3)])
             for name, index in parts}  # fmt: skip
    assert whole == want and len(parts) == len(set(parts))
    assert len({piece.hf_name for piece in found}) == len(found)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_a_missing_row_is_named(name, monkeypatch):
    """Catches a parameter that no tensor contains: each row of a table is removed in turn."""
    c = OTHERS[name].model if name in OTHERS else config_from_hf(folders.Folder(FIXTURES / name).json("config.json"))
    kind = families.family_of(c)
    family, there, found = FAMILIES[kind], " ".join(sharding.flatten_named(declare(c))) + " ", 0
    for part in ("outside", "layer"):
        for gone in getattr(family, part):
            if f"{gone.parameters[0]} " not in there or (gone.needs and not gone.needs(c)):
                continue  # a tensor that this model lacks
            rest = tuple(r for r in getattr(family, part) if r is not gone)
            monkeypatch.setitem(FAMILIES, kind, dataclasses.replace(family, **{part: rest}))
            with pytest.raises(UserError, match=rf"'{kind}' mapping has no rows for (\S+\.)?{gone.parameters[0]}; "):
                layouts.pieces(c)
            found += 1
    assert found >= 9


@every_family
def test_every_number_on_disk_is_one_of_our_parameters(family):
    """Catches a layout that omits a column or uses one twice, by counting on an array of zeros."""
    c = config_from_hf(folders.Folder(FIXTURES / family).json("config.json"))
    declared = sharding.flatten_named(declare(c))
    for piece in layouts.pieces(c):
        count, sizes = np.zeros(piece.shape, int), layouts._sizes(piece.parts, declared)
        for part in piece.parts:
            ones = np.ones([sizes[letter] for letter in part.dims], int)
            for theirs, ours in layouts.matching_views(count, ones, piece.layout, part, sizes):
                theirs += ours
        assert (count == 1).all(), piece.hf_name


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_round_trip(name):
    """The published shapes. Catches a setting that is written under one name and read under another."""
    c, training = PUBLISHED[name], {"balance_loss", "balance_rate"}
    back = config_from_hf(json.loads(json.dumps(config_to_hf(c))))
    differ = {f.name for f in dataclasses.fields(c) if getattr(back, f.name) != getattr(c, f.name)}
    assert sharding.shapes(declare(back)) == sharding.shapes(declare(c))
    unused = {"n_kv_heads", "d_rope", "d_value", "d_kv_latent", "d_expert", "d_ff", "top_k", "router"}
    assert differ <= training | unused, differ


def test_gptj_6b_has_the_published_number_of_parameters():
    """6,050,882,784, from shapes only. Catches a bias too many or too few."""
    assert sum(d.size for d in sharding.flatten_named(declare(preset("gptj_6b").model)).values()) == 6_050_882_784


@every_family
def test_fixtures_stay_small(family):
    """Catches a fixture that makes every clone slow."""
    assert sum(file.stat().st_size for file in (FIXTURES / family).iterdir()) < 1_000_000


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(folder, tmp_path, capsys):
    """Return the error of from-hf for a folder; checks status 2, one line, and that nothing is left behind."""
    status, _, said = command("from-hf", folder, "--out", tmp_path / "out", capsys=capsys)
    assert status == 2 and said.startswith("error: ") and "Traceback" not in said
    assert not list(tmp_path.glob("out*"))
    return said


@pytest.mark.parametrize("family", ["", "llama"])
def test_a_model_without_a_class_in_transformers_is_refused(family, tmp_path, capsys):
    """Catches an error that names only the first of several settings, or does not say what else to do."""
    write_run(preset("tiny"), tmp_path / "run")
    flags = ["--family", family] if family else []
    status, _, said = command("to-hf", tmp_path / "run", "--out", tmp_path / "hf", *flags, capsys=capsys)
    wanted = {"": "error: transformers' DeepseekV3ForCausalLM (deepseek_v3) cannot express "
                  "model.no_rope_every=3 (only 0 is supported), model.moe_every=2 (only 1 is supported); ",
              "llama": "LlamaForCausalLM (llama) cannot express model.no_rope_every=3 (only 0 is "}  # fmt: skip
    assert status == 2 and wanted[family] in said and "; train with other settings, or export weights" in said
    assert said.count("\n") == 1 and not (tmp_path / "hf").exists()


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, capsys):
    """A tensor is named if it is missing, unexpected, or of another shape or dtype than the rest of its array."""
    q, v = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.self_attn.v_proj.weight"
    cases = {
        "missing": (lambda t: t.pop(q), f"lacks {q}"),
        "extra": (lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": t[q][0]}), "q_proj.bias"),
        "shape": (lambda t: t.update({q: t[q][1:]}), f"{q} has shape (59, 36), but config.json needs (60, 36)"),
        "transposed": (lambda t: t.update({v: np.ascontiguousarray(t[v].T)}), f"{v} has shape (36, 20)"),
        "dtype": (lambda t: t.update({q: t[q].astype(np.float16)}), f"{q} is float16 and model.layers.0"),
        "integers": (lambda t: t.update({q: t[q].astype(np.int32)}), f"{q} has dtype I32"),
    }
    for name, (change, message) in cases.items():
        folder = copy("llama", tmp_path / name)
        change_tensors(folder, change)
        assert message in refused(folder, tmp_path, capsys), name


def test_folders_that_cannot_be_read_are_refused(tmp_path, capsys):
    """No folder, half a file, a missing shard, a config that is not JSON: one line each."""
    assert "does not exist" in refused(tmp_path / "nowhere", tmp_path, capsys)
    half = copy("llama", tmp_path / "half")
    whole = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refused(half, tmp_path, capsys)
    (half / "model.safetensors").unlink()
    assert "does not exist" in refused(half, tmp_path, capsys)
    (half / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors"}}))
    assert "model-1-of-2.safetensors" in refused(half, tmp_path, capsys)
    (half / "config.json").write_text("{")
    assert "not JSON" in refused(half, tmp_path, capsys)


def test_runs_that_cannot_be_read_are_refused(runs, tmp_path, capsys):
    """A Hugging Face folder given as a run, a run without weights, and an existing output are errors."""
    theirs, empty = FIXTURES / "llama", tmp_path / "empty"
    write_run(OTHERS["tiny"], empty)
    (empty / "model.safetensors").unlink()
    for run, out, message in ((theirs, "out", "is not the config of a run"), (empty, "out", "no checkpoint in "),
                              (runs["llama"], "empty", "exists; choose another folder")):  # fmt: skip
        status, _, said = command("to-hf", run, "--out", tmp_path / out, capsys=capsys)
        assert status == 2 and message in said and not (tmp_path / "out").exists()
    assert list(empty.iterdir()) == [empty / "config.json"]


@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_the_model_lacks_are_not_dropped(trained, tmp_path, capsys):
    """Catches a folder with fewer weights than the run, and status 0, because code or config.json changed since."""
    run, cfg = tmp_path / "run", OTHERS["tied"]
    untied = replace(cfg, **{"model.tie_embeddings": False})
    write_run(untied, run)
    if trained:
        (run / "model.safetensors").unlink()
        with checkpoint.Saver(run / "checkpoints") as manager:
            params = jax.tree.map(jax.numpy.asarray, draw(declare(untied.model)))
            checkpoint.save(manager, 7, {"params": params, "step": jax.numpy.int32(7)}, about={})
    (run / "config.json").write_text(json.dumps({"config": cfg.to_dict(), "data": None}))
    status, _, said = command("to-hf", run, "--out", tmp_path / "hf", capsys=capsys)
    where = f"checkpoint {run}/checkpoints/7" if trained else f"{run}/weights"
    assert status == 2 and f"error: {where} has unembedding_DV, but the model does not; " in said
    assert not (tmp_path / "hf").exists()


def test_weights_of_another_model_are_refused_by_name(runs):
    """Catches fine-tuning that starts from half of the weights, or from reshaped ones."""
    mesh, c = sharding.make_mesh("data=1"), convert.read_config(runs["llama"])
    changes = {
        "w_gate_DF has shape .*52.* in the model": dict(d_ff=56),
        "weights has unembedding_DV, but the model does not": dict(tie_embeddings=True),
        "the model has prefix": dict(dense_prefix=1),
    }
    for message, change in changes.items():
        with pytest.raises(UserError, match=message):
            convert.load_weights(runs["llama"], declare(dataclasses.replace(c, **change)), mesh)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_line_end_to_end(tmp_path):
    """As a user types it, in a separate process, in both directions; and a mistake, with status 2 and no traceback."""

    def run(*argv):
        words = [sys.executable, "-m", "weights", *argv]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)

    done = run("from-hf", FIXTURES / "mixtral", "--out", "runs/x")
    assert (done.returncode, done.stderr) == (0, "") and "73,120 parameters" in done.stdout
    done = run("to-hf", "runs/x", "--out", "back")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(file.name for file in (tmp_path / "back").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    done = run("from-hf", "runs/x", "--out", "y")
    assert done.returncode == 2 and done.stderr.startswith("error: config.json: model_type=None is unknown")


@every_family
def test_weights_are_sharded_as_declared(family, runs):
    """Catches a parameter replicated on every device, which only memory would reveal."""
    c, mesh = convert.read_config(runs[family]), sharding.make_mesh(MESHES[family])
    declared = sharding.flatten_named(declare(c))
    for name, x in sharding.flatten_named(convert.load_weights(runs[family], declare(c), mesh)).items():
        assert x.sharding.spec == declared[name].spec and x.dtype == declared[name].dtype, name


def test_bfloat16_weights_are_loaded_as_declared(tmp_path):
    """Catches training in the file's dtype: an optimizer step is lost in 8 significant bits."""
    cfg = OTHERS["tiny"]
    want = write_run(cfg, tmp_path / "run", "bfloat16")
    got = convert.load_weights(tmp_path / "run", declare(cfg.model), sharding.make_mesh("fsdp=2,tensor=2"))
    for name, x in sharding.flatten_named(got).items():
        assert x.dtype == np.float32 and np.array_equal(x, want[name].astype(np.float32)), name


DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


def in_dtype(family, dtype, folder):
    cast = lambda tensors: tensors.update({name: x.astype(dtype) for name, x in tensors.items()})
    change_tensors(copy(family, folder), cast)
    return folder


def test_another_scale_of_queries_is_in_their_weights(tmp_path):
    """Catches a Gemma 2 27B whose scores are too large or too small: four times the scalar halves the scores, and twice
    the weights of the queries double them, so this is the same model."""
    folder = copy("gemma2", tmp_path / "hf")
    queries = lambda tensors: {name: 2 * x for name, x in tensors.items() if "q_proj" in name}
    change_tensors(folder, lambda tensors: tensors.update(queries(tensors)))
    about = json.loads((folder / "config.json").read_text())
    assert about["query_pre_attn_scalar"] == about["head_dim"] == 10
    (folder / "config.json").write_text(json.dumps(about | {"query_pre_attn_scalar": 40}))
    for source, run in ((folder, "scaled"), (FIXTURES / "gemma2", "plain")):
        assert command("from-hf", source, "--out", tmp_path / run) == 0
    scaled, plain = (tensors_of(tmp_path / run) for run in ("scaled", "plain"))
    assert scaled.keys() == plain.keys() and all(np.array_equal(scaled[name], plain[name]) for name in plain)
    assert command("to-hf", tmp_path / "scaled", "--out", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["query_pre_attn_scalar"] == 10
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"query_pre_attn_scalar": 0}))
    assert command("from-hf", folder, "--out", tmp_path / "none") == 2


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_gains_of_gemma_in_bfloat16_are_not_rounded(family, tmp_path, capsys):
    """Catches gains of which 1 + w is rounded to 8 bits, and embeddings that change on their way there and back."""
    folder = in_dtype(family, "bfloat16", tmp_path / "hf")
    status, said, _ = command("from-hf", folder, "--out", tmp_path / "run", capsys=capsys)
    assert status == 0 and convert.read_config(tmp_path / "run").precision == "mixed"
    why = "bfloat16, as in the files, would round our form of them"
    assert said.endswith(f"precision  parameters float32 ({why}), compute bfloat16\n")
    assert command("to-hf", tmp_path / "run", "--out", tmp_path / "back") == 0
    got = tensors_of(tmp_path / "back")
    for name, x in tensors_of(folder).items():
        assert np.array_equal(got[name].astype("bfloat16"), x), name
        assert got[name].dtype == ("float32" if "norm" in name else "bfloat16"), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("gemma")])
def test_a_run_has_the_precision_of_its_files(family, dtype, tmp_path, capsys):
    """Catches float32 weights that are computed with or stored in bfloat16, and a choice that is not printed."""
    folder, precision = in_dtype(family, dtype, tmp_path / "hf"), DTYPES[dtype]
    status, said, _ = command("from-hf", folder, "--out", tmp_path / "run", capsys=capsys)
    assert status == 0
    assert convert.read_config(tmp_path / "run").precision == precision
    assert said.endswith(f"precision  parameters {precision} (as in the files), compute {precision}\n")


def test_a_float32_bias_does_not_change_the_compute_dtype(tmp_path):
    """As DeepSeek-V3 is published. Catches a bias that is rounded, and a model twice as slow because of it."""
    folder = copy("deepseek_v3", tmp_path / "hf")
    change_tensors(folder, lambda tensors: tensors.update(
        {name: x.astype("bfloat16") for name, x in tensors.items() if "e_score_correction_bias" not in name}
    ))  # fmt: skip
    assert command("from-hf", folder, "--out", tmp_path / "run") == 0
    assert convert.read_config(tmp_path / "run").precision == "mixed"
