# %% [markdown]
# # 15 · Left to the compiler: jit, constraints and explicit sharding
#
# In most other chapters you write every collective yourself, inside `shard_map`. Under `jit` you don't have to:
# you say how arrays are sharded, and XLA's partitioner inserts the collectives. This is automatic SPMD
# partitioning, and it is how MaxText, T5X and most JAX programs are written.
#
# Why would you want it? The program is the one for a single device, so any mesh works without a change. Why
# would you not? You no longer see what is communicated, and a wrong annotation can cost several times the
# memory and the bytes without changing the result. The page ends with this verdict: leave dense layers to the
# compiler, and write pipelines, rings and the exchange of experts yourself.
#
# *Prerequisites:* chapters 01 (sharding, collectives), 03 (FSDP), 04 (tensor parallelism).
# *Mesh:* `data=2,model=4`, simulated. *Runs in* 40 s on 2 cores. *Reading takes* 30 minutes, 75 with the
# exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

from functools import cache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from bench import partition
from chapters import lesson, opening
from compile import ledger

# %% tags=["hide-input"] mystnb={"image": {"alt": "Left, one of eight devices holds the whole layer and computes for 87 ms. Right, each holds an eighth, computes for 11 ms, and four all-reduces of activations that the compiler inserted take 8 ms."}}
GiB, n = 2**30, opening.DEVICES
share = 16 * opening.PARAMETERS / GiB  # float32 weights, gradients, two moments
alone_ms = opening.compute_ms(2 * opening.PARAMETERS * opening.TOKENS)  # forward
activation_bytes = 2 * opening.TOKENS * opening.D  # bf16
s = opening.network_ms(2 * (n - 1) / n * activation_bytes)  # an all-reduce
f = alone_ms / n


def parts(size):
    return {"weights": size / 4, "gradients": size / 4, "optimizer state": size / 2}


on_first = {name: [size] + [0.0] * (n - 1) for name, size in parts(share).items()}
whole = [("forward", 0, alone_ms), ("backward", alone_ms, 2 * alone_ms)]
before = opening.Scene("one device runs the program", on_first, whole, [])
lengths = np.array([f / 2, f / 2, f, f])  # attention and MLP, forward and backward
ends = np.cumsum(lengths + s)  # of the all-reduce that follows each
network = [("", end - s, s) for end in ends]
starts = zip(ends - s - lengths, lengths, strict=True)
compute = [("", start, length) for start, length in starts]
after = opening.Scene("the compiler splits it", parts(share / n), compute, network)
title = "The same program: the partitioner adds four all-reduces"
opening.before_after(before, after, title, "tensor")

# %% [markdown]
# The figure shows one layer of Llama 3 8B and 65,536 tokens on H100s, at peak speed. On the right, its weights
# are sharded over eight devices, as in tensor parallelism. Nobody wrote an all-reduce.
#
# > **Predict.** The next program multiplies `x_BD`, whose rows are sharded over `data=2`, by two matrices
# > that are sharded over `model=4` by columns and by rows, and takes a mean. It contains no collective.
# > How many collectives does the compiled program have?

# %%
my_prediction = None  # collectives, forward pass only
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def shaped(*shape, spec):
    """Describe a sharded float32 array without data."""
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


rows, columns = P("data", None), P(None, "model")
x_BD, w_up_DF = shaped(32, 64, spec=rows), shaped(64, 192, spec=columns)
split_rows = NamedSharding(mesh, P("model"))
w_down_FD = jax.ShapeDtypeStruct((192, 64), jnp.float32, sharding=split_rows)
two_matmuls = jax.jit(lambda x, up, down: jnp.mean(jnp.tanh(x @ up) @ down))
found = lesson.compiled(two_matmuls, mesh, x_BD, w_up_DF, w_down_FD)
lesson.predicted("collectives", my_prediction, len(found.collectives))
lesson.listed(found)

# %% [markdown]
# Two. After the second matmul, each device along `model` has a partial sum of all 16 x 64 elements, so these
# are all-reduced. The mean then all-reduces one value over `data`. A person would take the mean first, and
# send one value over both axes. But the partitioner decides operation by operation, and does not reorder the
# program.
#
# ## One program, written in three ways
#
# There are three ways to tell JAX who computes what. The next program has all of them, and you can paste
# it into an empty file. A layer is `x + tanh(x @ up) @ down`. The weights are sharded over `model`, the
# rows over `data`.
#
# 1. **Constraints.** The mesh axes have the type `Auto`. The compiler derives the sharding of every array
#    from those of the inputs, and `with_sharding_constraint` pins a few of them.
# 2. **Explicit sharding.** The axes have the type `Explicit`, and each array's type includes its sharding, as
#    it includes its dtype. JAX checks every operation while it traces. If a result could be sharded in two
#    ways, you must choose one with `out_sharding`.
# 3. **shard_map.** The function is the program of one device, and you write every collective.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

draw = np.random.default_rng(0).normal
x, up, down = (draw(size=s) / 8 for s in ((32, 64), (64, 192), (192, 64)))
rows, columns = P("data"), P(None, "model")
places = rows, columns, P("model")


