#!/usr/bin/env bash
# Do on this host what launcher.sh, setup_tpu.sh and debug_tpu.sh ask for. They send this file over ssh each time, so a
# host needs nothing of ours beforehand.
#
#   ssh HOST 'bash -s -- axis-by-axis status' < run.sh
#   ssh HOST 'bash -s -- axis-by-axis stop 120' < run.sh
#
# Needs: Linux, bash 4.4, tmux, flock, tar; for the packages make, and Python 3.11 or later.
# Changes: the folder it is given, which is of this host alone, and nothing else:
#   commits/COMMIT/    the files of a commit; .shipped holds their checksums; runs and tokens lead to those below
#   packages/LOCK/     the .venv of all commits that lock the same packages
#   launches/LAUNCH/   command and environment (a NUL ends each word), commit, how it is watched over, log and the older
#                      log.old, pid, exit; progress and alive, if the command writes them; restarts so far; stop, who
#                      asked it to. Nobody else may read them. launches/latest leads to the last
#   runs/  tokens/     what training writes and reads, whatever the commit
#   lock               held while a process of a launch lives: the kernel lets go when the last one dies
#   starting           held while one is started
#
# Asked with its folder first:
#   prepare COMMIT VENV free|busy   is all there to run COMMIT? installs packages (VENV: uses these); 3: no such commit
#   receive COMMIT VENV free|busy   the same, after unpacking COMMIT from a tar.gz on standard input
#   check COMMIT COUNT ID SECONDS WORD...   would main.py run here, as process ID of COUNT? SECONDS: its restarts wait
#   port PORT                       is it free for JAX's coordinator? says which process holds it
#   start LAUNCH COMMIT COORDINATOR COUNT ID HOST FIRST_HOST RESTARTS SECONDS LOG_MIB BY ON_END WORD...
#                                   start a command in a tmux session, and wait until it runs; when it fails it is
#                                   started again, so many seconds later; standard input has more environment
#   undo LAUNCH BY                  end what `start` has started, or may yet start
#   status  usage  doctor COMMIT  logs LINES [follow]  stop SECONDS BY  exec WORD...  pack PATH  clean KEEP COMMIT
#
# What it answers stands between two lines that mark it, so that nothing a login prints is taken for an answer.
#
# A command may report: AXIS_PROGRESS names a file, which it replaces whole (by a rename). Its one line has, parted by
# tabs, step, number of steps, loss, tokens/s, and the unix time at which the step was done; - is not known. AXIS_ALIVE
# names another, which it replaces again and again while it is well: seconds without that after which it is to be taken
# for dead, and is killed; and `joining` until all processes have come, then `joined`.
set -euo pipefail

framed=1
if [ -n "${BASH_SOURCE[0]:-}" ]; then framed=''; fi # a file that is run, not what ssh brings on standard input
tries=12                                          # in a row to which not all processes came

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# shellcheck disable=SC2329  # by the traps
answered() {
  if [ -n "$framed" ]; then echo '-- axis-by-axis has answered --'; fi
}

gone() {
  [ ! -e lock ] || flock --nonblock --shared lock true
}

has_tpu() {
  compgen -G '/dev/accel[0-9]*' > /dev/null || compgen -G '/dev/vfio/[0-9]*' > /dev/null
}

# Fields of an answer are parted by tabs; none is empty.
answer() {
  (IFS=$'\t' && printf '%s\n' "$*")
}

# write FILE TEXT: whoever reads it finds all of it.
write() {
  printf '%s\n' "$2" > "$1.partial"
  mv "$1.partial" "$1"
}

# The processes that have a file open, those of other users only if we are root.
holders() {
  find /proc/[0-9]*/fd -lname "$1" 2> /dev/null | cut -d / -f 3 | sort -un || true # processes end while we look
}

described() {
  printf 'process %s (%s)' "$1" "$(ps -o user=,args= -p "$1" | tr -s ' ' | cut -c 1-80)"
}

# Setting up -----------------------------------------------------------------------------------------------------------

