"""Write the formulas that the planner's page evaluates, and tables of numbers that have no formula.

A letter stands for a mesh axis, a size, a setting, a speed of the chip or a number of the schedule. `plan.planner` runs
once on letters (`plan/formulas.py`). Its results, the numbers of the page, are lists of operations. The formulas of
most presets contain the model's sizes as numbers. In those of OPEN they are letters too, so they hold for any model of
the same kind.
"""

import copy
import math
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import numpy as np

from config import AXES, Config, ModelAtWork, preset
from errors import UserError
from pipeline import fit, schedules
from plan import costs, formulas, hiding, memory, planner
from plan.formulas import Choice, Formula, flag, letter
from sharding import CONTEXT, STAGE, TENSOR

MOST = 128  # devices
BATCHES, LENGTHS = [2**n for n in range(13)], [2**n for n in range(7, 18)]
SETTINGS = {
    "remat": ("full", "branches", "dots", "none"), "gather": ("layer", "step"), "tensor_exchange": ("ring", "gather"),
    "context_attention": ("gather", "ring", "all_to_all"),
}  # fmt: skip
AGAIN = {
    1.0: "again",
    0.2: "dots",
    0.0: "none",
}  # repeated share of the forward pass: `costs.slots`


OUTSIDE = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head")
DENSE, SPARSE = (*OUTSIDE, "d_ff"), (*OUTSIDE, "n_experts", "top_k", "d_expert")
TIED = {"model.tie_embeddings": True}
OPEN = {  # name of formulas: a preset of this kind, changes to it, and the sizes that are letters
    "dense": ("llama3_8b", {}, DENSE), "dense tied": ("llama3_8b", TIED, DENSE), "sparse": ("mixtral_8x7b", {}, SPARSE),
}  # fmt: skip
OF_PRESET = {"llama3_8b": "dense", "llama3_70b": "dense", "mixtral_8x7b": "sparse"}  # the others have their own
WIDTHS = (128, 256)  # largest `d_head` of tables: see `costs.in_lanes`
MOST_STAGES = 32


# Letters --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LetterModel(ModelAtWork):
    """A symbolic `config.ModelAtWork`: some of its sizes are letters. Caches tell models apart by identity."""

    base: ModelAtWork | None = None  # a model of the same kind, to be traced

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __post_init__(self):
        pass  # letters have no values to check


@costs.with_attention.register
def _(c: LetterModel, way: str):
    return replace(c.base, work=replace(c.work, context_attention=way))


@costs.declared.register
def _(c: LetterModel):
    sizes = {dim: getattr(c, name) for dim, name in fit.SETTINGS.items()} | {"L": c.n_blocks}
    shape = lambda d: tuple(sizes.get(dim, size) for dim, size in zip(d.dims, d.shape, strict=True))
    return {name: replace(d, shape=shape(d)) for name, d in costs.declared(c.base).items()}


class LetterConfig:
    """A symbolic `config.Config`: a preset on a mesh whose sizes are letters. `names`: sizes that are letters too"""

    def __init__(self, cfg: Config, names: tuple[str, ...] = ()):
        sizes = {axis: letter(axis) for axis in AXES}
        work = copy.copy(cfg.work.resolved)
        for name, options in SETTINGS.items():
            object.__setattr__(work, name, Choice(name, options))
        self.model, self.optim, self.at_work = cfg.model, cfg.optim, replace(cfg.at_work, work=work)
        if names:
            own = {field.name: getattr(cfg.at_work, field.name) for field in fields(cfg.at_work)}
            letters = {name: letter(name) for name in names}
            self.model = self.at_work = LetterModel(**own | letters | {"work": work, "base": cfg.at_work})
        self.mesh = SimpleNamespace(sizes=sizes, devices=math.prod(sizes.values()), **sizes)
        self.data = SimpleNamespace(seq_len=letter("seq_len"), tokens_per_step=letter("batch_size") * letter("seq_len"))


@fit.split_batch.register
def _(cfg: LetterConfig):
    return SimpleNamespace(device_batch=letter("device_batch"))


