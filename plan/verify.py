"""Compile the first layouts of a search for their TPU, and rank them by the simulated seconds: `--verify N`.

Where the steps of several layouts differ by less than the errors of measured steps, the compiler's own program tells
more than the planner's formulas: which collectives overlap, and whether the step really fits. It needs no TPU.
"""

from dataclasses import dataclass

from plan.answer.show import make_table, schedule_label
from plan.chips.units import amount
from plan.simulate import replayed
from plan.time.plan import Plan
from plan.trace import compiled


@dataclass(frozen=True)
class Verified:
    """A plan, and what the TPU compiler makes of its step."""

    plan: Plan
    seconds: float | None = None  # of the simulated compiled step; None: it does not fit
    peak_bytes: int | None = None
    causes: dict[str, float] | None = None  # of the seconds
    refusal: str = ""  # why it does not fit

    def to_json(self) -> dict:
        return {"mesh": str(self.plan.cfg.mesh), "schedule": self.plan.cfg.work.schedule, "step_s": self.plan.step_s,
                "simulated_s": self.seconds, "peak_bytes": self.peak_bytes, "refusal": self.refusal}  # fmt: skip


def verify(plan: Plan) -> Verified:
    """Compile a planned step for its TPU topology, and simulate it."""
    mesh = compiled.topology_mesh(plan.cfg.mesh, str(plan.topology))
    try:
        step = compiled.compile_step(plan.cfg, mesh)
    except compiled.OutOfMemory as error:
        return Verified(plan, refusal=str(error))
    found = replayed.simulate(plan.cfg, plan.topology, mesh, step.step.as_text())
    return Verified(plan, found.seconds, step.peak_bytes, found.causes)


def verify_all(plans: list[Plan], track) -> list[Verified]:
    """Verify each plan. Returns those that fit, the shortest simulated step first, then the others."""
    every = map(verify, track(plans, "compiling, about a minute each"))
    return sorted(every, key=lambda one: (one.seconds is None, one.seconds or 0))


def print_table(found: list[Verified], console) -> None:
    table = make_table("compiled and simulated, the shortest simulated step first", "mesh", "schedule", "step",
                       "simulated", "planned memory", "compiled memory", words=2)  # fmt: skip
    for one in found:
        plan = one.plan
        table.add_row(str(plan.cfg.mesh), schedule_label(plan), amount(plan.step_s, "s"), amount(one.seconds, "s"),
                      amount(plan.peak_bytes, "bytes"),
                      amount(one.peak_bytes, "bytes") if one.seconds else "does not fit")  # fmt: skip
    console.print(table)
