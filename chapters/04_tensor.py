# %% [markdown]
# # 04 · Tensor parallelism
#
# Tensor parallelism (TP) shards the matrices of each layer, so that several devices compute *one* matmul
# together. Each device has some columns or rows of a matrix, and the devices exchange activations instead of
# weights.
#
# You want it if you have more devices than sequences, because FSDP cannot give a device less than one
# sequence, or if the gathered weights and the activations of one layer do not fit in a device's memory. The
# price is communication that hardly overlaps with compute. And mistakes are silent: if you shard a weight
# along the wrong dim, the shapes fit, JAX's checks pass, and the loss falls, in one example on this page
# even *below* that of the correct run.
#
# *Prerequisites:* chapters 01 (`shard_map`, the collectives) and 03 (FSDP). *Mesh:* `tensor=4`, simulated.
# *Runs in* 55 s on 2 cores. *Reading takes* 25 minutes, 55 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

from functools import cache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.lax import all_gather, axis_index, pmax, pmin, ppermute, psum, psum_scatter
from jax.sharding import PartitionSpec as P

from chapters import lesson, opening
from config import preset
from plan import planner
from plan.chips import hardware

# %% tags=["hide-input"]
eight, tokens, GiB = opening.DEVICES, 4096, 2**30
forward = opening.compute_ms(2 * opening.PARAMETERS * tokens)
# gather of the layer's weights; gather or reduce-scatter of the residual stream: bf16
weights_ms = opening.network_ms(7 / 8 * 2 * opening.PARAMETERS)
stream_ms = opening.network_ms(7 / 8 * 2 * tokens * opening.D)
stored = {"gradients": 4 * opening.PARAMETERS / eight / GiB,
          "optimizer state": 8 * opening.PARAMETERS / eight / GiB}  # fmt: skip
master, copy = 4 * opening.PARAMETERS / eight / GiB, 2 * opening.PARAMETERS / GiB
# saved per token in bf16: chapter 03
numbers = 6 * opening.D + 2 * opening.G * opening.K + 3 * opening.F
saved, streams = 2 * tokens * numbers / GiB, 4 * tokens * opening.D / GiB
compute, network, at, half = [], [], 0, forward / eight / 2
for collectives, halves in ((1, 1), (2, 1), (2, 1), (2, 1), (1, 2), (2, 2), (1, 0)):
    network.append(("", at, collectives * stream_ms))
    at += collectives * stream_ms
    compute.append(("", at, halves * half))
    at += halves * half

# %% tags=["hide-input"]
before = opening.Scene(
    "FSDP: seven GPUs have no tokens",
    stored | {"weights": master + copy, "activations": [saved] + [0] * 7},
    [("forward", 0, forward), ("backward", forward, 3 * forward)],
    [("", at, weights_ms, "fsdp") for at in (0, forward, 4 * forward - weights_ms)],
)
after = opening.Scene(
    "Tensor parallelism: all eight work",
    stored | {"weights": master + copy / eight, "activations": saved / eight + streams},
    compute, network)  # fmt: skip
title = "One sequence on eight GPUs: a quarter of the time"

# %% tags=["hide-input"] mystnb={"image": {"alt": "With FSDP, one GPU of eight computes for 7.2 ms and holds all activations. With tensor parallelism, all eight compute for 0.9 ms and communicate for 0.7 ms."}}
opening.before_after(before, after, title, "tensor")
left, right = plt.gcf().axes[2:]
left.text(4.5, 1, "overlapped", ha="center", va="center", size=8)
zoom = right.inset_axes([0.3, 0.3, 0.7, 0.62])  # the same bars, enlarged
for row, (bars, axis) in enumerate(((compute, ""), (network, "tensor"))):
    look = dict(fc=lesson.COLORS.get(axis, lesson.NEUTRAL), alpha=0.6, ec="k", lw=0.6)
    spans = [(begin, length) for _, begin, length in bars]
    zoom.broken_barh(spans, (row - 0.38, 0.76), **look)
zoom.set(xticks=[0, 0.5, 1, 1.5], yticks=[], xlim=(0, 1.05 * at), ylim=(1.6, -0.6))
zoom.tick_params(labelsize=8, length=2)
zoom.set_title("enlarged", size=8)

# %% tags=["remove-cell"]
assert sum(length for *_, length in network) == 11 * stream_ms
assert sum(length for *_, length in compute) == 8 * half
assert 4.3 < 4 * forward / at < 4.6

# %% [markdown]
# Both halves show one layer of Llama 3 8B, in a step on *one* sequence of 4,096 tokens, on a node of 8
# H100s, at peak speed: 989 TFLOP/s, and NVLink's **bandwidth** of 450 GB/s in each direction. The backward
# pass recomputes the layer (activation checkpointing, chapter 03). FSDP's communication overlaps with
# compute. Tensor parallelism's (red) is *exposed*: the next matmul waits for it. Each GPU computes for 0.9
# ms, and waits 0.7 ms.
#
# > **Predict.** Four sequences instead of one: how many times as many bytes does a device send *for each
# > FLOP* that it computes, with tensor parallelism?

# %% tags=["hide-input"]
mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
pair = lambda w_Df, w_fD, x_ND: psum(jax.nn.gelu(x_ND @ w_Df) @ w_fD, "tensor")
specs = dict(in_specs=(P(None, "tensor"), P("tensor"), P()), out_specs=P())
program = jax.jit(jax.shard_map(pair, mesh=mesh, **specs))
per_flop = []
for sequences in (1, 4):
    shapes = [jnp.zeros(shape) for shape in ((12, 48), (48, 12), (16 * sequences, 12))]
    found = lesson.compiled(program, mesh, *shapes)
    per_flop.append(found.total.wire_bytes / found.flops)
times = per_flop[1] / per_flop[0]

# %%
my_prediction = None  # times
lesson.predicted("bytes per FLOP, 4 sequences / 1", my_prediction, times, "times")

# %% tags=["remove-cell"]
assert times == 1

# %% [markdown]
# (Counted in a compiled MLP.) FSDP sends weights, whose size does not depend on the batch. Tensor
# parallelism sends activations, and those grow with the batch.
#
# ## One matmul, sharded two ways
#
# Take `y = x @ w` with N = 64 tokens of width D = 12, and F = 48 columns, on n = 4 devices. Each device
# stores a quarter of `w`, by columns (*column-parallel* in Megatron-LM) or by rows (*row-parallel*). An
# array's name ends with its dims; a lower-case letter is one device's shard: f = F/n, d = D/n.

# %%
n, D, F, TENSOR = 4, 12, 48, "tensor"
columns, rows, everywhere = P(None, TENSOR), P(TENSOR, None), P()


def devices(n):
    return jax.make_mesh((n,), (TENSOR,), axis_types=(jax.sharding.AxisType.Auto,))


def on_devices(function, ins, outs=everywhere, n=n):
    """Compile a function of one device's shards; `ins` are the arguments' specs."""
    split = jax.shard_map(function, mesh=devices(n), in_specs=ins, out_specs=outs)
    return jax.jit(split)


# %% tags=["hide-input"]
def draw(seed, *shape):
    return jax.device_get(jax.random.normal(jax.random.key(seed), shape))


