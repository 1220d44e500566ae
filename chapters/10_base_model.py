# %% [markdown]
# # 10 · The base model
#
# **Question.** Which model do all these pages cut up? Of its dims, which may be cut along which axis, what
# are its FLOPs and bytes made of, and how do I know that it is right before I cut it?
#
# **Why it hurts not to know.** A mesh is tested by "equal to one device". If the model on one device is
# wrong, every mesh agrees with it. The loss does not tell: of three models trained below, the lowest loss
# belongs to a broken one.
#
# *Before this:* 00 to 02 (a product's cost, collectives, who adds gradients), and 03 to 09, which cut this
# model. Who does not know it may read this page first. *Mesh:* `data=8`, at the end `data=2,fsdp=2,tensor=2`,
# simulated. *Runs in* 40 s on 2 cores; reading takes 35 minutes, and the exercises an hour.

# %%
from devices import simulate_devices

simulate_devices(8)

from functools import partial

import matplotlib.pyplot as plt
import optax

import config
import sharding
from chapters import lesson
from generate.cache import empty_cache
from plan import costs, hardware

# %% tags=["remove-cell"]
quick = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
import os

os.environ.setdefault("XLA_FLAGS", quick)  # programs this small: compile fast

# %% [markdown]
# ## A decoder, whole
#
# It fits into 45 lines, and can be pasted into an empty file. A name ends with its array's letters, and so
# says its shape: `draw` below reads it there. The letters are those of the whole guide:
#
# - B rows (sequences) of T tokens. V words, here the 256 bytes. D, the width of the *stream* `x_bTD`, which L
#   layers read and add to. Small b: the rows of one device.
# - H heads ask, each with a query of K numbers. G heads answer, with a key and a value; H/G queries share
#   each (*grouped-query attention*; where G = H, it is the plain one). S are the positions that are asked.
# - F, the width of the feed-forward.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np

size = dict(B=8, T=72, V=256, D=64, L=2, H=12, G=4, K=8, F=160)
B, T, V, D, L, H, G, K, F = size.values()
normal = np.random.default_rng(0).normal
shape = lambda name: [size[letter] for letter in name.split("_")[1]]
draw = lambda name, fan_in: np.float32(normal(size=shape(name)) / fan_in**0.5)
fan_in = {"query_DHK": D, "key_DGK": D, "value_DGK": D, "gate_DF": D, "up_DF": D}
fan_in |= {"out_HKD": H * K * 2 * L, "down_FD": F * 2 * L}
layers = [{name: draw(name, n) for name, n in fan_in.items()} for _ in range(L)]
w = {"table_VD": draw("table_VD", 1), "layers": layers, "head_DV": draw("head_DV", D)}

# %% [markdown]
# Each token is *normed* before attention and before the feed-forward: divided by its root mean square, so
# that the size of the stream does not matter. (Real models multiply by a learned gain as well.)
#
# *Rotary* tells attention where a token stands. It takes coordinates i and i + K/2 of a query or key as one
# complex number, and turns it by an angle in proportion to the position. In a score one such number meets the
# conjugate of the other, so their angles are subtracted: a score depends on the distance of two positions,
# and not on where they are.


