# %% [markdown]
# # 06 · Pipelines
#
# **Question.** A model's layers are cut into four groups, a device for each. A group needs what the group
# before it made. How do all four devices work at once, and how much waiting is left?
#
# **Why it hurts not to know.** Cut without more ado, four devices are as fast as one. And a pipeline calls
# its backward passes itself, where otherwise `jax.grad` would: the program at the end of this page prints
# the right loss, trains, and its gradient is wrong.
#
# *Before this:* 03 (`shard_map`, the six collectives), 04, 05. *Mesh:* `stage=4`, then
# `stage=2,fsdp=2,tensor=2`, simulated. *Runs in* 45 s on 2 cores.

# %%
import utils

utils.simulate_devices(8)

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import pipeline
import sharding
from chapters import lesson
from pipeline import check, draw, schedules, ticks
from sharding import STAGE

# %% [markdown]
# ## One at a time
#
# Four layers `x + tanh(x @ w)`, one for each device along the mesh axis `stage`, and 32 rows to send through
# them. Letters as in `pipeline/schedules.py`: S stages, M microbatches. Here N rows of width D are worked on
# together.

# %%
S, ROWS, D = 4, 32, 24
mesh = sharding.make_mesh(f"stage={S}")
rng = np.random.default_rng(0)
w_LDD = np.float32(rng.normal(size=(S, D, D)) / np.sqrt(D))
x_RD = np.float32(rng.normal(size=(ROWS, D)))


def layers(w_lDD, x_ND):
    for w_DD in w_lDD:
        x_ND = x_ND + jnp.tanh(x_ND @ w_DD)
    return x_ND


alone_RD = layers(w_LDD, x_RD)  # one device, all layers, all rows

# %% [markdown]
# One program runs on all devices, so what a device does has to be data: a table with a row for each *tick*
# and a column for each stage. An entry names the microbatch to work on (for now there is one, 0); -1 means
# idle. In each tick a device looks up its entry and works or does not (`lax.cond`). Then all devices `shift`:
# each sends its result to the next along `stage`, the last to the first, by one `ppermute`.


# %%
import sockets


def follow(table, shift_if_busy=False):
    """Compile fn(w_LDD, x_MND) -> what stages made, [stage, tick, N, D]."""

    def device(w_lDD, x_MND):  # x whole on each device: only stage 0 reads it
        here = sharding.axis_index(STAGE)
        x_MND = sharding.vary(x_MND, STAGE)  # a type: may differ between stages
        none_ND = jnp.zeros_like(x_MND[0])

        def tick(inbox_ND, row):
            m = row[here]
            work = lambda: layers(w_lDD, jnp.where(here == 0, x_MND[m], inbox_ND))
            y_ND = jax.lax.cond(m >= 0, work, lambda: none_ND)
            shift = lambda: sharding.shift(y_ND, STAGE)
            if shift_if_busy:
                return jax.lax.cond(m >= 0, shift, lambda: none_ND), y_ND
            return shift(), y_ND

        return jax.lax.scan(tick, none_ND, jnp.array(table))[1][None]

    return sockets.on_mesh(device, mesh, "lDD", "MND", out="lTND")


# %%
def busy(y_STND):
    """Who made something in which tick, by the program's own results. [stage, tick]"""
    return np.any(np.asarray(y_STND) != 0, axis=(2, 3))


naive = [[0, -1, -1, -1], [-1, 0, -1, -1], [-1, -1, 0, -1], [-1, -1, -1, 0]]
for shift_if_busy in (False, True):
    y_STND = follow(naive, shift_if_busy)(w_LDD, x_RD[None])
    print("shift if busy:" if shift_if_busy else "all shift:")
    for s, worked in enumerate(busy(y_STND)):
        print(f"stage {s}  ", *("made" if one else "  . " for one in worked))
    assert lesson.same(y_STND[-1, -1], alone_RD) != shift_if_busy

# %% [markdown]
# Where all shift, the result is one device's, and so is the time: three of four devices wait, always. With
# the shift in the branch nothing stops, and nothing arrives in time: stage 1 receives when it takes part, at
# the end of its own tick, and has worked on an empty inbox by then. A collective needs all its partners in
# the same tick, idle ones too.
#
# ## Microbatches
#
# Rows do not need each other. So cut the 32 rows into M = 8 microbatches of N = 4, and let a stage begin the
# next one while its neighbour works on the last. The project writes such a table; the program stays.
#
# > **Predict.** How many ticks do 8 microbatches take to pass through 4 stages?

# %%
M = 8
my_prediction = None  # ticks


def forward_table(S, M):
    placed = schedules.forward_only(schedules.gpipe(S, M)).table
    return [[cell[0].microbatch if cell else -1 for cell in row] for row in placed]


passing, x_MND = follow(forward_table(S, M)), x_RD.reshape(M, -1, D)
(message,) = lesson.compiled(passing, mesh, w_LDD, x_MND).collectives
assert message.kind == "collective-permute" and message.payload_bytes == x_MND[0].nbytes
lesson.predicted("messages of a device, one a tick", my_prediction, message.count)
y_STND = passing(w_LDD, x_MND)
assert message.count == y_STND.shape[1]
assert lesson.same(y_STND[-1][busy(y_STND)[-1]].reshape(ROWS, D), alone_RD)

# %% mystnb={"image": {"alt": "Above, four long boxes one after the other; below, four staggered rows of short ones."}}
figure, axes = plt.subplots(2, figsize=(5, 3.6), sharex=True)
blue = "#4c78a8"  # on this page: forward passes
for ax, M_, table in zip(axes, (1, M), (naive, forward_table(S, M)), strict=True):
    long = M / M_  # units that a microbatch takes
    for t, row in enumerate(table):
        for s, m in enumerate(row):
            if m >= 0:
                ax.barh(s, long, left=t * long, color=blue, edgecolor="w")
                ax.text((t + 0.5) * long, s, m, ha="center", va="center", color="w")
    title = f"{M_} x {ROWS // M_} rows: {len(table) * long:g} units"
    ax.set(yticks=range(S), ylabel="stage", title=title)
    ax.invert_yaxis()
