"""The trainer's own step, compiled for devices that need not be here: simulated CPU devices, or a TPU slice.

libtpu (`make extra-tpu`) compiles for any slice on a machine without a TPU. What comes out is what the slice would run:
its memory, its collectives, its FLOPs. Only seconds need the slice.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

import optimizer
import pipeline
import sharding
from config import Config, MeshConfig
from devices import compile_cache
from errors import UserError
from pipeline import fit
from pipeline.step import BATCH_NAMES
from plan import hardware
from plan.hardware import Topology
from xla import ledger, options


@dataclass(frozen=True)
class Compiled:
    """One step of one device, as compiled. Sizes in bytes."""

    lower_s: float
    compile_s: float
    argument_bytes: int  # parameters, optimizer and batch
    temp_bytes: int  # everything that is not an argument or a result
    output_bytes: int
    alias_bytes: int  # arguments whose memory the results take over: donated
    peak_bytes: int  # at the step's fullest
    ledger: ledger.Ledger
    shares: dict  # what `ledger` was read with: see `shares`
    unexpected: list[str]  # what should not be in the program, one line each: see `unexpected`
    step: jax.stages.Compiled


# Out of memory --------------------------------------------------------------------------------------------------------


class Buffer(NamedTuple):
    size_bytes: int
    shape: str  # of the array, or of the arrays that have this place in turn
    scope: str = ""  # named scopes of the operation that makes it, where the compiler says so
    source: str = ""  # "model.py:123"


class OutOfMemory(UserError):
    """The compiler cannot fit the step. Sizes in bytes, of one device; `buffers` are the largest first."""

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
            f"{gib(self.excess_bytes)} too little; " + f"largest buffers: {largest}; " * bool(largest) + f"try {advice}"
        )


SIZE = r"([\d.]+[BKMGT]?)i?B?"
NEEDED = (
    rf"total memory required for HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)",
    rf"Used {SIZE} of {SIZE} hbm",
)
# An entry of "Largest program allocations"; and a row of a table of places, which arrays have in turn.
ENTRY = rf"\d+\. Size: {SIZE}\n((?:[ \t]+\S.*\n?)*)"
ROW = rf"^ *{SIZE}\( *\d+%\); +{SIZE}; +\d+; +\d+; (.*)$"


def out_of_memory(text: str, advice: str) -> OutOfMemory | None:
    """Read what libtpu says when a program does not fit into a chip: its exception, and a report it logs; None if it
    says something else."""
    found = next((match for pattern in NEEDED if (match := re.search(pattern, text))), None)
    return found and OutOfMemory(_bytes(found[1]), _bytes(found[2]), buffers(text), advice)


def buffers(text: str) -> list[Buffer]:
    """The largest buffers named in what libtpu says, each once."""
    found = []
    for size, lines in re.findall(ENTRY, text):
        of = lambda pattern, lines=lines: (re.search(pattern, lines) or ["", ""])[1]
        file, line = of(r'source_file="([^"]*)"'), of(r"source_line=(\d+)")
        source = f"{os.path.basename(file)}:{line}" if file else ""
        found.append(Buffer(_bytes(size), of(r"Shape: ([^\s{]+)"), of(r'op_name="([^"]*)"'), source))
    for _, size, shapes in re.findall(ROW, text, re.MULTILINE):
        found.append(Buffer(_bytes(size), shapes))
    return sorted(dict.fromkeys(found), key=lambda buffer: -buffer.size_bytes)


def _bytes(text: str) -> int:
    """Read 29.30G, 576.0K, 512B or 0."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMGT]?)", text).groups()
    return round(float(number) * 1024 ** "BKMGT".index(unit or "B"))


def advice(cfg: Config) -> str:
    """Settings that would take less memory, and are not yet as they should be."""
    split, work, stages = fit.split_batch(cfg), cfg.work.settled, cfg.mesh.stage > 1
    remedies = {
        "work.remat=full": work.remat != "full",
        "work.gather=layer": work.gather != "layer",
        "work.schedule=1f1b": stages and work.schedule in ("gpipe", "zb"),
        "more work.microbatches": stages and split.device_batch > 1,
        "a smaller work.device_batch": not stages and split.device_batch > 1,
        "a larger fsdp axis": True,
    }
    return " or ".join(remedy for remedy, helps in remedies.items() if helps)


# Devices that are not here --------------------------------------------------------------------------------------------


