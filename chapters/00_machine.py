# %% [markdown]
# # 00 · The machine
#
# **Question.** What does a step cost on a machine of many chips, and can I know before I run it?
#
# **Why it hurts not to know.** Counting FLOPs, as is usual, is wrong below for one product, for a
# product cut over eight chips, and for a whole training step. The bug at the end is from a published guide:
# its efficiency was wrong more than tenfold, and looked normal.
#
# *Before this:* matrix products, NumPy, one GPU. *Mesh:* several, of eight simulated devices
# (what these are is said below). *Runs in* 30 s on 2 cores.

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
# ## One product, two wrong forecasts
#
# The smallest step there is: B rows of width D meet one matrix, `w`, and become rows of width F. (In a
# transformer a row is a token, of any sequence of the batch.) That takes `2 B D F` FLOPs, a multiplication
# and an addition for each row and each entry of `w`. How fast does this machine do them? In the code, a name
# ends with the dims of its array, a letter each.

# %%
D, F = 2560, 1536
keys = jax.random.split(jax.random.key(0), 4)
ws = [jax.random.normal(key, (F, D)) for key in keys]  # used in turn, against caches
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
# The first line is no speed. JAX hands back a promise and works on in the background
# ([asynchronous dispatch](https://docs.jax.dev/en/latest/async_dispatch.html)). Who stops the clock there has
# measured Python. Always wait for the result.
#
# From here on we count *processor seconds*, as other programs may share this machine, and a clock on the wall
# counts them too. So speeds will be those of one core.
#
# > **Predict.** Eight rows are eight times the FLOPs of one row, and meet the same `w`. How many times the
# > processor seconds?


# %%
def timed(x_BD, ws=ws):
    """Processor seconds of a product: the mean of 40, after 4 that warm up."""
    for n in range(44):
        if n == 4:
            start = time.process_time()
        jax.block_until_ready(product(x_BD, ws[n % len(ws)]))
    return (time.process_time() - start) / 40


sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
seconds = dict.fromkeys(sizes, 1.0)
for B in 6 * sizes:  # six rounds, as a neighbour may disturb some
    seconds[B] = min(seconds[B], timed(jnp.ones((B, D))))
my_prediction = None  # times the seconds of one row
measured = seconds[8] / seconds[1]
lesson.predicted("8 rows over 1 row", my_prediction, measured, "times", within=0.3)

# %% [markdown]
# ## Two roofs
#
# The rows share what is slow. The product must read all of `w`, `4 D F` bytes in float32, however few rows
# meet it. So there are two times to know: FLOPs over FLOP/s, and bytes over bytes/s. A core can multiply what
# it has while it waits for more. If it always does, the product takes the longer of the two; if it never
# does, their sum, which is at most twice as much.
#
# Which one is longer depends on the FLOPs done for each byte, the *arithmetic intensity*. Here it is
# `2 B D F / 4 D F = B / 2`: the rows alone decide. The intensity at which both are equal belongs to the
# machine. It is FLOP/s over bytes/s, the *ridge*. Below it a program is memory-bound, above it compute-bound.
#
# The smallest product gives bytes/s, the largest FLOP/s. All between are forecasts.

# %%
touched = lambda B: 4 * (D * F + B * D + B * F)  # bytes: w, x and y, once each
flops = lambda B: 2 * B * D * F
memory, peak = touched(1) / seconds[1], flops(256) / seconds[256]
print(f"a core: {peak / 1e9:.0f} GFLOP/s, {memory / 1e9:.1f} GB/s")
print(f"its ridge: {peak / memory:.1f} FLOPs a byte")
print("rows  measured  longer     sum  longer is")
between = []
for B, took in seconds.items():
    parts = {"bytes": touched(B) / memory, "FLOPs": flops(B) / peak}
    longer, both = max(parts.values()), sum(parts.values())
    print(f"{B:4} {took * 1e3:6.2f} ms {longer * 1e3:7.2f} {both * 1e3:7.2f}", end="")
    print("  " + max(parts, key=parts.get))
    between.append(longer <= took <= both)
    assert 0.6 * longer < took < 1.6 * both
print(f"{sum(between)} of {len(between)} lie between the two forecasts")

# %% tags=["remove-cell"]
assert measured < 6

# %% [markdown]
# Between the two would be every product on a machine that does nothing else. This one is shared, so some rows
# miss, but none is faster than 0.6 of the longer time, or slower than 1.6 of the sum. The two forecasts
# differ most near the ridge, because there both times are alike. A chip is described by the same few numbers.
# Those below stand in `plan/hardware.py`, with their sources.

