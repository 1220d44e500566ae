"""Start a command on all hosts, e.g. of a TPU slice, over ssh. It runs in tmux, so it outlives ssh and this terminal.

  ./launcher.sh --hosts hosts.txt -- python main.py moe1b --mesh fsdp=8,stage=2,tensor=2
  ./launcher.sh --tpu my-slice --zone us-central2-b --restarts 3 -- python main.py moe1b
  ./launcher.sh status --hosts hosts.txt

List the hosts with --hosts FILE, with --tpu NAME --zone ZONE (the addresses come from gcloud), or with - (standard
input). --tpu NAME,NAME is several slices, in the order of their slice ids. Each line is one host as ssh knows it: a
name, an IPv4 or IPv6 address, user@HOST, or ssh://[user@]HOST:PORT; # starts a comment. The first line is the first
host. --only HOST,HOST selects some hosts, written as in the list. `ssh HOST true` must work without a prompt. For
--tpu, set the user and gcloud's key, ~/.ssh/google_compute_engine, in ~/.ssh/config.

  -- COMMAND ...            copy the commit that is checked out here to all hosts, and start COMMAND in this commit on
                            all of them or, if one fails, on none. Uncommitted edits are an error. The first host
                            runs process 0. Settings, training data and mesh of main.py are checked first. When all
                            hosts are ready, they all get the start signal. Before that, the launch is canceled on
                            every host if you press Ctrl-C, or if this terminal or machine is lost
     --replace              when all hosts are ready, stop the current run, then start; without --replace a live run
                            is an error. The new run starts even if the old run had to be killed. If somebody else
                            started the old run, launcher.sh asks you to confirm; --yes skips this, and is
                            required without a terminal
     --restarts N           if COMMAND fails, restart it on all hosts after RESTART_WAIT seconds, at most N times
                            (default: 3 for main.py on several hosts, otherwise 0). main.py resumes from its latest
                            checkpoint. After a preemption (the cloud takes a host away) COMMAND also restarts, but
                            this does not count toward N. Attempts that a host fails to join do not count either, but
                            12 of them in a row (80 minutes) end the run. The run also ends on `stop`, and on exit
                            status 0, 2, 126, 127, 130 or 143 unless a host was preempted. A host that was switched
                            off does not rejoin by itself: launch again, with --replace
     --env NAME             pass the environment variable NAME, e.g. an API key, to COMMAND and the --on-end command;
                            repeat --env for more variables. The value is sent over ssh's standard input and stored
                            in a file that only you can read, until `clean` removes it
     --on-end 'COMMAND'     when the run has ended or was stopped, run this command in a shell on the first host, in
                            the copy of the commit; AXIS_EXIT is the exit status. It does not run if that host is lost
  status [--short | --json] print for each host: state, step, loss, tokens/s, the seconds since the last step and the
                            last log output, and the last log line. Below: the command, and who started it.
                            --short: only hosts with problems, and one line for all others. --json: only an array
                            with one object per host. A run that has taken 10 times as long as its usual step without
                            progress, and at least 60 s, is a problem; while it starts, evaluates or saves, 15 minutes
  logs [HOST] [-f]          print the last lines of the logs of all hosts or of one; -n LINES (default: 40); -f
                            follows the logs, including those of later runs
  stacks                    print what every thread of main.py does now, on all hosts; for a run that hangs
  stop [--now]              send SIGTERM, so that the run saves; after GRACE, send SIGKILL to processes still running.
                            Ctrl-C here does not cancel this. A second `stop` only waits for the first. --now: send
                            SIGKILL at once. If somebody else started the run, launcher.sh asks you to confirm; --yes
                            skips this
  exec -- COMMAND ...       run COMMAND during a run, in its copy of the commit, for at most TIMEOUT; print the output
  fetch NAME [FOLDER]       copy runs/NAME from the first host to FOLDER here (default: runs/NAME), which must not
                            exist yet. With local disks the first host has the complete checkpoints; with a shared
                            --run.dir, copy them from that disk instead
  usage                     print each host's cores, memory, disk, and TPU chips where tpu-info is installed
  doctor                    find problems on the hosts: ssh, tools, commit, Python, jax, disk, clock, TPU
  clean                     remove all launches and logs except the last KEEP and a live one, and the commits and
                            packages that no remaining launch needs. Runs and training data stay. To remove a run:
                            ./launcher.sh exec ... -- rm -r runs/NAME

COMMAND gets its arguments as you typed them; to use a shell on the hosts, use bash -c '...'. In its PATH, the commit's
packages come first. Its environment has AXIS_COMMIT, AXIS_PROGRESS and AXIS_ALIVE (see launch/agent.py), and also
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. On a TPU, JAX gets these three values from the TPU; there
the environment has JAX_COORDINATOR_PORT, and AXIS_PROCESSES and AXIS_PROCESS_ID, which must agree with the TPU. To
start several runs on the same hosts, set HOST_FOLDER and COORDINATOR_PORT to different values for each run, in every
command for that run. Each folder needs its own packages and training data. A TPU's chips can serve only one run at a
time.
Exit status of launcher.sh: 0: every host is running, or its command succeeded; 1: a host is not running or cannot be
reached; 2: usage error, nothing was done; 3: `stop` had to kill the run: steps since the last checkpoint are lost.

Settings, from the environment:
  DRY_RUN=1                 print the commands without running them
  PARALLEL=16               hosts contacted in parallel
  TIMEOUT=60                time limit of a request to a host, in seconds
  CONNECT_TIMEOUT=10        time limit for connecting to a host, in seconds
  SETUP_TIMEOUT=900         time limit for copying the commit and installing packages, in seconds
  GRACE=120                 seconds between SIGTERM and SIGKILL
  RESTART_WAIT=90           seconds before a restart; meanwhile the processes on the other hosts notice that one is
                            gone and exit, so that all restart together
  COORDINATOR_PORT=8476     port on which process 0 listens for the other processes; a firewall must let them through
  HOST_FOLDER=axis-by-axis  the only folder on a host that is written to; absolute, or relative to the home folder
  VENV=                     virtual environment that exists at this path on all hosts; nothing is installed then
  LOG_MIB=256               when a log reaches this size in MiB, it is moved to log.old, and a new log starts
  KEEP=5                    number of launches that `clean` keeps
  SSH_CONFIG=               use this file instead of ~/.ssh/config (ssh -F)

Needs: on this machine ssh, git and Python 3.9; on the hosts Linux, tmux, tar, make and Python 3.11. Changes: on a host
only HOST_FOLDER; on this machine only ssh's known_hosts, to which ssh adds new hosts.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from launch import hosts
from launch.hosts import ROOT, Answer, Fleet, Interrupted, UserError, print_table, whole_number
from launch.supervisor import refusal_reason

COLUMNS = {"state": "state", "launch": "launch", "commit": "commit", "step": "step", "loss": "loss",
           "tokens_per_s": "tokens/s", "step_s_ago": "step s ago", "log_s_ago": "log s ago",
           "last_line": "last line"}  # fmt: skip
VERBS = {  # verb -> (its flags, its maximum number of arguments; -1: a command after --); "": a launch
    "": ("--replace --yes --restarts --on-end --env", 0),
    "status": ("--short --json", 0),
    "logs": ("-f -n", 1),
    "stacks": ("", 0),
    "stop": ("--now --yes", 0),
    "exec": ("", -1),
    "fetch": ("", 2),
    "usage": ("", 0),
    "doctor": ("", 0),
    "clean": ("", 0),
}
CLOCK_S, FREE_GIB = 2, 10  # warn if clocks differ by more, or if a disk has less free space


# Setting up -----------------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{ROOT} is not a git checkout; launcher.sh copies a commit to the hosts, so run it from one")
    return done.stdout


def find_commit() -> str:
    """Return the checked-out commit. Uncommitted edits are an error, because only the commit is copied to the hosts."""
    commit, edits = git("rev-parse", "HEAD").strip(), git("status", "--porcelain", "--untracked-files=no")
    if edits:
        names = " ".join(line[3:] for line in edits.splitlines())
        raise UserError(f"uncommitted edits: {names}; only a commit is copied to the hosts, so commit first")
    return commit


def set_up(fleet: Fleet, commit: str, free: bool) -> list[Answer]:
    """Install the commit and its packages on every host. free: fail on a host where a run is alive."""
    print(f"commit {commit[:7]} on {len(fleet.hosts)} hosts", flush=True)
    about = {"commit": commit, "venv": fleet.venv, "free": free}
    archive = ["git", "-C", str(ROOT), "archive", "--format=tar.gz", commit]

    def prepare(number: int) -> Answer:
        answer = fleet.ask(number, {"do": "prepare", **about}, fleet.setup_s)
        if fleet.dry:
            fleet.say('# only if the answer above is "absent", copy the commit:')
        if fleet.dry or answer.get("absent"):
            answer = fleet.ask(number, {"do": "receive", **about}, fleet.setup_s, archive)
        return answer

    return fleet.ask_all(prepare, "ready")


# Launching ------------------------------------------------------------------------------------------------------------


class NotStarted(Exception):
    """A launch is canceled before any host has started the command."""


def launch(fleet: Fleet, command: list[str], flags: dict) -> int:
    keys, restarts = flags.get("--env", []), default_restarts(fleet, command)
    for name in keys:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"--env needs the name of a variable, not '{name}'")
        if name not in os.environ:
            raise UserError(f"--env {name}: this variable is not set here; export it first")
    if "--restarts" in flags:
        restarts = whole_number("--restarts", flags["--restarts"])
    commit, replace = find_commit(), "--replace" in flags
    if new := " ".join(git("ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines()):
        print(f"WARNING: not copied, because git does not track them: {new[:300]}", file=sys.stderr)
    check_flags(fleet, command)
    try:
        ready = set_up(fleet, commit, free=not replace)
        if any(answer.failed for answer in ready):
            raise NotStarted("the hosts above are not ready")
        if not fleet.dry:
            check_hosts(ready)
            check_workers(ready, command)
        if replace and not confirm_stop(
            fleet, [answer.get("owner") for answer in ready], "--yes" in flags, "--replace"
        ):
            raise NotStarted("you chose not to replace the run")
        check_command(fleet, commit, command, keys, restarts)
        if replace and stop(fleet, {"--yes": True}) == 1:
            raise NotStarted("the old run could not be stopped on every host")
        if fleet.ask_all({"do": "port", "port": fleet.port}, None, [0])[0].failed:
            raise NotStarted(f"the coordinator's port on {fleet.hosts[0]} cannot be used")
        about = {"commit": commit, "command": command, "restarts": restarts, "on_end": flags.get("--on-end", "")}
        answers = begin_together(fleet, start_request(fleet, ready[0].get("address"), about), keys)
    except NotStarted as why:
        print(f"error: nothing was started, because {why}", file=sys.stderr)
        return why.__cause__.args[0] if why.__cause__ else 1
    status = show_status(fleet, answers)
    if not fleet.dry:
        print("To check on the run: ./launcher.sh status, with the same hosts; logs and stop work the same way")
    return status


def start_request(fleet: Fleet, address: str | None, about: dict):
    """Return a function that returns a host's start request, given its number. address: address of the first host."""
    address = address or f"ADDRESS_OF_{fleet.hosts[0]}"
    coordinator = f"{f'[{address}]' if ':' in address else address}:{fleet.port}"
    about |= {"name": f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}", "first_host": fleet.hosts[0]}
    about |= {"by": fleet.user, "wait_s": fleet.wait_s, "log_mib": fleet.log_mib}

    def request(number: int) -> dict:
        launch = {**about, "host": fleet.hosts[number], "process": number}
        told = {"coordinator": coordinator, "count": len(fleet.hosts), "environment": {}}
        return {"do": "start", "launch": launch, **told}

    return request


