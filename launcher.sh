#!/usr/bin/env bash
# Start a command on every host of a TPU slice, over ssh, in tmux sessions that go on when ssh and this terminal are gone.
#
#   ./launcher.sh --hosts hosts.txt -- python main.py moe1b --mesh fsdp=8,stage=2,tensor=2
#   ./launcher.sh --tpu my-slice --zone us-central2-b --restarts 3 -- python main.py moe1b
#   ./launcher.sh status --hosts hosts.txt
#
# Which hosts: --hosts FILE, --tpu NAME --zone ZONE (their addresses, from gcloud), or - (from standard input); of these,
# --only HOST,HOST, spelled as there. A line names a host as ssh knows it: a name or an address, IPv6 too, user@HOST, or
# with a port ssh://[user@]HOST:PORT; # begins a comment. `ssh HOST true` must work without a question; for the hosts of
# --tpu, name the user and gcloud's key, ~/.ssh/google_compute_engine, in ~/.ssh/config.
#
#   -- COMMAND..              ship the commit that is checked out here (edits that are not committed are refused), start
#                             COMMAND in it on all hosts, or on none. The first host's process is process 0. Settings,
#                             prepared tokens and mesh of main.py are checked first. Ctrl-C before the table: nothing
#                             runs, or it says where it does; after it, the run goes on
#      --replace              when all is ready, stop the run that is alive there, then start; without it that is
#                             refused. Of another user@machine than yours it asks first; --yes answers, and without a
#                             terminal it must (else status 2). It starts also if that run had to be killed
#      --restarts N           when it fails, start the same words again on all hosts, at most N times, $RESTART_WAIT
#                             seconds later (main.py goes on from its newest checkpoint); not after exit status 2, 126,
#                             127, 130 or 143, or a stop. Tries to which not all hosts come are not counted; each waits
#                             for them, main.py 300 s, and after 12 in a row (80 minutes) it is given up. A host that
#                             was switched off does not join by itself: launch again, with --replace
#      --env NAME             give COMMAND, and what --on-end runs, this exported variable of yours, as a key; once for
#                             each. It is sent over ssh's standard input, and kept on the hosts in a file that only you
#                             can read, until `clean`; no argument or log shows it
#      --on-end 'WORDS'       after the last try, or a stop, have a shell of the first host run WORDS in the commit's
#                             folder, with AXIS_EXIT, the exit status there. If that host is lost nobody does
#   status [--short | --json] of each host: running or the exit status, the step, loss and tokens/s that the command
#                             reports, seconds since that step and since the log grew, the log's last line; then what
#                             runs and who started it. --short: hosts in trouble (not reached, ended in failure,
#                             vanished), and a line for all others. --json: one array, an object a host, nothing else
#   logs [HOST] [-f]          the last lines of the log of all hosts, or one; -f follows it, and the runs that come after;
#                             -n LINES
#   stop [--now]              SIGTERM to the run, so that it can save; SIGKILL to what is alive $GRACE seconds later, also
#                             if you press Ctrl-C here. Who stops it too waits for that, and sends nothing. --now:
#                             SIGKILL at once, even then. 0: all ended by themselves, or nothing ran; 3: something was
#                             killed; 1: a host was not reached, and may still run
#   exec -- COMMAND..         run COMMAND beside the run, in its commit, for at most $TIMEOUT seconds, and show what it
#                             prints, each line with its host
#   fetch NAME [FOLDER]       copy what runs/NAME of the first host holds, into FOLDER here (runs/NAME), which must not be
#                             there yet. The first host has whole checkpoints, unless --run.dir is a disk all share
#   usage                     each host's cores, memory, disk, and TPU chips where tpu-info is installed
#   doctor                    what is wrong on a host: ssh, tools, commit, Python, jax, disk, clock, TPU
#   clean                     remove all launches and their logs but the last $KEEP and what is alive, and commits and
#                             packages that no launch that stays needs. Runs and tokens stay: ./launcher.sh exec .. --
#                             rm -r runs/NAME removes one
#
# COMMAND's words arrive as typed: to have a shell on the hosts read them, make them bash -c '..'. It finds the commit's
# packages first in PATH, AXIS_COMMIT, AXIS_PROGRESS and AXIS_ALIVE (see run.sh --help), and JAX_COORDINATOR_ADDRESS,
# JAX_NUM_PROCESSES and JAX_PROCESS_ID; on a TPU, which tells JAX these three itself, AXIS_PROCESSES, how many processes
# there should be. Several runs on the same hosts: each with a HOST_FOLDER and a COORDINATOR_PORT of its own, in every
# command that means it; packages and tokens are brought anew, and the chips of a TPU serve one run at a time.
# Exit status: 0 if every host runs, or has ended well; 1 if not; 2 for what was asked wrongly, and nothing was done; 3 if
# a stop had to kill, so that steps since the last checkpoint are lost.
#
# Settings, from the environment:
#   DRY_RUN=1                 print the commands, run none
#   PARALLEL=16               hosts asked at a time
#   TIMEOUT=60                seconds a host has to do what it is asked; CONNECT_TIMEOUT=10, to be reached
#   SETUP_TIMEOUT=900         seconds for shipping and installing
#   GRACE=120                 seconds between SIGTERM and SIGKILL
#   RESTART_WAIT=90           seconds in which the processes on the other hosts notice the end of one and end too, so
#                             that all start again together
#   COORDINATOR_PORT=8476     where process 0 listens for the others; not on a TPU, where JAX chooses
#   HOST_FOLDER=axis-by-axis  where everything on a host is written: within its home, or an absolute path
#   VENV=                     a virtual environment that all hosts have at this path, instead of installing one
#   LOG_MIB=256               a log that has grown to this is moved to log.old, and begun again
#   KEEP=5                    launches that `clean` leaves
#   SSH_CONFIG=               a file for ssh -F instead of ~/.ssh/config
#
# Needs: here ssh, git and perl; there see run.sh --help. Changes: there, what run.sh --help says; here ssh's
# known_hosts, to which new hosts are added.
set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

