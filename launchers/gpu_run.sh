#!/usr/bin/env bash
# A run on a machine with a GPU, nothing installed, no network and little time: see --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_run.py" "$@"
