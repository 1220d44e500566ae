"""Families of models on Hugging Face: one table each, read in both directions by `convert.py`.

A row of a table says: this tensor on disk holds these parameters of ours, laid out so. A layout has one word a dim on
disk, made of our letters (the legend of `model.py`; their sizes come from the declarations):

    "HK D"        two dims on disk; the first runs over heads, and within a head over K
    "H[K|U] C"    within a head, K entries of one parameter, then U of another
    "[C|R'] D"    R' has the rotary pairs as neighbours, (0, 1), (2, 3), ..; ours are (i, i + R/2): a permutation
    "HK8' D"      .. of the first 8 of K, of which pairs are (i, i + 4) in ours; the rest lie as they are
    {expert}      there is one tensor an expert; ours are stacked along E

How ours is transposed follows from its own letters, and how it is stacked from its leading ones.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import sharding
from config import Affects, ModelConfig, affecting
from errors import UserError, nearest
from model import declare

# Tables: tensors ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    hf_name: str  # name of the tensor on disk
    layout: str  # of that tensor, in our letters; {rope_dims} is our setting
    parameters: tuple[str, ...]  # the parameters it holds
    needs: Callable[[Any], Any] | None = None  # of our config; where it is false there is no such tensor


def row(hf_name: str, layout: str, *parameters: str, needs=None) -> Row:
    return Row(hf_name, layout, parameters, needs)


OUTSIDE = (
    row("model.embed_tokens.weight", "V D", "embedding_VD"),
    row("model.norm.weight", "D", "norm_D"),
    row("lm_head.weight", "V D", "unembedding_DV"),
)
NORMS = (
    row("input_layernorm.weight", "D", "norm_attention_D"),
    row("post_attention_layernorm.weight", "D", "norm_feed_forward_D"),
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

# Tables: settings -----------------------------------------------------------------------------------------------------

REQUIRED = object()


class Setting(NamedTuple):
    hf_name: str  # name in config.json; "": there is none, and ours follows from others, as `absent` says
    field: str  # field of our config
    absent: Any = REQUIRED  # what null or leaving it out means: a value, or a function of config.json
    zero_is_null: bool = False  # our 0 is their null


@dataclass(frozen=True)
class Family:
    """What converts one kind of model."""

    architecture: str  # class that loads it
    settings: tuple[Setting, ...]
    fixed_fields: dict[str, Any]  # fields of ours for which they have no setting
    positive_fields: tuple[str, ...]  # fields of ours that may not be 0: they have no way to leave that part out
    initial_fields: dict[str, Any]  # fields of ours that steer training only: what from-hf sets
    hf_fixed: dict[str, Any]  # settings of theirs for which we have none; absent means this value too
    hf_defaults: dict[str, Any]  # .. except these
    outside: tuple[Row, ...]  # tensors outside the layers
    layer: tuple[Row, ...]  # tensors of a layer; those that a layer does not have are passed over
    layer_name: str = "model.layers.{layer}."


# Settings that do not change the function: training, generation, bookkeeping. Kept, for the way back.
PASSED_THROUGH = set(
    "_name_or_path use_cache initializer_range bos_token_id eos_token_id pad_token_id max_position_embeddings "
    "output_router_logits auto_map aux_loss_alpha seq_aux ep_size qk_head_dim n_positions n_ctx gradient_checkpointing "
    "task_specific_params tokenizer_class attn_pdrop embd_pdrop resid_pdrop summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj".split()
)
IGNORED = {"architectures", "model_type", "transformers_version", "torch_dtype", "dtype"}
_COMMON = (
    Setting("vocab_size", "vocab_size"),
    Setting("hidden_size", "d_model"),
    Setting("num_hidden_layers", "n_layers"),
    Setting("num_attention_heads", "n_heads"),
    Setting("rms_norm_eps", "norm_eps"),
    Setting("tie_word_embeddings", "tie_embeddings", False),
)
_HEAD_DIM = Setting("head_dim", "d_head", lambda hf: hf["hidden_size"] // hf["num_attention_heads"])
_HF_FIXED = {"hidden_act": "silu", "attention_dropout": 0.0, "rope_scaling": None, "quantization_config": None}
_UNSUPPORTED_FIELDS = affecting(Affects.OWN, group="model") | {"capacity_factor": 0.0}
_FIXED_FIELDS = _UNSUPPORTED_FIELDS | dict(
    rope_dims=0, activation="swiglu", parallel_residual=False, bias=False, norm="rms"
)

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        (*_COMMON, _HEAD_DIM, Setting("intermediate_size", "d_ff"), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("num_key_value_heads", "n_kv_heads", lambda hf: hf["num_attention_heads"])),
        _FIXED_FIELDS | {"attention": "gqa", "n_experts": 0, "dense_prefix": 0}, (), {},
        _HF_FIXED | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}, {},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *SWIGLU)),
    "mixtral": Family(
        "MixtralForCausalLM",
        (*_COMMON, _HEAD_DIM, Setting("intermediate_size", "d_expert"), Setting("rope_theta", "rope_theta", 1e6),
         Setting("num_key_value_heads", "n_kv_heads"), Setting("num_local_experts", "n_experts"),
         Setting("num_experts_per_tok", "top_k"), Setting("router_aux_loss_coef", "balance_loss", 0.001)),
        _FIXED_FIELDS | {"attention": "gqa", "router": "softmax", "moe_every": 1, "dense_prefix": 0, "n_shared": 0,
                       "normalize_gates": True, "routed_scaling": 1.0, "balance_rate": 0.0}, (), {},
        _HF_FIXED | {"sliding_window": None, "router_jitter_noise": 0.0}, {},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *MIXTRAL_MOE)),
    "arcee": Family(
        "ArceeForCausalLM",
        (*_COMMON, _HEAD_DIM, Setting("intermediate_size", "d_ff"), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("num_key_value_heads", "n_kv_heads", lambda hf: hf["num_attention_heads"])),
        _FIXED_FIELDS | {"attention": "gqa", "activation": "gelu", "n_experts": 0, "dense_prefix": 0}, (), {},
        _HF_FIXED | {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False, "mlp_bias": False},
        {"hidden_act": "relu2"},
        OUTSIDE, (*NORMS, *GROUPED_ATTENTION, *UNGATED)),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (*_COMMON, Setting("num_key_value_heads", "n_heads"), Setting("rope_theta", "rope_theta", 10_000.0),
         Setting("q_lora_rank", "d_query_latent", 0, zero_is_null=True), Setting("kv_lora_rank", "d_kv_latent"),
         Setting("qk_nope_head_dim", "d_head"), Setting("qk_rope_head_dim", "d_rope"), Setting("v_head_dim", "d_value"),
         Setting("head_dim", "d_rope", lambda hf: hf["qk_rope_head_dim"]),
         Setting("intermediate_size", "d_ff"), Setting("first_k_dense_replace", "dense_prefix"),
         Setting("n_routed_experts", "n_experts"), Setting("num_experts_per_tok", "top_k"),
         Setting("moe_intermediate_size", "d_expert"), Setting("n_shared_experts", "n_shared"),
         Setting("norm_topk_prob", "normalize_gates", True), Setting("routed_scaling_factor", "routed_scaling")),
        # norm_eps: the library normalises the latents with 1e-6 whatever rms_norm_eps says; ours has one number.
        _FIXED_FIELDS | {"attention": "mla", "router": "sigmoid", "moe_every": 1, "norm_eps": 1e-6},
        ("n_experts", "n_shared", "balance_rate"), {"balance_rate": 0.001},
        _HF_FIXED | {"attention_bias": False, "rope_interleave": True, "n_group": 1,
                         "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
                         "num_nextn_predict_layers": 0, "pretraining_tp": 1},
        {"n_group": 8, "topk_group": 4},
        OUTSIDE, (*NORMS, *LATENT_ATTENTION, *SWIGLU, *DEEPSEEK_MOE)),
    "gptj": Family(
        "GPTJForCausalLM",
        (Setting("vocab_size", "vocab_size"), Setting("n_embd", "d_model"), Setting("n_layer", "n_layers"),
         Setting("n_head", "n_heads"), Setting("", "n_kv_heads", lambda hf: hf["n_head"]),
         Setting("", "d_head", lambda hf: hf["n_embd"] // hf["n_head"]), Setting("rotary_dim", "rope_dims"),
         Setting("layer_norm_epsilon", "norm_eps", 1e-5), Setting("n_inner", "d_ff", lambda hf: 4 * hf["n_embd"])),
        _UNSUPPORTED_FIELDS | {"attention": "gqa", "n_experts": 0, "dense_prefix": 0, "activation": "gelu",
                  "norm": "layer", "parallel_residual": True, "bias": True, "rope_theta": 10_000.0,
                  "tie_embeddings": False},
        ("rope_dims",), {},
        {"activation_function": "gelu_new", "tie_word_embeddings": False, "rotary": True, "scale_attn_weights": True,
         "quantization_config": None}, {},
        GPTJ_OUTSIDE, GPTJ_LAYER, "transformer.h.{layer}."),
}  # fmt: skip


def register(kind: str, family: Family) -> None:
    """Add a table of one's own: from here on `kind` is a known `model_type`.

    Raises: UserError if there is one of that name.

    Llama in a fork that renamed two things; `--table FILE.py` runs such a file before it converts:

    >>> import dataclasses
    >>> outside = (*OUTSIDE[:2], row("unembed.weight", "V D", "unembedding_DV"))
    >>> register("fork", dataclasses.replace(FAMILIES["llama"], outside=outside, layer_name="decoder.{layer}."))
    >>> pieces(ModelConfig(attention="gqa"), "fork")[3].hf_name
    'decoder.0.input_layernorm.weight'
    """
    if kind in FAMILIES:
        raise UserError(f"there is a table for model_type={kind!r} already; known: {', '.join(FAMILIES)}")
    FAMILIES[kind] = family


def family_of(c: ModelConfig) -> str:
    """The family of ours whose tables fit a config, where nothing else says which."""
    if c.parallel_residual:
        return "gptj"
    if c.attention == "mla":
        return "deepseek_v3"
    if c.n_experts:
        return "mixtral"
    return "llama" if c.activation == "swiglu" else "arcee"


# Settings, both ways --------------------------------------------------------------------------------------------------


def config_from_hf(hf: dict) -> ModelConfig:
    """Our config for a config.json.

    Raises: UserError naming the first setting, with its value, that our models cannot follow or do not know.
    """
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        known = nearest(str(kind), FAMILIES)
        raise UserError(f"config.json: model_type={kind!r} has no table; {known}; --table FILE.py adds one of your own")
    family, hf = FAMILIES[kind], _without_rope_parameters(hf)
    known = {s.hf_name for s in family.settings} | set(family.hf_fixed) | PASSED_THROUGH | IGNORED
    for name in hf:
        if name not in known:
            raise UserError(
                f"config.json: {name}={hf[name]!r} is not known for {kind}, and may change what the model computes; "
                "if it does not, take it out of the file")  # fmt: skip
    for name, want in family.hf_fixed.items():
        value = hf.get(name, family.hf_defaults.get(name, want))
        if value != want:
            left_out = "" if name in hf else " (left out)"
            raise UserError(f"config.json: {name}={value!r}{left_out} is not supported: our {kind} has {name}={want!r}")
    c = ModelConfig(**family.initial_fields | _field_values(family, hf))
    check_fits(c, kind)
    return c


def _field_values(family: Family, hf: dict) -> dict[str, Any]:
    """Fields of ours, from a config.json whose settings are known to be supported."""
    values, source = dict(family.fixed_fields), {}
    for s in family.settings:
        value = hf.get(s.hf_name)
        if value is None:
            if s.absent is REQUIRED:
                raise UserError(f"config.json has no {s.hf_name}")
            value = s.absent(hf) if callable(s.absent) else s.absent
        if s.field in source | family.fixed_fields and values[s.field] != value:
            other = f"{source.get(s.field, s.hf_name)}={values[s.field]!r}"
            raise UserError(f"config.json: {s.hf_name}={value!r} is not supported, only what goes with {other}")
        values[s.field], source[s.field] = value, s.hf_name
    return values


def _without_rope_parameters(hf: dict) -> dict:
    """Write {"rope_parameters": {"rope_theta": ..}}, of newer files, as older ones do: a rope_theta alone."""
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or set(rope) - {"rope_type", "rope_theta"}:
        raise UserError(
            f"config.json: rope_parameters={rope!r} is not supported: only rope_type 'default' with a rope_theta"
        )
    rest = {name: value for name, value in hf.items() if name != "rope_parameters"}
    return rest | ({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})


def check_fits(c: ModelConfig, kind: str) -> None:
    """Raises: UserError naming every one of our settings that this family cannot express."""
    family = FAMILIES[kind]
    faults = [f"model.{name}={getattr(c, name)!r} (it has only {want!r})"
              for name, want in family.fixed_fields.items() if getattr(c, name) != want]  # fmt: skip
    faults += [f"model.{name}={getattr(c, name)!r} (it has no 0)" for name in family.positive_fields
               if not getattr(c, name)]  # fmt: skip
    if c.n_experts and c.top_k == 1 and c.normalize_gates:
        faults.append("model.top_k=1 (it normalizes a single gate to 1, and ours does not; where it has "
                      "normalize_gates, False is the same on both sides)")  # fmt: skip
    if faults:
        raise UserError(f"transformers' {family.architecture} ({kind}) cannot express {', '.join(faults)}")


def config_to_hf(c: ModelConfig, dtype: str = "float32", kind: str = "") -> dict:
    """The config.json of our config, as a model of a family: of this `kind`, or of the one that fits.

    Raises: UserError naming every one of our settings that the family cannot express.
    """
    kind = kind or family_of(c)
    family = FAMILIES[kind]
    check_fits(c, kind)
    hf = {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype} | family.hf_fixed
    hf |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # else the library makes some up
    for s in family.settings:
        value = getattr(c, s.field)
        if s.hf_name:
            hf[s.hf_name] = None if s.zero_is_null and not value else value
        elif value != (want := s.absent(hf)):
            raise UserError(f"transformers' {family.architecture} ({kind}) cannot express model.{s.field}={value!r} "
                            f"(it would be {want!r})")  # fmt: skip
    return hf


# Tensors, both ways ---------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Which of our numbers a tensor on disk holds."""

    name: str  # of our parameter
    index: tuple[int, ...]  # along its stacking letters
    dims: str  # letters of what is left


