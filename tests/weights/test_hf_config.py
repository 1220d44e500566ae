"""A config.json of Hugging Face becomes our settings and back, or is refused by name."""

import dataclasses

import pytest

from config import ModelConfig, preset
from tests.weights.test_convert import FIXTURES, tiny
from utils import UserError
from weights import folders, init_from, layouts
from weights.families import FAMILIES
from weights.hf_config import config_from_hf, config_to_hf

UNSUPPORTED = [
    ("llama", "attention_bias", True), ("llama", "mlp_bias", True), ("llama", "hidden_act", "gelu"),
    ("mixtral", "rope_scaling", {"type": "dynamic", "factor": 2.0}), ("llama", "quantization_config", {"bits": 8}),
    ("llama", "rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
    ("llama", "rope_parameters", {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
    ("llama", "model_type", "lama"), ("llama", "sliding_window", 4096), ("llama", "window", 7),
    ("arcee", "sliding_window", 4096), ("mixtral", "router_jitter_noise", 0.1), ("mistral", "attention_bias", True),
    ("deepseek_v3", "n_group", 3), ("deepseek_v3", "topk_group", 5), ("deepseek_v3", "num_experts_per_tok", 1),
    ("mixtral", "num_experts_per_tok", 1), ("gemma3_text", "query_pre_attn_scalar", 12),
    ("gemma2", "query_pre_attn_scalar", 12), ("gemma2", "layer_types", ["sliding_attention"] * 4),
    ("gemma2", "sliding_window", None),
    ("gemma2", "use_bidirectional_attention", True), ("gemma3_text", "final_logit_softcapping", 30.0),
    ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma3_text", "layer_types", ["sliding_attention"] * 2 + ["full_attention"] * 2),
    ("gpt_oss", "attention_bias", False), ("gpt_oss", "swiglu_limit", 5.0), ("gpt_oss", "swiglu_alpha", 1.5),
    ("gpt_oss", "layer_types", ["full_attention", "sliding_attention"]), ("gpt_oss", "experts_per_token", 2),
    ("gpt_oss", "layer_types", ["sliding_attention"] * 4), ("gpt_oss", "quantization_config", {"quant_method": "awq"}),
    ("deepseek_v3", "rope_interleave", False), ("deepseek_v3", "rms_norm_eps", 1e-5),
    ("deepseek_v3", "num_key_value_heads", 2),
    ("deepseek_v3", "quantization_config", {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    ("deepseek_v3", "n_shared_experts", 0), ("deepseek_v3", "scoring_func", "softmax"),
    ("qwen3", "use_sliding_window", True), ("qwen3", "attention_bias", True),
    ("qwen3", "layer_types", ["sliding_attention"]), ("mixtral", "rope_scaling", {"rope_type": "yarn"}),
    ("qwen3_moe", "decoder_sparse_step", 2), ("qwen3_moe", "mlp_only_layers", [0]),
    ("arcee", "hidden_act", "relu2"), ("arcee", "mlp_bias", True),
    ("gptj", "activation_function", "relu"), ("gptj", "tie_word_embeddings", True), ("gptj", "rotary_dim", 16),
    ("t5", "feed_forward_proj", "relu"), ("t5", "relative_attention_num_buckets", 64), ("t5", "is_decoder", True),
    ("t5", "relative_attention_max_distance", 256),
]  # fmt: skip


@pytest.mark.parametrize("family, name, value", UNSUPPORTED)
def test_what_our_model_cannot_do_is_refused_by_name(family, name, value):
    """Catches a setting that changes the function and is ignored: the logits would silently be wrong."""
    hf = folders.Folder(FIXTURES / family).json("config.json") | {name: value}
    ours = {
        "rotary_dim": "rope_dims",
        "num_experts_per_tok": "top_k",
        "rope_parameters": "rope_scaling",
        "n_group": "expert_groups",
        "topk_group": "expert_groups",
    }
    ours = ours.get(name, name)
    with pytest.raises(UserError, match=rf"{ours}=.*{str(value)[-4:].strip('})')}"):
        config_from_hf(hf)


@pytest.mark.parametrize(
    "family, name",
    [("llama", "hidden_size"), ("deepseek_v3", "n_group"), ("gptj", "rotary_dim"), ("t5", "feed_forward_proj")],
)
def test_a_missing_setting_has_the_library_s_default(family, name):
    """Catches our default in place of the library's: a missing n_group means 8 there."""
    hf = folders.Folder(FIXTURES / family).json("config.json")
    del hf[name]
    with pytest.raises(UserError, match=name.replace("n_group", r"expert_groups=\(8, ")):
        config_from_hf(hf)


@pytest.mark.parametrize(
    "setting, value",
    [("no_rope_every", 3), ("moe_every", 2), ("n_shared", 0), ("balance_rate", 0.0), ("activation", "gelu"),
     ("norm_eps", 1e-5), ("capacity_factor", 1.5), ("top_k", 1)],
)  # fmt: skip
def test_what_the_library_s_model_cannot_do_is_refused_by_name(setting, value):
    """Catches a folder that transformers loads and computes differently."""
    c = tiny(**{f"model.{setting}": value, "model.n_layers": 5}).model
    with pytest.raises(UserError, match=rf"\(deepseek_v3\) cannot express .*model\.{setting}={value!r}"):
        config_to_hf(c)


FITS = {"laptop": "deepseek_v3", "dense_124m": "arcee", "llama3_8b": "llama", "mixtral_8x7b": "mixtral",
        "deepseek_v3": "deepseek_v3", "t5_base": "t5"}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_a_preset_has_a_class_in_transformers(name):
    """Catches a preset that `to-hf` could write before, and no longer can."""
    c = preset(name).model
    assert config_to_hf(c)["model_type"] == FITS[name] and layouts.pieces(c)


DENSE_ONLY = ("d_rope d_value d_query_latent d_kv_latent top_k n_shared d_expert moe_every router normalize_gates "
              "routed_scaling expert_groups")  # fmt: skip
UNUSED = {"llama": DENSE_ONLY, "arcee": DENSE_ONLY, "qwen3": DENSE_ONLY,
          "qwen3_moe": "d_rope d_value d_query_latent d_kv_latent",
          "mistral": DENSE_ONLY,
          "mixtral": "d_rope d_value d_query_latent d_kv_latent d_ff",
          "gpt_oss": "d_rope d_value d_query_latent d_kv_latent d_ff",
          "deepseek_v3": "n_kv_heads",
          "gptj": DENSE_ONLY,
          "t5": DENSE_ONLY + " rope_dims rope_theta"}  # fmt: skip


@pytest.mark.parametrize("family", UNUSED)
def test_every_setting_of_ours_is_known_to_a_family(family):
    """Catches a new setting that changes the model and that to-hf ignores. Each setting must map to one of Hugging
    Face's, be fixed to an equivalent value, affect only training, or be unused in a model of this family."""
    known = (
        {s.field for s in FAMILIES[family].settings} | set(FAMILIES[family].fixed_fields) | set(init_from.KEPT_SETTINGS)
    )
    assert known | set(UNUSED[family].split()) == {f.name for f in dataclasses.fields(ModelConfig)}


def test_scaled_frequencies_in_layers_with_a_window_are_refused():
    """Catches a Gemma whose windows were trained with other frequencies, which our model does not have."""
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    hf = folders.Folder(FIXTURES / "gemma3_text").json("config.json") | {"rope_parameters": rope}
    with pytest.raises(UserError, match=r"rope_parameters=.*2.0}} is not supported; layers with a window must"):
        config_from_hf(hf)


@pytest.mark.parametrize("window, size", [("", None), ("4096", 4096)])
def test_a_window_round_trips(window, size):
    """Catches a window that is lost or stored as text, and a model without windows that gets the library's default."""
    c = dataclasses.replace(preset("llama3_8b").model, rope_scaling="", window=window)
    for model, kind in ((c, "mistral"), (dataclasses.replace(preset("mixtral_8x7b").model, window=window), "mixtral")):
        hf = config_to_hf(model, kind=kind)
        assert "sliding_window" in hf and hf["sliding_window"] == size
        assert config_from_hf(hf).window == window
    assert config_to_hf(c)["model_type"] == ("mistral" if window else "llama")
    del hf["sliding_window"]
    assert config_from_hf(hf).window == ""  # transformers' default for Mixtral, but not for Mistral
    mistral = {name: x for name, x in config_to_hf(c, kind="mistral").items() if name != "sliding_window"}
    assert config_from_hf(mistral).window == "4096"


@pytest.mark.parametrize("attention, logits, softmax", [
    (50.0, 30.0, "cap:50:30"), (None, 30.0, "cap:0:30"), (2.5, None, "cap:2.5:0"), (None, None, "")
])  # fmt: skip
def test_caps_round_trip(attention, logits, softmax):
    """Catches a cap that gets transformers' default because it is null in the file, and caps that change places."""
    file = folders.Folder(FIXTURES / "gemma2").json("config.json")
    caps = {"attn_logit_softcapping": attention, "final_logit_softcapping": logits}
    c = config_from_hf(file | caps)
    assert c.softmax == softmax and config_to_hf(c)["model_type"] == "gemma2"
    assert config_from_hf(file | caps | {"use_bidirectional_attention": False}) == c  # the same as null
    assert {name: config_to_hf(c)[name] for name in caps} == caps
    assert config_from_hf(config_to_hf(c)) == c
    assert config_from_hf({name: x for name, x in file.items() if name not in caps}).softmax == "cap:50:30"


def test_gemma_from_older_files_equals_newer_ones():
    """Catches a base of the windows, or a pattern of layers, that is read from only one of the two forms."""
    new = folders.Folder(FIXTURES / "gemma3_text").json("config.json")
    c = config_from_hf(new)
    assert (c.window, c.rope_theta, c.rope_scaling) == ("7:3:300", 900.0, "linear:8")
    old = config_to_hf(c)
    assert not {"layer_types", "rope_parameters"} & {*old}
    assert (old["rope_theta"], old["rope_local_base_freq"], old["sliding_window_pattern"]) == (900.0, 300.0, 3)
    assert config_from_hf(old) == c
    assert config_from_hf({name: x for name, x in new.items() if "pattern" not in name}) == c  # layer_types remain
    with pytest.raises(UserError, match=r"model.window='7:3' \(it must have the form 1024:6:10000\)"):
        config_to_hf(dataclasses.replace(c, window="7:3"))


@pytest.mark.parametrize("kind, window", [
    ("mistral", "1024:6"), ("mixtral", "1024:6"), ("llama", "1024"), ("gpt_oss", "1024"), ("gpt_oss", "1024:6"),
    ("gpt_oss", ""),
])  # fmt: skip
def test_a_window_that_the_library_cannot_express_is_refused(kind, window):
    """Catches layers without a window that get one in transformers, and windows that are dropped."""
    c = preset("mixtral_8x7b" if kind in ("mixtral", "gpt_oss") else "llama3_8b").model
    with pytest.raises(UserError, match=f"cannot express .*model.window='{window}'"):
        config_to_hf(dataclasses.replace(c, window=window), kind=kind)


def test_a_softmax_that_the_library_cannot_express_is_refused():
    """Catches sinks that are dropped because the family has caps."""
    c = config_from_hf(folders.Folder(FIXTURES / "gemma2").json("config.json"))
    with pytest.raises(UserError, match=r"\(gemma2\) cannot express model.softmax='sinks' \(it would become ''\)"):
        config_to_hf(dataclasses.replace(c, softmax="sinks"))


def test_biases_may_be_listed_in_any_order():
    """Catches a gpt-oss that is refused because its biases are listed in another order than in our table."""
    c = config_from_hf(folders.Folder(FIXTURES / "gpt_oss").json("config.json"))
    parts = c.bias.split(",")
    assert config_to_hf(dataclasses.replace(c, bias=",".join(parts[::-1]))) == config_to_hf(c) and len(parts) == 2
    with pytest.raises(UserError, match=r"model.bias='experts' \(only 'attention,experts' is supported\)"):
        config_to_hf(dataclasses.replace(c, bias="experts"))


def test_unnormalized_gates_round_trip():
    """Catches gates that only transformers renormalizes."""
    c = tiny(**{"model.normalize_gates": False, "model.top_k": 1}).model
    hf = config_to_hf(c)
    assert hf["norm_topk_prob"] is False and config_from_hf(hf).normalize_gates is False
