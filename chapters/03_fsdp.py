# %% [markdown]
# # 03 · Data parallelism, ZeRO and FSDP
#
# In **data parallelism**, every device trains the same model on different sequences, and the devices add up
# their gradients once per step. **ZeRO** (zero redundancy optimizer) and **FSDP** (fully sharded data
# parallelism) compute the same step, but each device stores only a shard of the weights, the gradients and
# the optimizer state.
#
# Data parallelism is the simplest way to use more devices: it changes nothing inside the model. But if
# every device stores everything, a thousand devices can train no larger model than one device can. FSDP
# removes this limit. It sends 1.5 times the bytes if it gathers every layer's weights twice, and no more
# bytes if it keeps them until the backward pass.
#
# *Prerequisites:* chapters 01 (`shard_map`, collectives), 02 (where gradients are added). *Mesh:* `fsdp=8`,
# then `data=2,fsdp=4`, simulated. *Runs in* 60 s on 2 cores. *Reading takes* 25 minutes, 85 with the
# exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

from functools import cache

import matplotlib.pyplot as plt
import numpy as np

import config
import model
import parameters
import pipeline
import sharding
from chapters import lesson, opening
from plan import planner
from plan.count import costs
from sharding import DATA, FSDP

blue, GiB = lesson.COLORS[FSDP], 2**30

# %% tags=["hide-input"] mystnb={"image": {"alt": "One layer of Llama 3 8B on eight H100s. With DDP every device stores 3.25 GiB and sends one all-reduce after the backward pass. With FSDP every device stores an eighth, and sends two all-gathers and a reduce-scatter."}}
W = opening.PARAMETERS
forward_ms = opening.compute_ms(2 * W * opening.TOKENS / 8)
gather_ms = opening.network_ms(7 / 8 * 2 * W)  # bfloat16


def scene(title, parts, network, wait):
    gib = {"weights": 4, "gradients": 4, "optimizer state": 8}
    memory = {name: size * W / GiB / parts for name, size in gib.items()}
    backward = "backward", 2 * wait + forward_ms, 2 * forward_ms
    compute = [("forward", wait, forward_ms), backward]
    return opening.Scene(title, memory, compute, network)


first, second = forward_ms + gather_ms, 3 * forward_ms + 2 * gather_ms
ddp = [("AR", 3 * forward_ms, 2 * gather_ms)]
fsdp = [("AG", 0, gather_ms), ("AG", first, gather_ms), ("RS", second, gather_ms)]
before = scene("DDP: every device stores all", 1, ddp, 0)
after = scene("FSDP: every device stores 1/8", 8, fsdp, gather_ms)
title = "FSDP: an eighth of the memory, 1.5 times the bytes sent"
opening.before_after(before, after, title, FSDP)

# %% [markdown]
# This is one layer of Llama 3 8B (218 million parameters) on eight H100s, with 8,192 tokens per device, at
# peak speed and without overlap. The memory is what a device stores in float32 when the optimizer starts.
# AR is an all-reduce, AG an all-gather, RS a reduce-scatter, all in bfloat16.
#
# > **Predict.** Llama 3 8B has 8.03 billion parameters. With DDP (data parallelism with full copies), how
# > many GiB of weights, gradients and optimizer state does each device store? All are float32, and the
# > optimizer is Adam, whose state is two moments of each weight.

# %% tags=["hide-input"]
params_8b, _ = costs.parameters(config.preset("llama3_8b").model)
stored = 16 * params_8b / GiB

# %%
my_prediction = None  # GiB
lesson.predicted("every device stores", my_prediction, stored, "GiB", within=0.02)
print(f"an H100 has {opening.CHIP.memory_bytes / GiB:.2f} GiB for a program")

# %% [markdown]
# A parameter takes 16 bytes, four float32 values: the weight, its gradient, and two moments. The model does
# not fit. (JAX reserves only 75% of the H100's 79.6 GiB at start, unless you set
# [`XLA_CLIENT_MEM_FRACTION`](https://docs.jax.dev/en/latest/gpu_memory_allocation.html).)
#
# ## The memory of one device
#
# **Mixed precision.** Why float32? Matmuls run in bfloat16 (bf16), which is at least twice as fast and
# halves the bytes of activations and of gathered weights. But an update below about 1/512 of a bf16 weight
# would be rounded away. So the optimizer keeps float32 *master weights* and moments, and each step casts
# the weights to bf16 ([arXiv:1710.03740](https://arxiv.org/abs/1710.03740)). Gradients are sent in bf16 and
# stored in float32, as with PyTorch's `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`: 4 + 4 + 8 bytes.
#
# **Activations**, the results of the forward pass that the backward pass needs, come on top. They grow with
# the tokens of a device. In a layer of Llama with width D, hidden width F, and G KV heads of width K, one
# token leaves 6 D + 2 G K + 3 F elements: 4 D for the inputs of attention and feed-forward, before and
# after their norms, 2 D for queries and attention output, 2 G K for keys and values, and 3 F in
# feed-forward. (FlashAttention does not store the attention matrix.) **Activation checkpointing** stores
# only each layer's input, D elements, and recomputes the rest in the backward pass, for up to one third
# more compute.

# %%
D, F, G, K, L = 4096, 14_336, 8, 128, 32  # widths, KV heads, head dim, layers
N = 8192  # tokens per device
everything = 2 * N * L * (6 * D + 2 * G * K + 3 * F) / GiB  # 2 bytes per element
checkpointed = 2 * N * L * D / GiB
print(f"activations: {everything:.1f} GiB; checkpointed: {checkpointed:.1f} GiB")

# %% [markdown]
# ## Shard what is only stored, gather what is needed
#
# With Adam, a device that has an eighth of the gradients and moments can update that eighth of the weights.
# And devices need a layer's weights only while that layer runs. So you can shard the optimizer state, then
# also the gradients, then also the weights. The ZeRO paper
# ([arXiv:1910.02054](https://arxiv.org/abs/1910.02054)) calls these steps stages 1, 2 and 3. Here they are
# **levels**, because pipelines have stages, too. With checkpointed activations on top, they need:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Memory per device for Llama 3 8B on eight devices: DDP 122 GiB, ZeRO 1 69, ZeRO 2 43, ZeRO 3 or FSDP 17 GiB. A dashed line marks the 59.7 GiB of an H100."}}
n = 8
levels = {"DDP": (1, 1, 1), "ZeRO 1": (1, 1, n), "ZeRO 2": (1, n, n)}
levels["ZeRO 3,\nFSDP"] = (n, n, n)
sizes = {"weights": 4, "gradients": 4, "optimizer state": 8}
figure, axes = plt.subplots(figsize=(6, 3.4))
below, style = np.zeros(4), dict(edgecolor="black", lw=0.6)
for which, (name, size) in enumerate(sizes.items()):
    high = np.array([size * params_8b / GiB / cuts[which] for cuts in levels.values()])
    axes.bar(range(4), high, 0.6, below, color=opening.PARTS[name], label=name, **style)
    below += high
light = dict(color="#dddddd", label="activations")
axes.bar(range(4), checkpointed, 0.6, below, **light, **style)
for at, total in enumerate(below + checkpointed):
    axes.text(at, total + 1, f"{total:.0f}", ha="center", va="bottom")
