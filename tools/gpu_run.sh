#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Proves and measures torchfuse on a machine with a GPU, from the bundle of tools/gpu_bundle.sh. Nothing
# is compiled and nothing is downloaded there.
#
#   tools/gpu_run.sh a    everything, in 480 s; ends by itself before 510 s
#   tools/gpu_run.sh b    in 100 s, what these name, each if it is set:
#     KERNELS='CudaNorm*'          tests of the kernels
#     TESTS='tests/python/amp -k scaler'   arguments of pytest
#     ROWS='batch_norm/forward'    rows of the benchmarks, also with the library of BEFORE, if that is set
#     BEFORE=build/gpu-before      a former bundle, for these rows
#   tools/on_pretended_cuda.sh tools/gpu_run.sh a    a rehearsal without a GPU
#
#   OUT              folder of result.json (of b: result-b.json), which is whole after every stage, and of
#                    logs; default build/gpu-run
#   TORCHFUSE_SHA    the commit, where there is no git
#   PYTHON           the interpreter that holds torch; default python3
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PYTHON=${PYTHON:-python3} PYTHONPATH="$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m gpu_run "$@"
