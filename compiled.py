"""The trainer's own step, compiled for devices that need not be here: simulated CPU devices, or a TPU slice.

libtpu (`make extra-tpu`) compiles for any slice on a machine without a TPU. What comes out is what the slice would run:
its memory, its collectives, its FLOPs. Only seconds need the slice.
"""

import importlib.util
import os
import re
import time
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding

import ledger
import model
import optimizer
import pipeline
import sharding
from utils import AXES, Config, MeshConfig, UserError


@dataclass(frozen=True)
class Compiled:
    """One step of one device, as compiled. Sizes in bytes."""

    lower_s: float
    compile_s: float
    argument_bytes: int  # parameters, optimizer and batch
    temp_bytes: int  # everything that is not an argument or a result
    output_bytes: int
    alias_bytes: int  # arguments whose memory the results take over: donated
    ledger: ledger.Ledger
    step: jax.stages.Compiled

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


class OutOfMemory(UserError):
    """The compiler cannot fit the step. Sizes in bytes, of one device."""

    def __init__(self, message: str):
        used, limit = (_bytes(x) for x in re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", message).groups())
        self.used_bytes, self.limit_bytes = used, limit
        self.buffers = [
            (_bytes(size), shape, name)
            for size, name, shape in re.findall(
                r"Size: ([\d.]+\w)\n(?:\s+Operator: op_name=\"([^\"]*)\".*\n)?(?:\s+Shape: (\S+))?", message
            )
        ]
        gib = lambda n: f"{n / 2**30:,.2f} GiB"
        super().__init__(
            f"out of memory: one device needs {gib(used)} and has {gib(limit)}, {gib(used - limit)} too little"
        )


def _bytes(text: str) -> int:
    """Read 29.30G, 576.0K or 512B."""
    return round(float(text[:-1]) * 1024 ** "BKMGT".index(text[-1]))


# Devices that are not here --------------------------------------------------------------------------------------------


def topology_mesh(sizes: MeshConfig, topology: str) -> Mesh:
    """Arrange the chips of a slice, like v4:4x4x2, along the mesh axes, innermost axes on nearest neighbours.

    Raises: UserError without libtpu, for a slice it does not know, and for a mesh of another number of devices.
    """
    if not importlib.util.find_spec("libtpu"):
        raise UserError(f"compiling for {topology} needs libtpu; install it with: make extra-tpu")
    # Without these libtpu asks the network which machine of which slice this is.
    quiet = dict(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost",
                 TPU_ACCELERATOR_TYPE="v4-8", TPU_STDERR_LOG_LEVEL="3")  # fmt: skip
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    # A v4 chip has two cores that work as one device; other generations are so by default.
    v4 = dict(chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1)) if topology.startswith("v4:") else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **v4).devices
    except Exception as error:  # libtpu's own type, with what it knows
        raise UserError(f"topology {topology!r}: {str(error).splitlines()[0]}; known: v4:4x4x2, v5p:4x4x4, v5e:4x4, "
                        "v6e:8x8 and the like") from error  # fmt: skip
    if len(devices) != sizes.devices:
        raise UserError(f"mesh {sizes} has {sizes.devices} devices, and {topology} has {len(devices)} chips; "
                        "use axes whose product is that")  # fmt: skip
    shape = tuple(sizes.sizes.values())
    return Mesh(
        mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True),
        AXES, axis_types=(AxisType.Auto,) * len(AXES),
    )  # fmt: skip


# The step -------------------------------------------------------------------------------------------------------------


def shapes(cfg: Config, mesh: Mesh):
    """ShapeDtypeStruct, with its sharding, of the state and of a batch."""
    describe = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    state = jax.tree.map(describe, optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    place, shape = NamedSharding(mesh, sharding.BATCH_SPEC), (cfg.data.batch_size, cfg.data.seq_len)
    dtype = lambda name: np.float32 if name == "weights_BT" else np.int32
    return state, {name: jax.ShapeDtypeStruct(shape, dtype(name), sharding=place) for name in pipeline.BATCH_NAMES}


def compile_step(cfg: Config, mesh: Mesh, say=lambda text: None) -> Compiled:
    """Lower and compile the training step of main.py, and read what came out.

    say  called with a line of progress
    Raises: OutOfMemory; UserError for settings that do not fit the mesh.
    """
    sharding.check_divides(model.declare(cfg.model), mesh)
    begin = time.perf_counter()
    lowered = optimizer.train_step(cfg, mesh).lower(*shapes(cfg, mesh))
    lower_s, begin = time.perf_counter() - begin, time.perf_counter()
    say(f"lowered in {lower_s:.1f} s; compiling for {mesh.size} x {mesh.devices.flat[0].device_kind} ..")
    # A program that comes out of a cache says nothing of the time to compile it.
    was, _ = jax.config.jax_enable_compilation_cache, jax.config.update("jax_enable_compilation_cache", False)
    try:
        step = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        raise OutOfMemory(str(error)) from error
    finally:
        jax.config.update("jax_enable_compilation_cache", was)
    compile_s = time.perf_counter() - begin
    say(f"compiled in {compile_s:.1f} s")
    memory, text = step.memory_analysis(), step.as_text()
    return Compiled(
        lower_s, compile_s, memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes,
        memory.alias_size_in_bytes, ledger.read(text, mesh, shares(cfg, text)), step,
    )  # fmt: skip


def shares(cfg: Config, text: str) -> dict:
    """How often the conditionals of a step, by their named scopes, do something: see `ledger.read`.

    In a pipeline each slot of a tick does so once for each microbatch, and once for each chunk of the layers.
    """
    split = sharding.split_batch(cfg)
    microbatches = split.microbatches * split.accumulation
    runs = dict.fromkeys(("forward_slot", "backward_slot", "weight_slot"), microbatches * cfg.pipeline.chunks)
    runs["loss_slot"] = microbatches
    known = {scope: lambda ticks, n=n: n / ticks for scope, n in runs.items()} | {"not_finite": 0.0}
    conditionals = "\n".join(line for line in text.splitlines() if " conditional(" in line)
    return {scope: share for scope, share in known.items() if scope in conditionals}
