"""The mesh explorer of the site: which shards of a layer a device stores, and what it communicates.

docs/_static/mesh.js computes the shards in the browser, from the declarations written here. Bytes are counted here,
from the rows of `plan.costs`, for every mesh that the page can show.
"""

import math
from pathlib import Path

from config import AXES, MeshConfig, preset, replace
from docs import planner_widget

MOST = 32  # devices
MODELS = {"mixtral_8x7b": "mixture of experts, as in Mixtral 8x7B", "llama3_8b": "dense, as in Llama 3 8B"}
BATCH_SIZE, SEQ_LEN = 32, 4096
# How an array is drawn: the letters of its rows, of its columns, and of the strip of cells above.
DRAWN = {"DHK": ("D", "H", ""), "DGK": ("D", "G", ""), "HKD": ("H", "D", ""), "DF": ("D", "F", ""),
         "FD": ("F", "D", ""), "DE": ("D", "E", ""), "EDM": ("D", "M", "E"), "EMD": ("M", "D", "E"), "D": ("", "D", ""),
         "BTD": ("B", "T", ""), "BTHK": ("B", "T", "H"), "BSGK": ("B", "S", "G"), "BGSK": ("B", "S", "G"),
         "BTF": ("B", "T", "F")}  # fmt: skip
STACKED = "LJ"  # letters of layers

# The collectives of a layer in the order of its forward pass, by their line on the page.
ATTENTION = ["positions for attention", "keys and values", "keys and values", "sums of attention"]
LINES = {
    "mixtral_8x7b": [*ATTENTION, "positions for the experts", "gates over tensor", "tokens for experts",
                     "gates over expert", "tokens back from experts", "sums of the experts"],
    "llama3_8b": [*ATTENTION, "positions for the feed-forward", "sums of the feed-forward"],
}  # fmt: skip
SAYS = {
    "positions for attention": "All-gathers positions: each device needs all of them for its own heads",
    "sums of attention": "Sums the partial results of all heads, and scatters the positions back",
    "keys and values": "A query attends to all earlier positions, so it needs their keys, values and document numbers",
    "positions for the experts": "All-gathers positions: each device needs all, for its shard of the hidden width",
    "gates over tensor": "The gates and the chosen experts of each token. The router ran on sharded positions",
    "sums of the experts": "Sums the partial results over the hidden width, and scatters the positions back",
    "tokens for experts": "The tokens of all devices along the axis, for this device's experts",
    "gates over expert": "The gates and the chosen experts of these tokens",
    "tokens back from experts": "The experts' results, summed and sent back to the devices of the tokens",
    "positions for the feed-forward": "All-gathers positions: each device needs all, for its shard of the hidden width",
    "sums of the feed-forward": "Sums the partial results over the hidden width, and scatters the positions back",
    "weights": "All-gathered for the forward pass and again for the backward pass; gradients are reduce-scattered",
    "gradients": "These devices store the same shard but see different tokens: gradients are summed once per step",
    "statistics": "The number of tokens per expert, for the balance loss over the whole batch, once per step",
    "stages": "The activations of this stage go to the next stage, and gradients to the previous one",
}


def meshes() -> list[MeshConfig]:
    """All meshes of powers of two up to MOST devices."""
    return [mesh for power in range(int(math.log2(MOST)) + 1) for mesh in planner_widget.meshes(2**power)]


def settings(which: str, mesh: MeshConfig):
    """Return the settings whose bytes are counted: the simplest value of every execution setting."""
    cfg = preset(which)
    plain = {"work": cfg.work.resolved, "data.batch_size": BATCH_SIZE, "data.seq_len": SEQ_LEN}
    return replace(cfg, mesh=mesh, **plain)


def as_lists(spec) -> list[list[str]]:
    return [[entry] if isinstance(entry, str) else list(entry or ()) for entry in spec]


def shown(name: str, dims: str, shape, spec, itemsize: int, **more) -> dict:
    """An array as mesh.js reads it."""
    rows, columns, strip = DRAWN[dims.lstrip(STACKED)]
    return {"name": name, "dims": dims, "shape": list(shape), "spec": as_lists(spec), "itemsize": itemsize,
            "rows": rows, "columns": columns, "strip": strip} | more  # fmt: skip


