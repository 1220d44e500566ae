# %% [markdown]
# # 17 · Write one kernel: the inner step of ring attention in Pallas
#
# A kernel is a program for the inside of one chip. You decide which blocks of an array are in fast memory,
# in which order they are computed, and what is written back to HBM, the chip's large memory. Pallas is the
# part of JAX in which you write kernels.
#
# Attention is the usual reason to write one. In each step of chapter 06's ring, XLA writes all scores to
# HBM and reads them again. That takes several times as long as the matmuls. The kernel of this page is
# FlashAttention's forward pass, and it never writes scores. You write it in 45 lines with its test, run it
# on a CPU in an interpreter, use it in the ring, and compile it for a TPU that you don't have.
#
# *Prerequisites:* chapters 00 (roofline) and 06 (ring attention). *Mesh:* `context=4`, simulated.
# *Runs in* 40 s on 2 cores. *Reading takes* 30 minutes, 75 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

from functools import cache, partial
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

from chapters import folded, lesson, opening
from plan.chips.hardware import CHIPS

# %% tags=["hide-input"] mystnb={"image": {"alt": "One step of the ring on eight devices. Above: without a kernel each device stores 8 GiB of scores, with it a fraction of 1 GiB. Below: without it the step takes 7.7 ms, nearly all of it HBM traffic; with it 1.1 ms of matmuls."}}
GiB, s = 2**30, opening.TOKENS // opening.DEVICES  # 8,192 positions per device
pairs = opening.H * s * s  # query-key pairs of all heads
inputs = 2 * s * opening.K * (opening.H + 2 * opening.G)  # q, k, v in bf16
states = 4 * s * opening.H * (opening.K + 2)  # the result so far, float32
matmul = opening.compute_ms(2 * opening.K * pairs)  # one of the two


def hbm_ms(size):
    return 1e3 * size / opening.CHIP.hbm_bytes_per_s


write, soften, read = (hbm_ms(width * pairs) for width in (4, 4 + 2, 2))
labels = dict(rows=("compute", "HBM"), units=("GiB", "ms"))
small = {"activations": (inputs + states) / GiB}
traffic = [("write", 0, write), ("softmax", write, soften)]
traffic += [("read", write + soften, read)]
works = [("", 0, matmul), ("", write + soften, matmul)]
again = hbm_ms(2 * states + 4 * opening.K * pairs / 512)  # keys for each 512 queries
large = small | {"scores": 4 * pairs / GiB}
before = opening.Scene("XLA: scores go through HBM", large, works, traffic)
once = [("", 0, 2 * matmul)], [("", 0, again)]
after = opening.Scene("one kernel: they stay on chip", small, *once)
title = "A step of the ring without scores in HBM"
opening.before_after(before, after, title, **labels)

# %% [markdown]
# The figure shows one step of the ring in one layer of Llama 3 8B: 65,536 positions on eight H100s, at
# peak speed. The 8,192 queries of a device attend to the 8,192 keys of another device. On the left, XLA
# runs three operations: a matmul that writes float32 scores, a softmax that reads them and writes bfloat16
# weights, and a matmul that reads the weights. On the right, one kernel reads the queries once, and the
# keys and values once for each block of 512 queries.
#
# > **Predict.** There are 32 query heads and 8 KV heads of width 128, in bfloat16. How many times as many
# > bytes are the float32 scores as the queries, keys and values together?

# %%
my_prediction = None  # times
ratio = 4 * pairs / inputs
lesson.predicted("scores over inputs", my_prediction, ratio, "times", within=0.01)

# %% tags=["remove-cell"]
assert (pairs * 4, inputs) == (8_589_934_592, 100_663_296)
assert round(write + soften + read, 1) == 7.7 and round(2 * matmul, 1) == 1.1
assert again < 2 * matmul

# %% [markdown]
# The inputs are 0.1 GB, and the result is about as small. The 8.6 GB of scores exist only between two
# matmuls. What do they cost? Each score is written and read with 4 bytes, and its weight with 2, so a
# score needs 12 bytes of HBM traffic:

# %%
print("              matmuls   HBM traffic of scores")
for chip in (CHIPS["v5e"], CHIPS["h100"]):
    compute_s = 4 * opening.K * pairs / chip.peak_flops_per_s
    scores_s = 12 * pairs / chip.hbm_bytes_per_s
    print(f"{chip.name:10}{1e3 * compute_s:8.1f} ms {1e3 * scores_s:12.1f} ms")

# %% [markdown]
# HBM takes six or seven times as long as the matmuls. XLA does fuse elementwise operations with a matmul.
# But it does not fuse two matmuls with a softmax between them, because the softmax needs a whole row of
# scores before it can return the first weight. Compiled for a v5e at this size, chapter 06's
# `attend_block` needs 8.59 GB of temporary memory, all for scores, and XLA counts 26.8 GB of traffic (the
# command is below). To fuse the matmuls, you have to change the algorithm.
#
# ## The online softmax
#
# Take one query, and give it its keys block by block. After some blocks, save three things: the largest
# score so far, $m$; the sum of $e^{z - m}$ over all scores $z$ so far, $\ell$; and the sum of all values
# so far with the same weights, $o$. The next block has scores $z$ and values $v$. One of its scores may be
# larger than $m$, so the new maximum is $m' = \max(m, \max z)$. The old sums contain the factor $e^{-m}$,
# and now need $e^{-m'}$. So you rescale both by $e^{m - m'}$ before you add the new block:
#
# $$\ell' = e^{m - m'}\,\ell + \sum e^{z - m'} \qquad o' = e^{m - m'}\,o + \sum e^{z - m'}\,v$$
#
# After the last block, the result is $o / \ell$. The order of the blocks does not matter, and neither does
# their origin: the next block may be read from HBM, or arrive from a neighbor. So **a step of the ring
# takes the state $(o, m, \ell)$ of each query, adds the keys that have arrived, and returns the new
# state.** Chapter 06's `merge` is then part of the kernel.
#
# ## Blocks and the grid
#
# A TPU core computes on blocks of arrays in VMEM, its on-chip memory. If you have written a Triton kernel,
# you know most of Pallas. This is what differs on a TPU:
#
# | | Triton | Pallas on a TPU |
# |---|---|---|
# | a block of an array | pointers and offsets, `tl.load` | a `BlockSpec`: the block's shape, and a function from the grid's indices to the block's index. Pallas copies the block to VMEM |
# | the grid | programs that run in parallel, in any order | a loop that one core runs in order, the last index fastest |
# | the loop over keys | a `for` inside the program, sums in registers | the last axis of the grid. An output block stays in VMEM as long as its index stays the same |
# | the next block | prefetched if you set `num_stages` | always fetched during the current step, into a second buffer |
# | the limit | shared memory, about 228 KB on an H100 | VMEM, of which a kernel may use 16 MiB by default (32 MiB on a v6e) |
#
# Here the grid has three axes: heads, blocks of queries, and blocks of keys. For one head:

# %% tags=["hide-input"] mystnb={"image": {"alt": "A grid of four query blocks and four key blocks, numbered in the order of the loop, row by row. In step 9 the query block of row 2, the key and value block of column 1 and the state of row 2 are in VMEM; blocks above the diagonal are skipped."}}
figure, axes = plt.subplots(figsize=(5.4, 3.6))
for row, column in np.ndindex(4, 4):
    now, hidden = (row, column) == (2, 1), column > row
    look = dict(fc=lesson.NEUTRAL if now else "none", alpha=0.5 if now else 1, lw=0.6)
    text = "skipped" if hidden else f"step {4 * row + column}"
    lesson.box(axes, column, row, text=text, size=8, ec=lesson.NEUTRAL, **look)
gray = dict(fc=lesson.NEUTRAL, alpha=0.3)
lesson.box(axes, -1.6, 2, 1.4, 1, "q block 2,\nstate block 2", 8, **gray)
lesson.box(axes, 1, -0.9, 1, 0.8, "k, v\nblock 1", 8, **gray)
lesson.blank(axes, xlim=(-1.7, 4.1), ylim=(4.1, -1))
title = axes.set_title("In step 9, the gray blocks are in VMEM")

# %% [markdown]
# ## The kernel by hand
#
# You can paste the program into an empty file. A block has x queries and X keys. Scores are transposed,
# [X, x], so that the maxima and sums of x queries are rows [1, x]. (A TPU pads a column [x, 1] to 128
# columns.) Queries are already divided by $\sqrt K$.
#
# `q_at[i]` is the position of the first query in block i, and `k_at[j]` that of the first key in block j.
# The other positions of a block follow it. Pallas loads these two small tables before the loop starts
# (*scalar prefetch*), and passes them to the kernel and, as `*at`, to the index functions.
#
# The arguments of `kernel` are references to blocks in VMEM: `ref[...]` reads a block or writes it.
# `pl.when` runs a function only if its condition holds. The first three `states` are inputs, and the last
# three outputs. `ring_step` says which block of each array belongs to which step of the grid.
#
# A query may see no key of a block that other queries see. If it has seen none before, its maximum stays
# -1e30, so its weights are exp(0) = 1 and its sums are garbage. Its first real key multiplies them by 0.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

f32 = dict(preferred_element_type=jnp.float32)  # matmuls of bfloat16 add in float32


def add_keys(scores_Xx, v_XK, mixed_Kx, top_1x, sum_1x):
    higher_1x = jnp.maximum(top_1x[...], scores_Xx.max(axis=0, keepdims=True))
    rescale_1x = jnp.exp(top_1x[...] - higher_1x)
    weights_Xx = jnp.exp(scores_Xx - higher_1x)
    new_Kx = jnp.einsum("XK,Xx->Kx", v_XK[...], weights_Xx.astype(v_XK.dtype), **f32)
    mixed_Kx[...] = mixed_Kx[...] * rescale_1x + new_Kx
    sum_1x[...] = sum_1x[...] * rescale_1x + weights_Xx.sum(axis=0, keepdims=True)
    top_1x[...] = higher_1x


# %% tags=["by-hand"]
def kernel(q_at, k_at, q_xK, k_XK, v_XK, *states):
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def begin():
        for old, new in zip(states[:3], states[3:], strict=True):
            new[...] = old[...]

    @pl.when(q_at[i] + q_xK.shape[0] > k_at[j])  # else all these keys are later
    def visit():
        scores_Xx = jnp.einsum("XK,xK->Xx", k_XK[...], q_xK[...], **f32)
        count = lambda dim: jax.lax.broadcasted_iota(jnp.int32, scores_Xx.shape, dim)
        seen_Xx = q_at[i] + count(1) >= k_at[j] + count(0)
        add_keys(jnp.where(seen_Xx, scores_Xx, -1e30), v_XK, *states[3:])