class Piece(NamedTuple):
    """One tensor on disk."""

    hf_name: str
    shape: tuple[int, ...]
    layout: str
    parts: tuple[Part, ...]


def pieces(c: ModelConfig, kind: str = "") -> list[Piece]:
    """Every tensor a model of this config has on disk, and where its numbers lie in ours.

    Raises: UserError for a parameter of ours that is not held whole and once, a tensor of theirs that has two places,
    or a row whose letters are not those of what it holds.
    """
    kind = kind or family_of(c)
    family, declared = FAMILIES[kind], sharding.named(declare(c))
    rows = [(r, "", "", np.zeros((), int)) for r in family.outside]
    rows += [(r, f"{stack}.", family.layer_name, n) for r in family.layer for stack, n in layer_numbers(c).items()]
    found = []
    for r, ours, theirs, numbers in rows:
        r = r._replace(layout=r.layout.format(rope_dims=c.rope_dims))
        names = [ours + name for name in r.parameters]
        if (r.needs and not r.needs(c)) or not (held := [name for name in names if name in declared]):
            continue
        if len(held) < len(names):
            lacking = ", ".join(name for name in names if name not in declared)
            raise UserError(f"the row {r.hf_name!r} of the table of {kind!r} holds {lacking}, which the model has not")
        experts = range(c.n_experts) if "{expert}" in r.hf_name else [None]
        _check_letters(r, {name: declared[name].dims[numbers.ndim + (experts != [None]) :] for name in names}, kind)
        for index in np.ndindex(numbers.shape):
            for e in experts:
                at = index if e is None else (*index, e)
                parts = tuple(Part(name, at, declared[name].dims[len(at) :]) for name in names)
                name = (theirs + r.hf_name).format(layer=numbers[index], expert=e)
                found.append(Piece(name, disk_shape(r.layout, _sizes(parts, declared)), r.layout, parts))
    _check_complete(found, declared, kind)
    return found


