# %% [markdown]
# # 16 · Profiling: read a trace of a training step
#
# A **trace** is a recording of a few training steps: what each device and the host did, with the start and
# the end of every operation. To **profile** a program is to record a trace and to find out where the time
# goes.
#
# Why would you want it? A log line of 0.9 s per step doesn't tell you what to fix. A trace splits the step
# into three numbers: compute, communication that stalls the device, and time in which the device does
# nothing. On this page you record a trace, read its rows, compare it with what arithmetic and a simulation
# predict for the step, and find a stall that the loss doesn't show.
#
# *Prerequisites:* chapters 00 (compute and communication time), 03 (FSDP).
# *Mesh:* `fsdp=8`, simulated. *Runs in* 30 s on 2 cores. *Reading takes* 30 minutes, 75
# with the exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import contextlib
import io
import json
from pathlib import Path

import numpy as np

import config
from chapters import lesson, opening, tpu_step
from plan import planner, profile
from plan.chips import hardware
from train.recorder import Recorder

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two timelines of one layer with the same 10.8 ms of compute per device. Left, three transfers of 0.8 ms come before or after the compute, and each device waits for 2.5 ms. Right, the same transfers overlap with compute, and no device waits."}}
forward_ms = opening.compute_ms(2 * opening.PARAMETERS * opening.TOKENS) / 8
send_ms = opening.network_ms(2 * opening.PARAMETERS * 7 / 8)  # bfloat16
compute, network, now = [], [], 0.0
for name, length in (("forward", forward_ms), ("backward", 2 * forward_ms)):
    network += [("", now, send_ms)]
    compute += [(name, now + send_ms, length)]
    now += send_ms + length
network += [("", now, send_ms)]
layer_ms = now + send_ms
bars = {"computes": 3 * forward_ms, "waits": 3 * send_ms}
exposed = opening.Scene("exposed", bars, compute, network)
passes = [("forward", 0, forward_ms), ("backward", forward_ms, 2 * forward_ms)]
sends = [("", start, send_ms) for start in (0, forward_ms, 2 * forward_ms)]
bars = {"computes": 3 * forward_ms, "waits": 0.0}
overlapped = opening.Scene("overlapped", bars, passes, sends)
title = "Same compute, same bytes: only the left one waits"
opening.before_after(exposed, overlapped, title, "fsdp", units=("ms", "ms"))

# %% [markdown]
# The figure shows one layer of Llama 3 8B with `fsdp=8`: 65,536 tokens on eight H100s, at peak speed. On the
# left, the compute waits for two all-gathers of weights and a reduce-scatter of gradients. On the right,
# three transfers of other layers run while this one computes: the next layer's weights in each pass, and in
# the backward pass also the gradients of the layer that has finished.
#
# > **Predict.** Suppose the links were twice as fast. By how many percent would the layer on the left get
# > shorter?

# %% tags=["hide-input"]
saved = 100 * 1.5 * send_ms / layer_ms

# %%
my_prediction = None  # percent
lesson.predicted("shorter by", my_prediction, round(saved, 1), "%", within=0.05)

# %% tags=["remove-cell"]
assert abs(3 * forward_ms - 10.8) < 0.05 and abs(3 * send_ms - 2.5) < 0.05
assert round(send_ms, 1) == 0.8 and 9 < saved < 10

# %% [markdown]
# And the layer on the right? By nothing, although its network is busy for the same 2.5 ms. So the time that a
# network is busy doesn't tell you what to fix.
#
# ## Three numbers
#
# Every moment of a device belongs to exactly one of these:
#
# | number | at this moment the device | it gets smaller with |
# |---|---|---|
# | **compute** | runs a matmul or another operation | fewer FLOPs, larger matmuls, a faster chip |
# | **exposed communication** | runs nothing but a collective | overlap, fewer bytes, another mesh |
# | **idle** | runs nothing | usually a faster host: input, compilation, Python |
#
# The three add up to the time of the step. A matmul and a collective can run at once. Such a moment is
# compute: the collective is **overlapped** there, and does not stall the device. It may still have a cost: on
# a GPU, NCCL's kernels take SMs and memory bandwidth from the matmul, which then runs longer. You see that as
# more compute. The other two numbers are *stalls*.
#
# Here is a device for 14 ms. Which of the three is each moment?

# %% tags=["hide-input"] mystnb={"image": {"alt": "Three rows over 14 ms. Compute runs from 0 to 4, 5 to 9 and 12 to 14 ms; collectives from 3 to 7 and 9 to 11 ms. The third row says what each moment counts as: compute while the first row has a bar, exposed from 4 to 5 and 9 to 11 ms, and idle from 11 to 12 ms."}}
figure, axes = lesson.panels("Each moment counts once", figsize=(6.6, 2.2))
TOY = [(0, 0, 4), (0, 5, 4), (0, 12, 2), (1, 3, 4), (1, 9, 2)]  # row, start, length
for row, start, length in TOY:
    color = lesson.COLORS["fsdp"] if row else lesson.NEUTRAL
    axes.broken_barh([(start, length)], (row - 0.38, 0.76), facecolor=color)
MOMENTS = [("compute", 0, 4), ("exp.", 4, 1), ("compute", 5, 4), ("exposed", 9, 2),
           ("idle", 11, 1), ("compute", 12, 2)]  # fmt: skip
for name, start, length in MOMENTS:
    lesson.box(axes, start, 1.62, length, 0.76, name, size=8)
labels = ["computing", "collectives", "counts as"]
axes.set(yticks=(0, 1, 2), yticklabels=labels, ylim=(2.6, -0.6), xlabel="ms")

# %% [markdown]
# It computes for 10 ms, although its collectives run for 6: 3 of these are overlapped, and 3 are exposed. For
# 1 ms it is idle.
#
# ## Record and read a trace by hand
#
# The next program trains three layers with FSDP, as in chapter 03. Each device stores an eighth of every
# weight, and gathers a weight before it uses it. (To keep the program short, the gathered weights stay in
# memory for the backward pass.) Then the program records three steps, and reads the file. You can paste it
# into an empty file.

