"""Find the cheapest layout of inference that generates a token in a given time.

`python -m plan MODEL --inference --topology v5e:4x4 --search 16 --token_ms 20 --price 1.2` finds, for each mesh, the
largest batch whose decode step is short enough. A larger batch costs less per token, because all its sequences share
the reads of the weights. The cost includes the prefill of the prompts.
"""

from dataclasses import dataclass

from config import Config
from plan.answer import inference, planning
from plan.answer.budget import parse_price
from plan.answer.show import make_table, print_rejected
from plan.chips import hardware
from plan.chips.hardware import Topology
from plan.chips.units import amount
from utils import UserError


@dataclass(frozen=True)
class Offer:
    """A layout with its largest batch that is fast enough, and what a million generated tokens cost."""

    plan: inference.Plan
    summary: dict  # of `inference.Plan.batch_summary`
    chip_seconds: float
    dollars: float | None  # None: no price is known

    @property
    def cost(self) -> float:
        return self.chip_seconds if self.dollars is None else self.dollars

    def to_json(self) -> dict:
        return {"topology": str(self.plan.topology), "mesh": str(self.plan.cfg.mesh), **self.summary,
                "chip_seconds_per_million_tokens": self.chip_seconds,
                "dollars_per_million_tokens": self.dollars}  # fmt: skip


@dataclass(frozen=True)
class Offers:
    """The result of a search."""

    fast: list[Offer]  # cheapest first
    slow: list[Offer]  # with their smallest batch, shortest step first
    too_large: int  # number of layouts
    smallest: tuple  # of the layouts that are too large: mesh, bytes and limit
    refused: dict[str, int]  # number of layouts by reason

    def to_json(self) -> dict:
        return {"layouts": [one.to_json() for one in self.fast], "too_slow": len(self.slow),
                "nearest": self.slow[0].to_json() if self.slow and not self.fast else None,
                "too_large": self.too_large, "refused": self.refused}  # fmt: skip


def offer(plan: inference.Plan, batch: int, price: str) -> Offer:
    found, chip = plan.batch_summary(batch), plan.topology.chip
    seconds = 1e6 / found["with_prefill_tokens_per_s"] * plan.topology.chips
    per_hour = parse_price(price, chip.key)
    return Offer(plan, found, seconds, per_hour and per_hour * seconds / 3600)


def largest_batch(plan: inference.Plan, token_s: float) -> int:
    """Return the largest batch that fits and whose decode step takes at most `token_s`; 0 if there is none."""
    fits = lambda units: sum(plan.seconds(units * plan.unit, "decode").values()) <= token_s
    low, high = 0, plan.largest_batch // plan.unit + 1  # low is fast enough, and high is not, or does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * plan.unit


def search(cfg: Config, topologies: list[Topology], request, limit_bytes: int | None, token_s: float, price: str,
           track=planning.untracked) -> Offers:  # fmt: skip
    """Search every mesh of every topology. track: as in `planning.search`

    Raises: UserError if the speed of a chip is unknown, or if it has no price.
    """
    fast, slow, large, refused = [], [], [], {}
    for topology in topologies:
        hardware.require_one_slice(topology)
        if not topology.chip.peak_flops_per_s:
            raise UserError(f"--topology {topology}: the speed of {topology.chip.name} is unknown, so no layout has a "
                            "time per token; use TPUs or GPUs")  # fmt: skip
        parse_price(price, topology.chip.key)
    for topology in topologies:
        fit, more, reasons = inference.search(cfg, topology, request, limit_bytes, 1, track)
        large += more
        refused |= {reason: refused.get(reason, 0) + many for reason, many in reasons.items()}
        for one, found in track(fit, f"batches on {topology}"):
            batch = largest_batch(one, token_s) if found["step_s"] <= token_s else 0
            (fast if batch else slow).append(offer(one, batch or one.unit, price))
    fast.sort(key=lambda one: one.cost)
    slow.sort(key=lambda one: one.summary["step_s"])
    smallest = min(large, key=lambda two: two[1]["memory_bytes"]) if large else None
    about = smallest and (smallest[0].cfg.mesh, smallest[1]["memory_bytes"], smallest[0].usable_bytes)
    return Offers(fast, slow, len(large), about or (), refused)


def print_offers(found: Offers, token_s: float, console, most: int = 20) -> None:
    """Print the layouts that are fast enough, the cheapest first, or the fastest that is too slow."""
    priced = any(one.dollars is not None for one in found.fast)
    cost = "dollars" if priced else "chip seconds"
    title = f"{len(found.fast)} layouts generate a token in at most {amount(token_s, 's')}; the cheapest first"
    table = make_table(title, "topology", "mesh", "batch", "memory", "step", "tokens/s",
                       f"{cost} per M tokens", words=2)  # fmt: skip
    for one in found.fast[:most]:
        x = one.summary
        table.add_row(str(one.plan.topology), str(one.plan.cfg.mesh), f"{x['batch']:,}",
                      amount(x["memory_bytes"], "bytes"), amount(x["step_s"], "s"),
                      f"{x['with_prefill_tokens_per_s']:,.1f}", f"{one.cost:,.{4 if priced else 1}f}")  # fmt: skip
    if found.fast:
        console.print(table)
        first = found.fast[0]
        share = 1 - first.summary["with_prefill_tokens_per_s"] / first.summary["tokens_per_s"]
        console.print(f"prefill    {share:.0%} of the time, and of the cost, of the first layout")
        for line in first.plan.notes():
            console.print(f"note       {line}", soft_wrap=True)
    else:
        console.print(f"no layout generates a token in at most {amount(token_s, 's')}")
    if found.slow and not found.fast:
        near = found.slow[0]
        console.print(f"nearest    {near.plan.cfg.mesh} on {near.plan.topology}: {amount(near.summary['step_s'], 's')} "
                      f"per token with its smallest batch, {near.summary['batch']:,}", soft_wrap=True)  # fmt: skip
    elif found.slow:
        console.print(f"{len(found.slow)} layouts are too slow with any batch")
    print_rejected(found.too_large, found.smallest, found.refused, console)
