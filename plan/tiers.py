"""Split a plan's bytes between the tiers of a GPU cluster, and compare transfer times with latencies.

The tiers are NVLink inside a node, and InfiniBand between nodes. NCCL passes the chunks of an all-gather, a
reduce-scatter or an all-reduce around rings through all GPUs, and both tiers work at the same time, so the slower one
determines the speed (`hardware.Link.bytes_per_s`). A group with k GPUs in each node has k rings, and each ring leaves a
node through the NIC of another GPU.
"""

import math

from plan import costs, hardware
from sharding import EXPERT

COUNTS = 0.01  # mention the latency of a row if it is at least this fraction of the step


def between_nodes(row: costs.Traffic, link: hardware.Link, n: int) -> float:
    """Return the bytes of a row that a device sends to other nodes. n: devices of a group, on `link.nodes` nodes"""
    if link.nodes == 1:
        return 0.0
    here = -(-n // link.nodes)
    share = {"all-to-all": (n - here) / (n - 1), "collective-permute": 1}  # a permute: of the busiest device
    return row.wire_bytes * share.get(row.kind, 1 / here)


def between_nodes_by_axes(one) -> dict[str, float]:
    """Return the bytes that a device sends to other nodes in a step, by mesh axes. one: a `planner.Plan`"""
    found: dict[str, float] = {}
    if one.topology and one.topology.chip.domain:
        for row in one.traffic:
            n = math.prod(one.cfg.mesh.sizes[axis] for axis in row.axes)
            if sent := between_nodes(row, one.link(row.axes), n):
                name = "*".join(row.axes)
                found[name] = found.get(name, 0.0) + sent
    return found


def notes(one) -> list[str]:
    """List what the tiers mean for a plan, one line each."""
    return [line for line in (latency_line(one), expert_line(one)) if line]


def latency_line(one) -> str:
    """Name the collectives whose latency is longer than their transfer, if it is a visible part of the step.

    `seconds` ignores latency. For GPUs it is NCCL's lowest estimate, so it may be longer.
    """
    if not one.topology or not one.topology.chip.peak_flops_per_s:
        return ""
    found = []
    for row in one.traffic:
        latency = row.count * hardware.latency_seconds(row.kind, one.link(row.axes))
        transfer = row.wire_bytes / one.speed(row)
        if latency > max(transfer, COUNTS * one.likely_s):
            found.append((latency, f"{row.part} over {'*'.join(row.axes)} ({row.count:,.0f} x {row.kind}: latency "
                          f"{1e3 * latency:,.1f} ms, transfer {1e3 * transfer:,.1f} ms)"))  # fmt: skip
    most = ", ".join(text for _, text in sorted(found, reverse=True)[:2])
    return f"latency, which the times below leave out, is longer than the transfer of {most}" if found else ""


def expert_line(one) -> str:
    """Return how many nodes the experts of a token are on, if `expert` spans nodes and tokens are sent to experts."""
    sizes, c = one.cfg.mesh.sizes, one.cfg.model
    if sizes[EXPERT] == 1 or not one.topology or not one.topology.chip.domain:
        return ""
    nodes = one.link((EXPERT,)).nodes
    if nodes == 1:
        return ""
    reached = expected_nodes(nodes, c.top_k)
    copies = f"its {c.top_k} copies are sent separately" if c.capacity_factor else "all tokens go to all nodes"
    return f"the {c.top_k} experts of a token are on {reached:.1f} of {nodes} nodes on average; {copies}"


def expected_nodes(nodes: int, experts: int) -> float:
    """Return on how many of the nodes the experts of a token are, on average, if each is on a random node."""
    return nodes * (1 - (1 - 1 / nodes) ** experts)
