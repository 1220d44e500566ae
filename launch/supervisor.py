"""Supervise a command on this host: run it, kill it if it freezes, and restart it if it fails.

It runs in the folder that `agent.py` describes. Both files are sent to a host as one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

WATCH_S = 5  # seconds between two checks of a command
ABSENT_MOST = 12  # stop after this many attempts in a row that not all processes joined
LATEST = Path("launches/latest")
BEGINNING = "launch.json"
FINAL = (0, 2, 126, 127, 130, 143)  # no restart: success; usage error; cannot execute, not found; SIGINT, SIGTERM


class Refused(Exception):
    """A host cannot carry out a request. The message explains why, and what to do."""


def write(path: Path, text: str) -> bool:
    """Replace a small file atomically; return whether it worked. On a full disk it works if FILE.partial exists."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "r+" if partial.exists() else "w") as file:
            file.write(f"{text:99}\n")
        partial.replace(path)
        return True
    except OSError:
        return False


def read(path: Path, default: str = "") -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return default


def wait_for(seconds: float, what):
    """Wait until what() is true, for at most `seconds`, and return the last value of what()."""
    end = time.monotonic() + seconds
    while not (value := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def last_line(path: Path) -> str:
    """Return the last visible line of a log, without colors and without text that a progress bar overwrote."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4096))
        text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", file.read().decode(errors="replace").replace("\r", "\n"))
        lines = ["".join(filter(str.isprintable, line)) for line in text.splitlines()]
        return ([line for line in lines if any(map(str.isalnum, line))] or [""])[-1][:200]
    return ""


def refusal_reason(text: str) -> str:
    """Return a command's error message as one line: its `error: ..` line, the text in its box, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if errors := [line for line in lines if line.startswith("error: ")]:
        return errors[0]
    boxed = [line.strip("│ ") for line in lines if line.startswith("│")]  # tyro and rich draw such boxes
    boxed = [line for line in boxed if line.strip("─") and not line.startswith("For full helptext")]
    return f"error: {' '.join(boxed)[:500]}" if boxed else "".join(lines[-1:])


def acquire_lock(path: str, seconds: float = 0, how: int = fcntl.LOCK_EX):
    """Lock a file and return its descriptor, or None if another process still holds it after `seconds`."""
    flags = os.O_RDONLY if how == fcntl.LOCK_SH else os.O_RDWR | os.O_CREAT  # to look works on a read-only disk
    descriptor = os.open(path, flags, 0o644)

    def locked():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return True

    if wait_for(seconds, locked):
        return descriptor
    os.close(descriptor)
    return None


def nothing_runs() -> bool:
    if not os.path.exists("lock"):
        return True
    descriptor = acquire_lock("lock", how=fcntl.LOCK_SH)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@dataclasses.dataclass
class Launch:
    """The request behind a launch, stored as launches/NAME/launch.json."""

    name: str = "-"
    commit: str = "-"
    host: str = "-"  # this host, as it is written in the list of hosts
    first_host: str = "-"  # the host of process 0
    process: int = 0
    by: str = "-"  # who started it
    restarts: int = 0
    wait_s: int = 90  # seconds to wait before a restart
    log_mib: int = 256
    on_end: str = ""
    starter: int = 0  # the process id of the agent that gives the start signal
    command: list = dataclasses.field(default_factory=list)
    environment: dict = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path("launches", self.name)

    def command_line(self, to_type: bool = False) -> str:
        """Return the start of the command line; to_type: all of it, quoted for a shell. Keys are replaced by ***."""
        key = re.compile(r"(^| )(\w*(?:KEY|TOKEN|SECRET|PASSWORD)\w*)=\S*")
        words = [key.sub(r"\1\2=***", word) for word in self.command]
        return shlex.join(words) if to_type else " ".join(" ".join(words).split())[:200]


def latest() -> Launch:
    """Return the last launch, or a Launch with default values if there is none."""
    try:
        return Launch(**json.loads((LATEST / BEGINNING).read_text()))
    except (OSError, ValueError, TypeError):
        return Launch()


def describe_latest() -> str:
    launch = latest()
    begun = time.localtime(os.path.getmtime(LATEST / BEGINNING)) if launch.command else None
    return f"{launch.name} since {time.strftime('%F %T', begun)} by {launch.by}: {launch.command_line()[:100]}"


def in_commit(commit: str, environment: dict) -> dict:
    """Return the arguments with which `Popen` runs a command in a commit. The commit's packages come first in PATH."""
    folder = f"{os.getcwd()}/commits/{commit}"
    # If SSH_CLIENT is set, bash reads .bashrc, and the output of .bashrc would be in the log.
    inherited = {name: value for name, value in os.environ.items() if name not in ("SSH_CLIENT", "SSH2_CLIENT")}
    path = f"{folder}/.venv/bin:{os.environ.get('PATH', os.defpath)}"
    return {"cwd": folder, "env": {**inherited, **environment, "PATH": path}, "stdin": subprocess.DEVNULL}


class Supervisor:
    """Runs a launch's command. The tmux session shows the log. Typing into or closing the session has no effect."""

    def __init__(self, name: str):
        self.launch = Launch(**json.loads(Path("launches", name, BEGINNING).read_text()))
        self.here, self.again, self.absent = self.launch.folder, 0, 0
        self.lock = acquire_lock("lock", 5)
        self.killed, self.child, self.moved, self.quiet_s = False, None, None, 0
        if self.lock is None:
            raise Refused("a run is alive here")
        os.set_inheritable(self.lock, True)  # the command and its child processes hold the lock too
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, because the command would inherit that

    def note(self, text: str) -> None:
        """Write a line to the log, unless the disk is full."""
        with contextlib.suppress(OSError), open(self.here / "log", "a") as log:
            log.write(f"supervisor: {text}\n")

    def stop_requested(self) -> bool:
        return (self.here / "stop").exists()

    def run(self) -> None:
        """Wait for the start signal, run the command with its restarts, and write its exit status."""
        os.close(os.open(self.here / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
        show = ["tail", "-n", "+1", "-F", f"--pid={os.getpid()}", self.here / "log"]
        subprocess.Popen(show, stderr=subprocess.DEVNULL)
        while not (self.stop_requested() or (self.here / "go").exists()) and os.path.exists(
            f"/proc/{self.launch.starter}"
        ):
            time.sleep(0.02)
        code = self.run_attempts() if (self.here / "go").exists() and not self.stop_requested() else "not started"
        write(self.here / "exit", str(code))
        if self.launch.on_end and self.launch.process == 0 and code != "not started":
            self.begin(["bash", "-c", self.launch.on_end], AXIS_EXIT=str(code))

    def run_attempts(self) -> int:
        """Run the command, restart it as `next_restart` allows, and return the last exit status."""
        while True:
            code = self.run_once()
            if self.stop_requested() or not (why := self.next_restart(code)):
                return code
            kill(self.child.pid, signal.SIGKILL)  # child processes that it left behind
            with contextlib.suppress(FileNotFoundError):
                (self.here / "pid").replace(self.here / "pid.partial")
            write(self.here / "restarts", why)  # after removing pid, or `status` would show `running, restarted`
            if self.absent == 1:
                self.advise_fewer_hosts()
            self.note(f"the command exited with status {code}; restarting in {self.launch.wait_s} s, {why}")
            if wait_for(self.launch.wait_s, self.stop_requested):
                return code
            self.note(f"restarted, {why}")

    def begin(self, command: list[str], locks=(), **environment: str) -> subprocess.Popen:
        """Start a command in its own session, so that `stop` can signal all its processes. `locks`: which it holds."""
        environment = {**self.launch.environment, "PYTHONUNBUFFERED": "1", **environment}
        with open(self.here / "log", "ab") as log:
            return subprocess.Popen(command, **in_commit(self.launch.commit, environment), stdout=log, stderr=log,
                                    start_new_session=True, pass_fds=locks)  # fmt: skip

    def run_once(self) -> int:
        """Run the command once; return its exit status as a shell reports it."""
        for name in ("progress", "alive"):
            with contextlib.suppress(FileNotFoundError):
                (self.here / name).unlink()
        self.killed, self.moved, self.quiet_s, before = False, None, 0, out_of_memory_kills()
        try:
            self.child = self.begin(self.launch.command, [self.lock])
        except OSError as error:
            absent = isinstance(error, FileNotFoundError)
            self.note(f"{self.launch.command[0]}: {'not found' if absent else error.strerror}")
            return 127 if absent else 126
        write(self.here / "pid", str(self.child.pid))
        while (code := self.poll()) is None:
            self.watch_over()
        if code == -signal.SIGKILL and not self.killed and not self.stop_requested():
            self.note(explain_kill(out_of_memory_kills() - before))
        if code == -signal.SIGABRT:
            self.note(f"the command was aborted{self.explain_abort()}")
        return code if code >= 0 else 128 - code

    def poll(self) -> int | None:
        """Return the command's return code as Python reports it, or None if it still runs after WATCH_S seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(WATCH_S)

    def watch_over(self) -> None:
        """Rotate a large log, and kill the command if it sent no heartbeat for the time in its AXIS_ALIVE file.

        A command that is frozen or hangs in a device call cannot exit by itself. Time without a heartbeat is counted in
        checks every WATCH_S seconds, so a clock change or a suspended machine does not kill a healthy command.
        """
        if (self.here / "log").stat().st_size > self.launch.log_mib << 20:
            with contextlib.suppress(OSError):  # if the disk is full, the old text is lost
                shutil.copyfile(self.here / "log", self.here / "log.old")
                os.chmod(self.here / "log.old", 0o600)
            os.truncate(self.here / "log", 0)  # the command keeps its open file
        with contextlib.suppress(OSError, ValueError):
            moved = (self.here / "alive").stat().st_mtime_ns
            self.quiet_s = self.quiet_s + WATCH_S if moved == self.moved else 0
            self.moved = moved
            if self.quiet_s > float((read(self.here / "alive").split() or ["60"])[0]) + WATCH_S:
                self.note(f"no heartbeat from the command for {self.quiet_s} s; killing it")
                self.killed = True
                kill(self.child.pid, signal.SIGKILL)

    def next_restart(self, code: int) -> str:
        """Return a text about the next restart for the log and `status`, such as "1 of 3"; empty: no restart.

        On all hosts the same attempts end, so their counts agree. A command that reports no status counts as joined.
        """
        word, most = reported_status(self.here), self.launch.restarts
        if not most:
            return ""
        if word == "preempted":  # the cloud took a host away, so the command itself has not failed
            return f"{self.again} of {most} used; not counted: a host was preempted"
        if code in FINAL:
            return ""
        if word == "joining":  # training never began, so this uses up no restart
            self.absent += 1
            counts = f"not counted: not all processes joined, attempt {self.absent} of {ABSENT_MOST}"
            return f"{self.again} of {most} used; {counts}" if self.absent < ABSENT_MOST else ""
        self.again, self.absent = self.again + 1, 0
        return f"{self.again} of {most}" if self.again <= most else ""

    def advise_fewer_hosts(self) -> None:
        """Write to the log how to resume without a host that does not come back."""
        if "AXIS_PROCESSES" in self.launch.environment:
            self.note("a TPU slice runs only with all its hosts; if one does not come back, launch on another slice")
            return
        words = self.launch.command_line(to_type=True)
        self.note("if a host does not come back, resume without it: find it with the first command, remove it from")
        self.note("hosts.txt, and launch with the second, with a --mesh for the devices that are left:")
        self.note("  ./launcher.sh status --hosts hosts.txt")
        self.note(f"  ./launcher.sh --hosts hosts.txt --replace -- {words}")

    def explain_abort(self) -> str:
        """Return the cause of a SIGABRT if it came from JAX; otherwise an empty text.

        JAX aborts all processes if one sends no heartbeats, and logs its number. It also aborts a process that loses
        its connection to process 0."""
        lines = read(self.here / "log").splitlines()[-200:]
        begun = max((n for n, line in enumerate(lines) if line.startswith("supervisor: restarted")), default=0)
        silent = [lines[n + 1] for n in range(begun, len(lines) - 1) if "stopped sending heartbeats" in lines[n]]
        if silent:
            return f" by JAX, because process {silent[-1]} sent no heartbeats; see the log of its host"
        if self.launch.process and re.search("(?i)coordination service|heartbeat|leader", "\n".join(lines[begun:])):
            first = self.launch.first_host
            return f" by JAX: the connection to {first} was cut, or its process is gone; see the log of {first}"
        return ""


def reported_status(here: Path) -> str:
    """Return the status that the command reported last: joining, joined or preempted."""
    return "".join(read(here / "alive").split()[1:2])


def out_of_memory_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed since boot: in this process's control group, such as
    a container, if the kernel counts them there; otherwise on the whole machine."""
    files = [Path("/proc/vmstat")]
    for _, kinds, path in (line.split(":", 2) for line in read(Path("/proc/self/cgroup")).splitlines()):
        if kinds in ("", "memory"):  # version 2, version 1
            files.insert(0, Path(f"/sys/fs/cgroup/{kinds}{path}", "memory.oom_control" if kinds else "memory.events"))
    counts = (line.split()[1] for file in files for line in read(file).splitlines() if line.startswith("oom_kill "))
    return int(next(counts, 0))


def explain_kill(rise: int) -> str:
    """Explain a SIGKILL that the supervisor did not send. rise: number of OOM kills while the command ran."""
    if rise:
        return f"the kernel killed the command: this host is out of memory (the kernel's oom_kill count rose by {rise})"
    return "SIGKILL ended the command, but the kernel's OOM killer did not send it; did a user of this host send it?"
