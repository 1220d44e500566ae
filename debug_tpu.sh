#!/usr/bin/env bash
# Show every host of a slice at once, a tmux pane for each.
#
#   ./debug_tpu.sh --hosts hosts.txt
#   ./debug_tpu.sh --help
#
# Needs and changes: what --help says.
set -euo pipefail

AXIS_SCRIPT=debug_tpu exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" "$@"
