# SPDX-License-Identifier: BSD-3-Clause
"""torch's ZeroRedundancyOptimizer in checkpoints: states gathered to save, and each rank's loaded.

Its own load_state_dict() stores tensors without checks and keeps a second copy of the states. Here
the local optimizer on each rank loads its own parameters' states, all of them or none.
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
    """Whether `part` is a ZeroRedundancyOptimizer, whose package is not imported for it."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(part, module.ZeroRedundancyOptimizer)


def check_group(zero: ZeroRedundancyOptimizer, name: str, group: ProcessGroup | None) -> None:
    """Checks that all ranks of a ZeroRedundancyOptimizer save together."""
    ranks = set(get_process_group_ranks(zero.process_group))
    if not ranks <= ({get_rank()} if group is None else set(get_process_group_ranks(group))):
        raise ValueError(
            f"save_checkpoint: expected group to contain the {len(ranks)} ranks that share the "
            f"states of {name!r}, a {_NAME}, got "
            f"{'None' if group is None else 'another group'}. Make the call on all of them, with "
            "group=."
        )
    # Refused here on all ranks: an exception within the gather would leave the others waiting.
    zero.optim.state_dict()


def gathered_state(
    zero: ZeroRedundancyOptimizer, group: ProcessGroup | None
) -> dict[str, Any] | None:
    """Gathers the whole state dict on rank 0 of a group, on the CPU; None on other ranks.

    All ranks of the optimizer make the call, after check_group().
    """
    ranks = get_process_group_ranks(zero.process_group)
    saver = get_rank() if group is None else get_process_group_ranks(group)[0]
    zero.consolidate_state_dict(to=ranks.index(saver) if saver in ranks else 0)
    if get_rank() != saver:
        return None
    whole: dict[str, Any] = zero.state_dict()
    options = _step_options(zero)
    whole["param_groups"] = [{**group, **options} for group in whole["param_groups"]]
    vars(zero)["_all_state_dicts"].clear()  # of the other ranks, which would stay in memory
    return whole


def _step_options(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Returns the options of the local optimizer's step, which its groups do not hold."""
    local: Any = zero.optim
    if not isinstance(local, FusedOptimizer):
        return {}
    return saved_options(local)


def load_zero(zero: ZeroRedundancyOptimizer, saved: Any) -> None:
    """Loads this rank's states and all options of a whole state dict: all of it or nothing."""
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
        # Those that were arguments of the ZeroRedundancyOptimizer: it copies its groups' values.
        group.update({key: value for key, value in options.items() if key in group})


def kept_zero(
    zero: ZeroRedundancyOptimizer, kept: Callable[[Optimizer], Callable[[], None]]
) -> Callable[[], None]:
    """Returns what restores a ZeroRedundancyOptimizer; `kept`, that of its local optimizer."""
    restore_local = kept(zero.optim)
    options = [dict(group) for group in zero.param_groups]

    def restore() -> None:
        restore_local()
        for group, before in zip(zero.param_groups, options, strict=True):
            group.clear()
            group.update(before)

    return restore
