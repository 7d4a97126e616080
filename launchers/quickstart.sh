#!/usr/bin/env bash
# Sets up and trains a tiny model on arithmetic, for real. Arguments are Hydra overrides.
set -euo pipefail

if [ "${1:-}" = --help ]; then
  cat <<'EOF'
usage: launchers/quickstart.sh [key=value ...]

Sets up .venv; makes a tiny model and arithmetic problems; fine-tunes the model to a weak start; trains
it with Megatron, vLLM and GRPO; leaves everything in runs/quickstart. Arguments are settings
(docs/settings.md): launchers/quickstart.sh actor.pipeline_parallel=2 runner.steps=20
EOF
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
bash launchers/setup.sh
export RLMATH_SETUP_S=$((SECONDS - started))
exec .venv/bin/python -W ignore -m rlmath.quickstart.run "$@"