# %%
v4, h100 = hardware.CHIPS["v4"], hardware.CHIPS["h100"]
print("                GB/s  FLOPs a byte, ridge")
for chip in (v4, h100):
    speeds = {"memory": chip.hbm_bytes_per_s, "link": chip.link_bytes_per_s}
    speeds["off slice"] = chip.dcn_bytes_per_s
    print(f"{chip.name}, {chip.peak_flops_per_s / 1e12:.0f} TFLOP/s")
    for name, speed in speeds.items():
        print(f"  {name:9} {speed / 1e9:8,.2f} {chip.peak_flops_per_s / speed:9,.0f}")

# %% [markdown]
# *Memory* is a chip's own, its HBM. A *link* is a wire to another chip: a v4 has six, two in each of three
# directions; for an H100 the line counts all its NVLinks together. Chips that are joined by links are a
# *slice*, GPUs a *node*. *Off slice* is a chip's share of the network beyond (DCN, InfiniBand). Bytes/s are
# those of one direction.
#
# TFLOP/s are those of *bfloat16*, numbers of 2 bytes where float32 has 4, so that B rows do B FLOPs a byte.
#
# Read the last column as a price list. On a v4, a byte from memory is paid for by 229 FLOPs that it takes
# part in, a byte from a neighbour by 6,111, a byte from another slice by 44,000. The first price is why
# servers batch: up to some 229 rows, one more row costs a v4 next to nothing.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three roofs of a TPU v4, for memory, a link and off slice, and below them the roof of this CPU with nine measured products."}}
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
axes.set(title="Left of its ridge a machine waits for bytes", ylim=(0.5, 1e6))
axes.set(xlabel="FLOPs for each byte moved", ylabel="GFLOP/s at best")

# %% [markdown]
# ## Eight devices, six names
#
# A training machine is thousands of these chips. To say who does what, they are arranged in a box, the
# *mesh*, whose axes have names. In this guide every mesh has the same six axes, most of them of size 1.
#
# | axis | neighbours along it hold different |
# |---|---|
# | `data` | sequences |
# | `stage` | layers |
# | `fsdp` | sequences, and slices of every weight |
# | `expert` | sequences, and experts (of layers that have several feed-forward blocks to choose from) |
# | `context` | positions of the same sequences |
# | `tensor` | slices of the same matrix product |
#
# The order matters. The last axis counts fastest, so its neighbours are the nearest chips.

# %%
cube = make_mesh("stage=2,fsdp=2,tensor=2")
print(cube.device_ids.squeeze())  # [stage, fsdp, tensor], the axes of size 1 left out

# %% tags=["hide-input"] mystnb={"image": {"alt": "A cube of eight numbered devices. Edges in three colours join neighbours along stage, fsdp and tensor."}}
figure, axes = plt.subplots(figsize=(4.8, 2.8))
corners = [(s, f, t) for s in (0, 1) for f in (0, 1) for t in (0, 1)]
at = lambda s, f, t: (2.2 * t + 1.0 * s, -1.3 * f + 0.62 * s)
for s, f, t in corners:
    for axis, other in {STAGE: (1, f, t), FSDP: (s, 1, t), TENSOR: (s, f, 1)}.items():
        xs, ys = zip(at(s, f, t), at(*other), strict=True)
        axes.plot(xs, ys, color=lesson.COLOURS[axis], lw=3, zorder=1, label=axis)
    number = cube.device_ids[0, s, f, 0, 0, t]
    axes.plot(*at(s, f, t), "o", ms=20, mfc="white", mec="black", zorder=2)
    axes.text(*at(s, f, t), number, ha="center", va="center", color="black", zorder=3)
lines, names = axes.get_legend_handles_labels()
axes.legend(lines[:3], names[:3], loc="center left", bbox_to_anchor=(1, 0.5))
axes.margins(0.08, 0.15)
axes.set_title("A device has one neighbour along each axis")
axes.set_axis_off()

# %% [markdown]
# Where does an array lie? A `PartitionSpec`, here `P`, names for each dim the mesh axes that cut it into
# equal parts. A dim without a name is whole, and so are dims behind a short spec. Along an axis that is not
# named, every device holds the same. Spec and mesh together are a `NamedSharding`. Here is `w`, with D first,
# cut both ways:

# %%
mesh = make_mesh("fsdp=4,tensor=2")
w_DF = ws[0].T
cut_DF = jax.device_put(w_DF, NamedSharding(mesh, P(FSDP, TENSOR)))
print(cut_DF.shape, cut_DF.nbytes, "bytes, of which")
for shard in cut_DF.addressable_shards[:3]:
    d, f = shard.index
    piece = f"[{d.start}:{d.stop}, {f.start}:{f.stop}]"
    print(f"device {shard.device.id}: {piece}, {shard.data.nbytes} bytes")

