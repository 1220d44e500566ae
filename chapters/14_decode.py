# %% [markdown]
# # 14 · Inference: prefill, decode and the KV cache
#
# A language model generates text in two phases. **Prefill** processes the whole prompt in one forward pass,
# as in training; **decode** then generates one token per step, and each step reads all weights and the *KV
# cache*, the keys and values of all earlier tokens.
#
# So generation has a different bottleneck than training: reading memory, not compute. This page shows how
# many sequences to batch, and which mesh axes reduce the bytes that a device reads. A mesh that is good for
# training can need 1.5 seconds per token.
#
# *Prerequisites:* chapters 00 (roofline), 04 (`tensor`), 06 (combining partial softmaxes).
# *Mesh:* `tensor=4,context=2`, simulated. *Runs in* 35 s on 2 cores. *Reading takes* about 25 minutes.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np

import config
from chapters import lesson, opening
from plan.chips.hardware import CHIPS, Topology, layout, wire_bytes

# %% tags=["hide-input"] mystnb={"image": {"alt": "One layer on eight devices. Above: each stores 52 MiB of weights and a KV cache, 1 MiB for one sequence, 16 MiB for 16 sequences. Below: reading the weights takes 16 microseconds in both cases, reading the caches 0.3 or 5, and compute at most 1."}}
MiB = 2**20


def decode_step(sequences, title, S=2048):
    """One layer on tensor=8: a new token for each sequence of S tokens."""
    held = 2 * opening.PARAMETERS / opening.DEVICES
    one_cache = S * 2 * opening.G * opening.K * 2 / opening.DEVICES
    read_us = lambda size: 1e6 * size / opening.CHIP.hbm_bytes_per_s
    start, caches = read_us(held), read_us(sequences * one_cache)
    flops = 2 * opening.PARAMETERS + 4 * S * opening.H * opening.K
    works = 1e3 * opening.compute_ms(sequences * flops / opening.DEVICES)
    reads = [("weights", 0, start), ("caches" if sequences > 1 else "", start, caches)]
    sizes = {"weights": held / MiB, "KV cache": sequences * one_cache / MiB}
    return opening.Scene(title, sizes, reads, [("", 0, works)])


alone = decode_step(1, "Decode: 1 sequence alone")
in_batch = decode_step(16, "Decode: 16 sequences in a batch")
labels = dict(rows=("memory\nreads", "compute"), units=("MiB", "microseconds"))
title = "A batch shares the weights, but not the caches"
opening.before_after(alone, in_batch, title, **labels)

# %% [markdown]
# The figure shows one decode step in one layer of Llama 3 8B, for sequences of 2,048 tokens on eight H100s of
# `tensor=8`, at peak speed. Sixteen times as many tokens take 1.3 times as long, because the devices wait for
# memory and hardly compute. (Not drawn: two all-reduces of a few kB, with a latency of about 14 us each.)
#
# ## Prefill and decode
#
# In decode, each token depends on the previous one, so a step has one row per sequence. A prompt of 8,192
# tokens has 8,192 rows at once. A matmul of B rows with P weights in bfloat16 costs 2 P B FLOPs and reads 2
# P bytes, for any number of rows. Its time is the longer of the compute time and the memory time (00).
#
# > **Predict.** An H100 has a peak of 989 TFLOP/s and a memory bandwidth of 3.35 TB/s. For a single
# > sequence, how many times as long does Llama 3 8B need for a generated token as for a prompt token?
# > (Count only the weights, at peak rates.)

# %% tags=["hide-input"]
P8 = 8_030_261_248  # weights of Llama 3 8B
v5e, v5p, h100 = (CHIPS[key] for key in ("v5e", "v5p", "h100"))


def matmuls_s(chip, rows, weights=P8):
    """Seconds of all matmuls with weights: compute or memory, whichever is longer."""
    flops, read = 2 * weights * rows, 2 * weights
    return max(flops / chip.peak_flops_per_s, read / chip.hbm_bytes_per_s)


per_read = matmuls_s(h100, 8192) / 8192
ratio = matmuls_s(h100, 1) / per_read

# %%
my_prediction = None  # times
lesson.predicted("generated / prompt", my_prediction, ratio, "times", 0.03)
print("us per token:    prompt tokens     generated tokens")
for chip in (v5e, v5p, h100):
    read, written = matmuls_s(chip, 8192) / 8192, matmuls_s(chip, 1)
    print(f"{chip.name:12}{1e6 * read:16.1f}{1e6 * written:21,.0f}")

# %% [markdown]
# <details><summary>Why</summary>
#
# A generated token takes 2 P / (bytes/s), and a prompt token 2 P / (FLOP/s). P cancels, and FLOP/s divided by
# bytes/s remains.
# </details>
#
# ## How many rows are free
#
# With B rows, compute takes 2 P B / (FLOP/s), and reading the weights takes 2 P / (bytes/s). The two are equal
# at **B\* = FLOP/s divided by bytes/s**, the ridge point of the chip's roofline. So **more sequences per step
# are free, up to B\* of them**: 295 on an H100, 243 on a TPU v5e, 164 on a v5p. (With one byte per weight, B\*
# is half as large, and the step takes half as long.) The cache is different.

# %% tags=["remove-cell"]
ridges = [round(c.peak_flops_per_s / c.hbm_bytes_per_s) for c in (h100, v5e, v5p)]
assert ridges == [295, 243, 164], "the page says these ridges"

# %% [markdown]
# ## The program by hand
#
# Without a cache, each new token would need a forward pass over the whole sequence. So each layer stores a key
# and a value for every token. The program is one transformer block on `tensor=4,context=2`:
#
# | letter | size of | sharded over |
# |---|---|---|
# | T, t | a prompt; the new tokens of a call | - |
# | S, s | slots of the cache per sequence, of all devices and of one | `context` |
# | G, g | key-value heads, of all devices and of one | `tensor` |
# | I | query heads that share a key-value head | - |
# | F | hidden dim of the feed-forward layer | both |
#
# Position p is stored on device p % n along `context`: with n = 2, even positions on device 0, and odd ones on
# device 1. So the shards stay equal while a sequence grows. One function does prefill and decode: it first
# writes the new keys and values, then attends to the whole cache.
#
# A device must skip the positions that another device stores. The program uses a scatter, which drops
# out-of-range writes. (`dynamic_update_slice` would move them to the last slot, silently.)

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp

B, T, S, D, G, I, K, F, V, n = 3, 12, 32, 32, 4, 2, 8, 64, 48, 2
ALL, P, einsum = ("tensor", "context"), jax.sharding.PartitionSpec, jnp.einsum


