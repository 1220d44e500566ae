"""Define one weights mapping ("table") per family of Hugging Face models. `convert.py` uses it in both directions.

A row of a table maps one tensor on disk to one or more of our parameters, with a layout. A layout has one word per dim
on disk, made of our dim letters (defined in `model.py`; the parameter declarations give their sizes):

    "HK D"        two dims on disk; the first is heads times K, with K contiguous
    "H[K|U] C"    for each head, K entries of one parameter, then U of another
    "[C|R'] D"    R' stores rotary pairs next to each other, (0, 1), (2, 3), ..; our pairs are (i, i + R/2)
    "HK8' D"      the same for the first 8 of K, where our pairs are (i, i + 4); the other entries stay in place
    "D M*"        for each entry of M, one number of each parameter in turn
    {expert}      one tensor per expert; ours is a single array with the experts stacked along E
    {stack}       encoder or decoder, in a model that has both

The letters in our parameter's name determine how it is transposed, and the leading letters how it is stacked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from config import Affects, ModelConfig, affecting
from config.fields import parse_softmax, parse_window
from utils import UserError

# Tables: tensors ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    hf_name: str  # name of the tensor on disk
    layout: str  # layout on disk, in our dim letters; {rope_dims} is replaced by our setting
    parameters: tuple[str, ...]  # names of our parameters that the tensor contains
    needs: Callable[[Any], Any] | None = None  # function of our config; if it returns false, there is no such tensor
    scale: Callable[[Any], float] | None = None  # function of our config; ours is (the tensor + plus) times this factor
    stack: str = ""  # only in the layers of this stack: encoder or decoder
    plus: float = 0.0


def row(hf_name: str, layout: str, *parameters: str, needs=None, scale=None, stack="", plus=0.0) -> Row:
    return Row(hf_name, layout, parameters, needs, scale, stack, plus)


OUTSIDE = (
    row("model.embed_tokens.weight", "V D", "embedding_VD"),
    row("model.norm.weight", "D", "norm_D"),
    row("lm_head.weight", "V D", "unembedding_DV"),
)
NORMS = (
    row("input_layernorm.weight", "D", "norm_attention_D"),
    row("post_attention_layernorm.weight", "D", "norm_feed_forward_D"),
)
QK_NORMS = (
    row("self_attn.q_norm.weight", "K", "attention.norm_query_K"),
    row("self_attn.k_norm.weight", "K", "attention.norm_key_K"),
)
GROUPED_ATTENTION = (
    row("self_attn.q_proj.weight", "HK D", "attention.w_query_DHK"),
    row("self_attn.k_proj.weight", "GK D", "attention.w_key_DGK"),
    row("self_attn.v_proj.weight", "GK D", "attention.w_value_DGK"),
    row("self_attn.o_proj.weight", "D HK", "attention.w_out_HKD"),
)
_QUERY = ("attention.w_query_QHK", "attention.w_query_rotary_QHR")
LATENT_ATTENTION = (
    row("self_attn.q_proj.weight", "H[K|R'] Q", *_QUERY, needs=lambda c: not c.d_query_latent),
    row("self_attn.q_a_proj.weight", "Q D", "attention.w_down_query_DQ"),
    row("self_attn.q_a_layernorm.weight", "Q", "attention.norm_query_Q"),
    row("self_attn.q_b_proj.weight", "H[K|R'] Q", *_QUERY, needs=lambda c: c.d_query_latent),
    row("self_attn.kv_a_proj_with_mqa.weight", "[C|R'] D", "attention.w_down_kv_DC", "attention.w_key_rotary_DR"),
    row("self_attn.kv_a_layernorm.weight", "C", "attention.norm_kv_C"),
    row("self_attn.kv_b_proj.weight", "H[K|U] C", "attention.w_key_CHK", "attention.w_value_CHU"),
    row("self_attn.o_proj.weight", "D HU", "attention.w_out_HUD"),
)
SWIGLU = (
    row("mlp.gate_proj.weight", "F D", "feed_forward.w_gate_DF"),
    row("mlp.up_proj.weight", "F D", "feed_forward.w_up_DF"),
    row("mlp.down_proj.weight", "D F", "feed_forward.w_down_FD"),
)
UNGATED = SWIGLU[1:]
MIXTRAL_MOE = (
    row("block_sparse_moe.gate.weight", "E D", "feed_forward.w_router_DE"),
    row("block_sparse_moe.experts.{expert}.w1.weight", "M D", "feed_forward.w_gate_EDM"),
    row("block_sparse_moe.experts.{expert}.w3.weight", "M D", "feed_forward.w_up_EDM"),
    row("block_sparse_moe.experts.{expert}.w2.weight", "D M", "feed_forward.w_down_EMD"),
)
GPT_OSS_LAYER = (
    row("self_attn.q_proj.bias", "HK", "attention.bias_query_HK"),
    row("self_attn.k_proj.bias", "GK", "attention.bias_key_GK"),
    row("self_attn.v_proj.bias", "GK", "attention.bias_value_GK"),
    row("self_attn.o_proj.bias", "D", "attention.bias_out_D"),
    row("self_attn.sinks", "H", "attention.sink_H"),
    row("mlp.router.weight", "E D", "feed_forward.w_router_DE"),
    row("mlp.router.bias", "E", "feed_forward.bias_router_E"),
    row("mlp.experts.gate_up_proj", "E D M*", "feed_forward.w_gate_EDM", "feed_forward.w_up_EDM"),
    row("mlp.experts.gate_up_proj_bias", "E M*", "feed_forward.bias_gate_EM", "feed_forward.bias_up_EM"),
    row("mlp.experts.down_proj", "E M D", "feed_forward.w_down_EMD"),
    row("mlp.experts.down_proj_bias", "E D", "feed_forward.bias_down_ED"),
)
DEEPSEEK_MOE = (
    row("mlp.gate.weight", "E D", "feed_forward.w_router_DE"),
    row("mlp.gate.e_score_correction_bias", "E", "feed_forward.bias_E"),
    row("mlp.experts.{expert}.gate_proj.weight", "M D", "feed_forward.w_gate_EDM"),
    row("mlp.experts.{expert}.up_proj.weight", "M D", "feed_forward.w_up_EDM"),
    row("mlp.experts.{expert}.down_proj.weight", "D M", "feed_forward.w_down_EMD"),
    row("mlp.shared_experts.gate_proj.weight", "F D", "feed_forward.shared.w_gate_DF"),
    row("mlp.shared_experts.up_proj.weight", "F D", "feed_forward.shared.w_up_DF"),
    row("mlp.shared_experts.down_proj.weight", "D F", "feed_forward.shared.w_down_FD"),
)
GPTJ_OUTSIDE = (
    row("transformer.wte.weight", "V D", "embedding_VD"),
    row("transformer.ln_f.weight", "D", "norm_D"),
    row("transformer.ln_f.bias", "D", "norm_bias_D"),
    row("lm_head.weight", "V D", "unembedding_DV"),
    row("lm_head.bias", "V", "bias_V"),
)
GPTJ_LAYER = (
    row("ln_1.weight", "D", "norm_attention_D"),
    row("ln_1.bias", "D", "norm_attention_bias_D"),
    row("attn.q_proj.weight", "HK{rope_dims}' D", "attention.w_query_DHK"),
    row("attn.k_proj.weight", "GK{rope_dims}' D", "attention.w_key_DGK"),
    row("attn.v_proj.weight", "GK D", "attention.w_value_DGK"),
    row("attn.out_proj.weight", "D HK", "attention.w_out_HKD"),
    row("mlp.fc_in.weight", "F D", "feed_forward.w_up_DF"),
    row("mlp.fc_in.bias", "F", "feed_forward.bias_up_F"),
    row("mlp.fc_out.weight", "D F", "feed_forward.w_down_FD"),
    row("mlp.fc_out.bias", "D", "feed_forward.bias_down_D"),
)

# T5 doesn't divide scores by sqrt(K), which we do. A tied T5 multiplies the decoder's output by D**-0.5 instead.
T5_OUTSIDE = (
    row("shared.weight", "V D", "embedding_VD"),
    row("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "W H", "encoder.bias_WH"),
    row("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "W H", "decoder.bias_WH"),
    row("encoder.final_layer_norm.weight", "D", "encoder.norm_D"),
    row("decoder.final_layer_norm.weight", "D", "norm_D",
        scale=lambda c: c.d_model**-0.5 if c.tie_embeddings else 1.0),
    row("lm_head.weight", "V D", "unembedding_DV"),
)  # fmt: skip


def _t5_attention(name: str, ours: str) -> tuple[Row, ...]:
    return (
        row(f"{name}.q.weight", "HK D", f"{ours}.w_query_DHK", scale=lambda c: c.d_head**0.5),
        row(f"{name}.k.weight", "GK D", f"{ours}.w_key_DGK"),
        row(f"{name}.v.weight", "GK D", f"{ours}.w_value_DGK"),
        row(f"{name}.o.weight", "D HK", f"{ours}.w_out_HKD"),
    )


def _t5_feed_forward(number: int, stack: str) -> tuple[Row, ...]:
    name = f"layer.{number}.DenseReluDense"
    return (
        row(f"layer.{number}.layer_norm.weight", "D", "norm_feed_forward_D", stack=stack),
        row(f"{name}.wi_0.weight", "F D", "feed_forward.w_gate_DF", stack=stack),
        row(f"{name}.wi_1.weight", "F D", "feed_forward.w_up_DF", stack=stack),
        row(f"{name}.wo.weight", "D F", "feed_forward.w_down_FD", stack=stack),
    )


T5_LAYER = (
    row("layer.0.layer_norm.weight", "D", "norm_attention_D"),
    *_t5_attention("layer.0.SelfAttention", "attention"),
    row("layer.1.layer_norm.weight", "D", "norm_cross_D"),
    *_t5_attention("layer.1.EncDecAttention", "cross"),
    *_t5_feed_forward(1, "encoder"),
    *_t5_feed_forward(2, "decoder"),
)

# Gemma stores gains minus 1. It multiplies embeddings by sqrt(D), but not the unembedding, for which it uses the same
# table. Our table contains the factor, and the final norm the reciprocal.
GEMMA_OUTSIDE = (
    row("model.embed_tokens.weight", "V D", "embedding_VD", scale=lambda c: c.d_model**0.5),
    row("model.norm.weight", "D", "norm_D", plus=1, scale=lambda c: c.d_model**-0.5 if c.tie_embeddings else 1.0),
    row("lm_head.weight", "V D", "unembedding_DV"),
)
GEMMA_NORMS = (
    *(r._replace(plus=1.0) for r in (NORMS[0], *QK_NORMS)),
    row("post_attention_layernorm.weight", "D", "norm_after_attention_D", plus=1),
    row("pre_feedforward_layernorm.weight", "D", "norm_feed_forward_D", plus=1),
    row("post_feedforward_layernorm.weight", "D", "norm_after_feed_forward_D", plus=1),
)

# Tables: settings -----------------------------------------------------------------------------------------------------

REQUIRED = object()


class Setting(NamedTuple):
    hf_name: str  # name in config.json; two names: a pair; "": it has no such setting, and `absent` computes ours
    field: str  # field of our config
    absent: Any = REQUIRED  # our value if the setting is null or missing, or a function of config.json
    to_ours: Callable[[Any], Any] = lambda value: value
    to_hf: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Family:
    """The table of one family of models. "HF" settings are those in Hugging Face's config.json."""

    architecture: str  # transformers class that loads it
    settings: tuple[Setting, ...]
    fixed_fields: dict[str, Any]  # our fields that HF has no setting for, with the only supported value
    positive_fields: tuple[str, ...]  # our fields that cannot be 0, because HF cannot leave that part out
    initial_fields: dict[str, Any]  # values that from-hf gives to our training-only fields
    hf_fixed: dict[str, Any]  # HF settings that we have no field for, with the only supported value
    hf_defaults: dict[str, Any]  # defaults of transformers for settings in hf_fixed, if they are unsupported values
    outside: tuple[Row, ...]  # tensors outside the layers
    layer: tuple[Row, ...]  # tensors of a layer; rows that a layer lacks are skipped
    layer_name: str = "model.layers.{layer}."

    @property
    def known(self) -> set[str]:
        """The HF settings that may be in a config.json."""
        return {name for s in self.settings for name in s.hf_name.split()} | {*self.hf_fixed} | PASSED_THROUGH | IGNORED