receive() {
  local commit=$1 left sums
  partial=commits/.$1.$$
  for left in commits/.[0-9a-f]*; do # by a setup that was killed
    kill -0 "${left##*.}" 2> /dev/null || rm -rf -- "$left"
  done
  mkdir -p "$partial" runs tokens
  trap 'rm -rf -- "$partial"; answered' EXIT
  tar -xzf - -C "$partial" 2> /dev/null || fail "the files of commit $commit did not arrive whole; is the disk full?"
  sums=$(cd "$partial" && find . -type f -print0 | xargs -0 sha256sum)
  printf '%s\n' "$sums" > "$partial/.shipped"
  ln -s ../../runs "$partial/runs"
  ln -s ../../tokens "$partial/tokens"
  mv -T "$partial" "commits/$commit" 2> /dev/null || [ -d "commits/$commit" ] # another setup was faster
  prepare "$@"
}

# Which files of a commit are no longer as they were shipped; says nothing if all are.
changed() {
  (cd "commits/$1" && sha256sum --check --quiet .shipped 2> /dev/null || true) |
    sed 's/^\.\///; s/: FAILED.*//' | paste -s -d ' '
}

prepare() {
  local commit=$1 venv=$2 wanted=$3 files
  command -v tmux > /dev/null || fail "tmux is missing: sudo apt-get install tmux"
  [ "$wanted" = busy ] || gone || fail "a run is alive here: $(told_state); stop it, or --replace it"
  [ -d "commits/$commit" ] || exit 3
  files=$(changed "$commit")
  [ -z "$files" ] || fail "has another commit than it says: $files changed in $PWD/commits/$commit;" \
    "keep what you need of it, remove that folder, and come again"
  packages "$commit" "$venv"
  # Our address, as others reach it; which machine and folder this is, whatever its name; whose run is alive.
  answer "$(facts "$commit")" "$(cut -d ' ' -f 3 <<< "${SSH_CONNECTION:-. . 127.0.0.1}")" \
    "$(cut -c 1-8 /proc/sys/kernel/random/boot_id)-$(stat -c %d-%i .)" "$(if gone; then echo -; else how_of by; fi)"
}

# Ask main.py, which says so without starting.
check() {
  local commit=$1 said
  cd "commits/$commit"
  mapfile -d '' -t environment
  export "${environment[@]}" PATH="$PWD/.venv/bin:$PATH" AXIS_PROCESSES="$2" JAX_PROCESS_ID="$3"
  if [ "$4" != - ]; then export AXIS_RESTART_WAIT="$4"; fi
  shift 4
  said=$("$@" --run.check 2>&1 < /dev/null) || fail "$(grep -m 1 '^error: ' <<< "$said" || tail -n 1 <<< "$said")"
}

packages() {
  local code=commits/$1 venv=$2 target=installed lock
  if [ -z "$venv" ]; then
    if has_tpu; then target=extra-tpu; fi
    lock=packages/$(cat "$code/requirements.txt" "$code/requirements/tpu.txt" | sha256sum | cut -c 1-12)
    venv=$PWD/$lock/.venv
    if [ ! -e "$venv/$target" ]; then
      command -v make > /dev/null || fail "make is missing: sudo apt-get install make"
      if [ ! -e "$lock/Makefile" ]; then
        mkdir -p "$lock/requirements"
        cp "$code/requirements/tpu.txt" "$lock/requirements"
        cp "$code/requirements.txt" "$code/Makefile" "$lock"
      fi
      flock "$lock/Makefile" make -C "$lock" ".venv/$target" > "$lock/log" 2>&1 ||
        fail "cannot install the packages: $(grep -v '^make' "$lock/log" | tail -n 1); see $PWD/$lock/log"
    fi
  fi
  [ -x "$venv/bin/python" ] || fail "there is no $venv/bin/python"
  ln -sfn "$venv" "$code/.venv"
}

# What must be the same on all hosts, and what a run needs: Python, jax, GiB of free disk, the clock.
facts() {
  local python=none jax=none bin=commits/$1/.venv/bin/python
  if [ -x "$bin" ]; then
    python=$("$bin" -c 'import sys; print(sys.version.split()[0])')
    jax=$("$bin" -c 'from importlib.metadata import version; print(version("jax"))' 2> /dev/null) || jax=none
  fi
  answer "$python" "$jax" "$(($(df --output=avail -k . | tail -n 1) / 1048576))" "$(date +%s)"
}

