# SPDX-License-Identifier: BSD-3-Clause
"""Norms, scaling, axpby and the loss-scale update of apex's amp_C.

Differences from apex's norms: the norm over all tensors cannot overflow in an intermediate sum,
norms are computed even if the flag is already set, and the flag is set if an element or the norm is
not finite.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from torchfuse._C import l2norm_on_host, multi_tensor_l2_norm, multi_tensor_unscale_, scale_on_host
from torchfuse.apex.native._arguments import (
    Scalar,
    TensorLists,
    check_dtype,
    check_number,
    checked_lists,
    in_any_mode,
    on_device,
)
from torchfuse.ops import amp_update_scale_

#: For larger norms, squares that underflow in fp32 are negligible.
_SMALLEST_SAFE_NORM = 1e-15


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the L2 norm over all tensors and, with `per_tensor`, each tensor's norm.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Not read; set to 1 if an element or the norm is not
            finite.
        tensor_lists (Sequence): One list of fp32, fp16, bf16 or fp64 tensors.
        per_tensor (bool | None, default None): Also compute each tensor's norm. None: False.

    Returns:
        The norm over all tensors, fp32 of shape ``[1]``; 0 for an empty list. Then the tensors'
        norms, fp32 of shape ``[T]``, or ``[0]`` without `per_tensor`.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming the index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_l2norm
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> multi_tensor_l2norm(65536, flag, [[torch.tensor([3.0]), torch.tensor([4.0])]], True)
        (tensor([5.]), tensor([3., 4.]))
    """
    norms = None if per_tensor else l2norm_on_host(noop_flag, tensor_lists)
    if norms is not None:
        return norms
    with torch.no_grad():
        (tensors,) = checked_lists("multi_tensor_l2norm", noop_flag, tensor_lists, ["tensors"])
        return _norms(noop_flag, tensors, per_tensor)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the tensors' norms times `inv_scale`, without modifying the tensors.

    `inv_scale` is a 1-element tensor. Other arguments, results and errors are as for
    `multi_tensor_l2norm`.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_unscale_l2norm
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grads = [torch.tensor([6.0, 8.0])]
        >>> multi_tensor_unscale_l2norm(65536, flag, [grads], torch.tensor([0.5]))
        (tensor([5.]), tensor([]))
    """
    function = "multi_tensor_unscale_l2norm"
    (tensors,) = checked_lists(function, noop_flag, tensor_lists, ["tensors"])
    factor = on_device(function, "inv_scale", inv_scale, noop_flag.device).abs()
    return _norms(noop_flag, tensors, per_tensor, factor)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: Scalar
) -> None:
    """Writes inputs times `scale` to outputs.

    Products are computed in fp32 (fp64) and rounded once, to the output's dtype.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Not read; set to 1 if an input element is not finite.
        tensor_lists (Sequence): Inputs and outputs. Each list is fp32, fp16, bf16 or fp64. Every
            output is written. An output may be the input at the same index.
        scale (float | Tensor): Factor, a number or a 1-element tensor.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_scale
        >>> flag, out = torch.zeros(1, dtype=torch.int32), torch.empty(2, dtype=torch.float16)
        >>> multi_tensor_scale(65536, flag, [[torch.tensor([3.0, 4.0])], [out]], 0.5)
        >>> out
        tensor([1.5000, 2.0000], dtype=torch.float16)
    """
    if isinstance(scale, float) and scale_on_host(noop_flag, tensor_lists, scale):
        return
    with torch.no_grad():
        _scale(noop_flag, tensor_lists, scale)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: Scalar,
    b: Scalar,
    arg_to_check: int,
) -> None:
    """Writes a x + b y to outputs, for each pair of tensors x and y.

    Sums are computed in fp32 (fp64) and rounded once, to the output's dtype.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Not read; set to 1 if a checked element is not finite.
        tensor_lists (Sequence): x, y and outputs. Each list is fp32, fp16, bf16 or fp64. Every
            output is written. An output may be the x or y at the same index.
        a (float | Tensor): Factor of x, a number or a 1-element tensor.
        b (float | Tensor): Factor of y, a number or a 1-element tensor.
        arg_to_check (int): 0 checks x, 1 checks y, -1 checks both.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index, and for an unknown
            `arg_to_check`.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_axpby
        >>> flag, out = torch.zeros(1, dtype=torch.int32), torch.empty(2)
        >>> lists = [[torch.ones(2)], [torch.tensor([3.0, 4.0])], [out]]
        >>> multi_tensor_axpby(65536, flag, lists, 2.0, 10.0, -1)
        >>> out
        tensor([32., 42.])
    """
    function = "multi_tensor_axpby"
    x, y, outputs = checked_lists(function, noop_flag, tensor_lists, ["x", "y", "outputs"])
    checked = {0: [x], 1: [y], -1: [x, y]}.get(arg_to_check)
    if checked is None:
        raise ValueError(
            f"{function}: expected arg_to_check to be 0 for x, 1 for y or -1 for both, "
            f"got {arg_to_check}."
        )
    if not x:
        return
    check_number(function, "a", a)
    check_number(function, "b", b)
    for tensors in checked:
        set_flag(noop_flag, multi_tensor_l2_norm(tensors)[1])
    # Uses torch's foreach ops; there is no fused kernel yet.
    wide = torch.float64 if torch.float64 in (x[0].dtype, y[0].dtype) else torch.float32
    device = x[0].device
    sums = torch._foreach_mul(
        [tensor.to(wide) for tensor in x], on_device(function, "a", a, device).to(wide)
    )
    others = torch._foreach_mul(
        [tensor.to(wide) for tensor in y], on_device(function, "b", b, device).to(wide)
    )
    torch._foreach_add_(sums, others)
    torch._foreach_copy_(outputs, sums)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Updates a loss scale in place; the scale shrinks only after repeated overflows.

    An overflow decrements `hysteresis_tracker` and resets `growth_tracker`. If `hysteresis_tracker`
    reaches 0, the scale is multiplied by `backoff_factor`. A step without overflow resets
    `hysteresis_tracker` to `hysteresis`. After `growth_interval` consecutive steps without
    overflow, the scale is multiplied by `growth_factor`, unless the product overflows fp32. The
    scale has no minimum.

    Args:
        current_scale (Tensor): 1-element fp32.
        growth_tracker (Tensor): 1-element int32, consecutive steps without overflow.
        hysteresis_tracker (Tensor): 1-element int32, overflows left before the scale shrinks.
        found_inf (Tensor): 1-element fp32, not 0 if the step overflowed.
        growth_factor (float): Factor when the scale grows.
        backoff_factor (float): Factor when the scale shrinks.
        growth_interval (int): Consecutive steps without overflow before the scale grows.
        hysteresis (int): Overflows before the scale shrinks, at least 1.

    Returns:
        `current_scale`.

    Raises:
        TypeError: if a tensor argument is not a tensor or has another dtype.
        ValueError: for tensors with another size or device, and for `hysteresis` below 1.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import update_scale_hysteresis
        >>> scale, found_inf = torch.tensor([8.0]), torch.tensor([1.0])
        >>> growth, units = torch.zeros(2, 1, dtype=torch.int32).unbind()
        >>> _ = units.fill_(2)
        >>> for _ in range(2):
        ...     update_scale_hysteresis(scale, growth, units, found_inf, 2.0, 0.5, 2000, 2)
        tensor([8.])
        tensor([4.])
    """
    _check_one_element("current_scale", current_scale, torch.float32, current_scale)
    _check_one_element("growth_tracker", growth_tracker, torch.int32, current_scale)
    _check_one_element("hysteresis_tracker", hysteresis_tracker, torch.int32, current_scale)
    _check_one_element("found_inf", found_inf, torch.float32, current_scale)
    if hysteresis < 1:
        raise ValueError(
            f"update_scale_hysteresis: expected hysteresis to be at least 1, got {hysteresis}."
        )
    amp_update_scale_(
        current_scale,
        growth_tracker,
        found_inf,
        growth_factor=float(growth_factor),
        backoff_factor=float(backoff_factor),
        growth_interval=int(growth_interval),
        hysteresis_tracker=hysteresis_tracker,
        hysteresis=int(hysteresis),
    )
    return current_scale


