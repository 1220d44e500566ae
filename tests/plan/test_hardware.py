"""Test chips and links: published numbers, layouts computed by hand, the worked problems of the JAX scaling book.

BOOK is "How to Scale Your Model", https://jax-ml.github.io/scaling-book, and BOOK/tpus its page "tpus". The book
approximates (n - 1)/n by 1 and rounds intermediate results; each tolerance shows by how much.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import re
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from config import MeshConfig, ModelConfig
from plan import planner
from plan.chips import hardware
from plan.chips.hardware import CHIPS, Topology, collective_seconds, layout
from plan.count import costs
from utils import UserError

approx = pytest.approx
V5P = CHIPS["v5p"]
POD = Topology(V5P, (16, 20, 28), 8960, 2240)  # larger than any slice: 6,144 chips at most
LLAMA3_70B = ModelConfig(
    vocab_size=128_256, d_model=8192, n_layers=80, n_heads=64, attention="gqa", n_kv_heads=8, d_head=128, d_ff=28_672
)
LLAMA2_13B = ModelConfig(
    vocab_size=32_000, d_model=5120, n_layers=40, n_heads=40, attention="gqa", n_kv_heads=40, d_head=128, d_ff=13_824
)
BATCH_TOKENS = 4 * 2**20  # "4M"


def links(mesh, topology):
    return layout(MeshConfig.parse(mesh), read(topology))


def read(topology):
    return Topology.parse(topology) if isinstance(topology, str) else topology


# Devices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, chips, hosts, wraps", [
    ("v4:4x4x4", 64, 16, (True, True, True)),
    ("v4:4x4x2", 32, 8, (False, False, False)),  # BOOK/tpus: only whole cubes of 4x4x4 have wraparound links
    ("v4:2x4x4", 32, 8, (False, False, False)),
    ("v4:1x2x2", 4, 1, (False, False, False)),
    ("v5p:16x16x24", 6144, 1536, (True, True, True)),  # https://cloud.google.com/tpu/docs/v5p: the largest
    ("tpu7x:4x4x8", 128, 32, (True, True, True)),
    ("v5e:1x1", 1, 1, (False, False)),  # ct5lp-hightpu-1t and ct6e-standard-1t: a host with one chip
    ("v6e:1x1", 1, 1, (False, False)),
    ("v5e:2x4", 8, 1, (False, False)),  # ct5lp-hightpu-8t and ct6e-standard-8t: one host for all 8
    ("v6e:4x2", 8, 1, (False, False)),
    ("v3:2x4", 8, 2, (False, False)),  # v3 has no hosts of eight chips
    ("v3:16x32", 512, 128, (False, True)),
    ("v5e:4x4", 16, 4, (False, False)),
    ("v5e:8x16", 128, 32, (False, True)),  # BOOK/tpus, a footnote of "TPU Networking"
    ("v6e:16x16", 256, 64, (True, True)),
    ("h100:4", 4, 1, (False,)),
    ("h200:24", 24, 3, (False,)),
    ("b200:16", 16, 2, (False,)),
    ("gb200:72", 72, 18, (False,)),  # a rack's trays have 4 GPUs each
    ("gb200:64", 64, 16, (False,)),
    ("gb200:256", 256, 64, (False,)),  # 64 in each of 4 racks, as in NVIDIA's published runs
    ("4*v5p:4x4x8", 512, 128, (True, True, True)),
    ("2*v6e:8x16", 256, 64, (False, True)),
    ("3*tpu7x:2x2x1", 12, 3, (False, False, False)),
    ("cpu:8", 8, 1, (False,)),
])  # fmt: skip
def test_a_topology_is_read(text, chips, hosts, wraps):
    """Catches a missing size, hosts counted in cores, and rings without a wraparound link."""
    topology = Topology.parse(text)
    assert (topology.chips, topology.hosts, topology.wraps, str(topology)) == (chips, hosts, wraps, text)
    assert topology.devices == (2 if topology.chip.key in ("v3", "tpu7x") else 1) * chips
    assert topology.slices * topology.one_slice.chips == chips and topology.one_slice.slices == 1


@pytest.mark.parametrize("nodes, gpus", [
    ("16*h100", "h100:128"), ("4*gb200:64", "gb200:256"), ("2*h100:8", "h100:16"),
    ("8*gb200-nvl72", "gb200:576"), ("gb200-nvl72:72", "gb200:72"),
])  # fmt: skip
def test_nodes_of_gpus_are_their_gpus(nodes, gpus):
    """Catches 16 nodes that count as 16 GPUs, and nodes that are treated like slices."""
    assert Topology.parse(nodes) == Topology.parse(gpus) and str(Topology.parse(nodes)) == gpus


@pytest.mark.parametrize("ours, clouds", [
    ("v4:4x4x2", "v4:2x4x4"), ("v4:1x2x2", "v4:2x2x1"), ("v5p:8x4x4", "v5p:4x4x8"), ("v5e:8x4", "v5e:4x8"),
    ("v6e:16x8", "v6e:8x16"), ("tpu7x:2x4x2", "tpu7x:2x2x4"), ("v4:4x4x8", "v4:4x4x8"), ("h100:16", "h100:16"),
])  # fmt: skip
def test_the_order_of_sizes_does_not_change_a_slice(ours, clouds):
    """Catches speeds that depend on the order of the sizes. Google Cloud's order is smallest first,
    https://cloud.google.com/tpu/docs/types-topologies; a chip's coordinates are in that order."""
    here, there = Topology.parse(ours), Topology.parse(clouds)
    assert here.cloud == there.cloud == there and str(here) == ours
    assert here.hosts == there.hosts and sorted(here.wraps) == sorted(there.wraps)
    speeds = lambda topology, mesh: {
        axis: [value for value in dataclasses.astuple(link) if not isinstance(value, str | tuple)]
        for axis, link in layout(mesh, topology).items()
    }
    for mesh in planner.meshes(here.devices):
        if mesh.data == mesh.expert == mesh.context == 1:
            assert speeds(here, mesh) == speeds(there, mesh), mesh


