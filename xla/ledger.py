"""What the compiler did: the collectives, the products and the memory traffic of a compiled step.

`read(compiled.as_text(), mesh)` works on what XLA writes for CPU, GPU and TPU. A computation runs as often as its
callers do, times the trips of a loop; a conditional runs its dearest branch.

Partition i of the program is device i of `mesh.devices`, in row-major order: so a replica group is a set of positions
on the mesh, and the axes along which they differ are the axes of the collective.

A collective is hidden if products stand between its start and its end in the schedule, which is the order of lines in a
computation; else it is exposed: the device waits for it. A product beside several collectives hides each of them, so
hidden bytes may still be waited for, where they take longer than the products beside them.

What is not known here is refused: an instruction that might exchange bytes, and whose bytes would count as none.
"""

import collections
import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from errors import UserError
from xla.hlo import ARRAY, GROUPS, KINDS, Instruction, Program, array_bytes, device_groups, dims, shortened


@dataclass(frozen=True)
class Collective:
    """One collective of the program, and how often a step executes it."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes it runs along; ("?",) if its groups are those of no axes
    payload_bytes: int  # of the joined array for an all-gather, of all operands for the others
    dtype: str  # of the operands, in HLO's spelling
    wire_bytes: int  # this device sends in one execution
    count: float  # executions in one step; a fraction where a share says how often a conditional runs
    asynchronous: bool  # it has a start and an end, and other work may stand between
    source: str  # "model.py:123 in function"; "?" for one that the compiler made up
    scope: str  # named scopes around it, ending with the primitive
    hidden: bool = False  # products do stand between its start and its end
    beside_flops: int = 0  # of those products, in one execution


HBM = "HBM"


@dataclass(frozen=True)
class Total:
    count: float  # executions in one step
    wire_bytes: float  # this device sends in one step
    exposed_bytes: float  # of those it waits for

    @property
    def hidden_bytes(self) -> float:
        return self.wire_bytes - self.exposed_bytes


@dataclass(frozen=True)
class Ledger:
    """One step of one device."""

    collectives: list[Collective]
    flops: int | float  # of dots, convolutions and kernels, multiply and add counted apart; less those of `unknown`
    unknown: dict[str, float]  # kernels that do not say their FLOPs, "name (source)" -> executions
    moved: dict[str, dict[str, float]]  # memory -> named scopes, ending with the primitive -> see `memory_bytes`

    @property
    def total(self) -> Total:
        return _total(self.collectives)

    def by(self, field: str) -> dict[str, Total]:
        """Totals by a field of Collective, the most bytes first; axes are joined like 'fsdp*tensor'."""
        groups = collections.defaultdict(list)
        for one in self.collectives:
            value = getattr(one, field)
            groups["*".join(value) if isinstance(value, tuple) else value].append(one)
        totals = {value: _total(group) for value, group in groups.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1].wire_bytes))

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes of the device's main memory by named scopes."""
        return self.moved.get(HBM, {})

    def memory_bytes(self, scope: str, memory: str = HBM) -> float:
        """Operands and results, in the device's main memory or another, of all that is executed in a named scope.

        Of a fusion or kernel those of the whole. An array counts once for each instruction that reads it, and once
        where it is written. Copies from one memory to another have no scope.
        """
        inside = re.compile(rf"\b{re.escape(scope)}\b")
        return sum(size for path, size in self.moved.get(memory, {}).items() if inside.search(path))

    def memories(self, scope: str) -> dict[str, float]:
        """`memory_bytes` of each memory, the most first: HBM, and others as HLO calls them. See `bytes_by_memory`."""
        found = {memory: self.memory_bytes(scope, memory) for memory in self.moved}
        return dict(sorted(((memory, size) for memory, size in found.items() if size), key=lambda item: -item[1]))


def _total(found: list[Collective]) -> Total:
    sent = lambda ones: sum(one.count * one.wire_bytes for one in ones)
    return Total(sum(one.count for one in found), sent(found), sent(one for one in found if not one.hidden))


Share = float | Callable[[float], float]


class Work(NamedTuple):
    """What one execution of an instruction or of a computation does."""

    flops: int = 0
    wire_bytes: int = 0
    unknown: int = 0  # kernels that do not say their FLOPs

    def times(self, n: int) -> "Work":
        return Work(*(n * x for x in self))


def together(works) -> Work:
    return Work(*map(sum, zip(Work(), *works, strict=True)))


