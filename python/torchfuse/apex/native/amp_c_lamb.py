# SPDX-License-Identifier: BSD-3-Clause
"""The LAMB step of apex's amp_C.

Gradients are divided by ``max(1, global_grad_norm / max_grad_norm)`` before the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchfuse.apex.native._lists import TensorLists, check_wide_states, checked_lists
from torchfuse.apex.native._scalars import Scalar, clip_divisor, counts_before, learning_rate
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

    Unlike apex's function, this one does not write to the gradients.

    Args:
        chunk_size: ignored.
        noop_flag: 1-element int32, not read; set to 1 if a new parameter is not finite.
        tensor_lists: gradients, parameters, first moments, second moments.
        lr: learning rate.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        step: number of this step, starting at 1.
        bias_correction: if not 0, correct both moments for their initialization at zero.
        weight_decay: weight decay coefficient.
        grad_averaging: if not 0, the gradient enters the moment with 1 - beta1, else with 1.
        mode: 1 for decoupled weight decay, 0 for L2 regularization.
        global_grad_norm: norm over all gradients of the model.
        max_grad_norm: largest norm; 0 makes all gradients 0.
        use_nvlamb: use the trust ratio without weight decay, too. None: False.

    Raises:
        TypeError: for an entry that is not a tensor, or a flag that is not int32.
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
