# %% [markdown]
# # 01 · Sharded matrices and collectives
#
# A *sharded* matrix is split into equal blocks, and each device stores one of them. A *collective* is an
# operation in which all devices of a mesh axis exchange data, such as an all-gather or an all-reduce.
#
# Sharding lets eight devices store a model that one cannot store, and compute it in an eighth of the time.
# But each device then lacks what the others have. This page shows which collective a sharded matmul needs,
# how many bytes it sends, and when that takes longer than the matmul itself. It also matters for correctness:
# a missing collective raises no error, and returns an array of the right shape with wrong numbers.
#
# *Prerequisites:* chapter 00 (devices, meshes, specs, all-reduce). *Mesh:* `fsdp=8`, simulated; in the bug
# `tensor=8`. *Runs in* 40 s on 2 cores. *Reading takes* 25 minutes, 90 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)
import functools

import jax.numpy as jnp
import matplotlib.pyplot as plt

import sharding
from chapters import lesson, opening
from config import MeshConfig
from plan.chips import hardware

COLOUR = lesson.COLORS["fsdp"]  # of the `fsdp` axis

# %% tags=["hide-input"] mystnb={"image": {"alt": "One Llama 3 8B layer. One device stores all weights, 0.4 GiB, and computes for 29 ms. Of eight devices, each stores an eighth, gathers the rest in 0.8 ms, and computes for 3.6 ms."}}
stored = 2 * opening.PARAMETERS  # bytes of a layer's weights in bfloat16
forward = opening.compute_ms(2 * opening.PARAMETERS * opening.TOKENS)
gather_ms = opening.network_ms(7 / 8 * stored)
full = {"weights": [stored / 2**30] + [0] * 7}
at_once, later = [("matmuls", 0, forward)], [("", gather_ms, forward / 8)]
before = opening.Scene("One device does all", full, at_once, [])
eighth = {"weights": stored / 8 / 2**30}
after = opening.Scene("Each has an eighth", eighth, later, [("", 0, gather_ms)])
title = "An eighth of the memory and of the compute, but weights have to be sent"
opening.before_after(before, after, title, "fsdp")
right = plt.gcf().axes[3]
right.text(gather_ms + forward / 8 + 0.4, 0, f"{forward / 8:.1f} ms", va="center")
right.text(gather_ms + 0.4, 1, f"{gather_ms:.1f} ms: gather the weights", va="center")

# %% [markdown]
# The figure shows the forward pass of one layer of Llama 3 8B with 65,536 tokens, on one H100 and on eight.
# On the right, each device has an eighth of the tokens and stores an eighth of the layer's weights. It
# receives the other weights before its matmuls. Times are arithmetic at peak speed, without overlap.
#
# ## Eight devices run one function
#
# `jax.shard_map` runs a function on every device, on that device's shard of the input. `in_specs` says how
# the input is sharded: below, `P("fsdp")` splits the numbers 1 to 16 along an axis of n = 8 devices, so each
# device gets b = B/n = 2 of the B = 16 numbers. (A capital letter is a whole dim; the lower-case letter is
# one device's shard of it.) Each number should be divided by the sum of all sixteen, so the results should
# add up to 1. The function is `x_b / x_b.sum()`.
#
# > **Predict.** What do the sixteen results add up to?
#
# Three cells of this page form one program that you can paste into an empty file: this one, and the two in
# "The four cases". They need only JAX and NumPy. The axis is called `fsdp`, one of the six names that this
# guide uses (chapter 00), but any name works.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

n = 8
mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(AxisType.Auto,))


def on_mesh(function, in_specs, out_specs, mesh=mesh):
    specs = dict(in_specs=in_specs, out_specs=out_specs)
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


fractions = lambda x_b: x_b / x_b.sum()  # x_b: this device's 2 of 16 numbers
y_B = on_mesh(fractions, P("fsdp"), P("fsdp"))(np.arange(1.0, 17.0))

# %%
my_prediction = None
lesson.predicted("the sum of all fractions", my_prediction, round(float(y_B.sum()), 4))

# %% [markdown]
# There is no error. `x_b.sum()` adds only the two numbers on that device. The result is a *partial sum*, and
# the program never adds the eight partial sums.
#
# ### Why the mesh has `AxisType.Auto`
#
# If you write such a program from memory, you will probably meet this error first. Without `axis_types`,
# `jax.make_mesh` makes *explicit* axes, and then `shard_map` accepts only inputs that are already sharded as
# `in_specs` says. A NumPy array is not:

# %%
explicit = jax.make_mesh((n,), ("fsdp",))  # without axis_types
try:
    on_mesh(fractions, P("fsdp"), P("fsdp"), explicit)(np.arange(1.0, 17.0))
except ValueError as error:
    print(str(error).replace(". ", ".\n"))

# %% [markdown]
# Don't omit `in_specs`, the message's first advice: each device would get all sixteen numbers. There are two
# repairs. With `AxisType.Auto`, as everywhere in this guide, `shard_map` reshards its inputs to match
# `in_specs`. Or shard an input yourself, before the call: `jax.device_put(x, jax.NamedSharding(mesh, spec))`.
#
# ### Adding over devices
#
# **Inside `shard_map`, devices communicate only where you call a collective.** All devices along the axis
# take part in it. `jax.lax.psum` is the collective that adds, an *all-reduce*:

# %%
fractions = lambda x_b: x_b / jax.lax.psum(x_b.sum(), "fsdp")
y_B = on_mesh(fractions, P("fsdp"), P("fsdp"))(np.arange(1.0, 17.0))
print("the sum of all fractions:", y_B.sum())
assert abs(float(y_B.sum()) - 1) < 1e-6, "the fractions no longer add up to 1"

# %% [markdown]
# ## The four cases
#
# Now consider the matmul `x_BD @ w_DF`. The matmul sums over the dim D, so D is called the contracting dim.
# Along one mesh axis there are four cases:
#
# 1. **D is not sharded**, and only one of the two matrices is. Nothing is sent.
# 2. **D is sharded in one** of the matrices. The shards of this matrix have to be gathered.
# 3. **D is sharded in both**, the same way. Each device gets a partial sum of the whole result, and the
#    partial sums have to be added.
# 4. **D is not sharded, but both matrices are**: B and F are sharded over the same axis. One of the two
#    matrices has to be gathered first.
#
# The rest of the program defines what one device does in each case. Names carry shapes: `w_dF` is d = D/n
# rows of `w`.


# %% tags=["by-hand"]
def case_1(x_bD, w_DF):
    return x_bD @ w_DF


def case_2(x_bD, w_dF):
    w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True)
    return x_bD @ w_DF


def case_3_all(x_Bd, w_dF):
    return jax.lax.psum(x_Bd @ w_dF, "fsdp")  # every device gets the sum


def case_3_own(x_Bd, w_dF):  # every device gets its rows of the sum
    return jax.lax.psum_scatter(x_Bd @ w_dF, "fsdp", scatter_dimension=0, tiled=True)


def case_4(x_bD, w_Df):
    return x_bD @ jax.lax.all_gather(w_Df, "fsdp", axis=1, tiled=True)