def arrays(which: str) -> dict[str, list[dict]]:
    """Weights, activations and cache of a layer."""
    from generate.cache import cache_spec
    from plan.count import costs
    from sharding import BATCH, CONTEXT, DATA, FSDP, TENSOR

    cfg = settings(which, MeshConfig())
    c, wide = cfg.model, 2
    declared = [w for w in costs.weights(cfg) if w.name.startswith("blocks.")]
    weights = [shown(w.name.split(".")[-1], w.d.dims, w.d.shape, w.d.spec, w.d.dtype.itemsize,
                     joined=list(w.gathered_over), width=w.width) for w in declared]  # fmt: skip
    sizes = dict(B=BATCH_SIZE, T=SEQ_LEN, S=SEQ_LEN, D=c.d_model, H=c.n_heads, K=c.d_head, G=c.n_kv_heads, F=c.d_ff,
                 L=c.n_blocks, J=1)  # fmt: skip

    def activation(name, dims, says, *spec):
        return shown(name, dims, [sizes[d] for d in dims], spec, wide, says=says, zigzag=True)

    at_work = (BATCH, CONTEXT)
    activations = [
        activation("x_btD", "BTD", "between blocks, and saved for the backward pass", BATCH, (CONTEXT, TENSOR), None),
        activation(
            "x_bsD",
            "BTD",
            "all-gathered over tensor, for matmuls of heads and hidden units",
            *at_work,
            None,
        ),
        activation("q_bshK", "BTHK", "queries", *at_work, TENSOR, None),
        activation("k_bSgK", "BSGK", "keys, all-gathered over context; values are as large", BATCH, None, TENSOR, None),
    ]
    if c.n_experts:
        says = "all-gathered over expert: the tokens for this device's experts"
        activations.append(activation("x_NsD", "BTD", says, (DATA, FSDP), CONTEXT, None))
    else:
        activations.append(activation("hidden_bsf", "BTF", "hidden activations of the feed-forward", *at_work, TENSOR))
    dims, spec = "LBGSK", cache_spec(c)  # of all layers: each has its own
    of_cache = [shown("key_bgSK", dims, [sizes[d] for d in dims], [*spec, *[None] * (len(dims) - len(spec))], wide,
                      says="keys during generation; values have the same size")]  # fmt: skip
    return {"weights": weights, "activations": activations, "cache": of_cache}


