#!/usr/bin/env bash
# Start a command on all hosts, e.g. of a TPU slice, over ssh; show its status, or stop it.
#
#   ./launcher.sh --hosts hosts.txt -- python main.py moe1b
#   ./launcher.sh --help
#
# Needs: Python 3.9 or later, ssh and git. What it changes: see --help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" > /dev/null && pwd)
for python in python3.11 python3.12 python3; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2> /dev/null; then
    exec "$python" -c 'import sys; sys.path[0] = sys.argv.pop(1); from launch.__main__ import main; sys.exit(main())' "$root" "$@"
  fi
done
echo "error: Python 3.9 or later is missing; install it, for example with apt-get install python3" >&2
exit 2
