# SPDX-License-Identifier: BSD-3-Clause
"""What is particular to FusedAdagrad: initial sums, and torch's and apex's files."""

from __future__ import annotations

from typing import Any

import torch
from support.adam import (
    clone_params,
    make_params,
    random_grads,
    set_grads,
    through_file,
    train,
)
from support.compare import assert_same_bits

from torchfuse.optimizers import FusedAdagrad
from torchfuse.testing import assert_close_to_torch

DECAYED: dict[str, Any] = {
    "lr": 1e-3,
    "lr_decay": 0.1,
    "weight_decay": 0.05,
    "initial_accumulator_value": 0.5,
    "maximize": True,
}


def torchs(params: Any, **hyper: Any) -> torch.optim.Adagrad:
    return torch.optim.Adagrad(params, foreach=False, fused=False, **hyper)


def test_apexs_attributes() -> None:
    optimizer = FusedAdagrad(make_params(), 0.1, 1e-8, 0.1, False, True)
    assert (optimizer.adagrad_w_mode, optimizer.set_grad_none) == (1, False)
    optimizer.adagrad_w_mode = 0
    assert optimizer.param_groups[0]["adagrad_w_mode"] is False


# --- Initial sums --------------------------------------------------------------------------------


def test_sums_begin_with_each_groups_own_value_also_if_the_first_step_is_skipped(
    device: str,
) -> None:
    params = make_params(device=device)
    optimizer = FusedAdagrad(
        [{"params": params[:2]}, {"params": params[2:], "initial_accumulator_value": 0.25}],
        initial_accumulator_value=0.5,
    )
    optimizer.found_inf = torch.ones((), device=device)
    train(optimizer, params, [0])
    for p, value in zip(params, (0.5, 0.5, 0.25, 0.25), strict=True):
        assert_same_bits(optimizer.state[p]["sum"], torch.full_like(p, value))


def test_sums_that_exist_keep_their_values_as_in_torch() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdagrad([param], initial_accumulator_value=1.0)
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["initial_accumulator_value"] = 100.0
    optimizer.step()
    assert optimizer.state[param]["sum"].tolist() == [3.0, 3.0]


# --- Checkpoints ---------------------------------------------------------------------------------


def test_a_parameter_that_had_no_gradient_is_exchanged_with_torch(device: str) -> None:
    """torch's has a state from the start."""
    params, theirs = make_params(device=device), make_params(device=device)
    ours, reference = FusedAdagrad(params, **DECAYED), torchs(theirs, **DECAYED)
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


def test_apex_checkpoint(device: str) -> None:
    """apex has neither step counts nor lr_decay."""
    theirs = make_params(device=device)
    reference = torchs(theirs, lr=1e-3, weight_decay=0.05)
    train(reference, theirs, range(3))
    saved = reference.state_dict()
    group = {"lr": 1e-3, "eps": 1e-10, "weight_decay": 0.05, "params": list(range(len(theirs)))}
    state = {index: {"sum": entry["sum"].clone()} for index, entry in saved["state"].items()}
    params = clone_params(theirs)
    ours = FusedAdagrad(params, lr=1.0)
    ours.load_state_dict({"state": state, "param_groups": [group]})
    train(ours, params, range(3, 6))
    train(reference, theirs, range(3, 6))
    assert_close_to_torch(params, theirs)