# %% tags=["by-hand"]
def ring_step(q_HsK, k_HSK, v_HSK, q_at_s, k_at_S, states, x=16, X=32, **more):
    (H, s, K), S = q_HsK.shape, k_HSK.shape[1]
    queries = pl.BlockSpec((None, x, K), lambda h, i, j, *at: (h, i, 0))
    keys = pl.BlockSpec((None, X, K), lambda h, i, j, *at: (h, j, 0))
    by_query = lambda y: pl.BlockSpec((None, y, x), lambda h, i, j, *at: (h, 0, i))
    state, sizes = [by_query(K), by_query(1), by_query(1)], (H, s // x, S // X)
    grid = pltpu.PrefetchScalarGridSpec(2, sizes, [queries, keys, keys, *state], state)
    call = pl.pallas_call(kernel, list(map(jax.typeof, states)), grid_spec=grid, **more)
    return call(q_at_s[::x], k_at_S[::X], q_HsK, k_HSK, v_HSK, *states)


# %% tags=["by-hand"]
H, S, K, at_S = 2, 256, 16, jnp.arange(256)
q, k, v = jax.random.normal(jax.random.key(0), (3, H, S, K))
states = jnp.zeros((H, K, S)), jnp.full((H, 1, S), -1e30), jnp.zeros((H, 1, S))
for c in (slice(0, 128), slice(128, 256)):  # two chunks of keys arrive
    states = ring_step(q, k[:, c], v[:, c], at_S, at_S[c], states, interpret=True)
scores = jnp.where(at_S[:, None] >= at_S, q @ k.swapaxes(1, 2), -1e30)
want = jax.nn.softmax(scores) @ v
assert jnp.abs((states[0] / states[2]).swapaxes(1, 2) - want).max() < 1e-5
print("the kernel matches a softmax over all scores")

# %% [markdown]
# `interpret=True` runs the grid as a loop of JAX operations, on any device. It checks what the kernel
# computes, not how fast. For memory, here is what XLA's CPU compiler reports as temporary, with and without
# the kernel:


# %%
def one_device(q, k, v, at_S):
    scores = jnp.where(at_S[:, None] >= at_S, q @ k.swapaxes(1, 2), -1e30)
    return jax.nn.softmax(scores) @ v


def no_keys(q_HsK):
    """The state before the first key, made from q so that it varies along q's axes."""
    zero_HKs = 0 * q_HsK.swapaxes(1, 2).astype(jnp.float32)
    return zero_HKs, zero_HKs[:, :1] - 1e30, zero_HKs[:, :1]


def with_kernel(q, k, v, at_S, step=ring_step):
    state = step(q, k, v, at_S, at_S, no_keys(q), interpret=True)
    return (state[0] / state[2]).swapaxes(1, 2)


# %%
def temporary_MB(attend, S):
    shapes = [jax.ShapeDtypeStruct((H, S, K), "float32")] * 3
    program = jax.jit(attend).lower(*shapes, jax.ShapeDtypeStruct((S,), "int32"))
    return program.compile().memory_analysis().temp_size_in_bytes / 1e6


megabytes = {}
for S_ in (2048, 4096, 8192):
    sizes = megabytes[S_] = [temporary_MB(one, S_) for one in (one_device, with_kernel)]
    print(f"{S_:,} positions: {sizes[0]:6.1f} MB, with the kernel {sizes[1]:.1f} MB")

# %% tags=["remove-cell"]
assert all(one[0] == 4 * H * S_**2 / 1e6 for S_, one in megabytes.items()), "scores"
assert megabytes[4096][1] < 2.1 * megabytes[2048][1], "the kernel's memory does not"

# %% [markdown]
# Without the kernel it is the size of the scores, 4 x 2 x S² bytes for 2 heads. The kernel's memory grows
# only linearly. Grouped-query attention needs no more: with the index `h // (H // G)` for a block of keys,
# query heads share a KV head, and nothing is repeated.
#
# ## In the ring
#
# The ring is chapter 06's. The kernel passes the state from step to step, and the positions travel with
# the keys.


# %%
def ring(q_HsK, k_HsK, v_HsK, at_s, **more):
    """Attention [H, s, K], and the logsumexp of each query's scores [H, s]."""
    n = jax.lax.axis_size("context")
    onward = [(i, (i + 1) % n) for i in range(n)]
    state, keys = no_keys(q_HsK), [k_HsK, v_HsK, at_s]
    for step in range(n):
        if step > 0:
            keys = [jax.lax.ppermute(one, "context", onward) for one in keys]
        state = ring_step(q_HsK, *keys[:2], at_s, keys[2], state, **more)
    mixed_HKs, top_H1s, sum_H1s = state
    log_sum_Hs = (top_H1s + jnp.log(sum_H1s))[:, 0]
    return (mixed_HKs / sum_H1s).swapaxes(1, 2), log_sum_Hs


# %%
mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
cut = P(None, "context")
specs = dict(mesh=mesh, in_specs=(cut, cut, cut, P("context")), out_specs=cut)
interpreted = partial(ring, interpret=True)
try:
    jax.jit(jax.shard_map(interpreted, **specs))(q, k, v, at_S)
except ValueError as error:
    print(f"shard_map: {str(error).split(', but')[0]}")

# %% [markdown]
# `check_vma`, chapter 02's check of the axes along which a value varies, does not support this
# interpreter. This guide never switches it off. `jax.vmap` with an axis name also simulates devices: it
# runs the program of all four, and `ppermute` exchanges their values.


# %%
def on_four(program):
    """Run the program of four devices, each with a quarter of the positions."""
    split = lambda y_HSK: y_HSK.reshape(H, 4, -1, K)
    join = lambda y: y.reshape(H, S, *y.shape[3:])

    def run(q, k, v, at_S, *more):
        dims = (1, 1, 1, 0, *[1] * len(more))
        each = jax.vmap(program, dims, out_axes=1, axis_name="context")
        arrays = *map(split, (q, k, v)), at_S.reshape(4, -1), *map(split, more)
        return jax.tree.map(join, each(*arrays))

    return jax.jit(run)


result, log_sums = on_four(interpreted)(q, k, v, at_S)
assert lesson.same(result, want), "the ring differs from one device"
print("the ring of four devices matches one device")

# %% tags=["hide-input"]
chapter_06 = {}
for name in ("attend_block", "ring"):  # the cells of chapter 06
    exec(folded.code("06_context", name), chapter_06)
chapter_06["K"] = K  # its scores are divided by the square root of K
six = dict(mesh=mesh, in_specs=(P("context"),) * 4, out_specs=(P("context"),) * 2)
flip = lambda y_HSK: y_HSK.swapaxes(0, 1)


def ring_06(q_HSK, k_HSK, v_HSK, at_S):
    run = jax.shard_map(chapter_06["ring"], **six)
    return flip(run(flip(q_HSK) * K**0.5, flip(k_HSK), flip(v_HSK), at_S)[0])


assert lesson.same(jax.jit(ring_06)(q, k, v, at_S), want), "chapter 06 differs"
print("chapter 06's ring gives the same")

# %% [markdown]
# A slower interpreter, `interpret=pltpu.InterpretParams()`, which also simulates the memories of a TPU,
# runs in `shard_map` with the check. So does the compiled kernel. `tests/chapters/test_kernel.py` tests
# both.
#
# ## Gradients
#
# JAX cannot derive the backward pass of this kernel, because it writes to its references. So you write the
# backward pass yourself, with `jax.custom_vjp`. If you saved the softmax weights for it, they would go
# through HBM again. FlashAttention saves one number per query instead: the logsumexp $m + \log \ell$. The
# backward pass recomputes a block of scores $z$, and their weights are $w = e^{z - m - \log \ell}$.
#
# The gradient of a weight, $d_w$, is the dot product of the key's value and the gradient of the result.
# Through the softmax, the gradient of the score is $w\,(d_w - \sum w\,d_w)$. The sum over all keys would
# be a problem, because most of them have not arrived. But it equals the dot product of the result and its
# gradient, which each query knows from the start (`slope_Hs`).


# %%
def chunk_gradients(q, k, v, at_s, at_k, d_out, log_sum_Hs, slope_Hs):
    """Gradients of queries, keys and values from one chunk of keys."""
    scores_HsS = jnp.where(at_s[:, None] >= at_k, q @ k.swapaxes(1, 2), -1e30)
    weights_HsS = jnp.exp(scores_HsS - log_sum_Hs[..., None])
    d_weights_HsS = d_out @ v.swapaxes(1, 2)
    d_scores_HsS = weights_HsS * (d_weights_HsS - slope_Hs[..., None])
    turned = lambda y_HsS: y_HsS.swapaxes(1, 2)
    return d_scores_HsS @ k, turned(d_scores_HsS) @ q, turned(weights_HsS) @ d_out


# %%
@jax.custom_vjp
def attention(q, k, v, at_s):
    return interpreted(q, k, v, at_s)[0]


def forward(q, k, v, at_s):
    out, log_sum_Hs = interpreted(q, k, v, at_s)
    return out, (q, k, v, at_s, out, log_sum_Hs)


# %%
def backward(saved, d_out):
    (q, k, v, at_s, out, log_sum_Hs), n = saved, jax.lax.axis_size("context")
    slope_Hs = (d_out * out).sum(axis=-1)
    d_q, moving = 0 * q, [k, v, at_s, 0 * k, 0 * v]
    onward = [(i, (i + 1) % n) for i in range(n)]
    for _ in range(n):
        (k, v, at_k), rest = moving[:3], (d_out, log_sum_Hs, slope_Hs)
        new_q, *new_kv = chunk_gradients(q, k, v, at_s, at_k, *rest)
        d_q, d_kv = d_q + new_q, map(jnp.add, moving[3:], new_kv)
        moving = [jax.lax.ppermute(y, "context", onward) for y in (k, v, at_k, *d_kv)]
    return d_q, *moving[3:], None


attention.defvjp(forward, backward)


# %%
def gradients(function):
    """The gradients of q, k and v, from positions and the gradient of the result."""

    def program(q, k, v, at_S, d_out):
        return jax.vjp(lambda *qkv: function(*qkv, at_S), q, k, v)[1](d_out)

    return program


arrays = q, k, v, at_S, jax.random.normal(jax.random.key(1), want.shape)
ours = on_four(gradients(attention))(*arrays)
for name, other in {"one device": one_device, "chapter 06's ring": ring_06}.items():
    theirs = jax.jit(gradients(other))(*arrays)
    assert lesson.same(ours, theirs), f"gradients differ from {name}"
    print(f"three gradients match {name}")

# %% [markdown]
# This backward pass is plain JAX, so in each step it does write the scores of one chunk of keys to HBM. A
# kernel for it does the same five matmuls on blocks: see `backward_kernel` in `kernels/attention.py`. The
# gradients of keys and values travel with the keys, and after n sends they are at home. (Chapter 06 says
# what that costs.)
#
# ## Blocks that are skipped
#
# A causal mask hides half of all pairs. The condition of `pl.when` skips a block of scores if its first
# key is later than its last query, so most hidden pairs cost no matmul.
#
# > **Predict.** Each of 4 devices has 64 consecutive positions, and x = X = 16. So a step of the ring has
# > 4 x 4 blocks of scores per device, and four steps have 64. How many of them does the last device
# > compute?
#
# To count them, don't trust the condition that you have written. Fill the values of one block of keys with
# NaN. A hidden pair has weight 0, but 0 x NaN is NaN. So each query that is multiplied with this block
# becomes NaN, and each that skips it stays finite.


# %%
@cache
def counting_ring():
    return on_four(partial(interpreted, x=16, X=16))


def computed(order):
    """Which blocks are multiplied: [query block, key block], device after device."""
    q_, k_, v_ = (y[:, order] for y in (q, k, v))
    columns = []
    for b in range(S // 16):
        poisoned = v_.at[:, 16 * b : 16 * (b + 1)].set(jnp.nan)
        out_HSK = counting_ring()(q_, k_, poisoned, jnp.asarray(order))[0]
        columns.append(np.isnan(out_HSK[0, :, 0]).reshape(-1, 16).any(axis=1))
    return np.stack(columns, axis=1)


# %%
early_late = [c for i in range(4) for c in (i, 7 - i)]
ORDERS = {"in order": np.arange(S), "zig-zag": np.arange(S).reshape(8, -1)[early_late]}
blocks = {name: computed(order.reshape(-1)) for name, order in ORDERS.items()}
my_prediction = None  # blocks of the last device, in order
last = int(blocks["in order"][12:].sum())
lesson.predicted("the last device computes", my_prediction, last, "blocks")
for name, by_block in blocks.items():
    of_device = by_block.reshape(4, 4, 16).sum(axis=(1, 2))
    print(f"{name:9}", *of_device, "of 64 blocks, by device")

# %% tags=["remove-cell"]
by_device = lambda name: blocks[name].reshape(4, 4, 16).sum(axis=(1, 2)).tolist()
assert by_device("in order") == [10, 26, 42, 58] and by_device("zig-zag") == [34] * 4
steps = blocks["zig-zag"].reshape(4, 4, 4, 4).sum(axis=(1, 3))
assert {steps[i, (i - r) % 4] for i in range(4) for r in range(1, 4)} == {8}
assert (136 * 256, 256 * 257 // 2) == (34_816, 32_896) and 34_816 / 32_896 < 1.06

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two tables of 16 blocks of queries by 16 blocks of keys, computed blocks in green. In order, a triangle: the last device has 58 of 136 blocks. In zig-zag order each device has 34."}}
figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.6))
shades = ["#ffffff00", lesson.COLORS["context"]]
tint = plt.matplotlib.colors.LinearSegmentedColormap.from_list("", shades)
for ax, (name, by_block) in zip(axes, blocks.items(), strict=True):
    ax.imshow(by_block, cmap=tint, vmin=0, vmax=1.4, interpolation="nearest")
    for edge in (3.5, 7.5, 11.5):
        ax.axhline(edge, color=lesson.NEUTRAL, lw=0.8)
        ax.axvline(edge, color=lesson.NEUTRAL, lw=0.8)
    marks = [f"device {i}" for i in range(4)]
    ax.set_xticks([1.5, 5.5, 9.5, 13.5], range(4))
    ax.set_yticks([1.5, 5.5, 9.5, 13.5], marks if ax is axes[0] else range(4))
    busiest = by_block.reshape(4, 4, 16).sum(axis=(1, 2)).max()
    ax.set(xlabel="keys of device")
    ax.set_title(f"{name}: at most {busiest} blocks", size=10)
axes[0].set_ylabel("queries")
title = figure.suptitle("The kernel computes the green blocks", size=11)

# %% [markdown]
# The triangle has 136 blocks, 34 per device. In order, the last device computes 58: 10 for its own keys,
# and all 16 in each of the three other steps. The others wait for it. In zig-zag order every device has
# 34, and the kernel needs no change, because each block takes its first position from a table. (The
# positions inside a block must be consecutive, so no block may contain the end of one chunk and the start
# of another.)
#
# A block on the diagonal is computed as a whole. So 136 x 256 = 34,816 pairs are computed, and 32,896 are
# allowed: 6% more work than necessary. Larger blocks waste more. A skipped step of the grid is not free
# either, because its keys are still copied to VMEM (exercise 2).
#
# ## What a TPU wants
#
# **Tiles.** A vector register of a TPU has 8 x 128 float32 values (16 x 128 in bfloat16). So the last two
# dims of a block must be multiples of 8 and 128, or the whole dims of the array. Here x is the last dim of
# the state, so it must be a multiple of 128.
#
# **VMEM.** On a v4 or v5e, a kernel may use 16 MiB, unless you raise `vmem_limit_bytes`. Each block of an
# input or an output has two buffers, so that the next block arrives while this one is used. A block of
# float32 scores needs space, too. (The rows of maxima and sums are small.)
#
# > **Predict.** K = 128. Queries, keys and values are bfloat16, the old and the new state float32. What is
# > the largest power of two for x = X on a v5e?


# %%
def vmem_bytes(x, X, K):
    """Bytes of VMEM: queries, keys and values in bf16; the states and scores in f32."""
    one_buffer = 2 * x * K + 2 * 2 * X * K + 2 * 4 * x * K  # two states: old and new
    return 2 * one_buffer + 4 * x * X


# %%
my_prediction = None  # queries, and keys, per block
fit = [size for size in (128, 256, 512, 1024, 2048, 4096)
       if vmem_bytes(size, size, 128) <= 16 * 2**20]  # fmt: skip
lesson.predicted("x = X", my_prediction, fit[-1], "positions")

# %% [markdown]
# **Compiled.** Does the compiler agree? `make test-tpu ARGS="tests/chapters/test_kernel.py -n 0 -s"`
# compiles this page's `ring_step` for a TPU, without a TPU. (It first installs libtpu, 700 MB.) For 32
# heads, K = 128, and 8,192 queries and keys it prints these MiB of VMEM (libtpu 0.0.42.1):
#
# | x | X | computed above | v5e | v4 | v6e |
# |---|---|---|---|---|---|
# | 512 | 512 | 2.75 | 2.67 | 2.85 | 2.80 |
# | 1,024 | 1,024 | 7.50 | 7.49 | 7.68 | 7.55 |
# | 2,048 | 1,024 | 14.00 | 13.57 | 14.48 | 13.05 |
# | 2,048 | 2,048 | 23.00 | refused | refused | 22.29 |
#
# Mosaic, the compiler of TPU kernels, accepts the first three, and on a v6e, with 32 MiB, also the last.
# Our arithmetic is within 8% of what it reserves. The kernel needs no temporary memory in HBM. The whole
# `ring` compiles too, for four chips and with `check_vma` on. XLA cannot count the FLOPs inside a kernel.
# You have to tell it: with `cost_estimate=pl.CostEstimate(..)` it reports the 1.10 TFLOP of both matmuls,
# and can schedule other work around them. We had no TPU, so how fast the kernel runs is not measured.
#
# **Bandwidth.** Every block of queries reads all keys and values again. In a step of the grid, the two
# matmuls take $4xXK$ FLOPs, and the keys and values are $4XK$ bytes in bfloat16. That is **x FLOPs per
# byte**. So HBM does not limit the kernel if x is at least the ridge point of the chip's roofline, FLOP/s
# divided by bytes/s (chapter 00):

# %%
print("                       HBM traffic of keys, in ms")
print("           matmuls  x = 128      256      512     1024    ridge")
for chip in (CHIPS["v5e"], CHIPS["v6e"]):
    flops, peak, hbm = 4 * 128 * pairs, chip.peak_flops_per_s, chip.hbm_bytes_per_s
    reads = [f"{1e3 * flops / x / hbm:8.2f}" for x in (128, 256, 512, 1024)]
    print(f"{chip.name:8}{1e3 * flops / peak:7.1f} ms", *reads, f"{peak / hbm:8.0f}")

# %% [markdown]
# The ridge point limits x from below, and VMEM limits it from above. On a v5e x = 256 is enough, on a v6e
# 640. (On a GPU, programs that run at the same time share keys through the L2 cache, so smaller blocks
# suffice.)
#
# ## When not to write one
#
# A kernel pays in three cases: the largest array exists only between two operations that XLA does not
# fuse; whole blocks can be skipped; or the data decides which blocks are read, as with tokens sorted by
# expert or the pages of a KV cache. What it costs: you write the backward pass, the compiler can neither
# partition it (it needs `shard_map`) nor fuse it with its neighbors, and each platform needs another
# version.
#
# For attention, others have done this work. JAX has `splash_attention` for TPUs, and
# `jax.nn.dot_product_attention(implementation="cudnn")` for GPUs. In this project, `kernels/attention.py`
# has the forward kernel of this page. It also masks documents, and its grid is a list of the blocks to
# compute, so it skips no steps. `kernels/attention_gpu.py` has a Triton version.
#
# ## Exercise 1: a sliding window
#
# Mistral 7B has a sliding window ([arXiv:2310.06825](https://arxiv.org/abs/2310.06825)): the query at
# position p sees only keys p - window + 1 to p. Write the condition of `pl.when` for a block of x queries
# from position `q_first` on and X keys from `k_first` on. It is true exactly if one of the queries sees
# one of the keys.

# %% tags=["hide-input"]
WINDOWS = [(16, 16, 40), (8, 32, 20), (32, 8, 33), (16, 24, 7)]  # x, X, window
window_sees = lambda q, k, window: (k <= q) & (q - k < window)


def needed(x, X, window):
    """For blocks from several positions on: does any query see a key?"""
    q_, k_ = np.arange(x)[:, None], np.arange(X)
    return np.array([[window_sees(a + q_, b + k_, window).any() for b in range(97)]
                     for a in range(97)])  # fmt: skip


def window_table(condition):
    def table(x, X, window):
        return np.array([[bool(condition(a, b, x, X, window)) for b in range(97)]
                         for a in range(97)])  # fmt: skip

    return table


# %% tags=["hide-input"]
in_past = lambda a, b, x: a + x > b
WINDOW_HINTS = [
    (lambda a, b, x, X, window: in_past(a, b, x),
     "That is the causal condition. Which blocks are too far in the past?"),
    (lambda a, b, x, X, window: in_past(a, b, x) and a - b < window,
     "You compare the first query with the block's first key. Which key is nearest?"),
    (lambda a, b, x, X, window: in_past(a, b, x) and a + x - b <= window,
     "Only blocks that lie in the window of all queries. One pair is enough."),
    (lambda a, b, x, X, window: in_past(a, b, x) and a + x - (b + X) < window,
     "You skip blocks that only the first queries of a block see."),
    (lambda a, b, x, X, window: in_past(a, b, x) and b + X > a - window,
     "One too many: the window of p begins at p - window + 1."),
    (lambda a, b, x, X, window: in_past(a, b, x) and b + X >= a - window,
     "Two too many: `k_first + X` is the first key after the block."),
    (lambda a, b, x, X, window: b + X > a - window + 1,
     "Future keys: where is the causal condition?"),
    (lambda a, b, x, X, window: a >= b and b + X > a - window + 1,
     "On the diagonal, a block whose first key is later than its first query counts."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_window(answer):
    done = "Right: no visible pair is skipped, and no block is computed in vain."
    run = lambda function: window_table(lesson.answered(function))
    hints = [(wrong, hint) for wrong, hint in WINDOW_HINTS]
    said = lesson.diagnose(answer, WINDOWS, needed, hints, done, run=run)
    if not said.startswith("Not yet"):
        return said
    pairs = [(run(answer)(*case), needed(*case)) for case in WINDOWS]
    lost = sum(int((want & ~got).sum()) for got, want in pairs)
    vain = sum(int((got & ~want).sum()) for got, want in pairs)
    said = f"{lost} blocks with visible pairs are skipped, {vain} computed in vain."
    return f"Not yet: {said}"


# %%
def is_needed(q_first, k_first, x, X, window):
    return ...


print(check_window(is_needed))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `(q_first + x > k_first) & (k_first + X > q_first - window + 1)`. The differences p - key in a block are
# all integers from q_first - (k_first + X - 1) to q_first + x - 1 - k_first. One of them is in [0, window)
# if the largest is at least 0 and the smallest is less than the window.
# </details>

# %% tags=["remove-cell"]
right_window = lambda a, b, x, X, window: (a + x > b) & (b + X > a - window + 1)
lesson.expect(check_window, *WINDOW_HINTS, (right_window, "Right"),
              (is_needed, lesson.NOTHING),
              (lambda a, b, x, X, window: a == b, "in vain"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: don't fetch what you skip
#
# Before each step, Pallas copies the block of keys to VMEM, even if `pl.when` then skips the step. But it
# copies only if the block's index differs from the previous step's. Write the index function of the keys
# so that skipped steps fetch nothing unnecessary. It also receives the two prefetched tables, and x, the
# number of queries in a block. The check runs the kernel with your function, and counts the fetched blocks.

# %% tags=["hide-input"]
CAUSAL = [(16, 32, 0, 0), (32, 16, 0, 0), (16, 16, 64, 128)]  # x, X; first positions


def indices(answer, x, X, q_first, k_first):
    """The index of the block of keys in each step, and whether it is computed."""
    q_at = np.arange(q_first, q_first + S, x)
    k_at = np.arange(k_first, k_first + S, X)
    for h, i, j in np.ndindex(H, S // x, S // X):
        index = answer(h, i, j, q_at, k_at, x)
        if index is None or index is ...:
            raise lesson.Unanswered
        is_computed = q_at[i] + x > k_at[j]
        yield (h, i, j), tuple(int(one) for one in index), bool(is_computed)


def fetches(answer, *case):
    order = [index for _, index, _ in indices(answer, *case)]
    return 1 + sum(a != b for a, b in pairwise(order))


# %% tags=["hide-input"]
best_index = lambda h, i, j, q_at, k_at, x: (h, j * (q_at[i] + x > k_at[j]), 0)
plain_index = lambda h, i, j, q_at, k_at, x: (h, j, 0)


def fault(answer, case):
    x, X, *_ = case
    for (h, i, j), index, is_computed in indices(answer, *case):
        if len(index) != 3:
            return "Return three numbers: the head, the block of keys, and 0."
        if index[1] < 0:
            said = f"step {h, i, j}: there is no block {index[1]}"
            return f"{said}. Queries before all keys see none: what is the least index?"
        if not (0 <= index[0] < H and index[1] < S // X and index[2] == 0):
            return f"There is no block {index}."
        if is_computed and index != (h, j, 0):
            said = f"step {h, i, j} is computed, but gets block {index}"
            return f"x = {x}, X = {X}: {said}."
    return ""


# %% tags=["hide-input"]
def check_index(answer):
    if answer is None or answer is ...:
        return lesson.NOTHING
    try:
        for case in CAUSAL:
            if said := fault(answer, case):
                return said
        got, best, most = (sum(fetches(one, *case) for case in CAUSAL)
                           for one in (answer, best_index, plain_index))  # fmt: skip
        if not lesson.same(run_with(answer), want):
            return "The kernel's result changes: the answer differs if it is traced."
    except lesson.Unanswered:
        return lesson.NOTHING
    except Exception as error:
        return lesson.stopped(error)
    if got == most:
        return f"{got} blocks are fetched, as before. {best} are enough."
    if got > best:
        return f"{got} blocks are fetched, {most} before, but {best} are enough."
    return f"Right: {got} blocks are fetched instead of {most}, with the same result."


# %% tags=["hide-input"]
def run_with(answer):
    of = lambda h, i, j, q_at, k_at: answer(h, i, j, q_at, k_at, 16)
    with lesson.edited(ring_step, key_index=of):
        change = "lambda h, i, j, *at: (h, j, 0)", "key_index"
        step = lesson.rewritten(ring_step)(change)
    return with_kernel(q, k, v, at_S, step)


# %%
def key_index(h, i, j, q_at, k_at, x):
    return ...  # plain: (h, j, 0)


print(check_index(key_index))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# return h, jnp.where(q_at[i] + x > k_at[j], j, 0), 0
# ```
#
# With causal order, the skipped blocks of a row come last. Block 0 is the first one that the next row
# needs, so it is fetched early and once. JAX's TPU kernel `flash_attention` does this. `jnp.minimum(j,
# jnp.maximum(last_seen, 0))`, which stays at the last block that the row computes, fetches as few. (Without
# the 0, a row that sees no key asks for block -1.) So does a grid that lists only the computed blocks, as
# in `kernels/attention.py`.
# </details>


# %% tags=["remove-cell"]
def in_solution(h, i, j, q_at, k_at, x):
    return h, jnp.where(q_at[i] + x > k_at[j], j, 0), 0


def last_seen(i, q_at, k_at, x):
    return sum(jnp.where(q_at[i] + x > k_at[b], 1, 0) for b in range(len(k_at))) - 1


def stays(h, i, j, q_at, k_at, x):
    return h, jnp.minimum(j, jnp.maximum(last_seen(i, q_at, k_at, x), 0)), 0


def below_zero(h, i, j, q_at, k_at, x):
    return h, jnp.minimum(j, last_seen(i, q_at, k_at, x)), 0


too_strict = lambda h, i, j, q_at, k_at, x: (h, jnp.where(q_at[i] >= k_at[j], j, 0), 0)
to_last = lambda h, i, j, q_at, k_at, x: (
    h, jnp.where(q_at[i] + x > k_at[j], j, k_at.shape[0] - 1), 0)  # fmt: skip
lesson.expect(check_index, (in_solution, "Right"), (best_index, "Right"),
              (plain_index, "as before"), (to_last, "but"), (too_strict, "is computed"),
              (lambda h, i, j, q_at, k_at, x: (h, 0, 0), "is computed"),
              (lambda h, i, j, q_at, k_at, x: (h, j), "three numbers"),
              (lambda h, i, j, q_at, k_at, x: (h, j + 1, 0), "is computed"),
              (lambda h, i, j, q_at, k_at, x: (j, h, 0), "no block"),
              (below_zero, "what is the least index"),
              (key_index, lesson.NOTHING))  # fmt: skip
assert lesson.same(run_with(stays), want) and "Right" in check_index(stays)

# %% [markdown]
# ## Exercise 3: choose the blocks
#
# Each step of the grid has a fixed cost, so you want few steps, with a large product of x and X. Return
# the pair (x, X) with the largest product. (If several have it, return the one with the larger x.) Choose
# multiples of 128. (Only x needs it. X is a second-to-last dim, for which Mosaic accepts multiples of 16
# in bfloat16.) `vmem_bytes` must be at most `budget`, and HBM must not limit the kernel on a chip with this
# `ridge`, in FLOPs per byte: 243 for a v5e, 574 for a v6e.

# %% tags=["hide-input"]
DESIGNS = [(128, 243, 16 * 2**20), (256, 574, 32 * 2**20), (128, 574, 4 * 2**20),
           (128, 243, 12 * 2**20), (256, 243, 8 * 2**20)]  # fmt: skip


def best_blocks(K, ridge, budget):
    sizes = range(128, 8193, 128)
    pairs = [(x * X, x, X) for x in sizes for X in sizes
             if x >= ridge and vmem_bytes(x, X, K) <= budget]  # fmt: skip
    return max(pairs)[1:]


def design_fault(got, K, ridge, budget):
    where = f"K = {K}, ridge {ridge}, {budget / 2**20:g} MiB: "
    x, X = (int(one) for one in got)
    need, (best_x, best_X) = vmem_bytes(x, X, K), best_blocks(K, ridge, budget)
    if x % 128 or X % 128 or min(x, X) < 128:
        return f"{where}({x}, {X}) are not multiples of 128."
    if need > budget:
        return f"{where}({x}, {X}) need {need / 2**20:.2f} MiB of VMEM."
    if x < ridge:
        return f"{where}with x = {x}, reading keys takes longer than the matmuls."
    if x * X < best_x * best_X:
        return f"{where}x X can be {best_x * best_X / (x * X):.3g} times as large."
    return "" if x == best_x else f"{where}another pair has the same product."


# %% tags=["hide-input"]
def check_blocks(answer):
    if answer is None or answer is ...:
        return lesson.NOTHING
    try:
        for case in DESIGNS:
            got = answer(*case)
            if got is None or got is ...:
                return lesson.NOTHING
            if not isinstance(got, tuple | list) or len(got) != 2:
                return "Return two numbers: x and X."
            if said := design_fault(got, *case):
                return said
    except Exception as error:
        return lesson.stopped(error)
    return "Right, for five pairs of a head and a chip."


# %%
def choose_blocks(K, ridge, budget):
    return ...


print(check_blocks(choose_blocks))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# sizes = range(128, 8193, 128)
# pairs = [(x * X, x, X) for x in sizes for X in sizes
#          if x >= ridge and vmem_bytes(x, X, K) <= budget]
# return max(pairs)[1:]
# ```
#
# A query costs more VMEM than a key, because its state is float32 and is there twice. So without the
# ridge, the best X is larger than x. With causal masks you would choose smaller blocks: a large block on
# the diagonal wastes half of its matmul. Only a measurement on the chip decides.
# </details>


# %% tags=["remove-cell"]
def square(K, ridge, budget):
    return max((x, x) for x in range(128, 4097, 128) if vmem_bytes(x, x, K) <= budget)


def without_ridge(K, ridge, budget):
    sizes = range(128, 8193, 128)
    return max((x * X, x, X) for x in sizes for X in sizes
               if vmem_bytes(x, X, K) <= budget)[1:]  # fmt: skip


lesson.expect(check_blocks, (best_blocks, "Right"), (choose_blocks, lesson.NOTHING),
              (without_ridge, "reading keys"), (lambda *_: (2048, 2048), "MiB of VMEM"),
              (lambda *_: (300, 300), "not multiples"), (lambda *_: 512, "two numbers"),
              (lambda K, ridge, budget: (640, 128), "times as large"))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# A colleague's kernel returns the result for one chunk of keys, and its logsumexp. The ring merges them,
# as chapter 06 does. The kernel's own test passes for all three chunks that it tries. The model was trained
# on one device. On several devices it answers questions about long texts, but it seems to overlook the most
# recent sentence.

# %%
ONE = 16  # queries in a block, and keys
SCALE = 1.4426950408889634 / K**0.5  # 2 ** (log2(e) z) is e ** z, in one instruction


def flash_kernel(q_at, k_at, q_xK, k_XK, v_XK, out_Kx, log_1x, top_1x, sum_1x):
    i, j, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(j == 0)
    def begin():
        out_Kx[...], sum_1x[...] = jnp.zeros((K, ONE)), jnp.zeros((1, ONE))
        top_1x[...] = jnp.full((1, ONE), -1e30)

    @pl.when(q_at[i] + ONE > k_at[j])
    def visit():
        seen_Xx = q_at[i] + count(1) >= k_at[j] + count(0)
        absorb(seen_Xx, q_xK[...], k_XK[...], v_XK[...], out_Kx, top_1x, sum_1x)

    @pl.when(j == last)
    def finish():
        out_Kx[...] = out_Kx[...] / jnp.maximum(sum_1x[...], 1e-30)
        log_1x[...] = top_1x[...] + jnp.log2(jnp.maximum(sum_1x[...], 1e-30))


# %%
def count(dim):
    """The number of each entry of a block [X, x] along one dim."""
    return jax.lax.broadcasted_iota(jnp.int32, (ONE, ONE), dim)


def absorb(seen_Xx, q_xK, k_XK, v_XK, out_Kx, top_1x, sum_1x):
    """Add a block of keys to the softmax of a block of queries."""
    scores_Xx = jnp.where(seen_Xx, jnp.dot(k_XK, q_xK.T), -1e30)
    higher_1x = jnp.maximum(top_1x[...], scores_Xx.max(axis=0, keepdims=True))
    weights_Xx = jnp.exp2(scores_Xx - higher_1x)
    rescale_1x = jnp.exp2(top_1x[...] - higher_1x)
    out_Kx[...] = out_Kx[...] * rescale_1x + jnp.dot(v_XK.T, weights_Xx)
    sum_1x[...] = sum_1x[...] * rescale_1x + weights_Xx.sum(axis=0, keepdims=True)
    top_1x[...] = higher_1x


# %%
def flash(q_sK, k_SK, v_SK, at_s, at_S):
    """Attention to one chunk of keys [s, K], and the logsumexp of its scores [s]."""
    rows = lambda size: pl.BlockSpec((size, ONE), lambda i, j, *at: (0, i))
    queries = pl.BlockSpec((ONE, K), lambda i, j, *at: (i, 0))
    keys = pl.BlockSpec((ONE, K), lambda i, j, *at: (j, 0))
    rest = [pltpu.VMEM((1, ONE), jnp.float32)] * 2  # top_1x and sum_1x
    s, sizes = len(q_sK), (len(q_sK) // ONE, len(k_SK) // ONE)
    specs = [queries, keys, keys], [rows(K), rows(1)], rest
    grid = pltpu.PrefetchScalarGridSpec(2, sizes, *specs)
    shapes = [jax.ShapeDtypeStruct((size, s), jnp.float32) for size in (K, 1)]
    call = pl.pallas_call(flash_kernel, shapes, grid_spec=grid, interpret=True)
    args = SCALE * q_sK, k_SK, v_SK
    out_Ks, log_1s = call(at_s[::ONE], at_S[::ONE], *args)
    return out_Ks.T, log_1s[0]


# %%
def ring_flash(q_sK, k_sK, v_sK, at_s):
    n = jax.lax.axis_size("context")
    onward = [(i, (i + 1) % n) for i in range(n)]
    keys = [k_sK, v_sK, at_s]
    out_sK, log_s = flash(q_sK, *keys[:2], at_s, keys[2])
    for _ in range(1, n):
        keys = [jax.lax.ppermute(one, "context", onward) for one in keys]
        new_sK, new_s = flash(q_sK, *keys[:2], at_s, keys[2])
        both_s = jnp.logaddexp(log_s, new_s)
        old_part, new_part = jnp.exp(log_s - both_s), jnp.exp(new_s - both_s)
        out_sK = out_sK * old_part[:, None] + new_sK * new_part[:, None]
        log_s = both_s
    return out_sK


# %%
def on_devices(n):
    """Ring attention of all positions [S, K] on n devices."""
    each = jax.vmap(ring_flash, axis_name="context")
    split = lambda y: jnp.reshape(y, (n, S // n, *y.shape[1:]))
    return jax.jit(lambda *arrays: each(*map(split, arrays)).reshape(S, K))


# %% tags=["hide-input"]
rng = np.random.default_rng(2)
q_SK, k_SK, v_SK = (np.float32(rng.normal(size=(S, K))) for _ in range(3))
v_SK[:, 0] = np.arange(S) >= 224  # so result 0 is the weight of the last 32 positions
causal = np.tri(S, dtype=bool)


def chunk_results(q_SK, n):
    """The result and the natural logsumexp of each query, for n chunks of keys."""
    scores_SS = np.where(causal, np.float64(q_SK @ k_SK.T / K**0.5), -1e30)
    chunks = zip(np.split(scores_SS, n, axis=1), np.split(v_SK, n), strict=True)
    for scores_Ss, v_sK in chunks:
        top_S1 = scores_Ss.max(axis=1, keepdims=True)
        weights_Ss = np.exp(scores_Ss - top_S1) * (scores_Ss > -1e29)
        sum_S1 = np.maximum(weights_Ss.sum(axis=1, keepdims=True), 1e-30)
        yield weights_Ss / sum_S1 @ v_sK, top_S1 + np.log(sum_S1)


def by_chunks(power, n=1, times=1.0):
    """Attention whose chunks are weighted by their sums to this power."""
    outs, logs = zip(*chunk_results(times * q_SK, n), strict=True)
    shares = np.exp(power * (np.array(logs) - np.max(logs, axis=0)))
    return np.float32((shares * np.array(outs)).sum(axis=0) / shares.sum(axis=0))


# %%
for start in (0, 64, 192):
    chunk = slice(start, start + 64)
    out_sK, _ = flash(q_SK[192:], k_SK[chunk], v_SK[chunk], at_S[192:], at_S[chunk])
    right_sK = list(chunk_results(q_SK, 4))[start // 64][0][192:]
    print(f"kernel, keys from {start:3}: off by {np.abs(out_sK - right_sK).max():.1e}")
recent = {}
for n in (1, 2, 4, 8):
    out_SK = np.asarray(on_devices(n)(q_SK, k_SK, v_SK, at_S))
    off, recent[n] = np.abs(out_SK - by_chunks(1)).max(), out_SK[224:232, 0].mean()
    print(f"{n} devices: off by {off:.1e}")
    print(f"  positions 224 to 231 give text from 224 on a weight of {recent[n]:.2%}")

# %% tags=["remove-cell"]
assert recent[1] > 2 * recent[8], "the symptom"


# %% tags=["hide-input"]
LOG2_E = 1 / np.log(2)


def half_merged(n, times):
    """Powers of 2 for both parts, but the sum of both in natural logarithms."""
    results = [(out, log * LOG2_E) for out, log in chunk_results(times * q_SK, n)]
    rows = []
    for i in range(n):
        own = slice(i * S // n, (i + 1) * S // n)
        out_sK, log_s1 = (one[own] for one in results[i])
        for r in range(1, n):
            new_sK, new_s1 = (one[own] for one in results[(i - r) % n])
            both_s1 = np.logaddexp(log_s1, new_s1)
            out_sK = out_sK * 2 ** (log_s1 - both_s1) + new_sK * 2 ** (new_s1 - both_s1)
            log_s1 = both_s1
        rows.append(out_sK)
    return np.float32(np.concatenate(rows))


# %% tags=["hide-input"]
MERGE_HINTS = [
    (partial(by_chunks, LOG2_E), "Unchanged: one device is right, several are not."),
    (partial(by_chunks, LOG2_E**2), "Worse: you have converted the wrong way."),
    (half_merged, "Nearly: there are three exponentials and logarithms in the merge."),
    (partial(by_chunks, 0), "Now every chunk has the same weight."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_merge(answer):
    compiled = cache(lambda n: lesson.answered(answer)(n))

    def run(n, times):
        return np.asarray(compiled(n)(times * q_SK, k_SK, v_SK, at_S))

    cases = [(4, 1.0), (2, 1.0), (4, 3.0), (1, 1.0)]
    done = "Right: 1, 2 and 4 devices match a softmax over all scores."
    return lesson.diagnose(run, cases, partial(by_chunks, 1), MERGE_HINTS, done)


# %% tags=["hide-output"]
print(check_merge(on_devices))

# %% [markdown]
# Fix the program. The check compares 1, 2 and 4 devices with one softmax over all keys.
#
# <details><summary>Solution</summary>
#
# The kernel computes with powers of 2, so its logsumexp is a logarithm to base 2. The merge uses `exp` and
# `logaddexp`, which expect a natural logarithm. A chunk whose exponentials add up to $\Sigma$ then gets a
# weight proportional to $\Sigma^{1.44}$ instead of $\Sigma$. So chunks with many keys get too much, and
# the first words of a new chunk too little. Either multiply the logsumexp by ln 2, or merge with `exp2`
# and `logaddexp2`. Inside the kernel the base cancels. So a test of its result passes, and one device is
# right.
#
# FlashAttention's kernels return base e, and many of FlashInfer's base 2
# ([flashinfer#2113](https://github.com/flashinfer-ai/flashinfer/issues/2113), November 2025). Even one
# function of FlashInfer does both: for DeepSeek's attention, backend `trtllm-gen` returns base 2 and
# `cute-dsl` base e ([#4485](https://github.com/flashinfer-ai/flashinfer/issues/4485)). vLLM merged
# with the wrong base under context parallelism ([#28840](https://github.com/vllm-project/vllm/pull/28840),
# [#47079](https://github.com/vllm-project/vllm/pull/47079)), and after a hit in the prefix cache, where
# output became repetitive ([#52796](https://github.com/vllm-project/vllm/pull/52796), August 2026). In
# SGLang, a suffix of 64 tokens after a cached prefix of 3,072 got a weight of 0.37% instead of 2.03%
# ([#40903](https://github.com/sgl-project/sglang/issues/40903)). To notice it, test the logsumexp as well,
# or compare two chunks of different lengths with one.
# </details>


# %% tags=["remove-cell"]
edit = lesson.rewritten(absorb, flash_kernel, flash, ring_flash, on_devices)
logs = "return out_Ks.T, log_1s[0]"
natural = edit((logs, f"{logs} * np.log(2)"))
wrong_way = edit((logs, f"{logs} / np.log(2)"))
half = edit(("jnp.exp(", "jnp.exp2("))
whole = edit(("jnp.exp(", "jnp.exp2("), ("logaddexp(", "logaddexp2("))
hints = [hint for _, hint in MERGE_HINTS]
lesson.expect(check_merge, (on_devices, hints[0]), (natural, "Right"), (whole, "Right"),
              (wrong_way, hints[1]), (half, hints[2]), (lambda n: 1 / 0, "It stops"),
              (lambda n: ..., lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## In one table
#
# | | XLA, chapter 06's `attend_block` | the kernel |
# |---|---|---|
# | scores | [H, s, S] float32 in HBM | a block [X, x] in VMEM |
# | HBM traffic of a step | about 12 bytes per score | q, state, and keys and values s/x times |
# | bound by | HBM bandwidth | matmuls, if x is at least the ridge point |
# | state between steps | result, logsumexp: merged after the step | sum of values, maximum, sum: updated in the kernel |
# | masked blocks | computed and masked | skipped |
# | backward pass | autodiff of saved or recomputed scores | your own: scores recomputed from the logsumexp |
# | sharding | `jit` or `shard_map` | only `shard_map` |
# | JAX | `jnp.einsum`, `jax.nn.softmax` | `pl.pallas_call`, `splash_attention` |
# | PyTorch | eager attention | Triton, `flash_attn`, FlexAttention |
# | Megatron | unfused attention | TransformerEngine's fused attention, `p2p` context parallelism |
#
# ## Three lines to keep
#
# 1. A kernel pays when a large array exists only between two operations: keep its blocks on chip, and fuse
#    the operations with an algorithm that needs one block at a time.
# 2. The online softmax needs a maximum, a sum and a result per query. As soon as a query has seen one key,
#    they are exact for all keys so far, so blocks may come from HBM or from a neighbor.
# 3. Block sizes have an upper limit, the memory on chip, and a lower one, the FLOPs per byte of the chip.
#
# **Sources.** FlashAttention, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135), and FlashAttention-2,
# [arXiv:2307.08691](https://arxiv.org/abs/2307.08691). The online softmax, Milakov and Gimelshein,
# [arXiv:1805.02867](https://arxiv.org/abs/1805.02867). Ring attention,
# [arXiv:2310.01889](https://arxiv.org/abs/2310.01889). Pallas, [TPU pipelining
# ](https://docs.jax.dev/en/latest/pallas/tpu/pipelining.html) and [scalar prefetch
# ](https://docs.jax.dev/en/latest/pallas/tpu/sparse.html).
