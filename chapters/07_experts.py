# %% [markdown]
# # 07 · Experts
#
# **Question.** A layer has 256 feed-forward networks, and each token goes through 8 of them. The networks lie
# on different devices, and so do the tokens. Who sends what to whom, and how much of it is waiting?
#
# **Why it hurts not to know.** Sparse layers are cheap in FLOPs and dear on the wire: between nodes of GPUs
# the exchange can take several times as long as the products. And a router that is trained wrongly trains all
# the same: half of the experts do nothing, or none is allowed to specialise, and the loss goes down.
#
# *Before this:* 01 (`shard_map`, collectives), 02, 03. *Mesh:* `expert=8`, simulated. *Runs in* 40 s on 2
# cores. Reading takes about 25 minutes, the exercises as long again.

# %%
from devices import simulate_devices

simulate_devices(8)

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from chapters import lesson

# %% [markdown]
# ## What a router does
#
# An *expert* is a feed-forward network, as every layer has one; a sparse layer has E of them. A small matrix,
# the *router*, gives each token a score for every expert. The k best are chosen (`top_k`), and their outputs
# are added, each times its *gate*: its score, divided by the sum of the k chosen ones. Scores are a softmax
# over all experts (Switch, Mixtral), or a sigmoid of each (DeepSeek-V3), which leaves experts independent of
# each other until they are chosen. Letters, as in `model.py`: N tokens, E experts, D the width of the model,
# M the hidden width of an expert, k choices a token, A = N k choices of all tokens.

# %%
logits_E = jnp.array([2.0, -1.0, 0.5, 1.5])  # of one token, for four experts
for name, score in (("softmax", jax.nn.softmax), ("sigmoid", jax.nn.sigmoid)):
    chosen_k, experts_k = jax.lax.top_k(score(logits_E), 2)
    gates_k = chosen_k / chosen_k.sum()
    print(f"{name}: experts {experts_k}, scores {chosen_k}, gates {gates_k}")

# %% [markdown]
# Both choose the same two experts here. The choice itself has no gradient: what teaches the router is the
# gates of chosen experts.
#
# Per token this costs k experts of FLOPs, while the parameters grow with E. So the parameters are what has to
# be cut, and they come in E equal pieces: device d of n holds experts d E/n up to (d + 1) E/n. That is
# *expert parallelism* (EP), and `expert` is its mesh axis. The tokens are cut along it too, as they are along
# `fsdp`: otherwise n devices would do the same attention.
#
# The naive way: each device takes the choices of its own experts. How many does it skip?

# %%
rng = np.random.default_rng(0)
n, E, k, tokens = 8, 16, 2, 512
choices_Nk = np.argsort(rng.random((tokens, E)), axis=1)[:, :k]  # k experts, at random
home_N1 = np.arange(tokens)[:, None] * n // tokens  # the device that has the token
holder_Nk = choices_Nk // (E // n)  # the device that has the expert
at_home = np.mean(holder_Nk == home_N1)
none_at_home = np.mean((holder_Nk != home_N1).all(axis=1))
print(f"at home: {at_home:.1%} of the choices; {none_at_home:.1%} of tokens have none")
assert abs(at_home - 1 / n) < 0.03, "a fair choice is at home once in n"

