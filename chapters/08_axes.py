# %% [markdown]
# # 08 · Six axes at once
#
# **Question.** Each axis alone is understood: slices of weights, slices of products, stages, positions,
# experts. What changes when several of them cut the same arrays?
#
# **Why it hurts not to know.** A program can be right along each axis and wrong along two: a sum that leaves
# out one axis has the right shape, and the loss falls. And a mesh can be legal and take three times as long as
# its neighbour, because a chatty axis lies on a slow wire.
#
# *Before this:* 02 (who adds), 03, 04, 05; 06 and 07 where `context` and `expert` are met.
# *Mesh:* `stage=2,fsdp=2,tensor=2`, simulated. *Runs in* 35 s on 2 cores. Reading takes some 40 minutes, the
# exercises as long again.

# %%
from devices import simulate_devices

simulate_devices(8)

import matplotlib.pyplot as plt
import numpy as np

import config
from chapters import lesson
from errors import UserError
from plan import hardware, planner

# %% [markdown]
# ## Three numbers each
#
# A *mesh* arranges devices in a box, one side of the box for each axis. Eight devices in a box of 2 x 2 x
# 2 have three numbers each: which stage, which slice of the weights (`fsdp`), which slice of each product
# (`tensor`). A device exchanges *along an axis* with those that share its other two numbers.

# %%
box = np.arange(8).reshape(2, 2, 2)  # [stage, fsdp, tensor]: device numbers
for side, axis in enumerate(("stage", "fsdp", "tensor")):
    print(f"{axis:6}", np.moveaxis(box, side, -1).reshape(-1, 2).tolist())

# %% [markdown]
# So each device belongs to three groups, one an axis. Device 5 works with 4, 7 and 1, and never directly with
# 0. A sum over `fsdp` and `tensor` has a group of four: 4, 5, 6 and 7.
#
# ## Cut, or copied
#
# For each pair of an array and an axis there are two cases: the axis *cuts* the array, or the array is
# *copied* along it. What several axes cut is cut by their product. Take four layers (L) of a feed-forward
# block with a norm in front, whose gain is one number for each of D; width D = 64, hidden width F = 256,
# all in float32. `P` names, for each dim of an array, the axis that cuts it.
#
# > **Predict.** Four layers have 4 x (64 + 64 x 256 + 256 x 64) x 4 = 525,312 bytes of weights. How many
# > does a device of `stage=2,fsdp=2,tensor=2` hold, cut as in the cell below?

# %%
import jax
from jax import P

my_prediction = None  # bytes
AXES = ("stage", "fsdp", "tensor")
cut = {
    "gain_LD": ((4, 64), P("stage")),  # of the norm
    "up_LDF": ((4, 64, 256), P("stage", "fsdp", "tensor")),
    "down_LFD": ((4, 256, 64), P("stage", "tensor", "fsdp")),
}
mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
slice_of = lambda shape, spec: jax.NamedSharding(mesh, spec).shard_shape(shape)
slices = {name: slice_of(*said) for name, said in cut.items()}
held = sum(4 * int(np.prod(shape)) for shape in slices.values())
lesson.predicted("a device holds", my_prediction, held, "bytes")
print(slices)