# %% tags=["by-hand"]
def extend(w, cache, new_Bt, start):
    me, at_t = jax.lax.axis_index("context"), start + jnp.arange(new_Bt.shape[1])
    x_BtD = w["words"][new_Bt] + w["places"][at_t]
    q_BtgIK = einsum("BtD,DgIK->BtgIK", x_BtD, w["q"])
    new = einsum("BtD,zDgK->zBtgK", x_BtD, w["kv"])  # z: keys, then values
    slot_t = jnp.where(at_t % n == me, at_t // n, S)  # S: out of range, not written
    k_BsgK, v_BsgK = cache = cache.at[:, :, slot_t].set(new, mode="drop")
    seen = at_t[:, None, None, None] >= n * jnp.arange(S // n) + me
    raw = jnp.where(seen, einsum("BtgIK,BsgK->BtgIs", q_BtgIK, k_BsgK) / K**0.5, -1e30)
    e = jnp.exp(raw - jax.lax.pmax(raw.max(-1, keepdims=True), "context"))
    parts = e.sum(-1, keepdims=True), einsum("BtgIs,BsgK->BtgIK", e, v_BsgK)
    total, mixed = jax.lax.psum(parts, "context")  # merge the partial softmaxes
    x_BtD += jax.lax.psum(einsum("BtgIK,gIKD->BtD", mixed / total, w["o"]), "tensor")
    x_BtD += jax.lax.psum(jax.nn.gelu(x_BtD @ w["up"]) @ w["down"], ALL)
    return x_BtD @ w["words"].T, cache


# %% tags=["by-hand"]
mesh = jax.make_mesh((4, n), ALL, axis_types=(jax.sharding.AxisType.Auto,) * 2)
w_specs = dict(words=P(), places=P(), q=P(None, "tensor"), kv=P(None, None, "tensor"),
            o=P("tensor"), up=P(None, ALL), down=P(ALL))  # fmt: skip
shapes = dict(words=(V, D), places=(S, D), q=(D, G, I, K), kv=(2, D, G, K),
              o=(G, I, K, D), up=(D, F), down=(F, D))  # fmt: skip
w = {m: jax.random.normal(jax.random.key(ord(m[0])), x) / 4 for m, x in shapes.items()}
slots = P(None, None, "context", "tensor")  # of keys and values, B, S, G, K
specs = dict(in_specs=(w_specs, slots, P(), P()), out_specs=(P(), slots))
step = jax.jit(jax.shard_map(extend, mesh=mesh, **specs))
text_BT, cache, found = jnp.arange(B * T).reshape(B, T), jnp.zeros((2, B, S, G, K)), []
for start in (0, *range(T, S - 1)):  # prefill, then decode one token at a time
    logits_BtV, cache = step(w, cache, text_BT[:, start:], start)
    found.append(logits_BtV[:, -1])
    text_BT = jnp.concatenate([text_BT, found[-1].argmax(-1)[:, None]], axis=1)

# %% tags=["by-hand"]
x_BTD = w["words"][text_BT] + w["places"]  # one device, all at once, no cache
q_BTHK = einsum("BTD,DGIK->BTGIK", x_BTD, w["q"]).reshape(B, S, G * I, K)
both = einsum("BTD,zDGK->zBTGK", x_BTD, w["kv"])
o_BTHK = jax.nn.dot_product_attention(q_BTHK, *both, is_causal=True)
x_BTD += o_BTHK.reshape(B, S, -1) @ w["o"].reshape(-1, D)
x_BTD += jax.nn.gelu(x_BTD @ w["up"]) @ w["down"]
want = (x_BTD @ w["words"].T)[:, T - 1 : -1]
assert jnp.allclose(jnp.stack(found, 1), want, rtol=0, atol=1e-5), "logits differ"
assert (want.argmax(-1) == text_BT[:, T:]).all(), "tokens differ"
print("tokens and logits agree with one device; the first sequence:", text_BT[0, T:])

# %% [markdown]
# What does one decode step send?

# %%
one_step = lesson.compiled(step, mesh, w, cache, text_BT[:, -1:], S - 1)
lesson.listed(one_step)
print("prefill of", T, "tokens:")
prefill = lesson.compiled(step, mesh, w, cache, text_BT[:, :T], 0)
lesson.listed(prefill)

# %% tags=["remove-cell"]
for compiled, t in ((one_step, 1), (prefill, T)):
    by_axes = {}
    for one in compiled.collectives:
        assert one.kind == "all-reduce", one
        axes = tuple(sorted(one.axes))
        by_axes[axes] = by_axes.get(axes, 0) + one.count * one.payload_bytes
    heads = 4 * B * t * I  # bytes of a number for each of the device's 2 query heads
    assert by_axes == {
        ("context",): heads * (K + 2), ("tensor",): 4 * B * t * D,
        ("context", "tensor"): 4 * B * t * D,
    }, by_axes  # fmt: skip

# %% [markdown]
# The bytes grow with the number of new tokens, but not with the cache: keys and values are never sent.
# A layer has four exposed all-reduces, where `tensor` alone has two:
#
# - Two combine the partial softmaxes along `context`: the largest score, and then the sum and K numbers of
#   output per query head. Together they are 4 bytes x 3 sequences x 2 heads x (K + 2) = 240 bytes.
# - Two sum the outputs of attention and MLP, 3 sequences x D = 32 x 4 = 384 bytes each.
#
# ## The KV cache
#
# How large is it? For each token, every layer stores a key and a value for each of its G key-value heads,
# with K values of 2 bytes each: **2 x layers x G x K x 2 bytes**. Grouped-query attention, with G smaller
# than the number H of query heads, reduces this by a factor of H/G. Latent attention (in DeepSeek-V3)
# stores 512 + 64 values per layer, for all heads together.

# %%
MODELS = {  # weights, layers, values stored per layer, and without sharing of heads
    "Llama 3 8B": (P8, 32, 2 * 8 * 128, 2 * 32 * 128),
    "Llama 3 70B": (70_553_706_496, 80, 2 * 8 * 128, 2 * 64 * 128),
    "Llama 3 405B": (405_853_388_800, 126, 2 * 8 * 128, 2 * 128 * 128),
    "DeepSeek-V3": (671_026_419_200, 61, 512 + 64, 2 * 128 * 128),
}
kept = {name: 2 * layers * numbers for name, (_, layers, numbers, _) in MODELS.items()}
print("              weights   bytes/token  unshared heads  131,072 tokens")
for name, (weights, _, numbers, all_heads) in MODELS.items():
    long = f"{kept[name] * 131_072 / 1e9:.1f} GB"
    print(f"{name:13}{2e-9 * weights:6,.0f} GB{kept[name]:14,}"
          f"{all_heads / numbers:10.0f} times{long:>16}")  # fmt: skip

# %% [markdown]
# Each decode step reads the weights once, and the cache of every sequence.
#
# > **Predict.** Take Llama 3 8B and sequences of 8,192 tokens. For how many sequences does a step read as many
# > bytes of cache as of weights?

# %% tags=["hide-input"]
sequence_bytes = 8192 * kept["Llama 3 8B"]
equal = 2 * P8 / sequence_bytes

# %%
my_prediction = None  # sequences
lesson.predicted("equal bytes at", my_prediction, round(equal), "sequences", 0.05)
print(f"cache of one: {sequence_bytes / 1e9:.2f} GB, weights: {2 * P8 / 1e9:.2f} GB")

# %% tags=["remove-cell"]
assert round(equal) == 15, "the page says 15"

# %% [markdown]
# <details><summary>Why</summary>
#
# A sequence has 8,192 x 131,072 bytes = 1.07 GB of cache, and the weights have 16.06 GB. So 15 sequences are
# enough, far fewer than B\*.
# </details>
#
# **The sequences of a batch share the weights, but each has its own cache.** A value of the cache has 2 bytes,
# and each of the H/G query heads that use it needs 2 FLOPs. That is H/G FLOPs per byte, 4 for Llama 3 8B. So
# reading the cache is memory-bound at any batch size. A step of B sequences of S tokens takes about
#
# $$t = \max\left(\frac{2PB}{\text{FLOP/s}}, \frac{2P}{\text{bytes/s}}\right) +
# \frac{B\,S \cdot \text{cache bytes per token}}{\text{bytes/s}}$$
#
# The first term is constant up to B\*, and the second grows from the first sequence on. They add up, because a
# layer reads weights and cache one after the other. (A kernel that prefetches the cache could overlap them.)
#
# How does throughput grow with the batch size, and how does it change the latency of each sequence?

# %% tags=["hide-input"]
batches = [*np.unique(np.geomspace(1, 1024, 60).astype(int))]


def curve(S):
    """Batches of S tokens that fit on one H100, with seconds per step."""
    most = int((h100.memory_bytes - 2 * P8) / (S * kept["Llama 3 8B"]))
    fits = np.unique([B for B in [*batches, 295, most] if most >= B])
    cache_s = S * kept["Llama 3 8B"] / h100.hbm_bytes_per_s
    return fits, np.array([matmuls_s(h100, B) + B * cache_s for B in fits]), cache_s


# %% tags=["hide-input"] mystnb={"image": {"alt": "Tokens per second against milliseconds per token for four context lengths on one H100. All curves rise steeply from 5 milliseconds. The curve for 512 tokens, the darkest, has a mark at B* = 295 sequences, after which it is flat at 27,570 tokens per second. Longer contexts flatten early and end where the memory is full, below B*."}}
figure, ax = plt.subplots(figsize=(5.6, 3.8))
for S, shade in ((512, 1), (2048, 0.7), (8192, 0.5), (32768, 0.35)):
    fits, step_s, cache_s = curve(S)
    ms, rate, look = 1e3 * step_s, fits / step_s, dict(color="black", alpha=shade)
    ax.loglog(ms, rate, **look)
    ax.plot(ms[-1], rate[-1], "o", **look)
    ax.annotate(f"S = {S:,}", (ms[-1], rate[-1]), (6, -4), textcoords="offset points")
    for B in (1, 4, 16, 64, 295):
        if fits[-1] > B:
            x, y = np.interp(B, fits, ms), np.interp(B, fits, rate)
            ax.plot(x, y, "|" if B == 295 else ".", ms=16 if B == 295 else 6, **look)
            where = dict(textcoords="offset points", ha="right", size=9)
            ax.annotate(f"B = {B}" if S == 512 else "", (x, y), (-8, 4), **where)
ax.set(xlabel="latency, ms per token", ylabel="throughput, tokens/s of one H100")
ax.set(xlim=(3.2, 45), ylim=(100, 60_000), title="Weights are shared, caches are not")
ax.set_xticks([5, 10, 20, 40], ["5", "10", "20", "40"])
ax.set_xticks([], minor=True)
ax.text(3.4, 120, "low latency", size=9)
words = ax.text(44, 45_000, "many tokens per dollar", ha="right", va="top", size=9)

# %% tags=["hide-input"]
for S in (512, 2048, 8192, 32768):
    fits, step_s, cache_s = curve(S)
    print(f"S = {S:6,}: {fits[-1]:3} sequences fit, {fits[-1] / step_s[-1]:6,.0f} "
          f"tokens/s; if it only read caches: {1 / cache_s:6,.0f}")  # fmt: skip

# %% tags=["remove-cell"]
fits, step_s, cache_s = curve(512)
assert fits[-1] == 716 and round(fits[-1] / step_s[-1]) == 27_570, "the page says so"
assert np.allclose((fits / step_s)[fits > 295], 27_570, rtol=1e-3), "the curve is flat"
each_us = 1e6 * cache_s, 1e6 * matmuls_s(h100, 1024) / 1024
assert [round(x, 1) for x in each_us] == [20.0, 16.2], each_us
assert curve(2048)[0][-1] < 295, "the page says that only S = 512 reaches B*"

# %% [markdown]
# (The large dots mark the largest batch that fits into the 64 of 80 GB that JAX can use. B\* is 295.) On the
# steep part of a curve, reading the weights takes most of the time. On the flat part, each sequence adds the
# time for its own cache, and throughput cannot exceed bytes/s divided by the cache bytes of a sequence. Only
# sequences of 512 tokens are short enough that B\* of them fit. Each takes 20.0 us for its cache, a limit of
# 49,919 tokens/s. Above B\*, each also takes 16.2 us of compute, so the limit is 27,570 tokens/s.
#
# That is decode only. A server also has to process the prompts.
#
# > **Predict.** Llama 3 70B on 8 H100s serves 256 sequences at once, with prompts of 2,048 tokens and answers
# > of 512. At peak rates, what fraction of the time does prefill take?

# %% tags=["hide-input"]
P70, sequences, prompt, answer = MODELS["Llama 3 70B"][0], 256, 2048, 512
peak, bytes_per_s = 8 * h100.peak_flops_per_s, 8 * h100.hbm_bytes_per_s
cache_read = sequences * (prompt + answer / 2) * kept["Llama 3 70B"]
decode_s = answer * (2 * P70 + cache_read) / bytes_per_s


def prefill_s(chunk):
    """Seconds for all prompts, with this many tokens of one prompt per forward pass."""
    one_pass_s = max(2 * P70 * chunk / peak, 2 * P70 / bytes_per_s)
    return sequences * prompt / chunk * one_pass_s


fraction = prefill_s(prompt) / (prefill_s(prompt) + decode_s)

# %%
my_prediction = None  # between 0 and 1
lesson.predicted("prefill's fraction", my_prediction, fraction, within=0.1)
for chunk in (prompt, 64):
    print(f"chunks of {chunk:5,}: prefill {prefill_s(chunk):4.1f} s")
print(f"decode {decode_s:.1f} s")

# %% [markdown]
# More than half, because there are four times as many prompt tokens as answer tokens. Prefill is
# compute-bound only if a forward pass has more rows than the ridge. With chunks of 64 tokens, each chunk
# reads all weights, and prefill takes almost five times as long.
#
# ## Which axis helps
#
# A mesh axis speeds up decode if it **reduces the bytes that a device reads per step**: weights and cache.
#
# - `tensor` shards both: the weights by columns and rows (04), the cache by heads. It needs two all-reduces per
#   layer, but only of B rows.
# - `context` shards the cache by positions. Each device attends to its own keys, and the partial softmaxes are
#   combined (06).
# - `data` puts different sequences on different devices. Each replica reads all weights.
# - `fsdp` also puts different sequences on different devices, but must *all-gather* the weights for every
#   token.
# - `stage` shards weights and cache by layers, but a token passes the stages one after the other, so its
#   latency is the same as on one device. Throughput grows if other stages compute other sequences meanwhile.
# - `expert` shards the weights of the experts, and sends the tokens to them (07). A step reads every expert
#   that any token of the batch chose. With 8 of 256 experts per token, 100 tokens use 1 - (1 - 8/256)^100 = 96%
#   of the experts.
#
# Llama 3 70B does not fit on one chip. Take 16 TPU v5e chips and 32 sequences of 8,192 tokens.
#
# > **Predict.** With `tensor=16` and a model with 8 key-value heads, how many GB of cache does each device
# > store? (The cache of all 32 sequences is 85.9 GB.)

# %% tags=["hide-input"]
G70, n_v5e, all_GB = 8, 16, 32 * 8192 * kept["Llama 3 70B"] / 1e9
per_device = all_GB / min(G70, n_v5e)

# %%
my_prediction = None  # GB
lesson.predicted("per device", my_prediction, per_device, "GB", 0.02)

# %% [markdown]
# <details><summary>Why</summary>
#
# A head cannot be split, because a query needs the whole key. So with more devices than key-value heads,
# several devices store the same head, and the cache per device stops shrinking.
# </details>
#
# Instead of splitting a head, you can shard positions too:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two drawings of a cache, positions by heads, on 16 devices: sharded over 8 heads, each shard is on two devices; sharded over 8 heads and 2 halves of the positions, each shard is on one device."}}
figure, axes = plt.subplots(2, 1, figsize=(5.6, 3.8))
grid = SimpleNamespace(devices=np.zeros((8, 2)), shape=dict(tensor=8, context=2))
grid.axis_names = tuple(grid.shape)
title = "tensor=16: two devices store each head"
lesson.slices(axes[0], grid, P(None, "tensor"), "SG", title)
both_axes = P("context", "tensor")
title = "tensor=8,context=2: each stores half of the positions"
lesson.slices(axes[1], grid, both_axes, "SG", title, colour_by="context")
title = figure.suptitle("Cache of 8 key-value heads (numbers: devices)", size=11)

# %% [markdown]
# Here are all axes for one step: what a device stores, the shortest times for reading and for sending the
# bytes, and the latency of the collectives, at [about 1 us per
# hop](https://jax-ml.github.io/scaling-book/sharding). In an H100 node, a ring all-reduce over 8 GPUs has 14
# hops. (Compute is left out, because 32 rows are below every ridge.)

# %% tags=["hide-input"]
W70, L70, D70, H70, K70 = 2 * MODELS["Llama 3 70B"][0], 80, 8192, 64, 128


def ways(n, B, cache, hops):
    """Axis -> bytes that a device stores, reads and sends per step, and hops."""
    added = 2 * L70 * wire_bytes("all-reduce", 2 * B * D70, n)
    more = max(n // G70, 1)  # devices along context
    merged = lambda m, H: L70 * wire_bytes("all-reduce", 4 * B * H * (K70 + 2), m)
    return {
        "data": (*2 * (W70 + cache / n,), 0, 0),
        "fsdp": ((W70 + cache) / n, W70 + cache / n,
                 wire_bytes("all-gather", W70, n), L70 * hops / 2),
        "stage": ((W70 + cache) / n, W70 + cache / n, 0, n - 1),
        "context": (*2 * (W70 + cache / n,), merged(n, H70), 2 * L70 * hops),
        "tensor": (*2 * (W70 / n + cache / min(n, G70),), added, 2 * L70 * hops),
        "tensor, context": (*2 * ((W70 + cache) / n,), added + merged(more, H70 / G70),
                            2 * L70 * (hops + 2 * (more - 1))),
    }  # fmt: skip


HOPS = {"v5e:4x4": 12, "v5p:2x2x2": 6, "h100:8": 14}  # of an all-reduce
table = {}

# %% tags=["hide-input"]
for where, n in (("v5e:4x4", 16), ("v5p:2x2x2", 8), ("h100:8", 8)):
    topology = Topology.parse(where)
    chip, link = topology.chip, layout(config.MeshConfig(tensor=n), topology)["tensor"]
    machine = f"{where}, {chip.memory_bytes / 1e9:.1f} GB each"
    print(f"{machine:24} stores GB  reads ms  sends ms  latency ms")
    for axis, sizes in ways(n, 32, 1e9 * all_GB, HOPS[where]).items():
        stored, read, sent, hops = sizes
        times = 1e3 * read / chip.hbm_bytes_per_s, 1e3 * sent / link.bytes_per_s
        table[where, axis] = stored / 1e9, *times
        full = "" if stored < chip.memory_bytes else "  does not fit"
        row = f"{stored / 1e9:10.1f}{times[0]:10.1f}{times[1]:10.2f}{1e-3 * hops:12.2f}"
        print(f"  {axis:22}{row}{full}")

# %% tags=["remove-cell"]
assert 1.4e3 < table["v5e:4x4", "fsdp"][2] < 1.6e3, "the page says a second and a half"
assert 270 < table["h100:8", "fsdp"][2] < 280, "the page says 274 ms"
stored = table["v5e:4x4", "tensor"][0], table["v5e:4x4", "tensor, context"][0]
assert stored[0] > v5e.memory_bytes / 1e9 > stored[1], "the page says that one fits"
more_GB = 1e-9 * L70 * 2 * 2 * D70 * H70 * K70 * (1 / G70 - 1 / 16)  # q and output
assert round(more_GB, 1) == 1.3, more_GB
assert stored[1] + more_GB < v5e.memory_bytes / 1e9, "the program would not fit"

# %% [markdown]
# For each token, the all-gather of `fsdp` sends 15/16 of the weights per device, 132 GB, which takes 1.5
# seconds on these v5e chips. In an H100 node it sends 7/8, 123 GB, in 274 ms. In training, one gather is used
# for thousands of rows. `tensor=16` alone does not fit, because with 8 KV heads, two devices store each head's
# cache. With the cache also sharded over `context`, the step fits, and is the fastest. On 8 devices, `tensor`
# alone is enough. (The `stage` row is the time of one token through all stages.)
#
# **Where do the weights live along `context`?** In the last row of each table, all n devices store different
# shards of the weights, and each device multiplies its own, as the feed-forward layer in the program above
# does. (vLLM [does this](https://github.com/vllm-project/vllm/pull/24864) for attention too, and first
# all-gathers queries between devices with the same key-value head. The program above replicates these
# weights.) **This project cannot do it:** `generate/` replicates weights along `context`. Here are three ways
# on `tensor=8,context=2`:

# %%
links = layout(config.MeshConfig(tensor=8, context=2), Topology.parse("v5e:4x4"))
cache, gathered = 1e9 * all_GB / 16, wire_bytes("all-gather", W70 / 8, 2)
WAYS = {  # bytes of weights that a device stores, reads and sends per token
    "sharded, each used in place": (W70 / 16, W70 / 16, 0),
    "replicated along context": (W70 / 8, W70 / 8, 0),
    "sharded for storage, gathered": (W70 / 16, W70 / 8, gathered),
}
print(f"{'weights along context':31} stores GB  reads ms  gathers ms")
for name, (held, read, sent) in WAYS.items():
    gather_ms = 1e3 * sent / links["context"].bytes_per_s
    read_ms = 1e3 * (read + cache) / v5e.hbm_bytes_per_s
    full = "" if held + cache < v5e.memory_bytes else "  does not fit"
    row = f"{1e-9 * (held + cache):10.1f}{read_ms:10.1f}{gather_ms:12.0f}{full}"
    print(f"{name:31}{row}")

# %% tags=["remove-cell"]
assert 380 < gather_ms < 400, "the page says about 390 ms"
assert full == "" and W70 / 8 + cache > v5e.memory_bytes, "the page says which fit"

# %% [markdown]
# Only the first way reaches the time of the table. Replicated weights need no gather, but do not fit on 16 of
# these chips. Weights that are gathered, as `fsdp` does, fit. But the gather takes about 390 ms per token: the
# two devices along `context` are two hops apart, and get 22.5 GB/s, a quarter of a torus axis.
#
# The communication of `tensor` is latency-bound, because it has 160 all-reduces per token. On a 4x4 slice
# without wraparound links, an all-reduce is a reduce-scatter and an all-gather of 3 hops along each side, 12
# us. From about 35 sequences on, sending the bytes takes longer.
#
# For this case, the scaling book's [chapter on
# serving](https://jax-ml.github.io/scaling-book/applied-inference) finds room for 43 sequences and 19 ms.

# %% tags=["remove-cell"]
room = 16 * 16e9 - W70
assert int(room / (8192 * kept["Llama 3 70B"])) == 42, "the book rounds it to 43"
link = layout(config.MeshConfig(tensor=16), Topology.parse("v5e:4x4"))["tensor"]
alike = 12e-6 * link.bytes_per_s / wire_bytes("all-reduce", 2 * D70, 16)
assert 34 < alike < 36, alike
assert round(8.192e6 * per_read) == 133, "the page says 133 ms"
assert round(8192 * per_read / matmuls_s(h100, 1)) == 28, "the page says 28 steps"
assert round(wire_bytes("all-gather", W70, 16) / 1e9) == 132

# %% [markdown]
# ## Absorbed latent attention
#
# With multi-head latent attention (MLA), a layer stores c, a latent of C numbers per token. The keys of all
# heads are w c. To compute them in each step, you would need a matmul for each earlier token. But a score is
# $q \cdot (w c) = (w^\top q) \cdot c$, so **you can apply w to the query instead**, once, and use the latents
# themselves as keys. The matmul with w is then *absorbed*. The values work the same way, after the weighted
# sum. (RoPE would put a rotation between w and the query, so the rotary key of R numbers is separate.)
#
# All H heads then use each number of the latent, as a key and as a value. So each byte of cache is used for
# H (2C + R)/(C + R) FLOPs, and decode moves from memory-bound to near the ridge:

# %%
C_, R_, H_ = 512, 64, 128
absorbed = H_ * (2 * C_ + R_) / (C_ + R_)
ASKED = {"Llama 3 8B": 32 / 8, "Llama 3 405B": 128 / 8, "DeepSeek-V3": absorbed}
for name, flops_a_byte in ASKED.items():
    print(f"{name:13}{flops_a_byte:6.1f} FLOPs per byte; share of the ridge:", end="")
    for chip in (v5e, v5p, h100):
        ridge = chip.peak_flops_per_s / chip.hbm_bytes_per_s
        print(f" {chip.key} {flops_a_byte / ridge:4.0%}", end="")
    print()

# %% [markdown]
# So MLA stores 57 times fewer bytes than separate keys and values for each head would. But a latent has no
# heads, so `tensor` cannot shard this cache, and each device stores all of it. DeepSeek therefore shards
# the requests: attention on 80 replicas with `tensor=4` (for its weights), and experts over 320 devices
# ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.4.2).
#
# ## Continuous batching
#
# A batch of 8 has 8 *slots*. Sequences end at different lengths, which nobody knows in advance. A *static*
# batch waits for its longest sequence. *Continuous batching* gives a slot to the next request as soon as the
# slot is free, at any step ([Orca](https://www.usenix.org/conference/osdi22/presentation/yu)).

# %%
drawn = np.random.default_rng(0).lognormal(4.5, 0.9, size=400)
lengths = drawn.clip(4, 1024).astype(int)
print(f"400 answers, mean {lengths.mean():.0f} tokens, longest {lengths.max()}")


def static_steps(lengths, slots):
    return sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))


def continuous_steps(lengths, slots):
    ends = [0] * slots  # the step at which each slot is free
    for length in lengths:
        ends[ends.index(min(ends))] += length
    return max(ends)


for slots_ in (8, 32):
    for name, steps in (("static", static_steps), ("continuous", continuous_steps)):
        took = steps(lengths, slots_)
        used = lengths.sum() / (took * slots_)
        print(f"{slots_:2} slots, {name:10}: {took:6,} steps, {used:.0%} of slots busy")

# %% [markdown]
# A cache with space for the longest sequence in every slot wastes memory: only 20% to 38% of such
# caches [held tokens](https://arxiv.org/abs/2309.06180). vLLM's *PagedAttention* allocates small blocks of
# memory through a table.
#
# A long prompt stalls all other requests: 8,192 tokens of Llama 3 8B take an H100 133 ms, as long as 28
# decode steps. *Chunked prefill* splits the prompt into chunks that run together with decode steps, which
# leave most FLOP/s unused. Or prefill runs on separate devices, with a different mesh (18).
#
# **Speculative decoding** uses these FLOP/s differently: a small model drafts some tokens, and the large
# model processes them all in one step, like a prompt, and accepts some of them. Exercise 3 asks for the
# rule that leaves the large model's output distribution unchanged.
#

# ## In `generate/`
#
# The project generates on the training mesh. Requests are sharded over `data`, `fsdp` and `expert`, the
# positions of the cache over `context`, heads and vocabulary over `tensor`, layers and their cache over
# `stage`. MLA is absorbed. Prefill and decode both call `cached_forward` in `generate/cache.py`: the
# training layers, but with a cache. For a test model with MLA, the next cell compares six tokens followed
# by a seventh with all seven at once:

# %% tags=["hide-input"]
import model
import parameters
import sharding
from generate.cache import cached_forward, empty_cache

c = config.preset("tiny", **{"model.n_layers": 2, "model.moe_every": 1}).model
six_axes = sharding.make_mesh("data=2,tensor=2")
params = parameters.init(model.declare(c), six_axes, seed=0)
run = cached_forward(c, six_axes)
ids = np.random.default_rng(1).integers(0, c.vocab_size, (2, 7), dtype=np.int32)
at = np.tile(np.arange(7, dtype=np.int32), (2, 1))
last = lambda t: np.full(2, t, np.int32)
empty = lambda: empty_cache(c, six_axes, 2, 8)
whole, _ = run(params, empty(), ids, at, last(6))
_, six = run(params, empty(), ids[:, :6], at[:, :6], last(5))
seventh, _ = run(params, six, ids[:, 6:], at[:, 6:], last(0))
assert lesson.same(seventh, whole, 1e-4), "decode differs from prefill"
off = np.abs(seventh - whole).max()
print(f"logits of up to {np.abs(whole).max():.2f}, which differ by {off:.0e} at most")

# %% [markdown]
# `generate/engine.py` uses this function for continuous batching: one cache has a fixed number of rows for
# requests, and long prompts are processed in chunks between decode steps. There is no paging. `fsdp` shards
# weights, and costs the all-gather for every token (see `python -m plan --inference`).

# %% [markdown]
# ## Exercise 1: the cache of a device
#
# How many bytes of cache does each device store? There are B sequences of S tokens. The model has `layers`
# layers with G key-value heads of dim K in bfloat16, on `tensor` x `context` devices.


# %%
def device_bytes(layers, G, K, B, S, tensor, context):
    return ...


# %% tags=["hide-input"]
def kept_by(layers, G, K, B, S, tensor, context):
    return 2 * layers * G / min(G, tensor) * K * 2 * B * S / context


times = lambda factor: lambda *args: kept_by(*args) * factor(*args)
BAD_BYTES = [
    (times(lambda _, G, K, B, S, t, c: min(G, t) / t),
     "With `tensor=16` and 8 heads, you split heads. A query needs its whole key."),
    (times(lambda _, G, K, B, S, t, c: min(G, t) * c), "That is for all devices."),
    (times(lambda _, G, K, B, S, t, c: c), "`context` shards the cache, too."),
    (times(lambda _, G, K, B, S, t, c: min(G, t)), "`tensor` shards the cache, too."),
    (times(lambda *_: 1 / 2), "Half of it: count keys and values, 2 bytes per number."),
    (times(lambda *_: 1 / 4), "A quarter: count keys and values, 2 bytes per number."),
    (times(lambda _, G, K, B, *more: 1 / B), "That is the cache of one sequence."),
]  # fmt: skip


check_bytes = lesson.checker(
    [(32, 8, 128, 4, 4096, 4, 1), (80, 8, 128, 32, 8192, 16, 2),
     (126, 8, 64, 3, 512, 8, 4)], kept_by, BAD_BYTES,
    "Right, even with more devices than heads.")  # fmt: skip


print(check_bytes(device_bytes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `2 * layers * G // min(G, tensor) * K * 2 * B * S // context`. Llama 3 70B on `tensor=16` stores as much
# per device as on `tensor=8`. vLLM documents the same for `-tp`: beyond the number of key-value heads, the
# cache is [duplicated](https://docs.vllm.ai/en/latest/serving/context_parallel_deployment.html). `-dcp`
# shards it by positions, on the same GPUs.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_bytes, *BAD_BYTES, (kept_by, "Right"),
              (device_bytes, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 2: the largest batch
#
# Llama 3 70B runs on n chips, with weights (`W70` bytes) and cache (`kept["Llama 3 70B"]` bytes per token)
# both sharded n ways. Users need a token every `limit_s` seconds. How many sequences of S tokens can you serve
# at most? Ignore communication and arithmetic (batches are below the ridge).


# %%
def largest_batch(chip, n, S, limit_s):
    return ...


# %% tags=["hide-input"]
NOMINAL = {"v5e": 16e9, "h100": 80e9}  # bytes of memory in the data sheets


def most_sequences(chip, n, S, limit_s, memory=True, time=True, weights=W70, **other):
    per_chip = NOMINAL[chip.key] if "nominal" in other else chip.memory_bytes
    stored = n * per_chip - weights
    read = n * chip.hbm_bytes_per_s * limit_s - other.get("weights_read", weights)
    room = min([stored] * memory + [read] * time)
    return int(room / (other.get("each", 1) * S * kept["Llama 3 70B"]))


def otherwise(**change):
    return lambda *args: most_sequences(*args, **change)


BAD_BATCHES = [
    (otherwise(time=False), "It fits, but it is too slow. What does a step read?"),
    (otherwise(memory=False), "Fast enough, but does it fit?"),
    (otherwise(weights=0), "You forgot the weights."),
    (otherwise(weights_read=0), "Weights must fit, and a step must read them, too."),
    (otherwise(nominal=True), "A program cannot use all GB of the data sheet."),
    (lambda *args: most_sequences(*args) + 1, "One too many: round down."),
    (lambda chip, n, S, limit_s: most_sequences(chip, n, S, limit_s, weights=n * W70),
     "Each device stores and reads only a shard of the weights."),
    (otherwise(each=1 / 2), "Twice too many: the cache has two bytes per number."),
]  # fmt: skip

# %% tags=["hide-input"]
CASES = [(v5e, 16, 8192, 0.015), (v5e, 16, 8192, 0.1)]
CASES += [(h100, 8, 8192, 0.01), (h100, 8, 16384, 1.0)]
check_batch = lesson.checker(
    CASES, most_sequences, BAD_BATCHES, share=1e-9,
    done="Right: 19 or 48 sequences on 16 v5e, 47 on 8 H100, or 69 long ones.",
)  # fmt: skip


print(check_batch(largest_batch))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Weights and cache must fit into memory, and the chips must be able to read them in `limit_s`: `room =
# min(n * chip.memory_bytes, n * chip.hbm_bytes_per_s * limit_s)`, and then `int((room - W70) / (S *
# kept["Llama 3 70B"]))`. A v5e reads its full memory in 21 ms, an H100 in 19 ms (64 GB that JAX can use).
# If `limit_s` is longer than that, memory capacity limits the batch; otherwise memory bandwidth does.
# </details>

# %% tags=["remove-cell"]
found_ = [most_sequences(*case) for case in CASES]
assert found_ == [19, 48, 47, 69], f"the checker's text is wrong: {found_}"
lesson.expect(
    check_batch,
    *BAD_BATCHES,
    (most_sequences, "Right"),
    (largest_batch, lesson.NOTHING),
)
full_s = [round(1e3 * c.memory_bytes / c.hbm_bytes_per_s) for c in (v5e, h100)]
assert full_s == [21, 19], full_s

# %% [markdown]
# ## Exercise 3: speculative decoding
#
# A small model sampled a token from its probabilities `q_V`. The large model has the probabilities `p_V`.
# Return `keep_V`, the probability of accepting each token, and `instead_V`, the probabilities for sampling
# a replacement if the token is rejected. The resulting token must be distributed as `p_V`, and the
# acceptance rate must be as high as possible.


# %%
def accept(p_V, q_V):
    return ...  # keep_V, instead_V


# %% tags=["hide-input"]
positive = lambda x: np.maximum(x, 0)
unit = lambda x: x / x.sum()
rule = lambda p, q: (np.minimum(1, p / q), unit(positive(p - q)))


def came_out(accept):
    """The output distribution, and how often a draft is accepted."""

    def run(p_V, q_V):
        keep_V, instead_V = lesson.answered(accept)(p_V, q_V)
        drafted = np.sum(q_V * keep_V)
        return q_V * keep_V + (1 - drafted) * np.asarray(instead_V), drafted

    return run


kept_of = lambda p, q: np.minimum(1, p / q)
surplus = lambda p, q: unit(positive(p - q))

# %% tags=["hide-input"]
BAD_RULES = [
    (lambda p, q: (kept_of(p, q), p), "You replace from all of p. But tokens that are "
     "drafted often enough need no replacement."),
    (lambda p, q: (kept_of(p, q), positive(p - q)), "`instead_V` must sum to 1."),
    (lambda p, q: (kept_of(p, q), p - q), "A probability cannot be negative."),
    (lambda p, q: (kept_of(q, p), surplus(p, q)), "Which token is drafted too often?"),
    (lambda p, q: (np.ones_like(p), p), "You accept all drafts of the small model."),
    (lambda p, q: (0 * p, p), "The distribution is right, but you accept no draft."),
    (lambda p, q: (p, surplus(p, q)), "A draft is accepted with p, but drawn with q."),
]  # fmt: skip
NEVER = "You reject every draft of a token that is drafted too often. Keep a part."
HALF = "If p = q, every draft is right, but you reject half of them."
for of in (surplus, lambda p, q: p):
    BAD_RULES += [(lambda p, q, of=of: (1.0 * (p >= q), of(p, q)), NEVER)]
    BAD_RULES += [(lambda p, q, of=of: (p / (p + q), of(p, q)), HALF)]


# %% tags=["hide-input"]
def check_accept(answer):
    cases = [(np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]))]
    cases += [(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.25, 0.25, 0.1]))]
    done = "Right: distributed as p, with 70% and 65% of the drafts accepted."
    right = came_out(rule)
    return lesson.diagnose(answer, cases, right, BAD_RULES, done, run=came_out)


