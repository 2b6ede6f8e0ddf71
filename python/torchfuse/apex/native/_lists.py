# SPDX-License-Identifier: BSD-3-Clause
"""Checks flags and tensor lists; every message names the function, list and index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchfuse._C import lists_match

TensorLists = Sequence[Sequence[Tensor]]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def checked_lists(
    function: str,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    names: Sequence[str],
    *,
    optional: str | None = None,
) -> list[list[Tensor]]:
    """Checks the flag and lists for any amp_C function, before anything is written.

    A list named `optional` may follow the lists in `names`. Returns the lists. If entries at the
    same index differ in shape, all lists contain 1-dim views there.
    """
    if optional is not None and len(tensor_lists) == len(names) + 1:
        names = (*names, optional)
    if len(tensor_lists) != len(names):
        also = "" if optional is None else f", and optionally {optional}"
        raise ValueError(
            f"{function}: expected tensor_lists to have {len(names)} lists, {', '.join(names)}"
            f"{also}, got {len(tensor_lists)}."
        )
    for name, tensors in zip(names, tensor_lists, strict=True):
        if isinstance(tensors, Tensor):  # a Tensor would pass as a sequence of rows
            raise TypeError(
                f"{function}: expected {name} to be a list or tuple of tensors, got "
                f"{type(tensors).__name__}. Pass a list of lists as tensor_lists."
            )
    lists = [list(tensors) for tensors in tensor_lists]
    if not lists_match(lists):
        lists = _checked_one_by_one(function, lists, names)
    check_flag(function, noop_flag, lists[0][0].device if lists[0] else None)
    return lists


def _checked_one_by_one(
    function: str, lists: list[list[Tensor]], names: Sequence[str]
) -> list[list[Tensor]]:
    for name, tensors in zip(names, lists, strict=True):
        if len(tensors) != len(lists[0]):
            raise ValueError(
                f"{function}: expected {name} to have as many tensors as {names[0]}, "
                f"{len(lists[0])}, got {len(tensors)}."
            )
        for index, tensor in enumerate(tensors):
            _check_tensor(f"{function}: expected {name}[{index}] to be", tensor)
    for name, tensors in zip(names, lists, strict=True):
        for index, tensor in enumerate(tensors):
            where = f"{function}: expected {name}[{index}] to"
            _check_like(where, name, tensor, tensors[0])
            _check_beside(where, names[0], index, tensor, lists[0])
    return _with_equal_shapes(lists)


def check_dtype(where: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises unless `tensor` is a tensor of `dtype`; `where` begins the message."""
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{where} a tensor of {dtype}, got {got}.")


def check_flag(function: str, noop_flag: Tensor, device: torch.device | None) -> None:
    """Raises unless the flag is a 1-element int32 tensor, on `device` if not None."""
    where = f"{function}: expected noop_flag to be"
    check_dtype(where, noop_flag, torch.int32)
    if noop_flag.numel() != 1:
        raise ValueError(f"{where} of one element, got shape {list(noop_flag.shape)}.")
    if device is not None and noop_flag.device != device:
        raise ValueError(
            f"{where} on {device}, the device of the tensors, got {noop_flag.device}. "
            "Make one flag for each device."
        )


def check_vector(function: str, name: str, vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Raises unless `vector` is 1-dim fp32 on the tensors' device, with an element per tensor."""
    where = f"{function}: expected {name} to be"
    check_dtype(where, vector, torch.float32)
    if vector.shape != (len(tensors),):
        raise ValueError(f"{where} of shape [{len(tensors)}], got {list(vector.shape)}.")
    if tensors and vector.device != tensors[0].device:
        raise ValueError(f"{where} on {tensors[0].device}, got {vector.device}.")


def check_wide_states(function: str, params: Sequence[Tensor], **states: Sequence[Tensor]) -> None:
    """Raises unless states are fp64 exactly if `params` are; each list has a single dtype."""
    if not params:
        return
    dtype = params[0].dtype
    for name, tensors in states.items():
        if (tensors[0].dtype == torch.float64) != (dtype == torch.float64):
            raise ValueError(
                f"{function}: expected {name}[0] to be torch.float64 exactly if params[0] is, got "
                f"{tensors[0].dtype} beside {dtype}."
            )


def check_masters(function: str, name: str, masters: list[Tensor]) -> None:
    """Raises unless all masters are fp32; `name` is the list's name."""
    for index, master in enumerate(masters):
        if master.dtype != torch.float32:
            raise ValueError(
                f"{function}: expected {name}[{index}] to be torch.float32, got {master.dtype}."
            )


def _check_tensor(where: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} a tensor, got {type(tensor).__name__}.")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{where} fp32, fp16, bf16 or fp64, got {tensor.dtype}.")
    if not _is_dense(tensor):
        got = f"strides {tensor.stride()}" if tensor.layout == torch.strided else tensor.layout
        raise ValueError(
            f"{where} contiguous, or in torch.channels_last, got sizes {tuple(tensor.shape)} and "
            f"{got}. Pass tensor.contiguous()."
        )


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


def _check_like(where: str, name: str, tensor: Tensor, first: Tensor) -> None:
    for what in ("dtype", "device"):
        expected, found = getattr(first, what), getattr(tensor, what)
        if found != expected:
            raise ValueError(
                f"{where} have the {what} of {name}[0], {expected}, got {found}. "
                f"Make one call for each {what}."
            )


def _check_beside(
    where: str, name: str, index: int, tensor: Tensor, others: Sequence[Tensor]
) -> None:
    """Raises unless `tensor` matches the tensor at the same index in the first list."""
    other = others[index]
    if tensor.device != other.device:
        raise ValueError(
            f"{where} be on {other.device}, the device of {name}[{index}], got {tensor.device}."
        )
    if tensor.numel() != other.numel():
        raise ValueError(
            f"{where} have {other.numel()} elements like {name}[{index}], got {tensor.numel()}."
        )
    if not (tensor.is_contiguous() and other.is_contiguous()) and (
        tensor.shape != other.shape or tensor.stride() != other.stride()
    ):
        raise ValueError(
            f"{where} have the strides of {name}[{index}], {other.stride()}, got "
            f"{tensor.stride()}. Call .contiguous() on both."
        )


def _with_equal_shapes(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    for index in range(len(lists[0])):
        if len({tensors[index].shape for tensors in lists}) > 1:
            for tensors in lists:
                tensors[index] = tensors[index].view(-1)
    return lists