# %% tags=["by-hand"]
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import glob
import tempfile
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

L, B, T, D, F = 3, 8, 64, 128, 512
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))


# %% tags=["by-hand"]
def loss(w, x_bTD):
    own, gather = x_bTD.dtype, partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
    for up_dF, down_fD in w:
        hidden_bTF = jnp.tanh(x_bTD @ gather(up_dF.astype(own)))
        x_bTD += hidden_bTF @ gather(down_fD.astype(own))
    return jax.lax.pmean(jnp.mean(jnp.float32(x_bTD) ** 2), "fsdp")


def step(w, x_BTD):
    on_mesh = jax.shard_map(loss, mesh=mesh, in_specs=P("fsdp"), out_specs=P())
    value, grads = jax.value_and_grad(on_mesh)(w, x_BTD)
    return jax.tree.map(lambda w, grad: w - 0.1 * grad, w, grads), value


# %% tags=["by-hand"]
normal = partial(jax.random.normal, jax.random.key(0))
put = lambda *shape: jax.device_put(normal(shape) / 16, NamedSharding(mesh, P("fsdp")))
w, x_BTD = [(put(D, F), put(F, D)) for _ in range(L)], put(B, T, D)
program = jax.jit(step, donate_argnums=0).lower(w, x_BTD).compile()
w, value = jax.block_until_ready(program(w, x_BTD))  # one step before the trace
folder = tempfile.mkdtemp()
with jax.profiler.trace(folder):
    for number in range(3):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            w, value = program(w, x_BTD)
    jax.block_until_ready(w)


# %% tags=["by-hand"]
def read(folder):
    [file] = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
    devices, others = {}, Counter()
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        for event in (event for line in plane.lines for event in line.events):
            if "hlo_op" in (stats := dict(event.stats)):  # an instruction on a device
                rows = devices.setdefault(stats["device_ordinal"], [])
                rows.append((event.start_ns, event.end_ns, stats["hlo_op"]))
            else:
                others[event.name] += 1
    return devices, others


devices, others = read(folder)
assert all({*Counter(n for *_, n in rows).values()} == {3} for rows in devices.values())

# %%
print(f"{len(devices)} devices, {others['train']} steps; device 0 begins with:")
zero = min(devices[0])[0]
for start, end, name in sorted(devices[0])[:4]:
    print(f"{(start - zero) / 1e6:6.2f} to {(end - zero) / 1e6:6.2f} ms  {name}")

# %% [markdown]
# (On this CPU, the compiler's name for a matmul is `ynn_fusion`.) Recording is `jax.profiler.trace` around a
# few steps. Three lines around it matter:
#
# - One step runs before the trace, because the first call of a program takes longer than the others.
# - `block_until_ready` comes before the trace. A call of a jitted function returns before the devices have
#   finished, as a kernel launch does in CUDA (*asynchronous dispatch*). Without this line, the trace would
#   begin with the end of an earlier step.
# - `block_until_ready` is also the last line in the trace. Without it, the trace would end before the third
#   step.
#
# A trace file has three levels:
#
# | level | on a TPU | on a GPU | on these simulated devices |
# |---|---|---|---|
# | *plane* | `/device:TPU:0`, and the host | `/device:GPU:0`, and the host | only the host, `/host:CPU` |
# | *line*: a row on the screen | `XLA Ops`, `Async XLA Ops`, `Steps` | a stream: `Stream #14` | a thread; several threads work for a device |
# | *event* | an instruction | a kernel | an instruction; `device_ordinal` is its device |
#
# The name of an event is the name of an instruction in the compiled program, `program.as_text()`. There you
# also find its source line, and its `jax.named_scope`.
#
# > **Predict.** How many events of collectives do the three steps have, on all eight devices together?

# %%
my_prediction = None  # events


def is_collective(name):
    kinds = "all_gather", "reduce_scatter", "all_reduce", "psum"
    return name.replace("-", "_").startswith(kinds)


kinds = Counter(name.split(".")[0] for rows in devices.values() for _, _, name in rows)
collective_events = {name: n for name, n in kinds.items() if is_collective(name)}
total = sum(collective_events.values())
lesson.predicted("collectives", my_prediction, total, "events")
print(", ".join(f"{n} {name}" for name, n in sorted(collective_events.items())))

# %% tags=["remove-cell"]
assert total == 13 * 3 * 8, collective_events

# %% [markdown]
# <details><summary>Why</summary>
#
# Each of the 3 layers gathers 2 weights, and reduce-scatters 2 gradients in the backward pass. With the
# all-reduce of the loss (`psum_invariant`), that is 13 collectives in a step. Each is an event per device and
# step: 13 · 3 · 8 = 312.
# </details>
#
# Count before you look at times. If a step has more collectives than your arithmetic, you have found a stall
# without a stopwatch. And counts are the same on every machine, but times are not.
#
# Now the three numbers. Events of a device can overlap, so its busy time is not the sum of their lengths, but
# the time that they *cover*:


# %%
def covered_ns(rows):
    """Nanoseconds in which at least one of the events runs."""
    total, until = 0, 0
    for start, end, _ in sorted(rows):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total


def three_numbers(rows, total_ns):
    compute = covered_ns([row for row in rows if not is_collective(row[2])])
    busy = covered_ns(rows)
    return {"compute": compute, "exposed": busy - compute, "idle": total_ns - busy}


# %%
everything = [row for rows in devices.values() for row in rows]
total_ns = max(end for _, end, _ in everything) - min(everything)[0]
measured = {n: three_numbers(rows, total_ns) for n, rows in devices.items()}
print(f"{total_ns / 3e6:.1f} ms per step")
for n in (0, 7):
    split = (f"{name} {ns / total_ns:.0%}" for name, ns in measured[n].items())
    print(f"device {n}: {', '.join(split)}")

# %% tags=["remove-cell"]
assert all(abs(sum(one.values()) - total_ns) < 1 for one in measured.values())
assert all(min(one.values()) >= 0 for one in measured.values())

