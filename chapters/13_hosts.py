# %% [markdown]
# # 13 · Multi-host training
#
# In multi-host training, every host (a machine with a few chips) runs a copy of the same program, and the
# copies take each step together. If one of them is slow, dies, hangs or has different settings, it affects
# all.
#
# You need to know how such a failure is detected, and what happens then. If nobody notices, 32 machines are
# idle until someone looks in the morning. A wrong setting on one of them ruins the run, but no metric shows
# it.
#
# *Prerequisites:* chapters 01 (collectives) and 12 (what a restart loads). *Mesh:* `data=4`, one device
# for each of four processes. *Runs in* 60 s on 2 cores, most of it waiting. *Reading takes* half an hour.

# %% tags=["hide-input"]
from devices import simulate_devices

simulate_devices(8)

import matplotlib.pyplot as plt
import numpy as np

from chapters import four_hosts, lesson, opening

GREY = lesson.NEUTRAL

# %% tags=["hide-input"] mystnb={"image": {"alt": "Eight hosts. Above, milliseconds per step: with equal hosts all compute for 347; with host 5 a quarter slower, it computes for 463 and all others wait for 116; then the sum takes 61. Below, the same for host 0 and host 5 as a timeline, with a sum at the end of the step."}}
tokens = opening.TOKENS // opening.DEVICES  # of one of a host's eight H100s
step_ms = 32 * opening.compute_ms(6 * opening.PARAMETERS * tokens)
shard_bytes = 32 * 2 * opening.PARAMETERS / 8  # of the gradients, on one H100
sum_ms = 1e3 * 2 * 7 / 8 * shard_bytes / opening.CHIP.dcn_bytes_per_s


def step_with(slow_ms, title):
    """A step of eight hosts, if host 5 computes for slow_ms."""
    works = [slow_ms if host == 5 else step_ms for host in range(8)]
    waits = [max(works) - x for x in works]
    rows = [[("computes", 0, works[n]), ("sum", max(works), sum_ms)] for n in (0, 5)]
    if waits[0]:
        rows[0].insert(1, ("waits", works[0], waits[0]))
    bars = {"computes": works, "waits": waits, "sum": sum_ms}
    return opening.Scene(title, bars, *rows)


equal = step_with(step_ms, "Equal hosts")
uneven = step_with(step_ms * 4 / 3, "Host 5 runs at 3/4 of its speed")
labels = dict(rows=("host 0", "host 5"), units=("ms per step", "ms"), places="host")
opening.before_after(equal, uneven, "One slow host slows down all of them", **labels)

# %% [markdown]
# The figure shows a step of 32 layers of Llama 3 8B on eight hosts with eight H100s each. The weights are
# sharded inside each host (`fsdp=8`), and the batch over the hosts (`data=8`). A step ends with a sum of the
# gradients over all hosts, so the slowest host sets the pace. (The times are arithmetic at peak speed. Each
# H100 has 1.7 GB of bfloat16 gradients. To sum them, it sends 2 x 7/8 of that over its own 50 GB/s network
# card, in 61 ms. Communication inside a host is not drawn.)
#
# > **Predict.** Each host pauses in 1% of its steps, at random, for example to load data. In what
# > fraction of the steps do 128 hosts wait for at least one of them?

# %% tags=["hide-input"]
pauses = np.random.default_rng(0).random((10_000, 128)) < 0.01  # simulated steps, hosts
waiting = float(pauses.any(axis=1).mean())

# %% tags=["remove-cell"]
assert round(sum_ms) == 61 and round(shard_bytes / 1e9, 1) == 1.7, "the page says so"
assert abs(waiting - 0.72) < 0.01, "not 1 - 0.99^128"

# %%
my_prediction = None  # between 0 and 1
lesson.predicted("steps with a pause", my_prediction, waiting, within=0.1)

# %% [markdown]
# A step has no pause with probability 0.99^128 = 0.28, so 72% of the steps have one. On a single host, you
# would not notice these pauses.
#
# ## The program by hand: four processes, one mesh
#
# So far, one process had all devices. A **host** is a machine with a few chips, usually 4 or 8, and a
# process can access only the chips of its host. So on 32 hosts, you start the *same* program 32 times. The
# copies differ only in one number, the **rank**: 0 to 31.
#
# `jax.distributed.initialize` connects the processes. Process 0, the **coordinator**, opens a port. All
# others connect to it and wait until every process has connected. From then on, `jax.devices()` lists the
# devices of all processes, and a mesh can span them.
#
# All processes must *enter a jitted step together*, because its `psum` needs a value from each of them. But
# each process creates its own shard of an input array without the others:
# `make_array_from_process_local_data` takes the rows of this process, and returns a global array. (There
# are B = 8 rows in total, b = 2 per process, and D = 4 columns.)
#
# Here four processes on this machine act as the hosts. The program of these processes is a string. First,
# what each process does when it starts:

# %% tags=["by-hand"]
import os
import socket
import sys
from subprocess import PIPE, Popen

import numpy as np

START = """
import json, os, sys, time
rank, lr = int(os.environ["JAX_PROCESS_ID"]), float(os.environ.get("LR", "0.1"))
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false "
                  "--xla_force_host_platform_device_count=1")
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
limits = dict(initialization_timeout=60, heartbeat_timeout_seconds=5)
jax.distributed.initialize(num_processes=4, process_id=rank, **limits)
mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))  # devices of all processes"""

# %% [markdown]
# Next, a training step: linear regression, in which the target of a row is the sum of its values. A row is
# a function of the step and the row number, so each process creates only its own two rows.

# %% tags=["by-hand"]
STEP = """
def local(w_D, x_bD):
    error_b = x_bD @ w_D - x_bD.sum(1)
    d_D, loss = jax.lax.psum((error_b @ x_bD / 8, error_b @ error_b / 8), "data")
    return w_D - lr * d_D, loss
go = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
def step(t, w_D, cut=NamedSharding(mesh, P("data"))):
    x = [np.random.default_rng((t, 2 * rank + k)).normal(size=4) for k in (0, 1)]
    return go(w_D, jax.make_array_from_process_local_data(cut, np.float32(x)))"""
