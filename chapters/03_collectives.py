# %% [markdown]
# # 03 · Six ways to exchange
#
# **Question.** A function runs on eight devices at once, each with its slice of the arrays. What does it
# compute, and what must the devices exchange so that it computes what one device would?
#
# **Why it hurts not to know.** Both usual mistakes return arrays of the right shape. One forgets a sum. The
# other makes one too many, because the backward pass holds sums that nobody has written.
#
# *Before this:* 00 to 02 (devices and meshes, tokens, the model). *Mesh:* `fsdp=8`, then
# `fsdp=2,tensor=4`, simulated. *Runs in* 40 s on 2 cores.

# %%
import utils

utils.simulate_devices(8)
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import model
import sharding
import sockets
from chapters import lesson
from sharding import FSDP, TENSOR, P

# %% [markdown]
# ## A function of one slice
#
# Sixteen numbers, to be divided by their sum. `jax.shard_map` runs a function on every device of a mesh, each
# with its own slice of the input. Here `FSDP`, the name of a mesh axis of n = 8 devices, cuts the dim B = 16
# into slices of b = B/n = 2: a capital is a whole dim, a small letter one device's share of it. (Our meshes
# have six axes. Those that are not named have size 1, and turn up in JAX's errors alone.)

# %%
n = 8
mesh = sharding.make_mesh(f"fsdp={n}")


