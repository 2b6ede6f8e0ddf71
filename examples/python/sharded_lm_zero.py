# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed.checkpoint for a ZeroRedundancyOptimizer, each rank with its own states.

The states have the keys that they have in one process, where the optimizer has all parameters, so
that a checkpoint resumes in any number of processes. torchfuse.save_checkpoint, which gathers the
states on rank 0 and writes one file, needs none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer


def _own_keys(optimizer: ZeroRedundancyOptimizer) -> list[list[int]]:
    """For each group, the places of this rank's parameters among all parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = {param: place for place, param in enumerate(params)}
    return [[places[param] for param in group["params"]] for group in optimizer.optim.param_groups]


def own_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The state dict of the whole optimizer, with this rank's states only."""
    local = optimizer.optim.state_dict()
    keys = [key for of_group in _own_keys(optimizer) for key in of_group]
    groups, begin = [], 0
    for group, own in zip(optimizer.param_groups, local["param_groups"], strict=True):
        end = begin + len(group["params"])
        # A scheduler has changed the options of this group since the local optimizer's last step.
        groups.append({**own, **group, "params": list(range(begin, end))})
        begin = end
    state = {keys[index]: value for index, value in local["state"].items()}
    return {"state": state, "param_groups": groups}


def create_states(optimizer: ZeroRedundancyOptimizer) -> None:
    """Creates this rank's states by a step that changes no parameter; all ranks call it."""
    groups = optimizer.optim.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.optim.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def load_own_state(optimizer: ZeroRedundancyOptimizer, state: dict[str, Any]) -> None:
    """Loads what own_state() returned, on any number of ranks."""
    groups = [
        {**group, "params": keys}
        for group, keys in zip(state["param_groups"], _own_keys(optimizer), strict=True)
    ]
    optimizer.optim.load_state_dict({"state": state["state"], "param_groups": groups})
    for group, own in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
