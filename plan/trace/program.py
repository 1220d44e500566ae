"""Trace a JAX program and count the FLOPs, memory traffic and bytes sent of one device.

`read` traces a program for a mesh whose devices need not exist, and collects its rows (`rows.py`). A trace does not
contain the communication that a compiler adds (`jit` with shardings), so `Program.check` rejects such programs.
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

import pipeline
import sharding
from architectures import declare
from compile.ledger import Share
from compile.ordered import without_dead_code
from config import Config
from plan.chips import hardware
from plan.trace.compiled import batch_shapes, slot_shares
from plan.trace.rows import EXTERNAL, ROOT, Place, Row, Walk, array_bytes, is_external
from sharding import as_tuple
from utils import UserError

# Programs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What one device does in one call of a program."""

    rows: list[Row]
    mesh: hardware.NamedMesh
    argument_bytes: int  # per device
    shard_maps: int
    reductions: int  # number of reductions outside `shard_map`

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
        """Sum the bytes sent, grouped by fields of Row, such as sent("axes", "kind"), in decreasing order."""
        totals = collections.Counter()
        for row in self.rows:
            if row.axes:
                totals[tuple(getattr(row, name) for name in fields)] += row.total("wire_bytes")
        return dict(totals.most_common())

    @property
    def wire_by_axes(self) -> dict[str, float]:
        return {"*".join(axes): size for (axes,), size in self.sent("axes").items()}

    def row_seconds(self, row: Row, topology: hardware.Topology) -> float:
        """Return the seconds that all executions of a row take at the full speed of the chip or link."""
        chip = topology.chip
        if not row.axes:
            return row.count * max(row.flops / chip.peak_flops_per_s, row.hbm_bytes / chip.hbm_bytes_per_s)
        link = hardware.link(self.mesh, topology, row.axes)
        speeds = {"all-to-all": link.all_to_all_bytes_per_s, "collective-permute": link.neighbour_bytes_per_s}
        return row.total("wire_bytes") / speeds.get(row.kind, link.bytes_per_s)

    def seconds(self, topology: hardware.Topology | None) -> dict[str, float] | None:
        """Return the roofline seconds of "compute" and of each group of mesh axes; None if the speed is unknown."""
        if not topology or not topology.chip.peak_flops_per_s:
            return None
        totals = collections.Counter(compute=0.0)
        for row in self.rows:
            totals["*".join(row.axes) or "compute"] += self.row_seconds(row, topology)
        return dict(totals)

    def check(self) -> None:
        """Raises: UserError if the compiler, not the program, decides which collectives run."""
        hint = "the trace lacks the collectives that it adds; --compile counts them in the compiled program"
        if self.mesh.devices == 1:
            return
        if not self.shard_maps:
            raise UserError(
                f"the program has no shard_map, so the compiler decides how to split it over the mesh, and {hint}"
            )
        for row in self.rows:
            if row.automatic:
                raise UserError(
                    f"{row.source}: this {row.kind} is in no shard_map over the axes {'*'.join(row.automatic)}, "
                    f"so the compiler decides how to split it, and {hint}"
                )


def specs_of_arguments(jaxpr) -> dict:
    """Map each input of a jaxpr to its PartitionSpec in the first `shard_map` that uses it."""
    found = {}
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if equation.primitive.name == "shard_map":
            specs = zip(equation.invars, equation.params["in_specs"], strict=True)
        elif equation.primitive.name == "jit":
            nested = specs_of_arguments(inner.jaxpr)
            specs = ((x, nested.get(y)) for x, y in zip(equation.invars, inner.jaxpr.invars, strict=True))
        else:
            continue
        for x, spec in specs:
            if isinstance(x, jex.Var) and spec is not None:
                found.setdefault(x, spec)
    return found


def argument_specs(function, shapes: tuple) -> list[PartitionSpec | None]:
    """List the PartitionSpec of each argument array in the program's `shard_map`; None if no `shard_map` uses it."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    specs = specs_of_arguments(jaxpr)
    return [specs.get(x) for x in jaxpr.invars]


def local_bytes(aval, spec: PartitionSpec | None, sizes: dict[str, int]) -> int:
    """Return the bytes of the local shard of an array."""
    axes = [axis for entry in spec or () for axis in as_tuple(entry)]
    return array_bytes([aval]) // math.prod(sizes[axis] for axis in axes)


@contextlib.contextmanager
def unfiltered_tracebacks():
    """Keep JAX's frames in tracebacks, in which `missing_axis_message` finds the name of the missing axis."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def abstract_mesh(mesh: hardware.NamedMesh, platform: str = "cpu") -> AbstractMesh:
    """Make a mesh of devices that need not exist. Its platform (cpu, gpu or tpu) selects the form of kernels."""
    types = (AxisType.Auto,) * len(mesh.sizes)
    device = AbstractDevice(platform, None, platform)
    return AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.sizes), axis_types=types, abstract_device=device)


def has_own_mesh(x) -> bool:
    """Return True if a shape's sharding has a mesh with explicit axes; the program then runs on that mesh."""
    place = getattr(x, "sharding", None)
    return isinstance(place, NamedSharding) and AxisType.Explicit in place.mesh.axis_types


