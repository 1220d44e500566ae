"""The parameters on one device: their shards, and the axes over which they are gathered."""

import functools
import math
from dataclasses import dataclass

import sharding
from architectures import declare
from config import Config, ModelAtWork
from sharding import FSDP, STAGE

LAYERS = "prefix.", "blocks.", "encoder.layers.", "decoder.layers."  # how the names of parameters of layers begin


@dataclass(frozen=True)
class Weights:
    """One parameter on a device of the first stage."""

    name: str
    d: sharding.Declaration
    mesh: dict[str, int]
    c: ModelAtWork

    @functools.cached_property
    def axes(self) -> list[tuple[str, ...]]:
        """The mesh axes that split each dim."""
        return [(entry,) if isinstance(entry, str) else entry or () for entry in self.d.spec]

    @functools.cached_property
    def local_size(self) -> int:
        """Entries of the local shard."""
        return self.d.size // math.prod(self.mesh[axis] for axes in self.axes for axis in axes)

    @functools.cached_property
    def gathered_over(self) -> tuple[str, ...]:
        return next((axes for axes in self.axes if FSDP in axes), ())

    @functools.cached_property
    def num_shards(self) -> int:
        """Number of shards that an all-gather combines."""
        return math.prod(self.mesh[axis] for axis in self.gathered_over)

    @property
    def shard_width(self) -> int:
        """Width of a shard along the dim that is gathered."""
        sizes = [size for size, axes in zip(self.d.shape, self.axes, strict=True) if FSDP in axes]
        return sizes[0] // self.num_shards if sizes else 0

    @functools.cached_property
    def gathered_size(self) -> int:
        """Entries of the gathered parameter."""
        return self.local_size * self.num_shards

    @functools.cached_property
    def replicas(self) -> tuple[str, ...]:
        """Axes along which the parameter is replicated."""
        return sharding.replicas(self.d)

    @property
    def width(self) -> int:
        """Bytes of an entry of the gathered parameter."""
        narrow = self.gathered_over and not self.d.exact and self.c.compute_dtype == "bfloat16"
        return 2 if narrow else self.d.dtype.itemsize

    @property
    def layers(self) -> int:
        """Number of layers of one stage that have this parameter."""
        sizes = dict(zip(self.d.dims, self.d.shape, strict=True))
        stages = self.mesh[STAGE] if {"L", "I"} & {*sizes} else 1
        return math.prod(sizes.get(letter, 1) for letter in "PLJI") // stages


@functools.cache
def declared(c: ModelAtWork) -> dict[str, sharding.Declaration]:
    return sharding.flatten_named(declare(c))


def weights(cfg: Config) -> list[Weights]:
    sizes = cfg.mesh.sizes
    return [Weights(name, d, sizes, cfg.at_work) for name, d in declared(cfg.model).items()]
