# %% [markdown]
# # 02 · The base model
#
# **Question.** What exactly is the model that the rest of this guide cuts up? How many numbers, FLOPs and
# bytes is it, and how do I know that it is right?
#
# **Why it hurts not to know.** Every later chapter ends with "equal to one device". If the model on one
# device is wrong, all of them are. The loss does not tell: of three models trained below, the lowest loss
# belongs to a broken one.
#
# *Before this:* 00 and 01 (rooflines, tokens). *Mesh:* `data=1`, one of the eight simulated devices; from 03
# on the same functions run on all of them. *Runs in* 40 s on 2 cores.

# %%
import utils

utils.simulate_devices(8)

import os

quick = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
os.environ.setdefault("XLA_FLAGS", quick)  # programs this small: compile fast

import jax
import jax.numpy as jnp
import numpy as np

import config
import model
import pipeline
import sharding
from chapters import lesson

# %% [markdown]
# ## Three models, one right
#
# A decoder in the DeepSeek-V3 family, as small as can be and with every size different, so that no two dims
# can be confused. Tokens are bytes, and one more for "a text begins": V = 257. The letters are those of
# `model.py`: B rows of T positions, a stream D wide, L layers of H heads (K, R, U: a head's query and key,
# their rotary part, its value; C: the latent that keys and values are made of), a hidden width F.

# %%
sizes = {
    "n_layers": 2, "n_heads": 4, "d_rope": 6, "d_value": 12, "d_head": 16,
    "d_kv_latent": 24, "d_model": 64, "d_ff": 160, "vocab_size": 257,
    "n_experts": 0, "dense_prefix": 0, "tie_embeddings": True, "remat": "none",
}  # fmt: skip
flags = {f"model.{name}": size for name, size in sizes.items()}
flags |= {"data.batch_size": 8, "data.seq_len": 72, "run.steps": 80, "optim.lr": 1e-2}
cfg = config.preset("laptop", **flags)
c, mesh = cfg.model, sharding.make_mesh("data=1")
B, T = cfg.data.batch_size, cfg.data.seq_len
V, D, F, L, H = c.vocab_size, c.d_model, c.d_ff, c.n_layers, c.n_heads
K, R, U, C = c.d_head, c.d_rope, c.d_value, c.d_kv_latent
start = sharding.init(model.declare(c), mesh, seed=0)
N = sum(w.size for w in jax.tree.leaves(start))
print(f"N = {N:,} parameters, {B} x {T} = {B * T} tokens a step")

# %% [markdown]
# The text is the Python standard library on your machine, so your losses differ a little from ours. Every
# row begins with the extra token, and every byte is a target, predicted from what stands before it.

# %%
from pathlib import Path

files = sorted(Path(os.__file__).parent.glob("*.py"))
text = b"".join(file.read_bytes() for file in files)
text = np.frombuffer(text, np.uint8).astype(np.int32)
share = np.unique(text, return_counts=True)[1] / len(text)
unigram = -np.sum(share * np.log(share))  # entropy of single bytes
END = 256


def rows(step):
    """B pieces of T bytes, others at every step."""
    first = np.random.default_rng(step).integers(0, len(text) - T, B)
    return text[first[:, None] + np.arange(T)]


def batch(text_BT):
    tokens_BT, ones_BT = np.roll(text_BT, 1, axis=1), np.ones_like(text_BT)
    tokens_BT[:, 0] = END
    reads = {"tokens_BT": tokens_BT, "segments_BT": ones_BT}
    reads["positions_BT"] = np.cumsum(ones_BT, axis=1, dtype=np.int32) - 1
    return reads | {"targets_BT": text_BT, "weights_BT": np.float32(ones_BT)}


# %% [markdown]
# Two faults, each in a working-looking function. `leaky` lets a position see one further than itself, which
# is its target. `mixed` turns queries and keys by their position, as rotary embeddings do, with a formula
# from two libraries: coordinates paired as halves (i with i + R/2), angles listed as for neighbours (2i with
# 2i + 1).

# %%
allowed = model.allowed


def leaky(positions_bs, positions_bS, *segments):
    return allowed(positions_bs + 1, positions_bS, *segments)


