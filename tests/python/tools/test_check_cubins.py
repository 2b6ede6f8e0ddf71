# SPDX-License-Identifier: BSD-3-Clause
"""The check of compiled kernels finds what is planted in them, and says what it cannot check."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import check_cubins  # noqa: E402
from cubin import budget as budgets  # noqa: E402
from cubin import elf, sass  # noqa: E402

NVCC = (
    os.environ.get("CUDACXX")
    or shutil.which("nvcc")
    or shutil.which("nvcc", path="/usr/local/cuda/bin")
)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")

# --- Builds without CUDA --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "status", "message"),
    [
        (None, 2, "expected a build folder"),
        ("TORCHFUSE_WITH_CUDA:STRING=OFF\nCMAKE_CUDA_COMPILER:FILEPATH=/bin/nvcc\n", 0, "skipped"),
        ("TORCHFUSE_WITH_CUDA:STRING=AUTO\n", 0, "skipped, CPU-only build"),
        ("TORCHFUSE_WITH_CUDA:STRING=ON\n", 2, "compile_commands.json, got no such file"),
        (
            "TORCHFUSE_WITH_CUDA:STRING=AUTO\nCMAKE_CUDA_COMPILER:FILEPATH=/bin/nvcc\n",
            2,
            "compile_commands.json, got no such file",
        ),
    ],
)
def test_only_a_build_without_cuda_is_skipped(
    cache: str | None,
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if cache is not None:
        (tmp_path / "CMakeCache.txt").write_text(cache)
    assert check_cubins.main(["--build-dir", str(tmp_path)]) == status
    output = capsys.readouterr()
    assert message in (output.err if status else output.out)


# --- With a compiler ------------------------------------------------------------------------------

HEADER = "constexpr float kFactor = 2.0f;\n"
SCALE = """
#include "factor.h"
extern "C" __global__ void __launch_bounds__(256) scale(const float4* from, float4* to) {
  float4 v = from[threadIdx.x];
  to[threadIdx.x] = make_float4(kFactor * v.x, kFactor * v.y, kFactor * v.z, kFactor * v.w);
}
"""
SCALAR = """
extern "C" __global__ void __launch_bounds__(256) scale(const float* from, float* to) {
  to[threadIdx.x] = 2.0f * from[threadIdx.x];
}
"""
# 256 values are alive at the barrier.
SWAP = """
extern "C" __global__ void __launch_bounds__(256, BLOCKS) scale(const float4* from, float4* to) {
  float4 v[32];
  #pragma unroll
  for (int i = 0; i < 32; ++i) v[i] = from[i * 256 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 32; ++i) to[(31 - i) * 256 + threadIdx.x] = v[i];
}
"""
TARGET = "csrc/kernels/CMakeFiles/torchfuse_kernels.dir"


class Build:
    """A build folder with one kernel, compiled for sm_90, and a budget that still lacks it."""

    def __init__(self, folder: Path, nvcc: str) -> None:
        self.folder = folder
        self.budget = folder / "budget.json"
        self.source = folder / "scale.cu"
        self.calls = folder / "calls"
        wrapper = folder / "nvcc"
        wrapper.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\nexec {nvcc} "$@"\n')
        wrapper.chmod(0o755)
        command = (
            f"{wrapper} -O3 --generate-code=arch=compute_90,code=[sm_90] "
            f"-x cu -c {self.source} -o {TARGET}/scale.cu.o"
        )
        entry = {"directory": str(folder), "command": command, "file": str(self.source)}
        (folder / "compile_commands.json").write_text(json.dumps([entry]))
        (folder / "CMakeCache.txt").write_text("TORCHFUSE_WITH_CUDA:STRING=ON\n")
        (folder / "factor.h").write_text(HEADER)
        self.source.write_text(SCALE)
        access = {"scale": ("load", "store")}
        self.budget.write_text(budgets.dump(budgets.Budget("", (90,), access, {})))

    def check(self, *options: str) -> int:
        folder, budget = str(self.folder), str(self.budget)
        return check_cubins.main(["--build-dir", folder, "--budget", budget, *options])

    def compilations(self) -> int:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return sum("-cubin" in line for line in lines)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    assert NVCC is not None
    build = Build(tmp_path_factory.mktemp("build"), NVCC)
    assert build.check("--update") == 0
    return build


@needs_nvcc
def test_kernel_within_its_budget_passes(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    build.source.write_text(SCALE)
    assert build.check("--verbose") == 0
    output = capsys.readouterr().out
    assert "scale" in output
    assert " 1/1 " in output
    assert output.endswith("check_cubins: 1 kernels x 1 architectures within budget\n")


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (
            SWAP.replace("BLOCKS", "4"),
            ["expected no local memory, got ", "expected no stack, got ", "bytes of code, got "],
        ),
        (SWAP.replace("BLOCKS", "1"), ["expected at most 16 registers, got 1", "bytes of code"]),
        (SCALAR, ["expected 1 loads of 128 bits, got 0", "expected stores of 128 bits, got none"]),
        (
            SCALE.replace("scale", "scale_all"),
            ["scale_all: expected in the budget", "scale: expected in the build"],
        ),
    ],
    ids=["spills", "registers", "scalar", "other kernel"],
)
def test_planted_violation_is_found(
    source: str, messages: list[str], build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    build.source.write_text(source)
    assert build.check() == 1
    errors = capsys.readouterr().err
    for message in messages:
        assert message in errors
    assert "within budget" not in errors


@needs_nvcc
def test_update_does_not_lift_limits(build: Build, tmp_path: Path) -> None:
    build.source.write_text(SWAP.replace("BLOCKS", "4"))
    copy = tmp_path / "budget.json"
    shutil.copy(build.budget, copy)
    assert build.check("--budget", str(copy), "--update") == 1
    assert build.check("--budget", str(copy)) == 1
    assert budgets.load(copy).kernels["scale"].registers == (64,)


@needs_nvcc
def test_only_what_changed_is_compiled_again(build: Build) -> None:
    build.source.write_text(SCALE)
    assert build.check() == 0
    before = build.compilations()
    assert before > 0
    assert build.check() == 0
    assert build.compilations() == before
    (build.folder / "factor.h").write_text(HEADER.replace("2.0", "3.0") + "// changed\n")
    assert build.check() == 0
    assert build.compilations() == before + 1


def _other_opcode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "OPERATIONS", {**sass.OPERATIONS, 0x182: "LDG", 0x181: "LDX"})


def _other_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "WIDTH_SHIFT", sass.WIDTH_SHIFT + 1)


def _other_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "OPERATIONS", {0x181: "LDG", 0x186: "STG"})


def _other_attribute(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setitem(elf.ATTRIBUTES, name, 0xEE)


def _other_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf, "RESERVED_SHARED_BYTES", 512)


@needs_nvcc
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_opcode, "sm_90 access_128: expected 1 to 1 LDG of 128 bits, got 0."),
        (_other_width, "sm_90 access_64: expected 1 to 1 STG of 64 bits, got 0."),
        (_other_local, "sm_90 spills: expected 1 to 1000000 STL, got 0."),
        (
            _other_reserve,
            "sm_90 static_shared: expected 1028 to 1028 bytes of shared memory, got 1",
        ),
        (_other_attribute("argument_bytes"), "sm_90 arguments: expected 32008 to 32008 bytes of"),
        (_other_attribute("max_threads"), "sm_90 static_shared: expected 256 to 256 threads, got"),
        (
            _other_attribute("registers"),
            "calibration.cubin: sm_90 ",
        ),
        (_other_attribute("register_cap"), "expected 16-byte instructions and"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_change_of_encoding_is_noticed(
    change: Callable[[pytest.MonkeyPatch], None],
    message: str,
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build.source.write_text(SCALE)
    change(monkeypatch)
    assert build.check() == 2
    assert message in capsys.readouterr().err


@needs_nvcc
def test_what_ptxas_reports_is_compared(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.source.write_text(SCALE)
    # As if stack sizes were found under another attribute.
    monkeypatch.setitem(elf.ATTRIBUTES, "frame_size", 0xEE)
    monkeypatch.setitem(elf.ATTRIBUTES, "min_stack_size", 0xEE)
    assert build.check() == 2
    assert "sm_90 spills: expected stack, registers and shared memory as" in capsys.readouterr().err


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("not C++", [], "sm_90 scale: expected to compile, got exit status"),
        (SCALE, ["--arch", "90", "1"], "sm_1 calibration: expected to compile, got exit status"),
    ],
)
def test_what_does_not_compile_cannot_be_checked(
    source: str,
    options: list[str],
    message: str,
    build: Build,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build.source.write_text(source)
    assert build.check(*options) == 2
    assert message in capsys.readouterr().err


def test_missing_compiler_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = Build(tmp_path, "unused")
    (tmp_path / "nvcc").unlink()
    assert build.check() == 2
    assert f"expected nvcc at {tmp_path}/nvcc" in capsys.readouterr().err
