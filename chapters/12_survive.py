# %% [markdown]
# # 12 · Checkpoints and fault tolerance
#
# A checkpoint is a file with everything that a training run needs to resume: parameters, optimizer state
# and the step. Fault tolerance is the rest: detecting failures, skipping bad steps, and restarting without
# changing the result.
#
# A run of several weeks on a thousand hosts will be killed, will produce a NaN, and will have a chip that
# silently computes wrong numbers. A run that resumes *almost* correctly prints a falling loss, and weeks
# later nobody knows which results to trust.
#
# *Prerequisites:* chapter 03 (sharded parameters, gradients and optimizer state). *Mesh:* `fsdp=8`,
# `fsdp=4`, `data=8`, simulated. *Runs in* 35 s on 2 cores. *Reading takes* about an hour, with exercises.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)


import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax.sharding import NamedSharding

from chapters import lesson, opening
from plan.chips import hardware

GREY = lesson.NEUTRAL

# %% tags=["hide-input"] mystnb={"image": {"alt": "32 layers on eight devices. A blocking checkpoint: training stops for 6 seconds while the disk writes. An asynchronous checkpoint: it stops for 0.4 seconds, and the disk writes during the next steps; a second, hatched bar next to each device's bar is its snapshot of 10 GiB in host memory."}}
GiB, n = 2**30, opening.DEVICES
numbers = 32 * opening.PARAMETERS / n  # of a device, for 32 layers
held = {"weights": 4, "gradients": 4, "optimizer state": 8}  # bytes each, in float32
held = {name: size * numbers / GiB for name, size in held.items()}
state = 12 * numbers  # weights and two moments of a device, in bytes
copy_s, write_s, before = state / 25e9, n * state / 14e9, 4
ends = before + write_s
work = [("steps", 0, before), ("steps", ends, before)]
blocking = opening.Scene("Blocking", held, work, [("write", before, write_s)])
resumes, with_copy = before + copy_s, {**held, "snapshot in host memory": state / GiB}
work = [("steps", 0, before), ("steps", resumes, ends - copy_s)]
in_background = [("write", resumes, write_s)]
asynchronous = opening.Scene("Asynchronous", with_copy, work, in_background)
rows = dict(rows=("training", "disk"), units=("GiB", "seconds"))
title = "An asynchronous checkpoint stops training only for a copy"
opening.before_after(blocking, asynchronous, title, **rows)
arrow = dict(arrowstyle="->", lw=0.8)
copied = (before + copy_s / 2, -0.3), (before - 3, -0.5)
note = plt.gcf().axes[3].annotate("copy 0.4 s", *copied, arrowprops=arrow, size=8)

# %% [markdown]
# Eight H100s save 32 layers of Llama 3 8B, with everything in float32. A *blocking* save stops training
# until the file is written. An *asynchronous* save copies the state to host memory (the snapshot), and
# writes the file from there during the next steps. (The times are arithmetic: 25 GB/s from each device to
# its host, and a disk that writes 14 GB/s.)
#
# > **Predict.** Llama 3 405B has 405.9 billion parameters. For how many seconds does the same disk write its
# > checkpoint?

# %% tags=["hide-input"]
state_405B = 12 * 405_853_388_800  # bytes: weights and two moments in float32
write_405B_s = state_405B / 14e9

# %%
my_prediction = None  # seconds
lesson.predicted("seconds for a checkpoint", my_prediction, write_405B_s, within=0.05)

# %% [markdown]
# A checkpoint has 12 bytes per parameter (weights and Adam's two moments; gradients are not saved). That is 4.9
# TB, which this disk writes in almost six minutes. The run of Llama 3 405B was interrupted unexpectedly 419
# times in 54 days, once every three hours
# ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4).
#
# ## The program by hand: a loop that you can kill
#
# A resumed run continues *exactly* if its next step gets bitwise identical inputs. A training step is a
# function of four inputs:
#
# - the **parameters**;
# - the **optimizer state**: for Adam two moments per parameter, twice the bytes of the parameters;
# - the **step**, because the learning rate depends on it;
# - the **batch**. A data loader that remembers its position has state too. But if the batch is a function
#   of (seed, step), you only need to store the step.
#
# In the program below, the state is three arrays and a step number. The checkpoint stores the arrays
# unsharded and by name, and nothing about the mesh; you choose a sharding when you load. The program uses
# ZeRO-3 as in chapter 03: each of n devices stores d = D/n rows `w_dD` of the weights `w_DD`, and of their
# moments m and v. A batch has B = 16 rows of width D = 32. (`pickle` keeps the program short. Do not load
# untrusted pickles, because they can run code. The project stores plain arrays.)

# %% tags=["by-hand"]
import hashlib
import os
import pathlib
import pickle
import tempfile

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

B, D, spec, tmp = 16, 32, P("fsdp"), tempfile.mkdtemp()
INITIAL = 0, dict.fromkeys("wmv", np.zeros((D, D), np.float32))  # step, and w, m, v


def batch(seed, step):  # depends on nothing else: not on devices or earlier reads
    x_BD = np.random.default_rng((seed, step)).normal(size=(B, D)).astype(np.float32)
    return x_BD, np.sin(2 * x_BD)


def local_loss(w_dD, x_bD, y_bD):  # this device's share of the mean over B rows
    w_DD = jax.lax.all_gather(w_dD, "fsdp", axis=0, tiled=True)
    return ((x_bD @ w_DD - y_bD) ** 2).sum() / (B * D)


# %% tags=["by-hand"]
def update(state, x_bD, y_bD):  # Adam on this device's shards
    share, d_dD = jax.value_and_grad(local_loss)(state["w"], x_bD, y_bD)
    m, v = 0.9 * state["m"] + 0.1 * d_dD, 0.99 * state["v"] + 0.01 * d_dD**2
    new = dict(w=state["w"] - 0.01 * m / (v**0.5 + 1e-6), m=m, v=v)
    return new, jax.lax.psum(share, "fsdp")


def save(path, state):
    data = pickle.dumps(jax.tree.map(np.asarray, state))  # unsharded arrays by name
    pathlib.Path(path + ".tmp").write_bytes(hashlib.sha256(data).digest() + data)
    os.replace(path + ".tmp", path)  # readers see either the old file or the new one


def load(path):
    raw = pathlib.Path(path).read_bytes()
    assert hashlib.sha256(raw[32:]).digest() == raw[:32], "the file is damaged"
    return pickle.loads(raw[32:])


# %% tags=["by-hand"]
def run(path, n, stop):  # on n devices, resumes from the file if it exists
    on = jax.make_mesh((n,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:n])
    step = jax.jit(jax.shard_map(update, mesh=on, in_specs=spec, out_specs=(spec, P())))
    (begin, state), losses = load(path) if os.path.exists(path) else INITIAL, {}
    for t in range(begin, stop):
        state, losses[t] = step(state, *batch(0, t))
        if (t + 1) % 10 == 0:
            save(path, (t + 1, state))
    return np.array([*losses.values()]), jax.tree.map(np.asarray, state)