# %% tags=["hide-input"] mystnb={"image": {"alt": "The same matrix four times, cut by four specs; each piece carries the numbers of the devices that hold it."}}
figure, axes = plt.subplots(2, 2, figsize=(6, 4.4))
figure.suptitle("A spec says which devices hold which piece", size=11)
specs = P(FSDP, TENSOR), P(FSDP), P(None, TENSOR), P()
for panel, spec in zip(axes.flat, specs, strict=True):
    held = jax.device_put(w_DF, NamedSharding(mesh, spec)).addressable_shards[0].data
    words = ", ".join(str(axis) for axis in spec)
    size = f"{held.nbytes / 2**20:.3g} MiB each"
    lesson.slices(panel, mesh, spec, "DF", f"P({words}): {size}")

# %% [markdown]
# ## What a simulated device is
#
# This machine has no eight chips. `simulate_devices` makes JAX count eight in one process; they share
# its threads and its memory. Is a product faster on them? Each takes an eighth of the rows, and a copy of
# `w`.

# %%
eight, x_BD = make_mesh("fsdp=8"), jnp.ones((512, D))
cut_BD = jax.device_put(x_BD, NamedSharding(eight, P(FSDP)))
copies_FD = jax.device_put(ws[0], NamedSharding(eight, P()))
on_one, on_eight = timed(x_BD, ws[:1]), timed(cut_BD, [copies_FD])
print(f"processor time of one device: {on_one * 1e3:.0f} ms")
print(f"of eight devices together:    {on_eight * 1e3:.0f} ms")
assert lesson.same(product(x_BD, ws[0]), product(cut_BD, copies_FD))
assert on_eight > 0.7 * on_one
del copies_FD

# %% [markdown]
# The same result for no less work, since the same cores do all eight parts. A speed on simulated devices says
# nothing. But who holds what and what is sent are real, and can be counted.
#
# ## What a layout sends
#
# Nothing above says "send". What must be sent follows from what each device lacks. `run` below has the
# product compiled for a layout, and reads in the compiled program what one device does: its FLOPs, and its
# exchanges, called *collectives*. First the rows of `x` are cut, then the columns of `w`. The third layout
# cuts the rows again, but names `fsdp`, on a mesh where that axis has size 1.

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
    print(f"{cut:12} {found.flops:11,} FLOPs, {len(found.collectives)} exchanges")

# %% [markdown]
# Cut either way, a device does an eighth of the FLOPs, and sends nothing. The price is memory: all of `w` on
# every device, or all of `x`. The third is a mistake without an error: an axis of size 1 cuts nothing, so all
# eight do everything.
#
# Now the dim over which the product sums, D, is cut in both. Device i has 320 of the 2,560 columns of `x` and
# the 320 rows of `w` that meet them, and every device is to end with the whole result, `y_BF`, with B = 32
# and F = 1,536 in float32.
#
# > **Predict.** How many bytes must each device bring into the exchange?

# %%
found = run(P(None, TENSOR), P(TENSOR), P())
my_prediction = None  # bytes
(only,) = found.collectives
lesson.predicted("payload of the exchange", my_prediction, only.payload_bytes, "bytes")
print(f"{only.kind} over {only.axes[0]}, {found.flops:,} FLOPs a device")

# %% [markdown]
# All of `y`, not an eighth. A device can sum only over the part of D that it has, so it gets a *partial sum*
# of every entry: a full-size array of incomplete numbers.

# %% tags=["hide-input"] mystnb={"image": {"alt": "x cut into eight columns, w into eight rows, each with the number of its device; beside them eight full-size arrays, one behind the other."}}
figure, axes = plt.subplots(1, 3, figsize=(6.4, 2.4))
figure.suptitle("A cut through the sum leaves each device a part of every sum", size=11)
lesson.slices(axes[0], row, P(None, TENSOR), "BD", "x")
lesson.slices(axes[1], row, P(TENSOR), "DF", "w")
for n in reversed(range(8)):  # the product of columns n and rows n, on device n
    corner, colour = (0.04 * n, 0.04 * n), lesson.COLOURS[TENSOR]
    shade = 0.25 + 0.5 * n / 7
    for look in {"facecolor": "white"}, {"facecolor": colour, "alpha": shade}:
        axes[2].add_patch(plt.Rectangle(corner, 0.72, 0.72, ec="black", lw=0.8, **look))
axes[2].text(0.36, 0.36, "0", ha="center", va="center", size=9, color="black")
axes[2].set(xticks=[], yticks=[], title="y: 8 partial sums", xlabel="F")
axes[2].set(xlim=(0, 1.01), ylim=(0, 1.01))
axes[2].set_ylabel("B", rotation=0, labelpad=10)
axes[2].spines[:].set_visible(False)