print(check_accept(accept))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `np.minimum(1, p_V / q_V)`, and `surplus / surplus.sum()` with `surplus = np.maximum(p_V - q_V, 0)`. A
# token is drafted and accepted with probability min(p, q). The replacement has to add the rest: p - q where
# p is larger. The sum of this rest is the probability of a rejection
# ([arXiv:2211.17192](https://arxiv.org/abs/2211.17192)).
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_accept, *BAD_RULES, (rule, "Right: dist"), (accept, lesson.NOTHING))

# %% [markdown]
# ## A bug to find
#
# A colleague's server generates 64 sequences, sharded over `data`, with the hidden dim of the model sharded
# over `tensor`. Its test passes: at temperature 0, the sequences on every mesh are those of one device. In
# production, with temperature 1, nobody complains about `data=8`. On other meshes, users report nonsense.
# In this toy language, two words may follow each word, with equal probability, so you can count the
# nonsense.

# %%
WORDS, STEPS, SEQUENCES = 32, 32, 64
pairs = np.random.default_rng(2)
may_follow = np.stack([pairs.permutation(WORDS) for _ in range(2)], axis=1)
likes = 15 * np.eye(WORDS, dtype=np.float32)[may_follow].sum(axis=1).clip(0, 1)
weights = {"up": np.eye(WORDS, dtype=np.float32), "down": likes}