axes.axhline(limit := opening.CHIP.memory_bytes / GiB, color="black", ls="--", lw=1)
axes.text(3.45, limit + 1, f"H100: {limit:.1f}", ha="right", va="bottom")
axes.set(ylabel="GiB per device", ylim=(0, 135))
axes.set_xticks(range(4), levels)
axes.set_title("Each level shards one more kind of state over eight devices")
axes.legend()

# %% [markdown]
# **FSDP** gathers a layer's weights right before each use, in the forward and in the backward pass, and
# then frees them. So only one or two layers are unsharded at a time, 0.4 GiB each in bf16.
#
# ## FSDP by hand
#
# You can paste this program into an empty file. It has L square layers, `x + tanh(x @ w)`, and a mean
# squared error. Each of n = 8 devices gets b = B/n = 4 of the B = 32 rows (think of one row as one
# sequence). An array's name ends with its dims; a lower-case letter is a device's shard. `jax.lax.scan`
# loops over the stacked weights (dim L first). `jax.checkpoint` saves only a layer's input, so the backward
# pass repeats the layer and its gather.

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
def adam(w, m, v, d):  # without bias correction
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


mine = right = w_LDD, 0 * w_LDD, 0 * w_LDD
for _ in range(3):
    mine = step(*mine, x_BD, y_BD)
    right = adam(*right, jax.grad(on_one_device)(right[0]))
