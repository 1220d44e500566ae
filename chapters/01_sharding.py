# %% [markdown]
# # 01 · Sharding, in four cases
#
# **Question.** Two arrays lie in pieces on eight devices, and I want their matrix product. Which devices have
# to send what to whom?
#
# **Why it hurts not to know.** Nothing warns you. Below, eight devices return the right shape with wrong
# numbers, and later a training run looks well and saves weights that nobody else can use.
#
# *Before this:* 00 (devices, meshes, specs, the all-reduce). *Mesh:* `fsdp=8`, simulated; in the bug
# `data=2,fsdp=4`. *Runs in* 30 s on 2 cores. *Reading takes* 25 minutes, with the exercises 90.

# %%
from devices import simulate_devices

simulate_devices(8)
import jax.numpy as jnp
import matplotlib.pyplot as plt

import sharding
from chapters import lesson
from config import MeshConfig
from plan import hardware

COLOUR = lesson.COLOURS["fsdp"]  # of the one axis on this page

# %% [markdown]
# ## Eight devices run one function
#
# Three cells of this page are one program, for an empty file: this one, and the two in "The four cases". They
# need only JAX and NumPy. The first asks for eight simulated devices, lays them along one mesh axis, and runs
# a function on each. The axis is called `fsdp`, one of the guide's six (00); any name does. It has `n`
# devices.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

n = 8
# Auto: inputs may lie anywhere. Without it they have to lie cut as in_specs says.
mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(AxisType.Auto,))


def on_mesh(function, in_specs, out_specs, mesh=mesh):
    specs = dict(in_specs=in_specs, out_specs=out_specs)
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


shares = lambda x_b: x_b / x_b.sum()  # this device's 2 of 16 numbers
y_B = on_mesh(shares, P("fsdp"), P("fsdp"))(np.arange(1.0, 17.0))
print(y_B.shape, "the sum of all shares:", y_B.sum())

# %% [markdown]
# Sixteen numbers, divided by their sum: the shares should add up to 1, and they add up to 8, without an
# error.
#
# `jax.shard_map` gave every device its own slice. `in_specs` says how the input is cut: `P("fsdp")` cuts the
# first dim along the axis, so each device got b = B/n = 2 of the B = 16 numbers. (A capital is a whole dim,
# the small letter a device's slice of it.) `x_b.sum()` added the two numbers that a device can see. That is a
# *partial sum*, and nobody has added the eight of them.
#
# **Inside `shard_map`, nothing is sent unless a line says so.** Such a line is a *collective*, because all
# devices along the axis take part. `jax.lax.psum` adds:

# %%
shares = lambda x_b: x_b / jax.lax.psum(x_b.sum(), "fsdp")
y_B = on_mesh(shares, P("fsdp"), P("fsdp"))(np.arange(1.0, 17.0))
print("the sum of all shares:", y_B.sum())
assert abs(float(y_B.sum()) - 1) < 1e-6, "the shares no longer add up to 1"

# %% [markdown]
# ## The four cases
#
# Now the product `x_BD @ w_DF`: B rows of D numbers meet a matrix, and the dim D is summed away. Along one
# mesh axis there are four cases, which one tells apart by the cut of D:
#
# 1. **D is whole** in both, and only one of them is cut: nothing is sent.
# 2. **D is cut in one** of them. Its slices have to be gathered.
# 3. **D is cut in both**, alike. Each device gets partial sums of the whole result, and they have to be
#    added.
# 4. **D is whole, but both are cut**, B and F by the same axis. One of the two has to be gathered first.
#
# The rest of the program says what one device does in each case. Names tell what it has: `w_dF` is d = D/n
# rows of `w`.


# %% tags=["by-hand"]
def case_1(x_bD, w_DF):
    return x_bD @ w_DF


def case_2(x_bD, w_dF):
    w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True)
    return x_bD @ w_DF


def case_3_all(x_Bd, w_dF):
    return jax.lax.psum(x_Bd @ w_dF, "fsdp")  # everyone gets the total


def case_3_own(x_Bd, w_dF):  # everyone gets its rows of the total
    return jax.lax.psum_scatter(x_Bd @ w_dF, "fsdp", scatter_dimension=0, tiled=True)


def case_4(x_bD, w_Df):
    return x_bD @ jax.lax.all_gather(w_Df, "fsdp", axis=1, tiled=True)


# %% tags=["by-hand"]
B, D, F = 16, 64, 24
rng = np.random.default_rng(0)
x_BD, w_DF = rng.normal(size=(B, D)), rng.normal(size=(D, F))
whole, rows, columns = P(), P("fsdp"), P(None, "fsdp")
CASES = {  # how x, w and the result are cut
    case_1: (rows, whole, rows),
    case_2: (rows, rows, rows),
    case_3_all: (columns, rows, whole),
    case_3_own: (columns, rows, rows),
    case_4: (rows, columns, rows),
}
for case, (*in_specs, out_spec) in CASES.items():
    y_BF = on_mesh(case, tuple(in_specs), out_spec)(x_BD, w_DF)
    assert np.allclose(y_BF, x_BD @ w_DF, atol=1e-4), f"{case.__name__} is wrong"
    print(case.__name__, "gives what one device gives")

# %% [markdown]
# (`tiled=True` joins slices along a dim that is there; without it JAX stacks them along a new one.) In the
# pictures, **dark** is what device 2 holds, **light** what it is sent, and **hatched** a partial sum.


# %% tags=["hide-input"]
LONG = {"B": 1.5, "D": 3.0, "F": 2.1}  # how long a dim is drawn
OWN, SENT = dict(facecolor=COLOUR, alpha=0.85), dict(facecolor=COLOUR, alpha=0.3)
PARTIAL = dict(facecolor=COLOUR, alpha=0.3, hatch="///")


