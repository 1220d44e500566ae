# %% [markdown]
# # 05 · Tensor and sequence parallelism
#
# **Question.** A matrix product is too big for one chip, or one sequence's step is too slow. How do several
# chips share *one* product, and what must they tell each other?
#
# **Why it hurts not to know.** Cut a weight along the wrong dim, and nothing fails. The shapes fit, JAX's
# checks pass, the loss falls. What has been trained is another network, which exists only on that number of
# devices. It happens twice on this page, and can report a loss *lower* than the correct run's.
#
# *Before this:* 03 (`shard_map`, the collectives), 04 (FSDP). *Mesh:* `tensor=4`, then `fsdp=2,tensor=4`,
# simulated. *Runs in* 60 s on 2 cores.

# %%
import utils

utils.simulate_devices(8)

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import model
import sharding
from chapters import lesson
from config import preset
from plan import costs, hardware, planner
from sharding import TENSOR, P, all_gather, own_slice, psum, reduce_scatter

# %% [markdown]
# ## One product, cut two ways
#
# `y = x @ w`, with N = 64 tokens of width D = 12, and F = 48 columns. Along the mesh axis `TENSOR` lie n = 4
# devices. Each is to keep a quarter of `w` and do a quarter of the work. A matrix can be cut by columns or
# by rows (f = F/n, d = D/n: a small letter is one device's slice).

# %%
n, N, D, F = 4, 64, 12, 48
mesh = sharding.make_mesh(f"tensor={n}")
columns, rows, everywhere = P(None, TENSOR), P(TENSOR, None), P()