error = lambda a, b: f"{abs(np.asarray(a) - np.asarray(b)).max():.1e}"

# %%
N = 64
x_ND, w_up_DF, w_down_FD = draw(0, N, D), draw(1, D, F) / D**0.5, draw(2, F, D) / F**0.5
y_NF = x_ND @ w_up_DF  # on one device
product = on_devices(lambda x, w: x @ w, (everywhere, columns), columns)
alone = on_devices(lambda x, w: (x @ w)[None], (columns, rows), P(TENSOR))
partial_nNF = alone(x_ND, w_up_DF)  # each device's own result, stacked
print("by columns, concatenated: off by", error(product(x_ND, w_up_DF), y_NF))
print("by rows, device 0 alone:  off by", error(partial_nNF[0], y_NF))
print("by rows, sum of all four: off by", error(partial_nNF.sum(0), y_NF))

# %% tags=["hide-input"] mystnb={"image": {"alt": "With w sharded by columns, x is replicated and y is sharded; by rows, x is sharded and y is a partial sum."}}
mesh, red = devices(n), lesson.COLORS[TENSOR]
title = "Sharded columns need no communication; sharded rows need a sum"
_, panels = lesson.panels(title, 2, 3, figsize=(6, 3.9))
lesson.slices(panels[0, 0], mesh, everywhere, "ND", "x")
lesson.slices(panels[0, 1], mesh, columns, "DF", "w by columns")
lesson.slices(panels[0, 2], mesh, columns, "NF", "y")
lesson.slices(panels[1, 0], mesh, columns, "ND", "x")
lesson.slices(panels[1, 1], mesh, rows, "DF", "w by rows")
axes = panels[1, 2]
lesson.blank(axes, xlabel="F", title="y")
lesson.box(axes, 0, 0, fc="#f3cfd0", lw=1, hatch="///")  # as in chapter 01
paper = {"facecolor": "white", "edgecolor": "none", "pad": 2}
says = "0, 1, 2, 3:\neach its own\npartial sum"
text = axes.text(0.5, 0.5, says, size=9, ha="center", va="center", bbox=paper)

# %% [markdown]
# By columns, each device has all D terms of its sums, so it computes complete columns of `y`, and sends
# nothing. By rows, it has d of the D terms, so every entry of its `y` is only a partial sum. The names say
# so: `x_Nd @ w_dF` sums over d, which is sharded. A sum over a sharded dim needs a `psum`, an all-reduce.
#
# ## Sum before a nonlinear function
#
# An MLP is two matmuls with a GELU between them. With FSDP, each device stores some rows of the first
# matrix, and gathers the others. To avoid this gather, multiply by the rows that the device has, continue
# with the second matrix, and sum at the end:


# %%
gelu, start = jax.nn.gelu, (w_up_DF, w_down_FD)


def added_at_the_end(w_up_dF, w_down_FD, x_Nd):
    return psum(gelu(x_Nd @ w_up_dF) @ w_down_FD, TENSOR)


def columns_then_rows(w_up_Df, w_down_fD, x_ND):
    return psum(gelu(x_ND @ w_up_Df) @ w_down_fD, TENSOR)


def dense(w_up_DF, w_down_FD, x_ND):
    return gelu(x_ND @ w_up_DF) @ w_down_FD


for size in (1, 4):
    network = on_devices(added_at_the_end, (rows, everywhere, columns), n=size)
    print(f"tensor={size}: off by", error(network(*start, x_ND), dense(*start, x_ND)))

# %% [markdown]
# A test on one device passes. So does JAX's check of varying values, because after the `psum` all devices
# *do* have the same result. But the GELU of a sum is not the sum of the GELUs: you must add the partial
# sums before the first nonlinear function.
#
# Would you notice in training? There are two tasks: predict cos(3x) of each coordinate of x, or of a mix of
# all.


# %% tags=["hide-input"]
def train(network, w, x, y, other=None, steps=300, rate=0.01):
    """Adam. Returns weights, losses, and losses of the same weights in `other`."""
    mean = lambda network, w: jnp.mean((network(w, x) - y) ** 2)

    def step(state, _):
        w, m, v = state
        loss, g = jax.value_and_grad(lambda w: mean(network, w))(w)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        down = lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8)
        return (jax.tree.map(down, w, m, v), m, v), (loss, mean(other or network, w))

    zeros = jax.tree.map(jnp.zeros_like, w)
    run = jax.jit(lambda w: jax.lax.scan(step, (w, zeros, zeros), length=steps))
    (w, _, _), (losses, elsewhere) = run(w)
    return w, losses, elsewhere


# %% tags=["hide-input"]
x, turn = draw(3, 512, D), draw(4, D, D) / D**0.5
right = on_devices(columns_then_rows, (columns, rows, everywhere))
wrong = on_devices(added_at_the_end, (rows, everywhere, columns))
on_right, on_wrong, on_one = (lambda w, x, f=f: f(*w, x) for f in (right, wrong, dense))
curves = {}
for task, seen in {"each coordinate": x, "a mix of all": x @ turn}.items():
    y = jnp.cos(3 * seen)
    _, correct, _ = train(on_right, start, x, y)
    _, broken, moved = train(on_wrong, start, x, y, on_one)
    curves[task] = correct, broken, moved
    ends = {"correct": correct, "summed at the end": broken, "on one device": moved}
    print(f"{task}:", {name: f"{loss[-1]:.2f}" for name, loss in ends.items()})
print(f"predicting 0: {jnp.mean(y**2):.2f}")

# %% tags=["hide-input"] mystnb={"image": {"alt": "On both tasks all training losses fall. On the first, the wrong network's loss falls further than the correct one's; on one device its weights get worse and worse."}}
title = "Both learn, and the wrong network may learn faster"
figure, panels = lesson.panels(title, 1, 2, figsize=(6, 3.4), sharey=True)
for axes, (task, (correct, broken, moved)) in zip(panels, curves.items(), strict=True):
    axes.plot(correct, color=lesson.NEUTRAL, label="correct, tensor=4")
    axes.plot(broken, color=red, label="summed at the end, tensor=4")
    axes.plot(moved, "--", color=red, label="the same weights on one device")
    axes.set(xlabel="step", ylim=(0, 1.5), title=f"cos(3x) of {task}")
    assert broken[-1] < broken[0] / 2 and moved[-1] > 1.5 * broken[-1]
panels[0].set_ylabel("mean squared error")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left")
assert curves["each coordinate"][1][-1] < curves["each coordinate"][0][-1]
assert all(curve[2][-1] > jnp.mean(y**2) for curve in curves.values())

# %% [markdown]
# In the wrong network, each device has its own 48 hidden units, which see only 3 of the 12 coordinates.
# That suits the first task, where its loss is lower. On the second task its loss is higher, but falls too.
# On one device its weights are worse than predicting 0: compare the output with one device, and you see it
# before training.
#
# ## Which order?
#
# Two orders are correct. With **columns, then rows**, this device's rows of the second matrix need exactly
# the columns that it has computed: one `psum` of [N, D], at the end. With **rows, then columns**, there is
# one `psum` of [N, F], before the GELU, and a device has d columns of x and of the result.
#
# > **Predict.** F = 4D. With rows, then columns, how many times as many bytes does a device send as with
# > columns, then rows?