# %% tags=["by-hand"]
norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def turn(x_bTHK, first=0):
    arc_Tk = np.outer(first + np.arange(T), 1e4 ** (-np.arange(K // 2) * 2 / K))
    z = jax.lax.complex(*jnp.split(x_bTHK, 2, -1)) * jnp.exp(1j * arc_Tk[None, :, None])
    return jnp.concatenate([z.real, z.imag], axis=-1)


def attention(w, x_bTD, turn, sees_TS):
    by = lambda name: jnp.einsum("bTD,DHK->bTHK", x_bTD, w[name])
    k_v = turn(by("key_DGK")), by("value_DGK")
    k_bSHK, v_bSHK = (jnp.repeat(x_bSGK, H // G, axis=2) for x_bSGK in k_v)
    score_bHTS = jnp.einsum("bTHK,bSHK->bHTS", turn(by("query_DHK")), k_bSHK) / K**0.5
    share_bHTS = jax.nn.softmax(jnp.where(sees_TS[None, None], score_bHTS, -jnp.inf))
    o_bTHK = jnp.einsum("bHTS,bSHK->bTHK", share_bHTS, v_bSHK)
    return jnp.einsum("bTHK,HKD->bTD", o_bTHK, w["out_HKD"])


# %% [markdown]
# The feed-forward is a *SwiGLU*: two products make F numbers each, one of them passes through
# silu(x) = x · sigmoid(x), and their product is brought back to D. The loss is cross-entropy in nats, summed
# over this device's tokens and divided by the count of all devices' tokens: a share of one mean, so shares
# add up (02).


# %% tags=["by-hand"]
CAUSAL_TS = np.tri(T) > 0


def logits(w, tokens_bT, turn=turn, sees_TS=CAUSAL_TS):
    x_bTD = w["table_VD"][tokens_bT]
    for one in w["layers"]:
        x_bTD += attention(one, norm(x_bTD), turn, sees_TS)
        gate_bTF, up_bTF = (norm(x_bTD) @ one[name] for name in ("gate_DF", "up_DF"))
        x_bTD += (jax.nn.silu(gate_bTF) * up_bTF) @ one["down_FD"]
    return norm(x_bTD) @ w["head_DV"]


def loss(w, row_bT, **other):  # a row has a token more, the last target
    log_p_bTV = jax.nn.log_softmax(logits(w, row_bT[:, :-1], **other))
    return -jnp.take_along_axis(log_p_bTV, row_bT[:, 1:, None], axis=-1).sum() / (B * T)


# %% tags=["by-hand"]
row_BT = np.fromfile(os.__file__, "uint8", B * (T + 1)).reshape(B, -1)
P, eight = jax.P, jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
added = lambda w, row_bT: jax.lax.psum(loss(w, row_bT), "data")
on_8 = jax.shard_map(added, mesh=eight, in_specs=(P(), P("data")), out_specs=P())
one, all_8 = (jax.jit(jax.value_and_grad(f))(w, row_BT) for f in (loss, on_8))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-5), one, all_8)
print("data=8: loss and gradients are those of one device")

# %% [markdown]
# ## Where it starts
#
# Each weight is drawn with variance 1/(the count of numbers that are added up where it is used): a product of
# numbers of variance 1 then has variance 1 again. What is added to the stream is made smaller by √(2L)
# besides, because 2L branches add to it.
#
# Random tokens cannot be guessed. On them an even guess over V words, ln V = 5.55 nats, is the best that any
# model can do.
#
# > **Predict.** What does this model score on random tokens before its first step, in nats?

# %%
my_prediction = None  # nats
random_BT = np.random.default_rng(1).integers(0, V, (B, T + 1))
untrained = float(loss(w, random_BT))
said = "untrained, on random tokens"
lesson.predicted(said, my_prediction, untrained, "nats", within=0.02)

# %% tags=["remove-cell"]
assert abs(untrained - np.log(V) - 0.5) < 0.1, "a size that is far off 1/2 above ln V"

# %% [markdown]
# Half a nat worse than an even guess. After the last norm the logits are random numbers of variance 1, and
# the mean of exp of such numbers is e^(1/2). So a healthy start is ln V + 1/2. A first loss well above that
# says that some weight was drawn too large. On a mesh the usual reason is that a device takes the width of
# its *slice*: `down_FD` adds up all F numbers, also where a device holds f = F/n of them.
#
# ## Three models, one right
#
# Now train it on the Python standard library of your machine (so your numbers differ a little), and two broken
# ones:
#
# - `leaky` lets a position see one further than itself. That one is its target.
# - `mixed` turns with a formula that was put together from two libraries. It pairs coordinate i with i + K/2,
#   but lists the angles as for pairs of neighbours: 0 0 1 1 2 2. So the two coordinates of a pair are turned
#   by different angles, which is no rotation.

# %%
from pathlib import Path

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def rows(number):
    """B rows of T + 1 bytes, other ones for every number."""
    first = np.random.default_rng(number).integers(0, len(text) - T - 1, (B, 1))
    return text[first + np.arange(T + 1)]


def mixed_turn(x_bTHK, first=0):
    arc_Tk = np.outer(first + np.arange(T), 1e4 ** (-np.arange(K // 2) * 2 / K))
    arc_T1K = jnp.float32(np.repeat(arc_Tk, 2, axis=-1))[:, None]
    a, b = jnp.split(x_bTHK, 2, axis=-1)
    other = jnp.concatenate([-b, a], axis=-1)
    return x_bTHK * jnp.cos(arc_T1K) + other * jnp.sin(arc_T1K)


# %%
STEPS, adam = 120, optax.adam(1e-2)


def stepper(**other):
    @jax.jit
    def step(w, moments, row_BT):
        value, grads = jax.value_and_grad(partial(loss, **other))(w, row_BT)
        change, moments = adam.update(grads, moments)
        return optax.apply_updates(w, change), moments, value

    return step


def train(step, w):
    moments, losses = adam.init(w), []
    for number in range(STEPS):
        w, moments, value = step(w, moments, rows(number))
        losses.append(float(value))
    return w, losses


# %%
leak = {"sees_TS": np.tri(T, k=1) > 0}
swaps = {"right": {}, "mixed": {"turn": mixed_turn}, "leaky": leak}
steps = {name: stepper(**swap) for name, swap in swaps.items()}
results = {name: train(step, w) for name, step in steps.items()}
trained, curves = ({name: pair[n] for name, pair in results.items()} for n in (0, 1))
end = {name: np.mean(losses[-20:]) for name, losses in curves.items()}
assert end["leaky"] < 0.5 * end["right"], "the leak has to show: more steps"
assert end["mixed"] < 1.1 * end["right"], "`mixed` no longer hides"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three loss curves over 120 steps: right and mixed nearly lie on each other at about two nats, leaky falls to nearly nothing."}}
figure, axes = plt.subplots(figsize=(5, 3.2))
looks = {"mixed": {"lw": 5, "alpha": 0.5}, "right": {"lw": 1}, "leaky": {"ls": "--"}}
for name, look in looks.items():
    colour = lesson.NEUTRAL if name == "mixed" else "black"
    label = f"{name}, {end[name]:.2f} in the last 20 steps"
    axes.plot(curves[name], color=colour, label=label, **look)
axes.axhline(np.log(V), color=lesson.NEUTRAL, lw=0.6)
axes.text(STEPS, np.log(V) + 0.1, "ln 256, an even guess", ha="right", size=9)
axes.set(title="The best curve cheats, and another fault hides")
axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, 6.4))
legend = axes.legend(loc="center right", bbox_to_anchor=(1, 0.62))

# %% [markdown]
# A loss is one number, and it rewards whatever makes it small. So ask the logits two questions instead:
#
# - **Future.** Change all tokens from some place on. No logit before that place may move.
# - **Shift.** Count positions from 500 instead of 0. Nothing may move, because scores depend on distances.

# %%
tokens_BT = rows(10**6)[:, :-1].astype(int)  # no model was trained on them
place = 50
other_BT = np.where(np.arange(T) < place, tokens_BT, (tokens_BT + 1) % V)
moved = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
print("moved, as a share of the largest logit:   future    shift")
for name, swap in swaps.items():
    read = partial(logits, trained[name])
    here_BTV = read(tokens_BT, **swap)
    shifted = swap | {"turn": partial(swap.get("turn", turn), first=500)}
    future = moved(read(other_BT, **swap)[:, :place], here_BTV[:, :place])
    shift = moved(read(tokens_BT, **shifted), here_BTV)
    print(f"{name:40} {future:8.0e} {shift:8.0e}")
    found = future > 1e-3, shift > 1e-3
    assert found == (name == "leaky", name == "mixed"), "a fault hides, or one is new"

# %% [markdown]
# Both faults are found and told apart. (The right one's shift is rounding.)
# `mixed` learns nearly as well, but it has positions 0 to 71 by heart, each with its own garbled angles, and
# says something else where a text begins elsewhere.
#
# Both are common. Four model classes of `transformers` let the future in from v5.9 on ([issue
# 48745](https://github.com/huggingface/transformers/issues/48745)). `mixed` stood in a course on building GPT
# ([issue 6](https://github.com/raiyanyahya/how-to-train-your-gpt/issues/6)).
#
# ## Exercise 1: where am I?
#
# Along the axis `context`, each of n devices holds t = T/n neighbouring positions of every row, and `turn` and
# the mask must know which. Return this device's t positions. (`jax.lax.axis_index("context")` is the device's
# number, `jax.lax.axis_size("context")` is n.) The checker joins keys and values, lets each device attend
# with its own queries, and compares with one device.

# %% tags=["hide-input"]
from functools import cache

from jax.sharding import AxisType

drawn = np.random.default_rng(3).normal(size=(3, T, K)).astype(np.float32)
on_context = lambda n: jax.make_mesh(
    (n,), ("context",), (AxisType.Auto,), devices=jax.devices()[:n]
)  # fmt: skip


def turned(x_tK, position_t):
    angle_tk = position_t[:, None] * np.float32(1e2 ** (-np.arange(K // 2) * 2 / K))
    z = jax.lax.complex(*jnp.split(x_tK, 2, -1)) * jnp.exp(1j * angle_tk)
    return jnp.concatenate([z.real, z.imag], axis=-1)


# %% tags=["hide-input"]
@cache
def attended(answer, n):
    """Attention of one head, positions cut over n devices."""
    join = lambda x: jax.lax.all_gather(x, "context", tiled=True)

    def local(q_tK, k_tK, v_tK):
        t = len(q_tK)
        position_t = jnp.asarray(lesson.answered(answer)(t))
        if position_t.shape != (t,):
            yours = position_t.shape
            raise ValueError(f"{t} positions are here, of {T}; your shape is {yours}")
        k_SK, v_SK, position_S = map(join, (turned(k_tK, position_t), v_tK, position_t))
        score_tS = turned(q_tK, position_t) @ k_SK.T
        sees_tS = position_t[:, None] >= position_S
        return jax.nn.softmax(jnp.where(sees_tS, score_tS, -jnp.inf)) @ v_SK

    cut = P("context")
    specs = dict(mesh=on_context(n), in_specs=(cut,) * 3, out_specs=cut)
    return np.asarray(jax.jit(jax.shard_map(local, **specs))(*drawn))


# %% tags=["hide-input"]
RIGHT = lambda t: here() * t + jnp.arange(t)
here = lambda: jax.lax.axis_index("context")
how_many = lambda: jax.lax.axis_size("context")
away = lambda x: jax.lax.pcast(x, "context", to="varying")
PLACES = [
    (lambda t: away(jnp.arange(t)),
     "Each device begins at 0, so it takes other devices' keys for its own past."),
    (lambda t: here() + jnp.arange(t),
     "Neighbours overlap in all positions but one. How many does a device hold?"),
    (lambda t: here() * how_many() + jnp.arange(t),
     "You move on by n a device. How many positions does a device hold?"),
    (lambda t: here() + how_many() * jnp.arange(t),
     "That deals positions out like cards. Here a device holds neighbours."),
    (lambda t: here() * t + jnp.arange(t)[::-1],
     "The right place, but each device counts backward."),
    (lambda t: (how_many() - 1 - here()) * t + jnp.arange(t),
     "The last device's positions come first. Whose are the earliest?"),
]  # fmt: skip


# %%
def positions(t):
    return ...


def check_positions(answer):
    run = lambda f: lambda n: attended(f, n)
    right = lambda n: attended(RIGHT, n)
    hints = [(run(wrong), hint) for wrong, hint in PLACES]
    done = "Right on 4 and 8 devices."
    return lesson.diagnose(run(answer), [(4,), (8,)], right, hints, done)


print(check_positions(positions))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jax.lax.axis_index("context") * t + jnp.arange(t)`. If you add 1 to all of them, the checker still
# says "Right", and it is: scores and mask depend on differences only. An error that all devices share
# changes nothing, and one that differs between devices does.
# </details>

# %% tags=["remove-cell"]
whole = drawn[0], drawn[1], drawn[2]
score_TS = turned(whole[0], np.arange(T)) @ turned(whole[1], np.arange(T)).T
by_one = jax.nn.softmax(jnp.where(np.tri(T) > 0, score_TS, -jnp.inf)) @ whole[2]
assert lesson.same(attended(RIGHT, 8), by_one, 1e-3)
assert "Right" in check_positions(RIGHT)
assert "Right" in check_positions(lambda t: 1 + here() * t + jnp.arange(t))
for wrong, hint in PLACES:
    assert check_positions(wrong) == hint, (hint, check_positions(wrong))
assert "positions are here" in check_positions(lambda t: away(jnp.arange(T)))
for nothing in (positions, ..., None):
    assert "Nothing there" in check_positions(nothing)

# %% [markdown]
# ## Which letters may be cut
#
# A dim may be cut for nothing where no sum runs over it. Where one does, each device has a *partial sum*, as
# large as the product's result, and devices must add these up (01). So the products' letters already tell the
# price. Llama 3 8B, a token at a time:

# %%
llama = dict(V=128_256, D=4096, L=32, H=32, G=8, K=128, F=14_336, T=8192, S=8192)
PRODUCTS = {
    "queries": "TD,DHK->THK", "keys": "TD,DGK->TGK", "values": "TD,DGK->TGK",
    "scores": "THK,SHK->HTS", "mixing": "HTS,SHK->THK", "out": "THK,HKD->TD",
    "gate": "TD,DF->TF", "up": "TD,DF->TF", "down": "TF,FD->TD",
}  # fmt: skip


def owed(letter):
    """Numbers of partial sums for each token in a layer, if this letter is cut."""
    total, where = 0, []
    for name, product in PRODUCTS.items():
        inputs, result = product.split("->")
        if letter in inputs and letter not in result:
            total += np.prod([llama[x] for x in result if x != "T"])
            where.append(name)
    return int(total), where


for letter in "HFDKTS":
    print(f"{letter}: {owed(letter)[0]:9,} numbers", *owed(letter)[1])
assert owed("T")[0] == 0 and owed("H") == (4096, ["out"])
assert owed("F")[0] == llama["D"] and owed("D")[0] == 8.5 * llama["D"]

# %% [markdown]
# From top to bottom:
#
# - **H and F** appear in one product and are summed away a few products later. Everything between stays on its
#   device, so attention and feed-forward owe one sum of D numbers each. This is `tensor` (04). G is cut with
#   H; with G = 8, more than 8 devices would need copies of keys.
# - **D** is summed in most products, so cutting it owes 8.5 times as many numbers as H. It is still cut, for
#   storage: `fsdp` keeps a slice of each *weight's* D, and joins the weight before it is used (03).
# - **K** is summed for each pair of positions, and nobody cuts it.
# - **T** is never summed. Where keys and values are asked it is called S, and there a sum runs. So `context`
#   (06) cuts T and moves keys and values, 2GK = 2,048 numbers a token.
#
# B meets nothing before the loss (`data`, `fsdp`), and L layers come one after the other (`stage`, 05).

# %% tags=["hide-input"] mystnb={"image": {"alt": "A token's arrays in a layer of Llama 3 8B as bars: the stream of width 4,096 in grey, and between its appearances, in red, queries, keys and values, mixed values, gate and up, each cut into eight parts along heads or hidden width."}}
stream = ("the stream", "D")
bars = [stream, ("queries", "HK"), ("keys, values", "GK 2"), ("mixed", "HK"),
        stream, ("gate, up", "F 2"), stream]  # fmt: skip
figure, axes = plt.subplots(figsize=(5, 3.4))
for y, (_, letters) in enumerate(bars):
    times = 2 if letters.endswith("2") else 1
    wide = int(np.prod([llama[x] for x in letters if x in llama])) * times
    is_cut = letters != "D"
    colour = lesson.COLOURS["tensor"] if is_cut else lesson.NEUTRAL
    axes.barh(y, wide, 0.55, color=colour)
    for part in range(1, 8 if is_cut else 1):
        axes.plot([wide * part / 8] * 2, [y - 0.28, y + 0.28], color="w", lw=1)
    label = f"{letters[:-2]} twice" if times == 2 else letters
    says = f"{label}, {wide:,}" + (": a sum is owed" if y in (4, 6) else "")
    axes.text(wide + 300, y, says, va="center", size=9)
axes.set(title="All that is red stays on its device of tensor=8")
axes.set(xlabel="numbers a token", xlim=(0, 42_000), xticks=[0, 10_000, 20_000, 30_000])
axes.set_yticks(range(7), [name for name, _ in bars])
axes.invert_yaxis()

# %% [markdown]
# In seconds: 8,192 tokens owe 8,192 · 4,096 bfloat16 numbers twice in a layer, forward. To add one of these
# arrays up over tensor=8, a device sends 2 · 7/8 of it:

# %%
owes = 8192 * llama["D"] * 2  # bytes
h100, v5p = hardware.CHIPS["h100"], hardware.CHIPS["v5p"]
nvlink = h100.link_bytes_per_s * hardware.NVLINK_MEASURED
ring = 2 * v5p.link_bytes_per_s  # one axis of the torus, both ways around
for chip, wire in ((h100, nvlink), (v5p, ring)):
    products = 8192 * 2 * 3 * llama["D"] * llama["F"] / 8 / chip.peak_flops_per_s
    sends = 2 * 7 / 8 * owes / wire
    print(f"{chip.name:11} {owes / 1e6:.0f} MB at {wire / 1e9:.0f} GB/s: "
          f"{sends * 1e3:.2f} ms; "
          f"the feed-forward's products: {products * 1e3:.2f} ms at peak")  # fmt: skip

# %% [markdown]
# On both chips the sum takes nearly as long as the products before it, which is why `tensor` gets the fastest
# wires. (This is arithmetic on what the makers print; simulated devices show no seconds. Latency, about 1 µs a
# hop, counts below some 50 kB: here for 6 tokens, as in decoding.)
#
# ## FLOPs, part by part
#
# An entry of a matrix meets each token once, in a multiplication and an addition. The way back takes two more
# products of that size, for the gradients of inputs and of weights. So P numbers in matrices cost 6P FLOPs a
# token (papers write 6N). But scores and mixing are products too, and no weight is in them. In Llama 3 8B:
#
# > **Predict.** From which T on do scores and mixing cost more than all matrices together? Count for each
# > token only the positions that it sees, on average half of T. (P is 7.5 billion, without the table.)

# %%
my_prediction = None  # tokens in a row
V_, D_, L_, H_, G_, K_, F_ = (llama[x] for x in "VDLHGKF")
in_attention = D_ * H_ * K_ * 2 + D_ * G_ * K_ * 2
matrices = {"attention": L_ * in_attention, "feed-forward": L_ * 3 * D_ * F_}
matrices["logits"] = D_ * V_
P_ = sum(matrices.values())
published = config.preset("llama3_8b")
# The planner's FLOPs of rows of this length, and its P, in which gains are.
length = lambda T: config.replace(published, **{"data.seq_len": T})
gains = (2 * L_ + 1) * D_
pairs = lambda T: costs.model_flops_per_token(length(T)) - 6 * (P_ + gains)
crossing = next(T for T in range(1024, 10**6, 1024) if pairs(T) > 6 * P_)
lesson.predicted("scores and mixing lead from", my_prediction, crossing, within=0.05)
for name, count in matrices.items():
    print(f"{name:13} {count / P_:6.1%} of 6P")
for T_ in (8192, 65_536, 524_288):
    print(f"T = {T_:7,}: scores and mixing add {pairs(T_) / (6 * P_):.0%} to 6P")
for chip in (h100, v5p):
    seconds = (6 * P_ + pairs(8192)) * 1e6 / chip.peak_flops_per_s
    print(f"a million tokens, T = 8,192, on one {chip.name}: {seconds:.0f} s at peak")

# %% [markdown]
# A pair costs 2K FLOPs as a score and 2K in mixing, for each of H heads and L layers, and three times that
# with the way back: 12LHK · T/2 for a token. That is 6P where T = P/(LHK).
#
# This matters for parallelism: FLOPs of weights are the same for each token, and those of pairs are not. Where
# 6P leads, equal numbers of tokens are equal work. Where pairs lead, a late token costs more than an early
# one, and devices that hold equal parts of a row wait for each other (06).
#
# ## Exercise 2: count them
#
# What does one training step of the program above cost a token? Return the FLOPs of its products, forward and
# backward. It masks after the product, so *all* T pairs of a token are multiplied. `table_VD` looks up, and
# multiplies nothing. The checker compiles the program at two sizes and counts.

# %% tags=["hide-input"]
SIZES = [dict(V=256, D=64, L=2, H=12, G=4, K=8, F=160, T=72),
         dict(V=96, D=48, L=1, H=6, G=3, K=12, F=200, T=40)]  # fmt: skip


@cache
def counted(case):
    """FLOPs a token of a step of the program by hand, compiled at these sizes."""
    kept = {name: globals()[name] for name in SIZES[0]}
    globals().update(SIZES[case])
    try:
        dims = SIZES[case]
        shape = lambda name: [dims[x] for x in name.split("_")[1]]
        like = lambda name: jax.ShapeDtypeStruct(shape(name), "float32")
        ws = {name: like(name) for name in ("table_VD", "head_DV")}
        ws["layers"] = [{name: like(name) for name in fan_in}] * L
        step = jax.value_and_grad(partial(loss, sees_TS=np.tri(T) > 0))
        row = jax.ShapeDtypeStruct((2, T + 1), "int32")
        return lesson.compiled(step, eight, ws, row).flops / (2 * T)
    finally:
        globals().update(kept)


# %% tags=["hide-input"]
def flops(times=3, tables=1, mix=2, heads="H", pairs=1.0, gates=3, head="G"):
    """An answer, right or wrong."""

    def count(V, D, L, H, G, K, F, T):
        of = {"G": G, "H": H}
        in_layer = 2 * D * H * K + 2 * D * of[head] * K + gates * D * F
        weights = L * in_layer + tables * V * D
        return times * (2 * weights + 2 * mix * pairs * L * of[heads] * K * T)

    return count


# %% tags=["hide-input"]
HALF = "Half of what pairs cost. Scores and mixing multiply, and masked pairs do too."
COUNTS = [
    (flops(times=1), "That is the way forward alone."),
    (flops(times=2), "The way back makes two gradients, of inputs and of weights."),
    (flops(mix=0), "All matrices are there. Which products have no weights?"),
    (flops(mix=0, tables=2), "6P, with a table that only looks up, and without pairs."),
    (flops(tables=2), "One table too many: which of the two multiplies?"),
    (flops(tables=0), "What makes logits?"),
    (flops(heads="G"), "Keys are shared. But how many heads ask?"),
    (flops(pairs=0.5), HALF),
    (flops(gates=2), "A SwiGLU has more matrices than that."),
    (flops(head="H"), "Do all H heads have a key and a value of their own?"),
    (lambda **c: flops()(**c) / 2, "A multiplication and an addition are two FLOPs."),
    (lambda **c: flops()(**c) * c["T"], "That is a whole row."),
]


# %%
def flops_a_token(V, D, L, H, G, K, F, T):
    return ...


def check_flops(answer):
    run = lambda f: lambda case: float(lesson.answered(f)(**SIZES[case]))
    hints = [(run(wrong), hint) for wrong, hint in COUNTS]
    done = "Right at both sizes, to the last FLOP."
    return lesson.diagnose(run(answer), [(0,), (1,)], counted, hints, done, 1e-6)


print(check_flops(flops_a_token))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# weights = L * (2 * D * H * K + 2 * D * G * K + 3 * D * F) + D * V
# return 6 * weights + 3 * L * H * 4 * K * T
# ```
#
# The planner counts half the pairs, as most kernels for attention skip blocks of positions that are masked.
# </details>

# %% tags=["remove-cell"]
assert "Right" in check_flops(flops())
for wrong, hint in COUNTS:
    assert check_flops(wrong) == hint, (hint, check_flops(wrong))
for nothing in (flops_a_token, ..., lambda **c: None):
    assert "Nothing there" in check_flops(nothing)

# %% [markdown]
# ## Logits that must not exist
#
# The last product makes V numbers of every token. For 8,192 tokens of Llama 3 8B on a device that is 8,192 ·
# 128,256 · 4 bytes = 4.2 GB in float32, and the way back needs more arrays of that size. Yet the loss wants
# two numbers of each token: the target's logit, and the logarithm of the sum of all exp(logit). Both can be
# had from u words at a time, because the log-sum-exp of all words is that of the slices' log-sum-exps.
# `jax.checkpoint` forgets a slice's logits, and makes them again on the way back.


# %%
def at_once(w_DV, x_ND, target_N):
    logits_NV = x_ND @ w_DV
    target_N1 = jnp.take_along_axis(logits_NV, target_N[:, None], axis=1)
    return jnp.sum(jax.nn.logsumexp(logits_NV, axis=1, keepdims=True) - target_N1)


def in_slices(w_DV, x_ND, target_N, pieces=16):
    @jax.checkpoint
    def sums(w_Du, words_u):
        logits_Nu = x_ND @ w_Du
        mine_Nu = words_u == target_N[:, None]
        return jax.nn.logsumexp(logits_Nu, axis=1), jnp.sum(logits_Nu * mine_Nu, axis=1)

    w_kDu = jnp.stack(jnp.split(w_DV, pieces, axis=1))
    words_ku = jnp.arange(w_DV.shape[1]).reshape(pieces, -1)
    log_sums_kN, targets_kN = jax.lax.map(lambda each: sums(*each), (w_kDu, words_ku))
    return jnp.sum(jax.nn.logsumexp(log_sums_kN, axis=0) - targets_kN.sum(axis=0))


# %% [markdown]
# > **Predict.** By what factor do the FLOPs of loss and gradients grow in slices?

# %%
my_prediction = None  # times
rng, tokens, words = np.random.default_rng(4), 512, 65_536
x_ND, w_DV = rng.normal(size=(tokens, D)), rng.normal(size=(D, words)) / D**0.5
given = np.float32(w_DV), np.float32(x_ND), rng.integers(0, words, tokens)
ways = [jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (at_once, in_slices)]
once, sliced = (lesson.compiled(way, eight, *given) for way in ways)
said = "FLOPs in slices"
lesson.predicted(said, my_prediction, sliced.flops / once.flops, "times", within=0.02)
assert once.flops == 6 * tokens * D * words, "at once: one product forward, two back"
assert lesson.same(*(way(*given) for way in ways)), "slices give another result"
wide = 4 * tokens * words
print(f"logits of {tokens} tokens: {wide / 1e6:.0f} MB")
for name, way in zip(("at once", "in 16 slices"), ways, strict=True):
    memory = way.lower(*given).compile().memory_analysis().temp_size_in_bytes
    print(f"{name:12} {memory / 1e6:4.0f} MB of temporaries: {memory / wide:.2f} times")

# %% [markdown]
# The logits are made twice: four products where there were three. What is left in memory is the table, cut
# up, and its gradient's slices (other compilers lay this out differently).
#
# Why words, and not chunks of tokens? A chunk of tokens touches every word, so its gradient is as large as the
# table, and no part of the sum is final before the last chunk. A slice of words has met all tokens, so its
# gradient is final at once. Where devices share the table (`fsdp`), it can travel to its owner while the next
# slice is computed. V may be cut along `tensor` in the same way (04).
#
# When not to: if the logits fit. On an H100 the fourth product of those 8,192 tokens takes 9 ms at peak, of a
# step of 430 ms; on a TPU v5p 19 ms of 920.

# %% tags=["remove-cell"]
for chip, product_ms, step_ms in ((h100, 9, 430), (v5p, 19, 920)):
    fourth = 2 * 8192 * D_ * V_ / chip.peak_flops_per_s * 1e3
    step = (6 * P_ + pairs(8192)) * 8192 / chip.peak_flops_per_s * 1e3
    assert round(fourth) == product_ms, fourth
    assert abs(step / step_ms - 1) < 0.02, step

# %% [markdown]
# ## Latents and experts, where they are met
#
# **Latent attention** (MLA) makes keys and values of all heads out of one narrow *latent* of C numbers a
# token. A second small key of R numbers, turned by rotary, is shared by all heads. While text is generated, a
# model keeps of each earlier token what attention needs of it: the *cache*. Llama 3 8B keeps a key and a
# value for G = 8 heads in 32 layers, 2 · 8 · 128 · 32 bfloat16 numbers or 131,072 bytes.
#
# > **Predict.** DeepSeek-V3 has 84 times as many parameters, 61 layers with H = 128 heads, C = 512 and
# > R = 64. How many bytes does it keep of a token, in bfloat16?

# %%
my_prediction = None  # bytes


def cache_bytes(c, devices=1):
    """What the first of some devices keeps of a token."""
    mesh = sharding.make_mesh(f"tensor={devices}")
    arrays = jax.tree.leaves(empty_cache(c, mesh, b=1, slots=1))
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


deepseek = config.preset("deepseek_v3").model
counted_bytes = cache_bytes(deepseek)
lesson.predicted("DeepSeek-V3 keeps of a token", my_prediction, counted_bytes, "bytes")
for n in (1, 8):
    both = (cache_bytes(c, n) for c in (published.model, deepseek))
    print(f"on each of tensor={n}: Llama {next(both):,}, DeepSeek {next(both):,}")

# %% tags=["remove-cell"]
assert counted_bytes == 61 * (512 + 64) * 2

# %% [markdown]
# C + R numbers a layer, whatever the number of heads: about half of what a model of 8 billion parameters
# keeps. But no letter of a latent is a head's. So `tensor` cannot cut it, and each of 8 devices keeps all of
# it, where Llama's eight key heads spread over eight devices.
#
# The two also differ in what a byte is read for. Each new token reads the whole cache once. A key of Llama
# meets the queries of H/G = 4 heads. A latent of DeepSeek meets the queries of all 128 heads as a key, and is
# weighed for all 128 once more as a value. So decoding with MLA can be bound by arithmetic, where with
# grouped queries it is bound by memory.
#
# **Experts** (07) replace the feed-forward by E smaller ones, of which each token passes through a few.
# Memory counts all of them, FLOPs only those: DeepSeek-V3 holds 671 billion parameters, and a token meets 37
# billion. A new letter, E, can be cut along the axis `expert`, and the tokens move to it.
#
# ## In `model.py`
#
# The project's model is the same function of one device's slices, with an exchange wherever this page says
# "owes". The two share nothing, so each can vouch for the other: the trained weights in slices over
# `data=2,fsdp=2,tensor=2`, against the program by hand.

# %% tags=["hide-input"]
import model
import pipeline

MODEL = {"vocab_size": V, "d_model": D, "n_layers": L, "n_heads": H, "n_kv_heads": G,
         "d_head": K, "d_ff": F, "attention": "gqa", "n_experts": 0, "dense_prefix": 0,
         "tie_embeddings": False}  # fmt: skip
settings = {f"model.{name}": value for name, value in MODEL.items()}
settings |= {"data.batch_size": B, "data.seq_len": T, "mesh": "data=2,fsdp=2,tensor=2"}
cfg = config.preset("laptop", **settings)
three_axes = sharding.make_mesh("data=2,fsdp=2,tensor=2")
positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
reads = {"tokens_BT": np.int32(tokens_BT), "positions_BT": positions_BT,
         "segments_BT": np.ones((B, T), np.int32)}  # fmt: skip


def theirs(ours):
    """Our weights by the names of `model.py`: layers are stacked, gains are 1."""
    top = {"embedding_VD": ours["table_VD"], "unembedding_DV": ours["head_DV"]}
    stack = lambda name: np.stack([layer[name] for layer in ours["layers"]])[:, None]
    stacked = {f"w_{name}": stack(name) for name in fan_in} | top
    gains = lambda d: np.ones(d.shape, np.float32)
    leaf = lambda name, d: stacked.get(name.split(".")[-1], gains(d))
    return sharding.map_named(leaf, model.declare(cfg.model))


# %% tags=["hide-input"]
by_hand = np.asarray(logits(trained["right"], tokens_BT))
placed = sharding.specs(model.declare(cfg.model))
place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(three_axes, spec))
sliced_weights = jax.tree.map(place, theirs(trained["right"]), placed)
by_model = np.asarray(pipeline.logits(cfg, three_axes)(sliced_weights, reads))
print(f"apart by {moved(by_model, by_hand):.0e} of the largest logit, on 3 axes")
assert moved(by_model, by_hand) < 1e-3, "the two models differ"

# %% [markdown]
# ## Exercise 3: write the test
#
# Design the test that finds a leak from the future. `logits_of(tokens_T)` gives `[T, V]`; position t may use
# `tokens_T[: t + 1]`. Return whether a model uses more. Yours is tried on five: the right model; `leaky`; one
# whose logits know the next token; one that looks ahead at a single position, as where the parts of two
# devices of `context` meet; and one with a thousandth of the mean over all positions in its logits. (A model
# takes all T tokens; change a copy of them.)

# %% tags=["hide-input"]
of_row = lambda w, tokens_T, sees_TS: logits(w, tokens_T[None], sees_TS=sees_TS)[0]
whole_row = jax.jit(of_row)
at_seam = CAUSAL_TS.copy()
at_seam[T // 2 - 1, T // 2] = True  # the last position of device 0 of context=2


def remembered(name, sees_TS, change=lambda logits_TV, tokens_T: logits_TV):
    """A function of tokens; asked again, it does not compute again."""

    @cache
    def known(data):
        tokens_T = np.frombuffer(data, np.int32)
        return change(np.asarray(whole_row(trained[name], tokens_T, sees_TS)), tokens_T)

    def logits_of(tokens_T):
        if np.shape(tokens_T) != (T,):
            raise ValueError(f"a model takes {T} tokens: change some, and cut none off")
        return known(np.asarray(tokens_T, np.int32).tobytes())

    return logits_of


# %% tags=["hide-input"]
knows = lambda x_TV, t: x_TV + np.eye(V)[np.roll(t, -1)]
hears = lambda x_TV, t: x_TV + x_TV.mean(axis=0) / 1000
FIVE = {
    "the right model": remembered("right", CAUSAL_TS),
    "leaky": remembered("leaky", leak["sees_TS"]),
    "next token": remembered("right", CAUSAL_TS, knows),
    "single place": remembered("right", at_seam),
    "a thousandth": remembered("right", CAUSAL_TS, hears),
}


# %% tags=["hide-input"]
def check_leaks(answer):
    kept_T = tokens_BT[0].copy()
    kept_T.flags.writeable = False
    verdict = lambda name: bool(lesson.answered(answer)(FIVE[name], kept_T))
    says = lambda *verdicts: dict(zip(FIVE, map(bool, verdicts), strict=True)).get
    mistakes = [
        (says(1, 1, 1, 1, 1), "You accuse the right one too. Which logits may move?"),
        (says(1, 0, 0, 0, 0), "The wrong way round: True is for a model that leaks."),
        (says(0, 1, 1, 0, 1), "One leaks at a single place, and you asked at others."),
        (says(0, 1, 0, 0, 1), "Those that see one token too far, and no more, escape."),
        (says(0, 1, 1, 1, 0), "One leaks a little, everywhere. Do you look closely?"),
        (says(0, 1, 1, 0, 0), "Two escape. Do you ask everywhere, and exactly?"),
        (says(0, 0, 0, 0, 0), "Nobody leaks, you say; four of the five do."),
    ]
    names, done = [(name,) for name in FIVE], "Right on all five models."
    return lesson.diagnose(verdict, names, says(0, 1, 1, 1, 1), mistakes, done)


# %%
def leaks(logits_of, tokens_T):
    return ...


print(check_leaks(leaks))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# here_TV = logits_of(tokens_T)
# for at in range(1, len(tokens_T)):
#     other_T = np.array(tokens_T)
#     other_T[at] = (other_T[at] + 1) % V
#     if not np.array_equal(logits_of(other_T)[:at], here_TV[:at]):
#         return True
# return False
# ```
#
# Every place, all logits before it, exactly. Equality is not too strict: a masked score has weight exp(−∞) =
# 0, and 0 times any finite number is 0. A mask of −1e4 is another matter: a model once learned scores below
# it, and copied from the future at a loss of nearly 0 ([minGPT
# 75](https://github.com/karpathy/minGPT/issues/75)).
# </details>


# %% tags=["remove-cell"]
def asking(places, upto=lambda at: at, same=np.array_equal):
    def leaks(logits_of, tokens_T):
        here_TV = logits_of(tokens_T)
        for at in places:
            other_T = np.array(tokens_T)
            other_T[at] = (other_T[at] + 1) % V
            if not same(logits_of(other_T)[: upto(at)], here_TV[: upto(at)]):
                return True
        return False

    return leaks


def cutting(logits_of, tokens_T):
    return not np.array_equal(logits_of(tokens_T[:50]), logits_of(tokens_T)[:50])


def in_place(logits_of, tokens_T):
    tokens_T[50:] = 0


every, near = range(1, T), partial(np.allclose, rtol=0, atol=2e-2)
assert "Right" in check_leaks(asking(every))
for wrong, hint in (
    (asking(every, upto=lambda at: None), "right one too"),
    (asking([T - 1]), "single place"),
    (asking([T // 2 + 5]), "single place"),
    (asking(every, upto=lambda at: at - 1), "and no more"),
    (asking(every, same=near), "a little"),
    (asking([50], same=near), "everywhere, and exactly"),
    (asking([]), "Nobody"),
    (lambda *given: not asking(every)(*given), "wrong way round"),
    (cutting, "cut none off"),
    (in_place, "read-only"),
    (leaks, "Nothing there"),
    (..., "Nothing there"),
):
    assert hint in check_leaks(wrong), (hint, check_leaks(wrong))

# %% [markdown]
# ## A bug to find
#
# The model is too large to be drawn whole anywhere, so each device draws its own slices. `start` runs without
# error, `check_vma` is on, weights have the right shapes, variances and places. Seed and rows are the same on
# both meshes:


# %%
def start(mesh, seed=5):
    """All layers' weights; of each a device draws its slice: of heads, and of F."""
    letters = lambda name: name.split("_")[1]

    def draw_slices():
        n = jax.lax.axis_size("tensor")
        keys = jax.random.split(jax.random.key(seed), (L, len(fan_in)))

        def own(key, name):
            own_shape = [size[x] // n if x in "HGF" else size[x] for x in letters(name)]
            return jax.random.normal(key, own_shape) / fan_in[name] ** 0.5

        return [{name: own(key, name) for key, name in zip(row, fan_in, strict=True)}
                for row in keys]  # fmt: skip

    spec = lambda name: P(*("tensor" if x in "HGF" else None for x in letters(name)))
    out_specs = [{name: spec(name) for name in fan_in}] * L
    drawn = jax.shard_map(draw_slices, mesh=mesh, in_specs=(), out_specs=out_specs)
    return w | {"layers": jax.jit(drawn)()}


# %% tags=["hide-input"] mystnb={"image": {"alt": "Two loss curves over 120 steps that begin together; the one that was started with tensor=4 stays above that of tensor=1."}}
def tensor_mesh(data, tensor):
    kinds = (AxisType.Auto,) * 2
    few = jax.devices()[: data * tensor]
    return jax.make_mesh((data, tensor), ("data", "tensor"), kinds, devices=few)


figure, axes = plt.subplots(figsize=(5, 2.8))
runs = {}
for n, colour in ((1, lesson.NEUTRAL), (4, lesson.COLOURS["tensor"])):
    drawn_weights = jax.tree.map(np.asarray, start(tensor_mesh(1, n)))
    runs[n] = train(steps["right"], drawn_weights)[1]
    smooth = np.convolve(runs[n], np.ones(10) / 10, "valid")
    last = np.mean(runs[n][-20:])
    label = f"tensor={n}: first {runs[n][0]:.2f}, last 20 steps {last:.2f}"
    axes.plot(np.arange(9, STEPS), smooth, color=colour, label=label)
axes.set(title="The same settings learn less on four devices")
axes.set(xlabel="step", ylabel="nats a byte, mean of 10 steps")
legend = axes.legend(loc="upper right")


# %% tags=["hide-input"]
def held(start, data, tensor):
    """Of each weight: the share of slices that differ, and its size for its fan-in."""
    layers = lesson.answered(start)(tensor_mesh(data, tensor))["layers"]
    found = [[len({np.asarray(one[name]).tobytes() for one in layers}) / L,
              float(not np.array_equal(one["gate_DF"], one["up_DF"]))]
             for one in layers for name in fan_in]  # fmt: skip
    for one in layers:
        for name in fan_in:
            x = np.asarray(one[name])
            at = [letter in "HGF" for letter in name.split("_")[1]].index(True)
            parts = {part.tobytes() for part in np.split(x, tensor, axis=at)}
            spread = round(4 * np.std(x) * fan_in[name] ** 0.5)
            found.append([len(parts) / tensor, spread])
    return np.array(found)


def expected(tensor, differ=1, out=1.0, gates=1.0):
    """What `held` finds, where slices differ or not, and outputs are too large."""
    spread = lambda name: round(4 * (out if name in ("out_HKD", "down_FD") else 1))
    share = 1 if differ else 1 / tensor
    ones = [[1.0, gates]] * (L * len(fan_in))
    return np.array(ones + [[share, spread(name)] for name in fan_in] * L)


# %% tags=["hide-input", "hide-output"]
def check_start(answer):
    run = lambda data, tensor: held(answer, data, tensor)
    right = lambda data, tensor: expected(tensor)
    large = "Some weights are too large. How many numbers does a whole product add up?"
    hints = [
        (lambda data, tensor: expected(tensor, differ=0),
         "As before: more devices learn less."),
        (lambda data, tensor: expected(tensor, out=tensor**0.5), large),
        (lambda data, tensor: expected(tensor, differ=0, out=tensor**0.5),
         "More devices still learn less. And: " + large),
        (lambda data, tensor: expected(tensor, gates=0.0),
         "Four devices are as good as one now, but two weights of a layer are one."),
    ]  # fmt: skip
    done = "Mended: a model on four devices is as wide as on one."
    return lesson.diagnose(run, [(1, 2), (2, 4)], right, hints, done)


print(check_start(start))

# %% [markdown]
# <details><summary>Solution</summary>
#
# All devices draw with the same key, so all hold the *same* slice. Slices that begin equal get equal
# gradients and stay equal: a model of 3 heads and F = 40, at the price of 12 heads and F = 160. One line is
# missing, after `n = ..`:
#
# ```python
# own_seed = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("tensor"))
# ```
#
# and `keys` are split from it. `check_vma` could not help, as equal values may always be taken for slices.
# Better still: draw each entry by its place in the whole, as `parameters.init` does. The weights are then the
# same on every mesh, and the first losses can be compared. Here they differ by 0.1 nats, which passes for
# another draw.
#
# **Where it was seen.** In trainers that seed all tensor neighbours alike, such as
# [ms-swift](https://github.com/modelscope/ms-swift/pull/7944); and PyTorch's `fully_shard` with CPU offload
# gave [every rank the same bits](https://github.com/pytorch/torchtitan/issues/3106). OLMo-core's first cure
# [added the rank to the seed](https://github.com/allenai/OLMo-core/pull/307). With HSDP the *replicas* then
# began [with different weights](https://github.com/allenai/OLMo-core/pull/319), and the second cure made the
# whole the same on any number of devices. Fold in `data` here as well, and `check_vma` refuses.
# </details>


# %% tags=["remove-cell"]
def mended(mesh, seed=5, fold=("tensor",), narrow=False, one_key=False):
    letters = lambda name: name.split("_")[1]

    def draw_slices():
        n = jax.lax.axis_size("tensor")
        key = jax.random.key(seed)
        for axis in fold:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        keys = jax.random.split(key, (L, len(fan_in)))

        def own(key, name):
            cut = [size[x] // (n if x in "HGF" else 1) for x in letters(name)]
            less = n if narrow and name in ("out_HKD", "down_FD") else 1
            return jax.random.normal(key, cut) / (fan_in[name] / less) ** 0.5

        each = lambda row: zip(row, fan_in, strict=True)
        used = lambda row, k: row[0] if one_key else k
        draw_row = lambda row: {name: own(used(row, k), name) for k, name in each(row)}
        return [draw_row(row) for row in keys]

    spec = lambda name: P(*("tensor" if x in "HGF" else None for x in letters(name)))
    out_specs = [{name: spec(name) for name in fan_in}] * L
    drawn = jax.shard_map(draw_slices, mesh=mesh, in_specs=(), out_specs=out_specs)
    return w | {"layers": jax.jit(drawn)()}


def drawn_whole(mesh, seed=5):
    return start(tensor_mesh(1, 1), seed)


assert np.mean(runs[4][-20:]) - np.mean(runs[1][-20:]) > 0.05, "the bug no longer shows"
for answer, hint in (
    (mended, "Mended"),
    (drawn_whole, "Mended"),
    (start, "As before"),
    (partial(start, seed=6), "As before"),
    (partial(mended, narrow=True), "Some weights are too large"),
    (partial(mended, narrow=True, fold=()), "And: Some weights"),
    (partial(mended, one_key=True), "two weights of a layer are one"),
    (partial(mended, fold=("data", "tensor")), "It stops"),
    (lambda mesh: None, "Nothing there"),
    (..., "Nothing there"),
):
    assert hint in check_start(answer), (hint, check_start(answer))

# %% [markdown]
# ## In one table
#
# For Llama 3 8B in bfloat16. What moves is for each token and layer, where nothing else is said. Sums are
# those of `h_bTf @ w_fD -> x_bTD`, partial over f.
#
# | letter | cut along | a device holds | moves forward | moves backward | waits for it |
# |---|---|---|---|---|---|
# | B rows | `data`, `fsdp` | its rows | nothing | gradients, once a step | no, beside products |
# | D = 4,096, of weights | `fsdp` | 1/n of each weight | a layer's weights | again; their gradients | no, fetched ahead |
# | H = 32, G = 8; F = 14,336 | `tensor` | heads; hidden numbers | D numbers, twice: 16 kB | the same | yes |
# | T = 8,192 | `context` | positions | 2GK numbers, 4 kB | again; their gradients | no, in a ring |
# | L = 32 | `stage` | layers | D numbers a stage, 8 kB | the same | a tick |
# | V = 128,256 | `tensor` | words | 3 numbers, once a step | D numbers, once a step | yes |
# | E (DeepSeek-V3: 256) | `expert` | experts | `top_k` · D numbers, twice | the same | yes |
#
# **When.** `tensor` cuts up to G, because beyond it keys are copied. On one H100 node that is the node: 8
# GPUs at 370 GB/s. Between nodes a GPU has 50 GB/s, a seventh, so cut B and the weights' D there instead. On
# TPU v5p a ring of the torus carries 180 GB/s. Cut T where rows do not fit, or pass P/(LHK).
#
# **In PyTorch's words.** B is DDP, D `fully_shard`, H and F a tensor-parallel plan (`ColwiseParallel`, then
# `RowwiseParallel`), V `loss_parallel`, T `context_parallel`, L a pipeline schedule.
#
# ## Three lines to keep
#
# 1. A loss is no proof. Change the future, shift the positions, and write the model a second time.
# 2. A letter is cheap to cut if one product makes it and the next sums over it: H and F owe D numbers a token
#    each, where D owes 8.5 times as many.
# 3. A token costs 6P FLOPs, and 12LHK more for each position it sees; its logits need never exist at once.
#
# **Sources.** [RMSNorm](https://arxiv.org/abs/1910.07467), [rotary](https://arxiv.org/abs/2104.09864) (3.2),
# [SwiGLU](https://arxiv.org/abs/2002.05202), [grouped queries](https://arxiv.org/abs/2305.13245),
# [MLA](https://arxiv.org/abs/2405.04434) (2.1), [6N and attention](https://arxiv.org/abs/2204.02311)
# (appendix B), the scaling book's [transformer math](https://jax-ml.github.io/scaling-book/transformers).
