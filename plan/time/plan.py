"""The plan of a training step: its counts and its times. `planner.plan` makes one."""

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass

from config import replace
from plan.chips.units import amount
from plan.count import costs
from plan.count.step import Step
from plan.time import measured, offload, roofline, simulated, terms, tiers
from plan.trace import compiled


@dataclass(frozen=True)
class Plan(Step):
    """The predicted cost of a training step, per device and step, in bytes, FLOPs and seconds."""

    why: str = ""  # the settings that `auto` chose, and the cost of the alternatives

    def refusal(self) -> str:
        """Return a message with the numbers that do not fit, and settings that need less memory."""
        parts = ((name, size) for name, size in sorted(self.memory_bytes.items(), key=lambda part: -part[1]) if size)
        return (f"a device would need {amount(self.peak_bytes, 'bytes')}, and has {amount(self.limit_bytes, 'bytes')}: "
                + ", ".join(f"{name} {amount(size, 'bytes')}" for name, size in parts)
                + f"; try {compiled.advice(self.cfg)}")  # fmt: skip

    def lower_bound(self, flops: float | None = None, exchanges=None, alone=False) -> dict[str, float] | None:
        """Return the lower bound of a step, seconds by cause. See `roofline.seconds` for the arguments."""
        return roofline.seconds(self, flops, exchanges, alone)

    @property
    def lower_bound_s(self) -> float | None:
        return total(self.lower_bound())

    @functools.cached_property
    def simulated(self) -> dict[str, float] | None:
        """The seconds by cause that a simulation of the compiled step would give; None on GPUs. See `simulated.py`."""
        return simulated.seconds(self)

    @property
    def simulated_s(self) -> float | None:
        return total(self.simulated)

    @functools.cached_property
    def estimate(self) -> measured.Estimate | None:
        """The seconds of the step, with an interval from measured steps. See `measured.py`."""
        return measured.estimate(self, self.simulated)

    @property
    def step_s(self) -> float | None:
        """The estimated seconds of the step; None if the speed of the chip is unknown."""
        return self.estimate and self.estimate.seconds

    @property
    def causes(self) -> dict[str, float] | None:
        """The estimated seconds of the step by cause: matmuls, other ops, communication by mesh axes, .., bubble."""
        return self.estimate and measured.causes(self, self.simulated)

    @functools.cached_property
    def by_term(self) -> Counter:
        """The estimated seconds of the step by term of `terms.py`."""
        found = measured.speeds_of(self.topology)
        return measured.by_term(terms.costs(self, self.simulated, found.trainer), found, self.bubble)

    def as_fast_as(self, other: "Plan") -> bool:
        """Return whether the step may be as fast as that of another plan on the same devices; see `measured.py`."""
        if self.step_s is None:
            return self.wire_bytes == other.wire_bytes
        return measured.as_fast(measured.speeds_of(self.topology), self.by_term, other.by_term)

    @functools.cached_property
    def balance_pass(self) -> float | None:
        """Return by which fraction the balance loss's extra forward pass lengthens the step; None without such a pass.

        If the speed of the chip is unknown, return the fraction of the FLOPs instead.
        """
        if not costs.has_balance_pass(self.cfg, self.sched):
            return None
        settled = replace(self.cfg, **{"model.balance_loss": 0.0})
        other = Plan.from_config(settled, self.topology, self.limit_bytes)
        cost = lambda one: one.step_s or one.hardware_flops
        return cost(self) / cost(other) - 1

    def mfu(self, step_s: float | None) -> float | None:
        """Return the MFU: model FLOPs / (FLOPs that the chip could execute in this time)."""
        return step_s and self.model_flops / step_s / self.topology.chip.peak_flops_per_s

    def to_json(self) -> dict:
        """Return the plan as a dict of numbers per device and step."""
        names = ("params_total", "params_active", "tokens_per_step", "model_flops", "hardware_flops", "wire_bytes",
                 "exposed_bytes", "peak_bytes", "temp_bytes", "limit_bytes", "fits", "bubble", "step_s", "memory_bytes",
                 "wire_by_axes", "flops", "lower_bound_s", "simulated_s", "simulated", "balance_pass")  # fmt: skip
        return {
            "mesh": str(self.cfg.mesh), "topology": self.topology and str(self.topology), "compile_s": None,
            **{name: getattr(self, name) for name in names}, "mfu": self.mfu(self.step_s), "seconds": self.causes,
            "lower_bound": self.lower_bound(), "estimate": self.estimate and dataclasses.asdict(self.estimate),
            "offloaded_bytes": offload.step_bytes(self),
            "between_nodes": tiers.between_nodes_by_axes(self), "algorithms": tiers.algorithms(self),
            "traffic": [dataclasses.asdict(one) for one in self.traffic],
        }  # fmt: skip


def total(seconds: dict[str, float] | None) -> float | None:
    return seconds and sum(seconds.values())