axes[1].set(xlabel=f"time, in passes of {ROWS // M} rows through a stage")
title = "In parts, the same rows take a third of the time"
title = figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# The picture takes 4 rows to need an eighth of the time of 32, which holds until a microbatch is too small to
# fill a device. The last microbatch enters in tick M - 1, and S - 1 more stages follow. Each stage works in M
# of these M + S - 1 ticks, so the share in which it waits, the *bubble*, is (S - 1)/(M + S - 1): here 3/11,
# or 27%. How long a layer takes does not matter, as long as all stages take the same. With M = 4S the bubble
# falls below a fifth; the authors of [GPipe](https://arxiv.org/abs/1811.06965) found it negligible from there
# on.
#
# ## What has to be kept
#
# Training adds backward passes, which visit the stages in the other order. What a backward pass needs of its
# forward pass lies in memory until then. `jax.grad` of the loop above would run its ticks backward, after all
# forward passes: that is GPipe. Other orders need less memory or less time, and have to be written down. A
# *schedule* is no more than that: an order of operations for each stage. F3 is the forward pass of microbatch
# 3, B3 its backward pass.
#
# A backward pass makes two gradients, each about as much work as the forward pass: that of the inputs, for
# which the stage before waits, and that of the weights, for which nobody waits. Let F, B and W be the times
# of the three, all 1 at first. Below, B3 is both gradients, and takes B + W = 2.

# %%
gpipe, one_f_one_b = schedules.gpipe(S, M), schedules.one_f_one_b(S, M)
print(draw.text(gpipe), end="\n\n")
print(*(" ".join(map(str, order)) for order in one_f_one_b.orders), sep="\n")
for sched in (gpipe, one_f_one_b):
    one = schedules.simulate(sched, F=1, B=1, W=1)
    says = f"time {one.makespan:g}, idle {one.bubble:.1%}, keeps {one.live}"
    print(f"{sched.name}: {says}")

# %% [markdown]
# The table is GPipe, in ticks, not in time: all forward passes, then all backward passes; every stage keeps
# what all M of them need. The list, a line a stage, is 1F1B: after a few forward passes one forward, one
# backward in turn. It keeps 4, 3, 2 and 1, for any M. (Stage 0 keeps S microbatches of an S-th of the layers:
# as much as one microbatch on a device with the whole model.) The times are from
# `pipeline.schedules.simulate`: a stage goes on as soon as its input is there.
#
# 1F1B is *not* faster. It waits as long as GPipe, elsewhere. Beside its own work, M(F + B + W), what must a
# stage wait for, at least?
#
# - **GPipe, 1F1B.** The first microbatch reaches the last stage after S - 1 forward passes, and the last
#   gradient comes back over S - 1 backward passes: (S - 1)(F + B + W).
# - **Interleaved.** Each stage has v thin *chunks* of layers: with v = 2, stage 0 of 4 has the first and the
#   fifth eighth. A microbatch goes from the last stage to the first again, v times around. The first passes
#   are v times shorter: (S - 1)(F + B + W)/v. The price is v times the messages, and more is kept.
# - **Zero-bubble.** A stage sends the gradient of the inputs back first, and makes that of the weights where
#   it would be idle. The way back takes B, not B + W, and W fills a gap of up to F: (S - 1)(F + B - min(F,
#   W)).


# %%
def waits(name, S, v, F, B, W):
    return (S - 1) * (F + B - min(F, W) if name == "zb" else (F + B + W) / v)


sizes, times = ((2, 4), (4, 8), (4, 20), (8, 16)), ((1, 1, 1), (2, 3, 1), (1, 2.5, 1.5))
for name in schedules.SCHEDULES:
    for S_, M_ in sizes:
        for F, B, W in times:
            for v in (1, 2, 4) if name == "interleaved" else (1,):
                sched = schedules.schedule(name, S_, M_, v)
                wanted = M_ * (F + B + W) + waits(name, S_, v, F, B, W)
                assert np.isclose(schedules.simulate(sched, F, B, W).makespan, wanted)
print(f"{len(sizes) * len(times)} cases each of {[*schedules.SCHEDULES]}: as derived")
for name, v in (("1f1b", 1), ("interleaved", 2), ("zb", 1)):
    keeps = np.array(schedules.live(schedules.schedule(name, S, M, v))) / v
    print(f"{name} keeps {keeps}, in microbatches through a stage")

# %% mystnb={"image": {"alt": "Four timelines: GPipe and 1F1B end at 33, interleaved at 28.5, zero-bubble at 27."}}
SAYS = {
    "gpipe": "GPipe, all forward passes first",
    "1f1b": "1F1B waits as long, keeps less",
    "interleaved": "Interleaved (light: second chunk)",
    "zb": "Zero-bubble, weight gradients fill gaps",
}
figure, axes = plt.subplots(4, figsize=(5, 8.2), sharex=True)
for ax, (name, says) in zip(axes, SAYS.items(), strict=True):
    sched = schedules.schedule(name, S, M, 2 if name == "interleaved" else 1)
    draw.paint(ax, sched, 1, 1, 1, inches=4.4)
    units = schedules.simulate(sched, 1, 1, 1).makespan
    ax.set(title=f"{says}: {units:g} units", xlabel="", xlim=(0, 33))
axes[-1].set(xlabel="time, in forward passes of a stage; F = B = W = 1")
handles, _ = axes[-1].get_legend_handles_labels()
labels = ["forward", "backward", "weights, where apart"]
legend = figure.legend(handles, labels, ncols=3, loc="outside lower center")

# %% [markdown]
# ## One program: everyone waits for everyone
#
# The published schedules assume a program for each stage, which sends and goes on. JAX compiles *one* program
# for all devices, and there each tick ends with the shifts that all take part in: nobody begins the next one
# before its neighbours' messages are there. In a tick a stage does at most one F, then one B. What it sends
# is there in the next tick. GPipe does not mind: 33 as before.
#
# > **Predict.** How long does 1F1B take in this lock-step, with F = B = W = 1? (33 without.)


# %%
def clocks(sched, F=1, B=1, W=1):
    """A clock on each stage: in every tick it waits for both neighbours, then works."""
    cost, clock_S = {"F": F, "B": B, "W": W}, np.zeros(sched.stages)
    if not sched.splits_backward:
        cost["B"] = B + W
    for row in sched.table:
        ready_S = np.max([np.roll(clock_S, 1), clock_S, np.roll(clock_S, -1)], axis=0)
        clock_S = ready_S + [sum(cost[op.kind] for op in cell) for cell in row]
    return clock_S.max()


my_prediction = None  # forward passes of a stage
assert clocks(gpipe) == 33
counted = int(clocks(one_f_one_b))
lesson.predicted("1F1B in lock-step", my_prediction, counted, "units")
assert counted == schedules.lock_step(one_f_one_b, 1, 1, 1) == 48  # all wait for all

# %% [markdown]
# The schedule that replaced GPipe takes half as long again. Look at stage 0, a column a tick:

# %%
print(draw.text(one_f_one_b), "\n")
for many in (8, 64, 256):
    sched = schedules.one_f_one_b(S, many)
    factor = clocks(sched) / schedules.simulate(sched, 1, 1, 1).makespan
    print(f"M = {many:3}: in lock-step {factor:.2f} times as long")

