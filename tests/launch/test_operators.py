"""Claims about launcher.sh in the hands of operators: two at once, in a hurry, with hosts at fault."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch import rehearsal
from tests.launch.rehearsal import COUNT, column, launch, launches, log, rows, wait_until

pytestmark = pytest.mark.launch


@contextmanager
def profile(hosts, text):
    """Meanwhile what a shell that ssh starts on these hosts reads first."""
    paths = [host.home / ".bashrc" for host in hosts]
    for path in paths:
        path.write_text(text)
    try:
        yield
    finally:
        for path in paths:
            path.unlink()


def begin(fleet, *words, **environment):
    """Start launcher.sh, and go on."""
    command = [f"{fleet.checkout}/launcher.sh", "--hosts", f"{fleet.folder}/hosts.txt", *words]
    return subprocess.Popen(command, env=fleet.environment | environment, text=True, start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def nothing_runs(fleet):
    states = column("state", fleet.run("launcher.sh", "status").stdout)
    return not any(state.startswith(("running", "restarting")) for state in states)


# Stopping -------------------------------------------------------------------------------------------------------------

SLOW = "trap 'echo asked; sleep 3; echo saved; exit 0' TERM; while :; do sleep 0.1; done"


def said(fleet):
    """Of what SLOW prints, what the hosts' logs hold."""
    return [[line for line in log(host).splitlines() if line in ("asked", "saved")] for host in fleet.hosts]


def test_who_stops_second_waits_for_the_first(fleet):
    """Catches a second SIGTERM, which a run takes for `at once`: the steps since its last checkpoint are lost."""
    launch(fleet, "bash", "-c", SLOW.replace("sleep 3", "sleep 9"))  # a busy machine starts the second stop in 3 s
    with begin(fleet, "stop", "--yes", USER="anna") as first:
        wait_until(lambda: said(fleet) == [["asked"]] * 3)
        second = fleet.run("launcher.sh", "stop", "--yes", USER="ben")
        first_said = first.communicate()[0]
    assert (first.returncode, second.returncode) == (0, 0)
    assert said(fleet) == [["asked", "saved"]] * 3
    assert len(re.findall(r"host0\d  stopped after \d+ s: exit 0; its log ends: saved", first_said)) == 3
    waited = re.findall(r"host0\d  stopped after \d+ s, requested earlier by anna@\S+: exit 0; ", second.stdout)
    assert len(waited) == 3, second.stdout


def test_stop_now_kills_and_says_so(fleet):
    """Catches a kill that a script cannot tell from a stop that saved."""
    launch(fleet, "bash", "-c", SLOW)
    done = fleet.run("launcher.sh", "stop", "--now")
    assert done.returncode == 3, done.stderr
    assert len(re.findall(r"host0\d  killed after \d s: exit 137; ", done.stdout)) == 3
    assert said(fleet) == [[]] * 3


# Starting on all hosts, or on none ------------------------------------------------------------------------------------


def test_a_start_that_fails_somewhere_is_undone(fleet):
    """Catches hosts that wait for one whose disk was full, until somebody finds them."""
    launch(fleet, "true")  # so that the commit is there
    fault = (
        'trap "" XFSZ; [ "$SSH_ORIGINAL_COMMAND" ] || case $BASH_EXECUTION_STRING in *" start") ulimit -f 0 ;; esac\n'
    )
    with profile(fleet.hosts[1:2], fault):
        done = launch(fleet, "bash", "-c", COUNT)
    assert done.returncode == 1
    why, error = done.stderr.splitlines()
    assert re.fullmatch("host01  FAILED: .*(too large|No space left).*", why)
    assert error == "error: nothing was started, because the hosts above were not ready to start"
    assert nothing_runs(fleet)
    assert not fleet.processes()


def test_two_operators_in_opposite_order_leave_no_mixture(fleet):
    """Catches half of the hosts with one run and half with another, each waiting for the rest."""
    launch(fleet, "true")
    there = ["--", "bash", "-c", COUNT]
    names = [host.name for host in fleet.hosts]
    with begin(fleet, *there, PARALLEL="1", USER="anna") as anna:
        ben = fleet.run("launcher.sh", *there, input="\n".join(reversed(names)), PARALLEL="1", USER="ben")
        anna.communicate()
    status = fleet.run("launcher.sh", "status")
    running = {row["launch"] for row in rows(status.stdout).values() if row["state"] == "running"}
    ends = sorted([anna.returncode, ben.returncode])
    assert ends == ([0, 1] if running else [1, 1])
    assert nothing_runs(fleet) or column("state", status.stdout) == ["running"] * 3
    assert len(running) <= 1


