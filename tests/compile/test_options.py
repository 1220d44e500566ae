"""Compiler options: one set per platform, changed by the user's, and an error for unknown ones."""

import re
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import optimizer
import sharding
from compile import options
from config import MeshConfig, preset
from plan.trace import compiled
from utils import UserError


def mesh_of(platform, kind="", devices=2, **shape):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    return types.SimpleNamespace(devices=np.array([device] * devices), shape=shape)


def test_the_users_options_come_last():
    """Catches an option that cannot be changed or removed, and one that goes to another platform's compiler."""
    ours = options.compiler_options(mesh_of("tpu"))
    assert ours["xla_enable_async_all_gather"] is True
    name = "xla_tpu_relayout_group_size_threshold_for_reduce_scatter"
    changed = options.compiler_options(mesh_of("tpu"), f"xla_enable_async_all_gather=, {name}=4,xla_new=false")
    assert changed == {k: v for k, v in ours.items() if k != "xla_enable_async_all_gather"} | {
        name: "4", "xla_new": False}  # fmt: skip
    for other in "cpu", "another":
        assert options.compiler_options(mesh_of(other)) == options.compiler_options(mesh_of(other, tensor=2)) == {}


OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_all_gather"


def test_each_chip_has_its_own_options():
    """Catches v4's options on every TPU, because on v5p and v6e they overlap no gather or scatter; options that fuse
    a collective with matmuls, which libtpu warns may give wrong results; and overlap options for a single GPU."""
    told = {kind: options.compiler_options(mesh_of("tpu", kind, fsdp=2)) for kind in (
        "TPU v4", "TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x")}  # fmt: skip
    assert [kind for kind in told if OFFLOAD in told[kind]] == ["TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"]
    assert told["TPU v4"] == told["TPU7x"] == options.compiler_options(mesh_of("tpu", "TPU v9", tensor=2))
    assert told["TPU v5 lite"] == told["TPU7x"] | {"xla_tpu_enable_async_all_to_all": True}
    assert not any("async_collective_fusion" in name for ours in told.values() for name in ours)
    assert OFFLOAD not in options.compiler_options(mesh_of("tpu", "TPU v5"), f"{OFFLOAD}=")
    assert options.compiler_options(mesh_of("gpu")) == {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert options.compiler_options(mesh_of("gpu", devices=1)) == {}


def test_options_for_gpus_are_known_to_jaxlib():
    """Catches a misspelled GPU option on a machine without one: jaxlib has one list of options for CPUs and GPUs."""
    double = lambda told: jax.jit(lambda x: x + x, compiler_options=told).lower(1.0).compile()
    double(options.compiler_options(mesh_of("gpu")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        double({"xla_gpu_enable_latency_hiding_schedule": True})


def test_an_option_unknown_to_the_compiler_gives_a_one_line_error():
    """Catches an older libtpu's error about one of our options that blames the user's flags."""
    message = rf"^this machine's compiler does not know the option {OFFLOAD} .* make extra-tpu\), or .* {OFFLOAD}=$"
    with pytest.raises(UserError, match=message), options.option_errors():  # the CPU's compiler has no TPU options
        jax.jit(lambda x: x + x, compiler_options={OFFLOAD: True}).lower(1.0).compile()


@pytest.mark.parametrize("text, part", [("xla_a", "xla_a"), ("xla_a=1, =2", "=2")])
def test_malformed_options_are_refused(text, part):
    """Catches a misspelled option that is ignored."""
    with pytest.raises(UserError, match=rf"run.compiler_options='{text}': '{part}' must be NAME=VALUE, or NAME= to"):
        options.compiler_options(mesh_of("cpu"), text)


@pytest.mark.parametrize("option, words", [
    ("xla_nonsense=1", "No such compile option: 'xla_nonsense'"),
    ("xla_cpu_enable_fast_math=perhaps", "xla_cpu_enable_fast_math, 'perhaps' is not a valid bool"),
])  # fmt: skip
def test_trainer_and_planner_refuse_alike(option, words):
    """Catches a traceback for an unknown option, and a planner whose options differ from the trainer's."""
    cfg = preset("tiny", **{"run.compiler_options": option})
    mesh = sharding.make_mesh(cfg.mesh)
    with pytest.raises(
        UserError, match=rf"run.compiler_options: INVALID_ARGUMENT: .*{words}.*; NAME= removes an option"
    ):
        compiled.compile_step(cfg, mesh)
    state, batch = compiled.shapes(cfg, mesh)
    with pytest.raises(UserError, match=words), options.option_errors():
        optimizer.train_step(cfg, mesh).lower(state, batch).compile()


@pytest.mark.tpu
@pytest.mark.parametrize("mesh, wanted", [("fsdp=16", True), ("fsdp=8,tensor=2", False), ("fsdp=4,context=4", False)])
def test_only_all_to_alls_over_a_whole_slice_are_asynchronous(mesh, wanted):
    """Catches an option with which libtpu refuses Llama 3 8B on v5e:8x8 over fsdp=16,tensor=4."""
    found = options.compiler_options(compiled.topology_mesh(MeshConfig.parse(mesh), "v5e:4x4"))
    assert ("xla_tpu_enable_async_all_to_all" in found) == wanted


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_tpu_generation_accepts_our_options(topology):
    """Catches an option that libtpu no longer knows, or warns about, on one generation."""
    data = 2 if topology.startswith("tpu7x") else 1  # devices per chip
    mesh = compiled.topology_mesh(MeshConfig(data=data, fsdp=2, tensor=2), topology)
    x = jax.ShapeDtypeStruct((256, 384), np.float32, sharding=NamedSharding(mesh, P("fsdp")))

    def warnings(told):
        with compiled.captured_stderr() as text:
            jax.jit(lambda x: x @ x.T, compiler_options=told).lower(x).compile()
        return set(re.findall(r"\b(\w+\.cc:\d+)\] (?!No hardware is found)", "".join(text)))  # there is none

    assert warnings(options.compiler_options(mesh)) <= warnings({})
