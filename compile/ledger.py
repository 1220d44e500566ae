"""Count the collectives, the matmul FLOPs and the memory traffic of a compiled step.

`read(compiled.as_text(), mesh)` works on XLA's output for CPU, GPU and TPU. A computation (a function of the program)
runs as often as its callers run, times the trip count of a loop. A conditional runs its most expensive branch.

Partition i of the program is device i of `mesh.devices`, in row-major order. So a replica group is a set of mesh
coordinates, and the axes along which they differ are the axes of the collective.

A collective is overlapped (`hidden`) if matmuls run between its start and its end in the compiled schedule, which is
the order of instructions in a computation. Otherwise it is exposed: the device waits for it. A matmul can overlap with
several collectives, so overlapped bytes may still stall the step if they take longer than the matmuls.

Instructions that this module does not know, and that might communicate, raise an error instead of counting 0 bytes.
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

from compile.hlo import ARRAY, GROUPS, KINDS, Instruction, Program, array_bytes, device_groups, dims, shorten
from utils import UserError


@dataclass(frozen=True)
class Collective:
    """One collective of the program, and how often a step executes it."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes it runs along; ("?",) if its groups match no axes
    payload_bytes: int  # size of the gathered array for an all-gather, of all operands for the others
    dtype: str  # of the operands, in HLO's spelling
    wire_bytes: int  # bytes that this device sends in one execution
    count: float  # executions in one step; not an integer if `shares` scales a conditional
    asynchronous: bool  # it has a start and an end, and other instructions may run between them
    source: str  # "model.py:123 in function"; "?" if the compiler added the collective
    scope: str  # named scopes around it, ending with the primitive
    hidden: bool = False  # overlapped: matmuls run between its start and its end
    overlapped_flops: int = 0  # FLOPs of these matmuls, in one execution


HBM = "HBM"


@dataclass(frozen=True)
class Total:
    count: float  # executions in one step
    wire_bytes: float  # bytes that this device sends in one step
    exposed_bytes: float  # the part of these bytes that does not overlap with matmuls

    @property
    def hidden_bytes(self) -> float:
        return self.wire_bytes - self.exposed_bytes


@dataclass(frozen=True)
class Ledger:
    """The communication, compute and memory traffic of one device in one step."""

    collectives: list[Collective]
    flops: int | float  # of dots, convolutions and kernels, except `unknown`; a multiply and an add are 2
    unknown: dict[str, float]  # kernels without a FLOP count, "name (source)" -> executions
    moved: dict[str, dict[str, float]]  # memory -> named scopes, ending with the primitive -> bytes, see `memory_bytes`

    @property
    def total(self) -> Total:
        return _total(self.collectives)

    def totals_by(self, field: str) -> dict[str, Total]:
        """Sum the collectives by one of their fields, most bytes first. Axes have the form 'fsdp*tensor'."""
        groups = collections.defaultdict(list)
        for one in self.collectives:
            value = getattr(one, field)
            groups["*".join(value) if isinstance(value, tuple) else value].append(one)
        totals = {value: _total(group) for value, group in groups.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1].wire_bytes))

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes read and written in the device's main memory, by named scope."""
        return self.moved.get(HBM, {})

    def memory_bytes(self, scope: str, memory: str = HBM) -> float:
        """Sum the bytes of operands and results that all instructions in a named scope have in one kind of memory.

        A fusion or kernel counts with its own operands and results. An array counts once for each instruction that
        reads it, and once where it is written. Copies from one memory to another have no scope.
        """
        inside = re.compile(rf"\b{re.escape(scope)}\b")
        return sum(size for path, size in self.moved.get(memory, {}).items() if inside.search(path))

    def memories(self, scope: str) -> dict[str, float]:
        """Return the `memory_bytes` of each memory (HBM, or HLO's names, see `bytes_by_memory`), largest first."""
        sizes = {memory: self.memory_bytes(scope, memory) for memory in self.moved}
        return dict(sorted(((memory, size) for memory, size in sizes.items() if size), key=lambda item: -item[1]))


def _total(found: list[Collective]) -> Total:
    sent = lambda ones: sum(one.count * one.wire_bytes for one in ones)
    return Total(sum(one.count for one in found), sent(found), sent(one for one in found if not one.hidden))


class Split(NamedTuple):
    """A conditional that runs its most expensive branch in this fraction of its executions, and else the others."""

    fraction: float


