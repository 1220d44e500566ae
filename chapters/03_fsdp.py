# %% [markdown]
# # 03 · Data parallelism, ZeRO and FSDP
#
# **Question.** Eight devices train one model on different sequences. What must they communicate in each step,
# and what must each of them store?
#
# **Why it hurts not to know.** The most common mistake does not crash, and the loss it prints is *lower*
# than the right one. And if every device stores everything, a thousand chips can train no larger model than
# one chip can.
#
# *Prerequisites:* chapters 01 (`shard_map`, collectives), 02 (where gradients are added). *Mesh:* `fsdp=8`,
# then `data=2,fsdp=4`, simulated. *Runs in* 50 s on 2 cores. *Reading takes* 30 minutes, 90 with the
# exercises.

# %%
from devices import simulate_devices

simulate_devices(8)

from functools import cache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import parameters
import sharding
from chapters import lesson
from sharding import DATA, FSDP, P

# %% [markdown]
# ## Data parallelism without the sum
#
# The model is a stack of L square layers of width D, `x + tanh(x @ w)`, with a mean squared error. The batch
# has B = 32 rows (think of one row as one sequence). Each of n = 8 devices gets b = B/n = 4 of them. (An
# array's name ends with its dims; a lower-case letter is a device's shard: `x_bD`.)

# %%
n, B = 8, 32
mesh = sharding.make_mesh(f"fsdp={n}")