@pytest.mark.parametrize("text, message", [
    ("16xh100", r"16 GPUs are h100:16, and 16 nodes of 8 are 16\*h100; write"),
    ("v9:2x2", r"unknown chip 'v9'; did you mean .*known: v3, v4, v5e, .*write v4:4x4x2"),
    ("v4-64", r"'v4-64': slice names count cores .*v4-64 is v4:2x4x4"),
    ("v3-8", r"'v3-8': slice names count cores .*v3-8 is v3:2x2, "),
    ("v5litepod-16", r"'v5litepod-16': slice names give no shape; write it in chips: v5litepod-64 is v5e:8x8"),
    ("v4:4x4", r"TPU v4 takes 3 sizes, like v4:4x4x4"),
    ("v5e:4x4x1", r"TPU v5e takes 2 sizes, like v5e:4x4"),
    ("v4:4x4x-2", r"takes 3 sizes"),
    ("v4:3x4x5", r"two sizes must be even; use v4:4x4x5"),
    ("v3:1x1", r"two sizes must be even and at most 32; use v3:2x2"),
    ("v5e:1x2", r"two sizes must be even and at most 16; use v5e:2x2"),
    ("v6e:32x15", r"two sizes must be even and at most 16; use v6e:16x16"),
    ("v4:16x16x20", r"5,120 chips exceed the largest slice of TPU v4, which has 4,096"),
    ("v5p:16x20x28", r"8,960 chips exceed the largest slice of TPU v5p, which has 6,144"),
    ("v4:4x4x8_twisted", r"twisted tori are not supported; use v4:4x4x8, without a twist"),
    ("v5p:8x8x16_twisted", r"twisted tori are not supported; use v5p:8x8x16, "),
    ("ironwood:2x2x1", r"unknown chip 'ironwood'; Ironwood is tpu7x; write"),
    ("tpu7x:4x4", r"TPU7x takes 3 sizes, like tpu7x:4x4x4"),
    ("gb200:100", r"come in nodes of 72 or 64, and 100 is not a multiple of 72 or 64; use gb200:72 or gb200:128"),
    ("gb200:200", r"200 is not a multiple of 72 or 64; use gb200:192 or gb200:216"),
    ("4*gb200:32", r"a node of NVIDIA GB200 NVL72 has 72 GPUs; use 4\*gb200 or gb200:288"),
    ("h100:12", r"NVIDIA H100s come in nodes of 8, and 12 is not a multiple of 8; use h100:8 or h100:16"),
    ("h100:4x4", r"NVIDIA H100 takes one size, like h100:8"),
    ("cpu:", r"this machine takes one size, like cpu:8"),
    ("4*", r"N\*SLICE is N slices of TPUs, and N\*GPU is N nodes of GPUs; write 4\*v5p:4x4x8 or 16\*h100"),
    ("0*v4:2x2x2", r"N\*SLICE is N slices of TPUs"),
    ("v5e:0x4", r"TPU v5e takes 2 sizes"),
    ("2*v5e:0x4", r"topology 'v5e:0x4': TPU v5e takes 2 sizes"),
    ("4*v3:4x4", r"the speed of the network between slices is unknown for TPU v3; use v3:4x4"),
    ("4*cpu:2", r"unknown for this machine; use cpu:2"),
    ("16*h100:4", r"a node of NVIDIA H100 has 8 GPUs; use 16\*h100 or h100:128"),
])  # fmt: skip
def test_a_wrong_topology_is_refused_with_one_that_works(text, message):
    """Catches a traceback, and suggestions that are refused as well."""
    with pytest.raises(UserError, match=message) as refused:
        Topology.parse(text)
    for word in re.split("[ ;,']+", str(refused.value).partition(": ")[2]):
        if word.rpartition("*")[2].partition(":")[0] in CHIPS and set(":*") & set(word) and word not in text:
            Topology.parse(word)


def test_the_page_lists_every_chip():
    """Catches an outdated table in docs/chips.md."""
    page = Path(__file__).parents[2].joinpath("docs/chips.md").read_text(encoding="utf-8")
    row = r"^\| `((\w+):\S+)` \| (.*?) \| (\d) \| ([\d.]+) GiB \| ([\d,]+) (?:chips|by NVLink) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert [key for _, key, *_ in rows] == [key for key in CHIPS if key != "cpu"]
    for topology, key, name, devices, memory, most in rows:
        chip, row = CHIPS[key], (name, int(devices), float(memory), int(most.replace(",", "")))
        assert row == (chip.name, chip.devices_per_chip, round(chip.memory_bytes / 2**30, 2), chip.most or chip.domain)
        assert str(Topology.parse(topology).cloud) == topology


