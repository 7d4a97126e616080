#!/usr/bin/env bash
# One run over several nodes: every node calls this with its RANK.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: RANK=r WORLD_SIZE=n launchers/launch_cluster.sh SLOTS EXPERIMENT [key=value ...]

Starts Ray on this node. RANK 0 waits until SLOTS accelerators (on CPU: slots) of WORLD_SIZE nodes
are there and trains; the other ranks stay until it ends. All exit with its exit code, or with 1
when the head is lost. RAY_OPTIONS is given to ray_utils/start_ray.sh ("--interface eth0");
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
exit_file=$shared_dir/exit_code.$run_id
[ "$RANK" != 0 ] || { mkdir -p "$shared_dir"; rm -f "$exit_file"; }

trap 'bash ray_utils/stop_ray.sh' EXIT
started=0
# The options are words, not one word.
# shellcheck disable=SC2086
bash ray_utils/start_ray.sh ${RAY_OPTIONS:-} || started=$?
if [ "$started" -eq 3 ]; then
  sleep 5 # The head writes the code before it ends. It had answered, so a code is of this run.
  if [ -s "$exit_file" ]; then
    say "RANK 0 has ended with exit code $(cat "$exit_file")"
    exit "$(cat "$exit_file")"
  fi
  say "error: RANK 0 has left no exit code: the head is lost" >&2
  exit 1
fi
[ "$started" -eq 0 ] || exit "$started"

if [ "$RANK" = 0 ]; then
  code=0
  bash ray_utils/check_ray.sh "$slots" "${RLMATH_CHECK_TIMEOUT_S:-600}" &&
    bash launchers/run_math_grpo.sh "$experiment" "cluster.nodes=$WORLD_SIZE" \
      "cluster.ray_address=$(head_address)" "$@" || code=$?
  echo "$code" >"$exit_file.$$"
  mv "$exit_file.$$" "$exit_file"
  exit "$code"
fi

while [ ! -s "$exit_file" ]; do
  if ! node_is_alive; then
    sleep 5 # The head writes the code before it ends.
    [ -s "$exit_file" ] && break
    say "error: Ray on this node has ended and RANK 0 has left no exit code: the head is lost" >&2
    exit 1
  fi
  sleep 1
done
say "RANK 0 has ended with exit code $(cat "$exit_file")"
exit "$(cat "$exit_file")"