def mixed(x_bSHR, angles_bSr):
    angles = jnp.repeat(angles_bSr, 2, axis=-1)[:, :, None, :]
    first, second = jnp.split(x_bSHR, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x_bSHR * jnp.cos(angles) + turned * jnp.sin(angles)


# %% [markdown]
# Each is put in place of the function of `model.py`, and the project's own loss, gradients and logits are
# compiled around it.

# %%
from unittest import mock


def quickly(function, *args):
    """Compile what is looked at more than run."""
    less = {"xla_backend_optimization_level": 0}
    less["xla_llvm_disable_expensive_passes"] = True
    return function.lower(*args).compile(compiler_options=less)


def programs(**swaps):
    """A step's loss, gradients and logits, with some functions of `model` replaced."""
    with mock.patch.multiple(model, **swaps):
        step = pipeline.loss_and_grads(cfg, mesh).lower(start, some, 0).compile()
        return step, quickly(pipeline.logits(cfg, mesh), start, row)


some = batch(rows(0))
row = {name: some[name][:1] for name in ("tokens_BT", "positions_BT", "segments_BT")}
swaps = {"right": {"allowed": allowed}, "mixed": {"rotate": mixed}}
swaps["leaky"] = {"allowed": leaky}
compiled = {name: programs(**swap) for name, swap in swaps.items()}
steps, readers = ({name: pair[n] for name, pair in compiled.items()} for n in (0, 1))

# %% [markdown]
# Before the first step, a check that costs nothing. On random tokens no model can do better than guess
# evenly, ln V nats. What does one score that has learned nothing?

# %%
rng, step = np.random.default_rng(0), steps["right"]
random_rows = lambda: rng.integers(0, V, (B, T), np.int32)
untrained = np.mean([step(start, batch(random_rows()), 0)[0] for _ in range(8)])
print(f"untrained, random tokens: {untrained:.2f} nats; ln V = {np.log(V):.2f}")
assert abs(untrained - np.log(V) - 0.5) < 0.1

# %% [markdown]
# Half a nat worse. The logits begin as random numbers of variance 1 (a row of the table has length 1, what
# comes out of the last norm has length √D), and the mean of exp of such numbers is e^(1/2). A healthy start
# is ln V + 1/2. Now train all three, from one start on the same rows.

# %%
import optimizer

chain = optimizer.chain_of(cfg)
no_moments = jax.jit(chain.init)(start)


@jax.jit
def update(params, moments, grads):
    changes, moments = chain.update(grads, moments, params)
    return jax.tree.map(jnp.add, params, changes), moments


def train(step):
    params, moments, losses = start, no_moments, []
    for n in range(cfg.run.steps):
        loss, _, grads = step(params, batch(rows(n)), n)
        params, moments = update(params, moments, grads)
        losses.append(float(loss))
    return params, losses


trained = {name: train(step) for name, step in steps.items()}

# %% mystnb={"image": {"alt": "Three loss curves: right and mixed lie on each other, below the entropy of single bytes; leaky falls far below both."}}
figure, axes = lesson.plt.subplots(figsize=(6, 3.4))
end = {name: np.mean(losses[-10:]) for name, (_, losses) in trained.items()}
for name, line in {"right": "-", "mixed": ":", "leaky": "--"}.items():
    label = f"{name}, {end[name]:.2f} at the end"
    axes.plot(trained[name][1], line, color="black", label=label)
levels = {"ln 257, guessing evenly": np.log(V), "entropy of single bytes": unigram}
for what, level in levels.items():
    axes.axhline(level, color=lesson.NEUTRAL, lw=0.6)
    axes.text(79, level + 0.1, f"{what}: {level:.2f}", ha="right", size=9)
axes.set(title="The best curve cheats; another fault lies on the right one")
axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, 6.4))
axes.legend(loc="lower left")
assert end["leaky"] < 0.5 * end["right"] and max(end["right"], end["mixed"]) < unigram

# %% [markdown]
# ## Two questions that a model cannot dodge
#
# A loss is one number, and rewards whatever makes it small. Ask the logits instead:
#
# - **Future.** Change all tokens from some place on. No logit before it may move.
# - **Shift.** Number the positions from 500 instead of 0. With rotary embeddings nothing may move, since
#   scores depend on distances.


# %%
def logits(name, tokens_T, first=0):
    """[T, V] of one row of tokens, by one of the models."""
    positions_T = first + np.arange(T, dtype=np.int32)
    one = {"tokens_BT": tokens_T[None], "positions_BT": positions_T[None]}
    one["segments_BT"] = np.ones((1, T), np.int32)
    return np.asarray(readers[name](trained[name][0], one))[0]


def moved(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


fresh, at = batch(rows(10**6)), 50
tokens_T = fresh["tokens_BT"][0]
other_T = np.where(np.arange(T) < at, tokens_T, (tokens_T + 1) % V)
for name in swaps:
    here_TV = logits(name, tokens_T)
    future = moved(logits(name, other_T)[:at], here_TV[:at])
    shift = moved(logits(name, tokens_T, first=500), here_TV)
    print(f"{name:5} moved by the future: {future:7.1e}, by a shift: {shift:7.1e}")
    assert (future > 1e-3, shift > 1e-3) == (name == "leaky", name == "mixed")

# %% [markdown]
# Two numbers, two verdicts. Both faults are common. Four model classes of `transformers` let the future in
# from v5.9 on ([issue 48745](https://github.com/huggingface/transformers/issues/48745)), and fine-tuning of
# Gemma 2 fell to a loss of 0 ([31673](https://github.com/huggingface/transformers/issues/31673)). The mixed
# formula stood for nine months in a model there
# ([47328](https://github.com/huggingface/transformers/issues/47328)), and in a course on building GPT
# ([issue 6](https://github.com/raiyanyahya/how-to-train-your-gpt/issues/6)); in the best-known guide of our
# own kind, too, scores depended on absolute positions.
#
# ## The whole model, in NumPy
#
# The strongest check: write it a second time, in another way, and compare. A layer has two branches, which
# read the stream `x_TD` through a norm and add to it. RMSNorm scales a vector to root mean square 1, then by
# a learned gain. Rotary takes coordinates i and i + R/2 as one complex number and multiplies it by
# e^(i·angle), the angle in proportion to the position. A query at p times the conjugate of a key at q then
# carries the angle of p − q: the distance alone, which was the second question.


# %%
def norm(x, gain):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + c.norm_eps) * gain


def turn(x_THR):
    half = x_THR.shape[-1] // 2
    angles = np.outer(np.arange(len(x_THR)), c.rope_theta ** (-np.arange(half) / half))
    z = (x_THR[..., :half] + 1j * x_THR[..., half:]) * np.exp(1j * angles[:, None, :])
    return np.concatenate([z.real, z.imag], axis=-1)