def place(spec, dims, device=2):
    """Corner and size of a device's piece, and along which dim it is cut."""
    cut = [k for k, axis in enumerate((*spec, None, None)[:2]) if axis]
    high, wide = (LONG[d] / (n if k in cut else 1) for k, d in enumerate(dims))
    down = device * high if 0 in cut else 0
    right = device * wide if 1 in cut else 0
    return (right, LONG[dims[0]] - down - high), wide, high, cut


# %% tags=["hide-input"]
def array(axes, left, dims, title, spec, parts):
    """An array with its cuts; `parts` are (spec, style): what device 2 has of it."""
    high, wide, bottom = LONG[dims[0]], LONG[dims[1]], -LONG[dims[0]] / 2
    for part, style in parts:
        (x, y), w, h, _ = place(part, dims)
        axes.add_patch(plt.Rectangle((left + x, bottom + y), w, h, lw=0, **style))
    for k in place(spec, dims)[-1]:
        for i in range(1, n):
            at = bottom + high * i / n if k == 0 else left + wide * i / n
            ends = (left, left + wide), (at, at)
            ends = ends if k == 0 else ((at, at), (bottom, bottom + high))
            axes.plot(*ends, color="black", lw=0.4)
    axes.add_patch(plt.Rectangle((left, bottom), wide, high, fill=False, lw=1))
    axes.text(left + wide / 2, 1.75, title, ha="center", size=10)
    return left + wide


# %% tags=["hide-input"]
def picture(title, held, used, made, kept):
    """One case: what device 2 holds, what it multiplies, what comes out, what stays."""
    _, axes = plt.subplots(figsize=(6.5, 2.0))
    x = array(axes, 0, "BD", "x", held[0], [(held[0], OWN)])
    x = array(axes, x + 0.5, "DF", "w", held[1], [(held[1], OWN)])
    axes.annotate("", (x + 1.1, 0), (x + 0.2, 0), arrowprops={"arrowstyle": "->"})
    x = array(axes, x + 1.3, "BD", "uses x", held[0], [(used[0], SENT), (held[0], OWN)])
    x = array(axes, x + 0.5, "DF", "uses w", held[1], [(used[1], SENT), (held[1], OWN)])
    axes.annotate("", (x + 1.1, 0), (x + 0.2, 0), arrowprops={"arrowstyle": "->"})
    x = array(axes, x + 1.3, "BF", "makes", made[0], [made])
    if kept:
        axes.annotate("", (x + 1.1, 0), (x + 0.2, 0), arrowprops={"arrowstyle": "->"})
        x = array(axes, x + 1.3, "BF", "keeps", kept[0], [kept])
    axes.set(xlim=(-0.1, x + 0.1), ylim=(-1.6, 2.2), aspect="equal", title=title)
    axes.set_axis_off()


def counted(case):
    *in_specs, out_spec = CASES[case]
    return lesson.compiled(on_mesh(case, tuple(in_specs), out_spec), mesh, x_BD, w_DF)


# %% [markdown]
# ### Case 1: nothing shared is cut

# %% mystnb={"image": {"alt": "Device 2 holds its rows of x and all of w, uses them, and makes its rows of the result."}}
title = "Rows of x are rows of the result"
picture(title, (rows, whole), (rows, whole), (rows, OWN), None)

# %%
lesson.listed(counted(case_1))

# %% [markdown]
# A row of the result needs one row of `x` and all of `w`. Data parallelism is this case; so is `x_BD @ w_Df`,
# which makes columns.
#
# ### Case 2: one operand is cut along the sum
#
# The rows of `w` lie on eight devices, 8 of 64 on each. A device needs the other 56 for its product.

# %% mystnb={"image": {"alt": "Device 2 holds one eighth of the rows of w; it is sent the others, and makes its rows of the result."}}
title = "The rows of w that are missing are sent"
picture(title, (rows, rows), (rows, whole), (rows, OWN), None)

# %% [markdown]
# > **Predict.** `w` is 64 x 24 in float32, 4 bytes a number. How many bytes does a device send, if each
# > passes on seven of the eight slices to its neighbour, in a ring?

# %%
my_prediction = None  # bytes
found = counted(case_2)
[gather_of_w] = found.collectives
lesson.predicted("bytes a device sends", my_prediction, gather_of_w.wire_bytes, "bytes")
lesson.listed(found)

# %% tags=["remove-cell"]
assert gather_of_w.kind == "all-gather" and gather_of_w.payload_bytes == 6144

# %% [markdown]
# Kind and payload, 6,144 bytes of the joined `w`, are read in the compiled program (by `lesson.compiled`).
# What a device *sends* is arithmetic, 7/8 of it: between simulated devices there is no wire to measure.
#
# ### Case 3: both are cut along the sum
#
# Device 2 has 8 of the 64 columns of `x`, and the 8 rows of `w` that meet them. It can multiply, and gets
# incomplete numbers for the whole result.

# %% mystnb={"image": {"alt": "Device 2 holds a slice of the columns of x and of the rows of w, makes partial sums of the whole result, and keeps its rows of the total."}}
title = "Slices of the sum make partial sums; add, and keep a slice"
picture(title, (columns, rows), (columns, rows), (whole, PARTIAL), (rows, OWN))

# %%
for case in case_3_all, case_3_own:
    lesson.listed(counted(case))

# %% [markdown]
# `psum`, the *all-reduce* of 00, gives everyone the whole total. `psum_scatter`, the *reduce-scatter*, gives
# each device one slice of it, for half of the bytes, because an all-reduce is a reduce-scatter and then a
# gather. **Where each goes on with its own rows, a `psum` costs twice what is needed.**
#
# ### Case 4: both are cut along one output dim each
#
# Rows of `x`, columns of `w`, both cut by `fsdp`. D is whole, so each device multiplies what it has.
#
# > **Predict.** The result has 16 x 24 = 384 numbers. How many of them do the eight devices have together?

