# %% [markdown]
# # 08 · n-D parallelism: combining mesh axes
#
# *n-D parallelism* shards one training step over two or more mesh axes at once. Along each axis, every weight
# is either sharded or replicated. Data, tensor and pipeline parallelism together are called 3-D parallelism.
#
# Why combine axes? Each one alone reaches a limit. With few tokens per device, `fsdp` gathers weights for
# longer than the matmuls take, and a large `tensor` axis sends too many activations. Two small axes can send
# less than one large axis. The risk is a wrong program that looks right: all shapes fit, and the loss falls.
#
# *Prerequisites:* chapters 02 to 05; also 06 and 07 for `context` and `expert`.
# *Mesh:* `stage=2,fsdp=2,tensor=2`, simulated. *Runs in* 45 s on 2 cores. *Reading takes* about 35 minutes,
# and the exercises another 40.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import dataclasses
import textwrap
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np

import config
from chapters import lesson, opening
from plan import planner
from plan.chips import hardware

# %% tags=["hide-input"]
W, N = opening.PARAMETERS, 8192  # parameters of a layer, tokens per step
forward_ms = opening.compute_ms(2 * W * N / 8)


def scene(n_t):
    """One layer, while fsdp gathers the weights of the next one."""
    n_f = 8 // n_t
    gather = opening.network_ms(2 * W / n_t * (n_f - 1) / n_f)
    exchange = opening.network_ms(2 * N / n_f * opening.D * (n_t - 1) / n_t)  # of x
    start = 4 * exchange  # in the forward pass: two pairs of matmuls
    later = start + max(gather, forward_ms)  # when the backward pass begins
    network = [("", 0, start, "tensor"), ("W", start, gather)]
    network += [("", later, start, "tensor")]
    network += [("W", later + start, gather)]
    network += [("dW", later + start + gather, gather)]
    compute = [("forward", start, forward_ms)]
    compute += [("backward", later + start, 2 * forward_ms)]
    held = (4 * W / 8 + 2 * W / n_t) / 2**30  # a float32 shard, and a layer in bfloat16
    memory = {"weights": held, "gradients": held, "optimizer state": W / 2**30}
    title = f"fsdp={n_f},tensor={n_t}" if n_t > 1 else "fsdp=8"
    return opening.Scene(title, memory, compute, [bar for bar in network if bar[2]])


title = "With few tokens, a second axis halves the communication"

# %% tags=["hide-input"] mystnb={"image": {"alt": "With fsdp=8, each GPU needs 1.2 GiB for a layer and communicates for 2.5 ms, longer than it computes; with fsdp=4 and tensor=2, it needs 0.8 GiB and communicates for 1.2 ms."}}
opening.before_after(scene(1), scene(2), title, "fsdp")
right = plt.gcf().axes[3]
right.text(1.45, 1, "red: tensor, activations", size=8, va="center")

# %% [markdown]
# One layer of Llama 3 8B, 8,192 tokens, eight H100s. Times are arithmetic at peak speed. Blue is
# communication along `fsdp` (weights W, gradients dW), red along `tensor`. The next layer's W is gathered
# while a layer computes. With `tensor=2`, a device gathers only half of W. The memory includes the
# gathered W and the unsharded dW; chapter 03 draws only what is stored between steps.
#
# ## Three coordinates per device
#
# A *mesh* arranges the devices in a grid with one dimension per axis. In a 2 x 2 x 2 grid, each of the eight
# devices has three coordinates: one each for `stage` (pipeline), `fsdp` and `tensor`. A device communicates
# *along an axis* with the devices whose other two coordinates equal its own.

# %%
box = np.arange(8).reshape(2, 2, 2)  # device numbers, by [stage, fsdp, tensor]
for side, axis in enumerate(("stage", "fsdp", "tensor")):
    print(f"{axis:6}", np.moveaxis(box, side, -1).reshape(-1, 2).tolist())

# %% [markdown]
# Device 5 communicates with 4, 7 and 1, not with 0. A collective over `fsdp` and `tensor` together has a
# group of four: 4, 5, 6 and 7.
#
# ## Sharded or replicated
#
# If several axes shard a weight, the number of shards is the product of their sizes. Along an axis that does
# not shard it, the weight is *replicated*: devices along this axis store equal values.
#
# Take L = 4 layers, each an MLP with a norm in front. The model dim is D = 64, the hidden dim of the MLP is F
# = 256, and the norm has one scale (gain) per channel. Everything is float32. An array's name ends with its
# dims: `up_LDF` is [L, D, F]. A `PartitionSpec`, `P` in the code, names the mesh axis that shards each dim.
#
# > **Predict.** The four layers have 4 x (64 + 64 x 256 + 256 x 64) x 4 = 525,312 bytes of weights. How
# > many bytes does each device of `stage=2,fsdp=2,tensor=2` store, if the weights are sharded as in the
# > next cell?

# %%
import jax
from jax import P

my_prediction = None  # bytes
AXES = ("stage", "fsdp", "tensor")
layout_of = {
    "gain_LD": ((4, 64), P("stage")),  # of the norm
    "up_LDF": ((4, 64, 256), P("stage", "fsdp", "tensor")),
    "down_LFD": ((4, 256, 64), P("stage", "tensor", "fsdp")),
}
mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
shard_of = lambda shape, spec: jax.NamedSharding(mesh, spec).shard_shape(shape)
shards = {name: shard_of(*layout) for name, layout in layout_of.items()}
stored = sum(4 * int(np.prod(shape)) for shape in shards.values())
lesson.predicted("a device stores", my_prediction, stored, "bytes")
print(shards)

# %% tags=["remove-cell"]
assert stored == (2 * 4 * 64 * 256 // 8 + 4 * 64 // 2) * 4, "the sharding has changed"

# %% [markdown]
# The two matrices have eight shards each. The gain has two: only `stage` shards it, so it is replicated
# along `fsdp` and `tensor`.
#
# ### Activations, and gradients to sum
#
# The batch has B sequences of T positions. `fsdp` shards the sequences, and `tensor` the positions (the
# sequence parallelism of chapter 04). Along `stage`, the batch is replicated. A lower-case letter is the size
# of a shard: b = B/2, t = T/2.
#
# Along `fsdp` and `tensor`, the activations x_btD are sharded like the batch. Along `stage` they are neither
# sharded nor replicated: devices 0 and 4 hold different microbatches, after different layers. In JAX's term,
# x_btD *varies* along `stage`.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four grids with device numbers: up_LDF has one shard per device, four for each stage's layers; the batch has four shards on two devices each; the gain has two shards on four devices each."}}
title = "Which devices hold which shard, and which axis shards which dim"
_, panels = lesson.panels(title, 1, 4, figsize=(6.6, 2.3))
orange, blue = lesson.COLORS["stage"], lesson.COLORS["fsdp"]
drawn = (
    ("up, stage 0", "D: fsdp", "F: tensor", [["0", "1"], ["2", "3"]], orange),
    ("up, stage 1", "D: fsdp", "F: tensor", [["4", "5"], ["6", "7"]], orange),
    ("batch", "B: fsdp", "T: tensor", [["0,4", "1,5"], ["2,6", "3,7"]], blue),
    ("gain", "L: stage", "D", [["0,1,2,3"], ["4,5,6,7"]], orange),
)
for ax, (name, down, across, holders, colour) in zip(panels, drawn, strict=True):
    for i, row in enumerate(holders):
        for j, devices in enumerate(row):
            wide, look = 1 / len(row), dict(fc=colour, alpha=0.3 + 0.15 * (i + j), lw=1)
            lesson.box(ax, j * wide, i / 2, wide, 0.5, devices, 10, **look)
    ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], title=name, xlabel=across)
    ax.set_ylabel(down)

