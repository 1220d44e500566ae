"""Tests of what the site's pages do when a reader uses them, in a headless Chromium."""

import json
import re

import pytest

from config import AXES, Config, replace
from docs import build
from plan import planner
from plan.count import costs
from tests.site.browser import evaluate
from weights import published

pytestmark = pytest.mark.site

# Predictions ----------------------------------------------------------------------------------------------------------

CHAPTER = "chapters/03_fsdp.html"
TYPE = """
const folds = [...document.querySelectorAll("details.answer")], box = folds[0].closest(".prediction");
const output = folds[0].querySelector(".cell_output"), wanted = output.textContent.match(/: (-?[\\d,.]*\\d)/)[1];
const visible = () => output.checkVisibility();
const hidden = folds.every((fold) => !fold.open) && !visible();
const inside = [...folds[0].children].map((one) => one.tagName);
const answer = (text) => {
  box.querySelector("input").value = text;
  box.querySelector("form").requestSubmit();
  return { said: box.querySelector("[role=status]").textContent, open: folds[0].open };
};
const twice = String(2 * Number(wanted.replaceAll(",", "")));
return { hidden, inside, folds: folds.length, wanted, word: answer("many"), twice: answer(twice),
         right: answer(wanted), visible: visible() };
"""


def test_an_answer_is_folded_until_the_reader_predicts():
    """Catches an answer that is visible at once, and a verdict that differs from the printed number."""
    [seen] = evaluate({"page": CHAPTER, "script": TYPE})
    assert seen["hidden"]
    assert seen["folds"] >= 2
    assert seen["inside"][:2] == ["SUMMARY", "DIV"]
    assert not {*seen["inside"]} & {"SECTION", "BLOCKQUOTE", "H2"}
    assert seen["word"] == {"said": "Type a number.", "open": False}
    assert seen["twice"]["open"]
    assert "2 times as much" in seen["twice"]["said"]
    assert seen["right"]["said"].startswith(f"Right: {seen['wanted']}")
    assert seen["visible"]


def test_every_prediction_of_every_chapter_is_folded():
    """Catches an answer that is visible because its label is computed, or its line has an unusual form."""
    script = """const cells = [...document.querySelectorAll(".cell")].filter((one) => !one.closest("details.answer"));
      const asking = cells.filter((one) => one.querySelector(".cell_input")?.textContent.includes("lesson.predicted("));
      const calls = (cell) => cell.querySelector(".cell_input").textContent.split("lesson.predicted(").length - 1;
      const fields = (cell) => cell.nextElementSibling?.matches(".prediction")
        ? cell.nextElementSibling.querySelectorAll("input").length : 0;
      return { folded: asking.length,
               open: asking.filter((cell) => fields(cell) !== calls(cell)).map((cell) => cell.textContent) };"""
    chapters = [path.relative_to(build.HTML).as_posix() for path in sorted((build.HTML / "chapters").glob("*.html"))]
    chapters = [name for name in chapters if name not in build.forwards()]
    assert chapters
    for name, seen in zip(chapters, evaluate(*({"page": name, "script": script} for name in chapters)), strict=True):
        assert seen["folded"] and not seen["open"], (name, seen["open"])


ANSWERS = """
const row = ({ what, value, text, within }) => [what, value, text, within];
const cell = (code, ...lines) => answersOf(code, lines.join("\\n")).map(row);
return [
  cell('lesson.predicted(what, mine, times, "times")', "3 times: 1",
       "all-reduce: 8 bytes, a device sends 14", "ratio: 2.5 times."),
  cell('lesson.predicted(f"{kind} of [{s}]", mine, n, "bytes", within=0.1)', "all-reduce of [B, D]: 1,024 bytes."),
  cell('lesson.predicted("a", x, 1)\\nlesson.predicted("b", y, 2)', "b: 2.", "a: 1.234e+05."),
];
"""


def test_an_answer_is_found_in_what_a_cell_prints():
    """Catches a line of other output that is taken for the answer, and a label that is not a plain string."""
    assert evaluate({"page": "index.html", "script": ANSWERS}) == [[
        [["ratio", 2.5, "2.5 times", 0.005]], [["all-reduce of [B, D]", 1024, "1,024 bytes", 0.1]],
        [["a", 123400, "1.234e+05", 0.005], ["b", 2, "2", 0.005]],
    ]]  # fmt: skip


