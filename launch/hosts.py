"""Read the list of hosts and send them requests: one ssh connection per host, many in parallel.

`python launch/hosts.py` prints the length of the agent's source and then the source. The commands of a dry run use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import getpass
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Any login shell can run this command. It starts a Python that reads the agent's source from standard input.
BOOT = """\
for p in python3.11 python3.12 python3; do
if "$p" -I -c "import sys; sys.exit(sys.version_info < (3, 9))" < /dev/null 2> /dev/null; then
exec "$p" -I -c "import sys; b = sys.stdin.buffer; n = b.readline(); \
n.strip().isdigit() or sys.exit(68); source = b.read(int(n)).decode(); exec(source)" "$@"; fi
done; echo "Python 3.9 or later is missing: sudo apt-get install python3" >&2; exit 69""".replace("\n", " ")
KEYS = "import json, os, sys; print(json.dumps({name: os.environ[name] for name in sys.argv[1:]}))"


class UserError(Exception):
    """A usage error: nothing was changed, and the exit status is 2."""


class Interrupted(Exception):
    """A signal interrupted this process; the argument is the exit status."""


def whole_number(name: str, text: str) -> int:
    if not text.isdecimal() or (len(text) > 1 and text[0] == "0"):
        raise UserError(f"{name} must be a whole number, not '{text}'")
    return int(text)


def agent_source() -> str:
    """Return the source of supervisor.py, machine.py and agent.py as one program."""
    first, *others = (ROOT.joinpath("launch", f"{name}.py").read_text() for name in ("supervisor", "machine", "agent"))
    lines = [line for text in others for line in text.splitlines(True)]
    return first + "".join(line for line in lines if not line.startswith(("from __future__", "from launch.")))


# Which hosts ----------------------------------------------------------------------------------------------------------


def read_hosts(lines) -> list[str]:
    """Parse one host per line, as ssh knows it. # starts a comment. A byte order mark and CRLF are allowed."""
    hosts = []
    for line in lines:
        words = line.lstrip("\ufeff").partition("#")[0].split()
        if not words:
            continue
        host = words[0]
        if len(words) > 1:
            raise UserError(f"'{line.strip()}': write one host per line, and put ssh options in ~/.ssh/config")
        if host.startswith("-"):
            raise UserError(f"'{host}' is not a host; write one host per line")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]  # ssh accepts an IPv6 address only without brackets
        if host.count(":") == 1 and "://" not in host:
            raise UserError(f"'{host}': write the port as ssh://{host}, or set it in ~/.ssh/config")
        if host in hosts:
            raise UserError(f"{host} is listed twice; remove one of the lines")
        hosts.append(host)
    return hosts


def hosts_of_tpu(name: str, zone: str) -> list[str]:
    """Ask gcloud for the addresses of a slice's hosts, in worker order; external addresses if the hosts have them."""
    endpoint = "networkEndpoints.accessConfig.externalIp,networkEndpoints.ipAddress"
    command = ["gcloud", "compute", "tpus", "tpu-vm", "describe", name, "--zone", zone]
    command += ["--flatten=networkEndpoints[]", f"--format=csv[no-heading]({endpoint})"]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    except OSError as error:
        raise UserError(f"--tpu cannot run gcloud: {error.strerror}; install gcloud, or use --hosts FILE") from None
    return read_hosts(next(filter(None, line.split(",")), "") for line in output.splitlines())


def select_hosts(hosts: list[str], names: str, where: str = "--only") -> list[str]:
    """Return the hosts in the comma-separated `names`, in the order of `hosts`. where: the argument."""
    wanted = [name for name in names.split(",") if name]
    for name in wanted:
        if name not in hosts:
            raise UserError(f"{where} {names}: {name} is not in the list of hosts: {' '.join(hosts)}")
    if not wanted:
        raise UserError(f"{where} '{names}' lists no host; write {where} HOST,HOST")
    return [host for host in hosts if host in wanted]


# Command line ---------------------------------------------------------------------------------------------------------

VALUES = "--hosts --tpu --zone --only --restarts --on-end --env -n".split()  # flags with a value
WHICH = {"--hosts", "--tpu", "--zone", "--only", "-"}  # flags that every command accepts


