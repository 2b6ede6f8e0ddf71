# SPDX-License-Identifier: BSD-3-Clause
"""Brings the parts of a flat tensor to all processes.

Note [Gathers on the CPU]
Gloo's all-gather copies every part several times: on two ranks it takes as long as three
broadcasts of the same bytes, which write where they should. So on the CPU each rank broadcasts its
part, all at the same time; on GPUs NCCL gathers in place.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchfuse.parallel._partition import Flat
from torchfuse.parallel._ranks import naming


def gather(
    tensor: Tensor, flat: Flat, rank: int, group: dist.ProcessGroup, who: str, what: str
) -> None:
    """Fills a tensor that is laid out as `flat`, of which this process has written its part.

    Raises:
        RuntimeError: naming `who` and `what`, if a rank does not arrive within the group's
            timeout.
    """
    parts = tensor.split(flat.part)
    if len(parts) <= 1:
        return
    with naming(who, f"the gather of {what}", group):
        if tensor.device.type != "cpu":
            dist.all_gather_into_tensor(tensor, parts[rank], group=group)
            return
        pending = [
            dist.broadcast(part.view(torch.uint8), group=group, group_src=source, async_op=True)
            for source, part in enumerate(parts)
        ]
        for work in pending:
            assert work is not None
            work.wait()
