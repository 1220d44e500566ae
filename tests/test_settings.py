"""Tests of settings of earlier versions: their runs resume, and an old flag names its replacement."""

import json
import re
from pathlib import Path

import pytest

import config
import main
from config import Config, fields, migrations, preset
from utils import UserError

# The config.json of `tiny`, written when there were 104 settings.
OLD = Path(__file__).parent / "fixtures/config_104_settings.json"


def old(**changed) -> dict:
    """Return the settings of the old file, with some changed by their old dotted names."""
    values = json.loads(OLD.read_text())
    for name, value in changed.items():
        group, _, setting = name.partition(".")
        assert setting in values[group], name
        values[group][setting] = value
    return values


def test_settings_of_the_version_with_104_are_converted():
    """Catches a run that cannot resume or be sampled, because its config.json has a removed setting."""
    assert len(migrations.flatten(old())) == 104
    assert Config.from_dict(old()) == preset("tiny")
    assert config.first_difference(old(), preset("tiny").to_dict()) is None
    assert migrations.dropped_notes(old(**{"run.sample_tokens": 200})) == []


DROPPED = {  # a setting that is gone, a value it had -> what is said of it
    "optim.decay_steps": (5, "the learning rate decays over --run.steps; --optim.schedule wsd keeps it constant first"),
    "run.join_timeout_s": (70, "processes have 5 times --run.peer_timeout_s to join"),
    "run.hang_timeout_s": (0, "a step has 30 times --run.peer_timeout_s to finish"),
    "run.keep_every": (24, "a run keeps the latest --run.keep_checkpoints checkpoints and the best one"),
    "run.keep_best": (0, "a run always keeps the checkpoint with the lowest validation loss"),
    "run.sample_tokens": (8, "a sample has up to 200 tokens; --run.sample_prompt '' disables it"),
    "run.compile_cache": ("", "set the environment variable JAX_COMPILATION_CACHE_DIR to the directory"),
    "data.cache_gib": (5.0, "each host keeps at most 20 GiB of a bucket's shards in its cache folder"),
    "data.prefetch": (1, "a background thread prepares 4 batches ahead"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_value_that_is_dropped_is_reported(name, tmp_path, capsys):
    """Catches a run that silently resumes with other settings than it started with, and one that cannot resume."""
    value, instead = DROPPED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(old(**{name: value})))
    assert main.parse(["--config", str(file)]) == preset("tiny")
    assert f"note: {name}={value!r} no longer exists: {instead}\n" in capsys.readouterr().out
    assert {*DROPPED} == {*migrations.DROPPED}


MERGED = [  # settings as they were -> as they are
    ({"data.seed": 3, "run.seed": 3}, {"run.seed": 3}),
    ({"model.precision": {"parameters": "float32", "compute": "bfloat16"}}, {"model.precision": "mixed"}),
    ({"model.precision": {"parameters": "bfloat16", "compute": "bfloat16"}}, {"model.precision": "bfloat16"}),
    ({"run.force": True}, {"run.check": "no"}),
    ({"run.check": True, "run.restart": True}, {"run.check": "only", "run.restart": "scratch"}),
    ({"run.go_back": True}, {"run.restart": "newest"}),
    ({"optim.beta2": 0.99}, {"optim.betas": (0.9, 0.99)}),
    ({"run.epochs": 2.5, "run.steps": 44}, {"run.steps": 44}),  # as it was written: steps were counted at the start
    ({"run.layer_norms_every": 5}, {"run.gradient_stats_every": 5}),
    ({"run.layer_norms_every": 8, "run.noise_scale_every": 4}, {"run.gradient_stats_every": 4}),
]


@pytest.mark.parametrize("before, now", MERGED)
def test_a_value_that_is_part_of_another_setting_is_converted(before, now):
    """Catches a run that resumes with another value, because its setting was merged with another."""
    assert Config.from_dict(old(**before)) == preset("tiny", **now)


REFUSED = [  # values that decide results, and cannot be kept -> what is said of them
    ({"data.seed": 3}, "data.seed=3", "no longer exists: use --run.seed, for the order of the sequences too"),
    ({"data.packing": "shifted"}, "data.packing", "'shifted'"),
    ({"model.precision": {"parameters": "bfloat16", "compute": "float32"}}, "model.precision", ""),
]


@pytest.mark.parametrize("before, name, why", REFUSED)
def test_a_lost_value_that_affects_results_is_refused(before, name, why, tmp_path):
    """Catches a run that resumes with other results than it would have had."""
    (tmp_path / "config.json").write_text(json.dumps(old(**before)))
    with pytest.raises(UserError, match=rf"{name}.*{why}"):
        main.parse(["--config", str(tmp_path / "config.json")])
    assert re.search(rf"{name}.*{why}", config.first_difference(preset("tiny").to_dict(), old(**before)))


@pytest.mark.parametrize("name", [*migrations.MERGED, *migrations.DROPPED])
def test_an_old_flag_names_what_replaces_it(name):
    """Catches an error for an old flag that only calls it unknown."""
    instead = migrations.replacement(name)
    for flag in ([f"--{name}", "1"], [f"--{name.replace('_', '-')}=1"]):
        with pytest.raises(UserError, match=re.escape(f" {instead}")):
            main.parse(["tiny", *flag])
    with pytest.raises(UserError, match=re.escape(f"the setting {name} {instead}")):
        preset("tiny", **{name: 1})


@pytest.mark.parametrize("flag, now", [("--run.check", "only"), ("--run.restart", "scratch")])
def test_a_flag_that_now_needs_a_value_names_it(flag, now):
    """Catches a usage text instead of the missing value."""
    for more in ([], ["--run.steps", "3"]):
        with pytest.raises(UserError, match=re.escape(f"{flag} needs a value: use {flag} {now}")):
            main.parse(["tiny", flag, *more])
    assert main.parse(["tiny", flag, now]) == preset("tiny", **{flag[2:]: now})


def test_the_number_of_settings_does_not_grow():
    """Catches a flag that was added without removing another; a long list of flags is hard to read."""
    settings = len(migrations.flatten(Config().to_dict()))
    assert settings == 107, f"{settings} settings: a new one needs a reason in its commit, and another one to go"


def test_every_setting_declares_what_it_affects():
    """Catches a setting that is in no list made from the declarations, or in two."""
    kinds = [config.affecting(kind) for kind in config.Affects]
    assert sorted(name for kind in kinds for name in kind) == sorted(migrations.flatten(Config().to_dict()))


ENCODER = {"model.encoder_layers": 2, "model.attention": "gqa", "model.n_experts": 0, "model.dense_prefix": 0,
           "data.input_len": 20}  # fmt: skip
NOT_BUILT = [  # settings besides ENCODER -> what is said of them
    ({"data.input_len": 0}, "data.input_len=0, but model.encoder_layers=2: .*needs data.input_len of 1 or more"),
    ({"model.encoder_layers": 0}, "data.input_len=20, but model.encoder_layers=0: "),
    ({"mesh": "context=2"}, "mesh context=2: a model with an encoder .*use another axis, such as fsdp"),
    ({"model.attention": "mla"}, "model.attention=mla: a model with an encoder needs attention='gqa'"),
    ({"model.n_experts": 8}, "model.n_experts=8: a model with an encoder needs n_experts=0"),
    ({"model.parallel_residual": True}, "parallel_residual=True: a model with an encoder needs"),
    ({"model.prefix_lm": True}, "prefix_lm=True: a model with an encoder needs"),
    ({"model.rope_scaling": "llama3:8:1:4:8192"}, "rope_scaling=llama3:8:1:4:8192: a model with an encoder needs"),
    ({"model.qk_norm": True}, "qk_norm=True: a model with an encoder needs qk_norm=False"),
]


@pytest.mark.parametrize("changes, why", NOT_BUILT)
def test_a_model_with_an_encoder_refuses_what_it_does_not_have(changes, why):
    """Catches a setting that is silently ignored with an encoder, and an encoder without inputs."""
    assert preset("tiny", **ENCODER).model.encoder_layers == 2
    with pytest.raises(UserError, match=why):
        preset("tiny", **ENCODER | changes)


OBJECTIVES = [  # data.objective -> its weights in sequences out of 1,000, or what is said of it
    ("span", {"span": 1000}),
    ("span=0.5,span:0.5:32=0.25,prefix=0.25", {"span": 500, "span:0.5:32": 250, "prefix": 250}),
    ("spam", "'spam' should be causal, prefix, task, span or span:RATE:LENGTH"),
    ("span=0.5,spam=0.5", "'spam' should be causal"),
    ("span:0.5", "'span:0.5' should be"),
    ("span:0.5:0.9", "needs a rate above 0 and below 1, and a mean length of 1 or more"),
    ("span:0.0:3", "needs a rate above 0"),
    ("span=0.5,prefix=0.4", r"weights must add up to 1, but 0\.5 \+ 0\.4 = 0\.9"),
    ("span=0.5,span=0.5", "'span' is given twice"),
    ("span=0.5;prefix=0.5", "'span=0.5;prefix=0.5' should be OBJECTIVE=WEIGHT"),
]


@pytest.mark.parametrize("text, expected", OBJECTIVES)
def test_objectives_have_exact_weights(text, expected):
    """Catches an objective that is unknown until the first batch, and weights that are not exact."""
    if isinstance(expected, dict):
        assert fields.parse_objectives(preset("tiny", **{"data.objective": text}).data.objective) == expected
    else:
        with pytest.raises(UserError, match=f"data.objective='{text}': .*{expected}"):
            preset("tiny", **{"data.objective": text})


ROPE_SCALINGS = [
    "linear:8", "llama3", "llama3:8:1:4", "llama3:8:1:4:8192:1:1", "llama3:8:4:1:8192", "yarn:0.5:1:32:4096",
    "yarn:4:0:32:4096", "yarn:4:1:32:none", "yarn:4:1:32:inf", "yarn:4:1:32:4096:-1",
]  # fmt: skip


@pytest.mark.parametrize("text", ROPE_SCALINGS)
def test_a_rope_scaling_that_cannot_be_parsed_is_refused(text):
    """Catches frequencies of NaN, and a traceback when the model is first traced."""
    with pytest.raises(UserError, match=f"model.rope_scaling='{text}': should be llama3:FACTOR:LOW:HIGH:POSITIONS, "):
        preset("tiny", **{"model.rope_scaling": text})
    for valid in ("", "llama3:8:1:4:8192", "yarn:40:1:32:4096", "yarn:40:1:32:4096:1:0.707"):
        assert preset("tiny", **{"model.rope_scaling": valid}).model.rope_scaling == valid
