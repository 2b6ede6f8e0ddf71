# SPDX-License-Identifier: BSD-3-Clause
"""Models that become a program of torch's: scripted, traced, exported; and losses in transforms."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchfuse.losses import FusedCrossEntropyLoss
from torchfuse.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedRMSNorm,
)
from torchfuse.parallel import SyncBatchNorm

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: FusedLayerNorm(4),
    "layer without bias": lambda: FusedLayerNorm((3, 4), bias=False),
    "rms": lambda: FusedRMSNorm(4),
    "mixed rms": lambda: MixedFusedRMSNorm(4),
    "batch, relu": lambda: SyncBatchNorm(4, fuse_relu=True).eval(),
}


def scripted(model: nn.Module, input: Tensor) -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    return torch.jit.load(file)


def traced(model: nn.Module, input: Tensor) -> Any:
    program: Any = torch.jit.trace(model, input)
    assert "torchfuse::" not in str(program.inlined_graph)
    return program


def exported(model: nn.Module, input: Tensor, strict: bool = False) -> Any:
    program = torch.export.export(model, (input,), strict=strict)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls
    assert all(call.startswith("aten.") for call in calls)
    return program.module()


def exported_strictly(model: nn.Module, input: Tensor) -> Any:
    return exported(model, input, strict=True)


def symbolic(model: nn.Module, input: Tensor) -> Any:
    return torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("program_of", [scripted, traced, exported, exported_strictly, symbolic])
@pytest.mark.parametrize("name", MAKERS)
def test_a_program_of_the_model_has_torchs_operator(
    name: str, program_of: Callable[[nn.Module, Tensor], Any]
) -> None:
    if program_of is scripted and name.startswith("batch"):
        pytest.skip("revert_syncbn_model() gives torch's layers, which can be scripted")
    model = nn.Sequential(nn.Linear(4, 4), MAKERS[name]())
    input = torch.randn(3, 4)
    torch.testing.assert_close(program_of(model, input)(input), model(input))


@pytest.mark.parametrize("program_of", [traced, exported])
def test_batch_norm_of_one_process_becomes_a_program_in_training(
    program_of: Callable[[nn.Module, Tensor], Any],
) -> None:
    """As for a picture of the model."""
    input = torch.randn(5, 4)
    program = program_of(nn.Sequential(SyncBatchNorm(4)), input)
    torch.testing.assert_close(program(input), nn.BatchNorm1d(4)(input))


def test_the_loss_has_derivatives_in_transforms() -> None:
    logits, labels = torch.randn(4, 5), torch.tensor([1, 3, 0, -100])
    ours = FusedCrossEntropyLoss(label_smoothing=0.1)
    torchs = nn.CrossEntropyLoss(label_smoothing=0.1)
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        found = transform(lambda x: ours(x, labels))(logits)
        torch.testing.assert_close(found, transform(lambda x: torchs(x, labels))(logits))
    every = torch.func.vmap(lambda x: ours(x, labels))(logits.expand(3, 4, 5))
    torch.testing.assert_close(every, torchs(logits, labels).expand(3))
