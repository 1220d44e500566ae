"""List what one device does in a traced program: every matmul, kernel and collective is a `Row`, with its count.

`Walk` visits each equation (operation) of a jaxpr once. Inside `shard_map` every array is a local shard and every
collective is an equation, so the trace shows what each device computes and sends.

Bytes sent follow the formulas in `sharding.py`, as in `compile/ledger.py`. FLOPs are those of matmuls, convolutions and
kernels; a kernel counts what it declares (`cost_estimate`). HBM bytes are operands and results of the same operations.

A compiler may still merge two equal matmuls. XLA does so on CPUs if attention has a single block and a layer is
recomputed: it computes the scores once, but the trace counts them twice, up to 7% of the FLOPs of `tiny`.
"""

import functools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.extend.core as jex

from compile.hlo import WRAPPERS
from compile.ledger import Share, Split, scopes_in
from plan.chips import hardware
from sharding import KERNELS_AS_CALLS, as_tuple
from utils import UserError

KIND_OF = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
# Calls to code that JAX cannot trace, and that declares no FLOPs.
OPAQUE = ("ffi_call", "custom_call", "pure_callback", "io_callback")
COUNTED_ONCE = "while: trips unknown, counted once"


@dataclass(frozen=True)
class Row:
    """One operation of one device. FLOPs and bytes are those of one execution."""

    kind: str  # matmul, convolution, kernel, or a kind of collective from the ledger
    source: str  # "model.py:123 in hidden"
    scope: str = ""  # enclosing `jax.named_scope`s, outermost first
    axes: tuple[str, ...] = ()  # of a collective: mesh axes of more than one device
    flops: float = 0
    hbm_bytes: float = 0  # of a matmul, its operands and results; of a kernel, what it declares
    wire_bytes: float = 0  # bytes that this device sends
    count: float = 1  # executions in one call of the program
    loop: str = ""  # "scan", or COUNTED_ONCE
    branch: str = ""  # how a conditional around it was counted: "larger of 2 sides" or "0.57 of runs (forward_slot)"
    unknown: bool = False  # a kernel that declares no FLOPs
    automatic: tuple[str, ...] = ()  # mesh axes over which the compiler, not the program, shards it
    arrays: tuple[tuple[tuple[int, ...], int], ...] = ()  # shape and item size of its operands, then of its results

    def total(self, of: str) -> float:
        return self.count * getattr(self, of)


# Operations -----------------------------------------------------------------------------------------------------------


def array_bytes(avals: Iterable) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in avals if hasattr(x, "shape"))


def matmul_flops(equation) -> int:
    """Return 2 * (entries of the left operand) * (product of the right operand's sizes that are not contracting, batch
    or group dims).

    This also holds for `ragged_dot`, which multiplies each row by the weights of only one group.
    """
    lhs, rhs = (x.aval.shape for x in equation.invars[:2])
    numbers = equation.params.get("dimension_numbers") or equation.params["ragged_dot_dimension_numbers"]
    group = getattr(numbers, "rhs_group_dimensions", ())
    (_, contracted), (_, batch) = getattr(numbers, "dot_dimension_numbers", numbers)
    free = [size for dim, size in enumerate(rhs) if dim not in {*contracted, *batch, *group}]
    return 2 * math.prod(lhs) * math.prod(free)


def convolution_flops(equation) -> int:
    """Return 2 FLOPs per output entry and kernel weight. Positions in padding or dilation zeros count too."""
    out, rhs = equation.outvars[0].aval.shape, equation.invars[1].aval.shape
    features = rhs[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out) * math.prod(rhs) // features


def arrays_of(equation) -> tuple:
    """Return the shape and item size of each operand and result of an equation."""
    avals = (x.aval for x in (*equation.invars, *equation.outvars))
    return tuple((x.shape, x.dtype.itemsize) for x in avals if hasattr(x, "shape"))


