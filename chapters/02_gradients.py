# %% [markdown]
# # 02 · Who adds? Gradients
#
# **Question.** Every device has a share of the loss, and so a share of the gradient. Who adds the shares, and
# has somebody added them already?
#
# **Why it hurts not to know.** Write one sum too many, and nothing complains. The gradient has the right
# shape, the loss falls, and the settings that work on four devices fail on eight.
#
# *Before this:* 01 (`shard_map`, the collectives). *Mesh:* `fsdp=8`, simulated. *Runs in* 40 s on 2 cores.
# *Reading takes* 25 minutes, with the exercises 90.

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
# ## One sum too many
#
# The smallest model that learns: rows `x_BD`, targets `y_BF`, one matrix `w_DF`, and the mean squared error
# of all B rows. `w` is whole on each of n = 8 devices, which has b = B/n of the rows. (A capital is a whole
# dim, a small letter a device's slice. This cell and two below are *the program by hand*: in an empty file
# they need only JAX and NumPy.)

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


def share(w_DF, x_bD, y_bF):  # what these rows add to the mean over all B rows
    return ((x_bD @ w_DF - y_bF) ** 2).sum() / (B * F)


# %% [markdown]
# Each device divides by the entries of *all* rows, so the mean is the sum of the eight shares, and its
# gradient the sum of eight gradients. A colleague writes what this says: take the gradient on each device,
# and add.
#
# > **Predict.** How many times the right gradient is the result?

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
# Somebody had added already, and eight equal totals were added again. Would one notice? The colleague's
# function trains on one, two, four and eight devices, everything else equal:

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
# On two devices and four, a sum too many looks like good news. With Adam next to nothing would show, because
# Adam divides a gradient by its own size; only clipping, and the gradient's norm that is printed, would be
# off.
#
# ## The gradient by hand
#
# So who added? First without `jax.grad`. The gradient of a product is a product: `d_w_DF = x_BD.T @ d_e_BF`,
# where `d_e` is the gradient of the errors. It sums over the rows. A device has b of them, so what it gets is
# a *partial sum* of the whole `d_w` (case 3 of 01). Here are all eight:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight small arrays of colours, all different, and a ninth, their sum, equal to the tenth, the gradient of one device."}}
own = lambda *args: jax.grad(share)(*args)[None]  # what each device would find alone
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
# What is owed depends on where `d_w` is needed. If every device keeps all of `w`, it is a `psum`. If each
# keeps d = D/n rows of `w` and gathers the others for the product, it needs d rows of the gradient, and a
# `psum_scatter` will do:


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
    "in slices, by hand": (by_hand_sliced, P("fsdp")),
    "in slices, jax.grad": (jax.grad(share_sliced), P("fsdp")),
}
one_device = jax.grad(share)(w_DF, x_BD, y_BF)
for name, (gradient, spec) in GRADIENTS.items():
    program = on_mesh(gradient, (spec, P("fsdp"), P("fsdp")), spec)
    d_w_DF = program(w_DF, x_BD, y_BF)
    assert np.allclose(d_w_DF, one_device, atol=1e-5), f"{name}: another gradient"
    print(f"{name}: the gradient of one device")

# %%
for name, (gradient, spec) in GRADIENTS.items():
    print(name)
    program = on_mesh(gradient, (spec, rows, rows), spec)
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# `jax.grad` has found both sums by itself: kind by kind and byte by byte the same exchanges, though no line
# of `share` asks for one. (Bytes and kinds are the compiled program's; what is *sent* is the ring's
# arithmetic of 01.) How does it know?
#
# ## One value, or one on each device?
#
# JAX records with every value inside `shard_map` along which mesh axes it is **varying**: one value a device.
# Along the others it is **invariant**: all devices share one value. The record is a part of the value's type,
# as its shape is, and `check_vma=True`, the default, keeps it ("varying manual axes").


