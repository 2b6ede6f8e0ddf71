#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Proves and measures torchfuse on a machine with a GPU, from the bundle of tools/gpu_bundle.sh. Nothing
# is compiled and nothing is downloaded there.
#   tools/gpu_run.sh                      every stage below, in LIMIT seconds
#   tools/gpu_run.sh kernels benchmarks   these parts alone
#   tools/on_pretended_cuda.sh tools/gpu_run.sh    a rehearsal without a GPU
#
#   OUT            folder of result.json, which is complete after every stage, and of logs; default build/gpu-run
#   BUNDLE         below the checkout; default build/gpu. To compare two libraries, run the part benchmarks with each bundle
#   LIMIT          seconds until the last stage has ended; default 490
#   KERNELS TESTS ROWS   narrow kernels (GoogleTest filter), python_tests (pytest arguments), benchmarks (row)
#   TORCHFUSE_SHA  the commit, where there is no git
#   PYTHON         the interpreter that holds torch; default python3
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHON=${PYTHON:-python3} OUT=${OUT:-$PWD/build/gpu-run} BUNDLE=$PWD/${BUNDLE:-build/gpu}
export WORK=$PWD/build/gpu-run.work PATH=$PATH:/usr/local/cuda/bin pretended=${PRETENDED_CUDA:-}
rm -rf "$WORK" && mkdir -p "$WORK" "$OUT"

# The parts of a line run beside each other. The lines stand in the order of their worth.
stages=(
  "load"
  "kernels hand_overs"
  "python_tests memcheck initcheck racecheck synccheck planted_read planted_race"
  "again" "benchmarks" "ncu" "training" "large" "compiled"
)
# Seconds that a part is expected to take. It may take 1.2 times as many, while there are some left.
declare -A expected=(
  [load]=30 [kernels]=45 [hand_overs]=50 [python_tests]=115 [memcheck]=110 [initcheck]=110 [racecheck]=110
  [synccheck]=110 [planted_read]=60 [planted_race]=60 [again]=25 [benchmarks]=120 [ncu]=40 [training]=55
  [large]=35 [compiled]=60
)
gpu_only=" memcheck initcheck racecheck synccheck planted_read planted_race "

# A device that computes on few cores is slower. xdist waits ten seconds for its workers.
slowness=$((pretended ? 30 : 1)) grace=13
limit=$((${LIMIT:-490} * slowness))

TORCH=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
export TORCH
# A pretended device's libraries, if they are there, come first.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$BUNDLE/site/torchfuse/lib:$TORCH/lib
export PYTHONPATH=$BUNDLE/site:${PYTHONPATH:-} PYTHONUNBUFFERED=1 TORCHFUSE_REQUIRE_CUDA=1
# Threads that wait must not spin: on shared cores that costs a factor of four.
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=2
export TORCHFUSE_BUILD_DIR=$BUNDLE kernel_tests=$BUNDLE/tests/cpp/kernels/cuda/torchfuse_cuda_kernel_tests
if [ -n "$pretended" ]; then
  # The same tests, on the emulation that runs the kernels' source on the CPU.
  TORCHFUSE_BUILD_DIR=$PWD/build/dev-cuda
  kernel_tests=$TORCHFUSE_BUILD_DIR/tests/cpp/kernels/cuda/torchfuse_cuda_on_cpu_tests
fi

# --- Parts. Each leaves in $REPORT what it is judged by: reports of tests as *.xml, figures as *.json.

gtest() { # REPORT FILTER [PROGRAM]
  ${3:-$kernel_tests} --gtest_filter="$2" --gtest_output="xml:$REPORT/$1.xml"
}

py() { # a test that hangs must not cost its whole stage
  local limit=()
  "$PYTHON" -c 'import pytest_timeout' 2> /dev/null && limit=(--timeout 60)
  "$PYTHON" -m pytest -q -o cache_dir="$WORK/pytest" -o faulthandler_timeout=60 --maxfail 200 \
    --junitxml="$REPORT/pytest.xml" "${limit[@]}" "$@"
}