def read(text: str, mesh: Mesh | dict[str, int], shares: dict[str, Share] | None = None) -> Ledger:
    """List what one device executes in a step: collectives, the FLOPs of its products, and what they move in memory.

    mesh    the mesh the program was compiled for, or the sizes of its axes, outermost first
    shares  named scope -> share of the executions of a conditional in that scope that run its dearest branch, on the
            busiest device; the others cost nothing. A conditional within such a branch is not counted down again. It
            may be a function of how often a step reaches the conditional: `lambda ticks: microbatches / ticks`
    Raises: ValueError for a loop whose trips, or a collective whose devices, cannot be known, for a share of no
    conditional, and for what might exchange bytes unseen: see `refuse_unknown`.
    """
    sizes = tuple(mesh.shape.items()) if isinstance(mesh, Mesh) else tuple(mesh.items())
    program = Program(text)
    refuse_unknown(program)
    parts = {part for computation in program.computations.values() for one in computation.values()
             for part in one.contents}  # fmt: skip
    own, found, calls, cost = {}, {}, {}, {}
    for name, computation in program.computations.items():  # a computation stands before its callers
        own[name] = [product(computation, one) for one in computation.values()]
        run = [list(called(program, computation, one, cost)) for one in computation.values()]
        calls[name] = list(itertools.chain(*run))
        works = [
            together([work, *(cost[call.computation].times(call.times) for call in within)])
            for work, within in zip(own[name], run, strict=True)
        ]
        # What is fused or started runs where that is done: see `held`.
        found[name] = [] if name in parts else list(started(program, name, sizes, works))
        cost[name] = together([*works, Work(wire_bytes=sum(one.wire_bytes for one in found[name]))])
    times = executions(calls, program.entry, shares or {})
    unknown, moved = collections.Counter(), collections.defaultdict(collections.Counter)
    for name in filter(times.get, program.computations):
        computation = program.computations[name]
        for one, work in zip(computation.values(), own[name], strict=True):
            if work.unknown:
                kernel = one.scope.removesuffix("/pallas_call").rpartition("/")[2] or one.name
                unknown[f"{kernel} ({program.source(one)})"] += times[name]
            if name not in parts:
                for memory, size in moved_by_memory(computation, one).items():
                    moved[memory][one.scope] += times[name] * size
    return Ledger(
        [replace(one, count=times[name]) for name in found for one in found[name] if times[name]],
        sum(times[name] * work.flops for name in own for work in own[name]),
        dict(unknown.most_common()),
        dict(moved),
    )


@dataclass(frozen=True)
class Call:
    """A computation that another one runs."""

    computation: str
    times: int = 1
    conditional: str = ""  # scope of the conditional that may skip it


def called(program: Program, computation: dict, one: Instruction, cost: dict[str, Work]):
    """The computations that an instruction runs: a loop its body, a conditional its dearest branch."""
    if one.opcode == "while":
        times = program.trips(computation, one)
        yield Call(one.attribute("body="), times)
        yield Call(one.attribute("condition="), times)
    elif one.opcode == "conditional":
        branches = one.computations("branch_computations=")
        branches = branches or [one.attribute("true_computation="), one.attribute("false_computation=")]
        yield Call(max(branches, key=cost.get), conditional=one.scope)
    elif one.opcode == "call":
        yield Call(one.attribute("to_apply="))
    else:
        yield from map(Call, one.contents)


def executions(calls: dict[str, list[Call]], entry: str, shares: dict[str, Share]) -> dict[str, float]:
    """How often each computation runs in a step. Callers stand after what they call, the entry last."""
    times, spent, unused = collections.Counter({entry: 1}), collections.defaultdict(set), set(shares)
    for name in reversed(calls):
        for call in calls[name]:
            scopes = {scope for scope in shares if re.search(rf"\b{re.escape(scope)}\b", call.conditional)}
            unused -= scopes
            found = [shares[scope] for scope in scopes - spent[name]]
            share = math.prod(one(times[name]) if callable(one) else one for one in found)
            times[call.computation] += times[name] * call.times * share
            spent[call.computation] |= spent[name] | scopes
    if unused:
        raise ValueError(f"shares: no conditional lies in scope {', '.join(sorted(unused))}")
    return times


# Products -------------------------------------------------------------------------------------------------------------

KERNEL = re.compile("tpu_custom_call|mosaic|triton|cublas|cudnn|cutlass|gemm|matmul|onednn", re.IGNORECASE)  # targets