def topology_mesh(sizes: MeshConfig, topology: str) -> Mesh:
    """Arrange the devices of a slice, like v4:2x4x4, along the mesh axes, innermost axes on nearest neighbours.

    Raises: UserError without libtpu, for a slice it does not know, and for a mesh of another number of devices.
    """
    asked = Topology.parse(topology)
    check_compiles_for(asked)
    hardware.require_devices(sizes, asked)
    return sharding.make_mesh(sizes, topology_devices(asked))


def check_compiles_for(asked: Topology) -> None:
    """Raises: UserError for devices that are no TPU slice, and without libtpu."""
    if not asked.chip.torus_dims:
        raise UserError(f"topology {str(asked)!r}: only TPU slices are compiled for without being there; "
                        "name one like v4:2x4x4, v5p:4x4x4, v5e:4x4, v6e:8x8 or tpu7x:2x2x2")  # fmt: skip
    if not importlib.util.find_spec("libtpu"):
        raise UserError(f"compiling for {asked} needs libtpu; install it with: make extra-tpu")


def topology_devices(asked: Topology) -> list:
    """The devices of a TPU slice, as libtpu describes them without being there.

    Raises: UserError without libtpu, and for a slice it does not know.
    """
    check_compiles_for(asked)
    # Without these libtpu asks the network which machine of which slice this is, and keeps logs. It is to say what it
    # warns of (level 1): `complaints` reads it.
    quiet = dict(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_WORKER_HOSTNAMES="localhost",
                 TPU_ACCELERATOR_TYPE="v4-8", TPU_LOG_DIR="disabled", TPU_STDERR_LOG_LEVEL="1")  # fmt: skip
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    cloud = asked.cloud
    more = {"chips_per_host_bounds": (2, 4, 1)} if cloud.shape == (2, 4) else {}  # a host of 8 chips
    if asked.chip.key == "v4":  # a chip has two cores that work as one device; other generations are so by default
        more = dict(chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1))
    # Untold, it takes every axis for a line, and makes all-reduces of gathers over a whole torus.
    wrap = (*cloud.wraps, False)[:3]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=str(cloud), wrap=wrap, **more).devices
    except Exception as error:  # libtpu's own type, with what it knows
        said = str(error).splitlines()[0]
        raise UserError(f"topology {str(asked)!r}: libtpu says {said!r}; a newer one may know it; "
                        "all know v4:2x4x4, v5p:4x4x4, v5e:4x4 and the like") from error  # fmt: skip


# The step -------------------------------------------------------------------------------------------------------------


def shapes(cfg: Config, mesh: Mesh):
    """ShapeDtypeStruct, with its sharding, of the state and of a batch."""
    describe = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    state = jax.tree.map(describe, optimizer.state_shapes(cfg), optimizer.state_shardings(cfg, mesh))
    place, shape = NamedSharding(mesh, sharding.BATCH_SPEC), (cfg.data.batch_size, cfg.data.seq_len)
    dtype = lambda name: np.float32 if name == "weights_BT" else np.int32
    return state, {name: jax.ShapeDtypeStruct(shape, dtype(name), sharding=place) for name in BATCH_NAMES}


def compile_step(cfg: Config, mesh: Mesh, say=lambda text: None) -> Compiled:
    """Lower and compile the training step of main.py, and read what came out.

    say  called with a line of progress
    Raises: OutOfMemory; UserError for settings that do not fit the mesh.
    """
    fit.check(cfg.model, cfg.mesh, cfg.work)
    begin = time.perf_counter()
    lowered = optimizer.train_step(cfg, mesh).lower(*shapes(cfg, mesh))
    lower_s, begin = time.perf_counter() - begin, time.perf_counter()
    say(f"lowered in {lower_s:.1f} s; compiling for {mesh.size} x {mesh.devices.flat[0].device_kind} ..")
    step, said = compile_lowered(lowered, advice(cfg))
    compile_s = time.perf_counter() - begin
    say(f"compiled in {compile_s:.1f} s")
    memory, text = step.memory_analysis(), step.as_text()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # On TPU the most that is alive at once, and decides what fits; `temp_bytes` may be more. On CPU it is not counted.
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    peak_bytes = memory.peak_memory_in_bytes if on_tpu else kept + memory.temp_size_in_bytes
    known = shares(cfg, text)
    found = ledger.read(text, mesh, known)
    return Compiled(
        lower_s, compile_s, memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes,
        memory.alias_size_in_bytes, peak_bytes, found, known,
        unexpected(found.collectives, reported_bytes(cfg)) + said, step,
    )  # fmt: skip