def default_restarts(fleet: Fleet, command: list[str]) -> int:
    """Return 3 for training on several hosts, because main.py resumes; 0 if every start would delete the run."""
    deletes = "scratch" in command or "--run.restart=scratch" in command
    return 3 if is_training(command) and len(fleet.hosts) > 1 and not deletes else 0


def is_training(command: list[str]) -> bool:
    return any(word == "main.py" or word.endswith("/main.py") for word in command)


def check_hosts(ready: list[Answer]) -> None:
    """Raise NotStarted if two names are one machine, where two processes would use one folder; warn about problems."""
    seen = {}
    for answer in ready:
        if (other := seen.setdefault(answer.get("machine"), answer.host)) != answer.host:
            raise NotStarted(f"{other} and {answer.host} are the same machine; list it once")
        for what in machine_problems(answer):
            print(f"{answer.host}  WARNING: {what}")


def check_workers(ready: list[Answer], command: list[str]) -> None:
    """Raise UserError if the hosts are not all workers of the TPU, in its order: JAX waits for all, and ranks them."""
    if not (is_training(command) or "train.selfcheck" in command):
        return
    for line, answer in enumerate(ready):
        process, count = answer.get("worker") or (line, len(ready))
        if count != len(ready):
            raise UserError(f"{len(ready)} hosts are listed, but {answer.host} belongs to a TPU with {count} hosts, "
                            "and a run needs all of them: list them all, or launch on another slice")  # fmt: skip
        if process != line:
            raise UserError(f"{answer.host} is worker {process} of the TPU, but number {line} in the list of hosts; "
                            "list the hosts in the order of the workers, slice by slice")  # fmt: skip