# %% [markdown]
# Which gradients must be summed over devices? For each weight, look at each axis:
#
# | along this axis, the weight is | and the layer's inputs are | so the weight's gradient |
# |---|---|---|
# | sharded, and used as a shard (`tensor`, `stage`) | anything | is complete: each device computes the whole gradient of its shard |
# | sharded, and gathered before use (`fsdp`) | different tokens | is summed by the reduce-scatter, which is the backward pass of the all-gather |
# | replicated | different tokens | must be summed along the axis |
# | replicated | the same tokens | is already complete if the output's gradient is; a sum over n devices would be n times too large |
#
# The gain is replicated along `fsdp`, where each device has different sequences, *and* along `tensor`, where
# each has different positions. So its gradient must be summed over both.
#
# ## The program by hand
#
# You can paste the next four code cells into an empty file. `layer` runs one layer on one device. Along
# `fsdp` it all-gathers the weights (03). Along `tensor` it all-gathers the positions, computes with its shard
# of F, and reduce-scatters the partial sums (04).

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import numpy as np
from jax import P, lax, numpy as jnp

AXES, Z, rng = ("stage", "fsdp", "tensor"), 4, np.random.default_rng(0)  # microbatches
L, D, F, B, T = 4, 8, 24, 16, 6  # layers, widths, sequences, positions
draw = lambda *shape: np.float32(rng.normal(size=shape))
w = dict(gain_LD=1 + draw(L, D) / 4, up_LDF=draw(L, D, F), down_LFD=draw(L, F, D) / 9)
specs = dict(gain_LD=P("stage"), up_LDF=P(*AXES), down_LFD=P("stage", "tensor", "fsdp"))
batch = draw(B, T, D), draw(B, T, D), np.float32(draw(B, T) < 0.5)  # 1: counted


# %% tags=["by-hand"]
norm = lambda gain, x: gain * x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(x_btD, w):
    up_Df = lax.all_gather(w["up_LDF"], "fsdp", axis=0, tiled=True)
    down_fD = lax.all_gather(w["down_LFD"], "fsdp", axis=1, tiled=True)
    h_bTD = lax.all_gather(norm(w["gain_LD"], x_btD), "tensor", axis=1, tiled=True)
    sum_bTD = jax.nn.gelu(h_bTD @ up_Df) @ down_fD  # partial sum: f is a shard
    y_btD = lax.psum_scatter(sum_bTD, "tensor", scatter_dimension=1, tiled=True)
    return x_btD + y_btD, None


# %% [markdown]
# The outer loop is GPipe (05): n stages process Z microbatches in Z + n - 1 time steps, called *ticks*. In
# each tick, a device runs the layers of its stage (the inner `scan`), and sends its shard of the result to
# its counterpart in the next stage (device 1 to device 5). A stage without a microbatch computes values that
# are never used.


# %% tags=["by-hand"]
def device(w, *batch):
    n, here = lax.axis_size("stage"), lax.axis_index("stage")
    x_ZbtD, target_ZbtD, counted_Zbt = (a.reshape(Z, -1, *a.shape[1:]) for a in batch)

    def tick(inbox_btD, i):  # i: number of the tick
        x_btD = jnp.where(here == 0, x_ZbtD[jnp.minimum(i, Z - 1)], inbox_btD)
        y_btD, _ = lax.scan(layer, x_btD, w)  # this stage's layers
        return lax.ppermute(y_btD, "stage", [(s, (s + 1) % n) for s in range(n)]), y_btD

    empty_btD = lax.pcast(jnp.zeros_like(x_ZbtD[0]), "stage", to="varying")
    _, y = lax.scan(tick, empty_btD, jnp.arange(Z + n - 1))
    squares_Zbt = jnp.sum((y[n - 1 :] - target_ZbtD) ** 2, -1)
    return jnp.sum(counted_Zbt * squares_Zbt * (here == n - 1)), jnp.sum(counted_Zbt)


# %% [markdown]
# The loss is the global sum of the squared errors divided by the global count of unmasked positions. The
# errors are summed over all three axes; stages before the last add 0. The count is summed over `fsdp` and
# `tensor` only, because both stages count the same tokens.


# %% tags=["by-hand"]
mean = lambda lost, count: lax.psum(lost, AXES) / lax.psum(count, ("fsdp", "tensor"))


def loss_on(*sizes, mean=mean):
    mesh = jax.make_mesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    one = lambda *args: mean(*device(*args))
    specs_in = specs, *[P("fsdp", "tensor")] * 3
    return jax.shard_map(one, mesh=mesh, in_specs=specs_in, out_specs=P())


def loss_alone(w, x, target, counted):
    for n in range(L):
        x += jax.nn.gelu(norm(w["gain_LD"][n], x) @ w["up_LDF"][n]) @ w["down_LFD"][n]
    return jnp.sum(counted * jnp.sum((x - target) ** 2, -1)) / jnp.sum(counted)


run = lambda loss: jax.jit(jax.value_and_grad(loss))(w, *batch)
(got, gots), (want, wants) = run(loss_on(2, 2, 2)), run(loss_alone)
off = {k: float(abs(gots[k] - wants[k]).max() / abs(wants[k]).max()) for k in w}
print(f"8 devices {got:.6f}, one device {want:.6f}; gradient errors", off)
assert abs(got - want) < 1e-5 * want and max(off.values()) < 1e-5, "unlike one device"

# %% [markdown]
# Each gradient matches to within a millionth of its largest entry. Yet no line sums the gain's gradient. With
# `check_vma` (the default), `shard_map` tracks along which axes each value can differ. The gain is the same
# along `fsdp` and `tensor`, but x_btD is not. So JAX casts the gain before it multiplies the two, and the
# backward pass of this cast is a sum over both axes (02). Megatron-LM has an explicit all-reduce
# ([#443](https://github.com/NVIDIA/Megatron-LM/issues/443)).
#
# ## How much each axis communicates
#
# Count the communication of one step, with L/n = 2 layers per stage and Z + n - 1 = 5 ticks.
#
# > **Predict.** How many times does a device send activations or their gradients along `stage` in one step?
#
# > **Predict.** Along `tensor`, each layer all-gathers positions and reduce-scatters partial sums, and the
# > backward pass does both again. Divide the bytes that a device sends along `tensor` by those along `stage`.
# > (A send along `stage` is one x_btD. To all-gather x_bTD, a device sends (n - 1)/n of it.)

# %%
my_prediction, my_ratio = None, None  # sends; bytes of tensor / bytes of stage
found = lesson.compiled(jax.value_and_grad(loss_on(2, 2, 2)), mesh, w, *batch)
sent = found.totals_by("axes")
lesson.predicted("along stage", my_prediction, sent["stage"].count, "sends")
ratio = sent["tensor"].wire_bytes / sent["stage"].wire_bytes
lesson.predicted("tensor sends", my_ratio, ratio, "times the bytes of stage")
for axes, one in sent.items():
    sends = f"{one.wire_bytes:5.0f} bytes sent per device"
    print(f"{axes:17} {one.count:3.0f} collectives, {sends}")

# %% tags=["remove-cell"]
assert (sent["stage"].count, ratio) == (2 * 5, 4), "sizes were changed"
assert sent["fsdp"].count == 4 + 4 * 5, "gathers before the loop, a scatter per tick"