# %% [markdown]
# F0 is in tick 0. Its message needs 3 ticks to the last stage, and its gradient 3 ticks back: B0 is in tick
# 6. Until then stage 0, as published, may have 4 microbatches under way, so F4 waits until tick 7. So 4
# microbatches pass in 7 ticks, and each of these ticks lasts F + B + W, since some stage does all three. The
# more microbatches, the nearer the factor comes to 7/4; with S stages, to (2S - 1)/S.
#
# The remedy follows: for a microbatch in every tick, 7 have to be under way. With `lead=2` each stage is
# twice as far ahead of the next as published, and in the middle every tick holds an F and a B on all stages.
# This is the table that the project runs.

# %%
ahead = schedules.one_f_one_b(S, M, lead=2)
print(draw.text(ahead), "\n")
for sched in (gpipe, one_f_one_b, ahead):
    lock, alone = clocks(sched), schedules.simulate(sched, 1, 1, 1).makespan
    kept_by = schedules.live(sched)
    print(f"{sched.name:5} lock-step {lock:g}, alone {alone:g}, keeps {kept_by}")

# %% mystnb={"image": {"alt": "1F1B in ticks: as published half empty, to 48; with twice the lead full, to 33."}}
PASS = {"F": (1, blue), "B": (2, "#f2a33a")}  # how long, and a colour
figure, axes = plt.subplots(2, figsize=(5, 4.2), sharex=True)
titles = ("As published, somebody waits in every tick", "Twice as far ahead")
for ax, sched, title in zip(axes, (one_f_one_b, ahead), titles, strict=True):
    start = 0
    for row in sched.table:
        ends = [start] * S
        for s, cell in enumerate(row):
            for op in cell:
                long, colour = PASS[op.kind]
                ax.barh(s, long, left=ends[s], color=colour, edgecolor="w")
                ends[s] += long
        start = max(ends)
        ax.axvline(start, color=lesson.NEUTRAL, linewidth=0.6)
    ax.set(yticks=range(S), ylabel="stage", title=f"{title}: {start} units")
    ax.invert_yaxis()
axes[0].text(8, 0, "waits\nfor B0", ha="center", va="center", size=8)
axes[1].set(xlabel="time; blue: forward, orange: backward, grey: end of a tick")

# %% [markdown]
# The price is memory: 7 microbatches kept instead of 4. The zero-bubble schedule loses something else. It
# fills the gaps of some stages, and a tick lasts as long as that of the stage that does most:

# %%
zb = schedules.zero_bubble(S, M, lead=2)
base = schedules.simulate(ahead, 1, 1, 1).makespan
saved = base - schedules.simulate(zb, 1, 1, 1).makespan, base - clocks(zb)
print(f"zero-bubble saves {saved[0]:g} of {base:g} alone, {saved[1]:g} in lock-step")
assert saved == (6, 3)

# %% [markdown]
# A runtime that starts a program for each stage does not have to wait in lock-step, and pays with a scheduler
# on the hosts: Megatron-LM and PyTorch work so, and [JaxPP](https://arxiv.org/abs/2412.14374) for JAX.
#
# ## The real thing
#
# `pipeline.schedules.rows` turns an order into what the program reads: for each tick and stage which
# microbatch, and which slot of three buffers to read and write. `inbox` holds activations that have arrived,
# `kept` what backward passes need, `cotangents` gradients that have arrived. A wrong entry reads another
# microbatch's array, of the right shape, and nothing would stop. So `pipeline.check.check` follows the rows
# with labels in place of arrays. Change one entry:

# %%
table, slots = schedules.rows(ahead)
check.check(ahead)
print("backward_kept of all stages, tick 7:", table.backward_kept[7])
damaged = table.backward_kept.copy()
damaged[7, 1] = 3
wrong = table._replace(backward_kept=damaged)
try:
    check.check(ahead, (schedules.Rows(*(x.astype(object) for x in wrong)), slots))
except ValueError as error:
    print(error)
print(slots)
assert slots.kept == max(schedules.live(ahead))

# %% [markdown]
# (What is kept of microbatch 3, chunk 0, lies where B2 reads.) `slots` is the same for all stages. Stage 3
# keeps one microbatch and has seven slots: one program has one size of buffer. In lock-step, memory too is
# that of the neediest stage.
#
# Now the tick of the trainer, the toy's with more in it: `own` is this stage's entry in each table, `job`
# what never changes, `carry` the three buffers, the loss and the gradients.

# %%
lesson.source(ticks.forward_slot, ticks.passed, ticks.run_ticks)

# %% [markdown]
# `ticks.forward` runs the layers under `jax.vjp` and keeps what the backward pass will read; `backward_slot`
# calls it. Logits are much work (in Llama 3 8B, below, that of 2.4 layers), and were the last stage to make
# them alone, all would wait for it. So `loss_slot` cuts its activations into S shares, one for each stage.
# Two things make the branches legal in one program:
#
# - Which branch a device takes depends on its *stage* alone. Its neighbours along `fsdp` and `tensor` take
#   the same one, so the collectives inside a layer find all their partners.
# - Both shifts stand outside of the branches. A device without work sends zeros, and the receiver's row says
#   to put them nowhere.
#
# The claim, as in every chapter: the mesh changes where, not what. We take a dense model of 4 layers, and a
# batch in which 30% of the targets do not count.

# %%
import dataclasses

import config
import model

DENSE = {"model.n_experts": 0, "model.dense_prefix": 0, "model.n_layers": 4,
         "model.attention": "gqa", "model.no_rope_every": 0, "model.d_model": 64,
         "work.remat": "full"}  # fmt: skip


def settings(mesh="data=1", schedule="gpipe", M=1, batch=16):
    work = {"mesh": mesh, "work.schedule": schedule, "work.microbatches": M}
    return config.preset("tiny", **DENSE | work | {"data.batch_size": batch})


# %%
def batch_of(cfg):
    shape, rng = (cfg.data.batch_size, cfg.data.seq_len), np.random.default_rng(1)
    numbers = lambda: rng.integers(0, cfg.model.vocab_size, shape, dtype=np.int32)
    real = np.float32(rng.random(shape) < 0.7)  # 1 where a target counts
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    segments = np.ones(shape, np.int32)  # one document a row
    return {"tokens_BT": numbers(), "targets_BT": numbers(), "weights_BT": real,
            "positions_BT": positions, "segments_BT": segments}  # fmt: skip


# %%
declared = model.declare(settings().model)
rng = np.random.default_rng(2)
draw_one = lambda d: np.float32(d.mean + d.std * rng.normal(size=d.shape))
drawn = jax.tree.map(draw_one, declared)


