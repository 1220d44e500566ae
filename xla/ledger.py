"""What the compiler did: the collectives and the FLOPs of a compiled step, read from its optimised HLO text.

`read(compiled.as_text(), mesh)` works on what XLA writes for CPU and for TPU. A computation runs as often as its
callers do, times the trips of a loop; a conditional runs its dearest branch.

Partition i of the program is device i of `mesh.devices`, in row-major order: so a replica group is a set of positions
on the mesh, and the axes along which they differ are the axes of the collective.
"""

import collections
import functools
import itertools
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
WRAPPERS = ("sharding.py",)  # files of thin collectives: the line that calls one of them is meant


@dataclass(frozen=True)
class Collective:
    """One collective of the program, and how often a step executes it."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes it runs along; ("?",) if its groups are those of no axes
    payload_bytes: int  # of the joined array for an all-gather, of all operands for the others
    dtype: str  # of the operands, in HLO's spelling
    wire_bytes: int  # this device sends in one execution
    count: float  # executions in one step; a fraction where a share says how often a conditional runs
    asynchronous: bool  # other work may run between its start and its end
    source: str  # "model.py:123 in function"; "?" for one that the compiler made up
    scope: str  # named scopes around it, ending with the primitive


@dataclass(frozen=True)
class Total:
    count: float  # executions in one step
    wire_bytes: float  # this device sends in one step


@dataclass(frozen=True)
class Ledger:
    """One step of one device."""

    collectives: list[Collective]
    flops: int | float  # of dots and convolutions, multiply and add counted apart

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


def _total(found: list[Collective]) -> Total:
    return Total(sum(one.count for one in found), sum(one.count * one.wire_bytes for one in found))


Share = float | Callable[[float], float]


def read(text: str, mesh: Mesh | dict[str, int], shares: dict[str, Share] | None = None) -> Ledger:
    """List what one device executes in a step: collectives, and the FLOPs of its products.

    mesh    the mesh the program was compiled for, or the sizes of its axes, outermost first
    shares  named scope -> share of the executions of a conditional in that scope that run its dearest branch, on the
            busiest device; the others cost nothing. A conditional within such a branch is not counted down again. It
            may be a function of how often a step reaches the conditional: `lambda ticks: microbatches / ticks`
    Raises: ValueError for a loop whose trips, or a collective whose devices, cannot be known, and for a share of no
    conditional.
    """
    sizes = tuple(mesh.shape.items()) if isinstance(mesh, Mesh) else tuple(mesh.items())
    program = Program(text)
    flops, found, calls, cost = {}, {}, {}, {}
    for name, computation in program.computations.items():  # a computation stands before its callers
        flops[name] = sum(program.flops(computation, one) for one in computation.values())
        found[name] = list(program.collectives(name, sizes))
        calls[name] = list(program.calls(computation, cost))
        own = flops[name], sum(one.wire_bytes for one in found[name])
        parts = [[call.times * x for x in cost[call.computation]] for call in calls[name]]
        cost[name] = tuple(map(sum, zip(own, *parts, strict=True)))
    times = executions(calls, program.entry, shares or {})
    return Ledger(
        [replace(one, count=times[name]) for name in found for one in found[name] if times[name]],
        sum(times[name] * flops[name] for name in flops),
    )


@dataclass(frozen=True)
class Call:
    """A computation that another one runs."""

    computation: str
    times: int = 1
    conditional: str = ""  # scope of the conditional that may skip it


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


# The program ----------------------------------------------------------------------------------------------------------

COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^  (ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*?)\)(?:, (.*))?$")
ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
TABLE_ROW = re.compile(r"^(\d+) (.*)$")
TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
SAME_VALUE = ("copy", "convert", "bitcast", "reshape", "copy-start", "copy-done")


@dataclass(frozen=True, slots=True)
class Instruction:
    root: bool
    name: str
    type: str  # of the result: an array, or a tuple of them
    opcode: str
    arguments: str  # operands; of a constant its value, of a parameter its number
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,()]+)", self.arguments)

    def attribute(self, name: str, pattern: str = r"%(\S+?)(?=[,}]|$)") -> str:
        """The first group of `pattern` after `name`; empty if it is not there. By default: a computation's name."""
        match = re.search(name + pattern, self.attributes)
        return match[1] if match else ""

    def computations(self, name: str) -> list[str]:
        return re.findall(r"%([^\s,{}]+)", self.attribute(name, r"\{(.*?)\}"))

    @property
    def scope(self) -> str:
        return self.attribute("op_name=", r'"(.*?)"')

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix("-start") in KINDS

    def groups(self, devices: int) -> list[list[int]]:
        """The devices of a collective, group by group; of a permutation, from and to. Of other instructions: none."""
        name = "source_target_pairs=" if "permute" in self.opcode else "replica_groups="
        text = self.attribute(name, GROUPS) if self.is_collective else ""
        return device_groups(text, devices) if text else []