# %% tags=["by-hand"]
B, D, F = 16, 64, 24
rng = np.random.default_rng(0)
x_BD, w_DF = rng.normal(size=(B, D)), rng.normal(size=(D, F))
whole, rows, columns = P(), P("fsdp"), P(None, "fsdp")
CASES = {  # specs of x, w and the result
    case_1: (rows, whole, rows),
    case_2: (rows, rows, rows),
    case_3_all: (columns, rows, whole),
    case_3_own: (columns, rows, rows),
    case_4: (rows, columns, rows),
}
for case, (*in_specs, out_spec) in CASES.items():
    y_BF = on_mesh(case, tuple(in_specs), out_spec)(x_BD, w_DF)
    assert np.allclose(y_BF, x_BD @ w_DF, atol=1e-4), f"{case.__name__} is wrong"
    print(case.__name__, "matches a single-device run")

# %% [markdown]
# (`tiled=True` concatenates the shards along an existing dim. Without it JAX stacks them along a new one.)
# The figures below follow device 2 from left to right. **Dark** is what it stores, **light** is what it
# receives from other devices, and **hatched** is a partial sum.


# %% tags=["hide-input"]
LONG = {"B": 1.7, "D": 3.2, "F": 2.2}  # lengths of the dims in the figure
OWN, SENT = dict(facecolor=COLOUR, alpha=0.85), dict(facecolor=COLOUR, alpha=0.3)
PARTIAL = dict(facecolor="#c5d5e9", hatch="///")  # the tint of SENT, without alpha


def place(spec, dims, device=2):
    """Corner and size of a device's shard, and the dims that are sharded."""
    cut = [k for k, axis in enumerate((*spec, None, None)[:2]) if axis]
    high, wide = (LONG[d] / (n if k in cut else 1) for k, d in enumerate(dims))
    down = device * high if 0 in cut else 0
    right = device * wide if 1 in cut else 0
    return (right, LONG[dims[0]] - down - high), wide, high, cut


# %% tags=["hide-input"]
def array(axes, left, dims, title, parts):
    """An array and its shards; `parts` are (spec, style) of what device 2 has."""
    high, wide, bottom = LONG[dims[0]], LONG[dims[1]], -LONG[dims[0]] / 2
    for part, style in parts:
        (x, y), w, h, _ = place(part, dims)
        axes.add_patch(plt.Rectangle((left + x, bottom + y), w, h, lw=0, **style))
    for k in place(parts[-1][0], dims)[-1]:
        for i in range(1, n):
            at = bottom + high * i / n if k == 0 else left + wide * i / n
            ends = (left, left + wide), (at, at)
            ends = ends if k == 0 else ((at, at), (bottom, bottom + high))
            axes.plot(*ends, color="black", lw=0.4)
    axes.add_patch(plt.Rectangle((left, bottom), wide, high, fill=False, lw=1))
    axes.text(left + wide / 2, 1.85, title, ha="center", size=10)
    return left + wide


def arrow(axes, x, name, sent):
    axes.annotate("", (x + 2.45, 0), (x + 0.15, 0), arrowprops={"arrowstyle": "->"})
    axes.text(x + 1.3, 0.15, name, ha="center", va="bottom", size=9)
    axes.text(x + 1.3, -0.2, sent, ha="center", va="top", size=9)
    return x + 2.6


# %% tags=["hide-input"]
def picture(title, x_spec, w_spec, *steps):
    """What device 2 stores, and then what each step gives it."""
    _, axes = plt.subplots(figsize=(6.6, 2.7))
    x = array(axes, 0, "BD", "stores x", [(x_spec, OWN)])
    x = array(axes, x + 0.4, "DF", "stores w", [(w_spec, OWN)])
    for (name, sent), dims, has, parts in steps:
        x = array(axes, arrow(axes, x, name, sent), dims, has, parts)
    axes.set(xlim=(-0.1, max(x, 15) + 0.1), ylim=(-1.7, 2.4), aspect="equal")
    axes.set_title(title)
    axes.set_axis_off()


# %% tags=["hide-input"]
GATHER = "all-gather", "receives\n7 shards of w"
SCATTER = "reduce-scatter", "receives and\nadds 7 blocks"
MATMUL = ("matmul", ""), "BF", "its rows of y", [(rows, OWN)]
PARTIALS = ("matmul", ""), "BF", "partial sum", [(whole, PARTIAL)]


def counted(case):
    *in_specs, out_spec = CASES[case]
    return lesson.compiled(on_mesh(case, tuple(in_specs), out_spec), mesh, x_BD, w_DF)


# %% [markdown]
# `lesson.listed` prints the collectives of the compiled program, one per line.
#
# ### Case 1: no communication

# %% tags=["hide-input"] mystnb={"image": {"alt": "Device 2 holds its rows of x and all of w, uses them, and computes its rows of the result."}}
title = "Device 2: its rows of x are its rows of the result"
picture(title, rows, whole, MATMUL)

# %%
lesson.listed(counted(case_1))

# %% [markdown]
# A row of the result needs one row of `x` and all of `w`. Data parallelism is this case: the batch is sharded
# and the weights are not. So is `x_BD @ w_Df`, where each device computes some columns of the result.
#
# ### Case 2: the contracting dim is sharded in one matrix
#
# Each of the eight devices stores 8 of the 64 rows of `w`. It needs the other 56 for its matmul.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Device 2 holds one eighth of the rows of w; it receives the others, and computes its rows of the result."}}
title = "Device 2 receives the rows of w that it lacks"
gathered = GATHER, "DF", "uses w", [(whole, SENT), (rows, OWN)]
picture(title, rows, rows, gathered, MATMUL)

# %% [markdown]
# > **Predict.** `w` is 64 x 24 in float32, 4 bytes per element. The devices gather it in a ring: each device
# > passes seven of the eight shards on to its neighbor. How many bytes does a device send?

# %% tags=["hide-input"]
found = counted(case_2)
[gather_of_w] = found.collectives

# %%
my_prediction = None  # bytes
lesson.predicted("bytes a device sends", my_prediction, gather_of_w.wire_bytes, "bytes")
lesson.listed(found)

# %% tags=["remove-cell"]
assert gather_of_w.kind == "all-gather" and gather_of_w.payload_bytes == 6144

# %% [markdown]
# `lesson.compiled` reads the kind of the collective and its payload, the 6,144 bytes of the gathered `w`,
# from the compiled program. The bytes that a device *sends* are computed from it, as 7/8 of the payload,
# because simulated devices have no links to measure.
#
# ### Case 3: the contracting dim is sharded in both
#
# Device 2 stores 8 of the 64 columns of `x` and the matching 8 rows of `w`. It can multiply them, but the
# result is a partial sum for every entry of the result.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Device 2 holds a shard of the columns of x and of the rows of w, computes a partial sum of the whole result, and keeps its rows of the sum."}}
title = "Device 2 has a partial sum, adds the others' sums, and keeps a shard"
added = SCATTER, "BF", "its rows of y", [(rows, OWN)]
picture(title, columns, rows, PARTIALS, added)

