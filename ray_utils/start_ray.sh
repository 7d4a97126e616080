#!/usr/bin/env bash
# Starts this node's part of a Ray cluster; run once on each node with RANK set.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: RANK=r ray_utils/start_ray.sh [--interface NAME] [--port PORT] [--timeout-s SECONDS]
                                     [--num-cpus N] [--object-store-mib MIB]

RANK 0 starts the head and writes its address atomically for the others. Any other rank
waits until a head answers there, says what it waits for, and joins it, in three attempts. An address at which nobody
answers is of an earlier run and is ignored.

  --interface NAME         network interface between the nodes (default: the one of the default
                           route; also for gloo and, if given, NCCL)
  --port PORT              of the head (default: 6379, or RAY_PORT)
  --timeout-s SECONDS      how long to wait for the head (default: 600)
  --num-cpus N             CPU slots of this node (default: its cores, as far as
                           this process may use them)
  --object-store-mib MIB   Ray's object store (default: Ray's choice)

environment:
  RANK               0 for the head, 1, 2, ... for the others
  MASTER_ADDR        the head's host; else its address is in RLMATH_SHARED_DIR
  RLMATH_SHARED_DIR  a folder that all nodes see (default: .cluster in the clone)
  RLMATH_RUN_ID      names the run (default: SLURM_JOB_ID, or "default")
  RLMATH_STATE_DIR   for process ids and logs of this node (default: in /tmp)
  RLMATH_PYTHON      the environment's Python (default: .venv/bin/python)
  RAY_AUTH_MODE      token (default): who calls Ray has to know the token that RANK 0 writes to
                     RLMATH_SHARED_DIR, for its own user to read; disabled: whoever reaches its ports

exit code: 0 started, 2 not, 3 not because a head that had answered has gone
EOF
}

interface='' port=${RAY_PORT:-6379} timeout_s=600 num_cpus='' object_store_mib=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --interface | --port | --timeout-s | --num-cpus | --object-store-mib)
      [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; } ;;
  esac
  case $1 in
    --interface) interface=$2 ;;
    --port) port=$2 ;;
    --timeout-s) timeout_s=$2 ;;
    --num-cpus) num_cpus=$2 ;;
    --object-store-mib) object_store_mib=$2 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift 2
done
# shellcheck source=ray_utils/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
with_token
need_number RANK "${RANK:-}"
# Cores that this process may use. nproc would say OMP_NUM_THREADS where that is set.
[ -n "$num_cpus" ] || num_cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
need_number --num-cpus "$num_cpus"
need_number --port "$port"
need_number --timeout-s "$timeout_s"
export RAY_PORT=$port
[ -x "$python" ] || fail "$python is not there: run launchers/setup.sh, or set RLMATH_PYTHON"

address_of() { # INTERFACE
  ip -4 -o address show dev "$1" 2>/dev/null | awk '{sub("/.*", "", $4); print $4; exit}'
}
if [ -n "$interface" ]; then
  own=$(address_of "$interface" || true)
  [ -n "$own" ] || fail "--interface $interface: no such interface with an IPv4 address; there are $(
    ip -4 -o address show 2>/dev/null | awk '{print $2}' | sort -u | tr '\n' ' ')"
  export GLOO_SOCKET_IFNAME=$interface NCCL_SOCKET_IFNAME=$interface
else
  own=$("$python" -c 'import ray; print(ray.util.get_node_ip_address())')
  # Else gloo takes the address of the host's name, which often is 127.0.1.1.
  interface=$(ip -4 -o address show 2>/dev/null | awk -v own="$own" '
    { sub("/.*", "", $4) } $4 == own { print $2; exit }')
  [ -z "$interface" ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
fi
if [[ $own == 127.* && ${WORLD_SIZE:-1} -gt 1 ]]; then # Without a default route, for example.
  say "warning: the address of this node is $own, where other nodes do not reach it; give --interface"
fi

node_is_alive && fail "this node runs already (process $(cat "$pid_file")); end it: ray_utils/stop_ray.sh"
mkdir -p "$state_dir" "$shared_dir"
options=(--node-ip-address "$own" --disable-usage-stats --block
  --num-cpus "$num_cpus" --resources "{\"rlmath_rank_$RANK\": 1}")
[ -z "$object_store_mib" ] || options+=(--object-store-memory "$((object_store_mib * 1048576))")

start_node() {
  : >"$node_log" # An earlier run's words are not this one's.
  setsid "$python" -m ray.scripts.scripts start "${options[@]}" "$@" \
    </dev/null >"$node_log" 2>&1 &
  echo $! >"$pid_file"
}
died() { fail "Ray ended at once; the end of $node_log:
$(tail -n 15 "$node_log")"; }

if [ "$RANK" = 0 ]; then
  rm -f "$address_file"
  answers "$own:$port" && fail "something listens at $own:$port already; set another RAY_PORT on all nodes"
  if [ "${RAY_AUTH_TOKEN_PATH:-}" = "$token_file" ]; then
    (umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$token_file.$$")
    mv "$token_file.$$" "$token_file"
  fi
  start_node --head --port "$port" --include-dashboard false
  waited_s=0
  until answers "$own:$port"; do
    node_is_alive || died
    [ "$waited_s" -lt "$timeout_s" ] || fail "the head did not answer at $own:$port in $timeout_s s"
    sleep 1
    waited_s=$((waited_s + 1))
  done
  echo "$own:$port" >"$address_file.$$"
  mv "$address_file.$$" "$address_file"
  say "head at $own:$port"
  exit 0
fi

waited_s=0
until head=$(head_address); do
  if [ "$waited_s" -ge "$timeout_s" ]; then
    if [ -n "${MASTER_ADDR:-}" ]; then
      fail "no head answered at $MASTER_ADDR:$port in $timeout_s s"
    elif [ -s "$address_file" ]; then
      fail "no head answered in $timeout_s s: $address_file says $(cat "$address_file"), where nobody listens"
    fi
    fail "RANK 0 has not written $address_file in $timeout_s s; is it a folder that all nodes see?"
  fi
  [ $((waited_s % 15)) -ne 0 ] || say "waiting for the head (${MASTER_ADDR:-$address_file}), $waited_s of $timeout_s s"
  sleep 1
  waited_s=$((waited_s + 1))
done
# A busy machine may not start Ray in the half minute that Ray itself allows: three attempts.
joined() { grep -qs "Ray runtime started" "$node_log"; }
for attempt in 1 2 3; do
  start_node --address "$head"
  until joined || ! node_is_alive; do sleep 1; done
  joined && break
  [ "$attempt" -lt 3 ] || died
  answers "$head" || { echo "[rank $RANK] error: the head at $head has gone" >&2; exit 3; }
  say "Ray ended at once ($(tail -n 1 "$node_log")); attempt $((attempt + 1)) of 3"
  # What it had started before it gave up is in its session.
  ps -o pid= -s "$(cat "$pid_file")" | xargs -r kill -KILL 2>/dev/null || true
done
say "$own has joined the head at $head"