# %% [markdown]
# Adding such arrays and giving everyone the total is an *all-reduce*. If every device sent its array to all
# others, that would be 7 payloads. Devices in a ring do better. The array is cut into eighths. In each of 7
# steps, every device passes an eighth to its neighbour, which adds its own numbers: then each device has one
# eighth of the total. In 7 more steps the totals go around. That is 14 eighths, 1.75 payloads, and with n
# devices `2 (n - 1)/n`: never more than 2. The project's arithmetic for it (other kinds of exchange are for
# chapter 01):

# %%
lesson.source(hardware.wire_bytes)
sent = hardware.wire_bytes("all-reduce", only.payload_bytes, 8)
print(f"a device sends {sent:,.0f} bytes")
assert (only.kind, only.payload_bytes) == ("all-reduce", 32 * F * 4)
assert sent == 14 * only.payload_bytes / 8

# %% [markdown]
# The payload was counted in the compiled program. The ring is arithmetic, as there is no wire to measure.
#
# Now to chips: 64 v4 in a box of 4x4x4, as the mesh `fsdp=16,tensor=4`. Four in a line share a product like
# this one, with D = F = 8,192, in bfloat16, and a batch as large as you like.

# %%
box, wide = hardware.Topology.parse("v4:4x4x4"), 8192
link = hardware.layout(MeshConfig.parse("fsdp=16,tensor=4"), box)[TENSOR]
print(f"tensor: {link.bytes_per_s / 1e9:.0f} GB/s, in direction {link.torus_axes[0]}")
wire_ridge = v4.peak_flops_per_s / link.bytes_per_s
print(f"ridge of this wire: {wire_ridge:,.0f} FLOPs a byte")
for B in (512, 4096, 32768):
    multiply = 2 * B * wide * wide / 4 / v4.peak_flops_per_s
    send = hardware.collective_seconds("all-reduce", 2 * B * wide, 4, link)
    print(f"B={B:6}: multiply {multiply * 1e3:.2f} ms, send {send * 1e3:.2f} ms")
assert abs(send / multiply - wire_ridge / (wide / 6)) < 1e-6

# %% [markdown]
# x is one of the three directions of the box. In it a chip has two links, and the fourth chip is wired to the
# first. So the line is a ring, and 2 * 45 GB/s are what a chip can send in it.
#
# The batch does not help: FLOPs and bytes both grow with B, and it cancels. For each byte sent, one of n
# devices does `(2 B D F / n) / (2 (n - 1)/n * 2 B F) = D / (2 (n - 1))` FLOPs, here 8,192 / 6 = 1,365. A
# wider D lifts this product over the ridge of its wire, or fewer devices, but never more rows.
#
# ## The same by hand
#
# This program can be pasted into an empty file. It lays out x and w in four ways, and prints of each compiled
# program the lines in which devices exchange something.

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
    print(f"{name}:", re.findall(pattern, text) or "nothing is exchanged")

# %% [markdown]
# `f32[32,96]` is how the compiler writes an array of float32 with 32 rows: the payload. The last layout asks
# for an eighth of the rows, and still everything is added up everywhere: the compiler for CPU makes an
# all-reduce and cuts it. Half of one would do (chapter 01).
#
# ## A whole step
#
# `planner.plan` adds this up for every product and every exchange of `model.py`. It reads the shapes from the
# model's declarations and the wires from `hardware.layout`, and touches no device. Llama 3 8B on the same 64
# chips, 64 sequences of 512 tokens:


# %%
# All meshes work in one way, so that they compare.
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
# Two axes, two kinds of bytes. `fsdp` cuts every weight 16 ways. Before the products of a layer, the slices
# of its weights are joined, and after them its gradients are added up: bytes of weights. The axis lies in two
# directions of the box, so it has four links. `tensor` cuts products, and adds up partial sums of what the
# layers compute for the tokens, as above. It reaches three quarters of its 90 GB/s, because here the four
# chips pass on what they have in three messages, two one way and one the other. *Compute* is FLOPs over
# FLOP/s, and the *optimizer* waits for HBM.
#
# *MFU* is the share of the chips' peak that the model's own FLOPs use. Compute alone is more, as the layers
# run forward twice, to save memory. The plan knows which wires the TPU compiler runs beside products.
#
# > **Predict.** Four times the sequences on the same chips, so four times the FLOPs. How many times the
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

# %% tags=["hide-input"] mystnb={"image": {"alt": "Seconds against tokens a chip: compute and tensor rise side by side, fsdp is flat and is crossed by compute."}}
batches = [16 * 2**n for n in range(8)]
plans = [step(B) for B in batches]
tokens = [plan.tokens_per_step / 64 for plan in plans]
figure, axes = plt.subplots(figsize=(6, 3.8))
for part, colour in {"compute": lesson.NEUTRAL, TENSOR: None, FSDP: None}.items():
    took = [plan.seconds(alone=True)[part] for plan in plans]
    colour = colour or lesson.COLOURS[part]
    axes.loglog(tokens, took, "o-", ms=4, color=colour, label=part)
