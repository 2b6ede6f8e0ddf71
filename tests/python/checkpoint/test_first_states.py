# SPDX-License-Identifier: BSD-3-Clause
"""Files of optimizers that have not made a step, skipped it, or have a parameter that stands still.

The C++ program is tests/cpp/api/checkpoint/optimizers_program.cpp, with the same classes.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import assert_same_state
from support.compare import assert_same_bits
from support.cpp_programs import cpp_program

import torchfuse
from torchfuse.amp import GradScaler
from torchfuse.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedMuon,
    FusedNovoGrad,
    FusedSGD,
)

CLASSES: dict[Any, dict[str, Any]] = {
    FusedAdagrad: {},
    FusedAdam: {"amsgrad": True},
    FusedLAMB: {},
    FusedLARS: {},
    FusedLion: {},
    FusedMuon: {
        "ns_dtype": torch.float32,
        "adjust_lr_fn": "match_rms_adamw",
        "ns_coefficients": (3.0, -3.2, 1.2),
    },
    FusedNovoGrad: {},
    FusedSGD: {"momentum": 0.9, "dampening": 0.1},
}
STATES = ("fresh", "skipped", "frozen")


class Run:
    """An optimizer of three parameters, of which a frozen one has no gradients.

    FusedMuon has matrices around a vector.
    """

    def __init__(self, kind: Any, state: str) -> None:
        shapes = [(2, 3), (3,), (2, 3)] if kind is FusedMuon else [(3,)] * 3
        self.params = [
            torch.nn.Parameter(torch.full(shape, 1.0 + 0.5 * i)) for i, shape in enumerate(shapes)
        ]
        self.optimizer = kind(self.params, lr=0.1, **CLASSES[kind])
        self.state = state

    def set_gradients(self, value: float) -> None:
        for index, param in enumerate(self.params[: 2 if self.state == "frozen" else 3]):
            param.grad = torch.full_like(param, value * (1.0 + index))

    def begin(self) -> None:
        if self.state == "skipped":
            scaler = GradScaler("cpu")
            scaler.scale(torch.ones(()))
            self.set_gradients(math.inf)
            scaler.step(self.optimizer)
        elif self.state == "frozen":
            self.set_gradients(0.5)
            self.optimizer.step()

    def go_on(self, path: Path) -> None:
        torchfuse.load_checkpoint(path, optimizer=self.optimizer)
        for _ in range(2):
            self.set_gradients(0.25)
            self.optimizer.step()

    def save(self, path: Path) -> None:
        values = {"params": torch.cat([param.detach().flatten() for param in self.params])}
        torchfuse.save_checkpoint(path, optimizer=self.optimizer, values=values)


def used(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """States that have made a step, without the start of a buffer, which says nothing after it."""
    return {
        key: {name: value for name, value in values.items() if name != "momentum_start"}
        for key, values in state.items()
        if float(values["step"]) > 0
    }


def run_cpp(source: Path | str, target: Path) -> None:
    target.mkdir()
    done = subprocess.run(
        cpp_program("optimizers", source, target), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of both languages in `python` and `cpp`; where C++ went on from them, `...-in-cpp`."""
    folder = tmp_path_factory.mktemp("states")
    (folder / "python").mkdir()
    for kind in CLASSES:
        for state in STATES:
            run = Run(kind, state)
            run.begin()
            run.save(folder / "python" / f"{kind.__name__}-{state}.pt")
    run_cpp("-", folder / "cpp")
    for language in ("python", "cpp"):
        run_cpp(folder / language, folder / f"{language}-in-cpp")
    return folder


@pytest.mark.parametrize("writer", ["python", "cpp"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_both_languages_go_on_from_the_file(
    kind: Any, state: str, writer: str, folder: Path
) -> None:
    file = f"{kind.__name__}-{state}.pt"
    run = Run(kind, state)
    run.go_on(folder / writer / file)
    run.save(folder / "expected.pt")
    expected = torch.load(folder / "expected.pt", weights_only=True)
    actual = torch.load(folder / f"{writer}-in-cpp" / file, weights_only=True)
    assert_same_bits(actual["values"]["params"], expected["values"]["params"], "params")
    assert_same_state(used(actual["optimizer"]["state"]), used(expected["optimizer"]["state"]))
