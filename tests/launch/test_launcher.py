"""Claims about launcher.sh, over real ssh and tmux."""

import getpass
import http.server
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.launch import rehearsal
from tests.launch.rehearsal import COUNT, column, launch, launched, launches, log, rows, wait_until

pytestmark = pytest.mark.launch

NASTY = ["", " ", "two words", "$HOME", "`id`", "$(id)", '"', "'", "'\"'", "a\nb\n", "\\", "\\n", "*", "-n", "--",
         "a;b&c", "|d", "é ☃", "!!", "~", "#x", "{a,b}", "%s", "\t", ">e"]  # fmt: skip
WRITE = r"""printf '%s\0' "$@" > "$HOME/got" """


def test_a_command_runs_on_every_host_until_it_is_stopped(fleet):
    """Catches a launch that ends with its ssh, that two processes think they are the same, a stop that kills."""
    done = launch(fleet, "bash", "-c", COUNT)
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    assert done.returncode == 0, done.stderr
    for host in fleet.hosts:
        assert f"{host.name}  ready\n" in done.stdout
        assert f"{host.name}  started\n" in done.stdout
    assert [(name, row["state"]) for name, row in rows(done.stdout).items()] == [
        (f"host0{i}", "running") for i in range(3)
    ]
    for i, host in enumerate(fleet.hosts):
        assert log(host).startswith(f"{i} of 3 at 127.0.0.2:{fleet.coordinator_port}, commit {commit}\n")
        before = log(host)
        wait_until(lambda host=host, before=before: log(host) > before)  # ssh is gone, the command goes on
        assert "step" in fleet.ssh(host, "tmux capture-pane -p -t axis")

    status = fleet.run("launcher.sh", "status")
    assert status.returncode == 0
    for row in rows(status.stdout).values():
        assert (row["state"], row["commit"]) == ("running", commit[:7])
        assert re.fullmatch(r"\d{8}-\d{6}-\d+", row["launch"])
        assert [row[name] for name in ("step", "loss", "tokens/s", "step s ago")] == ["-"] * 4
        assert int(row["log s ago"]) <= 5
        assert re.fullmatch(r"step \d+", row["last line"])

    stop = fleet.run("launcher.sh", "stop")
    assert stop.returncode == 0
    for host in fleet.hosts:
        assert re.search(rf"{host.name}  stopped after \d+ s: exit 0; its log ends: ", stop.stdout)
        assert log(host).endswith("saved\n")
        assert fleet.ssh(host, "tmux has-session -t axis 2> /dev/null || echo gone") == "gone\n"
    assert column("state", fleet.run("launcher.sh", "status").stdout) == ["stopped, exit 0"] * 3


def test_words_arrive_as_typed(fleet):
    """Catches a word that a shell reads once more on its way: it would be split, expanded, or run."""
    done = launch(fleet, "bash", "-c", WRITE, "write", *NASTY)
    assert done.returncode == 0, done.stderr
    for host in fleet.hosts:
        assert (host.home / "got").read_bytes().decode().split("\0") == [*NASTY, ""]


def test_a_dry_run_prints_the_commands_and_runs_none(fleet):
    """Catches a dry run that shows something other than what would run: here a shell runs what it printed."""
    before = launches(fleet)
    dry = launch(fleet, "bash", "-c", WRITE, "write", *NASTY, "dry", DRY_RUN="1", COORDINATOR_PORT="")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert launches(fleet) == before
    commands = dry.stdout.split("\n", 1)[1].replace("ADDRESS_OF_host00", "127.0.0.2")
    # What ships the commit is printed too; a host that has it already says so, and changes nothing.
    subprocess.run(["sh", "-c", commands], env=fleet.environment, check=True, capture_output=True, timeout=120)
    for host in fleet.hosts:
        assert (host.home / "got").read_bytes().decode().split("\0") == [*NASTY, "dry", ""]
        assert launched(host)["environment"]["JAX_COORDINATOR_ADDRESS"] == "127.0.0.2:8476"
    for words in (["stop"], ["status"], ["doctor"], ["logs", "-f"]):
        dry = fleet.run("launcher.sh", *words, DRY_RUN="1")
        assert (dry.returncode, dry.stderr) == (0, "")
        assert len(dry.stdout.splitlines()) == 3
        assert all(f"axis-by-axis {words[0]}" in line for line in dry.stdout.splitlines())


