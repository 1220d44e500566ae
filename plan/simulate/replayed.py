"""Simulate how long a compiled step takes on its target chips: seconds by cause, and a plot of one layer.

`simulate/simulator.py` is the simulator. This module gives it the chip, the torus coordinates of the devices, and
the pipeline schedule.
"""

import numpy as np
from jax.sharding import Mesh

import pipeline
import utils
from config import Config
from plan.chips import links
from plan.chips.hardware import Topology
from plan.count import costs
from plan.simulate import simulator
from utils import UserError

# FLOPs per cycle of a device's matrix units (two per cell). The clock is the peak divided by this number. v4 has 8
# units of 128 x 128 at 1.05 GHz (arXiv:2304.01433, table 4), v5e 4 at 1.5 GHz, v5p 8 at 1.75 GHz, v6e 4 of 256 x 256
# at 1.75 GHz, and each of the two devices of a tpu7x chip 4 at 2.2 GHz.
# https://jax-ml.github.io/scaling-book/tpus, "What Is a TPU?"
FLOPS_PER_CYCLE = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19, "tpu7x": 2**19}
HOP_S = 1e-6  # https://jax-ml.github.io/scaling-book/sharding: "about 1us per hop"

HEAD = """Simulated, not measured on a chip: matmuls take the compiler's estimate, everything else runs at full speed.
Latency, the speed of vector units and memory contention with matmuls are unknown."""


def machine(topology: Topology, mesh: Mesh, latency_s: float = 0.0) -> simulator.Machine:
    """Describe the chip and the torus coordinates of a mesh's devices.

    Raises: UserError if the devices have no coordinates, like GPUs and simulated devices, or span several slices.
    """
    chip, devices = topology.chip, [*mesh.devices.flat]
    if chip.key not in FLOPS_PER_CYCLE or not all(hasattr(device, "coords") for device in devices):
        raise UserError(f"simulation: the devices of {topology} have no coordinates on a torus; "
                        "pass a TPU slice, like v4:4x4x2 or v5e:4x4")  # fmt: skip
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1:
        raise UserError("simulation: the network between TPU slices is not modeled; pass a single slice")
    places = np.array([device.coords for device in devices])[:, : len(topology.shape)]
    shape, wraps = topology.shape, topology.wraps
    if tuple(places.max(axis=0) + 1) != shape:  # libtpu orders the dims differently
        order = [sorted(range(len(shape)), key=shape.__getitem__)[rank] for rank in
                 np.argsort(np.argsort(places.max(axis=0), kind="stable"))]  # fmt: skip
        shape, wraps = tuple(shape[d] for d in order), tuple(wraps[d] for d in order)
    return machine_at(topology, links.Torus(shape, wraps), places, latency_s)


def machine_at(topology: Topology, torus: links.Torus, places: np.ndarray, latency_s: float = 0.0) -> simulator.Machine:
    """Describe the chip, with devices at these torus coordinates, [device, torus axis]."""
    chip = topology.chip
    return simulator.Machine(torus, places, chip.peak_flops_per_s, chip.peak_flops_per_s / FLOPS_PER_CYCLE[chip.key],
                             chip.hbm_bytes_per_s, chip.link_bytes_per_s, latency_s)  # fmt: skip


def critical_shares(cfg: Config, text: str) -> dict:
    """Return the fraction of ticks in which a slot's work is on the critical path, by named scope: see `ledger.read`.

    A slot is a part of a pipeline tick: forward, loss, backward or weight gradients. After every tick all stages wait
    for the slowest, so only the slots of the slowest stage count.
    """
    sched = pipeline.schedule(cfg)
    seconds = dict(zip("FBW", costs.slots(cfg, sched), strict=True))
    slowest = [max(row, key=lambda cell: sum(seconds[op.kind] for op in cell)) for row in sched.table]
    ticks = {kind: sum(op.kind == kind for cell in slowest for op in cell) for kind in "FBW"}
    runs = {"forward_slot": ticks["F"], "backward_slot": ticks["B"], "weight_slot": ticks["W"],
            "loss_slot": sched.microbatches}  # fmt: skip
    known = {scope: lambda reached, n=n: min(n / reached, 1.0) for scope, n in runs.items()} | {"not_finite": 0.0}
    conditionals = "\n".join(line for line in text.splitlines() if " conditional(" in line)
    return {scope: share for scope, share in known.items() if scope in conditionals}


def simulate(cfg: Config, topology: Topology, mesh: Mesh, text: str, at_peak=False, latency_s=0.0) -> simulator.Replay:
    """Simulate the compiled step of a configuration.

    at_peak    matmuls run at the chip's peak FLOP/s instead of the compiler's estimate
    latency_s  latency of one link: HOP_S, or 0 to ignore it
    """
    return simulator.replay(text, mesh, machine(topology, mesh, latency_s), critical_shares(cfg, text), at_peak)


def to_json(found: simulator.Replay) -> dict:
    """Return the seconds by cause, and the timelines of the two computations that take the most time."""
    return {"step_s": found.seconds, "seconds": found.causes, "timelines": [
        {"computation": name, "times": found.times[name], "events": [e._asdict() for e in found.played[name].events]}
        for name in found.longest()]}  # fmt: skip


COLOURS = {simulator.MATMULS: "#4c72b0", simulator.OTHERS: "#aab7cf", simulator.COPIES: "#d5dbe6"}
WAITING = "#c44e52"


def plot(found: simulator.Replay, title: str, path: str) -> None:
    """Plot what core and links do in the two computations that take the most time: a layer's forward and backward."""
    names = found.longest()
    lanes = [["core", *sorted({e.lane for e in found.played[name].events} - {"core"})] for name in names]
    figure = utils.new_picture(figsize=(12, 1.3 + sum(0.7 + 0.35 * len(lane) for lane in lanes)), dpi=150)
    panels = figure.subplots(len(names), 1, squeeze=False, height_ratios=[len(lane) for lane in lanes])[:, 0]
    for axes, name, rows in zip(panels, names, lanes, strict=True):
        for event in found.played[name].events:
            height = 0.8 if event.lane == "core" else 0.5
            colour = COLOURS.get(event.what, WAITING if event.lane == "core" else "#55a868")
            axes.broken_barh([(1e6 * event.start, 1e6 * (event.end - event.start))],
                             (rows.index(event.lane) - height / 2, height), color=colour, alpha=0.75,
                             linewidth=0.3, edgecolor="white")  # fmt: skip
        one = found.played[name]
        axes.set_xlim(0, 1e6 * one.seconds)
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_title(f"{found.times[name]:,.0f} times a step, {1e6 * one.own.total():,.0f} us each: "
                       + ", ".join(f"{cause} {1e6 * s:,.0f}" for cause, s in one.own.most_common(4)),
                       loc="left", size=9)  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("us since the start")
    patches = [("matmuls", COLOURS["matmuls"]), ("other ops", COLOURS["other ops"]), ("stalled", WAITING),
               ("collective in flight", "#55a868")]  # fmt: skip
    handles = [panels[0].barh([0], [0], color=colour, label=label) for label, colour in patches]
    figure.legend(handles=handles, ncols=len(patches), frameon=False, fontsize=8, loc="outside lower left")
    figure.suptitle(title, x=0.01, ha="left", size=10)
    figure.savefig(path)