class Program:
    """A module of HLO text: its computations, each {name: Instruction}, and where in our source they come from."""

    def __init__(self, text: str):
        self.computations, self.tables, self.entry = {}, {table: {} for table in TABLES}, ""
        rows, computation = {}, {}
        for line in text.splitlines():
            if match := INSTRUCTION.match(line):
                root, name, *parts = match.groups(default="")
                computation[name] = Instruction(bool(root), name, *parts)
            elif match := COMPUTATION.match(line):
                computation = self.computations[match[2]] = {}
                self.entry = match[2] if match[1] else self.entry
            elif line in TABLES:
                rows = self.tables[line]
            elif match := TABLE_ROW.match(line):
                rows[int(match[1])] = match[2]
        if not self.entry:
            raise ValueError("this is not HLO text: it has no ENTRY computation; pass compiled.as_text()")
        every = [one for computation in self.computations.values() for one in computation.values()]
        self.started = {one.attribute("calls=") for one in every if one.opcode == "async-start"}

    def calls(self, computation: dict, cost: dict):
        """The computations these instructions run: a loop its body, a conditional its dearest branch."""
        for one in computation.values():
            if one.opcode == "while":
                times = self.trips(computation, one)
                yield Call(one.attribute("body="), times)
                yield Call(one.attribute("condition="), times)
            elif one.opcode == "conditional":
                branches = one.computations("branch_computations=")
                branches = branches or [one.attribute("true_computation="), one.attribute("false_computation=")]
                yield Call(max(branches, key=cost.get), conditional=one.scope)
            elif one.opcode == "call":
                yield Call(one.attribute("to_apply="))
            elif one.opcode in ("fusion", "async-start", "custom-call"):
                called = one.attribute("calls=")
                yield from map(Call, [called] if called else one.computations("called_computations="))

    def called(self, one: Instruction) -> list[str]:
        """Every computation that an instruction names: bodies, conditions, branches, what it fuses or applies."""
        return [name for name in re.findall(r"%([^\s,{}]+)", one.attributes) if name in self.computations]

    # Loops

    def trips(self, caller: dict, loop: Instruction) -> int:
        """How often a loop runs: as the compiler says, or as its condition `counter < limit` does.

        Raises: ValueError if neither does.
        """
        if known := loop.attribute('"known_trip_count":', r'\{"n":"(\d+)"'):
            return int(known)
        condition, body = (self.computations[loop.attribute(name)] for name in ("condition=", "body="))
        compare, values = self.scalar(condition, root(condition))
        carry = caller[loop.operands[0]]
        if compare.opcode == "compare" and "direction=LT" in compare.attributes and carry.opcode == "tuple":
            first = lambda x: self.value(caller, carry.operands[x.index]) if isinstance(x, Element) else x
            start, limit, step = *map(first, values), self.step(body, values[0])
            if all(isinstance(x, int) for x in (start, limit, step)) and step > 0:
                return max(0, -(-(limit - start) // step))
        raise ValueError(f"cannot know how often loop %{loop.name} runs ({loop.scope or 'no scope'}, "
                         f"{self.source(loop)}): its condition is not counter < constant")  # fmt: skip

    def step(self, body: dict, counter: "Element") -> int | None:
        """What a loop's body adds to its counter; None if it does something else to it."""
        if not isinstance(counter, Element) or root(body).opcode != "tuple":
            return None
        add, values = self.scalar(body, origin(body, root(body).operands[counter.index]))
        amounts = [x for x in values if isinstance(x, int)]
        return amounts[0] if add.opcode == "add" and counter in values and amounts else None

    def scalar(self, computation: dict, one: Instruction) -> tuple[Instruction, list]:
        """An instruction on scalars, or the one that a fusion is made of, and the values of its operands."""
        if one.opcode != "fusion":
            return one, [self.value(computation, name) for name in one.operands]
        fused = self.computations[one.attribute("calls=")]
        outside = {x.name: one.operands[int(x.arguments)] for x in fused.values() if x.opcode == "parameter"}
        values = [self.value(computation, outside[name]) if name in outside else self.value(fused, name)
                  for name in root(fused).operands]  # fmt: skip
        return root(fused), values

    def value(self, computation: dict, name: str) -> "int | Element | None":
        """What a scalar is: a constant, an element of the computation's one parameter, or neither (None)."""
        one = origin(computation, name)
        if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.arguments):
            return int(one.arguments)
        if one.opcode == "get-tuple-element" and computation[one.operands[0]].opcode == "parameter":
            return Element(int(one.attribute("index=", r"(\d+)")))
        return None

    # FLOPs

    def flops(self, computation: dict, one: Instruction) -> int:
        """Of one dot or convolution; of a kernel (a custom call) what it says of itself."""
        if one.opcode == "dot":
            lhs = dims(computation[one.operands[0]].type)
            contracted = one.attribute("lhs_contracting_dims=", r"\{(.*?)\}")
            return 2 * math.prod(dims(one.type)) * math.prod(lhs[int(i)] for i in contracted.split(",") if i)
        if one.opcode == "convolution":
            return convolution_flops(one, *(dims(computation[name].type) for name in one.operands[:2]))
        if one.opcode == "custom-call":
            return int(one.attribute('"cost_estimate":', r'\{"flops":"(\d+)"') or 0)
        return 0

    # Collectives

    def collectives(self, name: str, sizes: tuple):
        """The collectives of a computation, each counted once."""
        computation = self.computations[name]
        starts = {
            name for one in computation.values() if "AsyncCollectiveStart" in one.attributes for name in one.operands
        }
        for one in computation.values():
            kind = one.opcode.removesuffix("-start")
            # TPU: each fusion that works while a collective runs holds a copy of it; one of the copies starts it.
            continued = '"async_collective_fusion_config"' in one.attributes and one.name not in starts
            if kind not in KINDS or continued:
                continue
            if name.startswith("all-reduce-scatter"):  # TPU: an all-reduce fused with the slice that is kept
                kind = "reduce-scatter"
            operands = [array for operand in one.operands for array in ARRAY.findall(computation[operand].type)]
            groups = one.attribute(
                "source_target_pairs=" if kind == "collective-permute" else "replica_groups=", GROUPS
            )
            axes, n = axes_of(kind, groups, sizes)
            payload_bytes = sum(map(array_bytes, operands)) * (n if kind == "all-gather" else 1)
            sent = {"all-reduce": 2 * payload_bytes * (n - 1) // n, "collective-permute": payload_bytes}
            if axes:  # a group of one device exchanges nothing
                yield Collective(
                    kind, axes, payload_bytes, "+".join(sorted({dtype for dtype, _ in operands})),
                    wire_bytes=sent.get(kind, payload_bytes * (n - 1) // n), count=1,
                    asynchronous=one.opcode.endswith("-start") or one.name in starts or name in self.started,
                    source=self.source(one), scope=one.scope)  # fmt: skip

    def source(self, one: Instruction) -> str:
        """The line of ours that an instruction comes from: the innermost frame outside WRAPPERS."""
        if file := one.attribute("source_file=", r'"(.*?)"'):
            return f"{os.path.basename(file)}:" + one.attribute("source_line=", r"(\d+)")
        places, frame = [], int(one.attribute("stack_frame_id=", r"(\d+)") or 0)
        while frame:
            location, parent = re.findall(r"=(\d+)", self.tables["StackFrames"][frame])
            file, function, line, *_ = re.findall(r"=(\d+)", self.tables["FileLocations"][int(location)])
            file, function = self.tables["FileNames"][int(file)], self.tables["FunctionNames"][int(function)]
            function = function.strip('"').replace("<locals>.", "")
            places.append((os.path.basename(file.strip('"')), f":{line} in {function}"))
            frame = int(parent) - 1  # XLA prints parents one too high: a frame without one has 1
        ours = [place for place in places if place[0] not in WRAPPERS] or places
        return "".join(ours[0]) if ours else "?"


@dataclass(frozen=True)
class Element:
    """A value of a loop's carry, by its place."""

    index: int


def root(computation: dict) -> Instruction:
    return next(one for one in computation.values() if one.root)


def origin(computation: dict, name: str) -> Instruction:
    """The instruction that makes a value which is only copied on."""
    one = computation[name]
    while one.opcode in SAME_VALUE:
        one = computation[one.operands[0]]
    return one


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


# Arrays, windows, groups ----------------------------------------------------------------------------------------------


def dims(array: str) -> list[int]:
    """Sizes in a type like bf16[8,128]{1,0:T(8,128)}."""
    return [int(size) for size in ARRAY.search(array)[2].split(",") if size]


def array_bytes(array: tuple[str, str]) -> int:
    dtype, sizes = array
    bits = {"pred": 8, "token": 0}.get(dtype) or int((re.search(r"\d+", dtype) or [0])[0])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


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


GROUPS = r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^]]*\][^{]*\{[^}]*\})"