# %% [markdown]
# About one choice in n is at home. Three quarters of the tokens would pass the layer as if it were not there.
# Such a layer trains. So the tokens have to travel: to the devices of their experts (*dispatch*), and back
# (*combine*).
#
# ## Slots
#
# The collective for this is the all-to-all: each device sends a different piece to each other one. Its pieces
# have one size, which is fixed when the program is compiled, whereas the router decides anew in each step. So
# give each expert, for each device, a fixed number X of *slots*. A device writes each of its tokens into the
# next free slot of each expert that the token chose, and the all-to-all carries whole blocks of slots.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Four rows of blocks. Before, each has all colours; after, each has one."}}
figure, axes = plt.subplots(2, figsize=(6, 4.6))
before, after = "Before: slots for all experts", "After: all slots for its experts"
for ax, title in zip(axes, (before, after), strict=True):
    for device, place in np.ndindex(4, 8):
        source, expert = device, place
        if ax is axes[1]:
            source, expert = place % 4, 2 * device + place // 4
        colour = lesson.DEVICES[expert // 2]
        ax.barh(device, 0.94, left=place, height=0.8, color=colour, alpha=0.75)
        text = f"{source}→{expert}"
        ax.text(place + 0.47, device, text, ha="center", va="center", size=9)
    ax.set(title=title, yticks=range(4), ylabel="device", xticks=[])
    ax.invert_yaxis()
says = "a block: X slots, from a device → for an expert; colour: the expert's device"
axes[1].set_xlabel(says)
labels = axes[1].xaxis.label.set_size(9)

# %% [markdown]
# **An all-to-all over `expert` turns [E, X, D] of a device's tokens into [E/n, n X, D] of
# its experts' tokens, and a second one turns it back.** Here four devices have eight experts.
#
# What if more than X tokens of a device choose an expert? The rest are *dropped*: they get nothing from that
# expert, and go on by the residual connection alone. If fewer choose it, slots stay empty, are sent
# nonetheless, and are multiplied. With t tokens on a device, the mean is k t/E choices for each expert, and X
# is that times the *capacity factor*.
#
# > **Predict.** A device has 64 tokens, each chooses 2 of 16 experts at random, and the factor is 1: exactly
# > as many slots as choices. Which share of the choices is dropped, in percent?

# %%
my_prediction = None  # percent


def dropped(factor, t, popular=0.0):
    """Share of choices that find no slot, of 200 devices with t tokens each."""
    rng = np.random.default_rng(1)
    liked_E = popular * rng.normal(size=E)  # 0: all experts alike
    noisy = liked_E + rng.gumbel(size=(200, t, E))
    experts = np.argsort(-noisy, axis=-1)[..., :k]
    load = np.stack([(experts == e).sum(axis=(1, 2)) for e in range(E)], axis=1)
    slots = int(factor * k * t / E)
    return np.maximum(load - slots, 0).sum() / load.sum()


lesson.predicted("dropped", my_prediction, 100 * dropped(1, 64), "%", within=0.15)

# %%
print("factor         1   1.25    1.5      2")
for t, popular in ((64, 0), (4096, 0), (64, 1), (4096, 1)):
    shares = [dropped(factor, t, popular) for factor in (1, 1.25, 1.5, 2)]
    liked = "some preferred" if popular else "all alike"
    print(f"t = {t:4}  " + "".join(f"{one:7.1%}" for one in shares), liked)
assert dropped(1.25, 4096) < 0.001 and dropped(1.25, 4096, 1) > 0.05, "noise or liking"

# %% [markdown]
# Choices that are fair on average are not equal in each draw, and every excess is lost while every gap stays
# empty. With more tokens on a device that noise averages out, and a factor of 1.25 drops nothing. What does
# not average out is a preference: if the router likes some experts better (here by a normal draw added to
# each logit), a factor of 1.25 still drops 8% of the choices, with any number of tokens. So a capacity needs
# a balanced router (below). To drop nothing with fixed blocks takes a slot for every token of a device.
#
# ## By hand
#
# The whole layer in plain JAX, for an empty file. One device is the judge: it puts *every* token through
# *every* expert, weighted by gates of which most are 0. It has no slots: which choices drop it finds by
# comparing each with all earlier ones of the same device.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np

n, N, E, k, D, M = 8, 512, 16, 2, 16, 32  # devices, tokens, experts, choices, widths
mesh = jax.make_mesh((n,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


def route(w, x_ND, bias_E=0.0):
    scores_NE = jax.nn.softmax(x_ND @ w["router_DE"])
    _, experts_Nk = jax.lax.top_k(scores_NE + bias_E, k)
    chosen_Nk = jnp.take_along_axis(scores_NE, experts_Nk, axis=1)
    return chosen_Nk / chosen_Nk.sum(1, keepdims=True), experts_Nk, scores_NE


# %% tags=["by-hand"]
def feed_forward(w, rows_eAD):  # A rows for each of the e experts that are here
    return jax.nn.relu(rows_eAD @ w["up_EDM"]) @ w["down_EMD"]


def on_device(w, x_tD, slots):  # t: this device's tokens; a place >= slots is none
    gates_tk, experts_tk, _ = route(w, x_tD)
    chosen_AE = jax.nn.one_hot(experts_tk.reshape(-1), E, dtype=int)
    place = experts_tk, ((chosen_AE.cumsum(0) - 1) * chosen_AE).sum(1).reshape(-1, k)
    sent_EXD = jnp.zeros((E, slots, D)).at[place].set(x_tD[:, None], mode="drop")
    rows_eAD = jax.lax.all_to_all(sent_EXD, "expert", 0, 1, tiled=True)
    back_EXD = jax.lax.all_to_all(feed_forward(w, rows_eAD), "expert", 1, 0, tiled=True)
    out_tkD = back_EXD.at[place].get(mode="fill", fill_value=0)  # 0: it was dropped
    return (gates_tk[..., None] * out_tkD).sum(1)


# %% tags=["by-hand"]
def on_mesh(w, x_ND, slots):
    cut = jax.P("expert")
    specs = {"router_DE": jax.P(), "up_EDM": cut, "down_EMD": cut}, cut
    device = lambda w, x_tD: on_device(w, x_tD, slots)
    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=cut)(w, x_ND)


def on_one(w, x_ND, slots, bias_E=0.0):
    gates_Nk, experts_Nk, _ = route(w, x_ND, bias_E)
    chosen_nA = experts_Nk.reshape(n, -1)  # each device's choices, in order
    earlier_nA = jnp.tril(chosen_nA[:, :, None] == chosen_nA[:, None], -1).sum(2)
    kept_Nk = gates_Nk * (earlier_nA.reshape(N, k) < slots)
    gates_NE = (kept_Nk[..., None] * jax.nn.one_hot(experts_Nk, E)).sum(1)
    return jnp.einsum("NE,END->ND", gates_NE, feed_forward(w, x_ND))  # all by all


# %% tags=["by-hand"]
rng = np.random.default_rng(0)
shapes = {"router_DE": (D, E), "up_EDM": (E, D, M), "down_EMD": (E, M, D)}
w = {name: np.float32(rng.normal(size=shape) / 4) for name, shape in shapes.items()}
x_ND, y_ND = np.float32(rng.normal(size=(2, N, D)))
for slots in (N // n, k * N // n // E):  # enough for all; capacity factor 1
    loss = lambda f, X=slots: lambda w: jnp.mean((f(w, x_ND, X) - y_ND) ** 2)
    eight, one = (jax.jit(jax.value_and_grad(loss(f)))(w) for f in (on_mesh, on_one))
    for a, b in zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6), "mesh and one device differ"
    print(f"{slots} slots: loss {eight[0]:.4f} on eight devices, {one[0]:.4f} on one")

# %%
load_nE = (route(w, x_ND)[1].reshape(n, -1, 1) == np.arange(E)).sum(1)
lost = np.maximum(load_nE - slots, 0).sum() / (N * k)
print(f"{slots} slots: {lost:.1%} of the choices find none")
assert 0.1 < lost < 0.3 and load_nE.max() < N // n, "the test has to drop some"

# %% [markdown]
# Line by line, this is all there is to a *token dispatcher*, as Megatron-LM calls it:
#
# - A choice's slot is the number of earlier choices of that expert, on this device. With N/n = 64 slots none
#   can lack one, since a token chooses an expert at most once.
# - `all_to_all(x, "expert", 0, 1)` cuts dim 0 (experts) into n parts, and joins what arrives along dim 1.
# - The gradient needs no line of its own. An all-to-all only moves numbers, so its way back is the opposite
#   all-to-all. An expert's gradient is complete on its device, because all tokens that chose it have come
#   there, and nobody adds over `expert`. The router lies on every device, so its gradient is added (02).
#
# With 8 slots the same choices drop on the mesh and on one device, because `on_one` counts each device's
# tokens apart. So with a capacity, which tokens drop depends on how many devices there are.
#
# ## The other exchange
#
# To drop nothing without guessing an X, turn it around: every device gathers *all* tokens, keeps the choices
# that are its experts', sorts them by expert, and multiplies groups of unequal size. `jax.lax.ragged_dot`
# does that: consecutive groups of rows, each with its own matrix (a *grouped product*, for which megablocks
# is known). Then a reduce-scatter adds what the experts of all devices have made, and returns each token.


# %%
def gathered(w, x_tD):
    e = w["up_EDM"].shape[0]  # experts of this device
    x_ND = jax.lax.all_gather(x_tD, "expert", tiled=True)
    gates_Nk, experts_Nk, _ = route(w, x_ND)  # of all tokens: the router is small
    mine_A = experts_Nk.reshape(-1) - jax.lax.axis_index("expert") * e
    group_A = jnp.where((mine_A >= 0) & (mine_A < e), mine_A, e)  # e: not ours
    order_A = jnp.argsort(group_A)
    sizes_e = jnp.bincount(group_A, length=e + 1)[:e]
    rows_AD = x_ND[order_A // k]
    up_AM = jax.nn.relu(jax.lax.ragged_dot(rows_AD, w["up_EDM"], sizes_e))
    out_AD = jax.lax.ragged_dot(up_AM, w["down_EMD"], sizes_e)  # 0 past the last group
    out_AD *= gates_Nk.reshape(-1)[order_A, None]
    partial_ND = jnp.zeros_like(x_ND).at[order_A // k].add(out_AD)
    return jax.lax.psum_scatter(partial_ND, "expert", scatter_dimension=0, tiled=True)


# %% [markdown]
# > **Predict.** Eight devices, k = 2, capacity factor 1. How many times the bytes of the all-to-alls does a
# > device send with this program, forward? (There every token goes to every device, whoever needs it.)


# %%
def compiled_on(n, device):
    """The compiled layer on n devices, and the ledger of its collectives."""
    mesh = jax.make_mesh((n,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.P("expert")
    specs = {"router_DE": jax.P(), "up_EDM": cut, "down_EMD": cut}, cut
    layer = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=cut))
    return layer, lesson.compiled(layer, mesh, w, x_ND)


my_prediction = None  # times
by_slots = lambda n: lambda w, x_tD: on_device(w, x_tD, slots=k * N // n // E)
sent = {}
for m in (2, 4, 8):
    found = [compiled_on(m, how)[1] for how in (by_slots(m), gathered)]
    sent[m] = [one.total.wire_bytes for one in found]
ratio = sent[8][1] / sent[8][0]
lesson.predicted("gathered / all-to-all", my_prediction, ratio, "times")

# %%
for one in found:
    lesson.listed(one)
for how in (by_slots(8), gathered):  # forward and backward
    layer, _ = compiled_on(8, how)
    error = lambda w, x_ND, f=layer: (f(w, x_ND) ** 2).mean()
    squares = jax.value_and_grad(error, (0, 1))
    kinds = lesson.compiled(squares, mesh, w, x_ND).by("kind")
    print("with gradient:", {kind: total.count for kind, total in kinds.items()})
for m, (slots_bytes, gather_bytes) in sent.items():
    print(f"n = {m}: all-to-all {slots_bytes:,.0f}, gathered {gather_bytes:,.0f} bytes")
    assert gather_bytes / slots_bytes == m / k, "n/k times, if slots = choices"
everything = compiled_on(8, gathered)[0](w, x_ND)
assert lesson.same(everything, on_one(w, x_ND, N)), "gathering drops nothing"

# %% [markdown]
# Each device has t = N/n tokens. It sends k copies of each with the all-to-all, and n - 1
# gathered. So gathering sends **n/k times** the bytes, or n over k times the capacity factor. With n = 2 and
# k = 2 they are equal; with k above n gathering sends less, because a token goes to a device once, and not
# once for each expert that it has there. In return nothing drops, and no slot is empty.
#
# The other price is memory. The arrays above have N k rows, because all choices *might* be this device's. Of
# those 1/n are, in the mean. A kernel can skip the rows of others, as `kernels/grouped.py` does; memory for
# them is taken all the same. JAX's
# [`ragged_all_to_all`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.ragged_all_to_all.html) sends to
# each only what it needs; it does [not run on CPUs](https://github.com/jax-ml/jax/issues/34755), and it too
# needs a buffer for the worst case.
#
# ## Tokens that reach few nodes
#
# DeepSeek-V3 has 256 experts, of which a token chooses 8. Put them on 8 nodes of 8 GPUs, 32 experts a node.
# Inside a node is NVLink; between nodes is InfiniBand, nine times slower for each GPU. An all-to-all sends
# eight copies of a token, even if three of them go to the same node.
#
# > **Predict.** Eight different experts at random, out of 256 on 8 nodes. On how many nodes do they lie, on
# > average?

# %%
my_prediction = None  # nodes
rng = np.random.default_rng(2)
drawn, all_experts, top, nodes = 5000, 256, 8, 8
scores = rng.random((drawn, all_experts))


def nodes_of(scores):
    """Which nodes the chosen experts of each token lie on. [token, node]"""
    best = np.argsort(-scores, axis=1)[:, :top]
    return (best[:, :, None] // (all_experts // nodes) == np.arange(nodes)).any(axis=1)


free = nodes_of(scores).sum(axis=1)
lesson.predicted("nodes reached", my_prediction, free.mean(), within=0.03)

# %% [markdown]
# So a token that crosses once to each node, and is copied there over NVLink, saves a third of the crossings.
# DeepSeek-V3 goes further, and lets a token choose experts on 4 nodes at most (*node-limited routing*,
# [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), 2.1.2): first the 4 nodes whose two best scores have
# the greatest sum, then 8 experts among those.


# %%
def limited(scores, most=4):
    """Scores with -1 for experts outside of each token's `most` best nodes."""
    by_node = scores.reshape(-1, nodes, all_experts // nodes)
    of_node = np.sort(by_node, axis=2)[:, :, -top // most :].sum(axis=2)
    allowed = np.argsort(np.argsort(-of_node, axis=1), axis=1) < most
    return np.where(allowed[:, :, None], by_node, -1).reshape(scores.shape)


few = nodes_of(limited(scores)).sum(axis=1)
away = (nodes - 1) / nodes  # of what is sent at random, what leaves the node
crossings = {
    "a copy for each expert": top * away,
    "one for each node": free.mean() * away,
    "at most 4 nodes": few.mean() * away,
    "gathered: all nodes": nodes - 1,
}
for name, copies in crossings.items():
    kB = copies * 7168 * 2 / 1e3
    print(f"{name:22} {copies:.2f} crossings of a token, {kB:5.1f} kB in bf16")
assert crossings["one for each node"] < 0.67 * crossings["a copy for each expert"]

# %% tags=["hide-input"] mystnb={"image": {"alt": "Shares of tokens by nodes reached: without a limit mostly five and six, with it four."}}
figure, axes = plt.subplots(figsize=(5, 2.8))
for one, label, shift, colour in (
    (free, "free choice", -0.2, lesson.NEUTRAL),
    (few, "at most 4 nodes", 0.2, lesson.COLOURS["expert"]),
):
    share = 100 * np.bincount(one, minlength=nodes + 1) / drawn
    axes.bar(np.arange(nodes + 1) + shift, share, width=0.4, color=colour, label=label)
axes.set(xlabel="nodes that a token reaches, of 8", ylabel="tokens, %", xlim=(1.5, 8.5))
axes.set(title="A limit saves what goes between nodes")
legend = axes.legend()

# %% [markdown]
# Seven crossings become 3.5, at half the bytes. [DeepEP](https://github.com/deepseek-ai/DeepEP), DeepSeek's
# library for dispatch and combine on GPUs, sends each token once to a node, and forwards there over NVLink.
# In a gather a token crosses to each node once by itself; but it crosses to *all* of them.
#
# ## Seconds
#
# Simulated devices show no time, so this is arithmetic, with speeds from the planner's table: a layer of
# DeepSeek-V3's sizes (D = 7168, M = 2048, 8 of 256), forward, tokens sent in fp8 (1 byte) and returned in
# bfloat16 (2 bytes), as the paper does. Products count in bfloat16, at the chip's peak. First the speeds.

# %% tags=["hide-input"]
from config import MeshConfig
from plan import hardware

D_, M_, E_, k_ = 7168, 2048, 256, 8
PLACES = {"v5p:2x2x2": 8, "v5p:4x4x4": 64, "h100:8": 8, "h100:16": 16, "h100:64": 64}
print("one way, bfloat16, 4,096 tokens a device")


def link_of(place):
    """The wires of a mesh axis `expert` over all devices of a place."""
    mesh = MeshConfig.parse(f"expert={PLACES[place]}")
    return hardware.layout(mesh, hardware.Topology.parse(place))["expert"]


for place, m in PLACES.items():
    link, t_bytes = link_of(place), 4096 * D_ * 2
    one = "all-to-all", k_ * t_bytes * (m - 1) / m, link.all_to_all_bytes_per_s
    other = "gathered", t_bytes * (m - 1), link.bytes_per_s
    for name, size, speed in (one, other):
        print(f"{place:9}  {name:10} {size / 1e9:4.2f} GB at {speed / 1e9:3.0f} GB/s: "
              f"{1e3 * size / speed:.1f} ms")  # fmt: skip

# %% [markdown]
# Bytes are not seconds. On a torus an all-to-all has to pass through its middle, so a device sends 1.7 and 3
# times slower there than in a gather. And over two nodes of H100s, gathering sends twice the bytes and takes
# half the time, since a token crosses once and not four times. So in time gathering holds out longer than n =
# k: up to n = 16 on this list. At n = 64 memory ends it too: N k rows are 4,096 * 64 * 8 * 7,168 * 2 bytes,
# 30 GB.
#
# Now the all-to-all beside the products. What can more tokens change?


# %%
def seconds(place, tokens, copies=None):
    """Products and exchange of a layer, forward, and the experts' weights' read."""
    chip, m = hardware.Topology.parse(place).chip, PLACES[place]
    products = tokens * k_ * 6 * D_ * M_ / chip.peak_flops_per_s
    weights = E_ / m * 3 * D_ * M_ * 2 / chip.hbm_bytes_per_s
    wire = tokens * k_ * (m - 1) / m * D_ * 3 / link_of(place).all_to_all_bytes_per_s
    if copies:  # between nodes, by the GPU's own network card
        wire = tokens * copies * D_ * 3 / chip.dcn_bytes_per_s
    return products, weights, wire


# %% tags=["hide-input"]
CASES = {
    "v5p:4x4x4": ("v5p:4x4x4", None),
    "8 H100": ("h100:8", None),
    "16 H100": ("h100:16", None),
    "16 H100, once": ("h100:16", 1.0),
    "64 H100": ("h100:64", None),
    "64 H100, 4 nodes": ("h100:64", crossings["at most 4 nodes"]),
}
for name, (place, copies) in CASES.items():
    products, weights, wire = (1e6 * s for s in seconds(place, 1, copies))
    times = f"exchange {wire:.2f} us, {wire / products:.1f} times"
    print(f"{name:16} a token: products {products:.2f} us, {times}")
    longest = f"from {weights / wire:.0f} tokens on" if wire > products else "never"
    equal = f"{weights / products:.0f} tokens' products"
    print(f"{'':16} weights {weights:.0f} us: {equal}; exchange longest {longest}")

# %% tags=["hide-input"] mystnb={"image": {"alt": "Microseconds against tokens a device. On v5p the exchange stays below products, on 64 H100 it is above from about 35 tokens."}}
figure, axes = plt.subplots(2, figsize=(5.5, 6), sharex=True, sharey=True)
many = np.logspace(0, 4.3, 60)
drawn_in = ("v5p:4x4x4",), ("64 H100", "64 H100, 4 nodes")
for ax, names in zip(axes, drawn_in, strict=True):
    for number, name in enumerate(names):
        place, copies = CASES[name]
        products, weights, wire = (1e6 * s for s in seconds(place, many, copies))
        slower = np.maximum(products, weights)
        if not number:
            ax.plot(many, slower, color=lesson.NEUTRAL, label="products")
        label = "exchange" + number * ", at most 4 nodes"
        purple, dots = lesson.COLOURS["expert"], "-:"[number]
        ax.plot(many, wire, color=purple, ls=dots, label=label)
    ax.set(xscale="log", yscale="log", ylabel="microseconds")
    ax.axvspan(1, 50e3 / (k_ * D_ / 64), color=lesson.NEUTRAL, alpha=0.15, lw=0)
    ax.legend()
axes[0].set_title("64 TPU v5p: products take longer, always")
axes[1].set_title("64 H100: more tokens do not hide it")
label = axes[1].set_xlabel("tokens on a device; grey: latency decides")

# %% [markdown]
# With few tokens, products take as long as their weights take to read, whatever the tokens: 105 us on 64
# H100. There the exchange is below, up to 35 tokens a device; but there latency decides (to each of 63 others
# go 896 bytes a token, and below some 50 kB a message costs latency, not bytes: up to 56 tokens, grey). From
# 148 tokens on both grow alike, and **their ratio is fixed, by M and by the wire, not by the batch**. On v5p
# the exchange is 0.6 of the products at any size, and in one H100 node 0.5. On two nodes it is 2.4, on eight
# 4.2; with one crossing to a node, and at most 4 nodes, 0.6 and 2.1. (Forwarding over NVLink is not counted.)
#
# A token's exchange cannot run beside its own products, since one needs the other. It can run beside another
# microbatch's, or beside attention and shared experts. DeepSeek-V3 finds about 1:1 between nodes, and hides
# one microbatch's exchange behind another's work (DualPipe, section 3.2.1).
#
# ## Balance
#
# Capacity wants a fair router; without one, the device with the favourite expert is what all others wait for.
# Yet training works against it: an expert that is chosen more learns more, and is chosen more. To watch that,
# take 8 kinds of text: tokens of a kind lie around a point of their own, and the layer has to learn another
# matrix for each kind. All on one device, dense; `load` is the share of choices that an expert gets.

# %% tags=["hide-input"]
import optax

rng = np.random.default_rng(0)
centre_n1D = 2 * rng.normal(size=(n, 1, D)) + 3 * rng.normal(size=D)  # 3: all share
matrix_nDD = np.float32(rng.normal(size=(n, D, D)) / np.sqrt(D))
small = {"router_DE": 0.3, "up_EDM": 0.25, "down_EMD": 1 / 6}
start = {at: np.float32(rng.normal(size=shapes[at]) * std) for at, std in small.items()}


def draw(step):
    """A batch of N tokens, kind after kind, and what the layer should make of them."""
    noise_ntD = jax.random.normal(jax.random.key(step), (n, N // n, D))
    wanted_ntD = jnp.einsum("ntD,nDd->ntd", noise_ntD, matrix_nDD)
    return (jnp.float32(centre_n1D) + noise_ntD).reshape(N, D), wanted_ntD.reshape(N, D)


def statistics(experts_Nk, scores_NE):
    """An expert's share of the choices, and its mean score."""
    return jnp.mean(jax.nn.one_hot(experts_Nk, E), axis=(0, 1)), scores_NE.mean(0)


# %% [markdown]
# Two remedies. The **balance loss** (Switch; *aux loss* in PyTorch's libraries) adds E * sum over experts of
# load * mean score, times a small weight, to the loss. It is 1 if all are equal, and more if loads and scores
# peak together. The load has no gradient, so it acts as a weight: the scores of crowded experts are pushed
# down. The **selection bias** (DeepSeek-V3) adds nothing to the loss. A number for each expert is added to
# its score when experts are chosen, and never to the gate; after each step it goes up by a fixed amount if
# the expert's load was below the mean, else down.


# %%
def train(loss_of, steps=300, rate=0.0):
    """Errors and loads of each step. rate: of the selection bias"""
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


RUNS = {"nothing": train(dense_loss(0)), "balance loss": train(dense_loss(0.1)),
        "selection bias": train(dense_loss(0), rate=0.01)}  # fmt: skip


def end(run):
    """Error and loads, in fair shares, of the last 20 steps."""
    return run[0][-20:].mean(), E * run[1][-20:].mean(axis=0)


for name, run in RUNS.items():
    error, load_E = end(run)
    busiest, last = load_E.max(), E * run[1][-1].max()
    print(f"{name:14} error {error:.3f}, {(load_E < 0.25).sum()} of {E} experts idle, "
          f"the busiest {busiest:.1f} shares, in the last step {last:.1f}")  # fmt: skip
idle = [(end(run)[1] < 0.25).sum() for run in RUNS.values()]
assert idle[0] >= 6 and idle[1] == 0 and idle[2] <= 2, "as the text says"

# %% tags=["hide-input"] mystnb={"image": {"alt": "Loads of 16 experts, sorted, in three runs: without a remedy eight do nothing; with either remedy all work."}}
figure, axes = plt.subplots(3, figsize=(5, 4.6), sharex=True, sharey=True)
for ax, (name, run) in zip(axes, RUNS.items(), strict=True):
    error, load_E = end(run)
    ax.bar(np.arange(E), np.sort(load_E)[::-1], color=lesson.COLOURS["expert"])
    ax.axhline(1, color=lesson.NEUTRAL, lw=0.8)
    ax.set(title=f"{name}: error {error:.3f}", ylabel="load")
axes[2].set_xlabel("experts, the busiest first; load 1 is a fair share")
ticks = axes[2].set_xticks([])

# %% [markdown]
# Without a remedy half of the experts do nothing, and the error falls nonetheless: it says nothing of the
# waste. With the bias nearly all work, on the mean of 20 steps; in a single step one expert may still have
# several shares, because in this toy all tokens of a kind change their expert together. That is also why its
# error is hardly better here than without; models of real text did better with it than with the loss
# ([arXiv:2408.15664](https://arxiv.org/abs/2408.15664)). Each remedy wants the
# load of the step's *whole batch*. On a mesh that is a sum over devices of E numbers, 1 kB for 256 experts: a
# matter of latency, not of bytes. For the bias it must also be the *same* on all devices: it is a parameter
# that no gradient moves, and nothing else keeps its copies alike.
#
# ## In `model.py`
#
# The same two exchanges: `model.with_capacity` is `on_device` above with slots counted for each sequence, and
# `model.dropless` is `gathered`, with a kernel of its own for grouped products. `--model.capacity_factor 0`
# is dropless, the default. `model.router_statistics` adds counts over all devices before `model.balance_loss`
# multiplies, and `optimizer.update_selection_bias` moves the bias once a step.
#
# ## Exercise 1: how many slots
#
# A step has `tokens` tokens, cut over `devices`. How many slots X does each device keep for each expert?
# Round up, so that with factor 1 and equal loads nothing drops.


# %%
import math


def slots_of(factor, tokens, devices, experts, k):
    return ...


# %% tags=["hide-input"]
up = lambda x: math.ceil(round(x, 6))
SLOTS = {  # f: factor, t: tokens, n: devices
    "How many choices does a token make?":
        lambda f, t, n, E, k: up(f * t / n / E),
    "So many for all devices: each keeps and sends its own.":
        lambda f, t, n, E, k: up(f * k * t / E),
    "Of all devices, and one choice a token. Look at both.":
        lambda f, t, n, E, k: up(f * t / E),
    "So many choices has a device. Over how many experts?":
        lambda f, t, n, E, k: up(f * k * t / n),
    "Rounded down, the mean load does not fit.":
        lambda f, t, n, E, k: int(f * k * t / n / E),
    "Nearly: a slot is a whole one.": lambda f, t, n, E, k: f * k * t / n / E,
}  # fmt: skip


def check_slots(answer):
    cases = [(1.0, 512, 8, 16, 2), (1.5, 4096, 4, 64, 6), (1.25, 1000, 8, 32, 4)]
    right = lambda f, t, n, E, k: up(f * k * t / n / E)
    done = "Right: k t/E times the factor, rounded up."
    hints = [(mistake, hint) for hint, mistake in SLOTS.items()]
    return lesson.diagnose(answer, cases, right, hints, done)


# %%
print(check_slots(slots_of))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return math.ceil(factor * k * tokens / devices / experts)`. Without the k, half of all choices drop at k =
# 2 even if every load is equal, and the loss falls all the same. (We measured a published guide in which a
# quarter drops so.)
# </details>

# %% tags=["remove-cell"]
said = lambda form: check_slots(lambda f, t, n, E, k: form(f, t, n, E, k))
assert said(lambda f, t, n, E, k: math.ceil(f * k * t / n / E)).startswith("Right")
assert "choices does a token" in said(lambda f, t, n, E, k: math.ceil(f * t / n / E))
assert "all devices: each" in said(lambda f, t, n, E, k: math.ceil(f * k * t / E))
assert "Look at both" in said(lambda f, t, n, E, k: math.ceil(f * t / E))
assert "Over how many" in said(lambda f, t, n, E, k: math.ceil(f * k * t / n))
assert "Rounded down" in said(lambda f, t, n, E, k: f * k * t // (n * E))
assert "whole one" in said(lambda f, t, n, E, k: f * k * t / n / E)
assert "Not yet" in said(lambda f, t, n, E, k: 7)
assert check_slots(slots_of) == lesson.NOTHING

# %% [markdown]
# ## Exercise 2: the bias, on eight devices
#
# Write the update of the selection bias for use inside of `shard_map`: each expert's bias goes up by `RATE`
# if its load in the whole batch is below the mean load, else down. `own_load_E` counts the choices of this
# device's tokens; `bias_E` is the same on all devices, and has to stay so.

# %%
RATE = 0.01


def moved(bias_E, own_load_E):
    return ...


# %% tags=["hide-input"]
def after_step(answer):
    """fn(bias_E, load_nE) -> the bias that each of 8 devices has then, [n, E]."""

    def device(bias_E, load_1E):
        return lesson.answered(answer)(bias_E, load_1E[0])[None]

    specs = jax.P(), jax.P("expert")
    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=jax.P("expert"))


all_step = lambda b, step: b + RATE * np.broadcast_to(step, (n, E))
above = lambda x: np.sign(x.mean(-1, keepdims=True) - x)
gap = lambda x: x.mean() - x
DEVICES = {
    "Each device has another bias: it has counted its own tokens alone.":
        lambda b, x: all_step(b, above(x)),
    "Up to 8 steps at once: devices vote, and each vote is a step.":
        lambda b, x: all_step(b, above(x).sum(0)),
    "Devices vote, each with its own mean. The sign of what, rather?":
        lambda b, x: all_step(b, above(x).mean(0)),
}  # fmt: skip

# %% tags=["hide-input"]
DEVICES |= {
    "The other way around: the busiest experts become busier.":
        lambda b, x: all_step(b, -above(x.sum(0))),
    "By the difference. The step is fixed: its sign alone counts.":
        lambda b, x: all_step(b, gap(x.sum(0))),
    "By the difference, of means. The step is fixed: its sign alone counts.":
        lambda b, x: all_step(b, gap(x.mean(0))),
    "Loads of 8 devices, beside the mean of one: nearly all go down.":
        lambda b, x: all_step(b, np.sign(x.mean(1, keepdims=True) - x.sum(0))),
    "How far? RATE.": lambda b, x: all_step(b, above(x.sum(0)) / RATE),
    "That is the step. Where is the bias as it was?":
        lambda b, x: all_step(0 * b, above(x.sum(0))),
}  # fmt: skip


# %% tags=["hide-input"]
def check_moved(answer):
    if answer is None or answer is ...:
        return lesson.NOTHING
    rng = np.random.default_rng(3)
    load_nE = lambda: np.float32(rng.integers(0, 40, (n, E)) * 1.01 ** np.arange(E))
    cases = [(np.float32(rng.normal(size=E)), load_nE()) for _ in range(2)]
    right = lambda b, x: all_step(b, above(x.sum(0)))
    hints = [(mistake, hint) for hint, mistake in DEVICES.items()]
    done = "Right, and the same on all devices."
    return lesson.diagnose(after_step(answer), cases, right, hints, done)


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
# The sign of a sum is not the sum of signs. With `out_specs=jax.P()` and `check_vma` on, JAX refuses the
# first wrong answer, the one with a bias of its own on each device. Where nothing checks, it runs: every rank
# chooses by another bias, and the checkpoint keeps one of them.
# </details>


# %% tags=["remove-cell"]
def voted(how):
    return check_moved(lambda b, x: b + RATE * how(x))


whole = lambda x: jax.lax.psum(x, "expert")
assert "Right" in voted(lambda x: jnp.sign(whole(x).mean() - whole(x)))
assert "Right" in voted(lambda x: jnp.sign(1 / E - whole(x) / whole(x).sum()))
assert "its own tokens" in voted(lambda x: jnp.sign(x.mean() - x))
assert "8 steps" in voted(lambda x: whole(jnp.sign(x.mean() - x)))
assert "vote, each" in voted(lambda x: jax.lax.pmean(jnp.sign(x.mean() - x), "expert"))
assert "busier" in voted(lambda x: jnp.sign(whole(x) - whole(x).mean()))
assert "fixed" in voted(lambda x: whole(x).mean() - whole(x))
assert "beside the mean of one" in voted(lambda x: jnp.sign(x.mean() - whole(x)))
assert "RATE." in check_moved(lambda b, x: b + jnp.sign(whole(x).mean() - whole(x)))
step = lambda x: jnp.sign(whole(x).mean() - whole(x))
assert "as it was" in check_moved(lambda b, x: RATE * step(x))
assert check_moved(moved) == lesson.NOTHING == check_moved(None)

# %% [markdown]
# ## Exercise 3: how wide must an expert be
#
# Design it: from which width M of its experts is a layer's exchange no longer than its products? Forward,
# with many tokens; both ways in bfloat16; three matrices an expert (gate, up, down). A device has
# `flops_per_s`, and sends `bytes_per_s` in an all-to-all over n devices. (D and k do not matter. Why?)


# %%
def narrowest(flops_per_s, bytes_per_s, n):
    return ...


# %% tags=["hide-input"]
def width(bytes_a_number, flops, away=True):
    """fn(flops_per_s, bytes_per_s, n) -> M, of a choice's bytes / D and FLOPs / D M."""
    left = lambda n: (n - 1) / n if away else 1
    return lambda peak, wire, n: bytes_a_number / flops * left(n) * peak / wire


WIDTHS = [
    (width(2, 6), "Half of it: what experts make has to come back."),
    (width(4, 6, False), "Nearly. Which share of the choices stays at home?"),
    (width(4, 4), "Too wide. Two matrices? There are three."),
    (width(4, 3), "Twice too wide: a multiply and an add are two FLOPs."),
    (width(4, 2), "Too wide: that is one matrix."),
    (width(3, 6), "For fp8 one way. Here both are bfloat16."),
    (width(2, 6, False), "One way only, and as if none stayed at home."),
    (lambda peak, wire, n: 1.5 * n / (n - 1) * wire / peak, "Upside down: the units?"),
]


# %% tags=["hide-input"]
def check_narrowest(answer):
    chips = [(989e12, 56.25e9, 64), (459e12, 157.5e9, 8), (2250e12, 900e9, 4)]
    done = "Right. 64 H100: 11,500; 8 v5p: 1,700; DeepSeek-V3 has 2,048."
    return lesson.diagnose(answer, chips, width(4, 6), WIDTHS, done, share=0.005)


# %%
print(check_narrowest(narrowest))

# %% [markdown]
# <details><summary>Solution</summary>
#
# A choice costs 6 D M FLOPs, and sends D numbers of 2 bytes there and back, 4 D bytes, of which (n - 1)/n
# leave the device. Equal times: 6 D M / peak = 4 D (n - 1)/n / wire, so `return 4 / 6 * (n - 1) / n *
# flops_per_s / bytes_per_s`. D and k stand on both sides. So narrow experts are dear on the wire, however
# many a token chooses.
# </details>

# %% tags=["remove-cell"]
by = lambda b, flops: lambda peak, wire, n: b / flops * (n - 1) / n * peak / wire
form = lambda b, flops: check_narrowest(by(b, flops))
assert form(4, 6).startswith("Right")
assert 11450 < width(4, 6)(989e12, 56.25e9, 64) < 11550
assert 1650 < width(4, 6)(459e12, 157.5e9, 8) < 1750
assert "come back" in form(2, 6) and "three" in form(4, 4) and "two FLOPs" in form(4, 3)
assert "one matrix" in form(4, 2) and "fp8" in form(3, 6)
assert "stays at home" in check_narrowest(lambda peak, wire, n: 4 / 6 * peak / wire)
assert "as if none" in check_narrowest(lambda peak, wire, n: 2 / 6 * peak / wire)
upside_down = lambda peak, wire, n: 6 / 4 * n / (n - 1) * wire / peak
assert "Upside" in check_narrowest(upside_down)
assert check_narrowest(narrowest) == lesson.NOTHING

# %% [markdown]
# ## A bug to find
#
# A colleague has put the training above on eight devices: the layer by hand with slots for all, the error,
# the balance loss. Each device reads files of its own, and has one of the 8 kinds of text. Nothing drops. One
# device with the same batches reaches an error below 0.1. Eight do not.


# %%
def device_loss(w, x_tD, y_tD):
    """What a device computes: loss, and what is logged. The same on all devices."""
    out_tD = on_device(w, x_tD, slots=x_tD.shape[0])
    squares = jax.lax.psum(jnp.sum((out_tD - y_tD) ** 2), "expert")
    error = squares / (n * y_tD.size)
    _, experts_tk, scores_tE = route(w, x_tD)
    load_E, score_E = statistics(experts_tk, scores_tE)
    balance = E * jnp.sum(load_E * score_E)
    balance, load_E = jax.lax.pmean((balance, load_E), "expert")
    return error + 0.1 * balance, (error, load_E)


def loss_on(device_loss):
    cut = jax.P("expert")
    specs = {"router_DE": jax.P(), "up_EDM": cut, "down_EMD": cut}, cut, cut
    eight = jax.shard_map(device_loss, mesh=mesh, in_specs=specs, out_specs=jax.P())
    return lambda w, bias_E, x_ND, y_ND: eight(w, x_ND, y_ND)


# %% mystnb={"image": {"alt": "Error against steps: one device falls to 0.07, eight devices stay above 0.3."}}
eight = train(loss_on(device_loss))
figure, axes = plt.subplots(figsize=(5, 3))
for name, errors, colour in (
    ("one device", RUNS["balance loss"][0], lesson.NEUTRAL),
    ("eight devices", eight[0], lesson.COLOURS["expert"]),
):
    axes.plot(errors, color=colour, label=name)
axes.set(xlabel="step", ylabel="error", ylim=(0, 2), title="Same batches, same start")
legend = axes.legend()
error, load_E = end(eight)
busiest, at_rest = load_E.max(), (load_E < 0.25).sum()
one, _ = end(RUNS["balance loss"])
print(f"error at the end: one device {one:.3f}, eight {error:.3f}")
print(f"eight devices: busiest expert {busiest:.1f} times its share, {at_rest} idle")
assert one < 0.1 and error > 2.5 * one and at_rest <= 1, "as the text says"

# %% [markdown]
# No expert is idle. Mend `device_loss`; the checker compares loss and gradient with
# one device, on two batches.


# %% tags=["hide-input"]
import functools


def measured(loss):
    """fn(step) -> loss, error, loads, gradient of one batch."""

    @functools.cache  # a checker asks again and again
    def of(step):
        (total, (error, load_E)), grads = run(start, jnp.zeros(E), *draw(step))
        return total, error, load_E, grads

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return of


def parts_loss(balance_of):
    """One device, its balance loss another function of the parts' loads and scores."""

    def loss(w, bias_E, x_ND, y_ND):
        error, (_, load_E) = dense_loss(0)(w, bias_E, x_ND, y_ND)
        _, experts_Nk, scores_NE = route(w, x_ND)
        parts = experts_Nk.reshape(n, -1, k), scores_NE.reshape(n, -1, E)
        balance = E * balance_of(*jax.vmap(statistics)(*parts))
        return error + 0.1 * balance, (error, load_E)

    return measured(loss)


# %% tags=["hide-input"]
ONE = measured(dense_loss(0.1))
whole_product = lambda l, s: (l.mean(0) * s.mean(0)).sum()
HINTS = {
    "As it was. Must each device's text use all experts, or the whole batch?":
        lambda l, s: (l * s).sum(1).mean(),
    "As it was, 8 times as strong: the product still comes first.":
        lambda l, s: (l * s).sum(),
    "64 times too strong: both means were added.":
        lambda l, s: n * n * whole_product(l, s),
    "8 times too strong: one of the means was added.":
        lambda l, s: n * whole_product(l, s),
    "8 times too weak: was it averaged twice?": lambda l, s: whole_product(l, s) / n,
    "Without a balance loss it trains, and experts are idle.": lambda l, s: 0.0,
}  # fmt: skip


# %% tags=["hide-input"]
MISTAKES = [(parts_loss(balance_of), hint) for hint, balance_of in HINTS.items()]


def check_loss(device_loss):
    tried = measured(loss_on(lesson.answered(device_loss)))
    done = "Right: one device's loss and gradient."
    return lesson.diagnose(tried, [(0,), (7,)], ONE, MISTAKES, done, share=1e-3)


# %% tags=["hide-output"]
print(check_loss(device_loss))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The balance loss is a product of two means, and the mean of products is not the product of means. So the
# means come first: `load_E, score_E = jax.lax.pmean((load_E, score_E), "expert")`, then the product, which
# all devices then have. (Averaging `load_E` alone is enough: with it, the mean of the products is right. That
# costs E numbers.) As it was, every device asks that *its own* text use all experts alike. A kind that is on
# one device may then not have experts of its own, although the whole batch would be balanced with them; the
# log shows balanced loads, because they are.
#
# [Demons in the Detail](https://arxiv.org/abs/2501.11873) found this in the training of mixtures of experts
# at large: frameworks computed the balance loss in each micro-batch, of few sequences, and averaged it over
# devices. With loads added over the whole batch, models of up to 42.8 billion parameters had a better
# perplexity, and experts that differ by domain. Megatron-LM [added
# it](https://github.com/NVIDIA/Megatron-LM/issues/1498) on request, for that paper. Here each device has one
# kind, which is the extreme; with shuffled text the harm is smaller, and harder to see. DeepSeek-V3 balances
# within a sequence too, on purpose, with a weight of 0.0001.
# </details>


# %% tags=["remove-cell"]
def mended(before=lambda x: jax.lax.pmean(x, "expert"), after=lambda x: x, weight=0.1):
    def device(w, x_tD, y_tD):
        _, (error, load_E) = device_loss(w, x_tD, y_tD)
        own = before(statistics(*route(w, x_tD)[1:]))
        balance = after(E * jnp.sum(own[0] * own[1]))
        return error + weight * balance, (error, load_E)

    return check_loss(device)


total = lambda x: jax.lax.psum(x, "expert")
mean = lambda x: jax.lax.pmean(x, "expert")
assert "As it was. Must" in check_loss(device_loss)
assert "Right" in mended()
assert "Right" in mended(lambda x: (mean(x[0]), x[1]), mean)
assert "8 times as strong" in mended(lambda x: x, total)
assert "64 times" in mended(total)
assert "one of the means" in mended(lambda x: (total(x[0]), mean(x[1])))
assert "idle" in mended(weight=0.0)
assert "too weak" in mended(weight=0.1 / n)
assert check_loss(lambda *_: ...) == lesson.NOTHING

# %% [markdown]
# ## In one table
#
# Bytes are those of a device, forward, for t tokens of width D in bfloat16, and a capacity factor of 1.
#
# | | all-to-all of slots | gathered tokens |
# |---|---|---|
# | in letters | `x_tD → [E, X, D] ⇄ [e, n X, D]`, times `w_eDM` | `x_tD → x_ND`, sorted, times `w_eDM`, `partial_ND → y_tD` |
# | who holds what | E/n experts, t tokens, E X slots | E/n experts, t tokens, N tokens and N k rows |
# | forward | all-to-all twice | all-gather, reduce-scatter |
# | backward | all-to-all twice; the router's gradient is added | all-gather, reduce-scatter; the same |
# | bytes | 2 * 2 k t D (n - 1)/n | 2 * 2 t D (n - 1): n/k times |
# | drops | what exceeds X | nothing |
# | critical path | yes, unless another microbatch, attention or shared experts run beside it | the same |
# | when | n well above k, and a balanced router | n up to k; on a torus and over two nodes up to n = 16 here |
#
# | wire, for D = 7168, M = 2048, k = 8 | exchange / products |
# |---|---|
# | 64 TPU v5p | 0.6 in fp8 and bfloat16, 0.8 in bfloat16: hidden beside equal work |
# | one node of 8 H100 | 0.5 |
# | two nodes of 8 H100 | 2.4; 0.6 if a token crosses once, as when gathered or by DeepEP |
# | eight nodes of 8 H100 | 4.2; with at most 4 nodes 2.1: wider experts, or more work beside it |
#
# **For a PyTorch reader.** EP is `expert`: a process group whose ranks hold different experts, and usually
# also different tokens (torchtitan takes it out of its data-parallel ranks). Token dispatcher: `on_device`
# without the experts; Megatron-LM has one that gathers and one with all-to-all. DeepEP: the all-to-all,
# dropless, with one crossing to a node. megablocks: grouped products, dropless. Aux loss: the balance loss.
# `expert_bias`: the selection bias.
#
# ## Three lines to keep
#
# 1. Tokens travel to experts and back: two all-to-alls forward, two backward, each of k copies of a token;
#    gathering sends n/k times as much, drops nothing, and is often faster up to some 16 devices.
# 2. Exchange and products both grow with the tokens, so no batch hides one behind the other: what decides is
#    the width of an expert, the wire, and on how many nodes a token's experts lie.
# 3. Loads are those of the whole batch: add them over devices first, then multiply, compare, or take a sign.
#
# **Sources.** GShard, [arXiv:2006.16668](https://arxiv.org/abs/2006.16668), section 2.2 (capacity,
# all-to-all); Switch Transformer, [arXiv:2101.03961](https://arxiv.org/abs/2101.03961), equation 4 (balance
# loss); MegaBlocks, [arXiv:2211.15841](https://arxiv.org/abs/2211.15841); the selection bias,
# [arXiv:2408.15664](https://arxiv.org/abs/2408.15664); DeepSeek-V3,
# [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), 2.1.2 and 3.2; the scaling book on
# [all-to-all](https://jax-ml.github.io/scaling-book/sharding) and on
# [GPUs](https://jax-ml.github.io/scaling-book/gpus).
