"""Estimate the peak memory of a scheduled program from the arrays that are live at each instruction.

`peak_bytes(program)` counts arrays in main memory (HBM) with the padding of their tiles: the arguments, the results
that do not reuse an argument's memory, and temporary arrays from the instruction that writes them to the last that
reads them. These reuse memory: tuples, bitcasts, what a loop carries, updates in place, and results that alias an
operand. An elementwise operation or an all-reduce may overwrite operands that nothing reads afterwards.

The compiler cannot always pack arrays without gaps, which is not modeled.
"""

import collections
import functools
import re

from compile.hlo import ARRAY, Instruction, Program, array_bytes, element_types, root
from compile.ledger import CALLERS

SAME_MEMORY = {"bitcast", "reshape", "optimization-barrier", "after-all", "add-dependency", "partition-id"}
PASSED_ON = {"bitcast", "reshape", "convert", "copy"}  # between a parameter of a fusion and its update in place
ELEMENTWISE = {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "select", "convert", "tanh"}
LAYOUT = re.compile(ARRAY.pattern + r"(?:\{([^}]*)\})?")


@functools.cache
def padded_bytes(type_text: str) -> int:
    """Return the bytes of a type's arrays in main memory, with each array padded to whole tiles."""
    total = 0
    for dtype, sizes, layout in LAYOUT.findall(type_text):
        if re.search(r"S\([1-9]", layout):
            continue
        tile = re.search(r"T\(([\d,]+)\)", layout)
        order, shape = re.findall(r"\d+", layout.partition(":")[0]), sizes.split(",") if sizes else []
        lengths = [int(shape[int(dim)]) for dim in order] if len(order) == len(shape) else [int(n) for n in shape]
        for place, size in enumerate(reversed(tile[1].split(","))) if tile else ():  # the tile of the innermost dims
            if place < len(lengths):
                lengths[place] = -(-lengths[place] // int(size)) * int(size)
        total += array_bytes((dtype, ",".join(map(str, lengths))))
    return total


def peak_bytes(program: Program) -> int:
    """Estimate the largest number of bytes that are in use at one instruction of the entry computation."""
    peaks = {}
    for name, computation in program.computations.items():  # a computation comes before its callers
        peaks[name] = _temporary_bytes(program, name, computation, peaks)
    entry = program.computations[program.entry]
    arguments = sum(padded_bytes(one.type) for one in entry.values() if one.opcode == "parameter")
    return arguments + peaks[program.entry]


def _temporary_bytes(program: Program, name: str, computation: dict, peaks: dict[str, int]) -> int:
    """Return the largest number of bytes of live arrays that the computation itself allocates, including its calls."""
    values, sizes, ends = {}, {}, collections.Counter()  # instruction -> a set of buffers for each element
    for place, one in enumerate(computation.values()):
        values[one.name] = _buffers(program, computation, one, values, sizes)
        for operand in (one.name, *one.operands):
            for buffer in set().union(*values.get(operand, ())):
                ends[buffer] = place
    last, donated = len(computation), program.donated if name == program.entry else None
    for number, buffers in enumerate(values[root(computation).name]):
        for buffer in buffers:  # the memory of a donated argument, or of what a loop carries
            if donated is None or number in donated:
                sizes[buffer] = 0
            ends[buffer] = last
    begins = {one: place for place, one in enumerate(computation)}
    starts, stops = collections.Counter(), collections.Counter()
    for buffer, size in sizes.items():
        starts[begins[buffer[0]]] += size
        stops[ends[buffer]] += size
    live = peak = 0
    for place, one in enumerate(computation.values()):
        live += starts[place]
        inside = [peaks.get(called, 0) for called in program.called_computations(one)] if one.opcode in CALLERS else []
        shared = min(starts[place], stops[place]) if _may_overwrite(one) else 0
        peak = max(peak, live - shared + max(inside, default=0))
        live -= stops[place]
    return peak


def _may_overwrite(one: Instruction) -> bool:
    """Return True for instructions whose result may be in the memory of an operand that nothing reads afterwards."""
    return one.opcode == "all-reduce" or "kind=kLoop" in one.attributes or one.opcode in ELEMENTWISE


def _buffers(program: Program, computation: dict, one: Instruction, values: dict, sizes: dict) -> list[set]:
    """Return the buffers of each element of an instruction's result, and add the sizes of new ones to `sizes`."""
    operands = [values[name] for name in one.operands if name in values]
    together = [set().union(*(buffers for value in operands for buffers in value))]
    if one.opcode in ("parameter", "constant"):
        return [set() for _ in element_types(one.type)]  # parameters are counted by the caller
    if one.opcode == "get-tuple-element":
        number = int(one.attribute("index=", r"(\d+)"))
        return [operands[0][number]] if number < len(operands[0]) else together
    if one.opcode == "tuple":
        return [set().union(*value) for value in operands]
    if one.opcode == "while":
        return operands[0]
    if one.opcode in SAME_MEMORY or one.opcode.endswith(("-done", "-update")):
        same = operands and len(element_types(one.type)) == len(operands[0]) > 1
        return operands[0] if same else together
    if one.opcode == "copy-start":  # (destination, source, context)
        sizes[one.name, 0] = padded_bytes(element_types(one.type)[0])
        return [{(one.name, 0)} | together[0]]
    if one.opcode.endswith("-start"):  # the type of its result contains those of its operands
        owned = sum(padded_bytes(computation[name].type) for name in one.operands)
        sizes[one.name, 0] = max(0, padded_bytes(one.type) - owned)
        return [{(one.name, 0)} | together[0]]
    found, aliases = [], _aliases(program, one)
    for number, text in enumerate(element_types(one.type)):
        if number in aliases and aliases[number] < len(operands):
            found.append(set().union(*operands[aliases[number]]))
        else:
            sizes[one.name, number] = padded_bytes(text)
            found.append({(one.name, number)})
    return found


def _aliases(program: Program, one: Instruction) -> dict[int, int]:
    """Return which element of an instruction's result is written to the memory of which operand."""
    named = one.attribute("output_to_operand_aliasing=", r"\{(.*?\))\}")
    found = {int(n or 0): int(operand) for n, operand in re.findall(r"\{(\d*)\}: \((\d+)", named)}
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return {0: 0}
    if one.opcode != "fusion":
        return found
    inside = program.computations[one.contents[0]]
    top = root(inside)
    written = [inside[name] for name in top.operands] if top.opcode == "tuple" else [top]
    for number, part in enumerate(written):
        operand = _updated_parameter(inside, part)
        if operand is not None:
            found[number] = operand
    return found


def _updated_parameter(inside: dict, one: Instruction) -> int | None:
    """Return the parameter of a fusion that an instruction updates in place, or None."""
    updates = False
    while one.opcode in PASSED_ON or one.opcode in ("dynamic-update-slice", "scatter"):
        updates = updates or one.opcode not in PASSED_ON
        one = inside[one.operands[0]]
    return int(one.arguments) if updates and one.opcode == "parameter" else None