def test_a_group_along_two_axes_has_the_links_of_both():
    """Catches a group over fsdp*context as slow as one axis: 8 chips in a box of 4x2 send along both sides."""
    mesh, topology = MeshConfig.parse("fsdp=2,context=4,tensor=4"), Topology.parse("v4:4x4x2")
    speed = lambda *axes: hardware.link(mesh, topology, axes).bytes_per_s
    assert speed("fsdp") == speed("context") == 4.5e10
    assert speed("fsdp", "context") == 2 * 4.5e10
    gpus = MeshConfig.parse("data=2,fsdp=4"), Topology.parse("h100:8")
    assert hardware.link(*gpus, ("data", "fsdp")).bytes_per_s == 4.5e11


def test_distance_uses_the_shorter_direction():
    """Catches a path through wraparound links that do not exist, and one that is missed."""
    torus, line = Topology.parse("v5e:16x16").torus, Topology.parse("v5e:4x4").torus
    assert torus.distance([0, 0], [15, 15]) == 2 and torus.distance([3, 0], [11, 0]) == 8
    assert line.distance([0, 0], [3, 3]) == 6
    assert torus.steps([0, 0], [15, 1]).tolist() == [-1, 1]


def test_devices_are_not_chips():
    """Catches a mesh of Ironwood with one device per chip instead of two."""
    with pytest.raises(UserError, match=r"has 64 devices, and tpu7x:4x4x4 has 128, 2 on each of 64 chips; use .* 128"):
        links("fsdp=64", "tpu7x:4x4x4")
    assert set(links("fsdp=32,tensor=4", "tpu7x:4x4x4")) == {"fsdp", "tensor"}
    chip, pod = CHIPS["tpu7x"], Topology.parse("tpu7x:16x16x36")
    # https://cloud.google.com/tpu/docs/tpu7x: a chip has 2,307 TFLOP/s, 7,380 GB/s, 192 GiB and 100 Gbit/s.
    assert pod.chips == 9216 == chip.most
    of_a_device = chip.peak_flops_per_s, chip.hbm_bytes_per_s, chip.dcn_bytes_per_s
    assert [2 * value for value in of_a_device] == [2307e12, 7.38e12, 12.5e9]
    assert 0.95 < 2 * chip.memory_bytes / (192 * 2**30) < 1


def test_a_single_chip_has_no_note_about_links():
    """Catches advice about wraparound links of a chip that has no neighbor."""
    assert hardware.check(MeshConfig(), Topology.parse("v5e:1x1")) == []
    assert "no wraparound links" in hardware.check(MeshConfig(fsdp=4), Topology.parse("v5e:2x2"))[0]


def test_notes_explain_what_the_numbers_assume():
    """Catches GPU memory that a JAX program cannot use, and a data sheet presented as a measurement."""
    memory, nvlink = hardware.chip_notes(Topology.parse("h200:8"))
    assert memory == "JAX reserves 75% of a GPU's 140.4 GiB; if you set XLA_CLIENT_MEM_FRACTION, use --memory"
    assert nvlink == "NVLink speed is 450 GB/s, from the data sheet; collectives on 8 H100s reached 0.82 of it"
    assert hardware.chip_notes(Topology.parse("tpu7x:4x4x4")) == [
        "64 chips are 128 devices, 2 per chip with 600 GB/s between them; all numbers are per device"]  # fmt: skip
    assert hardware.chip_notes(Topology.parse("v4:2x4x4")) == hardware.chip_notes(Topology.parse("cpu:8")) == []


# Layouts --------------------------------------------------------------------------------------------------------------

# topology, mesh -> axis: (bytes per second in units of a link, hops, ring, torus axes)
LAYOUTS = [
    ("v4:4x4x4", "fsdp=64", {"fsdp": (6, 1, True, "xyz")}),
    ("v4:4x4x4", "fsdp=16,tensor=4", {"fsdp": (4, 1, True, "yz"), "tensor": (2, 1, True, "x")}),
    # 4x4x2 has no ring. fsdp has x and half of y; stage connects the halves of y, two hops apart.
    ("v4:4x4x2", "fsdp=8,stage=2,tensor=2",
     {"stage": (1 / 2, 2, False, "y"), "fsdp": (2, 1, False, "xy"), "tensor": (1, 1, False, "z")}),
    ("v5e:4x4", "fsdp=4,tensor=4", {"fsdp": (1, 1, False, "y"), "tensor": (1, 1, False, "x")}),
    ("v5e:16x16", "fsdp=16,tensor=16", {"fsdp": (2, 1, True, "y"), "tensor": (2, 1, True, "x")}),
    ("v5e:8x16", "fsdp=16,tensor=8", {"fsdp": (2, 1, True, "y"), "tensor": (1, 1, False, "x")}),
    # Half of a closed axis is a line; the other factor goes around it in steps of two, with two groups per link.
    ("v4:4x4x4", "stage=16,fsdp=2,tensor=2",
     {"stage": (4, 1, True, "yz"), "fsdp": (2 / 2, 2, True, "x"), "tensor": (1, 1, False, "x")}),
    # JAX orders 2x2 as a ring: a mesh of 2x2 has its outer pairs on the diagonals, whose routes share no link.
    ("v5e:2x2", "tensor=4", {"tensor": (2, 1, True, "xy")}),
    ("v5e:2x2", "fsdp=2,tensor=2", {"fsdp": (1, 2, False, "xy"), "tensor": (1, 1, False, "x")}),
    # Groups of four that are not a box: in both directions, two messages share a link.
    ("v5e:2x4", "fsdp=4,tensor=2", {"fsdp": (1, 3, False, "xy"), "tensor": (1, 1, False, "x")}),
]  # fmt: skip