def next_logits(w, word_b):
    """Logits of the next word; the hidden dim is sharded over `tensor`."""
    hidden_bf = jax.nn.relu(jax.nn.one_hot(word_b, WORDS) @ w["up"])
    return jax.lax.psum(hidden_bf @ w["down"], "tensor")


def sample(key, logits_bV, temperature, top=8):
    """Choose each sequence's next word from its `top` most likely ones."""
    best_bk, words_bk = jax.lax.top_k(logits_bV, top)
    pick_b = jax.random.categorical(key, best_bk / max(temperature, 1e-6))
    drawn_b = jnp.take_along_axis(words_bk, pick_b[:, None], axis=1)[:, 0]
    return jnp.where(temperature == 0, words_bk[:, 0], drawn_b)


# %%
def generate(w, first_b, temperature, seed):
    """On one device: STEPS words after the first word of each of its sequences."""
    device = jax.lax.axis_index(("data", "tensor"))
    key = jax.random.fold_in(jax.random.key(seed), device)

    def one_more(word_b, key):
        word_b = sample(key, next_logits(w, word_b), temperature)
        return word_b, word_b

    first_b = jax.lax.pcast(first_b, "tensor", to="varying")
    _, text_Tb = jax.lax.scan(one_more, first_b, jax.random.split(key, STEPS))
    return text_Tb[None]


