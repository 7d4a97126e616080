#!/usr/bin/env bash
# Sets up and runs format, lint, types and all tests. Arguments go to pytest.
set -euo pipefail

if [ "${1:-}" = --help ]; then
  cat <<'EOF'
usage: launchers/test.sh [pytest arguments]
       launchers/test.sh TIER [pytest arguments]
       launchers/test.sh cuda-wheels [pytest arguments]
       launchers/test.sh bridge [pytest arguments]

Sets up .venv, checks format and lint (ruff) and types (mypy), and runs pytest. Without arguments it
runs every tier but long; for one file: launchers/test.sh tests/unit/test_cli.py -q

TIER: fast (no engine, no ranks, no run, no other process), process (commands, sandboxes,
grading workers, contracts with the libraries), engine, distributed, e2e, faults, or long (what
takes minutes more and proves the same on more cases, and properties on more random ones).
tests/conftest.py has them. Without arguments fast and process run first, on all cores; then the
others, two at a time. All of them run even if one fails; one summary stands at the end, and Ctrl-C
ends them all.

cuda-wheels: tests/cuda_wheels with the CUDA builds of requirements/cuda.lock, on a machine without
a GPU. Fetches 10 GB and compiles Transformer Engine the first time, into .venv-cuda-wheels or the
environment that RLMATH_CUDA_WHEELS_VENV names.

bridge: tests/bridge, the weight tables against those of Megatron-Bridge, which it fetches with
transformers 4 into .venv/bridge.
EOF
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda_wheels() {
  local venv=${RLMATH_CUDA_WHEELS_VENV:-.venv-cuda-wheels} python=${PYTHON:-python3}
  [ ! -x "$venv/bin/python" ] || python=$venv/bin/python
  bash launchers/transformer_engine.sh --check "$python"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install -q --no-deps \
    -r requirements/cuda.lock
  bash launchers/transformer_engine.sh "$venv"
  venv=$(cd "$venv" && pwd)
  # In the place of the driver's library, which vLLM's kernels are linked to; every call to this one
  # answers that there is no device.
  mkdir -p "$venv/stub"
  "${CC:-cc}" -shared -fPIC -o "$venv/stub/libcuda.so.1" tests/cuda_wheels/stub_libcuda.c
  export LD_LIBRARY_PATH=$venv/stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  # A GPU of this machine is not touched; the tests forge one.
  export CUDA_VISIBLE_DEVICES='' RLMATH_CUDA_WHEELS=1 PYTHONPATH=$PWD
  [ $# -gt 0 ] || set -- tests/cuda_wheels
  exec "$venv/bin/python" -m pytest "$@"
}

if [ "${1:-}" = cuda-wheels ]; then
  shift
  cuda_wheels "$@"
fi
bash launchers/setup.sh
# Types are checked while packages are fetched.
.venv/bin/mypy > .venv/mypy.txt 2>&1 &
types=$!
# Each in its own folder, .venv/FOLDER, where only the tests that need it look.
apart() { # FOLDER REQUIREMENT...
  local folder=.venv/$1 one name missing=''
  shift
  for one; do
    name=${one%%==*}
    [ -d "$folder/${name//-/_}-${one#*==}.dist-info" ] || missing=yes
  done
  [ -n "$missing" ] || return 0
  rm -rf "$folder"
  .venv/bin/python -m pip install -qq --no-deps --target "$folder" "$@"
}
# Triton's interpreter runs kernels without a GPU. Where vLLM and Megatron find Triton they choose
# other code.
apart triton "$(grep '^triton==' requirements/cuda.lock)"
# Rewards of TRL are used as they are, and compared with rlmath's own.
apart trl trl==1.16.0
# The site of docs/ is built.
bash launchers/docs.sh --packages
# Ray's job server, which the CUDA image has. With it, each Ray of a test would start a larger agent.
read -ra job_server < <(sed -n 's/^# job server: //p' requirements/cuda.lock)
for at in "${!job_server[@]}"; do
  job_server[at]=$(grep "^${job_server[at]}==" requirements/cuda.lock)
done
apart ray-default "${job_server[@]}"
# Set in many images. pytest would then rewrite the assertions of all files in each process.
unset PYTHONDONTWRITEBYTECODE

.venv/bin/ruff format --check --quiet . || {
  echo "error: files above are not formatted; run .venv/bin/ruff format ." >&2
  exit 1
}
.venv/bin/ruff check .
wait "$types" || {
  cat .venv/mypy.txt >&2
  exit 1
}
cat .venv/mypy.txt

on_cores() { # MORE
  read -ra in_parallel < <(.venv/bin/python -c "from tests.tiers import on_cores; print(*on_cores($1))")
}
tier=${1:-}
case $tier in
  fast)
    shift; on_cores 0
    exec .venv/bin/python -m pytest -m "fast and not long" "${in_parallel[@]}" "$@" ;;
  process)
    shift; on_cores 1
    exec .venv/bin/python -m pytest -m "process and not long" "${in_parallel[@]}" "$@" ;;
  engine | distributed | e2e | faults)
    shift; exec .venv/bin/python -m pytest -m "$tier and not long" "$@" ;;
  bridge)
    shift
    # Transformers below 5, and what that needs.
    apart bridge megatron-bridge==0.3.1 transformers==4.57.6 huggingface-hub==0.36.0 \
      tokenizers==0.22.2
    exec .venv/bin/python -m pytest tests/bridge "$@" ;;
  long)
    exec .venv/bin/python tests/tiers.py "$@" ;;
esac
for argument in "$@"; do
  # A file or a folder; options alone are for the whole suite.
  [ "${argument#-}" != "$argument" ] || exec .venv/bin/python -m pytest "$@"
done
exec .venv/bin/python tests/tiers.py "$@"