for a, b in zip(mine, right, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
print("after 3 steps, weights and both moments match a single-device run")

# %% [markdown]
# No line adds gradients: the reduce-scatter is the backward pass of the gather (chapter 02). Adam runs on
# shards.
#
# ## Data parallelism without the sum
#
# What if nothing adds the gradients? Below, every device trains its own copy of the weights on its four
# rows, and the trainer prints the mean of the eight losses. The right version adds the eight gradients.

# %% tags=["hide-input"]
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


# %% tags=["hide-input"]
w, x_BD, y_BD = problem(D=16, L=1)
on_all_rows = lambda w: partial_loss(w, x_BD, y_BD)
stepped = lambda w, d: jax.tree.map(lambda w, d: w - d, w, d)  # learning rate 1
rows = P(FSDP)
specs = dict(mesh=mesh, in_specs=(P(), rows, rows), out_specs=P())
summed_gradient = jax.shard_map(jax.grad(partial_loss), **specs)


@jax.jit
def step_of_both(copies, shared):
    own_rows = [a_BD.reshape(n, B // n, -1) for a_BD in (x_BD, y_BD)]
    losses, d_copies = jax.vmap(jax.value_and_grad(partial_loss))(copies, *own_rows)
    values = losses.sum(), on_all_rows([w[0] for w in copies]), on_all_rows(shared)
    d_own = [n * d for d in d_copies]  # of a copy's loss: the mean over its own rows
    d_shared = summed_gradient(shared, x_BD, y_BD)
    return stepped(copies, d_own), stepped(shared, d_shared), values


# %% tags=["hide-input"] mystnb={"image": {"alt": "Three loss curves over 100 steps. The loss printed without a sum is lowest, the run that sums gradients is above it, and copy 0 on all rows is highest and flat."}}
copies, shared, curves = [jnp.stack([w[0]] * n)], w, []
for _ in range(100):
    copies, shared, losses = step_of_both(copies, shared)
    curves.append([float(x) for x in losses])
figure, axes = plt.subplots(figsize=(6, 3.2))
printed, first, right = np.transpose(curves)
axes.plot(first, "--", color="black", label="no sum: copy 0 on all rows")
axes.plot(right, color=lesson.NEUTRAL, label="gradients are summed")
axes.plot(printed, color="black", label="no sum: the loss it prints")
axes.set(title="The broken run prints the lower loss", xlabel="step", ylim=0)
axes.set_ylabel("mean squared error")
axes.legend(loc="upper right", bbox_to_anchor=(1, 0.8))
last = f"summed {right[-1]:.2f}, printed {printed[-1]:.2f}, copy 0 {first[-1]:.2f}"
print("step 100:", last)
assert printed[-1] < right[-1] < first[-1]

# %% tags=["remove-cell"]
d_one = jax.grad(on_all_rows)(w)
assert lesson.same(summed_gradient(w, x_BD, y_BD), d_one)

# %% [markdown]
# Each copy has memorized its four rows, and the printed loss is measured on those same rows. To find the
# bug, compare the copies, or evaluate one of them on all rows.
#
# ## From DDP to ZeRO 3
#
# Four programs take the same step of Adam, with different arrays sharded between steps. `add` is an
# all-reduce of every matrix of a list, `scatter` a reduce-scatter, `gather` an all-gather; `my_shards`
# selects this device's shards. ZeRO 1 and 2 return gathered weights with `out_specs=P()`, so `gather` asks
# for an invariant result, whose type says that it is equal on all devices (chapter 02). If the activations
# of all rows don't fit in memory, a device processes Z **microbatches** one after another and adds up their
# gradients (gradient accumulation).

# %%
each = lambda function: lambda arrays: [function(one) for one in arrays]
add = each(lambda d_DD: sharding.psum(d_DD, FSDP))
scatter = each(lambda d_DD: sharding.reduce_scatter(d_DD, FSDP, dim=0))
gather = each(lambda w_dD: sharding.all_gather(w_dD, FSDP, dim=0, to="invarying"))
my_shards = each(lambda w_DD: sharding.own_slice(w_DD, FSDP, dim=0))


# %% tags=["hide-input"]
def update(w, m, v, d):
    """Adam on every matrix, or on this device's shard of it."""
    after = [adam(*one) for one in zip(w, m, v, d, strict=True)]
    return tuple(map(list, zip(*after, strict=True)))


def accumulate(gradient, x_bD, y_bD, Z):
    """Add up the gradients of Z microbatches, one after another."""
    micro = zip(jnp.split(x_bD, Z), jnp.split(y_bD, Z), strict=True)
    found = [gradient(*rows) for rows in micro]
    return [sum(of_one) for of_one in zip(*found, strict=True)]


def partial_gradient(w):
    """Return a function of rows: their gradient, which nothing adds over devices."""
    copy = sharding.vary(w, FSDP)
    return lambda x_bD, y_bD: jax.grad(partial_loss)(copy, x_bD, y_bD)


# %%
def ddp(w, m, v, x_bD, y_bD, Z=1):
    d = add(accumulate(partial_gradient(w), x_bD, y_bD, Z))
    return update(w, m, v, d)


def zero_1(w, m, v, x_bD, y_bD, Z=1):  # m and v are shards
    d = scatter(accumulate(partial_gradient(w), x_bD, y_bD, Z))
    w, m, v = update(my_shards(w), m, v, d)
    return gather(w), m, v


def zero_2(w, m, v, x_bD, y_bD, Z=1):  # and gradients, between microbatches
    partial = partial_gradient(w)
    d = accumulate(lambda *rows: scatter(partial(*rows)), x_bD, y_bD, Z)
    w, m, v = update(my_shards(w), m, v, d)
    return gather(w), m, v


def zero_3(w, m, v, x_bD, y_bD, Z=1):  # and w
    partial = partial_gradient(gather(w))
    d = accumulate(lambda *rows: scatter(partial(*rows)), x_bD, y_bD, Z)
    return update(w, m, v, d)


# %% tags=["hide-input"]
REPLICATED, SHARDED = P(), P(FSDP)
LEVELS = {ddp: (REPLICATED, REPLICATED), zero_1: (REPLICATED, SHARDED),
          zero_2: (REPLICATED, SHARDED), zero_3: (SHARDED, SHARDED)}  # fmt: skip
KINDS = "all-reduce", "reduce-scatter", "all-gather"
line = "{:8} {:>9} {:>9} {:>9} | {:>9} {:>9}".format


def program(level, Z=1, specs=None):
    """Compile-ready step of a ZeRO level; its old state's memory is reused."""
    params, moments = specs or LEVELS[level]
    state = (params, moments, moments)
    step = lambda *args: level(*args, Z=Z)
    specs = dict(in_specs=(*state, SHARDED, SHARDED), out_specs=state)
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=(0, 1, 2))


# %% tags=["hide-input"]
def report(name, step, *args, on=mesh):
    """Print what a device sends in a step and stores between steps; return both."""
    found, results = lesson.compiled(step, on, *args), step(*args)
    first = lambda x: x.addressable_shards[0].data.nbytes
    rest = [sum(map(first, jax.tree.leaves(x))) for x in (results[0], results[1:])]
    kinds = found.totals_by("kind")
    sent = [f"{kinds[k].wire_bytes:,}" if k in kinds else "-" for k in KINDS]
    print(line(name, *sent, *(f"{x:,}" for x in rest)))
    return found.total.wire_bytes, results


def temporary(step, *args):
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


# %% [markdown]
# Six layers of 128 x 128 have 393,216 bytes of weights. DDP all-reduces their gradients:

# %%
w, x_BD, y_BD = problem(D=128, L=6)
zeros = [np.zeros_like(one) for one in w]
args = w, zeros, zeros, x_BD, y_BD
lesson.listed(lesson.compiled(program(ddp), mesh, *args))

# %% [markdown]
# An all-reduce sends 2 · 7/8 of its payload (chapter 01), an all-gather or a reduce-scatter 7/8.
#
# > **Predict.** In ZeRO 1, a device updates its eighth of every matrix, and then needs the other seven
# > eighths. How many bytes does a device send in a step with one microbatch?

# %% tags=["hide-input"]
found = lesson.compiled(program(zero_1), mesh, *args)
whole_bytes = sum(one.nbytes for one in w)
assert {one.kind for one in found.collectives} == {"reduce-scatter", "all-gather"}

# %%
my_prediction = None  # bytes
lesson.predicted("ZeRO 1 sends", my_prediction, found.total.wire_bytes, "bytes")

# %% tags=["remove-cell"]
of_ddp = lesson.compiled(program(ddp), mesh, *args).total
assert found.total.wire_bytes == of_ddp.wire_bytes


def naive_zero_1(w, m, v, x_bD, y_bD, Z=1):
    d = my_shards(add(accumulate(partial_gradient(w), x_bD, y_bD, Z)))
    w, m, v = update(my_shards(w), m, v, d)
    return gather(w), m, v


naive = lesson.compiled(program(naive_zero_1, specs=LEVELS[zero_1]), mesh, *args)
assert naive.total.wire_bytes == 1.5 * found.total.wire_bytes

# %% [markdown]
# It sends as much as DDP. An all-reduce *is* a reduce-scatter followed by an all-gather, 344,064 bytes
# each. Between the two, a device holds its eighth of the summed gradient, and Adam needs no more. So ZeRO 1
# updates at this point, and then gathers weights instead of gradients. (DeepSpeed used an all-reduce in
# place of the reduce-scatter in [2020](https://github.com/deepspeedai/DeepSpeed/issues/156) and again in
# [2024](https://github.com/deepspeedai/DeepSpeed/issues/5758). That sends 1.5 times the bytes.)
#
# Here are all four, with four microbatches of one row each:

# %%
d = jax.grad(partial_loss)(w, x_BD, y_BD)
want = [adam(*one) for one in zip(w, zeros, zeros, d, strict=True)]  # on one device
print(line("bytes", "reduce", "scatter", "gather", "weights", "moments"))
sent = {}
for level in LEVELS:
    name = level.__name__
    sent[name], results = report(name, program(level, Z=4), *args)
    assert lesson.same(list(zip(*results, strict=True)), want), f"{name} differs"
assert sent["zero_1"] == sent["ddp"] and sent["zero_2"] == 2.5 * sent["zero_1"]

# %% [markdown]
# All four match the step on one device. On the left are the bytes that a device sends, on the right those
# that it stores between steps. (Gradients are freed by then.)
#
# - **ZeRO 1** accumulates unsharded gradients, and reduce-scatters them once.
# - **ZeRO 2** reduce-scatters in every microbatch, so that the sum is always sharded.
# - **ZeRO 3** gathers the weights at the start of the step instead of at its end. **Sharding the weights
#   between steps costs no extra bytes.** `zero_3` gathers all layers once. FSDP (the by-hand program, and the
#   paper's ZeRO 3, section 7) gathers one layer at a time, and each of them twice.
#
# > **Predict.** Between steps, `zero_3` stores 49,152 bytes of weights instead of 393,216. How much
# > temporary memory does its step need, with one microbatch? (A gradient can reuse the memory of a gathered
# > weight that the backward pass no longer needs.)

# %%
my_prediction = None  # bytes
counted = temporary(program(zero_3), *args)
lesson.predicted("zero_3, temporary", my_prediction, counted, "bytes", within=0.05)

# %% tags=["remove-cell"]
assert whole_bytes < counted < 1.02 * whole_bytes, "activations are no longer small"

# %% [markdown]
# That is the size of all weights, and 0.5% more. Every gathered weight stays in memory until its layer's
# backward pass, and then a gradient reuses its memory.
#
# ### Gathered once or twice
#
# So `zero_3` saves memory between steps, but not during the step. Each bar shows when a layer's weights are
# unsharded; G is an all-gather, and S a reduce-scatter of the gradient:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Six layers over the time of a step. Gathered once, all layers are unsharded from the start until their backward pass; gathered twice, each is unsharded only during its own forward and backward pass."}}
L = len(w)
title = "FSDP gathers a layer's weights only while it uses them"
_, panels = lesson.panels(title, 2, 1, figsize=(5, 4.6), sharex=True)
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
panels[0].set(title="gathered once: zero_3 above")
panels[1].set(title="gathered twice: FSDP", xlabel="time in a step")

# %% [markdown]
# Count the bytes and the temporary memory of both:

# %%
donated = jax.jit(step, donate_argnums=(0, 1, 2))  # reuse the memory of the old state
sharded = jax.NamedSharding(eight, slices)
zeros_of = lambda L: jax.device_put(np.zeros((L, D, D), "float32"), sharded)
state = lambda L: [zeros_of(L) for _ in range(3)]
six = temporary(donated, *state(6), x_BD, y_BD)
more = (temporary(donated, *state(12), x_BD, y_BD) - six) / 6
twice = lesson.compiled(donated, eight, *state(6), x_BD, y_BD).total.wire_bytes
once = lesson.compiled(program(zero_3), mesh, *args).total.wire_bytes
print(f"zero_3 sends {once:,} bytes and needs {counted:,} of temporary memory")
print(f"FSDP   sends {twice:,} bytes and needs {six:,} of temporary memory")
print(f"one more layer: {more:,.0f} temporary bytes; its matrix has {4 * D * D:,}")
assert twice == 1.5 * once


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
# FSDP sends 1.5 times the bytes. With each further layer, its temporary memory grows by the shard of a
# gradient and one activation, and that of `zero_3` by a whole matrix. (If you write the layers out without
# `scan`, XLA's CPU compiler keeps only the first of a layer's two gathers.)
#
# ## Communication overlapped with compute
#
# A device can receive the next layer's weights while it computes the current layer. Communication that
# overlaps with compute costs no time; the rest is **exposed**. FSDP therefore *prefetches*: it starts the
# gather of the next layer when the current one starts. (DDP sends gradients during the backward pass, in
# **buckets**: groups of matrices.) These are three layers of Llama 3 8B on eight H100s, at peak speed; F1
# is the forward pass of layer 1, B1 its backward pass:


# %% tags=["hide-input"]
def schedule(tokens, prefetch, layers=3):
    """Return bars (name, start, length) of compute and network, in ms."""
    forward = opening.compute_ms(2 * W * tokens)
    passes = [(f"F{k + 1}", forward) for k in range(layers)]
    passes += [(f"B{k + 1}", 2 * forward) for k in reversed(range(layers))]
    compute, network = [("", 0.0, 0.0)], []

    def send(kind, earliest):
        free = sum(network[-1][1:]) if network else 0.0
        network.append((kind, max(free, earliest), gather_ms))

    for name, length in passes:
        last, begin, took = compute[-1]
        if not prefetch and last.startswith("B"):
            send("reduce-scatter", begin + took)
        send("all-gather", begin if prefetch else begin + took)
        compute.append((name, max(begin + took, sum(network[-1][1:])), length))
        if prefetch and last.startswith("B"):
            send("reduce-scatter", begin + took)
    send("reduce-scatter", sum(compute[-1][1:]))
    return compute[1:], network


style = dict(ec="black", lw=0.6)

# %% tags=["hide-input"]
FILL = {"all-gather": blue, "reduce-scatter": "#c3d3e7"}  # a tint of this blue
title = "Prefetched gathers overlap with compute, if there is enough of it"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three timelines with a compute row and a network row. Without prefetching, matmuls wait for every gather. With prefetching and 8,192 tokens, nearly all communication overlaps. With 1,024 tokens the network is always busy and matmuls wait."}}
figure, panels = lesson.panels(title, 3, 1, figsize=(6.6, 5.4))
for axes, case in zip(panels, ((8192, False), (8192, True), (1024, True)), strict=True):
    compute, network = schedule(*case)
    for name, start, length in compute:
        axes.broken_barh([(start, length)], (-0.38, 0.76), fc="#b0b0b0", **style)
        axes.text(start + length / 2, 0, name, ha="center", va="center", size=8)
    for kind, *span in network:
        axes.broken_barh([span], (0.62, 0.76), fc=FILL[kind], **style)
    end, busy = sum(network[-1][1:]), sum(length for *_, length in compute)
    kind = f"{case[0]:,} tokens per GPU, {'' if case[1] else 'not '}prefetched"
    axes.set_title(f"{kind}: {end:.1f} ms, {1 - busy / end:.0%} exposed")
    axes.set(yticks=(0, 1), yticklabels=("compute", "network"), ylim=(1.6, -0.6))
panels[1].set_xlim(panels[0].get_xlim())  # comparable
panels[-1].set_xlabel("ms")
boxes = [plt.Rectangle((0, 0), 1, 1, fc=fill, **style) for fill in FILL.values()]
figure.legend(boxes, FILL, loc="outside lower center", ncols=2, fontsize=9)

# %% [markdown]
# ## When FSDP is limited by communication
#
# Weights do not shrink with the batch, so with few tokens, communication takes longer than the matmuls. The
# planner (`python -m plan`) adds up a step's matmuls, bytes and memory by formulas. With peak FLOP/s and full
# bandwidth, it also computes a **lower bound** of the step's time.
#
# > **Predict.** How many tokens per device and microbatch do you need on eight H100s for compute to take as
# > long as communication? An H100 has 989 TFLOP/s and a bandwidth of 450 GB/s over NVLink.


# %%
def seconds(tokens):
    """Seconds of compute and communication of a step of llama3_8b, without overlap."""
    changes = {"mesh": "fsdp=8", "data.batch_size": 8, "data.seq_len": tokens}
    changes |= {"work.remat": "none", "work.gather": "layer"}
    plan = planner.plan(config.preset("llama3_8b", **changes), "h100:8")
    return [plan.lower_bound(alone=True)[name] for name in ("compute", FSDP)]


my_prediction = None  # tokens
enough = next(T for T in range(32, 2**14, 32) if np.greater(*seconds(T)))
lesson.predicted("an H100 needs", my_prediction, enough, "tokens", within=0.25)

# %% tags=["remove-cell"]
assert enough == 1792

# %% [markdown]
# By hand: a layer has W weights, and a device N tokens. The forward pass takes an all-gather, 2W bytes, and
# 2WN FLOPs; the backward pass an all-gather and a reduce-scatter, 4W bytes, and 4WN FLOPs. So compute takes
# longer than communication if **N > peak FLOP/s / bandwidth**, for any W and any number of devices: 989e12
# / 450e9 = 2,198 for an H100. (The planner's 1,792 is lower, because devices send only 7/8 of W, and
# attention has matmuls without weights.)
#
# The rule assumes two all-gathers and a reduce-scatter in bf16, no recomputation, full bandwidth, and a
# dense model. (FSDP gathers all experts of a mixture of experts, but a token uses few of them: chapter 07.)
# For a TPU v5p, with 459 TFLOP/s and six links of 90 GB/s, the rule gives 850 tokens if a gather uses all
# six. Chapter [09](09_choose.ipynb) has all thresholds on one sheet.
#
# Count the tokens of one *microbatch*, because each microbatch gathers again, unless you keep the gathered
# weights for the whole step (`work.gather=step`). That takes 6 more bytes per parameter: 2 for the gathered
# bf16 weights, and 4 for the unsharded float32 gradients. The rule also limits the number of devices: 4
# million tokens are enough for 4,700 v5p chips. Beyond that, you need an axis that splits the matmuls of a
# token (chapter 04).
#
# ## Hybrid sharding, in the model
#
# With two mesh axes FSDP becomes **HSDP** (hybrid sharding): here each of two groups of four devices stores
# the model in four shards. `train_on` takes a step of `model.py`, at a small size and without experts.

# %% tags=["hide-input"] mystnb={"image": {"alt": "One matrix, three times: one box held by devices 0 to 7; eight shards, one per device; four shards, each held by two devices."}}
cases = {"DDP: P()\non fsdp=8": ("fsdp=8", P()),
         "FSDP: P(FSDP)\non fsdp=8": ("fsdp=8", P(FSDP)),
         "HSDP: P(FSDP) on\ndata=2,fsdp=4": ("data=2,fsdp=4", P(FSDP))}  # fmt: skip
title = "Each box is a shard; its numbers are the devices that store it"
_, panels = lesson.panels(title, 1, 3, figsize=(6.4, 2.6))
for axes, (name, (on, spec)) in zip(panels, cases.items(), strict=True):
    lesson.slices(axes, sharding.make_mesh(on), spec, "DD", name)

# %% tags=["hide-input"]
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


declared = model.declare(tiny("data=1", "layer").model)  # shapes and specs, no arrays
weights = parameters.init(declared, sharding.make_mesh("data=1"), seed=0)


# %% tags=["hide-input"]
def train_on(name, gather="layer"):
    """Return loss, gradients and collectives of a step."""
    on = sharding.make_mesh(name)
    placed = jax.tree.map(lambda s: s.sharding, sharding.shapes(declared, on))
    batch = sharding.put(random_batch(B=128, T=18, V=280), on)
    args = jax.device_put(weights, placed), batch, 0
    step = pipeline.loss_and_grads(tiny(name, gather), on)
    loss, _, grads = step(*args)
    return float(loss), grads, lesson.compiled(step, on, *args)


# %%
alone_loss, alone_grads, _ = train_on("data=1")
loss, grads, found = train_on("data=2,fsdp=4")
assert lesson.same((loss, grads), (alone_loss, alone_grads))
print(f"loss {alone_loss:.6f} and {loss:.6f}", end="; ")
print("gradient", lesson.ratio(grads, alone_grads))
for axes, moves in found.totals_by("axes").items():
    print(f"  over {axes}: {moves.wire_bytes:,} bytes")

# %% tags=["remove-cell"]
of_all = jax.tree_util.tree_leaves_with_path(weights)
named = lambda part: [x for path, x in of_all if part in jax.tree_util.keystr(path)]
norms, tables = (sum(x.nbytes for x in named(one)) for one in ("norm", "embedding"))
matrices = sum(x.nbytes for _, x in of_all) - norms
over = {axes: moves.wire_bytes for axes, moves in found.totals_by("axes").items()}
assert matrices == 145_920 == 4 * over["data"]
assert over["fsdp"] == 3 / 4 * (3 * (matrices - tables) + 2 * tables)
assert over["data*fsdp"] == 1526 == 7 / 4 * (norms + 8), "8: two sums of the loss"

# %% [markdown]
# All matrices have 145,920 bytes. Weights are gathered over `fsdp` only: a device sends 3/4 of each layer's
# matrices three times, and of the embeddings twice. A gradient must be summed over both axes, since all
# eight devices had different rows. But only a quarter of the 145,920 bytes go over `data`, so this axis
# suits a slow network. (Exercise 2 asks how.) The 1,526 bytes over both axes are the gradients of the norms,
# which are replicated, and the sums of the loss.
#
# ## Exercise 1: the norm of a sharded gradient
#
# After FSDP's backward pass, `d` is a list of gradient shards: each device has D/n rows of every matrix,
# summed over all devices. `d_gains` are the gradients of small vectors, which are replicated. Return the
# norm of the whole gradient, for clipping: the square root of the sum of all squared entries. On
# `data=2,fsdp=4`, the two devices along `DATA` have equal shards. (`sharding.psum(x, FSDP)` adds `x` over
# `FSDP`.)


# %% tags=["hide-input"]
@cache
def norm_on(answer, name):
    """Return the norm that each device gets."""
    on, (w, x_BD, y_BD) = sharding.make_mesh(name), problem(D=16, L=2)

    def local(w, gains, x_bD, y_bD):
        def loss(w, gains):
            gathered = [sharding.all_gather(one, FSDP, dim=0) for one in w]
            return partial_loss(gathered, x_bD * gains[0], y_bD)

        return jnp.asarray(answer(*jax.grad(loss, (0, 1))(w, gains)), jnp.float32)

    rows = P((DATA, FSDP))
    found = lesson.on_each(local, on, (P(FSDP), P(), rows, rows))
    return np.asarray(found(w, [GAIN], x_BD, y_BD))


GAIN = np.ones((1, 16), np.float32)
squares = lambda d: sum(jnp.sum(one**2) for one in d)
norm_of = lambda reduce: lambda d, gains: jnp.sqrt(reduce(squares(d)) + squares(gains))
add_up = lambda x: sharding.psum(x, FSDP)

# %% tags=["hide-input"]
NORM_HINTS = [
    (norm_of(lambda s: s), "Each device has the norm of its own shards."),
    (lambda d, gains: jnp.sqrt(add_up(squares(d) + squares(gains))),
     "Too large: all devices have the same vectors. How often do you count them?"),
    (lambda d, gains: jnp.sqrt(add_up(squares(d))), "Too small: add the vectors."),
    (lambda d, gains: add_up(jnp.sqrt(squares(d) + squares(gains))),
     "Too large: norms cannot be added."),
    (norm_of(lambda s: jax.lax.pmean(s, FSDP)),
     "Too small: a mean over devices, not a sum."),
    (norm_of(lambda s: jax.lax.pmax(s, FSDP)), "That is the largest shard's norm."),
    (lambda d, gains: add_up(squares(d)) + squares(gains),
     "That is the square of the norm."),
    (lambda d, gains: sum(jnp.sqrt(one) for one in
                          [*(add_up(jnp.sum(one**2)) for one in d), squares(gains)]),
     "The right norm of each array, but norms of arrays cannot be added."),
    (norm_of(lambda s: sharding.psum(sharding.vary(s, DATA), (DATA, FSDP))),
     "Too large on `data=2,fsdp=4` only. Whose shards are equal there?"),
]  # fmt: skip


# %% tags=["hide-input"]
def right_norm(name):
    w, x_BD, y_BD = problem(D=16, L=2)
    loss = lambda w, gain: partial_loss(w, x_BD * gain, y_BD)
    d, d_gain = jax.grad(loss, (0, 1))(w, GAIN)
    norm = float(jnp.sqrt(squares(d) + squares([d_gain])))
    return np.full(sharding.make_mesh(name).size, norm)


check_norm = lesson.checker(
    [("fsdp=8",), ("data=2,fsdp=4",)], right_norm, NORM_HINTS, "Right on two meshes.",
    run=lambda answer: lambda name: norm_on(answer, name))  # fmt: skip


# %%
def gradient_norm(d, d_gains):
    return ...


print(check_norm(gradient_norm))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Add the squares of shards over devices, and those of replicated vectors once:
#
# ```python
# squares = lambda arrays: sum(jnp.sum(one**2) for one in arrays)
# return jnp.sqrt(sharding.psum(squares(d), FSDP) + squares(d_gains))
# ```
#
# Without the `psum`, every device clips its shards by a different number, so even the direction of the step
# is wrong. `check_vma` cannot find it, because a sharded result may differ on every device.
# [AReaL](https://github.com/areal-project/AReaL/issues/312) forgot the sum in 2025;
# [VeOmni](https://github.com/ByteDance-Seed/VeOmni/issues/184) added over both axes of HSDP (in JAX, an
# error).
# </details>

# %% tags=["remove-cell"]
both_axes = norm_of(lambda s: sharding.psum(s, (DATA, FSDP)))
lesson.expect(check_norm, *NORM_HINTS, (norm_of(add_up), "Right"),
              (both_axes, "It stops"), (gradient_norm, lesson.NOTHING),
              (lambda d, gains: None, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 2: a gradient over two axes
#
# On a mesh `data=2,fsdp=4`, every device has a partial sum of a matrix's gradient, `partial_DD`. Return
# this device's shard of the sum: 1/4 of the rows, the same on both devices along `DATA`, the slow axis.
# Send as few bytes as possible over it.

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
        return result

    function = lesson.on_each(local, on, P((DATA, FSDP)))
    found = lesson.compiled(function, on, PARTIAL).collectives
    slow = sum(one.wire_bytes for one in found if DATA in one.axes)
    return np.asarray(function(PARTIAL)), slow


scattered = lambda x: sharding.reduce_scatter(x, FSDP, dim=0)
my_shard = lambda x: sharding.own_slice(x, FSDP, dim=0)

# %% tags=["hide-input"]
TWO_AXES_HINTS = [
    (lambda x: sharding.psum(my_shard(x), DATA),
     "You dropped rows before the sum, so addends along fsdp are missing."),
    (lambda x: sharding.psum(x, (DATA, FSDP)),
     "The right sum, but all rows. Which are this device's?"),
    (scattered, "Summed over fsdp only. Which devices' addends are missing?"),
    (lambda x: sharding.psum(x, DATA), "Summed over data only, and all rows."),
    (lambda x: sharding.psum(x, FSDP), "Summed over fsdp only, and all rows."),
    (my_shard, "The right rows, but only of this device's partial sum."),
    (lambda x: x, "This is one device's partial sum. Nothing is added."),
    (lambda x: sharding.psum(scattered(x), DATA) / n,
     "An eighth of the sum. Partial sums are added, not averaged."),
    (lambda x: jax.lax.pmean(scattered(x), DATA), "A mean over data, not a sum."),
]  # fmt: skip
# The fewest bytes that a device can send over DATA.
LEAST = {"data=2,fsdp=4": 16_384, "data=4,fsdp=2": 49_152}


# %% tags=["hide-input"]
def check_two_axes(answer):
    def right(name):  # the rows of every device, in order
        data, fsdp = (sharding.make_mesh(name).shape[axis] for axis in (DATA, FSDP))
        return np.tile(PARTIAL.sum(0).reshape(fsdp, -1, 128), (data, 1, 1))

    cases = [(name,) for name in LEAST]
    run = lambda f: lambda name: two_axes(f, name)[0]
    line = lesson.diagnose(answer, cases, right, TWO_AXES_HINTS, "Right", run=run)
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
# `return sharding.psum(sharding.reduce_scatter(partial_DD, FSDP, dim=0), DATA)` sends 16,384 bytes over the
# slow axis. The other order gives equal sums but sends 65,536 bytes, which a test of the values cannot
# reveal. In `model.py`, the reduce-scatter is the backward pass of the gather inside the layer. The sum over
# `data` is the backward pass of a `pcast`, which makes an invariant weight varying (chapter 02). This
# `pcast` comes before all loops, so the sum runs once per step.
# </details>

# %% tags=["remove-cell"]
answer_2 = lambda x: sharding.psum(scattered(x), DATA)
thin = lambda x, axes: sharding.reduce_scatter(x, axes, dim=0)
slow_first = lambda x: scattered(sharding.psum(x, DATA))
at_once = lambda x: my_shard(sharding.psum(x, (DATA, FSDP)))
back = lambda x: sharding.all_gather(x, DATA, dim=0)
in_two = lambda x: back(thin(scattered(x), DATA))
join = lambda x: sharding.all_gather(x[None], DATA, dim=0)
lesson.expect(check_two_axes, *TWO_AXES_HINTS, (answer_2, "Right on two"),
              (lambda x: thin(x, (DATA, FSDP)), "your shape is (16, 128)"),
              (lambda x: sharding.psum(thin(x, DATA), FSDP), "your shape is"),
              (slow_first, "65,536 bytes"),
              (at_once, "114,688 bytes"), (in_two, "Right on two"),
              (lambda x: jnp.sum(join(scattered(x)), axis=0), "98,304 bytes"),
              (slice_of_sum, lesson.NOTHING),
              (lambda x: None, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 3: choose the settings
#
# Train `llama3_8b` on `v5p:4x4x4` (64 chips), with 95.74 GiB per chip; a step has 4,096 sequences of 512
# tokens. Return settings whose planned memory fits, and whose planned lower bound is at most 3.55 s without
# any overlap. You choose these (what you leave out gets its first value):
#
# - `mesh`, of `data` and `fsdp`, which is required;
# - `work.gather`: `"layer"`, again in every microbatch; `"step"`, once;
# - `work.remat`, what activation checkpointing recomputes: `"full"` (whole layers), `"dots"` (all but
#   matmuls), `"none"`;
# - `work.device_batch`, sequences per chip in one microbatch: 64 (all of its sequences), 1, 2, 4, ..

# %% tags=["hide-input"]
FREE = {"mesh": (), "work.device_batch": (), "work.gather": ("layer", "step"),
        "work.remat": ("none", "dots", "full")}  # fmt: skip
ONCE = 3.32  # seconds of compute, if nothing is recomputed
BATCH = {"data.batch_size": 4096, "data.seq_len": 512}
FIRST = {"work.gather": "layer", "work.remat": "full", "work.device_batch": 64}
preset = lambda found: config.preset("llama3_8b", **BATCH | FIRST | found)
TOO_LARGE = {
    ("parameters", "optimizer"): "Mostly weights and moments. Which axis shards them?",
    ("weights", "gradients"): "Mostly gathered weights and gradients. Keep them?",
    ("saved", "at work"): "Mostly activations. How many tokens are in memory at once?",
}


@lesson.verdict
def check_settings(found):
    if not isinstance(found, dict) or {*found} - {*FREE} or "mesh" not in found:
        return f"Return a dict with a mesh; its keys: {', '.join(FREE)}."
    for name, values in FREE.items():
        if values and found.get(name, values[0]) not in values:
            return f"{name} must be one of {', '.join(values)}, not {found[name]!r}."
    return judged(planner.plan(preset(found), "v5p:4x4x4"))


# %% tags=["hide-input"]
def judged(plan):
    mesh, gib = plan.cfg.mesh, plan.peak_bytes / 2**30
    took = plan.lower_bound(alone=True)
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
# `{"mesh": "fsdp=64", "work.gather": "step", "work.remat": "none", "work.device_batch": 4}` takes 3.47 s,
# in 81 GiB. This command prints them by part:
#
# ```
# python -m plan llama3_8b --topology v5p:4x4x4 --mesh fsdp=64 --data.batch_size 4096 \
#     --data.seq_len 512 --work.gather step --work.remat none --work.device_batch 4
# ```
#
# The shards of weights and moments take 1.4 GiB, the gathered weights and unsharded gradients 45, saved
# activations 33, and the arrays of the layer at work 1.2. The 33 are almost four times the 8.5 that the
# formula above gives for 2,048 tokens. `"none"` saves every operand that a gradient needs, also the float32
# values of norms, and 5 F instead of 3 F. And with several microbatches the planner counts this twice,
# because the loop copies it to a buffer.
#
# `fsdp=64` alone fits in 15 GiB and takes 4.20 s, of which 4.09 are compute. That is less than 4/3 x 3.32 =
# 4.43, because only the layers run twice, and without their last matmul: no gradient needs its result.
# `"dots"` fits only with several microbatches, and each of them gathers again: 3.79 s with four. With
# `gather=step`, more microbatches cost almost nothing.
#
# A lower bound leaves out what the operations between matmuls read from memory and write to it. The
# planner's estimate, in the line `step`, includes it: 9.4 s for these settings, and 5.2 s for `fsdp=64`
# alone. So prefer the latter for training.
# </details>

# %% tags=["remove-cell"]
SLICED, STEP = {"mesh": "fsdp=64"}, {"work.gather": "step"}
EACH = "work.device_batch"
DOTS, NONE = SLICED | {"work.remat": "dots"}, SLICED | {"work.remat": "none"}
for size in (1, 2, 4, 8):
    assert check_settings(DOTS | STEP | {EACH: size}).startswith("Right: 3.")
whole, again = (planner.plan(preset(one), "v5p:4x4x4")
                for one in (NONE | STEP | {EACH: 4}, SLICED))  # fmt: skip
assert abs(whole.lower_bound()["compute"] - ONCE) < 0.005
assert round(again.lower_bound()["compute"], 2) == 4.09
assert [round(one.step_s, 1) for one in (whole, again)] == [9.4, 5.2]
sums = [("parameters", "optimizer"), ("weights", "gradients"), ("saved",), ("at work",)]
parts = [sum(whole.memory_bytes[name] for name in names) / GiB for names in sums]
assert [round(part, 1) for part in parts] == [1.4, 44.9, 33.0, 1.2]
lesson.expect(check_settings, (lambda: NONE | STEP | {EACH: 4}, "Right: 3.47 s"),
              (NONE | STEP | {EACH: 4}, "81 GiB"),
              (lambda: SLICED, "4.20 s"), (SLICED, "15 GiB. Compute"),
              (SLICED | STEP | {EACH: 8}, "Compute:"),
              (DOTS | {EACH: 16}, "3.79 s"), (DOTS | {EACH: 16}, "how often"),
              (DOTS | {EACH: 1}, "how often"),
              (NONE | {EACH: 8}, "how often"),
              ({"mesh": "data=64"}, "Mostly weights and moments"),
              (NONE, "Mostly activations"), (DOTS | STEP, "Mostly activations"),
              ({"mesh": "fsdp=32"}, "rejects"),
              ({"mesh": "fsdp=32,tensor=2"}, "Later chapters"), (64, "a dict"),
              ({"mash": 1}, "a dict"),
              (SLICED | {"work.remat": "all"}, "one of none, dots, full"),
              (settings, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# This program trains a small network with FSDP and the Muon optimizer
# ([Jordan](https://kellerjordan.github.io/posts/muon/)). Muon accumulates clipped gradients in a momentum
# matrix, and moves its singular values toward 1 before it applies it (Newton-Schulz iteration).

# %%
RATE, KEEP, LARGEST, STEPS, F = 0.02, 0.9, 1.0, 20, 64
rng = np.random.default_rng(3)
draw = lambda *shape: np.float32(rng.normal(size=shape))
START = {"up": draw(16, F) / 4, "down": draw(F, 16) / 8}
X_BD, Y_BD = draw(B, 16), draw(B, 16)


def my_loss(w, x_bD, y_bD):
    """This device's share of the mean squared error; w has shards of both matrices."""
    w_up_DF = sharding.all_gather(w["up"], FSDP, dim=0)
    w_down_FD = sharding.all_gather(w["down"], FSDP, dim=0)
    out_bD = x_bD + jnp.tanh(x_bD @ w_up_DF) @ w_down_FD
    return jnp.sum((out_bD - y_bD) ** 2) / Y_BD.size


# %%
def clipped(d):
    """Scale a gradient down if its norm is above LARGEST; return its norm, too."""
    squares = sum(jnp.sum(one**2) for one in jax.tree.leaves(d))
    norm = jnp.sqrt(sharding.psum(squares, FSDP))
    scale = jnp.minimum(1.0, LARGEST / norm)
    return jax.tree.map(lambda one: scale * one, d), norm


def orthogonalized(m):
    """Move all singular values of a matrix toward 1."""
    x = m / jnp.linalg.norm(m)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x * max(1, m.shape[0] / m.shape[1]) ** 0.5


def muon(w, m, d):
    m = jax.tree.map(lambda m, d: KEEP * m + d, m, d)
    return jax.tree.map(lambda w, m: w - RATE * orthogonalized(m), w, m), m


# %%
def train(name):
    """Return the weights after STEPS steps, and the loss and norm of each step."""

    def step(w, m, x_bD, y_bD):
        loss, d = jax.value_and_grad(my_loss)(w, x_bD, y_bD)
        d, norm = clipped(d)
        return *muon(w, m, d), sharding.psum(loss, FSDP), norm

    on, shards = sharding.make_mesh(name), P(FSDP)
    specs = dict(in_specs=(shards,) * 4, out_specs=(shards, shards, P(), P()))
    program = jax.jit(jax.shard_map(step, mesh=on, **specs))
    w, m, log = START, jax.tree.map(np.zeros_like, START), []
    for _ in range(STEPS):
        *state, loss, norm = program(w, m, X_BD, Y_BD)
        w, m = jax.device_get(state)
        log.append((float(loss), float(norm)))
    return w, log


# %%
for name in ("fsdp=1", "fsdp=2", "fsdp=4", "fsdp=8"):
    _, log = train(name)
    (first, norm), (last, _) = log[0], log[-1]
    print(f"{name}: first loss {first:.5f}, norm {norm:.5f}; last loss {last:.4f}")

# %% [markdown]
# Nothing is random. The first loss and norm are equal, the loss falls on every mesh, and `check_vma` finds
# no error. A colleague prefers eight devices, which reach the lowest loss. Fix the program, so that the
# result does not depend on the mesh.


# %% tags=["hide-input"]
def newton_schulz(m, size, rows):
    x = m / size
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x * max(1, rows / m.shape[1]) ** 0.5


def whole_loss(w):
    return jnp.mean((X_BD + jnp.tanh(X_BD @ w["up"]) @ w["down"] - Y_BD) ** 2)


# %% tags=["hide-input"]
@cache
def alone(update, parts):
    """The same training on one device; `update` gets the whole momentum and n."""

    @jax.jit
    def step(w, m):
        d = jax.grad(whole_loss)(w)
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in jax.tree.leaves(d)))
        clip = jnp.minimum(1.0, LARGEST / norm)
        m = jax.tree.map(lambda m, d: KEEP * m + clip * d, m, d)
        return jax.tree.map(lambda w, m: w - RATE * update(m, parts), w, m), m

    w, m = START, jax.tree.map(np.zeros_like, START)
    for _ in range(STEPS):
        w, m = step(w, m)
    return jax.device_get(w)


size_of = jnp.linalg.norm
whole_update = lambda m, n: newton_schulz(m, size_of(m), len(m))


def by_shard(function):
    """Apply a function of a shard and of the whole matrix to every shard."""
    return lambda m, n: jnp.concatenate([function(one, m) for one in jnp.split(m, n)])


# %% tags=["hide-input"]
MUON_HINTS = [
    (by_shard(lambda one, m: newton_schulz(one, size_of(one), len(one))),
     "The weights are the same as before your change. Gradient, norm and loss of "
     "step 1 are right on every mesh, so look at what happens after them."),
    (by_shard(lambda one, m: newton_schulz(one, size_of(m), len(one))),
     "The norm is now the whole matrix's. What else in the iteration combines rows?"),
    (by_shard(lambda one, m: newton_schulz(one, size_of(m), len(m))),
     "Norm and scale are now the whole matrix's. What else combines rows?"),
    (by_shard(lambda one, m: newton_schulz(one, size_of(one), len(m))),
     "The scale is now the whole matrix's. What else combines rows?"),
    (lambda m, n: newton_schulz(m, size_of(m), len(m) / n),
     "The direction is right. Whose shape decides the scale of the last line?"),
    (lambda m, n: m, "Now Muon is momentum alone: nothing is orthogonalized."),
    (lambda m, n: m / size_of(m), "Nothing is orthogonalized, only normalized."),
    (lambda m, n: n * whole_update(m, n), "n times too large: this is no partial sum."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_mend(train):
    parts = {"fsdp=2": 2, "fsdp=8": 8}
    hints = [(lambda name, f=f: alone(f, parts[name]), hint) for f, hint in MUON_HINTS]
    done = "Fixed: on 2 and 8 devices the weights match a single-device run."
    yours = lambda name: jax.device_get(lesson.answered(train)(name)[0])
    right = lambda name: alone(whole_update, 1)
    cases = [(name,) for name in parts]
    return lesson.diagnose(yours, cases, right, hints, done, share=1e-3)


# %% tags=["hide-output"]
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Adam updates each entry by itself, so it may run on shards. Newton-Schulz is an operation on the whole
# matrix: `x @ x.T` combines every row with every other row, and the norm and the scale are the whole
# matrix's, too. (A sharded result may differ on every device, so types cannot show it.) Gather the momentum
# first, then take your shard of the result:
#
# ```python
# def update_of(m_dF):
#     m_DF = sharding.all_gather(m_dF, FSDP, dim=0)
#     return sharding.own_slice(orthogonalized(m_DF), FSDP, dim=0)
# ```
#
# and call `update_of(m)` in `muon`.
#
# DeepSpeed had forms of this bug in 2026. With ZeRO 1 and 2, Newton-Schulz ran on a matrix of which each
# rank had only its own slice fully reduced ([issue
# 7807](https://github.com/deepspeedai/DeepSpeed/issues/7807)). With tensor parallelism, each rank
# orthogonalized its own shard: gradients agreed to 7e-7, updates differed by 39% ([issue
# 8437](https://github.com/deepspeedai/DeepSpeed/issues/8437)). The loss fell, and the tests only asserted
# that the parameters change ([8091](https://github.com/deepspeedai/DeepSpeed/pull/8091)). Instead, compare
# weights after one step on two meshes.
#
# The trainer of this project has Muon too (`muon.py`). Gathering every matrix on every device is right, and
# can more than double the time of a step. [When does Muon cost more than it saves?](../muon.md)
# shows how to avoid that.
# </details>


# %% tags=["remove-cell"]
unsplit = lambda m: sharding.all_gather(m, FSDP, dim=0)
my_rows = lambda x: sharding.own_slice(x, FSDP, dim=0)
n_of = lambda: sharding.axis_size(FSDP)
whole_norm = lambda m: jnp.sqrt(sharding.psum(jnp.sum(m**2), FSDP))
with_update = lambda function: lesson.replaced(train, orthogonalized=function)


def without_gather(m):
    x = m / whole_norm(m)
    for _ in range(5):
        gram = sharding.psum(x.T @ x, FSDP)
        x = 3.4445 * x + x @ (2.0315 * gram @ gram - 4.7750 * gram)
    return x * max(1, len(m) * n_of() / m.shape[1]) ** 0.5


after_gather = orthogonalized
mended = lambda m: my_rows(after_gather(unsplit(m)))
WRONG = map(with_update, [
    orthogonalized,
    lambda m: newton_schulz(m, whole_norm(m), len(m)),
    lambda m: newton_schulz(m, whole_norm(m), len(m) * n_of()),
    lambda m: newton_schulz(m, size_of(m), len(m) * n_of()),
    lambda m: my_rows(newton_schulz(unsplit(m), whole_norm(m), len(m))),
    lambda m: m,
    lambda m: m / whole_norm(m),
    lambda m: n_of() * mended(m),
])  # fmt: skip
lesson.expect(check_mend, *zip(WRONG, [hint for _, hint in MUON_HINTS], strict=True),
              (with_update(mended), "Fixed"),
              (with_update(without_gather), "Fixed"), (train, MUON_HINTS[0][1]),
              (lambda name: ..., lesson.NOTHING),
              (with_update(lambda m: after_gather(unsplit(m))),
               "It stops"))  # fmt: skip

# %% [markdown]
# ## In one table
#
# FSDP computes x_bD @ w_DF, where w_DF is gathered from w_dF; b = B/n, d = D/n. W counts all weights, dW
# all gradients, Z the microbatches. For bytes, multiply by (n - 1)/n, where n is the size of the axis, and
# by the bytes per element.
#
# | | stored unsharded | forward | backward | once per step | exposed |
# |---|---|---|---|---|---|
# | DDP | all | | | all-reduce, 2 dW | its last bucket |
# | ZeRO 1 | weights, gradients | | | reduce-scatter and all-gather, dW + W | at the end of the step |
# | ZeRO 2 | weights | | reduce-scatter, Z dW | all-gather, W | all-gather at the end of the step |
# | `zero_3`, gathered once | nothing, between steps | all-gather, W | reduce-scatter, Z dW | | at the first layer |
# | FSDP | nothing | all-gather, Z W | both, Z W + Z dW | | with prefetching, the first gather and the last scatter; without, all of them |
# | HSDP | nothing within a group | all-gather, Z W | both, Z W + Z dW | over `data`: all-reduce, 2 x a shard of dW | as FSDP, and once on the slow network |
#
# The same in three libraries:
#
# | | JAX: specs of weights, moments | PyTorch, DeepSpeed | Megatron |
# |---|---|---|---|
# | DDP | `P()`, `P()` | [`DistributedDataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html), which *averages* gradients | `DistributedDataParallel` |
# | ZeRO 1 | `P()`, `P("fsdp")` | `ZeroRedundancyOptimizer`, DeepSpeed `stage: 1` | `--use-distributed-optimizer` |
# | ZeRO 2 | `P()`, `P("fsdp")`, sharded gradients | DeepSpeed `stage: 2` | Megatron-FSDP `optim_grads` |
# | ZeRO 3, FSDP | `P("fsdp")`, `P("fsdp")` | [`fully_shard`](https://docs.pytorch.org/docs/main/distributed/fsdp.fully_shard.html); `reshard_after_forward=False` gathers once | Megatron-FSDP `optim_grads_params` |
# | HSDP | the same on `data` x `fsdp` | `fully_shard` with a 2-D `DeviceMesh` | Megatron-FSDP with an outer data-parallel group |
#
# Use **DDP** if 16 bytes per parameter fit, ZeRO 1 if it nearly fits, and otherwise **FSDP**, if a
# microbatch has enough tokens per device. Use **HSDP** if part of the network is slow.
#
# ## Three lines to keep
#
# 1. An all-reduce is a reduce-scatter and an all-gather. Between the two, gradients, moments and weights can
#    all be sharded, without sending more bytes.
# 2. Sharding between steps does not save memory during a step. If you also free a weight after its layer, you
#    gather it again in every backward pass. This third transfer is the price of FSDP.
# 3. All communication can overlap with compute if a device has more tokens per microbatch than peak FLOP/s
#    / bandwidth, for any model size and any number of devices.
#
# **Sources.** ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), sections 5 and 7. Sharding the
# optimizer state in XLA, [arXiv:2004.13336](https://arxiv.org/abs/2004.13336). PyTorch FSDP,
# [arXiv:2304.11277](https://arxiv.org/abs/2304.11277), section 3. Activation memory and checkpointing,
# [arXiv:2205.05198](https://arxiv.org/abs/2205.05198). Hybrid sharding: MiCS,
# [arXiv:2205.00119](https://arxiv.org/abs/2205.00119). The rule, and prefetched gathers: scaling book,
# [Training](https://jax-ml.github.io/scaling-book/training).