def parse(argv: list[str], takes: dict, usage: str) -> tuple[str, list[str], dict, list[str], list[str]]:
    """Split a command line into the verb, its arguments, its flags, the command after --, and the hosts.

    takes  verb -> (its flags, its maximum number of arguments, or -1 for a command after --); "": no verb
    """
    argv, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    words, flags, rest = [], {}, iter(argv)
    for word in rest:
        if word in VALUES:
            if (value := next(rest, None)) is None:
                raise UserError(f"{word} needs a value; see {usage} --help")
            flags[word] = [*flags.get(word, []), value] if word == "--env" else value
        elif word.startswith("-"):
            flags[word] = True
        else:
            words.append(word)
    verb, *words = words or [""]
    own, most = takes.get(verb, ("", None))
    if verb and command and most != -1:
        raise UserError(f"'{verb}' before -- is not an option; see {usage} --help")
    if not verb and not command and most is not None:
        raise UserError(f"no command given: use -- COMMAND ...{', '.join(takes)}; see {usage} --help")
    if most is None:
        close = difflib.get_close_matches(verb, takes, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"'{verb}' is not a command of {usage}{guess}; see {usage} --help")
    if extra := [*(flag for flag in flags if flag not in {*own.split()} | WHICH), *words[max(most, 0) :]]:
        raise UserError(f"{verb or '-- COMMAND'} does not accept '{extra[0]}'; see {usage} --help")
    return verb, words, flags, command, hosts_from_flags(flags)


def hosts_from_flags(flags: dict) -> list[str]:
    name, zone, file = flags.get("--tpu"), flags.get("--zone"), flags.get("--hosts")
    if name:
        if not zone:
            raise UserError(f"--tpu {name} needs --zone, e.g. --zone us-central2-b")
        slices = [one for one in name.split(",") if one]
        hosts, where = [host for one in slices for host in hosts_of_tpu(one, zone)], f"gcloud: {name} in {zone}"
    elif "-" in flags:
        hosts, where = read_hosts(sys.stdin), "standard input"
    elif file:
        if os.path.isdir(file):
            raise UserError(f"--hosts {file} is a directory; use a file with one host per line")
        try:
            hosts, where = read_hosts(Path(file).read_text(encoding="utf-8").splitlines()), file
        except OSError:
            raise UserError(f"cannot read {file}; --hosts needs a file with one host per line") from None
    else:
        raise UserError("no hosts: use --hosts FILE (one per line), --tpu NAME --zone ZONE, or - (standard input)")
    if not hosts:
        raise UserError(f"no hosts in {where}")
    return select_hosts(hosts, flags["--only"]) if "--only" in flags else hosts


# Requests -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    """A host's answer to a request. If the request failed, `values` is None and `error` explains why."""

    host: str
    values: dict | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        return self.values is None

    def get(self, name: str):
        return None if self.failed else self.values.get(name)


def clock_skew_s(clock: float, sent_at: float, answered_at: float) -> int:
    """Return how many seconds a host's clock is ahead of the local clock, by which the other two times are. It is
    accurate to the duration of the request."""
    return round(clock - min(max(clock, sent_at), answered_at))