def on_devices(function, ins, outs=everywhere, mesh=mesh):
    """Compile a function of one device's slices, cut by the specs `ins`."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs))


def draw(seed, *shape):
    return jax.device_get(jax.random.normal(jax.random.key(seed), shape))


x_ND, w_up_DF, w_down_FD = draw(0, N, D), draw(1, D, F) / D**0.5, draw(2, F, D) / F**0.5
y_NF = x_ND @ w_up_DF  # on one device
error = lambda a, b: f"{abs(jax.device_get(a) - jax.device_get(b)).max():.1e}"

# %%
product = on_devices(lambda x, w: x @ w, (everywhere, columns), columns)
alone = on_devices(lambda x, w: (x @ w)[None], (columns, rows), P(TENSOR))
partial_nNF = alone(x_ND, w_up_DF)  # each device's own result, on top of each other
print("by columns, side by side:  off by", error(product(x_ND, w_up_DF), y_NF))
print("by rows, device 0 alone:   off by", error(partial_nNF[0], y_NF))
print("by rows, all four added:   off by", error(partial_nNF.sum(0), y_NF))

# %% mystnb={"image": {"alt": "Cut by columns, x is whole and y is cut; by rows, x is cut and each device has a y."}}
figure, panels = plt.subplots(2, 3, figsize=(6, 3.9))
lesson.slices(panels[0, 0], mesh, everywhere, "ND", "x")
lesson.slices(panels[0, 1], mesh, columns, "DF", "w by columns")
lesson.slices(panels[0, 2], mesh, columns, "NF", "y")
lesson.slices(panels[1, 0], mesh, columns, "ND", "x")
lesson.slices(panels[1, 1], mesh, rows, "DF", "w by rows")
axes, red = panels[1, 2], lesson.COLOURS[TENSOR]
axes.set(xticks=[], yticks=[], xlabel="F", title="y: four partial sums")
axes.spines[:].set_visible(False)
for i in range(n):  # each of full size
    look = {"facecolor": red, "edgecolor": "black", "alpha": 0.3 + i / 6}
    axes.add_patch(plt.Rectangle((0.12 * i, 0.45 - 0.15 * i), 0.64, 0.55, **look))
    axes.text(0.06 + 0.12 * i, 0.92 - 0.15 * i, i, size=9, ha="center", va="center")
title = "A cut of columns needs no exchange; a cut of rows owes a sum"
figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# By columns, a device sees all D terms of its sums: it has finished columns of `y`, and nothing is
# exchanged. By rows, it sees d of the D terms: its `y` has the full shape and, in every entry, a share only.
# Names that end in shapes say which case it is. In `x_ND @ w_Df` no small letter is summed over. In
# `x_Nd @ w_dF` one is, and whoever sums over a small letter owes a `psum`.
#
# ## Pay before the nonlinearity
#
# A feed-forward is two products with a GELU between them. FSDP (chapter 04) keeps the first matrix in slices
# of rows, and gathers it for every use. Why gather? Let each device multiply by the rows it has, go on, and
# add at the end:


# %%
def added_at_the_end(w_up_dF, w_down_FD, x_Nd):
    return psum(jax.nn.gelu(x_Nd @ w_up_dF) @ w_down_FD, TENSOR)


def dense(w_up_DF, w_down_FD, x_ND):
    return jax.nn.gelu(x_ND @ w_up_DF) @ w_down_FD


for size in (1, 4):
    here = sharding.make_mesh(f"tensor={size}")
    network = on_devices(added_at_the_end, (rows, everywhere, columns), mesh=here)
    off = error(network(w_up_DF, w_down_FD, x_ND), dense(w_up_DF, w_down_FD, x_ND))
    print(f"tensor={size}: off by {off}")

# %% [markdown]
# A test on one device passes. So does JAX's check of varying values: the result *is* the same on all
# devices, as the `psum` has made it. At tensor=4 it is the wrong result. The GELU of a sum is not the sum of
# the GELUs, so a debt must be paid before the first thing that is not linear.
#
# Would one notice in training? Two tasks: predict cos(3x) of each coordinate of x, and the same of a mix of
# all coordinates. `columns_then_rows` is the correct network, of which more below. All start from the same
# weights.


# %%
def columns_then_rows(w_up_Df, w_down_fD, x_ND):
    return psum(jax.nn.gelu(x_ND @ w_up_Df) @ w_down_fD, TENSOR)


def train(network, w, x, y, other=None, steps=300, rate=0.01):
    """Adam. Returns weights, losses, and the losses of the same weights in `other`."""
    mean = lambda network, w: jnp.mean((network(w, x) - y) ** 2)

    def step(state, _):
        w, m, v = state
        loss, g = jax.value_and_grad(lambda w: mean(network, w))(w)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
        down = lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8)
        return (jax.tree.map(down, w, m, v), m, v), (loss, mean(other or network, w))

    zeros = jax.tree.map(jnp.zeros_like, w)
    run = jax.jit(lambda w: jax.lax.scan(step, (w, zeros, zeros), length=steps))
    (w, _, _), (losses, elsewhere) = run(w)
    return w, losses, elsewhere


# %%
x, start, turn = draw(3, 512, D), (w_up_DF, w_down_FD), draw(4, D, D) / D**0.5
right = on_devices(columns_then_rows, (columns, rows, everywhere))
wrong = on_devices(added_at_the_end, (rows, everywhere, columns))
on_right, on_wrong, on_one = (lambda w, x, f=f: f(*w, x) for f in (right, wrong, dense))
tasks, curves = {"each coordinate": x, "a mix of all": x @ turn}, {}
for task, seen in tasks.items():
    y = jnp.cos(3 * seen)
    _, correct, _ = train(on_right, start, x, y)
    _, broken, moved = train(on_wrong, start, x, y, on_one)
    curves[task] = correct, broken, moved
    ends = {"correct": correct, "added at the end": broken, "on one device": moved}
    print(f"{task}:", {name: f"{loss[-1]:.2f}" for name, loss in ends.items()})
print(f"predicting 0: {jnp.mean(y**2):.2f}")

# %% mystnb={"image": {"alt": "On both tasks all losses fall, on the first the wrong network's further than the correct one's; on one device its weights get ever worse."}}
figure, panels = plt.subplots(1, 2, figsize=(6, 3.4), sharey=True)
for axes, (task, (correct, broken, moved)) in zip(panels, curves.items(), strict=True):
    axes.plot(correct, color=lesson.NEUTRAL, label="correct, tensor=4")
    axes.plot(broken, color=red, label="added at the end, tensor=4")
    axes.plot(moved, "--", color=red, label="the same weights on one device")
    axes.set(xlabel="step", ylim=(0, 1.5), title=f"cos(3x) of {task}")
    assert broken[-1] < broken[0] / 2 and moved[-1] > 1.5 * broken[-1]
panels[0].set_ylabel("mean squared error")
figure.suptitle("Both learn; the wrong network may even lead", x=0.02, ha="left")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left")
assert curves["each coordinate"][1][-1] < curves["each coordinate"][0][-1]

# %% [markdown]
# The wrong network has four times as many hidden units: 48 on each device, and each set sees 3 of the 12
# coordinates. That suits the first task, and it leads; on the second it lags, and falls all the same.
# On one device its weights are worse than predicting 0. One comparison with one device, before training, would
# have found it.
#
# ## Which order?
#
# Each of the two matrices can be cut by columns or by rows: four orders, all correct if every debt is paid
# where it falls due. Columns, then rows: the first product leaves finished columns, GELU works on them, and
# they are the very columns that this device's rows of the second matrix want. One `psum` of [N, D] at the
# end. Rows, then columns: a `psum` of [N, F] before the GELU, and at the end an all-gather that joins slices
# of [N, D].
#
# > **Predict.** F = 4D. How many times as many bytes does a device send in rows-then-columns as in
# > columns-then-rows?

# %%
gelu, add = jax.nn.gelu, lambda y: psum(y, TENSOR)
mine = lambda x: own_slice(x, TENSOR, dim=1)
join = lambda y: all_gather(y, TENSOR, dim=1, to="invarying")
ORDERS = {
    "columns, rows": (columns, rows, columns_then_rows),
    "columns, columns": (columns, columns, lambda u, d, x: join(join(gelu(x @ u)) @ d)),
    "rows, columns": (rows, columns, lambda u, d, x: join(gelu(add(mine(x) @ u)) @ d)),
    "rows, rows": (rows, rows, lambda u, d, x: add(mine(gelu(add(mine(x) @ u))) @ d)),
}

# %%
my_prediction = None  # times
sends = {}
for name, (cut_up, cut_down, function) in ORDERS.items():
    network = on_devices(function, (cut_up, cut_down, everywhere))
    assert lesson.same(network(*start, x_ND), dense(*start, x_ND))
    found = lesson.compiled(network, mesh, *start, x_ND)
    sends[name] = found.total.wire_bytes
    kinds = (f"{one.kind} of {one.payload_bytes:,}" for one in found.collectives)
    print(f"{name:17} {' + '.join(kinds)} bytes: sends {sends[name]:,}")
counted = sends["rows, columns"] / sends["columns, rows"]
lesson.predicted("rows, columns over columns, rows", my_prediction, counted, "times")
assert counted == 4.5

# %% [markdown]
# Kind and payload are the compiler's; the bytes sent are the ring's arithmetic of chapter 03. An all-reduce
# counts twice, so 2F + D against 2D, which is 9 to 2. And in the cheap order each device applies GELU to its
# own quarter of the hidden units; where rows come first, every device applies it to all of them. This pair is
# the core of Megatron-LM's tensor parallelism.
#
# ## Heads are columns
#
# Attention is such a pair, too. Its columns are those of queries, keys and values, its rows those of the
# output matrix. What stands between is not linear, and stays within a head. So each device takes whole heads.
# The project declares for each parameter which mesh axis cuts which dim (H heads, G key and value heads, K
# their width). Here for one layer of a tiny model:

# %%
import sockets

settings = {"attention": "gqa", "n_kv_heads": 4, "activation": "gelu", "d_ff": 96}
settings |= {"no_rope_every": 0}  # rotary in every layer
settings = {f"model.{name}": value for name, value in settings.items()}
c = preset("tiny", **settings, **{"work.remat": "full"}).at_work
declared = sockets.unstacked(model.declare(c).prefix)  # one dense layer
for name, d in sharding.named(declared).items():
    cut_dims = [dim for dim, axes in zip(d.dims, d.spec, strict=True) if axes == TENSOR]
    print(f"{name:24} {d.shape!s:12} tensor cuts {''.join(cut_dims) or 'nothing'}")

# %% [markdown]
# First matrices by columns, last ones by rows. Were K cut instead of H, each score would be a partial sum in
# front of a softmax: the unpaid debt again. The limit is G: 8 key and value heads go round 8 devices. Past
# that a library refuses, as this one does, or
# [copies them](https://docs.vllm.ai/en/v0.9.2/api/vllm/model_executor/models/gemma.html).
#
# ## Slices between blocks
#
# After the `psum` every device holds the same residual stream, [b, s, D]: b sequences, and s positions, here
# all T of them. All n norm it, add to it, and keep it for the backward pass. But an all-reduce is a
# reduce-scatter and then an all-gather. **Sequence parallelism** stops between the two: a device keeps t = T/n
# of the positions, does norm, dropout and residual sum on those, and gathers when the next block's first
# product wants them.

# %%
norm = lambda x: model.rms_norm(x, jnp.ones(x.shape[-1]), c.norm_eps)


def whole_stream(w, x_bsD):
    partial_bsD = jax.nn.gelu(norm(x_bsD) @ w["up_Df"]) @ w["down_fD"]
    return x_bsD + psum(partial_bsD, TENSOR)


def sliced_stream(w, x_btD):
    h_bsD = all_gather(norm(x_btD), TENSOR, dim=1)
    partial_bsD = jax.nn.gelu(h_bsD @ w["up_Df"]) @ w["down_fD"]
    return x_btD + reduce_scatter(partial_bsD, TENSOR, dim=1)


def gradients(layer, again):
    """Of a stack of layers; `again`: keep each layer's input only, and recompute it."""
    layer = jax.checkpoint(layer) if again else layer
    through = lambda w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]
    return jax.grad(lambda w, x: jnp.sum(through(w, x) ** 2), argnums=(0, 1))


# %% [markdown]
# Take 16 such layers, forward and backward. What travels, and how much memory is needed beside weights and
# input? The compiler says both. "Recomputed" is the project's `remat="full"`: a layer keeps its input, and is
# computed again in the backward pass.


# %%
def compiled_stack(layer, size, again, L=16, shape=(2, 256, 64)):
    """Its collectives, and its temporary memory in MiB. Nothing is run."""
    here, width = sharding.make_mesh(f"tensor={size}"), shape[-1]
    stream = P(None, TENSOR) if layer is sliced_stream else everywhere
    specs = {"up_Df": P(None, None, TENSOR), "down_fD": P(None, TENSOR)}, stream
    w = {"up_Df": jnp.zeros((L, width, 128)), "down_fD": jnp.zeros((L, 128, width))}
    step = on_devices(gradients(layer, again), specs, specs, here)
    program = step.lower(w, jnp.zeros(shape)).compile()
    memory = program.memory_analysis().temp_size_in_bytes / 2**20
    return lesson.ledger.read(program.as_text(), here), memory


cases, stacks = [(4, False), (2, True), (4, True), (8, True)], {}
for layer in (whole_stream, sliced_stream):
    for size, again in cases:
        found, memory = stacks[layer, size, again] = compiled_stack(layer, size, again)
        if size == 4:
            kinds = (f"{one.count:g} {kind}" for kind, one in found.by("kind").items())
            print(layer.__name__, "recomputed" if again else "all kept", end=": ")
            print(f"{memory:.2f} MiB, {found.total.wire_bytes:,} bytes sent in", *kinds)

