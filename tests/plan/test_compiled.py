"""Claims about compiled steps: what the compiler refuses and complains of is told, and nothing else is hidden."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import optimizer
import sharding
from config import MeshConfig, preset
from devices import compile_cache
from errors import UserError
from plan import compiled
from sharding import FSDP, STAGE, TENSOR
from xla import ledger

GIB = 2**30

# Out of memory --------------------------------------------------------------------------------------------------------

# What libtpu 0.0.42 raises, then what it logs; the tables are cut short.
QUICK = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (103.53G) exceeds available HBM (30.75G)."  # noqa: E501
REPORT = """\
E1121 14:41:11.717294   28057 deepsea_compiler_base.cc:3781] XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 103.53G of 30.75G hbm. Exceeded hbm capacity by 72.78G. Memory usage report:

Memory Space: default (color=0)
Total bytes: 111162206720 (103.53GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    2.00GiB(  2%);    2.00GiB;     15384576;                8; (), 2×bf16[128256,4096], 5×f32[8,1,1,32,256,8192]
    3.94GiB(  4%);    1.94GiB;   2162868224;                5; 5×f32[8,1,1,32,256,7936]
   43.98GiB( 41%); 1002.00MiB;  46186283008;                1; bf16[4096,128256]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    2.00GiB(  2%);    2.00GiB;     15384576;                8; (), 2×bf16[128256,4096], 5×f32[8,1,1,32,256,8192]
"""  # noqa: E501
# What it raises where the program fits until buffers have their places.
LONG = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 40.10G of 30.75G hbm. Exceeded hbm capacity by 9.35G.

Total hbm usage >= 41.35G:
    reserved          1.25G
    program          29.30G
    arguments        10.80G

  Largest program allocations in hbm:

  1. Size: 576.0M
     Operator: op_name="jit(step)/shard_map/while/body/dot_general" source_file="/somewhere/model.py" source_line=412
     Shape: bf16[4,36,1024,2048]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 576.0M
     XLA label: fusion.12 = fusion(...)
     Allocation type: HLO temp
     ==========================

  2. Size: 2.25G
     Shape: f32[9,64,1024,1024]{3,2,1,0:T(8,128)}
     Unpadded size: 2.25G
     Allocation type: HLO temp
     ==========================
"""  # noqa: E501


def test_the_quick_refusal_is_read():
    """Catches a message that has other words than the one the reader was written for: libtpu has several."""
    error = compiled.out_of_memory(QUICK, "less")
    assert (error.used_bytes, error.limit_bytes) == (round(103.53 * GIB), round(30.75 * GIB))
    assert (error.excess_bytes, error.buffers) == (error.used_bytes - error.limit_bytes, [])
    assert str(error) == "out of memory: one device needs 103.53 GiB and has 30.75 GiB, 72.78 GiB too little; try less"


def test_the_logged_report_names_the_largest_buffers():
    """Catches a report that is thrown away, a buffer told twice, and MiB taken for GiB."""
    error = compiled.out_of_memory(QUICK + "\n" + REPORT, "less")
    shapes = ["(), 2×bf16[128256,4096], 5×f32[8,1,1,32,256,8192]", "5×f32[8,1,1,32,256,7936]", "bf16[4096,128256]"]
    assert [buffer.shape for buffer in error.buffers] == shapes
    assert [buffer.size_bytes for buffer in error.buffers] == [2 * GIB, round(1.94 * GIB), 1002 * 2**20]
    assert "; largest buffers: 2.00 GiB (), 2×bf16" in str(error)


def test_the_long_refusal_is_read():
    """Catches buffers in the compiler's order instead of by size, and one without an operator that takes its
    neighbour's."""
    error = compiled.out_of_memory(LONG, "less")
    assert (error.used_bytes, error.limit_bytes) == (round(40.1 * GIB), round(30.75 * GIB))
    assert error.buffers == [
        (2.25 * GIB, "f32[9,64,1024,1024]", "", ""),
        (576 * 2**20, "bf16[4,36,1024,2048]", "jit(step)/shard_map/while/body/dot_general", "model.py:412"),
    ]
    assert str(error).endswith(
        "9.35 GiB too little; largest buffers: 2.25 GiB f32[9,64,1024,1024]; 0.56 GiB bf16[4,36,1024,2048] in "
        "jit(step)/shard_map/while/body/dot_general (model.py:412); try less"
    )


@pytest.mark.parametrize("settings, words", [
    ({}, "work.remat=full or a smaller work.device_batch or a larger fsdp axis"),
    ({"work.remat": "full", "work.gather": "step", "mesh": "stage=2", "data.batch_size": 4},
     "work.gather=layer or work.schedule=1f1b or a larger fsdp axis"),
])  # fmt: skip
def test_what_would_help_is_not_yet_so(settings, words):
    """Catches advice to do what was done already."""
    assert compiled.advice(preset("tiny", **settings)) == words


class Refused:
    """A lowered program whose compiler logs something and gives up."""

    def __init__(self, message, logged=b""):
        self.message, self.logged = message, logged

    def compile(self):
        os.write(2, self.logged)
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize("message", [
    "INTERNAL: Mosaic failed to compile",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.00M of 16.00M vmem.",
])  # fmt: skip
def test_other_errors_of_the_compiler_stay_what_they_are(message, capfd):
    """Catches any failure taken for one of memory, one that is told without what the compiler logged, and a setting of
    JAX that stays changed."""
    before = jax.config.jax_enable_compilation_cache
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        compiled.compile_lowered(Refused(message, b"some words\n"))
    assert capfd.readouterr().err == "some words\n"
    assert jax.config.jax_enable_compilation_cache == before


def test_a_refusal_is_read_with_its_log(capfd):
    """Catches a report on standard error that floods the screen, and buffers that are told there alone."""
    with pytest.raises(compiled.OutOfMemory, match=r"0\.98 GiB bf16\[4096,128256\]; try a smaller program"):
        compiled.compile_lowered(Refused(QUICK, REPORT.encode()))
    assert capfd.readouterr().err == ""


# What should not be in a program --------------------------------------------------------------------------------------


def moved(start: P, end: P):
    """Compile a program that brings an array [16, 24, 32] from one layout to another, and read it."""
    mesh = sharding.make_mesh("stage=2,fsdp=2,tensor=2")
    places = [NamedSharding(mesh, spec) for spec in (start, end)]
    move = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, places[1]), in_shardings=places[0])
    step, said = compiled.compile_lowered(move.lower(jax.ShapeDtypeStruct((16, 24, 32), jnp.float32)))
    return compiled.unexpected(ledger.read(step.as_text(), mesh).collectives, most_bytes=100), said