ONCE = """
w_D, loss = step(0, np.zeros(4, np.float32))
if rank == 0: print(float(loss), *np.asarray(w_D))"""

# %% [markdown]
# Finally, the launcher. Whatever goes wrong, it kills all processes at the end. (It removes this page's JAX
# environment variables.) The reference is one step in NumPy, in this process.


# %% tags=["by-hand"]
def run_workers(worker):  # returns the output of each of four processes
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env, hosts = {k: v for k, v in os.environ.items() if k[:3] != "JAX"}, []
    try:
        for rank in range(4):
            extra = {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": str(rank)}
            argv = [sys.executable, "-c", worker]
            hosts.append(Popen(argv, stdout=PIPE, text=True, env=env | extra))
        return [one.communicate(timeout=90)[0] for one in hosts]
    finally:
        [one.kill() or one.wait() for one in hosts]


# %% tags=["by-hand"]
output = run_workers(START + STEP + ONCE)[0].splitlines()
x_BD = np.float32([np.random.default_rng((0, row)).normal(size=4) for row in range(8)])
y_B = x_BD.sum(1)  # w is zero, so the error is -y
reference = [y_B @ y_B / 8, *(0.1 * y_B @ x_BD / 8)]
assert np.allclose([float(x) for x in output[-1].split()], reference, 1e-5), "differs"
print(f"4 processes and one process: loss {reference[0]:.4f}, and the same weights")

# %% [markdown]
# Three details of this program are easy to get wrong. *All* processes call the step, although only one
# prints. Each process computes its rows from its rank, so no row is used twice. And there are two timeouts,
# so that no process waits long for a missing one: 60 s until all processes have connected, and later 5 s
# without a *heartbeat*, the message that a process is alive. JAX's defaults are 300 s and 100 s.
#
# ## Four hosts on this machine
#
# Something has to start the processes. A **launcher** copies the program to all hosts, and starts it on each
# with a rank and the coordinator's address. On each host, a **supervisor** (a small program) waits until the
# process ends, and may start it again.
#
# This page simulates the hosts: a folder of this machine stands in for each. The launcher is this project's
# `launcher.sh`, and everything except the network works as on 32 hosts. (These cells need Linux with git;
# elsewhere they print a message and do nothing.) **Skip the folded cells**, because they only build the
# simulation. Then you do four things to host2:
#
# | experiment | what is done to host2 | what to look for |
# |---|---|---|
# | killed | SIGKILL to its process | when the others end, and who restarts them |
# | hangs | its disk does not answer | which log shows the cause |
# | frozen | SIGSTOP to its process | what ends the wait, and what does not end |
# | other settings | another learning rate, then another file | whether anything shows it |

# %% [markdown]
# Now the program is a training loop. Each process prints a line when it reaches a step, and another line
# when its rows are ready and it enters the step. After the step, `tell` writes the step and the loss to a
# file, from which the launcher reads the status of the host. Process 0 saves every 20 steps. At the start, it
# loads its checkpoint and broadcasts it to all processes.

# %% tags=["hide-input"]
TELL = r"""
def tell(step, steps, loss):
    path = os.environ["AXIS_PROGRESS"]  # set by the supervisor
    with open(path + ".new", "w") as file:
        print(step, steps, f"{loss:.4f}", "-", int(time.time()), sep="\t", file=file)
    os.replace(path + ".new", path)
"""

# %%
LOOP = r"""
from jax.experimental.multihost_utils import broadcast_one_to_all
saved, steps = f"runs/{sys.argv[1]}.npz", int(sys.argv[2])
t, w_D = 0, np.zeros(4, np.float32)
if rank == 0 and os.path.exists(saved): t, w_D = np.load(saved).values()
t, w_D = broadcast_one_to_all((np.int32(t), w_D))
for t in range(int(t), steps):
    print("step", t, round(time.time(), 2))
    while os.path.exists("runs/stall"): time.sleep(0.1)  # the disk does not answer
    print("enter", t)
    try:
        w_D, loss = step(t, w_D)
        loss = float(loss)  # waits for all processes
    except Exception:
        print("error", t, round(time.time(), 2))
        raise
    tell(t + 1, steps, loss)
    if rank == 0 and t % 20 == 19: np.savez(saved, t=t + 1, w_D=w_D)
    time.sleep(0.02)
print("end", round(loss, 4), *np.asarray(w_D).round(4))"""

# %% tags=["hide-input"]
import json
import time

lacks = four_hosts.lacking()
hosts = None if lacks else four_hosts.Hosts()
if lacks:
    print("Cannot simulate hosts here. launcher.sh needs:", *lacks)
    print("The website shows what these cells print. Continue with Exercise 1.")
else:
    launcher, status, panes = hosts.launcher, hosts.status, hosts.panes
if hosts and not hosts.tmux:
    print("No tmux here: the commands start without it, and no panes are shown.")

# %%
if hosts:
    hosts.commit(START + STEP + TELL + LOOP, "A loop")
    launcher("--restarts 1 -- python train.py first 20000", RESTART_WAIT="7")
    hosts.wait(lambda n: hosts.last(n)[0] >= 30)

# %% [markdown]
# No process starts before all hosts are ready, because 31 of 32 processes would only wait for the last one.
#
# ## A process is killed
#
# Each process has threads that do not run Python. One of them sends the coordinator a **heartbeat** every
# few seconds. Now kill the process on host2 with SIGKILL. The kernel frees its memory and closes its
# connections.
#
# > **Predict.** One second later, how many of the other three processes have ended?

# %%
PID = '"$(cat ../../launches/latest/pid)"'
if hosts:
    launcher("exec --only host2 -- bash -c", f"kill -KILL {PID}")
    time.sleep(1)
    killed_at = hosts.latest(2, "restarts").stat().st_mtime  # seen by its supervisor
    ended = sum(hosts.latest(n, "restarts").exists() for n in (0, 1, 3))

# %%
my_prediction = None  # 0 to 3
if hosts:
    lesson.predicted("other processes that have ended", my_prediction, ended)
    rows = status()

# %% tags=["remove-cell"]
if hosts:
    assert ended == 0 and rows[2]["state"] == "restarting, 1 of 1", "too many ended"
    assert any(hosts.marks(n, "error") for n in (0, 1, 3)), "no exception at once"

# %% [markdown]
# <details><summary>Why</summary>
#
# None. The closed connection immediately raises an exception in another process, and its log ends there. But
# a JAX process does not exit alone: it waits for the other two. These two wait in the `psum` for the dead
# process. So judging by exit statuses, one process is dead and three are healthy.
# </details>
#
# When the coordinator has received no heartbeat from a process for 5 s, it tells all processes, and C++ code
# aborts each of them. (A process that a signal ends has the status 128 + its number: 134 for SIGABRT, 6, and
# 137 for SIGKILL, 9.) **On this abort, Python runs no `except` and no `finally`.** Process 0, which saves, was
# still waiting in the `psum`. So you cannot save at that point, and have only the last checkpoint.
#
# So when one process dies, all die. This is intended, because a collective cannot work with some of its
# processes missing. Something outside the processes has to restart them. Here each supervisor restarts its
# process 7 s after it ended. The heartbeat timeout is shorter, 5 s, so all processes have ended before the
# first one starts again.

# %%
if hosts:
    hosts.wait(lambda n: hosts.last(n)[1] > killed_at + 6)
    ends = [hosts.latest(n, "restarts").stat().st_mtime for n in (0, 1, 3)]
    print("seconds until the others ended:", *[f"{x - killed_at:.1f}" for x in ends])
    steps = [hosts.marks(n, "step") for n in range(4)]
    before = [max(t for t, at in own if at < killed_at) for own in steps]
    again = [min(t for t, at in own if at > killed_at + 6) for own in steps]
    print("steps when it was killed:", *[f"{t:.0f}" for t in before])
    print("resumed at step", *[f"{t:.0f}" for t in again], "(process 0's checkpoint)")

# %% tags=["remove-cell"]
if hosts:
    assert all(2 < end - killed_at < 20 for end in ends), "not the heartbeat"
    assert len({*again}) == 1 and again[0] % 20 == 0 <= before[0] + 1 - again[0] <= 20
    assert all("status 134" in hosts.latest(n, "log").read_text() for n in (0, 1, 3))

# %% [markdown]
# ## A process hangs, but sends heartbeats
#
# The heartbeat comes from a separate thread. It shows that the process exists, but not what its main thread
# does. The main thread may wait for a download, a lock, or, as now on host2, a disk that does not answer. A
# **watchdog** checks from outside when each process last made progress. Its limit here is 4 s.
#
# > **Predict.** When the limit has passed, how many of the four processes have printed nothing for 4 s?

# %%
if hosts:
    hosts.wait(lambda n: hosts.last(n)[1] > killed_at + 6 and hosts.last(n)[0] > 40)
    launcher("exec --only host2 -- touch runs/stall")
    age = lambda n: time.time() - hosts.last(n)[1]
    hosts.wait(lambda n: age(n) > 4)
    ages = [age(n) for n in range(4)]
    steps = [hosts.last(n)[0] for n in range(4)]
    entered = [hosts.marks(n, "enter")[-1][0] for n in range(4)]
    silent = sum(a > 4 for a in ages)

# %%
my_prediction = None  # 0 to 4
if hosts:
    lesson.predicted("silent processes", my_prediction, silent)
    rows = status()
    print("seconds without output:", *[f"{a:.2f}" for a in ages])

# %% tags=["remove-cell"]
if hosts:
    assert min(ages) > 4 and len({*steps}) == 1, "not all are silent"
    assert entered == [steps[0], steps[0], steps[0] - 1, steps[0]], "not only host2"
    assert all(row["state"].startswith("running") for row in rows)

# %% [markdown]
# <details><summary>Why</summary>
#
# All of them, for the same time, because three wait for the fourth. So the time without output shows *that*
# the run is stuck, but never *which* process is the cause.
# </details>
#
# Look at all four logs at once. Here are the last lines of each. Which host is the cause?


# %%
if hosts:
    shown = panes()
    print(*shown, sep="\n")
    launcher("exec --only host2 -- rm runs/stall")
    hosts.wait(lambda n: hosts.last(n)[0] > steps[0] + 5)
    print("continued, now at steps", *[f"{hosts.last(n)[0]:.0f}" for n in range(4)])

# %% tags=["remove-cell"]
if hosts:
    late, even = (f"enter {s:.0f} " for s in (steps[0] - 1, steps[0]))
    assert "".join(shown).count(even) == 3 and late in "".join(shown), shown

# %% [markdown]
# All processes reached the step. Three have *entered* it, and host2 has not. So print a log line, a *mark*,
# after the work in which one host alone can be delayed (loading data, saving), and before the collectives.
# (PyTorch's flight recorder logs a mark for each collective.)
#
# Then the disk answered, and the run continued. If a watchdog had killed the run, it would have cost a
# restart. So the limit must be longer than the longest healthy pause, including compilation, evaluation and
# saving. The project's default is 1,800 s. On several TPU slices, the TPU's runtime has [its own, shorter
# limit](../what_to_do_when.md#the-run-hangs).
#
# ## A process is frozen
#
# SIGSTOP stops all threads of a process but leaves its connections open. To the other processes, this looks
# like a machine that lost power.

# %%
if hosts:
    launcher("exec --only host2 -- bash -c", f"kill -STOP {PID}")
    frozen_at = time.time()
    hosts.wait_for_end(of=(0, 1, 3))
    rows = status()
    ends = [hosts.latest(n, "exit").stat().st_mtime for n in (0, 1, 3)]
    print("seconds until the others ended:", *[f"{x - frozen_at:.1f}" for x in ends])
    stopped = launcher("stop --now")

# %% tags=["remove-cell"]
if hosts:
    states = [row["state"] for row in rows]
    assert states[2] == "running, restarted 1 of 1" and stopped.returncode == 3
    assert [states[n] for n in (0, 1, 3)] == ["exit 134"] * 3
    # An abort closes connections, so others may see an exception right before they end.
    first = min(hosts.latest(n, "exit").stat().st_mtime for n in (0, 1, 3))
    seen = [at for n in (0, 1, 3) for _, at in hosts.marks(n, "error")]
    assert not [at for at in seen if frozen_at < at < first - 1], "too early"


# %% tags=["hide-input"]
def draw_end(axes, name, zero, file, until):
    """The steps, the wait and the end of each process, in seconds after `zero`."""
    for n in range(4):
        end = hosts.latest(n, file).stat().st_mtime - zero
        seen = {word: hosts.marks(n, word) for word in ("step", "error")}
        times = [t - zero for _, t in seen["step"] if -2 < t - zero < until]
        errors = [t - zero for _, t in seen["error"] if -1 < t - zero < until]
        start = max(t for t in times if t < end)
        axes.plot(times, [n] * len(times), ".", color=GREY)
        axes.barh(n, end - start, 0.3, start, color=GREY, alpha=0.9 if n == 2 else 0.3)
        axes.plot(end, n, "x", color="black")
        axes.plot(errors, [n] * len(errors), "d", color="black")
    axes.set(title=name, yticks=range(4), xlim=(-2, until))


# %% tags=["hide-input"] mystnb={"image": {"alt": "Two timelines of four processes. In both, the dots for steps end at second 0 on all four rows; gray bars of waiting continue for several seconds on rows 0, 1 and 3, and end in crosses. In the left timeline, process 2 is killed: some of the other rows have a diamond at second 0. In the right timeline, process 2 is frozen: no row has a diamond at second 0, and the dark bar of row 2 is longer than the others."}}
if hosts:
    killed = [hosts.latest(n, "restarts").stat().st_mtime for n in range(4)]
    last_end = max(hosts.latest(n, "exit").stat().st_mtime for n in range(4))
    untils = max(killed) - killed_at + 0.6, last_end - frozen_at + 0.6
    widths = dict(width_ratios=[2 + until for until in untils])
    figure, panels = plt.subplots(1, 2, figsize=(6.6, 2.6), sharey=True, **widths)
    draw_end(panels[0], "Process 2 is killed", killed_at, "restarts", untils[0])
    draw_end(panels[1], "Process 2 is frozen", frozen_at, "exit", untils[1])
    panels[0].set(ylabel="process", xlabel="s since the kill")
    panels[1].set_xlabel("s since the freeze")
    marks = "dot: a step, diamond: an exception, cross: the end"
    figure.supxlabel(marks, size=9)
    title = "The others wait until a heartbeat is missing"
    figure.suptitle(title, x=0.02, ha="left")

# %% [markdown]
# A killed process closes its connections, so another process gets an exception at once (the diamond on the
# left). A frozen process closes nothing: on the right, the others wait without an exception, and only the
# missing heartbeat ends the wait. A process sends a heartbeat every 2.5 s, and the 5 s count from its last one.
# That was up to 2.5 s before the freeze, so the others end 2.5 to 5 s after it, plus the time until the
# coordinator notices.
#
# Nothing ends the frozen process. It keeps its memory, and on a TPU its chips, so the next start on this host
# would fail. Something *on that host* must kill it. Here `stop --now` made its supervisor kill it.
#
# Process 0 is special, because all others are connected to the coordinator in it. If process 0 is killed,
# C++ code aborts all others at once. JAX cannot report which process died, because the coordinator, which
# checks the heartbeats, is gone.
#
# ## One host has different settings
#
# Long ago, somebody wrote `export LR=0.2` into `.bashrc` on host2. On the other hosts, the learning rate
# `lr` is 0.1.
#
# > **Predict.** All processes run 30 steps from zero weights, which are supposed to be equal replicas. By
# > what factor do the weights of process 2 differ from those of process 0?
#
# The cell also launches a second commit, in another folder (`checked`) on each host. In that version, each
# process first computes the sha256 of its settings, a **fingerprint** of 32 bytes, and all processes compare
# their fingerprints.

# %%
CHECK = """
import hashlib
from jax.experimental.multihost_utils import process_allgather
text = json.dumps({"lr": lr, "words": sys.argv[1:]}).encode()
own = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
prints = process_allgather(own)  # (4, 32): one collective, of bytes
odd = [r for r in range(4) if (prints[r] != prints[0]).any()]
if odd:
    print("settings differ on process", *odd)
    sys.exit(2)  # all processes exit, because all see the same prints
"""

# %%
if hosts:
    (hosts.at / "host2/.bashrc").write_text("export LR=0.2\n")
    launcher("-- python train.py second 30")

# %%
if hosts:
    hosts.commit(START + STEP + TELL + CHECK + LOOP, "Compare first")
    launcher("-- python train.py second 30", HOST_FOLDER="checked")
    hosts.wait_for_end()
    hosts.wait_for_end(folder="checked")
    ends = np.array([hosts.marks(n, "end")[0] for n in range(4)])
    factor = float((ends[2, 1:] / ends[0, 1:]).mean())

# %%
my_prediction = None  # times
if hosts:
    lesson.predicted("weights of 2 / of 0", my_prediction, factor, "times", within=0.01)
    rows = status()
    checked = status(HOST_FOLDER="checked")

# %% tags=["remove-cell"]
if hosts:
    assert abs(factor - 2) < 1e-3 and len({*ends[:, 0]}) == 1
    assert {row["state"] for row in rows} == {"exit 0"}
    assert {row["state"] for row in checked} == {"exit 2"}
    assert {row["last_line"] for row in checked} == {"settings differ on process 2"}

# %% [markdown]
# <details><summary>Why</summary>
#
# They are twice as large, because each update was twice as large. Without the check, all four processes
# exit with status 0 and print the same loss. The loss is a *sum* over all processes, so every process gets
# the same number and none sees a difference.
# </details>
#
# With the check, all processes exit before the first step, with status 2. A supervisor does not restart
# after this status, because the result would be the same. The fingerprint costs 32 bytes per process, once:
# only network latency, which is negligible compared with the seconds of the start, on any chip.
#
# A real fingerprint includes the settings, the commit, the versions of packages, the tokens, and the number
# of devices per process. It excludes everything that *must* differ, such as the rank. (If process 0 is the
# wrong one, the other three are reported, because each is compared with process 0.)
#
# The fingerprint in this program does not include the program itself. Now somebody edits a line on one
# host, so that its step uses 3 rows instead of 2. The processes all-reduce a gradient of four numbers,
# which has the same shape everywhere, so no collective fails.

# %%
if hosts:
    edit = ("s/(0, 1)/(0, 1, 2)/", "train.py")
    launcher("exec --only host2 -- sed -i", *edit, HOST_FOLDER="checked")
    edited = launcher("-- python train.py third 30", HOST_FOLDER="checked")

# %% tags=["remove-cell"]
if hosts:
    assert edited.returncode == 1 and "train.py changed in" in edited.stderr
    last = [hosts.latest(n, "launch.json", "checked").read_text() for n in range(4)]
    assert not any("third" in words for words in last), "a host started it"

# %% [markdown]
# Before each start, the launcher checks the files on each host against the checksums that it computed when
# it copied them. So it does not start the edited program.
#
# ## Exercise 1: which rows?
#
# A mesh `data=d, tensor=t` has processes with one device each, numbered along `tensor` first: process p has
# the coordinates `divmod(p, t)`. Rows are sharded over `data`, and columns of weights over `tensor`. Which
# rows of a batch of B rows does process p load? Return `(first, end)`, as in `rows[first:end]`.


# %% tags=["hide-input"]
OWN = "Each process has different rows. Should two along `tensor` have different ones?"
ORDER = "Along which axis is process 1 next to process 0?"
ALONG = "`p % t` is the coordinate along `tensor`, which shards columns, not rows."
FEED_HINTS = [
    (lambda p, d, t, B: (p * B // (d * t), (p + 1) * B // (d * t)), OWN),
    (lambda p, d, t, B: (p % d * B // d, (p % d + 1) * B // d), ORDER),
    (lambda p, d, t, B: (p // t * B // d, B // d), "`end` is a row, not a length."),
    (lambda p, d, t, B: (0, B), "Those are all rows: each host would load them all."),
    (lambda p, d, t, B: (p // t, p // t + 1), "That is its index. Which rows?"),
    (lambda p, d, t, B: (p % t * B // d, (p % t + 1) * B // d), ALONG),
    (lambda p, d, t, B: (p % t * B // t, (p % t + 1) * B // t), ALONG),
]  # fmt: skip
check_feed = lesson.checker(
    [(0, 4, 1, 8), (5, 4, 2, 8), (7, 4, 2, 8), (3, 2, 4, 16), (6, 2, 4, 16)],
    lambda p, d, t, B: (p // t * B // d, (p // t + 1) * B // d), FEED_HINTS,
    "Right: processes along `tensor` load the same rows.")  # fmt: skip


# %%
def feeds(p, d, t, B):
    return ...


print(check_feed(feeds))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `place = p // t`, then `return place * B // d, (place + 1) * B // d`. If two processes along `tensor` load
# different rows, JAX does not notice. They then multiply different rows with different shards of the same
# weight, and the sum is meaningless.
# </details>

# %% tags=["remove-cell"]
answer_1 = lambda p, d, t, B: (p // t * B // d, (p // t + 1) * B // d)
lesson.expect(check_feed, *FEED_HINTS, (answer_1, "Right"), (feeds, lesson.NOTHING))

# %% [markdown]
# ## Exercise 2: what differs?
#
# A fingerprint tells you that two hosts differ, but not in which setting. `hosts` is a list of dicts, the
# settings of each host. Return the sorted names of the settings that differ between any two hosts, except
# those in `MAY_DIFFER`. A name that is missing on one host counts as different. (Python's built-in `hash`
# of a string would not work as a fingerprint, because its seed differs in each process.)

# %%
MAY_DIFFER = {"rank", "log_dir", "cache_dir"}


# %% tags=["hide-input"]
def hosts_with(changes, lacks=()):
    """Settings of four hosts, with changes {(rank, name): value}."""
    own = lambda r: {"rank": r, "log_dir": f"/logs/{r}", "lr": 0.1, "seed": 0}
    hosts = [own(r) for r in range(4)]
    for (rank, name), value in changes.items():
        hosts[rank][name] = value
    for rank, name in lacks:
        del hosts[rank][name]
    return hosts


def by_keys(hosts, keys, skip=MAY_DIFFER):
    differ = lambda k: len({json.dumps(h.get(k, "-")) for h in hosts}) > 1
    return sorted(k for k in keys if k not in skip and differ(k))


every = lambda hosts: set().union(*hosts)


# %% tags=["hide-input"]
def check_differ(answer):
    cases = [(hosts_with({}),), (hosts_with({(1, "lr"): 0.2}),)]
    cases += [(hosts_with({(3, "lr"): 0.2, (3, "seed"): 7}),)]
    cases += [(hosts_with({(3, "clip"): 1.0}),), (hosts_with({}, [(1, "seed")]),)]
    words = lambda f: lambda hosts: ", ".join(map(str, f(hosts))) or "none"
    right = words(lambda hosts: by_keys(hosts, every(hosts)))
    done = "Right: a name tells the user what to fix."
    return lesson.diagnose(answer, cases, right, DIFFER_HINTS, done, run=words)


DIFFER_HINTS = [
    (lambda h: by_keys(h, every(h), ()), "The rank may differ. Use MAY_DIFFER."),
    (lambda h: by_keys(h[:2], every(h[:2])), "You compare only two hosts."),
    (lambda h: by_keys(h, h[0]), "You check only the names of host 0."),
    (lambda h: by_keys(h, set(h[0]).intersection(*h)), "You skip missing names."),
    (lambda h: [], "You always return no name."),
]  # fmt: skip


# %%
def differing(hosts):
    return ...


print(check_differ(differing))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `names = set().union(*hosts) - MAY_DIFFER`, then `return sorted(n for n in names if any((n in h, h.get(n))
# != (n in hosts[0], hosts[0].get(n)) for h in hosts))`. This compares every setting that is *not* listed.
# The opposite, a list of settings that must agree, misses the next setting that somebody adds.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_differ, *DIFFER_HINTS,
              (lambda hosts: by_keys(hosts, every(hosts)), "Right"),
              (differing, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## Exercise 3: find the cause
#
# For each of four processes, you get the number of the last step that it *entered* (`steps`), and the time
# when it entered this step (`wrote`). Return a list of four numbers: 1 for each process that delays the
# others, else 0. A run is stuck if no process has entered a step for more than `limit` seconds. If all have
# entered the same step, no process is the cause.


# %% tags=["hide-input"]
def check_blame(answer):
    late, wrote = [20, 20, 19, 20], [100.0, 100.2, 99.9, 100.1]
    cases = [(late, wrote, 130.0, 10.0), (late, wrote, 101.0, 10.0)]
    cases += [([20, 20, 20, 20], wrote, 130.0, 10.0)]
    cases += [([19, 20, 20, 19], [99.0, 100.0, 100.0, 99.9], 110.5, 10.0)]
    cases += [([20, 21, 20, 21], [91.0, 100.0, 91.1, 100.0], 102.0, 10.0)]
    done = "Right: check first that the run is stuck, then which process is behind."
    return lesson.diagnose(answer, cases, right_blame, BLAME_HINTS, done)


def right_blame(steps, wrote, now, limit):
    stuck = now - max(wrote) > limit
    return [int(stuck and step < max(steps)) for step in steps]


one = lambda n: [int(k == n) for k in range(4)]
hung = lambda w, now, limit: now - max(w) > limit
if_hung = lambda which: lambda s, w, now, limit: (
    which(s, w) if hung(w, now, limit) else [0] * 4)  # fmt: skip

# %% tags=["hide-input"]
BLAME_HINTS = [
    (lambda s, w, now, limit: [int(now - x > limit) for x in w],
     "You use only the time, but processes that wait are silent as long."),
    (lambda s, w, now, limit: [int(x < max(s)) for x in s],
     "In a healthy run, some process is usually behind. Check that it is stuck."),
    (lambda s, w, now, limit: [int(now - min(w) > limit and x < max(s)) for x in s],
     "One process exceeds the limit, but others still make progress."),
    (if_hung(lambda s, w: one(int(np.argmin(w)))),
     "The most silent one need not be the cause. There can be two causes, or none."),
    (if_hung(lambda s, w: one(int(np.argmin(s)))), "There can be two causes, or none."),
    (if_hung(lambda s, w: [1] * 4), "You return 1 for all. Which ones are behind?"),
    (if_hung(lambda s, w: [int(x == min(s)) for x in s]),
     "If all have entered the same step, all are at the minimum, and none is behind."),
    (lambda s, w, now, limit: [int(x == min(s)) for x in s],
     "In a healthy run, some process has the lowest step. Check that it is stuck."),
]  # fmt: skip


# %%
def to_blame(steps, wrote, now, limit):
    return ...


print(check_blame(to_blame))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `stuck = now - max(wrote) > limit`, then `return [int(stuck and step < max(steps)) for step in steps]`.
# The latest time tells you whether the run is stuck, and the steps tell you which process is the cause. If
# all have entered the step, check the network.
# </details>

# %% tags=["remove-cell"]
lesson.expect(check_blame, *BLAME_HINTS, (right_blame, "Right"),
              (to_blame, lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## What it costs
#
# Each failure costs the time until it is detected, a restart (r = 600 s for starting, loading and
# compiling), and the steps since the last checkpoint. Chapter 12 computes how often to save, and from the
# interruptions of Llama 3 that a host fails once in 264 days.

# %% mystnb={"image": {"alt": "Minutes lost per day against the number of hosts, on logarithmic axes: three rising straight lines. The line for 1,800 seconds is four times above the line for 10 seconds, and the line for 100 seconds is close to the lowest."}}
host_days = 54 * 2048 / 419
print(f"a host fails once in {host_days:.0f} days")
figure, axes = plt.subplots(figsize=(6, 3))
many = np.array([8, 32, 128, 512, 1024])
for notice_s, style in ((10, "-"), (100, "--"), (1800, ":")):
    lost = many / host_days * (notice_s + 600) / 60
    axes.loglog(many, lost, style, color="black", label=f"after {notice_s:,} s")
    print(f"detected after {notice_s:5} s: lost per day {lost[1]:.1f} min on 32 hosts, "
          f"{lost[-1]:.0f} min on 1,024")  # fmt: skip
axes.set(title="Detecting a failure late costs more than the restart", xlabel="hosts")
axes.set(ylabel="minutes lost per day")
axes.set_xticks(many, [f"{n:,}" for n in many])
axes.minorticks_off()
axes.legend(title="detected")
for count in (32, 1024):
    print(f"{count:5} hosts: {count / host_days:.2f} failures per day")

# %% [markdown]
# With 32 hosts, a failure happens about once in eight days. What matters is that it is detected *at all*:
# an unnoticed night costs more than any timeout. With 1,024 hosts, there are about four failures per day,
# and a timeout of 1,800 s costs three times as much as the restart. But a heartbeat timeout of 10 s instead
# of 100 s gains little, and a network outage of 11 s then ends a healthy run. Only r depends on the chip.
# (These costs are computed. The processes on this page run on two cores, so they show what waits for what,
# but not how long a real network takes.)

# %% [markdown]
# ## A bug to find
#
# `train` runs on four hosts. Every 50 steps it evaluates held-out rows, and saves the weights if the loss
# over all of them is the best so far. It returns the steps at which it saved. It passes its test on one
# host, and its first evaluation on four. At some later evaluation, it hangs: all processes are alive,
# heartbeats arrive, and there is no message. Fix the program.
#
# The hosts are threads here. Like real collectives, the three methods of a `Host` wait for all four hosts.


# %%
class Collectives:
    """What each host can call; the class `Host` below implements it with threads."""

    def psum(self, x):
        """Return the sum of x over all hosts."""

    def gather(self, x):
        """Return the list of all four values."""

    def reduce(self, x, to):
        """Return the sum on host `to`, and x itself on the others, as NCCL does."""


# %%
def evaluate(w, held_out, hosts):
    """The mean loss over the held-out rows of all hosts."""
    squares = (w - held_out) ** 2
    total = hosts.reduce(float(np.sum(squares)), to=0)
    count = hosts.reduce(len(held_out), to=0)
    return total / count


def gradient(w, row, hosts):
    """The gradient over all hosts' rows, clipped to 3."""
    summed = hosts.psum(w - row) / 4
    return np.clip(summed, -3, 3)


# %%
class Checkpoints:
    """Keeps the weights of the best evaluation."""

    def __init__(self, hosts):
        self.hosts, self.best, self.saved = hosts, np.inf, []

    def offer(self, t, w, loss):
        """Save if this is the best loss so far."""
        if loss >= self.best:
            return
        self.best = loss
        weights = self.hosts.gather(w)  # all shards, for the file
        assert len(weights) == 4
        self.saved.append(t)


# %%
def train(rank, hosts):
    """Train 400 steps on one of the hosts."""
    rng = np.random.default_rng(rank)
    rows, held_out = rng.normal(1, 1, 400), rng.normal(1, 1, 4)
    w, rate, checkpoints = 0.0, 0.1, Checkpoints(hosts)
    for t in range(400):
        if rank == 0 and t % 100 == 0:
            hosts.log(f"step {t}, w {w:.2f}")
        w -= rate * gradient(w, rows[t], hosts)
        if t % 50 == 49:
            loss = evaluate(w, held_out, hosts)
            if rank == 0:
                hosts.log(f"held out {loss:.3f}")
            checkpoints.offer(t, w, loss)
    if rank == 0:
        hosts.log(f"best loss {checkpoints.best:.3f}")
    return checkpoints.saved


# %% tags=["hide-input"]
import functools
import threading


class Host(Collectives):
    """One of four threads, whose collectives wait for all of them."""

    def __init__(self, rank, doors, values):
        self.rank, self.doors, self.values, self.log = rank, doors, values, str

    def exchange(self, kind, x):
        self.values[kind, self.rank] = x
        self.doors[kind].wait(1)
        found = [self.values[kind, r] for r in range(4)]
        self.doors[kind].wait(1)
        return found

    def psum(self, x):
        return sum(self.exchange("psum", x))

    def gather(self, x):
        return self.exchange("gather", x)

    def reduce(self, x, to):
        total = sum(self.exchange("reduce", x))
        return total if self.rank == to else x


# %% tags=["hide-input"]
@functools.cache  # an answer that hangs should do so only once
def outcome(train):
    def thread(rank, doors, values, saved, faults):
        try:
            saved[rank] = train(rank, Host(rank, doors, values)) or []  # finished
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            faults.append(error)

    @functools.cache
    def run():
        doors = {kind: threading.Barrier(4) for kind in ("psum", "reduce", "gather")}
        shared = _, _, saved, faults = doors, {}, [None] * 4, []
        threads = [threading.Thread(target=thread, args=(r, *shared)) for r in range(4)]
        [one.start() for one in threads]
        [one.join() for one in threads]
        if faults:
            raise faults[0]
        return result(saved)

    return run


# %% tags=["hide-input"]
def result(saved):
    """Ten numbers: whether all finished, whether all agree, and up to eight steps."""
    if any(steps is None for steps in saved):
        return np.zeros(10)
    agree = all(steps == saved[0] for steps in saved)
    mine = [*saved[0]][:8] if agree else []
    return np.array([1, agree, *mine, *[0] * (8 - len(mine))])


# %% tags=["hide-input"]
def variant(
    number=lambda hosts, loss: loss,
    saves=lambda rank, loss, best: loss < best,
    gathers=lambda is_saved: is_saved,
):
    """`train` that compares or saves by another rule, or always gathers."""

    def other(rank, hosts):
        rng = np.random.default_rng(rank)
        rows, held_out = rng.normal(1, 1, 400), rng.normal(1, 1, 4)
        w, best, saved = 0.0, np.inf, []
        for t in range(400):
            w -= 0.1 * hosts.psum(w - rows[t]) / 4
            if t % 50 == 49:
                loss = number(hosts, np.mean((w - held_out) ** 2))
                is_saved = saves(rank, loss, best)
                if gathers(is_saved):
                    hosts.gather(w)
                saved, best = saved + [t] * bool(is_saved), min(loss, best)
        return saved

    return other


# %% tags=["hide-input"]
STOPS = "It hangs: some processes wait in one collective, the others in another."
mean_decides = variant(lambda hosts, loss: hosts.psum(loss) / 4)
BEST_HINTS = [
    (train, STOPS),
    (variant(saves=lambda rank, loss, best: rank == 0 and loss < best), STOPS),
    (variant(gathers=lambda is_saved: True),
     "It ends, but the hosts disagree on which evaluation was the best."),
    (variant(lambda hosts, loss: hosts.gather(loss)[0]),
     "All agree, but on the loss of only one host."),
    (variant(saves=lambda *_: True), "It ends, but saves at every evaluation."),
]  # fmt: skip
check_best = lesson.checker(
    [()], outcome(mean_decides), BEST_HINTS, run=outcome,
    done="Right: all hosts decide by the same number.")  # fmt: skip

# %% tags=["hide-output"]
print(check_best(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# Use `hosts.psum` in `evaluate`. `reduce` returns the sum on host `to` only. So `evaluate` returns the mean of
# all rows on host 0, and the mean of its own rows on any other host. Then some hosts have a new best and call
# `gather`, while the others continue to the next `psum`. At the first evaluation, any loss is below infinity,
# so all hosts agree. The lines with `rank == 0` are harmless, because they contain no collective.
#
# An FSDP run at Meta hung this way in its later epochs. It summed the losses with `reduce` instead of
# `all_reduce`, so each rank compared a different number with its own
# best ([pytorch#77562](https://github.com/pytorch/pytorch/issues/77562)). All these bugs have the same
# form: a collective inside an `if` whose condition differs between processes.
# </details>


# %% tags=["remove-cell"]
changed = lesson.rewritten(evaluate, gradient, train)
in_total = "hosts.reduce(float(np.sum(squares)), to=0)", "hosts.psum(np.sum(squares))"
in_count = "hosts.reduce(len(held_out), to=0)", "hosts.psum(len(held_out))"
returned = "return total / count", "return hosts.gather(total / count)[0]"
worst_decides = variant(lambda hosts, loss: max(hosts.gather(loss)))
lesson.expect(check_best, *BEST_HINTS, (mean_decides, "Right"),
              (changed(in_total, in_count), "Right"),
              (changed(returned), "Right"), (changed(in_count), STOPS),
              (worst_decides, BEST_HINTS[3][1]),
              (lambda rank, hosts: ..., lesson.NOTHING))  # fmt: skip

# %% [markdown]
# ## In one table
#
# | what happens to one host | detected by | when | consequence |
# |---|---|---|---|
# | it does not connect at the start | the other processes | initialization timeout | all exit; start again |
# | its process is killed | other processes; the coordinator | at once; heartbeat timeout | all are aborted, without `except` or `finally`; the supervisors restart them |
# | it loses power, or freezes | the coordinator | heartbeat timeout | the same; a frozen process must be killed on its host |
# | process 0 is killed | all others, by a closed connection | at once | the same; JAX does not report which process died, but its supervisor does |
# | its main thread hangs | a watchdog on progress | its limit, longer than the longest step | kill all, start again |
# | its settings differ, but the shapes agree | a fingerprint; otherwise nothing | before the first step | exit, and print the setting that differs |
# | a file of its program differs | a launcher with checksums; otherwise nothing | before the start | nothing starts |
# | it is slow | a local time measurement on each host | after some steps | report it; replace the host |
#
# | here, in JAX | PyTorch and Megatron-LM |
# |---|---|
# | `jax.distributed.initialize`, rank, coordinator | `init_process_group`, rank, rendezvous at `MASTER_ADDR` |
# | a launcher on each host that restarts | `torchrun --nnodes 32 --max-restarts 3`: an agent per host, a new rendezvous after each failure |
# | heartbeat, abort | the agents of `torchrun` watch their processes, and the rendezvous watches the agents |
# | watchdog on progress | the NCCL watchdog thread, with the `timeout` of the process group (per collective, 10 minutes); `TORCH_NCCL_ASYNC_ERROR_HANDLING` sets whether it ends the process |
# | marks before each step | the flight recorder, `TORCH_FR_BUFFER_SIZE` (before: `TORCH_NCCL_TRACE_BUFFER_SIZE`) |
#
# What do you need? On one host, none of this. On two to a few dozen hosts, you need the fingerprint, the
# heartbeat, and a launcher that restarts processes. On hundreds of hosts, you also need spare hosts, and a
# watchdog limit close to the longest step. TPU hosts and nodes of 8 H100s need the same, because all of
# this is about processes.
#
# ## What the trainer adds
#
# `launcher.sh` connects to the hosts by ssh, copies a commit to each, and starts the supervisor
# (`launch/supervisor.py`) in a `tmux` session, which keeps running when ssh ends. `debug_tpu.sh` shows the logs
# of all hosts side by side. (On this page, a script named `ssh` runs the commands in folders; `make rehearse`
# uses real ssh servers.)
#
# On this page, JAX detects a dead process, and you detect a hang. In `main.py`, the trainer, each process
# has a thread that watches the others. If one dies or hangs, the processes exit with status 75. The message
# says which process is silent, or which process did not reach a step, and which line of code it is on. The
# trainer compares settings, files and packages as above, and prints the difference. The page [Run on
# several hosts](../hosts.md) has a table of everything that ends a run.
#
# ## Three lines to keep
#
# 1. All processes take a step together. If one dies, all die, so the restart must come from outside.
# 2. A heartbeat shows that a process exists. Only a log line before each step shows that it makes progress.
# 3. A sum is the same on every process, so compare the hosts' settings before the first step.
#
# **Sources.** JAX's [page on several processes](https://docs.jax.dev/en/latest/multi_process.html);
# PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) and [variables of
# NCCL](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html); [Llama
# 3](https://arxiv.org/abs/2407.21783), section 3.3.4.