# %%
def types(w_DF, x_bD):
    values = {
        "w_DF, cut by P()": w_DF,
        "x_bD, cut by P('fsdp')": x_bD,
        "x_bD @ w_DF": x_bD @ w_DF,
        "psum(x_bD)": psum(x_bD),
        "all_gather(x_bD)": jax.lax.all_gather(x_bD, "fsdp", tiled=True),
    }
    for name, value in values.items():
        print(f"{name:24} varies along {sorted(jax.typeof(value).mat.varying)}")
    return x_bD


_ = jax.eval_shape(on_mesh(types, (whole, rows), rows), w_DF, x_BD)

# %% [markdown]
# The record's first use is a check. `out_specs=P()` promises one value for all devices. A forgotten `psum`
# breaks the promise, and JAX names the axis:


# %%
def refused(function, *args):
    """The sentence of JAX's error that says why; None if there is no error."""
    try:
        function(*args)
    except ValueError as error:
        return str(error).split("\n\n")[2]


print(refused(on_mesh(share, SPECS, whole), w_DF, x_BD, y_BF))
unsafe = on_mesh(share, SPECS, whole, check=False)  # the record is off
print(f"check off: {float(unsafe(w_DF, x_BD, y_BF)):.3f}", end="; ")
print(f"the loss is {float(share(w_DF, x_BD, y_BF)):.3f}")

# %% [markdown]
# Without the check we got one device's share, passed off as everyone's.
#
# The second use is gradients. In `x_bD @ w_DF`, `w_DF` is one value and `x_bD` is eight. To make them alike,
# JAX inserts a `pcast`, which turns one value into eight equal ones and sends nothing. **A value that was
# used in eight places gets eight gradients, and they have to be added.** So the way back of that `pcast` is a
# `psum`. In what JAX has traced both can be seen (printed as `pvary` and `psum_invariant`; the braces hold
# the record):

# %%
traced = jax.make_jaxpr(on_mesh(jax.grad(share), SPECS, whole))(w_DF, x_BD, y_BF)
for line in str(traced).splitlines():
    if "f32[16,6]" in line and ("pvary" in line or "psum" in line):
        print(line.strip())

# %% [markdown]
# **The gradient of an invariant value comes out summed.** Varying does not mean different. It means *counts
# once per device*: that is why even the result of `all_gather`, where all hold equal numbers, is varying.
#
# On a mesh of several axes the same holds for each axis by itself. **A weight's gradient owes a sum along
# every axis that cuts the rows**, because the rows are what its product sums over on the way back. If the
# axis cuts the weight too, so that it was gathered, the sum is a `psum_scatter`; else a `psum`. Along an axis
# that cuts the columns of `w`, and no rows, nothing is owed (exercise 2). So on `data=2,fsdp=4`, where both
# axes cut the rows and `fsdp` cuts `w` too, a gradient is scattered over `fsdp`, and what is left of it is
# added over `data`.
#
# ## The way back of each collective
#
# A sum hands its one gradient to every addend; a value that was copied gets the sum of the copies' gradients.
# By these two rules each of the six has a way back.
#
# > **Predict.** A `psum` of 192 bytes on each of 8 devices sends 2 · 7/8 · 192 = 336. How many bytes does its
# > way back send?


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
SENDS = {}  # name: bytes forward, bytes back, kinds back
for name, (function, before, after) in SIX.items():
    x = draw(16, 3) if before == P() else draw(16 * n, 3)  # 192 bytes a device
    there = on_mesh(function, before, after)
    back = on_mesh(backward(function), (before, after), before)
    dy = draw(*there(x).shape)
    assert abs(np.vdot(there(x), dy) - np.vdot(x, back(x, dy))) < 1e-3
    found = lesson.compiled(there, mesh, x), lesson.compiled(back, mesh, x, dy)
    kinds = ", ".join(one.kind for one in found[1].collectives) or "none"
    SENDS[name] = *(int(one.total.wire_bytes) for one in found), kinds

# %%
my_prediction = None  # bytes
lesson.predicted("bytes the way back sends", my_prediction, SENDS["psum"][1], "bytes")
print("                sends  back  by")
for name, (sends, back, kinds) in SENDS.items():
    print(f"{name:14} {sends:6} {back:5}  {kinds}")

