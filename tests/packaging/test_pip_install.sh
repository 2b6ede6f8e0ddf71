#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Plain `pip install .` under build isolation into an environment that holds torch, one step there, and
# a C++ program built against the CMake package inside the wheel.
# Usage: test_pip_install.sh <python> [torch requirement]
set -euo pipefail
cd "$(dirname "$0")/../.."

base_python=$1
torch=${2:-torch==2.11.0}
environment=build/packaging/venv
python=$environment/bin/python

rm -rf build/packaging
mkdir -p build/packaging
"$base_python" -m venv "$environment"
"$python" -m pip install --quiet "$torch" numpy
"$python" -m pip install .

# Away from the checkout, so that the installed package is the one that is imported.
repository=$PWD
python=$PWD/$python
cd build/packaging
"$python" -m torchfuse --env
"$python" - <<'SCRIPT'
import torch

import torchfuse

weight = torch.nn.Parameter(torch.ones(64))
optimizer = torchfuse.optimizers.FusedAdam([weight], lr=0.1)
scaler = torchfuse.amp.GradScaler(device="cpu")
scaler.scale(weight.square().sum()).backward()
scaler.step(optimizer)
scaler.update()
torch.testing.assert_close(weight.detach(), torch.full((64,), 0.9), rtol=0, atol=1e-4)
SCRIPT

tools=$repository/.venv/bin
"$tools/cmake" -S "$repository/tests/packaging/consumer" -B consumer -G Ninja \
  -DCMAKE_MAKE_PROGRAM="$tools/ninja" -DCMAKE_BUILD_TYPE=Release \
  -Dtorchfuse_DIR="$("$python" -m torchfuse --cmake-dir)" -DPython_EXECUTABLE="$python"
"$tools/cmake" --build consumer
consumer/consumer
echo "test_pip_install: passed"