def plain(x, up, down):
    return x + jnp.tanh(x @ up) @ down


# %% tags=["by-hand"]
def constrained(x, up, down):
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ up), P("data", "model"))
    return jax.lax.with_sharding_constraint(x + hidden @ down, rows)


def explicit(x, up, down):
    hidden = jnp.tanh(x @ up)  # its type is float32[32@data,192@model]
    return x + jnp.dot(hidden, down, out_sharding=rows)  # the sum is over a sharded dim


def by_hand(x, up, down):
    return x + jax.lax.psum(jnp.tanh(x @ up) @ down, "model")


# %% tags=["by-hand"]
def on_eight(function, axis_type, mapped=False):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    if mapped:
        specs = dict(in_specs=places, out_specs=rows)
        function = jax.shard_map(function, mesh=mesh, **specs)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for spec in places]
        arrays = jax.device_put([np.float32(a) for a in (x, up, down)], shardings)
        program = jax.jit(function).lower(*arrays).compile()
        return program(*arrays), program.as_text().count(" all-reduce(")


ways = {constrained: AxisType.Auto, explicit: AxisType.Explicit, by_hand: AxisType.Auto}
for function, axis_type in ways.items():
    result, sums = on_eight(function, axis_type, mapped=function is by_hand)
    np.testing.assert_allclose(result, plain(x, up, down), rtol=1e-4, atol=1e-5)
    print(f"{function.__name__}: equal to one device, {sums} all-reduce")

# %% [markdown]
# **What the partitioner does.** The first two functions contain no collective. XLA starts from the
# shardings that it knows, those of the inputs and the constraints, and propagates them through all
# operations, forward and backward, until every array has one. Then it replaces each operation by the
# operation of one device, and inserts a collective wherever an operation needs another sharding than its
# input has. A matmul over a sharded dim leaves partial sums, so it adds an all-reduce. A dim that is
# sharded and must be whole needs an all-gather. A dim that moves from one axis to another needs an
# all-to-all. The result is one program that every device runs: SPMD, single program, multiple data. GSPMD
# was the first partitioner of this kind in XLA; its successor is Shardy.
#
# All three have one all-reduce here. The first two are still programs of one device: without their
# annotations, they give the same result, but the partitioner may choose other communication.
#
# ## Logical axis names
#
# With constraints, a large model has hundreds of specs, and each names mesh axes. To try another
# partitioning you would edit all of them. So T5X, Flax and MaxText give each dim of an array a **logical
# axis name**, such as `batch` or `hidden`, and keep one table that maps logical names to mesh axes. This
# is the whole idea of T5X's `partitioning` module:

# %% tags=["hide-input"]
lesson.source(partition.rules, partition.spec)

# %%
names_of = partition.WEIGHTS["in"][1:], partition.ACTIVATIONS
for params, activations in partition.PARTITIONINGS:
    table = partition.rules(params, activations)
    w_spec, x_spec = (partition.spec(table, names) for names in names_of)
    print(f"{params}D parameters, {activations}D activations: w {w_spec}, x {x_spec}")

# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight small boxes: for each of the four partitionings, which devices hold which shard of a weight (above) and of the activations between layers (below)."}}
title = "Which devices hold a shard (0 to 3: data=0, 4 to 7: data=1)"
_, panels = lesson.panels(title, 2, 4, figsize=(6.6, 3.6))
for column, (params, activations) in enumerate(partition.PARTITIONINGS):
    above, below = panels[:, column]
    table = partition.rules(params, activations)
    w_spec, x_spec = (partition.spec(table, names) for names in names_of)
    over = [{1: "model", 2: "data, model"}[params]]
    over += [{1: "data", 2: "data, model"}[activations]]
    title = f"{params}D / {activations}D\nw over {over[0]}"
    lesson.slices(above, mesh, w_spec, "DF", title, colour_by="tensor")
    title = f"x over {over[1]}"
    lesson.slices(below, mesh, (x_spec[0], x_spec[2]), "BD", title, colour_by="tensor")
    above.title.set_size(9)
    below.title.set_size(9)
panels[0, 0].set_ylabel("w\nD", rotation=0, labelpad=12)
panels[1, 0].set_ylabel("x\nB", rotation=0, labelpad=12)

# %% [markdown]
# These are the four partitionings of the T5X paper ([arXiv:2203.17189](https://arxiv.org/abs/2203.17189),
# section 2.2). In a name like 1D/2D, the first part is about parameters, the second about activations:
#
# | | 1D | 2D |
# |---|---|---|
# | parameters | sharded over `model`, as in tensor parallelism | also over `data`, and gathered for each layer, as in FSDP |
# | activations between layers | sharded over `data`, replicated over `model` | also over `model`, by width |
#
# (2D activations save as much memory as Megatron's sequence parallelism, which shards positions.)
#
# ## Four partitionings, three ways
#
# `bench/partition.py` writes the stack of chapter 04's layers, four of them, in all twelve combinations: loss
# and gradients, with activation checkpointing. Here is a layer of 2D/2D by hand:


# %%
def layer(x_bTd, w):
    w_in = jax.lax.all_gather(w["in"], "data", axis=0, tiled=True)
    w_out = jax.lax.all_gather(w["out"], "data", axis=1, tiled=True)
    x_bTD = jax.lax.all_gather(x_bTd, "model", axis=2, tiled=True)
    sum_bTD = jnp.tanh(x_bTD @ w_in) @ w_out  # a partial sum
    y_bTd = jax.lax.psum_scatter(sum_bTD, "model", scatter_dimension=2, tiled=True)
    return x_bTd + y_bTd


# %% tags=["remove-cell"]
layer_w = {"in": np.float32(up), "out": np.float32(down)}
layer_x = np.float32(draw(size=(4, 3, 64)))
split_x = P("data", None, "model")
split_w = {"in": P("data", "model"), "out": P("model", "data")}
specs = dict(mesh=mesh, in_specs=(split_x, split_w), out_specs=split_x)
layer_y = jax.jit(jax.shard_map(layer, **specs))(layer_x, layer_w)
assert np.allclose(layer_y, plain(layer_x, up, down), rtol=1e-4, atol=1e-5)

# %% [markdown]
# In a step, the backward pass and the recomputation add to that. Per layer:
#
# | over | array | all-gathers | reduce-scatters |
# |---|---|---|---|
# | `model=4` | activations of 12,288 bytes | 3 | 2 |
# | `data=2` | weights of 24,576 bytes | 2 | 1, of the gradients |
#
# > **Predict.** The partitioner of the CPU compiler cannot make a reduce-scatter. It all-reduces instead, and
# > then each device takes its shard. How many times as many bytes does the program with explicit sharding send?

# %%
my_prediction = None  # times


@cache
def measured(params, activations, way):
    """Compile and run one of the twelve programs on eight simulated devices."""
    devices, way = jax.devices()[:8], partition.WAYS[way]
    return partition.measure(way, params, activations, partition.SMALL, devices, None)


FOUR_WAYS = partition.PARTITIONINGS
all_twelve = [(*dims, way) for dims in FOUR_WAYS for way in partition.WAYS]
sent = {key: measured(*key)["wire_bytes"] for key in all_twelve}
times = sent[2, 2, "explicit"] / sent[2, 2, "shard_map"]
what = "explicit over shard_map"
lesson.predicted(what, my_prediction, times, "times", within=0.03)

# %% [markdown]
# An all-reduce sends twice as much as a reduce-scatter, so it counts as two:
#
# | a layer | sent by a device |
# |---|---|
# | by hand | 5 · 3/4 · 12,288 + 3 · 1/2 · 24,576 = 82,944 bytes |
# | explicit | 7 · 3/4 · 12,288 + 4 · 1/2 · 24,576 = 113,664 bytes, 1.37 times as many |
# | constraints | 6,144 bytes more: one of the two weights is gathered a third time |
#
# (The TPU compiler does make reduce-scatters, as you will see.)

# %% tags=["remove-cell"]
assert abs(sent[2, 2, "shard_map"] / 4 - 82_944) < 4
assert abs(sent[2, 2, "explicit"] / 4 - 113_664) < 4
assert sent[2, 2, "constraints"] - sent[2, 2, "explicit"] == 4 * 6_144
many = {way: measured(2, 2, way)["collectives"]["all-gather"] for way in partition.WAYS}
assert (many["explicit"], many["constraints"], many["shard_map"]) == (28, 32, 28)

# %%
line = "{:>6} {:>11} {:12} {:>9} {:>10}  {}".format
print(line("params", "activations", "written with", "bytes", "peak", "collectives"))
for key in all_twelve:
    row, (params, activations, way) = measured(*key), key
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    sizes = (f"{row[name]:,}" for name in ("wire_bytes", "peak_bytes"))
    print(line(f"{params}D", f"{activations}D", way, *sizes, kinds))
worst = max(measured(*key)["worst_error"] for key in all_twelve)
print(f"largest error of a loss or gradient against one device: {worst:.1e}")
assert worst < 1e-5

# %% [markdown]
# ## What the TPU compiler makes of them
#
# The TPU compiler has more passes. It turns an all-reduce whose result is sharded into a reduce-scatter.
# It also splits a matmul into chunks, so that a gather overlaps with compute, which is chapter 04's ring
# exchange without your help. The table is for 16 chips of v5e, mesh `data=4,model=4`, and eight layers of
# width 4,096 (printed by `python -m bench.partition --topology v5e:4x4`, libtpu 0.0.42.1). The step is
# simulated from the compiled program, as in [Step times](../seconds.md); no chip was measured.
#
# | parameters | activations | written with | sent | exposed | peak memory | simulated step |
# |---|---|---|---|---|---|---|
# | 1D | 1D | explicit | 7.25 GB | 7.25 GB | 4.56 GiB | 548 ms |
# | 1D | 1D | constraints | 7.25 GB | 7.25 GB | 4.56 GiB | 545 ms |
# | 1D | 1D | shard_map | 7.25 GB | 7.25 GB | 4.56 GiB | 545 ms |
# | 1D | 2D | explicit | 9.93 GB | 6.17 GB | 3.00 GiB | 516 ms |
# | 1D | 2D | constraints | 11.01 GB | 4.03 GB | 3.09 GiB | 502 ms |
# | 1D | 2D | shard_map | 8.86 GB | 7.25 GB | 2.94 GiB | 515 ms |
# | 2D | 1D | explicit | 7.66 GB | 7.25 GB | 3.81 GiB | 519 ms |
# | 2D | 1D | constraints | 7.92 GB | 6.71 GB | 4.10 GiB | 552 ms |
# | 2D | 1D | shard_map | 7.66 GB | 7.25 GB | 3.81 GiB | 524 ms |
# | 2D | 2D | explicit | 10.34 GB | 6.38 GB | 2.25 GiB | 507 ms |
# | 2D | 2D | constraints | 13.15 GB | 3.36 GB | 2.59 GiB | 515 ms |
# | 2D | 2D | shard_map | 9.27 GB | 7.25 GB | 1.98 GiB | 494 ms |
#
# How many of these bytes are exposed, that is, do not overlap with a matmul?

