# %% [markdown]
# # 13 · Thirty-two hosts
#
# **Question.** One program must run on 32 machines at once, and any of them may die, hang, or be set up
# differently. Who notices, and what happens?
#
# **Why it hurts not to know.** A death that nobody notices costs 32 machines until somebody looks in the
# morning. A wrong setting on one of them costs the run, and nothing looks wrong.
#
# *Before this:* 01 (a collective), 12 (what a restart reads). *Mesh:* `data=4`, one device for each of four
# processes. *Runs in* 65 s on 2 cores, most of it waiting; half an hour to read.

# %%
import utils

utils.simulate_devices(8)

import matplotlib.pyplot as plt

from chapters import lesson

GREY, RED, BLUE = lesson.NEUTRAL, "#cf4446", "#3f74b5"

# %% [markdown]
# ## The program by hand: four processes, one mesh
#
# So far one process held all devices. A **host** is a machine with a few chips of its own, 4 or 8, and a
# process on it can reach only these. So on 32 hosts the *same* program is started 32 times. What differs is
# one number, the **rank**: 0 to 31. `jax.distributed.initialize` makes them one. Process 0 opens a port and
# is the **coordinator**; all others call it there, and wait until all have come. From then on `jax.devices()`
# lists the devices of all, and a mesh may span them.
#
# A jitted step is now something that all processes *enter together*, because its `psum` needs a value of
# each. What a process can make alone is its own part of an array: `make_array_from_process_local_data` takes
# the rows that this process has, and returns an array that is known to be larger. (B = 8 rows in all, b = 2
# for a process, D = 4 columns.)
#
# Here four processes of this machine are the hosts. First what each does at its start, as a text:

# %% tags=["by-hand"]
import json
import os
import socket
import sys
from subprocess import PIPE, Popen

import numpy as np

START = """
import json, os, sys, time
rank, port, my = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false "
                  "--xla_force_host_platform_device_count=1")
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
limits = dict(initialization_timeout=60, heartbeat_timeout_seconds=10)
jax.distributed.initialize(f"127.0.0.1:{port}", 4, rank, **limits)
mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))  # devices of all processes"""

# %% [markdown]
# Then a step: linear regression, whose targets are the sums of the rows. A row is a function of the step and
# its own number, so each process makes its two rows and never sees the others.

# %% tags=["by-hand"]
STEP = """
def local(w_D, x_bD):
    error_b = x_bD @ w_D - x_bD.sum(1)
    d_D, loss = jax.lax.psum((error_b @ x_bD / 8, error_b @ error_b / 8), "data")
    return w_D - my["lr"] * d_D, loss
go = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
def step(t, w_D, cut=NamedSharding(mesh, P("data"))):
    x = [np.random.default_rng((t, 2 * rank + k)).normal(size=4) for k in (0, 1)]
    return go(w_D, jax.make_array_from_process_local_data(cut, np.float32(x)))"""
ONCE = """
w_D, loss = step(0, np.zeros(4, np.float32))
if rank == 0: print(float(loss), *np.asarray(w_D))"""

# %% [markdown]
# Last the launcher. Whatever goes wrong, it leaves no process behind. (What this page's own JAX was told in
# the environment is not handed on.) One process, NumPy, is the judge.


# %% tags=["by-hand"]
def launched(worker, my):  # what each of four processes prints
    with socket.create_server(("127.0.0.1", 0)) as free:
        words = [str(free.getsockname()[1]), json.dumps(my)]
    env, hosts = {k: v for k, v in os.environ.items() if k[:3] != "JAX"}, []
    try:
        for rank in range(4):
            argv = [sys.executable, "-c", worker, str(rank), *words]
            hosts.append(Popen(argv, stdout=PIPE, text=True, env=env))
        return [one.communicate(timeout=90)[0] for one in hosts]
    finally:
        [one.kill() or one.wait() for one in hosts]


# %% tags=["by-hand"]
said = launched(START + STEP + ONCE, {"lr": 0.1})[0].splitlines()
x_BD = np.float32([np.random.default_rng((0, row)).normal(size=4) for row in range(8)])
y_B = x_BD.sum(1)  # w is zero, so the error is -y
alone = [y_B @ y_B / 8, *(0.1 * y_B @ x_BD / 8)]
assert np.allclose([float(x) for x in said[-1].split()], alone, 1e-5), "not as one does"
print(f"4 processes and one: loss {alone[0]:.4f}, and the same four weights")

