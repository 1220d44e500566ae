"""Settings of earlier versions: new names of renamed settings, and replacements of removed settings.

`migrate` converts settings that an earlier version wrote, `dropped_notes` lists the values that are lost, and
`replacement` explains an old flag.
"""

from config.fields import AUTO

# Renamed settings.
RENAMED = {f"model.{name}": f"work.{name}" for name in ("remat", "gather", "tensor_exchange", "context_attention",
                                                      "loss_chunk")}  # fmt: skip
RENAMED |= {f"pipeline.{name}": f"work.{name}" for name in ("schedule", "microbatches", "chunks")}
RENAMED |= {"optim.max_device_batch": "work.device_batch"}
# Renamed values. They affect only speed.
RENAMED_VALUES = {"work.gather": {"ahead": "layer", "peeled": "layer", "step_ahead": "step"},
        "work.microbatches": {0: AUTO}, "work.device_batch": {0: AUTO}}  # fmt: skip

# Settings that `merge` combines into another setting: what to use instead.
MERGED = {
    "data.seed": "use --run.seed, for the order of the sequences too",
    "model.precision.compute": "use --model.precision float32, mixed or bfloat16",
    "model.precision.parameters": "use --model.precision float32, mixed or bfloat16",
    "force": "use --run.check no",
    "run.force": "use --run.check no",
    "run.go_back": "use --run.restart newest",
    "optim.beta1": "use --optim.betas B1 B2",
    "optim.beta2": "use --optim.betas B1 B2",
    "run.epochs": "use --run.steps; start-up and --run.check only print how many steps an epoch has",
    "run.layer_norms_every": "use --run.gradient_stats_every",
    "run.noise_scale_every": "use --run.gradient_stats_every",
}

PRECISION = {("float32", "float32"): "float32", ("float32", "bfloat16"): "mixed", ("bfloat16", "bfloat16"): "bfloat16"}

# Settings that were flags without a value: the value that means the same.
CHOICES = {"run.check": "only", "run.restart": "scratch"}

# Removed settings that a run could change when it resumed: their default, and what happens instead.
DROPPED = {
    "optim.decay_steps": (0, "the learning rate decays over --run.steps; --optim.schedule wsd keeps it constant first"),
    "run.join_timeout_s": (300, "processes have 5 times --run.peer_timeout_s to join"),
    "run.hang_timeout_s": (1800, "a step has 30 times --run.peer_timeout_s to finish"),
    "run.keep_every": (0, "a run keeps the latest --run.keep_checkpoints checkpoints and the best one"),
    "run.keep_best": (1, "a run always keeps the checkpoint with the lowest validation loss"),
    "run.sample_tokens": (200, "a sample has up to 200 tokens; --run.sample_prompt '' disables it"),
    "run.compile_cache": ("auto", "set the environment variable JAX_COMPILATION_CACHE_DIR to the directory"),
    "data.cache_gib": (20.0, "each host keeps at most 20 GiB of a bucket's shards in its cache folder"),
    "data.prefetch": (4, "a background thread prepares 4 batches ahead"),
}


def replacement(name: str) -> str | None:
    """Explain, as the end of a sentence, what replaces a setting of an earlier version; None if no version had it."""
    if name in RENAMED:
        return f"was renamed to {RENAMED[name]}"
    gone = MERGED.get(name) or DROPPED.get(name, (None, None))[1]
    return gone and f"no longer exists: {gone}"


def dropped_notes(values: dict) -> list[str]:
    """Return a note for each value in `values`, written by an earlier version, that is lost."""
    flat = flatten(values) if isinstance(values, dict) else {}
    return [f"note: {name}={flat[name]!r} no longer exists: {instead}"
            for name, (default, instead) in DROPPED.items() if flat.get(name, default) != default]  # fmt: skip


def migrate(values: dict) -> dict:
    """Convert settings that an earlier version wrote to the form that `Config.to_dict` returns."""
    if not isinstance(values, dict):
        return values
    values = {group: dict(x) if isinstance(x, dict) else x for group, x in values.items()}
    for old, new in RENAMED.items():
        (group, name), (_, now) = old.split("."), new.split(".")
        if isinstance(values.get(group), dict) and name in values[group]:
            value = values[group].pop(name)
            values.setdefault("work", {})[now] = RENAMED_VALUES.get(new, {}).get(value, value)
    for group, settings in values.items():
        if isinstance(settings, dict):
            merge(group, settings)
            for name in [name for name in settings if f"{group}.{name}" in DROPPED]:
                del settings[name]
    data, run = values.get("data"), values.get("run")
    if isinstance(data, dict) and data.get("seed") == (run or {}).get("seed", 0):
        del data["seed"]
    if values.get("pipeline") == {}:
        del values["pipeline"]
    return values


def merge(group: str, settings: dict) -> None:
    """Replace, in one group, the settings that are now part of another setting."""
    if group == "optim" and {"beta1", "beta2"} & {*settings}:
        settings["betas"] = [settings.pop("beta1", 0.9), settings.pop("beta2", 0.95)]
    if group == "model" and isinstance(formats := settings.get("precision"), dict):
        pair = formats.get("parameters", "float32"), formats.get("compute", "bfloat16")
        settings["precision"] = PRECISION.get(pair, formats)
    if group == "run":
        forced, went_back = settings.pop("force", False), settings.pop("go_back", False)
        if isinstance(settings.get("check"), bool):
            settings["check"] = "only" if settings["check"] else "no" if forced else "yes"
        if isinstance(settings.get("restart"), bool):
            settings["restart"] = "scratch" if settings["restart"] else "newest" if went_back else "no"
        settings.pop("epochs", None)  # run.steps already includes them
        stats = [settings.pop(name, 0) for name in ("layer_norms_every", "noise_scale_every")]
        if any(stats):
            settings["gradient_stats_every"] = min(filter(None, stats))


def flatten(values: dict, prefix="") -> dict:
    """Flatten nested settings to {dotted name: value}."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
