"""Parse the text of a compiled XLA program into instructions.

`Program(compiled.as_text())` holds the computations (functions) of an optimized module in the order of the text. A
computation comes before its callers. In a scheduled module, instructions are in the order in which they start.
"""

import math
import os
import re
from dataclasses import dataclass

import numpy as np

from utils import UserError

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# Collectives between TPU slices are a send to the host and a recv, with the kind as an attribute.
BETWEEN_SLICES = {"ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter", "ALL_REDUCE": "all-reduce",
                  "ALL_TO_ALL": "all-to-all", "ONE_TO_ONE": "collective-permute"}  # fmt: skip
# Files that wrap collectives: report the line that calls them instead.
WRAPPERS = ("sharding.py", "positions.py", "rings.py", "context.py", "gradients.py")

# Named scope of loops that run as often as the data requires, and once if routers are balanced (`overlap/experts.py`).
COUNTED_ONCE = "counted_once"

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
    type: str  # of the result: an array, or a tuple of arrays
    opcode: str
    arguments: str  # operands; a constant's value, a parameter's number
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,()]+)", self.arguments)

    def attribute(self, name: str, pattern: str = r"%(\S+?)(?=[,}]|$)") -> str:
        """Return the first group of `pattern` after `name`, else ""; the default pattern is a computation's name."""
        match = re.search(name + pattern, self.attributes)
        return match[1] if match else ""

    def computations(self, name: str) -> list[str]:
        return re.findall(r"%([^\s,{}]+)", self.attribute(name, r"\{(.*?)\}"))

    @property
    def scope(self) -> str:
        return self.attribute("op_name=", r'"(.*?)"')

    @property
    def contents(self) -> list[str]:
        """The computations inside this instruction, if it is a fusion, an async start or a kernel."""
        if self.opcode == "call-start":  # TPU: a computation that runs on a SparseCore
            return [self.attribute("to_apply=")]
        if self.opcode.removesuffix("-start") not in ("fusion", "async", "custom-call"):
            return []
        called = self.attribute("calls=")
        return [called] if called else self.computations("called_computations=")

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix("-start") in KINDS or (self.opcode == "send" and bool(self.between_slices))

    @property
    def between_slices(self) -> str:
        """The kind of a collective between TPU slices, if this instruction is its send or recv; else ""."""
        return BETWEEN_SLICES.get(self.attribute("_xla_megascale_transfer_type=", r'"(\w+)"'), "")

    def groups(self, devices: int) -> list[list[int]]:
        """Return the device groups of a collective, or a permute's (from, to) pairs; [] for other instructions."""
        name = "source_target_pairs=" if "permute" in self.opcode else "replica_groups="
        text = self.attribute(name, GROUPS) if self.is_collective else ""
        return device_groups(text, devices) if text else []


NEXT = re.compile(r"  (?:ROOT )?%|\}(?:, execution_thread=.*)?$")  # what may follow an instruction


def logical_lines(text: str):
    """Yield lines with one instruction each. The TPU compiler spreads the metadata of a kernel over several lines."""
    line = ""
    for raw in text.splitlines():
        if line.startswith("  ") and not NEXT.match(raw):
            line += raw
        else:
            yield line.rstrip()
            line = raw
    yield line.rstrip()


def add_element(computation: dict, operand: str) -> None:
    """Add an instruction for an operand `x#1`, which newer compilers write for element 1 of the tuple x."""
    of, mark, index = operand.rpartition("#")
    if mark and operand not in computation:
        add_element(computation, of)
        element = element_types(computation[of].type)[int(index)]
        computation[operand] = Instruction(False, operand, element, "get-tuple-element", f"%{of}", f"index={index}")


