#!/usr/bin/env bash
# Sets up and runs format, lint, types and all tests. Arguments go to pytest.
set -euo pipefail

if [ "${1:-}" = --help ]; then
  cat <<'EOF'
usage: launchers/test.sh [pytest arguments]

Sets up .venv, checks format and lint (ruff) and types (mypy), and runs pytest. Without arguments it
runs everything; for one file: launchers/test.sh tests/unit/test_cli.py -q
EOF
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launchers/setup.sh

.venv/bin/ruff format --check --quiet . || {
  echo "error: files above are not formatted; run .venv/bin/ruff format ." >&2
  exit 1
}
.venv/bin/ruff check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "$@"
