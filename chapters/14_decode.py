# %% [markdown]
# # 14 · Words out
#
# **Question.** Training and generating run the same model. Why does a generated token cost so much more than
# one that is read, and which axis of the mesh makes it cheaper?
#
# **Why it hurts not to know.** The mesh that trained a model well can need a second and a half for each
# token. A mesh chosen for more memory can hold the same bytes on each device as before. And two lines that
# sample a token can turn a good model into one that loses the thread.
#
# *Before this:* 00 (the ridge), 04 (`tensor`), 06 (softmaxes that are merged). *Mesh:* `tensor=4,context=2`,
# simulated. *Runs in* 35 s on 2 cores; reading takes about 25 minutes.

# %%
from devices import simulate_devices

simulate_devices(8)

import matplotlib.pyplot as plt
import numpy as np

import config
from chapters import lesson
from plan.hardware import CHIPS, Topology, layout, wire_bytes

# %% [markdown]
# ## A token that is read, a token that is written
#
# A model answers in two phases. In **prefill** the whole prompt goes through it at once, as in training. In
# **decode** each new token goes through alone, because the next one depends on it. What attention needs of
# earlier tokens, their keys and values, is kept: that is the *cache*. Without it every token would cost a
# forward pass over all text before it.
#
# A product of B rows with P weights in bfloat16 takes 2 P B FLOPs, and reads 2 P bytes, however many rows
# there are. It takes the longer of the two times (00). A prompt of 8,192 tokens brings 8,192 rows; a decode
# step brings one row for each sequence.
#
# > **Predict.** One H100 does 989 TFLOP/s, and reads 3.35 TB/s. One sequence: how many times as long does
# > Llama 3 8B take for a token that it writes, as for one that it reads? (Weights alone, both at best.)

# %%
my_prediction = None  # times
P8 = 8_030_261_248  # weights of Llama 3 8B


def products_s(chip, rows, weights=P8):
    """Seconds of all products with weights: FLOPs, or bytes, whichever is longer."""
    flops, read = 2 * weights * rows, 2 * weights
    return max(flops / chip.peak_flops_per_s, read / chip.hbm_bytes_per_s)


v5e, v5p, h100 = (CHIPS[key] for key in ("v5e", "v5p", "h100"))
per_read = products_s(h100, 8192) / 8192
ratio = products_s(h100, 1) / per_read
lesson.predicted("written/read", my_prediction, ratio, "times", 0.03)
print("            read, us a token  written, us a token")
for chip in (v5e, v5p, h100):
    read, written = products_s(chip, 8192) / 8192, products_s(chip, 1)
    print(f"{chip.name:12}{1e6 * read:16.1f}{1e6 * written:21,.0f}")

# %% [markdown]
# The model's size has cancelled out: what is left is FLOP/s over bytes/s, the chip's ridge. A decode step
# reads every weight to use it once. Its arithmetic is free in the sense that nobody waits for it, so **more
# sequences in a step cost nothing, until there are as many as the ridge**: B* = 295 on an H100, 243 on a v5e,
# 164 on a v5p. (Weights kept in one byte each halve that, and the time.) The cache is another matter.

# %% tags=["remove-cell"]
ridges = [round(c.peak_flops_per_s / c.hbm_bytes_per_s) for c in (h100, v5e, v5p)]
assert ridges == [295, 243, 164], "the page says these ridges"

# %% [markdown]
# ## The cache
#
# Of each token every layer keeps a key and a value for each of its G heads of keys, each of K numbers of 2
# bytes: **2 x layers x G x K x 2 bytes**. Grouped queries (G below H, the heads that ask) divide that by H/G.
# Latent attention keeps one latent of 512 numbers a layer and a rotary key of 64 numbers, for all heads.

# %%
MODELS = {  # weights, layers, numbers a layer keeps, and with a key for each query head
    "Llama 3 8B": (P8, 32, 2 * 8 * 128, 2 * 32 * 128),
    "Llama 3 70B": (70_553_706_496, 80, 2 * 8 * 128, 2 * 64 * 128),
    "Llama 3 405B": (405_853_388_800, 126, 2 * 8 * 128, 2 * 128 * 128),
    "DeepSeek-V3": (671_026_419_200, 61, 512 + 64, 2 * 128 * 128),
}
kept = {name: 2 * layers * numbers for name, (_, layers, numbers, _) in MODELS.items()}
print("              weights   bytes a token  H heads of keys  131,072 tokens")
for name, (weights, _, numbers, all_heads) in MODELS.items():
    long = f"{kept[name] * 131_072 / 1e9:.1f} GB"
    print(f"{name:13}{2e-9 * weights:6,.0f} GB{kept[name]:14,}"
          f"{all_heads / numbers:12.0f} times{long:>16}")  # fmt: skip

# %% [markdown]
# Each decode step reads the weights once, and of every sequence all that it has kept.
#
# > **Predict.** Llama 3 8B, sequences of 8,192 tokens: from how many of them on is more cache read in a step
# > than weights?

# %%
my_prediction = None  # sequences
sequence_bytes = 8192 * kept["Llama 3 8B"]
equal = 2 * P8 / sequence_bytes
print(f"a sequence {sequence_bytes / 1e9:.2f} GB, the weights {2 * P8 / 1e9:.2f} GB")
lesson.predicted("as many bytes at", my_prediction, round(equal), "sequences", 0.05)

# %% tags=["remove-cell"]
assert round(equal) == 15, "the page says 15"

