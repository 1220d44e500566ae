# %% [markdown]
# # 00 · Rooflines and meshes
#
# **Question.** How long does a training step take on many chips, and can you know before you run it?
#
# **Why it hurts not to know.** The usual way is to count FLOPs. Below, this is wrong for one matmul, for a
# matmul sharded over eight chips, and for a whole training step. The bug at the end is from a published
# guide: the efficiency in it was more than ten times too high, and looked normal.
#
# *Prerequisites:* matmuls, NumPy, one GPU. *Mesh:* several, of eight simulated devices (explained below).
# *Runs in* 30 s on 2 cores. *Reading takes* 25 minutes, 80 with the exercises.

# %%
from devices import simulate_devices

simulate_devices(8)

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax.sharding import NamedSharding, PartitionSpec as P

from chapters import lesson
from config import MeshConfig, preset
from plan import hardware, planner
from sharding import FSDP, STAGE, TENSOR, as_tuple, make_mesh

# %% [markdown]
# ## One matmul, two wrong estimates
#
# Start with the smallest step there is: `x`, a batch of B rows with D numbers each, times one D x F matrix,
# `w`. (In a transformer, a row is one token.) The matmul takes `2 B D F` FLOPs: one multiplication and one
# addition for each row and each entry of `w`. How fast does this machine compute them? In the code, the name
# of an array ends with its dims, one letter each: `x_BD` has B rows and D columns.

# %%
D, F = 2560, 1536
keys = jax.random.split(jax.random.key(0), 4)
ws = [jax.random.normal(key, (F, D)) for key in keys]  # larger than caches
# F comes first, as a CPU then reads w once, without a copy.
product = jax.jit(lambda x_BD, w_FD: jnp.einsum("FD,BD->FB", w_FD, x_BD))

x_BD, tries = jnp.ones((256, D)), []
for w_FD in 4 * ws:
    start = time.perf_counter()
    y_FB = product(x_BD, w_FD)
    returned = time.perf_counter() - start
    jax.block_until_ready(y_FB)
    tries.append((returned, time.perf_counter() - start))

returned, ready = min(tries)
for name, took in {"returned": returned, "ready": ready}.items():
    speed = 2 * 256 * D * F / took
    print(f"{name:8} after {took * 1e3:6.3f} ms: {speed / 1e9:7,.0f} GFLOP/s")
assert returned < ready / 2

# %% [markdown]
# The first line is not a speed. JAX returns before the result exists and computes in the background
# ([asynchronous dispatch](https://docs.jax.dev/en/latest/async_dispatch.html)). If you stop the clock there,
# you have measured Python. Always wait for the result.
#
# From here on we measure *CPU seconds* instead of wall time, because other programs may share this machine.
# The speeds below are therefore those of one core.
#
# > **Predict.** Eight rows need eight times the FLOPs of one row, with the same `w`. How many times the CPU
# > seconds?


# %%
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
my_prediction = None  # times the seconds of one row
measured = seconds[8] / seconds[1]
lesson.predicted("8 rows over 1 row", my_prediction, measured, "times", within=0.3)

# %% [markdown]
# ## Two limits: memory and compute
#
# The slow part does not grow with the rows: the matmul must read all of `w`, `4 D F` bytes in float32,
# however few rows there are. So there are two times to know: FLOPs divided by FLOP/s, and bytes divided by
# the memory bandwidth in bytes/s. A core can multiply while it waits for more data. With perfect overlap, the
# matmul takes the longer of the two times. With no overlap, it takes their sum, which is at most twice as
# long.
#
# Which time is longer depends on the FLOPs per byte, the *arithmetic intensity*. Here it is `2 B D F / 4 D F
# = B / 2`: only the number of rows matters. The intensity at which both times are equal depends only on the
# machine: FLOP/s divided by bytes/s, the *ridge point*. Below it a program is memory-bound, above it
# compute-bound.
#
# The smallest matmul gives us the bandwidth, and the largest the FLOP/s. Now we can estimate the time for all
# sizes between them:

# %%
touched = lambda B: 4 * (D * F + B * D + B * F)  # bytes: w, x and y, once each
flops = lambda B: 2 * B * D * F
memory, peak = touched(1) / seconds[1], flops(256) / seconds[256]
print(f"a core: {peak / 1e9:.0f} GFLOP/s, {memory / 1e9:.1f} GB/s")
print(f"its ridge point: {peak / memory:.1f} FLOPs per byte")
print("rows  measured  longer     sum  longer is")
between = []
for B, took in seconds.items():
    parts = {"bytes": touched(B) / memory, "FLOPs": flops(B) / peak}
    longer, both = max(parts.values()), sum(parts.values())
    print(f"{B:4} {took * 1e3:6.2f} ms {longer * 1e3:7.2f} {both * 1e3:7.2f}", end="")
    print("  " + max(parts, key=parts.get))
    between.append(longer <= took <= both)
    assert 0.6 * longer < took < 1.6 * both
print(f"{sum(between)} of {len(between)} are between the two estimates")

# %% tags=["remove-cell"]
assert measured < 6

# %% [markdown]
# On a machine that runs nothing else, every measured time would be between the two estimates. This machine is
# shared, so some are not. But none is below 0.6 times the longer time or above 1.6 times the sum. The two
# estimates differ most near the ridge point, where both times are equal. An accelerator is described by the
# same few numbers. These come from `plan/hardware.py`, which cites their sources:

# %%
v4, h100 = hardware.CHIPS["v4"], hardware.CHIPS["h100"]
print("                GB/s  FLOPs per byte, ridge point")
for chip in (v4, h100):
    speeds = {"memory": chip.hbm_bytes_per_s, "link": chip.link_bytes_per_s}
    speeds["off slice"] = chip.dcn_bytes_per_s
    print(f"{chip.name}, {chip.peak_flops_per_s / 1e12:.0f} TFLOP/s")
    for name, speed in speeds.items():
        print(f"  {name:9} {speed / 1e9:8,.2f} {chip.peak_flops_per_s / speed:9,.0f}")

