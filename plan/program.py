"""A JAX program read from its trace: FLOPs, bytes in memory and bytes sent, of one device.

`read` traces a program for a mesh whose devices need not exist, and collects the rows of `rows.py`. Communication that
a compiler adds (`jit` with shardings) is not in a trace: `Program.check` refuses such a program.
"""

import collections
import contextlib
import functools
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import model
import pipeline
import sharding
from config import Config
from errors import UserError
from pipeline.step import BATCH_NAMES
from plan import hardware
from plan.compiled import slot_shares
from plan.rows import ROOT, THEIRS, Place, Row, Walk, array_bytes, is_theirs
from sharding import as_tuple
from xla.ledger import Share
from xla.ordered import without_dead_code

# Programs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What one device does in one call of a program."""

    rows: list[Row]
    mesh: hardware.NamedMesh
    argument_bytes: int  # of one device
    shard_maps: int
    reductions: int  # outside `shard_map`

    @functools.cached_property
    def flops(self) -> float:
        return sum(row.total("flops") for row in self.rows)

    @functools.cached_property
    def wire_bytes(self) -> float:
        return sum(row.total("wire_bytes") for row in self.rows)

    @functools.cached_property
    def hbm_bytes(self) -> float:
        return sum(row.total("hbm_bytes") for row in self.rows)

    def sent(self, *fields: str) -> dict[tuple, float]:
        """Bytes sent by fields of Row, the most first: sent("axes", "kind")."""
        found = collections.Counter()
        for row in self.rows:
            if row.axes:
                found[tuple(getattr(row, name) for name in fields)] += row.total("wire_bytes")
        return dict(found.most_common())

    @property
    def wire_by_axes(self) -> dict[str, float]:
        return {"*".join(axes): size for (axes,), size in self.sent("axes").items()}

    def row_seconds(self, row: Row, topology: hardware.Topology) -> float:
        """Seconds of all executions of a row at the chip's or the link's full speed."""
        chip = topology.chip
        if not row.axes:
            return row.count * max(row.flops / chip.peak_flops_per_s, row.hbm_bytes / chip.hbm_bytes_per_s)
        link = hardware.link(self.mesh, topology, row.axes)
        speeds = {"all-to-all": link.all_to_all_bytes_per_s, "collective-permute": link.neighbour_bytes_per_s}
        return row.total("wire_bytes") / speeds.get(row.kind, link.bytes_per_s)

    def seconds(self, topology: hardware.Topology | None) -> dict[str, float] | None:
        """A roofline: seconds of "compute" and of each group of mesh axes; None where the speed is not known."""
        if not topology or not topology.chip.peak_flops_per_s:
            return None
        found = collections.Counter(compute=0.0)
        for row in self.rows:
            found["*".join(row.axes) or "compute"] += self.row_seconds(row, topology)
        return dict(found)

    def check(self) -> None:
        """Raises: UserError if a compiler, and not the program, decides what is communicated."""
        hint = "those collectives do not exist before compilation; --compile counts them in the compiled program"
        if self.mesh.devices == 1:
            return
        if not self.shard_maps:
            raise UserError(
                f"the program has no shard_map: with jit alone the compiler splits it over the mesh, and {hint}"
            )
        for row in self.rows:
            if row.automatic:
                raise UserError(
                    f"{row.source}: the compiler splits this {row.kind} over {'*'.join(row.automatic)}, "
                    f"as it is outside of shard_map's axes, and {hint}"
                )


def specs_of_arguments(jaxpr) -> dict:
    """How the first `shard_map` that an input of a jaxpr reaches takes it: {input: PartitionSpec}."""
    found = {}
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == "shard_map":
            specs = zip(equation.invars, equation.params["in_specs"], strict=True)
        elif equation.primitive.name == "jit":
            below = specs_of_arguments(inner.jaxpr)
            specs = ((x, below.get(mine)) for x, mine in zip(equation.invars, inner.jaxpr.invars, strict=True))
        else:
            continue
        for x, spec in specs:
            if isinstance(x, jex.Var) and spec is not None:
                found.setdefault(x, spec)
    return found


def argument_specs(function, shapes: tuple) -> list[PartitionSpec | None]:
    """How the program's own `shard_map` takes each array of its arguments, in the mesh of the context; None: as is."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    found = specs_of_arguments(jaxpr)
    return [found.get(x) for x in jaxpr.invars]


def local_bytes(aval, spec: PartitionSpec | None, sizes: dict[str, int]) -> int:
    """Bytes of one device's shard of an array."""
    axes = [axis for entry in spec or () for axis in as_tuple(entry)]
    return array_bytes([aval]) // math.prod(sizes[axis] for axis in axes)