# Numbers in `rope_scaling` of config.json, in the order of our setting, and their defaults in transformers.
ROPE_NUMBERS = {
    "llama3": {"factor": REQUIRED, "low_freq_factor": REQUIRED, "high_freq_factor": REQUIRED,
               "original_max_position_embeddings": REQUIRED},
    "yarn": {"factor": REQUIRED, "beta_slow": 1, "beta_fast": 32, "original_max_position_embeddings": REQUIRED,
             "mscale": 0, "mscale_all_dim": 0},
    "linear": {"factor": REQUIRED},
}  # fmt: skip


def rope_scaling_from_hf(rope: dict) -> str:
    """Return model.rope_scaling for `rope_scaling` of config.json. Raises: UserError if our model does not have it."""
    given = {name: value for name, value in rope.items() if value is not None}
    kind = given.pop("rope_type", given.pop("type", None))
    if kind == "default" and not given:
        return ""
    names = ROPE_NUMBERS.get(kind, {}) if isinstance(kind, str) else {}
    numbers = [given.pop(name, default) for name, default in names.items()]
    valid = all(isinstance(x, int | float) and abs(x) < 1e300 for x in numbers)  # not REQUIRED
    is_exact = kind == "yarn" and given == {"truncate": False}
    if not names or not valid or not (is_exact or given in ({}, {"truncate": True})):
        supported = " or ".join(f"{name} with {', '.join(ROPE_NUMBERS[name])}" for name in ROPE_NUMBERS)
        raise UserError(f"config.json: rope_scaling={rope!r} is not supported; it must be {supported}")
    while numbers and not numbers[-1]:
        numbers.pop()
    return ":".join([kind + "_exact" * is_exact, *(str(int(x) if x == int(x) else x) for x in numbers)])


