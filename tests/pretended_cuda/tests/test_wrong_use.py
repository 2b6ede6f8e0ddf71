# SPDX-License-Identifier: BSD-3-Clause
"""What does not fit together says so in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

STEP = """
import torch
from torchfuse.optimizers import FusedAdam
param = torch.nn.Parameter(torch.zeros(8, device="{device}"))
param.grad = torch.ones_like(param)
FusedAdam([param]).step()
"""


def run(device: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    changed = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", STEP.format(device=device)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={name: value for name, value in changed.items() if value is not None},
    )


def test_the_library_of_the_device_without_the_device() -> None:
    result = run("cpu", LD_PRELOAD=None)
    assert result.returncode != 0
    assert "PRETENDED_CUDA_use_tools_on_pretended_cuda.sh' not found" in result.stderr


def test_the_device_without_its_library() -> None:
    result = run("cuda", LD_LIBRARY_PATH=None)
    assert result.returncode != 0
    assert "Build torchfuse with TORCHFUSE_PRETENDED_CUDA=ON" in result.stderr


def test_more_devices_than_there_are() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device=f"cuda:{torch.cuda.device_count()}")


def test_a_setting_that_is_no_number() -> None:
    result = run("cuda", PRETENDED_CUDA_SEED="some")
    assert result.returncode != 0
    assert "expected PRETENDED_CUDA_SEED to be a whole number, got 'some'" in result.stderr