def test_nothing_is_folded_without_javascript():
    """Catches an answer that a reader without JavaScript can never open."""
    script = """const outputs = [...document.querySelectorAll(".cell_output")].filter((one) => !one.closest("details"));
      return { folds: document.querySelectorAll("details.answer").length,
               visible: outputs.length > 9 && outputs.every((one) => one.checkVisibility()) };"""
    [seen] = evaluate({"page": CHAPTER, "scripting": False, "script": script})
    assert seen == {"folds": 0, "visible": True}


def test_printing_opens_every_fold():
    """Catches a printed page without its answers and solutions, and folds that stay open on the screen."""
    script = """const all = [...document.querySelectorAll(".bd-article details")];
      const open = () => all.filter((one) => one.open).length;
      const before = open();
      dispatchEvent(new Event("beforeprint"));
      const printed = open();
      dispatchEvent(new Event("afterprint"));
      return { before, printed, after: open(), all: all.length };"""
    [seen] = evaluate({"page": CHAPTER, "script": script})
    assert seen["printed"] == seen["all"] > seen["before"] == seen["after"]


# The first page -------------------------------------------------------------------------------------------------------

HERO = """
const box = document.querySelector("#hero"), toggle = box.querySelector("input");
const said = () => box.querySelector(".said").textContent;
const steps = () => box.querySelector(".printed").getAttribute("points").split(" ").filter(Boolean).length;
"""


def test_the_first_page_plays_its_claim():
    """Catches a figure in which the run without the sum does not print the lower loss, or is right on all rows."""
    script = (
        HERO
        + """const summed = said();
      toggle.click();
      return { summed, apart: said(), steps: steps() };"""
    )
    [seen] = evaluate({"page": "index.html", "still": True, "script": script})
    numbers = lambda text: [float(x) for x in re.findall(r"\d+\.\d+|\d+", text)]
    _, right, *_ = numbers(seen["summed"])
    printed, _, on_all_rows = numbers(seen["apart"])[:3]
    assert seen["steps"] == 100
    assert printed < right / 2 < 2 * right < on_all_rows


@pytest.mark.parametrize("phone", [False, True])
def test_the_figure_of_the_first_page_plays(phone):
    """Catches a figure that stands still, never ends, or is wider than a phone."""
    script = (
        HERO
        + """const wait = (ms) => new Promise((done) => setTimeout(done, ms));
      await wait(2500);
      const first = steps(), place = box.querySelector(".sum").getAttribute("transform");
      await wait(300);
      const moved = place !== box.querySelector(".sum").getAttribute("transform");
      box.querySelector("button").click();
      const paused = steps();
      await wait(2000);
      return { first, moved, still: steps() === paused, wide: box.scrollWidth <= innerWidth };"""
    )
    [seen] = evaluate({"page": "index.html", "phone": phone, "script": script})
    assert 0 < seen.pop("first") < 60
    assert seen == {"moved": True, "still": True, "wide": True}


def test_the_first_page_has_its_figure_without_javascript():
    """Catches an empty space where the figure plays."""
    script = """return document.querySelector("#hero figure.falling svg").checkVisibility();"""
    assert evaluate({"page": "index.html", "scripting": False, "script": script}) == [True]


# Explorers ------------------------------------------------------------------------------------------------------------

CONTRAST = """
const level = (text) => {
  const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = text.match(/[\\d.]+/g).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = level(getComputedStyle(document.body).backgroundColor);
const contrast = (one) => {
  const own = level(getComputedStyle(one).color);
  return (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05);
};
const labels = [...document.querySelectorAll(".axis-control span, figure.axis figcaption code")];
return Object.fromEntries(labels.map((one) => [one.textContent, contrast(one)]));
"""


@pytest.mark.parametrize("page", ["mesh_explorer.html", "planner_widget.html", "how_to_read.html"])
def test_names_of_axes_are_readable(page):
    """Catches the name of an axis in a color that is too light on the page, or too dark in dark mode."""
    for labels in evaluate(*({"page": page, "dark": dark, "script": CONTRAST} for dark in (False, True))):
        assert {*AXES} <= {*labels}
        assert not {name: contrast for name, contrast in labels.items() if contrast < 4.5}