def rope_scaling_to_hf(text: str) -> dict | None:
    name, *numbers = text.split(":")
    kind, exact = name.removesuffix("_exact"), {"truncate": False} if name.endswith("_exact") else {}
    names = zip(ROPE_NUMBERS.get(kind, {}), numbers, strict=False)  # the last two numbers of yarn may be absent
    return {"rope_type": kind} | exact | {name: float(x) for name, x in names} if text else None


# Settings that do not change what the model computes. from-hf stores them, so that to-hf can write them again.
PASSED_THROUGH = set(
    "_name_or_path use_cache initializer_range bos_token_id eos_token_id pad_token_id max_position_embeddings "
    "output_router_logits auto_map aux_loss_alpha seq_aux ep_size qk_head_dim n_positions n_ctx gradient_checkpointing "
    "task_specific_params tokenizer_class attn_pdrop embd_pdrop resid_pdrop summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj dropout_rate classifier_dropout initializer_factor "
    "decoder_start_token_id output_past max_window_layers layer_types cache_implementation "
    "initial_context_length".split()
)
IGNORED = {"architectures", "model_type", "transformers_version", "torch_dtype", "dtype"}
_COMMON = (
    Setting("vocab_size", "vocab_size"),
    Setting("hidden_size", "d_model"),
    Setting("num_hidden_layers", "n_layers"),
    Setting("num_attention_heads", "n_heads"),
    Setting("rms_norm_eps", "norm_eps"),
    Setting("tie_word_embeddings", "tie_embeddings", False),
    Setting("rope_scaling", "rope_scaling", "", rope_scaling_from_hf, rope_scaling_to_hf),
)
_HEAD_DIM = Setting("head_dim", "d_head", lambda hf: hf["hidden_size"] // hf["num_attention_heads"])
# Published files of Mistral 7B from version 0.2 on, and of Mixtral, have null.
_WINDOW = Setting("sliding_window", "window", "", str, lambda text: parse_window(text).size or None)
_colons = lambda values: ":".join(str(int(x) if x == int(x) else x) for x in values)
_GEMMA_WINDOW = Setting(
    "sliding_window sliding_window_pattern rope_local_base_freq", "window", (4096, 6, 10_000.0), _colons, parse_window
)
_GEMMA_CAPS = Setting(
    "attn_logit_softcapping final_logit_softcapping", "softmax", (50.0, 30.0),
    lambda caps: "cap:" + _colons(cap or 0 for cap in caps) if any(caps) else "",
    lambda text: tuple(cap or None for cap in parse_softmax(text)[1:]))  # fmt: skip
_GEMMA = (
    Setting("hidden_size", "d_model"), Setting("num_hidden_layers", "n_layers"),
    Setting("num_attention_heads", "n_heads", 8), Setting("num_key_value_heads", "n_kv_heads", 4),
    Setting("head_dim", "d_head", 256), Setting("query_pre_attn_scalar", "d_head", 256),
    Setting("intermediate_size", "d_ff"), Setting("rms_norm_eps", "norm_eps", 1e-6),
    Setting("tie_word_embeddings", "tie_embeddings", True), _COMMON[-1],
)  # fmt: skip
_GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "attention_dropout": 0.0, "quantization_config": None,
                "attention_bias": False, "use_bidirectional_attention": False}  # fmt: skip