# %% [markdown]
# Fifteen, long before the 295 that the weights could serve. And here a larger batch does not help: **weights
# are shared by the sequences, a cache is not.** A byte of it meets the H/G query heads that share its key,
# one FLOP each (a multiplication and an addition for two bytes), which is 4 for Llama 3 8B. So reading the
# cache is bound by memory at any batch, and the step of B sequences of S tokens takes about
#
# $$t = \max\left(\frac{2PB}{\text{FLOP/s}}, \frac{2P}{\text{bytes/s}}\right) + \frac{B\,S \cdot
# \text{bytes a token}}{\text{bytes/s}}$$
#
# How does the price of a token fall with the batch, and what does the reader of one text pay for it?

# %% mystnb={"image": {"alt": "Tokens a second against milliseconds a token for four context lengths on one H100: short contexts rise steeply until compute-bound, long ones flatten early and end where memory is full."}}
batches = np.unique(np.geomspace(1, 1024, 60).astype(int))
figure, ax = plt.subplots(figsize=(5.6, 3.8))
for S, shade in ((512, 0.3), (2048, 0.5), (8192, 0.75), (32768, 1)):
    bytes_each = S * kept["Llama 3 8B"]
    cache_s = bytes_each / h100.hbm_bytes_per_s
    step_s = [products_s(h100, B) + B * cache_s for B in batches]
    most = int((h100.memory_bytes - 2 * P8) / bytes_each)
    fits = batches <= most
    ms, rate = 1e3 * np.array(step_s), batches / np.array(step_s)
    ax.loglog(ms[fits], rate[fits], color=lesson.NEUTRAL, alpha=shade)
    ax.plot(ms[fits][-1], rate[fits][-1], "o", color=lesson.NEUTRAL, alpha=shade)
    text, end = f"S = {S:,}", (ms[fits][-1], rate[fits][-1])
    ax.annotate(text, end, (6, -4), textcoords="offset points")
    print(f"S = {S:6,}: at most {1 / cache_s:7,.0f} tokens/s; {most} sequences fit")
ax.set(xlabel="ms from one token of a text to its next", ylabel="tokens/s of one H100")
title = ax.set_title("More texts are nearly free, until their caches fill the step")
limits = ax.set(xlim=(4, 45), ylim=(100, 60_000), xticks=[5, 10, 20, 40])
ax.set_xticks([], minor=True)
labels = ax.set_xticklabels(["5", "10", "20", "40"])

# %% [markdown]
# (Dots: all that fits in the 64 GB that JAX takes of 80.) Up to the bend all texts of a
# step are served for one reading of the weights. Beyond it each adds its own time, and no batch brings more
# than bytes/s over the bytes of one sequence. Who pays by the token wants the upper end; who waits for it,
# the left one. Prefill knows none of this, since a prompt has rows enough by itself.
#
# ## Which axis
#
# A mesh helps decode as far as it **cuts what a device reads in a step**: weights and cache.
#
# - `tensor` cuts both: the weights by columns and rows (04), the cache by heads. It sends two all-reduces a
#   layer, but of B rows only.
# - `context` cuts the cache by positions. Each device asks its own keys, and the partial softmaxes are merged
#   (06). The weights it does not cut.
# - `data` puts other sequences on other devices: replicas, each of which reads all weights.
# - `fsdp` too, but each replica has to *gather* them first, for every token.
# - `stage` cuts weights and cache by layers, and a token visits all stages in turn. It waits as long as on
#   one device. Others are on their way meanwhile, so throughput grows, if there are enough of them.
# - `expert` cuts the experts' weights, and tokens travel to them (07). A step reads each expert that any
#   token of the batch has chosen: of 256 with 8 a token, 100 tokens leave (1 - 8/256)^100 = 4% unread.
#
# Llama 3 70B does not fit one chip. Take 16 TPU v5e, 32 sequences of 8,192 tokens.
#
# > **Predict.** `tensor=16`. The model has 8 heads of keys. How many GB of cache on each device? (All 32
# > sequences keep 85.9 GB.)

# %%
my_prediction = None  # GB
G70, n_v5e, all_GB = 8, 16, 32 * 8192 * kept["Llama 3 70B"] / 1e9
lesson.predicted("cache on each", my_prediction, all_GB / min(G70, n_v5e), "GB", 0.02)

# %% [markdown]
# A head is not cut: its queries need all of its key. So with more devices than heads of keys, two hold the
# same head. The cache stops shrinking, and is read twice. The other dim of the cache can be cut instead:

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two drawings of a cache of positions by heads on 8 devices: cut by 4 heads each piece is held by two devices; cut by 4 heads and 2 halves of the positions each piece by one."}}
import jax

eight = (jax.sharding.AxisType.Auto,) * 2
figure, axes = plt.subplots(2, 1, figsize=(4.6, 3.8))
grid = jax.make_mesh((4, 2), ("tensor", "context"), axis_types=eight)
P = jax.sharding.PartitionSpec
title = "tensor=8: two copies of each head"
lesson.slices(axes[0], grid, P(None, "tensor"), "SG", title)
both_cut = P("context", "tensor")
title = "tensor=4,context=2: half of the positions each"
lesson.slices(axes[1], grid, both_cut, "SG", title, colour_by="context")
title = figure.suptitle("Who holds what of 4 heads of keys (numbers: devices)", size=11)

# %% [markdown]
# Now all of them, for one step: what a device holds and reads, what it sends, and seconds at best. The
# arithmetic is left out, because 32 rows are below each ridge; so is latency.

