"""Test the bytes and latencies by tier of a GPU cluster: NVLink inside a node, InfiniBand between nodes."""

import itertools
import math

import pytest
from rich.console import Console

from config import MeshConfig, preset
from plan import planner
from plan.answer import show
from plan.chips import hardware
from plan.chips.hardware import CHIPS, NCCL_BEGIN_S, NETWORK_STEP_S, NVLINK_STEP_S, Topology
from plan.time import tiers

approx = pytest.approx
SMALL = {"data.batch_size": 128, "data.seq_len": 128, "work.remat": "full", "work.gather": "layer"}
H100 = CHIPS["h100"]


def links(mesh, topology):
    return hardware.layout(MeshConfig.parse(mesh), Topology.parse(topology))


def plan(mesh, topology, name="dense_124m", **settings):
    return planner.plan(preset(name, **SMALL | settings, mesh=mesh), topology)


@pytest.mark.parametrize("mesh, axis, cards", [("fsdp=16", "fsdp", 8), ("data=2,fsdp=4,tensor=2", "data", 1),
                                               ("fsdp=4,tensor=4", "fsdp", 2)])  # fmt: skip
def test_the_network_cards_of_a_group_share_its_bytes(mesh, axis, cards):
    """Catches bytes between nodes that count fully for each GPU, and a time that is not that of the slower tier."""
    one, total = plan(mesh, "2*h100"), 0.0
    n = one.cfg.mesh.sizes[axis]
    for row in one.traffic:
        if row.axes == (axis,):
            sent = tiers.between_nodes(row, one.link(row.axes), n)
            total += sent
            assert sent / H100.dcn_bytes_per_s == approx(row.wire_bytes / one.speed(row))
            assert row.kind == "all-to-all" or sent == approx(row.wire_bytes / cards)
    between = one.to_json()["between_nodes"]
    assert between[axis] == approx(total) and total > 0
    assert set(between) == {name for name in one.wire_by_axes if axis in name.split("*")}


def test_one_node_sends_nothing_to_others():
    """Catches a rack of 72 GPUs that counts as nine nodes, and TPU slices that count as nodes."""
    assert plan("fsdp=16,tensor=4", "gb200-nvl72:64").to_json()["between_nodes"] == {}
    assert plan("fsdp=4,tensor=2", "v5e:2x4").to_json()["between_nodes"] == {}
    assert plan("data=2,fsdp=4", "2*v5e:2x2").to_json()["between_nodes"] == {}


def test_half_of_an_all_to_all_stays_in_one_of_two_nodes():
    """Catches an all-to-all counted like a ring. 8 of the 15 other GPUs are in the other node."""
    one = plan("expert=16", "2*h100", "moe1b", **{"model.capacity_factor": 1.0, "data.batch_size": 16})
    rows = [row for row in one.traffic if row.kind == "all-to-all"]
    assert rows
    for row in rows:
        link = one.link(row.axes)
        assert tiers.between_nodes(row, link, 16) == approx(row.wire_bytes * 8 / 15)
        assert row.wire_bytes / one.speed(row) == approx(row.wire_bytes * 8 / 15 / H100.dcn_bytes_per_s)
    assert tiers.expert_line(one) == (
        "the 2 experts of a token are on 1.5 of 2 nodes on average; its 2 copies are sent separately"
    )
    assert tiers.expert_line(plan("fsdp=2,expert=8", "2*h100", "moe1b", **{"data.batch_size": 16})) == ""


@pytest.mark.parametrize("size, name", [(1e4, "tree"), (1e9, "ring")])
def test_small_sums_over_nodes_go_through_trees(size, name):
    """Catches the 2 x 127 steps of a ring for a few bytes, and a tree for many, which has less bandwidth."""
    link = plan("fsdp=128", "16*h100").link(("fsdp",))
    sent = 2 * 127 / 128 * size
    found = tiers.algorithm("all-reduce", sent, link, 128, link.bytes_per_s)
    ring_s, tree_s = 2 * link.latency_s, 6.8e-6 + 2 * 7 * 0.6e-6 + 2 * 4 * 5e-6
    times = {"ring": ring_s + sent / link.bytes_per_s, "tree": tree_s + 2 * size / 0.92 / link.bytes_per_s}
    assert found.name == name == min(times, key=times.get)
    assert found.latency_s + found.transfer_s == approx(times[name])
    assert (found.steps_inside, found.steps_between) == {"ring": (2 * 112, 2 * 15), "tree": (2 * 7, 2 * 4)}[name]


