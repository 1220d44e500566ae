"""Convert between a Hugging Face config.json and our settings with the tables of `families.py`."""

from typing import Any

from config import ModelConfig
from config.fields import Count, NotNegative, Size, check_value, hints, parse_bias, parse_window
from utils import UserError, suggest
from weights import families
from weights.families import REQUIRED, Family, family_of

# Types of settings that are not among those of a family's table. The others have the type of our field.
TYPES = {"model_type": str, "rope_parameters": dict, "rope_scaling": dict, "layer_types": list,
         "quantization_config": dict, "num_nextn_predict_layers": Count, "n_group": Count, "experts_per_token": Size,
         "max_position_embeddings": Size, "sliding_window": Count}  # fmt: skip
MOST = 2**40  # larger sizes would overflow the floats of a plan


def config_from_hf(hf: dict) -> ModelConfig:
    """Return our config for a config.json.

    Raises: UserError naming the first setting, with its value, that is unknown or that our models don't support.
    """
    check_types(hf)
    kind = hf.get("model_type")
    if kind not in families.FAMILIES:
        known = suggest(str(kind), families.FAMILIES)
        raise UserError(f"config.json: model_type={kind!r} is unknown; {known}; add a mapping with --table FILE.py")
    family, hf = families.FAMILIES[kind], without_stored_form(with_old_names(hf))
    for name in hf:
        if name not in family.known:
            raise UserError(
                f"config.json: unknown setting {name}={hf[name]!r} for {kind}, which may change the model; "
                "if it doesn't, remove it from the file")  # fmt: skip
    for name, want in family.hf_fixed.items():
        value = hf.get(name, family.hf_defaults.get(name, want))
        if value != want:
            left_out = "" if name in hf else " (the default)"
            raise UserError(f"config.json: {name}={value!r}{left_out} is not supported for {kind}; it must be {want!r}")
    c = ModelConfig(**family.initial_fields | field_values(family, hf))
    for s in family.settings:
        if s.field in family.positive_fields and not getattr(c, s.field):
            raise UserError(f"config.json: {s.hf_name}={hf.get(s.hf_name)!r} is not supported for {kind}")
    check_layer_types(c, hf.get("layer_types"))
    check_fits(c, kind)
    return c


def check_layer_types(c: ModelConfig, layer_types: list | None) -> None:
    """Raises: UserError if other layers have a window in config.json than in our model."""
    if not layer_types:
        return
    size, every, _ = parse_window(c.window)
    full = [not size or (every and (number + 1) % every == 0) for number in range(len(layer_types))]
    want = ["full_attention" if one else "sliding_attention" for one in full]
    if layer_types != want or len(want) != c.n_layers:
        raise UserError(f"config.json: layer_types={layer_types!r:.80} is not supported; with sliding_window={size} "
                        f"the {c.n_layers} entries must be {want!r:.80}")  # fmt: skip


def check_types(hf: dict) -> None:
    """Raises: UserError naming the first setting in TYPES of another type. Each may be null."""
    for name, hint in TYPES.items():
        if (value := hf.get(name)) is not None:
            if hint in (dict, list) and not isinstance(value, hint):
                what = "a JSON object" if hint is dict else "a list"
                raise UserError(f"config.json: {name}={value!r:.60}: should be {what}")
            check_value(f"config.json: {name}", value, hint)


def without_stored_form(hf: dict) -> dict:
    """Remove settings that say how weights are stored: in MXFP4 or in fp8 blocks of 128 x 128, which `folders.Tensors`
    reads, and with modules for multi-token prediction, which `convert.from_hf` leaves out."""
    about = hf.get("quantization_config") or {}
    method = about.get("quant_method")
    is_read = method == "mxfp4" or (method == "fp8" and about.get("weight_block_size") == [128, 128])
    names = {"num_nextn_predict_layers"} | ({"quantization_config"} if is_read else set())
    return {name: value for name, value in hf.items() if name not in names}


def check_at_most(name: str, value: Any) -> None:
    if isinstance(value, int | float) and value > MOST:
        raise UserError(f"config.json: {name}={value}: must be at most {MOST:,}")


def field_values(family: Family, hf: dict) -> dict[str, Any]:
    """Return our fields for a config.json. Raises: UserError if a setting is missing, or contradicts another."""
    values, source = dict(family.fixed_fields), {}
    for s in family.settings:
        value, names = hf.get(s.hf_name), s.hf_name.split()
        if len(names) > 1:
            value = tuple(y if x is None else x for x, y in zip(map(hf.get, names), s.absent, strict=True))
            for name, x, y in zip(names, value, s.absent, strict=True):
                check_value(f"config.json: {name}", x, NotNegative if isinstance(y, float) else Size)
                check_at_most(name, x)
        if value is not None:
            value = s.to_ours(value)
            check_value(f"config.json: {s.hf_name}", value, hints(ModelConfig)[s.field])
            check_at_most(s.hf_name, value)
        else:
            if s.absent is REQUIRED:
                needed = ", ".join(s.hf_name for s in family.settings if s.absent is REQUIRED)
                raise UserError(f"config.json has no {s.hf_name}; a model of this type needs {needed}")
            try:
                value = s.absent(hf) if callable(s.absent) else s.absent
            except (KeyError, ZeroDivisionError) as error:
                raise UserError(f"config.json has no {s.hf_name}, and no settings that determine it "
                                f"({error})") from None  # fmt: skip
        if s.field in source | family.fixed_fields and values[s.field] != value:
            other = f"{source.get(s.field, s.hf_name)}={values[s.field]!r}"
            raise UserError(f"config.json: {s.hf_name}={value!r} is not supported together with {other}")
        values[s.field], source[s.field] = value, s.hf_name
    return values


