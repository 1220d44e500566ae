"""Read the config.json of a published model for the planner, which also plans models that can't be converted.

A plan covers the parts that our model has. Each other part is listed, with its parameters and with what the plan does
instead, so that the parameters of the plan and of the listed parts add up to the published count.
"""

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sharding
from architectures import architecture, declare
from config import Config, ModelConfig, replace
from utils import UserError, suggest
from weights import families
from weights.families import Family, Setting, rope_scaling_from_hf
from weights.hf_config import check_types, field_values, with_old_names

# Families that can only be planned ------------------------------------------------------------------------------------


def like(base: Family, *settings: Setting, fixed_fields=(), **changes) -> Family:
    """Return a family with other settings, which replace those for the same fields."""
    fields = {s.field for s in settings}
    kept = tuple(s for s in base.settings if s.field not in fields)
    fixed = {name: value for name, value in base.fixed_fields.items() if name not in fields} | dict(fixed_fields)
    return dataclasses.replace(base, settings=(*kept, *settings), fixed_fields=fixed, **changes)


_LLAMA, _DEEPSEEK = (families.FAMILIES[name] for name in ("llama", "deepseek_v3"))
PLANNED = {
    "qwen2": _LLAMA,
    "deepseek_v2": like(
        _DEEPSEEK, Setting("norm_topk_prob", "normalize_gates", False),
        fixed_fields={"router": "softmax", "balance_rate": 0.0}, initial_fields={},
        hf_fixed=_DEEPSEEK.hf_fixed | {"scoring_func": "softmax", "topk_method": "greedy"}),
}  # fmt: skip


# Parts that our model lacks -------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A part of published models that ours lacks."""

    settings: str  # names in config.json, separated by spaces
    what: str  # its name, and what the plan does instead; may contain {names}
    present: Callable[[dict], bool]
    size: Callable[[dict, ModelConfig], int] = lambda hf, c: 0  # parameters


def attention_biases(hf: dict, c: ModelConfig) -> int:
    if c.attention == "mla":
        return c.n_layers * (c.d_query_latent + c.d_kv_latent + c.d_rope + c.d_model)
    of_result = 0 if hf["model_type"] == "qwen2" else c.d_model
    return c.n_layers * (c.d_head * (c.n_heads + 2 * c.n_kv_heads) + of_result)


