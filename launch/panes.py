"""Show all hosts, e.g. of a TPU slice, in tmux: one pane per host, up to 8 per window, and a monitor of all hosts.

  ./debug_tpu.sh --hosts hosts.txt                          # follow the run's log on every host
  ./debug_tpu.sh --tpu my-slice --zone us-central2-b -- df -h .

A command runs in the commit that launcher.sh started last, with its packages. While a run is using the TPU, your
command must not open the TPU. When the command ends, or after Ctrl-C, its pane becomes a shell on the host. If a host
cannot be reached, its pane shows why, and reconnects. The monitor lists the hosts with problems, and prints one line
for all others. In tmux, Ctrl-B y switches between typing into one pane and into all panes of the window. Inside another
tmux, press Ctrl-B twice. To close the windows, run tmux -L axis-debug kill-server. This ends the commands in the panes,
but never a run that launcher.sh started.

Hosts and settings: see ./launcher.sh --help. In a small terminal, a window has fewer than 8 panes. Without a terminal,
debug_tpu.sh prints how to attach to the windows.
Needs: on this machine tmux 3.0 and ssh; on the hosts a commit, copied by setup_tpu.sh or launcher.sh. Changes: nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

from launch.hosts import ROOT, Fleet, UserError, parse

TMUX = ["tmux", "-L", "axis-debug"]  # a separate server, so your other sessions keep their keys and options
FOLLOW = 'exec launches/latest/agent.py "$PWD" logs 1000'
PANE = """while :; do
  status=0
  "${@:2}" || status=$?
  if [ "$status" = 255 ]; then
    printf "\\n%s cannot be reached, or the connection is cut; retrying in 10 s (Enter: now, q: close)\\n" "$1"
    read -r -t 10 -n 1 key || key=
  else
    printf "\\n%s exited with status %s (Enter: run again, q: close)\\n" "$1" "$status"
    read -r -n 1 key || exit
  fi
  [ "$key" != q ] || exit
done"""
MONITOR = """while :; do
  shown=$(printf "%s\\n" "${@:2}" | "$1" - status --short 2>&1; echo; printf "%s\\n" "${@:2}" | "$1" - usage 2>&1)
  clear
  date
  printf "%s\\n" "$shown"
  sleep 5
done"""


def host_command(folder: str, command: list[str]) -> str:
    """Return the shell command for a host: follow the log, or run `command` in the launched commit."""
    latest = 'cd "commits/$(sed -n \'s/.*"commit": "\\([0-9a-f]*\\)".*/\\1/p\' launches/latest/launch.json)" && '
    there = latest + "PATH=$PWD/.venv/bin:$PATH; " + shlex.join(command) if command else FOLLOW.removeprefix("exec ")
    script = f'trap : INT; cd && cd {shlex.quote(folder)} && {there}; exec "${{SHELL:-sh}}"'
    return f"sh -c {shlex.quote(script)}"


def open_windows(fleet: Fleet, command: list[str], lines: int, columns: int) -> None:
    """Open a window with the monitor, then windows with as many panes as fit into the terminal."""
    across, down = max(1, columns // 70), max(1, (lines - 1) // 7)
    many = min(8, across * down)
    size = ("-x", str(columns), "-y", str(lines))
    monitor = ("bash", "-c", MONITOR, "monitor", f"{ROOT}/launcher.sh", *fleet.hosts)
    tmux(fleet, "new-session", "-d", "-s", "axis", "-n", "monitor", *size, *monitor)
    nested = "prefix twice (inside another tmux); " if os.environ.get("TMUX") else ""
    for option, value in {
        "pane-border-status": "top",
        "pane-border-format": " #{@host}#{?synchronize-panes, TYPING INTO ALL,} ",
        "status-right": f"{nested}prefix y: type into all panes, or one",
        "status-right-length": "80",
    }.items():
        tmux(fleet, "set-option", "-g", option, value)
    tmux(fleet, "set-hook", "-g", "client-resized", "select-layout tiled")
    tmux(fleet, "bind-key", "y", "set-option", "-w", "synchronize-panes")
    for first in range(0, len(fleet.hosts), many):
        window = f"hosts-{first}-{min(first + many, len(fleet.hosts)) - 1}"
        for number, host in enumerate(fleet.hosts[first : first + many]):
            pane = ("bash", "-c", PANE, "pane", host, *fleet.ssh, "-t", "--", host, host_command(fleet.folder, command))
            new = (
                ("split-window", "-t", f"axis:{window}")
                if number
                else ("new-window", "-d", "-t", "axis:", "-n", window)
            )
            tmux(fleet, *new, *pane)
            tmux(fleet, "set-option", "-p", "-t", f"axis:{window}", "@host", host)
            tmux(fleet, "select-layout", "-t", f"axis:{window}", "tiled")
    tmux(fleet, "next-window", "-t", "axis")


def tmux(fleet: Fleet, *words: str) -> None:
    if fleet.dry:
        print(shlex.join([*TMUX, *words]))
    else:
        subprocess.run([*TMUX, *words], check=True)


def run(argv: list[str]) -> int:
    *_, command, hosts = parse(["debug", *argv], {"debug": ("", -1)}, "./debug_tpu.sh")
    fleet = Fleet(hosts)
    if not shutil.which("tmux"):
        raise UserError("tmux is missing; install it: apt-get install tmux, or brew install tmux")
    if not fleet.dry and subprocess.run([*TMUX, "has-session"], capture_output=True).returncode == 0:
        raise UserError(f"debug_tpu.sh is already open: {shlex.join(TMUX)} attach, or {shlex.join(TMUX)} kill-server")
    columns, lines = os.get_terminal_size(1) if sys.stdout.isatty() else (220, 55)
    open_windows(fleet, command, lines, columns)
    if fleet.dry:
        tmux(fleet, "attach")
    elif sys.stdin.isatty() and sys.stdout.isatty():
        if os.environ.pop("TMUX", ""):
            print("inside another tmux: press the prefix twice, Ctrl-B Ctrl-B, to reach this one", file=sys.stderr)
        os.execvp("tmux", [*TMUX, "attach"])
    else:
        print(f"to see {len(hosts)} hosts: {shlex.join(TMUX)} attach")
    return 0