# A run ---------------------------------------------------------------------------------------------------------------

# Whatever listens on the port, on any address, is in the way of JAX's coordinator.
port() {
  local hex uid inode pid who
  if has_tpu; then return; fi # JAX chooses a port
  hex=$(printf %04X "$1")
  read -r uid inode < <(awk -v port=":$hex$" '$4 == "0A" && $2 ~ port {print $8, $10}' /proc/net/tcp*) || return 0
  who="a process that cannot be seen from here, of user $(id -nu "$uid" 2> /dev/null || echo "$uid")"
  if read -r pid < <(holders "socket:\[$inode\]"); then who=$(described "$pid"); fi
  fail "port $1 is held by $who; end it, or set COORDINATOR_PORT to another"
}

start() {
  local launch=$1 commit=$2 here=launches/$1 mask environment settings name
  local coordinator count id host first restarts pause log_mib by on_end
  shift 2
  for name in coordinator count id host first restarts pause log_mib by on_end; do
    printf -v "$name" %s "$1"
    shift
  done
  mapfile -d '' -t environment
  exec 8> starting # until the run holds `lock`, so that of two who start at once one finds it taken
  flock --wait 40 8 || fail "somebody else has been starting a run here for 40 s"
  gone || fail "a run is alive here: $(told_state)"
  mask=$(umask)
  umask 077 # a key may be among the words
  mkdir -p launches
  mkdir "$here" || fail "$PWD/$here is there already"
  if has_tpu; then # JAX asks the TPU, which knows the hosts' order
    settings=("AXIS_PROCESSES=$count")
  else
    settings=("JAX_COORDINATOR_ADDRESS=$coordinator" "JAX_NUM_PROCESSES=$count" "JAX_PROCESS_ID=$id")
  fi
  settings=("AXIS_HOST=$host" "AXIS_COMMIT=$commit" "AXIS_PROGRESS=$PWD/$here/progress" "AXIS_ALIVE=$PWD/$here/alive"
    "${settings[@]}" "${environment[@]}")
  printf '%s\0' "${settings[@]}" > "$here/environment"
  printf '%s\0' "$@" > "$here/command"
  for name in id first restarts pause log_mib by on_end; do printf '%s=%s\0' "$name" "${!name}"; done > "$here/how"
  printf '%s\n' "$commit" > "$here/commit"
  ln -sfn "$launch" launches/latest
  umask "$mask"
  tmux new-session -d -s "$(session)" -c "$PWD/commits/$commit" \
    bash "$PWD/commits/$commit/run.sh" "$PWD" supervise "$launch" 8>&- ||
    fail "tmux cannot make a session named $(session); does one of yours have that name?"
  wait_for 20 test -e "$here/log" || fail "tmux did not start the command within 20 s; see $PWD/$here"
  exec 8>&-
  wait_for 1 test -e "$here/exit" || true # a command that cannot run says so at once
  status
}