# %%
for case in case_3_all, case_3_own:
    lesson.listed(counted(case))

# %% [markdown]
# `psum`, the *all-reduce* of chapter 00, gives every device the whole sum. `psum_scatter`, the
# *reduce-scatter*, gives each device one shard of the sum and sends half the bytes, because an all-reduce is
# a reduce-scatter followed by an all-gather. **If each device continues with its own rows only, a `psum`
# sends twice what is needed.**
#
# ### Case 4: both are sharded, along different dims
#
# The rows of `x` and the columns of `w` are both sharded over `fsdp`. D is not sharded, so each device can
# multiply what it has.
#
# > **Predict.** The result has 16 x 24 = 384 elements. How many of them do the eight devices compute
# > together?

# %% tags=["hide-input"]
alone = on_mesh(lambda x_bD, w_Df: (x_bD @ w_Df)[None], (rows, columns), P("fsdp"))
blocks = np.asarray(alone(x_BD, w_DF))  # [device, b, f]

# %%
my_prediction = None  # elements
lesson.predicted("elements of the result", my_prediction, blocks.size)

# %% tags=["remove-cell"]
assert blocks.size == B * F // n

# %% tags=["hide-input"] mystnb={"image": {"alt": "A grid of eight by eight blocks of the result; only the eight blocks on the diagonal are filled, each with its device number."}}
_, axes = plt.subplots(figsize=(4.2, 2.6))
y_BF, high, wide = x_BD @ w_DF, B // n, F // n
for i, j in np.ndindex(n, n):
    there = y_BF[i * high :, j * wide :][:high, :wide]
    owners = [k for k in range(n) if np.allclose(blocks[k], there, atol=1e-4)]
    style = dict(lw=0.5, **OWN) if owners else dict(lw=0.5)
    lesson.box(axes, j, n - 1 - i, text="".join(map(str, owners)), size=10, **style)
axes.set(xlim=(0, n), ylim=(0, n), xticks=[], yticks=[], xlabel="F, columns of w")
axes.set(ylabel="B, rows of x", title="Seven of eight blocks are computed by nobody")

# %% [markdown]
# The result has 8 x 8 blocks, and each of the eight devices computes one of them. (That is why JAX raises an
# error for a spec that uses an axis twice, `P("fsdp", "fsdp")`.) You have to gather one of the two matrices:
# `w`, and compute rows, or `x` (the smaller one here), and compute columns. Or shard F over *another* mesh
# axis, of m devices. Then n x m devices compute one block each, without communication, as in case 1.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Device 2 holds rows of x and columns of w; it receives the other columns, and computes its rows of the result."}}
title = "w is gathered: device 2 receives all columns"
gathered = GATHER, "DF", "uses w", [(whole, SENT), (columns, OWN)]
picture(title, rows, columns, gathered, MATMUL)

# %%
lesson.listed(counted(case_4))

# %% [markdown]
# ## What it costs, and when it pays off
#
# For times, take a realistic size: 2,048 rows times a 4,096 x 14,336 weight of Llama 3 8B, in *bfloat16*,
# with 2 bytes per element. `plan/chips/hardware.py` lists each chip's FLOP/s and its bandwidth, the bytes/s
# that a device can send. On `v4:2x2x2`, a chip has one neighbor in each of three directions, and a link of 45
# GB/s to each. We assume that a collective uses all three links at once, 135 GB/s.

# %% tags=["hide-input"]
LATENCY = {"v4:2x2x2": 3e-6, "h100:8": 7 * 3.4e-6, "h100:16": 14 * 3.4e-6 + 14e-6}
LLAMA = [jax.ShapeDtypeStruct(s, np.float32) for s in ((2048, 4096), (4096, 14336))]
chip, speed = {}, {}  # of each topology
for name in LATENCY:
    topology = hardware.Topology.parse(name)
    chip[name] = topology.chip
    links = hardware.layout(MeshConfig(fsdp=topology.devices), topology)
    speed[name] = links["fsdp"].bytes_per_s

# %%
print("us, 8 devices    sent  v4:2x2x2     h100:8")
for case, specs in CASES.items():
    found = lesson.compiled(on_mesh(case, specs[:2], specs[2]), mesh, *LLAMA)
    sent = found.total.wire_bytes / 2  # compiled in float32, half of it in bfloat16
    times = [1e6 * sent / speed[name] for name in ("v4:2x2x2", "h100:8")]
    print(f"{case.__name__:10} {sent / 1e6:7.1f} MB {times[0]:9.0f} {times[1]:10.0f}")
flops = found.flops / 1e6
work = [flops / chip[name].peak_flops_per_s * 1e12 for name in ("v4:2x2x2", "h100:8")]
print(f"matmul                {work[0]:9.0f} {work[1]:10.0f}")

# %% [markdown]
# Every collective takes longer than the matmul, at 256 rows per device. With how many rows does the matmul
# take longer? (The `psum` and the all-gathers send equal bytes only because D is 2 B here.)
#
# > **Predict.** A TPU v4 computes 275e12 FLOP/s in bfloat16 and here sends 135e9 bytes/s. For how many rows
# > *per device* does the matmul of case 2 take as long as its all-gather? (Take (n - 1)/n as 1.)

# %% tags=["hide-input"]
ridge = {name: chip[name].peak_flops_per_s / speed[name] for name in LATENCY}

# %%
my_prediction = None  # rows
lesson.predicted("rows", my_prediction, ridge["v4:2x2x2"], within=0.15)

# %% [markdown]
# b rows need `2 b D F` FLOPs, and the gathered weight has `2 D F` bytes. D and F cancel.
#
# ### When the matmul takes longer
#
# The matmul of case 2 takes longer than its gather if **b is above FLOP/s divided by bytes/s**. Case 4
# gathers a weight too and has the same condition. In case 3, a device multiplies only d = D/n columns of `x`,
# with `2 B d F` FLOPs, and a `psum_scatter` sends `2 B F` bytes. So there **d** must be above FLOP/s divided
# by bytes/s. With a `psum`, it is d/2.
#
# All of this leaves out *latency*: every step of a collective takes some time, however few bytes it sends.
# That is about 1 us per hop between TPUs, 3.4 us per step of a ring on NVLink, and 14 us per step to another
# node. The last column is the size of an array whose bytes take as long as the latency. Smaller arrays take
# nearly the same time:

# %%
print("          GB/s  rows per device latency dominates below")
for name, latency in LATENCY.items():
    size = latency * speed[name] / 1e6
    print(f"{name:9} {speed[name] / 1e9:4.0f} {ridge[name]:14,.0f}", end="")
    print(f" {latency * 1e6:6.1f} us {size:12.2f} MB")
    assert 1900 < ridge[name] < 2600, "not 'about two thousand rows'"

