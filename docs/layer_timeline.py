"""The layer timeline of the site: compiled schedules, simulated once by `--write`, and drawn from a file.

The simulation needs the TPU compiler and some minutes. The site needs neither: docs/_static/layer.js reads the file.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import linecache
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from docs import planner_widget
from docs.notebooks import ROOT
from utils import UserError, exit_status

HELP = """e.g. python -m docs.layer_timeline            # list the cases in the file
     python -m docs.layer_timeline --write    # simulate all cases: 15 to 40 minutes on 2 cores
     python -m docs.layer_timeline --write dense_layer    # only this case; the others stay unchanged

Compile training steps with the TPU compiler, simulate their schedules, and write the timeline of a layer, forward and
backward, to docs/_static/layer_timeline.json. Takes one to five
minutes per case. Needs `make extra-tpu`, but no TPU."""

FILE = ROOT / "docs/_static/layer_timeline.json"
SWITCHES = (
    "on",
    "mesh",
    "gather",
    "tensor_exchange",
    "remat",
)  # in the order of the page
WAYS = {"forward": False, "back": True}  # of a layer; True if JAX's scopes contain "transpose"
LABELS = {"on": "model and slice"}
SHORTEST_US = 0.5  # shorter events of the core are merged with their neighbor


@dataclass(frozen=True)
class Case:
    preset: str
    topology: str
    chips: str  # in words
    mesh: str
    remat: str
    gather: str = "layer"
    tensor_exchange: str = ""  # no choice if tensor is 1
    more: dict = field(default_factory=dict)

    @property
    def switches(self) -> dict[str, str]:
        chosen = (f"{self.preset} on {self.chips}", self.mesh, self.gather, self.tensor_exchange or "none", self.remat)
        return dict(zip(SWITCHES, chosen, strict=True))

    @property
    def flags(self) -> list[str]:
        """Return the flags of `python -m bench.overlap` for this step."""
        work = {"remat": self.remat, "gather": self.gather} | (
            {"tensor_exchange": self.tensor_exchange} if self.tensor_exchange else {})  # fmt: skip
        settings = {"topology": self.topology, "mesh": self.mesh} | {f"work.{name}": x for name, x in work.items()}
        return [self.preset, *(word for name, x in (settings | self.more).items() for word in (f"--{name}", str(x)))]


LLAMA = {"data.seq_len": 4096}
V5P = ("llama3_8b", "v5p:2x4x4", "32 v5p")
V5E = ("llama3_8b", "v5e:8x8", "64 v5e")
DENSE = ("dense_124m", "v5e:4x4", "16 v5e")
CASES = {
    "v5p_fsdp": Case(*V5P, "fsdp=32", "dots", more=LLAMA | {"data.batch_size": 32}),
    "v5p_gather": Case(*V5P, "fsdp=16,tensor=2", "dots", "layer", "gather", LLAMA | {"data.batch_size": 32}),
    "v5p_ring": Case(*V5P, "fsdp=16,tensor=2", "dots", "layer", "ring", LLAMA | {"data.batch_size": 32}),
    "v5e_fsdp": Case(*V5E, "fsdp=64", "full", more=LLAMA | {"data.batch_size": 64}),
    "v5e_gather": Case(*V5E, "fsdp=16,tensor=4", "full", "layer", "gather", LLAMA | {"data.batch_size": 64}),
    "v5e_ring": Case(*V5E, "fsdp=16,tensor=4", "full", "layer", "ring", LLAMA | {"data.batch_size": 64}),
    "dense_layer": Case(*DENSE, "fsdp=16", "dots", "layer", more={"work.device_batch": 16}),
    "dense_step": Case(*DENSE, "fsdp=16", "dots", "step", more={"work.device_batch": 16}),
}


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


# Making the file ------------------------------------------------------------------------------------------------------


def compiled_text(case: Case, say=print) -> str:
    from bench import overlap
    from plan import planner
    from plan.trace import compiled

    cfg, args = overlap.parse(case.flags)
    cfg = planner.plan(cfg, args.topology).cfg
    return compiled.compile_step(cfg, compiled.topology_mesh(cfg.mesh, args.topology), say).step.as_text()


def export(case: Case, text: str) -> dict:
    """Return the page's data for one compiled step, in microseconds from the start of a layer."""
    from bench import overlap
    from plan import planner
    from plan.chips import hardware
    from plan.simulate import replayed
    from plan.trace import compiled

    cfg, args = overlap.parse(case.flags)
    cfg = planner.plan(cfg, args.topology).cfg
    mesh = compiled.topology_mesh(cfg.mesh, args.topology)
    found = replayed.simulate(cfg, hardware.Topology.parse(args.topology), mesh, text)
    layers = {}
    for way, back in WAYS.items():
        name = longest(found, back)
        layers[way] = {"times": found.times[name], "us": rounded(found.played[name].seconds)} | drawn(
            found.played[name]
        )
    return {
        "switches": case.switches,
        "command": f"python -m bench.overlap {' '.join(case.flags)} --seconds",
        "tokens": cfg.data.batch_size * cfg.data.seq_len // cfg.mesh.devices,
        "step_us": rounded(found.seconds),
        "causes_us": {cause: rounded(seconds) for cause, seconds in found.causes.items()},
        "layers": layers,
    }


