# SPDX-License-Identifier: BSD-3-Clause
"""What the real tools read is what is known of planted kernels, and our library has its budget."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cubin import CannotCheckError, budget, demangle, short_name
from cubin.cuobjdump import Cuobjdump

ROOT = Path(__file__).resolve().parents[3]
OUR_BUDGET = ROOT / "tools/cubin/budget.json"
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
def tool() -> Cuobjdump:
    try:
        return Cuobjdump(NVCC)
    except CannotCheckError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NVCC is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("known")
    (folder / "known.cu").write_text(KERNELS)
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 120)]
    subprocess.run([NVCC, "-O3", *codes, "-c", "known.cu", "-o", "known.o"], check=True, cwd=folder)
    return folder / "known.o"


def test_known_kernels_are_read(known: Path, tool: Cuobjdump) -> None:
    kernels = tool.kernels(known, tool.usage(known))
    assert {kernel.arch for kernel in kernels} == {80, 120}
    assert len(kernels) == 12
    for kernel in kernels:
        count = kernel.count
        vectors = [count(o, "128", *hint) for hint in ((), ("EF",)) for o in ("LDG", "STG")]
        bounds = (kernel.threads, kernel.register_cap)
        sizes = (kernel.argument_bytes, kernel.shared_bytes)
        local = (count("LDL") > 0, count("STL") > 0, kernel.stack_bytes > 0)
        assert vectors == {"vector": [1, 1, 0, 0], "stream": [1] * 4}.get(kernel.symbol, [0] * 4)
        assert bounds == {"spills": (768, 40), "shared": (256, 255)}.get(kernel.symbol, (1024, 255))
        assert sizes == ((32008, 1028) if kernel.symbol == "shared" else (16, 0))
        assert local == (kernel.symbol in ("spills", "local_array"),) * 3
        assert 0 < kernel.registers <= kernel.register_cap
    narrow = next(kernel for kernel in kernels if kernel.symbol == "narrow")
    assert (narrow.count("LDG"), narrow.count("LDG", "64"), narrow.count("STG", "64")) == (1, 1, 1)


def test_image_that_cannot_be_read_is_named(known: Path, tool: Cuobjdump) -> None:
    content = bytearray(known.read_bytes())
    begin = content.rindex(b"\x7fELF")
    content[begin : begin + 4] = b"none"
    broken = known.with_name("broken.o")
    broken.write_bytes(content)
    message = r"sm_120 \S+broken.o: expected exit status 0, got 1"
    with pytest.raises(CannotCheckError, match=message):
        tool.kernels(broken, tool.usage(broken))


def test_our_budget_is_as_update_would_write_it() -> None:
    ours = budget.load(OUR_BUDGET)
    assert budget.dump(ours) == OUR_BUDGET.read_text(encoding="utf-8")
    assert ours.architectures == [80, 90, 100, 120]
    assert ours.kernels.keys() >= {"fused_update<Adam, fp32, fp32, fp32, aligned>", "prologue"}


def test_what_is_equal_is_told_once(tmp_path: Path) -> None:
    names = [f"k<{dtype}{form}>" for dtype in ("bf16", "fp16") for form in budget._FORMS]
    one, two = (budget.Entry([registers], 1, 1, [64]) for registers in (8, 16))
    kernels = {**dict(zip(names, (one, two, one, two), strict=True)), "half_open": one}
    # What differs from its other form and from its twin stays apart from both.
    apart = {"k<fp16, aligned>": budget.Entry([8], 2, 1, [64])}
    path = tmp_path / "budget.json"
    for changes, lines in (({}, 2), (apart, 4)):
        ours = budget.Budget("13.0", [90], {}, kernels | changes)
        path.write_text(budget.dump(ours))
        assert budget.load(path) == ours
        assert path.read_text().count("registers") == lines


@pytest.mark.parametrize(
    ("declaration", "name"),
    [
        (
            "cuda::fused_update_kernel<K::cuda::TypedAccess<K::Adam, K::BFloat16, float, float, "
            "true>, false>",
            "fused_update<Adam, bf16, fp32, fp32, master, misaligned>",
        ),
        (
            "cuda::fused_update_kernel<K::cuda::TypedAccess<K::Lamb, double, double, double, "
            "false>, true>",
            "fused_update<Lamb, fp64, fp64, fp64, aligned>",
        ),
        (
            "cuda::fused_update_kernel<K::cuda::EmaAccess<"
            "K::cuda::TypedAccess<K::Adam, K::Half, K::Half, float, true> >, true>",
            "fused_update<Adam, fp16, fp16, fp32, master, ema, aligned>",
        ),
        (
            "cuda::fused_update_kernel<K::cuda::EmaAccess<K::cuda::LookedUpAccess<K::Adam> >, "
            "false>",
            "fused_update<Adam, looked up, ema, misaligned>",
        ),
        (
            "cuda::fused_update_kernel<K::cuda::LookedUpAccess<K::Adam>, false>",
            "fused_update<Adam, looked up, misaligned>",
        ),
        (
            "cuda::fused_measure_kernel<K::cuda::TypedAccess<K::Lamb, K::Half, K::Half, float, "
            "true> >",
            "fused_measure<Lamb, fp16, fp16, fp32, master>",
        ),
        (
            "cuda::fused_measure_kernel<K::cuda::LookedUpAccess<K::Lars> >",
            "fused_measure<Lars, looked up>",
        ),
        ("cuda::(anonymous namespace)::unscale_kernel<K::Half>", "unscale<fp16>"),
        ("cuda::(anonymous namespace)::prologue_kernel", "prologue"),
    ],
)
def test_short_name_keeps_what_tells_kernels_apart(declaration: str, name: str) -> None:
    assert short_name(f"K::{declaration}".replace("K::", "torchfuse::kernels::")) == name


def test_demangled_names_have_no_parameters() -> None:
    assert demangle(["_Z5scaleIfEvPT_", "_ZN1a4copyEi"]) == ["scale<float>", "a::copy"]