# %% tags=["hide-input"] mystnb={"image": {"alt": "Twelve bars of GB sent by a device on TPU v5e, split into exposed and overlapped. With 1D/1D everything is exposed, 7.25 GB. With 2D activations, constraints send the most and expose the least, 4 or 3.4 GB, and shard_map exposes 7.25 GB."}}
SENT = {"shard_map": (7.25, 8.86, 7.66, 9.27), "explicit": (7.25, 9.93, 7.66, 10.34),
        "constraints": (7.25, 11.01, 7.92, 13.15)}  # fmt: skip
EXPOSED = {"shard_map": (7.25,) * 4, "explicit": (7.25, 6.17, 7.25, 6.38),
           "constraints": (7.25, 4.03, 6.71, 3.36)}  # fmt: skip
figure, axes = plt.subplots(figsize=(6.4, 3.4))
for number, way in enumerate(SENT):
    at = [place + 0.28 * (number - 1) for place in range(4)]
    look = dict(width=0.25, edgecolor="black", lw=0.6)
    axes.bar(at, SENT[way], color="white", **look)
    axes.bar(at, EXPOSED[way], color="#6b6b6b", **look)
    for x, high in zip(at, SENT[way], strict=True):
        axes.text(x, high + 0.2, way, rotation=90, ha="center", va="bottom", size=8)
axes.set(ylabel="GB sent by a device", ylim=(0, 18))
axes.set_title("With 2D activations, the compiler overlaps more than our layer")
axes.set_xticks(range(4), [f"{p}D params,\n{a}D activations" for p, a in FOUR_WAYS])
fills = {"exposed": "#6b6b6b", "overlapped": "white"}
boxes = [plt.Rectangle((0, 0), 1, 1, fc=fill, ec="black") for fill in fills.values()]
legend = axes.legend(boxes, fills, loc="upper left", ncols=2, fontsize=9)

# %% [markdown]
# By simulated step time:
#
# - **1D/1D** (parameters over `model`, activations over `data`): the same collectives three times. Explicit
#   sharding takes 0.5% longer, because its matmuls are cut differently.
# - **1D/2D** (activations also over `model`): constraints win by 3%. The compiler splits gathers into chunks
#   (`collective-permute`) and sends them during the matmuls. It sends a quarter more bytes than the
#   hand-written program, but 44% fewer are exposed.
# - **2D/1D** (parameters also over `data`): explicit sharding and the hand-written program are within 1%. With
#   constraints the step takes 5.3% longer than by hand, and 6.4% longer than with explicit sharding.
# - **2D/2D** (both): the hand-written program wins, by 3% over explicit sharding and 4% over constraints, which
#   also need 31% more memory. They took three times as long to compile: 92 s against 31 s, on 2 cores.
#
# The hand-written layer gathers everything before it multiplies, so only one of its five transfers of
# activations overlaps. Chapter 04's ring exchange, written by hand, is the answer to that.
#
# The whole training step of the preset `dense_124m`, 480 sequences on `fsdp=16`: explicit sharding
# (`bench/explicit.py`) against this trainer's `shard_map`, both with `remat=full`. The table is printed by
# `python -m bench.partition --step --topology v5e:4x4 --mesh fsdp=16`.
#
# | written with | all-reduce | all-gather | all-to-all | exposed | peak memory | simulated step |
# |---|---|---|---|---|---|---|
# | explicit | 0.75 GB | 0.39 GB | 0.00 GB | 0.91 GB | 1.69 GiB | 266 ms |
# | shard_map | 0.00 GB | 0.39 GB | 0.32 GB | 0.24 GB | 1.73 GiB | 257 ms |
#
# Both gather the same weights. The compiler sums gradients with all-reduces over the whole slice. By hand,
# they are reduce-scatters, sent as all-to-alls: half the bytes, and they overlap with matmuls. The
# vocabulary table also differs: by hand, tokens go to its shards, and its gradients are summed in bfloat16.
# The first version of the explicit program sent 47.9 GB and took
# 705 ms, with the right loss. Its norm broadcast the gain to the shape of the activations, with an unsharded
# type. So the gradient was unsharded too, and the compiler gathered the activations of all devices.
#
# ## When to leave it to the compiler
#
# On this slice, for this layer, the compiler's programs are within 6% of ours in either direction. So
# leave dense layers to the compiler, with a constraint on every activation between layers, and check the
# bytes. Write the collectives yourself if the communication *is* the algorithm: a pipeline schedule (05),
# ring attention (06), the exchange of tokens between experts (07). The partitioner decides operation by
# operation, and each of these spans many operations. `shard_map` works inside `jit`, so one program can
# use both.
#
# Why then does `model.py` write dense layers by hand? This guide shows every collective. Also, v5e is a mild
# test: there, weight gathers overlap, and [on v5p they are exposed](../waits.md#the-rules-of-the-planner).
#
# Whichever you choose, count what the compiled program sends. A wrong `psum` changes the result, and
# parity with one device finds it. A missing constraint changes only the bytes.
#
# ## Exercise 1: from logical names to mesh axes
#
# A mesh axis can shard only one dim of an array. With 2D activations, `("width", "hidden")` would name
# `model` twice. Write the translation so that the first dim that asks for a mesh axis gets it, and a
# later one stays unsharded (None), as Flax does. `table` maps logical names to mesh axes or None; a name
# that is missing is unsharded. Return a tuple.

