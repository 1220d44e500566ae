#!/usr/bin/env bash
# Show all hosts, e.g. of a TPU slice, in tmux, with one pane per host.
#
#   ./debug_tpu.sh --hosts hosts.txt
#   ./debug_tpu.sh --help
#
# What it needs and changes: see --help.
set -euo pipefail

AXIS_SCRIPT=debug_tpu exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" "$@"