def token_prediction_modules(hf: dict, c: ModelConfig) -> int:
    """Count the parameters of multi-token-prediction modules as DeepSeek-V3 stores them: an MoE layer, a projection of
    two concatenated vectors, three norms, and copies of both vocabulary tables (arXiv:2412.19437, 2.2)."""
    layer = sum(d.size for name, d in sharding.flatten_named(declare(c)).items() if name.startswith("blocks."))
    tables = 2 * c.vocab_size * c.d_model
    return hf["num_nextn_predict_layers"] * (layer // c.n_blocks + 2 * c.d_model**2 + 3 * c.d_model + tables)


def has_scales(hf: dict) -> bool:
    """Whether a Gemma 3 has caps, or scales queries by another number than ours."""
    scales_queries = hf.get("query_pre_attn_scalar", 256) != hf.get("head_dim", 256)
    caps = hf.get("attn_logit_softcapping") or hf.get("final_logit_softcapping")
    return hf["model_type"] == "gemma3_text" and bool(caps or scales_queries)


kind_is = lambda *kinds: lambda hf: hf["model_type"] in kinds
PARTS = (
    Part("attention_bias", "attention biases", lambda hf: hf["model_type"] != "gpt_oss" and (
         hf["model_type"] == "qwen2" or hf.get("attention_bias")), attention_biases),
    Part("mlp_bias", "feed-forward biases", lambda hf: hf.get("mlp_bias"),
         lambda hf, c: c.n_layers * (2 * c.d_ff + c.d_model)),
    Part("", "selection biases of routers, which the planner counts as memory, not as parameters",
         kind_is("deepseek_v3"), lambda hf, c: c.n_blocks * c.n_experts),
    Part("num_nextn_predict_layers", "module for multi-token prediction, with copies of both vocabulary tables",
         lambda hf: hf.get("num_nextn_predict_layers"), token_prediction_modules),
    Part("topk_method", "expert groups: a token uses experts of {topk_group} of {n_group} groups; the plan counts "
         "bytes as if it used all", lambda hf: (hf.get("n_group") or 1) > 1),
    Part("quantization_config", "quantized weights: the plan has weights of the dtype that model.precision sets",
         lambda hf: hf.get("quantization_config")),
    Part("attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar rope_local_base_freq",
         "caps and scales of single numbers, which cost little", has_scales),
    Part("cache_implementation sliding_window use_sliding_window max_window_layers layer_types "
         "sliding_window_pattern", "", lambda hf: False),
)  # fmt: skip


def read_window(hf: dict, layers: int) -> tuple[str, dict[str, int]]:
    """Return model.window for the layers that have a window in transformers, and a note if it can't express them."""
    size, positions, kind = hf.get("sliding_window"), hf.get("max_position_embeddings"), hf["model_type"]
    if not size or not hf.get("use_sliding_window", True) or (positions and size >= positions):
        return "", {}
    every = hf.get("sliding_window_pattern", {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}.get(kind, 0))
    full = [*range(every - 1, layers, every)] if every else []
    if kinds := hf.get("layer_types"):
        full = [number for number, kind in enumerate(kinds) if kind != "sliding_attention"]
    elif kind.startswith("qwen"):
        full = [*range(min(hf.get("max_window_layers", 28), layers))]
    if len(full) == layers:
        return "", {}
    every = max(round(layers / len(full)), 2) if full else 0
    same = full == ([*range(every - 1, layers, every)] if every else [])
    text = f"{size}:{every}" if every else str(size)
    note = f"sliding windows in {layers - len(full)} of {layers} layers: the plan has model.window={text}"
    return text, {} if same else {note: 0}


POSITIONS = 4096  # of a sequence in a plan, if the model was not made for shorter ones


# Reading --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Published:
    """A published model, as the planner sees it."""

    file: str
    kind: str  # model_type
    config: Config
    left_out: dict[str, int]  # part that the plan leaves out -> its parameters, which may be 0
    counted: int  # parameters that the plan counts

    @property
    def parameters(self) -> int:
        return self.counted + sum(self.left_out.values())

    def lines(self) -> list[str]:
        """Describe the model, and each part that the plan leaves out, in one line each."""
        lines = [f"config     {self.kind} with {self.parameters:,} parameters, from {self.file}"]
        for what, n in self.left_out.items():
            size = f": {n:,} parameters ({100 * n / self.parameters:.2g}%)" if n else ""
            lines.append(f"{'left out' if n else 'note':10} {what}{size}")
        return lines

    def to_json(self) -> dict:
        return {"file": self.file, "model_type": self.kind, "parameters": self.parameters, "left_out": self.left_out}


def read(path: str) -> Published:
    """Read a config.json, or the one in a folder, for a plan of training.

    Raises: UserError if there is none, or if it doesn't describe a model that can be planned.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; pass a preset, or a config.json of Hugging Face, or its folder"
                        ) from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); download config.json again") from None
    if not isinstance(hf, dict):
        raise UserError(f"{file}: a config.json is a JSON object, but this is {hf!r:.60}")
    if "config" in hf:
        raise UserError(f"{file} has the settings of a run; pass it with --config {file}")
    try:
        kind, model, left_out = describe(hf)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.resolve().parent.name).strip(".-") or kind
        positions = hf.get("max_position_embeddings") or POSITIONS
        settings = {"model": model, "run.name": name, "data.seq_len": min(positions, POSITIONS),
                    "data.input_len": architecture(model).input_len}  # fmt: skip
        cfg = replace(Config(), **settings)
    except UserError as error:
        raise UserError(str(error).replace("config.json", str(file), 1)) from None
    except TypeError as error:
        raise UserError(f"{file}: a setting has a value of another type than expected ({error})") from None
    counted = sum(d.size for d in sharding.flatten_named(declare(model)).values() if d.trainable)
    return Published(str(file), kind, cfg, left_out, counted)


def describe(hf: dict) -> tuple[str, ModelConfig, dict[str, int]]:
    """Return for a config.json model_type, our settings, and {part that the plan leaves out: parameters}.

    Raises: UserError if model_type is unknown, or if a setting that the plan needs is missing or invalid.
    """
    notes = {}
    if isinstance(hf.get("text_config"), dict):
        notes["encoders of images or sound, whose parameters are not counted here"] = 0
        hf = {"model_type": f"{hf.get('model_type')}_text"} | hf["text_config"]
    check_types(hf)
    known, hf = PLANNED | families.FAMILIES, with_old_names(hf)
    if not hf.get("model_type"):
        raise UserError("config.json has no model_type; it is the name of the architecture, such as llama or qwen3")
    if (kind := hf.get("model_type")) not in known:
        raise UserError(f"config.json: model_type={kind!r} is unknown; {suggest(str(kind), known)}; to plan a similar "
                        "model, change the settings of a preset, such as llama3_8b or mixtral_8x7b")  # fmt: skip
    try:
        rope_scaling_from_hf(hf.get("rope_scaling") or {"rope_type": "default"})
    except UserError:
        notes[f"rope_scaling={hf.pop('rope_scaling')}: the plan does not scale; it costs the same"] = 0
    family = known[kind]
    # transformers fixes an epsilon of DeepSeek's norms, which a plan doesn't need
    fixed = {name: value for name, value in family.fixed_fields.items() if name != "norm_eps"}
    same_scale = {"query_pre_attn_scalar": hf.get("head_dim")}  # see PARTS
    fields = family.initial_fields | field_values(dataclasses.replace(family, fixed_fields=fixed), hf | same_scale)
    window, note = read_window(hf, fields["n_layers"])
    if not window or not fields.get("window", "").startswith(f"{window}:"):  # keep the RoPE base of its layers
        fields["window"] = window
    c = ModelConfig(**fields)
    explained = {name for part in PARTS for name in part.settings.split()}
    left_out = {part.what.format_map(defaultdict(str, hf)): part.size(hf, c) for part in PARTS if part.present(hf)}
    for name, want in family.hf_fixed.items():
        if name not in explained and (value := hf.get(name, want)) != want:
            notes[f"{name}={value!r}: the plan has {want!r}"] = 0
    if unknown := [name for name in hf if name not in family.known | explained]:
        notes[f"settings that the planner doesn't know: {', '.join(unknown)}"] = 0
    return kind, c, left_out | note | notes