load() {
  local status=0
  [ -n "$pretended" ] || nvidia-smi
  [ -n "$pretended" ] || gtest rounding 'CudaRounding*' || status=1
  py tests/python/cuda/test_every_op.py -m cuda -k as_on_the_cpu || status=1
  return $status
}

kernels() { # where arguments lie above 32 KB and where blocks hand over comes first
  local shards=8 filter=${KERNELS:--CudaStress*} status=0 shard
  if [ -n "$pretended" ]; then
    shards=2 filter=${KERNELS:-*Sanitizer*:*Small*}
  else
    gtest first 'CudaFusedUpdateAddresses*:CudaLastBlock*' || status=1
  fi
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard gtest $shard "$filter" > "$REPORT/$shard.log" 2>&1 &
  done
  for shard in $(jobs -p); do wait "$shard" || status=1; done
  cat "$REPORT"/*.log
  return $status
}

hand_overs() { TORCHFUSE_REPETITIONS=$((pretended ? 1 : 10000)) gtest tests 'CudaStress*'; }

python_tests() {
  local fast=(-m "cuda and not slow and not processes" -k "not compile")
  if [ -n "${TESTS:-}" ]; then
    eval "py -n 8 $TESTS"
  elif [ -n "$pretended" ]; then
    py -n 2 "${fast[@]}" tests/python/cuda tests/python/amp tests/python/ops
  else
    py -n 8 --dist worksteal "${fast[@]}" tests/python
  fi
}

# Without our allocator's margins and fresh contents, which would hide what the tools look for.
sanitizer() { # TOOL [OPTION...]
  TORCHFUSE_EXACT_ALLOCATIONS=1 gtest tests '*Sanitizer*:*Small*' \
    "compute-sanitizer --tool $* --error-exitcode 99 $kernel_tests"
}
memcheck() { sanitizer memcheck --padding 512; } # behind each allocation, so that it has no neighbor
initcheck() { sanitizer initcheck --check-api-memory-access no; } # tests download whole tensors
racecheck() { sanitizer racecheck; }
synccheck() { sanitizer synccheck; }

planted() { # FAULT WORDS TOOL [OPTION...]: the tool must find a fault of the test program
  local fault=$1 words=$2
  shift 2
  TORCHFUSE_EXACT_ALLOCATIONS=1 TORCHFUSE_PLANTED_FAULT=$fault compute-sanitizer --tool "$@" \
    "$kernel_tests" --gtest_filter='CudaBlockSum*' > "$REPORT/output" 2>&1 || true
  cat "$REPORT/output"
  grep -qE "$words" "$REPORT/output"
  echo "{\"$fault\": \"found\"}" > "$REPORT/found.json"
}
planted_read() { planted out_of_bounds 'Invalid __global__ read of size 4' memcheck --padding 512; }
planted_race() { planted missing_barrier 'RACECHECK SUMMARY: [1-9]' racecheck; }

again() { # failed tests alone; without failures, the C++ classes
  local status=0 failed
  failed=$(cat "$WORK/failed_kernel_tests")
  export CUDA_LAUNCH_BLOCKING=1
  [ -z "$failed" ] || gtest kernels "$failed" || status=1
  if [ -s "$WORK/pytest/v/cache/lastfailed" ]; then
    py -n 2 tests/python --last-failed || status=1
  elif [ -z "$failed" ]; then
    gtest classes '*WorldOfOne*:GradScaler*:AutocastGuard*' "$BUNDLE/tests/cpp/torchfuse_api_tests" || status=1
  fi
  return $status
}

benchmarks() {
  "$PYTHON" benchmarks/gpu_rows.py --out "$REPORT/rows.json" ${ROWS:+--only "$ROWS"} \
    ${pretended:+--quick --rounds 1}
}

ncu() {
  if [ -n "$pretended" ]; then
    "$PYTHON" benchmarks/gpu_kernels.py --small && echo '{"ran": true}' > "$REPORT/ran.json"
    return
  fi
  local metrics
  metrics=$(sed -n 's/^    "\([a-z]*__.*\)":.*/\1/p' benchmarks/gpu_kernels.py | paste -sd ,)
  command ncu --clock-control none --profile-from-start off --metrics "$metrics" \
    --section SpeedOfLight --section WarpStateStats --section Occupancy \
    --section MemoryWorkloadAnalysis --section InstructionStats \
    --kernel-name 'regex:fused_update|l2_norm|batch_norm_stats|softmax_cross|column_sums' \
    --export "$OUT/kernels" --force-overwrite "$PYTHON" benchmarks/gpu_kernels.py
  command ncu --import "$OUT/kernels.ncu-rep" --csv --print-units base --page raw > "$WORK/ncu-raw.log"
  "$PYTHON" benchmarks/gpu_kernels.py --read "$WORK/ncu-raw.log" > "$REPORT/kernels.json"
}

