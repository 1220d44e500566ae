"""Claims about debug_tpu.sh: a pane for each host, in a real tmux."""

import os
import pty
import subprocess
import termios
import threading
from contextlib import contextmanager, suppress

import pytest

from tests.launch import rehearsal
from tests.launch.rehearsal import wait_until

pytestmark = pytest.mark.launch


@pytest.fixture(params=[8, 10])  # a window of eight panes, and a second one of fewer
def opened(request):
    """Hosts, and the tmux of the one who looks at them."""
    with rehearsal.rehearse(request.param) as fleet:
        ours = {"TMUX_TMPDIR": str(fleet.folder), "TMUX": ""}

        def tmux(*words):
            command = ["tmux", "-L", "axis-debug", *words]
            return subprocess.run(command, env=os.environ | ours, capture_output=True, text=True, check=True).stdout

        try:
            yield fleet, ours, tmux
        finally:
            with suppress(subprocess.CalledProcessError):
                tmux("kill-server")


def panes(tmux):
    """Window name -> the host of each of its panes."""
    found = {}
    for line in tmux("list-panes", "-s", "-t", "axis", "-F", "#{window_name} #{pane_id} #{@host}").splitlines():
        window, pane, *host = line.split()
        found.setdefault(window, {})[pane] = host[0] if host else ""
    return found


def screen(tmux, pane):
    """Return a pane's text with its history: tmux resizes panes as it opens them, which may scroll lines away."""
    return tmux("capture-pane", "-p", "-S", "-", "-t", pane)


def shows(tmux, window, text):
    """Wait until every pane of a window shows the text, in which HOST is its host's name."""
    hosts = panes(tmux)[window].items()
    wait_until(lambda: all(text.replace("HOST", host) in screen(tmux, pane) for pane, host in hosts), 60)


@contextmanager
def attached(ours, target):
    """A terminal of 220 columns that is attached to the windows; what is written to it is typed."""
    keyboard, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (55, 220))
    command = ["tmux", "-L", "axis-debug", "attach", "-t", target]
    environment = os.environ | ours | {"TERM": "xterm"}
    client = subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)

    def read():
        with suppress(OSError):  # what a terminal says when nobody is left at its other end
            while os.read(keyboard, 4096):
                pass

    reader = threading.Thread(target=read)  # unread, what is drawn would stop the one who draws it
    reader.start()
    try:
        yield keyboard
    finally:
        client.terminate()
        client.wait(timeout=10)
        reader.join(timeout=10)
        os.close(keyboard)


def test_each_host_has_a_pane_that_shows_it(opened):
    """Catches a host without a pane, a title over another host's output, typing into too few or too many."""
    fleet, ours, tmux = opened
    count = len(fleet.hosts)
    names = [host.name for host in fleet.hosts]
    words = ["bash", "-c", 'echo "log of $HOST_NAME"; sleep 1000']
    assert fleet.run("launcher.sh", "--", *words).returncode == 0
    done = fleet.run("debug_tpu.sh", **ours)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"to see {count} hosts: tmux -L axis-debug attach\n"
    expected = {f"hosts-{i}-{min(i + 7, count - 1)}": names[i : i + 8] for i in range(0, count, 8)}
    found = panes(tmux)
    assert len(found.pop("monitor")) == 1
    assert {window: list(hosts.values()) for window, hosts in found.items()} == expected
    for window in expected:
        shows(tmux, window, "log of HOST")
    again = fleet.run("debug_tpu.sh", **ours)
    assert again.returncode == 2
    assert again.stderr.startswith("error: debug_tpu.sh is already open: tmux -L axis-debug attach, or")

    monitor = lambda: tmux("capture-pane", "-p", "-t", "axis:monitor")  # may come in the middle of a table
    wait_until(lambda: "GiB" in (text := monitor()) and all(name in text for name in names), 120)
    if count > 8:
        return

    window = next(iter(expected))
    with attached(ours, f"axis:{window}") as keyboard:
        wait_until(lambda: tmux("list-clients"))
        os.write(keyboard, b"\x02y")
        wait_until(lambda: tmux("show-options", "-wv", "-t", window, "synchronize-panes") == "on\n")
        os.write(keyboard, b"\x03")  # ends `tail`, and leaves a shell
        wait_until(lambda: all(screen(tmux, pane).rstrip().endswith(("$", "#")) for pane in found[window]), 60)
        os.write(keyboard, b"echo all $HOST_NAME\r")
        shows(tmux, window, "\nall HOST\n")
        os.write(keyboard, b"\x02y")
        wait_until(lambda: tmux("show-options", "-wv", "-t", window, "synchronize-panes") == "off\n")
        os.write(keyboard, b"echo one $HOST_NAME\r")
        active = wait_until(lambda: [pane for pane in found[window] if "\none host" in screen(tmux, pane)])
        assert len(active) == 1
    tmux("kill-server")
    status = fleet.run("launcher.sh", "status")
    assert status.returncode == 0, "looking at a run has ended it"

    done = fleet.run(
        "debug_tpu.sh", "--", "bash", "-c", 'echo "$1 of $HOST_NAME"; which python', "_", "it's $HOME", **ours
    )
    assert done.returncode == 0, done.stderr
    shows(tmux, window, "it's $HOME of HOST")
    shows(tmux, window, ".venv/bin/python")