# %% tags=["remove-cell"]
assert held == (2 * 4 * 64 * 256 // 8 + 4 * 64 // 2) * 4, "cut otherwise than said"

# %% [markdown]
# The two matrices are cut by eight. The gain is cut by two: `stage` alone cuts it, so along `fsdp` and
# `tensor` there are copies. The activations x, which flow between layers, are B sequences of T positions,
# and are cut otherwise: `fsdp` cuts sequences (b = B/2), `tensor` positions (t = T/2, the
# sequence parallelism of 04), and `stage` cuts neither.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three arrays: eight pieces of a matrix, two copies of each piece of x, four copies of each half of the gain."}}
figure, panels = plt.subplots(3, figsize=(5, 4.6), height_ratios=(2, 2, 1.3))
drawn = (
    (P("stage", ("fsdp", "tensor")), "LF", "up_LDF: a piece for each device", "stage"),
    (P("fsdp", "tensor"), "BT", "x_BTD: each piece twice, once a stage", "fsdp"),
    (P("stage"), "LD", "gain_LD: each half four times", "stage"),
)
for ax, (spec, dims, title, colour_by) in zip(panels, drawn, strict=True):
    lesson.slices(ax, mesh, spec, dims, title, colour_by)
panels[0].set(xlabel="D by fsdp and F by tensor")

# %% [markdown]
# Now the rule for every combination. For a weight, ask each axis:
#
# | along this axis the weight is | and its input is | then its gradient is |
# |---|---|---|
# | cut, and used as a slice (`tensor`, `stage`) | whatever | complete as it is made, in the slice |
# | cut, and joined before use (`fsdp`) | other tokens | added by the reduce-scatter that is the way back of the join |
# | copied | other tokens | **added along the axis** |
# | copied | the same | complete on each device, if the gradient of its output is: adding would make it n times too big |
#
# The third row is the one that is forgotten, since nothing in the forward pass hints at it. The gain is
# copied along `fsdp`, where neighbours have other sequences, *and* along `tensor`, where they have other
# positions. Its gradient is added over both. On a mesh of either axis alone one of the two sums would do.
#
# ## The program by hand
#
# Three axes, loss and gradient: the next four cells of code, put together, are a program for an empty file.
# `layer` is what one device does in one layer: it joins (all-gathers) its slices of weights along `fsdp`
# (03), and between joining positions and scattering sums along `tensor` it works on its slice of F (04).

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
batch = draw(B, T, D), draw(B, T, D), np.float32(draw(B, T) < 0.5)  # 1: it counts


# %% tags=["by-hand"]
norm = lambda gain, x: gain * x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(x_btD, w):
    up_Df = lax.all_gather(w["up_LDF"], "fsdp", axis=0, tiled=True)
    down_fD = lax.all_gather(w["down_LFD"], "fsdp", axis=1, tiled=True)
    h_bTD = lax.all_gather(norm(w["gain_LD"], x_btD), "tensor", axis=1, tiled=True)
    sum_bTD = jax.nn.gelu(h_bTD @ up_Df) @ down_fD  # over f, a slice: a partial sum
    y_btD = lax.psum_scatter(sum_bTD, "tensor", scatter_dimension=1, tiled=True)
    return x_btD + y_btD, None


# %% [markdown]
# Stages stand *outside* of the layers. A device runs its stage's layers (the inner `scan`), sends the
# result to its counterpart in the next stage, and takes the next microbatch: the GPipe loop of 05,
# Z + n - 1 ticks for n stages. It sends x_btD, which the other two axes have cut already: device 1 sends
# its quarter to device 5 and needs nobody else for it. A stage without a microbatch computes on rubbish
# that nobody uses. (`pcast`: what a scan carries begins varying along every axis along which it will, 05.)


# %% tags=["by-hand"]
def device(w, *batch):
    n, here = lax.axis_size("stage"), lax.axis_index("stage")
    x_ZbtD, target_ZbtD, real_Zbt = (a.reshape(Z, -1, *a.shape[1:]) for a in batch)

    def tick(inbox_btD, m):
        x_btD = jnp.where(here == 0, x_ZbtD[jnp.minimum(m, Z - 1)], inbox_btD)
        y_btD, _ = lax.scan(layer, x_btD, w)  # this stage's layers
        return lax.ppermute(y_btD, "stage", [(s, (s + 1) % n) for s in range(n)]), y_btD

    empty_btD = lax.pcast(jnp.zeros_like(x_ZbtD[0]), "stage", to="varying")
    _, y = lax.scan(tick, empty_btD, jnp.arange(Z + n - 1))
    squares_Zbt = jnp.sum((y[n - 1 :] - target_ZbtD) ** 2, -1)
    return jnp.sum(real_Zbt * squares_Zbt * (here == n - 1)), jnp.sum(real_Zbt)


# %% [markdown]
# The loss is the global sum over the global count. The sum is added over all three axes, because stages other
# than the last give 0. The count is added over `fsdp` and `tensor` only, because both stages count the same
# tokens.


# %% tags=["by-hand"]
mean = lambda lost, count: lax.psum(lost, AXES) / lax.psum(count, ("fsdp", "tensor"))


def loss_on(*sizes, mean=mean):
    mesh = jax.make_mesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    one = lambda *args: mean(*device(*args))
    specs_in = specs, *[P("fsdp", "tensor")] * 3
    return jax.shard_map(one, mesh=mesh, in_specs=specs_in, out_specs=P())


def loss_alone(w, x, target, real):
    for n in range(L):
        x += jax.nn.gelu(norm(w["gain_LD"][n], x) @ w["up_LDF"][n]) @ w["down_LFD"][n]
    return jnp.sum(real * jnp.sum((x - target) ** 2, -1)) / jnp.sum(real)


run = lambda loss: jax.jit(jax.value_and_grad(loss))(w, *batch)
(got, gots), (want, wants) = run(loss_on(2, 2, 2)), run(loss_alone)
off = {k: float(abs(gots[k] - wants[k]).max() / abs(wants[k]).max()) for k in w}
print(f"8 devices {got:.6f}, alone {want:.6f}; gradients are off by", off)
assert abs(got - want) < 1e-5 * want and max(off.values()) < 1e-5, "not one device's"

# %% [markdown]
# Each gradient agrees to less than a millionth of its largest entry. Yet no line of the program adds the
# gain's gradient. JAX does it, because the check of `shard_map` (`check_vma`, on by default) knows along
# which axes each value may differ: where the gain meets x_btD, which differs along `fsdp` and `tensor` too,
# it becomes a value that may differ there, and the way back of that step is a sum over both (02). Megatron-LM
# adds it by hand ([#443](https://github.com/NVIDIA/Megatron-LM/issues/443)).
#
# ## Who sends how often
#
# Now count what the three axes send in one step, forward and back. A stage has L/n = 2 layers, and there are
# Z + n - 1 = 5 ticks.
#
# > **Predict.** How many messages does a device send along `stage` in a step, forward and back?
#
# > **Predict.** Along `tensor`, a layer joins positions and scatters sums, and both have a way back. How
# > many times the bytes of `stage` are that? (A message is x_btD. To join x_bTD, a device sends (n - 1)/n
# > of it.)

# %%
my_prediction, my_ratio = None, None  # messages; bytes of tensor over bytes of stage
found = lesson.compiled(jax.value_and_grad(loss_on(2, 2, 2)), mesh, w, *batch)
sent = found.by("axes")
lesson.predicted("along stage", my_prediction, sent["stage"].count, "messages")
ratio = sent["tensor"].wire_bytes / sent["stage"].wire_bytes
lesson.predicted("tensor sends", my_ratio, ratio, "times the bytes of stage")
for axes, one in sent.items():
    print(f"{axes:17} {one.count:3.0f} exchanges, {one.wire_bytes:5.0f} bytes a device")

# %% tags=["remove-cell"]
assert (sent["stage"].count, ratio) == (2 * 5, 4), "sizes were changed"
assert sent["fsdp"].count == 4 + 4 * 5, "gathers before the ticks, a scatter in each"

# %% [markdown]
# Along `tensor` each of the 2 layers exchanges 4 times in each tick, and half of x_bTD is as much as a
# message: 4 x 2 against 2 a tick. **The ratio is 2 (n - 1) times the pairs of products that a stage has.** A
# transformer's layer has two, attention and feed-forward: with 16 layers a stage it is 64. The bytes along
# `fsdp` do not depend on the tokens. `layer` asks for its two gathers in each tick; with a gradient JAX takes
# them out of the loop, since nothing in them changes: each of the stage's 4 matrices is gathered once, and
# kept joined, and its gradient is scattered in each tick. Over `fsdp` and `tensor` together goes the gain's
# gradient, once a layer and tick.
#
# ## Which neighbours are near
#
# A mesh is legal in any order of its axes. With two hosts of four devices, a fast wire inside and a slow one
# between, the order decides which crosses: neighbours along the last are nearest.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two hosts of four devices, twice: orange stage lines cross between hosts, then red tensor lines do."}}
figure, panels = plt.subplots(1, 2, figsize=(6, 3.3))
places = [(0, 0), (1, 0), (0, 1), (1, 1), (2.6, 0), (3.6, 0), (2.6, 1), (3.6, 1)]
circle = {"fc": "w", "ec": "k", "boxstyle": "circle"}
for ax, order in zip(panels, (AXES, AXES[::-1]), strict=True):
    for side, axis in enumerate(order):
        arrow = {"arrowstyle": "-", "color": lesson.COLOURS[axis], "lw": 2.5}
        arrow["connectionstyle"] = "arc3,rad=-0.25" if side == 0 else "arc3"
        for a, b in np.moveaxis(box, side, -1).reshape(-1, 2):
            ax.annotate("", places[b], places[a], arrowprops=arrow, zorder=1)
    for number, (x, y) in enumerate(places):
        ax.text(x, y, number, ha="center", va="center", bbox=circle, color="k")
    ax.axvline(1.8, color=lesson.NEUTRAL, linestyle=":")
    ax.set(xlim=(-0.4, 4), ylim=(1.7, -0.7), yticks=[])
    ax.set_xticks([0.5, 3.1], ["host 0", "host 1"])
    ax.set_title(f"{order[0]} crosses", color=lesson.COLOURS[order[0]])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
line = lambda axis: plt.Line2D([], [], color=lesson.COLOURS[axis], lw=2.5, label=axis)
labels = [line(axis) for axis in AXES]
legend = figure.legend(handles=labels, loc="outside lower center", ncols=3)

# %% [markdown]
# At left the order is `stage, fsdp, tensor`, at right the reverse. The program and its results are the same,
# and at right four times the bytes cross. Simulated devices show no seconds, so take the sizes of Llama 3 8B
# in bfloat16 (D = 4,096; 8.03e9 parameters less two vocabulary tables of 128,256 x D, over 32 layers: 218
# million a layer; 16 layers a stage), n = 2 along each axis, a microbatch of 8,192 tokens, and wires from
# `plan/hardware.py`, the project's table of chips:

# %%
D_8B, tokens, layers_of_stage = 4096, 8192, 16
bTD = 2 * tokens * D_8B  # bytes, joined over tensor
for key in ("v5p", "h100"):
    chip = hardware.CHIPS[key]
    flops = 6 * layers_of_stage * 218e6 * tokens / 2  # tensor=2: half of each product
    products = flops / chip.peak_flops_per_s * 1e3
    print(f"{chip.name}: products {products:.0f} ms a microbatch")
    speeds = {"inside": chip.link_bytes_per_s, "between": chip.dcn_bytes_per_s}
    for wire, speed in speeds.items():
        # attention and feed-forward: two pairs of products, 8 exchanges a layer
        ms = {"tensor": 8 * layers_of_stage * bTD / 2, "stage": 2 * bTD / 2}
        ms = {axis: f"{size / speed * 1e3:.1f} ms" for axis, size in ms.items()}
        print(f"  {wire:7} ({speed / 1e9:.4g} GB/s)", ms)

# %% [markdown]
# Inside, `tensor` takes less time than its products; between slices of v5p nearly four times as long, and
# between nodes of H100s as long. `stage` is the axis that can cross: 11 ms on v5p, 1 ms on H100. (A hop takes
# about a microsecond whatever is sent, in which a link of v5p carries 90 kB, and NVLink 450.) Hence the order
# on this project's grid, from the slow wire to the fast: `data, stage, fsdp, expert, context, tensor`.
#
# ## Two axes on one dim: `context` x `tensor`
#
# Both cut positions: between layers a device holds T/4 of them for `context=2,tensor=2`. The spec names
# both axes for one dim, and their order counts: the first cuts into large pieces, the second cuts these.
# Who joins first? Eight positions, cut by both, joined in both orders:

# %%
auto = jax.sharding.AxisType.Auto
four = jax.make_mesh((2, 2), ("context", "tensor"), axis_types=(auto, auto))


def joined(first, second):
    def one(x_t):
        x_s = lax.all_gather(x_t, first, tiled=True)
        return lax.all_gather(x_s, second, tiled=True)[None]

    spec = P(("context", "tensor"))
    return jax.shard_map(one, mesh=four, in_specs=spec, out_specs=spec)(np.arange(8))[0]


print("tensor, then context:", joined("tensor", "context"))
print("context, then tensor:", joined("context", "tensor"))

# %% [markdown]
# **What was cut last is joined first.** In the other order shapes are right and positions are scrambled.
# There is a second reason. After joining along `tensor`, a device makes keys for its own heads only, so
# what travels along `context` is the keys of h = H/n heads: each axis makes the other cheaper. Joined
# along `context` first, every device would receive the whole width of all positions.
#
# ## One layer, three axes
#
# Now a layer with attention and experts, cut by `fsdp`, `expert` and `tensor`: E experts of hidden width
# F, H heads of width K, A rows of tokens at their experts. Small letters are slices. Red moves along
# `tensor`, purple along `expert`, and blue weights are joined from slices.

# %% tags=["hide-input"]
red, purple, blue = (lesson.COLOURS[axis] for axis in ("tensor", "expert", "fsdp"))
GREY = lesson.NEUTRAL
steps = (
    ("x_btD", "", red, "gain_D: copied", GREY),
    ("h_bTD", "join positions", red, "query_DhK: join D over fsdp x expert", blue),
    ("o_bThK", "", GREY, "out_hKD: join D over fsdp x expert", blue),
    ("x_btD", "add, scatter positions", red, "gain_D copied; router_DE joined", blue),
    ("h_bTD", "join positions", red, "", GREY),
    ("rows_eAD", "all-to-all, to experts", purple, "up_eDf: join D over fsdp", blue),
    ("rows_eAf", "", GREY, "down_efD: join D over fsdp", blue),
    ("y_bTD", "all-to-all, back", purple, "", GREY),
    ("x_btD", "add, scatter positions", red, "", GREY),
)


# %% tags=["hide-input"] mystnb={"image": {"alt": "From x_btD down to x_btD: red gathers and scatters around attention and experts, purple all-to-all inside, blue joins of weights at right."}}
figure, ax = plt.subplots(figsize=(6, 5.6))
outline = {"fc": "none", "ec": "0.5", "boxstyle": "round"}
for row, (shape, moved, colour, weight, shade) in enumerate(steps):
    ax.text(0, -row, shape, ha="center", va="center", bbox=outline)
    if row:
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 2 if moved else 1}
        ax.annotate("", (0, -row + 0.28), (0, -row + 0.72), arrowprops=arrow)
    ax.text(0.25, -row + 0.5, moved, color=colour, va="center")
    ax.text(0.7, -row, weight and f"times {weight}", color=shade, va="center")