# %%
def rows_then_columns(w_up_dF, w_down_Fd, x_Nd):
    return gelu(psum(x_Nd @ w_up_dF, TENSOR)) @ w_down_Fd


# %% tags=["hide-input"]
cut = {columns_then_rows: (columns, rows, everywhere, everywhere),
       rows_then_columns: (rows, columns, columns, columns)}  # fmt: skip
sends, kinds = [], []
for function, (*ins, out) in cut.items():
    network = on_devices(function, tuple(ins), out)
    assert lesson.same(network(*start, x_ND), dense(*start, x_ND))
    found = lesson.compiled(network, mesh, *start, x_ND)
    sends.append(found.total.wire_bytes)
    kinds.append(found)
times = sends[1] / sends[0]

# %%
my_prediction = None  # times
for found in kinds:
    lesson.listed(found)
lesson.predicted("rows first / columns first", my_prediction, times, "times")

# %% tags=["remove-cell"]
assert times == F / D

# %% [markdown]
# Megatron-LM uses columns, then rows.
#
# ### Attention is the same kind of pair
#
# The matrices for queries, keys and values are sharded by columns, the output matrix by rows. The softmax
# between them needs one head at a time, so each device gets *whole heads*. The limit is the number of key
# and value heads, often 8. Beyond it, a library raises an error or [replicates
# them](https://docs.vllm.ai/en/v0.9.2/api/vllm/model_executor/models/gemma.html). And code inside
# `shard_map` must count its own heads: a model in vLLM used the total number, every shape fit, and the
# output was wrong ([PR 39707](https://github.com/vllm-project/vllm/pull/39707)).
#
# ## Sequence parallelism between blocks
#
# After the `psum`, every device holds the same activations, [B, T, D]: B sequences of T positions, the
# *residual stream*. All n devices normalize it, add to it, and save it for the backward pass. But an
# all-reduce is a reduce-scatter followed by an all-gather. **Sequence parallelism** does the norms and
# residual additions between the two: a device stores t = T/n of the positions, and gathers when the next
# matmul needs all. This is half of a transformer block, attention or the MLP:

# %% tags=["hide-input"]
STEPS = [("x_BtD", "norm, residual sum", 1), ("x_BTD", "all_gather", 4),
         ("h heads, or f units", "columns; softmax or GELU", 2),
         ("partial_BTD", "rows", 3), ("x_BtD", "psum_scatter", 1)]  # fmt: skip


def holdings(axes, left, y, i, look):
    """Draw what device i of n holds of an array of positions and width."""
    lesson.box(axes, left, y, 1, 0.9, ec=lesson.NEUTRAL, ls=":", lw=1)
    part = (left, y, 1, 0.9)
    if look == 1:
        part = left, y + 0.9 * (1 - (i + 1) / n), 1, 0.9 / n
    elif look == 2:
        part = left + i / n, y, 1 / n, 0.9
    fill = "#f3cfd0" if look == 3 else "#e08486"  # tints of the color of `tensor`
    lesson.box(axes, *part, "partial\nsum" if look == 3 else "", 8, fc=fill, lw=1)


# %% tags=["hide-input"] mystnb={"image": {"alt": "Four devices, one per column: each holds a quarter of the positions; after the gather all positions; then a quarter of the heads or hidden units; a full-size partial sum; after the reduce-scatter a quarter of the positions again."}}
figure, axes = plt.subplots(figsize=(6, 5))
for row, (array, made_by, look) in enumerate(STEPS):
    y, colour = -1.2 * row, red if "_" in made_by else "k"
    axes.text(0, y + 0.62, array, size=10, va="center", weight="bold")
    axes.text(0, y + 0.25, made_by, size=9, va="center", color=colour)
    for i in range(n):
        holdings(axes, 2.9 + 1.15 * i, y, i, look)
for i in range(n):
    axes.text(3.4 + 1.15 * i, 1.05, f"device {i}", ha="center", size=9)
note = "down: positions T; across: width D, heads or units"
axes.text(2.9, -4.95, note, size=9, va="top")
title = "Between matmuls, positions are sharded; inside, heads or units"
axes.set(xlim=(0, 7.5), ylim=(-4.9, 1.3), title=title)
axes.axis("off")

# %% [markdown]
# ## The program by hand
#
# This is a whole block, which you can paste into an empty file. Two functions differ from the program for
# one device: `join` gathers all positions, and `add` adds the partial sums and returns this device's.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def normed(x, gain_D):
    return gain_D * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attention(w, x_BTD):  # with h = H/n whole heads of width K
    q, k, v = jnp.einsum("BTD,zDhK->zBThK", x_BTD, w["qkv_3DhK"])
    scores_BhTS = jnp.einsum("BThK,BShK->BhTS", q, k) / k.shape[-1] ** 0.5
    past_TS = jnp.tril(jnp.ones(scores_BhTS.shape[2:], bool))
    seen_BhTS = jax.nn.softmax(jnp.where(past_TS, scores_BhTS, -1e9))
    heads_BThK = jnp.einsum("BhTS,BShK->BThK", seen_BhTS, v)
    return jnp.einsum("BThK,hKD->BTD", heads_BThK, w["out_hKD"])  # h summed: partial


def feed_forward(w, x_BTD):  # with f = F/n hidden units
    return jax.nn.gelu(x_BTD @ w["up_Df"]) @ w["down_fD"]  # f summed: partial


def block(w, x, join, add):
    x = x + add(attention(w, join(normed(x, w["gains_2D"][0]))))
    return x + add(feed_forward(w, join(normed(x, w["gains_2D"][1]))))


# %% tags=["by-hand"]
join = lambda x_BtD: jax.lax.all_gather(x_BtD, "tensor", axis=1, tiled=True)
add = lambda y: jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
loss_alone = lambda w, x, y: jnp.mean((block(w, x, lambda x: x, lambda x: x) - y) ** 2)


def loss_of_slices(w, x_BtD, y_BtD):
    errors = jnp.sum((block(w, x_BtD, join, add) - y_BtD) ** 2)
    return jax.lax.psum(errors, "tensor") / (4 * x_BtD.size)  # over 4 devices


cuts = {"gains_2D": P(), "qkv_3DhK": P(None, None, "tensor"), "out_hKD": P("tensor"),
        "up_Df": P(None, "tensor"), "down_fD": P("tensor")}  # fmt: skip
sizes = {"gains_2D": (2, 32), "qkv_3DhK": (3, 32, 8, 4), "out_hKD": (8, 4, 32),
         "up_Df": (32, 128), "down_fD": (128, 32)}  # fmt: skip
normal = lambda i, shape: jax.random.normal(jax.random.key(i), shape)
w = {name: normal(i, shape) / 5 for i, (name, shape) in enumerate(sizes.items())}
x_BTD, y_BTD = normal(7, (2, 2, 16, 32))
mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))

# %% tags=["by-hand"]
sliced = P(None, "tensor")
specs = dict(in_specs=(cuts, sliced, sliced), out_specs=P())
on_mesh = jax.shard_map(loss_of_slices, mesh=mesh, **specs)
gradients = lambda loss: jax.jit(jax.value_and_grad(loss))(w, x_BTD, y_BTD)
wanted, found = gradients(loss_alone), gradients(on_mesh)
for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
    assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5), "differs from one device"