def product(computation: dict, one: Instruction) -> Work:
    """The FLOPs of one dot or convolution, or of a kernel: a custom call that computes, as others reserve memory."""
    if one.opcode == "dot":
        return dot_work(computation, one, one.attribute("lhs_contracting_dims=", r"\{(.*?)\}"))
    if one.opcode == "convolution":
        return Work(convolution_flops(one, *(dims(computation[name].type) for name in one.operands[:2])))
    target = one.attribute("custom_call_target=", r'"(.*?)"') if one.opcode.startswith("custom-call") else ""
    if not KERNEL.search(target):
        return Work()
    if said := one.attribute('"cost_estimate":', r'\{"flops":"(\d+)"'):
        return Work(int(said))
    if "cublas" in target and '"lhs_contracting_dimensions":' in one.attributes:
        return dot_work(computation, one, one.attribute('"lhs_contracting_dimensions":', r"\[(.*?)\]"))
    return Work(unknown=1)


def dot_work(computation: dict, one: Instruction, contracted: str) -> Work:
    lhs = dims(computation[one.operands[0]].type)
    return Work(2 * math.prod(dims(one.type)) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracted)))


def convolution_flops(one: Instruction, lhs: list[int], rhs: list[int]) -> int:
    """Two for each weight that meets an input: not where padding or a hole of dilation lies.

    The TPU compiler writes every matrix product as a convolution, and its batch dims as spatial ones.
    """
    inputs, kernel, output = re.split(r"_|->", one.attribute("dim_labels=", r"([^,]+)"))
    out = dims(one.type)
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", one.attribute("window=", r"\{(.*?)\}")))
    spatial = sorted(label for label in kernel if label.isdigit())  # as `window` counts them
    columns = lambda name, default: window[name].split("x") if name in window else [default] * len(spatial)
    pairs = 1
    for i, label in enumerate(spatial):
        size, stride, hole, dilation = (
            int(columns(name, "1")[i]) for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(columns("pad", "0_0")[i].split("_")[0])
        pairs *= meetings(lhs[inputs.index(label)], out[output.index(label)], size, stride, low, hole, dilation)
    features = out[output.index("b")] * out[output.index("f")] * rhs[kernel.index("i")]
    return 2 * features * pairs


@functools.cache
def meetings(inputs: int, outputs: int, size: int, stride: int, low: int, hole: int, dilation: int) -> int:
    """Pairs of an output and a weight, along one spatial dim, that an input lies under."""
    at = np.arange(outputs)[:, None] * stride + np.arange(size)[None] * dilation - low
    return int(np.sum((at % hole == 0) & (at >= 0) & (at < inputs * hole)))


# Memory ---------------------------------------------------------------------------------------------------------------

NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all",
         "async-update"}  # fmt: skip
CALLERS = {"while", "conditional", "call"}  # what they run counts, not what they are handed


def moved_by_memory(computation: dict, one: Instruction) -> dict[str, int]:
    """Operands and results of one instruction. Of one in two parts the start reads, and the end writes."""
    if one.opcode in NAMES | CALLERS:
        return {}
    read = [] if one.opcode.endswith("-done") else [computation[name].type for name in one.operands]
    written = [] if one.opcode.endswith("-start") else [one.type]
    return sum((bytes_by_memory(text) for text in read + written), collections.Counter())


@functools.cache
def bytes_by_memory(type_text: str) -> collections.Counter:
    """Bytes of a type's arrays by the memory that they lie in: HBM, or S(n) as HLO calls it.

    S(1) is VMEM, S(3) the 128 MiB of CMEM that v4 alone has, S(5) the host's memory; what else there is holds scalars.
    """
    found = collections.Counter()
    for dtype, sizes, layout in re.findall(ARRAY.pattern + r"(?:\{([^}]*)\})?", type_text):
        memory = re.search(r"S\([1-9]\d*\)", layout)
        found[memory[0] if memory else HBM] += array_bytes((dtype, sizes))
    return found


def main_memory_bytes(type_text: str) -> int:
    return bytes_by_memory(type_text)[HBM]


# What is known --------------------------------------------------------------------------------------------------------

