#!/usr/bin/env bash
# Waits until the cluster is whole.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: ray_utils/check_ray.sh N [timeout_s]

Waits until the cluster that start_ray.sh has started has N accelerators (on CPU nodes N slots) and
WORLD_SIZE nodes (default 1), and shows what is there. More is fine. After timeout_s (default 600)
it fails, with a list of what is missing. RLMATH_SHARED_DIR, RLMATH_RUN_ID and MASTER_ADDR are those
of start_ray.sh.
EOF
}
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  '' | *[!0-9]*) usage >&2; exit 2 ;;
esac
# shellcheck source=ray_utils/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
with_token
need_number timeout_s "${2:-600}"
need_number WORLD_SIZE "${WORLD_SIZE:-1}"
head=$(head_address) || fail "no head answers (${MASTER_ADDR:-$address_file}); run start_ray.sh with RANK=0"
export PYTHONPATH=$rlmath_root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -W ignore "$rlmath_root/ray_utils/wait.py" "$1" "${2:-600}" \
  --nodes "${WORLD_SIZE:-1}" --address "$head"