_HF_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "quantization_config": None}
_UNSUPPORTED_FIELDS = affecting(Affects.OWN, group="model") | {"capacity_factor": 0.0, "window": "", "softmax": ""}
_DECODER_ONLY = _UNSUPPORTED_FIELDS | {"encoder_layers": 0}
_FIXED_FIELDS = _DECODER_ONLY | dict(
    rope_dims=0, qk_norm=False, activation="swiglu", parallel_residual=False, bias="", norm="rms"
)
_WINDOWED = {name: value for name, value in _FIXED_FIELDS.items() if name != "window"}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        (*_COMMON, _HEAD_DIM, Setting("intermediate_size", "d_ff"), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("num_key_value_heads", "n_kv_heads", lambda hf: hf["num_attention_heads"])),
        _FIXED_FIELDS | {"attention": "gqa", "n_experts": 0, "dense_prefix": 0}, (), {},
        _HF_FIXED | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}, {},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *SWIGLU)),
    "mistral": Family(
        "MistralForCausalLM",
        (*_COMMON, _HEAD_DIM, _WINDOW._replace(absent=lambda hf: "" if "sliding_window" in hf else "4096"),
         Setting("intermediate_size", "d_ff"),
         Setting("rope_theta", "rope_theta", 10_000.0), Setting("num_key_value_heads", "n_kv_heads")),
        _WINDOWED | {"attention": "gqa", "n_experts": 0, "dense_prefix": 0}, (), {},
        _HF_FIXED, {}, OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *SWIGLU)),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (*_COMMON, Setting("head_dim", "d_head", 128), Setting("intermediate_size", "d_ff"),
         Setting("rope_theta", "rope_theta", 10_000.0), Setting("num_key_value_heads", "n_kv_heads", 32)),
        _FIXED_FIELDS | {"attention": "gqa", "qk_norm": True, "n_experts": 0, "dense_prefix": 0}, (), {},
        _HF_FIXED | {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}, {},
        OUTSIDE, (*NORMS, *QK_NORMS, *GROUPED_ATTENTION, *SWIGLU)),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (*_COMMON, Setting("head_dim", "d_head", 128), Setting("intermediate_size", "d_ff", 6144),
         Setting("moe_intermediate_size", "d_expert", 768), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("num_key_value_heads", "n_kv_heads", 4), Setting("num_experts", "n_experts", 128),
         Setting("num_experts_per_tok", "top_k", 8), Setting("norm_topk_prob", "normalize_gates", False),
         Setting("router_aux_loss_coef", "balance_loss", 0.001)),
        _FIXED_FIELDS | {"attention": "gqa", "qk_norm": True, "router": "softmax", "moe_every": 1, "dense_prefix": 0,
                       "n_shared": 0, "routed_scaling": 1.0, "balance_rate": 0.0, "expert_groups": (1, 1)},
        ("n_experts",), {},
        _HF_FIXED | {"attention_bias": False, "use_sliding_window": False, "sliding_window": None,
                     "decoder_sparse_step": 1, "mlp_only_layers": []}, {},
        OUTSIDE, (*NORMS, *QK_NORMS, *GROUPED_ATTENTION, *DEEPSEEK_MOE)),
    "mixtral": Family(
        "MixtralForCausalLM",
        (*_COMMON, _HEAD_DIM, _WINDOW, Setting("intermediate_size", "d_expert"),
         Setting("rope_theta", "rope_theta", 1e6), Setting("num_key_value_heads", "n_kv_heads"),
         Setting("num_local_experts", "n_experts"),
         Setting("num_experts_per_tok", "top_k"), Setting("router_aux_loss_coef", "balance_loss", 0.001)),
        _WINDOWED | {"attention": "gqa", "router": "softmax", "moe_every": 1, "dense_prefix": 0, "n_shared": 0,
                       "normalize_gates": True, "routed_scaling": 1.0, "balance_rate": 0.0, "expert_groups": (1, 1)},
        (), {}, _HF_FIXED | {"router_jitter_noise": 0.0}, {},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *MIXTRAL_MOE)),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (*_COMMON, _HEAD_DIM, _WINDOW._replace(absent=lambda hf: "" if "sliding_window" in hf else "128:2",
                                               to_ours=lambda size: f"{size}:2"),
         Setting("intermediate_size", "d_expert"), Setting("rope_theta", "rope_theta", 150_000.0),
         Setting("num_key_value_heads", "n_kv_heads"), Setting("num_local_experts", "n_experts"),
         Setting("num_experts_per_tok", "top_k", lambda hf: hf["experts_per_token"]),
         Setting("experts_per_token", "top_k", lambda hf: hf["num_experts_per_tok"]),
         Setting("router_aux_loss_coef", "balance_loss", 0.001)),
        _WINDOWED | {"attention": "gqa", "router": "softmax", "moe_every": 1, "dense_prefix": 0, "n_shared": 0,
                       "normalize_gates": True, "routed_scaling": 1.0, "balance_rate": 0.0, "expert_groups": (1, 1),
                       "softmax": "sinks", "activation": "swiglu_clamped", "bias": "attention,experts"},
        ("n_experts", "window"), {},
        _HF_FIXED | {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}, {},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *GPT_OSS_LAYER)),
    "arcee": Family(
        "ArceeForCausalLM",
        (*_COMMON, _HEAD_DIM, Setting("intermediate_size", "d_ff"), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("num_key_value_heads", "n_kv_heads", lambda hf: hf["num_attention_heads"])),
        _FIXED_FIELDS | {"attention": "gqa", "activation": "gelu", "n_experts": 0, "dense_prefix": 0}, (), {},
        _HF_FIXED | {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False, "mlp_bias": False},
        {"hidden_act": "relu2"},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *UNGATED)),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        (Setting("vocab_size", "vocab_size", 256_000), *_GEMMA, Setting("rope_theta", "rope_theta", 10_000.0),
         _WINDOW._replace(absent=lambda hf: "" if "sliding_window" in hf else "4096:2",
                          to_ours=lambda size: f"{size}:2"), _GEMMA_CAPS),
        {name: value for name, value in _WINDOWED.items() if name != "softmax"} | {
            "attention": "gqa", "activation": "geglu", "norm": "sandwich", "n_experts": 0, "dense_prefix": 0},
        ("window",), {}, _GEMMA_FIXED | {"hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": None}, {},
        GEMMA_OUTSIDE, (*GEMMA_NORMS, *GROUPED_ATTENTION, *SWIGLU)),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (Setting("vocab_size", "vocab_size", 262_208), *_GEMMA, Setting("rope_theta", "rope_theta", 1e6),
         _GEMMA_WINDOW),
        _WINDOWED | {"attention": "gqa", "qk_norm": True, "activation": "geglu", "norm": "sandwich", "n_experts": 0,
                     "dense_prefix": 0}, ("window",), {},
        _GEMMA_FIXED | {"attn_logit_softcapping": None, "final_logit_softcapping": None}, {},
        GEMMA_OUTSIDE, (*GEMMA_NORMS, *GROUPED_ATTENTION, *SWIGLU)),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (*_COMMON, Setting("num_key_value_heads", "n_heads"), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("q_lora_rank", "d_query_latent", 0, to_hf=lambda size: size or None),
         Setting("kv_lora_rank", "d_kv_latent"),
         Setting("qk_nope_head_dim", "d_head"), Setting("qk_rope_head_dim", "d_rope"), Setting("v_head_dim", "d_value"),
         Setting("head_dim", "d_rope", lambda hf: hf["qk_rope_head_dim"]),
         Setting("intermediate_size", "d_ff"), Setting("first_k_dense_replace", "dense_prefix"),
         Setting("n_routed_experts", "n_experts"), Setting("num_experts_per_tok", "top_k"),
         Setting("moe_intermediate_size", "d_expert"), Setting("n_shared_experts", "n_shared"),
         Setting("norm_topk_prob", "normalize_gates", True), Setting("routed_scaling_factor", "routed_scaling"),
         Setting("n_group topk_group", "expert_groups", (8, 4))),
        # norm_eps: transformers always normalizes the latents with 1e-6, and our model has a single epsilon.
        _FIXED_FIELDS | {"attention": "mla", "router": "sigmoid", "moe_every": 1, "norm_eps": 1e-6},
        ("n_experts", "n_shared", "balance_rate"), {"balance_rate": 0.001},
        _HF_FIXED | {"attention_bias": False, "rope_interleave": True, "scoring_func": "sigmoid",
                     "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
                     "pretraining_tp": 1}, {},
        OUTSIDE, (*NORMS, *LATENT_ATTENTION, *SWIGLU, *DEEPSEEK_MOE)),
    "gptj": Family(
        "GPTJForCausalLM",
        (Setting("vocab_size", "vocab_size"), Setting("n_embd", "d_model"), Setting("n_layer", "n_layers"),
         Setting("n_head", "n_heads"), Setting("", "n_kv_heads", lambda hf: hf["n_head"]),
         Setting("", "d_head", lambda hf: hf["n_embd"] // hf["n_head"]), Setting("rotary_dim", "rope_dims"),
         Setting("layer_norm_epsilon", "norm_eps", 1e-5), Setting("n_inner", "d_ff", lambda hf: 4 * hf["n_embd"])),
        _DECODER_ONLY | {"attention": "gqa", "n_experts": 0, "dense_prefix": 0, "activation": "gelu",
                  "norm": "layer", "parallel_residual": True, "bias": "feed_forward,logits", "rope_theta": 10_000.0,
                  "rope_scaling": "", "qk_norm": False, "tie_embeddings": False},
        ("rope_dims",), {},
        {"activation_function": "gelu_new", "tie_word_embeddings": False, "rotary": True, "scale_attn_weights": True,
         "quantization_config": None}, {},
        GPTJ_OUTSIDE, GPTJ_LAYER, "transformer.h.{layer}."),
    "t5": Family(
        "T5ForConditionalGeneration",
        (Setting("vocab_size", "vocab_size"), Setting("d_model", "d_model"), Setting("d_kv", "d_head"),
         Setting("d_ff", "d_ff"), Setting("num_layers", "encoder_layers"),
         Setting("num_decoder_layers", "n_layers", lambda hf: hf["num_layers"]), Setting("num_heads", "n_heads"),
         Setting("", "n_kv_heads", lambda hf: hf["num_heads"]), Setting("layer_norm_epsilon", "norm_eps", 1e-6),
         Setting("tie_word_embeddings", "tie_embeddings", True)),
        _UNSUPPORTED_FIELDS | {"attention": "gqa", "n_experts": 0, "dense_prefix": 0, "activation": "geglu",
                  "norm": "rms", "parallel_residual": False, "bias": "",
                  "rope_scaling": "", "qk_norm": False},
        ("encoder_layers",), {},
        {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new",
         "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "is_encoder_decoder": True,
         "is_decoder": False, "quantization_config": None},
        {"feed_forward_proj": "relu"},
        T5_OUTSIDE, T5_LAYER, "{stack}.block.{layer}."),
}  # fmt: skip


