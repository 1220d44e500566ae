"""Tests of compiled steps: errors and warnings of the compiler are reported, and its other output is not hidden."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import optimizer
import sharding
from compile import ledger
from config import MeshConfig, preset
from devices import compile_cache
from plan.trace import compiled
from sharding import FSDP, STAGE, TENSOR
from utils import UserError

GIB = 2**30

# Out of memory --------------------------------------------------------------------------------------------------------

# An exception of libtpu 0.0.42, then its log, with shortened tables.
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
# The exception if the program only fails to fit once its buffers have addresses.
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


def test_the_short_out_of_memory_message_is_parsed():
    """Catches a wording that the parser does not know: libtpu has several."""
    error = compiled.out_of_memory(QUICK, "less")
    assert (error.used_bytes, error.limit_bytes) == (round(103.53 * GIB), round(30.75 * GIB))
    assert (error.excess_bytes, error.buffers) == (error.used_bytes - error.limit_bytes, [])
    assert str(error) == "out of memory: one device needs 103.53 GiB and has 30.75 GiB, 72.78 GiB too little; use less"


def test_the_logged_report_names_the_largest_buffers():
    """Catches a report that is ignored, a duplicate buffer, and MiB parsed as GiB."""
    error = compiled.out_of_memory(QUICK + "\n" + REPORT, "less")
    shapes = ["(), 2×bf16[128256,4096], 5×f32[8,1,1,32,256,8192]", "5×f32[8,1,1,32,256,7936]", "bf16[4096,128256]"]
    assert [buffer.shape for buffer in error.buffers] == shapes
    assert [buffer.size_bytes for buffer in error.buffers] == [2 * GIB, round(1.94 * GIB), 1002 * 2**20]
    assert "; largest buffers: 2.00 GiB (), 2×bf16" in str(error)


def test_the_long_out_of_memory_message_is_parsed():
    """Catches buffers in the compiler's order instead of by size, and a buffer without an operator that gets the
    operator of the next one."""
    error = compiled.out_of_memory(LONG, "less")
    assert (error.used_bytes, error.limit_bytes) == (round(40.1 * GIB), round(30.75 * GIB))
    assert error.buffers == [
        (2.25 * GIB, "f32[9,64,1024,1024]", "", ""),
        (576 * 2**20, "bf16[4,36,1024,2048]", "jit(step)/shard_map/while/body/dot_general", "model.py:412"),
    ]
    assert str(error).endswith(
        "9.35 GiB too little; largest buffers: 2.25 GiB f32[9,64,1024,1024]; 0.56 GiB bf16[4,36,1024,2048] in "
        "jit(step)/shard_map/while/body/dot_general (model.py:412); use less"
    )


@pytest.mark.parametrize("settings, advice", [
    ({}, "work.remat=full or a smaller work.device_batch or a larger fsdp axis"),
    ({"work.remat": "full", "work.gather": "step", "mesh": "stage=2", "data.batch_size": 4},
     "work.gather=layer or work.schedule=1f1b or a larger fsdp axis"),
])  # fmt: skip
def test_advice_omits_settings_already_in_use(settings, advice):
    """Catches advice to change a setting that already has the recommended value."""
    assert compiled.advice(preset("tiny", **settings)) == advice


class Refused:
    """A lowered program whose compiler logs a message and fails."""

    def __init__(self, message, logged=b""):
        self.message, self.logged = message, logged

    def compile(self):
        os.write(2, self.logged)
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize("message", [
    "INTERNAL: Mosaic failed to compile",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.00M of 16.00M vmem.",
])  # fmt: skip
def test_other_compiler_errors_propagate_unchanged(message, capfd):
    """Catches another failure that is reported as out of memory, a lost compiler log, and a JAX setting that is not
    restored."""
    before = jax.config.jax_enable_compilation_cache
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        compiled.compile_lowered(Refused(message, b"some words\n"))
    assert capfd.readouterr().err == "some words\n"
    assert jax.config.jax_enable_compilation_cache == before


def test_buffers_are_parsed_from_the_log(capfd):
    """Catches a long report printed to standard error, and buffers that only this report contains."""
    with pytest.raises(compiled.OutOfMemory, match=r"0\.98 GiB bf16\[4096,128256\]; use a smaller program"):
        compiled.compile_lowered(Refused(QUICK, REPORT.encode()))
    assert capfd.readouterr().err == ""


# What should not be in a program --------------------------------------------------------------------------------------


def moved(start: P, end: P):
    """Compile a program that moves an array [16, 24, 32] from one layout to another; return its collectives."""
    mesh = sharding.make_mesh("stage=2,fsdp=2,tensor=2")
    places = [NamedSharding(mesh, spec) for spec in (start, end)]
    move = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, places[1]), in_shardings=places[0])
    step, warnings = compiled.compile_lowered(move.lower(jax.ShapeDtypeStruct((16, 24, 32), jnp.float32)))
    return compiled.unexpected(ledger.read(step.as_text(), mesh).collectives, most_bytes=100), warnings


def test_a_layout_change_by_copying_is_reported(capfd):
    """Catches XLA's warning that it gathers the entire array, if it is only printed and not reported."""
    lines, warnings = moved(P(STAGE, FSDP), P(None, (STAGE, FSDP, TENSOR)))
    assert len(warnings) == 1
    assert re.match(r"\[SPMD\] Involuntary full rematerialization\. .* for HLO operation .*\.$", warnings[0])
    place = r"\(jit\(<lambda>\)/mul, test_compiled\.py:\d+ in moved"
    assert any(re.match(rf"all-gather of [\d,]+ bytes over (stage|fsdp).* {place}", line) for line in lines), lines
    assert capfd.readouterr().err == ""