ax.set(xlim=(-0.5, 3.6), ylim=(-8.5, 0.6), xticks=[], yticks=[])
ax.set(title="Activations go down, weights come from the right")
ax.spines[:].set_visible(False)

# %% [markdown]
# Neighbours along `expert` hold other sequences, as along `fsdp`. So outside of the experts the two are one
# long axis, and dense weights are sliced over both. For an expert's weights `expert` says *which* expert, and
# `fsdp` slices it. After `down_efD` y is a partial sum over f, and travels back from the experts as one: the
# sum along `tensor` waits until each token's experts are added, so that it is paid once. (`model.py` declares
# each weight with its letters and their axes, such as `param("DF", D=SLICED, F=TENSOR)`.)
#
# ## Replicas of slices: `data` x `fsdp`
#
# `fsdp` gathers weights in every layer. If it spans two slices of TPUs, or two nodes, those bytes cross.
# HSDP (hybrid sharding) slices weights inside of a slice and copies them between: `data=2,fsdp=4`. Then
# gradients alone cross, once a step. Or so one hopes. Here is one weight, Z = 4 microbatches, and one
# line that is on or off:


# %%
def hsdp(early):
    both = ("data", "fsdp")
    mesh = jax.make_mesh((2, 4), both, axis_types=(auto, auto))

    def device(w_dF, x_ZbD):
        if early:  # from here on: may differ along data. Its way back: a sum over data
            w_dF = lax.pcast(w_dF, "data", to="varying")

        def micro(total, x_bD):
            w_DF = lax.all_gather(w_dF, "fsdp", axis=0, tiled=True)
            return total + jnp.sum(jnp.tanh(x_bD @ w_DF) ** 2), None

        zero = lax.pcast(jnp.float32(0), both, to="varying")
        return lax.psum(lax.scan(micro, zero, x_ZbD)[0], both)

    specs = P("fsdp"), P(None, both)
    loss = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P())
    args = np.ones((16, 24), np.float32), np.ones((Z, 8, 16), np.float32)
    return lesson.compiled(jax.value_and_grad(loss), mesh, *args).by("axes")["data"]