print(f"loss {found[0]:.5f}, and {len(found[1])} gradients match a single-device run")

# %% [markdown]
# JAX derives the collectives for gradients: the backward pass of a gather is a reduce-scatter, and vice
# versa. It also adds the gradients of the gains.
#
# > **Predict.** The block's forward pass has two gathers and two reduce-scatters. How many of both does a
# > training step have in total, if it saves only the block's input and recomputes the block in the backward
# > pass? (Does the backward pass need the block's result?)


# %% tags=["hide-input"]
def collectives_of_a_step(wrap):
    layer = wrap(lambda w, x_BtD: block(w, x_BtD, join, add))
    loss = lambda w, x_BtD: psum(jnp.sum(layer(w, x_BtD) ** 2), TENSOR)
    loss = jax.shard_map(loss, mesh=mesh, in_specs=(cuts, sliced), out_specs=P())
    found = lesson.compiled(jax.grad(loss, argnums=(0, 1)), mesh, w, x_BTD)
    kinds = found.totals_by("kind").items()
    return {k: int(x.count) for k, x in kinds if k != "all-reduce"}


recomputed, saved = (collectives_of_a_step(f) for f in (jax.checkpoint, lambda f: f))
count = sum(recomputed.values())

# %%
my_prediction = None  # gathers and reduce-scatters
lesson.predicted("gathers and reduce-scatters, recomputed", my_prediction, count)
print("recomputed:", recomputed, " all saved:", saved)

# %% tags=["remove-cell"]
assert (count, sum(saved.values())) == (11, 8)

# %% [markdown]
# If all activations are saved, there are 4 forward and 4 backward. With recomputation, both gathers run
# again, but only *one* reduce-scatter: the first one returns the MLP's input, the second one the block's
# result, which the backward pass does not need.
#
# What does sequence parallelism save? Here are sixteen such blocks with recomputation, compiled but not
# run. The residual stream is either replicated (no `join`, and `add` is a `psum`) or sharded.


# %% tags=["hide-input"]
def stacked(n, sliced, L=16, B=2, T=256, D=64, F=128):
    """Bytes that a training step of L blocks sends, and its temporary memory in MiB."""
    ways = (join, add) if sliced else (lambda x: x, lambda y: psum(y, TENSOR))
    layer = jax.checkpoint(lambda x, w: (block(w, x, *ways), None))
    total = lambda x: psum(jnp.sum(x**2), TENSOR) if sliced else jnp.sum(x**2)
    loss = lambda w, x: total(jax.lax.scan(layer, x, w)[0])
    stream = P(None, TENSOR) if sliced else P()
    ins = {name: P(None, *cut) for name, cut in cuts.items()}, stream
    step = jax.grad(jax.shard_map(loss, mesh=devices(n), in_specs=ins, out_specs=P()))
    shapes = [(2, D), (3, D, 8, 8), (8, 8, D), (D, F), (F, D)]
    w = {name: jnp.zeros((L, *shape)) for name, shape in zip(cuts, shapes, strict=True)}
    program = jax.jit(step).lower(w, jnp.zeros((B, T, D))).compile()
    sent = lesson.ledger.read(program.as_text(), devices(n)).total.wire_bytes
    return sent, program.memory_analysis().temp_size_in_bytes / 2**20


for size in (2, 8):
    (whole, m_whole), (slices, m_slices) = stacked(size, False), stacked(size, True)
    print(f"tensor={size}: replicated {m_whole:.1f} MiB, sharded {m_slices:.1f} MiB;",
          f"sharded sends {slices / whole:.2f} times the bytes")  # fmt: skip

# %% [markdown]
# Each of the 16 blocks saves its input, 2 MiB in total, and sequence parallelism shards them. Without it, a
# block has five all-reduces, two in the forward pass, one recomputed and two in the backward pass, which
# send as much as 10 reduce-scatters or gathers. With it there are 11.
#
# ## Vocabulary-parallel cross-entropy
#
# The unembedding (LM head) is sharded by columns, so each device has v = V/n of every token's V logits. The
# loss needs the logarithm of a sum over all V. Devices add the sums of their shards, and send only three
# values per token: the largest logit, the sum, and the target's logit.


# %%
def cross_entropy_gathered(w_Dv, x_ND, targets_N):
    logits_NV = all_gather(x_ND @ w_Dv, TENSOR, axis=1, tiled=True, to="invarying")
    at_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_NV, axis=1) - at_N


def cross_entropy(w_Dv, x_ND, targets_N):
    logits_Nv = x_ND @ w_Dv
    v = logits_Nv.shape[1]
    top_N = pmax(jax.lax.stop_gradient(logits_Nv.max(axis=1)), TENSOR)
    sum_N = psum(jnp.exp(logits_Nv - top_N[:, None]).sum(axis=1), TENSOR)
    place_N = targets_N - axis_index(TENSOR) * v
    ours_N = jnp.take_along_axis(logits_Nv, place_N[:, None] % v, axis=1)[:, 0]
    at_N = psum(jnp.where((place_N >= 0) & (place_N < v), ours_N, 0), TENSOR)
    return jnp.log(sum_N) + top_N - at_N


# %% [markdown]
# > **Predict.** `llama3_8b` has V = 128,256 and D = 4,096. At tensor=4 and in float32, how many times as many
# > bytes does a device send in the forward pass if it gathers the logits?

# %% tags=["hide-input"]
cut, tokens_N = (columns, everywhere, everywhere), np.arange(N) % F
shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
llama = shape(4096, 128_256), shape(1024, 4096), jax.ShapeDtypeStruct((1024,), int)
sent, both = [], []
for function in (cross_entropy_gathered, cross_entropy):
    program = on_devices(function, cut)
    both.append(program(w_up_DF, x_ND, tokens_N))
    sent.append(lesson.compiled(program, mesh, *llama).total.wire_bytes)
assert lesson.same(*both)
times = sent[0] / sent[1]

# %%
my_prediction = None  # times
print(f"for 1,024 tokens: gathered {sent[0]:,} bytes, three values {sent[1]:,}")
lesson.predicted("gathered logits / three values", my_prediction, times, "times")

# %% tags=["remove-cell"]
assert times == 128_256 / 6

# %% [markdown]
# The all-gather sends V values per token once, and the all-reduces send 3 values twice: V/6.
#
# ## What it costs
#
# Take one layer with recomputation, in bfloat16 (2 bytes), on n devices that work together on N tokens. A
# device does *peak* FLOP/s, and *bandwidth* counts all its neighbors on the axis: 2 links of 90 GB/s in a
# ring of v5p, 450 GB/s through NVLink's switch on H100. In a training step,
#
# - compute is 8 FLOPs per parameter and token (2 forward, 2 recomputed, 4 backward), shared by n devices:
#   **8 · parameters · N / (n · peak)** seconds;
# - communication is 11 gathers or reduce-scatters of the residual stream, each of which sends (n - 1)/n · 2
#   N D bytes: **22 (n - 1) N D / (n · bandwidth)** seconds.
#
# Communication over compute is (11/4) (n - 1) · (D / parameters) · (peak / bandwidth): no batch size
# changes it. So the rule limits n. Communication takes as long as compute at **n = 1 + (4/11) · (parameters
# / D) · (bandwidth / peak)**: a wider model allows a larger n, because the parameters of a layer grow with
# D². The rule assumes full recomputation, full bandwidth, no overlap, and no other compute in the layer.
# The planner counts every matmul:

# %% tags=["hide-input"]
D_llama, parameters = opening.D, opening.PARAMETERS
settings = {"data.batch_size": 64, "data.seq_len": 1024, "work.remat": "full"}
settings |= {"work.gather": "layer", "work.tensor_exchange": "gather"}
for chips, m, n_ in (("v5p:4x4x4", 16, 4), ("h100:8", 1, 8)):
    cfg = preset("llama3_8b", mesh=f"fsdp={m},tensor={n_}", **settings)
    place = hardware.Topology.parse(chips)
    peak = place.chip.peak_flops_per_s
    bandwidth = hardware.layout(cfg.mesh, place)["tensor"].bytes_per_s
    limit = 1 + 4 / 11 * parameters / D_llama * bandwidth / peak
    plan = planner.plan(cfg, chips)
    layers = sum(x for part, x in plan.flops.items() if part != "logits") / peak
    planned = plan.lower_bound(alone=True)["tensor"] / layers
    ruled = (n_ - 1) / (limit - 1)
    print(f"{chips}: peak/bandwidth {peak / bandwidth:,.0f}; equal at n = {limit:.1f}")
    print(f"    tensor={n_}: {ruled:.2f} of compute (planner: {planned:.2f})")
    assert abs(planned / ruled - 1) < 0.1, "rule and planner disagree"

# %% [markdown]
# (The planner's compute has attention's scores, and skips the recomputation of the MLP's last matmul.
# Neither number has the logits.)
#
# So `tensor` slows down a step that has enough tokens for FSDP, because FSDP's communication can overlap
# completely. It is faster if each chip has few tokens (chapter 09, "Thresholds"). Two other reasons are
# more common. With **more chips than sequences**, `fsdp` cannot split the batch any further. And `tensor`
# saves **memory**: gathered weights and the activations inside a block are n times smaller.
#
# Across two nodes, `tensor` costs more than its bytes suggest (chapter 05).
#
# ## Overlap the gather with the matmul
#
# A matmul after a gather waits for the last byte, but a device's own positions need no communication. So
# send the positions around a ring in chunks, and multiply each chunk when it arrives. This is a *collective
# matmul* ([The timeline of a layer](../layer_timeline.md) shows both versions):


# %%
def gathered(x_tD, w_Df):  # t = T/n positions of one sequence
    return all_gather(x_tD, TENSOR, axis=0, tiled=True) @ w_Df


def ring_matmul(x_tD, w_Df):
    here, chunks = axis_index(TENSOR), []
    for _ in range(n):
        chunks.append(x_tD @ w_Df)  # while the next chunk is in flight
        x_tD = ppermute(x_tD, TENSOR, [(i, (i + 1) % n) for i in range(n)])
    in_order = jnp.stack(chunks)[(here - jnp.arange(n)) % n]
    return in_order.reshape(-1, w_Df.shape[1])


for function in (gathered, ring_matmul):
    run = on_devices(function, (rows, columns), columns)
    assert lesson.same(run(x_ND, w_up_DF), y_NF)
    lesson.listed(lesson.compiled(run, devices(n), x_ND, w_up_DF))

# %% [markdown]
# The ring sends the same bytes in n - 1 messages (`ppermute`), and each message overlaps with a matmul.
# With f columns per device, the matmul of t positions takes 2 t D f / peak seconds, and sending them in
# bfloat16 takes 2 t D / bandwidth. So the communication can overlap fully if **f > peak / bandwidth**:
# 2,198 columns on H100, and 2,550 on v5p, if a ring sends half of each chunk over each of two links
# (`ring_matmul` uses one, and needs 5,100). At tensor=2, `llama3_8b` has 14,336 in the MLP's gate and up
# matrices.
#
# The time saved is less, because n small matmuls take longer than a large one, and because the compiler has
# to start each `ppermute` before the matmul ([on v5e](../seconds.md), it doesn't). PyTorch's "async TP"
# [saves](https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487)
# up to 8% of a step.
#
# ## Exercise 1: where does the bias go?
#
# An MLP ends with a bias, `bias_D`, which is the same on all devices. Each device has its partial sum of
# the output, [B, T, D]. Return this device's shard of the result, [B, t, D].

# %% tags=["hide-input"]
stream_BTD, bias_D, axis_size = draw(5, 4, 24, D), draw(7, D), jax.lax.axis_size
scatter = lambda y, dim=1: psum_scatter(y, TENSOR, scatter_dimension=dim, tiled=True)
on_first = lambda b: b * (axis_index(TENSOR) == 0)


def own_slice(y):
    t = y.shape[1] // axis_size(TENSOR)
    return jax.lax.dynamic_slice_in_dim(y, axis_index(TENSOR) * t, t, axis=1)


def partial_sums(n):
    """Each device's partial sum, stacked: [n, B, T, D]."""
    up_DF, down_FD = start
    parts = zip(jnp.split(up_DF, n, axis=1), jnp.split(down_FD, n), strict=True)
    return jnp.stack([dense(*part, stream_BTD) for part in parts])


# %% tags=["hide-input"]
FINISH_HINTS = [
    (lambda y, b: scatter(y + b),
     "The sum is right, but an offset grows with n. How often is the bias added?"),
    (lambda y, b: scatter(y), "The bias is missing."),
    (lambda y, b: scatter(y) / axis_size(TENSOR) + b,
     "A mean of partial sums is 1/n of the sum."),
    (lambda y, b: psum(y, TENSOR) + b,
     "All positions are right. Return only this device's own positions."),
    (lambda y, b: y + b, "Every device returns its own partial sum."),
    (lambda y, b: own_slice(y) + b, "The right shape, but nothing added."),
    (lambda y, b: scatter(y) + on_first(b),
     "Device 0's positions have the bias. What about the other devices?"),
]  # fmt: skip


# %% tags=["hide-input"]
@cache
def finished(answer, n):
    """Compile what each of n devices returns, of shape [n, B, T/n, D]."""
    branch = lambda partials, bias_D: lesson.answered(answer)(partials[0], bias_D)
    return lesson.on_each(branch, devices(n), (P(TENSOR), everywhere))


def check_finish(answer):
    run = lambda answer: lambda n: finished(answer, n)(partial_sums(n), bias_D)
    right = lambda n: jnp.stack(jnp.split(partial_sums(1)[0] + bias_D, n, axis=1))
    cases = [(2,), (4,)]
    line = lesson.diagnose(answer, cases, right, FINISH_HINTS, "Right", run=run)
    if line.startswith("Not yet: it is wrong"):
        return f"{line} On 4 devices it is {lesson.ratio(run(answer)(4), right(4))}."
    if line != "Right":
        return line
    found = lesson.compiled(finished(answer, 4), devices(4), partial_sums(4), bias_D)
    times = found.total.wire_bytes / (3 / 4 * stream_BTD.nbytes)
    if times > 1.1:
        many = f"{times:.3g} times the bytes"
        return f"The right numbers, but {many}. What do you send but not use?"
    return "Right on 2 and 4 devices. What adds up the gradient of the bias?"