def register(kind: str, family: Family) -> None:
    """Add your own table. `kind` is the model_type in config.json.

    Raises: UserError if the name is taken.

    For example, a fork of Llama with two renamed tensors; `--table FILE.py` runs such a file before converting:

    >>> import dataclasses
    >>> from weights.layouts import pieces
    >>> outside = (*OUTSIDE[:2], row("unembed.weight", "V D", "unembedding_DV"))
    >>> register("fork", dataclasses.replace(FAMILIES["llama"], outside=outside, layer_name="decoder.{layer}."))
    >>> pieces(ModelConfig(attention="gqa"), "fork")[3].hf_name
    'decoder.0.input_layernorm.weight'
    """
    if kind in FAMILIES:
        raise UserError(f"a mapping for model_type={kind!r} exists; choose another name; known: {', '.join(FAMILIES)}")
    FAMILIES[kind] = family


def family_of(c: ModelConfig) -> str:
    """Return the default family for a config. It is used if neither --family nor the run's config.json names one."""
    if c.encoder_layers:
        return "t5"
    if c.parallel_residual:
        return "gptj"
    if c.attention == "mla":
        return "deepseek_v3"
    if c.norm == "sandwich":
        return "gemma3_text" if c.qk_norm else "gemma2"
    if c.qk_norm:
        return "qwen3_moe" if c.n_experts else "qwen3"
    if c.n_experts:
        return "gpt_oss" if c.softmax == "sinks" else "mixtral"
    if c.window:
        return "mistral"
    return "llama" if c.activation == "swiglu" else "arcee"
