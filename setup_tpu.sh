#!/usr/bin/env bash
# Put the commit that is checked out here, and its packages, on every host of a slice.
#
#   ./setup_tpu.sh --hosts hosts.txt
#   ./setup_tpu.sh --help
#
# Needs and changes: see --help.
set -euo pipefail

AXIS_SCRIPT=setup_tpu exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" "$@"
