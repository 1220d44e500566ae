"""Compare the layouts of several topologies by time, price and memory.

`python -m plan PRESET --topology v5p:4x4x8,v6e:8x16,16*h100` searches each topology. A layout is on the Pareto front if
no other layout is at least as good in all three and better in one: seconds per step, dollars per million tokens, and
the fraction of a device's memory.
"""

from dataclasses import dataclass

import utils
from config import Config
from plan.answer import planning
from plan.answer.budget import parse_price
from plan.answer.show import make_table, schedule_label
from plan.chips.hardware import Topology
from plan.chips.units import amount
from plan.time.plan import Plan
from utils import UserError


@dataclass(frozen=True)
class Layout:
    """A plan that fits, and what decides between plans."""

    plan: Plan
    seconds: float
    memory: float  # fraction of a device's memory
    dollars: float | None  # per million tokens; None: no price is known

    @property
    def scores(self) -> tuple[float, ...]:
        return (self.seconds, self.memory, self.dollars or 0.0)

    def to_json(self) -> dict:
        plan = self.plan
        return {"topology": str(plan.topology), "mesh": str(plan.cfg.mesh), "schedule": plan.sched.name,
                "microbatches": plan.sched.microbatches, "seconds": self.seconds, "peak_bytes": plan.peak_bytes,
                "memory": self.memory, "dollars_per_million_tokens": self.dollars}  # fmt: skip


def layout(plan: Plan, price: str) -> Layout:
    per_hour, seconds = parse_price(price, plan.topology.chip.key), plan.real.seconds
    dollars = per_hour and per_hour * plan.topology.chips * seconds / 3600 / (plan.tokens_per_step / 1e6)
    return Layout(plan, seconds, plan.peak_bytes / plan.limit_bytes, dollars)


def pareto(layouts: list[Layout]) -> list[Layout]:
    """Return the layouts that no other layout dominates, fastest first."""
    front, least = [], []
    for one in sorted(layouts, key=lambda x: x.scores):  # what comes later is not faster
        rest = one.scores[1:]
        if not any(all(a <= b for a, b in zip(other, rest, strict=True)) for other in least):
            front.append(one)
            least.append(rest)
    return front


def search(cfg: Config, topologies: list[Topology], price: str, limit_bytes: int | None, say, track=planning.untracked):
    """Search every topology. Returns the Pareto front, and the fastest layout of each topology.

    track  as in `planning.search`

    Raises: UserError if the speed or the price of a chip is unknown, or if no layout fits on any topology.
    """
    found, best, reasons = [], [], []
    for topology in topologies:
        if not topology.chip.peak_flops_per_s:
            raise UserError(f"--topology {topology}: the speed of {topology.chip.name} is unknown, so it cannot be "
                            "compared; use TPUs or GPUs")  # fmt: skip
        parse_price(price, topology.chip.key)
    for topology in topologies:
        fit, large, refused = planning.search(cfg, topology, limit_bytes, track)
        layouts = [layout(one, price) for one in fit]
        found += layouts
        best += [min(layouts, key=lambda x: x.seconds)] if layouts else []
        if not layouts:
            common = max(refused, key=refused.get) if refused else ""
            reasons.append(f"{topology}: {len(large)} too large" + f", others not possible ({common})" * bool(common))
    for reason in reasons:
        say(f"nothing fits on {reason}")
    if not found:
        raise UserError(f"no layout fits on any topology; use more chips, or another batch than {cfg.data.batch_size} "
                        f"sequences of {cfg.data.seq_len:,} tokens")  # fmt: skip
    return pareto(found), best


def print_front(front: list[Layout], best: list[Layout], console, most: int = 20) -> None:
    """Print the Pareto front, and the fastest layout of each topology."""
    shown = f", the {most} fastest" if len(front) > most else ""
    for title, layouts in ((f"Pareto front of time, memory and price: {len(front)} layouts{shown}", front[:most]),
                           ("the fastest layout of each topology", best)):  # fmt: skip
        table = make_table(title, "topology", "mesh", "schedule", "step", "memory", "of device", "dollars per M tokens",
                           words=3)  # fmt: skip
        for one in layouts:
            dollars = "-" if one.dollars is None else f"{one.dollars:,.4f}"
            names = str(one.plan.topology), str(one.plan.cfg.mesh), schedule_label(one.plan)
            peak = amount(one.plan.peak_bytes, "bytes")
            table.add_row(*names, amount(one.seconds, "s"), peak, f"{one.memory:.0%}", dollars)
        console.print(table)


def plot_front(front: list[Layout], best: list[Layout], path: str) -> None:
    """Draw the Pareto front to an image file: time and price (without prices: memory), one color per topology.

    A ring marks the fastest layout of each topology.
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
    axes.set_title(f"{plan.cfg.run.name}, {plan.tokens_per_step:,} tokens per step: Pareto front, and the fastest "
                   "layout of each topology", loc="left", size=10)  # fmt: skip
    figure.savefig(path)
