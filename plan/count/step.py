"""Count what one device does in a training step: matmuls, bytes sent and memory. `Step` holds these counts.

The times of a step are added by `plan.py`.
"""

import functools
from dataclasses import dataclass
from typing import Self

import pipeline
from config import Config
from pipeline import fit, schedules
from plan.chips import hardware
from plan.count import costs, memory
from sharding import TENSOR

STATE = ("parameters", "optimizer", "outer", "batch")  # parts of memory that exist before and after a step


@dataclass(frozen=True)
class Step:
    """What one device does in a training step, in bytes and FLOPs."""

    cfg: Config
    topology: hardware.Topology | None
    params_total: int
    params_active: int
    tokens_per_step: int  # on all devices together
    model_flops: float
    memory_bytes: dict[str, float]
    sched: schedules.Schedule
    limit_bytes: int | None  # memory of a device
    bubble: float  # fraction of the layers' time in which a stage waits for other stages

    @classmethod
    def from_config(cls, cfg: Config, topology: hardware.Topology | None, limit_bytes: int | None) -> Self:
        """Count a step whose settings are all chosen (none is `auto`)."""
        sched = pipeline.schedule(cfg)
        total, active = costs.parameters(cfg.model)
        tokens, chip = cfg.data.tokens_per_step, topology.chip.key if topology else ""
        return cls(
            cfg, topology, total, active, tokens, tokens * costs.model_flops_per_token(cfg) / cfg.mesh.devices,
            memory.memory(cfg, sched, platform_of(topology), chip), sched, limit_bytes, costs.bubble(cfg, sched),
        )  # fmt: skip

    @property
    def platform(self) -> str:
        return platform_of(self.topology)

    @functools.cached_property  # a search needs only the memory of plans that do not fit
    def work(self) -> list[costs.Work]:
        """All matmuls, including recomputation."""
        return costs.work(self.cfg, self.sched, self.platform)

    @functools.cached_property
    def traffic(self) -> list[costs.Traffic]:
        """All collectives."""
        chip, slices = (self.topology.chip.key, self.topology.slices) if self.topology else ("", 1)
        return costs.traffic(self.cfg, self.sched, self.platform, chip, slices)

    @property
    def flops(self) -> dict[str, float]:
        """FLOPs by part of the model, including recomputation."""
        by_part: dict[str, float] = {}
        for one in self.work:
            by_part[one.part] = by_part.get(one.part, 0) + one.flops
        return by_part

    @property
    def hardware_flops(self) -> float:
        return sum(one.flops for one in self.work)

    @property
    def exposed_bytes(self) -> float:
        return sum(one.exposed_bytes for one in self.traffic)

    @property
    def wire_bytes(self) -> float:
        return sum(one.wire_bytes for one in self.traffic)

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())

    @property
    def temp_bytes(self) -> float:
        return sum(size for part, size in self.memory_bytes.items() if part not in STATE)

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    @property
    def device_batch(self) -> int:
        return fit.split_batch(self.cfg).device_batch

    @property
    def wire_by_axes(self) -> dict[str, float]:
        by_axes: dict[str, float] = {}
        for one in self.traffic:
            by_axes["*".join(one.axes)] = by_axes.get("*".join(one.axes), 0) + one.wire_bytes
        return by_axes

    def speed(self, row: costs.Traffic) -> float:
        """Return a collective's bytes per second. A ring over TENSOR sends in both directions at once."""
        link = self.link(row.axes)
        if row.kind == "all-to-all":
            return link.all_to_all_bytes_per_s
        if row.kind == "collective-permute":
            n = self.cfg.mesh.tensor
            both_ways = (n - 1) / (n // 2) if row.axes == (TENSOR,) else 1
            return min(link.bytes_per_s, both_ways * link.neighbour_bytes_per_s)
        return link.bytes_per_s

    def link(self, axes: tuple[str, ...]) -> hardware.Link:
        return hardware.link(self.cfg.mesh, self.topology, axes)


def is_tpu(chip: hardware.Chip | None) -> bool:
    return bool(chip and chip.torus_dims)


def platform_of(topology: hardware.Topology | None) -> str:
    """Return tpu, gpu or cpu."""
    if is_tpu(topology and topology.chip):
        return "tpu"
    return "gpu" if topology and topology.chip.peak_flops_per_s else "cpu"
