# %% [markdown]
# # 00 · Rooflines and device meshes
#
# A *roofline* estimates how long a computation takes: it compares the time to compute its FLOPs
# (floating-point operations) with the time to move its bytes, and the longer one decides. A *device mesh*
# arranges many chips in a grid with named axes, so that a program can state which chip stores which part of
# an array.
#
# With both, you can estimate the time of a training step on any number of chips before you rent them. A
# count of FLOPs alone is not enough, because chips also wait for memory and for each other. Below, an
# estimate from FLOPs is wrong for one matmul and for a whole training step.
#
# *Prerequisites:* matmuls, NumPy, one GPU. *Mesh:* several, of eight simulated devices (explained below).
# *Runs in* 30 s on 2 cores. *Reading takes* 20 minutes, 75 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import math
import time
from dataclasses import dataclass

import matplotlib.pyplot as plt

from chapters import lesson, opening
from config import MeshConfig, preset
from plan import planner
from plan.chips import hardware
from sharding import DATA, FSDP, STAGE, TENSOR, as_tuple, make_mesh

# %% tags=["hide-input"] mystnb={"image": {"alt": "Memory and time of one Llama 3 8B layer. Before: one GPU stores 3.2 GiB and computes for 87 ms. After: eight GPUs store 3.2 GiB each, compute for 11 ms and communicate for 3 ms."}}
each_has = {"weights": 4, "gradients": 4, "optimizer state": 8}  # bytes per parameter
each_has = {k: b * opening.PARAMETERS / hardware.GiB for k, b in each_has.items()}


def step_ms(devices, tokens):
    """Time of the matmuls and of the gradients' all-reduce, at peak speed."""
    flops = 6 * opening.PARAMETERS * tokens / devices  # 2 forward, 4 backward
    sent = 2 * (devices - 1) / devices * 4 * opening.PARAMETERS
    return opening.compute_ms(flops), opening.network_ms(sent)


(whole, _), (part, reduce) = step_ms(1, opening.TOKENS), step_ms(8, opening.TOKENS)
first_only = {name: [size] + [0] * 7 for name, size in each_has.items()}
bars = [("matmuls", 0, whole)], [(f"{part:.0f}", 0, part)]
before = opening.Scene(f"One GPU: {whole:.0f} ms", first_only, bars[0], [])
sums = [(f"{reduce:.0f}", part, reduce)]
name = f"Eight GPUs: {part:.0f} + {reduce:.0f} ms"
after = opening.Scene(name, each_has, bars[1], sums)
opening.before_after(before, after, "Less to compute, and something to send", DATA)

# %% [markdown]
# This is one layer of Llama 3 8B on H100 GPUs, in a training step of 65,536 tokens. On the right, each GPU
# has a copy of the layer and computes an eighth of the tokens (*data parallelism*). Then the GPUs add up
# their float32 gradients in an *all-reduce*. Times are arithmetic at peak speed, without overlap. Eight
# GPUs are 6.1 times as fast as one.
#
# > **Predict.** Now the step has only 8,192 tokens. How many times as fast as one GPU are eight?

# %% tags=["hide-input"]
speedup = step_ms(1, 8192)[0] / sum(step_ms(8, 8192))

# %%
my_prediction = None  # times
# lesson.predicted prints the right value and, if you wrote a number above, compares it.
lesson.predicted("eight GPUs over one", my_prediction, speedup, "times", within=0.1)

# %% tags=["remove-cell"]
assert abs(whole / (part + reduce) - 6.1) < 0.05, "the text says 6.1 times"
assert abs(whole / 8 - part) < 0.01 and abs(speedup - 2.28) < 0.01

# %% [markdown]
# Compute shrinks from 11 ms to 1.4 ms. The gradients have the size of the weights, for any number of
# tokens, so the float32 all-reduce still takes 3.4 ms.
#
# ## How a chip is built
#
# An accelerator is built for matmuls: a *TPU v4* has eight matrix units (MXUs), and an *H100* has 132
# smaller ones (SMs).


# %% tags=["hide-input"]
def arrow(axes, start, end, text="", where=(0, 0)):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "<->", "lw": 1})
    axes.text(*where, text, va="center", size=9)


def draw_chip(axes, key, units, near, links, memory):
    chip = hardware.CHIPS[key]
    lesson.box(axes, 0, 3, 8.6, 5, fc="#7d7d7d30")
    units = f"{units}\n{chip.peak_flops_per_s / 1e12:.0f} TFLOP/s"
    lesson.box(axes, 0.4, 5.6, 7.8, 2, units, fc="#7d7d7d70")
    lesson.box(axes, 0.4, 3.4, 7.8, 1.2, near)
    arrow(axes, (4.3, 5.7), (4.3, 4.5))
    lesson.box(axes, 0, 0, 8.6, 1.6, f"HBM, {memory} GB")
    speed = f"{chip.hbm_bytes_per_s / 1e9:,.0f} GB/s"
    arrow(axes, (4.3, 3.45), (4.3, 1.5), speed, (4.6, 2.3))
    links = f"{links}\n{chip.link_bytes_per_s / 1e9:.0f} GB/s"
    arrow(axes, (8.5, 6.6), (9.9, 6.6), links, (10, 6.6))
    off = f"other {'slices' if chip.torus_dims else 'nodes'}"
    off += f"\n{chip.dcn_bytes_per_s / 1e9:.3g} GB/s"
    arrow(axes, (8.5, 4.0), (9.9, 4.0), off, (10, 4.0))
    axes.set(xlim=(-0.2, 14), ylim=(-0.2, 8.2), title=chip.name)


CHIP = dict(ms=12, mfc="#c8c8c8", mec="black", zorder=2, marker="s", ls="none")


# %% tags=["hide-input"]
def draw_torus(axes, n=4):
    for i in range(n):
        axes.plot([-0.6, n - 0.4], [i, i], color="black", lw=1, zorder=1)
        axes.plot([i, i], [-0.6, n - 0.4], color="black", lw=1, zorder=1)
        axes.plot([i] * n, range(n), **CHIP)
    axes.set(xlim=(-1.5, 7.5), ylim=(-0.9, n - 0.1), aspect="equal")
    text = "16 chips of a slice.\nA line that ends at one\nedge starts at the other."
    axes.text(4.0, 1.5, text, size=9, va="center")