def confirm_stop(fleet: Fleet, owners: list, yes: bool, flag: str) -> bool:
    """Return whether to stop the run; ask the user first if somebody else started it."""
    others = " ".join(sorted({owner for owner in owners if owner not in (None, "-", fleet.user)}))
    if yes or not others:
        return True
    if not sys.stdin.isatty():
        raise UserError(f"{others} started this run, not {fleet.user}; ask them first, or stop it with {flag} --yes")
    reply = input(f"{others} started this run, not {fleet.user}. Stop it? [y/N] ")
    return reply.strip().lower() in ("y", "yes")


CHECK_FLAGS = "import sys; from config.flags import command_line as c; c(sys.argv[1:], 'python main.py', '', 'laptop')"


def check_flags(fleet: Fleet, command: list[str]) -> None:
    """Raise UserError for a misspelled flag of main.py before any host is asked, if this machine has the packages."""
    python = ROOT / ".venv/bin/python"
    at = next((n for n, word in enumerate(command) if is_training([word])), None)
    own = at is None or any(re.match("--(config|init-from|run.init-from|run.init_from)", word) for word in command)
    if fleet.dry or own or not os.access(python, os.X_OK):  # --config and --init-from read files of the hosts
        return
    done = subprocess.run([python, "-c", CHECK_FLAGS, *command[at + 1 :]], cwd=ROOT, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if done.returncode:
        raise UserError(refusal_reason(done.stdout.decode(errors="replace")).removeprefix("error: "))


def check_command(fleet: Fleet, commit: str, command: list[str], keys: list[str], restarts: int) -> None:
    """Ask main.py on each host whether it would run there; print each different error once."""
    if not is_training(command):
        return
    more = {"AXIS_RESTART_WAIT": str(fleet.wait_s)} if restarts else {}

    def one(number: int) -> Answer:
        environment = {"AXIS_PROCESSES": str(len(fleet.hosts)), "JAX_PROCESS_ID": str(number), **more}
        request = {"do": "check", "commit": commit, "command": command, "environment": environment}
        return fleet.ask(number, request, keys=keys)

    reasons: dict[str, list[str]] = {}
    for answer in fleet.ask_all(one, None, quiet=True):
        if answer.failed:
            reasons.setdefault(answer.error, []).append(answer.host)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"{names[0]}{more}  FAILED: {reason}", file=sys.stderr)
    if reasons:
        raise NotStarted("main.py would not run on these hosts")


