# SPDX-License-Identifier: BSD-3-Clause
"""A scale on CUDA over gradients on the host, as with parameters that are offloaded.

The host reads such copies at once, so each must be one that it waits for. The tensors only pretend
to be on CUDA: what is seen is how each copy is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.device_copies import Copy, recorded_copies
from torch.nn import Parameter

from torchfuse.amp import GradScaler
from torchfuse.optimizers import FusedAdam

TO_THE_HOST = Copy("cuda", "cpu", non_blocking=False)


@pytest.fixture
def copies() -> Iterator[list[Copy]]:
    with recorded_copies() as recorded:
        yield recorded


def scaler_on(device: str) -> GradScaler:
    """A scaler whose scale exists, though nothing is computed on CUDA."""
    scaler = GradScaler("cpu")
    scaler._scale = torch.ones((), device=device)
    scaler._growth_tracker = torch.ones((), dtype=torch.int32, device=device)
    return scaler


def make_optimizer() -> FusedAdam:
    param = Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return FusedAdam([param], lr=0.1)


def to_the_host(copies: list[Copy]) -> list[Copy]:
    return [copy for copy in copies if copy.target == "cpu"]


@pytest.mark.parametrize(
    "outputs",
    [lambda output: output, lambda output: [output], lambda output: iter([output])],
    ids=["tensor", "list", "iterator"],
)
def test_scale_of_outputs_on_the_host(outputs: Callable[[Any], Any], copies: list[Copy]) -> None:
    scaled = scaler_on("cuda").scale(outputs(torch.ones(())))
    result = scaled if isinstance(scaled, torch.Tensor) else next(iter(scaled))
    assert result.device.type == "cpu"
    assert copies == [TO_THE_HOST]


def test_unscale_and_step_of_gradients_on_the_host(
    copies: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is lent the loss scale or the flag: of this missing, a step is not skipped."""
    lent: dict[str, Any] = {}
    monkeypatch.setattr(FusedAdam, "step", lambda self: lent.update(vars(self)))
    scaler, optimizer = scaler_on("cuda"), make_optimizer()
    scaler.step(make_optimizer())
    assert lent["grad_scale"].device.type == "cpu"
    assert to_the_host(copies) == [TO_THE_HOST]
    scaler.unscale_(optimizer)
    assert to_the_host(copies) == [TO_THE_HOST] * 2
    scaler.step(optimizer)
    assert lent["found_inf"].device.type == "cpu"
    assert to_the_host(copies) == [TO_THE_HOST] * 3


def test_towards_cuda_nothing_waits(copies: list[Copy]) -> None:
    scaler_on("cuda")._core.combine([torch.ones(()), torch.ones(())])
    assert copies == [Copy("cpu", "cuda", non_blocking=True)] * 2
