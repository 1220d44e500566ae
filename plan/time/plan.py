"""The plan of a training step: its counts and its times. `planner.plan` makes one."""

import dataclasses
import functools
from dataclasses import dataclass

from config import replace
from plan.chips.units import amount
from plan.count import costs
from plan.count.step import Step
from plan.time import expected, measured, offload, roofline, tiers
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

    def seconds(self, flops: float | None = None, exchanges=None, alone=False) -> dict[str, float] | None:
        """Return the roofline of a step, seconds by cause. See `roofline.seconds` for the arguments."""
        return roofline.seconds(self, flops, exchanges, alone)

    @property
    def step_s(self) -> float | None:
        seconds = self.seconds()
        return seconds and sum(seconds.values())

    @functools.cached_property
    def expected(self) -> dict[str, float] | None:
        """Expected seconds of the compiled step by cause; None if not modeled for this chip. See `expected.py`."""
        return expected.seconds(self)

    @property
    def likely_s(self) -> float | None:
        """The expected seconds of a step, or the roofline's if the chip is not modeled in `expected.py`."""
        return sum(self.expected.values()) if self.expected else self.step_s

    @functools.cached_property
    def real(self) -> measured.Estimate | None:
        """The seconds of a real step, with an interval from measured steps. See `measured.py`."""
        return measured.estimate(self, self.expected)

    @functools.cached_property
    def balance_pass(self) -> float | None:
        """Return by which fraction the balance loss's extra forward pass lengthens the step; None without such a pass.

        If the speed of the chip is unknown, return the fraction of the FLOPs instead.
        """
        if not costs.has_balance_pass(self.cfg, self.sched):
            return None
        settled = replace(self.cfg, **{"model.balance_loss": 0.0})
        other = Plan.from_config(settled, self.topology, self.limit_bytes)
        cost = lambda one: one.likely_s or one.hardware_flops
        return cost(self) / cost(other) - 1

    def mfu(self, step_s: float | None) -> float | None:
        """Return the MFU: model FLOPs / (FLOPs that the chip could execute in this time)."""
        return step_s and self.model_flops / step_s / self.topology.chip.peak_flops_per_s

    def to_json(self) -> dict:
        """Return the plan as a dict of numbers per device and step."""
        step_s, likely_s = self.step_s, self.likely_s
        names = ("params_total", "params_active", "tokens_per_step", "model_flops", "hardware_flops", "wire_bytes",
                 "exposed_bytes", "peak_bytes", "temp_bytes", "limit_bytes", "fits", "bubble", "step_s", "memory_bytes",
                 "wire_by_axes", "flops")  # fmt: skip
        return {
            "mesh": str(self.cfg.mesh), "topology": self.topology and str(self.topology), "compile_s": None,
            **{name: getattr(self, name) for name in names}, "mfu": self.mfu(step_s), "seconds": self.seconds(),
            "expected": self.expected, "likely_s": likely_s, "likely_mfu": self.mfu(likely_s),
            "real": self.real and dataclasses.asdict(self.real), "balance_pass": self.balance_pass,
            "offloaded_bytes": offload.step_bytes(self),
            "between_nodes": tiers.between_nodes_by_axes(self), "algorithms": tiers.algorithms(self),
            "traffic": [dataclasses.asdict(one) for one in self.traffic],
        }  # fmt: skip
