# %% [markdown]
# # 05 · Pipeline parallelism
#
# Pipeline parallelism (PP) splits the layers of a model into stages, one group of devices for each. A batch
# goes through the stages in small parts, the *microbatches*, so that all stages work at the same time.
#
# You want it if a model does not fit and the network is slow: each stage stores only its own layers, and
# sends only activations at its border, once per microbatch. Between two nodes with a slow network, this page
# predicts a step of 2.62 s for Llama 3 8B, and 3.85 s with data parallelism. The price is the *bubble*, the
# idle time while the pipeline fills and drains. And since a schedule can run its own backward passes instead
# of `jax.grad`, it can print the right loss and still train wrongly.
#
# *Prerequisites:* chapters 01 and 02 (`shard_map`, collectives, gradients), 03 (FSDP) and 04 (tensor
# parallelism). *Mesh:* `stage=4`, simulated. *Runs in* 50 s on 2 cores. *Reading takes* 30 minutes, and the
# exercises an hour.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import dataclasses

import matplotlib.pyplot as plt

import config
from chapters import lesson, opening
from pipeline import check, draw, schedules
from plan import planner
from plan.chips import hardware
from sharding import STAGE

orange, GRAY = lesson.COLORS[STAGE], lesson.NEUTRAL

# %% tags=["hide-input"]
layers, sequences, GiB, P8 = 8, 16, 2**30, opening.PARAMETERS
eighth = opening.compute_ms(2 * P8 * opening.TOKENS / 8)  # a layer, 2 sequences
unit = eighth / 2  # a layer, one of 16 sequences
# saved for the backward pass by a layer and a sequence, in bf16: chapter 03
numbers = 6 * opening.D + 2 * opening.G * opening.K + 3 * opening.F
saved = 2 * opening.TOKENS / sequences * numbers / GiB
parts = {"weights": 4, "gradients": 4, "optimizer state": 8}  # bytes per parameter
memory = lambda count: {name: size * P8 * count / GiB for name, size in parts.items()}
reduce_ms = opening.network_ms(2 * 7 / 8 * 4 * P8)  # one layer's gradients, float32
send_ms = opening.network_ms(2 * opening.TOKENS / sequences * opening.D)
orders = schedules.simulate(schedules.one_f_one_b(8, sequences), 1, 1, 1)
first = [(op, *span) for (op, s), span in orders.spans.items() if s == 0]
fold = 8 * eighth  # the forward pass of a device, in both halves


def label_passes(ax):
    """Darken the backward passes."""
    for bar, (op, *_) in zip(ax.collections, first, strict=False):
        bar.set_alpha(1 if op.kind == "B" else 0.4)
    says = "GPU 0: forward, dark: backward"
    ax.text(24 * unit, -0.45, says, ha="center", size=8)
    ax.set_ylim(1.6, -0.9)


# %% tags=["hide-input"]
before = opening.Scene(
    "Data parallel: all layers everywhere",
    memory(layers) | {"activations": 2 * layers * saved},
    [("forward", 0, fold), ("backward", fold, 2 * fold)],
    [("", fold + 2 * eighth * (i + 1), reduce_ms, "data")
     for i in range(layers)])  # fmt: skip
after = opening.Scene(
    "Pipeline: one layer each, 1F1B",
    memory(1) | {"activations": [(8 - s) * saved for s in range(8)]},
    [("", unit * start, unit * (end - start)) for _, start, end in first],
    [("", unit * end, send_ms) for op, _, end in first if op.kind == "F"])  # fmt: skip
title = "Eight layers on eight GPUs: a fifth of the memory, but idle time"

# %% tags=["hide-input"] mystnb={"image": {"alt": "With data parallelism, each GPU holds 34.5 GiB and computes for 87 ms while gradients are reduced. With a pipeline, GPUs hold 4 to 8 GiB, send little, but are idle for 38 of 125 ms."}}
opening.before_after(before, after, title, STAGE)
left, right = plt.gcf().axes[2:]
left.text(fold / 2, 1, "all-reduce:", ha="center", va="center", size=8)
idle = right.text(15 * unit, 0, "idle", ha="center", va="center", size=8)
label_passes(right)

# %% [markdown]
# Eight layers of Llama 3 8B, 16 sequences of 4,096 tokens, a node of 8 H100s; times are arithmetic at peak
# speed (989 TFLOP/s, and a **bandwidth** of 450 GB/s). With data parallelism, each GPU stores all layers,
# computes 2 sequences, and all-reduces gradients. In the pipeline, GPU 0 has the first layer and computes all
# 16 sequences, one at a time. It sends 16 activations of 34 MB, in 0.07 ms each.
#
# Below, four stages run on four devices, in time steps called *ticks*. In a tick, a stage processes one
# microbatch, and then sends its output to the next stage.
#
# > **Predict.** How many ticks do 8 microbatches take to pass through 4 stages?

# %% tags=["hide-input"]
rows = schedules.assign_ticks(schedules.schedule("gpipe", 4, 8, 1))
forward_ticks = sum(any(op.kind == "F" for cell in row for op in cell) for row in rows)

# %%
my_prediction = None  # ticks
lesson.predicted("ticks", my_prediction, forward_ticks)

# %% [markdown]
# ## One program for all stages
#
# Take four layers `x + tanh(x @ w)`, one per device along the mesh axis `stage`: n = 4 stages. In array
# names, L is all 4 layers, and l those of one device: a single one. The 32 rows of width D come in Z = 8
# microbatches of N = 4 rows. You can paste the next three cells into an empty file.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

n, Z, N, D = 4, 8, 4, 24
four = jax.make_mesh((n,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:n])
draw_normal = np.random.default_rng(0).normal
w_LDD = np.float32(draw_normal(size=(n, D, D)) / D**0.5)
x_ZND, y_ZND = np.float32(draw_normal(size=(2, Z, N, D)))
layer = lambda w_DD, x_ND: x_ND + jnp.tanh(x_ND @ w_DD)
partial_loss = lambda out_ND, y_ND: jnp.sum((out_ND - y_ND) ** 2) / (Z * N * D)
RING = [(s, (s + 1) % n) for s in range(n)], [(s, (s - 1) % n) for s in range(n)]
pass_on = lambda x, back=0: jax.lax.ppermute(x, "stage", RING[back])
varying = lambda x: jax.lax.pcast(x, "stage", to="varying")  # may differ by stage


# %% [markdown]
# In tick i, stage s processes microbatch i - s, and sends its output to the next stage with one `ppermute`
# (*point-to-point* communication, send and receive in PyTorch). The last stage computes the microbatch's
# loss. This program has no branches, so a stage without a microbatch computes, too, on zeros or on an old
# microbatch. The unused result has to be finite: the backward pass multiplies it by 0, and 0 · NaN is NaN.


