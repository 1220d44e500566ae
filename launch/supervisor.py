"""Watch over a command on this host: run it to its end, start it again when it fails, and know how it is doing.

It works in the folder that `agent.py` describes, and is sent to a host together with it, as one text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

WATCH_S = 5  # between two looks at a command
ABSENT_MOST = 12  # attempts in a row that not all processes joined
LATEST = Path("launches/latest")
BEGINNING = "launch.json"
FINAL = (0, 2, 126, 127, 130, 143)  # done; asked wrongly, no such command: it would end so again; stopped by a signal


class Refused(Exception):
    """The host does not do what it was asked; the message says why, and what to do."""


def write(path: Path, text: str) -> bool:
    """Replace a small file at once, or not at all: False. A full disk takes it if FILE.partial was there before."""
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
    """Wait until what() is true, and return it; the last value after so many seconds."""
    end = time.monotonic() + seconds
    while not (value := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def last_line(path: Path) -> str:
    """The last line that is there to read, without colors, and without what a progress bar has overwritten."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4096))
        text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", file.read().decode(errors="replace").replace("\r", "\n"))
        lines = ["".join(filter(str.isprintable, line)) for line in text.splitlines()]
        return ([line for line in lines if any(map(str.isalnum, line))] or [""])[-1][:200]
    return ""