@pytest.mark.parametrize("phone", [False, True])
def test_the_pinned_mesh_stays_below_the_header(phone):
    """Catches a mesh whose first row of devices slides under the bar at the top."""
    script = """const last = document.querySelector("#mesh-explorer .array:last-child");
      last.scrollIntoView({ block: "center", behavior: "instant" });
      await new Promise((done) => setTimeout(done, 300));
      const box = (name) => document.querySelector(name).getBoundingClientRect();
      return { header: box(".bd-header-article").bottom, mesh: box("#mesh-explorer .devices button").top };"""
    [seen] = evaluate({"page": "mesh_explorer.html?mesh=fsdp=8,tensor=4", "phone": phone, "script": script})
    assert seen["header"] <= seen["mesh"] <= seen["header"] + 30


def test_colors_mean_axes():
    """Catches a bar of memory or time in the color of a mesh axis that it has nothing to do with."""
    script = """const bars = [...document.querySelectorAll("#planner .bar")].at(-2);
      return [...bars.querySelectorAll("i")].map((one) => one.style.background);"""
    [seen] = evaluate({"page": "planner_widget.html", "script": script})
    assert len(seen) > 3
    for color in seen:
        red, _, blue = map(int, re.findall(r"\d+", color))
        assert abs(red - blue) < 30, color  # a gray


@pytest.mark.parametrize("name", ["mesh_explorer", "schedule_explorer", "layer_timeline", "planner_widget"])
def test_explorers_use_the_whole_page(name):
    """Catches an explorer that leaves a third of a desktop screen empty."""
    script = """const right = (name) => document.querySelector(name).getBoundingClientRect().right;
      return innerWidth - Math.max(right(".explorer, #planner"), right(".explorer > :last-child, #planner output"));"""
    [margin] = evaluate({"page": f"{name}.html", "script": script})
    assert margin < 60


def test_the_mesh_shows_what_each_device_holds():
    """Catches a mesh of numbered buttons, and a device whose small figure disagrees with its large one."""
    script = """const share = (svg, which) => {
        const whole = [...svg.querySelectorAll(".whole")][which], held = [...svg.querySelectorAll(".held")];
        const [x, y, w, h] = ["x", "y", "width", "height"].map((side) => Number(whole.getAttribute(side)));
        const inside = held.map((one) => ["x", "y", "width", "height"].map((side) => Number(one.getAttribute(side))))
          .filter(([left, top]) => left >= x - 0.1 && left < x + w && top >= y - 0.1 && top < y + h);
        return inside.reduce((sum, [, , width, height]) => sum + width * height, 0) / (w * h);
      };
      const tiles = [...document.querySelectorAll("#mesh-explorer .devices svg")];
      return { first: document.querySelector("#mesh-explorer > div").querySelector(".devices") !== null,
               shares: tiles.map((svg) => [0, 1, 2].map((which) => share(svg, which))) };"""
    [seen] = evaluate({"page": "mesh_explorer.html?model=llama3_8b&mesh=stage=2,fsdp=2,tensor=2", "script": script})
    assert seen["first"]
    assert len(seen["shares"]) == 8
    for tokens, layers, matrix in seen["shares"]:
        assert tokens == pytest.approx(1 / 4, abs=0.01)  # fsdp and tensor
        assert layers == pytest.approx(1 / 2, abs=0.01)
        assert matrix == pytest.approx(1 / 4, abs=0.01)