IN_TURN = Split(1 / 2)
Share = float | Callable[[float], float] | Split  # a number, or a function of the executions


class Work(NamedTuple):
    """The cost of one execution of an instruction or of a computation."""

    flops: int = 0
    wire_bytes: int = 0
    unknown: int = 0  # kernels without a FLOP count

    def times(self, n: int) -> "Work":
        return Work(*(n * x for x in self))


def add_work(works) -> Work:
    return Work(*map(sum, zip(Work(), *works, strict=True)))


def read(text: str, mesh: Mesh | dict[str, int], shares: dict[str, Share] | None = None) -> Ledger:
    """Count what one device executes in a step: collectives, matmul FLOPs and memory traffic.

    mesh    the mesh that the program was compiled for, or the sizes of its axes, outermost first
    shares  named scope -> in which fraction of its executions a conditional in that scope runs its most expensive
            branch, on the busiest device; the other executions cost nothing, or run the other branch (`Split`).
            Conditionals inside a branch are not scaled again. Instead of a number, the value may be a function of how
            often a step reaches the conditional: `lambda ticks: microbatches / ticks`
    Raises: ValueError if a loop's trip count or a collective's devices cannot be determined, or if no conditional is in
    a scope of `shares`; UserError for instructions that might communicate without being counted, see `refuse_unknown`.
    """
    sizes, slices = in_slice(mesh) if isinstance(mesh, Mesh) else (tuple(mesh.items()), ("", 1))
    program = Program(text)
    refuse_unknown(program)
    parts = {part for computation in program.computations.values() for one in computation.values()
             for part in one.contents}  # fmt: skip
    own, found, calls, cost = {}, {}, {}, {}
    for name, computation in program.computations.items():  # a computation comes before its callers
        own[name] = [matmul_work(computation, one) for one in computation.values()]
        run = [list(calls_of(program, computation, one, cost)) for one in computation.values()]
        calls[name] = list(itertools.chain(*run))
        works = [
            add_work([work, *(cost[call.computation].times(call.times) for call in within)])
            for work, within in zip(own[name], run, strict=True)
        ]
        # Collectives inside fusions and async starts count in the computation that runs those.
        found[name] = [] if name in parts else list(collectives_with_overlap(program, name, sizes, slices, works))
        cost[name] = add_work([*works, Work(wire_bytes=sum(one.wire_bytes for one in found[name]))])
    times = execution_counts(calls, program.entry, shares or {})
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


def in_slice(mesh: Mesh) -> tuple[tuple, tuple[str, int]]:
    """Return the sizes of the mesh of one slice, and (name, number) of the slices along the axis that spans them.

    The program of several slices is that of one slice: its partitions are the devices of a slice.
    """
    number = np.vectorize(lambda device: getattr(device, "slice_index", 0) if device.platform == "tpu" else 0)
    slices = number(mesh.devices)
    count, sizes = len(np.unique(slices)), dict(mesh.shape)
    if count == 1:
        return tuple(sizes.items()), ("", 1)
    axis = next(name for a, name in enumerate(sizes) if np.ptp(slices, axis=a).any())
    sizes[axis] //= count
    return tuple(sizes.items()), (f"{axis} between slices", count)


@dataclass(frozen=True)
class Call:
    """A computation that another one runs."""

    computation: str
    times: float = 1
    conditional: str = ""  # scope of the conditional that may skip the call
    branches: int = 1  # of the conditional


def calls_of(program: Program, computation: dict, one: Instruction, cost: dict[str, Work]):
    """Yield the computations that an instruction runs, such as the body of a loop. Of a conditional's branches, `times`
    is 1 for the most expensive one, and 0 for the others."""
    if one.opcode == "while":
        times = program.trip_count(computation, one)
        yield Call(one.attribute("body="), times)
        yield Call(one.attribute("condition="), times)
    elif one.opcode == "conditional":
        branches = one.computations("branch_computations=")
        branches = branches or [one.attribute("true_computation="), one.attribute("false_computation=")]
        largest = max(range(len(branches)), key=lambda i: cost[branches[i]])
        yield from (Call(branch, int(i == largest), one.scope, len(branches)) for i, branch in enumerate(branches))
    elif one.opcode == "call":
        yield Call(one.attribute("to_apply="))
    else:
        yield from map(Call, one.contents)


def scopes_in(path: str, scopes) -> set[str]:
    """Return those of the scopes that are in a path of named scopes."""
    return {scope for scope in scopes if re.search(rf"\b{re.escape(scope)}\b", path)}


