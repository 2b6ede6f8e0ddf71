#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Builds, on a machine without a GPU, all that tools/gpu_run.sh needs on one with a GPU: build/gpu holds
# the package, the test programs, the C++ demo with its data, and a manifest. The GPU's machine needs
# torch and Python of the same versions, and neither a compiler nor a network.
#
#   TORCHFUSE_GPU_PYTHON   an interpreter of Python 3.12 with headers; default: python3.12, else pyenv's
#
# For a later comparison of two libraries, keep the former one: cp -r build/gpu build/gpu-before
set -euo pipefail
cd "$(dirname "$0")/.."

readonly host=build/gpu-host bundle=build/gpu most_mib=45
readonly venv=$host/venv/bin/python
python=${TORCHFUSE_GPU_PYTHON:-}
for candidate in python3.12 ~/.pyenv/versions/3.12*/bin/python3.12; do
  [ -n "$python" ] || ! "$candidate" -V > /dev/null 2>&1 || python=$candidate
done
if [[ $# -gt 0 || $("${python:-false}" -V 2>&1) != "Python 3.12."* ]]; then
  echo "gpu_bundle: expected no argument, and TORCHFUSE_GPU_PYTHON to name an interpreter of Python" \
    "3.12 with headers, got '$*' and '$python'." >&2
  exit 2
fi

# --- Environment: what the GPU's machine has, and the usual build to compare with.
make --no-print-directory build
mkdir -p $host
sed -e '/^# examples/,/^tqdm/d' -e '/^-r/d' -e '/^expecttest/d' -e '/^gcovr/d' requirements-demo.txt \
  requirements-dev.txt > $host/requirements.new
if ! cmp -s $host/requirements.new $host/requirements.txt; then
  "$python" -m venv --clear $host/venv
  "$venv" -m pip install --quiet -r $host/requirements.new torchvision==0.26.0
  mv $host/requirements.new $host/requirements.txt
fi

# --- Build
torch=$("$venv" -c 'import torch, os; print(os.path.dirname(torch.__file__))')
cmake --preset gpu -DPython_EXECUTABLE="$PWD/$venv" -DTORCHFUSE_TORCH_DIR="$torch"
cmake --build $host/cmake --target torchfuse torchfuse_C torchfuse_cuda_kernel_tests \
  torchfuse_api_tests torchfuse_programs torchfuse_synchronous_gloo train_digits

# --- Bundle: programs lie where the tests look for them below a build folder.
rm -rf $bundle
mkdir -p $bundle/site $bundle/tests/cpp/kernels/cuda
git ls-files -z --cached --others --exclude-standard python/torchfuse \
  | tar --null --create --file - --files-from - | tar --extract --file - --directory $bundle/site --strip-components 1
cmake --install $host/cmake --prefix $bundle/site/torchfuse > $host/install.log
cmake --install $host/cmake --prefix $bundle/site/torchfuse --component python >> $host/install.log
rm -r $bundle/site/torchfuse/include
expecttest=$(grep '^expecttest==' requirements-dev.txt)
"$venv" -m pip install --quiet --no-deps --target $bundle/site "$expecttest"
cp $host/cmake/tests/cpp/kernels/cuda/torchfuse_cuda_kernel_tests $bundle/tests/cpp/kernels/cuda
cp $host/cmake/tests/cpp/torchfuse_{api_tests,programs,synchronous_gloo*} $bundle/tests/cpp
cp $host/cmake/examples/cpp/train_digits/train_digits $bundle
find $bundle -type f \( -name '*.so' -o -perm -u+x ! -name '*.py' \) -exec strip {} +
.venv/bin/python examples/python/export_digits.py $bundle/digits

# --- Self-check: the step's bits are those of the usual build.
readonly step='
import hashlib, torch, torchfuse
torch.manual_seed(0)
params = [torch.nn.Parameter(torch.randn(n)) for n in (1, 1000, 70001)]
optimizer = torchfuse.optimizers.FusedAdam(params, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
for _ in range(3):
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in params)).hexdigest()
print(digest, torchfuse.__file__)'
read -r usual _ <<< "$(.venv/bin/python -c "$step" 2> /dev/null)"
read -r ours place <<< "$(cd / && PYTHONPATH=$OLDPWD/$bundle/site "$OLDPWD/$venv" -c "$step" 2> /dev/null)"
if [[ $place != "$PWD/$bundle/"* || -z $usual || $ours != "$usual" ]]; then
  echo "gpu_bundle: expected a step of $bundle/site to have the bits of the usual build ($usual), got" \
    "'$ours' from '$place'" >&2
  exit 1
fi

"$venv" -c '
import json, platform, sys, torch
folder, sha, changes = sys.argv[1:]
manifest = {"sha": sha, "dirty": bool(changes), "torch": torch.__version__, "python": platform.python_version()}
manifest["build"] = json.load(open(f"{folder}/site/torchfuse/build_info.json"))
json.dump(manifest, open(f"{folder}/manifest.json", "w"), indent=1)
' $bundle "$(git rev-parse HEAD)" "$(git status --porcelain)"
mib=$(du -sm $bundle | cut -f 1)
echo "gpu_bundle: $bundle, $mib MiB; a step on the CPU has the bits of the usual build"
[ "$mib" -le $most_mib ] || { echo "gpu_bundle: expected at most $most_mib MiB" >&2; exit 1; }
