# SPDX-License-Identifier: BSD-3-Clause
"""What `import torchfuse` and `python -m torchfuse` give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchfuse


def run_python(*arguments: str) -> str:
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
    return result.stdout.strip()


def run_module(*arguments: str) -> str:
    """Output of `python -m torchfuse`."""
    return run_python("-m", "torchfuse", *arguments)


def test_version_is_that_of_the_version_file() -> None:
    version_file = Path(__file__).parents[2] / "VERSION"
    if not version_file.is_file():
        pytest.skip("needs the source tree")
    assert torchfuse.__version__ == version_file.read_text().strip()


def test_public_names() -> None:
    assert issubclass(torchfuse.optimizers.FusedAdam, torch.optim.Optimizer)
    assert issubclass(torchfuse.amp.GradScaler, torch.amp.GradScaler)
    assert callable(torchfuse.ops.fused_adam_)
    for name in torchfuse.__all__:
        assert hasattr(torchfuse, name), name


def test_build_info() -> None:
    info = torchfuse._C.build_info()
    assert info["torchfuse"] == torchfuse.__version__
    assert info["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["compiler"]
    assert all(isinstance(value, str) for value in info.values())


def test_cpu_isa_is_one_of_the_known_levels() -> None:
    assert torchfuse._C.cpu_isa() in ("baseline", "avx2", "avx512")
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
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(torchfuse.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    assert (result.stdout.strip(), result.stderr.strip()) == ("True", "")


def test_version_option() -> None:
    assert torchfuse.__version__ in run_module("--version")


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


def test_cmake_dir_option_names_the_package_directory() -> None:
    directory = Path(run_module("--cmake-dir"))
    assert directory.is_absolute()
    if not directory.is_dir():
        pytest.skip("the CMake package is there after an installation")
    assert list(directory.rglob("torchfuseConfig.cmake")) or list(
        directory.rglob("torchfuse-config.cmake")
    )


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


def test_the_compiler_is_not_imported() -> None:
    """It takes a second, and it imports functions that hold the default process group."""
    code = "import sys, torch; old = {*sys.modules}; import torchfuse; print(*{*sys.modules} - old)"
    assert "torch._dynamo" not in run_python("-c", code).split()
