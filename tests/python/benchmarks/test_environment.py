# SPDX-License-Identifier: BSD-3-Clause
"""A run compares equal instructions: what holds torch to fewer holds torchfuse too."""

from __future__ import annotations

import pytest
import torch

import environment
from torchfuse import _C


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    return monkeypatch


def test_torchfuse_is_held_to_torchs_instructions(capability: pytest.MonkeyPatch) -> None:
    capability.setenv("ATEN_CPU_CAPABILITY", "default")
    environment.hold_to_torchs_level()
    assert _C.cpu_isa() == "baseline"
    described = environment.describe("run.py", device="cpu", seed=0, rounds=1)
    assert (described["cpu_isa"], described["torch_cpu_capability"]) == ("baseline", "DEFAULT")


def test_instructions_that_torchfuse_does_not_know_are_named(
    capability: pytest.MonkeyPatch,
) -> None:
    capability.setenv("ATEN_CPU_CAPABILITY", "zvector")
    capability.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "Z VECTOR")
    with pytest.raises(SystemExit, match="one of DEFAULT, AVX2, AVX512, got Z VECTOR"):
        environment.hold_to_torchs_level()