MOVE = """
const form = document.querySelector(".explorer, #planner"), field = form.elements;
const set = (name, value) => {
  field[name].value = value;
  for (const kind of ["input", "change"]) field[name].dispatchEvent(new Event(kind, { bubbles: true }));
};
const pause = () => new Promise((done) => setTimeout(done, 20));
const planned = async () => { while (form.dataset.state === "busy") await pause(); };
"""
STATE = """const state = () => Object.fromEntries([...new FormData(document.querySelector(".explorer, #planner"))]);
"""
MOVES = {
    "mesh_explorer": """set("fsdp", "2"); set("tensor", "1"); set("stage", "0"); set("model", "llama3_8b");
      form.querySelector("[data-device='7']").click(); form.querySelector("[data-line='weights']").click();""",
    "schedule_explorer": """set("schedule", "interleaved"); set("stages", "2"); set("microbatches", "6");
      set("time", "5");""",
    "layer_timeline": """set("mesh", "fsdp=16,tensor=2"); set("tensor_exchange", "ring");""",
    "planner_widget": """set("preset", "llama3_8b"); set("topology", "v5p:4x4x4"); set("fsdp", "4"); set("tensor", "1");
      set("batch_size", "128"); set("remat", "dots"); set("tokens", "15e12"); set("price", "2.1"); await planned();""",
}


@pytest.mark.parametrize("name", MOVES)
def test_the_address_has_the_state_of_the_page(name):
    """Catches a link that shows another state than the one that was copied."""
    seen = "state: state(), pressed: form.querySelectorAll(\"[aria-pressed='true']\").length"
    moved = MOVE + STATE + MOVES[name] + f"return {{ address: location.search, {seen} }};"
    [first] = evaluate({"page": f"{name}.html", "script": moved})
    [again] = evaluate({"page": name + ".html" + first["address"], "script": MOVE + STATE + f"return {{ {seen} }};"})
    assert len(first["address"]) > 8
    assert again == {key: first[key] for key in again}


@pytest.mark.parametrize("name", MOVES)
def test_a_page_that_needs_javascript_says_so(name):
    """Catches dead sliders without an explanation."""
    script = """return document.querySelector(".needs-script")?.checkVisibility() ?? false"""
    assert evaluate({"page": f"{name}.html", "scripting": False, "script": script}) == [True]


def test_the_planner_searches_all_meshes():
    """Catches a search that misses a faster mesh, lists one that does not fit, or does not select what was clicked."""
    script = (
        MOVE
        + """
      form.querySelector("[name=search]").click();
      const box = form.querySelector(".found");
      for (let i = 0; i < 2000 && !box.querySelector("td"); i++) await new Promise((done) => setTimeout(done, 50));
      const rows = [...box.querySelectorAll("tbody tr")].map((row) => [...row.children].map((one) => one.innerText));
      box.querySelector("tbody tr:nth-child(3) button").click();
      const text = box.querySelector("p").innerText;
      set("batch_size", "1024");
      await planned();
      return { rows, text, verdict: document.querySelector("#planner .verdict").innerText, left: box.innerText,
               address: location.search };"""
    )
    page = "planner_widget.html?preset=llama3_8b&topology=v5p:2x2x4&mesh=fsdp=16&batch_size=64"
    [seen] = evaluate({"page": page, "script": script})
    assert "Of 70 meshes of 16 devices" in seen["text"]
    slower = [float(row[2].strip("+%")) for row in seen["rows"]]
    assert len(slower) == 10 and slower == sorted(slower) and slower[0] == 0
    assert seen["rows"][2][0] in seen["address"].replace("%3D", "=")
    assert seen["verdict"].startswith("step ")
    assert seen["left"] == ""


def test_the_planner_opened_as_a_file_says_how_to_read_the_guide():
    """Catches a page that waits forever for a worker that the browser does not load from a file."""
    page = (build.HTML / "planner_widget.html").as_uri()
    script = """return document.querySelector("#planner output").innerText"""
    [seen] = evaluate({"page": page, "script": script})
    assert seen == ("The planner cannot run in a page that is opened as a file. Run make read in the folder of the "
                    "project, and open the address that it prints.")  # fmt: skip