@pytest.mark.parametrize("topology, mesh, expected", LAYOUTS)
def test_mesh_axes_use_the_links_that_jax_gives_them(topology, mesh, expected):
    """Catches a ring without a closing link, both directions counted on a line, devices that are not neighbors, and
    links shared by several groups that count fully for each."""
    one = Topology.parse(topology).chip.link_bytes_per_s
    found = {
        axis: (link.bytes_per_s / one, link.hops, link.ring, "".join(link.torus_axes))
        for axis, link in links(mesh, topology).items()
    }
    assert found == expected


@pytest.mark.tpu
@pytest.mark.parametrize("topology, mesh", [(t, m) for t, m, _ in LAYOUTS] + [
    ("v5p:4x4x8", "data=2,stage=4,fsdp=8,tensor=2"), ("v6e:4x8", "fsdp=16,tensor=2"), ("v4:2x4x4", "fsdp=8,tensor=4"),
    ("v6e:2x4", "fsdp=4,tensor=2"), ("v5e:4x2", "fsdp=8"), ("v5p:8x4x4", "fsdp=32,tensor=4"),
    ("v5e:1x1", "data=1"), ("v6e:1x1", "data=1"),
    ("tpu7x:2x2x1", "fsdp=4,tensor=2"), ("tpu7x:2x2x4", "fsdp=8,stage=2,tensor=2"),
    ("tpu7x:4x4x2", "fsdp=8,tensor=8"), ("tpu7x:4x4x4", "stage=2,fsdp=64"),
    ("v4:2x2x1", "fsdp=2,tensor=2"), ("v4:8x8x16", "data=2,fsdp=32,stage=4,tensor=4"),
])  # fmt: skip
def test_the_compiler_arranges_the_chips_the_same_way(topology, mesh):
    """Catches placeholder devices that JAX arranges differently from libtpu's, whose coordinates are in Cloud's order;
    hosts of another size; and a chip of two devices that counts as one."""
    from plan.trace import compiled

    sizes, slice_ = MeshConfig.parse(mesh), Topology.parse(topology)
    real, dims = compiled.topology_mesh(sizes, topology).devices, len(slice_.shape)
    ours = hardware.coordinates(sizes, slice_)
    theirs = np.array([(*device.coords[:dims], device.core_on_chip) for device in real.flat])[:, : ours.shape[-1]]
    np.testing.assert_array_equal(ours[..., [*slice_.order, dims][: ours.shape[-1]]], theirs.reshape(ours.shape))
    assert len({device.process_index for device in real.flat}) == slice_.hosts
    assert real.flat[0].device_kind == slice_.chip.device_kind


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_memory_is_what_the_compiler_reports(topology):
    """Catches the nominal memory of a chip used instead of what a program can use."""
    from plan.trace import compiled

    chip, devices = Topology.parse(topology).chip, Topology.parse(topology).devices
    device = compiled.topology_mesh(MeshConfig(fsdp=devices), topology).devices.flat[0]
    one = jax.ShapeDtypeStruct((2**30,), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    with pytest.raises(jax.errors.JaxRuntimeError, match="exceeds available HBM") as full:
        jax.jit(lambda *arrays: [x + 1 for x in arrays]).lower(*[one] * 60).compile()
    (available,) = re.findall(r"available HBM \(([\d.]+)G", str(full.value))
    assert round(chip.memory_bytes / 2**30, 2) == float(available)


@pytest.mark.tpu
@pytest.mark.parametrize("topology, as_one", [
    ("v4:2x2x2", True), ("v5p:2x2x2", True), ("v5e:4x4", True), ("v6e:4x4", True), ("v4:2x2x1", False),
    ("v5e:2x4", False), ("v6e:2x4", False), ("tpu7x:2x2x1", False), ("tpu7x:2x2x2", False),
])  # fmt: skip
def test_a_scatter_over_the_whole_slice_compiles_as_the_note_says(topology, as_one):
    """Catches a wrong note of an all-reduce: there is none on Ironwood, and none on the 8 chips of one host."""
    from plan.trace import compiled

    sizes = MeshConfig(fsdp=Topology.parse(topology).devices)
    mesh = compiled.topology_mesh(sizes, topology)
    x = jax.ShapeDtypeStruct((1024, 128 * sizes.fsdp), np.float32,
                             sharding=jax.sharding.NamedSharding(mesh, P(None, "fsdp")))  # fmt: skip
    scatter = lambda x: jax.lax.psum_scatter(x @ x.T, "fsdp", scatter_dimension=0, tiled=True)
    step = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P("fsdp")))
    text = step.lower(x).compile().as_text()
    assert (" all-reduce(" in text, " reduce-scatter(" in text) == (as_one, not as_one)
    notes = hardware.check(sizes, Topology.parse(topology))
    assert any("replaces with all-reduces" in note for note in notes) == as_one


