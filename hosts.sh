# shellcheck shell=bash
# What launcher.sh, setup_tpu.sh and debug_tpu.sh share: which hosts there are, how one is asked, and all at once.
# It is read by them, not run. It works with bash 3.2, which macOS has, and changes nothing on the machine it runs on.
set -euo pipefail

# Describe the script that reads this: the comment at its top.
help() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0"
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

whole_number() {
  case $2 in '' | 0?* | *[!0-9]*) fail "$1 must be a whole number, not '$2'" ;; esac
}

for name in PARALLEL TIMEOUT CONNECT_TIMEOUT SETUP_TIMEOUT GRACE COORDINATOR_PORT RESTART_WAIT LOG_MIB KEEP; do
  whole_number "$name" "${!name:-0}"
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC2034  # read by the scripts
by=${USER:-$(id -un)}@$(hostname | cut -d . -f 1) # who asks
folder=${HOST_FOLDER:-axis-by-axis}
parallel=${PARALLEL:-16}
limit=${TIMEOUT:-60}
dry=${DRY_RUN:-}
if [ -n "$dry" ]; then parallel=1; fi # in order
ssh=(ssh -o BatchMode=yes -o "ConnectTimeout=${CONNECT_TIMEOUT:-10}" -o StrictHostKeyChecking=accept-new)
ssh=("${ssh[@]}" -o ServerAliveInterval=15) # a connection that is cut ends within 45 s
if [ -n "${SSH_CONFIG:-}" ]; then ssh=("${ssh[@]}" -F "$SSH_CONFIG"); fi

# Print words as a POSIX shell reads them. Not `printf %q`: its $'..' is bash's alone.
quoted() {
  local word quote="'\\''" apart=
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=,@%+-]*) word=\'${word//\'/$quote}\' ;;
    esac
    printf '%s%s' "$apart" "$word"
    apart=' '
  done
}

# Which hosts ----------------------------------------------------------------------------------------------------------

# Part a command line into `hosts`, `command` (what follows --) and `words` (the rest).
read_command_line() {
  local source='' tpu='' zone='' only=''
  words=() command=() hosts=()
  while [ $# -gt 0 ]; do
    case $1 in
      --hosts | --tpu | --zone | --only) [ $# -gt 1 ] || fail "$1 needs a value; see $0 --help" ;;
    esac
    case $1 in
      -h | --help) help && exit ;;
      --hosts) source=$2 && shift 2 ;;
      --tpu) tpu=$2 && shift 2 ;;
      --zone) zone=$2 && shift 2 ;;
      --only) only=$2 && shift 2 ;;
      -) source=/dev/stdin && shift ;;
      --)
        shift
        # shellcheck disable=SC2034  # read by the scripts
        command=("$@")
        break
        ;;
      *) words=(${words[@]+"${words[@]}"} "$1") && shift ;;
    esac
  done
  if [ -n "$tpu" ]; then
    [ -n "$zone" ] || fail "--tpu $tpu needs --zone, e.g. --zone us-central2-b"
    read_hosts < <(hosts_of_tpu "$tpu" "$zone")
    [ ${#hosts[@]} -gt 0 ] || fail "gcloud names no hosts of $tpu in $zone"
  elif [ -n "$source" ]; then
    [ ! -d "$source" ] || fail "$source is a directory; name a file of hosts, one a line"
    [ -r "$source" ] || fail "$source: there is no such file of hosts, which names one a line"
    read_hosts < "$source"
    [ ${#hosts[@]} -gt 0 ] || fail "$source names no host"
  else
    fail "say which hosts: --hosts FILE (one a line), --tpu NAME --zone ZONE, or - (from standard input)"
  fi
  if [ -n "$only" ]; then keep_only "$only"; fi
}

# keep_only NAME,NAME: of the hosts these, in the order of the file.
keep_only() {
  local host kept=()
  for host in ${1//,/ }; do
    case " ${hosts[*]} " in *" $host "*) ;; *) fail "--only $1: $host is none of the hosts: ${hosts[*]}" ;; esac
  done
  for host in "${hosts[@]}"; do
    case ",$1," in *",$host,"*) kept=(${kept[@]+"${kept[@]}"} "$host") ;; esac
  done
  [ ${#kept[@]} -gt 0 ] || fail "--only '$1' names no host"
  hosts=("${kept[@]}")
}

# A host a line, as ssh knows it; what follows # is a comment. Lines may end, and the file begin, as Windows has them.
read_hosts() {
  local line host rest
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line#$'\xef\xbb\xbf'}
    line=${line%$'\r'}
    read -r host rest <<< "${line%%#*}" || true
    case $host in
      '') continue ;;
      -*) fail "'$host' is no host; one a line" ;;
      *://* | *:*:*) ;; # a URL, an IPv6 address
      *:*) fail "'$host': ssh takes a port as ssh://$host, or from ~/.ssh/config" ;;
    esac
    [ -z "$rest" ] || fail "'$line' is more than a host; one a line, options belong in ~/.ssh/config"
    case " ${hosts[*]-} " in
      *" $host "*) fail "$host is named twice" ;;
    esac
    hosts=(${hosts[@]+"${hosts[@]}"} "$host")
  done
}

