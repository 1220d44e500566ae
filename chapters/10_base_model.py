# %% [markdown]
# # 10 · The decoder-only transformer
#
# A decoder-only transformer predicts the next token from all tokens before it. Each of its layers adds the
# outputs of attention and of a feed-forward layer to a residual stream.
#
# The other chapters shard this model. This page shows which axis can shard which of its dims, where its FLOPs
# come from, and how to check it on one device, because a bug in the model is the same on every mesh. A falling
# loss is no proof: of the three models in the first figure, the one with the lowest loss is broken, and another
# broken one is within 5% of the right loss.
#
# *Prerequisites:* chapters 00 to 02 (cost of a matmul, collectives, gradients). Chapters 03 to 09 shard this
# model, and are linked where this page names their axes. *Mesh:* `data=8`, at the end
# `data=2,fsdp=2,tensor=2`, simulated. *Runs in* 50 s on 2 cores. *Reading takes* 35 minutes, the exercises an
# hour.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

from functools import partial

import matplotlib.pyplot as plt
import optax

import config
import sharding
from chapters import lesson, opening
from generate.cache import empty_cache
from plan.chips import hardware
from plan.count import costs

in_heads = 2 * opening.D * (opening.H + opening.G) * opening.K
fraction = in_heads / opening.PARAMETERS  # of the first prediction

# %% tags=["remove-cell"]
quick = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
import os

os.environ.setdefault("XLA_FLAGS", quick)  # compile quickly: the programs are small

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three loss curves over 120 steps: right and mixed nearly coincide at about two nats, leaky falls to nearly zero. An inset shows that mixed is at most about 0.1 nats above right."}}
recorded = {  # every tenth step of the training below, each the mean of 10 steps
    "right": "3.98 2.81 2.65 2.55 2.56 2.42 2.40 2.36 2.42 2.33 2.47 2.26 2.51",
    "mixed": "4.00 2.83 2.66 2.56 2.55 2.43 2.40 2.37 2.45 2.37 2.51 2.31 2.58",
    "leaky": "3.96 2.73 2.25 1.23 0.55 0.32 0.17 0.12 0.10 0.09 0.09 0.07 0.08",
}
recorded = {name: [float(x) for x in text.split()] for name, text in recorded.items()}
figure, axes = plt.subplots(figsize=(5.6, 3.4))
inset = axes.inset_axes((0.5, 0.56, 0.48, 0.34))
looks = {"mixed": dict(lw=5, alpha=0.5, color=lesson.NEUTRAL), "right": dict(lw=1)}
looks["leaky"] = dict(ls="--")
at = range(0, 121, 10)
for name, look in looks.items():
    axes.plot(at, recorded[name], label=name, **dict(color="black") | look)
more = [a - b for a, b in zip(recorded["mixed"], recorded["right"], strict=True)]
inset.plot(at, more, color=lesson.NEUTRAL)
inset.axhline(0, color="black", lw=0.6)
inset.set_title("mixed minus right", size=9)
axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, 6.4))
axes.set_title("The lowest loss is wrong, and so is one of the other two")
legend = axes.legend(loc="lower left", bbox_to_anchor=(0.1, 0.02))

# %% [markdown]
# You will train these models below, and find both bugs with two short tests. First: what does one layer cost?
#
# ## One layer on eight devices
#
# Take a layer of Llama 3 8B on `fsdp=8`, with 8,192 tokens per device in sequences of 4,096. It has width
# 4,096, 32 query heads and 8 key-value heads of dim 128, and a feed-forward layer with hidden dim 14,336.
#
# > **Predict.** What fraction of its 218 million weights is in attention?

# %%
my_prediction = None  # between 0 and 1
lesson.predicted("in attention", my_prediction, fraction, within=0.1)

# %% [markdown]
# Only a fifth. Attention has 2 · 4,096 · (4,096 + 1,024) = 42 million weights, and the feed-forward layer 3 ·
# 4,096 · 14,336 = 176 million. The activations can need more memory than the weights, because the backward pass
# needs them. With **activation checkpointing** (*remat* in JAX), the layer saves only its input, and computes
# the rest again:

# %% tags=["hide-input"] mystnb={"image": {"alt": "One layer on eight devices. With all activations saved, they are 1.1 of 2.3 GiB per device, and a step is forward and backward, 11 ms. With activation checkpointing they are less than 0.1 GiB, and the forward pass runs again before the backward pass, 14 ms. All transfers overlap with compute."}}
W, tokens = opening.PARAMETERS, opening.TOKENS // opening.DEVICES  # of a device
queries = opening.H * opening.K  # elements per token, as in the attention output
saved = 4 * opening.D + 2 * queries + 2 * opening.G * opening.K + 3 * opening.F
forward = opening.compute_ms(2 * W * tokens)  # matmuls with weights
transfer = opening.network_ms(7 / 8 * 2 * W)  # bfloat16


def layer(title, elements, passes):
    """FSDP: 16 bytes per parameter, sharded; gathered weights and gradients: 2 each."""
    sizes = {"weights": 4 / 8 + 2, "gradients": 4 / 8 + 2, "optimizer state": 8 / 8}
    held = {name: size * W / 2**30 for name, size in sizes.items()}
    held["activations"] = 2 * elements * tokens / 2**30
    work = [("forward", 0, forward), ("forward\nagain", forward, forward)][:passes]
    work.append(("backward", passes * forward, 2 * forward))
    sends = [("", n * forward, transfer) for n in (0, 1, passes + 1)]
    return opening.Scene(title, held, work, sends)


recomputed = layer("Activation checkpointing", opening.D, 2)
title = "Activation checkpointing: less memory, a third more compute"
all_saved = layer("Every activation is saved", saved, 1)
opening.before_after(all_saved, recomputed, title, "fsdp")

# %% tags=["remove-cell"]
assert 10.7 < 3 * forward < 11 and 14.3 < 4 * forward < 14.6 and 0.84 < transfer < 0.86
assert 2.2 < sum(layer("", saved, 1).memory.values()) < 2.35

# %% [markdown]
# (The figure has times at peak speed, for matmuls with weights. In blue are two all-gathers of the weights and
# the reduce-scatter of the gradients.)
#
# ## A complete decoder
#
# The model fits into 45 lines. The name of an array ends with one letter per dim, so the name gives its shape,
# and `draw` below reads the shape from the name. The whole guide uses these letters:
#
# - A batch has B rows (sequences) of T tokens, and b rows are on one device. V is the vocabulary size, here
#   256 (bytes). D is the model dim, the width of the *residual stream* `x_bTD`. Each of the L layers reads
#   the residual stream and adds to it.
# - There are H query heads of dim K, and G key-value heads. H/G query heads share one key-value head
#   (*grouped-query attention*; with G = H it is standard multi-head attention). S is the number of
#   positions of keys and values.
# - F is the hidden dim of the feed-forward layer (MLP).

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np

