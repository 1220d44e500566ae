"""Predict the memory, communication and time of a step. `plan` returns a `Plan`, and `search` ranks all meshes.

Both use no device. Only `compile_plan` and `largest_batch`, which calls it, do: they compile the trainer's step and
count its memory, FLOPs and collectives.
"""

import dataclasses
import itertools
import math

import local_steps
import sharding
from architectures import architecture
from compile import ledger
from config import AUTO, AXES, Config, MeshConfig, replace
from config.needs import unmet
from pipeline import fit, schedules
from plan.answer import auto
from plan.chips import hardware
from plan.chips.units import amount
from plan.count import costs
from plan.count.step import is_tpu
from plan.time.plan import Plan
from plan.trace import compiled
from utils import UserError


def plan(cfg: Config, topology: hardware.Topology | str | None = None, limit_bytes: int | None = None) -> Plan:
    """Predict the cost of a step without using a device. Chooses the settings that are `auto`, see `auto.py`.

    topology     the devices; None: the plan has no times, and cannot tell whether the step fits in memory
    limit_bytes  memory of a device, if it differs from the chip's
    Raises: UserError for settings that do not split over the mesh, and for a mesh that does not match the topology.
    """
    topology = hardware.Topology.parse(topology) if isinstance(topology, str) else topology
    if topology:
        hardware.require_devices(cfg.mesh, topology)
        limit_bytes = limit_bytes or topology.chip.memory_bytes
    local_steps.check(cfg)
    fit.split_batch(cfg)  # checked before the model's sizes, because a batch size is easier to change
    fit.check(cfg.model, cfg.mesh, cfg.work)
    if topology:
        hardware.layout(cfg.mesh, topology)
    chosen, why = auto.choose(cfg, lambda settled: Plan.from_config(settled, topology, limit_bytes))
    return dataclasses.replace(chosen, why=why) if why else chosen  # a copy would compute its times again


MIN_SAVING = 0.03  # suggest other settings only if they save at least this fraction of the time


def faster(current: Plan) -> tuple[dict[str, str], Plan] | None:
    """Return the settings that `auto` would choose instead of the given ones, and their plan.

    Returns None in three cases: the plan fits and they would save less than 3%; they do not fit; or the time or the
    memory limit is unknown.
    """
    if current.step_s is None or current.limit_bytes is None:
        return None
    work = current.cfg.work
    sizes = () if current.fits else ("device_batch",)  # too large, or as small as `auto` could make it
    free = dataclasses.replace(work, **dict.fromkeys((*work.baselines("least"), *sizes), AUTO))
    other = plan(dataclasses.replace(current.cfg, work=free), current.topology, current.limit_bytes)
    if not other.fits or (current.fits and other.step_s > (1 - MIN_SAVING) * current.step_s):
        return None
    names = [f.name for f in dataclasses.fields(work) if getattr(other.cfg.work, f.name) != getattr(work, f.name)]
    used = [name for name in names if not unmet(other.cfg, f"work.{name}")]
    return {f"work.{name}": getattr(other.cfg.work, name) for name in used}, other


def faster_layout(current: Plan) -> tuple[dict[str, str], Plan] | None:
    """Like `faster`, for a plan from `search`: the settings include its mesh and schedule."""
    chosen = {"mesh": str(current.cfg.mesh)}
    if current.cfg.mesh.stage > 1:
        chosen |= {"work.schedule": current.cfg.work.schedule}
    better = faster(current)
    return better and (chosen | better[0], better[1])


# Search ---------------------------------------------------------------------------------------------------------------