def compile_step(cfg):
    """The compiled step, and the arrays it takes, laid on its mesh."""
    mesh = sharding.make_mesh(cfg.mesh)
    where = jax.tree.map(lambda d: jax.NamedSharding(mesh, d.spec), declared)
    args = jax.device_put(drawn, where), sharding.put(batch_of(cfg), mesh), 0
    return pipeline.loss_and_grads(cfg, mesh).lower(*args).compile(), args


def compare(cfg):
    program, args = compile_step(cfg)
    loss, _, grads = jax.block_until_ready(program(*args))
    ratio = lesson.ratio(grads, GRADS)
    print(f"{cfg.mesh}, {cfg.work.schedule}: loss {loss:.5f}, gradient {ratio}")
    assert lesson.same((loss, grads), (LOSS, GRADS))
    return program


# %%
program, args = compile_step(settings())
LOSS, _, GRADS = jax.tree.map(np.asarray, program(*args))
print(f"one device, all layers: loss {LOSS:.5f}")
gpipe_8 = compare(settings("stage=4", "gpipe", 8))

# %% [markdown]
# ## What it keeps, measured
#
# A microbatch here is 2 sequences of 18 positions, width 64, float32: x = 2 * 18 * 64 * 4 = 9,216 bytes. Each
# stage has one layer, and with `remat=full` only a layer's input is kept for the backward pass. So each slot
# of each of the three buffers is one x. The loss of a microbatch, and the gradient that the backward passes
# begin with, are made as soon as it leaves the last stage.
#
# > **Predict.** GPipe with 8 microbatches, then with 32 of the same size. By how many bytes does the
# > compiler's temporary memory of a device grow? (Which buffers grow?)

# %%
my_prediction = None  # bytes
temp = lambda program: program.memory_analysis().temp_size_in_bytes
gpipe_32, _ = compile_step(settings("stage=4", "gpipe", 32, batch=64))
grown = temp(gpipe_32) - temp(gpipe_8)
lesson.predicted("temporary memory grows by", my_prediction, grown, "bytes")
x = 2 * 18 * 64 * 4
each = grown / 24
print(f"a microbatch more: {each:,.0f} bytes = 2 x + {each - 2 * x:.0f}")
assert 0 < each - 2 * x < 32 * 2 * 18  # bytes a token

# %% [markdown]
# Papers count activations: 24 x = 221,184 bytes. The program takes twice that, and a little more for the
# microbatch's tokens. The second x is the loss's gradient. In GPipe it waits until all forward passes are
# done, so there are M of them: one stage needs them, and all have the buffer.
#
# 1F1B reads both soon after they are written. With four times the microbatches it needs less than the first
# GPipe:

# %%
ahead_32, _ = compile_step(settings("stage=4", "1f1b", 32, batch=64))
measured = ("gpipe", 8, gpipe_8), ("gpipe", 32, gpipe_32), ("1f1b", 32, ahead_32)
for name, many, program in measured:
    _, slots = schedules.rows(schedules.schedule(name, 4, many, lead=2))
    print(f"{name:5} M = {many:2}: {temp(program):7,} bytes, {slots}")
assert temp(ahead_32) < temp(gpipe_8)

# %% [markdown]
# ## What it sends
#
# The same batch on three axes: 2 stages of 2 layers, each weight sliced in 2, each matrix product cut in 2. A
# microbatch is 4 sequences now. Cut along `fsdp`, and its positions along `tensor`, it is 2 * 9 * 64 * 4 =
# 4,608 bytes. The ledger reads the compiled step; a branch counts as often as it has work, here for 4
# microbatches in 6 ticks.

# %%
from plan import compiled

cfg = settings("stage=2,fsdp=2,tensor=2", "1f1b", 4)
text = compare(cfg).as_text()
shares = compiled.shares(cfg, text)
found = lesson.ledger.read(text, sharding.make_mesh(cfg.mesh), shares)
for axis in ("fsdp", "tensor", "stage"):
    one = found.by("axes")[axis]
    sent = f"a device sends {one.wire_bytes:7,.0f} bytes"
    print(f"{axis:6} {one.count:3.0f} collectives, {sent}")
along = [one for one in found.collectives if one.axes == (STAGE,)]
lesson.listed(dataclasses.replace(found, collectives=along))
assert sum(one.count for one in along if one.kind == "collective-permute") == 12

# %% [markdown]
# Of the 109,568 bytes along `stage` half are messages between layers: 2 in each of 6 ticks, however many
# layers a stage has. The rest is the loss that all stages share, and the gradients of the two vocabulary
# tables, which every stage holds. Along `tensor` and `fsdp` every layer sends. The bytes along `fsdp` are
# those of weights, whatever the batch, but *each microbatch gathers them anew*. (`gather=step` gathers once,
# and keeps them.)
#
# ## When it pays
#
# A stage's messages are small and seldom, so it belongs on the slowest wire. Let two groups of g devices be
# joined by one; P parameters, N tokens a step, width D. What does a device send over it?
#
# - `data=2`: its slice of the gradients is summed with its twin's, in float32: 4P/g bytes.
# - `stage=2`: a vector of width D for each of N/g tokens, forward, and as much back. In lock-step every
#   device shifts both ways in every tick, zeros too. In bfloat16: 2 * 2 N D/g bytes.
#
# So a pipeline sends less while **N D < P**: while one layer's activations for the whole batch are fewer than
# the parameters. (If only who has something sends, a stage sends one way: N D < 2P.) It pays with its bubble.
# The planner counts all of it, here for Llama 3 8B on two nodes of 8 H100s. The network between them is slow:
# 100 Gbit/s, which the 8 share. Each device takes one sequence of 8,192 tokens at a time.

# %%
from plan import hardware, planner

slow = dataclasses.replace(hardware.CHIPS["h100"], dcn_bytes_per_s=12.5e9 / 8)
NODES = hardware.Topology(slow, (16,), 16, hosts=2)


def planned(mesh, batch=32, on=NODES, **more):
    work = {"mesh": mesh, "data.batch_size": batch, "work.device_batch": 1}
    work |= {"work.remat": "full", "work.gather": "layer"}
    work |= {"work.tensor_exchange": "ring"}
    more = {"work.schedule": "1f1b"} | more
    return planner.plan(config.preset("llama3_8b", **work | more), on)


def show(one):
    parts = [f"{name} {s:.2f}" for name, s in one.seconds().items() if s > 0.01]
    M_ = f" M={one.sched.microbatches}" if one.cfg.mesh.stage > 1 else ""
    GiB = f"{one.peak_bytes / 2**30:.0f} GiB"
    print(f"{one.cfg.mesh!s:14} {one.step_s:.2f} s: {', '.join(parts)}; {GiB}{M_}")