# %% tags=["remove-cell"]
assert SENDS["psum"][1] == 0 and SENDS["pcast"][1] == 336

# %% [markdown]
# Nothing, because what comes after a `psum` is one value, which all devices compute alike. So each of them
# has its gradient already, and hands it to its own addend. A `pcast` is the opposite: it sends nothing
# forward, since all have the value, and its way back must add what eight devices have made of it. After
# `all_gather` eight devices use each slice, so its eight gradients are added where the slice lives.
# **`all_gather` and `psum_scatter` are each other's way back; so are `pcast` and `psum`; `all_to_all` and
# `ppermute` go the other way.** No other collective is needed. The table is tested where it was made: all six
# are linear, so the way back g of f has to be its transpose, f(x) · y = x · g(y), where the dot product runs
# over all devices, and an invariant value counts once.
#
# A type can cost bytes. After `all_gather` one may say that the result is invariant, `to="invarying"`:

# %%
for to in ("varying", "invarying"):

    def loss(w_dF, x_bD, y_bF, to=to):
        w_DF = jax.lax.all_gather(w_dF, "fsdp", axis=0, tiled=True, to=to)
        return share(w_DF, x_bD, y_bF)

    program = on_mesh(jax.grad(loss), (rows, rows, rows), rows)
    print(f"{to}: {lesson.ratio(program(w_DF, x_BD, y_BF), right_DF)}")
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# Both give the right gradient. As eight values the gathered weights get eight gradients, added and cut by one
# reduce-scatter. As one value they get one gradient, whole before it is cut: an all-reduce, twice the bytes.
# So leave what you gather varying, unless there is no backward pass.
#
# ## All the ways to write it
#
# "Why is my gradient N times too big?" Here is what people write, with the record on and off. `share` divides
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
# ("Another direction" is one device's own gradient, or eight times it, passed off as everyone's.)
#
# - **With the record, `grad` has added.** Write no sum after it. Or say `pcast` first, and write the sum
#   yourself. The type tells which: an invariant gradient is complete.
# - **Without it, JAX cannot know that a `psum` returned one value.** It counts eight, and the transpose from
#   eight to eight is a `psum` again ([issue 3970](https://github.com/jax-ml/jax/issues/3970), since 2020).
# - **`pmean(grad(mean))` is how DDP does it**, and `pmap` did: each takes the mean of its own rows, and
#   gradients are *averaged*. **DDP averages, we add shares.** It is right where nothing else adds. Carried
#   unchanged into `shard_map`, it is eight times too big. And where devices have different numbers of rows
#   that count, a mean of means is another loss (exercise 1).
#
# ## Which mistake is it?
#
# The loss does not tell. So compare one gradient with that of one device, on the same rows and weights, at
# the first step, and look at how the two differ:
#
# - **n times too big**, with n the devices of an axis: somebody adds along that axis a second time. Look for
#   a `psum` after `jax.grad`, for a mean over a device's own rows in place of its share, or for a term of the
#   loss that is one value for all (the bug below).
# - **n times too small**: shares were added, and divided by n as well. That is the average of DDP, on shares.
# - **Another direction, and different on each device**: nobody adds. With the record on, JAX refuses it,
#   unless the gradient's `out_specs` say that it is cut.
# - **Nearly right, and the difference depends on the rows**: means of unequal numbers of rows were averaged
#   (exercise 1).
#
# Try it on two meshes, since on one of them a factor of 2 might be an axis of two devices or an honest
# derivative of a square. And compare each weight by itself: one that is cut differently can be wrong alone.
#
# ## What it costs
#
# The sum of the gradients of 8 billion weights, once a step, in bfloat16 (2 bytes). `plan/hardware.py` has
# what a device sends in a second; the backward pass takes 4 FLOPs for each weight and each token:

# %%
print("                all-reduce  reduce-scatter  tokens a device")
for name in ("v4:2x2x2", "h100:8", "h100:16"):
    topology = hardware.Topology.parse(name)
    devices, peak = topology.devices, topology.chip.peak_flops_per_s
    wires = hardware.layout(MeshConfig(fsdp=devices), topology)["fsdp"].bytes_per_s
    scattered = (devices - 1) / devices * 2 * 8e9 / wires
    tokens = 2 * scattered * peak / (4 * 8e9)
    print(f"{topology.chip.name:11} x {devices:2} {2e3 * scattered:6.0f} ms", end="")
    print(f" {1e3 * scattered:12.0f} ms {tokens:15,.0f}")

# %% [markdown]
# The last column says with how many tokens a device the backward pass takes as long as the all-reduce. With
# fewer, the wires are what one waits for, even if each layer's gradient is sent while the next is worked out.
# So devices that get few tokens add up over several microbatches first, and send once (exercise 3). Latency
# decides for gradients sent one small array at a time: below 0.4 MB (v4), 11 MB (a node of H100), 25 MB
# (two), as in 01. Hence compilers and DDP put small ones into one message.
#
# ## In `model.py`
#
# The project writes `sharding.vary` for `pcast`. Weights are invariant along axes on which they are whole,
# and are gathered as *varying* where they lie in slices. So no line adds a gradient, and `model.loss` returns
# shares that add up to the mean over all tokens.
#
# ## Exercise 1: rows that do not count
#
# Some rows are padding: `mask_b` is 1 for a row that counts, else 0, and devices have different numbers of
# them. Write a loss whose `jax.grad`, inside `shard_map`, is the gradient of the mean over all entries of
# rows that count.

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
     "A mean of means: a row counts for more where few others do."),
    (lambda *a: masked(*a) / B, "Padding is not in the sum, but it is in the divisor."),
    (lambda w, x, y, m: share(w, x, y), "Padding counts like any row here."),
    (lambda w, x, y, m: squares_of(w, x, y).sum() / F / psum(m.sum()),
     "Padding is not in the divisor, but it is in the sum."),
    (masked, "A sum. Over how many rows is the mean?"),
    (lambda *a: F * masked(*a) / psum(a[3].sum()), "F times too big: a row has F."),
    (lambda *a: jax.lax.pmean(masked(*a) / psum(a[3].sum()), "fsdp"),
     "n times too small: shares add up, and were divided by n as well."),
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
    done = "Right on 4 and 8 devices: a row is a row, wherever it lies."
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
# Add the *count* over all devices before you divide, and leave the shares to `jax.grad`. A `psum` of the loss
# does no harm, because the way back of a `psum` is nothing. The mean of means is a fault that trainers had
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
# ## Exercise 2: two products, backwards
#
# The mesh is now `tensor=4`, and all devices have the same rows. The first matrix is cut into columns, the
# second into rows, f = F/n on each: `h_Bf = x_BD @ w_Df`, then `y_BD = psum(h_Bf @ v_fD)`. Write the backward
# pass without `jax.grad`: from `d_y_BD`, the same on all devices, to the gradients of `x`, `w` and `v`.

# %% tags=["hide-input"]
TENSOR_SPECS = (P(), P(), P(None, "tensor"), P("tensor"))  # of d_y, x, w, v
add = lambda x: jax.lax.psum(x, "tensor")
PAIR = {k: (draw(5, 6), draw(5, 6), draw(6, 8), draw(8, 6)) for k in (2, 4)}


def parts_of(d_y, x, w, v):
    d_h = d_y @ v.T
    return d_h @ w.T, x.T @ d_h, (x @ w).T @ d_y


def with_sums(on_x=add, on_w=None, on_v=None, on_y=None):
    """The backward pass, with something done to its parts."""
    do = lambda f, x: f(x) if f else x

    def parts(d_y, *args):
        d_x, d_w, d_v = parts_of(do(on_y, d_y), *args)
        return do(on_x, d_x), do(on_w, d_w), do(on_v, d_v)

    return parts


