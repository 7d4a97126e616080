#!/usr/bin/env bash
# Makes the environment that every launcher uses: .venv in the clone, from a full lock.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: launchers/setup.sh [auto|cpu|cuda]

Makes .venv in the clone with the locked versions of requirements/ (auto: CUDA where nvidia-smi
lists a GPU, else CPU). Quick when it is there already. Needs Python 3.11 or later; PYTHON names
another interpreter.

cuda: an NVIDIA driver of version 580 or newer, to run; a C++ compiler and Python's headers, because
Transformer Engine is compiled against the locked torch (launchers/transformer_engine.sh: no nvcc,
no GPU; half an hour on one core, minutes on many). RLMATH_SETUP_WITHOUT_TE=1 leaves it out: the
layers are Megatron's own then, which are slower and take more memory.
EOF
}

case "${1:-auto}" in
  -h | --help) usage; exit 0 ;;
  auto | cpu | cuda) kind=${1:-auto} ;;
  *) usage >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$kind" = auto ]; then
  kind=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then kind=cuda; fi
fi

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python 3.11 or later found; install one, or name it: PYTHON=... $0" >&2
  exit 2
}

lock="requirements/$kind.lock"
with_te=no
if [ "$kind" = cuda ] && [ -z "${RLMATH_SETUP_WITHOUT_TE:-}" ]; then with_te=yes; fi
wanted="$kind TE:$with_te $(cat "$lock" pyproject.toml | cksum)"
if [ -x .venv/bin/rlmath ] && [ "$(cat .venv/rlmath-setup 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

python=.venv/bin/python
[ -x "$python" ] || python=$(find_python)
# Before gigabytes are fetched.
[ "$with_te" = no ] || bash launchers/transformer_engine.sh --check "$python"
echo "setting up .venv for $kind from $lock (a minute or two the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
install() { .venv/bin/python launchers/install.py "$@"; }
if [ "$kind" = cpu ]; then
  # The CPU build is on PyTorch's own index, or wherever pip has been told to look.
  torch=$(sed -n 's/^# \(torch==.*\)$/\1/p' "$lock")
  install "$torch" 2>/dev/null ||
    install "$torch" --index-url https://download.pytorch.org/whl/cpu
fi
# The lock is whole, so nothing is resolved: what vLLM's CPU package asks for and breaks a CPU
# environment (torchvision, torchaudio, torchcodec) stays out.
install -r "$lock"
[ "$with_te" = no ] || bash launchers/transformer_engine.sh .venv
.venv/bin/python -m pip install -qq --no-deps --no-build-isolation -e ".[$kind]"
echo "$wanted" >.venv/rlmath-setup