class Fleet:
    """The hosts, and the settings from the environment."""

    def __init__(self, hosts: list[str]):
        self.hosts, env = hosts, os.environ.get
        number = lambda name, default: whole_number(name, env(name) or str(default))
        self.limit_s, self.setup_s = number("TIMEOUT", 60), number("SETUP_TIMEOUT", 900)
        self.grace_s = number("GRACE", 120)
        self.port, self.wait_s = number("COORDINATOR_PORT", 8476), number("RESTART_WAIT", 90)
        self.log_mib, self.keep = number("LOG_MIB", 256), number("KEEP", 5)
        self.folder, self.venv = env("HOST_FOLDER") or "axis-by-axis", env("VENV", "")
        self.user = f"{env('USER') or getpass.getuser()}@{os.uname().nodename.split('.')[0]}"
        self.dry = bool(env("DRY_RUN"))
        self.slots = threading.Semaphore(1 if self.dry else max(1, number("PARALLEL", 16)))
        self.ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={number('CONNECT_TIMEOUT', 10)}"]
        self.ssh += ["-o", "StrictHostKeyChecking=accept-new", "-o", "ServerAliveInterval=15"]  # detects a cut in 45 s
        self.ssh += ["-F", env("SSH_CONFIG")] if env("SSH_CONFIG") else []
        self.children, self.ended, self.printing = set(), False, threading.Lock()

    def say(self, text: str, file=None) -> None:
        with self.printing:
            print(text, file=file or sys.stdout, flush=True)

    def ask_all(self, what, label: str | None = "", hosts=None, quiet=False, **how) -> list[Answer]:
        """Send a request to all hosts, many in parallel, and print a line for each host when it is done.

        what   a request, or a function that gets the host's number and returns its Answer
        label  the text of that line; "": the answer's text; None: no line. A failure is always printed, unless `quiet`
        """
        answers: dict[int, Answer] = {}

        def one(number: int) -> None:
            answer = answers[number] = what(number) if callable(what) else self.ask(number, what, **how)
            if answer.failed and not quiet and not self.ended:
                self.say(f"{answer.host}  FAILED: {answer.error}", sys.stderr)
            elif not answer.failed and label is not None and not self.dry and (text := label or answer.get("text")):
                self.say(f"{answer.host}  {text}")

        numbers = range(len(self.hosts)) if hosts is None else hosts
        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except Interrupted:
            self.ended = True
            for child in [*self.children]:
                child.terminate()
            raise
        return [answers[number] for number in numbers]

    def ask(
        self, number: int, request: dict, limit_s=None, payload=None, keys=(), on_line=None, on_ready=None
    ) -> Answer:
        """Send a request to one host and return its answer.

        limit_s   time limit in seconds; None: TIMEOUT, 0: no limit
        payload   a command whose output is sent after the request
        keys      names of local environment variables to add to the request's environment
        on_line   called with each line or chunk of the output
        on_ready  called when the host is ready; returns whether to start. PARALLEL does not count hosts that wait here
        """
        host, mark = self.hosts[number], "dry-run" if self.dry else secrets.token_hex(8)
        command = [*self.ssh, "--", host, f"sh -c '{BOOT}' axis-by-axis {request['do']}"]
        text = json.dumps({"mark": mark, "folder": self.folder, "keys": bool(keys), **request})
        if self.dry:
            sent = [f"python3 {shlex.quote(str(ROOT / 'launch/hosts.py'))}", f"printf '%s\\n' {shlex.quote(text)}"]
            sent += [f"python3 -c {shlex.quote(KEYS)} {shlex.join(keys)}"] if keys else []
            sent += [shlex.join(payload)] if payload else []
            sent += ["echo go"] if on_ready else []
            self.say(f"{{ {' && '.join(sent)}; }} | {shlex.join(command)}")
            return Answer(host, {})
        text += "\n" + (json.dumps({name: os.environ[name] for name in keys}) + "\n") * bool(keys)
        with self.slots:
            return PendingRequest(self, host, command, mark, limit_s).answer(text.encode(), payload, on_line, on_ready)