def draw_node(axes, n=8):
    for i in range(n):
        axes.plot([i, i], [0, 1.6], color="black", lw=1, zorder=1)
        axes.plot([i, i], [0, -1.5], color="black", lw=1, ls=":", zorder=1)
    axes.plot(range(n), [0] * n, **CHIP)
    lesson.box(axes, -0.5, 1.3, 8, 0.9, "NVLink switches", fc="white")
    axes.text(3.5, -2.0, "InfiniBand, a card per GPU", ha="center", size=9)
    axes.set(xlim=(-0.8, 7.8), ylim=(-2.4, 2.5))


title = "The farther away a number is, the longer a chip waits for it"

# %% tags=["hide-input"] mystnb={"image": {"alt": "A TPU v4 and an H100: matmul units and on-chip memory inside the chip, HBM below it, links at its side. Below them, TPUs in a grid of links, and eight GPUs under NVLink switches."}}
_, panels = lesson.panels(title, 2, 2, figsize=(6.6, 4.8), height_ratios=(3, 2))
draw_chip(panels[0, 0], "v4", "8 MXUs", "on-chip memory", "six links of", 32)
draw_chip(panels[0, 1], "h100", "132 SMs", "L1 and L2 caches", "NVLink", 80)
draw_torus(panels[1, 0])
draw_node(panels[1, 1])
for panel in panels.flat:
    panel.set_axis_off()

# %% [markdown]
# The matmul units read from a small memory on the chip. Weights and activations are in *HBM*, the
# high-bandwidth memory next to the chip. *Bandwidth* is how many bytes per second can be moved, here always
# in one direction.
#
# *Links* connect chips. A TPU v4 has links to its neighbors only, two in each of three directions, and
# these chips form a *slice*. Eight H100s in a *node* reach each other through NVLink switches. Between
# slices or nodes, chips use a slower network: InfiniBand, or the data-center network (*DCN*) for TPUs.

# %%
print(f"FLOPs per byte {'HBM':>7} {'a link':>8} {'network':>10}")
for key in ("v4", "v5p", "h100", "b200"):
    chip = hardware.CHIPS[key]
    speeds = chip.hbm_bytes_per_s, chip.link_bytes_per_s, chip.dcn_bytes_per_s
    costs = [chip.peak_flops_per_s / speed for speed in speeds]
    print(f"{chip.name:14} {costs[0]:7,.0f} {costs[1]:8,.0f} {costs[2]:10,.0f}")

# %% [markdown]
# This is what a byte costs: the FLOPs that a chip could compute in the time in which it moves one byte. (In
# *bfloat16*, 2 bytes per value. `plan/chips/hardware.py` cites the sources.) A TPU v4 could compute 229
# FLOPs while it reads one byte from memory, and 6,111 while it receives one from a neighbor. A program with
# fewer FLOPs per byte makes the chip wait.
#
# ## A matmul on eight devices, by hand
#
# You can paste the next two cells into an empty file. They multiply `x`, B rows of D values, by a D x F
# matrix, `w`, on eight devices. (In a transformer, a row is one token. The name of an array ends with its
# dims, one letter each: `x_BD` has B rows and D columns.)
#
# A *mesh* is a grid of devices whose axes have names. A `PartitionSpec`, here `P`, lists for each dim of an
# array the mesh axis that splits it into equal *shards*. An array that no axis splits is *replicated*:
# every device has a copy. A spec and a mesh together are a `NamedSharding`. The flag in the next cell makes
# JAX simulate eight devices on this machine's CPU. (Chapter 01 explains `AxisType.Auto`.)

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

B, D, F = 32, 2560, 1536
rng = np.random.default_rng(0)
x_BD = rng.normal(size=(B, D)).astype("float32")
w_DF = rng.normal(size=(D, F)).astype("float32")
chips = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
layouts = {  # specs of x, of w, of the result
    "nothing is split": (P(), P(), P()),
    "rows of x": (P("tensor"), P(), P("tensor")),
    "columns of w": (P(), P(None, "tensor"), P(None, "tensor")),
    "dim D of both": (P(None, "tensor"), P("tensor"), P()),
}

# %% tags=["by-hand"]
collectives = {}
for name, (x_spec, w_spec, y_spec) in layouts.items():
    at = lambda spec: NamedSharding(chips, spec)
    args = jax.device_put(x_BD, at(x_spec)), jax.device_put(w_DF, at(w_spec))
    matmul = jax.jit(jnp.matmul, out_shardings=at(y_spec))
    np.testing.assert_allclose(matmul(*args), x_BD @ w_DF, atol=1e-2)  # one device
    program = matmul.lower(*args).compile()
    pattern = r"= f32\[([\d,]*)\]\S* (all-reduce|all-gather|reduce-scatter)\("
    collectives[name] = re.findall(pattern, program.as_text())
    kinds = [kind for _, kind in collectives[name]] or "no communication"
    print(f"{name:17} {program.cost_analysis()['flops']:12,.0f} FLOPs, {kinds}")

# %% [markdown]
# The FLOPs and the *collectives* (communication in which all devices take part) are those of one device's
# compiled program. In the first layout, every device does all of the work. In the next two, each does an
# eighth and sends nothing, but stores all of `w` or all of `x`.
#
# The last layout splits D, the *contracting* dim: the matmul sums over it. Device i has 320 of the 2,560
# columns of `x` and the 320 matching rows of `w`. It computes an eighth of the FLOPs, and then 49,152
# additions for the all-reduce, which gives every device the whole result.
#
# > **Predict.** The *payload* of an all-reduce is the array that each device adds to the sum. How many bytes
# > does it have here? The result is 32 x 1,536 in float32, 4 bytes per value.

# %% tags=["hide-input"]
[(shape, kind)] = collectives["dim D of both"]
payload = 4 * math.prod(map(int, shape.split(",")))

