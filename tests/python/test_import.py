# SPDX-License-Identifier: BSD-3-Clause
"""What `import torchfuse` and `python -m torchfuse` give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchfuse


def run_python(*arguments: str, stderr: str | None = None) -> str:
    """Output of another process, away from the source tree."""
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(torchfuse.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    assert stderr is None or result.stderr == stderr
    return result.stdout.strip()


def test_version_and_cmake_dir_are_printed() -> None:
    version = (Path(__file__).parents[2] / "VERSION").read_text().strip()
    assert torchfuse.__version__ == version == run_python("-m", "torchfuse", "--version")
    folder = Path(run_python("-m", "torchfuse", "--cmake-dir"))
    assert folder.is_absolute()
    assert not folder.is_dir() or (folder / "torchfuseConfig.cmake").is_file()


def test_cpu_isa_is_one_of_the_known_levels() -> None:
    assert torchfuse._C.cpu_isa() in ("baseline", "avx2", "avx512", "avx512_bf16")
    torchfuse._C.set_cpu_isa("baseline")
    assert torchfuse._C.cpu_isa() == "baseline"
    with pytest.raises(RuntimeError, match="avx1024"):
        torchfuse._C.set_cpu_isa("avx1024")
    assert torchfuse._C.cpu_isa() == "baseline"


def test_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(RuntimeError, match=r"algorithm to be one of: .*\badam\b.* got adamski"):
        torchfuse._C.FusedStep("adamski")


def test_import_needs_no_order_and_prints_nothing() -> None:
    code = "import torchfuse, torch; print(torch.ops.torchfuse.multi_tensor_l2_norm is not None)"
    assert run_python("-W", "error", "-c", code, stderr="") == "True"


def test_import_has_no_side_effects() -> None:
    code = """
import os, sys, threading, warnings
import torch

def settings():
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "denormals": float(torch.tensor(1e-40) * 1.0),
        "matmul": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().sum().item(),
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "filters": list(warnings.filters),
        "python threads": threading.active_count(),
        "hooks": (sys.excepthook, sys.displayhook, len(sys.meta_path)),
        "dynamo": "torch._dynamo" in sys.modules,
        "step": torch.optim.Adam.step,
    }

before = settings()
import torchfuse
after = settings()
print([key for key in before if before[key] != after[key]])
"""
    assert run_python("-c", code) == "[]"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("FusedAdam", "optimizers"),
        ("GradScaler", "amp"),
        ("SyncBatchNorm", "parallel"),
        ("FusedCrossEntropyLoss", "losses"),
        ("FusedLayerNorm", "normalization"),
    ],
)
def test_a_name_of_another_module_says_where_it_is(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}'\. Use torchfuse\.{place}\.{name}\.$"):
        getattr(torchfuse, name)


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("parallel", "ShardedOptimizer", "fully_shard, or torch.distributed.optim.ZeroRedundancy"),
        ("convert", "read_cpp_archive", "save_checkpoint and load_checkpoint"),
    ],
)
def test_a_name_that_is_gone_says_what_to_use(module: str, name: str, use: str) -> None:
    code = f"try:\n from torchfuse.{module} import {name}\nexcept ImportError as e: print(e)"
    assert use in run_python("-c", code)


def test_an_unknown_name_is_absent() -> None:
    with pytest.raises(AttributeError, match=r"^module 'torchfuse' has no attribute 'nothing'\.$"):
        _ = torchfuse.nothing  # type: ignore[attr-defined]