# %%
def sequences_on(data, tensor, temperature=1.0, seed=0):
    """The sequences of all devices. Their first words do not depend on the mesh."""
    kinds, few = (jax.sharding.AxisType.Auto,) * 2, jax.devices()[: data * tensor]
    axes = ("data", "tensor")
    mesh = jax.make_mesh((data, tensor), axes, axis_types=kinds, devices=few)
    w_specs = {"up": P(None, "tensor"), "down": P("tensor")}
    specs = dict(in_specs=(w_specs, P("data")), out_specs=P("tensor", None, "data"))
    run = lambda w, first_b: generate(w, first_b, temperature, seed)  # on one device
    on_mesh = jax.jit(jax.shard_map(run, mesh=mesh, **specs))
    first_B = np.arange(SEQUENCES, dtype=np.int32) % WORDS
    text_TB = np.asarray(on_mesh(weights, first_B))[0]
    return text_TB


MESHES = (1, 1), (8, 1), (4, 2), (2, 4)
greedy = [sequences_on(*mesh, temperature=0) for mesh in MESHES]
assert all(np.array_equal(one, greedy[0]) for one in greedy)
print("temperature 0: the same sequences as one device, on three meshes")


# %% tags=["hide-input"]
def may(sequences_TB):
    """Whether each word is allowed to follow the previous one."""
    sequences = np.asarray(sequences_TB)
    return (sequences[1:, :, None] == may_follow[sequences[:-1]]).any(axis=-1)