def execution_counts(calls: dict[str, list[Call]], entry: str, shares: dict[str, Share]) -> dict[str, float]:
    """Count how often a step runs each computation. In `calls`, callers come after their callees, the entry last."""
    times, spent, unused = collections.Counter({entry: 1}), collections.defaultdict(set), set(shares)
    for name in reversed(calls):
        for call in calls[name]:
            scopes = scopes_in(call.conditional, shares)
            unused -= scopes
            new = [shares[scope] for scope in scopes - spent[name]]
            times[call.computation] += times[name] * share_of(call, new, times[name])
            spent[call.computation] |= spent[name] | scopes
    if unused:
        raise ValueError(f"shares: no conditional is in scope {', '.join(sorted(unused))}")
    return times


def share_of(call: Call, shares: list[Share], reached: float) -> float:
    """Return how often a call runs each time that its instruction does. reached: executions of the instruction"""
    if not reached:
        return 0
    runs = call.times
    for one in shares:
        if isinstance(one, Split):
            runs = one.fraction if call.times else (1 - one.fraction) / (call.branches - 1)
    return runs * math.prod(one(reached) if callable(one) else one for one in shares if not isinstance(one, Split))


# Matmuls --------------------------------------------------------------------------------------------------------------

KERNEL = re.compile("tpu_custom_call|mosaic|triton|cublas|cudnn|cutlass|gemm|matmul|onednn", re.IGNORECASE)  # targets


def matmul_work(computation: dict, one: Instruction) -> Work:
    """Count the FLOPs of a dot, a convolution or a kernel, which is a custom call whose target matches KERNEL."""
    if one.opcode == "dot":
        return dot_work(computation, one, one.attribute("lhs_contracting_dims=", r"\{(.*?)\}"))
    if one.opcode == "convolution":
        return Work(convolution_flops(one, *(dims(computation[name].type) for name in one.operands[:2])))
    target = one.attribute("custom_call_target=", r'"(.*?)"') if one.opcode.startswith("custom-call") else ""
    if not KERNEL.search(target):
        return Work()
    if flops := one.attribute('"cost_estimate":', r'\{"flops":"(\d+)"'):
        return Work(int(flops))
    if "cublas" in target and '"lhs_contracting_dimensions":' in one.attributes:
        return dot_work(computation, one, one.attribute('"lhs_contracting_dimensions":', r"\[(.*?)\]"))
    return Work(unknown=1)


def dot_work(computation: dict, one: Instruction, contracted: str) -> Work:
    lhs = dims(computation[one.operands[0]].type)
    return Work(2 * math.prod(dims(one.type)) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracted)))


