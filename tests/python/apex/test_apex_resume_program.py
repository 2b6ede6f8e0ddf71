# SPDX-License-Identifier: BSD-3-Clause
"""Training that goes on from a checkpoint at each level, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.apex_programs import run
from support.compare import assert_all_same_bits
from torch import Tensor

pytestmark = pytest.mark.processes


def tensors_in(value: Any, name: str) -> dict[str, Tensor]:
    """All tensors of nested dictionaries and lists, and the numbers as tensors."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, x in items for k, v in tensors_in(x, f"{name}.{key}").items()}
    if isinstance(value, bool | int | float):
        return {name: torch.tensor(value)}
    return {name: value} if isinstance(value, Tensor) else {}


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [("O0", "adam"), ("O1", "lamb"), ("O2", "adam"), ("O2", "sgd"), ("O3", "adam")],
)
def test_a_resumed_run_is_the_uninterrupted_one(level: str, optimizer: str, tmp_path: Path) -> None:
    options = ("--opt-level", level, "--optimizer", optimizer, "--output")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    steps = run("train_resume", *options, str(whole))
    half = whole / "after4.pt"
    assert run("train_resume", *options, str(resumed), "--resume", str(half)) == steps[5:]
    begun, expected, saved = (
        tensors_in(torch.load(file, weights_only=True), "saved")
        for file in (half, whole / "after7.pt", resumed / "after7.pt")
    )
    assert_all_same_bits(saved, expected)
    # Steps were skipped before, and the weights moved after.
    scale = begun["saved.amp.loss_scaler0.loss_scale"].item()
    assert 1.0 < scale < 2.0**24 if level in ("O1", "O2") else scale == 1.0
    assert not torch.equal(begun["saved.model.last.weight"], saved["saved.model.last.weight"])