# %% [markdown]
# **In a viewer.** Next to the file that `read` opens is a `.trace.json.gz`. Open it in
# [Perfetto](https://ui.perfetto.dev), which runs in your browser, or install `xprof`. Look in this order:
#
# 1. Find the annotation `train` in the rows of the host, and zoom in on one step (keys W and S; A and D
#    move).
# 2. Go to the row of one device. Gaps are idle time. What does the host do at the same moment?
# 3. Find collectives with nothing computing next to them. This is exposed communication.
# 4. Compare the devices. Each waits in a collective until the last one gets there. So the device with the
#    least exposed communication is the late one.
# 5. Click on an instruction that takes long, and look up its source line.
#
# (On simulated devices, a row is a thread that works for several devices. So steps 2 to 4 need a program like
# the one above.)
#
# ## Four views of one step
#
# This trace comes from simulated devices on a laptop, but you want to know about a TPU or a GPU. So look at
# the step in four ways. The sizes are now D = 4,096, F = 16,384 and T = 4,096, on eight chips of TPU v5e.
#
# **Planned.** The first view is arithmetic, as in chapter 00, and needs no program. Each device has one
# sequence:

# %%
chip = hardware.CHIPS["v5e"]
link = hardware.layout(config.MeshConfig(fsdp=8), hardware.Topology.parse("v5e:2x4"))
L, T, D, F = tpu_step.L, tpu_step.T, tpu_step.D, tpu_step.F
matmuls = 3 * 2 * L - 1  # per weight: output, two gradients; x needs none
compute_ms = 1e3 * matmuls * 2 * T * D * F / chip.peak_flops_per_s
each_ms = 1e3 * 2 * D * F * 7 / 8 / link["fsdp"].bytes_per_s  # bfloat16
print(f"compute {compute_ms:.1f} ms; {4 * L} collectives of {each_ms:.2f} ms each")