def meshes(devices: int):
    """Yield every mesh of this many devices over the six axes."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(AXES) - 1):
        if devices % math.prod(sizes) == 0:
            yield MeshConfig(*sizes, devices // math.prod(sizes))


SPANNING = "data", "fsdp", "stage"  # the axes that may span slices: `MeshConfig.across`


def candidate_meshes(cfg: Config, topology: hardware.Topology) -> list[MeshConfig]:
    """List the meshes of a search. In a dense model, an expert axis does the same as an fsdp axis, so it stays 1. Of
    several slices, each axis that may span them is tried, unless `across` chooses one."""
    c, across = cfg.model, cfg.mesh.across
    axes = SPANNING if topology.slices > 1 and across == MeshConfig().across else (across,)
    return [dataclasses.replace(mesh, across=across) for mesh in meshes(topology.devices) for across in axes
            if (mesh.expert == 1 or c.n_experts) and (mesh.context == 1 or architecture(c).splits_context)
            and mesh.sizes[across] % topology.slices == 0]  # fmt: skip


def simplest_first(fit: list[Plan]) -> list[Plan]:
    """Sort plans by time. Those that are at most MIN_SAVING slower than the fastest come first, in another order: the
    ones that need less of a device's memory first, in tenths of it, and of these the mesh with the fewest axes."""
    fit = sorted(fit, key=time_of)
    near = [plan for plan in fit if time_of(plan) <= (1 + MIN_SAVING) * time_of(fit[0])]
    tenths = lambda plan: math.ceil(10 * plan.peak_bytes / plan.limit_bytes) if plan.limit_bytes else plan.peak_bytes
    axes = lambda plan: sum(size > 1 for size in plan.cfg.mesh.sizes.values())
    return sorted(near, key=lambda plan: (tenths(plan), axes(plan), time_of(plan))) + fit[len(near) :]


def time_of(plan: Plan) -> float:
    """Return what a search ranks by: the seconds of a step; if the speed of the chip is unknown, the bytes sent."""
    return plan.step_s or plan.wire_bytes


def devices_needed(large: list[Plan]) -> int:
    """Return about how many devices the smallest plan that does not fit needs: more at best divide its memory."""
    return math.ceil(large[0].cfg.mesh.devices * large[0].peak_bytes / large[0].limit_bytes)


def count_refusal(refused: dict[str, int], error: UserError) -> None:
    reason = str(error).split(" of ")[0].split(" over ")[0].split(";")[0].split(" (")[0]
    refused[reason] = refused.get(reason, 0) + 1


REFINED = 20  # a search chooses the `auto` settings only for this many layouts, the fastest


def untracked(items, _what: str):
    return items


def search(cfg: Config, topology: hardware.Topology, limit_bytes: int | None, track=untracked):
    """Plan every mesh of the topology's devices and, for meshes with stages, every pipeline schedule.

    First, all `auto` settings get the values that need the least memory. Then they are chosen for the twenty fastest
    layouts. Returns the plans that fit, fastest first (see `simplest_first`); the plans that do not fit, smallest
    first; and for meshes that the model cannot use, {reason: number}.

    track  fn(items, what) -> the same items; it may show progress, as `progress.track` does
    """
    fit, large, refused = [], [], {}
    autos = cfg.work.auto_settings
    least = {name: value for name, value in cfg.work.baselines("least").items() if name in autos}
    names = architecture(cfg.model).schedules or tuple(schedules.SCHEDULES)
    for mesh in track(candidate_meshes(cfg, topology), f"meshes of {topology}"):
        for schedule in names if mesh.stage > 1 and "schedule" in autos else [cfg.work.schedule]:
            work = dataclasses.replace(cfg.work, **least, schedule=schedule).resolved
            try:
                candidate = plan(dataclasses.replace(cfg, mesh=mesh, work=work), topology, limit_bytes)
            except UserError as error:
                count_refusal(refused, error)
                continue
            (large if candidate.fits is False else fit).append(candidate)
    fit.sort(key=time_of)
    large.sort(key=lambda plan: plan.peak_bytes)
    for place, candidate in enumerate(track(fit[:REFINED], f"settings on {topology}")):
        work = candidate.cfg.work
        free = dataclasses.replace(cfg.work, schedule=work.schedule)
        fit[place] = plan(dataclasses.replace(candidate.cfg, work=free), topology, limit_bytes)
    return simplest_first(fit), large, refused


# Compile --------------------------------------------------------------------------------------------------------------


