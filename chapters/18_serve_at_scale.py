# %% [markdown]
# # 18 · Inference at scale: data-parallel attention, prefix caches, disaggregation
#
# Chapter 14 serves one model on one slice. A large service has hundreds of devices, prompts that begin alike,
# and users who notice when a token is late. Three techniques help. **Data-parallel attention** gives each
# device other sequences instead of other heads, so that no two devices store the same KV cache. A **prefix
# cache** computes the common beginning of prompts once. **Disaggregation** runs prefill and decode on
# different devices.
#
# Each technique stores or sends some bytes to save others. This page counts both, and shows when a technique
# does not pay.
#
# *Prerequisites:* 14 (prefill, decode, KV cache), 04 (`tensor`), 07 (experts).
# *Mesh:* `tensor=8`, simulated. *Runs in* 30 s on 2 cores. *Reading takes* 20 minutes, 50 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import functools

import matplotlib.pyplot as plt
import numpy as np

import config
from chapters import lesson, opening
from plan.answer import at_scale, inference
from plan.chips import hardware

# %% tags=["hide-input"] mystnb={"image": {"alt": "The attention of one layer on eight devices. Left, split by head: each device stores few weights and 576 MiB of KV cache, and reads for 0.20 ms. Right, split by sequence: each stores all weights and 72 MiB of cache, and reads for 0.13 ms."}}
MiB, n, h100 = 2**20, opening.DEVICES, hardware.CHIPS["h100"]
HEADS = 2 * (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168)  # bytes, by head
DOWN = 2 * 7168 * (1536 + 512 + 64)  # bytes of weights that have no head
LATENT = 2 * (512 + 64)  # bytes per token
cached = 64 * 8192  # tokens of all sequences


def attention(title, weights, cache):
    """The reads of one layer's attention on each device."""
    us = lambda size: 1e6 * size / h100.hbm_bytes_per_s
    name = lambda text, size: text if us(size) > 30 else ""  # or it leaves the bar
    reads = [(name("weights", weights), 0, us(weights))]
    reads += [(name("cache", cache), us(weights), us(cache))]
    flops = 2 * 128 * (2 * 512 + 64) * cached / n
    computing = [("", 0, 1e3 * opening.compute_ms(flops))]
    sizes = {"weights": weights / MiB, "KV cache": cache / MiB}
    return opening.Scene(title, sizes, reads, computing)


by_heads = attention("Split by head", DOWN + HEADS / n, LATENT * cached)
by_seqs = attention("Split by sequence", DOWN + HEADS, LATENT * cached / n)
labels = dict(rows=("memory\nreads", "compute"), units=("MiB", "microseconds"))
title = "Splitting by sequence replicates weights, not caches"
opening.before_after(by_heads, by_seqs, title, **labels)

# %% [markdown]
# The figure shows the attention of one layer of DeepSeek-V3 in a decode step on eight H100s, for 64 sequences
# of 8,192 tokens, in bfloat16 and at peak speed. (The whole model needs more devices.) Its latent attention
# (MLA, chapter 14) has a single latent per token, and no heads to split. So with `tensor=8`, every device
# stores the latents of all sequences.
#
# ## Data-parallel attention
#
# On the right, each device has all heads, but only 8 of the 64 sequences. This is data parallelism for
# attention alone. The feed-forward layers stay sharded over all devices, by hidden dim or by expert, because
# a copy of their weights would not fit on a device.
#
# > **Predict.** In bfloat16, a layer has 343.9 MB of attention weights that `tensor` splits by head, and
# > 1,152 bytes of cache per token. From how many cached tokens on does a device read less if attention is
# > split by sequence? Count the tokens of all sequences of the 8 devices.

# %% tags=["hide-input"]
enough = HEADS * (1 - 1 / n) / (LATENT * (1 - 1 / n))

# %%
my_prediction = None  # tokens
lesson.predicted("split sequences from", my_prediction, round(enough), "tokens", 0.03)
for name, scene in {"by head": by_heads, "by sequence": by_seqs}.items():
    print(f"{name:12} {sum(scene.memory.values()):6.0f} MiB per device and layer")

# %% tags=["remove-cell"]
assert round(HEADS / 1e6, 1) == 343.9 and LATENT == 1152, "the page says so"
assert round(enough) == 298_553, "the page says so"
ends = [sum(scene.compute[-1][1:]) / 1e3 for scene in (by_heads, by_seqs)]
assert [round(end, 2) for end in ends] == [0.20, 0.13], ends
assert [round(scene.memory["KV cache"]) for scene in (by_heads, by_seqs)] == [576, 72]

# %% [markdown]
# <details><summary>Why</summary>
#
# By head, a device reads 1/n of these weights, and the cache of all sequences. By sequence, it reads all of
# these weights, and 1/n of the cache. The difference is (1 - 1/n) of each, so n cancels, and 343.9 MB / 1,152
# bytes = 298,553 tokens remain: 37 sequences of 8,192 tokens, or 584 of 512. Weights in 8 bits halve it.
# </details>
#
# With the 524,288 tokens of the figure, a device needs 217 MiB less per layer. Over 61 layers, that is 13.9
# GB, in which more sequences fit.
#
# What does each way send? The next program runs both. Its cache has one latent of C numbers per token, which
# is key and value for all H heads (absorbed MLA). B sequences have S slots each.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp

