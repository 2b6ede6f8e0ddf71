# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers of C++ against torch's Python classes, over 1,000 steps and across save and resume.

The C++ program is tests/cpp/api/optim/lr_scheduler/scheduler_program.cpp, with the same cases.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cpp_programs import cpp_program
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lrs

import torchfuse
from torchfuse.optimizers import FusedAdam, FusedOptimizer

# These runs have no step of the optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

STEPS = 1000
RATES = [0.5, 0.02, 3e-4]
#: Largest deviation from Python, times the base rate.
BOUND = 1e-12

Make = Callable[[Optimizer], Any]


def sequential(opt: Optimizer) -> lrs.LRScheduler:
    inner = [
        lrs.LinearLR(opt, 0.1, 1.0, 50),
        lrs.CosineAnnealingLR(opt, 200, 1e-5),
        lrs.LambdaLR(opt, lambda epoch: 1.0 / (1.0 + epoch)),
        lrs.MultiStepLR(opt, [10, 100], 0.5),
    ]
    return lrs.SequentialLR(opt, inner, [50, 300, 620])


def sequential_of_chained(opt: Optimizer) -> lrs.LRScheduler:
    chain = lrs.ChainedScheduler([lrs.LinearLR(opt, 0.2, 1.0, 30), lrs.ExponentialLR(opt, 0.999)])
    return lrs.SequentialLR(opt, [chain, lrs.CosineAnnealingWarmRestarts(opt, 40, 2)], [100])


CASES: dict[str, Make] = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, lambda epoch: 1.0 / math.sqrt(1.0 + epoch)),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(
        opt, lambda epoch: 0.99 if epoch % 2 == 0 else 1.005
    ),
    "StepLR": lambda opt: lrs.StepLR(opt, 30, 0.9),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, [10, 30, 30, 600], 0.3),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, 0.3, 400),
    "LinearLR": lambda opt: lrs.LinearLR(opt, 0.1, 0.9, 700),
    "LinearLR to zero": lambda opt: lrs.LinearLR(opt, 1.0 / 3.0, 0.0, 777),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, 0.99),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, 900, 1.7),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, 130, 1e-5),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 37, 2, 1e-6),
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, [0.01, 0.02, 0.03], 0.9, 70, 31, "triangular2"),
    "CyclicLR of FusedAdam": lambda opt: lrs.CyclicLR(
        opt, 1e-3, 0.1, 64, mode="exp_range", gamma=0.999
    ),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, [0.3, 0.2, 0.1], total_steps=1000),
    "OneCycleLR of three lines": lambda opt: lrs.OneCycleLR(
        opt,
        0.4,
        epochs=11,
        steps_per_epoch=100,
        pct_start=0.25,
        anneal_strategy="linear",
        three_phase=True,
    ),
    "SequentialLR": sequential,
    "SequentialLR of a chain": sequential_of_chained,
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, 0.25, 20), lrs.ExponentialLR(opt, 0.995)]
    ),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(
        opt, factor=0.7, patience=4, cooldown=3, min_lr=1e-6, threshold=1e-3
    ),
}


class ProgramsSGD(SGD):
    """A class of the program: its scheduler may be saved without it."""


class ProgramsAdamW(AdamW):
    """As above."""


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "CyclicLR of FusedAdam": FusedAdam,
    "OneCycleLR": ProgramsAdamW,
}


def make_optimizer(name: str) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in RATES]
    return OPTIMIZERS.get(name, ProgramsSGD)(groups)


def metric(step: int) -> float:
    return 1.0 + (step * 7919 % 101) / 100.0 - 0.0005 * step


@dataclass
class Run:
    """A run of torch's own classes; `values` are rates and momenta by step and group."""

    name: str

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.name)
        self.scheduler = CASES[self.name](self.optimizer)
        self.values: list[list[list[float]]] = []
        self.record()

    def record(self) -> None:
        cycles = self.name.startswith(("CyclicLR", "OneCycleLR"))
        self.values.append(
            [
                [
                    group["lr"],
                    (group["betas"][0] if "betas" in group else group["momentum"])
                    if cycles
                    else 0.0,
                ]
                for group in self.optimizer.param_groups
            ]
        )

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            if step == 250:
                self.optimizer.param_groups[1]["lr"] *= 0.5
            if isinstance(self.scheduler, lrs.ReduceLROnPlateau):
                self.scheduler.step(metric(step))
            else:
                self.scheduler.step()
            self.record()

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds; the scheduler of a fused optimizer is refused without it."""
        fused = isinstance(self.optimizer, FusedOptimizer)
        return {"scheduler": self.scheduler} | ({"optimizer": self.optimizer} if fused else {})

    def resume_from(self, path: Path) -> None:
        torchfuse.load_checkpoint(path, **self.parts())
        for group, rate in zip(
            self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        self.values.clear()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Path]]:
    """Python's runs, and the folders of the C++ program's."""
    root = tmp_path_factory.mktemp("schedulers")
    command = cpp_program("scheduler", STEPS, root)
    found: dict[str, tuple[Run, Path]] = {}
    for name in CASES:
        run = Run(name)
        run.steps(0, STEPS // 2)
        folder = root / name
        folder.mkdir()
        torchfuse.save_checkpoint(folder / "python.pt", **run.parts())
        run.steps(STEPS // 2, STEPS)
        found[name] = run, folder
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split("\n")[:-1] == sorted(CASES)
    return found


def read_values(path: Path) -> Tensor:
    return torchfuse.load_checkpoint(path)["values"]


def deviation(actual: Tensor, expected: list[list[list[float]]]) -> float:
    """Largest deviation: of rates, relative to the base rates; of momenta, absolute."""
    reference = torch.tensor(expected, dtype=torch.float64)
    assert actual.shape == reference.shape
    scale = torch.tensor([[rate, 1.0] for rate in RATES], dtype=torch.float64)
    return ((actual - reference).abs() / scale).max().item()


@pytest.mark.parametrize("name", CASES)
def test_cpp_follows_python_and_resumes_from_both(
    name: str, runs: dict[str, tuple[Run, Path]]
) -> None:
    python, folder = runs[name]
    assert len(python.values) == STEPS + 1
    rates = {tuple(map(tuple, values)) for values in python.values}
    assert len(rates) > 1  # else any constant would pass
    assert deviation(read_values(folder / "whole.pt"), python.values) <= BOUND
    for start in ("half", "python"):
        resumed = read_values(folder / f"from_{start}.pt")
        assert deviation(resumed, python.values[STEPS // 2 + 1 :]) <= BOUND


@pytest.mark.parametrize("name", CASES)
def test_python_resumes_from_a_checkpoint_of_cpp(
    name: str, runs: dict[str, tuple[Run, Path]]
) -> None:
    python, folder = runs[name]
    resumed = Run(name)
    resumed.resume_from(folder / "half.pt")
    resumed.steps(STEPS // 2, STEPS)
    actual = torch.tensor(resumed.values, dtype=torch.float64)
    assert deviation(actual, python.values[STEPS // 2 + 1 :]) <= BOUND