# %% tags=["remove-cell"]
sent = {case: found.total.wire_bytes for case, (found, _) in stacks.items()}
for again, times in ((False, 1), (True, 5 / 4)):
    assert sent[sliced_stream, 4, again] == times * sent[whole_stream, 4, again]
    assert stacks[sliced_stream, 4, again][1] < stacks[whole_stream, 4, again][1]

# %% [markdown]
# Everything kept: the same bytes, and less memory. Each whole layer has one all-reduce forward, which its
# `psum` shows, and one backward, which no line shows: a device's columns give it a share of the gradient of
# `x`, and JAX adds the shares up (the way back of chapter 03's `sharding.vary`). In slices each becomes a
# gather and a scatter.
#
# Recomputed, a whole stream is at hand, and a slice must be gathered once more: 5 half all-reduces against 4.
# ([The paper](https://arxiv.org/abs/2205.05198) has this fifth one also where it recomputes nothing, as it
# keeps only slices of what it has gathered.) What is bought with it:

# %% mystnb={"image": {"alt": "With more devices, memory with whole streams levels off; with slices it falls."}}
figure, axes = plt.subplots(figsize=(6, 3))
lines = {whole_stream: ("whole stream", "--"), sliced_stream: ("slices", "-")}
for layer, (label, line) in lines.items():
    memory = [stacks[layer, size, True][1] for size in (2, 4, 8)]
    axes.plot((2, 4, 8), memory, line, marker="o", color=red, label=label)
    for size, value in zip((2, 4, 8), memory, strict=True):
        axes.annotate(f"{value:.2f}", (size, value), (0, 6), textcoords="offset points")
floor = 16 * 2 * 256 * 64 * 4 / 2**20  # 16 layers keep their float32 input [2, 256, 64]
axes.axhline(floor, color=lesson.NEUTRAL, lw=1)
axes.text(8, floor + 0.05, "16 whole streams", color=lesson.NEUTRAL, ha="right")
axes.set(xticks=(2, 4, 8), xlabel="devices along tensor", ylim=(0, 4))
axes.set_ylabel("temporary memory, MiB")
axes.set_title("Whole streams set a floor; slices go below it")
axes.legend(ncols=2)

# %% [markdown]
# ## The real thing
#
# The model has no other form: x_btD between blocks, a gather in front, a reduce-scatter behind. They stand in
# `gather_apply_scatter`, which has a second way to do it; more of that below.

# %%
from overlap import positions, remat, weights

lesson.source(model.feed_forward_branch, model.hidden)
lesson.source(positions.gather_apply_scatter)

# %% [markdown]
# On simulated devices `tensor_exchange` is `gather`, so both functions are called once, for all positions (p
# are those of a part). Inside of a device a parameter keeps its declared name: `w_up_DF` is [D, f] there, as
# `up_bsf` says. So the product with `w_down_FD` sums over f, and owes; the reduce-scatter pays. With
# `sockets.on_mesh` (chapter 03) the letters cut whole arrays, and `model.layer` runs:

# %%
B, T = 4, 24
x_BTD, places_BT = draw(5, B, T, c.d_model), jnp.tile(jnp.arange(T), (B, 1))
w = jax.device_get(sharding.init(declared, sharding.make_mesh("tensor=1"), seed=0))


def forward(w, x_btD, places_bs, c=c):
    one_document = jnp.ones_like(places_bs)
    tokens = model.Tokens(places_bs, one_document, None, None)
    w = weights.at_use(w, c)  # slices of FSDP neighbours, joined
    return model.layer(w, c, x_btD, tokens, number=0, key=None)[0]


results = {}
for name in ("tensor=1", "tensor=4", "fsdp=2,tensor=4"):
    here = sharding.make_mesh(name)
    layer = sockets.on_mesh(forward, here, declared, "btD", "bs", out="btD")
    results[name] = layer(w, x_BTD, places_BT)
    print(f"{name:16} off by {error(results[name], results['tensor=1'])}")
    assert lesson.same(results[name], results["tensor=1"])
layer = sockets.on_mesh(forward, mesh, declared, "btD", "bs", out="btD")
lesson.listed(lesson.compiled(layer, mesh, w, x_BTD, places_BT))

# %% [markdown]
# Four exchanges a layer, none within the attention. Each has the same payload, the joined stream of B T D
# float32 numbers, and a device sends (n - 1)/n of it.
#
# Now the backward pass. A gather's backward is a reduce-scatter, and the other way round.
#
# > **Predict.** How many all-gathers and reduce-scatters over `TENSOR` does one layer's training step
# > contain, if the layer (attention and feed-forward together) is recomputed?

# %%
my_prediction = None  # collectives


def training_step(c, declared):
    """Compile the gradients of one recomputed layer."""

    def step(w, x_btD, places_bs):
        own = lambda w: sharding.vary(w, TENSOR)  # so that JAX adds gradients [D]
        layer = lambda w, x_btD: forward(own(w), x_btD, places_bs, c)
        layer = remat.remat(c, layer)
        loss = lambda w, x_btD: jnp.sum(layer(w, x_btD) ** 2)
        return jax.grad(loss, argnums=(0, 1))(w, x_btD)

    lie = sharding.specs(declared), P(None, TENSOR)
    return on_devices(step, (*lie, everywhere), lie)


found = lesson.compiled(training_step(c, declared), mesh, w, x_BTD, places_BT)
for place in ("grouped_attention", "feed_forward_branch", "step.<lambda>"):
    kinds = [one.kind for one in found.collectives if one.source.endswith(place)]
    print(f"{place:20}", {kind: kinds.count(kind) for kind in sorted({*kinds})})
count = sum(one.count for one in found.collectives if one.kind != "all-reduce")
lesson.predicted("gathers and scatters", my_prediction, count)
assert count == 11

# %% [markdown]
# Five a block, as in the stack above, would be 10. The eleventh is the attention's reduce-scatter: the
# feed-forward is recomputed too, and wants its result. The feed-forward's own result nothing in the backward
# pass wants, so neither its last product nor that reduce-scatter is repeated.
#
# The all-reduce is new in slices: each device norms other positions, so its gradients of the two norms' gains
# are shares. JAX adds them, as it knows what varies; Megatron-LM
# [does it in its optimizer](https://github.com/NVIDIA/Megatron-LM/pull/236).
#
# ## Products while the wires work
#
# A gather is done when its last byte is there, and the product behind it waits for that. Yet the product of
# our own positions needs nobody. So let positions come *in turn*, one device's after the other's, each by a
# permute (everyone sends to one other). While one part is on its way, the part before can be multiplied. The
# scatter behind is the same the other way round: a sum sets out from the farthest device, and each on its way
# adds what it has made.

# %%
lesson.source(sharding.around, sharding.back)


def in_turn(w, x_btD):
    parts = sharding.around(norm(x_btD), TENSOR)  # ours, then those of others
    partials = [jax.nn.gelu(h_btD @ w["up_Df"]) @ w["down_fD"] for h_btD in parts]
    return x_btD + sharding.back(partials, TENSOR)


# %% [markdown]
# `around` is an all-gather that nobody joins: entry k is what the device k places on holds. They come from
# both sides, half from each, as a link carries both ways at once; so do the two sums of `back`. (`in_branch`
# is for simulated devices with stages, 06.)
#
# > **Predict.** On 8 devices `sliced_stream` has one gather and one scatter, forward. How many permutes has
# > `in_turn`? And do more bytes travel?

