# SPDX-License-Identifier: BSD-3-Clause
"""apex.amp on devices: several of them in one loss, and models that move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.amp import make_batches, make_model, spoil
from torch.nn.functional import cross_entropy

from torchfuse.optimizers import FusedAdam

# Two devices, or the host and the one device.
DEVICES = ["cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cpu"]


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", [DEVICES, DEVICES[::-1]], ids=["forward", "reverse"])
@pytest.mark.parametrize("spoiled", [0, 1, None])
def test_one_loss_for_optimizers_on_two_devices(
    amp: Any, level: str, order: list[str], spoiled: int | None
) -> None:
    models = [make_model(device) for device in order]
    optimizers = [FusedAdam(model.parameters(), lr=1e-2) for model in models]
    amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    losses = [
        cross_entropy(model(data.to(device)), target.to(device))
        for model, device, (data, target) in zip(models, order, make_batches(2), strict=True)
    ]
    before = [model[0].weight.detach().clone() for model in models]
    with amp.scale_loss(losses[0] + losses[1].to(order[0]), optimizers) as scaled_loss:
        scaled_loss.backward()
        if spoiled is not None:
            spoil(models[spoiled], 0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0 ** (16 if spoiled is None else 15)
    for optimizer, model, weight in zip(optimizers, models, before, strict=True):
        optimizer.step()
        assert torch.equal(model[0].weight, weight) == (spoiled is not None)


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_moves_after_initialize(amp: Any, level: str) -> None:
    model = make_model()
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda *given: seen.append(given[2].dtype))
    amp.initialize(model, opt_level=level, verbosity=0)
    model.to("cuda")
    assert model(torch.ones(2, 6, device="cuda")).dtype == torch.float32
    assert seen == [torch.float16]


def test_the_device_is_that_of_the_model_not_of_the_input(amp: Any, device: str) -> None:
    """An input on the host, such as a length, does not choose the autocast."""
    seen: list[bool] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 2))

        def forward(self, length: torch.Tensor) -> torch.Tensor:
            seen.extend(torch.is_autocast_enabled(name) for name in ("cpu", "cuda"))
            return torch.mm(self.weight, self.weight) * int(length)

    model = amp.initialize(Net().to(device), opt_level="O1", verbosity=0)
    model(torch.tensor(3))
    assert seen == [device == "cpu", device == "cuda"]