# %%
def finish_row_parallel(partial_BTD, bias_D):
    return ...


print(check_finish(finish_row_parallel))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return psum_scatter(partial_BTD, TENSOR, scatter_dimension=1, tiled=True) + bias_D`: add it once, after
# the sum. Each device's positions give the bias a partial gradient, and JAX adds them.
#
# [slapo](https://github.com/awslabs/slapo/issues/10) added the bias n times, which you don't see at first
# if it is zero. After [the fix](https://github.com/awslabs/slapo/pull/23), with sharded positions, its
# partial gradients were never added.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_finish, *FINISH_HINTS, (finish_row_parallel, "Nothing there"),
              (lambda y, b: scatter(y) + b, "Right on"),
              (lambda y, b: scatter(y + b / axis_size(TENSOR)), "Right on"),
              (lambda y, b: scatter(y + on_first(b)), "Right on"),
              (lambda y, b: own_slice(psum(y, TENSOR)) + b, "2 times the bytes"),
              (lambda y, b: scatter(y) + psum(b, TENSOR), "offset grows"),
              (lambda y, b: 3 * (scatter(y) + b), "3 times too big"),
              (lambda y, b: (scatter(y) + b) / axis_size(TENSOR), "1/4 of it"),
              (lambda y, b: scatter(y, 3) + b, "It stops"),
              (lambda y, b: jnp.concatenate([y, y], 1) + b,
               "your result has shape"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: two matrices in one
#
# The gated MLP of chapter 01's bug stores its gate and up matrices as one matrix with 2F columns, [gate |
# up]. Suppose that you have to keep it. Each device gets 2F/n adjacent columns, and `fused` uses the first
# half of them as gate. In which order must you store the 2F columns?


# %%
def fused(w_both_D2f, w_down_fD, x_ND):
    gate_Nf, up_Nf = jnp.split(x_ND @ w_both_D2f, 2, axis=1)
    return psum(jax.nn.silu(gate_Nf) * up_Nf @ w_down_fD, TENSOR)


# %% tags=["hide-input"]
networks = {n: on_devices(fused, (columns, rows, everywhere), n=n) for n in (1, 2, 4)}
both_D2F, back_FD, rows_ND = draw(8, 6, 24), draw(9, 12, 6), draw(10, 10, 6)


def run_fused(order):
    def run(F, n):
        places = jnp.ravel(jnp.asarray(order(F, n)))
        if sorted(places.tolist()) != list(range(2 * F)):
            raise ValueError(f"return the numbers 0 to {2 * F - 1}, each once")
        return networks[n](both_D2F[:, places], back_FD, rows_ND)

    return run


pieces = lambda F, n: jnp.arange(2 * F).reshape(2, n, F // n)  # matrix, device, ..
inverse = lambda F, n: jnp.arange(2 * F).reshape(n, 2, F // n)
strided = lambda F, n: jnp.arange(2 * F).reshape(2, F // n, n).transpose(0, 2, 1)
by_device = lambda pieces: pieces.transpose(1, 0, 2)
OTHER = "Gates match ups, but are not on the device with their row of `w_down_fD`."

# %% tags=["hide-input"]
ORDER_HINTS = [
    (pieces, "This is the original order. With n = 2, what does device 0 get?"),
    (lambda F, n: pieces(F, n)[::-1], "Up before gate, still on two devices."),
    (lambda F, n: pieces(F, n).reshape(2, F).T,
     "Every gate is next to its up. Where does `fused` expect them?"),
    (lambda F, n: by_device(inverse(F, n)),
     "Right on 2 devices, wrong on 4. Is this the order, or its inverse?"),
    (lambda F, n: by_device(pieces(F, n)[::-1]), "Right pairs, but up is first."),
    (lambda F, n: by_device(pieces(F, n)[:, ::-1]), OTHER),
    (lambda F, n: by_device(strided(F, n)), OTHER),
]  # fmt: skip
check_order = lesson.checker(
    [(12, 2), (12, 4)], lambda F, n: networks[1](both_D2F, back_FD, rows_ND),
    ORDER_HINTS,
    "Right on 2 and 4 devices. To load this checkpoint, what must you know?",
    run=run_fused)  # fmt: skip


# %%
def order(F, n):
    """Return the column of [gate | up] to store at each place: 2F numbers."""
    return ...


print(check_order(order))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jnp.arange(2 * F).reshape(2, n, F // n).transpose(1, 0, 2).ravel()`: for each device its gate
# columns, then its up columns. The stored order now depends on n. (An array [D, 2, F] that is sharded along
# F needs no special order.)
#
# In the original order, each device multiplies gate columns by other gate columns: a different network,
# which learns too. In 2022, a model trained at tensor=4 gave results "like randomly selected" at tensor=1,
# and [the first answer](https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/338) was that
# floating-point sums depend on their order.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_order, *ORDER_HINTS, (order, lesson.NOTHING),
              (lambda F, n: [...], "Nothing"),
              (lambda F, n: by_device(pieces(F, n)), "Right on 2 and 4"),
              (lambda F, n: by_device(pieces(F, n)).ravel(), "Right on 2 and 4"),
              (lambda F, n: list(range(2 * F)), "original order"),
              (lambda F, n: by_device(pieces(F, 2)), "though not in every case"),
              (lambda F, n: jnp.arange(F), "each once"))  # fmt: skip

# %% [markdown]
# ## Exercise 3: the most likely token
#
# Greedy sampling needs the token id with the largest logit, and each device has v of the V logits. Return
# one id for each of the N tokens, the same on every device. On 4 devices, each device may send at most 16
# bytes per token. Break ties by the smallest id, as `jnp.argmax` does. `pmax` and `pmin` work like `psum`,
# and `axis_index(TENSOR)` is a device's index.

# %% tags=["hide-input"]
logits_NV = jnp.round(4 * draw(11, 24, 32)) / 4  # coarse, so that some are equal
ids_N = jnp.argmax(logits_NV, axis=1)
best = lambda x: jnp.argmax(x, axis=1)
lowest = lambda loser: lambda id, mine: pmin(jnp.where(mine, id, loser), TENSOR)


@cache
def sampler(answer, n):
    """What each of n devices returns, of shape [n, N]."""
    return lesson.on_each(answer, devices(n), (columns,))


def by_id(reduce, offset=1):
    """An answer; `reduce` gets a device's best id, and if its logit is the largest."""

    def argmax_sharded(x):
        top, v = jnp.max(x, axis=1), x.shape[1]
        id = best(x) + offset * axis_index(TENSOR) * v
        return reduce(id, top == pmax(top, TENSOR))

    return argmax_sharded


OWN = "Each device returns its own best id. Which has the largest logit?"
FROM_0 = "Every device counts its ids from 0, and you return that count."

