# SPDX-License-Identifier: BSD-3-Clause
"""apex's native module apex_C: many tensors in one, as a copy and as views into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfuse.parallel import flat

__all__ = ["flatten", "unflatten"]


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
        >>> from torchfuse.apex.native.apex_c import flatten
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
    return flat.flatten(tensors) if tensors else torch.empty(0, device="cpu", dtype=torch.float32)


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
        >>> from torchfuse.apex.native.apex_c import flatten, unflatten
        >>> tensors = [torch.ones(2), torch.zeros(1, 1)]
        >>> unflatten(flatten(tensors), tensors)
        [tensor([1., 1.]), tensor([[0.]])]
    """
    _check_tensors("unflatten", tensors)
    size = sum(tensor.numel() for tensor in tensors)
    if flat_tensor.shape != (size,) or not flat_tensor.is_contiguous():
        raise ValueError(
            f"unflatten: expected flat_tensor to be contiguous and 1-dim with {size} elements, "
            f"those of all tensors, got shape {list(flat_tensor.shape)} and strides "
            f"{list(flat_tensor.stride())}."
        )
    return flat.unflatten(flat_tensor, tensors)


def _check_tensors(function: str, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{function}: expected tensors[{index}] to be a tensor, "
                f"got {type(tensor).__name__}."
            )