def take(path: str, seconds: float = 0, how: int = fcntl.LOCK_EX):
    """Lock a file; returns its descriptor, None if another process holds it for so long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

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
    descriptor = take("lock", how=fcntl.LOCK_SH)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@dataclasses.dataclass
class Launch:
    """What a launch was told: launches/NAME/launch.json."""

    name: str = "-"
    commit: str = "-"
    host: str = "-"  # this host, and that of process 0, as launcher.sh names them
    first_host: str = "-"
    process: int = 0
    by: str = "-"  # who started it
    restarts: int = 0
    wait_s: int = 90  # before a restart
    log_mib: int = 256
    on_end: str = ""
    starter: int = 0  # the process that tells it to begin
    command: list = dataclasses.field(default_factory=list)
    environment: dict = dataclasses.field(default_factory=dict)

    @property
    def here(self) -> Path:
        return Path("launches", self.name)

    def words(self) -> str:
        """The command, without values that look like keys."""
        text = " ".join(" ".join(self.command).split())
        return re.sub(r"(^| )(\w*(?:KEY|TOKEN|SECRET|PASSWORD)\w*)=\S*", r"\1\2=***", text)[:200]


def latest() -> Launch:
    """The last launch; one of no name if there is none."""
    try:
        return Launch(**json.loads((LATEST / BEGINNING).read_text()))
    except (OSError, ValueError, TypeError):
        return Launch()


def about_latest() -> str:
    launch = latest()
    begun = time.localtime(os.path.getmtime(LATEST / BEGINNING)) if launch.command else None
    return f"{launch.name} since {time.strftime('%F %T', begun)} by {launch.by}: {launch.words()[:100]}"


def environment_of(commit: str, more: dict) -> dict:
    """The environment of a command that runs in a commit, whose packages come first in PATH."""
    folder = f"{os.getcwd()}/commits/{commit}"
    # A bash that finds SSH_CLIENT reads .bashrc, whose words would be in the log.
    inherited = {name: value for name, value in os.environ.items() if name not in ("SSH_CLIENT", "SSH2_CLIENT")}
    return {**inherited, **more, "PATH": f"{folder}/.venv/bin:{os.environ.get('PATH', os.defpath)}"}


class Supervisor:
    """Runs in the tmux session, which shows the log; nothing that is typed or closed there reaches the command."""

    def __init__(self, name: str):
        self.launch = Launch(**json.loads(Path("launches", name, BEGINNING).read_text()))
        self.here, self.again, self.absent = self.launch.here, 0, 0
        self.lock = take("lock", 5)
        self.killed, self.child, self.moved, self.quiet_s = False, None, None, 0
        if self.lock is None:
            raise Refused("a run is alive here")
        os.set_inheritable(self.lock, True)  # by the command and all it starts
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit

    def note(self, text: str) -> None:
        """Write a line to the log, if the disk has room for it."""
        with contextlib.suppress(OSError), open(self.here / "log", "a") as log:
            log.write(f"supervisor: {text}\n")

    def stopped(self) -> bool:
        return (self.here / "stop").exists()

    def run(self) -> None:
        """Wait until all hosts are ready, run the command until it is done, and write its exit status."""
        os.close(os.open(self.here / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
        show = ["tail", "-n", "+1", "-F", f"--pid={os.getpid()}", self.here / "log"]
        subprocess.Popen(show, stderr=subprocess.DEVNULL)
        while not (self.stopped() or (self.here / "go").exists()) and os.path.exists(f"/proc/{self.launch.starter}"):
            time.sleep(0.02)
        code = self.attempts() if (self.here / "go").exists() and not self.stopped() else "not started"
        write(self.here / "exit", str(code))
        if self.launch.on_end and self.launch.process == 0 and code != "not started":
            where = {"cwd": f"commits/{self.launch.commit}", "env": {**self.environment(), "AXIS_EXIT": str(code)}}
            with open(self.here / "log", "ab") as log:
                subprocess.Popen(["bash", "-c", self.launch.on_end], **where, **self.apart(log))

    def attempts(self) -> int:
        """Run the command until it ends in a way that another attempt would not mend; returns its exit status."""
        while True:
            code = self.run_once()
            if self.stopped() or not (why := self.next_restart(code)):
                return code
            kill(self.child.pid, signal.SIGKILL)  # what it left behind
            with contextlib.suppress(FileNotFoundError):
                (self.here / "pid").replace(self.here / "pid.partial")
            write(self.here / "restarts", why)  # in this order: `running, restarted` is said of the next attempt alone
            self.note(f"the command exited with status {code}; restarting in {self.launch.wait_s} s, {why}")
            if wait_for(self.launch.wait_s, self.stopped):
                return code
            self.note(f"restarted, {why}")

    def apart(self, log) -> dict:
        """How a command is started: in a session of its own, so that `stop` can signal all its processes."""
        return {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}

    def environment(self) -> dict:
        return {**environment_of(self.launch.commit, self.launch.environment), "PYTHONUNBUFFERED": "1"}

    def run_once(self) -> int:
        """Run the command to its end, and return its exit status as a shell has it."""
        for name in ("progress", "alive"):
            with contextlib.suppress(FileNotFoundError):
                (self.here / name).unlink()
        self.killed, self.moved, self.quiet_s, before = False, None, 0, out_of_memory_kills()
        where = {"cwd": f"commits/{self.launch.commit}", "env": self.environment(), "pass_fds": [self.lock]}
        with open(self.here / "log", "ab") as log:
            try:
                self.child = subprocess.Popen(self.launch.command, **where, **self.apart(log))
            except OSError as error:
                absent = isinstance(error, FileNotFoundError)
                self.note(f"{self.launch.command[0]}: {'not found' if absent else error.strerror}")
                return 127 if absent else 126
        write(self.here / "pid", str(self.child.pid))
        while (code := self.poll()) is None:
            self.watch_over()
        if code == -signal.SIGKILL and not self.killed and not self.stopped():
            self.note(why_killed(out_of_memory_kills() - before))
        if code == -signal.SIGABRT:
            self.note(f"the command was aborted{self.why_aborted()}")
        return code if code >= 0 else 128 - code

    def poll(self) -> int | None:
        """The command's exit status, as Python has it; None if it is still there after WATCH_S."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.child.wait(WATCH_S)

    def watch_over(self) -> None:
        """Keep the log small, and kill a command that sent no heartbeat for as long as it says.

        A command that hangs in a device, or is frozen, cannot exit by itself. What counts is how often this has looked,
        so a clock that jumps, or a machine that slept, does no harm.
        """
        if (self.here / "log").stat().st_size > self.launch.log_mib << 20:
            with contextlib.suppress(OSError):  # where the disk is full, the old text is lost
                shutil.copyfile(self.here / "log", self.here / "log.old")
                os.chmod(self.here / "log.old", 0o600)
            os.truncate(self.here / "log", 0)  # the command goes on writing to the same file
        with contextlib.suppress(OSError, ValueError):
            moved = (self.here / "alive").stat().st_mtime_ns
            self.quiet_s = self.quiet_s + WATCH_S if moved == self.moved else 0
            self.moved = moved
            if self.quiet_s > float((read(self.here / "alive").split() or ["60"])[0]) + WATCH_S:
                self.note(f"no heartbeat from the command for {self.quiet_s} s; killing it")
                self.killed = True
                kill(self.child.pid, signal.SIGKILL)

    def next_restart(self, code: int) -> str:
        """Which restart comes next, in words; empty if none does.

        Each host sees the end of the same attempts, so all count the same. A command that does not report is taken to
        have joined.
        """
        word, most = said_last(self.here), self.launch.restarts
        if not most:
            return ""
        if word == "preempted":  # the system took a host away: no attempt of the run's own has failed
            return f"{self.again} of {most} used; not counted: a host was preempted"
        if code in FINAL:
            return ""
        if word == "joining":  # nothing was attempted, so no restart is spent
            self.absent += 1
            counts = f"not counted: not all processes joined, attempt {self.absent} of {ABSENT_MOST}"
            return f"{self.again} of {most} used; {counts}" if self.absent < ABSENT_MOST else ""
        self.again, self.absent = self.again + 1, 0
        return f"{self.again} of {most}" if self.again <= most else ""

    def why_aborted(self) -> str:
        """JAX aborts all processes when one sends no heartbeats, which it names, and every one whose connection to
        process 0 is gone; other aborts have other reasons."""
        lines = read(self.here / "log").splitlines()[-200:]
        begun = max((n for n, line in enumerate(lines) if line.startswith("supervisor: restarted")), default=0)
        silent = [lines[n + 1] for n in range(begun, len(lines) - 1) if "stopped sending heartbeats" in lines[n]]
        if silent:
            return f" by JAX, because process {silent[-1]} sent no heartbeats; see the log of its host"
        if self.launch.process and re.search("(?i)coordination service|heartbeat|leader", "\n".join(lines[begun:])):
            first = self.launch.first_host
            return f" by JAX: the connection to {first} was cut, or its process is gone; see the log of {first}"
        return ""


def said_last(here: Path) -> str:
    """The word that the command reported last: joining, joined, preempted."""
    return "".join(read(here / "alive").split()[1:2])


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since this host booted, in containers too."""
    return sum(int(line.split()[1]) for line in read(Path("/proc/vmstat")).splitlines() if line.startswith("oom_kill "))


def why_killed(rise: int) -> str:
    """Why a command got a SIGKILL that we did not send; `rise`: of the count above, meanwhile."""
    if rise:
        return f"the kernel killed the command: this host is out of memory (oom_kill in /proc/vmstat rose by {rise})"
    return "SIGKILL ended the command; the kernel did not send it for want of memory. Was it somebody on this host?"