# %% tags=["hide-input"]
ID_HINTS = [
    (best, OWN), (lambda x: best(x) + axis_index(TENSOR) * x.shape[1], OWN),
    (by_id(lambda id, mine: pmax(id, TENSOR), 0),
     "The largest of the ids. Whose logit is largest?"),
    (by_id(lambda id, mine: pmax(id, TENSOR)),
     "Always the last device's id: ids are not logits."),
    (by_id(lambda id, mine: pmin(id, TENSOR)),
     "Always the first device's id: ids are not logits."),
    (by_id(lambda id, mine: psum(id, TENSOR)), "A sum of ids is not an id."),
    (lambda x: by_id(lowest(999))(x) % x.shape[1], FROM_0),
    (by_id(lowest(999), offset=0), FROM_0),
    (by_id(lambda id, mine: psum(id * mine, TENSOR)),
     "Fine until two devices share the maximum."),
]  # fmt: skip

# %% tags=["hide-input"]
ID_HINTS += [
    (by_id(lambda id, mine: pmax(id * mine, TENSOR)),
     "Right, except for equal logits."),
    (by_id(lambda id, mine: pmin(id * mine, TENSOR)),
     "0 is an id, too. What should others send?"),
    (lambda x: by_id(lowest(x.shape[1]))(x), "Others send a valid id."),
    (lambda x: pmax(jnp.max(x, axis=1), TENSOR),
     "These are logits. Which ids have them?"),
]  # fmt: skip


def check_argmax(answer):
    run = lambda answer: lambda n: sampler(answer, n)(logits_NV)
    right = lambda n: jnp.stack([ids_N] * n)
    line = lesson.diagnose(answer, [(2,), (4,)], right, ID_HINTS, "Right", run=run)
    if line != "Right":
        return line
    found = lesson.compiled(sampler(answer, 4), devices(4), logits_NV)
    sent = found.total.wire_bytes / len(ids_N)
    verdict = "at most 16." if sent <= 16 else "that is over 16. What must you send?"
    return f"The right ids, with {sent:.0f} bytes per token on 4 devices: {verdict}"


# %%
def argmax_sharded(logits_Nv):
    return ...


print(check_argmax(argmax_sharded))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# top_N = jnp.max(logits_Nv, axis=1)
# token_N = jnp.argmax(logits_Nv, axis=1) + axis_index(TENSOR) * logits_Nv.shape[1]
# return pmin(jnp.where(top_N == pmax(top_N, TENSOR), token_N, 2**30), TENSOR)
# ```
#
# These are two all-reduces of one value: 12 bytes per token, for any V.
# </details>

# %% tags=["remove-cell"]
whole = lambda x, **to: all_gather(x, TENSOR, axis=1, tiled=True, **to)
lesson.expect(check_argmax, *ID_HINTS, (by_id(lowest(2**30)), "with 12 bytes"),
              (lambda x: best(whole(x, to="invarying")), "What must you send"),
              (lambda x: best(whole(x)), "What must you send"),
              (argmax_sharded, "Nothing"),
              (lambda x: pmax(x), "It stops"))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# A colleague changes the block to *multi-query attention* (MQA): all H query heads share one key head and
# one value head. As in a PyTorch job, each device has its own tensors, here stacked along a first dim.
# After training, another job evaluates the checkpoint on one device.

# %%
H, K = 8, 8
SPLIT = {"gain_D": None, "query_DhK": 1, "kv_2DK": None, "out_hKD": 0,
         "gain_mlp_D": None, "up_Df": 1, "down_fD": 0}  # fmt: skip


def to_devices(w, n):
    """Stack what each of n devices stores: a shard, or the whole array."""
    parts = lambda a, dim: [a] * n if dim is None else np.split(a, n, axis=dim)
    return {name: np.stack(parts(a, SPLIT[name])) for name, a in w.items()}


def checkpoint(stored):
    """The arrays for one device."""
    whole = lambda a, dim: a[0] if dim is None else np.concatenate(a, axis=dim)
    return {name: whole(np.asarray(a), SPLIT[name]) for name, a in stored.items()}


# %%
def multi_query(w, x_BTD):
    """Causal attention: h = H/n query heads, with one head of keys and values."""
    q_BThK = jnp.einsum("BTD,DhK->BThK", x_BTD, w["query_DhK"])
    k_BTK, v_BTK = jnp.einsum("BTD,zDK->zBTK", x_BTD, w["kv_2DK"])
    scores_BhTS = jnp.einsum("BThK,BSK->BhTS", q_BThK, k_BTK) / K**0.5
    past_TS = jnp.tril(jnp.ones(scores_BhTS.shape[2:], bool))
    seen_BhTS = jax.nn.softmax(jnp.where(past_TS, scores_BhTS, -1e9))
    heads_BThK = jnp.einsum("BhTS,BSK->BThK", seen_BhTS, v_BTK)
    return jnp.einsum("BThK,hKD->BTD", heads_BThK, w["out_hKD"])


def mqa_block(w, x_BtD):
    x_BtD += add(multi_query(w, join(normed(x_BtD, w["gain_D"]))))
    return x_BtD + add(feed_forward(w, join(normed(x_BtD, w["gain_mlp_D"]))))


# %%
def gradients(w, x_BtD, y_BtD):
    """Loss of the whole batch, and the gradients of this device's arrays."""

    def loss(w):
        errors = psum(jnp.sum((mqa_block(w, x_BtD) - y_BtD) ** 2), TENSOR)
        return errors / (x_BtD.size * jax.lax.axis_size(TENSOR))

    loss, grads = jax.value_and_grad(loss)(w)
    added = lambda g: psum(g, TENSOR) if g.ndim == 1 else g
    return loss, jax.tree.map(added, grads)


def step(state, batch, rate=0.01):
    w, m, v = state
    loss, g = gradients(w, *batch)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
    down = lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8)
    return (jax.tree.map(down, w, m, v), m, v), loss


# %% tags=["hide-input"]
shapes = {"gain_D": (D,), "query_DhK": (D, H, K), "kv_2DK": (2, D, K),
          "out_hKD": (H, K, D), "gain_mlp_D": (D,), "up_Df": (D, F),
          "down_fD": (F, D)}  # fmt: skip
FAN_IN = {"out_hKD": H * K, "down_fD": F}


def begin(seed, scale):
    """Weights of one device: normal with standard deviation scale / sqrt(inputs)."""
    std = lambda name: scale / FAN_IN.get(name, D) ** 0.5
    ones = lambda shape: np.ones(shape, np.float32)
    return {name: ones(shape) if len(shape) == 1 else std(name) * draw(seed + i, *shape)
            for i, (name, shape) in enumerate(shapes.items())}  # fmt: skip


# %% tags=["hide-input"]
def train_on(n, w, xs, ys):
    """Run `step` on n devices for each batch. Returns the checkpoint and the losses."""

    def run(stored, xs, ys):
        w = jax.tree.map(lambda a: a[0], stored)
        zeros = jax.tree.map(jnp.zeros_like, w)
        (w, _, _), losses = jax.lax.scan(step, (w, zeros, zeros), (xs, ys))
        return jax.tree.map(lambda a: a[None], w), losses

    many = P(None, None, TENSOR)
    run = on_devices(run, (P(TENSOR), many, many), (P(TENSOR), everywhere), n)
    stored, losses = run(to_devices(w, n), xs, ys)
    return checkpoint(stored), np.asarray(losses)