# %%
my_prediction = None  # bytes
lesson.predicted(f"{kind} of an array [{shape}]", my_prediction, payload, "bytes")

# %% [markdown]
# The payload is all of `y`, not an eighth of it: a device sums only over its own shard of D, so it gets a
# *partial sum* of every entry.

# %% tags=["hide-input"] mystnb={"image": {"alt": "x sharded into eight blocks of columns, w into eight blocks of rows, each with its device number; next to them eight full-size arrays, one behind the other."}}
title = "Splitting the contracting dim leaves partial sums"
_, axes = lesson.panels(title, 1, 3, figsize=(6.4, 2.4))
row = make_mesh("tensor=8")
lesson.slices(axes[0], row, P(None, TENSOR), "BD", "x")
lesson.slices(axes[1], row, P(TENSOR), "DF", "w")
for n in reversed(range(8)):  # columns n times rows n, on device n
    shade = dict(fc=lesson.COLORS[TENSOR], alpha=0.25 + 0.5 * n / 7)
    for look in {"fc": "white"}, shade:
        lesson.box(axes[2], 0.04 * n, 0.04 * n, 0.72, 0.72, "" if n else "0", **look)
lesson.blank(axes[2], title="y: 8 partial sums", xlabel="F")
axes[2].set(xlim=(0, 1.01), ylim=(0, 1.01))
axes[2].set_ylabel("B", rotation=0, labelpad=10)

# %% [markdown]
# The all-reduce adds these arrays and gives every device the sum. In a ring of eight devices, it works on
# eight chunks of the array. For 7 steps, every device sends one chunk to its neighbor, which adds its own
# values; then each device has one chunk of the complete sum. In 7 more steps these chunks travel around the
# ring. So each device sends 14 chunks, or 1.75 payloads. **With n devices, an all-reduce sends `2 (n -
# 1)/n` payloads: never more than 2.**
#
# ## One device: two wrong estimates
#
# The same matmul on one device takes `2 B D F` FLOPs, with B = 256: one multiplication and one addition for
# each row and each entry of `w`. How fast does this machine compute them?

# %% tags=["hide-input"]
keys = jax.random.split(jax.random.key(0), 4)
ws = [jax.random.normal(key, (F, D)) for key in keys]  # larger than caches
# F is the first dim, so that the CPU does not copy w before it multiplies.
product = jax.jit(lambda x_BD, w_FD: jnp.einsum("FD,BD->FB", w_FD, x_BD))

# %%
x_BD, tries = jnp.ones((256, D)), []
for w_FD in 4 * ws:
    start = time.perf_counter()
    y_FB = product(x_BD, w_FD)
    returned = time.perf_counter() - start
    jax.block_until_ready(y_FB)
    tries.append((returned, time.perf_counter() - start))

for name, took in zip(("returned", "ready"), min(tries), strict=True):
    speed = 2 * 256 * D * F / took
    print(f"{name:8} after {took * 1e3:6.3f} ms: {speed / 1e9:7,.0f} GFLOP/s")

# %% tags=["remove-cell"]
returned, ready = min(tries)
assert returned < ready / 2

# %% [markdown]
# The first line is not a speed. JAX returns before the result exists and computes in the background
# ([asynchronous dispatch](https://docs.jax.dev/en/latest/async_dispatch.html)). If you stop the clock
# there, you have measured Python. From here on, the page measures *CPU seconds*, because other programs may
# share this machine. So the speeds are those of one core.
#
# > **Predict.** Eight rows need eight times the FLOPs of one row, with the same `w`. How many times the CPU
# > seconds? (`w` has 15.7 MB, and a core reads about 20 GB/s. One row takes 7.9 million FLOPs, and a core
# > computes some 100 GFLOP/s.)


# %% tags=["hide-input"]
def timed(x_BD, ws=ws):
    """CPU seconds of a matmul: the mean of 40 runs, after 4 warm-up runs."""
    for n in range(44):
        if n == 4:
            start = time.process_time()
        jax.block_until_ready(product(x_BD, ws[n % len(ws)]))
    return (time.process_time() - start) / 40


sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
seconds = dict.fromkeys(sizes, 1.0)
for B in 6 * sizes:  # six rounds, because other programs may disturb some
    seconds[B] = min(seconds[B], timed(jnp.ones((B, D))))
measured = seconds[8] / seconds[1]

# %%
my_prediction = None  # times the seconds of one row
lesson.predicted("8 rows over 1 row", my_prediction, measured, "times", within=0.3)

# %% [markdown]
# ## Two limits: memory and compute
#
# The matmul must read all of `w`, `4 D F` bytes in float32, for any number of rows. So there are two times:
# FLOPs divided by FLOP/s, and bytes divided by the memory bandwidth. With perfect overlap, the matmul takes
# the longer of the two, and with no overlap their sum, at most twice as long.
#
# Which time is longer depends on the FLOPs per byte, the *arithmetic intensity*: here `2 B D F / 4 D F = B
# / 2`. Both times are equal at the machine's *ridge point*: FLOP/s divided by bytes/s. Below it a program
# is memory-bound, above it compute-bound.
#
# The smallest matmul gives us the bandwidth and the largest the FLOP/s, so the first and last row fit
# exactly. For all sizes between them, the two estimates are:

# %%
touched = lambda B: 4 * (D * F + B * D + B * F)  # bytes: w, x and y, once each
flops = lambda B: 2 * B * D * F
memory, peak = touched(1) / seconds[1], flops(256) / seconds[256]
print(f"a core: {peak / 1e9:.0f} GFLOP/s, {memory / 1e9:.1f} GB/s")
print(f"its ridge point: {peak / memory:.1f} FLOPs per byte")
print("rows  measured  longer     sum  longer is")
for B, took in seconds.items():
    parts = {"bytes": touched(B) / memory, "FLOPs": flops(B) / peak}
    longer, both = max(parts.values()), sum(parts.values())
    print(f"{B:4} {took * 1e3:6.2f} ms {longer * 1e3:7.2f} {both * 1e3:7.2f}", end="")
    print("  " + max(parts, key=parts.get))
    assert 0.6 * longer < took < 1.6 * both

