"""Compile the trainer's step for devices that need not be attached: simulated CPU devices, or a TPU slice.

libtpu (`make extra-tpu`) compiles for any TPU slice on a machine without a TPU. The result is the program that the
slice would run, with its memory, collectives and FLOPs. Only to measure time do you need the slice itself.
"""

import contextlib
import importlib.util
import math
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

import optimizer
import pipeline
import sharding
from architectures import architecture, busiest_stage
from compile import ledger, options
from config import Config, MeshConfig
from config.fields import parse_outer, parse_pipeline
from devices import compile_cache
from pipeline import fit
from pipeline.step import BATCH_NAMES
from plan.chips import hardware
from plan.chips.hardware import Topology
from utils import UserError


@dataclass(frozen=True)
class Compiled:
    """A compiled training step and its sizes in bytes on one device."""

    lower_s: float
    compile_s: float
    argument_bytes: int  # parameters, optimizer and batch
    temp_bytes: int  # everything that is not an argument or a result
    output_bytes: int
    alias_bytes: int  # donated arguments, whose memory the results reuse
    peak_bytes: int
    ledger: ledger.Ledger
    shares: dict  # fractions of executions of conditionals that `ledger` uses: see `shares`
    unexpected: list[str]  # collectives that should not be in the program, one line each: see `unexpected`
    step: jax.stages.Compiled


# Out of memory --------------------------------------------------------------------------------------------------------


class Buffer(NamedTuple):
    size_bytes: int
    shape: str  # of the array, or of all arrays that reuse this buffer
    scope: str = ""  # named scopes of the operation that creates it, if the compiler reports them
    source: str = ""  # "model.py:123"


class OutOfMemory(UserError):
    """The step does not fit in memory. Sizes are in bytes on one device; `buffers` are in decreasing order of size."""

    def __init__(self, used_bytes: int, limit_bytes: int, buffers: list[Buffer], advice: str):
        self.used_bytes, self.limit_bytes, self.excess_bytes = used_bytes, limit_bytes, used_bytes - limit_bytes
        self.buffers = buffers
        gib = lambda n: f"{n / 2**30:,.2f} GiB"
        largest = "; ".join(
            f"{gib(b.size_bytes)} {b.shape}" + f" in {b.scope}" * bool(b.scope) + f" ({b.source})" * bool(b.source)
            for b in buffers[:3]
        )
        super().__init__(
            f"out of memory: one device needs {gib(used_bytes)} and has {gib(limit_bytes)}, "
            f"{gib(self.excess_bytes)} too little; " + f"largest buffers: {largest}; " * bool(largest) + f"use {advice}"
        )


SIZE = r"([\d.]+[BKMGT]?)i?B?"
NEEDED = (
    rf"total memory required for HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)",
    rf"Used {SIZE} of {SIZE} hbm",
)
# An entry of "Largest program allocations", and a row of a table of buffers that several arrays reuse.
ENTRY = rf"\d+\. Size: {SIZE}\n((?:[ \t]+\S.*\n?)*)"
ROW = rf"^ *{SIZE}\( *\d+%\); +{SIZE}; +\d+; +\d+; (.*)$"


def out_of_memory(text: str, advice: str) -> OutOfMemory | None:
    """Parse libtpu's out-of-memory exception and the report that it logs; None if the text is about another error."""
    match = next((match for pattern in NEEDED if (match := re.search(pattern, text))), None)
    return match and OutOfMemory(_bytes(match[1]), _bytes(match[2]), buffers(text), advice)


def buffers(text: str) -> list[Buffer]:
    """Parse the largest buffers from libtpu's report, without duplicates."""
    parsed = []
    for size, lines in re.findall(ENTRY, text):
        read = lambda pattern, lines=lines: (re.search(pattern, lines) or ["", ""])[1]
        file, line = read(r'source_file="([^"]*)"'), read(r"source_line=(\d+)")
        source = f"{os.path.basename(file)}:{line}" if file else ""
        parsed.append(Buffer(_bytes(size), read(r"Shape: ([^\s{]+)"), read(r'op_name="([^"]*)"'), source))
    for _, size, shapes in re.findall(ROW, text, re.MULTILINE):
        parsed.append(Buffer(_bytes(size), shapes))
    return sorted(dict.fromkeys(parsed), key=lambda buffer: -buffer.size_bytes)


