# Sourced by the scripts of this folder and by launchers/launch_cluster.sh: settings and messages.
# Variables are for the scripts that source this.
# shellcheck shell=bash disable=SC2034

rlmath_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${RLMATH_PYTHON:-$rlmath_root/.venv/bin/python}

say() { echo "[rank ${RANK:-?}] $*"; }
fail() { echo "[rank ${RANK:-?}] error: $*" >&2; exit 2; }

need_number() { # NAME VALUE
  case $2 in '' | *[!0-9]*) fail "$1='$2': a whole number is needed" ;; esac
}

# One name for all nodes of a run, that an earlier run did not have.
run_id=${RLMATH_RUN_ID:-${SLURM_JOB_ID:-default}}
shared_dir=${RLMATH_SHARED_DIR:-$rlmath_root/.cluster}
address_file=$shared_dir/ray_address.$run_id
end_file=$shared_dir/end.$run_id # While it is there, RANK 0 tells the run to save and end.
bad_nodes_file=$shared_dir/bad_nodes.$run_id # Hosts with broken GPUs, written by the driver.
port_option=' --port +([0-9]+) '
if [[ " ${RAY_OPTIONS:-} " =~ $port_option ]]; then export RAY_PORT=${BASH_REMATCH[1]}; fi
state_dir=${RLMATH_STATE_DIR:-/tmp/rlmath_ray_$(id -u)}/$run_id
pid_file=$state_dir/rank_${RANK:-0}.pid
node_log=$state_dir/rank_${RANK:-0}.log
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
# Processes import from a disk that all nodes read at once; Ray's own limit is a minute.
export RAY_worker_register_timeout_seconds=${RAY_worker_register_timeout_seconds:-300}

# Ray listens on every interface and cannot be told otherwise, so that it shall do only what it is
# asked with the run's token. RANK 0 makes it; a token or mode of the user's own goes first.
token_file=$(realpath -m "$shared_dir")/ray_token.$run_id
with_token() {
  if [ -z "${RAY_AUTH_MODE:-}${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token_file
  fi
}

# Whether something listens at HOST:PORT.
answers() { timeout 3 bash -c "exec 3<>/dev/tcp/${1%:*}/${1##*:}" 2>/dev/null; }

# Whether this node's Ray runs. In a container without an init its end leaves a zombie, whose command
# line is empty, and after a reboot its number may be another process's.
node_is_alive() { [ -s "$pid_file" ] && grep -qs ray "/proc/$(cat "$pid_file")/cmdline"; }

# The head's address: of the file when a head answers there, so a stale file counts as none.
head_address() {
  local address
  if [ -n "${MASTER_ADDR:-}" ]; then
    address=$MASTER_ADDR:${RAY_PORT:-6379}
  elif [ -s "$address_file" ]; then
    address=$(cat "$address_file")
  else
    return 1
  fi
  answers "$address" && echo "$address"
}
