# SPDX-License-Identifier: BSD-3-Clause
"""What the real tools read is what is known of planted kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cubin.cuobjdump import CannotCheckError, find_cuobjdump, read

NVCC = os.environ.get("CUDACXX") or shutil.which(
    "nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin"
)

KERNELS = """
extern "C" __global__ void vector(const uint4* from, uint4* to) { *to = *from; }
extern "C" __global__ void stream(const uint4* from, uint4* to) { __stcs(to, __ldcs(from)); }
extern "C" __global__ void narrow(const uint2* from, uint2* to) { *to = *from; }

// Registers have no index: the array must lie in local memory.
extern "C" __global__ void local_array(const unsigned* from, unsigned* to) {
  unsigned values[64] = {};
  for (unsigned i = 0; i < 64; ++i) values[from[i] % 64] = i;
  *to = values[to[1] % 64];
}

// 64 values are alive at the barrier, where 40 registers are left to a thread.
extern "C" __global__ void __launch_bounds__(768, 2) spills(const unsigned* from, unsigned* to) {
  unsigned values[64];
  #pragma unroll
  for (unsigned i = 0; i < 64; ++i) values[i] = from[768 * i + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (unsigned i = 0; i < 64; ++i) to[768 * (63 - i) + threadIdx.x] = values[i];
}

struct Arguments { unsigned values[8000]; unsigned* to; };
extern "C" __global__ void __launch_bounds__(256) shared(const __grid_constant__ Arguments block) {
  __shared__ unsigned values[257];
  values[threadIdx.x] = block.values[threadIdx.x];
  __syncthreads();
  block.to[threadIdx.x] = values[256 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NVCC is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("known")
    (folder / "known.cu").write_text(KERNELS)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 120)]
    subprocess.run([NVCC, "-O3", *codes, "-c", "known.cu", "-o", "known.o"], check=True, cwd=folder)
    return folder / "known.o"


def test_known_kernels_are_read(known: Path) -> None:
    try:
        tool = find_cuobjdump(NVCC)
    except CannotCheckError as error:
        pytest.skip(str(error))
    figures, _ = read(tool, known)
    assert len(figures) == 6
    for name, by_arch in figures.items():
        assert by_arch.keys() == {80, 120}
        for kernel in by_arch.values():
            count = kernel.count
            vectors = [count(o, "128", *hint) for hint in ((), ("EF",)) for o in ("LDG", "STG")]
            bounds = (kernel.threads, kernel.register_cap)
            sizes = (kernel.argument_bytes, kernel.shared_bytes)
            local = (count("LDL") > 0, count("STL") > 0, kernel.stack_bytes > 0)
            assert vectors == {"vector": [1, 1, 0, 0], "stream": [1] * 4}.get(name, [0] * 4)
            assert bounds == {"spills": (768, 40), "shared": (256, 255)}.get(name, (1024, 255))
            assert sizes == ((32008, 1028) if name == "shared" else (16, 0))
            assert local == (name in ("spills", "local_array"),) * 3
            assert 0 < kernel.registers <= kernel.register_cap
            if name == "narrow":
                assert (count("LDG"), count("LDG", "64"), count("STG", "64")) == (1, 1, 1)