# %%
whole = planned("fsdp=16")
P_, c = whole.params_total, whole.cfg.model
table_VD = c.vocab_size * c.d_model
print(f"P / D = {P_:,} / {c.d_model:,} = {P_ / c.d_model / 1e6:.2f} million tokens")
layer = (P_ - 2 * table_VD) / c.n_layers
print(f"logits are as much work as {table_VD / layer:.1f} layers")
for batch in (32, 128):
    print(f"{batch * 8192:,} tokens a step")
    show(planned("data=2,fsdp=8", batch))
    show(planned("stage=2,fsdp=8", batch))
print("along stage, the last of these:")
for one in planned("stage=2,fsdp=8", 128).traffic:
    if one.axes == (STAGE,):
        GB = one.wire_bytes / 1e9
        print(f"  {one.part:11} {one.count:2} {one.kind:18} {GB:.2f} GB")

# %% mystnb={"image": {"alt": "Seconds a token against tokens a step: stage=2 is faster at left, data=2 at right."}}
figure, axes = plt.subplots(figsize=(5, 3.8))
sizes = np.array([16, 32, 48, 64, 80, 96, 128, 160, 192, 256])
millions, seconds = sizes * 8192 / 1e6, {}
for axis in ("data", "stage"):
    plans = [planned(f"{axis}=2,fsdp=8", int(batch)) for batch in sizes]
    seconds[axis] = np.array([one.step_s for one in plans])
    colour = lesson.COLOURS[axis]
    axes.plot(millions, seconds[axis] / millions, color=colour, label=f"{axis}=2")
gap = seconds["stage"] - seconds["data"]
print(f"equal at {np.interp(0, gap, millions):.2f} million tokens")
axes.axvline(P_ / c.d_model / 1e6, color=lesson.NEUTRAL, linewidth=0.8)
axes.text(1.94, 1, "N D = P", ha="right", color=lesson.NEUTRAL)
axes.set(xlabel="tokens a step, millions", ylabel="seconds a million tokens", ylim=0)
axes.set(title="Over a slow wire, a pipeline wins while the batch is small")
legend = axes.legend(loc="upper center")

# %% [markdown]
# The lines cross at 0.88M tokens, not at 1.96M. At 1.05M a stage sends 4.0 GB, of which the rule has half: 4
# N D/g is 2.1 GB. The shared loss adds 1.07 GB, the tables' gradients 0.53 GB, the ticks at both ends the
# rest. And the bubble takes 0.32 s, at any batch: it is the time of S - 1 microbatches, however many there
# are. (Nothing is hidden behind products here: the planner knows what a TPU's compiler hides, and no GPU's.)
#
# All this is the slow wire's. Now with 400 Gbit/s for each GPU, the planner's default for H100, and inside of
# one node:

# %%
for on, splits in {
    "h100:16": ("data=2,fsdp=8", "stage=2,fsdp=8", "fsdp=16"),
    "h100:8": ("fsdp=8", "stage=2,fsdp=4"),
}.items():
    print(on)
    for split in splits:
        show(planned(split, on=on))

# %% [markdown]
# So, as a rule:
#
# - **Stages between groups that a slow wire joins**, if N D is well below P. On a fast wire the bubble is all
#   that they add. (Measured with nodes of 8 GPUs in the [Ultra-Scale
#   Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook): from one node to two, a pipeline of
#   few microbatches lost 14% of its speed, tensor parallelism about 43%.) These groups are nodes of GPUs.
#   Between TPU slices only `data` may lie: `sharding.make_mesh` refuses any other axis there.
# - **Not for memory alone.** `fsdp` slices parameters, gradients and optimizer as finely: 14 GiB against 15,
#   and 22 against 24. It slices the vocabulary tables too, and keeps one microbatch at a time.
# - **Not with few microbatches.** With M = S = 4 the bubble is 3/7 of the time. Either S is small, or M is
#   4S.
#
# What simulated devices cannot show: time. They share this machine's cores, so while one waits another works,
# and a step's seconds follow the work of all, not the makespan. Bubbles here are arithmetic on tables; ticks,
# messages, bytes and memory are the compiler's.
#
# ## Exercise 1: the missing stage
#
# 1F1B as published, 4 stages and 6 microbatches; the order of stage 1 is lost. Write it down.


# %%
def stage_1():
    return ...  # such as "F0 B0 F1 B1 .."


def outcome(order, S=4, M=6):
    """Makespan, and what stage 1 keeps, if it does its operations in this order."""
    published = schedules.one_f_one_b(S, M)
    ops = tuple(schedules.Op(word[0], int(word[1:])) for word in order.split())
    orders = (published.orders[0], ops, *published.orders[2:])
    sched = dataclasses.replace(published, orders=orders)
    check.check(sched)
    return schedules.simulate(sched, 1, 1, 1).makespan, schedules.live(sched)[1]


# %%
order_of = lambda s: " ".join(map(str, schedules.one_f_one_b(4, 6).orders[s]))


def deadlock(words):
    """Why an order cannot be done."""
    first = next(n for n, word in enumerate(words) if word[0] == "B")
    if first == 1:
        return "Deadlock: B0 waits for stage 2, which wants F1 before it sends any."
    if first > 4:
        return "Deadlock: F4 waits for stage 0, which wants B0 before it sends F4."
    return "Deadlock: gradients come as B0, B1, B2, .., forward passes as F0, F1, .."


# %%
def check_stage(answer):
    text = answer()
    if not (isinstance(text, str) and text):
        return lesson.NOTHING
    words = text.split()
    if sorted(words) != sorted(order_of(1).split()):
        return "Each of F0 to F5 and B0 to B5 once, apart from each other."
    try:
        time, keeps = outcome(text)
    except ValueError:
        return deadlock(words)
    if (time, keeps) == (27, 3):
        return "Right: 27 units of time, and 3 kept."
    said = f"{time:g} units of time, and {keeps} kept. "
    if keeps > 3:
        return said + "Each F comes later than you want it. Whose order is this?"
    return said + "Late. What fits in while a gradient is on its way?"


print(check_stage(stage_1))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `"F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"`. Two stages follow, so two more forward passes begin before B0 is
# there: S - 1 - s of them. Then one forward, one backward in turn. An order that cannot work stops in
# `check`: a deadlock, found before any device hangs.
# </details>

# %% tags=["remove-cell"]
said = lambda answer: check_stage(lambda: answer)
assert said("F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5").startswith("Right: 27 units")
assert said(order_of(0)).startswith("30 units") and "Whose order" in said(order_of(0))
assert said(order_of(2)).startswith("39 units") and "Late" in said(order_of(2))
assert "F1 before" in said(order_of(3))
assert "wants B0" in said("F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5")
assert "wants B0" in said("F0 F1 F2 F3 F4 F5 B5 B4 B3 B2 B1 B0")
assert "gradients come" in said("F0 F1 F2 B2 F3 B1 F4 B0 F5 B3 B4 B5")
assert "gradients come" in said("B0 F0 F1 F2 B1 F3 B2 F4 B3 F5 B4 B5")
assert said("F0 F1 F2 B0 B1 F3 F4 B2 B3 F5 B4 B5").startswith("33 units")
for odd in ("F0 F1 B0", "huh", "F0,F1", "f0 f1", order_of(1) + " B5"):
    assert "Each of F0" in said(odd)
