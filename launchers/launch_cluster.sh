#!/usr/bin/env bash
# One run over several nodes: every node calls this with its RANK.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: RANK=r WORLD_SIZE=n launchers/launch_cluster.sh SLOTS EXPERIMENT [--config-dir DIR] [key=value ...]

--config-dir DIR (an absolute path) has your own experiments. Starts Ray on this node. RANK 0 waits until SLOTS accelerators (on CPU: slots) of WORLD_SIZE nodes
are there and trains; the other ranks stay until it ends. All exit with its exit code, or with 1
when the head is lost. Exit code 75: GPUs are broken, on the hosts in bad_nodes.RLMATH_RUN_ID. SIGTERM to RANK 0, or the file end.RLMATH_RUN_ID in RLMATH_SHARED_DIR, tells
the run to save and end; Ray stays until it has, on all nodes. RAY_OPTIONS is given to
ray_utils/start_ray.sh ("--interface eth0");
RLMATH_CHECK_TIMEOUT_S is the time for nodes to come (default 600); for other variables see
ray_utils/start_ray.sh --help. All nodes have to see the clone, the run's folder and
RLMATH_SHARED_DIR.
EOF
}
case ${1:-} in
  -h | --help) usage; exit 0 ;;
esac
[ $# -ge 2 ] || { usage >&2; exit 2; }
slots=$1 experiment=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ray_utils/common.sh
. ray_utils/common.sh
with_token
need_number SLOTS "$slots"
need_number RANK "${RANK:-}"
need_number WORLD_SIZE "${WORLD_SIZE:-}"
[ "$WORLD_SIZE" -ge 1 ] && [ "$slots" -ge "$WORLD_SIZE" ] ||
  fail "SLOTS=$slots: WORLD_SIZE=$WORLD_SIZE nodes have at least one each"
exit_file=$shared_dir/exit_code.$run_id
[ "$RANK" != 0 ] || { mkdir -p "$shared_dir"; rm -f "$exit_file" "$bad_nodes_file" "$address_file"; }
export RLMATH_BAD_NODES=$bad_nodes_file
# Of an earlier run. A job of Slurm may have been told already, and its script removes an old one.
[ "$RANK" != 0 ] || [ -n "${SLURM_JOB_ID:-}" ] || rm -f "$end_file"

# Batch systems send TERM to this script, to its process group, or both, and more than once. A run
# that saves needs Ray on every node meanwhile, and takes a second TERM as the end of its saving.
asked='' child=''
ask_to_end() {
  [ -z "$asked" ] || return 0
  asked=yes
  say "told to end: the run saves what it can"
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}

# Runs a command in a separate session, so that it is told to end by ask_to_end alone.
run_until_asked() {
  [ -z "$asked" ] || return 143
  setsid "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    [ ! -e "$end_file" ] || ask_to_end
    sleep 1 || true # TERM to the process group ends it.
  done
  local code=0
  wait "$child" || code=$?
  child=''
  return "$code"
}

# Leaves with the exit code of RANK 0, which the head writes before it ends, if there is one.
leave_with_head() {
  sleep 5
  ls "$shared_dir" >/dev/null 2>&1 || true # Else NFS may not show a new file for minutes.
  [ -s "$exit_file" ] || return 0
  say "RANK 0 has ended with exit code $(cat "$exit_file")"
  exit "$(cat "$exit_file")"
}

start_node() {
  local started=0
  # The options are words, not one word.
  # shellcheck disable=SC2086
  bash ray_utils/start_ray.sh ${RAY_OPTIONS:-} || started=$?
  if [ "$started" -eq 3 ]; then
    leave_with_head # It had answered, so a code is of this run.
    say "error: RANK 0 has left no exit code: the head is lost" >&2
    exit 1
  fi
  [ "$started" -eq 0 ] || exit "$started"
}

trap 'trap "" TERM HUP USR1 USR2; bash ray_utils/stop_ray.sh' EXIT
if [ "$RANK" = 0 ]; then
  trap ask_to_end TERM HUP USR1 USR2
  # Of a terminal. It does not reach the other session; a second one ends the saving.
  trap 'asked=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' INT
else
  trap : TERM HUP USR1 USR2 # RANK 0 hears of it too, and this node's Ray has to outlive the saving.
fi
start_node

if [ "$RANK" = 0 ]; then
  code=0
  run_until_asked bash ray_utils/check_ray.sh "$slots" "${RLMATH_CHECK_TIMEOUT_S:-600}" || code=$?
  if [ "$code" -eq 0 ]; then
    run_until_asked bash launchers/run_math_grpo.sh "$experiment" "cluster.nodes=$WORLD_SIZE" \
      "cluster.gpus_per_node=$((slots / WORLD_SIZE))" \
      "cluster.ray_address=$(head_address)" "$@" || code=$?
  fi
  rm -f "$end_file"
  echo "$code" >"$exit_file.$$"
  mv "$exit_file.$$" "$exit_file"
  exit "$code"
fi

# Also for what is called here. Ray was started before, so that its processes can be ended.
trap '' TERM HUP USR1 USR2
while [ ! -s "$exit_file" ]; do
  if ! node_is_alive; then
    leave_with_head
    if ! head_address >/dev/null; then
      say "error: Ray on this node has ended and RANK 0 has left no exit code: the head is lost" >&2
      exit 1
    fi
    # Ray gives up a node that was silent for a minute, and ends there when it is heard again.
    say "Ray on this node has ended, and the head answers: joining it again"
    bash ray_utils/stop_ray.sh
    (trap - TERM HUP USR1 USR2 && start_node) || exit
  fi
  sleep 1
done
say "RANK 0 has ended with exit code $(cat "$exit_file")"
exit "$(cat "$exit_file")"
