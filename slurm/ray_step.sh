#!/usr/bin/env bash
# One task of a step whose nodes are a Ray cluster for as long as it lasts: the first one starts the head and runs
# COMMAND, the launcher, the others join. The address of the head is added to its options.
#   ray_step.sh CPUS GPUS PYTHON -P LAUNCHER OPTIONS...
# Ports follow from the job, below those of outgoing connections; nodes that share a network have ports of their own.
# Files lie in a short folder, since the path of a socket has at most 107 bytes.
set -euo pipefail
cpus=$1 gpus=$2 python=$3
shift 2
readonly JOIN_S=60
port=$((20000 + SLURM_JOB_ID % 300 * 40))
own=$((port + 1 + SLURM_PROCID % 6 * 6))
folder=/tmp/r$SLURM_JOB_ID-$SLURM_PROCID
export RAY_USAGE_STATS_ENABLED=0 RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0

address_of() { # HOST
  local address
  read -r address _ < <(getent ahostsv4 "$1")
  echo "$address"
}

is_reached() { (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; }

start_node() { # OPTIONS...
  "$python" -m ray.scripts.scripts start --block --disable-usage-stats --include-log-monitor=false "$@" --num-cpus="$cpus" --num-gpus="$gpus" \
    --object-store-memory=$((256 << 20)) --temp-dir="$folder" --min-worker-port=0 --max-worker-port=0 \
    --node-manager-port="$own" --object-manager-port=$((own + 1)) --metrics-export-port=$((own + 2)) \
    --dashboard-agent-listen-port=$((own + 3)) --dashboard-agent-grpc-port=$((own + 4)) \
    --runtime-env-agent-port=$((own + 5)) </dev/null >&2 &
  ray=$!
}

stop_node() {
  trap '' TERM
  kill "$ray" 2>/dev/null || true
  wait "$ray" || true
  rm -rf "$folder"
}

await_head() {
  local deadline=$((SECONDS + JOIN_S))
  until is_reached; do
    ((SECONDS < deadline)) || { echo "ray_step.sh: no Ray head at $head:$port within $JOIN_S s" >&2 && exit 1; }
    sleep 0.2
  done
}

# A node that is lost does not end the step: the launcher says which one it was.
follow_head() {
  local misses=0
  while ((misses < 3)); do
    is_reached && misses=0 || misses=$((misses + 1))
    sleep 0.5
  done
}

read -r first < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
head=$(address_of "$first") address=$(address_of "$(hostname)")
# A host's own name may lead to loopback, where no other host reaches it: then Ray finds the address.
[[ $address == 127.* && $head != 127.* ]] || named=(--node-ip-address="$address")
trap stop_node EXIT
trap 'exit 143' TERM
if ((SLURM_PROCID == 0)); then
  start_node --head --port="$port" --include-dashboard=false "${named[@]}"
  await_head
  "$1" "$2" "$3" --address="$head:$port" "${@:4}" <&0 &
  wait $!
else
  await_head
  start_node --address="$head:$port" "${named[@]}"
  follow_head
fi