# %% [markdown]
# *Memory* is the chip's own HBM. A *link* connects two chips. A TPU v4 has six links, two in each of three
# directions; for an H100, the row counts all its NVLinks together. Chips that are connected by links form a
# *slice* (TPU) or a *node* (GPU). *Off slice* is the network between slices or nodes (DCN, InfiniBand), per
# chip. Bandwidths are for one direction.
#
# TFLOP/s are for *bfloat16*, which has 2 bytes per number instead of 4, so B rows need B FLOPs per byte of
# `w`.
#
# The last column tells you what a byte costs. On a TPU v4, a byte from memory takes as long as 229 FLOPs, a
# byte from a neighbor as long as 6,111, and a byte from another slice as long as 44,000. The first number is
# why servers batch requests: up to about 229 rows, one more row costs a TPU v4 almost nothing.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three rooflines of a TPU v4, for memory, a link and off slice, and below them the roofline of this CPU with nine measured matmuls."}}
figure, axes = plt.subplots(figsize=(5.6, 4.2))
intensity = [10 ** (n / 20) for n in range(-12, 105)]
top = v4.peak_flops_per_s / 1e9
roof = lambda peak, speed: [min(peak, i * speed / 1e9) for i in intensity]
wires = {"memory": v4.hbm_bytes_per_s, "a link": v4.link_bytes_per_s}
wires["off slice"] = v4.dcn_bytes_per_s
for (name, speed), style in zip(wires.items(), ("-", "--", ":"), strict=True):
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
# Large models train on thousands of these chips. To divide the work, we arrange the devices in a grid, the
# *mesh*, whose axes have names. In this guide every mesh has the same six axes, and most of them have size 1.
#
# | axis | what differs between devices along this axis |
# |---|---|
# | `data` | sequences |
# | `stage` | layers (pipeline parallelism) |
# | `fsdp` | sequences, and shards of every weight |
# | `expert` | sequences, and experts (in layers with several MLPs to choose from) |
# | `context` | positions of the same sequences |
# | `tensor` | shards of the same weight matrices, for the same tokens |
#
# The order matters. The last axis varies fastest, so devices along it are the closest chips. We write a mesh
# as `stage=2,tensor=4`; all other axes have size 1.

# %%
cube = make_mesh("stage=2,fsdp=2,tensor=2")
print(cube.device_ids.squeeze())  # [stage, fsdp, tensor], without the axes of size 1

# %% tags=["hide-input"] mystnb={"image": {"alt": "A cube of eight numbered devices. Edges in three colors connect devices along stage, fsdp and tensor."}}
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
# Where is an array stored? A `PartitionSpec`, here `P`, lists for each dim the mesh axes that split it into
# equal shards. A dim without an axis is not split, and neither are dims after the end of a short spec. Along
# an axis that the spec does not list, every device holds the same data: the array is replicated. A spec and a
# mesh together are a `NamedSharding`. Here both dims of `w_DF` are sharded:

# %%
mesh = make_mesh("fsdp=4,tensor=2")
w_DF = ws[0].T
cut_DF = jax.device_put(w_DF, NamedSharding(mesh, P(FSDP, TENSOR)))
print(cut_DF.shape, cut_DF.nbytes, "bytes, of which")
for shard in cut_DF.addressable_shards[:3]:
    d, f = shard.index
    piece = f"[{d.start}:{d.stop}, {f.start}:{f.stop}]"
    print(f"device {shard.device.id}: {piece}, {shard.data.nbytes} bytes")

# %% tags=["hide-input"] mystnb={"image": {"alt": "The same matrix four times, sharded by four specs; each shard shows the numbers of the devices that hold it."}}
figure, axes = plt.subplots(2, 2, figsize=(6, 4.4))
figure.suptitle("A spec says which devices hold which shard", size=11)
specs = P(FSDP, TENSOR), P(FSDP), P(None, TENSOR), P()
for panel, spec in zip(axes.flat, specs, strict=True):
    held = jax.device_put(w_DF, NamedSharding(mesh, spec)).addressable_shards[0].data
    words = ", ".join(str(axis) for axis in spec)
    size = f"{held.nbytes / 2**20:.3g} MiB each"
    lesson.slices(panel, mesh, spec, "DF", f"P({words}): {size}")

# %% [markdown]
# ## What a simulated device is
#
# This machine does not have eight chips. `simulate_devices` makes JAX split the CPU into eight virtual
# devices in one process. They share its threads and memory. Is a matmul faster on them? Each gets an eighth
# of the rows and a copy of `w`.

# %%
eight, x_BD = make_mesh("fsdp=8"), jnp.ones((512, D))
cut_BD = jax.device_put(x_BD, NamedSharding(eight, P(FSDP)))
copies_FD = jax.device_put(ws[0], NamedSharding(eight, P()))
on_one, on_eight = timed(x_BD, ws[:1]), timed(cut_BD, [copies_FD])
print(f"CPU time on one device: {on_one * 1e3:.0f} ms")
print(f"on eight, in total:     {on_eight * 1e3:.0f} ms")
assert lesson.same(product(x_BD, ws[0]), product(cut_BD, copies_FD))
assert on_eight > 0.7 * on_one
del copies_FD

# %% [markdown]
# The result and the amount of work are the same, because the same cores compute all eight shards. A speed on
# simulated devices means nothing. But you can count what each device holds and sends.
#
# ## What a layout communicates
#
# No line above says "send". What must be sent follows from what each device lacks. `run` below compiles the
# matmul for a layout, and counts one device's FLOPs and *collectives* (communication operations) in the
# compiled program. First the rows of `x` are sharded, then the columns of `w`. The third layout shards the
# rows again, but over `fsdp`, on a mesh where that axis has size 1.

# %%
row = make_mesh("tensor=8")
x_BD = jax.random.normal(keys[0], (32, D))


def run(x_spec, w_spec, y_spec):
    put = lambda array, spec: jax.device_put(array, NamedSharding(row, spec))
    args = put(x_BD, x_spec), put(w_DF, w_spec)
    laid_out = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(row, y_spec))
    assert lesson.same(laid_out(*args), x_BD @ w_DF)  # one device's result
    return lesson.compiled(laid_out, row, *args)


