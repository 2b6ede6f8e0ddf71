#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Runs a command with the pretended CUDA device of tests/pretended_cuda in the place of NVIDIA's runtime.
#
#   tools/on_pretended_cuda.sh .venv/bin/python -m pytest -m cuda
#   tools/on_pretended_cuda.sh build/dev-cuda/tests/cpp/torchfuse_api_tests
#
#   TORCHFUSE_BUILD_DIR       the build folder with the device; default build/dev-cuda
#   PRETENDED_CUDA_DEVICES    number of devices, up to 16; default 1
#   PRETENDED_CUDA_CAPABILITY compute capability of the devices, times ten; default 90
#   PRETENDED_CUDA_SEED       0: eager; others: lazy, with that order; default 0
#   PRETENDED_CUDA_MEMORY     bytes of each device; default 6 GiB
#   PRETENDED_CUDA_PROTECT=1  a host access to device memory ends the program
#   PRETENDED_CUDA_STATS=1    counts of redirected ops, at the end
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=${TORCHFUSE_BUILD_DIR:-build/dev-cuda}
[[ $build == /* ]] || build=$root/$build
libraries=$build/tests/pretended_cuda/lib

if [ $# -eq 0 ]; then
  echo "on_pretended_cuda: expected a command, got none" >&2
  exit 2
fi
for library in libcudart.so.13 libcuda.so.1 libnccl.so.2 libpretended_cuda_aten.so libtorchfuse_kernels.so; do
  if [ ! -e "$libraries/$library" ]; then
    echo "on_pretended_cuda: expected $libraries/$library, got no such file." \
      "Build it: make pretended-cuda" >&2
    exit 2
  fi
done

echo "pretended CUDA: nothing here runs on a GPU" >&2
# torch's libraries find NVIDIA's by a path of their own, which only a library that is loaded before
# them can replace. Ours is found by the search path.
export PRETENDED_CUDA=1 TORCHFUSE_REQUIRE_CUDA=1
export LD_PRELOAD=$libraries/libcudart.so.13:$libraries/libcuda.so.1:$libraries/libnccl.so.2${LD_PRELOAD:+:$LD_PRELOAD}
export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
exec "$@"