# %% tags=["by-hand"]
def gpipe(w_lDD, x_ZND, y_ZND):
    s = jax.lax.axis_index("stage")

    def tick(inbox_ND, i):
        m = jnp.clip(i - s, 0, Z - 1)
        out_ND = layer(w_lDD[0], jnp.where(s == 0, x_ZND[m], inbox_ND))
        is_output = (s == n - 1) & (m == i - s)
        loss = jnp.where(is_output, partial_loss(out_ND, y_ZND[m]), 0.0)
        return pass_on(out_ND), loss

    empty_ND = varying(jnp.zeros((N, D)))  # the carry has the type of a message
    _, losses = jax.lax.scan(tick, empty_ND, jnp.arange(Z + n - 1))
    return jax.lax.psum(losses.sum(), "stage")


# %% tags=["by-hand"]
specs = dict(in_specs=(P("stage"), P(), P()), out_specs=P())
forward = jax.jit(jax.shard_map(gpipe, mesh=four, **specs))
through = lambda w_LDD: functools.reduce(lambda x, w: layer(w, x), w_LDD, x_ZND)
one_device = jax.value_and_grad(lambda w_LDD: partial_loss(through(w_LDD), y_ZND))
found = jax.value_and_grad(forward)(w_LDD, x_ZND, y_ZND)
for mine, right in zip(found, one_device(w_LDD), strict=True):
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
print("loss and gradient match a single-device run")

# %%
found = lesson.compiled(forward, four, w_LDD, x_ZND, y_ZND)
(message,) = [one for one in found.collectives if one.kind == "collective-permute"]
print("sends in the compiled program, one per tick:", int(message.count))
assert message.count == forward_ticks == Z + n - 1

# %% [markdown]
# The last microbatch enters in tick Z - 1, and needs n - 1 more ticks for the other stages: Z + n - 1 = 11.
#
# ## Microbatches and the bubble
#
# Without microbatches, only one stage works at a time: three of four devices are always idle.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four stages from left to right. Activations of a microbatch travel right, their gradients travel left. Each stage stores its own layer."}}
figure, axes = plt.subplots(figsize=(6.4, 2.3))
arrow = {"arrowstyle": "-|>", "color": orange, "lw": 2}
for s in range(n):
    left, end = 2.8 * s, 2.8 * s + 1.8
    about = f"stage {s}\n\nlayer {s}:\nweights,\ngradients,\noptimizer state"
    lesson.box(axes, left, 0, 1.8, 2, about, 8, fc="#dddddd", lw=1)
    if s < n - 1:
        axes.annotate("", (end + 1, 1.4), (end, 1.4), arrowprops=arrow)
        axes.annotate("", (end, 0.4), (end + 1, 0.4), arrowprops=arrow)
        axes.text(end + 0.5, 1.6, "x_ND", ha="center", size=8)
        axes.text(end + 0.5, 0.6, "dx_ND", ha="center", size=8)
axes.text(0.9, 2.15, "microbatches enter", ha="center", size=8)
axes.text(2.8 * (n - 1) + 0.9, 2.15, "loss", ha="center", size=8)
axes.set(xlim=(-0.1, 10.3), ylim=(-0.1, 2.5))
axes.set_title("Only activations and their gradients travel between stages")
axes.axis("off")

# %% tags=["hide-input"] mystnb={"image": {"alt": "Above, four long boxes one after the other; below, four staggered rows of short ones."}}
title = "With microbatches, the same rows take a third of the time"
_, axes = lesson.panels(title, 2, figsize=(5.8, 3.6), sharex=True)
for ax, many in zip(axes, (1, Z), strict=True):
    long, ticks = Z / many, many + n - 1  # units that a microbatch takes
    for i in range(ticks):
        for s in range(n):
            if 0 <= i - s < many:
                ax.barh(s, long, left=i * long, color=GRAY, edgecolor="w")
                middle = (i + 0.5) * long
                ax.text(middle, s, i - s, ha="center", va="center", color="w")
    title = f"{many} x {Z * N // many} rows: {ticks * long:g} units"
    ax.set(yticks=range(n), ylabel="stage", title=title)
    ax.invert_yaxis()
axes[1].set(xlabel=f"time, in passes of {N} rows through a stage")

# %% [markdown]
# (This assumes that microbatches are large enough to use the whole device.) Each stage works in Z of the Z +
# n - 1 ticks, so its fraction of idle time, the **bubble**, is (n - 1)/(Z + n - 1): here 3/11, or 27%.
#
# ## What has to be saved
#
# `jax.grad` of this loop runs the ticks in reverse, after all forward passes: that is GPipe. The activations
# that a backward pass needs stay in memory until then, for all Z microbatches. Other *schedules*, the orders
# of the passes of each stage, start backward passes earlier. F3 is the forward pass of microbatch 3, B3 its
# backward pass. Each pass waits until its input has arrived.
#
# A backward pass computes two gradients. The previous stage waits for the gradient of the inputs. The
# gradient of the weights can be computed later. Each takes about as long as the forward pass, so F takes 1
# unit, and B takes 2. `simulate` runs four published schedules (`zb` is zero-bubble):

# %%
names = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1}  # chunks (see below)
published = {name: schedules.schedule(name, n, Z, v) for name, v in names.items()}
alone = {name: schedules.simulate(x, 1, 1, 1) for name, x in published.items()}
for name in ("gpipe", "1f1b"):
    print(f"{name}, stage 2: ", *published[name].orders[2])
for name, one in alone.items():
    keeps = [kept / names[name] for kept in one.live]
    print(f"{name:11} {one.makespan:4g} units, idle {one.bubble:.0%}, saves {keeps}")
assert [one.makespan for one in alone.values()] == [33, 33, 28.5, 27]

# %% tags=["hide-input"]
SAYS = {
    "gpipe": "GPipe, all forward passes first",
    "1f1b": "1F1B, as long, fewer saved activations",
    "interleaved": "Interleaved (flat boxes: second chunk)",
    "zb": "Zero-bubble, gaps filled",
}
LOOK = {"F": ("#d5d5d5", "forward"), "B": ("#858585", "backward"),
        "W": ("#ffffff", "weight gradient")}  # fmt: skip


def paint(ax, name, one, says):
    """Draw what each stage does over time."""
    for (op, s), (start, end) in one.spans.items():
        color, _ = LOOK[op.kind]
        height = 0.55 if op.chunk else 0.9
        ax.barh(s, end - start, height, start, color=color, edgecolor="k", lw=0.6)
        if name != "interleaved" or s == 0:  # narrow boxes
            middle = (start + end) / 2
            ax.text(middle, s, op.microbatch, ha="center", va="center", size=6)
    ax.set(title=f"{says}: {one.makespan:g} units", xlim=(0, one.makespan + 0.2))
    ax.set(yticks=range(n), ylabel="stage")
    ax.invert_yaxis()


