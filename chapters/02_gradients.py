# %% [markdown]
# # 02 · Gradient synchronization: who adds the gradients?
#
# In **data parallelism**, every device has the whole model and a part of the rows (of the batch), so it
# computes only a part of each gradient. An all-reduce adds these partial gradients up, and then all devices
# take the same step.
#
# Why would you want to know where the sum happens? JAX often adds the gradients for you. If you add them
# again, or if nothing adds them, there is no error: the gradient has the right shape and the loss falls, but
# settings that work on four devices fail on eight. This page shows which line adds what, and how to check it.
#
# *Prerequisites:* chapter 01 (`shard_map`, the collectives). *Mesh:* `fsdp=8`, simulated. *Runs in* 40 s on 2
# cores. *Reading takes* 25 minutes, 90 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)
import jax.numpy as jnp
import matplotlib.pyplot as plt

import sharding
from chapters import lesson, opening
from config import MeshConfig
from plan.chips import hardware

COLOR, GiB = lesson.COLORS["fsdp"], 2**30  # the color of the `fsdp` axis

# %% tags=["hide-input"] mystnb={"image": {"alt": "One layer of Llama 3 8B. On one H100, it stores 10.1 GiB and computes for 87 ms. On eight, each stores 2.7 GiB, computes for 11 ms, and an all-reduce of 1.7 ms follows."}}
W, TOKENS = opening.PARAMETERS, opening.TOKENS
per_token = 6 * opening.D + 2 * opening.G * opening.K + 3 * opening.F  # chapter 03


def scene(title, devices):
    f = opening.compute_ms(2 * W * TOKENS / devices)
    all_of = lambda x: [x] * devices + [0.0] * (8 - devices)
    memory = {"weights": all_of(4 * W / GiB), "gradients": all_of(4 * W / GiB)}
    memory["activations"] = all_of(2 * per_token * TOKENS / devices / GiB)
    forward, backward = ("forward", "backward") if devices == 1 else ("", "")
    compute = [(forward, 0, f), (backward, f, 2 * f)]
    all_reduce_ms = opening.network_ms(2 * (devices - 1) / devices * 2 * W)  # bf16
    network = [("", 3 * f, all_reduce_ms)] if devices > 1 else []
    return opening.Scene(title, memory, compute, network)


alone = scene("One device has all rows", 1)
eight = scene("Each has an eighth of the rows", 8)
title = "Eight devices compute partial gradients, and an all-reduce adds them"
opening.before_after(alone, eight, title, "fsdp")

# %% [markdown]
# One layer of Llama 3 8B with 65,536 tokens, on one H100 and on eight. Times are arithmetic at peak speed.
# The blue bar is the only communication: the all-reduce of the gradients in bfloat16, which takes 1.7 ms. (In
# float32, as in chapter 00, it takes 3.4 ms.) The weights are replicated, the activations are not.
#
# ## One sum too many
#
# Take the smallest model that learns: input rows `x_BD`, targets `y_BF`, one weight matrix `w_DF`, and the
# mean squared error over all B rows. Each of n = 8 devices stores all of `w` and b = B/n of the rows. The
# mesh axis is called `fsdp`, because further down it shards the weights as well. (A
# capital letter is a whole dim, a lower-case letter a device's shard. The next cell and two below are *the
# program by hand*. You can paste them into an empty file: they need only JAX and NumPy.)

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

n, B, D, F = 8, 32, 16, 6
mesh = jax.make_mesh((n,), ("fsdp",), axis_types=(AxisType.Auto,))
normal = np.random.default_rng(0).normal
x_BD, y_BF, w_DF = normal(size=(B, D)), normal(size=(B, F)), normal(size=(D, F))


