# SPDX-License-Identifier: BSD-3-Clause
"""Runs that change their language on the way, against runs that do not: both programs, all classes.

The C++ program is tests/cpp/api/optim/checkpoint_program.cpp; `make test-cpp` builds it.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    assert_same_state,
    shared_params,
    shared_steps,
    two_groups,
    used_tensors,
)
from support.compare import assert_same_bits
from torch import Tensor

import torchfuse
from torchfuse import _C
from torchfuse.convert import Conversion, convert_checkpoint, read_cpp_archive
from torchfuse.optimizers import FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / os.environ.get("TORCHFUSE_BUILD_DIR", "build/dev")
PROGRAM = BUILD / "tests" / "cpp" / "torchfuse_checkpoint_program"

CLASSES = _C.optimizer_classes()
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {"max_grad_norm": 5.0}),
    "bf16-master": (torch.bfloat16, {"master_weights": True, "max_grad_norm": 5.0}),
    "bf16-state": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "bf16-remainder": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True, "seed": 11}),
}


@functools.cache
def unusable() -> str | None:
    if not PROGRAM.exists():
        return f"{PROGRAM.name} is not built in {BUILD}; make test-cpp builds it"
    built = subprocess.run([PROGRAM, "--torch-version"], capture_output=True, text=True, check=True)
    if built.stdout.strip() != torch.__version__.split("+")[0]:
        return f"{PROGRAM.name} was built with torch {built.stdout.strip()}"
    return None


@pytest.fixture(autouse=True)
def _program_is_built() -> None:
    reason = unusable()
    if reason is not None:
        pytest.skip(reason)


def run_cpp(name: str, first: int, last: int, start: Path, out: Path) -> None:
    """Steps in C++ from the files in `start`; the files after them are in `out`."""
    out.mkdir(exist_ok=True)
    command = [PROGRAM, name, str(first), str(last), str(start), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def spec_of(name: str) -> OptimSpec:
    return next(spec for spec in OPTIM_SPECS if spec.optimizer.__name__ == name)


def write_folder(optimizer: FusedOptimizer, folder: Path) -> Conversion:
    """What the C++ program starts from."""
    folder.mkdir(exist_ok=True)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    values = {str(index): param.detach() for index, param in enumerate(params)}
    _C.write_archive(values, str(folder / "params.pt"))
    torch.save(optimizer.state_dict(), folder / "python.pt")
    name = type(optimizer).__name__
    return convert_checkpoint(folder / "python.pt", folder / "optimizer.pt", name)


def read_params(folder: Path) -> list[Tensor]:
    values = _C.read_archive(str(folder / "params.pt"))
    return [values[str(index)] for index in range(len(values))]


def assert_as_cpp(optimizer: FusedOptimizer, folder: Path) -> None:
    """Parameters, states and the options that C++ has are those in the C++ program's files."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for mine, theirs in zip(params, read_params(folder), strict=True):
        assert_same_bits(mine.detach(), theirs)
    expected = read_cpp_archive(folder / "optimizer.pt")
    actual = optimizer.state_dict()
    assert_same_state(used_tensors(actual["state"]), used_tensors(expected["state"]))
    for own, theirs in zip(actual["param_groups"], expected["param_groups"], strict=True):
        assert {key: own[key] for key in theirs} == theirs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_run_of_cpp_goes_on_in_python(name: str, mode: str, tmp_path: Path) -> None:
    dtype, options = MODES[mode]
    write_folder(two_groups(spec_of(name), shared_params(dtype), **options), tmp_path / "start")
    run_cpp(name, 0, 6, tmp_path / "start", tmp_path / "whole")
    run_cpp(name, 0, 3, tmp_path / "start", tmp_path / "half")
    conversion = convert_checkpoint(tmp_path / "half/optimizer.pt", tmp_path / "half.pt")
    assert (conversion.optimizer, conversion.to_cpp) == (name, False)
    assert (conversion.groups, conversion.params) == (2, 5)
    # The last parameter never has a gradient; some classes give it a state all the same.
    assert conversion.states in (4, 5)

    params = [torch.nn.Parameter(value) for value in read_params(tmp_path / "half")]
    # Other options than the checkpoint's, which brings its own, but for those of storage.
    stored = {} if mode in ("fp32", "bf16-master") else options
    optimizer = two_groups(spec_of(name), params, 0, **stored)
    optimizer.load_state_dict(torch.load(tmp_path / "half.pt", weights_only=True))
    shared_steps(optimizer, 3, 6)
    assert_as_cpp(optimizer, tmp_path / "whole")
    assert ("master_param" in optimizer.state[params[0]]) == (mode == "bf16-master")
    assert ("param_remainder" in optimizer.state[params[0]]) == (mode == "bf16-remainder")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_run_of_python_goes_on_in_cpp(name: str, mode: str, tmp_path: Path) -> None:
    dtype, options = MODES[mode]
    whole, half = (two_groups(spec_of(name), shared_params(dtype), **options) for _ in range(2))
    shared_steps(whole, 0, 6)
    shared_steps(half, 0, 3)
    conversion = write_folder(half, tmp_path / "half")
    assert (conversion.to_cpp, conversion.states) == (True, len(half.state_dict()["state"]))
    run_cpp(name, 3, 6, tmp_path / "half", tmp_path / "end")
    assert_as_cpp(whole, tmp_path / "end")


def test_every_cpp_class_has_a_python_class_of_its_name() -> None:
    assert CLASSES
    for name in CLASSES:
        described = _C.OptimizerClass(name)
        native = _C.FusedStep(described.algorithm)
        assert getattr(torchfuse.optimizers, name)._algorithm == described.algorithm
        assert described.states == native.state_names