def feed_forward(w, x_TD):
    gate_TF = x_TD @ w.w_gate_DF
    return (gate_TF / (1 + np.exp(-gate_TF)) * (x_TD @ w.w_up_DF)) @ w.w_down_FD


# %% [markdown]
# Latent attention (MLA) squeezes a position into `c_TC`, C = 24 numbers, and makes keys and values of all
# heads out of it. A second, small key `k_TR` is turned by its position and shared by all heads; why it
# stands apart comes below. A score is the sum of both products.


# %%
def attention(w, x_TD):
    c_TC = norm(x_TD @ w.w_down_kv_DC, w.norm_kv_C)
    k_TR = turn((x_TD @ w.w_key_rotary_DR)[:, None])[:, 0]
    q_THK = np.einsum("TD,DHK->THK", x_TD, w.w_query_QHK)
    q_THR = turn(np.einsum("TD,DHR->THR", x_TD, w.w_query_rotary_QHR))
    k_THK = np.einsum("TC,CHK->THK", c_TC, w.w_key_CHK)
    v_THU = np.einsum("TC,CHU->THU", c_TC, w.w_value_CHU)
    scores_HTS = np.einsum("THK,SHK->HTS", q_THK, k_THK)
    scores_HTS = (scores_HTS + np.einsum("THR,SR->HTS", q_THR, k_TR)) / np.sqrt(K + R)
    scores_HTS = np.where(np.tri(len(x_TD)), scores_HTS, -np.inf)
    weight_HTS = np.exp(scores_HTS - scores_HTS.max(axis=-1, keepdims=True))
    weight_HTS /= weight_HTS.sum(axis=-1, keepdims=True)
    return np.einsum("HTS,SHU,HUD->TD", weight_HTS, v_THU, w.w_out_HUD, optimize=True)


# %%
def reference(params, tokens_T):
    w = jax.tree.map(np.float64, params)
    x_TD = w.embedding_VD[tokens_T]
    for n in range(L):
        layer = jax.tree.map(lambda x, n=n: x[n, 0], w.blocks.dense)
        x_TD = x_TD + attention(layer.attention, norm(x_TD, layer.norm_attention_D))
        normed_TD = norm(x_TD, layer.norm_feed_forward_D)
        x_TD = x_TD + feed_forward(layer.feed_forward, normed_TD)
    return norm(x_TD, w.norm_D) @ w.embedding_VD.T


for name in swaps:
    difference = moved(logits(name, tokens_T), reference(trained[name][0], tokens_T))
    print(f"{name:5} differs from NumPy by {difference:.0e} of the largest logit")
    assert (difference < 1e-5) == (name == "right")
right = trained["right"][0]

# %% [markdown]
# The table is *tied*: it looks tokens up, and transposed it makes logits. These forty lines are the model.
# `model.py` says the same for one device's slices, and its exchanges between devices are visible lines,
# which on one device do nothing. Its attention:

# %%
lesson.source(model.rotary_angles, model.rotate, model.latents, model.latent_attention)

# %% [markdown]
# ## What a token leaves behind
#
# To continue a text, each new token attends to all before it. What attention needs of them is kept: the
# *cache*. Plain attention keeps a key and a value for each of H heads. Grouped-query attention keeps them
# for G heads only, each shared by H/G query heads. Llama 3 8B, with G = 8 heads of K = 128 in 32 layers,
# keeps 2 · 8 · 128 · 32 bfloat16 numbers: 131,072 bytes a token.
#
# > **Predict.** DeepSeek-V3 has 84 times its parameters, 61 layers, and in each H = 128 heads of K = 128,
# > with C = 512 and R = 64. How many bytes does it keep of a token, in bfloat16? Read `attention` above once
# > more.

# %%
import generate


def kept(c, slots=1):
    """Shapes of the cache of one sequence; nothing is allocated."""
    return jax.eval_shape(lambda: generate.empty_cache(c, mesh, 1, slots))


def cache_bytes_of(c):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept(c)))


my_prediction = None  # bytes
deepseek, llama = (config.preset(name).model for name in ("deepseek_v3", "llama3_8b"))
counted = cache_bytes_of(deepseek)
lesson.predicted("DeepSeek-V3 keeps of a token", my_prediction, counted, "bytes")
assert (counted, cache_bytes_of(llama)) == (70_272, 131_072)

# %% [markdown]
# About half of what a model of 8 billion parameters keeps. Heads do not appear: C + R numbers a layer,
# whatever H. Plain heads would be 2 · 128 · 128 · 61 numbers, 57 times as many.
#
# The price seems to be that keys and values are made again, of every earlier position, for every new token.
# They are not. A score is q · (W c) = (Wᵀq) · c: move W to the *query*, and the latents themselves serve as
# keys; after the mixing, the same with values. W is *absorbed*. (And that is why the turned key stands
# apart. If W c were turned, a rotation by the distance would stand between q and W, another one for every
# pair of positions.)

# %%
lesson.source(generate.cached_latent_attention)

# %% [markdown]
# Another algorithm for the same numbers, so compare them: sixteen tokens at once into the cache, then eight
# one by one, against all at once without a cache.

# %%
from data import tokenizers

sampler = generate.Sampler(cfg, right, tokenizers.load("bytes"), mesh)
want_TV, cache = logits("right", tokens_T), generate.empty_cache(c, mesh, 1, 64)
new, worst = np.arange(16, dtype=np.int32)[None], 0.0
while new[0, -1] < 24:
    last = np.array([new.size - 1], np.int32)
    got_bV, cache = sampler.extend(right, cache, tokens_T[new], new, last)
    worst = max(worst, moved(np.asarray(got_bV[0]), want_TV[new[0, -1]]))
    new = new[:, -1:] + 1