# Launching -----------------------------------------------------------------------------------------------------------

launch() {
  local address port=${COORDINATOR_PORT:-8476} busy=free status=0
  if [ -n "$replace" ]; then busy=busy; fi
  put_in_order "$busy" || give_up "not every host is ready"
  if [ -z "$dry" ]; then
    know_apart
    warn_of_clocks
  fi
  address=${dry:+ADDRESS_OF_${hosts[0]}}
  address=${address:-$(field 0 5)}
  case $address in *:*) address="[$address]" ;; esac
  coordinator=$address:$port
  if [ -n "$replace" ] && [ -z "$dry" ]; then ask_before_replacing; fi
  check || give_up "it would not run"
  if [ -n "$replace" ]; then stop || [ $? = 3 ] || give_up "the run is not stopped everywhere"; fi
  one - port_one 0
  ! failed 0 || give_up "${hosts[0]} has no port for the coordinator"
  launched=$(date -u +%Y%m%d-%H%M%S)-$$
  trap 'undo 130' INT
  trap 'undo 143' TERM
  everywhere started start_one || undo 1
  trap 'exit 130' INT
  trap 'exit 143' TERM
  show_status || status=1
  if [ -z "$dry" ]; then echo "Ask again: $0 status, with the same hosts; logs and stop likewise"; fi
  return "$status"
}

give_up() {
  printf 'error: nothing was started, because %s\n' "$1" >&2
  exit 1
}

# One machine under two names would be asked to run two processes in one folder.
know_apart() {
  local i same
  same=$(for i in "${!hosts[@]}"; do echo "$(field "$i" 6) ${hosts[$i]}"; done | sort |
    awk '$1 == last { print name " and " $2; exit } { last = $1; name = $2 }')
  [ -z "$same" ] || give_up "$same are one machine: name it once"
}

warn_of_clocks() {
  local i clock
  for i in "${!hosts[@]}"; do
    clock=$(field "$i" 4)
    if [ "${clock#-}" -gt 2 ]; then echo "${hosts[$i]}  WARNING: its clock is $clock s from ours"; fi
  done
}

ask_before_replacing() {
  local i owner reply others=''
  for i in "${!hosts[@]}"; do
    owner=$(field "$i" 7)
    case " $by $others " in *" ${owner:-$by} "*) ;; *) others="$others $owner" ;; esac
  done
  if [ -z "$others" ] || [ -n "$yes" ]; then return; fi
  if ! [ -t 0 ]; then fail "the run that is alive there is of$others, not of $by; --replace --yes stops it all the same"; fi
  read -r -p "The run that is alive there is of$others, not of $by. Stop it? [y/N] " reply
  case $reply in y | Y | yes) ;; *) give_up "it was not to be replaced" ;; esac
}

