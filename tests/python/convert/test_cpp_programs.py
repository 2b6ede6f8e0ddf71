# SPDX-License-Identifier: BSD-3-Clause
"""Runs that change their language on the way, against runs that do not: both programs, all classes.

The C++ program is tests/cpp/api/optim/checkpoint_program.cpp.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
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
from support.cpp_programs import cpp_program
from torch import Tensor

import torchfuse
from torchfuse import _C
from torchfuse.convert import Conversion, convert_checkpoint, read_cpp_archive
from torchfuse.optimizers import FusedOptimizer
from torchfuse.testing import OPTIM_SPECS, OptimSpec

CLASSES = _C.optimizer_classes()
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {"max_grad_norm": 5.0}),
    "bf16-master": (torch.bfloat16, {"master_weights": True, "max_grad_norm": 5.0}),
    "bf16-state": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "bf16-remainder": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True, "seed": 11}),
}


@dataclass(frozen=True)
class Runs:
    """Folders of one class and mode; those of `whole`, `half` and `end` are of the C++ program."""

    folder: Path
    conversion: Conversion  # of the checkpoint that Python saves after three steps

    @property
    def start(self) -> Path:
        """Before the first step."""
        return self.folder / "start"

    @property
    def whole(self) -> Path:
        """After six steps in C++."""
        return self.folder / "whole"

    @property
    def half(self) -> Path:
        """After three steps in C++."""
        return self.folder / "half"

    @property
    def end(self) -> Path:
        """After three steps in Python and three in C++."""
        return self.folder / "end"


def prepare(name: str, mode: str, folder: Path) -> tuple[Runs, list[str]]:
    """What the C++ program starts from, and its arguments."""
    dtype, options = MODES[mode]
    folder.mkdir()
    first, half = (two_groups(spec_of(name), shared_params(dtype), **options) for _ in range(2))
    shared_steps(half, 0, 3)
    write_folder(first, folder / "start")
    runs = Runs(folder, write_folder(half, folder / "python"))
    arguments: list[str] = []
    for steps, start, out in (
        ((0, 6), runs.start, runs.whole),
        ((0, 3), runs.start, runs.half),
        ((3, 6), folder / "python", runs.end),
    ):
        out.mkdir()
        arguments += [name, *map(str, steps), str(start), str(out)]
    return runs, arguments


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Runs]:
    """All runs of the C++ program, in one process: torch takes longer to load than they take."""
    command = cpp_program("checkpoint")
    root = tmp_path_factory.mktemp("runs")
    found: dict[tuple[str, str], Runs] = {}
    for name in CLASSES:
        for mode in MODES:
            found[name, mode], arguments = prepare(name, mode, root / f"{name}-{mode}")
            command += arguments
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return found


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
def test_a_run_of_cpp_goes_on_in_python(
    name: str, mode: str, all_runs: dict[tuple[str, str], Runs], tmp_path: Path
) -> None:
    _, options = MODES[mode]
    runs = all_runs[name, mode]
    conversion = convert_checkpoint(runs.half / "optimizer.pt", tmp_path / "half.pt")
    assert (conversion.optimizer, conversion.to_cpp) == (name, False)
    assert (conversion.groups, conversion.params) == (2, 5)
    # The last parameter never has a gradient; some classes give it a state all the same.
    assert conversion.states in (4, 5)

    params = [torch.nn.Parameter(value) for value in read_params(runs.half)]
    # Other options than the checkpoint's, which brings its own, but for those of storage.
    stored = {} if mode in ("fp32", "bf16-master") else options
    optimizer = two_groups(spec_of(name), params, 0, **stored)
    optimizer.load_state_dict(torch.load(tmp_path / "half.pt", weights_only=True))
    shared_steps(optimizer, 3, 6)
    assert_as_cpp(optimizer, runs.whole)
    assert ("master_param" in optimizer.state[params[0]]) == (mode == "bf16-master")
    assert ("param_remainder" in optimizer.state[params[0]]) == (mode == "bf16-remainder")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_run_of_python_goes_on_in_cpp(
    name: str, mode: str, all_runs: dict[tuple[str, str], Runs]
) -> None:
    dtype, options = MODES[mode]
    whole = two_groups(spec_of(name), shared_params(dtype), **options)
    shared_steps(whole, 0, 6)
    conversion = all_runs[name, mode].conversion
    assert (conversion.to_cpp, conversion.states) == (True, len(whole.state_dict()["state"]))
    assert_as_cpp(whole, all_runs[name, mode].end)


def test_every_cpp_class_has_a_python_class_of_its_name() -> None:
    assert CLASSES
    for name in CLASSES:
        described = _C.OptimizerClass(name)
        native = _C.FusedStep(described.algorithm)
        assert getattr(torchfuse.optimizers, name)._algorithm == described.algorithm
        later = ["momentum_start"] if name == "FusedSGD" else []
        assert described.states == [*native.state_names, *later]
