# %% [markdown]
# # 06 · Context parallelism
#
# Context parallelism shards the positions of each sequence over the devices of a mesh axis. Every device runs
# all layers on its own positions. Only attention communicates, because a query needs the keys and values of
# other devices.
#
# You want it when a batch has fewer sequences than you have devices, or when one sequence is too long for the
# memory of one device. 65,536 tokens are easy to distribute as 16 sequences of 4,096. As a single sequence
# they leave seven of eight devices without work. But if you assign positions to devices in their natural
# order, devices are idle for up to half of attention's time.
#
# *Prerequisites:* chapters 01 (`shard_map`, the collectives) and 02 (gradients). *Mesh:* `context=4`, then
# 8, simulated. *Runs in* 50 s on 2 cores. *Reading takes* 25 minutes, and the exercises an hour.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

from chapters import lesson, opening

# %% tags=["hide-input"]
GiB, T, away = 2**30, opening.TOKENS, 7 / 8  # T: positions of the one sequence
sizes, kv_bytes = opening.PARAMETERS, 2 * 2 * opening.G * opening.K  # per position
saved = 2 * T * (6 * opening.D + kv_bytes // 2 + 3 * opening.F) / GiB  # bf16, no remat
weights = {"weights": (4 / 8 + 2) * sizes / GiB, "gradients": 4 * sizes / 8 / GiB}
weights["optimizer state"] = 8 * sizes / 8 / GiB
pair_flops = 4 * opening.H * opening.K * T * (T + 1) / 2
work = opening.compute_ms(2 * sizes * T + pair_flops)
gather = opening.network_ms(2 * sizes * away)
kv_ms = opening.network_ms(T * kv_bytes * away)
alone, shared = [saved] + [0] * 7, saved / 8

# %% tags=["hide-input"] mystnb={"image": {"alt": "Memory bars of eight devices and a timeline, before and after: device 0 alone holds 9.3 GiB and computes for 64 ms; with context=8 every device holds 1.9 GiB and computes for 8 ms."}}
opening.before_after(
    opening.Scene("FSDP: device 0 has the sequence", weights | {"activations": alone},
                  [("device 0: forward pass", gather, work)],
                  [("", 0, gather, "fsdp")]),
    opening.Scene("context=8: each has an eighth", weights | {"activations": shared},
                  [("", gather, work / 8)],
                  [("", 0, gather, "fsdp"), ("", 2 * gather, kv_ms)]),
    f"One sequence of {T:,} positions: an eighth of the time", "context")  # fmt: skip
axes, style = plt.gcf().axes, dict(va="center", size=8)
text = axes[2].text(3, 1, "weights", **style)
text = axes[3].text(4, 1, "weights, then keys and values", **style)
text = axes[3].text(11, 0, "all 8 devices", **style)

# %% [markdown]
# The figure shows one layer of Llama 3 8B on eight H100s. Weights are sharded as in FSDP (chapter 03) and
# gathered (blue) before the layer; in a model, this can overlap with the layer before. No activation is
# recomputed. Times are arithmetic at peak speed, for a balanced forward pass.
#
# > **Predict.** Attention is causal: a query attends to its own position and all earlier ones. Device i of 8
# > gets the i-th eighth of the positions. How many times the average attention work does the last device do?

# %%
my_prediction = None  # times the average
keys_seen = (np.arange(65_536) + 1).reshape(8, -1).sum(axis=1)  # by device
times = float(keys_seen[-1] / keys_seen.mean())
lesson.predicted("the last of 8", my_prediction, times, "times", within=0.01)

# %% [markdown]
# The query at position p has p + 1 keys, so the last eighth has 15/8 times the average work, and the other
# devices wait for it.
#
# ## One sequence on several devices
#
# Even with activation checkpointing (recomputing activations in the backward pass), training saves the input
# of each layer. In Llama 3 8B, 131,072 positions x a width of 4,096 x 2 bytes x 32 layers are 34 GB. So each
# of n devices along the mesh axis `context` holds S/n of the S positions.
#
# Norms, projections and the MLP treat each position independently, so for them nothing changes. Here is
# attention, for S positions with keys and s positions with queries. There are H query heads. G KV heads have
# the keys and values, and H/G query heads share each. All heads have width K. Capital letters are whole dims,
# lower-case letters a device's shard. A query sees the keys up to its position, `at_s`.

# %%
n, S, H, G, K = 4, 64, 8, 4, 8
at_S = jnp.arange(S)
rng = np.random.default_rng(0)
q_SHK, k_SGK, v_SGK = (np.float32(rng.normal(size=(S, h, K))) for h in (H, G, G))


def attend(q_sHK, k_SGK, v_SGK, at_s, at_S):
    shared = q_sHK.shape[1] // k_SGK.shape[1]
    k_SHK, v_SHK = (jnp.repeat(x, shared, axis=1) for x in (k_SGK, v_SGK))
    scores_HsS = jnp.einsum("sHK,SHK->HsS", q_sHK, k_SHK) / q_sHK.shape[-1] ** 0.5
    seen_sS = at_s[:, None] >= at_S[None, :]
    weights_HsS = jax.nn.softmax(jnp.where(seen_sS, scores_HsS, -jnp.inf))
    return jnp.einsum("HsS,SHK->sHK", weights_HsS, v_SHK)


right_SHK = attend(q_SHK, k_SGK, v_SGK, at_S, at_S)

# %% [markdown]
# Now the same function runs on four devices with 16 positions each, without any communication:

# %%
mesh = jax.make_mesh((n,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
cut = P("context")


def on_mesh(device):
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut))


naive = on_mesh(lambda q, k, v, at_s: attend(q, k, v, at_s, at_s))
off_S = np.abs(naive(q_SHK, k_SGK, v_SGK, at_S) - right_SHK).max(axis=(1, 2))
for i, off_s in enumerate(np.split(off_S, n)):
    print(f"device {i}, positions from {16 * i:2}: off by up to {off_s.max():.2f}")
assert off_S[:16].max() < 1e-5 < 0.5 < off_S[16:].max()

# %% [markdown]
# Device 0 is right, because its positions are the first. The others see only text from their own first
# position on. A model trained like this learns short contexts, but its loss falls.
#
# ## Three ways to communicate
#
# Every query needs the keys and values of other devices. There are three ways, shown for device 1. A row is a
# quarter of the positions, a column a quarter of the heads.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four grids of positions by heads: device 1 holds one row of keys; all rows after a gather; one other row at a time in a ring; one column after an all-to-all."}}
green = lesson.COLORS["context"]
PANELS = {
    "before: its own positions": lambda row, column: 0.6 * (row == 1),
    "gathered: all keys and values": lambda row, column: 0.6,
    "a ring: one more row at a time": lambda row, column: {1: 0.6, 0: 0.3}.get(row, 0),
    "all-to-all: a part of the heads": lambda row, column: 0.6 * (column == 1),
}
tint = lambda shade: (*plt.matplotlib.colors.to_rgb(green), shade)
figure, axes = plt.subplots(2, 2, figsize=(5.4, 5))
for ax, (title, shade) in zip(axes.flat, PANELS.items(), strict=True):
    for row, column in np.ndindex(4, 4):
        query = "q" if (column if "all-to-all" in title else row) == 1 else ""
        look = dict(fc=tint(shade(row, column)), ec=lesson.NEUTRAL, lw=0.5)
        lesson.box(ax, column, row, text=query, size=10, **look)
    ax.set(xlim=(0, 4), ylim=(4, 0), xticks=[], yticks=[], ylabel="positions")
    ax.set(xlabel="heads")
    title = ax.set_title(title, size=9)
title = figure.suptitle("Keys (green) that device 1 has, and its queries (q)", size=11)

# %% [markdown]
# - **All-gather the keys.** After one all-gather of keys and values, each device's queries attend to all of
#   them. This is simple, but every device holds all keys of a layer for a while.
# - **Ring attention.** The devices pass keys and values on, n - 1 times, and attend to those that have
#   arrived. They send the same bytes, but a device holds at most two devices' keys, and can compute while the
#   next ones are in flight.
# - **All-to-all over heads** (Ulysses). Heads are independent, so an all-to-all reshards from positions to
#   heads: each device gets all positions of some heads. A second all-to-all reshards the result back.
#
# Here are the first and the third in code:


# %%
def join(x):
    return jax.lax.all_gather(x, "context", tiled=True)


def gathered(q_sHK, k_sGK, v_sGK, at_s):
    return attend(q_sHK, join(k_sGK), join(v_sGK), at_s, join(at_s))


def over_heads(q_sHK, k_sGK, v_sGK, at_s):
    reshard = functools.partial(jax.lax.all_to_all, axis_name="context", tiled=True)
    to_heads = lambda x: reshard(x, split_axis=1, concat_axis=0)
    at_S, (q_ShK, k_SgK, v_SgK) = join(at_s), map(to_heads, (q_sHK, k_sGK, v_sGK))
    o_ShK = attend(q_ShK, k_SgK, v_SgK, at_S, at_S)
    return reshard(o_ShK, split_axis=0, concat_axis=1)  # back to positions


arrays = q_SHK, k_SGK, v_SGK, at_S
for way in (gathered, over_heads):
    assert lesson.same(on_mesh(way)(*arrays), right_SHK), f"{way.__name__} is wrong"
print("both match a single-device run")

# %% [markdown]
# A device's keys have 16 positions x 4 heads x width 8 x 4 bytes = 2,048 bytes, and its values as many. The
# queries have twice as many, because there are 8 query heads, and so does attention's output.
#
# > **Predict.** How many bytes does a device send in `gathered`, and how many in `over_heads`? (Each of n
# > devices sends (n - 1)/n of the gathered array in an all-gather, and (n - 1)/n of its own array in an
# > all-to-all. Leave out the positions `at_s`.)

# %%
my_prediction_gathered, my_prediction_over_heads = None, None  # bytes


def sent(way):
    found = lesson.compiled(on_mesh(way), mesh, *arrays).collectives
    large = [one for one in found if one.payload_bytes > 256]  # not the positions
    return round(sum(one.count * one.wire_bytes for one in large))


lesson.predicted("gathered", my_prediction_gathered, sent(gathered), "bytes")
lesson.predicted("over heads", my_prediction_over_heads, sent(over_heads), "bytes")

# %% tags=["remove-cell"]
assert (sent(gathered), sent(over_heads)) == (12_288, 9_216), "the sizes have changed"

# %% [markdown]
# ### Which one sends less
#
# Count heads, because each has the same width K. For each position, the all-gather sends 2G heads of keys and
# values to each of n - 1 other devices. In the all-to-all, a position has 2H + 2G heads: H of queries and of
# results, and G of keys and of values. Each goes to *one* device, and 1/n of them stay where they are. So
#
# $$\frac{\text{gather}}{\text{all-to-all}} = \frac{(n-1)\,2G}{\frac{n-1}{n}(2H+2G)} = \frac{n\,G}{H+G}$$
#
# and the all-to-all sends less if **n is more than 1 + H/G**: here the gather sends 4 x 4/12 = 1.33 times as
# much. The more query heads share a KV head, the smaller the keys, and the larger n has to be:


# %% tags=["hide-input"]
def against(name, ratio, most):
    ratios = (f"{ratio(n):5.2f}{' ' if n <= most else '*'}" for n in (2, 4, 8, 16, 64))
    print(f"{name:13}", *ratios)


print("gather/all-to-all, n =    2      4      8     16     64".replace("n = ", "n ="))
MODELS = ("GPT-3", 96, 96), ("Llama 3 8B", 32, 8), ("Llama 3 405B", 128, 8)
for name, H_, G_ in MODELS:
    against(name, lambda n, H=H_, G=G_: n * G / (H + G), G_)
sides = 128 * (192 + 192 + 128 + 128)  # of 128 heads: query, key, value, result
against("DeepSeek-V3", lambda n: n * (512 + 64) / sides, 128)
print("*: more devices than KV heads, see exercise 2")

# %% [markdown]
# The stars mark a limit: **n must divide the number of KV heads**. With 8 of them the all-to-all works for up
# to 8 devices, or up to 2 if `tensor=4` has already sharded the heads. DeepSeek-V3 computes the keys of all
# 128 heads from one latent of 576 values per position, which is cheaper to gather.
#
# ## The ring, by hand
#
# A ring needs one more idea. Attention over all keys is a mean of two results: attention over some of the
# keys, and attention over the others. The weights are the sums of exponentials of the two softmaxes. So the
# program saves this sum with each result, as a logarithm.
#
# You can paste the program into an empty file. Every query head has its own KV head here. `attend_block`
# attends to the keys of one device, and `merge` adds its result to those of earlier steps. `jax.lax.scan`
# loops over the steps of the ring, and passes a *carry* from step to step. `jax.checkpoint` saves only the
# inputs of `merge`, and recomputes it in the backward pass.
#
# The program also counts the query-key pairs that causal attention allows, by device and step. They measure
# the work: two matmuls of width K per pair and head.
#
# > **Predict.** The positions are sharded in order: device 0 has the first 16, device 3 the last. A step
# > takes as long as the device with the most pairs in it. Evenly divided, the 64 x 65/2 = 2,080 pairs would
# > take the time of 520. How many is it for the ring's four steps?


# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

n, S, H, K = 4, 64, 8, 8


def attend_block(q_sHK, at_s, k_SHK, v_SHK, at_S):
    """Softmax over these keys: weighted values, log of its sum, allowed pairs."""
    seen_sS = at_s[:, None] >= at_S[None, :]
    scores_HsS = jnp.einsum("sHK,SHK->HsS", q_sHK, k_SHK) / K**0.5
    # Not -inf: a query may see none of these keys, and -inf - -inf is NaN.
    scores_HsS = jnp.where(seen_sS, scores_HsS, -1e30)
    sum_Hs = jax.nn.logsumexp(scores_HsS, axis=-1)
    weights_HsS = jnp.exp(scores_HsS - sum_Hs[..., None])
    return jnp.einsum("HsS,SHK->HsK", weights_HsS, v_SHK), sum_Hs, jnp.sum(seen_sS)


# %% tags=["by-hand"]
def ring(q_sHK, k_sHK, v_sHK, at_s, wrap=jax.checkpoint):
    def merge(mixed_HsK, sum_Hs, keys):
        new_HsK, new_Hs, pairs = attend_block(q_sHK, at_s, *keys)
        both_Hs = jnp.logaddexp(sum_Hs, new_Hs)
        old_part, new_part = jnp.exp(sum_Hs - both_Hs), jnp.exp(new_Hs - both_Hs)
        mixed_HsK = mixed_HsK * old_part[..., None] + new_HsK * new_part[..., None]
        return mixed_HsK, both_Hs, pairs

    def step(carry, _):
        *so_far, keys = carry
        keys = [jax.lax.ppermute(x, "context", onward) for x in keys]
        *so_far, pairs = wrap(merge)(*so_far, keys)
        return (*so_far, keys), pairs

    n = jax.lax.axis_size("context")
    onward = [(i, (i + 1) % n) for i in range(n)]
    *start, pairs = wrap(attend_block)(q_sHK, at_s, k_sHK, v_sHK, at_s)
    carry, later = jax.lax.scan(step, (*start, [k_sHK, v_sHK, at_s]), length=n - 1)
    return carry[0].swapaxes(0, 1), jnp.append(pairs, later)[None]


# %% tags=["by-hand"]
mesh = jax.make_mesh((n,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
cut = P("context")
run = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=(cut,) * 4, out_specs=(cut, cut)))
q_SHK, k_SHK, v_SHK, d_SHK = jax.random.normal(jax.random.key(0), (4, S, H, K))
in_order = jnp.arange(S)


def one_device(q_SHK, k_SHK, v_SHK):
    return attend_block(q_SHK, in_order, k_SHK, v_SHK, in_order)[0].swapaxes(0, 1)


want, pull = jax.vjp(one_device, q_SHK, k_SHK, v_SHK)
on_ring = lambda *qkv: run(*qkv, in_order)
got, pull_ring, pairs = jax.vjp(on_ring, q_SHK, k_SHK, v_SHK, has_aux=True)
for ours, theirs in zip((got, *pull_ring(d_SHK)), (want, *pull(d_SHK)), strict=True):
    assert jnp.abs(ours - theirs).max() < 1e-4, "the ring differs from one device"
print("result and three gradients match a single-device run")

# %%
my_prediction = None  # pairs
busiest = np.asarray(pairs).max(axis=0)  # pairs: [device, step]
lesson.predicted("the ring takes", my_prediction, int(busiest.sum()), "pairs")

# %% tags=["remove-cell"]
assert np.asarray(pairs).sum(axis=1).tolist() == [136, 392, 648, 904]
assert busiest.sum() == 904 and round(1 - 520 / 904, 2) == 0.42, "42% idle"

# %% [markdown]
# In step r a device has the keys of the device r places before it, modulo n. For device 0 these are *later*
# keys, which its queries must not see: three of its four steps have no work. The ring takes the time of 904
# pairs instead of 520, so the average device is idle for 42% of attention's time. With n devices, the last
# one has nearly 2 - 1/n times the average work. So **with many devices half of attention's time is idle
# time**, for any sequence length. (A real kernel skips blocks that no query sees.)
#
# ### Memory of the backward pass
#
# Without `jax.checkpoint`, a device saves the softmax weights of all steps, H x s x S values, until the
# backward pass. The compiler reports the temporary memory of both passes, here with 512 positions per device:


# %%
def temporary_MB(n, wrap):
    some = dict(axis_types=mesh.axis_types, devices=jax.devices()[:n])
    devices = jax.make_mesh((n,), ("context",), **some)
    device = functools.partial(ring, wrap=wrap)
    specs = dict(mesh=devices, in_specs=(cut,) * 4, out_specs=(cut, cut))
    run = jax.shard_map(device, **specs)

    def gradients(d_SHK, at_S, *qkv):
        return jax.vjp(lambda *qkv: run(*qkv, at_S)[0], *qkv)[1](d_SHK)

    x_SHK = jax.ShapeDtypeStruct((512 * n, H, K), "float32")
    program = jax.jit(gradients).lower(x_SHK, jnp.arange(512 * n), *[x_SHK] * 3)
    return program.compile().memory_analysis().temp_size_in_bytes / 1e6


save_all = lambda function: function
megabytes = {}
for n_ in (4, 8):
    saved, again = temporary_MB(n_, save_all), temporary_MB(n_, jax.checkpoint)
    megabytes[n_] = saved, again
    print(f"n = {n_}, S = {512 * n_:,}: {saved:5.1f} MB, checkpointed {again:.1f} MB")

# %% tags=["remove-cell"]
grows, stays = np.divide(megabytes[8], megabytes[4])
assert grows > 1.7 and stays < 1.1, "only without checkpoints memory grows with n"


def sends(wrap_step):
    """Messages of the forward and backward pass, with `wrap_step` around a step."""
    scan = jax.lax.scan
    jax.lax.scan = lambda step, *args, **more: scan(wrap_step(step), *args, **more)
    try:
        four = jax.shard_map(ring, mesh=mesh, in_specs=(cut,) * 4, out_specs=(cut, cut))
        total = lambda *qkv: jnp.sum(four(*qkv, in_order)[0] ** 2)
        grads = jax.grad(total, argnums=(0, 1, 2))
        found = lesson.compiled(grads, mesh, q_SHK, k_SHK, v_SHK).collectives
    finally:
        jax.lax.scan = scan
    return sum(one.count for one in found if one.kind == "collective-permute")


assert sends(save_all) == 3 * 5, "keys, values, positions; the gradients of two of them"
assert sends(jax.checkpoint) == 3 * (5 + 3), "a checkpointed step repeats its sends"

# %% [markdown]
# Checkpointed, the memory hardly depends on n, because scores exist for one step at a time. (A fused kernel,
# such as FlashAttention, never stores a whole block of them.) The loop saves its carry in each step, so the
# keys and values of all devices still stay in memory. A ring with its own backward pass (`jax.custom_vjp`)
# sends the keys around again instead. Checkpoint `merge`, not `step`, or the backward pass repeats the sends,
# too.
#
# ## Zig-zag
#
# An all-gather does not help, because device 3 has the most pairs in total, too. Here are the pairs by device
# and step of the ring:

# %% tags=["hide-input"] mystnb={"image": {"alt": "A table of four devices by four steps of the ring: each cell has the device whose keys have arrived and the number of allowed pairs; device 0 has no work after its first step, device 3 has 256 pairs in each later step."}}
figure, ax = plt.subplots(figsize=(5.4, 3))
for i, r in np.ndindex(n, n):
    says = f"keys of {(i - r) % n}\n{pairs[i, r]} pairs"
    lesson.box(ax, r, i, text=says, fc=tint(0.75 * float(pairs[i, r]) / 256), lw=0.6)
middle = np.arange(n) + 0.5
ax.set(xlim=(0, n), ylim=(n, 0), xticks=middle, yticks=middle, ylabel="device")
ax.set(xticklabels=[f"step {r}" for r in range(n)], yticklabels=range(n))
title = ax.set_title("In order: keys move down one device per step, work is uneven")

# %% [markdown]
# Later positions have more work, so each device should get an early chunk and a late chunk. Split the
# sequence into 2n chunks, and give device i **chunk i and chunk 2n - 1 - i**. The ring's code stays the same,
# because the positions are sent with the keys.


# %%
def zigzag(n, S):
    """The positions of each device, device after device."""
    chunks = np.arange(S).reshape(2 * n, -1)
    return np.concatenate([chunks[c] for i in range(n) for c in (i, 2 * n - 1 - i)])


at_S = zigzag(n, S)
out_SHK, pairs_zz = run(q_SHK[at_S], k_SHK[at_S], v_SHK[at_S], at_S)
assert lesson.same(out_SHK, want[at_S]), "zig-zag changes the result"
print("device 0 holds positions", *at_S[:16])
print(pairs_zz)
assert np.ptp(np.asarray(pairs_zz), axis=0).max() == 0, "unequal work in a step"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two triangles of queries against keys, shaded by the device that works on them: plain stripes that grow downwards, and zig-zag with an early and a late stripe each; next to them bars of the work of each device, unequal and equal."}}
orders = {"in order": np.arange(S), "zig-zag": at_S}
shades = [tint(0.25 + 0.22 * i) for i in range(n)]
figure, axes = plt.subplots(2, 2, figsize=(5.6, 5), width_ratios=(1.3, 1))
for (ax, bars), (name, order) in zip(axes, orders.items(), strict=True):
    owner_S = np.argsort(order) // (S // n)
    picture = np.zeros((S, S, 4))
    for place in range(S):
        picture[place, : place + 1] = shades[owner_S[place]]
    ax.imshow(picture, interpolation="nearest")
    ax.set(xlabel="keys", ylabel="queries", title=name, xticks=[0, 63], yticks=[0, 63])
    for c in range(0, 2 * n, 1 if name == "zig-zag" else 2):  # on the staircase
        wide = 8 if name == "zig-zag" else 16
        says, right = f"device {owner_S[8 * c]}", c > 4
        at = (8 * c - 1, "right") if right else (8 * c + wide, "left")
        ax.text(at[0], 8 * c + wide / 2, says, ha=at[1], va="center", size=7)
    of_device = [int((np.flatnonzero(owner_S == i) + 1).sum()) for i in range(n)]
    bars.bar(range(n), of_device, color=shades, edgecolor="black", lw=0.6)
    bars.axhline(np.mean(of_device), color=lesson.NEUTRAL, lw=0.8)
    bars.set(xlabel="device", ylabel="allowed pairs", xticks=range(n), ylim=(0, 950))
title = figure.suptitle("Early and late chunks give all devices equal work", size=11)

# %% [markdown]
# Now every device has the same work in each step: 136 pairs and then 128, about half of 16 x 16. Llama 3 used
# this order, but with an all-gather of keys and values instead of a ring ([section
# 3.3.2](https://arxiv.org/abs/2407.21783)). The all-to-all does not need zig-zag: each device has all
# positions, so the work is equal for any mask.
#
# ## Packed documents
#
# Training sequences are often packed: one sequence contains many documents, and a query sees only its own
# document. The work of a position then depends on its place *in its document*, and zig-zag no longer balances
# the work. Below are 4,096 positions for 8 devices, in documents of random lengths.

# %%
MANY, LONG = 8, 4096
draw = np.random.default_rng(4)
lengths = np.int64(np.exp(draw.normal(5.0, 1.4, 200))) + 1
last = int(np.searchsorted(np.cumsum(lengths), LONG))
lengths = np.append(lengths[:last], LONG - lengths[:last].sum())
document_S = np.repeat(np.arange(len(lengths)), lengths)
work_S = np.concatenate([np.arange(1, length + 1) for length in lengths])
print(f"{len(lengths)} documents; lengths", *lengths)
one = LONG * (LONG + 1) / 2  # pairs of one long document
print(f"{work_S.sum():,} allowed pairs, {work_S.sum() / one:.0%} of one document's")

# %% [markdown]
# A *layout*, `owner_S`, assigns each position to a device, and equally many to each. `between` counts the
# allowed pairs in a table: row i is for queries on device i, column j for keys on device j. With gathered
# keys, a device's work is the sum of its row. In a ring, each step waits for its busiest device.


# %%
def between(owner_S):
    """Allowed pairs with the query on device i and the key on device j. [i, j]"""
    place_S = np.arange(LONG)
    seen_SS = (place_S[:, None] >= place_S) & (document_S[:, None] == document_S)
    owned_Sn = np.eye(MANY, dtype=np.float32)[owner_S]
    return owned_Sn.T @ (seen_SS.astype(np.float32) @ owned_Sn)


def costs(owner_S):
    """Time with gathered keys and in a ring; 1 is evenly divided work."""
    pairs_nn = between(owner_S)
    step = lambda r: max(pairs_nn[i, (i - r) % MANY] for i in range(MANY))
    fair = pairs_nn.sum() / MANY
    return pairs_nn.sum(axis=1).max() / fair, sum(map(step, range(MANY))) / fair


def owners(order_S):
    return np.argsort(order_S) // (LONG // MANY)


# %% [markdown]
# > **Predict.** With these documents and zig-zag over the whole sequence, how many times the average work
# > does the busiest of 8 devices have? (For one long document it is 1, or 1.88 in order.)

# %%
my_prediction = None  # times the average work
plain, zz = owners(np.arange(LONG)), owners(zigzag(MANY, LONG))
times = float(costs(zz)[0])
lesson.predicted("the busiest of 8", my_prediction, times, "x", within=0.15)

# %% [markdown]
# ### Layouts by document
#
# Two layouts take documents into account. **Zig-zag in each document** splits every document into its own 2n
# chunks. What is left of a document, fewer than 2n positions, is dealt to the devices one at a time.
# **Greedy** assigns blocks of 32 positions in order of decreasing work, each to the device with the least
# work so far that still has room.


# %%
def by_document(lengths):
    owner_S, start = np.full(LONG, -1), 0
    for length in lengths:
        size = length // (2 * MANY)
        for chunk in range(2 * MANY):
            here = slice(start + chunk * size, start + (chunk + 1) * size)
            owner_S[here] = min(chunk, 2 * MANY - 1 - chunk)
        start += length
    left = np.flatnonzero(owner_S < 0)
    owner_S[left] = np.arange(len(left)) % MANY
    return owner_S


def greedy(work_S, block=32):
    work_B = work_S.reshape(-1, block).sum(axis=1)
    owner_B, load = np.empty(len(work_B), int), np.zeros(MANY)
    room = np.full(MANY, len(work_B) // MANY)
    for b in np.argsort(-work_B, kind="stable"):
        i = min(np.flatnonzero(room), key=lambda i: load[i])
        owner_B[b], load[i], room[i] = i, load[i] + work_B[b], room[i] - 1
    return np.repeat(owner_B, block)


# %%
LAYOUTS = {"in order": plain, "zig-zag": zz}
LAYOUTS |= {"zig-zag in each document": by_document(lengths), "greedy": greedy(work_S)}
print(f"{'':25} gathered    ring     (1: evenly divided)")
for name, owner_S in LAYOUTS.items():
    assert (np.bincount(owner_S) == LONG // MANY).all(), f"{name}: unequal positions"
    print(f"{name:25} {costs(owner_S)[0]:8.2f} {costs(owner_S)[1]:7.2f}")

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four tables of eight devices by eight steps of a ring, shaded by work. In order and with zig-zag, the busiest device of each step has several times the average; with zig-zag in each document all have the same; with greedy blocks each step has a busier device."}}
figure, axes = plt.subplots(2, 2, figsize=(6, 5.8), sharex=True, sharey=True)
for ax, (name, owner_S) in zip(axes.flat, LAYOUTS.items(), strict=True):
    pairs_nn, (i, r) = between(owner_S), np.indices((MANY, MANY))
    work_ir = pairs_nn[i, (i - r) % MANY] / pairs_nn.mean()  # [device, step]
    shown = ax.imshow(work_ir, cmap="Greens", vmin=0, vmax=4)
    for step, busiest in enumerate(work_ir.argmax(axis=0)):
        ax.add_patch(plt.Rectangle((step - 0.5, busiest - 0.5), 1, 1, fill=False))
        dark, most = work_ir[busiest, step] > 3, f"{work_ir[busiest, step]:.1f}"
        look = dict(ha="center", va="center", size=7, color="w" if dark else "k")
        ax.text(step, busiest, most, **look)
    ax.set_title(f"{name}: {costs(owner_S)[1]:.2f}", size=9)
    ax.set(xticks=range(MANY), yticks=range(MANY))
    ax.set(xlabel="step of the ring" if ax in axes[1] else "")
    ax.set(ylabel="device" if ax in axes[:, 0] else "")
figure.colorbar(shown, ax=axes, label="work / average", shrink=0.6, extend="max")
title = figure.suptitle("A step waits for its busiest device (boxed; titles: mean)")

# %% [markdown]
# With zig-zag over the sequence, attention takes 1.36 times as long as with balanced work if keys are
# gathered. In a ring it takes 2.09 times as long, because *every step* waits for its own busiest device.
# Zig-zag in each document is balanced in both cases. Greedy balances only totals, so it suits an all-gather.
#
# Layouts by document differ from batch to batch, so each step reorders tokens, targets and positions
# (`--work.context_layout documents`): all first chunks, then all second ones. Zig-zag over it is
# zig-zag in each document. But 7 positions do not fill a kernel's block of 128.
#
# ## What it costs, in seconds
#
# These times follow from the peak speeds in `plan/chips/hardware.py`, for the forward
# pass of one layer of Llama 3 8B and one sequence of 131,072 positions in bfloat16. A pair costs 4HK FLOPs. In
# a step of the ring with zig-zag, half of s times s pairs are allowed: 2HKs² FLOPs. Meanwhile a device sends
# the keys and values of s positions for the next step, 4GKs bytes. This overlaps fully if it takes less time
# than the matmuls:
#
# $$s \ge 2\,\frac{G}{H}\cdot\frac{\text{FLOP/s of a device}}{\text{bandwidth to the next device, bytes/s}}$$

# %%
from config import MeshConfig
from plan.chips import hardware

T, H_, G_, K_ = 131_072, 32, 8, 128  # Llama 3 8B
keys, pair = 2 * G_ * K_ * 2, 4 * H_ * K_  # bytes per position, FLOPs per pair


# %%
def milliseconds(chips):
    """Matmuls, all-gather, all-to-all; and for a ring's step matmuls, message."""
    topology = hardware.Topology.parse(chips)
    n, peak = topology.chips, topology.chip.peak_flops_per_s
    link = hardware.layout(MeshConfig(context=n), topology)["context"]
    s, traded = T // n, 4 * (H_ + G_) * K_  # bytes per position
    least = 2 * G_ / H_ * peak / link.neighbour_bytes_per_s
    gather = (n - 1) * s * keys / link.bytes_per_s
    trade = (n - 1) / n * s * traded / link.all_to_all_bytes_per_s
    step, message = pair * s * s / 2 / peak, s * keys / link.neighbour_bytes_per_s
    return n, s, least, pair * T * T / 2 / n / peak, gather, trade, step, message


# %%
print("              matmuls  gather  all-to-all    ring's step: matmuls, message")
for chips in ("v5p:2x2x2", "h100:8", "h100:16"):
    n_, s_, least, *seconds = milliseconds(chips)
    a, b, c, d, e = (f"{1e3 * x:.2f} ms" for x in seconds)
    print(f"{chips:9} {a:>12} {b:>8} {c:>8} {d:>18} {e:>10}")
    print(f"          n = {n_}, s = {s_:,}; a ring overlaps from s = {least:,.0f}")

# %% [markdown]
# A ring over two H100 nodes crosses between them twice, each time over one network card of 50 GB/s, and all
# other devices wait. The all-gather uses all cards at once. On v5p the all-to-all sends fewer bytes than the
# all-gather and still takes longer, because on a torus most bytes cross several links.
#
# Inside a node the all-gather takes about 5% of the matmuls' time, so overlap saves at most that. There a
# ring mainly saves memory: the gathered keys and values of a layer take 537 MB, and a ring of 8 holds two
# shards of 67 MB. With chapter 01's latencies, 1 us per hop of v5p and 3.4 us on NVLink, latency dominates
# below 22 positions per device (90 kB) and 374 (1.5 MB).
#
# The threshold for s assumes matmuls at peak and balanced work. The backward pass has 2.5 times the FLOPs. It
# sends twice the bytes: keys and values again (unless they are saved, as above), and their gradients. Chapter
# 09 lists this threshold with those of the other axes.
#
# - **Shard sequences only if you have fewer of them than devices.** With whole sequences, attention sends
#   nothing.
# - **Context before tensor for long sequences.** A layer's two all-gathers and two reduce-scatters along
#   `tensor` send 4D values per position in the forward pass. Context sends 2GK, an eighth of that for Llama 3
#   8B. But each device then needs unsharded weights, so they are stored in shards and gathered, as with FSDP.
#
# ## In the project
#
# `work.context_attention` is `gather`, `ring` or `all_to_all`. `overlap.context.over_context` has all three.
# Here they run on the ring's arrays, in zig-zag order:

# %% tags=["hide-input"]
from config import preset
from overlap import context
from sharding import make_mesh

six_axes, along = make_mesh("context=4"), P(None, "context")
order = zigzag(4, S)
qkv = [np.asarray(x)[None, order] for x in (q_SHK, k_SHK, v_SHK)]
args = *qkv, np.ones((1, S), np.int32)  # one document
specs = dict(mesh=six_axes, in_specs=(along,) * 4, out_specs=along)
for way in ("gather", "ring", "all_to_all"):
    c = preset("tiny", **{"work.context_attention": way}).at_work

    def device(q, k, v, segments, c=c):
        return context.over_context(c, q, (k, v), lambda *same: same, segments)

    project = jax.jit(jax.shard_map(device, **specs))
    assert lesson.same(project(*args)[0], want[order]), way
    found = lesson.compiled(project, six_axes, *args).collectives
    kinds = ", ".join(sorted({one.kind for one in found}))
    wire = sum(one.count * one.wire_bytes for one in found)
    print(f"{way:10} sends {wire:7,.0f} bytes: {kinds}")

# %% [markdown]
# All three match a single-device run.
#
# ## Exercise 1: the same queries on every device
#
# In generation, all devices have the new token's query, and each has the keys of some positions. So no ring
# is needed: each device calls `attend_block` with its keys, and gets `mixed_HsK` and `sum_Hs`. Return the
# attention over all keys, on every device, with all-reduces only (`jax.lax.psum`, `pmax`).


# %%
def combined(mixed_HsK, sum_Hs):
    return ...  # [H, s, K]


# %% tags=["hide-input"]
@functools.cache
def combined_by(combine, times):
    """What each of 4 devices returns, with queries multiplied by `times`."""

    def device(q_SHK, k_sHK, v_sHK, at_s):
        return combine(*attend_block(q_SHK, in_order, k_sHK, v_sHK, at_s)[:2])

    program = lesson.on_each(device, mesh, (P(), cut, cut, cut))
    return np.asarray(program(times * q_SHK, k_SHK, v_SHK, in_order))


add = lambda x: jax.lax.psum(x, "context")
most = lambda x: jax.lax.pmax(x, "context")


def by_weight(weight, divide=True):
    def combine(mixed_HsK, sum_Hs):
        weight_Hs = weight(sum_Hs)
        total_HsK = add(weight_Hs[..., None] * mixed_HsK)
        return total_HsK / add(weight_Hs)[..., None] if divide else total_HsK

    return combine


rescaled = lambda sum_Hs: jnp.exp(sum_Hs - most(sum_Hs))

# %% tags=["hide-input"]
COMBINED_HINTS = [
    (lambda mixed, _: mixed, "That is the result for one device's keys."),
    (by_weight(jnp.ones_like),
     "A plain mean. But one device may have 16 keys that a query sees, another none."),
    (lambda mixed, _: add(mixed),
     "A sum. Each is already a mean: what do its weights add up to?"),
    (by_weight(lambda a: a), "Weighted by the logarithm of the sum, not the sum."),
    (by_weight(rescaled, divide=False), "What do the devices' weights add up to?"),
    (by_weight(lambda a: jnp.float32(a == most(a))), "Only one device's keys count."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_combined(answer):
    whole = lambda times: one_device(times * q_SHK, k_SHK, v_SHK).swapaxes(0, 1)
    right = lambda times: np.stack([whole(times)] * n)
    run = lambda combine: lambda times: combined_by(combine, times)
    done = "Right, on four devices, also with scores in the hundreds."
    more = dict(share=1e-3, run=run)
    cases = [(1.0,), (60.0,)]
    said = lesson.diagnose(answer, cases, right, COMBINED_HINTS, done, **more)
    if said.startswith("Not yet") and lesson.same(run(answer)(1.0), right(1.0)):
        return "Right for small scores. For large ones exp overflows: subtract first."
    return said


print(check_combined(combined))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# weight_Hs = jnp.exp(sum_Hs - jax.lax.pmax(sum_Hs, "context"))
# total_HsK = jax.lax.psum(weight_Hs[..., None] * mixed_HsK, "context")
# return total_HsK / jax.lax.psum(weight_Hs, "context")[..., None]
# ```
#
# The sums can be as large as e^300 and overflow float32, but after the subtraction the weights are at most 1.
# These all-reduces do not grow with the number of keys, so generation can shard a long cache (chapter 14).
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_combined, *COMBINED_HINTS, (by_weight(rescaled), "Right, on four"),
              (by_weight(jnp.exp), "overflows"), (combined, lesson.NOTHING),
              (lambda *_: 1 / 0, "It stops"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: more devices than KV heads
#
# With 8 devices and 2 KV heads, repeat the KV heads until there are at least n (n is a multiple of G, or G
# is a multiple of n). How many bytes does a device then send in the forward pass of one attention, in
# float32? s is its number of positions. The check counts bytes in the compiled program.


# %%
def trade_bytes(n, s, H, G, K):
    return ...


# %% tags=["hide-input"]
@functools.cache
def counted_trade(n, s, H, G, K):
    devices = jax.make_mesh((n,), ("context",), axis_types=mesh.axis_types)

    def device(q_sHK, k_sGK, v_sGK, at_s):
        k, v = (jnp.repeat(x, max(n // G, 1), axis=1) for x in (k_sGK, v_sGK))
        return over_heads(q_sHK, k, v, at_s)

    specs = dict(mesh=devices, in_specs=(cut,) * 4, out_specs=cut)
    shapes = [jax.ShapeDtypeStruct((n * s, h, K), jnp.float32) for h in (H, G, G)]
    shapes.append(jax.ShapeDtypeStruct((n * s,), jnp.int32))
    found = lesson.compiled(jax.shard_map(device, **specs), devices, *shapes)
    traded = [one for one in found.collectives if one.kind == "all-to-all"]
    return sum(one.count * one.wire_bytes for one in traded)


def by_formula(of_heads, share=lambda n: (n - 1) / n):
    return lambda n, s, H, G, K: share(n) * s * K * 4 * of_heads(n, H, G)


ALL_FOUR = lambda n, H, G: 2 * H + 2 * max(n, G)

# %% tags=["hide-input"]
BAD_TRADES = [
    (by_formula(lambda n, H, G: 2 * H + 2 * G),
     "Keys are repeated before they are sent: how many heads are sent?"),
    (by_formula(lambda n, H, G: H + 2 * max(n, G)),
     "The results are missing: which devices need them?"),
    (by_formula(lambda n, H, G: 2 * H + max(n, G)), "Count keys and values."),
    (by_formula(ALL_FOUR, lambda n: 1), "One part is not sent."),
    (by_formula(ALL_FOUR, lambda n: n - 1),
     "n - 1 times all of it? Each device gets a different part."),
    (by_formula(ALL_FOUR, lambda n: 1 / n), "That part stays on the device."),
    (by_formula(lambda n, H, G: H + max(n, G)),
     "Half. How many arrays are exchanged, and how many bytes has a float32?"),
    (by_formula(lambda n, H, G: 4 * H),
     "You repeat keys and values for all H heads. How many are enough for n devices?"),
    (by_formula(lambda n, H, G: 4 * max(n, G)), "Queries and results have H heads."),
    (by_formula(lambda n, H, G: 2 * H), "Keys and values are exchanged, too."),
    (by_formula(lambda n, H, G: 2 * max(n, G)), "Queries and results are missing."),
]  # fmt: skip

# %% tags=["hide-input"]
check_trade = lesson.checker(
    [(4, 16, 8, 4, 8), (8, 8, 16, 2, 4), (4, 6, 8, 2, 8), (2, 8, 16, 4, 8)],
    counted_trade, BAD_TRADES,
    "Right: the bytes of the compiled program in all four cases.")  # fmt: skip


print(check_trade(trade_bytes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `(n - 1) / n * s * K * 4 * (2 * H + 2 * max(n, G))`. Queries are sent and results come back, H heads each.
# Keys and values are sent with max(n, G) heads each. Of every array, a device sends away (n - 1)/n. For
# Llama 3 405B (H = 128, G = 8) at n = 16 that is 2 x 128 + 2 x 16 = 288 heads (272 without repetition). The
# all-gather sends n x 2G = 256, so it still sends less.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_trade, *BAD_TRADES, (by_formula(ALL_FOUR), "Right"),
              (trade_bytes, lesson.NOTHING),
              (lambda n, s, H, G, K: 1, "Not yet"))  # fmt: skip

# %% [markdown]
# ## Exercise 3: sliding-window attention
#
# In many models, most layers attend only to a window: a query at position p sees the keys p - window + 1 to
# p. Here the window is 20, on 4 devices with 16 positions each. Choose the order of the positions, and how
# often keys are passed on (at most 3 times). The result must be right, with as little sent as possible.

# %%
WINDOW = 20


def windowed():
    return ...  # (order of the 64 positions, times that keys are passed on)


# %% tags=["hide-input"]
ONWARD = [(i, (i + 1) % n) for i in range(n)]


def window_of(steps):
    def device(q_sHK, k_sHK, v_sHK, at_s):
        in_flight, scores, values, pairs = (k_sHK, v_sHK, at_s), [], [], 0
        for step in range(steps + 1):
            if step:
                in_flight = [jax.lax.ppermute(x, "context", ONWARD) for x in in_flight]
            k, v, at = in_flight
            seen = (at_s[:, None] >= at) & (at_s[:, None] - at < WINDOW)
            score = jnp.einsum("sHK,SHK->HsS", q_sHK, k) / K**0.5
            scores.append(jnp.where(seen, score, -1e30))
            values.append(v)
            pairs += jnp.sum(seen)
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1))
        return jnp.einsum("HsS,SHK->sHK", weights, jnp.concatenate(values)), pairs[None]

    return device


# %% tags=["hide-input"]
@functools.cache
def ring_window(order, steps):
    order = np.array(order)
    specs = dict(mesh=mesh, in_specs=(cut,) * 4, out_specs=(cut, cut))
    four = jax.jit(jax.shard_map(window_of(steps), **specs))
    out, pairs = four(*(x[order] for x in (q_SHK, k_SHK, v_SHK)), order)
    return np.asarray(out)[np.argsort(order)], np.asarray(pairs)


def why_not(order, steps):
    whole, (got, pairs) = ring_window(order, n - 1)[0], ring_window(order, steps)
    off = np.flatnonzero(np.abs(got - whole).max(axis=(1, 2)) > 1e-4)
    if len(off):
        return f"Position {off[0]} is wrong: its device does not get all keys it needs."
    if steps == 2:
        return f"Right, with 2 sends. Pairs by device: {pairs}."
    if np.abs(ring_window(order, steps - 1)[0] - whole).max() < 1e-4:
        return f"Right, but no query sees the keys of the last of {steps} sends."
    return f"Right, but keys go all the way. Do late positions have more work? {pairs}"


# %% tags=["hide-input"]
@lesson.verdict
def check_window(chosen):
    if not isinstance(chosen, tuple) or len(chosen) != 2 or np.ndim(chosen[1]):
        return "Return two things: the positions, device after device, and an integer."
    order, steps = np.asarray(chosen[0]), chosen[1]
    if order.shape != (S,) or sorted(order.tolist()) != list(range(S)):
        return "The order has to contain each of the 64 positions once."
    if steps not in range(n):
        return "Pass keys on 0 to 3 times: after 3, every device has had all of them."
    return why_not(tuple(order.tolist()), int(steps))


print(check_window(windowed))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `np.arange(S), 2`. With a window, every position from 19 on has the same work, so zig-zag has nothing to
# balance. It even does harm, because it puts distant positions on the same device. If positions are sharded
# in order, the 19 earlier keys of a device's first query are on the two devices before it, because
# ceil((window - 1)/s) = ceil(19/16) = 2. A layer with a window of 128 and shards of 16,384 needs one send, of
# only the last 127 positions. The project (`--model.window`) keeps zig-zag order, because other layers attend
# to everything. Each device has two chunks, and receives one window before each (`halo_attention` in
# `overlap/context.py`).
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_window, (lambda: (np.arange(S), 2), "Right, with 2 sends"),
              (lambda: (np.arange(S), 3), "no query sees"),
              (lambda: (np.arange(S), 0), "Position 16 is"),
              (lambda: (np.arange(S), 1), "Position 32 is"),
              (lambda: (zigzag(n, S), 3), "all the way"),
              (lambda: (zigzag(n, S), 2), "is wrong"),
              (lambda: (np.zeros(S), 2), "once"),
              (lambda: (np.arange(S), 4), "0 to 3"), (lambda: 2, "two things"),
              (windowed, lesson.NOTHING),
              (lambda: 1 / 0, "It stops"))  # fmt: skip

# %% [markdown]
# ## Exercise 4: targets
#
# The target of a position is the next word of the sequence. Positions are sharded in zig-zag order: device i
# holds the i-th part of `tokens_S[order]`. Return the targets in the same order, and a mask that is False
# where no next word exists.


# %%
def targets_of(tokens_S, order):
    return ...  # (targets, mask)


# %% tags=["hide-input"]
WORDS = np.random.default_rng(5).permutation(S)  # all words differ
devices_of = lambda order: 4 if order[7] == 7 else 8
following = lambda tokens, order: np.roll(tokens, -1)[order]
in_text = lambda order: order < S - 1
in_place = lambda order: np.arange(S) < S - 1
rolled = lambda tokens, order: np.roll(
    tokens[order].reshape(devices_of(order), -1), -1, 1).reshape(-1)  # fmt: skip


def without_ends(chunks):
    """Masks the last position of each chunk, with so many chunks per device."""
    last = lambda order: order.reshape(chunks * devices_of(order), -1)[:, -1]
    return lambda order: ~np.isin(order, last(order))


pair = lambda targets, mask: lambda tokens, order: (targets(tokens, order), mask(order))

# %% tags=["hide-input"]
TARGET_HINTS = [
    (pair(rolled, in_text), "What follows the last word that a device holds?"),
    (pair(lambda tokens, order: np.roll(tokens[order], -1), in_text),
     "The next device's words follow only if positions are sharded in order."),
    (pair(rolled, lambda order: without_ends(1)(order) & in_text(order)),
     "You masked one end per device. But a device has two chunks."),
    (pair(following, without_ends(2)),
     "No wrong targets, but the model never learns the words at chunk ends."),
    (pair(lambda tokens, order: tokens[order], in_text),
     "The target of a word is that word."),
    (pair(following, lambda order: np.ones(S, bool)),
     "Right targets. But which word follows the last one of the sequence?"),
    (pair(following, in_place),
     "You masked the last place of the last device. Where is the last position?"),
    (pair(lambda tokens, order: np.roll(tokens, -1), in_place),
     "The right targets, in the order of the text."),
]  # fmt: skip


# %% tags=["hide-input"]
def targets_on(answer):
    def run(n):
        targets, mask = answer(WORDS, zigzag(n, S))
        return np.where(mask, targets, -1), np.asarray(mask, bool)

    return run


# %% tags=["hide-input"]
check_targets = lesson.checker(
    [(4,), (8,)], targets_on(pair(following, in_text)), TARGET_HINTS,
    "Right, on four and on eight devices.", run=targets_on)  # fmt: skip


print(check_targets(targets_of))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `np.roll(tokens_S, -1)[order], order < len(order) - 1`: shift in the order of the text, then shard. If each
# device shifts its own words instead, the end of a chunk gets the first word of another chunk. Of 2n chunks,
# 2n - 2 then end with a wrong target. That is 14 of 63 words here, but only 0.2% of 8,192 words on 8 devices:
# you would not notice that in the loss.
#
# This bug is common, because libraries for one device shift inside the loss. Hugging Face's transformers lost
# labels this way when Ulysses was ported to it
# ([#36607](https://github.com/huggingface/transformers/pull/36607), March 2025). It has accepted
# `shift_labels` since, and models that ignore them are still found
# ([#48570](https://github.com/huggingface/transformers/pull/48570), September 2026). NVIDIA's BioNeMo recipes
# sharded in zig-zag order and let the loss shift until February 2026
# ([#1449](https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449)).
# </details>

# %% tags=["remove-cell"]
lesson.expect(
    check_targets,
    *TARGET_HINTS,
    (pair(following, in_text), "Right, on"),
    (targets_of, lesson.NOTHING),
)
wrong = rolled(WORDS, zigzag(8, S)) != following(WORDS, zigzag(8, S))
assert wrong[in_text(zigzag(8, S))].sum() == 14, "the text says 14 of 63"

# %% [markdown]
# ## A bug to find
#
# A colleague fine-tunes a small model with ring attention in zig-zag order. A document begins with its topic,
# one of 16, and then contains only the four words of this topic. The model was pretrained on one device. All
# meshes agree on rows with a single document. But on packed rows the first loss, with the same weights and
# rows, is higher on several devices. Within 200 steps it falls, and it stays higher.

# %%
V = WIDTH = 32
by_topic = np.tile(np.arange(16, 32), (16, 1))
TOPIC_WORDS = np.random.default_rng(0).permuted(by_topic, axis=1)[:, :4]


def row(seed, documents):
    """Tokens, documents, targets and what counts, each [S], of one row."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.choice(np.arange(1, S), documents - 1, replace=False))
    document_S = np.searchsorted(starts, np.arange(S), side="right")
    topic_S = rng.integers(0, 16, documents)[document_S]
    words_S = TOPIC_WORDS[topic_S, rng.integers(0, 4, S)]
    tokens_S = np.where(np.diff(document_S, prepend=-1) > 0, topic_S, words_S)
    same_S = document_S == np.append(document_S[1:], -1)  # as the next position
    return tokens_S, document_S, np.roll(tokens_S, -1), same_S


# %%
def seen_by(mine, theirs):
    """Which keys each query attends to: earlier ones of the same document."""
    (at_s, document_s), (at_k, document_k) = mine, theirs
    return (at_s[:, None] >= at_k) & (document_s[:, None] == document_k)


def block(q_sD, k_sD, v_sD, seen_ss):
    """Unnormalized sum of values, sum of weights, and largest score."""
    scores_ss = jnp.where(seen_ss, q_sD @ k_sD.T / WIDTH**0.5, -1e30)
    top_s = scores_ss.max(axis=1)
    weights_ss = jnp.exp(scores_ss - top_s[:, None]) * seen_ss
    return weights_ss @ v_sD, weights_ss.sum(axis=1), top_s


def merge_blocks(a, b):
    top_s = jnp.maximum(a[2], b[2])
    left_s, right_s = jnp.exp(a[2] - top_s), jnp.exp(b[2] - top_s)
    mixed_sD = a[0] * left_s[:, None] + b[0] * right_s[:, None]
    return mixed_sD, a[1] * left_s + b[1] * right_s, top_s


# %%
def ring_attention(q_sD, k_sD, v_sD, at_s, document_s):
    devices = jax.lax.axis_size("context")
    onward = [(i, (i + 1) % devices) for i in range(devices)]
    mine, in_flight = (at_s, document_s), (k_sD, v_sD, at_s)
    so_far = block(q_sD, k_sD, v_sD, seen_by(mine, mine))
    for _ in range(1, devices):
        in_flight = [jax.lax.ppermute(x, "context", onward) for x in in_flight]
        k_sD, v_sD, at_k = in_flight
        seen_ss = seen_by(mine, (at_k, document_s))
        so_far = merge_blocks(so_far, block(q_sD, k_sD, v_sD, seen_ss))
    return so_far[0] / so_far[1][:, None]


# %%
def packed_loss(devices):
    """fn(w, *row) -> mean loss over the targets that count, on so many devices."""
    order, auto = zigzag(devices, S), (jax.sharding.AxisType.Auto,)
    ring_mesh = jax.make_mesh((devices,), ("context",), axis_types=auto)

    def device(w, at_s, tokens_s, document_s, target_s, counts_s):
        x_sD = w["words"][tokens_s]
        q_sD, k_sD, v_sD = (x_sD @ w[name] for name in "qkv")
        y_sD = ring_attention(q_sD, k_sD, v_sD, at_s, document_s)
        log_p_sV = jax.nn.log_softmax(y_sD @ w["out"])
        losses_s = -jnp.take_along_axis(log_p_sV, target_s[:, None], axis=1)[:, 0]
        sums = jnp.sum(losses_s * counts_s), jnp.sum(counts_s)
        total, count = jax.lax.psum(sums, "context")
        return total / count

    specs = dict(mesh=ring_mesh, in_specs=(P(), *[cut] * 5), out_specs=P())
    spread = jax.shard_map(device, **specs)
    return lambda w, *row: spread(w, order, *(x[order] for x in row))


# %% tags=["hide-input"]
import optax


def tune(devices, w, seeds, rate=0.005):
    """Train on packed rows. Returns the weights and the loss of each step."""
    adam, loss = optax.adam(rate), packed_loss(devices)

    def step(state, row):
        value, d_w = jax.value_and_grad(loss)(state[0], *row)
        changes, moments = adam.update(d_w, state[1])
        return (optax.apply_updates(state[0], changes), moments), value

    rows = [np.stack(x) for x in zip(*(row(i, 5) for i in seeds), strict=True)]
    run = jax.jit(lambda w: jax.lax.scan(step, (w, adam.init(w)), rows))
    return jax.tree.map(np.asarray, run(w))


draws = np.float32(0.6 * np.random.default_rng(0).normal(size=(5, V, WIDTH)))
random_w = dict(zip(("words", "q", "k", "v", "out"), draws, strict=True))
(pretrained, _), _ = tune(1, random_w, range(1500))
first = {}
for many in (1, 4, 8):
    loss = jax.jit(packed_loss(many))
    for documents in (1, 5):
        losses = [loss(pretrained, *row(i, documents)) for i in range(9000, 9010)]
        first[many, documents] = np.mean(losses)

# %% tags=["hide-input"]
print("first loss, mean of 10 rows:  one document  packed")
for many in (1, 4, 8):
    print(f"{many} devices {first[many, 1]:31.4f} {first[many, 5]:7.4f}")
curves = {many: tune(many, pretrained, range(6000, 6200))[1] for many in (1, 4)}
print("200 steps on packed rows:  first 20, last 50 (mean losses)")
for many, curve in curves.items():
    print(f"{many} devices {curve[:20].mean():28.3f} {curve[-50:].mean():9.3f}")

# %% tags=["remove-cell"]
assert all(abs(first[many, 1] - first[1, 1]) < 1e-4 for many in (4, 8))
assert first[4, 5] > 1.35 * first[1, 5]
ends = {many: curve[-50:].mean() for many, curve in curves.items()}
assert 1.08 * ends[1] < ends[4] < curves[4][:20].mean(), "it falls, and stays higher"


# %% tags=["hide-input"]
@jax.jit
@jax.value_and_grad
def masked_loss(w, seen_SS, tokens_S, document_S, target_S, counts_S):
    x_SD = w["words"][tokens_S]
    mixed_SD, sum_S, _ = block(*(x_SD @ w[name] for name in "qkv"), seen_SS)
    log_p_SV = jax.nn.log_softmax((mixed_SD / sum_S[:, None]) @ w["out"])
    return -jnp.sum(log_p_SV[np.arange(S), target_S] * counts_S) / jnp.sum(counts_S)


# Loss and gradient on one device, if ids are right in so many steps of a ring.
def with_ids(right, *more):
    def on_one(devices, documents):
        one = row(77, documents)
        seen_SS = lesson.seen_in_ring(zigzag(devices, S), devices, one[1], right, *more)
        return masked_loss(pretrained, seen_SS, *one)

    return on_one


# %% tags=["hide-input", "hide-output"]
BAD_RINGS = [
    (with_ids(0), "Unchanged."),
    (with_ids(1),
     "The ids are right in the first step of the ring, and stay those in later steps."),
    (with_ids(0, False), "Now queries attend to all documents of the other devices."),
    (with_ids(S, True, 0),
     "Now queries attend to keys of their own device only. Look at a single document."),
]  # fmt: skip


def check_packed(answer):
    of = lambda devices: jax.value_and_grad(lesson.answered(answer)(devices))
    meshed = functools.cache(lambda devices: jax.jit(of(devices)))
    run = lambda devices, documents: meshed(devices)(pretrained, *row(77, documents))
    cases, done = [(4, 5), (2, 5), (4, 1)], "Right: loss and gradient match one device."
    return lesson.diagnose(run, cases, with_ids(S), BAD_RINGS, done, 1e-3)


print(check_packed(packed_loss))

# %% [markdown]
# Fix the program. The check compares loss and gradient on 2 and on 4 devices with one device.
#
# <details><summary>Solution</summary>
#
# In a step of the ring, `seen_by` compares the documents of the queries with those of the *local* keys,
# although the keys of another device have arrived. The document IDs have to travel with the keys: append
# `document_s` to `in_flight`, unpack `k_sD, v_sD, at_k, document_k`, and pass `(at_k, document_k)`. In a row
# with one document all IDs are equal, and on one device the loop never runs. So a test of either kind passes.
#
# In axolotl, one of the ring attention adapters accepted position IDs and document boundaries and used
# neither. On packed rows over two GPUs, the loss of step 0 was 1.83 times that of one GPU (5.81 instead of
# 3.17), and on a row with one document the losses were identical
# ([#3608](https://github.com/axolotl-ai-cloud/axolotl/issues/3608),
# [#3867](https://github.com/axolotl-ai-cloud/axolotl/pull/3867), July 2026). Such a run trains, because the
# loss falls from wherever it starts. Hugging Face's TRL recommended packing with context parallelism in its
# documentation, while the masks of all layers were replaced by a causal one. It now refuses the combination.
# A probe that needs no reference run found it: change one token of the first of two documents, and count the
# positions whose output changes. It was 100% instead of 50%
# ([#6843](https://github.com/huggingface/trl/pull/6843), August 2026).
# </details>


# %% tags=["remove-cell"]
def repaired(body):
    """packed_loss with another ring_attention."""

    def of(devices):
        def call(w, *row):
            with lesson.edited(packed_loss, ring_attention=body):
                return packed_loss(devices)(w, *row)

        return call

    return of


def ring_body(same=None, steps=S):
    def ring(q_sD, k_sD, v_sD, at_s, document_s):
        devices = jax.lax.axis_size("context")
        onward = [(i, (i + 1) % devices) for i in range(devices)]
        mine, moving, ids = (at_s, document_s), (k_sD, v_sD, at_s), document_s
        so_far = block(q_sD, k_sD, v_sD, seen_by(mine, mine))
        for _ in range(1, min(devices, steps)):
            moving = [jax.lax.ppermute(x, "context", onward) for x in moving]
            ids = jax.lax.ppermute(document_s if same else ids, "context", onward)
            seen = seen_by(mine, (moving[2], ids))
            if same == "causal":
                seen = at_s[:, None] >= moving[2]
            so_far = merge_blocks(so_far, block(q_sD, *moving[:2], seen))
        return so_far[0] / so_far[1][:, None]

    return repaired(ring)


hints = [hint for _, hint in BAD_RINGS]
lesson.expect(check_packed, (packed_loss, hints[0]), (ring_body(), "Right"),
              (ring_body(same="once"), hints[1]),
              (ring_body(same="causal"), hints[2]), (ring_body(steps=1), hints[3]),
              (lambda n: ..., lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## In one table
#
# | | all-gather of keys | ring | all-to-all over heads |
# |---|---|---|---|
# | shapes | `q_sHK, k_SGK -> o_sHK` | the same, `k_sGK` by `k_sGK` | `q_ShK, k_SgK -> o_ShK -> o_sHK` |
# | a device holds | all keys of a layer | two devices' keys | all positions of H/n heads |
# | forward | keys, values: all-gather | keys, values: n - 1 `ppermute`s | queries, keys, values, results: all-to-all |
# | backward | their gradients: reduce-scatter | their gradients; keys too, if not saved | the four back: all-to-all |
# | values sent | (n - 1) s 2GK | (n - 1) s 2GK | (n - 1)/n s (2H + 2G) K |
# | exposed | yes | no, if s is large enough | yes, twice |
# | work is balanced with | zig-zag (in PyTorch: head-tail); with documents a layout by document | the same, in every step | any layout and mask |
# | choose it if | the keys of a layer fit in memory | they do not, or s is above the threshold | n is more than 1 + H/G and divides G, on a switched network |
# | JAX | `lax.all_gather` | `lax.ppermute` | `lax.all_to_all` |
# | PyTorch | `context_parallel`, `allgather` | `context_parallel`, `alltoall` (which passes keys on, as a ring) | Ulysses: DeepSpeed `DistributedAttention` |
# | Megatron | `cp_comm_type` `all_gather` | `p2p` | `a2a` |
#
# ## Three lines to keep
#
# 1. Sharding positions affects only attention. An all-gather and a ring both send keys and values, the same
#    bytes; an all-to-all reshards from positions to heads, with fewer bytes if n is more than 1 + H/G.
# 2. If positions are sharded in order, the last device has nearly twice the average work; an early and a late
#    chunk per device balance it. With packed documents, count the query-key pairs again, by device and by
#    ring step.
# 3. Compute whatever depends on the next position, such as the target, before you shard positions.
#
# **Sources.** Ring attention, [arXiv:2310.01889](https://arxiv.org/abs/2310.01889); DeepSpeed-Ulysses,
# [arXiv:2309.14509](https://arxiv.org/abs/2309.14509); Llama 3,
# [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2; merging partial softmaxes,
# FlashAttention-2, [arXiv:2307.08691](https://arxiv.org/abs/2307.08691).
