# %% [markdown]
# # 07 · Expert parallelism
#
# A mixture-of-experts (MoE) layer has many MLPs, the *experts*, and each token uses only k of them. Expert
# parallelism (EP) stores each expert on one device, and sends each token to the devices of its experts.
#
# You want it because experts have many parameters but compute little per token. With FSDP, every device
# gathers all experts of a layer, which can take as long as its matmuls. With EP only tokens are sent. But
# this is an all-to-all: between GPU nodes it can take several times as long as the matmuls. And if all tokens
# choose the same few experts, the others learn nothing, while the loss still falls.
#
# *Prerequisites:* chapters 01 (`shard_map`, collectives), 02, 03. *Mesh:* `expert=8`, simulated.
# *Runs in* 50 s on 2 cores. *Reading takes* 25 minutes, 50 with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import functools
import itertools

import matplotlib.pyplot as plt
import numpy as np

from chapters import lesson, opening

# %% tags=["hide-input"]
GiB, tokens, away = 2**30, opening.TOKENS // 8, 7 / 8
mlp = 3 * opening.D * opening.F
attention = opening.PARAMETERS - mlp
total = attention + 8 * mlp  # parameters of the layer
state = {"gradients": 4 * total / 8 / GiB, "optimizer state": 8 * total / 8 / GiB}
weights = lambda used: {"weights": (4 * total / 8 + 2 * used) / GiB} | state
scores_flops = 4 * opening.H * opening.K * tokens * 4096 / 2
attend_ms = opening.compute_ms(2 * attention * tokens + scores_flops)
experts_ms = opening.compute_ms(2 * 2 * mlp * tokens)
all_ms, own_ms = (opening.network_ms(2 * x * away) for x in (total, attention))
all_to_all_ms = opening.network_ms(2 * tokens * opening.D * 2 * away)
there = own_ms + attend_ms + all_to_all_ms

# %% tags=["hide-input"] mystnb={"image": {"alt": "Memory bars of eight devices and a timeline, before and after: with FSDP 5.4 GiB each and a long all-gather before the compute; with expert parallelism 3.1 GiB and short messages between the matmuls."}}
opening.before_after(
    opening.Scene("FSDP: weights go to the tokens", weights(total),
                  [("", all_ms, attend_ms),
                   ("experts", all_ms + attend_ms, experts_ms)],
                  [("all-gather", 0, all_ms, "fsdp")]),
    opening.Scene("EP: tokens go to the weights", weights(attention + mlp),
                  [("", own_ms, attend_ms), ("experts", there, experts_ms)],
                  [("", 0, own_ms, "fsdp"), ("", there - all_to_all_ms, all_to_all_ms),
                   ("", there + experts_ms, all_to_all_ms)]),
    "One layer with 8 experts, 2 per token", "expert")  # fmt: skip
left, right = plt.gcf().axes[2:]
for at, says in ((there + 0.3, "dispatch"), (there + experts_ms + 0.5, "combine")):
    text = right.text(at, 1, says, va="center", size=8)
for ax, at in ((left, all_ms), (right, own_ms)):
    ax.text(at + attend_ms / 2, -0.45, "attention", ha="center", size=8)
    ax.set_ylim(1.6, -0.85)

# %% [markdown]
# The attention of Llama 3 8B with eight MLPs of its size, as in Mixtral 8x7B, on eight H100s with 8,192
# tokens each, without activations. FSDP gathers all weights of the layer. EP gathers only those of attention,
# sends tokens to the devices of their experts (*dispatch*), and the results back (*combine*). Times are
# arithmetic at peak speed. In a model, the gather of 5.6 ms can overlap with 6.8 ms of compute on the layer
# before. Then FSDP takes no longer than EP, unless there are much fewer tokens.
#
# > **Predict.** Eight devices hold two of 16 experts each. Each token chooses 2 of the 16 at random. What
# > percentage of the tokens has none of its experts on its own device?

# %% tags=["hide-input"]
n, E, k = 8, 16, 2
choices = np.array([*itertools.combinations(range(E), k)])  # all 120 pairs of experts
holder = choices // (E // n)  # the device with the expert
no_local_expert = np.mean((holder != 0).all(axis=1))  # for the tokens of device 0
local_share = np.mean(holder == 0)

# %%
my_prediction = None  # percent
lesson.predicted("no local expert", my_prediction, 100 * no_local_expert, "%", 0.02)
print(f"{local_share:.1%} of the choices have their expert on the token's own device")
assert local_share == 1 / n, "a random expert should be local once in n"

# %% [markdown]
# For each token, 14 of the 16 experts are on other devices, and so are 13 of the remaining 15: 14/16 x 13/15.
# Without communication, these tokens skip the layer, and the model still trains.
#
# ## What a router does
#
# A small matrix, the *router*, gives each token one score per expert: a softmax over all experts (Switch,
# Mixtral), or a sigmoid per expert (DeepSeek-V3). The layer picks the k experts with the highest scores
# (`top_k`). It sums their outputs, each weighted by a *gate*: the expert's score divided by the sum of the k
# chosen scores. Choosing has no gradient, so the router learns only through the gates of the chosen experts.
#
# Each token needs the FLOPs of k experts, while the number of parameters grows with E, the number of experts.
# So each of n devices along the mesh axis `expert` stores E/n of them. The axis also shards the N tokens, t =
# N/n per device. Otherwise n devices would compute the same attention.
#
# ## Dispatch and combine with an all-to-all
#
# In an all-to-all, each device sends a different block to each other device. The block size is fixed at
# compile time, but routing changes in every step. So each device reserves a fixed number X of *slots* per
# expert, and writes each token into the next free slot of every expert that it chose.

# %% tags=["hide-input"]
CHOSEN = {"A": (0, 1, 1, 3, 1), "B": (2, 0, 3, 3, 2)}  # the expert of each token
slot_of, lost = {}, []
for device, experts in CHOSEN.items():
    for number, expert in enumerate(experts, 1):
        place = experts[: number - 1].count(expert)
        if place < 2:
            slot_of[device, expert, place] = f"{device}{number}"
        else:
            lost.append(f"{device}{number}: expert {expert} is full, dropped")