def test_a_slice_unknown_to_the_compiler_is_refused_in_one_line(monkeypatch):
    """Catches the page-long error of a libtpu that is older than the chip, and GPUs that are passed to libtpu."""
    from plan.trace import compiled

    def older(**arguments):
        raise RuntimeError("INVALID_ARGUMENT: Invalid TPU external name: TPU7X\na page")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(compiled.topologies, "get_topology_desc", older)
    with pytest.raises(UserError, match=r"^topology 'tpu7x:2x2x1': libtpu reports '.*TPU7X'; upgrade libtpu, or .*$"):
        compiled.topology_mesh(MeshConfig(fsdp=8), "tpu7x:2x2x1")
    with pytest.raises(UserError, match=r"^topology 'h100:8': compiling for devices that .* like v4:2x4x4, "):
        compiled.topology_mesh(MeshConfig(fsdp=8), "h100:8")


def test_gpus_in_several_nodes_use_their_network_cards():
    """Catches an axis that spans nodes at the speed of NVLink, and a node that sends through one network card."""
    found = links("data=2,fsdp=2,tensor=8", "h100:32")
    assert [link.bytes_per_s for link in found.values()] == [50e9, 50e9, 450e9]
    wide = links("tensor=16", "h100:16")["tensor"]
    assert (wide.bytes_per_s, wide.neighbour_bytes_per_s) == (400e9, 50e9)  # BOOK/gpus: 8 cards of 50e9
    assert links("fsdp=2,tensor=4", "h200:8")["fsdp"].bytes_per_s == 450e9


def test_two_devices_of_a_chip_share_its_links():
    """Catches links of an Ironwood chip that count fully for each of its devices. By hand: a link has 90 GB/s."""
    found = links("fsdp=64,tensor=2", "tpu7x:4x4x4")
    assert found["tensor"].bytes_per_s == 6e11 and found["tensor"].note == "tensor=2 stays on a chip: 600 GB/s"
    # Two groups, each with one device of every chip, share the six links of a chip.
    assert found["fsdp"].bytes_per_s == 6 * 9e10 / 2 and found["fsdp"].neighbour_bytes_per_s == 9e10 / 2
    found = links("fsdp=32,tensor=4", "tpu7x:4x4x4")
    assert found["fsdp"].bytes_per_s == 4 * 9e10  # y and z; a chip sends each byte once for both devices
    assert found["fsdp"].note.startswith("fsdp=32 maps to both devices of each chip of y and z: ring, ")
    assert found["tensor"].bytes_per_s == 2 * 9e10 / 2
    # Half of the gathered array crosses the middle of a torus of 4 chips a side, however it is sharded.
    everyone = links("fsdp=128", "tpu7x:4x4x4")["fsdp"]
    assert collective_seconds("all-to-all", 1e9 / 128, 128, everyone) == approx(1e9 / 4 / (4 * 4 * 2 * 9e10))


def test_notes_match_the_numbers():
    """Catches notes that contradict the numbers, and a slow mesh without a note."""
    notes = {axis: link.note for axis, link in links("fsdp=8,stage=2,tensor=2", "v4:4x4x2").items()}
    assert notes["fsdp"] == "fsdp=8 maps to x and half of y: no ring, neighbors adjacent, 90 GB/s"
    assert notes["stage"] == "stage=2 maps to every 2nd of y: no ring, neighbors 2 hops apart, 22.5 GB/s"
    check = lambda mesh, topology: hardware.check(MeshConfig.parse(mesh), Topology.parse(topology))
    no_ring, apart = check("fsdp=8,stage=2,tensor=2", "v4:4x4x2")
    assert no_ring.startswith("v4:4x4x2 has no wraparound links")
    assert apart == "stage=2 neighbors are 2 hops apart: 22.5 GB/s"
    assert check("fsdp=16,tensor=4", "v4:4x4x4") == check("fsdp=2,tensor=8", "h100:16") == []
    (all_chips,) = check("fsdp=16,expert=4", "v4:4x4x4")
    assert all_chips.startswith("fsdp=16,expert=4 reduce-scatters over all chips")
    assert check("tensor=16", "h100:16") == ["tensor=16 spans nodes of 8: 400 GB/s, not 450 GB/s"]
    assert links("fsdp=8", "cpu:8")["fsdp"].note == "fsdp=8 uses this machine's memory"


def test_a_mesh_that_does_not_fit_is_refused():
    """Catches a layout with fewer chips than requested, and JAX's own TypeError."""
    with pytest.raises(UserError, match=r"mesh fsdp=8 has 8 devices, and v4:4x4x2 has 32 chips; use axes"):
        links("fsdp=8", "v4:4x4x2")
    with pytest.raises(UserError, match=r"mesh fsdp=8 has 8 devices, and h100:16 has 16"):
        links("fsdp=8", "h100:16")
    with pytest.raises(UserError, match=r"JAX places tensor=3 on tpu7x:2x2x3 so that a group has .* powers of two"):
        links("fsdp=8,tensor=3", "tpu7x:2x2x3")
    if importlib.metadata.version("jax") == "0.10.2":  # jax-ml/jax#38286, fixed later
        with pytest.raises(UserError, match=r"JAX cannot place fsdp=2240,tensor=4 on v5p:16x20x28"):
            links("fsdp=2240,tensor=4", POD)


