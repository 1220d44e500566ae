"""Four folders of this machine that act as hosts, for chapter 13: ssh to a host runs the command in its folder."""

import atexit
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time

SSH = """#!/bin/bash
# ssh [OPTION..] -- HOST COMMAND, with a folder of this machine as HOST
while [ "$1" != -- ]; do shift; done
cd "${HOSTS:?}/$2" && export HOME=$PWD TMUX_TMPDIR=$PWD && unset TMUX
if [ -e .bashrc ]; then . ./.bashrc; fi  # as bash does when sshd starts it
exec bash -c "$3"
"""
NO_TMUX = """#!/bin/bash
# tmux new-session .. -c FOLDER COMMAND..: start the command without a session
while [ "$1" != -c ]; do shift || exit 1; done
cd "$2" && shift 2 && exec < /dev/null > /dev/null 2>&1
setsid "$@" &
"""


def lacking() -> list[str]:
    """Return what this machine lacks to simulate hosts."""
    system = [] if os.path.exists("/proc/self/fd") else ["Linux"]
    return system + [tool for tool in ("bash", "git", "setsid", "tar") if not shutil.which(tool)]


class Hosts:
    """Folders that act as hosts, and a repository with launcher.sh and train.py. Logs are read directly, not by ssh."""

    def __init__(self, names=("host0", "host1", "host2", "host3")):
        self.at, self.names = pathlib.Path(tempfile.mkdtemp(prefix="hosts-")), names
        for name in (*names, "bin", "code"):
            (self.at / name).mkdir()
        (self.at / "hosts.txt").write_text("\n".join(names))
        self.tmux = bool(shutil.which("tmux"))
        for name, text in ({"ssh": SSH} if self.tmux else {"ssh": SSH, "tmux": NO_TMUX}).items():
            (self.at / "bin" / name).write_text(text)
            (self.at / "bin" / name).chmod(0o755)
        for script in ("launcher.sh", "debug_tpu.sh"):
            shutil.copy(script, self.at / "code")
        shutil.copytree("launch", self.at / "code/launch")
        self.git("init", "--quiet")
        atexit.register(self.close)

    def close(self) -> None:
        self.run("./launcher.sh", "stop", "--now", "--hosts", "../hosts.txt")
        if self.tmux:
            self.run("tmux", "-L", "axis-debug", "kill-server")
        shutil.rmtree(self.at, ignore_errors=True)

    def git(self, *words: str) -> None:
        settings = ("user.name=page", "user.email=page", "commit.gpgsign=no")
        done = self.run("git", *(word for setting in settings for word in ("-c", setting)), *words)
        assert done.returncode == 0, done.stderr

    def commit(self, program: str, message: str) -> None:
        (self.at / "code/train.py").write_text(program)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess:
        """Run a command in the folder of launcher.sh, for these hosts."""
        keep = lambda name: not re.search("^JAX|COLOR|^TMUX|^GIT_", name)
        env = {name: value for name, value in os.environ.items() if keep(name)}
        env |= {"PATH": f"{self.at}/bin:{env['PATH']}", "HOSTS": str(self.at)}
        env |= {"TMUX_TMPDIR": str(self.at), "VENV": sys.prefix, **settings}
        how = {"text": True, "stdin": subprocess.DEVNULL, "capture_output": True}
        return subprocess.run(command, env=env, cwd=self.at / "code", timeout=120, check=False, **how)

    def launcher(self, words: str, *command: str, **settings: str) -> subprocess.CompletedProcess:
        """Run ./launcher.sh; print the command and its output, without its table."""
        words = [*shlex.split(words), *command]
        given = [f"{name}={value}" for name, value in settings.items()]
        print("$", shlex.join([*given, "./launcher.sh", *words]))
        if "--" in words and "exec" not in words:
            with socket.create_server(("127.0.0.1", 0)) as free:
                settings["COORDINATOR_PORT"] = str(free.getsockname()[1])
        done = self.run("./launcher.sh", "--hosts", "../hosts.txt", *words, **settings)
        output = done.stdout.partition("host   ")[0] + done.stderr
        print(output.replace(f"{self.at}/", "/"), end="")
        return done

    def status(self, **settings: str) -> list[dict]:
        """Print some columns of `./launcher.sh status` for each host."""
        asked = ("./launcher.sh", "--hosts", "../hosts.txt", "status", "--json")
        rows = json.loads(self.run(*asked, **settings).stdout)
        given = "".join(f"{name}={value} " for name, value in settings.items())
        print(f"$ {given}./launcher.sh status")
        print(f"{'host  state':34} step loss   s ago last line of the log")
        for row in rows:
            cells = [row[k] for k in ("step", "loss", "step_s_ago", "last_line")]
            step, loss, ago, line = ("-" if cell is None else cell for cell in cells)
            print(f"{row['host']} {row['state']:28}{step:>4} {loss:<8}{ago:>4} {line:.64}")
        return rows

    def latest(self, n: int, file: str, folder: str = "axis-by-axis") -> pathlib.Path:
        """Return a file of the last launch on host n."""
        return self.at / self.names[n] / folder / "launches/latest" / file

    def marks(self, n: int, word: str) -> list[list[float]]:
        """Return the numbers after `word`, on all lines of host n that begin with it."""
        found = re.findall(rf"(?m)^{word} (.*)\n", self.latest(n, "log").read_text())
        return [[float(x) for x in line.split()] for line in found]

    def last(self, n: int) -> list[float]:
        """Return the last step that host n reached, and when."""
        return (self.marks(n, "step") or [[-1, time.time()]])[-1]

    def wait(self, what, of=range(4), limit_s: float = 90) -> None:
        """Wait until what(n) is true for these hosts."""
        until = time.time() + limit_s
        while not all(what(n) for n in of):
            logs = [self.latest(n, "log").read_text()[-600:] for n in range(4)]
            assert time.time() < until, f"not in {limit_s} s: " + "\n".join(logs)
            time.sleep(0.05)

    def wait_for_end(self, of=range(4), folder: str = "axis-by-axis") -> None:
        self.wait(lambda n: self.latest(n, "exit", folder).exists(), of)

    def last_two(self, n: int, in_pane: bool = True) -> list[str]:
        """Return the last two lines in the pane of host n; without tmux, of its log."""
        text = self.latest(n, "log").read_text()
        if in_pane and self.tmux:
            show = ("capture-pane", "-p", "-t", f"axis:hosts-0-3.{n}")
            text = self.run("tmux", "-L", "axis-debug", *show).stdout
        return [line for line in text.splitlines() if line.strip()][-2:]

    def panes(self) -> list[str]:
        """Return the command, and the panes of four hosts, two by two."""
        if self.tmux:
            self.run("./debug_tpu.sh", "--hosts", "../hosts.txt")
        self.wait(lambda n: self.last_two(n) == self.last_two(n, in_pane=False))
        boxes = [[f"── {name} ".ljust(28, "─")] for name in self.names]
        for n, box in enumerate(boxes):
            box += [f" {line:27}" for line in self.last_two(n)]
        if self.tmux:
            self.run("tmux", "-L", "axis-debug", "kill-server")
        typed = "$ ./debug_tpu.sh" if self.tmux else "(logs, because tmux is missing)"
        rows = [*zip(*boxes[:2], strict=True), *zip(*boxes[2:], strict=True)]
        return [typed, *(" ".join(row) for row in rows)]