def begin_together(fleet: Fleet, request, keys: list[str]) -> list[Answer]:
    """Prepare every host, then send the start signal to all hosts at once when all are ready.

    A host starts the command when it gets the signal, and cancels the launch if its connection to this process closes
    earlier. So nothing runs if this process ends, for whatever reason, before all hosts are ready.
    """
    begun = threading.Event()
    ready = threading.Barrier(len(fleet.hosts), begun.set)

    def on_ready() -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait()
            return True

    def one(number: int) -> Answer:
        answer = fleet.ask(number, request(number), on_ready=on_ready, keys=keys)
        if answer.failed:
            ready.abort()
        elif begun.is_set():
            fleet.say(f"{answer.host}  started")
        return answer

    try:
        answers, ended = fleet.ask_all(one, None), None
    except Interrupted as error:
        answers, ended = [], error
    ready.abort()
    if answers and not any(answer.failed for answer in answers):
        return answers
    if not begun.is_set():
        raise NotStarted("you canceled it" if ended else "the hosts above were not ready to start") from ended
    print("error: not every host started, so all are stopped; --replace does not restart the old run", file=sys.stderr)
    about = {"grace_s": 0, "by": fleet.user, "yes": True, "launch": request(0)["launch"]["name"]}
    fleet.ended = False
    if any(answer.failed for answer in fleet.ask_all({"do": "stop", **about})):
        print("error: some hosts are not stopped; when all answer, run ./launcher.sh stop --now", file=sys.stderr)
    raise ended or SystemExit(1)


