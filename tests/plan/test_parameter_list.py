"""The list of parameters has the arrays that training stores on a device."""

import json

import numpy as np
import pytest

import sharding
from config import preset
from parameters import declare_stored
from plan import planner
from plan.__main__ import main
from plan.answer import parameter_list

CASES = {
    "every axis": preset("tiny", mesh="stage=2,fsdp=2,tensor=2"),
    "experts and context": preset("tiny", mesh="expert=2,context=2,tensor=2", **{"data.seq_len": 16}),
    "sharded over replicas": preset("tiny", mesh="data=2,fsdp=2", **{"optim.shard_over_data": True}),
    "encoder": preset("t5_tiny", mesh="fsdp=4,tensor=2"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_list_has_the_shards_that_jax_makes(case):
    """Catches a parameter that is missing, a shard of another shape, bytes of another dtype, and a wrong total."""
    cfg = CASES[case]
    found = {one.name: one for one in parameter_list.parameters(cfg)}
    arrays = sharding.flatten_named(sharding.shapes(declare_stored(cfg), sharding.make_mesh(cfg.mesh)))
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        one, local = found[name], x.sharding.shard_shape(x.shape)
        assert (one.shape, one.local_shape, one.dtype) == (x.shape, local, str(x.dtype))
        assert one.local_bytes == x.dtype.itemsize * np.prod(local)
        assert name.endswith(one.letters[-1]) and len(one.letters) == x.ndim
        assert [*one.spec] == [(axes,) if isinstance(axes, str) else axes or () for axes in x.sharding.spec]
    plan = planner.plan(cfg)
    assert sum(one.size for one in found.values() if one.trainable) == plan.params_total
    assert sum(one.local_bytes for one in found.values()) == plan.memory_bytes["parameters"]


def test_the_command_prints_and_writes_the_list(tmp_path, capsys):
    """Catches a table without some parameter, mesh axes of size 1 in it, and JSON without the list."""
    path = tmp_path / "plan.json"
    assert main(["tiny", "--mesh", "fsdp=2,stage=2", "--parameters", "--json", str(path)]) == 0
    lines, listed = capsys.readouterr().out.splitlines(), json.loads(path.read_text())["parameters"]
    assert lines == parameter_list.lines(preset("tiny", mesh="fsdp=2,stage=2"))
    assert [line.split()[0] for line in lines[1:-2]] == [one["name"] for one in listed]
    [line] = [line for line in lines if line.startswith("blocks.moe.feed_forward.w_up_EDM ")]
    assert " L=2 E=8 D=24 M=28 " in line and " L stage, D fsdp  L=1 E=8 D=12 M=28 " in line
    assert lines[-2].startswith("all, on stage=2,fsdp=2 ") and lines[-1].startswith("16 of the count are")


@pytest.mark.parametrize("flags, message", [
    (["--mesh", "fsdp=5"], "cannot split 128 model dimensions"), (["--compile"], "mutually exclusive"),
    (["--inference"], "--parameters has no effect with --inference"),
    (["--topology", "v4:2x2x1,h100:4"], "--parameters describes one topology"),
])  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused(flags, message, capsys):
    """Catches a traceback, and a flag that is ignored."""
    assert main(["laptop", "--mesh", "fsdp=2", "--parameters", *flags]) == 2
    assert message in capsys.readouterr().err