# Each folder has a session of its own; that of the usual folder is `axis`.
session() {
  local name=${PWD##*/}
  if [ "$name" = axis-by-axis ]; then echo axis; else printf 'axis-%s\n' "${name//[.:]/_}"; fi
}

# how_of NAME: what the last launch was told.
how_of() {
  tr '\0' '\n' < launches/latest/how 2> /dev/null | sed -n "s/^$1=//p" | grep . || echo -
}

# End a launch that began elsewhere, or is just beginning here; one that has not begun never will.
undo() {
  local here=launches/$1
  mkdir -p launches
  if mkdir "$here" 2> /dev/null; then
    answer "was not started"
    return
  fi
  echo "$2" > "$here/stop" # from here on nothing is started
  wait_for 3 test launches/latest/stop -ef "$here/stop" || {
    answer "was not started"
    return
  }
  wait_for 3 test -e "$here/pid" -o -e "$here/exit" || true
  if ! gone && [ -e "$here/pid" ]; then kill -KILL -- "-$(cat "$here/pid")" 2> /dev/null || true; fi
  wait_for 10 gone || fail "a process of the run is alive after KILL: $(holders "$PWD/lock" | paste -s -d ' ')"
  answer "undone: $(state)"
}

# Runs in the tmux session, which shows the log; nothing that is typed or closed there reaches the command.
supervise() {
  local here=$PWD/launches/$1 again=0 absent=0 pid code=143 why settings command how
  exec 9> lock
  flock --wait 5 9 || fail "a run is alive here"
  trap : HUP INT QUIT TERM
  mapfile -d '' -t settings < "$here/environment"
  mapfile -d '' -t command < "$here/command"
  mapfile -d '' -t how < "$here/how"
  local "${how[@]}"
  cd "commits/$(cat "$here/commit")"
  set -m # the command becomes the leader of a process group, which `stop` can signal
  (umask 077 && : > "$here/log")
  tail -n +1 -F --pid=$$ "$here/log" 2> /dev/null 9>&- &
  until [ -e "$here/stop" ] || run_once; do
    kill -KILL -- "-$pid" 2> /dev/null || true # what it left behind
    if came; then
      again=$((again + 1)) absent=0 why="$again of $restarts"
    else # no round has begun, so none is spent
      absent=$((absent + 1)) why="$again of $restarts; not counted: not all came, try $absent of $tries"
    fi
    rm "$here/pid"
    write "$here/restarts" "$why" || true # after that, so that `running, restarted` is said of the next try alone
    note "ended with status $code; starts again in $pause s, $why"
    if wait_for "$pause" test -e "$here/stop"; then break; fi
    note "started again, $why"
  done
  write "$here/exit" "$code"
  if [ -n "$on_end" ] && [ "$id" = 0 ]; then
    export "${settings[@]}" AXIS_EXIT="$code"
    setsid bash -c "$on_end" >> "$here/log" 2>&1 < /dev/null 9>&- &
  fi
}

# A line in the log, as far as there is room on the disk.
note() {
  printf 'run.sh: %s\n' "$*" >> "$here/log" || true
}

# Run the command to its end. Fails if it failed in a way that another try may mend, and one is left.
run_once() {
  local watcher
  rm -f "$here/progress" "$here/alive"
  ( # shellcheck disable=SC2030  # for the command alone
    export "${settings[@]}" PATH="$PWD/.venv/bin:$PATH" PYTHONUNBUFFERED=1
    exec -- "${command[@]}"
  ) >> "$here/log" 2>&1 < /dev/null &
  pid=$! code=0
  write "$here/pid" "$pid"
  watch_over "$pid" 9>&- &
  watcher=$!
  while kill -0 "$pid" 2> /dev/null; do wait "$pid" || [ $? -lt 147 ] || sleep 1; done # 147, 148: it is frozen
  wait "$pid" || code=$?
  kill -KILL -- "-$watcher" 2> /dev/null || true
  wait "$watcher" 2> /dev/null || true
  if [ "$code" = 134 ]; then note "aborted$(why_aborted)"; fi
  case $code in
    0 | 2 | 126 | 127) return ;; # asked wrongly, the disk is full, no such command: it would end so again
    130 | 143) return ;;         # it was asked to end
  esac
  if [ -e "$here/stop" ]; then return; fi
  if came; then [ "$again" -ge "$restarts" ]; else [ "$restarts" = 0 ] || [ "$absent" = "$tries" ]; fi
}

# Whether all processes came to the last try: each host sees that of the same tries, so all count the same. A command that
# does not say is taken to have run.
came() {
  [ "$(cut -f 2 "$here/alive" 2> /dev/null)" != joining ]
}