# %% [markdown]
# > **Predict.** Both give the same gradient. With `early` off, w becomes a value that may differ along
# > `data` at the product, inside of the loop and after the join. How many times as many bytes cross
# > between the replicas as with it on? (The way back is the reverse.)

# %%
my_prediction = None  # times
late, early = hsdp(False), hsdp(True)
times = late.wire_bytes / early.wire_bytes
lesson.predicted("late over early", my_prediction, times, "times the bytes")
for name, one in {"late": late, "early": early}.items():
    print(f"{name:5} {one.count:.0f} sums, {one.wire_bytes:5,.0f} bytes a device")

# %% tags=["remove-cell"]
assert late.wire_bytes == Z * 4 * early.wire_bytes, "not Z x fsdp"

# %% [markdown]
# Sixteen: Z times, because the sum stands inside of the loop, times 4 = `fsdp`, because whole gradients are
# added and only then scattered. **Scatter over the fast axis first, then add slices over the slow one,
# once.** Only a list of collectives shows it. PyTorch has the same switch: without
# `set_requires_all_reduce(False)`, HSDP adds between replicas in every microbatch.
#
# For 8.03 billion parameters with float32 gradients a device of `data=2,fsdp=8` sends 4 x 8.03e9/8 = 4.0 GB
# between replicas: 0.08 s on H100s (50 GB/s each), 0.64 s between slices of v5p (6.25 GB/s a chip).
# `fsdp=16` over both would send as much. **Between two, HSDP saves repetition and waiting, not volume**: once
# a step in place of once a microbatch, and no layer waits. It pays with memory: twice the slices.
#
# ## Legal and slow
#
# Llama 3 8B on 16 devices, 8 sequences of 32,768 tokens a step. `fsdp=16` is refused, as 8 sequences do not
# split over 16. The four below are legal. The planner (09 explains it) adds up seconds of products, wires and
# bubbles. Here for 16 chips of a v5p slice, for two H100 nodes with a 400 Gbit/s card for each GPU, and for
# the same nodes on one 100 Gbit/s wire that eight GPUs share:

# %% tags=["hide-input"]
import dataclasses