# %% tags=["remove-cell"]
assert measured < 6

# %% [markdown]
# In bfloat16, B rows need B FLOPs per byte of `w`, and the ridge point of a TPU v4's HBM is 229: up to
# about 229 rows, one more row costs almost nothing. That is why servers batch requests. Plotted over the
# intensity, the limit has the shape of a roof:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three rooflines of a TPU v4, for HBM, a link and the network, and below them the roofline of this CPU with nine measured matmuls."}}
figure, axes = plt.subplots(figsize=(5.6, 4.2))
intensity = [10 ** (n / 20) for n in range(-12, 105)]
v4 = hardware.CHIPS["v4"]
top = v4.peak_flops_per_s / 1e9
roof = lambda peak, speed: [min(peak, i * speed / 1e9) for i in intensity]
links = {"HBM": v4.hbm_bytes_per_s, "a link": v4.link_bytes_per_s}
links["the network"] = v4.dcn_bytes_per_s
for (name, speed), style in zip(links.items(), ("-", "--", ":"), strict=True):
    axes.loglog(intensity, roof(top, speed), style, color="black", lw=1.2)
    axes.text(top * 1e9 / speed / 30, top / 17, name, rotation=43, size=10)
axes.loglog(intensity, roof(peak / 1e9, memory), color=lesson.NEUTRAL)
points = {flops(B) / touched(B): flops(B) / took / 1e9 for B, took in seconds.items()}
axes.loglog(points.keys(), points.values(), "o", color=lesson.NEUTRAL, ms=5)
axes.text(1.5e3, top * 1.3, "TPU v4, bfloat16", size=10)
axes.text(120, peak / 1e9 * 1.3, "a core of this CPU, float32", size=10)
axes.set(title="Left of the ridge point, a machine waits for bytes", ylim=(0.5, 1e6))
axes.set(xlabel="FLOPs per byte", ylabel="GFLOP/s at most")

# %% [markdown]
# ## Eight devices, six axes
#
# In this guide every mesh has the same six axes:
#
# | axis | devices along this axis have different |
# |---|---|
# | `data` | sequences |
# | `stage` | layers (pipeline parallelism) |
# | `fsdp` | sequences, and shards of every weight |
# | `expert` | sequences, and experts (MLPs to choose from) |
# | `context` | positions of the same sequences |
# | `tensor` | shards of the same weight matrices, for the same tokens |
#
# Devices along the last axis are the closest chips. A mesh is written as `stage=2,tensor=4`; all other axes
# have size 1. In figures, each axis has its own color; an array that two axes split has the color of the
# first. This is `stage=2,fsdp=2,tensor=2`:

# %% tags=["hide-input"] mystnb={"image": {"alt": "A cube of eight numbered devices. Edges in three colors connect devices along stage, fsdp and tensor."}}
cube = make_mesh("stage=2,fsdp=2,tensor=2")
figure, axes = plt.subplots(figsize=(4.8, 2.8))
corners = [(s, f, t) for s in (0, 1) for f in (0, 1) for t in (0, 1)]
at = lambda s, f, t: (2.2 * t + 1.0 * s, -1.3 * f + 0.62 * s)
for s, f, t in corners:
    for axis, other in {STAGE: (1, f, t), FSDP: (s, 1, t), TENSOR: (s, f, 1)}.items():
        xs, ys = zip(at(s, f, t), at(*other), strict=True)
        axes.plot(xs, ys, color=lesson.COLORS[axis], lw=3, zorder=1, label=axis)
    number = cube.device_ids[0, s, f, 0, 0, t]
    axes.plot(*at(s, f, t), "o", ms=20, mfc="white", mec="black", zorder=2)
    axes.text(*at(s, f, t), number, ha="center", va="center", color="black", zorder=3)
lines, names = axes.get_legend_handles_labels()
axes.legend(lines[:3], names[:3], loc="center left", bbox_to_anchor=(1, 0.5))
axes.margins(0.08, 0.15)
axes.set_title("A device has one neighbor along each axis")
axes.set_axis_off()

# %% [markdown]
# Here both dims of a matrix are sharded, over two axes:

# %%
mesh = make_mesh("fsdp=4,tensor=2")
cut_DF = jax.device_put(w_DF, NamedSharding(mesh, P(FSDP, TENSOR)))
for shard in cut_DF.addressable_shards[:3]:  # addressable: of this process
    print(f"device {shard.device.id}: {shard.data.shape} of {cut_DF.shape}")

# %% tags=["hide-input"] mystnb={"image": {"alt": "The same matrix four times, sharded by four specs; each shard shows the numbers of the devices that hold it."}}
title = "A spec says which devices store which shard"
_, axes = lesson.panels(title, 2, 2, figsize=(6, 4.4))
specs = P(FSDP, TENSOR), P(FSDP), P(None, TENSOR), P()
for panel, spec in zip(axes.flat, specs, strict=True):
    held = jax.device_put(w_DF, NamedSharding(mesh, spec)).addressable_shards[0].data
    words = ", ".join(str(axis) for axis in spec)
    size = f"{held.nbytes / 2**20:.3g} MiB each"
    lesson.slices(panel, mesh, spec, "DF", f"P({words}): {size}")

# %% [markdown]
# **Simulated devices** are parts of one process. You can count what each of them stores, computes and
# sends, but not how fast it is, what overlaps, or whether it fits into a device's memory.
#
# ## A whole step
#
# The planner, `plan/`, adds up FLOPs and bytes for all matmuls and collectives of a model. Here is a step
# of Llama 3 8B on 64 TPU v4, as `fsdp=16,tensor=4`, with 64 sequences of 512 tokens. (A layer is recomputed
# in the backward pass, its weights are gathered when it runs, and `tensor` sends in rings.)


# %% tags=["hide-input"]
ALIKE = {"work.remat": "full", "work.gather": "layer", "work.schedule": "gpipe"}
ALIKE |= {"work.tensor_exchange": "ring"}