# %% tags=["remove-cell"]
counted = tpu_step.counted()
assert counted.flops == matmuls * 2 * T * D * F, "the arithmetic misses a matmul"
kept = [one for one in counted.collectives if one.payload_bytes > 4]
assert len(kept) == 4 * L and {one.wire_bytes for one in kept} == {2 * D * F * 7 // 8}
assert f"{compute_ms:.1f} {each_ms:.2f}" == "47.4 1.30"

# %% [markdown]
# **Compiled.** The second view is the compiled program. The TPU compiler runs without a TPU: `python -m
# chapters.tpu_step` compiled the function `step` above (with `make extra-tpu`), and wrote the text to
# `chapters/tpu_step.hlo.xz`. Its counts agree with the arithmetic: the FLOPs of 17 matmuls, and 12
# collectives of weights and gradients.
#
# **Simulated.** The text lists the instructions of a device in the order in which they run. So a program can
# add up their times, and find out when the *core* (the part of a chip that computes) has to wait for a
# transfer. `python -m plan.replay chapters/tpu_step.hlo.xz --topology v5e:2x4 --mesh fsdp=8` does this. [Step
# times](../seconds.md) explains its rules. No chip was measured.
#
# > **Predict.** All collectives together take 15.7 ms. The first gather and the last reduce-scatter have no
# > compute to overlap with; the others could overlap. How long is the simulated step?

# %%
my_prediction = None  # ms
simulated = tpu_step.simulated()
lesson.predicted("the step", my_prediction, 1e3 * simulated.seconds, "ms", within=0.03)
for cause, seconds in simulated.causes.items():
    name = {"fsdp": "exposed communication over fsdp"}.get(cause, cause)
    print(f"{name:31} {1e3 * seconds:5.1f} ms")

# %% tags=["remove-cell"]
assert abs(12 * each_ms - 15.7) < 0.05 and abs(1e3 * simulated.seconds - 59.4) < 0.05
waits = [one for one in tpu_step.events() if one.what == "waiting for fsdp"]
waits = [one for one in waits if one.end - one.start > 1e-4]
flights = [one for one in tpu_step.events() if one.what == "reduce-scatter"]
assert len(waits) == 7 and len(flights) == 6
for one in flights:  # each is waited for as long as it is in flight
    assert any((one.start, one.end) == (wait.start, wait.end) for wait in waits)

# %% [markdown]
# <details><summary>Why</summary>
#
# With as much overlap as possible, it would be 47.4 + 2 · 1.3 = 50.0 ms. The matmuls reach 96% of the peak:
# they take 49.6 ms. The update of the weights, and waiting for copies within the chip's memory, add 0.7 ms.
# The rest is exposed: 9.1 ms are *seven* collectives of 1.3 ms, not two. The compiler for this chip overlaps
# all gathers except the first, but no reduce-scatter. So on this chip the trainer's steps reduce gradients
# with all-to-alls, which overlap (`overlap/gradients.py`).
# </details>
#
# **Recorded.** The fourth view is the trace, here of the small step on this machine. For a run of the
# project's trainer, two commands do it: `python main.py laptop --run.profile 20:23` records steps 20 to 23,
# and `python -m plan.profile runs/laptop` reads the trace ([an example](../loop.md#see-where-the-time-goes)).
# On a TPU slice it also prints the planned and the simulated seconds. The next cell calls the same two parts
# of the project, `Recorder` and `profile`, with the program above:

# %% tags=["hide-input"]
run = Path(tempfile.mkdtemp())
trainer = config.preset("tiny", mesh="fsdp=8")  # only its mesh is used
(run / "config.json").write_text(json.dumps({"config": trainer.to_dict()}))
recorder = Recorder(program, (2, 4), 0, run / "profile/process-00")  # steps 2 to 4
with contextlib.redirect_stdout(io.StringIO()):
    for _ in range(4):
        w, value = recorder(w, x_BTD)

# %%
found = profile.compare(*profile.read_run(run))
for cause, seconds in sorted(found["measured"].items()):
    name = {"fsdp": "exposed communication over fsdp"}.get(cause, cause)
    print(f"{name:31} {seconds / found['step_s']:4.0%} of a step")

# %% tags=["remove-cell"]
assert {*found["measured"]} == {"matmuls", "other ops", "fsdp", "idle"}, found
assert abs(sum(found["measured"].values()) - found["step_s"]) < 1e-6

# %% [markdown]
# (`matmuls` and `other ops` are compute.) Now the recorded and the simulated timeline next to each other,
# with D = 128 and D = 4,096. What do they have in common?


# %% tags=["hide-input"] mystnb={"image": {"alt": "Two timelines of one step with a compute row and a communication row. Left, recorded on a simulated CPU device: long bars of communication between short bars of compute. Right, simulated for a TPU: compute stops for 1.3 ms for the first all-gather and for each of the six reduce-scatters; the other five all-gathers overlap with compute. Both have six all-gathers and then six reduce-scatters."}}
def flat(rows):
    """The name of each bar, its start and its length, in ms from zero."""
    zero = rows[0][0]
    return [(name, (a - zero) / 1e6, (b - a) / 1e6) for a, b, name in rows]


cpu = flat(sorted(devices[0])[: len(devices[0]) // 3])  # the first of three steps
shown = [one for one in tpu_step.events() if not one.what.startswith("waiting")]
tpu = flat([(1e9 * one.start, 1e9 * one.end, one.what) for one in shown])
title = "The same program: six gathers, then six reduce-scatters (light)"
figure, both = lesson.panels(title, 1, 2, figsize=(6.6, 2.4), sharey=True)
for axes, bars in zip(both, (cpu, tpu), strict=True):
    for name, start, length in bars:
        row, alpha = is_collective(name), 1 if name[:3] == "all" else 0.45
        color = lesson.COLORS["fsdp"] if row else lesson.NEUTRAL
        look = dict(facecolor=color, edgecolor="white", lw=0.8 * row)
        look |= dict(alpha=alpha) if row else {}
        axes.broken_barh([(start, length)], (row - 0.38, 0.76), **look)
    labels = "compute", "collectives"
    axes.set(yticks=(0, 1), yticklabels=labels, ylim=(1.6, -0.6), xlabel="ms")
both[0].set_title("recorded on a CPU, D = 128", size=9)
both[1].set_title("simulated for a TPU v5e, D = 4,096", size=9)

# %% [markdown]
# The order: six gathers, with matmuls between them, and then six reduce-scatters. The times have nothing in
# common. On this machine, eight devices share two cores, so most of a collective is waiting for the thread of
# another device. Use each view for what it knows:
#
# | view | needs | knows | doesn't know |
# |---|---|---|---|
# | planned | a formula | how long compute and bytes take at least | what overlaps |
# | compiled | a compiler | which collectives, how many bytes, from which source line | time |
# | simulated | the compiled text | what the core waits for | the host, slow links, slow devices |
# | recorded | the devices | when each instruction ran on these devices, and what the host did | why it took that long; other devices |
#
# **The difference between two views is the finding.** If the simulated step is longer than the planned one, a
# collective does not overlap, or a matmul is slow. If the recorded step has more exposed communication than
# the simulated one, a link or another device is slow. And if the recorded step is idle, look at the host
# first: only the recorded view has it. (A device is also idle between many small kernels, during copies, and
# in some pipelines while a stage has no microbatch.)
#
# ## The rows of the host
#
# If a device is idle, look at the rows of the host at the same moment. These are the names to search for, in
# the viewer or in a count:
#
# | event on the host | what happens | if it is in every step |
# |---|---|---|
# | `backend_compile_and_load` | XLA compiles | a shape, a dtype or a static argument changes |
# | `np.asarray(jax.Array)` | the host reads an array, and waits until the devices have computed it | something needs the value in Python |
# | `DevicePut` | the host sends an array | input that no other thread prepared |
# | `PjitFunction(name)` | the host starts a compiled program | many small programs: operations outside `jit` |
#
# Count them in three loops of four steps:

# %%
HOST = {"compiles": "backend_compile_and_load", "reads": "np.asarray(jax.Array)"}


def record(run):
    """Run a function in a trace, and read the trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        return read(folder)


def host_events(run):
    _, others = record(run)
    return {what: others[event] for what, event in HOST.items()}


rms = jax.jit(lambda x: jnp.sqrt(jnp.mean(x**2)))
host_BTD, _ = np.asarray(x_BTD), rms(x_BTD)  # compiles
loops = {
    "as it should be": lambda: [rms(x_BTD) for _ in range(4)],
    "other lengths": lambda: [rms(host_BTD[:, :t]) for t in (10, 20, 30, 40)],
    "print every loss": lambda: [f"{rms(x_BTD):.2f}" for _ in range(4)],
}
for name, loop in loops.items():
    print(f"{name:17} {host_events(loop)}")

# %% tags=["remove-cell"]
loops["other lengths"] = lambda: [rms(host_BTD[:, :t]) for t in (11, 22, 33, 44)]
again = {name: [*host_events(loop).values()] for name, loop in loops.items()}
assert [*again.values()] == [[0, 0], [4, 0], [0, 4]], again

# %% [markdown]
# Every new length is a new program. PyTorch users know a read as a synchronization: in `torch.profiler` it is
# `cudaStreamSynchronize`. These counts don't depend on the speed of the machine, so a test can assert them.
#
# ## Which number first?
#
# If stalls are a fraction s of the step, then without them it would be 1/(1 - s) times as fast, at most. For
# the 9.1 of 59.4 ms above, that is 1.18 times. So begin with the largest number. It is not always a stall:
#
# > **Predict.** The planner expects an MFU of 40% (model FLOPs utilization) for Llama 3 8B on eight H100s,
# > with `fsdp=8`, 16 sequences of 4,096 tokens and recomputed layers. For what percentage of that step do the
# > devices wait?

# %% tags=["hide-input"]
TRAINS = {"data.batch_size": 16, "data.seq_len": 4096, "work.remat": "full"}
PLACES = {"h100:8": "fsdp=8", "v5p:2x2x4": "fsdp=16"}
plans = {on: planner.plan(config.preset("llama3_8b", mesh=mesh, **TRAINS), on)
         for on, mesh in PLACES.items()}  # fmt: skip
stalls = {on: one.causes["fsdp"] / one.step_s for on, one in plans.items()}

# %%
my_prediction = None  # percent
answer = round(100 * stalls["h100:8"])
lesson.predicted("they wait for", my_prediction, answer, "% of the step", within=0.3)
for on, one in plans.items():
    parts = f"compute {1 - stalls[on]:.0%}, exposed {stalls[on]:.0%}"
    print(f"{on:9} {one.step_s:.2f} s, MFU {one.mfu(one.step_s):.0%}: {parts}")

# %% tags=["remove-cell"]
assert round(100 * stalls["h100:8"]) == 4 and round(100 * stalls["v5p:2x2x4"]) == 13
assert [round(100 * one.mfu(one.step_s)) for one in plans.values()] == [40, 51]
assert round(100 * plans["h100:8"].causes["other ops"] / plans["h100:8"].step_s) == 15
assert round(1 / (1 - simulated.causes["fsdp"] / simulated.seconds), 2) == 1.18

# %% [markdown]
# <details><summary>Why</summary>
#
# MFU counts only the FLOPs that the model needs, and compares their time at the peak with the step. On the
# H100s, recomputation adds a third to these FLOPs, matmuls are slower than the peak, and other operations
# take 15% of the step. All of that is compute. So a low MFU doesn't mean that devices wait. The v5p waits for
# more of the step, although its MFU is higher.
# </details>
#
# | largest number | next question | chapter |
# |---|---|---|
# | compute | Are there more FLOPs than planned (recomputation, padding)? How far are the matmuls from the peak? On GPUs: are they slower while a collective runs? | 00, 03 |
# | exposed, on all devices | Which line? Does this chip overlap this kind ([list](../waits.md#the-rules-of-the-planner))? Would more tokens per device, or another mesh, help? | 03, 04, 09 |
# | exposed, on all devices but one | Why is that one late: more work, or a slow chip? | 05 to 07, 13 |
# | idle | What does the host do at that moment? If nothing: a pipeline's bubble, copies, gaps between small kernels? | 05, 11, and the table above |
#
# Two warnings. Recording takes time too: `jax.profiler.trace` also records the calls of Python functions, so
# with short steps the idle time is too long. (`Recorder` turns this off, with `python_tracer_level = 0`.) And
# each host records only its own devices, so on several hosts look at more than one trace.
#
# ## Exercise 1: in flight and exposed
#
# On a TPU, a collective that can overlap is a pair of events in the row of the core. At its `-start` the core
# begins the transfer, and continues with the next instruction. At its `-done` the core waits until the
# transfer is complete. For the collective with a given number, return the microseconds in which the transfer
# is in flight, and the microseconds that are exposed. (Don't count the short `-start` as exposed.)


# %%
ROWS = [  # start and end in microseconds
    (0, 1, "all-gather-start.1"), (1, 40, "fusion.1"), (40, 41, "all-gather-start.2"),
    (41, 55, "all-gather-done.1"), (55, 90, "fusion.2"), (90, 92, "all-gather-done.2"),
    (92, 93, "all-gather-start.3"), (93, 120, "all-gather-done.3"),
]  # fmt: skip


def flight(rows, number):
    when = {name: (start, end) for start, end, name in rows}
    when = when[f"all-gather-start.{number}"], when[f"all-gather-done.{number}"]
    return ...  # microseconds in flight, microseconds exposed


# %% tags=["hide-input"]
def pair(rows, number):
    """The begin and end of a collective's two events."""
    named = {name: (begin, end) for begin, end, name in rows}
    return *named[f"all-gather-start.{number}"], *named[f"all-gather-done.{number}"]


def of_pair(rule):
    return lambda rows, number: rule(*pair(rows, number))


FLIGHT_HINTS = [
    (of_pair(lambda a, b, c, d: (d - a, d - a)),
     "In flight is right. But is the core idle for all of that time?"),
    (of_pair(lambda a, b, c, d: (d - c, d - a)), "Swapped: in flight comes first."),
    (of_pair(lambda a, b, c, d: (b - a + d - c, d - c)),
     "Exposed is right. But the transfer doesn't pause between its two events."),
    (of_pair(lambda a, b, c, d: (c - a, d - c)),
     "Exposed is right. When the core reaches -done, has the transfer arrived?"),
    (of_pair(lambda a, b, c, d: (c - b, d - c)),
     "Exposed is right. In flight: when does it begin, and when has it arrived?"),
]  # fmt: skip

# %% tags=["hide-input"]
FLIGHT_HINTS += [
    (of_pair(lambda a, b, c, d: (d - a, c - b)),
     "Your second number is the time between the events, which is overlapped."),
    (of_pair(lambda a, b, c, d: (d - b, d - c)),
     "Exposed is right. The transfer begins when -start begins."),
    (of_pair(lambda a, b, c, d: (d - a, b - a + d - c)),
     "In flight is right. Leave the -start out of the exposed time."),
    (of_pair(lambda a, b, c, d: (d - a, 0)),
     "In flight is right. What does the core do during -done?"),
]  # fmt: skip
check_flight = lesson.checker(
    [(ROWS, 1), (ROWS, 2), (ROWS, 3)], of_pair(lambda a, b, c, d: (d - a, d - c)),
    FLIGHT_HINTS, "Right: 55 and 14, 52 and 2, 28 and 27. The third hardly overlaps.",
)  # fmt: skip


# %%
print(check_flight(flight))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return when[1][1] - when[0][0], when[1][1] - when[1][0]`. The third gather is awaited right after its
# start, so it is asynchronous in name only. Its `-start` should come before `fusion.2`.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_flight, *FLIGHT_HINTS, (flight, lesson.NOTHING),
              (of_pair(lambda a, b, c, d: (d - a, d - c)), "Right"),
              (lambda *_: 3, "shape"))  # fmt: skip

# %% [markdown]
# ## Exercise 2: which line stalls the step?
#
# A simulated timeline is a list of events. Each has these attributes:
#
# | attribute | value |
# |---|---|
# | `start`, `end` | seconds |
# | `lane` | `"core"`, or, for a transfer in flight, the mesh axes |
# | `what` | on the core: `"matmuls"`, `"other ops"`, `"copies"`, or `"waiting for fsdp"` (or for other axes); in flight: the kind of collective |
# | `source`, `wire_bytes` | the line of code; the bytes sent |
#
# Return the `source` with the most exposed time.

# %% tags=["hide-input"]
timeline = tpu_step.Timeline("the step above", tuple(tpu_step.events()))


def made(compute, *flights):
    """A timeline of a line that computes, and of (line, start, wait, end, bytes)."""
    events = [tpu_step.Event(0, 20, "core", "matmuls", "", compute)]
    for source, start, wait, end, sent in flights:
        more = "", source, sent
        events.append(tpu_step.Event(start, end, "fsdp", "all-gather", *more))
        if end > wait:
            events.append(tpu_step.Event(wait, end, "core", "waiting for fsdp", *more))
    return tpu_step.Timeline(f"a step that computes in {compute}", tuple(events))


TIMELINES = [timeline, made(
    "experts", ("unembed", 0, 19, 19, 300), ("head", 1, 9, 9, 1500),
    ("queries", 20, 20, 23, 50), ("keys", 23, 23, 27, 60), ("queries", 27, 27, 30, 50),
    ("norm", 30, 30, 30.5, 30), ("norm", 31, 31, 31.5, 30), ("norm", 32, 32, 32.5, 30),
    ("values", 26, 34, 36, 500),
)]  # fmt: skip

# %%
for event in timeline.events[12:18]:
    when = f"{1e3 * event.start:6.2f} to {1e3 * event.end:5.2f} ms"
    print(f"{when}  {event.lane:5} {event.what}")


# %%
def worst_line(events):
    return ...


# %% tags=["hide-input"]
def most(amount, choose=lambda one: True, join=sum):
    """Return a function that chooses the source line with the most of an amount."""

    def line_of(events):
        lines = {}
        for one in events:
            if choose(one):
                lines.setdefault(one.source, []).append(amount(one))
        return max(lines, key=lambda source: join(lines[source]))

    return line_of


length = lambda one: one.end - one.start
waiting = lambda one: one.what.startswith("waiting for")
in_flight = lambda one: one.lane != "core"
right_line = most(length, waiting)

# %% tags=["hide-input"]
LINE_HINTS = [
    (most(length), "That line has the most time, but of all kinds: most is compute."),
    (most(length, in_flight),
     "That line is longest in flight. Does the core wait for it?"),
    (most(lambda one: one.wire_bytes),
     "That line sends most. Bytes that overlap stall nothing."),
    (most(lambda one: one.wire_bytes, waiting),
     "These bytes are waited for, but some only at the end of their flight. Add time."),
    (most(length, waiting, max),
     "The longest single stall. Add up the stalls of a line."),
    (most(lambda one: 1, waiting),
     "That line stalls most often. Add up time, not events."),
]  # fmt: skip
check_worst = lesson.checker(
    [(one,) for one in TIMELINES], lambda one: right_line(one.events), LINE_HINTS,
    "Right: in the step above, up_dF's line. Its bytes are those of down_fD's line.",
    run=lambda answer: lambda one: answer(one.events),
)  # fmt: skip


# %%
print(check_worst(worst_line))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# seconds = Counter()
# for event in events:
#     if event.what.startswith("waiting for"):
#         seconds[event.source] += event.end - event.start
# return max(seconds, key=seconds.get)
# ```
#
# Both lines of `loss` send the same bytes, but `up_dF` has the first gather of the step, which nothing
# overlaps. `python -m plan.replay` and `python -m plan.profile` print this table for all lines.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_worst, *LINE_HINTS, (right_line, "Right"),
              (worst_line, lesson.NOTHING),
              (lambda events: "loss", "Not yet"))  # fmt: skip
assert "up_dF" in right_line(timeline.events)

# %% [markdown]
# ## Exercise 3: how often may you log?
#
# Without reads, the host runs ahead: it prepares and starts step after step, while the devices still work. A
# read ends that: the host waits until all steps so far have been computed. The host needs `host` ms to
# prepare and start a step, the devices need `device` ms to compute it, and the loop reads the loss after
# every `every` steps. How many ms does a step take on average? (The read itself takes no time.)


# %%
def step_ms(device, host, every):
    return ...


# %% tags=["hide-input"]
def loop_ms(device, host, every, steps=120):
    """Simulate the loop: the average ms of a step."""
    now = done = 0.0
    for number in range(1, steps + 1):
        now += host  # the host starts the step
        done = max(now, done) + device
        now = done if number % every == 0 else now
    return done / steps


# %% tags=["hide-input"]
LOG_HINTS = [
    (lambda d, h, k: max(d, h), "That is a loop that never reads."),
    (lambda d, h, k: d + h, "That is a loop that reads after every step."),
    (lambda d, h, k: (d + h) / k, "Each step still has to run on the devices."),
    (lambda d, h, k: d, "After a read, the devices have nothing to do. For how long?"),
    (lambda d, h, k: d + h / k,
     "Right if the devices are slower than the host. If not?"),
    (lambda d, h, k: h + d / k,
     "Right if the host is slower than the devices. If not?"),
    (lambda d, h, k: k * max(d, h) + min(d, h), "That is the time of `every` steps."),
    (lambda d, h, k: max(d, h) + max(d, h) / k,
     "After a read, one step does not overlap. What does that add to the slower side?"),
    (lambda d, h, k: max(d, h) + h / k,
     "Right if the devices are slower. If the host is, what does not overlap?"),
]  # fmt: skip

# %% tags=["hide-input"]
check_step_ms = lesson.checker(
    [(40, 10, 5), (10, 40, 4), (30, 20, 1), (25, 5, 20)], loop_ms, LOG_HINTS,
    "Right: with 40 and 10 ms, reading every 5 steps costs 5%, and every step 25%.",
)  # fmt: skip


# %%
print(check_step_ms(step_ms))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return max(device, host) + min(device, host) / every`. Between reads, the slower side sets the pace. The
# first step after a read has nothing to overlap with, so the faster side adds its time once per `every`
# steps. So reads cost at most as much as the faster side takes: if that is small, look elsewhere. [One pull
# request](https://github.com/lnccbrown/LANfactory/pull/120) expected 85% from such a change, and measured 4%.
# </details>

# %% tags=["remove-cell"]
right_ms = lambda d, h, k: max(d, h) + min(d, h) / k
lesson.expect(check_step_ms, *LOG_HINTS, (right_ms, "Right: "),
              (step_ms, lesson.NOTHING), (lambda *_: 7, "Not yet"))  # fmt: skip
assert right_ms(40, 10, 5) / 40 == 1.05 and right_ms(40, 10, 1) / 40 == 1.25

# %% [markdown]
# ## A bug to find
#
# A colleague's loop trains on eight devices. It skips batches with a damaged value, clips gradients, and logs
# every fourth step. The losses are right. But the devices are idle between steps, and she suspects the input.


# %%
SIZES = {"gate": (32, 128), "up": (32, 128), "down": (128, 32)}
STEPS, EVERY = 16, 4


def batches():
    """Random rows, and in step 10 a damaged one."""
    normal = np.random.default_rng(3).normal
    for number in range(1, STEPS + 1):
        x_BD = normal(size=(64, 32)).astype(np.float32)
        if number == 10:
            x_BD[7, 3] = np.inf
        yield jax.device_put(x_BD, NamedSharding(mesh, P("fsdp")))


def start_weights():
    normal, copies = np.random.default_rng(4).normal, NamedSharding(mesh, P())
    values = {name: np.float32(normal(size=size) / 4) for name, size in SIZES.items()}
    return jax.device_put(values, copies)


# %%
def mean_error(w, x_BD):
    hidden_BF = jax.nn.silu(x_BD @ w["gate"]) * (x_BD @ w["up"])
    return jnp.mean((hidden_BF @ w["down"] - x_BD) ** 2)


gradients = jax.jit(jax.value_and_grad(mean_error))


@jax.jit
def update(w, grads, scale):
    return jax.tree.map(lambda w, grad: w - 0.1 * scale * grad, w, grads)


@jax.jit
def norm(grads):
    return jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))


# %%
def damaged(grads):
    """Whether a gradient has a NaN or an infinity."""
    return any(not_finite(grad) for grad in grads.values())


not_finite = jax.jit(lambda grad: ~jnp.isfinite(grad).all())


def clip_factor(grads, most=0.5):
    """What to multiply gradients with, so that their norm is at most `most`."""
    length = norm(grads)
    return most / length if length > most else 1.0


# %%
class Meter:
    """The mean of the losses since the last log."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value):
        self.total, self.count = self.total + value, self.count + 1

    def mean(self):
        return float(self.total) / max(self.count, 1)


# %%
def train():
    """Return the weights, and the mean loss of every EVERY steps."""
    w, meter, log = start_weights(), Meter(), []
    for number, x_BD in enumerate(batches(), 1):
        value, grads = gradients(w, x_BD)
        if not damaged(grads):
            w = update(w, grads, clip_factor(grads))
            meter.add(value)
        if number % EVERY == 0:
            log.append(meter.mean())
            meter = Meter()
    return w, log


# %%
print("mean losses:", ", ".join(f"{value:.4f}" for value in train()[1]))
traced, _ = record(lambda: train()[0])  # the first call has compiled everything
own = traced[0]  # the events of device 0
span_ns = max(end for _, end, _ in own) - min(own)[0]
idle_ns = three_numbers(own, span_ns)["idle"]
print(f"device 0 was idle for {idle_ns / span_ns:.0%} of {STEPS} steps")

# %% [markdown]
# What do the devices wait for? Change the program so that they don't. The weights and the log must stay the
# same.

# %% tags=["hide-input"]
LOG = [14.91578, 13.17027, 13.03547, 14.17314]
NORMS = {"gate": 15.75688, "up": 15.65963, "down": 16.01219}


def wrong_result(w, log):
    """What is wrong with the weights or the log; empty if they are right."""
    norms = {name: float(np.linalg.norm(one)) for name, one in w.items()}
    if not np.isfinite([*norms.values()]).all():
        return "The weights have a NaN: the damaged batch of step 10 has reached them."
    if len(log) != len(LOG):
        return f"{len(log)} log lines instead of {len(LOG)}."
    if not np.isfinite(np.float64(log)).all():
        return "A log line has a NaN or an infinity: the damaged batch counts in it."
    if lesson.same(log[2], LOG[2] * 3 / 4, 1e-3):
        return "The third log line divides by 4, but only 3 batches were good."
    if any(not lesson.same(norms[name], NORMS[name], 1e-3) for name in NORMS):
        return "The weights have changed: is every step still clipped as before?"
    right = lesson.same(log, LOG, 1e-3)
    return "" if right else "The weights are right, but not the log."


# %% tags=["hide-input"]
def check_train(answer):
    try:
        w, log = lesson.answered(answer)()
        if fault := wrong_result(w, log):
            return fault
        counts = host_events(lambda: answer()[0])
    except lesson.Unanswered:
        return lesson.NOTHING
    except (TypeError, ValueError, AttributeError) as error:
        return f"{lesson.stopped(error)}. Return the weights and the log."
    except Exception as error:
        return lesson.stopped(error)
    text, compiles = f"{counts['reads']} reads in {STEPS} steps", counts["compiles"]
    if compiles >= STEPS:
        return f"{text}, but {compiles} compilations. Create jitted functions once."
    if counts["reads"] > 2 * len(LOG):
        return f"{text}, for {len(LOG)} log lines. What makes the host read?"
    return f"Fixed: {text}, and the weights and the log are the same."


# %% tags=["hide-output"]
print(check_train(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The input is innocent. The trace has 65 events `np.asarray(jax.Array)`, about four per step, and none of
# them looks like a read in the code. `any(..)` in `damaged` needs a Python bool for each of the three
# gradients, and `if length > most` needs another one. At each of them, the host waits for the devices, and
# only then starts the next program. (`meter.add` reads nothing, because it adds on the devices.)
#
# Decide on the devices instead. `jnp.where` takes the place of `if`, in one jitted program:
#
# ```python
# @jax.jit
# def train_step(w, total, count, x_BD):
#     value, grads = jax.value_and_grad(mean_error)(w, x_BD)
#     length = norm(grads)
#     good = jnp.isfinite(length)  # a NaN or an infinity is in the norm, too
#     scale = jnp.minimum(1, 0.5 / length)
#     new = jax.tree.map(lambda w, grad: w - 0.1 * scale * grad, w, grads)
#     w = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, w)
#     return w, total + jnp.where(good, value, 0), count + good
# ```
#
# Then `train` reads once per log line, `float(total / count)`. Print the idle time again: it falls.
#
# For Megatron-LM, a pull request counts 142 synchronizations per iteration. 35 come from an MoE dispatcher
# outside of it. Of the other 107, 74 are a NaN check of each bucket of gradients, as in this program. The
# change removes 104, and was still open in September 2026 ([pull request
# 7076](https://github.com/NVIDIA/Megatron-LM/pull/7076)). In fairchem, the loss counts valid samples on the
# host, 15 times per step, and a profile showed GPUs that were idle for 45% of the step ([issue
# 2195](https://github.com/facebookresearch/fairchem/issues/2195), 2026). Yet the fix gains only 5%, from 152
# to 145 ms per step ([pull request 2203](https://github.com/facebookresearch/fairchem/pull/2203), also open
# then): the idle time is only an upper bound. torchtune read the loss in every step, and logged only some
# ([pull request 522](https://github.com/meta-pytorch/torchtune/pull/522), 2024). No test fails because of a
# read, as it changes no number.
# </details>

# %% tags=["remove-cell"]
SOLUTION = """
@jax.jit
def train_step(w, total, count, x_BD):
    value, grads = jax.value_and_grad(mean_error)(w, x_BD)
    length = norm(grads)
    good = jnp.isfinite(length)
    scale = jnp.minimum(1, 0.5 / length)
    new = jax.tree.map(lambda w, grad: w - 0.1 * scale * grad, w, grads)
    w = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, w)
    return w, total + jnp.where(good, value, 0), count + good


def fixed():
    w, log, total, count = start_weights(), [], jnp.zeros(()), jnp.zeros((), int)
    for number, x_BD in enumerate(batches(), 1):
        w, total, count = train_step(w, total, count, x_BD)
        if number % EVERY == 0:
            log.append(float(total / count))
            total, count = jnp.zeros(()), jnp.zeros((), int)
    return w, log
"""


def solved(*swaps):
    space, text = dict(globals()), SOLUTION
    for old, new in swaps:
        assert old in text, old
        text = text.replace(old, new)
    exec(text, space)
    return space["fixed"]


changed = lesson.rewritten(damaged, clip_factor, Meter, train)
lesson.expect(
    check_train,
    (train, "65 reads in 16 steps, for 4 log lines"),
    (changed(("any(not_finite(grad) for grad in grads.values())", "False")), "NaN"),
    (solved(), "Fixed: 4 reads"),
    (solved(("good, new, old", "True, new, old")), "The weights have a NaN"),
    (solved(("jnp.where(good, value, 0)", "value")), "A log line has a NaN"),
    (solved(("count + good", "count + 1")), "divides by 4"),
    (solved(("jnp.minimum(1, 0.5 / length)", "1")), "clipped as before"),
    (solved(("float(total / count)", "float(total)")), "not the log"),
    (solved(("float(total / count)", "float(total) / float(count)")), "Fixed: 8 reads"),
    (solved(("        if n", "        float(total)\n        if n")), "20 reads"),
    (solved(("number % EVERY", "number % 8")), "2 log lines instead of 4"),
    (solved(("= train_step(", "= jax.jit(lambda *a: train_step(*a))(")), "16 compil"),
    (lambda: ..., lesson.NOTHING), (lambda: 3, "Return the weights"),
    (lambda: 1 / 0, "It stops: ZeroDivisionError"),
)  # fmt: skip

# %% [markdown]
# ## In one table
#
# | | compute | exposed communication | idle |
# |---|---|---|---|
# | in a trace | matmuls and other operations, whatever else is in flight | collectives while nothing computes; `-done` on a TPU | gaps in the rows of a device |
# | a slow device | has more | has less: the others wait for it | |
# | planned | FLOPs / peak | bytes / bandwidth, less what overlaps | - |
# | count | FLOPs of the program | collectives and bytes of the program | compilations, reads, transfers |
# | typical causes | small matmuls, recomputation, on GPUs overlapped NCCL kernels | no overlap, a slow link, uneven work | reads, new shapes, input, Python |
# | JAX (`jax.profiler.trace`) | instructions such as `fusion` and `dot` | `all-gather`, `reduce-scatter` .. | `np.asarray(jax.Array)`, `backend_compile_and_load` on the host |
# | PyTorch (`torch.profiler`) | kernels of the compute stream | NCCL kernels with no compute kernel next to them | `aten::item`, `cudaStreamSynchronize` on the host |
# | Megatron-LM (`--profile`, Nsight Systems) | the same kernels | the same | the same |
#
# ## Three lines to keep
#
# 1. Split a step into compute, exposed communication and idle. Only the last two are stalls. A network that
#    is busy while a matmul runs stalls nothing, but on a GPU it may slow the matmul.
# 2. Count before you time: collectives, bytes, compilations and reads don't depend on the speed of the
#    machine.
# 3. Record a few steps, wait for the devices before and after, and compare with the plan and the simulation:
#    the largest difference is the finding.
#
# **Sources.** JAX, [Profiling computation](https://docs.jax.dev/en/latest/profiling.html) and [asynchronous
# dispatch](https://docs.jax.dev/en/latest/async_dispatch.html). The scaling book,
# [Profiling](https://jax-ml.github.io/scaling-book/profiling). [XProf](https://openxla.org/xprof) and
# [Perfetto](https://ui.perfetto.dev), which open the file. The Ultra-Scale Playbook on [traces and
# overlap](https://huggingface.co/spaces/nanotron/ultrascale-playbook).