def computation(equation) -> Row | None:
    """Return the Row of a matmul, convolution or kernel, without its location; None for other equations."""
    name, moved = equation.primitive.name, array_bytes(x.aval for x in (*equation.invars, *equation.outvars))
    if name in ("dot_general", "ragged_dot_general", "ragged_dot"):
        return Row("matmul", "", flops=matmul_flops(equation), hbm_bytes=moved)
    if name == "conv_general_dilated":
        return Row("convolution", "", flops=convolution_flops(equation), hbm_bytes=moved)
    if name == "pallas_call":
        cost_estimate = equation.params.get("cost_estimate")
        if cost_estimate is None:
            return Row("kernel", "", hbm_bytes=moved, unknown=True)
        return Row("kernel", "", flops=cost_estimate.flops, hbm_bytes=cost_estimate.bytes_accessed)
    if name == "jit" and KERNELS_AS_CALLS in str(equation.source_info.name_stack):
        return Row("kernel", "")
    return Row("kernel", "", hbm_bytes=moved, unknown=True) if name in OPAQUE else None


def collective(equation, sizes: dict[str, int]) -> Row | None:
    """Return the Row of a collective, without its location; None for other equations and for groups of one device."""
    kind, params = KIND_OF.get(equation.primitive.name), equation.params
    if not kind:
        return None
    named = as_tuple(params["axes"] if "axes" in params else params["axis_name"])
    axes = tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)
    groups = params.get("axis_index_groups")
    n = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    if n == 1:
        return None
    operands = equation.invars[:1] if equation.primitive.name == "ragged_all_to_all" else equation.invars
    payload = array_bytes(x.aval for x in operands) * (n if kind == "all-gather" else 1)
    times = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1, "collective-broadcast": 1}
    return Row(kind, "", axes=axes, wire_bytes=times.get(kind, (n - 1) / n) * payload)


# Locations ------------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent.parent
EXTERNAL = (
    str(Path(jax.__file__).parent.parent),
    str(Path(os.__file__).parent),
    "<frozen",
)  # third-party packages, and Python's standard library


@functools.cache
def is_external(file: str) -> bool:
    """Return True for a file of a third-party package or of Python, and for our modules that wrap collectives."""
    ours = os.path.realpath(file).startswith(f"{ROOT}{os.sep}")  # the path to a checkout may contain symlinks
    return file.startswith(EXTERNAL) or (ours and os.path.basename(file) in WRAPPERS)


def source_line(traceback) -> str:
    """Return the source line of an equation, "file.py:12 in f": its innermost frame that is not `is_external`."""
    for frame in traceback.frames if traceback else ():
        if not is_external(frame.file_name):
            function = frame.function_name.replace("<locals>.", "")
            return f"{os.path.basename(frame.file_name)}:{frame.line_num} in {function}"
    return "?"


@dataclass(frozen=True)
class Place:
    """The location of an equation in a program, and how often it runs there."""

    times: float = 1  # executions
    scope: str = ""
    loop: str = ""
    branch: str = ""
    manual: frozenset[str] = frozenset()  # mesh axes of the enclosing `shard_map`s
    counted: frozenset[str] = frozenset()  # scopes of conditionals that `times` already takes into account

    def within(self, equation, **changes) -> "Place":
        names = str(equation.source_info.name_stack)
        return replace(self, scope="/".join(filter(None, (self.scope, names))), **changes)


