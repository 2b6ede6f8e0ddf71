#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Applies docs/adding_an_optimizer.md to a copy of the tree, builds the copy without CUDA, and runs the
# tests that the new optimizer has got. Where there is nvcc, its CUDA kernels are compiled too, for one
# architecture. Incremental: a second run rebuilds what changed. What wraps the kernels is not optimized,
# which saves time; the kernels have flags of their own.
#
#   tools/test_walkthrough.sh [python]
set -eu
cd "$(dirname "$0")/.."
python="$PWD/${1:-.venv/bin/python}"
tree="$PWD/build/walkthrough/tree"
build="$PWD/build/walkthrough/build"

"$python" tools/apply_walkthrough.py docs/adding_an_optimizer.md "$tree"
cmake -S "$tree" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_LIBDIR=lib \
  -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DPython_EXECUTABLE="$python" -DTORCHFUSE_WITH_CUDA=OFF \
  -DTORCHFUSE_WERROR=ON
cmake --build "$build" --target torchfuse torchfuse_C
cmake --install "$build" --prefix "$tree/python/torchfuse" > "$build/install.log"
cmake --install "$build" --prefix "$tree/python/torchfuse" --component python >> "$build/install.log"

(
  cd "$tree"
  export PYTHONPATH="$tree/python" OMP_WAIT_POLICY=PASSIVE
  "$python" -c 'import sys, torchfuse; assert torchfuse.__file__.startswith(sys.argv[1])' "$tree"
  "$python" -m pytest -q -k "signum or schema or operator or entry or wrapper" \
    tests/python/optimizers/test_optim_specs.py \
    tests/python/optimizers/test_optim_spec_hyper_params.py \
    tests/python/optimizers/test_optim_spec_ops.py tests/python/ops/test_schemas.py
  "$python" -m pytest -q --doctest-modules python/torchfuse/optimizers/fused_signum.py
  "$python" tools/check_layers.py --build-dir "$build"
)

if command -v nvcc > /dev/null; then
  kernels="$PWD/build/walkthrough/cuda"
  cmake -S "$tree" -B "$kernels" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORCHFUSE_KERNELS_ONLY=ON \
    -DTORCHFUSE_WITH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real -DTORCHFUSE_WERROR=ON
  cmake --build "$kernels" --target \
    csrc/kernels/CMakeFiles/torchfuse_kernels.dir/instantiate/fused_signum_cuda.cu.o
else
  echo "test_walkthrough: no nvcc on PATH, so the CUDA kernels were not compiled."
fi

echo "walkthrough: applied, built and tested"
