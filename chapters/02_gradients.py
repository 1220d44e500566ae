# %% [markdown]
# # 02 · Gradients under sharding
#
# **Question.** Every device computes the gradient of its part of the loss. Who adds these partial gradients,
# and has something added them already?
#
# **Why it hurts not to know.** Write one all-reduce too many, and no error is raised. The gradient has the
# right shape, the loss falls, and the settings that work on four devices fail on eight.
#
# *Before this:* 01 (`shard_map`, the collectives). *Mesh:* `fsdp=8`, simulated. *Runs in* 40 s on 2 cores.
# *Reading takes* 25 minutes, 90 with the exercises.

# %%
from devices import simulate_devices

simulate_devices(8)
import jax.numpy as jnp
import matplotlib.pyplot as plt

import sharding
from chapters import lesson
from config import MeshConfig
from plan import hardware

COLOR = lesson.COLORS["fsdp"]  # of the `fsdp` axis

# %% [markdown]
# ## One sum too many
#
# Take the smallest model that learns: rows `x_BD`, targets `y_BF`, one matrix `w_DF`, and the mean squared
# error over all B rows. Each of n = 8 devices stores all of `w` and b = B/n of the rows. This is data
# parallelism. (A capital letter is a whole dim, a lower-case letter a device's shard. This cell and two
# below are *the program by hand*: pasted into an empty file, they need only JAX and NumPy.)

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


def share(w_DF, x_bD, y_bF):  # these rows' share of the mean over all B rows
    return ((x_bD @ w_DF - y_bF) ** 2).sum() / (B * F)


# %% [markdown]
# Each device divides by the number of entries in *all* rows. So the mean is the sum of the eight shares, and
# its gradient is the sum of eight gradients. A colleague writes exactly that: compute the gradient on each
# device, then add.
#
# > **Predict.** The result is the right gradient times which factor?

# %%
whole, rows = P(), P("fsdp")
SPECS = (whole, rows, rows)  # of w, x and y
psum = lambda x: jax.lax.psum(x, "fsdp")
colleague = lambda w, x, y: psum(jax.grad(share)(w, x, y))
got_DF = on_mesh(colleague, SPECS, whole)(w_DF, x_BD, y_BF)
right_DF = jax.grad(share)(w_DF, x_BD, y_BF)  # one device, all rows
my_prediction = None  # times the right gradient
times = float(np.vdot(got_DF, right_DF) / np.vdot(right_DF, right_DF))
lesson.predicted("times the right gradient", my_prediction, round(times, 3))

# %% tags=["remove-cell"]
assert abs(times - n) < 1e-3

# %% [markdown]
# The gradients had been added already, and the `psum` added eight equal sums again. Would you notice? Here
# the colleague's function trains on one, two, four and eight devices, with everything else equal:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Loss against step. One device and two devices fall, four fall faster, and on eight devices the loss grows."}}
RATE_SHOWN = 0.3
figure, axes = plt.subplots(figsize=(5.6, 3.2))
for devices, style in {1: "-", 2: "--", 4: "-.", 8: ":"}.items():
    small = sharding.make_mesh(f"fsdp={devices}")
    program, w, losses = on_mesh(colleague, SPECS, whole, small), w_DF, []
    for _ in range(30):
        losses.append(float(share(w, x_BD, y_BF)))
        w = w - RATE_SHOWN * program(w, x_BD, y_BF)
    axes.semilogy(losses, style, color="black", label=f"{devices}")
axes.set(xlabel="step", ylabel="mean squared error", ylim=(0.1, 1e3))
axes.set(title="More devices train faster, until they do not")
axes.legend(title="devices")
CURVES = losses  # of 8 devices

# %% tags=["remove-cell"]
assert CURVES[-1] > CURVES[0], "on 8 devices the loss should grow"

# %% [markdown]
# On two and four devices, the extra sum looks like good news. With Adam you would see almost nothing,
# because Adam divides a gradient by its own size. Only gradient clipping and the printed gradient norm would
# be off.
#
# ## The gradient by hand
#
# So what added the gradients? First compute them without `jax.grad`. The gradient of a matmul is a matmul:
# `d_w_DF = x_BD.T @ d_e_BF`, where `d_e` is the gradient of the errors. It sums over the rows. A device has
# only b of them, so its result is a *partial sum* of the whole `d_w` (case 3 of 01). Here are all eight:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight small arrays of colors, all different, and a ninth, their sum, equal to the tenth, the gradient of one device."}}
own = lambda *args: jax.grad(share)(*args)[None]  # each device's own gradient
partial = np.asarray(on_mesh(own, SPECS, rows, check=False)(w_DF, x_BD, y_BF))
figure, panels = plt.subplots(2, 5, figsize=(6.0, 4.4))
shown = {f"device {i}": partial[i] for i in range(n)}
shown |= {"their sum": partial.sum(axis=0), "one device": right_DF}
for axes, (name, values) in zip(panels.flat, shown.items(), strict=True):
    axes.imshow(values, cmap="RdBu", vmin=-0.6, vmax=0.6, aspect="auto")
    axes.set(xticks=[], yticks=[], title=name, xlabel="F")
    axes.set_ylabel("D", rotation=0)
