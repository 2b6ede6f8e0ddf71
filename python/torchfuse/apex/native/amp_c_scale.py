# SPDX-License-Identifier: BSD-3-Clause
"""Products and sums of apex's amp_C, and the update of a loss scale."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from torchfuse._C import multi_tensor_l2_norm, multi_tensor_unscale_, scale_on_host
from torchfuse.apex.native._lists import TensorLists, check_dtype, checked_lists
from torchfuse.apex.native._scalars import Scalar, check_number, in_any_mode, on_device
from torchfuse.ops import amp_update_scale_


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: Scalar
) -> None:
    """Writes all tensors times `scale` to others.

    Products are computed in fp32 (fp64) and rounded once, to the output's dtype.

    Args:
        chunk_size: ignored.
        noop_flag: 1-element int32, not read; set to 1 if an input element is not finite.
        tensor_lists: inputs and outputs, each of fp32, fp16, bf16 or fp64; an output may be its
            input. Every output is written.
        scale: factor of every element, a number or a 1-element tensor.

    Raises:
        TypeError: for an entry that is not a tensor, or a flag that is not int32.
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
    """Writes a x + b y for all pairs of tensors to others.

    Sums are computed in fp32 (fp64) and rounded once, to the output's dtype.

    Args:
        chunk_size: ignored.
        noop_flag: 1-element int32, not read; set to 1 if a checked element is not finite.
        tensor_lists: x, y and outputs, each of fp32, fp16, bf16 or fp64; an output may be its x or
            y. Every output is written.
        a: factor of x, a number or a 1-element tensor.
        b: factor of y, a number or a 1-element tensor.
        arg_to_check: 0 to check x, 1 to check y, -1 to check both.

    Raises:
        TypeError: for an entry that is not a tensor, or a flag that is not int32.
        ValueError: for tensors that do not match, naming list and index, and for another
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
    # composed of torch's foreach ops: no kernel of its own yet
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
    """Updates a loss scale in place, which backs off only after several overflows in a row.

    An overflow uses up one unit of `hysteresis_tracker` and resets `growth_tracker`; the scale is
    multiplied by `backoff_factor` when no unit is left. A step without overflow refills the units;
    after `growth_interval` of them in a row the scale is multiplied by `growth_factor`, unless it
    would leave fp32. There is no lower bound.

    Args:
        current_scale: 1-element fp32.
        growth_tracker: 1-element int32: steps without overflow in a row.
        hysteresis_tracker: 1-element int32: units that are left.
        found_inf: 1-element fp32, not 0 if the step overflowed.
        growth_factor: factor of a growth.
        backoff_factor: factor of a backoff.
        growth_interval: number of steps without overflow before a growth.
        hysteresis: number of units, at least 1.

    Returns:
        `current_scale`.

    Raises:
        TypeError: for an argument that is not a tensor of the dtype above.
        ValueError: for one of another size or device, and for a `hysteresis` below 1.

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
        # The outputs can hold every input, so the only rounding is that of the product.
        torch._foreach_copy_(outputs, inputs)
        multi_tensor_unscale_(outputs, found, factor)
    else:
        # composed of torch's foreach ops: no kernel of its own yet
        common = torch.promote_types(torch.promote_types(wide, narrow), torch.float32)
        products = [tensor.to(common, copy=True) for tensor in inputs]
        multi_tensor_unscale_(products, found, factor)
        torch._foreach_copy_(outputs, products)
    set_flag(noop_flag, found)


def set_flag(noop_flag: Tensor, non_finite: Tensor, norm: Tensor | None = None) -> None:
    """Sets the flag to 1 if `non_finite` is not 0 or `norm` not finite; both are 0-dim.

    Otherwise the flag stays as it is.
    """
    # On the host, reading a number is cheaper than an operation on it.
    if non_finite.is_cpu and not in_any_mode():
        if non_finite.item() or not (norm is None or math.isfinite(norm.item())):
            noop_flag.fill_(1)
        return
    # A norm that is not finite is NaN here, and one that is, 0.
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