def test_a_layout_that_is_reached_by_a_copy_is_told(capfd):
    """Catches XLA's warning that it gives up and gathers the whole array, left on a screen nobody reads."""
    found, said = moved(P(STAGE, FSDP), P(None, (STAGE, FSDP, TENSOR)))
    assert len(said) == 1
    assert re.match(r"\[SPMD\] Involuntary full rematerialization\. .* for HLO operation .*\.$", said[0])
    place = r"\(jit\(<lambda>\)/mul, test_compiled\.py:\d+ in moved"
    assert any(re.match(rf"all-gather of [\d,]+ bytes over (stage|fsdp).* {place}", line) for line in found), found
    assert capfd.readouterr().err == ""


def test_a_program_is_compiled_anew(tmp_path):
    """Catches a program out of JAX's cache, which takes no time to compile and complains of nothing; and a cache that
    is off from then on."""
    hits = []
    listen = lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    jax.monitoring.register_event_listener(listen)

    def compile_once():
        jax.clear_caches()
        jax.jit(lambda x: x * 3 + 1).lower(jnp.float32(1)).compile()

    with compile_cache(str(tmp_path)):
        for _ in range(2):  # JAX decides at a program whether it keeps programs, then keeps to it
            compile_once()
            hits.clear()
            jax.clear_caches()
            assert moved(P(STAGE, FSDP), P(None, (STAGE, FSDP, TENSOR)))[1] != []
            assert hits == []
        compile_once()
        assert hits != []


def test_an_exchange_that_the_partitioner_made_up_is_told():
    """Catches an array that moves between two lines of ours, and nobody asked for it."""
    found, said = moved(P((STAGE, FSDP)), P((FSDP, TENSOR)))
    assert said == []
    assert len(found) == 1
    assert re.match(r"collective-permute of \d.* bytes over (devices along no mesh axes|stage\*)", found[0])