for nothing in (..., None, "", ["F0"]):
    assert said(nothing) == lesson.NOTHING

# %% [markdown]
# ## Exercise 2: how many slots
#
# In the lock-step table (`lead=2`), how many microbatches does stage s keep at most, with S stages and M
# microbatches? Above it is derived for stage 0. Which way has a microbatch of stage s to go?


# %%
def kept(S, M, s):
    return ...


def check_kept(answer):
    cases = [(4, 8, 0), (4, 8, 2), (8, 3, 1), (2, 16, 0), (8, 64, 3), (4, 8, 3)]
    right = lambda S, M, s: schedules.live(schedules.one_f_one_b(S, M, lead=2))[s]
    hints = {
        lambda S, s: S - s: "As published. In lock-step, how far is a gradient?",
        lambda S, s: 2 * (S - 1 - s): "Too few. And the last stage?",
        lambda S, s: 2 * (S - s): "Too many. In a tick, is F or B first?",
        lambda S, s: 2 * S - 1: "So many slots all have. Which are used?",
        lambda S, s: 2 * S - 1 - s: "The way begins at stage s. Where does it end?",
    }
    mistakes = [
        (lambda S, M, s: M, "That is GPipe's. When is the first of them read?"),
        (lambda S, M, s: 2 * (S - 1 - s) + 1, "Right for long batches. And M = 3?"),
        *((lambda S, M, s, f=f: f(S, s), hint) for f, hint in hints.items()),
        *((lambda S, M, s, f=f: min(f(S, s), M), hint) for f, hint in hints.items()),
    ]
    return lesson.diagnose(answer, cases, right, mistakes, "Right in all six cases.")