class PendingRequest:
    """One request in flight."""

    def __init__(self, fleet: Fleet, host: str, command: list[str], mark: str, limit_s: int | None):
        self.fleet, self.host, self.mark, self.timed_out, self.other_output = fleet, host, mark, False, ""
        self.limit_s = fleet.limit_s if limit_s is None else limit_s
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with this
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.child = subprocess.Popen(command, **pipes, start_new_session=True)  # Ctrl-C signals only this process
        fleet.children.add(self.child)

    def answer(self, text: bytes, payload, on_line, on_ready) -> Answer:
        """Send the request, read the complete answer and return it."""
        answer, sent_at = Answer(self.host), time.time()
        timer = threading.Timer(self.limit_s or 10**8, self.give_up)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(OSError):  # the host disconnected; its answer explains why
            self.send(text, payload, stays_open=on_line or on_ready)
        waits = False  # whether the host waits for its run, without a slot of PARALLEL
        for line in self.child.stdout:
            kind, value = self.parse(line)
            if kind == "ready":
                timer.cancel()
                self.fleet.slots.release()
                with contextlib.suppress(OSError), self.child.stdin as stdin:
                    stdin.write(b"go\n" if on_ready() else b"")
                self.fleet.slots.acquire()
            elif kind == "waiting" and not waits:
                waits = True
                self.fleet.slots.release()
            elif kind == "answer":
                answer.values = value
                if "clock" in value:
                    value["clock_s"] = clock_skew_s(value["clock"], sent_at, time.time())
            elif kind == "error":
                answer.error = value
            elif kind:
                on_line(value)
        if waits:
            self.fleet.slots.acquire()
        with contextlib.suppress(OSError):
            self.child.stdin.close()
        self.child.stdout.close()
        status = self.child.wait()
        timer.cancel()
        self.fleet.children.discard(self.child)
        with self.errors:
            answer.error = answer.error or (self.cause(status) if answer.failed else "")
        return answer

    def send(self, text: bytes, payload, stays_open: bool) -> None:
        source = agent_source().encode()
        self.child.stdin.write(b"%d\n%s%s" % (len(source), source, text))
        self.child.stdin.flush()
        if payload:
            with subprocess.Popen(payload, stdout=subprocess.PIPE, start_new_session=True) as child:
                shutil.copyfileobj(child.stdout, self.child.stdin)
        if not stays_open:
            self.child.stdin.close()

    def parse(self, line: bytes):
        """Return (kind, value) of a line of the answer, or (None, None) for other output, e.g. from a login script."""
        text = line.decode(errors="replace")
        if self.mark not in text:  # the mark may follow output that lacks a newline
            self.other_output = text.strip()[:500] or self.other_output
            return None, None
        return next(iter(json.loads(text.partition(self.mark)[2]).items()))

    def give_up(self) -> None:
        self.timed_out = True
        self.child.kill()

    def cause(self, status: int) -> str:
        """Explain why the request got no answer, and what to do."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        last, host = (lines or [""])[-1][:500], self.host
        if self.timed_out:
            return (f"timed out after {self.limit_s} s; set TIMEOUT to wait longer, or close a shared ssh "
                    f"connection that hangs: ssh -O exit {host}")  # fmt: skip
        if status == 255 and "verification failed" in last:
            advice = [lines[n + 1] for n, line in enumerate(lines[:-1]) if line.endswith("remove with:")]
            return f"the host key has changed; if you expected that: {(advice or [f'ssh-keygen -R {host}'])[0]}"
        if status == 255 and "Permission denied" in last:
            return f"ssh key rejected ({last}); add your key on the host, or set the right key in ~/.ssh/config"
        if status == 255 and "Connection refused" in last:
            return f"cannot be reached: {last}; no ssh server runs there: install and start openssh-server"
        if status == 255:
            return f"unreachable: {last}" if "timed out" in last else f"cannot be reached: {last}; try ssh {host}"
        if status == 68:
            return f"no valid answer: the shell's startup files on {host} (.bashrc) read from standard input"
        if status != 69 and (status in (0, 127) or self.other_output or not last):
            output = f"prints: {self.other_output}" if self.other_output else f"exits{f' ({last})' if last else ''}"
            return f"no valid answer: the host {output}; check the shell's startup files on {host} (.bashrc)"
        return last


# Output ---------------------------------------------------------------------------------------------------------------


def print_table(headings: list[str], rows: list[list]) -> None:
    """Print a table with one line per host. None is printed as -."""
    cells = [["host", *headings]] + [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in cells if len(row) > n) for n in range(len(headings) + 1)]
    for row in cells:
        print("  ".join(cell.ljust(widths[n]) for n, cell in enumerate(row)).rstrip())


def differing_lines(answers: list[Answer], **names: str) -> list[str]:
    """Return a line for each host that differs from most hosts in one of the keys in `names` (key -> printed name)."""
    lines = []
    for key, name in names.items():
        values = {answer.host: answer.get(key) for answer in answers if answer.get(key) not in (None, "-", "none")}
        most = max(values.values(), key=[*values.values()].count, default=None)
        odd = {host: value for host, value in values.items() if value != most}
        lines += [f"{host}  PROBLEM: its {name} is {value}; most hosts have {most}" for host, value in odd.items()]
    return lines


def handle_signals() -> None:
    """Make SIGHUP, SIGINT and SIGTERM raise Interrupted. Later signals are ignored, so cleanup can finish."""

    def interrupt(number, _):
        for other in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(128 + number)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)


def run_script(work, argv: list[str], description: str) -> int:
    """Run a script, or print its help; return the exit status."""
    handle_signals()
    try:
        if {"-h", "--help"} & {*argv[: argv.index("--") if "--" in argv else None]}:
            print(description.strip(), flush=True)
            return 0
        status = work(argv)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as signal:
        return signal.args[0]
    except BrokenPipeError:  # the reader has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.stdout.write(f"{len(agent_source().encode())}\n{agent_source()}")
