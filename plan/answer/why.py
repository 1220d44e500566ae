"""Compare the FLOPs and bytes of a plan with those of the traced step, and list the source lines that cause them.

The traced step ends with the gradients, so Muon's update is left out. The plan's numbers are those of `costs.py`,
before the compiler replaces any collective. Each source line of a layer has a formula in letters: the FLOPs of a
matmul, or the bytes of a collective, in one forward pass.
"""

import re
from dataclasses import asdict, dataclass, field

from plan.answer.show import make_table
from plan.chips.units import amount
from plan.count import costs, traced_layer
from plan.count.matrices import MUON
from plan.count.step import is_tpu
from plan.count.traced_layer import part_of, scopes_of
from plan.time.plan import Plan
from plan.trace import program
from plan.trace.rows import Row


@dataclass
class Line:
    """The operations of one kind on one source line, summed over a step."""

    source: str  # "model.py:123 in hidden"
    formula: str = ""  # FLOPs or bytes of one forward pass of a layer, in the letters of MEANS
    count: float = 0  # executions
    size: float = 0  # FLOPs, or bytes sent


@dataclass
class Group:
    """A planned and a traced total: FLOPs of a part of the model, or bytes of a collective over some axes."""

    name: str
    parts: str  # names from `costs.py`
    planned: float
    traced: float = 0
    lines: list[Line] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        return self.traced / self.planned if self.planned else None

    def add(self, row: Row, of: str, formula: str) -> None:
        line = next((line for line in self.lines if line.source == row.source), None)
        if line is None:
            self.lines.append(line := Line(row.source, formula))
        line.count += row.count
        line.size += row.total(of)
        self.traced += row.total(of)


MEANS = {  # meaning of each letter of a formula, as sizes of one device
    "b": "sequences of a microbatch", "t": "positions in the residual stream", "D": "model width",
    "S": "positions in the residual stream of the encoder", "g": "key/value heads",
    "r": "query heads per key/value head", "K": "width of a head",
    "R": "width of its rotary part", "U": "width of a value", "Q": "query latent", "C": "key/value latent",
    "f": "feed-forward hidden width", "k": "experts per token", "e": "experts", "m": "hidden width of an expert",
    "x": "shared experts", "X": "slots of an expert",
    "tensor": "devices along tensor", "context": "devices along context", "expert": "devices along expert",
}  # fmt: skip


def legend(plan: Plan) -> str:
    """Explain how to read a formula, with the meaning and value of each letter in this plan's formulas."""
    text = " ".join(line_formulas(plan).values())
    sizes = costs.letters(plan.cfg.at_work, costs.Sizes.from_config(plan.cfg))
    entries = (
        f"{letter}={sizes[letter]:,} {means}" for letter, means in MEANS.items() if re.search(rf"\b{letter}\b", text)
    )
    in_encoder = f" In encoder layers, t={sizes['S']:,}." if sizes["S"] else ""
    return (
        "A formula gives the FLOPs of a matmul, or the bytes of a collective, in one forward pass of one layer. Lines "
        f"outside layers have none. Letters are sizes on one device: {', '.join(entries)}.{in_encoder} The count "
        "includes all executions in a step: every layer, pass, microbatch and chunk of a ring."
    )


def line_formulas(plan: Plan) -> dict[tuple[str, bool], str]:
    """Map (source line of a layer, True for a collective) to the formula of one forward pass."""
    by_line: dict[tuple[str, bool], list[str]] = {}
    counts = costs.layer_counts(plan.cfg.at_work, costs.Sizes.from_config(plan.cfg))
    for kind in (kind for kind, count in counts.items() if count):
        for row in traced_layer.layer_rows(plan.cfg.at_work, kind):
            terms = by_line.setdefault((row.source, bool(row.axes)), [])
            terms += [row.formula] * (row.formula not in terms)
    return {line: " + ".join(terms) for line, terms in by_line.items()}


def compare(plan: Plan) -> dict[str, list[Group]]:
    """Compare "FLOPs" by part of the model, and "bytes" by collective and axes, the largest group first."""
    platform = "tpu" if is_tpu(plan.topology and plan.topology.chip) else "cpu"
    step, flops, sent, of_line = program.training_step(plan.cfg, platform), {}, {}, line_formulas(plan)
    for part, planned in plan.flops.items():
        if planned and part != MUON:
            flops[part] = Group(part, part, planned)
    for x in (x for x in costs.traffic(plan.cfg, plan.sched) if x.part != MUON):
        name = f"{x.kind} over {'*'.join(x.axes)}"
        group = sent.setdefault(name, Group(name, "", 0))
        group.parts = ", ".join(dict.fromkeys([*filter(None, [group.parts]), x.part]))
        group.planned += x.wire_bytes
    for row in step.rows:
        groups, of = (sent, "wire_bytes") if row.axes else (flops, "flops")
        name = f"{row.kind} over {'*'.join(row.axes)}" if row.axes else part_of(scopes_of(row))
        groups.setdefault(name, Group(name, "", 0)).add(row, of, of_line.get((row.source, bool(row.axes)), ""))
    order = lambda groups: sorted(groups.values(), key=lambda group: -max(group.planned, group.traced))
    return {"FLOPs": order(flops), "bytes": order(sent)}


def print_why(plan: Plan, found: dict[str, list[Group]], console) -> None:
    """Print each group with its planned and traced total, and its source lines."""
    for unit, groups in found.items():
        title = f"{unit} per device and step: planned, and traced by source line"
        columns = "part", "where", "forward pass of a layer", "count", "planned", "traced", "traced/planned"
        table = make_table(title, *columns, words=3)
        for group in groups:
            ratio = "-" if group.ratio is None else f"{group.ratio:.4f}"
            parts = group.parts if group.parts != group.name else ""
            table.add_row(group.name, parts, "", "", amount(group.planned, unit), amount(group.traced, unit), ratio)
            for line in sorted(group.lines, key=lambda line: -line.size):
                table.add_row("", line.source, line.formula, f"{line.count:,.6g}", "", amount(line.size, unit), "")
            table.add_section()
        console.print(table)
    console.print(legend(plan))


def to_json(found: dict[str, list[Group]]) -> dict:
    return {unit: [asdict(group) for group in groups] for unit, groups in found.items()}
