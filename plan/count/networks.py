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
class Collective:
    """A collective, and how often a pass through a layer, or a step, runs it."""

    kind: str  # one of ledger.KINDS
    axes: tuple[str, ...]
    size: float  # bytes, as in `hardware.wire_bytes`
    count: float = 1
    part: str = ""  # what it is for
    when: str = "once"  # `when` and `of` are arguments of `hiding.exposed`
    of: str = ""
    again: bool = False  # a pass that recomputes the layer repeats it
    back: float = 0  # collectives of gradients in the backward pass, for each in the forward pass
    branch: str = ""  # of the layer, see `traced_layer.LayerRow`
    arrives: bool = False  # before the branch's matmuls, not after them

    def in_step(self, many: float, forward: int, again: int, back: int) -> list["Collective"]:
        """Return the collectives of a step that has this one `many` times in each of these numbers of passes."""
        back_kind, n = BACKWARD_OF.get(self.kind, self.kind), many * self.count
        runs = ((self.kind, n * forward, "forward"), (self.kind, n * again * self.again, "again"),
                (back_kind, n * back * self.back, "back"))  # fmt: skip
        return [Collective(kind, self.axes, self.size, count, self.part, when, self.of) for kind, count, when in runs]


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


class Sums:
    """Sums of [executions, bytes sent, exposed bytes] by (part, kind, mesh axes)."""

    def __init__(self, cfg: Config, platform: str, chip: str, slices: int):
        self.c, self.mesh, self.platform, self.chip, self.slices = cfg.at_work, cfg.mesh, platform, chip, slices
        self.sizes = cfg.mesh.in_slice(slices).sizes if slices > 1 else cfg.mesh.sizes  # of one slice
        self.alone = DATA if cfg.optim.outer else ""  # with local steps, only an outer step sends over this axis
        self.found: dict[tuple, tuple] = {}

    def add(self, one: Collective):
        """Add a collective of a step."""
        axes = one.axes if one.part == OUTER else tuple(axis for axis in one.axes if axis != self.alone)
        size = one.size
        if self.slices > 1 and self.mesh.across in axes:
            one_to_one = one.kind in ("collective-permute", "all-to-all")  # without anything to reduce or to share
            across = size if one_to_one else size / self.group(axes)
            self.put(one, one.kind, (self.mesh.between_slices,), across, self.slices)
            if one.kind == "collective-permute":  # the busiest device sends only to another slice
                return
            size = size / self.slices if one.kind == "all-to-all" else size
        if split := tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1):
            layer = one.part == "gradients" and self.c.work.gather == "layer" and self.slices == 1
            kind = hiding.compiled_kind(one.kind, split, self.sizes, self.platform, self.chip if layer else "")
            self.put(one, kind, split, size, self.group(split))

    def group(self, axes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def put(self, one: Collective, kind: str, axes: tuple[str, ...], size: float, n: int):
        """Add the part of a collective that n devices run on one network."""
        if not one.count or not size:
            return
        wire = one.count * hardware.wire_bytes(kind, size, n)
        waits = wire * hiding.exposed(self.c, self.mesh.sizes, self.chip, kind, axes, one.when, one.of)
        key = one.part, kind, axes
        sums = zip(self.found.get(key, (0, 0, 0)), (one.count, wire, waits), strict=True)
        self.found[key] = tuple(old + new for old, new in sums)