# %%
for data_, tensor_ in ((8, 1), (4, 2), (2, 4)):
    allowed = may(sequences_on(data_, tensor_)).mean()
    print(f"temperature 1, data={data_},tensor={tensor_}: {allowed:.0%} allowed words")


# %% tags=["hide-input"]
def fault_of(words, data):
    """What is wrong with the sequences of a mesh; empty if they are right."""
    if words.shape != (STEPS, SEQUENCES):
        return f"return {STEPS} words of {SEQUENCES} sequences, not {words.shape}."
    if may(words).mean() < 0.99:
        return (f"{may(words).mean():.0%} of the words are allowed. The devices sum "
                "their partial logits: do they read the same word?")  # fmt: skip
    halves = words[:, :WORDS], words[:, WORDS:]  # the first words of both are the same
    if data > 1 and np.array_equal(*halves):
        return "all words are allowed, but the devices along data write the same."
    larger = (words[1:] == may_follow[words[:-1]].max(axis=-1)).mean()
    if abs(larger - 0.5) > 0.05:
        return (f"all words are allowed, but of two, the larger is drawn {larger:.0%} "
                "of the time. How do you choose among the draws?")  # fmt: skip
    return ""


CARRY = ("The scan fails: the words no longer vary along tensor, but the first word is "
         "declared to. That is good news. Which line declares it?")  # fmt: skip