def test_ctrl_c_while_it_starts_undoes_it(fleet):
    """Catches a launch that its operator believes to be cancelled, and that runs on the hosts that were faster."""
    launch(fleet, "true")
    held, asked = fleet.folder / "held", fleet.folder / "asked"
    held.touch()
    waits = (
        f'case $BASH_EXECUTION_STRING in *" start") touch {asked}; while [ -e {held} ]; do sleep 0.1; done ;; esac\n'
    )
    with profile(fleet.hosts[1:2], waits), begin(fleet, "--", "bash", "-c", COUNT) as starting:
        wait_until(asked.exists)
        os.kill(starting.pid, signal.SIGINT)
        said = starting.communicate()[1]
        held.unlink()
    assert starting.returncode == 130
    assert said == "error: nothing was started, because you canceled it\n"
    time.sleep(1)  # what waited on host01 goes on now, and must not start
    assert nothing_runs(fleet)
    assert not fleet.processes()


CHECKED = """case $* in
  *"--run.check only")
    if [ "$JAX_PROCESS_ID" = 1 ] || [ "$2" = all ]; then echo noise; echo "error: $1" >&2; exit 2; fi ;;
  *) echo "$*"; sleep 100 ;;
esac"""


def test_what_main_refuses_starts_nowhere(fleet):
    """Catches a wrong flag that is found when 32 hosts have started, and is said in none of their last lines."""
    program = fleet.folder / "main.py"
    program.write_text(CHECKED)
    before = launches(fleet)
    one = launch(fleet, "sh", str(program), "no tokens here", "one")
    everywhere = launch(fleet, "sh", str(program), "3 x 5 is not 8", "all")
    assert (one.returncode, everywhere.returncode) == (1, 1)
    nothing = "error: nothing was started, because main.py would not run on these hosts\n"
    assert one.stderr == "host01  FAILED: error: no tokens here\n" + nothing
    assert everywhere.stderr.startswith("host00 and 2 more  FAILED: error: 3 x 5 is not 8\n")
    assert launches(fleet) == before
    assert launch(fleet, "sh", str(program), "-", "none").returncode == 1  # host01 refuses still
    program.write_text(CHECKED.replace('"$JAX_PROCESS_ID" = 1', '"$AXIS_RESTART_WAIT$AXIS_PROCESSES" != 773'))
    done = launch(fleet, "sh", str(program), "-", "none", options=["--restarts", "2"], RESTART_WAIT="77")
    assert done.returncode == 0, done.stderr
    assert column("last line", done.stdout) == ["- none"] * 3


# Hosts that are not as they should be ---------------------------------------------------------------------------------


def test_what_a_login_prints_is_no_answer(fleet):
    """Catches a message of the day that becomes the coordinator's address, or a column of a table."""
    noise = "echo 'Welcome to the cluster'; printf 'quota: 80%%\\t'; echo 'be nice' >&2\n"
    with profile(fleet.hosts, noise):
        done = launch(fleet, "bash", "-c", COUNT)
        assert done.returncode == 0, done.stderr
        assert "Welcome" not in done.stdout + done.stderr
        assert log(fleet.hosts[2]).startswith(f"2 of 3 at 127.0.0.2:{fleet.coordinator_port}, ")
        assert fleet.run("launcher.sh", "doctor").stdout.endswith("all is well on 3 hosts\n")
        assert {len(line) for line in fleet.run("launcher.sh", "logs", "-n", "1").stdout.splitlines()} < {*range(30)}


HOSTILE = """export POSIXLY_CORRECT=1 CDPATH=.:$HOME BASH_ENV=$HOME/.hostile PYTHONPATH=/nowhere PYTHONSAFEPATH=1
set -o noclobber; set -o posix; export SHELLOPTS; cd / && cd - > /dev/null
alias python3=false; TMOUT=1; echo "quota: 80%"
"""