slow_chip = dataclasses.replace(hardware.CHIPS["h100"], dcn_bytes_per_s=12.5e9 / 8)
SLOW = hardware.Topology(slow_chip, (16,), 16, hosts=2)
LONG = {"data.batch_size": 8, "data.seq_len": 32768}


def planned(mesh, on=SLOW):
    return planner.plan(config.preset("llama3_8b", **LONG | {"mesh": mesh}), on)


# %%
MACHINES = {"v5p slice": "v5p:2x2x4", "H100 nodes": "h100:16", "slow wire": SLOW}
table = {}
print(" " * 17, *(f"{name:>12}" for name in MACHINES))
for split in ("fsdp=8,tensor=2", "fsdp=2,context=8", "data=2,context=8", "context=16"):
    plans = [planned(split, on) for on in MACHINES.values()]
    table[split] = [one.step_s for one in plans]
    print(f"{split:17}", *(f"{seconds:10.2f} s" for seconds in table[split]))
columns = zip(MACHINES, np.array([*table.values()]).T, strict=True)
spread = {name: s.max() / s.min() for name, s in columns}
print({name: f"slowest / fastest {x:.1f}" for name, x in spread.items()})
assert spread["slow wire"] > 2.9 and spread["v5p slice"] < 1.2, "a plan has changed"

# %% [markdown]
# On the slice of v5p, where all links are of one kind, the choice is worth a sixth; on the slow wire a factor
# of three. In the last mesh keys and values of every layer cross between the nodes, for each sequence; in the
# others it is weights or gradients, whose bytes do not grow with the tokens. An axis that cuts sequences,
# `data` or `fsdp`, leaves fewer microbatches to a pipeline: of 8 sequences `fsdp=8` leaves one.
#
# ## Which difference is a bug
#
# Eight devices add in another order than one, and floating-point sums depend on their order. How far
# apart may two right programs be? Compare with a wrong one. In `mean_of_means` each `tensor` neighbour
# divides by the count of its own positions, and the quotients are averaged. The types are right.


# %%
def mean_of_means(lost, count):
    return lax.psum(lost / lax.psum(count, "fsdp"), AXES) / lax.axis_size("tensor")


gradient_alone = jax.jit(jax.grad(loss_alone))


def worst(sizes, mean, dtype=np.float32, real=batch[2]):
    """The weight whose gradient is furthest off, as a share of its largest entry."""
    with jax.enable_x64(dtype == np.float64):
        args = jax.tree.map(lambda a: a.astype(dtype), (w, *batch[:2], real))
        got = jax.jit(jax.grad(loss_on(*sizes, mean=mean)))(*args)
        want = gradient_alone(*args)
        off = {k: float(abs(got[k] - want[k]).max() / abs(want[k]).max()) for k in w}
    return "{1:8} {0:.0e}".format(*max((off[k], k) for k in w))


for name, one in {"right": mean, "mean of means": mean_of_means}.items():
    for dtype in (np.float32, np.float64):
        print(f"{name:14} {dtype.__name__}", worst((2, 2, 2), one, dtype))
print("all targets count:    ", worst((2, 2, 2), mean_of_means, real=np.ones((B, T))))

# %% [markdown]
# Rounding is a few times the last bit (6e-8 in float32), and in float64 it all but vanishes.
# A bug stays where it is. So **compare in float32 with a limit of about 1e-5, and where in doubt in
# float64.** And compare on data that are uneven: where all targets count, this bug does not exist.
#
# ## Parity as a tool
#
# A difference on `stage=2,fsdp=2,tensor=2`. Which axis is it? Set axes to 1 and look again: the program
# runs on every mesh, because a collective over one device does nothing.

# %%
for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)):
    print(dict(zip(AXES, sizes, strict=True)), worst(sizes, mean_of_means))

# %% [markdown]
# Every mesh with `tensor=2` differs, and none without. If a pair of axes differs and neither alone, the fault
# is one of composition. For the project's model, `python -m tests.parity tiny --mesh fsdp=2,stage=2,tensor=2`
# does the comparison, and names the worst parameter.
#
# ## Exercise 1: cut it yourself
#
# A layer with experts on `stage`, `fsdp`, `expert` and `tensor`, as in the picture above. Which axis cuts
# each dim of each weight? A name, a tuple of names, or None.


# %%
def layout():
    gain_LD = "stage", None
    query_LDHK = ...  # four entries, one a letter
    out_LHKD = ...
    up_LEDF = ...
    down_LEFD = ...
    return dict(locals())


# %% tags=["hide-input"]
DENSE = ("fsdp", "expert")
CUTS = {
    "gain_LD": ("stage", None),
    "query_LDHK": ("stage", DENSE, "tensor", None),
    "out_LHKD": ("stage", "tensor", None, DENSE),
    "up_LEDF": ("stage", "expert", "fsdp", "tensor"),
    "down_LEFD": ("stage", "expert", "tensor", "fsdp"),
}


def twice(up):
    """Wrong cuts of both matrices of an expert, the second the mirror of the first."""
    stage, expert, D_axis, F_axis = up
    return {"up_LEDF": up, "down_LEFD": (stage, expert, F_axis, D_axis)}


def heads(D_axis, H_axis, K_axis):
    out = "stage", H_axis, K_axis, D_axis
    return {"query_LDHK": ("stage", D_axis, H_axis, K_axis), "out_LHKD": out}


# %% tags=["hide-input"]
MIXED_UP = {
    "And neighbours along expert, for dense weights?": heads("fsdp", "tensor", None),
    "One axis cuts two dims: how can it?": twice(("stage", "expert", DENSE, "tensor")),
    "What do up and down sum over?": twice(("stage", "expert", "tensor", "fsdp")),
    "Each device has all experts?": twice(("stage", None, "fsdp", "tensor")),
    "A part of every head on each device. And softmax?": heads(DENSE, None, "tensor"),
    "Legal, for D numbers: what would a norm wait for?": {"gain_LD": ("stage", "fsdp")},
    "Who has which layers?": {name: (None, *CUTS[name][1:]) for name in [*CUTS][1:]},
}