def step(B, mesh="fsdp=16,tensor=4", topology="v4:4x4x4"):
    settings = {"mesh": mesh, "data.batch_size": B, "data.seq_len": 512} | ALIKE
    return planner.plan(preset("llama3_8b", **settings), topology)


one = step(64)
parts = one.lower_bound(alone=True)
for part, took in parts.items():
    if took > 1e-4:
        sent = one.wire_by_axes.get(part, 0) / 1e9
        print(f"{part:10} {took * 1e3:6.1f} ms" + f", sends {sent:.2f} GB" * (sent > 0))
print(f"all        {sum(parts.values()) * 1e3:6.1f} ms if nothing overlaps")
print(f"lower bound{one.lower_bound_s * 1e3:6.1f} ms as the TPU compiler overlaps it")
throughput = one.tokens_per_step / one.lower_bound_s
print(f"{throughput:,.0f} tokens/s, MFU {one.mfu(one.lower_bound_s):.0%}")

# %% [markdown]
# The *optimizer* only reads and writes memory, so HBM limits it. `fsdp` gathers a layer's weights before
# its matmuls, and adds its gradients after them (chapter 03). `tensor` adds partial sums of activations, as
# above (chapter 04).
#
# *Throughput* is the number of tokens per second. *MFU*, model FLOPs utilization, is throughput times the
# model's FLOPs per token, divided by the peak of all chips. FLOPs per token are 6 per parameter, without
# the embedding table, plus those of attention. The recomputed forward pass does not count.
#
# > **Predict.** Four times the sequences on the same chips need four times the FLOPs. How many times the
# > seconds, if nothing overlaps?

# %% tags=["hide-input"]
four = step(256)
assert four.model_flops == 4 * one.model_flops
more = sum(four.lower_bound(alone=True).values()) / sum(parts.values())

# %%
my_prediction = None  # times the seconds of 64 sequences
lesson.predicted("256 sequences over 64", my_prediction, more, "times", within=0.05)

# %% tags=["remove-cell"]
assert abs(more - 3.2) < 0.05
fsdp_of = lambda plan: plan.lower_bound(alone=True)[FSDP]
assert fsdp_of(one) <= fsdp_of(four) < 1.05 * fsdp_of(one)  # and tokens

# %% [markdown]
# The bytes of the weights do not depend on the number of tokens, so with enough tokens compute takes longer
# than `fsdp`. Activations are sent for each token, so the time of `tensor` grows in proportion to compute.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Seconds against tokens per chip: compute and tensor rise in parallel; fsdp is flat, and compute crosses it."}}
batches = [16 * 2**n for n in range(8)]
plans = [step(B) for B in batches]
tokens = [plan.tokens_per_step / 64 for plan in plans]
figure, axes = plt.subplots(figsize=(6, 3.6))
for part, colour in {"compute": lesson.NEUTRAL, TENSOR: None, FSDP: None}.items():
    took = [plan.lower_bound(alone=True)[part] for plan in plans]
    colour = colour or lesson.COLORS[part]
    axes.loglog(tokens, took, "o-", ms=4, color=colour)
    axes.text(tokens[-1] * 1.15, took[-1], part, color="black", va="center")
axes.axvline(512, color="black", lw=0.8, ls=":")
axes.text(540, axes.get_ylim()[1] * 0.6, "the step above", size=9)
axes.set(title="A larger batch shrinks fsdp's share; tensor's share stays the same")
axes.set(xlabel="tokens per chip and step", ylabel="seconds per step")

# %% [markdown]
# ## What it costs, and when not to use it
#
# **The rule.** For each link, divide the FLOPs that a device computes in a step by the bytes that it sends
# over the link. If this is below the link's ridge point, the communication takes longer than the matmuls,
# so it cannot overlap completely with them. Chapter 09 has the thresholds of all axes, with their
# assumptions.
#
# With n chips, each does 1/n of the FLOPs, but its all-reduce sends `2 (n - 1)/n` of the weights' size,
# nearly the same for any n. For the layer at the top of the page (450 GB/s is better than the real network
# of 64 or 512 GPUs):

# %%
for n in (1, 8, 64, 512):
    compute, network = step_ms(n, opening.TOKENS)
    speedup = step_ms(1, opening.TOKENS)[0] / (compute + network)
    took = f"{compute:5.1f} + {network:3.1f} ms"
    print(f"{n:3} GPUs: {took}, {speedup:4.1f} times as fast")

# %% tags=["remove-cell"]
assert 21 < speedup < 22.5 and network < 3.9

# %% [markdown]
# Even if the matmuls took no time, 3.9 ms of communication would remain. Below a ridge point, increase the
# batch or choose another mesh before you add chips.
#
# **What this leaves out.** Real programs do not reach the peak: the scaling book
# [reports](https://jax-ml.github.io/scaling-book/roofline) up to 95% on TPUs, and 80 to 85% on an H100. A
# message also has a *latency*, however small it is: about [1
# us](https://jax-ml.github.io/scaling-book/sharding) for each *hop*, a link on its way from TPU to TPU, in
# which a link of 45 GB/s carries 45 kB. (Chapter 01 has the latency of GPUs.)
#
# ## Exercise 1: quantized weights
#
# For serving, weights are often stored in int8, 1 byte per entry, and multiplied in bfloat16. How many rows
# does a matmul need to stop being memory-bound, if an entry has `width` bytes? Count only the bytes of the
# weights. A chip has `chip.peak_flops_per_s` and `chip.hbm_bytes_per_s`.


