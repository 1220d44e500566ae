"""Tests of settings: their number, what they affect, and files and flags that are refused."""

import contextlib
import json

import pytest

import config
import main
import model
import sharding
from config import Config, fields, flags, preset
from utils import UserError

WRONG = None, True, -1, 2.5, float("nan"), "", "x", [], [[]], {}, {"a": []}


def one_change_each(values: dict, changed=lambda here: here):
    """Yield the JSON text of copies of nested settings, each with one group or setting that has a wrong value."""
    for name, value in values.items():
        replaced = lambda x, name=name: changed(values | {name: x})
        yield from (json.dumps(replaced(wrong)) for wrong in WRONG)
        if isinstance(value, dict):
            yield from one_change_each(value, replaced)


def test_a_file_with_one_wrong_value_is_read_or_refused(tmp_path, capsys):
    """Catches a traceback for a config.json that was edited by hand."""
    values, file = preset("tiny").to_dict(), tmp_path / "config.json"
    texts = [*one_change_each({"config": values}), *one_change_each(values)]
    for text in (*texts, "[" * 100_000, "[" * 100_000 + "]" * 100_000):
        file.write_text(text)
        with contextlib.suppress(UserError):
            flags.read_config(str(file))
    assert len(texts) > 2000


def test_a_setting_that_does_not_exist_is_refused_in_a_file(tmp_path):
    """Catches a run that silently resumes without a setting that its config.json has."""
    values = preset("tiny").to_dict()
    values["optim"]["beta1"] = 0.9
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"unknown setting optim\.beta1; "):
        main.parse(["--config", str(tmp_path / "config.json")])


@pytest.mark.parametrize("was, older, name, now", [
    ("bias", True, "bias", "feed_forward,logits"), ("bias", False, "bias", ""),
    ("sinks", True, "softmax", "sinks"), ("sinks", False, "softmax", ""),
])  # fmt: skip
def test_settings_of_an_older_run_are_read(was, older, name, now):
    """Catches a run that cannot resume because a setting was true or false, or had another name, when it began."""
    values = preset("tiny", **{f"model.{name}": now, "model.attention": "gqa"}).to_dict()
    stored = json.loads(json.dumps(values))
    del stored["model"][name]
    stored["model"][was] = older
    assert getattr(Config.from_dict(stored).model, name) == now
    assert config.first_difference(values, stored) is None


def test_the_number_of_settings_does_not_grow():
    """Catches a flag that was added without removing another; a long list of flags is hard to read."""
    settings = len(fields.flatten(Config().to_dict()))
    assert settings <= 102, f"{settings} settings: adding one means removing one, with a reason for both in the commit"


def test_every_setting_declares_what_it_affects():
    """Catches a setting that is in no list made from the declarations, or in two."""
    kinds = [config.affecting(kind) for kind in config.Affects]
    assert sorted(name for kind in kinds for name in kind) == sorted(fields.flatten(Config().to_dict()))


LEAST = {  # of each number of the model
    f"model.{name}": 0 if hint.__metadata__[0].holds(0) else 1
    for name, hint in fields.hints(config.ModelConfig).items() if getattr(hint, "__origin__", None) is int
}  # fmt: skip


@pytest.mark.parametrize("base", [{}, {"model.attention": "gqa"}, {"model.n_experts": 0}])
def test_a_model_of_the_least_size_has_no_empty_parameter(base):
    """Catches a model that trains but cannot be saved, because one of its arrays has no entries."""
    for name, least in LEAST.items():
        try:
            cfg = preset("tiny", **base | {name: least})
        except UserError:  # another setting must change with it, or it is too small
            continue
        for parameter, d in sharding.flatten_named(model.declare(cfg.model)).items():
            assert 0 not in d.shape, f"{name}={least}: {parameter} is {d.shape}"


def test_a_rotary_part_of_width_0_names_the_alternative():
    """Catches a refusal that leaves the reader without a model that has no rotary embeddings."""
    with pytest.raises(UserError, match=r"model.d_rope=0: .*; for layers without .* use model.no_rope_every=1"):
        preset("tiny", **{"model.d_rope": 0})


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
    ({"model.bias": "logits,attention"}, "model.bias=logits,attention: attention in a model with an encoder has no "),
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
    "linear", "linear:0.5", "linear:8:1", "dynamic:8", "llama3", "llama3:8:1:4", "llama3:8:1:4:8192:1:1",
    "llama3:8:4:1:8192", "yarn:0.5:1:32:4096", "yarn:4:0:32:4096", "yarn:4:1:32:none", "yarn:4:1:32:inf",
    "yarn:4:1:32:4096:-1",
]  # fmt: skip


