# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints exchanged with torch where its class keeps another state than ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.adam import (
    clone_params,
    make_params,
    random_grads,
    set_grads,
    snapshot,
    through_file,
    train,
)
from support.compare import assert_all_same_bits
from test_fused_adagrad import DECAYED
from test_fused_sgd import LATE, Pair, skip_a_step, torchs, train_each

from torchfuse.optimizers import FusedAdagrad, FusedAdam, FusedSGD
from torchfuse.testing import assert_close_to_torch


def test_checkpoints_of_adam_and_adamw_choose_the_decay_mode() -> None:
    for kind, adam_w_mode in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        reference = make_params()
        train(optimizer := kind(reference), reference, [0])
        ours = FusedAdam(make_params(), adam_w_mode=not adam_w_mode, bias_correction=False)
        ours.load_state_dict(optimizer.state_dict())
        group = ours.param_groups[0]
        assert (group["adam_w_mode"], group["bias_correction"]) == (adam_w_mode, False)
        assert not {"foreach", "fused", "differentiable"} & set(group)


def test_a_parameter_of_adagrad_that_had_no_gradient_is_exchanged_with_torch(device: str) -> None:
    """torch's has a state from the start."""
    params, theirs = make_params(device=device), make_params(device=device)
    ours = FusedAdagrad(params, **DECAYED)
    reference = torch.optim.Adagrad(theirs, **DECAYED, foreach=False)
    for seed in range(5):
        for tensors, optimizer in ((params, ours), (theirs, reference)):
            set_grads(tensors, [*random_grads(tensors, seed)[:-1], None])
            optimizer.step()
    with_torch, with_ours = clone_params(params), clone_params(theirs)
    to_torch = torch.optim.Adagrad(with_torch, lr=1.0)
    to_torch.load_state_dict(through_file(ours.state_dict()))
    assert not ours.state.get(params[-1]), "saving must not change the optimizer"
    from_torch = FusedAdagrad(with_ours, lr=1.0)
    from_torch.load_state_dict(through_file(reference.state_dict()))
    runs = ((ours, params), (to_torch, with_torch), (from_torch, with_ours))
    train(reference, theirs, range(5, 9))
    for optimizer, tensors in runs:
        train(optimizer, tensors, range(5, 9))
        assert_close_to_torch(tensors, theirs)
        assert [float(optimizer.state[p]["step"]) for p in tensors] == [9.0, 9.0, 9.0, 4.0]


# --- SGD's buffers -------------------------------------------------------------------------------


def loaded(kind: Any, saved: dict[str, Any], params: Any) -> Pair:
    """An optimizer of copies of the parameters, with the state and the values of a file."""
    copies = clone_params(params)
    optimizer = kind(copies, lr=1.0)
    optimizer.load_state_dict(through_file(saved))
    return optimizer, copies


def not_begun(
    earlier: int, device: str = "cpu", skips: bool = True
) -> tuple[FusedSGD, list[torch.nn.Parameter]]:
    """After so many steps without momentum, a buffer whose first update was skipped or is next."""
    params = make_params(device=device)
    ours = FusedSGD(params, **LATE)
    train(ours, params, range(earlier))
    ours.param_groups[0]["momentum"] = 0.9
    if skips:
        skip_a_step(ours, params)
    return ours, params


@pytest.mark.parametrize(
    ("earlier", "skips", "updates"),
    [(0, True, 0), (3, True, 0), (3, False, 0), (3, True, 1), (3, True, 3)],
)
def test_a_buffer_is_saved_as_torch_has_it(
    earlier: int, skips: bool, updates: int, device: str
) -> None:
    """None before its first update."""
    ours, params = not_begun(earlier, device, skips)
    train(ours, params, range(3, 3 + updates))
    saved = ours.state_dict()
    assert all(("momentum_buffer" in ours.state[p]) == skips for p in params)
    for state in saved["state"].values():
        assert (state["momentum_buffer"] is None) == (updates == 0)
        # After the first update the start has no use, and torch's functions know no such key.
        assert (float(state["step"]), "momentum_start" in state) == (earlier + updates, False)
    again, reference = loaded(FusedSGD, saved, params), loaded(torchs, saved, params)
    train_each(range(6, 9), (ours, params), again, reference)
    for optimizer in (ours, again[0]):
        for state in optimizer.state.values():
            state.pop("momentum_start", None)
    assert_all_same_bits(snapshot(again[0]), snapshot(ours))
    assert_close_to_torch(again[1], reference[1])


@pytest.mark.parametrize(("earlier", "momentum"), [(0, 0.9), (3, 0.0), (3, 0.9)])
def test_a_buffer_that_has_not_begun_goes_to_torch_and_back(earlier: int, momentum: float) -> None:
    """Also saved while the momentum is 0, and by torch, which does not count."""
    ours, params = not_begun(earlier)
    ours.param_groups[0]["momentum"] = momentum
    reference, theirs = loaded(torchs, ours.state_dict(), params)
    reference.param_groups[0]["momentum"] = 0.9
    for steps in (0, 2):
        train(reference, theirs, range(3, 3 + steps))
        again = loaded(FusedSGD, reference.state_dict(), theirs)
        unbroken = loaded(torchs, reference.state_dict(), theirs)
        train_each(range(5, 8), again, unbroken)
        assert_close_to_torch(again[1], unbroken[1])


def test_older_torch_saved_none_without_momentum() -> None:
    params, others = make_params(), make_params()
    saved = FusedSGD(params, 1e-3).state_dict()
    saved["state"] = {index: {"momentum_buffer": None} for index in range(len(params))}
    ours, fresh = FusedSGD(params, 1e-3), FusedSGD(others, 1e-3)
    ours.load_state_dict(saved)
    train_each(range(2), (ours, params), (fresh, others))
    assert_all_same_bits(snapshot(ours), snapshot(fresh))