# %% [markdown]
# Three things of this program are easy to get wrong. The step is called by *all* processes, though only one
# prints. The rows follow from the rank, so no row is fed twice. And the two limits are there because their
# absence is a wait: for 60 s at the start for all to come, and for 10 s later for a sign of life. JAX's own
# limit for the second is 100 s.
#
# ## One is killed
#
# Each process has threads besides Python's. One of them tells the coordinator every few seconds that the
# process lives: a **heartbeat**. Now a loop, whose processes write down when they come to a step, and again
# when they enter it.

# %%
LOOP = """
w_D = np.zeros(4, np.float32)
for t in range(my["steps"]):
    print("step", t, time.time(), flush=True)
    if t == my.get("sleeps_at"): time.sleep(60)
    print("enter", t, flush=True)
    try:
        w_D, loss = step(t, w_D)
        loss = float(loss)  # here it waits for all
    except Exception:
        print("error", t, time.time(), flush=True)
        raise
    time.sleep(0.1)
print("end", loss, *map(float, w_D), flush=True)
"""


# %% tags=["hide-input"]
import pathlib
import re
import signal
import tempfile
import time


class Hosts:
    """Four processes whose output is read while they run. `settings`: of each."""

    def __init__(self, worker, settings):
        self.worker, self.settings, self.all, self.ended = worker, settings, [], {}

    def __enter__(self):
        self.at = pathlib.Path(tempfile.mkdtemp())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        env = {k: v for k, v in os.environ.items() if not re.search("^JAX|COLOR", k)}
        return self.start(port, env)


# %% tags=["hide-input"]
class Hosts(Hosts):
    def start(self, port, env):
        for rank, my in enumerate(self.settings):
            argv = [sys.executable, "-c", self.worker, str(rank), port, json.dumps(my)]
            out, err = (self.at / f"{rank}").open("w"), (self.at / "err").open("a")
            with out, err:
                self.all.append(Popen(argv, stdout=out, stderr=err, env=env))
        return self

    def __exit__(self, *_):
        for one in self.all:
            one.kill()
            one.wait()

    def lines(self, rank, word):
        """What follows `word` on the lines that begin with it, as numbers."""
        found = re.findall(rf"(?m)^{word} (.*)\n", (self.at / f"{rank}").read_text())
        return [[float(x) for x in line.split()] for line in found]

    def last(self, rank):
        """The step that a process has come to last, and when."""
        return (self.lines(rank, "step") or [[-1, time.time()]])[-1]


# %% tags=["hide-input"]
class Hosts(Hosts):
    def look(self):
        for rank, one in enumerate(self.all):
            if one.poll() is not None:
                self.ended.setdefault(rank, (time.time(), one.returncode))

    def come_to(self, step):
        self.wait(lambda: all(self.last(rank)[0] >= step for rank in range(4)))
        return self

    def wait(self, what, limit_s=90):
        until = time.time() + limit_s
        while not what():
            self.look()
            late = f"nothing in {limit_s} s: {(self.at / 'err').read_text()[-2000:]}"
            assert time.time() < until, late
            time.sleep(0.05)

    def send(self, rank, which):
        self.victim, self.sent = rank, time.time()
        self.all[rank].send_signal(which)

    def others_end(self):
        self.wait(lambda: {*self.ended} >= {*range(4)} - {self.victim})


# %% [markdown]
# Two such runs are started, side by side, and in both process 2 is struck at about step 15. One gets SIGKILL,
# after which the kernel takes its memory and closes its connections. The other gets SIGSTOP: it stays, with
# open connections, and no thread of it runs. To its peers that is what a machine without power looks like.

# %%
SAME = [{"lr": 0.1, "steps": 1000}] * 4
PLAIN = START + STEP + LOOP
with Hosts(PLAIN, SAME) as killed, Hosts(PLAIN, SAME) as frozen:
    for run, which in ((killed, signal.SIGKILL), (frozen, signal.SIGSTOP)):
        run.come_to(15).send(2, which)
    killed.others_end()
    frozen.others_end()
    still = frozen.all[2].poll() is None
print("seconds after the signal    step   error seen   process ends   exit status")
for name, run in (("killed", killed), ("frozen", frozen)):
    for rank in (0, 1, 3):
        seen = [f"{t - run.sent:.1f}" for _, t in run.lines(rank, "error")] or ["never"]
        end, status = run.ended[rank]
        print(f"2 is {name}: process {rank} {run.last(rank)[0]:10.0f} {seen[0]:>12}"
              f"{end - run.sent:15.1f} {status:13}")  # fmt: skip
print("the frozen process itself is still there:", still)

# %% tags=["remove-cell"]
for run in (killed, frozen):
    for rank in (0, 1, 3):
        end, status = run.ended[rank]
        assert status == -6 and 4 < end - run.sent < 25, "not by the heartbeat"