# %% [markdown]
# One run trains from beginning to end on 8 devices, and one on a single device for comparison. Two more
# runs die after step 24. (Here, `run` returns and everything in memory is lost. A real `kill -9` follows
# below.) One of the two resumes on 8 devices. The other resumes on 4, because half of the machine is gone.

# %% tags=["by-hand"]
(straight, end), (alone, _) = run(tmp + "/straight", 8, 60), run(tmp + "/alone", 1, 60)
_ = run(tmp + "/same", 8, 24), run(tmp + "/moved", 8, 24)  # die; the files have step 20
(same, end_same), (moved, _) = run(tmp + "/same", 8, 60), run(tmp + "/moved", 4, 60)
assert pickle.dumps((same, end_same)) == pickle.dumps((straight[20:], end)), "bits"
assert np.allclose([*straight, *moved], [*alone, *alone[20:]], 1e-5), "not one device"
print("8, 8: identical; 8, 4: differ by", np.abs(moved / straight[20:] - 1).max())

# %% [markdown]
# On the same number of devices, the results are bitwise identical, because sums use the same order. Four
# devices sum in a different order, so the losses differ by rounding.

# %% tags=["hide-input"] mystnb={"image": {"alt": "Left, a square split into eight strips, one for each of devices 0 to 7; middle, one unsplit square, the checkpoint; right, four strips for devices 0 to 3."}}
title = "The checkpoint does not depend on the mesh (numbers: devices)"
_, panels = lesson.panels(title, 1, 3, figsize=(6.2, 2.4))
for n, axes in ((8, panels[0]), (4, panels[2])):
    on = jax.make_mesh((n,), ("fsdp",), (AxisType.Auto,), devices=jax.devices()[:n])
    lesson.slices(axes, on, spec, "DD", f"w, m, v on fsdp={n}")
panels[1].add_patch(plt.Rectangle((0.15, 0.1), 0.7, 0.8, fc=GREY, alpha=0.35))
panels[1].text(0.5, 0.5, "w  m  v\nstep 20\nsha256", ha="center", va="center")
panels[1].set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], title="the checkpoint")
panels[1].spines[:].set_visible(False)
for x, name in ((-0.2, "save"), (1.02, "load")):
    style = dict(xycoords="axes fraction", textcoords="axes fraction")
    style |= dict(arrowprops=dict(arrowstyle="->"), va="center", annotation_clip=False)
    panels[1].annotate(name, (x + 0.3, 0.5), (x - 0.1, 0.5), size=9, **style)

# %% [markdown]
# ## What if you forget something?
#
# Many first versions write one of two incomplete checkpoints. One contains only the parameters and the
# step, so Adam restarts with zero moments. The other contains parameters and moments, but not the step, so
# the loader restarts with its first batch.

# %% mystnb={"image": {"alt": "Three loss curves from step 10 to 60 that separate at step 20: without moments the loss almost coincides with the uninterrupted run, with the data from the start it is clearly lower for twenty steps."}}
_, state = run(tmp + "/cut", 8, 20)
save(tmp + "/no moments", (20, INITIAL[1] | dict(w=state["w"])))
save(tmp + "/no step", (0, state))
no_moments, _ = run(tmp + "/no moments", 8, 60)
from_start, _ = run(tmp + "/no step", 8, 40)
figure, axes = plt.subplots(figsize=(6, 3.2))
wide = dict(color=GREY, lw=4, alpha=0.5)
axes.plot(range(11, 61), straight[10:], label="never killed", **wide)
axes.plot(range(21, 61), no_moments, color="black", lw=1, label="moments forgotten")
axes.plot(range(21, 61), from_start, "--", color="black", label="step forgotten")
axes.axvline(20.5, color=GREY, lw=0.8)
axes.set(xlabel="step", ylabel="loss")
axes.set_title("Two wrong resumes, and one has a lower loss")
axes.legend(ncols=3, fontsize=8, loc="lower left")
axes.set_ylim(0.25)
off = np.abs(no_moments / straight[20:] - 1).max()
lower = 1 - from_start[:20].mean() / straight[20:40].mean()
print(f"moments forgotten: off by up to {off:.1%}; step forgotten: {lower:.0%} lower")
assert off < 0.12 and lower > 0.1, "the text below no longer fits"

# %% [markdown]
# Without the moments, every point of the curve is slightly wrong, but nobody would notice. With the old
# batches, the loss is *lower*, because the model has memorized these rows, until new rows begin. You can
# see neither without a reference run. So do not test that a run resumes. Test that it is bitwise identical
# to an uninterrupted run.
#
# ## Exercise 1: a save that survives a kill
#
# `save` above writes a temporary file next to the old one, then renames it. That survives a kill, but not a
# power failure: `write` passes the bytes to the operating system, which may write them to disk only after
# the rename. Write a save that survives both. `disk` has `write(name, data)`, `sync(name)` (returns when
# the bytes of the file are on disk), `rename(old, new)` and `remove(name)`. A valid file `"state"` exists.
# The checker runs your code many times, and stops it before each operation once.


# %% tags=["hide-input"]
class Killed(BaseException):
    """The process was killed, or the power failed."""


# %% tags=["hide-input"]
class Process:
    """A process that is killed before operation `dies`, counted from 0."""

    def __init__(self, dies):
        self.left = dies

    def work(self):
        if self.left == 0:
            raise Killed
        self.left -= 1