# Other commands -------------------------------------------------------------------------------------------------------


def status(fleet: Fleet, flags: dict) -> int:
    machine = "--json" in flags
    answers = fleet.ask_all({"do": "status"}, None, quiet=machine)
    if machine and not fleet.dry:
        print(json.dumps([as_json(answer) for answer in answers], sort_keys=True))
        return int(any(map(has_problem, answers)))
    return show_status(fleet, answers, "--short" in flags)


def as_json(answer: Answer) -> dict:
    names = [*COLUMNS, "steps", "by", "command"]
    row = {"host": answer.host, **{name: answer.get(name) for name in names}}
    row |= {"state": f"FAILED: {answer.error}"} if answer.failed else {}
    number = lambda text: json.loads(text) if re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text or "") else None
    return {**row, **{name: number(row[name]) for name in ("step", "steps", "loss", "tokens_per_s")}}


def has_problem(answer: Answer) -> bool:
    state = answer.get("state") or ""
    return not (state.startswith("running") or state in ("exit 0", "stopped, exit 0"))


def show_status(fleet: Fleet, answers: list[Answer], short: bool = False) -> int:
    """Print the table (short: only problems). Return 0 if all hosts run or have succeeded, in the same launch."""
    if fleet.dry:
        return 0
    trouble = [answer for answer in answers if has_problem(answer)]
    well = [answer for answer in answers if not has_problem(answer)]
    if not short or trouble:
        print_table([*COLUMNS.values()], [row(answer) for answer in (trouble if short else answers)])
    if short and well:
        state, _, _, step, loss, speed, age, *_ = ("-" if cell is None else cell for cell in row(well[0])[1:])
        ago = f" ({age} s ago)" if age != "-" and state.startswith("running") else ""
        print(f"{len(well)} hosts are well; {well[0].host}: {state}, step {step}{ago}, loss {loss}, tokens/s {speed}")
    elif not short:
        what = {f"{answer.get('launch')} by {answer.get('by')}: {answer.get('command')}" for answer in answers
                if answer.get("command")}  # fmt: skip
        print(*sorted(what), sep="\n", end="\n" * bool(what))
    lines = hosts.differing_lines(answers, commit="commit") or hosts.differing_lines(answers, launch="launch")
    gone = "its supervisor is gone, e.g. after a power-off or reboot; launch again, with --replace"
    lines += [f"{answer.host}  PROBLEM: {gone}" for answer in trouble if answer.get("state") == "vanished"]
    if any((answer.get("state") or "").startswith("no progress") for answer in trouble):
        lines.append("PROBLEM: the run seems to hang; ./launcher.sh stacks, with the same hosts, shows where")
    print(*lines, sep="\n", end="\n" * bool(lines))
    return int(bool(trouble or lines))


def row(answer: Answer) -> list:
    if answer.failed:
        return [answer.host, "FAILED"]
    cells = {name: answer.get(name) for name in COLUMNS}
    if steps := answer.get("steps"):
        cells["step"] = f"{cells['step'] or '-'}/{steps}"
    return [answer.host, *cells.values()]


