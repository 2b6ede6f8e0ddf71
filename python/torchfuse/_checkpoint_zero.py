# SPDX-License-Identifier: BSD-3-Clause
"""Saves and loads torch's ZeroRedundancyOptimizer in checkpoints.

Saving gathers all states on one rank. In loading, each rank's local optimizer loads its parameters'
states, either all or none. ZeroRedundancyOptimizer.load_state_dict() is not used because it stores
tensors without checks and keeps a second copy of the states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.optim import Optimizer

from torchfuse.optimizers import FusedOptimizer
from torchfuse.optimizers.serialization import check_structure, saved_options

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

_NAME = "ZeroRedundancyOptimizer"


def is_zero(part: Any) -> bool:
    """Whether `part` is a ZeroRedundancyOptimizer; does not import torch.distributed.optim."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(part, module.ZeroRedundancyOptimizer)


def check_group(zero: ZeroRedundancyOptimizer, name: str, group: ProcessGroup | None) -> None:
    """Checks that `group` contains all ranks of a ZeroRedundancyOptimizer."""
    ranks = set(get_process_group_ranks(zero.process_group))
    if not ranks <= ({get_rank()} if group is None else set(get_process_group_ranks(group))):
        raise ValueError(
            f"save_checkpoint: expected group to contain the {len(ranks)} ranks that share the "
            f"states of {name!r}, a {_NAME}, got "
            f"{'None' if group is None else 'another group'}. Call save_checkpoint(..., group=...) "
            "on all of these ranks."
        )
    # If state_dict() raises, all ranks must raise here. In the gather, an exception on one rank
    # would leave the other ranks waiting.
    zero.optim.state_dict()


def gathered_state(
    zero: ZeroRedundancyOptimizer, group: ProcessGroup | None
) -> dict[str, Any] | None:
    """Gathers the full state dict on the group's rank 0, on the CPU; returns None elsewhere.

    A collective for all ranks of the optimizer, after check_group().
    """
    ranks = get_process_group_ranks(zero.process_group)
    saver = get_rank() if group is None else get_process_group_ranks(group)[0]
    zero.consolidate_state_dict(to=ranks.index(saver) if saver in ranks else 0)
    if get_rank() != saver:
        return None
    whole: dict[str, Any] = zero.state_dict()
    options = _step_options(zero)
    whole["param_groups"] = [{**group, **options} for group in whole["param_groups"]]
    vars(zero)["_all_state_dicts"].clear()  # frees the gathered states of the other ranks
    return whole


def _step_options(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Returns the local optimizer's step options, which param_groups do not contain."""
    local: Any = zero.optim
    if not isinstance(local, FusedOptimizer):
        return {}
    return saved_options(local)


def load_zero(zero: ZeroRedundancyOptimizer, saved: Any) -> None:
    """Loads this rank's states and all options from a full state dict, or raises and loads none."""
    check_structure(f"{_NAME}.load_state_dict: expected", zero.param_groups, saved)
    local: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, own, of_file in zip(
        zero.param_groups, zero.optim.param_groups, saved["param_groups"], strict=True
    ):
        keys = dict(zip(group["params"], of_file["params"], strict=True))
        own_keys = [keys[param] for param in own["params"]]
        options = {key: value for key, value in of_file.items() if key != "param_names"}
        local["param_groups"].append({**options, "params": own_keys})
        local["state"] |= {key: saved["state"][key] for key in own_keys if key in saved["state"]}
    zero.optim.load_state_dict(local)
    options = _step_options(zero)
    for group, own in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
        # Step options that were passed to ZeroRedundancyOptimizer are in zero's groups too, and
        # zero.step() copies the groups' values to the local optimizer.
        group.update({key: value for key, value in options.items() if key in group})


def kept_zero(
    zero: ZeroRedundancyOptimizer, kept: Callable[[Optimizer], Callable[[], None]]
) -> Callable[[], None]:
    """Returns a function that restores `zero`; `kept` returns one for the local optimizer."""
    restore_local = kept(zero.optim)
    options = [dict(group) for group in zero.param_groups]

    def restore() -> None:
        restore_local()
        for group, before in zip(zero.param_groups, options, strict=True):
            group.clear()
            group.update(before)

    return restore