def trace(function, shapes: tuple, mesh: AbstractMesh):
    """Return the jaxpr of function(*shapes). A program with its own mesh is traced on that mesh."""
    own = any(map(has_own_mesh, jax.tree.leaves(shapes)))
    plain = shapes if own else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    with unfiltered_tracebacks():
        try:
            with contextlib.nullcontext() if own else jax.sharding.use_abstract_mesh(mesh):
                return jax.make_jaxpr(function)(*plain).jaxpr
        except ValueError as error:
            if "should match the mesh passed to shard_map" not in str(error):
                raise
            return jax.make_jaxpr(function)(*plain).jaxpr


def read(function, *shapes, mesh: Mesh | AbstractMesh, shares: dict[str, Share] | None = None) -> Program:
    """Trace function(*shapes) and count what one device of the mesh computes and sends, without using a device.

    shapes   trees of `jax.ShapeDtypeStruct`, or arrays, with the unsharded shapes of the arguments
    mesh     its axes may have any names. A `shard_map` without `mesh=` runs on it
    shares   named scope -> fraction of executions in which a conditional in that scope does work, as in `ledger.read`.
             Any other conditional counts its more expensive branch, and `Row.branch` says so
    Raises: UserError for a mesh axis that does not exist, and for a size that is not divisible by its mesh axes. Other
    errors of the function propagate unchanged.
    """
    sizes = dict(mesh.shape)
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    try:
        jaxpr = without_dead_code(trace(function, shapes, abstract))
    except Exception as error:
        if why := missing_axis_message(error, sizes) or indivisible_shape_message(error):
            raise UserError(why) from error
        raise
    platform = abstract.abstract_device.platform if abstract.abstract_device else "cpu"
    walk = Walk(sizes, platform, shares or {})
    counts = collections.Counter()
    for row in walk.rows(jaxpr, Place()):
        counts[replace(row, count=0)] += row.count
    declared, given = specs_of_arguments(jaxpr), [getattr(x, "sharding", None) for x in jax.tree.leaves(shapes)]
    specs = [getattr(own, "spec", None) or declared.get(x) for x, own in zip(jaxpr.invars, given, strict=True)]
    argument_bytes = sum(local_bytes(x.aval, spec, sizes) for x, spec in zip(jaxpr.invars, specs, strict=True))
    rows = [replace(row, count=count) for row, count in counts.items() if count]
    return Program(rows, hardware.named_mesh(sizes), argument_bytes, walk.shard_maps, walk.reductions)


# Errors ---------------------------------------------------------------------------------------------------------------


def frames(error: BaseException):
    """Yield (frame, line number) for a traceback, innermost first."""
    stack, one = [], error.__traceback__
    while one:
        stack.append((one.tb_frame, one.tb_lineno))
        one = one.tb_next
    return reversed(stack)


def error_place(error: BaseException) -> str:
    """Return the innermost traceback line in user code, as "file.py:12 in f"; empty if there is none."""
    for frame, line in frames(error):
        file = frame.f_code.co_filename
        if not is_external(file) and not Path(os.path.realpath(file)).is_relative_to(ROOT / "plan"):
            return f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return ""


def missing_axis_message(error: BaseException, sizes: dict[str, int]) -> str:
    """Return a message if a collective or a PartitionSpec uses an axis that the mesh does not have, else "".

    Only some of JAX 0.10's errors contain the name of the axis. Otherwise it is taken from the argument `axis_name`,
    which all of JAX's collectives have.
    """
    matches = [re.findall(r"(in|out)_specs\S* refers to '(\w+)'", str(error))]
    lacks = [name for groups in matches for _, name in groups if name not in sizes]
    for frame, _ in frames(error):
        if frame.f_code.co_filename.startswith(EXTERNAL):
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


def indivisible_shape_message(error: BaseException) -> str:
    """Return a message if an argument's size is not divisible by its mesh axes; "" for any other error."""
    match = DIVIDES.search(str(error)) if "evenly divisible" in str(error) else None
    if not match:
        return ""
    argument, shape, dim, size, axes, parts = match.groups()
    axes = re.sub(r"[()' ]", "", axes).replace(",", "*")
    near = sorted({max(int(size) // int(parts), 1) * int(parts), (int(size) // int(parts) + 1) * int(parts)})
    return (
        f"argument {argument} of shape {shape}: dim {dim} has size {size}, which is not a multiple of the {parts} "
        f"devices on {axes}; use {' or '.join(map(str, near))}, or a smaller axis"
    )


def training_step(cfg: Config, platform: str = "cpu") -> Program:
    """Trace the loss and gradients of a training step, without the optimizer, which only updates local shards."""
    mesh = abstract_mesh(hardware.named_mesh(cfg.mesh.sizes), platform)
    shapes = sharding.shapes(declare(cfg.model)), batch_shapes(cfg), jax.ShapeDtypeStruct((), np.int32)
    return read(pipeline.loss_and_grads(cfg, mesh), *shapes, mesh=mesh, shares=slot_shares(cfg))