def test_a_shell_with_unusual_settings_changes_nothing(fleet):
    """Catches exit statuses that read 127, rows broken by what `cd` prints, and advice to delete a good commit."""
    host = fleet.hosts[1]
    (host.home / ".hostile").write_text("set -C\n")
    ends = REPORT + "alive 60 joined; exit 75"
    with profile([host], HOSTILE):
        done = launch(fleet, "bash", "-c", ends, options=["--restarts", "1"], RESTART_WAIT="0")
        assert "PROBLEM" not in done.stdout, done.stdout
        assert done.stderr == ""
        wait_until(lambda: column("state", fleet.run("launcher.sh", "status").stdout) == ["exit 75"] * 3)
        doctor = fleet.run("launcher.sh", "doctor")
        assert doctor.stdout.endswith("all is well on 3 hosts\n"), doctor.stdout
    again = "supervisor: the command exited with status 75; restarting in 0 s, 1 of 1\nsupervisor: restarted, 1 of 1\n"
    assert [log(host).replace("quota: 80%\n", "") for host in fleet.hosts] == [again] * 3


def test_a_host_that_failed_is_not_compared_with_the_others(fleet):
    """Catches a healthy host that is blamed, because text of one that does not answer was read as its Python."""
    fleet.run("setup_tpu.sh")
    with profile(fleet.hosts[:2], "echo MOTD; exit 0\n"):
        status, doctor = fleet.run("launcher.sh", "status"), fleet.run("launcher.sh", "doctor")
    assert "PROBLEM" not in status.stdout + doctor.stdout
    assert (status.returncode, doctor.returncode) == (1, 1)
    assert status.stderr.count("no valid answer: the host prints: MOTD") == 2


@pytest.mark.parametrize("how", ["exit", "forced"])
def test_no_answer_is_no_success(fleet, how):
    """Catches `stopped` from a host on which nothing was done, and goes on running."""
    launch(fleet, "bash", "-c", COUNT)
    host = fleet.hosts[1]
    keys = host.folder / "authorized_keys"
    text = keys.read_text()
    if how == "forced":
        keys.write_text('command="echo only backups here" ' + text)
    try:
        with profile([host], "exit 0\n" if how == "exit" else "\n"):
            stop = fleet.run("launcher.sh", "stop")
            status = fleet.run("launcher.sh", "status")
    finally:
        keys.write_text(text)
    does = "prints: only backups here" if how == "forced" else "exits"
    assert stop.returncode == status.returncode == 1
    assert f"host01  FAILED: no valid answer: the host {does}; check the shell's startup files on host01" in stop.stderr
    assert re.search("host01 +FAILED\n", status.stdout)
    assert column("state", fleet.run("launcher.sh", "status").stdout) == [
        "stopped, exit 0",
        "running",
        "stopped, exit 0",
    ]


def test_one_machine_under_two_names_is_named_once(fleet):
    """Catches two processes in one folder of one machine: both `ready`, then one FAILED."""
    config = fleet.folder / "ssh_config"
    text = config.read_text()
    config.write_text(f"Host twin\n  HostName {fleet.hosts[1].address}\n" + text)
    before = launches(fleet)
    done = fleet.run("launcher.sh", "--", "true", input="host00\nhost01\ntwin\n")
    config.write_text(text)
    assert done.returncode == 1
    assert done.stderr == "error: nothing was started, because host01 and twin are the same machine; list it once\n"
    assert launches(fleet) == before


def test_what_may_go_wrong_is_a_warning_at_the_launch(fleet):
    """Catches a host whose files come from the future, or whose TPU nobody can open, which doctor alone would name."""
    folder = fleet.folder / "bin"
    folder.mkdir()
    ahead = "import time; now = time.time; time.time = lambda: now() + 5184000; "
    started = f'exec {sys.executable} -I -c "{ahead}$3" "${{@:4}}"'
    (folder / "python3.11").write_text(f'#!/bin/bash\n[ "$1" != -I ] || {started}\nexec {sys.executable} "$@"\n')
    (folder / "python3.11").chmod(0o755)
    left = fleet.hosts[1].folder / "libtpu_lockfile"
    left.touch()
    os.chown(left, 65534, -1)  # who is nobody; as another user than root this test cannot
    with profile(fleet.hosts[2:], f"PATH={folder}:$PATH\n"):
        done = launch(fleet, "true")
    left.unlink()
    assert done.returncode == 0
    warnings = [line for line in done.stdout.splitlines() if "WARNING" in line]
    assert (
        warnings[0]
        == f"host01  WARNING: its TPU is locked by an unused file that nobody left behind; remove it: sudo rm {left}"
    )
    assert re.match(r"host02  WARNING: its clock differs by 5184\d\d\d s from this machine's; is ", warnings[1])
    assert len(warnings) == 2