def stop(fleet: Fleet, flags: dict) -> int:
    """Stop the run. Return 3 if a process had to be killed, and 1 if a request failed."""
    grace = 0 if "--now" in flags else fleet.grace_s
    request = {"do": "stop", "grace_s": grace, "by": fleet.user, "yes": "--yes" in flags}
    answers = fleet.ask_all(request, limit_s=grace + fleet.limit_s)
    if owned := [number for number, answer in enumerate(answers) if answer.get("owner")]:
        if not confirm_stop(fleet, [answers[number].get("owner") for number in owned], False, "stop"):
            raise UserError("you chose not to stop the run")
        answers += fleet.ask_all({**request, "yes": True}, hosts=owned, limit_s=grace + fleet.limit_s)
    if any(answer.failed for answer in answers):
        return 1
    return 3 if any(answer.get("killed") for answer in answers) else 0


def stream(fleet: Fleet, request: dict, limit_s: int | None = None) -> int:
    """Print the hosts' output as it arrives, with the host's name before each line."""

    def one(number: int) -> Answer:
        prefix = f"{fleet.hosts[number]} | " if len(fleet.hosts) > 1 else ""
        return fleet.ask(number, request, limit_s, on_line=lambda line: fleet.say(prefix + line))

    fleet.slots = threading.Semaphore(len(fleet.hosts))
    return int(any(answer.failed for answer in fleet.ask_all(one, None)))


def logs(fleet: Fleet, words: list[str], flags: dict) -> int:
    fleet.hosts = hosts.select_hosts(fleet.hosts, words[0], "logs") if words else fleet.hosts
    request = {"do": "logs", "lines": whole_number("-n", flags.get("-n", "40")), "follow": "-f" in flags}
    return stream(fleet, request, 0 if request["follow"] else None)


