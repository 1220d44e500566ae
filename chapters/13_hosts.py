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
# processes. *Runs in* 60 s on 2 cores, most of it waiting; half an hour to read.

# %%
from devices import simulate_devices

simulate_devices(8)

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
# Then a step: linear regression, whose targets are the sums of the rows. A row is a function of the step and
# its own number, so each process makes its two rows and never sees the others.

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
# Last the launcher. Whatever goes wrong, it leaves no process behind. (What this page's own JAX was told in
# the environment is not handed on.) One process, NumPy, is the judge.


# %% tags=["by-hand"]
def launched(worker):  # what each of four processes prints
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env, hosts = {k: v for k, v in os.environ.items() if k[:3] != "JAX"}, []
    try:
        for rank in range(4):
            told = {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": str(rank)}
            argv = [sys.executable, "-c", worker]
            hosts.append(Popen(argv, stdout=PIPE, text=True, env=env | told))
        return [one.communicate(timeout=90)[0] for one in hosts]
    finally:
        [one.kill() or one.wait() for one in hosts]


# %% tags=["by-hand"]
said = launched(START + STEP + ONCE)[0].splitlines()
x_BD = np.float32([np.random.default_rng((0, row)).normal(size=4) for row in range(8)])
y_B = x_BD.sum(1)  # w is zero, so the error is -y
alone = [y_B @ y_B / 8, *(0.1 * y_B @ x_BD / 8)]
assert np.allclose([float(x) for x in said[-1].split()], alone, 1e-5), "not as one does"
print(f"4 processes and one: loss {alone[0]:.4f}, and the same four weights")

# %% [markdown]
# Three things of this program are easy to get wrong. The step is called by *all* processes, though only one
# prints. The rows follow from the rank, so no row is fed twice. And without its two limits a process waits for
# one that never comes: here 60 s at the start for all to come, and later 5 s for a sign of life, a
# *heartbeat*. JAX's own are 300 s and 100 s.
#
# ## Four hosts of this machine
#
# A launcher tells each process who it is, as ours did with two variables. That is the least of it: it also has
# to bring the program there, and to be there when something goes wrong. `launcher.sh` of this project reaches
# hosts by ssh. It brings a commit to each, and starts a command in it, with the same variables, under a
# **supervisor**: a Python program, `launch/supervisor.py`, in a `tmux` session, which stays when ssh is gone.
#
# This page has no hosts, so a stand-in for `ssh` comes first in `PATH`: it runs what it is told in a folder of
# this machine. All else is as on 32 hosts: commits, supervisors, sessions, processes, signals. What a stand-in
# cannot show is a login, a network that is slow or cut, a clock that is wrong, a machine that is gone whole.
# (`make rehearse` goes through the same with real ssh servers. These cells need Linux with git;
# elsewhere they say so, and do nothing.)

# %%
SSH = """#!/bin/bash
# ssh [OPTION..] -- HOST COMMAND, where a folder of this machine stands for HOST
while [ "$1" != -- ]; do shift; done
cd "${HOSTS:?}/$2" && export HOME=$PWD TMUX_TMPDIR=$PWD && unset TMUX
if [ -e .bashrc ]; then . ./.bashrc; fi  # as bash does where sshd starts it
exec bash -c "$3"
"""

# %% tags=["hide-input"]
import atexit
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import time

NO_TMUX = """#!/bin/bash
# tmux new-session .. -c FOLDER COMMAND..: start the command, in no session
while [ "$1" != -c ]; do shift || exit 1; done
cd "$2" && shift 2 && exec < /dev/null > /dev/null 2>&1
setsid "$@" &
"""


def lacking():
    """What this machine lacks for hosts of its own."""
    tools = ("bash", "git", "setsid", "tar")
    system = [] if os.path.exists("/proc/self/fd") else ["Linux"]
    return system + [tool for tool in tools if not shutil.which(tool)]


# %% tags=["hide-input"]
class Hosts:
    """Folders that stand for hosts, and a repository with launcher.sh and train.py."""

    def __init__(self, names=("host0", "host1", "host2", "host3")):
        self.at, self.names = pathlib.Path(tempfile.mkdtemp(prefix="hosts-")), names
        for name in (*names, "bin", "code"):
            (self.at / name).mkdir()
        (self.at / "hosts.txt").write_text("\n".join(names))
        self.tmux = bool(shutil.which("tmux"))
        tools = {"ssh": SSH} if self.tmux else {"ssh": SSH, "tmux": NO_TMUX}
        for name, text in tools.items():
            (self.at / "bin" / name).write_text(text)
            (self.at / "bin" / name).chmod(0o755)
        for script in ("launcher.sh", "debug_tpu.sh"):
            shutil.copy(script, self.at / "code")
        shutil.copytree("launch", self.at / "code/launch")
        self.git("init", "--quiet")
        atexit.register(self.close)

    def latest(self, n, file, folder="axis-by-axis"):
        """A file of the last launch on host n."""
        return self.at / self.names[n] / folder / "launches/latest" / file


# %% tags=["hide-input"]
class Hosts(Hosts):
    def git(self, *words):
        settings = ("user.name=page", "user.email=page", "commit.gpgsign=no")
        who = [word for setting in settings for word in ("-c", setting)]
        done = self.run("git", *who, *words)
        assert done.returncode == 0, done.stderr

    def commit(self, program, message):
        (self.at / "code/train.py").write_text(program)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def run(self, *command, **settings):
        """A command as one types it in the folder of launcher.sh, for these hosts."""
        keep = lambda name: not re.search("^JAX|COLOR|^TMUX|^GIT_", name)
        env = {name: value for name, value in os.environ.items() if keep(name)}
        env |= {"PATH": f"{self.at}/bin:{env['PATH']}", "HOSTS": str(self.at)}
        env |= {"TMUX_TMPDIR": str(self.at), "VENV": sys.prefix, **settings}
        how = {"text": True, "stdin": subprocess.DEVNULL, "capture_output": True}
        how |= {"env": env, "cwd": self.at / "code", "timeout": 120}
        return subprocess.run(command, **how)


# %% tags=["hide-input"]
class Hosts(Hosts):
    """What the processes wrote is read from the logs: that is quicker than ssh."""

    def close(self):
        self.run("./launcher.sh", "stop", "--now", "--hosts", "../hosts.txt")
        if self.tmux:
            self.run("tmux", "-L", "axis-debug", "kill-server")
        shutil.rmtree(self.at, ignore_errors=True)

    def marks(self, n, word):
        """What follows `word` on the lines of host n that begin with it, as numbers."""
        text = self.latest(n, "log").read_text()
        found = re.findall(rf"(?m)^{word} (.*)\n", text)
        return [[float(x) for x in line.split()] for line in found]

    def last(self, n):
        """The step that host n has come to last, and when."""
        return (self.marks(n, "step") or [[-1, time.time()]])[-1]


# %% tags=["hide-input"]
class Hosts(Hosts):
    def wait(self, what, of=range(4), limit_s=90):
        """Until what(n) is true of these hosts."""
        until = time.time() + limit_s
        while not all(what(n) for n in of):
            logs = [self.latest(n, "log").read_text()[-600:] for n in range(4)]
            assert time.time() < until, f"not in {limit_s} s: " + "\n".join(logs)
            time.sleep(0.05)

    def wait_for_end(self, of=range(4), folder="axis-by-axis"):
        self.wait(lambda n: self.latest(n, "exit", folder).exists(), of)


# %% tags=["hide-input"]
def launcher(words, *command, **settings):
    """Run ./launcher.sh, show what was typed and what it says, without its table."""
    words = [*shlex.split(words), *command]
    given = [f"{name}={value}" for name, value in settings.items()]
    print("$", shlex.join([*given, "./launcher.sh", *words]))
    if "--" in words and "exec" not in words:
        with socket.create_server(("127.0.0.1", 0)) as free:
            settings["COORDINATOR_PORT"] = str(free.getsockname()[1])
    done = hosts.run("./launcher.sh", "--hosts", "../hosts.txt", *words, **settings)
    said = done.stdout.partition("host   ")[0] + done.stderr
    print(said.replace(f"{hosts.at}/", "/"), end="")
    return done


# %% tags=["hide-input"]
def status(**settings):
    """What `./launcher.sh status` says of each host; some of its columns are shown."""
    asked = ("./launcher.sh", "--hosts", "../hosts.txt", "status", "--json")
    rows = json.loads(hosts.run(*asked, **settings).stdout)
    given = "".join(f"{name}={value} " for name, value in settings.items())
    print(f"$ {given}./launcher.sh status")
    print(f"{'host  state':34} step loss   s ago last line of the log")
    for row in rows:
        cells = [row[k] for k in ("step", "loss", "step_s_ago", "last_line")]
        step, loss, ago, line = ("-" if cell is None else cell for cell in cells)
        print(f"{row['host']} {row['state']:28}{step:>4} {loss:<8}{ago:>4} {line:.64}")
    return rows


# %% [markdown]
# The program becomes a loop. It writes a line when it comes to a step, and another when its rows are there and
# it enters the step. Process 0 saves every 20 steps, and at a start all begin where its save is.

# %%
LOOP = r"""
from jax.experimental.multihost_utils import broadcast_one_to_all
saved, steps = f"runs/{sys.argv[1]}.npz", int(sys.argv[2])
t, w_D = 0, np.zeros(4, np.float32)
if rank == 0 and os.path.exists(saved): t, w_D = np.load(saved).values()
t, w_D = broadcast_one_to_all((np.int32(t), w_D))
for t in range(int(t), steps):
    print("step", t, round(time.time(), 2))
    while os.path.exists("runs/stall"): time.sleep(0.1)  # a disk that does not answer
    print("enter", t)
    try:
        w_D, loss = step(t, w_D)
        loss = float(loss)  # here it waits for all
    except Exception:
        print("error", t, round(time.time(), 2))
        raise
    tell(t + 1, steps, loss)  # what `status` shows
    if rank == 0 and t % 20 == 19: np.savez(saved, t=t + 1, w_D=w_D)
    time.sleep(0.02)
print("end", round(loss, 4), *np.asarray(w_D).round(4))"""

# %% tags=["hide-input"]
TELL = r"""
def tell(step, steps, loss):
    path = os.environ["AXIS_PROGRESS"]  # of the supervisor
    with open(path + ".new", "w") as file:
        print(step, steps, f"{loss:.4f}", "-", int(time.time()), sep="\t", file=file)
    os.replace(path + ".new", path)
"""
lacks = lacking()
hosts = None if lacks else Hosts()
if lacks:
    print("No hosts here: launcher.sh wants what this machine lacks,", *lacks)
    print("The site shows what these cells print. Go on at Exercise 1.")
elif not hosts.tmux:
    print("No tmux here: a stand-in starts the commands, and no panes are shown.")

# %%
if hosts:
    hosts.commit(START + STEP + TELL + LOOP, "A loop")
    launcher("--restarts 1 -- python train.py first 20000", RESTART_WAIT="7")
    hosts.wait(lambda n: hosts.last(n)[0] >= 30)

# %% [markdown]
# No process starts before all hosts have said that they are ready, because a start on 31 hosts of 32 is a wait
# for the last one.
#
# ## One is killed
#
# Each process has threads besides Python's. One of them tells the coordinator every few seconds that the
# process lives: a **heartbeat**. Now the process on host2 gets SIGKILL, after which the kernel takes its
# memory and closes its connections.
#
# > **Predict.** One second later, how many of the other three processes have ended?

# %%
my_prediction = None  # of three
PID = '"$(cat ../../launches/latest/pid)"'
if hosts:
    launcher("exec --only host2 -- bash -c", f"kill -KILL {PID}")
    time.sleep(1)
    killed_at = hosts.latest(2, "restarts").stat().st_mtime  # its supervisor saw it
    ended = sum(hosts.latest(n, "restarts").exists() for n in (0, 1, 3))
    rows = status()
    lesson.predicted("ended, of the other three", my_prediction, ended)

# %% tags=["remove-cell"]
if hosts:
    assert ended == 0 and rows[2]["state"] == "restarting, 1 of 1", "who ended?"
    assert any(hosts.marks(n, "error") for n in (0, 1, 3)), "nobody saw it at once"

# %% [markdown]
# <details><summary>Why</summary>
#
# None. The closed connection is an exception in a neighbour at once, and its log ends with it. But a JAX
# process that leaves tells the coordinator, and waits there for the others, and these wait in the `psum` for
# one that never comes. Who looks at exit statuses sees one dead and three well.
# </details>
#
# When the coordinator has missed heartbeats for 5 s it tells all, and C++ aborts each (status 134, 128 + the
# signal). **At the abort no `except` and no `finally` of Python runs**; only a neighbour's did, before.
# Process 0, which saves, was still waiting. Nothing can be saved then; what was saved before is what you
# have. So the answer to "what
# happens" is: all die. That is the design, because half a collective has no meaning. The one who starts again
# stands outside. Here each supervisor does, 7 s after its own process ended: longer than the 5 s, so that all
# have ended before the first begins again.

# %%
if hosts:
    hosts.wait(lambda n: hosts.last(n)[1] > killed_at + 6)
    ends = [hosts.latest(n, "restarts").stat().st_mtime for n in (0, 1, 3)]
    print("others ended, seconds after:", *[f"{end - killed_at:.1f}" for end in ends])
    steps = [hosts.marks(n, "step") for n in range(4)]
    before = [max(t for t, at in own if at < killed_at) for own in steps]
    again = [min(t for t, at in own if at > killed_at + 6) for own in steps]
    print("had come to step", *[f"{t:.0f}" for t in before])
    print("go on from step", *[f"{t:.0f}" for t in again], "where process 0 saved")

# %% tags=["remove-cell"]
if hosts:
    assert all(2 < end - killed_at < 20 for end in ends), "not by the heartbeat"
    assert len({*again}) == 1 and again[0] % 20 == 0 <= before[0] + 1 - again[0] <= 20
    assert all("status 134" in hosts.latest(n, "log").read_text() for n in (0, 1, 3))

# %% [markdown]
# ## One hangs, and its heart beats
#
# A heartbeat comes from a thread of its own. It says that the process is there, and nothing of what its main
# thread does: a download, a lock, or a disk, as now on host2, that does not answer. A **watchdog** looks from
# outside at what each wrote last. Its limit is 4 s here.
#
# > **Predict.** When the limit has passed, how many of the four have written nothing for 4 s?

# %%
my_prediction = None  # of four
if hosts:
    hosts.wait(lambda n: hosts.last(n)[1] > killed_at + 6 and hosts.last(n)[0] > 40)
    launcher("exec --only host2 -- touch runs/stall")
    age = lambda n: time.time() - hosts.last(n)[1]
    hosts.wait(lambda n: age(n) > 4)
    ages = [age(n) for n in range(4)]
    steps = [hosts.last(n)[0] for n in range(4)]
    entered = [hosts.marks(n, "enter")[-1][0] for n in range(4)]
    rows = status()
    lesson.predicted("silent", my_prediction, sum(a > 4 for a in ages), "of four")
    print("seconds of silence", *[f"{a:.2f}" for a in ages])

# %% tags=["remove-cell"]
if hosts:
    assert min(ages) > 4 and len({*steps}) == 1, "who is silent?"
    assert entered == [steps[0], steps[0], steps[0] - 1, steps[0]], "who is the cause?"
    assert all(row["state"].startswith("running") for row in rows)

# %% [markdown]
# <details><summary>Why</summary>
#
# All of them, and for the same time, because three wait for the fourth. So age tells *that* the run is stuck,
# and never *who* is the cause.
# </details>
#
# Look at all four at once. `debug_tpu.sh` opens a pane for each host, which follows its log; here are the
# last lines of each. Which host is it?


# %% tags=["hide-input"]
def last_two(n, in_pane=True):
    """The last two lines in the pane of host n; without tmux, of its log."""
    text = hosts.latest(n, "log").read_text()
    if in_pane and hosts.tmux:
        show = ("capture-pane", "-p", "-t", f"axis:hosts-0-3.{n}")
        text = hosts.run("tmux", "-L", "axis-debug", *show).stdout
    return [line for line in text.splitlines() if line.strip()][-2:]


def panes():
    """What was typed, and the panes of four hosts, two by two."""
    if hosts.tmux:
        hosts.run("./debug_tpu.sh", "--hosts", "../hosts.txt")
    hosts.wait(lambda n: last_two(n) == last_two(n, in_pane=False))
    boxes = [[f"── {name} ".ljust(28, "─")] for name in hosts.names]
    for n, box in enumerate(boxes):
        box += [f" {line:27}" for line in last_two(n)]
    if hosts.tmux:
        hosts.run("tmux", "-L", "axis-debug", "kill-server")
    typed = "$ ./debug_tpu.sh" if hosts.tmux else "(no panes without tmux: the logs)"
    rows = [*zip(*boxes[:2], strict=True), *zip(*boxes[2:], strict=True)]
    return [typed, *(" ".join(row) for row in rows)]


# %%
if hosts:
    shown = panes()
    print(*shown, sep="\n")
    launcher("exec --only host2 -- rm runs/stall")
    hosts.wait(lambda n: hosts.last(n)[0] > steps[0] + 5)
    print("go on:", *[f"{hosts.last(n)[0]:.0f}" for n in range(4)])

# %% tags=["remove-cell"]
if hosts:
    late, even = (f"enter {s:.0f} " for s in (steps[0] - 1, steps[0]))
    assert "".join(shown).count(even) == 3 and late in "".join(shown), shown

# %% [markdown]
# All came to the step. Three have *entered* it, and host2 has not. So put a mark where a host can be held up
# alone: after its own work (reading, saving), and before the work of all. (PyTorch's flight recorder writes
# one for each collective.)
#
# Then the disk answered, and the run went on. A watchdog that kills would have cost a restart. So its limit
# must be longer than the longest pause that is healthy, with compiling, evaluating and saving; the project's
# default is 1,800 s. If it is told of each batch of an evaluation, it can be shorter.
#
# ## One is frozen
#
# SIGSTOP leaves a process there, with open connections, and no thread of it runs. To its peers that is what a
# machine without power looks like.

# %%
if hosts:
    launcher("exec --only host2 -- bash -c", f"kill -STOP {PID}")
    frozen_at = time.time()
    hosts.wait_for_end(of=(0, 1, 3))
    rows = status()
    stopped = launcher("stop --now")

# %% tags=["remove-cell"]
if hosts:
    states = [row["state"] for row in rows]
    assert states[2] == "running, restarted 1 of 1" and stopped.returncode == 3
    assert [states[n] for n in (0, 1, 3)] == ["exit 134"] * 3
    # An abort closes connections: there may be an exception in another's last moment.
    first = min(hosts.latest(n, "exit").stat().st_mtime for n in (0, 1, 3))
    seen = [at for n in (0, 1, 3) for _, at in hosts.marks(n, "error")]
    assert not [at for at in seen if frozen_at < at < first - 1], "who closed it?"

# %% mystnb={"image": {"alt": "Two time lines of four processes: dots for steps end at second 0 on all four rows; grey bars of waiting go on for about five seconds on rows 0, 1 and 3, and end in crosses; on some of these rows of the upper one a diamond stands at second 0. In the upper one, dots begin again on all rows some ten seconds later; in the lower one the red bar of row 2 outlasts the others."}}
if hosts:
    figure, panels = plt.subplots(2, 1, figsize=(6.2, 4), sharex=True)
    cases = (("killed", killed_at, "restarts"), ("frozen", frozen_at, "exit"))
    for axes, (name, zero, file) in zip(panels, cases, strict=True):
        for n in range(4):
            end = hosts.latest(n, file).stat().st_mtime - zero
            seen = {word: hosts.marks(n, word) for word in ("step", "error")}
            times = [t - zero for _, t in seen["step"] if -2 < t - zero < 21]
            errors = [t - zero for _, t in seen["error"] if -1 < t - zero < 21]
            start = max(t for t in times if t < end)
            axes.plot(times, [n] * len(times), ".", color=BLUE)
            colour = RED if n == 2 else GREY
            axes.barh(n, end - start, 0.3, start, color=colour, alpha=0.4)
            axes.plot(end, n, "x", color=RED)
            axes.plot(errors, [n] * len(errors), "d", color="black")
        axes.set(title=f"Process 2 is {name}: all wait, until the heartbeat")
        axes.set(yticks=range(4), xlim=(-2, 21), ylabel="process")
    panels[1].set_xlabel("seconds; dot: a step, diamond: an exception, cross: the end")

# %% [markdown]
# No exception comes while they wait: only the heartbeat ends it. No restart was left, so the three ended.
# The frozen process is ended by nobody: it holds its memory, and on a TPU its chips, so the next start on
# this host fails. Somebody *on that host* has to kill it, and its supervisor did when `stop --now` asked.
#
# Process 0 is special, because every other one holds a connection to its coordinator. If it is killed, C++
# aborts all others at once; and no message of JAX says who died, because the one who counts heartbeats is
# gone.
#
# ## One is set up differently
#
# Long ago somebody wrote `export LR=0.2` into `.bashrc` of host2. On the others `lr` is 0.1.
#
# > **Predict.** All run 30 steps from zeros. The weights are said to be equal copies. By what factor do those
# > of process 2 differ from those of process 0?
#
# Beside it, in another folder of each host, the next commit is launched. There each process first takes the
# sha256 of its settings, a **fingerprint** of 32 bytes, and all compare.

# %%
CHECK = """
import hashlib
from jax.experimental.multihost_utils import process_allgather
text = json.dumps({"lr": lr, "words": sys.argv[1:]}).encode()
own = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
prints = process_allgather(own)  # (4, 32): one collective, of bytes
odd = [r for r in range(4) if (prints[r] != prints[0]).any()]
if odd:
    print("refused because of process", *odd)
    sys.exit(2)  # all, since all have seen the same
"""

# %%
my_prediction = None  # times
if hosts:
    (hosts.at / "host2/.bashrc").write_text("export LR=0.2\n")
    launcher("-- python train.py second 30")
    hosts.commit(START + STEP + TELL + CHECK + LOOP, "Compare first")
    launcher("-- python train.py second 30", HOST_FOLDER="checked")
    hosts.wait_for_end()
    rows = status()
    ends = np.array([hosts.marks(n, "end")[0] for n in range(4)])
    factor = float((ends[2, 1:] / ends[0, 1:]).mean())
    lesson.predicted("weights of 2 / of 0", my_prediction, factor, "times", within=0.01)
    hosts.wait_for_end(folder="checked")
    checked = status(HOST_FOLDER="checked")

# %% tags=["remove-cell"]
if hosts:
    assert abs(factor - 2) < 1e-3 and len({*ends[:, 0]}) == 1
    assert {row["state"] for row in rows} == {"exit 0"}
    assert {row["state"] for row in checked} == {"exit 2"}
    assert {row["last_line"] for row in checked} == {"refused because of process 2"}

# %% [markdown]
# <details><summary>Why</summary>
#
# Twice as big, because each of its updates was. Without the check all four end with status 0 and print the
# same loss. It is the same number because it is a *sum* over all: each process sees the result of everyone's
# work, and so no process sees a difference from another.
# </details>
#
# With the check all end before the first step, with status 2. A supervisor does not start that again, because
# it would end so again. The fingerprint costs 32 bytes a process, once. At this size a network shows its
# latency and nothing of its bandwidth: on any chip it is lost in the seconds of the start. What goes in:
# settings, the commit, versions of packages, the tokens, the number of devices of each. What stays out: all
# that *must* differ, such as the rank. (All are compared with process 0; if that is the odd one, the other
# three are named.)
#
# Ours does not cover the program. Now somebody mends a line on one host, by hand, and there a step takes 3
# rows in place of 2. What the processes exchange, a gradient of four numbers, has one shape for all, so no
# collective has a reason to complain.

# %%
if hosts:
    edit = ("s/(0, 1)/(0, 1, 2)/", "train.py")
    launcher("exec --only host2 -- sed -i", *edit, HOST_FOLDER="checked")
    edited = launcher("-- python train.py third 30", HOST_FOLDER="checked")

# %% tags=["remove-cell"]
if hosts:
    assert edited.returncode == 1 and "train.py changed in" in edited.stderr
    last = [hosts.latest(n, "launch.json", "checked").read_text() for n in range(4)]
    assert not any("third" in words for words in last), "somebody started it"

# %% [markdown]
# Before a start the launcher compares the files on each host with the checksums they had when they came, and
# so it refuses.
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
# Each failure costs the time until it is noticed, a restart (r = 600 s of starting, reading, compiling), and
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
for count in (32, 1024):
    print(f"{count:5} hosts: {count / host_days:.2f} failures a day")

# %% [markdown]
# At 32 hosts a failure comes about once in eight days, so what matters is that *somebody* notices; a night
# costs more than any limit. At 1,024 hosts there are about four a day, and a limit of 1,800 s costs three
# times the restart. A heartbeat of 10 s gains little over 100 s there, and ends a good run whenever a network
# is away for 11. None of this depends on the chip; what depends on it is r. (This is arithmetic: the
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
import functools
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
@functools.cache  # one that hangs takes its time to do so, once
def outcome(train):

    def thread(rank, group):
        try:
            group.saved[rank] = train(rank, Host(group, rank)) or []  # it ended
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

    return functools.cache(run)


# %% tags=["hide-input"]
def result(saved):
    """Ten numbers: all ended, all agree, gathers that a step's list has room for."""
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


def worst_decides(hosts, rank, loss, best, saved, t):
    loss = max(hosts.gather(loss))
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
    (variant(first_decides), "All agree, by the loss of one host's rows: a quarter."),
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


# %% tags=["hide-output"]
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
assert check_best(variant(worst_decides)) == BEST_HINTS[3][1]
assert check_best(...) == lesson.NOTHING == check_best(lambda rank, hosts: ...)

# %% [markdown]
# ## In one table
#
# | what happens to one host | who notices | when | what happens |
# |---|---|---|---|
# | it does not come at the start | the others | initialization timeout | all end; start again |
# | its process is killed | neighbours; the coordinator | at once; heartbeat timeout | all are aborted, and then no `except` runs; supervisors start again |
# | it loses power, or freezes | the coordinator | heartbeat timeout | the same; a frozen process must be killed on its host |
# | process 0 is killed | all others, by a closed connection | at once | the same; JAX names nobody, its supervisor does |
# | its main thread hangs | a watchdog on progress | its limit, longer than the longest step | kill all, start again |
# | its settings differ, what it exchanges has the same shape | nobody, or a fingerprint | before the first step | end with the name of what differs |
# | a file of its program differs | nobody, or a launcher with checksums | before the start | nothing is started |
# | it is slow | a time that each measures alone | steps | name it; change the host |
#
# | here | in PyTorch |
# |---|---|
# | `jax.distributed.initialize`, rank, coordinator | `init_process_group`, rank, rendezvous at `MASTER_ADDR` |
# | a launcher on each host that starts again | `torchrun --nnodes 32 --max-restarts 3`: an agent a host, a new rendezvous after each failure |
# | heartbeat, abort | the agents of `torchrun` watch their processes, and the rendezvous the agents |
# | watchdog on progress | the NCCL watchdog thread, with the `timeout` of the process group: of a collective, 10 minutes; `TORCH_NCCL_ASYNC_ERROR_HANDLING` says whether it ends the process |
# | marks before each step | the flight recorder, `TORCH_NCCL_TRACE_BUFFER_SIZE` |
#
# When what? On one host, none of it. On two to some dozens, the fingerprint, the heartbeat and a launcher
# that starts again. From hundreds on, spare hosts too, and a limit for hangs that is near the longest step.
# It is the same for TPU hosts and for nodes of 8 H100, because it is about processes.
#
# ## What the trainer adds
#
# This page's program learns of a death from JAX, and of a hang from a reader. `main.py`, the trainer, has a
# thread in each process that watches the others: they end with status 75 and a sentence that names who is
# silent, or who did not come to which step and on which line it is. Settings, files and packages are compared
# as above, and the difference is named. `./launcher.sh doctor` says what is wrong on a host before it matters,
# `fetch` brings a run home. The page "On several hosts" has the table of what ends a run.
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
