"""The controls of the planner's page, and helpers of the other interactive pages.

docs/_static/planner_page.js reads the controls, and asks the planner itself, which runs in the browser: see
`in_browser.py`.
"""

import hashlib
import itertools
import json
import math
from pathlib import Path

from config import AXES, PRESETS, MeshConfig, preset
from docs.notebooks import ROOT

SHAPES = {
    3: {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"},
    2: {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    0: {2**n: str(2**n) for n in range(10)},
}  # by number of torus dims: chips of a slice, and its name at Google Cloud
MOST = 512  # devices
SHOWN = [name for name in PRESETS if name != "tiny"]


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


def state(page: str) -> str:
    """Return a hash of the files that determine the tables of a page."""
    files = ["docs/planner_widget.py", page, "model.py", "sharding.py", "generate/cache.py"]
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
    """Write what the page loads, unless its source files are unchanged: Pyodide, and the archive with the planner."""
    from docs import in_browser

    in_browser.write_pyodide(folder / "pyodide")
    file, mark = folder / "planner.tar.gz", folder.parent / "planner.state"
    sources = [Path(in_browser.__file__).read_bytes(), *in_browser.files(()).values()]
    now = hashlib.sha256(b"".join(sources)).hexdigest()
    if not (file.exists() and mark.exists() and mark.read_text(encoding="utf-8") == now):
        file.write_bytes(in_browser.archive())
        mark.write_text(now, encoding="utf-8")
    return file


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


# How the page shows a preset at first: chips, devices along axes, and sequences
START = {"laptop": ("fsdp=4", ""), "dense_124m": ("fsdp=16", 512), "llama3_8b": ("fsdp=32", 64),
         "llama3_70b": ("fsdp=64", 64), "mixtral_8x7b": ("fsdp=32,tensor=2", 64),
         "deepseek_v3": ("fsdp=32,tensor=4", 64)}  # fmt: skip
EXAMPLES = ("v4:4x4x4", "v5e:16x16", "v5p:8x8x8", "v6e:16x16", "tpu7x:4x4x4", "4*v5p:4x4x8", "16*h100", "h200:64",
            "4*gb200-nvl72")  # fmt: skip
CONFIG = "a config.json ..."
HUB = "https://huggingface.co"


def start_of(which: str, chip) -> dict:
    """Return the page's settings of a preset."""
    cfg, (mesh, batch) = preset(which), START.get(which, ("", ""))
    mesh = MeshConfig.parse(mesh) if mesh else cfg.mesh if cfg.mesh.devices > 1 else MeshConfig(fsdp=16)
    return {
        "mesh": str(mesh), "topology": f"{chip.key}:{shapes(chip)[mesh.devices]}", "seq_len": cfg.data.seq_len,
        "batch_size": batch or cfg.data.batch_size, "sparse": bool(cfg.model.n_experts),
    }  # fmt: skip


def page_data() -> dict:
    """Return what the page's controls need, before the planner has loaded."""
    from plan.chips import hardware
    from plan.count.memory import MEANS

    of_chip = lambda chip: {"shapes": shapes(chip), "torus_dims": chip.torus_dims, "per_chip": chip.devices_per_chip}
    chips = {key: of_chip(chip) for key, chip in hardware.CHIPS.items() if key != "cpu"}
    presets = {which: start_of(which, hardware.CHIPS["v4"]) for which in SHOWN}
    return {"presets": presets, "chips": chips, "means": MEANS}


def text(label: str, name: str, hint: str, kind: str = "text", **more: str) -> str:
    attributes = "".join(f' {key}="{value}"' for key, value in more.items())
    control = f'<input type="{kind}" name="{name}" placeholder="{hint}" spellcheck="false"{attributes}>'
    return f"<label>{label}{control}</label>"


def planner_widget() -> str:
    from docs.pictures import COLOURS

    choices = lambda *pairs: [("auto", "auto"), *pairs]
    recompute = choices(("full", "whole layers"), ("branches", "attention and feed-forward separately"),
                        ("dots", "everything except matmuls"), ("none", "nothing"))  # fmt: skip
    keys = choices(("gather", "all-gather"), ("ring", "ring"), ("all_to_all", "all-to-all of heads"))
    schedules = choices(*((one, one) for one in ("gpipe", "1f1b", "interleaved", "zb")))
    join = choices(("layer", "at each use"), ("step", "once per step"))
    sliders = "".join(slider(axis, COLOURS[axis]) for axis in AXES)
    listed = "".join(f'<option value="{one}">' for one in EXAMPLES)
    models = [(one, one) for one in SHOWN]
    return f"""<form id="planner" autocomplete="off" data-state="busy">
{NO_SCRIPT}
<script type="application/json">{json.dumps(page_data())}</script>
<datalist id="topologies">{listed}</datalist>
<div class="selects">
{select("model", "preset", [*models, ("config", CONFIG)])}
{text("chips (topology)", "topology", "v5p:4x4x8, 16*h100", list="topologies")}
{text("sequences in the global batch", "batch_size", "as the preset", "number", min="1")}
{text("positions per sequence", "seq_len", "as the preset", "number", min="1")}
{select("schedule", "schedule", schedules)}
{select("recompute", "remat", recompute)}
{select("all-gather weights", "gather", join)}
{select("communication over tensor", "tensor_exchange", choices(("ring", "ring"), ("gather", "all-gather")))}
{select("communication over context", "context_attention", keys)}
{text("tokens to train on", "tokens", "15e12")}
{text("dollars per chip hour", "price", "2.1")}
{text("goodput", "goodput", "0.95, or mtbf=50000,disk=1")}
<label class="check"><input type="checkbox" name="explain" value="1">explain the largest losses</label>
</div>
<fieldset class="own" hidden data-hub="{HUB}"><legend>a model of Hugging Face</legend>
<label>Paste its <code>config.json</code>:
<textarea name="config" rows="6" spellcheck="false"></textarea></label>
{text("or name the model", "hub", "ORG/NAME")}
<button type="button" name="fetch">get its config.json from {HUB.removeprefix("https://")}</button>
<p class="fetched" role="status">This button sends the page's only request to another host.</p>
</fieldset>
<fieldset><legend>mesh</legend>{text("", "mesh", "fsdp=16,tensor=2")}{sliders}</fieldset>
<p><button type="button" name="search">search all meshes of these chips</button></p>
<div class="found" role="status"></div>
<output aria-live="polite"><p>The planner is loading: the Python of the command line, 14 MB.</p></output>
</form>
<script src="_static/planner_page.js"></script>"""