# %% tags=["hide-input"]
W70, L70, D70, H70, K70 = 2 * MODELS["Llama 3 70B"][0], 80, 8192, 64, 128


def ways(n, B, cache):
    """Axis -> bytes a device holds, reads for a token, and sends for it."""
    added = 2 * L70 * wire_bytes("all-reduce", 2 * B * D70, n)
    more = max(n // G70, 1)  # devices along context
    merged = lambda m, H: L70 * wire_bytes("all-reduce", 4 * B * H * (K70 + 2), m)
    return {
        "data": (W70 + cache / n, W70 + cache / n, 0),
        "fsdp": ((W70 + cache) / n, W70 + cache / n, wire_bytes("all-gather", W70, n)),
        "stage": ((W70 + cache) / n, W70 + cache / n, 0),
        "context": (W70 + cache / n, W70 + cache / n, merged(n, H70)),
        "tensor": (*2 * (W70 / n + cache / min(n, G70),), added),
        "tensor, context": (*2 * ((W70 + cache) / n,), added + merged(more, H70 / G70)),
    }


# %% tags=["hide-input"]
table = {}
for where, n in (("v5e:4x4", 16), ("v5p:2x2x2", 8), ("h100:8", 8)):
    topology = Topology.parse(where)
    chip, wire = topology.chip, layout(config.MeshConfig(tensor=n), topology)["tensor"]
    says = f"{where}, {chip.memory_bytes / 1e9:.1f} GB each"
    print(f"{says:26}  holds GB  reads ms  sends ms")
    for axis, (held, read, sent) in ways(n, 32, 1e9 * all_GB).items():
        times = 1e3 * read / chip.hbm_bytes_per_s, 1e3 * sent / wire.bytes_per_s
        table[where, axis] = held / 1e9, *times
        full = "" if held < chip.memory_bytes else "  does not fit"
        print(f"  {axis:24}{held / 1e9:10.1f}{times[0]:10.1f}{times[1]:10.2f}{full}")

# %% tags=["remove-cell"]
assert 1.4e3 < table["v5e:4x4", "fsdp"][2] < 1.6e3, "the page says a second and a half"
assert 270 < table["h100:8", "fsdp"][2] < 280, "the page says 274 ms"
held = table["v5e:4x4", "tensor"][0], table["v5e:4x4", "tensor, context"][0]
assert held[0] > v5e.memory_bytes / 1e9 > held[1], "the page says that one of them fits"
more_GB = 1e-9 * L70 * 2 * 2 * D70 * H70 * K70 * (1 / G70 - 1 / 16)  # q and output
assert round(more_GB, 1) == 1.3, more_GB
assert held[1] + more_GB < v5e.memory_bytes / 1e9, "the program's cut would not fit"

# %% [markdown]
# The gather of `fsdp` moves 132 GB a device for each token: a second and a half on these v5e, 274 ms in a
# node of H100. In training the same gather serves thousands of rows. `tensor=16` alone does not fit, since
# half of its cache is a copy; with the cache cut both ways the step fits, and takes the least. On 8 devices
# the heads suffice. (`stage`: one token through all stages, while each stage has a group of sequences.)
#
# The last row cuts *all* weights by n: devices that share a head of keys first gather each other's queries,
# [as in vLLM](https://github.com/vllm-project/vllm/pull/24864). The program below copies the weights of queries
# and output instead, here 2 x 8,192² x 80 x 2 bytes / 16 = 1.3 GB more on each of 16.
#
# What `tensor` sends is bound by latency. Each of 160 all-reduces a token takes as long as its hops, however
# few rows: [about 1 us a hop](https://jax-ml.github.io/scaling-book/sharding) on a TPU. On a 4x4, whose ends
# are not joined, a scatter takes 3 hops along each side, and a gather as many: 12 us, so 1.9 ms a token. From
# about 35 sequences on, the bytes take longer. In a node of H100 each microsecond that an all-reduce takes to
# begin is 0.16 ms a token, of 8.5.
#
# The scaling book's
# [chapter on serving](https://jax-ml.github.io/scaling-book/applied-inference) has Llama 3 70B on 16 v5e: 43
# sequences of 8,192 in bfloat16, and 19 ms for a step if its 16e9 bytes (16.9e9 above) are full.

# %%
room = 16 * 16e9 - W70
print(f"sequences: {room / (8192 * kept['Llama 3 70B']):.1f}", end=", ")
print(f"a full memory: {1e3 * 16e9 / v5e.hbm_bytes_per_s:.1f} ms")

# %% tags=["remove-cell"]
wire = layout(config.MeshConfig(tensor=16), Topology.parse("v5e:4x4"))["tensor"]
alike = 12e-6 * wire.bytes_per_s / wire_bytes("all-reduce", 2 * D70, 16)
assert 34 < alike < 36, alike
assert round(8.192e6 * per_read) == 133, "the page says 133 ms"
assert round(8192 * per_read / products_s(h100, 1)) == 28, "the page says 28 steps"
assert round(wire_bytes("all-gather", W70, 16) / 1e9) == 132

# %% [markdown]
# The same, so that page cuts the cache into 16 as well. (Its 160 KiB a token, at one byte a number, are half of
# our 327,680.) These are rates at best; the book expects half of them.
#
# ## By hand
#
# One block on `tensor=4,context=2`. New tokens are t of the T places of a text; the cache has S slots, of
# which a device has s, for g of G heads of keys; I query heads share one. Place p lies on device p % n of
# `context`, dealt out like cards, so that the shares stay equal while the text grows. Attention sees two
# axes, its weights cut by heads alone; the feed-forward sees the same eight devices as one, and cuts its F
# hidden units in eight. Prefill and decode are one function: what is new is written first, and then looked up
# like all that came before.
#
# A write must not touch another device's slot. The usual `dynamic_update_slice` moves a start that lies past
# the end back inside, without a word, and would overwrite the last slot. So this is a scatter that drops such
# writes.

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
    slot_t = jnp.where(at_t % n == me, at_t // n, S)  # S: past the end, not written
    k_BsgK, v_BsgK = cache = cache.at[:, :, slot_t].set(new, mode="drop")
    seen = at_t[:, None, None, None] >= n * jnp.arange(S // n) + me
    raw = jnp.where(seen, einsum("BtgIK,BsgK->BtgIs", q_BtgIK, k_BsgK) / K**0.5, -1e30)
    e = jnp.exp(raw - jax.lax.pmax(raw.max(-1, keepdims=True), "context"))
    parts = e.sum(-1, keepdims=True), einsum("BtgIs,BsgK->BtgIK", e, v_BsgK)
    total, mixed = jax.lax.psum(parts, "context")  # two softmaxes become one
    x_BtD += jax.lax.psum(einsum("BtgIK,gIKD->BtD", mixed / total, w["o"]), "tensor")
    x_BtD += jax.lax.psum(jax.nn.gelu(x_BtD @ w["up"]) @ w["down"], ALL)
    return x_BtD @ w["words"].T, cache


# %% tags=["by-hand"]
mesh = jax.make_mesh((4, n), ALL, axis_types=(jax.sharding.AxisType.Auto,) * 2)
cuts = dict(words=P(), places=P(), q=P(None, "tensor"), kv=P(None, None, "tensor"),
            o=P("tensor"), up=P(None, ALL), down=P(ALL))  # fmt: skip
shapes = dict(words=(V, D), places=(S, D), q=(D, G, I, K), kv=(2, D, G, K),
              o=(G, I, K, D), up=(D, F), down=(F, D))  # fmt: skip
w = {m: jax.random.normal(jax.random.key(ord(m[0])), x) / 4 for m, x in shapes.items()}
slots = P(None, None, "context", "tensor")  # of keys and values, B, S, G, K
specs = dict(in_specs=(cuts, slots, P(), P()), out_specs=(P(), slots))
step = jax.jit(jax.shard_map(extend, mesh=mesh, **specs))
text_BT, cache, found = jnp.arange(B * T).reshape(B, T), jnp.zeros((2, B, S, G, K)), []
for start in (0, *range(T, S - 1)):  # prefill, then a token at a time
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
assert jnp.allclose(jnp.stack(found, 1), want, rtol=0, atol=1e-5), "other logits"
assert (want.argmax(-1) == text_BT[:, T:]).all(), "other tokens"
print("tokens and logits equal one device's; the first text:", text_BT[0, T:])

# %% [markdown]
# (Places are added to the words here; a model with rotary keys turns each by its place before it is kept.)
# What does one decode step send? The compiled program says it:

# %%
one_step = lesson.compiled(step, mesh, w, cache, text_BT[:, -1:], S - 1)
lesson.listed(one_step)
print("and prefill of", T, "tokens:")
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
# All of it grows with the new tokens, and nothing with the cache: keys and values never travel. For `context`
# that are the largest score, the sum, and K mixed numbers, for each query head of the device: 4 bytes x 3
# texts x 2 heads x (K + 2) = 240 a step. For the two sums of the block, 3 texts x width 32 x 4 = 384 bytes
# each. Four waits one after the other in a layer, where `tensor` alone has two. (Simulated devices show
# bytes, no seconds: those above are arithmetic.)
#
# ## One latent meets all heads
#
# With latent attention (MLA) a layer keeps c, a latent of C numbers, and makes keys w c for all heads.
# Written out at each step, that would be a product for each earlier token. But a score is
# $q \cdot (w c) = (w^\top q) \cdot c$, so **w can move to the query**, once, and the latents themselves serve
# as keys. After the mixing it is the same with values. The product with w is *absorbed*. The rotary key of R
# numbers stands apart for that reason: a turn by the place of the key would stand between w and the query.
#
# A number of the latent then meets all H heads twice, once as a key and once as a value, so a byte of the
# cache brings H (2C + R)/(C + R) FLOPs. Decoding that was bound by memory stands at the ridge:

# %%
C_, R_, H_ = 512, 64, 128
absorbed = H_ * (2 * C_ + R_) / (C_ + R_)
ASKED = {"Llama 3 8B": 32 / 8, "Llama 3 405B": 128 / 8, "DeepSeek-V3": absorbed}
for name, flops_a_byte in ASKED.items():
    print(f"{name:13}{flops_a_byte:6.1f} FLOPs a byte; of the ridge:", end="")
    for chip in (v5e, v5p, h100):
        ridge = chip.peak_flops_per_s / chip.hbm_bytes_per_s
        print(f" {chip.key} {flops_a_byte / ridge:4.0%}", end="")
    print()

# %% [markdown]
# So MLA needs a fifty-seventh of the bytes. The price: a latent has no heads, so
# `tensor` cuts nothing of this cache, and each device keeps all of it. DeepSeek decodes with requests on
# other devices instead: attention over `tensor=4` (for its weights) times 80 replicas, experts over 320
# ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.4.2). Absorb for decode only: of a pair of
# positions it takes 2H (2C + R) FLOPs. Once keys and values are made (K + R and U numbers wide) a pair takes
# 2H (K + R + U), or 320 for every 1,088.
#
# ## Requests of different lengths
#
# A batch of 8 has 8 *slots*. Texts end at different lengths, and nobody knows them before. A *static* batch
# waits for its longest text. *Continuous batching* gives a slot to the next request as soon as it is free, at
# any step ([Orca](https://www.usenix.org/conference/osdi22/presentation/yu)).

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
        print(f"{slots_:2} slots, {name:10}: {took:6,} steps, {used:.0%} of slots work")

# %% tags=["remove-cell"]
works = lengths.sum() / (8 * static_steps(lengths, 8))
assert round(100 * works) == 36, "the page says 64% padding"

# %% [markdown]
# The wider the batch, the longer its longest text, the more a static batch wastes. (The last of the 400 also
# leave slots empty at the end, which a server that goes on does not see.)
#
# Prompts of such lengths, in batches of 8 padded to the longest, waste as much: 64% of their rows are
# padding. A cache with room for the longest text in each slot wastes memory likewise: of such caches 20% to
# 38% [held tokens](https://arxiv.org/abs/2309.06180). vLLM's *PagedAttention* gives out memory in blocks of
# some tokens, by a table, as an operating system does.
#
# And a long prompt stops all others while it is read: 8,192 tokens of Llama 3 8B take an H100 133 ms, as long
# as 28 decode steps. *Chunked prefill* cuts it into pieces that ride along with decode steps, whose arithmetic
# is idle anyway. Or prefill gets devices of its own, with another mesh.
#
# **Speculative decoding** fills those idle rows in another way: a small model drafts some tokens, and the
# large one reads them all in one step, as it reads a prompt. It keeps those it agrees with. Exercise 3 has
# the rule by which the text is distributed as if the large model had written it alone.
#
# ## In `generate/`
#
# The project samples on the mesh that trained: requests are dealt out over `data`, `fsdp` and `expert`, the
# cache's positions are cut along `context`, heads and vocabulary along `tensor`, layers and their cache along
# `stage`. Latents are absorbed. Prefill and decode are `cached_forward` of `generate/cache.py`: the layers
# that train, attending to a cache. Six tokens and a seventh alone, for a test model with MLA, against
# all seven:

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
print(f"logits of up to {np.abs(whole).max():.2f}, equal to {off:.0e}")

# %% [markdown]
# On it stands `generate/engine.py`: requests come and go in a fixed number of rows of one cache, and a long
# prompt is read in pieces between decode steps. It has no pages, and `fsdp` in the mesh costs the gather above.

# %% [markdown]
# ## Exercise 1: cache on a device
#
# Write how many bytes of cache a device holds: B texts of S tokens, a model of `layers` with G heads of keys
# of width K in bfloat16, on `tensor` x `context` devices.


# %%
def device_bytes(layers, G, K, B, S, tensor, context):
    return ...


# %% tags=["hide-input"]
def kept_by(layers, G, K, B, S, tensor, context):
    return 2 * layers * G / min(G, tensor) * K * 2 * B * S / context


times = lambda factor: lambda *args: kept_by(*args) * factor(*args)
BAD_BYTES = [
    (times(lambda _, G, K, B, S, t, c: min(G, t) / t),
     "`tensor=16` and 8 heads: who has half a head? Its queries need the whole key."),
    (times(lambda _, G, K, B, S, t, c: min(G, t) * c), "That is all devices' cache."),
    (times(lambda _, G, K, B, S, t, c: c), "`context` cuts something too."),
    (times(lambda _, G, K, B, S, t, c: min(G, t)), "`tensor` cuts something too."),
    (times(lambda *_: 1 / 2), "Half of it. A key and a value, of two bytes a number."),
    (times(lambda *_: 1 / 4), "A quarter. A key and a value, of two bytes a number."),
    (times(lambda _, G, K, B, *more: 1 / B), "Of one text. Do texts share a cache?"),
]  # fmt: skip


# %% tags=["hide-input"]
def check_bytes(answer):
    cases = [(32, 8, 128, 4, 4096, 4, 1), (80, 8, 128, 32, 8192, 16, 2)]
    cases += [(126, 8, 64, 3, 512, 8, 4)]
    done = "Right, also with more devices than heads."
    return lesson.diagnose(answer, cases, kept_by, BAD_BYTES, done)


print(check_bytes(device_bytes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `2 * layers * G // min(G, tensor) * K * 2 * B * S // context`. Llama 3 70B on `tensor=16` holds as much as
# on `tensor=8`. vLLM says so of its `-tp`: beyond the heads of keys the cache is
# [duplicated](https://docs.vllm.ai/en/latest/serving/context_parallel_deployment.html), and `-dcp` cuts it by
# positions, on the same GPUs.
# </details>

# %% tags=["remove-cell"]
assert "Right" in check_bytes(kept_by)
for wrong, hint in BAD_BYTES:
    assert check_bytes(wrong) == hint, (hint, check_bytes(wrong))
assert check_bytes(device_bytes) == lesson.NOTHING

# %% [markdown]
# ## Exercise 2: how many at a time
#
# Llama 3 70B on n chips, weights (`W70` bytes) and cache (`kept["Llama 3 70B"]` bytes a token) both cut into
# n. Readers want a token every `limit_s` seconds. How many texts of S tokens, at most? Leave the wires out,
# and arithmetic (batches stay below the ridge).


# %%
def largest_batch(chip, n, S, limit_s):
    return ...


# %% tags=["hide-input"]
def most_texts(chip, n, S, limit_s, memory=True, time=True, weights=W70, each=1):
    held, read = [n * chip.memory_bytes], [n * chip.hbm_bytes_per_s * limit_s]
    room = min(held * memory + read * time) - weights
    return int(room / (each * S * kept["Llama 3 70B"]))


def otherwise(**change):
    return lambda *args: most_texts(*args, **change)


BAD_BATCHES = [
    (otherwise(time=False), "It fits, and somebody waits. What is read in a step?"),
    (otherwise(memory=False), "Fast enough, but does it fit?"),
    (otherwise(weights=0), "Where are the weights?"),
    (lambda *args: most_texts(*args) + 1, "One too many: the last does not fit whole."),
    (lambda chip, n, S, limit_s: most_texts(chip, n, S, limit_s, weights=n * W70),
     "Each device reads and holds a share of the weights."),
    (otherwise(each=1 / 2), "Twice too many. Is a number of the cache one byte?"),
]  # fmt: skip


# %% tags=["hide-input"]
CASES = [(v5e, 16, 8192, 0.015), (v5e, 16, 8192, 0.1)]
CASES += [(h100, 8, 8192, 0.01), (h100, 8, 16384, 1.0)]


def check_batch(answer):
    done = "Right: 19 or 48 texts on 16 v5e, 47 on 8 H100, 69 long ones without haste."
    return lesson.diagnose(answer, CASES, most_texts, BAD_BATCHES, done, share=1e-9)


print(check_batch(largest_batch))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The bytes of a step are at most what n memories hold, and what they can read in time: `room = min(n *
# chip.memory_bytes, n * chip.hbm_bytes_per_s * limit_s)`, and then `int((room - W70) / (S * kept["Llama 3
# 70B"]))`. The full memory of a v5e is read in 21 ms, that of an H100 in 19 (of the 64 GB that JAX takes):
# whoever waits longer than that is bound by memory's size, else by its speed.
# </details>

# %% tags=["remove-cell"]
assert "Right" in check_batch(most_texts)
found_ = [most_texts(*case) for case in CASES]
assert found_ == [19, 48, 47, 69], f"the answer says others: {found_}"
for wrong, hint in BAD_BATCHES:
    assert check_batch(wrong) == hint, (hint, check_batch(wrong))
assert check_batch(largest_batch) == lesson.NOTHING
full_s = [round(1e3 * c.memory_bytes / c.hbm_bytes_per_s) for c in (v5e, h100)]
assert full_s == [21, 19], full_s

# %% [markdown]
# ## Exercise 3: keep a draft
#
# A small model drew a token from its probabilities `q_V`; the large one would have drawn from `p_V`. Return
# with which probability each token is kept, `keep_V`, and from which probabilities another one is drawn if it
# is not, `instead_V`. What comes out has to be distributed as `p_V`, and as much as possible kept.


# %%
def accept(p_V, q_V):
    return ...  # keep_V, instead_V


# %% tags=["hide-input"]
positive = lambda x: np.maximum(x, 0)
unit = lambda x: x / x.sum()
rule = lambda p, q: (np.minimum(1, p / q), unit(positive(p - q)))


def came_out(accept):
    """Distribution of what comes out, and how often a draft is kept."""

    def run(p_V, q_V):
        keep_V, instead_V = accept(p_V, q_V)
        drafted = np.sum(q_V * keep_V)
        return q_V * keep_V + (1 - drafted) * np.asarray(instead_V), drafted

    return run


# %% tags=["hide-input"]
kept_of = lambda p, q: np.minimum(1, p / q)
surplus = lambda p, q: unit(positive(p - q))
BAD_RULES = [
    (lambda p, q: (kept_of(p, q), p), "Drawn again from all of p. But where the draft "
     "is generous already, nothing is missing."),
    (lambda p, q: (kept_of(p, q), positive(p - q)), "Do `instead_V` add up to 1?"),
    (lambda p, q: (kept_of(p, q), p - q), "A probability below 0?"),
    (lambda p, q: (kept_of(q, p), surplus(p, q)), "Which tokens were drawn too often?"),
    (lambda p, q: (np.ones_like(p), p), "All drafts are kept: the small model writes."),
    (lambda p, q: (0 * p, p), "Right, but nothing is kept: the draft was for nothing."),
    (lambda p, q: (p, surplus(p, q)), "Kept with p: and how often is it drafted?"),
]  # fmt: skip


# %% tags=["hide-input"]
def check_accept(answer):
    given = lesson.answered(answer) if answer not in (None, ...) else answer
    cases = [(np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]))]
    cases += [(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.25, 0.25, 0.1]))]
    mistakes = [(came_out(wrong), hint) for wrong, hint in BAD_RULES]
    done = "Right: distributed as p, and 70% and 65% of the drafts are kept."
    return lesson.diagnose(came_out(given), cases, came_out(rule), mistakes, done)


print(check_accept(accept))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `np.minimum(1, p_V / q_V)`, and `surplus / surplus.sum()` with `surplus = np.maximum(p_V - q_V, 0)`. A token
# is kept min(p, q) of the time. What is missing of p is p - q where that is above 0, and adds up to what was
# rejected ([arXiv:2211.17192](https://arxiv.org/abs/2211.17192)). Every device of `tensor` has to decide
# alike, which is the subject of the bug below.
# </details>

# %% tags=["remove-cell"]
assert "Right: dist" in check_accept(rule)
for wrong, hint in BAD_RULES:
    assert check_accept(wrong) == hint, (hint, check_accept(wrong))
assert check_accept(accept) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# A colleague's model knows a language in which each word has two that may follow, equally likely. It writes
# 64 texts, dealt out over `data`, and its hidden units are cut over `tensor`. At temperature 0 (`argmax` in
# place of `categorical`) its texts are right on every mesh. With sampling they are right on `data=8`, and
# elsewhere there are words that may not follow, from the second word on.

# %%
WORDS, STEPS, TEXTS = 32, 32, 64
pairs = np.random.default_rng(2)
may_follow = np.stack([pairs.permutation(WORDS) for _ in range(2)], axis=1)
likes = 15 * np.eye(WORDS, dtype=np.float32)[may_follow].sum(axis=1).clip(0, 1)
weights = {"up": np.eye(WORDS, dtype=np.float32), "down": likes}


# %%
def texts_on(data, tensor):
    axes, kinds = ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2

    def device(w, first_b):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(axes))

        def one_more(word_b, key):
            hidden_bf = jax.nn.one_hot(word_b, WORDS) @ w["up"]
            logits_bV = jax.lax.psum(hidden_bf @ w["down"], "tensor")
            word_b = jax.random.categorical(key, logits_bV)
            return word_b, word_b

        first_b = jax.lax.pcast(first_b, "tensor", to="varying")
        _, text_Tb = jax.lax.scan(one_more, first_b, jax.random.split(key, STEPS))
        return text_Tb[None]

    cuts = {"up": P(None, "tensor"), "down": P("tensor")}
    specs = dict(in_specs=(cuts, P("data")), out_specs=P("tensor", None, "data"))
    mesh = jax.make_mesh((data, tensor), axes, axis_types=kinds)
    run = jax.jit(jax.shard_map(device, mesh=mesh, **specs))
    return run(weights, np.zeros(TEXTS, np.int32))[0]  # all copies are the same