# %% tags=["hide-input"]
ridge_of = lambda c, wire="hbm_bytes_per_s": c.peak_flops_per_s / getattr(c, wire)
ROW_HINTS = [
    (lambda c, w: w * ridge_of(c), "Two times too many. FLOPs per entry and row?"),
    (lambda c, w: ridge_of(c), "Right for bfloat16 only. Where is the width?"),
    (lambda c, w: ridge_of(c) / 2, "Right for int8 only. Where is the width?"),
    (lambda c, w: 2 * ridge_of(c) / w, "Fewer rows for wider entries. Is that so?"),
    (lambda c, w: w * ridge_of(c, "link_bytes_per_s") / 2, "That is a link."),
    (lambda c, w: w / ridge_of(c) / 2, "Less than a row. Invert the ridge point?"),
    (lambda c, w: 2 / ridge_of(c) / w, "Less than a row. Which side is larger?"),
]
cases = [(hardware.CHIPS[key], w) for key, w in (("v4", 1), ("h100", 2), ("v5p", 4))]
check_rows = lesson.checker(
    cases, lambda c, w: w * ridge_of(c) / 2, ROW_HINTS,
    "Right on three chips. Half the width, half the rows: so servers use int8.",
    share=0.01)  # whole rows are right too  # fmt: skip


# %%
def rows_needed(chip, width):
    return ...


print(check_rows(rows_needed))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return width * chip.peak_flops_per_s / chip.hbm_bytes_per_s / 2`. B rows need `2 B` FLOPs per entry, and
# an entry has `width` bytes. So the intensity is `2 B / width`, and it should equal the ridge point.
# </details>

# %% tags=["remove-cell"]
exact = lambda c, w: w * ridge_of(c) / 2
whole = lambda c, w: -(-w * ridge_of(c) // 2)
lesson.expect(check_rows, *ROW_HINTS, (exact, "Right on"), (whole, "Right on"),
              (rows_needed, lesson.NOTHING),
              (lambda c, w: 240, "Not yet"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: bytes that a device stores
#
# Return how many bytes of a float32 array with a given `shape` one device stores. `spec` is a tuple with an
# entry for each of the first dims: `None`, one axis, or a tuple of axes that split the dim together
# (`as_tuple` turns any of them into a tuple). Dims after the end of a short spec are not split.
# `mesh.shape[axis]` is the size of an axis.


# %% tags=["hide-input"]
whole = lambda shape: 4 * math.prod(shape)  # bytes
first = lambda spec: [as_tuple(entry)[:1] for entry in spec]
single = lambda spec: [entry for entry in spec if not isinstance(entry, tuple)]
named = lambda shape, spec: shape[: len(spec)]


def cuts(spec, mesh, join=math.prod):
    return join([mesh.shape[axis] for entry in spec for axis in as_tuple(entry)])


def really_held(shape, spec, mesh):
    array = jax.device_put(jnp.zeros(shape), NamedSharding(mesh, P(*spec)))
    return array.addressable_shards[0].data.nbytes


HELD_HINTS = [
    (lambda s, p, m: whole(s) / 8, "You divided by all devices. All axes?"),
    (lambda s, p, m: whole(s) / cuts(first(p), m), "Wrong if two axes cut a dim."),
    (lambda s, p, m: whole(s) / cuts(single(p), m), "Does a tuple split nothing?"),
    (lambda s, p, m: whole(s) / cuts(p, m, sum), "2 by 4 shards are how many?"),
    (lambda s, p, m: really_held(s, p, m) / 4, "Entries. How many bytes is each?"),
    (lambda s, p, m: whole(named(s, p)) / cuts(p, m), "A short spec drops no dim."),
    (lambda s, p, m: whole(s) * cuts(p, m), "More than all of it. Multiply?"),
    (lambda s, p, m: whole(s), "That is the whole array. How much is a shard?"),
]
flat, cubic = make_mesh("fsdp=4,tensor=2"), make_mesh("stage=2,fsdp=2,tensor=2")

# %% tags=["hide-input"]
cases = [((64, 48), (FSDP, None), flat), ((24, 64), (None, (FSDP, TENSOR)), flat)]
cases += [((40, 12), (TENSOR, FSDP), cubic), ((40, 12), (STAGE,), cubic)]
check_held = lesson.checker(cases, really_held, HELD_HINTS, "Right on two meshes.")


# %%
def held_bytes(shape, spec, mesh):
    return ...


print(check_held(held_bytes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```
# axes = [axis for entry in spec for axis in as_tuple(entry)]
# return 4 * math.prod(shape) // math.prod(mesh.shape[axis] for axis in axes)
# ```
#
# Devices along axes that the spec does not list store copies, so their number does not matter.
# </details>


# %% tags=["remove-cell"]
lesson.expect(check_held, *HELD_HINTS, (held_bytes, lesson.NOTHING),
              (lambda *_: 7, "Not yet"),
              (lambda s, p, m: whole(s) / cuts(p, m), "Right on"),
              (lambda s, p, m: [m.shape[entry] for entry in p if entry],
               "KeyError"))  # fmt: skip

# %% [markdown]
# ## Exercise 3: what to send over the slow network
#
# You train Llama 3 8B on sixteen H100s in two nodes, with 16 sequences of T tokens per step. Inside a node,
# a GPU sends 450 GB/s, and to the other node 50 GB/s, over its own network card. An axis with k GPUs in
# each node can use all k cards. Choose the sizes of `fsdp` and `tensor` (at most 8: the model has 8 heads
# of keys and values). First predict which mesh is better for short sequences, and why. `priced` tells you
# up to which length.


# %%
def priced(mesh, T):
    settings = {"mesh": mesh, "data.batch_size": 16, "data.seq_len": T} | ALIKE
    return planner.plan(preset("llama3_8b", **settings), "h100:16")


for mesh in ("fsdp=16", "fsdp=4,tensor=4"):
    plan = priced(mesh, 1024)
    print(f"{mesh}: lower bound {plan.lower_bound_s:.3f} s with T=1024")
    for axis, link in hardware.layout(plan.cfg.mesh, plan.topology).items():
        print(f"  {axis:6} {link.bytes_per_s / 1e9:.0f} GB/s")


# %% tags=["hide-input"]
meshes = ["fsdp=16", "fsdp=8,tensor=2", "fsdp=4,tensor=4", "fsdp=2,tensor=8"]
best = lambda count: lambda T: min(meshes, key=lambda mesh: count(priced(mesh, T)))