axes.set(title="A larger batch outruns fsdp, and never tensor")
axes.set(xlabel="tokens a chip and step", ylabel="seconds in a step")
axes.legend()

# %% [markdown]
# Weights are sent as often for one token as for a thousand, so enough tokens outrun that wire. Activations
# are sent for each token, so `tensor` stays parallel to compute for ever.
#
# Is the plan right? `planner.compile_plan` compiles the trainer's own step, here of a small model for the
# eight simulated devices, and counts what is in the program.

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
# FLOPs agree to the last one, bytes sent to half a percent.
#
# ## What it costs, and when not to
#
# **The rule.** For each wire, divide the FLOPs a device does in a step by the bytes it sends over that wire,
# and compare with the wire's ridge. At the ridge the wire takes as long as the products; below it, products
# mostly wait. (The ring over `tensor=4` takes nearly 4/3 of that: it sends both ways, and one of the two is
# idle in every second step.)

# %%
for plan in (one, four):
    print(f"{plan.cfg.data.batch_size} sequences       FLOPs a byte   ridge")
    for axis, link in hardware.layout(plan.cfg.mesh, plan.topology).items():
        did = plan.hardware_flops / plan.wire_by_axes[axis]
        ridge = v4.peak_flops_per_s / link.bytes_per_s
        print(f"  {axis:14} {did:13,.0f} {ridge:7,.0f}")
took, tokens = one.seconds(alone=True), one.tokens_per_step / 64
print(f"{tokens:.0f} tokens a chip: compute {took['compute'] * 1e3:.1f} ms", end=", ")
print(f"fsdp {took[FSDP] * 1e3:.1f} ms; both are equal with", end=" ")
at_ridge = tokens * took[FSDP] / took["compute"]
print(f"{tokens:.0f} * {took[FSDP] / took['compute']:.2f} = {at_ridge:.0f} tokens")

# %% tags=["remove-cell"]
took, speed = four.seconds(alone=True), four.topology.chip.peak_flops_per_s
at_full = speed / link.bytes_per_s / (four.hardware_flops / four.wire_by_axes[axis])
of_it = took[axis] / took["compute"] / at_full
assert 1.25 < of_it < 4 / 3, "nearly 4/3, says the text"

# %% [markdown]
# More chips go the other way. Of n devices along an axis each does 1/n of the FLOPs, but to join an array
# over that axis, a device sends (n - 1)/n of it: nearly the same for any n. So each doubling halves the FLOPs
# a byte on that axis's wire. The same batch of 512 sequences on more and more chips:

# %%
first = step(512)
for n, topology in {16: "v4:4x4x4", 64: "v4:8x8x4", 256: "v4:16x16x4"}.items():
    plan = step(512, f"fsdp={n},tensor=4", topology)
    chips, gain = plan.topology.chips, first.step_s / plan.step_s
    print(f"{chips:5,} chips, {plan.tokens_per_step // chips:5,} tokens each: ", end="")
    print(f"{gain:3.1f}x, MFU {plan.mfu(plan.step_s):.0%}")
assert 11 < gain < 12

# %% [markdown]
# The last line has sixteen times the chips of the first and much less than sixteen times its speed, because
# each chip has a sixteenth of the products and nearly all of the bytes. Below a ridge, raise the batch or
# choose another mesh first.
#
# **What the arithmetic leaves out.** Peaks are only approached: the scaling book
# [sees](https://jax-ml.github.io/scaling-book/roofline) up to 95% on TPUs, 80 to 85% on an H100. Of memory
# roofs it has only the optimizer's. And latency is some [1 us a
# hop](https://jax-ml.github.io/scaling-book/sharding): a link of 45 GB/s carries 45 kB in that time, so
# smaller messages cost as much as these.
#
# **What simulated devices cannot show:** any speed, any overlap, and whether a device's memory is enough.
#
# ## Exercise 1: narrow weights
#
# For serving, weights are often kept in int8, 1 byte an entry, and multiplied in bfloat16. How many rows must
# meet a matrix until its product leaves the memory roof, if an entry takes `width` bytes? Count the bytes of
# the weights only. A chip has `chip.peak_flops_per_s` and `chip.hbm_bytes_per_s`.


# %% tags=["hide-input"]
def ridge_of(key, wire="hbm_bytes_per_s"):
    return hardware.CHIPS[key].peak_flops_per_s / getattr(hardware.CHIPS[key], wire)