def on_mesh(function, in_specs, out_specs, mesh=mesh, check=True):
    specs = dict(in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


def partial_loss(w_DF, x_bD, y_bF):  # adds up over devices to the mean over all B rows
    return ((x_bD @ w_DF - y_bF) ** 2).sum() / (B * F)


# %% [markdown]
# Each device divides by the number of entries in *all* rows. So the mean is the sum of the eight *partial
# losses*, and its gradient is the sum of eight gradients. A colleague writes exactly that: compute the
# gradient on each device, then add.
#
# > **Predict.** By which factor does the result differ from the right gradient?

# %%
whole, rows = P(), P("fsdp")
SPECS = (whole, rows, rows)  # of w, x and y
psum = lambda x: jax.lax.psum(x, "fsdp")
colleague = lambda w, x, y: psum(jax.grad(partial_loss)(w, x, y))
got_DF = on_mesh(colleague, SPECS, whole)(w_DF, x_BD, y_BF)
right_DF = jax.grad(partial_loss)(w_DF, x_BD, y_BF)  # one device, all rows

# %% tags=["hide-input"]
times = float(np.vdot(got_DF, right_DF) / np.vdot(right_DF, right_DF))

# %%
my_prediction = None  # times the right gradient
lesson.predicted("times the right gradient", my_prediction, round(times, 3))

# %% tags=["remove-cell"]
assert abs(times - n) < 1e-3

# %% [markdown]
# JAX had added the gradients already, and the `psum` added eight equal sums again.
#
# ### Would you notice?
#
# Here the colleague's function trains on one, two, four and eight devices, and everything else is equal:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Loss against step. One device and two devices fall, four fall faster, and on eight devices the loss grows."}}
RATE_SHOWN = 0.3
figure, axes = plt.subplots(figsize=(5.6, 3.2))
for devices, style in {1: "-", 2: "--", 4: "-.", 8: ":"}.items():
    small = sharding.make_mesh(f"fsdp={devices}")
    program, w, losses = on_mesh(colleague, SPECS, whole, small), w_DF, []
    for _ in range(30):
        losses.append(float(partial_loss(w, x_BD, y_BF)))
        w = w - RATE_SHOWN * program(w, x_BD, y_BF)
    axes.semilogy(losses, style, color="black", label=f"{devices}")
axes.set(xlabel="step", ylabel="mean squared error", ylim=(0.1, 1e3))
axes.set(title="With the bug, more devices train faster, up to a point")
axes.legend(title="devices")
CURVES = losses  # of 8 devices

# %% tags=["remove-cell"]
assert CURVES[-1] > CURVES[0], "on 8 devices the loss should grow"

# %% [markdown]
# On two and four devices, the extra sum looks like good news. With Adam you would see almost no difference,
# because Adam divides a gradient by its own size. Only gradient clipping and the printed norm would be wrong.
#
# ## The gradient by hand
#
# So what added the gradients? First compute them without `jax.grad`. The gradient of a matmul is a matmul:
# `d_w_DF = x_BD.T @ d_e_BF`, where `d_e` is the gradient of the errors. This matmul sums over the rows. A
# device has only b of them, so its result is a *partial sum* for every entry of `d_w` (case 3 in chapter 01).
# Here they are for one entry of `w`, which every device has a copy of:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Ten bars: the gradient of one entry of w on eight devices, all different; their sum; and the equal gradient on one device."}}
own = lambda *args: jax.grad(partial_loss)(*args)[None]  # each device's own gradient
partial = np.asarray(on_mesh(own, SPECS, rows, check=False)(w_DF, x_BD, y_BF))
entry = partial[:, 4, 0]  # of d_w, on each device
figure, axes = plt.subplots(figsize=(6, 3))
names = [f"device {i}" for i in range(n)] + ["psum", "one device"]
colors = [lesson.COLORS["fsdp"]] * n + ["black", lesson.NEUTRAL]
bars = axes.bar(names, [*entry, entry.sum(), right_DF[4, 0]], color=colors)
axes.bar_label(bars, fmt="%.2f", size=9)
axes.axhline(0, color="black", lw=0.6)
axes.tick_params(axis="x", rotation=40)
axes.set(ylabel="gradient", title="Eight copies get eight gradients; psum adds them")
assert np.allclose(partial.sum(axis=0), right_DF, atol=1e-5)

# %% [markdown]
# Which collective you need depends on which devices need `d_w`. If every device stores all of `w`, use a
# `psum`. If each device stores d = D/n rows of `w` and gathers the others for the matmul, it needs only d
# rows of the gradient, and a `psum_scatter` is enough:


# %% tags=["by-hand"]
def by_hand(w_DF, x_bD, y_bF):
    error_bF = x_bD @ w_DF - y_bF
    partial_DF = x_bD.T @ (2 * error_bF / (B * F))  # sums over b: only these rows
    return jax.lax.psum(partial_DF, "fsdp")


def by_hand_sliced(w_dF, x_bD, y_bF):
    w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True)
    partial_DF = x_bD.T @ (2 * (x_bD @ w_DF - y_bF) / (B * F))
    return jax.lax.psum_scatter(partial_DF, "fsdp", scatter_dimension=0, tiled=True)


def partial_loss_sliced(w_dF, x_bD, y_bF):  # only the forward pass
    w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True)
    return partial_loss(w_DF, x_bD, y_bF)


# %% tags=["by-hand"]
GRADIENTS = {  # name: function, spec of w and of its gradient
    "by hand": (by_hand, P()),
    "jax.grad": (jax.grad(partial_loss), P()),
    "sharded, by hand": (by_hand_sliced, P("fsdp")),
    "sharded, jax.grad": (jax.grad(partial_loss_sliced), P("fsdp")),
}
one_device = jax.grad(partial_loss)(w_DF, x_BD, y_BF)
for name, (gradient, spec) in GRADIENTS.items():
    program = on_mesh(gradient, (spec, P("fsdp"), P("fsdp")), spec)
    d_w_DF = program(w_DF, x_BD, y_BF)
    assert np.allclose(d_w_DF, one_device, atol=1e-5), f"{name}: the gradient differs"
    print(f"{name}: matches a single-device run")

# %%
for name, (gradient, spec) in GRADIENTS.items():
    print(name)
    program = on_mesh(gradient, (spec, rows, rows), spec)
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# `jax.grad` has inserted both collectives by itself. They have the same kind and the same bytes as those
# written by hand, although `partial_loss` contains no collective. (Kinds and payloads are read from the
# compiled program; the bytes *sent* are computed for the ring of chapter 01.) How does JAX know?
#
# ## Varying and invariant values
#
# JAX records for every value inside `shard_map` the mesh axes along which it is **varying**: it may differ
# from device to device. Along the other axes it is **invariant**: all devices have the same value. This
# record is part of the value's type, like its shape. JAX does this if `check_vma` ("varying manual axes")
# is True, the default. (What follows is JAX 0.10; earlier versions print other names.)


# %%
def types(w_DF, x_bD):
    values = {
        "w_DF with spec P()": w_DF,
        "x_bD with P('fsdp')": x_bD,
        "x_bD @ w_DF": x_bD @ w_DF,
        "psum(x_bD)": psum(x_bD),
        "all_gather(x_bD)": jax.lax.all_gather(x_bD, "fsdp", tiled=True),
    }
    for name, value in values.items():
        print(f"{name:24} varies along {sorted(jax.typeof(value).mat.varying)}")
    return x_bD


_ = jax.eval_shape(on_mesh(types, (whole, rows), rows), w_DF, x_BD)

# %% [markdown]
# JAX uses the record in two ways. The first is a check. `out_specs=P()` promises the same value on all
# devices. If you forget a `psum`, JAX raises an error that names the axis:


# %%
def refused(function, *args):
    """The sentence of JAX's error that explains it; None if there is no error."""
    try:
        function(*args)
    except ValueError as error:
        return str(error).split("\n\n")[2]


print(refused(on_mesh(partial_loss, SPECS, whole), w_DF, x_BD, y_BF))
unsafe = on_mesh(partial_loss, SPECS, whole, check=False)  # without the record
print(f"check off: {float(unsafe(w_DF, x_BD, y_BF)):.3f}", end="; ")
print(f"the loss is {float(partial_loss(w_DF, x_BD, y_BF)):.3f}")

