"""The planner of the site: what docs/_static/planner.js evaluates, and the page's controls.

`planner_formulas.py` writes the formulas of each preset. This file writes which meshes a preset can use, the speeds of
the chips, and the links of each mesh on a slice, from `plan.hardware`.
"""

import hashlib
import itertools
import json
import math
from pathlib import Path

from config import AXES, PRESETS, MeshConfig, WorkConfig, preset
from docs.notebooks import ROOT

SHAPES = {
    3: {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"},
    2: {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16"},
    0: {n: str(n) for n in (1, 2, 4, 8, 16, 32, 64, 128)},
}  # by number of torus dims: chips of a slice, and its name at Google Cloud
MOST = 128  # devices
# The presets of the page. It has no control for the inputs of an encoder.
SHOWN = [name for name in PRESETS if name != "tiny" and not preset(name).model.encoder_layers]
GROUPS = [[axis for axis in AXES if axis in group.split("*")] for group in (
    "fsdp*expert*context", "fsdp*context", "data*stage", "data*tensor", "data*stage*tensor",
    "fsdp*expert*context*tensor", "data*fsdp*expert*context", "data*fsdp*expert*context*tensor",
    "data*stage*fsdp*expert*context", "*".join(AXES))
]  # axes that one collective can cover: weight shards, gradients of a table, sums of the loss  # fmt: skip


def meshes(devices: int) -> list[MeshConfig]:
    """Return all meshes of `devices` devices whose axes are powers of two; `devices` is a power of two."""
    power = devices.bit_length() - 1
    exponents = (e for e in itertools.product(range(power + 1), repeat=len(AXES)) if sum(e) == power)
    return [MeshConfig(*(2**n for n in e)) for e in exponents]


def shapes(chip) -> dict[int, str]:
    """Return the number of devices of each slice, at most MOST, and its shape."""
    all_sizes = {n * chip.devices_per_chip: shape for n, shape in SHAPES[chip.torus_dims].items()}
    whole = lambda n: n <= max(chip.domain, 1) or n % max(chip.domain, 1) == 0  # nodes of GPUs
    return {n: shape for n, shape in all_sizes.items() if n <= MOST and whole(n)}


def name(mesh: MeshConfig) -> str:
    return "".join(str(size.bit_length() - 1) for size in mesh.sizes.values())


def groups(mesh: MeshConfig) -> list[tuple[str, ...]]:
    """Return the groups of two or more axes, of more than one device each, that one collective can cover."""
    split = [tuple(axis for axis in group if mesh.sizes[axis] > 1) for group in GROUPS]
    return [*dict.fromkeys(group for group in split if len(group) > 1)]


def links_of(chip, links: dict[tuple, int]) -> dict[str, list[int]]:
    """Return the links of each mesh: first of its axes of more than one device, then of its groups of axes.

    New links are added to `links`.
    """
    from plan import hardware

    found = {}
    for shape in shapes(chip).values():
        topology = hardware.Topology.parse(f"{chip.key}:{shape}")
        for mesh in meshes(topology.devices):
            laid = [*hardware.layout(mesh, topology).values()]
            laid += [hardware.link(mesh, topology, group) for group in groups(mesh)]
            speeds = [(x.bytes_per_s, x.neighbour_bytes_per_s, x.all_to_all_bytes_per_s) for x in laid]
            shares = [tuple(speed / chip.link_bytes_per_s for speed in one) for one in speeds]
            found[name(mesh)] = [links.setdefault(one, len(links)) for one in shares]
    return found


def model_of(which: str) -> dict:
    """Return what the page needs to know about a preset, besides its formulas."""
    import model
    import sharding
    from docs import planner_formulas
    from pipeline import fit

    cfg, dims = preset(which), {}
    c, formulas = cfg.model, planner_formulas.OF_PRESET.get(which, which)
    names = planner_formulas.OPEN[formulas][-1] if formulas in planner_formulas.OPEN else ()
    fields = {letter: name for letter, name in (fit.SETTINGS | {"L": "n_layers"}).items() if name in names}
    for label, d in sharding.flatten_named(model.declare(c)).items():
        for letter, size, entry in zip(d.dims, d.shape, d.spec, strict=True):
            if axes := sharding.as_tuple(entry):
                one = fields.get(letter, size)
                dims.setdefault((one, axes), (label, letter, one, axes))
    heads = "n_heads" if c.attention == "mla" else "n_kv_heads"
    sizes = {name: getattr(c, name) for name in {*names, heads}} | {"n_blocks": c.n_blocks}
    return {
        "batch_size": cfg.data.batch_size, "seq_len": cfg.data.seq_len, "mesh": cfg.mesh.sizes, "formulas": formulas,
        "start": WorkConfig.baselines("least"), "dims": [*dims.values()], "heads": heads,
        "sizes": dict(sorted(sizes.items())),
    }  # fmt: skip


def tables() -> dict:
    """Return everything that planner.js reads."""
    from docs import planner_formulas
    from plan import hardware, hiding

    links: dict[tuple, int] = {}
    chips = {}
    for key, chip in hardware.CHIPS.items():
        if key != "cpu":
            chips[key] = {field: getattr(chip, field) for field in (
                "name", "peak_flops_per_s", "memory_bytes", "hbm_bytes_per_s", "torus_dims", "link_bytes_per_s",
                "devices_per_chip")} | {"shapes": shapes(chip), "links": links_of(chip, links)}  # fmt: skip
    return planner_formulas.tables(SHOWN) | {
        "presets": {which: model_of(which) for which in SHOWN}, "chips": chips, "links": list(links),
        "groups": GROUPS, "hides": list(hiding.HIDES),
    }  # fmt: skip


def state(page: str) -> str:
    """Return a hash of the files that determine the tables of a page."""
    files = ["docs/planner_widget.py", "docs/planner_formulas.py", page, "model.py", "sharding.py", "generate/cache.py"]
    rooms = ("config", "kernels", "overlap", "pipeline", "plan")
    rooms = [path for room in rooms for path in sorted((ROOT / room).glob("*.py"))]
    text = b"".join(path.read_bytes() for path in [*(ROOT / file for file in [*files, "requirements.txt"]), *rooms])
    return hashlib.sha256(text).hexdigest()


def write_tables(file: Path, variable: str, page: str, made) -> Path:
    """Write what `made` returns as a script for a page, unless its source files are unchanged."""
    mark = f"// {state(page)}\n"
    if not (file.exists() and file.read_text(encoding="utf-8").startswith(mark)):
        file.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(made(), separators=(",", ":"))
        file.write_text(f"{mark}globalThis.{variable} = {data};\n", encoding="utf-8")
    return file


def write(folder: Path) -> Path:
    """Write planner_data.js. This takes minutes, mostly for the links of 14,000 meshes."""
    return write_tables(folder / "planner_data.js", "PLANNER_DATA", "docs/planner_widget.py", tables)


# The page -------------------------------------------------------------------------------------------------------------


def slider(axis: str, colour: str, most: int = MOST) -> str:
    top = int(math.log2(most))
    control = f'<input type="range" name="{axis}" min="0" max="{top}" value="0" step="1">'
    return (f'<label class="axis-control" style="--axis:{colour}"><span>{axis}</span>{control}'
            f'<b data-size="{axis}">1</b></label>')  # fmt: skip


def select(label: str, field: str, options: list[tuple[str, str]]) -> str:
    inner = "".join(f'<option value="{value}">{text}</option>' for value, text in options)
    return f'<label>{label}<select name="{field}">{inner}</select></label>'


NO_SCRIPT = """<noscript><p class="needs-script">This page computes in your browser, so it needs JavaScript, which is
switched off. The chapters and all other pages work without it.</p></noscript>"""


OWN = {  # an example of a model that is no preset (Llama 2 13B); "": derived from the others
    "d_model": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "d_head": "", "d_ff": 13824, "vocab_size": 32000,
    "n_experts": "", "top_k": "",
}  # fmt: skip
LABELS = {"d_head": "d_head (or d_model / n_heads)", "d_ff": "d_ff (of an expert, if any)",
          "n_experts": "n_experts (or none)", "top_k": "top_k (or 2)"}  # fmt: skip


def own_model() -> str:
    """Return the fields of a model that is no preset."""
    field = '<label>{}<input type="number" name="{}" value="{}" min="1"></label>'
    numbers = "".join(field.format(LABELS.get(name, name), name, size) for name, size in OWN.items())
    return f"""<fieldset class="own" hidden><legend>your own model</legend>
<div class="selects">{numbers}
<label class="check"><input type="checkbox" name="tied" value="1">tied embeddings</label></div>
<p class="own-size"></p>
<label>Or paste the <code>config.json</code> of a Llama, Mistral, Qwen2 or Mixtral model of Hugging Face:
<textarea rows="4" spellcheck="false"></textarea></label>
<p class="own-model" role="status"></p>
</fieldset>"""


def planner_widget() -> str:
    from docs.pictures import COLOURS
    from plan import hardware

    same = lambda *names: [(one, one) for one in names]
    powers = lambda low, high: [(str(2**n), f"{2**n:,}") for n in range(low, high + 1)]
    chips = [(key, chip.name) for key, chip in hardware.CHIPS.items() if key != "cpu"]
    recompute = [("full", "whole layers"), ("branches", "attention and feed-forward separately"),
                 ("dots", "everything except matmuls"), ("none", "nothing")]  # fmt: skip
    keys = [("gather", "all-gather"), ("ring", "ring"), ("all_to_all", "all-to-all of heads")]
    join = [("layer", "at each use"), ("step", "once per step")]
    sliders = "".join(slider(axis, COLOURS[axis]) for axis in AXES)
    return f"""<form id="planner" autocomplete="off">
{NO_SCRIPT}
<div class="selects">
{select("model", "preset", [*same(*SHOWN), ("own", "your own model ...")])}
{select("chip", "chip", chips)}
{select("sequences in the global batch", "batch_size", powers(0, 12))}
{select("positions per sequence", "seq_len", powers(7, 17))}
{select("schedule", "schedule", same("gpipe", "1f1b", "interleaved", "zb"))}
{select("recompute", "remat", recompute)}
{select("all-gather weights", "gather", join)}
{select("communication over tensor", "tensor_exchange", [("ring", "ring"), ("gather", "all-gather")])}
{select("communication over context", "context_attention", keys)}
</div>
{own_model()}
<fieldset><legend>mesh</legend>{sliders}</fieldset>
<p><button type="button" name="search">search all meshes of this many devices</button></p>
<div class="found" role="status"></div>
<output aria-live="polite"></output>
</form>
<script src="_static/planner_data.js"></script>
<script src="_static/planner.js"></script>
<script src="_static/planner_page.js"></script>"""