@contextlib.contextmanager
def whole_tracebacks():
    """Meanwhile errors keep JAX's frames, in which `axis_it_lacks` looks for the axis that was asked for."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def abstract_mesh(mesh: hardware.NamedMesh, platform: str = "cpu") -> AbstractMesh:
    """A mesh of devices that need not exist. Kernels take the form of its platform: cpu, gpu or tpu."""
    types = (AxisType.Auto,) * len(mesh.sizes)
    device = AbstractDevice(platform, None, platform)
    return AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.sizes), axis_types=types, abstract_device=device)


def has_own_mesh(x) -> bool:
    """Whether a shape says, in its sharding, on which mesh of explicit axes the program runs."""
    place = getattr(x, "sharding", None)
    return isinstance(place, NamedSharding) and AxisType.Explicit in place.mesh.axis_types


def trace(function, shapes: tuple, mesh: AbstractMesh):
    """The jaxpr of function(*shapes). A program that brings its own mesh is traced on that."""
    own = any(map(has_own_mesh, jax.tree.leaves(shapes)))
    plain = shapes if own else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    with whole_tracebacks():
        try:
            with contextlib.nullcontext() if own else jax.sharding.use_abstract_mesh(mesh):
                return jax.make_jaxpr(function)(*plain).jaxpr
        except ValueError as error:
            if "should match the mesh passed to shard_map" not in str(error):
                raise
            return jax.make_jaxpr(function)(*plain).jaxpr


def read(
    function, *shapes, mesh: Mesh | AbstractMesh, shares: dict[str, Share] | None = None, kernels=frozenset()
) -> Program:
    """Trace function(*shapes) and list what one device of the mesh computes and sends. No device is used.

    shapes  trees of `jax.ShapeDtypeStruct`, or arrays, of the whole arguments
    mesh    its axes may have any names. A `shard_map` without `mesh=` runs on it
    shares  named scope -> the share of runs in which a conditional in that scope does something, as in `ledger.read`;
            any other conditional counts its larger side, and its rows say so
    kernels  names of functions under `jit` that become one row, with the shapes of their operands
    Raises: UserError for a mesh axis that does not exist and a shape that does not divide; any other error of the
    function as it is.
    """
    sizes = dict(mesh.shape)
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    try:
        jaxpr = without_dead_code(trace(function, shapes, abstract))
    except Exception as error:
        if why := axis_it_lacks(error, sizes) or what_does_not_divide(error):
            raise UserError(why) from error
        raise
    platform = abstract.abstract_device.platform if abstract.abstract_device else "cpu"
    walk = Walk(sizes, platform, shares or {}, kernels)
    found = collections.Counter()
    for row in walk.rows(jaxpr, Place()):
        found[replace(row, count=0)] += row.count
    specs, given = specs_of_arguments(jaxpr), [getattr(x, "sharding", None) for x in jax.tree.leaves(shapes)]
    said = [getattr(place, "spec", None) or specs.get(x) for x, place in zip(jaxpr.invars, given, strict=True)]
    held = sum(local_bytes(x.aval, spec, sizes) for x, spec in zip(jaxpr.invars, said, strict=True))
    rows = [replace(row, count=count) for row, count in found.items() if count]
    return Program(rows, hardware.named_mesh(sizes), held, walk.shard_maps, walk.reductions)


# Errors ---------------------------------------------------------------------------------------------------------------


def frames(error: BaseException):
    """The frames of a traceback, innermost first."""
    found, one = [], error.__traceback__
    while one:
        found.append((one.tb_frame, one.tb_lineno))
        one = one.tb_next
    return reversed(found)


def error_place(error: BaseException) -> str:
    """The innermost line of the user's own that an error came through: "file.py:12 in f"; empty if there is none."""
    for frame, line in frames(error):
        file = frame.f_code.co_filename
        if not is_theirs(file) and Path(os.path.realpath(file)).parent != ROOT / "plan":
            return f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return ""


def axis_it_lacks(error: BaseException, sizes: dict[str, int]) -> str:
    """Say which axis was asked for that the mesh lacks: of a collective, or of a spec; empty if none was.

    JAX 0.10 names the axis in some of its errors and has no words in others. All collectives call it `axis_name`.
    """
    asked = [re.findall(r"(in|out)_specs\S* refers to '(\w+)'", str(error))]
    lacks = [name for found in asked for _, name in found if name not in sizes]
    for frame, _ in frames(error):
        if frame.f_code.co_filename.startswith(THEIRS):
            names = frame.f_locals.get("axis_name", ())
            names = (names,) if isinstance(names, str) else names if isinstance(names, tuple | list) else ()
            lacks += [name for name in names if isinstance(name, str) and name not in sizes]
    if not lacks:
        return ""
    place = error_place(error)
    return f"{place}: " * bool(place) + f"the mesh {hardware.named_mesh(sizes)} has no axis {lacks[0]!r}"


DIVIDES = re.compile(
    r"args(.*?) of shape (\S+),.*?maps array axis (\d+) \(of size (\d+)\) to mesh ax[ei]s (.*?) "
    r"\(of (?:total )?size (\d+)\)",
    re.DOTALL,
)


def what_does_not_divide(error: BaseException) -> str:
    """Say which argument does not split over its mesh axes; empty if another thing is wrong."""
    match = DIVIDES.search(str(error)) if "evenly divisible" in str(error) else None
    if not match:
        return ""
    argument, shape, dim, size, axes, parts = match.groups()
    axes = re.sub(r"[()' ]", "", axes).replace(",", "*")
    near = sorted({max(int(size) // int(parts), 1) * int(parts), (int(size) // int(parts) + 1) * int(parts)})
    return (
        f"argument {argument} of shape {shape} does not split: dim {dim} has {size} entries, and {axes} {parts} "
        f"devices; use {' or '.join(map(str, near))}, or a smaller axis"
    )


def training_step(cfg: Config, platform: str = "cpu") -> Program:
    """Loss and gradients of a training step. The optimizer, which only updates local shards, is not in it."""
    mesh = abstract_mesh(hardware.named_mesh(cfg.mesh.sizes), platform)
    shape, dtype = (cfg.data.batch_size, cfg.data.seq_len), {"weights_BT": np.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype.get(name, np.int32)) for name in BATCH_NAMES}
    parameters, step = sharding.shapes(model.declare(cfg.model)), jax.ShapeDtypeStruct((), np.int32)
    return read(pipeline.loss_and_grads(cfg, mesh), parameters, batch, step, mesh=mesh, shares=slot_shares(cfg))