print(f"cached and absorbed, against neither: {worst:.0e}")
assert worst < 1e-5
request = generate.Request(prompt="def __init__(", tokens=47, temperature=0.5)
print(repr(sampler.texts([request])[0]))

# %% [markdown]
# (After 80 steps it has the looks of Python.) What does absorption cost? Count it: for attention of
# DeepSeek-V3's shape, compile one new token against 64 and against 128 cached positions. The difference
# belongs to the positions.

# %%
from xla import ledger


def flops_of(program):
    return ledger.read(program.as_text(), mesh).flops


def flops_a_position(c):
    """What one new token spends on one cached position."""
    weights, new = sharding.shapes(model.declare(c), mesh), np.zeros((1, 1), np.int32)
    extend = generate.extend(c, mesh)
    program = lambda slots: quickly(extend, weights, kept(c, slots), new, new, new[0])
    few, many = flops_of(program(64)), flops_of(program(128))
    return (many - few) / 64


# %%
names = ("n_heads", "d_head", "d_rope", "d_value", "d_kv_latent")
shape = {f"model.{name}": getattr(deepseek, name) for name in names}
shape["model.precision.compute"] = "bfloat16"
grouped = {"model.attention": "gqa", "model.n_kv_heads": 8}
found = {}
for name, more in {"MLA, absorbed": {}, "grouped, G = 8": grouped}.items():
    wide = config.replace(cfg, **shape, **more).model
    read = cache_bytes_of(wide)
    flops = flops_a_position(wide)
    found[name] = read / L, flops / read
    print(f"{name:14} {read / L:5,.0f} bytes a layer, {flops / read:5.1f} FLOPs a byte")
assert abs(found["MLA, absorbed"][1] - 128 * (2 * 512 + 64) / (512 + 64)) < 0.1

# %% [markdown]
# In a grouped cache every byte serves H/G heads, here 16. A latent serves *all* heads, and as key and as
# value: H (2C + R)/(C + R) FLOPs a byte, nearly 2H. Where is that on a chip? Recall the ridge of chapter 00:
# with fewer FLOPs a byte, a chip waits for its memory. (Large dots are the two that were counted, small ones
# follow from H/G.)

# %% mystnb={"image": {"alt": "Cache bytes of a token in a layer against FLOPs a byte: plain heads at the lower right, MLA at the upper left, in the band of the ridges of two chips."}}
from plan import hardware

speeds = {name: hardware.CHIPS[name] for name in ("v4", "h100")}
v4, h100 = (chip.peak_flops_per_s / chip.hbm_bytes_per_s for chip in speeds.values())
figure, axes = lesson.plt.subplots(figsize=(6, 3.4))
axes.axhspan(v4, h100, color=lesson.NEUTRAL, alpha=0.35, lw=0)
axes.text(2.4e5, 350, f"ridges: TPU v4 {v4:.0f}, H100 {h100:.0f}", ha="right", size=9)
heads = {"plain, 128 heads": 128, "grouped, G = 32": 32, "one shared head": 1}
points = {name: (2 * G * 128 * 2, 128 / G) for name, G in heads.items()} | found
for name, (size, intensity) in points.items():
    axes.loglog(size, intensity, "o", color="black", ms=7 if name in found else 4)
    axes.annotate(name, (size, intensity), (7, -3), textcoords="offset points", size=9)
axes.set(title="One latent for all heads lifts decoding to the ridge")
axes.set(xlim=(300, 6e5), ylim=(0.6, 800))
axes.set(xlabel="bytes kept of a token in one layer", ylabel="FLOPs a byte read")
assert v4 < found["MLA, absorbed"][1] < h100

# %% [markdown]
# Batching cannot help a plain cache: each sequence brings its own, so no byte is shared, and decoding over a
# long text runs at 1/295 of an H100's peak at best. MLA is on the ridge. DeepSeek's kernel is bound by
# arithmetic for that reason, [as its authors
# derive](https://github.com/deepseek-ai/FlashMLA/blob/main/docs/20250422-new-kernel-deep-dive.md), and they
# do not split its heads between devices: each would read the whole latent, for a share of the FLOPs.
#
# ## Logits that must not exist
#
# The last product makes V numbers of every token. For the headline run of this project (256 sequences of
# 1,024 tokens, V = 100,352) that would be 256 · 1,024 · 100,352 · 4 bytes = 105 GB in float32. They never
# exist together: the loss takes `loss_chunk` tokens at a time, and the backward pass makes a chunk's logits
# again.

# %%
lesson.source(model.chunked_cross_entropy, model.cross_entropy_sum)


def temporaries(chunk, vocabulary=100_352):
    """Bytes that a compiled step needs besides what it is given and returns."""
    big = {"model.vocab_size": vocabulary, "model.loss_chunk": chunk}
    big = config.replace(cfg, **big)
    weights = sharding.shapes(model.declare(big.model), mesh)
    step = quickly(pipeline.loss_and_grads(big, mesh), weights, some, 0)
    return step.memory_analysis().temp_size_in_bytes


whole, table = temporaries(B * T), 4 * D * 100_352
of_logits = 4 * B * T * 100_352
print(f"all logits: {of_logits / 1e6:.0f} MB; the table: {table / 1e6:.1f} MB")
print(f"temporaries of a step with all tokens at once: {whole / 1e6:.0f} MB")

