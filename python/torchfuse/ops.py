# SPDX-License-Identifier: BSD-3-Clause
"""Typed and documented functions for torchfuse's operators.

Each function calls the operator with the same name in `torch.ops.torchfuse`, which torch.compile
traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["amp_update_scale_", "fused_adam_", "multi_tensor_l2_norm", "multi_tensor_unscale_"]


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    master_params: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Performs one Adam or AdamW step on tensor lists, in place.

    :class:`torchfuse.optimizers.FusedAdam` documents the formula, manages the states and has less
    overhead per step.

    Args:
        params (Sequence[Tensor]): Dense parameters with any strides; fp32, fp16, bf16 or fp64.
        grads (Sequence[Tensor]): Gradients with the parameters' sizes, in any of these dtypes.
            Never modified.
        exp_avgs (Sequence[Tensor]): First moments with the parameters' sizes and strides; fp32,
            bf16 or fp16, or fp64 for fp64 parameters. Moments are computed in fp32 (fp64) and
            rounded when stored.
        exp_avg_sqs (Sequence[Tensor]): Second moments, with the same requirements as `exp_avgs`.
            The dtype may differ from the first moments' dtype.
        max_exp_avg_sqs (Sequence[Tensor]): Maxima of the second moments, with the same requirements
            as `exp_avgs`; empty unless `amsgrad`.
        state_steps (Sequence[Tensor]): 0-dim fp32 step counts on the parameters' device, each in a
            separate element.
        master_params (Sequence[Tensor]): fp32 masters for 16-bit parameters, or empty. The step
            updates the master and rounds the result to the parameter. For bf16 parameters, int16
            remainders are also accepted, as in `FusedAdam(..., store_param_remainders=True)`.
        lr (float): Learning rate.
        beta1 (float): Decay rate for the first moment.
        beta2 (float): Decay rate for the second moment.
        weight_decay (float): Weight decay coefficient.
        eps (float): Added to the denominator.
        amsgrad (bool, default False): Use the running maximum of the second moment.
        maximize (bool, default False): Gradient ascent instead of descent.
        adam_w_mode (bool, default True): Use decoupled weight decay. Otherwise, weight decay is
            added to the gradient.
        bias_correction (bool, default True): Correct both moments for the initialization at zero.
        lr_tensor (Tensor | None, default None): 0-dim fp32 or fp64 tensor that replaces `lr`.
        grad_scale (Tensor | None, default None): 1-element fp32 loss scale. Gradients are
            multiplied by the reciprocal.
        found_inf (Tensor | None, default None): 1-element fp32 flag. If not 0, the step is skipped
            and changes nothing, including the step counts.

    Example:
        >>> import torch
        >>> from torchfuse.ops import fused_adam_
        >>> param, grad = torch.ones(3), torch.ones(3)
        >>> exp_avg, exp_avg_sq, step = torch.zeros(3), torch.zeros(3), torch.zeros(())
        >>> fused_adam_([param], [grad], [exp_avg], [exp_avg_sq], [], [step], [],
        ...             lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8)
        >>> param
        tensor([0.9000, 0.9000, 0.9000])
    """
    torch.ops.torchfuse.fused_adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        master_params,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
        lr_tensor=lr_tensor,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def multi_tensor_unscale_(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiplies every tensor by `inv_scale` in place and reports non-finite elements.

    Args:
        tensors (Sequence[Tensor]): Any mix of fp32, fp16, bf16 and fp64 tensors on one device.
        found_inf (Tensor): 1-element fp32 flag on the same device. Set to 1 if an element was not
            finite before the multiplication, and never cleared.
        inv_scale (Tensor): 1-element fp32 factor on the same device.

    Example:
        >>> import torch
        >>> from torchfuse.ops import multi_tensor_unscale_
        >>> tensors, found_inf = [torch.tensor([2.0, 4.0])], torch.zeros(())
        >>> multi_tensor_unscale_(tensors, found_inf, torch.tensor(0.5))
        >>> tensors[0], found_inf
        (tensor([1., 2.]), tensor(0.))
    """
    torch.ops.torchfuse.multi_tensor_unscale_(tensors, found_inf, inv_scale)


def multi_tensor_l2_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the L2 norm over all tensors, and whether an element is not finite, in one pass.

    The sum of squares cannot overflow. Results are bit-identical on every run and for any number of
    threads.

    Args:
        tensors (Sequence[Tensor]): Any mix of fp32, fp16, bf16 and fp64 tensors on one device.

    Returns:
        The norm and the flag (1 or 0), as 0-dim fp32 tensors on the same device. A backward pass
        through either of the results raises.

    Example:
        >>> import torch
        >>> from torchfuse.ops import multi_tensor_l2_norm
        >>> multi_tensor_l2_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        (tensor(5.), tensor(0.))
    """
    norm, found_inf = torch.ops.torchfuse.multi_tensor_l2_norm(tensors)
    return norm, found_inf


def amp_update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis_tracker: Tensor | None = None,
    hysteresis: int = 1,
    min_scale: float | None = None,
    max_scale: float | None = None,
    dynamic: bool = True,
    counts: Tensor | None = None,
    history: Tensor | None = None,
) -> None:
    """Updates a loss scale in place after a step, by torch.amp.GradScaler's rule.

    Args:
        scale (Tensor): 1-element fp32 loss scale.
        growth_tracker (Tensor): 1-element int32 count of consecutive steps without overflow. Reset
            to 0 when the scale grows.
        found_inf (Tensor): 1-element fp32 flag, not 0 if the step overflowed.
        growth_factor (float): Multiplies the scale after `growth_interval` steps without overflow.
        backoff_factor (float): Multiplies the scale after an overflow.
        growth_interval (int): Number of consecutive steps without overflow before the scale grows.
        hysteresis_tracker (Tensor | None, default None): 1-element int32 count of further
            overflows, without a successful step in between, until the scale backs off. Required if
            `hysteresis` > 1.
        hysteresis (int, default 1): Number of consecutive overflows after which the scale backs
            off.
        min_scale (float | None, default None): Lower bound when the scale backs off. None means 0.
        max_scale (float | None, default None): Upper bound when the scale grows. None means the
            largest fp32 number.
        dynamic (bool, default True): If False, only `counts` and `history` are written.
        counts (Tensor | None, default None): int64 ``[3]``: number of updates, number of overflows,
            and whether the last update had an overflow.
        history (Tensor | None, default None): fp32 ``[n, 2]``, a ring buffer for the last n
            updates; requires `counts`. Row ``updates % n`` receives the scale before the update and
            whether there was an overflow.

    Example:
        >>> import torch
        >>> from torchfuse.ops import amp_update_scale_
        >>> scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
        >>> amp_update_scale_(scale, tracker, torch.tensor(1.0),
        ...                   growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
        >>> scale
        tensor(4.)
    """
    torch.ops.torchfuse.amp_update_scale_(
        scale,
        growth_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis_tracker=hysteresis_tracker,
        hysteresis=hysteresis,
        min_scale=min_scale,
        max_scale=max_scale,
        dynamic=dynamic,
        counts=counts,
        history=history,
    )