def _check_letters(r: Row, dims: dict[str, str], kind: str) -> None:
    """Raises: UserError if a row's layout does not have one place for each letter of each parameter it holds."""
    factors = [[part[0] for part in factor] for word in r.layout.split() for factor in _factors(word)]
    letters = [letter for factor in factors for letter in factor]
    for name, own in dims.items():
        places = [letter for letter in letters if letter in own]
        if sorted(places) != sorted(own) or len(factors) != len(own) or set(letters) - set("".join(dims.values())):
            raise UserError(
                f"the table of {kind!r} lays {r.hf_name!r} out as {r.layout!r}; {name} has the letters {own!r}"
            )


def _check_complete(found: list[Piece], declared: dict[str, sharding.Declaration], kind: str) -> None:
    """Raises: UserError if a number of ours would be written not once, or a tensor of theirs over another."""
    held = Counter()
    for part in (part for piece in found for part in piece.parts):
        held[part.name] += math.prod(declared[part.name].shape[len(part.index) :])
    for name, d in declared.items():
        if held[name] != d.size:
            times = f"{held[name] / d.size:g}" if held[name] else "no"
            raise UserError(f"the table of {kind!r} has {times} rows for {name}; it should have one")
    for name, n in Counter(piece.hf_name for piece in found).items():
        if n > 1:
            raise UserError(
                f"the table of {kind!r} calls {n} tensors {name!r}; {{layer}} and {{expert}} tell them apart"
            )