def check_rows(rows_needed):
    mistakes = [
        (lambda c, w: w * ridge_of(c), "Twice too many. An entry, a row: what FLOPs?"),
        (lambda c, w: ridge_of(c), "Right in bfloat16 alone. Where is the width?"),
        (lambda c, w: ridge_of(c) / 2, "Right in int8 alone. Where is the width?"),
        (lambda c, w: 2 * ridge_of(c) / w, "Fewer rows for wider entries. Is that so?"),
        (lambda c, w: w * ridge_of(c, "link_bytes_per_s") / 2, "That is which wire?"),
        (lambda c, w: w / ridge_of(c) / 2, "Less than a row. Which way is the ridge?"),
        (lambda c, w: 2 / ridge_of(c) / w, "Less than a row. Which side is larger?"),
    ]
    answer = lambda key, width: lesson.answered(rows_needed)(hardware.CHIPS[key], width)
    cases = [("v4", 1), ("h100", 2), ("v5p", 4)]
    right = lambda c, w: w * ridge_of(c) / 2
    done = "Right on three chips. Half the width, half the rows: hence int8 in serving."
    # Whole rows are right too.
    return lesson.diagnose(answer, cases, right, mistakes, done, share=0.01)


# %%
def rows_needed(chip, width):
    return ...


