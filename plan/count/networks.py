"""Add up the bytes that one device sends in a step, by purpose, by mesh axes and by network.

One slice has one network, the links between its chips. With several slices, a collective along the axis `mesh.across`
is hierarchical, as the TPU compiler builds it (tests/plan/test_slices.py). Let n be the number of its devices in each
slice. A sum of an array X is a reduce-scatter of X inside the slice, an all-reduce of X/n between slices, and an
all-gather inside. An all-gather first gathers X/n between slices, and a reduce-scatter ends there. Bytes between slices
are rows with the axis `mesh.between_slices`.
"""

import math
from dataclasses import dataclass

from config import AXES, Config
from plan.chips import hardware, hiding
from plan.count.traced_layer import BACKWARD_OF
from sharding import DATA

OUTER = "outer step"


@dataclass(frozen=True)
class Traffic:
    """The bytes that one device sends in a step for one purpose."""

    part: str
    kind: str
    axes: tuple[str, ...]  # mesh axes of more than one device
    count: float
    wire_bytes: float
    exposed_bytes: float  # bytes that do not overlap with matmuls
    in_a_slot: bool  # sent for each microbatch, inside a pipeline slot


def wire_bytes(kind: str, size: float, n: int) -> float:
    """Return the bytes that each of n devices sends in one collective. size: bytes of the gathered array"""
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": min(n - 1, 1)}
    return share.get(kind, (n - 1) / n) * size


class Sums:
    """Sums of [executions, bytes sent, exposed bytes] by (part, kind, mesh axes)."""

    def __init__(self, cfg: Config, platform: str, chip: str, slices: int):
        self.c, self.mesh, self.platform, self.chip, self.slices = cfg.at_work, cfg.mesh, platform, chip, slices
        self.sizes = cfg.mesh.in_slice(slices).sizes if slices > 1 else cfg.mesh.sizes  # of one slice
        self.alone = DATA if cfg.optim.outer_every else ""  # with local steps, only an outer step sends over this axis
        self.found: dict[tuple, tuple] = {}

    def add(self, part, kind, axes, size, count, when="once", of=""):
        """Add `count` executions of a collective of `size` bytes. `when` and `of`: arguments of `hiding.exposed`."""
        axes = axes if part == OUTER else tuple(axis for axis in axes if axis != self.alone)

        if self.slices > 1 and self.mesh.across in axes:
            self.add_between_slices(part, kind, axes, size, count, when, of)
            if kind == "collective-permute":  # the busiest device sends only to another slice
                return
            size = size / self.slices if kind == "all-to-all" else size
        split = tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)
        if split and count and size:
            key = part, hiding.compiled_kind(kind, split, self.sizes, self.platform), split
            self.put(key, size, self.group(split), count, when, of)

    def add_between_slices(self, part, kind, axes, size, count, when, of):
        """Add the part of a collective that crosses slices."""
        if count and size:
            one_to_one = kind in ("collective-permute", "all-to-all")  # without anything to reduce or to share
            size = size if one_to_one else size / self.group(axes)
            self.put((part, kind, (self.mesh.between_slices,)), size, self.slices, count, when, of)

    def group(self, axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def put(self, key, size, n, count, when, of):
        """Add one row."""
        wire = count * wire_bytes(key[1], size, n)
        waits = wire * hiding.exposed(self.c, self.mesh.sizes, self.chip, *key[1:], when, of)
        sums = zip(self.found.get(key, (0, 0, 0)), (count, wire, waits), strict=True)
        self.found[key] = tuple(old + new for old, new in sums)