# Opcodes that exchange nothing with other devices, and are no products. Not here: send, recv, infeed, outfeed,
# ragged-all-to-all, collective-broadcast, which exchange; ragged-dot and scaled-dot, which are products.
# Source: xla/hlo/ir/hlo_opcode.h in github.com/openxla/xla
LOCAL = set(
    "abs acos acosh add add-dependency after-all and asin asinh atan2 atanh batch-norm-grad "
    "batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast cbrt ceil cholesky clamp "
    "compare complex concatenate constant convert copy cos cosh cosine count-leading-zeros divide "
    "dynamic-reshape dynamic-slice dynamic-update-slice erf exp exponential exponential-minus-one fft "
    "floor gather get-dimension-size get-tuple-element imag iota is-finite log log-plus-one logistic map "
    "maximum minimum multiply negate not opt-barrier optimization-barrier or pad parameter partition-id "
    "popcnt power real reduce reduce-precision reduce-window remainder replica-id reshape reverse rng "
    "rng-bit-generator rng-get-and-update-state round-nearest-afz round-nearest-even rsqrt scatter select "
    "select-and-scatter set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign "
    "sine sinh slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple "
    "xor".split()
)
STARTS = {"fusion", "async-start", "call-start"}  # made of computations in which `held` looks for collectives
KNOWN = LOCAL | CALLERS | {*KINDS, "dot", "convolution", "fusion", "async", "custom-call"}
THREADS = {"", "main", "sparsecore"}  # a SparseCore exchanges while the TensorCore computes


def refuse_unknown(program: Program) -> None:
    """Raises: UserError for an instruction that might exchange bytes of which the ledger would know nothing: of an
    unknown opcode, on an unknown thread, or with collectives in a computation that it is not known to run.
    """
    exchanging = set()
    for name, computation in program.computations.items():  # a computation stands before its callers
        for one in computation.values():
            base = re.sub("-(start|update|done)$", "", one.opcode)
            thread = one.attribute("async_execution_thread=", r'"(.*?)"') if "thread=" in one.attributes else ""
            named = program.called(one) if "%" in one.attributes else []
            inside = next((called for called in named if called in exchanging), "")
            runs = one.opcode in STARTS | CALLERS
            if base not in KNOWN:
                raise unknown(program, one, f"opcode {one.opcode}")
            if thread not in THREADS:
                raise unknown(program, one, f"execution thread {thread!r}")
            if runs and not named:
                raise unknown(program, one, "a computation that the text does not have")
            if inside and not runs and not one.opcode.endswith(("-update", "-done")):
                raise unknown(program, one, f"how {one.opcode} runs %{inside}, which holds collectives,")
            if inside or one.is_collective:
                exchanging.add(name)


def unknown(program: Program, one: Instruction, what: str) -> UserError:
    line = shortened(f"%{one.name} = {one.type} {one.opcode}({one.arguments})")
    return UserError(f"the ledger does not know {what} and would count its bytes as none: {line} "
                     f"({one.scope or 'no scope'}, {program.source(one)})")  # fmt: skip


# Collectives ----------------------------------------------------------------------------------------------------------


def held(program: Program, name: str, one: Instruction):
    """The collectives that an instruction of computation `name` is, fuses or starts, each after its computation."""
    if one.is_collective:
        yield name, one
    elif one.opcode in STARTS:
        for part in one.contents:
            for inner in program.computations[part].values():
                yield from held(program, part, inner)


def spans(program: Program, name: str) -> list[tuple[str, Instruction, bool, list[int]]]:
    """The collectives of a computation, each once: the computation that holds it, itself, whether it is in two parts,
    and the places of all instructions that begin, carry on or end it.

    TPU: a collective may go on within fusions that compute meanwhile, each of which holds a copy of it.
    """
    begun, found = collections.defaultdict(list), {}
    for place, one in enumerate(program.computations[name].values()):
        for where, inner in held(program, name, one):
            copied = '"async_collective_fusion_config"' in inner.attributes
            key = inner.attribute("channel_id=", r"(\d+)") if copied else (where, inner.name)
            begun[one.name].append(key)
            two_parts = copied or "-start" in one.opcode + inner.opcode
            found.setdefault(key, (where, inner, two_parts, []))[-1].append(place)
        if one.opcode.endswith(("-update", "-done")):
            begun[one.name] = begun[one.operands[0]]
            for key in begun[one.name]:
                found[key][-1].append(place)
    return list(found.values())


def started(program: Program, name: str, sizes: tuple, works: list[Work]):
    """The collectives of a computation, each once, with the products between start and end; `works` of each line."""
    for where, inner, two_parts, places in spans(program, name):
        beside = together(works[places[0] : places[-1] + 1])
        if found := collective(program, where, inner, sizes):
            hidden = bool(beside.flops or beside.unknown)
            yield replace(found, asynchronous=two_parts or hidden, hidden=hidden, beside_flops=beside.flops)