def test_lists_of_hosts_as_people_have_them(fleet):
    """Catches a file that Windows wrote, and a port or a folder where a host should stand, said in ssh's words."""
    done = fleet.run("launcher.sh", "status", input="\ufeffhost00\r\nhost01\r\n")
    assert [*rows(done.stdout)] == ["host00", "host01"], done.stderr
    for words, input, message in (
        (["status"], "anna@host00:2222\n", "'anna@host00:2222': write the port as ssh://anna@host00:2222"),
        (
            ["status", "--only", "host01,host09"],
            "host00\nhost01\n",
            "--only host01,host09: host09 is not in the list of hosts",
        ),
        (["logs", "-n", "x"], "host00\n", "-n must be a whole number, not 'x'"),
        (["--env", "NO_SUCH", "--", "true"], "host00\n", "--env NO_SUCH: this variable is not set here"),
        (["stop", "now"], "host00\n", "stop does not accept 'now'"),
    ):
        done = fleet.run("launcher.sh", *words, input=input)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
        assert done.stderr.startswith(f"error: {message}"), done.stderr
    done = subprocess.run([f"{fleet.checkout}/launcher.sh", "status", "--hosts", fleet.folder], text=True,
                          capture_output=True, env=fleet.environment)  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        f"error: --hosts {fleet.folder} is a directory; use a file with one host per line\n",
    )


def test_only_these_hosts(fleet):
    """Catches --only that a subcommand does not heed."""
    done = fleet.run("launcher.sh", "--only", "host02,host00", "--", "bash", "-c", COUNT)
    assert [*rows(done.stdout)] == ["host00", "host02"], done.stderr
    assert log(fleet.hosts[2]).startswith("1 of 2 ")
    assert "host01" not in fleet.run("launcher.sh", "logs", "--only", "host02", "-n", "1").stdout
    assert fleet.run("launcher.sh", "stop", "--only", "host02").returncode == 0
    assert column("state", fleet.run("launcher.sh", "status", "--only", "host00").stdout) == ["running"]


# Who runs what --------------------------------------------------------------------------------------------------------


def test_a_key_travels_unseen(fleet):
    """Catches a key that stays readable on every host, or stands in the list of processes."""
    tell = 'echo "$AXIS_TEST_KEY" > ~/key; tr "\\0" " " < /proc/$$/cmdline > ~/line; sleep 100'
    words = ["--env", "AXIS_TEST_KEY", "--", "env", "OTHER_API_KEY=visible", "bash", "-c", tell]
    done = fleet.run("launcher.sh", *words, AXIS_TEST_KEY="se cret\n2")
    assert done.returncode == 0, done.stderr
    for host in fleet.hosts:
        wait_until((host.home / "line").exists)
        assert (host.home / "key").read_text() == "se cret\n2\n"
        assert "cret" not in (host.home / "line").read_text()
        folder = (host.axis / "launches/latest").resolve()
        for name in ("launch.json", "agent.py", "log"):
            assert (folder / name).stat().st_mode & 0o077 == 0, name
        (host.home / "line").unlink()
    status = fleet.run("launcher.sh", "status").stdout
    assert "OTHER_API_KEY=***" in status
    assert "visible" not in status
    dry = fleet.run("launcher.sh", *words, AXIS_TEST_KEY="se cret", DRY_RUN="1")
    assert "cret" not in dry.stdout
    assert "AXIS_TEST_KEY" in dry.stdout


def test_whose_run_it_is_is_said_and_asked(fleet):
    """Catches somebody's run of three days that a colleague replaces without knowing."""
    fleet.run("launcher.sh", "--", "bash", "-c", COUNT, USER="anna")
    status = fleet.run("launcher.sh", "status").stdout
    assert re.search(r"^\S+ by anna@\S+: bash -c trap 'echo saved; exit 0' TERM ", status, re.MULTILINE), status
    refused = launch(fleet, "true", USER="ben")
    names_it = r"host0\d  FAILED: a run is alive here: \S+ since .* by anna@\S+: bash -c "
    assert len(re.findall(names_it, refused.stderr)) == 3
    asked = launch(fleet, "true", options=["--replace"], USER="ben")
    assert asked.returncode == 2
    owned = r"error: anna@\S+ started this run, not ben@\S+; ask them first, or stop it with {} --yes\n"
    assert re.fullmatch(owned.format("--replace"), asked.stderr)
    stop = fleet.run("launcher.sh", "stop", USER="ben")
    assert (stop.returncode, stop.stdout) == (2, "")
    assert re.fullmatch(owned.format("stop"), stop.stderr)
    assert column("state", fleet.run("launcher.sh", "status").stdout) == ["running"] * 3
    assert launch(fleet, "true", options=["--replace", "--yes"], USER="ben").returncode == 0