# main.py says on each host whether it would run there: its settings, tokens and mesh.
check() {
  case " ${command[*]} " in
    *' main.py '* | */main.py\ *) ;;
    *) return ;;
  esac
  everywhere quietly check_one || { say_causes && return 1; }
}

check_one() {
  local sends=(${sends_environment[@]+"${sends_environment[@]}"}) pause=-
  if [ "${restarts:-0}" -gt 0 ]; then pause=${RESTART_WAIT:-90}; fi
  ask "$1" check "$commit" "${#hosts[@]}" "$1" "$pause" "${command[@]}"
}

port_one() {
  ask "$1" port "$port"
}

start_one() {
  local sends=(${sends_environment[@]+"${sends_environment[@]}"})
  ask "$1" start "$launched" "$commit" "$coordinator" "${#hosts[@]}" "$1" "${hosts[$1]}" "${hosts[0]}" \
    "${restarts:-0}" "${RESTART_WAIT:-90}" "${LOG_MIB:-256}" "$by" "$on_end" "${command[@]}"
}

# undo STATUS: a launch that did not start everywhere is started nowhere.
undo() {
  trap '' INT TERM
  end_jobs
  printf 'error: not every host started it, so it is undone; what --replace stopped stays stopped\n' >&2
  everywhere '' undo_one ||
    printf 'error: not undone on every host; once they answer: %s stop --now, with the same hosts\n' "$0" >&2
  exit "$1"
}

undo_one() {
  ask "$1" undo "$launched" "$by"
}

# Asking --------------------------------------------------------------------------------------------------------------

# status [--short | --json]
status() {
  local status=0 how=${1:-}
  everywhere "$(if [ "$how" = --json ]; then echo quietly; else echo -; fi)" status_one || status=1
  case $how in
    --json) show_json || status=1 ;;
    --short) show_short || status=1 ;;
    *) show_status || status=1 ;;
  esac
  return "$status"
}

status_one() {
  ask "$1" status
}

headings=(state launch commit step loss tokens/s 'step s ago' 'log s ago' 'last line')

# The table of the answers to `status`. Fails unless every host runs, or has ended well, and in the same launch.
show_status() {
  local i status=0
  if [ -n "$dry" ]; then return; fi
  table "${headings[@]}"
  say_what_runs
  differ 3 commit && differ 2 launch || status=1
  for i in "${!hosts[@]}"; do
    if in_trouble "$i" && ! failed "$i"; then status=1; fi
  done
  return "$status"
}

in_trouble() {
  failed "$1" || case $(field "$1" 1) in running* | *'exit 0') return 1 ;; esac
}

# The hosts in trouble, then a line for all others.
show_short() {
  local i rows='' well='' others=0
  if [ -n "$dry" ]; then return; fi
  for i in "${!hosts[@]}"; do
    if in_trouble "$i"; then
      rows="$rows $i"
    else
      others=$((others + 1)) well=${well:-$i}
    fi
  done
  if [ -n "$rows" ]; then table "${headings[@]}"; fi
  if [ -n "$well" ]; then
    printf '%s hosts well, as %s: %s, step %s, loss %s, tokens/s %s\n' "$others" "${hosts[$well]}" \
      "$(cut -f 1 "$answers/$well")" "$(cut -f 4 "$answers/$well")" "$(cut -f 5 "$answers/$well")" \
      "$(cut -f 6 "$answers/$well")"
  fi
  differ 3 commit && differ 2 launch && [ -z "$rows" ]
}

# Each launch there is, who started it, and what it runs.
say_what_runs() {
  local i
  for i in "${!hosts[@]}"; do
    if ! failed "$i" && [ -n "$(field "$i" 2)" ]; then
      printf '%s by %s: %s\n' "$(field "$i" 2)" "$(field "$i" 10)" "$(field "$i" 11)"
    fi
  done | sort -u
}