# %% tags=["hide-input"] mystnb={"image": {"alt": "Four timelines: GPipe and 1F1B end at 33, interleaved at 28.5, zero-bubble at 27."}}
figure, axes = plt.subplots(4, figsize=(6.4, 7.6), sharex=True)
for ax, name in zip(axes, SAYS, strict=True):
    paint(ax, name, alone[name], SAYS[name])
axes[-1].set(xlabel="time, in forward passes of a stage", xlim=(0, 33.2))
handles = [plt.Rectangle((0, 0), 1, 1, fc=color, ec="k") for color, _ in LOOK.values()]
labels = [label for _, label in LOOK.values()]
legend = figure.legend(handles, labels, ncols=3, loc="outside lower center")

# %% [markdown]
# In all four schedules, each stage does 24 units of work. The idle time follows:
#
# - **GPipe, 1F1B.** The first microbatch reaches the last stage after n - 1 forward passes of 1 unit, and the
#   last gradient returns over n - 1 backward passes of 2. So each stage is idle for (n - 1)(1 + 2) = 9 units.
#   1F1B (after a few forward passes, one backward pass follows each forward pass) is *not* faster, but its
#   stages save only 4, 3, 2 and 1 microbatches, for any Z.
# - **Interleaved.** Each stage has v smaller *chunks* of layers (virtual stages): with v = 2, stage 0 of 4
#   has the first and the fifth eighth of the layers. Each pass is v times shorter, so 9/v idle units remain,
#   for v times as many sends, and more saved activations.
# - **Zero-bubble.** A stage first computes the gradient of its inputs and sends it back, so a gradient
#   returns in n - 1 passes of 1 unit, and (n - 1)(1 + 1) = 6 idle units remain. The gradients of the weights,
#   computed when a stage would be idle, fill 3 of them.
#
# ## One program: all stages run in lock-step
#
# The published schedules assume a separate program for each stage, which sends its output and continues, as
# in Megatron-LM, PyTorch and [JaxPP](https://arxiv.org/abs/2412.14374). By itself, JAX compiles *one* program
# for all devices. Each tick ends with a `ppermute`, so no stage starts the next tick before its neighbors'
# data has arrived: the stages run in *lock-step*. In a tick a stage does at most one forward pass (F), then
# one backward pass (B). If the program has branches (`jax.lax.cond`), a stage skips the pass that it doesn't
# have. Then a tick lasts as long as its busiest stage: 1 unit if all do only F, and 3 if any stage does both.
# GPipe still takes 33 units.
#
# > **Predict.** In 1F1B, the order of stage 0 is F0 F1 F2 F3 B0 F4 B1 F5 .. In lock-step, F0 is in tick 0. In
# > which tick is F4? (The last stage does F0 and B0 in the same tick.)

# %% tags=["hide-input"]
in_step = {name: schedules.lock_step(x, 1, 1, 1) for name, x in published.items()}
ticks = schedules.assign_ticks(published["1f1b"])  # [tick][stage]: operations
tick_of_F4 = next(i for i, row in enumerate(ticks) if schedules.Op("F", 4) in row[0])

# %%
my_prediction = None  # number of the tick
lesson.predicted("F4 on stage 0 is in tick", my_prediction, tick_of_F4)

# %%
print(draw.format_table(published["1f1b"]), "\n")
print("units in lock-step:", in_step)

# %% tags=["remove-cell"]
assert [*in_step.values()] == [33, 48, 28.5, 45] and tick_of_F4 == 7
kinds = [{"".join(op.kind for op in cell) for cell in row} for row in ticks]
assert [("FB" in one, "F" in one) for one in kinds[:3]] == [(False, True)] * 3
assert all("FB" in one for one in kinds[3:16]) and len(kinds) == 19
assert not any("F" in "".join(one) for one in kinds[16:])

# %% [markdown]
# Each column is a tick. The output of F0 needs 3 ticks to reach the last stage, and the gradient 3 ticks
# back: B0 is in tick 6. Within a tick, F comes before B, so F4 waits until tick 7. In lock-step, all stages
# wait for each other at the dotted lines, the ends of the ticks:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Timelines of four stages: 1F1B ends at 33 units if each stage continues by itself, and at 48 in lock-step, with gaps in every tick; zero-bubble ends at 27 and at 45."}}
figure, axes = plt.subplots(4, figsize=(6.4, 7.6), sharex=True)
for pair, name in zip(axes.reshape(2, 2), ("1f1b", "zb"), strict=True):
    says = SAYS[name].partition(",")[0]
    paint(pair[0], name, alone[name], f"{says}, a program for each stage")
    together = schedules.in_lock_step(published[name], 1, 1, 1)
    paint(pair[1], name, together, f"{says}, one program in lock-step")
    cells = [[together.spans[op, s][1] for s, cell in enumerate(row) for op in cell]
             for row in published[name].table]  # fmt: skip
    for ends in cells:
        pair[1].axvline(max(ends), color=lesson.NEUTRAL, lw=0.8, ls=":")
axes[-1].set(xlabel="time, in forward passes of a stage", xlim=(0, 48.2))
legend = figure.legend(handles, labels, ncols=3, loc="outside lower center")

# %% [markdown]
# ### More microbatches in flight
#
# So 1F1B takes 3 + 39 + 6 = 48 units instead of 33: 3 ticks have only F, 13 have both in some stage, and 3
# have only B. Zero-bubble takes 45 units instead of 27. The gaps close if stage 0 starts a microbatch in
# every tick, also while it waits for B0. Then 7 microbatches are in flight instead of 4, and each stage is 2
# microbatches ahead of the next instead of 1 (`lead=2` below). So stage s does F of microbatch m in **tick m
# + s**, as before, and B as soon as the gradient can arrive, in **tick m + 2(n - 1) - s**:

# %%
ahead = {name: schedules.schedule(name, n, Z, v, lead=2) for name, v in names.items()}
print(draw.format_table(ahead["1f1b"]), "\n")
for name, sched in ahead.items():
    units = schedules.lock_step(sched, 1, 1, 1)
    keeps = schedules.live_activations(sched)
    print(f"{name:11} {units:4g} units, saves {[kept / names[name] for kept in keeps]}")
units_ahead = [schedules.lock_step(sched, 1, 1, 1) for sched in ahead.values()]
assert units_ahead == [33, 33, 28.5, 30]


# %% [markdown]
# With branches, 1F1B is now as fast as GPipe again, and saves 7 microbatches instead of 4, for any Z.
#
# ## 1F1B by hand
#
# These two formulas are the whole schedule. You can append this function to the program above. The input of
# microbatch m is saved from its F to its B, in slot m mod (2n - 1) of a buffer. `jax.vjp` recomputes the
# stage from it. On the last stage, F and B of a microbatch are in the same tick, and the backward pass starts
# from the loss:


# %%
def one_f_one_b(w_lDD, x_ZND, y_ZND):
    s, last, slots = jax.lax.axis_index("stage"), n - 1, 2 * n - 1

    def tick(carry, i):
        inbox_ND, back_ND, kept, loss, dw_DD = carry  # two messages; saved inputs; ..
        m_f, m_b = i - s, i - 2 * last + s  # microbatches of F and B in this tick
        x_ND = jnp.where(s == 0, x_ZND[jnp.clip(m_f, 0, Z - 1)], inbox_ND)
        kept = kept.at[m_f % slots].set(x_ND)
        out_ND, backward = jax.vjp(layer, w_lDD[0], kept[m_b % slots])
        y_ND, has_b = y_ZND[jnp.clip(m_b, 0, Z - 1)], (m_b >= 0) & (m_b < Z)
        value, d_ND = jax.value_and_grad(partial_loss)(out_ND, y_ND)
        dw, dx_ND = backward(jnp.where(s == last, d_ND, back_ND))
        loss += jnp.where(has_b & (s == last), value, 0)
        dw_DD += jnp.where(has_b, dw, 0)  # a tick without a B adds nothing
        messages = pass_on(layer(w_lDD[0], x_ND)), pass_on(dx_ND, back=1)
        return (*messages, kept, loss, dw_DD), None

    shapes = (N, D), (N, D), (slots, N, D), (), (D, D)
    start = tuple(varying(jnp.zeros(shape)) for shape in shapes)
    carry, _ = jax.lax.scan(tick, start, jnp.arange(Z + 2 * last))
    return jax.lax.psum(carry[3], "stage"), carry[4][None]


# %%
specs = dict(in_specs=(P("stage"), P(), P()), out_specs=(P(), P("stage")))
step = jax.jit(jax.shard_map(one_f_one_b, mesh=four, **specs))
for mine, right in zip(step(w_LDD, x_ZND, y_ZND), one_device(w_LDD), strict=True):
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
print("loss and gradient match a single-device run")

# %% [markdown]
# The backward passes start from the gradient of the *mean*: `partial_loss` divides by all entries of the
# batch. In 2026 a torchtitan schedule started from a sum, and divided only the printed loss
# ([#2972](https://github.com/pytorch/torchtitan/issues/2972)). Adam cancels the constant factor, so training
# looked right.
#
# The compiler reports memory for 8 and for 32 microbatches of the same size, and matmuls per device for 8:

# %% tags=["hide-input"]
gpipe_step = jax.jit(jax.grad(forward))
for many in (8, 32):
    rows = (jax.ShapeDtypeStruct((many, N, D), "float32"),) * 2
    Z = many  # the functions above read it when they are traced
    jax.clear_caches()
    for name, function in {"gpipe": gpipe_step, "1f1b": step}.items():
        program = function.lower(w_LDD, *rows).compile()
        temporary = program.memory_analysis().temp_size_in_bytes
        print(f"{name:5} Z = {many:2}: {temporary:7,} bytes of temporary memory")
Z = 8
for name, function in {"gpipe": gpipe_step, "1f1b": step}.items():
    found = lesson.compiled(function, four, w_LDD, x_ZND, y_ZND)
    print(f"{name:5} Z =  8: {found.flops / (2 * N * D * D):.0f} matmuls")

# %% [markdown]
# The rows of a microbatch take 384 bytes. GPipe's loop saves about four arrays of this size for each
# microbatch; 1F1B has seven slots, for any number of microbatches.
#
# GPipe's loop has the 33 units of its schedule, and 1F1B by hand has 56. It has no branches, so each of its
# 14 ticks computes F, the recomputed F and B: 4 units. (Without recomputation there would be 42.) To have the
# 33 units of the table, skip absent passes with `jax.lax.cond`, as the trainer does (`pipeline.ticks`). It
# runs these schedules with other mesh axes inside each stage (chapter 08).
#
# ## When a pipeline pays off
#
# Let a slow network connect two nodes of 8 devices each. Over it, each node sends in a step:
#
# - with `data=2`, gradients in float32, **4 · parameters** bytes (an all-reduce of two devices sends the array
#   once);
# - with `stage=2`, a bfloat16 vector of width D for each token forward, and one backward. (In lock-step every
#   device sends in both directions, even zeros.) Both stages share the work on logits and loss, so half of
#   the last stage's outputs go to the first, and their gradients come back. Together: **6 · tokens · D**
#   bytes.
#
# So a pipeline sends less if **6 · tokens · D < 4 · parameters** (with all experts of a sparse model). For
# Llama 3 8B, that is below 1.3 million tokens per step. But it also has a bubble, the time of n - 1
# microbatches. The planner's lower bound counts both, here on two nodes of 8 H100s, whose GPUs share a
# network of 100 Gbit/s per node. Each device processes one sequence of 8,192 tokens at a time.

# %% tags=["hide-input"]
slow = dataclasses.replace(hardware.CHIPS["h100"], dcn_bytes_per_s=12.5e9 / 8)
NODES = hardware.Topology(slow, (16,), 16, hosts=2)


def planned(mesh, batch=32, on=NODES, **more):
    work = {"mesh": mesh, "data.batch_size": batch, "work.device_batch": 1}
    work |= {"work.remat": "full", "work.gather": "layer"}
    work |= {"work.tensor_exchange": "ring"}
    more = {"work.schedule": "1f1b"} | more
    return planner.plan(config.preset("llama3_8b", **work | more), on)


def show(one):
    parts = [f"{name} {s:.2f}" for name, s in one.lower_bound().items() if s > 0.01]
    Z_ = f" Z={one.sched.microbatches}" if one.cfg.mesh.stage > 1 else ""
    GiB, total = f"{one.peak_bytes / 2**30:.0f} GiB", one.lower_bound_s
    print(f"{one.cfg.mesh!s:14} {total:.2f} s: {', '.join(parts)}; {GiB}{Z_}")


# %%
for batch in (32, 128):
    print(f"{batch * 8192:,} tokens per step")
    show(planned("data=2,fsdp=8", batch))
    show(planned("stage=2,fsdp=8", batch))

# %% tags=["hide-input"]
plan = planned("stage=2,fsdp=8")
parameters, width = plan.params_total, plan.cfg.model.d_model
second = slow.dcn_bytes_per_s * 8  # bytes that a node sends per second
bubble = plan.lower_bound()["bubble"]
tables = 8 * plan.cfg.model.vocab_size * width / second  # their gradients, float32
ends = 4 * 2 * (8 * 8192) * width / second  # the 2 ticks more than microbatches
left = 4 * parameters / second - bubble - tables - ends
by_hand = left / (6 * width / second)