# %%
my_prediction = None  # permutes
drawn = {"up_Df": draw(17, 64, 128) / 8, "down_fD": draw(18, 128, 64) / 128**0.5}
cuts, stream = {"up_Df": columns, "down_fD": rows}, P(None, TENSOR)
both = {}
for function in (sliced_stream, in_turn):
    here = sharding.make_mesh("tensor=8")
    run = on_devices(function, (cuts, stream), stream, here)
    found = lesson.compiled(run, here, drawn, draw(19, 2, 32, 64))
    both[function] = run(drawn, draw(19, 2, 32, 64)), found
    kinds = (f"{one.count:g} {kind}" for kind, one in found.by("kind").items())
    print(f"{function.__name__}: {found.total.wire_bytes:,} bytes sent in", *kinds)
assert lesson.same(both[sliced_stream][0], both[in_turn][0])
at_once, found = both[sliced_stream][1], both[in_turn][1]
lesson.predicted("permutes", my_prediction, found.total.count)
assert found.total.count == 14 and found.flops == at_once.flops
assert found.total.wire_bytes == at_once.total.wire_bytes

# %% [markdown]
# 2 (n - 1) messages, each of 1/n of the stream: the bytes and the FLOPs of before. What it costs is n small
# products in place of a large one, and n - 1 times as many messages.
#
# Nothing in `in_turn` says *when* our own product runs. A compiler may as well run it behind those of the parts
# that arrive, and then it computes nothing while the first is on its way. So in the model's feed-forward a part
# comes to its product only together with what was made of the part before, and ours is made first. Backward the
# order is the reverse: the gradient of the farthest part is made first, as it has to travel. (A barrier returns
# what it is given, and nothing of it before all of it is there; `jax.custom_vjp`: its way back is written by
# hand, a barrier too.)

# %%
lesson.source(positions.nearest_first, positions.not_before)

# %% [markdown]
# In the model all of this is one setting, `work.tensor_exchange`, and the layer above gives the same numbers:

# %%
from dataclasses import replace


def streams(c, declared, w, places_BT):
    """What travels in a training step of a layer, in joined streams [B, T, D]."""
    x_BTD = jax.ShapeDtypeStruct((*places_BT.shape, c.d_model), jnp.float32)
    found = lesson.compiled(training_step(c, declared), mesh, w, x_BTD, places_BT)
    moves = [one for one in found.collectives if one.kind != "all-reduce"]
    sent = sum(one.count * one.wire_bytes for one in moves)
    of_one = (n - 1) / n * x_BTD.size * x_BTD.dtype.itemsize
    return sum(one.count for one in moves), sent / of_one


working = lambda c, **how: replace(c, work=replace(c.work, **how))
ring = working(c, tensor_exchange="ring")
turns = lambda w, x_btD, places_bs: forward(w, x_btD, places_bs, ring)
layer = sockets.on_mesh(turns, mesh, declared, "btD", "bs", out="btD")
assert lesson.same(layer(w, x_BTD, places_BT), results["tensor=1"])
for one in (c, ring):
    count, sent = streams(one, declared, w, places_BT)
    name = one.work.tensor_exchange
    print(f"{name:6} {count:g} exchanges send {sent:g} joined streams")
    assert (count, sent) == ({"gather": 11, "ring": 33}[name], 11)

# %% [markdown]
# Is it faster? That depends on what a compiler puts between the start of a permute and its end. Simulated
# devices share a processor and hide nothing. But a program for TPUs is a schedule, and the TPU's compiler
# runs without a TPU (`make extra-tpu`). This page does not call it; you can:
#
# ```
# python -m bench.overlap dense_124m --topology v4:4x2x2 --mesh fsdp=4,tensor=4 \
#     --data.batch_size 64 --work.tensor_exchange ring
# ```
#
# Of 2.57 GB over `tensor` a device waits for 0.23, and if you put `gather` there, for 1.66: exposed are those
# bytes beside which the schedule has no product. (libtpu 0.0.42.1. Bytes, not seconds: a product may
# be too short for what travels beside it.) That is why, left to itself, the project takes `ring` on such chips
# wherever the plan says that it is faster.
#
# ## Send what is narrow
#
# Attention need not gather the stream at all, if something narrower will do. Latent attention (02) makes
# everything out of latents. A device makes those of its own positions, before the exchange: Q numbers for
# queries, C for keys and values, R of the turned key. `moe1b`, the project's headline model, has 128 of each,
# and D = 768. One of its dense layers, compiled and not run:

# %%
moe1b = preset("moe1b").at_work
moe1b = replace(moe1b, precision=c.precision)  # float32, as here
latent = sockets.unstacked(sockets.unstacked(model.declare(moe1b).blocks.dense))
wanted = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), latent)
for name in ("full", "branches"):
    count, sent = streams(working(moe1b, remat=name), latent, wanted, places_BT)
    print(f"{name:8} {count:g} exchanges send {sent:g} joined streams")
    wanted_of = {"full": (11, 8 + 3 / 2), "branches": (10, 7 + 3 / 2)}
    assert (count, sent) == wanted_of[name]

# %% [markdown]
# Side by side the latents are one array of 384 numbers a position: the attention's gather, the same once more,
# and its way back cost 1/2 each. (Where latents are not narrower than the stream, the stream travels:
# `model.sends_latents`.) With `remat="branches"` a layer also keeps what comes into its feed-forward, and the
# attention's reduce-scatter, which was repeated for nothing else, is made once.
#
# ## The vocabulary is a dim, too
#
# The embedding table is cut along V. Each device looks up the words it has, puts zeros for the others, and
# the reduce-scatter adds. Behind the last layer `model.leave` gathers the positions once more. The unembedding
# is cut by columns, which leaves a device with v = V/n logits for every token. The loss needs the logarithm
# of a sum over all V. Gather them first?

# %%
lesson.source(model.embed, model.local_vocabulary, model.loss_sums)

# %% [markdown]
# (In `loss_sums` n counts tokens, the same on all devices.) Over slices of a device's words the sum of
# exponentials is put together from its parts (02), and over devices once more. The project exchanges three
# numbers a token: the largest part (without a gradient: it cancels), the sum, and the target's logit, to which
# all devices but one add 0.
#
# > **Predict.** In `moe1b`, the project's headline model, V = 100,352 and D = 768. Take 1,024 tokens. At
# > tensor=4, with float32 logits: how many times as many bytes would a device send, forward, if it gathered
# > logits?

# %%
my_prediction = None  # times


def with_gathered_logits(w_Dv, x_ND, targets_N, weights_N):
    logits_Nv = (x_ND @ w_Dv).astype(jnp.float32)
    logits_NV = all_gather(logits_Nv, TENSOR, dim=1, to="invarying")
    target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    return jnp.sum(weights_N * (jax.nn.logsumexp(logits_NV, axis=1) - target_N))


of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
shapes = of(jnp.bfloat16, 768, 100_352), of(jnp.bfloat16, 1024, 768)
shapes = *shapes, of(jnp.int32, 1024), of(jnp.float32, 1024)
joined = working(c, gather="step")  # no axis but tensor cuts the table here
in_slices = lambda *arrays: model.loss_sums(joined, *arrays)[0]
sent = []
for function in (with_gathered_logits, in_slices):
    program = sockets.on_mesh(function, mesh, "Dv", "ND", "N", "N", out="")
    found = lesson.compiled(program, mesh, *shapes)  # compiled for these sizes, not run
    lesson.listed(found)
    sent.append(found.total.wire_bytes)
times = round(sent[0] / sent[1])
lesson.predicted("gathered logits over three numbers", my_prediction, times, "times")
assert times == 16_725

# %% [markdown]
# V numbers a token that count once, against 3 that count twice: V/6. (It is 308 MB for each 1,024 tokens, and
# the gathered logits would take 411 MB of memory on every device.) From token to loss, on our meshes:

# %%
ends = model.declare(c).replace(prefix=None, blocks=None)  # both tables, last norm
tables = jax.device_get(sharding.init(ends, sharding.make_mesh("tensor=1"), seed=0))
tokens_BT = jax.random.randint(jax.random.key(6), (B, T), 0, c.vocab_size)


def nats(w, tokens_bs, targets_bs):
    x_btD = model.embed(weights.at_use(w, c, "embedding_VD")[0], tokens_bs)
    x_nD = model.leave(w, c, x_btD, dim=1).reshape(-1, c.d_model)
    table_Dv = model.unembedding(w, c, weights.cast)  # FSDP's slices: joined one by one
    weights_n = jnp.ones(len(x_nD))
    total, _ = model.loss_sums(c, table_Dv, x_nD, targets_bs.ravel(), weights_n)
    return psum(total, (*sharding.BATCH, sharding.CONTEXT)) / (B * T)


losses = []
for name in ("tensor=1", "tensor=4", "fsdp=2,tensor=4"):
    loss = sockets.on_mesh(nats, sharding.make_mesh(name), ends, "bs", "bs", out="")
    losses.append(float(loss(tables, tokens_BT, jnp.roll(tokens_BT, -1, axis=1))))
    print(f"{name:16} {losses[-1]:.5f} nats a token")
assert lesson.same(losses, [losses[0]] * 3)

# %% [markdown]
# ## Why it wants the fastest link
#
# FSDP moves weights; `tensor` moves activations. Take one layer in a training step with recomputation; a group
# of n chips works on N tokens. Its products cost up to 8 FLOPs a parameter and token (2 forward, 2 again, 4
# backward), shared by n chips of C FLOP/s. Its 11 exchanges send (n - 1)/n of N D entries of 2 bytes each, at
# W bytes/s (8.5 in `moe1b`, see above):
#
# - products: 8 N · parameters / (n C) seconds
# - wires: 11 (n - 1)/n · 2 N D / W seconds
#
# They are equal at **n = 1 + (8/11) (parameters / 2D) (W / C)**. N has cancelled: no batch and no sequence
# length changes their ratio. A wider model does (12 D² parameters, if F = 4D, make it grow with D), or a
# faster link. FSDP is the opposite: it sends its weights once, for however many tokens.


# %%
V4 = hardware.CHIPS["v4"]


def parameters_of_a_layer(c):
    """Those that one token passes through, on average over the layers."""
    tables = c.vocab_size * c.d_model * (1 if c.tie_embeddings else 2)
    return (costs.parameters(c)[1] - tables) / c.n_layers


EXCHANGES = {"gqa": 11, "mla": 8.5}


def break_even(c, W, C=V4.peak_flops_per_s):
    share = parameters_of_a_layer(c) / (2 * c.d_model)
    return 1 + 8 / EXCHANGES[c.attention] * share * W / C


speeds = [links * V4.link_bytes_per_s for links in (1, 2, 3)] + [V4.dcn_bytes_per_s]
print("GB/s:", *(f"{speed / 1e9:6.2f}" for speed in speeds))
for name in ("llama3_8b", "moe1b"):
    chips = (f"{break_even(preset(name).model, W):6.1f}" for W in speeds)
    print(f"{name:9} D={preset(name).model.d_model}: break-even at", *chips, "chips")

# %% [markdown]
# 45 GB/s is one link of TPU v4. In a cube of 4x4x4, four chips in a row close a ring: two links. Eight, two
# such rows, have three. (A slice of 4x4x2 has no rings.) The last column is the network between pods, where
# even the wide model is past its break-even at 2. On GPUs the edge is the node: the
# [Ultra-Scale Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook) measured 10,889 tokens/s a
# GPU at tensor=8, inside of a node, and 6,159 at 16, over two.
#
# The planner adds what the rule leaves out, such as logits, attention scores and padding of experts, and it
# knows on which links JAX lays the axis. Do they agree?


# %%
def ruled(c, n, tokens, W):
    """Seconds of wires and of products by the rule, over all layers."""
    wires = EXCHANGES[c.attention] * (n - 1) / n * 2 * tokens * c.d_model / W
    products = 8 * tokens * parameters_of_a_layer(c) / (n * V4.peak_flops_per_s)
    return c.n_layers * wires, c.n_layers * products


runs = {"llama3_8b": ("v4:4x4x4", (2, 4, 8)), "moe1b": ("v4:4x4x2", (2, 4))}
ratios, batch = {}, {"data.batch_size": 256, "data.seq_len": 1024}
batch |= {"work.remat": "full", "work.tensor_exchange": "gather"}
for name, (chips, sizes) in runs.items():
    topology = hardware.Topology.parse(chips)
    for size in sizes:
        groups = topology.chips // size
        cfg = preset(name, mesh=f"fsdp={groups},tensor={size}", **batch)
        plan = planner.plan(cfg, topology).seconds(alone=True)  # nothing hidden
        W = hardware.layout(cfg.mesh, topology)["tensor"].bytes_per_s
        rule = ruled(cfg.model, size, 256 * 1024 / groups, W)
        ratios[name, size] = plan["tensor"] / plan["compute"], rule[0] / rule[1]
        print(f"{name:9} tensor={size}, {W / 1e9:3.0f} GB/s:", end="")
        print(f" wires {plan['tensor']:.2f} s (rule {rule[0]:.2f}),", end="")
        print(f" products {plan['compute']:.2f} s (rule {rule[1]:.2f})")

# %% mystnb={"image": {"alt": "Wires over products against devices: llama3_8b stays below 1, moe1b is near 1 at 2 and far above at 4."}}
figure, axes = plt.subplots(figsize=(6, 3))
for (name, (chips, sizes)), line in zip(runs.items(), ("-", ":"), strict=True):
    planned, rule = zip(*(ratios[name, size] for size in sizes), strict=True)
    axes.plot(sizes, planned, line, marker="o", color=red, label=f"{name} on {chips}")
    label = "rule" if line == ":" else None
    axes.plot(sizes, rule, "x", color=lesson.NEUTRAL, label=label)
axes.axhline(1, color=lesson.NEUTRAL, lw=1)
axes.set(xticks=(2, 4, 8), xlabel="devices along tensor")
axes.set_ylabel("seconds, wires / products")
axes.set_title("A narrow model is at its break-even with tensor=2")
axes.legend()

# %% [markdown]
# The wires agree. The products do for the wide model; the narrow one has more than the rule counts, so its
# true break-even lies a little higher, at about 2. The wide one can have tensor=8. Now three batches of it, at
# tensor=4 and without: seconds one after the other, and with wires beside products, in turn, as far as the
# TPU's compiler puts them there. (The planner has rules of that, `plan/hiding.py`.)

# %%
SAME = {"work.remat": "full", "work.gather": "layer", "work.tensor_exchange": "ring"}
for batch in (32, 64, 256):
    for name in ("fsdp=64", "fsdp=16,tensor=4"):
        sizing = {"data.batch_size": batch, "data.seq_len": 4096, **SAME}
        print(f"B={batch:3} {name:17}", end="")
        try:
            one = planner.plan(preset("llama3_8b", mesh=name, **sizing), "v4:4x4x4")
        except utils.UserError as refused:
            print(str(refused).split(" (")[0])
            continue
        alone = one.seconds(alone=True)
        total = sum(alone.values())
        fsdp, tensor = (alone.get(a, 0) / total for a in ("fsdp", "tensor"))
        print(f"{total:.2f} s (fsdp {fsdp:.0%}, tensor {tensor:.0%}),", end="")
        print(f" beside products {one.step_s:.2f} s")