assert still and killed.ended[2][1] == -9
assert any(killed.lines(rank, "error") for rank in (0, 1, 3)), "nobody saw it at once"
# An abort closes connections, so there may be an exception in the others' last moment.
first_end = min(frozen.ended[rank][0] for rank in (0, 1, 3))
errors = [t for rank in (0, 1, 3) for _, t in frozen.lines(rank, "error")]
assert all(t > first_end - 1 for t in errors), "who closed it, while all waited?"

# %% mystnb={"image": {"alt": "Two time lines of four processes: dots for steps end at second 0 on all four rows; grey bars of waiting go on for about eight seconds on rows 0, 1 and 3, and end in crosses; in the lower one row 2 stays to the end."}}
figure, panels = plt.subplots(2, 1, figsize=(6.2, 4), sharex=True)
for axes, run, name in zip(panels, (killed, frozen), ("killed", "frozen"), strict=True):
    for rank in range(4):
        times = [t - run.sent for _, t in run.lines(rank, "step")]
        end = run.ended.get(rank, (run.sent + 15, None))[0] - run.sent
        colour = RED if rank == 2 else GREY
        axes.plot(times, [rank] * len(times), ".", color=BLUE)
        axes.barh(rank, end - times[-1], 0.3, times[-1], color=colour, alpha=0.4)
        axes.plot(end, rank, "x" if rank in run.ended else ">", color=RED)
        errors = [t - run.sent for _, t in run.lines(rank, "error")]
        axes.plot(errors, [rank] * len(errors), "d", color="black")
    axes.set(title=f"Process 2 is {name}: all wait, until the heartbeat")
    axes.set(yticks=range(4), xlim=(-1.7, 15.5), ylabel="process")
panels[1].set_xlabel("seconds; dot: a step, diamond: an exception, cross: the end")

# %% [markdown]
# The others stop at the step that process 2 does not enter, because none can leave a `psum` to which one does
# not come. (The 10 s count from the last heartbeat, which was sent before the signal.) What they know
# differs:
#
# - After a **kill** the closed connection is an exception in a neighbour at once. Yet no process *ends* at
#   once, because a JAX process that leaves tells the coordinator, and waits there for the others. A launcher
#   that looks at exit statuses sees nothing for as long as the heartbeat takes.
# - After a **freeze** there is no exception while they wait. When the coordinator has missed a process for
#   `heartbeat_timeout_seconds`, it tells all others. (Whoever is aborted first closes its connections, and
#   that can be one, in the last moment of another.)
# - In both, C++ then aborts the process (status -6, which a shell shows as 134). **No `except` and no
#   `finally` of Python runs.** Nothing can be saved then; what was saved before is what you have.
# - The frozen process is ended by nobody. Should its machine wake up, it will still hold its chips, and the
#   next start on this host fails. Somebody *on that host* has to kill it.
#
# So the heartbeat answers "who died", and the answer to "what happens" is: all die. That is the design, and
# not a weakness: half a collective has no meaning. What remains is to start all again, and to have a
# checkpoint. The one who starts again stands outside, since everyone inside is dead.
#
# Process 0 is special, because every other one holds a connection to its coordinator. If it is killed, that
# connection closes, and C++ aborts all the others at once; and no log says who died, because the one who
# counts heartbeats is gone. (Try it: `send(0, signal.SIGKILL)` in the cell above.)
#
# ## One hangs, and its heart beats
#
# A heartbeat comes from a thread of its own. It says that the process is there, and nothing of what its main
# thread does: a disk that does not answer, a download, a lock. Process 2 now sleeps when it comes to step 20.
# A **watchdog** stands outside and reads what each wrote last. Its limit is 4 s here.
#
# > **Predict.** When the limit has passed, how many of the four processes have written nothing for 4 s?

# %%
my_prediction = None  # of four
settings = [dict(SAME[0]) for _ in range(4)]
settings[2]["sleeps_at"] = 20
with Hosts(PLAIN, settings) as stuck:
    stuck.come_to(20)
    age = lambda rank: time.time() - stuck.last(rank)[1]
    stuck.wait(lambda: max(map(age, range(4))) > 4.2)
    ages, steps = [*map(age, range(4))], [stuck.last(rank)[0] for rank in range(4)]
    entered = [stuck.lines(rank, "enter")[-1][0] for rank in range(4)]
    alive = sum(one.poll() is None for one in stuck.all)
lesson.predicted("silent", my_prediction, sum(a > 4 for a in ages), "of four")
print("alive", alive, "of four; seconds of silence", *[f"{a:.2f}" for a in ages])
print("each came to step", *[f"{s:.0f}" for s in steps])
print("each entered step", *[f"{s:.0f}" for s in entered])
assert min(ages) > 4 and alive == 4 and len({*steps}) == 1
assert entered == [20, 20, 19, 20], "who is the cause?"

