# SPDX-License-Identifier: BSD-3-Clause
"""Checks that all ranks of the default group agree before communicating."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse import _C


def require_group(who: str) -> None:
    """Raises RuntimeError if torch.distributed has no process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who}: expected torch.distributed to have a process group, got none. "
            "Call torch.distributed.init_process_group first."
        )


def require_name(who: str, group: dist.ProcessGroup) -> str:
    """Returns the group's name, which native code uses to find the group."""
    try:
        return str(group.group_name)
    except RuntimeError as error:
        raise RuntimeError(
            f"{who}: expected process_group to have a name, got a {type(group).__name__} without a "
            "name. Create the group with torch.distributed.new_group()."
        ) from error


def check_parameters(who: str, module: nn.Module) -> None:
    """Raises for parameters that the group cannot reduce or that differ between ranks."""
    backends = dist.get_backend_config()
    descriptions = []
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{who}: expected parameter '{name}' of module to have a shape, got a lazy "
                "parameter. Call the module once first."
            )
        if f"{parameter.device.type}:" not in backends:
            raise ValueError(
                f"{who}: expected parameter '{name}' of module to be on a device of the process "
                f"group's backends ({backends}), got {parameter.device}. Move the module to a "
                "supported device."
            )
        descriptions.append(
            f"'{name}' of shape {tuple(parameter.shape)}, dtype {parameter.dtype}, "
            f"requires_grad={parameter.requires_grad}"
        )
    remedy = "Build the same module on all ranks."
    check_same(f"{who}: expected the parameters of module", descriptions, remedy)


def check_gradients(who: str, named: Mapping[str, Tensor | None]) -> None:
    """Raises for sparse gradients, and if shapes, dtypes or layouts differ between ranks."""
    descriptions = [f"{name}: {_describe(grad)}" for name, grad in named.items()]
    remedy = "Compute gradients for the same parameters on all ranks."
    check_same(f"{who}: expected the gradients", descriptions, remedy)
    for name, grad in named.items():
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"{who}: expected {name} to be dense, got layout {grad.layout}. "
                "Reduce sparse gradients separately with torch.distributed.all_reduce."
            )


def _describe(grad: Tensor | None) -> str:
    if grad is None:
        return "none"
    return f"shape {tuple(grad.shape)}, dtype {grad.dtype}, layout {grad.layout}"


def check_same(expected: str, descriptions: Sequence[str], remedy: str) -> None:
    """Raises RuntimeError on all ranks if the descriptions differ between ranks.

    The ranks compare checksums, and gather the descriptions only if the checksums differ.
    """
    size = dist.get_world_size()
    if size == 1:
        return
    digest = hashlib.sha256("\n".join(descriptions).encode()).digest()
    checksum = int.from_bytes(digest[:8], "big", signed=True)
    who, _, compared = expected.partition(": expected ")
    # The maximum gives the largest checksum and the complement of the smallest checksum.
    ends = torch.tensor([checksum, ~checksum], dtype=torch.int64, device=_device_of_group())
    with _naming(who, f"the comparison of {compared}"):
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        largest, of_smallest = ends.tolist()
        if largest == ~of_smallest:
            return
        everywhere: list[Sequence[str]] = [[] for _ in range(size)]
        dist.all_gather_object(everywhere, list(descriptions))
    rank = next(rank for rank, other in enumerate(everywhere) if other != everywhere[0])
    pairs = zip_longest(everywhere[0], everywhere[rank], fillvalue="none")
    first, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise RuntimeError(
        f"{expected} to be the same on all ranks, got {first} on rank 0 and {other} "
        f"on rank {rank}. {remedy}"
    )


@contextmanager
def _naming(who: str, what: str) -> Iterator[None]:
    """Adds the collective and the missing ranks to a backend's error, which only has addresses."""
    try:
        yield
    except RuntimeError as error:
        group = dist.group.WORLD
        assert group is not None
        missing = _C.describe_missing_ranks(group.group_name)
        raise type(error)(
            f"{who}: expected all {group.size()} ranks in {what} within the group's timeout, got "
            f"in rank {group.rank()}: {error}. {missing}"
        ) from error


def _device_of_group() -> torch.device:
    """Returns a device that the group's backends support on every rank; the CPU if possible.

    The choice must not depend on values that may differ between ranks, such as tensor devices.
    """
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
