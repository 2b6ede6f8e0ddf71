# SPDX-License-Identifier: BSD-3-Clause
"""How large training programs construct and prepare apex's optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.adam import clone_params, make_params, random_grads, set_grads, train
from support.compare import assert_all_within_tolerance, assert_same_bits

from torchfuse.optimizers import FusedAdam

#: Keys that Megatron-Core adds to its groups.
FOREIGN: dict[str, Any] = {
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "max_lr": 1e-3,
}
CALL: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}


def megatrons(params: list[torch.nn.Parameter]) -> FusedAdam:
    """With keys of its own, a group that is empty on this rank, and states made beforehand."""
    groups = [
        {"params": params[:2], **FOREIGN},
        {"params": [], **FOREIGN},
        {"params": params[2:], **FOREIGN, "wd_mult": 0.0},
    ]
    optimizer = FusedAdam(params=groups, capturable=False, adam_w_mode=True, **CALL)
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = torch.zeros_like(param)
    return optimizer


def test_megatron_trains_and_resumes() -> None:
    params, reference = make_params(), make_params()
    optimizer = megatrons(params)
    given = [optimizer.state[param]["exp_avg"] for param in params]
    torchs = torch.optim.AdamW(reference, foreach=False, **CALL)
    train(optimizer, params, range(3))
    train(torchs, reference, range(3))
    assert_all_within_tolerance(params, reference)
    # The tensors that it made are the states, which one count of the group describes.
    assert all(optimizer.state[p]["exp_avg"] is t for p, t in zip(params, given, strict=True))
    saved = copy.deepcopy(optimizer.state_dict())
    assert {float(state["step"]) for state in saved["state"].values()} == {3.0}
    assert [group["wd_mult"] for group in saved["param_groups"]] == [1.0, 1.0, 0.0]
    others = clone_params(params)
    resumed = megatrons(others)
    resumed.load_state_dict(saved)
    for tensors, model in ((params, optimizer), (others, resumed)):
        set_grads(tensors, random_grads(tensors, 3))
        model.step()
    for param, other in zip(params, others, strict=True):
        assert_same_bits(other.detach(), param.detach())
    assert resumed.param_groups[0]["max_lr"] == 1e-3
