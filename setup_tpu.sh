#!/usr/bin/env bash
# Copy the commit that is checked out here to every host, e.g. of a TPU slice, and install its packages.
#
#   ./setup_tpu.sh --hosts hosts.txt
#   ./setup_tpu.sh --help
#
# What it needs and changes: see --help.
set -euo pipefail

AXIS_SCRIPT=setup_tpu exec "$(dirname "${BASH_SOURCE[0]}")/launcher.sh" "$@"