# %% tags=["hide-input"] mystnb={"image": {"alt": "Share of words that may follow the one before, by place in the text: 1 throughout on data=8, at 0.6 on tensor=2 and at 0.4 on tensor=4."}}
import inspect


def may(texts_TB):
    """Whether each word may follow the one before."""
    texts = np.asarray(texts_TB)
    return (texts[1:, :, None] == may_follow[texts[:-1]]).any(axis=-1)


figure, ax = plt.subplots(figsize=(5.4, 3.2))
for (data_, tensor_), shade in {(8, 1): 1, (4, 2): 0.5, (2, 4): 1}.items():
    shares = may(texts_on(data_, tensor_)).mean(axis=1)
    colour = lesson.COLOURS["tensor"] if tensor_ > 1 else lesson.NEUTRAL
    label = f"data={data_},tensor={tensor_}"
    ax.plot(range(1, STEPS), shares, color=colour, alpha=shade, label=label)
    print(f"{label}: {shares.mean():.0%} of the words may follow")
ax.set(title="The more devices share a model, the less it makes sense", ylim=(0, 1.05))
ax.set(xlabel="place in the text", ylabel="words that may follow")
legend = ax.legend()


# %% tags=["hide-input"]
def fault_of(texts, data):
    """What is wrong with texts of a mesh; nothing, if they are right."""
    if texts.shape != (STEPS, TEXTS):
        return f"{STEPS} words of {TEXTS} texts are wanted, not {texts.shape}."
    if may(texts).mean() < 0.99:
        return (f"{may(texts).mean():.0%} of the words may follow. All devices add up "
                "their parts: do they speak of the same word?")  # fmt: skip
    parts = np.split(texts, data, axis=1)
    if all(np.array_equal(parts[0], part) for part in parts):
        return "all may follow, but the devices along data write the same texts."
    larger = (texts[1:] == may_follow[texts[:-1]].max(axis=-1)).mean()
    if abs(larger - 0.5) > 0.05:
        return (f"all may follow, but of two words the larger is drawn {larger:.0%} "
                "of the time: who chose among the draws?")  # fmt: skip
    return ""