figure.suptitle("Eight partial sums of the whole gradient", x=0.02, ha="left")
assert np.allclose(partial.sum(axis=0), right_DF, atol=1e-5)

# %% [markdown]
# Which collective you need depends on where `d_w` is needed. If every device stores all of `w`, it is a
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


def share_sliced(w_dF, x_bD, y_bF):  # the forward pass alone
    return share(jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True), x_bD, y_bF)


# %% tags=["by-hand"]
GRADIENTS = {  # name: function, spec of w and of its gradient
    "by hand": (by_hand, P()),
    "jax.grad": (jax.grad(share), P()),
    "sharded, by hand": (by_hand_sliced, P("fsdp")),
    "sharded, jax.grad": (jax.grad(share_sliced), P("fsdp")),
}
one_device = jax.grad(share)(w_DF, x_BD, y_BF)
for name, (gradient, spec) in GRADIENTS.items():
    program = on_mesh(gradient, (spec, P("fsdp"), P("fsdp")), spec)
    d_w_DF = program(w_DF, x_BD, y_BF)
    assert np.allclose(d_w_DF, one_device, atol=1e-5), f"{name}: the gradient differs"
    print(f"{name}: the gradient of one device")

# %%
for name, (gradient, spec) in GRADIENTS.items():
    print(name)
    program = on_mesh(gradient, (spec, rows, rows), spec)
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# `jax.grad` has inserted both collectives by itself. They have the same kind and the same bytes as those
# written by hand, though no line of `share` asks for one. (Kinds and bytes are read from the compiled
# program; the bytes *sent* follow from the ring of 01.) How does it know?
#
# ## Varying and invariant values
#
# JAX records for every value inside `shard_map` the mesh axes along which it is **varying**: each device has
# its own value. Along the other axes it is **invariant**: all devices share one value. This record is part
# of the value's type, like its shape, and `check_vma=True`, the default, maintains it ("varying manual
# axes").


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
# JAX uses the record in two ways. The first is a check. `out_specs=P()` promises one value for all devices.
# A forgotten `psum` breaks that promise, and the error names the axis:


# %%
def refused(function, *args):
    """The sentence of JAX's error that explains it; None if there is no error."""
    try:
        function(*args)
    except ValueError as error:
        return str(error).split("\n\n")[2]


print(refused(on_mesh(share, SPECS, whole), w_DF, x_BD, y_BF))
unsafe = on_mesh(share, SPECS, whole, check=False)  # without the record
print(f"check off: {float(unsafe(w_DF, x_BD, y_BF)):.3f}", end="; ")
print(f"the loss is {float(share(w_DF, x_BD, y_BF)):.3f}")

# %% [markdown]
# Without the check we got one device's share of the loss, presented as everyone's.
#
# The second use is gradients. In `x_bD @ w_DF`, `w_DF` is one value and `x_bD` is eight. To make their types
# match, JAX inserts a `pcast`, which turns one value into eight equal ones and sends nothing. **A value that
# is used on eight devices gets eight gradients, and they have to be added.** So the backward pass of that
# `pcast` is a `psum`. You can see both in the traced program (printed as `pvary` and `psum_invariant`; the
# braces hold the record):

# %%
traced = jax.make_jaxpr(on_mesh(jax.grad(share), SPECS, whole))(w_DF, x_BD, y_BF)
for line in str(traced).splitlines():
    if "f32[16,6]" in line and ("pvary" in line or "psum" in line):
        print(line.strip())

# %% [markdown]
# **The gradient of an invariant value is already summed.** Varying does not mean different. It means
# *counted once per device*. That is why even the result of `all_gather` is varying, although all devices
# hold equal numbers.
#
# On a mesh with several axes the same holds for each axis separately. **A weight's gradient needs a sum
# along every axis that shards the rows**, because the matmul of the backward pass sums over the rows. If the
# axis also shards the weight, so that it was gathered, the sum is a `psum_scatter`; otherwise it is a
# `psum`. An axis that shards the columns of `w` but not the rows needs no sum (exercise 2). So on
# `data=2,fsdp=4`, where both axes shard the rows and `fsdp` also shards `w`, a gradient is reduce-scattered
# over `fsdp`, and the shard is then all-reduced over `data`.
#
# ## The backward pass of each collective
#
# A sum passes its gradient on to every addend. A value that was copied gets the sum of the copies'
# gradients. These two rules give the backward pass of all six collectives.
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
    """The backward pass alone: gradient of the result in, gradient of x out."""
    return lambda x, dy: jax.vjp(function, x)[1](dy)[0]


