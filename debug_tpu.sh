#!/usr/bin/env bash
# Show all hosts of a slice in tmux, one pane per host.
#
#   ./debug_tpu.sh --hosts hosts.txt
#   ./debug_tpu.sh --help
#
# Needs and changes: see --help.
set -euo pipefail

AXIS_SCRIPT=debug_tpu exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" "$@"
