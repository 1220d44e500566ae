"""Hosts on this machine: for each a real sshd on its own loopback address, with its own home and its own tmux server.

folder/  key key.pub  host_key    throwaway keys; sshd knows no other
         ssh_config               what SSH_CONFIG names: `ssh -F ssh_config host00` is logged in
         hosts.txt                host00, host01, ..
         host00/  home/  tmux/  sshd_config  sshd.log
"""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import quick

ROOT = Path(__file__).resolve().parents[2]
FAST = " ".join(f"--{name}={value}" for name, value in quick.FLAGS.items())  # XLA_FLAGS of every host
PATIENCE = 4  # a slow or busy machine takes several times as long; a wait that succeeds does not get longer
MARK = "AXIS_REHEARSAL"  # in the environment of every process that a host starts; its value is the folder
SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
# A command that says who it is, then counts; on SIGTERM it "saves", and ends well.
COUNT = """trap 'echo saved; exit 0' TERM
echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS, commit $AXIS_COMMIT"
for i in $(seq 1000); do echo "step $i"; sleep 0.1; done"""


def missing() -> str:
    """What this machine lacks for a rehearsal, and how to get it; empty: nothing."""
    needs = {"openssh-server": SSHD, "openssh-client": shutil.which("ssh"), "tmux": shutil.which("tmux")}
    packages = " ".join(name for name, found in needs.items() if not found)
    if packages:
        return f"the rehearsal of the launch scripts needs {packages}: apt-get install {packages}"
    if not os.path.isdir("/proc/self/fd"):
        return "the rehearsal of the launch scripts needs Linux: each host is another loopback address"
    return ""


class Refused(Exception):
    """A host did not do what it was asked."""


@dataclass
class Host:
    name: str
    address: str
    folder: Path
    sshd: subprocess.Popen | None = None

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def axis(self) -> Path:
        """Where the agent keeps commits, packages and launches."""
        return self.home / "axis-by-axis"


@dataclass
class Fleet:
    """The hosts of a rehearsal, and the checkout from which the scripts are run."""

    folder: Path
    checkout: Path
    coordinator_port: int  # not the default one: hosts share this machine's ports with whatever else runs on it
    hosts: list[Host] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int((self.folder / "ssh_config").read_text().split("Port ")[1].split()[0])

    @property
    def environment(self) -> dict[str, str]:
        ours = {"SSH_CONFIG": f"{self.folder}/ssh_config", "COORDINATOR_PORT": str(self.coordinator_port)}
        return os.environ | ours | {"VENV": os.environ.get("VENV", f"{ROOT}/.venv")}

    def run(self, script: str, *words: str, input=None, timeout=120, **environment) -> subprocess.CompletedProcess:
        """Run a script of the checkout, for these hosts unless `words` or `input` say which, as a user would."""
        which = ["-"] if input is not None else ["--hosts", f"{self.folder}/hosts.txt"]
        command = [f"{self.checkout}/{script}", *which, *words]
        stdin = subprocess.DEVNULL if input is None else None
        return subprocess.run(command, env=self.environment | environment, capture_output=True, text=True, input=input,
                              stdin=stdin, timeout=PATIENCE * timeout)  # fmt: skip

    def ssh(self, host: Host, command: str, input=b"") -> str:
        """Raises: Refused with what ssh, or the command, said."""
        ssh = ["ssh", "-F", f"{self.folder}/ssh_config", "-o", "StrictHostKeyChecking=accept-new"]
        done = subprocess.run([*ssh, host.name, command], capture_output=True, input=input, timeout=60 * PATIENCE)
        if done.returncode:
            raise Refused(done.stderr.decode())
        return done.stdout.decode()

    def processes(self) -> list[int]:
        """Every process that these hosts have started and that is still there."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def end_processes(self) -> None:
        """As a host that restarts does: at once."""

        def none_left():  # what begins while we look is not seen, or has no environment yet: look until it is quiet
            found = self.processes()
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_until(none_left)

    def memory_bytes(self) -> int:
        """What the hosts' processes and servers hold, pages they share counted once."""
        total = 0
        for pid in [*self.processes(), *(host.sshd.pid for host in self.hosts)]:
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return total


def wait_until(what, seconds=20.0, every=0.05):
    """Wait until what() is true, and return it. Raises: AssertionError after PATIENCE times `seconds`."""
    end = time.monotonic() + PATIENCE * seconds
    while not (value := what()):
        assert time.monotonic() < end, f"not so after {PATIENCE * seconds} s"
        time.sleep(every)
    return value


def launch(fleet: Fleet, *words: str, options=(), **environment) -> subprocess.CompletedProcess:
    return fleet.run("launcher.sh", *options, "--", *words, **environment)


def rows(text: str) -> dict[str, dict[str, str]]:
    """The table in an output: host -> heading -> field."""
    heading, *table = [re.split("  +", line) for line in text[text.index("host  ") :].splitlines()]
    return {row[0]: dict(zip(heading[1:], row[1:], strict=False)) for row in table if len(row) > 2}