def test_compiling_bypasses_the_cache(tmp_path):
    """Catches a program from JAX's cache, which has no compile time and no warnings, and a cache that stays off
    afterwards."""
    hits = []
    listen = lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    jax.monitoring.register_event_listener(listen)

    def compile_once():
        jax.clear_caches()
        jax.jit(lambda x: x * 3 + 1).lower(jnp.float32(1)).compile()

    with compile_cache(str(tmp_path)):
        for _ in range(2):  # JAX decides at its first program whether to use the cache
            compile_once()
            hits.clear()
            jax.clear_caches()
            assert moved(P(STAGE, FSDP), P(None, (STAGE, FSDP, TENSOR)))[1] != []
            assert hits == []
        compile_once()
        assert hits != []


def test_a_collective_added_by_the_partitioner_is_reported():
    """Catches an unreported transfer that our code does not contain."""
    lines, warnings = moved(P((STAGE, FSDP)), P((FSDP, TENSOR)))
    assert warnings == []
    assert len(lines) == 1
    assert re.match(r"collective-permute of \d.* bytes over (devices along no mesh axes|stage\*)", lines[0])


def test_other_compiler_logs_are_shown(capfd):
    """Catches lost C++ output, and a standard error that is not restored."""
    with compiled.captured_stderr() as text:
        os.write(2, b"meanwhile\n")
    os.write(2, b"afterwards\n")
    assert (text, capfd.readouterr().err) == (["meanwhile\n"], "afterwards\n")
    alarm = "W1121 15:04:00.288515    3169 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. Of x."
    chatter = "W1121 15:04:35.683576    3552 llo_module.h:502] The log function has NOT been set for the LloModule."
    chatter += "\nW1124 21:57:40.912625    8074 lowering_emitter.cc:6105] Successful retry compilation of fusion.371"
    other = "E1121 15:08:49.088523    4090 slow_operation_alarm.cc:73] Very slow compile?\nnext line\n"
    found, rest = compiled.layout_warnings(f"{alarm} As the last resort, SPMD will\n{chatter}\n{other}")
    assert (found, rest) == (["[SPMD] Involuntary full rematerialization. Of x."], other)


