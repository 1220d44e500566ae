"""Carry out one request from launcher.sh, setup_tpu.sh or debug_tpu.sh on this host.

For every request, the scripts send over ssh: `supervisor.py`, `machine.py` and this file, one line of JSON (the
request), and the request's data. Each line of the answer starts with the request's random mark, so text that a login
script or a command prints is never mistaken for an answer.

Needs: Linux, Python 3.9, tmux, tar; to install packages, also make and Python 3.11.
Changes: only the folder in the request, which must not be shared with other hosts:
  commits/COMMIT/    the files of a commit; .shipped has their checksums; runs and tokens are links to the folders below
  packages/LOCK/     the .venv shared by all commits with the same lock files
  launches/LAUNCH/   launch.json (command, environment, settings), agent.py, log and the older log.old, pid, exit;
                     progress and alive, if the command writes them; restarts: the count; stop: who requested a stop.
                     Only you can read these files. launches/latest links to the last launch
  runs/  tokens/     what training writes and reads, shared by all commits
  lock               locked while a process of a launch is alive; the kernel releases it when the last process exits
  starting           locked while a launch is starting

A command can report to its supervisor through two files, which it replaces by renaming. The variable AXIS_PROGRESS has
the path of a file with one line of tab-separated fields: step, number of steps, loss, tokens/s, the unix time at which
the step finished, and after how many seconds without a new file `status` reports a problem; `-` is unknown. AXIS_ALIVE
has the path of the heartbeat file, which a healthy command keeps replacing. This file contains the number of seconds
without a heartbeat after which the supervisor kills the command, and a status: `joining` until all processes have
joined, then `joined`; at the end `preempted` if the command stopped early because the system sent SIGTERM.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

# ruff: noqa: I001 - one import per line, because `hosts.agent_source` removes these lines
from launch.machine import describe_process, has_tpu, holder_pids, processes_that_handle, tpu, tpu_worker, user_of
from launch.supervisor import BEGINNING, LATEST, Launch, Refused, Supervisor, describe_latest, in_commit, kill
from launch.supervisor import last_line, latest, nothing_runs, read, refusal_reason, reported_status, acquire_lock
from launch.supervisor import wait_for, write

GO_S = 60  # how long a host that is ready waits for the start signal of launcher.sh
source = globals().get("source", "")  # the text of this program, as it was sent
mark = ""  # the mark of the current request; empty: print plain text, for a terminal
stdin = sys.stdin.buffer


def emit(kind: str, value) -> None:
    """Send a line of the answer. If the reader has disconnected, carry on with the request."""
    with contextlib.suppress(BrokenPipeError):
        print(f"{mark} {json.dumps({kind: value})}" if mark else value, flush=True)


# Setting up -----------------------------------------------------------------------------------------------------------


def changed_files(commit: str) -> str:
    """Return the files of a commit that were edited after they were copied here, separated by spaces."""
    check = ["sha256sum", "--check", "--quiet", ".shipped"]
    done = subprocess.run(check, cwd=f"commits/{commit}", capture_output=True, text=True)
    return " ".join(line.partition(":")[0].removeprefix("./") for line in done.stdout.splitlines())


def receive(commit: str, **request) -> dict:
    """Unpack a commit atomically from a tar.gz on standard input, then `prepare` it."""
    for leftover in Path("commits").glob(".[0-9a-f]*"):  # from a setup that was killed
        if not os.path.exists(f"/proc/{leftover.name.rpartition('.')[2]}"):
            shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(f"commits/.{commit}.{os.getpid()}")
    for folder in (partial, "runs", "tokens"):
        os.makedirs(folder, exist_ok=True)
    try:
        unpack = subprocess.Popen(["tar", "-xzf", "-", "-C", partial], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with contextlib.suppress(BrokenPipeError), unpack.stdin as sink:
            shutil.copyfileobj(stdin, sink)
        if unpack.wait():
            raise Refused(f"the files of commit {commit} did not arrive completely; is the disk full?")
        sums = "find . -type f -print0 | xargs -0 sha256sum"
        (partial / ".shipped").write_bytes(subprocess.run(sums, shell=True, cwd=partial, stdout=subprocess.PIPE).stdout)
        (partial / "runs").symlink_to("../../runs")
        (partial / "tokens").symlink_to("../../tokens")
        with contextlib.suppress(OSError):  # another setup finished first
            partial.rename(f"commits/{commit}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return prepare(commit, **request)


def prepare(commit: str, venv: str, free: bool) -> dict:
    """Check that the host can run a commit, and install its packages. free: raise Refused if a run is alive."""
    if not shutil.which("tmux"):
        raise Refused("tmux is missing; install it: sudo apt-get install tmux")
    if free and not nothing_runs():
        raise Refused(f"a run is alive here: {describe_latest()}; stop it, or launch with --replace")
    if not os.path.isdir(f"commits/{commit}"):
        return {"absent": True}
    if files := changed_files(commit):
        where = f"{os.getcwd()}/commits/{commit}; copy what you need, remove that folder, and try again"
        raise Refused(f"files of the commit were edited on the host: {files} changed in {where}")
    install_packages(commit, venv)
    boot, here = read(Path("/proc/sys/kernel/random/boot_id"))[:8], os.stat(".")
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {**host_facts(commit), "address": connection[2] if len(connection) > 2 else "127.0.0.1",
            "machine": f"{boot}-{here.st_dev}-{here.st_ino}", "tpu": tpu(), "worker": tpu_worker(),
            "owner": None if nothing_runs() else latest().by}  # fmt: skip


def install_packages(commit: str, venv: str) -> None:
    """Link a commit to its packages, which are installed once for all commits with the same lock files."""
    code = Path("commits", commit)
    if not venv:
        target = "extra-tpu" if has_tpu() else "installed"
        locks = [code / "requirements.txt", code / "requirements/tpu.txt"]
        lock = Path("packages", hashlib.sha256(b"".join(map(Path.read_bytes, locks))).hexdigest()[:12])
        venv = f"{os.getcwd()}/{lock}/.venv"
        if not os.path.exists(f"{venv}/{target}"):
            if not shutil.which("make"):
                raise Refused("make is missing; install it: sudo apt-get install make")
            (lock / "requirements").mkdir(parents=True, exist_ok=True)
            shutil.copy(locks[1], lock / "requirements")
            for name in ("requirements.txt", "Makefile"):
                if not (lock / name).exists():
                    shutil.copy(code / name, lock)
            install_lock = acquire_lock(lock / "installing", 3600)
            with open(lock / "log", "w") as log:
                done = subprocess.run(["make", "-C", lock, f".venv/{target}"], stdout=log, stderr=log)
            os.close(install_lock)
            if done.returncode:
                lines = [line for line in read(lock / "log").splitlines() if not line.startswith("make")]
                why, log = (lines or ["make failed"])[-1], f"{os.getcwd()}/{lock}/log"
                raise Refused(f"cannot install the packages: {why}; see {log}")
    if not os.access(f"{venv}/bin/python", os.X_OK):
        raise Refused(f"{venv}/bin/python does not exist or is not executable")
    link(venv, code / ".venv")


def host_facts(commit: str) -> dict:
    """Return the versions of Python and jax, which must be the same on all hosts, free disk space in GiB, and clock."""
    python, versions = Path("commits", commit, ".venv/bin/python"), ["none", "none"]
    if os.access(python, os.X_OK):
        ask = ("import sys, importlib.metadata as m\nprint(sys.version.split()[0])\n"
               "print(next((d.version for d in m.distributions(name='jax')), 'none'))")  # fmt: skip
        versions = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.split() or versions
    free = shutil.disk_usage(".").free >> 30
    return {"python": versions[0], "jax": versions[-1], "free_gib": free, "clock": time.time()}


def check(commit: str, command: list[str], environment: dict) -> dict:
    """Ask main.py whether the command would run here, without starting it. `--run.check no` skips the check."""
    if re.search(r" --run[.]check[ =]no\b", " ".join(command)):
        return {}
    done = subprocess.run([*command, "--run.check", "only"], **in_commit(commit, environment),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if done.returncode:
        raise Refused(refusal_reason(done.stdout.decode(errors="replace")) or f"exit status {done.returncode}")
    return {}


# A run ---------------------------------------------------------------------------------------------------------------


def port(port: int) -> dict:
    """Raise Refused if a process listens on the port, at any address, because JAX's coordinator needs the port."""
    tables = read(Path("/proc/net/tcp")) + "\n" + read(Path("/proc/net/tcp6"))
    for fields in map(str.split, tables.splitlines()):
        if len(fields) > 9 and fields[3] == "0A" and fields[1].endswith(f":{port:04X}"):
            seen = holder_pids(f"socket:[{fields[9]}]")
            unseen = f"a process of user {user_of(int(fields[7]))} that you have no permission to inspect"
            who = describe_process(seen[0]) if seen else unseen
            raise Refused(f"port {port} is in use by {who}; end it, or set COORDINATOR_PORT to another port")
    return {}