def layer_numbers(c: ModelConfig) -> dict[str, np.ndarray]:
    """Number of each layer, from 0, in the shape that its parameters are stacked in."""
    numbers_LJ = np.arange(c.dense_prefix, c.n_layers).reshape(c.n_blocks, c.layers_per_block)
    dense = c.layers_per_block - bool(c.n_experts)
    return {"prefix": np.arange(c.dense_prefix), "blocks.dense": numbers_LJ[:, :dense], "blocks.moe": numbers_LJ[:, -1]}


def _sizes(parts: Iterable[Part], declared: dict[str, sharding.Declaration]) -> dict[str, int]:
    return {
        letter: size for p in parts for letter, size in zip(declared[p.name].dims, declared[p.name].shape, strict=True)
    }


def _factors(word: str) -> list[list[str]]:
    """Cut a word of a layout into factors, each a list of what lies side by side: "H[K|R']" -> [["H"], ["K", "R'"]]."""
    return [factor.strip("[]").split("|") for factor in re.findall(r"\[[^]]+\]|[A-Z]\d*'?", word)]


def disk_shape(layout: str, sizes: dict[str, int]) -> tuple[int, ...]:
    width = lambda factor: sum(sizes[part[0]] for part in factor)
    return tuple(math.prod(width(factor) for factor in _factors(word)) for word in layout.split())


