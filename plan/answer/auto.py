"""Choose the execution settings that are `auto`: the fastest settings that fit in memory, according to the plan.

If the plan has no times, as on CPUs, choose the simplest settings that fit. Settings change results only by rounding.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from architectures import architecture
from config import AUTO, Config
from config.fields import REMAT
from config.needs import unmet
from pipeline import fit, schedules
from plan.time.plan import Plan
from sharding import CONTEXT, DATA, EXPERT, SLICED, STAGE, TENSOR
from utils import UserError

SPARE = 0.1  # fraction of memory left free, because the real peak may exceed the predicted peak by that much
CLOSE = 1.01  # settings that are slower by at most this factor count as equally fast
SAVED, BETTER, FILLED = "attention,branch,hidden", 1.03, 0.75  # a list for TPUs, if 3% faster with 25% left free


def options(cfg: Config) -> dict[str, tuple]:
    """List the possible values of each `auto` setting that has an effect on this mesh and batch, simplest first."""
    whole = fit.split_batch(cfg).device_batch
    found = {
        "device_batch": tuple(size for size in range(whole, 0, -1) if whole % size == 0),
        "remat": (*REMAT, SAVED) if architecture(cfg.model).lists_remat else REMAT,
        "gather": ("layer", "step"),
        "tensor_exchange": ("gather", "ring"),
        "context_attention": ("gather", "ring"),  # not all_to_all, which has not been timed on any chip
        "expert_exchange": ("gathered", "routed"),
        "muon_layout": ("gather", "owner"),
        "schedule": architecture(cfg.model).schedules or tuple(schedules.SCHEDULES),
    }
    idle = without_effect(cfg) | {name for name in found if unmet(cfg, f"work.{name}")}
    return {name: values for name, values in found.items()
            if len(values) > 1 and name in cfg.work.auto_settings and name not in idle}  # fmt: skip


def without_effect(cfg: Config) -> set[str]:
    """Return the settings that have no effect on this mesh and with this optimizer."""
    n = cfg.mesh.sizes
    of_matrices = (*SLICED, TENSOR, *(DATA, STAGE) * cfg.optim.shard_over_data)  # the axes that may shard a matrix
    group_sizes = {
        "gather": math.prod(n[axis] for axis in SLICED),
        "tensor_exchange": n[TENSOR],
        "context_attention": n[CONTEXT],
        "context_layout": n[CONTEXT],
        "expert_exchange": n[EXPERT],
        "muon_layout": math.prod(n[axis] for axis in of_matrices) if cfg.optim.name == "muon" else 1,
        "schedule": n[STAGE],
    }
    return {name for name, devices in group_sizes.items() if devices == 1}


def settings_text(plan: Plan) -> str:
    """Return the execution settings as text: first those that `auto` chose, with reasons."""
    listed = {name.partition("=")[0] for name in plan.why.split(", ")} | without_effect(plan.cfg)
    rest = " ".join(part for part in str(plan.cfg.work).split() if part.partition("=")[0] not in listed)
    return f"{plan.why}; {rest}" if plan.why else rest


def choose(cfg: Config, make_plan: Callable[[Config], Plan]) -> tuple[Plan, str]:
    """Choose the `auto` settings of `cfg.work`. Returns their plan, and a text with the cost of the alternatives.

    make_plan  fn(Config without `auto`) -> Plan
    If several settings are equally fast, prefers more sequences at a time, then less memory.
    Raises: UserError if no settings work on this mesh.
    """
    choice, found, refused = options(cfg), [], None
    sizes = choice.pop("device_batch", (cfg.work.device_batch,))
    for size in sizes:
        for values in itertools.product(*choice.values()):
            way = dict(zip(choice, values, strict=True))
            fewer = {} if size == sizes[0] else {"device_batch": size}
            if way.get("remat") == SAVED and found and not found[0][1].simulated:
                continue
            try:
                plan = make_plan(replace(cfg, work=replace(cfg.work, **way, **fewer).resolved))
            except UserError as error:  # for example, layers that do not split into chunks
                refused = refused or error
                continue
            if plan.limit_bytes is None and plan.step_s is None:
                return plan, ""  # without times and a memory limit there is nothing to compare
            if way.get("remat") != SAVED or (plan.simulated and plan.peak_bytes <= FILLED * plan.limit_bytes):
                found.append((way | {"device_batch": plan.device_batch}, plan))
        if any(fits_well(plan) and way.get("remat", "none") == "none" for way, plan in found):
            break  # even without recomputation it fits, so fewer sequences at once are no better
    if not found:
        raise refused
    fits = [(way, plan) for way, plan in found if fits_well(plan)]
    if not fits:
        least = min((plan for _, plan in found), key=lambda plan: plan.peak_bytes)
        return least, f"with {cfg.work}, nothing leaves {SPARE:.0%} of the memory free; these settings need the least"
    place = lambda remat: 1 + [*REMAT, remat].index(remat)
    time = lambda plan: (plan.step_s or place(plan.cfg.work.remat)) * (BETTER ** (plan.cfg.work.remat == SAVED))
    close = CLOSE * min(time(plan) for _, plan in fits)
    way, plan = min(fits, key=lambda two: (time(two[1]) > close, -two[1].device_batch, two[1].peak_bytes))
    text = reasons(cfg, make_plan, way, plan, found)
    return plan, f"{text}, the simplest that fits" if text and not plan.step_s else text


def fits_well(plan: Plan) -> bool:
    return plan.limit_bytes is None or plan.peak_bytes <= (1 - SPARE) * plan.limit_bytes


def reasons(cfg: Config, make_plan: Callable[[Config], Plan], chosen: dict, plan: Plan, found: list) -> str:
    """Describe the step time if one setting alone is changed: "remat=dots (none does not fit, full +12%)".

    If it then does not fit, `auto` may choose a smaller device_batch, which the text names: "none +30% with
    device_batch=1". A plan that fits, but leaves less than SPARE of the memory free: "-22% but leaves 7% of ..".
    """

    def cost(name: str, value, other: Plan) -> str:
        if not fits_well(other) and name != "device_batch" and cfg.work.device_batch == AUTO:
            work = replace(cfg.work, **{**chosen, name: value, "device_batch": AUTO})
            other = choose(replace(cfg, work=work), make_plan)[0]
        if other.fits is False:
            return "does not fit"
        words = [f"{other.step_s / plan.step_s - 1:+.0%}"] if plan.step_s else []
        if name != "device_batch" and other.device_batch != plan.device_batch:
            words.append(f"with device_batch={other.device_batch}")
        if not fits_well(other):
            left = math.floor(100 * (1 - other.peak_bytes / other.limit_bytes))
            words += ["but"] * bool(words) + [f"leaves {left}% of the memory free"]
        return " ".join(words)

    texts = []
    for name, value in chosen.items():
        others = [(way[name], other) for way, other in found if way != chosen and way | {name: value} == chosen]
        if name == "device_batch":  # only the whole batch, if it was not chosen
            others = [two for two in others if two[0] > value][:1]
        if not plan.step_s:  # the simplest was chosen, so only those that do not fit matter
            others = [two for two in others if not fits_well(two[1])]
        if others or name != "device_batch":
            why = ", ".join(f"{another} {cost(name, another, other)}" for another, other in others)
            texts.append(f"{name}={value}" + f" ({why})" * bool(why))
    return ", ".join(texts)