show_json() {
  local i
  if [ -n "$dry" ]; then return; fi
  for i in "${!hosts[@]}"; do
    if failed "$i"; then
      printf '%s\tFAILED: %s\n' "${hosts[$i]}" "$(cause "$(cat "$answers/$i.status")" "$i" "${hosts[$i]}")"
    else
      printf '%s\t%s\n' "${hosts[$i]}" "$(cat "$answers/$i")"
    fi
  done | perl -MJSON::PP -CI -ne '
    BEGIN {
      @names = qw(host state launch commit step loss tokens_per_s step_s_ago log_s_ago last_line by command);
      $json = JSON::PP->new->ascii->canonical;
    }
    chomp;
    @fields = split /\t/, $_, -1;
    ($step, $steps) = split m{/}, $fields[4] // "-";
    %row = map { $_ => undef } @names, "steps";
    for $i (0 .. $#fields) { $row{$names[$i]} = $fields[$i] unless $fields[$i] eq "-" }
    @row{"step", "steps"} = map { defined $_ && /^\d+$/ ? $_ : undef } $step, $steps;
    for (qw(step steps loss tokens_per_s step_s_ago log_s_ago)) {
      $row{$_} += 0 if defined $row{$_} && $row{$_} =~ /^-?[\d.]+$/
    }
    push @rows, {%row};
    END { print $json->encode(\@rows), "\n" }'
  for i in "${!hosts[@]}"; do
    if in_trouble "$i"; then return 1; fi
  done
}

# stop [--now]. Its status is 3 where something was killed.
stop() {
  local i grace=${GRACE:-120}
  if [ "${1:-}" = --now ]; then grace=0; fi
  limit=$((grace + limit)) everywhere '' stop_one || return 1
  if [ -n "$dry" ]; then return; fi
  for i in "${!hosts[@]}"; do
    case $(cat "$answers/$i") in killed*) return 3 ;; esac
  done
}

stop_one() {
  ask "$1" stop "$grace" "$by"
}

# logs [HOST] [-f] [-n LINES]
logs() {
  local lines=40 follow='' only=''
  while [ $# -gt 0 ]; do
    case $1 in
      -f) follow=follow ;;
      -n)
        lines=${2:-}
        whole_number -n "$lines"
        shift
        ;;
      *) only=$1 ;;
    esac
    shift
  done
  if [ -n "$only" ]; then keep_only "$only"; fi
  if [ -n "$follow" ]; then limit=0; fi # for ever
  stream logs "$lines" ${follow:+"$follow"}
}

# stream WORD..: show what the hosts answer as it comes, each line with its host. Fails if one did.
stream() {
  local i jobs='' job status=0
  set -m
  for i in "${!hosts[@]}"; do
    stream_one "$i" "$@" &
    jobs="$jobs $!"
  done
  for job in $jobs; do wait "$job" || status=1; done
  return "$status"
}

stream_one() {
  local host=${hosts[$1]} status=0 prefix=''
  if [ ${#hosts[@]} -gt 1 ] && [ -z "$dry" ]; then prefix="$host | "; fi
  ask "$@" 2> "$answers/$1.error" |
    while IFS= read -r line || [ -n "$line" ]; do printf '%s%s\n' "$prefix" "$line"; done || status=$?
  if [ "$status" != 0 ]; then
    printf '%s  FAILED: %s\n' "$host" "$(cause "$status" "$1" "$host")" >&2
  fi
  return "$status"
}

# fetch NAME [FOLDER]
fetch() {
  local from=runs/$1 into=${2:-runs/$1} partial status=0
  [ ! -e "$into" ] || fail "$into is there already; name another folder: fetch $1 FOLDER"
  partial=$into.fetched-$$
  if [ -n "$dry" ]; then
    ask 0 pack "$from"
    return
  fi
  mkdir -p "$partial"
  limit=${SETUP_TIMEOUT:-900}
  # Lines of base64 between the marks of an answer.
  ask 0 pack "$from" 2> "$answers/0.error" > "$answers/0" || status=$?
  if [ "$status" = 0 ]; then
    perl -MMIME::Base64 -ne 'print decode_base64($_)' "$answers/0" | tar -xzf - -C "$partial" || status=$?
  fi
  if [ "$status" != 0 ]; then
    rm -rf -- "$partial"
    printf '%s  FAILED: %s\n' "${hosts[0]}" "$(: > "$answers/0" && cause "$status" 0 "${hosts[0]}")" >&2
    return 1
  fi
  mv "$partial" "$into"
  echo "$into  $(du -sk "$into" | cut -f 1) KiB, from ${hosts[0]}"
}

usage() {
  local status=0
  everywhere - usage_one || status=1
  if [ -z "$dry" ]; then table load memory disk 'tpu-info'; fi
  return "$status"
}

usage_one() {
  ask "$1" usage
}

clean() {
  find_commit
  everywhere '' clean_one
}

clean_one() {
  ask "$1" clean "${KEEP:-5}" "$commit"
}

doctor() {
  local i status=0
  find_commit
  everywhere - doctor_one || status=1
  if [ -n "$dry" ]; then return; fi
  table commit python jax 'free GiB' 'clock s' tpu lacks run
  for i in "${!hosts[@]}"; do
    if ! failed "$i"; then diagnose "$i" || status=1; fi
  done
  differ 2 Python || status=1
  differ 3 jax || status=1
  if [ "$status" = 0 ]; then echo "all is well on ${#hosts[@]} hosts"; fi
  return "$status"
}

doctor_one() {
  clock_apart 5 ask "$1" doctor "$commit"
}

diagnose() {
  local shipped python free clock tpu lacks state well=0 host=${hosts[$1]}
  IFS=$'\t' read -r shipped python _ free clock tpu lacks state < "$answers/$1"
  if [ "$lacks" != nothing ]; then problem "lacks $lacks"; fi
  case $shipped in
    shipped) ;;
    absent) problem "has not got commit ${commit:0:7}; ./setup_tpu.sh brings it" ;;
    *) problem "has another commit than ${commit:0:7}: $shipped" ;;
  esac
  if [ "$shipped$python" = shippednone ]; then problem "has no packages; ./setup_tpu.sh installs them"; fi
  if [ "$free" -lt 10 ]; then problem "has $free GiB of free disk"; fi
  if [ "${clock#-}" -gt 2 ]; then problem "its clock is $clock s from ours; does it run a time service?"; fi
  case $tpu:$state in
    none:* | free:* | 'in use'*:running*) ;;
    *) problem "its TPU is $tpu" ;;
  esac
  return "$well"
}