# %% [markdown]
# Each collective along `tensor` sends half of x_bTD, which is one x_btD. So count copies of x_btD per tick:
#
# | axis | copies of x_btD |
# |---|---|
# | `tensor` | 2 layers x 4 collectives = 8 |
# | `stage` | one forward, one backward = 2 |
#
# **In general, the ratio is 2 (n - 1) times the number of matmul pairs in a stage**, with n devices along
# `tensor`. A transformer layer has two pairs: attention and the MLP. So with 16 layers per stage and n = 2,
# the ratio is 64.
#
# The other rows:
#
# | axes | collectives |
# |---|---|
# | `fsdp` | 4 all-gathers of 2 x 2 matrices, which JAX moves out of the loop; 4 reduce-scatters of their gradients x 5 ticks = 20 |
# | `fsdp*tensor` | the gain's gradient, 2 layers x 5 ticks = 10 sums of 48 bytes; the count, 6 bytes |
# | `stage*fsdp*tensor` | the loss |
#
# So this program is right but slow: it sums gradients in every tick. A device that adds up its gradients, and
# communicates after the loop, sends a fifth. 1F1B, below, does so for the gain. (For the matrices, this takes
# the memory of unsharded gradients.)
#
# ## Which axis crosses the slow network
#
# A *node* is a group of devices with fast links between them: eight H100s with NVLink, or on TPUs a *slice*.
# Take two nodes of four devices, with a slow network in between. The order of the axes determines which one
# crosses. The last axis has consecutive device numbers, so it stays inside.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two nodes of four devices, drawn twice: on the left the orange stage lines cross between the nodes, on the right the red tensor lines do."}}
figure, panels = plt.subplots(1, 2, figsize=(6, 3.3))
places = [(0, 0), (1, 0), (0, 1), (1, 1), (2.6, 0), (3.6, 0), (2.6, 1), (3.6, 1)]
circle = {"fc": "w", "ec": "k", "boxstyle": "circle"}
for ax, order in zip(panels, (AXES, AXES[::-1]), strict=True):
    for side, axis in enumerate(order):
        arrow = {"arrowstyle": "-", "color": lesson.COLORS[axis], "lw": 2.5}
        arrow["connectionstyle"] = "arc3,rad=-0.25" if side == 0 else "arc3"
        for a, b in np.moveaxis(box, side, -1).reshape(-1, 2):
            ax.annotate("", places[b], places[a], arrowprops=arrow, zorder=1)
    for number, (x, y) in enumerate(places):
        ax.text(x, y, number, ha="center", va="center", bbox=circle, color="k")
    ax.axvline(1.8, color=lesson.NEUTRAL, linestyle=":")
    ax.set(xlim=(-0.4, 4), ylim=(1.7, -0.7), yticks=[])
    ax.set_xticks([0.5, 3.1], ["node 0", "node 1"])
    ax.set_title(f"{order[0]} crosses nodes", color=lesson.COLORS[order[0]])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
line = lambda axis: plt.Line2D([], [], color=lesson.COLORS[axis], lw=2.5, label=axis)
labels = [line(axis) for axis in AXES]
legend = figure.legend(handles=labels, loc="outside lower center", ncols=3)

# %% [markdown]
# On the left the order is `stage, fsdp, tensor`, on the right the reverse. The results are equal, but
# on the right four times as many bytes cross. Take Llama 3 8B in bfloat16, with 16 layers per stage, 218
# million parameters per layer, n = 2 devices per axis, and 8,192 tokens per microbatch:

# %% tags=["hide-input"]
D_8B, tokens, layers_of_stage = 4096, 8192, 16
bTD = 2 * tokens * D_8B  # bytes, gathered over tensor
for key in ("v5p", "h100"):
    chip = hardware.CHIPS[key]
    flops = 6 * layers_of_stage * 218e6 * tokens / 2  # tensor=2: half of each matmul
    compute = flops / chip.peak_flops_per_s * 1e3
    print(f"{chip.name}: compute {compute:.0f} ms per microbatch")
    speeds = {"inside": chip.link_bytes_per_s, "between": chip.dcn_bytes_per_s}
    for wire, speed in speeds.items():
        # attention and MLP: two matmul pairs, 8 collectives per layer
        ms = {"tensor": 8 * layers_of_stage * bTD / 2, "stage": 2 * bTD / 2}
        ms = {axis: f"{size / speed * 1e3:.1f} ms" for axis, size in ms.items()}
        print(f"  {wire:7} ({speed / 1e9:.4g} GB/s)", ms)

# %% [markdown]
# Inside a slice or node, `tensor` communicates for less time than the matmuls take. Between v5p slices it
# takes nearly four times as long as the matmuls, and between H100 nodes about as long. `stage` can cross the
# slow network: it needs 11 ms on v5p and 1 ms on H100. Hence the order of axes in this project, from the
# slowest network to the fastest: `data, stage, fsdp, expert, context, tensor`.
#
# ## Two axes on one dim: `context` x `tensor`
#
# Both shard positions. The `PartitionSpec` names both axes for one dim: the first axis splits the dim into
# large chunks, and the second splits each chunk. Along which axis must you gather first? Try both orders on
# eight positions:

# %%
auto = jax.sharding.AxisType.Auto
four = jax.make_mesh((2, 2), ("context", "tensor"), axis_types=(auto, auto))


def gather_in_order(first, second):
    def one(x_t):
        x_s = lax.all_gather(x_t, first, tiled=True)
        return lax.all_gather(x_s, second, tiled=True)[None]

    spec = P(("context", "tensor"))
    return jax.shard_map(one, mesh=four, in_specs=spec, out_specs=spec)(np.arange(8))[0]


print("tensor, then context:", gather_in_order("tensor", "context"))
print("context, then tensor:", gather_in_order("context", "tensor"))

# %% [markdown]
# **Gather first along the axis that splits last**, here `tensor`. In the other order, the shape is right, but
# the positions are scrambled. In attention, gathering along `tensor` first also saves bytes: each device
# then computes the keys of only its own heads, and gathers only those along `context`.
#
# ## Hybrid sharding (HSDP): `data` x `fsdp`
#
# If `fsdp` spans two slices or two nodes, the weights of every layer cross the slow network. HSDP (hybrid
# sharded data parallelism) shards the weights inside a slice and replicates them between slices, for example
# with `data=2,fsdp=4`. Then only the gradients have to cross, once per step. Test whether the compiled
# program does this, with one weight, Z = 4 microbatches, and a cast:


# %%
def hsdp(early):
    both = ("data", "fsdp")
    mesh = jax.make_mesh((2, 4), both, axis_types=(auto, auto))

    def device(w_dF, x_ZbD):
        if early:  # the backward pass of this cast is a sum over data
            w_dF = lax.pcast(w_dF, "data", to="varying")

        def micro(total, x_bD):
            w_DF = lax.all_gather(w_dF, "fsdp", axis=0, tiled=True)
            return total + jnp.sum(jnp.tanh(x_bD @ w_DF) ** 2), None

        zero = lax.pcast(jnp.float32(0), both, to="varying")
        return lax.psum(lax.scan(micro, zero, x_ZbD)[0], both)

    specs = P("fsdp"), P(None, both)
    loss = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P())
    args = np.ones((16, 24), np.float32), np.ones((Z, 8, 16), np.float32)
    found = lesson.compiled(jax.value_and_grad(loss), mesh, *args)
    return found.totals_by("axes")["data"]


# %% [markdown]
# > **Predict.** Both versions give the same gradient. With `early` off, JAX itself casts w along `data` at
# > the matmul, inside the loop and after the all-gather. How many times as many bytes cross between the
# > replicas as with `early` on? (The backward pass runs in reverse order.)

# %%
my_prediction = None  # times
late, early = hsdp(False), hsdp(True)
times = late.wire_bytes / early.wire_bytes
lesson.predicted("late over early", my_prediction, times, "times the bytes")
for name, one in {"late": late, "early": early}.items():
    print(f"{name:5} {one.count:.0f} sums, {one.wire_bytes:5,.0f} bytes per device")