layouts = {"rows of x": (P(TENSOR), P(), P(TENSOR))}  # of x, of w, of the result
layouts["columns of w"] = P(), P(None, TENSOR), P(None, TENSOR)
layouts["rows by fsdp"] = P(FSDP), P(), P(FSDP)
for cut, specs in layouts.items():
    found = run(*specs)
    print(f"{cut:12} {found.flops:11,} FLOPs, {len(found.collectives)} collectives")

# %% [markdown]
# In the first two layouts, a device does an eighth of the FLOPs and sends nothing. The price is memory:
# every device stores all of `w`, or all of `x`. The third layout is a mistake without an error: an axis of
# size 1 splits nothing, so all eight devices do all the work.
#
# Next, shard D, the contracting dim, which the matmul sums over, in both matrices. Device i has 320 of the
# 2,560 columns of `x` and the 320 matching rows of `w`. Every device should end with the whole result,
# `y_BF`, with B = 32 and F = 1,536 in float32.
#
# > **Predict.** How many bytes does each device contribute to the collective?

# %%
found = run(P(None, TENSOR), P(TENSOR), P())
my_prediction = None  # bytes
(only,) = found.collectives
lesson.predicted("all-reduce payload", my_prediction, only.payload_bytes, "bytes")
print(f"{only.kind} over {only.axes[0]}, {found.flops:,} FLOPs per device")

# %% [markdown]
# The payload is all of `y`, not an eighth of it. A device can sum only over its own shard of D, so it gets a
# *partial sum* of every entry: a full-size array of incomplete numbers.

# %% tags=["hide-input"] mystnb={"image": {"alt": "x sharded into eight blocks of columns, w into eight blocks of rows, each with its device number; next to them eight full-size arrays, one behind the other."}}
figure, axes = plt.subplots(1, 3, figsize=(6.4, 2.4))
figure.suptitle("Sharding the contracting dim leaves partial sums", size=11)
lesson.slices(axes[0], row, P(None, TENSOR), "BD", "x")
lesson.slices(axes[1], row, P(TENSOR), "DF", "w")
for n in reversed(range(8)):  # columns n times rows n, on device n
    corner, colour = (0.04 * n, 0.04 * n), lesson.COLORS[TENSOR]
    shade = 0.25 + 0.5 * n / 7
    for look in {"facecolor": "white"}, {"facecolor": colour, "alpha": shade}:
        axes[2].add_patch(plt.Rectangle(corner, 0.72, 0.72, ec="black", lw=0.8, **look))
axes[2].text(0.36, 0.36, "0", ha="center", va="center", size=9, color="black")
axes[2].set(xticks=[], yticks=[], title="y: 8 partial sums", xlabel="F")
axes[2].set(xlim=(0, 1.01), ylim=(0, 1.01))
axes[2].set_ylabel("B", rotation=0, labelpad=10)
axes[2].spines[:].set_visible(False)

# %% [markdown]
# Adding these arrays and giving every device the sum is an *all-reduce*. If every device sent its array to
# all others, it would send 7 payloads. A ring needs less. The array is split into eighths. In each of 7 steps
# every device passes one eighth on to its neighbor, which adds its own numbers. After that, each device has
# one eighth of the sum. In 7 more steps these eighths travel around the ring. So each device sends 14
# eighths, or 1.75 payloads. With n devices it is `2 (n - 1)/n`: never more than 2. This is the project's
# formula (chapter 01 covers the other collectives):

# %%
lesson.source(hardware.wire_bytes)
sent = hardware.wire_bytes("all-reduce", only.payload_bytes, 8)
print(f"a device sends {sent:,.0f} bytes")
assert (only.kind, only.payload_bytes) == ("all-reduce", 32 * F * 4)
assert sent == 14 * only.payload_bytes / 8

# %% [markdown]
# The payload was counted in the compiled program. The bytes sent come from the formula, because there is no
# link to measure.
#
# Next, real chips: a 4x4x4 slice of 64 TPU v4, as the mesh `fsdp=16,tensor=4`. Four chips in a line divide a
# matmul like this one, with D = F = 8,192 in bfloat16.

# %%
box, wide = hardware.Topology.parse("v4:4x4x4"), 8192
link = hardware.layout(MeshConfig.parse("fsdp=16,tensor=4"), box)[TENSOR]
print(f"tensor: {link.bytes_per_s / 1e9:.0f} GB/s, in direction {link.torus_axes[0]}")
wire_ridge = v4.peak_flops_per_s / link.bytes_per_s
print(f"ridge point of this link: {wire_ridge:,.0f} FLOPs per byte")
for B in (512, 4096, 32768):
    multiply = 2 * B * wide * wide / 4 / v4.peak_flops_per_s
    send = hardware.collective_seconds("all-reduce", 2 * B * wide, 4, link)
    print(f"B={B:6}: multiply {multiply * 1e3:.2f} ms, send {send * 1e3:.2f} ms")
assert abs(send / multiply - wire_ridge / (wide / 6)) < 1e-6

# %% [markdown]
# x is one of the three directions of the slice. A chip has two links in this direction, and the fourth chip
# is connected to the first. So the line is a ring, and a chip can send 2 * 45 GB/s along it.
#
# A larger batch does not help: FLOPs and bytes both grow in proportion to B. Per byte sent, one of n devices
# computes `(2 B D F / n) / (2 (n - 1)/n * 2 B F) = D / (2 (n - 1))` FLOPs, here 8,192 / 6 = 1,365. Only a
# larger D or fewer devices bring this matmul above the ridge point of its link.
#
# ## The same by hand
#
# You can paste this program into an empty file. It shards x and w in four ways, and prints which lines of
# each compiled program are collectives.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

chips = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
x_BD, w_DF = np.ones((32, 256), "float32"), np.ones((256, 96), "float32")
layouts = {  # specs of x, of w, of the result
    "rows of x": (P("tensor"), P(), P("tensor")),
    "columns of w": (P(), P(None, "tensor"), P(None, "tensor")),
    "the sum, whole result": (P(None, "tensor"), P("tensor"), P()),
    "the sum, rows of the result": (P(None, "tensor"), P("tensor"), P("tensor")),
}