def convolution_flops(one: Instruction, lhs: list[int], rhs: list[int]) -> int:
    """Count 2 FLOPs for each pair of a weight and an input, but none for padding or dilation zeros.

    The TPU compiler writes every matmul as a convolution, and its batch dims as spatial dims.
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
        pairs *= count_pairs(lhs[inputs.index(label)], out[output.index(label)], size, stride, low, hole, dilation)
    features = out[output.index("b")] * out[output.index("f")] * rhs[kernel.index("i")]
    return 2 * features * pairs


@functools.cache
def count_pairs(inputs: int, outputs: int, size: int, stride: int, low: int, hole: int, dilation: int) -> int:
    """Count pairs of an output and a weight, along one spatial dim, that read an input and not padding or zeros."""
    at = np.arange(outputs)[:, None] * stride + np.arange(size)[None] * dilation - low
    return int(np.sum((at % hole == 0) & (at >= 0) & (at < inputs * hole)))


# Memory ---------------------------------------------------------------------------------------------------------------

NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all",
         "async-update"}  # fmt: skip
CALLERS = {"while", "conditional", "call"}  # their computations count, not their operands


def moved_by_memory(computation: dict, one: Instruction) -> dict[str, int]:
    """Return the bytes of an instruction's operands and results, by memory. Of an asynchronous pair, the start reads
    and the done writes."""
    if one.opcode in NAMES | CALLERS:
        return {}
    read = [] if one.opcode.endswith("-done") else [computation[name].type for name in one.operands]
    written = [] if one.opcode.endswith("-start") else [one.type]
    return sum((bytes_by_memory(text) for text in read + written), collections.Counter())


@functools.cache
def bytes_by_memory(type_text: str) -> collections.Counter:
    """Return the bytes of a type's arrays by the memory they are in: HBM, or S(n) in HLO's notation.

    S(1) is VMEM, S(3) the 128 MiB of CMEM that only v4 has, and S(5) the host's memory. The others hold scalars.
    """
    found = collections.Counter()
    for dtype, sizes, layout in re.findall(ARRAY.pattern + r"(?:\{([^}]*)\})?", type_text):
        memory = re.search(r"S\([1-9]\d*\)", layout)
        found[memory[0] if memory else HBM] += array_bytes((dtype, sizes))
    return found


def main_memory_bytes(type_text: str) -> int:
    return bytes_by_memory(type_text)[HBM]


# Known instructions ---------------------------------------------------------------------------------------------------

# Opcodes that neither communicate nor are matmuls. Left out: send, recv, infeed, outfeed, ragged-all-to-all and
# collective-broadcast, which communicate; ragged-dot and scaled-dot, which are matmuls.
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
# Opcodes that contain computations, in which collectives are searched
STARTS = {"fusion", "async-start", "call-start", "custom-call-start"}
# A send and recv between slices (Instruction.between_slices) are known too.
KNOWN = LOCAL | CALLERS | {*KINDS, "dot", "convolution", "fusion", "async", "custom-call"}
THREADS = {"", "main", "sparsecore"}  # a SparseCore communicates while the TensorCore computes


def refuse_unknown(program: Program) -> None:
    """Reject instructions that might communicate without being counted.

    Raises: UserError for an unknown opcode or execution thread, and for an instruction that refers to a computation
    with collectives if we do not know whether it executes that computation.
    """
    exchanging = set()
    for name, computation in program.computations.items():  # a computation comes before its callers
        for one in computation.values():
            base = re.sub("-(start|update|done)$", "", one.opcode)
            thread = one.attribute("async_execution_thread=", r'"(.*?)"') if "thread=" in one.attributes else ""
            named = program.called_computations(one) if "%" in one.attributes else []
            inside = next((called for called in named if called in exchanging), "")
            runs = one.opcode in STARTS | CALLERS
            if base not in KNOWN and not (base in ("send", "recv") and "xla_megascale_runtime" in one.attributes):
                raise unknown_error(program, one, f"opcode {one.opcode}")
            if thread not in THREADS:
                raise unknown_error(program, one, f"execution thread {thread!r}")
            if runs and not named and one.opcode != "custom-call-start":  # or a kernel, which contains none
                raise unknown_error(program, one, "a computation that the text does not have")
            if inside and not runs and not one.opcode.endswith(("-update", "-done")):
                raise unknown_error(program, one, f"how {one.opcode} runs %{inside}, which contains collectives,")
            if inside or one.is_collective:
                exchanging.add(name)


def unknown_error(program: Program, one: Instruction, what: str) -> UserError:
    line = shorten(f"%{one.name} = {one.type} {one.opcode}({one.arguments})")
    return UserError(f"compile/ledger.py, which counts communication, does not know {what} and would count 0 bytes; "
                     f"please report it: {line} ({one.scope or 'no scope'}, {program.source(one)})")  # fmt: skip


# Collectives ----------------------------------------------------------------------------------------------------------


def collectives_in(program: Program, name: str, one: Instruction):
    """Yield (computation, collective) for each collective in an instruction of computation `name`: the instruction
    itself, or collectives inside a fusion or an async start."""
    if one.is_collective:
        yield name, one
    elif one.opcode in STARTS:
        for part in one.contents:
            for inner in program.computations[part].values():
                yield from collectives_in(program, part, inner)


def spans(program: Program, name: str) -> list[tuple[str, Instruction, bool, list[int]]]:
    """Return one tuple per collective in a computation: (computation that contains it, collective, is asynchronous,
    line numbers of all instructions that begin, continue or end it).

    On TPU a collective may be spread over several fusions, which overlap it with compute. Each of these fusions repeats
    the instruction, but it is listed only once. Several such collectives may have the same channel, and different
    chains. A `custom-call-start` without operands only prepares a SparseCore, whose collective begins at the update.
    """
    begun, found = collections.defaultdict(list), {}
    sends = {rendezvous(one): one.name for one in program.computations[name].values() if one.opcode == "send"}
    for place, one in enumerate(program.computations[name].values()):
        if one.opcode == "recv":  # from another slice; it ends the collective that its send began
            begun[one.name] = [(name, sends[rendezvous(one)])]
        for where, inner in collectives_in(program, name, one):
            copied = '"async_collective_fusion_config"' in inner.attributes
            shared = inner.attribute("channel_id=", r"(\d+)"), inner.attribute("chain_id=", r'"(\d+)"')
            key = shared if copied else (where, inner.name)
            begun[one.name].append(key)
            two_parts = copied or "-start" in one.opcode + inner.opcode or one.opcode == "send"
            places = found.setdefault(key, (where, inner, two_parts, []))[-1]
            if one.operands or one.opcode != "custom-call-start":
                places.append(place)
        if one.opcode.endswith(("-update", "-done")):
            begun[one.name] = begun[one.operands[0]]
            for key in begun[one.name]:
                found[key][-1].append(place)
    return list(found.values())


def rendezvous(one: Instruction) -> str:
    """Return the name that a send and a recv between slices share."""
    return one.attribute("_xla_host_transfer_rendezvous=", r'"(.*?)"')


def collectives_with_overlap(program: Program, name: str, sizes: tuple, slices: tuple, works: list[Work]):
    """Yield the collectives of a computation, with the matmuls that overlap. works: the cost of each instruction"""
    for where, inner, two_parts, places in spans(program, name):
        beside = add_work(works[places[0] : places[-1] + 1])
        if found := collective(program, where, inner, sizes, slices):
            hidden = bool(beside.flops or beside.unknown)
            yield replace(found, asynchronous=two_parts or hidden, hidden=hidden, overlapped_flops=beside.flops)


def collective(program: Program, name: str, one: Instruction, sizes: tuple, slices=("", 1)) -> Collective | None:
    """Describe one execution of a collective of computation `name`; None if its groups have one device each.

    slices  see `in_slice`
    """
    kind = one.between_slices or one.opcode.removesuffix("-start")
    if name.startswith("all-reduce-scatter"):  # TPU: an all-reduce fused with a slice of its result
        kind = "reduce-scatter"
    data = one.operands[:1] if one.between_slices else one.operands  # a send's other operand is a token
    operands = [array for x in data for array in ARRAY.findall(program.computations[name][x].type)]
    groups = one.attribute("source_target_pairs=" if kind == "collective-permute" else "replica_groups=", GROUPS)
    axes, n = ((slices[0],), slices[1]) if one.between_slices else axes_of(kind, groups, sizes)
    payload_bytes = sum(map(array_bytes, operands)) * (n if kind == "all-gather" else 1)
    sent = {"all-reduce": 2 * payload_bytes * (n - 1) // n, "collective-permute": payload_bytes}
    return axes and Collective(
        kind, axes, payload_bytes, "+".join(sorted({dtype for dtype, _ in operands})),
        wire_bytes=sent.get(kind, payload_bytes * (n - 1) // n), count=1, asynchronous=False,
        source=program.source(one), scope=one.scope)  # fmt: skip


@functools.cache
def axes_of(kind: str, text: str, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes of a collective, and the number of devices in one group.

    Raises: ValueError if the notation of the groups is unknown, or they name devices that the mesh does not have.
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
        # The steps must be the same on every line of devices along these axes; else the axes do not describe them.
        steps = {tuple(np.argwhere(lines == i)[0]): tuple(np.argwhere(lines == j)[0]) for i, j in groups}
        regular = steps == {(row, i): (row, j) for row in range(len(lines)) for (_, i), (_, j) in steps.items()}
    else:
        regular = sorted(map(sorted, groups)) == sorted(map(sorted, lines.tolist()))
    return (tuple(names[a] for a in along) if regular else ("?",)), n


# The order of collectives ---------------------------------------------------------------------------------------------


def unordered_pairs(text: str) -> list[str]:
    """List pairs of collectives in one computation without a dependency between them, where at least one of the two is
    nested in a loop, a branch, a call or a fusion.

    A dependency is a path through operands or control predecessors. If both are directly in the computation, the pair
    is not listed, because XLA's CPU executor starts them in order. Transfers from a device to itself do not count.
    `ordered.py` explains how an unordered pair fails on simulated devices.
    """
    program, within, pairs = Program(text), {}, []
    devices = int((re.search(r"num_partitions=(\d+)", text) or ["", 1])[1])
    waits = lambda one: any(len(set(group)) > 1 for group in one.groups(devices))
    for name, computation in program.computations.items():  # a computation comes before its callers
        found = {}  # instruction -> the collective that it is, or the first that it contains
        for one in computation.values():
            held = (within[called] for called in program.called_computations(one) if within.get(called))
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
