# SPDX-License-Identifier: BSD-3-Clause
"""The layer check finds what it must find, and our tree passes it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools/check_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_layers"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_our_tree_has_no_violation(layers: ModuleType) -> None:
    assert layers.check_includes() == []


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("csrc/kernels/functors/lion.h", "ATen/ATen.h"),
        ("csrc/kernels/functors/lion.h", "kernels/cpu/simd.h"),
        ("csrc/kernels/cpu/lion_cpu.cpp", "cuda_runtime.h"),
        ("csrc/kernels/cuda/lion_cuda.cu", "c10/cuda/CUDAStream.h"),
        ("csrc/kernels/common/dtype.h", "ops/check.h"),
        ("csrc/ops/fused_step/lion.cpp", "kernels/cuda/fused_launch.cuh"),
        ("csrc/ops/fused_step/lion.cpp", "kernels/cuda/typed_tuples.h"),
        ("csrc/ops/fused_step/lion.cpp", "kernels/cpu/simd.h"),
        ("csrc/ops/fused_step/lion.cpp", "torch/extension.h"),
        ("csrc/api/optim/fused_lion.cpp", "ops/check.h"),
        ("csrc/include/torchfuse/ops.h", "kernels/fused_optimizer.h"),
        ("csrc/bindings/optim.cpp", "kernels/fused_optimizer.h"),
    ],
)
def test_upward_include_is_a_violation(layers: ModuleType, path: str, include: str) -> None:
    violations = layers.check_text(path, f"#include <{include}>\n")
    assert len(violations) == 1
    assert f"{path}: expected no include of <{include}>" in violations[0]


def test_weak_symbol_outside_its_level_is_a_violation(layers: ModuleType) -> None:
    listing = (
        "0000000000000000 W _ZN9torchfuse7kernels3cpu6avx5125applyIfEEvT_\n"
        "0000000000000010 T _ZN9torchfuse7kernels3cpu6avx5127unscaleEv\n"
        "0000000000000020 W _ZN9torchfuse7kernels4lerpIfEET_S2_S2_\n"
    )
    violations = layers.check_symbols("avx512/lion_cpu.cpp.o", "avx512", listing)
    assert len(violations) == 1
    assert "got _ZN9torchfuse7kernels4lerpIfEET_S2_S2_" in violations[0]
