"""Split a plan's bytes between the tiers of a GPU cluster, and compare transfer times with latencies.

The tiers are NVLink inside a node, and InfiniBand between nodes. NCCL passes the chunks of an all-gather, a
reduce-scatter or an all-reduce around rings through all GPUs, and both tiers work at the same time, so the slower one
determines the speed (`hardware.Link.bytes_per_s`). A group with k GPUs in each node has k rings, and each ring leaves a
node through the NIC of another GPU.

NCCL sums small arrays over several nodes in two trees instead: a chain in each node and a binary tree between nodes,
up and down again. A tree has fewer steps than a ring and a little less bandwidth. `algorithm` chooses what takes less
time, as NCCL does. The times of a plan leave out latency, so they are those of the ring.
"""

import math
from dataclasses import asdict, dataclass

from plan.chips import hardware
from plan.count import costs
from plan.count.step import Step
from sharding import EXPERT

# NCCL's estimates for trees with the LL protocol: at the start, and per step to another node; the share of a ring's
# bandwidth. https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc: baseLat, hwLat and ncclTopoTuneModel
TREE_BEGIN_S, TREE_NETWORK_STEP_S, TREE_SHARE = 6.8e-6, 5e-6, 0.92
COUNTS = 0.01  # mention the latency of a row if it is at least this fraction of the step


@dataclass(frozen=True)
class Algorithm:
    """How NCCL executes one collective on GPUs, and what that costs."""

    name: str  # ring, tree, or direct: to each receiver
    steps_inside: int  # over NVLink
    steps_between: int  # over InfiniBand
    latency_s: float
    transfer_s: float


def algorithm(kind: str, wire_bytes: float, link: hardware.Link, n: int, speed: float) -> Algorithm:
    """Return the algorithm of one collective over n GPUs in which a device sends `wire_bytes` at `speed`."""
    times, between = 2 if kind == "all-reduce" else 1, link.nodes - 1
    latency_s = hardware.latency_seconds(kind, link)
    if kind in ("collective-permute", "all-to-all"):
        here = -(-n // link.nodes)
        steps = (here - 1, n - here) if kind == "all-to-all" else (int(not between), int(between > 0))
        return Algorithm("direct", *steps, latency_s, wire_bytes / speed)
    ring = Algorithm("ring", times * (n - 1 - between), times * between, latency_s, wire_bytes / speed)
    if kind != "all-reduce" or not between:
        return ring
    inside, levels = 2 * (n // link.nodes - 1), 2 * int(math.log2(link.nodes))
    latency_s = TREE_BEGIN_S + inside * hardware.NVLINK_STEP_S + levels * TREE_NETWORK_STEP_S
    array = wire_bytes * n / (2 * (n - 1))
    tree = Algorithm("tree", inside, levels, latency_s, 2 * array / (TREE_SHARE * speed))
    return min(ring, tree, key=lambda one: one.latency_s + one.transfer_s)


def algorithms(step: Step) -> list[dict]:
    """List the algorithm of each collective of a plan on GPUs, with its bytes by tier."""
    if not step.topology or not step.topology.chip.domain:
        return []
    found = []
    for row in step.traffic:
        n, link = math.prod(step.cfg.mesh.sizes[axis] for axis in row.axes), step.link(row.axes)
        way = algorithm(row.kind, row.wire_bytes / row.count, link, n, step.speed(row))
        found.append({"part": row.part, "kind": row.kind, "axes": "*".join(row.axes), "count": row.count,
                      "wire_bytes": row.wire_bytes, "between_bytes": between_nodes(row, link, n),
                      **asdict(way)})  # fmt: skip
    return found


def between_nodes(row: costs.Traffic, link: hardware.Link, n: int) -> float:
    """Return the bytes of a row that a device sends to other nodes. n: devices of a group, on `link.nodes` nodes"""
    if link.nodes == 1:
        return 0.0
    here = -(-n // link.nodes)
    share = {"all-to-all": (n - here) / (n - 1), "collective-permute": 1}  # a permute: of the busiest device
    return row.wire_bytes * share.get(row.kind, 1 / here)


def between_nodes_by_axes(step: Step) -> dict[str, float]:
    """Return the bytes that a device sends to other nodes in a step, by mesh axes."""
    found: dict[str, float] = {}
    if step.topology and step.topology.chip.domain:
        for row in step.traffic:
            n = math.prod(step.cfg.mesh.sizes[axis] for axis in row.axes)
            if sent := between_nodes(row, step.link(row.axes), n):
                name = "*".join(row.axes)
                found[name] = found.get(name, 0.0) + sent
    return found


def sent_line(step: Step, name: str) -> str:
    """Say what a device sends on GPUs over the mesh axes `name`, such as fsdp*tensor: bytes and tier."""
    axes, gib = tuple(name.split("*")), 2**30
    sent, between = step.wire_by_axes[name], between_nodes_by_axes(step).get(name, 0.0)
    network = f", {between / gib:,.3f} GiB of them to other nodes over InfiniBand" if between else ", all over NVLink"
    return f"a device sends {sent / gib:,.3f} GiB over {' and '.join(axes)}{network}"


def notes(step: Step, step_s: float | None) -> list[str]:
    """List what the tiers mean for a step of `step_s` seconds, one line each."""
    return [line for line in (latency_line(step, step_s), expert_line(step)) if line]


def latency_line(step: Step, step_s: float | None) -> str:
    """Name the collectives whose latency is longer than their transfer, if it is a visible part of a step of `step_s`
    seconds.

    The roofline ignores latency. For GPUs it is NCCL's lowest estimate, so it may be longer.
    """
    if not step.topology or not step.topology.chip.peak_flops_per_s:
        return ""
    found = []
    for row in step.traffic:
        latency, name = row.count * hardware.latency_seconds(row.kind, step.link(row.axes)), row.kind
        transfer = row.wire_bytes / step.speed(row)
        if step.topology.chip.domain:
            n = math.prod(step.cfg.mesh.sizes[axis] for axis in row.axes)
            way = algorithm(row.kind, row.wire_bytes / row.count, step.link(row.axes), n, step.speed(row))
            latency, transfer = row.count * way.latency_s, row.count * way.transfer_s
            name += " in a tree" * (way.name == "tree")
        if latency > max(transfer, COUNTS * step_s):
            found.append((latency, f"{row.part} over {'*'.join(row.axes)} ({row.count:,.0f} x {name}: latency "
                          f"{1e3 * latency:,.1f} ms, transfer {1e3 * transfer:,.1f} ms)"))  # fmt: skip
    most = ", ".join(text for _, text in sorted(found, reverse=True)[:2])
    return f"latency, which the times below leave out, is longer than the transfer of {most}" if found else ""


def expert_line(step: Step) -> str:
    """Return how many nodes the experts of a token are on, if `expert` spans nodes and tokens are sent to experts."""
    sizes, c = step.cfg.mesh.sizes, step.cfg.model
    if sizes[EXPERT] == 1 or not step.topology or not step.topology.chip.domain:
        return ""
    nodes = step.link((EXPERT,)).nodes
    if nodes == 1:
        return ""
    reached = expected_nodes(nodes, c.top_k)
    copies = f"its {c.top_k} copies are sent separately" if c.capacity_factor else "all tokens go to all nodes"
    return f"the {c.top_k} experts of a token are on {reached:.1f} of {nodes} nodes on average; {copies}"


def expected_nodes(nodes: int, experts: int) -> float:
    """Return on how many of the nodes the experts of a token are, on average, if each is on a random node."""
    return nodes * (1 - (1 - 1 / nodes) ** experts)
