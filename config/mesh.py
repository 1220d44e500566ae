"""The mesh of devices: how many there are along each axis, and the flag `--mesh`."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from config.fields import Size, check
from utils import UserError, suggest

AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")  # outermost (slowest link) first
SHORT_AXES = {"dp": "data", "pp": "stage", "ep": "expert", "cp": "context", "tp": "tensor"}


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each mesh axis. The product is the total number of devices."""

    data: Size = 1
    stage: Size = 1
    fsdp: Size = 1
    expert: Size = 1
    context: Size = 1
    tensor: Size = 1
    across: Literal["data", "stage", "fsdp"] = "data"  # the axis that spans TPU slices, if there are several

    def __post_init__(self):
        check(self, "mesh.")

    @classmethod
    def parse(cls, text: str) -> "MeshConfig":
        """Parse `fsdp=2,tensor=4`. It may use the short forms dp, pp, ep, cp and tp. Missing axes have size 1.

        `across=fsdp` selects the axis that spans several slices.
        Raises: UserError that quotes the part that cannot be parsed.
        """
        sizes = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = part.partition("=")
            axis = SHORT_AXES.get(name, name)
            if axis == "across":
                sizes[axis] = SHORT_AXES.get(size, size)
                continue
            if axis not in AXES:
                raise UserError(f"mesh {text!r}: unknown axis {name!r}; {suggest(name, AXES)}")
            if not (equals and size.isdecimal() and int(size) > 0):
                raise UserError(f"mesh {text!r}: {part!r} should be AXIS=SIZE, with a size of 1 or more, e.g. {axis}=2")
            if axis in sizes:
                raise UserError(f"mesh {text!r}: axis {axis!r} is given twice")
            sizes[axis] = int(size)
        return cls(**sizes)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def between_slices(self) -> str:
        """The name of the part of the axis `across` that crosses the network between slices."""
        return f"{self.across} between slices"

    def in_slice(self, slices: int) -> "MeshConfig":
        """Return the mesh of one of several slices: it has only a part of the axis `across`.

        Raises: UserError if the size of this axis is not a multiple of `slices`.
        """
        size = self.sizes[self.across]
        if size % slices:
            others = [axis for axis in ("data", "stage", "fsdp") if self.sizes[axis] % slices == 0]
            remedies = [f"{self.across}={-(-size // slices) * slices}", *(f"across={axis}" for axis in others)]
            raise UserError(
                f"mesh {self}: only the axis {self.across!r} spans the {slices} slices, and {self.across}={size} is "
                f"not a multiple of {slices}; use {' or '.join(remedies)}"
            )
        return dataclasses.replace(self, **{self.across: size // slices})

    @property
    def batch_shards(self) -> int:
        """Number of device groups that hold different sequences."""
        return self.data * self.fsdp * self.expert

    @property
    def position_shards(self) -> int:
        """Number of devices that hold different positions of the same sequences between layers."""
        return self.context * self.tensor

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "data=1"
        return sizes + f",across={self.across}" * (self.across != "data")


MeshFlag = Annotated[
    MeshConfig,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="AXIS=N,..",
        instance_from_str=lambda words: MeshConfig.parse(words[0]),
        is_instance=lambda x: isinstance(x, MeshConfig),
        str_from_instance=lambda mesh: [str(mesh)],
    ),
]
