"""Settings of earlier versions: what they are called now, and what became of those that are gone."""

from fields import AUTO

# What settings were called once, and values that they had; none of them changes a number.
MOVED = {f"model.{name}": f"work.{name}" for name in ("remat", "gather", "tensor_exchange", "context_attention",
                                                      "loss_chunk")}  # fmt: skip
MOVED |= {f"pipeline.{name}": f"work.{name}" for name in ("schedule", "microbatches", "chunks")}
MOVED |= {"optim.max_device_batch": "work.device_batch"}
GONE = {"work.gather": {"ahead": "layer", "peeled": "layer", "step_ahead": "step"},
        "work.microbatches": {0: AUTO}, "work.device_batch": {0: AUTO}}  # fmt: skip

# Settings of earlier versions that are gone: what they were unless they were changed, and what to use instead.
GONE_SETTINGS = {
    "run.join_timeout_s": (300, "processes have 5 times --run.peer_timeout_s to join"),
    "run.hang_timeout_s": (1800, "a step has 30 times --run.peer_timeout_s to finish"),
}


def dropped(values: dict) -> list[str]:
    """A line for each value in `values`, which an earlier version wrote, that this version does not keep."""
    flat = flatten(values) if isinstance(values, dict) else {}
    return [f"note: {name}={flat[name]!r}, of an earlier version, is dropped: {instead}"
            for name, (usual, instead) in GONE_SETTINGS.items() if flat.get(name, usual) != usual]  # fmt: skip


def moved(values: dict) -> dict:
    """Settings as `to_dict` writes them now, of some that an older version wrote."""
    if not isinstance(values, dict):
        return values
    values = {group: dict(x) if isinstance(x, dict) else x for group, x in values.items()}
    for old, new in MOVED.items():
        (group, name), (_, now) = old.split("."), new.split(".")
        if isinstance(values.get(group), dict) and name in values[group]:
            value = values[group].pop(name)
            values.setdefault("work", {})[now] = GONE.get(new, {}).get(value, value)
    for group, name in (setting.split(".") for setting in GONE_SETTINGS):
        if isinstance(values.get(group), dict):
            values[group].pop(name, None)
    if values.get("pipeline") == {}:
        del values["pipeline"]
    return values


def flatten(values: dict, prefix="") -> dict:
    """Settings by dotted name."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
