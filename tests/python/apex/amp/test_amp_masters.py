# SPDX-License-Identifier: BSD-3-Clause
"""Masters that apex.amp has saved go on in torchfuse's own optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.amp import make_batches, train_with
from test_amp_checkpoints import OPTIMIZERS, prepared, saved

from torchfuse.optimizers import FusedAdam, FusedSGD

BATCHES = make_batches(3)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedSGD"])
def test_masters_of_o2_move_into_the_own_optimizer(amp: Any, name: str) -> None:
    """A program that leaves apex.amp goes on from the masters, not from the fp16 parameters."""
    model, optimizer = prepared(amp, "O2", OPTIMIZERS[name])
    train_with(amp, model, optimizer, BATCHES[:3])
    checkpoint = saved(amp, model, optimizer)["optimizer"]
    own = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    loaded = OPTIMIZERS[name](own, lr=1e-2)
    loaded.load_state_dict(checkpoint)
    masters = checkpoint["master_params"]
    assert len(masters) > 0
    for number, param in enumerate(own):
        kept = loaded.state[param].get("master_param")
        assert (kept is not None) == (number in masters)
        if kept is not None:
            assert torch.equal(kept, masters[number])


def test_masters_of_another_shape_are_refused(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2", FusedAdam)
    train_with(amp, model, optimizer, BATCHES[:1])
    checkpoint = saved(amp, model, optimizer)["optimizer"]
    number = next(iter(checkpoint["master_params"]))
    checkpoint["master_params"][number] = torch.zeros(1)
    own = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    with pytest.raises(ValueError, match=rf"state\[{number}\]\['master_param'\] to have the shape"):
        FusedAdam(own).load_state_dict(checkpoint)


def test_masters_of_an_optimizer_without_states_move_too(amp: Any) -> None:
    """torch gives SGD without momentum no states; its masters are all that it saves."""
    model, optimizer = prepared(amp, "O2", torch.optim.SGD)
    train_with(amp, model, optimizer, BATCHES[:3])
    checkpoint = saved(amp, model, optimizer)["optimizer"]
    assert checkpoint["state"] == {}
    own = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    loaded = FusedSGD(own, lr=1e-2, master_weights=True)
    loaded.load_state_dict(checkpoint)
    masters = checkpoint["master_params"]
    assert len(masters) > 0
    for number, master in masters.items():
        assert torch.equal(loaded.state[own[number]]["master_param"], master)
    for param in own:
        param.grad = torch.zeros_like(param)
    loaded.step()
    for number, master in masters.items():
        assert torch.equal(loaded.state[own[number]]["master_param"], master)


def test_a_master_of_no_parameter_is_refused(amp: Any) -> None:
    model, optimizer = prepared(amp, "O2", FusedAdam)
    train_with(amp, model, optimizer, BATCHES[:1])
    checkpoint = saved(amp, model, optimizer)["optimizer"]
    checkpoint["master_params"][99] = torch.zeros(1)
    own = [torch.nn.Parameter(param.detach().clone()) for param in model.parameters()]
    with pytest.raises(
        ValueError, match=r"'master_params'\] to have the numbers .* as keys, got 99"
    ):
        FusedAdam(own).load_state_dict(checkpoint)