def compile_plan(plan: Plan, say) -> tuple[dict, compiled.Compiled | None]:
    """Compile the step of a plan. Returns the compiler's counts, with the names of `to_json`, and the compiled step.

    Compiles for the plan's TPU topology, or for simulated devices. If the step does not fit, the counts contain
    "error", and the compiled step is None.
    """
    cfg, chip = plan.cfg, plan.topology and plan.topology.chip
    mesh = compiled.topology_mesh(cfg.mesh, str(plan.topology)) if is_tpu(chip) else sharding.make_mesh(cfg.mesh)
    # With the chip's real memory limit, libtpu decides: if it compiles the step, the step fits.
    on_tpu = is_tpu(chip) and plan.limit_bytes == chip.memory_bytes
    same = {name: getattr(plan, name) for name in ("params_total", "params_active", "tokens_per_step", "model_flops")}
    try:
        step = compiled.compile_step(cfg, mesh, say)
    except compiled.OutOfMemory as error:
        lacks = {"fits": False, "peak_bytes": error.used_bytes, "limit_bytes": error.limit_bytes,
                 "excess_bytes": error.excess_bytes, "error": str(error)}  # fmt: skip
        return same | lacks, None
    counted = step.ledger
    by_axes = {axes: total.wire_bytes for axes, total in counted.totals_by("axes").items()}
    seconds = plan.lower_bound(counted.flops, [to_traffic(x) for x in counted.collectives if "?" not in x.axes])
    bound_s = seconds and sum(seconds.values())
    return same | {
        "hardware_flops": counted.flops,
        "wire_bytes": counted.total.wire_bytes,
        "wire_by_axes": by_axes,
        "collectives": counted.total.count,
        "hidden_bytes": counted.total.hidden_bytes,
        "exposed_bytes": counted.total.exposed_bytes,
        "unknown": counted.unknown,
        "argument_bytes": step.argument_bytes,
        "peak_bytes": step.peak_bytes,
        "temp_bytes": step.temp_bytes,
        "donated_bytes": step.alias_bytes,
        "fits": on_tpu or plan.limit_bytes is None or step.peak_bytes <= plan.limit_bytes,
        "lower_s": step.lower_s,
        "compile_s": step.compile_s,
        "bubble": plan.bubble,
        "lower_bound_s": bound_s,
        "mfu": plan.mfu(bound_s),
        "unexpected": step.unexpected,
        "ledger": [dataclasses.asdict(x) for x in counted.collectives],
    }, step


def to_traffic(row: ledger.Collective) -> costs.Traffic:
    """Convert a compiled collective to the plan's type."""
    wire_bytes = row.count * row.wire_bytes
    return costs.Traffic(row.scope, row.kind, row.axes, row.count, wire_bytes, wire_bytes * (not row.hidden),
                         "_slot" in row.scope)  # fmt: skip


def largest_batch(cfg: Config, topology: hardware.Topology | None, limit_bytes: int | None, say) -> tuple[int, int]:
    """Find, by compiling, the largest batch known to fit and the smallest known not to fit, at most 1/16 apart.

    Starts at the largest batch that fits according to the plan, moves in growing steps, and then bisects.
    Raises: UserError if not even the smallest batch fits, or if memory hardly grows with the batch.
    """
    if (at_once := cfg.work.device_batch) != AUTO:
        raise UserError(f"--max_batch: work.device_batch={at_once} limits a device to {at_once} sequences at a time, "
                        "so memory does not depend on the batch; leave it at auto")  # fmt: skip
    unit = cfg.mesh.batch_shards * (1 if cfg.work.microbatches == AUTO else cfg.work.microbatches)

    def sized(units: int) -> Plan:  # a device works on all its sequences at once
        sized_cfg = replace(cfg, **{"data.batch_size": units * unit, "work.device_batch": units * unit})
        return plan(sized_cfg, topology, limit_bytes)

    def fits(units: int) -> bool:
        found, _ = compile_plan(sized(units), lambda text: None)
        fits = "fits" if found["fits"] else "does not fit"
        say(f"{units * unit} sequences: {amount(found['peak_bytes'], 'bytes')}, {fits}")
        return found["fits"]

    low, high = 0, 1
    if sized(high).limit_bytes is None:
        raise UserError("--max_batch needs to know each device's memory: pass --topology, or --memory in GiB")
    while sized(high).fits:
        low, high = high, 2 * high
        if high * unit > 2**16 * cfg.data.batch_size:
            raise UserError(f"--max_batch: {low * unit} sequences still fit, because memory does not grow with the "
                            "batch; choose the batch size by step time instead")  # fmt: skip
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if sized(middle).fits else (low, middle)

    at = max(low, 1)
    low, high, step = 0, None, max(at // 16, 1)
    while not high or high - low > max(low // 16, 1):
        low, high = (at, high) if fits(at) else (low, at)
        at = (low + high) // 2 if low and high else low + step if low else max(high - step, 1)
        step *= 2
        if high == 1:
            raise UserError(f"--max_batch: not even {unit} sequences fit; try a larger fsdp axis, or work.remat=full")
    return low * unit, high * unit