# JAX aborts all when it misses one's heartbeats, which it names, and whoever finds process 0 gone; other aborts have
# other reasons.
why_aborted() {
  local silent
  silent=$(tail -n 200 "$here/log" | awk '
    /^run.sh: started again/ { silent = "" }
    /stopped sending heartbeats/ { getline silent }
    END { print silent }')
  if [ -n "$silent" ]; then
    printf ', as JAX does when process %s sends no heartbeats' "$silent"
  elif [ "$id" != 0 ] && tail -n 200 "$here/log" | grep -qiE 'coordination service|heartbeat|leader'; then
    printf ', as JAX does when the process on %s is gone' "$first"
  fi
}

# Meanwhile: a command that gives no sign of life for as long as it says is killed, as one that hangs in a device or is
# frozen cannot end by itself. Time is what this loop has waited, so neither clocks nor a machine that slept count.
watch_over() {
  local silence said seen='' quiet=0
  while kill -0 "$1" 2> /dev/null; do
    sleep 5
    keep_log_small
    if ! said=$(stat -c %.Y "$here/alive" 2> /dev/null); then continue; fi
    if [ "$said" != "$seen" ]; then
      seen=$said quiet=0
      continue
    fi
    quiet=$((quiet + 5))
    read -r silence _ < "$here/alive" || silence=60
    if [ "$quiet" -gt "$((silence + 5))" ]; then
      note "no sign of life from the command for $quiet s; it is killed"
      kill -KILL -- "-$1" 2> /dev/null || true
    fi
  done
}

# The command goes on writing to the same file. What it writes between these two lines is lost.
keep_log_small() {
  if [ "$(stat -c %s "$here/log")" -gt "$((log_mib * 1048576))" ]; then
    (umask 077 && cp "$here/log" "$here/log.old") || true
    : > "$here/log"
  fi
}

# wait_for SECONDS COMMAND...: until it succeeds; fails after so many seconds.
wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -le "$end" ] || return 1
    sleep 0.1
  done
}

state() {
  local here=launches/latest
  if [ ! -e "$here" ]; then
    echo "not launched"
  elif gone; then # which it is after it has written its exit status
    if [ -e "$here/exit" ]; then
      echo "$([ ! -e "$here/stop" ] || echo 'stopped, ')exit $(cat "$here/exit")"
    else
      echo vanished
    fi
  elif [ -e "$here/exit" ]; then
    echo "exit $(cat "$here/exit")$(wait_for 1 gone || echo ", processes left")"
  elif [ ! -e "$here/restarts" ]; then
    echo running
  elif [ -e "$here/pid" ]; then
    echo "running, restarted $(cat "$here/restarts")"
  else
    echo "restarting, $(cat "$here/restarts")"
  fi
}

ended() {
  printf '%s; its log ends: %s' "$(state | sed 's/^stopped, //')" "$(last_line launches/latest/log || true)"
}

told_state() {
  printf '%s since %s by %s: %s' "$(readlink launches/latest)" \
    "$(date -d "@$(stat -c %Y launches/latest/command)" '+%F %T')" "$(how_of by)" "$(told_command | cut -c 1-100)"
}

# The words of the last launch, without values that look like keys.
told_command() {
  tr -s '\0\n\t ' ' ' < launches/latest/command |
    sed -E 's/(^| )([A-Za-z0-9_]*(KEY|TOKEN|SECRET|PASSWORD)[A-Za-z0-9_]*)=[^ ]*/\1\2=***/g; s/ $//' | cut -c 1-200
}

# The last line that is there to read, without colours, and without what a progress bar has overwritten.
last_line() {
  tail -c 4096 "$1" | tr '\r' '\n' | sed $'s/\e\\[[0-9;?]*[A-Za-z]//g' | tr -cd '[:print:]\n\200-\377' |
    grep '[[:alnum:]]' | tail -n 1 | cut -c 1-200
}

# State, launch, commit, what its progress file says, seconds since then and since the log has grown, its last line; who
# started it, and its words.
status() {
  local here=launches/latest launch=- commit=- step steps loss speed at quiet=- last='' by=- words=-
  if [ -e "$here" ]; then
    launch=$(readlink "$here")
    commit=$(cut -c 1-7 "$here/commit")
    by=$(how_of by)
    words=$(told_command)
  fi
  if [ -e "$here/log" ]; then
    quiet=$(($(date +%s) - $(stat -c %Y "$here/log")))
    last=$(last_line "$here/log") || true
  fi
  IFS=$'\t' read -r step steps loss speed at < <(cat "$here/progress" 2> /dev/null) || true
  case ${at%.*} in '' | 0* | *[!0-9]*) at=- ;; *) at=$(($(date +%s) - ${at%.*})) ;; esac
  answer "$(state)" "$launch" "$commit" "${step:--}${steps:+/$steps}" "${loss:--}" "${speed:--}" "$at" \
    "$quiet" "${last:--}" "$by" "${words:--}"
}

