#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Trains on two machines that are network namespaces joined by a virtual cable: processes of
# different namespaces share no loopback, so that addresses, interfaces and ports must be right.
# Compares the losses with those of one process.
#
#   sudo tests/multi_machine/two_namespaces.sh <python> [<distributed_digits program> <its data>]
#
# Needs root (ip netns) and iproute2. docs/sync_batch_norm.md describes what it shows.
set -euo pipefail

python=$(command -v "$1")
program=${2:-}
data=${3:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
machines=(torchfuse_a torchfuse_b)
addresses=(10.77.0.1 10.77.0.2)
port=29571

clean_up() {
  for machine in "${machines[@]}"; do
    ip netns pids "$machine" 2>/dev/null | xargs -r kill -9
    ip netns delete "$machine" 2>/dev/null || true
  done
  rm -rf "$out"
}
trap clean_up EXIT

ip link add tf_a type veth peer name tf_b
cables=(tf_a tf_b)
for i in 0 1; do
  ip netns add "${machines[$i]}"
  ip link set "${cables[$i]}" netns "${machines[$i]}"
  ip -n "${machines[$i]}" address add "${addresses[$i]}/24" dev "${cables[$i]}"
  ip -n "${machines[$i]}" link set "${cables[$i]}" up
  ip -n "${machines[$i]}" link set lo up
done

# on_both <torchrun arguments>: one process on each machine.
on_both() {
  local i pids=()
  for i in 0 1; do
    GLOO_SOCKET_IFNAME=${cables[$i]} OMP_NUM_THREADS=1 timeout 300 \
      ip netns exec "${machines[$i]}" "$python" -m torch.distributed.run --nnodes 2 \
      --nproc-per-node 1 --node-rank "$i" --master-addr "${addresses[0]}" --master-port "$port" \
      "$@" >"$out/machine_$i.log" 2>&1 &
    pids+=($!)
  done
  for i in 0 1; do
    if ! wait "${pids[$i]}"; then
      echo "machine $i failed:" >&2
      tail -40 "$out/machine_$i.log" >&2
      return 1
    fi
  done
}

# compare <losses of both machines> <of one process>
compare() {
  "$python" - "$1" "$2" <<'END'
import json, sys
two, one = (json.load(open(path))[:20] for path in sys.argv[1:])
worst = max(abs(a - b) / b for a, b in zip(two, one, strict=True))
print(f"first 20 losses, two machines against one process: {worst:.1e} relative at most")
sys.exit(0 if worst <= 1e-5 else 1)
END
}

script="$root/examples/python/distributed_digits.py"
OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --nproc-per-node 1 --master-port "$port" \
  "$script" --out "$out/one" --epochs 2 >"$out/one.log" 2>&1
on_both "$script" --out "$out/two" --epochs 2
echo "Python:"
compare "$out/two/losses.json" "$out/one/losses.json"
if [ -n "$program" ]; then
  on_both --no-python "$program" "$data" "$out/cpp" --epochs 2
  echo "C++:"
  compare "$out/cpp/losses_cpp.json" "$out/one/losses.json"
fi