DIFFER = "The scan fails: JAX sees that the words differ along tensor. Why do they?"


# %% tags=["hide-input"]
def stops(error):
    text = str(error)
    if "input carry" not in text:
        first = (text.splitlines() or [""])[0][:150]
        return f"It stops: {type(error).__name__}: {first}"
    ends = re.search(r"(?s)input carry.*?\{V:(.*?)\}", text)
    return CARRY if ends and "tensor" in ends[1] else DIFFER


# %% tags=["hide-input", "hide-output"]
def check_sequences(answer):
    try:
        best = np.asarray(lesson.answered(answer)(1, 1, temperature=0))
        for shape in ((2, 4), (4, 2), (8, 1)):
            sequences = np.asarray(answer(*shape))
            if fault := fault_of(sequences, shape[0]):
                return f"data={shape[0]},tensor={shape[1]}: {fault}"
            if not np.array_equal(answer(*shape, temperature=0), best):
                return "At temperature 0, the words differ from those of one device."
    except lesson.Unanswered:
        return lesson.NOTHING
    except Exception as error:
        return stops(error)
    return "Right on three meshes: all words are allowed, differ, and are not biased."


print(check_sequences(sequences_on))

# %% [markdown]
# Fix the program.
#
# <details><summary>Solution</summary>
#
# Fold only `jax.lax.axis_index("data")` into the random key, and remove `pcast`, because the words no longer
# differ along `tensor`. In `generate`, the key is folded with the index along both axes. But devices along
# `tensor` have shards of *one* model, and must generate the same sequences. With different keys, each continues
# with a different word, and the all-reduce adds partial sums for different sequences.
#
# Two lines hid the bug. JAX tracks that the words differ along `tensor`, and raises an error in the scan
# unless `pcast` declares this as intended. And `[0]` in `sequences_on` returns only one of the copies. The test
# at temperature 0 cannot find it, because equal logits have equal maxima.
#
# This bug is common. In FasterTransformer, each GPU had a different random seed, "resulting in strange
# sentence generation" ([#390](https://github.com/NVIDIA/FasterTransformer/issues/390), 2022). A maintainer
# of Hugging Face's transformers wrote that in `generate` each rank samples a different token, and that the
# beginning may be more or less right, because the first tokens are nearly certain
# ([#36634](https://github.com/huggingface/transformers/issues/36634), 2025). A report describes the same in
# the reference code of gpt-oss ([#270](https://github.com/openai/gpt-oss/issues/270), 2026); the proposed
# fix samples on one rank and broadcasts the token. Even with one seed, rounding can change the token on one
# rank, so SGLang has flags that make the tokens agree
# ([#3060](https://github.com/sgl-project/sglang/pull/3060)).
# </details>