def _bytes(text: str) -> int:
    """Parse a size: 29.30G, 576.0K, 512B or 0."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMGT]?)", text).groups()
    return round(float(number) * 1024 ** "BKMGT".index(unit or "B"))


def advice(cfg: Config) -> str:
    """List settings that would reduce memory and are not yet in use, joined by "or"."""
    split, work, stages = fit.split_batch(cfg), cfg.work.resolved, cfg.mesh.stage > 1
    remedies = {
        "work.remat=full": work.remat != "full",
        "work.gather=layer": work.gather != "layer",
        "work.schedule=1f1b": stages and work.schedule in ("gpipe", "zb"),
        "more work.microbatches": stages and split.device_batch > 1,
        "a smaller work.device_batch": not stages and split.device_batch > 1,
        "a larger fsdp axis": True,
    }
    return " or ".join(remedy for remedy, helps in remedies.items() if helps)


# Devices that are not attached ----------------------------------------------------------------------------------------


def topology_mesh(sizes: MeshConfig, topology: str) -> Mesh:
    """Arrange the devices of a slice, like v4:2x4x4, along the mesh axes, innermost axes on nearest neighbors.

    Raises: UserError without libtpu, for a slice that libtpu does not know, and for a wrong number of devices.
    """
    parsed = Topology.parse(topology)
    check_compiles_for(parsed)
    hardware.require_devices(sizes, parsed)
    return sharding.make_mesh(sizes, topology_devices(parsed))


def check_compiles_for(topology: Topology) -> None:
    """Raises: UserError if the topology is not a TPU slice, or if libtpu is missing."""
    if not topology.chip.torus_dims:
        raise UserError(f"topology {str(topology)!r}: compiling for devices that are not attached works only for TPUs; "
                        "use a slice like v4:2x4x4, v5p:4x4x4, v5e:4x4, v6e:8x8 or tpu7x:2x2x2")  # fmt: skip
    if not importlib.util.find_spec("libtpu"):
        raise UserError(f"compiling for {topology} needs libtpu; install it with: make extra-tpu")


def topology_devices(topology: Topology) -> list:
    """Return libtpu's descriptions of the devices of TPU slices, which need not be attached.

    Raises: UserError without libtpu, and for a slice that libtpu does not know.
    """
    check_compiles_for(topology)
    # Without these variables, libtpu queries the network for this machine's slice, and writes log files. With log level
    # 1 it prints its warnings, which `layout_warnings` parses.
    quiet = dict(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost",
                 TPU_ACCELERATOR_TYPE="v4-8", TPU_LOG_DIR="disabled", TPU_STDERR_LOG_LEVEL="1")  # fmt: skip
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    cloud = topology.one_slice.cloud
    one_host = cloud.shape in ((1, 1), (2, 4))  # a host of 1 or 8 chips
    more = {"chips_per_host_bounds": (*cloud.shape, 1)} if one_host else {}
    if topology.chip.key == "v4":  # the two cores of a chip work as one device, the default of other generations
        more = dict(chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1))
    if topology.slices > 1:
        more["num_slices"] = topology.slices
    # By default libtpu assumes that no axis wraps around, and turns all-gathers over a whole torus into all-reduces.
    wrap = (*cloud.wraps, False)[:3]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=str(cloud), wrap=wrap, **more).devices
    except Exception as error:  # libtpu raises its own type
        reason = str(error).splitlines()[0]
        raise UserError(f"topology {str(topology)!r}: libtpu reports {reason!r}; upgrade libtpu, or "
                        "use a slice like v4:2x4x4, v5p:4x4x4 or v5e:4x4") from error  # fmt: skip


# The step -------------------------------------------------------------------------------------------------------------


def shapes(cfg: Config, mesh: Mesh):
    """Return the state and a batch as trees of ShapeDtypeStruct with shardings."""
    describe = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    state = jax.tree.map(describe, optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    place = NamedSharding(mesh, sharding.BATCH_SPEC)
    return state, {name: describe(x, place) for name, x in batch_shapes(cfg).items()}


def batch_shapes(cfg: Config) -> dict[str, jax.ShapeDtypeStruct]:
    lengths, dtype = {"BT": cfg.data.seq_len, "BS": cfg.data.input_len}, {"weights_BT": np.float32}
    return {name: jax.ShapeDtypeStruct((cfg.data.batch_size, lengths[name[-2:]]), dtype.get(name, np.int32))
            for name in (*BATCH_NAMES, *architecture(cfg.model).batch)}  # fmt: skip


def compile_step(cfg: Config, mesh: Mesh, say=lambda text: None) -> Compiled:
    """Lower and compile the training step of main.py, and analyze the program.

    say  called with each progress message
    Raises: OutOfMemory; UserError for settings that do not fit the mesh.
    """
    fit.check(cfg.model, cfg.mesh, cfg.work)
    begin = time.perf_counter()
    state, batch = shapes(cfg, mesh)
    lowered, whole, outer, held = optimizer.train_step(cfg, mesh).lower(state, batch), mesh, [], 0
    if cfg.optim.outer:  # the step of the first replica; while it runs, a device also holds the outer state
        lowered, mesh, outer = lowered.steps[0], lowered.meshes[0], lowered.outer
        outer_state = jax.tree.leaves((state.params, state.optimizer))
        held = sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in outer_state)
    lower_s, begin = time.perf_counter() - begin, time.perf_counter()
    device = mesh.devices.flat[0]
    usually = ", usually 1 to 3 minutes" * (device.platform == "tpu")
    say(f"lowered in {lower_s:.1f} s; compiling for {mesh.size} x {device.device_kind}{usually} ...")
    step, warnings = compile_lowered(lowered, advice(cfg))
    compile_s = time.perf_counter() - begin
    say(f"compiled in {compile_s:.1f} s")
    memory, text = step.memory_analysis(), step.as_text()
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + held
    # The TPU compiler reports the peak of live bytes, which determines whether the step fits, and may be less than
    # `temp_bytes`. The CPU compiler does not report it.
    peak_bytes = memory.peak_memory_in_bytes + held if device.platform == "tpu" else live + memory.temp_size_in_bytes
    known = shares(cfg, text)
    counted = ledger.read(text, mesh, known)
    for one in outer:
        found = ledger.read(compile_lowered(one)[0].as_text(), whole).collectives
        found = [replace(x, count=x.count / parse_outer(cfg.optim.outer).every) for x in found]
        counted = replace(counted, collectives=counted.collectives + found)
    return Compiled(
        lower_s, compile_s, memory.argument_size_in_bytes + held, memory.temp_size_in_bytes,
        memory.output_size_in_bytes, memory.alias_size_in_bytes, peak_bytes, counted, known,
        unexpected(counted.collectives, reported_bytes(cfg)) + warnings, step,
    )  # fmt: skip


def compile_lowered(lowered, advice: str = "a smaller program") -> tuple[jax.stages.Compiled, list[str]]:
    """Compile, and return the program and the compiler's layout warnings; see `layout_warnings`.

    Raises: OutOfMemory. Other errors of the compiler propagate unchanged.
    """
    try:
        # The compilation cache is off because a cached program would have no compile time and no warnings.
        with options.option_errors(), compile_cache(""), captured_stderr() as log:
            step = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = out_of_memory("\n".join([str(error), *log]), advice)
        if refusal:
            raise refusal from error
        sys.stderr.write("".join(log))
        raise
    warnings, rest = layout_warnings("".join(log))
    sys.stderr.write(rest)
    return step, warnings


@contextlib.contextmanager
def captured_stderr():
    """Capture in a list everything that is written to file descriptor 2, including C++ output."""
    text = []
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


LOGGED = r"^[IWEF]\d{4} [\d:.]+ +\d+ "  # start of a C++ log line: severity, time, thread; then file:line] text
ALARM = r"(\[spmd\] involuntary full rematerialization.*?|\[sharding_fusion\].*?)(?: As the last resort,.*)?$"
# Warnings that are meant for libtpu's developers.
CHATTER = rf"{LOGGED}(tpu_|llo_|deepsea_|lowering_emitter|shardy_xla_pass|barrier_assignment)\S*\] "


def layout_warnings(text: str) -> tuple[list[str], str]:
    """Split the compiler's log into warnings about layout changes that need copies, and the rest, without CHATTER."""
    warnings, rest = [], []
    for line in text.splitlines(keepends=True):
        alarm = re.search(ALARM, line.rstrip(), re.IGNORECASE)
        if alarm:
            warnings.append(alarm[1])
        elif not re.match(CHATTER, line):
            rest.append(line)
    return warnings, "".join(rest)