# %% [markdown]
# A bit more than twice the logits: they, and what the backward pass makes of them.
#
# > **Predict.** Our model with a vocabulary of 100,352. How many MB of temporaries with `loss_chunk=36`, a
# > sixteenth of the tokens at a time?

# %%
my_prediction = None  # MB
small, smaller = temporaries(36), temporaries(9)
lesson.predicted("with chunks of 36", my_prediction, small / 1e6, "MB", within=0.1)
print(f"with chunks of 9: {smaller / 1e6:.0f} MB, {smaller / table:.1f} x the table")
assert 1.3 * whole / 16 < small < whole / 3 and small < 1.5 * smaller

# %% [markdown]
# Not a sixteenth. What remains has the size of the *table*: above all its gradient, D · V numbers, to which
# every chunk adds. A chunk's logits are chunk · V numbers. So a chunk of fewer tokens than the model is wide
# saves next to nothing, whatever V. The result is the same, and a chunk need not divide the tokens:

# %%
by_100 = pipeline.loss_and_grads(config.replace(cfg, **{"model.loss_chunk": 100}), mesh)
loss, _, grads = quickly(by_100, right, fresh, 0)(right, fresh, 0)
loss_at_once, _, grads_at_once = steps["right"](right, fresh, 0)
agree = lesson.same((loss, grads), (loss_at_once, grads_at_once))
print(f"chunks of 100, and all {B * T} at once: same loss and gradient: {agree}")
assert agree

# %% [markdown]
# ## Counting what is there
#
# Parameters, by their letters, against what `model.declare` says:

# %%
in_attention = D * H * (K + R) + D * (C + R) + C * H * (K + U) + H * U * D
matrices = V * D + L * (in_attention + 3 * D * F)
gains = L * (2 * D + C) + D
declared = sum(d.size for d in sharding.named(model.declare(c)).values())
print(f"matrices {matrices:,} + gains {gains:,}; declared {declared:,}")
assert matrices + gains == declared == N

# %% [markdown]
# An entry of a matrix meets each token once, in a multiplication and an addition: 2N FLOPs a token, forward.
# Backward takes two products of the same size, for the inputs and for the weights: 6N in all. The compiled
# program:

# %%
forward_flops = flops_of(quickly(pipeline.evaluate(cfg, mesh), start, fresh))
step_flops = flops_of(steps["right"])
print(f"forward: {forward_flops / (2 * N * B * T):.3f} x 2N")
print(f"step:    {step_flops / (6 * N * B * T):.3f} x 6N")
scores = 2 * L * H * (K + R + U) * T
assert forward_flops == B * T * (2 * matrices + scores)
assert step_flops == 3 * forward_flops + B * T * 2 * V * D

# %% [markdown]
# The assertions say to the last FLOP where the rule is off:
#
# - **Scores and mixing** have no parameters: 2H(K + R + U) FLOPs for each pair of positions. Here these are
#   all T² pairs, as a mask saves nothing in a product. (From 512 positions on, `model.causal` cuts the
#   queries in pieces and skips most of what is masked.)
# - **The table.** Tied, it counts once and multiplies once. Untied, one of two only looks up, and 6N says
#   too much.
# - **The logits' chunks** are made twice: 2VD more.
#
# > **Predict.** `remat="full"` keeps only what enters a layer; on the way back it first runs the layer's
# > forward pass again. Forward is one part and backward two, so three parts become four. By what factor do
# > the FLOPs of this compiled step grow?

# %%
my_prediction = None  # times
remat = config.replace(cfg, **{"model.remat": "full"})
full = quickly(pipeline.loss_and_grads(remat, mesh), start, fresh, 0)
growth = flops_of(full) / step_flops
lesson.predicted("remat=full", my_prediction, growth, "times the FLOPs", within=0.02)
again = forward_flops - B * T * (2 * V * D + L * 2 * F * D)
assert flops_of(full) == step_flops + again and growth < 1.3

# %% [markdown]
# Less than 4/3. The logits are made twice with or without. And nobody needs the *result* of a feed-forward's
# last product again: a gradient asks for a product's inputs. The compiler drops it, in every layer. What
# remat buys:

# %%
moments_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(no_moments))
print(f"AdamW's moments: {moments_bytes / N:.2f} bytes a parameter; in megabytes:")
for name, program in {"none": steps["right"], "full": full}.items():
    m = program.memory_analysis()
    given, out = m.argument_size_in_bytes, m.output_size_in_bytes
    print(f"remat={name}: given {given / 1e6:.2f}, returned {out / 1e6:.2f}, "
          f"temporaries {m.temp_size_in_bytes / 1e6:.1f}")  # fmt: skip
    assert given == 4 * N + 5 * 4 * B * T  # parameters, and five arrays of a batch
    assert 0 <= out - 4 * N < 1000  # gradients, and a few metrics

# %% [markdown]
# In come the parameters, out go as many gradients, and AdamW keeps two moments: 4 + 4 + 8 = **16 bytes a
# parameter** in float32, whatever the batch. Temporaries grow with the batch, and are most of what is there.
#
# ## What it costs, and when not to
#
# The planner does this arithmetic for models that no laptop holds. On ours it must say what was counted.
# Then: how far is 6N off for published shapes? (Of DeepSeek-V3, N counts what one token passes through.)

# %%
from plan import planner