def compile_lowered(lowered, advice: str = "a smaller program") -> tuple[jax.stages.Compiled, list[str]]:
    """Compile, and return what the compiler complains of beside the program; see `complaints`.

    Raises: OutOfMemory; any other error of the compiler as it is.
    """
    try:
        # A program out of a cache says nothing of the time it takes, and complains no more.
        with options.refused(), compile_cache(""), heard() as heard_text:
            step = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = out_of_memory("\n".join([str(error), *heard_text]), advice)
        if refusal:
            raise refusal from error
        sys.stderr.write("".join(heard_text))
        raise
    found, rest = complaints("".join(heard_text))
    sys.stderr.write(rest)
    return step, found


@contextlib.contextmanager
def heard():
    """Collect in a list what is written to file descriptor 2 meanwhile, by C++ too, instead of its being shown."""
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


LOGGED = r"^[IWEF]\d{4} [\d:.]+ +\d+ "  # how a line begins that C++ logs: severity, time, thread; then file:line] text
ALARM = r"(\[spmd\] involuntary full rematerialization.*?|\[sharding_fusion\].*?)(?: As the last resort,.*)?$"
# Warnings of libtpu to its makers.
CHATTER = rf"{LOGGED}(tpu_|llo_|deepsea_|lowering_emitter|shardy_xla_pass|barrier_assignment)\S*\] "


def complaints(text: str) -> tuple[list[str], str]:
    """What the compiler logs, in two: complaints of a layout it cannot reach without copies; the rest, less chatter."""
    found, rest = [], []
    for line in text.splitlines(keepends=True):
        alarm = re.search(ALARM, line.rstrip(), re.IGNORECASE)
        if alarm:
            found.append(alarm[1])
        elif not re.match(CHATTER, line):
            rest.append(line)
    return found, "".join(rest)


def unexpected(collectives: list[ledger.Collective], most_bytes: int) -> list[str]:
    """What no line of ours asks for, one line each.

    Inside the `shard_map` every collective is a line of ours. Outside it the partitioner makes them: sums for the
    gradient's norm, and what is reported of a step, together at most `most_bytes` each; more is an array that it moves
    from one layout to another. Groups along no mesh axes are never ours.
    A compiler also writes ours in another way: for TPU a reduce-scatter may become a padded all-reduce and permutes,
    and sums of several lines, the norm's too, become one. So sums are left out, and permutes of no scope.
    """
    found = []
    for one in collectives:
        a_sum = one.kind in ("all-reduce", "reduce-scatter") or (not one.scope and one.kind == "collective-permute")
        ours = "shard_map" in one.scope or a_sum
        if "?" in one.axes or (not ours and one.payload_bytes > most_bytes):
            over = "devices along no mesh axes" if "?" in one.axes else "*".join(one.axes)
            place = one.scope or "no scope"
            found.append(f"{one.kind} of {one.payload_bytes:,} bytes over {over} ({place}, {one.source})")
    return found


def reported_bytes(cfg: Config) -> int:
    """The most that a step reports of itself: a number for each parameter of a layer, and for each expert."""
    return 4 * (len(optimizer.places(cfg)) + cfg.model.n_layers * max(cfg.model.n_experts, 1))


def shares(cfg: Config, text: str) -> dict:
    """How often the conditionals of a step, by their named scopes, do something: see `ledger.read`.

    In a pipeline each slot of a tick does so once for each microbatch, and once for each chunk of the layers; one of
    them in the first tick, or the last, where that has slots of its own.
    """
    conditionals = "\n".join(line for line in text.splitlines() if " conditional(" in line)
    return {scope: share for scope, share in slot_shares(cfg).items() if scope in conditionals}


def slot_shares(cfg: Config) -> dict:
    """The same for every conditional that a step may have; `program.read` passes over those that it lacks."""
    sched = pipeline.schedule(cfg)
    runs = dict.fromkeys(("forward_slot", "backward_slot", "weight_slot"), sched.microbatches * sched.chunks)
    runs["loss_slot"] = sched.microbatches
    return {scope: lambda ticks, n=n: min(n / ticks, 1.0) for scope, n in runs.items()} | {"not_finite": 0.0}