def plain(spec):
    """A spec as text, whatever it is written as."""
    tuples = [(axes,) if isinstance(axes, str) else axes or "-" for axes in spec]
    return " ".join("*".join(sorted(axes)) for axes in tuples)


# %% tags=["hide-input"]
def check_layout(answer):
    said = answer()
    if not isinstance(said, dict) or any(said.get(k, ...) in (..., None) for k in CUTS):
        return lesson.NOTHING
    for name, spec in CUTS.items():
        entries = said[name] if isinstance(said[name], tuple | list | P) else ()
        if len(entries) != len(spec):
            return f"{name} wants one entry a letter, as gain_LD has."
    of = lambda specs: lambda: tuple(plain(specs[name]) for name in CUTS)
    mistakes = [(of(CUTS | wrong), hint) for hint, wrong in MIXED_UP.items()]
    found = lesson.diagnose(of(said), [()], of(CUTS), mistakes, "Right.")
    wrong = [name for name in CUTS if plain(said[name]) != plain(CUTS[name])]
    said_so = found.startswith("Not yet")
    return f"Not yet: look at {wrong[0]} again." if said_so else found


print(check_layout(layout))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `query_LDHK: ("stage", ("fsdp", "expert"), "tensor", None)`, `out_LHKD: ("stage", "tensor", None,
# ("fsdp", "expert"))`, `up_LEDF: ("stage", "expert", "fsdp", "tensor")`, `down_LEFD: ("stage", "expert",
# "tensor", "fsdp")`. `tensor` cuts what the pair of products sums over (heads, F), `expert` cuts E where
# there is one, and D is left for slicing, by all axes along which tokens differ and that do not cut the
# weight otherwise.
# </details>

# %% tags=["remove-cell"]
assert check_layout(layout) == check_layout(lambda: ...) == lesson.NOTHING
changed = lambda **wrong: check_layout(lambda: CUTS | wrong)
assert changed() == changed(gain_LD=P("stage", None)) == "Right."
assert changed(out_LHKD=("stage", "tensor", None, ("expert", "fsdp"))) == "Right."
for hint, wrong in MIXED_UP.items():
    assert changed(**wrong) == hint
assert "up_LEDF again" in changed(up_LEDF=("expert", "stage", None, None))
assert "one entry" in changed(up_LEDF=("expert",)) == changed(up_LEDF=7)

# %% [markdown]
# ## Exercise 2: with whom
#
# Devices are numbered along the last axis first, as in the box at the top. With whom does a device
# exchange along some axes, itself included? `sizes` are the axes in order, such as `{"stage": 2, "fsdp":
# 2, "tensor": 2}`.


# %%
def group(sizes, axes, device):
    return ...  # numbers in order: group(sizes, ("tensor",), 5) is [4, 5]


# %% tags=["hide-input"]
from functools import cache, partial