ours = planner.plan(cfg), planner.plan(remat)
assert [one.hardware_flops for one in ours] == [step_flops, flops_of(full)]
print(f"planned and counted: {step_flops:,} FLOPs, with remat {flops_of(full):,}")
for name in ("dense_124m", "llama3_8b", "deepseek_v3"):
    big = config.preset(name)
    _, active = planner.parameters(big.model)
    off = planner.model_flops_per_token(big) / (6 * active)
    size, length = f"N = {active / 1e9:7.3f} billion", f"T = {big.data.seq_len:5,}"
    print(f"{name:11}  {size}, {length}: {off:.2f} x 6N")

# %% [markdown]
# And memory: the shape of GPT-2 on one H100, 32 sequences of 1,024 tokens at a time.

# %% mystnb={"image": {"alt": "Bars of memory for three remat policies: without remat saved activations alone pass the 80 GB of an H100, with full remat they nearly vanish."}}
plans = {}
for name in ("none", "dots", "full"):
    more = {"model.remat": name, "optim.max_device_batch": 32}
    plans[name] = planner.plan(config.preset("dense_124m", **more), "h100:1")
figure, axes = lesson.plt.subplots(figsize=(6, 2.6))
for y, (name, one) in enumerate(plans.items()):
    GB = {part: size / 1e9 for part, size in one.memory_bytes.items()}
    state = GB["parameters"] + GB["optimizer"] + GB["gradients"]
    black = axes.barh(y, state, color="black")
    grey = axes.barh(y, GB["saved"], left=state, color=lesson.NEUTRAL)
    extra = one.hardware_flops / plans["none"].hardware_flops
    total = f"{one.peak_bytes / 1e9:5.1f} GB in all, fits: {one.fits}"
    print(f"remat={name}: {total}, {extra:.2f} x the FLOPs")
axes.axvline(80, color="black", lw=0.8)
axes.set(title="What fills a device is activations", xlabel="GB (line: an H100)")
axes.set_yticks(range(3), [f"remat={name}" for name in plans])
axes.invert_yaxis()
labels = ("16 bytes a parameter", "activations kept")
axes.legend((black, grey), labels, loc="lower right", bbox_to_anchor=(0.87, 0.1))

# %% [markdown]
# Three rules:
#
# - **Remat when it does not fit otherwise**, and then the mildest that does. It costs the FLOPs printed
#   above, and always less than a third.
# - **Absorb for decoding only.** A pair of positions costs 2H(2C + R) FLOPs absorbed, and 2H(K + R + U) once
#   keys and values are made: for DeepSeek-V3 1,088 to 320, 3.4 times. In training, keys are made once for
#   many queries, and arithmetic is the bound. So `model.latent_attention` makes them.
# - **A chunk of the loss wants D tokens at least**, and more than the chip's ridge. n tokens take 8nDV FLOPs
#   (logits twice, two gradients). For them, in bfloat16, the table is read three times, its gradient read
#   and written: 10DV bytes. That is 0.8n FLOPs a byte; an H100's 295 needs n = 369. The default is 1,024.
#   (The logits' own bytes are the same for every n.)
#
# Numbers, FLOPs and shapes are the same on any machine. Temporaries are those of XLA for CPU: another
# backend lays them out differently. And no second was measured here: what simulated devices cannot show is
# speed.
#
# ## Exercise 1: bytes in the cache
#
# What does a token leave behind in all layers together? `c.attention` is `"mla"` or `"gqa"`; the sizes are
# `d_kv_latent`, `d_rope`, `n_heads`, `n_kv_heads`, `d_head`, `n_layers`. The checker adds up the arrays that
# `generate.empty_cache` makes.


# %% tags=["hide-input"]
def width(c):
    """Bytes of one number in the cache."""
    return jnp.dtype(c.precision.compute).itemsize


def made(latent, grouped, layers=True, width=width):
    """An answer, right or wrong, from the numbers that one layer keeps."""
    one = lambda c: width(c) * (latent if c.attention == "mla" else grouped)(c)
    return lambda c: one(c) * (c.n_layers if layers else 1)