# %% tags=["remove-cell"]
changed = lesson.rewritten(next_logits, sample, generate, sequences_on)
CAST = 'first_b = jax.lax.pcast(first_b, "tensor", to="varying")'

BOTH = 'axis_index(("data", "tensor"))'
by_data, by_tensor = (BOTH, 'axis_index("data")'), (BOTH, 'axis_index("tensor")')
one_key, plain = (f"jax.lax.{BOTH}", "0"), (CAST, "pass")
draws = "sample(key, next_logits(w, word_b), temperature)"
agreed = (draws, f'jax.lax.pmax({draws}, "tensor")')
mine = f'jnp.where(jax.lax.axis_index("tensor") == 0, {draws}, 0)'
sent = (draws, f'jax.lax.psum({mine}, "tensor")')
at_0 = ("temperature == 0", "temperature < 0")
lesson.expect(check_sequences, (sequences_on, "the same word?"),
              (changed(by_tensor), "same word"),
              (changed(by_data, plain), "Right"), (changed(sent, plain), "Right"),
              (changed(by_data), CARRY),
              (changed(plain), DIFFER), (changed(one_key, plain), "write the same"),
              (changed(agreed, plain), "the larger is drawn"),
              (changed(by_data, plain, at_0), "At temperature 0"),
              (lambda *_, **__: ..., lesson.NOTHING),
              (lambda *_: 1 / 0, "It stops"))  # fmt: skip

# %% [markdown]
# ## In one table
#
# For a decode step with B rows, P weights and a cache of `cache` bytes, on n devices:
#
# | | `tensor` | `context` | `data` | `fsdp` | `stage` | `expert` |
# |---|---|---|---|---|---|---|
# | shards | `x_BD @ w_Df`, `k_BSgK` | `q_BHK @ k_BsHK` | `x_bD @ w_DF` | the same, `w_dF -> w_DF` | layers l of L | `x_ND -> x_XD @ w_eDM` |
# | a device reads | 2P/n + cache/min(n, G) | 2P + cache/n | 2P + cache/n | 2P + cache/n | 2P/n + cache/n, n times in a row | experts/n |
# | a device sends | 2 all-reduces of B rows per layer | 2 all-reduces per layer, of B H (K + 2) and B D values | nothing | (n - 1)/n of 2P | B rows per stage (`ppermute`) | all-to-all of the tokens, twice per layer |
# | exposed | yes, latency-bound | yes, latency-bound | - | yes, bandwidth-bound | yes | yes, latency-bound |
# | speeds up a single sequence | yes | long sequences | no | no, much slower | no | reads fewer experts |
# | when, on v5e and v5p | along 1 or 2 torus axes | if n is above G | if the batch is at B* | never | across slices | see 07 |
# | on one H100 node | up to 8 | if G is below 8 | one replica per node | never | - | inside |
# | on two H100 nodes | replicates the cache if n is above G | second axis of the cache | one replica per node, if it fits | never | between nodes | across nodes |
# | vLLM | `-tp` | `-dcp` | `-dp` | - | `-pp` | `--enable-expert-parallel` |
# | JAX; Megatron-LM | `psum`; TP | `pmax` and `psum`; CP | batch dim; DP | `all_gather`; FSDP | `ppermute`; PP | `all_to_all`; EP |
#
# There is no backward pass. In PyTorch, the axes are the same as in training; vLLM and SGLang are the usual
# servers.
#
# ## Three lines to keep
#
# 1. Decode reads all weights and all caches to generate one token per sequence. The sequences of a batch share
#    the weights, up to the ridge of the chip, but not the caches, which are soon most of the bytes.
# 2. An axis helps if it reduces what a device reads: `tensor` up to the number of key-value heads, then
#    `context` for the cache. `fsdp` has to send all weights for every token.
# 3. Devices with shards of the same model must sample the same token.
#
# **Sources.** The scaling book on [inference](https://jax-ml.github.io/scaling-book/inference) and
# [serving](https://jax-ml.github.io/scaling-book/applied-inference); *Efficiently Scaling Transformer
# Inference*, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102); PagedAttention,
# [arXiv:2309.06180](https://arxiv.org/abs/2309.06180); MLA and absorption, DeepSeek-V2,
# [arXiv:2405.04434](https://arxiv.org/abs/2405.04434); one set of devices as two axes in attention and one
# in the feed-forward layer, Helix, [arXiv:2507.07120](https://arxiv.org/abs/2507.07120).