def test_every_collective_has_its_algorithm_and_bytes_by_tier(capsys):
    """Catches a tree for a gather, bytes between nodes that the totals do not have, and steps of another tier."""
    one = plan("data=2,fsdp=8", "2*h100")
    rows, between = one.to_json()["algorithms"], one.to_json()["between_nodes"]
    assert sum(row["wire_bytes"] for row in rows) == approx(one.wire_bytes)
    sums = {axes: sum(row["between_bytes"] for row in rows if row["axes"] == axes) for axes in between}
    assert between == approx(sums)
    for row in rows:
        n = math.prod(one.cfg.mesh.sizes[axis] for axis in row["axes"].split("*"))
        times = 2 if row["kind"] == "all-reduce" else 1
        names = {"all-to-all": {"direct"}, "all-reduce": {"ring", "tree"}}
        assert row["name"] in names.get(row["kind"], {"ring"})
        if row["name"] == "ring":
            assert row["steps_inside"] + row["steps_between"] == times * (n - 1)
            assert (row["steps_between"] > 0) == ("data" in row["axes"]) == (row["between_bytes"] > 0)
    assert plan("fsdp=8", "v5e:2x4").to_json()["algorithms"] == []
    for mesh, topology, shown in (("data=2,fsdp=8", "2*h100", True), ("fsdp=8", "h100:8", False)):
        show.tables(plan(mesh, topology), None, None, False, Console(width=120, highlight=False))
        assert ("collectives by tier" in capsys.readouterr().out) == shown


@pytest.mark.parametrize("nodes, experts", [(2, 1), (3, 2), (4, 3)])
def test_the_nodes_of_a_token_are_counted(nodes, experts):
    """Catches a count of experts instead of nodes: two experts may be on the same node."""
    choices = list(itertools.product(range(nodes), repeat=experts))
    assert tiers.expected_nodes(nodes, experts) == approx(sum(len({*one}) for one in choices) / len(choices))


def test_a_plan_says_when_latency_decides():
    """Catches a plan of small arrays on many GPUs whose time is that of the bytes alone."""
    many = plan("fsdp=128", "16*h100")
    gather = NCCL_BEGIN_S + (127 - 15) * NVLINK_STEP_S + 15 * NETWORK_STEP_S  # 127 steps, 15 of them to another node
    assert many.link(("fsdp",)).latency_s == approx(gather)
    row = next(row for row in many.traffic if (row.part, row.kind) == ("weights", "all-gather"))
    assert gather * row.count > row.wire_bytes / many.speed(row)
    said = f"weights over fsdp ({row.count:,.0f} x all-gather: latency {1e3 * gather * row.count:,.1f} ms, "
    assert said in tiers.latency_line(many, many.step_s)
    for one in (plan("fsdp=8", "1*h100", "llama3_8b", **{"data.batch_size": 8}), plan("fsdp=8", "cpu:8")):
        assert tiers.latency_line(one, one.step_s) == ""


def test_a_rack_is_one_node():
    """Catches GB200 in nodes of 8: NVLink connects 72. BOOK/gpus: 900e9 per GPU, 3600e9 out of the rack."""
    inside = links("fsdp=9,tensor=8", "gb200:72")
    assert [link.bytes_per_s for link in inside.values()] == [900e9, 900e9]
    assert [link.bytes_per_s for link in links("fsdp=9,tensor=8", "b200:72").values()] == [50e9, 900e9]
    wide = links("fsdp=144", "gb200:144")["fsdp"]
    assert (wide.bytes_per_s, 72 * CHIPS["gb200"].dcn_bytes_per_s) == (900e9, 3600e9)
    note = hardware.check(MeshConfig(data=2, tensor=72), Topology.parse("gb200:144"))
    assert note == []
    (note,) = hardware.check(MeshConfig(fsdp=9, tensor=16), Topology.parse("gb200:144"))
    assert note == "tensor=16 spans nodes of 72: 400 GB/s, not 900 GB/s"


def test_a_rack_may_be_used_in_part():
    """Catches 64 GPUs in each rack that are planned as 72 in the first racks and the rest in the last."""
    for text in ("gb200:256", "4*gb200:64", "9*gb200:64"):
        assert Topology.parse(text).chip.domain == 64
    for text in ("gb200:64", "gb200:144", "gb200:576", "8*gb200"):  # 576 is a multiple of both
        assert Topology.parse(text).chip.domain == 72
    found = links("fsdp=4,tensor=64", "gb200:256")
    assert [link.bytes_per_s for link in found.values()] == [50e9, 900e9]
    wide = links("fsdp=256", "gb200:256")["fsdp"]
    assert (wide.nodes, wide.note) == (4, "fsdp=256 spans 4 nodes with 64 in each: InfiniBand, 900 GB/s")