def test_status_for_programs_and_for_small_screens(fleet):
    """Catches JSON that no parser takes, a host in trouble that has to be found among 31 that are well."""
    report = """printf '7\\t9\\t2.5\\t100\\t1\\n' > "$AXIS_PROGRESS"; echo '"quoted" \\ é'
    [ $HOST_NAME != host01 ] || exit 3"""
    launch(fleet, "bash", "-c", f"{report}; sleep 100")
    found = json.loads(fleet.run("launcher.sh", "status", "--json").stdout)
    assert [(row["host"], row["state"]) for row in found] == [
        ("host00", "running"), ("host01", "exit 3"), ("host02", "running")]  # fmt: skip
    assert {(row["step"], row["steps"], row["loss"]) for row in found} == {(7, 9, 2.5)}
    assert {row["last_line"] for row in found} == {'"quoted" \\ é'}
    short = fleet.run("launcher.sh", "status", "--short")
    assert short.returncode == 1
    assert [*rows(short.stdout.rpartition("\n2 hosts")[0])] == ["host01"]
    said = r"2 hosts are well; host00: running, step 7/9 \(\d+ s ago\), loss 2.5, tokens/s 100\n"
    assert re.fullmatch(said, "2 hosts" + short.stdout.rpartition("\n2 hosts")[2])


# Beside a run, and after it -------------------------------------------------------------------------------------------


def test_a_follower_of_logs_follows_the_next_run(fleet):
    """Catches `logs -f`, and panes, that show a run which is long over."""
    launch(fleet, "bash", "-c", "echo first; sleep 100")
    with begin(fleet, "logs", "host01", "-f") as follow:
        assert follow.stdout.readline() == "first\n"
        launch(fleet, "bash", "-c", "echo second; sleep 100", options=["--replace"])
        assert re.match(r"supervisor: launch \S+ since .*: bash -c echo second", follow.stdout.readline())
        assert follow.stdout.readline() == "second\n"
        follow.terminate()
        rest, errors = follow.communicate()
    assert (rest, errors) == ("", "")
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0logs\0")
                               for pid in fleet.processes()))  # fmt: skip


def test_a_command_beside_the_run_and_one_at_its_end(fleet):
    """Catches an exec outside the commit, and an end of which nobody hears."""
    ends = 'echo "ended with $AXIS_EXIT on $HOST_NAME in ${PWD##*/}" > ~/ended'
    done = launch(fleet, "bash", "-c", "sleep 2; exit 7", options=["--on-end", ends])
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    beside = fleet.run("launcher.sh", "exec", "--", "bash", "-c", 'echo "${PWD##*/}"; printf %s "$1"', "_", "it's")
    assert beside.returncode == 0, done.stderr
    assert sorted(beside.stdout.splitlines()) == [
        f"{host.name} | {said}" for host in fleet.hosts for said in sorted((commit, "it's"))
    ]
    assert fleet.run("launcher.sh", "exec", "--only", "host01", "--", "false").returncode == 1
    wait_until((fleet.hosts[0].home / "ended").exists)
    assert (fleet.hosts[0].home / "ended").read_text() == f"ended with 7 on host00 in {commit}\n"
    assert not (fleet.hosts[1].home / "ended").exists()