# %% tags=["remove-cell"]
assert late.wire_bytes == Z * 4 * early.wire_bytes, "the ratio should be Z x fsdp"

# %% [markdown]
# Sixteen times as many. One factor is Z = 4, because the sum is inside the loop. The other is `fsdp` = 4,
# because unsharded gradients are all-reduced first and reduce-scattered afterwards. **Reduce-scatter over the
# fast axis first, then all-reduce the shards over the slow one, once per step.** PyTorch has the same
# pitfall: unless you call `set_requires_all_reduce(False)`, HSDP all-reduces between replicas in every
# microbatch.
#
# ### What HSDP saves
#
# On two slices of 8 chips, a device with its share of the 8.03 billion parameters of Llama 3 8B sends over
# the slow network:
#
# | mesh | what | bytes | per |
# |---|---|---|---|
# | `data=2,fsdp=8` | gradients in float32 | 4 x 8.03e9/8 = 4.0 GB | step |
# | `fsdp=16` | half of the weights in bfloat16, forward and backward, and half of the gradients | (2 + 2 + 4)/2 x 8.03e9/8 = 4.0 GB | microbatch |
# | `stage=2,fsdp=8` | activations of 8,192 tokens, and their gradients | 2 x 2 x 8,192 x 4,096 = 0.13 GB | microbatch |
# | | gradients in float32 of the two tables (embeddings and logits), which both stages store | 2 x 4 x 128,256 x 4,096/8 = 0.53 GB | step |
#
# 4.0 GB take 0.08 s on H100s (50 GB/s each), and 0.64 s between v5p slices (6.25 GB/s per chip). (Chapter 03
# counts 2 + 2 + 2 bytes, because it sends gradients in bfloat16.) So for one microbatch, HSDP sends no fewer
# bytes.
#
# The planner of chapter 09 predicts a step on two v5p slices of 8 chips. The first two batches force one
# sequence per device and microbatch, `full`, and weights gathered in every microbatch. In the third, the
# planner chooses.
#
# | in the output | is |
# |---|---|
# | `across` | the axis that spans both slices |
# | Z | microbatches per step |
# | `full`, `dots` | what the backward pass recomputes: the whole layer, or all but the matmuls with weights (their saved outputs take memory) |
# | stalls | exposed time of the communication between slices, and the bubble of 1F1B: the time in which stages wait (05) |

# %% tags=["hide-input"]
ACROSS = "data=2,fsdp=8", "fsdp=16,across=fsdp", "stage=2,fsdp=8,across=stage"
took = {}
FORCED = {"work.device_batch": 1, "work.gather": "layer", "work.remat": "full"}
for sequences, forced in (16, FORCED), (64, FORCED), (64, {}):
    print(sequences, "sequences,", "forced:" if forced else "as the planner chooses:")
    for mesh in ACROSS:
        settings = {"data.batch_size": sequences, "data.seq_len": 8192, **forced}
        settings |= {"mesh": mesh, "work.schedule": "1f1b"}
        one = planner.plan(config.preset("llama3_8b", **settings), "2*v5p:2x2x2")
        stalls = {k: s for k, s in one.simulated.items() if "between" in k}
        stalls |= {"bubble": one.simulated.get("bubble", 0)}
        stalls = {k.removesuffix(" between slices"): s for k, s in stalls.items() if s}
        stalls = ", ".join(f"{name} {s:.2f} s" for name, s in stalls.items())
        Z_plan = sequences // (one.cfg.mesh.batch_shards * one.device_batch)
        how = f"Z={Z_plan}, {one.cfg.work.remat}: {one.step_s:.2f} s"
        print(f"  {mesh:27} {how}, {one.peak_bytes / 2**30:.0f} GiB; stalls: {stalls}")
        took.setdefault((sequences, bool(forced)), []).append((one.step_s, Z_plan))

# %% tags=["remove-cell"]
for case, Z_data in (((16, True), 1), ((64, False), 2)):
    data, fsdp, stage = took[case]
    assert fsdp < data < stage, "fsdp is fastest for Z = 1"
    assert (fsdp[1], data[1]) == (1, Z_data)
data, fsdp, stage = took[64, True]
assert data < fsdp < stage and fsdp[1] == data[1] == 4, "a plan has changed"

# %% [markdown]
# With Z=1, `fsdp` is fastest, because its communication partly overlaps with matmuls. With Z=4, HSDP is
# fastest: **HSDP sends once per step, whatever the number of microbatches.** Here one microbatch of four
# sequences fits: the planner chooses Z=1 with `fsdp`, and Z=2 and `dots` with HSDP, which then sends no more.
# But the shards of HSDP are twice as large. For `stage`, it keeps Z=8 and changes only `full` to `dots`.
#
# ## Valid but slow
#
# HSDP is about weights. With long sequences, keys and values (06) may cross the slow network, too. Take Llama
# 3 8B on 16 devices, with 8 sequences of 32,768 tokens per step, so `fsdp=16` is invalid. The planner prints
# *lower bounds* (matmuls at peak speed, communication at full bandwidth) for four valid meshes on three
# machines: a v5p slice of 16 chips, two H100 nodes with a 400 Gbit/s network card per GPU, and the same nodes
# with one 100 Gbit/s card per node:

# %% tags=["hide-input"]
slow_chip = dataclasses.replace(hardware.CHIPS["h100"], dcn_bytes_per_s=12.5e9 / 8)
SLOW = hardware.Topology(slow_chip, (16,), 16, hosts=2)
LONG = {"data.batch_size": 8, "data.seq_len": 32768}


def planned(mesh, on=SLOW):
    return planner.plan(config.preset("llama3_8b", **LONG | {"mesh": mesh}), on)


# %%
MACHINES = {"v5p slice": "v5p:2x2x4", "H100 nodes": "h100:16", "slow network": SLOW}
table = {}
print(" " * 17, *(f"{name:>12}" for name in MACHINES))
for split in ("fsdp=8,tensor=2", "fsdp=2,context=8", "data=2,context=8", "context=16"):
    plans = [planned(split, on) for on in MACHINES.values()]
    table[split] = [one.lower_bound_s for one in plans]
    print(f"{split:17}", *(f"{seconds:10.2f} s" for seconds in table[split]))
columns = zip(MACHINES, np.array([*table.values()]).T, strict=True)
spread = {name: s.max() / s.min() for name, s in columns}
print("slowest / fastest:", {name: f"{x:.1f}" for name, x in spread.items()})
assert spread["slow network"] > 2.9 and spread["v5p slice"] < 1.2, "a plan has changed"

# %% [markdown]
# On the v5p slice, where all links are equal, the slowest mesh takes a sixth longer than the fastest; on the
# slow network, three times as long, because every layer's keys and values cross it.
#
# ## Rounding or bug?
#
# Floating-point sums depend on their order, which differs between eight devices and one. How far apart can
# two correct results be? Compare with a wrong loss that `shard_map` accepts: along `tensor`, `mean_of_means`
# divides by each device's own count, and then averages the quotients.


# %%
def mean_of_means(lost, count):
    return lax.psum(lost / lax.psum(count, "fsdp"), AXES) / lax.axis_size("tensor")


gradient_alone = jax.jit(jax.grad(loss_alone))


def worst(sizes, mean, dtype=np.float32, counted=batch[2]):
    """The weight with the largest gradient error, relative to its largest entry."""
    with jax.enable_x64(dtype == np.float64):
        args = jax.tree.map(lambda a: a.astype(dtype), (w, *batch[:2], counted))
        got = jax.jit(jax.grad(loss_on(*sizes, mean=mean)))(*args)
        want = gradient_alone(*args)
        off = {k: float(abs(got[k] - want[k]).max() / abs(want[k]).max()) for k in w}
    return "{1:8} {0:.0e}".format(*max((off[k], k) for k in w))


