"""A compiled program as XLA writes it: its text, read into instructions.

`Program(compiled.as_text())` holds the computations of an optimised module, in the order in which they are written: one
stands before its callers, and of a scheduled module instructions stand in the order in which they start.
"""

import math
import os
import re
from dataclasses import dataclass

import numpy as np

from errors import UserError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Files of thin collectives, and of forms of them: the line that calls one is meant.
WRAPPERS = ("sharding.py", "positions.py", "rings.py", "context.py")

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
    def contents(self) -> list[str]:
        """The computations that it is made of: what it fuses, starts, or is a kernel of."""
        if self.opcode == "call-start":  # TPU: what a SparseCore does meanwhile
            return [self.attribute("to_apply=")]
        if self.opcode.removesuffix("-start") not in ("fusion", "async", "custom-call"):
            return []
        called = self.attribute("calls=")
        return [called] if called else self.computations("called_computations=")

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix("-start") in KINDS

    def groups(self, devices: int) -> list[list[int]]:
        """The devices of a collective, group by group; of a permutation, from and to. Of other instructions: none."""
        name = "source_target_pairs=" if "permute" in self.opcode else "replica_groups="
        text = self.attribute(name, GROUPS) if self.is_collective else ""
        return device_groups(text, devices) if text else []


NEXT = re.compile(r"  (?:ROOT )?%|\}(?:, execution_thread=.*)?$")  # what may follow an instruction


def logical_lines(text: str):
    """Lines, of which an instruction is one: the TPU compiler writes the metadata of a kernel on several."""
    line = ""
    for piece in text.splitlines():
        if line.startswith("  ") and not NEXT.match(piece):
            line += piece
        else:
            yield line.rstrip()
            line = piece
    yield line.rstrip()


class Program:
    """A module of HLO text: its computations, each {name: Instruction}, and where in our source they come from.

    Raises: UserError for a text that is none, or has a line in a computation that cannot be read.
    """

    def __init__(self, text: str):
        self.computations, self.tables, self.entry = {}, {table: {} for table in TABLES}, ""
        rows, computation, unread = {}, {}, ""
        for line in logical_lines(text):
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
            elif line.startswith("  ") or line.endswith("{"):
                unread = unread or line.strip()
        if not self.entry:
            raise UserError("this is not HLO text: it has no ENTRY computation; pass compiled.as_text()")
        if unread:
            raise UserError(f"cannot read this line of HLO: {shortened(unread)}")

    def called(self, one: Instruction) -> list[str]:
        """Every computation that an instruction names: bodies, conditions, branches, what it fuses or applies."""
        # An instruction may be called like a computation: those that it waits for are no calls.
        attributes = re.sub(r"control-predecessors=\{.*?\}", "", one.attributes)
        return [name for name in re.findall(r"%([^\s,{}]+)", attributes) if name in self.computations]

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

    def source(self, one: Instruction) -> str:
        """The line of ours that an instruction comes from: the innermost frame outside packages and WRAPPERS."""
        if file := one.attribute("source_file=", r'"(.*?)"'):
            return f"{os.path.basename(file)}:" + one.attribute("source_line=", r"(\d+)")
        places, frame = [], int(one.attribute("stack_frame_id=", r"(\d+)") or 0)
        while frame:
            location, parent = re.findall(r"=(\d+)", self.tables["StackFrames"][frame])
            file, function, line, *_ = re.findall(r"=(\d+)", self.tables["FileLocations"][int(location)])
            file, function = self.tables["FileNames"][int(file)], self.tables["FunctionNames"][int(function)]
            function = function.strip('"').replace("<locals>.", "")
            folder, file = os.path.split(file.strip('"'))
            places.append((f"{file}:{line} in {function}", file in WRAPPERS or "site-packages" in folder))
            frame = int(parent) - 1  # XLA prints parents one too high: a frame without one has 1
        ours = [place for place, theirs in places if not theirs] or [place for place, _ in places]
        return ours[0] if ours else "?"


@dataclass(frozen=True)
class Element:
    """A value of a loop's carry, by its place."""

    index: int


def shortened(line: str) -> str:
    return line if len(line) <= 120 else line[:118] + ".."


def root(computation: dict) -> Instruction:
    return next(one for one in computation.values() if one.root)


def origin(computation: dict, name: str) -> Instruction:
    """The instruction that makes a value which is only copied on."""
    one = computation[name]
    while one.opcode in SAME_VALUE:
        one = computation[one.operands[0]]
    return one


# Arrays, groups of devices --------------------------------------------------------------------------------------------


def dims(array: str) -> list[int]:
    """Sizes in a type like bf16[8,128]{1,0:T(8,128)}."""
    return [int(size) for size in ARRAY.search(array)[2].split(",") if size]


def array_bytes(array: tuple[str, str]) -> int:
    dtype, sizes = array
    bits = {"pred": 8, "token": 0}.get(dtype) or int((re.search(r"\d+", dtype) or [0])[0])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


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
