#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Proves torchfuse on a GPU, in three calls that each fit into ten minutes on a bare machine. Each builds
# what it needs, and leaves its part in benchmarks/results/GPU/DATE-COMMIT.json. A call that is repeated
# for the same commit runs only what has not passed yet.
#
#   tools/gpu_suite.sh tests        kernels against the CPU, Python tests on CUDA, benchmarks: 9 minutes
#   tools/gpu_suite.sh sanitizers   compute-sanitizer's tools: 7 minutes
#   tools/gpu_suite.sh ncu          bytes that the kernels move, C++ classes: 6 minutes
#   tools/on_pretended_cuda.sh tools/gpu_suite.sh tests   a rehearsal without a GPU
#
#   PYTHON                   the interpreter that holds torch; default .venv/bin/python, else python3
#   TORCHFUSE_GTEST_SOURCE   source folder of GoogleTest, where no package installed it
#   TORCHFUSE_SHA            the commit, where git does not know it
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-$python}" -m gpu_suite "$@"