# %% tags=["hide-input"]
CARRY = ("The scan stops: the words it hands on no longer vary along tensor, as the "
         "first is said to. Good news. Which line says so?")  # fmt: skip


def source_of(function):
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return "pcast"


# %% tags=["hide-input", "hide-output"]
def check_texts(answer):
    for shape in ((2, 4), (4, 2), (8, 1)):
        try:
            texts = np.asarray(lesson.answered(answer)(*shape))
        except lesson.Unanswered:
            return lesson.NOTHING
        except Exception as error:
            if "carry" in str(error) and "pcast" in source_of(answer):
                return CARRY
            line = str(error).splitlines()[0][:150]
            return f"It stops: {type(error).__name__}: {line}"
        if fault := fault_of(texts, shape[0]):
            return f"data={shape[0]},tensor={shape[1]}: {fault}"
    return "Right: the texts make sense on three meshes, differ, and favour no word."


print(check_texts(texts_on))

# %% [markdown]
# Mend `texts_on`.
#
# <details><summary>Solution</summary>
#
# No two devices draw the same, says the key: it is folded with the device's place along both axes. But those
# along `tensor` hold parts of *one* model, and work on the same texts. From the first draw each feeds in its
# own word, and the all-reduce adds parts of networks that read different texts. `jax.lax.axis_index("data")`
# mends it; `pcast` goes, since the words vary along `tensor` no more. Two lines hid it. JAX knew that the
# words vary along `tensor`, and refused to let the scan carry them until `pcast` said that it was meant. And
# `[0]` shows one of the copies. Greedy decoding hides it too, since equal logits have equal maxima.
#
# Seen often. In FasterTransformer each GPU had a random seed of its own, "resulting in strange sentence
# generation" ([#390](https://github.com/NVIDIA/FasterTransformer/issues/390), 2022). Of `generate` in Hugging
# Face's transformers a maintainer wrote that each rank draws another token, and that the beginning may be
# more or less right, because first tokens are nearly certain
# ([#36634](https://github.com/huggingface/transformers/issues/36634), 2025). A report says the same of the
# reference code of gpt-oss ([#270](https://github.com/openai/gpt-oss/issues/270), 2026): every rank draws for
# itself. The mend proposed there draws on one rank and broadcasts the token. Even with one seed a
# rounding may decide otherwise on one rank, so SGLang has flags that make tokens agree
# ([#3060](https://github.com/sgl-project/sglang/pull/3060)).
# </details>