logs() {
  local here lines=$1 tail
  [ -e launches/latest/log ] || fail "nothing was launched here"
  if [ "${2:-}" != follow ]; then
    tail -n "$lines" launches/latest/log | awk 1 # which ends the last line
    return
  fi
  trap 'kill "$tail" 2> /dev/null; exit 130' INT TERM # it would be left behind
  while :; do
    here=$(readlink launches/latest)
    tail -n "$lines" -F "launches/$here/log" 2> /dev/null & # ends when ssh does: GNU tail watches its output
    tail=$!
    while kill -0 "$tail" 2> /dev/null && [ "$(readlink launches/latest)" = "$here" ]; do sleep 1; done
    if ! kill "$tail" 2> /dev/null; then return; fi
    wait "$tail" 2> /dev/null || true
    wait_for 20 test -e launches/latest/log || true
    echo "run.sh: launch $(told_state)"
    lines=+1
  done
}

# stop SECONDS BY: SIGTERM, and SIGKILL so many seconds later; at once if they are 0. Who comes second only waits: another
# SIGTERM would be taken for "at once".
stop() {
  local here=launches/latest pid='' begin=$SECONDS waits='' end=stopped
  if gone; then
    answer "nothing runs: $(state)"
    return
  fi
  if ! (set -C && echo "$2" > "$here/stop") 2> /dev/null; then # from here on nothing is started again
    waits=", as $(cat "$here/stop") had asked before"
  fi
  until gone || [ $((SECONDS - begin)) -ge "$1" ]; do
    if [ -z "$pid" ] && pid=$(cat "$here/pid" 2> /dev/null); then # it may just be starting
      if (set -C && : > "$here/told") 2> /dev/null; then kill -TERM -- "-$pid" 2> /dev/null || true; fi
    fi
    sleep 0.1
  done
  if ! gone; then
    wait_for 5 test -e "$here/pid" || true
    pid=$(cat "$here/pid" 2> /dev/null) && kill -KILL -- "-$pid" 2> /dev/null || true
    wait_for 10 gone || fail "a process of the run is alive after KILL: $(holders "$PWD/lock" | paste -s -d ' ')"
  fi
  if [ "$(cat "$here/exit")" = 137 ]; then
    end=killed
    if [ "$1" != 0 ]; then waits="$waits, SIGTERM did not end it"; fi
  fi
  answer "$end after $((SECONDS - begin)) s$waits: $(ended)"
}

# Beside the run, in its commit.
exec_beside() {
  [ -e launches/latest ] || fail "nothing was launched here"
  cd "commits/$(cat launches/latest/commit)"
  # shellcheck disable=SC2031  # where it is changed that is for a subshell
  env PATH="$PWD/.venv/bin:$PATH" "$@" 2>&1 < /dev/null | awk '{ print; fflush() }'
}

# pack PATH: a tar.gz of what lies in it, as lines of base64. A file may grow meanwhile.
pack() {
  local status=0 others
  others=$(cd "${1%/*}" 2> /dev/null && echo *)
  [ -d "$1" ] || fail "has no $1; there is: ${others:0:200}"
  tar --warning=no-file-changed -czf - -C "$1" . | base64 -w 65536 || status=$?
  [ "$status" -le 1 ] || return "$status"
}