# %% [markdown]
# One after the other, the share of `fsdp` falls to a third from B = 64 to 256, and that of `tensor` stays;
# while there is a sequence for every chip, FSDP alone is faster. Beside products, tensor=4 is 8% faster at
# B = 64, and level at 256. And the first line is where `tensor` earns its keep: 64 chips and 32 sequences.
# `fsdp` has nothing left to split, and `tensor` splits a sequence's own products. That also makes the step
# of *one* sequence shorter, and helps where a layer's gathered weights do not fit a chip: at tensor=4 it
# gathers a quarter of them.
#
# Is `tensor` worth it in the headline model, on one link? One after the other, beside products, and as its
# compiled step would take if played against time:

# %%
layouts = "stage=2,fsdp=8,tensor=2", "stage=2,fsdp=16", "fsdp=16,tensor=2", "fsdp=32"
for name in layouts:
    one = planner.plan(preset("moe1b", mesh=name, **SAME), "v4:4x4x2")
    alone = one.seconds(alone=True)
    print(f"{name:24} alone {sum(alone.values()):.3f} s,", end="")
    print(f" tensor {alone.get('tensor', 0) / sum(alone.values()):.0%} of it;", end="")
    print(f" beside {one.step_s:.3f} s; expected {one.likely_s:.3f} s")

# %% [markdown]
# Beside products the third line is the fastest. But half of a product of width 768 takes more than half of its
# time, and a permute hides only as long as the product beside it. `moe1b` lies on the last line.
#
# **What is not shown here.** Simulated devices have no wires. No second above was measured: they are peak
# FLOP/s, full link speed, and what a compiler's schedule says. A ring hides wires behind products, and so at
# most as many seconds as the products take: past the break-even, wires show in any order. And it is harder
# here than for FSDP, which can fetch the next layer's weights early: an activation is wanted as soon as it
# exists. (The [uvadlc
# notebooks](https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/tensor_parallel_async.html)
# build such rings step by step.) Latency, about 1 µs a hop, counts when messages are small, and a ring's are;
# products of narrow slices reach less of the peak.
#
# ## Exercise 1: where does the bias go?
#
# A feed-forward with a bias at its end, `bias_D`, the same on all devices. Each device has its partial sum,
# [B, T, D]. Return its slice of the result, [B, t, D]. (The first two cells are the checker.)

