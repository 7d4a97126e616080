#!/usr/bin/env bash
# Ends this node's part of the cluster, and nothing else.
set -euo pipefail

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
  cat <<'EOF'
usage: RANK=r ray_utils/stop_ray.sh

Ends the Ray processes that start_ray.sh has started on this node with the same RANK and
RLMATH_RUN_ID. Other clusters of this machine keep running.
EOF
  exit 0
fi
[ $# -eq 0 ] || { echo "error: stop_ray.sh takes no arguments, see --help" >&2; exit 2; }
# shellcheck source=ray_utils/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need_number RANK "${RANK:-}"
[ "$RANK" != 0 ] || rm -f "$address_file" "$token_file"
pid=$(cat "$pid_file" 2>/dev/null || true)
# start_ray.sh made it the leader of a session, so its processes are told by their session, also
# when the leader has died and left them. The name is for a number that has been given out again.
members() { ps -o pid= -o args= -s "$pid" | awk '/ray/ && !/<defunct>/ { print $1 }'; }
if [ -z "$pid" ] || [ -z "$(members)" ]; then
  rm -f "$pid_file"
  say "nothing to stop"
  exit 0
fi
if node_is_alive; then
  kill -TERM "$pid" 2>/dev/null || true
else
  members | xargs -r kill -TERM 2>/dev/null || true
fi
for _ in $(seq 100); do
  [ -n "$(members)" ] || break
  sleep 0.1
done
members | xargs -r kill -KILL 2>/dev/null || true
rm -f "$pid_file"
say "stopped"