# %% tags=["remove-cell"]
source = inspect.getsource(texts_on)


CAST = 'first_b = jax.lax.pcast(first_b, "tensor", to="varying")'


def changed(*swaps):
    space, text = dict(globals()), source
    for old, new in swaps:
        assert old in text, old
        text = text.replace(old, new)
    exec(text, space)
    return space["texts_on"]


by_data = ("axis_index(axes)", 'axis_index("data")')
by_tensor = ("axis_index(axes)", 'axis_index("tensor")')
one_key = ("jax.lax.axis_index(axes)", "0")
draws, plain = "jax.random.categorical(key, logits_bV)", (CAST, "pass")
agreed = (draws, f'jax.lax.pmax({draws}, "tensor")')
mine = f'jnp.where(jax.lax.axis_index("tensor") == 0, {draws}, 0)'
sent = (draws, f'jax.lax.psum({mine}, "tensor")')
assert "same word" in check_texts(texts_on)
assert "same word" in check_texts(changed(by_tensor))
assert check_texts(changed(by_data, plain)).startswith("Right")
assert check_texts(changed(sent, plain)).startswith("Right")
assert check_texts(changed(by_data)) == CARRY
assert "write the same" in check_texts(changed(one_key, plain))
assert "the larger is drawn" in check_texts(changed(agreed, plain))
assert check_texts(lambda *_: ...) == lesson.NOTHING
assert "It stops" in check_texts(lambda *_: 1 / 0)