B, S, D, H, C, F, n = 16, 6, 32, 8, 12, 64, 8
P, einsum, axis = jax.sharding.PartitionSpec, jnp.einsum, "tensor"


# %% tags=["by-hand"]
def attend(w, cache_BSC, x_BD, slot):
    cache_BSC = cache_BSC.at[:, slot].set(x_BD @ w["latent"])
    q_BHC = einsum("BD,DHC->BHC", x_BD, w["query"])
    score_BHS = einsum("BHC,BSC->BHS", q_BHC, cache_BSC)
    weight_BHS = jax.nn.softmax(jnp.where(jnp.arange(S) <= slot, score_BHS, -1e30))
    mixed_BHC = einsum("BHS,BSC->BHC", weight_BHS, cache_BSC)
    return einsum("BHC,HCD->BD", mixed_BHC, w["out"]), cache_BSC


gather = lambda x_bD: jax.lax.all_gather(x_bD, axis, tiled=True)
scatter = lambda partial_BD: jax.lax.psum_scatter(partial_BD, axis, tiled=True)
mlp = lambda w, x_BD: jax.nn.gelu(x_BD @ w["up"]) @ w["down"]


# %% tags=["by-hand"]
def by_head(w, cache_1BSC, x_bD, slot):
    partial_BD, cache_BSC = attend(w, cache_1BSC[0], gather(x_bD), slot)
    x_bD += scatter(partial_BD)
    return x_bD + scatter(mlp(w, gather(x_bD))), cache_BSC[None]


def by_sequence(w, cache_bSC, x_bD, slot):
    out_bD, cache_bSC = attend(w, cache_bSC, x_bD, slot)
    x_bD += out_bD
    return x_bD + scatter(mlp(w, gather(x_bD))), cache_bSC