def takes(choose):
    """The lower bound of a step on the chosen mesh, as a function of T."""

    def seconds(T):
        mesh = str(MeshConfig.parse(choose(T)))
        if mesh not in meshes:
            raise ValueError(f"mesh {mesh} is none of {' or '.join(meshes)}")
        return priced(mesh, T).lower_bound_s

    return seconds


# %% tags=["hide-input"]
MESH_HINTS = [
    (lambda T: meshes[3], "The usual advice: for small T. What grows with T?"),
    (lambda T: meshes[0], "Best for many tokens. From which T on?"),
    (best(lambda p: p.wire_bytes),
     "The fewest bytes. Does a byte cost the same everywhere?"),
    (best(lambda p: p.peak_bytes),
     "The least memory. All of these fit; what takes long?"),
    (best(lambda p: -p.lower_bound_s),
     "The opposite. Which link carries most bytes of each mesh?"),
    (lambda T: meshes[1], "One mesh for all T, fastest for none. Try the others."),
    (lambda T: meshes[2], "One mesh for all T, fastest for none. Try the others."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_mesh(mesh_for):
    cases, right = [(512,), (2048,), (8192,)], takes(best(lambda p: p.lower_bound_s))
    done = "Right for 512, 2,048 and 8,192 tokens: no mesh of these two axes is faster."
    said = lesson.diagnose(mesh_for, cases, right, MESH_HINTS, done, 0.01, takes)
    return said.replace("Your answer there is", "Your lower bound, in seconds:")


# %%
def mesh_for(T):
    return ...  # for example "fsdp=4,tensor=4"


print(check_mesh(mesh_for))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return "fsdp=2,tensor=8" if T < 1024 else "fsdp=16"`. With few tokens, most of the bytes are weights.
# With `tensor=8` inside a node, each GPU gathers an eighth of them with an eighth of the node's network,
# which takes as long. But between two nodes a GPU receives only 1/2 of what it gathers, and in a flat ring
# of 16 it receives 15/16. (A hierarchical all-gather on `fsdp=16` would have this gain, too.) With many
# tokens, most of the bytes are activations, and `tensor` takes longer on the fast links than `fsdp` on the
# slow network.
# </details>

# %% tags=["remove-cell"]
up_to = lambda most: lambda T: "fsdp=2,tensor=8" if most > T else "fsdp=16"
lesson.expect(check_mesh, *MESH_HINTS, (up_to(1024), "Right"),
              (mesh_for, lesson.NOTHING), (up_to(4096), "at T=2048"),
              (up_to(256), "From which T"),
              (lambda T: "stage=4,tensor=4", "none of"))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# A trainer logs its throughput and MFU with this program. (Nothing is computed, and the step times are
# given.) The job trains Llama 3 8B on eight H100s.


# %%
SHEET = {"a100": 312e12, "h100": 1979e12, "b200": 4500e12}  # FLOP/s in bfloat16
SPARSE = {"h100", "b200"}  # whose data sheets print twice the dense speed


@dataclass(frozen=True)
class Job:
    """A training run. A step adds up the gradients of `passes` batches."""

    mesh: str
    sequences: int  # in a batch, on all devices together
    seq_len: int
    passes: int
    chip: str = "h100"


def flops_per_token(seq_len, V=128_256, layers=32):
    """Forward and backward pass: 6 for each weight of a matmul, and attention."""
    weights = layers * opening.PARAMETERS + V * opening.D  # the embedding: a lookup
    seen = (seq_len + 1) / 2  # positions that a token attends to, on average
    return 6 * (weights + layers * opening.H * 2 * opening.K * seen)


# %%
class Meter:
    """Counts the tokens of a step, and reports throughput and MFU."""

    def __init__(self, job, mesh):
        self.job, self.mesh, self.tokens = job, mesh, 0
        self.peak = SHEET[job.chip] / (2 if job.chip in SPARSE else 1)

    def count(self, batch_BT):
        shard_bT = batch_BT.addressable_shards[0].data
        self.tokens += shard_bT.size * self.mesh.size

    def report(self, seconds):
        speed = self.tokens / seconds / self.mesh.size  # per device
        mfu = speed * flops_per_token(self.job.seq_len) / self.peak
        self.tokens = 0
        return {"tokens/s/device": speed, "MFU": mfu}


# %%
def train(job, step_seconds):
    mesh, log = make_mesh(job.mesh), []
    meter, random = Meter(job, mesh), np.random.default_rng(0)
    by_sequence = NamedSharding(mesh, P((DATA, FSDP)))  # the axes of the batch
    for seconds in step_seconds:
        for _ in range(job.passes):
            size = job.sequences, job.seq_len
            tokens_BT = random.integers(0, 128_256, size, dtype=np.int32)
            meter.count(jax.device_put(tokens_BT, by_sequence))
        log.append(meter.report(seconds))
    return log


job = Job("fsdp=4,tensor=2", sequences=16, seq_len=2048, passes=4)
for line in train(job, [3.46, 3.41, 3.43]):
    speed, mfu = line.values()
    print(f"{speed:,.0f} tokens/s per GPU, MFU {mfu:.1%}")

# %% [markdown]
# An MFU of 45% is what good runs reach (PaLM reported 46.2%). But a profile of one of these steps shows
# matmuls during a quarter of the time. What is wrong? Fix the program.


# %% tags=["hide-input"]
def logged(tokens, per=lambda mesh: mesh.size, peak=1979e12 / 2):
    """`train` with another count of tokens, number of devices or peak."""

    def train(job, step_seconds):
        mesh = make_mesh(job.mesh)
        speeds = [tokens(job, mesh) / s / per(mesh) for s in step_seconds]
        mfu = lambda speed: speed * flops_per_token(512) / peak
        return [{"tokens/s/device": speed, "MFU": mfu(speed)} for speed in speeds]

    return train


batch = lambda job, mesh: job.sequences * 512 * job.passes  # tokens of a step
shares = lambda mesh: mesh.shape[DATA] * mesh.shape[FSDP]  # of a batch
OF_ALL = lambda job, mesh: batch(job, mesh) * mesh.size / shares(mesh)
HALF = "989 TFLOP/s was the right peak. On fsdp=8 the MFU was right, and now is half."
AXIS = "Right with `tensor`. Along which other axis do devices have the same tokens?"

# %% tags=["hide-input"]
METER_HINTS = [
    (logged(OF_ALL), "The same MFU as before, on every mesh."),
    (logged(lambda j, m: OF_ALL(j, m) / m.shape[TENSOR]), AXIS),
    (logged(OF_ALL, peak=1979e12), HALF),
    (logged(lambda j, m: batch(j, m) / shares(m)), "The tokens of one device."),
    (logged(lambda j, m: batch(j, m) / j.passes), "One pass. How many has a step?"),
    (logged(batch, lambda m: 1), "All devices' tokens, against the peak of one."),
]


def of_job(train, seconds=(0.5, 0.25)):
    return lambda name, sequences, passes: train(
        Job(name, sequences, 512, passes), [*seconds])  # fmt: skip


def on_one(name, sequences, passes):
    """One device that takes n times as long computes as much per second."""
    n = make_mesh(name).size
    return of_job(logged(batch), (0.5 * n, 0.25 * n))("data=1", sequences, passes)


check_meter = lesson.checker(
    [("fsdp=8", 8, 3), ("fsdp=4,tensor=2", 16, 4), ("data=2,stage=4", 6, 2)],
    on_one, METER_HINTS, run=of_job, share=1e-3,
    done="Right on three meshes: as one device that takes eight times as long.",
)  # fmt: skip

# %% tags=["hide-output"]
print(check_meter(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Devices along `tensor` have the same tokens, so `shard_bT.size * self.mesh.size` counts every token twice
# here. Count the batch itself: `self.tokens += batch_BT.size`. The MFU is 22.5%. With `data` and `fsdp`
# alone, the two counts are equal, so a test on such a mesh passes.
#
# **Where it happened.** TRL added up the tokens of all processes, also of tensor-parallel copies of one
# batch; with 32 of them, the logged tokens/s were 32 times too high
# ([issue](https://github.com/huggingface/trl/issues/7100)). Others divided by a wrong peak. A guide to
# fine-tuning on 16 A100 reported 45.51%, from the tokens of all GPUs and the peak of one
# ([issue](https://github.com/huggingface/blog/issues/1649)); OLMo-core halved a peak that was already dense
# ([pull request](https://github.com/allenai/OLMo-core/pull/614)). An MFU above 100% gives itself away; 45%
# does not. Compare it with the share of time that a profile shows in matmuls.
# </details>


# %% tags=["remove-cell"]
class Mended(Meter):
    def count(self, batch_BT):
        self.tokens += batch_BT.size


mended = lesson.replaced(train, Meter=Mended)
assert 0.445 < train(job, [3.43])[0]["MFU"] < 0.455, "the text says 45%"
assert 0.222 < mended(job, [3.43])[0]["MFU"] < 0.228, "the text says 22.5%"
done = "Right on three"
lesson.expect(check_meter, *METER_HINTS, (mended, done), (logged(batch), done),
              (train, METER_HINTS[0][1]),
              (lambda job, seconds: ..., lesson.NOTHING))  # fmt: skip
one_gpu = Job("data=1", 2, 2048, 1)
with_2048 = {"mesh": "data=1", "data.batch_size": 2, "data.seq_len": 2048} | ALIKE
plan = planner.plan(preset("llama3_8b", **with_2048), "h100:1")
tested = train(one_gpu, [3.0])[0]["MFU"]
assert lesson.same(tested, plan.mfu(3.0), 1e-3), "on one device"

# %% [markdown]
# ## In one table
#
# `x_BD @ w_DF` on n devices in bfloat16, with b = B/n, d = D/n, f = F/n. *Exposed* communication does not
# overlap with compute, so the step waits for it.
#
# | layout | each device stores | communication | bytes a device sends | exposed |
# |---|---|---|---|---|
# | `x_bD @ w_DF` | rows of x, all of w | none | 0; the backward pass all-reduces w's gradient | no |
# | `x_BD @ w_Df` | all of x, columns of w | none | 0; gathering y sends 2 B F (n - 1)/n | if y is gathered |
# | `x_Bd @ w_dF` | columns of x, rows of w | all-reduce of y | 4 B F (n - 1)/n | yes: the next matmul needs y |
#
# The names elsewhere:
#
# | JAX | PyTorch | Megatron-LM |
# |---|---|---|
# | `Mesh`, its axes | `DeviceMesh`, its `mesh_dim_names` | parallel groups: data, tensor, pipeline, context, expert |
# | `PartitionSpec` | placements: `Shard(0)`, `Replicate()`, `Partial()` (a partial sum) | fixed by the layer's class |
# | one process for all devices of a host | a process per device, its number is the *rank* | the same, ranks in each group |
# | `jax.block_until_ready` | `torch.cuda.synchronize` | the same |
#
# ## Three lines to keep
#
# 1. A step takes at least the longest of these times, and at most their sum: FLOPs divided by FLOP/s, and,
#    for memory and each link, bytes divided by bandwidth.
# 2. A larger batch makes the communication of weights cheaper per token, but not the communication of
#    activations.
# 3. Simulated devices show what is sent, but not how fast. On real devices, wait for the result.
#
# **Sources.** Rooflines: [the original paper](https://doi.org/10.1145/1498765.1498785) (2009); the JAX
# scaling book, [Rooflines](https://jax-ml.github.io/scaling-book/roofline),
# [TPUs](https://jax-ml.github.io/scaling-book/tpus), [GPUs](https://jax-ml.github.io/scaling-book/gpus) and
# [Sharding](https://jax-ml.github.io/scaling-book/sharding); [Google's TPU v4
# page](https://cloud.google.com/tpu/docs/v4) and [paper](https://arxiv.org/abs/2304.01433). MFU: PaLM,
# [arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 4.1 and appendix B. JAX: [asynchronous
# dispatch](https://docs.jax.dev/en/latest/async_dispatch.html), [arrays on several
# devices](https://docs.jax.dev/en/latest/sharded-computation.html).