latent = lambda c: c.d_kv_latent + c.d_rope
both = lambda c: 2 * c.n_kv_heads * c.d_head
half, all_heads = (lambda c: both(c) // 2), (lambda c: 2 * c.n_heads * c.d_head)
twice, in_heads = (lambda c: 2 * latent(c)), (lambda c: c.n_heads * latent(c))
CACHE_HINTS = [
    (made(latent, both, layers=False), "That is one layer. What do the others keep?"),
    (made(latent, half), "Llama keeps more. A score needs a key, and then?"),
    (made(latent, all_heads), "Llama keeps less. Whose heads are in a `GroupedCache`?"),
    (made(twice, both), "DeepSeek keeps less. Is there a second array?"),
    (made(in_heads, both), "DeepSeek keeps less. Whose is a latent?"),
    (made(lambda c: c.d_kv_latent, both), "DeepSeek keeps more. What is turned?"),
    (made(latent, both, width=lambda c: 2), "Right in bfloat16; one is in float32."),
]


# %%
def cache_bytes(c):
    return ...  # width(c) is the bytes of one number


def check_cache_bytes(answer):
    models = [(c,) for c in (config.preset("tiny").model, llama, deepseek)]
    done = "Right for three models, in two number formats."
    return lesson.diagnose(answer, models, cache_bytes_of, CACHE_HINTS, done)


print(check_cache_bytes(cache_bytes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# latent, grouped = c.d_kv_latent + c.d_rope, 2 * c.n_kv_heads * c.d_head
# return width(c) * c.n_layers * (latent if c.attention == "mla" else grouped)
# ```
# </details>

# %% tags=["remove-cell"]
assert "Right for three" in check_cache_bytes(made(latent, both))
for wrong, hint in [*CACHE_HINTS, (cache_bytes, "Nothing there")]:
    assert hint in check_cache_bytes(wrong), hint

# %% [markdown]
# ## Exercise 2: someone else's weights
#
# Meta's Llama ([issue 25199](https://github.com/huggingface/transformers/issues/25199)) and GPT-J turn
# *neighbours*, coordinates 2i and 2i + 1, by angle i; `model.rotate` turns i and i + R/2. To load such
# weights, put the R columns of the query and key projections in another order, once. Which? `order(R)[n]` is
# the place, among theirs, of our coordinate n.


# %% tags=["hide-input"]
def neighbours(x_TR, angles_Tr):
    """Their rotation: pairs lie side by side."""
    even, odd = x_TR[:, 0::2], x_TR[:, 1::2]
    cos, sin = np.cos(angles_Tr), np.sin(angles_Tr)
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_TR.shape)


def left_over(order):
    """R -> (reorder, then `model.rotate`) minus (their rotation, then reorder)."""

    def of(R):
        places = order(R)
        if places is None or places is ...:
            return ...
        x_TR = np.random.default_rng(R).normal(size=(5, R)).astype(np.float32)
        angles_Tr = np.outer(np.arange(5), 0.5 ** np.arange(R // 2)).astype(np.float32)
        ours = model.rotate(x_TR[None, :, None, places], angles_Tr[None])[0, :, 0]
        return np.round(ours - neighbours(x_TR, angles_Tr)[:, places], 3) + 0.0

    return of


# %%
def order(R):
    return ...


def check_order(answer):
    same, back = range, lambda R: [n // 2 + n % 2 * (R // 2) for n in range(R)]
    flipped = lambda R: [*range(1, R, 2), *range(0, R, 2)]
    mistakes = [
        (left_over(same), "That changes nothing, and their pairs are not ours."),
        (left_over(back), "The right move, the wrong way: from ours to theirs."),
        (left_over(flipped), "The right pairs, turned backwards."),
    ]
    nothing = lambda R: np.zeros((5, R))
    done = "Right: `model.rotate` turns theirs now."
    return lesson.diagnose(left_over(answer), [(8,), (12,)], nothing, mistakes, done)


print(check_order(order))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return [*range(0, R, 2), *range(1, R, 2)]`: the first of each pair, then the second. A score does not
# change when query and key are reordered alike, so only the pairing has to fit. `weights/families.py` does
# this where it reads such weights. Without it a model runs, and is wrong as `mixed` is.
# </details>

# %% tags=["remove-cell"]
assert "Right:" in check_order(lambda R: [*range(0, R, 2), *range(1, R, 2)])
assert "Right:" in check_order(lambda R: np.arange(R).reshape(-1, 2).T.reshape(-1))
for wrong, hint in (
    (lambda R: list(range(R)), "changes nothing"),
    (lambda R: np.arange(R).reshape(2, -1).T.reshape(-1), "wrong way"),
    (lambda R: [*range(1, R, 2), *range(0, R, 2)], "backwards"),
    (lambda R: list(range(R))[::-1], "Not yet"),
    (order, "Nothing there"),
):
    assert hint in check_order(wrong), hint

# %% [markdown]
# ## Exercise 3: write the test
#
# Design the test that finds `leaky`, and worse. `logits_of(tokens_T)` gives `[T, V]`, and position t may use
# `tokens_T[: t + 1]`. Return whether a model uses more. Yours is tried on five: the right model; `leaky`,
# which with two layers reaches two tokens far; one whose logits know the next token and no more; one that
# sees it at a single place, as where two pieces of a sequence meet; and one with a thousandth of the mean
# over all positions in its logits.

# %% tags=["hide-input"]
import functools


def remembered(function):
    """The same function of tokens; asked again, it does not compute again."""
    known = functools.cache(lambda data: function(np.frombuffer(data, np.int32)))
    return lambda tokens_T: known(np.asarray(tokens_T, np.int32).tobytes())


def at_a_seam(positions_bs, *others):
    return allowed(positions_bs + (positions_bs == 40), *others)


with mock.patch.object(model, "allowed", at_a_seam):
    readers["seam"] = quickly(pipeline.logits(cfg, mesh), start, row)
trained["seam"] = trained["right"]
three = (functools.partial(logits, name) for name in ("right", "leaky", "seam"))
honest, two_far, seam = map(remembered, three)
one_far = remembered(lambda text_T: honest(text_T) + np.eye(V)[np.roll(text_T, -1)])
smooth = remembered(lambda text_T: honest(text_T) + honest(text_T).mean(axis=0) / 1000)


# %% tags=["hide-input"]
def check_leaks(answer):
    five = (honest, two_far, one_far, seam, smooth)
    says = lambda *verdicts: lambda logits_of, _: bool(verdicts[five.index(logits_of)])
    mistakes = [
        (says(1, 1, 1, 1, 1), "You accuse the right one too. Which logits may move?"),
        (says(0, 1, 1, 0, 1), "One leaks at a single place, and you asked at others."),
        (says(0, 1, 0, 0, 1), "Those that see one token too far, and no more, escape."),
        (says(0, 1, 1, 1, 0), "One leaks a little, everywhere. Do you look closely?"),
        (says(0, 0, 0, 0, 0), "Nobody leaks, you say; four of the five do."),
    ]

    def verdict(logits_of, tokens_T):
        said = answer(logits_of, tokens_T)
        return said if said is None or said is ... else bool(said)

    cases, done = [(one, tokens_T) for one in five], "Right on all five models."
    return lesson.diagnose(verdict, cases, says(0, 1, 1, 1, 1), mistakes, done)


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
# Every place, all logits before it, exactly. Equality is not too strict: a masked score of −1e30 has weight
# exp(−1e30) = 0, and 0 times any finite number is 0. A mask of −1e4 is another matter: a model once learned
# scores below it, and copied from the future at a loss of nearly 0 ([minGPT
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


every, near = range(1, T), functools.partial(np.allclose, rtol=0, atol=1e-2)
assert "Right" in check_leaks(asking(every))
for wrong, hint in (
    (asking(every, upto=lambda at: None), "right one too"),
    (asking([T - 1]), "single place"),
    (asking([T // 2]), "single place"),
    (asking(every, upto=lambda at: at - 1), "and no more"),
    (asking(every, same=near), "a little"),
    (asking([]), "Nobody"),
    (leaks, "Nothing there"),
):
    assert hint in check_leaks(wrong), (hint, check_leaks(wrong))

# %% [markdown]
# ## A bug to find
#
# A colleague continues texts without a cache: more work, fewer lines. The weights are those of the right
# model above, and the likeliest byte is taken each time. There is no error, and the first byte is always
# right.


# %%
def continued(prompt, count):
    """The likeliest continuation of a prompt: `count` tokens."""
    ids = [END, *prompt.encode()]
    row_T = jnp.zeros(T, jnp.int32).at[: len(ids)].set(jnp.array(ids))
    found = []
    for at in range(len(ids), len(ids) + count):
        logits_V = logits("right", row_T)[at - 1]
        token = int(logits_V.argmax())
        row_T.at[at].set(token)
        found.append(token)
    return found


def sampled(prompt, count):
    """The same by `generate.Sampler`."""
    request = generate.Request(prompt=prompt, tokens=count, temperature=0)
    return [token for (token,) in sampler.ids([request])]


# %%
prompts = ("        return ", "for name in ", "    if self.")
for prompt in prompts:
    theirs, ours = (bytes(way(prompt, 16)) for way in (continued, sampled))
    shown = (repr(text.decode(errors="replace")) for text in (theirs, ours))
    print(f"{prompt!r:18}", *(f"{text:22}" for text in shown))


def check_continued(answer, broken=continued):
    differs = "The first byte is the sampler's, the others are not."
    cases = [(prompt, 24) for prompt in prompts]
    done = "Mended: byte for byte what the sampler says."
    return lesson.diagnose(answer, cases, sampled, [(broken, differs)], done)


print(check_continued(continued))

# %% [markdown]
# Each line: prompt, the colleague's text, the sampler's. Mend `continued`.
#
# <details><summary>Solution</summary>
#
# An array of JAX does not change: `row_T.at[at].set(token)` returns a new one, and nobody took it.
#
# ```python
# row_T = row_T.at[at].set(token)
# ```
#
# As it stood, the model never saw what it had written: from the second byte on it read zeros.
#
# **Where it was seen.** In the best-known guide of this kind sampling never sees its own tokens. Nothing
# that was watched could show it: the loss does not sample, and from a small model poor text is expected. One
# comparison would have: a sampler's likeliest byte is the argmax of one full pass over prompt and text.
# </details>


# %% tags=["remove-cell"]
def mended(prompt, count):
    ids = [END, *prompt.encode()]
    row_T = jnp.zeros(T, jnp.int32).at[: len(ids)].set(jnp.array(ids))
    found = []
    for at in range(len(ids), len(ids) + count):
        token = int(logits("right", row_T)[at - 1].argmax())
        row_T = row_T.at[at].set(token)
        found.append(token)
    return found


assert all(continued(prompt, 1) == sampled(prompt, 1) for prompt in prompts)
assert "Mended" in check_continued(mended)
assert "first byte" in check_continued(continued)

# %% [markdown]
# ## Three lines to keep
#
# 1. A loss is no proof: change the future, shift the positions, write it a second time, and compare.
# 2. Latent attention keeps C + R numbers of a token whatever the number of heads, and does nearly 2H FLOPs a
#    byte.
# 3. Begin with 6N FLOPs a token and 16 bytes a parameter, then add scores, chunks, remat and activations.
#
# **Sources**
#
# - RMSNorm: [arXiv:1910.07467](https://arxiv.org/abs/1910.07467), section 4. Rotary:
#   [arXiv:2104.09864](https://arxiv.org/abs/2104.09864), section 3.2. SwiGLU:
#   [arXiv:2002.05202](https://arxiv.org/abs/2002.05202).
# - MLA and absorption: DeepSeek-V2, [arXiv:2405.04434](https://arxiv.org/abs/2405.04434), section 2.1; the
#   shape: DeepSeek-V3, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 4.2. Grouped-query
#   attention: [arXiv:2305.13245](https://arxiv.org/abs/2305.13245).
# - 6N: [arXiv:2001.08361](https://arxiv.org/abs/2001.08361), section 2.1; with attention: PaLM,
#   [arXiv:2204.02311](https://arxiv.org/abs/2204.02311), appendix B.
# - The scaling book: [transformer math](https://jax-ml.github.io/scaling-book/transformers),
#   [inference](https://jax-ml.github.io/scaling-book/inference). JAX:
#   [`jax.checkpoint`](https://docs.jax.dev/en/latest/gradient-checkpointing.html),
#   [`jax.Array.at`](https://docs.jax.dev/en/latest/_autosummary/jax.Array.at.html).