def problem(D, L):
    """Weights of L layers, rows, and targets."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return [draw(D, D) / D**0.5 for _ in range(L)], draw(B, D), draw(B, D)


def partial_loss(w, x_bD, y_bD):
    """The sum over these rows, divided by the number of entries in all rows."""
    for w_DD in w:
        x_bD = x_bD + jnp.tanh(x_bD @ w_DD)
    return jnp.sum((x_bD - y_bD) ** 2) / (B * x_bD.shape[1])


# %% [markdown]
# In **data parallelism**, every device stores the whole model and computes on its own rows. The naive version
# stops there: every device trains its own copy of the weights on its four rows, and the trainer prints the
# mean of the eight losses. (`vmap` simulates eight devices that never communicate.) In the right version, `w`
# is the same on all devices, so `grad` inside `shard_map` adds the eight gradients (chapter 02).

# %%
w, x_BD, y_BD = problem(D=16, L=1)
on_all_rows = lambda w: partial_loss(w, x_BD, y_BD)
stepped = lambda w, d, rate: jax.tree.map(lambda w, d: w - rate * d, w, d)
cut = P(FSDP)
added = dict(mesh=mesh, in_specs=(P(), cut, cut), out_specs=P())
added_gradient = jax.shard_map(jax.grad(partial_loss), **added)


@jax.jit
def step_of_both(copies, shared):
    own_rows = [a_BD.reshape(n, B // n, -1) for a_BD in (x_BD, y_BD)]
    losses, d_copies = jax.vmap(jax.value_and_grad(partial_loss))(copies, *own_rows)
    values = losses.sum(), on_all_rows([w[0] for w in copies]), on_all_rows(shared)
    # A device alone minimizes the mean over its own rows: n times the partial loss.
    copies = stepped(copies, d_copies, n * 1.0)
    return copies, stepped(shared, added_gradient(shared, x_BD, y_BD), 1.0), values


copies, shared, curves = [jnp.stack([w[0]] * n)], w, []
for _ in range(100):
    copies, shared, losses = step_of_both(copies, shared)
    curves.append([float(x) for x in losses])

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three loss curves over 100 steps. The loss printed without a sum is lowest, the run that sums gradients is above it, and copy 0 on all rows is highest and flat."}}
figure, axes = plt.subplots(figsize=(6, 3.2))
printed, first, right = np.transpose(curves)
blue = lesson.COLORS[FSDP]
axes.plot(first, "--", color=blue, label="no sum: copy 0 on all rows")
axes.plot(right, color=lesson.NEUTRAL, label="gradients are summed")
axes.plot(printed, color=blue, label="no sum: the loss it prints")
axes.set(title="The broken run prints the lower loss", xlabel="step", ylim=0)
axes.set_ylabel("mean squared error")
axes.legend(loc="upper right", bbox_to_anchor=(1, 0.8))
last = f"summed {right[-1]:.2f}, printed {printed[-1]:.2f}, copy 0 {first[-1]:.2f}"
print("step 100:", last)
assert printed[-1] < right[-1] < first[-1]

# %% tags=["remove-cell"]
d_one = jax.grad(on_all_rows)(w)
assert lesson.same(added_gradient(w, x_BD, y_BD), d_one)

# %% [markdown]
# Each copy has memorized its four rows. The printed loss is low, because it is measured on those same rows.
# To find the bug, compare the copies, or evaluate one of them on all rows.
#
# The fix is a sum, and `grad` inserts it. You must make the eight partial losses add up to *one* mean.
# `partial_loss` divides by the number of entries in all B rows, which it knows in advance. Often you don't
# know it:
#
# ## Exercise 1: which mean?
#
# Sequences are padded, so devices have different numbers of real rows. `error_b` holds an error for each row
# of this device; `real_b` is 1.0 for a real row and 0.0 for padding. Return this device's partial loss; over
# devices it adds up to the mean error of all real rows. `grad` does the adding. (`sharding.psum(x, FSDP)` is
# the sum of `x` over all devices.)

# %% tags=["hide-input"]
REAL_B = np.float32(np.arange(B) % 4 < np.repeat([4, 4, 4, 3, 1, 1, 1, 2], 4))


@cache
def padded_gradient(answer, name):
    def local(w_DD, x_bD, y_bD, real_b):
        def loss(w_DD):
            layer_bD = x_bD + jnp.tanh(x_bD @ w_DD)
            errors_b = jnp.mean((layer_bD - y_bD) ** 2, axis=1)
            return lesson.answered(answer)(errors_b, real_b)

        return jax.grad(loss)(w_DD)

    specs = dict(in_specs=(P(), cut, cut, cut), out_specs=P())
    on = sharding.make_mesh(name)
    function = jax.jit(jax.shard_map(local, mesh=on, **specs))
    return np.asarray(function(w_16, *rows_16, REAL_B))


(w_16,), *rows_16 = problem(D=16, L=1)


# %% tags=["hide-input"]
def check_masked(answer):
    run = lambda f: lambda name: padded_gradient(f, name)
    one_device = lambda e, r: jnp.sum(e * r) / REAL_B.sum()
    right = lambda name: padded_gradient(one_device, "fsdp=1")
    hints = [(run(wrong), hint) for wrong, hint in MASKED_HINTS]
    cases = [("fsdp=2",), ("fsdp=8",)]
    done = "Right on 2 and 8 devices: the result does not depend on their number."
    line = lesson.diagnose(run(answer), cases, right, hints, done)
    return line.replace("Your answer there is", "The gradient of your loss there is")


# %% tags=["hide-input"]
total = lambda x: sharding.psum(jnp.sum(x), FSDP)
devices = lambda: sharding.axis_size(FSDP)
ALONE = "A mean of means. Does a row count more on a device with fewer real rows?"
MASKED_HINTS = [
    (lambda e, r: jnp.sum(e * r) / jnp.sum(r),
     "Each device divides by its own rows, and you add. How many means is that?"),
    (lambda e, r: jnp.sum(e * r) / jnp.sum(r) / devices(), ALONE),
    (lambda e, r: jnp.sum(e * r) / jnp.sum(r) / n, ALONE + " (Is n always 8?)"),
    (lambda e, r: jnp.sum(e * r) / B, "You divide by all rows. Are all of them real?"),
    (lambda e, r: jnp.sum(e) / B, "Padding rows have errors too. Should they count?"),
    (lambda e, r: jnp.sum(e) / total(r), "The right count, but the sum has padding."),
    (lambda e, r: jnp.mean(e * r), "You divide by one device's rows and padding."),
    (lambda e, r: jnp.mean(e),
     "You add eight means, one per device, and each includes padding."),
    (lambda e, r: jnp.sum(e * r) / n, "You divide by 8. How many rows are real?"),
    (lambda e, r: jnp.sum(e * r), "This is a sum. By what must you divide for a mean?"),
    (lambda e, r: jnp.sum(e * r) / total(r) / devices(),
     "One division too many: partial losses are added, not averaged."),
    (lambda e, r: jnp.sum(e * r) / jax.lax.pmean(jnp.sum(r), FSDP),
     "You divide by the rows of an average device, not by all rows.")]  # fmt: skip


# %%
def masked_loss(error_b, real_b):
    return ...


print(check_masked(masked_loss))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jnp.sum(error_b * real_b) / sharding.psum(jnp.sum(real_b), FSDP)`. The count is a sum over devices,
# too. `model.loss` divides by such a count. The mean of means is a classic bug: Hugging Face's trainer had it
# [until October 2024](https://huggingface.co/blog/gradient_accumulation), over microbatches of gradient
# accumulation instead of devices.
# </details>

# %% tags=["remove-cell"]
answer_1 = lambda e, r: jnp.sum(e * r) / sharding.psum(jnp.sum(r), FSDP)
assert check_masked(answer_1).startswith("Right")
total_first = lambda e, r: sharding.psum(jnp.sum(e * r), FSDP) / REAL_B.sum()
assert check_masked(total_first).startswith("Right")
for wrong, hint in MASKED_HINTS:
    assert check_masked(wrong) == hint, hint
assert "gradient of your loss" in check_masked(lambda e, r: jnp.sum(e))
for nothing in (masked_loss, lambda e, r: None, ...):
    assert check_masked(nothing) == lesson.NOTHING

# %% [markdown]
# ## The memory of full copies
#
# With Adam, a parameter takes four float32 numbers: the weight, its gradient, and two moments. That is 16
# bytes on every device.

# %%
import config
from plan import costs, hardware, planner

total_8b, _ = costs.parameters(config.preset("llama3_8b").model)
print(f"llama3_8b: {total_8b:,} parameters, {16 * total_8b / 2**30:.0f} GiB")
for key in ("v4", "v5p", "h100"):
    chip = hardware.CHIPS[key]
    print(f"{chip.name}: {chip.memory_bytes / 2**30:.2f} GiB for a program")

# %% [markdown]
# The model fits on none of these chips, and more chips with full copies don't help. But which device needs
# what, and when? Adam works entry by entry: one device is enough to update an entry, and it needs that
# entry's moments and gradient. All devices need the weight itself, but only while its layer runs. So weights,
# gradients and moments can each be replicated, sharded over all devices, or sharded so that several devices
# hold the same shard:

# %% tags=["hide-input"] mystnb={"image": {"alt": "One matrix, three times: one box held by devices 0 to 7; eight shards, one per device; four shards, each held by two devices."}}
cases = {"P()\non fsdp=8": ("fsdp=8", P()), "P(FSDP)\non fsdp=8": ("fsdp=8", P(FSDP)),
         "P(FSDP) on\ndata=2,fsdp=4": ("data=2,fsdp=4", P(FSDP))}  # fmt: skip
figure, panels = plt.subplots(1, 3, figsize=(6.4, 2.6))
for axes, (name, (on, spec)) in zip(panels, cases.items(), strict=True):
    lesson.slices(axes, sharding.make_mesh(on), spec, "DD", name)
title = "Each box is a shard; its numbers are the devices that hold it"
figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# Sharding the moments, then also the gradients, then also the parameters is called ZeRO (zero redundancy
# optimizer) 1, 2 and 3 ([arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 5). Here you choose a
# stage with three specs: for the parameters between steps, for the gradients while they accumulate, and for
# the moments. `summed` adds partial sums into a spec's layout, and `moved` reshards an array from one spec to
# another. (`own_slice` returns this device's shard, and `to="invarying"` declares that all devices now have
# the same value.)

# %%
WHOLE, SLICES = P(), P(FSDP)


def summed(partial, spec):
    if spec == SLICES:
        return sharding.reduce_scatter(partial, FSDP, dim=0)
    return sharding.psum(partial, FSDP)


def moved(x, old, new):
    if old == new:
        return x
    if new == SLICES:
        return sharding.own_slice(x, FSDP, dim=0)  # sends nothing
    return sharding.all_gather(x, FSDP, dim=0, to="invarying")


def adam(w, m, v, d):
    m, v = 0.9 * m + 0.1 * d, 0.95 * v + 0.05 * d**2
    return w - 0.01 * m / (jnp.sqrt(v) + 1e-6), m, v


# %% [markdown]
# A step first gathers the parameters. It then processes this device's rows in Z *microbatches*, one after
# another, because the activations of all rows may not fit into memory at once (gradient accumulation). It
# sums the gradients over microbatches and devices, in either order: here the stages differ. It updates the
# entries whose moments this device stores, and restores the layout of the parameters.


# %%
def updated(w, m, v, d, params, moments):
    """Adam on the entries whose moments this device stores; restores the layout."""
    w = [moved(one, params, moments) for one in w]
    after = [adam(*one) for one in zip(w, m, v, d, strict=True)]
    w, m, v = map(list, zip(*after, strict=True))
    return [moved(one, moments, params) for one in w], m, v


# %% tags=["hide-input"]
def on_slices(step, params, moments):
    state, rows = (params, moments, moments), (SLICES, SLICES)
    specs = dict(in_specs=(*state, *rows), out_specs=state)
    step = jax.shard_map(step, mesh=mesh, **specs)
    return jax.jit(step, donate_argnums=(0, 1, 2))  # the old state's memory is reused


# %%
@cache
def train_step(params, grads, moments, Z=1, added=None):
    """An Adam step for three specs; `added` is the layout of the summed gradients."""
    added = moments if added is None else added

    def step(w, m, v, x_bD, y_bD):
        mine = sharding.vary([moved(one, params, WHOLE) for one in w], FSDP)

        def microbatch(total, rows):  # `mine` varies: `summed` adds, not `grad`
            d = jax.grad(partial_loss)(mine, *rows)
            d = [summed(one, SLICES) for one in d] if grads == SLICES else d
            return jax.tree.map(jnp.add, total, d), None

        parts = n if grads == SLICES else 1
        rows = [a_bD.reshape(Z, -1, a_bD.shape[1]) for a_bD in (x_bD, y_bD)]
        zeros = [jnp.zeros_like(one[: len(one) // parts]) for one in mine]
        d, _ = jax.lax.scan(microbatch, sharding.vary(zeros, FSDP), tuple(rows))
        if grads == WHOLE:
            d = [moved(summed(one, added), added, moments) for one in d]
        return updated(w, m, v, d, params, moments)

    return on_slices(step, params, moments)


# %% [markdown]
# Six layers of 128 x 128 have 393,216 bytes of weights. First the full copies, which PyTorch calls DDP
# (distributed data parallel):

# %%
w, x_BD, y_BD = problem(D=128, L=6)
zeros = [np.zeros_like(one) for one in w]
args = w, zeros, zeros, x_BD, y_BD
lesson.listed(lesson.compiled(train_step(WHOLE, WHOLE, WHOLE), mesh, *args))

# %% [markdown]
# This is one all-reduce of all six gradients. On a ring, a device sends 2 · 7/8 of the payload (chapter 01).
# For an all-gather or a reduce-scatter it sends 7/8.
#
# > **Predict.** ZeRO 1 shards the moments. A device updates its eighth of every matrix, and then needs the
# > other seven eighths from the other devices. How many bytes does a device now send in a step with one
# > microbatch?

# %%
my_prediction = None  # bytes
found = lesson.compiled(train_step(WHOLE, WHOLE, SLICES), mesh, *args)
whole_bytes = sum(one.nbytes for one in w)
assert {one.kind for one in found.collectives} == {"reduce-scatter", "all-gather"}
lesson.predicted("ZeRO 1 sends", my_prediction, found.total.wire_bytes, "bytes")
naive = lesson.compiled(train_step(WHOLE, WHOLE, SLICES, added=WHOLE), mesh, *args)
print(f"all-reduce first, then take a shard: {naive.total.wire_bytes:,} bytes")
assert naive.total.wire_bytes == 1.5 * found.total.wire_bytes

# %% [markdown]
# It sends as much as DDP. An all-reduce *is* a reduce-scatter followed by an all-gather, 344,064 bytes each.
# Between the two, a device holds its eighth of the summed gradient, and Adam needs no more. So ZeRO 1 updates
# at this point, and then gathers parameters instead of gradients (ZeRO paper, section 7).
#
# The second line is the naive version: keep the all-reduce, and take a shard of its result. The numbers are
# right, so you only notice the extra gather if you count bytes. DeepSpeed's first ZeRO had this bug ([issue
# 156](https://github.com/deepspeedai/DeepSpeed/issues/156), 2020), and a user found it again in 2024 ([issue
# 5758](https://github.com/deepspeedai/DeepSpeed/issues/5758)).
#
# Stages 1 and 2 differ when there are several microbatches. Here are four of one row each:

# %%
LAYOUTS = {
    "DDP": (WHOLE, WHOLE, WHOLE), "ZeRO 1": (WHOLE, WHOLE, SLICES),
    "ZeRO 2": (WHOLE, SLICES, SLICES), "ZeRO 3": (SLICES, SLICES, SLICES),
}  # fmt: skip
d = jax.grad(partial_loss)(w, x_BD, y_BD)
want = [adam(*one) for one in zip(w, zeros, zeros, d, strict=True)]  # on one device
on_first = lambda x: x.addressable_shards[0].data.nbytes
held = lambda tree: sum(map(on_first, jax.tree.leaves(tree)))
line = "{:6} {:>9} {:>9} {:>9} | {:>9} {:>9} {:>9}".format
sent, rest, temporary = {}, {}, {}


def measured(name, step, *args, on=mesh):
    """Record what a device sends in a step and stores; return the state after it."""
    found, program = lesson.compiled(step, on, *args), step.lower(*args).compile()
    sent[name], results = found.total.wire_bytes, step(*args)
    temporary[name] = program.memory_analysis().temp_size_in_bytes
    rest[name] = held(results[0]), held(results[1:])
    kinds = found.totals_by("kind")
    of = [f"{kinds[k].wire_bytes:,}" if k in kinds else "-" for k in KINDS]
    print(line(name, *of, *(f"{x:,}" for x in (*rest[name], temporary[name]))))
    return results


# %%
KINDS = "all-reduce", "reduce-scatter", "all-gather"
HEAD = line("bytes", "reduce", "scatter", "gather", "weights", "moments", "temporary")
print(HEAD)
for name, layout in LAYOUTS.items():
    results = measured(name, train_step(*layout, Z=4), *args)
    assert lesson.same(list(zip(*results, strict=True)), want)
assert sent["ZeRO 1"] == sent["DDP"] and sent["ZeRO 2"] == 2.5 * sent["ZeRO 1"]

# %% [markdown]
# All four match the step on one device (asserted). The left columns count the bytes that a device sends
# (payloads from the compiled program, times the ring's 7/8; nothing is measured). The right columns count the
# bytes that it stores: weights and moments between steps, and the compiled program's temporary memory for
# gradients, activations and gathered weights (`memory_analysis`).
#
# - **ZeRO 1** accumulates unsharded gradients over the microbatches, and reduce-scatters them once. It sends
#   as much as DDP.
# - **ZeRO 2** reduce-scatters in every microbatch, so only one matrix at a time has an unsharded gradient.
#   The price is Z reduce-scatters instead of one. With Z = 1 the two are the same program.
# - **ZeRO 3** gathers the weights at the start of the step instead of at its end. **Sharding the weights
#   between steps costs no extra bytes.** But look at its last column.

# %% [markdown]
# > **Predict.** Between steps, ZeRO 3 stores 49,152 bytes of weights instead of 393,216. How much temporary
# > memory does its step need with one microbatch instead of four? (Which arrays are unsharded at the same
# > time?)

# %%
my_prediction = None  # bytes
results = measured("ZeRO 3", train_step(*LAYOUTS["ZeRO 3"]), *args)
counted = temporary["ZeRO 3"]
lesson.predicted("ZeRO 3, temporary", my_prediction, counted, "bytes", within=0.05)
print(f"that is all weights and {counted - whole_bytes:,} bytes more")

# %% tags=["remove-cell"]
assert whole_bytes < counted < 1.02 * whole_bytes, "activations are no longer small"

# %% [markdown]
# The step gathers all weights before the first layer. Every gathered weight stays in memory until the
# backward pass of its layer, which needs it too. So this ZeRO 3 saves memory between steps, but not during
# the step.
#
# To save memory during the step as well, gather a layer's weights right before their use, free them
# afterwards, and gather them again for the backward pass. This is **FSDP** (fully sharded data parallelism),
# and also the paper's ZeRO 3, which gathers twice (section 7). Each bar shows when a layer's weights are
# unsharded; G is an all-gather, and S a reduce-scatter of the gradient:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Six layers over the time of a step. Gathered once, all layers are unsharded from the start until their backward pass; gathered twice, each is unsharded only during its own forward and backward pass."}}
L = len(w)
figure, panels = plt.subplots(2, 1, figsize=(5, 4.6), sharex=True)
for axes, twice in zip(panels, (False, True), strict=True):
    for number in range(L):
        forward, backward = number, 2 * L - 1 - number
        spans = [(forward, 1), (backward, 1)] if twice else [(0, backward + 1)]
        axes.broken_barh(spans, (number - 0.4, 0.8), fc=blue, alpha=0.6, ec="black")
        marks = {start: "G" for start, _ in spans}
        marks[backward] = marks.get(backward, "") + "S"
        for start, mark in marks.items():
            axes.text(start + 0.5, number, mark, ha="center", va="center", size=9)
    axes.set(ylabel="layer", yticks=range(L), xticks=[L / 2, 1.5 * L])
    axes.set_xticklabels(["forward", "backward"])
    axes.axvline(L, color="black", lw=0.8, ls=":")
panels[0].set(title="gathered once: ZeRO 3 as above")
panels[1].set(title="gathered twice: FSDP", xlabel="time in a step")
title = "FSDP gathers a layer's weights only while it uses them"
figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# ## FSDP by hand
#
# You can paste the program below into an empty file. The weights of all layers are stacked (dim L first), and
# `scan` loops over them. The all-gather is inside the layer, and `jax.checkpoint` makes the backward pass
# recompute the layer from its input, including the gather. The loop matters: without it, the CPU compiler
# recognizes that the two gathers of a layer are equal, and keeps only the first (asserted below). You don't
# write the reduce-scatter: it is the gather's backward pass (chapter 02).

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

L, B, D = 6, 32, 128
eight = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
w_LDD = np.float32(rng.normal(size=(L, D, D)) / D**0.5)
x_BD, y_BD = np.float32(rng.normal(size=(2, B, D)))


@jax.checkpoint  # saves only the layer's input
def layer(x_bD, w_dD):
    w_DD = jax.lax.all_gather(w_dD, "fsdp", axis=0, tiled=True)  # for this layer only
    return x_bD + jnp.tanh(x_bD @ w_DD), None  # `scan` expects a pair


# %% tags=["by-hand"]
def adam(w, m, v, d):
    m, v = 0.9 * m + 0.1 * d, 0.95 * v + 0.05 * d**2
    return w - 0.01 * m / (jnp.sqrt(v) + 1e-6), m, v


def fsdp_step(w_LdD, m_LdD, v_LdD, x_bD, y_bD):
    def my_loss(w_LdD):
        out_bD, _ = jax.lax.scan(layer, x_bD, w_LdD)
        return jnp.sum((out_bD - y_bD) ** 2) / (B * D)  # B: the rows of all devices

    return adam(w_LdD, m_LdD, v_LdD, jax.grad(my_loss)(w_LdD))


slices, rows = P(None, "fsdp"), P("fsdp")  # [L, D/8, D] and [B/8, D]
specs = dict(in_specs=(slices,) * 3 + (rows,) * 2, out_specs=(slices,) * 3)
step = jax.jit(jax.shard_map(fsdp_step, mesh=eight, **specs))


# %% tags=["by-hand"]
def on_one_device(w_LDD):
    out_BD = x_BD
    for w_DD in w_LDD:
        out_BD = out_BD + jnp.tanh(out_BD @ w_DD)
    return jnp.mean((out_BD - y_BD) ** 2)


after = step(w_LDD, 0 * w_LDD, 0 * w_LDD, x_BD, y_BD)
one_device = adam(w_LDD, 0.0, 0.0, jax.grad(on_one_device)(w_LDD))
for mine, right in zip(after, one_device, strict=True):
    np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
print("weights and both moments match a single-device run")

# %%
shape = jax.ShapeDtypeStruct
donated = jax.jit(step, donate_argnums=(0, 1, 2))
at_rest = jax.NamedSharding(eight, slices)
zeros_of = lambda L: jax.device_put(np.zeros((L, D, D), "float32"), at_rest)
state = lambda L: [zeros_of(L) for _ in range(3)]
print(HEAD)
measured("ZeRO 3", train_step(*LAYOUTS["ZeRO 3"]), *args)
measured("FSDP", donated, *state(6), x_BD, y_BD, on=eight)
assert sent["FSDP"] == 1.5 * sent["ZeRO 3"]
memory = donated.lower(*state(12), x_BD, y_BD).compile().memory_analysis()
more = (memory.temp_size_in_bytes - temporary["FSDP"]) / 6
print(f"one more layer: {more:,.0f} temporary bytes; its matrix has {4 * D * D:,}")


# %% tags=["remove-cell"]
def gathers(through):
    """Count the all-gathers in the compiled gradient of two layers."""
    share = lambda w_LdD, x_bD: jnp.sum(through(x_bD, w_LdD) ** 2)
    specs = dict(in_specs=(slices, rows), out_specs=slices)
    run = jax.shard_map(jax.grad(share), mesh=eight, **specs)
    found = lesson.compiled(run, eight, w_LDD[:2], x_BD).totals_by("kind")
    return int(found["all-gather"].count)


written_out = lambda x, w: layer(layer(x, w[0])[0], w[1])[0]
looped = lambda x, w: jax.lax.scan(layer, x, w)[0]
assert gathers(written_out) == 2 and gathers(looped) == 4, "the loop matters"

# %% [markdown]
# FSDP takes the same step with 1.5 times the bytes sent and a third of the temporary memory. One more layer
# now adds the shard of a gradient and one activation instead of a whole matrix.

# %% [markdown]
# ## In the model
#
# `model.py` does this for every matrix. Each declaration says which dim is sharded over `FSDP`. The matrix is
# gathered where it is used, in bfloat16, which halves the bytes. Here is the smallest preset without experts
# on `data=2,fsdp=4`, the third case in the figure of boxes: each of two groups of four devices stores the
# model in four shards.

# %% tags=["hide-input"]
import model
import pipeline

DENSE = {
    "model.n_experts": 0, "model.n_layers": 4, "model.dense_prefix": 0,
    "model.attention": "gqa", "model.no_rope_every": 0,
}  # fmt: skip


def tiny(mesh, gather):
    return config.preset("tiny", **DENSE, **{"mesh": mesh, "work.gather": gather})


def random_batch(B, T, V):
    """Random tokens in rows of different lengths."""
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, V, (B, T + 1), dtype=np.int32)
    real_BT = np.arange(T) < rng.integers(T // 2, T + 1, (B, 1))
    places_BT = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    return {"tokens_BT": tokens_BT[:, :-1], "targets_BT": tokens_BT[:, 1:],
            "positions_BT": places_BT, "segments_BT": np.int32(real_BT),
            "weights_BT": np.float32(real_BT)}  # fmt: skip


# %% tags=["hide-input"]
declared = model.declare(tiny("data=1", "layer").model)  # shapes and specs, no arrays
weights = parameters.init(declared, sharding.make_mesh("data=1"), seed=0)


def train_on(name, gather="layer"):
    """Return loss, gradients, collectives and temporary bytes of a step."""
    on = sharding.make_mesh(name)
    placed = jax.tree.map(lambda s: s.sharding, sharding.shapes(declared, on))
    batch = sharding.put(random_batch(B=128, T=18, V=280), on)
    args = jax.device_put(weights, placed), batch, 0
    step = pipeline.loss_and_grads(tiny(name, gather), on)
    loss, _, grads = step(*args)
    memory = step.lower(*args).compile().memory_analysis().temp_size_in_bytes
    return float(loss), grads, lesson.compiled(step, on, *args), memory


# %%
alone_loss, alone_grads, *_ = train_on("data=1")
loss, grads, found, _ = train_on("data=2,fsdp=4")
assert lesson.same((loss, grads), (alone_loss, alone_grads))
print(f"loss {alone_loss:.6f} and {loss:.6f}", end="; ")
print("gradient", lesson.ratio(grads, alone_grads))
for axes, moves in found.totals_by("axes").items():
    print(f"  over {axes}: {moves.wire_bytes:,} bytes")

# %% [markdown]
# With two axes this is called hybrid sharding, HSDP. Weights are gathered over `fsdp` only. A gradient must
# be summed over both axes, since all eight devices had different rows. Reduce-scatters in every layer sum
# over `fsdp`; then an all-reduce of the shards, a quarter of the model, sums over `data`. (The loss and the
# gradients of the norms, which are not sharded, are summed over both at once.)
#
# ## Exercise 2: which axis first?
#
# On a mesh `data=2,fsdp=4`, every device has a partial sum of a matrix's gradient, `partial_DD`. Return this
# device's shard of the whole sum: 1/4 of the rows, the same on both devices along `DATA`. `DATA` is the slow
# axis, say between two buildings, so send as few bytes as possible over it.

# %% tags=["hide-input"]
PARTIAL = np.random.default_rng(1).normal(size=(8, 128, 128)).astype(np.float32)


@cache
def two_axes(answer, name):
    """Return the shards of an answer, and the bytes a device sends over DATA."""
    on = sharding.make_mesh(name)

    def local(partial_DD):
        result = jnp.asarray(lesson.answered(answer)(partial_DD[0]))
        rows = 128 // on.shape[FSDP]
        if result.shape not in ((rows, 128), (128, 128)):
            raise ValueError(f"your shape is {result.shape}, not ({rows}, 128)")
        return result[None]  # each device's result

    specs = dict(in_specs=P((DATA, FSDP)), out_specs=P((DATA, FSDP)))
    function = jax.jit(jax.shard_map(local, mesh=on, **specs))
    found = lesson.compiled(function, on, PARTIAL).collectives
    slow = sum(one.wire_bytes for one in found if DATA in one.axes)
    return np.asarray(function(PARTIAL)), slow


# %% tags=["hide-input"]
scatter = lambda x: sharding.reduce_scatter(x, FSDP, dim=0)
own = lambda x: sharding.own_slice(x, FSDP, dim=0)
TWO_AXES_HINTS = [
    (lambda x: sharding.psum(own(x), DATA),
     "You dropped rows before the sum, so addends along fsdp are missing."),
    (lambda x: sharding.psum(x, (DATA, FSDP)),
     "The right sum, but all rows. Which are this device's?"),
    (scatter, "Summed over fsdp only. Which devices' addends are missing?"),
    (lambda x: sharding.psum(x, DATA), "Summed over data only, and all rows."),
    (lambda x: sharding.psum(x, FSDP), "Summed over fsdp only, and all rows."),
    (own, "The right rows, but only of this device's partial sum."),
    (lambda x: x, "This is one device's partial sum. Nothing is added."),
    (lambda x: sharding.psum(scatter(x), DATA) / n,
     "An eighth of the sum. Partial sums are added, not averaged."),
    (lambda x: jax.lax.pmean(scatter(x), DATA), "A mean over data, not a sum."),
]  # fmt: skip


# %% tags=["hide-input"]
# The fewest bytes that a device can send over DATA.
LEAST = {"data=2,fsdp=4": 16_384, "data=4,fsdp=2": 49_152}


def check_two_axes(answer):
    run = lambda f: lambda name: two_axes(f, name)[0]
    hints = [(run(wrong), hint) for wrong, hint in TWO_AXES_HINTS]

    def right(name):  # the rows of every device, in order
        data, fsdp = (sharding.make_mesh(name).shape[axis] for axis in (DATA, FSDP))
        return np.tile(PARTIAL.sum(0).reshape(fsdp, -1, 128), (data, 1, 1))

    cases = [(name,) for name in LEAST]
    line = lesson.diagnose(run(answer), cases, right, hints, "Right")
    for name, least in LEAST.items() if line == "Right" else ():
        if (slow := two_axes(answer, name)[1]) > least:
            return (f"The right sum. On {name} it sends {slow:,} bytes over data; "
                    f"{least:,} are enough. How large is what it sends?")  # fmt: skip
    return line.replace("Right", "Right on two meshes, with few bytes over data.")


# %%
def slice_of_sum(partial_DD):
    return ...


print(check_two_axes(slice_of_sum))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return sharding.psum(sharding.reduce_scatter(partial_DD, FSDP, dim=0), DATA)`. If you reduce-scatter first,
# a device sends 16,384 bytes over the slow axis. The other order gives equal sums but sends 65,536 bytes,
# which a test of the values cannot reveal. In `model.py` the order follows from the code: the reduce-scatter
# is the backward pass of the gather inside the layer, and the sum over `data` is the backward pass of a
# `vary` in front of all loops (`ready_for_autodiff`), once per step.
# </details>

# %% tags=["remove-cell"]
answer_2 = lambda x: sharding.psum(scatter(x), DATA)
assert check_two_axes(answer_2).startswith("Right on two")
for wrong, hint in TWO_AXES_HINTS:
    assert check_two_axes(wrong) == hint, hint
thin = lambda x, axes: sharding.reduce_scatter(x, axes, dim=0)
assert "your shape is (16, 128)" in check_two_axes(lambda x: thin(x, (DATA, FSDP)))
assert "your shape is" in check_two_axes(lambda x: sharding.psum(thin(x, DATA), FSDP))
slow_first = lambda x: scatter(sharding.psum(x, DATA))
assert "65,536 bytes" in check_two_axes(slow_first)
at_once = lambda x: own(sharding.psum(x, (DATA, FSDP)))
assert "114,688 bytes" in check_two_axes(at_once)
back = lambda x: sharding.all_gather(x, DATA, dim=0)
in_two = lambda x: back(thin(scatter(x), DATA))
assert check_two_axes(in_two).startswith("Right on two")
join = lambda x: sharding.all_gather(x[None], DATA, dim=0)
assert "98,304 bytes" in check_two_axes(lambda x: jnp.sum(join(scatter(x)), axis=0))
for nothing in (slice_of_sum, lambda x: None, ...):
    assert check_two_axes(nothing) == lesson.NOTHING

# %% [markdown]
# ## Left to the compiler
#
# `jax.jit` can do all this from one device's code and the shardings of its inputs and outputs. The compiler
# then has to find the collectives.


# %% tags=["hide-input"]
def plain_step(w, m, v, x_BD, y_BD):
    d = jax.grad(partial_loss)(w, x_BD, y_BD)
    after = [adam(*one) for one in zip(w, m, v, d, strict=True)]
    return tuple(map(list, zip(*after, strict=True)))


at = lambda spec: jax.NamedSharding(mesh, spec)
print(f"{'sent':6} {'by jit':>10} {'by hand':>10}")
for name in ("DDP", "ZeRO 1", "ZeRO 3"):
    params, _, moments = map(at, LAYOUTS[name])
    state, rows = (params, moments, moments), (at(SLICES), at(SLICES))
    specs = dict(in_shardings=(*state, *rows), out_shardings=state)
    left = jax.jit(plain_step, donate_argnums=(0, 1, 2), **specs)
    found = lesson.compiled(left, mesh, *args)
    print(f"{name:6} {found.total.wire_bytes:>10,} {sent[name]:>10,}")
kinds = found.totals_by("kind")
print("ZeRO 3:", {kind: int(one.count) for kind, one in kinds.items()})

# %% [markdown]
# For ZeRO 1 and 3 the compiler emits the useless gather: every device gets the whole gradient, and then takes
# its shard. This is XLA's compiler for CPUs. XLA's GPU compiler replaces an all-reduce followed by a slice
# ([ReduceScatterCreator](https://github.com/openxla/xla/blob/0e1ce76841700c606101e4c6b04ec081a446e96f/xla/service/gpu/transforms/reduce_scatter_creator.cc)).
# Leave small or elementwise work, such as the optimizer, to the compiler. Write collectives by hand where you
# need control of bytes and memory.
#
# ## When FSDP is limited by communication
#
# FSDP sends weights, and weights do not shrink with the batch. So there is a batch size below which the
# matmuls take less time than the communication. Take `llama3_8b`, with weights gathered twice in bfloat16
# and nothing recomputed. `planner.plan` adds up all matmuls and collectives of a step, from the model's
# tensor shapes, and divides by the speeds of a chip and its links. It needs no device:


# %%
def seconds(name, topology, T):
    """Seconds of compute and communication, with a sequence of T tokens per chip."""
    chips = hardware.Topology.parse(topology).chips
    cfg = config.preset(name, **{
        "mesh": f"fsdp={chips}", "data.batch_size": chips, "data.seq_len": T,
        "work.remat": "none", "work.gather": "layer"})  # fmt: skip
    found = planner.plan(cfg, topology).seconds(alone=True)  # no overlap
    return found["compute"], found["fsdp"]


@cache
def threshold(name, topology):
    """Fewest tokens (a multiple of 32) for which compute takes longer."""
    enough = lambda T: np.greater(*seconds(name, topology, T))
    return next(T for T in range(32, 2**14, 32) if enough(T))


for key in ("v4", "v5p", "h100"):
    chip = hardware.CHIPS[key]
    text = f"{key}: {chip.peak_flops_per_s / 1e12:.0f} TFLOP/s, per link"
    print(f"{text} {chip.link_bytes_per_s / 1e9:.0f} GB/s")

# %% [markdown]
# A TPU chip has two links along each axis of its torus. On 64 chips, `4x4x4`, all three axes are closed
# rings, and a gather over all chips uses all six links: 270 GB/s on v4, 540 on v5p. A GPU's figure totals
# its NVLinks.
#
# > **Predict.** How many tokens per v5p chip do you need per forward and backward pass for compute to take
# > as long as communication? A parameter costs 2 FLOPs per token forward and 4 backward. Weights are
# > gathered twice, in bfloat16. If the axis spans the whole TPU slice, the compiler turns the gradient's
# > reduce-scatter into an all-reduce.

# %%
my_prediction = None  # tokens
counted = threshold("llama3_8b", "v5p:4x4x4")
lesson.predicted("a v5p chip needs", my_prediction, counted, "tokens", within=0.1)

# %% tags=["remove-cell"]
assert counted == 1056

# %% [markdown]
# On paper, for a layer of W weights and N tokens per chip:
#
# | | communication | compute |
# |---|---|---|
# | forward | all-gather, 2W bytes | 2WN FLOPs |
# | backward | all-gather and reduce-scatter, 4W bytes | 4WN FLOPs |
#
# Both passes need N FLOPs per byte. So compute takes longer if **N > peak FLOP/s / link bytes/s**, counting
# all links that the axis uses. W and the number of chips cancel. The kind of chip does not:

# %%
MODELS = "dense_124m", "llama3_8b", "mixtral_8x7b"
TPUS = "v4:4x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5e:4x4"
print(f"{'tokens':10} {'formula':>8}", *(f"{name.split('_')[0]:>8}" for name in MODELS))
for topology in (*TPUS, "h100:8", "h100:16", "b200:16"):
    chips = hardware.Topology.parse(topology)
    link = hardware.layout(config.MeshConfig(fsdp=chips.chips), chips)[FSDP]
    by_hand = chips.chip.peak_flops_per_s / link.bytes_per_s
    row = (by_hand, *(threshold(name, topology) for name in MODELS))
    print(f"{topology:10}", *(f"{T:8,.0f}" for T in row))

# %% tags=["hide-input"] mystnb={"image": {"alt": "Seconds against tokens per chip, both axes logarithmic: communication is a flat line, compute rises and crosses it at about a thousand tokens."}}
figure, axes = plt.subplots(figsize=(6, 3.6))
lengths = [2**k for k in range(7, 14)]
for topology, style in (("v4:4x4x4", "--"), ("v5p:4x4x4", "-")):
    both = np.transpose([seconds("llama3_8b", topology, T) for T in lengths])
    labels = f"compute, {topology}", f"communication, {topology}"
    for curve, colour, label in zip(both, (lesson.NEUTRAL, blue), labels, strict=True):
        axes.loglog(lengths, curve, style, color=colour, label=label)
    cross = threshold("llama3_8b", topology)
    axes.plot(cross, seconds("llama3_8b", topology, cross)[1], "o", color="black", ms=5)
axes.set(title="Below about 1,000 tokens per chip, communication dominates")
axes.set(xlabel="tokens per chip and microbatch", ylabel="seconds")
axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1]
axes.set_yticks(ticks, map(str, ticks))
axes.minorticks_off()
axes.legend()

# %% [markdown]
# The planner and the rule differ by known factors. Over all chips of a slice, the TPU compiler turns a
# reduce-scatter into an all-reduce: 8W bytes instead of 6W. On v5p this multiplies the rule's 850 tokens
# by 4/3: 1,133. On 8 GPUs a gather sends 7/8 of W. Attention has matmuls without weights. They lower the
# threshold, here to 1,056, and most in small models. And Mixtral gathers eight experts, while a token uses
# two: **the threshold is multiplied by total / active parameters**, here 3.6.
#
# Tokens per chip limit the number of chips: with FSDP alone, a batch of 4 million tokens is enough for 4e6 /
# 1,056 = 3,800 v5p chips. Beyond that, you need an axis that splits the matmuls of a token (chapter 04).
# Count the tokens of one *microbatch*, because each microbatch gathers again. To avoid that, keep the
# gathered weights for the whole step (`step` below; 2 bytes per parameter, and 4 for gradients). Take 512
# sequences of 1,024 tokens on `v5p:4x4x4`:


# %% tags=["hide-input"]
def planned(mesh, gather, microbatches):
    changes = {"mesh": mesh, "work.gather": gather, "work.remat": "full"}
    changes |= {"work.device_batch": 8 // microbatches}
    changes |= {"data.batch_size": 512, "data.seq_len": 1024}
    return planner.plan(config.preset("llama3_8b", **changes), "v5p:4x4x4")


plan = planned("fsdp=64", "layer", 1)
print(f"compute: {plan.seconds()['compute']:.3f} s; communication (comm.):")
row = "{:8} {:6} {:12} {:>7} {:>5}".format
print(row("mesh", "gather", "microbatches", "comm. s", "GiB"))
for case in (("data=64", "-", 1), ("fsdp=64", "layer", 1), ("fsdp=64", "step", 1),
             ("fsdp=64", "layer", 8), ("fsdp=64", "step", 8)):  # fmt: skip
    plan = planned(case[0], case[1].replace("-", "layer"), case[2])
    took = plan.seconds(alone=True)
    comm = took.get(FSDP, 0) + took.get(DATA, 0)
    print(row(*case, f"{comm:.3f}", f"{plan.peak_bytes / 2**30:.0f}"))
[note] = hardware.check(plan.cfg.mesh, plan.topology)
print(note)

# %% [markdown]
# (A chip has 96 GiB, so full copies do not fit.) Over `data` there is one all-reduce of shards per step,
# however many microbatches there are. Take two slices of 64 v5p chips, connected by the data-center network.
# For 6WN FLOPs, a chip sends its shard of the gradient, 4W/64 bytes in float32 (an all-reduce over two sends
# 2 · 1/2 of it):

# %%
chip, fsdp = hardware.CHIPS["v5p"], 64
tokens = 4 / fsdp / 6 * chip.peak_flops_per_s / chip.dcn_bytes_per_s
print(f"network: {chip.dcn_bytes_per_s / 1e9} GB/s per chip")
print(f"N > {tokens:.0f} tokens per chip")

# %% [markdown]
# This network is 86 times slower but needs fewer tokens than the fast links, because a chip sends 1/64 of the
# model.
#
# These times are a roofline: compute and communication at full speed, one after the other. If gathers overlap
# with matmuls, only the longer of the two matters. Simulated devices share one processor and cannot show
# that. Two pages simulate the TPU compiler's schedule: "How the planner estimates step time" and "The
# timeline of a layer", with and without prefetched gathers. They leave out latency. At about 1 µs per hop,
# with two hops along each of three axes, it dominates gathers below 6 µs: 3 MB at 540 GB/s.
#
# ## Exercise 3: choose the settings
#
# Train `llama3_8b` on `v5p:4x4x4`, with 95.74 GiB per chip; a step has 4,096 sequences of 512 tokens. Return
# settings for which the plan fits and the step takes at most 3.55 s without any overlap. You choose these
# (what you leave out gets its first value):
#
# - `mesh`, of `data` and `fsdp`, which is required;
# - `work.gather`: `"layer"`, again in every microbatch; `"step"`, once;
# - `work.remat`, what the backward pass recomputes: `"full"` (whole layers), `"dots"` (all but matmuls),
#   `"none"`;
# - `work.device_batch`, sequences per chip in one microbatch: 64 (all of its sequences), 1, 2, 4, ..

# %% tags=["hide-input"]
FREE = {"mesh": (), "work.device_batch": (), "work.gather": ("layer", "step"),
        "work.remat": ("none", "dots", "full")}  # fmt: skip
ONCE = 3.32  # seconds of compute, if nothing is recomputed
BATCH = {"data.batch_size": 4096, "data.seq_len": 512}
FIRST = {"work.gather": "layer", "work.remat": "full", "work.device_batch": 64}
preset = lambda found: config.preset("llama3_8b", **BATCH | FIRST | found)


def check_settings(answer):
    if (found := answer() if callable(answer) else answer) in (..., None):
        return lesson.NOTHING
    if not isinstance(found, dict) or {*found} - {*FREE} or "mesh" not in found:
        return f"Return a dict with a mesh; its keys: {', '.join(FREE)}."
    for name, values in FREE.items():
        if values and found.get(name, values[0]) not in values:
            return f"{name} must be one of {', '.join(values)}, not {found[name]!r}."
    try:
        return judged(planner.plan(preset(found), "v5p:4x4x4"))
    except (ValueError, TypeError) as error:
        return f"The planner rejects this: {error}"


# %% tags=["hide-input"]
TOO_LARGE = {
    ("parameters", "optimizer"): "Mostly weights and moments. Which axis shards them?",
    ("weights", "gradients"): "Mostly gathered weights and gradients. Keep them?",
    ("saved", "at work"): "Mostly activations. How many tokens are in memory at once?",
}


def judged(plan):
    mesh, gib, took = plan.cfg.mesh, plan.peak_bytes / 2**30, plan.seconds(alone=True)
    if mesh.data * mesh.fsdp < 64:
        return "Later chapters explain those axes. You need only data and fsdp."
    if not plan.fits:
        size = lambda names: sum(plan.memory_bytes[name] for name in names)
        return f"{gib:,.0f} GiB: too large. {TOO_LARGE[max(TOO_LARGE, key=size)]}"
    step_s, work = sum(took.values()), took["compute"]
    comm = step_s - work - took["optimizer"]
    text = f"{step_s:.2f} s: compute {work:.2f}, network {comm:.2f}; {gib:.0f} GiB"
    if step_s <= 3.55:
        return f"Right: {text}."
    if comm > work - ONCE:
        return f"{text}. Network: how often is a weight sent in a step?"
    return f"{text}. Compute: {ONCE:.2f} s is possible. What could you save in memory?"


# %%
def settings():
    return ...


print(check_settings(settings))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `{"mesh": "fsdp=64", "work.gather": "step", "work.remat": "none", "work.device_batch": 4}` takes 3.47 s, in
# 81 GiB. `fsdp=64` alone fits in 15 GiB and takes 4.20 s, as it computes every layer twice. Saving the
# results of matmuls (`"dots"`) fits only with several microbatches, say four of 16 sequences. Each microbatch
# gathers again: 3.79 s. If you keep the gathered weights too, more microbatches cost almost nothing, so they
# can be small (`"dots"` works too, with 1 to 8 sequences). But the gathered weights and the gradients take 45
# GiB, so on v4 no plan with `gather=step` fits.
# </details>

# %% tags=["remove-cell"]
SLICED, STEP = {"mesh": "fsdp=64"}, {"work.gather": "step"}
EACH = "work.device_batch"
DOTS, NONE = SLICED | {"work.remat": "dots"}, SLICED | {"work.remat": "none"}
assert check_settings(lambda: NONE | STEP | {EACH: 4}).startswith("Right: 3.47 s")
assert "81 GiB" in check_settings(NONE | STEP | {EACH: 4})
for size in (1, 2, 4, 8):
    assert check_settings(DOTS | STEP | {EACH: size}).startswith("Right: 3.")
assert check_settings(lambda: SLICED).startswith("4.20 s")
assert "15 GiB. Compute" in check_settings(SLICED)
assert "Compute:" in check_settings(SLICED | STEP | {EACH: 8})
assert check_settings(DOTS | {EACH: 16}).startswith("3.79 s")
for each in (DOTS | {EACH: 16}, DOTS | {EACH: 1}, NONE | {EACH: 8}):
    assert "how often" in check_settings(each)
assert "Mostly weights and moments" in check_settings({"mesh": "data=64"})
assert "Mostly activations" in check_settings(NONE)
assert "Mostly activations" in check_settings(DOTS | STEP)
whole = planner.plan(preset(NONE | STEP | {EACH: 4}), "v5p:4x4x4")
assert abs(whole.seconds()["compute"] - ONCE) < 0.005
size = whole.memory_bytes
assert round((size["weights"] + size["gradients"]) / 2**30) == 45
smallest = preset(SLICED | STEP | {"work.remat": "full", EACH: 1})
assert not planner.plan(smallest, "v4:4x4x4").fits
assert "rejects" in check_settings({"mesh": "fsdp=32"})
assert "Later chapters" in check_settings({"mesh": "fsdp=32,tensor=2"})
assert "a dict" in check_settings(64) and "a dict" in check_settings({"mash": 1})
assert "one of none, dots, full" in check_settings(SLICED | {"work.remat": "all"})
assert check_settings(settings) == check_settings(None) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# This is FSDP for one layer with plain gradient steps. A gradient whose norm is above `LARGEST` is scaled
# down. `check_vma` is on, and finds no error. A colleague reports that the model learns faster on more
# devices.

# %%
LARGEST, STEPS = 0.2, 20
START, X_BD, Y_BD = problem(D=16, L=1)


def train(name):
    """Weights after STEPS steps on a mesh."""

    def step(w, x_bD, y_bD):
        def loss(w):
            gathered = [sharding.all_gather(one, FSDP, dim=0) for one in w]
            return partial_loss(gathered, x_bD, y_bD)

        d = jax.grad(loss)(w)
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in d))
        return stepped(w, d, jnp.minimum(1.0, LARGEST / norm))

    on, rows = sharding.make_mesh(name), P((DATA, FSDP))
    specs = dict(in_specs=(SLICES, rows, rows), out_specs=SLICES)
    program = jax.jit(jax.shard_map(step, mesh=on, **specs))
    w = jax.device_put(START, jax.NamedSharding(on, SLICES))
    for _ in range(STEPS):
        w = jax.block_until_ready(program(w, X_BD, Y_BD))
    return w


# %%
print(f"at the start: loss {partial_loss(START, X_BD, Y_BD):.3f}")
for name in ("fsdp=1", "fsdp=2", "fsdp=4", "fsdp=8"):
    print(f"{name}: loss {partial_loss(train(name), X_BD, Y_BD):.3f}")

# %% [markdown]
# The rows and the initial weights are the same, nothing is random, and the loss falls on all four meshes. Fix
# `train`, so that the result does not depend on the mesh.


# %% tags=["hide-input"]
@cache
def alone(scale, parts):
    """The same on one device; `scale` gets each shard's sum of squares."""

    @jax.jit
    def step(w):
        d = jax.grad(partial_loss)(w, X_BD, Y_BD)
        squares_n = sum(jnp.sum(one.reshape(parts, -1) ** 2, axis=1) for one in d)
        scale_n = scale(squares_n) * jnp.ones(parts)
        scaled = [one.reshape(parts, -1) * scale_n[:, None] for one in d]
        return [one - by.reshape(one.shape) for one, by in zip(w, scaled, strict=True)]

    w = START
    for _ in range(STEPS):
        w = step(w)
    return np.asarray(w[0])


