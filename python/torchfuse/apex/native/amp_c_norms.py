# SPDX-License-Identifier: BSD-3-Clause
"""Norms in apex's amp_C.

Differences from apex: the norm over all tensors cannot overflow in an intermediate sum,
norms are computed even if the flag is already set, and the flag is set if an element or the norm is
not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchfuse._C import l2norm_on_host, multi_tensor_l2_norm
from torchfuse.apex.native._lists import TensorLists, checked_lists
from torchfuse.apex.native._scalars import in_any_mode, on_device
from torchfuse.apex.native.amp_c_scale import set_flag

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
