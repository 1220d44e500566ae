"""Compare topologies: the best layout of each, and the Pareto front of time, price and memory.

`python -m plan PRESET --topology v5p:4x4x8,v6e:8x16,16*h100` searches each topology, unless --mesh gives the mesh. A
layout is on the Pareto front if no other layout is at least as good in all three and better in one: seconds per step,
dollars per million tokens, and the fraction of a device's memory.
"""

import dataclasses
from dataclasses import dataclass

import utils
from config import Config
from plan.answer import budget, planning
from plan.answer.budget import parse_price
from plan.answer.show import make_table, schedule_label
from plan.chips.hardware import Topology
from plan.chips.units import amount
from plan.time.measured import interval
from plan.time.plan import Plan
from utils import UserError


@dataclass(frozen=True)
class Layout:
    """A plan that fits, and what decides between plans."""

    plan: Plan
    dollars: float | None  # per million tokens; None: no price is known

    @property
    def seconds(self) -> float:
        return self.plan.step_s

    @property
    def memory(self) -> float:
        """The fraction of a device's memory."""
        return self.plan.peak_bytes / self.plan.limit_bytes

    @property
    def scores(self) -> tuple[float, ...]:
        return (self.seconds, self.memory, self.dollars or 0.0)

    def to_json(self) -> dict:
        plan = self.plan
        return {"topology": str(plan.topology), "mesh": str(plan.cfg.mesh), "schedule": plan.sched.name,
                "microbatches": plan.sched.microbatches, "seconds": self.seconds, "peak_bytes": plan.peak_bytes,
                "memory": self.memory, "dollars_per_million_tokens": self.dollars}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a topology offers."""

    topology: Topology
    layouts: list[Layout]  # that fit, as `planning.search` sorts them
    cost: budget.Budget | None = None  # of the first layout, with --tokens
    refusal: str = ""  # why no layout fits

    @property
    def first(self) -> Layout | None:
        return self.layouts[0] if self.layouts else None

    def to_json(self) -> dict:
        if not self.first:
            return {"topology": str(self.topology), "refusal": self.refusal}
        estimate = dataclasses.asdict(self.first.plan.estimate)
        return self.first.to_json() | {"estimate": estimate, "budget": self.cost and dataclasses.asdict(self.cost)}


def layout(plan: Plan, price: str) -> Layout:
    per_hour, chips = parse_price(price, plan.topology.chip.key), plan.topology.chips
    return Layout(plan, per_hour and per_hour * chips * plan.step_s / 3600 / (plan.tokens_per_step / 1e6))


def pareto(layouts: list[Layout]) -> list[Layout]:
    """Return the layouts that no other layout dominates, fastest first."""
    front, least = [], []
    for one in sorted(layouts, key=lambda x: x.scores):  # what comes later is not faster
        rest = one.scores[1:]
        if not any(all(a <= b for a, b in zip(other, rest, strict=True)) for other in least):
            front.append(one)
            least.append(rest)
    return front


def answer(cfg: Config, topology: Topology, asked: budget.Asked, limit_bytes: int | None, track) -> Answer:
    """Plan the mesh of the settings on a topology, or search one if they have none.

    track  as in `planning.search`
    """
    if cfg.mesh.devices > 1:
        one = planning.plan(cfg, topology, limit_bytes)
        fit, large, refused = ([], [one], {}) if one.fits is False else ([one], [], {})
    else:
        fit, large, refused = planning.search(cfg, topology, limit_bytes, track)
    if fit:
        return Answer(topology, [layout(one, asked.price) for one in fit], budget.budget(fit[0], asked))
    common = max(refused, key=refused.get) if refused else ""
    reason = f"you need about {planning.devices_needed(large):,} of these chips" if large else f"impossible: {common}"
    return Answer(topology, [], refusal=f"nothing fits; {reason}")


def answers(
    cfg: Config, topologies: list[Topology], asked: budget.Asked, limit_bytes: int | None, track
) -> list[Answer]:
    """Return the `Answer` of every topology. Raises: UserError if the speed or the price of a chip is unknown."""
    for topology in topologies:
        if not topology.chip.peak_flops_per_s:
            raise UserError(f"--topology {topology}: the speed of {topology.chip.name} is unknown, so it cannot be "
                            "compared; use TPUs or GPUs")  # fmt: skip
        parse_price(asked.price, topology.chip.key)
    return [answer(cfg, topology, asked, limit_bytes, track) for topology in topologies]


def lines(found: list[Answer]) -> list[str]:
    """Return the lines that answer for each topology: the mesh, the step, its cost, and how sure it is."""
    text = []
    for one in found:
        if not one.first:
            text += [f"{one.topology}: {one.refusal}"]
            continue
        plan, estimate, cost = one.first.plan, one.first.plan.estimate, one.cost
        known = f" ({interval(estimate.low, estimate.high)})" if estimate.low else ""
        parts = [f"step {amount(estimate.seconds, 's')}{known}"]
        if cost:
            parts.append(cost.time)
        if cost and cost.dollars:
            low, high = (x and x / 1e6 for x in cost.dollars_interval)
            parts.append(f"${cost.dollars / 1e6:,.2f}M" + (f" ({low:,.2f} to {high:,.2f})" if low else ""))
        elif one.first.dollars:
            parts.append(f"${one.first.dollars:,.4f} per million tokens")
        parts.append(f"{amount(plan.peak_bytes, 'bytes')} of {amount(plan.limit_bytes, 'bytes')}")
        text += [f"{one.topology}: mesh {plan.cfg.mesh} {schedule_label(plan)}".rstrip(), f"  {'; '.join(parts)}",
                 f"  how sure: {estimate.source}"]  # fmt: skip
    return [*text, "In parentheses: the interval that holds 4 of 5 such steps."]


def print_front(front: list[Layout], console, most: int = 10) -> None:
    """Print the Pareto front."""
    shown = f", the {most} fastest" if len(front) > most else ""
    table = make_table(f"Pareto front of time, memory and price: {len(front)} layouts{shown}", "topology", "mesh",
                       "schedule", "step", "memory", "of device", "dollars per M tokens", words=3)  # fmt: skip
    for one in front[:most]:
        dollars = "-" if one.dollars is None else f"{one.dollars:,.4f}"
        names = str(one.plan.topology), str(one.plan.cfg.mesh), schedule_label(one.plan)
        peak = amount(one.plan.peak_bytes, "bytes")
        table.add_row(*names, amount(one.seconds, "s"), peak, f"{one.memory:.0%}", dollars)
    console.print(table)


def plot_front(front: list[Layout], best: list[Layout], path: str) -> None:
    """Draw the Pareto front to an image file: time and price (without prices: memory), one color per topology.

    A ring marks the first layout of each topology.
    """
    priced = all(one.dollars is not None for one in front + best)
    height = (lambda one: one.dollars) if priced else (lambda one: 100 * one.memory)
    figure = utils.new_picture(figsize=(8, 4.5), dpi=150)
    axes = figure.subplots()
    for name in dict.fromkeys(str(one.plan.topology) for one in best):
        ones = [one for one in front if str(one.plan.topology) == name]
        points = axes.plot([x.seconds for x in ones], [height(x) for x in ones], "o", label=name)
        first = next(one for one in best if str(one.plan.topology) == name)
        at, color = (first.seconds, height(first)), points[0].get_color()
        axes.plot(*at, "o", markersize=11, markerfacecolor="none", color=color)  # it may not be on the front
        axes.annotate(str(first.plan.cfg.mesh), at, xytext=(8, -12), size=8, textcoords="offset points", color=color)
    axes.set(xlabel="seconds per step", ylabel="dollars per million tokens" if priced else "% of a device's memory")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plan = best[0].plan
    axes.set_title(f"{plan.cfg.run.name}, {plan.tokens_per_step:,} tokens per step: Pareto front, and the first "
                   "layout of each topology", loc="left", size=10)  # fmt: skip
    figure.savefig(path)