# %% [markdown]
# All of them. They are silent for the same time, up to hundredths, because three wait for the fourth. So age
# tells *that* the run is stuck, and never *who* is the cause. The mark before the sleep does not tell it
# either, because all four came to step 20. Only the mark between the sleep and the step does: process 2
# entered 19, and the others 20. So put marks where a host can be held up alone: after its own work (reading,
# saving), and before the work of all. (PyTorch's flight recorder writes one for each collective.)
#
# The limit is a choice. It must be longer than the longest step that is healthy, with compiling, evaluating
# and saving, or the watchdog kills a good run; the project's default is 1,800 s. A watchdog that is told of
# each batch of an evaluation can have a shorter one.
#
# ## One is set up differently
#
# An edit that was not copied to one host, an environment variable, an older package. Process 2 has
# `lr = 0.2`, and the others have 0.1; each is started from zeros.
#
# > **Predict.** It runs 30 steps. The weights are said to be equal copies. By what factor do those of process
# > 2 differ from those of process 0?
#
# Beside it a second run begins with a question. Each process takes the sha256 of its settings, a
# **fingerprint** of 32 bytes, and all compare before the first step. In a third, an edit of the program has
# come to process 2 alone: there a step takes 3 rows in place of 2.

# %%
CHECK = """
import hashlib
from jax.experimental.multihost_utils import process_allgather
text = json.dumps(my, sort_keys=True).encode()
own = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
prints = process_allgather(own)  # (4, 32): one collective, of bytes
odd = [r for r in range(4) if (prints[r] != prints[0]).any()]
if odd:
    print("refused", *odd, flush=True)
    sys.exit(2)  # all, since all have seen the same
"""

# %%
my_prediction = None  # times
settings = [{"lr": 0.2 if rank == 2 else 0.1, "steps": 30} for rank in range(4)]
ASKED = START + STEP + CHECK + LOOP
EDITED = PLAIN.replace("for k in (0, 1)", "for k in range(3 if rank == 2 else 2)")
equal = [{"lr": 0.1, "steps": 30}] * 4
runs = [(PLAIN, settings), (ASKED, settings), (EDITED, equal)]
odd, checked, edited = (Hosts(*run) for run in runs)
with odd, checked, edited:
    for run in (odd, checked, edited):
        run.wait(lambda run=run: len(run.ended) == 4)
ends = np.array([odd.lines(rank, "end")[0] for rank in range(4)])
factor = float((ends[2, 1:] / ends[0, 1:]).mean())
lesson.predicted("weights of 2 / of 0", my_prediction, factor, "times", within=0.01)
print("unchecked: exit statuses", *[odd.ended[r][1] for r in range(4)])
print("losses of the last step ", *ends[:, 0].round(6))
print("edited:    exit statuses", *[edited.ended[r][1] for r in range(4)])
print("checked:   exit statuses", *[checked.ended[r][1] for r in range(4)])
print("refused because of process", *map(int, checked.lines(0, "refused")[0]))

# %% tags=["remove-cell"]
assert abs(factor - 2) < 1e-3 and len({*ends[:, 0]}) == 1
assert {s for _, s in odd.ended.values()} == {0}
assert {s for _, s in edited.ended.values()} == {0} and EDITED != PLAIN
assert {s for _, s in checked.ended.values()} == {2}
assert all(checked.lines(r, "refused") == [[2]] for r in range(4))

# %% [markdown]
# Without the check all four end with status 0 and print the same loss. It is the same number because it is a
# *sum* over all: each process sees the result of everyone's work, and so nobody sees a difference. The
# weights are twice as big on one of them, because each of its updates was. The edited program runs to its end
# too. Process 2 takes the batch for one of 12 rows and the others for one of 8, but what they exchange, a
# gradient of four numbers, has one shape for all, and nothing else is compared. An edit that changes *that*,
# or the order of collectives, crashes or hangs, which is the better case.
#
# The fingerprint costs 32 bytes a process, once. At this size a network shows its latency and nothing of its
# bandwidth: on any chip it is lost in the seconds of the start. Ours covers the settings, so it would have
# let the edit pass. What goes in: settings, the commit and the files that Python reads, versions of packages,
# the tokens, the number of devices of each. What stays out: all that *must* differ, such as the rank. In the
# program above a folder for logs in `my` would be refused. (All are compared with process 0; if that is the
# odd one, the other three are named.)
#
# ## Exercise 1: whose rows?
#
# A mesh `data=d, tensor=t` of processes with one device each, numbered along `tensor` first: process p stands
# at `divmod(p, t)`. Rows are cut along `data`, columns of weights along `tensor`. Of a batch of B rows, which
# does process p feed? Return `(first, end)`, as in `rows[first:end]`.