# %% [markdown]
# <details><summary>Where these latencies come from</summary>
#
# The [scaling book](https://jax-ml.github.io/scaling-book/sharding) has 1 us per hop of a TPU. The others are
# what NCCL, NVIDIA's library of collectives, assumes for a ring (`hwLat` of protocol Simple, in
# [tuning.cc](https://github.com/NVIDIA/nccl/blob/v2.21.5-1/src/graph/tuning.cc)). The table has 3 hops of 1
# us on `v4:2x2x2`, 7 · 3.4 = 23.8 us on `h100:8`, and 14 · 3.4 + 14 = 61.6 us on two nodes.
# </details>
#
# The rule: **gather `w` if b = B/n is above about two thousand; add partial sums only if d = D/n is. If
# neither is, communication takes longer than the matmul, so send the smallest of `x`, `w` and `y`** (exercise
# 3). It assumes peak speeds, bfloat16, and communication that overlaps with another matmul of this size.
# Chapter 09 has this threshold on one sheet with those of all axes. And send one large array instead of a
# thousand small ones.
#
# ## Output specs concatenate
#
# `out_specs` is the reverse of `in_specs`: it says how to **concatenate** what the devices return. If it
# leaves out an axis, the devices along that axis must return equal arrays, and JAX takes one of them. (By
# default it also checks that they are equal, see chapter 02.) In this figure each of four devices returns the
# two rows that it received. Only the output spec differs:


# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight rows of numbers; next to them the same pairs of rows, side by side."}}
four, x_84 = sharding.make_mesh("fsdp=4"), np.arange(32.0).reshape(8, 4)
title = "The output spec decides how shards are concatenated (color: device)"
_, panels = lesson.panels(title, 1, 2, figsize=(6.5, 2.7), width_ratios=(4, 16))
for axes, spec in zip(panels, (rows, columns), strict=True):
    x = on_mesh(lambda x: x, rows, spec, four)(x_84)
    for (i, j), value in np.ndenumerate(x):
        look = dict(fc=lesson.DEVICES[int(value) // 8], alpha=0.5, lw=0)
        lesson.box(axes, j, -i, text=int(value), **look)
    axes.set(xlim=(0, x.shape[1]), ylim=(1 - len(x), 1), aspect="equal")
    axes.set_title(f"out_specs={spec}:\n{x.shape}", size=10)
    axes.set_axis_off()

# %% [markdown]
# `out_specs` sends nothing between devices. To get the *same* array sharded along its columns, devices must
# communicate (exercise 1). A spec may also shard one dim over two axes: `P(("data", "fsdp"))` splits it along
# `data` first, and then splits each chunk along `fsdp`. To undo this, gather over `fsdp` first, and then over
# `data`. In the other order you get all rows, but permuted, as PyTorch's `full_tensor()` once did
# ([129206](https://github.com/pytorch/pytorch/issues/129206)).
#
# ## Five collectives
#
# The four cases needed three collectives. Other layouts need two more. Here is each of the five along dim 0:


# %%
def shift(x):  # to the next device, from the last to the first
    size = jax.lax.axis_size("fsdp")
    return jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % size) for i in range(size)])


gather = lambda x: jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
scatter = lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)
psum = lambda x: jax.lax.psum(x, "fsdp")
exchange = lambda x: jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True)  # split, concat
FIVE = {  # the function, in_specs, out_specs
    "all_gather": (gather, rows, rows),
    "psum_scatter": (scatter, rows, rows),
    "psum": (psum, rows, whole),
    "all_to_all": (exchange, rows, rows),
    "ppermute": (shift, rows, rows),
}

# %% [markdown]
# Where does every value go? The next figure shows four devices, before and after each collective. A column of
# boxes is a device's array. A value has the color of the device it started on. Its digit is its place (slot)
# in that device's array. If the device had only one value, the digit is the device's number. A box with
# several stripes is the sum of one value from each of those devices.


# %% tags=["hide-input"]
def run_marked(name, devices=4):
    """Marks before and after a collective: [device, slot]."""
    function, before, after = FIVE[name]
    slots = 1 if name in ("all_gather", "ppermute") else devices
    i, j = np.indices((devices, slots))
    marks = 1 << (devices * i + (i if slots == 1 else j))
    small = sharding.make_mesh(f"fsdp={devices}")
    got = on_mesh(function, before, after, small)(np.int32(marks.reshape(-1)))
    got = np.tile(got, devices) if after == P() else got  # the same on all devices
    return marks, np.reshape(got, (devices, -1))