# %% tags=["hide-input"]
rng = np.random.default_rng(1)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
SENDS = {}  # name: bytes forward, bytes backward, kinds backward
for name, (function, before, after) in SIX.items():
    x = draw(16, 3) if before == P() else draw(16 * n, 3)  # 192 bytes per device
    there = on_mesh(function, before, after)
    back = on_mesh(backward(function), (before, after), before)
    dy = draw(*there(x).shape)
    assert abs(np.vdot(there(x), dy) - np.vdot(x, back(x, dy))) < 1e-3
    found = lesson.compiled(there, mesh, x), lesson.compiled(back, mesh, x, dy)
    kinds = ", ".join(one.kind for one in found[1].collectives) or "none"
    SENDS[name] = *(int(one.total.wire_bytes) for one in found), kinds

# %%
my_prediction = None  # bytes
lesson.predicted("bytes of its backward pass", my_prediction, SENDS["psum"][1], "bytes")
print("               forward  backward  by")
for name, (sends, back, kinds) in SENDS.items():
    print(f"{name:14} {sends:7} {back:9}  {kinds}")

# %% tags=["remove-cell"]
assert SENDS["psum"][1] == 0 and SENDS["pcast"][1] == 336

# %% [markdown]
# Nothing. What comes after a `psum` is one value, which all devices compute alike, so each device already
# has its gradient and passes it on to its own addend. A `pcast` is the opposite. It sends nothing forward,
# because all devices have the value, but its backward pass must add the gradients of eight devices. After an
# `all_gather`, eight devices use each shard, so its eight gradients are added on the device that stores the
# shard. **`all_gather` and `psum_scatter` are each other's backward pass, and so are `pcast` and `psum`.
# `all_to_all` and `ppermute` run in the opposite direction.** No other collective is needed. The cell above
# checks this table: all six are linear, so the backward pass g of f must be its transpose, f(x) · y = x ·
# g(y), where the dot product runs over all devices and an invariant value counts once.
#
# A type can cost bytes. `all_gather` can also return an invariant result, with `to="invarying"`:

# %%
for to in ("varying", "invarying"):

    def loss(w_dF, x_bD, y_bF, to=to):
        w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True, to=to)
        return share(w_DF, x_bD, y_bF)

    program = on_mesh(jax.grad(loss), (rows, rows, rows), rows)
    print(f"{to}: {lesson.ratio(program(w_DF, x_BD, y_BF), right_DF)}")
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# Both give the right gradient. If the gathered weight is varying, it gets eight gradients, which one
# reduce-scatter adds and splits. If it is invariant, it gets one whole gradient first, which takes an
# all-reduce: twice the bytes. So keep gathered values varying, unless there is no backward pass.
#
# ## All the ways to write it
#
# "Why is my gradient N times too big?" Here is what people write, with the check on and off. `share` divides
# by all B rows, `total` is its `psum`, and `mean` divides by a device's own rows:

# %%
grad = jax.grad
total = lambda *args: psum(share(*args))
mean = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
alone = lambda w, *args: grad(share)(vary(w), *args)
WAYS = {
    "grad(share)": grad(share),
    "psum(grad(share))": colleague,
    "grad(total)": grad(total),
    "psum(grad(total))": lambda *args: psum(grad(total)(*args)),
    "pmean(grad(mean))": lambda *args: jax.lax.pmean(grad(mean)(*args), "fsdp"),
    "pcast, grad(share)": alone,
    "pcast, grad(share), psum": lambda *args: psum(alone(*args)),
}

# %%
for check in (True, False):
    print(f"check_vma={check}")
    build = lambda way, check=check: on_mesh(way, SPECS, whole, check=check)
    programs = {name: build(way) for name, way in WAYS.items()}
    programs["grad outside, of total"] = jax.jit(grad(build(total)))
    for name, program in programs.items():
        if refused(program, w_DF, x_BD, y_BF):
            print(f"  {name:25} refused")
            continue
        print(f"  {name:25} {lesson.ratio(program(w_DF, x_BD, y_BF), right_DF)}")