print(check_rows(rows_needed))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return width * chip.peak_flops_per_s / chip.hbm_bytes_per_s / 2`. B rows do `2 B` FLOPs for each entry, and
# an entry is `width` bytes: intensity `2 B / width`, which is to reach the ridge. On a v4 that is 229 rows in
# bfloat16 and half of it in int8.
# </details>

# %% tags=["remove-cell"]
top = lambda c: c.peak_flops_per_s / c.hbm_bytes_per_s
assert "Right on" in check_rows(lambda c, w: w * top(c) / 2)
assert "Right on" in check_rows(lambda c, w: -(-w * top(c) // 2))  # whole rows
assert "Nothing" in check_rows(lambda c, w: ...) and "Nothing" in check_rows(...)
assert "Not yet" in check_rows(lambda c, w: 240)
for wrong, hint in (
    (lambda c, w: w * top(c), "Twice"),
    (lambda c, w: top(c), "bfloat16 alone"),
    (lambda c, w: top(c) / 2, "int8 alone"),
    (lambda c, w: 2 * top(c) / w, "Fewer rows"),
    (lambda c, w: w * c.peak_flops_per_s / c.link_bytes_per_s / 2, "which wire"),
    (lambda c, w: w / top(c) / 2, "Which way"),
    (lambda c, w: 2 / top(c) / w, "Which side"),
):
    assert hint in check_rows(wrong), hint

# %% [markdown]
# ## Exercise 2: how much a device holds
#
# Bytes of a float32 array of some `shape` on one device. `spec` is a tuple with an entry for each of the
# first dims: `None`, one axis, or a tuple of axes that cut the dim together (`as_tuple` makes a tuple of any
# of them). Dims behind a short spec are whole. `mesh.shape[axis]` is the size of an axis. The checker puts
# real arrays on two meshes.


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
        (lambda s, p, m: whole(s) / 8, "Cut by all. And an axis not named?"),
        (lambda s, p, m: whole(s) / cuts(first(p), m), "Until two axes cut one dim."),
        (lambda s, p, m: whole(s) / cuts(single(p), m), "Does a tuple cut nothing?"),
        (lambda s, p, m: whole(s) / cuts(p, m, sum), "2 by 4 pieces are how many?"),
        (lambda s, p, m: really_held(s, p, m) / 4, "Entries. How many bytes is each?"),
        (lambda s, p, m: whole(named(s, p)) / cuts(p, m), "A short spec drops no dim."),
        (lambda s, p, m: whole(s) * cuts(p, m), "More than all. Does a cut add?"),
        (lambda s, p, m: whole(s), "The whole array. What does a cut leave?"),
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
# The number of devices does not stand in it. What they hold together is the array as often as the axes without
# a name have devices.
# </details>


# %% tags=["remove-cell"]
def counts(spec, mesh):
    return [mesh.shape[axis] for entry in spec for axis in as_tuple(entry)]


def split(join):
    """An answer that joins the sizes of the axes of each entry in its own way."""
    return lambda s, p, m: whole(s) / math.prod(join(counts([entry], m)) for entry in p)


assert "Right on" in check_held(split(math.prod))
assert "Nothing" in check_held(lambda s, p, m: None) and "Nothing" in check_held(...)
assert "Not yet" in check_held(lambda *_: 7)
assert "KeyError" in check_held(lambda s, p, m: [m.shape[e] for e in p if e])
for wrong, hint in (
    (lambda s, p, m: whole(s) // m.size, "Cut by all"),
    (split(lambda found: (found or [1])[0]), "two axes"),
    (split(lambda found: found[0] if len(found) == 1 else 1), "tuple cut nothing"),
    (lambda s, p, m: whole(s) / sum(counts(p, m)), "2 by 4"),
    (lambda s, p, m: split(math.prod)(s, p, m) / 4, "Entries"),
    (lambda s, p, m: split(math.prod)(s[: len(p)], p, m), "short spec"),
    (lambda s, p, m: whole(s) ** 2 / split(math.prod)(s, p, m), "More than all"),
    (lambda s, p, m: whole(s), "The whole array"),
):
    assert hint in check_held(wrong), hint

# %% [markdown]
# ## Exercise 3: what goes over the slow wire
#
# Design it. You have sixteen H100 in two nodes, Llama 3 8B, and 16 sequences of T tokens a step. Inside a
# node every GPU sends 450 GB/s. Out of it, a GPU has one card of 50; an axis with k GPUs in each node can use
# the cards of all k. Choose sizes of `fsdp` and `tensor`, at most `tensor=8` as the model has 8 key heads.
# Say first which is better for short sequences, and why. `priced` then tells you up to where.


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
            raise ValueError(f"{mesh} is none of {' or '.join(meshes)}")
        return priced(mesh, T).step_s

    return seconds


# %% tags=["hide-input"]
def check_mesh(mesh_for):
    fastest, slowest = best(lambda p: p.step_s), best(lambda p: -p.step_s)
    fewest, leanest = best(lambda p: p.wire_bytes), best(lambda p: p.peak_bytes)
    mistakes = [
        (lambda T: meshes[3], "The usual advice: it pays once. What grows with T?"),
        (lambda T: meshes[0], "Best for many tokens. From which T on?"),
        (fewest, "The fewest bytes. Does a byte cost the same on both wires?"),
        (leanest, "The least memory. All of these fit; what takes long?"),
        (slowest, "The other way round. Which wire does each mesh load?"),
        (lambda T: meshes[1], "One mesh for all T, and best for none. Price others."),
        (lambda T: meshes[2], "One mesh for all T, and best for none. Price others."),
    ]
    mistakes = [(takes(choose), hint) for choose, hint in mistakes]
    answer = lambda T: takes(lesson.answered(mesh_for))(T)
    done = "Right for 512, 2,048 and 8,192 tokens: no size of these two axes is faster."
    cases, right = [(512,), (2048,), (8192,)], takes(fastest)
    said = lesson.diagnose(answer, cases, right, mistakes, done, share=0.01)
    return said.replace("Your answer there is", "The seconds of your step there:")


# %%
def mesh_for(T):
    return ...  # such as "fsdp=4,tensor=4"


print(check_mesh(mesh_for))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return "fsdp=2,tensor=8" if T < 1024 else "fsdp=16"`. With few tokens, weights are most of what is sent.
# Cut them eight ways inside a node, and each GPU has an eighth of them to exchange over the slow wire. With
# many, activations outgrow weights, and `tensor` costs more on the fast wire than `fsdp` on the slow one. At
# 2,048 the fastest mesh sends more bytes than another: bytes alone do not decide.
#
# Other axes may do better still. `python -m plan llama3_8b --topology h100:16 --search 16 --data.batch_size 16
# --data.seq_len 512` tries them all, and saves more than a third of the time with stages.
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
    (best(lambda plan: -plan.step_s), "other way round"),
    (lambda T: "fsdp=8,tensor=2", "best for none"),
    (lambda T: "fsdp=4,tensor=4", "best for none"),
):
    assert hint in check_mesh(wrong), hint

# %% [markdown]
# ## A bug to find
#
# A trainer reports its MFU with this function. Its test, on one chip, passes. Then the run grows: every chip
# brings a sequence of 2,048 tokens of its own, and a step takes 12.2 s on 16 chips and on 64. Mend `mfu`.


# %%
def mfu(cfg, topology, step_s):
    """Model FLOPs of a step, over what the hardware could have done in its time."""
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
        (lambda p: chips(p) / p.topology.hosts, "Right with one chip a host. Else?"),
        (lambda p: chips(p) / p.cfg.mesh.batch_shards, "Do all axes cut the batch?"),
        (lambda p: chips(p) / p.cfg.data.batch_size, "If a chip has 2 sequences?"),
        (lambda p: chips(p) / len(jax.devices()), "Whose devices does JAX count here?"),
        (lambda p: chips(p) ** 2, "Further off than before. Which side grew?"),
        (lambda p: p.hardware_flops / p.model_flops, "High. What is counted twice?"),
    ]
    mistakes = [(over(times), hint) for times, hint in mistakes]
    cases = [("data=1", "h100:1", 1), ("fsdp=8", "h100:8", 2)]
    cases += [("fsdp=8,tensor=4", "v4:4x4x2", 1)]  # mesh, chips, sequences a chip
    done = "Right on 1, 8 and 32 chips, and equal to the planner's."
    return lesson.diagnose(answer, cases, over(lambda p: 1), mistakes, done)