# %% tags=["hide-input"]
def draw(axes, left, marks, devices=4):
    """A box per value; a stripe per addend."""
    for i, slots in enumerate(marks):
        for j, mark in enumerate(slots):
            x, y = left + i, -(i if len(slots) == 1 else j)
            bits = [k for k in range(devices**2) if int(mark) >> k & 1]
            each = 1 / len(bits)
            for part, k in enumerate(bits):
                style = dict(color=lesson.DEVICES[k // devices], alpha=0.6, lw=0)
                axes.add_patch(plt.Rectangle((x + part * each, y), each, 0.92, **style))
            axes.add_patch(plt.Rectangle((x, y), 1, 0.92, fill=False, lw=0.8))
            box = dict(boxstyle="circle,pad=0.1", fc="white", ec="none", alpha=0.7)
            where = dict(size=9, ha="center", va="center", bbox=box)
            axes.text(x + 0.5, y + 0.44, bits[0] % devices, **where)


title = "Color: the device that a value came from; stripes: a sum"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Five panels: values on four devices, before and after each collective."}}
figure, panels = lesson.panels(title, 3, 2, figsize=(6.6, 6.4))
panels[2, 1].set_axis_off()
for axes, name in zip(panels.flat, FIVE, strict=False):
    before, after = run_marked(name)
    draw(axes, 0, before)
    draw(axes, 5.5, after)
    axes.annotate("", (5.4, -1), (4.1, -1), arrowprops={"arrowstyle": "->"})
    lesson.blank(axes, xlim=(-0.1, 9.6), ylim=(-3.2, 1), title=name)
    axes.set_xticks([0.5, 1.5, 2.5, 3.5, 6, 7, 8, 9], [*range(4)] * 2)
figure.supxlabel("device, before and after", size=10)
figure.get_layout_engine().set(wspace=0.1)

# %% [markdown]
# - `all_gather`: every device gets all shards.
# - `psum_scatter` (`sharding.reduce_scatter` in this project): the devices' arrays are added, and each
#   device keeps one shard of the sum.
# - `psum`: the arrays are added, and every device gets the whole sum.
# - `all_to_all(x, axis, split, concat)`: device i sends its slot j to device j. The dim `split` is split into
#   slots, and the received slots are concatenated along the dim `concat`, which may be the same one.
# - `ppermute` (`sharding.shift`): each device sends to one other device; here, to the next.
#
# ## What a ring sends
#
# The next cell builds an all-gather from `shift` alone. An array of 128 x 4 float32, 2,048 bytes, is sharded
# over 8 devices.


# %%
def ring_gather(x_bD):
    i = jax.lax.axis_index("fsdp")  # this device's index, 0 to n - 1

    def step(held_bD, _):
        arrived_bD = shift(held_bD)
        return arrived_bD, arrived_bD  # pass it on in the next step, and keep it

    # A loop of n - 1 steps, which stacks the second values that they return.
    _, others = jax.lax.scan(step, x_bD, length=n - 1)
    held = jnp.concatenate([x_bD[None], others])  # held[k]: device i - k's
    return held[(i - jnp.arange(n)) % n].reshape(-1, x_bD.shape[1])


normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
a_BD = normal(128, 4)
ring = on_mesh(ring_gather, rows, rows)
assert lesson.same(ring(a_BD), np.tile(a_BD, (n, 1)))  # eight copies
found = lesson.compiled(ring, mesh, a_BD)

lesson.listed(found)
assert sum(int(one.count) * one.payload_bytes for one in found.collectives) == 1792

# %% [markdown]
# Each device sends seven shards of 256 bytes, (n - 1)/n of the whole array. Between devices, no algorithm
# sends less on average, because every device lacks seven shards. A reduce-scatter uses the same ring and adds
# at each step (exercise 2), and an all-reduce is a reduce-scatter followed by an all-gather. (If the network
# *switch* can add, as NVLink's can, an all-reduce may send less.) In multiples of what each device holds at
# the start:
#
# | | each device ends with | each device sends |
# |---|---|---|
# | `all_gather` | n | n - 1 |
# | `psum_scatter` | 1/n | (n - 1)/n |
# | `psum` | 1 | 2 (n - 1)/n |
# | `all_to_all` | 1 | (n - 1)/n |
# | `ppermute` | 1 | 1 |

# %% tags=["remove-cell"]
PRICE = {"all_gather": 1792, "psum_scatter": 224, "psum": 448, "all_to_all": 224}
PRICE |= {"ppermute": 256}
for name, (function, before, after) in FIVE.items():
    held = a_BD[:16] if before == P() else a_BD  # 256 bytes on each device
    spent = lesson.compiled(on_mesh(function, before, after), mesh, held).total
    assert spent.wire_bytes == PRICE[name], (name, spent)

# %% [markdown]
# **With more devices, each computes less, but sends as much.** It sends (n - 1)/n of the gathered array,
# which is nearly all of it, on 8 devices or on 800.
#
# ## All devices, or none
#
# A collective waits for *all* devices along its axis. If one of them takes a branch without the collective,
# the others wait forever. Here 4 x 2 devices hold one number each:


# %%
def in_branch(condition_axis):
    def function(x):
        # The branches must return one type, and x varies over devices (chapter 02).
        add = lambda x: jax.lax.pcast(psum(x), "fsdp", to="varying")
        here = jax.lax.axis_index(condition_axis) == 0
        return jax.lax.cond(here, add, lambda x: x, x)

    both_axes, mesh = P(("fsdp", "tensor")), sharding.make_mesh("fsdp=4,tensor=2")
    return on_mesh(function, both_axes, both_axes, mesh)


print("tensor 0 adds over fsdp:", in_branch("tensor")(np.arange(8.0)))
_ = in_branch("fsdp").lower(np.arange(8.0)).compile()  # compiled, and never run

# %% [markdown]
# In the first program, all devices that take part in the same sum take the same branch. In the second
# program, only devices with `fsdp` index 0 call `psum`. It compiles without a warning. If you run it, one
# device waits for three that never come, and XLA aborts after a minute: "Expected 4 threads to join the
# rendezvous, but only 1 of them arrived on time".
#
# ## In `model.py`
#
# `model.embed` is a form of case 3. Each device stores some rows of the embedding table, and looks up the
# tokens whose rows it has. All other tokens get rows of zeros. These partial sums are reduce-scattered.
#
# ## Exercise 1: from rows to columns
#
# A new `x_BD`, 128 x 24, is sharded by rows. Return this device's shard of the columns, [B, D/n], with
# **one** collective. (The check below stacks what the devices return: the shape (4, 128, 6) means 128 x 6 on
# each of 4 devices.)


# %% tags=["hide-input"]
on = lambda devices: sharding.make_mesh(f"fsdp={devices}")


def run_answer(answer, devices, in_specs, *args):
    return lesson.on_each(answer, on(devices), in_specs)(*args)


def ledger_of(answer, devices, in_specs, *args):
    program = lesson.on_each(answer, on(devices), in_specs)
    return lesson.compiled(program, on(devices), *args)


def to_all(split, join):
    return lambda x: jax.lax.all_to_all(x, "fsdp", split, join, tiled=True)


cut = lambda x: sharding.own_slice(x, "fsdp", dim=0)  # this device's shard
own_columns = lambda x: sharding.own_slice(x, "fsdp", dim=1)
added_columns = lambda x: sharding.reduce_scatter(x, "fsdp", dim=1)
reshaped = lambda x: x.reshape(-1, x.shape[1] // jax.lax.axis_size("fsdp"))
ALONG = "You split and concatenate the same dim. Which dim is whole before? After?"

# %% tags=["hide-input"]
COLUMN_HINTS = [
    (lambda x: x, "Those are your rows, unchanged."),
    (own_columns, "The right columns of your own rows. Where are the other rows?"),
    (gather, "Every device has the whole array now. Which part should it keep?"),
    (to_all(0, 1), "You split the rows again. Which dim is whole before? After?"),
    (to_all(0, 0), ALONG),
    (to_all(1, 1), ALONG),
    (reshaped, "The right shape, but wrong numbers: a reshape sends nothing."),
    (added_columns, "Rows of different devices were added, not concatenated."),
    (lambda x: added_columns(gather(x)), "n times too big: you added equal copies."),
]
ROWS = rows, normal(128, 24)


# %% tags=["hide-input"]
def check_to_columns(answer):
    run = lambda f: lambda devices: run_answer(f, devices, *ROWS)
    want = lambda devices: np.stack(np.split(ROWS[-1], devices, axis=1))
    hints, cases = COLUMN_HINTS, [(4,), (8,)]
    line = lesson.diagnose(answer, cases, want, hints, "Right", run=run)
    if line != "Right":
        return line
    sent = ledger_of(answer, 8, *ROWS).total.wire_bytes
    if sent > 1344:
        line = f"The right numbers, but a device sends {sent:,.0f} bytes."
        return line + " Most of them are not used. Which device needs which part?"
    return "Right on 4 and 8 devices; on 8, a device sends 1,344 bytes."


# %%
def to_columns(x_bD):
    return ...


print(check_to_columns(to_columns))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jax.lax.all_to_all(x_bD, "fsdp", 1, 0, tiled=True)`: split the dim that is whole (dim 1) and
# concatenate the one that is sharded (dim 0). On 8 devices it sends 7/8 of a device's 1,536 bytes. Gathering
# all rows and slicing would send 7/8 of the whole array's 12,288 bytes.
# </details>

# %% tags=["remove-cell"]
too_expensive = lambda x: own_columns(gather(x))
lesson.expect(check_to_columns, *COLUMN_HINTS, (to_all(1, 0), "Right on"),
              (too_expensive, "10,752 bytes"),
              (to_columns, lesson.NOTHING),
              (lambda x: x.T, "(4, 24, 32), and should have (4, 128, 6)"),
              (3, "expected a function"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: a ring reduce-scatter
#
# Every device has its own `x_BD`. Device i should end with shard i of the rows of their sum. Use only
# `shift`, n - 1 times, on one shard at a time.

# %% tags=["hide-input"]
OWN_ROWS = {devices: normal(devices, 48, 3) for devices in (4, 8)}
run_ring = lambda f: lambda devices: run_answer(f, *ring_case(devices))
ring_case = lambda devices: (devices, rows, OWN_ROWS[devices].reshape(-1, 3))
sum_of = lambda devices: OWN_ROWS[devices].sum(axis=0).reshape(devices, -1, 3)
late = lambda by: lambda devices: np.roll(sum_of(devices), by, axis=0)
MOVED = "Complete sums, but on the wrong devices. Where does a sum start? End?"
RING_HINTS = [
    (late(-1), MOVED),
    (late(1), MOVED),
    (run_ring(cut), "Your own shard, unsummed: what do the others send?"),
]


def addends(answer, n=4):
    """Which shard of each device's array is in the sum on device 0."""
    marks = np.eye(n * n, dtype=np.float32)  # device i has rows i n .. i n + n - 1
    found = np.array(run_answer(answer, n, rows, marks))[0].reshape(n, n)
    slices = lambda row: "+".join(f"{k}" for k in range(n) for _ in range(int(row[k])))
    return ", ".join(slices(row) or "none" for row in found)


# %% tags=["hide-input"]
def check_ring(answer):
    line = lesson.diagnose(run_ring(answer), [(4,), (8,)], sum_of, RING_HINTS, "Right")
    if not line.startswith(("Right", "Not yet: it")):
        return line
    found = ledger_of(answer, *ring_case(8))
    shifts = sum(x.count for x in found.collectives if x.kind == "collective-permute")
    others = [x.kind for x in found.collectives if x.kind != "collective-permute"]
    sent = f"{found.total.wire_bytes:,.0f} bytes"
    if line == "Right" and others:
        return f"The right sums, but with {others[0]}. Use only shifts."
    if shifts not in (0, n - 1):
        return f"{shifts:.0f} shifts on 8 devices. How many devices must a sum visit?"
    if line != "Right":
        line = f"On 4 devices, device 0 has added shards {addends(answer)} of devices"
        return line + " 0, 1, 2, 3. It should add shard 0 of each."
    if found.total.wire_bytes > 504:
        return f"The right sums, but {sent} per device. Do you send whole arrays?"
    return f"Right: 7 shifts and {sent} per device, on 8."


# %%
def rows_of(x_BD, k):
    """Shard k (modulo n) of the n shards of the rows."""
    size = len(x_BD) // jax.lax.axis_size("fsdp")
    return jax.lax.dynamic_slice_in_dim(x_BD, k * size % len(x_BD), size)


def ring_reduce_scatter(x_BD):  # n: jax.lax.axis_size("fsdp")
    return ...


print(check_ring(ring_reduce_scatter))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Partial sums move from device i to device i + 1 at each step. The sum that ends on device i after n - 1
# steps starts on device i + 1. So device i itself starts the sum of shard i - 1, and at step k it receives
# the sum of shard i - 1 - k:
#
# ```python
# n, i = jax.lax.axis_size("fsdp"), jax.lax.axis_index("fsdp")
# held_bD = rows_of(x_BD, i - 1)
# for k in range(1, n):
#     held_bD = shift(held_bD) + rows_of(x_BD, i - 1 - k)
# return held_bD
# ```
# </details>


# %% tags=["remove-cell"]
def around(start, step, more=0, by=1):
    def ring(x_BD):
        n, i = jax.lax.axis_size("fsdp"), jax.lax.axis_index("fsdp")
        held_bD = rows_of(x_BD, i + start)
        for k in range(1, n + more):
            held_bD = sharding.shift(held_bD, "fsdp", by)
            held_bD += rows_of(x_BD, i + start + k * step)
        return held_bD

    return ring


def passed_on(size):
    def ring(x_BD):
        i = jax.lax.axis_index("fsdp")
        held = total = x_BD if size == "whole" else rows_of(x_BD, i)
        for _ in range(jax.lax.axis_size("fsdp") - 1):
            held = shift(held)
            total += held
        return rows_of(total, i) if size == "whole" else total

    return ring


fro = lambda x: sharding.shift(shift(around(-1, -1)(x)), "fsdp", -1)
lesson.expect(check_ring, (around(-1, -1),
                           "Right: 7 shifts and 504 bytes per device, on 8."),
              (around(1, 1, by=-1), "Right: 7"), (around(0, -1), MOVED),
              (around(0, 1, by=-1), MOVED),
              (around(-1, -1, more=-1), "6 shifts"),
              (around(-1, -1, more=1), "8 shifts"), (fro, "9 shifts"),
              (around(-1, 0), "shards 3, 0, 1, 2 of devices"),
              (passed_on("slice"), "shards 0, 1, 2, 3 of devices"),
              (around(1, 1), "shards 0, 2, 0, 2 of devices"),
              (passed_on("whole"), "4,032 bytes per device. Do you send"),
              (cut, "unsummed"),
              (scatter, "with reduce-scatter"),
              (ring_reduce_scatter, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 3: choose what to send
#
# In case 3 both matrices are sharded along the contracting dim (lower case): x_Bd [B, D/n] and w_dF [D/n,
# F]. Return this device's *rows* of `x_BD @ w_DF`, [B/n, F]. Send as few bytes as you can for both sizes
# that are checked: B, D, F = 16, 64, 24 and 128, 16, 24. Your function may look at shapes.

# %% tags=["hide-input"]
PRODUCT_HINTS = [
    (lambda x, w: cut(x @ w), "Your rows of a partial sum. Where is the rest?"),
    (lambda x, w: psum(x @ w), "The whole sum on every device. Which rows are yours?"),
    (lambda x, w: psum(cut(x @ w)), "Whose rows did you add to yours?"),
    (lambda x, w: x @ w, "A partial sum of all rows. Two things are left to do."),
    (lambda x, w: scatter(psum(x @ w)), "n times too big: you added it twice."),
    (lambda x, w: added_columns(x @ w), "Added, but these are columns, not rows."),
]
OPERAND_SPECS = (columns, rows)
LEAST = {(16, 64, 24): 1344, (128, 16, 24): 2240}  # bytes a device sends
OPERANDS = {size: (normal(*size[:2]), normal(*size[1:])) for size in LEAST}


# %% tags=["hide-input"]
def check_product(answer):
    case = lambda size: (8, OPERAND_SPECS, *OPERANDS[size])
    run = lambda f: lambda *size: run_answer(f, *case(size))
    want = lambda *size: np.matmul(*OPERANDS[size]).reshape(8, -1, size[-1])
    line = lesson.diagnose(answer, [*LEAST], want, PRODUCT_HINTS, "Right", run=run)
    for size in LEAST if line == "Right" else ():
        found = ledger_of(answer, *case(size))
        sent, kinds = found.total.wire_bytes, {one.kind for one in found.collectives}
        if sent > LEAST[size]:
            line = f"Right, but sends {sent:,.0f} bytes at {size}, not {LEAST[size]:,}."
            if "all-reduce" in kinds:
                return line + " Every device received the whole sum and kept 1/8."
            return line + " Which is smaller there: the two operands, or the result?"
    done = "Right: it sends 1,344 and 2,240 bytes, the fewest that we know of."
    return line.replace("Right", done)


# %%
def product(x_Bd, w_dF):
    return ...


print(check_product(product))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# (B, d), F, n = x_Bd.shape, w_dF.shape[1], jax.lax.axis_size("fsdp")
# if B * F <= B * d + n * d * F:
#     return scatter(x_Bd @ w_dF)
# x_bD = jax.lax.all_to_all(x_Bd, "fsdp", 0, 1, tiled=True)
# return x_bD @ gather(w_dF)
# ```
#
# You can send the result or the two matrices. Each side of the comparison counts float32 numbers. With 4
# bytes for each, a device sends 4 (n - 1)/n times as many bytes: on the left for the result, on the right for
# the matrices. FSDP (chapter 03) gathers the weights, as in the last line. Tensor parallelism (chapter 04)
# reduce-scatters the result.
# </details>

# %% tags=["remove-cell"]
add_results = lambda x, w: scatter(x @ w)
move_operands = lambda x, w: to_all(0, 1)(x) @ gather(w)


def smaller(x_Bd, w_dF):
    (B, d), F, n = x_Bd.shape, w_dF.shape[1], jax.lax.axis_size("fsdp")
    results, operands = B * F, B * d + n * d * F
    return (add_results if results <= operands else move_operands)(x_Bd, w_dF)


lesson.expect(check_product, *PRODUCT_HINTS,
              (smaller, "Right: it sends 1,344 and 2,240"),
              (add_results, "10,752 bytes at (128, 16, 24)"),
              (add_results, "smaller there"),
              (move_operands, "5,824 bytes at (16, 64, 24)"), (product, lesson.NOTHING),
              (lambda x, w: cut(psum(x @ w)), "2,688 bytes"),
              (lambda x, w: cut(psum(x @ w)), "kept 1/8"))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# This program trains a gated MLP, `(silu(x @ gate) * (x @ up)) @ out`, on a `tensor` axis. It can resume on
# another number of devices.


# %%
D, F, SPECS = 16, 32, {"in": P(None, "tensor"), "out": P("tensor")}


def init(seed=0):
    """The weights. `gate` and `up` are one matrix, so that one matmul reads x once."""
    random = np.random.default_rng(seed)
    weight = lambda *shape: random.normal(size=shape) / shape[0] ** 0.5
    gate_DF, up_DF, out_FD = weight(D, F), weight(D, F), weight(F, D)
    return {"in": np.concatenate([gate_DF, up_DF], axis=1), "out": out_FD}


def gated_mlp(weights, x_BD):
    """Runs on each device, with its shards of the weights and all of x.

    The matmul with `out` sums over f, so its result is a partial sum.
    """
    hidden = x_BD @ weights["in"]
    gate_Bf, up_Bf = jnp.split(hidden, 2, axis=1)
    partial_BD = (jax.nn.silu(gate_Bf) * up_Bf) @ weights["out"]
    return jax.lax.psum(partial_BD, "tensor")


# %%
def make_step(devices, rate=0.3):
    """A training step of SGD with momentum, on the first `devices` devices."""
    auto, used = (AxisType.Auto,), jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=auto, devices=used)
    forward = on_mesh(gated_mlp, (SPECS, P()), P(), mesh)
    error = lambda weights, x_BD, y_BD: jnp.mean((forward(weights, x_BD) - y_BD) ** 2)

    @jax.jit
    def step(weights, momentum, x_BD, y_BD):
        loss, d_weights = jax.value_and_grad(error)(weights, x_BD, y_BD)
        momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, d_weights)
        weights = jax.tree.map(lambda w, m: w - rate * m, weights, momentum)
        return loss, weights, momentum

    return step


# %%
def train(devices, steps, checkpoint=None):
    """The loss of each step, and a checkpoint to resume from."""
    fresh = init(), jax.tree.map(np.zeros_like, init()), 0
    weights, momentum, done = checkpoint or fresh
    step, losses = make_step(devices), []
    for number in range(done, done + steps):
        loss, weights, momentum = step(weights, momentum, *batch(number))
        losses.append(float(loss))
    return losses, jax.device_get((weights, momentum, done + steps))


# %% tags=["hide-input"]
def mlp(gate_DF, up_DF, out_FD, x_BD):
    return (jax.nn.silu(x_BD @ gate_DF) * (x_BD @ up_DF)) @ out_FD


def drawn(seed):  # gate, up and out, as init draws them
    random = np.random.default_rng(seed)
    return [random.normal(size=s) / s[0] ** 0.5 for s in ((D, F), (D, F), (F, D))]


def batch(number):  # x, and what another MLP makes of it
    x_BD = np.random.default_rng([1, number]).normal(size=(64, D)).astype(np.float32)
    return x_BD, np.asarray(mlp(*drawn(7), x_BD))


# %%
losses, checkpoint = train(8, 100)
print("on 8 devices:", *(f"{loss:.2f}" for loss in losses[::11]))
losses, _ = train(4, 60, checkpoint)
print("then on 4:   ", *(f"{loss:.2f}" for loss in losses[:4] + losses[4::11]))

# %% [markdown]
# The loss falls on eight devices. When the run resumes on four, it jumps, and takes some time to recover.
# Data, step number and momentum continue where they were. Resuming on eight shows no jump. Fix the program.


# %% tags=["hide-input"]
def simulated(function):
    """Losses of three steps on 8 devices and three on fewer, all computed on one."""

    @functools.cache
    def run(devices):
        w, m, losses = drawn(0), [0.0] * 3, []
        for number in range(6):
            on = 8 if number < 3 else devices
            error = lambda w, x, y, on=on: jnp.mean((function(on, *w, x) - y) ** 2)
            loss, d = jax.value_and_grad(error)(w, *batch(number))
            m = [0.9 * a + b for a, b in zip(m, d, strict=True)]
            w = [a - 0.3 * b for a, b in zip(w, m, strict=True)]
            losses.append(float(loss))
        return losses

    return run


def paired(devices, gate_DF, up_DF, out_FD, x_BD):
    """The MLP that the program above computes."""
    both = jnp.concatenate([gate_DF, up_DF], axis=1).reshape(D, devices, 2, -1)
    return mlp(both[:, :, 0].reshape(D, F), both[:, :, 1].reshape(D, F), out_FD, x_BD)


# %% tags=["hide-input"]
def for_eight(devices, gate_DF, up_DF, out_FD, x_BD):
    """Columns of gate and up in the order that is right on eight devices."""
    both = jnp.stack([gate_DF.reshape(D, 8, -1), up_DF.reshape(D, 8, -1)], axis=2)
    return paired(devices, *jnp.split(both.reshape(D, -1), 2, axis=1), out_FD, x_BD)


TRAIN_HINTS = [
    (paired, "The same losses as before."),
    (for_eight, "Right on 8 devices only: should the order depend on n?"),
    (lambda n, gate, up, out, x: mlp(up, gate, out, x), "Which half has the silu?"),
    (lambda n, *args: mlp(*args) / n, "The sum over devices is now their mean."),
    (lambda n, *args: paired(n, *args) / n, "A mean now, and the jump remains."),
]
TRAIN_HINTS = [(simulated(one), hint) for one, hint in TRAIN_HINTS]
RIGHT = simulated(lambda n, *args: mlp(*args))


def check_train(train):
    begun = functools.cache(lambda: lesson.answered(train)(8, 3))

    def losses(devices):
        first, checkpoint = begun()
        return [*first, *train(devices, 3, checkpoint)[0]]

    done = "Fixed: from 8 to 2 or 4 devices, the losses match a single-device run."
    return lesson.diagnose(losses, [(4,), (2,)], RIGHT, TRAIN_HINTS, done, share=1e-3)


# %% tags=["hide-output"]
print(check_train(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `P(None, "tensor")` gives device 0 of eight the first 8 of 64 columns. They are all columns of `gate`. The
# device splits its own columns in half, and uses the second half as `up`. So each device multiplies columns
# of `gate` with other columns of `gate`, or of `up` with `up`. Shapes fit, and on eight devices it is
# consistently the same function, which learns about as well. On four devices other columns are paired. Give
# the two matrices their own dim, so that each is sharded by itself:
#
# ```python
# return {"in": np.stack([gate_DF, up_DF], axis=1), "out": out_FD}  # [D, 2, F]
# SPECS = {"in": P(None, None, "tensor"), "out": P("tensor")}
# gate_Bf, up_Bf = jnp.einsum("BD,DkF->kBF", x_BD, weights["in"])
# ```
#
# **Where it happened.** NeMo Automodel sharded `[gate | up]` and `[q | k | v]` evenly along the fused dim, so
# tensor-parallel ranks got wrong mixtures, without an error. The fix interleaves the rows, and was accepted
# with loss curves that match the unfused model's ([pull
# request](https://github.com/NVIDIA-NeMo/Automodel/pull/1324)). In nnsight, an all-gather of such a fused
# output returned `[q0 k0 v0 | q1 k1 v1]`. Reads and writes were consistent, and its test compared the values
# of a row in any order, so it passed ([pull request](https://github.com/ndif-team/nnsight/pull/719)).
# </details>


# %% tags=["remove-cell"]
def with_mlp(init=init, gated_mlp=gated_mlp, SPECS=SPECS):
    return lesson.replaced(train, init=init, gated_mlp=gated_mlp, SPECS=SPECS)


def halves(split, add=jax.lax.psum):
    def gated_mlp(weights, x_BD):
        gate_Bf, up_Bf = split(weights["in"], x_BD)
        return add((jax.nn.silu(gate_Bf) * up_Bf) @ weights["out"], "tensor")

    return gated_mlp


def interleaved(devices):
    """gate and up of each of `devices` shards, side by side."""

    def init():
        gate_DF, up_DF, out_FD = drawn(0)
        both = [one.reshape(D, devices, -1) for one in (gate_DF, up_DF)]
        return {"in": np.stack(both, axis=2).reshape(D, -1), "out": out_FD}

    return init


def stacked():
    return {"in": np.stack(drawn(0)[:2], axis=1), "out": drawn(0)[2]}


own_dim = {"in": P(None, None, "tensor"), "out": P("tensor")}
by_dim = lambda w, x: jnp.einsum("BD,DkF->kBF", x, w)
by_half = lambda w, x: jnp.split(x @ w, 2, axis=1)
by_pair = lambda w, x: jnp.moveaxis((x @ w).reshape(len(x), -1, 2), 2, 0)
swapped = lambda w, x: by_dim(w, x)[::-1]
wrong = [train, with_mlp(interleaved(8)), with_mlp(stacked, halves(swapped), own_dim)]
wrong += [with_mlp(stacked, halves(by_dim, jax.lax.pmean), own_dim)]
wrong += [with_mlp(init, halves(by_half, jax.lax.pmean))]
lesson.expect(check_train, *zip(wrong, [hint for _, hint in TRAIN_HINTS], strict=True),
              (with_mlp(stacked, halves(by_dim), own_dim), "Fixed"),
              (with_mlp(interleaved(F), halves(by_pair)), "Fixed"),
              (lambda *_: ..., lesson.NOTHING))  # fmt: skip
again = train(8, 4, checkpoint)[0]  # without a jump
assert max(again) < 0.2 and min(losses[:4]) > 2 * max(again), "no jump"

# %% [markdown]
# ## In one table
#
# Bytes are what a device sends in the forward pass in bfloat16, with (n - 1)/n taken as 1. All of this
# communication is exposed unless it overlaps with another matmul. The letters show what each device stores;
# dw and dy are the gradients of w and y.
#
# | case | forward | backward | bytes | PyTorch |
# |---|---|---|---|---|
# | 1: `x_bD @ w_DF -> y_bF` | nothing | all-reduce of dw | 0 | DDP |
# | 2: `x_bD @ w_dF -> y_bF` | all-gather of w | reduce-scatter of dw | 2 D F | `fully_shard` |
# | 3: `x_Bd @ w_dF -> y_BF` | all-reduce of y | nothing | 4 B F | `RowwiseParallel` |
# | 3: `x_Bd @ w_dF -> y_bF` | reduce-scatter of y | all-gather of dy | 2 B F | `RowwiseParallel`, `output_layouts=Shard(0)` |
# | 4: `x_bD @ w_Df -> y_bF` | all-gather of w | reduce-scatter of dw | 2 D F | `fully_shard`, dim 1 |
#
# The collectives are `jax.lax.all_gather`, `psum_scatter` and `psum` in JAX, `all_gather_into_tensor`,
# `reduce_scatter_tensor` and `all_reduce` in `torch.distributed`. In Megatron-LM, case 1 is data parallelism,
# case 2 its FSDP, and case 3 a `RowParallelLinear`: with a reduce-scatter if `--sequence-parallel` is set.
#
# ## Three lines to keep
#
# 1. `shard_map` runs one function on every device's shard. Specs only split and concatenate. Devices
#    communicate only where you call a collective.
# 2. If the contracting dim is sharded in one matrix, gather that matrix; if in both, add the partial sums.
#    Two output dims cannot be sharded over the same mesh axis.
# 3. Send the smallest of `x`, `w` and `y`, and never all-reduce a result if each device keeps only a shard.
#
# **Sources.** The four cases: scaling book, [Sharded
# matrices](https://jax-ml.github.io/scaling-book/sharding); GPUs: [the same
# book](https://jax-ml.github.io/scaling-book/gpus). JAX: [Manual parallelism with
# shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html). Rings: Patarasuk and Yuan, [Bandwidth
# optimal all-reduce algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002), 2009.