problem() {
  printf '%s  PROBLEM: %s\n' "$host" "$1"
  well=1
}

# What is asked -------------------------------------------------------------------------------------------------------

read_command_line "$@"
replace='' yes='' restarts='' on_end='' names=()
set -- ${words[@]+"${words[@]}"}
while :; do
  case ${1:-} in
    --replace) replace=1 && shift ;;
    --yes) yes=1 && shift ;;
    --restarts) restarts=${2:-} && whole_number --restarts "$restarts" && shift 2 ;;
    --on-end) on_end=${2:?error: --on-end needs a command} && shift 2 ;;
    --env)
      case ${2:-} in '' | [0-9]* | *[!A-Za-z0-9_]*) fail "--env needs the name of a variable, not '${2:-}'" ;; esac
      [ -n "${!2+set}" ] || fail "--env $2: there is no such variable here; export it first"
      names=(${names[@]+"${names[@]}"} "$2") && shift 2
      ;;
    *) break ;;
  esac
done
sends_environment=()
if [ ${#names[@]} -gt 0 ]; then
  # shellcheck disable=SC2016  # for perl
  sends_environment=(perl -e 'printf "%s=%s\0", $_, $ENV{$_} for @ARGV' "${names[@]}")
fi
if [ "${1:-}" = exec ]; then
  [ ${#command[@]} -gt 0 ] && [ $# = 1 ] || fail "exec needs a command: $0 exec .. -- COMMAND.."
  stream exec "${command[@]}"
elif [ ${#command[@]} -gt 0 ]; then
  [ $# = 0 ] || fail "'$1' before -- is none of its options; see $0 --help"
  launch
else
  [ $# -gt 0 ] && [ -z "$replace$yes$restarts$on_end${names[*]-}" ] ||
    fail "say what to do: -- COMMAND.., status, logs, stop, exec, fetch, usage, doctor or clean; see $0 --help"
  case $1:${2:-} in
    status:--short | status:--json | stop:--now) [ $# = 2 ] || fail "$1 takes no '$3'; see $0 --help" ;;
    status:* | stop:* | usage:* | doctor:* | clean:*) [ $# = 1 ] || fail "$1 takes no '$2'; see $0 --help" ;;
    fetch:*) [ $# = 2 ] || [ $# = 3 ] || fail "fetch needs the name of a run, and may have a folder; see $0 --help" ;;
  esac
  case $1 in
    status | logs | stop | fetch | usage | doctor | clean) "$@" ;;
    *) fail "'$1' is none of its commands; see $0 --help" ;;
  esac
fi