# The addresses of a slice's hosts, in the order of its workers: the external ones where there are any.
hosts_of_tpu() {
  gcloud compute tpus tpu-vm describe "$1" --zone "$2" --flatten='networkEndpoints[]' \
    --format='csv[no-heading](networkEndpoints.accessConfig.externalIp,networkEndpoints.ipAddress)' |
    sed 's/^,//; s/,.*//'
}

# Asking them ----------------------------------------------------------------------------------------------------------

leave() {
  end_jobs
  rm -rf -- "$answers"
}

end_jobs() {
  local job jobs
  jobs=$(jobs -p)
  disown -a # or bash would say of each that it was terminated
  for job in $jobs; do kill -- "-$job" 2> /dev/null || true; done
}

answers=$(mktemp -d)
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ask NUMBER WORD..: run.sh on that host, with these words; print its answer. After the script it reads what the words of
# `sends` print, if there are any. Fails with ssh's status, or 70 where there was no answer: then print what came instead.
ask() {
  local command codes script=$root/run.sh
  command=("${ssh[@]}" -- "${hosts[$1]}" "$(quoted bash -s -- "$folder" "${@:2}")")
  if [ -n "$dry" ]; then
    echo "{ $(quoted cat "$script")${sends:+ && $(quoted "${sends[@]}")}; } | $(quoted "${command[@]}")"
    return
  fi
  # macOS has no `timeout`; perl is where git is.
  { cat "$script" && if [ -n "${sends:-}" ]; then "${sends[@]}"; fi; } |
    perl -e 'alarm shift; exec @ARGV or die "$ARGV[0]: $!\n"' "$limit" "${command[@]}" | unframed || {
    codes=("${PIPESTATUS[@]}")
    [ "${codes[1]}" = 0 ] || return "${codes[1]}"
    return "${codes[2]}"
  }
}

# What stands between the marks of run.sh. What a login prints before it, .bashrc or a message of the day, is no answer.
unframed() {
  perl -e '
    $| = 1;
    my ($state, $instead) = (0, "");
    while (<STDIN>) {
      if ($state == 0) {
        if (/-- axis-by-axis answers --$/) { $state = 1 } else { $instead = substr $instead . $_, -4096 }
      } elsif ($state == 1) {
        if (/^-- axis-by-axis has answered --$/) { $state = 2 } else { print }
      }
    }
    if ($state < 2) { print $instead; exit 70 }'
}

