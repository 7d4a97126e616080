#!/usr/bin/env bash
# Compiles Transformer Engine's torch extension and installs it into an environment.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: launchers/transformer_engine.sh [VENV]
       launchers/transformer_engine.sh --check PYTHON

Compiles the extension of Transformer Engine that requirements/cuda.lock names against the torch of
VENV (default: .venv), where the rest of the lock is installed, and installs it there. It is C++
only: no nvcc and no GPU are needed, but a C++ compiler (g++, or the one that CXX names) and
Python's headers. --check looks for these two and does nothing else.

28 files, half a minute to a minute and up to 3 GiB of memory each. MAX_JOBS: how many at a time
(default: as many as cores and memory allow). Nothing is compiled where the extension can be
imported already.
HELP
}

GIB_PER_JOB=3

need_compiler() {
  if ! command -v "${CXX:-c++}" >/dev/null; then
    echo "error: no C++ compiler (${CXX:-c++}): Transformer Engine is compiled on this machine." >&2
    echo "Install g++ (Debian, Ubuntu: apt-get install g++; RHEL: dnf install gcc-c++)," >&2
    echo "or name one: CXX=/path/to/g++ $0" >&2
    return 1
  fi
}

need_headers() { # PYTHON
  local include version
  include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if [ ! -f "$include/Python.h" ]; then
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "error: no $include/Python.h: Transformer Engine is compiled on this machine." >&2
    echo "Install Python's headers (Debian, Ubuntu: apt-get install python$version-dev;" >&2
    echo "RHEL: dnf install python$version-devel), or use an interpreter that has them." >&2
    return 1
  fi
}

check() { # PYTHON
  local missing=0
  need_compiler || missing=1
  need_headers "$1" || missing=1
  [ "$missing" = 0 ] || exit 2
}

# Memory that this process may use, in GiB: the machine's or the container's.
memory_gib() {
  local kib limit
  kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
  if [ "$limit" != max ] && [ $((limit / 1024)) -lt "$kib" ]; then kib=$((limit / 1024)); fi
  echo $((kib / 1048576))
}

default_jobs() {
  local jobs
  jobs=$(($(memory_gib) / GIB_PER_JOB))
  [ "$jobs" -lt "$(nproc)" ] || jobs=$(nproc)
  [ "$jobs" -ge 1 ] || jobs=1
  echo "$jobs"
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  --check) [ $# = 2 ] || { usage >&2; exit 2; }; check "$2"; exit 0 ;;
  -*) usage >&2; exit 2 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv}
python=$venv/bin/python
[ -x "$python" ] || { echo "error: $python is not there: make $venv first" >&2; exit 2; }
wanted=$(sed -n 's/^# built: //p' "$root/requirements/cuda.lock")

# The version of the lock is installed, and its extension fits this torch. Without a driver's
# libcuda (a login node, an image being built) it has to load all the same.
imports() {
  "$python" - "$wanted" <<'PYTHON'
import importlib.metadata, sys

name, _, version = sys.argv[1].partition("==")
found = importlib.metadata.version(name)
assert found == version, f"{name} is {found}; the lock says {version}"
import transformer_engine.pytorch
PYTHON
}

if imports 2>/dev/null; then exit 0; fi
check "$python"
jobs=${MAX_JOBS:-$(default_jobs)}
echo "compiling $wanted with $jobs jobs at a time ($((28 / jobs + 1)) minutes, more or less)"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
nvidia=$site/nvidia
# It takes CUDA's version and headers from CUDA_HOME, so from the lock's own packages whatever CUDA
# the machine has; cuDNN's and NCCL's headers are in their own packages. What pip has built
# before is not taken: it may be for another torch.
CUDA_HOME=$nvidia/cu13 \
  CPLUS_INCLUDE_PATH=$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH} \
  PATH=$(cd "$venv" && pwd)/bin:$PATH NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
  MAX_JOBS=$jobs PIP_DISABLE_PIP_VERSION_CHECK=1 \
  "$python" -m pip install -q --no-cache-dir --no-deps --no-build-isolation --force-reinstall \
  "$wanted"
imports || {
  echo "error: Transformer Engine was compiled and cannot be imported (above)" >&2
  exit 1
}