# The walk -------------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """One pass over a trace. Every equation is visited once; loops and branches only change how often it counts."""

    sizes: dict[str, int]  # sizes of the mesh axes
    platform: str
    shares: dict[str, Share]  # named scope -> fraction of runs in which its conditional works; see `ledger.read`
    reductions: int = 0  # reductions outside `shard_map` so far, which a compiler may turn into collectives
    shard_maps: int = 0  # `shard_map`s so far

    def rows(self, jaxpr, at: Place) -> list[Row]:
        return [row for equation in needed_equations(jaxpr) for row in self.equation_rows(equation, at)]

    def equation_rows(self, equation, at: Place) -> list[Row]:
        """Return the rows of one equation, including those of the jaxprs that it runs."""
        name, params = equation.primitive.name, equation.params
        if row := computation(equation) or collective(equation, self.sizes):
            at = at.within(equation)
            left = tuple(axis for axis, n in self.sizes.items() if n > 1 and axis not in at.manual)
            place = dict(source=source_line(equation.source_info.traceback), scope=at.scope, loop=at.loop)
            return [replace(row, count=at.times, automatic=left, arrays=arrays_of(equation), branch=at.branch, **place)]
        if name == "cond":
            return self.conditional_rows(equation, at.within(equation))
        if name == "scan":
            length = params["length"]
            here = at.within(equation, times=at.times * length, loop=at.loop or "scan" * (length > 1))
            return self.rows(params["jaxpr"].jaxpr, here)
        if name == "while":
            here = at.within(equation, loop=COUNTED_ONCE)
            return [row for part in ("cond_jaxpr", "body_jaxpr") for row in self.rows(params[part].jaxpr, here)]
        if name == "shard_map":
            self.check_mesh(equation)
            self.shard_maps += 1
            here = at.within(equation, manual=at.manual | params["newly_manual_axes"])
            return self.rows(params["jaxpr"], here)
        self.reductions += not at.manual and name.startswith(("reduce_", "arg", "sort", "cum"))
        inside = jex.jaxprs_in_params(params)
        return [row for jaxpr in inside for row in self.rows(jaxpr, at.within(equation))]

    def conditional_rows(self, equation, at: Place) -> list[Row]:
        """Return the rows of a conditional's most expensive branch, or of all branches for a `Split`. If `shares` has
        the conditional's named scope, the counts are multiplied by that fraction of executions."""
        sides, platforms = equation.params["branches"], equation.params.get("branches_platforms")
        if platforms:  # `lax.platform_dependent`: only one branch is compiled
            names = [("cuda", "rocm") if self.platform == "gpu" else (self.platform,) for _ in sides]
            fits = [p is None or bool({*p} & {*mine}) for p, mine in zip(platforms, names, strict=True)]
            return self.rows(sides[fits.index(True)].jaxpr, at)
        scopes = scopes_in(at.scope, self.shares) - at.counted
        found, splits = ([x for x in map(self.shares.get, scopes) if isinstance(x, Split) == kind] for kind in (0, 1))
        share = math.prod(one(at.times) if callable(one) else one for one in found)
        text = f"{share:.3g} of runs ({', '.join(sorted(scopes))})" if scopes else f"larger of {len(sides)} sides"
        branch = ", ".join(filter(None, (at.branch, text)))
        here = replace(at, times=at.times * share, branch=branch, counted=at.counted | scopes)
        found = [self.rows(side.jaxpr, here) for side in sides]
        largest = max(found, key=branch_order)  # the first of equals, as in the backward pass
        others = [rows for rows in found if rows is not largest]
        for split in splits:
            rest = (1 - split.fraction) / len(others)
            parts = [(largest, split.fraction), *((rows, rest) for rows in others)]
            return [replace(row, count=row.count * factor) for rows, factor in parts for row in rows]
        return largest

    def check_mesh(self, equation) -> None:
        """Raises: UserError for a `shard_map` on a mesh other than the requested one."""
        own = dict(equation.params["mesh"].shape)
        if own != self.sizes:
            place, mine, wanted = (
                source_line(equation.source_info.traceback),
                *map(hardware.named_mesh, (own, self.sizes)),
            )
            raise UserError(
                f"shard_map at {place} runs on its own mesh {mine}, not on {wanted}; omit mesh= in shard_map to use "
                "the requested mesh"
            )


def needed_equations(jaxpr) -> list:
    """Return the equations whose results are used: JAX 0.10 keeps unused Pallas kernels, which XLA later removes."""
    needed, used = [], {x for x in jaxpr.outvars if isinstance(x, jex.Var)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            needed.append(equation)
            used.update(x for x in equation.invars if isinstance(x, jex.Var))
    return needed[::-1]


def branch_order(rows: list[Row]) -> tuple[float, ...]:
    """Return the key by which branches of a conditional are compared: FLOPs, then bytes sent, then HBM bytes."""
    return tuple(sum(row.total(of) for row in rows) for of in ("flops", "wire_bytes", "hbm_bytes"))