def slot(ax, x, y, says, expert, sent):
    purple = plt.matplotlib.colors.to_rgb(lesson.COLORS["expert"])
    shade = (*purple, 0.25 + 0.4 * (expert // 2)) if says else "none"
    look = dict(fc=shade, ec=purple if sent else "black", lw=3 if sent else 0.8)
    lesson.box(ax, x, y, 0.88, 0.7, says or "empty", 8, **look)


# %% tags=["hide-input"] mystnb={"image": {"alt": "Slots of two devices for four experts with two slots each. Before the all-to-all, token A5 finds expert 1 full and is dropped, and seven of sixteen slots are empty; eight slots with thick borders change devices; after it, device A has all slots of experts 0 and 1, and device B those of experts 2 and 3."}}
figure, axes = plt.subplots(2, figsize=(6, 4.2))
titles = "Before: all experts, own tokens", "After: own experts, all tokens"
for ax, title in zip(axes, titles, strict=True):
    after = ax is axes[1]
    for device, expert, place in np.ndindex(2, 4, 2):
        says = slot_of.get(("AB"[device], expert, place))
        x, y = 2.2 * expert + place, device
        if after:
            x, y = 4.4 * (expert % 2) + 2 * device + place, expert // 2
        slot(ax, x, 1.4 * y, says, expert, expert // 2 != device)
        if place == 0 and (not after or device == 0):
            x, style = x + (2 if after else 1), dict(size=8, ha="center")
            ax.text(x, 1.4 * y + 0.95, f"expert {expert}", **style)
    ax.set(title=title, xlim=(-0.1, 8.7), ylim=(2.5, -0.1), xticks=[])
    ax.set_yticks((0.35, 1.75), ("device A", "device B"))
    ax.spines[:].set_visible(False)
axes[1].set_xlabel(f"thick borders: slots sent to the other device\n{'; '.join(lost)}")

# %% [markdown]
# **Before an all-to-all over `expert`, a device has [E, X, D] slots with its own tokens. Afterwards it has
# [E/n, n X, D] slots with the tokens of its experts. A second all-to-all reverses this.** In the figure, each
# token chooses one of four experts, and X = 2.
#
# If more than X tokens on a device choose the same expert, the excess tokens are *dropped*: they skip this
# expert. Empty slots are still sent and multiplied. A device has k t *choices*, (token, expert) pairs, so an
# expert gets k t/E of them on average. X is that mean times the *capacity factor*, rounded down: X = ⌊factor
# · k t/E⌋.
#
# > **Predict.** A device has 64 tokens. Each token chooses 2 of 16 experts at random. The capacity factor is
# > 1, so there are exactly as many slots as choices. What percentage of the choices is dropped? (The choices
# > of one expert are roughly Poisson-distributed with mean 8.)


# %% tags=["hide-input"]
@functools.cache
def loads(t, popular):
    """Choices of each expert on each of 200 devices with t tokens each."""
    rng = np.random.default_rng(1)
    preference_E = popular * rng.normal(size=E)  # 0: all experts are equal
    noisy = preference_E + rng.gumbel(size=(200, t, E))
    experts = np.argpartition(-noisy, k, axis=-1)[..., :k]
    return np.stack([(experts == e).sum(axis=(1, 2)) for e in range(E)], axis=1)


def dropped(factor, t, popular=0):
    """Fraction of choices without a slot."""
    load = loads(t, popular)
    slots = int(factor * k * t / E)
    return np.maximum(load - slots, 0).sum() / load.sum()


# %%
my_prediction = None  # percent
lesson.predicted("dropped", my_prediction, 100 * dropped(1, 64), "%", within=0.15)

# %% tags=["hide-input"]
print("factor      1.25    1.5      2")
for t, popular in ((64, 0), (4096, 0), (64, 1), (4096, 1)):
    shares = [dropped(factor, t, popular) for factor in (1.25, 1.5, 2)]
    router = "some experts preferred" if popular else "all experts equal"
    print(f"t = {t:4}  " + "".join(f"{one:7.1%}" for one in shares), router)
assert dropped(1.25, 4096) < 0.001, "noise should average out over many tokens"
assert dropped(1.25, 4096, 1) > 0.05, "a preference should not average out"

# %% [markdown]
# With more tokens per device, random choices average out, and a factor of 1.25 drops nothing. A preference
# does not average out. If the router prefers some experts (here, each expert's logit gets one fixed offset
# from N(0, 1)), 1.25 still drops 8% of the choices with 4,096 tokens. Only X = t, one slot per expert for
# every token of the device, never drops a choice.
#
# ## The program by hand
#
# The next four cells are the whole layer in plain JAX. You can paste them into an empty file. In `on_device`,
# `place` has the expert and the slot of each choice: the slot is the number of earlier choices of the same
# expert on this device. The reference on one device, `on_one`, sends *every* token through *every* expert and
# weights the outputs with the gates, most of which are 0.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import numpy as np
from jax import P, numpy as jnp

n, N, E, k, D, M = 8, 512, 16, 2, 16, 32  # devices, tokens, experts, choices, widths
mesh = jax.make_mesh((n,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


def route(w, x_ND, bias_E=0.0):
    scores_NE = jax.nn.softmax(x_ND @ w["router_DE"])
    _, experts_Nk = jax.lax.top_k(scores_NE + bias_E, k)
    chosen_Nk = jnp.take_along_axis(scores_NE, experts_Nk, axis=1)
    return chosen_Nk / chosen_Nk.sum(1, keepdims=True), experts_Nk, scores_NE


# %% tags=["by-hand"]
def feed_forward(w, rows_eXD):  # the rows of each of this device's e experts
    return jax.nn.relu(rows_eXD @ w["up_EDM"]) @ w["down_EMD"]


def on_device(w, x_tD, slots):  # t: this device's tokens; beyond slots: dropped
    gates_tk, experts_tk, _ = route(w, x_tD)
    chosen_aE = jax.nn.one_hot(experts_tk.reshape(-1), E, dtype=int)  # a: k t choices
    place = experts_tk, ((chosen_aE.cumsum(0) - 1) * chosen_aE).sum(1).reshape(-1, k)
    sent_EXD = jnp.zeros((E, slots, D)).at[place].set(x_tD[:, None], mode="drop")
    rows_eXD = jax.lax.all_to_all(sent_EXD, "expert", 0, 1, tiled=True)  # n X rows
    back_EXD = jax.lax.all_to_all(feed_forward(w, rows_eXD), "expert", 1, 0, tiled=True)
    out_tkD = back_EXD.at[place].get(mode="fill", fill_value=0)  # dropped ones get 0
    return (gates_tk[..., None] * out_tkD).sum(1)


# %% tags=["by-hand"]
def on_mesh(w, x_ND, slots):
    split = P("expert")
    specs = {"router_DE": P(), "up_EDM": split, "down_EMD": split}, split
    device = lambda w, x_tD: on_device(w, x_tD, slots)
    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=split)(w, x_ND)


def on_one(w, x_ND, slots, bias_E=0.0):
    gates_Nk, experts_Nk, _ = route(w, x_ND, bias_E)
    chosen_na = experts_Nk.reshape(n, -1)  # each device's choices, in order
    earlier_na = jnp.tril(chosen_na[:, :, None] == chosen_na[:, None], -1).sum(2)
    kept_Nk = gates_Nk * (earlier_na.reshape(N, k) < slots)
    gates_NE = (kept_Nk[..., None] * jax.nn.one_hot(experts_Nk, E)).sum(1)
    return jnp.einsum("NE,END->ND", gates_NE, feed_forward(w, x_ND))


# %% tags=["by-hand"]
rng = np.random.default_rng(0)
shapes = {"router_DE": (D, E), "up_EDM": (E, D, M), "down_EMD": (E, M, D)}
w = {name: np.float32(rng.normal(size=shape) / 4) for name, shape in shapes.items()}
x_ND, y_ND = np.float32(rng.normal(size=(2, N, D)))
for slots in (N // n, k * N // n // E):  # one slot per token; capacity factor 1
    loss = lambda f, X=slots: lambda w: jnp.mean((f(w, x_ND, X) - y_ND) ** 2)
    eight, one = (jax.jit(jax.value_and_grad(loss(f)))(w) for f in (on_mesh, on_one))
    for a, b in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6), "mesh and one device differ"
    print(f"{slots} slots: loss {eight[0]:.4f} on eight devices, {one[0]:.4f} on one")

# %%
load_nE = (route(w, x_ND)[1].reshape(n, -1, 1) == np.arange(E)).sum(1)
lost = np.maximum(load_nE - slots, 0).sum() / (N * k)
print(f"{slots} slots: {lost:.1%} of the choices are dropped")
assert 0.1 < lost < 0.3 and load_nE.max() < N // n, "this test needs dropped tokens"

# %% [markdown]
# This is a complete *token dispatcher*, in Megatron-LM's words.
#
# - `all_to_all(x, "expert", 0, 1)` splits dim 0 (experts) into n blocks, and concatenates the received
#   blocks along dim 1.
# - The backward pass needs no extra code: the transpose of an all-to-all is the opposite all-to-all. The
#   router is replicated, so JAX sums its gradient over `expert` (chapter 02).
# - With 8 slots, both versions drop the same choices, because `on_one` counts each eighth of the tokens
#   separately, as eight devices do. Four devices would drop other choices.
#
# ## Dropless: gather the tokens instead
#
# To drop nothing without guessing X, every device all-gathers *all* tokens and routes them. Of the A = N k
# choices it keeps those of its own experts, and sorts them by expert. `jax.lax.ragged_dot` then multiplies
# consecutive groups of rows, each by its own matrix (a *grouped matmul*, made popular by MegaBlocks). A
# reduce-scatter sums the outputs and returns each token to its device.


# %%
def gathered(w, x_tD):
    e = w["up_EDM"].shape[0]  # experts of this device
    x_ND = jax.lax.all_gather(x_tD, "expert", tiled=True)
    gates_Nk, experts_Nk, _ = route(w, x_ND)  # of all tokens: the router is small
    mine_A = experts_Nk.reshape(-1) - jax.lax.axis_index("expert") * e
    group_A = jnp.where((mine_A >= 0) & (mine_A < e), mine_A, e)  # e: another device's
    order_A = jnp.argsort(group_A)
    sizes_e = jnp.bincount(group_A, length=e + 1)[:e]
    ours_A1 = (jnp.arange(N * k) < sizes_e.sum())[:, None]  # the rest: other devices'
    rows_AD = jnp.where(ours_A1, x_ND[order_A // k], 0)
    up_AM = jax.nn.relu(jax.lax.ragged_dot(rows_AD, w["up_EDM"], sizes_e))
    out_AD = jax.lax.ragged_dot(up_AM, w["down_EMD"], sizes_e)
    out_AD = jnp.where(ours_A1, out_AD * gates_Nk.reshape(-1)[order_A, None], 0)
    partial_ND = jnp.zeros_like(x_ND).at[order_A // k].add(out_AD)
    return jax.lax.psum_scatter(partial_ND, "expert", scatter_dimension=0, tiled=True)


# %% [markdown]
# > **Predict.** Eight devices, k = 2, capacity factor 1. This program sends every token to every device. In
# > the forward pass, how many times as many bytes does a device send as with all-to-alls?


# %% tags=["hide-input"]
def layer_on(n, device):
    """The layer on n devices."""
    mesh = jax.make_mesh((n,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    split = P("expert")
    specs = {"router_DE": P(), "up_EDM": split, "down_EMD": split}, split
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=split))


def compiled_on(n, device):
    """The compiled layer on n devices, and its collectives."""
    layer, devices = layer_on(n, device), jax.devices()[:n]
    mesh = jax.sharding.Mesh(devices, ("expert",))
    return layer, lesson.compiled(layer, mesh, w, x_ND)


by_slots = lambda n: lambda w, x_tD: on_device(w, x_tD, slots=k * N // n // E)
sent = {}
for m in (2, 4, 8):
    found = [compiled_on(m, how)[1] for how in (by_slots(m), gathered)]
    sent[m] = [one.total.wire_bytes for one in found]

# %%
my_prediction = None  # times
ratio = sent[8][1] / sent[8][0]
lesson.predicted("bytes, gathered / all-to-all", my_prediction, ratio, "times")

# %% tags=["hide-input"]
for one in found:
    lesson.listed(one)
for how in (by_slots(8), gathered):  # forward and backward
    layer, _ = compiled_on(8, how)
    error = lambda w, x_ND, f=layer: (f(w, x_ND) ** 2).mean()
    squares = jax.value_and_grad(error, (0, 1))
    kinds = lesson.compiled(squares, mesh, w, x_ND).totals_by("kind")
    print("forward and backward:", {kind: one.count for kind, one in kinds.items()})
for m, (slots_bytes, gather_bytes) in sent.items():
    print(f"n = {m}: all-to-all {slots_bytes:,.0f}, gathered {gather_bytes:,.0f} bytes")
    assert gather_bytes / slots_bytes == m / k, "the ratio should be n/k"
dropless = compiled_on(8, gathered)[0](w, x_ND)
assert lesson.same(dropless, on_one(w, x_ND, N)), "gathering should drop nothing"

# %% [markdown]
# | forward pass | bytes that a device sends, 4 per element | here |
# |---|---|---|
# | two all-to-alls of slots | 2 · (n - 1)/n · E X D · 4 | 2 · 7/8 · 16 · 8 · 16 · 4 = 14,336 |
# | all-gather, reduce-scatter | 2 · (n - 1) · t D · 4 | 2 · 7 · 64 · 16 · 4 = 57,344 |
#
# E X is the capacity factor times k t. So with a factor of 1, gathering sends **n/k times** the bytes. If k >
# n, it sends less: a token goes to each device once, rather than once per chosen expert.
#
# The other cost is memory. In the worst case all N k choices belong to one device, so the arrays above have N
# k rows on every device, though on average 1/n of these are used. (Some kernels leave the others unwritten,
# hence the two `where`.)
#
# ## Dropless: send the rest in another round
#
# All-to-alls can be dropless, too. For each destination, reserve places for somewhat more tokens than you
# expect to send there. The tokens for a device form a queue, and what does not fit in this round is sent in
# the next one. All devices take part in every all-to-all, so the number of rounds is the largest that any
# device needs. A token goes to a device once, even if it chose two experts there. So the gates travel with
# the token, and the device returns one sum.


# %%
def one_round(w, x_tD, gates_tne, place_tn, places):  # out of range: not in this round
    spot = jnp.arange(n)[None], place_tn
    swap = lambda block: jax.lax.all_to_all(block, "expert", 0, 0)  # its own inverse
    empty = lambda rows: jnp.zeros((n, places, rows.shape[-1]))
    exchange = lambda rows: swap(empty(rows).at[spot].set(rows, mode="drop"))
    rows_rD = exchange(x_tD[:, None]).reshape(-1, D)  # r: received from n devices
    gates_re = exchange(gates_tne).reshape(-1, E // n)  # 0: not chosen
    sum_rD = jnp.einsum("re,erD->rD", gates_re, feed_forward(w, rows_rD))
    back_npD = swap(sum_rD.reshape(n, places, D))
    return back_npD.at[spot].get(mode="fill", fill_value=0).sum(1)


# %%
def routed(w, x_tD, places, rounds=None):  # rounds: only to count bytes
    gates_tk, experts_tk, _ = route(w, x_tD)
    gates_tE = (gates_tk[..., None] * jax.nn.one_hot(experts_tk, E)).sum(1)
    gates_tne = gates_tE.reshape(-1, n, E // n)  # e: the experts of one device
    sent_tn = (gates_tne > 0).any(2)
    queue_tn = jnp.where(sent_tn, sent_tn.cumsum(0) - 1, -1)  # position; -1: not sent

    def add_round(r, out_tD):
        place_tn = jnp.where(queue_tn // places == r, queue_tn % places, places)
        return out_tD + one_round(w, x_tD, gates_tne, place_tn, places)

    if rounds is None:  # as many as the longest queue of all devices needs
        own_rounds = (sent_tn.sum(0).max() + places - 1) // places
        rounds = jax.lax.pmax(own_rounds, "expert")
    return jax.lax.fori_loop(0, rounds, add_round, jnp.zeros_like(x_tD))


# %% [markdown]
# > **Predict.** A token has experts on 1.93 of the 8 devices on average, so 15.5 of a device's 64 tokens are
# > expected to go to each device. With 24 places, how many rounds does the batch from above need?

# %% tags=["hide-input"]
reached = sum((holder == d).any(axis=1).mean() for d in range(n))  # devices per token
assert round(reached, 2) == 1.93 and round(N / n * reached / n, 1) == 15.5
chosen_Nkn = (route(w, x_ND)[1] // (E // n))[:, :, None] == np.arange(n)
queue_nn = chosen_Nkn.any(1).reshape(n, -1, n).sum(1)  # from each device to each
rounds_of = lambda places: -(-queue_nn.max() // places)

# %%
my_prediction = None  # rounds
lesson.predicted("rounds", my_prediction, int(rounds_of(24)))

# %% tags=["hide-input"]
print(f"the longest of the {n * n} queues has {queue_nn.max()} tokens")
for places in (64, 24, 16, 4):
    found = layer_on(n, lambda w, x_tD, p=places: routed(w, x_tD, p))(w, x_ND)
    assert lesson.same(found, on_one(w, x_ND, N)), "rounds should drop nothing"
    print(f"{places:2} places, rounds: {rounds_of(places)}, nothing dropped")
once = compiled_on(n, lambda w, x_tD: routed(w, x_tD, 24, 1))[1].total.wire_bytes
print(f"one round of 24 places: a device sends {once:,.0f} bytes")
assert once == 7 * 24 * (2 * D + E // n) * 4, "rows twice, and gates once"
assert round(once / sent[8][0], 1) == 1.6 and round(once / sent[8][1], 1) == 0.4

# %% [markdown]
# Each pair of a token and a device has one round and one place, and devices have different experts. So the
# sum over devices and rounds is that of one device. With a balanced router and many more tokens, one round is
# enough.
#
# One round of 24 places sends 1.6 times the bytes of slots of factor 1, which drop choices, and 0.4 times
# those of gathering. The two rounds of this batch send twice that. The arrays have n · 24 = 192 rows instead
# of N k = 1,024. (To be short, each row goes through both experts of a device.) The price is more messages,
# and that JAX cannot differentiate a loop with an unknown number of rounds backward, so you write its
# backward pass yourself: one more loop.
# [`ragged_all_to_all`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.ragged_all_to_all.html) sends
# blocks of varying sizes in one go, but it does [not run on
# CPUs](https://github.com/jax-ml/jax/issues/34755), and needs a buffer for the worst case.
#
# ## Node-limited routing
#
# DeepSeek-V3 has 256 experts, and each token chooses 8. Place them on 8 nodes of 8 GPUs, 32 experts per node.
# NVLink connects the GPUs of a node. InfiniBand connects the nodes, with one ninth of that bandwidth per GPU.
# An all-to-all sends eight copies of a token, even if three of them go to the same node.
#
# > **Predict.** A token chooses 8 different experts at random, out of 256 on 8 nodes. On how many different
# > nodes are these experts, on average?

# %% tags=["hide-input"]
rng = np.random.default_rng(2)
drawn, all_experts, top, nodes = 5000, 256, 8, 8
scores = rng.random((drawn, all_experts))


def nodes_of(scores):
    """Whether each token has a chosen expert on each node: [token, node]."""
    best = np.argsort(-scores, axis=1)[:, :top]
    return (best[:, :, None] // (all_experts // nodes) == np.arange(nodes)).any(axis=1)


free = nodes_of(scores).sum(axis=1)

# %%
my_prediction = None  # nodes
lesson.predicted("nodes reached", my_prediction, free.mean(), within=0.03)

# %% [markdown]
# So send a token only once to each node, and copy it there over NVLink. This saves a third of the transfers.
# With *node-limited routing* ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), 2.1.2), DeepSeek-V3 goes
# further: each token chooses its 8 experts on 4 nodes, those on which its two best scores have the largest
# sum.


# %%
def limited(scores, most=4):
    """Scores with -1 for all experts outside each token's `most` best nodes."""
    by_node = scores.reshape(-1, nodes, all_experts // nodes)
    of_node = np.sort(by_node, axis=2)[:, :, -top // most :].sum(axis=2)
    allowed = np.argsort(np.argsort(-of_node, axis=1), axis=1) < most
    return np.where(allowed[:, :, None], by_node, -1).reshape(scores.shape)


# %% tags=["hide-input"]
few = nodes_of(limited(scores)).sum(axis=1)
away = (nodes - 1) / nodes  # fraction of random destinations on another node
transfers = {
    "one per expert": top * away,
    "one per node": free.mean() * away,
    "at most 4 nodes": few.mean() * away,
    "gathered: all nodes": nodes - 1,
}
for name, copies in transfers.items():
    kB = copies * 7168 * 2 / 1e3
    print(f"{name:19} {copies:.2f} transfers between nodes per token, {kB:5.1f} kB")
assert transfers["one per node"] < 0.67 * transfers["one per expert"]

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two nodes of four GPUs, twice. Above, GPU 0 sends a token to three GPUs of the other node in three transfers. Below, it sends the token once, and the receiving GPU forwards it to two others in its node."}}
WAYS = {
    "One copy per expert: 3 transfers between nodes": ((0, 2), (0, 5), (0, 6), (0, 8)),
    "One copy per node: 1 transfer between nodes": ((0, 2), (0, 5), (5, 6), (5, 8)),
}
figure, axes = plt.subplots(2, figsize=(5.8, 4.2))
for ax, (title, hops) in zip(axes, WAYS.items(), strict=True):
    for x in (0, 1, 2, 3, 5, 6, 7, 8):
        says = "token" if x == 0 else "expert" if x in (2, 5, 6, 8) else ""
        lesson.box(ax, x - 0.35, -0.35, 0.7, 0.7, says, 8)
    for a, b in hops:
        between = a < 4 < b  # InfiniBand; else NVLink
        colour = lesson.COLORS["expert"] if between else lesson.NEUTRAL
        arrow = dict(arrowstyle="-|>", color=colour, lw=2 if between else 1)
        arrow["connectionstyle"] = "arc3,rad=-0.35"
        ax.annotate("", (b, 0.38), (a, 0.38), arrowprops=arrow)
    lesson.blank(ax, title=title, xlim=(-0.6, 8.6), ylim=(-0.5, 2.4))
    ax.set_xticks((1.5, 6.5), ("node 0, four GPUs", "node 1, four GPUs"))

# %% [markdown]
# A token now takes at most 4 x 7/8 = 3.5 transfers instead of 8 x 7/8 = 7, as in
# [DeepEP](https://github.com/deepseek-ai/DeepEP), DeepSeek's library for dispatch and combine on GPUs. An
# all-gather sends it to *all* nodes, once to each.
#
# ## Is the communication exposed?
#
# These times are computed from peak speeds, not measured, for the forward pass of a layer of DeepSeek-V3: D =
# 7168, the width of an expert M = 2048, 8 of 256 experts. As in the paper, dispatch sends fp8 (1 byte per
# element) and combine bfloat16 (2 bytes), while matmuls are in bfloat16. Would more tokens per device help?

# %% tags=["hide-input"]
from config import MeshConfig
from plan.chips import hardware

D_, M_, E_, k_ = 7168, 2048, 256, 8
PLACES = {"v5p:4x4x4": 64, "h100:8": 8, "h100:16": 16, "h100:64": 64}


def link_of(place):
    """The links of the mesh axis `expert` over all devices of a topology."""
    mesh = MeshConfig.parse(f"expert={PLACES[place]}")
    return hardware.layout(mesh, hardware.Topology.parse(place))["expert"]


# %% tags=["hide-input"]
def seconds(place, tokens, copies=None):
    """Seconds of a layer's forward pass: matmuls, weight reads, communication."""
    chip, m = hardware.Topology.parse(place).chip, PLACES[place]
    compute = tokens * k_ * 6 * D_ * M_ / chip.peak_flops_per_s
    weights = E_ / m * 3 * D_ * M_ * 2 / chip.hbm_bytes_per_s
    comm = tokens * k_ * (m - 1) / m * D_ * 3 / link_of(place).all_to_all_bytes_per_s
    if copies:  # between nodes, over the network card of each GPU
        comm = tokens * copies * D_ * 3 / chip.dcn_bytes_per_s
    return compute, weights, comm


# %% tags=["hide-input"]
CASES = {
    "v5p:4x4x4": ("v5p:4x4x4", None),
    "8 H100": ("h100:8", None),
    "16 H100": ("h100:16", None),
    "16 H100, once per node": ("h100:16", 1.0),
    "64 H100": ("h100:64", None),
    "64 H100, 4 nodes": ("h100:64", transfers["at most 4 nodes"]),
}
print("per token of a device:  compute  communication  ratio")
for name, (place, copies) in CASES.items():
    compute, weights, comm = (1e6 * s for s in seconds(place, 1, copies))
    print(f"{name:22} {compute:5.2f} us {comm:11.2f} us {comm / compute:6.1f}")
compute, weights, comm = (1e6 * s for s in seconds("h100:64", 1))
print(f"64 H100: reading the weights from HBM takes {weights:.0f} us, as long as")
print(f"computing {weights / compute:.0f} tokens or communicating {weights / comm:.0f}")

# %% tags=["hide-input"] mystnb={"image": {"alt": "Microseconds against tokens per device. On v5p communication stays below compute; on 64 H100 it is above."}}
figure, axes = plt.subplots(2, figsize=(5.5, 6), sharex=True, sharey=True)
many = np.logspace(2, 4.3, 60)
drawn_in = ("v5p:4x4x4",), ("64 H100", "64 H100, 4 nodes")
for ax, names in zip(axes, drawn_in, strict=True):
    for number, name in enumerate(names):
        place, copies = CASES[name]
        compute, weights, comm = (1e6 * s for s in seconds(place, many, copies))
        slower = np.maximum(compute, weights)
        if not number:
            label = "compute (flat: reading the weights)"
            ax.plot(many, slower, color=lesson.NEUTRAL, label=label)
        label = "communication" + number * ", at most 4 nodes"
        purple, dots = lesson.COLORS["expert"], "-:"[number]
        ax.plot(many, comm, color=purple, ls=dots, label=label)
    ax.set(xscale="log", yscale="log", ylabel="microseconds")
    ax.legend()
axes[0].set_title("64 TPU v5p: compute always takes longer")
axes[1].set_title("64 H100: more tokens do not help")
label = axes[1].set_xlabel("tokens per device; latency not included")

# %% [markdown]
# With few tokens, the matmuls take as long as reading their weights from HBM. With even fewer, latency
# dominates: on 64 H100s, below about 780 tokens (each other GPU gets 896 bytes per token, and a network card
# sends 700 kB in the 14 us of a message, chapter 01).
#
# With more tokens, compute and communication grow at the same rate, so **their ratio is fixed. It depends on
# M and on the bandwidth, not on the batch.** Sending a token to each node only once makes the all-to-all on
# two nodes four times as fast, without the time to forward it over NVLink.
#
# The all-to-alls of a token cannot overlap with its own matmuls. They can overlap with attention, with shared
# experts (which all tokens use), or with another microbatch, as in DeepSeek-V3 (DualPipe, section 3.2.1). The
# ratios above count only the forward pass of the routed experts. A backward pass has twice the matmuls for
# the same all-to-alls. Exercise 3 asks for the M at which both take equally long.
#
# ## Load balancing
#
# A capacity needs a balanced router. Without a capacity, all devices wait for the one with the most popular
# expert. But training makes the loads less equal: an expert that is chosen more often learns more, and is
# chosen even more. There are two standard remedies.

# %% tags=["hide-input"]
import optax

rng = np.random.default_rng(0)
center_n1D = 2 * rng.normal(size=(n, 1, D)) + 3 * rng.normal(size=D)  # 3: shared part
matrix_nDD = np.float32(rng.normal(size=(n, D, D)) / np.sqrt(D))
small = {"router_DE": 0.3, "up_EDM": 0.25, "down_EMD": 1 / 6}
start = {at: np.float32(rng.normal(size=shapes[at]) * std) for at, std in small.items()}


def draw(step):
    """A batch of N tokens, sorted by kind, and the targets of the layer."""
    noise_ntD = jax.random.normal(jax.random.key(step), (n, N // n, D))
    wanted_ntD = jnp.einsum("ntD,nDd->ntd", noise_ntD, matrix_nDD)
    return (jnp.float32(center_n1D) + noise_ntD).reshape(N, D), wanted_ntD.reshape(N, D)


def statistics(experts_Nk, scores_NE):
    """Each expert's fraction of the choices, and its mean score."""
    return jnp.mean(jax.nn.one_hot(experts_Nk, E), axis=(0, 1)), scores_NE.mean(0)


# %% [markdown]
# The **load-balancing loss** (Switch; *aux loss* in PyTorch libraries) is a term of the loss, with a small
# weight: E times the sum over experts of load times mean score. The *load* is the fraction of the choices
# that an expert gets. The term is 1 if all experts are equal. Only the scores have a gradient. It lowers an
# expert's score in proportion to its load.
#
# The **selection bias** (DeepSeek-V3) does not change the loss. It is added to scores when experts are
# chosen, but not in the gate. After each step, the bias of an expert goes up by a fixed amount if its load
# was below the mean, and down otherwise.
#
# A toy problem has 8 kinds of tokens, and the layer has to learn a different matrix for each kind. It runs on
# one device, without capacity.


# %% tags=["hide-input"]
def train(loss_of, steps=300, rate=0.0):
    """Error and loads of each step. rate: step size of the selection bias"""
    w, bias_E, optimizer = start, jnp.zeros(E), optax.adam(0.01)

    @jax.jit
    def update(w, state, bias_E, x_ND, y_ND):
        slope = jax.grad(loss_of, has_aux=True)
        gradient, (error, load_E) = slope(w, bias_E, x_ND, y_ND)
        changes, state = optimizer.update(gradient, state)
        bias_E += rate * jnp.sign(1 / E - load_E)
        return optax.apply_updates(w, changes), state, bias_E, error, load_E

    state, errors, loads = optimizer.init(w), [], []
    for step in range(steps):
        w, state, bias_E, error, load_E = update(w, state, bias_E, *draw(step))
        errors.append(error)
        loads.append(load_E)
    return np.array(errors), np.array(loads)


# %%
def dense_loss(weight):
    def loss(w, bias_E, x_ND, y_ND):
        error = jnp.mean((on_one(w, x_ND, N, bias_E) - y_ND) ** 2)
        load_E, score_E = statistics(*route(w, x_ND, bias_E)[1:])
        return error + weight * E * jnp.sum(load_E * score_E), (error, load_E)

    return loss


# %% tags=["hide-input"]
RUNS = {"no remedy": train(dense_loss(0)), "balancing loss": train(dense_loss(0.1)),
        "selection bias": train(dense_loss(0), rate=0.01)}  # fmt: skip


def end(run):
    """Error and loads (1 is the mean), averaged over the last 20 steps."""
    return run[0][-20:].mean(), E * run[1][-20:].mean(axis=0)


for name, run in RUNS.items():
    error, load_E = end(run)
    busiest, last = load_E.max(), E * run[1][-1].max()
    print(f"{name:14} error {error:.3f}, {(load_E < 0.25).sum()} of {E} experts idle; "
          f"top load {busiest:.1f} times the mean, at the end {last:.1f}")  # fmt: skip
idle = [(end(run)[1] < 0.25).sum() for run in RUNS.values()]
assert idle[0] >= 6 and idle[1] == 0 and idle[2] <= 2, "as the text says"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Sorted loads of 16 experts in three runs: without a remedy eight experts are idle; with either remedy all work."}}
figure, axes = plt.subplots(3, figsize=(5, 4.6), sharex=True, sharey=True)
for ax, (name, run) in zip(axes, RUNS.items(), strict=True):
    error, load_E = end(run)
    ax.bar(np.arange(E), np.sort(load_E)[::-1], color=lesson.COLORS["expert"])
    ax.axhline(1, color=lesson.NEUTRAL, lw=0.8)
    ax.set(title=f"{name}: error {error:.3f}", ylabel="load")
axes[2].set_xlabel("experts, sorted by load; a load of 1 is the mean")
ticks = axes[2].set_xticks([0, 5, 10, 15], [1, 6, 11, 16])

# %% [markdown]
# Without a remedy, half of the experts are idle. The error still falls, so you don't see this. With the
# selection bias, all or nearly all experts work, averaged over 20 steps. Its error is hardly better here,
# because all tokens of a kind switch experts together. Models of real text did better with the bias than with
# the loss ([arXiv:2408.15664](https://arxiv.org/abs/2408.15664)).
#
# Both remedies need the load of the step's *whole batch*. Many frameworks averaged a balancing loss per
# microbatch and device. Then the few sequences of each microbatch have to use all experts equally. With loads
# of whole batches, models of up to 42.8 billion parameters reached a better perplexity, and experts
# specialized by domain ([arXiv:2501.11873](https://arxiv.org/abs/2501.11873)). The bias must also be
# *identical* on all devices: no all-reduce of gradients keeps its copies equal, because it has no gradient.
#
# ## In `model.py`
#
# `model.with_capacity` is `on_device` from above. `model.dropless`, the default, is `gathered` with a custom
# kernel for the grouped matmuls, or `routed` with places for 1.2 times the expected tokens, and its backward
# pass (`overlap/experts.py` has both; `--work.expert_exchange` chooses). For Mixtral 8x7B with `expert=8`,
# the two experts of a token are on 1.75 of the 7 other devices on average, and `gathered` sends every token
# to all 7. `optimizer.update_selection_bias` moves the bias once per step.
#
# ## Exercise 1: the capacity factor of a step
#
# `load_nE` has the choices of a step: how many tokens of each of n devices chose each of E experts. Every
# device has as many tokens. Return the smallest capacity factor that drops none of these choices.


# %%
def least_factor(load_nE):
    return ...


# %% tags=["hide-input"]
FACTOR_HINTS = [
    (lambda load: load.sum(0).max() / load.sum(0).mean(),
     "Enough if devices shared their slots. But each has its own for every expert."),
    (lambda load: load.max(), "That is a number of slots. How many has factor 1?"),
    (lambda load: load.max(1).mean() / load.mean(),
     "The mean of what each device needs. Some need more."),
    (lambda load: load.max() / load.sum() * load.shape[1],
     "n times too small: you divide by the choices of all devices."),
    (lambda load: load.max() / load.sum(1)[0],
     "E times too small: the slots of factor 1 are those of all experts together."),
    (lambda load: load.max() / load.mean() - 1, "That is how much more than 1 it is."),
    (lambda load: load.mean() / load.max(), "Upside down: a factor is at least 1."),
    (lambda load: (load.max(0) / load.mean(0)).max(),
     "You divide by the mean load of one expert. Are all slots equally many?"),
]  # fmt: skip


# %% tags=["hide-input"]
def some_load(n, E, t, k, seed):
    """The choices of a step, from a router that prefers some experts."""
    rng = np.random.default_rng(seed)
    noisy = rng.normal(size=E) + rng.gumbel(size=(n, t, E))
    chosen = np.argpartition(-noisy, k, axis=-1)[..., :k]
    return np.stack([(chosen == e).sum(axis=(1, 2)) for e in range(E)], axis=1)


check_factor = lesson.checker(
    [(some_load(8, 16, 64, 2, 0),), (some_load(4, 6, 90, 3, 1),)],
    lambda load: load.max() / load.mean(), FACTOR_HINTS, "Right for two steps.",
)  # fmt: skip

# %%
print(check_factor(least_factor))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return load_nE.max() / load_nE.mean()`: the mean is k t/E, the slots of factor 1, and the largest load of
# any device needs as many slots. The whole batch can be balanced and still drop choices, because devices
# don't share slots.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_factor, *FACTOR_HINTS, (least_factor, lesson.NOTHING),
              (lambda load: load.max() * load.shape[1] / load[0].sum(), "Right"),
              (lambda load: 7, "Not yet"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: update the selection bias on eight devices
#
# Write the update of the selection bias, inside `shard_map`: up by `RATE` if the expert's load in the whole
# batch is below the mean load, and down otherwise. `own_load_E` counts the choices of this device's tokens.
# `bias_E` is the same on all devices, and must stay the same.

# %%
RATE = 0.01


def moved(bias_E, own_load_E):
    return ...


# %% tags=["hide-input"]
@functools.cache
def after_step(answer):
    """fn(bias_E, load_nE) -> the new bias on each of 8 devices, [n, E]."""
    device = lambda bias_E, load_1E: answer(bias_E, load_1E[0])
    return lesson.on_each(device, mesh, (P(), P("expert")))


total = lambda x: jax.lax.psum(x, "expert")
mean = lambda x: jax.lax.pmean(x, "expert")
gap = lambda x: x.mean() - x
by = lambda change: lambda b, x: b + RATE * change(x)
MOVE_HINTS = [
    (by(lambda x: jnp.sign(gap(x))),
     "Each device has a different bias, because it counts only its own tokens."),
    (by(lambda x: total(jnp.sign(gap(x)))),
     "Up to 8 steps at once: you sum the signs over the devices."),
    (by(lambda x: mean(jnp.sign(gap(x)))),
     "You average the signs over the devices. What should you take the sign of?"),
]  # fmt: skip

# %% tags=["hide-input"]
MOVE_HINTS += [
    (by(lambda x: -jnp.sign(gap(total(x)))),
     "The sign is reversed: overloaded experts get even more tokens."),
    (by(lambda x: gap(total(x))),
     "You step by the difference. Use only its sign: the step has a fixed size."),
    (by(lambda x: gap(mean(x))),
     "You step by a difference of means. Use only its sign: a step has a fixed size."),
    (by(lambda x: jnp.sign(x.mean() - total(x))),
     "You compare loads of 8 devices with the mean of one, so nearly all go down."),
    (lambda b, x: b + jnp.sign(gap(total(x))), "The step size should be RATE."),
    (lambda b, x: RATE * jnp.sign(gap(total(x))),
     "That is only the change. Add it to the old bias."),
]  # fmt: skip
random = np.random.default_rng(3)
loads_of = lambda: np.float32(random.integers(0, 40, (n, E)) * 1.01 ** np.arange(E))
check_moved = lesson.checker(
    [(np.float32(random.normal(size=E)), loads_of()) for _ in range(2)],
    lambda b, x: b + RATE * np.broadcast_to(np.sign(gap(x.sum(0))), (n, E)),
    MOVE_HINTS, "Right, and identical on all devices.", run=after_step)  # fmt: skip

# %%
print(check_moved(moved))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# load_E = jax.lax.psum(own_load_E, "expert")
# return bias_E + RATE * jnp.sign(load_E.mean() - load_E)
# ```
#
# The sign of a sum is not the sum of the signs. With `out_specs=P()` and `check_vma` on, JAX rejects a bias
# that differs between devices. Without this check, each device routes with a different bias, and the
# checkpoint stores only one of them.
# </details>


# %% tags=["remove-cell"]
lesson.expect(check_moved, *MOVE_HINTS, (moved, lesson.NOTHING),
              (by(lambda x: jnp.sign(gap(total(x)))), "Right"),
              (by(lambda x: jnp.sign(1 / E - total(x) / total(x).sum())),
               "Right"))  # fmt: skip

# %% [markdown]
# ## Exercise 3: the width of an expert
#
# How large must the expert width M be, so that the all-to-alls of a layer take no longer than its matmuls?
# Count the forward pass with many tokens. Dispatch and combine both send bfloat16. An expert has three
# matrices. `bytes_per_s` is a device's bandwidth in an all-to-all over n devices. (D and k do not matter.
# Why?)


# %%
def narrowest(flops_per_s, bytes_per_s, n):
    return ...


# %% tags=["hide-input"]
def width(bytes_a_number, flops, away=True):
    """fn(flops_per_s, bytes_per_s, n) -> M, for a choice's bytes / D, FLOPs / (D M)."""
    left = lambda n: (n - 1) / n if away else 1
    return lambda peak, bw, n: bytes_a_number / flops * left(n) * peak / bw


WIDTHS = [
    (width(2, 6), "Half of it: the outputs of the experts have to come back, too."),
    (width(4, 6, False), "Almost. Which fraction of choices stays on its own device?"),
    (width(4, 4), "Too wide: you count two matrices, but an expert has three."),
    (width(4, 3), "Two times too wide: a multiply and an add are two FLOPs."),
    (width(4, 2), "Too wide: you count one matrix, but an expert has three."),
    (width(3, 6), "That assumes fp8 dispatch. Here both directions are bfloat16."),
    (width(2, 6, False), "You count one direction, and no choice stays local."),
    (lambda peak, bw, n: 1.5 * n / (n - 1) * bw / peak, "Inverted: the units?"),
]
check_narrowest = lesson.checker(
    [(989e12, 56.25e9, 64), (459e12, 157.5e9, 8), (2250e12, 900e9, 4)],
    width(4, 6), WIDTHS, share=0.005,
    done="Right. 64 H100: 11,500; 8 v5p: 1,700; DeepSeek-V3 has 2,048.",
)  # fmt: skip

# %%
print(check_narrowest(narrowest))

# %% [markdown]
# <details><summary>Solution</summary>
#
# A choice costs 6 D M FLOPs. It sends 4 D bytes in both directions together, and (n - 1)/n of them leave the
# device. The times are equal if 6 D M / peak = 4 D (n - 1)/n / bandwidth, so `return 4 / 6 * (n - 1) / n *
# flops_per_s / bytes_per_s`. D cancels, and k would too: communication is expensive for narrow experts, no
# matter how many of them a token chooses.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_narrowest, *WIDTHS, (width(4, 6), "Right"),
              (narrowest, lesson.NOTHING))  # fmt: skip
assert 11450 < width(4, 6)(989e12, 56.25e9, 64) < 11550
assert 1650 < width(4, 6)(459e12, 157.5e9, 8) < 1750

# %% [markdown]
# ## A bug to find
#
# A colleague moved the training above to several devices, with a dense layer before the experts. With Adam,
# the curves of one and eight devices are nearly the same. With momentum and clipping eight devices learn
# faster, although batches, weights and the first error are equal.


# %%
SHARDED = "up_EDM", "down_EMD"  # over the axis; other weights are replicated


def local_loss(w, x_tD, y_tD):
    """The loss of this device's tokens, and their error for the log."""
    h_tD = x_tD + x_tD @ w["mix_DD"]
    error = jnp.mean((on_device(w, h_tD, slots=len(x_tD)) - y_tD) ** 2)
    _, experts_tk, scores_tE = route(w, h_tD)
    load_E, score_E = statistics(experts_tk, scores_tE)
    load_E = jax.lax.pmean(load_E, "expert")  # of the whole batch
    return error + 0.1 * E * jnp.sum(load_E * score_E), error


def reduced(d_w):
    """Combine the gradients of all devices."""
    mean = lambda d: jax.lax.pmean(d, "expert")
    return {at: d if at in SHARDED else mean(d) for at, d in d_w.items()}


# %%
def norm_of(d_w):
    """Count replicated gradients once, and experts from all devices."""
    squares = {at: jnp.sum(d**2) for at, d in d_w.items()}
    experts = jax.lax.psum(sum(squares[at] for at in SHARDED), "expert")
    others = sum(x for at, x in squares.items() if at not in SHARDED)
    return jnp.sqrt(experts + others)


def gradients(w, x_tD, y_tD):
    """Gradients of the batch's mean loss, their norm, and the mean error."""
    vary = lambda x: jax.lax.pcast(x, "expert", to="varying")
    own = {at: x if at in SHARDED else vary(x) for at, x in w.items()}
    d_w, error = jax.grad(local_loss, has_aux=True)(own, x_tD, y_tD)
    d_w = reduced(d_w)
    return d_w, norm_of(d_w), jax.lax.pmean(error, "expert")


# %%
first_w = start | {"mix_DD": np.float32(rng.normal(size=(D, D)) / 8)}


def on_devices(devices, gradients):
    auto, split = (jax.sharding.AxisType.Auto,), P("expert")
    devices = jax.make_mesh((devices,), ("expert",), axis_types=auto)
    specs = {at: split if at in SHARDED else P() for at in first_w}
    ins, outs = (specs, split, split), (specs, P(), P())
    return jax.shard_map(gradients, mesh=devices, in_specs=ins, out_specs=outs)


def fit(devices, optimizer, most):
    """Error and gradient norm of each step; most: the norm to clip at."""

    def step(state, batch):
        d_w, norm, error = on_devices(devices, gradients)(state[0], *batch)
        d_w = jax.tree.map(lambda d: d * jnp.minimum(1, most / norm), d_w)
        changes, moments = optimizer.update(d_w, state[1])
        return (optax.apply_updates(state[0], changes), moments), (error, norm)

    run = jax.jit(lambda w: jax.lax.scan(step, (w, optimizer.init(w)), BATCHES))
    return [np.asarray(one) for one in run(first_w)[1]]


# %% tags=["hide-input"] mystnb={"image": {"alt": "Error against steps in two panels: with Adam the curves of one and eight devices coincide; with momentum and clipping they differ."}}
BATCHES = [np.stack(one) for one in zip(*map(draw, range(200)), strict=True)]
OPTIMIZERS = {
    "Adam": (optax.adam(0.01), np.inf),
    "momentum, clipped": (optax.sgd(0.1, momentum=0.9), 1.0),
}
figure, axes = plt.subplots(1, 2, figsize=(6.4, 3), sharey=True)
FITS = {}
for ax, (name, how) in zip(axes, OPTIMIZERS.items(), strict=True):
    for devices, style in ((1, dict(color=lesson.NEUTRAL, lw=3, alpha=0.5)),
                           (8, dict(color=lesson.COLORS["expert"], lw=1))):  # fmt: skip
        error, norm = FITS[name, devices] = fit(devices, *how)
        ax.plot(error, label=f"n = {devices}", **style)
        print(f"{name:18} n = {devices}: first error {error[0]:.3f}, first gradient "
              f"norm {norm[0]:5.1f}, last errors {error[-20:].mean():.3f}")  # fmt: skip
    ax.set(title=name, xlabel="step", ylim=(0, 2))
axes[0].set_ylabel("error")
legend = axes[0].legend()

# %% tags=["remove-cell"]
last = {at: errors[-20:].mean() for at, (errors, _) in FITS.items()}
assert abs(last["Adam", 8] / last["Adam", 1] - 1) < 0.1, last
assert abs(last["momentum, clipped", 8] / last["momentum, clipped", 1] - 1) > 0.2, last
assert FITS["Adam", 8][1][0] > 4 * FITS["Adam", 1][1][0], "the norm shows it"

# %% [markdown]
# Fix the program. The check compares gradients, norm and error on 2 and 4 devices with one device.


# %% tags=["hide-input"]
@jax.jit
def dense_gradients(w, x_ND, y_ND):
    def loss(w):
        h_ND = x_ND + x_ND @ w["mix_DD"]
        error = jnp.mean((on_one(w, h_ND, N) - y_ND) ** 2)
        load_E, score_E = statistics(*route(w, h_ND)[1:])
        return error + 0.1 * E * jnp.sum(load_E * score_E), error

    return jax.grad(loss, has_aux=True)(w)


on_step = functools.cache(lambda step: dense_gradients(first_w, *draw(step)))


def changed(change):
    """fn(devices, step) -> one device's result with change(name, gradient, devices)."""

    def of(devices, step):
        d_w, error = on_step(step)
        d_w = {at: change(at, np.asarray(d), devices) for at, d in d_w.items()}
        return d_w, np.sqrt(sum((d**2).sum() for d in d_w.values())), error

    return of


def by_group(experts, others):
    return changed(lambda at, d, n: d * (experts(n) if at in SHARDED else others(n)))


# %% tags=["hide-input"]
def of_all(d, devices):
    parts = d.reshape(devices, -1, *d.shape[1:]).sum(0, keepdims=True)
    return np.repeat(parts, devices, axis=0).reshape(d.shape)


mixed = lambda times: lambda at, d, n: times(n) * of_all(d, n) if at in SHARDED else d
one, all_n = (lambda n: 1), (lambda n: n)
BAD_GRADIENTS = [
    (by_group(all_n, one),
     "Unchanged. Which gradients differ from one device, and by what factor?"),
    (by_group(one, lambda n: 1 / n),
     "The experts are right now. The other gradients are n times too small."),
    (by_group(all_n, all_n),
     "All in proportion, but n times too large: gradients of a sum of mean losses."),
    (by_group(one, all_n),
     "The experts are right now. The other gradients are n times too large."),
    (by_group(lambda n: 1 / n, one),
     "The experts' gradients are n times too small: divided twice?"),
    (changed(mixed(one)), "You averaged the gradients of different experts."),
    (changed(mixed(all_n)), "You added up the gradients of different experts."),
]  # fmt: skip


# %% tags=["hide-input", "hide-output"]
def check_gradients(answer):
    @functools.cache
    def meshed(devices):
        return jax.jit(on_devices(devices, lesson.answered(answer)))

    run = lambda devices, step: meshed(devices)(first_w, *draw(step))
    right, done = by_group(one, one), "Right: all gradients match one device."
    return lesson.diagnose(run, [(4, 0), (2, 7)], right, BAD_GRADIENTS, done, 1e-3)


print(check_gradients(gradients))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `reduced` divides the gradients of the replicated weights by n (`pmean`), but not those of the experts. The
# backward pass brought an expert the gradients of all devices' tokens. Each device took the mean over its own
# N/n tokens, so the expert's gradient is a sum of n means. Divide it by n: `d / jax.lax.axis_size("expert")`.
#
# Adam divides each gradient by its own running size, so a constant factor cancels. Momentum gives the experts
# larger steps than asked for, and clipping by a norm that the experts dominate gives all other weights
# smaller ones. (That this run learns faster is luck.) The printed norm shows the bug at the first step.
#
# In August 2025, a user found the gradients of experts exactly twice as large with two expert-parallel GPUs,
# in code that follows torchtitan, with equivalent loss curves
# ([pytorch#160285](https://github.com/pytorch/pytorch/issues/160285)). In July 2026, a unit test found the
# same in Megatron-FSDP v2 ([#5956](https://github.com/NVIDIA/Megatron-LM/pull/5956)). MegaBlocks had fixed it
# in 2023 ([#20](https://github.com/databricks/megablocks/pull/20)), and [its author
# explains](https://github.com/databricks/megablocks/issues/86) the factor.
# </details>


# %% tags=["remove-cell"]
vary = lambda x: jax.lax.pcast(x, "expert", to="varying")


def mended(experts=lambda d, n: d / n, others=lambda d, n: mean(d)):
    def device(w, x_tD, y_tD):
        own = {at: x if at in SHARDED else vary(x) for at, x in w.items()}
        d_w, error = jax.grad(local_loss, has_aux=True)(own, x_tD, y_tD)
        size = jax.lax.axis_size("expert")
        how = lambda at: experts if at in SHARDED else others
        d_w = {at: how(at)(d, size) for at, d in d_w.items()}
        return d_w, norm_of(d_w), mean(error)

    return device


WRONG = [
    gradients, mended(others=lambda d, n: mean(d) / n),
    mended(lambda d, n: d, lambda d, n: total(d)),
    mended(others=lambda d, n: total(d)), mended(lambda d, n: d / n**2),
    mended(lambda d, n: vary(mean(d))), mended(lambda d, n: vary(total(d))),
]  # fmt: skip
lesson.expect(check_gradients, *zip(WRONG, [hint for _, hint in BAD_GRADIENTS],
                                    strict=True), (mended(), "Right"),
              (lambda *_: ..., lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## In one table
#
# Bytes are per device in the forward pass, for t tokens of width D in bfloat16 and a capacity factor of 1.
#
# | | all-to-all of slots | gathered tokens |
# |---|---|---|
# | shapes | `x_tD → [E, X, D] ⇄ [e, n X, D]`, times `w_eDM` | `x_tD → x_ND`, sorted, times `w_eDM`, `partial_ND → y_tD` |
# | each device stores | E/n experts, t tokens, E X slots | E/n experts, t tokens, N tokens and N k rows |
# | forward pass | two all-to-alls | all-gather, reduce-scatter |
# | backward pass | two all-to-alls; the router's gradient is summed | all-gather, reduce-scatter; the router's gradient is summed |
# | bytes sent | 2 * 2 k t D (n - 1)/n | 2 * 2 t D (n - 1), which is n/k times as much |
# | dropped | choices beyond X; in rounds, nothing | nothing |
# | exposed | yes, unless it overlaps with another microbatch, attention or shared experts | the same |
# | use it if | n is well above k, and the router is balanced (or, dropless, in rounds) | n is at most about k |
#
# | here | JAX | PyTorch | Megatron-LM |
# |---|---|---|---|
# | mesh axis `expert` | a mesh axis in `shard_map` | an expert-parallel process group; torchtitan takes its ranks from the data-parallel ones | `--expert-model-parallel-size` |
# | dispatch and combine, `on_device`, `routed` | `lax.all_to_all`, `lax.ragged_all_to_all` | `all_to_all_single`; DeepEP: dropless, a token is sent to a node once | token dispatcher `alltoall` |
# | gathered tokens | `lax.all_gather`, `lax.psum_scatter` | `all_gather`, `reduce_scatter` | token dispatcher `allgather` |
# | grouped matmul | `lax.ragged_dot` | MegaBlocks | `--moe-grouped-gemm` |
# | load-balancing loss, selection bias | your own code | aux loss, `expert_bias` | `--moe-aux-loss-coeff`, `--moe-router-enable-expert-bias` |
#
# ## Three lines to keep
#
# 1. Tokens are sent to their experts, and the outputs back: two all-to-alls forward and two backward, each
#    with k copies of a token. Gathering sends n/k times as much, and drops nothing.
# 2. Communication and compute both grow with the tokens, so a larger batch does not change their ratio. It
#    depends on the expert width, the bandwidth and the number of nodes per token.
# 3. Load balancing needs the loads of the whole batch: sum them over devices before you multiply, compare
#    or take a sign.
#
# **Sources.** GShard, [arXiv:2006.16668](https://arxiv.org/abs/2006.16668), section 2.2 (capacity,
# all-to-all); Switch Transformer, [arXiv:2101.03961](https://arxiv.org/abs/2101.03961), equation 4
# (load-balancing loss); MegaBlocks, [arXiv:2211.15841](https://arxiv.org/abs/2211.15841); the selection bias,
# [arXiv:2408.15664](https://arxiv.org/abs/2408.15664); DeepSeek-V3,
# [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), 2.1.2 and 3.2; the scaling book on
# [all-to-all](https://jax-ml.github.io/scaling-book/sharding) and on
# [GPUs](https://jax-ml.github.io/scaling-book/gpus).