# %% tags=["hide-input"] mystnb={"image": {"alt": "Seconds per token against tokens per step: stage=2 is faster at left, data=2 at right."}}
figure, axes = plt.subplots(figsize=(5.8, 3.8))
sizes = np.array([16, 32, 48, 64, 80, 96, 128, 160, 192, 256])
millions, seconds = sizes * 8192 / 1e6, {}
for axis in ("data", "stage"):
    plans = [planned(f"{axis}=2,fsdp=8", int(batch)) for batch in sizes]
    seconds[axis] = np.array([one.lower_bound_s for one in plans])
    colour = lesson.COLORS[axis]
    axes.plot(millions, seconds[axis] / millions, color=colour, label=f"{axis}=2")
gap = seconds["stage"] - seconds["data"]
equal = np.interp(0, gap, millions)
print(f"equal at {equal:.2f} million tokens by the planner")
assert abs(by_hand / 1e6 / equal - 1) < 0.05, "formula and planner disagree"
text = [f"{s:.2f}" for s in (bubble, tables, ends)]
assert text == ["0.32", "0.34", "0.17"], "the text has other seconds"
axes.axvline(by_hand / 1e6, color=lesson.NEUTRAL, linewidth=0.8)
axes.text(by_hand / 1e6 - 0.02, 1, "by hand", ha="right", color=lesson.NEUTRAL)
axes.set(xlabel="tokens per step, millions", ylabel="s per million tokens", ylim=0)
axes.set(title="Over a slow network, a pipeline is faster for small batches")
legend = axes.legend(loc="upper center")

# %% [markdown]
# The vertical line is where 4 · parameters equal 6 · tokens · D plus the bubble (0.32 s), the gradients of
# the vocabulary tables (0.34 s) and the 2 extra ticks (0.17 s). (Overlap would help `data` more: its
# all-reduce can run during the backward pass.) With 400 Gbit/s for each GPU, or inside a single node, the
# bubble takes longer than what the stages save:

# %% tags=["hide-input"]
for on, splits in {
    "h100:16": ("data=2,fsdp=8", "stage=2,fsdp=8", "fsdp=16"),
    "h100:8": ("fsdp=8", "stage=2,fsdp=4"),
}.items():
    print(on)
    for split in splits:
        show(planned(split, on=on))


# %% [markdown]
# So use stages in two cases:
#
# - **The batch is too small for more `fsdp`** over a slow network, by this rule. The [Ultra-Scale
#   Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook) measured that a pipeline with few
#   microbatches loses 14% of its throughput from one node of 8 GPUs to two, and tensor parallelism about 43%.
# - **The model is sparse.** FSDP gathers all experts, also those that few tokens use (chapter 03), but stages
#   don't move parameters.
#
# Memory alone is no reason: `fsdp` shards parameters, gradients and optimizer state, too. And use enough
# microbatches, at least 4n: with Z = n = 4 the bubble takes 3/7 of the time. Chapter 09, "Thresholds", has
# the rules of all axes.

# %% [markdown]
# ## Exercise 1: the missing stage
#
# This is the published 1F1B schedule for 4 stages and 6 microbatches, without the order of stage 1. Write
# this order.


# %% tags=["hide-input"]
def outcome(order, n=4, Z=6):
    """Makespan, and what stage 1 saves, if it runs its operations in this order."""
    published = schedules.one_f_one_b(n, Z)
    ops = tuple(schedules.Op(word[0], int(word[1:])) for word in order)
    orders = (published.orders[0], ops, *published.orders[2:])
    sched = dataclasses.replace(published, orders=orders)
    check.check(sched)
    simulated = schedules.simulate(sched, 1, 1, 1)
    return simulated.makespan, schedules.live_activations(sched)[1]


def deadlock(words):
    """Why an order cannot run."""
    first = next(n for n, word in enumerate(words) if word[0] == "B")
    if first == 1:
        return "Deadlock: B0 waits for stage 2, which needs F1 before it sends B0."
    if first > 4:
        return "Deadlock: F4 waits for stage 0, which needs B0 before it sends F4."
    return "Deadlock: gradients arrive as B0, B1, B2, .., activations as F0, F1, .."


order_of = lambda s: " ".join(map(str, schedules.one_f_one_b(4, 6).orders[s]))


# %% tags=["hide-input"]
@lesson.verdict
def check_stage(text):
    if not (isinstance(text, str) and text):
        return lesson.NOTHING
    words = text.upper().replace(",", " ").split()
    if sorted(words) != sorted(order_of(1).split()):
        return "Write each of F0 to F5 and B0 to B5 once, separated by spaces."
    try:
        time, keeps = outcome(words)
    except ValueError:
        return deadlock(words)
    if (time, keeps) == (27, 3):
        return "Right: 27 units of time, and 3 microbatches saved."
    said = f"{time:g} units of time, and {keeps} microbatches saved. "
    if keeps > 3:
        return said + "Which stage's order is this?"
    return said + "Late. What can you run while a gradient is in flight?"


# %%
def stage_1():
    return ...  # for example "F0 B0 F1 B1 .."