@pytest.mark.parametrize("text", ROPE_SCALINGS)
def test_a_rope_scaling_that_cannot_be_parsed_is_refused(text):
    """Catches frequencies of NaN, and a traceback when the model is first traced."""
    with pytest.raises(UserError, match=f"model.rope_scaling='{text}': should be llama3:FACTOR:LOW:HIGH:POSITIONS, "):
        preset("tiny", **{"model.rope_scaling": text})
    every = "llama3:8:1:4:8192", "yarn:40:1:32:4096", "yarn:40:1:32:4096:1:0.707", "yarn_exact:40:1:32:4096"
    for valid in ("", "linear:8", *every):
        assert preset("tiny", **{"model.rope_scaling": valid}).model.rope_scaling == valid


WINDOWS = ["0", "5:", "5:1", "5:2:", "5:2:0", "5:2:1e4", "5:2:100:1", "five"]


@pytest.mark.parametrize("text", WINDOWS)
def test_a_window_that_cannot_be_parsed_is_refused(text):
    """Catches a window of no positions, a pattern without full layers, and a RoPE base of 0."""
    with pytest.raises(UserError, match=f"model.window='{text}': should be a number of positions, such as 4096, or "):
        preset("tiny", **{"model.window": text})
    assert fields.parse_window("5:2:30.5") == (5, 2, 30.5) and fields.parse_window("") == (0, 0, 0)


TOGETHER = [
    ({"model.window": "5:2:30", "model.rope_scaling": "yarn:4:1:32:4096"}, "window=5:2:30: YaRN scales the scores of"),
    ({"model.parallel_residual": True, "model.norm": "sandwich", "model.attention": "gqa", "model.n_experts": 0},
     "parallel_residual=True: needs norm='rms' or 'layer', but norm='sandwich'"),
]  # fmt: skip


@pytest.mark.parametrize("settings, why", TOGETHER)
def test_forms_of_layers_that_exclude_each_other_are_refused(settings, why):
    """Catches a norm that is not applied, and scores that are scaled for other frequencies."""
    with pytest.raises(UserError, match=f"model.{why}"):
        preset("tiny", **settings)


OUTERS = [  # a value of optim.outer -> what is said of it
    ("100", "should be every=STEPS, then any of lr="),
    ("every=4,steps=2", "should be every=STEPS"),
    ("every=2.5", "should be every=STEPS"),
    ("lr=0.7", "every=0: must be at least 1"),
    ("every=4,momentum=1", r"momentum=1\.0: must be at least 0 and below 1"),
    ("every=4,lr=nan", "lr=nan: must be at least 0, and finite"),
    ("every=6,fragments=4", "6 is not a multiple of 4; use every=8"),
]


@pytest.mark.parametrize("text, why", OUTERS)
def test_outer_steps_that_cannot_be_parsed_are_refused(text, why):
    """Catches a misspelled part that trains with the default, and a traceback when the step is first traced."""
    with pytest.raises(UserError, match=f"optim.outer='{text}': {why}"):
        preset("tiny", **{"optim.outer": text})
    assert fields.parse_outer("every=4,fragments=2") == (4, 0.7, 0.9, 2)


@pytest.mark.parametrize("text", ["interleave", "interleaved:", "interleaved:0", "interleaved:two", "1f1b:2", ""])
def test_a_pipeline_schedule_that_cannot_be_parsed_is_refused(text):
    """Catches chunks that a schedule ignores, and an unknown schedule that is noticed when the step is traced."""
    why = f"work.schedule='{text}': should be one of auto, gpipe, 1f1b, interleaved, zb, or interleaved:CHUNKS, such as"
    with pytest.raises(UserError, match=why):
        preset("tiny", **{"work.schedule": text})
    assert [fields.parse_pipeline(name)[1] for name in ("zb", "interleaved", "interleaved:3")] == [1, 2, 3]