def fetch(fleet: Fleet, words: list[str]) -> int:
    if not words:
        raise UserError("fetch needs the name of a run: fetch NAME [FOLDER]; see ./launcher.sh --help")
    run, into = words[0], Path((words + [f"runs/{words[0]}"])[1])
    if not re.fullmatch(r"\w[\w.-]*", run):
        raise UserError(f"'{run}' is not a valid run name: use letters, digits, '.', '_' and '-'")
    if into.exists():
        raise UserError(f"{into} already exists; fetch into another folder: fetch {run} FOLDER")
    if fleet.dry:
        fleet.ask(0, {"do": "pack", "run": run})
        return 0
    partial = into.with_name(f"{into.name}.fetched-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        tar = ["tar", "-xzf", "-", "-C", partial]
        with subprocess.Popen(tar, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as unpack:
            keep = lambda part: unpack.stdin.write(base64.b64decode(part))
            answer = fleet.ask(0, {"do": "pack", "run": run}, on_line=keep, limit_s=fleet.setup_s)
        if answer.failed or unpack.returncode:
            print(f"{fleet.hosts[0]}  FAILED: {answer.error or 'the run arrived incomplete'}", file=sys.stderr)
            return 1
        partial.rename(into)
    finally:
        subprocess.run(["rm", "-rf", "--", partial])
    print(f"{into}  {sum(path.stat().st_size for path in into.rglob('*')) >> 10} KiB, from {fleet.hosts[0]}")
    return 0


def usage(fleet: Fleet) -> int:
    answers = fleet.ask_all({"do": "usage"}, None)
    show(fleet, answers, "load memory disk tpu-info")
    return int(any(answer.failed for answer in answers))


def clean(fleet: Fleet) -> int:
    request = {"do": "clean", "keep": fleet.keep, "commit": find_commit()}
    return int(any(answer.failed for answer in fleet.ask_all(request)))


def show(fleet: Fleet, answers: list[Answer], keys: str) -> list[str]:
    """Print a table with columns `keys`. Return a line for each host whose Python or jax differs from most hosts."""
    cells = lambda answer: ["FAILED"] if answer.failed else [answer.get(key) for key in keys.split()]
    headings = [{"free_gib": "free GiB", "clock_s": "clock skew s"}.get(key, key) for key in keys.split()]
    if not fleet.dry:
        print_table(headings, [[answer.host, *cells(answer)] for answer in answers])
    return hosts.differing_lines(answers, python="Python", jax="jax")


def doctor(fleet: Fleet) -> int:
    commit = find_commit()
    answers = fleet.ask_all({"do": "doctor", "commit": commit}, None)
    odd = show(fleet, answers, "commit python jax free_gib clock_s tpu lacks run")
    if fleet.dry:
        return 0
    well = [answer for answer in answers if not answer.failed]
    lines = [f"{answer.host}  PROBLEM: {what}" for answer in well for what in problems(answer, commit[:7])] + odd
    if not lines and well == answers:
        lines, odd = [f"all is well on {len(answers)} hosts"], None
    print(*lines, sep="\n", end="\n" * bool(lines))
    return int(odd is not None)


def problems(answer: Answer, commit: str):
    """Yield a line for each problem found on a host, with the fix."""
    values = answer.values
    if values["lacks"] != "nothing":
        yield f"these tools are missing: {values['lacks']}"
    if values["commit"] == "absent":
        yield f"commit {commit} is missing; ./setup_tpu.sh copies it"
    elif values["commit"] != "shipped":
        yield f"its files differ from commit {commit}: {values['commit']}"
    elif values["python"] == "none":
        yield "its packages are missing; ./setup_tpu.sh installs them"
    yield from machine_problems(answer)
    if values["tpu"].startswith("in use") and not values["run"].startswith("running"):
        yield f"its TPU is {values['tpu']}"


def machine_problems(answer: Answer):
    """Yield a line for each problem that does not prevent a launch."""
    if (free_gib := answer.get("free_gib")) < FREE_GIB:
        yield f"only {free_gib} GiB of disk space are free"
    if abs(skew_s := answer.get("clock_s")) > CLOCK_S:
        yield f"its clock differs by {skew_s} s from this machine's; is a time service (NTP) running there?"
    if answer.get("tpu").startswith("locked"):
        yield f"its TPU is {answer.get('tpu')}"


def run(argv: list[str]) -> int:
    verb, words, flags, command, names = hosts.parse(argv, VERBS, "./launcher.sh")
    if verb == "exec" and not command:
        raise UserError("exec needs a command: ./launcher.sh exec ... -- COMMAND ...")
    fleet = Fleet(names)
    commands = {
        "": lambda: launch(fleet, command, flags), "status": lambda: status(fleet, flags),
        "logs": lambda: logs(fleet, words, flags), "stop": lambda: stop(fleet, flags),
        "stacks": lambda: stream(fleet, {"do": "stacks"}),
        "exec": lambda: stream(fleet, {"do": "exec", "command": command}), "fetch": lambda: fetch(fleet, words),
        "usage": lambda: usage(fleet), "doctor": lambda: doctor(fleet), "clean": lambda: clean(fleet),
    }  # fmt: skip
    return commands[verb]()


SETUP = """Copy the commit that is checked out here to every host, e.g. of a TPU slice, and install its packages.

  ./setup_tpu.sh --hosts hosts.txt
  ./setup_tpu.sh --tpu my-slice --zone us-central2-b

launcher.sh does the same before it starts a command. This takes minutes the first time, and seconds if everything is
installed. Commits with identical lock files share one installation. Your own checkouts on the hosts are not touched.

Hosts, settings and exit status: see ./launcher.sh --help. Needs: the same as launcher.sh, which also documents what
changes on the hosts.
"""


def setup(argv: list[str]) -> int:
    *_, names = hosts.parse(["setup", *argv], {"setup": ("", 0)}, "./setup_tpu.sh")
    fleet = Fleet(names)
    answers = set_up(fleet, find_commit(), free=False)
    lines = show(fleet, answers, "python jax free_gib clock_s address")
    if not fleet.dry:
        print(
            *lines, "To test the devices: ./launcher.sh ... -- python -m train.selfcheck, with the same hosts", sep="\n"
        )
    return int(bool(lines) or any(answer.failed for answer in answers))