size = dict(B=8, T=72, V=256, D=64, L=2, H=12, G=4, K=8, F=160)
B, T, V, D, L, H, G, K, F = size.values()
rng, shape = np.random.default_rng(0), lambda m: [size[x] for x in m.split("_")[1]]
draw = lambda name, fan_in: np.float32(rng.normal(size=shape(name)) / fan_in**0.5)
fan_in = {"query_DHK": D, "key_DGK": D, "value_DGK": D, "gate_DF": D, "up_DF": D}
fan_in |= {"out_HKD": H * K * 2 * L, "down_FD": F * 2 * L}  # 2 L: see Initialization
layers = [{name: draw(name, n) for name, n in fan_in.items()} for _ in range(L)]
w = {"table_VD": draw("table_VD", 1), "layers": layers, "head_DV": draw("head_DV", D)}

# %% [markdown]
# Each token's vector is *normalized* before attention and before the feed-forward layer: it is divided by its
# root mean square. (Real models also multiply by a learned gain.)
#
# *Rotary position embeddings* (RoPE) give attention the positions of tokens. Entries i and i + K/2 of a
# query or key form a pair, which is rotated by an angle proportional to the position. If query and key are
# rotated by the same angle, their score does not change. So it depends only on the distance between them.


# %% tags=["by-hand"]
norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x, first=0):  # queries x_bTHK or keys
    angle_Tk = np.outer(first + np.arange(T), 1e4 ** (-np.arange(K // 2) * 2 / K))
    z = jax.lax.complex(*jnp.split(x, 2, -1)) * jnp.exp(1j * angle_Tk[None, :, None])
    return jnp.concatenate([z.real, z.imag], axis=-1)


def attention(w, x_bTD, rotate, sees_TS):
    by = lambda name: jnp.einsum("bTD,DHK->bTHK", x_bTD, w[name])
    k_v = rotate(by("key_DGK")), by("value_DGK")
    k_bSHK, v_bSHK = (jnp.repeat(x_bSGK, H // G, axis=2) for x_bSGK in k_v)
    score_bHTS = jnp.einsum("bTHK,bSHK->bHTS", rotate(by("query_DHK")), k_bSHK) / K**0.5
    weights_bHTS = jax.nn.softmax(jnp.where(sees_TS[None, None], score_bHTS, -jnp.inf))
    o_bTHK = jnp.einsum("bHTS,bSHK->bTHK", weights_bHTS, v_bSHK)
    return jnp.einsum("bTHK,HKD->bTD", o_bTHK, w["out_HKD"])


# %% [markdown]
# The feed-forward layer is a *SwiGLU*: two matmuls compute F values each, silu(x) = x · sigmoid(x) is
# applied to one of the results, and their elementwise product is projected back to D. The loss is the
# cross-entropy in nats. Each device sums it over its own tokens and divides by the token count of all
# devices, so the sum of the devices' losses is the mean (02).


# %% tags=["by-hand"]
CAUSAL_TS = np.tri(T) > 0


def logits(w, tokens_bT, rotate=rotate, sees_TS=CAUSAL_TS):
    x_bTD = w["table_VD"][tokens_bT]
    for one in w["layers"]:
        x_bTD += attention(one, norm(x_bTD), rotate, sees_TS)
        gate_bTF, up_bTF = (norm(x_bTD) @ one[name] for name in ("gate_DF", "up_DF"))
        x_bTD += (jax.nn.silu(gate_bTF) * up_bTF) @ one["down_FD"]
    return norm(x_bTD) @ w["head_DV"]


def loss(w, row_bT, **other):  # a row has one more token: the last target
    log_p_bTV = jax.nn.log_softmax(logits(w, row_bT[:, :-1], **other))
    return -jnp.take_along_axis(log_p_bTV, row_bT[:, 1:, None], axis=-1).sum() / (B * T)


# %% tags=["by-hand"]
row_BT = np.fromfile(os.__file__, "uint8", B * (T + 1)).reshape(B, -1)
eight = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
total_loss = lambda w, row_bT: jax.lax.psum(loss(w, row_bT), "data")
specs = dict(mesh=eight, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
on_8 = jax.shard_map(total_loss, **specs)
one, all_8 = (jax.jit(jax.value_and_grad(f))(w, row_BT) for f in (loss, on_8))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-5), one, all_8)
print("data=8: loss and gradients agree with one device")

# %% [markdown]
# ## Initialization
#
# The *fan-in* of a weight is the number of terms that its matmul sums for one output. With variance 1/fan-in,
# inputs of variance 1 give outputs of variance 1. Output projections are also divided by √(2L), because
# attention and MLP of L layers add 2L terms to the residual stream.
#
# Random tokens cannot be predicted. The best possible model for them gives every token the same
# probability, and has a loss of ln V = 5.55 nats.
#
# > **Predict.** What is the loss of this model on random tokens before its first step, in nats?

# %% tags=["hide-input"]
random_BT = np.random.default_rng(1).integers(0, V, (B, T + 1))
untrained = float(loss(w, random_BT))

# %%
my_prediction = None  # nats
lesson.predicted("untrained", my_prediction, untrained, "nats", within=0.02)

# %% tags=["remove-cell"]
assert abs(untrained - np.log(V) - 0.5) < 0.1, "not 1/2 above ln V any more"

# %% [markdown]
# The loss is half a nat above that of the uniform model. The logits are normal random numbers of variance 1.
# Their exponentials have the mean e^(1/2), so the log of their sum is ln V + 1/2, a healthy initial loss.
# A much higher loss means that some weight is initialized too large. On a mesh, the usual cause is a
# fan-in computed from the *shard*: the matmul with `down_FD` sums over all F, even if a device stores only
# f = F/n rows.
#
# ## Three models, one of them right
#
# Now train the models of the first figure on the Python standard library of your machine (so your losses differ
# a little). Two of them are broken:
#
# - `leaky` lets each position also attend to the next position, whose token is the target.
# - `mixed` combines the RoPE code of two libraries.
#   [`transformers`](https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama/modeling_llama.py)
#   pairs entry i with i + K/2, like this page. [Meta's Llama
#   3](https://github.com/meta-llama/llama3/blob/main/llama/model.py) pairs adjacent entries. `mixed` has the
#   pairs of the first and the angles of the second: entries get the angles 0 0 1 1 2 2. So the two entries of
#   a pair get different angles, and the result is not a rotation.

# %%
from pathlib import Path

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def rows(number):
    """B rows of T + 1 bytes, different for every number."""
    first = np.random.default_rng(number).integers(0, len(text) - T - 1, (B, 1))
    return text[first + np.arange(T + 1)]


def mixed_rotate(x_bTHK, first=0):
    angle_Tk = np.outer(first + np.arange(T), 1e4 ** (-np.arange(K // 2) * 2 / K))
    angle_T1K = jnp.float32(np.repeat(angle_Tk, 2, axis=-1))[:, None]
    a, b = jnp.split(x_bTHK, 2, axis=-1)
    other = jnp.concatenate([-b, a], axis=-1)
    return x_bTHK * jnp.cos(angle_T1K) + other * jnp.sin(angle_T1K)


# %%
STEPS, adam = 120, optax.adam(1e-2)


def stepper(**other):
    @jax.jit
    def step(w, moments, row_BT):
        value, grads = jax.value_and_grad(partial(loss, **other))(w, row_BT)
        change, moments = adam.update(grads, moments)
        return optax.apply_updates(w, change), moments, value

    return step


def train(step, w, count=STEPS):
    moments, losses = adam.init(w), []
    for number in range(count):
        w, moments, value = step(w, moments, rows(number))
        losses.append(float(value))
    return w, losses


# %%
leak = {"sees_TS": np.tri(T, k=1) > 0}
variants = {"right": {}, "mixed": {"rotate": mixed_rotate}, "leaky": leak}
steps = {name: stepper(**variant) for name, variant in variants.items()}
results = {name: train(step, w) for name, step in steps.items()}
trained, curves = ({name: pair[n] for name, pair in results.items()} for n in (0, 1))
end = {name: np.mean(losses[-20:]) for name, losses in curves.items()}
assert end["leaky"] < 0.5 * end["right"], "the leak needs more steps"
assert end["mixed"] < 1.05 * end["right"], "`mixed` is more than 5% worse"

# %%
for name, losses in curves.items():
    print(f"{name}: first {losses[0]:.2f}, mean of the last 20 steps {end[name]:.2f}")

# %% tags=["remove-cell"]
for name, losses in curves.items():
    middle = [np.mean(losses[max(n - 5, 0) : n + 5]) for n in range(20, 120, 10)]
    assert np.allclose(recorded[name][2:-1], middle, atol=0.3), "other curves"

# %% [markdown]
# A loss near zero is suspicious. But nobody would notice `mixed` without the right curve, so check the logits
# in two ways:
#
# - **Future.** Change all tokens from some position on. Logits before that position must not change.
# - **Shift.** Number positions from 500 instead of 0. No logit may change, because scores depend only on
#   distances.

# %%
tokens_BT = rows(10**6)[:, :-1].astype(int)  # no model was trained on them
place = 50
other_BT = np.where(np.arange(T) < place, tokens_BT, (tokens_BT + 1) % V)
max_change = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
print("change, relative to the largest logit:    future    shift")
for name, variant in variants.items():
    read = partial(logits, trained[name])
    here_BTV = read(tokens_BT, **variant)
    shifted = variant | {"rotate": partial(variant.get("rotate", rotate), first=500)}
    future = max_change(read(other_BT, **variant)[:, :place], here_BTV[:, :place])
    shift = max_change(read(tokens_BT, **shifted), here_BTV)
    print(f"{name:40} {future:8.0e} {shift:8.0e}")
    found = future > 1e-3, shift > 1e-3
    assert found == (name == "leaky", name == "mixed"), "a check misses a bug"

# %% [markdown]
# The checks find both bugs and tell them apart. (The small shift of the right model is rounding.) `mixed` has
# memorized positions 0 to 71, each with its own wrong angles.
#
# Both bugs are common. From v5.9 on, four model classes of `transformers` leaked the future ([issue
# 48745](https://github.com/huggingface/transformers/issues/48745)) until [PR
# 48760](https://github.com/huggingface/transformers/pull/48760). `mixed` was in a course on building GPT
# ([issue 6](https://github.com/raiyanyahya/how-to-train-your-gpt/issues/6)).
#
# ## Exercise 1: positions of a shard
#
# Along the axis `context`, each of n devices stores t = T/n consecutive positions of every row. RoPE and
# the mask need the indices of these positions. Return the t indices of this device.
# (`jax.lax.axis_index("context")` is the index of the device, and `jax.lax.axis_size("context")` is n.) The
# checker all-gathers keys and values, computes attention for each device's own queries, and compares the
# result with one device.

# %% tags=["hide-input"]
from functools import cache

from jax.sharding import AxisType

drawn = np.random.default_rng(3).normal(size=(3, T, K)).astype(np.float32)
on_context = lambda n: jax.make_mesh(
    (n,), ("context",), (AxisType.Auto,), devices=jax.devices()[:n]
)  # fmt: skip


def rotated(x_tK, position_t):
    angle_tk = position_t[:, None] * np.float32(1e2 ** (-np.arange(K // 2) * 2 / K))
    z = jax.lax.complex(*jnp.split(x_tK, 2, -1)) * jnp.exp(1j * angle_tk)
    return jnp.concatenate([z.real, z.imag], axis=-1)


# %% tags=["hide-input"]
@cache
def attended(answer, n):
    """Attention of one head, with positions sharded over n devices."""
    join = lambda x: jax.lax.all_gather(x, "context", tiled=True)

    def local(q_tK, k_tK, v_tK):
        t = len(q_tK)
        position_t = jnp.asarray(answer(t))
        if position_t.shape != (t,):
            yours = position_t.shape
            raise ValueError(f"need {t} of the {T} positions; your shape is {yours}")
        arrays = rotated(k_tK, position_t), v_tK, position_t
        k_SK, v_SK, position_S = map(join, arrays)
        score_tS = rotated(q_tK, position_t) @ k_SK.T
        sees_tS = position_t[:, None] >= position_S
        return jax.nn.softmax(jnp.where(sees_tS, score_tS, -jnp.inf)) @ v_SK

    cut = jax.P("context")
    specs = dict(mesh=on_context(n), in_specs=(cut,) * 3, out_specs=cut)
    return np.asarray(jax.jit(jax.shard_map(local, **specs))(*drawn))


# %% tags=["hide-input"]
RIGHT = lambda t: here() * t + jnp.arange(t)
here = lambda: jax.lax.axis_index("context")
how_many = lambda: jax.lax.axis_size("context")
away = lambda x: jax.lax.pcast(x, "context", to="varying")
PLACES = [
    (lambda t: away(jnp.arange(t)),
     "Each device starts at 0, so it treats other devices' keys as its own past."),
    (lambda t: here() + jnp.arange(t),
     "Devices overlap in all positions but one. How many does each store?"),
    (lambda t: here() * how_many() + jnp.arange(t),
     "You advance by n per device. How many positions does a device store?"),
    (lambda t: here() + how_many() * jnp.arange(t),
     "You interleave the positions. Here a device stores consecutive ones."),
    (lambda t: here() * t + jnp.arange(t)[::-1],
     "The right range, but each device counts backward."),
    (lambda t: (how_many() - 1 - here()) * t + jnp.arange(t),
     "The last device gets the earliest positions. They belong to device 0."),
]  # fmt: skip


# %%
def positions(t):
    return ...


def check_positions(answer):
    run, done = lambda f: lambda n: attended(f, n), "Right on 4 and 8 devices."
    return lesson.diagnose(answer, [(4,), (8,)], run(RIGHT), PLACES, done, run=run)


print(check_positions(positions))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jax.lax.axis_index("context") * t + jnp.arange(t)`. Scores and mask depend only on differences of
# positions. So an offset that is the same on all devices changes nothing, but one that differs does.
# </details>

# %% tags=["remove-cell"]
whole = drawn[0], drawn[1], drawn[2]
score_TS = rotated(whole[0], np.arange(T)) @ rotated(whole[1], np.arange(T)).T
by_one = jax.nn.softmax(jnp.where(np.tri(T) > 0, score_TS, -jnp.inf)) @ whole[2]
assert lesson.same(attended(RIGHT, 8), by_one, 1e-3)
lesson.expect(check_positions, *PLACES, (RIGHT, "Right"),
              (lambda t: 1 + here() * t + jnp.arange(t), "Right"),
              (lambda t: away(jnp.arange(T)), "of the 72 positions"),
              (positions, "Nothing there"))  # fmt: skip

# %% [markdown]
# ## Which dims can be sharded
#
# You can shard a dim without communication if no matmul sums over it. If a matmul does, each device has a
# *partial sum* as large as the result, and the devices must all-reduce it (01). So the letters of the
# matmuls tell you how much a sharded dim communicates. For Llama 3 8B, per token:

# %%
llama = dict(V=128_256, D=4096, L=32, H=32, G=8, K=128, F=14_336, T=8192, S=8192)
MATMULS = {
    "queries": "TD,DHK->THK", "keys": "TD,DGK->TGK", "values": "TD,DGK->TGK",
    "scores": "THK,SHK->HTS", "mixing": "HTS,SHK->THK", "out": "THK,HKD->TD",
    "gate": "TD,DF->TF", "up": "TD,DF->TF", "down": "TF,FD->TD",
}  # fmt: skip


def partial_sums(letter):
    """The partial sums per token and layer if this letter is sharded."""
    total, where = 0, []
    for name, matmul in MATMULS.items():
        inputs, result = matmul.split("->")
        if letter in inputs and letter not in result:
            total += np.prod([llama[x] for x in result if x != "T"])
            where.append(name)
    return int(total), where


for letter in "HFDKTS":
    print(f"{letter}: {partial_sums(letter)[0]:9,} elements", *partial_sums(letter)[1])
assert partial_sums("T")[0] == 0 and partial_sums("H") == (4096, ["out"])
assert partial_sums("F")[0] == llama["D"] and partial_sums("D")[0] == 8.5 * llama["D"]

# %% [markdown]
# - **H and F** are output dims of one matmul, and a later matmul sums over them. Everything in between stays on
#   its device, so attention and the MLP each need one all-reduce of D elements. This is tensor parallelism
#   (04). G is sharded with H; with G = 8, more than 8 devices would need copies of the keys.
# - **D** is summed over in most matmuls. Sharding it would all-reduce 34,816 elements, and sharding H only
#   4,096, so D is sharded only for storage: `fsdp` shards D of each *weight*, and all-gathers the weight before
#   use (03).
# - **K** is summed over for each pair of positions, and nobody shards it.
# - **T**, the positions of queries, is never summed over. **S**, the positions of keys and values, is. So
#   `context` (06) shards T and sends keys and values, 2GK = 2,048 elements per token.
#
# No matmul of the forward pass sums over B, so `data` and `fsdp` shard it. The backward pass does: a
# weight's gradient is a sum over the tokens of all rows, so these axes add up gradients once per step (02).
# The L layers run one after the other, so `stage` can shard L (05).

# %% tags=["hide-input"]
bars = [("stream", "D"), ("queries", "HK"), ("keys,\nvalues", "GK 2"),
        ("attended", "HK"), ("stream", "D"), ("gate,\nup", "F 2"),
        ("stream", "D")]  # fmt: skip

# %% tags=["hide-input"] mystnb={"image": {"alt": "A layer of Llama 3 8B from left to right, each array a vertical bar as high as its elements per token. Gray residual stream of 4,096; red queries, keys and values, attended, in eight shards; an arrow, all-reduce after out; gray stream; red gate and up; an arrow, all-reduce after down; gray stream."}}
figure, axes = plt.subplots(figsize=(6.6, 3.4))
for x, (_, letters) in enumerate(bars):
    times = 2 if letters.endswith("2") else 1
    high = int(np.prod([llama[i] for i in letters if i in llama])) * times
    color = lesson.NEUTRAL if letters == "D" else lesson.COLORS["tensor"]
    axes.bar(x, high, 0.5, -high / 2, color=color)
    for part in range(1, 1 if letters == "D" else 8):
        y = high * (part / 8 - 0.5)
        axes.plot([x - 0.25, x + 0.25], [y, y], color="w", lw=1)
    label = f"{letters[:-2]} twice" if times == 2 else letters
    axes.text(x, high / 2 + 700, f"{label}\n{high:,}", ha="center", size=8)
for x, name in ((3.5, "out"), (5.5, "down")):
    style = dict(arrowstyle="->", lw=2, color=lesson.COLORS["tensor"])
    axes.annotate("", (x + 0.2, 0), (x - 0.2, 0), arrowprops=style)
    axes.text(x + 0.15, -2500, f"{name}:\nall-reduce", ha="center", va="top", size=7)
axes.set(title="tensor=8: red arrays need no communication", ylim=(-16_000, 20_000))
axes.set_ylabel("elements per token")
axes.set_xticks(range(7), [name for name, _ in bars])
ticks = axes.set_yticks([])

# %% [markdown]
# For 8,192 tokens, each layer all-reduces two bfloat16 arrays of 8,192 · 4,096 elements in the forward pass. To
# all-reduce one of them over tensor=8, a device sends 2 · 7/8 of its bytes:

# %%
payload = 8192 * llama["D"] * 2  # bytes
h100, v5p = hardware.CHIPS["h100"], hardware.CHIPS["v5p"]
nvlink = h100.link_bytes_per_s  # to all other GPUs of the node
ring = 2 * v5p.link_bytes_per_s  # one axis of the torus, in both directions
for chip, bandwidth in ((h100, nvlink), (v5p, ring)):
    compute = 8192 * 2 * 3 * llama["D"] * llama["F"] / 8 / chip.peak_flops_per_s
    sends = 2 * 7 / 8 * payload / bandwidth
    print(f"{chip.name:11} {payload / 1e6:.0f} MB at {bandwidth / 1e9:.0f} GB/s: "
          f"{sends * 1e3:.2f} ms; "
          f"feed-forward matmuls: {compute * 1e3:.2f} ms at peak")  # fmt: skip

# %% [markdown]
# On both chips, the all-reduce takes more than 70% as long as the matmuls before it. So `tensor` uses
# the fastest links. With few tokens, as in decoding (14), latency dominates. On a v5p, the 14 hops of a ring
# over 8 devices take about 14 µs, and one token's 2 · 7/8 · 8,192 bytes 0.08 µs at 180 GB/s. So below about
# 14/0.08 = 176 tokens, the hops take longer than the bytes.
#
# ## Where the FLOPs are
#
# In the forward pass, each entry of a weight matrix costs one multiplication and one addition per token.
# The backward pass needs two matmuls of the same size, for the gradients of inputs and weights. So P
# parameters in matrices cost 6P FLOPs per token (papers write 6N). Attention has two more matmuls, without
# weights: the scores and the weighted sums of values. In Llama 3 8B:
#
# > **Predict.** From which T on do these two matmuls cost more FLOPs than all weight matrices together? For
# > each token, count only the positions that it can see, on average half of T. (P is 7.5 billion, without
# > the embedding table.)

# %% tags=["hide-input"]
V_, D_, L_, H_, G_, K_, F_ = (llama[x] for x in "VDLHGKF")
in_attention = D_ * H_ * K_ * 2 + D_ * G_ * K_ * 2
matrices = {"attention": L_ * in_attention, "feed-forward": L_ * 3 * D_ * F_}
matrices["logits"] = D_ * V_
P_ = sum(matrices.values())
published = config.preset("llama3_8b")
# The planner's FLOPs for rows of this length. Its P includes the gains.
length = lambda T: config.replace(published, **{"data.seq_len": T})
gains = (2 * L_ + 1) * D_
pairs = lambda T: costs.model_flops_per_token(length(T)) - 6 * (P_ + gains)
crossing = next(T for T in range(1024, 10**6, 1024) if pairs(T) > 6 * P_)

# %%
my_prediction = None  # tokens in a row
what = "attention costs more from"
lesson.predicted(what, my_prediction, crossing, "tokens", within=0.05)

# %% [markdown]
# A pair of positions costs 2K FLOPs in the score and 2K in the weighted sum, for each of H heads and L layers,
# and three times as many with the backward pass.

# %% tags=["hide-input"]
for name, count in matrices.items():
    print(f"{name:13} {count / P_:6.1%} of 6P")
for T_ in (8192, 65_536, 524_288):
    print(f"T = {T_:7,}: attention adds {pairs(T_) / (6 * P_):.0%} to 6P")

# %% tags=["remove-cell"]
assert 57_000 < P_ / (L_ * H_ * K_) <= crossing < P_ / (L_ * H_ * K_) + 1024

# %% [markdown]
# Per token, attention adds 12LHK · T/2 FLOPs. This equals 6P at **T = P/(LHK)**, here 57,256 tokens. (The
# planner tried multiples of 1,024.) In longer rows, later positions cost much more than earlier ones (06).
#
# ## Exercise 2: count the FLOPs
#
# Return the matmul FLOPs per token of one training step of the program above, forward and backward. The
# program masks after the matmul, so each token computes scores with *all* T positions. `table_VD` is only a
# lookup. The checker compiles the program at two sizes and counts the FLOPs.

# %% tags=["hide-input"]
SIZES = [dict(V=256, D=64, L=2, H=12, G=4, K=8, F=160, T=72),
         dict(V=96, D=48, L=1, H=6, G=3, K=12, F=200, T=40)]  # fmt: skip


@cache
def counted(case):
    """FLOPs per token of a step of the program by hand, compiled at these sizes."""
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


HALF = "Half of the attention FLOPs. Masked pairs are computed too, in both matmuls."

# %% tags=["hide-input"]
COUNTS = [
    (flops(times=1), "That is the forward pass only."),
    (flops(times=2), "The backward pass has two gradients: of inputs and of weights."),
    (flops(mix=0), "All weights are counted. Which matmuls have no weights?"),
    (flops(mix=0, tables=2), "6P with the lookup table, but without attention."),
    (flops(tables=2), "One table too many: which of the two is a matmul?"),
    (flops(tables=0), "Which matmul computes the logits?"),
    (flops(heads="G"), "Keys are shared. But how many query heads are there?"),
    (flops(pairs=0.5), HALF),
    (flops(gates=2), "A SwiGLU has more matrices than that."),
    (flops(head="H"), "Does each of the H heads have a separate key and value?"),
    (lambda **c: flops()(**c) / 2, "A multiplication and an addition are two FLOPs."),
    (lambda **c: flops()(**c) * c["T"], "That is for a whole row."),
]


# %%
def flops_a_token(V, D, L, H, G, K, F, T):
    return ...


def check_flops(answer):
    run = lambda f: lambda case: float(f(**SIZES[case]))
    done = "Right at both sizes, exactly."
    return lesson.diagnose(answer, [(0,), (1,)], counted, COUNTS, done, 1e-6, run)


print(check_flops(flops_a_token))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# weights = L * (2 * D * H * K + 2 * D * G * K + 3 * D * F) + D * V
# return 6 * weights + 3 * L * H * 4 * K * T
# ```
#
# The planner counts half of the pairs, because most attention kernels skip masked blocks.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_flops, *COUNTS, (flops(), "Right"),
              (flops_a_token, "Nothing there"),
              (lambda **c: None, "Nothing there"))  # fmt: skip

# %% [markdown]
# ## Chunked cross-entropy
#
# The last matmul computes V logits per token. For 8,192 tokens of Llama 3 8B on one device, that is 8,192 ·
# 128,256 · 4 bytes = 4.2 GB in float32, and the backward pass needs more arrays of that size. Yet the loss
# needs only two values per token: the logit of the target, and the log-sum-exp (the log of the sum of
# exponentials) of all logits. You can add up both over chunks of u vocabulary entries. With
# `jax.checkpoint`, a chunk's logits are not saved, but recomputed in the backward pass.


# %%
def at_once(w_DV, x_ND, target_N):
    logits_NV = x_ND @ w_DV
    target_N1 = jnp.take_along_axis(logits_NV, target_N[:, None], axis=1)
    return jnp.sum(jax.nn.logsumexp(logits_NV, axis=1, keepdims=True) - target_N1)


def in_chunks(w_DV, x_ND, target_N, chunks=16):
    @jax.checkpoint
    def sums(w_Du, words_u):
        logits_Nu = x_ND @ w_Du
        mine_Nu = words_u == target_N[:, None]
        return jax.nn.logsumexp(logits_Nu, axis=1), jnp.sum(logits_Nu * mine_Nu, axis=1)

    w_kDu = jnp.stack(jnp.split(w_DV, chunks, axis=1))
    words_ku = jnp.arange(w_DV.shape[1]).reshape(chunks, -1)
    log_sums_kN, targets_kN = jax.lax.map(lambda each: sums(*each), (w_kDu, words_ku))
    return jnp.sum(jax.nn.logsumexp(log_sums_kN, axis=0) - targets_kN.sum(axis=0))


# %% [markdown]
# > **Predict.** By what factor do chunks increase the FLOPs of the loss and its gradients?

# %% tags=["hide-input"]
rng, tokens, words = np.random.default_rng(4), 512, 65_536
x_ND, w_DV = rng.normal(size=(tokens, D)), rng.normal(size=(D, words)) / D**0.5
given = np.float32(w_DV), np.float32(x_ND), rng.integers(0, words, tokens)
ways = [jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (at_once, in_chunks)]
once, sliced = (lesson.compiled(way, eight, *given) for way in ways)
assert once.flops == 6 * tokens * D * words, "at once: three matmuls"
assert lesson.same(*(way(*given) for way in ways)), "chunks change the result"
factor = sliced.flops / once.flops

# %%
my_prediction = None  # times
lesson.predicted("FLOPs in chunks", my_prediction, factor, "times", within=0.02)

# %% [markdown]
# The logits are computed twice: four matmuls instead of three.

# %% tags=["hide-input"]
wide = 4 * tokens * words
print(f"logits of {tokens} tokens: {wide / 1e6:.0f} MB")
for name, way in zip(("at once", "in 16 chunks"), ways, strict=True):
    memory = way.lower(*given).compile().memory_analysis().temp_size_in_bytes
    times = f"{memory / wide:.2f} times the logits"
    print(f"{name:12} {memory / 1e6:4.0f} MB of temporary arrays: {times}")

# %% [markdown]
# Do not chunk if the logits fit. For 8,192 tokens of Llama 3 8B, the repeated logits matmul takes 9 ms at peak
# out of a step of 430 ms on an H100, and 19 ms out of 920 ms on a TPU v5p.

# %% tags=["remove-cell"]
for chip, product_ms, step_ms in ((h100, 9, 430), (v5p, 19, 920)):
    fourth = 2 * 8192 * D_ * V_ / chip.peak_flops_per_s * 1e3
    step = (6 * P_ + pairs(8192)) * 8192 / chip.peak_flops_per_s * 1e3
    assert round(fourth) == product_ms, fourth
    assert abs(step / step_ms - 1) < 0.02, step

# %% [markdown]
# ## Latent attention and experts
#
# **Multi-head latent attention** (MLA) computes the keys and values of all heads from one small *latent*
# vector of C elements per token. All heads also share one small key of R elements, with RoPE. During
# generation, a model stores the keys and values of all earlier tokens in the *KV cache*; with MLA, the
# latent and the shared key. Llama 3 8B stores a key and a value for G = 8 heads in 32 layers: 2 · 8 · 128 ·
# 32 bfloat16 elements, or 131,072 bytes per token.
#
# > **Predict.** DeepSeek-V3 has 84 times as many parameters, and 61 layers with H = 128 heads, C = 512 and
# > R = 64. How many bytes does its cache store per token, in bfloat16?


# %% tags=["hide-input"]
def cache_bytes(c, devices=1):
    """Bytes that the first of some devices stores per token."""
    mesh = sharding.make_mesh(f"tensor={devices}")
    arrays = jax.tree.leaves(empty_cache(c, mesh, b=1, slots=1))
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


deepseek = config.preset("deepseek_v3").model
stored = cache_bytes(deepseek)

# %%
my_prediction = None  # bytes
lesson.predicted("DeepSeek-V3, per token", my_prediction, stored, "bytes")

# %% tags=["remove-cell"]
assert stored == 61 * (512 + 64) * 2
each = [cache_bytes(c, 8) for c in (published.model, deepseek)]
assert each == [16_384, 70_272]

# %% [markdown]
# It stores C + R elements per token and layer, for any number of heads: about half as much as Llama 3 8B in
# total. But all heads use the same latent, so `tensor` cannot shard it. With `tensor=8`, each device stores all
# 70,272 bytes of a token; with Llama's cache, one of eight KV heads, 16,384 bytes.
#
# **Experts** (07) replace the feed-forward layer by E smaller ones. All experts need memory, but a token
# uses only a few: 37 of 671 billion parameters in DeepSeek-V3. The axis `expert` shards E, and tokens are
# sent to the devices of their experts.
#
# ## In `model.py`
#
# The project's model is written for the shards of one device, with a collective for each partial sum. It shares
# no code with this page. The next cells compare its logits on `data=2,fsdp=2,tensor=2`, with the trained
# weights, with those of the program by hand.

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
    """Our weights under the names of `model.py`: layers stacked, gains 1."""
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
print(f"difference on 3 axes: {max_change(by_model, by_hand):.0e} of the largest logit")
assert max_change(by_model, by_hand) < 1e-3, "the two models differ"

# %% [markdown]
# ## Exercise 3: write the test
#
# Write a test that finds a leak from the future. `logits_of(tokens_T)` returns `[T, V]`, and position t may
# use only `tokens_T[: t + 1]`. Return True if a model uses more. The checker runs your test on five models:
# the right one; `leaky`; one whose logits include the next token; one that attends to the next token at a
# single position, at the boundary between two devices of `context`; and one that adds a thousandth of the
# mean over all positions to its logits. (A model needs all T tokens. Change a copy of them.)

# %% tags=["hide-input"]
of_row = lambda w, tokens_T, sees_TS: logits(w, tokens_T[None], sees_TS=sees_TS)[0]
whole_row = jax.jit(of_row)
at_seam = CAUSAL_TS.copy()
at_seam[T // 2 - 1, T // 2] = True  # the last position of device 0 of context=2


def remembered(name, sees_TS, change=lambda logits_TV, tokens_T: logits_TV):
    """A cached function from tokens to logits."""

    @cache
    def known(data):
        tokens_T = np.frombuffer(data, np.int32)
        return change(np.asarray(whole_row(trained[name], tokens_T, sees_TS)), tokens_T)

    def logits_of(tokens_T):
        if np.shape(tokens_T) != (T,):
            raise ValueError(f"a model needs {T} tokens: change some, but remove none")
        return known(np.asarray(tokens_T, np.int32).tobytes())

    return logits_of


knows = lambda x_TV, t: x_TV + np.eye(V)[np.roll(t, -1)]
hears = lambda x_TV, t: x_TV + x_TV.mean(axis=0) / 1000

# %% tags=["hide-input"]
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
        (says(1, 1, 1, 1, 1), "You reject the right model. Which logits may change?"),
        (says(1, 0, 0, 0, 0), "Reversed: return True for a model that leaks."),
        (says(0, 1, 1, 0, 1), "One leaks at a single position, which you do not test."),
        (says(0, 1, 0, 0, 1), "You miss models that see exactly one token too far."),
        (says(0, 1, 1, 1, 0), "One leaks a little, everywhere. Is your test exact?"),
        (says(0, 1, 1, 0, 0), "You miss two. Do you test everywhere, and exactly?"),
        (says(0, 0, 0, 0, 0), "You find no leak, but four of the five models leak."),
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
# Change every position in turn, and test that all logits before it stay exactly equal. Equality is not too
# strict: a masked score has weight exp(−∞) = 0, and 0 times any finite number is 0. A mask of −1e4 is
# different: one model learned scores below −1e4, and copied from the future with a loss of nearly 0
# ([minGPT 75](https://github.com/karpathy/minGPT/issues/75)).
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
lesson.expect(check_leaks, (asking(every), "Right"),
              (asking(every, upto=lambda at: None), "right model"),
              (asking([T - 1]), "single position"),
              (asking([T // 2 + 5]), "single position"),
              (asking(every, upto=lambda at: at - 1), "exactly one token"),
              (asking(every, same=near), "a little"),
              (asking([50], same=near), "everywhere, and exactly"),
              (asking([]), "find no leak"),
              (lambda *given: not asking(every)(*given), "Reversed"),
              (cutting, "remove none"),
              (in_place, "read-only"), (leaks, "Nothing there"))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# This trainer shards heads and F over `tensor`. The model is too large to initialize on one device, so each
# device draws its own shards. It runs without errors, `check_vma` is on, and all weights have the right
# shapes, variances and shardings. Seed, data and settings are the same on every mesh, and the loss falls on
# each. But with more devices along `tensor`, it falls less. Fix it.

# %%
letters = lambda name: name.split("_")[1]
spec = lambda name: jax.P(*("tensor" if x in "HGF" else None for x in letters(name)))
LAYERS = [{name: spec(name) for name in fan_in}] * L
W_SPECS = {"table_VD": jax.P(), "layers": LAYERS, "head_DV": jax.P()}


def start(mesh, seed=5):
    """The weights; a device draws its shards of heads and of F."""

    def draw_shards():
        n = jax.lax.axis_size("tensor")
        keys = jax.random.split(jax.random.key(seed), (L, len(fan_in)))

        def own(key, name):
            own_shape = [size[x] // n if x in "HGF" else size[x] for x in letters(name)]
            return jax.random.normal(key, own_shape) / fan_in[name] ** 0.5

        return [dict(zip(fan_in, map(own, row, fan_in), strict=True)) for row in keys]

    drawn = jax.shard_map(draw_shards, mesh=mesh, in_specs=(), out_specs=LAYERS)
    return w | {"layers": jax.jit(drawn)()}


# %%
def sharded_loss(w, row_bT):
    """The mean loss of all devices' rows."""
    x_bTD = w["table_VD"][row_bT[:, :-1]]
    for one in w["layers"]:
        partial_bTD = attention(one, norm(x_bTD), rotate, CAUSAL_TS)
        x_bTD += jax.lax.psum(partial_bTD, "tensor")
        gate_bTf, up_bTf = (norm(x_bTD) @ one[name] for name in ("gate_DF", "up_DF"))
        partial_bTD = (jax.nn.silu(gate_bTf) * up_bTf) @ one["down_FD"]
        x_bTD += jax.lax.psum(partial_bTD, "tensor")
    log_p_bTV = jax.nn.log_softmax(norm(x_bTD) @ w["head_DV"])
    target_bT1 = row_bT[:, 1:, None]
    log_p_bT1 = jnp.take_along_axis(log_p_bTV, target_bT1, axis=-1)
    return jax.lax.psum(-log_p_bT1.sum() / (B * T), "data")


# %%
def run_on(mesh, count=STEPS):
    """The first weights, and the loss of each step."""
    by_device = jax.value_and_grad(sharded_loss)
    specs = dict(in_specs=(W_SPECS, jax.P("data")), out_specs=(jax.P(), W_SPECS))
    on_mesh = jax.shard_map(by_device, mesh=mesh, **specs)

    @jax.jit
    def step(w, moments, row_BT):
        value, grads = on_mesh(w, row_BT)
        change, moments = adam.update(grads, moments)
        return optax.apply_updates(w, change), moments, value

    first = start(mesh)
    return first, train(step, first, count)[1]


# %% tags=["hide-input"] mystnb={"image": {"alt": "Two loss curves over 120 steps that start together; the one with tensor=4 stays above the one with tensor=1."}}
def tensor_mesh(data, tensor):
    kinds = (AxisType.Auto,) * 2
    few = jax.devices()[: data * tensor]
    return jax.make_mesh((data, tensor), ("data", "tensor"), kinds, devices=few)


figure, axes = plt.subplots(figsize=(5, 2.8))
runs = {}
for n, colour in ((1, lesson.NEUTRAL), (4, lesson.COLORS["tensor"])):
    runs[n] = run_on(tensor_mesh(1, n))[1]
    smooth = np.convolve(runs[n], np.ones(10) / 10, "valid")
    last = np.mean(runs[n][-20:])
    label = f"tensor={n}: first {runs[n][0]:.2f}, last 20 steps {last:.2f}"
    axes.plot(np.arange(9, STEPS), smooth, color=colour, label=label)
axes.set(title="Same settings, higher loss on four devices")
axes.set(xlabel="step", ylabel="loss, mean of 10 steps")
legend = axes.legend(loc="upper right")


# %% tags=["hide-input"]
def facts_of(run, data, tensor):
    """Parity with one device; the share of distinct shards; each weight's scale."""
    first, _ = lesson.answered(run)(tensor_mesh(data, tensor), 0)
    first = jax.tree.map(np.asarray, first)
    layers = first["layers"]
    found = [[len({one[name].tobytes() for one in layers}) / L,
              float(not np.array_equal(one["gate_DF"], one["up_DF"]))]
             for one in layers for name in fan_in]  # fmt: skip
    for one in layers:
        for name in fan_in:
            at = [letter in "HGF" for letter in letters(name)].index(True)
            parts = {part.tobytes() for part in np.split(one[name], tensor, axis=at)}
            spread = round(4 * np.std(one[name]) * fan_in[name] ** 0.5)
            found.append([len(parts) / tensor, spread])
    found = np.array([[1.0, 1.0], *found])
    if np.array_equal(found, expected(tensor)):  # right so far, so train two steps
        first, losses = run(tensor_mesh(data, tensor), 2)
        on_one = train(steps["right"], jax.tree.map(np.asarray, first), 2)[1]
        found[0, 0] = lesson.same(np.array(losses), np.array(on_one))
    return found


# %% tags=["hide-input"]
def expected(tensor, differ=1, out=1.0, gates=1.0, parity=1.0):
    """What `facts_of` returns if shards differ or not, or outputs are too large."""
    spread = lambda name: round(4 * (out if name in ("out_HKD", "down_FD") else 1))
    distinct = 1 if differ else 1 / tensor
    ones = [[parity, 1.0], *[[1.0, gates]] * (L * len(fan_in))]
    return np.array(ones + [[distinct, spread(name)] for name in fan_in] * L)


# %% tags=["hide-input", "hide-output"]
def check_run(answer):
    run = lambda data, tensor: facts_of(answer, data, tensor)
    right = lambda data, tensor: expected(tensor)
    large = "Some weights are too large. How many terms does the unsharded sum have?"
    hints = [
        (lambda data, tensor: expected(tensor, differ=0),
         "Unchanged: with more devices, the loss is higher."),
        (lambda data, tensor: expected(tensor, out=tensor**0.5), large),
        (lambda data, tensor: expected(tensor, differ=0, out=tensor**0.5),
         "With more devices, the loss is still higher. And: " + large),
        (lambda data, tensor: expected(tensor, gates=0.0),
         "The loss is right now, but two weights of a layer are identical."),
        (lambda data, tensor: expected(tensor, parity=0.0),
         "From the same first weights, the losses now differ from one device's."),
    ]  # fmt: skip
    done = "Fixed: the model on four devices is as wide as on one."
    return lesson.diagnose(run, [(2, 4)], right, hints, done)


print(check_run(run_on))

# %% [markdown]
# <details><summary>Solution</summary>
#
# In `start`, all devices use the same random key, so all have the *same* shard. Equal shards get
# equal gradients and stay equal. The model behaves like one with 3 heads and F = 40, but costs as much as
# one with 12 heads and F = 160. One line is missing after `n = ..`:
#
# ```python
# own_seed = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index("tensor"))
# ```
#
# Then split `keys` from `own_seed`. `check_vma` cannot detect the bug, because shards may have equal
# values. Parity tests cannot either: they start all meshes with the same weights. It is even better
# to compute each random entry from its index in the unsharded array, as `parameters.init` does. Then the
# weights are the same on every mesh, and you can compare the first losses. Here they differ by 0.1 nats, as
# they would with a different seed.
#
# **Where it happened.** Some trainers gave all tensor-parallel ranks the same seed, for example
# [ms-swift](https://github.com/modelscope/ms-swift/pull/7944). OLMo-core's first fix
# [added the rank to the seed](https://github.com/allenai/OLMo-core/pull/307). With HSDP, the *replicas*
# then started [with different weights](https://github.com/allenai/OLMo-core/pull/319), and the second fix
# made the unsharded weights the same on any number of devices. If you also fold in `data` here, `check_vma`
# rejects it.
# </details>

# %% tags=["remove-cell"]
changed = lesson.rewritten(start, sharded_loss, run_on)
KEYS, DRAW = "split(jax.random.key(seed), (", "jax.random.normal(key, own_shape)"
axis_key = "split(jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index({})), ("
own_key = KEYS, axis_key.format('"tensor"')
all_axes = KEYS, axis_key.format('("data", "tensor")')
narrow = DRAW, DRAW + " * (n**0.5 if name[0] in 'od' else 1)"
one_key = "map(own, row, fan_in)", "map(own, [row[0]] * len(row), fan_in)"
one_device = "jax.tree.map(np.asarray, start(tensor_mesh(1, 1)))"
whole = "first = start(mesh)", f"first = {one_device}"
no_sum = 'x_bTD += jax.lax.psum(partial_bTD, "tensor")', "x_bTD += partial_bTD"
twice = "-log_p_bT1.sum() / (B * T)", "-2 * log_p_bT1.sum() / (B * T)"
assert np.mean(runs[4][-20:]) - np.mean(runs[1][-20:]) > 0.05, "the bug no longer shows"
lesson.expect(check_run, (changed(own_key), "Fixed"), (changed(whole), "Fixed"),
              (run_on, "Unchanged"),
              (changed(own_key, narrow), "Some weights are too large"),
              (changed(narrow), "And: Some weights"),
              (changed(own_key, one_key), "two weights of a layer are identical"),
              (changed(own_key, twice), "the losses now differ"),
              (changed(own_key, no_sum), "It stops"),
              (changed(all_axes), "It stops"),
              (lambda mesh, count: None, "Nothing there"))  # fmt: skip

# %% [markdown]
# ## In one table
#
# The table is for Llama 3 8B in bfloat16. Amounts are per token and layer unless the table says otherwise.
# *Exposed* communication does not overlap with compute.
#
# | letter | sharded over | PyTorch, Megatron-LM | a device stores | sent forward | sent backward | exposed? |
# |---|---|---|---|---|---|---|
# | B rows | `data`, `fsdp` | DDP, DP | its rows | nothing | gradients, once per step | at the end of a step |
# | D = 4,096, of weights | `fsdp` | `fully_shard`, Megatron-FSDP | 1/n of each weight | a layer's weights | weights again, their gradients | with few tokens, or if not prefetched |
# | H = 32, G = 8; F = 14,336 | `tensor` | `ColwiseParallel`, then `RowwiseParallel`; TP | its heads and its slice of F | D elements, twice: 16 kB | the same | yes |
# | T = 8,192 | `context` | `context_parallel`, CP | its positions | 2GK elements, 4 kB | again, and their gradients | a ring overlaps some |
# | L = 32 | `stage` | pipeline schedule, PP | its layers | D elements per stage, 8 kB | the same | its bubble is |
# | V = 128,256 | `tensor` | `loss_parallel`, vocabulary-parallel cross-entropy | its vocabulary entries | 3 values, once per step | D elements, once per step | yes |
# | E (DeepSeek-V3: 256) | `expert` | `ExpertParallel`, EP | its experts | `top_k` · D elements, twice | the same | yes |
#
# **When.** Use `tensor` for up to G devices. Beyond that, keys must be replicated, which `model.py` refuses.
# With G = 8 on H100s, that is one node: 8 GPUs at 450 GB/s. Between nodes a GPU has 50 GB/s, a ninth, so
# shard B and the D of weights there. On TPU v5p, a ring of the torus has 180 GB/s. Shard T if the activations
# of a row do not fit, or if there are fewer rows than devices (09).
#
# ## Three lines to keep
#
# 1. A falling loss does not prove that a model is right. Change future tokens, shift the positions, and
#    compare with a second implementation.
# 2. A dim is cheap to shard if it is the output of one matmul and a later one sums over it: H and F each
#    send D elements per token and layer, while D would send 8.5 times as many.
# 3. A token costs 6P FLOPs, plus 12LHK for each position that it sees. You never need all logits in memory
#    at once.
#
# **Sources.** [RMSNorm](https://arxiv.org/abs/1910.07467), [rotary](https://arxiv.org/abs/2104.09864)
# (3.2), [SwiGLU](https://arxiv.org/abs/2002.05202), [grouped queries](https://arxiv.org/abs/2305.13245),
# [MLA](https://arxiv.org/abs/2405.04434) (2.1), [6N and attention](https://arxiv.org/abs/2204.02311)
# (appendix B), the scaling book's [transformer math](https://jax-ml.github.io/scaling-book/transformers).