def on_devices(function, in_specs, out_specs, mesh=mesh, check=True):
    """Compile a function of one device's slices."""
    specs = dict(in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


def shares(x_b):
    print("inside: ", x_b.shape)
    return x_b / jnp.sum(x_b)


got_B = on_devices(shares, P(FSDP), P(FSDP))(np.arange(1.0, 17.0))
print("outside:", got_B.shape, "sum of all shares:", float(got_B.sum()))

# %% [markdown]
# No error, the right shape, and a sum of 8 in place of 1. The function was traced once, as the one `print`
# shows, and all eight devices run it. `jnp.sum` adds the two numbers it can see. Each device has divided its
# own pair by the pair's own sum.
#
# Each has a *partial sum* (00), and nobody has added them. Nothing inside `shard_map` sends a message unless
# it is written. `psum` adds along a mesh axis:


# %%
def shares(x_b):
    return x_b / sharding.psum(jnp.sum(x_b), FSDP)


got_B = on_devices(shares, P(FSDP), P(FSDP))(np.arange(1.0, 17.0))
print(f"sum of all shares: {float(got_B.sum()):.6f}")

# %% [markdown]
# ## Specs cut, and glue
#
# A spec says which devices hold which piece of an array (00). `in_specs` cuts so, and the function sees its
# device's piece. Of an array of shape (16, 24), traced and not run, on 4 x 2 devices:

# %%
grid = sharding.make_mesh("fsdp=4,tensor=2")
for spec in P(FSDP), P(None, TENSOR), P(FSDP, TENSOR), P((FSDP, TENSOR)), P():

    def look(x, spec=spec):
        print(f"{spec!s:22} sees {x.shape}")
        return x

    jax.eval_shape(on_devices(look, spec, spec, grid), np.zeros((16, 24)))

# %% [markdown]
# `out_specs` does the reverse: it says how to **glue** what the devices return. An axis that it does not name
# is a promise: the devices along it return equal pieces, and one of them is kept. If eight devices return the
# same array, `P()` gives it once, and `P(FSDP)` gives eight copies, end to end.
#
# Below, four devices get two rows each and return what they got. Only the glue differs:


# %% mystnb={"image": {"alt": "Eight rows of numbers; beside them the same pairs of rows, side by side."}}
def numbers(axes, x, title):
    for (i, j), value in np.ndenumerate(x):
        colour = lesson.DEVICES[int(value) // 8]  # of the device that had it
        axes.add_patch(plt.Rectangle((j, -i), 1, 1, color=colour, alpha=0.5, lw=0))
        axes.text(j + 0.5, 0.5 - i, int(value), size=9, ha="center", va="center")
    axes.set(xlim=(0, x.shape[1]), ylim=(1 - len(x), 1), aspect="equal")
    axes.set_title(title, size=10)
    axes.set_axis_off()


x_BD, four = np.arange(32.0).reshape(8, 4), sharding.make_mesh("fsdp=4")
figure, panels = plt.subplots(1, 2, figsize=(6.5, 2.7), width_ratios=(4, 16))
for axes, spec in zip(panels, (P(FSDP), P(None, FSDP)), strict=True):
    glued = on_devices(lambda x_bD: x_bD, P(FSDP), spec, four)(x_BD)
    numbers(axes, glued, f"glued by {spec}:\n{glued.shape}")
title = "Glue along another dim, and it is another array (a colour is a device)"
figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# Glue moves no number between devices. (Cutting may: an array that lies otherwise is brought into place
# first.) To get the *same* array, cut along its columns, devices have to exchange some (exercise 1).
#
# ## Six ways to exchange
#
# The names are those of `sharding.py`, thin covers of `jax.lax` with a price in each docstring. Here all six
# work along dim 0.

# %%
gather = lambda x: sharding.all_gather(x, FSDP, dim=0)
scatter = lambda x: sharding.reduce_scatter(x, FSDP, dim=0)
psum = lambda x: sharding.psum(x, FSDP)
vary = lambda x: sharding.vary(x, FSDP)
exchange = lambda x: sharding.all_to_all(x, FSDP, split_dim=0, join_dim=0)
shift = lambda x: sharding.shift(x, FSDP)
SIX = {  # the function, in_specs, out_specs
    "all_gather": (gather, P(FSDP), P(FSDP)),
    "reduce_scatter": (scatter, P(FSDP), P(FSDP)),
    "psum": (psum, P(FSDP), P()),
    "vary": (vary, P(), P(FSDP)),
    "all_to_all": (exchange, P(FSDP), P(FSDP)),
    "shift": (shift, P(FSDP), P(FSDP)),
}

# %% [markdown]
# To see where every number goes, mark it: slot j of device i (of 4) holds one bit, 2^(4i + j), so that a sum
# still says what went into it. The picture is read off the results: a digit is the slot j, a colour the
# device i, and grey is a value that all devices have.


# %% tags=["hide-input"]
def run_marked(name, devices=4):
    """Marks before and after one of the SIX: [column, slot]. P(): one column."""
    function, before, after = SIX[name]
    slots = 1 if name in ("all_gather", "shift") else devices
    i, j = np.indices((devices, slots))
    marks = 1 << (devices * i + (i if slots == 1 else j))
    if before == P():
        marks = 1 << (devices**2 + j[:1])  # nobody's own: the same on all devices
    small = sharding.make_mesh(f"fsdp={devices}")
    got = on_devices(function, before, after, small)(np.int32(marks.reshape(-1)))
    columns = lambda x, spec: np.reshape(x, (1 if spec == P() else devices, -1))
    return columns(marks, before), columns(got, after)


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


# %% mystnb={"image": {"alt": "Six panels: numbers on four devices, before and after each collective."}}
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
# - `sharding.all_gather`: everyone gets all slices.
# - `sharding.reduce_scatter`: everyone's arrays are added, and each device keeps one slice of the sum.
# - `sharding.psum`, the *all-reduce* of 00: added, and everyone gets all of the sum.
# - `sharding.vary` sends nothing: what every device has already, each now treats as its own.
# - `sharding.all_to_all`: device i sends its slot j to device j. The dim `split_dim` is cut into slots, and
#   what arrives is joined along `join_dim`. They need not be the same.
# - `sharding.shift`: each sends to the next, the last to the first.
#
# **Letters tell which one is owed.** Sum over a small letter, and a partial sum is left: `psum` it, or
# `reduce_scatter` it where a slice of the sum will do. Have a small letter where a capital is needed:
# `all_gather`. Have the wrong letter small: `all_to_all`.
#
# Wide boxes are one value that all devices share; the others are one value each. The distinction is JAX's
# own. It looks like bookkeeping, and it will decide about gradients.
#
# ## What a device sends
#
# > **Predict.** x_BD is 128 x 3 float32, 1,536 bytes; each of 8 devices holds 16 of its rows. The devices
# > stand in a ring, and each can send only to the next one. How many bytes must a device send until all have
# > all of x_BD?
#
# The next cell builds a gather from nothing but `sharding.shift`. The ledger, our reader of compiled
# programs, lists what the compiler made of it: kind, mesh axes, payload, source line (a notebook's cell has a
# number for a file name), and in front how often a loop runs it.


# %%
def ring_all_gather(x_bD):
    n, i = sharding.axis_size(FSDP), sharding.axis_index(FSDP)

    def step(held_bD, _):
        arrived_bD = sharding.shift(held_bD, FSDP)
        return arrived_bD, arrived_bD  # pass on what came last, and keep it

    _, others = jax.lax.scan(step, x_bD, length=n - 1)
    held = jnp.concatenate([x_bD[None], others])  # [k]: from the device k places back
    return held[(i - jnp.arange(n)) % n].reshape(-1, x_bD.shape[1])


rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
x_BD = normal(128, 3)
ring = on_devices(ring_all_gather, P(FSDP), P(FSDP))
assert lesson.same(ring(x_BD), np.tile(x_BD, (n, 1)))  # eight copies, glued
found = lesson.compiled(ring, mesh, x_BD)
lesson.listed(found)

# %%
my_prediction = None  # bytes
counted = sum(int(one.count) * one.payload_bytes for one in found.collectives)
lesson.predicted("bytes a device sends", my_prediction, counted, "bytes")
assert counted == 1344

# %% [markdown]
# Seven slices of 192 bytes, (n - 1)/n of the whole. Less is not possible: every device lacks seven slices, so
# 8 x 7 slices arrive, and as many are sent. A reduce-scatter runs the same ring with sums (exercise 2). A
# psum, sums around the ring and then totals, is the two in a row: twice the price, and no exchange between
# devices sends less (Patarasuk and Yuan). With S bytes held by each device:
#
# | | each ends with | each sends |
# |---|---|---|
# | `all_gather` | n S | (n - 1) S |
# | `reduce_scatter` | S/n | (n - 1)/n S |
# | `psum` | S | 2 (n - 1)/n S |
# | `all_to_all` | S | (n - 1)/n S |
# | `shift` | S | S |
# | `vary` | S | 0 |

# %%
b = len(x_BD) // n
print("               payload  sends  the compiler's kind")
for name, (function, before, after) in SIX.items():
    held = x_BD[:b] if before == P() else x_BD  # S = 192 bytes on each device
    found = lesson.compiled(on_devices(function, before, after), mesh, held).collectives
    for x in found:
        print(f"{name:14} {x.payload_bytes:7,} {x.wire_bytes:6,}  {x.kind}")
    assert len(found) == (name != "vary")
print("vary                 -      -  none")

# %% [markdown]
# Kind and payload are the compiler's word (for a gather, the joined array). What it *sends* is the table's
# arithmetic: between simulated devices there is no wire to measure.
#
# ## One value, or one on each device?
#
# JAX records with every value inside `shard_map` along which mesh axes it is **varying**: one value a device.
# Along the others it is **invariant**: all devices share one value. The record is a part of the value's type,
# as its shape is, and `check_vma=True`, the default, keeps it ("varying manual axes").


# %%
def types(w_D, x_bD):
    shared = sharding.all_gather(x_bD, FSDP, dim=0, to="invarying")
    values = {
        "w_D, cut by P()": w_D,
        "x_bD, cut by P(FSDP)": x_bD,
        "w_D * x_bD": w_D * x_bD,
        "psum(x_bD)": psum(x_bD),
        "all_gather(x_bD)": gather(x_bD),
        "all_gather, to='invarying'": shared,
    }
    for name, value in values.items():
        print(f"{name:27} {sorted(jax.typeof(value).mat.varying)}")
    return x_bD


w_D = np.ones(3, np.float32)
print(f"{'value':27} varies along")
_ = jax.eval_shape(on_devices(types, (P(), P(FSDP)), P(FSDP)), w_D, x_BD)

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


print(refused(on_devices(jnp.sum, P(FSDP), P()), x_BD))
unsafe = on_devices(jnp.sum, P(FSDP), P(), check=False)  # the record is off
print(f"check off: {float(unsafe(x_BD)):.3f}; the sum is {x_BD.sum():.3f}")

# %% [markdown]
# Without the check we got one device's partial sum, passed off as everyone's.
#
# One line of the record is odd. After `all_gather` all devices hold equal numbers, and it says *varying*.
# Varying does not mean different. It means **counts once per device**. Why anyone would count equal numbers
# eight times shows on the way back.
#
# ## The way back
#
# A value that was used in eight places gets eight gradients, and they have to be added. A sum hands its one
# gradient to every addend. By these two rules each of the six has a backward pass, and it is an exchange too.
#
# How do we know that it is right? All six are linear, so the backward pass g of f has to be the transpose:
# f(x) · y = x · g(y) for all x and y, where the dot product runs over all devices, and an invariant value
# counts once. The cell tests this equation, and compiles both directions.


# %%
def backward(function):
    """The backward pass alone: gradient of the result in, gradient of x out."""
    return lambda x, dy: jax.vjp(function, x)[1](dy)[0]


print("                sends back by")
for name, (function, before, after) in SIX.items():
    x = x_BD[:b] if before == P() else x_BD
    there = on_devices(function, before, after)
    back = on_devices(backward(function), (before, after), before)
    dy = normal(*there(x).shape)
    assert abs(np.vdot(there(x), dy) - np.vdot(x, back(x, dy))) < 1e-3
    found = lesson.compiled(there, mesh, x), lesson.compiled(back, mesh, x, dy)
    sends, sends_back = (f"{one.total.wire_bytes:5.0f}" for one in found)
    kind = ", ".join(one.kind for one in found[1].collectives) or "none"
    print(f"{name:14}  {sends} {sends_back} {kind}")

# %% [markdown]
# After `all_gather` eight devices use every slice, so its eight gradients are added where the slice lives:
# a `reduce_scatter`. After `psum` there is one value, and its gradient is on all devices already: nothing is
# sent. The six are closed under differentiation, which is why it is these six: `all_gather` and
# `reduce_scatter` are each other's backward pass, so are `vary` and `psum`, and `all_to_all` and `shift` go
# the other way. (The pair `vary` and `psum` is f and g of Megatron-LM, written there by hand.)
#
# Our own ring obeys too. Nobody wrote a ring reduce-scatter; differentiate the ring all-gather, and there is
# one, with seven shifts the other way round:


# %%
def free_reduce_scatter(partial_BD):
    x_bD = partial_BD[: len(partial_BD) // n]  # its shape alone matters: all is linear
    return backward(ring_all_gather)(x_bD, partial_BD)


partial = normal(n * 128, 3)  # 128 rows on each device
free = on_devices(free_reduce_scatter, P(FSDP), P(FSDP))
assert lesson.same(free(partial), partial.reshape(n, 128, 3).sum(axis=0))
lesson.listed(lesson.compiled(free, mesh, partial))

# %% [markdown]
# Now the odd line. Weights lie in slices, are gathered, and meet each device's own rows. Either type of the
# gathered weights gives the right gradient:

# %%
B, D, F = 32, 16, 6
x_BD, y_BF, w_DF = normal(B, D), normal(B, F), normal(D, F)


def share(w_DF, x_bD, y_bF):
    """This device's share of the mean squared error of all B rows."""
    return jnp.sum((x_bD @ w_DF - y_bF) ** 2) / (B * F)


right = jax.grad(share)(w_DF, x_BD, y_BF)  # one device, all rows
for to in ("varying", "invarying"):

    def loss(w_dF, x_bD, y_bF, to=to):
        return share(sharding.all_gather(w_dF, FSDP, dim=0, to=to), x_bD, y_bF)

    program = on_devices(jax.grad(loss), (P(FSDP),) * 3, P(FSDP))
    print(f"{to}: gradient {lesson.ratio(program(w_DF, x_BD, y_BF), right)}")
    lesson.listed(lesson.compiled(program, mesh, w_DF, x_BD, y_BF))

# %% [markdown]
# As eight values, the gathered weights get eight gradients; adding and cutting them is one reduce-scatter. As
# one value they get one gradient, complete before it is cut: an all-reduce, at the line where they meet
# `x_bD` (the next section says whose). **The same numbers for twice the bytes, on account of a type.** So
# `varying` is the default, and `generate.py`, which has no backward pass, says `invarying`.
#
# ## Who adds the gradients?
#
# Take the same loss, with w_DF whole on every device (`P()`), and `jax.grad` inside `shard_map`. Every device
# has a share of the gradient; someone has to add. A colleague writes the sum:
# `sharding.psum(jax.grad(share)(w_DF, x_bD, y_bF), FSDP)`.
#
# > **Predict.** `check_vma` is on, as it is by default. How many times the right gradient is the result?

# %%
grad, rows = jax.grad, (P(), P(FSDP), P(FSDP))
colleague = on_devices(lambda *args: psum(grad(share)(*args)), rows, P())
my_prediction = None  # times the right gradient
times = float(np.vdot(colleague(w_DF, x_BD, y_BF), right) / np.vdot(right, right))
lesson.predicted("times the right gradient", my_prediction, round(times, 3))
assert abs(times - 8) < 1e-3

# %% [markdown]
# Someone else had added already. Without the colleague's sum, these are the lines about weights in what JAX
# traced (the braces hold the record):

# %%
traced = jax.make_jaxpr(on_devices(grad(share), rows, P()))(w_DF, x_BD, y_BF)
for line in str(traced).splitlines():
    if "f32[16,6]" in line and ("pvary" in line or "psum" in line):
        print(line.strip())

# %% [markdown]
# `w_DF` is one value and `x_bD` eight. To multiply them, JAX inserts `vary` (printed as `pvary`), and the
# backward pass of `vary` is `psum` (printed by its full name: its result is invariant). The gradient of an
# invariant value comes out summed. The colleague then adds eight equal totals.
#
# ## All the ways to write it
#
# "Why is my gradient N times too big?" These are the ways people write it, with the record on and off. `share`
# divides by all B rows, `total` is its `psum`, and `mean` divides by a device's own rows:

# %%
total = lambda *args: psum(share(*args))
mean = lambda w, x, y: jnp.mean((x @ w - y) ** 2)
own = lambda w, *args: grad(share)(vary(w), *args)
WAYS = {
    "grad(share)": grad(share),
    "psum(grad(share))": lambda *args: psum(grad(share)(*args)),
    "grad(total)": grad(total),
    "psum(grad(total))": lambda *args: psum(grad(total)(*args)),
    "pmean(grad(mean))": lambda *args: jax.lax.pmean(grad(mean)(*args), FSDP),
    "vary, grad(share)": own,
    "vary, grad(share), psum": lambda *args: psum(own(*args)),
}

# %%
for check in (True, False):
    print(f"check_vma={check}, and how many all-reduces")
    build = lambda way, check=check: on_devices(way, rows, P(), check=check)
    programs = {name: build(way) for name, way in WAYS.items()}
    programs["grad outside, of total"] = jax.jit(grad(build(total)))
    for name, program in programs.items():
        if refused(program, w_DF, x_BD, y_BF):
            print(f"  {name:23} refused")
            continue
        times = lesson.ratio(program(w_DF, x_BD, y_BF), right)
        found = lesson.compiled(program, mesh, w_DF, x_BD, y_BF).collectives
        print(f"{len(found)} {name:23} {times}")

# %% tags=["remove-cell"]
of_device_0 = grad(share)(w_DF, x_BD[: B // n], y_BF[: B // n])
for name, times in {"grad(share)": "equal", "grad(total)": "8 times too big"}.items():
    unchecked = on_devices(WAYS[name], rows, P(), check=False)(w_DF, x_BD, y_BF)
    assert lesson.ratio(unchecked, of_device_0) == times

# %% [markdown]
# ("Another direction" is one device's own gradient, or eight times it, passed off as everyone's.)
#
# - **With the record, `grad` has added.** Write no sum after it. Or say `vary` first, and write the sum
#   yourself. The type tells which: an invariant gradient is complete.
# - **Without it, JAX cannot know that a `psum` returned one value.** It counts eight, and the transpose from
#   eight to eight is a `psum` again. The loss's gradient of 1 becomes 8 before any weight is reached: that is
#   the one all-reduce of `grad(total)`. (JAX issue 3970 has asked since 2020 what it should be.)
# - **`pmean(grad(mean))` is the idiom of the days of `pmap`**, and right where the record is off. Carried
#   unchanged into `shard_map`, it is eight times too big. No error, and a loss that falls.
#
# The last line is right either way. There `out_specs=P()` says that the loss is one value, and JAX divides the
# 1 by 8 before it counts eight.
#
# ## What the compiler did
#
# > **Predict.** `sharding.psum` is called on three arrays, one after the other, then `sharding.all_gather` on
# > the same three. How many collectives does the compiled program have?

# %%
three = [np.ones((n * k, 4), np.float32) for k in (1, 2, 3)]
six_calls = lambda *arrays: ([*map(psum, arrays)], [*map(gather, arrays)])
found = lesson.compiled(on_devices(six_calls, P(FSDP), (P(), P(FSDP))), mesh, *three)
my_prediction = None  # collectives
lesson.predicted("collectives", my_prediction, len(found.collectives))
lesson.listed(found)
assert len(found.collectives) == 4

# %% [markdown]
# Three sums became one message of 16 + 32 + 48 = 96 bytes. XLA joins all-reduces, and this compiler, for CPU,
# leaves gathers alone. So a ledger need not have a line for each of yours. What the compiler does **not** do
# is find you a cheaper collective:

# %%
cut = lambda x: sharding.own_slice(x, FSDP, dim=0)  # this device's slice
ways = {"psum, then own_slice": lambda x: cut(psum(x)), "reduce_scatter": scatter}
for name, way in ways.items():
    print(f"{name}:")
    lesson.listed(lesson.compiled(on_devices(way, P(FSDP), P(FSDP)), mesh, partial))
print("own_slice of what all have:")
lesson.listed(lesson.compiled(on_devices(cut, P(), P(FSDP)), mesh, x_BD))
print("its backward pass:")
back = on_devices(backward(cut), (P(), P(FSDP)), P())
lesson.listed(lesson.compiled(back, mesh, x_BD, x_BD))
assert lesson.same(back(x_BD, x_BD), x_BD)  # the slices joined

# %% [markdown]
# `sharding.own_slice` undoes a gather for nothing: it is `vary` and a cut. Its backward pass could be an
# all-gather. By the rules it is a `psum` of slices padded with zeros to full size: twice the bytes, and seven
# numbers of eight are 0. `model.py` cuts only masks and integers with it, which have no gradient.
#
# Nor does the compiler check that all devices arrive. A collective waits for *all* devices of its group, so it
# may stand in a branch only if they all take it: the condition must not vary along the collective's axis.
# (Both branches return one type, hence `vary`.)


# %%
def in_branch(condition_axis):
    def function(x):
        add = lambda x: vary(psum(x))
        here = sharding.axis_index(condition_axis) == 0
        return jax.lax.cond(here, add, lambda x: x, x)

    return on_devices(function, P((FSDP, TENSOR)), P((FSDP, TENSOR)), grid)


x_8 = np.arange(8.0)  # a number a device; those with tensor = 0 hold 0, 2, 4, 6
print("tensor 0 adds over fsdp:", in_branch(TENSOR)(x_8))
lesson.listed(lesson.compiled(in_branch(FSDP), grid, x_8))  # compiled, never run

# %% [markdown]
# The second program, in which only fsdp 0 adds over fsdp, compiles without a word. Run it, and a minute later
# XLA ends the process: "Expected 4 threads to join the rendezvous, but only 1 of them arrived on time".
#
# ## In the model
#
# `model.embed` looks tokens up in a table whose vocabulary V is cut over the mesh axis `TENSOR` (v is a
# device's part). A device knows its own words alone, and its own tokens' words lie anywhere. What does it
# exchange?

# %%
lesson.source(model.local_vocabulary, model.embed, sharding.reduce_scatter)

# %% [markdown]
# Words of others give zeros, so a device's rows are a partial sum. (`inside_shard_map` rewords an error.)
# `sockets.on_mesh` runs such a function on whole arrays. Capital letters in its specs stay whole, small ones
# are cut: b, the sequences, over `FSDP`; v, and in the result the positions t, over `TENSOR`.

# %%
both = sharding.make_mesh("fsdp=2,tensor=4")
table_VD, wanted_BTD = normal(48, 10), normal(6, 12, 10)
tokens_BT = rng.integers(0, 48, size=(6, 12)).astype(np.int32)
embed = sockets.on_mesh(model.embed, both, "vD", "bs", out="btD")
assert np.array_equal(embed(table_VD, tokens_BT), table_VD[tokens_BT])

loss = lambda table, look_up: jnp.vdot(look_up(table, tokens_BT), wanted_BTD)
alone = grad(loss)(table_VD, lambda table, tokens: table[tokens])
program = jax.jit(grad(lambda table: loss(table, embed)))
print("gradient:", lesson.ratio(program(table_VD), alone))
print("forward:")
lesson.listed(lesson.compiled(embed, both, table_VD, tokens_BT))
print("backward:")
lesson.listed(lesson.compiled(program, both, table_VD))

# %% [markdown]
# Each row of the partial sum is zero on all devices but one, and the reduce-scatter adds them. It comes back
# as an all-gather of the same bytes. The second backward line is `vary`'s: the table is one value for two
# `FSDP` neighbours, who look up different sequences. Nobody wrote either line.
#
# ## What it costs, and when not to
#
# Divide one problem among more devices. A device's arithmetic is 1/n of it. What it sends in a gather is
# (n - 1)/n of the gathered array: nearly all of it, on 8 devices and on 800. The planner, for a model of 8
# billion parameters that lies in slices over `fsdp`, and the same 512 sequences a step, on TPU v4 (peak
# FLOP/s, full speed of the wires; no chip is touched). In bf16 the weights are 16 GB. A step gathers the
# layers twice, forward and backward, and scatters the gradients (chapter 04). As `fsdp` takes all chips here,
# the TPU's compiler makes an all-reduce of that, which counts twice: not quite four times 16.

# %%
from config import MeshConfig, preset
from plan import hardware, planner

print("chips  products    wires     sent")
for devices, shape in ((64, "4x4x4"), (128, "4x4x8"), (256, "4x8x8"), (512, "8x8x8")):
    settings = {"mesh": MeshConfig(fsdp=devices), "data.batch_size": 512}
    settings |= {"work.remat": "full", "work.gather": "layer"}
    plan = planner.plan(preset("llama3_8b", **settings), f"v4:{shape}")
    took = plan.seconds(alone=True)  # nothing beside anything else
    work, wires = took["compute"], took["fsdp"]
    sent = plan.wire_bytes / 1e9
    print(f"{devices:5} {work:7.2f} s {wires:6.2f} s {sent:5.1f} GB")
topology = hardware.Topology.parse("v4:4x4x4")
link = hardware.layout(MeshConfig(fsdp=64), topology)[FSDP]
one, all_six = hardware.CHIPS["v4"].link_bytes_per_s, link.bytes_per_s
print(f"a link: {one / 1e9:.0f} GB/s; a chip's six links: {all_six / 1e9:.0f} GB/s")
print(hardware.check(MeshConfig(fsdp=64), topology)[-1])

# %% [markdown]
# **More devices divide the work, not the message.** 61.2 GB at 270 GB/s are the 0.23 s, on any number of
# chips. (`all_to_all` and `shift` are the exceptions: what they send is a device's own array, and that
# shrinks.) The last line is the planner's warning of another compiler, the TPU's: where an axis takes all chips
# of a TPU (its *slice*), a `reduce_scatter` becomes an all-reduce. (`python -m plan --compile` asks it.)
# So:
#
# - Stop adding devices along an axis long before wires take as long as products. Another mesh axis may have a
#   smaller message (chapter 05).
# - Use `psum` only if every device needs the whole sum. One that keeps a slice pays half with
#   `reduce_scatter`.
# - Do not gather in order to cut again. That is `all_to_all`, at 1/n of the bytes. (Not at 1/n of the time:
#   on a ring most of its messages pass through devices in between, and it takes a quarter of the gather's
#   time, says the [scaling book](https://jax-ml.github.io/scaling-book/sharding).)
# - Count messages too. A hop takes about 1 us however little it carries (same source). In 1 us a link carries
#   45,000 bytes, so slices far below that pay for hops. Hence compilers join all-reduces.
#
# Simulated devices show kinds, payloads and counts: no time, no overlap with arithmetic, and no ways between
# devices.
#
# ## Exercise 1: from rows to columns
#
# A new x_BD, 128 x 24, lies in slices of rows. Return this device's slice of its columns, [B, D/n], with
# **one** collective. (The checkers stack what the devices return: (4, 128, 6) is 128 x 6 on each of 4.)


# %% tags=["hide-input"]
def program_of(answer, devices, in_specs):
    """The answer on a mesh, what the devices return stacked; and the mesh."""
    stacked = lambda *slices: jnp.asarray(lesson.answered(answer)(*slices))[None]
    small = sharding.make_mesh(f"fsdp={devices}")
    return on_devices(stacked, in_specs, P(FSDP), small), small


def run_answer(answer, devices, in_specs, *args):
    return program_of(answer, devices, in_specs)[0](*args)


def ledger_of(answer, devices, in_specs, *args):
    program, small = program_of(answer, devices, in_specs)
    return lesson.compiled(program, small, *args)


# %% tags=["hide-input"]
def to_all(split, join):
    return lambda x: sharding.all_to_all(x, FSDP, split_dim=split, join_dim=join)


own_columns = lambda x: sharding.own_slice(x, FSDP, dim=1)
added_columns = lambda x: sharding.reduce_scatter(x, FSDP, dim=1)
reshaped = lambda x: x.reshape(-1, x.shape[1] // sharding.axis_size(FSDP))
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
ROWS = P(FSDP), normal(128, 24)


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
# `return sharding.all_to_all(x_bD, FSDP, split_dim=1, join_dim=0)`: cut what is whole, join what is cut. On 8
# devices it sends 7/8 of a device's 1,536 bytes, 1,344. Gathering all rows and cutting the columns sends 7/8
# of all 12,288 bytes. A device lacks 7/8 of the slice it ends with, so nothing sends less.
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
# Every device has its own x_BD. Device i shall end with slice i of the rows of their sum. Use
# `sharding.shift` only, n - 1 times, one slice at a time (and not `jax.vjp`, this once).

# %% tags=["hide-input"]
OWN = {devices: normal(devices, 48, 3) for devices in (4, 8)}
run_ring = lambda f: lambda devices: run_answer(f, *ring_case(devices))
ring_case = lambda devices: (devices, P(FSDP), OWN[devices].reshape(-1, 3))
sum_of = lambda devices: OWN[devices].sum(axis=0).reshape(devices, -1, 3)
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
    found = np.array(run_answer(answer, n, P(FSDP), marks))[0].reshape(n, n)
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
    size = len(x_BD) // sharding.axis_size(FSDP)
    return jax.lax.dynamic_slice_in_dim(x_BD, k * size % len(x_BD), size)


def ring_reduce_scatter(x_BD):  # on device i = sharding.axis_index(FSDP)
    return ...


print(check_ring(ring_reduce_scatter))

# %% [markdown]
# <details><summary>Solution</summary>
#
# A sum that ends on device i after n - 1 steps began on device i + 1. So device i begins with slice i - 1,
# and at step k the sum for slice i - 1 - k passes by:
#
# ```python
# n, i = sharding.axis_size(FSDP), sharding.axis_index(FSDP)
# held_bD = rows_of(x_BD, i - 1)
# for k in range(1, n):
#     held_bD = sharding.shift(held_bD, FSDP) + rows_of(x_BD, i - 1 - k)
# return held_bD
# ```
#
# Begin with slice i, as one does at first, and device i ends with slice i + 1: right sums, wrong owners.
# </details>


# %% tags=["remove-cell"]
def around(start, step, more=0, by=1):
    def ring(x_BD):
        n, i = sharding.axis_size(FSDP), sharding.axis_index(FSDP)
        held_bD = rows_of(x_BD, i + start)
        for k in range(1, n + more):
            held_bD = sharding.shift(held_bD, FSDP, by)
            held_bD += rows_of(x_BD, i + start + k * step)
        return held_bD

    return ring


def passed_on(size):
    def ring(x_BD):
        i = sharding.axis_index(FSDP)
        held = total = x_BD if size == "whole" else rows_of(x_BD, i)
        for _ in range(sharding.axis_size(FSDP) - 1):
            held = shift(held)
            total += held
        return rows_of(total, i) if size == "whole" else total

    return ring


fro = lambda x: sharding.shift(shift(around(-1, -1)(x)), FSDP, -1)

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
# Both operands are cut along the dim that is summed away: x_Bd [B, D/n] and w_dF [D/n, F]. Wanted: this
# device's *rows* of x_BD @ w_DF, [B/n, F]. Send as little as you can, in both problems that the checker
# tries: B, D, F = 16, 64, 24 and 128, 16, 24. Shapes are known while tracing; your function may look at them.

# %% tags=["hide-input"]
PRODUCT_HINTS = [
    (lambda x, w: cut(x @ w), "Your rows of a partial sum. Who has the rest of it?"),
    (lambda x, w: psum(x @ w), "The whole sum, everywhere. Which rows are yours?"),
    (lambda x, w: psum(cut(x @ w)), "Cut, then added: whose rows were added to yours?"),
    (lambda x, w: x @ w, "A partial sum, of all rows. Two things are left to do."),
    (lambda x, w: scatter(psum(x @ w)), "n times too big: it was added twice."),
    (
        lambda x, w: sharding.reduce_scatter(x @ w, FSDP, dim=1),
        "Added, and your columns of it. Wanted are your rows.",
    ),
]
OPERAND_SPECS = (P(None, FSDP), P(FSDP))
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
        sent = ledger_of(answer, *case(size)).total.wire_bytes
        if sent > LEAST[size]:
            line = f"Right, for {sent:,.0f} bytes at {size}; {LEAST[size]:,} will do."
            return line + " Which of x, w and the result is small there?"
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
# (B, d), F, n = x_Bd.shape, w_dF.shape[1], sharding.axis_size(FSDP)
# if B * F <= B * d + n * d * F:
#     return sharding.reduce_scatter(x_Bd @ w_dF, FSDP, dim=0)
# x_bD = sharding.all_to_all(x_Bd, FSDP, split_dim=0, join_dim=1)
# return x_bD @ sharding.all_gather(w_dF, FSDP, dim=0)
# ```
#
# Move results, or move operands. Each side of the comparison, times 4 bytes and (n - 1)/n, is what one way
# sends. With many rows the weights are the smaller thing. Chapter 04 lives on the last line, chapter 05 on
# the third.
# </details>

# %% tags=["remove-cell"]
add_results = lambda x, w: scatter(x @ w)
move_operands = lambda x, w: to_all(0, 1)(x) @ gather(w)


def smaller(x_Bd, w_dF):
    (B, d), F, n = x_Bd.shape, w_dF.shape[1], sharding.axis_size(FSDP)
    results, operands = B * F, B * d + n * d * F
    return (add_results if results <= operands else move_operands)(x_Bd, w_dF)


assert check_product(smaller).startswith("Right, for 1,344 and 2,240")
assert "10,752 bytes at (128, 16, 24)" in check_product(add_results)
assert "5,824 bytes at (16, 64, 24)" in check_product(move_operands)
assert "2,688 bytes" in check_product(lambda x, w: cut(psum(x @ w)))
for wrong, hint in PRODUCT_HINTS:
    assert check_product(wrong) == hint
assert check_product(product) == lesson.NOTHING

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

    program = on_devices(step, rows, P(), sharding.make_mesh(f"fsdp={devices}"))
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
    (lambda n: on_one(n * PENALTY), "The weights are those of before, on every mesh."),
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
    (lambda n: on_one(rows=B // n), "One device's rows made these weights. Who adds?"),
]


def check_mend(train):
    meshes = [(2,), (4,), (8,)]
    done = "Mended: on 2, 4 and 8 devices the weights are those of one."
    return lesson.diagnose(train, meshes, lambda n: on_one(), MEND_HINTS, done)


# %%
print(check_mend(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The penalty is one invariant number, added to a varying one. So it becomes part of *every* device's
# objective, and the sum over devices, which is right for the shares of the error, counts it n times. Add it
# where there is one value, after the sum:
#
# ```python
# return sharding.psum(share(w_DF, x_bD, y_bF), FSDP) + PENALTY * jnp.sum(w_DF**2)
# ```
#
# (Or divide it by `sharding.axis_size(FSDP)`.) The check was silent, as every type was right, and so was the
# gradient of the error.
#
# The same happened to the balance loss of Qwen3-MoE's router in a widely used trainer. To make up for an
# average over processes, it multiplied the whole loss by their number. The loss of the tokens needed that.
# The balance loss did not, and its weight grew with every GPU
# ([transformers 48690](https://github.com/huggingface/transformers/issues/48690)). Elsewhere somebody saw a
# balance loss rise with the pipeline, 0.1005, 0.1007 and 0.1013 on 1, 2 and 4 stages, and put it down to
# precision ([megablocks 85](https://github.com/databricks/megablocks/issues/85)). `model.loss` adds its
# balance loss after the sums.
# </details>


# %% tags=["remove-cell"]
def mended(gradient_on, check=True):
    def train(devices, steps=40):
        step = lambda w, *xy: w - RATE * gradient_on(devices)(w, *xy)
        small = sharding.make_mesh(f"fsdp={devices}")
        program = on_devices(step, rows, P(), small, check)
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
same, none, half, shorter, longer, long, one_device = (hint for _, hint in MEND_HINTS)
for wrong, hint in (
    (lambda n: grad(before), same),
    (lambda n: grad(lambda *args: psum(before(*args))), same),
    (lambda n: grad(share), none),
    (lambda n: lambda w, *xy: grad(share)(w, *xy) + PENALTY * w, half),
    (lambda n: lambda *args: grad(before)(*args) / n, shorter),
    (lambda n: grad(lambda w, *xy: total(w, *xy) / n + size(w)), shorter),
    (lambda n: lambda *args: psum(grad(before)(*args)), longer),
    (lambda n: grad(own_mean), long),
):
    assert check_mend(mended(wrong)) == hint
assert check_mend(train) == same
assert check_mend(mended(lambda n: grad(before), check=False)) == one_device
for nothing in (lambda devices: ..., lambda devices: None, None):
    assert check_mend(nothing) == lesson.NOTHING

# %% [markdown]
# ## Three lines to keep
#
# 1. `shard_map` runs one function on slices; specs cut and glue; nothing moves unless a collective is
#    written, or a backward pass needs one.
# 2. Using a shared value is paid back as a sum: `vary` and `psum` are each other's backward pass, as
#    `all_gather` and `reduce_scatter` are, for the same bytes.
# 3. Before you sum a gradient, ask its type how many values there are; an invariant one has been summed.
#
# **Sources.** JAX: [Manual parallelism with
# shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html); [Efficient transposition of
# replication-inducing collectives](https://docs.jax.dev/en/latest/jep/17111-shmap-transpose.html);
# [issue 3970](https://github.com/jax-ml/jax/issues/3970). Scaling book: [Sharded
# matrices](https://jax-ml.github.io/scaling-book/sharding). Rings: Patarasuk and Yuan, [Bandwidth optimal
# all-reduce algorithms](https://doi.org/10.1016/j.jpdc.2008.09.002), 2009. f and g: Megatron-LM,
# [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3. The same two halves of an all-reduce, in
# training: ZeRO, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 7.