# %% tags=["hide-input"]
class Disk(Process):
    """`files` is what processes see, `safe` is what survives a power failure."""

    def __init__(self, dies):
        super().__init__(dies)
        self.files, self.safe = {"state": "old state"}, {"state": "old state"}

    def write(self, name, data):
        for part in (data[: len(data) // 2], data):
            self.work()
            self.files[name], self.safe[name] = part, ""

    def sync(self, name):
        self.work()
        self.safe[name] = self.files[name]

    def rename(self, old, new):
        self.work()
        self.files[new], self.safe[new] = self.files.pop(old), self.safe.pop(old)

    def remove(self, name):
        self.work()
        del self.files[name], self.safe[name]


# %% tags=["hide-input"]
def left_by(answer):
    """The content of "state" if `answer` is stopped before its operation `dies`."""

    def after(dies, cut):
        disk = Disk(dies)
        try:
            if not callable(answer) or answer(disk, "new state") is ...:
                raise lesson.Unanswered
        except Killed:
            pass
        text = (disk.safe if cut == "power cut" else disk.files).get("state", "nothing")
        if dies == 99:
            return text
        whole = text[3:] == " state"
        return "whole" if whole else text if text == "nothing" else "half"

    return after


# %% tags=["hide-input"]
def check_save(answer):
    cases = [(dies, cut) for cut in ("kill", "power cut") for dies in (*range(9), 99)]
    right = lambda dies, cut: "new state" if dies == 99 else "whole"
    hints = [(left_by(wrong), hint) for wrong, hint in SAVE_HINTS]
    done = "Right: always the old state or the new one, complete."
    return lesson.diagnose(left_by(answer), cases, right, hints, done)


def doing(*words):
    """A save with these operations: doing("write tmp", "rename tmp state")."""

    def answer(disk, data):
        for word in words:
            what, *names = word.split()
            getattr(disk, what)(*names, *[data] * (what == "write"))

    return answer


GAP = "If stopped between two of your operations, there is no state file at all."
LATE = "It survives a kill. After a power failure, the bytes may not be on disk."
TORN = "If stopped during `write`, the only state file is incomplete."

# %% tags=["hide-input"]
SAVE_HINTS = [
    (doing("write state"), TORN), (doing("write state", "sync state"), TORN),
    (doing("remove state", "write state", "sync state"), TORN),
    (doing("write tmp", "rename tmp state"), LATE),
    (doing("write tmp", "rename tmp state", "sync state"), LATE),
    (doing("write tmp", "sync tmp", "remove state", "rename tmp state"), GAP),
    (doing("write tmp", "remove state", "sync tmp", "rename tmp state"), GAP),
    (doing("remove state", "write tmp", "sync tmp", "rename tmp state"), GAP),
    (doing("write tmp", "sync tmp"), "Never incomplete, but also never new."),
]  # fmt: skip


# %%
def atomic_save(disk, data):
    return ...


print(check_save(atomic_save))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `disk.write("tmp", data); disk.sync("tmp"); disk.rename("tmp", "state")`. In Python: `file.flush()`,
# `os.fsync(file.fileno())`, `os.replace`. With many hosts, the rename means "all hosts have written their
# shards", so one process renames, after a barrier.
# </details>

# %% tags=["remove-cell"]
answer_1 = doing("write tmp", "sync tmp", "rename tmp state")
lesson.expect(check_save, *SAVE_HINTS, (answer_1, "Right"),
              (atomic_save, lesson.NOTHING),
              (lambda disk, data: None, "Never incomplete"),
              (doing("write state", "remove tmp"), "It stops"))  # fmt: skip

# %% [markdown]
# ## kill -9
#
# So far, no run was really killed. Now run the project's trainer, `main.py`, in separate processes, with
# one layer and a checkpoint every 10 steps, written in the background. The next cell kills the first
# process with `kill -9` some time after step 55, and copies its run directory. One copy resumes on the same
# mesh, the other on a different mesh.

# %% tags=["hide-input"]
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys

from data import prepare

root, runs = pathlib.Path(lesson.__file__).parents[1], pathlib.Path(tmp)
for n in range(12):
    (runs / f"{n}.txt").write_text("abcd efgh. " * (30 + n))
words = prepare.Arguments(tmp + "/tokens", f"text:{tmp}/*.txt", "bytes", val_share=0.3)
with contextlib.redirect_stdout(io.StringIO()):
    prepare.prepare(words)
MAIN = f"""tiny --model.n_layers 1 --model.dense_prefix 0 --model.moe_every 1
--model.attention gqa --model.n_shared 0 --data.path {tmp}/tokens --run.dir {tmp}
--run.steps 5000 --run.log_every 1 --run.eval_every 0
--run.checkpoint_every 10""".split()


# %% tags=["hide-input"]
def killed_after(step, name, mesh):
    """Start main.py, kill -9 it after a step; return its first step and losses."""
    argv = [sys.executable, "main.py", *MAIN, "--run.name", name, *mesh.split()]
    # Notebooks set variables that turn on colors and progress bars.
    env = {k: v for k, v in os.environ.items() if "COLOR" not in k}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    where, resumed, said = runs / name, 0, []
    number = lambda start, line: int((re.findall(start + r"(\d+)", line) or [0])[0])
    with subprocess.Popen(argv, cwd=root, **pipes) as process:
        for line in process.stdout:
            said.append(line)
            resumed = resumed or number("^resumed +at step ", line)
            saved = any(f.name.isdigit() for f in where.glob("checkpoints/*"))
            if saved and number("^step +", line) >= step:
                process.kill()
                break
    assert process.returncode == -9, "".join(said)
    lines = (where / "metrics.jsonl").read_text().split("\n")[:-1]  # complete ones
    rows = map(json.loads, lines)
    return resumed, {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


# %%
_, before = killed_after(55, "first", "--devices 2 --mesh fsdp=2")
last = max(before)
shutil.copytree(runs / "first", runs / "other")
begin, again = killed_after(last, "first", "--devices 2 --mesh fsdp=2")
_, other = killed_after(last, "other", "--devices 4 --mesh data=2,fsdp=2")
twice = range(begin + 1, last + 1)
assert all(again[t] == before[t] for t in twice), "the resumed losses differ"
moved_off = max([abs(other[t] / before[t] - 1) for t in twice if t in other] or [0])
assert moved_off < 1e-5, "another mesh should change nothing but rounding"
print(f"killed at step {last}, resumed at step {begin}: {len(twice)} steps ran twice")
print("fsdp=2 again: their losses are bitwise identical")
print(f"data=2,fsdp=2: relative difference at most {moved_off:.0e}")

# %% [markdown]
# The only cost is that some steps run twice: the steps since the last *complete* checkpoint. A run that is
# killed at step 55 may resume at step 40, if the background save of step 50 was not finished. The trainer keeps
# the old losses of the steps that run twice, and compares them with the new ones. So each resume also tests the
# hardware for free.
#
# ## A NaN, and a loss spike
#
# One bad value is enough. If one row on one device gives NaN, the summed gradients are NaN on all devices,
# and Adam makes every weight NaN. A bad but finite batch does less damage, but the damage lasts, because it
# is stored in the moments.
#
# The same rule handles both. Before you apply an update, check a value that is *all-reduced* over all
# devices, such as the loss. If it is bad, skip the update and keep the old state. Still count the step, or
# you would get the same batch forever.

# %%
mesh = jax.make_mesh((8,), ("fsdp",), (AxisType.Auto,))


def guarded_step(state, x_bD, y_bD, limit):
    new, loss = update(state, x_bD, y_bD)
    fine = loss < limit  # the same on all devices; False for a NaN
    return jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, state), loss


specs = dict(mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=(spec, P()))
guarded = jax.jit(jax.shard_map(guarded_step, **specs))
specs = dict(mesh=mesh, in_specs=spec, out_specs=(spec, P()))
plain = jax.jit(jax.shard_map(update, **specs))


# %% [markdown]
# Here, a loss is bad if it is NaN or at least three times the median of the last 20 good losses. In the
# first of two experiments, row 5 (device 2) is NaN at step 60. In the second, its targets are 100 times
# too large at steps 60 to 62.


# %%
def trained(bad, guard):
    state, losses, good, skipped = INITIAL[1], [], [], []
    for t in range(160):
        x_BD, y_BD = batch(0, t)
        y_BD[5] *= bad.get(t, 1)
        recent = [losses[k] for k in good[-20:]]
        limit = 3 * np.median(recent) if len(recent) == 20 else np.inf
        args = state, x_BD, y_BD
        state, loss = guarded(*args, limit) if guard else plain(*args)
        losses.append(float(loss))
        (good if loss < limit else skipped).append(t)
    return np.array(losses), skipped, int(np.isnan(state["w"]).sum())


NAN, BIG = {60: np.nan}, {60: 100.0, 61: 100.0, 62: 100.0}
healthy, _, _ = trained({}, guard=False)
_, _, spread = trained(NAN, guard=False)
_, over, left = trained(NAN, guard=True)
print(f"unguarded: {spread:,} of {D * D:,} weights are NaN")
print(f"guarded: {left} weights are NaN, skipped steps {over}")

# %% mystnb={"image": {"alt": "Two curves of the loss relative to a healthy run: both leave the plot at steps 60 to 62; with the bad steps kept, the curve returns to 1, climbs to 1.5 at step 78, and recovers only at step 130; with the bad steps skipped, it stays at 1."}}
spiked, _, _ = trained(BIG, guard=False)
calm, over, _ = trained(BIG, guard=True)
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(spiked / healthy, color="black", label="bad steps kept")
axes.plot(calm / healthy, color=GREY, lw=3, label="bad steps skipped")
axes.set(title="The loss rises again after the spike", xlabel="step", ylim=(0.8, 1.8))
axes.set_ylabel("loss / loss of a healthy run")
axes.legend(loc="upper left")
late = (spiked / healthy)[75:].argmax() + 75
times = spiked / healthy
print(f"skipped: {over}. If kept: {times[60]:,.0f} times the healthy loss at step 60,")
print(f"{times[64]:.2f} times at step 64, {times[late]:.2f} times at step {late}")
assert over == [60, 61, 62] and np.abs(calm / healthy - 1)[63:].max() < 0.05
assert times[64] < 1.1 and times[late] > 1.3, "the text describes another spike"

# %% [markdown]
# Both curves have the spike at steps 60 to 62, because the loss of a bad batch is large in either run. But
# only the unguarded run applies these updates. At step 64 its loss looks healthy. Then it climbs until step
# 78, because the bad gradients are still in Adam's first moment, which loses 10% of them per step: after 15
# steps, a fifth is left. The run recovers slowly, because the second moment is too large and decays by only
# 1% per step, so each update is too small.
#
# The rule compares a loss with the last 20. So these 20 losses are *state*, and belong in the checkpoint:
# without them, a resumed run skips different batches.
#
# If you discover a spike late, go back to a checkpoint before it, and skip the bad batches. The loss of
# PaLM spiked about 20 times, in spite of gradient clipping. Each time, training restarted from a checkpoint
# about 100 steps earlier and skipped 200 to 500 batches. The same batches did no harm when training from a
# different checkpoint ([arXiv:2204.02311](https://arxiv.org/abs/2204.02311), section 5.1).
#
# The project's trainer skips a step if its loss or gradients are not finite (`optimizer.train_step`). Here
# is what the user sees:

# %% tags=["hide-input"]
import config
import dataset
import optimizer
import sharding
from train import guard

small = {"mesh": "fsdp=2", "data.path": tmp + "/tokens", "model.attention": "gqa",
         "model.n_layers": 1, "model.dense_prefix": 0, "model.moe_every": 1,
         "model.n_shared": 0}  # fmt: skip
cfg = config.preset("tiny", **small)
two = sharding.make_mesh(cfg.mesh)
state, take = optimizer.init(cfg, two), optimizer.train_step(cfg, two)
watch = guard.SkipWatch(cfg, lambda *row, **more: None)
kept = lambda state: sharding.flatten_named(jax.tree.map(np.asarray, state))

# %%
bad = dataset.batch(cfg, 0)
bad["weights_BT"][3, 2] = np.nan  # the weight of one target of one sequence
old = kept(state)
state, values = take(state, sharding.put(bad, two))
watch.add_step(1, values)
watch.check_pending()
new = kept(state)
changed = {name for name in old if not np.array_equal(old[name], new[name])}
print(f"changed, of {len(old)} arrays: {', '.join(sorted(changed))}")
assert changed == {"step", "skipped_steps", "skipped_in_a_row"}

# %% [markdown]
# ## Silent data corruption: a replica that differs
#
# The replicas of the weights along `data` are equal because they started equal and get equal updates.
# Nothing ever compares them. Now flip one bit of one weight on replica 5, as a bad memory cell does. (The
# optimizer is plain gradient descent. `grad` inside `shard_map` sums the eight devices' gradients, see
# chapter 01.)

# %%
replicas = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
w_DD = np.float32(np.random.default_rng(1).normal(size=(D, D)) / D**0.5)


def replica_step(w_DD, x_bD, y_bD):
    share = lambda w_DD: jnp.sum((x_bD @ w_DD - y_bD) ** 2) / (B * D)
    share, d_DD = jax.value_and_grad(share)(w_DD)
    return w_DD - d_DD, jax.lax.psum(share, "data")


def flipped(bit, replica=5):
    """Eight replicas that JAX treats as equal; one of them has a flipped bit."""
    copies = [w_DD.copy() for _ in range(8)]
    if bit is not None:
        copies[replica].view(np.uint32)[3, 4] ^= np.uint32(1 << bit)
    placed = [jax.device_put(*pair) for pair in zip(copies, jax.devices(), strict=True)]
    whole = NamedSharding(replicas, P())
    return jax.make_array_from_single_device_arrays((D, D), whole, placed)


# %% [markdown]
# A float32 has 32 bits: 23 for the fraction (bits 0 to 22), 8 for the exponent (23 to 30), and the sign (31).
# Here is the weight before the flip:

# %%
word = int(w_DD[3, 4].view(np.uint32))
sign, exponent, fraction = word >> 31, word >> 23 & 255, word & 2**23 - 1
print(f"{w_DD[3, 4]:.4f}: sign {sign}, exponent {exponent:08b}, ", end="")
print(f"fraction {fraction:023b}")

# %% [markdown]
# > **Predict.** Each of the 32 bits is flipped in a separate run of 100 steps. As always, the loss is
# > summed over all eight devices. In how many of the 32 runs is the printed loss off by more than 1% in any
# > step?

# %%
specs = dict(mesh=replicas, in_specs=(P(), P("data"), P("data")), out_specs=P())
step = jax.jit(jax.shard_map(replica_step, **specs))


def hundred_steps(w, look=False):
    losses, apart = [], []
    for t in range(100):
        w, loss = step(w, *batches[t])
        losses.append(loss)
        if look:
            on = [np.asarray(one.data) for one in w.addressable_shards]
            apart.append(np.abs(on[5] - on[0]).max())
    return np.array(losses), np.array(apart), w


# %% tags=["hide-input"]
batches = [jax.device_put(batch(0, t)) for t in range(100)]
equal, _, _ = hundred_steps(flipped(None))
bits = [hundred_steps(flipped(bit)) for bit in range(32)]
seen = [b for b in range(32) if np.abs(bits[b][0] / equal - 1).max() > 0.01]

# %%
my_prediction = None  # 0 to 32
lesson.predicted("runs with a visible change", my_prediction, len(seen))

# %% tags=["remove-cell"]
assert seen == [25, 30], "with another weight, other bits are visible"

# %% [markdown]
# <details><summary>Why</summary>
#
# In this weight's exponent, bits 25 and 30 are 0. If bit 25 flips, the weight becomes 16 times as large. If bit
# 30 flips, it becomes -4e37. Any other flip changes one of 1,024 small weights by at most twice its size (the
# sign), which the loss does not show.
# </details>
#
# The damage does not go away:
#
# > **Predict.** Bit 22, the highest bit of the fraction, is flipped. After 100 steps, how many times its
# > initial size is the difference between replica 5 and the others?

# %% tags=["hide-input"]
losses, apart, w = hundred_steps(flipped(22), look=True)
grown = round(float(apart[-1] / apart[0]), 3)

# %%
my_prediction = None  # times
lesson.predicted("after 100 steps", my_prediction, grown, "times", within=0.02)

# %% tags=["remove-cell"]
assert grown == 1, "the replicas get different updates"

# %% [markdown]
# <details><summary>Why</summary>
#
# The gradient is summed over all replicas, so all get the same update, and the difference stays exactly the
# same.
# </details>
#
# Would you notice it in the loss?

# %% tags=["hide-input"] mystnb={"image": {"alt": "Two curves over 100 steps on a logarithmic axis: the largest difference of a weight between replicas stays constant; the relative change of the loss is far below it and below 1 percent."}}
figure, axes = plt.subplots(figsize=(5.4, 2.8))
axes.semilogy(apart, color=lesson.COLORS["data"], label="weights: largest difference")
change = np.abs(losses / equal - 1)
axes.semilogy(change, color=GREY, lw=1, label="loss: relative change")
axes.axhline(0.01, color="black", ls=":", lw=0.8)
axes.text(100, 0.011, "1%", ha="right", va="bottom", size=8)
axes.set(title="The replicas differ, and the loss hides it", xlabel="step")
legend = axes.legend(fontsize=8, loc="lower left")

# %% [markdown]
# The all-reduce does not repair the difference. It hides it. From now on, an eighth of each gradient is
# computed with the wrong weights, and the saved model depends on which replica writes it. To detect this,
# compare bits:

# %%
digest = lambda one: hashlib.sha256(np.asarray(one.data)).hexdigest()[:6]
print(*map(digest, w.addressable_shards))

# %% [markdown]
# To compare on the hosts, you have to copy all weights there. On the devices, you only sum the bits as
# integers, and send the four bytes of the sum. A sum of *floats* does not work, because rounding hides a
# small difference.

# %%
few = bits[1][2].addressable_shards
sums = [np.asarray(few[r].data) for r in (0, 5)]
print("sums as float32 ", *[one.sum() for one in sums])
print("sums of the bits", *[one.view(np.uint32).sum(dtype=np.uint32) for one in sums])
all_bytes = 8e9 * 4  # 8 billion float32 weights, replicated on each of 8 devices
for chip in (hardware.CHIPS["v5p"], hardware.CHIPS["h100"]):
    read, sent = all_bytes / chip.hbm_bytes_per_s, 7 * all_bytes / chip.dcn_bytes_per_s
    print(f"{chip.name}: read all weights {read * 1e3:.0f} ms; gather all {sent:.0f} s")

# %% [markdown]
# `data` usually crosses the network between TPU slices or GPU nodes. The second number is the time to send all
# weights over it, which nobody does. Sending four bytes only costs latency. (These times are computed;
# simulated devices cannot measure time.)
#
# The method has two limits. Shards along `fsdp` have no replicas to compare with. And if a chip *computes*
# wrongly, the all-reduce adds its wrong gradient on every replica, so all replicas agree on a wrong number.
# You can find this only by repeating a step on other chips, which requires a bitwise identical state and
# batch. Gemini's report calls this "deterministic replay", and expects silent data corruption every week or
# two ([arXiv:2312.11805](https://arxiv.org/abs/2312.11805), section 3).
#
# ## Exercise 2: which replica?
#
# `mine` is the checksum of this replica's weights, a uint32. On every device, return the index of the
# replica that differs from the others, or -1 if none does. Your code runs inside `shard_map` over `data`.
# `jax.lax.all_gather(mine, "data")` returns all checksums, and `jax.lax.axis_index("data")` the index of
# this replica.


# %% tags=["hide-input"]
def found_by(answer):
    """What `answer` returns on each of eight devices, if one has a flipped bit."""

    def local(w_DD):
        w_DD = jax.lax.pcast(w_DD, "data", to="varying")
        bits_DD = jax.lax.bitcast_convert_type(w_DD, jnp.uint32)
        said = answer(jnp.sum(bits_DD, dtype=jnp.uint32))
        return jnp.reshape(jnp.asarray(said, jnp.int32), ())

    on_all = lesson.on_each(local, replicas, P())
    return lambda odd: np.asarray(on_all(flipped(None if odd < 0 else 12, odd)))


def check_odd(answer):
    cases, right = [(odd,) for odd in (-1, 0, 5, 7)], lambda odd: np.full(8, odd)
    done = "Right, with 4 bytes per replica."
    return lesson.diagnose(answer, cases, right, ODD_HINTS, done, run=found_by)


everyone = lambda mine: jax.lax.all_gather(mine, "data")
number = lambda: jax.lax.axis_index("data")
where_any = lambda odd: jnp.where(jnp.any(odd), jnp.argmax(odd), -1)
middle = lambda one: jnp.sort(everyone(one))[4]
OWN = "Each replica assumes that it is right. What does the bad one return?"
FIRST = "You assume that replica 0 is right. What if it is the bad one?"
SPREAD = "You detect *that* replicas differ, but not which one."

# %% tags=["hide-input"]
ODD_HINTS = [
    (lambda one: where_any(everyone(one) != one), OWN),
    (lambda one: jnp.argmax(everyone(one) != one), OWN),
    (lambda one: where_any(everyone(one) != everyone(one)[0]), FIRST),
    (lambda one: jnp.argmax(everyone(one) != everyone(one)[0]), FIRST),
    (lambda one: jnp.argmax(everyone(one) != middle(one)),
     "Right if there is a bad replica. If there is none, you return replica 0."),
    (lambda one: jnp.where(one != middle(one), number(), -1),
     "Only the bad replica returns its index. All of them should."),
    (lambda one: jnp.where(jax.lax.pmax(one, "data") != jax.lax.pmin(one, "data"),
                           number(), -1), SPREAD),
]  # fmt: skip


# %%
def odd_one(mine):
    return ...


print(check_odd(odd_one))

# %% [markdown]
# <details><summary>Solution</summary>
#
# At most one replica is wrong, so the median checksum is right: `all_8 = jax.lax.all_gather(mine, "data");
# odd = all_8 != jnp.sort(all_8)[4]`, then `return jnp.where(odd.any(), jnp.argmax(odd), -1)`. With two
# replicas, you can detect that they differ, but not which one is wrong; that takes three. To repair the
# run, copy the weights from a good replica or load the last checkpoint, and replace the chip.
# </details>

# %% tags=["remove-cell"]
answer_2 = lambda one: where_any(everyone(one) != middle(one))
lesson.expect(check_odd, *ODD_HINTS, (answer_2, "Right"), (odd_one, lesson.NOTHING))

# %% [markdown]
# ## How often to save
#
# Saving costs time, and not saving costs steps. Llama 3's 16,384 GPUs were in 2,048 hosts of 8. (Six of the
# 419 interruptions were silent data corruption.) If a single host caused each of the 419, a host fails once in:

# %%
DAY = 24 * 3600
host_mtbf_s = 54 * DAY * 2048 / 419  # MTBF: mean time between failures
of_2048_h = host_mtbf_s / 2048 / 3600
print(f"{host_mtbf_s / DAY:.0f} days, and one of 2,048 in {of_2048_h:.1f} h")

# %% [markdown]
# Suppose that a save stops training for c = 60 s, and a restart takes r = 600 s. (In 60 s, a disk of 14 GB/s
# writes 840 GB: 70 billion parameters and their moments in float32.) MTBF is the mean time between failures
# of all hosts together. **Goodput** is the fraction of time spent on steps that are not lost.
#
# > **Predict.** With 1,024 hosts, MTBF = 6.2 h. How many minutes should you train between two saves?

# %%
c, r = 60.0, 600.0


def goodput(interval_s, mtbf, c, r, failures=20_000):
    """Simulate: train, save, train, save, until something fails; then restart."""
    until_s = np.random.default_rng(0).exponential(mtbf, failures)
    kept_s = until_s // (interval_s + c) * interval_s  # saved training time is kept
    return kept_s.sum() / (until_s + r).sum()


# %% tags=["hide-input"]
mtbf = host_mtbf_s / 1024
minutes = np.arange(2, 121)
simulated = [goodput(60 * m, mtbf, c, r) for m in minutes]
best = int(minutes[np.argmax(simulated)])

# %%
my_prediction = None  # minutes
lesson.predicted("best interval, simulated", my_prediction, best, "minutes", 0.2)

# %% [markdown]
# <details><summary>Why</summary>
#
# The rule below gives sqrt(2 x 60 s x 22,300 s) = 1,640 s, or 27 minutes.
# </details>
#
# Let t be the training time between two saves. Saving takes a fraction c/t of the time. A failure can
# happen at any moment of t, so it loses t/2 on average, once per MTBF: a fraction t/(2 MTBF). The sum c/t +
# t/(2 MTBF) is smallest if the two terms are equal:
#
# $$
# t = \sqrt{2\,c\,\text{MTBF}}, \qquad \text{goodput} \approx 1 - \sqrt{2c/\text{MTBF}} - r/\text{MTBF}
# $$
#
# This is Young's rule of 1974; Daly derived the next terms. It holds while c is much smaller than MTBF.
# Does the simulation agree?

# %% mystnb={"image": {"alt": "Goodput against minutes between saves on a logarithmic axis: for 32 hosts a flat curve near 98 percent with its best at 150 minutes, for 1,024 hosts a curve that peaks at 90 percent near 27 minutes and falls on both sides."}}
young = lambda c, mtbf: (2 * c * mtbf) ** 0.5
formula = lambda c, mtbf, r: 1 - (2 * c / mtbf) ** 0.5 - r / mtbf
figure, axes = plt.subplots(figsize=(6, 3.2))
for hosts, colour in ((32, GREY), (1024, "black")):
    mtbf = host_mtbf_s / hosts
    times = np.geomspace(120, 12 * 3600, 40)
    shares = [100 * goodput(s, mtbf, c, r) for s in times]
    axes.semilogx(times / 60, shares, color=colour, label=f"{hosts:,} hosts")
    axes.axvline(young(c, mtbf) / 60, ls=":", color=colour)
axes.set(title="The best interval is in between", xlabel="minutes between saves")
axes.set(ylabel="goodput, %", ylim=(50, 100), xticks=[2, 10, 60, 600])
axes.set_xticklabels([2, 10, 60, 600])
axes.legend(loc="lower center")

# %%
print("hosts   MTBF    save every   goodput: formula  simulated   if a save stops 2 s")
for hosts in (8, 32, 256, 1024):
    mtbf = host_mtbf_s / hosts
    t = young(c, mtbf)
    by_formula, by_events = formula(c, mtbf, r), goodput(t, mtbf, c, r)
    quick = f"{young(2, mtbf) / 60:4.0f} min, {goodput(young(2, mtbf), mtbf, 2, r):.1%}"
    print(f"{hosts:5}  {mtbf / 3600:6.1f} h  {t / 60:4.0f} min {by_formula:16.1%} "
          f"{by_events:11.1%}   {quick}")  # fmt: skip
    assert abs(by_formula - by_events) < 0.01, "c is not small compared with the MTBF"
assert abs(best / (young(c, host_mtbf_s / 1024) / 60) - 1) < 0.2

# %% [markdown]
# The dotted lines show the rule. The maximum is flat: half or twice the interval costs little, but a tenth
# of the interval costs a lot. On 8 hosts, one save in five hours is enough for failures. (MTBF does not include
# your own mistakes, so save more often.) `python -m plan` [computes the interval with
# `--goodput`](../planner.md#how-long-will-it-take-and-what-will-it-cost). Set it with `--run.checkpoint_every`.
#
# At 1,024 hosts, a tenth of the machine time is lost, most of it to saves and lost steps. If a save stops
# training for only 2 s, to copy the state to host memory, and the file is written in the background, you
# save more than half of this loss. Then the *restart* costs the most: start-up, loading, compiling. Spare
# hosts and a compilation cache then help more than a better interval. Gemini keeps copies of the state in
# the memory of other hosts, and reports a goodput of 97%, against 85% for its predecessors.
#
# ## Exercise 3: the save interval
#
# Training stops for `stop_s` while the state is copied to the host. The file is then written in the
# background for `write_s`, and the next save cannot begin before that ends. Each host fails once in
# `host_mtbf_s` on average. Return the best number of seconds from one save to the next.


# %% tags=["hide-input"]
NO_FLOOR = "With a slow disk, a save would begin while the last one is still written."
ONE_HOST = "You count the failures of one host. There are more hosts."
HALF = "How much of an interval is lost on average?"
BOTH = "Does training stop while the disk writes?"
INTERVAL_HINTS = [
    (lambda c, w, m, h: young(c, m / h), NO_FLOOR),
    (lambda c, w, m, h: max(young(c, m), w), ONE_HOST),
    (lambda c, w, m, h: young(c, m), ONE_HOST),
    (lambda c, w, m, h: max(young(c, m * h), w), "Do more hosts fail less often?"),
    (lambda c, w, m, h: max((c * m / h) ** 0.5, w), HALF),
    (lambda c, w, m, h: (c * m / h) ** 0.5, HALF),
    (lambda c, w, m, h: young(w, m / h), BOTH),
    (lambda c, w, m, h: young(c + w, m / h), BOTH),
    (lambda c, w, m, h: max(young(c + w, m / h), w), BOTH),
    (lambda c, w, m, h: young(c, m / h) + w, "The two times overlap."),
]
year = 365.0 * DAY

# %% tags=["hide-input"]
check_interval = lesson.checker(
    [(60.0, 5.0, year, 64), (2.0, 30.0, 0.5 * year, 1024),
     (1.0, 900.0, year, 4096), (30.0, 2000.0, 0.3 * year, 4096)],
    lambda c, w, m, hosts: max(young(c, m / hosts), w), INTERVAL_HINTS,
    "Right: Young's rule, but never faster than the disk.", share=0.02)  # fmt: skip


# %%
def interval(stop_s, write_s, host_mtbf_s, hosts):
    return ...


print(check_interval(interval))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `return max((2 * stop_s * host_mtbf_s / hosts) ** 0.5, write_s)`. If the second term is larger, the disk
# is the bottleneck: write less, or let each host write its own shards.
# </details>

# %% tags=["remove-cell"]
by_rule = lambda c, w, m, h: max((2 * c * m / h) ** 0.5, w)
lesson.expect(check_interval, *INTERVAL_HINTS, (by_rule, "Right"),
              (interval, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## A bug to find
#
# This trainer keeps Adam's moments on the host, and writes checkpoints in the background. Its test is strict: a
# run that is killed and resumed must be bitwise identical to an uninterrupted one. The test passes on a
# workstation. On the cluster, where the disk is busy, a resumed run follows another curve. No save fails, every
# sha256 is right, and the number of devices is the same. Fix the program. (`Writer` replaces a thread, and
# writes `slow` steps later. `batch`, `save` and `load` are those of the program by hand.)


# %%
def shard_gradient(w_dD, x_bD, y_bD):
    share, d_dD = jax.value_and_grad(local_loss)(w_dD, x_bD, y_bD)
    return d_dD, jax.lax.psum(share, "fsdp")


specs = dict(mesh=mesh, in_specs=spec, out_specs=(spec, P()))
gradient = jax.jit(jax.shard_map(shard_gradient, **specs))


class HostAdam:
    """Adam with its moments in host memory; returns the change of the weights."""

    def __init__(self, m, v):
        self.m, self.v = m, v

    def change(self, d):
        self.m *= 0.9
        self.m += 0.1 * d
        self.v *= 0.99
        self.v += 0.01 * d**2
        size = np.sqrt(self.v) + 1e-6
        return -0.01 * self.m / size


# %%
class Writer:
    """Writes checkpoints in the background: `slow` steps after `put`."""

    def __init__(self, path, slow):
        self.path, self.slow, self.waiting = path, slow, []

    def put(self, step, state):
        on_host = jax.tree.map(np.asarray, state)
        self.waiting.append((step, on_host))

    def work(self, now):
        while self.waiting and self.waiting[0][0] + self.slow <= now:
            save(self.path, self.waiting.pop(0))


# %%
def run_offloaded(path, stop, slow=0):
    """Train until step `stop`, and resume from the file if it exists."""
    begin, state = load(path) if os.path.exists(path) else INITIAL
    w_DD = jax.device_put(state["w"], NamedSharding(mesh, spec))
    adam, writer = HostAdam(state["m"].copy(), state["v"].copy()), Writer(path, slow)
    losses = []
    for t in range(begin, stop):
        d_DD, loss = gradient(w_DD, *batch(0, t))
        losses.append(float(loss))
        w_DD = w_DD + adam.change(np.asarray(d_DD))
        if (t + 1) % 10 == 0:
            writer.put(t + 1, dict(w=w_DD, m=adam.m, v=adam.v))
        writer.work(now=t + 1)
    return np.array(losses)


# %% tags=["hide-input"] mystnb={"image": {"alt": "Relative difference of the loss of a resumed run from the uninterrupted one: exactly zero with an idle disk; with a busy disk it falls to minus 15 percent within five steps, and stays within a few percent later."}}
uninterrupted = run_offloaded(tmp + "/offloaded", 60)
figure, axes = plt.subplots(figsize=(6, 2.8))
resumed = {}
for slow, style in ((0, "-"), (5, "--")):
    path = f"{tmp}/offloaded {slow}"
    run_offloaded(path, 29, slow)  # is killed after step 29; the file has step 20
    resumed[slow] = run_offloaded(path, 60, slow) / uninterrupted[20:] - 1
    label = "idle disk" if slow == 0 else f"busy disk, slow={slow}"
    axes.plot(range(21, 61), 100 * resumed[slow], style, color="black", label=label)
    print(f"{label}: losses differ by up to {np.abs(resumed[slow]).max():.1%}")
axes.set(title="With a busy disk, the resumed run takes another path", xlabel="step")
axes.set_ylabel("difference of the loss, %")
legend = axes.legend()


# %% tags=["hide-input"]
def facts_of(run):
    """The step in the file, which arrays are right, and whether losses are the same."""

    def with_disk(slow):
        answer, path = lesson.answered(run), f"{tempfile.mkdtemp()}/state"
        first = answer(path, 20 + slow, slow)  # the file of step 20 is now complete
        step, state = load(path)
        good = [float(np.array_equal(state[k], AFTER_20[k])) for k in "wmv"]
        more = answer(path, 60, slow)
        same = np.array_equal([*first[:20], *more], uninterrupted)
        early = f"{tempfile.mkdtemp()}/state"
        answer(early, 20, slow)
        return np.array([step, *good, same, load(early)[0]])

    return with_disk


run_offloaded(tmp + "/20", 20)
AFTER_20 = {name: np.array(x) for name, x in load(tmp + "/20")[1].items()}


# %% tags=["hide-input", "hide-output"]
def check_run(answer):
    says = lambda w, m, v, same, early=10: lambda slow: np.array(
        [20, w, m, v, same, early] if slow else [20, 1, 1, 1, 1, 20])  # fmt: skip
    hints = [
        (says(1, 0, 0, 0), "Unchanged: with a busy disk, the losses differ."),
        (says(1, 1, 0, 0), "One of the arrays in the file is right now. Compare all."),
        (says(1, 0, 1, 0), "One of the arrays in the file is right now. Compare all."),
        (says(1, 1, 1, 1, 20), "The bits are right, but training waits for the disk."),
    ]
    done = "Right: the same bits, and training does not wait for the disk."
    right, cases = says(1, 1, 1, 1), [(0,), (3,), (5,)]
    return lesson.diagnose(facts_of(answer), cases, right, hints, done, share=0)


print(check_run(run_offloaded))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `np.asarray` in `put` copies arrays from the devices to the host. But the moments are on the host already,
# so `np.asarray` returns the *same* array, and `change` updates it in place before it is written. The file
# then has the weights of step 20 with the moments of step 25. Use `np.array`, which always copies.
# (Computing new arrays in `change` works too.) With an idle disk, the file is written before the next
# update, so the test passed.
#
# PyTorch's `torch.distributed.checkpoint.async_save` had this bug: its staging step moved tensors to the
# CPU, and that did nothing for tensors that were there already
# ([#144657](https://github.com/pytorch/pytorch/issues/144657); the
# [fix](https://github.com/pytorch/pytorch/pull/145408) copies always). Lightning's asynchronous checkpoints
# kept references to live tensors
# ([#20953](https://github.com/Lightning-AI/pytorch-lightning/issues/20953)). In NVIDIA's resiliency
# extension, a file had Adam's step count of one step and the weights of another, but only if the writer was
# slow enough ([#376](https://github.com/NVIDIA/nvidia-resiliency-ext/pull/376)). None of these saves
# failed: a checksum proves that the file has the bytes that were written, not that they belong together.
# </details>


# %% tags=["remove-cell"]
changed = lesson.rewritten(HostAdam, Writer, run_offloaded)
TO_HOST = "jax.tree.map(np.asarray, state)"
copied = changed((TO_HOST, "jax.tree.map(np.array, state)"))
new_m = ("self.m *= 0.9\n", "self.m = 0.9 * self.m\n")
new_v = ("self.v *= 0.99\n", "self.v = 0.99 * self.v\n")
late = ("self.waiting.pop(0))", "jax.tree.map(np.array, self.waiting.pop(0)))")
no_m = ('HostAdam(state["m"].copy()', 'HostAdam(0 * state["m"]')
at_once = ("self.waiting.append((step, on_host))", "save(self.path, (step, on_host))")
lesson.expect(check_run, (run_offloaded, "Unchanged"), (copied, "Right"),
              (changed(new_m, new_v), "Right"),
              (changed(late), "Unchanged"), (changed((TO_HOST, "state")), "Unchanged"),
              (changed(new_m), "One of the arrays"),
              (changed(("m=adam.m,", "m=adam.m.copy(),")), "One of the arrays"),
              (changed(new_v), "One of the arrays"),
              (changed(at_once), "training waits"), (changed(no_m), "Not yet"),
              (lambda path, stop, slow: None, "Nothing there"),
              (3, "It stops"))  # fmt: skip
assert not resumed[0].any() and np.abs(resumed[5]).max() > 0.01, "no visible symptom"

# %% [markdown]
# ## In one table
#
# Let s be the state (w, m, v and the step number t). A step is `s = step(s, f(seed, t))`, where f returns
# the batch. A run resumes exactly if both arguments are bitwise identical. P is the number of parameters.
# In the costs, the interval is the time between two saves, and r is the restart.
#
# | event | how you detect it | what it costs | in this project |
# |---|---|---|---|
# | a process dies | it exits, or sends no heartbeat for a minute | half an interval, and r | all processes stop and restart from the latest valid checkpoint (`train/hosts/watchdog.py`, `launcher.sh`) |
# | killed during a save | the final name is missing, or the sha256 is wrong | one more interval | `40.saving` is renamed to `40` last; a manifest with each file's sha256 (`train/checkpoint.py`) |
# | fewer devices | the mesh changes | rounding differences, 1e-7 per step | arrays are stored by name; any mesh can load them |
# | a NaN | loss or gradients, summed over all devices | one step | the step is skipped and reported; ten in a row stop the run (`train/guard.py`) |
# | a loss spike | loss or gradient norm against its median | the batches, or a rollback | gradients are clipped; you decide to go back: `--run.restart newest --data.skip 40:42` |
# | a replica differs | checksums compared over `data`, 4 bytes each | each check reads 4 P bytes of memory | not checked |
# | a chip computes wrongly | repeating a step on other chips | a step | `--replay N` compares with the log, bit for bit |
# | a slow host (straggler) | its time for a fixed matmul | all hosts wait for it | reported (`train/hosts/pace.py`) |
#
# | here | JAX | PyTorch | Megatron-LM |
# |---|---|---|---|
# | resharding checkpoint | Orbax | [DCP](https://docs.pytorch.org/docs/main/distributed.checkpoint.html), `torch.distributed.checkpoint` | `--ckpt-format torch_dist` |
# | write in the background | Orbax `AsyncCheckpointer` | `async_save` | `--async-save` |
# | restart processes | your launcher | `torchrun --max-restarts` (torch elastic); resuming is up to you | the same, or NVRx |
# | position in the data | the step; Grain | torchdata's `StatefulDataLoader`, one per rank | `consumed_train_samples` |
#
# **When.** Save every sqrt(2 c MTBF). With the failures above and c = 60 s, that is five hours on 8 nodes of
# 8 H100s, and 27 minutes on 1,024 nodes. For TPU hosts we know of no published rate; use your own. If the
# interval is only a few minutes, reduce c rather than the interval. A save's stop, lost steps and restarts are
# on the critical path; writing in the background is not.
#
# ## Three lines to keep
#
# 1. A resume is right if it is bitwise identical. So the batch must be a function of seed and step, not of
#    hosts, workers, or what was read before.
# 2. A sum over all devices is the same on all of them. So one rule can skip a NaN or a spike everywhere,
#    but the same sum hides a replica that differs.
# 3. Save every sqrt(2 · seconds that a save stops training · seconds between failures). Then make both the
#    stop and the restart shorter.
#
# **Sources.** Failures and goodput at scale: Llama 3, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783),
# 3.3.4; Gemini, [arXiv:2312.11805](https://arxiv.org/abs/2312.11805), 3; the logbook of
# [OPT-175B](https://github.com/facebookresearch/metaseq/tree/main/projects/OPT/chronicles), restart by
# restart. The interval: J. W. Young, [A first order approximation to the optimum checkpoint
# interval](https://doi.org/10.1145/361147.361115), 1974; J. T. Daly, [A higher order
# estimate](https://doi.org/10.1016/j.future.2004.11.016), 2006.