# %% tags=["by-hand"]
for name, (x_spec, w_spec, y_spec) in layouts.items():
    at = lambda spec: NamedSharding(chips, spec)
    product = jax.jit(jnp.matmul, out_shardings=at(y_spec))
    args = jax.device_put(x_BD, at(x_spec)), jax.device_put(w_DF, at(w_spec))
    np.testing.assert_allclose(product(*args), x_BD @ w_DF)  # one device's result
    text = product.lower(*args).compile().as_text()
    pattern = r"= (\S+?)(?:\{\S*)? (all-reduce|all-gather|reduce-scatter)\("
    print(f"{name}:", re.findall(pattern, text) or "no collective")

# %% [markdown]
# `f32[32,96]` is the compiler's notation for a float32 array with 32 rows: the payload. The last layout needs
# only an eighth of the rows on each device. Still, the CPU compiler emits an all-reduce of everything and
# slices its result. Half the bytes would be enough (chapter 01).
#
# ## A whole step
#
# The project's planner, `planner.plan`, adds this up for every matmul and every collective of `model.py`. It
# reads shapes from the model's declarations and bandwidths from `hardware.layout`, and runs on no device.
# Here is Llama 3 8B on the same 64 chips, with 64 sequences of 512 tokens:


# %%
# All meshes run with the same settings, so that you can compare them.
ALIKE = {"work.remat": "full", "work.gather": "layer", "work.schedule": "gpipe"}
ALIKE |= {"work.tensor_exchange": "ring"}


def step(B, mesh="fsdp=16,tensor=4", topology="v4:4x4x4"):
    settings = {"mesh": mesh, "data.batch_size": B, "data.seq_len": 512} | ALIKE
    return planner.plan(preset("llama3_8b", **settings), topology)


def alone(plan):
    return sum(plan.seconds(alone=True).values())


one = step(64)
for axis, link in hardware.layout(one.cfg.mesh, one.topology).items():
    where = " and ".join(link.torus_axes)
    print(f"{axis:10} {link.bytes_per_s / 1e9:6.0f} GB/s, on {where}")
for part, took in one.seconds(alone=True).items():
    if took > 1e-4:
        sent = one.wire_by_axes.get(part, 0)
        how = f": {sent / 1e9:.2f} GB at {sent / took / 1e9:.1f} GB/s" * (sent > 0)
        print(f"{part:10} {took * 1e3:6.1f} ms{how}")
print(f"step       {alone(one) * 1e3:6.1f} ms if nothing overlaps")
print(f"           {one.step_s * 1e3:6.1f} ms as the TPU compiler overlaps it")
print(f"MFU        {one.mfu(alone(one)):6.0%} to {one.mfu(one.step_s):.0%}")

# %% [markdown]
# The two axes send different data. `fsdp` shards every weight 16 ways: a layer's weights are gathered before
# its matmuls, and its gradients are reduce-scattered after them. The axis covers two directions of the slice,
# so it has four links. `tensor` shards matmuls and adds partial sums of activations, as above. It reaches
# three quarters of its 90 GB/s, because each of the four chips sends three messages here, two in one
# direction and one in the other. *Compute* is FLOPs divided by FLOP/s, and the *optimizer* is bound by HBM.
#
# *MFU*, model FLOPs utilization, is the fraction of the chips' peak FLOP/s that the model's own FLOPs use.
# Here the chips compute more than these, because every layer runs its forward pass twice to save memory. The
# planner knows which communication the TPU compiler overlaps with matmuls.
#
# > **Predict.** Four times the sequences on the same chips need four times the FLOPs. How many times the
# > seconds, if nothing overlaps?

# %%
my_prediction = None  # times the seconds of 64 sequences
four = step(256)
assert four.model_flops == 4 * one.model_flops
more = alone(four) / alone(one)
lesson.predicted("256 sequences over 64", my_prediction, more, "times", within=0.05)
print(f"MFU {four.mfu(alone(four)):.0%} to {four.mfu(four.step_s):.0%}")

# %% tags=["remove-cell"]
assert abs(more - 3.2) < 0.05
fsdp_of = lambda plan: plan.seconds(alone=True)[FSDP]
assert fsdp_of(one) <= fsdp_of(four) < 1.05 * fsdp_of(one)  # and tokens

# %% tags=["hide-input"] mystnb={"image": {"alt": "Seconds against tokens per chip: compute and tensor rise in parallel; fsdp is flat, and compute crosses it."}}
batches = [16 * 2**n for n in range(8)]
plans = [step(B) for B in batches]
tokens = [plan.tokens_per_step / 64 for plan in plans]
figure, axes = plt.subplots(figsize=(6, 3.8))
for part, colour in {"compute": lesson.NEUTRAL, TENSOR: None, FSDP: None}.items():
    took = [plan.seconds(alone=True)[part] for plan in plans]
    colour = colour or lesson.COLORS[part]
    axes.loglog(tokens, took, "o-", ms=4, color=colour, label=part)
axes.set(title="With a larger batch, compute exceeds fsdp, but never tensor")
axes.set(xlabel="tokens per chip and step", ylabel="seconds per step")
axes.legend()

# %% [markdown]
# Weights are sent as often for one token as for a thousand, so with enough tokens compute takes longer than
# that communication. Activations are sent for each token, so the time of `tensor` always grows in proportion
# to compute.
#
# Is the plan right? `planner.compile_plan` compiles the trainer's step, here for a small model on eight
# simulated devices, and counts the FLOPs and the bytes sent in the compiled program.

# %%
small = {"mesh": "fsdp=4,tensor=2", "model.n_layers": 2, "model.attention": "gqa"}
# Two layers alike: no experts, and the same attention in both.
small |= {"model.n_experts": 0, "model.dense_prefix": 0, "model.no_rope_every": 0}
print("                  planned    compiled")
for B in (64, 256):
    planned = planner.plan(preset("tiny", **small, **{"data.batch_size": B}))
    counted, _ = planner.compile_plan(planned, say=lambda text: None)
    pairs = {"FLOPs": (planned.hardware_flops, counted["hardware_flops"])}
    for axis in (FSDP, TENSOR):
        pairs[axis] = planned.wire_by_axes[axis], counted["wire_by_axes"][axis]
    for what, (ours, theirs) in pairs.items():
        print(f"B={B:3} {what:6} {ours:12,.0f} {theirs:11,.0f}")
        assert abs(ours / theirs - 1) < 0.005