def rounded(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def longest(found, back: bool) -> str:
    """Return the computation with most of the time of the layers, forward or backward."""
    own = {}
    for name, played in found.played.items():
        inside = sum(e.end - e.start for e in played.events
                     if e.lane == "core" and "while/body" in e.scope and "loss_slot" not in e.scope
                     and ("transpose(" in e.scope) == back)  # fmt: skip
        own[name] = found.times.get(name, 0) * inside
    return max(own, key=own.get)


def drawn(played) -> dict:
    """Return the events of a computation as [start, end, label number, bytes], and labels as [lane, what, scope, line].

    Events of the core shorter than SHORTEST_US are merged with the previous event of the same kind, or left out.
    """
    words, rows, left_us = {}, [], 0.0
    for event in sorted(played.events, key=lambda e: (e.lane != "core", e.lane, e.start, e.end)):
        start, end = 1e6 * event.start, 1e6 * event.end
        key = (event.lane, event.what, scope(event.scope), line(event.source))
        if event.lane == "core" and end - start < SHORTEST_US and not event.what.startswith("waiting"):
            if rows and rows[-1][4] == event.lane and rows[-1][5] == event.what and start - rows[-1][1] < 0.01:
                rows[-1][1] = end
            else:
                left_us += end - start
            continue
        rows.append([start, end, words.setdefault(key, len(words)), event.wire_bytes, event.lane, event.what])
    events = [[round(start, 2), round(end, 2), number, size] for start, end, number, size, *_ in rows]
    own = {cause: rounded(seconds) for cause, seconds in played.own.items()}
    return {"own_us": own, "left_out_us": round(left_us, 2), "words": [*map(list, words)], "events": events}


SKIPPED = {"while", "body", "cond", "closed_call", "checkpoint", "shard_map", "transpose(jvp())", "jvp()"}


def scope(text: str) -> str:
    """Remove loops and branches from named scopes: `attend/pallas_call` remains."""
    kept = [part for part in text.split("/") if part and part not in SKIPPED and not part.endswith("_slot")]
    kept = [part for part in kept if not part.startswith(("branch_", "jit("))]
    return "/".join(kept).replace("rematted_computation", "computed again")


def line(source: str) -> str:
    """Return the text of a source line, because its number would soon be wrong."""
    place, _, function = source.partition(" in ")
    file, _, number = place.partition(":")
    found = [*ROOT.glob(file), *ROOT.glob(f"*/{file}")] if number else []
    if len(found) != 1:
        return ""
    written = linecache.getline(str(found[0]), int(number)).partition("  #")[0].strip()
    return f"{found[0].relative_to(ROOT)}, {function}: {written}"


def write_file(names, say=print) -> None:
    """Compile and simulate cases. Raises: UserError without libtpu, and for an unknown case."""
    if not importlib.util.find_spec("libtpu"):
        raise UserError("compiling the layer timelines needs the TPU compiler; install it with: make extra-tpu")
    if unknown := [name for name in names if name not in CASES]:
        raise UserError(f"unknown case {unknown[0]!r}; choose from: {', '.join(CASES)}")
    for name in names or CASES:
        say(f"{name}: python -m bench.overlap {' '.join(CASES[name].flags)}")
        put(name, export(CASES[name], compiled_text(CASES[name], say)))


def put(name: str, made: dict) -> None:
    made = {"made": versions() | {"date": datetime.date.today().isoformat()}} | made
    cases = (read()["cases"] if FILE.exists() else {}) | {name: made}
    ordered = {one: cases[one] for one in CASES if one in cases}
    body = ",\n".join(f'"{one}": {json.dumps(case, separators=(",", ":"))}' for one, case in ordered.items())
    FILE.write_text(f'{{"cases": {{\n{body}\n}}}}\n', encoding="utf-8")


def read() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(folder: Path) -> Path:
    """Write the file as a script, because a page opened from a disk can't read JSON."""
    out = folder / "layer_data.js"
    out.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(read() | {"switches": SWITCHES}, separators=(",", ":"))
    out.write_text(f"globalThis.LAYER_DATA = {data};\n", encoding="utf-8")
    return out


# The page -------------------------------------------------------------------------------------------------------------


def layer_timeline() -> str:
    from docs.pictures import COLOURS

    cases = read()["cases"].values()
    options = {switch: [*dict.fromkeys(case["switches"][switch] for case in cases)] for switch in SWITCHES}
    selects = "\n".join(
        planner_widget.select(LABELS.get(switch, switch), switch, [(value, value) for value in options[switch]])
        for switch in SWITCHES
    )
    axes = "; ".join(f"--{axis}: {colour}" for axis, colour in COLOURS.items())
    return f"""<form id="layer-timeline" class="explorer" autocomplete="off" style="{axes}">
{planner_widget.NO_SCRIPT}
<div class="selects">
{selects}
</div>
<p class="facts"></p>
<div class="player">
<label for="zoom">zoom</label><input type="range" id="zoom" name="zoom" min="0" max="5" value="0" step="1">
</div>
<p class="key"></p>
<div><div class="ways"></div>
<p class="said" role="status"></p></div>
<h3>The other cases of this model and slice</h3>
<div class="compared"></div>
<p class="note"></p>
</form>
<script src="_static/layer_data.js"></script>
<script src="_static/layer.js"></script>
<script src="_static/layer_page.js"></script>"""


def table() -> str:
    rows = [f"{'case':14} {'step':>9} {'waiting':>9}  made by"]
    for name, case in read()["cases"].items():
        waiting = sum(us for cause, us in case["causes_us"].items() if cause not in ("matmuls", "other ops", "copies"))
        made = "libtpu {libtpu}, JAX {jax}, {date}".format(**case["made"])
        rows.append(f"{name:14} {case['step_us'] / 1e6:7.3f} s {waiting / 1e6:7.3f} s  {made}")
    return "\n".join(rows)


@dataclass
class Arguments:
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  # cases, such as dense_layer; default: all
    write: bool = False  # compile and simulate them; otherwise list the cases in the file


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.layer_timeline", description=HELP)
    if args.write:
        write_file(args.names)
    print(table())


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