# %% tags=["by-hand"]
shapes = dict(latent=(D, C), query=(D, H, C), out=(H, C, D), up=(D, F), down=(F, D))
w = {m: jax.random.normal(jax.random.key(len(m)), x) / 4 for m, x in shapes.items()}
mesh = jax.make_mesh((n,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
mlp_specs = dict(up=P(None, axis), down=P(axis), latent=P())
split = mlp_specs | dict(query=P(None, axis), out=P(axis))
whole = mlp_specs | dict(query=P(), out=P())
empty_BSC, steps = jnp.zeros((B, S, C)), {}
caches = {by_head: jnp.stack([empty_BSC] * n), by_sequence: empty_BSC}
for way, specs in ((by_head, split), (by_sequence, whole)):
    places = dict(in_specs=(specs, P(axis), P(axis), P()), out_specs=(P(axis), P(axis)))
    steps[way] = jax.jit(jax.shard_map(way, mesh=mesh, **places))
words_SBD, alone = jax.random.normal(jax.random.key(0), (S, B, D)), empty_BSC
for slot, x_BD in enumerate(words_SBD):
    out_BD, alone = attend(w, alone, x_BD, slot)  # on one device
    want_BD = x_BD + out_BD + mlp(w, x_BD + out_BD)
    for way, step in steps.items():
        got_BD, caches[way] = step(w, caches[way], x_BD, slot)
        assert jnp.allclose(got_BD, want_BD, rtol=0, atol=1e-4), "outputs differ"

# %%
sent = {}
for way, step in steps.items():
    kept = caches[way].addressable_shards[0].data.nbytes
    print(f"{way.__name__}: a device stores {kept:,} bytes of cache; a step sends")
    found = lesson.compiled(step, mesh, w, caches[way], x_BD, 0)
    lesson.listed(found)
    sent[way] = found.total.wire_bytes

# %% tags=["remove-cell"]
token_sent, us = 7 / 8 * 7168 * 2, []
for where in ("h100:8", "v5e:2x4"):
    eight = config.preset("deepseek_v3", mesh="tensor=8").mesh
    link = hardware.link(eight, hardware.Topology.parse(where), ("tensor",))
    latency_s = hardware.latency_seconds("all-gather", link)
    us += [1e6 * 64 * token_sent / link.bytes_per_s, 1e6 * latency_s]
    us += [int(latency_s * link.bytes_per_s / token_sent)]
assert round(64 * token_sent / 1e3) == 803, "the page says so"
assert [round(x, 1) for x in us] == [1.8, 10.8, 387, 8.9, 4.0, 28], us
needs = [61 * MiB * sum(scene.memory.values()) for scene in (by_heads, by_seqs)]
room = needs[0] - needs[1]
assert round(room / 61 / MiB) == 217 and round(room / 1e9, 1) == 13.9, room

# %% tags=["remove-cell"]
kept = [cache.addressable_shards[0].data.nbytes for cache in caches.values()]
assert kept == [4 * B * S * C, 4 * B * S * C // n], kept
assert [x // (4 * B * D * 7 // 8) for x in sent.values()] == [4, 2], sent

# %% [markdown]
# Split by sequence, a device stores an eighth of the cache, and sends half as many bytes: attention needs no
# collective. The feed-forward layer still all-gathers the tokens and reduce-scatters the outputs.
#
# For 64 sequences and D = 7,168 in bfloat16, each of these collectives sends 803 kB per device. That takes
# 1.8 us over NVLink and 8.9 us over the ICI of a v5e slice of 2x4. To that, the planner adds a latency of 10.8
# and 4.0 us (`plan/chips/hardware.py`). So latency dominates up to 387 sequences on the H100s, and up to 28 on
# the v5e.
#
# With experts, two all-to-alls can replace the two collectives (07). The first sends each token only to its k
# experts:


# %%
def to_experts(x_bD, k):
    """Send every token to k of the n devices, with a balanced load."""
    copies_ncD = jnp.repeat(x_bD, k, axis=0).reshape(n, -1, D)
    return jax.lax.all_to_all(copies_ncD, axis, 0, 0).reshape(-1, D)


def sent_by(exchange, *static):
    run = lambda x_BD: exchange(x_BD, *static)
    run = jax.shard_map(run, mesh=mesh, in_specs=P(axis), out_specs=P(axis))
    x_BD = jax.ShapeDtypeStruct((8 * n, D), jnp.float32)
    return lesson.compiled(run, mesh, x_BD).total.wire_bytes / 8  # 8 tokens per device


print(f"all-gather: {sent_by(gather):.0f} bytes sent by a device per token of its own")
for k in (2, 4, 8):
    print(f"all-to-all, k = {k}: {sent_by(to_experts, k):.0f} bytes")

# %% tags=["remove-cell"]
assert all(sent_by(to_experts, k) == 4 * D * k * 7 / 8 for k in (2, 4, 8))
assert sent_by(gather) == 4 * D * 7 == sent_by(to_experts, 8)

# %% [markdown]
# An all-gather sends n - 1 copies of a token, and this all-to-all k (n - 1)/n. So **the all-to-all sends less
# if n is above k**. (It sends even less if a token goes only once to a device with several of its experts.)
# DeepSeek-V3 has k = 8. Its smallest unit for decode has 320 GPUs. In attention, 80 groups
# of 4 GPUs have different sequences; the experts are spread over all 320
# ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.4.2).
#
# Models with key-value heads have the same problem if `tensor` is larger than their number: with 8 heads on 16
# devices, two devices store each head. Exercise 2 asks for the number of tokens in that case.

# %% tags=["hide-input"] mystnb={"image": {"alt": "GB that each of 8 devices reads per step in the attention of DeepSeek-V3, against cached tokens. Split by head it rises steeply from 5 GB; split by sequence slowly from 23 GB. The lines cross at 298,553 tokens."}}
figure, ax = plt.subplots(figsize=(5.6, 3.2))
tokens = np.array([0, 8e5])
read = {"split by head": DOWN + HEADS / n + LATENT * tokens,
        "split by sequence": DOWN + HEADS + LATENT * tokens / n}  # fmt: skip
for (name, size), look in zip(read.items(), ("-", "--"), strict=True):
    red = lesson.COLORS["tensor"]
    ax.plot(tokens / 1e3, 61 * size / 1e9, look, color=red, label=name)
ax.axvline(enough / 1e3, color="black", lw=0.8, ls=":")
ax.set(xlabel="thousand cached tokens of all 8 devices", ylim=(0, 65))
ax.set_ylabel("GB read per step")
ax.set_title("From 298,553 tokens on, split the sequences")
ax.legend()

# %% [markdown]
# **When not.** With few or short sequences, the replicated weights are more bytes than the copies of the
# cache. The load must also be balanced: a device with short sequences, or with none, waits for the others in
# every exchange.
#
# `python -m plan deepseek_v3 --inference --topology h200:16 --mesh tensor=16` prints this comparison in its
# line `attention`. (This project's engine splits by head.)
#
# ## A prefix cache
#
# Keys and values of a token depend on the token, its position, and all tokens before it, but on none after it.
# So requests that begin with the same system prompt have the same cache for it. A server stores the cache in
# **pages** (blocks) of, for example, 16 tokens, and finds them by a key.
#
# > **Predict.** Twenty requests share a system prompt of 250 tokens, and each asks its own question of 30
# > tokens. Pages have 16 tokens, and only full pages are shared. For how many of the 5,600 tokens does the
# > server have to compute a forward pass?

# %%
PAGE, LAYERS, WIDTH, WORDS = 16, 2, 16, 64
drawn = np.random.default_rng(0)
words, places = drawn.normal(size=(2, 512, WIDTH))
w_qkvo = drawn.normal(size=(LAYERS, 4, WIDTH, WIDTH)) / WIDTH**0.5


def extend(past, ids):
    """Logits of new tokens, and the cache of all: keys and values of each layer."""
    start, cache = past.shape[2], []
    x = words[ids] + places[start : start + len(ids)]
    seen = np.tri(len(ids), start + len(ids), start, dtype=bool)
    for layer, (q, k, v, o) in enumerate(w_qkvo):
        kv = np.concatenate([past[layer], np.stack([x @ k, x @ v])], axis=1)
        weight = np.exp(np.where(seen, x @ q @ kv[0].T / WIDTH**0.5, -np.inf))
        x = x + weight / weight.sum(-1, keepdims=True) @ kv[1] @ o
        cache.append(kv)
    return x @ words[:WORDS].T, np.stack(cache)


# %%
def serve(ids, pages):
    """Logits of the last token, and how many tokens were computed."""
    key = lambda end: tuple(ids[:end])  # all tokens up to the end of the page
    hit, full = 0, (len(ids) - 1) // PAGE * PAGE
    while hit < full and key(hit + PAGE) in pages:
        hit += PAGE
    found = [pages[key(end)] for end in range(PAGE, hit + 1, PAGE)]
    past = np.concatenate([np.zeros((LAYERS, 2, 0, WIDTH)), *found], axis=2)
    logits, cache = extend(past, ids[hit:])
    for end in range(hit + PAGE, full + 1, PAGE):
        pages[key(end)] = cache[:, :, end - PAGE : end]
    return logits[-1], len(ids) - hit


# %%
my_prediction = None  # tokens
system, pages, computed = drawn.integers(0, WORDS, 250), {}, 0
for _ in range(20):
    ids = [*system, *drawn.integers(0, WORDS, 30)]
    logits, new = serve(ids, pages)
    without, _ = serve(ids, {})
    assert np.allclose(logits, without, rtol=0, atol=1e-9), "the prefix cache is wrong"
    computed += new
lesson.predicted("tokens computed", my_prediction, computed, "tokens")
print(f"the logits of all 20 are equal with and without the cache; {len(pages)} pages")

# %% tags=["remove-cell"]
assert computed == 280 + 19 * (280 - 240) == 1040, computed
assert round(1 - computed / 5600, 2) == 0.81, "the page says 81%"
assert round(1536 * 327_680 / 1e6) == 503, "the page says 503 MB"
assert len(pages) == 15 + 20 * 2, len(pages)

# %% [markdown]
# <details><summary>Why</summary>
#
# The first request computes 280 tokens. The other 19 find 15 full pages, 240 tokens, and compute 40 each. The
# last 10 tokens of the system prompt share a page with the question, so each request computes them again.
# </details>
#
# The prefix cache saves 81% of the prefill FLOPs, and 19 copies of 15 pages. For Llama 3 70B and a system
# prompt of 1,536 tokens, each request saves about 2.2e14 FLOPs and 503 MB (`--shared 1536` of the planner). A
# decode step reads as many bytes as before, because each sequence attends to the whole prefix. (A kernel for
# *cascade attention* reads a shared prefix only once for all sequences.)
#
# **A page is found by its whole prefix, not by its own tokens.** From the second layer on, keys and values
# depend on all tokens before it. Servers do not store such long prefixes: vLLM hashes the tokens of a page
# together with the hash of the previous page
# ([design](https://docs.vllm.ai/en/latest/design/prefix_caching/)), and SGLang walks down a tree of tokens
# ([RadixAttention](https://arxiv.org/abs/2312.07104)). Everything else that changes keys and values must be
# equal too: the adapter (LoRA), and the images behind placeholder tokens. So must the customer, if response
# times must not reveal what other customers asked.
#
# **What invalidates a page?** New weights invalidate all pages. If memory is full, the server evicts the
# pages that nobody has used for longest. A full page never changes, so requests can share it without copying.
#
# **When not.** Prompts without a common beginning gain nothing. Put what varies, such as a date or a user
# name, at the end of a prompt: one different token changes the keys of all later pages. With several
# replicas, a router must send each request to a replica that has its prefix.
#
# (`generate/engine.py` copies the cache of a common prefix from another sequence. That saves the FLOPs, but
# not the memory.)
#
# ## Prefill and decode on different slices
#
# A prefill of a long prompt is bound by FLOPs, and decode by memory bandwidth (14). On shared devices, each
# prefill, or each chunk of it, delays all sequences that decode. Disaggregation gives each phase its own slice
# (on GPUs: its own group of nodes), mesh and batch size, and moves the cache of each prompt once
# ([DistServe](https://arxiv.org/abs/2401.09670)).
#
# > **Predict.** A token of Llama 3 70B has 327,680 bytes of cache, and costs 2 FLOPs for each of 70.6e9
# > weights. On H100s of 989 TFLOP/s, with 50 GB/s of InfiniBand each, how long does it take to move the
# > cache, as a percentage of the time of the prefill? (All devices send equal shares. Use peak rates.)

# %% tags=["hide-input"]
SIZES = {  # weights that a token uses, and bytes of its cache
    "Llama 3 8B": (8.03e9, 131_072),
    "Llama 3 70B": (70.6e9, 327_680),
    "DeepSeek-V3": (37.6e9, 70_272),
}


def move_share(model, chip, link):
    """Seconds of moving a token's cache, divided by seconds of its prefill."""
    used, cache_bytes = SIZES[model]
    return cache_bytes / link / (2 * used / chip.peak_flops_per_s)


share = 100 * move_share("Llama 3 70B", h100, h100.dcn_bytes_per_s)

# %%
my_prediction = None  # percent
lesson.predicted("move / prefill", my_prediction, share, "%", 0.05)
for key in ("h100", "v5e"):
    chip = hardware.CHIPS[key]
    for link in ("link_bytes_per_s", "dcn_bytes_per_s"):
        speed = getattr(chip, link)
        cells = (f"{model} {move_share(model, chip, speed):6.1%}" for model in SIZES)
        print(f"{key:5} {speed / 1e9:7.3f} GB/s   {'   '.join(cells)}")

# %% tags=["remove-cell"]
v5e = hardware.CHIPS["v5e"]
assert 4.5 < share < 4.7, share
slow = move_share("Llama 3 8B", v5e, v5e.dcn_bytes_per_s)
assert round(100 * slow) == 51, "the page says 51%"

# %% [markdown]
# <details><summary>Why</summary>
#
# Per token, the move takes 327,680 / 50e9 = 6.6 us of a device's NIC, and the prefill 2 x 70.6e9 / 989e12 = 143
# us of its FLOP/s: 4.6%. The number of devices cancels, and so does the length of the prompt.
# </details>
#
# So the move is short if **cache bytes / link speed is far below 2 P / FLOP/s**, where P counts the weights
# that a token uses. The cache of one layer can be sent while the next layers compute, and then even less is
# exposed. But over the data center network (DCN), the move of an 8B model on v5e takes 51% of the time of its
# prefill. In that case, keep both phases on the same devices. The planner's numbers include attention,
# communication and chunks of 512 tokens:

# %%
asked = inference.Request(prompt=2048, answer=256, piece=512)
one = inference.plan(config.preset("llama3_70b", mesh="tensor=8"), "h100:8", asked)
for batch in (16, 64, 256):
    found = at_scale.numbers_at_scale(one, batch)
    step_ms = 1e3 * one.batch_summary(batch)["step_s"]
    handoff, slices = found["handoff"], found["slices"]
    print(f"{batch:3} sequences: decode step {step_ms:.0f} ms, "
          f"delayed {slices['chunk_ms']:.0f} ms by a chunk; "
          f"{slices['prefill']:.2f} slices of prefill")  # fmt: skip
print(f"move {handoff['bytes'] / 1e6:.0f} MB: {handoff['near_ms']:.2f} ms over NVLink,"
      f" {handoff['far_ms']:.2f} over InfiniBand")  # fmt: skip
print(f"prefill: {handoff['prefill_ms']:.0f} ms")

# %% tags=["remove-cell"]
assert [round(x) for x in (handoff["prefill_ms"], 4 * slices["chunk_ms"])] == [72, 72]
assert 3.8 < slices["prefill"] < 3.9, "the page says four"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Milliseconds between two tokens of a sequence over time. On one slice, a step takes 9 ms, or 27 ms with a chunk of a prompt. On separate slices it always takes 9 ms."}}
figure, ax = plt.subplots(figsize=(5.6, 2.8))
step_ms = 1e3 * one.batch_summary(16)["step_s"]
chunk_ms = slices["chunk_ms"]
arrivals = np.random.default_rng(3).random(60) < 16 * 4 / 256
shared_ms = step_ms + chunk_ms * arrivals
ax.step(range(60), shared_ms, color="black", label="one slice, chunked prefill")
ax.plot(range(60), 60 * [step_ms], color=lesson.NEUTRAL, label="separate slices")
ax.set(xlabel="decode step", ylabel="ms to the next token", ylim=(0, 45))
ax.set_title("A chunk of a prompt delays every sequence")
ax.legend(loc="upper left", ncols=2)

# %% tags=["remove-cell"]
assert (round(step_ms), round(step_ms + chunk_ms)) == (9, 27), "the figure says so"

# %% [markdown]
# (The figure has 16 sequences. Each needs 4 chunks in the time of its 256 steps, so a quarter of the steps have
# a chunk; with 64 sequences, every step has one. Chunks and decode are separate passes, as in this project's
# engine. vLLM puts both into one pass, which reads the weights once, so its delay is shorter.)
#
# **When is it worth it?** Disaggregation does not save work. vLLM's documentation says that it [does not
# improve throughput](https://docs.vllm.ai/en/latest/features/disagg_prefill/). Chunked prefill on one slice
# even uses FLOP/s that decode leaves idle. But if the time between tokens has a limit, then separate slices can
# serve more requests within it: DistServe calls these requests *goodput*. There are three conditions:
#
# 1. Users notice when a token is late by a chunk. (Smaller chunks delay less, but each one reads all
#    weights.)
# 2. The move takes much less time than the prefill.
# 3. You can fill the slices. For these lengths, a decode slice with 256 sequences needs four slices for
#    prefill. With longer answers it needs fewer.
#
# DeepSeek-V3 prefills on units of 32 GPUs, and decodes on units of 320 (section 3.4), so each phase has its
# own mesh.

# %% [markdown]
# ## Exercise 1: what a hit saves
#
# A prefix cache has the pages of one earlier prompt, `cached`. A new prompt arrives; both are lists of token
# IDs. How many of its tokens need not be computed? Remember what a prefill has to return.


# %%
def reused_tokens(prompt, cached, page):
    return ...


# %% tags=["hide-input"]
def common(prompt, cached):
    same = [a == b for a, b in zip(prompt, cached, strict=False)]
    return same.index(False) if False in same else len(same)


def reused(prompt, cached, page):
    return min(common(prompt, cached), len(prompt) - 1) // page * page


BAD_HITS = [
    (lambda p, c, page: common(p, c) // page * page,
     "For a prompt that is all in the cache, you compute nothing. Where do its logits "
     "come from?"),
    (lambda p, c, page: min(common(p, c), len(p) - 1),
     "Only full pages are in the cache."),
    (lambda p, c, page: common(p, c), "Only full pages are in the cache."),
    (lambda p, c, page: -(-common(p, c) // page) * page,
     "You round up: the last of these pages has a token that differs."),
    (lambda p, c, page: reused(p, c, page) // page, "That is the number of pages."),
    (lambda p, c, page: len(p) - reused(p, c, page), "That is what must be computed."),
    (lambda p, c, page: min(sum(a == b for a, b in zip(p, c, strict=False)), len(p) - 1)
     // page * page, "After the first token that differs, nothing can be reused."),
]  # fmt: skip

# %% tags=["hide-input"]
same_32 = list(range(32))
HIT_CASES = [(same_32 + [7, 8, 9], same_32 + [1, 8, 9], 16), (same_32, same_32, 16),
             ([5, *range(40)], [5, 9, *range(1, 39)], 4),
             (same_32[:20] + [99] + same_32[21:], same_32, 8)]  # fmt: skip
check_hits = lesson.checker(HIT_CASES, reused, BAD_HITS, "Right: 32, 16, 0 and 16.")


print(check_hits(reused_tokens))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Count the equal tokens at the beginning, at most `len(prompt) - 1`, and round down to full pages: `min(same,
# len(prompt) - 1) // page * page`. Even if all of a prompt is in the cache, a prefill has to compute its last
# token, for the logits. Because only full pages are reused, it computes the whole last page, as in vLLM.
# </details>

# %% tags=["remove-cell"]
assert [reused(*case) for case in HIT_CASES] == [32, 16, 0, 16]
lesson.expect(check_hits, *BAD_HITS, (reused, "Right"), (reused_tokens, lesson.NOTHING))

# %% [markdown]
# ## Exercise 2: few key-value heads
#
# A model has G key-value heads, and `tensor` has n devices, more than G. With how many cached tokens does a
# device read equally many bytes, whether attention is split by sequence or by head? Count the tokens of all
# sequences. `weights` is the bytes of all attention weights. (By head, each device has 1/n of them; ignore
# that the small key and value weights are replicated, too.) `token` is the bytes of cache of a token, with
# all heads.


# %%
def equal_tokens(weights, token, n, G):
    return ...


# %% tags=["hide-input"]
def equal_reads(weights, token, n, G):
    return weights * (1 - 1 / n) / (token * (1 / G - 1 / n))


BAD_READS = [
    (lambda w, t, n, G: w / (t * (1 / G - 1 / n)),
     "Split by head, a device reads 1/n of the weights, not none of them."),
    (lambda w, t, n, G: w * (1 - 1 / n) / (t * (1 - 1 / n)),
     "Split by head, a device stores one of G heads, not the cache of all."),
    (lambda w, t, n, G: w * (1 - 1 / n) / (t / G),
     "Split by sequence, a device still reads its own sequences."),
    (lambda w, t, n, G: w / (t / G), "Each way reads both: take the differences."),
    (lambda w, t, n, G: n * equal_reads(w, t, n, G), "That counts tokens n times."),
    (lambda w, t, n, G: equal_reads(w, t, n, G) / n, "That is per device: count all."),
]  # fmt: skip
READ_CASES = [(3e8, 4096, 16, 8), (3e8, 4096, 32, 4), (1e8, 1024, 8, 2)]
fine = "Right. With G = 1, it is the one for MLA."
check_reads = lesson.checker(READ_CASES, equal_reads, BAD_READS, fine)


print(check_reads(equal_tokens))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `weights * (1 - 1 / n) / (token * (1 / G - 1 / n))`. By head, a device reads weights/n and 1/G of all
# caches. By sequence, it reads all weights and 1/n of the caches. With n = G, no number of tokens is enough.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_reads, *BAD_READS, (equal_reads, "Right"),
              (equal_tokens, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 3: divide the slices
#
# You have several equal slices. A request needs `prefill_s` seconds of a slice for prefill, and `decode_s`
# seconds of a slice for decode (the seconds of its steps, divided by the sequences in a batch). How many
# slices should prefill, so that you serve the most requests per second? Each phase gets at least one slice.


# %%
def prefill_slices(slices, prefill_s, decode_s):
    return ...


# %% tags=["hide-input"]
def most_requests(slices, prefill_s, decode_s):
    rate = lambda x: min(x / prefill_s, (slices - x) / decode_s)
    return max(range(1, slices), key=rate)


even = lambda n, p, d: n * p / (p + d)
BAD_SPLITS = [
    (lambda n, p, d: n - most_requests(n, p, d), "That is the number for decode."),
    (lambda n, p, d: n // 2, "Half each leaves one phase idle."),
    (lambda n, p, d: round(even(n, p, d)), "Rounding to the nearest number is not "
     "always best: compare the slower phase of both neighbors."),
    (lambda n, p, d: int(even(n, p, d)), "Rounding down is not always best."),
    (lambda n, p, d: int(even(n, p, d)) + 1, "Rounding up is not always best."),
    (even, "A slice cannot be divided."),
    (lambda n, p, d: n * d / (p + d), "That is for decode, and not an integer."),
]  # fmt: skip
SPLIT_CASES = [(10, 1.4, 8.6), (10, 8.6, 1.4), (7, 2.0, 3.0), (4, 1.0, 9.0)]
fine = "Right: 2, 8, 3 and 1 slices."
check_split = lesson.checker(SPLIT_CASES, most_requests, BAD_SPLITS, fine)


print(check_split(prefill_slices))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The slower phase limits the rate: `max(range(1, slices), key=lambda x: min(x / prefill_s, (slices - x) /
# decode_s))`. With 10 slices and 1.4 to 8.6 seconds, an even load would be 1.4 slices, but 2 serve more than 1.
# </details>

# %% tags=["remove-cell"]
assert [most_requests(*case) for case in SPLIT_CASES] == [2, 8, 3, 1]
lesson.expect(check_split, *BAD_SPLITS, (most_requests, "Right"),
              (prefill_slices, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# A colleague's server prefills on one slice and decodes on another. The devices split the heads: `tensor=4`
# for decode, and `tensor=2` or `tensor=4` for prefill. Each prefill device sends its part of the cache, as
# flat bytes, to the decode devices. With `tensor=4` on both slices, all tests pass. With `tensor=2` for
# prefill, nothing fails, the first token of every answer is right, and users complain.

# %%
SLOTS, VOCABULARY, MODEL, KV, HEAD = 24, 32, 32, 4, 8  # sizes; KV: heads
HEADS_IN = (MODEL, KV, HEAD)
SHAPES = dict(words=(VOCABULARY, MODEL), places=(SLOTS, MODEL), q=HEADS_IN, k=HEADS_IN,
              v=HEADS_IN, o=(KV, HEAD, MODEL))  # fmt: skip
draw = np.random.default_rng(10).normal
WEIGHTS = {m: np.float32(draw(size=shape) / 2) for m, shape in SHAPES.items()}


def forward(w, cache, ids_t, start):
    """Logits of new tokens, and the cache with their keys and values."""
    at_t = start + jnp.arange(len(ids_t))
    x_tD = w["words"][ids_t] + w["places"][at_t]
    new = {name: einsum("tD,DgK->tgK", x_tD, w[name]) for name in "qkv"}
    cache = {name: cache[name].at[at_t].set(new[name]) for name in "kv"}
    raw_tgS = einsum("tgK,SgK->tgS", new["q"], cache["k"])
    seen_tgS = jnp.arange(SLOTS) <= at_t[:, None, None]
    weight_tgS = jax.nn.softmax(jnp.where(seen_tgS, raw_tgS, -1e30))
    out_tD = einsum("tgS,SgK,gKD->tD", weight_tgS, cache["v"], w["o"])
    return (x_tD + jax.lax.psum(out_tD, "tensor")) @ w["words"].T, cache


# %%
@functools.cache
def engine(first, tensor):
    """The forward pass on a slice, with heads split over its devices."""
    devices = jax.devices()[first : first + tensor]
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((tensor,), ("tensor",), kinds, devices=devices)
    middle = P(None, "tensor")
    w = dict(words=P(), places=P(), q=middle, k=middle, v=middle, o=P("tensor"))
    specs = dict(in_specs=(w, middle, P(), P()), out_specs=(P(), middle))
    return jax.jit(jax.shard_map(forward, mesh=mesh, **specs))


# %%
def buffers(array):
    """The memory of each device, as flat bytes, in the order of its heads."""
    shards = sorted(array.addressable_shards, key=lambda one: one.index[1].start or 0)
    return [np.asarray(one.data).ravel() for one in shards]


def send(flat, tensor):
    """Give each of the `tensor` decode devices its part of the buffers."""
    parts = tensor // len(flat)
    return [part for one in flat for part in np.split(one, parts)]


def receive(flat):
    """Put the received buffers into the cache of the decode slice."""
    return np.concatenate([one.reshape(SLOTS, -1, HEAD) for one in flat], axis=1)


# %%
def generate(prompt, prefill_tensor, decode_tensor):
    """Generate greedily until all slots are full."""
    empty = {name: jnp.zeros((SLOTS, KV, HEAD)) for name in "kv"}
    logits, cache = engine(0, prefill_tensor)(WEIGHTS, empty, prompt, 0)
    moved = {name: send(buffers(one), decode_tensor) for name, one in cache.items()}
    cache = {name: receive(flat) for name, flat in moved.items()}
    decode = engine(4, decode_tensor)
    text = [int(logits[-1].argmax())]
    for slot in range(len(prompt), SLOTS):
        logits, cache = decode(WEIGHTS, cache, jnp.array(text[-1:]), slot)
        text.append(int(logits[-1].argmax()))
    return text


prompt = np.random.default_rng(5).integers(0, VOCABULARY, 16)
for prefill_tensor in (4, 2):
    print(f"prefill on tensor={prefill_tensor}: {generate(prompt, prefill_tensor, 4)}")


# %% tags=["hide-input"]
def on_one_device(prompt):
    cache, text = {name: jnp.zeros((SLOTS, KV, HEAD)) for name in "kv"}, []
    run, new = engine(0, 1), jnp.array(prompt)
    for slot in (0, *range(len(prompt), SLOTS)):
        logits, cache = run(WEIGHTS, cache, new, slot)
        text.append(int(logits[-1].argmax()))
        new = jnp.array(text[-1:])
    return text


HINT = {True: "Both sides have the same mesh, so nothing needs to be split.",
        False: "Which elements of a buffer does each decode device get?"}  # fmt: skip


# %% tags=["hide-input"]
def check_generate(answer):
    try:
        for number, (left, right) in enumerate(((4, 4), (2, 4), (1, 4), (1, 2))):
            prompt = np.random.default_rng(5 + number).integers(0, VOCABULARY, 16)
            text = list(lesson.answered(answer)(prompt, left, right))
            want = on_one_device(prompt)
            wrong = [a != b for a, b in zip(text, want, strict=False)] + [True]
            if text != want:
                which = f"Prefill on tensor={left}, decode on tensor={right}"
                hint = HINT[left == right]
                return f"{which}: token {wrong.index(True)} differs. {hint}"
    except lesson.Unanswered:
        return lesson.NOTHING
    except Exception as error:
        return lesson.stopped(error)
    return "Right on four pairs of meshes: the tokens of one device."


# %% tags=["hide-output"]
print(check_generate(generate))

# %% [markdown]
# Fix the program.
#
# <details><summary>Solution</summary>
#
# The buffer of a prefill device has the order slots, heads, head dim. `send` cuts it into two contiguous
# halves. So each decode device gets half of the *slots*, with both heads, and `receive` reshapes this to all
# slots with one head. The sizes are right, so nothing fails. `send` must split the heads instead:
#
# ```python
# split = [np.split(one.reshape(SLOTS, -1, HEAD), parts, axis=1) for one in flat]
# return [part for parts_of_one in split for part in parts_of_one]
# ```
#
# Or store heads before slots, as vLLM does for transfers between different meshes: then the part of each
# decode device is contiguous ([#18833](https://github.com/vllm-project/vllm/pull/18833)). The first token is
# right because prefill computes it. A test with equal meshes, or with answers of one token, cannot find the
# bug.
#
# A user of TensorRT-LLM reported this bug in 2025: outputs were wrong if prefill and decode had different
# `tp_size`. The user found that the kernels that split and join caches expect heads before slots, but with the
# FlashInfer backend, the cache had slots before heads. With the TRTLLM backend, outputs are right
# ([#6507](https://github.com/NVIDIA/TensorRT-LLM/issues/6507)).
# </details>


# %% tags=["remove-cell"]
changed = lesson.rewritten(engine, buffers, send, receive, generate)
FLAT = "for part in np.split(one, parts)"
by_kv = FLAT.replace("one, parts", "one.reshape(SLOTS, -1, HEAD), parts, axis=1")
reverse = ("axis=1)\n", "axis=1)[:, ::-1]\n")
lesson.expect(check_generate, (generate, "Which elements"),
              (changed((FLAT, by_kv)), "Right"),
              (changed((FLAT, "for part in [one] * parts")), "Which elements"),
              (changed(reverse), "token 1 differs. Both"),
              (lambda *_: ..., lesson.NOTHING),
              (lambda *_: 1 / 0, "It stops"))  # fmt: skip
pairs = [generate(prompt, tensor, 4) for tensor in (4, 2)]
assert pairs[0][0] == pairs[1][0] and pairs[0] != pairs[1], "the page says so"

# %% [markdown]
# ## In one table
#
# With n devices, and k experts per token:
#
# | | data-parallel attention | prefix cache | separate slices |
# |---|---|---|---|
# | what it splits or shares | sequences, `cache_bSC`, instead of heads, `q_BhC` | pages `k_SgK` of equal prefixes | prompts `x_tD` and steps `x_bD` |
# | a device stores | attention weights, and 1/n of the caches, instead of 1/n of the weights and all latents | a shared page once | weights on both slices; caches of prompts or of answers |
# | what is communicated | feed-forward: all-gather and reduce-scatter, or all-to-all if n is above k; attention: nothing | nothing; between replicas, a request goes to its prefix | the cache of each prompt, once |
# | exposed | yes, latency-bound | - | the last layers, if layers are sent as they are computed |
# | it saves | reads of cache, and an exchange | prefill FLOPs, and memory for shared pages | the delay of decode by prefill |
# | when | cached tokens above weights / bytes per token | prompts begin alike | the move takes far less than prefill, and latency matters |
# | when not | few or short sequences | what varies comes first | slow links, small service, no limit on latency |
# | planner | line `attention` | `--shared` | lines `handoff`, `slices` |
# | vLLM | `-dp 8` with `--enable-expert-parallel` | `--enable-prefix-caching` (default) | `--kv-transfer-config` |
# | SGLang | `--dp-size 8 --enable-dp-attention` | RadixAttention (default) | `--disaggregation-mode` |
# | JAX; Megatron-LM | batch dim over `tensor`; - | a dict of pages; - | two meshes, `jax.device_put`; - |
#
# There is no backward pass. vLLM and SGLang, both in PyTorch, have all three.
#
# ## Three lines to keep
#
# 1. Split attention by sequence if the cache of all tokens is larger than the attention weights.
# 2. Find a page by all tokens up to its end, and by everything else that changes its keys and values.
# 3. Separate slices for prefill and decode do not save work. They keep prefill from delaying the next token.
#
# **Sources.** PagedAttention, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180); RadixAttention in SGLang,
# [arXiv:2312.07104](https://arxiv.org/abs/2312.07104); DistServe,
# [arXiv:2401.09670](https://arxiv.org/abs/2401.09670); DeepSeek-V3, section 3.4,
# [arXiv:2412.19437](https://arxiv.org/abs/2412.19437).