def test_a_live_run_is_refused_unless_replaced(fleet):
    """Catches a second run over the first, and a launch on the hosts that are free while one is not."""
    one = fleet.hosts[1]
    fleet.run("launcher.sh", "--", "bash", "-c", COUNT, input=f"# one only\n{one.name}  # busy\n\n")
    before = launches(fleet)
    refused = launch(fleet, "true")
    assert refused.returncode == 1
    assert "host01  FAILED: a run is alive here: 2" in refused.stderr
    assert "stop it, or launch with --replace" in refused.stderr
    assert refused.stderr.endswith("error: nothing was started, because the hosts above are not ready\n")
    assert launches(fleet) == before

    replaced = launch(fleet, "bash", "-c", COUNT, options=["--replace"])
    assert replaced.returncode == 0, replaced.stderr
    assert re.search(r"host01  stopped after \d+ s: exit 0", replaced.stdout)
    assert "host00  nothing runs: " in replaced.stdout
    assert column("state", replaced.stdout) == ["running"] * 3
    assert len(launches(fleet)) == len(before) + 3


def refuses_the_key(fleet, undo):
    keys = fleet.hosts[1].folder / "authorized_keys"
    keys.rename(keys.with_suffix(".away"))
    undo.append(lambda: keys.with_suffix(".away").rename(keys))
    return "host01", r"ssh key rejected \(.*Permission denied"


def never_answers(fleet, undo):
    silent = socket.create_server(("127.0.0.200", fleet.port))
    undo.append(silent.close)
    config = fleet.folder / "ssh_config"
    config.write_text("Host silent\n  HostName 127.0.0.200\n" + config.read_text())
    return "silent", "unreachable: Connection timed out"


def is_not_there(fleet, undo):
    config = fleet.folder / "ssh_config"
    config.write_text("Host nobody\n  HostName 127.0.0.201\n" + config.read_text())
    return "nobody", "cannot be reached: .*Connection refused; no ssh server runs there"


def has_another_commit(fleet, undo):
    assert fleet.run("setup_tpu.sh").returncode == 0
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    makefile = fleet.hosts[1].axis / "commits" / commit / "Makefile"
    text = makefile.read_text()
    makefile.write_text(text + "# an edit on the host\n")
    undo.append(lambda: makefile.write_text(text))
    return "host01", f"files of the commit were edited on the host: Makefile changed in .*/commits/{commit};"


def hangs(fleet, undo):
    profile = fleet.hosts[1].home / ".bashrc"  # which a shell that ssh starts reads
    profile.write_text("sleep 30\n")
    undo += [profile.unlink, fleet.end_processes]
    return "host01", "timed out after 8 s; set TIMEOUT to wait longer"


def has_a_full_disk(fleet, undo):
    commit = rehearsal.commit(fleet.checkout, "To be shipped")
    profile = fleet.hosts[1].home / ".bashrc"
    profile.write_text("trap '' XFSZ; ulimit -f 1  # KiB in a file\n")
    undo.append(profile.unlink)
    return "host01", rf"the files of commit {commit} did not arrive completely; is the disk full\?"


NOT_READY = [refuses_the_key, never_answers, is_not_there, has_another_commit, hangs, has_a_full_disk]


@pytest.mark.parametrize("fault", NOT_READY)
def test_a_host_at_fault_is_named_and_nothing_starts(fleet, fault):
    """Catches a launch on all hosts but one, which would wait for it for ever, and an error that does not say where."""
    undo = []
    try:
        name, cause = fault(fleet, undo)
        names = sorted({name, *(host.name for host in fleet.hosts)})
        before, begin = launches(fleet), time.monotonic()
        slow = {"SETUP_TIMEOUT": "8", "TIMEOUT": "8"} if fault is hangs else {}
        done = fleet.run("launcher.sh", "--", "true", input="\n".join(names), CONNECT_TIMEOUT="3", **slow)
        assert time.monotonic() - begin < 60
        assert done.returncode == 1
        failed = [line for line in done.stderr.splitlines() if "FAILED" in line]
        assert len(failed) == 1, done.stderr
        assert re.match(f"{name}  FAILED: {cause}", failed[0])
        assert done.stderr.endswith("error: nothing was started, because the hosts above are not ready\n")
        assert launches(fleet) == before
        status = fleet.run("launcher.sh", "status", input="\n".join(names), CONNECT_TIMEOUT="3", **slow)
        if fault not in (has_another_commit, has_a_full_disk):
            assert status.returncode == 1
            assert re.search(f"{name} +FAILED\n", status.stdout)
    finally:
        for step in undo:
            step()


