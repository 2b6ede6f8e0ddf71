#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Trains on two machines that are network namespaces joined by a virtual cable: processes of
# different namespaces share no loopback, so that addresses, interfaces and ports must be right.
# Compares the losses with those of one process, and those of runs that broke off with those of
# runs that did not.
#
#   sudo tests/multi_machine/two_namespaces.sh <python> [<distributed_digits program> <its data>]
#
# Needs root (ip netns) and iproute2. docs/beyond_one_machine.md describes what it shows.
set -euo pipefail

python=$(command -v "$1")
program=${2:-}
data=${3:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
digits="$root/examples/python/distributed_digits.py"
model="$root/examples/python/sharded_lm.py"
dying="$root/tests/python/examples/dying_sharded_lm.py"
# Of the language model: fp32 and a size that takes seconds.
small=(--precision fp32 --layers 2 --width 32 --sequence 32 --batch 8 --steps 12 --warm-up 4)
small+=(--validation-samples 16 --checkpoint-every 3)
out=$(mktemp -d)
machines=(torchfuse_a torchfuse_b)
cables=(tf_a tf_b)
addresses=(10.77.0.1 10.77.0.2)
port=29571
export OMP_NUM_THREADS=1

# --- The machines ------------------------------------------------------------------------------

clean_up() {
  for machine in "${machines[@]}"; do
    ip netns pids "$machine" 2>/dev/null | xargs -r kill -9
    ip netns delete "$machine" 2>/dev/null || true
  done
  rm -rf "$out"
}

make_machines() {
  trap clean_up EXIT
  ip link add tf_a type veth peer name tf_b
  for i in 0 1; do
    ip netns add "${machines[$i]}"
    ip link set "${cables[$i]}" netns "${machines[$i]}"
    ip -n "${machines[$i]}" address add "${addresses[$i]}/24" dev "${cables[$i]}"
    ip -n "${machines[$i]}" link set "${cables[$i]}" up
    ip -n "${machines[$i]}" link set lo up
  done
}

# on_machine <0 or 1> <torchrun arguments>: one process of two, in $out. It replaces the shell.
on_machine() {
  local i=$1
  shift
  cd "$out"
  GLOO_SOCKET_IFNAME=${cables[$i]} exec timeout 300 ip netns exec "${machines[$i]}" \
    "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 "$@" \
    >"$out/machine_$i.log" 2>&1
}

# static <0 or 1> <program>: what ends on one machine ends the run.
static() {
  on_machine "$1" --node-rank "$1" --master-addr "${addresses[0]}" --master-port "$port" "${@:2}"
}

# elastic <0 or 1> <program>: what ends on one machine starts again on both.
elastic() {
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on_machine "$1" --max-restarts 3 --rdzv-backend c10d \
    --rdzv-endpoint "${addresses[0]}:$port" --rdzv-id test \
    --rdzv-conf "is_host=$((1 - $1))" --local-addr "${addresses[$1]}" "${@:2}"
}

# await <process of machine 0> <of machine 1>
await() {
  local i=0 failed=0
  for process in "$@"; do
    if ! wait "$process"; then
      echo "machine $i failed:" >&2
      tail -40 "$out/machine_$i.log" >&2
      failed=1
    fi
    i=$((i + 1))
  done
  return "$failed"
}

# on_both <static or elastic> <program>
on_both() {
  local first
  "$1" 0 "${@:2}" &
  first=$!
  "$1" 1 "${@:2}" &
  await "$first" "$!"
}

# alone <program>: one process of the first machine.
alone() {
  if ! timeout 300 "$python" "$@" >"$out/alone.log" 2>&1; then
    tail -40 "$out/alone.log" >&2
    return 1
  fi
}

# compare <what> <tolerance> <losses> <losses to expect>: a list, or the log of the language model.
compare() {
  "$python" - "$@" <<'END'
import json, sys
def losses(path):
    text = open(path).read()
    if path.endswith(".json"):
        return json.loads(text)[:20]
    return [r["loss"] for r in map(json.loads, text.splitlines()) if "loss" in r]
what, tolerance, got, expected = sys.argv[1:]
got, expected = losses(got), losses(expected)
worst = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
print(f"{what}: {len(got)} losses, {worst:.1e} relative difference at most")
sys.exit(0 if worst <= float(tolerance) else 1)
END
}

# --- What is trained ---------------------------------------------------------------------------

train_digits() {
  alone -m torch.distributed.run --nproc-per-node 1 --master-port "$port" \
    "$digits" --out "$out/one" --epochs 2
  on_both static "$digits" --out "$out/two" --epochs 2
  compare "digits, Python" 1e-5 "$out/two/losses.json" "$out/one/losses.json"
  [ -n "$program" ] || return 0
  on_both static --no-python "$program" "$data" "$out/cpp" --epochs 2
  compare "digits, C++" 1e-5 "$out/cpp/losses_cpp.json" "$out/one/losses.json"
}

# Each layout on two machines, and from one machine to two and back.
train_model() {
  local parallel
  alone "$model" --out "$out/lm" "${small[@]}"
  for parallel in fsdp zero; do
    on_both static "$model" --out "$out/$parallel" "${small[@]}" --parallel "$parallel"
    compare "language model, $parallel" 1e-5 "$out/$parallel/log.jsonl" "$out/lm/log.jsonl"
  done
  on_both static "$model" --out "$out/less" "${small[@]}" --stop-after 6
  alone "$model" --out "$out/less" "${small[@]}" --resume
  compare "two machines, then one" 1e-5 "$out/less/log.jsonl" "$out/lm/log.jsonl"
  alone "$model" --out "$out/more" "${small[@]}" --stop-after 6
  on_both static "$model" --out "$out/more" "${small[@]}" --resume --parallel zero
  compare "one machine, then two" 1e-5 "$out/more/log.jsonl" "$out/lm/log.jsonl"
}

# A process of the second machine is killed in step 5, two steps after a checkpoint.
restart_a_process() {
  local parallel
  for parallel in fsdp zero; do
    rm -f "$out/batches"
    on_both elastic "$dying" step:5 --out "$out/process_$parallel" "${small[@]}" \
      --parallel "$parallel" --resume-or-begin
    if [ "$(grep -cx 5 "$out/batches")" != 2 ]; then
      echo "expected step 5 twice, because a process was killed in the first" >&2
      return 1
    fi
    compare "a process killed, $parallel" 0 "$out/process_$parallel/log.jsonl" \
      "$out/$parallel/log.jsonl"
  done
}

# All of the second machine is killed in step 5, and its command is given again.
restart_a_machine() {
  local first arguments=(--out "$out/machine" "${small[@]}" --parallel zero --resume-or-begin)
  rm -f "$out/batches"
  elastic 0 "$model" "${arguments[@]}" &
  first=$!
  elastic 1 "$dying" stop:5 "${arguments[@]}" &
  until grep -qx 5 "$out/batches" 2>/dev/null; do
    kill -0 "$first"
    kill -0 "$!"
    sleep 0.2
  done
  ip netns pids "${machines[1]}" | xargs kill -9
  wait "$!" 2>"$out/killed.log" || true
  elastic 1 "$model" "${arguments[@]}" &
  await "$first" "$!"
  compare "a machine killed, zero" 0 "$out/machine/log.jsonl" "$out/zero/log.jsonl"
}

make_machines
train_digits
train_model
restart_a_process
restart_a_machine
