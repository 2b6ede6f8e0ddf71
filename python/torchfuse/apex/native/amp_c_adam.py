# SPDX-License-Identifier: BSD-3-Clause
"""Adam steps of apex's amp_C.

Moments may be fp32, fp16 or bf16. For fp64 parameters, moments must be fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchfuse._C import fused_adam_
from torchfuse.apex.native._lists import (
    TensorLists,
    check_masters,
    check_wide_states,
    checked_lists,
)
from torchfuse.apex.native._scalars import (
    Scalar,
    as_flag,
    copy_unless,
    counts_before,
    learning_rate,
    on_device,
)
from torchfuse.ops import multi_tensor_unscale_

_LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Performs one Adam step on lists of tensors in place.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Ignored as in apex: non-finite gradients propagate.
        tensor_lists (Sequence): Gradients, parameters, first moments, second moments.
        lr (float | Tensor): Learning rate.
        beta1 (float): Decay rate of the first moment.
        beta2 (float): Decay rate of the second moment.
        eps (float): Term added to the denominator.
        step (int): Step number, starting at 1.
        mode (int): 1 for decoupled weight decay, 0 for L2 regularization.
        bias_correction (int): If not 0, correct both moments for the initialization with zeros.
        weight_decay (float): Weight decay coefficient.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adam
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)], [torch.zeros(3)]]
        >>> multi_tensor_adam(65536, flag, lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
        >>> param
        tensor([0.9000, 0.9000, 0.9000])
    """
    lists = checked_lists("multi_tensor_adam", noop_flag, tensor_lists, _LISTS)
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    _adam("multi_tensor_adam", lists, numbers)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: Scalar,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Scalar,
) -> None:
    """Performs one Adam step on lists of tensors in place, without synchronization.

    Arguments and errors are as for `multi_tensor_adam`, except that `lr` and `step` are 1-element
    tensors and nothing changes if `noop_flag` is not 0. `inv_scale` is a 1-element tensor with the
    reciprocal of the loss scale. As in apex, gradients are multiplied by `inv_scale` in place.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adam_capturable
        >>> flag, step = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)], [torch.zeros(3)]]
        >>> lr, inv_scale = torch.tensor(0.1), torch.tensor([0.5])
        >>> multi_tensor_adam_capturable(
        ...     65536, flag, lists, lr, 0.9, 0.999, 1e-8, step, 1, 1, 0.0, inv_scale
        ... )
        >>> param, grad
        (tensor([0.9000, 0.9000, 0.9000]), tensor([0.5000, 0.5000, 0.5000]))
    """
    function = "multi_tensor_adam_capturable"
    lists = checked_lists(function, noop_flag, tensor_lists, _LISTS)
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    _scaled_adam(function, noop_flag, lists, numbers, inv_scale)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: Scalar,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Scalar,
) -> None:
    """Performs one Adam step on fp32 masters and copies the rounded masters to the parameters.

    Arguments and errors are as for `multi_tensor_adam_capturable`, except that `tensor_lists` has a
    fifth list, the masters.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_adam_capturable_master
        >>> flag, step = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        >>> grad, param = torch.ones(2, 3, dtype=torch.bfloat16).unbind()
        >>> lists = [[grad], [param], [torch.zeros(3)], [torch.zeros(3)], [torch.ones(3)]]
        >>> lr, inv_scale = torch.tensor(0.1), torch.tensor([1.0])
        >>> multi_tensor_adam_capturable_master(
        ...     65536, flag, lists, lr, 0.9, 0.999, 1e-8, step, 1, 1, 0.0, inv_scale
        ... )
        >>> param, lists[4][0]
        (tensor([0.8984, 0.8984, 0.8984], dtype=torch.bfloat16), tensor([0.9000, 0.9000, 0.9000]))
    """
    function = "multi_tensor_adam_capturable_master"
    lists = checked_lists(function, noop_flag, tensor_lists, (*_LISTS, "masters"))
    grads, params, exp_avgs, exp_avg_sqs, masters = lists
    check_masters(function, "masters", masters)
    numbers = lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
    _scaled_adam(function, noop_flag, [grads, masters, exp_avgs, exp_avg_sqs], numbers, inv_scale)
    copy_unless(noop_flag, params, masters)


def _adam(
    function: str, lists: list[list[Tensor]], numbers: tuple[Any, ...], **scaling: Any
) -> None:
    """Performs a step; `numbers` are apex's arguments after the lists, in apex's order."""
    grads, params, exp_avgs, exp_avg_sqs = lists
    check_wide_states(function, params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if not params:
        return
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = numbers
    rate = learning_rate(function, lr, params[0].device)
    counts = counts_before(function, step, params)
    options: dict[str, Any] = {
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(eps),
        "weight_decay": float(weight_decay),
        "adam_w_mode": bool(mode),
        "bias_correction": bool(bias_correction),
    }
    fused_adam_(params, grads, exp_avgs, exp_avg_sqs, [], counts, [], **rate, **options, **scaling)


def _scaled_adam(
    function: str,
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    numbers: tuple[Any, ...],
    inv_scale: Scalar,
) -> None:
    """Performs a step unless the flag is set, then unscales the gradients."""
    factor = on_device(function, "inv_scale", inv_scale, noop_flag.device)
    scale = factor.reciprocal()
    _adam(function, lists, numbers, grad_scale=scale, found_inf=as_flag(noop_flag))
    # Unscale after the step, so that the step uses fp32 products rather than rounded gradients.
    unused = torch.zeros_like(factor)
    skipped = noop_flag.reshape(()).ne(0)
    multi_tensor_unscale_(lists[0], unused, factor.masked_fill(skipped, 1.0))