def unexpected(collectives: list[ledger.Collective], most_bytes: int) -> list[str]:
    """Describe the collectives that should not be in the program, one line each.

    Inside `shard_map` our code contains every collective explicitly, always along mesh axes. Outside it, XLA's
    partitioner adds all-reduces for the gradient norm, and sends the metrics of a step, at most `most_bytes` each. A
    larger collective would mean that an array is resharded.
    The compiler may also rewrite our collectives. On TPU a reduce-scatter may become a padded all-reduce and permutes,
    and several reductions may be merged, including that of the norm. So all reductions are expected, and permutes
    without a scope too. A program of several slices has no scopes, so only what `data` sends between them is checked.
    """
    several = any("between slices" in one.axes[0] for one in collectives)
    lines = []
    for one in collectives:
        a_sum = one.kind in ("all-reduce", "reduce-scatter") or (not one.scope and one.kind == "collective-permute")
        ours = "shard_map" in one.scope or a_sum or (several and one.axes[0] != "data between slices")
        if "?" in one.axes or (not ours and one.payload_bytes > most_bytes):
            over = "devices along no mesh axes" if "?" in one.axes else "*".join(one.axes)
            place = one.scope or "no scope"
            lines.append(f"{one.kind} of {one.payload_bytes:,} bytes over {over} ({place}, {one.source})")
    return lines