# %% [markdown]
# FLOPs agree exactly, and bytes sent within half a percent.
#
# ## What it costs, and when not to use it
#
# **The rule.** For each link, divide the FLOPs that a device computes in a step by the bytes that it sends
# over the link, and compare with the link's ridge point. At the ridge point, communication takes as long as
# compute. Below it, the matmuls mostly wait. (The ring over `tensor=4` takes nearly 4/3 of that time: it
# sends in both directions, and one of them is idle in every second step.)

# %%
for plan in (one, four):
    print(f"{plan.cfg.data.batch_size} sequences     FLOPs per byte   ridge")
    for axis, link in hardware.layout(plan.cfg.mesh, plan.topology).items():
        did = plan.hardware_flops / plan.wire_by_axes[axis]
        ridge = v4.peak_flops_per_s / link.bytes_per_s
        print(f"  {axis:14} {did:13,.0f} {ridge:7,.0f}")
took, tokens = one.seconds(alone=True), one.tokens_per_step / 64
print(f"{tokens:.0f} tokens per chip: compute {took['compute'] * 1e3:.1f} ms", end=", ")
print(f"fsdp {took[FSDP] * 1e3:.1f} ms; both are equal with", end=" ")
at_ridge = tokens * took[FSDP] / took["compute"]
print(f"{tokens:.0f} * {took[FSDP] / took['compute']:.2f} = {at_ridge:.0f} tokens")

# %% tags=["remove-cell"]
took, speed = four.seconds(alone=True), four.topology.chip.peak_flops_per_s
at_full = speed / link.bytes_per_s / (four.hardware_flops / four.wire_by_axes[axis])
of_it = took[axis] / took["compute"] / at_full
assert 1.25 < of_it < 4 / 3, "the text says nearly 4/3"

# %% [markdown]
# More chips have the opposite effect. Each of n devices along an axis does 1/n of the FLOPs. But to gather an
# array over that axis, it sends (n - 1)/n of the array: nearly the same for any n. So each doubling of n
# halves the FLOPs per byte. Here the same batch of 512 sequences runs on more and more chips:

# %%
first = step(512)
for n, topology in {16: "v4:4x4x4", 64: "v4:8x8x4", 256: "v4:16x16x4"}.items():
    plan = step(512, f"fsdp={n},tensor=4", topology)
    chips, gain = plan.topology.chips, first.step_s / plan.step_s
    print(f"{chips:5,} chips, {plan.tokens_per_step // chips:5,} tokens each: ", end="")
    print(f"{gain:3.1f}x, MFU {plan.mfu(plan.step_s):.0%}")
assert 11 < gain < 12

# %% [markdown]
# The last line has sixteen times as many chips as the first, but much less than sixteen times the speed: each
# chip does a sixteenth of the compute, but sends nearly as many bytes. Below a ridge point, increase the
# batch or choose another mesh first.
#
# **What this leaves out.** Real programs do not reach the peak: the scaling book
# [reports](https://jax-ml.github.io/scaling-book/roofline) up to 95% on TPUs, and 80 to 85% on an H100. The
# planner considers memory bandwidth only for the optimizer. And it ignores latency, about [1 us per
# hop](https://jax-ml.github.io/scaling-book/sharding): a link of 45 GB/s carries 45 kB in that time, so
# smaller messages take about as long as 45 kB.
#
# **What simulated devices cannot show:** any speed, any overlap, and whether a device's memory is large
# enough.
#
# ## Exercise 1: quantized weights
#
# For serving, weights are often stored in int8, 1 byte per entry, and multiplied in bfloat16. How many rows
# does a matmul need to stop being memory-bound, if an entry has `width` bytes? Count only the bytes of the
# weights. A chip has `chip.peak_flops_per_s` and `chip.hbm_bytes_per_s`.


# %% tags=["hide-input"]
def ridge_of(key, wire="hbm_bytes_per_s"):
    return hardware.CHIPS[key].peak_flops_per_s / getattr(hardware.CHIPS[key], wire)


def check_rows(rows_needed):
    mistakes = [
        (lambda c, w: w * ridge_of(c), "Two times too many. FLOPs per entry and row?"),
        (lambda c, w: ridge_of(c), "Right for bfloat16 only. Where is the width?"),
        (lambda c, w: ridge_of(c) / 2, "Right for int8 only. Where is the width?"),
        (lambda c, w: 2 * ridge_of(c) / w, "Fewer rows for wider entries. Is that so?"),
        (lambda c, w: w * ridge_of(c, "link_bytes_per_s") / 2, "That is a link."),
        (lambda c, w: w / ridge_of(c) / 2, "Less than a row. Invert the ridge point?"),
        (lambda c, w: 2 / ridge_of(c) / w, "Less than a row. Which side is larger?"),
    ]
    answer = lambda key, width: lesson.answered(rows_needed)(hardware.CHIPS[key], width)
    cases = [("v4", 1), ("h100", 2), ("v5p", 4)]
    right = lambda c, w: w * ridge_of(c) / 2
    done = "Right on three chips. Half the width, half the rows: so servers use int8."
    # Whole rows are right too.
    return lesson.diagnose(answer, cases, right, mistakes, done, share=0.01)


# %%
def rows_needed(chip, width):
    return ...