# %% [markdown]
# ## In one table
#
# Of a decode step with B rows, P weights and a cache of `cache` bytes, on n devices:
#
# | | `tensor` | `context` | `data` | `fsdp` | `stage` | `expert` |
# |---|---|---|---|---|---|---|
# | in letters | `x_BD @ w_Df`, `k_BSgK` | `q_BHK @ k_BsHK` | `x_bD @ w_DF` | the same, `w_dF -> w_DF` | layers l of L | `x_ND -> x_XD @ w_eDM` |
# | a device reads | 2P/n + cache/min(n, G) | 2P + cache/n | 2P + cache/n | 2P + cache/n | 2P/n + cache/n, n times in turn | experts/n |
# | it sends | 2 all-reduces a layer of B rows | 2 a layer, of B H (K + 2) and B D numbers | nothing | (n - 1)/n of 2P | B rows, a permute a stage | all-to-all of chosen rows, twice a layer |
# | on the critical path | yes, latency | yes, latency | - | yes, bytes | yes | yes, latency |
# | helps one text | yes | long ones | no | no: ruinous | no | reading experts |
# | v5e, v5p | along 1 or 2 torus axes | from n above G | when the batch is at B* | never | across slices | 07 |
# | one H100 node | to 8 | if G is below 8 | replicas of a node | never | - | inside |
# | two nodes | copies from n above G | the cache's 2nd cut | one each, if it fits | never | between them | across |
# | vLLM | `-tp` | `-dcp` | `-dp` | - | `-pp` | `--enable-expert-parallel` |
#
# Backward nothing moves: there is none. Other words: *KV cache*, the cache here; *TP*, `tensor`;
# *PagedAttention*, a cache in blocks; *continuous batching*, slots refilled at each step; *chunked prefill*,
# pieces of a prompt beside decode steps.
#
# ## Three lines to keep
#
# 1. Decode reads all weights and all caches for one token a text. Weights are shared by a batch, up to the
#    chip's ridge; caches are not, and soon are most of the bytes.
# 2. An axis helps as far as it cuts what a device reads: `tensor` until heads of keys run out, then `context`
#    for the cache. `fsdp` sends what others would have read.
# 3. Devices that hold parts of one model have to draw the same token.
#
# **Sources.** The scaling book on [inference](https://jax-ml.github.io/scaling-book/inference) and
# [serving](https://jax-ml.github.io/scaling-book/applied-inference); *Efficiently Scaling Transformer
# Inference*, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102); PagedAttention,
# [arXiv:2309.06180](https://arxiv.org/abs/2309.06180); MLA and absorption, DeepSeek-V2,
# [arXiv:2405.04434](https://arxiv.org/abs/2405.04434); one set of devices as two axes in attention and one in
# the feed-forward, Helix, [arXiv:2507.07120](https://arxiv.org/abs/2507.07120).