def column(heading: str, text: str) -> list[str]:
    return [row[heading] for row in rows(text).values()]


def log(host: Host) -> str:
    return (host.axis / "launches/latest/log").read_text()


def launched(host: Host) -> dict:
    """What the last launch on a host was told."""
    return json.loads((host.axis / "launches/latest/launch.json").read_text())


def launches(fleet: Fleet) -> list[str]:
    """Every launch there is on any host."""
    paths = fleet.folder.glob("host*/home/axis-by-axis/launches/2*")
    return sorted(str(path.relative_to(fleet.folder)) for path in paths)


def make_checkout(folder: Path, whole: bool) -> Path:
    """A git repository of the launch scripts and what they name, or of the whole project; as here, committed or not."""
    checkout = folder / "checkout"
    if whole:
        names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    else:
        names = [str(path.relative_to(ROOT)) for pattern in ("*.sh", "launch/*.py") for path in ROOT.glob(pattern)]
        names += ["Makefile", "requirements.txt", "requirements/tpu.txt", ".gitignore"]
    for name in names:
        if (ROOT / name).is_file():  # not one that is deleted but not committed so, nor a link to a .venv
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    git(checkout, "init", "--quiet", "--initial-branch", "main")
    commit(checkout, "The project" if whole else "The launch scripts")
    return checkout


def git(checkout: Path, *words: str, text=True):
    identity = [f"GIT_{who}_{what}=rehearsal" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
    environment = os.environ | dict(one.split("=") for one in identity) | {"GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", checkout, *words]
    said = subprocess.run(command, check=True, capture_output=True, text=text, env=environment).stdout
    return said.strip() if text else said


def commit(checkout: Path, message: str) -> str:
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(checkout, "rev-parse", "HEAD")


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rehearsal", "-f", path], check=True)


SSH_CONFIG = """\
Port {port}
User {user}
IdentityFile "{folder}/key"
IdentitiesOnly yes
UserKnownHostsFile "{folder}/known_hosts"
LogLevel ERROR
"""
SSHD_CONFIG = """\
ListenAddress {host.address}:{port}
HostKey "{folder}/host_key"
AuthorizedKeysFile "{host.folder}/authorized_keys"
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
PrintMotd no
PrintLastLog no
MaxStartups 100
SetEnv {environment}
"""


def start(fleet: Fleet, host: Host, port: int) -> None:
    """Start a host's sshd, and wait until it answers."""
    host.home.mkdir(parents=True)
    (host.folder / "tmux").mkdir()
    shutil.copy(fleet.folder / "key.pub", host.folder / "authorized_keys")
    environment = {
        "HOME": host.home,
        "TMUX_TMPDIR": host.folder / "tmux",
        "HOST_NAME": host.name,
        MARK: fleet.folder,
        "LIBTPU_LOCKFILE": host.folder / "libtpu_lockfile",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FAST,
    }
    settings = " ".join(f'"{name}={value}"' for name, value in environment.items())
    config = SSHD_CONFIG.format(host=host, port=port, folder=fleet.folder, environment=settings)
    (host.folder / "sshd_config").write_text(config)
    log = host.folder / "sshd.log"
    host.sshd = subprocess.Popen([SSHD, "-D", "-f", host.folder / "sshd_config", "-E", log], stdin=subprocess.DEVNULL)

    def answers():
        assert host.sshd.poll() is None, f"sshd of {host.name} ended: {log.read_text()}"
        with suppress(OSError), socket.create_connection((host.address, port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"

    wait_until(answers)


def stop(fleet: Fleet) -> None:
    """End the hosts' sshd, that nothing more begins, and then every process they have started, by its id."""
    servers = [host.sshd for host in fleet.hosts if host.sshd]
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait(timeout=10)
    fleet.end_processes()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


@contextmanager
def rehearse(count: int, whole=False) -> Iterator[Fleet]:
    """`count` hosts, and a checkout of the launch scripts, or of the whole project: then its programs can be launched.

    The hosts, and all they have started, are gone at the end.
    """
    assert not missing(), missing()
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd of root wants it for its unprivileged half
    with tempfile.TemporaryDirectory(prefix="axis-") as name:  # short: a tmux socket's path has 107 bytes
        folder = Path(name)
        make_key(folder / "key")
        make_key(folder / "host_key")
        port = free_port()
        fleet = Fleet(folder, make_checkout(folder, whole), free_port())
        lines = []
        try:
            for i in range(count):
                host = Host(f"host{i:02}", f"127.0.0.{i + 2}", folder / f"host{i:02}")
                fleet.hosts.append(host)
                lines.append(f"Host {host.name}\n  HostName {host.address}\n")
                start(fleet, host, port)
            options = SSH_CONFIG.format(port=port, user=getpass.getuser(), folder=folder)
            (folder / "ssh_config").write_text("".join(lines) + "Host *\n" + options)
            (folder / "hosts.txt").write_text("".join(f"{host.name}\n" for host in fleet.hosts))
            yield fleet
        finally:
            stop(fleet)
