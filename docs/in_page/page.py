"""What the planner's page asks for: it sends settings as JSON, and gets a plan or an error as JSON."""

import dataclasses
import json
from pathlib import Path

from plan import without_jax

HERE = Path(__file__).parent
MISSING = without_jax.PACKAGES | {"resource", "tyro", "yaml"}
without_jax.install(MISSING, str(HERE / "mesh_utils.py"), (HERE / "jax_version").read_text())

import utils

utils.cache_directory = lambda: str(HERE)  # has the rows of layers, which JAX traced when the site was built

from config import AUTO, Config, preset, replace
from config.needs import unmet
from pipeline import fit
from plan import planner
from plan.answer import budget, explain, show
from plan.chips import hardware
from plan.count import traced_layer
from utils import UserError
from weights import published

without_jax.ready(lambda name: UserError(f"this page has no JAX, which the planner needs for {name}; use "
                                         "`python -m plan` on a computer"))  # fmt: skip


def from_trace(*_):
    raise UserError("this page has no trace of a layer of this kind; use `python -m plan` on a computer, with JAX")


traced_layer.from_trace = from_trace

SETTINGS = ("schedule", "remat", "gather", "tensor_exchange", "context_attention")


def number(name: str, text: str) -> float:
    try:
        return float(str(text).replace(",", ""))
    except ValueError:
        raise UserError(f"{name}: {text!r} should be a number") from None


def settings(asked: dict) -> tuple[Config, list[str]]:
    """Return the settings, and lines about a config.json. asked: the page's controls, and `more` settings by name"""
    start, lines = None, []
    if asked.get("config"):
        Path("config.json").write_text(asked["config"], encoding="utf-8")
        found = published.read("config.json")
        start, lines = found.config, found.lines()
    work = {name: asked[name] for name in SETTINGS if asked.get(name)}
    changes = {f"work.{name}": value for name, value in work.items()} | {"mesh": asked["mesh"]}
    for name in ("batch_size", "seq_len"):
        if asked.get(name):
            changes[f"data.{name}"] = int(number(name, asked[name]))
    changes |= asked.get("more", {})
    return replace(preset(asked["preset"]) if start is None else start, **changes), lines


def command(asked: dict, cfg: Config, one: planner.Plan) -> str:
    """Return the command that prints the same plan."""
    of_file = bool(asked.get("config"))
    base = Config() if of_file else preset(asked["preset"])
    words = ["python -m plan", "config.json" if of_file else asked["preset"], f"--topology {one.topology}",
             f"--mesh {cfg.mesh}"]  # fmt: skip
    if of_file or cfg.data.batch_size != base.data.batch_size:
        words.append(f"--data.batch_size {cfg.data.batch_size}")
    if of_file or cfg.data.seq_len != base.data.seq_len:
        words.append(f"--data.seq_len {cfg.data.seq_len}")
    for name in SETTINGS:
        if (value := getattr(cfg.work, name)) != AUTO and not unmet(cfg, f"work.{name}"):
            words.append(f"--work.{name} {value}")
    words += [f"--{name} {asked[name]}" for name in ("tokens", "price", "goodput") if asked.get(name)]
    return " ".join(words + ["--explain"] * bool(asked.get("explain")))


def lines_of(one: planner.Plan, asked: dict) -> list[str]:
    """Return the lines that `python -m plan` prints around its tables."""
    lines = [*show.answer(one), *show.heading(one)]
    texts = asked.get("price", ""), asked.get("goodput", "")
    for name in ("price", "goodput"):
        if asked.get(name) and not asked.get("tokens"):
            raise UserError(f"{name} has an effect only with tokens; fill in tokens, such as 15e12")
    if asked.get("tokens"):
        tokens = budget.parse_tokens(asked["tokens"].replace(",", ""))
        lines += budget.lines(budget.budget(one, budget.Asked(tokens, *texts)), one)
    return lines + (explain.lines(explain.explain(one), one) if asked.get("explain") else [])


def plan(asked: dict) -> dict:
    """Return the numbers of a plan, see `planner.Plan.to_json`, and the lines and the command that go with it."""
    if asked.get("count"):  # before a search
        return {"devices": hardware.Topology.parse(asked["topology"]).devices}
    cfg, lines = settings(asked)
    if asked.get("brief"):  # one mesh of a search, which plans what is `auto` as `planner.search` does at first
        autos = cfg.work.auto_settings
        least = {f"work.{name}": value for name, value in cfg.work.baselines("least").items() if name in autos}
        cfg = replace(cfg, **least)
        cfg = dataclasses.replace(cfg, work=cfg.work.resolved)
    one = planner.plan(cfg, hardware.Topology.parse(asked["topology"]))
    if asked.get("brief"):
        mesh, fits, peak_bytes = str(cfg.mesh), one.fits, one.peak_bytes
        return {"mesh": mesh, "fits": fits, "peak_bytes": peak_bytes} | (
            {"step_s": one.step_s, "mfu": one.mfu(one.step_s)} if fits else {})  # fmt: skip
    chip, batch = one.topology.chip, fit.split_batch(one.cfg)
    return one.to_json() | {
        "lines": lines + lines_of(one, asked), "command": command(asked, cfg, one), "chip": dataclasses.asdict(chip),
        "devices": one.topology.devices, "device_batch": batch.device_batch, "microbatches": one.sched.microbatches,
    }  # fmt: skip


def answer(text: str) -> str:
    """Return `plan` of settings, or {"error": one line}; both as JSON."""
    try:
        return json.dumps(plan(json.loads(text)))
    except UserError as error:
        return json.dumps({"error": str(error)})