# %%
my_prediction = None  # numbers
alone = on_mesh(lambda x_bD, w_Df: (x_bD @ w_Df)[None], (rows, columns), P("fsdp"))
blocks = np.asarray(alone(x_BD, w_DF))  # [device, b, f]
lesson.predicted("numbers of the result", my_prediction, blocks.size)

# %% tags=["remove-cell"]
assert blocks.size == B * F // n

# %% tags=["hide-input"] mystnb={"image": {"alt": "A grid of eight by eight blocks of the result; only the eight blocks on the diagonal are filled."}}
_, axes = plt.subplots(figsize=(4.2, 2.6))
y_BF, high, wide = x_BD @ w_DF, B // n, F // n
for i, j in np.ndindex(n, n):
    there = y_BF[i * high :, j * wide :][:high, :wide]
    owners = [k for k in range(n) if np.allclose(blocks[k], there, atol=1e-4)]
    style = OWN if owners else dict(facecolor="none")
    axes.add_patch(plt.Rectangle((j, n - 1 - i), 1, 1, ec="black", lw=0.5, **style))
    text = "".join(map(str, owners))
    axes.text(j + 0.5, n - 0.5 - i, text, ha="center", va="center")
axes.set(xlim=(0, n), ylim=(0, n), xticks=[], yticks=[], xlabel="F, columns of w")
axes.set(ylabel="B, rows of x", title="Seven blocks of eight are on no device")

# %% [markdown]
# An axis has n devices, and the result has n x n blocks. That is why JAX refuses a spec that names an axis
# twice, `P("fsdp", "fsdp")`. One of the cuts must be undone: gather `w` and make rows, or gather `x` (here
# the smaller) and make columns. (Or cut F along *another* mesh axis: then n x m blocks have n x m devices,
# and it is case 1 again.)

# %% mystnb={"image": {"alt": "Device 2 holds rows of x and columns of w; it is sent the other columns, and makes its rows of the result."}}
title = "One cut is undone: all columns of w are sent"
picture(title, (rows, columns), (rows, whole), (rows, OWN), None)

# %%
lesson.listed(counted(case_4))

# %% [markdown]
# ## What it costs, and from which size on
#
# Simulated devices show what is sent, and never how long it takes. So take a size that trains, 2,048 rows
# against 4,096 x 14,336, a matrix of Llama 3 8B, in *bfloat16*, 2 bytes a number (half of what is counted in
# float32). `plan/hardware.py` has each chip's FLOP/s, and the bytes/s that a device can send. What it leaves
# out is that every step of a collective takes a time of its own, however little it carries: about 1 us a hop
# on a TPU ([scaling book](https://jax-ml.github.io/scaling-book/sharding)), and 3.4 us a step in NCCL's own
# estimate for a ring on NVLink, 14 us to another node
# ([tuning.cc](https://github.com/NVIDIA/nccl/blob/v2.21.5-1/src/graph/tuning.cc), `hwLat`, Simple).

# %%
# A hop on each of three axes; a ring of 8 in 7 steps; 14 steps and one to a node.
LATENCY = {"v4:2x2x2": 3e-6, "h100:8": 7 * 3.4e-6, "h100:16": 14 * 3.4e-6 + 14e-6}
LLAMA = [jax.ShapeDtypeStruct(s, np.float32) for s in ((2048, 4096), (4096, 14336))]
chip, speed = {}, {}  # of each topology
for name in LATENCY:
    topology = hardware.Topology.parse(name)
    chip[name] = topology.chip
    links = hardware.layout(MeshConfig(fsdp=topology.devices), topology)
    speed[name] = links["fsdp"].bytes_per_s
print("us, 8 devices    sent  v4:2x2x2     h100:8")
for case, specs in CASES.items():
    found = lesson.compiled(on_mesh(case, specs[:2], specs[2]), mesh, *LLAMA)
    sent = found.total.wire_bytes / 2  # bfloat16
    took = [1e6 * sent / speed[name] for name in ("v4:2x2x2", "h100:8")]
    print(f"{case.__name__:10} {sent / 1e6:7.1f} MB {took[0]:9.0f} {took[1]:10.0f}")
flops = found.flops / 1e6
work = [flops / chip[name].peak_flops_per_s * 1e12 for name in ("v4:2x2x2", "h100:8")]
print(f"product              {work[0]:9.0f} {work[1]:10.0f}")

# %% [markdown]
# The wires take longer than the product wherever something is sent. When is that not so? (Here a device has
# 256 rows. Case 3 with everything sends as much as case 2 only because D is 2 B.)
#
# > **Predict.** A v4 does 275e12 FLOP/s in bfloat16, and on this mesh a device sends 135e9 bytes/s. With how
# > many rows *a device* does the product of case 2 take as long as its gather? (Take (n - 1)/n as 1.)

# %%
my_prediction = None  # rows
ridge = {name: chip[name].peak_flops_per_s / speed[name] for name in LATENCY}
lesson.predicted("rows", my_prediction, ridge["v4:2x2x2"], within=0.15)

# %% [markdown]
# b rows take `2 b D F` FLOPs, and the weights bring `2 D F` bytes. D and F cancel: **b must be FLOP/s over
# bytes/s**. The same holds in case 4, and in case 3 with d in place of b (d/2 for a `psum`). And the steps'
# own time, the *latency*, decides for every array that the wires carry in less time than that:

# %%
print("          GB/s  rows a device   latency   decides below")
for name, latency in LATENCY.items():
    size = latency * speed[name] / 1e6
    print(f"{name:9} {speed[name] / 1e9:4.0f} {ridge[name]:14,.0f}", end="")
    print(f" {latency * 1e6:6.1f} us {size:12.2f} MB")
    assert 1900 < ridge[name] < 2600, "not 'some two thousand rows'"

