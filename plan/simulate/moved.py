"""Count the bytes that an instruction reads from and writes to main memory (HBM).

If it reads or changes only a slice of an array, only the slice counts. `Memory` follows operands into fusions: if an
operand is only sliced there, the slices count, and if it is updated in place, the update counts. Arrays in on-chip
memory, which HLO calls S(1) and above, do not count.
"""

import functools

from compile.hlo import ARRAY, Instruction, Program, array_bytes, root
from compile.ledger import CALLERS, NAMES, main_memory_bytes

PASSED_ON = {"bitcast", "reshape", "get-tuple-element", "copy", "convert"}  # same entries, inside a fusion
NO_WORK = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")  # targets that move no bytes


class Memory:
    """Bytes moved by the instructions of one program."""

    def __init__(self, program: Program):
        self.program = program
        self.inside = functools.cache(self._inside)

    def bytes_moved(self, computation: dict, one: Instruction) -> int:
        """Count the bytes that one execution reads and writes. Of an asynchronous pair, the start counts all."""
        if one.opcode in NAMES | CALLERS or one.opcode.endswith(("-done", "-update")):
            return 0
        if one.opcode == "custom-call" and one.attribute("custom_call_target=", r'"(.*?)"') in NO_WORK:
            return 0
        types = [computation[name].type for name in one.operands]
        if one.opcode == "fusion":
            read, written = self.inside(one.contents[0])
            sizes = [_touched_bytes(text, part) for text, part in zip(types, read, strict=True)]
            return sum(sizes) + _touched_bytes(one.type, written)
        if one.opcode in ("slice-start", "dynamic-slice-start", "copy-start"):
            arrays = ARRAY.findall(one.type)
            moved = min(array_bytes(x) for x in arrays[:2])
            ends = [main_memory_bytes(text) > 0 for text in (types[0], _element(one.type, 1))]
            return moved * sum(ends)
        read, written = _plain_bytes(one, types)
        return sum(_touched_bytes(text, part) for text, part in zip(types, read, strict=True)) + _touched_bytes(
            one.type, written
        )

    def _inside(self, name: str) -> tuple[tuple[int | None, ...], int | None]:
        """Return the bytes a fused computation reads of each parameter, and the bytes written. None means all."""
        computation = self.program.computations[name]
        readers: dict[str, list] = {x: [] for x in computation}
        for one in computation.values():
            for place, operand in enumerate(one.operands):
                readers[operand].append((one, place))
        parameters = sorted(
            (x for x in computation.values() if x.opcode == "parameter"), key=lambda x: int(x.arguments)
        )
        read = tuple(self._read(computation, readers, one) for one in parameters)
        return read, self._written(computation, root(computation))

    def _read(self, computation, readers, one: Instruction) -> int | None:
        """Return the bytes of a value that its users read, or None for all."""
        total = 0
        for reader, place in readers[one.name]:
            part = self._use(computation, readers, reader, place)
            if part is None:
                return None
            total += part
        return total

    def _use(self, computation, readers, reader: Instruction, place: int) -> int | None:
        if reader.opcode in PASSED_ON:
            return None if reader.root else self._read(computation, readers, reader)
        if reader.opcode == "fusion":
            return self.inside(reader.contents[0])[0][place]
        return _plain_bytes(reader, [computation[name].type for name in reader.operands])[0][place]

    def _written(self, computation, one: Instruction) -> int | None:
        if one.opcode in PASSED_ON and one.operands:
            return self._written(computation, computation[one.operands[0]])
        if one.opcode == "tuple":
            parts = [(self._written(computation, computation[x]), computation[x].type) for x in one.operands]
            if all(part is None for part, _ in parts):
                return None
            return sum(main_memory_bytes(text) if part is None else part for part, text in parts)
        if one.opcode == "fusion":
            return self.inside(one.contents[0])[1]
        return _plain_bytes(one, [computation[name].type for name in one.operands])[1]


def _plain_bytes(one: Instruction, types: list[str]) -> tuple[list[int | None], int | None]:
    """Return the bytes one instruction reads of each operand, and the bytes it writes. None means all."""
    size = lambda text: sum(map(array_bytes, ARRAY.findall(text)))
    rest = [None] * (len(types) - 1)
    if one.opcode in ("dynamic-slice", "slice", "gather"):
        return [size(one.type), *rest], None
    if one.opcode == "dynamic-update-slice":
        return [0, size(types[1]), *rest[1:]], size(types[1])
    if one.opcode == "scatter":
        return [size(types[-1]), *rest], size(types[-1])
    return [None for _ in types], None


def _element(type_text: str, number: int) -> str:
    """Return the type of one element of a tuple, after flattening nested tuples."""
    arrays = type_text.strip("()").split(", ")
    return arrays[number] if number < len(arrays) else ""


def _touched_bytes(type_text: str, part: int | None) -> int:
    """Return the bytes of a type's arrays in main memory, or of the part that is read or written."""
    whole = main_memory_bytes(type_text)
    return whole if part is None else min(part, whole)