# %% tags=["remove-cell"]
of_device_0 = grad(share)(w_DF, x_BD[: B // n], y_BF[: B // n])
for name, times in {"grad(share)": "equal", "grad(total)": "8 times too big"}.items():
    unchecked = on_mesh(WAYS[name], SPECS, whole, check=False)(w_DF, x_BD, y_BF)
    assert lesson.ratio(unchecked, of_device_0) == times

# %% [markdown]
# ("Another direction" is one device's own gradient, or eight times it, presented as everyone's.)
#
# - **With the check on, `grad` has already added.** Write no sum after it. Or write `pcast` before it, and
#   then write the sum yourself. The type tells you which: an invariant gradient is complete.
# - **With the check off, JAX cannot know that a `psum` returned one value.** It counts eight, and the
#   transpose from eight to eight is a `psum` again ([issue 3970](https://github.com/jax-ml/jax/issues/3970),
#   since 2020).
# - **`pmean(grad(mean))` is what DDP does**, and what `pmap` programs did: each device takes the mean of its
#   own rows, and gradients are *averaged*. **DDP averages means; here we add shares.** It is right if
#   nothing else adds. Copied into `shard_map` unchanged, it is eight times too big. And if devices have
#   different numbers of valid rows, a mean of means is another loss (exercise 1).
#
# ## Which mistake is it?
#
# The loss does not tell you. So compare a gradient with one device's, for the same rows and weights at the
# first step, and look at how they differ:
#
# - **n times too big**, where n is the size of a mesh axis: something adds along that axis twice. Look for a
#   `psum` after `jax.grad`, for a mean over a device's own rows instead of its share, or for a term of the
#   loss that all devices share (the bug below).
# - **n times too small**: shares were added and also divided by n. That is DDP's average, applied to shares.
# - **Another direction, different on each device**: nothing adds. With the check on, JAX refuses this,
#   unless the gradient's `out_specs` say that it is sharded.
# - **Nearly right, and the difference depends on the rows**: means over unequal numbers of rows were
#   averaged (exercise 1).
#
# Compare on two meshes, because on one mesh a factor of 2 might come from an axis of two devices or from the
# derivative of a square. And compare each weight separately: a weight with another sharding can be the only
# wrong one.
#
# ## What it costs
#
# Take the gradients of 8 billion weights, summed once per step in bfloat16 (2 bytes). `plan/hardware.py` has
# the bytes/s that a device can send. The backward pass needs 4 FLOPs per weight and token:

# %%
print("                all-reduce  reduce-scatter  tokens per device")
for name in ("v4:2x2x2", "h100:8", "h100:16"):
    topology = hardware.Topology.parse(name)
    devices, peak = topology.devices, topology.chip.peak_flops_per_s
    wires = hardware.layout(MeshConfig(fsdp=devices), topology)["fsdp"].bytes_per_s
    scattered = (devices - 1) / devices * 2 * 8e9 / wires
    tokens = 2 * scattered * peak / (4 * 8e9)
    print(f"{topology.chip.name:11} x {devices:2} {2e3 * scattered:6.0f} ms", end="")
    print(f" {1e3 * scattered:12.0f} ms {tokens:15,.0f}")

# %% [markdown]
# The last column is the number of tokens per device at which the backward pass takes as long as the
# all-reduce. With fewer tokens the communication is exposed, even if each layer's gradient is sent while the
# next layer's is computed. Devices with few tokens therefore accumulate gradients over several microbatches
# and send once (exercise 3). Latency decides if gradients are sent one small array at a time: below 0.4 MB
# (v4), 11 MB (a node of H100) and 25 MB (two nodes), as in 01. That is why compilers and DDP put small
# gradients into one message.
#
# ## In `model.py`
#
# The project calls `pcast` `sharding.vary`. A weight is invariant along axes that do not shard it, and a
# gathered weight is *varying*. So no line of the model adds a gradient, and `model.loss` returns shares that
# add up to the mean over all tokens.
#
# ## Exercise 1: rows that do not count
#
# Some rows are padding: `mask_b` is 1 for a row that counts and 0 otherwise, and devices have different
# numbers of valid rows. Write a loss whose `jax.grad`, inside `shard_map`, is the gradient of the mean over
# all entries of the rows that count.

# %% tags=["hide-input"]
MASKS = {4: 4 * [1, 0] + 8 * [1] + 7 * [0] + [1] + 8 * [1]}
MASKS[8] = [0, 1, 0, 0] + 20 * [1] + [1, 0, 0, 0] + 4 * [1]
MASKS = {devices: np.float32(mask) for devices, mask in MASKS.items()}
squares_of = lambda w, x, y: (x @ w - y) ** 2
masked = lambda w, x, y, m: (squares_of(w, x, y) * m[:, None]).sum() / F
one_loss = lambda w, mask: masked(w, x_BD, y_BF, mask) / mask.sum()
MASK_HINTS = [
    (lambda *a: masked(*a) / a[3].sum(),
     "Each device divides by its own count; then eight means are added."),
    (lambda *a: jax.lax.pmean(masked(*a) / a[3].sum(), "fsdp"),
     "A mean of means: a row counts more on a device with few valid rows."),
    (lambda *a: masked(*a) / B, "Padding is not in the sum, but it is in the divisor."),
    (lambda w, x, y, m: share(w, x, y), "Padding counts like any row here."),
    (lambda w, x, y, m: squares_of(w, x, y).sum() / F / psum(m.sum()),
     "Padding is not in the divisor, but it is in the sum."),
    (masked, "That is a sum. Over how many rows is the mean?"),
    (lambda *a: F * masked(*a) / psum(a[3].sum()), "F times too big: a row has F."),
    (lambda *a: jax.lax.pmean(masked(*a) / psum(a[3].sum()), "fsdp"),
     "n times too small: the shares already add up to the mean."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_loss(answer):
    def run(loss):
        def gradient(devices):
            small = sharding.make_mesh(f"fsdp={devices}")
            program = on_mesh(grad(loss), (whole, rows, rows, rows), whole, small)
            return program(w_DF, x_BD, y_BF, MASKS[devices])

        return gradient

    answer_of = lambda *args: lesson.answered(answer)(*args)
    hints = [(run(loss), hint) for loss, hint in MASK_HINTS]
    right = lambda devices: grad(one_loss)(w_DF, MASKS[devices])
    done = "Right on 4 and 8 devices: each row counts once, on any device."
    line = lesson.diagnose(run(answer_of), [(4,), (8,)], right, hints, done)
    if line.startswith("Not yet: it"):
        got = run(answer_of)(8)
        line = f"Not yet. On 8 devices the gradient is {lesson.ratio(got, right(8))}."
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
# Add the *count* over all devices before you divide, and leave the sum of the shares to `jax.grad`. A `psum`
# of the loss does no harm, because its backward pass does nothing. Trainers had the mean of means as a bug
# for years in another place, over microbatches of unequal length ([transformers
# 34191](https://github.com/huggingface/transformers/pull/34191)).
# </details>

# %% tags=["remove-cell"]
mask_right = lambda *a: masked(*a) / psum(a[3].sum())
for right_one in (mask_right, lambda *a: psum(mask_right(*a))):
    assert check_loss(right_one).startswith("Right on 4")
for wrong, hint in MASK_HINTS:
    assert check_loss(wrong) == hint, hint
assert check_loss(lambda *a: psum(psum(mask_right(*a)))).endswith("is 8 times too big.")
for nothing in (masked_loss, None, ...):
    assert check_loss(nothing) == lesson.NOTHING

# %% [markdown]
# ## Exercise 2: the backward pass of two matmuls
#
# The mesh is now `tensor=4`, and all devices have the same rows. The first matrix is sharded by columns, the
# second by rows, f = F/n on each device: `h_Bf = x_BD @ w_Df`, then `y_BD = psum(h_Bf @ v_fD)`. Write the
# backward pass without `jax.grad`: from `d_y_BD`, which is the same on all devices, to the gradients of `x`,
# `w` and `v`.

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
    (with_sums(None), "d_x sums over f. Which devices have the rest?"),
    (with_sums(add, add, add), "Columns of one device's w were added to another's."),
    (with_sums(None, add, add), "You added the wrong ones. Which matmul sums over f?"),
    (with_sums(on_y=add), "All n times too big: every device already has all of d_y."),
    (with_sums(lambda x: jax.lax.pmean(x, "tensor")), "d_x is a mean, not a sum."),
]


# %% tags=["hide-input"]
def check_pair(answer):
    def run(function):
        def parts(devices):
            small = sharding.make_mesh(f"tensor={devices}")
            varying = lambda x: sharding.vary(jnp.asarray(x), "tensor")
            stack = lambda *args: [varying(x)[None] for x in function(*args)]
            found = on_mesh(stack, TENSOR_SPECS, P("tensor"), small)(*PAIR[devices])
            return dict(zip(("d_x", "d_w", "d_v"), found, strict=True))

        return parts

    def given(d_y, *args):
        parts = lesson.answered(answer)(d_y, *args)
        for name, got, like in zip("xwv", parts, args, strict=True):
            if jnp.shape(got) != like.shape:
                shapes = f"{jnp.shape(got)}, and {name} {like.shape}"
                raise ValueError(f"d_{name} is {shapes}")
        return parts

    return verdict_on_pair(run, given)


# %% tags=["hide-input"]
def right_pair(devices):
    d_x, d_w, d_v = parts_of(*PAIR[devices])
    columns, pieces = np.split(d_w, devices, axis=1), np.split(d_v, devices)
    whole = {"d_x": [d_x] * devices, "d_w": columns, "d_v": pieces}
    return {name: np.stack(parts) for name, parts in whole.items()}


def verdict_on_pair(run, given):
    hints = [(run(function), hint) for function, hint in PAIR_HINTS]
    done = "Right on 2 and 4 devices, with one sum."
    line = lesson.diagnose(run(given), [(2,), (4,)], right_pair, hints, done)
    if line.startswith("Not yet"):
        got, want = run(given)(4), right_pair(4)
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
# The rule of 01 holds in the backward pass: only a sum over a lower-case letter needs a collective. There is
# one `psum` forward and one `psum` backward, at the other end. These are g and f of Megatron-LM, which
# writes them by hand, and the subject of 04.
# </details>

# %% tags=["remove-cell"]
assert check_pair(with_sums()).startswith("Right on 2")
for wrong, hint in PAIR_HINTS:
    assert check_pair(wrong) == hint, hint
swap = lambda *args: with_sums()(*args)[:1] + with_sums()(*args)[:0:-1]
assert "d_w is (4, 6), and w (6, 4)" in check_pair(swap)
half = lambda *args: (lambda d_x, d_w, d_v: (d_x, d_w / 2, d_v))(*with_sums()(*args))
assert "d_x: equal; d_w: 1/2 of it; d_v: equal" in check_pair(half)
for nothing in (pair_backward, lambda *args: None, None):
    assert check_pair(nothing) == lesson.NOTHING

# %% [markdown]
# ## Exercise 3: gradient accumulation with one sum
#
# The rows come in Z = 4 microbatches, because they do not all fit into memory at once: `x_ZbD`, `y_ZbF`.
# Return the gradient of the sum of all shares (`share` divides by the rows of all microbatches). The loop
# below is right, but sends the gradient four times. Send it once.


# %% tags=["hide-input"]
Z = 4
MICRO = draw(Z, B // Z, D), draw(Z, B // Z, F)
MICRO_SPECS = (whole, P(None, "fsdp"), P(None, "fsdp"))


def loop(of_one, after=lambda d: d, start=lambda w: w):
    def accumulate(w, x, y):
        found = [of_one(start(w), x[m], y[m]) for m in range(Z)]
        return after(sum(found))

    return accumulate


DIVIDED = "Z times too small: share already divides by all rows."
EVERY_TIME, ONE_DEVICE = loop(grad(share)), loop(grad(share), start=vary)
MICRO_HINTS = [
    (ONE_DEVICE, "Each device has the gradient of its own rows. What adds them?"),
    (loop(grad(share), psum), "n times too big: jax.grad has added each."),
    (loop(grad(share), lambda d: d / Z), DIVIDED),
    (loop(grad(share), lambda d: psum(d) / Z, vary), DIVIDED),
    (loop(grad(share), lambda d: jax.lax.pmean(d, "fsdp"), vary),
     "n times too small: share already divides by all rows."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_once(answer):
    def on(function, devices):
        stacked = lambda *args: sharding.vary(function(*args), "fsdp")[None]
        small = sharding.make_mesh(f"fsdp={devices}")
        return on_mesh(stacked, MICRO_SPECS, rows, small)

    run = lambda function: lambda devices: on(function, devices)(w_DF, *MICRO)
    rows_of_all = [a.reshape(B, -1) for a in MICRO]
    right = lambda devices: np.stack([grad(share)(w_DF, *rows_of_all)] * devices)
    hints = [(run(function), hint) for function, hint in MICRO_HINTS]
    given = lambda *args: lesson.answered(answer)(*args)
    line = lesson.diagnose(run(given), [(4,), (8,)], right, hints, "Right")
    if line != "Right":
        return line
    small = sharding.make_mesh("fsdp=8")
    found = lesson.compiled(on(given, 8), small, w_DF, *MICRO)
    sent = found.total.wire_bytes
    if sent > 672:
        line = f"The right gradient, for {sent:,.0f} bytes per device; 672 do."
        return line + " What is added inside of the loop?"
    return f"Right, for {sent:,.0f} bytes per device: one sum for all microbatches."


# %%
def accumulate(w_DF, x_ZbD, y_ZbF):
    total_DF = 0
    for x_bD, y_bF in zip(x_ZbD, y_ZbF, strict=True):
        total_DF += jax.grad(share)(w_DF, x_bD, y_bF)
    return total_DF


def accumulate_once(w_DF, x_ZbD, y_ZbF):
    return ...


print(check_once(accumulate))
print(check_once(accumulate_once))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# w_DF = jax.lax.pcast(w_DF, "fsdp", to="varying")  # from here on one copy per device
# total_DF = 0
# for x_bD, y_bF in zip(x_ZbD, y_ZbF, strict=True):
#     total_DF += jax.grad(share)(w_DF, x_bD, y_bF)
# return jax.lax.psum(total_DF, "fsdp")
# ```
#
# If you write the `pcast` yourself, before the loop, you also write the sum yourself, after it. In PyTorch
# this is DDP's `no_sync()`.
# </details>

# %% tags=["remove-cell"]
once = loop(grad(share), psum, vary)
assert check_once(once).startswith("Right, for 672 bytes")
assert "2,688 bytes per device; 672 do" in check_once(EVERY_TIME)
assert check_once(accumulate) == check_once(EVERY_TIME)
for wrong, hint in MICRO_HINTS:
    assert check_once(wrong) == hint, hint
for nothing in (accumulate_once, None, ...):
    assert check_once(nothing) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# This program fits least squares with a penalty on large weights. It runs on any number of devices, the
# check is on, and the error falls on every mesh. Two colleagues compare results.

# %%
RATE, PENALTY = 1.0, 0.02


def train(devices, steps=40):
    """Minimize the mean squared error of all rows, plus PENALTY * |w|^2."""

    def objective(w_DF, x_bD, y_bF):
        return share(w_DF, x_bD, y_bF) + PENALTY * jnp.sum(w_DF**2)

    def step(w_DF, x_bD, y_bF):
        return w_DF - RATE * jax.grad(objective)(w_DF, x_bD, y_bF)

    program = on_mesh(step, SPECS, P(), sharding.make_mesh(f"fsdp={devices}"))
    w_DF = np.zeros((D, F), np.float32)
    for _ in range(steps):
        w_DF = program(w_DF, x_BD, y_BF)
    return w_DF


# %%
for devices in (1, 2, 4, 8):
    error = [float(share(train(devices, steps), x_BD, y_BF)) for steps in (1, 5, 40)]
    text = ", ".join(f"{e:.4f}" for e in error)
    print(f"{devices} devices: error {text} after 1, 5, 40 steps")

# %% [markdown]
# Same data, same start, no randomness. "Float32 adds in a different order", says one. "That is the seventh
# digit", says the other. Fix `train`, so that the number of devices does not matter.


# %% tags=["hide-input"]
def on_one(penalty=PENALTY, rate=RATE, steps=40, rows=B):
    """The same training without a mesh."""
    error = lambda w: share(w, x_BD[:rows], y_BF[:rows])
    objective = lambda w: error(w) + penalty * jnp.sum(w**2)
    step, w_DF = jax.jit(lambda w: w - rate * grad(objective)(w)), jnp.zeros((D, F))
    for _ in range(steps):
        w_DF = step(w_DF)
    return w_DF


# %% tags=["hide-input"]
MEND_HINTS = [
    (
        lambda n: on_one(n * PENALTY),
        "The weights are the same as before your change.",
    ),
    (lambda n: on_one(0.0), "Now there is no penalty."),
    (lambda n: on_one(PENALTY / 2), "Half a penalty: what is the derivative of w**2?"),
    (lambda n: on_one(n * PENALTY, RATE / n), "Shorter steps, same wrong optimum."),
    (
        lambda n: on_one(n * PENALTY, n * RATE),
        "Steps n times as long, to the same wrong optimum: you summed twice.",
    ),
    (
        lambda n: on_one(PENALTY, n * RATE),
        "The ratio of error and penalty is right; the steps are n times too long.",
    ),
    (lambda n: on_one(PENALTY / n), "Now the penalty is n times too small."),
    (lambda n: on_one(rows=B // n), "Only one device's rows: what adds?"),
]


# %% tags=["hide-input"]
def check_mend(train):
    meshes = [(2,), (4,), (8,)]
    done = "Fixed: on 2, 4 and 8 devices the weights equal one device's."
    return lesson.diagnose(train, meshes, lambda n: on_one(), MEND_HINTS, done)


# %% tags=["hide-output"]
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The penalty is an invariant number, added to a varying one. It thus becomes part of *every* device's
# objective, and the sum over devices, which is right for the shares of the error, counts the penalty n
# times. Add it after the sum, where there is one value:
#
# ```python
# return psum(share(w_DF, x_bD, y_bF)) + PENALTY * jnp.sum(w_DF**2)
# ```
#
# (Or divide it by n, the size of the mesh axis.) The check raised no error, because every type was right.
#
# The balance loss of Qwen3-MoE's router had this bug in a widely used trainer. To undo an average over
# processes, the trainer multiplied the whole loss by their number. That was right for the token loss, but
# not for the balance loss, whose weight grew with every GPU ([transformers
# 48690](https://github.com/huggingface/transformers/issues/48690)). Elsewhere a user saw the balance loss
# rise with the number of pipeline stages, 0.1005, 0.1007 and 0.1013 on 1, 2 and 4 stages, and blamed
# precision ([megablocks 85](https://github.com/databricks/megablocks/issues/85)). `model.loss` adds its
# balance loss after the sums.
# </details>


# %% tags=["remove-cell"]
def mended(gradient_on, check=True):
    def train(devices, steps=40):
        step = lambda w, *xy: w - RATE * gradient_on(devices)(w, *xy)
        small = sharding.make_mesh(f"fsdp={devices}")
        program = on_mesh(step, SPECS, P(), small, check)
        w_DF = np.zeros((D, F), np.float32)
        for _ in range(steps):
            w_DF = program(w_DF, x_BD, y_BF)
        return w_DF

    return train


size = lambda w: PENALTY * jnp.sum(w**2)
before = lambda w, *xy: share(w, *xy) + size(w)
own_mean = lambda w, *xy: mean(w, *xy) + size(w)

# %% tags=["remove-cell"]
for right_one in (
    lambda n: grad(lambda w, *xy: total(w, *xy) + size(w)),
    lambda n: grad(lambda w, *xy: share(w, *xy) + size(w) / n),
    lambda n: lambda w, *xy: grad(share)(w, *xy) + 2 * PENALTY * w,
):
    assert check_mend(mended(right_one)).startswith("Fixed")
same, none, half, shorter, longer, long, small, one_device = (h for _, h in MEND_HINTS)
for wrong, hint in (
    (lambda n: grad(before), same),
    (lambda n: grad(lambda *args: psum(before(*args))), same),
    (lambda n: grad(share), none),
    (lambda n: lambda w, *xy: grad(share)(w, *xy) + PENALTY * w, half),
    (lambda n: lambda *args: grad(before)(*args) / n, shorter),
    (lambda n: grad(lambda w, *xy: total(w, *xy) / n + size(w)), shorter),
    (lambda n: lambda *args: psum(grad(before)(*args)), longer),
    (lambda n: grad(own_mean), long),
    (lambda n: grad(lambda w, *xy: total(w, *xy) + size(w) / n), small),
):
    assert check_mend(mended(wrong)) == hint, hint
assert check_mend(train) == same
assert check_mend(mended(lambda n: grad(before), check=False)) == one_device
for nothing in (lambda devices: ..., lambda devices: None, None):
    assert check_mend(nothing) == lesson.NOTHING

# %% [markdown]
# ## In one table
#
# The table counts the numbers that a device sends, with (n - 1)/n taken as 1. W is the number of weights,
# which is also the size of their gradient. In float32 a number has 4 bytes. The letters say what each device
# stores.
#
# | layout | forward | backward | numbers | PyTorch |
# |---|---|---|---|---|
# | `x_bD @ w_DF`, all of w everywhere | nothing | all-reduce of dw | 2 W | DDP |
# | `x_bD @ w_dF`, d rows each | all-gather of w | reduce-scatter of dw | W + W | `fully_shard` |
# | `x_BD @ w_Df`, f columns each | nothing | all-reduce of dx | 2 of x | `ColwiseParallel` |
# | `x_Bd @ w_dF`, then `psum` | all-reduce of y | nothing | 2 of y | `RowwiseParallel` |
#
# The all-reduce of dw is needed once per step and can overlap with the backward pass of earlier layers. The
# all-reduce of dx is on the critical path. The all-reduce of dw fits behind the backward pass from about
# 1,800 tokens per device and step on v4 (2x2x2), 1,900 on a node of 8 H100, and 2,300 on two nodes. With
# fewer tokens, accumulate.
#
# ## Three lines to keep
#
# 1. Using a shared value costs a sum in the backward pass: `pcast` and `psum` are each other's backward
#    pass, as are `all_gather` and `psum_scatter`, with the same bytes.
# 2. Before you sum a gradient, check its type: an invariant gradient has been summed.
# 3. DDP averages means; here we add shares. Add a term that all devices share after the sum.
#
# **Sources.** JAX: [Manual parallelism with
# shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html); [Efficient transposition of
# replication-inducing collectives](https://docs.jax.dev/en/latest/jep/17111-shmap-transpose.html). f and g:
# Megatron-LM, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3. PyTorch:
# [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
# The two halves of an all-reduce, in training: ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054),
# section 7.
