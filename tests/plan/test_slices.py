"""Test plans of several TPU slices, joined by the data center network (DCN), against bytes computed by hand."""

import dataclasses
import math
import re

import pytest

from config import MeshConfig, preset
from plan import planner, traced
from plan.answer import inference
from plan.chips import hardware
from plan.chips.hardware import CHIPS, Topology
from plan.count import networks
from utils import UserError

approx = pytest.approx
DENSE = {"data.batch_size": 256, "data.seq_len": 256, "work.remat": "full", "work.gather": "layer"}
BETWEEN = "data between slices"


def plan(mesh, topology, **settings):
    return planner.plan(preset("dense_124m", **DENSE | settings, mesh=mesh), topology)


def test_each_device_sends_its_part_of_its_shard():
    """Catches a flat all-reduce, which sends whole shards between slices: 2 devices along data in each slice have the
    same shard, so each sends half of it; and a time at the speed of links inside a slice."""
    one = plan("data=8,fsdp=16", "4*v4:2x4x4")
    gradients, sent = 4 * one.params_total / 16, one.wire_by_axes
    assert sent["data"] == approx(gradients, rel=0.01)  # reduce-scatter and all-gather, a half each
    assert sent[BETWEEN] == approx(2 * (4 - 1) / 4 * gradients / 2, rel=0.01)
    for seconds in (one.lower_bound(), one.simulated):
        assert seconds[BETWEEN] == approx(sent[BETWEEN] / CHIPS["v4"].dcn_bytes_per_s)
    rows = [row for row in one.to_json()["traffic"] if row["axes"] == (BETWEEN,)]
    assert max(rows, key=lambda row: row["wire_bytes"])["part"] == "replicas"


def test_one_replica_per_slice_sends_nothing_inside():
    """Catches a sum over data that is counted inside a slice and again between slices."""
    one, alone = plan("data=4,fsdp=32", "4*v4:2x4x4"), plan("fsdp=32", "v4:2x4x4", **{"data.batch_size": 64})
    sent = dict(one.wire_by_axes)
    assert sent.pop(BETWEEN) == approx(2 * 3 / 4 * 4 * one.params_total / 32, rel=0.01)
    assert sent == approx(alone.wire_by_axes)  # a slice does what it does alone
    assert one.memory_bytes == alone.memory_bytes


def test_slices_do_not_change_the_bytes_of_all_links():
    """Catches bytes that are lost or counted twice: a hierarchical sum sends as much as a ring over all devices."""
    several, single = plan("data=8,fsdp=16", "4*v5e:4x8"), plan("data=8,fsdp=16", "v5e:8x16")
    assert several.wire_bytes == approx(single.wire_bytes, rel=1e-3)
    assert several.hardware_flops == single.hardware_flops


def test_weights_cross_slices_on_request():
    """Catches weights gathered between slices by default, or gathered there in full: each device gets the shards of
    its counterparts, 1/16 of the weights, and the gather inside a slice does the rest."""
    settings = {"work.tensor_exchange": "gather", "mesh": "fsdp=32,tensor=2,across=fsdp"}
    one = planner.plan(preset("llama3_8b", **DENSE | settings), "2*v4:2x4x4")
    gathers = {row.axes: row.wire_bytes / row.count for row in one.traffic
               if (row.part, row.kind) == ("weights", "all-gather")}  # fmt: skip
    assert gathers[("fsdp between slices",)] * 2 == approx(gathers[("fsdp",)] * 16 / 15 / 16)
    assert one.wire_by_axes["fsdp between slices"] < one.wire_by_axes["fsdp"] / 10
    assert set(one.wire_by_axes) >= {"fsdp", "tensor", "fsdp between slices"}


def test_a_pipeline_crosses_slices_on_request():
    """Catches sends to the next stage at the speed of a slice's links."""
    one = plan("stage=4,fsdp=16,across=stage", "2*v4:2x4x4")
    (row,) = [row for row in one.traffic if row.kind == "collective-permute" and row.part == "activations"]
    assert row.axes == ("stage between slices",) and row.in_a_slot is False
    assert row.wire_bytes == row.count * one.device_batch * 256 * 768 * 2
    assert one.speed(row) == CHIPS["v4"].dcn_bytes_per_s


def test_an_all_to_all_stays_inside_a_slice_with_its_share():
    """Catches a whole array that is exchanged inside each slice although most of it goes to other slices.

    Of 16 devices along fsdp, 8 are in each of 2 slices. A device keeps 1/16 of its 4,096 bytes, sends 7/16 inside its
    slice, and 8/16 to the other one.
    """
    cfg = preset("dense_124m", **DENSE, mesh="fsdp=16,tensor=2,across=fsdp")
    sums = networks.Sums(cfg, "tpu", "v4", slices=2)
    sums.add(networks.Collective("all-to-all", ("fsdp",), 4096, 3, "activations"))
    bytes_sent = {axes: sent for (_, _, axes), (_, sent, _) in sums.found.items()}
    assert bytes_sent == {("fsdp",): 3 * 4096 * 7 / 16, ("fsdp between slices",): 3 * 4096 * 8 / 16}


def test_links_name_the_network():
    """Catches a slice's own links laid out for the mesh of all slices, and a warning about another slice's chips."""
    found = hardware.layout(MeshConfig.parse("data=8,fsdp=16,tensor=4"), Topology.parse("4*v5p:4x4x8"))
    assert found.pop(BETWEEN).note == "data=8 spans 4 slices with 2 in each: data center network, 6.25 GB/s"
    assert found == hardware.layout(MeshConfig.parse("data=2,fsdp=16,tensor=4"), Topology.parse("v5p:4x4x8"))
    (note,) = hardware.check(MeshConfig.parse("data=2,fsdp=64"), Topology.parse("2*v4:4x4x4"))
    assert note == "fsdp=64 reduce-scatters over all chips, which libtpu replaces with all-reduces: 2x bytes"


def test_a_search_lists_only_meshes_that_slices_can_have():
    """Catches a search that refuses thousands of meshes, one that ignores the axis that was asked for, and one that
    tries only `data` if none was."""
    cfg = preset("dense_124m", **DENSE)
    for across, tried in (("data", {"data", "fsdp", "stage"}), ("fsdp", {"fsdp"})):
        cfg = dataclasses.replace(cfg, mesh=MeshConfig(across=across))
        fit, large, _ = planner.search(cfg, Topology.parse("2*v4:2x2x1"), None)
        assert fit and not large
        assert {one.cfg.mesh.across for one in fit} == tried
        assert all(one.cfg.mesh.sizes[one.cfg.mesh.across] % 2 == 0 for one in fit)
        assert all(math.isfinite(one.step_s) for one in fit)


def test_what_cannot_span_slices_is_refused(capsys):
    """Catches plans of inference or of other programs that use a slice's links between slices."""
    with pytest.raises(UserError, match="only the axis 'data' spans the 4 slices, and data=2 is not a multiple of 4"):
        plan("data=2,fsdp=64", "4*v4:2x4x4")
    message = "topology '2*v4:2x2x1': only a plan of a training step can span several slices; use v4:2x2x1"
    request = inference.Request(8, 8)
    with pytest.raises(UserError, match=re.escape(message)):
        inference.plan(preset("dense_124m", mesh="data=2,tensor=4"), "2*v4:2x2x1", request)
    assert traced.main(["docs/mlp.py:step", "--mesh", "data=4,model=2", "--topology", "2*v4:2x2x1"]) == 2
    assert message in capsys.readouterr().err