print(check_kept(kept))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return min(2 * (S - 1 - s) + 1, M)`. What stage s sends needs S - 1 - s ticks to the last stage, is turned
# into a gradient in that tick, and needs as many ticks back. In each of these the stage begins one more
# microbatch, and there is the first one itself.
# </details>

# %% tags=["remove-cell"]
right = check_kept(lambda S, M, s: min(2 * (S - 1 - s) + 1, M))
assert right == "Right in all six cases."
assert "GPipe" in check_kept(lambda S, M, s: M)
assert "published" in check_kept(lambda S, M, s: min(S - s, M))
assert "long batches" in check_kept(lambda S, M, s: 2 * (S - 1 - s) + 1)
assert "Too few" in check_kept(lambda S, M, s: min(2 * (S - 1 - s), M))
assert "Too many" in check_kept(lambda S, M, s: min(2 * (S - s), M))
assert "Which are used" in check_kept(lambda S, M, s: min(2 * S - 1, M))
assert "published" in check_kept(lambda S, M, s: S - s)
assert "Too few" in check_kept(lambda S, M, s: 2 * (S - 1 - s))
assert "Too many" in check_kept(lambda S, M, s: 2 * (S - s))
assert "Which are used" in check_kept(lambda S, M, s: 2 * S - 1)
assert "begins at stage s" in check_kept(lambda S, M, s: min(2 * S - 1 - s, M))
assert "Not yet" in check_kept(lambda S, M, s: 5)
assert "Nothing" in check_kept(lambda S, M, s: ...)

# %% [markdown]
# ## Exercise 3: design it
#
# The two nodes above with the slow wire, Llama 3 8B, 262,144 tokens a step. Both layouts of the planner's
# first lines are too slow: find one with a step of at most 2.45 s, in 40 GiB of each GPU. To choose: the mesh
# (16 devices), the schedule (`gpipe`, `1f1b` or `zb`), and how often weights are gathered (`layer` or
# `step`). Count what M is: how many sequences are there for each group of devices that share one?


# %%
START = {"mesh": "data=2,fsdp=8", "work.schedule": "1f1b", "work.gather": "layer"}


def design():
    return ...  # START, changed


TOO_SLOW = {
    "zb": "Products take {compute:.2f} s, 1.10 without zb: each half recomputes.",
    "data": "Gradients take {data:.2f} s between the nodes. What else could go there?",
    "fsdp": "Gathered weights take {fsdp:.2f} s. Do they have to leave the node?",
    "tensor": "Activations take {tensor:.2f} s along tensor. Is that axis too long?",
    "stage": "Messages of stages take {stage:.2f} s. How many stages need that wire?",
    "bubble": "Bubble {bubble:.2f} s. What makes M larger? What is gathered M times?",
}


def why_slow(one):
    s = one.seconds()
    if one.sched.name == "zb" and one.sched.stages > 1:
        return TOO_SLOW["zb"].format(**s)
    s["stage"] = s.get("stage", 0) * (one.sched.stages > 2)  # 2 cannot be fewer
    return TOO_SLOW[max(set(TOO_SLOW) & set(s), key=s.get)].format(**s)


# %%
def check_design(answer):
    chosen = answer()
    if chosen is None or chosen is ...:
        return lesson.NOTHING
    if not (isinstance(chosen, dict) and isinstance(chosen.get("mesh"), str)):
        return "Return settings as in START: a dict with a mesh."
    try:
        one = planned(**chosen)
    except (ValueError, TypeError) as error:
        return f"The planner refuses: {error}"
    said = f"{one.step_s:.2f} s, {one.peak_bytes / 2**30:.0f} GiB. "
    if one.peak_bytes > 40 * 2**30:
        part = max(one.memory_bytes, key=one.memory_bytes.get)
        return said + f"Too large: most of it is {part}. Which axes would divide that?"
    return said + ("That will do." if one.step_s <= 2.45 else why_slow(one))


print(check_design(design))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `{"mesh": "stage=2,fsdp=4,tensor=2", "work.schedule": "1f1b", "work.gather": "step"}`: 2.32 s, 31 GiB.
# With `fsdp=8` there are 8 groups on a stage, each with 4 of the 32 sequences, so M is 4. `tensor=2` inside a
# node leaves 4 groups of 8 sequences: M = 8, and half the bubble. It also halves what `gather=step` keeps,
# which was 55 GiB. `gpipe` is faster still by 0.04 s, for 33 GiB: its ticks send one message, not two, 18 in
# all and not 20. `zb` is slower: its two halves both recompute, and lock-step takes back half of what it
# saves.
# </details>


# %% tags=["remove-cell"]
def said(mesh, schedule="1f1b", gather="layer"):
    chosen = {"mesh": mesh, "work.schedule": schedule, "work.gather": gather}
    return check_design(lambda: ... if mesh is ... else chosen)


solved = said("stage=2,fsdp=4,tensor=2", gather="step")
assert solved == "2.32 s, 31 GiB. That will do.", solved
assert "2.27 s, 33 GiB. That" in said("stage=2,fsdp=4,tensor=2", "gpipe", "step")
assert "That will do" in said("stage=2,fsdp=2,tensor=4", gather="step")
assert "What else" in said("data=2,fsdp=8")
assert "What else" in said("data=2,tensor=8")
assert "leave the node" in said("fsdp=16")
assert "gathered M times" in said("stage=2,fsdp=8")
assert "gathered M times" in said("stage=2,fsdp=4,tensor=2")
assert said("stage=2,fsdp=8", gather="step").startswith("2.45 s, 55 GiB. Too large")
assert "need that wire" in said("stage=4,fsdp=4")
assert "need that wire" in said("stage=16")
assert "each half recomputes" in said("stage=2,fsdp=4,tensor=2", "zb", "step")
assert "too long" in said("stage=2,tensor=8")
assert "refuses" in said("tensor=16")
assert "refuses" in said("stage=4")
assert "refuses" in said("stages=2")
assert "as in START" in check_design(lambda: "stage=2,fsdp=8")
assert said(...) == lesson.NOTHING
for one, messages in (("gpipe", 18), ("1f1b", 20)):
    mesh_ = {"mesh": "stage=2,fsdp=4,tensor=2", "work.schedule": one}
    moved = [t for t in planned(**mesh_).traffic if t.kind == "collective-permute"]
    assert [t.count for t in moved if t.axes == (STAGE,)] == [messages]

# %% [markdown]
# ## A bug to find
#
# A colleague has finished the toy: forward passes, loss and backward passes, for any table. Its loss is
# right, and with AdamW it trains as one device does. With SGD it does not. First its tick.


# %%
def nats(y_ND, target_N, real_N):
    """Sum of -log softmax over the targets that count."""
    log_p_ND = jax.nn.log_softmax(y_ND)
    return -jnp.sum(real_N * jnp.take_along_axis(log_p_ND, target_N[:, None], 1)[:, 0])


def do_forward(w_lDD, x_MND, carry, own):
    inbox, kept, cotangents, loss, grad_lDD = carry
    none_ND = jnp.zeros_like(inbox[0])

    def forward():
        is_first = sharding.axis_index(STAGE) == 0
        x_ND = jnp.where(is_first, x_MND[own.forward], inbox[own.forward_from])
        return layers(w_lDD, x_ND), x_ND

    y_ND, x_ND = jax.lax.cond(own.forward >= 0, forward, lambda: (none_ND, none_ND))
    kept = ticks.put(kept, own.keep, x_ND)
    inbox = ticks.put(inbox, own.arrive, sharding.shift(y_ND, STAGE))
    return y_ND, (inbox, kept, cotangents, loss, grad_lDD)


# %%
def do_loss(target_MN, real_MN, y_ND, carry, own):
    inbox, kept, cotangents, loss, grad_lDD = carry
    m, is_last = own.loss, sharding.axis_index(STAGE) == S - 1
    take = lambda: jax.value_and_grad(nats)(y_ND, target_MN[m], real_MN[m])
    none = lambda: (jnp.zeros_like(loss), jnp.zeros_like(y_ND))
    value, dy_ND = jax.lax.cond(is_last & (m >= 0), take, none)
    cotangents = ticks.put(cotangents, own.loss_to, dy_ND)
    return inbox, kept, cotangents, loss + value, grad_lDD


# %%
def do_backward(w_lDD, carry, own):
    inbox, kept, cotangents, loss, grad_lDD = carry

    def backward():
        _, pull = jax.vjp(layers, w_lDD, kept[own.backward_kept])
        return pull(cotangents[own.backward_from])

    none = lambda: (jnp.zeros_like(w_lDD), jnp.zeros_like(inbox[0]))
    dw_lDD, dx_ND = jax.lax.cond(own.backward >= 0, backward, none)
    arrived_ND = sharding.shift(dx_ND, STAGE, by=-1)
    cotangents = ticks.put(cotangents, own.arrive_back, arrived_ND)
    return inbox, kept, cotangents, loss, grad_lDD + dw_lDD


# %%
import functools


@functools.cache  # compiled once a table
def pipelined(sched):
    """Compile fn(w_LDD, x_MND, target_MN, real_MN) -> mean nats, gradient."""
    table, slots = schedules.rows(sched)

    def device(w_lDD, *batch):
        x_MND, target_MN, real_MN = sharding.vary(batch, STAGE)

        def tick(carry, row):
            own = schedules.Rows(*(x[sharding.axis_index(STAGE)] for x in row))
            y_ND, carry = do_forward(w_lDD, x_MND, carry, own)
            carry = do_loss(target_MN, real_MN, y_ND, carry, own)
            return do_backward(w_lDD, carry, own), None

        buffers = [jnp.zeros_like(x_MND, shape=(n, *x_MND.shape[1:])) for n in slots]
        carry = (*buffers, sharding.vary(jnp.float32(0), STAGE), jnp.zeros_like(w_lDD))
        rows = schedules.Rows(*map(jnp.asarray, table))
        (*_, loss, grad_lDD), _ = jax.lax.scan(tick, carry, rows)
        return sharding.psum(loss / jnp.sum(real_MN), STAGE), grad_lDD

    return sockets.on_mesh(device, mesh, "lDD", "MND", "MN", "MN", out=("", "lDD"))


# %% [markdown]
# The symptoms, in this cell and the next:

# %%
rng = np.random.default_rng(3)
target_R, real_R = rng.integers(0, D, ROWS), np.float32(rng.random(ROWS) < 0.7)
batch = [a.reshape(M, -1, *a.shape[1:]) for a in (x_RD, target_R, real_R)]


@jax.jit
@jax.value_and_grad
def one_device(w_LDD):
    return nats(layers(w_LDD, x_RD), target_R, real_R) / jnp.sum(real_R)


four_devices = lambda w_LDD: pipelined(ahead)(w_LDD, *batch)
print(f"{real_R.sum():g} of {ROWS} targets count; by microbatch", batch[2].sum(axis=1))
for run in (one_device, four_devices):
    print(f"loss {run(w_LDD)[0]:.5f}")

# %%
import optax


def trained(run, optimizer, update, steps=15):
    w_LDD_, state = w_LDD, optimizer.init(w_LDD)
    for _ in range(steps):
        changes, state = update(run(w_LDD_)[1], state, w_LDD_)
        w_LDD_ = np.asarray(optax.apply_updates(w_LDD_, changes))
    return float(one_device(w_LDD_)[0])


for name, optimizer in {"AdamW": optax.adamw(0.01), "SGD": optax.sgd(1.0)}.items():
    update = jax.jit(optimizer.update)
    after = [trained(run, optimizer, update) for run in (one_device, four_devices)]
    print(f"15 steps of {name:5}: one device {after[0]:.3f}, pipeline {after[1]:.3f}")


# %%
@jax.jit
def sum_of_means(x_MND, target_MN, real_MN):
    """Gradient of the sum of the microbatches' means, on one device."""
    mean = lambda w, x, t, r: nats(layers(w, x), t, r) / jnp.maximum(jnp.sum(r), 1)
    means = jax.vmap(mean, (None, 0, 0, 0))
    return jax.grad(lambda w: jnp.sum(means(w, x_MND, target_MN, real_MN)))(w_LDD)


(loss, right), tokens = one_device(w_LDD), real_R.sum()
MISTAKES = [
    (lambda: right * tokens, "The gradient is as it was. How much too big is it?"),
    (lambda: right * tokens / M, "Smaller, and it depends on M. Should it?"),
    (lambda: right * tokens / S, "Does it depend on how many stages there are?"),
    (lambda: right / S, "Too small by S. Does each device lack a part of the count?"),
    (lambda: right * tokens / ROWS, "Nearly. Do all 32 rows count?"),
    (lambda: 0 * right + right.sum(0), "Have all stages the same layers?"),
    (lambda: sum_of_means(*batch) / M, "Has each microbatch as many targets?"),
    (lambda: sum_of_means(*batch), "Each by its own count? And they are M."),
]


# %%
def check_pipelined(function):
    found = []

    def gradient():
        found[:] = function(ahead)(w_LDD, *batch)
        return found[1]

    said = lesson.diagnose(gradient, [()], lambda: right, MISTAKES, "")
    if said or not lesson.same(found[0], loss):
        return said or "The gradient is right. Now the loss it reports is not."
    return "Loss and gradient are one device's."


print(check_pipelined(pipelined))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The function returns the *loss* divided by the number of targets, when the backward passes are long over.
# On one device `grad` sees the division. Here the table calls the backward passes, and they begin with the
# gradient of a sum: 21 times too big, once for each target that counts. Mend it where they begin, as
# `pipeline.ticks.scheduled` does with `d_loss`, or at the end: `return sharding.psum(loss / tokens, STAGE),
# grad_lDD / tokens`, with `tokens = jnp.sum(real_MN)`. Dividing each microbatch by its own count would be a
# mean of means.
#
# torchtitan had the mean of means ([#2206](https://github.com/pytorch/torchtitan/pull/2206), January 2026),
# and after that change this fault ([#2972](https://github.com/pytorch/torchtitan/issues/2972), April 2026;
# again in another trainer of that repository, [#4194](https://github.com/pytorch/torchtitan/pull/4194),
# August). The printed loss was right, as it is divided on its own way. Adam divides constant factors out,
# and clipping brings any norm down to its limit. NVIDIA's Automodel lost all gradients but the last
# microbatch's as silently ([#3530](https://github.com/NVIDIA-NeMo/Automodel/pull/3530)): "only the gradient
# norm gave it away".
# </details>