# %%
bias_D, stream_BTD, layer_w = draw(7, c.d_model), x_BTD, w.feed_forward
slice_of = lambda i, n, size: slice(i * size // n, (i + 1) * size // n)


def partial_sums(n):
    """What each of n devices has before the exchange. Shape: [n, B, T, D]."""
    up_DF, down_FD = layer_w.w_up_DF, layer_w.w_down_FD
    slices = [slice_of(i, n, c.d_ff) for i in range(n)]
    return jnp.stack([dense(up_DF[:, f], down_FD[f], stream_BTD) for f in slices])


def run_settle(settle, n):
    """What each of n devices returns. Shape: [n, B, T/n, D]."""
    branch = lambda partials, bias_D: lesson.answered(settle)(partials[0], bias_D)[None]
    here, own = sharding.make_mesh(f"tensor={n}"), P(TENSOR)
    return on_devices(branch, (own, everywhere), own, here)(partial_sums(n), bias_D)


# %%
def check_settle(settle):
    ways = lambda n: [slice_of(i, n, stream_BTD.shape[1]) for i in range(n)]
    cut = lambda y, n: jnp.stack([y[:, t] for t in ways(n)])  # what is asked for
    own = lambda y_nBTD, n: jnp.stack([y_nBTD[i, :, t] for i, t in enumerate(ways(n))])
    y_BTD, b = partial_sums(1)[0], bias_D
    grows = "The sum is right, and an offset grows with the axis. Who adds, and when?"
    whole = "All positions are right, on every device. Only its own are asked for."
    first = "Device 0's positions have their bias. And those of the others?"
    mistakes = [
        (lambda n: cut(y_BTD + n * b, n), grows),
        (lambda n: cut(y_BTD, n), "The bias is missing."),
        (lambda n: cut(y_BTD / n + b, n), "A mean of partial sums is only a share."),
        (lambda n: jnp.stack([y_BTD + b] * n), whole),
        (lambda n: partial_sums(n) + b, "Every device has kept its share of the sum."),
        (lambda n: own(partial_sums(n), n) + b, "The right shape, of a share only."),
        (lambda n: cut(y_BTD, n).at[0].add(b), first),
    ]
    done = "Right on 2 and 4 devices. And the gradient of the bias: who adds that up?"
    right, run = lambda n: cut(y_BTD + b, n), lambda n: run_settle(settle, n)
    return lesson.diagnose(run, [(2,), (4,)], right, mistakes, done)


# %%
def settle(partial_BTD, bias_D):
    return ...


print(check_settle(settle))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return reduce_scatter(partial_BTD, TENSOR, dim=1) + bias_D`: once, after the sum. Each device's positions
# give the bias a share of its gradient, and JAX adds those.
#
# The n-fold bias was found in [slapo](https://github.com/awslabs/slapo/issues/10) and elsewhere; a bias that
# starts at zero hides it. [Its mend](https://github.com/awslabs/slapo/pull/23) added the bias once, and on
# slices its gradient was 1/n of the right one: nobody had added the shares. To add bias/n in front of the sum
# comes to the same as the solution. In torchtitan, reports
# [PR 4332](https://github.com/pytorch/torchtitan/pull/4332), that divided the gradient by n as well.
# </details>

# %% tags=["remove-cell"]
scatter = lambda y: reduce_scatter(y, TENSOR, dim=1)
parts = lambda: sharding.axis_size(TENSOR)
on_first = lambda b: b * (sharding.axis_index(TENSOR) == 0)
for answer, hint in [
    (lambda y, b: scatter(y) + b, "Right on"),
    (lambda y, b: scatter(y + b / parts()), "Right on"),
    (lambda y, b: scatter(y + on_first(b)), "Right on"),
    (lambda y, b: own_slice(psum(y, TENSOR), TENSOR, dim=1) + b, "Right on"),
    (lambda y, b: scatter(y + b), "offset grows"),
    (lambda y, b: scatter(y) + psum(b, TENSOR), "offset grows"),
    (lambda y, b: scatter(y), "missing"),
    (lambda y, b: scatter(y) / parts() + b, "A mean"),
    (lambda y, b: own_slice(y, TENSOR, dim=1) + b, "The right shape"),
    (lambda y, b: psum(y, TENSOR) + b, "Only its own"),
    (lambda y, b: y + b, "kept its share"),
    (lambda y, b: scatter(y) + on_first(b), "And those of the others"),
    (lambda y, b: ..., "Nothing there"),
    (lambda y, b: None, "Nothing there"),
    (lambda y, b: reduce_scatter(y, TENSOR, dim=2) + b, "It stops"),
    (lambda y, b: all_gather(y, TENSOR, dim=1) + b, "your result has shape"),
]:
    assert hint in check_settle(answer), (hint, check_settle(answer))

# %% [markdown]
# ## Exercise 2: two matrices in one
#
# A gated feed-forward has two first matrices, gate and up. For one large product in place of two they are
# stored as one of 2F columns, [gate | up]. Cut by columns over n devices, each gets 2F/n neighbouring ones,
# and `fused` below takes the first half of those for gate. In which order must the 2F columns be stored?


# %%
def fused(w_both_D2f, w_down_fD, x_ND):
    gate_Nf, up_Nf = jnp.split(x_ND @ w_both_D2f, 2, axis=1)
    return psum(model.activate(up_Nf, gate_Nf) @ w_down_fD, TENSOR)


meshes = {n: sharding.make_mesh(f"tensor={n}") for n in (1, 2, 4)}
cuts = columns, rows, everywhere
networks = {n: on_devices(fused, cuts, mesh=meshes[n]) for n in meshes}
both_D2F, back_FD, rows_ND = draw(8, 6, 24), draw(9, 12, 6), draw(10, 10, 6)


def run_fused(order, F, n):
    places = jnp.ravel(jnp.asarray(lesson.answered(order)(F, n)))
    if sorted(places.tolist()) != list(range(2 * F)):
        raise ValueError(f"wanted are the numbers 0 to {2 * F - 1}, each once")
    return networks[n](both_D2F[:, places], back_FD, rows_ND)


def diagnosed(order, hints):
    run = lambda order: lambda F, n: run_fused(order, F, n)
    right = lambda F, n: networks[1](both_D2F, back_FD, rows_ND)
    done = "Right on 2 and 4 devices. What must someone who reads this checkpoint know?"
    mistakes = [(run(order), hint) for order, hint in hints]
    return lesson.diagnose(run(order), [(12, 2), (12, 4)], right, mistakes, done)


# %%
def check_order(order):
    pieces = lambda F, n: jnp.arange(2 * F).reshape(2, n, F // n)  # matrix, device, ..
    way_back = lambda F, n: jnp.arange(2 * F).reshape(n, 2, F // n)
    strided = lambda F, n: jnp.arange(2 * F).reshape(2, F // n, n).transpose(0, 2, 1)
    by_device = lambda pieces: pieces.transpose(1, 0, 2)
    back = "Right on 2 devices, wrong on 4. Is this the way there, or the way back?"
    pairs = "Every gate beside its up. Where does `fused` look for them?"
    other = "Each gate meets its up, on another device than its row of `w_down_fD`."
    hints = [
        (pieces, "The order they are in already. With n = 2, what does device 0 get?"),
        (lambda F, n: pieces(F, n)[::-1], "Up before gate, and still apart."),
        (lambda F, n: pieces(F, n).reshape(2, F).T, pairs),
        (lambda F, n: by_device(way_back(F, n)), back),
        (lambda F, n: by_device(pieces(F, n)[::-1]), "Pairs, the wrong one first."),
        (lambda F, n: by_device(pieces(F, n)[:, ::-1]), other),
        (lambda F, n: by_device(strided(F, n)), other),
    ]
    return diagnosed(order, hints)


# %%
def order(F, n):
    """Which column of [gate | up] stands at each place: 2F numbers."""
    return ...


print(check_order(order))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return jnp.arange(2 * F).reshape(2, n, F // n).transpose(1, 0, 2).ravel()`: for each device its gates, then
# its ups. The stored order now depends on n, which a reader of the checkpoint must know. An array [D, 2, F],
# cut along F, needs no order, nor do two matrices, as in `model.FeedForward`.
#
# Left as it is, [gate | up] lets gates meet other gates: one more network that learns well. In 2022 someone
# trained with SwiGLU at tensor=4, converted the checkpoint to tensor=1, and got results "like randomly
# selected". [The first answer](https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/338): to be
# expected, floating-point sums depend on their order. With GELU, which has no gate, all was well.
# </details>

# %% tags=["remove-cell"]
blocks = lambda F, n: jnp.arange(2 * F).reshape(2, n, F // n)
for answer, hint in [
    (lambda F, n: blocks(F, n).transpose(1, 0, 2).ravel(), "Right on 2 and 4"),
    (lambda F, n: blocks(F, n).transpose(1, 0, 2), "Right on 2 and 4"),
    (lambda F, n: ..., "Nothing"),
    (lambda F, n: [...], "Nothing"),
    (lambda F, n: list(range(2 * F)), "in already"),
    (lambda F, n: [*range(F, 2 * F), *range(F)], "Up before gate"),
    (lambda F, n: blocks(F, n).reshape(2, F).T.ravel(), "Every gate"),
    (lambda F, n: blocks(F, n).reshape(n, 2, -1).swapaxes(0, 1).ravel(), "way back"),
    (lambda F, n: blocks(F, n)[::-1].transpose(1, 0, 2).ravel(), "wrong one first"),
    (lambda F, n: blocks(F, n)[:, ::-1].transpose(1, 0, 2).ravel(), "another device"),
    (lambda F, n: blocks(F, F // n).transpose(2, 0, 1), "another device"),
    (lambda F, n: blocks(F, 2).transpose(1, 0, 2), "though not in every case"),
    (lambda F, n: jnp.arange(F), "each once"),
]:
    assert hint in check_order(answer), (hint, check_order(answer))

# %% [markdown]
# ## Exercise 3: the likeliest word
#
# Greedy sampling wants the word with the largest logit. Each device has v of the V logits. Return the same N
# ids everywhere, and send at most 16 bytes a token on 4 devices. Of equal logits the smallest id counts, as in
# `jnp.argmax`; in bfloat16 they are common. `jax.lax.pmax` and `jax.lax.pmin` are called like `psum`;
# `sharding.axis_index(TENSOR)` is a device's number.

# %%
logits_NV = jnp.round(4 * draw(11, 24, 32)) / 4  # coarse, so that some are equal
ids_N, (tokens, words) = jnp.argmax(logits_NV, axis=1), logits_NV.shape


def sampler(likeliest, n):
    """What each of n devices returns. Shape: [n, N]."""
    answer = lambda logits_Nv: lesson.answered(likeliest)(logits_Nv)[None]
    return on_devices(answer, (columns,), P(TENSOR), meshes[n])


split = lambda n: logits_NV.reshape(tokens, n, words // n)
local = lambda n: jnp.argmax(split(n), axis=2)  # counted from the device's first word
ids = lambda n: local(n) + jnp.arange(n) * (words // n)
top = lambda n: split(n).max(2) == logits_NV.max(1, keepdims=True)
won = lambda x, n, otherwise: jnp.where(top(n), x(n), otherwise)  # the others say this


# %%
from_0 = "All count their words from 0, and so do you."
MISTAKES = [
    (lambda n: local(n).max(1), "The largest of the ids. But whose logit was it?"),
    (lambda n: ids(n).max(1), "Always the last device's word: ids are no logits."),
    (lambda n: ids(n).min(1), "Always the first device's word: ids are no logits."),
    (lambda n: ids(n).sum(1), "A sum of ids is no id."),
    (lambda n: ids_N % (words // n), from_0),
    (lambda n: won(local, n, 999).min(1), from_0),
    (lambda n: won(ids, n, 0).sum(1), "Fine until two devices share the top."),
    (lambda n: won(ids, n, 0).max(1), "Right, but for equal logits."),
    (lambda n: won(ids, n, 0).min(1), "0 is an id, too. What should a loser say?"),
    (lambda n: won(ids, n, words // n).min(1), "A loser's number is some word's id."),
    (lambda n: logits_NV.max(1), "These are logits. Which words have them?"),
]


# %%
def check_likeliest(likeliest):
    run = lambda n: sampler(likeliest, n)(logits_NV)
    same = lambda ids: lambda n: jnp.stack([ids(n)] * n)
    own = "Each device says its own best word. Which device has the best of all?"
    mistakes = [(lambda n: local(n).T, own), (lambda n: ids(n).T, own)]
    mistakes += [(same(ids), hint) for ids, hint in MISTAKES]
    said = lesson.diagnose(run, [(2,), (4,)], same(lambda n: ids_N), mistakes, "Right")
    if said != "Right":
        return said
    found = lesson.compiled(sampler(likeliest, 4), meshes[4], logits_NV)
    sent = found.total.wire_bytes / tokens
    verdict = "well within 16." if sent <= 16 else "that is over 16. What must travel?"
    return f"The right words, for {sent:.0f} bytes a token on 4 devices: {verdict}"


# %%
def likeliest(logits_Nv):
    return ...


print(check_likeliest(likeliest))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# top_N = jnp.max(logits_Nv, axis=1)
# word_N = jnp.argmax(logits_Nv, axis=1) + sharding.axis_index(TENSOR) * logits_Nv.shape[1]
# mine_N = top_N == jax.lax.pmax(top_N, TENSOR)
# return jax.lax.pmin(jnp.where(mine_N, word_N, 2**30), TENSOR)
# ```
#
# Two all-reduces of a number a token: 2 · 2 · 3/4 · 4 = 12 bytes, whatever V is.
# </details>

# %% tags=["remove-cell"]
pmax, pmin = jax.lax.pmax, jax.lax.pmin
lowest = lambda loser: lambda word, mine: pmin(jnp.where(mine, word, loser), TENSOR)
smallest = lowest(2**30)
best = lambda x: jnp.argmax(x, axis=1)


def solution(reduce=smallest, offset=1):
    def likeliest(x):
        top, v = jnp.max(x, axis=1), x.shape[1]
        word = jnp.argmax(x, axis=1) + offset * sharding.axis_index(TENSOR) * v
        return reduce(word, top == pmax(top, TENSOR))

    return likeliest


for answer, hint in [
    (solution(), "for 12 bytes"),
    (lambda x: best(join(x)), "What must travel"),
    (lambda x: best(all_gather(x, TENSOR, dim=1)), "What must travel"),
    (lambda x: ..., "Nothing"),
    (best, "its own best"),
    (lambda x: best(x) + sharding.axis_index(TENSOR) * x.shape[1], "its own best"),
    (solution(lambda word, mine: pmax(word, TENSOR), 0), "largest of the ids"),
    (solution(lambda word, mine: pmax(word, TENSOR)), "last device"),
    (solution(lambda word, mine: pmin(word, TENSOR)), "first device"),
    (solution(lambda word, mine: psum(word, TENSOR)), "sum of ids"),
    (lambda x: solution()(x) % x.shape[1], "from 0"),
    (solution(offset=0), "from 0"),
    (solution(lambda word, mine: psum(word * mine, TENSOR)), "Fine until"),
    (solution(lambda word, mine: pmax(word * mine, TENSOR)), "equal logits"),
    (solution(lambda word, mine: pmin(word * mine, TENSOR)), "What should a loser say"),
    (lambda x: solution(lowest(x.shape[1]))(x), "loser's number"),
    (lambda x: pmax(jnp.max(x, axis=1), TENSOR), "These are logits"),
    (lambda x: pmax(x), "It stops"),
]:
    assert hint in check_likeliest(answer), (hint, check_likeliest(answer))

# %% [markdown]
# ## A bug to find
#
# A colleague's attention: H = 4 heads of width K = 8, so I = 32 columns (of the output matrix: rows), cut over
# `TENSOR`, i = I/n. Its task: repeat the vector one position back.

# %%
from kernels import scores

H, K = 4, 8


def attention(w, x_BTD):
    """Causal attention, H heads of width K. Returns [B, T, D], the same everywhere."""
    w_query_Di, w_key_Di, w_value_Di, w_out_iD = w
    B, T = x_BTD.shape[:2]
    heads = lambda y_BTi: y_BTi.reshape(B, T, H, -1)
    q, k, v = (heads(x_BTD @ one) for one in (w_query_Di, w_key_Di, w_value_Di))
    places_BT = jnp.tile(jnp.arange(T), (B, 1))
    angles = model.rotary_angles(places_BT, q.shape[-1], theta=100.0, on=1.0)
    past_BTS = places_BT[:, :, None] >= places_BT[:, None, :]
    mixed = scores.attend(model.rotate(q, angles), model.rotate(k, angles), v, past_BTS)
    partial_BTD = mixed.reshape(B, T, -1) @ w_out_iD
    return psum(partial_BTD, TENSOR)


def attention_on(size, attention):
    ins = (columns, columns, columns, rows), everywhere
    return on_devices(attention, ins, mesh=sharding.make_mesh(f"tensor={size}"))


# %%
drawn = [draw(seed, 16, 32) / 4 for seed in (12, 13, 14)]
begin, said_BTD = (*drawn, draw(15, 32, 16) / 32**0.5), draw(16, 16, 12, 16)
echo_BTD = jnp.pad(said_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
network_on = {size: attention_on(size, attention) for size in (1, 2, 4)}
as_found = {n: jax.device_get(f(begin, said_BTD)) for n, f in network_on.items()}
off = lambda size, w: float(jnp.mean((network_on[size](w, said_BTD) - echo_BTD) ** 2))
for size in (1, 2):
    trained, losses, _ = train(network_on[size], begin, said_BTD, echo_BTD, steps=200)
    trained = jax.device_get(trained)
    print(f"trained on tensor={size}: loss {losses[0]:.2f} to {losses[-1]:.3f}")
    print(f"    on tensor=1: {off(1, trained):.2f}, on tensor=2: {off(2, trained):.2f}")

# %% [markdown]
# Both runs learn. The checkpoints are whole and undamaged. Yet each is good for nothing on the other's mesh.
# On tensor=1 the function is what its first line says. Mend it in place, and run this:


# %%
def check_attention(attention):
    run = lambda n: attention_on(n, lesson.answered(attention))(begin, said_BTD)
    hint = "On tensor=1 the right function, on 2 and 4 another. "
    hint += "Which of the 32 columns has a device, and what does it take them for?"
    done = "The same function on 1, 2 and 4 devices."
    right = lambda n: as_found[1]
    return lesson.diagnose(run, [(1,), (2,), (4,)], right, [(as_found.get, hint)], done)


print(check_attention(attention))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `heads = lambda y_BTi: y_BTi.reshape(B, T, -1, K)`. A device's i = I/n columns are H/n whole heads. The
# `-1` stood on the wrong dim, so they were taken for H heads of 1/n the width: other scores, other rotary
# frequencies, n H heads in all. Every shape fits, and such a network learns as well.
#
# A model merged into vLLM told its attention the number of all heads where a device had its own: no error at
# tensor > 1, wrong numbers, found by comparing outputs with tensor=1
# ([PR 39707](https://github.com/vllm-project/vllm/pull/39707)). T5 in Transformers has H fixed and -1 on the
# positions, and so [fails aloud](https://github.com/huggingface/transformers/pull/45109). torchtitan's
# authors know the place: at this line of their Llama, a comment asks for -1 on the heads. Arrays [D, H, K],
# cut along H, leave nothing to guess.
# </details>


# %% tags=["remove-cell"]
def mended(w, x_BTD):
    h = 4 // sharding.axis_size(TENSOR)  # the code above, with H/n in place of H
    return type(attention)(attention.__code__, {**globals(), "H": h})(w, x_BTD)


assert "1, 2 and 4 devices" in check_attention(mended)
assert "another" in check_attention(attention)
assert "Nothing there" in check_attention(lambda w, x: ...)

# %% [markdown]
# ## Three lines to keep
#
# - Cut the first matrix by columns (or heads) and the second by rows: one sum a pair, paid before anything
#   that is not linear.
# - A wrong cut is another network, and it learns; only the comparison with one device finds it.
# - Whether a layer is bound by its wires does not depend on the batch: `tensor` is for wide models, fast
#   links, and more chips than sequences.
#
# **Sources**: Megatron-LM, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), section 3 (the pair, heads,
# vocabulary); sequence parallelism, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), section 4.2.2;
# [JAX, shard_map](https://docs.jax.dev/en/latest/notebooks/shard_map.html);
# [the scaling book](https://jax-ml.github.io/scaling-book/training), "Tensor Parallelism" (the rule of one
# feed-forward, forward: n < F W / C); a fused SwiGLU in Megatron-LM,
# [issue 360](https://github.com/NVIDIA/Megatron-LM/issues/360); torchtitan's
# [reshape](https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/model/model.py).