def test_a_run_is_fetched_and_old_ones_are_cleaned_away(fleet, tmp_path):
    """Catches other bytes than the host's, half a run, a disk that old launches fill, a clean that takes more."""
    launch(
        fleet,
        "bash",
        "-c",
        "mkdir -p runs/r/checkpoints; head -c 300000 /dev/urandom > runs/r/checkpoints/x; echo 1 > runs/r/m",
    )
    wait_until(lambda: (fleet.hosts[0].axis / "runs/r/m").exists())
    into = tmp_path / "here"
    with profile(fleet.hosts, "echo noise\n"):
        done = fleet.run("launcher.sh", "fetch", "r", str(into))
    assert done.returncode == 0, done.stderr
    assert (into / "checkpoints/x").read_bytes() == (fleet.hosts[0].axis / "runs/r/checkpoints/x").read_bytes()
    assert fleet.run("launcher.sh", "fetch", "r", str(into)).returncode == 2
    absent = fleet.run("launcher.sh", "fetch", "s", str(tmp_path / "s"))
    assert (absent.returncode, absent.stderr) == (1, "host00  FAILED: runs/s does not exist; existing runs: r\n")
    for name in ("../launches", "..", "a/b", ""):  # a launch's folder holds the keys of --env
        refused = fleet.run("launcher.sh", "fetch", name, str(tmp_path / "x"))
        assert refused.returncode == 2
        assert refused.stderr == f"error: '{name}' is not a valid run name: use letters, digits, '.', '_' and '-'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]

    old = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    new = rehearsal.commit(fleet.checkout, "Another commit")
    launch(fleet, "true")
    last = (fleet.hosts[0].axis / "launches/latest").readlink()
    done = fleet.run("launcher.sh", "clean", KEEP="1")
    assert done.returncode == 0, done.stderr
    assert f"commits/{old[:18]}" in done.stdout
    for host in fleet.hosts:
        assert [path.name for path in (host.axis / "commits").iterdir()] == [new]
        assert {path.name for path in (host.axis / "launches").iterdir()} == {"latest", str(last)}
        assert (host.axis / "runs/r/m").exists() == (host is fleet.hosts[0]) or (host.axis / "runs/r").exists()


def test_runs_in_folders_of_their_own(fleet):
    """Catches two runs on the same hosts that take each other's session, lock or port."""
    assert launch(fleet, "bash", "-c", COUNT).returncode == 0
    other = {"HOST_FOLDER": "second", "COORDINATOR_PORT": str(rehearsal.free_port())}
    try:
        done = launch(fleet, "bash", "-c", COUNT, **other)
        assert done.returncode == 0, done.stderr
        assert column("state", done.stdout) == ["running"] * 3
    finally:
        assert fleet.run("launcher.sh", "stop", **other).returncode == 0
    assert column("state", fleet.run("launcher.sh", "status").stdout) == ["running"] * 3


# Watching over it -----------------------------------------------------------------------------------------------------

REPORT = """alive() { printf '%s\\t%s\\n' "$@" > "$AXIS_ALIVE.new"; mv "$AXIS_ALIVE.new" "$AXIS_ALIVE"; }
"""


def test_a_frozen_command_is_killed_by_its_own_host(fleet, tmp_path):
    """Catches a process that is frozen, holds the lock, and lets the others start again in vain."""
    once = tmp_path / "once"
    freezes = (
        REPORT + f"alive 2 joined; if [ $HOST_NAME = host01 ] && [ ! -e {once} ]; then touch {once}; kill -STOP $$; fi"
    )
    beats = "; while :; do alive 2 joined; sleep 0.5; done"
    launch(fleet, "bash", "-c", freezes + beats, options=["--restarts", "1"], RESTART_WAIT="1")
    host = fleet.hosts[1]
    wait_until(lambda: "restarted, 1 of 1" in log(host), 30)
    lines = log(host).splitlines()
    assert re.fullmatch(r"supervisor: no heartbeat from the command for \d+ s; killing it", lines[0])
    assert lines[1] == "supervisor: the command exited with status 137; restarting in 1 s, 1 of 1"
    assert [log(other) for other in (fleet.hosts[0], fleet.hosts[2])] == ["", ""], "who is well is left alone"


def test_an_attempt_that_not_all_joined_is_not_counted(fleet, tmp_path):
    """Catches hosts that spend their restarts while one of them is away, and are gone when it is back."""
    waits = REPORT + f"alive 60 joining; [ -e {tmp_path}/back ] || exit 75; alive 60 joined; echo all; exit 1"
    launch(fleet, "bash", "-c", waits, options=["--restarts", "1"], RESTART_WAIT="1")
    wait_until(lambda: all("attempt 3 of 12" in log(host) for host in fleet.hosts))
    (tmp_path / "back").touch()
    wait_until(lambda: column("state", fleet.run("launcher.sh", "status").stdout) == ["exit 1"] * 3)
    for host in fleet.hosts:
        text = log(host)
        assert "restarting in 1 s, 0 of 1 used; not counted: not all processes joined, attempt 1 of 12\n" in text
        assert text.count("all\n") == 2, "one restart that counts, and no more"


def test_a_log_that_grows_is_kept_small(fleet):
    """Catches a disk that a log fills in a week."""
    launch(fleet, "bash", "-c", "seq 300000; sleep 7; echo later; sleep 100", LOG_MIB="1")
    host = fleet.hosts[0]
    wait_until(lambda: log(host) == "later\n", 30)
    assert (host.axis / "launches/latest/log.old").read_text().endswith("300000\n")
