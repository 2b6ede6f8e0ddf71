# SPDX-License-Identifier: BSD-3-Clause
"""Checks of an optimizer's arguments; every message names the parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchfuse._shown import shown
from torchfuse.optimizers._hyper_params import as_float
from torchfuse.optimizers._options import TORCH_ONLY
from torchfuse.optimizers._shards import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
PARAM_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def has_value(tensor: Tensor) -> bool:
    """Whether the tensor has values: it is neither a fake tensor nor on the meta device."""
    return not (tensor.is_meta or is_fake(tensor))


def check_params(owner: str, group: int, params: Sequence[Tensor]) -> None:
    """Rejects parameters that no kernel can update, unless they may never get a gradient.

    Frozen weights of quantized models have other dtypes, and lazy ones get theirs and a shape in
    the first forward pass. A plan checks what has a gradient.
    """
    for index, param in enumerate(params):
        if param.requires_grad and not is_lazy(param):
            check_param(owner, group, index, param)
    if len({id(param) for param in params}) != len(params):
        raise ValueError(
            f"{owner}: expected each parameter of group {group} to be listed once, "
            "got a parameter twice. Remove the duplicate."
        )


def check_param(owner: str, group: int, index: int, param: Tensor) -> None:
    """Rejects a parameter that no kernel can update."""
    where = f"{owner}: expected params[{index}] of group {group} to be"
    if is_dtensor(param):
        check_placements(where, param)
    elif is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"{where} a plain tensor or a DTensor, got {type(param).__name__}. "
            "Give the optimizer the tensors that it is made of."
        )
    if param.layout != torch.strided:
        raise ValueError(f"{where} dense, got layout {param.layout}.")
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(f"{where} fp32, fp16, bf16 or fp64, got {param.dtype}.")
    local = local_part(param)
    if local.is_neg() or local._is_zerotensor():
        raise ValueError(
            f"{owner}: expected params[{index}] of group {group} to hold its own values, got "
            + (
                "a view with the negative bit. Pass tensor.resolve_neg()."
                if local.is_neg()
                else "zeros without memory. Pass tensor.clone()."
            )
        )
    if not _fills_its_memory(local):
        raise ValueError(
            f"{where} without gaps or overlap in memory, got sizes {tuple(param.shape)} with "
            f"strides {param.stride()}. Make it of a copy, such as tensor.contiguous()."
        )


def check_listed_once(owner: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the groups list tensors, and each of them once.

    torch checks this only for groups that are added, not for lists that a program edits.
    """
    places: dict[int, str] = {}
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            place = f"params[{position}] of group {index}"
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"{owner}: expected {place} to be a tensor, got {type(param).__name__}."
                )
            first = places.setdefault(id(param), place)
            if first != place:
                raise ValueError(
                    f"{owner}: expected each parameter to be listed once, got {place}, which is "
                    f"{first} too. Remove the duplicate."
                )


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    if tensor.numel() == 0:
        return True
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != extent:
                return False
            extent *= size
    return True


def check_count(owner: str, group: int, place: int, step: Any) -> None:
    """Checks that the step count in a parameter's state is a 1-element tensor or None."""
    if step is None:
        return
    where = f"{owner}.step: expected step of params[{place}] of group {group} to"
    if not isinstance(step, Tensor):
        raise TypeError(f"{where} be a tensor, got {type(step).__name__}.")
    if is_traceable_wrapper_subclass(step):
        kind = type(step).__name__
        raise TypeError(f"{where} be a plain tensor, got a {kind}. Store what it wraps.")
    if step.layout != torch.strided or step.numel() != 1 or step.is_meta:
        raise ValueError(
            f"{where} hold one element, got a {step.dtype} tensor of shape {list(step.shape)}, "
            f"layout {step.layout} and device {step.device}."
        )


def check_memory(where: str, tensor: Tensor) -> None:
    """Rejects a tensor whose storage was freed; torch's operations would end the process.

    The native step checks all that a kernel reads. This is for what is read before, to create and
    convert states.
    """
    local = local_part(tensor)
    if is_traceable_wrapper_subclass(local) or local.layout != torch.strided:
        return  # refused elsewhere
    size, offset, there = local.element_size(), local.storage_offset(), local.untyped_storage()
    last = offset + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
    if local.numel() != 0 and (last + 1) * size > there.nbytes():
        raise RuntimeError(
            f"{where} to lie within its storage, got {local.numel()} elements of {size} bytes "
            f"from element {offset} on in a storage of {there.nbytes()} bytes. The storage was "
            "resized: resize it back before the step."
        )


def check_placements(where: str, param: DTensor) -> None:
    """Rejects a DTensor with partial sums, whose elements are sums over processes."""
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"{where} sharded or replicated, got the placements {param.placements}. "
            "Redistribute it before it becomes a parameter."
        )


def check_no_amsgrad(owner: str, amsgrad: bool) -> None:
    """Rejects True for amsgrad, which is accepted only for apex's positional order."""
    if amsgrad:
        raise RuntimeError(f"{owner}: expected amsgrad to be False, got {shown(amsgrad)}.")


def check_step(expected: str, step: Any) -> None:
    """Checks a step count, a number or a tensor; the message begins with `expected`."""
    is_number = isinstance(step, Real) or (
        isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex()
    )
    if not is_number:
        raise ValueError(f"{expected} a number or a 1-element tensor, got {shown(step)}.")
    if isinstance(step, Tensor):
        if not has_value(step):
            return
        step = step.item()
    # Counts are stored in fp32. The comparisons come first, because int() raises for a NaN.
    if not (0 <= step <= torch.finfo(torch.float32).max and step == int(step)):
        raise ValueError(f"{expected} a whole number of at least 0, and finite, got {step}.")