# %% [markdown]
# Without the check we got one device's partial loss, as if it were the whole loss.
#
# The second use is gradients. In `x_bD @ w_DF`, `w_DF` is invariant and `x_bD` is varying. To make their
# types match, JAX inserts a `pcast`, which turns one invariant value into eight equal ones and sends nothing.
# **A value that is used on eight devices gets eight gradients, and they have to be added.** So the backward
# pass of that `pcast` is a `psum`. You can see both in the traced program, the *jaxpr*, under other names:
#
# | you write | on this page | in the jaxpr | it sends |
# |---|---|---|---|
# | `jax.lax.pcast(x, axis, to="varying")` | `vary` | `pvary` | nothing |
# | `jax.lax.psum(x, axis)` | `psum` | `psum_invariant` | the sum |

# %%
traced = jax.make_jaxpr(on_mesh(jax.grad(partial_loss), SPECS, whole))(w_DF, x_BD, y_BF)
for line in traced.pretty_print(use_color=False).splitlines():
    if "f32[16,6]" in line and ("pvary" in line or "psum" in line):
        print(line.strip())

# %% [markdown]
# After an `all_gather` all devices have the same array, but its type is varying. JAX treats a varying value
# as *a separate variable on each device*, with its own gradient. An invariant value is one variable with one
# gradient. **The gradient of an invariant value is already summed.**
#
# On a mesh with several axes this holds for each axis separately. **Sum a weight's gradient along every axis
# whose devices use the same weight for different rows**, or for different parts of the result. On
# `data=2,fsdp=4`, both axes shard the rows, so the gradient must be summed over both. (`fsdp` also shards
# `w`, so each device needs only its shard of the sum.) An axis that shards the columns of `w`, but not the
# rows, needs no sum: each device has the whole gradient of its columns (exercise 2).
#
# ## The backward pass of each collective
#
# Two rules give the backward pass of the five collectives of chapter 01, and of `pcast`. A sum passes its
# gradient on to every addend. A value that was copied gets the sum of the gradients of its copies.
#
# > **Predict.** A `psum` of 192 bytes on each of 8 devices sends 2 · 7/8 · 192 = 336. How many bytes does
# > its backward pass send?


# %% tags=["hide-input"]
gather = lambda x: jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
scatter = lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)
vary = lambda x: jax.lax.pcast(x, "fsdp", to="varying")
exchange = lambda x: jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True)
shift = lambda x: sharding.shift(x, "fsdp")
SIX = {  # the function, in_specs, out_specs
    "all_gather": (gather, rows, rows),
    "psum_scatter": (scatter, rows, rows),
    "psum": (psum, rows, whole),
    "pcast": (vary, whole, rows),
    "all_to_all": (exchange, rows, rows),
    "ppermute": (shift, rows, rows),
}


def backward(function):
    """Only the backward pass: from the gradient of the result to the gradient of x."""
    return lambda x, dy: jax.vjp(function, x)[1](dy)[0]


rng = np.random.default_rng(1)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
SENDS = {}  # name: bytes forward, bytes backward, kinds backward

# %% tags=["hide-input"]
for name, (function, before, after) in SIX.items():
    x = draw(16, 3) if before == P() else draw(16 * n, 3)  # 192 bytes per device
    there = on_mesh(function, before, after)
    back = on_mesh(backward(function), (before, after), before)
    dy = draw(*there(x).shape)
    # All six are linear, so the backward pass g of f must be its transpose:
    # f(x) . dy = x . g(dy), summed over all devices. An invariant value counts once.
    assert abs(np.vdot(there(x), dy) - np.vdot(x, back(x, dy))) < 1e-3
    found = lesson.compiled(there, mesh, x), lesson.compiled(back, mesh, x, dy)
    kinds = ", ".join(one.kind for one in found[1].collectives) or "none"
    SENDS[name] = *(int(one.total.wire_bytes) for one in found), kinds

# %%
my_prediction = None  # bytes
lesson.predicted("bytes of its backward pass", my_prediction, SENDS["psum"][1], "bytes")

# %% tags=["remove-cell"]
assert SENDS["psum"][1] == 0 and SENDS["pcast"][1] == 336

# %% [markdown]
# It sends nothing. All devices have the result of the `psum`, and all have the gradient of this result. Each
# device passes this gradient on to its own addend.
#
# ### All six, forward and backward

# %% tags=["hide-input"]
print("bytes          forward  backward  with")
for name, (sends, back, kinds) in SENDS.items():
    print(f"{name:14} {sends:7} {back:9}  {kinds}")

# %% [markdown]
# A `pcast` is the opposite of a `psum`. It sends nothing forward, because all devices have the value, but
# its backward pass must add the gradients of eight devices. After an `all_gather`, eight devices use each
# shard, so the eight gradients of a shard are added on the device that stores it. **`all_gather` and
# `psum_scatter` are each other's backward pass, and so are `pcast` and `psum`. `all_to_all` and `ppermute`
# run in the opposite direction.** You need no other collective.
#
# ### The type affects the bytes
#
# With `to="invarying"`, `all_gather` returns an invariant result:

# %%
for to in ("varying", "invarying"):

    def loss(w_dF, x_bD, y_bF, to=to):
        w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True, to=to)
        return partial_loss(w_DF, x_bD, y_bF)

    program = on_mesh(jax.grad(loss), (rows, rows, rows), rows)
    print(f"{to}: {lesson.ratio(program(w_DF, x_BD, y_BF), right_DF)}")
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# Both give the right gradient. A varying gathered weight gets eight gradients, and one reduce-scatter adds
# them and splits the sum. An invariant one is a single variable, so all devices get its whole gradient from
# an all-reduce, with twice the bytes, and then keep a shard of it. So keep gathered values varying if there
# is a backward pass.
#
# ## All the ways to write it
#
# **Do this: return a partial loss, call `jax.grad` inside `shard_map`, and add no gradients yourself.** Other
# ways are the reason for the question "Why is my gradient N times too big?" Here are common ones, with the
# check on and off. `partial_loss` divides by all B rows, `total` is its `psum`, and `mean` divides by the
# number of local rows:

# %%
grad = jax.grad
total = lambda *args: psum(partial_loss(*args))  # below, "partial" is partial_loss
mean = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
WAYS = {
    "grad(partial)": grad(partial_loss),
    "psum(grad(partial))": colleague,
    "grad(total)": grad(total),
    "psum(grad(total))": lambda *args: psum(grad(total)(*args)),
    "pmean(grad(mean))": lambda *args: jax.lax.pmean(grad(mean)(*args), "fsdp"),
}

# %%
for check in (True, False):
    print(f"check_vma={check}")
    build = lambda way, check=check: on_mesh(way, SPECS, whole, check=check)
    programs = {name: build(way) for name, way in WAYS.items()}
    programs["grad outside, of total"] = jax.jit(grad(build(total)))
    for name, program in programs.items():
        print(f"  {name:27} {lesson.ratio(program(w_DF, x_BD, y_BF), right_DF)}")

# %% tags=["remove-cell"]
of_device_0 = grad(partial_loss)(w_DF, x_BD[: B // n], y_BF[: B // n])
for name, times in {"grad(partial)": "equal", "grad(total)": "8 times too big"}.items():
    unchecked = on_mesh(WAYS[name], SPECS, whole, check=False)(w_DF, x_BD, y_BF)
    assert lesson.ratio(unchecked, of_device_0) == times

# %% [markdown]
# ("Another direction" means that the result is no multiple of the right gradient: it is the gradient of one
# device's own rows, or eight times that.)
#
# - **With the check on, `grad` has already added the gradients.** Write no `psum` after it. The type tells
#   you whether a gradient is complete: if it is invariant, it is.
# - **With the check off, JAX does not know that a `psum` returns the same value on all devices.** It treats
#   the eight results as separate values, each with its own gradient. So the backward pass of a `psum` adds
#   these gradients, with another `psum` ([issue 3970](https://github.com/jax-ml/jax/issues/3970), since
#   2020).
# - **`pmean(grad(mean))` is what PyTorch's DDP does** (`DistributedDataParallel`), and what JAX programs with
#   the older `pmap` did: each device takes the mean over its own rows, and the gradients are *averaged*.
#   **DDP averages local means; here we add partial losses.** DDP's way is right if nothing else adds the
#   gradients. If you copy it into `shard_map` unchanged, the gradient is eight times too big. And if devices
#   have different numbers of valid rows, a mean of means is another loss (exercise 1).
#
# ## Which mistake is it?
#
# The loss does not tell you. So compare a gradient with the single-device gradient for the same rows and
# weights at the first step, and look at how they differ:
#
# - **n times too big**, where n is the size of a mesh axis: the gradients are added twice along that axis, or
#   each device divides by its own rows. Look for a `psum` after `jax.grad`, or for a mean over local rows
#   instead of a partial loss. If only one term of the loss is n times too big, every device computes all of
#   it, such as a penalty on weights, and the sum over devices counts it n times. In a widely used trainer,
#   the load-balancing loss of Qwen3-MoE grew with every GPU in this way ([transformers
#   48690](https://github.com/huggingface/transformers/issues/48690)). Add such a term after the `psum`.
# - **n times too small**: partial losses were added and also divided by n. That is DDP's average, applied to
#   partial losses.
# - **Another direction, different on each device**: the gradients are never added. With the check on, JAX
#   raises an error, unless `out_specs` declare the gradient as sharded.
# - **Nearly right, and the difference depends on the data**: means over unequal numbers of rows were averaged
#   (exercise 1).
#
# Compare on two meshes. On one mesh, you cannot tell whether a factor of 2 comes from an axis of two devices
# or from the derivative of a square. And compare each weight separately: only those with a different sharding
# may be wrong.
#
# ## What it costs
#
# Take the gradients of 8 billion weights, summed once per step in bfloat16 (2 bytes). `plan/chips/hardware.py`
# has the *bandwidth*: the bytes/s that a device can send. The backward pass needs 4 FLOPs per weight and
# token:

# %%
print("                all-reduce  reduce-scatter  tokens per device")
for name in ("v4:2x2x2", "h100:8", "h100:16"):
    topology = hardware.Topology.parse(name)
    devices, peak = topology.devices, topology.chip.peak_flops_per_s
    bandwidth = hardware.layout(MeshConfig(fsdp=devices), topology)["fsdp"].bytes_per_s
    scattered = (devices - 1) / devices * 2 * 8e9 / bandwidth
    tokens = 2 * scattered * peak / (4 * 8e9)
    print(f"{topology.chip.name:11} x {devices:2} {2e3 * scattered:6.0f} ms", end="")
    print(f" {1e3 * scattered:12.0f} ms {tokens:15,.0f}")

# %% [markdown]
# The last column is the number of tokens per device at which the backward pass takes as long as the
# all-reduce. The rule: an all-reduce sends 2 · 2W bytes (times (n - 1)/n), and the backward pass of N tokens
# takes 4WN FLOPs, so **N > peak FLOP/s / bandwidth**. (All thresholds, with their assumptions, are on the
# sheet in chapter [09](09_choose.ipynb).) With fewer tokens the next step waits for some of the
# communication, which is then called *exposed*. Starting it early, layer by layer during the backward pass,
# is not enough. Instead, accumulate gradients over several microbatches (parts of the batch, one after
# another) and send them once (exercise 3). Latency dominates if each array is below 0.4 MB (TPU v4), 11 MB (a
# node of H100s) or 25 MB (two nodes), as in chapter 01. That is why compilers and DDP send small gradients in
# buckets.
#
# ## In `model.py`
#
# In this project, `pcast` is called `sharding.vary`. A weight is invariant along axes that do not shard it,
# and a gathered weight is *varying*. So the model contains no code that adds gradients, and `model.loss`
# returns partial losses that add up to the mean over all tokens.
#
# ## Exercise 1: masked rows
#
# Some rows are padding. `mask_b` is 1 for a valid row and 0 for padding, and devices have different numbers
# of valid rows. Write a loss whose `jax.grad`, inside `shard_map`, is the gradient of the mean over all
# entries of all valid rows.

# %% tags=["hide-input"]
MASKS = {4: 4 * [1, 0] + 8 * [1] + 7 * [0] + [1] + 8 * [1]}
MASKS[8] = [0, 1, 0, 0] + 20 * [1] + [1, 0, 0, 0] + 4 * [1]
MASKS = {devices: np.float32(mask) for devices, mask in MASKS.items()}
squares_of = lambda w, x, y: (x @ w - y) ** 2
masked = lambda w, x, y, m: (squares_of(w, x, y) * m[:, None]).sum() / F
one_loss = lambda w, mask: masked(w, x_BD, y_BF, mask) / mask.sum()

# %% tags=["hide-input"]
MASK_HINTS = [
    (lambda *a: masked(*a) / a[3].sum(),
     "Each device divides by its own count; then eight means are added."),
    (lambda *a: jax.lax.pmean(masked(*a) / a[3].sum(), "fsdp"),
     "A mean of means: a row counts more on a device with few valid rows."),
    (lambda *a: masked(*a) / B, "Padding is not in the sum, but it is in the divisor."),
    (lambda *a: masked(*a) / a[3].size,
     "You divide by one device's rows, padding included. Over which rows is the mean?"),
    (lambda w, x, y, m: partial_loss(w, x, y), "You count padding like valid rows."),
    (lambda w, x, y, m: squares_of(w, x, y).sum() / F / psum(m.sum()),
     "Padding is not in the divisor, but it is in the sum."),
    (masked, "That is a sum. Over how many rows should you average?"),
    (lambda *a: F * masked(*a) / psum(a[3].sum()), "F times too big: rows have F."),
    (lambda *a: jax.lax.pmean(masked(*a) / psum(a[3].sum()), "fsdp"),
     "n times too small: the partial losses already add up to the mean."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_loss(answer):
    def run(loss):
        def gradient(devices):
            small = sharding.make_mesh(f"fsdp={devices}")
            program = on_mesh(grad(loss), (whole, rows, rows, rows), whole, small)
            return program(w_DF, x_BD, y_BF, MASKS[devices])

        return gradient

    right = lambda devices: grad(one_loss)(w_DF, MASKS[devices])
    done = "Right on 4 and 8 devices: all valid rows have the same weight."
    line = lesson.diagnose(answer, [(4,), (8,)], right, MASK_HINTS, done, run=run)
    if line.startswith("Not yet: it"):
        ratio = lesson.ratio(run(answer)(8), right(8))
        line = f"Not yet. On 8 devices the gradient is {ratio}."
    return line


# %%
def masked_loss(w_DF, x_bD, y_bF, mask_b):  # (x_bD @ w_DF - y_bF) ** 2 are the squares
    return ...


print(check_loss(masked_loss))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# counted = jax.lax.psum(mask_b.sum(), "fsdp") * F
# return (squares_bF * mask_b[:, None]).sum() / counted
# ```
#
# Add the *count* over all devices before you divide, and let `jax.grad` add the gradients. An extra `psum` of
# the loss does no harm, because its backward pass does nothing. For years, trainers took such a mean of means
# elsewhere, over microbatches of unequal length ([transformers
# 34191](https://github.com/huggingface/transformers/pull/34191)).
# </details>

# %% tags=["remove-cell"]
mask_right = lambda *a: masked(*a) / psum(a[3].sum())
assert check_loss(lambda *a: psum(psum(mask_right(*a)))).endswith("is 8 times too big.")
lesson.expect(check_loss, *MASK_HINTS, (mask_right, "Right on 4"),
              (lambda *a: psum(mask_right(*a)), "Right on 4"),
              (masked_loss, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 2: the backward pass of two matmuls
#
# The mesh is now `tensor=4`, and all devices have the same rows. The first matrix is sharded by columns, the
# second by rows, f = F/n on each device: `h_Bf = x_BD @ w_Df`, then `y_BD = psum(h_Bf @ v_fD)`. Write the
# backward pass without `jax.grad`: from `d_y_BD`, the same on all devices, compute the gradients of `x`, `w`
# and `v`.

# %% tags=["hide-input"]
TENSOR_SPECS = (P(), P(), P(None, "tensor"), P("tensor"))  # of d_y, x, w, v
add = lambda x: jax.lax.psum(x, "tensor")
PAIR = {k: (draw(5, 6), draw(5, 6), draw(6, 8), draw(8, 6)) for k in (2, 4)}


def parts_of(d_y, x, w, v):
    d_h = d_y @ v.T
    return d_h @ w.T, x.T @ d_h, (x @ w).T @ d_y


def with_sums(on_x=add, on_w=None, on_v=None, on_y=None):
    """The backward pass, with functions applied to its gradients."""
    do = lambda f, x: f(x) if f else x

    def parts(d_y, *args):
        d_x, d_w, d_v = parts_of(do(on_y, d_y), *args)
        return do(on_x, d_x), do(on_w, d_w), do(on_v, d_v)

    return parts


PAIR_HINTS = [
    (with_sums(None), "d_x sums over f. Which devices have the rest of F?"),
    (with_sums(add, add, add), "Columns of one device's w were added to another's."),
    (with_sums(None, add, add), "The wrong psums. Which matmul sums over f?"),
    (with_sums(on_y=add), "All n times too big: every device already has all of d_y."),
    (with_sums(lambda x: jax.lax.pmean(x, "tensor")), "d_x is a mean, not a sum."),
]


# %% tags=["hide-input"]
def run_pair(function):
    def parts(devices):
        small = sharding.make_mesh(f"tensor={devices}")
        found = lesson.on_each(function, small, TENSOR_SPECS)(*PAIR[devices])
        return dict(zip(("d_x", "d_w", "d_v"), found, strict=True))

    return parts


def right_pair(devices):
    d_x, d_w, d_v = parts_of(*PAIR[devices])
    columns, pieces = np.split(d_w, devices, axis=1), np.split(d_v, devices)
    whole = {"d_x": [d_x] * devices, "d_w": columns, "d_v": pieces}
    return {name: np.stack(parts) for name, parts in whole.items()}


# %% tags=["hide-input"]
def check_pair(answer):
    def given(d_y, *args):
        parts = lesson.answered(answer)(d_y, *args)
        for name, got, like in zip("xwv", parts, args, strict=True):
            if jnp.shape(got) != like.shape:
                shapes = f"{jnp.shape(got)}, but {name} has shape {like.shape}"
                raise ValueError(f"d_{name} has shape {shapes}")
        return parts

    cases, done = [(2,), (4,)], "Right on 2 and 4 devices, with one psum."
    line = lesson.diagnose(given, cases, right_pair, PAIR_HINTS, done, run=run_pair)
    if line.startswith("Not yet"):
        got, want = run_pair(given)(4), right_pair(4)
        off = [f"{name}: {lesson.ratio(got[name], want[name])}" for name in want]
        line = "Not yet. On 4 devices, " + "; ".join(off) + "."
    return line


# %%
def pair_backward(d_y_BD, x_BD, w_Df, v_fD):
    d_x_BD = d_w_Df = d_v_fD = ...
    return d_x_BD, d_w_Df, d_v_fD


print(check_pair(pair_backward))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# d_h_Bf = d_y_BD @ v_fD.T
# d_x_BD = jax.lax.psum(d_h_Bf @ w_Df.T, "tensor")  # sums over f, a lower-case letter
# return d_x_BD, x_BD.T @ d_h_Bf, (x_BD @ w_Df).T @ d_y_BD
# ```
#
# The rule of chapter 01 holds in the backward pass too: only a sum over a sharded (lower-case) dim needs a
# collective. The forward pass has one `psum`, for the output; the backward pass has one, for the gradient of
# the input. Megatron-LM writes both by hand and calls them g and f. They are the subject of chapter 04.
# </details>

# %% tags=["remove-cell"]
swap = lambda *args: with_sums()(*args)[:1] + with_sums()(*args)[:0:-1]
half = lambda *args: (lambda d_x, d_w, d_v: (d_x, d_w / 2, d_v))(*with_sums()(*args))
lesson.expect(check_pair, *PAIR_HINTS, (with_sums(), "Right on 2"),
              (swap, "d_w has shape (4, 6), but w has shape (6, 4)"),
              (half, "d_x: equal; d_w: 1/2 of it; d_v: equal"),
              (pair_backward, lesson.NOTHING),
              (lambda *args: None, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 3: gradient accumulation with one sum
#
# The rows come in Z = 4 microbatches, `x_ZbD` and `y_ZbF`, because they do not all fit into memory at once.
# Return the gradient of the sum of all partial losses (`partial_loss` divides by the rows of all
# microbatches). The loop below is right, but sends the gradient four times. Send it once.


# %% tags=["hide-input"]
Z = 4
MICRO = draw(Z, B // Z, D), draw(Z, B // Z, F)
MICRO_SPECS = (whole, P(None, "fsdp"), P(None, "fsdp"))


def loop(of_one, after=lambda d: d, start=lambda w: w):
    def accumulate(w, x, y):
        found = [of_one(start(w), x[m], y[m]) for m in range(Z)]
        return after(sum(found))

    return accumulate


DIVIDED = "Z times too small: partial_loss already divides by all rows."
EVERY_TIME, ONE_DEVICE = loop(grad(partial_loss)), loop(grad(partial_loss), start=vary)
MICRO_HINTS = [
    (ONE_DEVICE, "Each device has the gradient of its own rows. Who adds them?"),
    (loop(grad(partial_loss), psum), "n times too big: jax.grad has already added."),
    (loop(grad(partial_loss), lambda d: d / Z), DIVIDED),
    (loop(grad(partial_loss), lambda d: psum(d) / Z, vary), DIVIDED),
    (loop(grad(partial_loss), lambda d: jax.lax.pmean(d, "fsdp"), vary),
     "n times too small: partial_loss already divides by all rows."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_once(answer):
    small = lambda devices: sharding.make_mesh(f"fsdp={devices}")
    on = lambda function, devices: lesson.on_each(function, small(devices), MICRO_SPECS)
    run = lambda function: lambda devices: on(function, devices)(w_DF, *MICRO)
    rows_of_all = [a.reshape(B, -1) for a in MICRO]
    right = lambda devices: np.stack([grad(partial_loss)(w_DF, *rows_of_all)] * devices)
    line = lesson.diagnose(answer, [(4,), (8,)], right, MICRO_HINTS, "Right", run=run)
    if line != "Right":
        return line
    sent = lesson.compiled(on(answer, 8), small(8), w_DF, *MICRO).total.wire_bytes
    if sent > 672:
        line = f"The right gradient, but a device sends {sent:,.0f} bytes, not 672."
        return line + " What do you add inside the loop?"
    return f"Right: a device sends {sent:,.0f} bytes, one psum for all microbatches."


# %%
def accumulate(w_DF, x_ZbD, y_ZbF):
    total_DF = 0
    for x_bD, y_bF in zip(x_ZbD, y_ZbF, strict=True):
        total_DF += jax.grad(partial_loss)(w_DF, x_bD, y_bF)
    return total_DF


def accumulate_once(w_DF, x_ZbD, y_ZbF):
    return ...


print(check_once(accumulate_once))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# w_DF = jax.lax.pcast(w_DF, "fsdp", to="varying")  # from here on one copy per device
# total_DF = 0
# for x_bD, y_bF in zip(x_ZbD, y_ZbF, strict=True):
#     total_DF += jax.grad(partial_loss)(w_DF, x_bD, y_bF)
# return jax.lax.psum(total_DF, "fsdp")
# ```
#
# If you write the `pcast` yourself, before the loop, you also write the `psum` yourself, after it. In PyTorch
# this is DDP's `no_sync()`.
# </details>

# %% tags=["remove-cell"]
once = loop(grad(partial_loss), psum, vary)
assert check_once(accumulate) == check_once(EVERY_TIME)
lesson.expect(check_once, *MICRO_HINTS, (once, "Right: a device sends 672 bytes"),
              (EVERY_TIME, "2,688 bytes, not 672"),
              (accumulate_once, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# This program trains a two-layer network on four devices. Each device stores a quarter of each matrix, and
# gathers the matrices once per step. It can process its rows of the batch in several microbatches. The
# gradient is clipped.

# %%
RATE, LARGEST, STEPS, ROWS, HIDDEN = 0.2, 1.0, 20, 64, 24
draw = np.random.default_rng(5).normal
START = {"up": draw(size=(D, HIDDEN)) / 4, "down": draw(size=(HIDDEN, F)) / 5}
X_SBD = draw(size=(STEPS, ROWS, D))  # the batches of all steps
Y_SBF = 0.3 * X_SBD @ draw(size=(D, F)) + 0.1 * draw(size=(STEPS, ROWS, F))
each = jax.tree.map


def part_of_loss(w, x_bD, y_bF):
    """This device's part of the mean over all rows of a batch."""
    out_bF = jnp.tanh(x_bD @ w["up"]) @ w["down"]
    return ((out_bF - y_bF) ** 2).sum() / (ROWS * F)


# %%
def empty(w):
    """No gradients yet: an unsharded sum of partial gradients, and a summed shard."""
    size = jax.lax.axis_size("fsdp")
    shard = each(lambda w: jnp.zeros_like(w[: len(w) // size]), w)
    return each(jnp.zeros_like, w), shard


def collect(gradients, d, is_last=True):
    """Accumulate a microbatch's gradient. At the end, add over devices, and clear."""
    partial, shard = gradients
    partial = each(jnp.add, partial, d)
    if is_last:
        shard = each(scatter, partial)
        partial = each(jnp.zeros_like, partial)
    return partial, shard


def clipped(d):
    norm = jnp.sqrt(psum(sum((one**2).sum() for one in jax.tree.leaves(d))))
    return each(lambda one: one * jnp.minimum(1.0, LARGEST / norm), d), norm


# %%
def train_step(w, x_bD, y_bF, microbatches):
    """Return the new weights, and this step's loss and gradient norm."""
    whole_w = each(gather, w)
    gradients, loss = empty(whole_w), 0.0
    of_rows = jax.value_and_grad(part_of_loss)
    for micro in range(microbatches):
        share = len(x_bD) // microbatches
        mine = slice(micro * share, (micro + 1) * share)
        one_loss, d = of_rows(whole_w, x_bD[mine], y_bF[mine])
        gradients = collect(gradients, d)
        loss += one_loss
    d, norm = clipped(gradients[1])
    return each(lambda w, d: w - RATE * d, w, d), psum(loss), norm


# %%
def train(microbatches, devices=4):
    """Return the weights after STEPS steps, and the loss and norm of each step."""
    step = lambda *args: train_step(*args, microbatches)
    out_specs, small = (rows, whole, whole), sharding.make_mesh(f"fsdp={devices}")
    program, w, log = on_mesh(step, (rows, rows, rows), out_specs, small), START, []
    for x_BD, y_BF in zip(X_SBD, Y_SBF, strict=True):
        w, loss, norm = program(w, x_BD, y_BF)
        log.append((float(loss), float(norm)))
    return w, log


# %% mystnb={"image": {"alt": "Training loss over 20 steps with one, two and four microbatches. All three start at the same loss and fall."}}
figure, axes = plt.subplots(figsize=(5.6, 3))
for microbatches, style in {1: "-", 2: "--", 4: ":"}.items():
    _, log = train(microbatches)
    axes.plot(np.transpose(log)[0], style, color="black", label=f"{microbatches}")
    (loss, norm), (last, _) = log[0], log[-1]
    text = f"first loss {loss:.5f}, norm {norm:.3f}; last loss {last:.3f}"
    print(f"microbatches={microbatches}: {text}")
axes.set(xlabel="step", ylabel="mean squared error", ylim=0, xticks=range(0, 20, 5))
axes.set_title("All three start at the same loss and learn")
axes.legend(title="microbatches")

# %% [markdown]
# A colleague can no longer fit the rows of a device into memory, so she uses four microbatches. The loss of
# the first step is right to the last digit, and then it falls. "Small microbatches are noisy", she says,
# "so I expect slower learning." Fix the program, so that the weights do not depend on the number of
# microbatches.


# %% tags=["hide-input"]
@lesson.functools.cache
def one_device(weigh, microbatches):
    """The same training without a mesh; `weigh` combines the gradients."""

    @jax.jit
    def step(w, x_BD, y_BF):
        of_all = np.arange(ROWS).reshape(4, -1)  # a device's rows
        parts = []
        for micro in np.split(of_all, microbatches, axis=1):
            rows = micro.ravel()
            parts.append(grad(part_of_loss)(w, x_BD[rows], y_BF[rows]))
        d = each(weigh, *parts)
        norm = jnp.sqrt(sum((one**2).sum() for one in jax.tree.leaves(d)))
        scale = jnp.minimum(1.0, LARGEST / jnp.maximum(norm, 1e-9))
        return each(lambda w, d: w - RATE * scale * d, w, d)

    w = each(jnp.asarray, START)
    for x_BD, y_BF in zip(X_SBD, Y_SBF, strict=True):
        w = step(w, x_BD, y_BF)
    return jax.device_get(w)


all_of = lambda *d: sum(d)

# %% tags=["hide-input"]
ACCUMULATION_HINTS = [
    (lambda *d: d[-1],
     "The weights are the same as before your change. Compare the norms of the first "
     "step. The loss has every row; how many rows does the gradient have?"),
    (lambda *d: len(d) * d[-1],
     "The size is about right now, but only one microbatch decides the direction."),
    (lambda *d: d[0], "Now only the first microbatch's gradient reaches the weights."),
    (lambda *d: 0 * d[0], "Now no gradient reaches the weights."),
    (lambda *d: sum(d) / len(d),
     "Z times too small: `part_of_loss` already divides by all rows of the batch."),
    (lambda *d: sum((len(d) - i) * one for i, one in enumerate(d)),
     "Now the first microbatch counts Z times, and only the last one once."),
]  # fmt: skip


def check_mend(train):
    hints = [(lambda z, f=f: one_device(f, z), hint) for f, hint in ACCUMULATION_HINTS]
    yours = lambda microbatches: jax.device_get(lesson.answered(train)(microbatches)[0])
    done = "Fixed: with 2 and 4 microbatches the weights match a single-device run."
    right = lambda microbatches: one_device(all_of, 1)
    return lesson.diagnose(yours, [(2,), (4,)], right, hints, done)


# %% tags=["hide-output"]
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `collect` believes that every microbatch is the last one, because `train_step` never sets `is_last`. So it
# sends and clears the sum after each microbatch, and the shard of the last one replaces the others:
#
# ```python
# gradients = collect(gradients, d, is_last=micro == microbatches - 1)
# ```
#
# (Or let `collect` add: `shard = each(lambda s, p: s + scatter(p), shard, partial)`. This is right, too, and
# sends Z times as much.) The loss is right, because it is summed elsewhere. The clue is the norm of the first
# step: with Z microbatches it should not change, and it was about Z times too small. (The mean gradient of
# fewer rows is noisier indeed, but noise makes a norm larger, not smaller.)
#
# Megatron-FSDP lost all but the last microbatch's gradient in 2026 in the same way: a `no_sync` that did
# nothing left `is_last_microbatch` true in every backward pass, and finalizing the buffer cleared it ([pull
# request 7186](https://github.com/NVIDIA/Megatron-LM/pull/7186)). No error was raised; the repair added the
# missing test of accumulation. NeMo Automodel ([pull request
# 3530](https://github.com/NVIDIA-NeMo/Automodel/pull/3530)) and, with shared gradient buffers, Fast-LLM
# ([issue 550](https://github.com/ServiceNow/Fast-LLM/issues/550)) lost gradients in the same way.
# </details>


# %% tags=["remove-cell"]
def collecting(collect_one):
    """`train` with another collect(gradients, d, microbatch, microbatches)."""

    def changed(Z):
        count = iter(range(10**6))
        new = lambda gradients, d, _=True: collect_one(gradients, d, next(count) % Z, Z)
        return lesson.replaced(train, collect=new)(Z)

    return changed


def adding(gradients, d, clear=True):
    partial = each(jnp.add, gradients[0], d)
    shard = each(lambda s, p: s + scatter(p), gradients[1], partial)
    return (each(jnp.zeros_like, partial) if clear else partial), shard


def growing(gradients, d, *_):
    total = each(jnp.add, gradients[0], d)
    return total, each(scatter, total)


old_collect, times = collect, lambda factor, d: each(lambda one: factor * one, d)
RIGHT = [lambda g, d, i, Z: old_collect(g, d, i == Z - 1),
         lambda g, d, *_: adding(g, d), growing]  # fmt: skip
WRONG = [
    lambda g, d, i, Z: old_collect(g, times(Z, d), True),
    lambda g, d, i, Z: old_collect(g, d, i == 0),
    lambda g, d, *_: old_collect(g, d, False),
    lambda g, d, i, Z: old_collect(g, times(1 / Z, d), i == Z - 1),
    lambda g, d, *_: adding(g, d, clear=False),
]
answers = [train, *map(collecting, WRONG)]
lesson.expect(check_mend, *zip(answers, [hint for _, hint in ACCUMULATION_HINTS],
                               strict=True),
              *[(collecting(right), "Fixed") for right in RIGHT],
              (lambda microbatches: ..., lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## In one table
#
# The table counts the numbers that a device sends, with (n - 1)/n taken as 1. W is the number of weights,
# which is also the size of their gradient. A float32 number has 4 bytes. Letters show what a device stores.
#
# | layout | JAX spec of w | forward | backward | numbers | PyTorch | Megatron |
# |---|---|---|---|---|---|---|
# | `x_bD @ w_DF`, all of w everywhere | `P()` | nothing | all-reduce of dw | 2 W | DDP | DDP |
# | `x_bD @ w_dF`, d rows each | `P("fsdp")` | all-gather of w | reduce-scatter of dw | W + W | `fully_shard` | Megatron-FSDP |
# | `x_BD @ w_Df`, f columns each | `P(None, "tensor")` | nothing | all-reduce of dx | 2 of x | `ColwiseParallel` | `ColumnParallelLinear` |
# | `x_Bd @ w_dF`, then `psum` | `P("tensor")` | all-reduce of y | nothing | 2 of y | `RowwiseParallel` | `RowParallelLinear` |
#
# The all-reduce of dw is needed once per step, and it can overlap with the backward pass of earlier layers.
# The all-reduce of dx is exposed: the backward pass of the layer before waits for it.
#
# ## Three lines to keep
#
# 1. If all devices use the same value, its gradients must be added in the backward pass: `pcast` and `psum`
#    are each other's backward pass, as are `all_gather` and `psum_scatter`, with the same bytes.
# 2. Before you sum a gradient, check its type: an invariant gradient has been summed.
# 3. DDP averages local means; here we add partial losses. Whatever you use, compare one gradient and its
#    norm with a single-device run.
#
# **Sources.** JAX: [Manual parallelism with
# shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html); [Efficient transposition of
# replication-inducing collectives](https://docs.jax.dev/en/latest/jep/17111-shmap-transpose.html). f and g:
# Megatron-LM, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3. PyTorch:
# [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
# The two halves of an all-reduce, in training: ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054),
# section 7.