def lines(cfg, which: str) -> list[dict]:
    """Return what a device sends for one layer in a step: axes, collective, bytes forward and backward.

    Bytes of lines with the same name are added. `axes` may include axes of one device.
    """
    from pipeline import fit, schedules
    from plan.chips import hardware
    from plan.count import costs
    from sharding import STAGE, TOKENS

    c, z, split = cfg.at_work, costs.Sizes.from_config(cfg), fit.split_batch(cfg)
    M, found = split.microbatches * split.accumulation, {}
    turned = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}

    def add(name, kind, axes, ahead, back, back_kind="", of=()):
        new = {"name": name, "kind": kind, "back_kind": back_kind, "axes": [axis for axis in AXES if axis in axes]}
        line = found.setdefault(name, new | {"of": [], "bytes": [0, 0]})
        assert line | new == line, f"{name} is two lines"
        line["of"] += of
        line["bytes"] = [line["bytes"][0] + ahead, line["bytes"][1] + back]

    sent = lambda kind, axes, size: hardware.wire_bytes(kind, size, z.group(*axes))
    rows = costs.layer_costs(c, z, "moe" if c.n_experts else "dense")
    declared = [w for w in costs.weights(cfg) if w.name.startswith("blocks.")]
    short = lambda w: w.name.split(".")[-1]
    for w in declared:
        if w.gathered_over:
            one = M * sent("all-gather", w.gathered_over, w.gathered_size // w.layers * w.width)
            experts = "E" in w.d.dims and w.d.dims[-1] != "E"
            name = "weights of experts" if experts else "weights"
            back = one * (1 + w.d.trainable)  # gathered again, and the gradient
            add(name, "all-gather", w.gathered_over, one, back, "all-gather, reduce-scatter", [short(w)])
    exchanges = [row for row in rows if isinstance(row, costs.Collective)]
    for name, row in zip(LINES[which], exchanges, strict=True):
        one = M * row.count * sent(row.kind, row.axes, row.size)
        add(name, row.kind, row.axes, one, one * row.back, turned.get(row.kind, row.kind))
    if c.n_experts:
        add("statistics", "all-reduce", TOKENS, sent("all-reduce", TOKENS, 4 * (2 * c.n_experts + 3)), 0)
    ticks = len(schedules.gpipe(z.mesh[STAGE], M).table) // 2  # gpipe has as many forward ticks as backward ticks
    message = ticks * sent("collective-permute", (STAGE,), z.b * z.t * c.d_model * z.width)
    add("stages", "collective-permute", (STAGE,), message, message, "collective-permute")
    for w in declared:
        if w.d.trainable:
            one = sent("all-reduce", w.replicas, w.local_size // w.layers * w.d.dtype.itemsize)
            add("gradients over " + "*".join(w.replicas), "all-reduce", w.replicas, 0, one, "all-reduce", [short(w)])
    return list(found.values())


def limits(which: str) -> dict[str, list]:
    """Return the largest size of each axis, up to MOST devices, and why the next one is refused."""
    from pipeline import fit
    from utils import UserError

    found = {}
    for axis in AXES:
        for size in (2**n for n in range(int(math.log2(MOST)) + 1)):
            try:
                fit.check(preset(which).model, MeshConfig(**{axis: size}))
            except UserError as error:
                found[axis] = [size // 2, str(error).split("; ")[0]]
                break
    return found


def tables() -> dict:
    """Return what mesh.js reads. For a mesh: microbatches, sequences per microbatch, and the bytes of each line."""
    from pipeline import fit

    models = {}
    for which in MODELS:
        most, found = limits(which), {}
        for mesh in meshes():
            if all(mesh.sizes[axis] <= size for axis, (size, _) in most.items()):
                cfg = settings(which, mesh)
                fit.check(cfg.model, mesh)
                split, there = fit.split_batch(cfg), lines(cfg, which)
                both = [[*map(round, line["bytes"])] for line in there]
                counted = [ahead if ahead == back else [ahead, back] for ahead, back in both]
                found[planner_widget.name(mesh)] = [split.microbatches, split.device_batch, counted]
        fields = ("name", "kind", "back_kind", "axes", "of")
        says = lambda name: SAYS.get(name) or SAYS[name.split()[0]]
        fixed = [{field: line[field] for field in fields} | {"says": says(line["name"])} for line in there]
        models[which] = {"arrays": arrays(which), "lines": fixed, "meshes": found, "most": most}
    return {"models": models, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "devices": MOST}


def write(folder: Path) -> Path:
    return planner_widget.write_tables(folder / "mesh_data.js", "MESH_DATA", "docs/mesh_explorer.py", tables)


# The page -------------------------------------------------------------------------------------------------------------


def mesh_explorer() -> str:
    from docs.pictures import COLOURS

    sliders = "".join(planner_widget.slider(axis, COLOURS[axis], MOST) for axis in AXES)
    return f"""<form id="mesh-explorer" class="explorer" autocomplete="off">
{planner_widget.NO_SCRIPT}
<div class="side">
<div class="pinned">
<div class="devices" role="group" aria-label="devices of the mesh; use the arrow keys to move between them"></div>
<p class="said" role="status"></p>
</div>
<fieldset><legend>mesh</legend>{sliders}</fieldset>
<div class="selects">{planner_widget.select("layer", "model", list(MODELS.items()))}</div>
<p class="note">On each device: its tokens (sequences down, positions across), its layers, and its shard of one matrix,
<code class="matrix"></code> (with experts, a strip above shows which). The dark part is on the device.</p>
</div>
<div class="device"></div>
</form>
<script src="_static/mesh_data.js"></script>
<script src="_static/mesh.js"></script>
<script src="_static/mesh_page.js"></script>"""