def lines(sizes, axes, device, keep=False, turned=False):
    """The group of a device along some axes.

    keep: those that share its place along them; turned: the first axis is nearest
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


# %% tags=["hide-input"]
def check_group(answer):
    cube, long = dict.fromkeys(AXES, 2), {"data": 2, "fsdp": 4, "tensor": 3}
    cases = [(cube, (axis,), 5) for axis in AXES] + [(cube, ("fsdp", "tensor"), 5)]
    cases += [(long, ("fsdp",), 14), (long, ("data", "tensor"), 14)]
    plain = lambda x: tuple(np.asarray(x).tolist()) if np.ndim(x) == 1 else x
    listed = lambda f: lambda *case: plain(f(*case))
    mistakes = [
        (block, "Consecutive numbers: are neighbours along the first axis that?"),
        (partial(lines, keep=True), "These share its place along the axes."),
        (partial(lines, turned=True), "Has the first axis near neighbours?"),
        (others, "Who is missing? It takes part itself."),
    ]
    mistakes = [(listed(wrong), hint) for wrong, hint in mistakes]
    answer = answer if answer is ... else listed(answer)
    return lesson.diagnose(answer, cases, listed(lines), mistakes, "Right.")


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
# Along an axis, numbers are as far apart as the product of the sizes after it. For device 5 of the cube:
# 1 along `tensor`, 2 along `fsdp`, 4 along `stage`.
# </details>

# %% tags=["remove-cell"]
assert check_group(lines) == "Right."
assert "Consecutive" in check_group(block) and "takes part" in check_group(others)
assert "share its place" in check_group(partial(lines, keep=True))
assert "near neighbours" in check_group(partial(lines, turned=True))
assert check_group(group) == lesson.NOTHING and "Not yet" in check_group(lambda *a: [7])

# %% [markdown]
# ## Exercise 3: a better mesh
#
# The slow wire again: for 8 sequences of 32,768 tokens a colleague has chosen `context=16`, "as they are
# long", and pays 11.7 s a step. Find a mesh of 16 devices with at most 3.0 s. Which axis sends least, and
# how many times? What is left for the others inside of a node?


# %%
def better():
    return ...  # such as "context=16"


# %% tags=["hide-input"]
SLOWER = {
    "data": "Gradients of all weights: {:.1f} s. Does another axis send less?",
    "fsdp": "Weights, joined and scattered: {:.1f} s. Do they have to cross?",
    "context": "Keys and values of every layer: {:.1f} s. What crosses once a stage?",
    "fsdp*context": "fsdp and context together slice weights: {:.1f} s of them cross.",
    "tensor": "Positions, four times a layer: {:.1f} s. Is that axis too long?",
    "stage": "Messages: {:.1f} s. How many borders does the slow wire need?",
    "bubble": "The bubble takes {:.1f} s. What leaves a stage more microbatches?",
}


def why_slow(one):
    seconds = {axis: s for axis, s in one.seconds().items() if axis in SLOWER}
    if one.cfg.mesh.stage == 2:  # one border is as few as there can be
        seconds.pop("stage", 0)
    most = max(seconds, key=seconds.get)
    return SLOWER[most].format(seconds[most])


# %% tags=["hide-input"]
def check_better(answer):
    split = answer()
    if split is None or split is ...:
        return lesson.NOTHING
    if not isinstance(split, str):
        return 'Write a mesh as text, as "context=16".'
    try:
        one = planned(split)
    except UserError as error:
        return f"The planner refuses: {str(error)[:150]}"
    said = f"{one.step_s:.2f} s, {one.peak_bytes / 2**30:.0f} GiB. "
    if not one.fits:
        return said + "Too large for an H100. Which axes divide the weights?"
    return said + ("That will do." if one.step_s <= 3.0 else why_slow(one))


print(check_better(better))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `stage=2,context=4,tensor=2`, 2.83 s; `stage=2,context=8`, 2.88 s. Only x_btD crosses, at the border of
# two stages. `context` and `tensor` cut *sequences*, so all 8 remain to be microbatches and the bubble is
# small. `stage=2,fsdp=8` sends as little over the slow wire, and gives each of its 8 groups one sequence:
# Z = 1, and half of the time is bubble. An axis that cuts the batch takes microbatches from the pipeline.
# </details>

# %% tags=["remove-cell"]
said = lambda split: check_better(lambda: split)
assert said("stage=2,context=4,tensor=2") == "2.83 s, 38 GiB. That will do."
assert said("stage=2,context=8") == "2.88 s, 52 GiB. That will do."
assert "every layer" in said("context=16") and said("context=16").startswith("11.73")
assert "Does another" in said("data=2,context=8")
assert "have to cross" in said("fsdp=8,tensor=2")
assert "together slice" in said("fsdp=2,context=8")
assert "bubble takes" in said("stage=2,fsdp=8")
assert "How many borders" in said("stage=4,fsdp=2,tensor=2")
assert "Too large" in said("data=8,context=2")
assert "refuses" in said("fsdp=16") and "refuses" in said("stages=2")
assert "as text" in check_better(lambda: 16) and said(...) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# A colleague trains the program above with clipping: if the norm of all gradients together is above
# LIMIT, all are scaled down together. `clipped` runs on each device's slices. Loss and gradients of the
# first step are one device's. Then the run on eight devices falls faster, and its owner is pleased.

# %%
LIMIT = 40.0


def clipped(grads):
    squares = 0.0
    for name, grad in grads.items():
        copies = lax.axis_size(("fsdp", "tensor")) if name == "gain_LD" else 1
        squares += jnp.sum(grad**2) / copies
    length = jnp.sqrt(lax.psum(squares, ("fsdp", "tensor")))
    return {name: grad * jnp.minimum(1, LIMIT / length) for name, grad in grads.items()}


# %%
def on_mesh(clip, *sizes):
    mesh = jax.make_mesh(sizes, AXES, axis_types=(auto,) * 3)
    return jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=specs)


def losses(sizes, clip=clipped, steps=60):
    def step(w, _):
        loss, grads = jax.value_and_grad(loss_on(*sizes))(w, *batch)
        grads = on_mesh(clip, *sizes)(grads)
        return jax.tree.map(lambda x, g: x - 0.0005 * g, w, grads), loss

    return np.asarray(lax.scan(step, w, None, steps)[1])


# %% mystnb={"image": {"alt": "Two falling curves of the loss that are one at first and then part slowly."}}
figure, axes = plt.subplots(figsize=(5, 3))
curves = {"one device": losses((1, 1, 1)), "stage=2,fsdp=2,tensor=2": losses((2, 2, 2))}
for (name, curve), style in zip(curves.items(), ("-", "--"), strict=True):
    colour = lesson.NEUTRAL if style == "-" else lesson.COLOURS["stage"]
    axes.plot(curve, style, color=colour, label=name)
    print(f"{name:24} first {curve[0]:.4f}, last {curve[-1]:.4f}")
axes.set(xlabel="step", ylabel="loss", title="The same run on one device and on eight")
legend = axes.legend()

# %% tags=["hide-input"]
GRADS = jax.tree.map(np.asarray, wants)


def scaled(grads, squares):
    return jax.tree.map(lambda g: g * jnp.minimum(1, LIMIT / jnp.sqrt(squares)), grads)


def norm_with(over, divide=("gain_LD",)):
    """clipped, with a sum over other axes, or other weights divided by the copies."""

    def clip(grads):
        copies = lax.axis_size(("fsdp", "tensor"))
        own = [jnp.sum(g**2) / (copies if k in divide else 1) for k, g in grads.items()]
        return scaled(grads, lax.psum(sum(own), over))

    return clip


def each_alone(grads):
    over = lambda name: "stage" if name == "gain_LD" else AXES
    return {k: scaled(g, lax.psum(jnp.sum(g**2), over(k))) for k, g in grads.items()}


# %% tags=["hide-input"]
TWO = ("fsdp", "tensor")
WRONG_CLIPS = (
    (norm_with(TWO), "As it was. On which meshes is it one device's? Set axes to 1."),
    (norm_with(AXES, ()), "Another fault: now one thing is counted several times."),
    (norm_with(TWO, ()), "That line was right: of what are there copies?"),
    (norm_with(AXES, tuple(w)), "Too long a step: which of the weights have copies?"),
    (each_alone, "Each by its own norm: that turns the vector of all of them."),
    (lambda grads: grads, "Nothing is clipped now."),
)


# %% tags=["hide-input", "hide-output"]
@cache  # compiled once a mesh
def clipped_on(clip, *sizes):
    return jax.jit(on_mesh(clip, *sizes))(GRADS)


def check_clipped(clip):
    cases = [(2, 2, 2), (4, 2, 1), (1, 2, 4)]
    tried = lambda clip: partial(clipped_on, clip)
    right = lambda *_: scaled(GRADS, sum(np.sum(g**2) for g in GRADS.values()))
    mistakes = [(tried(wrong), hint) for wrong, hint in WRONG_CLIPS]
    answer = clip if clip is None or clip is ... else tried(lesson.answered(clip))
    done = "Clipped as on one device, on all three meshes."
    return lesson.diagnose(answer, cases, right, mistakes, done)


print(check_clipped(clipped))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `lax.psum(squares, AXES)`. The norm is that of *all* weights, and `stage` cuts them too: as it stands,
# each stage clips by the norm of its own layers, so the update has another direction, and is longer than
# LIMIT allows. The check of `shard_map` cannot know: a number that differs between stages may scale
# weights that differ between stages. Squares are added over the axes that *cut* a gradient, and not over
# those along which it is copied; the division by the copies makes one sum of both. Two runs find the
# axis: `losses((1, 2, 4))` is one device's, `losses((2, 1, 1))` is not.
#
# torchtitan had this fault ([#596](https://github.com/pytorch/torchtitan/issues/596), October 2024):
# `clip_grad_norm_` saw the modules of one stage, until
# [#649](https://github.com/pytorch/torchtitan/pull/649) added the norms of all. Its sister is the gain
# under sequence parallelism: while gpt-neox was given that, nobody added the gains' gradients along
# `tensor`, and the loss fell more slowly and stayed near 8
# ([#1257](https://github.com/EleutherAI/gpt-neox/pull/1257)); in Megatron-LM a user found the last norm's
# gradient different on each device ([#1446](https://github.com/NVIDIA/Megatron-LM/issues/1446)).
# </details>

# %% tags=["remove-cell"]
assert check_clipped(norm_with(AXES)).startswith("Clipped as on one device")
shared = clipped_on(norm_with(AXES), 1, 1, 1)
assert lesson.same(clipped_on(clipped, 1, 2, 4), shared), "without stages it is right"
assert not lesson.same(clipped_on(clipped, 2, 1, 1), shared), "with two it is not"
assert "As it was" in check_clipped(clipped)
for wrong, hint in WRONG_CLIPS:
    assert check_clipped(wrong) == hint
assert check_clipped(lambda grads: None) == check_clipped(...) == lesson.NOTHING
third = lambda grads: jax.tree.map(lambda g: g / 3, grads)
assert "Not yet" in check_clipped(third)
first = [curve[0] for curve in curves.values()]
assert abs(first[0] - first[1]) < 1e-4, "the first loss is one device's"
mended = losses((2, 2, 2), norm_with(AXES))
assert lesson.same(mended, curves["one device"], 1e-3)

# %% [markdown]
# ## In one table
#
# `x_btD -> h_bTD @ up_Df -> gelu @ down_fD -> y_btD`, on `stage, fsdp, tensor`, with n devices along the
# axis at hand:
#
# | | `data` | `stage` | `fsdp` | `expert` | `context` | `tensor` |
# |---|---|---|---|---|---|---|
# | cuts | B | L | B; D of weights | B; E of experts, D of others | T; D of weights | T between, F and H inside |
# | copied along it | all weights | x | gains | gains | gains | gains |
# | moves forward | nothing | x_btD, once a stage | weights, every layer | tokens to experts and back; other weights | keys and values, every layer | x, twice a pair of products |
# | moves backward | gradients, once a step | the same | weights again, gradients | the same, gradients of others | their gradients | the same |
# | bytes of a device | 2 (n - 1)/n of its gradients | 2 x_btD | (n - 1)/n of weights, 2 or 3 times | 4 (n - 1)/n of k copies of its tokens | (n - 1)/n of its heads' k, v | 4 (n - 1)/n of x_bTD |
# | waits for it | the optimizer | the next stage | the layer, unless joined ahead | the experts | the scores | the next product |
#
# When: cross a slow wire with `data`
# if the batch is large, with `stage` if it is small (05 has the threshold): both send once where the
# others send in every layer. **TPU:** between slices `data` (6.25 GB/s a v5p chip against 90 a link);
# inside, links are alike, and a bad order costs hops. **One node of 8 H100:** any order, one wire of 450
# GB/s. **Two nodes:** `tensor` and `context` inside, `stage` or `data` across; `fsdp` across if each GPU
# has a 400 Gbit/s card of its own.
#
# In PyTorch's words a mesh is a `DeviceMesh`, and a line along an axis a process group. A spec is a list of
# placements, one for each axis of the mesh: `Shard(dim)`, `Replicate()`, or `Partial()` for a sum that is
# owed. HSDP is `fully_shard` on a mesh of two axes, (replicate, shard). "3D parallel" is data, tensor and
# pipeline.
#
# ## Three lines to keep
#
# 1. For each weight ask each axis: cut or copied? Along an axis where it is copied and tokens differ, its
#    gradient is added; a norm of gradients is added over the axes that cut.
# 2. The order on the grid decides which axis crosses the slow wire: let it be one that sends once a step
#    or once a stage, and scatter over the fast axis before you add over the slow one.
# 3. Two orders of a sum differ by a few 1e-7 in float32 and by 1e-15 in float64, a bug by the same in
#    both; set axes to 1 until it is gone, and you know which axis it is.
#
# **Sources.** HSDP and `set_requires_all_reduce`: [PyTorch on
# `fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html); sequence
# parallelism and its gains: [arXiv:2205.05198](https://arxiv.org/abs/2205.05198); stages, data and tensor
# composed on nodes: [arXiv:2104.04473](https://arxiv.org/abs/2104.04473); the [scaling book on
# training](https://jax-ml.github.io/scaling-book/training); JAX on
# [`shard_map`](https://docs.jax.dev/en/latest/notebooks/shard_map.html).
