# SPDX-License-Identifier: BSD-3-Clause
"""Collectives on many tensors at once, with one flat copy for each dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.parallel._ranks import check_gradients, check_parameters, require_group

__all__ = ["apply_flat_dist_call", "flat_dist_call", "flatten", "split_by_type", "unflatten"]

# Number of elements that are copied at once when a model is broadcast.
_BROADCAST_ELEMENTS = 1 << 26


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copies the elements of all tensors into one 1-dim tensor, in logical order.

    Args:
        tensors (Sequence[Tensor]): Tensors with the same dtype and device.

    Returns:
        A 1-dim copy. For an empty list, an empty fp32 tensor on the CPU.

    Raises:
        TypeError: If an entry is not a tensor. The message contains the entry's index.
        ValueError: If dtypes or devices differ. The message contains the entry's index.

    Example:
        >>> import torch
        >>> from torchfuse.parallel.flat import flatten
        >>> flatten([torch.ones(2), torch.zeros(1, 1)])
        tensor([1., 1., 0.])
    """
    _check_tensors("flatten", tensors)
    for index, tensor in enumerate(tensors):
        for what in ("dtype", "device"):
            expected, found = getattr(tensors[0], what), getattr(tensor, what)
            if found != expected:
                raise ValueError(
                    f"flatten: expected tensors[{index}] to have the {what} of tensors[0], "
                    f"{expected}, got {found}. Flatten the tensors of each {what} separately."
                )
    if not tensors:
        return torch.empty(0, device="cpu", dtype=torch.float32)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat_tensor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Splits a result of `flatten` into views with the shapes of `tensors`.

    Args:
        flat_tensor (Tensor): Contiguous 1-dim tensor with as many elements as all `tensors`
            together.
        tensors (Sequence[Tensor]): Tensors with the shapes of the views.

    Returns:
        A list with one view for each tensor.

    Raises:
        TypeError: If an entry is not a tensor. The message contains the entry's index.
        ValueError: If `flat_tensor` has a different size or is not contiguous.

    Example:
        >>> import torch
        >>> from torchfuse.parallel.flat import flatten, unflatten
        >>> tensors = [torch.ones(2), torch.zeros(1, 1)]
        >>> unflatten(flatten(tensors), tensors)
        [tensor([1., 1.]), tensor([[0.]])]
    """
    _check_tensors("unflatten", tensors)
    sizes = [tensor.numel() for tensor in tensors]
    if flat_tensor.shape != (sum(sizes),) or not flat_tensor.is_contiguous():
        raise ValueError(
            f"unflatten: expected flat_tensor to be contiguous and 1-dim with {sum(sizes)} "
            f"elements, as many as all tensors together, got shape {list(flat_tensor.shape)} and "
            f"strides {list(flat_tensor.stride())}."
        )
    parts = flat_tensor.split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _check_tensors(function: str, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{function}: expected tensors[{index}] to be a tensor, "
                f"got {type(tensor).__name__}."
            )


def split_by_type(
    tensors: Iterable[Tensor],
) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Groups tensors by dtype and device, in order.

    Args:
        tensors (Iterable[Tensor]): Tensors to group.

    Example:
        >>> import torch
        >>> from torchfuse.parallel.flat import split_by_type
        >>> buckets = split_by_type([torch.ones(1), torch.ones(1).double(), torch.ones(2)])
        >>> [len(bucket) for bucket in buckets.values()]
        [2, 1]
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return buckets


def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Calls a collective on a flat copy of tensors with one dtype and device.

    See `flat_dist_call` for the arguments.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torchfuse.parallel.flat import apply_flat_dist_call
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weights = [torch.ones(2), torch.ones(3)]
        >>> apply_flat_dist_call(weights, dist.broadcast, (0,))
        >>> dist.destroy_process_group()
    """
    require_group("flat_dist_call")
    arguments = tuple(extra_args or ())
    with torch.no_grad():
        coalesced = flatten(bucket)
        work = call(coalesced, *arguments)
        if isinstance(work, dist.Work):
            work.wait()
        if call is dist.all_reduce:
            operation = arguments[0] if arguments else dist.ReduceOp.SUM
            if operation == dist.ReduceOp.SUM:
                coalesced /= dist.get_world_size(arguments[1] if len(arguments) > 1 else None)
        for tensor, result in zip(bucket, unflatten(coalesced, bucket), strict=True):
            tensor.copy_(result)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Calls a torch.distributed collective once for each dtype and device, in place.

    Tensors with the same dtype and device are copied into a flat tensor, `call` is applied to the
    flat tensor, and the result is copied back. `torch.distributed.all_reduce` computes the average
    over the group's ranks, unless `extra_args` specifies an operation other than the sum.

    Args:
        tensors (Iterable[Tensor]): Dense tensors, with the same dtypes and numbers of elements on
            every rank.
        call (Callable): A function from torch.distributed that changes the first argument in place.
        extra_args (Sequence[Any] | None, default None): Further positional arguments for `call`,
            such as the source of a broadcast.

    Raises:
        RuntimeError: If there is no process group.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torchfuse.parallel.flat import flat_dist_call
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(3, 2)
        >>> flat_dist_call([param.data for param in model.parameters()], dist.broadcast, (0,))
        >>> dist.destroy_process_group()
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def broadcast_parameters(who: str, module: nn.Module) -> None:
    """Broadcasts parameters from rank 0 in chunks, without a copy of the complete model."""
    check_parameters(who, module)
    chunk: list[Tensor] = []
    elements = 0
    for parameter in module.parameters():
        chunk.append(parameter)
        elements += parameter.numel()
        if elements >= _BROADCAST_ELEMENTS:
            flat_dist_call(chunk, dist.broadcast, (0,))
            chunk, elements = [], 0
    flat_dist_call(chunk, dist.broadcast, (0,))