# %%
positions = P(None, TENSOR)
on_one = on_devices(mqa_block, (everywhere, positions), positions, n=1)
teacher, student = begin(100, 1.0), begin(200, 0.5)  # the teacher makes the targets
many_x, new_BTD = draw(3, 300 * 8, 16, D), draw(4, 64, 16, D)
target, new_target = (np.asarray(on_one(teacher, x)) for x in (many_x, new_BTD))
batches = [x.reshape(300, 8, 16, D) for x in (many_x, target)]
for size in (1, 2, 4):
    saved_w, losses = train_on(size, student, *batches)
    validation = jnp.mean((on_one(saved_w, new_BTD) - new_target) ** 2)
    print(f"tensor={size}: training loss {losses[0]:.3f} to {losses[-20:].mean():.3f},",
          f"validation loss {validation:.3f}")  # fmt: skip

# %% [markdown]
# The training loss falls on all meshes. The validation loss grows with the number of devices that trained.
# Fix `gradients` in place, and run this:


# %% tags=["hide-input"]
def gradients_on(n, function):
    """Loss, and the gradients of each of n devices, stacked."""

    def run(stored, x_BtD, y_BtD):
        w = jax.tree.map(lambda a: a[0], stored)
        loss, grads = lesson.answered(function)(w, x_BtD, y_BtD)
        return loss, {name: grads[name][None] for name in w}

    run = on_devices(run, (P(TENSOR), positions, positions), (everywhere, P(TENSOR)), n)
    return jax.device_get(run(to_devices(student, n), batches[0][0], batches[1][0]))


FOUND = {n: gradients_on(n, gradients) for n in (1, 4)}
GAINS, KV = ("gain_D", "gain_mlp_D"), ("kv_2DK",)


def changed(n, names, change):
    """The gradients as found, but for some names changed."""
    loss, grads = FOUND[n]
    new = {name: np.stack([change(grads[name])] * n) for name in names}
    return loss, grads | new


# %% tags=["hide-input"]
def check_gradients(function):
    total, mean = (lambda g: g.sum(0)), (lambda g: g.mean(0))
    right = lambda n: (FOUND[1][0], to_devices(checkpoint(FOUND[1][1]), n))
    heads = "Now all devices use device 0's gradient. Which heads are in it?"
    scaled = "kv_2DK: a mean over devices is 1/n of the sum. Adam would hide that."
    same = "The gradients have not changed. Which of them are only part of a sum?"
    matrices = [name for name in SPLIT if name not in GAINS]
    hints = [
        (FOUND.get, same),
        (lambda n: changed(n, KV, mean), scaled),
        (lambda n: changed(n, KV, lambda g: g[0]), heads),
        (lambda n: changed(n, KV, lambda g: n * g.sum(0)), "kv_2DK: added twice."),
        (lambda n: changed(n, matrices, total), "Different shards, added."),
        (lambda n: changed(n, SPLIT, total), "Gains twice, and shards added."),
    ]
    done = "The gradients on 4 devices match a single-device run."
    run = lambda n: gradients_on(n, function)
    return lesson.diagnose(run, [(4,)], right, hints, done)


# %% tags=["hide-output"]
print(check_gradients(gradients))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Every device has the whole `kv_2DK`, but uses its keys and values only with its own h query heads. So its
# gradient has only the terms of those heads, and they must be added over `tensor`, as for the gains: `psum`
# where `SPLIT[name] is None`. (With multi-head attention, the gradients of vectors were enough.) Without
# the sum, each device trains its own key and value head: a *larger* model, so the training loss falls, but
# the checkpoint has only device 0's copy. With the spec `P()`, JAX adds the sum (chapter 02).
#
# BigCode's fork of Megatron-LM lacked the sum for the biases of keys and values
# ([#11](https://github.com/bigcode-project/Megatron-LM/issues/11)), and later for the gradient of their
# *input*, which goes on to the layers below. The loss fell for thousands of steps, and the validation loss
# was 3.741 instead of 2.640 after 5,000 ([#35](https://github.com/bigcode-project/Megatron-LM/issues/35),
# [#37](https://github.com/bigcode-project/Megatron-LM/pull/37)). In 2026 Megatron-LM lacked it for the
# rotary key of latent attention, which all heads share
# ([#6839](https://github.com/NVIDIA/Megatron-LM/pull/6839)).
# </details>


# %% tags=["remove-cell"]
def mended(add_up, names=KV):
    """`gradients`, with the gradients of some names changed by a function."""

    def mend(w, *batch):
        loss, grads = gradients(w, *batch)
        return loss, {k: add_up(g) if k in names else g for k, g in grads.items()}

    return mend


sharded = [name for name, dim in SPLIT.items() if dim is not None]
from_first = lambda g: psum(jnp.where(axis_index(TENSOR) == 0, g, 0), TENSOR)
over = lambda g: psum(g, TENSOR)
lesson.expect(check_gradients, (mended(over), "match a single-device run"),
              (gradients, "have not changed"),
              (mended(from_first), "device 0's"),
              (mended(lambda g: over(g) / axis_size(TENSOR)), "1/n of the sum"),
              (mended(lambda g: over(over(g))), "added twice"),
              (mended(over, [*sharded, *KV]), "Different shards"),
              (mended(over, SPLIT), "Gains twice"),
              (mended(lambda g: 3 * over(g)), "Not yet"),
              (lambda *_: ..., "Nothing there"))  # fmt: skip

# %% [markdown]
# ## In the project
#
# `model.feed_forward_branch` is the pair of matmuls; `sharding.all_gather` and `sharding.reduce_scatter`
# are `join` and `add`.
#
# ## In one table
#
# | | `tensor`, with sequence parallelism |
# |---|---|
# | shapes | `x_btD -> x_bTD @ w_Df -> h_bTf @ w_fD -> partial_bTD -> x_btD` |
# | each device stores | 1/n of columns or rows; between blocks 1/n of the positions |
# | forward | a gather and a reduce-scatter in each half of a block |
# | backward | a reduce-scatter and a gather per half; with recomputation, also 3 of the block's 4 forward collectives |
# | bytes | (n - 1)/n of the residual stream [b, T, D] per collective; 8 or 11 per layer |
# | exposed | yes; a ring that uses both link directions may overlap it if f > peak / bandwidth, with f columns per device |
# | as long as compute | at n = 8.6 for `llama3_8b` on v5p, 9.8 in an H100 node; tokens per chip: chapter 09 |
# | JAX | `P(None, "tensor")` and `P("tensor", None)`; `all_gather`, `psum_scatter` |
# | PyTorch | `parallelize_module` with `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel` |
# | Megatron-LM | `--tensor-model-parallel-size`, `--sequence-parallel`; `ColumnParallelLinear`, `RowParallelLinear` |
#
# ## Three lines to keep
#
# - Shard the first matrix by columns (or heads) and the second by rows: one sum per pair of matmuls, before
#   the next nonlinear function.
# - If you shard a weight the wrong way, you train a different network, and it learns. Only a comparison with
#   one device reveals it.
# - Use `tensor` if you have more chips than sequences, few tokens per chip and fast links: no batch size
#   changes the ratio of its communication to compute.
#
# **Sources**: Megatron-LM, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3; sequence
# parallelism, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), 4.2.2; the scaling book,
# [training](https://jax-ml.github.io/scaling-book/training) and
# [GPUs](https://jax-ml.github.io/scaling-book/gpus).