class Program:
    """A module of HLO text: its computations, each {name: Instruction}, and the source lines they come from.

    Raises: UserError if the text is not HLO, or an instruction cannot be parsed.
    """

    def __init__(self, text: str):
        self.computations, self.tables, self.entry = {}, {table: {} for table in TABLES}, ""
        rows, computation, unread = {}, {}, ""
        for line in logical_lines(text):
            if match := INSTRUCTION.match(line):
                root, name, *parts = match.groups(default="")
                one = Instruction(bool(root), name, *parts)
                for operand in one.operands if "#" in one.arguments else ():
                    add_element(computation, operand)
                computation[name] = one
            elif match := COMPUTATION.match(line):
                computation = self.computations[match[2]] = {}
                self.entry = match[2] if match[1] else self.entry
            elif line in TABLES:
                rows = self.tables[line]
            elif match := TABLE_ROW.match(line):
                rows[int(match[1])] = match[2]
            elif line.startswith("  ") or line.endswith("{"):
                unread = unread or line.strip()
        header = text.partition("\n")[0]
        self.name = (re.match(r"HloModule ([^\s,]+)", header) or ["", ""])[1]
        aliases = re.search(r"input_output_alias=\{(.*?)\}(?=, \w+=|$)", header)  # {0}: (3, {}, may-alias), ..
        self.donated = {int(n) for n in re.findall(r"\{(\d+)[\d, ]*\}:", aliases[1])} if aliases else set()
        if not self.entry:
            raise UserError("the text is not HLO: it has no ENTRY computation; pass compiled.as_text()")
        if unread:
            raise UserError(f"cannot parse this line of HLO, please report it: {shorten(unread)}")

    def called_computations(self, one: Instruction) -> list[str]:
        """List every computation that an instruction refers to, such as a loop's body or a fusion's contents."""
        # Control predecessors are instructions, which may have the name of a computation.
        attributes = re.sub(r"control-predecessors=\{.*?\}", "", one.attributes)
        return [name for name in re.findall(r"%([^\s,{}]+)", attributes) if name in self.computations]

    # Loops

    def trip_count(self, caller: dict, loop: Instruction) -> int:
        """Return a loop's trip count, from the compiler's annotation or from its condition `counter < limit`.
        Otherwise it is 1 for a loop in the scope COUNTED_ONCE.

        Raises: ValueError for any other loop.
        """
        if known := loop.attribute('"known_trip_count":', r'\{"n":"(\d+)"'):
            return int(known)
        condition, body = (self.computations[loop.attribute(name)] for name in ("condition=", "body="))
        compare, values = self.scalar(condition, root(condition))
        carry = caller[loop.operands[0]]
        if compare.opcode == "compare" and "direction=LT" in compare.attributes and carry.opcode == "tuple":
            first = lambda x: self.value(caller, carry.operands[x.index]) if isinstance(x, Element) else x
            start, limit, step = *map(first, values), self.counter_step(body, values[0])
            if all(isinstance(x, int) for x in (start, limit, step)) and step > 0:
                return max(0, -(-(limit - start) // step))
        if COUNTED_ONCE in loop.scope:
            return 1
        raise ValueError(f"cannot know how often loop %{loop.name} runs ({loop.scope or 'no scope'}, "
                         f"{self.source(loop)}): its condition is not counter < constant")  # fmt: skip

    def counter_step(self, body: dict, counter: "Element") -> int | None:
        """Return what a loop's body adds to the loop's counter; None if it changes the counter in another way."""
        if not isinstance(counter, Element) or root(body).opcode != "tuple":
            return None
        add, values = self.scalar(body, origin(body, root(body).operands[counter.index]))
        amounts = [x for x in values if isinstance(x, int)]
        return amounts[0] if add.opcode == "add" and counter in values and amounts else None

    def scalar(self, computation: dict, one: Instruction) -> tuple[Instruction, list]:
        """Return an instruction on scalars, or the root of a scalar fusion, with the values of its operands."""
        if one.opcode != "fusion":
            return one, [self.value(computation, name) for name in one.operands]
        fused = self.computations[one.attribute("calls=")]
        outside = {x.name: one.operands[int(x.arguments)] for x in fused.values() if x.opcode == "parameter"}
        values = [self.value(computation, outside[name]) if name in outside else self.value(fused, name)
                  for name in root(fused).operands]  # fmt: skip
        return root(fused), values

    def value(self, computation: dict, name: str) -> "int | Element | None":
        """Return a scalar's value: a constant, or an Element of the computation's single parameter, else None."""
        one = origin(computation, name)
        if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.arguments):
            return int(one.arguments)
        if one.opcode == "get-tuple-element" and computation[one.operands[0]].opcode == "parameter":
            return Element(int(one.attribute("index=", r"(\d+)")))
        return None

    def source(self, one: Instruction) -> str:
        """Return an instruction's source line: its innermost frame outside installed packages and WRAPPERS.

        If the whole program is an installed package, like MaxText, it is the innermost frame in that package.
        """
        if file := one.attribute("source_file=", r'"(.*?)"'):
            return f"{os.path.basename(file)}:" + one.attribute("source_line=", r"(\d+)")
        places, frame = [], int(one.attribute("stack_frame_id=", r"(\d+)") or 0)
        while frame:
            location, parent = re.findall(r"=(\d+)", self.tables["StackFrames"][frame])
            file, function, line, *_ = re.findall(r"=(\d+)", self.tables["FileLocations"][int(location)])
            file, function = self.tables["FileNames"][int(file)], self.tables["FunctionNames"][int(function)]
            function = function.strip('"').replace("<locals>.", "")
            folder, file = os.path.split(file.strip('"'))
            package = re.search(r"site-packages/?([^/]*)|$", folder)
            if file not in WRAPPERS and not file.startswith("<"):  # <frozen runpy>
                places.append((f"{file}:{line} in {function}", package[0] and package[1]))
            frame = int(parent) - 1  # XLA prints parents one too high: a frame without a parent has 1
        owner = min((package for _, package in places), key=bool, default="") and places[-1][1]
        return next((place for place, package in places if package == owner), "?")


@dataclass(frozen=True)
class Element:
    """A value in a loop's carry, by its index."""

    index: int


def shorten(line: str) -> str:
    return line if len(line) <= 120 else line[:118] + ".."


def root(computation: dict) -> Instruction:
    return next(one for one in computation.values() if one.root)


def origin(computation: dict, name: str) -> Instruction:
    """Return the instruction that produces a value, skipping copies, converts, bitcasts and reshapes."""
    one = computation[name]
    while one.opcode in SAME_VALUE:
        one = computation[one.operands[0]]
    return one


# Arrays, groups of devices --------------------------------------------------------------------------------------------


def dims(array: str) -> list[int]:
    """Return the sizes in a type like bf16[8,128]{1,0:T(8,128)}."""
    return [int(size) for size in ARRAY.search(array)[2].split(",") if size]


def element_types(type_text: str) -> list[str]:
    """Split the type of a tuple into those of its elements; the type of an array is its only element."""
    if not type_text.startswith("("):
        return [type_text]
    found, depth, start = [], 0, 1
    for place, letter in enumerate(type_text):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0 or (depth == 1 and letter == ","):
            found.append(type_text[start:place].strip())
            start = place + 1
    return [one for one in found if one]


def array_bytes(array: tuple[str, str]) -> int:
    dtype, sizes = array
    bits = {"pred": 8, "token": 0}.get(dtype) or int((re.search(r"\d+", dtype) or [0])[0])
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


GROUPS = r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^]]*\][^{]*\{[^}]*\})"


def device_groups(text: str, devices: int) -> list[list[int]]:
    """Parse the device groups of a collective, in any of XLA's notations.

    - {{0,1},{2,3}} lists the groups; {} is one group of all devices.
    - [2,2]<=[2,2]T(1,0) reshapes the numbers 0, 1, 2, .. and transposes them; each row is a group.
    - mesh['a'=2,'b'=2] {'b'} has one group along axis b for each index along a. 'b':(2)4 is a part of axis b: its
      devices are first split into 2 parts, and groups of size 4 are in each.
    """
    if text == "{}":
        return [list(range(devices))]
    if text.startswith("{"):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):
        shape, order = text.split("<=")
        return iota(order).reshape(_numbers(shape)).tolist()
    named, order, chosen = re.match(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text).groups()
    cuts = []  # (size, whether the group runs along it) of each part of each mesh axis
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
    """Parse [2,4]T(1,0), which is the numbers 0, 1, 2, .. in this shape, transposed; or a plain list of numbers."""
    shape, _, order = text.partition("T")
    if not text.startswith("["):
        return np.array(_numbers(text))
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