class Reducer:
    """Averages gradients over all processes when `reduce()` is called, not in the backward pass.

    Use this class if a program accumulates gradients over several backward passes, or if torch's
    DistributedDataParallel does not support part of the training step. There is one all-reduce for
    each dtype and device, over the default process group.

    Args:
        module_or_grads_list (torch.nn.Module | Iterable): A module, or tensors in lists or tuples
            with any nesting. The constructor broadcasts a module's parameters from rank 0, and
            `reduce()` averages the module's gradients. If tensors are passed, `reduce()` averages
            the tensors in place, and the caller must keep the parameters equal on all ranks.

    Raises:
        TypeError: If an item is not a tensor.
        ValueError: If a parameter is lazy or on a device that the group does not support.
        RuntimeError: If there is no process group, or parameters differ between ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torchfuse.parallel import Reducer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(3, 2)
        >>> reducer = Reducer(model)
        >>> for _ in range(4):
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> reducer.reduce()
        >>> dist.destroy_process_group()

    Notes:
        Parameters without a gradient are skipped, and must be the same on all ranks. `reduce()`
        gathers one number from each rank and raises before any gradient changes.

        Differences from apex.parallel.Reducer: bf16 and all other dtypes are supported. Items that
        are not tensors raise instead of being ignored. Ranks that disagree raise and do not hang.
    """

    module: nn.Module | None
    grads: list[Tensor]

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        require_group("Reducer")
        self.module = None
        self.grads = []
        if isinstance(module_or_grads_list, nn.Module):
            broadcast_parameters("Reducer", module_or_grads_list)
            self.module = module_or_grads_list
        else:
            _collect(module_or_grads_list, "module_or_grads_list", self.grads)

    def reduce(self) -> None:
        """Replaces each gradient in place with its average over all processes.

        Raises:
            ValueError: If a gradient is sparse.
            RuntimeError: If there is no process group; or if shapes, dtypes or the set of
                parameters with a gradient differ between ranks.
        """
        require_group("Reducer.reduce")
        named: dict[str, Tensor | None] = {
            f"grads[{index}]": grad for index, grad in enumerate(self.grads)
        }
        if self.module is not None:
            parameters = self.module.named_parameters()
            named = {f"the gradient of '{name}'": param.grad for name, param in parameters}
        check_gradients("Reducer.reduce", named)
        flat_dist_call((grad for grad in named.values() if grad is not None), dist.all_reduce)


def _collect(item: Any, name: str, tensors: list[Tensor]) -> None:
    """Appends the tensors of a nested iterable to `tensors`, in order."""
    if isinstance(item, Tensor):
        tensors.append(item)
    elif isinstance(item, Iterable) and not isinstance(item, (str, bytes, dict)):
        for index, child in enumerate(item):
            _collect(child, f"{name}[{index}]", tensors)
    else:
        raise TypeError(
            f"Reducer: expected {name} to be a tensor or a list of tensors, "
            f"got {type(item).__name__}. Pass only gradients."
        )
