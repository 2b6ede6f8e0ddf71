# SPDX-License-Identifier: BSD-3-Clause
"""Collectives on many tensors at once, through one flat copy for each dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfuse.parallel._ranks import check_gradients, check_parameters, require_group

__all__ = ["apply_flat_dist_call", "flat_dist_call", "flatten", "split_by_type", "unflatten"]

# Number of elements that are copied at once when a whole model is broadcast.
_BROADCAST_ELEMENTS = 1 << 26


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copies the elements of all tensors into one 1-dim tensor, in logical order.

    Args:
        tensors: tensors of one dtype and device; without any, the result is empty.

    Returns:
        The copy.

    Raises:
        TypeError: for an entry that is not a tensor, naming its index.
        ValueError: for an entry of another dtype or device than the first, naming its index.

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
        flat_tensor: contiguous 1-dim tensor with as many elements as `tensors` have together.
        tensors: tensors with the shapes of the views.

    Returns:
        One view for each tensor.

    Raises:
        TypeError: for an entry that is not a tensor, naming its index.
        ValueError: for a `flat_tensor` of another size.

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
            f"elements, those of all tensors, got shape {list(flat_tensor.shape)} and strides "
            f"{list(flat_tensor.stride())}."
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
    """Calls a collective on a flat copy of tensors of one dtype and device; see `flat_dist_call`.

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
    """Calls a collective of torch.distributed once for each dtype and device, in place.

    The tensors of one dtype and device are copied into a flat tensor, `call` is applied to it, and
    its result is copied back. `torch.distributed.all_reduce` computes the average over the ranks of
    the group, unless `extra_args` specifies an operation other than the sum.

    Args:
        tensors: dense tensors, with the same dtypes and numbers of elements in every process.
        call: a function of torch.distributed that changes its first argument in place.
        extra_args: additional positional arguments of `call`, such as the source of a broadcast.

    Raises:
        RuntimeError: without a process group.

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
    """Broadcasts the parameters of rank 0 to all processes, without a copy of the whole model."""
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

    It is for programs that accumulate gradients over several backward passes, or whose step has
    parts that torch's DistributedDataParallel does not support. There is one all-reduce for each
    dtype and device, over the default process group.

    Args:
        module_or_grads_list: a module, whose parameters are broadcast from rank 0 now and whose
            gradients `reduce()` averages; or tensors in lists or tuples of any depth, which
            `reduce()` averages in place. With tensors, the caller keeps the parameters equal.

    Raises:
        TypeError: for an item that is not a tensor.
        ValueError: for a lazy parameter, or one on a device that the group does not support.
        RuntimeError: without a process group, or for parameters that differ between processes.

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
        Parameters without a gradient are skipped. They must be the same in all processes:
        `reduce()` gathers one number from each process and raises before anything is written.

        Differences from apex.parallel.Reducer: bf16 and every other dtype work; items that are not
        tensors are rejected, not ignored; processes that disagree raise an error, and do not hang.
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
            ValueError: for a sparse gradient.
            RuntimeError: without a process group, or if the parameters with a gradient, or shapes
                or dtypes of gradients, differ between processes.
        """
        require_group("Reducer.reduce")
        named = self._named_grads()
        check_gradients("Reducer.reduce", named)
        flat_dist_call((grad for grad in named.values() if grad is not None), dist.all_reduce)

    def _named_grads(self) -> dict[str, Tensor | None]:
        if self.module is None:
            return {f"grads[{index}]": grad for index, grad in enumerate(self.grads)}
        return {
            f"the gradient of '{name}'": parameter.grad
            for name, parameter in self.module.named_parameters()
        }


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
            f"got {type(item).__name__}. Leave out what is no gradient."
        )
