#!/usr/bin/env bash
# Look at every host of a slice at once: tmux windows of 8 hosts, a pane for each, and one that shows how they all fare.
#
#   ./debug_tpu.sh --hosts hosts.txt                          # follow the run's log on every host
#   ./debug_tpu.sh --tpu my-slice --zone us-central2-b -- df -h .
#
# A command runs in the launched commit, with its packages; while a run holds the TPU, not one that opens it too. When it
# ends, or after Ctrl-C, its pane is a shell on the host. A pane whose host is gone says why, and tries again. The monitor
# shows hosts in trouble, and a line for all others.
# Within tmux, Ctrl-B y types into all panes of the window, and again Ctrl-B y into one; where it was started from within
# another tmux, type Ctrl-B twice. Closing it (tmux -L axis-debug kill-server) ends what runs in the panes, never a run
# that launcher.sh started.
#
# Hosts and settings: as launcher.sh --help says. A window has as many panes, at most 8, as the terminal has room for.
# Without a terminal it says how to attach to the windows instead.
# Needs: here tmux 3.0 and ssh; there a commit, which setup_tpu.sh or launcher.sh brings. Changes: nothing.
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

read_command_line "$@"
[ ${#words[@]} = 0 ] || fail "'${words[0]}' is none of its options; see $0 --help"
command -v tmux > /dev/null || fail "tmux is missing: apt-get install tmux, or brew install tmux"
tmux=(tmux -L axis-debug) # a server of its own: the key and the options below are not for your other sessions
if [ -z "$dry" ] && "${tmux[@]}" has-session 2> /dev/null; then
  fail "it is open: ${tmux[*]} attach, or ${tmux[*]} kill-server"
fi

in_tmux() {
  if [ -n "$dry" ]; then printf '%s\n' "$(quoted "${tmux[@]}" "$@")"; else "${tmux[@]}" "$@"; fi
}

# What the shell of a host is told: its words are ours, or quoted.
if [ ${#command[@]} -gt 0 ]; then
  # shellcheck disable=SC2016  # for the host
  there='cd "commits/$(cat launches/latest/commit 2> /dev/null || ls -t commits | head -n 1)" && PATH=$PWD/.venv/bin:$PATH; '
  there="$there$(quoted "${command[@]}")"
else
  # shellcheck disable=SC2016  # for the host
  there='bash "commits/$(cat launches/latest/commit)/run.sh" "$PWD" logs 1000 follow'
fi
there="trap : INT; cd && cd $(quoted "$folder") && $there; exec \"\${SHELL:-sh}\""

# shellcheck disable=SC2016  # for the pane's bash
pane='while :; do
  status=0
  "${@:2}" || status=$?
  if [ "$status" = 255 ]; then
    printf "\n%s cannot be reached, or the connection is cut; again in 10 s (Enter: now, q: close)\n" "$1"
    read -r -t 10 -n 1 key || key=
  else
    printf "\n%s has ended with status %s (Enter: again, q: close)\n" "$1" "$status"
    read -r -n 1 key || exit
  fi
  [ "$key" != q ] || exit
done'
# shellcheck disable=SC2016  # for the window's bash
monitor='while :; do
  shown=$(printf "%s\n" "${@:2}" | "$1" - status --short 2>&1; echo; printf "%s\n" "${@:2}" | "$1" - usage 2>&1)
  clear
  date
  printf "%s\n" "$shown"
  sleep 5
done'

# A pane wants 70 columns and 7 lines.
lines=55 columns=220
if [ -t 1 ]; then read -r lines columns < <(stty size < /dev/tty) || true; fi
across=$((columns < 140 ? 1 : columns / 70)) down=$((lines < 14 ? 1 : (lines - 1) / 7))
many=$((across * down < 8 ? across * down : 8))

in_tmux new-session -d -s axis -n monitor -x "$columns" -y "$lines" bash -c "$monitor" monitor "$root/launcher.sh" "${hosts[@]}"
in_tmux set-option -g pane-border-status top
in_tmux set-option -g pane-border-format ' #{@host}#{?synchronize-panes, TYPING INTO ALL,} '
in_tmux set-option -g status-right "${TMUX:+prefix twice: this is within another tmux; }prefix y: type into all panes, or one"
in_tmux set-option -g status-right-length 80
in_tmux set-hook -g client-resized 'select-layout tiled'
in_tmux bind-key y set-option -w synchronize-panes
for i in "${!hosts[@]}"; do
  shows=(bash -c "$pane" pane "${hosts[$i]}" "${ssh[@]}" -t -- "${hosts[$i]}" "$there")
  if [ $((i % many)) = 0 ]; then
    last=$((i + many - 1 < ${#hosts[@]} ? i + many - 1 : ${#hosts[@]} - 1))
    window=axis:hosts-$i-$last
    in_tmux new-window -d -t axis: -n "${window#axis:}" "${shows[@]}"
  else
    in_tmux split-window -t "$window" "${shows[@]}"
  fi
  in_tmux set-option -p -t "$window" @host "${hosts[$i]}"
  in_tmux select-layout -t "$window" tiled
done
in_tmux next-window -t axis

if [ -n "$dry" ]; then
  in_tmux attach
elif [ -t 0 ] && [ -t 1 ]; then
  if [ -n "${TMUX:-}" ]; then echo "within another tmux: type its prefix twice, Ctrl-B Ctrl-B, to reach this one" >&2; fi
  TMUX='' "${tmux[@]}" attach
else
  echo "${#hosts[@]} hosts are shown by: ${tmux[*]} attach"
fi