for name, one in {"right": mean, "mean of means": mean_of_means}.items():
    for dtype in (np.float32, np.float64):
        print(f"{name:14} {dtype.__name__}", worst((2, 2, 2), one, dtype))
every = np.ones((B, T))
print("no target masked:     ", worst((2, 2, 2), mean_of_means, counted=every))

# %% [markdown]
# Rounding errors are a few times the last bit (6e-8 in float32), and nearly vanish in float64. A bug's error
# is as large in float64 as in float32. So **compare in float32 with a tolerance of about 1e-5, and if in
# doubt, in float64.** And mask some targets: without a mask, this bug is invisible.
#
# ## Parity as a debugging tool
#
# Which axis causes the difference? Set some axes to 1 and compare again. The program runs on every mesh,
# because a collective over one device does nothing.

# %%
for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)):
    print(dict(zip(AXES, sizes, strict=True)), worst(sizes, mean_of_means))

# %% [markdown]
# The gradient is wrong on every mesh with `tensor=2`, and on no other. If only a pair of axes gives wrong
# gradients, the bug is in their combination. `tests.parity` compares the project's model on any mesh, here
# all six axes on 64 simulated devices. (Quoted: it takes a minute. The last column is the tolerance.)
#
# ```
# $ python -m tests.parity tiny --mesh data=2,stage=2,fsdp=2,expert=2,context=2,tensor=2 \
#     --data.batch_size 16 --data.seq_len 16 --model.d_query_latent 16 --model.d_kv_latent 16
# ...
# loss 6.1560721, on one device 6.1560721
# ...
# gradient  ...                                                       9.2e-07    1e-04
# ...
# The mesh matches a single-device run.
# ```
#
# ## 1F1B with two more axes
#
# GPipe can leave the whole backward pass to JAX, but 1F1B (05) calls `jax.vjp` for each microbatch. The
# reduce-scatters along `fsdp` still complete the matrices' gradients, but the gain needs two lines. Before
# the loop, a cast keeps each microbatch's gradient a local sum. After the loop, one sum over `fsdp` and
# `tensor` completes it. What if a line is missing?

# %%
BOTH = "fsdp", "tensor"
cast = lambda gain: lax.pcast(gain, BOTH, to="varying")  # before the loop
total = lambda d_gain: lax.psum(d_gain, BOTH)  # after the loop

# %% tags=["hide-input"]
stage = lambda w, x_btD: lax.scan(layer, x_btD, w)[0]
error = lambda y, target, counted: jnp.sum(counted * jnp.sum((y - target) ** 2, -1))
empty = lambda shape: lax.pcast(jnp.zeros(shape), AXES, to="varying")
add = lambda on, a, b: jax.tree.map(lambda a, b: a + jnp.where(on, b, 0), a, b)


def send(x, step):
    n = lax.axis_size("stage")
    return lax.ppermute(x, "stage", [(s, (s + step) % n) for s in range(n)])


def empty_carry(w, slots, x_btD):
    kept = empty((slots, *x_btD.shape))
    return kept[0], kept[0], kept, empty(()), jax.tree.map(jnp.zeros_like, w)


# %% tags=["hide-input"]
def one_f_one_b(w, *batch, before=cast, after=total):
    here, last = lax.axis_index("stage"), lax.axis_size("stage") - 1
    x_ZbtD, target_ZbtD, counted_Zbt = (a.reshape(Z, -1, *a.shape[1:]) for a in batch)
    slots, count = 2 * last + 1, lax.psum(counted_Zbt.sum(), BOTH)
    w = w | {"gain_LD": before(w["gain_LD"])}

    def tick(carry, i):
        inbox_btD, back_btD, kept, lost, dw = carry
        m_f, m_b = i - here, i - 2 * last + here  # microbatches of F and B
        m, has_b = jnp.clip(m_b, 0, Z - 1), (m_b >= 0) & (m_b < Z)
        x_btD = jnp.where(here == 0, x_ZbtD[jnp.clip(m_f, 0, Z - 1)], inbox_btD)
        kept = kept.at[m_f % slots].set(x_btD)
        y_btD, backward = jax.vjp(stage, w, kept[m_b % slots])
        value, dy_btD = jax.value_and_grad(error)(y_btD, target_ZbtD[m], counted_Zbt[m])
        dw_m, dx_btD = backward(jnp.where(here == last, dy_btD / count, back_btD))
        dw, lost = add(has_b, dw, dw_m), add(has_b & (here == last), lost, value)
        return (send(stage(w, x_btD), 1), send(dx_btD, -1), kept, lost, dw), None

    ticks, carry = jnp.arange(Z + 2 * last), empty_carry(w, slots, x_ZbtD[0])
    *_, lost, dw = lax.scan(tick, carry, ticks)[0]
    dw["gain_LD"] = after(dw["gain_LD"])
    return lax.psum(lost, AXES) / count, dw


# %% tags=["hide-input"]
def outcome(sizes=(2, 2, 2), **lines):
    """Run 1F1B, and say how the gain's gradient differs from one device's."""
    grid = jax.make_mesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs_of = {"in_specs": (specs, *[P(BOTH)] * 3), "out_specs": (P(), specs)}
    step = jax.shard_map(partial(one_f_one_b, **lines), mesh=grid, **specs_of)
    try:
        program = jax.jit(step).lower(w, *batch).compile()
    except (TypeError, ValueError) as error:
        told = str(error).partition("This might")[0].splitlines()
        told = [line for line in told if "carry" in line or "'gain" in line]
        return textwrap.fill(" ".join([f"{type(error).__name__}:", *told]), 88)
    loss, grads = program(w, *batch)
    gain, gain_alone = grads.pop("gain_LD"), wants["gain_LD"]
    matrices = {name: wants[name] for name in grads}
    assert lesson.same((loss, grads), (want, matrices), 1e-5), "unlike one device"
    found = lesson.ledger.read(program.as_text(), grid).collectives
    sums = (one.count for one in found if one.axes == BOTH and one.payload_bytes > 4)
    return f"{lesson.ratio(gain, gain_alone)}, sums: {sum(sums)}"


# %% tags=["hide-input"]
nothing = lambda x: x
ROWS = (cast, total), (nothing, nothing), (nothing, total), (cast, nothing)
outcomes = [outcome(before=before, after=after) for before, after in ROWS]
for row, said in zip(ROWS, outcomes, strict=True):
    is_there = [f"{line is not nothing!s:5}" for line in row]
    print("cast", is_there[0], "sum", is_there[1], said)

# %% tags=["remove-cell"]
assert outcomes[:2] == ["equal, sums: 1", "equal, sums: 12"]
assert outcomes[2] == "4 times too big, sums: 13" and "ValueError" in outcomes[3]
assert outcome((4, 2, 1)).startswith("equal")

# %% [markdown]
# In the three rows that run, the loss and the matrices' gradients are right. But with only the sum, the
# gain's gradient is **silently wrong**: the sum adds 2 x 2 equal, complete gradients. With neither line, the
# program is right but slow, like GPipe above: JAX sums in each `jax.vjp`, 2 layers x 6 ticks. With only the
# cast, JAX refuses, because the gradient differs between devices, and the gain's spec says that it is equal.
#
# ## Exercise 1: choose the sharding
#
# Shard a layer with attention and experts over `stage`, `fsdp`, `expert` and `tensor`. It has H heads of dim
# K, and E experts of width M. Devices along `expert` store different experts, and have different sequences,
# as devices along `fsdp` have. Which axis shards each dim of each weight? Write a name, a tuple of names, or
# None.