MIXTRAL = {"model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 12,
           "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 50304, "num_local_experts": 8,
           "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}  # fmt: skip
FETCHED = """
const asked = [], text = (selector) => document.querySelector(`#planner ${selector}`).innerText;
globalThis.fetch = async (address) => {
  asked.push(address);
  if (answers.length) return new Response(...answers.shift());
  throw new Error("no network");
};
const get = async (name) => {
  set("hub", name);
  await planned();
  form.querySelector("[name=fetch]").click();
  await new Promise((done) => setTimeout(done, 200));
  await planned();
  return text(".fetched");
};
set("preset", "config");
await planned();
const before = text(".fetched"), odd = await get("Mixtral 8x7B"), asked_for_odd = asked.length;
const gated = await get("meta/secret"), missing = await get("meta/no");
const found = await get("mistralai/Mixtral-8x7B-v0.1");
const config = field.config.value, output = text("output"), offline = await get("a/b");
return { before, odd, asked_for_odd, gated, missing, found, config, output, offline, asked };
"""


def test_the_page_fetches_a_config_json_on_a_click():
    """Catches a request to the hub that nobody asked for, and an answer that is taken for a config.json."""
    config = json.dumps(MIXTRAL)
    answers = [["", {"status": 401}], ["", {"status": 404}], [config]]
    script = f"{MOVE}const answers = {json.dumps(answers)};{FETCHED}"
    [seen] = evaluate({"page": "planner_widget.html", "script": script})
    assert seen["before"] == "This button sends the page's only request to another host."
    assert seen["odd"] == '"Mixtral 8x7B" is not ORG/NAME, such as Qwen/Qwen3-8B.' and not seen["asked_for_odd"]
    assert seen["gated"] == "meta/secret does not exist, or you have to log in to read it. Then paste its config.json."
    assert seen["missing"] == "meta/no has no config.json there (status 404)."
    assert seen["config"] == config and seen["found"].endswith("its config.json is above.")
    assert "mixtral with " in seen["output"] and "from config.json" in seen["output"]
    assert seen["offline"].startswith(
        "https://huggingface.co cannot be reached (no network). Paste the config.json of a/b"
    )
    hub = "https://huggingface.co/{}/resolve/main/config.json"
    names = ("meta/secret", "meta/no", "mistralai/Mixtral-8x7B-v0.1", "a/b")
    assert seen["asked"] == [hub.format(name) for name in names]


def test_a_link_restores_a_plan_of_a_pasted_config_json():
    """Catches a link that loses the model or a setting, and an error that is not the planner's line."""
    shown = """{ state: state(), text: form.querySelector("output").innerText }"""
    script = f"""
      set("preset", "config"); set("topology", "2*v5p:2x2x4"); set("mesh", "data=2,fsdp=8,tensor=2");
      set("batch_size", "64"); set("config", "{{"); await planned();
      const refused = form.querySelector("output").innerText;
      set("config", {json.dumps(json.dumps(MIXTRAL))}); await planned();
      return {{ refused, address: location.search, ...{shown} }};"""
    [seen] = evaluate({"page": "planner_widget.html", "script": MOVE + STATE + script})
    assert "config.json: not JSON" in seen["refused"]
    cfg = replace(Config(), model=published.describe(MIXTRAL)[1], mesh="data=2,fsdp=8,tensor=2",
                  **{"data.batch_size": 64, "data.seq_len": 4096})  # fmt: skip
    one = planner.plan(cfg, "2*v5p:2x2x4")
    assert f"step       {one.estimate}; MFU" in seen["text"]
    assert f"mixtral with {costs.parameters(cfg.model)[0]:,} parameters, from config.json" in seen["text"]
    assert "python -m plan config.json --topology 2*v5p:2x2x4 --mesh data=2,fsdp=8,tensor=2" in seen["text"]
    [again] = evaluate({"page": "planner_widget.html" + seen["address"], "script": MOVE + STATE + f"return {shown};"})
    assert json.loads(again["state"].pop("config")) == json.loads(seen["state"].pop("config")) == MIXTRAL
    assert again == {"state": seen["state"], "text": seen["text"]}


def test_an_address_cannot_add_elements_to_the_planner():
    """Catches a shared link whose mesh, shown in an error, runs as HTML."""
    page = "planner_widget.html?preset=moe1b&topology=v4%3A4x4x2&mesh=%3Cb%20id%3Dbad%3Efsdp"
    script = "return [document.querySelectorAll('#bad').length, document.querySelector('#planner output').textContent]"
    ((added, text),) = evaluate({"page": page, "script": script})
    assert added == 0 and "<b id=bad>fsdp" in text and "unknown axis" in text