by = lambda norm: lambda s_n: jnp.minimum(1.0, LARGEST / norm(s_n))
right_scale = by(lambda s_n: jnp.sqrt(jnp.sum(s_n)))


# %% tags=["hide-input"]
NORM_HINTS = [
    (by(jnp.sqrt),
     "The weights are the same as before your change. What in `step` depends on n?"),
    (by(lambda s_n: jnp.sum(jnp.sqrt(s_n))),
     "Now the steps shrink with more devices: norms cannot be added."),
    (by(lambda s_n: jnp.sqrt(jnp.mean(s_n))),
     "The steps are still longer than one device's."),
    (by(lambda s_n: jnp.mean(jnp.sqrt(s_n))),
     "A mean of norms is not the norm of all entries."),
    (by(lambda s_n: jnp.sqrt(jnp.max(s_n))),
     "One scale for all shards, but from the largest shard's norm."),
    (by(lambda s_n: jnp.sqrt(s_n) * len(s_n)),
     "Each shard still has its own scale."),
    (lambda s_n: jnp.minimum(1 / len(s_n), LARGEST / jnp.sqrt(s_n)),
     "`d` is already the gradient of the whole batch. Divide nothing."),
    (by(lambda s_n: LARGEST), "Now no gradient is scaled down."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_mend(train):
    parts = {"fsdp=4": 4, "data=4,fsdp=2": 2}
    of = lambda scale: lambda name: alone(scale, parts[name])
    hints = [(of(scale), hint) for scale, hint in NORM_HINTS]
    done = "Fixed: on fsdp=4 and data=4,fsdp=2 the weights match a single-device run."
    yours = lambda name: np.asarray(lesson.answered(train)(name)[0])
    right = lambda name: alone(right_scale, 1)
    return lesson.diagnose(yours, [(name,) for name in parts], right, hints, done)


# %% tags=["hide-output"]
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `norm` is the norm of this device's shards. It is smaller than the norm of the whole gradient, so with more
# devices gradients are clipped less. And each shard is scaled by a different number, so even the direction is
# wrong. Add the squares over devices:
#
# ```python
# norm = jnp.sqrt(sharding.psum(sum(jnp.sum(one**2) for one in d), FSDP))
# ```
#
# Do not add over `DATA`, along which the shards are equal (JAX raises an error here). `check_vma` found
# nothing, since a sharded result may differ on every device. The loss falls, and you only see the bug if you
# train on another mesh too. [AReaL](https://github.com/areal-project/AReaL/issues/312) had this bug in 2025.
# [VeOmni](https://github.com/ByteDance-Seed/VeOmni/issues/184) had the opposite bug: it added squares over
# both axes of HSDP. This project clips outside the `shard_map` (`optimizer.clip`), where arrays are unsharded
# and a norm is the norm of all entries.
# </details>


# %% tags=["remove-cell"]
def with_norm(norm_of, divided=lambda: 1):
    def train(name):
        def step(w, x_bD, y_bD):
            gather = lambda w: [sharding.all_gather(one, FSDP, dim=0) for one in w]
            d = jax.grad(lambda w: partial_loss(gather(w), x_bD, y_bD))(w)
            d = [one / divided() for one in d]
            norm = norm_of(sum(jnp.sum(one**2) for one in d))
            return stepped(w, d, jnp.minimum(1.0, LARGEST / norm))

        on, rows = sharding.make_mesh(name), P((DATA, FSDP))
        specs = dict(in_specs=(SLICES, rows, rows), out_specs=SLICES)
        program = jax.jit(jax.shard_map(step, mesh=on, **specs))
        w = jax.device_put(START, jax.NamedSharding(on, SLICES))
        for _ in range(STEPS):
            w = jax.block_until_ready(program(w, X_BD, Y_BD))
        return w

    return train


whole_norm = lambda s: jnp.sqrt(sharding.psum(s, FSDP))
assert check_mend(with_norm(whole_norm)).startswith("Fixed")
WRONG = [
    with_norm(jnp.sqrt), with_norm(lambda s: sharding.psum(jnp.sqrt(s), FSDP)),
    with_norm(lambda s: jnp.sqrt(jax.lax.pmean(s, FSDP))),
    with_norm(lambda s: jax.lax.pmean(jnp.sqrt(s), FSDP)),
    with_norm(lambda s: jnp.sqrt(jax.lax.pmax(s, FSDP))),
    with_norm(lambda s: jnp.sqrt(s) * devices()),
    with_norm(jnp.sqrt, divided=devices), with_norm(lambda s: LARGEST),
]  # fmt: skip
for wrong, (_, hint) in zip(WRONG, NORM_HINTS, strict=True):
    assert check_mend(wrong) == hint, hint
assert check_mend(train) == NORM_HINTS[0][1]
# Clipping does not mask a gradient that is too big: the last steps are unclipped.
too_big = with_norm(lambda s: whole_norm(s), divided=lambda: 1 / 4)
assert check_mend(too_big).startswith("Not yet")
over_both = lambda s: jnp.sqrt(sharding.psum(s, (DATA, FSDP)))
assert "It stops" in check_mend(with_norm(over_both))
for nothing in (lambda name: ..., lambda name: None, ...):
    assert check_mend(nothing) == lesson.NOTHING

# %% [markdown]
# ## In one table
#
# FSDP computes x_bD @ w_DF, where w_DF is gathered from shards w_dF. Each of n devices has b = B/n rows of x
# and d = D/n rows of the matrix. W counts all weights, dW all gradients, Z the microbatches. For bytes,
# multiply by (n - 1)/n, where n is the size of the axis, and by the bytes per number.
#
# | | unsharded between steps | forward | backward | once per step | exposed |
# |---|---|---|---|---|---|
# | DDP | all | | | all-reduce, 2 dW | at the end of the step |
# | ZeRO 1 | weights, gradients | | | reduce-scatter and all-gather, dW + W | at the end of the step |
# | ZeRO 2 | weights | | reduce-scatter, Z dW | all-gather, W | reduce-scatters can overlap with compute |
# | ZeRO 3, gathered once | nothing | all-gather, W | reduce-scatter, Z dW | | at the first layer |
# | FSDP | nothing | all-gather, Z W | both, Z W + Z dW | | at each layer, unless prefetched |
# | HSDP | nothing within a group | all-gather, Z W | both, Z W + Z dW | over `data`: all-reduce, 2 x a shard of dW | also on the slow network, once |
#
# Use **DDP** if 16 bytes per parameter fit. Otherwise use **FSDP**, if a microbatch has as many tokens per
# chip as the table of thresholds requires. Use **HSDP** if part of the network is slow. PyTorch's
# `DistributedDataParallel` *averages* gradients of local means; here we add gradients of partial losses. FSDP
# is [fully_shard](https://docs.pytorch.org/docs/main/distributed/fsdp.fully_shard.html). Its
# `reshard_after_forward` chooses between one gather and two; `reduce_dtype` is the dtype of the
# reduce-scatter. HSDP takes a 2-D `DeviceMesh`.
#
# ## Three lines to keep
#
# 1. An all-reduce is a reduce-scatter and an all-gather. Between the two, gradients, moments and parameters
#    can all be sharded, without sending more bytes.
# 2. Sharding between steps does not save memory during a step. If you also free a weight after its layer, you
#    gather it again in every backward pass. This third transfer is the price of FSDP.
# 3. A chip needs (peak FLOP/s) / (link bytes/s) tokens per microbatch, for any model size and any number of
#    chips: by this rule 850 on v5p, 2,200 on an H100 in its node, and more for sparse models.
#
# **Sources.** ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), sections 5 and 7. Sharding the
# optimizer state in XLA, [arXiv:2004.13336](https://arxiv.org/abs/2004.13336). PyTorch FSDP,
# [arXiv:2304.11277](https://arxiv.org/abs/2304.11277), section 3. Hybrid sharding: MiCS,
# [arXiv:2205.00119](https://arxiv.org/abs/2205.00119). The compiler: GSPMD,
# [arXiv:2105.04663](https://arxiv.org/abs/2105.04663). Flax, [Scale up on multiple
# devices](https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html). The threshold, and prefetched
# gathers: scaling book, [Training](https://jax-ml.github.io/scaling-book/training), which has 2,550 tokens
# for one axis of v5p and 850 for three.