def start(launch: dict, coordinator: str, count: int, environment: dict) -> dict:
    """Prepare a launch, and start it when launcher.sh sends `go`, once all hosts are ready.

    If launcher.sh disconnects, or sends nothing for GO_S seconds, cancel the launch before anything runs.
    """
    launch, folder = Launch(**launch, starter=os.getpid()), os.getcwd()
    here = launch.folder
    start_lock = acquire_lock("starting", 40)  # held until the run holds `lock`: of two simultaneous launches one fails
    if start_lock is None:
        raise Refused("another launch has been starting here for 40 s; wait until it has started, then launch again")
    if not nothing_runs():
        raise Refused(f"a run is alive here: {describe_latest()}")
    if has_tpu():  # JAX gets the order of the hosts from the TPU
        settings = {"AXIS_PROCESSES": str(count), "AXIS_PROCESS_ID": str(launch.process)}
        # JAX's default port, 8482, is closed between slices by Google Cloud's firewall rule (jax issue 35905).
        settings["JAX_COORDINATOR_PORT"] = coordinator.rpartition(":")[2]
    else:
        settings = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(count)}
        settings["JAX_PROCESS_ID"] = str(launch.process)
    settings |= {"AXIS_HOST": launch.host, "AXIS_COMMIT": launch.commit}
    settings |= {f"AXIS_{name.upper()}": f"{folder}/{here}/{name}" for name in ("progress", "alive")}
    launch.environment = {**settings, **environment}
    umask = os.umask(0o077)  # the environment or the command may contain a key
    here.mkdir(parents=True)
    for name in ("exit", "pid"):
        (here / f"{name}.partial").write_text(" " * 99)  # reserves their space in case the disk fills up
    (here / BEGINNING).write_text(json.dumps(dataclasses.asdict(launch)))
    (here / "agent.py").write_text(f"#!{sys.executable} -I\n{source}")
    (here / "agent.py").chmod(0o700)
    link(launch.name, LATEST)
    os.umask(umask)
    words = [f"{folder}/{here}/agent.py", folder, "supervise", launch.name]
    tmux = ["tmux", "new-session", "-d", "-s", session_name(), "-c", f"{folder}/commits/{launch.commit}", *words]
    done = subprocess.run(tmux, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Refused(f"tmux cannot start a session named {session_name()}: {done.stderr.strip()}")
    if not wait_for(20, (here / "log").exists):
        raise Refused(f"tmux did not start the command within 20 s; see {folder}/{here}")
    os.close(start_lock)
    emit("ready", True)
    received = []
    listener = threading.Thread(target=lambda: received.append(stdin.readline()), daemon=True)
    listener.start()
    listener.join(GO_S)
    if received != [b"go\n"]:
        write(here / "stop", launch.by)
        return {"called_off": True}
    (here / "go").touch()
    wait_for(20, lambda: any((here / name).exists() for name in ("pid", "restarts", "exit")))
    wait_for(1, (here / "exit").exists)  # a command that cannot run exits at once
    return status()


def link(target: str, path: Path) -> None:
    """Create or atomically replace a symbolic link."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.symlink_to(target)
    partial.replace(path)


def session_name() -> str:
    """Return the name of the tmux session for this folder; for the default folder it is `axis`."""
    name = os.path.basename(os.getcwd())
    return "axis" if name == "axis-by-axis" else "axis-" + re.sub(r"[.:]", "_", name)


def state() -> str:
    """Return the state of the last launch as `status` prints it: running, restarting, its exit status, .."""
    if not os.path.lexists(LATEST):
        return "not launched"
    quiet, code = nothing_runs(), read(LATEST / "exit")  # in this order: a run writes its exit status before it ends
    if code:
        if code != "not started":
            code = f"exit {code}"
            if (LATEST / "stop").exists():
                code = f"stopped, {code}"
            elif reported_status(LATEST) == "preempted":
                code = f"preempted, {code}"
        return code if quiet or wait_for(1, nothing_runs) else f"{code}, processes left"
    if quiet:
        return "vanished"
    if not (LATEST / "go").exists():
        return "ready, waiting for the other hosts"
    if not (restarts := read(LATEST / "restarts")):
        return "running"
    return f"{'running, restarted' if (LATEST / 'pid').exists() else 'restarting,'} {restarts}"


def status() -> dict:
    """Return the state and progress of the last launch. None is unknown. Numbers are as the command wrote them."""
    launch, now = latest(), time.time()
    fields = (read(LATEST / "progress").split("\t") + ["-"] * 6)[:6]
    step, steps, loss, speed, at, late_s = (None if field in ("", "-") else field for field in fields)
    values = {"state": hang(now, late_s) or state(), "launch": launch.name, "commit": launch.commit[:7]}
    values |= {"step": step, "steps": steps, "loss": loss, "tokens_per_s": speed, "step_s_ago": None, "log_s_ago": None}
    if at and re.fullmatch(r"[1-9]\d*(\.\d*)?", at):
        values["step_s_ago"] = max(0, int(now - float(at)))
    if (LATEST / "log").exists():
        values["log_s_ago"] = max(0, int(now - os.path.getmtime(LATEST / "log")))
    return {**values, "last_line": last_line(LATEST / "log") or None, "by": launch.by, "command": launch.command_line()}


def hang(now: float, late_s: str | None) -> str:
    """Return how long a running command has made no progress, if it is longer than the command itself expects."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        quiet_s = int(now - os.path.getmtime(LATEST / "progress"))
        if quiet_s > float(late_s) and state().startswith("running"):
            return f"no progress for {quiet_s} s"
    return ""


def stop(grace_s: int, by: str, yes: bool, launch: str = "") -> dict:
    """Send SIGTERM, then SIGKILL after `grace_s` seconds. launch: stop only if the last launch has this name.

    A second `stop` only waits for the first, because a second SIGTERM would make the run exit without saving.
    """
    begin, end, waits = time.monotonic(), "stopped", ""
    if launch and latest().name != launch:
        return {"text": "was not started"}
    if nothing_runs():
        return {"text": f"nothing runs: {state()}"}
    if latest().by != by and not yes:
        return {"owner": latest().by}
    here = LATEST.resolve()
    if create_file(here / "stop", by):  # prevents all further restarts
        wait_for(1, (here / "pid").exists)  # the command may be starting right now
    else:
        waits = f", requested earlier by {read(here / 'stop') or 'somebody'}"
    told = False
    while not nothing_runs() and time.monotonic() - begin < grace_s:
        if not told and (pid := read(here / "pid")):
            told = True
            if create_file(here / "told"):
                kill(int(pid), signal.SIGTERM)
            emit("waiting", True)
        time.sleep(0.05)
    if not nothing_runs():
        wait_for(5, (here / "pid").exists)
        if pid := read(here / "pid"):
            kill(int(pid), signal.SIGKILL)
        if not wait_for(10, nothing_runs):
            pids = " ".join(map(str, holder_pids(f"{os.getcwd()}/lock")))
            raise Refused(f"a process of the run is still alive after SIGKILL: {pids}")
    if read(here / "exit") == "137":
        end, waits = "killed", waits + ", SIGTERM did not end it" * (grace_s > 0)
    result = f"{end} after {time.monotonic() - begin:.0f} s{waits}: {state().replace('stopped, ', '')}"
    return {"text": f"{result}; its log ends: {last_line(here / 'log')}", "killed": end == "killed"}


def create_file(path: Path, text: str = "") -> bool:
    """Create a file, which is empty or missing if the disk is full or read-only. Return False if it already exists."""
    try:
        with open(path, "x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


# Inspecting the host --------------------------------------------------------------------------------------------------


def logs(lines: int, follow: bool) -> dict:
    """Send the last lines of the log. follow: also send new lines, then the logs of later launches."""
    if not (LATEST / "log").exists():
        raise Refused("nothing was launched here")
    while True:
        here = LATEST.resolve()
        with open(here / "log", errors="replace") as file:
            for line in file.readlines()[-lines:] if lines else []:
                emit("line", line.rstrip("\n"))
            while follow and LATEST.resolve() == here:
                if not show_more(file):
                    return {}
        if not follow:
            return {}
        wait_for(20, (LATEST / "log").exists)
        emit("line", f"supervisor: launch {describe_latest()}")
        lines = 10**9


def show_more(file) -> bool:
    """Emit the complete lines added to a log, then wait 0.2 s. Return False if the reader has disconnected."""
    if file.tell() > os.path.getsize(file.name):  # the log was truncated
        file.seek(0)
    while (at := file.tell()) is not None and (line := file.readline()).endswith("\n"):
        emit("line", line[:-1])
    file.seek(at)
    if not mark:
        time.sleep(0.2)
    return not mark or not select.select([stdin], [], [], 0.2)[0] or bool(stdin.read1(1))


def stacks() -> dict:
    """Make each process of the run print the stacks of its threads into the log, and send them.

    main.py prints them on SIGUSR2, even if it hangs in a device call. A process without a handler would be killed.
    """
    if nothing_runs():
        raise Refused(f"nothing runs: {state()}")
    log = (LATEST / "log").resolve()
    begin, found = os.path.getsize(log), processes_that_handle(signal.SIGUSR2, int(read(LATEST / "pid", "-1")))
    if not found:
        raise Refused("no process of the run can print its stacks yet; main.py can, once it has imported its packages")
    for pid, frozen in found.items():
        os.kill(pid, signal.SIGUSR2)
        if frozen:
            emit("line", f"{describe_process(pid)} is frozen by SIGSTOP, so it cannot print its stacks")
    if not all(found.values()):
        wait_for(5, lambda: os.path.getsize(log) > begin)
        time.sleep(0.5)  # until all threads are printed
    with open(log, errors="replace") as file:
        file.seek(begin)
        for line in file:
            emit("line", line.rstrip("\n"))
    return {}


def run_next_to_run(command: list[str]) -> dict:
    """Run a command while the training run goes on, in the same commit."""
    if not (launch := latest()).command:
        raise Refused("nothing was launched here")
    try:
        child = subprocess.Popen(command, **in_commit(launch.commit, {}), stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT)  # fmt: skip
    except OSError as error:
        raise Refused(f"{command[0]}: {error.strerror}") from None
    for line in child.stdout:
        emit("line", line.decode(errors="replace").rstrip("\n"))
    if child.wait():
        raise Refused(f"exit status {child.returncode}")
    return {}


def pack(run: str) -> dict:
    """Send a tar.gz of a run's folder as lines of base64. Files may grow in the meantime."""
    names = sorted(os.listdir("runs")) if os.path.isdir("runs") else []
    if run not in names:
        raise Refused(f"runs/{run} does not exist; existing runs: {', '.join(names)[:200] or 'none'}")
    command = ["tar", "--warning=no-file-changed", "-czf", "-", "-C", f"runs/{run}", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        while part := child.stdout.read(1 << 16):
            emit("part", base64.b64encode(part).decode())
    if child.returncode > 1:
        raise Refused(f"tar ended with status {child.returncode}")
    return {}


def clean(keep: int, commit: str) -> dict:
    """Remove all but the last `keep` launches, and commits and packages that neither these nor `commit` need."""
    last, before, removed = LATEST.resolve().name, disk_kib(), []

    def remove(paths, needed) -> None:
        for path in paths:
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(str(path)[:26])

    launches = sorted(Path("launches").glob("2*"))  # a name starts with the launch time
    remove(launches[: max(0, len(launches) - keep)], {last})
    stay = [json.loads(read(path) or "{}").get("commit") for path in Path("launches").glob(f"2*/{BEGINNING}")]
    remove(Path("commits").glob("[0-9a-f]*"), {commit, *stay})
    remove(Path("packages").glob("*"), {os.path.basename(os.path.dirname(os.readlink(link)))
                                        for link in glob.glob("commits/*/.venv")})  # fmt: skip
    return {"text": f"{(before - disk_kib()) // 1024} MiB freed: {', '.join(removed) or 'nothing to remove'}"}


def disk_kib() -> int:
    return int(subprocess.run(["du", "-sk", "."], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.split()[0])


def doctor(commit: str) -> dict:
    shipped = "absent"
    if os.path.isdir(f"commits/{commit}"):
        shipped = f"changed: {files}" if (files := changed_files(commit)) else "shipped"
    lacks = [tool for tool in ("tmux", "make", "tar") if not shutil.which(tool)]
    return {
        "commit": shipped,
        **host_facts(commit),
        "tpu": tpu(),
        "lacks": " ".join(lacks) or "nothing",
        "run": state(),
    }


def usage() -> dict:
    """Return CPU load, memory, disk, and each TPU chip's memory and utilization if `tpu-info` is installed."""
    sizes = dict(line.split(":") for line in read(Path("/proc/meminfo")).splitlines())
    total, free = (int(sizes[name].split()[0]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    disk, chips = shutil.disk_usage("."), ""
    ours = f"commits/{latest().commit}/.venv/bin/tpu-info"
    if tool := ours if os.path.exists(ours) else shutil.which("tpu-info"):
        lines = subprocess.run([tool], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.splitlines()
        chips = ";".join(" ".join(re.findall(r"[\w./%]+", line)) for line in lines if "GiB" in line)
    return {"load": f"{read(Path('/proc/loadavg')).split()[0]} of {os.cpu_count()}",
            "memory": f"{total - free:.1f} of {total:.1f} GiB", "disk": f"{100 * disk.used / disk.total:.0f}%",
            "tpu-info": chips or None}  # fmt: skip


VERBS = {
    verb.__name__: verb
    for verb in (prepare, receive, check, port, start, status, stop, stacks, logs, pack, clean, doctor, usage)
}
VERBS["exec"] = run_next_to_run
WRITING = ("prepare", "receive", "start", "clean")  # the others also work if the disk has become read-only


def enter(folder: str, verb: str) -> None:
    """Create the launch folder if it is missing, and change into it."""
    try:
        os.chdir(os.path.expanduser("~"))
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        if verb in WRITING and not os.access(".", os.W_OK):
            raise PermissionError
    except OSError:
        does = "write to" if verb in WRITING else "open"
        raise Refused(f"cannot {does} {os.path.join(os.path.expanduser('~'), folder)}") from None


def answer() -> None:
    """Read a request from standard input, carry it out, and send the answer."""
    global mark
    request = json.loads(stdin.readline())
    mark = request.pop("mark")
    try:
        enter(request.pop("folder"), request["do"])
        if request.pop("keys"):
            request["environment"] = {**request["environment"], **json.loads(stdin.readline())}
        emit("answer", VERBS[request.pop("do")](**request))
    except Refused as error:
        emit("error", str(error))
    except OSError as error:
        emit("error", str(error) if error.filename else f"{error}: {os.getcwd()}")
    os._exit(0)  # a thread may still be reading standard input


def main() -> None:
    """Answer a request over ssh, or run as `agent.py FOLDER supervise LAUNCH` or `agent.py FOLDER logs LINES`."""
    if sys.argv[0] == "-c":
        return answer()
    os.chdir(sys.argv[1])
    if sys.argv[2] == "supervise":
        Supervisor(sys.argv[3]).run()
    else:
        with contextlib.suppress(KeyboardInterrupt, Refused):
            logs(int(sys.argv[3]), follow=True)


if __name__ == "__main__":
    main()