def matching_views(disk: np.ndarray, ours: np.ndarray, layout: str, dims: str, sizes: dict[str, int]):
    """Yield pairs of views, of a tensor on disk and of ours, that hold the same numbers in the same order.

    Both directions are an assignment between them. One pair, or three where rotary pairs lie differently.
    """
    factors = [factor for word in layout.split() for factor in _factors(word)]
    view = disk.reshape([sum(sizes[part[0]] for part in factor) for factor in factors])
    letters, pairs = [], None
    for axis, factor in enumerate(factors):
        mine = next(i for i, part in enumerate(factor) if part[0] in dims)
        start, part = sum(sizes[p[0]] for p in factor[:mine]), factor[mine]
        view = view[(slice(None),) * axis + (slice(start, start + sizes[part[0]]),)]
        letters.append(part[0])
        pairs = (part[0], int(part[1:-1] or sizes[part[0]])) if part.endswith("'") else pairs
    view = view.transpose([letters.index(letter) for letter in dims])
    if pairs is None:
        yield view, ours
        return
    (letter, width), rest = pairs, slice(pairs[1], None)
    before, half = (slice(None),) * dims.index(letter), width // 2
    for there, here in ((slice(0, width, 2), slice(half)), (slice(1, width, 2), slice(half, width)), (rest, rest)):
        yield view[(*before, there)], ours[(*before, here)]


def from_hf_layout(disk: np.ndarray, piece: Piece, part: Part, declared) -> np.ndarray:
    """The part of a tensor on disk that is ours, in our order."""
    sizes = _sizes(piece.parts, declared)
    ours = np.empty([sizes[letter] for letter in part.dims], disk.dtype)
    for theirs_view, ours_view in matching_views(disk, ours, piece.layout, part.dims, sizes):
        ours_view[...] = theirs_view
    return ours


def to_hf_layout(read: Callable[[str], np.ndarray], piece: Piece, declared) -> np.ndarray:
    """A tensor as it lies on disk, from our parameters; `read` gives one by name."""
    sizes = _sizes(piece.parts, declared)
    disk = np.empty(piece.shape, read(piece.parts[0].name).dtype)
    for part in piece.parts:
        for theirs_view, ours_view in matching_views(disk, read(part.name)[part.index], piece.layout, part.dims, sizes):
            theirs_view[...] = ours_view
    return disk