# %% [markdown]
# So: **gather weights where each device has some two thousand rows or more; else send something smaller.**
# (v5e and v5p are near these three.) And do not send a thousand small arrays where one large one would do.
# For small messages NCCL has a protocol of 0.6 us a step, at a lower speed.
#
# ## Specs cut, and glue
#
# `out_specs` does the reverse of `in_specs`: it says how to **glue** what the devices return. An axis that it
# does not name is a promise: the devices along it return equal arrays, and one is kept. Four devices return
# the two rows that each got; only the glue differs:


# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight rows of numbers; beside them the same pairs of rows, side by side."}}
def numbers(axes, x, title):
    for (i, j), value in np.ndenumerate(x):
        colour = lesson.DEVICES[int(value) // 8]  # of the device that had it
        axes.add_patch(plt.Rectangle((j, -i), 1, 1, color=colour, alpha=0.5, lw=0))
        axes.text(j + 0.5, 0.5 - i, int(value), size=9, ha="center", va="center")
    axes.set(xlim=(0, x.shape[1]), ylim=(1 - len(x), 1), aspect="equal")
    axes.set_title(title, size=10)
    axes.set_axis_off()


four, x_84 = sharding.make_mesh("fsdp=4"), np.arange(32.0).reshape(8, 4)
figure, panels = plt.subplots(1, 2, figsize=(6.5, 2.7), width_ratios=(4, 16))
for axes, spec in zip(panels, (rows, columns), strict=True):
    glued = on_mesh(lambda x: x, rows, spec, four)(x_84)
    numbers(axes, glued, f"glued by {spec}:\n{glued.shape}")
title = "Glue along another dim, and it is another array (a colour is a device)"
figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# Glue moves no number between devices. To have the *same* array cut along its columns, devices must exchange
# some (exercise 1). A spec may cut one dim by two axes: `P(("data", "fsdp"))` cuts it along `data` first, and
# each piece along `fsdp`.
#
# ## Six ways to exchange
#
# The cases needed three collectives. Gradients and other layouts need three more. Here each works along dim
# 0:


# %%
def shift(x):  # to the next device, from the last to the first
    size = jax.lax.axis_size("fsdp")
    return jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % size) for i in range(size)])


gather = lambda x: jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
scatter = lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)
psum = lambda x: jax.lax.psum(x, "fsdp")
vary = lambda x: jax.lax.pcast(x, "fsdp", to="varying")
exchange = lambda x: jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True)  # cut, join
SIX = {  # the function, in_specs, out_specs
    "all_gather": (gather, rows, rows),
    "psum_scatter": (scatter, rows, rows),
    "psum": (psum, rows, whole),
    "pcast": (vary, whole, rows),
    "all_to_all": (exchange, rows, rows),
    "ppermute": (shift, rows, rows),
}

# %% [markdown]
# Where does every number go? Slot j of device i (of 4) is marked with one bit, so that a sum says what went
# into it. A digit is the slot, a colour the device, and grey a value that all have.


# %% tags=["hide-input"]
def run_marked(name, devices=4):
    """Marks before and after one of the SIX: [column, slot]. P(): one column."""
    function, before, after = SIX[name]
    slots = 1 if name in ("all_gather", "ppermute") else devices
    i, j = np.indices((devices, slots))
    marks = 1 << (devices * i + (i if slots == 1 else j))
    if before == P():
        marks = 1 << (devices**2 + j[:1])  # nobody's own: the same on all devices
    small = sharding.make_mesh(f"fsdp={devices}")
    got = on_mesh(function, before, after, small)(np.int32(marks.reshape(-1)))
    side_by_side = lambda x, spec: np.reshape(x, (1 if spec == P() else devices, -1))
    return side_by_side(marks, before), side_by_side(got, after)


