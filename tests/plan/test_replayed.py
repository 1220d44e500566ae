"""Tests of simulating a compiled step: the schedule, the coordinates of the chips, and the command's flags."""

import types

import numpy as np
import pytest

from bench import overlap
from config import preset
from plan.chips.hardware import Topology
from plan.simulate import replayed, simulator
from utils import UserError


def mesh_of(places, **more):
    devices = np.array([types.SimpleNamespace(coords=place, **more) for place in places], dtype=object)
    return types.SimpleNamespace(devices=devices)


SLOTS = "\n".join(f'%c = f32[] conditional(%p), metadata={{op_name="{name}/cond"}}'
                  for name in ("forward_slot", "backward_slot", "loss_slot"))  # fmt: skip


def test_all_stages_wait_for_the_slowest_one():
    """Catches a free bubble: with 2 stages and M + 1 ticks per direction, some stage is busy in every tick."""
    cfg = preset("moe1b", mesh="stage=2,fsdp=8,tensor=2", **{"work.schedule": "gpipe", "work.microbatches": 8})
    shares = replayed.critical_shares(cfg, SLOTS)
    assert set(shares) == {"forward_slot", "backward_slot", "loss_slot"}
    assert shares["forward_slot"](9) == shares["backward_slot"](9) == 1
    assert shares["forward_slot"](18) == 0.5
    assert shares["loss_slot"](16) == 0.5


def test_a_program_without_conditionals_has_no_shares():
    """Catches a share for a conditional that the program lacks, which `ledger.read` refuses."""
    assert replayed.critical_shares(preset("dense_124m", mesh="fsdp=4"), "no conditional( here".replace("(", "")) == {}


def test_the_torus_has_the_axis_order_of_libtpu():
    """Catches torus axes in a different order than libtpu's coordinates: 2x4x4 for 4x4x2."""
    shape = lambda sizes: replayed.machine(Topology.parse("v4:4x4x2"), mesh_of([*np.ndindex(*sizes)])).torus.shape
    assert shape((4, 4, 2)) == (4, 4, 2) and shape((2, 4, 4)) == (2, 4, 4)


def test_the_clock_is_the_peak_divided_by_flops_per_cycle():
    """Catches the clock of another chip: v4 runs at 1.05 GHz, v5p at 1.75."""
    clock = lambda text: replayed.machine(Topology.parse(text), mesh_of([*np.ndindex(4, 4, 4)])).cycles_per_s
    assert clock("v4:4x4x4") == pytest.approx(1.05e9, rel=0.01)
    assert clock("v5p:4x4x4") == pytest.approx(1.75e9, rel=0.01)


def test_devices_without_coordinates_raise_a_user_error():
    """Catches a traceback for GPUs, which have no coordinates, and for several slices."""
    with pytest.raises(UserError, match="the devices of h100:8 have no coordinates on a torus; pass a TPU slice"):
        replayed.machine(Topology.parse("h100:8"), mesh_of([(0,)]))
    slices = mesh_of([*np.ndindex(4, 4, 4)])
    slices.devices[0].slice_index = 1
    with pytest.raises(UserError, match="the network between TPU slices is not modeled"):
        replayed.machine(Topology.parse("v4:4x4x4"), slices)


@pytest.mark.parametrize(
    "flags, message",
    [(["--at_peak"], "--at_peak applies only to a simulated step; add --seconds"),
     (["--seconds", "--latency_us", "-1"], "must be at least 0; about 1 on a TPU"),
     (["--seconds", "--plot", "layer.doc"], "cannot write a figure ending in 'doc'"),
     (["--topology", "h100:8", "--seconds"], "compiling for devices that are not attached")],
)  # fmt: skip
def test_bad_flags_are_refused_before_compilation(flags, message):
    """Catches a minute of compilation before a command fails because of a bad flag."""
    with pytest.raises(UserError, match=message):
        overlap.parse(flags)


def test_the_plot_and_the_json_contain_the_two_longest_computations(tmp_path):
    """Catches an empty plot, and numbers that JSON cannot represent."""
    import json

    event = simulator.Event(0.0, 1e-3, "core", "matmuls", "dot")
    wire = simulator.Event(0.0, 5e-4, "fsdp", "all-gather", "gather")
    one = lambda seconds: simulator.Timeline(seconds, simulator.collections.Counter(matmuls=seconds), [event, wire])
    found = simulator.Replay(7.0, {"matmuls": 7.0}, {"a": one(1.0), "b": one(2.0), "c": one(3.0)}, dict(a=1, b=1, c=2))
    assert found.longest() == ["c", "b"]
    assert [x["computation"] for x in json.loads(json.dumps(replayed.to_json(found)))["timelines"]] == ["c", "b"]
    replayed.plot(found, "two", str(tmp_path / "two.png"))
    assert (tmp_path / "two.png").stat().st_size > 10_000
