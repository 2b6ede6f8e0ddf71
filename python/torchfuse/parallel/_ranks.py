# SPDX-License-Identifier: BSD-3-Clause
"""Checks that the processes of the default group agree before they communicate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse import _C


def require_group(who: str) -> None:
    """Raises RuntimeError without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who}: expected torch.distributed to have a process group, got none. "
            "Call torch.distributed.init_process_group first."
        )


def require_name(who: str, group: dist.ProcessGroup) -> str:
    """Returns the name by which native code finds a group; RuntimeError if it has none."""
    try:
        return str(group.group_name)
    except RuntimeError as error:
        raise RuntimeError(
            f"{who}: expected process_group to have a name, by which native code finds it, got a "
            f"{type(group).__name__} without. Use a group of torch.distributed.new_group()."
        ) from error


def check_parameters(who: str, module: nn.Module) -> None:
    """Rejects parameters that the group cannot reduce, or that differ between its processes."""
    backends = dist.get_backend_config()
    descriptions = []
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{who}: expected parameter '{name}' of module to have a shape, got a lazy one. "
                "Call the module once before."
            )
        if f"{parameter.device.type}:" not in backends:
            raise ValueError(
                f"{who}: expected parameter '{name}' of module to be on a device of the process "
                f"group's backends ({backends}), got {parameter.device}. Move the module there."
            )
        descriptions.append(
            f"'{name}' of shape {tuple(parameter.shape)}, dtype {parameter.dtype}, "
            f"requires_grad={parameter.requires_grad}"
        )
    remedy = "Build the same module everywhere."
    check_same(f"{who}: expected the parameters of module", descriptions, remedy)


def check_gradients(who: str, named: Mapping[str, Tensor | None]) -> None:
    """Rejects sparse gradients, and those whose shape, dtype or layout differs between ranks."""
    descriptions = [f"{name}: {_describe(grad)}" for name, grad in named.items()]
    remedy = "Let every process compute the gradients of the same parameters."
    check_same(f"{who}: expected the gradients", descriptions, remedy)
    for name, grad in named.items():
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"{who}: expected {name} to be dense, got layout {grad.layout}. "
                "Reduce it separately with torch.distributed.all_reduce."
            )


def _describe(grad: Tensor | None) -> str:
    if grad is None:
        return "none"
    return f"shape {tuple(grad.shape)}, dtype {grad.dtype}, layout {grad.layout}"


def check_same(
    expected: str,
    descriptions: Sequence[str] | Callable[[], Sequence[str]],
    remedy: str,
    group: dist.ProcessGroup | None = None,
    summary: bytes | None = None,
) -> None:
    """Raises in all processes of a group if the descriptions of one differ from those of rank 0.

    The checksums of the processes are compared on the host. The descriptions are gathered only
    if the checksums differ. With a `summary`, which must differ wherever the descriptions do, they
    are not even made before. A process that is alone agrees with itself.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    if summary is None:
        summary = "\n".join(_made(descriptions)).encode()
    digest = hashlib.sha256(summary).digest()
    checksum = int.from_bytes(digest[:8], "big", signed=True)
    who, _, compared = expected.partition(": expected ")
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    device = device_of_group(chosen)
    with naming(who, f"the comparison of {compared}", chosen):
        if _is_same(checksum, chosen, device):
            return
        everywhere: list[Sequence[str]] = [[] for _ in range(size)]
        dist.all_gather_object(everywhere, list(_made(descriptions)), group=group)
    rank = next(rank for rank, other in enumerate(everywhere) if other != everywhere[0])
    first, other = _first_difference(everywhere[0], everywhere[rank])
    raise RuntimeError(
        f"{expected} to be the same on all ranks, got {first} on rank 0 and {other} "
        f"on rank {rank}. {remedy}"
    )


def _is_same(number: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same number; the group sends from the device."""
    if type(group) is dist.ProcessGroup:
        return _C.same_on_all_ranks(group.group_name, device, number)
    # A class of a program, which may have no name and no backends.
    ends = torch.tensor([number, ~number], dtype=torch.int64, device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    largest, of_smallest = ends.tolist()
    return bool(largest == ~of_smallest)


def _made(descriptions: Sequence[str] | Callable[[], Sequence[str]]) -> Sequence[str]:
    return descriptions() if callable(descriptions) else descriptions


@contextmanager
def naming(who: str, what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Says in a backend's errors, which have addresses only, what has failed and who is missing.

    Args:
        who: begins the message.
        what: the collective, as "the gather of states".
        group: where it is. None: the default group.
    """
    try:
        yield
    except RuntimeError as error:
        group = dist.group.WORLD if group is None else group
        assert group is not None
        text = (
            f"{who}: expected all {group.size()} ranks in {what} within the group's timeout, got "
            f"in rank {group.rank()}: {error}.{_missing_ranks(group)}"
        )
        try:
            named = type(error)(text)
        except TypeError:  # a class of a program, which takes more
            named = RuntimeError(text)
        raise named from error


def _missing_ranks(group: dist.ProcessGroup) -> str:
    """A sentence on those that do not answer; none of a program's own group, or one destroyed."""
    if type(group) is not dist.ProcessGroup:
        return ""
    try:
        dist.get_backend_config(group)
    except (KeyError, TypeError, ValueError):
        return ""
    return f" {_C.describe_missing_ranks(group.group_name)}"


def device_of_group(group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns a device that every process of the group can send from; the CPU if possible.

    It must not depend on anything that may differ between processes, such as devices of tensors.
    """
    try:
        backends = dist.get_backend_config(group)
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            "torchfuse.parallel: expected the process group to exist, got one that "
            "destroy_process_group() has ended. Destroy it after the last step."
        ) from error
    if "cpu:" in backends:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _first_difference(left: Iterable[str], right: Iterable[str]) -> tuple[str, str]:
    padded_left, padded_right = list(left), list(right)
    length = max(len(padded_left), len(padded_right))
    for side in (padded_left, padded_right):
        side.extend(["none"] * (length - len(side)))
    return next(pair for pair in zip(padded_left, padded_right, strict=True) if len({*pair}) == 2)