def collective(program: Program, name: str, one: Instruction, sizes: tuple) -> Collective | None:
    """One execution of a collective of computation `name`; None for a group of one device, which exchanges nothing."""
    kind = one.opcode.removesuffix("-start")
    if name.startswith("all-reduce-scatter"):  # TPU: an all-reduce fused with the slice that is kept
        kind = "reduce-scatter"
    operands = [array for x in one.operands for array in ARRAY.findall(program.computations[name][x].type)]
    groups = one.attribute("source_target_pairs=" if kind == "collective-permute" else "replica_groups=", GROUPS)
    axes, n = axes_of(kind, groups, sizes)
    payload_bytes = sum(map(array_bytes, operands)) * (n if kind == "all-gather" else 1)
    sent = {"all-reduce": 2 * payload_bytes * (n - 1) // n, "collective-permute": payload_bytes}
    return axes and Collective(
        kind, axes, payload_bytes, "+".join(sorted({dtype for dtype, _ in operands})),
        wire_bytes=sent.get(kind, payload_bytes * (n - 1) // n), count=1, asynchronous=False,
        source=program.source(one), scope=one.scope)  # fmt: skip


@functools.cache
def axes_of(kind: str, text: str, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], int]:
    """Mesh axes a collective runs along, and how many devices take part in one group.

    Raises: ValueError for groups in a notation not known here, or of devices the mesh does not have.
    """
    names, shape = zip(*sizes, strict=True)
    ids = np.arange(math.prod(shape)).reshape(shape)
    permute = kind == "collective-permute"
    groups = [] if permute and text == "{}" else device_groups(text, ids.size) if text else None
    if groups is None or max((i for group in groups for i in group), default=0) >= ids.size:
        raise ValueError(f"{kind}: cannot read its devices {text or '(no replica_groups)'} on mesh {dict(sizes)}")
    places = [np.stack(np.unravel_index(group, shape)) for group in groups]  # [axis, device]
    along = [a for a in range(len(names)) if any(np.ptp(place[a]) for place in places)]
    n = max(map(len, groups), default=1)
    lines = np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, math.prod(shape[a] for a in along))
    if permute:
        # The same steps on every line of devices along these axes, or the axes do not tell what happens.
        steps = {tuple(np.argwhere(lines == i)[0]): tuple(np.argwhere(lines == j)[0]) for i, j in groups}
        regular = steps == {(row, i): (row, j) for row in range(len(lines)) for (_, i), (_, j) in steps.items()}
    else:
        regular = sorted(map(sorted, groups)) == sorted(map(sorted, lines.tolist()))
    return (tuple(names[a] for a in along) if regular else ("?",)), n


# The order of collectives ---------------------------------------------------------------------------------------------


def unordered(text: str) -> list[str]:
    """Pairs of collectives in one computation that nothing orders, at least one of them nested: within a loop, a
    branch, a call or a fusion that stands there.

    Two are in order if one needs the other's result, or what is made of it, or is told to wait for it (a control
    predecessor). Pairs that both stand in the computation itself are left out: XLA's CPU executor starts those in one
    order. So are exchanges of a device with itself. `ordered.py` says what a pair does to simulated devices.
    """
    program, within, pairs = Program(text), {}, []
    devices = int((re.search(r"num_partitions=(\d+)", text) or ["", 1])[1])
    waits = lambda one: any(len(set(group)) > 1 for group in one.groups(devices))
    for name, computation in program.computations.items():  # a computation stands before its callers
        found = {}  # instruction -> the collective that it is, or the first that it holds
        for one in computation.values():
            held = (within[called] for called in program.called(one) if within.get(called))
            if collective := one if waits(one) else next(held, None):
                found[one.name] = collective
        within[name] = next(iter(found.values()), None)
        bits, come_before = {one: 1 << number for number, one in enumerate(found)}, {}
        for one in computation.values():
            needed = (come_before[x] for x in (*one.operands, *one.computations("control-predecessors=")))
            come_before[one.name] = functools.reduce(int.__or__, needed, bits.get(one.name, 0))
        nested = {one: f" in %{one}" if one != found[one].name else "" for one in found}
        where = {one: f"{found[one].opcode}{nested[one]} ({program.source(found[one])})" for one in found}
        for a, b in itertools.combinations(found, 2):
            if (nested[a] or nested[b]) and not (come_before[a] & bits[b] or come_before[b] & bits[a]):
                pairs.append(f"{where[a]} and {where[b]}")
    return pairs