def test_a_thousand_chips_take_less_than_a_second():
    """Catches a search whose time grows with the square of the chips. It took 0.05 s when this was written."""
    links("tensor=4", "v4:2x2x1")  # imports JAX's part
    start = time.perf_counter()
    links("data=2,stage=4,fsdp=8,expert=2,context=2,tensor=4", "v4:8x8x16")
    assert time.perf_counter() - start < 1


# Collectives ----------------------------------------------------------------------------------------------------------


def test_a_message_to_the_next_device_uses_one_direction():
    """Catches a pipeline or ring attention planned with the links of a gather, and routes that share a link."""
    ring = links("fsdp=16,tensor=4", "v4:4x4x4")["tensor"]
    assert collective_seconds("collective-permute", 4.5e10, 4, ring) == 1
    assert links("tensor=4", "v4:2x2x1")["tensor"].neighbour_bytes_per_s == 4.5e10  # over the end of x into y
    apart = links("fsdp=8,stage=2,tensor=2", "v4:4x4x2")["stage"]
    assert apart.neighbour_bytes_per_s == 4.5e10 / 2
    assert collective_seconds("collective-permute", 4.5e10, 2, apart) == 2


def test_an_all_to_all_costs_a_quarter_of_a_gather_on_a_ring():
    """Catches an all-to-all that counts only what a device sends. BOOK/sharding, "AllToAll"; BOOK/gpus for the node."""
    ring = links("fsdp=16,tensor=16", "v5e:16x16")["tensor"]
    gather, exchange = (collective_seconds(*of, 16, ring) for of in (("all-gather", 1e9), ("all-to-all", 1e9 / 16)))
    assert exchange == approx(gather / 4 * 16 / 15)  # there is no (n - 1)/n in an all-to-all
    line = links("fsdp=4,tensor=4", "v5e:4x4")["tensor"]  # by hand: 2x2 slices of 1/16 cross the middle link
    assert collective_seconds("all-to-all", 1e9 / 4, 4, line) == approx(1e9 * 4 / 16 / 4.5e10)
    plane = links("fsdp=16,tensor=4", "v4:4x4x4")["fsdp"]  # 8x8 slices of 1/256 cross 4 rings, in 2 places each
    assert collective_seconds("all-to-all", 1e9 / 16, 16, plane) == approx(1e9 * 64 / 256 / (4 * 2 * 4.5e10))
    oblong = links("fsdp=32,tensor=4", "v4:4x4x8")["fsdp"]  # 16x16 slices of 1/1024 cross the 4 rings of 8 chips
    assert collective_seconds("all-to-all", 1e9 / 32, 32, oblong) == approx(1e9 * 256 / 1024 / (4 * 2 * 4.5e10))
    node = links("tensor=8", "h100:8")["tensor"]
    assert collective_seconds("all-to-all", 1e9 / 8, 8, node) == approx(1e9 * 7 / 64 / 450e9)
    nodes = links("expert=16", "h100:16")["expert"]  # half of each sixteenth leaves the node, by one card per GPU
    assert collective_seconds("all-to-all", 1e9 / 16, 16, nodes) == approx(1e9 / 16 / 2 / 50e9)


def test_bytes_sent_match_the_ledger():
    """Catches a full array counted instead of a shard, and an all-reduce that counts once."""
    sent = {kind: hardware.wire_bytes(kind, 800, 4) for kind in
            ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")}  # fmt: skip
    assert list(sent.values()) == [600, 600, 1200, 600, 800]
    with pytest.raises(AssertionError, match="speed of this link is not known"):
        collective_seconds("all-gather", 1, 8, links("fsdp=8", "cpu:8")["fsdp"])


# Worked problems of the book ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, memory, hbm, flops, link, dcn", [
    ("v4", 32 * 2**30, 1.2e12, 2.75e14, 4.5e10, 6.25e9),
    ("v5p", 96 * 2**30, 2.8e12, 4.59e14, 9e10, 6.25e9),
    ("v5e", 16 * 2**30, 8.1e11, 1.97e14, 4.5e10, 3.125e9),
    ("v6e", 32 * 2**30, 1.6e12, 9.20e14, 9e10, 12.5e9),
    ("a100", 80e9, 2.0e12, 3.12e14, 12 * 25e9, 200e9 / 8),
    ("h100", 80e9, 3.4e12, 9.9e14, 18 * 25e9, 400e9 / 8),
    ("h200", 141e9, 4.8e12, 9.9e14, 18 * 25e9, 400e9 / 8),
    ("b200", 180e9, 8.0e12, 2.25e15, 18 * 50e9, 400e9 / 8),
    ("gb200", 186e9, 8.0e12, 2.5e15, 18 * 50e9, 400e9 / 8),
])  # fmt: skip
def test_book_table(key, memory, hbm, flops, link, dcn):
    """BOOK/tpus, "TPU Specs", and BOOK/gpus, "Summary of GPU specs", rounded to 2%; libtpu reserves up to 5% of
    memory, and JAX uses 0.75 of a GPU's, which has up to 8% more than its data sheet.
    Links of A100: NVIDIA's data sheet of DGX A100. Memory of B200 and GB200: those of DGX B200, 1,440 GB, and of GB200
    NVL72, 13.4 TB; FLOP/s of GB200: 360 PFLOP/s of 72, sparse."""
    chip = CHIPS[key]
    has = chip.memory_bytes / (memory if chip.torus_dims else 0.75 * memory)
    assert 0.95 < has < 1 if chip.torus_dims else 1 < has < 1.08
    assert (chip.hbm_bytes_per_s, chip.peak_flops_per_s) == (approx(hbm, rel=0.02), approx(flops, rel=0.02))
    assert (chip.link_bytes_per_s, chip.dcn_bytes_per_s) == (link, dcn)
    assert hardware.PEAK_FLOPS_PER_S[chip.device_kind] == chip.peak_flops_per_s
    assert "cpu" not in hardware.PEAK_FLOPS_PER_S