# clean KEEP COMMIT: remove launches but the last KEEP, commits that neither they nor COMMIT need, and packages that no
# commit which stays needs.
clean() {
  local latest before one i needed launches=(launches/2*) removed=''
  latest=$(readlink launches/latest || true)
  before=$(du -sk . | cut -f 1)
  for ((i = 0; i < ${#launches[@]} - $1; i++)); do # in the order of their times
    if [ "${launches[i]##*/}" != "$latest" ]; then remove "${launches[i]}"; fi
  done
  needed=" $2 $(cat launches/*/commit 2> /dev/null | paste -s -d ' ') "
  for one in commits/[0-9a-f]*; do
    case $needed in *" ${one##*/} "*) ;; *) remove "$one" ;; esac
  done
  needed=$(readlink commits/*/.venv || true)
  for one in packages/*; do
    case $needed in *"/$one/.venv"*) ;; *) remove "$one" ;; esac
  done
  answer "$(((before - $(du -sk . | cut -f 1)) / 1024)) MiB freed: ${removed:-nothing to remove}"
}

remove() {
  if [ -e "$1" ]; then
    rm -rf -- "$1"
    removed="$removed${removed:+, }$(cut -c 1-26 <<< "$1")"
  fi
}

# A look at the host --------------------------------------------------------------------------------------------------

# Who has the TPU. libtpu locks this file; one that another user left behind keeps everyone else out.
tpu() {
  local file=${LIBTPU_LOCKFILE:-/tmp/libtpu_lockfile} pid
  if [ ! -e "$file" ]; then
    if has_tpu; then echo free; else echo none; fi
    return
  fi
  pid=$(awk -v inode="$(stat -c %i "$file")" '$6 ~ ":" inode "$" { print $5 }' /proc/locks | head -n 1)
  if [ -n "$pid" ]; then
    echo "in use by $(described "$pid")"
  elif [ -O "$file" ]; then
    echo free
  else
    echo "locked, left by $(stat -c %U "$file"): sudo rm $file"
  fi
}

doctor() {
  local commit=absent files
  if [ -d "commits/$1" ]; then
    files=$(changed "$1")
    commit=${files:+changed: $files}
  fi
  answer "${commit:-shipped}" "$(facts "$1")" "$(tpu)" "$(lacking)" "$(state)"
}

lacking() {
  local tool found=''
  for tool in tmux make flock tar; do command -v "$tool" > /dev/null || found="$found $tool"; done
  answer "${found:-nothing}" | sed 's/^ //'
}

# Load of the cores, memory, disk, and each TPU chip's memory and use where `tpu-info` is installed.
usage() {
  local chips=- memory tool
  memory=$(awk '/^MemTotal/ {all = $2} /^MemAvailable/ {free = $2}
                END {printf "%.1f of %.1f GiB", (all - free) / 2^20, all / 2^20}' /proc/meminfo)
  tool=commits/$(cat launches/latest/commit 2> /dev/null || true)/.venv/bin/tpu-info
  if [ -x "$tool" ] || tool=$(command -v tpu-info); then
    chips=$("$tool" 2> /dev/null | grep GiB | tr -cs '[:alnum:]./%' ' ' | paste -s -d ';') || true
  fi
  answer "$(cut -d ' ' -f 1 /proc/loadavg) of $(nproc)" "$memory" "$(df --output=pcent . | tail -n 1 | tr -d ' ')" "${chips:--}"
}

main() {
  case ${1:---help} in
    -h | --help)
      sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      return
      ;;
  esac
  if [ -n "$framed" ]; then
    echo '-- axis-by-axis answers --'
    trap answered EXIT
  fi
  cd "$HOME"
  mkdir -p "$1" 2> /dev/null && [ -w "$1" ] || fail "cannot write to $HOME: $(cd "$1" 2> /dev/null && pwd || echo "$1")"
  cd "$1"
  shift
  local asked=${1:-}
  shift || true
  if [ "$asked" != doctor ]; then
    command -v flock > /dev/null || fail "flock is missing: sudo apt-get install util-linux"
  fi
  case $asked in
    prepare) prepare "$@" ;;
    receive) receive "$@" ;;
    check) check "$@" ;;
    port) port "$@" ;;
    start) start "$@" ;;
    undo) undo "$@" ;;
    supervise) supervise "$@" ;;
    status) status ;;
    logs) logs "$@" ;;
    stop) stop "$@" ;;
    exec) exec_beside "$@" ;;
    pack) pack "$@" ;;
    clean) clean "$@" ;;
    doctor) doctor "$@" ;;
    usage) usage ;;
    *) fail "run.sh: '$asked' is none of its commands; see bash run.sh --help" ;;
  esac
}

main "$@"; exit # on one line: what follows on standard input is no longer shell, but what `receive` reads