# everywhere LABEL FUNCTION: call FUNCTION NUMBER for every host, $parallel at a time. What it prints is kept in
# $answers/NUMBER. A line for each host as it is done: LABEL, or the answer where that is empty; none where it is -.
# Fails if a host did, after a line that says which, and why; LABEL `quietly`: neither is said.
everywhere() {
  local i
  rm -f -- "$answers"/*
  set -m # a process group for each host, so that Ctrl-C ends its ssh too
  for i in "${!hosts[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$parallel" ]; do sleep 0.05; done
    one "$1" "$2" "$i" &
  done
  wait
  set +m
  if grep -qvx 0 "$answers"/*.status; then return 1; fi
}

one() {
  local label=$1 host=${hosts[$3]} status=0
  "$2" "$3" > "$answers/$3" 2> "$answers/$3.error" || status=$?
  if [ -n "$dry" ]; then
    cat "$answers/$3"
  elif [ "$label" = quietly ]; then
    :
  elif [ "$status" != 0 ]; then
    printf '%s  FAILED: %s\n' "$host" "$(cause "$status" "$3" "$host")" >&2
  elif [ "$label" != - ]; then
    printf '%s  %s\n' "$host" "${label:-$(cat "$answers/$3")}"
  fi
  printf '%s\n' "$status" > "$answers/$3.status"
}

# cause STATUS NUMBER HOST: say in a line why it failed, and what to do.
cause() {
  local last instead
  last=$(last_words "$answers/$2.error")
  instead=$(last_words "$answers/$2")
  case $1:$last in
    142:*) printf 'not done within %s s; set TIMEOUT to wait longer' "$limit" ;;
    255:*'Permission denied'*) printf 'refuses the key (%s); put yours there, or name it in ~/.ssh/config' "$last" ;;
    255:*'timed out'*) printf 'unreachable: %s' "$last" ;;
    255:*'verification failed'*) printf 'has another host key than it had; if that is right: ssh-keygen -R %s' "$3" ;;
    255:*) printf 'cannot be reached: %s; try ssh %s' "$last" "$3" ;;
    70:*) printf 'gives no answer, but %s; see what ssh %s does before it runs a command' \
      "${instead:+prints: }${instead:-ends}" "$3" ;;
    *:) printf 'exit status %s%s' "$1" "${instead:+; it prints: $instead}" ;;
    *) printf '%s' "$last" ;;
  esac
}

last_words() {
  grep -v '^[[:space:]]*$' "$1" 2> /dev/null | tail -n 1 | tr -d '\r' | cut -c 1-500
}

# A line for each cause, not for each host: that of a command is the same everywhere.
say_causes() {
  local i
  for i in "${!hosts[@]}"; do
    if failed "$i"; then
      printf '%s\t%s\n' "$(cause "$(cat "$answers/$i.status")" "$i" "${hosts[$i]}")" "${hosts[$i]}"
    fi
  done | awk -F '\t' '
    !($1 in first) { first[$1] = $2; order[++causes] = $1 }
    { count[$1]++ }
    END {
      for (n = 1; n <= causes; n++) {
        who = first[order[n]] (count[order[n]] > 1 ? " and " count[order[n]] - 1 " more" : "")
        print who "  FAILED: " order[n]
      }
    }' >&2
}

# A commit to every host -----------------------------------------------------------------------------------------------

# Find the commit to ship. What is not committed would not be shipped, so it is refused.
find_commit() {
  local edits
  commit=$(git -C "$root" rev-parse HEAD) || fail "$root is no git checkout; hosts are given a commit"
  edits=$(git -C "$root" status --porcelain --untracked-files=no)
  [ -z "$edits" ] || fail "not committed: $(cut -c 4- <<< "$edits" | paste -s -d ' ' -); hosts are given a commit, so commit first"
}

# put_in_order free|busy: have the commit and its packages on every host. free: fails where a run is alive.
put_in_order() {
  wanted=$1
  find_commit
  echo "commit ${commit:0:7} on ${#hosts[@]} hosts"
  limit=${SETUP_TIMEOUT:-900} everywhere ready put_one_in_order
}

put_one_in_order() {
  local status=0 sends=()
  clock_apart 4 ask "$1" prepare "$commit" "${VENV:-}" "$wanted" || status=$?
  if [ -n "$dry" ]; then echo '# if that ends with exit status 3, the commit is not there yet:'; fi
  if [ "$status" = 3 ] || [ -n "$dry" ]; then
    sends=(git -C "$root" archive --format=tar.gz "$commit")
    clock_apart 4 ask "$1" receive "$commit" "${VENV:-}" "$wanted"
  else
    return "$status"
  fi
}

# clock_apart PLACE COMMAND..: its answer, in which the time at PLACE becomes the seconds it is apart from ours, as far as
# the time that asking took can tell.
clock_apart() {
  local place=$1 before found status=0
  shift
  before=$(date +%s)
  found=$("$@") || status=$?
  if [ -n "$dry" ] || [ "$status" != 0 ]; then
    printf '%s' "${found:+$found
}"
  else
    awk -F '\t' -v OFS='\t' -v place="$place" -v before="$before" -v after="$(date +%s)" '{
      if ($place < before) $place -= before; else if ($place > after) $place -= after; else $place = 0
      print
    }' <<< "$found"
  fi
  return "$status"
}

# Tables ---------------------------------------------------------------------------------------------------------------

# table HEADING..: the fields of the answers below their headings, a host a line: those of `rows`, or all.
table() {
  local i
  {
    (IFS=$'\t' && printf 'host\t%s\n' "$*")
    for i in ${rows-${!hosts[@]}}; do
      if failed "$i"; then
        echo "${hosts[$i]}"$'\t'FAILED
      else
        echo "${hosts[$i]}"$'\t'"$(cut -f "1-$#" "$answers/$i")"
      fi
    done
  } | awk -F '\t' '
    { for (i = 1; i <= NF; i++) { cell[NR, i] = $i; if (length($i) > width[i]) width[i] = length($i) }; fields[NR] = NF }
    END {
      for (n = 1; n <= NR; n++) {
        line = ""
        for (i = 1; i <= fields[n]; i++) line = line sprintf(i < fields[n] ? "%-" width[i] + 2 "s" : "%s", cell[n, i])
        print line
      }
    }'
}

failed() {
  [ "$(cat "$answers/$1.status")" != 0 ]
}

# field NUMBER PLACE: of a host's answer; nothing where it has none.
field() {
  cut -f "$2" "$answers/$1" | grep -vx -e - -e none || true
}

# differ PLACE NAME: a line for each host whose field there is not what most hosts have; fails if there is one.
differ() {
  local i most value status=0
  most=$(for i in "${!hosts[@]}"; do field "$i" "$1"; done | sort | uniq -c | sort -rn | sed 's/^ *[0-9]* //; q')
  for i in "${!hosts[@]}"; do
    value=$(field "$i" "$1")
    if [ "${value:-$most}" != "$most" ]; then
      echo "${hosts[$i]}  PROBLEM: has another $2, $value; most have $most"
      status=1
    fi
  done
  return "$status"
}