def with_old_names(hf: dict) -> dict:
    """Replace names of newer files with those of older files: rope_parameters with rope_theta and rope_scaling, and
    num_local_experts of Qwen3-MoE. Newer files of T5 have scale_decoder_outputs instead of tie_word_embeddings, which
    is always true there. A cap of Gemma 2 that is null becomes 0; one that is missing has a default."""
    rope = hf.get("rope_parameters") or {}
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention")  # one entry per kind of layer
    check_types({"rope_parameters": rope})
    rope, types = dict(rope or {}), hf.get("layer_types") or []
    if hf.get("model_type") == "gemma3_text":
        check_types({"rope_parameters": local})
        if (local := local or {}).get("rope_type", "default") != "default":
            raise UserError(f"config.json: rope_parameters={hf['rope_parameters']!r} is not supported; layers with a "
                            "window must have the rope_type default")  # fmt: skip
        hf = {"rope_local_base_freq": local.get("rope_theta")} | hf
        if "full_attention" in types:
            hf = {"sliding_window_pattern": types.index("full_attention") + 1} | hf
    if hf.get("model_type") == "gemma2":
        caps = [name for name in ("attn_logit_softcapping", "final_logit_softcapping") if name in hf]
        hf = hf | {name: hf[name] or 0.0 for name in caps}
        hf |= {"use_bidirectional_attention": hf.get("use_bidirectional_attention") or None}
    renamed = {"scale_decoder_outputs": "tie_word_embeddings", "_sliding_window_pattern": "sliding_window_pattern"}
    renamed |= {"num_local_experts": "num_experts"} if hf.get("model_type") == "qwen3_moe" else {}
    rest = {name: value for name, value in hf.items() if name != "rope_parameters" and name not in renamed}
    rest |= {renamed[name]: hf[name] for name in renamed if name in hf}
    theta = {"rope_theta": rope.pop("rope_theta")} if "rope_theta" in rope else {}
    return rest | theta | ({"rope_scaling": rope} if set(rope) - {"rope_type"} else {})


def check_fits(c: ModelConfig, kind: str) -> None:
    """Raises: UserError naming all our settings that this family cannot express."""
    family = families.FAMILIES[kind]
    fixed = {name: value for name, value in family.fixed_fields.items() if getattr(c, name) != value}
    if parse_bias(fixed.get("bias", "")) == parse_bias(c.bias):
        fixed.pop("bias", None)  # the same parts in another order
    faults = [f"model.{name}={getattr(c, name)!r} (only {want!r} is supported)" for name, want in fixed.items()]
    for s in family.settings:
        ours = getattr(c, s.field)
        if s.field in ("window", "softmax") and ours and ours != (theirs := s.to_ours(s.to_hf(ours))):
            why = f"it would become {theirs!r}"
            if s.field == "window" and theirs.count(":") == 2:
                why = "it must have the form 1024:6:10000"
            faults.append(f"model.{s.field}={ours!r} ({why})")
    faults += [f"model.{name}={value!r} ({value!r} is not supported)" for name in family.positive_fields
               if not (value := getattr(c, name))]  # fmt: skip
    if c.n_experts and c.top_k == 1 and c.normalize_gates:
        faults.append("model.top_k=1 (transformers normalizes a single gate to 1, and our model does not; if the "
                      "family allows it, set normalize_gates to False)")  # fmt: skip
    if faults:
        raise UserError(f"transformers' {family.architecture} ({kind}) cannot express {', '.join(faults)}")


def config_to_hf(c: ModelConfig, dtype: str = "float32", kind: str = "") -> dict:
    """Return the config.json for our config in the family `kind`, or in the default family.

    Raises: UserError naming all our settings that the family cannot express.
    """
    kind = kind or family_of(c)
    family = families.FAMILIES[kind]
    check_fits(c, kind)
    hf = {"architectures": [family.architecture], "model_type": kind, "torch_dtype": dtype} | family.hf_fixed
    hf |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # else transformers uses its defaults
    for s in family.settings:
        value = getattr(c, s.field)
        if len(names := s.hf_name.split()) > 1:
            hf |= dict(zip(names, s.to_hf(value), strict=True))
        elif names:
            hf[s.hf_name] = s.to_hf(value)
        elif value != (want := s.absent(hf)):
            raise UserError(f"transformers' {family.architecture} ({kind}) cannot express model.{s.field}={value!r} "
                            f"(it would be {want!r})")  # fmt: skip
    return hf