@pytest.mark.parametrize("kind, scope, payload_bytes, ours", [
    ("all-gather", "jit(step)/shard_map/all_gather", 4000, True),
    ("all-reduce", "jit(step)/reduce_sum", 40, True),  # the gradient norm
    ("all-reduce", "jit(step)/reduce_sum", 4000, True),  # merged with one of our reduce-scatters
    ("all-to-all", "jit(step)/transpose", 4000, False),
    ("all-gather", "", 40, True),  # a metric
    ("all-gather", "", 4000, False),  # parameters that the step returns in another layout
    ("all-reduce", "", 4000, True),  # a reduce-scatter, as rewritten on TPU
])  # fmt: skip
def test_expected_collectives_are_not_reported(kind, scope, payload_bytes, ours):
    """Catches false alarms, and a missing report of a transfer outside shard_map."""
    one = ledger.Collective(kind, (FSDP,), payload_bytes, "f32", 0, 1, False, "?", scope)
    assert (compiled.unexpected([one], most_bytes=100) == []) == ours
    nowhere = ledger.Collective(kind, ("?",), payload_bytes, "f32", 0, 1, False, "?", scope)
    assert compiled.unexpected([nowhere], most_bytes=100)[0].split(" (")[0].endswith("along no mesh axes")


def test_only_sums_over_data_are_expected_between_slices():
    """Catches weights sent between slices, and false alarms in a program of slices, where no collective has a scope."""
    between, across = "data between slices", "fsdp between slices"
    one = lambda kind, axis: ledger.Collective(kind, (axis,), 4000, "f32", 0, 1, True, "?", "")
    reported = lambda *found: [line.split(" of ")[0] for line in compiled.unexpected([*found], most_bytes=100)]
    assert reported(one("all-reduce", between), one("all-gather", FSDP)) == []
    assert reported(one("all-gather", across), one("all-gather", FSDP)) == []
    assert reported(one("all-reduce", between), one("all-gather", between)) == ["all-gather"]
    assert reported(one("all-reduce", FSDP), one("all-gather", FSDP)) == ["all-gather"]


# The step -------------------------------------------------------------------------------------------------------------


def test_the_memory_and_collectives_of_a_training_step():
    """Catches a step whose state is not donated, unexpected collectives, missing progress messages, and memory of
    another program than the ledger's."""
    cfg = preset("tiny", **{"mesh": "fsdp=2,tensor=2", "model.n_layers": 3, "data.seq_len": 16})
    mesh, messages = sharding.make_mesh(cfg.mesh), []
    found = compiled.compile_step(cfg, mesh, messages.append)
    assert found.unexpected == []
    assert found.alias_bytes == state_bytes(cfg, mesh)
    tokens_bytes = 5 * 4 * cfg.data.batch_size // 2 * cfg.data.seq_len
    assert found.argument_bytes == found.alias_bytes + tokens_bytes
    assert found.peak_bytes == found.argument_bytes + found.temp_bytes + found.output_bytes - found.alias_bytes
    assert found.ledger.total.count > 0
    assert found.shares == {"not_finite": 0.0}
    assert [line.split(" in ")[0] for line in messages] == ["lowered", "compiled"]


def state_bytes(cfg, mesh):
    """Count the bytes of the state's local shards."""
    shapes, places = optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh)
    slices = jax.tree.map(lambda x, place: np.prod(place.shard_shape(x.shape)) * x.dtype.itemsize, shapes, places)
    return sum(jax.tree.leaves(slices))


def test_a_missing_libtpu_raises_a_user_error(monkeypatch):
    """Catches a ModuleNotFoundError, and a mesh of local devices."""
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    message = "compiling for v4:2x2x1 needs libtpu; install it with: make extra-tpu"
    with pytest.raises(UserError, match=f"^{message}$"):
        compiled.topology_mesh(MeshConfig(fsdp=4), "v4:2x2x1")