class LetterSchedule:
    """A symbolic `schedules.Schedule`."""

    stages, chunks, microbatches = letter(STAGE), letter("chunks"), letter("microbatches")
    ticks, rounds = letter("ticks"), letter("rounds")
    turns, splits_backward = flag("turns"), flag("splits")
    in_one_piece = formulas.negate(stages * microbatches > 1)
    slots = schedules.Slots(*map(letter, schedules.Slots._fields))


class LetterForward:
    """The forward passes of a `LetterSchedule`."""

    ticks = letter("forward_ticks")


@schedules.forward_only.register
def _(sched: LetterSchedule):
    return LetterForward()


@schedules.lock_step.register
def _(sched: LetterSchedule, F: float, B: float, W: float):
    return letter(f"lock_step {AGAIN[round(B - (1 if W else 2), 6)]}")


@schedules.lock_step.register
def _(sched: LetterForward, F: float):
    return letter("forward_s")


@dataclass(frozen=True)
class LetterPlan(planner.Plan):
    platform = Choice("platform", ("tpu", "cpu"))

    def link(self, axes: tuple[str, ...]):
        speeds = ("bytes_per_s", "neighbour_bytes_per_s", "all_to_all_bytes_per_s")
        return SimpleNamespace(**{name: letter(f"{'*'.join(axes)} {i}") for i, name in enumerate(speeds)})


def plan_in_letters(which: str) -> dict:
    """Return the plan of a preset or of an entry of OPEN as formulas, like `plan.planner.plan_settled` with letters."""
    base, changes, names = OPEN.get(which, (which, {}, ()))
    cfg, sched = LetterConfig(preset(base, **changes), names), LetterSchedule()
    platform, chip = LetterPlan.platform, Choice("chip", (*hiding.HIDES, ""))
    speeds = {name: letter(name) for name in ("peak_flops_per_s", "hbm_bytes_per_s")}
    topology = SimpleNamespace(chip=SimpleNamespace(key=chip, torus_dims=letter("torus_dims"), **speeds), slices=1)
    total, active = costs.parameters(cfg.model)
    tokens = cfg.data.tokens_per_step
    with formulas.in_letters():
        one = LetterPlan(
            cfg, topology, total, active, tokens, tokens * costs.model_flops_per_token(cfg) / cfg.mesh.devices,
            memory.memory(cfg, sched, platform), sched, None, costs.bubble(cfg, sched),
        )  # fmt: skip
        names = ("params_total", "params_active", "tokens_per_step", "model_flops", "hardware_flops", "wire_bytes",
                 "exposed_bytes", "peak_bytes", "temp_bytes", "bubble", "memory_bytes", "wire_by_axes", "flops",
                 "step_s", "expected")  # fmt: skip
        return {name: getattr(one, name) for name in names} | {"seconds": one.seconds()}


# What the page reads --------------------------------------------------------------------------------------------------


def used(roots: list) -> list[Formula]:
    """Return these formulas and all their operands, operands first."""
    found, todo = {}, [x for x in roots if isinstance(x, Formula)]
    while todo:
        x = todo.pop()
        if x.number not in found:
            found[x.number] = x
            todo += [arg for arg in x.args if isinstance(arg, Formula)]
    return [found[number] for number in sorted(found)]


def written(results: dict) -> tuple[dict, list[Formula]]:
    """Return formulas for planner.js: operations on numbers, or on earlier operations, given as [index]."""
    parts = lambda of: of.values() if isinstance(of, dict) else (of,)
    there = used([x for of in results.values() for x in parts(of)])
    place = {x.number: i for i, x in enumerate(there)}
    short = lambda x: [place[x.number]] if isinstance(x, Formula) else x
    of = {name: {k: short(x) for k, x in value.items()} if isinstance(value, dict) else short(value)
          for name, value in results.items()}  # fmt: skip
    return {"operations": [[x.op, *map(short, x.args)] for x in there], "results": of}, there


def value(x, letters: dict, found: dict):
    """Evaluate a formula on arrays of values of its letters."""
    if not isinstance(x, Formula):
        return x
    if x.op == "letter":
        return letters[x.args[0]]
    if x.number not in found:
        args = [value(arg, letters, found) for arg in x.args]
        others = {"where": np.where, "not": np.logical_not, "max": np.maximum, "min": np.minimum}
        found[x.number] = (others.get(x.op) or formulas.OPERATORS[x.op])(*args)
    return found[x.number]


