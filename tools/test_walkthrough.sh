#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Applies docs/adding_an_optimizer.md to a copy of the tree, builds the copy without CUDA, and tests the new
# optimizer. With nvcc, its CUDA kernels are compiled too, for one architecture. A second run rebuilds only
# what changed. -O0 saves time: the kernels have their own flags.
#
#   tools/test_walkthrough.sh [python]
set -eu
cd "$(dirname "$0")/.."
python="$PWD/${1:-.venv/bin/python}"
folder="$PWD/build/walkthrough"
tree="$folder/tree"
build="$folder/build"

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

command -v nvcc > /dev/null || exit 0
cmake -S "$tree" -B "$folder/cuda" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORCHFUSE_KERNELS_ONLY=ON \
  -DTORCHFUSE_WITH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real -DTORCHFUSE_WERROR=ON
cmake --build "$folder/cuda" --target \
  csrc/kernels/CMakeFiles/torchfuse_kernels_plain.dir/instantiate/fused_signum_cuda.cu.o