PAIR_HINTS = [
    (with_sums(None), "d_x sums over f. Who has the rest of it?"),
    (with_sums(add, add, add), "Columns of one device's w were added to another's."),
    (with_sums(None, add, add), "The wrong ones are added. Which product sums over f?"),
    (with_sums(on_y=add), "All n times too big: d_y is whole on each device already."),
    (with_sums(lambda x: jax.lax.pmean(x, "tensor")), "d_x is a mean. Are its parts?"),
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
# d_x_BD = jax.lax.psum(d_h_Bf @ w_Df.T, "tensor")  # sums over f, a small letter
# return d_x_BD, x_BD.T @ d_h_Bf, (x_BD @ w_Df).T @ d_y_BD
# ```
#
# The rule of 01 holds on the way back: only a sum over a small letter owes something. Forward one `psum`,
# backward one `psum`, at the other end: these are g and f of Megatron-LM, written there by hand, and the
# subject of 04.
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
# ## Exercise 3: four microbatches, one sum
#
# Rows come in Z = 4 microbatches, since not all fit into memory at once: `x_ZbD`, `y_ZbF`. Return the
# gradient of the sum of all shares (`share` divides by the rows of all of them). The loop below is right, and
# sends the gradient four times. Send it once.


# %% tags=["hide-input"]
Z = 4
MICRO = draw(Z, B // Z, D), draw(Z, B // Z, F)
MICRO_SPECS = (whole, P(None, "fsdp"), P(None, "fsdp"))


def loop(of_one, after=lambda d: d, start=lambda w: w):
    def accumulate(w, x, y):
        found = [of_one(start(w), x[m], y[m]) for m in range(Z)]
        return after(sum(found))

    return accumulate


DIVIDED = "1/Z of it: share divides by all rows already."
EVERY_TIME, ONE_DEVICE = loop(grad(share)), loop(grad(share), start=vary)
MICRO_HINTS = [
    (ONE_DEVICE, "Each device has the gradient of its own rows. Who adds?"),
    (loop(grad(share), psum), "n times too big: each of these was added already."),
    (loop(grad(share), lambda d: d / Z), DIVIDED),
    (loop(grad(share), lambda d: psum(d) / Z, vary), DIVIDED),
    (loop(grad(share), lambda d: jax.lax.pmean(d, "fsdp"), vary),
     "1/n of it: share divides by all rows already."),
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
        line = f"The right gradient, for {sent:,.0f} bytes a device; 672 will do."
        return line + " What is added before the loop has ended?"
    return f"Right, for {sent:,.0f} bytes a device: one sum for all microbatches."


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
# w_DF = jax.lax.pcast(w_DF, "fsdp", to="varying")  # this device's own from here on
# total_DF = 0
# for x_bD, y_bF in zip(x_ZbD, y_ZbF, strict=True):
#     total_DF += jax.grad(share)(w_DF, x_bD, y_bF)
# return jax.lax.psum(total_DF, "fsdp")
# ```
#
# Make the copy yourself, before the loop, and the sum is yours too, after it. In PyTorch this is DDP's
# `no_sync()`.
# </details>

# %% tags=["remove-cell"]
once = loop(grad(share), psum, vary)
assert check_once(once).startswith("Right, for 672 bytes")
assert "2,688 bytes a device; 672 will do" in check_once(EVERY_TIME)
assert check_once(accumulate) == check_once(EVERY_TIME)
for wrong, hint in MICRO_HINTS:
    assert check_once(wrong) == hint, hint
for nothing in (accumulate_once, None, ...):
    assert check_once(nothing) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# Least squares, with a penalty on large weights. The function takes any number of devices, the check is on,
# and the error falls on every mesh. Two colleagues compare results.

# %%
RATE, PENALTY = 1.0, 0.02


def train(devices, steps=40):
    """Minimise the mean squared error of all rows, plus PENALTY * |w|^2."""

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
# Same data, same start, no randomness. "Float32 adds in another order", says one. "That is the seventh
# digit", says the other. Mend `train`, so that the number of devices does not matter.


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
        "The weights come out as they did before your change.",
    ),
    (lambda n: on_one(0.0), "Now there is no penalty."),
    (lambda n: on_one(PENALTY / 2), "Half a penalty: what is the derivative of w**2?"),
    (lambda n: on_one(n * PENALTY, RATE / n), "Shorter steps to the same wrong place."),
    (
        lambda n: on_one(n * PENALTY, n * RATE),
        "Steps n times as long, to the same wrong place: a sum was summed again.",
    ),
    (
        lambda n: on_one(PENALTY, n * RATE),
        "Error and penalty are in proportion, and the steps n times too long.",
    ),
    (lambda n: on_one(PENALTY / n), "Now the penalty is n times too small."),
    (lambda n: on_one(rows=B // n), "One device's rows made these weights. Who adds?"),
]


# %% tags=["hide-input"]
def check_mend(train):
    meshes = [(2,), (4,), (8,)]
    done = "Mended: on 2, 4 and 8 devices the weights are those of one."
    return lesson.diagnose(train, meshes, lambda n: on_one(), MEND_HINTS, done)


# %% tags=["hide-output"]
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The penalty is one invariant number, added to a varying one. So it becomes part of *every* device's
# objective, and the sum over devices, which is right for the shares of the error, counts it n times. Add it
# where there is one value, after the sum:
#
# ```python
# return psum(share(w_DF, x_bD, y_bF)) + PENALTY * jnp.sum(w_DF**2)
# ```
#
# (Or divide it by n, the size of this mesh's axis.) The check was silent, as every type was right.
#
# The same happened to the balance loss of Qwen3-MoE's router in a widely used trainer. To make up for an
# average over processes, it multiplied the whole loss by their number. The loss of the tokens needed that.
# The balance loss did not, and its weight grew with every GPU ([transformers
# 48690](https://github.com/huggingface/transformers/issues/48690)). Elsewhere somebody saw a balance loss
# rise with the pipeline, 0.1005, 0.1007 and 0.1013 on 1, 2 and 4 stages, and put it down to precision
# ([megablocks 85](https://github.com/databricks/megablocks/issues/85)). `model.loss` adds its balance loss
# after the sums.
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
    assert check_mend(mended(right_one)).startswith("Mended")
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
# Counted are the numbers that a device sends, with (n - 1)/n taken as 1: W for all weights, or for all of
# their gradient. In float32 a number has 4 bytes. Who holds what, the letters say.
#
# | layout | forward | backward | numbers | PyTorch |
# |---|---|---|---|---|
# | `x_bD @ w_DF`, w whole on all | nothing | all-reduce of dw | 2 W | DDP |
# | `x_bD @ w_dF`, d rows each | all-gather of w | reduce-scatter of dw | W + W | `fully_shard` |
# | `x_BD @ w_Df`, f columns each | nothing | all-reduce of dx | 2 of x | `ColwiseParallel` |
# | `x_Bd @ w_dF`, then `psum` | all-reduce of y | nothing | 2 of y | `RowwiseParallel` |
#
# The all-reduce of dw is needed once a step, and may travel while earlier layers' gradients are worked out;
# that of dx is on the critical path. When: the sum of dw can hide behind the backward pass from some 1,800
# tokens a device and step on v4 (2x2x2), 1,900 on a node of 8 H100, 2,300 on two; with fewer, accumulate.
#
# ## Three lines to keep
#
# 1. Using a shared value is paid back as a sum: `pcast` and `psum` are each other's way back, as `all_gather`
#    and `psum_scatter` are, for the same bytes.
# 2. Before you sum a gradient, ask its type how many values there are; an invariant one has been summed.
# 3. DDP averages means, we add shares; whatever is one value for all is added after the sum.
#
# **Sources.** JAX: [Manual parallelism with
# shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html); [Efficient transposition of
# replication-inducing collectives](https://docs.jax.dev/en/latest/jep/17111-shmap-transpose.html). f and g:
# Megatron-LM, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3. PyTorch:
# [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).
# The two halves of an all-reduce, in training: ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054),
# section 7.