# %% tags=["hide-input"]
TABLE = {"batch": "data", "width": "model", "hidden": "model", "expert": "data"}
NAMES = [("batch", "position", "width"), ("width", "hidden"), ("position", "position"),
         ("expert", "width", "hidden"),
         ("batch", "expert", "hidden", "scale")]  # fmt: skip


def first_wins(table, names):
    axes = [table.get(name) for name in names]
    return tuple(axis if axis not in axes[:i] else None for i, axis in enumerate(axes))


NAME_HINTS = [
    (lambda table, names: tuple(table.get(name) for name in names),
     "A mesh axis occurs twice. Which dim should get it?"),
    (lambda table, names: first_wins(table, names[::-1])[::-1],
     "The last dim got the axis. The first one that asks for it should."),
    (lambda table, names: tuple(dict.fromkeys(table.get(name) for name in names)),
     "The result needs one entry per dim, None where a dim is not sharded."),
    (lambda table, names: tuple(axis for axis in first_wins(table, names) if axis),
     "The unsharded dims are missing."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_names(answer):
    def text(function):  # as text, because `lesson.same` skips None
        def called(names):
            result = function(TABLE, names)
            return ... if result is None or result is ... else str(tuple(result))

        return called

    if answer is None or answer is ...:
        return lesson.NOTHING
    hints = [(text(wrong), hint) for wrong, hint in NAME_HINTS]
    done = "Right: every mesh axis shards at most one dim."
    cases = [(names,) for names in NAMES]
    return lesson.diagnose(text(answer), cases, text(first_wins), hints, done)


# %%
def mesh_axes(table, names):
    return ...


print(check_names(mesh_axes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def mesh_axes(table, names):
#     axes = []
#     for name in names:
#         axis = table.get(name)
#         axes.append(axis if axis not in axes else None)
#     return tuple(axes)
# ```
#
# `flax.linen.logical_to_mesh_axes` works this way. It also accepts several rules for one name, and takes
# the first whose mesh axis is still free.
# </details>


# %% tags=["remove-cell"]
def solution_1(table, names):
    axes = []
    for name in names:
        axis = table.get(name)
        axes.append(axis if axis not in axes else None)
    return tuple(axes)


lesson.expect(check_names, *NAME_HINTS, (solution_1, "Right"),
              (mesh_axes, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 2: the bytes of each partitioning
#
# Return the bytes that a device sends in one step of the hand-written program, in float32, without the loss.
# There are L layers of width D and hidden width F, on a mesh of `data=d` and `model=m`. Each of the d groups
# has `tokens` tokens. With activation checkpointing, a layer runs forward twice. Collectives run on rings.
# (For 2D/2D, the count is above. 1D parameters are not gathered, and 1D activations are all-reduced. What does
# the recomputed layer need?)


# %% tags=["hide-input"]
def bytes_of(sums, gathers, weights_1, weights_2):
    """Bytes by how often a layer sums or gathers activations, and moves its weights."""
    ring = lambda k: (k - 1) / k

    def total(params, activations, L, tokens, D, F, d, m):
        over_model = (sums if activations == 1 else gathers) * 4 * tokens * D * ring(m)
        w_bytes = 4 * 2 * D * F / m
        over_data = (weights_1 if params == 1 else weights_2) * w_bytes * ring(d)
        return L * (over_model + over_data)

    return total


right_bytes = bytes_of(4, 5, 2, 3)

# %% tags=["hide-input"]
BYTES_HINTS = [
    (bytes_of(6, 5, 2, 3),
     "1D activations: would anyone read the recomputed layer's last sum?"),
    (bytes_of(2, 5, 2, 3),
     "1D activations: an all-reduce counts twice, and the backward pass has one too."),
    (bytes_of(4, 4, 2, 3), "2D activations: the recomputed layer needs all its input."),
    (bytes_of(4, 6, 2, 3),
     "2D activations: is the recomputed layer's reduce-scatter needed?"),
    (bytes_of(4, 5, 1, 3), "1D parameters: an all-reduce counts twice."),
    (bytes_of(4, 5, 0, 3),
     "1D parameters are replicated over `data`. What about their gradients?"),
    (bytes_of(4, 5, 2, 2), "2D parameters: the recomputed layer gathers weights too."),
    (lambda *a: right_bytes(*a) / 4, "Bytes, not elements: float32 has four."),
]  # fmt: skip

# %% tags=["hide-input"]
check_bytes = lesson.checker(
    [(1, 1, 4, 48, 64, 192, 2, 4), (1, 2, 3, 40, 64, 128, 4, 2),
     (2, 1, 4, 48, 64, 192, 2, 4), (2, 2, 5, 48, 32, 192, 4, 2)],
    right_bytes, BYTES_HINTS,
    "Right for all four partitionings: the compiled programs above send this.",
)  # fmt: skip


# %%
def step_bytes(params, activations, L, tokens, D, F, d, m):
    return ...


print(check_bytes(step_bytes))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Per layer, with A = 4 tokens · D bytes per activation and W = 4 · 2 · D · F / m bytes of weights:
#
# | | 1D | 2D |
# |---|---|---|
# | activations, times (m - 1)/m | 4 A: all-reduces, forward and backward | 5 A: gathers forward, recomputed and backward, two reduce-scatters |
# | weights, times (d - 1)/d | 2 W: an all-reduce of gradients | 3 W: two gathers, a reduce-scatter |
#
# The recomputed layer does not repeat its sum, as only the next layer would read it.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_bytes, *BYTES_HINTS, (right_bytes, "Right"),
              (step_bytes, lesson.NOTHING))  # fmt: skip
small = partition.SMALL
sizes = small.layers, small.batch * small.seq_len // 2, small.width, small.hidden
for dims in partition.PARTITIONINGS:
    assert 0 <= sent[*dims, "shard_map"] - right_bytes(*dims, *sizes, 2, 4) <= 8

# %% [markdown]
# ## Exercise 3: pin one array
#
# Six layers train under `jit` on `data=2,model=4`. Between layers, all four devices along `model` store
# the same activations for the backward pass, and the program needs 377,144 bytes of temporary memory.
# Write `between`, which is called on the activations `x_BTD` between layers. Afterwards the program must
# need less than 240,000 bytes, and it may not change the result.

# %% tags=["hide-input"]
SIX = {"in": (6, 64, 128), "out": (6, 128, 64)}


def pin(x, *spec):
    """Constrain the sharding of an array."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


@cache
def memory_and_bytes(between):
    """Compile the training step with an answer; return temporary and sent bytes."""

    def loss(w, x_BTD, y_BTD):
        layer = lambda x, w: (between(x + jnp.tanh(x @ w["in"]) @ w["out"]), None)
        out_BTD, _ = jax.lax.scan(jax.checkpoint(layer), between(x_BTD), w)
        return jnp.mean((out_BTD - y_BTD) ** 2)

    specs = {"in": P(None, None, "model"), "out": P(None, "model", None)}
    w = {name: shaped(*shape, spec=specs[name]) for name, shape in SIX.items()}
    rows = (shaped(8, 32, 64, spec=P("data")),) * 2
    program = jax.jit(jax.value_and_grad(loss)).lower(w, *rows).compile()
    sent = ledger.read(program.as_text(), mesh).total.wire_bytes
    return program.memory_analysis().temp_size_in_bytes, sent


# %% tags=["hide-input"]
def check_between(between):
    if between is None or between is ...:
        return lesson.NOTHING
    try:
        result = between(jnp.ones((8, 32, 64)))
        if result is None or result is ...:
            return lesson.NOTHING
        if not lesson.same(result, np.ones((8, 32, 64))):
            return "The values have changed: return x_BTD itself, pinned."
        memory, sent = memory_and_bytes(between)
    except Exception as error:
        return lesson.stopped(error)
    text = f"{memory:,} bytes of memory, {sent:,} bytes sent"
    return f"{text}: {memory_hint(memory)}"


# %% tags=["hide-input"]
def memory_hint(memory):
    if memory < 240_000:
        return "right. Before: 377,144 and 688,132."
    if memory == 377_144:
        return "the same program as before. Along which axis do devices hold copies?"
    if memory > 377_144:
        return "devices hold more than before. What does None do to a sharded dim?"
    return "less, but not enough. Both axes should shard x_BTD."


# %%
def between(x_BTD):
    return ...


print(check_between(between))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return pin(x_BTD, "data", None, "model")` needs 229,760 bytes. `pin(x_BTD, "data", "model")` shards the
# positions instead, as chapter 04 does, and needs 196,984. Both send about twice as many bytes on CPU,
# because the compiler all-reduces and then takes a shard. `pin(x_BTD, ("data", "model"))` shards the
# batch eight ways: less memory too, but that needs eight sequences.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_between, (lambda x: pin(x, "data", None, "model"), "right"),
              (lambda x: pin(x, "data", None, "model"), "229,760"),
              (lambda x: pin(x, "data", "model"), "196,984"),
              (lambda x: pin(x, ("data", "model")), "right"),
              (lambda x: x, "same program"),
              (lambda x: pin(x), "more than before"),
              (lambda x: pin(x, "model"), "not enough"),
              (lambda x: 2 * x, "values have changed"),
              (lambda x: pin(x, "nodel"), "It stops"),
              (between, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# A language model trains under `jit`, with an embedding table, one hidden layer and an output head. The
# two tables are the largest arrays, so both are sharded over `model=4`. The loss equals that of one
# device. A colleague reports that memory and traffic are almost four times what she computed by hand.

# %%
VOCABULARY, WIDTH, HIDDEN = 2050, 64, 128  # 2,048 tokens, and two special ones
FOUR = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
RULES = {"batch": "data", "vocabulary": "model", "hidden": "model"}
BATCH = np.random.default_rng(9).integers(0, 2048, (2, 4, 16), dtype=np.int32)


def logical(array, *names):
    """Shard an array by the logical names of its dims."""
    spec = P(*(RULES.get(name) for name in names))
    return jax.lax.with_sharding_constraint(array, NamedSharding(FOUR, spec))


def draw_weight(seed, *shape):
    drawn = np.random.default_rng(seed).normal(size=shape) / WIDTH**0.5
    return drawn.astype(np.float32)


# %%
START = {"embed_VD": draw_weight(0, VOCABULARY, WIDTH),
         "up_DF": draw_weight(1, WIDTH, HIDDEN),
         "down_FD": draw_weight(2, HIDDEN, WIDTH),
         "head_DV": draw_weight(3, WIDTH, VOCABULARY)}  # fmt: skip


def initial_weights():
    return {"embed_VD": logical(START["embed_VD"], "vocabulary", None),
            "up_DF": logical(START["up_DF"], None, "hidden"),
            "down_FD": logical(START["down_FD"], "hidden", None),
            "head_DV": logical(START["head_DV"], None, "vocabulary")}  # fmt: skip


# %%
def mean_loss(w, tokens_BT, targets_BT):
    x_BTD = logical(w["embed_VD"][tokens_BT], "batch", None, None)
    hidden_BTF = logical(jnp.tanh(x_BTD @ w["up_DF"]), "batch", None, "hidden")
    x_BTD = logical(x_BTD + hidden_BTF @ w["down_FD"], "batch", None, None)
    logits_BTV = logical(x_BTD @ w["head_DV"], "batch", None, "vocabulary")
    right = jax.nn.one_hot(targets_BT, logits_BTV.shape[-1])
    own_BT = jnp.sum(logits_BTV * right, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - own_BT)


def compiled_step(loss, w):
    def step(w, tokens_BT, targets_BT):
        value, d = jax.value_and_grad(loss)(w, tokens_BT, targets_BT)
        return jax.tree.map(lambda w, d: w - 0.5 * d, w, d), value

    sharding = NamedSharding(FOUR, P("data"))
    batch = jax.ShapeDtypeStruct(BATCH.shape[1:], np.int32, sharding=sharding)
    return jax.jit(step).lower(w, batch, batch).compile()


# %%
def program():
    """Return the sharded initial weights, and a compiled training step."""
    w = jax.jit(initial_weights)()
    return w, compiled_step(mean_loss, w)


# %% tags=["hide-input"]
def stored_and_sent(program):
    """Bytes of weights on a device, and bytes that it sends in a step."""
    w, step = program()
    stored = sum(one.addressable_shards[0].data.nbytes for one in jax.tree.leaves(w))
    return stored, ledger.read(step.as_text(), FOUR).total.wire_bytes


def trained(program, steps=3):
    """Losses of a few steps on the same random tokens."""
    (w, step), losses = program(), []
    batch = jax.device_put(BATCH, NamedSharding(FOUR, P(None, "data")))
    for _ in range(steps):
        w, loss = step(w, batch[0], batch[1])
        losses.append(float(loss))
    return losses


# %%
quarter = sum(one.nbytes for one in START.values()) // 4
stored, sent_bytes = stored_and_sent(program)
print(f"a quarter of the weights: {quarter:,} bytes")
print(f"stored by a device: {stored:,} bytes; sent in a step: {sent_bytes:,}")
print("losses:", ", ".join(f"{loss:.4f}" for loss in trained(program)))

# %% [markdown]
# Fix the program: a device may store a quarter of the weights and 1% more, and the losses must stay those
# of one device.


# %% tags=["hide-input"]
@cache
def losses_alone(steps=3):
    """The same training on one device, without any sharding."""

    def loss(w, tokens_BT, targets_BT):
        x = w["embed_VD"][tokens_BT]
        logits = (x + jnp.tanh(x @ w["up_DF"]) @ w["down_FD"]) @ w["head_DV"]
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, targets_BT[..., None], -1))

    w, losses = START, []
    for _ in range(steps):
        value, d = jax.jit(jax.value_and_grad(loss))(w, *BATCH)
        w = jax.tree.map(lambda w, d: w - 0.5 * d, w, d)
        losses.append(float(value))
    return losses


# %% tags=["hide-input"]
def check_program(program):
    if program is None or program is ...:
        return lesson.NOTHING
    try:
        (stored, sent), losses = stored_and_sent(program), trained(program)
    except Exception as error:
        return lesson.stopped(error)
    text = f"{stored:,} bytes stored, {sent:,} sent"
    if not lesson.same(losses, losses_alone(), 1e-5):
        return f"{text}, but other losses. Which columns take part in the softmax?"
    if stored > 1.01 * quarter:
        return f"{text}. Print the sharding of each weight: `x.sharding.spec`."
    return f"Fixed: {text}, and the losses match a single-device run."


# %% tags=["hide-output"]
print(check_program(program))

# %% [markdown]
# <details><summary>Solution</summary>
#
# 2,050 is not divisible by 4. `with_sharding_constraint` inside `jit` then gives up silently: both tables
# are replicated on all devices, and their gradients are all-reduced in full. `jax.device_put` with the
# same sharding raises an error. The thread [jax#26946](https://github.com/jax-ml/jax/issues/26946) (2025,
# still open in 2026) found it with an embedding table. Nothing in a training run looks wrong, because the
# result is right. GPT-2's 50,257 words are odd, so its table can be sharded over no power of two.
#
# Two fixes. Pad the vocabulary to 2,052, and leave the two extra columns out of the softmax:
#
# ```python
# "embed_VD": logical(jnp.pad(START["embed_VD"], ((0, 2), (0, 0))), "vocabulary", None),
# "head_DV": logical(jnp.pad(START["head_DV"], ((0, 0), (0, 2))), None, "vocabulary")}
# ...
# logits_BTV = jnp.where(jnp.arange(2052) < VOCABULARY, logits_BTV, -1e9)
# ```
#
# Or shard the other dim of both tables, which is divisible, at the price of an all-reduce of the logits.
# To notice it: compare the bytes that a device stores with your arithmetic, for each array.
# </details>

# %% tags=["remove-cell"]
TABLES = ("vocabulary", None), (None, "vocabulary")


def variant(padding=0, masked=False, tables=TABLES):
    def start():
        w = initial_weights()
        embed = jnp.pad(START["embed_VD"], ((0, padding), (0, 0)))
        head = jnp.pad(START["head_DV"], ((0, 0), (0, padding)))
        w["embed_VD"] = logical(embed, *tables[0])
        w["head_DV"] = logical(head, *tables[1])
        return w

    def loss(w, tokens_BT, targets_BT):
        x_BTD = logical(w["embed_VD"][tokens_BT], "batch", None, None)
        hidden_BTF = logical(jnp.tanh(x_BTD @ w["up_DF"]), "batch", None, "hidden")
        x_BTD = logical(x_BTD + hidden_BTF @ w["down_FD"], "batch", None, None)
        logits_BTV = x_BTD @ w["head_DV"]
        if masked:
            is_token = jnp.arange(VOCABULARY + padding) < VOCABULARY
            logits_BTV = jnp.where(is_token, logits_BTV, -1e9)
        right = jax.nn.one_hot(targets_BT, logits_BTV.shape[-1])
        own_BT = jnp.sum(logits_BTV * right, axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - own_BT)

    def program():
        w = jax.jit(start)()
        return w, compiled_step(loss, w)

    return program


other_dim = variant(tables=((None, "hidden"), ("hidden", None)))
lesson.expect(check_program, (program, "Print the sharding"),
              (variant(2, masked=True), "Fixed"),
              (other_dim, "Fixed"), (variant(2), "softmax"),
              (lambda: 1 / 0, "It stops: ZeroDivisionError"))  # fmt: skip

# %% [markdown]
# ## In one table
#
# | | constraints | explicit sharding | shard_map |
# |---|---|---|---|
# | axis type | `Auto` | `Explicit` | any; manual inside |
# | you write | the program of one device, and constraints | the same, and `out_sharding` where it is ambiguous | the program of a device, and its collectives |
# | who chooses collectives | the partitioner | the partitioner, from your types | you |
# | sharding known | after compiling | while tracing, `jax.typeof(x)` | while tracing |
# | a mistake shows as | more bytes | an error, or more bytes | an error or a wrong result |
# | PyTorch | DTensor with `parallelize_module` | DTensor placements | `torch.distributed` calls |
# | Megatron | | | its column- and row-parallel layers |
#
# ## Three lines to keep
#
# 1. Under `jit` a sharding is an annotation: it never changes the result, only what is stored and sent.
# 2. The partitioner is good at single matmuls, and on TPU it even overlaps them. It does not invent ring
#    attention or a pipeline.
# 3. Count the bytes of every compiled program, because a missing constraint changes nothing else.
#
# **Sources.** T5X, [arXiv:2203.17189](https://arxiv.org/abs/2203.17189), section 2.2. GSPMD,
# [arXiv:2105.04663](https://arxiv.org/abs/2105.04663). JAX, [Explicit
# sharding](https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html) and [shard_map
# ](https://docs.jax.dev/en/latest/notebooks/shard_map.html). Overlapping collectives with matmuls in the
# compiler, Wang et al., [ASPLOS 2023](https://dl.acm.org/doi/10.1145/3567955.3567959).