def _norms(
    noop_flag: Tensor,
    tensors: list[Tensor],
    per_tensor: bool | None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the norms, times `factor`, and sets the flag."""
    if not tensors:
        total = torch.zeros(1, device=noop_flag.device, dtype=torch.float32)
        return total, total.new_empty(0)
    total, non_finite = multi_tensor_l2_norm(tensors)
    each = _norm_of_each(tensors) if per_tensor else total.new_empty(0)
    if factor is not None:
        total, each = total * factor, each * factor
    set_flag(noop_flag, non_finite, total)  # the norm may overflow even if all elements are finite
    return total.reshape(1), each


def _norm_of_each(tensors: list[Tensor]) -> Tensor:
    # Uses torch's foreach ops; there is no fused kernel yet.
    if not tensors[0].is_cpu or in_any_mode():
        return torch.stack(torch._foreach_norm(tensors, 2.0, torch.float64)).to(torch.float32)
    # On the CPU, an fp32 call per tensor is faster than fp64, which only tiny or huge norms need.
    norms = torch.stack([multi_tensor_l2_norm([tensor])[0] for tensor in tensors])
    norms = norms.to(torch.float32)
    doubtful = norms.isfinite().logical_and(norms > _SMALLEST_SAFE_NORM).logical_not().nonzero()
    if doubtful.numel():
        again = [tensors[index] for index in doubtful.flatten().tolist()]
        wide = torch.stack(torch._foreach_norm(again, 2.0, torch.float64))
        norms[doubtful.flatten()] = wide.to(torch.float32)
    return norms


def _scale(noop_flag: Tensor, tensor_lists: TensorLists, scale: Scalar) -> None:
    function = "multi_tensor_scale"
    inputs, outputs = checked_lists(function, noop_flag, tensor_lists, ["inputs", "outputs"])
    if not inputs:
        return
    device = inputs[0].device
    found = torch.zeros((), device=device, dtype=torch.float32)
    factor = on_device(function, "scale", scale, device)
    same = all(map(operator.is_, outputs, inputs))
    wide, narrow = outputs[0].dtype, inputs[0].dtype
    if same:
        multi_tensor_unscale_(outputs, found, factor)
    elif torch.promote_types(wide, narrow) == wide:
        # Outputs represent every input exactly, so only the product is rounded.
        torch._foreach_copy_(outputs, inputs)
        multi_tensor_unscale_(outputs, found, factor)
    else:
        # Uses torch's foreach ops; there is no fused kernel yet.
        common = torch.promote_types(torch.promote_types(wide, narrow), torch.float32)
        products = [tensor.to(common, copy=True) for tensor in inputs]
        multi_tensor_unscale_(products, found, factor)
        torch._foreach_copy_(outputs, products)
    set_flag(noop_flag, found)


def set_flag(noop_flag: Tensor, non_finite: Tensor, norm: Tensor | None = None) -> None:
    """Sets the flag to 1 if `non_finite` is not 0 or `norm` is not finite; both are 0-dim."""
    # On the CPU, reading a number is cheaper than running a tensor operation.
    if non_finite.is_cpu and not in_any_mode():
        if non_finite.item() or not (norm is None or math.isfinite(norm.item())):
            noop_flag.fill_(1)
        return
    # norm - norm is 0 for a finite norm, otherwise NaN.
    condition = non_finite if norm is None else non_finite + (norm - norm)
    noop_flag.masked_fill_(condition.ne(0), 1)


def _check_one_element(name: str, tensor: Tensor, dtype: torch.dtype, first: Tensor) -> None:
    where = f"update_scale_hysteresis: expected {name} to be"
    check_dtype(where, tensor, dtype)
    if tensor.numel() != 1 or tensor.device != first.device:
        raise ValueError(
            f"{where} of one element and on {first.device}, the device of current_scale, got shape "
            f"{list(tensor.shape)} on {tensor.device}."
        )