print(check_stage(stage_1))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `"F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"`. Two stages follow stage 1, so n - 1 - s = 2 more forward passes
# start before B0 arrives. Then forward and backward passes alternate.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_stage, (lambda: "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
                            "Right: 27 units"),
              ("f0, f1, f2, b0, f3, b1, f4, b2, f5, b3, b4, b5", "Right"),
              (order_of(0), "30 units"),
              (order_of(0), "Which stage's"), (order_of(2), "39 units"),
              (order_of(2), "Late"),
              (order_of(3), "F1 before"),
              ("F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5", "needs B0"),
              ("F0 F1 F2 F3 F4 F5 B5 B4 B3 B2 B1 B0", "needs B0"),
              ("F0 F1 F2 B2 F3 B1 F4 B0 F5 B3 B4 B5", "gradients arrive"),
              ("B0 F0 F1 F2 B1 F3 B2 F4 B3 F5 B4 B5", "gradients arrive"),
              ("F0 F1 F2 B0 B1 F3 F4 B2 B3 F5 B4 B5", "33 units"),
              *[(odd, "each of F0") for odd in ("F0 F1 B0", "huh", "F0,F1",
                                                order_of(1) + " B5")],
              ("", lesson.NOTHING), (["F0"], lesson.NOTHING),
              (stage_1, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 2: how many saved microbatches
#
# In 1F1B by hand, how many microbatches does stage s save at the same time, at most, with n stages and Z
# microbatches? The buffer has 2n - 1 slots on all stages. How long does a microbatch take from stage s to the
# last stage and back?

# %% tags=["hide-input"]
KEPT_HINTS = [
    (lambda n, Z, s: n - s, "As published. In lock-step, when is the gradient back?"),
    (lambda n, Z, s: 2 * (n - 1 - s), "Too few. What does the last stage save?"),
    (lambda n, Z, s: 2 * (n - s), "Too many. In a tick, is F or B first?"),
    (lambda n, Z, s: 2 * n - 1, "Every stage has that many slots. Which are used?"),
    (lambda n, Z, s: 2 * n - 1 - s,
     "It starts at stage s. Where does it come back to?"),
]  # fmt: skip
at_most_Z = lambda count: lambda n, Z, s: min(count(n, Z, s), Z)
KEPT_HINTS += [(at_most_Z(count), hint) for count, hint in KEPT_HINTS]
KEPT_HINTS += [
    (lambda n, Z, s: Z, "That is GPipe's number. When is the first one read?"),
    (lambda n, Z, s: 2 * (n - 1 - s) + 1, "Right for large Z, but not for Z = 3."),
]
in_lock_step = lambda n, Z: schedules.one_f_one_b(n, Z, lead=2)
check_kept = lesson.checker(
    [(4, 8, 0), (4, 8, 2), (8, 3, 1), (2, 16, 0), (8, 64, 3), (4, 8, 3)],
    lambda n, Z, s: schedules.live_activations(in_lock_step(n, Z))[s],
    KEPT_HINTS, "Right in all six cases.")  # fmt: skip


# %%
def kept(n, Z, s):
    return ...


print(check_kept(kept))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return min(2 * (n - 1 - s) + 1, Z)`. The output of stage s needs n - 1 - s ticks to reach the last stage,
# where the backward pass starts in the same tick, and the gradient as many back. In each of these ticks stage
# s starts one more microbatch; add 1 for the first.
# </details>

# %% tags=["remove-cell"]
right = at_most_Z(lambda n, Z, s: 2 * (n - 1 - s) + 1)
lesson.expect(check_kept, *KEPT_HINTS, (right, "Right in all six cases."),
              (lambda n, Z, s: 5, "Not yet"),
              (kept, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 3: choose a layout
#
# Take the two nodes above with the slow network, Llama 3 8B, and 262,144 tokens per step. Find a layout whose
# lower bound is at most 2.45 s, and that needs at most 30 GiB on each GPU. You can choose the mesh (16
# devices), the schedule (`gpipe`, `1f1b` or `zb`), and how often weights are gathered (`layer` or `step`).
# Start with Z: a microbatch is one sequence, so how many sequences does each pipeline get?

# %% tags=["hide-input"]
TOO_SLOW = {
    "compute": "Compute takes {compute:.2f} s, 1.10 without zb: each half recomputes.",
    "data": "Gradients take {data:.2f} s between the nodes. Which axis sends less?",
    "fsdp": "Gathering weights takes {fsdp:.2f} s. Over which link, and how often?",
    "tensor": "Activations take {tensor:.2f} s along tensor. Is that axis too long?",
    "stage": "Stage messages take {stage:.2f} s. How many stages need that network?",
    "bubble": "The bubble takes {bubble:.2f} s. What makes Z larger?",
}


FAST_S = {"compute": 1.1, "tensor": 0.11, "stage": 0.94, "fsdp": 0.02, "bubble": 0.15}


def why_slow(one):
    """The part that exceeds that of a fast enough step the most."""
    s = one.lower_bound()
    more = {part: s.get(part, 0) - FAST_S.get(part, 0) for part in TOO_SLOW}
    return TOO_SLOW[max(more, key=more.get)].format(**s)


# %% tags=["hide-input"]
@lesson.verdict
def check_design(chosen):
    if not (isinstance(chosen, dict) and isinstance(chosen.get("mesh"), str)):
        return "Return settings as in START: a dict with a mesh."
    one = planned(**chosen)
    total = one.lower_bound_s
    said = f"{total:.2f} s, {one.peak_bytes / 2**30:.0f} GiB. "
    if one.peak_bytes > 30 * 2**30:
        part = max(one.memory_bytes, key=one.memory_bytes.get)
        return said + f"Too large: most of it is {part}. Which axes would shard that?"
    return said + ("That is fast enough." if total <= 2.45 else why_slow(one))


# %%
START = {"mesh": "data=2,fsdp=8", "work.schedule": "1f1b", "work.gather": "layer"}


def design():
    return ...  # START, changed


print(check_design(design))


# %% [markdown]
# <details><summary>Solution</summary>
#
# `{"mesh": "stage=2,fsdp=4,tensor=2", "work.schedule": "1f1b", "work.gather": "step"}`: 2.32 s, 22 GiB. With
# `fsdp=8` there are 8 pipelines with 4 of the 32 sequences each, so Z is 4. With `tensor=2` inside a node
# there are 4 pipelines with 8 sequences each: Z = 8, and half the bubble. It also halves the gathered weights
# of `gather=step`. `gpipe` is faster by 0.04 s: it sends 18 messages, and 1F1B sends 20.
# </details>


# %% tags=["remove-cell"]
def with_mesh(mesh, schedule="1f1b", gather="layer"):
    return {"mesh": mesh, "work.schedule": schedule, "work.gather": gather}


best = with_mesh("stage=2,fsdp=4,tensor=2", gather="step")
fast = planned(**best).lower_bound()
assert all(abs(fast[part] - s) < 0.01 for part, s in FAST_S.items()), fast
lesson.expect(check_design, (best, "2.32 s, 22 GiB. That is fast enough."),
              (best | {"work.schedule": "gpipe"}, "2.27 s, 25 GiB. That"),
              (with_mesh("stage=2,fsdp=2,tensor=4", gather="step"),
               "That is fast enough"),
              (with_mesh("data=2,fsdp=8"), "Which axis"),
              (with_mesh("fsdp=16"), "Over which link"),
              (with_mesh("data=2,tensor=8"), "Which axis"),
              (with_mesh("stage=2,fsdp=8"), "Z larger"),
              (with_mesh("stage=2,fsdp=4,tensor=2"), "how often"),
              (with_mesh("stage=2,fsdp=8", gather="step"), "2.45 s, 38 GiB. Too large"),
              (with_mesh("stage=4,fsdp=4"), "need that network"),
              (with_mesh("stage=16"), "need that network"),
              (best | {"work.schedule": "zb"}, "each half recomputes"),
              (with_mesh("stage=2,tensor=8"), "too long"),
              (with_mesh("tensor=16"), "rejects"), (with_mesh("stage=4"), "rejects"),
              (with_mesh("stages=2"), "rejects"),
              (lambda: "stage=2,fsdp=8", "as in START"),
              (design, lesson.NOTHING))  # fmt: skip
for one, messages in (("gpipe", 18), ("1f1b", 20)):
    mesh_ = {"mesh": "stage=2,fsdp=4,tensor=2", "work.schedule": one}
    moved = [t for t in planned(**mesh_).traffic if t.kind == "collective-permute"]
    assert [t.count for t in moved if t.axes == (STAGE,)] == [messages]


# %% [markdown]
# ## A bug to find
#
# A colleague trains a small language model, built like GPT-2, with 1F1B as above: the first stage looks the
# tokens up, and the last one computes logits and loss. All stages run the same program, so each has arrays of
# the same shapes.


# %%
def cross_entropy(table_VD, out_ND, target_N):
    """Sum of -log softmax of the logits, at the targets."""
    logits_NV = out_ND @ table_VD.T
    at_N = jnp.take_along_axis(logits_NV, target_N[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits_NV, axis=1) - at_N)


def backward_pass(w, s, x_ND, back_ND, token_N, target_N):
    """Recompute a stage. Returns loss, gradients of weights, and of the input."""
    first, last = s == 0, s == n - 1
    out_ND, pull = jax.vjp(layer, w["layer_DD"], x_ND)
    with_head = jax.value_and_grad(cross_entropy, argnums=(0, 1))
    loss, (dhead_VD, d_ND) = with_head(w["table_VD"], out_ND, target_N)
    dw_DD, dx_ND = pull(jnp.where(last, d_ND, back_ND))
    dlookup_VD = jnp.zeros_like(dhead_VD).at[token_N].add(dx_ND)
    dtable_VD = jnp.where(last, dhead_VD, jnp.where(first, dlookup_VD, 0))
    return jnp.where(last, loss, 0), {"layer_DD": dw_DD, "table_VD": dtable_VD}, dx_ND


# %%
def gradients(w, token_ZN, target_ZN):
    """Mean loss of the batch, and the gradients of this stage's weights."""
    s, last, slots = jax.lax.axis_index("stage"), n - 1, 2 * n - 1

    def tick(carry, i):
        inbox_ND, back_ND, kept, total = carry
        m_f, m_b = i - s, i - 2 * last + s
        fresh, old = (jnp.clip(m, 0, Z - 1) for m in (m_f, m_b))
        x_ND = jnp.where(s == 0, w["table_VD"][token_ZN[fresh]], inbox_ND)
        kept = kept.at[m_f % slots].set(x_ND)
        received = kept[m_b % slots], back_ND, token_ZN[old], target_ZN[old]
        loss, grads, dx_ND = backward_pass(w, s, *received)
        add = lambda total, one: total + jnp.where(m_b == old, one, 0) / target_ZN.size
        total = jax.tree.map(add, total, (loss, grads))
        messages = pass_on(layer(w["layer_DD"], x_ND)), pass_on(dx_ND, back=1)
        return (*messages, kept, total), None

    zeros = lambda *shape: varying(jnp.zeros(shape))
    total = zeros(), jax.tree.map(jnp.zeros_like, w)
    start = zeros(N, D), zeros(N, D), zeros(slots, N, D), total
    (*_, (loss, grads)), _ = jax.lax.scan(tick, start, jnp.arange(Z + 2 * last))
    return jax.lax.psum(loss, "stage"), grads


# %% tags=["hide-input"]
def adam(state, loss_and_grads, rate=0.01):
    (w, m, v), (loss, g) = state, loss_and_grads
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
    down = lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8)
    return (jax.tree.map(down, w, m, v), m, v), loss


# %%
def to_stages(w):
    """What each stage stores, stacked."""
    return {"layer_DD": w["layer_LDD"], "table_VD": np.stack([w["table_VD"]] * n)}


def checkpoint(stored):
    return {"layer_LDD": stored["layer_DD"], "table_VD": stored["table_VD"][0]}


# %% tags=["hide-input"]
rng, V = np.random.default_rng(3), 32
table_VD = np.float32(rng.normal(size=(V, D)) / D**0.5)
begin = {"layer_LDD": w_LDD, "table_VD": table_VD}
follows = rng.permutation(V)  # the next token of each token
token_jZN = rng.integers(0, V, (100, Z, N))  # j: steps
target_jZN = follows[token_jZN]


def alone_loss(w, token_ZN, target_ZN):
    x_ND = w["table_VD"][token_ZN.reshape(-1)]
    out_ND = functools.reduce(lambda x, w: layer(w, x), w["layer_LDD"], x_ND)
    return cross_entropy(w["table_VD"], out_ND, target_ZN.reshape(-1)) / target_ZN.size


def scanned(w, *batches, gradients=None):
    """Train on many batches. Returns the weights and the losses."""
    gradients = gradients or jax.value_and_grad(alone_loss)
    zeros = jax.tree.map(jnp.zeros_like, w)
    step = lambda state, batch: adam(state, gradients(state[0], *batch))
    (w, _, _), losses = jax.lax.scan(step, (w, zeros, zeros), batches)
    return w, losses


# %% tags=["hide-input"]
def in_pipeline(stored, *batches):
    w = jax.tree.map(lambda a: a[0], stored)
    w, losses = scanned(w, *batches, gradients=gradients)
    return jax.tree.map(lambda a: a[None], w), losses


outs = P("stage"), P()
ins = P("stage"), P(), P()
run = jax.shard_map(in_pipeline, mesh=four, in_specs=ins, out_specs=outs)
runs = {"one device": (jax.jit(scanned), lambda w: w, lambda w: w),
        "pipeline": (jax.jit(run), to_stages, checkpoint)}  # fmt: skip

# %% tags=["hide-input"]
curves, early, late = {}, slice(0, 60), slice(60, 100)
for name, (run, load, save) in runs.items():
    w, losses = run(load(begin), token_jZN[early], target_jZN[early])
    saved = save(jax.device_get(w))  # a checkpoint, from which the job resumes
    _, more = run(load(saved), token_jZN[late], target_jZN[late])
    curves[name] = np.concatenate([losses, more])
    print(f"{name:10}: loss {losses[0]:.3f} to {losses[-1]:.3f},",
          f"after the restart {more[0]:.3f}")  # fmt: skip

# %% tags=["hide-input"] mystnb={"image": {"alt": "Both losses fall alike for 60 steps. After the restart the loss of one device goes on, and that of the pipeline jumps up and falls again."}}
figure, axes = plt.subplots(figsize=(5.6, 3.2))
axes.plot(curves["one device"], color=GRAY, label="one device")
axes.plot(curves["pipeline"], color=orange, label="stage=4")
axes.axvline(60, color="k", linewidth=0.8)
axes.text(59, 3.4, "restart from the checkpoint", ha="right", size=9)
axes.set(xlabel="step", ylabel="training loss", title="Right, until the job restarts")
legend = axes.legend()

# %% [markdown]
# The pipeline trains as well as one device, until the job resumes from its checkpoint: then the loss jumps.
# (Adam's moments start from zeros again in both runs.) Fix `gradients` or `backward_pass` in place, and run
# this:

# %% tags=["hide-input"]
example = begin, token_jZN[0], target_jZN[0]


def gradients_on(function):
    """Loss, and the gradients of every stage, stacked."""

    def run(stored, *batch):
        w = jax.tree.map(lambda a: a[0], stored)
        loss, grads = lesson.answered(function)(w, *batch)
        return loss, {name: grads[name][None] for name in w}

    specs = dict(in_specs=(P("stage"), P(), P()), out_specs=(P(), P("stage")))
    run = jax.jit(jax.shard_map(run, mesh=four, **specs))
    loss, grads = jax.device_get(run(to_stages(begin), *example[1:]))
    return loss, grads["layer_DD"], grads["table_VD"][[0, -1]]  # first and last stage


RIGHT_LOSS, RIGHT = jax.device_get(jax.value_and_grad(alone_loss)(*example))
PARTS = gradients_on(gradients)[2]


# %% tags=["hide-input"]
def check_gradients(function):
    layers, table = RIGHT["layer_LDD"], RIGHT["table_VD"]
    tables = lambda first, last: lambda: (RIGHT_LOSS, layers, np.stack([first, last]))
    (lookup, head), twice = PARTS, (table, table)
    added = lambda: (RIGHT_LOSS, np.stack([layers.sum(0)] * n), np.stack(twice))
    hints = [
        (tables(lookup, head), "The gradients have not changed. What uses the table?"),
        (tables(table / n, table / n), "A mean over stages is a quarter."),
        (tables(table / 2, table / 2), "A mean of the copies is half of it."),
        (tables(table, head), "The first stage is right. What about the last?"),
        (tables(lookup, table), "The last stage is right. What about the first?"),
        (tables(lookup, lookup), "The lookup's part, on both. What about the head's?"),
        (tables(head, head), "The head's part, on both. What about the lookup's?"),
        (added, "The tables are right, but you also add different layers."),
    ]
    done = "The gradients match a single-device run, on the first and last stage."
    right = tables(*twice)
    return lesson.diagnose(lambda: gradients_on(function), [()], right, hints, done)


# %% tags=["hide-output"]
print(check_gradients(gradients))


# %% [markdown]
# <details><summary>Solution</summary>
#
# The table is one array that the model uses twice (*tied* embeddings), so its gradient is the sum of two
# parts. The first stage has the lookup's part and the last stage has the head's. Add them before the
# optimizer:
#
# ```python
# grads["table_VD"] = jax.lax.psum(grads["table_VD"], "stage")  # after the scan
# ```
#
# Without the sum, the two copies drift apart. That is an untied model, with more parameters, so its loss is
# no worse. The checkpoint stores the table once, and after loading it the head is the wrong one. Comparing
# the copies after one step, or with one device, shows it at once.
#
# Megatron-LM has an *embedding group* of the first and the last stage for this sum
# ([#299](https://github.com/NVIDIA/Megatron-LM/issues/299)). In 2024 a user's two copies differed all the
# same, in a run that trained well ([#656](https://github.com/NVIDIA/Megatron-LM/issues/656)). In 2026 the
# pipeline framework Piper had two copies and no sum ([#13](https://github.com/uw-syfi/piper/issues/13), fixed
# in [#25](https://github.com/uw-syfi/piper/pull/25)).
# </details>


# %% tags=["remove-cell"]
def mended(change, names=("table_VD",)):
    """`gradients`, with the gradients of some names changed by a function."""

    def mend(w, *batch):
        loss, grads = gradients(w, *batch)
        return loss, {k: change(g) if k in names else g for k, g in grads.items()}

    return mend


over = lambda g: jax.lax.psum(g, "stage")
here = lambda s: jax.lax.axis_index("stage") == s
only = lambda s: lambda g: jnp.where(here(s), over(g), g)
part = lambda s: lambda g: over(jnp.where(here(s), g, 0))
ends_only = lambda g: g + jax.lax.ppermute(g, "stage", [(0, n - 1), (n - 1, 0)])
lesson.expect(check_gradients, (mended(over), "match a single-device run"),
              (mended(ends_only), "match a single-device run"),
              (gradients, "have not changed"),
              (mended(lambda g: over(g) / n), "a quarter"),
              (mended(lambda g: over(g) / 2), "half of it"),
              (mended(only(0)), "about the last"),
              (mended(only(n - 1)), "about the first"),
              (mended(part(0)), "about the head's"),
              (mended(part(n - 1)), "about the lookup's"),
              (mended(over, ("table_VD", "layer_DD")), "different layers"),
              (mended(lambda g: 2 * over(g)), "Not yet"),
              (lambda *_: ..., "Nothing there"))  # fmt: skip
assert curves["pipeline"][59] < 0.1 and curves["pipeline"][60] > 0.7
assert curves["one device"][60] < 0.1

# %% [markdown]
# ## In one table
#
# x_ND enters `layers[s]` on stage s, y_ND goes to stage s + 1, and dx_ND to stage s - 1. A stage stores 1/n
# of the layers with their gradients and optimizer state, and runs Z microbatches.
#
# | schedule | idle microbatches i, of Z + i | units above: a program per stage; lock-step; lock-step, `lead=2` | microbatches saved, first stage | sends, forward and backward | PyTorch | Megatron-LM |
# |---|---|---|---|---|---|---|
# | GPipe | n - 1 | 33; 33; 33 | Z | y and dx of each microbatch | `ScheduleGPipe` | |
# | 1F1B | n - 1 | 33; 48; 33 | n; in lock-step 2n - 1 | the same; in lock-step both in every tick | `Schedule1F1B` | `--pipeline-model-parallel-size` |
# | interleaved, v chunks | (n - 1)/v | 28.5; 28.5; 28.5 | more | v times as much | `ScheduleInterleaved1F1B` | `--num-layers-per-virtual-pipeline-stage` |
# | zero-bubble | (n - 1)/3 | 27; 45; 30 | as 1F1B, and more | as 1F1B | `ScheduleInterleavedZeroBubble` | |
#
# All sends are exposed in the first and last n - 1 ticks. In the other ticks they can overlap with compute on
# other microbatches, if the runtime allows it.
#
# ## Three lines to keep
#
# 1. A schedule is an order of operations for each stage. GPipe *and* 1F1B are idle for (n - 1)/(Z + n - 1)
#    of the time; they differ in the activations that they save.
# 2. In one program for all devices, all devices wait for the end of each tick. There the published 1F1B takes
#    48 units instead of 33, and needs nearly twice as many microbatches in flight to be as fast as GPipe.
# 3. A stage sends little and rarely, so use `stage` on the slowest network, with a batch small enough and
#    microbatches enough. And a right loss says nothing about the gradient.
#
# **Sources.** GPipe, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965), section 2; PipeDream-Flush, which
# became 1F1B, [arXiv:2006.09503](https://arxiv.org/abs/2006.09503), section 3.2; interleaving, Megatron-LM,
# [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), section 2.2; zero-bubble, ZB-H1 in
# [arXiv:2401.10241](https://arxiv.org/abs/2401.10241); a program for each stage in JAX, JaxPP,
# [arXiv:2412.14374](https://arxiv.org/abs/2412.14374); the [scaling book on
# training](https://jax-ml.github.io/scaling-book/training); JAX on
# [`shard_map`](https://docs.jax.dev/en/latest/notebooks/shard_map.html).