def check_max_grad_norm(owner: str, group: int, value: Any) -> None:
    """Checks for None or a number >= 0; infinity measures the norm without clipping."""
    if value is None:
        return
    where = f"{owner}: expected max_grad_norm of group {group} to be"
    if not isinstance(value, Real):
        raise TypeError(f"{where} None or a number, got {type(value).__name__}.")
    number = as_float(where, value)
    if not number >= 0.0:
        raise ValueError(f"{where} None or at least 0, got {number}.")


def check_param_remainders(owner: str, index: int, group: Mapping[str, Any]) -> None:
    """Checks that a group with remainders has masters, bf16 parameters and none of fp16."""
    if not group["master_weights"]:
        raise ValueError(
            f"{owner}: expected master_weights of group {index} to be True with "
            "store_param_remainders, got False. A remainder is what a bf16 parameter lacks of its "
            "fp32 master."
        )
    params: Sequence[Tensor] = [param for param in group["params"] if param.requires_grad]
    remedy = "Set store_param_remainders=False in this group, or have a group for each of both."
    for position, param in enumerate(params):
        if param.dtype == torch.float16:
            raise ValueError(
                f"{owner}: expected params[{position}] of group {index} to be bf16 with "
                f"store_param_remainders, got {param.dtype}. {remedy}"
            )
    if params and all(param.dtype != torch.bfloat16 for param in params):
        raise ValueError(
            f"{owner}: expected group {index} to hold a bf16 parameter with "
            f"store_param_remainders, got {params[0].dtype}. {remedy}"
        )


def check_stochastic_rounding(owner: str, index: int, group: Mapping[str, Any]) -> None:
    """Checks that a group with stochastic rounding has bf16 parameters without masters."""
    if group["master_weights"]:
        raise ValueError(
            f"{owner}: expected master_weights of group {index} to be False with "
            "stochastic_rounding, got True. A parameter with a master loses nothing by rounding: "
            "choose one of the two."
        )
    for position, param in enumerate(group["params"]):
        if param.requires_grad and param.dtype != torch.bfloat16:
            raise ValueError(
                f"{owner}: expected params[{position}] of group {index} to be bf16 with "
                f"stochastic_rounding, got {param.dtype}. Set stochastic_rounding=False in a group "
                "of its own for other parameters."
            )


def check_master_dtype(owner: str, index: int, dtype: Any) -> None:
    """Rejects dtypes of masters other than fp32, which TransformerEngine supports."""
    if dtype is not torch.float32:
        raise ValueError(
            f"{owner}: expected master_weight_dtype of group {index} to be torch.float32, got "
            f"{dtype}. For bf16 parameters store_param_remainders=True keeps the same masters in "
            "16 bits each."
        )


def check_torch_only(owner: str, index: int, given: Mapping[str, Any]) -> None:
    """Rejects torch's choices of an implementation, and of a differentiable step."""
    for key in TORCH_ONLY:
        if given.get(key):
            reason = (
                f"The step of {owner} has no derivative: use a class of torch.optim."
                if key == "differentiable"
                else f"{owner} is always fused: leave {key} out."
            )
            raise ValueError(
                f"{owner}: expected {key} of group {index} to be False or None, "
                f"got {given[key]!r}. {reason}"
            )


def check_no_norm_groups(owner: str, index: int, given: Mapping[str, Any]) -> None:
    """Rejects as an option of a group what belongs to the whole optimizer."""
    if "norm_groups" in given:
        raise ValueError(
            f"{owner}: expected norm_groups as an argument of the optimizer, got one in group "
            f"{index}. The norm is that of all groups: give it beside them. In "
            f"ZeroRedundancyOptimizer, pass optimizer_class=functools.partial({owner}, "
            "norm_groups=[group])."
        )


def checked_write_back(owner: str, index: int, value: Any) -> bool | str:
    """Returns what a step stores in gradients: a bool, "unscaled" or "clipped"."""
    if isinstance(value, str) and value in ("unscaled", "clipped"):
        return value
    is_bool = type(value).__name__ in ("bool", "bool_")  # numpy's is another type
    if is_bool or (isinstance(value, Integral) and value in (0, 1)):
        return bool(value)
    raise TypeError(
        f"{owner}: expected write_back_grads of group {index} to be a bool, 'unscaled' or "
        f"'clipped', got {shown(value)}."
    )


def check_seed(owner: str, index: int, seed: Any) -> None:
    """Checks for a whole number in the range of the kernels."""
    where = f"{owner}: expected seed of group {index} to be"
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{where} a whole number, got {type(seed).__name__}.")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{where} at least 0 and less than 2^63, got {seed}.")


def check_state_dtype(
    owner: str, group: int, name: str, dtype: Any, params: Sequence[Tensor]
) -> None:
    """Checks the dtype of a state: fp64 for fp64 parameters, else fp32, bf16 or fp16."""
    if dtype is None:
        return
    where = f"{owner}: expected {name} of group {group} to be"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{where} None or a torch.dtype, got {type(dtype).__name__}.")
    for index, param in enumerate(params):
        if param.dtype == torch.float64:
            allowed, known = "torch.float64", dtype == torch.float64
        else:
            allowed = "torch.float32, torch.bfloat16 or torch.float16"
            known = dtype in (torch.float32, *HALF_DTYPES)
        if not known:
            raise ValueError(
                f"{where} None, {allowed} for params[{index}] of dtype {param.dtype}, got {dtype}."
            )