print(check_rows(rows_needed))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return width * chip.peak_flops_per_s / chip.hbm_bytes_per_s / 2`. B rows need `2 B` FLOPs per entry, and
# an entry has `width` bytes: the intensity is `2 B / width`, and it should equal the ridge point. On a v4
# that is 229 rows in bfloat16 and half as many in int8.
# </details>

# %% tags=["remove-cell"]
top = lambda c: c.peak_flops_per_s / c.hbm_bytes_per_s
assert "Right on" in check_rows(lambda c, w: w * top(c) / 2)
assert "Right on" in check_rows(lambda c, w: -(-w * top(c) // 2))  # whole rows
assert "Nothing" in check_rows(lambda c, w: ...) and "Nothing" in check_rows(...)
assert "Not yet" in check_rows(lambda c, w: 240)
for wrong, hint in (
    (lambda c, w: w * top(c), "Two times"),
    (lambda c, w: top(c), "bfloat16 only"),
    (lambda c, w: top(c) / 2, "int8 only"),
    (lambda c, w: 2 * top(c) / w, "Fewer rows"),
    (lambda c, w: w * c.peak_flops_per_s / c.link_bytes_per_s / 2, "That is a link"),
    (lambda c, w: w / top(c) / 2, "Invert the ridge"),
    (lambda c, w: 2 / top(c) / w, "Which side"),
):
    assert hint in check_rows(wrong), hint

# %% [markdown]
# ## Exercise 2: bytes that a device stores
#
# Return how many bytes of a float32 array with a given `shape` one device stores. `spec` is a tuple with an
# entry for each of the first dims: `None`, one axis, or a tuple of axes that split the dim together
# (`as_tuple` turns any of them into a tuple). Dims after the end of a short spec are not split.
# `mesh.shape[axis]` is the size of an axis. The check puts real arrays on two meshes.


# %% tags=["hide-input"]
import math

whole = lambda shape: 4 * math.prod(shape)  # bytes


def cuts(spec, mesh, join=math.prod):
    sizes = make_mesh(mesh).shape
    return join([sizes[axis] for entry in spec for axis in as_tuple(entry)])


def really_held(shape, spec, mesh):
    array = jax.device_put(jnp.zeros(shape), NamedSharding(make_mesh(mesh), P(*spec)))
    return array.addressable_shards[0].data.nbytes


# %% tags=["hide-input"]
def check_held(held_bytes):
    first = lambda spec: [as_tuple(entry)[:1] for entry in spec]
    single = lambda spec: [entry for entry in spec if not isinstance(entry, tuple)]
    named = lambda shape, spec: shape[: len(spec)]
    mistakes = [
        (lambda s, p, m: whole(s) / 8, "You divided by all devices. All axes?"),
        (lambda s, p, m: whole(s) / cuts(first(p), m), "Wrong if two axes cut a dim."),
        (lambda s, p, m: whole(s) / cuts(single(p), m), "Does a tuple split nothing?"),
        (lambda s, p, m: whole(s) / cuts(p, m, sum), "2 by 4 shards are how many?"),
        (lambda s, p, m: really_held(s, p, m) / 4, "Entries. How many bytes is each?"),
        (lambda s, p, m: whole(named(s, p)) / cuts(p, m), "A short spec drops no dim."),
        (lambda s, p, m: whole(s) * cuts(p, m), "More than all of it. Multiply?"),
        (lambda s, p, m: whole(s), "That is the whole array. How much is a shard?"),
    ]
    answer = lambda s, p, m: lesson.answered(held_bytes)(s, p, make_mesh(m))
    flat, box = "fsdp=4,tensor=2", "stage=2,fsdp=2,tensor=2"
    cases = [((64, 48), (FSDP, None), flat), ((24, 64), (None, (FSDP, TENSOR)), flat)]
    cases += [((40, 12), (TENSOR, FSDP), box), ((40, 12), (STAGE,), box)]
    return lesson.diagnose(answer, cases, really_held, mistakes, "Right on two meshes.")


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
# The formula does not contain the number of devices. Together they store one copy of the array for every
# position along the axes that the spec does not list.
# </details>


# %% tags=["remove-cell"]
def counts(spec, mesh):
    return [mesh.shape[axis] for entry in spec for axis in as_tuple(entry)]


def split(join):
    """An answer that combines the axis sizes of each entry with `join`."""
    return lambda s, p, m: whole(s) / math.prod(join(counts([entry], m)) for entry in p)


assert "Right on" in check_held(split(math.prod))
assert "Nothing" in check_held(lambda s, p, m: None) and "Nothing" in check_held(...)
assert "Not yet" in check_held(lambda *_: 7)
assert "KeyError" in check_held(lambda s, p, m: [m.shape[e] for e in p if e])
for wrong, hint in (
    (lambda s, p, m: whole(s) // m.size, "You divided by all devices"),
    (split(lambda found: (found or [1])[0]), "two axes cut"),
    (split(lambda found: found[0] if len(found) == 1 else 1), "tuple split nothing"),
    (lambda s, p, m: whole(s) / sum(counts(p, m)), "2 by 4"),
    (lambda s, p, m: split(math.prod)(s, p, m) / 4, "Entries"),
    (lambda s, p, m: split(math.prod)(s[: len(p)], p, m), "short spec"),
    (lambda s, p, m: whole(s) ** 2 / split(math.prod)(s, p, m), "More than all"),
    (lambda s, p, m: whole(s), "the whole array"),
):
    assert hint in check_held(wrong), hint

# %% [markdown]
# ## Exercise 3: what to send over the slow network
#
# You train Llama 3 8B on sixteen H100s in two nodes, with 16 sequences of T tokens per step. Inside a node, a
# GPU sends 450 GB/s. To the other node a GPU sends 50 GB/s, over its own network card; an axis with k GPUs in
# each node can use the cards of all k. Choose the sizes of `fsdp` and `tensor`, at most `tensor=8` because
# the model has 8 KV heads. First predict which is better for short sequences, and why. `priced` then tells
# you up to which length it is better.


# %%
def priced(mesh, T):
    settings = {"mesh": mesh, "data.batch_size": 16, "data.seq_len": T} | ALIKE
    return planner.plan(preset("llama3_8b", **settings), "h100:16")


for mesh in ("fsdp=16", "fsdp=4,tensor=4"):
    plan = priced(mesh, 1024)
    print(f"{mesh}: {plan.step_s:.3f} s with T=1024")
    for axis, link in hardware.layout(plan.cfg.mesh, plan.topology).items():
        print(f"  {axis:6} {link.bytes_per_s / 1e9:.0f} GB/s")


# %% tags=["hide-input"]
meshes = ["fsdp=16", "fsdp=8,tensor=2", "fsdp=4,tensor=4", "fsdp=2,tensor=8"]
best = lambda count: lambda T: min(meshes, key=lambda mesh: count(priced(mesh, T)))


def takes(choose):
    """The seconds of a step on the chosen mesh, as a function of T."""

    def seconds(T):
        mesh = str(MeshConfig.parse(choose(T)))
        if mesh not in meshes:
            raise ValueError(f"mesh {mesh} is none of {' or '.join(meshes)}")
        return priced(mesh, T).step_s

    return seconds


# %% tags=["hide-input"]
def check_mesh(mesh_for):
    fastest, slowest = best(lambda p: p.step_s), best(lambda p: -p.step_s)
    fewest, leanest = best(lambda p: p.wire_bytes), best(lambda p: p.peak_bytes)
    mistakes = [
        (lambda T: meshes[3], "The usual advice: for small T. What grows with T?"),
        (lambda T: meshes[0], "Best for many tokens. From which T on?"),
        (fewest, "The fewest bytes. Does a byte cost the same everywhere?"),
        (leanest, "The least memory. All of these fit; what takes long?"),
        (slowest, "The opposite. Which link carries most bytes of each mesh?"),
        (lambda T: meshes[1], "One mesh for all T, fastest for none. Try the others."),
        (lambda T: meshes[2], "One mesh for all T, fastest for none. Try the others."),
    ]
    mistakes = [(takes(choose), hint) for choose, hint in mistakes]
    answer = lambda T: takes(lesson.answered(mesh_for))(T)
    done = "Right for 512, 2,048 and 8,192 tokens: no mesh of these two axes is faster."
    cases, right = [(512,), (2048,), (8192,)], takes(fastest)
    said = lesson.diagnose(answer, cases, right, mistakes, done, share=0.01)
    return said.replace("Your answer there is", "Your step takes, in seconds:")


# %%
def mesh_for(T):
    return ...  # for example "fsdp=4,tensor=4"


print(check_mesh(mesh_for))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return "fsdp=2,tensor=8" if T < 1024 else "fsdp=16"`. With few tokens, most of the bytes are weights. With
# `tensor=8` inside a node, each GPU sends only an eighth of them over the slow network. With many tokens,
# most of the bytes are activations, and `tensor` takes longer on the fast links than `fsdp` on the slow
# network. At 2,048 tokens the fastest mesh sends more bytes than another mesh: it also matters over which
# link they go.
#
# Other axes may be better still. `python -m plan llama3_8b --topology h100:16 --search 16 --data.batch_size
# 16 --data.seq_len 512` tries them all, and saves more than a third of the time with pipeline stages.
# </details>