# %% tags=["remove-cell"]
def mended(sched):
    table, slots = schedules.rows(sched)

    def device(w_lDD, *batch):
        x_MND, target_MN, real_MN = sharding.vary(batch, STAGE)

        def tick(carry, row):
            own = schedules.Rows(*(x[sharding.axis_index(STAGE)] for x in row))
            y_ND, carry = do_forward(w_lDD, x_MND, carry, own)
            carry = do_loss(target_MN, real_MN, y_ND, carry, own)
            return do_backward(w_lDD, carry, own), None

        buffers = [jnp.zeros_like(x_MND, shape=(n, *x_MND.shape[1:])) for n in slots]
        carry = (*buffers, sharding.vary(jnp.float32(0), STAGE), jnp.zeros_like(w_lDD))
        rows = schedules.Rows(*map(jnp.asarray, table))
        (*_, loss, grad_lDD), _ = jax.lax.scan(tick, carry, rows)
        tokens = jnp.sum(real_MN)
        return sharding.psum(loss / tokens, STAGE), grad_lDD / tokens

    return sockets.on_mesh(device, mesh, "lDD", "MND", "MN", "MN", out=("", "lDD"))


def said(grad, factor=1):
    """Of a mend that gives a function of the right gradient and the batch."""
    mend = lambda sched: lambda w_LDD, *batch: (factor * loss, grad(right, *batch))
    return check_pipelined(mend)


assert "as it was" in check_pipelined(pipelined)
assert "one device's" in check_pipelined(mended)
assert "depends on M" in said(lambda g, x, t, r: g * r.sum() / len(x))
assert "32 rows" in said(lambda g, x, t, r: g * r.sum() / r.size)
assert "as many targets" in said(lambda g, *batch: sum_of_means(*batch) / len(batch[0]))
assert "its own count" in said(lambda g, *batch: sum_of_means(*batch))
assert "how many stages" in said(lambda g, x, t, r: g * r.sum() / 4)
assert "lack a part" in said(lambda g, *batch: g / 4)
assert "same layers" in said(lambda g, *batch: jnp.broadcast_to(g.sum(0), g.shape))
assert "loss it reports" in said(lambda g, *batch: g, 0.5)
assert "Nothing" in said(lambda g, *batch: ...)

# %% [markdown]
# ## Three lines to keep
#
# 1. A schedule is an order of operations for each stage. GPipe *and* 1F1B wait for (S - 1)/(M + S - 1) of the
#    time; they differ in what they keep.
# 2. In one program for all devices, a tick ends for all. There 1F1B as published takes 48 instead of 33, and
#    nearly twice the microbatches have to be under way before it is as fast as GPipe.
# 3. A stage sends little and seldom, so it belongs on the slowest wire, while tokens times width are fewer
#    than parameters; and a right loss says nothing of the gradient.
#
# **Sources**: GPipe, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965), section 2; PipeDream-Flush, which
# became 1F1B, [arXiv:2006.09503](https://arxiv.org/abs/2006.09503), section 3.2; interleaving, Megatron-LM,
# [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), section 2.2; zero-bubble, ZB-H1 in
# [arXiv:2401.10241](https://arxiv.org/abs/2401.10241); a program for each stage in JAX, JaxPP,
# [arXiv:2412.14374](https://arxiv.org/abs/2412.14374); the [scaling book on
# training](https://jax-ml.github.io/scaling-book/training); JAX on
# [`shard_map`](https://docs.jax.dev/en/latest/notebooks/shard_map.html).
