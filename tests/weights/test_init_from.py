"""A run that starts from another's parameters takes over only the settings that they need. A run of a config.json has
the published model, or is refused."""

import dataclasses
import json
import subprocess
import sys

import jax
import pytest

import main
import sharding
from data import prepare
from plan import __main__ as plan_command
from tests.plan.test_published import MODELS, write
from tests.test_training import ROOT, run, write_texts
from train.directory import describe
from utils import UserError
from weights import __main__ as weights_command, convert, init_from, published

FIXTURES = ROOT / "tests/weights/fixtures"


def test_only_settings_that_parameters_need_are_taken_over(tmp_path, monkeypatch):
    """Catches a preset's precision and balancing silently replaced by those of the other run, a flag that is replaced,
    a selection bias that the model has no place for, and an encoder without inputs."""
    for family in ("deepseek_v3", "mixtral"):
        assert weights_command.main(["from-hf", str(FIXTURES / family), "--out", str(tmp_path / family)]) == 0
    ours = main.parse(["laptop"]).model
    for family, rate in (("deepseek_v3", 0.001), ("mixtral", 0.0)):
        flags = ["laptop", "--init-from", str(tmp_path / family), "--model.dropout", "0.1"]
        got, theirs = main.parse(flags).model, convert.read_config(tmp_path / family)
        assert (got.dropout, got.balance_rate) == (0.1, rate)
        assert (got.precision, got.balance_loss) == (ours.precision, ours.balance_loss)
        assert theirs.precision != ours.precision or theirs.balance_loss != ours.balance_loss
        taken = {f.name for f in dataclasses.fields(got)} - set(init_from.KEPT_SETTINGS)
        assert {name: getattr(got, name) for name in taken} == {name: getattr(theirs, name) for name in taken}
    t5 = dataclasses.replace(theirs, attention="gqa", n_experts=0, dense_prefix=0, encoder_layers=3)
    monkeypatch.setattr(convert, "read_config", lambda source: t5)
    flags = ["laptop", "--init-from", "t5"]
    assert main.parse(flags).data.input_len == main.parse(["laptop"]).data.seq_len
    assert main.parse([*flags, "--data.input_len", "40"]).data.input_len == 40
    said = init_from.differing_settings(got, theirs)
    assert "balance_loss=0.01 (there 0.001), dropout=0.1 (there 0.0)" in said


def test_a_flag_that_the_parameters_do_not_fit_is_named(tmp_path):
    """Catches an error that names a parameter but not the flag that added it to the model."""
    assert weights_command.main(["from-hf", str(FIXTURES / "mixtral"), "--out", str(tmp_path / "run")]) == 0
    cfg = main.parse(["laptop", "--init-from", str(tmp_path / "run"), "--model.softmax", "sinks"])
    with pytest.raises(UserError, match=r"sink_H, but .*\. Settings that differ: softmax='sinks' \(there ''\), "):
        init_from.load_init_params(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]))


LLAMA = dict(model_type="llama", vocab_size=272, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64)  # fmt: skip


def test_a_config_json_is_trained_as_it_is_planned_and_resumes(tmp_path, capsys):
    """Catches a command that trains another model than it plans, a run that its own config.json doesn't resume, and
    --batch_tokens that only the planner takes."""
    folder, file = write(tmp_path / "nano", LLAMA), str(tmp_path / "nano/config.json")
    source, tokens = write_texts(tmp_path / "texts", "so it goes, "), str(tmp_path / "tokens")
    assert prepare.main(["--source", source, "--out", tokens]) == 0
    flags = ["--data.path", tokens, "--batch_tokens", "1024", "--mesh", "fsdp=2"]
    cfg = main.parse([folder, *flags])
    assert cfg == main.parse([file, *flags]) == plan_command.parse([folder, *flags], published.read(folder).config)[0]
    assert (cfg.run.name, cfg.model.d_ff, cfg.data.seq_len, cfg.data.batch_size) == ("nano", 48, 64, 16)
    code = f"import main, devices; main.parse({[folder, *flags]}); devices.use_devices(2)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0, "--devices comes too late"
    (tmp_path / "run.json").write_text(json.dumps(describe(cfg)))
    assert main.parse(["--config", str(tmp_path / "run.json")]) == cfg
    capsys.readouterr()
    at = ["--devices", "2", "--run.dir", str(tmp_path / "runs"), "--run.check", "only", "--run.sample_prompt", ""]
    status, out, err = run([folder, *flags, *at])
    assert (status, err) == (0, "") and "config     llama with 32,928 parameters, from" in out
    assert "checked    nano: 32,928 parameters on mesh fsdp=2" in out
    write(tmp_path / "nano", LLAMA | {"vocab_size": 30})
    assert "has token ids 0..256, but model.vocab_size=30 allows 0..29" in run([folder, *flags, *at])[2]
    assert main.parse(["laptop", "--batch_tokens", "4096"]).data.batch_size == 16
    assert "a batch has a multiple of 256; use 768 or 1,024" in run(["laptop", "--batch_tokens", "1000"])[2]


REFUSED = {
    "Qwen2.5": "attention biases",
    "DeepSeek-V2": "expert groups: a token uses experts of 3 of 8 groups",
    "gemma-2-27b": "query_pre_attn_scalar=144 is not supported together with head_dim=128",
}  # fmt: skip
LATER = {"Llama-2-7b hidden_act": ("relu", "hidden_act='relu' is not supported for llama; it must be 'silu'"),
         "Mistral-Nemo attention_dropout": (0.1, "attention_dropout=0.1"),
         "DeepSeek-V2-Lite routed_cats": (9, "settings that the planner doesn't know: routed_cats")}  # fmt: skip


@pytest.mark.parametrize("name", [*MODELS, *LATER])
def test_a_model_with_parts_that_the_trainer_lacks_is_not_trained_without_them(name, tmp_path):
    """Catches a model that silently trains without norms, biases or another activation."""
    name, _, changed = name.partition(" ")
    value, why = LATER.get(f"{name} {changed}", (None, None))
    starts = [text for start, text in REFUSED.items() if name.startswith(start) and not name.endswith("Lite")]
    why = why or next(iter(starts), None)
    folder = write(tmp_path / name, MODELS[name]["config"] | ({changed: value} if changed else {}))
    if why is None:
        assert init_from.read_architecture(folder).model == published.read(folder).config.model
        return
    with pytest.raises(UserError) as refused:
        init_from.read_architecture(folder)
    said = str(refused.value)
    assert said.startswith(f"{folder}/config.json cannot be trained as published: {why}") and ": the plan" not in said
    assert f"plan it with python -m plan {folder}, or" in said


@pytest.mark.parametrize("command, word, instead", [
    (main.main, "meta-llama/Llama-3.1-70B", "the preset llama3_70b"),
    (main.main, "deepseek-ai/DeepSeek-V3", "the preset deepseek_v3"),
    (plan_command.main, "mistralai/Mixtral-8x7B-Instruct", "the preset mixtral_8x7b"),
    (plan_command.main, "~/Falcon/config.json", "a preset"),
])  # fmt: skip
def test_a_name_at_hugging_face_is_not_downloaded(command, word, instead, capsys):
    """Catches an error that does not say that nothing is downloaded, or what to pass instead."""
    assert command([word]) == 2
    assert f"{word}: no such file or folder, and nothing is downloaded; pass {instead}, or" in capsys.readouterr().err