def whole(x):
    return int(x) if isinstance(x, float) else x  # positions divided by two are floats


def looked_up(there: list[Formula], batches: set[int], stages: list[int], tables: dict) -> None:
    """Add to `tables` the entries of each table for all values that the page can select.

    planner.js computes `vocabulary_slices`: vocabularies of models that are not presets have too many sizes.
    """
    powers = [2**n for n in range(MOST.bit_length())]
    meshes = [(s, c, t) for s in stages for c in powers for t in powers if s * c * t <= MOST]
    points = [(*mesh, T, b, K) for mesh in meshes for T in LENGTHS for b in sorted(batches) for K in WIDTHS
              if T % max(mesh[1] * mesh[2], 2 * mesh[1]) == 0]  # fmt: skip
    letters = dict(zip((STAGE, CONTEXT, TENSOR, "seq_len", "device_batch", "d_head"), np.array(points).T, strict=True))
    found, kept = {}, ("visits",)
    for name, args in [
        (x.args[0], x.args[2:]) for x in there if x.op == "look" and x.args[0] in kept and x.args[1] == 0
    ]:
        columns = [np.broadcast_to(value(arg, letters, found), len(points)).tolist() for arg in args]
        rows = tables.setdefault(name, {})
        for row in {tuple(map(whole, row)) for row in zip(*columns, strict=True)}:
            if (key := " ".join(map(str, row))) not in rows:
                rows[key] = formulas.TABLES[name](*row)


def schedule_row(name: str, S: int, M: int) -> dict[str, float] | str:
    """Return the values of a schedule's letters, or why there is no such schedule."""
    v = 2 if name == "interleaved" else 1
    try:
        sched = schedules.schedule(name, S, M, v, lead=2)
    except UserError as error:
        return str(error).split("; ")[0]
    forward, splits = schedules.forward_only(sched), sched.splits_backward
    row = {name: getattr(sched, name) for name in ("chunks", "ticks", "rounds")} | sched.slots._asdict()
    row |= {"turns": int(sched.turns), "splits": int(splits), "forward_ticks": forward.ticks,
            "forward_s": schedules.lock_step(forward, 1.0)}  # fmt: skip
    for again, label in AGAIN.items():
        row[f"lock_step {label}"] = schedules.lock_step(sched, 1.0, again + 2 - splits, (again + 2) * splits)
    return row


def microbatches(batches: list[int], S: int) -> set[tuple[int, int]]:
    """Return microbatches and sequences per microbatch for all batches and meshes that the page can select."""
    local = {batch // 2**n for batch in batches for n in range(MOST.bit_length()) if batch % 2**n == 0}
    each = {(n, max(M for M in range(1, (4 * S if S > 1 else 1) + 1) if n % M == 0)) for n in local}
    return {(M, n // M) for n, M in each}


def tables(presets: list[str]) -> dict:
    """Return the formulas of presets and of OPEN, and the tables that they use."""
    found, looked, rows = {}, {}, {}
    batches = sorted({*BATCHES, *(preset(which).data.batch_size for which in presets)})
    for which in [*OPEN, *(which for which in presets if which not in OF_PRESET)]:
        found[which], there = written(plan_in_letters(which))
        n_blocks = MOST_STAGES if which in OPEN else preset(which).model.n_blocks
        stages = [2**n for n in range(MOST.bit_length()) if n_blocks % 2**n == 0]
        of = {S: microbatches(batches, S) for S in stages}
        looked_up(there, {b for pairs in of.values() for _, b in pairs}, stages, looked)
        for S, M in {(S, M) for S, pairs in of.items() for M, _ in pairs}:
            for name in schedules.SCHEDULES if S > 1 else ("1f1b",):
                if (key := f"{name} {S} {M}") not in rows:
                    rows[key] = schedule_row(name, S, M)
    return {"formulas": found, "tables": looked, "schedules": rows, "settings": SETTINGS}
