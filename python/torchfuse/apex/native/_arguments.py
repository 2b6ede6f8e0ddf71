# SPDX-License-Identifier: BSD-3-Clause
"""Checks amp_C's arguments and converts them for torchfuse's ops.

Every message about a list names the function, list and index. Scalar arguments are a number or a
1-element tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchfuse._C import lists_match

Scalar = float | Tensor
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
    where = f"{function}: expected noop_flag to be"
    check_dtype(where, noop_flag, torch.int32)
    if noop_flag.numel() != 1:
        raise ValueError(f"{where} of one element, got shape {list(noop_flag.shape)}.")
    if lists[0] and noop_flag.device != lists[0][0].device:
        raise ValueError(
            f"{where} on {lists[0][0].device}, the device of the tensors, got {noop_flag.device}. "
            "Make one flag for each device."
        )
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
            for what in ("dtype", "device"):
                expected, found = getattr(tensors[0], what), getattr(tensor, what)
                if found != expected:
                    raise ValueError(
                        f"{where} have the {what} of {name}[0], {expected}, got {found}. "
                        f"Make one call for each {what}."
                    )
            _check_beside(where, f"{names[0]}[{index}]", tensor, lists[0][index])
    for index in range(len(lists[0])):
        if len({own[index].shape for own in lists}) > 1:
            for own in lists:
                own[index] = own[index].view(-1)
    return lists


def check_dtype(where: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises unless `tensor` is a tensor of `dtype`; `where` begins the message."""
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{where} a tensor of {dtype}, got {got}.")


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


def _check_beside(where: str, name: str, tensor: Tensor, other: Tensor) -> None:
    """Raises unless `tensor` matches `other`, the tensor `name` in the first list."""
    if tensor.device != other.device:
        raise ValueError(
            f"{where} be on {other.device}, the device of {name}, got {tensor.device}."
        )
    if tensor.numel() != other.numel():
        raise ValueError(
            f"{where} have {other.numel()} elements like {name}, got {tensor.numel()}."
        )
    if not (tensor.is_contiguous() and other.is_contiguous()) and (
        tensor.shape != other.shape or tensor.stride() != other.stride()
    ):
        raise ValueError(
            f"{where} have the strides of {name}, {other.stride()}, got "
            f"{tensor.stride()}. Call .contiguous() on both."
        )


def on_device(function: str, name: str, value: Scalar, device: torch.device) -> Tensor:
    """Returns a 0-dim fp32 tensor on `device`; reads a value to the host only across devices."""
    check_number(function, name, value)
    if isinstance(value, Tensor) and value.device == device:
        return value.detach().reshape(()).to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=device)


def check_number(function: str, name: str, value: object) -> None:
    """Raises unless `value` is a number or a 1-element tensor."""
    where = f"{function}: expected {name} to be a number or a tensor of one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{where}, got shape {list(value.shape)}.")
    elif isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{where}, got {type(value).__name__}.")


def learning_rate(function: str, lr: Scalar, device: torch.device) -> dict[str, Any]:
    """Returns an optimizer op's arguments for `lr`, without reading a tensor on `device`."""
    check_number(function, "lr", lr)
    if isinstance(lr, Tensor) and lr.device == device and device.type != "cpu":
        wide = lr.dtype == torch.float64
        return {
            "lr": 0.0,
            "lr_tensor": lr.reshape(()) if wide else on_device(function, "lr", lr, device),
        }
    return {"lr": float(lr)}


class _HostCounts(threading.local):
    """Host tensors for step counts that calls on the same thread reuse."""

    base: Tensor | None = None
    views: Sequence[Tensor] = ()

    def filled(self, count: int, value: float) -> Sequence[Tensor]:
        if len(self.views) != count:
            self.base = torch.empty(count, dtype=torch.float32, device="cpu")
            self.views = self.base.unbind()
        assert self.base is not None
        self.base.fill_(value)
        return self.views


_host_counts = _HostCounts()


def counts_before(function: str, step: Scalar, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the step count before `step` for each parameter; the ops add 1."""
    check_number(function, "step", step)
    first = params[0]
    # A CPU step has finished when the call returns, so tensors can be reused. Creating a tensor per
    # parameter would take longer than a step of small parameters.
    if first.is_cpu and type(first) in (Tensor, Parameter) and not in_any_mode():
        return _host_counts.filled(len(params), float(step) - 1.0)
    before = on_device(function, "step", step, first.device) - 1.0
    return before.repeat(len(params)).unbind()


def in_any_mode() -> bool:
    """Returns whether new tensors may lack values or be unusable outside the current mode.

    True in inference mode, under a dispatch mode such as FakeTensorMode, and in torch.func.
    """
    return (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def as_flag(noop_flag: Tensor) -> Tensor | None:
    """Returns the flag as a 0-dim fp32 tensor for the ops, or None if a CPU flag is 0."""
    if noop_flag.is_cpu and not in_any_mode() and not noop_flag.item():
        return None
    return noop_flag.reshape(()).to(torch.float32)


def copy_unless(noop_flag: Tensor, params: list[Tensor], masters: list[Tensor]) -> None:
    """Copies masters, rounded, to the parameters unless the flag is set.

    The ops' built-in masters would not do: they follow modified parameters, but apex's functions
    never read the parameters.
    """
    # Uses torch's ops; there is no fused kernel yet.
    skip = noop_flag.reshape(()).ne(0)
    for param, master in zip(params, masters, strict=True):
        param.copy_(torch.where(skip, param, master.to(param.dtype)))


def clip_divisor(function: str, norms: Mapping[str, Scalar], device: torch.device) -> Tensor:
    """Returns max(1, norm / limit); `norms` maps the two argument names to norm and limit."""
    norm, limit = (on_device(function, name, value, device) for name, value in norms.items())
    return torch.where(norm > limit, norm / limit, 1.0)