def test_a_dry_run_opens_nothing(tmp_path):
    """Catches a dry run that opens windows, or leaves one out of what it prints."""
    hosts = "".join(f"host{i:02}\n" for i in range(17))
    environment = os.environ | {"DRY_RUN": "1", "TMUX_TMPDIR": str(tmp_path)}
    command = [rehearsal.ROOT / "debug_tpu.sh", "-"]
    done = subprocess.run(command, input=hosts, env=environment, capture_output=True, text=True, check=True)
    assert [done.stdout.count(word) for word in (" new-session ", " new-window ", " split-window ")] == [1, 3, 14]
    assert list(tmp_path.iterdir()) == []


def test_a_small_terminal_has_fewer_panes_in_a_window(tmp_path):
    """Catches eight panes of two lines each in a terminal of 80 x 24, and a tmux in a tmux that is not said."""
    keyboard, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    environment = os.environ | {"DRY_RUN": "1", "TMUX": "/tmp/outer,1,0", "TMUX_TMPDIR": str(tmp_path)}
    names = tmp_path / "hosts.txt"
    names.write_text("".join(f"host{i:02}\n" for i in range(7)))
    words = ["setsid", "--ctty", "--wait", rehearsal.ROOT / "debug_tpu.sh", "--hosts", names]
    subprocess.run(words, env=environment, stdin=terminal, stdout=terminal, stderr=terminal, check=True)
    os.close(terminal)
    said = ""
    with suppress(OSError):  # what a terminal says when all is read
        while part := os.read(keyboard, 65536):
            said += part.decode()
    os.close(keyboard)
    assert [said.count(f" {word} ") for word in ("new-window", "split-window")] == [3, 4]
    assert "-x 80 -y 24" in said
    assert "prefix twice (inside another tmux)" in said


def test_a_pane_says_why_its_host_is_not_there_and_tries_again():
    """Catches a dead pane without a word, and one that stays dead when its host is back."""
    with rehearsal.rehearse(2) as fleet:
        ours = {"TMUX_TMPDIR": str(fleet.folder), "TMUX": ""}
        assert fleet.run("launcher.sh", "--", "bash", "-c", 'echo "log of $HOST_NAME"; sleep 1000').returncode == 0
        gone = fleet.hosts[1]
        gone.sshd.terminate()
        gone.sshd.wait(timeout=10)

        def tmux(*words):
            command = ["tmux", "-L", "axis-debug", *words]
            return subprocess.run(command, env=os.environ | ours, capture_output=True, text=True, check=True).stdout

        try:
            assert fleet.run("debug_tpu.sh", **ours).returncode == 0
            pane = next(pane for pane, host in panes(tmux)["hosts-0-1"].items() if host == gone.name)
            wait_until(
                lambda: "host01 cannot be reached, or the connection is cut; retrying in 10 s" in screen(tmux, pane)
            )
            sshd = [rehearsal.SSHD, "-D", "-f", gone.folder / "sshd_config"]
            gone.sshd = subprocess.Popen(sshd, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_until(lambda: "log of host01" in screen(tmux, pane), 30)
        finally:
            with suppress(subprocess.CalledProcessError):
                tmux("kill-server")