def test_book_pods():
    """BOOK/tpus, question 2: hosts, FLOP/s and memory of a whole pod."""
    pod = POD
    assert pod.hosts == pod.chips / pod.chip.per_host
    assert pod.chips * pod.chip.peak_flops_per_s == approx(4e18, rel=0.03)
    assert pod.chips * pod.chip.memory_bytes == approx(860e12, rel=0.08)  # GiB there, GB here
    small = Topology.parse("v5e:16x16")
    assert small.chips * small.chip.peak_flops_per_s == approx(5.1e16, rel=0.02)


def test_book_weights_from_memory():
    """BOOK/tpus, question 1: reading 200B parameters in bf16 on 32 v4 chips takes about 10 ms."""
    assert 2 * 200e9 / 32 / CHIPS["v4"].hbm_bytes_per_s == approx(10e-3, rel=0.05)


def test_book_send_across_a_slice():
    """BOOK/tpus, question 5: bf16[8, 128, 8192] from corner to corner of v5e:4x4: 6 hops, 188 us by two links."""
    topology = Topology.parse("v5e:4x4")
    assert topology.torus.distance([0, 0], [3, 3]) == 6
    assert 2 * 8 * 128 * 8192 / (2 * topology.chip.link_bytes_per_s) == approx(188e-6, rel=0.02)


def test_book_all_gather_without_a_ring():
    """BOOK/sharding, pop quiz 2: bf16[2048, 8192] over the 4 of v5e:8x4 takes 560 us, not the 377 us of a ring."""
    link = links("fsdp=8,tensor=4", "v5e:8x4")["tensor"]
    assert collective_seconds("all-gather", 2 * 2048 * 8192, 4, link) == approx(560e-6, rel=0.01)


def test_book_all_gather_on_a_cube():
    """BOOK/sharding, question 2: bf16[1024, 4096] on v4:4x4x4; a quarter over one axis 23 us, all over two 46 us."""
    found = links("fsdp=16,tensor=4", "v4:4x4x4")
    one = collective_seconds("all-gather", 2 * 1024 * 4096 / 4, 4, found["tensor"])
    two = collective_seconds("all-gather", 2 * 1024 * 4096, 16, found["fsdp"])
    assert (one, two) == (approx(23e-6 * 3 / 4, rel=0.02), approx(46e-6 * 15 / 16, rel=0.02))


def test_book_gather_in_a_node():
    """BOOK/gpus, quiz 2, question 3, and pop quiz 1: bf16[4096, 65536] in 1.04 ms, bf16[1024, 16384] in 65 us."""
    link = links("tensor=8", "h100:8")["tensor"]
    assert collective_seconds("all-gather", 2 * 4096 * 65536, 8, link) == approx(1.04e-3, rel=0.01)
    assert collective_seconds("all-gather", 2 * 1024 * 16384, 8, link) == approx(65e-6, rel=0.01)


def layer_seconds(tokens, D, F, mesh, topology):
    """Forward pass of the book's layer, two D x F matmuls in bf16: seconds of matmuls, fsdp gathers, tensor sums."""
    sizes, found = MeshConfig.parse(mesh), links(mesh, topology)
    matmuls = 4 * tokens * D * F / sizes.devices / read(topology).chip.peak_flops_per_s
    weight, activations = 2 * D * F / sizes.tensor, 2 * tokens / sizes.fsdp * D
    fsdp = tensor = 0
    if "fsdp" in found:
        fsdp = 2 * collective_seconds("all-gather", weight, sizes.fsdp, found["fsdp"])
    if "tensor" in found:
        tensor = collective_seconds("all-gather", activations, sizes.tensor, found["tensor"])
        tensor += collective_seconds("reduce-scatter", activations, sizes.tensor, found["tensor"])
    return matmuls, fsdp, tensor


@pytest.mark.parametrize("mesh, topology, torus_axes", [
    ("data=256,fsdp=16", "v5p:16x16x16", 1),
    ("data=16,fsdp=256", "v5p:16x16x16", 2),
    ("fsdp=4096", "v5p:16x16x16", 3),
    ("fsdp=8960", POD, 3),
])  # fmt: skip
def test_book_fsdp_needs_2550_tokens_a_chip(mesh, topology, torus_axes):
    """BOOK/training, "Fully-Sharded Data Parallelism": communication-bound below 2550, 1275, 850 tokens a chip."""
    sizes = MeshConfig.parse(mesh)
    least = 2550 / torus_axes * (sizes.fsdp - 1) / sizes.fsdp
    for tokens, bound in ((0.99 * least, True), (1.01 * least, False)):
        matmuls, fsdp, _ = layer_seconds(tokens * sizes.devices, 8192, 28_672, mesh, topology)
        assert (fsdp > matmuls) == bound