def reported_bytes(cfg: Config) -> int:
    """Return the bytes of the largest metric of a step: one number per parameter of each layer, or one per expert."""
    return 4 * (len(optimizer.layer_parameters(cfg)) + cfg.model.n_layers * max(cfg.model.n_experts, 1))


def shares(cfg: Config, text: str) -> dict:
    """Return the fraction of executions in which a step's conditionals do work, by named scope: see `ledger.read`.

    In a pipeline each slot of a tick (forward, loss, backward, weight gradients) does work once per microbatch and
    chunk of layers. If the first or last tick is compiled apart from the loop, it does one of these executions. The
    first stage embeds each microbatch once. In an encoder-decoder, a chunk is one of the two stacks.
    """
    conditionals = "\n".join(line for line in text.splitlines() if " conditional(" in line)
    return {scope: share for scope, share in slot_shares(cfg).items() if scope in conditionals}


def slot_shares(cfg: Config) -> dict:
    """Return the same for every conditional that a step may have; `program.read` ignores those that do not occur."""
    sched = pipeline.schedule(cfg)
    runs = dict.fromkeys(("forward_slot", "backward_slot", "weight_slot"), sched.microbatches * sched.chunks)
    runs |= dict.fromkeys(("loss_slot", "embed"), sched.microbatches)
    always = {"not_finite": 0.0, "stacks": ledger.IN_TURN, "full_or_window": window_split(cfg)}
    return {scope: lambda ticks, n=n: min(n / ticks, 1.0) for scope, n in runs.items()} | always


def window_split(cfg: Config) -> ledger.Split:
    """Return how often layers of the busiest stage attend to all positions, if the others have sliding windows."""
    counts = busiest_stage(cfg.model, cfg.mesh.stage, parse_pipeline(cfg.work.schedule)[1])
    return ledger.Split(sum(many for (_, full), many in counts.items() if full) / counts.total())
