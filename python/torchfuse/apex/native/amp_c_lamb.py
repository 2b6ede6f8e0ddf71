# SPDX-License-Identifier: BSD-3-Clause
"""apex's LAMB step in amp_C, as one function and as two stages with norms computed in between.

The step and its first stage divide gradients by ``max(1, global_grad_norm / max_grad_norm)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchfuse.apex.native._arguments import (
    Scalar,
    TensorLists,
    check_vector,
    check_wide_states,
    checked_lists,
    clip_divisor,
    counts_before,
    learning_rate,
    on_device,
)
from torchfuse.apex.native.amp_c_scale import set_flag
from torchfuse.ops import multi_tensor_l2_norm

_LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Scalar,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Scalar,
    max_grad_norm: Scalar,
    use_nvlamb: bool | None = None,
) -> None:
    """Performs one LAMB step on lists of tensors in place.

    Unlike apex's function, this function does not modify the gradients.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Not read; set to 1 if a new parameter is not finite.
        tensor_lists (Sequence): Gradients, parameters, first moments, second moments.
        lr (float | Tensor): Learning rate.
        beta1 (float): Decay rate of the first moment.
        beta2 (float): Decay rate of the second moment.
        eps (float): Term added to the denominator.
        step (int): Step number, starting at 1.
        bias_correction (int): If not 0, correct both moments for the initialization with zeros.
        weight_decay (float): Weight decay coefficient.
        grad_averaging (int): If not 0, the gradient enters the moment with weight 1 - beta1,
            otherwise with weight 1.
        mode (int): 1 for decoupled weight decay, 0 for L2 regularization.
        global_grad_norm (float | Tensor): Norm over all gradients in the model.
        max_grad_norm (float | Tensor): Maximum norm. 0 sets all gradients to 0.
        use_nvlamb (bool | None, default None): Apply the trust ratio even if `weight_decay` is 0.
            None: False.

    Raises:
        TypeError: if an entry is not a tensor or the flag is not int32.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_lamb
        >>> flag, norm = torch.zeros(1, dtype=torch.int32), torch.tensor([1.0])
        >>> grad, param = torch.full((4,), 0.5), torch.ones(4)
        >>> lists = [[grad], [param], [torch.zeros(4)], [torch.zeros(4)]]
        >>> multi_tensor_lamb(
        ...     65536, flag, lists, 0.5, 0.9, 0.999, 1e-6, 1, 1, 0.0, 1, 1, norm, 1.0, True
        ... )
        >>> param
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    function = "multi_tensor_lamb"
    lists = checked_lists(function, noop_flag, tensor_lists, _LISTS)
    grads, params, exp_avgs, exp_avg_sqs = lists
    check_wide_states(function, params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if not params:
        return
    device = params[0].device
    norms = {"global_grad_norm": global_grad_norm, "max_grad_norm": max_grad_norm}
    torch.ops.torchfuse.fused_lamb_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        counts_before(function, step, params),
        [],
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(weight_decay),
        eps=float(eps),
        bias_correction=bool(bias_correction),
        adam_w_mode=bool(mode),
        grad_averaging=bool(grad_averaging),
        use_nvlamb=bool(use_nvlamb),
        grad_scale=clip_divisor(function, norms, device),
        **learning_rate(function, lr, device),
    )
    set_flag(noop_flag, multi_tensor_l2_norm(params)[1])


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    global_grad_norm: Scalar,
    max_global_grad_norm: Scalar,
) -> None:
    """Performs a LAMB step's first stage: changes the moments in place and writes the updates.

    With the clipped gradient g and t = step + 1:
    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2 and
    update = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay p.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Ignored as in apex.
        tensor_lists (Sequence): Gradients, parameters, first moments, second moments, updates. The
            last three lists are written.
        per_tensor_decay (Tensor): Weight decay per parameter, fp32 of shape ``[T]``.
        step (int): Number of earlier steps.
        beta1 (float): Decay rate of the first moment.
        beta2 (float): Decay rate of the second moment.
        eps (float): Term added to the denominator.
        global_grad_norm (float | Tensor): Norm over all gradients in the model.
        max_global_grad_norm (float | Tensor): Maximum norm.

    Raises:
        TypeError: if an entry is not a tensor, or a tensor's dtype differs from the list above.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_lamb_stage1_cuda
        >>> flag, decay, norm = torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.ones(1)
        >>> update = torch.empty(4)
        >>> lists = [[torch.full((4,), 0.5)], [torch.ones(4)], [torch.zeros(4)], [torch.zeros(4)]]
        >>> multi_tensor_lamb_stage1_cuda(
        ...     65536, flag, [*lists, [update]], decay, 0, 0.9, 0.999, 1e-6, norm, 1.0
        ... )
        >>> update
        tensor([1.0000, 1.0000, 1.0000, 1.0000])
    """
    function = "multi_tensor_lamb_stage1_cuda"
    lists = checked_lists(function, noop_flag, tensor_lists, (*_LISTS, "updates"))
    grads, params, exp_avgs, exp_avg_sqs, updates = lists
    check_vector(function, "per_tensor_decay", per_tensor_decay, params)
    if not params:
        return
    beta1, beta2, count = float(beta1), float(beta2), int(step) + 1
    # Uses torch's foreach ops; there is no fused kernel yet.
    norms = {"global_grad_norm": global_grad_norm, "max_global_grad_norm": max_global_grad_norm}
    divisor = clip_divisor(function, norms, params[0].device)
    clipped = torch._foreach_mul(_wide(grads), divisor.reciprocal())
    first = torch._foreach_mul(_wide(exp_avgs), beta1)
    torch._foreach_add_(first, clipped, alpha=1.0 - beta1)
    second = torch._foreach_mul(_wide(exp_avg_sqs), beta2)
    torch._foreach_addcmul_(second, clipped, clipped, 1.0 - beta2)
    torch._foreach_copy_(exp_avgs, first)
    torch._foreach_copy_(exp_avg_sqs, second)
    torch._foreach_div_(second, 1.0 - beta2**count)
    torch._foreach_sqrt_(second)
    torch._foreach_add_(second, float(eps))
    torch._foreach_div_(first, 1.0 - beta1**count)
    torch._foreach_div_(first, second)
    torch._foreach_add_(first, torch._foreach_mul(_wide(params), per_tensor_decay.unbind()))
    torch._foreach_copy_(updates, first)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: Scalar,
    weight_decay: float,
    use_nvlamb: bool | None = None,
) -> None:
    """Performs a LAMB step's second stage: param -= lr ratio update.

    The ratio is the parameter norm divided by the update norm. The ratio is 1 if either norm is 0
    or, without `use_nvlamb`, if `weight_decay` is 0.

    Args:
        chunk_size (int): Ignored.
        noop_flag (Tensor): 1-element int32. Ignored as in apex.
        tensor_lists (Sequence): Parameters and updates.
        per_tensor_param_norm (Tensor): Parameter norms, fp32 of shape ``[T]``.
        per_tensor_update_norm (Tensor): Update norms, fp32 of shape ``[T]``.
        lr (float | Tensor): Learning rate.
        weight_decay (float): The first stage's weight decay coefficient.
        use_nvlamb (bool | None, default None): Apply the ratio even if `weight_decay` is 0. None:
            False.

    Raises:
        TypeError: if an entry is not a tensor, or a tensor's dtype differs from the list above.
        ValueError: for tensors that do not match, naming list and index.

    Example:
        >>> import torch
        >>> from torchfuse.apex.native.amp_c import multi_tensor_lamb_stage2_cuda
        >>> flag, param = torch.zeros(1, dtype=torch.int32), torch.ones(4)
        >>> norms = torch.tensor([2.0]), torch.tensor([4.0])
        >>> lists = [[param], [torch.full((4,), 2.0)]]
        >>> multi_tensor_lamb_stage2_cuda(65536, flag, lists, *norms, 0.5, 0.01)
        >>> param
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    function = "multi_tensor_lamb_stage2_cuda"
    params, updates = checked_lists(function, noop_flag, tensor_lists, ("params", "updates"))
    check_vector(function, "per_tensor_param_norm", per_tensor_param_norm, params)
    check_vector(function, "per_tensor_update_norm", per_tensor_update_norm, params)
    if not params:
        return
    # Uses torch's foreach ops; there is no fused kernel yet.
    rates = on_device(function, "lr", lr, params[0].device).repeat(len(params))
    if use_nvlamb or float(weight_decay) != 0.0:
        both = per_tensor_param_norm.ne(0) & per_tensor_update_norm.ne(0)
        rates = rates * torch.where(both, per_tensor_param_norm / per_tensor_update_norm, 1.0)
    changes = torch._foreach_mul(_wide(updates), rates.unbind())
    torch._foreach_copy_(params, torch._foreach_sub(_wide(params), changes))


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors in fp32 (fp64 for fp64 tensors), without copying unless needed."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return [tensor.to(dtype) for tensor in tensors]