def device_groups(text: str, devices: int) -> list[list[int]]:
    """Read the groups of a collective, in any of XLA's notations.

    {{0,1},{2,3}} lists them, and {} is one group of all. [2,2]<=[2,2]T(1,0) reshapes and transposes the numbers from 0
    and has a group a row. mesh['a'=2,'b'=2] {'b'} has one along each line of axis b; 'b':(2)4 is a part of an axis: of
    size 4, within each of 2 parts.
    """
    if text == "{}":
        return [list(range(devices))]
    if text.startswith("{"):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):
        shape, order = text.split("<=")
        return iota(order).reshape(_numbers(shape)).tolist()
    named, order, chosen = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text).groups()
    cuts = []  # the mesh's axes, each cut into parts: their sizes, and whether the group runs along them
    for axis, size in re.findall(r"'(\w+)'=(\d+)", named):
        cut = 1
        for before, part in sorted(re.findall(rf"'{axis}'(?::\((\d+)\)(\d+))?", chosen)):
            before, part = int(before or 1), int(part or size)
            cuts += [(before // cut, False), (part, True)]
            cut = before * part
        cuts.append((int(size) // cut, False))
    along = [i for i, (_, chosen) in enumerate(cuts) if chosen]
    ids = iota(order or f"[{devices}]").reshape([size for size, _ in cuts])
    return np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, math.prod(cuts[i][0] for i in along)).tolist()


def iota(text: str) -> np.ndarray:
    """Read [2,4]T(1,0): the numbers from 0 in that shape, transposed. Numbers alone are taken as they are."""
    shape, _, order = text.partition("T")
    if not text.startswith("["):
        return np.array(_numbers(text))
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


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
