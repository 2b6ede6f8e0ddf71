# SPDX-License-Identifier: BSD-3-Clause
"""How much a step dispatches: operations of torch on a CPU, kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def dispatched(step: Callable[[], object], device: torch.device) -> int:
    """Counts what torch's profiler sees of one step.

    On a CPU these are all operations that pass torch's dispatcher, those within others too: there a
    foreach operation is a loop of them. What a package calls by other ways is not among them, such
    as the one C++ call of a step of ours.
    """
    step()
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
    events = profiler.events()
    if events is None:
        raise RuntimeError("op_count: expected events of torch's profiler, got none.")
    if on_cuda:
        moves = ("Memcpy", "Memset")
        kernels = (e for e in events if e.device_type == torch._C._autograd.DeviceType.CUDA)
        return sum(not event.name.startswith(moves) for event in kernels)
    return sum("::" in event.name for event in events)