# %% tags=["remove-cell"]
assert "Right" in check_mesh(lambda T: "fsdp=2,tensor=8" if T < 1024 else "fsdp=16")
assert "Nothing" in check_mesh(lambda T: ...) and "Nothing" in check_mesh(None)
assert "at T=2048" in check_mesh(lambda T: "fsdp=2,tensor=8" if T < 4096 else "fsdp=16")
assert "none of" in check_mesh(lambda T: "stage=4,tensor=4")
with_stages = priced("stage=4,tensor=4", 512).step_s
assert with_stages < 0.65 * priced("fsdp=2,tensor=8", 512).step_s
for wrong, hint in (
    (lambda T: "fsdp=2,tensor=8", "usual advice"),
    (lambda T: "fsdp=16", "many tokens"),
    (lambda T: "fsdp=2,tensor=8" if T < 256 else "fsdp=16", "From which T"),
    (best(lambda plan: plan.wire_bytes), "fewest bytes"),
    (best(lambda plan: plan.peak_bytes), "least memory"),
    (best(lambda plan: -plan.step_s), "opposite"),
    (lambda T: "fsdp=8,tensor=2", "fastest for none"),
    (lambda T: "fsdp=4,tensor=4", "fastest for none"),
):
    assert hint in check_mesh(wrong), hint

# %% [markdown]
# ## A bug to find
#
# A trainer reports its MFU with this function. The function's test, on one chip, passes. Then the run is
# scaled up with one sequence of 2,048 tokens per chip. A step takes 12.2 s on 16 chips, and also on 64. Fix
# `mfu`.


# %%
def mfu(cfg, topology, step_s):
    """Model FLOPs of a step, divided by the FLOPs possible in that time."""
    tokens = cfg.data.batch_size * cfg.data.seq_len
    done = tokens * planner.model_flops_per_token(cfg)
    possible = topology.chip.peak_flops_per_s * step_s
    return done / possible


def run_of(mesh, topology, each=1):
    B = each * hardware.Topology.parse(topology).chips
    settings = {"mesh": mesh, "data.batch_size": B, "data.seq_len": 2048} | ALIKE
    return planner.plan(preset("llama3_8b", **settings), topology)


plan = run_of("data=1", "h100:1")
assert lesson.same(mfu(plan.cfg, plan.topology, 12.2), plan.mfu(12.2))  # the test
for mesh, topology in {"fsdp=16": "v4:4x4x1", "fsdp=64": "v4:4x4x4"}.items():
    plan = run_of(mesh, topology)
    print(f"{plan.topology.chips} chips: MFU {mfu(plan.cfg, plan.topology, 12.2):.1%}")


# %% tags=["hide-input"]
def check_mfu(mfu):
    def answer(*case):
        plan = run_of(*case)
        return lesson.answered(mfu)(plan.cfg, plan.topology, 12.2)

    chips = lambda p: p.topology.chips
    over = lambda n: lambda *case: run_of(*case).mfu(12.2) * n(run_of(*case))
    mistakes = [
        (lambda p: chips(p) / p.topology.hosts, "Right with one chip per host. Else?"),
        (lambda p: chips(p) / p.cfg.mesh.batch_shards, "Do all axes split the batch?"),
        (lambda p: chips(p) / p.cfg.data.batch_size, "What if a chip has 2 sequences?"),
        (lambda p: chips(p) / len(jax.devices()), "Whose devices does JAX count here?"),
        (lambda p: chips(p) ** 2, "Further off than before. Multiply or divide?"),
        (lambda p: p.hardware_flops / p.model_flops, "Too high: counted twice?"),
    ]
    mistakes = [(over(times), hint) for times, hint in mistakes]
    cases = [("data=1", "h100:1", 1), ("fsdp=8", "h100:8", 2)]
    cases += [("fsdp=8,tensor=4", "v4:4x4x2", 1)]  # mesh, chips, sequences per chip
    done = "Right on 1, 8 and 32 chips: the same MFU as the planner's."
    return lesson.diagnose(answer, cases, over(lambda p: 1), mistakes, done)


