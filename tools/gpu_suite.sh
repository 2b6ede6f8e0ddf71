#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Proves torchfuse on a GPU with one command, in under ten minutes from a clean checkout.
#
#   tools/gpu_suite.sh                  build for this GPU, run every stage, write the result file
#   tools/gpu_suite.sh --without-cuda   try the suite itself where there is no GPU
#   tools/on_pretended_cuda.sh tools/gpu_suite.sh   all but what only a GPU can do
#   tools/gpu_suite.sh --help           all options
#
#   PYTHON                   the interpreter that holds torch; default .venv/bin/python, else python3
#   TORCHFUSE_GTEST_SOURCE   source folder of GoogleTest, where no package installed it
#   TORCHFUSE_SHA            the commit, where git does not know it
#   TORCHFUSE_GPU_SUITE_WITHOUT_CUDA=1   as --without-cuda
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if [ -x "$root/.venv/bin/python" ]; then
    python=$root/.venv/bin/python
  fi
fi

# Everything else is checked in Python; without it only commands can be looked for.
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  {
    echo "gpu_suite: not started, because this is missing:"
    echo "  Python: $python is not Python 3.10 or newer. Install it with torch and pytest, or set PYTHON."
    for tool in cmake ninja nvcc; do
      command -v "$tool" >/dev/null || echo "  $tool: not on PATH. Install it."
    done
  } >&2
  exit 2
fi

export PYTHONPATH="$root/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m gpu_suite "$@"