# %% tags=["hide-input"]
def draw(axes, left, marks, devices=4):
    """A box a value, as wide as all devices if they share it; a stripe an addend."""
    width = devices // len(marks)
    for i, slots in enumerate(marks):
        for j, mark in enumerate(slots):
            x, y = left + i * width, -(i if len(slots) == 1 else j)
            bits = [k for k in range(devices * (devices + 1)) if int(mark) >> k & 1]
            stripes = bits * width
            each = width / len(stripes)
            for part, k in enumerate(stripes):
                colour = (*lesson.DEVICES[:devices], lesson.NEUTRAL)[k // devices]
                style = dict(color=colour, alpha=0.6, lw=0)
                axes.add_patch(plt.Rectangle((x + part * each, y), each, 0.92, **style))
            axes.add_patch(plt.Rectangle((x, y), width, 0.92, fill=False, lw=0.8))
            box = dict(boxstyle="circle,pad=0.1", fc="white", ec="none", alpha=0.7)
            where = dict(size=9, ha="center", va="center", bbox=box)
            axes.text(x + width / 2, y + 0.44, bits[0] % devices, **where)


# %% tags=["hide-input"] mystnb={"image": {"alt": "Six panels: numbers on four devices, before and after each collective."}}
figure, panels = plt.subplots(3, 2, figsize=(6.6, 6.4))
for axes, name in zip(panels.flat, SIX, strict=True):
    before, after = run_marked(name)
    draw(axes, 0, before)
    draw(axes, 5.5, after)
    axes.annotate("", (5.4, -1), (4.1, -1), arrowprops={"arrowstyle": "->"})
    axes.set(xlim=(-0.1, 9.6), ylim=(-3.2, 1), yticks=[], title=name)
    axes.set_xticks([0.5, 1.5, 2.5, 3.5, 6, 7, 8, 9], [*range(4)] * 2)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
figure.supxlabel("device, before and after", size=10)
title = "A colour is the device a number came from, grey is all; stripes are a sum"
figure.suptitle(title, x=0.02, ha="left")
figure.get_layout_engine().set(wspace=0.1)

# %% [markdown]
# - `all_gather`: everyone gets all slices.
# - `psum_scatter` (in the project `sharding.reduce_scatter`): everyone's arrays are added, and each device
#   keeps one slice of the sum.
# - `psum`: added, and everyone gets all of the sum.
# - `pcast` (`sharding.vary`) sends nothing: a value that all share, each now treats as its own (chapter 02
#   says why).
# - `all_to_all`: device i sends its slot j to device j. One dim is cut into slots, and what arrives is joined
#   along the same dim or another.
# - `ppermute` (`sharding.shift`): each sends to one other; here, to the next.
#
# ## What a ring sends
#
# The next cell builds a gather from nothing but `shift`. An array of 128 x 4 float32, 2,048 bytes, lies in
# slices on 8 devices.


# %%
def ring_gather(x_bD):
    i = jax.lax.axis_index("fsdp")  # this device's number, 0 to n - 1

    def step(held_bD, _):
        arrived_bD = shift(held_bD)
        return arrived_bD, arrived_bD  # pass on what came last, and keep it

    _, others = jax.lax.scan(step, x_bD, length=n - 1)
    held = jnp.concatenate([x_bD[None], others])  # [k]: from the device k places back
    return held[(i - jnp.arange(n)) % n].reshape(-1, x_bD.shape[1])


normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
a_BD = normal(128, 4)
ring = on_mesh(ring_gather, rows, rows)
assert lesson.same(ring(a_BD), np.tile(a_BD, (n, 1)))  # eight copies, glued
found = lesson.compiled(ring, mesh, a_BD)

lesson.listed(found)
assert sum(int(one.count) * one.payload_bytes for one in found.collectives) == 1792

# %% [markdown]
# Seven slices of 256 bytes, (n - 1)/n of the whole. No way between devices sends less, because every device
# lacks seven slices. A reduce-scatter runs the same ring with sums (exercise 2), and a psum is the two in a
# row. (Where the *switch* adds, as NVLink's can, a psum may send less.) In units of what each device holds:
#
# | | each ends with | each sends |
# |---|---|---|
# | `all_gather` | n | n - 1 |
# | `psum_scatter` | 1/n | (n - 1)/n |
# | `psum` | 1 | 2 (n - 1)/n |
# | `all_to_all` | 1 | (n - 1)/n |
# | `ppermute` | 1 | 1 |
# | `pcast` | 1 | 0 |

# %% tags=["remove-cell"]
PRICE = {"all_gather": 1792, "psum_scatter": 224, "psum": 448, "all_to_all": 224}
PRICE |= {"ppermute": 256, "pcast": 0}
for name, (function, before, after) in SIX.items():
    held = a_BD[:16] if before == P() else a_BD  # 256 bytes on each device
    spent = lesson.compiled(on_mesh(function, before, after), mesh, held).total
    assert spent.wire_bytes == PRICE[name], (name, spent)

# %% [markdown]
# **More devices divide the work, and not the message**: (n - 1)/n of the gathered array is nearly all of it,
# on 8 devices as on 800.
#
# ## All of them, or none
#
# A collective waits for *all* devices along its axis. If one takes another branch, the others wait for ever.
# On 4 x 2 devices, of which each holds a number:


# %%
def in_branch(condition_axis):
    def function(x):
        add = lambda x: vary(psum(x))  # both branches must be of one kind
        here = jax.lax.axis_index(condition_axis) == 0
        return jax.lax.cond(here, add, lambda x: x, x)

    both = P(("fsdp", "tensor"))
    return on_mesh(function, both, both, sharding.make_mesh("fsdp=4,tensor=2"))


print("tensor 0 adds over fsdp:", in_branch("tensor")(np.arange(8.0)))
_ = in_branch("fsdp").lower(np.arange(8.0)).compile()  # compiled, and never run

# %% [markdown]
# In the first program, all devices that meet in a sum take the branch. In the second, only those with `fsdp`
# 0 do. It compiles without a word. Run, it is ended by XLA after a minute: "Expected 4 threads to join the
# rendezvous, but only 1 of them arrived on time".
#
# ## In `model.py`
#
# `model.embed` is case 3 in disguise: a device has some words of the vocabulary, rows of zeros stand for the
# others, and these partial sums are added and cut.
#
# ## Exercise 1: from rows to columns
#
# A new `x_BD`, 128 x 24, lies in slices of rows. Return this device's slice of its columns, [B, D/n], with
# **one** collective. (Checkers stack what the devices return: (4, 128, 6) is 128 x 6 on each of 4.)


# %% tags=["hide-input"]
def program_of(answer, devices, in_specs):
    """The answer on a mesh, what the devices return stacked; and the mesh."""
    stacked = lambda *slices: jnp.asarray(lesson.answered(answer)(*slices))[None]
    small = sharding.make_mesh(f"fsdp={devices}")
    return on_mesh(stacked, in_specs, rows, small), small


def run_answer(answer, devices, in_specs, *args):
    return program_of(answer, devices, in_specs)[0](*args)


def ledger_of(answer, devices, in_specs, *args):
    program, small = program_of(answer, devices, in_specs)
    return lesson.compiled(program, small, *args)


# %% tags=["hide-input"]
def to_all(split, join):
    return lambda x: jax.lax.all_to_all(x, "fsdp", split, join, tiled=True)


cut = lambda x: sharding.own_slice(x, "fsdp", dim=0)  # this device's slice
own_columns = lambda x: sharding.own_slice(x, "fsdp", dim=1)
added_columns = lambda x: sharding.reduce_scatter(x, "fsdp", dim=1)
reshaped = lambda x: x.reshape(-1, x.shape[1] // jax.lax.axis_size("fsdp"))
ALONG = "Cut and joined along the same dim. Which one is whole before, and after?"
COLUMN_HINTS = [
    (lambda x: x, "Those are your rows, as they came."),
    (own_columns, "The right columns of your own rows. Where are the other rows?"),
    (gather, "Every device has everything now. Which part of it should remain?"),
    (to_all(0, 1), "You cut the rows once more. Which dim is whole before, and after?"),
    (to_all(0, 0), ALONG),
    (to_all(1, 1), ALONG),
    (reshaped, "The right shape, and other numbers: a reshape sends nothing."),
    (added_columns, "Rows of different devices were added, and should be joined."),
    (lambda x: added_columns(gather(x)), "n times too big: equal copies were added."),
]

# %% tags=["hide-input"]
ROWS = rows, normal(128, 24)


def check_to_columns(answer):
    run = lambda f: lambda devices: run_answer(f, devices, *ROWS)
    hints = [(run(f), hint) for f, hint in COLUMN_HINTS]
    want = lambda devices: np.stack(np.split(ROWS[-1], devices, axis=1))
    line = lesson.diagnose(run(answer), [(4,), (8,)], want, hints, "Right")
    if line != "Right":
        return line
    sent = ledger_of(answer, 8, *ROWS).total.wire_bytes
    if sent > 1344:
        line = f"The right numbers, for {sent:,.0f} bytes a device."
        return line + " Most of them are thrown away on arrival. Who needs which piece?"
    return "Right on 4 and 8 devices; on 8, a device sends 1,344 bytes."


# %%
def to_columns(x_bD):
    return ...


print(check_to_columns(to_columns))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jax.lax.all_to_all(x_bD, "fsdp", 1, 0, tiled=True)`: cut what is whole (dim 1), join what is cut
# (dim 0). On 8 devices it sends 7/8 of a device's 1,536 bytes. To gather all rows, and cut, sends 7/8 of all
# 12,288 bytes.
# </details>

# %% tags=["remove-cell"]
assert check_to_columns(to_all(1, 0)).startswith("Right on")
for wrong, hint in COLUMN_HINTS:
    assert check_to_columns(wrong) == hint
too_dear = lambda x: own_columns(gather(x))
assert "10,752 bytes" in check_to_columns(too_dear)
assert "(4, 24, 32), and should have (4, 128, 6)" in check_to_columns(lambda x: x.T)
for nothing in (to_columns, lambda x: None, None, ...):
    assert check_to_columns(nothing) == lesson.NOTHING
assert "a function is wanted" in check_to_columns(3)

# %% [markdown]
# ## Exercise 2: a ring that adds
#
# Every device has its own `x_BD`. Device i shall end with slice i of the rows of their sum. Use `shift` only,
# n - 1 times, one slice at a time.

# %% tags=["hide-input"]
OWN_ROWS = {devices: normal(devices, 48, 3) for devices in (4, 8)}
run_ring = lambda f: lambda devices: run_answer(f, *ring_case(devices))
ring_case = lambda devices: (devices, rows, OWN_ROWS[devices].reshape(-1, 3))
sum_of = lambda devices: OWN_ROWS[devices].sum(axis=0).reshape(devices, -1, 3)
late = lambda by: lambda devices: np.roll(sum_of(devices), by, axis=0)
MOVED = "Complete sums, on the wrong devices. Where does a sum begin, and where end?"
RING_HINTS = [
    (late(-1), MOVED),
    (late(1), MOVED),
    (run_ring(cut), "Your own slice, unsummed: what comes from the others?"),
]


def addends(answer, n=4):
    """Which slice of each device's array has come into the result on device 0."""
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
        return f"The right sums, by {others[0]}. Now without it: shifts alone."
    if shifts not in (0, n - 1):
        return f"{shifts:.0f} shifts on 8 devices. How many others must a sum meet?"
    if line != "Right":
        line = f"On 4 devices, device 0 has added slices {addends(answer)} of devices"
        return line + " 0, 1, 2, 3. It should be slice 0 of each."
    if found.total.wire_bytes > 504:
        return f"The right sums, for {sent} a device. Must whole arrays go round?"
    return f"Right: 7 shifts and {sent} a device, on 8."


# %%
def rows_of(x_BD, k):
    """Slice k of the rows, of n; k goes around the end."""
    size = len(x_BD) // jax.lax.axis_size("fsdp")
    return jax.lax.dynamic_slice_in_dim(x_BD, k * size % len(x_BD), size)


def ring_reduce_scatter(x_BD):  # n: jax.lax.axis_size("fsdp")
    return ...


print(check_ring(ring_reduce_scatter))

# %% [markdown]
# <details><summary>Solution</summary>
#
# A sum that ends on device i after n - 1 steps began on device i + 1. So device i begins with slice i - 1,
# and at step k the sum for slice i - 1 - k passes by:
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

# %% tags=["remove-cell"]
assert check_ring(around(-1, -1)) == "Right: 7 shifts and 504 bytes a device, on 8."
assert check_ring(around(1, 1, by=-1)).startswith("Right: 7")
assert check_ring(around(0, -1)) == check_ring(around(0, 1, by=-1)) == MOVED
assert check_ring(around(-1, -1, more=-1)).startswith("6 shifts")
assert check_ring(around(-1, -1, more=1)).startswith("8 shifts")
assert "slices 3, 0, 1, 2 of devices" in check_ring(around(-1, 0))
assert "slices 0, 1, 2, 3 of devices" in check_ring(passed_on("slice"))
assert "slices 0, 2, 0, 2 of devices" in check_ring(around(1, 1))
assert "4,032 bytes a device. Must whole" in check_ring(passed_on("whole"))
assert "unsummed" in check_ring(cut)
assert "by reduce-scatter" in check_ring(scatter)
assert check_ring(fro).startswith("9 shifts")
assert check_ring(ring_reduce_scatter) == lesson.NOTHING

# %% [markdown]
# ## Exercise 3: design a product
#
# Case 3, both operands cut along the sum: x_Bd [B, D/n] and w_dF [D/n, F]. Wanted: this device's *rows* of
# `x_BD @ w_DF`, [B/n, F]. Send as little as you can, in both problems that the checker tries: B, D, F = 16,
# 64, 24 and 128, 16, 24. Your function may look at shapes.

# %% tags=["hide-input"]
PRODUCT_HINTS = [
    (lambda x, w: cut(x @ w), "Your rows of a partial sum. Who has the rest of it?"),
    (lambda x, w: psum(x @ w), "The whole sum, everywhere. Which rows are yours?"),
    (lambda x, w: psum(cut(x @ w)), "Cut, then added: whose rows were added to yours?"),
    (lambda x, w: x @ w, "A partial sum, of all rows. Two things are left to do."),
    (lambda x, w: scatter(psum(x @ w)), "n times too big: it was added twice."),
    (lambda x, w: added_columns(x @ w), "Added, and your columns of it. Wanted: rows."),
]
OPERAND_SPECS = (columns, rows)
LEAST = {(16, 64, 24): 1344, (128, 16, 24): 2240}  # bytes a device sends
OPERANDS = {size: (normal(*size[:2]), normal(*size[1:])) for size in LEAST}


# %% tags=["hide-input"]
def check_product(answer):
    case = lambda size: (8, OPERAND_SPECS, *OPERANDS[size])
    run = lambda f: lambda *size: run_answer(f, *case(size))
    hints = [(run(f), hint) for f, hint in PRODUCT_HINTS]
    want = lambda *size: np.matmul(*OPERANDS[size]).reshape(8, -1, size[-1])
    line = lesson.diagnose(run(answer), [*LEAST], want, hints, "Right")
    for size in LEAST if line == "Right" else ():
        found = ledger_of(answer, *case(size))
        sent, kinds = found.total.wire_bytes, {one.kind for one in found.collectives}
        if sent > LEAST[size]:
            line = f"Right, for {sent:,.0f} bytes at {size}; {LEAST[size]:,} will do."
            if "all-reduce" in kinds:
                return line + " All devices got all of the sum, and kept 1/8."
            return line + " Which is smaller there: the two operands, or the result?"
    done = "Right, for 1,344 and 2,240 bytes. We know no cheaper way."
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
# Move the result, or move the operands. Each side of the comparison, times 4 bytes and (n - 1)/n, is what one
# way sends. Chapter 03 lives on the last line, chapter 04 on the third.
# </details>

# %% tags=["remove-cell"]
add_results = lambda x, w: scatter(x @ w)
move_operands = lambda x, w: to_all(0, 1)(x) @ gather(w)


def smaller(x_Bd, w_dF):
    (B, d), F, n = x_Bd.shape, w_dF.shape[1], jax.lax.axis_size("fsdp")
    results, operands = B * F, B * d + n * d * F
    return (add_results if results <= operands else move_operands)(x_Bd, w_dF)


assert check_product(smaller).startswith("Right, for 1,344 and 2,240")
assert "10,752 bytes at (128, 16, 24)" in check_product(add_results)
assert "smaller there" in check_product(add_results)
assert "5,824 bytes at (16, 64, 24)" in check_product(move_operands)
psum_then_cut = check_product(lambda x, w: cut(psum(x @ w)))
assert "2,688 bytes" in psum_then_cut and "kept 1/8" in psum_then_cut
for wrong, hint in PRODUCT_HINTS:
    assert check_product(wrong) == hint
assert check_product(product) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# Eight devices as 2 x 4 train a matrix. The error is that of all rows, and it falls. The weights are saved
# whole. A colleague loads them on one device, for the same rows and targets.

# %% tags=["hide-input"]
x_BD, y_BF = normal(64, 16), normal(64, 6)
y_BF = x_BD @ normal(16, 6) + 0.1 * y_BF
error_of = lambda w_DF: float(np.mean((x_BD @ w_DF - y_BF) ** 2))

# %%
BOTH = ("data", "fsdp")


def train(shape, steps=40, rate=0.6):
    """Returns the weights, saved, and the error that the last step began with."""
    mesh = jax.make_mesh(shape, BOTH, axis_types=(AxisType.Auto,) * 2)

    def error(w_dF, x_bD, y_bF):
        half_DF = jax.lax.all_gather(w_dF, "data", axis=0, tiled=True)
        w_DF = jax.lax.all_gather(half_DF, "fsdp", axis=0, tiled=True)
        squares = jnp.sum((x_bD @ w_DF - y_bF) ** 2)
        return jax.lax.psum(squares, BOTH) / y_BF.size

    on_all = on_mesh(error, (P(BOTH), P(BOTH), P(BOTH)), P(), mesh)
    step = jax.jit(jax.value_and_grad(lambda w_DF: on_all(w_DF, x_BD, y_BF)))
    w_DF = jnp.zeros((16, 6))
    for _ in range(steps):
        printed, d_w_DF = step(w_DF)
        w_DF -= rate * d_w_DF
    return np.asarray(w_DF), float(printed)


# %%
for steps in (1, 5, 10, 40):
    w_DF, (_, printed) = train((2, 4), steps)[0], train((2, 4), steps + 1)
    print(f"after {steps:2} steps: training prints {printed:6.3f}", end="")
    print(f"; on one device {error_of(w_DF):6.3f}")

# %% [markdown]
# `jax.grad` is not at fault (it is for chapter 02). Mend `train`, so that its weights are of use to everyone.


# %% tags=["hide-input"]
def on_one(rate=0.6, steps=40):
    """The weights of the same training on one device."""
    error = lambda w_DF: jnp.mean((x_BD @ w_DF - y_BF) ** 2)
    step, w_DF = jax.jit(jax.grad(error)), jnp.zeros((16, 6))
    for _ in range(steps):
        w_DF -= rate * step(w_DF)
    return np.asarray(w_DF)


def mixed(w_DF, shape):
    """Rows in the order in which the function above leaves them."""
    return w_DF.reshape(shape[1], shape[0], -1, 6).swapaxes(0, 1).reshape(16, 6)


# %% tags=["hide-input"]
MEND_HINTS = [
    (lambda shape: mixed(on_one(), shape), "The weights are as before your change."),
    (lambda shape: on_one(0.6 / 8), "The error was divided by the devices once more."),
    (lambda shape: mixed(on_one(0.6 / 8), shape), "Only the steps are shorter."),
]


def check_mend(train):
    def weights(shape):
        found = lesson.answered(train)(shape)
        return found[0] if isinstance(found, tuple) else found

    done = "Mended: on 2x4, 4x2 and 1x8 devices the weights are those of one."
    shapes = [((2, 4),), ((4, 2),), ((1, 8),)]
    return lesson.diagnose(weights, shapes, lambda shape: on_one(), MEND_HINTS, done)


# %% tags=["hide-output"]
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `P(("data", "fsdp"))` makes `data` the outer axis. So neighbours along `fsdp` hold neighbouring rows, and
# they have to be joined first: gather over `fsdp`, then over `data`, or over both at once:
#
# ```python
# w_DF = jax.lax.all_gather(w_dF, ("data", "fsdp"), axis=0, tiled=True)
# ```
#
# In the other order each device works with all rows of `w`, in the wrong places. Gradients come back into the
# same wrong places, so training notices nothing: it learns a matrix whose rows are mixed, for this mesh
# alone. On 1 x 8 devices the two orders are one, and a test there passes.
#
# PyTorch had it. A weight was cut for tensor parallelism and the piece again by FSDP2, and `full_tensor()`
# joined them as if the cuts had come in the other order
# ([129206](https://github.com/pytorch/pytorch/issues/129206)). The mend was a placement that remembers it,
# `_StridedShard` ([126697](https://github.com/pytorch/pytorch/pull/126697)).
# </details>


# %% tags=["remove-cell"]
def other(join, divide=1, specs=BOTH):
    def train(shape, steps=40, rate=0.6):
        mesh = jax.make_mesh(shape, BOTH, axis_types=(AxisType.Auto,) * 2)

        def error(w_dF, x_bD, y_bF):
            squares = jnp.sum((x_bD @ join(w_dF) - y_bF) ** 2)
            return jax.lax.psum(squares, BOTH) / y_BF.size / divide

        on_all = on_mesh(error, (P(specs),) * 3, P(), mesh)
        step = jax.jit(jax.grad(lambda w_DF: on_all(w_DF, x_BD, y_BF)))
        w_DF = jnp.zeros((16, 6))
        for _ in range(steps):
            w_DF -= rate * step(w_DF)
        return np.asarray(w_DF), 0.0

    return train


join = lambda *axes: lambda w_dF: sharding.all_gather(w_dF, axes, dim=0)
inner_first = lambda w_dF: join("data")(join("fsdp")(w_dF))
for right_one in (other(join(*BOTH)), other(inner_first)):
    assert check_mend(right_one).startswith("Mended")
swapped = ("fsdp", "data")
assert check_mend(other(join(*swapped), specs=swapped)).startswith("Mended")
unchanged, divided, shorter = (hint for _, hint in MEND_HINTS)
assert check_mend(train) == check_mend(other(join("fsdp", "data"))) == unchanged
assert check_mend(other(inner_first, divide=8)) == divided
assert check_mend(other(join("fsdp", "data"), divide=8)) == shorter
assert check_mend(other(join("data"))).startswith("It stops")
for nothing in (lambda shape: ..., lambda shape: None, None):
    assert check_mend(nothing) == lesson.NOTHING

# %% [markdown]
# ## In one table
#
# Bytes are what a device sends forward in bfloat16, with (n - 1)/n taken as 1. All of it is on the critical
# path, unless another product runs meanwhile. Who holds what, the letters say.
#
# | case | forward | backward | bytes | PyTorch |
# |---|---|---|---|---|
# | 1: `x_bD @ w_DF -> y_bF` | nothing | all-reduce of dw | 0 | DDP |
# | 2: `x_bD @ w_dF -> y_bF` | all-gather of w | reduce-scatter of dw | 2 D F | `fully_shard` |
# | 3: `x_Bd @ w_dF -> y_BF` | all-reduce of y | nothing | 4 B F | `RowwiseParallel` |
# | 3: `x_Bd @ w_dF -> y_bF` | reduce-scatter of y | all-gather of dy | 2 B F | the same, to `Shard` |
# | 4: `x_bD @ w_Df -> y_bF` | all-gather of w | reduce-scatter of dw | 2 D F | `fully_shard`, dim 1 |
#
# When: the product takes as long as the wires from 2,037 rows a device on v4 (2x2x2), 2,198 on a node of 8
# H100, 2,472 on two nodes. Latency decides below 0.4, 11 and 25 MB.
#
# ## Three lines to keep
#
# 1. `shard_map` runs one function on slices; specs cut and glue; nothing moves unless a collective is
#    written.
# 2. The dim that is summed decides: cut in one, gather; cut in both, add; and two output dims cannot share an
#    axis.
# 3. Send the smallest of `x`, `w` and `y`, and never add for all what each keeps a slice of.
#
# **Sources.** The four cases: scaling book, [Sharded
# matrices](https://jax-ml.github.io/scaling-book/sharding); GPUs: [the same
# book](https://jax-ml.github.io/scaling-book/gpus). JAX: [Manual parallelism with
# shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html). Rings: Patarasuk and Yuan, [Bandwidth
# optimal all-reduce algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002), 2009.