def test_what_the_compiler_logs_besides_is_shown(capfd):
    """Catches words of C++ that are swallowed, and a standard error that is not given back."""
    with compiled.heard() as text:
        os.write(2, b"meanwhile\n")
    os.write(2, b"afterwards\n")
    assert (text, capfd.readouterr().err) == (["meanwhile\n"], "afterwards\n")
    alarm = "W1121 15:04:00.288515    3169 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. Of x."
    chatter = "W1121 15:04:35.683576    3552 llo_module.h:502] The log function has NOT been set for the LloModule."
    chatter += "\nW1124 21:57:40.912625    8074 lowering_emitter.cc:6105] Successful retry compilation of fusion.371"
    other = "E1121 15:08:49.088523    4090 slow_operation_alarm.cc:73] Very slow compile?\nnext line\n"
    found, rest = compiled.complaints(f"{alarm} As the last resort, SPMD will\n{chatter}\n{other}")
    assert (found, rest) == (["[SPMD] Involuntary full rematerialization. Of x."], other)


@pytest.mark.parametrize("kind, scope, payload_bytes, ours", [
    ("all-gather", "jit(step)/shard_map/all_gather", 4000, True),
    ("all-reduce", "jit(step)/reduce_sum", 40, True),  # the gradient's norm
    ("all-reduce", "jit(step)/reduce_sum", 4000, True),  # merged with a reduce-scatter of ours
    ("all-to-all", "jit(step)/transpose", 4000, False),
    ("all-gather", "", 40, True),  # a metric
    ("all-gather", "", 4000, False),  # parameters that leave in another layout
    ("all-reduce", "", 4000, True),  # a reduce-scatter, as TPU writes it
])  # fmt: skip
def test_what_is_ours(kind, scope, payload_bytes, ours):
    """Catches a list that is never empty, so that nobody reads it, and one that misses what moves outside."""
    one = ledger.Collective(kind, (FSDP,), payload_bytes, "f32", 0, 1, False, "?", scope)
    assert (compiled.unexpected([one], most_bytes=100) == []) == ours
    nowhere = ledger.Collective(kind, ("?",), payload_bytes, "f32", 0, 1, False, "?", scope)
    assert compiled.unexpected([nowhere], most_bytes=100)[0].split(" (")[0].endswith("along no mesh axes")


# The step -------------------------------------------------------------------------------------------------------------


def test_the_trainers_step_holds_what_it_should():
    """Catches a step whose state is not donated, or that moves what no line of ours asks for; silence while it works;
    and memory of another program than the ledger's."""
    cfg = preset("tiny", **{"mesh": "fsdp=2,tensor=2", "model.n_layers": 3, "data.seq_len": 16})
    mesh, said = sharding.make_mesh(cfg.mesh), []
    found = compiled.compile_step(cfg, mesh, said.append)
    assert found.unexpected == []
    assert found.alias_bytes == state_bytes(cfg, mesh)
    tokens_bytes = 5 * 4 * cfg.data.batch_size // 2 * cfg.data.seq_len
    assert found.argument_bytes == found.alias_bytes + tokens_bytes
    assert found.peak_bytes == found.argument_bytes + found.temp_bytes + found.output_bytes - found.alias_bytes
    assert found.ledger.total.count > 0
    assert found.shares == {"not_finite": 0.0}
    assert [line.split(" in ")[0] for line in said] == ["lowered", "compiled"]


def state_bytes(cfg, mesh):
    """Of the state's slices on one device."""
    shapes, places = optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh)
    slices = jax.tree.map(lambda x, place: np.prod(place.shard_shape(x.shape)) * x.dtype.itemsize, shapes, places)
    return sum(jax.tree.leaves(slices))


def test_without_libtpu_its_name_is_said(monkeypatch):
    """Catches a ModuleNotFoundError, or a mesh of the devices that happen to be here."""
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    message = "compiling for v4:2x2x1 needs libtpu; install it with: make extra-tpu"
    with pytest.raises(UserError, match=f"^{message}$"):
        compiled.topology_mesh(MeshConfig(fsdp=4), "v4:2x2x1")