# %% tags=["hide-output"]
print(check_mfu(mfu))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `possible = topology.chips * topology.chip.peak_flops_per_s * step_s`. The batch belongs to all chips, but
# the peak was for one chip. 182% is impossible; 45.6% is dangerous, because it looks plausible.
#
# **Where it happened.** A guide to fine-tuning a 70B model on 16 A100 reported 45.51%, computed from the
# tokens of all GPUs and the peak of one GPU ([issue](https://github.com/huggingface/blog/issues/1649)).
# Divided by 16 that is 2.8%. PaLM had reported 46.2%, so the number looked like a success. After a reader
# asked, the author profiled the run, found that it mostly waited for communication, and removed the
# paragraph. In another trainer, a wrong peak gave 88% on average. It was found when one step showed 106%
# ([pull request](https://github.com/allenai/OLMo-core/pull/817)). A ratio that cannot exceed 1 deserves an
# `assert`, and a test on one device does not test a division by n.
# </details>


# %% tags=["remove-cell"]
def mended(cfg, topology, step_s):
    tokens = cfg.data.batch_size * cfg.data.seq_len
    done = tokens * planner.model_flops_per_token(cfg)
    return done / (topology.chips * topology.chip.peak_flops_per_s * step_s)


plan = run_of("fsdp=64", "v4:4x4x4")
assert 1.8 < mfu(plan.cfg, plan.topology, 12.2) < 1.84
assert "Right on" in check_mfu(mended) and "Nothing" in check_mfu(lambda *_: None)


def busy(cfg, on, step_s):
    each = cfg.data.batch_size // on.chips
    done = run_of(str(cfg.mesh), str(on), each).hardware_flops
    return done / step_s / on.chip.peak_flops_per_s


for wrong, hint in (
    (mfu, "though not in every case"),
    (lambda cfg, on, s: mfu(cfg, on, s) / on.hosts, "one chip per host"),
    (lambda cfg, on, s: mfu(cfg, on, s) / cfg.mesh.batch_shards, "Do all axes"),
    (lambda cfg, on, s: mfu(cfg, on, s) / cfg.data.batch_size, "2 sequences"),
    (lambda cfg, on, s: mfu(cfg, on, s) / len(jax.devices()), "Whose devices"),
    (lambda cfg, on, s: mfu(cfg, on, s) * on.chips, "Further off"),
    (busy, "Too high"),
    (lambda cfg, on, s: 0.5, "Not yet"),
):
    assert hint in check_mfu(wrong), hint

# %% [markdown]
# ## In one table
#
# `x_BD @ w_DF` on n devices in bfloat16, with b = B/n, d = D/n, f = F/n:
#
# | layout | each device stores | communication | bytes a device sends | exposed |
# |---|---|---|---|---|
# | `x_bD @ w_DF` | rows of x, all of w | none | 0; the backward pass all-reduces w's gradient | no |
# | `x_BD @ w_Df` | all of x, columns of w | none | 0; gathering y sends 2 B F (n - 1)/n | if y is gathered |
# | `x_Bd @ w_dF` | columns of x, rows of w | all-reduce of y | 4 B F (n - 1)/n | yes: the next matmul needs y |
#
# A matmul with B rows is memory-bound if B is below FLOP/s divided by the HBM bandwidth, and
# communication-bound if its FLOPs per byte sent are below FLOP/s divided by the link's bandwidth (one link of
# a TPU, all NVLinks of a GPU):

# %%
print(f"{'':12} {'HBM':>6} {'a link':>8} {'off slice':>10}")
for key in ("v4", "v5p", "h100", "b200"):
    chip = hardware.CHIPS[key]
    speeds = chip.hbm_bytes_per_s, chip.link_bytes_per_s, chip.dcn_bytes_per_s
    ridges = [chip.peak_flops_per_s / speed for speed in speeds]
    print(f"{chip.name:12} {ridges[0]:6,.0f} {ridges[1]:8,.0f} {ridges[2]:10,.0f}")

# %% [markdown]
# In PyTorch a mesh is a `DeviceMesh`, a `PartitionSpec` is a list of placements (`Shard(0)`, `Replicate()`,
# and `Partial()` for a partial sum), and you wait for the result with `torch.cuda.synchronize()`.
#
# ## Three lines to keep
#
# 1. A step takes at least the longest of these times, and at most their sum: FLOPs divided by FLOP/s, and,
#    for memory and each link, bytes divided by bandwidth.
# 2. A larger batch makes the communication of weights cheaper per token, but not the communication of
#    activations.
# 3. Simulated devices show what is sent, but not how fast. On real devices, wait for the result, and for MFU
#    divide by the peak of all chips whose FLOPs you counted.
#
# **Sources.** Rooflines: [the original paper](https://doi.org/10.1145/1498765.1498785) (2009); the JAX
# scaling book, [Rooflines](https://jax-ml.github.io/scaling-book/roofline),
# [TPUs](https://jax-ml.github.io/scaling-book/tpus), [GPUs](https://jax-ml.github.io/scaling-book/gpus) and
# [Sharding](https://jax-ml.github.io/scaling-book/sharding), the source of most numbers in
# `plan/hardware.py`; [Google's TPU v4 page](https://cloud.google.com/tpu/docs/v4). MFU: PaLM,
# [arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 4.1 and appendix B. JAX: [asynchronous
# dispatch](https://docs.jax.dev/en/latest/async_dispatch.html), [arrays on several
# devices](https://docs.jax.dev/en/latest/sharded-computation.html).