# Listens where the hosts' coordinator would, with a descriptor of its own or with none, as if it were out of sight.
LISTEN = """import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if sys.argv[2] == "hidden":
    ends = socket.socketpair()
    socket.send_fds(ends[0], [b"-"], [server.fileno()])
    server.close()
print("listens", flush=True)
time.sleep(1000)"""


@contextmanager
def port_is_held(fleet, how="seen"):
    words = [sys.executable, "-c", LISTEN, str(fleet.coordinator_port), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "listens\n"
            yield holder.pid
        finally:
            holder.kill()


@pytest.mark.parametrize("how", ["seen", "hidden"])
def test_who_holds_the_port_is_named_and_nothing_starts(fleet, how):
    """Catches processes that wait for a coordinator that cannot listen, because one of yesterday still does."""
    before, port = launches(fleet), fleet.coordinator_port
    with port_is_held(fleet, how) as pid:
        done = launch(fleet, "true")
    assert done.returncode == 1
    user = getpass.getuser()
    who = rf"process {pid} \({user} .*python.* -c import socket.*\)"
    if how == "hidden":
        who = f"a process of user {user} that you have no permission to inspect"
    held, nothing = done.stderr.splitlines()
    assert re.fullmatch(
        f"host00  FAILED: port {port} is in use by {who}; end it, or set COORDINATOR_PORT to another port", held
    )
    assert nothing == "error: nothing was started, because the coordinator's port on host00 cannot be used"
    assert launches(fleet) == before


def test_the_port_of_a_run_that_is_replaced_is_free(fleet):
    """Catches a replacement that is refused because of what it replaces."""
    words = [sys.executable, "-c", LISTEN, str(fleet.coordinator_port), "seen"]
    fleet.run("launcher.sh", "--", *words, input="host00\n")
    wait_until(lambda: log(fleet.hosts[0]) == "listens\n")
    assert launch(fleet, "true", options=["--replace"]).returncode == 0


def test_a_tpu_host_is_told_the_count_its_place_and_the_port(fleet):
    """Catches a run on a TPU whose order of hosts is ours, not the TPU's, or whose port is closed between slices; and
    hosts that are not listed in the order of the TPU's workers."""
    workers = {host.name: str(n) for n, host in enumerate(fleet.hosts)}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            _, host, *_, name = self.path.split("/")
            told = {"agent-worker-number": workers[host], "worker-network-endpoints": "a,b,c", "tpu-env": ""}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told[name].encode())

        def log_message(self, *_):
            pass

    (fleet.folder / "accel0").touch()
    profiles = [host.home / ".bashrc" for host in fleet.hosts]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for host, profile in zip(fleet.hosts, profiles, strict=True):
            address = f"127.0.0.1:{server.server_port}/{host.name}"
            profile.write_text(f"export AXIS_DEVICES={fleet.folder} GCE_METADATA_IP={address}\n")
        try:
            show = "env | grep -E '^JAX_(COO|NUM_P|PRO)|^AXIS_[CP]' | LC_ALL=C sort"
            done = launch(fleet, "bash", "-c", show)
            workers |= {"host00": "1", "host01": "0"}
            refused = launch(fleet, "python", "main.py")
        finally:
            for profile in profiles:
                profile.unlink()
            server.shutdown()
    assert done.returncode == 0, done.stderr
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    for n, host in enumerate(fleet.hosts):
        progress = (host.axis / "launches/latest").resolve() / "progress"
        assert log(host) == (f"AXIS_COMMIT={commit}\nAXIS_PROCESSES=3\nAXIS_PROCESS_ID={n}\nAXIS_PROGRESS={progress}\n"
                             f"JAX_COORDINATOR_PORT={fleet.coordinator_port}\n")  # fmt: skip
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: host00 is worker 1 of the TPU, but number 0 in the list of hosts; list")


def followers(fleet):
    """How many processes of `logs -f` there are on the hosts."""
    count = 0
    for pid in fleet.processes():
        with suppress(OSError):
            count += Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0logs\0")
    return count