def test_book_tensor_parallelism_ends_at_f_over_2550():
    """BOOK/training, "Tensor Parallelism": with F of 30,000, 8-way is bound by compute, 16-way by communication."""
    ways = 28_672 / (V5P.peak_flops_per_s / (2 * V5P.link_bytes_per_s))
    assert ways == approx(11, rel=0.03)
    for mesh, topology, bound in (
        ("fsdp=64,tensor=8", "v5p:8x8x8", False),
        ("fsdp=256,tensor=16", "v5p:16x16x16", True),
    ):
        matmuls, _, tensor = layer_seconds(2**22, 8192, 30_000, mesh, topology)
        assert (tensor > matmuls) == bound


def test_book_best_split_of_a_cube():
    """BOOK/training, "Combining FSDP and Tensor Parallelism": 48,000 tokens, F = 32768, 64 chips: 16 by 4."""
    cost = {}
    for fsdp in (1, 4, 16, 64):
        mesh = f"fsdp={fsdp},tensor={64 // fsdp}"
        cost[fsdp] = max(layer_seconds(48_000, 8192, 32_768, mesh, "v5p:4x4x4")[1:])
    assert min(cost, key=cost.get) == 16
    assert math.sqrt(48_000 / 32_768 * 2 * 64) == approx(13.9, rel=0.02)


def test_book_llama3_70b_takes_44_days():
    """BOOK/applied-training: 70.4B parameters, 6.3e24 FLOPs for 15T tokens, 44 days on 8960 v5p at 40% of the peak."""
    total, active = costs.parameters(LLAMA3_70B)
    assert total == active == 70_553_706_496  # as published; the book omits the norms' weights, and rounds the layers
    flops = 6 * total * 15e12
    assert flops == approx(6.3e24, rel=0.01)
    assert flops / (8960 * V5P.peak_flops_per_s * 0.4) / 86_400 == approx(44, rel=0.02)


def test_book_llama3_70b_fits_on_171_chips():
    """BOOK/applied-training: bf16 weights 140 GB, float32 moments 560 GB, three saved activations per layer 15.8 TB."""
    total, _ = costs.parameters(LLAMA3_70B)
    weights, moments, kept = 2 * total, 8 * total, 3 * 80 * 2 * 8192 * 4e6
    assert (weights, moments, kept) == (approx(140e9, rel=0.01), approx(560e9, rel=0.01), approx(15.8e12, rel=0.01))
    assert (weights + moments + kept) / 96e9 == approx(171, rel=0.01)
    assert V5P.memory_bytes * 171 > weights + moments + kept


def test_book_llama3_70b_needs_tensor_parallelism():
    """BOOK/applied-training, "How to Shard": with 4M tokens FSDP alone is bound by communication on a whole pod. With
    4-way tensor parallelism it is not, here on the largest slice, where tensor has no ring."""
    D, F = LLAMA3_70B.d_model, LLAMA3_70B.d_ff
    tokens = BATCH_TOKENS / 8960
    assert tokens == approx(468, rel=0.001)
    matmuls, fsdp, _ = layer_seconds(BATCH_TOKENS, D, F, "fsdp=8960", POD)
    assert fsdp / matmuls == approx(850 / 468, rel=0.01)
    matmuls, fsdp, _ = layer_seconds(BATCH_TOKENS, D, F, "fsdp=6144", "v5p:16x16x24")
    assert fsdp > matmuls
    mixed = "fsdp=1536,tensor=4"
    assert not links(mixed, "v5p:16x16x24")["tensor"].ring
    matmuls, fsdp, tensor = layer_seconds(BATCH_TOKENS, D, F, mixed, "v5p:16x16x24")
    # In the book fsdp uses all links of the axis that it shares with tensor. The compiler uses one ring, 1/3 as fast.
    assert max(fsdp / 3, tensor) < matmuls < fsdp


def test_book_llama2_13b_on_4096_chips():
    """BOOK/training, questions 1 to 3: 13.1B parameters, 130 GB with Adam; on v5p:16x16x16 FSDP alone is bound by
    communication with 3M tokens (it takes 3.48M), 1024 by 4 is not; a step takes 300 ms at 40% of the peak."""
    total, _ = costs.parameters(LLAMA2_13B)
    assert total == approx(13.1e9, rel=0.01)
    assert (2 + 4 + 4) * total == approx(130e9, rel=0.01)
    D, F, topology = LLAMA2_13B.d_model, LLAMA2_13B.d_ff, "v5p:16x16x16"
    for tokens, bound in ((3e6, True), (3.49e6, False)):
        matmuls, fsdp, _ = layer_seconds(tokens, D, F, "fsdp=4096", topology)
        assert (fsdp > matmuls) == bound
    matmuls, fsdp, tensor = layer_seconds(3e6, D, F, "fsdp=1024,tensor=4", topology)
    assert fsdp / 3 < matmuls < fsdp  # one ring, as above
    assert 6 * 3e6 * total / (4096 * V5P.peak_flops_per_s * 0.4) == approx(300e-3, rel=0.05)
    # In the book tensor has its own ring. On a quarter of a side it has no ring, and half the speed.
    assert tensor / 2 < matmuls < tensor


def test_book_pods_connected_by_the_data_center_network():
    """BOOK/training, "Scaling Across Pods": gradients overlap with 71,360 tokens, or about 75,000, per v5p pod."""
    tokens = V5P.peak_flops_per_s / V5P.dcn_bytes_per_s
    assert tokens == approx(73_000, rel=0.03)
