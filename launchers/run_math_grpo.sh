#!/usr/bin/env bash
# Trains an experiment; all further arguments are settings.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
  cat <<EOF
usage: launchers/run_math_grpo.sh EXPERIMENT [--config-dir DIR] [key=value ...]

Trains conf/experiment/EXPERIMENT.yaml, or DIR/experiment/EXPERIMENT.yaml (DIR: an absolute path), with
these settings (docs/settings.md). There are:
$(cd conf/experiment && printf '  %s\n' *.yaml | sed 's/\.yaml$//')
EOF
  [ $# -gt 0 ]
  exit
fi
experiment=$1
shift
# shellcheck source=ray_utils/common.sh
. ray_utils/common.sh
[ ! -s "$token_file" ] || with_token # start_ray.sh was run by hand.
[ -x "$python" ] || { echo "error: $python is not there: run launchers/setup.sh" >&2; exit 2; }
export PYTHONPATH=$rlmath_root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -W ignore -m rlmath train "experiment=$experiment" "$@"