training() {
  local status=0
  "$PYTHON" benchmarks/gpu_training.py --out "$REPORT/training.json" ${pretended:+--small} || status=1
  [ -n "$pretended" ] || "$BUNDLE/train_digits" "$BUNDLE/digits" --device cuda || status=1
  return $status
}

large() {
  local tests=(tests/python/cuda/test_large.py tests/python/cuda/test_every_op.py -m "cuda and (slow or processes)")
  [ -z "$pretended" ] || tests=(tests/python/cuda/test_every_op.py -m "cuda and processes")
  py -n "$((pretended ? 2 : 8))" "${tests[@]}"
}

compiled() { py -n 6 -m "cuda and not slow" -k compile tests/python; }

run() { # PART
  local wanted=$((expected[$1] * slowness)) left=$((limit - SECONDS - grace)) begin=$SECONDS status=0 pid
  local most=$((12 * wanted / 10))
  export REPORT=$WORK/$1
  mkdir "$REPORT"
  if [[ $pretended && $gpu_only == *" $1 "* ]]; then
    echo "needs a GPU" > "$REPORT/status"
  elif ((left < wanted / 2)); then
    echo "not run: $left s were left of $wanted" > "$REPORT/status"
  else
    # An interrupted pytest writes its report. The shell lets background processes ignore interrupts.
    timeout -s INT -k "$grace" "$((most < left ? most : left))" \
      env --default-signal=INT bash -euxc "$1" > "$WORK/$1.log" 2>&1 &
    pid=$!
    trap 'kill -KILL -- "-$pid"; exit' TERM
    wait $pid || status=$?
    kill -KILL -- "-$pid" 2> /dev/null || true # what the part left running
    echo "$status $((SECONDS - begin))" > "$REPORT/status"
  fi
}

collect() { "$PYTHON" tools/gpu_result.py "$SECONDS" "${plan[@]}"; }

finish() {
  trap '' TERM
  find "$WORK" -maxdepth 1 -name '*.log' -exec tail -c 2M {} + > "$OUT/logs.txt"
  collect
}
trap 'kill -- $(jobs -p) 2> /dev/null; finish; exit 143' TERM INT

for name in $(compgen -A function); do export -f "${name?}"; done
read -ra plan <<< "${*:-${stages[*]}}"
for part in "${plan[@]}"; do
  [ -n "${expected[$part]:-}" ] || { echo "gpu_run: expected parts of ${stages[*]}, got $part" >&2 && exit 2; }
done
[ -e "$BUNDLE/manifest.json" ] || { echo "gpu_run: expected $BUNDLE, got none: make gpu-bundle" >&2 && exit 2; }
: > "$WORK/failed_kernel_tests"
for stage in "${stages[@]}"; do
  for part in $stage; do
    [[ " ${plan[*]} " != *" $part "* ]] || run "$part" &
  done
  wait
  collect > /dev/null || true
done
finish