# %%
def layout():
    gain_LD = "stage", None
    query_LDHK = ...  # four entries, one per letter
    out_LHKD = ...
    up_LEDM = ...
    down_LEMD = ...
    return dict(locals())


# %% tags=["hide-input"]
DENSE = ("fsdp", "expert")
RIGHT = {
    "gain_LD": ("stage", None),
    "query_LDHK": ("stage", DENSE, "tensor", None),
    "out_LHKD": ("stage", "tensor", None, DENSE),
    "up_LEDM": ("stage", "expert", "fsdp", "tensor"),
    "down_LEMD": ("stage", "expert", "tensor", "fsdp"),
}


def twice(up):
    """A wrong sharding of both expert matrices; the second mirrors the first."""
    stage, expert, D_axis, M_axis = up
    return {"up_LEDM": up, "down_LEMD": (stage, expert, M_axis, D_axis)}


def heads(D_axis, H_axis, K_axis):
    out = "stage", H_axis, K_axis, D_axis
    return {"query_LDHK": ("stage", D_axis, H_axis, K_axis), "out_LHKD": out}


# %% tags=["hide-input"]
MIXED_UP = {
    "Dense weights can be sharded over expert, too.": heads("fsdp", "tensor", None),
    "An axis cannot shard two dims.": twice(("stage", "expert", DENSE, "tensor")),
    "Which dim do up and down sum over?": twice(("stage", "expert", "tensor", "fsdp")),
    "Every device would store all experts.": twice(("stage", None, "fsdp", "tensor")),
    "You split each head. How would softmax work?": heads(DENSE, None, "tensor"),
    "Valid, but every norm would gather its gain.": {"gain_LD": ("stage", "fsdp")},
    "Shard the layers, too.": {name: (None, *RIGHT[name][1:]) for name in [*RIGHT][1:]},
}


def plain(specs):
    """Specs as text, however they were written."""
    names = lambda axes: (axes,) if isinstance(axes, str) else axes or "-"
    text = lambda axes: "*".join(sorted(names(axes)))
    return {name: " ".join(map(text, specs[name])) for name in RIGHT}


# %% tags=["hide-input"]
@lesson.verdict
def check_layout(said):
    missing = lambda name: said.get(name) is None or said[name] is ...
    if not isinstance(said, dict) or any(map(missing, RIGHT)):
        return lesson.NOTHING
    for name, spec in RIGHT.items():
        entries = said[name] if isinstance(said[name], tuple | list | P) else ()
        if len(entries) != len(spec):
            return f"{name} needs one entry per letter, as in gain_LD."
    found, right = plain(said), plain(RIGHT)
    hints = [hint for hint, wrong in MIXED_UP.items() if found == plain(RIGHT | wrong)]
    wrong = [name for name in RIGHT if found[name] != right[name]]
    return [*hints, *(f"Not yet: look at {name} again." for name in wrong), "Right."][0]


