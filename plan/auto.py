"""What `auto` stands for: of the ways of working that fit, the one whose step is planned to take least time.

Where no time is planned, as on CPUs, it is the plainest that fits. Every way gives the same numbers, but for rounding.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from config import Config, MeshConfig
from errors import UserError
from overlap.remat import REMAT
from pipeline import fit, schedules
from sharding import CONTEXT, SLICED, STAGE, TENSOR

SPARE = 0.1  # of the memory is left free: a predicted peak may be exceeded by as much
CLOSE = 1.01  # ways that take so much longer at most count as equally fast


def options(cfg: Config) -> dict[str, tuple]:
    """For each setting that is to be chosen, and that mesh and batch leave a choice, its values, the plainest first."""
    whole = fit.split_batch(cfg).device_batch
    found = {
        "device_batch": tuple(size for size in range(whole, 0, -1) if whole % size == 0),
        "remat": tuple(REMAT),
        "gather": ("layer", "step"),
        "tensor_exchange": ("gather", "ring"),
        "context_attention": ("gather", "ring"),  # all_to_all has been timed on no chip: who wants it says so
        "schedule": tuple(schedules.SCHEDULES),
    }
    idle = without_effect(cfg.mesh)
    return {name: values for name, values in found.items()
            if len(values) > 1 and name in cfg.work.autos and name not in idle}  # fmt: skip


def without_effect(mesh: MeshConfig) -> set[str]:
    """Settings that do nothing on this mesh."""
    n = mesh.sizes
    found = {
        "gather": math.prod(n[axis] for axis in SLICED),
        "tensor_exchange": n[TENSOR],
        "context_attention": n[CONTEXT],
        "schedule": n[STAGE],
        "chunks": n[STAGE],
    }
    return {name for name, devices in found.items() if devices == 1}


def choose(cfg: Config, plan: Callable):
    """Settle what is `auto` in `cfg.work`: the plan of the way that is chosen, and in words what others would cost.

    plan  fn(settled Config) -> Plan
    Of ways that are equally fast, one that works on most sequences at once, and then the one of least memory.
    Raises: UserError if no way suits the mesh.
    """
    choice, found, refused = options(cfg), [], None
    sizes = choice.pop("device_batch", (cfg.work.device_batch,))
    for size in sizes:
        for values in itertools.product(*choice.values()):
            way = dict(zip(choice, values, strict=True))
            fewer = {} if size == sizes[0] else {"device_batch": size}
            try:
                one = plan(replace(cfg, work=replace(cfg.work, **way, **fewer).settled))
            except UserError as error:  # layers that do not split into chunks, for one
                refused = refused or error
                continue
            if one.limit_bytes is None and one.likely_s is None:
                return one, ""  # nothing is known that would speak for another way
            found.append((way | {"device_batch": one.device_batch}, one))
        if any(fits_well(one) and way.get("remat", "none") == "none" for way, one in found):
            break  # fewer sequences at once would save nothing
    if not found:
        raise refused
    fits = [(way, one) for way, one in found if fits_well(one)]
    if not fits:
        least = min((one for _, one in found), key=lambda one: one.peak_bytes)
        return least, f"with {cfg.work} nothing fits; this takes least memory"
    time = lambda one: one.likely_s or 1 + list(REMAT).index(one.cfg.work.remat)
    close = CLOSE * min(time(one) for _, one in fits)
    way, one = min(fits, key=lambda two: (time(two[1]) > close, -two[1].device_batch, two[1].peak_bytes))
    told = reasons(way, one, found)
    return one, f"{told}, the plainest that fits" if told and not one.likely_s else told


def fits_well(one) -> bool:
    return one.limit_bytes is None or one.peak_bytes <= (1 - SPARE) * one.limit_bytes


def reasons(chosen: dict, one, found: list) -> str:
    """What another value of one setting would have cost: "remat=dots (none does not fit, full +12%)"."""

    def cost(other) -> str:
        if not fits_well(other):
            return "does not fit"
        return f"{other.likely_s / one.likely_s - 1:+.0%}"

    said = []
    for name, value in chosen.items():
        others = [(way[name], other) for way, other in found if way != chosen and way | {name: value} == chosen]
        if name == "device_batch":  # the whole alone, if it is not that
            others = [two for two in others if two[0] > value][:1]
        if not one.likely_s:  # the plainest was taken
            others = [two for two in others if not fits_well(two[1])]
        if others or name != "device_batch":
            why = ", ".join(f"{another} {cost(other)}" for another, other in others)
            said.append(f"{name}={value}" + f" ({why})" * bool(why))
    return ", ".join(said)