# %% tags=["hide-output"]
print(check_mfu(mfu))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `possible = topology.chips * topology.chip.peak_flops_per_s * step_s`. The batch is that of all chips, the
# peak was that of one. 182% is the symptom; 45.6% is the danger.
#
# **Where it was seen.** A guide to fine-tuning a 70B model on 16 A100 reported 45.51%, from the
# tokens of all and the peak of one ([issue](https://github.com/huggingface/blog/issues/1649)). Divided by 16
# that is 2.8%. PaLM had reported 46.2%, so the number looked like success. A reader asked; its
# author then profiled the run, found it waiting for exchanges, and took the paragraph out. In another trainer a
# wrong peak showed 88% on average, and was found when a step showed 106% ([pull request](https://github.com/allenai/OLMo-core/pull/817)). A ratio that cannot pass 1 is worth an
# `assert`, and a test on one device tests no division by n.
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
    (lambda cfg, on, s: mfu(cfg, on, s) / on.hosts, "one chip a host"),
    (lambda cfg, on, s: mfu(cfg, on, s) / cfg.mesh.batch_shards, "Do all axes"),
    (lambda cfg, on, s: mfu(cfg, on, s) / cfg.data.batch_size, "2 sequences"),
    (lambda cfg, on, s: mfu(cfg, on, s) / len(jax.devices()), "Whose devices"),
    (lambda cfg, on, s: mfu(cfg, on, s) * on.chips, "Further off"),
    (busy, "counted twice"),
    (lambda cfg, on, s: 0.5, "Not yet"),
):
    assert hint in check_mfu(wrong), hint

# %% [markdown]
# ## In one table
#
# x_BD @ w_DF on n devices, bfloat16; b = B/n, d = D/n, f = F/n.
#
# | layout | who holds what | what moves | bytes a device sends | waits |
# |---|---|---|---|---|
# | `x_bD @ w_DF` | rows of x, all of w | nothing | 0; the step sends w's gradient | no |
# | `x_BD @ w_Df` | all of x, columns of w | nothing | 0; to join y: 2 B F (n - 1)/n | at the join |
# | `x_Bd @ w_dF` | a part of every sum | y, added up | 4 B F (n - 1)/n | yes: the next product needs y |
#
# A product of B rows is bound by memory below `peak / HBM` rows, and by a wire if its FLOPs a byte are below
# `peak / wire`:

# %%
print(f"{'':12} {'HBM':>6} {'a wire':>8} {'off slice':>10}")
for key in ("v4", "v5p", "h100", "b200"):
    chip = hardware.CHIPS[key]
    speeds = chip.hbm_bytes_per_s, chip.link_bytes_per_s, chip.dcn_bytes_per_s
    ridges = [chip.peak_flops_per_s / speed for speed in speeds]
    print(f"{chip.name:12} {ridges[0]:6,.0f} {ridges[1]:8,.0f} {ridges[2]:10,.0f}")

# %% [markdown]
# (One link of a TPU, all NVLinks of a GPU; two nodes: the last column.) In PyTorch: a
# mesh is a `DeviceMesh`, a spec its placements (`Shard(0)`, `Replicate()`, and `Partial()` for a partial
# sum), and waiting for the result is `torch.cuda.synchronize()`.
#
# ## Three lines to keep
#
# 1. A step takes between the longest and the sum of a few times: its FLOPs over FLOP/s, and for memory and
#    each wire its bytes over bytes/s.
# 2. A larger batch outruns what is sent for the weights, and never what is sent for each token.
# 3. Simulated devices show what is sent and never how fast; on real ones, wait for the result, and divide by
#    all the chips whose work you counted.
#
# **Sources.** Roofs: [Roofline](https://doi.org/10.1145/1498765.1498785) (2009); the JAX scaling book,
# [Rooflines](https://jax-ml.github.io/scaling-book/roofline),
# [TPUs](https://jax-ml.github.io/scaling-book/tpus), [GPUs](https://jax-ml.github.io/scaling-book/gpus) and
# [Sharding](https://jax-ml.github.io/scaling-book/sharding), from where most numbers of `plan/hardware.py`
# are; [Google's page of TPU v4](https://cloud.google.com/tpu/docs/v4). MFU: PaLM,
# [arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 4.1 and appendix B. JAX: [asynchronous
# dispatch](https://docs.jax.dev/en/latest/async_dispatch.html), [arrays on several
# devices](https://docs.jax.dev/en/latest/sharded-computation.html).