print(check_layout(layout))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `query_LDHK: ("stage", ("fsdp", "expert"), "tensor", None)`, `out_LHKD: ("stage", "tensor", None, ("fsdp",
# "expert"))`, `up_LEDM: ("stage", "expert", "fsdp", "tensor")`, `down_LEMD: ("stage", "expert", "tensor",
# "fsdp")`. In each pair of matmuls, `tensor` shards the inner dim (H in attention, M in an expert), which the
# second matmul sums over. `expert` shards E if the weight has that dim. Otherwise it shards D together with
# `fsdp`: along both axes, devices have different sequences.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_layout, (layout, lesson.NOTHING), (lambda: RIGHT, "Right."),
              (RIGHT | {"gain_LD": P("stage", None)}, "Right."),
              (RIGHT | {"out_LHKD": ("stage", "tensor", None, ("expert", "fsdp"))},
               "Right."),
              *[(RIGHT | wrong, hint) for hint, wrong in MIXED_UP.items()],
              (RIGHT | {"up_LEDM": ("expert", "stage", None, None)}, "up_LEDM again"),
              (RIGHT | {"up_LEDM": ("expert",)}, "one entry"),
              (RIGHT | {"up_LEDM": 7}, "one entry"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: find the group
#
# Device numbers increase along the last axis first, as in the grid at the top. Return the group of `device`,
# itself included, in a collective over `axes`. `sizes` lists the axes in order, such as `{"stage": 2, "fsdp":
# 2, "tensor": 2}`.


# %%
def group(sizes, axes, device):
    return ...  # numbers in order: group(sizes, ("tensor",), 5) is [4, 5]


# %% tags=["hide-input"]
def lines(sizes, axes, device, keep=False, turned=False):
    """The group of a device along some axes.

    keep: devices with the same coordinates along them; turned: first axis is nearest
    """
    shape = tuple(sizes.values())
    box = np.arange(np.prod(shape)).reshape(shape, order="F" if turned else "C")
    here = zip(sizes, np.argwhere(box == device)[0], strict=True)
    fixed = [place if (axis in axes) == keep else slice(None) for axis, place in here]
    return sorted(np.ravel(box[tuple(fixed)]).tolist())


def block(sizes, axes, device):
    n = int(np.prod([sizes[axis] for axis in axes]))
    return list(range(device // n * n, device // n * n + n))


others = lambda *case: [number for number in lines(*case) if number != case[2]]
GROUP_HINTS = [
    (block, "Only along the last axis are device numbers consecutive."),
    (partial(lines, keep=True), "These have the same coordinates along the axes."),
    (partial(lines, turned=True), "You number devices along the first axis first."),
    (others, "The device itself is missing."),
]
cube, long = dict.fromkeys(AXES, 2), {"data": 2, "fsdp": 4, "tensor": 3}

# %% tags=["hide-input"]
cases = [(cube, (axis,), 5) for axis in AXES] + [(cube, ("fsdp", "tensor"), 5)]
cases += [(long, ("fsdp",), 14), (long, ("data", "tensor"), 14)]
as_tuple = lambda x: tuple(np.asarray(x).tolist()) if np.ndim(x) == 1 else x
listed = lambda f: lambda *case: as_tuple(f(*case))
check_group = lesson.checker(cases, listed(lines), GROUP_HINTS, "Right.", run=listed)


print(check_group(group))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```
# box = np.arange(np.prod(list(sizes.values()))).reshape(*sizes.values())
# here = np.argwhere(box == device)[0]
# free = [slice(None) if axis in axes else i for axis, i in zip(sizes, here)]
# return sorted(box[tuple(free)].ravel().tolist())
# ```
#
# Along an axis, neighboring device numbers differ by the product of the sizes of all later axes.
# </details>

# %% tags=["remove-cell"]
lesson.expect(
    check_group,
    *GROUP_HINTS,
    (lines, "Right."),
    (group, lesson.NOTHING),
    (lambda *a: [7], "Not yet"),
)

# %% [markdown]
# ## Exercise 3: a better mesh
#
# On the slow network above, a colleague chose `context=16` for the 8 sequences of 32,768 tokens, "because
# they are long". Its lower bound is 11.7 s. Find a mesh of at most 3.1 s. Which axis sends the least between
# nodes, and which axes do you then use inside a node?


# %%
def better():
    return ...  # such as "context=16"


# %% tags=["hide-input"]
SLOWER = {
    "data": "The gradients of all weights take {:.1f} s. Does another axis send less?",
    "fsdp": "Gathering the weights takes {:.1f} s. Do they have to cross the network?",
    "context": "Keys and values take {:.1f} s. Which axis sends once per stage?",
    "fsdp*context": "Weights are sharded over fsdp and context: gathers take {:.1f} s.",
    "tensor": "Four collectives per layer take {:.1f} s. Is that axis too large?",
    "stage": "Sends between stages take {:.1f} s. How few stages are enough?",
    "bubble": "The bubble takes {:.1f} s. What leaves a stage more microbatches?",
}


def why_slow(one):
    seconds = {axis: s for axis, s in one.lower_bound().items() if axis in SLOWER}
    if one.cfg.mesh.stage == 2:  # there cannot be fewer than two
        seconds.pop("stage", 0)
    most = max(seconds, key=seconds.get)
    return SLOWER[most].format(seconds[most])


# %% tags=["hide-input"]
@lesson.verdict
def check_better(split):
    if not isinstance(split, str):
        return 'Write the mesh as a string, such as "context=16".'
    one = planned(split)
    said = f"{one.lower_bound_s:.2f} s, {one.peak_bytes / 2**30:.0f} GiB. "
    if not one.fits:
        return said + "Too large for an H100. Which axes shard the weights?"
    return said + ("That will do." if one.lower_bound_s <= 3.1 else why_slow(one))


print(check_better(better))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The lower bound of `stage=2,context=4,tensor=2` is 2.72 s, and of `stage=2,context=8` 3.04 s. Only x_btD
# crosses the network, once, between the two stages. `context` and `tensor` shard each *sequence*, so there
# are still 8 microbatches, and the bubble is small. `stage=2,fsdp=8` sends as little over the slow network,
# but each device along `fsdp` has one sequence, so Z = 1 and the bubble is half of the time.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_better, ("stage=2,context=4,tensor=2",
                             "2.72 s, 49 GiB. That will do."),
              (lambda: "stage=2,context=8", "3.04 s, 36 GiB. That will do."),
              ("context=16", "once per stage"),
              ("context=16", "11.73"), ("data=2,context=8", "Does another"),
              ("fsdp=8,tensor=2", "have to cross"),
              ("fsdp=2,context=8", "over fsdp and context"),
              ("stage=2,fsdp=8", "bubble takes"),
              ("stage=4,fsdp=2,tensor=2", "How few stages"),
              ("data=8,context=2", "Too large"),
              ("fsdp=16", "rejects"), ("stages=2", "rejects"), (lambda: 16, "a string"),
              (better, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# A colleague trains the four layers on `data=2,context=2,tensor=2`. `context` shards positions, as `tensor`
# does. The layers have no attention, so none communicates over `context`. As in PyTorch, each device has its
# own arrays (dim 0 of each weight is the number of the device), and the program sums gradients itself, once
# per step.


# %%
GRID = "data", "context", "tensor"  # from the slowest network to the fastest
SPLIT = {"gain_LD": P()}
SPLIT |= {"up_LDF": P(None, None, "tensor"), "down_LFD": P(None, "tensor")}
rng = np.random.default_rng(0)
examples = draw(4, 8, D), draw(4, 8, D), np.float32(draw(4, 8) < 0.5)
start = w | {"up_LDF": 0.35 * w["up_LDF"]}


def scattered(w, sizes):
    """What each device stores: a row per device, in the order of the mesh."""
    places, tensor = sizes[0] * sizes[1], sizes[2]
    cut = lambda name: SPLIT[name].index("tensor") if "tensor" in SPLIT[name] else None
    parts = {name: [a] * tensor if cut(name) is None else np.split(a, tensor, cut(name))
             for name, a in w.items()}  # fmt: skip
    return {name: np.stack(shards * places) for name, shards in parts.items()}


# %%
def forward(w, x_btD):
    def block(x_btD, w):
        h_bTD = lax.all_gather(norm(w["gain_LD"], x_btD), "tensor", axis=1, tiled=True)
        sum_bTD = jax.nn.gelu(h_bTD @ w["up_LDF"]) @ w["down_LFD"]
        y_btD = lax.psum_scatter(sum_bTD, "tensor", scatter_dimension=1, tiled=True)
        return x_btD + y_btD, None

    return lax.scan(block, x_btD, w)[0]


def local_loss(w, count, x_btD, target_btD, counted_bt):
    """This device's share of the mean squared error; count: targets on all devices."""
    squares_bt = jnp.sum((forward(w, x_btD) - target_btD) ** 2, -1)
    return jnp.sum(counted_bt * squares_bt) / count


# %%
def all_reduce(grad, axes):
    """Sum over axes, listed from slow to fast: inside a node, then between nodes."""
    used = [axis for axis in axes if lax.axis_size(axis) > 1]
    if used:
        grad = lax.psum(grad, used.pop())
    return lax.psum(grad, used[0]) if used else grad


def summed(grads, reduce):
    """Sum each gradient over the axes along which its weight is replicated."""
    same_on = lambda name: [axis for axis in GRID if axis not in SPLIT[name]]
    return {name: reduce(grad, same_on(name)) for name, grad in grads.items()}


# %%
def train(sizes, w, reduce=all_reduce, steps=20):
    """Return the weights of every device, one row each, and the losses."""

    def update(w, batch):
        count = lax.psum(jnp.sum(batch[2]), GRID)
        loss, grads = jax.value_and_grad(local_loss)(w, count, *batch)
        w = jax.tree.map(lambda a, g: a - 0.02 * g, w, summed(grads, reduce))
        return w, lax.psum(loss, GRID)

    def run(w, *batch):
        mine = jax.tree.map(lambda rows: rows[0], w)
        mine, losses = lax.scan(lambda w, _: update(w, batch), mine, None, steps)
        return jax.tree.map(lambda a: a[None], mine), losses

    mesh = jax.make_mesh(sizes, GRID, axis_types=(auto,) * 3)
    ins = P(GRID), *[P("data", GRID[1:])] * 3
    specs = {"in_specs": ins, "out_specs": (P(GRID), P())}
    return jax.jit(jax.shard_map(run, mesh=mesh, **specs))(w, *examples)


# %% [markdown]
# The loss falls smoothly, and the first one matches one device. But when the run resumes from a checkpoint,
# its loss is higher. Fix the program.

# %%
alone = np.asarray(train((1, 1, 1), scattered(start, (1, 1, 1)))[1])
trained, curve = train((2, 2, 2), scattered(start, (2, 2, 2)))
print(f"one device: first loss {alone[0]:.3f}, last {alone[-1]:.3f}")
print(f"8 devices:  first loss {curve[0]:.3f}, last {curve[-1]:.3f}")
rows = jax.tree.map(np.asarray, trained)
saved = {"gain_LD": rows["gain_LD"][0], "up_LDF": np.concatenate(rows["up_LDF"][:2], 2),
         "down_LFD": np.concatenate(rows["down_LFD"][:2], 1)}  # fmt: skip
saved = scattered(saved, (2, 2, 2))  # the checkpoint has one copy of each shard
on, resumed = train((2, 2, 2), trained)[1], train((2, 2, 2), saved)[1]
print(f"step 21: {on[0]:.3f} if the run continues, {resumed[0]:.3f} if it resumes")


# %% tags=["hide-input"]
def over(pick, reduce=lax.psum):
    """A wrong fix: reduce over some of the axes."""

    def fix(grad, axes):
        chosen = tuple(pick(list(axes)))
        return reduce(grad, chosen) if chosen else grad

    return fix


WRONG_SUMS = (
    (all_reduce, "Unchanged. Compare the gains of devices 0 and 2 after one step."),
    (over(lambda _: GRID), "Now you also add different shards of the matrices."),
    (over(list, lax.pmean), "Too small: count already covers the whole mesh."),
    (over(lambda axes: axes[-2:]), "Another axis is missing now. Which, on (2, 2, 2)?"),
    (over(lambda axes: axes[:2]), "Another axis is missing. How many can there be?"),
    (over(lambda axes: axes[-1:]), "Now only one axis is left. Sum over every one."),
    (over(lambda axes: []), "Nothing is summed now: each device trains alone."),
)
GRADS = jax.tree.map(np.asarray, jax.jit(jax.grad(loss_alone))(start, *examples))


# %% tags=["hide-input"]
@cache
def local_gradients(*sizes):
    """The gradients of every device before they are summed, one row per device."""
    mesh = jax.make_mesh(sizes, GRID, axis_types=(auto,) * 3)

    def one(w, *batch):
        count = lax.psum(jnp.sum(batch[2]), GRID)
        mine = jax.tree.map(lambda rows: rows[0], w)
        return jax.grad(local_loss)(mine, count, *batch)

    run = lesson.on_each(one, mesh, (P(GRID), *[P("data", GRID[1:])] * 3))
    return mesh, jax.tree.map(np.asarray, run(scattered(start, sizes), *examples))


# %% tags=["hide-input", "hide-output"]
@cache  # compile once per mesh
def after_sums(reduce, *sizes):
    """The gradients of every device after they are summed, one row per device."""
    mesh, grads = local_gradients(*sizes)
    one = lambda g: summed({name: grad[0] for name, grad in g.items()}, reduce)
    return jax.tree.map(np.asarray, lesson.on_each(one, mesh, P(GRID))(grads))


def on_one_device(*sizes):
    """The right gradients for every device: the shards of one device's gradients."""
    return scattered(GRADS, sizes)


# %% tags=["hide-input", "hide-output"]
check_all_reduce = lesson.checker(
    [(2, 2, 2), (2, 1, 4), (1, 2, 2)], on_one_device, WRONG_SUMS,
    "Every replica gets the gradient of one device, on all three meshes.",
    run=lambda reduce: partial(after_sums, reduce))  # fmt: skip


print(check_all_reduce(all_reduce))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Return `lax.psum(grad, tuple(axes))`. `all_reduce` sums over the last and the first axis in use. That is
# enough for the matrices, which are replicated along two axes. The gain is replicated along three, and its
# gradient is never summed over the middle one, `context`. So the gains of the two `context` halves drift
# apart. A checkpoint saves one of the copies, and when it is restored, the other half gets gains that it was
# never trained with. JAX's check finds nothing, because arrays that belong to a device may differ. If the
# gain had the spec `P()`, JAX would refuse the program, and name the axis.
#
# Three published bugs are of this kind. In NeMo Automodel, weights replicated along `tensor` drifted apart,
# and a reload from a checkpoint showed it ([#3822](https://github.com/NVIDIA-NeMo/Automodel/pull/3822),
# September 2026). In NeMo RL, a new training loop did not sum the gradients of query and key norms
# ([#3716](https://github.com/NVIDIA-NeMo/RL/issues/3716)); 500 steps with `tensor` = 2 had stayed within the
# noise between runs ([#2683](https://github.com/NVIDIA-NeMo/RL/pull/2683)). A report on Megatron Core, not
# all of it verified, lists a norm gain whose gradient is summed over `tensor` only if sequence parallelism is
# on ([#7452](https://github.com/NVIDIA/Megatron-LM/issues/7452), September 2026).
# </details>

# %% tags=["remove-cell"]
one_by_one = lambda grad, axes: lax.psum(lax.psum(grad, tuple(axes[1:])), axes[0])
lesson.expect(check_all_reduce, *WRONG_SUMS, (over(list), "Every replica"),
              (one_by_one, "Every replica"),
              (lambda *_: None, lesson.NOTHING),
              (lambda grad, axes: over(list)(grad, axes) / 3, "Not yet"))  # fmt: skip
mended = np.asarray(train((2, 2, 2), scattered(start, (2, 2, 2)), over(list))[1])
assert lesson.same(mended, alone), "the fix is not enough"
assert abs(curve[0] - alone[0]) < 1e-4 and not lesson.same(curve, alone, 1e-3)
assert resumed[0] > on[0] * 1.02, "the loss no longer jumps"

# %% [markdown]
# ## In one table
#
# `x_btD -> h_bTD @ up_Df -> gelu @ down_fD -> y_btD`, on `stage, fsdp, tensor`. In each column, n is the
# number of devices along that axis.
#
# | | `data` | `stage` | `fsdp` | `expert` | `context` | `tensor` |
# |---|---|---|---|---|---|---|
# | dims it shards | B | L | B; D of weights | B; E of experts, D of other weights | T; D of weights | T between attention and MLP, H and F inside |
# | what it replicates | all weights | the batch | gains | gains | gains | gains |
# | sent in the forward pass | nothing | x_btD, once per microbatch | weights, every layer | tokens to experts and back; other weights | keys and values, every layer | x, 2 collectives per pair of matmuls |
# | sent in the backward pass | gradients, once per step | gradient of x_btD | weights again, gradients | gradients of what was sent | gradients of keys and values | gradients of x |
# | sent per device, forward and backward, times the bytes of the array | 2 (n - 1)/n of its gradients | 2 x_btD | (n - 1)/n of weights, 2 or 3 times | 4 (n - 1)/n of k copies of its tokens (k experts per token) | 3 (n - 1)/n of the keys and values of its heads, or 2 if they are saved | 4 (n - 1)/n of x_bTD per pair of matmuls |
# | what waits for it | the optimizer | the next stage | the layer, unless prefetched | the experts | the attention scores | the next matmul |
#
# <details><summary>The names in JAX, PyTorch and Megatron-LM</summary>
#
# | here | JAX | PyTorch | Megatron-LM |
# |---|---|---|---|
# | mesh | `jax.make_mesh` | `DeviceMesh` | `parallel_state` |
# | group along an axis | axis name of a collective | process group | process group |
# | `P("stage", None)` | `PartitionSpec`, one entry per dim | placements, one per mesh axis: `Shard(dim)`, `Replicate()`, `Partial()` (a pending sum) | attributes of each parallel layer |
# | `data` x `fsdp` (HSDP) | two mesh axes | `fully_shard` on a 2-D mesh (replicate, shard) | `--num-distributed-optimizer-instances` |
# </details>
#
# | devices | which axis goes where |
# |---|---|
# | any slow network | across it `data` if the batch is large, `stage` if it is small (05): the other axes send in every layer |
# | TPU slices | between slices `data`, or `fsdp` if all of a device's sequences fit in one microbatch; inside a slice a bad order only adds hops |
# | one node of 8 H100 | any order |
# | two nodes of 8 H100 | `tensor` and `context` inside, `stage` or `data` across; also `fsdp` if each GPU has its own 400 Gbit/s network card |
#
# ## Three lines to keep
#
# 1. For each weight and each axis, ask: sharded or replicated? If the weight is replicated and the tokens
#    differ, sum its gradient along the axis.
# 2. The order of the axes determines which axis crosses the slow network. Choose one that sends once per step
#    or microbatch, and reduce-scatter over the fast axis before you all-reduce over the slow one.
# 3. Two correct sums differ by a few 1e-7 in float32 and by 1e-15 in float64; a bug is as large in both. To
#    find its axis, set axes to 1 until it disappears.
#
# **Sources.** HSDP and `set_requires_all_reduce`: [PyTorch on
# `fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html); sequence
# parallelism and its gains: [arXiv:2205.05198](https://arxiv.org/abs/2205.05198); pipeline, data and tensor
# parallelism combined on nodes: [arXiv:2104.04473](https://arxiv.org/abs/2104.04473); the [scaling book on
# training](https://jax-ml.github.io/scaling-book/training); JAX on
# [`shard_map`](https://docs.jax.dev/en/latest/notebooks/shard_map.html).