def test_a_run_outlives_the_terminal_that_started_it(fleet):
    """Catches a run, or a follower of its log, that hangs on the terminal which is closed."""
    script = 'hosts=(--hosts "$2"); "$1" "${hosts[@]}" -- bash -c "$3"; "$1" logs "${hosts[@]}" -f; exit'
    words = ["env", "--default-signal=HUP", "setsid", "--ctty", "bash", "-c", script, "_"]  # under nohup, too
    words += [f"{fleet.checkout}/launcher.sh", f"{fleet.folder}/hosts.txt", COUNT]
    keyboard, terminal = pty.openpty()
    with subprocess.Popen(words, env=fleet.environment, stdin=terminal, stdout=terminal, stderr=terminal) as session:
        os.close(terminal)
        with open(keyboard, errors="replace") as screen:
            while not re.match(r"host0\d \| step \d", screen.readline()):
                pass
            wait_until(lambda: followers(fleet) == 3)
        assert session.wait(timeout=10) == -signal.SIGHUP  # what a terminal that is closed sends
    wait_until(lambda: not followers(fleet))
    before = [log(host) for host in fleet.hosts]
    wait_until(lambda: all(log(host) > text for host, text in zip(fleet.hosts, before, strict=True)))
    assert column("state", fleet.run("launcher.sh", "status").stdout) == ["running"] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_launcher_that_is_killed_while_hosts_get_ready_starts_nothing(fleet, number):
    """Catches a fleet that is half started, by a closed laptop, a cut connection or `kill -9`, without a word."""
    launch(fleet, "true")
    held, asked = fleet.folder / "held", fleet.folder / "asked"
    held.touch()
    profile = fleet.hosts[1].home / ".bashrc"
    profile.write_text(
        f"case $BASH_EXECUTION_STRING in *start) touch {asked}; while [ -e {held} ]; do sleep 0.1; done ;; esac\n"
    )
    words = [f"{fleet.checkout}/launcher.sh", "--hosts", f"{fleet.folder}/hosts.txt", "--", "bash", "-c", COUNT]
    heed = ["env", "--default-signal=HUP"]  # a test that runs under nohup would start a launcher that ignores it
    with subprocess.Popen(heed + words, env=fleet.environment | {"TMPDIR": str(fleet.folder)},
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:  # fmt: skip
        wait_until(asked.exists)
        state = lambda host: fleet.run("launcher.sh", "status", input=f"{host.name}\n").stdout
        ready = [host for host in fleet.hosts if host is not fleet.hosts[1]]
        wait_until(lambda: all("ready, waiting for the other hosts" in state(host) for host in ready))
        launcher.send_signal(number)
        said = launcher.communicate()[1]
    held.unlink()
    profile.unlink()
    wait_until(lambda: column("state", fleet.run("launcher.sh", "status").stdout) == ["not started"] * 3)
    assert [log(host) for host in fleet.hosts] == [""] * 3
    if number == signal.SIGHUP:
        assert launcher.returncode == 129
        assert said == "error: nothing was started, because you canceled it\n"
    assert launch(fleet, "true").returncode == 0, "the hosts are free"


def test_so_many_hosts_are_asked_at_a_time(fleet):
    """Catches hosts that are asked one after another, and more connections at once than were asked for."""
    times = fleet.folder / "times"
    try:
        for host in fleet.hosts:
            (host.home / ".bashrc").write_text(f"echo 1 >> {times}; sleep 2; echo -1 >> {times}\n")
        assert fleet.run("launcher.sh", "stop", PARALLEL="2").returncode == 0
    finally:
        for host in fleet.hosts:
            (host.home / ".bashrc").unlink()
    changes = [int(line) for line in times.read_text().split()]
    assert len(changes) == 6
    assert max(sum(changes[:i]) for i in range(7)) == 2


def test_an_end_in_failure_is_seen(fleet):
    """Catches a launch called good though a host's command failed, or was never found."""
    done = launch(fleet, "bash", "-c", "echo oh; [ $JAX_PROCESS_ID != 1 ] || exit 7; sleep 100")
    assert done.returncode == 1
    assert column("state", done.stdout) == ["running", "exit 7", "running"]
    assert rows(done.stdout)["host01"]["last line"] == "oh"
    fleet.run("launcher.sh", "stop")
    done = launch(fleet, "no such command")
    assert done.returncode == 1
    assert column("state", done.stdout) == ["exit 127"] * 3
    assert all("no such command: not found" in line for line in column("last line", done.stdout))


def test_what_ignores_sigterm_is_killed(fleet):
    """Catches a stop that leaves a grandchild, or waits for ever."""
    launch(fleet, "bash", "-c", "trap '' TERM; (sleep 1000; sleep 1000) & sleep 1000; wait")
    done = fleet.run("launcher.sh", "stop", GRACE="1")
    assert done.returncode == 3, "what was not saved is lost"
    assert len(re.findall(r"host0\d  killed after \d+ s, SIGTERM did not end it: exit 137; ", done.stdout)) == 3
    wait_until(lambda: not fleet.processes(), seconds=5)  # the pane's tail looks once a second


def test_a_run_outlives_its_tmux_session(fleet):
    """Catches a Ctrl-C, or a closed pane, of someone who only looks, that ends a training run."""
    launch(fleet, "bash", "-c", COUNT)
    host = fleet.hosts[0]
    fleet.ssh(host, "tmux send-keys -t axis C-c")
    fleet.ssh(fleet.hosts[1], "tmux kill-server")
    time.sleep(0.5)
    status = fleet.run("launcher.sh", "status")
    assert column("state", status.stdout) == ["running"] * 3
    assert re.search(r"host01  stopped after \d+ s: exit 0", fleet.run("launcher.sh", "stop").stdout)


def test_a_run_that_left_no_trace_is_told_from_one_that_ended(fleet):
    """Catches a host that restarted being shown as running, or as ended well."""
    launch(fleet, "bash", "-c", COUNT)
    fleet.end_processes()
    status = fleet.run("launcher.sh", "status")
    assert status.returncode == 1
    assert column("state", status.stdout) == ["vanished"] * 3
    for host in fleet.hosts:
        (host.axis / "launches/latest/exit").write_text("137\n")  # for the fixture


def test_hosts_of_different_launches_are_named(fleet):
    """Catches a status that shows two runs as if they were one."""
    launch(fleet, "true")
    rehearsal.commit(fleet.checkout, "Another")
    fleet.run("launcher.sh", "--", "true", input="host02\n")
    status = fleet.run("launcher.sh", "status")
    commits = rehearsal.git(fleet.checkout, "log", "--format=%h", "--abbrev=7", "-2").split()
    assert status.returncode == 1
    assert f"host02  PROBLEM: its commit is {commits[0]}; most hosts have {commits[1]}\n" in status.stdout


def test_logs_of_all_hosts_and_of_one(fleet):
    """Catches lines without their host, and a follower that goes on when nobody reads it."""
    launch(
        fleet, "bash", "-c", "echo $JAX_PROCESS_ID begins; for i in $(seq 20); do echo $i; sleep 0.1; done; sleep 1000"
    )
    wait_until(lambda: all(log(host).endswith("20\n") for host in fleet.hosts))
    few = fleet.run("launcher.sh", "logs", "-n", "2")
    assert few.returncode == 0
    assert sorted(few.stdout.splitlines()) == [f"{host.name} | {i}" for host in fleet.hosts for i in (19, 20)]
    before = fleet.processes()
    hosts = [f"{fleet.checkout}/launcher.sh", "logs", "--hosts", f"{fleet.folder}/hosts.txt"]
    with subprocess.Popen([*hosts, "host01", "-f"], env=fleet.environment, stdout=subprocess.PIPE, text=True) as follow:
        try:
            assert [follow.stdout.readline() for _ in range(21)] == ["1 begins\n", *(f"{i}\n" for i in range(1, 21))]
            with (fleet.hosts[1].axis / "launches/latest/log").open("a") as file:
                file.write("more\n")
            assert follow.stdout.readline() == "more\n"
        finally:
            follow.terminate()
    assert follow.returncode == 143
    wait_until(lambda: fleet.processes() == before)
    assert "logs host09: host09 is not in the list of hosts" in fleet.run("launcher.sh", "logs", "host09").stderr


def test_what_was_asked_wrongly_is_said_in_a_line(fleet, tmp_path):
    """Catches a mistake that goes on to the hosts, or ends without saying what to type."""
    hosts = fleet.folder / "hosts.txt"
    empty = tmp_path / "empty"
    empty.write_text("# no host\n")
    double = tmp_path / "double"
    double.write_text("a\nb\na\n")
    for words, message in {
        ("status",): "no hosts: use --hosts FILE",
        ("--hosts", hosts, "--restarts", "--", "true"): "--restarts needs a value",
        ("--hosts", hosts, "--restarts", "x", "--", "true"): "--restarts must be a whole number, not 'x'",
        ("--hosts", hosts, "--restarts", "3", "status"): "status does not accept '--restarts'",
        ("--hosts", "nowhere", "status"): "cannot read nowhere; --hosts needs a file",
        ("--hosts", empty, "status"): f"no hosts in {empty}",
        ("--hosts", double, "status"): "a is listed twice",
        ("--hosts",): "--hosts needs a value",
        ("--tpu", "x", "status"): "--tpu x needs --zone",
        ("--hosts", hosts): "no command given: use -- COMMAND",
        ("--hosts", hosts, "strat"): "'strat' is not a command of ./launcher.sh",
        ("--hosts", hosts, "exec"): "exec needs a command: ./launcher.sh exec ... -- COMMAND ...",
        ("--hosts", hosts, "exec", "--"): "exec needs a command: ./launcher.sh exec ... -- COMMAND ...",
        ("--hosts", hosts, "stop", "now"): "stop does not accept 'now'",
        ("--hosts", hosts, "status", "--", "true"): "'status' before -- is not an option",
    }.items():
        done = subprocess.run(
            [fleet.checkout / "launcher.sh", *words], env=fleet.environment, capture_output=True, text=True
        )
        assert done.returncode == 2, words
        assert done.stderr.startswith(f"error: {message}"), done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = fleet.run("launcher.sh", "status", TIMEOUT="1m")
    assert (done.returncode, done.stderr) == (2, "error: TIMEOUT must be a whole number, not '1m'\n")


def test_edits_that_no_commit_holds_are_refused(fleet):
    """Catches a run of something other than what the user sees in his editor."""
    makefile = fleet.checkout / "Makefile"
    text = makefile.read_text()
    try:
        makefile.write_text(text + "# an edit\n")
        done = launch(fleet, "true")
    finally:
        makefile.write_text(text)
    assert done.returncode == 2
    assert done.stderr == "error: uncommitted edits: Makefile; only a commit is copied to the hosts, so commit first\n"
    (fleet.checkout / "new.py").touch()
    try:
        done = launch(fleet, "true")
    finally:
        (fleet.checkout / "new.py").unlink()
    assert (done.returncode, done.stderr) == (0, "WARNING: not copied, because git does not track them: new.py\n")


def test_the_doctor_names_what_is_wrong(fleet):
    """Catches a table in which the one host that differs has to be found by eye."""
    fleet.run("setup_tpu.sh")
    well = fleet.run("launcher.sh", "doctor")
    assert well.returncode == 0, well.stdout
    assert well.stdout.endswith("all is well on 3 hosts\n")
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    folders = [host.axis / "commits" / commit for host in fleet.hosts]
    (folders[0] / ".venv").unlink()
    with (folders[1] / "requirements.txt").open("a") as file:
        file.write("# an edit\n")
    shutil.rmtree(folders[2])
    abandoned = fleet.hosts[2].folder / "libtpu_lockfile"
    abandoned.touch()
    os.chown(abandoned, 65534, -1)  # who is nobody; as another user than root this test cannot
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = ["python3", "-c", hold, fleet.hosts[1].folder / "libtpu_lockfile"]
    held = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with held:
        held.stdout.readline()
        ill = fleet.run("launcher.sh", "doctor")
        held.stdin.close()
    assert ill.returncode == 1
    for line in (
        "host00  PROBLEM: its packages are missing; ./setup_tpu.sh installs them",
        f"host01  PROBLEM: its files differ from commit {commit[:7]}: changed: requirements.txt",
        rf"host01  PROBLEM: its TPU is in use by process {held.pid} \(\w+ \S*python3 -c .*\)",
        f"host02  PROBLEM: commit {commit[:7]} is missing; ./setup_tpu.sh copies it",
        "host02  PROBLEM: its TPU is locked by an unused file that nobody left behind; remove it: sudo rm .*_lockfile",
    ):
        assert re.search(f"^{line}$", ill.stdout, re.MULTILINE), (line, ill.stdout)
    abandoned.unlink()
    shutil.rmtree(folders[1])


@pytest.mark.parametrize("script", ["launcher.sh", "setup_tpu.sh", "debug_tpu.sh"])
def test_help_begins_with_an_example(script):
    """Catches a help without a line to copy."""
    text = subprocess.run([rehearsal.ROOT / script, "--help"], capture_output=True, text=True, check=True).stdout
    paragraphs = text.split("\n\n")
    assert paragraphs[1].startswith("  "), text
    assert script in paragraphs[1]
    assert "Needs" in text
    assert "changes" in text.lower()
