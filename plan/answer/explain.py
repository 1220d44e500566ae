"""Explain a plan: the largest losses of a step, which change would recover each, and what the change costs.

The step is the estimate of `measured.py`. At the chips' peak it would take the time of the model's FLOPs alone. All
other time is lost to a cause. For each cause, `explain` plans single changes: another value of one execution setting,
one factor of two moved from a mesh axis to another, or twice the batch. It suggests the change that makes a step faster
and reduces this cause the most.
"""

import dataclasses
from dataclasses import dataclass

from config import AUTO, AXES, replace
from plan.answer import auto, planning
from plan.answer.planning import MIN_SAVING
from plan.chips.units import amount
from plan.time import offload, roofline, tiers
from plan.time.plan import Plan
from plan.time.terms import MATMULS
from utils import UserError

RECOMPUTED, NARROW = "recomputation and padding", "matmuls below the peak"
SMALL = 0.01  # losses below this fraction of the step are not listed
CHAPTERS = {  # where the guide explains a cause; communication is in the chapter of its axis
    RECOMPUTED: "03", NARROW: "00", "other ops": "00", "optimizer": "02", "bubble": "05", "data": "02", "stage": "05",
    "fsdp": "03", "tensor": "04", "context": "06", "expert": "07",
    offload.CAUSE: "03",
}  # fmt: skip
SENTENCES = {
    RECOMPUTED: "the device computes {ratio:.2f} times the model's FLOPs, because the backward pass recomputes "
                "activations (work.remat={remat}) and kernels and experts pad their inputs",
    NARROW: "matmuls and attention reach {reached:.0%} of the peak in measured steps",
    "other ops": "operations that are not matmuls read and write activations in main memory",
    "optimizer": "the optimizer reads and writes its state in main memory",
    "bubble": "pipeline stages wait for each other ({schedule}, {microbatches} microbatches)",
    offload.CAUSE: "compute waits for activations on their way to the host's memory and back (work.remat={remat})",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A single change of a plan."""

    flags: str
    saves_s: float  # per step, for the same number of tokens
    memory_bytes: float  # additional memory per device
    note: str = ""


@dataclass(frozen=True)
class Loss:
    """Time of a step that does not compute the model's FLOPs at the peak."""

    cause: str
    seconds: float
    sentence: str
    chapter: str
    change: Change | None


def step_seconds(plan: Plan) -> float:
    return sum(plan.causes.values())


def losses(plan: Plan) -> dict[str, float]:
    """Return the seconds that a step loses to each cause. Together with the FLOPs at the peak, they are the step."""
    peak = roofline.mean_peak(plan)
    by_cause = dict(plan.causes)
    matmuls = by_cause.pop(MATMULS)
    repeated = matmuls * (1 - plan.model_flops / plan.hardware_flops)
    found = {RECOMPUTED: repeated, NARROW: matmuls - plan.model_flops / peak - repeated}
    return found | by_cause


def sentence(plan: Plan, cause: str) -> str:
    if cause not in SENTENCES and not plan.simulated:
        return tiers.sent_line(plan, cause)
    if cause not in SENTENCES:
        exposed = sum(x.exposed_bytes for x in plan.traffic if "*".join(x.axes) == cause)
        return (f"the device waits for communication over {cause.replace('*', ' and ')}: {amount(exposed, 'bytes')} "
                "do not overlap with compute")  # fmt: skip
    return SENTENCES[cause].format(
        ratio=plan.hardware_flops / plan.model_flops, remat=plan.cfg.work.remat, schedule=plan.sched.name,
        microbatches=plan.sched.microbatches,
        reached=plan.hardware_flops / roofline.mean_peak(plan) / plan.causes[MATMULS],
    )  # fmt: skip


def changes(plan: Plan):
    """Yield (flags, note) of single changes: execution settings, the mesh, the batch, and the balance loss."""
    work, mesh = plan.cfg.work, plan.cfg.mesh.sizes
    free = dataclasses.replace(work, **dict.fromkeys(work.baselines("least"), AUTO))
    settings = auto.options(dataclasses.replace(plan.cfg, work=free))
    near = (plan.device_batch / 2, plan.device_batch * 2)
    settings["device_batch"] = [size for size in settings.get("device_batch", ()) if size in near]
    for name, values in settings.items():
        yield from (({f"work.{name}": value}, "") for value in values if value != getattr(work, name))
    if mesh["stage"] > 1:
        yield {"work.microbatches": 2 * plan.sched.microbatches}, ""
    for source in AXES:
        for target in AXES:
            if source != target and mesh[source] % 2 == 0:
                moved = mesh | {source: mesh[source] // 2, target: mesh[target] * 2}
                yield {"mesh": str(dataclasses.replace(plan.cfg.mesh, **moved))}, ""
    yield {"data.batch_size": 2 * plan.cfg.data.batch_size}, "a batch of twice the size may need other hyperparameters"
    model = plan.cfg.model
    if plan.balance_pass:
        yield {"model.balance_loss": 0.0, "model.balance_rate": 0.001}, "a bias then balances the experts, not a loss"
    if model.n_experts and not model.capacity_factor:
        yield {"model.capacity_factor": 1.25}, "experts drop the tokens that exceed their slots"


def alternatives(plan: Plan) -> list[tuple[dict, str, Plan]]:
    """Plan every single change that the model and the mesh allow and that fits."""
    found = []
    for flags, note in changes(plan):
        work = {"work.microbatches": AUTO} if "mesh" in flags else {}
        try:
            cfg = replace(plan.cfg, **work, **flags)
            other = planning.plan(dataclasses.replace(cfg, work=cfg.work.resolved), plan.topology, plan.limit_bytes)
        except UserError:
            continue
        if other.fits is not False:
            found.append((flags, note, other))
    return found


def explain(plan: Plan, most: int = 3) -> list[Loss]:
    """Return the largest losses of a plan, largest first.

    Raises: UserError if the time of a step is unknown.
    """
    if plan.step_s is None:
        raise UserError("--explain needs the time of a step: pass a --topology of TPUs or GPUs")
    others = alternatives(plan)
    found, step_s = losses(plan), step_seconds(plan)
    per_token = lambda x, seconds: seconds * plan.tokens_per_step / x.tokens_per_step

    def best(cause: str) -> Change | None:
        def helps(other: Plan) -> bool:
            less = found[cause] - per_token(other, losses(other).get(cause, 0.0))
            saved = step_s - per_token(other, step_seconds(other))
            return less > 0.5 * MIN_SAVING * step_s and saved > MIN_SAVING * step_s

        helpful = [row for row in others if helps(row[2])]
        if not helpful:
            return None
        flags, note, other = min(helpful, key=lambda row: per_token(row[2], step_seconds(row[2])))
        text = " ".join(f"--{name} {value}" for name, value in flags.items())
        saves = step_s - per_token(other, step_seconds(other))
        return Change(text, saves, other.peak_bytes - plan.peak_bytes, note)

    largest = sorted(found, key=found.get, reverse=True)[:most]
    return [Loss(cause, found[cause], sentence(plan, cause), chapter(cause), best(cause))
            for cause in largest if found[cause] >= SMALL * step_s]  # fmt: skip


def chapter(cause: str) -> str:
    return CHAPTERS.get(cause, "08")  # several axes at once


def lines(found: list[Loss], plan: Plan) -> list[str]:
    """Return the lines that `--explain` prints."""
    ideal = plan.model_flops / roofline.mean_peak(plan)
    text = [f"explain    the model's FLOPs at the chips' peak take {amount(ideal, 's')} of "
            f"{amount(step_seconds(plan), 's')}; the largest losses are:"]  # fmt: skip
    for number, loss in enumerate(found, 1):
        share = loss.seconds / step_seconds(plan)
        text.append(f"  {number}. {loss.cause}, {amount(loss.seconds, 's')} ({share:.0%}): {loss.sentence} (chapter "
                    f"{loss.chapter})")  # fmt: skip
        text.append(f"     {change_line(loss.change, plan)}")
    return text


def change_line(change: Change | None, plan: Plan) -> str:
    if change is None:
        return f"no single change that was tried saves {MIN_SAVING:.0%} of the step"
    more = "more" if change.memory_bytes >= 0 else "less"
    costs = f"it needs {amount(abs(change.memory_bytes), 'bytes')} {more} memory per device"
    note = f"; {change.note}" if change.note else ""
    return f"{change.flags} saves {change.saves_s / step_seconds(plan):.0%} of the time per token; {costs}{note}"