# %% tags=["hide-input"]
def check_feed(answer):
    cases = [(0, 4, 1, 8), (5, 4, 2, 8), (7, 4, 2, 8), (3, 2, 4, 16), (6, 2, 4, 16)]
    right = lambda p, d, t, B: (p // t * B // d, (p // t + 1) * B // d)
    done = "Right: processes along `tensor` feed the same rows."
    return lesson.diagnose(answer, cases, right, FEED_HINTS, done)


OWN = "Rows of its own for each. Do two along `tensor` work on different rows?"
ORDER = "Which process comes after process 0, along which axis?"
FEED_HINTS = [
    (lambda p, d, t, B: (p * B // (d * t), (p + 1) * B // (d * t)), OWN),
    (lambda p, d, t, B: (p % d * B // d, (p % d + 1) * B // d), ORDER),
    (lambda p, d, t, B: (p // t * B // d, B // d), "`end` is a row, not a length."),
    (lambda p, d, t, B: (0, B), "All rows: then each host reads what all others read."),
    (lambda p, d, t, B: (p // t, p // t + 1), "Its place. How many rows is that?"),
]  # fmt: skip


# %%
def feeds(p, d, t, B):
    return ...


print(check_feed(feeds))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `place = p // t`, then `return place * B // d, (place + 1) * B // d`. If two processes along `tensor` feed
# different rows, JAX does not notice: it believes what it is given. They then multiply different rows with two
# halves of a weight, and the sum is of nothing.
# </details>

# %% tags=["remove-cell"]
answer_1 = lambda p, d, t, B: (p // t * B // d, (p // t + 1) * B // d)
assert check_feed(answer_1).startswith("Right")
for wrong, hint in FEED_HINTS:
    assert check_feed(wrong) == hint, (hint, check_feed(wrong))
assert check_feed(feeds) == lesson.NOTHING == check_feed(...)

# %% [markdown]
# ## Exercise 2: what differs?
#
# A fingerprint says that two hosts differ, and not in what. `hosts` is a list of dicts, the settings of each.
# Return the sorted names of those that differ between any two, without those in `MAY_DIFFER`. A name that one
# host lacks differs. (Python's own `hash` of a text would not do as a fingerprint: it has another seed in
# each process.)

# %%
MAY_DIFFER = {"rank", "log_dir", "cache_dir"}


# %% tags=["hide-input"]
def hosts_with(changes, lacks=()):
    """Settings of four hosts, changed as {(rank, name): value} says."""
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
    words = lambda f: lambda hosts: say(lesson.answered(f)(hosts))
    right = words(lambda hosts: by_keys(hosts, every(hosts)))
    hints = [(words(wrong), hint) for wrong, hint in DIFFER_HINTS]
    done = "Right: the name is what somebody can act on."
    return lesson.diagnose(words(answer), cases, right, hints, done) if callable(
        answer) else lesson.NOTHING  # fmt: skip


say = lambda names: ", ".join(map(str, names)) or "none"
DIFFER_HINTS = [
    (lambda h: by_keys(h, every(h), ()), "A rank differs on every host. May it?"),
    (lambda h: by_keys(h[:2], every(h[:2])), "Two hosts compared. There are more."),
    (lambda h: by_keys(h, h[0]), "Names of host 0. What if another has one more?"),
    (lambda h: by_keys(h, set(h[0]).intersection(*h)), "A name that one host lacks?"),
    (lambda h: [], "Always none: is that so?"),
]  # fmt: skip


# %%
def differing(hosts):
    return ...


print(check_differ(differing))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `names = set().union(*hosts) - MAY_DIFFER`, then `return sorted(n for n in names if any((n in h, h.get(n)) !=
# (n in hosts[0], hosts[0].get(n)) for h in hosts))`. All that is *not* listed is compared. The other way round,
# a list of what has to agree, forgets the next setting that somebody adds.
# </details>

# %% tags=["remove-cell"]
assert check_differ(lambda hosts: by_keys(hosts, every(hosts))).startswith("Right")
for wrong, hint in DIFFER_HINTS:
    assert check_differ(wrong) == hint, (hint, check_differ(wrong))
assert check_differ(differing) == lesson.NOTHING == check_differ(...)

# %% [markdown]
# ## Exercise 3: who is it?
#
# Four processes, and for each the number of the last step it *entered* (written when its rows are there), and
# when it wrote that. Return a list of four: 1 for each that holds the others up, else 0. A run is stuck when
# nobody has written for `limit` seconds. If all have entered the same step, no process is to blame.


# %% tags=["hide-input"]
def check_blame(answer):
    late, even = [20, 20, 19, 20], [20, 20, 20, 20]
    cases = [(late, [100.0, 100.2, 99.9, 100.1], 130.0, 10.0)]
    cases += [(late, [100.0, 100.2, 99.9, 100.1], 101.0, 10.0)]
    cases += [(even, [100.0, 100.2, 99.9, 100.1], 130.0, 10.0)]
    cases += [([19, 20, 20, 19], [99.0, 100.0, 100.0, 99.9], 110.5, 10.0)]
    cases += [([20, 21, 20, 21], [91.0, 100.0, 91.1, 100.0], 102.0, 10.0)]
    done = "Right: stuck first, and then who is behind."
    return lesson.diagnose(answer, cases, right_blame, BLAME_HINTS, done)


def right_blame(steps, wrote, now, limit):
    stuck = now - max(wrote) > limit
    return [int(stuck and step < max(steps)) for step in steps]


# %% tags=["hide-input"]
one = lambda n: [int(k == n) for k in range(4)]
hung = lambda w, now, limit: now - max(w) > limit
if_hung = lambda which: lambda s, w, now, limit: (
    which(s, w) if hung(w, now, limit) else [0] * 4)  # fmt: skip
BLAME_HINTS = [
    (lambda s, w, now, limit: [int(now - x > limit) for x in w],
     "By age. Those that wait are old too, and a slow step makes one old."),
    (lambda s, w, now, limit: [int(x < max(s)) for x in s],
     "Who is behind. But a healthy run has somebody behind at most moments."),
    (lambda s, w, now, limit: [int(now - min(w) > limit and x < max(s)) for x in s],
     "One is older than the limit, and the others still write. Are they stuck?"),
    (if_hung(lambda s, w: one(int(np.argmin(w)))),
     "The oldest is not always the cause, and there can be two, or none."),
    (if_hung(lambda s, w: one(int(np.argmin(s)))), "One. There can be two, or none."),
    (if_hung(lambda s, w: [1] * 4), "All of them. That is what we knew."),
]  # fmt: skip


# %%
def to_blame(steps, wrote, now, limit):
    return ...


print(check_blame(to_blame))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `stuck = now - max(wrote) > limit`, then `return [int(stuck and step < max(steps)) for step in steps]`. The
# youngest mark decides whether the run is stuck; the steps decide who. If all have entered, look at the wire.
# </details>

# %% tags=["remove-cell"]
assert check_blame(right_blame).startswith("Right")
for wrong, hint in BLAME_HINTS:
    assert check_blame(wrong) == hint, (hint, check_blame(wrong))
assert check_blame(to_blame) == lesson.NOTHING == check_blame(...)

# %% [markdown]
# ## What it costs
#
# Each failure costs the time until it is noticed, a restart (R = 600 s of starting, reading, compiling), and
# the steps since the last save; chapter 12 chooses the saves. Llama 3 counted 419 interruptions in 54 days of
# 2,048 hosts ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4), so a host fails once in
# 264 days.

# %% mystnb={"image": {"alt": "Minutes lost a day against the number of hosts, on logarithmic axes: three rising straight lines, of which the one for 1,800 seconds lies four times above that for 10 seconds, and that for 100 seconds close to the lowest."}}
host_days = 54 * 2048 / 419
print(f"a host fails once in {host_days:.0f} days")
figure, axes = plt.subplots(figsize=(6, 3))
many = np.array([8, 32, 128, 512, 1024])
for notice_s, colour in ((10, BLUE), (100, GREY), (1800, RED)):
    lost = many / host_days * (notice_s + 600) / 60
    axes.loglog(many, lost, color=colour, label=f"noticed after {notice_s:,} s")
    print(f"noticed after {notice_s:5} s: lost a day {lost[1]:.1f} min on 32 hosts, "
          f"{lost[-1]:.0f} min on 1,024")  # fmt: skip
axes.set(title="A late notice costs more than the restart", xlabel="hosts")
axes.set(ylabel="minutes lost a day")
axes.set_xticks(many, [f"{n:,}" for n in many])
axes.minorticks_off()
axes.legend()
for hosts in (32, 1024):
    print(f"{hosts:5} hosts: {hosts / host_days:.2f} failures a day")

# %% [markdown]
# At 32 hosts a failure comes about once in eight days, so what matters is that *somebody* notices; a night
# costs more than any limit. At 1,024 hosts there are about four a day, and a limit of 1,800 s costs three
# times the restart. A heartbeat of 10 s gains little over 100 s there, and ends a good run whenever a network
# is away for 11. None of this depends on the chip; what depends on it is R. (This is arithmetic: the
# processes of this page share two cores. They show who waits for whom, and not how long a real network
# takes.)
#
# ## A bug to find
#
# `train` runs on four hosts. It evaluates every 50 steps, each host on its own held-out rows, and gathers the
# weights for a checkpoint when the loss is the best so far. It passed its test on one host. On four, it stops
# at some evaluation after the first: all processes alive, hearts beating, no message. Mend it, so that what
# is saved is the best of all held-out rows. Return the steps at which it saved. (The hosts are threads here;
# `psum` and `gather` wait for all four, as real ones do.)


# %%
def train(rank, hosts):
    rng = np.random.default_rng(rank)
    rows, held_out = rng.normal(1, 1, 400), rng.normal(1, 1, 4)
    w, best, saved = 0.0, np.inf, []
    for t in range(400):
        if rank == 0 and t % 100 == 0:
            hosts.log(f"step {t}")
        w -= 0.1 * hosts.psum(w - rows[t]) / 4
        if t % 50 == 49:
            loss = np.mean((w - held_out) ** 2)
            if loss < best:
                best = loss
                hosts.gather(w)
                saved.append(t)
    return saved


# %% tags=["hide-input"]
import threading


class Group:
    """Four threads, and two collectives that wait for all."""

    def __init__(self):
        self.doors = {kind: threading.Barrier(4) for kind in ("psum", "gather")}
        self.values, self.said, self.saved, self.fault = {}, [], [None] * 4, None

    def exchange(self, kind, rank, x):
        self.values[kind, rank] = x
        self.doors[kind].wait(0.7)
        found = [self.values[kind, r] for r in range(4)]
        self.doors[kind].wait(0.7)
        return found


class Host:
    def __init__(self, group, rank):
        self.psum = lambda x: sum(group.exchange("psum", rank, x))
        self.gather = lambda x: group.exchange("gather", rank, x)
        self.log = group.said.append


# %% tags=["hide-input"]
def outcome(train):
    """(did all end, do all agree, the steps at which process 0 saved)"""

    def thread(rank, group):
        try:
            group.saved[rank] = train(rank, Host(group, rank))
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            group.fault = error

    def run():
        group = Group()
        threads = [threading.Thread(target=thread, args=(r, group)) for r in range(4)]
        [one.start() for one in threads]
        [one.join() for one in threads]
        if group.fault:
            raise group.fault
        if any(steps is ... for steps in group.saved):
            return ...
        return result(group.saved)

    return run


# %% tags=["hide-input"]
def result(saved):
    """Nine numbers: all ended, all agree, gathers that a step's list has room for."""
    if any(steps is None for steps in saved):
        return np.zeros(10)
    agree = all(steps == saved[0] for steps in saved)
    mine = [*saved[0]][:8] if agree else []
    return np.array([1, agree, *mine, *[0] * (8 - len(mine))])


def variant(decide):
    """`train` with another way to decide: decide(hosts, rank, loss, best, w, t)."""

    def other(rank, hosts):
        rng = np.random.default_rng(rank)
        rows, held_out = rng.normal(1, 1, 400), rng.normal(1, 1, 4)
        w, best, saved = 0.0, np.inf, []
        for t in range(400):
            w -= 0.1 * hosts.psum(w - rows[t]) / 4
            if t % 50 == 49:
                best = decide(hosts, rank, np.mean((w - held_out) ** 2), best, saved, t)
        return saved

    return other


# %% tags=["hide-input"]
def save_if(better, loss, best, saved, t, gather=lambda x: None):
    if better:
        gather(0.0)
        saved.append(t)
    return min(loss, best)


def mean_first(hosts, rank, loss, best, saved, t):
    loss = hosts.psum(loss) / 4
    return save_if(loss < best, loss, best, saved, t, hosts.gather)


def gather_always(hosts, rank, loss, best, saved, t):
    hosts.gather(0.0)
    return save_if(loss < best, loss, best, saved, t)


def first_decides(hosts, rank, loss, best, saved, t):
    loss = hosts.gather(loss)[0]
    return save_if(loss < best, loss, best, saved, t, hosts.gather)


def only_first(hosts, rank, loss, best, saved, t):
    return save_if(rank == 0 and loss < best, loss, best, saved, t, hosts.gather)


# %% tags=["hide-input"]
def always(hosts, rank, loss, best, saved, t):
    return save_if(True, loss, best, saved, t, hosts.gather)


STOPS = "It stops: some processes are in a collective, and the others in another."
APART = "It ends, and the hosts do not agree on which was the best."
BEST_HINTS = [
    (train, STOPS), (variant(only_first), STOPS), (variant(gather_always), APART),
    (variant(first_decides), "All do as host 0 says, with a quarter of the rows."),
    (variant(always), "It ends, and saves at every evaluation, best or not."),
]  # fmt: skip


# %% tags=["hide-input"]
def check_best(answer):
    if not callable(answer):
        return lesson.NOTHING
    hints = [(outcome(wrong), hint) for wrong, hint in BEST_HINTS]
    done = "Right: one number, the same on all, decides which way all go."
    right = outcome(variant(mean_first))
    return lesson.diagnose(outcome(answer), [()], right, hints, done)


print(check_best(train))

# %% [markdown]
# <details><summary>Solution</summary>
#
# `loss` is of this host's own rows, so some hosts have a best and gather, and the others go on to the next
# `psum`. Add them first: `loss = hosts.psum(np.mean((w - held_out) ** 2)) / 4`. The line with `rank == 0` is
# harmless, because no collective stands in it. A run of FSDP at Meta hung that way in its later epochs: the
# losses were added with `reduce`, which gives only one rank the sum, in place of `all_reduce`, and each rank
# compared its own number with its own best ([pytorch#77562](https://github.com/pytorch/pytorch/issues/77562)).
# It is the form of all such bugs: a collective inside an `if` whose condition is not the same on all.
# </details>

# %% tags=["remove-cell"]
assert check_best(variant(mean_first)).startswith("Right")
for wrong, hint in BEST_HINTS:
    assert check_best(wrong) == hint, (hint, check_best(wrong))
assert check_best(...) == lesson.NOTHING == check_best(lambda rank, hosts: ...)

# %% [markdown]
# ## In one table
#
# | what happens to one host | who notices | when | what happens |
# |---|---|---|---|
# | it does not come at the start | the others | initialization timeout | all end; start again |
# | its process is killed | neighbours; the coordinator | at once; heartbeat timeout | all are aborted, no `except` runs |
# | it loses power, or freezes | the coordinator | heartbeat timeout | the same; a frozen process must be killed on its host |
# | process 0 is killed | all others, by a closed connection | at once | the same, and no log names it |
# | its main thread hangs | a watchdog on progress | its limit, longer than the longest step | kill all, start again |
# | its settings or program differ, what it exchanges has the same shape | nobody, or a fingerprint | before the first step | end with the name of what differs |
# | it is slow | a time that each measures alone | steps | name it; change the host |
#
# | here | in PyTorch |
# |---|---|
# | `jax.distributed.initialize`, rank, coordinator | `init_process_group`, rank, rendezvous at `MASTER_ADDR` |
# | a launcher on each host that starts again | `torchrun --nnodes 32 --max-restarts 3`: an agent a host, a new rendezvous after each failure |
# | heartbeat, abort | the NCCL watchdog thread; `TORCH_NCCL_ASYNC_ERROR_HANDLING` says whether it ends the process |
# | watchdog on progress | the `timeout` of the process group: it is that of a collective, 10 minutes for NCCL |
# | marks before each step | the flight recorder, `TORCH_NCCL_TRACE_BUFFER_SIZE` |
#
# When what? On one host, none of it. On two to some dozens, the fingerprint, the heartbeat and a launcher
# that starts again. From hundreds on, spare hosts too, and a limit for hangs that is near the longest step.
# It is the same for TPU hosts and for nodes of 8 H100, because it is about processes.
#
# ## The project's launcher
#
# `launcher.sh` is what stands outside. These lines are not run here, because they need hosts with ssh:
#
# ```
# ./launcher.sh doctor --hosts hosts.txt            # what is wrong on a host, before it matters
# ./launcher.sh --hosts hosts.txt --restarts 3 -- python main.py moe1b --mesh fsdp=8,stage=2
# ./launcher.sh status --hosts hosts.txt            # step, loss, tokens/s of each
# ./launcher.sh logs host07 -f --hosts hosts.txt    # what one of them says
# ./launcher.sh stop --hosts hosts.txt              # one SIGTERM: all stop after one step, and save
# ./launcher.sh fetch NAME here --hosts hosts.txt   # the run, from the first host
# ```
#
# It ships one commit to all, starts all or none, and starts all again after a failure. Inside, the trainer
# compares settings before the first step. A thread in each process watches the others, so that the survivors
# end with a name and status 75, before C++ would abort them without. The page "On several hosts" has
# the table of what ends a run.
#
# ## Three lines to keep
#
# 1. A step is one thing that all do: if one process dies all die, so the one who starts again stands outside.
# 2. A heartbeat says that a process exists; that it gets on, only a mark before each step says.
# 3. A sum looks the same to everyone, so a host that is set up differently is found before the first step.
#
# **Sources.** JAX's [page on several processes](https://docs.jax.dev/en/latest/multi_process.html);
# PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) and
# [variables of NCCL](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html);
# [Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.4.
